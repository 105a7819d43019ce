"""residual_merge: the residual stream after P branches and its RMSNorms, in one pass.

A row of up to 16,384 elements stays in registers, so each element moves once: (1 + P + 1 + Q) * T * E in all. A longer
row is read back once from the cache, T * E more elements.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional as F

from specker.kernels.prefetch import NONE, Prefetch, prefetch_of, prefetch_share
from specker.kernels.quant import Matrix
from specker.kernels.registry import register, takes
from specker.kernels.variant import (
    TYPES,
    Variant,
    let_next_start,
    same_device,
    sum_dtype,
    tl,
    triton,
    wait_for_previous,
)


def residual_merge(
    x: Tensor,
    deltas: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    last: Tensor | None = None,
    split: bool = False,
    *,
    constant: bool = False,
    following: Matrix | None = None,
) -> tuple[Tensor, Tensor]:
    """The residual stream after P branches, and its RMSNorms, in one pass.

        y         = x + deltas[0] + ... + deltas[P - 1] (+ last)
        normed[q] = y / sqrt(mean(y^2) + eps) * norm_weight[q]

    P = 1, Q = 1 is a decoder layer's residual add and norm, P = 0 a norm alone; P = 2, Q = 1 and P = 1, Q = N serve a
    group of N layers that run side by side. Sums run in float32 (float64 for float64) in this order and are rounded
    once, to y. The norms use the rounded y. A row's bits depend on that row alone. Memory moves each element once,
    rows longer than 16,384 twice.

    Args:
        x: [T, E].
        deltas: [P, T, E] of x's dtype. With `split`: [S, T, E] float32 (float64 for float64), the sums that
            `row_linear(..., epilogue="split")` returns; their sum, added in order and rounded, is one delta.
        norm_weight: [Q, E] of x's dtype, or None for no norm.
        eps: epsilon of the norms.
        last: [T, E], one more delta, added after the others.
        split: see deltas.
        constant: no kernel writes norm_weight while this stream is in use, as with a loaded model's weights. On sm_90
            and newer the kernel then reads it before the kernels ahead in the stream have ended. Leave it out for a
            weight that was just computed or cast.
        following: the matrix of the product that reads `normed`, which SPECKER_PREFETCH prefetches
            (kernels/prefetch.py).

    Returns:
        y [T, E] and normed [Q, T, E] (Q = 0 without weights). Neither aliases x.

    Raises:
        TypeError: an argument of another type.
        ValueError: other shapes, dtypes or devices, or a negative eps.

    Source: running layers side by side is EasySpec's, arXiv 2502.02493.

    Examples:
        >>> import torch
        >>> from specker.kernels import residual_merge
        >>> y, normed = residual_merge(torch.ones(1, 4), torch.ones(2, 1, 4), torch.full((1, 4), 0.5), 0.0)
        >>> y.tolist(), normed.tolist()
        ([[3.0, 3.0, 3.0, 3.0]], [[[0.5, 0.5, 0.5, 0.5]]])
    """
    return _residual_merge(x, deltas, norm_weight, eps, last, split, constant, following)


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, following: Matrix | None = None
) -> tuple[Tensor, Tensor]:
    """`residual_merge` in a decoder layer, with one delta [T, E] (or its splits' sums [S, T, E]) or none and one weight
    [E], a model's own, which no kernel writes -> y [T, E] (x itself without a delta) and normed [T, E]."""
    if delta is not None and delta.dim() == 3:
        y, normed = residual_merge(x, delta, weight.unsqueeze(0), eps, None, True, constant=True, following=following)
        return y, normed[0]
    if x.is_cpu and not is_compiling() and x.dtype == weight.dtype:
        y = x if delta is None else x + delta  # the checks would cost 6% of a prefill of 100 rows
        return y, F.rms_norm(y, weight.shape, weight, eps)
    deltas = x.unsqueeze(0)[:0] if delta is None else delta.unsqueeze(0)
    y, normed = residual_merge(x, deltas, weight.unsqueeze(0), eps, constant=True, following=following)
    return y, normed[0]


class Arguments(NamedTuple):
    x: Tensor
    deltas: Tensor
    norm_weight: Tensor | None
    eps: float
    last: Tensor | None = None
    split: bool = False
    constant: bool = False
    following: Matrix | None = None


@takes(Arguments)
def residual_merge_ref(args: Arguments) -> tuple[Tensor, Tensor]:
    x, deltas, norm_weight, eps, last, split, *_ = args
    x = x.contiguous()  # so that the results are, as `_fake` promises
    if split:
        total = torch.zeros_like(x, dtype=deltas.dtype)
        for part in deltas:
            total = total + part
        deltas = total.to(x.dtype).unsqueeze(0)
    if last is not None:
        deltas = torch.cat((deltas, last.unsqueeze(0)))
    P = deltas.shape[0]
    if x.dtype in (torch.float16, torch.bfloat16) and P > 1:
        acc = x.float()
        for delta in deltas:
            acc = acc + delta.float()
        y = acc.to(x.dtype)
    elif P == 0:
        y = x.clone()
    else:
        y = x + deltas[0]
        for p in range(1, P):
            y = y + deltas[p]
    if norm_weight is None or not len(norm_weight):
        return y, y.new_empty(0, *y.shape)
    if norm_weight.shape[0] == 1:
        return y, F.rms_norm(y, y.shape[-1:], norm_weight[0], eps).unsqueeze(0)
    return y, torch.stack([F.rms_norm(y, y.shape[-1:], weight, eps) for weight in norm_weight])


@takes(Arguments)
def residual_merge_cost(args: Arguments) -> tuple[int, int]:
    """(bytes, flops) of one call."""
    x, deltas, norm_weight, _, last, *_ = args
    P, Q = deltas.shape[0] + (last is not None), 0 if norm_weight is None else norm_weight.shape[0]
    weights = 0 if norm_weight is None else norm_weight.numel()
    moved = (2 + Q + (last is not None)) * x.numel() + weights
    bytes_ = moved * x.element_size() + deltas.numel() * deltas.element_size()
    return bytes_, (P + 3 * (Q > 0) + Q) * x.numel()


MAX_BLOCK = 16384


@triton.jit(do_not_specialize=["T"])
def _residual_merge_kernel(
    x_ptr,  # [T, E]
    deltas_ptr,  # [P, T, E], without the last if LAST; float32 if SPLIT
    last_ptr,  # [T, E]; not read unless LAST
    weight_ptr,  # [Q, E]
    y_ptr,  # [T, E]
    normed_ptr,  # [Q, T, E]
    following_ptr,  # what PREFETCH describes, or None
    T,
    eps,
    P: tl.constexpr,
    Q: tl.constexpr,
    LAST: tl.constexpr,  # the last delta is last_ptr
    SPLIT: tl.constexpr,  # deltas_ptr holds the sums of one delta's splits
    CONSTANT: tl.constexpr,  # no kernel of the stream writes the weight
    E: tl.constexpr,
    BLOCK: tl.constexpr,  # elements of a row held at a time; a power of two
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    if PREFETCH[0]:  # noqa: SIM102 - a constant condition: without programs following_ptr is None
        if tl.program_id(0) >= T:
            prefetch_share(following_ptr, tl.program_id(0) - T, PREFETCH)
            wait_for_previous(PDL)
            return
    if not CONSTANT:
        wait_for_previous(PDL)
    if Q > 0 and E <= BLOCK:  # load before the sum: no later load can move ahead of the reduction's barrier
        o_e = tl.arange(0, BLOCK)
        b_first = tl.load(weight_ptr + o_e, mask=o_e < E, other=0.0, eviction_policy="evict_last")
    if CONSTANT:
        wait_for_previous(PDL)
    i_t = tl.program_id(0).to(tl.int64)
    plane = T.to(tl.int64) * E
    o_row = i_t * E
    square = 0.0
    for i_e in tl.static_range(0, E, BLOCK):
        o_e = i_e + tl.arange(0, BLOCK)
        m_e = o_e < E
        b_y = tl.load(x_ptr + o_row + o_e, mask=m_e, other=0.0).to(tl.float32)
        b_sum = tl.zeros_like(b_y)
        for p in tl.static_range(P - 1 if LAST else P):
            b_delta = tl.load(deltas_ptr + p * plane + o_row + o_e, mask=m_e, other=0.0).to(tl.float32)
            if SPLIT:
                b_sum += b_delta
            else:
                b_y += b_delta
        if SPLIT:
            b_y += b_sum.to(y_ptr.dtype.element_ty).to(tl.float32)
        if LAST:
            b_y += tl.load(last_ptr + o_row + o_e, mask=m_e, other=0.0).to(tl.float32)
        b_kept = b_y.to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + o_row + o_e, b_kept, mask=m_e)
        b_y = b_kept.to(tl.float32)
        if Q > 0:
            square += tl.sum(b_y * b_y, axis=0)
    let_next_start(PDL)
    if Q > 0:
        scale = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(square, E * 1.0) + eps))
        if E > BLOCK:
            tl.debug_barrier()  # a thread may read back what another thread of the program wrote
        for i_e in tl.static_range(0, E, BLOCK):
            o_e = i_e + tl.arange(0, BLOCK)
            m_e = o_e < E
            if E > BLOCK:
                b_y = tl.load(y_ptr + o_row + o_e, mask=m_e, other=0.0).to(tl.float32)
            for q in tl.static_range(Q):
                if q > 0 or E > BLOCK:
                    b_weight = tl.load(weight_ptr + q * E + o_e, mask=m_e, other=0.0, eviction_policy="evict_last")
                else:
                    b_weight = b_first
                b_normed = b_y * scale * b_weight.to(tl.float32)
                tl.store(normed_ptr + q * plane + o_row + o_e, b_normed.to(normed_ptr.dtype.element_ty), mask=m_e)


