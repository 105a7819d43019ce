"""place_rows: compute the positions, slots and masks of B sequences' rows in device memory.

A CUDA graph replays the same launches with the same addresses; its kernels read the texts' lengths from memory and
derive positions, slots and masks.

Sequence b's text has `length[b]` tokens; the last one is the root. A round's rows form a window that begins at column
length - back (back 1: the root's column); row r is r columns further. The parent of row r > 0 is row parents[r - 1] <
r, or row r - 1 in a chain.

place_rows, for rows first..first + count - 1 of each sequence (depth(r): steps from row r to row 0):

    positions = min(length - back + depth(r), last_position)     rows beyond the text's limit are unused
    slots     = block_table[column // page_size] * page_size + column % page_size
    kv_len    = min(length - back + first + count, P * page_size)
    ancestors = the bits of r and of every row on the path to row 0     (ancestors.py)

Columns beyond the table are clamped to its last column. kv_len is then clamped too, but the caller's window size is
not, so the mask shifts. Therefore a table needs room for every row whose token is read; only unused rows may exceed it.

Tables and parents may be row-strided views, such as the first columns of a wider table, without a copy. The integers
are a few hundred bytes per sequence; on a GPU the host reads nothing. On a CPU a decoding step of a small model takes
only a millisecond, so rows are placed with Python integers there, which are cheaper than torch operations.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specker.kernels.ancestors import MAX_WORDS, chain_words, pack_bits
from specker.kernels.registry import explained
from specker.kernels.variant import Variant, check_within, rowwise, same_device, start_after_previous, tl, triton

MAX_ROWS = 64 * MAX_WORDS


class Window(NamedTuple):
    """Rows first..first + rows - 1 of the windows of B sequences."""

    length: Tensor  # [B] int64, tokens of each text
    back: int  # the window begins at column length - back
    first: int
    rows: int  # how many: `count` in the contracts
    parents: Tensor | None  # [B, >= first + rows - 1] int64; None: chains
    block_table: Tensor  # [B, P] int32, page ids
    page_size: int
    last_position: int


def explain_place(window: Window, positions: Tensor | None) -> None:
    check_place(window, positions)
    length, block_table = window.length, window.block_table
    same_device(length, parents=window.parents, block_table=block_table, positions=positions)
    for name in ("back", "page_size", "last_position"):
        if not 0 <= getattr(window, name) < 1 << 31:
            raise ValueError(f"{name} must be in 0..2^31 - 1, got {getattr(window, name)}")
    check_within("length", length, 1 << 31)
    if not block_table.shape[1]:
        raise ValueError(f"block_table must be [{len(length)}, P >= 1] int32, got {tuple(block_table.shape)}")


@explained(explain_place)
def place_rows(window: Window, positions: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Positions [B * count] and slots [B * count] int64, kv_len [B] int32, ancestors [B * count, W] int64 of the
    window's rows, with W = ceil((first + count) / 64) <= 4; row b * count + i is sequence b's row first + i. On a CPU
    the result is read-only, because chains share their words. On a GPU the positions are written to `positions` if
    given.

    Raises ValueError for other shapes and dtypes. Columns outside the table are clamped to its first or last.
    """
    check_place(window, positions)
    if window.length.is_cuda:
        return launch_place(window, positions)
    length, back, first, count, parents, block_table, page_size, last_position = window
    rows, B = first + count, length.shape[0]
    depths: list[int] | range = range(first, rows)
    each: list[int] = []
    places: list[int] = []
    kv_len: list[int] = []
    bits: list[int] = []
    last = block_table.shape[1] * page_size - 1
    for b, n in enumerate(length.tolist()):
        if parents is not None:
            depths, seen = _paths(parents[b, : rows - 1].tolist())
            depths = depths[first:]
            bits += seen[first:]
        start = n - back
        each += [min(max(start + depth, 0), last_position) for depth in depths]
        places += slots(range(start + first, start + rows), block_table, b, page_size)
        kv_len.append(min(start + rows, last + 1))
    if parents is not None:
        words = pack_bits(bits, rows)
    else:
        words = chain_words(count, first)
        words = words if B == 1 else words.repeat(B, 1)
    return _tensor(each), _tensor(places), torch.from_numpy(np.array(kv_len, np.int32)), words


