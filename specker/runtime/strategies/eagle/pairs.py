"""What drafters with a head keep: the pairs (model/heads.py) that it has made of each text, and the features that wait
for tokens."""

from functools import cache as memoised
from typing import NamedTuple

import torch
from torch import Tensor

from specker.model.cache import KVCache, Rows
from specker.model.decoder import Final, Model
from specker.model.heads import DraftHead
from specker.runtime.control.policy import Offer
from specker.runtime.round.batch import Batch
from specker.runtime.round.drafter import Accepted, Draft, Drafter
from specker.runtime.round.lm_head import LMHead
from specker.runtime.round.state import Request

BLOCK = 256  # pairs of a prompt that the head forwards at once
WAITING = 64  # most features that wait while nothing is drafted


class HeadDrafter(Drafter):
    """A drafter whose head, or the first of several, reads the target's hidden rows."""

    model: Model
    cache: KVCache
    head: LMHead
    last: Tensor  # [slots, H], for the LM head: what the head made of each text's last pair
    source = "head"

    def __init__(self, reading: DraftHead, cache: KVCache, head: LMHead):
        self.reading, self.model, self.cache, self.head = reading, reading.model, cache, head
        self.aux_layers = reading.spec.aux_layers
        self.limit = min(self.model.config.max_context, cache.capacity)

    def prepare(self, requests: list[Request]) -> Offer:
        return Offer(room=[self.cache.capacity - len(request.token_ids) for request in requests])

    def lacks_pairs(self, batch: Batch) -> bool:
        """Whether a text has no pair yet, as after a prompt of one token: then nothing can be drafted."""
        return not batch.fixed and any(len(request.token_ids) <= self.tokens_ahead for request in batch.requests)

    def run_all(self, requests: list[Request]) -> None:
        """Forward the pairs that wait in all slots, together if all have some."""
        raise NotImplementedError

    def start(self, batch: Batch) -> tuple[Final, Tensor]:
        """Forward the pairs that wait. Returns the rows for the first draft tokens [n, H] and the roots' positions."""
        if not batch.fixed:
            self.run_all(batch.requests)
        lengths = batch.lengths
        if not isinstance(lengths, Tensor):
            lengths = torch.tensor(lengths, dtype=torch.int64, device=self.last.device)
        final = Final(self.last[: batch.n], self.reading.normed)
        return final, lengths if batch.shape.draws == "greedy" else lengths - 1  # greedy draws read no position


class Waiting(NamedTuple):
    """Pairs of true columns, those of each sequence together."""

    rows: Rows  # their places, T in all
    tokens: Tensor  # [T] int64
    features: Tensor  # [T, H], as `DraftHead.kept` returns them


