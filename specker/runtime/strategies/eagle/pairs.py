"""The pairs of a draft head (model/heads.py): what it has made of each text, and the features that wait for it."""

from functools import cache as memoised
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specker.model.cache import KVCache, Rows
from specker.model.decoder import Final
from specker.model.heads import DraftHead
from specker.runtime.round.batch import Batch
from specker.runtime.round.drafter import Accepted, Draft
from specker.runtime.round.state import Request

BLOCK = 256  # pairs of a prompt that the head forwards at once
WAITING = 64  # most features that wait while nothing is drafted


class HeadPairs(Protocol):
    """What a drafter needs of the pairs of its heads."""

    last: Tensor  # [slots, H], for the LM head: what the first head made of each text's last pair

    def run_all(self, requests: list[Request]) -> None: ...
    def read(self, slot: int, request: Request, rows: dict[int, Tensor]) -> None: ...
    def accept(self, batch: Batch, draft: Draft, accepted: Accepted) -> None: ...
    def accept_on_device(self, batch: Batch, draft: Draft) -> None: ...
    def move(self, source: int, target: int) -> None: ...
    def reset(self, slot: int) -> None: ...


class Waiting(NamedTuple):
    """Pairs of true columns, those of each sequence together."""

    rows: Rows  # their places, T in all
    tokens: Tensor  # [T] int64
    features: Tensor  # [T, H], as `DraftHead.kept` returns them


class Pairs:
    """The head's cache holds the pairs of a text's columns 0, 1, .. A draft starts from the head's
    output for the last pair: `output`, the feature of the first draft token, and `last`, the row for the LM head.

    In rounds that the host places, the features of accepted rows wait until the next draft, which forwards their pairs
    together. In rounds of fixed shape the device forwards the pairs of all rows that a round may accept, right after
    acceptance; those beyond the accepted ones are overwritten later."""

    def __init__(self, head: DraftHead, cache: KVCache, depth: int):
        """`depth`: length of the longest draft."""
        self.head, self.cache, self.depth = head, cache, depth
        self.waiting: list[Tensor | None] = [None] * len(cache.exact_len)  # features [count, H] by slot
        model = head.model
        both = 2, len(cache.exact_len), model.config.hidden_size
        self.output, self.last = torch.zeros(both, dtype=model.dtype, device=model.device).unbind(0)  # by slot
        if model.stack is not None:  # both are its last rows, which a compiled chain writes once
            self.last = self.output

    def read(self, slot: int, request: Request, rows: dict[int, Tensor]) -> None:
        """Run the pairs of a chunk of the prompt."""
        self._wait(slot, torch.stack([rows[depth] for depth in self.head.spec.aux_layers], 1))
        self.run(slot, request.token_ids)

    def accept(self, batch: Batch, draft: Draft, accepted: Accepted) -> None:
        """Keep the features of the accepted rows. Their pairs wait for the next draft, which knows all of their
        tokens."""
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
            batch.run(("pairs", draft.size, draft.tree), lambda: self._accepted(batch, draft), draws=False)

    def _accepted(self, batch: Batch, draft: Draft) -> None:
        """Forward the pairs of the rows that the round accepted, which only the device knows."""
        s, n, N, head = batch.state, batch.n, draft.size, self.head
        device, depths = head.model.device, len(batch.aux_layers)
        most = min(N, self.depth) + 1
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
        features, before = self.head.kept(rows), self.waiting[slot]
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
        """Forward the pairs that wait in all slots, together if all have some."""
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
        return torch.tensor(tokens, dtype=torch.int64, device=self.head.model.device)

    def _forward(self, slots: slice, waiting: Waiting) -> None:
        """Forward pairs whose tokens the host knows."""
        rows, tokens, features = waiting
        pairs = self.head.pairs(features, self.head.model.embed_tokens(tokens), rows.positions)
        output, final = self.head.forward(self.cache, rows, pairs, kept=True)
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
