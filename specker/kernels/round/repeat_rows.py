"""repeat_rows: turn the rows of B sequences into L * B sequences of one batch, for L layers that run side by side.

Contract: positions [T] and slots [T] int64, kv_len [B] and window [B] int32, ancestors [T, W] int64, W <= 4,
block_table [B, P] int32, which may be a row-strided view -> layer-major, for layer l:

    positions [L * T]      positions[t]                 row l * T + t
    slots     [L * T]      slots[t] + l * apart         each layer adds `pages` pages, that is `apart` slots
    kv_len    [L * B]      kv_len[b]                    sequence l * B + b
    window    [L * B]      window[b]
    ancestors [L * T, W]   ancestors[t]
    table     [L * B, P]   block_table[b] + l * pages

A batch over layers l..l + N - 1 takes the first N * T rows or N * B numbers of each tensor, except for slots (N * T
from l * T on) and the table (N * B rows from l * B on). One launch before the layers replaces seven per batch.
Integers only, 16 + 8 W bytes per row and layer and 4 per page; on a GPU the host reads nothing.
"""

from collections.abc import Iterator
from functools import lru_cache
from operator import index
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specker.kernels.ancestors import MAX_WORDS
from specker.kernels.registry import explained, takes
from specker.kernels.variant import Variant, rowwise, same_device, start_after_previous, tl, triton


class Repeated(NamedTuple):
    positions: Tensor  # [L * T] int64
    slots: Tensor  # [L * T] int64
    kv_len: Tensor  # [L * B] int32
    window: Tensor  # [L * B] int32
    ancestors: Tensor  # [L * T, W] int64
    table: Tensor  # [L * B, P] int32


class Arguments(NamedTuple):
    positions: Tensor
    slots: Tensor
    kv_len: Tensor
    window: Tensor
    ancestors: Tensor
    block_table: Tensor
    layers: int
    apart: int
    pages: int


def _check(args: Arguments) -> None:
    positions, slots, kv_len, window, ancestors, block_table, layers, _, _ = args
    T, B = positions.shape, kv_len.shape
    if len(T) != 1 or not positions.dtype == slots.dtype == ancestors.dtype == torch.int64:
        raise ValueError(
            f"positions must be [T]; positions, slots and ancestors int64: {tuple(T)}, {positions.dtype}, "
            f"{slots.dtype}, {ancestors.dtype}"
        )
    if slots.shape != T:
        raise ValueError(f"slots must be [{T[0]}], like positions, got {tuple(slots.shape)}")
    if ancestors.dim() != 2 or ancestors.shape[:1] != T or not 1 <= ancestors.shape[1] <= MAX_WORDS:
        raise ValueError(f"ancestors must be [{T[0]}, 1..{MAX_WORDS}], got {tuple(ancestors.shape)}")
    if not kv_len.dtype == window.dtype == block_table.dtype == torch.int32:
        raise ValueError(
            f"kv_len, window and block_table must be int32: {kv_len.dtype}, {window.dtype}, {block_table.dtype}"
        )
    P = block_table.shape
    if len(B) != 1 or window.shape != B or len(P) != 2 or P[:1] != B or 0 in P:
        raise ValueError(
            f"expected kv_len [B], window [B] and block_table [B, P], none empty: {tuple(B)}, {tuple(window.shape)}, "
            f"{tuple(P)}"
        )
    if layers < 1:
        raise ValueError(f"layers must be at least 1, got {layers}")


@takes(Arguments)
def _explain(args: Arguments) -> None:
    _check(args)
    same_device(args.positions, **_tensors(args))
    for name, x in (("apart", args.apart), ("pages", args.pages)):
        if not 0 <= x * args.layers < 1 << 31:
            raise ValueError(f"{name} must be at least 0, and less than 2^31 for all layers, got {x}")


@explained(_explain)
@takes(Arguments)
def repeat_rows(args: Arguments) -> Repeated:
    """Repeat the rows for `layers` layers that are `pages` pages, or `apart` slots, apart; see the module's contract.
    Raises ValueError for other shapes and dtypes."""
    _check(args)
    if args.positions.is_cuda:
        return launch(*args)
    layers, further = index(args.layers), {"slots": args.apart, "block_table": args.pages}
    return Repeated(*(_repeat(x.numpy(), layers, further.get(name)) for name, x in _tensors(args).items()))


