"""advance: where a round stands, kept in memory. A CUDA graph replays the same launches with the same addresses; what
changes from round to round is read from there: how long the text is, and with it positions, slots and masks.

The text is `committed` [C] int64, of which the first `length` [1] int64 tokens count; the last of them is the root. A
round's rows form a window that begins at column length - back (back 1: at the root's): row r stands at that column plus
r. Row 0 begins the window and row r > 0 hangs on row parents[r - 1] < r, or on row r - 1 without parents (a chain).

place_rows, for rows first..first + count - 1 (depth(r): steps from row r to row 0):

    positions = min(length - back + depth(r), last_position)     a draft may reach beyond the text's end, for nothing
    slots     = block_table[column // page_size] * page_size + column % page_size
    kv_len    = length - back + first + count
    ancestors = the bits of r and of every row on its way to row 0      (ancestors.py)

advance, after `accept_walk` gave the path and its count:

    emitted   = target[path[i]], i < count       the target's own tokens: the accepted ones and the next
    committed[length + i] = emitted[i] and length += count, both no further than `limit` [1]
    window[0] = emitted[count - 1]               the new root
    report    = count, path, emitted             [1 + 2 (N + 1)], padded with -1: all that the host is told
    src, dst  = slots of rows path[i] and of rows i, for kv_commit; equal for i >= count

Integers, a few hundred bytes; no number is read on the host.
"""

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from specker.kernels.ancestors import MAX_WORDS, pack_bits
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
    """length [1] int64, parents [>= first + count - 1] int64 or None, block_table [1, P] int32 -> positions [count] and
    slots [count] int64, kv_len [1] int32, ancestors [count, W] int64, W = ceil((first + count) / 64) <= 4.

    Raises ValueError on other shapes and dtypes. Columns outside the table are taken for its first or last.
    """
    if torch.compiler.is_compiling():
        return torch.ops.specker.place_rows(length, back, first, count, parents, block_table, page_size, last_position)
    return _place_rows(length, back, first, count, parents, block_table, page_size, last_position)


