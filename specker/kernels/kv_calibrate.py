"""kv_calibrate: split qkv, normalise and rotate q and k, write K/V to their slots, in one pass.

The kernel reads only cos[:D/2] and sin[D/2:], which determine the table.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specker.kernels.narrow import NARROW, cache_types, check_cache, kind_of, named, narrow, narrowed
from specker.kernels.quant import as_bytes
from specker.kernels.registry import refuse, register, takes
from specker.kernels.variant import (
    TYPES,
    Variant,
    check_contiguous,
    check_within,
    same_device,
    start_after_previous,
    sum_dtype,
    tl,
    triton,
)


def kv_calibrate(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    rope: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Split qkv, normalise and rotate q and k, and write K and V to their slots, in one pass.

        out = x * cos + swap(x) * sin,  swap([a, b]) = [b, a] over the halves of D

    for each head x of q and k, with the sign of RoPE folded into the table. With norms, a head is first RMS-normalised
    over D (Qwen3). The kernel rounds once; the reference also rounds after the norm. A cache in eight bits takes the
    rounded k and v over their scales (kernels/narrow.py). A row's bits depend on that row alone. Memory moves qkv, q,
    k and v once. Rows without query heads only write K and V.

    Args:
        qkv: [T, (Hq + 2 Hkv) * D]: query heads (perhaps none), then keys, then values.
        positions: [T] int64, rows of `rope`.
        slots: [T] int64, page * page_size + offset.
        rope: [C, 2, D], see `rope_table`.
        k_cache: [pages, page_size, Hkv, D] of qkv's dtype, int8 or float8_e4m3fn, contiguous; written in place.
        v_cache: as k_cache.
        q_norm: [G, D] or None; row t belongs to group t // (T / G), so G layers' rows can run as one launch.
        k_norm: as q_norm; both or neither.
        eps: epsilon of the norms.
        k_scale: [G, Hkv] float32, of caches in eight bits; G as for the norms.
        v_scale: as k_scale.

    Returns:
        q [T, Hq, D], rotated.

    Raises:
        TypeError: an argument of another type.
        ValueError: other shapes, dtypes, devices or layouts, or an odd D; on a CPU also positions beyond the table and
            slots beyond the caches.

    Source: RoFormer, arXiv 2104.09864, equation 34, in the halves of GPT-NeoX. One pass over accepted rows, bonus
    calibration, is EasySpec's, arXiv 2502.02493.

    Examples:
        >>> import torch
        >>> from specker.kernels import kv_calibrate, rope_table
        >>> keys, values = torch.zeros(2, 1, 4, 1, 2)  # one page of 4 slots, one head of 2
        >>> row, rope = torch.arange(6.0)[None], rope_table(torch.ones(1), 1.0, 8, torch.float32)
        >>> kv_calibrate(row, torch.tensor([0]), torch.tensor([3]), rope, keys, values)  # position 0: no rotation
        tensor([[[0., 1.]]])
        >>> keys[0, 3].tolist(), values[0, 3].tolist()
        ([[2.0, 3.0]], [[4.0, 5.0]])
    """
    return _kv_calibrate(qkv, positions, slots, rope, k_cache, v_cache, q_norm, k_norm, eps, k_scale, v_scale)


class Arguments(NamedTuple):
    qkv: Tensor
    positions: Tensor
    slots: Tensor
    rope: Tensor
    k_cache: Tensor
    v_cache: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 1e-6
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