def place_rows_cost(window: Window) -> tuple[int, int]:
    """(bytes, operations) of one call."""
    B, count, rows = len(window.length), window.rows, window.first + window.rows
    each = 8 * (2 + -(-rows // 64))  # position, slot, ancestors
    up = 0 if window.parents is None else 8 * (rows - 1)
    return B * (count * each + up + 8 + 4 + 4), B * count * rows  # length, kv_len, a page


def _tensor(numbers: list[int] | list[list[int]]) -> Tensor:
    """int64 tensor; numpy converts a list in a third of torch's time."""
    return torch.from_numpy(np.array(numbers, np.int64))


def _paths(parents: list[int]) -> tuple[list[int], list[int]]:
    """Each row's depth, and the bits of the rows on its path to row 0."""
    depths, bits = [0], [1]
    for r, parent in enumerate(parents, 1):
        parent = min(max(parent, 0), r - 1)
        depths.append(depths[parent] + 1)
        bits.append(bits[parent] | 1 << r)
    return depths, bits


def slots(columns: range, block_table: Tensor, b: int, page_size: int) -> list[int]:
    """The slots of sequence b's columns; columns outside the table are clamped to its first or last."""
    last = block_table.shape[1] * page_size - 1
    if columns.start < 0 or columns[-1] > last:
        inside = [min(max(c, 0), last) for c in columns]
    else:
        inside = columns  # type: ignore[assignment]
    low = inside[0] // page_size
    pages = block_table.numpy()[b, low : inside[-1] // page_size + 1].tolist()
    if len(pages) == 1:
        apart = (pages[0] - low) * page_size
        return [c + apart for c in inside]
    return [pages[c // page_size - low] * page_size + c % page_size for c in inside]


@triton.jit
def slot(column, table_ptr, columns, page_size):
    column = tl.minimum(tl.maximum(column, 0), columns - 1)
    return tl.load(table_ptr + column // page_size).to(tl.int64) * page_size + column % page_size


@triton.jit
def place(
    i,  # the row's index among the requested rows
    i_b,  # the row's sequence
    count,
    start,  # the window's first column
    first,
    pointers,  # to parents and table; to positions, slots, kv_len and ancestors
    sizes,
    W: tl.constexpr,
    W_PAD: tl.constexpr,
    TREE: tl.constexpr,
):
    """Store a row's position, slot and ancestors; row 0 also stores the sequence's kv_len."""
    parents_ptr, table_ptr, positions_ptr, slots_ptr, kv_len_ptr, words_ptr = pointers
    columns, page_size, last_position, up_stride, table_stride = sizes
    i_out = i_b * count + i
    r = first + i
    o_w = tl.arange(0, W_PAD)
    one = tl.full([W_PAD], 1, tl.int64)
    if TREE:
        p_up = parents_ptr + i_b * up_stride
        row, depth = r, 0
        b_words = tl.where(o_w == row // 64, one << (row % 64), 0)
        while row > 0:
            parent = tl.load(p_up + row - 1).to(tl.int32)
            row = tl.minimum(tl.maximum(parent, 0), row - 1)
            depth += 1
            b_words = b_words | tl.where(o_w == row // 64, one << (row % 64), 0)
    else:
        depth = r
        n = r + 1 - 64 * o_w  # how many bits of each word are set
        b_words = tl.where(n >= 64, -1, (one << tl.minimum(tl.maximum(n, 0), 63)) - 1)
    tl.store(positions_ptr + i_out, tl.minimum(tl.maximum(start + depth, 0), last_position))
    tl.store(slots_ptr + i_out, slot(start + r, table_ptr + i_b * table_stride, columns, page_size))
    tl.store(words_ptr + i_out * W + o_w, b_words, mask=o_w < W)
    if i == 0:
        tl.store(kv_len_ptr + i_b, tl.minimum(start + first + count, columns).to(tl.int32))


@triton.jit(
    do_not_specialize=["back", "first", "columns", "page_size", "last_position", "up_stride", "table_stride"],
    do_not_specialize_on_alignment=["length_ptr", "parents_ptr", "table_ptr"],
)
def _place_rows_kernel(
    length_ptr,  # [B]
    parents_ptr,  # [B, >= first + count - 1]
    table_ptr,  # [B, P]
    positions_ptr,  # [B, count]
    slots_ptr,  # [B, count]
    kv_len_ptr,  # [B]
    words_ptr,  # [B, count, W]
    back,
    first,
    columns,  # P * page_size
    page_size,
    last_position,
    up_stride,  # from a sequence's parents to the next one's
    table_stride,
    W: tl.constexpr,
    W_PAD: tl.constexpr,  # a power of two
    TREE: tl.constexpr,  # if false, parents are not read
    PDL: tl.constexpr,
):
    start_after_previous(PDL)
    i, i_b, count = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    start = tl.load(length_ptr + i_b) - back
    pointers = (parents_ptr, table_ptr, positions_ptr, slots_ptr, kv_len_ptr, words_ptr)
    sizes = (columns, page_size, last_position, up_stride, table_stride)
    place(i, i_b, count, start, first, pointers, sizes, W, W_PAD, TREE)


class Placing(NamedTuple):
    """What a kernel takes to place rows, its last runtime arguments. `PLACING` has their types."""

    length: Tensor
    parents: Tensor
    table: Tensor
    positions: Tensor
    slots: Tensor
    kv_len: Tensor
    ancestors: Tensor
    back: int
    first: int
    columns: int
    page_size: int
    last_position: int
    up_stride: int
    table_stride: int

    @property
    def results(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.positions, self.slots, self.kv_len, self.ancestors


PLACING = ("*i64", "*i64", "*i32", "*i64", "*i64", "*i32", "*i64", *("i32",) * 7)


def masks(words: int, tree: bool) -> dict[str, Any]:
    """The constexprs of `place`."""
    return {"W": words, "W_PAD": triton.next_power_of_2(words), "TREE": tree}


@lru_cache
def _place_variant(words: int, tree: bool) -> Variant:
    """One program of one warp per row: a tree's row walks to the root by about a dozen dependent loads from L1."""
    return Variant(
        name=f"place {'tree' if tree else 'chain'} W{words}",
        kernel=_place_rows_kernel,
        arguments=PLACING,
        constexprs=masks(words, tree),
        num_warps=1,
        wide=False,
        smoke=words == 1 and tree,
    )


def variants(arch: int) -> Iterator[Variant]:
    """The variants that the compile-only checks compile for sm_`arch`."""
    for words in (1, 2, 3, 4):
        for tree in (False, True):
            yield _place_variant(words, tree)


def launch_place(window: Window, positions: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    placing = placing_of(window, positions)
    variant = _place_variant(placing.ancestors.shape[1], window.parents is not None)
    variant((window.rows, len(window.length)), *placing)
    return placing.results


def placing_of(window: Window, positions: Tensor | None = None) -> Placing:
    """With memory for the results; for the positions, `positions` if given."""
    length, _, first, count, parents, block_table, page_size, _ = window
    same_device(length, parents=parents, block_table=block_table, positions=positions)
    table, up = rowwise(block_table), length if parents is None else rowwise(parents)
    B, words = len(length), -(-(first + count) // 64)
    if positions is None:
        positions = length.new_empty(B * count)
    return Placing(
        length.contiguous(),
        up,
        table,
        positions,
        slots=torch.empty_like(positions),
        kv_len=length.new_empty(B, dtype=torch.int32),
        ancestors=length.new_empty(B * count, words),
        back=window.back,
        first=first,
        columns=table.shape[1] * page_size,
        page_size=page_size,
        last_position=window.last_position,
        up_stride=up.stride(0),
        table_stride=table.stride(0),
    )


def check_place(window: Window, positions: Tensor | None) -> None:
    length, _, first, count, parents, block_table, page_size, _ = window
    rows, B = int(first) + int(count), length.shape[0] if length.dim() else 0
    if length.dim() != 1 or length.dtype != torch.int64 or not B:
        raise ValueError(f"length must be [B >= 1] int64, got {tuple(length.shape)} {length.dtype}")
    if first < 0 or count < 1 or rows > MAX_ROWS:
        raise ValueError(f"a window has 1..{MAX_ROWS} rows, got {count} from row {first} on")
    if parents is not None:
        if parents.dim() != 2 or len(parents) != B or parents.dtype != torch.int64:
            raise ValueError(f"parents must be [{B}, n] int64, got {tuple(parents.shape)} {parents.dtype}")
        if parents.shape[1] < rows - 1:
            raise ValueError(f"rows up to {rows - 1} need as many parents, got {parents.shape[1]}")
    if positions is not None and (positions.shape != (B * count,) or positions.dtype != torch.int64):
        raise ValueError(f"positions must be [{B * count}] int64, got {tuple(positions.shape)} {positions.dtype}")
    check_table(block_table, B, page_size)


def check_table(block_table: Tensor, B: int, page_size: int) -> None:
    if block_table.dim() != 2 or block_table.shape[0] != B or block_table.dtype != torch.int32 or page_size < 1:
        raise ValueError(
            f"expected block_table [{B}, P] int32 and a page size of at least 1: {tuple(block_table.shape)} "
            f"{block_table.dtype}, {page_size}"
        )