@lru_cache
def _variant(
    dtype: torch.dtype,
    P: int,
    Q: int,
    E: int,
    last: bool = False,
    split: bool = False,
    constant: bool = True,
    prefetch: Prefetch = NONE,
) -> Variant:
    """One program per row, so rows cannot affect each other. The tile, the warps and the order of the sum depend on E
    alone. 16 elements per thread: two 16-byte loads of each operand in flight (four in float32). At E 4096 the
    compiler's 48 registers allow five programs per SM, 40 KiB of each operand in flight. All architectures share the
    tiles, since the kernel is memory-bound. A row longer than 16,384 goes through the registers in pieces."""
    block = min(triton.next_power_of_2(E), MAX_BLOCK)
    t = TYPES[dtype]
    return Variant(
        name=f"{t} P{P}{' split' * split}{' apart' * last} Q{Q} E{E}{' written' * (not constant)}"
        + f" prefetch {prefetch.rows}x{prefetch.lines}" * bool(prefetch.programs),
        kernel=_residual_merge_kernel,
        arguments=(f"*{t}", "*fp32" if split else f"*{t}", *(f"*{t}",) * 4, "*u8" if prefetch.programs else None)
        + ("i32", "fp32"),
        constexprs={"P": P, "Q": Q, "LAST": last, "SPLIT": split, "CONSTANT": constant, "E": E, "BLOCK": block}
        | {"PREFETCH": prefetch},
        num_warps=min(max(block // 512, 1), 16),
        wide=E * dtype.itemsize % 16 == 0,
        smoke=dtype == torch.bfloat16 and E == 4096 and (P, Q) in ((2, 1), (1, 4), (4, 1)),
    )


def variants(arch: int) -> Iterator[Variant]:
    """The variants that the compile-only checks compile for sm_`arch`; the launcher takes any P, Q and E."""
    for P, Q in ((0, 1), (1, 0), (1, 1), (2, 1), (1, 4), (4, 1)):
        yield _variant(torch.bfloat16, P, Q, 4096)
    for P, Q, E in ((2, 1, 4096), (2, 1, 2048), (1, 4, 18432)):
        yield _variant(torch.bfloat16, P, Q, E, True)
    for P, E in ((1, 4096), (4, 4096), (8, 2048)):
        yield _variant(torch.bfloat16, P, 1, E, False, True)
    for P in (0, 1):
        yield _variant(torch.bfloat16, P, 1, 4096, constant=False)
    for P, Q in ((4, 0), (5, 1)):
        yield _variant(torch.bfloat16, P, Q, 4096, P == 5, True)
    for E in (896, 1023, 5120, 8192, 16384, 18432):
        yield _variant(torch.bfloat16, 1, 1, E)
    yield _variant(torch.bfloat16, 4, 1, 4096, False, True, prefetch=Prefetch(132, 28672, 8192, 9))
    yield _variant(torch.float16, 1, 1, 4096)
    yield _variant(torch.float32, 1, 1, 4096)


@takes(Arguments)
def launch(args: Arguments) -> tuple[Tensor, Tensor]:
    x, deltas, norm_weight, eps, last, split, constant, following = args
    x, deltas = x.contiguous(), deltas.contiguous()
    weight, apart = (x if y is None else y.contiguous() for y in (norm_weight, last))  # the kernel ignores x here
    (T, E), Q = x.shape, 0 if norm_weight is None else norm_weight.shape[0]
    P = deltas.shape[0] + (last is not None)
    y, normed = torch.empty_like(x), x.new_empty(Q, T, E)
    if x.numel():
        w, prefetch = prefetch_of(following)
        variant = _variant(x.dtype, P, Q, E, last is not None, split, constant or not Q, prefetch)
        variant((T + prefetch.programs,), x, deltas, apart, weight, y, normed, w, T, float(eps))
    return y, normed


def _check(args: Arguments) -> None:
    x, deltas, norm_weight, eps, last, split, *_ = args
    if x.dim() != 2 or deltas.dim() != 3 or deltas.shape[1:] != x.shape or (last is not None and last.shape != x.shape):
        raise ValueError(
            f"expected x [T, E], deltas [P, T, E], last [T, E]: x {tuple(x.shape)}, deltas {tuple(deltas.shape)}"
            + ("" if last is None else f", last {tuple(last.shape)}")
        )
    if any(y is not None and y.dtype != x.dtype for y in (norm_weight, last, *(() if split else (deltas,)))):
        raise ValueError(f"deltas, last and norm_weight must have x's dtype, {x.dtype}")
    if split and deltas.dtype != sum_dtype(x.dtype):
        raise ValueError(f"the sums of splits must be float32, or float64 beside float64: {deltas.dtype}, {x.dtype}")
    if norm_weight is not None and (norm_weight.dim() != 2 or norm_weight.shape[1] != x.shape[1]):
        raise ValueError(f"norm_weight must be [Q, {x.shape[1]}], got {tuple(norm_weight.shape)}")
    if norm_weight is not None and not eps >= 0:
        raise ValueError(f"eps must be at least 0, got {eps}")
    same_device(x, deltas=deltas, norm_weight=norm_weight, last=last)


def _fake(args: Arguments) -> tuple[Tensor, Tensor]:
    x, weight = args.x, args.norm_weight
    return x.new_empty(x.shape), x.new_empty(0 if weight is None else weight.shape[0], *x.shape)


_residual_merge = register(
    residual_merge, Arguments, check=_check, reference=residual_merge_ref, launch=launch, fake=_fake
)