@takes(Arguments)
def kv_calibrate_ref(args: Arguments) -> Tensor:
    qkv, positions, slots, rope, k_cache, v_cache, q_norm, k_norm, eps, k_scale, v_scale = args
    T = qkv.shape[0]
    Hkv, D = k_cache.shape[-2:]
    heads = qkv.contiguous().view(T, qkv.shape[1] // D, D)  # q has the layout that `fake_q` promises
    Hq = heads.shape[1] - 2 * Hkv
    qk = heads[:, : Hq + Hkv]  # adjacent, so rotated together
    if q_norm is not None and k_norm is not None:
        qk = torch.cat((_norm(qk[:, :Hq], q_norm, eps), _norm(qk[:, Hq:], k_norm, eps)), dim=1)
    cos, sin = rope[positions].unsqueeze(2).unbind(1)  # [T, 1, D]
    qk = torch.addcmul(qk * cos, qk.roll(D // 2, dims=-1), sin).to(qkv.dtype)
    for cache, rows, scale in ((k_cache, qk[:, Hq:], k_scale), (v_cache, heads[:, Hq + Hkv :], v_scale)):
        kept = rows if scale is None else as_bytes(narrowed(rows, scale, cache.dtype))
        as_bytes(cache).view(-1, Hkv, D).index_copy_(0, slots, kept)
    return qk[:, :Hq]


def _norm(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over D of [T, H, D], row t with weight[t // (T / G)]."""
    if weight.shape[0] == 1:
        return F.rms_norm(heads, heads.shape[-1:], weight[0], eps)
    grouped = heads.unflatten(0, (weight.shape[0], -1))
    return (F.rms_norm(grouped, heads.shape[-1:], None, eps) * weight[:, None, None, :]).flatten(0, 1)


def rope_table(inv_freq: Tensor, scale: float | Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """The table of cosines and signed sines that `kv_calibrate` and `kv_project` rotate with.

        table[p, 0] = [cos, cos] * scale,  table[p, 1] = [-sin, sin] * scale   of the angles p * inv_freq

    Angles, cos and sin are computed in float32, as in transformers. For float64 the finished table is converted.

    Args:
        inv_freq: [D / 2], inverse frequencies.
        scale: RoPE's attention factor (YaRN, LongRoPE), otherwise 1; or one for each frequency [D / 2].
        length: the number of positions C.
        dtype: the model's dtype.

    Returns:
        [C, 2, D] float32, or float64 if dtype is float64.

    Raises:
        TypeError: an argument of another type.
        ValueError: an inv_freq that is not a floating-point vector, a scale of another length, or a negative length.

    Source: RoFormer, arXiv 2104.09864, equation 34.

    Examples:
        >>> import torch
        >>> from specker.kernels import rope_table
        >>> rope_table(torch.ones(1), 1.0, 2, torch.float32)[0].tolist()
        [[1.0, 1.0], [-0.0, 0.0]]
    """
    refuse(rope_table, _check_table, (inv_freq, scale, length, dtype))
    angles = torch.arange(length, dtype=torch.float32, device=inv_freq.device)[:, None] * inv_freq.float()
    cos, sin = angles.cos() * scale, angles.sin() * scale
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)
    return table.to(torch.float64) if dtype == torch.float64 else table


def _check_table(inv_freq: Tensor, scale: float | Tensor, length: int, dtype: torch.dtype) -> None:
    if inv_freq.dim() != 1 or not inv_freq.is_floating_point():
        raise ValueError(f"inv_freq must be [D / 2] floating point, got {tuple(inv_freq.shape)} {inv_freq.dtype}")
    if isinstance(scale, Tensor) and scale.shape not in ((), inv_freq.shape):
        raise ValueError(f"scale must be a number or {list(inv_freq.shape)}, got {list(scale.shape)}")
    if length < 0:
        raise ValueError(f"length must be at least 0, got {length}")


@takes(Arguments)
def kv_calibrate_cost(args: Arguments) -> tuple[int, int]:
    """(bytes, flops) of one call; leaves out positions, slots and the table's rows, which are small beside qkv."""
    qkv, cache = args.qkv, args.k_cache
    narrower = qkv.element_size() - cache.element_size()
    moved = 2 * qkv.numel() * qkv.element_size() - 2 * len(qkv) * cache.shape[-2:].numel() * narrower
    return moved, 3 * qkv.numel()


TILE = 2048  # elements of a half of D that one program holds: rows x heads x D/2


@triton.jit
def rope_at(rope_ptr, i_position, m, D: tl.constexpr, HALF: tl.constexpr):
    """The cosines and sines of positions [R, 1]: two [R, HALF], 0 where m is not set."""
    p_rope = rope_ptr + i_position.to(tl.int64) * (2 * D) + tl.arange(0, HALF)[None, :]
    return tl.load(p_rope, mask=m, other=0.0), tl.load(p_rope + D + D // 2, mask=m, other=0.0)


@triton.jit
def calibrate(
    b_a,  # [R, HALF] float32, the first halves of the heads
    b_b,  # the second halves
    b_cos,  # [R, HALF]: see `rope_at`
    b_sin,
    b_wa,  # [R or 1, HALF], the norm's weight for the first halves
    b_wb,  # for the second halves
    eps,
    NORM: tl.constexpr,
    D: tl.constexpr,
):
    """Normalise and rotate heads, whose elements beyond D are 0. Returns both halves in float32."""
    if NORM:
        b_square = tl.sum(b_a * b_a + b_b * b_b, axis=1)
        b_scale = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(b_square, D * 1.0) + eps))[:, None]
        b_a = b_a * b_scale * b_wa.to(tl.float32)
        b_b = b_b * b_scale * b_wb.to(tl.float32)
    return b_a * b_cos - b_b * b_sin, b_b * b_cos + b_a * b_sin


@triton.jit
def _calibrate_heads(
    p_in,  # [R, 1] pointers to the heads
    p_out,  # [R, 1] pointers to the results
    m_head,  # [R, 1]
    i_position,  # [R, 1]
    rope_ptr,  # [C, 2, D] fp32
    p_norm,  # [R, 1] pointers to the rows of the norm's weight
    b_scale,  # [R, 1] of a result in eight bits
    eps,
    NORM: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,  # D / 2 padded to a power of two
    KV: tl.constexpr,  # the kind of the result
):
    o_d = tl.arange(0, HALF)[None, :]
    m = m_head & (o_d < D // 2)
    b_a = tl.load(p_in + o_d, mask=m, other=0.0).to(tl.float32)
    b_b = tl.load(p_in + D // 2 + o_d, mask=m, other=0.0).to(tl.float32)
    b_cos, b_sin = rope_at(rope_ptr, i_position, m, D, HALF)
    b_wa, b_wb = 1.0, 1.0
    if NORM:
        b_wa = tl.load(p_norm + o_d, mask=m, other=0.0)
        b_wb = tl.load(p_norm + D // 2 + o_d, mask=m, other=0.0)
    b_a, b_b = calibrate(b_a, b_b, b_cos, b_sin, b_wa, b_wb, eps, NORM, D)
    store_halves(p_out, b_a.to(p_in.dtype.element_ty), b_b.to(p_in.dtype.element_ty), b_scale, m, D, HALF, KV)


@triton.jit
def store_halves(
    p_out,  # [R, 1] pointers to the heads
    b_a,  # [R, HALF] in the dtype of the activations, the first halves
    b_b,  # the second halves
    b_scale,  # [R, 1]
    m,  # [R, HALF] which elements exist
    D: tl.constexpr,
    HALF: tl.constexpr,
    KV: tl.constexpr,
):
    """Write heads, into a cache in eight bits over their scales."""
    o_d = tl.arange(0, HALF)[None, :]
    if KV != "plain":
        b_a = narrow(b_a.to(tl.float32), b_scale, KV)
        b_b = narrow(b_b.to(tl.float32), b_scale, KV)
    tl.store(p_out + o_d, b_a, mask=m)
    tl.store(p_out + D // 2 + o_d, b_b, mask=m)


@triton.jit
def _scale_of(scale_ptr, i_group, i_h, m, Hkv: tl.constexpr, KV: tl.constexpr):
    """The scales of KV heads i_h, [R, 1] float32; 1 for a plain cache and where m is not set."""
    b_scale = tl.full(m.shape, 1.0, tl.float32)
    if KV != "plain":
        b_scale = tl.load(scale_ptr + i_group * Hkv + i_h, mask=m, other=1.0)
    return b_scale


@triton.jit(
    do_not_specialize=["T", "group"],
    do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"],  # they may be slices of longer tables
)
def _kv_calibrate_kernel(
    qkv_ptr,  # [T, Hq + 2 * Hkv, D]
    positions_ptr,  # [T]
    slots_ptr,  # [T]
    rope_ptr,  # [C, 2, D] fp32
    q_norm_ptr,  # [G, D]
    k_norm_ptr,  # [G, D]
    q_ptr,  # [T, Hq, D]
    k_cache_ptr,  # [slots, Hkv, D]
    v_cache_ptr,  # [slots, Hkv, D]
    k_scale_ptr,  # [G, Hkv], or None
    v_scale_ptr,  # [G, Hkv], or None
    T,
    group,  # rows of a group, T / G
    eps,
    Hq: tl.constexpr,
    Hkv: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,  # D / 2 padded to a power of two
    BT: tl.constexpr,  # rows per program
    BH: tl.constexpr,  # heads per program: all q, all k or all v
    NORM: tl.constexpr,
    KV: tl.constexpr,  # "plain", or the kind of a cache in eight bits
    PDL: tl.constexpr,
):
    start_after_previous(PDL)
    # Load indices as vectors and broadcast later: as a column, Triton 3.6 loads each index once per 8 columns.
    o_r = tl.arange(0, BT * BH)
    i_t1 = tl.program_id(0) * BT + o_r // BH
    m_t1 = i_t1 < T
    o_r, i_t, m_t = o_r[:, None], i_t1[:, None], m_t1[:, None]
    i_block = tl.program_id(1)
    q_blocks: tl.constexpr = (Hq + BH - 1) // BH
    kv_blocks: tl.constexpr = (Hkv + BH - 1) // BH
    row = i_t.to(tl.int64)
    i_group = i_t // group
    if i_block < q_blocks:
        i_h = i_block * BH + o_r % BH
        p_in = qkv_ptr + (row * (Hq + 2 * Hkv) + i_h) * D
        i_position = tl.load(positions_ptr + i_t1, mask=m_t1, other=0)[:, None]
        p_out, p_norm = q_ptr + (row * Hq + i_h) * D, q_norm_ptr + i_group * D
        m_head = m_t & (i_h < Hq)
        _calibrate_heads(p_in, p_out, m_head, i_position, rope_ptr, p_norm, 1.0, eps, NORM, D, HALF, "plain")
    elif i_block < q_blocks + kv_blocks:
        i_h = (i_block - q_blocks) * BH + o_r % BH
        p_in = qkv_ptr + (row * (Hq + 2 * Hkv) + Hq + i_h) * D
        i_position = tl.load(positions_ptr + i_t1, mask=m_t1, other=0)[:, None]
        i_slot = tl.load(slots_ptr + i_t1, mask=m_t1, other=0).to(tl.int64)[:, None]
        p_kv, p_norm = k_cache_ptr + (i_slot * Hkv + i_h) * D, k_norm_ptr + i_group * D
        m_head = m_t & (i_h < Hkv)
        b_scale = _scale_of(k_scale_ptr, i_group, i_h, m_head, Hkv, KV)
        _calibrate_heads(p_in, p_kv, m_head, i_position, rope_ptr, p_norm, b_scale, eps, NORM, D, HALF, KV)
    else:
        i_h = (i_block - q_blocks - kv_blocks) * BH + o_r % BH
        p_in = qkv_ptr + (row * (Hq + 2 * Hkv) + Hq + Hkv + i_h) * D
        i_slot = tl.load(slots_ptr + i_t1, mask=m_t1, other=0).to(tl.int64)[:, None]
        p_kv = v_cache_ptr + (i_slot * Hkv + i_h) * D
        o_d = tl.arange(0, HALF)[None, :]
        m_head = m_t & (i_h < Hkv)
        m = m_head & (o_d < D // 2)
        b_a = tl.load(p_in + o_d, mask=m)
        b_b = tl.load(p_in + D // 2 + o_d, mask=m)
        b_scale = _scale_of(v_scale_ptr, i_group, i_h, m_head, Hkv, KV)
        store_halves(p_kv, b_a, b_b, b_scale, m, D, HALF, KV)


@lru_cache
def _variant(dtype: torch.dtype, Hq: int, Hkv: int, D: int, norm: bool, kind: str = "plain") -> Variant:
    """The heads of a tile are all q, all k or all v, so that a program does one thing. A tile holds as many heads as
    fill a KV block without padding, and as many rows as give 256 threads 16 bytes of each half (2-byte types). The two
    partners of a rotation are in one thread: no shuffles. A program has 8 KiB of qkv in flight; the registers that the
    compiler uses allow six programs per SM (four with norms). All heads of a row read the same rows of the table, from
    L1. A head's sum of squares runs over the same threads in the same order for any T. All architectures share the
    tiles, since the kernel is memory-bound."""
    half = triton.next_power_of_2(D // 2)
    rows = max(TILE // half, 1)
    BH = min(triton.next_power_of_2(Hkv), rows)
    t = TYPES[dtype]
    return Variant(
        name=f"{t} Hq{Hq} Hkv{Hkv} D{D}" + " norm" * norm + named(kind),
        kernel=_kv_calibrate_kernel,
        arguments=(f"*{t}", "*i64", "*i64", "*fp32", *[f"*{t}"] * 3, *cache_types(t, kind), "i32", "i32", "fp32"),
        constexprs={"Hq": Hq, "Hkv": Hkv, "D": D, "HALF": half, "BT": rows // BH, "BH": BH, "NORM": norm, "KV": kind},
        num_warps=8,
        wide=D // 2 * dtype.itemsize % 16 == 0,
        smoke=dtype == torch.bfloat16 and (Hq, D) == (32, 128),
    )


@takes(Arguments)
def launch(args: Arguments) -> Tensor:
    qkv, positions, slots, rope, k_cache, v_cache, q_norm, k_norm, eps, k_scale, v_scale = args
    if not rope.is_contiguous():
        raise ValueError(f"rope must be contiguous, got strides {rope.stride()}")
    qkv, positions, slots = qkv.contiguous(), positions.contiguous(), slots.contiguous()
    if q_norm is not None and k_norm is not None:
        q_norm, k_norm = q_norm.contiguous(), k_norm.contiguous()
    T, (Hkv, D) = qkv.shape[0], k_cache.shape[2:]
    Hq = qkv.shape[1] // D - 2 * Hkv
    q = qkv.new_empty(T, Hq, D)
    if T:
        variant = _variant(qkv.dtype, Hq, Hkv, D, q_norm is not None, kind_of(k_cache))
        BT, BH = variant.constexprs["BT"], variant.constexprs["BH"]
        grid = (-(-T // BT), -(-Hq // BH) + 2 * -(-Hkv // BH))
        group = T // max(1 if each is None else len(each) for each in (q_norm, k_scale))
        # without norms their pointers are not read
        qn, kn = (qkv if norm is None else norm for norm in (q_norm, k_norm))
        k, v = as_bytes(k_cache), as_bytes(v_cache)
        variant(grid, qkv, positions, slots, rope, qn, kn, q, k, v, k_scale, v_scale, T, group, float(eps))
    return q


def _check(args: Arguments) -> None:
    qkv = args.qkv
    T = qkv.shape[0] if qkv.dim() else 0
    Hkv, D = check_rows(qkv, T, args)
    if qkv.dim() != 2 or qkv.shape[1] % D or qkv.shape[1] < 2 * Hkv * D:
        raise ValueError(f"qkv must be [T, (Hq + 2*{Hkv}) * {D}], got {tuple(qkv.shape)}")


def check_places(args: Any) -> None:
    """Raise ValueError for positions beyond the table or slots beyond the cache; reads them on the host. `args` are
    those of kv_calibrate or kv_project."""
    check_within("positions", args.positions, len(args.rope))
    check_within("slots", args.slots, args.k_cache.shape[0] * args.k_cache.shape[1])


def check_rows(x: Tensor, T: int, args: Any) -> tuple[int, int]:
    """Raise ValueError unless T rows of x's dtype can be rotated, normed and written to the caches. `args` are those of
    kv_calibrate or kv_project. Returns Hkv, D."""
    positions, slots, rope, k_cache, v_cache = args.positions, args.slots, args.rope, args.k_cache, args.v_cache
    q_norm, k_norm, k_scale = args.q_norm, args.k_norm, args.k_scale
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape:
        raise ValueError(f"caches must be [pages, page, Hkv, D], got {tuple(k_cache.shape)}, {tuple(v_cache.shape)}")
    Hkv, D = k_cache.shape[2:]
    if D % 2 or not D:
        raise ValueError(f"D must be even, since halves of a head are rotated together; got {D}")
    for name, index in (("positions", positions), ("slots", slots)):
        if index.shape != (T,) or index.dtype != torch.int64:
            raise ValueError(f"{name} must be [{T}] int64, got {tuple(index.shape)} {index.dtype}")
    if rope.dim() != 3 or rope.shape[1:] != (2, D) or rope.dtype != sum_dtype(x.dtype):
        raise ValueError(f"rope must be [C, 2, {D}] {sum_dtype(x.dtype)}, got {tuple(rope.shape)} {rope.dtype}")
    check_cache(x, k_cache, v_cache, k_scale, args.v_scale)
    check_contiguous(k_cache, v_cache)
    same_device(
        x, positions=positions, slots=slots, rope=rope, k_cache=k_cache, v_cache=v_cache, q_norm=q_norm, k_norm=k_norm
    )
    if k_scale is not None and T % len(k_scale):
        raise ValueError(f"k_scale must be [G, {Hkv}] with G dividing {T} rows, got {tuple(k_scale.shape)}")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm come together or not at all")
    if q_norm is None or k_norm is None:
        return Hkv, D
    if not args.eps >= 0:
        raise ValueError(f"eps must be at least 0, got {args.eps}")
    if q_norm.dim() != 2 or q_norm.shape[1] != D or not len(q_norm) or T % len(q_norm):
        raise ValueError(f"q_norm must be [G, {D}] with G dividing {T} rows, got {tuple(q_norm.shape)}")
    if k_norm.shape != q_norm.shape or not q_norm.dtype == k_norm.dtype == x.dtype:
        raise ValueError(
            f"q_norm and k_norm must have one shape and the input's dtype: {tuple(q_norm.shape)} {q_norm.dtype}, "
            f"{tuple(k_norm.shape)} {k_norm.dtype}"
        )
    if k_scale is not None and len(k_scale) != len(q_norm):
        raise ValueError(f"k_scale must have a row for each of q_norm's {len(q_norm)}, got {tuple(k_scale.shape)}")
    return Hkv, D


def fake_q(qkv: Tensor, k_cache: Tensor) -> Tensor:
    """A fake result for fake arguments."""
    Hkv, D = k_cache.shape[2:]
    heads = qkv.new_empty(qkv.shape[0], qkv.shape[1] // D - Hkv, D)  # the reference's q and k are views of one tensor
    q = heads[:, : heads.shape[1] - Hkv]
    return q.new_empty(q.shape) if qkv.is_cuda and qkv.dtype != torch.float64 else q


_kv_calibrate = register(
    kv_calibrate,
    Arguments,
    check=_check,
    reference=kv_calibrate_ref,
    launch=launch,
    fake=lambda args: fake_q(args.qkv, args.k_cache),
    mutates=("k_cache", "v_cache"),
    check_values=check_places,
)


def variants(arch: int) -> Iterator[Variant]:
    """The variants that the compile-only checks compile for sm_`arch`; the launcher takes any heads and D."""
    for norm in (False, True):
        yield _variant(torch.bfloat16, 32, 8, 128, norm)
        yield _variant(torch.bfloat16, 14, 2, 64, norm)
    for Hq, Hkv, D in ((32, 32, 128), (8, 1, 256), (6, 3, 96)):
        yield _variant(torch.bfloat16, Hq, Hkv, D, False)
    yield _variant(torch.bfloat16, 0, 8, 128, True)  # `dflash` keeps K and V of the target's rows
    yield _variant(torch.float16, 32, 8, 128, True)
    yield _variant(torch.float32, 32, 8, 128, True)
    for kind in NARROW.values():
        yield _variant(torch.bfloat16, 32, 8, 128, True, kind)
