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

from specker.kernels.residual_merge import add_norm
from specker.model.cache import KVCache, Rows
from specker.model.decoder import Final
from specker.model.heads import DraftHead
from specker.model.rows import begin
from specker.runtime.round.batch import Batch
from specker.runtime.round.drafter import Accepted, Draft
from specker.runtime.round.lm_head import LMHead
from specker.runtime.round.state import Request
from specker.runtime.strategies.eagle.pairs import BLOCK, WAITING, HeadDrafter
from specker.runtime.strategies.growth import grown


class MTPDrafter(HeadDrafter):
    """See above. The host places all rounds with a draft, whose rows differ by head."""

    synchronous = True  # `accept` reads the target's rows on the host's time, also those of a round of fixed shape

    def __init__(self, heads: list[DraftHead], cache: KVCache, head: LMHead, width: int = 1):
        """`cache`: with a layer for each head. `width`: nodes per tree level; 1 drafts a chain."""
        super().__init__(heads[0], cache, head)
        self.heads, self.tokens_ahead, self.width = heads, len(heads), width
        self.layers = [cache.layer(k) for k in range(len(heads))]
        model, slots = self.model, len(cache.exact_len)
        self.last = torch.zeros(slots, model.config.hidden_size, dtype=model.dtype, device=model.device)
        # By slot and head: the columns that hold true pairs, and the features [count, H] of the next ones, which wait
        # for tokens. After the last head, what it passed on at its last column.
        self.done: list[list[int]] = [[] for _ in range(slots)]
        self.features: list[list[Tensor]] = [[] for _ in range(slots)]
        for slot in range(slots):
            self.reset(slot)
        # Of the draft at hand: its steps so far, their tokens [n, count], what the last step passed on [n, rows, H].
        self._steps, self._passed = 0, self.last[:0]
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
        features = torch.stack([self.features[slot][k or last + 1][-1] for slot in range(n)]).unsqueeze(1)
        if self._steps == 1:
            self._tokens = tokens
        else:
            self._tokens = torch.cat((self._tokens, tokens), 1)
            features = torch.cat((features, self._passed), 1)
        count = self._tokens.shape[1]
        if parents is not None:
            each = torch.arange(n, dtype=torch.int64, device=tokens.device).unsqueeze(1)
            features = features[each, parents[:, :count]]
        lengths = batch.lengths_within(self.limit)
        rows, embedded = begin(self.heads[k].model, self.cache, lengths, k + 2, 1, self._tokens, parents)
        output, final = self._through(k, rows, features.flatten(0, 1), embedded)
        self._passed = (output if self.heads[k].spec.chained or k == last else features).view(n, count, -1)
        final = Final(final.rows.view(n, count, -1)[:, -level:].flatten(0, 1), final.normed)
        positions = rows.positions.view(n, count)[:, -level:].flatten()
        # The pair of column t predicts the draw of position t + k + 1. Greedy draws read none.
        return final, positions if batch.shape.draws == "greedy" else positions + k + 1

    # --- true pairs

    def _through(self, k: int, rows: Rows, features: Tensor, embedded: Tensor) -> tuple[Tensor, Final]:
        """Forward pairs through head k, at most BLOCK at once, or those of one sequence. Returns its output, and the
        rows for the LM head, which has head 0's norm."""
        head = self.heads[k]
        if len(features) > BLOCK and len(rows.kv_len) > 1:
            parts = [self._through(k, block, features[at], embedded[at]) for at, block in rows.blocks(BLOCK)]
            finals = torch.cat([final.rows for _, final in parts])
            return torch.cat([output for output, _ in parts]), Final(finals, parts[0][1].normed)
        output, final = head.forward(self.layers[k], rows, head.pairs(features, embedded, rows.positions))
        if k and not final.normed:
            final = Final(add_norm(final.rows, None, head.model.norm, head.model.config.rms_norm_eps)[1], True)
        return output, final

    def read(self, slot: int, request: Request, first: int, rows: dict[int, Tensor]) -> None:
        """Run the pairs of a chunk of the prompt."""
        self._wait(slot, torch.stack([rows[depth] for depth in self.aux_layers], 1))
        self._run(slot, request.token_ids)

    def accept(self, batch: Batch, draft: Draft, accepted: Accepted) -> None:
        """The pairs of accepted tokens wait for the next draft."""
        for slot, (request, path) in enumerate(zip(batch.requests, accepted.paths, strict=True)):
            if path:
                self._wait(slot, batch.aux_hidden_states(draft.size, slot, path))
                if len(self.features[slot][0]) > WAITING:
                    self._run(slot, request.token_ids)

    def _wait(self, slot: int, rows: Tensor) -> None:
        self.features[slot][0] = torch.cat((self.features[slot][0], self.reading.features(rows)))

    def _run(self, slot: int, text: list[int]) -> None:
        for k in range(len(self.heads)):
            while count := min(BLOCK, self._ready(slot, k, text)):
                self._pairs_of(k, slot, [text], [count])

    def run_all(self, requests: list[Request]) -> None:
        texts = [request.token_ids for request in requests]
        for k in range(len(self.heads)):
            counts = [self._ready(slot, k, text) for slot, text in enumerate(texts)]
            if all(counts) and sum(counts) <= BLOCK:
                self._pairs_of(k, 0, texts, counts)
            else:
                for slot, text in enumerate(texts):
                    while count := min(BLOCK, self._ready(slot, k, text)):
                        self._pairs_of(k, slot, [text], [count])

    def _ready(self, slot: int, k: int, text: list[int]) -> int:
        """Pairs that head k can run: those with a feature and a token."""
        return max(0, min(len(self.features[slot][k]), len(text) - 1 - k - self.done[slot][k]))

    def _pairs_of(self, k: int, first: int, texts: list[list[int]], counts: list[int]) -> None:
        """Forward the next true pairs of head k in slots first, first + 1, .., which have `texts`."""
        slots = range(first, first + len(texts))
        starts = [self.done[slot][k] for slot in slots]
        spans = list(zip(slots, starts, counts, strict=True))
        rows = self.cache.after(starts, counts, slot=first)
        features = torch.cat([self.features[slot][k][:count] for slot, _, count in spans])
        ids = [
            token
            for text, (_, start, count) in zip(texts, spans, strict=True)
            for token in text[start + k + 1 : start + k + 1 + count]
        ]
        embedded = self.heads[k].model.embed_tokens(torch.tensor(ids, dtype=torch.int64, device=self.last.device))
        output, final = self._through(k, rows, features, embedded)
        last = k == len(self.heads) - 1
        passed = (output if self.heads[k].spec.chained or last else features).split(counts)
        for (slot, _, count), more in zip(spans, passed, strict=True):
            waiting = self.features[slot]
            waiting[k] = waiting[k][count:]
            waiting[k + 1] = more[-1:] if last else torch.cat((waiting[k + 1], more))
            self.done[slot][k] += count
            self.cache.exact_len[slot] = self.done[slot][-1]
        if k == 0:
            ends = rows.cu_rows[1:].long() - 1
            torch.index_select(final.rows, 0, ends, out=self.last[first : first + len(texts)])

    def move(self, source: int, target: int) -> None:
        self.done[target], self.features[target] = self.done[source], self.features[source]
        self.last[target] = self.last[source]
        self.reset(source)

    def reset(self, slot: int) -> None:
        """Forget the sequence. Of one that takes over K/V, the same columns of all heads are true."""
        self.done[slot] = [self.cache.exact_len[slot]] * len(self.heads)
        self.features[slot] = [self.last.new_empty(0, self.last.shape[1])] * (len(self.heads) + 1)
