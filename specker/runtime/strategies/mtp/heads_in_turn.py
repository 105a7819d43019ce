"""The drafter of several MTP heads in turn (DeepSeek-V3, arXiv 2412.19437, section 2.2).

Heads are counted from 0. Head k at column t reads a feature and the embedding of token t + k + 1, and predicts token
t + k + 2. The feature of head 0 is the target's row t. Each head passes a feature on to the next one, at the same
column: its own output, or where all heads read the target's rows (`HeadSpec.chained`) the feature that it read. Each
head has a layer of the cache, whose column t holds its pair of column t. In a text of L tokens head k has the pairs of
columns 0 .. L - 2 - k; the next one waits for a token.

Step i of a draft is head i mod n's. It runs the pairs that the i drafted tokens complete, and the last one predicts the
next token:

    step 0    head 0, nothing to run: it has read the root          -> token L
    step 1    head 1, column L - 2 with token L                     -> token L + 1
    step 2    head 2, columns L - 3 and L - 2 with L and L + 1      -> token L + 2

After the last head the first one goes on as an EAGLE head does, with the last head's outputs in place of the target's
rows. The K/V of drafted tokens is dropped after the round, and accepted tokens run through every head with true
features.
"""

import torch
from torch import Tensor

from specker.model.cache import KVCache
from specker.model.decoder import Final
from specker.model.heads import DraftHead
from specker.model.rows import begin
from specker.runtime.round.batch import Batch
from specker.runtime.round.drafter import Draft
from specker.runtime.round.lm_head import LMHead
from specker.runtime.strategies.eagle.head_drafter import HeadDrafter
from specker.runtime.strategies.growth import grown
from specker.runtime.strategies.mtp.pairs import PairsInTurn


class MTPDrafter(HeadDrafter):
    """See above. The host places all rounds with a draft, whose rows differ by head."""

    pairs: PairsInTurn
    synchronous = True  # `accept` reads the target's rows on the host's time, also those of a round of fixed shape

    def __init__(self, heads: list[DraftHead], cache: KVCache, head: LMHead, width: int = 1):
        """`cache`: with a layer for each head. `width`: nodes per tree level; 1 drafts a chain."""
        super().__init__(heads[0], cache, head, PairsInTurn(heads, cache))
        self.heads, self.tokens_ahead, self.width = heads, len(heads), width
        # Of the draft at hand: its steps so far, their tokens [n, count], what the last step passed on [n, rows, H].
        self._steps, self._passed = 0, self.pairs.last[:0]
        self._tokens = torch.empty(0, dtype=torch.int64, device=self._passed.device)

    def propose(self, batch: Batch) -> Draft:
        if self.lacks_pairs(batch):
            return Draft()
        self.head.follow(batch.requests)
        return grown(batch, self, self.width)

    # --- growth.Steps

    def start(self, batch: Batch) -> tuple[Final, Tensor]:
        self._steps = 0
        return super().start(batch)

    def step(self, batch: Batch, first: int, tokens: Tensor, parents: Tensor | None = None) -> tuple[Final, Tensor]:
        """Run all drafted tokens through the head whose turn it is: its K/V of the earlier ones is missing, too."""
        n, level, last = batch.n, tokens.shape[1], len(self.heads) - 1
        self._steps += 1
        k = self._steps % len(self.heads)
        # Row 0 is the last true pair, whose feature the head before has passed on.
        features = torch.stack([self.pairs.features[slot][k or last + 1][-1] for slot in range(n)]).unsqueeze(1)
        if self._steps == 1:
            self._tokens = tokens
        else:
            self._tokens = torch.cat((self._tokens, tokens), 1)
            features = torch.cat((features, self._passed), 1)
        count = self._tokens.shape[1]
        if parents is not None:
            each = torch.arange(n, dtype=torch.int64, device=tokens.device).unsqueeze(1)
            features = features[each, parents[:, :count]]
        rows, embedded = begin(self.heads[k].model, self.cache, self.lengths(batch), k + 2, 1, self._tokens, parents)
        output, final = self.pairs.through(k, rows, features.flatten(0, 1), embedded)
        self._passed = (output if self.heads[k].spec.chained or k == last else features).view(n, count, -1)
        final = Final(final.rows.view(n, count, -1)[:, -level:].flatten(0, 1), final.normed)
        positions = rows.positions.view(n, count)[:, -level:].flatten()
        # The pair of column t predicts the draw of position t + k + 1. Greedy draws read none.
        return final, positions if batch.shape.draws == "greedy" else positions + k + 1
