"""The paged K/V cache of up to B sequences: one pool of pages, and bookkeeping of which columns are exact.

Columns 0..exact_len-1 of a sequence hold the K/V of its first `exact_len` committed tokens, written by an exact
forward. Later columns are scratch: a verify pass or a drafter writes them, then `commit` keeps some rows or `truncate`
drops them.

Sequences occupy slots 0..n-1. Column c of a sequence is flattened row block_table[slot, c // page] * page + c % page of
every layer. Layers with a sliding window may keep the last columns only, in rings (rings.py); those with a recurrent
state always do (states.py).
"""

from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specker.kernels.ancestors import chain_words, pack_bits
from specker.kernels.kv_commit import kv_commit
from specker.kernels.round.place_rows import Window, place_rows
from specker.model.chunks import Chunks
from specker.model.config import ModelConfig
from specker.model.kv_formats import kept_dim, widened
from specker.model.prefixes import Match, Prefixes, copy_columns
from specker.model.rings import WindowRings, ring_columns, ringed
from specker.model.states import Memory, Saved, StateRings

Lengths = Sequence[int] | Tensor
"""Committed tokens of the sequences in slots 0..n-1: integers on the host, or [n] int64 on the device."""


class RingRows(NamedTuple):
    """`slots` and `table` of `Rows`, for layers whose K/V or records stand in rings (rings.py)."""

    slots: Tensor  # [T] int64
    table: Tensor  # [n, P] int32
    states: Tensor | None = None  # [n] int64, each sequence's recurrent states (states.py)

    def of(self, rows: slice, sequences: slice) -> "RingRows":
        """Of some rows and sequences."""
        states = None if self.states is None else self.states[sequences]
        return RingRows(self.slots[rows], self.table[sequences], states)


