"""The drafter of a P-EAGLE head (arXiv 2602.01469), which drafts all tokens in one pass.

The pair of the root is followed by K - 1 pairs of the mask token and the mask's feature, a chain like any other. Pair j
guesses token j + 1 of the draft without knowing the tokens before it. Their K/V is dropped after the round. The head
was never trained on its own outputs, so it drafts no chain step by step.
"""

import torch

from specker.model.cache import KVCache
from specker.model.decoder import Final
from specker.model.heads import DraftHead
from specker.runtime.round.batch import Batch
from specker.runtime.round.drafter import Draft
from specker.runtime.round.lm_head import LMHead
from specker.runtime.strategies.eagle.head_drafter import HeadDrafter
from specker.runtime.strategies.eagle.pairs import Pairs


class ParallelDrafter(HeadDrafter):
    def __init__(self, reading: DraftHead, cache: KVCache, head: LMHead, depth: int = 0):
        """`depth`: length of the longest draft."""
        super().__init__(reading, cache, head, Pairs(reading, cache, depth))
        self.mask = reading.mask()

    def propose(self, batch: Batch) -> Draft:
        n, depth = len(batch.requests), min(batch.budget.depth, batch.budget.nodes)
        if self.lacks_pairs(batch):
            return Draft()
        self.head.follow(batch.requests)
        final, positions = self.start(batch)
        if depth > 1:
            rows = self.cache.place(batch.lengths, 1, 0, depth - 1)
            feature, embedded = (x.expand(n * (depth - 1), -1).contiguous() for x in self.mask)
            pairs = self.reading.pairs(feature, embedded, rows.positions)
            _, masks = self.reading.forward(self.cache, rows, pairs)
            each = (x.view(n, depth - 1, *x.shape[1:]) for x in (masks.rows, rows.positions + 1))
            firsts = final.rows, positions
            joined = [torch.cat((x.unsqueeze(1), y), 1).flatten(0, 1) for x, y in zip(firsts, each, strict=True)]
            final, positions = Final(joined[0], masks.normed), joined[1]
        ids, logits, lse = self.head.ranked(final, 1, batch.draws, positions)
        batch.window[:, 1 : depth + 1] = ids.view(n, depth)
        scores = (logits[:, 0] - lse).view(n, depth)
        draft = Draft(depth, depth=depth)
        if batch.confident:
            draft.end(batch.requests, scores.exp())
        if batch.traced:
            draft.scores = list(scores[:, : draft.size].split(1, 1))
        return draft
