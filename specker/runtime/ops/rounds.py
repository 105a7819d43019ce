"""place_rows and advance: the state of the rounds of B sequences, in device memory. A CUDA graph replays the same
launches with the same addresses; its kernels read the texts' lengths from memory and derive positions, slots and masks.

Sequence b's text is the first `length[b]` tokens of `committed[b]` [C] int64; the last one is the root. A round's rows
form a window that begins at column length - back (back 1: the root's column); row r has that column plus r. The parent
of row r > 0 is row parents[r - 1] < r, or row r - 1 in a chain.

place_rows, for rows first..first + count - 1 of each sequence (depth(r): steps from row r to row 0):

    positions = min(length - back + depth(r), last_position)     rows beyond the text's limit are unused
    slots     = block_table[column // page_size] * page_size + column % page_size
    kv_len    = min(length - back + first + count, P * page_size)
    ancestors = the bits of r and of every row on the path to row 0     (ancestors.py)

Columns beyond the table are clamped to its last column. kv_len is then clamped too, but the caller's window size is
not, so the mask shifts. Therefore a table needs room for every row whose token is read; only unused rows may exceed it.

advance, with the paths and counts of `accept_walk`:

    emitted   = target[path[i]], i < count       the target's own tokens: the accepted ones and the next
    committed[length + i] = emitted[i] and length += count, both up to `limit`
    window[0] = emitted[count - 1]               the new root
    report    = count, path, emitted             [1 + 2 R], padded with -1: the only copy to the host
    src, dst  = slots of rows path[i] and of rows i, for kv_commit; equal for i >= count

Tables, parents, texts and windows may be row-strided views, such as the first columns of a wider table, without a copy.
All integers, a few hundred bytes per sequence; on a GPU the host reads nothing. On a CPU a decoding step of a small
model takes a millisecond, so both compute with Python integers, which are cheaper than torch operations.
"""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from specker.kernels.ancestors import MAX_WORDS, chain_words, pack_bits
from specker.kernels.variant import Variant, same_device, tl, triton

MAX_ROWS = 64 * MAX_WORDS