class Rows(NamedTuple):
    """Positions, slots and masks of T rows of n sequences; the rows of each sequence are adjacent."""

    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64, flattened cache rows
    kv_len: Tensor  # [n] int32, columns including those of the rows
    window: Tensor  # [n] int32, number of last columns masked by `ancestors`
    ancestors: Tensor  # [T, W] int64; [T, 0]: each row sees its sequence up to itself, with the compiled CPU layers
    cu_rows: Tensor  # [n + 1] int32, the first row of each sequence, then T
    table: Tensor  # [n, P] int32, pages
    bounds: tuple[int, ...] | None = None  # `cu_rows` on the host; None: every sequence has equally many rows
    ring_rows: RingRows | None = None  # slots and block table of sliding-window layers
    idle: Tensor | None = None  # [n] bool, sequences whose rows count for nothing; None: every row may count

    def beside(self, other: "Rows") -> "Rows":
        """The rows of both, which are chains without words, on a CPU."""
        starts = torch.cat((self.cu_rows, other.cu_rows[1:] + self.cu_rows[-1]))
        positions, slots, kv_len, window, table = (
            torch.cat((getattr(self, name), getattr(other, name)))
            for name in ("positions", "slots", "kv_len", "window", "table")
        )
        ring_rows = None
        if self.ring_rows is not None and other.ring_rows is not None:
            a, b, states = self.ring_rows, other.ring_rows, None
            if a.states is not None and b.states is not None:
                states = torch.cat((a.states, b.states))
            ring_rows = RingRows(torch.cat((a.slots, b.slots)), torch.cat((a.table, b.table)), states)
        words = self.ancestors.new_empty(len(positions), 0)
        return Rows(positions, slots, kv_len, window, words, starts, table, ring_rows=ring_rows)

    def blocks(self, most: int) -> Iterator[tuple[slice, "Rows"]]:
        """Split the rows between sequences, so that a block has at most `most` rows, or those of one sequence. Yields
        the block's place among all rows, and the block."""
        n, b = len(self.kv_len), 0
        bounds = self.bounds or tuple(range(0, len(self.positions) + 1, len(self.positions) // n))
        while b < n:
            end = max(b + 1, bisect_right(bounds, bounds[b] + most) - 1)
            at, of, starts = slice(bounds[b], bounds[end]), slice(b, end), self.cu_rows[b : end + 1] - bounds[b]
            own = tuple(bound - bounds[b] for bound in bounds[b : end + 1])
            block = Rows(
                self.positions[at],
                self.slots[at],
                self.kv_len[of],
                self.window[of],
                self.ancestors[at],
                starts,
                self.table[of],
                own,
                ring_rows=None if self.ring_rows is None else self.ring_rows.of(at, of),
                idle=None if self.idle is None else self.idle[of],
            )
            yield at, block
            b = end


class KVCache:
    """K and V [L, pages, page_size, Hkv, D] of the L layers that are not in rings, and in `others` of those that have
    other heads; `layers`: those of every layer, or the `Memory` of one with a recurrent state. In int8 a head has D + 4
    elements (kv_formats.py)."""

    def __init__(
        self,
        config: ModelConfig,
        columns: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        page_size: int = 256,
        sequences: int = 1,
        pages: Tensor | int | None = None,
        rings: bool = False,
        saved: int = 0,
        kv_dtype: torch.dtype | None = None,
    ):
        """`columns`: maximum per sequence. `dtype`: of the activations. `pages`: pool size, by default enough for all
        sequences; a tensor [P] int32 sets the order in which a sequence takes pages (tests permute it). A single
        sequence owns all pages from the start, until `release`; several sequences call `take`. `rings`: keep only the
        last columns of layers with a sliding window, if that saves memory. `saved`: columns whose recurrent states are
        saved at once (`save`). `kv_dtype`: of K and V (kv_formats.py); None: `dtype`."""
        pages_per_sequence = -(-columns // page_size)
        order = pages.tolist() if isinstance(pages, Tensor) else list(range(pages or sequences * pages_per_sequence))
        count = len(order) + (sequences > 1)
        self.spare = len(order)  # an unowned page that slots without a sequence read and write
        ring = sequences * -(-ring_columns(config) // page_size)  # pages of all rings
        recurrent = [config.layer.mixer(n) is not None for n in range(config.num_layers)]
        windows = rings and ring < len(order) and not any(recurrent)
        uses_ring = ringed(config) if windows else recurrent
        kvs = [config.kv(n) for n in range(config.num_layers)]
        kv_dtype = kv_dtype or dtype
        heads = [(kv.heads, kept_dim(kv.dim, kv_dtype)) for kv in kvs]
        paged = [n for n, in_ring in enumerate(uses_ring) if not in_ring and kvs[n].source is None]
        kv_shapes = list(dict.fromkeys(heads[n] for n in paged)) or [
            (config.num_kv_heads, kept_dim(config.head_dim, kv_dtype))
        ]
        layers_of_shape = [[n for n in paged if heads[n] == shape] for shape in kv_shapes]
        sizes = zip(layers_of_shape, kv_shapes, strict=True)
        pools = [(2, len(numbers), count, page_size, *shape) for numbers, shape in sizes]
        (self.k, self.v), *self.others = (torch.empty(s, dtype=kv_dtype, device=device).unbind(0) for s in pools)
        layers: dict[int, Any] = {}
        for numbers, (k, v) in zip(layers_of_shape, self.pools, strict=True):
            layers |= {n: (k[i], v[i]) for i, n in enumerate(numbers)}
        self.page_size, self.device = page_size, torch.device(device)
        self.capacity = pages_per_sequence * page_size
        self.exact_len = [0] * sequences
        self.last_position = config.max_context - 1
        by_column = torch.arange(self.capacity, dtype=torch.int64, device=device)
        self.positions = by_column.clamp_(max=self.last_position)
        # Slicing a length from this table is cheaper than copying a number to the device.
        self.lengths = torch.arange(self.capacity + 1, dtype=torch.int32, device=device)
        self._absent = self.spare if sequences > 1 else 0  # the table's entry where a sequence has no page
        self.block_table = torch.full((sequences, pages_per_sequence), self._absent, dtype=torch.int32, device=device)
        self.table = self.block_table  # the part of the table that attention reads, as `bucket` limits it
        self.rings: WindowRings | StateRings | None = None
        spare = sequences > 1
        if any(recurrent):
            self.rings = StateRings(config, page_size, count, self.block_table, dtype, sequences, spare, saved)
        elif any(uses_ring):
            shape = uses_ring.count(True), ring + spare, page_size, *heads[uses_ring.index(True)]
            self.rings = WindowRings(shape, count, self.block_table, config, kv_dtype, spare)
        if self.rings is not None:
            ring_layers = [n for n, in_ring in enumerate(uses_ring) if in_ring]
            layers |= dict(zip(ring_layers, self.rings.layers, strict=True))
        self.layers: list[Any] = [layers[n if kv.source is None else kv.source] for n, kv in enumerate(kvs)]
        self._free = order
        self._users = [0] * (max(order, default=0) + 1)  # holders of each page: sequences and the tree of earlier texts
        self.prefixes = Prefixes(page_size, self._users)
        self._pages: list[list[int]] = [[] for _ in range(sequences)]
        self._texts: list[tuple[list[int], int, int]] = [([], 0, 0)] * sequences  # see `EndedRing`: for `release`
        self._slots: list[Tensor] = [self.lengths.new_empty(0, dtype=torch.int64)] * sequences
        if sequences > 1:
            for kv in self.pools:
                for x in kv:
                    x[:, self.spare] = 0
        else:
            self.take(0, self.capacity)

    def layer(self, n: int) -> "KVCache":
        """The K/V of layer n alone, for the forward pass of a model of one layer. Rows are placed by the whole cache,
        which keeps the books."""
        part = copy(self)
        part.k, part.v, part.layers = self.k[n : n + 1], self.v[n : n + 1], self.layers[n : n + 1]
        return part

    @property
    def pools(self) -> list[tuple[Tensor, ...]]:
        """K and V [L, pages, page_size, Hkv, D] of the layers of each kind of heads (ModelConfig.kv)."""
        return [(self.k, self.v), *self.others]

    @property
    def kv(self) -> tuple[Tensor, ...]:
        """K and V of the layers of each kind of heads and, with rings, those of the layers in rings."""
        own, rings = tuple(x for kv in self.pools for x in kv), self.rings
        return (*own, rings.k, rings.v) if isinstance(rings, WindowRings) else own

    @property
    def memory(self) -> Memory | None:
        """The states and records of all layers that have a recurrent state."""
        return self.rings.memory if isinstance(self.rings, StateRings) else None

    def slots(self, slot: int, start: int, end: int) -> Tensor:
        """[end - start] int64, the flattened rows of columns start..end - 1 of the sequence in `slot`."""
        return self._slots[slot][start:end]

    # --- pages

    def pages_for(self, columns: int) -> int:
        return -(-min(columns, self.capacity) // self.page_size)

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free) + self.prefixes.evictable

    def fits(self, columns: int, match: Match | None = None) -> bool:
        """Whether the pool has the pages for a sequence of `columns` that takes over `match`."""
        match = match or Match()
        kept = match.pages if match.copied is None else (*match.pages, match.copied)
        counted = sum(self._users[page] == 1 for page in kept)  # pages that `free_pages` counts
        return self.pages_for(columns) - len(match.pages) <= self.free_pages - counted

    def take(self, slot: int, columns: int, match: Match | None = None) -> None:
        """Give the sequence in `slot` pages for `columns`, contiguous ones if the pool has them: attention on a CPU
        reads contiguous pages without a copy. With `match`, the sequence begins with the matched columns, which are
        then exact."""
        match = match or Match()
        for page in match.pages:
            self._users[page] += 1
        if match.copied is not None:
            self._users[match.copied] += 1  # it must not be evicted before it is copied
        self._drop(self._pages[slot])
        self._texts[slot] = [], 0, 0
        if self.rings is not None:
            self.rings.begin(slot, match.ring, match.columns)
        pages = [*match.pages, *self._new(self.pages_for(columns) - len(match.pages))]
        self._assign(slot, pages)
        if match.copied is not None:
            rest = match.columns - len(match.pages) * self.page_size
            for k, v in self.pools:
                copy_columns(k, v, match.copied, pages[len(match.pages)], rest)
            self._drop([match.copied])
        if isinstance(match.ring, Saved) and isinstance(self.rings, StateRings):
            self.rings.restore(slot, match.ring)
        self.exact_len[slot] = match.columns

    def columns_of(self, slot: int) -> int:
        """The columns for which the sequence in `slot` has pages."""
        return len(self._pages[slot]) * self.page_size

    def extend(self, slot: int, columns: int) -> bool:
        """Give the sequence in `slot` further pages, so that it has `columns`. False if the pool has too few."""
        missing = self.pages_for(columns) - len(self._pages[slot])
        if missing > self.free_pages:
            return False
        if missing > 0:
            self._assign(slot, self._pages[slot] + self._new(missing))
        return True

    def match(self, text: list[int], chunks: Chunks | None = None) -> Match:
        """The K/V of an earlier text that a new one may take over; see `Prefixes.match`. With rings, the columns end
        where an ended request's ring has what the next rows see, or where the recurrent states were saved."""
        if self.rings is None:
            return self.prefixes.match(text, chunks)
        columns, ring = self.rings.match(text, chunks)
        found = self.prefixes.match(text[:columns], chunks)
        held = any(self._users[page] > 1 for page in found.pages) and not self.rings.shares_pages
        return Match() if found.columns < columns or held else replace(found, ring=ring)

    def save(self, slot: int, text: list[int], exact: bool) -> None:
        """Save the recurrent states after `text`, which ends less than BLOCK columns before the last forward did. Later
        requests whose texts begin with it can go on from there, while the K/V of its columns is known."""
        if isinstance(self.rings, StateRings) and text:
            self.rings.save(slot, text, exact, self.exact_len[slot])

    @property
    def saves(self) -> int:
        """How many columns can be saved at once."""
        return self.rings.saves if isinstance(self.rings, StateRings) else 0

    def release(self, slot: int) -> None:
        """Return the pages of `slot` to the pool."""
        text, prefilled, end = self._texts[slot]
        if self.rings is not None and text and len(text) == self.exact_len[slot]:
            self.rings.keep(slot, text, prefilled, end)
        self._texts[slot] = [], 0, 0
        self._drop(self._pages[slot])
        self._assign(slot, [])
        self.exact_len[slot] = 0

    def remember(self, slot: int, text: list[int], prefilled: int, lookahead: int = 0) -> None:
        """Keep the K/V of the exact columns of `slot` for later requests: `text` holds their tokens, and a prefill
        wrote the first `prefilled` of them. `lookahead`: the most columns that were written behind them."""
        exact = self.exact_len[slot]
        self._texts[slot] = text[:exact], prefilled, exact + lookahead
        freed = self.prefixes.add(text[:exact], self._pages[slot], prefilled)
        self._free = sorted(self._free + freed)

    def forget(self) -> None:
        """Forget the texts of earlier requests."""
        self._free = sorted(self._free + self.prefixes.evict(len(self._users)))
        if self.rings is not None:
            self.rings.forget()

    def move(self, source: int, target: int) -> None:
        """Move the sequence in slot `source` to slot `target`, which is free."""
        pages, self.exact_len[target] = self._pages[source], self.exact_len[source]
        self._texts[target], self._texts[source] = self._texts[source], ([], 0, 0)
        if self.rings is not None:
            self.rings.move(source, target)
        self._assign(source, [])
        self.exact_len[source] = 0
        self._assign(target, pages)

    def _new(self, count: int) -> list[int]:
        """Pages for one sequence, contiguous ones if possible."""
        if count > len(self._free):
            self._free = sorted(self._free + self.prefixes.evict(count - len(self._free)))
        start = next((i for i in range(len(self._free) - count + 1) if count and self._run(i, count)), 0)
        pages = self._free[start : start + count]
        del self._free[start : start + count]
        for page in pages:
            self._users[page] += 1
        return pages

    def _drop(self, pages: list[int]) -> None:
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                insort(self._free, page)

    def _run(self, start: int, count: int) -> bool:
        return self._free[start + count - 1] - self._free[start] == count - 1

    def _assign(self, slot: int, pages: list[int]) -> None:
        self._pages[slot] = pages
        table = torch.full((self.block_table.shape[1],), self._absent, dtype=torch.int32, device="cpu")
        table[: len(pages)] = torch.tensor(pages, dtype=torch.int32, device="cpu")
        self.block_table[slot] = table
        offsets = torch.arange(self.page_size, dtype=torch.int64, device="cpu")
        own = table[: len(pages)].long()
        self._slots[slot] = (own[:, None] * self.page_size + offsets).flatten().to(self.device)
        if self.rings is not None:
            self.rings.assign(slot, own)

    def span(self, length: int, slot: int = 0) -> slice | Tensor:
        """The flattened rows of a sequence's first `length` columns: a slice if its pages are contiguous, else indices
        [length] int64."""
        pages = self._pages[slot][: max(1, -(-length // self.page_size))]
        if pages == list(range(pages[0], pages[0] + len(pages))):
            return slice(pages[0] * self.page_size, pages[0] * self.page_size + length)
        return self._slots[slot][:length]

    # --- exactness

    def commit(self, path: list[int], slot: int = 0) -> None:
        """Keep the rows `path` (ascending, relative to exact_len) as the next exact columns."""
        base, kept = self.exact_len[slot], len(path)
        if path[-1] != kept - 1:  # a chain's accepted rows are in place already
            moved = next(i for i, row in enumerate(path) if row != i)
            slots = self._slots[slot]
            self.shift(slots[[base + row for row in path[moved:]]], slots[base + moved : base + kept])
        self.exact_len[slot] = base + kept

    def shift(self, src: Tensor, dst: Tensor) -> None:
        """Copy the K/V of the flattened rows src [M] int64 to dst [M] int64, in all layers."""
        for k, v in self.pools:
            if len(k):
                kv_commit(k, v, src, dst)
        if isinstance(self.rings, StateRings):
            self.rings.shift(self.rings.slots[src], self.rings.slots[dst])
        elif self.rings is not None:
            kv_commit(self.rings.k, self.rings.v, self.rings.slots[src], self.rings.slots[dst])

    def truncate(self, length: int, slot: int = 0) -> None:
        """Drop all columns from `length` on. Raises ValueError if fewer are exact, and with rings, which may have lost
        what the next rows see, unless `length` is 0."""
        known = self.exact_len[slot]
        if not 0 <= length <= known or (self.rings is not None and 0 < length < known):
            raise ValueError(f"cannot truncate a cache of {known} exact columns to {length}")
        self.exact_len[slot] = length

    def check(self, committed: int | None = None, slot: int = 0) -> None:
        """Raise AssertionError unless the invariants hold. `committed`, for the target's cache: the number of committed
        tokens, of which the cache must hold all but the root."""
        length = self.exact_len[slot]
        assert 0 <= length <= self.capacity, (length, self.capacity)
        own = [pages[: -(-length // self.page_size)] for pages, length in zip(self._pages, self.exact_len, strict=True)]
        written = [page for pages, exact in zip(self._pages, own, strict=True) for page in pages[len(exact) :]]
        assert len(set(written)) == len(written) and all(self._users[page] == 1 for page in written), written
        assert all(page in range(self.spare) for pages in self._pages for page in pages), self._pages
        if committed is not None:
            assert length == committed - 1, (length, committed)
        places = [self._slots[slot][:length]] * (2 * len(self.pools))
        if isinstance(self.rings, WindowRings):
            places += [self.rings.slots[places[0][max(0, length - self.rings.sliding_window) :]]] * 2
        for kv, at in zip(self.kv, places, strict=True):
            rows = widened(kv.flatten(1, 2)[:, at], torch.float32)
            assert bool(torch.isfinite(rows).all()), "a committed column holds NaN or infinity"
        for x in () if self.memory is None else self.memory:
            assert x is None or bool(torch.isfinite(x).all()), "a state or a record holds NaN or infinity"

    # --- rows

    def bucket(self, columns: int) -> None:
        """Limit attention to the first `columns` (a KV bucket): it launches no programs for later ones."""
        pages = -(-min(columns, self.capacity) // self.page_size)
        self.table = self.block_table[:, :pages]
        if self.rings is not None:
            self.rings.bucket(min(columns, self.capacity))

    def ring_rows(self, slots: Tensor, sequences: slice | Tensor, whole: bool = False) -> RingRows | None:
        """Where the rows `slots` [T] of `sequences` stand in rings; None without rings. `whole`: with the whole table,
        whatever the KV bucket."""
        if (rings := self.rings) is None:
            return None
        states = rings.state_of[sequences] if isinstance(rings, StateRings) else None
        return RingRows(rings.slots[slots], (rings.block_table if whole else rings.table)[sequences], states)

    def chains(self, spans: Sequence[tuple[int, int, int]]) -> Rows:
        """Place rows for (slot, start, end): columns start..end - 1 of the sequence in `slot`. Rows without words."""
        columns = [slice(start, end) for _, start, end in spans]
        bounds = torch.tensor([0, *accumulate(end - start for _, start, end in spans)], dtype=torch.int32, device="cpu")
        which = torch.tensor([slot for slot, *_ in spans], dtype=torch.int64, device="cpu")
        slots = torch.cat([self._slots[slot][own] for (slot, *_), own in zip(spans, columns, strict=True)])
        kv_len = torch.tensor([end for *_, end in spans], dtype=torch.int32, device="cpu")
        positions = torch.cat([self.positions[own] for own in columns])
        words = torch.empty(len(positions), 0, dtype=torch.int64, device="cpu")
        ring_rows = self.ring_rows(slots, which, whole=True)
        return Rows(positions, slots, kv_len, kv_len, words, bounds, self.block_table[which], ring_rows=ring_rows)

    def place(
        self,
        lengths: Lengths,
        back: int,
        first: int,
        count: int,
        parents: Tensor | None = None,
        *,
        positions: Tensor | None = None,
    ) -> Rows:
        """Place rows first..first + count - 1 of each sequence's window, which begins `back` columns before the end of
        the committed text. The rows form a chain, or a tree with `parents` [n, rows] int64. `positions` [n * count]
        int64: memory for the positions, used if the device places the rows."""
        n = len(lengths)
        if n == 1 and parents is None and not isinstance(lengths, Tensor):
            return self.after([lengths[0] - back + first], [count], first)
        if not isinstance(lengths, Tensor):
            lengths = torch.tensor(lengths, dtype=torch.int64, device=self.device)
        window = self.window(lengths, back, first, count, parents)
        positions, slots, kv_len, words = place_rows(window, positions)
        return self.rows_of(window, positions, slots, kv_len, words)

    def window(self, lengths: Tensor, back: int, first: int, rows: int, parents: Tensor | None = None) -> Window:
        """What the kernels that place rows need of the first sequences, as many as `lengths` [n]; see `place`."""
        table = self.table[: len(lengths)]
        return Window(lengths, back, first, rows, parents, table, self.page_size, self.last_position)

    def rows_of(self, window: Window, positions: Tensor, slots: Tensor, kv_len: Tensor, ancestors: Tensor) -> Rows:
        """The rows of a window that a kernel has placed."""
        n = len(window.length)
        sizes = window_sizes(window.first + window.rows, self.device, n)
        bounds, ring_rows = sequence_bounds(window.rows, self.device, n), self.ring_rows(slots, slice(n))
        return Rows(positions, slots, kv_len, sizes, ancestors, bounds, window.block_table, ring_rows=ring_rows)

    def after(
        self, columns: Sequence[int], counts: Sequence[int], first: int = 0, full: bool = False, slot: int = 0
    ) -> Rows:
        """Place counts[b] rows of sequence b from column columns[b] on, with lengths known on the host. The window
        begins `first` columns before the first row. A row sees all columns before the window, and in it the rows up to
        itself, or all rows (`full`). `slot`: of a single sequence."""
        words = _full_words if full else chain_words
        if len(columns) == 1:
            start, count = columns[0], counts[0]
            end = start + count
            ancestors, slots = words(count, first), self._slots[slot][start:end]
            return Rows(
                self.positions[start:end],
                slots,
                self.lengths[end : end + 1],
                self.lengths[first + count : first + count + 1],
                ancestors if self.device.type == "cpu" else ancestors.to(self.device),
                sequence_bounds(count, self.device),
                self.table[slot : slot + 1],
                ring_rows=self.ring_rows(slots, slice(slot, slot + 1)),
            )
        ends = [start + count for start, count in zip(columns, counts, strict=True)]
        spans = [slice(start, end) for start, end in zip(columns, ends, strict=True)]
        ancestors_of = [words(count, first) for count in counts]
        wide, bounds = max(w.shape[1] for w in ancestors_of), [0, *accumulate(counts)]
        numbers = [ends, [first + count for count in counts], bounds]
        kv_len, window, cu_rows = (torch.tensor(x, dtype=torch.int32, device=self.device) for x in numbers)
        slots = torch.cat([own[span] for own, span in zip(self._slots, spans, strict=False)])
        return Rows(
            torch.cat([self.positions[s] for s in spans]),
            slots,
            kv_len,
            window,
            torch.cat([torch.nn.functional.pad(w, (0, wide - w.shape[1])) for w in ancestors_of]).to(self.device),
            cu_rows,
            self.table[: len(columns)],
            tuple(bounds),
            self.ring_rows(slots, slice(len(columns))),
        )


@lru_cache(maxsize=512)
def _full_words(rows: int, first: int = 0) -> Tensor:
    """Ancestor words [rows, W] int64 of rows that all see each other."""
    return pack_bits([(1 << (first + rows)) - 1] * rows, first + rows)


@cache
def window_sizes(rows: int, device: torch.device, sequences: int = 1) -> Tensor:
    """[sequences] int32, windows of `rows` rows. CUDA graphs hold its address, so the cache never frees it."""
    return torch.tensor([rows] * sequences, dtype=torch.int32, device=device)


@cache
def sequence_bounds(rows: int, device: torch.device, sequences: int = 1) -> Tensor:
    """[sequences + 1] int32, the first row of each sequence of `rows` rows, then the end. CUDA graphs hold its address,
    so the cache never frees it. The first call copies from the host, which is illegal during capture, so work runs once
    before its capture."""
    return torch.tensor([rows * i for i in range(sequences + 1)], dtype=torch.int32, device=device)
