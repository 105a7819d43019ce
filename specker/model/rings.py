"""The K/V of layers with a sliding window: each sequence has a ring of pages, which holds its last columns.

A row sees the last `sliding_window` columns up to its own. So page p of a sequence's columns stands in page p % R of
the R pages of its ring, in place of page p - R. A forward writes up to AHEAD columns before its first row attends, and
no later one begins further left. With R * page_size >= sliding_window + AHEAD no row misses a column.

A ring's table repeats its pages, so attention reads a ring by the numbers of the text's columns, and needs no argument
for it. Evicted columns are loaded, then masked; their slots hold newer, finite K/V.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specker.model.config import ModelConfig
from specker.model.prefixes import common

AHEAD, AHEAD_OF_MIXTURES = 512, 2048
"""The most columns that are written from the first row of a forward on: a chunk of a prompt (prefill.chunk_rows), or a
drafter's committed tokens and the largest tree."""


def ring_columns(config: ModelConfig) -> int:
    """Columns that a ring must hold for the layers with a sliding window."""
    ahead = AHEAD if config.layer.experts is None else AHEAD_OF_MIXTURES
    return max(config.layer.sliding_windows, default=0) + ahead


def ringed(config: ModelConfig) -> list[bool]:
    """Of each layer, whether its K/V can stand in rings."""
    return [config.causal and config.layer.sliding_window(n) > 0 for n in range(config.num_layers)]


@dataclass(eq=False)
class Kept:
    """A ring whose request has ended."""

    text: list[int]  # the tokens of the columns that the request left exact
    prefilled: int  # of the columns, the first ones that a prefill wrote
    end: int  # the request wrote no column from this one on
    pages: list[int]


class Rings:
    """K and V [L, pages, page_size, Hkv, D] of the L layers of a cache that have a window."""

    def __init__(
        self, shape: tuple[int, ...], pool: int, table: Tensor, config: ModelConfig, dtype: torch.dtype, spare: bool
    ):
        """`shape`: of K. pool: pages of the cache's other layers; table [sequences, P] int32: their block table.
        `spare`: the last page belongs to no sequence; slots without a sequence read and write it."""
        count, self.page_size, self.sliding_window = shape[1] - spare, shape[2], max(config.layer.sliding_windows)
        self.k, self.v = torch.empty((2, *shape), dtype=dtype, device=table.device).unbind(0)
        self.layers = list(zip(self.k.unbind(0), self.v.unbind(0), strict=True))
        self.most = -(-ring_columns(config) // self.page_size)
        self.ahead = self.most * self.page_size - self.sliding_window  # at least a chunk
        self.kept: list[Kept] = []  # the oldest first
        self._free = list(range(count))
        self._pages: list[list[int]] = [[] for _ in table]
        self._absent = count if spare else 0
        self.block_table = torch.full_like(table, self._absent)
        self.table = self.block_table  # the part of the table that attention reads, as `KVCache.bucket` limits it
        self._offsets = torch.arange(self.page_size)
        # [pool * page_size] int64, for each flattened row of the other layers the one that its column has in a ring. A
        # page of theirs belongs to one sequence at a time: `KVCache.match` sees to it.
        self.slots = (self._absent * self.page_size + self._offsets).repeat(pool).to(table.device)
        if spare:
            self.k[:, count], self.v[:, count] = 0, 0

    def assign(self, slot: int, pages: Tensor) -> None:
        """Give the sequence in `slot` a ring for the text whose columns stand in `pages` [n] int64 of the other layers.
        One that it has grows or shrinks, and keeps the columns that fit."""
        own, count = self._pages[slot], min(self.most, len(pages))
        self._free = sorted(self._free + own[count:])
        more = max(0, count - len(own))
        while len(self._free) < more:
            self._free = sorted(self._free + self.kept.pop(0).pages)
        own = self._pages[slot] = own[:count] + self._free[:more]
        self._free = self._free[more:]
        ring = torch.tensor(own)[torch.arange(len(pages)) % count] if count else torch.empty(0, dtype=torch.int64)
        table = torch.full_like(self.block_table[slot], self._absent, device="cpu")
        table[: len(pages)] = ring
        self.block_table[slot] = table
        rows = ring[:, None] * self.page_size + self._offsets
        self.slots.view(-1, self.page_size)[pages.to(self.slots.device)] = rows.to(self.slots.device)

    def move(self, source: int, target: int) -> None:
        """Move the ring of slot `source` to slot `target`, which has none; `assign` follows."""
        self._pages[target], self._pages[source] = self._pages[source], []

    def keep(self, slot: int, text: list[int], prefilled: int, end: int) -> None:
        """The request in `slot` has ended: a later one may take its ring over. See `Kept`."""
        self.kept.append(Kept(text, prefilled, end, self._pages[slot]))
        self._pages[slot] = []

    def match(self, text: list[int], prefix_alignment: int) -> tuple[int, Kept | None]:
        """The longest beginning of `text` after which a kept ring has what the next rows see, and the ring.
        `prefix_alignment`: see `Prefixes.match`."""
        found, best = 0, None
        for ring in self.kept:
            columns = min(common(text, ring.text), ring.prefilled if prefix_alignment > 1 else len(text))
            columns -= columns % prefix_alignment
            lost = ring.end - self.most * self.page_size  # columns before this one have left the ring
            if columns > found and max(0, columns - self.sliding_window) >= lost:
                found, best = columns, ring
        return found, best

    def take_over(self, slot: int, ring: Kept) -> None:
        """Give the sequence in `slot` the ring of an earlier one; `assign` follows."""
        self.kept.remove(ring)
        self._free = sorted(self._free + self._pages[slot])
        self._pages[slot] = ring.pages

    def forget(self) -> None:
        """Free the rings of requests that have ended."""
        self._free = sorted([*self._free, *(page for ring in self.kept for page in ring.pages)])
        self.kept = []
