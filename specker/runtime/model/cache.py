"""The paged K/V cache of one sequence, all layers in one allocation, and the rule that keeps it exact.

Columns 0..exact_len-1 hold the K/V of the first `exact_len` committed tokens, written by an exact forward. Columns
after them are scratch: a verify pass or a drafter writes there, then `commit` keeps some rows or `truncate` forgets
them. Nothing is ever "mostly right" below exact_len.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specker.kernels.attention import chain_words
from specker.kernels.kv import kv_commit
from specker.runtime.model.config import ModelConfig
from specker.runtime.ops.rounds import place_rows


class Start(NamedTuple):
    """Where a window of rows begins when only the device knows: at column length - back."""

    length: Tensor  # [1] int64
    back: int


class Rows(NamedTuple):
    """Where rows stand, and what they see."""

    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64
    kv_len: Tensor  # [1] int32, the rows' columns included
    window: Tensor  # [1] int32, the last columns, seen through `ancestors`
    ancestors: Tensor  # [T, W] int64


class KVCache:
    """K and V [L, pages, page_size, Hkv, D]; column c of the sequence stands at slot block_table[c // page] * page +
    c % page of every layer."""

    def __init__(
        self,
        config: ModelConfig,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        page_size: int = 256,
        pages: Tensor | None = None,
    ):
        """`capacity` columns. `pages` [P] int32 orders the pages (a test permutes them); by default 0..P-1."""
        count = -(-capacity // page_size)
        shape = (2, config.num_layers, count, page_size, config.num_kv_heads, config.head_dim)
        self.k, self.v = torch.empty(shape, dtype=dtype, device=device).unbind(0)
        self.layers = list(zip(self.k.unbind(0), self.v.unbind(0), strict=True))
        pages = torch.arange(count, dtype=torch.int32) if pages is None else pages
        self.block_table = pages.to(device).unsqueeze(0)  # [1, P]
        self.page_size = page_size
        self.capacity = count * page_size
        self.table = self.block_table  # what attention is shown: the pages of `reach` columns
        self.exact_len = 0
        offsets = torch.arange(page_size, device=device)
        self.slot_of = (self.block_table[0].long()[:, None] * page_size + offsets).flatten()  # [capacity]
        # One-element tensors of every length, so that a step slices one instead of copying a number to the device.
        self.lengths = torch.arange(self.capacity + 1, dtype=torch.int32, device=device)

    def commit(self, path: list[int]) -> None:
        """Keep rows `path` (ascending) of those written after exact_len; they become the next columns."""
        base, kept = self.exact_len, len(path)
        if path[-1] != kept - 1:  # a chain's accepted rows are in place already
            moved = next(i for i, row in enumerate(path) if row != i)
            src = self.slot_of[[base + row for row in path[moved:]]]
            kv_commit(self.k, self.v, src, self.slot_of[base + moved : base + kept])
        self.exact_len = base + kept

    def truncate(self, length: int) -> None:
        """Forget every column from `length` on."""
        if not 0 <= length <= self.exact_len:
            raise ValueError(f"cannot truncate a cache of {self.exact_len} exact columns to {length}")
        self.exact_len = length

    def check(self, committed: int | None = None) -> None:
        """Raise AssertionError unless the invariants hold; with `committed`, the count of committed tokens: the
        target's cache holds all of them but the root."""
        assert 0 <= self.exact_len <= self.capacity, (self.exact_len, self.capacity)
        pages = self.block_table[0].tolist()
        assert sorted(set(pages)) == sorted(pages) and min(pages) >= 0 and max(pages) < self.k.shape[1], pages
        if committed is not None:
            assert self.exact_len == committed - 1, (self.exact_len, committed)
        written = self.slot_of[: self.exact_len]
        for cache in (self.k, self.v):
            rows = cache.flatten(1, 2)[:, written]
            assert bool(torch.isfinite(rows).all()), "a committed column holds NaN or infinity"

    def reach(self, columns: int) -> None:
        """Let attention look no further than `columns`, so that it launches no program beyond them."""
        self.table = self.block_table[:, : -(-min(columns, self.capacity) // self.page_size)]

    def place(self, start: Start, first: int, count: int, parents: Tensor | None, last_position: int) -> Rows:
        """Rows first..first + count - 1 of the window that begins at `start`: a chain, or a tree by its parents."""
        up = None if parents is None else parents[None]
        placed = place_rows(*start, first, count, up, self.block_table, self.page_size, last_position)
        positions, slots, kv_len, words = placed
        return Rows(positions, slots, kv_len, self.lengths[first + count : first + count + 1], words)

    def chain_rows(self, count: int, first: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For `count` rows in a chain at columns exact_len + first..: slots [count], kv_len [1], window [1] and
        ancestors [count, W]. The window starts at exact_len."""
        start = self.exact_len + first
        end = start + count
        words = chain_words(count, first)
        return (
            self.slot_of[start:end],
            self.lengths[end : end + 1],
            self.lengths[first + count : first + count + 1],
            words if self.k.device.type == "cpu" else words.to(self.k.device),
        )
