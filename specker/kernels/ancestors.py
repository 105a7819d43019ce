"""ancestors: bit masks of the window columns that a row sees, and the reference's additive mask.

Bit j % 64 of word j // 64 of a row is set if window column j holds the row itself or one of its ancestors. The words
can hold any relation: a chain, a tree, a forest, a directed acyclic graph, or all ones.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specker.kernels.variant import check_within, tl, triton

MAX_WORDS = 4
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_WORD = (1 << 64) - 1


def ancestor_words(parents: Tensor) -> Tensor:
    """The ancestor bits of a tree, for `tree_attention`.

        bit j % 64 of word j // 64 of row r is set if window column j holds row r or an ancestor of it

    Args:
        parents: [N] integers; draft n is in row n + 1 below row parents[n] <= n, and row 0 is the root.

    Returns:
        [N + 1, W] int64 on parents' device, W = ceil((N + 1) / 64); row r is at window column r.

    Raises:
        TypeError: parents is not a tensor.
        ValueError: parents that are not rows of such a tree, another shape or dtype, or W > 4.

    Source: the tree mask of SpecInfer, arXiv 2305.09781, as bits.

    Examples:
        >>> import torch
        >>> from specker.kernels import ancestor_words
        >>> [f"{words[0]:04b}" for words in ancestor_words(torch.tensor([0, 0, 1])).tolist()]
        ['0001', '0011', '0101', '1011']
    """
    if not isinstance(parents, Tensor):
        raise TypeError(f"parents must be a Tensor, got {type(parents).__name__}")
    if parents.dim() != 1 or parents.dtype not in INTEGERS:
        raise ValueError(f"parents must be [N] integers, got {tuple(parents.shape)} {parents.dtype}")
    if parents.is_meta:
        raise ValueError("parents must hold numbers, got a tensor on meta")
    bits = [1]
    for n, parent in enumerate(parents.tolist()):
        if not 0 <= parent <= n:
            raise ValueError(f"parents[{n}] must be a row in 0..{n}, got {parent}")
        bits.append(bits[parent] | 1 << (n + 1))
    return pack_bits(bits, len(bits)).to(parents.device)


@lru_cache(maxsize=512)
def chain_words(rows: int, first: int = 0) -> Tensor:
    """Ancestor words [rows, W] of a chain: row r sees window columns 0..first + r."""
    rows, first = int(rows), int(first)  # numpy's integers have 64 bits
    return pack_bits([(2 << (first + r)) - 1 for r in range(rows)], first + rows)


def pack_bits(bits: Sequence[int], columns: int) -> Tensor:
    """One unbounded int of bits per row -> [rows, W] int64 words, W = ceil(columns / 64) and at least 1."""
    W = max(1, -(-columns // 64))
    if W > MAX_WORDS:
        raise ValueError(f"a window has at most {64 * MAX_WORDS} columns, got {columns}")
    words = [(b >> 64 * w) & _WORD for b in bits for w in range(W)]
    return torch.from_numpy(np.array(words, np.uint64).view(np.int64).reshape(-1, W))


def check_words(ancestors: Tensor | None, rows: int) -> None:
    """Raise ValueError for anything but the ancestor words of `rows` rows, or None."""
    if ancestors is not None and (
        ancestors.dim() != 2
        or len(ancestors) != rows
        or not 1 <= ancestors.shape[1] <= MAX_WORDS
        or ancestors.dtype != torch.int64
    ):
        raise ValueError(
            f"ancestors must be [{rows}, 1..{MAX_WORDS}] int64, got {tuple(ancestors.shape)} {ancestors.dtype}"
        )


def check_sequences(rows: int, pages: int, page_size: int, args: Any) -> None:
    """Raise ValueError for sequences whose rows, columns or pages lie outside of `rows` rows and a cache of `pages`
    pages. `args` are those of conv_rows or delta_rows. Reads the numbers on the host."""
    starts, lengths, room = args.cu_rows.tolist(), args.kv_len.tolist(), args.block_table.shape[1] * page_size
    most = room if args.ancestors is None else 64 * args.ancestors.shape[1]
    if starts[0] != 0 or starts[-1] != rows or starts != sorted(starts):
        raise ValueError(f"cu_rows must rise from 0 to {rows} rows, got {starts}")
    for b, (length, seen) in enumerate(zip(lengths, args.window.tolist(), strict=True)):
        own = starts[b + 1] - starts[b]
        if not own <= length <= room:
            raise ValueError(f"kv_len must be in {own}..{room}, from its rows to its table's columns, got {length}")
        if not 0 <= seen <= min(length, most):
            raise ValueError(f"window must be in 0..{min(length, most)} in sequence {b}, got {seen}")
        check_within("block_table", args.block_table[b, : -(-length // page_size)], pages)


def unpack_words(words: list[list[int]]) -> tuple[int, ...]:
    """The int64 words of each row -> one unbounded int per row."""
    if len(words[0]) == 1:
        return tuple(row[0] & _WORD for row in words)
    return tuple(sum((x & _WORD) << 64 * w for w, x in enumerate(row)) for row in words)


@lru_cache(maxsize=64)
def ancestor_mask(bits: tuple[int, ...], kv_len: int, window: int, dtype: torch.dtype) -> Tensor | None:
    """Additive mask [rows, kv_len] (0 or -inf), or None if every row sees every column. Cached, because all layers of a
    forward use the same one."""
    full = (1 << window) - 1
    if all(b & full == full for b in bits):
        return None
    column = torch.arange(window, dtype=torch.int64, device="cpu")
    seen = pack_bits(bits, window)[:, column // 64] >> (column % 64) & 1
    mask = torch.zeros(len(bits), kv_len, dtype=dtype, device="cpu")
    mask[:, kv_len - window :].masked_fill_(seen == 0, float("-inf"))
    return mask


@lru_cache(maxsize=64)
def reach_mask(
    bits: tuple[int, ...], kv_len: int, window: int, reach: int, dtype: torch.dtype
) -> tuple[int, Tensor | None]:
    """`ancestor_mask` for rows that see only the last `reach` of their columns. It leaves out the first f columns,
    which no row sees, and returns f and the mask [rows, kv_len - f]."""
    shared, seen, firsts = kv_len - window, [], []
    for b in bits:
        b &= (1 << window) - 1
        first = shared + b.bit_count() - reach  # so many columns are out of reach, the ones before the window first
        for _ in range(first - shared):
            b &= b - 1  # clear the lowest bit
        seen.append(b)
        firsts.append(first)
    least = min(max(min(firsts), 0), shared)
    mask = ancestor_mask(tuple(seen), kv_len - least, window, dtype)
    if max(firsts) > least:
        mask = torch.zeros(len(bits), kv_len - least, dtype=dtype, device="cpu") if mask is None else mask.clone()
        column = torch.arange(least, shared, dtype=torch.int64, device="cpu")
        out = column < torch.tensor(firsts, dtype=torch.int64, device="cpu")[:, None]
        mask[:, : shared - least].masked_fill_(out, float("-inf"))
    return least, mask


@triton.jit
def first_bits(n):
    """A word with its first n bits set: all of them for n >= 64, none for n <= 0."""
    ones = tl.full([], -1, tl.int64).to(tl.uint64, bitcast=True) >> tl.minimum(tl.maximum(64 - n, 0), 63).to(tl.uint64)
    return tl.where(n > 0, ones, 0)


@triton.jit
def parent_of(words_ptr, i_t, m_t, w, W: tl.constexpr):
    """The window column of the parent of row i_t, itself at window column w: the highest bit below w of the row's W
    words, or -1. One row or a tile of rows, each within a thread."""
    top, at = tl.zeros_like(w).to(tl.uint32), tl.zeros_like(w) - 1
    for i_w in tl.static_range(W):
        word = tl.load(words_ptr + i_t * W + i_w, mask=m_t, other=0).to(tl.uint64, bitcast=True)
        word = word & first_bits(w - 64 * i_w)
        for i_half in tl.static_range(2):
            x = (word >> (32 * i_half)).to(tl.uint32)
            top, at = tl.where(x != 0, x, top), tl.where(x != 0, 64 * i_w + 32 * i_half - 127, at)
    # The highest bit is the exponent as a float. Without the bit below it, top is not rounded up to a power of 2.
    return at + ((top & ~(top >> 1)).to(tl.float32).to(tl.int32, bitcast=True) >> 23)