def _place_rows(
    length: Tensor,
    back: int,
    first: int,
    count: int,
    parents: Tensor | None,
    block_table: Tensor,
    page_size: int,
    last_position: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_place(length, back, first, count, parents, block_table, page_size, last_position)
    place = _launch_place if length.is_cuda else place_rows_ref
    return place(length, back, first, count, parents, block_table, page_size, last_position)


def place_rows_ref(
    length: Tensor,
    back: int,
    first: int,
    count: int,
    parents: Tensor | None,
    block_table: Tensor,
    page_size: int,
    last_position: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = first + count
    start = int(length) - back
    up = list(range(rows - 1)) if parents is None else parents[: rows - 1].tolist()
    depths, bits = [0], [1]
    for r, parent in enumerate(up, 1):
        parent = min(max(parent, 0), r - 1)
        depths.append(depths[parent] + 1)
        bits.append(bits[parent] | 1 << r)
    device = length.device
    positions = (torch.tensor(depths[first:], device=device) + start).clamp_(max=last_position)
    slots = _slots(torch.arange(first, rows, device=device) + start, block_table, page_size)
    kv_len = torch.tensor([start + rows], dtype=torch.int32, device=device)
    return positions, slots, kv_len, pack_bits(bits[first:], rows).to(device)


def place_rows_cost(length: Tensor, back: int, first: int, count: int, *_: object) -> tuple[int, int]:
    """(bytes, operations) of one call."""
    return count * (8 * 3 + 8 * -(-(first + count) // 64)) + 16, count * (first + count)


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
) -> tuple[Tensor, Tensor, Tensor]:
    """path [1, N + 1] and count [1] of `accept_walk`, target [N + 1], committed! [C], length! [1], window! [>= 1] and
    limit [1], all int64, block_table [1, P] int32 -> report [1 + 2 (N + 1)], src [N + 1], dst [N + 1] int64.

    Raises ValueError on other shapes and dtypes. Nothing is written behind `committed`.
    """
    if torch.compiler.is_compiling():
        return torch.ops.specker.advance(path, count, target, committed, length, window, limit, block_table, page_size)
    return _advance(path, count, target, committed, length, window, limit, block_table, page_size)


def _advance(
    path: Tensor,
    count: Tensor,
    target: Tensor,
    committed: Tensor,
    length: Tensor,
    window: Tensor,
    limit: Tensor,
    block_table: Tensor,
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_advance(path, count, target, committed, length, window, limit, block_table, page_size)
    go = _launch_advance if path.is_cuda else advance_ref
    return go(path, count, target, committed, length, window, limit, block_table, page_size)


def advance_ref(
    path: Tensor,
    count: Tensor,
    target: Tensor,
    committed: Tensor,
    length: Tensor,
    window: Tensor,
    limit: Tensor,
    block_table: Tensor,
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = torch.arange(target.shape[0], device=target.device)
    inside = rows < count
    row = torch.where(inside, path[0], -1)
    emitted = torch.where(inside, target[row.clamp(min=0)], -1)
    room = min(int(limit), len(committed)) - int(length)
    moved = max(min(int(count), room), 0)
    start = length - 1
    src = _slots(torch.where(inside, row, rows) + start, block_table, page_size)
    dst = _slots(rows + start, block_table, page_size)
    committed[int(length) : int(length) + moved] = emitted[:moved]
    length += moved
    window[0] = emitted[int(count) - 1]
    return torch.cat((count, row, emitted)), src, dst


def advance_cost(path: Tensor, *_: object) -> tuple[int, int]:
    """(bytes, operations) of one call."""
    N = path.shape[1]
    return 8 * 9 * N + 40, 8 * N


def _slots(column: Tensor, block_table: Tensor, page_size: int) -> Tensor:
    column = column.clamp(0, block_table.shape[1] * page_size - 1)
    return block_table[0].long()[column // page_size] * page_size + column % page_size


@triton.jit
def _slot(column, table_ptr, columns, page_size):
    column = tl.minimum(tl.maximum(column, 0), columns - 1)
    return tl.load(table_ptr + column // page_size).to(tl.int64) * page_size + column % page_size


@triton.jit(
    do_not_specialize=["back", "first", "rows", "columns", "page_size", "last_position"],
    do_not_specialize_on_alignment=["length_ptr", "parents_ptr", "table_ptr"],
)
def _place_rows_kernel(
    length_ptr,  # [1]
    parents_ptr,  # [>= rows - 1]
    table_ptr,  # [P]
    positions_ptr,  # [count]
    slots_ptr,  # [count]
    kv_len_ptr,  # [1]
    words_ptr,  # [count, W]
    back,
    first,
    rows,  # first + count
    columns,  # P * page_size
    page_size,
    last_position,
    W: tl.constexpr,
    W_PAD: tl.constexpr,  # a power of two
    TREE: tl.constexpr,  # else parents are not read
):
    i = tl.program_id(0)
    r = first + i
    start = tl.load(length_ptr) - back
    o_w = tl.arange(0, W_PAD)
    one = tl.full([W_PAD], 1, tl.int64)
    if TREE:
        row, depth = r, 0
        b_words = tl.where(o_w == row // 64, one << (row % 64), 0)
        while row > 0:
            parent = tl.load(parents_ptr + row - 1).to(tl.int32)
            row = tl.minimum(tl.maximum(parent, 0), row - 1)
            depth += 1
            b_words = b_words | tl.where(o_w == row // 64, one << (row % 64), 0)
    else:
        depth = r
        n = r + 1 - 64 * o_w  # bits of each word
        b_words = tl.where(n >= 64, -1, (one << tl.minimum(tl.maximum(n, 0), 63)) - 1)
    tl.store(positions_ptr + i, tl.minimum(start + depth, last_position))
    tl.store(slots_ptr + i, _slot(start + r, table_ptr, columns, page_size))
    tl.store(words_ptr + i * W + o_w, b_words, mask=o_w < W)
    if i == 0:
        tl.store(kv_len_ptr, (start + rows).to(tl.int32))


@triton.jit(
    do_not_specialize=["rows", "capacity", "columns", "page_size"],
    do_not_specialize_on_alignment=[
        *("path_ptr", "count_ptr", "target_ptr", "committed_ptr", "length_ptr", "window_ptr", "limit_ptr"),
        "table_ptr",
    ],
)
def _advance_kernel(
    path_ptr,  # [rows]
    count_ptr,  # [1]
    target_ptr,  # [rows]
    committed_ptr,  # [capacity]
    length_ptr,  # [1]
    window_ptr,  # [1]
    limit_ptr,  # [1]
    table_ptr,  # [P]
    report_ptr,  # [1 + 2 rows]
    src_ptr,  # [rows]
    dst_ptr,  # [rows]
    rows,
    capacity,
    columns,  # P * page_size
    page_size,
    BLOCK: tl.constexpr,  # a power of two, at least rows
):
    o = tl.arange(0, BLOCK)
    length = tl.load(length_ptr)
    count = tl.minimum(tl.load(count_ptr), rows)
    m, inside = o < rows, o < count
    b_row = tl.load(path_ptr + o, mask=inside, other=-1)
    inside = inside & (b_row >= 0) & (b_row < rows)
    b_token = tl.load(target_ptr + b_row, mask=inside, other=-1)
    last = tl.minimum(tl.load(limit_ptr), capacity)
    tl.store(committed_ptr + length + o, b_token, mask=inside & (length + o < last))
    tl.store(window_ptr + o * 0, b_token, mask=inside & (o == count - 1))
    tl.store(report_ptr, count)
    tl.store(report_ptr + 1 + o, b_row, mask=m)
    tl.store(report_ptr + 1 + rows + o, b_token, mask=m)
    b_from = tl.where(inside, b_row, o.to(tl.int64))
    tl.store(src_ptr + o, _slot(length - 1 + b_from, table_ptr, columns, page_size), mask=m)
    tl.store(dst_ptr + o, _slot(length - 1 + o, table_ptr, columns, page_size), mask=m)
    tl.debug_barrier()  # every thread has read the length
    tl.store(length_ptr, tl.maximum(length, tl.minimum(length + count, last)))


@lru_cache
def _place_variant(words: int, tree: bool) -> Variant:
    """A program a row, one warp: a tree's row walks to the root by dependent loads, a dozen of them, from L1."""
    return Variant(
        name=f"place {'tree' if tree else 'chain'} W{words}",
        kernel=_place_rows_kernel,
        arguments=("*i64", "*i64", "*i32", "*i64", "*i64", "*i32", "*i64", *("i32",) * 6),
        constexprs={"W": words, "W_PAD": triton.next_power_of_2(words), "TREE": tree},
        num_warps=1,
        wide=False,
        smoke=words == 1 and tree,
    )


@lru_cache
def _advance_variant(block: int) -> Variant:
    return Variant(
        name=f"advance {block}",
        kernel=_advance_kernel,
        arguments=("*i64",) * 7 + ("*i32",) + ("*i64",) * 3 + ("i32",) * 4,
        constexprs={"BLOCK": block},
        num_warps=1,
        wide=False,
        smoke=block == 16,
    )


def variants(arch: int) -> Iterator[Variant]:
    """What the compile-only checks compile for sm_`arch`."""
    for words in (1, 2, 3, 4):
        for tree in (False, True):
            yield _place_variant(words, tree)
    for block in (1, 16, 256):
        yield _advance_variant(block)


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
    rows = first + count
    words = -(-rows // 64)
    positions, slots = length.new_empty(count), length.new_empty(count)
    kv_len, ancestors = length.new_empty(1, dtype=torch.int32), length.new_empty(count, words)
    up = length if parents is None else parents.contiguous()
    columns = block_table.shape[1] * page_size
    numbers = back, first, rows, columns, page_size, last_position
    variant = _place_variant(words, parents is not None)
    variant((count,), length, up, block_table.contiguous(), positions, slots, kv_len, ancestors, *numbers)
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
) -> tuple[Tensor, Tensor, Tensor]:
    others = {"length": length, "window": window, "limit": limit, "block_table": block_table}
    same_device(path, count=count, target=target, committed=committed, **others)
    rows = target.shape[0]
    report, src, dst = target.new_empty(1 + 2 * rows), target.new_empty(rows), target.new_empty(rows)
    variant = _advance_variant(triton.next_power_of_2(rows))
    state = committed, length, window, limit, block_table.contiguous()
    sizes = rows, len(committed), block_table.shape[1] * page_size, page_size
    variant((1,), path.contiguous(), count, target.contiguous(), *state, report, src, dst, *sizes)
    return report, src, dst


def _vector(name: str, x: Tensor, size: int | None = None) -> None:
    if x.dim() != 1 or x.dtype != torch.int64 or (size is not None and x.shape[0] != size):
        raise ValueError(f"{name} must be [{'n' if size is None else size}] int64, got {tuple(x.shape)} {x.dtype}")


def _check_table(block_table: Tensor, page_size: int) -> None:
    if block_table.dim() != 2 or block_table.shape[0] != 1 or block_table.dtype != torch.int32 or page_size < 1:
        raise ValueError(
            f"expected block_table [1, P] int32 and a page size of at least 1: {tuple(block_table.shape)} "
            f"{block_table.dtype}, {page_size}"
        )


def _check_place(
    length: Tensor,
    back: int,
    first: int,
    count: int,
    parents: Tensor | None,
    block_table: Tensor,
    page_size: int,
    last_position: int,
) -> None:
    _vector("length", length, 1)
    if first < 0 or count < 1 or first + count > MAX_ROWS:
        raise ValueError(f"a window has 1..{MAX_ROWS} rows; asked for {count} from row {first} on")
    if parents is not None:
        _vector("parents", parents)
        if parents.shape[0] < first + count - 1:
            raise ValueError(f"rows up to {first + count - 1} need as many parents, got {parents.shape[0]}")
    _check_table(block_table, page_size)


def _check_advance(
    path: Tensor,
    count: Tensor,
    target: Tensor,
    committed: Tensor,
    length: Tensor,
    window: Tensor,
    limit: Tensor,
    block_table: Tensor,
    page_size: int,
) -> None:
    _vector("target", target)
    if path.shape != (1, target.shape[0]) or path.dtype != torch.int64 or not 1 <= target.shape[0] <= MAX_ROWS:
        raise ValueError(
            f"expected path [1, R] and target [R], R in 1..{MAX_ROWS}: {tuple(path.shape)} {path.dtype}, "
            f"{tuple(target.shape)}"
        )
    for name, x in (("count", count), ("length", length), ("limit", limit)):
        _vector(name, x, 1)
    _vector("committed", committed)
    _vector("window", window)
    _check_table(block_table, page_size)


def _fake_place(
    length: Tensor,
    back: int,
    first: int,
    count: int,
    parents: Tensor | None,
    block_table: Tensor,
    page_size: int,
    last_position: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_place(length, back, first, count, parents, block_table, page_size, last_position)
    words = length.new_empty(count, -(-(first + count) // 64))
    return length.new_empty(count), length.new_empty(count), length.new_empty(1, dtype=torch.int32), words


def _fake_advance(
    path: Tensor,
    count: Tensor,
    target: Tensor,
    committed: Tensor,
    length: Tensor,
    window: Tensor,
    limit: Tensor,
    block_table: Tensor,
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_advance(path, count, target, committed, length, window, limit, block_table, page_size)
    rows = target.shape[0]
    return target.new_empty(1 + 2 * rows), target.new_empty(rows), target.new_empty(rows)


_lib = torch.library.Library("specker", "FRAGMENT")
_lib.define(
    "place_rows(Tensor length, int back, int first, int count, Tensor? parents, Tensor block_table, int page_size, "
    "int last_position) -> (Tensor, Tensor, Tensor, Tensor)"
)
_lib.impl("place_rows", _place_rows, "CompositeExplicitAutograd")
torch.library.register_fake("specker::place_rows", _fake_place, lib=_lib)
_lib.define(
    "advance(Tensor path, Tensor count, Tensor target, Tensor(a!) committed, Tensor(b!) length, Tensor(c!) window, "
    "Tensor limit, Tensor block_table, int page_size) -> (Tensor, Tensor, Tensor)"
)
_lib.impl("advance", _advance, "CompositeExplicitAutograd")
torch.library.register_fake("specker::advance", _fake_advance, lib=_lib)
