"""Drafters that run a head on the target's hidden states: token by token, or in one pass."""

import torch
from torch import Tensor

from specker.cpu import Committed
from specker.model.cache import KVCache
from specker.model.decoder import Final
from specker.model.heads import DraftHead
from specker.runtime.control.policy import WHOLE, Offer, Reading
from specker.runtime.round.batch import Batch
from specker.runtime.round.drafter import Draft
from specker.runtime.round.lm_head import LMHead
from specker.runtime.round.state import Request
from specker.runtime.strategies.eagle.pairs import PairDrafter
from specker.runtime.strategies.growth import compiled_chain, grown, guess, readable


class EagleDrafter(PairDrafter):
    """Drafts chains or trees step by step: a drafted token's feature is the head's output of the step before."""

    def __init__(self, reading: DraftHead, cache: KVCache, head: LMHead, width: int = 1):
        """`width`: nodes per tree level; 1 drafts a chain."""
        super().__init__(reading, cache, head)
        self.width = width
        self._output = self.output  # [n * width, H], of the last step

    def prepare(self, requests: list[Request]) -> Offer:
        offer = super().prepare(requests)
        return Offer(room=offer.room, fixes=lambda budget: all(len(request.token_ids) > 1 for request in requests))

    def advance(self, requests: list[Request], reading: Reading = WHOLE, fixed: bool = False) -> int:
        """Nothing is missing. But pairs that wait must run before a draft that the device places."""
        if fixed:
            self.run_each(requests)
        return 0

    def propose(self, batch: Batch) -> Draft:
        if self.lacks_pairs(batch):
            return Draft()
        self.head.follow(batch.requests)
        if self.width > 1 or batch.fixed or not readable(self.model, self.head):
            return grown(batch, self, self.width)
        # A pair's column is the one before its token's.
        columns = [len(request.token_ids) - 1 for request in batch.requests]
        # A chain runs the pairs that wait, but those at position 0, whose embedding may be 0 (HeadSpec.zeroed).
        waiting = self.take(batch.requests) if all(self.cache.exact_len[: batch.n]) else None
        if waiting is None:
            self.run_all(batch.requests)
            rows, tokens, features = self.cache.after(columns, [1] * batch.n), None, None
        else:
            rows, tokens, features = waiting
        committed = Committed(tokens, features, self.output[: batch.n], self.reading.raw)
        return compiled_chain(batch, self, rows, committed, columns, normed=self.reading.normed)

    # --- growth.Steps

    def start(self, batch: Batch) -> tuple[Final, Tensor]:
        out = super().start(batch)
        self._pass_on(batch, self.output[: batch.n])
        return out

    def step(self, batch: Batch, first: int, tokens: Tensor, parents: Tensor | None = None) -> tuple[Final, Tensor]:
        """A pair's column is the one before its token's, so row 0 of the window is the root's pair, 2 columns before
        the end of the text."""
        features = batch.memory.get("hidden", batch.n) if batch.confident else self._output
        lengths = batch.lengths_within(self.limit)
        rows, pairs = self.reading.begin(self.cache, lengths, 2, first, tokens, features, parents)
        output, final = self.reading.forward(self.cache, rows, pairs)
        self._pass_on(batch, output)
        # A pair predicts the draw of the next position. Greedy draws read none.
        return final, rows.positions if batch.shape.draws == "greedy" else rows.positions + 1

    def _pass_on(self, batch: Batch, output: Tensor) -> None:
        """Pass the head's output to the next step. Drafts that end by confidence are several graph segments."""
        if batch.confident:
            batch.memory.put("hidden", output)
        else:
            self._output = output


class ParallelDrafter(PairDrafter):
    """Drafts all tokens in one pass with a P-EAGLE head (arXiv 2602.01469).

    The pair of the root is followed by K - 1 pairs of the mask token and the mask's feature, a chain like any other.
    Pair j guesses token j + 1 of the draft without knowing the tokens before it. Their K/V is dropped after the round.
    The head was never trained on its own outputs, so it drafts no chain step by step.
    """

    def __init__(self, reading: DraftHead, cache: KVCache, head: LMHead):
        super().__init__(reading, cache, head)
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
        draft = Draft(depth, depth=depth)
        guess(batch, draft, self.head, final, positions)
        return draft
