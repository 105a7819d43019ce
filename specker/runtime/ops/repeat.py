"""repeat_rows: the rows of one sequence for L layers that run side by side, as L sequences of a batch.

Contract: positions [T] and slots [T] int64, kv_len [1] and window [1] int32, ancestors [T, W] int64, W <= 4 ->

    positions [L * T]      positions[t]
    slots     [L * T]      slots[t] + l * apart      (layer l's pages lie `apart` slots further on)
    kv_len    [L]          kv_len[0]
    window    [L]          window[0]
    ancestors [L * T, W]   ancestors[t]              for row l * T + t

A batch over the layers l..l + N - 1 takes the first N * T rows, or N numbers, of each, and N * T slots from l * T on.
One launch before the layers, where every batch would need six. Integers, 16 + 8 W bytes a row and layer; no number is
read on the host.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from specker.kernels.ancestors import MAX_WORDS
from specker.kernels.variant import Variant, same_device, tl, triton


class Repeated(NamedTuple):
    positions: Tensor  # [L * T] int64
    slots: Tensor  # [L * T] int64
    kv_len: Tensor  # [L] int32
    window: Tensor  # [L] int32
    ancestors: Tensor  # [L * T, W] int64


def repeat_rows(
    positions: Tensor, slots: Tensor, kv_len: Tensor, window: Tensor, ancestors: Tensor, layers: int, apart: int
) -> Repeated:
    """The rows `layers` times, each time `apart` slots further on; see the module for the contract. Raises ValueError
    on other shapes and dtypes."""
    if torch.compiler.is_compiling():
        return Repeated(*torch.ops.specker.repeat_rows(positions, slots, kv_len, window, ancestors, layers, apart))
    return Repeated(*_repeat_rows(positions, slots, kv_len, window, ancestors, layers, apart))


def _repeat_rows(
    positions: Tensor, slots: Tensor, kv_len: Tensor, window: Tensor, ancestors: Tensor, layers: int, apart: int
) -> tuple[Tensor, ...]:
    _check(positions, slots, kv_len, window, ancestors, layers)
    go = _launch if positions.is_cuda else repeat_rows_ref
    return go(positions, slots, kv_len, window, ancestors, layers, apart)


def repeat_rows_ref(
    positions: Tensor, slots: Tensor, kv_len: Tensor, window: Tensor, ancestors: Tensor, layers: int, apart: int
) -> tuple[Tensor, ...]:
    further = torch.arange(layers, device=slots.device)[:, None] * apart
    return (
        positions.repeat(layers),
        (slots + further).flatten(),
        kv_len.repeat(layers),
        window.repeat(layers),
        ancestors.repeat(layers, 1),
    )


def repeat_rows_cost(positions: Tensor, *rest: Tensor | int) -> tuple[int, int]:
    """(bytes, operations) of one call."""
    ancestors, layers = rest[3], int(rest[4])
    assert isinstance(ancestors, Tensor)
    row = 8 * (2 + ancestors.shape[1])
    return (layers + 1) * (len(positions) * row + 8), layers * len(positions)


@triton.jit(
    do_not_specialize=["T", "apart"],
    do_not_specialize_on_alignment=["positions_ptr", "slots_ptr", "kv_len_ptr", "window_ptr", "words_ptr"],
)
def _repeat_rows_kernel(
    positions_ptr,  # [T]
    slots_ptr,  # [T]
    kv_len_ptr,  # [1]
    window_ptr,  # [1]
    words_ptr,  # [T, W]
    positions_out,  # [L * T]
    slots_out,  # [L * T]
    kv_len_out,  # [L]
    window_out,  # [L]
    words_out,  # [L * T, W]
    T,
    apart,
    W: tl.constexpr,
    BLOCK: tl.constexpr,  # rows at a time
):
    i_l = tl.program_id(0)
    o_b = tl.arange(0, BLOCK)
    for i_t in tl.range(0, T, BLOCK):
        o_t = i_t + o_b
        m_t = o_t < T
        o_out = i_l * T + o_t
        tl.store(positions_out + o_out, tl.load(positions_ptr + o_t, mask=m_t), mask=m_t)
        tl.store(slots_out + o_out, tl.load(slots_ptr + o_t, mask=m_t) + i_l.to(tl.int64) * apart, mask=m_t)
        for w in tl.static_range(W):
            tl.store(words_out + o_out * W + w, tl.load(words_ptr + o_t * W + w, mask=m_t), mask=m_t)
    tl.store(kv_len_out + i_l, tl.load(kv_len_ptr))
    tl.store(window_out + i_l, tl.load(window_ptr))


@lru_cache
def _variant(words: int) -> Variant:
    """A program a layer, one warp: a chain has one row, the widest trees a few dozen."""
    return Variant(
        name=f"W{words}",
        kernel=_repeat_rows_kernel,
        arguments=(*("*i64",) * 2, *("*i32",) * 2, *("*i64",) * 3, *("*i32",) * 2, "*i64", "i32", "i32"),
        constexprs={"W": words, "BLOCK": 32},
        num_warps=1,
        wide=False,
        smoke=words == 1,
    )


def variants(arch: int) -> Iterator[Variant]:
    """What the compile-only checks compile for sm_`arch`; the launcher takes any number of rows."""
    for words in range(1, MAX_WORDS + 1):
        yield _variant(words)


def _launch(
    positions: Tensor, slots: Tensor, kv_len: Tensor, window: Tensor, ancestors: Tensor, layers: int, apart: int
) -> tuple[Tensor, ...]:
    same_device(positions, slots=slots, kv_len=kv_len, window=window, ancestors=ancestors)
    given = [x.contiguous() for x in (positions, slots, kv_len, window, ancestors)]
    out = tuple(x.new_empty(layers * x.shape[0], *x.shape[1:]) for x in given)
    _variant(ancestors.shape[1])((layers,), *given, *out, len(positions), apart)
    return out


def _check(positions: Tensor, slots: Tensor, kv_len: Tensor, window: Tensor, ancestors: Tensor, layers: int) -> None:
    for name, x in (("positions", positions), ("slots", slots)):
        if x.dim() != 1 or x.dtype != torch.int64:
            raise ValueError(f"{name} must be [T] int64, got {tuple(x.shape)} {x.dtype}")
    if slots.shape != positions.shape:
        raise ValueError(f"slots must be as many as positions, {len(positions)}, got {len(slots)}")
    for name, x in (("kv_len", kv_len), ("window", window)):
        if x.shape != (1,) or x.dtype != torch.int32:
            raise ValueError(f"{name} must be [1] int32, got {tuple(x.shape)} {x.dtype}")
    if ancestors.dim() != 2 or ancestors.shape[0] != positions.shape[0] or ancestors.dtype != torch.int64:
        raise ValueError(
            f"ancestors must be [{positions.shape[0]}, W] int64, got {tuple(ancestors.shape)} {ancestors.dtype}"
        )
    if not 1 <= ancestors.shape[1] <= MAX_WORDS:
        raise ValueError(f"ancestors have 1..{MAX_WORDS} words a row, got {ancestors.shape[1]}")
    if layers < 1:
        raise ValueError(f"rows are for at least one layer, got {layers}")


def _fake(
    positions: Tensor, slots: Tensor, kv_len: Tensor, window: Tensor, ancestors: Tensor, layers: int, apart: int
) -> tuple[Tensor, ...]:
    _check(positions, slots, kv_len, window, ancestors, layers)
    given = positions, slots, kv_len, window, ancestors
    return tuple(x.new_empty(layers * x.shape[0], *x.shape[1:]) for x in given)


_lib = torch.library.Library("specker", "FRAGMENT")
_lib.define(
    "repeat_rows(Tensor positions, Tensor slots, Tensor kv_len, Tensor window, Tensor ancestors, int layers, "
    "int apart) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_lib.impl("repeat_rows", _repeat_rows, "CompositeExplicitAutograd")
torch.library.register_fake("specker::repeat_rows", _fake, lib=_lib)
