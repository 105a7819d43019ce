"""Drafters that run a head on the target's hidden states."""

import torch
from torch import Tensor

from specker.cpu import Committed
from specker.model.cache import KVCache, Lengths
from specker.model.decoder import Final, Model
from specker.model.heads import DraftHead
from specker.runtime.control.policy import UNLIMITED, Offer
from specker.runtime.round.batch import Batch
from specker.runtime.round.drafter import Accepted, Draft, Drafter
from specker.runtime.round.lm_head import LMHead
from specker.runtime.round.state import Request
from specker.runtime.strategies.eagle.pairs import HeadPairs, Pairs
from specker.runtime.strategies.growth import compiled_chain, grown, readable


class HeadDrafter(Drafter):
    """A drafter whose head reads the target's hidden rows. `pairs` keeps what the head made of each text."""

    model: Model
    cache: KVCache
    head: LMHead
    source = "head"

    def __init__(self, reading: DraftHead, cache: KVCache, head: LMHead, pairs: HeadPairs):
        self.reading, self.model, self.cache, self.head, self.pairs = reading, reading.model, cache, head, pairs
        self.aux_layers = reading.spec.aux_layers
        self.limit = min(self.model.config.max_context, cache.capacity)

    def prepare(self, requests: list[Request]) -> Offer:
        return Offer(room=[self.cache.capacity - len(request.token_ids) for request in requests])

    def lacks_pairs(self, batch: Batch) -> bool:
        """Whether a text has no pair yet, as after a prompt of one token: then nothing can be drafted."""
        return not batch.fixed and any(len(request.token_ids) <= self.tokens_ahead for request in batch.requests)

    def lengths(self, batch: Batch) -> Lengths:
        """The texts' lengths for placing drafts, clamped to the head's context."""
        return batch.lengths if isinstance(batch.lengths, Tensor) else [min(n, self.limit) for n in batch.lengths]

    def start(self, batch: Batch) -> tuple[Final, Tensor]:
        """Forward the pairs that wait. Returns the rows for the first draft tokens [n, H] and the roots' positions."""
        if not batch.fixed:
            self.pairs.run_all(batch.requests)
        lengths = batch.lengths
        if not isinstance(lengths, Tensor):
            lengths = torch.tensor(lengths, dtype=torch.int64, device=self.pairs.last.device)
        final = Final(self.pairs.last[: batch.n], self.reading.normed)
        return final, lengths if batch.shape.draws == "greedy" else lengths - 1  # greedy draws read no position

    def accept(self, batch: Batch, draft: Draft, accepted: Accepted) -> None:
        """What the head wrote for draft tokens is dropped; accepted tokens run again with true features."""
        self.pairs.accept(batch, draft, accepted)

    def accept_on_device(self, batch: Batch, draft: Draft) -> None:
        self.pairs.accept_on_device(batch, draft)

    def read(self, slot: int, request: Request, first: int, rows: dict[int, Tensor]) -> None:
        self.pairs.read(slot, request, rows)

    def move(self, source: int, target: int) -> None:
        self.pairs.move(source, target)

    def reset(self, slot: int) -> None:
        self.pairs.reset(slot)


class EagleDrafter(HeadDrafter):
    """Drafts chains or trees step by step: a drafted token's feature is the head's output of the step before."""

    pairs: Pairs

    def __init__(self, reading: DraftHead, cache: KVCache, head: LMHead, width: int = 1, depth: int = 0):
        """`width`: nodes per tree level; 1 drafts a chain. `depth`: length of the longest draft."""
        super().__init__(reading, cache, head, Pairs(reading, cache, depth))
        self.width = width
        self._output = self.pairs.output  # [n * width, H], of the last step

    def prepare(self, requests: list[Request]) -> Offer:
        offer = super().prepare(requests)
        return Offer(room=offer.room, fixes=lambda budget: all(len(request.token_ids) > 1 for request in requests))

    def advance(self, requests: list[Request], most: int = UNLIMITED, fixed: bool = False) -> int:
        """Nothing is missing. But pairs that wait must run before a draft that the device places."""
        if fixed:
            self.pairs.run_each(requests)
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
        waiting = self.pairs.take(batch.requests) if all(self.cache.exact_len[: batch.n]) else None
        if waiting is None:
            self.pairs.run_all(batch.requests)
            rows, tokens, features = self.cache.after(columns, [1] * batch.n), None, None
        else:
            rows, tokens, features = waiting
        committed = Committed(tokens, features, self.pairs.output[: batch.n], self.reading.raw)
        return compiled_chain(batch, self, rows, committed, columns, normed=self.reading.normed)

    # --- growth.Steps

    def start(self, batch: Batch) -> tuple[Final, Tensor]:
        out = super().start(batch)
        self._pass_on(batch, self.pairs.output[: batch.n])
        return out

    def step(self, batch: Batch, first: int, tokens: Tensor, parents: Tensor | None = None) -> tuple[Final, Tensor]:
        """A pair's column is the one before its token's, so row 0 of the window is the root's pair, 2 columns before
        the end of the text."""
        features = batch.memory.get("hidden", batch.n) if batch.confident else self._output
        rows, pairs = self.reading.begin(self.cache, self.lengths(batch), 2, first, tokens, features, parents)
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