class PairDrafter(HeadDrafter):
    """The cache of its head holds the pairs of a text's columns 0, 1, .. A draft starts from the head's output for the
    last pair: `output`, the feature of the first draft token, and `last`, the row for the LM head.

    In rounds that the host places, the features of accepted rows wait until the next draft, which forwards their pairs
    together. In rounds of fixed shape the device forwards the pairs of all rows that a round may accept, right after
    acceptance; those beyond the accepted ones are overwritten later."""

    def __init__(self, reading: DraftHead, cache: KVCache, head: LMHead):
        super().__init__(reading, cache, head)
        self.waiting: list[Tensor | None] = [None] * len(cache.exact_len)  # features [count, H] by slot
        model = self.model
        both = 2, len(cache.exact_len), model.config.hidden_size
        self.output, self.last = torch.zeros(both, dtype=model.dtype, device=model.device).unbind(0)  # by slot
        if model.stack is not None:  # both are its last rows, which a compiled chain writes once
            self.last = self.output

    def read(self, slot: int, request: Request, first: int, rows: dict[int, Tensor]) -> None:
        """Run the pairs of a chunk of the prompt."""
        self._wait(slot, torch.stack([rows[depth] for depth in self.aux_layers], 1))
        self.run(slot, request.token_ids)

    def accept(self, batch: Batch, draft: Draft, accepted: Accepted) -> None:
        """What the head wrote for draft tokens is dropped. The pairs of the accepted rows wait for the next draft,
        which knows all of their tokens."""
        for slot, (request, path) in enumerate(zip(batch.requests, accepted.paths, strict=True)):
            if batch.fixed:
                self.cache.exact_len[slot] = len(request.token_ids) - 1
            elif path:
                self._wait(slot, batch.aux_hidden_states(draft.size, slot, path))
                if (features := self.waiting[slot]) is not None and len(features) > WAITING:
                    self.run(slot, request.token_ids)

    def accept_on_device(self, batch: Batch, draft: Draft) -> None:
        if batch.fixed:
            self.run_each(batch.requests)
            name = "pairs", draft.size, draft.depth, draft.tree
            batch.run(name, lambda: self._accepted(batch, draft), draws=False)

    def _accepted(self, batch: Batch, draft: Draft) -> None:
        """Forward the pairs of the rows that the round accepted, which only the device knows."""
        s, n, N, head = batch.state, batch.n, draft.size, self.reading
        device, depths = self.model.device, len(batch.aux_layers)
        most = min(N, draft.depth) + 1
        report = s.report[: n * (3 + 2 * N)].view(n, -1)
        accepted, path = report[:, 0], report[:, 1 : most + 1]
        rows = batch.memory.aux(depths, n * (N + 1)).view(n, N + 1, depths, -1)
        if draft.tree:
            rows = rows[torch.arange(n, dtype=torch.int64, device=device).unsqueeze(1), path.clamp(0, N)]
        features = head.kept(rows[:, :most].flatten(0, 1))
        placed, pairs = head.begin(self.cache, s.length - accepted, 1, 0, s.committed[:, 1:], features, text=True)
        output, final = head.forward(self.cache, placed, pairs, kept=True)
        self._note(slice(n), output, final, accepted.clamp(min=1) + _before(n, most, device))

    def _note(self, slots: slice, output: Tensor, final: Final, last: Tensor) -> None:
        """Note what the head made of the last pair of each slot, row `last` [n] of [T, H]."""
        torch.index_select(output, 0, last, out=self.output[slots])
        if self.last is not self.output:
            torch.index_select(final.rows, 0, last, out=self.last[slots])

    def _wait(self, slot: int, rows: Tensor) -> None:
        """Add the features of the target's rows [T, A, Ht] to those that wait."""
        features, before = self.reading.kept(rows), self.waiting[slot]
        self.waiting[slot] = features if before is None else torch.cat((before, features))

    def run(self, slot: int, text: list[int]) -> None:
        """Forward the pairs that wait in one slot."""
        cache, features = self.cache, self.waiting[slot]
        if features is None:
            return
        for block in features.split(BLOCK):
            start = cache.exact_len[slot]
            end = start + len(block)
            rows = cache.after([start], [len(block)], slot=slot)
            self._forward(slice(slot, slot + 1), Waiting(rows, self._ids(text[start + 1 : end + 1]), block))
            cache.exact_len[slot] = end
        self.waiting[slot] = None

    def run_each(self, requests: list[Request]) -> None:
        """Forward the pairs that wait in all slots, one slot after another."""
        for slot, request in enumerate(requests):
            self.run(slot, request.token_ids)

    def run_all(self, requests: list[Request]) -> None:
        if (waiting := self.take(requests)) is None:
            self.run_each(requests)
        else:
            self._forward(slice(len(requests)), waiting)

    def take(self, requests: list[Request]) -> Waiting | None:
        """The pairs that wait in all slots; None if a slot has none. The caller forwards them and notes their outputs:
        they no longer wait."""
        n, texts = len(requests), [request.token_ids for request in requests]
        waiting = [x for x in self.waiting[:n] if x is not None]
        if len(waiting) < n:
            return None
        starts, counts = self.cache.exact_len[:n], [len(x) for x in waiting]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        # A pair's token is the one after its column.
        tokens = [
            token for text, start, end in zip(texts, starts, ends, strict=True) for token in text[start + 1 : end + 1]
        ]
        rows = self.cache.after(starts, counts)
        self.cache.exact_len[:n], self.waiting[:n] = ends, [None] * n
        return Waiting(rows, self._ids(tokens), waiting[0] if n == 1 else torch.cat(waiting))

    def _ids(self, tokens: list[int]) -> Tensor:
        return torch.tensor(tokens, dtype=torch.int64, device=self.model.device)

    def _forward(self, slots: slice, waiting: Waiting) -> None:
        """Forward pairs whose tokens the host knows."""
        rows, tokens, features = waiting
        pairs = self.reading.pairs(features, self.model.embed_tokens(tokens), rows.positions)
        output, final = self.reading.forward(self.cache, rows, pairs, kept=True)
        self._note(slots, output, final, rows.cu_rows[1:].long() - 1)

    def move(self, source: int, target: int) -> None:
        self.waiting[target], self.waiting[source] = self.waiting[source], None
        for x in (self.output, self.last):
            x[target] = x[source]

    def reset(self, slot: int) -> None:
        self.waiting[slot] = None


@memoised
def _before(sequences: int, rows: int, device: torch.device) -> Tensor:
    """[sequences] int64, the row before each sequence's first, of sequences of `rows` rows. CUDA graphs hold its
    address, so the cache never frees it."""
    return torch.tensor([rows * i - 1 for i in range(sequences)], dtype=torch.int64, device=device)