def _tensors(args: Arguments) -> dict[str, Tensor]:
    """What is repeated, in the order of `Repeated`."""
    return dict(zip(Arguments._fields[:6], args[:6], strict=True))


def _repeat(x: Any, layers: int, further: int | None) -> Tensor:
    out = np.empty((layers, *x.shape), x.dtype)  # a third of the time of torch's repeat
    out[:] = x
    if further and layers > 1:
        out += (np.arange(layers, dtype=x.dtype) * further).reshape(-1, *(1,) * x.ndim)
    return torch.from_numpy(out.reshape(-1, *x.shape[1:]))


@triton.jit(
    do_not_specialize=["T", "B", "P", "table_stride", "apart", "pages"],
    do_not_specialize_on_alignment=["positions_ptr", "slots_ptr", "kv_len_ptr", "window_ptr", "words_ptr", "table_ptr"],
)
def _repeat_rows_kernel(
    positions_ptr,  # [T]
    slots_ptr,  # [T]
    kv_len_ptr,  # [B]
    window_ptr,  # [B]
    words_ptr,  # [T, W]
    table_ptr,  # [B, P]
    positions_out,  # [L * T]
    slots_out,  # [L * T]
    kv_len_out,  # [L * B]
    window_out,  # [L * B]
    words_out,  # [L * T, W]
    table_out,  # [L * B, P]
    T,
    B,
    P,
    table_stride,
    apart,
    pages,
    W: tl.constexpr,
    BLOCK: tl.constexpr,  # rows, sequences and pages per program
    PDL: tl.constexpr,
):
    start_after_previous(PDL)
    i_l = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_t = o < T
    o_t = i_l * T + o
    tl.store(positions_out + o_t, tl.load(positions_ptr + o, mask=m_t), mask=m_t)
    tl.store(slots_out + o_t, tl.load(slots_ptr + o, mask=m_t) + i_l * apart, mask=m_t)
    for w in tl.static_range(W):
        tl.store(words_out + o_t * W + w, tl.load(words_ptr + o.to(tl.int64) * W + w, mask=m_t), mask=m_t)
    m_b = o < B
    tl.store(kv_len_out + i_l * B + o, tl.load(kv_len_ptr + o, mask=m_b), mask=m_b)
    tl.store(window_out + i_l * B + o, tl.load(window_ptr + o, mask=m_b), mask=m_b)
    m_p = o < B * P
    b_page = tl.load(table_ptr + (o // P).to(tl.int64) * table_stride + o % P, mask=m_p)
    tl.store(table_out + i_l * B * P + o, b_page + i_l.to(tl.int32) * pages, mask=m_p)


@lru_cache
def _variant(words: int) -> Variant:
    """One warp per program: a chain has one row and a table a few hundred pages, so latency is that of independent
    loads, all in flight at once."""
    return Variant(
        name=f"W{words}",
        kernel=_repeat_rows_kernel,
        arguments=(*(("*i64",) * 2 + ("*i32",) * 2 + ("*i64", "*i32")) * 2, *("i32",) * 6),
        constexprs={"W": words, "BLOCK": 128},
        num_warps=1,
        wide=False,
        smoke=words == 1,
    )


def variants(arch: int) -> Iterator[Variant]:
    """The variants that the compile-only checks compile for sm_`arch`; the launcher takes any number of rows."""
    for words in range(1, MAX_WORDS + 1):
        yield _variant(words)


@takes(Arguments)
def launch(args: Arguments) -> Repeated:
    positions, slots, kv_len, window, ancestors, block_table, layers, apart, pages = args
    same_device(positions, **_tensors(args))
    (B, P), T = block_table.shape, len(positions)
    out = Repeated._make(x.new_empty(layers * x.shape[0], *x.shape[1:]) for x in args[:6])
    block_table, variant = rowwise(block_table), _variant(ancestors.shape[1])
    variant(
        (layers, -(-max(T, B * P) // variant.constexprs["BLOCK"])),
        positions.contiguous(),
        slots.contiguous(),
        kv_len.contiguous(),
        window.contiguous(),
        ancestors.contiguous(),
        block_table,
        out.positions,
        out.slots,
        out.kv_len,
        out.window,
        out.ancestors,
        out.table,
        T,
        B,
        P,
        block_table.stride(0),
        apart,
        pages,
    )
    return out