def place_rows(
    length: Tensor,
    back: int,
    first: int,
    count: int,
    parents: Tensor | None,
    block_table: Tensor,
    page_size: int,
    last_position: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """length [B] int64, parents [B, >= first + count - 1] int64 or None, block_table [B, P] int32 -> positions
    [B * count] and slots [B * count] int64, kv_len [B] int32, ancestors [B * count, W] int64, with
    W = ceil((first + count) / 64) <= 4; row b * count + i is sequence b's row first + i. On a CPU the result is
    read-only, because chains share their words.

    Raises ValueError for other shapes and dtypes. Columns outside the table are clamped to its first or last.
    """
    rows, B = first + count, length.shape[0]
    if length.dim() != 1 or length.dtype != torch.int64 or not B:
        raise ValueError(f"length must be [B >= 1] int64, got {tuple(length.shape)} {length.dtype}")
    if first < 0 or count < 1 or rows > MAX_ROWS:
        raise ValueError(f"a window has 1..{MAX_ROWS} rows, got {count} from row {first} on")
    if parents is not None:
        if parents.dim() != 2 or len(parents) != B or parents.dtype != torch.int64:
            raise ValueError(f"parents must be [{B}, n] int64, got {tuple(parents.shape)} {parents.dtype}")
        if parents.shape[1] < rows - 1:
            raise ValueError(f"rows up to {rows - 1} need as many parents, got {parents.shape[1]}")
    _check_table(block_table, B, page_size)
    if length.is_cuda:
        return _launch_place(length, back, first, count, parents, block_table, page_size, last_position)
    depths: list[int] | range = range(first, rows)
    positions: list[int] = []
    slots: list[int] = []
    kv_len: list[int] = []
    bits: list[int] = []
    last = block_table.shape[1] * page_size - 1
    for b, n in enumerate(length.tolist()):
        if parents is not None:
            depths, seen = _paths(parents[b, : rows - 1].tolist())
            depths = depths[first:]
            bits += seen[first:]
        start = n - back
        positions += [min(max(start + depth, 0), last_position) for depth in depths]
        slots += _slots(range(start + first, start + rows), block_table, b, page_size)
        kv_len.append(min(start + rows, last + 1))
    if parents is not None:
        words = pack_bits(bits, rows)
    else:
        words = chain_words(count, first)
        words = words if B == 1 else words.repeat(B, 1)
    return _tensor(positions), _tensor(slots), torch.from_numpy(np.array(kv_len, np.int32)), words


def place_rows_cost(length: Tensor, back: int, first: int, count: int, *_: object) -> tuple[int, int]:
    """(bytes, operations) of one call."""
    B = len(length)
    return B * (count * (8 * 3 + 8 * -(-(first + count) // 64)) + 16), B * count * (first + count)


def advance(
    path: Tensor,
    count: Tensor,
    target: Tensor,
    committed: Tensor,
    length: Tensor,
    window: Tensor,
    limit: Tensor,
    block_table: Tensor,
    page_size: int,
    moves: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """path [B, R] and count [B] of `accept_walk`, target [B, R], committed! [B, C], length! [B], window! [B, >= 1] and
    limit [B], all int64, block_table [B, P] int32 -> report [B, 1 + 2 R], src [B * R], dst [B * R] int64. Without
    `moves` (a chain's accepted rows are already in place) src and dst are empty. "!" marks tensors that it updates.

    Raises ValueError for other shapes and dtypes. Never writes beyond a row of `committed`.
    """
    shape = path.shape
    if len(shape) != 2 or target.shape != shape or not shape[0] or not 1 <= shape[1] <= MAX_ROWS:
        raise ValueError(
            f"expected path and target [B >= 1, R], R in 1..{MAX_ROWS}: {tuple(shape)}, {tuple(target.shape)}"
        )
    B, R = shape
    if not count.shape == length.shape == limit.shape == shape[:1] or not length.is_contiguous():
        raise ValueError(
            f"count, length and limit must be [{B}], length contiguous: {tuple(count.shape)}, {tuple(length.shape)}, "
            f"{tuple(limit.shape)}"
        )
    for x in (committed, window):
        if x.dim() != 2 or x.shape[0] != B or x.stride(1) != 1 or not x.shape[1]:
            raise ValueError(f"committed and window must be [{B}, n >= 1] with contiguous rows, got {tuple(x.shape)}")
    state = committed.dtype, length.dtype, window.dtype, limit.dtype
    if not path.dtype == count.dtype == target.dtype == torch.int64 or state != (torch.int64,) * 4:
        raise ValueError(f"all but the table must be int64: {path.dtype}, {count.dtype}, {target.dtype}, {state}")
    _check_table(block_table, B, page_size)
    if path.is_cuda:
        return _launch_advance(path, count, target, committed, length, window, limit, block_table, page_size, moves)
    report: list[list[int]] = []
    src: list[int] = []
    dst: list[int] = []
    texts, lengths, roots = committed.numpy(), length.numpy(), window.numpy()
    capacity = texts.shape[1]
    each = zip(path.tolist(), count.tolist(), target.tolist(), lengths.tolist(), limit.tolist(), strict=True)
    for b, (rows, n, tokens, at, last) in enumerate(each):
        n = min(max(n, 0), R)
        pad = [-1] * (R - n)
        kept = rows[:n]
        emitted = [tokens[r] for r in kept]
        report.append([n, *kept, *pad, *emitted, *pad])
        if moves:
            here = _slots(range(at - 1, at - 1 + R), block_table, b, page_size)
            src += [here[r] for r in kept] + here[n:]
            dst += here
        after = min(at + n, last, capacity)
        if after > at:
            texts[b, at:after] = emitted[: after - at]
            lengths[b] = after
        if n:
            roots[b, 0] = emitted[-1]
    if not moves:
        return _tensor(report), (nothing := path.new_empty(0)), nothing
    return _tensor(report), _tensor(src), _tensor(dst)


def advance_cost(path: Tensor, *_: object) -> tuple[int, int]:
    """(bytes, operations) of one call."""
    B, R = path.shape
    return B * (8 * 9 * R + 40), 8 * B * R


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


def _slots(columns: range, block_table: Tensor, b: int, page_size: int) -> list[int]:
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
def _slot(column, table_ptr, columns, page_size):
    column = tl.minimum(tl.maximum(column, 0), columns - 1)
    return tl.load(table_ptr + column // page_size).to(tl.int64) * page_size + column % page_size


@triton.jit(
    do_not_specialize=["back", "first", "rows", "columns", "page_size", "last_position", "up_stride", "table_stride"],
    do_not_specialize_on_alignment=["length_ptr", "parents_ptr", "table_ptr"],
)
def _place_rows_kernel(
    length_ptr,  # [B]
    parents_ptr,  # [B, >= rows - 1]
    table_ptr,  # [B, P]
    positions_ptr,  # [B, count]
    slots_ptr,  # [B, count]
    kv_len_ptr,  # [B]
    words_ptr,  # [B, count, W]
    back,
    first,
    rows,  # first + count
    columns,  # P * page_size
    page_size,
    last_position,
    up_stride,  # from a sequence's parents to the next one's
    table_stride,
    W: tl.constexpr,
    W_PAD: tl.constexpr,  # a power of two
    TREE: tl.constexpr,  # if false, parents are not read
):
    i, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_out = i_b * tl.num_programs(0) + i
    r = first + i
    start = tl.load(length_ptr + i_b) - back
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
        n = r + 1 - 64 * o_w  # bits of each word
        b_words = tl.where(n >= 64, -1, (one << tl.minimum(tl.maximum(n, 0), 63)) - 1)
    tl.store(positions_ptr + i_out, tl.minimum(tl.maximum(start + depth, 0), last_position))
    tl.store(slots_ptr + i_out, _slot(start + r, table_ptr + i_b * table_stride, columns, page_size))
    tl.store(words_ptr + i_out * W + o_w, b_words, mask=o_w < W)
    if i == 0:
        tl.store(kv_len_ptr + i_b, tl.minimum(start + rows, columns).to(tl.int32))


@triton.jit(
    do_not_specialize=[
        *("rows", "capacity", "columns", "page_size", "path_stride", "target_stride", "text_stride", "window_stride"),
        "table_stride",
    ],
    do_not_specialize_on_alignment=[
        *("path_ptr", "count_ptr", "target_ptr", "committed_ptr", "length_ptr", "window_ptr", "limit_ptr"),
        "table_ptr",
    ],
)
def _advance_kernel(
    path_ptr,  # [B, rows]
    count_ptr,  # [B]
    target_ptr,  # [B, rows]
    committed_ptr,  # [B, capacity]
    length_ptr,  # [B]
    window_ptr,  # [B, 1]
    limit_ptr,  # [B]
    table_ptr,  # [B, P]
    report_ptr,  # [B, 1 + 2 rows]
    src_ptr,  # [B, rows]
    dst_ptr,  # [B, rows]
    rows,
    capacity,
    columns,  # P * page_size
    page_size,
    path_stride,
    target_stride,
    text_stride,
    window_stride,
    table_stride,
    BLOCK: tl.constexpr,  # a power of two, at least rows
    MOVES: tl.constexpr,  # if false, there are no src and dst
):
    i_b = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, BLOCK)
    length = tl.load(length_ptr + i_b)
    count = tl.minimum(tl.maximum(tl.load(count_ptr + i_b), 0), rows)
    m, inside = o < rows, o < count
    b_row = tl.load(path_ptr + i_b * path_stride + o, mask=inside, other=-1)
    inside = inside & (b_row >= 0) & (b_row < rows)
    b_token = tl.load(target_ptr + i_b * target_stride + b_row, mask=inside, other=-1)
    last = tl.minimum(tl.load(limit_ptr + i_b), capacity)
    tl.store(committed_ptr + i_b * text_stride + length + o, b_token, mask=inside & (length + o < last))
    tl.store(window_ptr + i_b * window_stride + o * 0, b_token, mask=inside & (o == count - 1))
    p_report = report_ptr + i_b * (1 + 2 * rows)
    tl.store(p_report, count)
    tl.store(p_report + 1 + o, b_row, mask=m)
    tl.store(p_report + 1 + rows + o, b_token, mask=m)
    if MOVES:
        p_table = table_ptr + i_b * table_stride
        b_from = tl.where(inside, b_row, o.to(tl.int64))
        tl.store(src_ptr + i_b * rows + o, _slot(length - 1 + b_from, p_table, columns, page_size), mask=m)
        tl.store(dst_ptr + i_b * rows + o, _slot(length - 1 + o, p_table, columns, page_size), mask=m)
    tl.debug_barrier()  # every thread has read the length
    tl.store(length_ptr + i_b, tl.maximum(length, tl.minimum(length + count, last)))


@lru_cache
def _place_variant(words: int, tree: bool) -> Variant:
    """One program of one warp per row: a tree's row walks to the root by about a dozen dependent loads from L1."""
    return Variant(
        name=f"place {'tree' if tree else 'chain'} W{words}",
        kernel=_place_rows_kernel,
        arguments=("*i64", "*i64", "*i32", "*i64", "*i64", "*i32", "*i64", *("i32",) * 8),
        constexprs={"W": words, "W_PAD": triton.next_power_of_2(words), "TREE": tree},
        num_warps=1,
        wide=False,
        smoke=words == 1 and tree,
    )


@lru_cache
def _advance_variant(block: int, moves: bool) -> Variant:
    """One program per sequence."""
    return Variant(
        name=f"advance {block}" + " moves" * moves,
        kernel=_advance_kernel,
        arguments=("*i64",) * 7 + ("*i32",) + ("*i64",) * 3 + ("i32",) * 9,
        constexprs={"BLOCK": block, "MOVES": moves},
        num_warps=1,
        wide=False,
        smoke=block == 16 and moves,
    )


def variants(arch: int) -> Iterator[Variant]:
    """The variants that the compile-only checks compile for sm_`arch`."""
    for words in (1, 2, 3, 4):
        for tree in (False, True):
            yield _place_variant(words, tree)
    for block in (1, 16, 256):
        for moves in (False, True):
            yield _advance_variant(block, moves)


def _launch_place(
    length: Tensor,
    back: int,
    first: int,
    count: int,
    parents: Tensor | None,
    block_table: Tensor,
    page_size: int,
    last_position: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    same_device(length, parents=parents, block_table=block_table)
    rows, B = first + count, length.shape[0]
    words = -(-rows // 64)
    positions, slots = length.new_empty(B * count), length.new_empty(B * count)
    kv_len, ancestors = length.new_empty(B, dtype=torch.int32), length.new_empty(B * count, words)
    table, up = _rowwise(block_table), length if parents is None else _rowwise(parents)
    sizes = back, first, rows, table.shape[1] * page_size, page_size, last_position, up.stride(0), table.stride(0)
    variant = _place_variant(words, parents is not None)
    variant((count, B), length.contiguous(), up, table, positions, slots, kv_len, ancestors, *sizes)
    return positions, slots, kv_len, ancestors


def _launch_advance(
    path: Tensor,
    count: Tensor,
    target: Tensor,
    committed: Tensor,
    length: Tensor,
    window: Tensor,
    limit: Tensor,
    block_table: Tensor,
    page_size: int,
    moves: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    others = {"length": length, "window": window, "limit": limit, "block_table": block_table}
    same_device(path, count=count, target=target, committed=committed, **others)
    B, R = path.shape
    report, src = path.new_empty(B, 1 + 2 * R), path.new_empty(B * R if moves else 0)
    dst = torch.empty_like(src)
    path, target, table = _rowwise(path), _rowwise(target), _rowwise(block_table)
    sizes = R, committed.shape[1], table.shape[1] * page_size, page_size
    strides = (x.stride(0) for x in (path, target, committed, window, table))
    texts = target, committed, length, window, limit.contiguous(), table
    _advance_variant(triton.next_power_of_2(R), moves)(
        (B,), path, count.contiguous(), *texts, report, src, dst, *sizes, *strides
    )
    return report, src, dst


def _rowwise(x: Tensor) -> Tensor:
    """x with contiguous rows; copies only unusual views."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _check_table(block_table: Tensor, B: int, page_size: int) -> None:
    if block_table.dim() != 2 or block_table.shape[0] != B or block_table.dtype != torch.int32 or page_size < 1:
        raise ValueError(
            f"expected block_table [{B}, P] int32 and a page size of at least 1: {tuple(block_table.shape)} "
            f"{block_table.dtype}, {page_size}"
        )
