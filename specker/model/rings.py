"""The K/V of layers with a sliding window: each sequence has a ring of pages, which holds its last columns.

A row sees the last `sliding_window` columns up to its own. So page p of a sequence's columns stands in page p % R of
the R pages of its ring, in place of page p - R. A forward writes up to AHEAD columns before its first row attends, and
no later one begins further left. With R * page_size >= sliding_window + AHEAD no row misses a column.

A ring's table repeats its pages, so attention reads a ring by the numbers of the text's columns, and needs no argument
for it. Evicted columns are loaded, then masked; their slots hold newer, finite K/V.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specker.model.chunks import LONG, SHORT, Chunks
from specker.model.config import ModelConfig
from specker.model.prefixes import common

# The most columns that are written from the first row of a forward on: a chunk of a prompt (chunks.py), or a drafter's
# committed tokens and the largest tree. Those of a mixture of experts are LONG.
AHEAD = SHORT


def ring_columns(config: ModelConfig) -> int:
    """Columns that a ring must hold for the layers with a sliding window."""
    ahead = AHEAD if config.layer.experts is None else LONG
    return max(config.layer.sliding_windows, default=0) + ahead


def ringed(config: ModelConfig) -> list[bool]:
    """Of each layer, whether it has K/V that can stand in rings. A cache has one kind of rings."""
    served = config.causal and config.layer.recurrent is None
    own = [config.kv(n).source is None for n in range(config.num_layers)]
    return [served and config.layer.sliding_window(n) > 0 and own[n] for n in range(config.num_layers)]


@dataclass(eq=False)
class EndedRing:
    """A ring whose request has ended."""

    text: list[int]  # the tokens of the columns that the request left exact
    prefilled: int  # of the columns, the first ones that a prefill wrote
    end: int  # no column from this one on was written, by this request or by those whose ring it took over
    pages: list[int]
    least: int  # no request can go on from an earlier column
    state: int = -1  # the text's recurrent states (states.py)
    anchor: int = 0  # the latest column whose state a layer has


class Rings:
    """Where the last columns of each sequence stand: in a ring of pages, as said above."""

    shares_pages = False  # whether a text's full pages of the other layers may belong to other sequences, too

    def __init__(self, count: int, most: int, page_size: int, page: int, pool: int, table: Tensor, spare: bool):
        """`count`: pages of all rings, of `page_size` columns; most: of one. pool: pages of the cache's other layers,
        of `page` columns; table [sequences, P] int32: their block table. `spare`: one more page, the last, belongs to
        no sequence; slots without a sequence read and write it."""
        self.most, self.page_size, self._page = most, page_size, page
        self.ended: list[EndedRing] = []  # the oldest first
        self._free = list(range(count))
        self._pages: list[list[int]] = [[] for _ in table]
        self._ends, self._least = (
            [0] * len(table),
            [0] * len(table),
        )  # see `EndedRing`: of the rings that were taken over
        self._absent = count if spare else 0
        self._capacity = table.shape[1] * page
        shape = len(table), -(-self._capacity // page_size)
        self.block_table = torch.full(shape, self._absent, dtype=torch.int32, device=table.device)
        self.table = self.block_table  # the part of the table that attention reads, as `KVCache.bucket` limits it
        # [pool * page] int64, for each flattened row of the other layers the one that its column has in a ring: that of
        # the last sequence to which its page was given.
        rows = self._absent * page_size + torch.arange(page, dtype=torch.int64, device="cpu") % page_size
        self.slots = rows.repeat(pool).to(table.device)

    def bucket(self, columns: int) -> None:
        """Limit the table to the first `columns`."""
        self.table = self.block_table[:, : -(-columns // self.page_size)]

    def begin(self, slot: int, ring: EndedRing | None, columns: int) -> None:
        """The sequence in `slot` begins, after `columns` that it takes over with an earlier one's ring; `assign`
        follows."""
        self._ends[slot], self._least[slot] = (0, 0) if ring is None else (ring.end, ring.least)
        if ring is not None:
            self.ended.remove(ring)
            self._free = sorted(self._free + self._pages[slot])
            self._pages[slot] = ring.pages

    def assign(self, slot: int, pages: Tensor) -> None:
        """Give the sequence in `slot` a ring for the text whose columns stand in `pages` [n] int64 of the other layers.
        One that it has grows or shrinks, and keeps the columns that fit."""
        columns = torch.arange(len(pages) * self._page, dtype=torch.int64, device="cpu")
        whole = -(-len(columns) // self.page_size)
        own, count = self._pages[slot], min(self.most, whole)
        self._free = sorted(self._free + own[count:])
        more = max(0, count - len(own))
        while len(self._free) < more:
            self.evict()
        own = self._pages[slot] = own[:count] + self._free[:more]
        self._free = self._free[more:]
        ring = torch.tensor(own, dtype=torch.int64, device="cpu")
        ring = ring[torch.arange(whole, dtype=torch.int64, device="cpu") % count] if count else ring
        table = torch.full_like(self.block_table[slot], self._absent, device="cpu")
        table[:whole] = ring
        self.block_table[slot] = table
        rows = ring[columns // self.page_size] * self.page_size + columns % self.page_size
        self.slots.view(-1, self._page)[pages.to(self.slots.device)] = rows.view(-1, self._page).to(self.slots.device)

    def evict(self) -> None:
        """Free the oldest ring of a request that has ended."""
        self._free = sorted(self._free + self.ended.pop(0).pages)

    def move(self, source: int, target: int) -> None:
        """Move the ring of slot `source` to slot `target`, which has none; `assign` follows."""
        self._pages[target], self._pages[source] = self._pages[source], []
        self._ends[target], self._least[target] = self._ends[source], self._least[source]

    def keep(self, slot: int, text: list[int], prefilled: int, end: int) -> None:
        """The request in `slot` has ended: a later one may take its ring over. See `EndedRing`."""
        end = max(end, self._ends[slot])
        self.ended.append(EndedRing(text, prefilled, end, self._pages[slot], self._least[slot]))
        self._pages[slot] = []

    def match(self, text: list[int], chunks: Chunks | None) -> tuple[int, Any]:
        """The longest beginning of `text` after which an ended ring has what the next rows see, and the ring.
        `chunks`: see `Prefixes.match`."""
        found, best = 0, None
        for ring in self.ended:
            columns = common(text, ring.text)
            if chunks is not None:
                columns = chunks.whole(min(columns, ring.prefilled))
            lost = max(0, ring.end - self.most * self.page_size)  # the ring lacks columns before this one
            if columns > found and columns >= ring.least and self.first_seen(columns, ring) >= lost:
                found, best = columns, ring
        return found, best

    def first_seen(self, columns: int, ring: EndedRing) -> int:
        """The first column that rows from `columns` on read in a ring; negative if the ring cannot serve them."""
        raise NotImplementedError

    def forget(self) -> None:
        """Free the rings of requests that have ended."""
        while self.ended:
            self.evict()


class WindowRings(Rings):
    """K and V [L, pages, page_size, Hkv, D] of the L layers of a cache that have a window."""

    def __init__(
        self, shape: tuple[int, ...], pool: int, table: Tensor, config: ModelConfig, dtype: torch.dtype, spare: bool
    ):
        """`shape`: of K. The other arguments: see `Rings`."""
        count, page_size, self.sliding_window = shape[1] - spare, shape[2], max(config.layer.sliding_windows)
        super().__init__(count, -(-ring_columns(config) // page_size), page_size, page_size, pool, table, spare)
        self.k, self.v = torch.empty((2, *shape), dtype=dtype, device=table.device).unbind(0)
        self.layers = list(zip(self.k.unbind(0), self.v.unbind(0), strict=True))
        self.ahead = self.most * page_size - self.sliding_window  # at least a chunk
        if spare:
            self.k[:, count], self.v[:, count] = 0, 0

    def first_seen(self, columns: int, ring: EndedRing) -> int:
        return max(0, columns - self.sliding_window)
