"""The drafter of a P-EAGLE head (arXiv 2602.01469), which drafts all tokens in one pass.

The pair of the root is followed by K - 1 pairs of the mask token and the mask's feature, a chain like any other. Pair j
guesses token j + 1 of the draft without knowing the tokens before it. Their K/V is dropped after the round. The head
was never trained on its own outputs, so it drafts no chain step by step.
"""

import torch

from specker.model.cache import KVCache
from specker.model.decoder import Final
from specker.model.heads import ReadingHead
from specker.runtime.control.policy import Budget
from specker.runtime.round.drafter import Draft
from specker.runtime.round.lm_head import Head
from specker.runtime.round.round import Round
from specker.runtime.strategies.eagle.drafter import EagleDrafter


class ParallelDrafter(EagleDrafter):
    """See above. Otherwise as EagleDrafter: accepted tokens run again with the target's true hidden states."""

    def __init__(self, reading: ReadingHead, cache: KVCache, head: Head, width: int = 1, depth: int = 0):
        super().__init__(reading, cache, head, width, depth)
        self.mask = reading.mask()

    def fixed(self, length: int, budget: Budget) -> bool:
        return False

    def draft(self, r: Round) -> Draft:
        """Draft for all sequences; nothing if one has no pair yet, as after a prompt of one token."""
        n, depth = len(r.requests), min(r.budget.depth, r.budget.nodes)
        if any(len(request.text) < 2 for request in r.requests):
            return Draft()
        self.head.follow(r.requests)
        final, positions = self._catch_up(r)
        if depth > 1:
            rows = self.cache.place(r.lengths, 1, 0, depth - 1)
            feature, embedded = (x.expand(n * (depth - 1), -1).contiguous() for x in self.mask)
            pairs = self.reading.pairs(feature, embedded, rows.positions)
            _, masks = self.reading.forward(self.cache, rows, *pairs)
            each = (x.view(n, depth - 1, *x.shape[1:]) for x in (masks.rows, rows.positions + 1))
            firsts = final.rows, positions
            joined = [torch.cat((x.unsqueeze(1), y), 1).flatten(0, 1) for x, y in zip(firsts, each, strict=True)]
            final, positions = Final(joined[0], masks.normed), joined[1]
        ids, logits, lse = self.head.ranked(final, 1, r.draws, positions)
        r.window[:, 1 : depth + 1] = ids.view(n, depth)
        return self._ended(r, depth, (logits[:, 0] - lse).view(n, depth))

    def _ended(self, r: Round, depth: int, scores: torch.Tensor) -> Draft:
        """The draft, which policies may end by confidence. scores: log-probabilities [n, depth]."""
        draft = Draft(depth, depth=depth)
        if r.confident:
            for step, confidence in enumerate(scores.exp().T.tolist()):
                draft.size = draft.depth = step + 1
                if not draft.vote(r.requests, confidence):
                    break
        if r.traced:
            draft.scores = list(scores[:, : draft.size].split(1, 1))
        return draft
