"""kv_project: the attention input of few rows in one launch: row_linear with W_qkv, then kv_calibrate.

A program computes one head of 64 rows over one split of K. For each head and 64 rows, the last program to finish adds
up the splits in order and completes the head, so no second launch is needed. The result does not depend on which
program is last.
Traffic: the weight once, G * O * E elements, plus G * T * (E + O), the table's rows and, if K is split, float32 sums of
the splits, written and read once.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from specker.kernels.kv_calibrate import (
    calibrate,
    check_places,
    check_rows,
    fake_q,
    kv_calibrate,
    kv_calibrate_cost,
    rope_at,
    store_halves,
)
from specker.kernels.narrow import NARROW, cache_types, kind_of, named
from specker.kernels.quant import Format, Matrix, arguments_of, as_bytes, constexprs_of, format_of, streams, types_of
from specker.kernels.registry import register, takes
from specker.kernels.row_linear import row_linear, row_linear_cost
from specker.kernels.stream import stream_rows
from specker.kernels.tiles import (
    COMMON,
    FEW,
    MAX_ROWS,
    MIN_SPLIT,
    check_product,
    columns_of,
    few_rows,
    stages_of,
    weight_left,
    wide_rows,
)
from specker.kernels.variant import (
    SMS,
    TYPES,
    Variant,
    arch,
    counters,
    is_last,
    let_next_start,
    same_device,
    sms,
    tl,
    triton,
    wait_for_previous,
)

MAX_D = 256


def kv_project(
    x: Tensor,
    weight: Matrix,
    bias: Tensor | None,
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
    """The attention input of few rows in one launch: `row_linear` with W_qkv, then `kv_calibrate`.

        q = kv_calibrate(row_linear(x, weight, bias), positions, slots, rope, k_cache, v_cache, q_norm, k_norm, eps,
                         k_scale, v_scale)

    The projection is rounded to x's dtype before norm and rotation, as above. One call can run G layers side by side.
    The op is batch-invariant: a row's bits depend on that row, the weights and the device alone. Memory moves the
    weight once. The kernel serves up to 1,024 rows a layer and heads of up to 256 (128 with four bits); for other
    sizes the two ops run one after the other.

    Args:
        x: [T, E] or [G, T, E].
        weight: [(Hq + 2 Hkv) * D, E] or [G, .., E] of x's dtype, or a `Quantized` matrix; on a CPU also bfloat16
            beside float32.
        bias: [(Hq + 2 Hkv) * D] or [G, ..], or None.
        positions: [G * T] int64.
        slots: [G * T] int64.
        rope: [C, 2, D], see `rope_table`.
        k_cache: [pages, page_size, Hkv, D] of x's dtype, int8 or float8_e4m3fn, written in place.
        v_cache: as k_cache.
        q_norm: [G, D] or None.
        k_norm: as q_norm; both or neither.
        eps: epsilon of the norms.
        k_scale: [G, Hkv] float32, of caches in eight bits.
        v_scale: as k_scale.

    Returns:
        q [G * T, Hq, D], rotated.

    Raises:
        TypeError: an argument of another type.
        ValueError: as for `kv_calibrate`, or a weight or bias of another shape or dtype.

    Source: as for `kv_calibrate`.

    Examples:
        >>> import torch
        >>> from specker.kernels import kv_project, rope_table
        >>> keys, values = torch.zeros(2, 1, 4, 1, 2)
        >>> row, rope = torch.arange(6.0)[None], rope_table(torch.ones(1), 1.0, 8, torch.float32)
        >>> kv_project(row, torch.eye(6), None, torch.tensor([0]), torch.tensor([3]), rope, keys, values)
        tensor([[[0., 1.]]])
        >>> keys[0, 3].tolist()
        [[2.0, 3.0]]
    """
    return _kv_project(x, weight, bias, positions, slots, rope, k_cache, v_cache, q_norm, k_norm, eps, k_scale, v_scale)


class Arguments(NamedTuple):
    x: Tensor
    weight: Matrix
    bias: Tensor | None
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
def kv_project_ref(args: Arguments) -> Tensor:
    return kv_calibrate(row_linear(args.x, args.weight, args.bias).flatten(0, -2), *args[3:])


@takes(Arguments)
def kv_project_cost(args: Arguments) -> tuple[int, int]:
    """(bytes, flops) that any implementation needs: x, weight and bias read once, q, k and v written once. Leaves out
    positions, slots and the table's rows."""
    qkv = args.x.new_empty(math.prod(args.x.shape[:-1]), args.weight.shape[-2], device="meta")
    product, flops = row_linear_cost(args.x, args.weight, args.bias)
    moved, more = kv_calibrate_cost(qkv, *args[3:])
    return product + moved - 2 * qkv.numel() * qkv.element_size(), flops + more


@triton.jit(
    do_not_specialize=["T"],
    do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"],  # they may be slices of longer tables
)
def _kv_project_kernel(
    x_ptr,  # [G, T, E]
    w_ptr,  # [G, HEADS * D, E], four bits int16 of E / 4: Hq heads of q, Hkv of k, Hkv of v
    scale_ptr,  # [G, HEADS * D, E / GROUP], or None
    shift_ptr,  # [G, HEADS * D, E / GROUP], or None
    bias_ptr,  # [G, HEADS * D]
    positions_ptr,  # [G * T]
    slots_ptr,  # [G * T]
    rope_ptr,  # [C, 2, D] fp32
    q_norm_ptr,  # [G, D]
    k_norm_ptr,  # [G, D]
    sums_ptr,  # [SPLITS, G * T, HEADS * D] float32
    count_ptr,  # [row tiles, G * HEADS] zeros; reset to zeros at the end
    q_ptr,  # [G * T, Hq, D]
    k_cache_ptr,  # [slots, Hkv, D]
    v_cache_ptr,  # [slots, Hkv, D]
    k_scale_ptr,  # [G, Hkv], or None
    v_scale_ptr,  # [G, Hkv], or None
    T,
    eps,
    G: tl.constexpr,
    Hq: tl.constexpr,
    Hkv: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,  # D padded to a power of two
    E: tl.constexpr,
    M: tl.constexpr,  # rows per program
    R: tl.constexpr,  # rows finished at a time; divides M
    BLOCK_E: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_E: tl.constexpr,  # a multiple of BLOCK_E
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    LEFT: tl.constexpr,
    KV: tl.constexpr,  # "plain", or the kind of a cache in eight bits
    SM: tl.constexpr,
    PDL: tl.constexpr,
    ON_AMD: tl.constexpr,
):
    HEADS: tl.constexpr = Hq + 2 * Hkv
    O: tl.constexpr = HEADS * D
    tl.static_assert(SPLIT_E % BLOCK_E == 0 and SPLITS * SPLIT_E >= E and N * E < 2**31 and 1024 * E < 2**31)
    o_m = tl.program_id(0) * M + tl.arange(0, M)
    i_g = tl.program_id(1) // HEADS
    i_h = tl.program_id(1) % HEADS
    i_s = tl.program_id(2)
    o_n = tl.arange(0, N)
    first = i_g.to(tl.int64) * T  # the layer's first row
    PACK: tl.constexpr = 4 if w_ptr.dtype.element_ty == tl.int16 else 1
    w_ptr += (i_g * HEADS + i_h).to(tl.int64) * (D * (E // PACK))
    start = i_s * SPLIT_E if SPLITS > 1 else 0
    stop = tl.minimum(i_s * SPLIT_E + SPLIT_E, E) if SPLITS > 1 else E
    wait_for_previous(PDL)
    b_y = stream_rows(
        x_ptr + first * E,
        w_ptr,
        scale_ptr,
        shift_ptr,
        (i_g * HEADS + i_h) * D,
        o_m,
        o_m < T,
        o_n,
        o_n < D,
        start,
        stop,
        E,
        M,
        N,
        BLOCK_E,
        E % BLOCK_E == 0,
        D == N,
        KIND,
        GROUP,
        LEFT,
        SM,
    )
    let_next_start(PDL)
    # Load what the last program needs before its arrival: then it waits for memory once, for the sums and rope's rows.
    # Before the stream these loads would cost D 256 the registers of its second program on an SM.
    o_r = tl.program_id(0) * M + tl.arange(0, R)
    i_position = tl.load(positions_ptr + first + o_r, mask=o_r < T, other=0)
    i_slot = tl.load(slots_ptr + first + o_r, mask=o_r < T, other=0)
    o_d = tl.arange(0, N // 2)[None, :]
    m_d = o_d < D // 2
    b_wa, b_wb = 1.0, 1.0
    if NORM:
        p_norm = q_norm_ptr + i_g * D + o_d
        if i_h >= Hq:
            p_norm = k_norm_ptr + i_g * D + o_d
        b_wa = tl.load(p_norm, mask=m_d, other=0.0)
        b_wb = tl.load(p_norm + D // 2, mask=m_d, other=0.0)
    if BIAS:
        p_bias = bias_ptr + i_g * O + i_h * D + o_d
        b_bias_a = tl.load(p_bias, mask=m_d, other=0.0)
        b_bias_b = tl.load(p_bias + D // 2, mask=m_d, other=0.0)
    plane = T.to(tl.int64) * (G * O)
    p_y = sums_ptr + i_s * plane + (first + o_m)[:, None] * O + i_h * D + o_n[None, :]
    tl.store(p_y, b_y, mask=(o_m < T)[:, None] & (o_n < D)[None, :])
    if SPLITS > 1:
        if not is_last(count_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), SPLITS, ON_AMD):
            return
    else:
        tl.debug_barrier()  # other threads of the program read these sums

    for i_r in tl.range(0, tl.minimum(T - tl.program_id(0) * M, M), R):
        # Load indices as vectors and broadcast later: as a column, Triton 3.6 loads each index once per 8 columns.
        o_t = tl.program_id(0) * M + i_r + tl.arange(0, R)
        m_t = o_t < T
        i_row = first + o_t
        m = m_t[:, None] & m_d
        b_cos, b_sin = rope_at(rope_ptr, i_position[:, None], m & (i_h < Hq + Hkv), D, N // 2)
        p_a = sums_ptr + i_row[:, None] * O + i_h * D + o_d
        b_a = tl.zeros([R, N // 2], tl.float32)
        b_b = tl.zeros([R, N // 2], tl.float32)
        for s in tl.static_range(SPLITS):
            b_a += tl.load(p_a + s * plane, mask=m, other=0.0)
            b_b += tl.load(p_a + s * plane + D // 2, mask=m, other=0.0)
        if BIAS:
            b_a += b_bias_a.to(tl.float32)
            b_b += b_bias_b.to(tl.float32)
        b_a = b_a.to(q_ptr.dtype.element_ty).to(tl.float32)
        b_b = b_b.to(q_ptr.dtype.element_ty).to(tl.float32)
        if i_h < Hq + Hkv:
            b_a, b_b = calibrate(b_a, b_b, b_cos, b_sin, b_wa, b_wb, eps, NORM, D)
        b_a = b_a.to(q_ptr.dtype.element_ty)
        b_b = b_b.to(q_ptr.dtype.element_ty)
        if i_h < Hq:
            store_halves(q_ptr + (i_row * Hq + i_h)[:, None] * D, b_a, b_b, 1.0, m, D, N // 2, "plain")
        else:
            i_kv = (i_h - Hq) % Hkv
            p_kv = k_cache_ptr
            if i_h >= Hq + Hkv:
                p_kv = v_cache_ptr
            b_scale = 1.0
            if KV != "plain":
                p_scale = k_scale_ptr
                if i_h >= Hq + Hkv:
                    p_scale = v_scale_ptr
                b_scale = tl.load(p_scale + i_g * Hkv + i_kv)
            store_halves(p_kv + (i_slot * Hkv + i_kv)[:, None] * D, b_a, b_b, b_scale, m, D, N // 2, KV)
        if M > R:  # of the next rows
            i_position = tl.load(positions_ptr + i_row + R, mask=o_t + R < T, other=0)
            i_slot = tl.load(slots_ptr + i_row + R, mask=o_t + R < T, other=0)


class Shape(NamedTuple):
    dtype: torch.dtype
    G: int
    Hq: int
    Hkv: int
    D: int
    E: int
    norm: bool = False
    bias: bool = False
    form: Format | None = None
    kind: str = "plain"
    few: bool = False  # see `few_rows`


@lru_cache(maxsize=256)
def _variant(shape: Shape, arch: int, sms: int = 0) -> Variant:
    """Rows of x as in row_linear. A tile of the weight is one head, since a head's halves are
    rotated together. Heads are few: 48 of 128 rows for Llama-3-8B. So K is split: on sm_90 for up to two programs an SM
    (on 132 SMs five splits are 240 programs), elsewhere until every SM has one. The last to finish reads the splits'
    sums from L2, 512 bytes per split, row and head. float32 uses FMA in small tiles, for correctness only. By default
    ptxas limits some variants to fewer than 128 registers and spills."""
    dtype, G, Hq, Hkv, D, E, norm, bias, form, kind, few = shape
    sms = sms or SMS[arch]
    count, n = G * (Hq + 2 * Hkv), max(16, triton.next_power_of_2(D))
    row = E * dtype.itemsize if form is None else form.size(E)
    if dtype == torch.float32:
        m, block = 16, 32 if form is None else form.block(32, E)
    else:
        # On sm_80 64 rows of x and 128 columns take all registers of four warps.
        longer = form is not None or (n <= 64 and arch != 80)
        m, block = 64, columns_of(n, row % 16 == 0, E, arch, form) if longer else 64
    left = dtype != torch.float32 and weight_left(n, arch, form)
    if left and (few or (n > 64 and form is not None and not form.four_bits)):
        m = FEW if few else 32  # 64 rows of x and 128 of eight bits spill with Triton 3.9
    programs = 2 * sms // count if left else -(-sms // count)
    splits = max(1, min(programs, E // MIN_SPLIT))
    splits = -(-E // (-(-E // (splits * block)) * block))  # splits of whole tiles may be fewer
    split = -(-E // (splits * block)) * block
    stages = 2 if dtype == torch.float32 else max(stages_of(m, n, block, count * splits <= sms, arch, form), 2)
    t = TYPES[dtype]
    warps = 8 if n > 128 else 4
    about = f" x{G}" * (G > 1) + " norm" * norm + " bias" * bias + ("" if form is None else f" {form}") + named(kind)
    about += " few" * few
    return Variant(
        name=f"{t} {E}->{Hq}/{Hkv} D{D}{about}",
        kernel=_kv_project_kernel,
        arguments=(
            f"*{t}",
            *types_of(t, form),
            f"*{t}",
            *("*i64",) * 2,
            "*fp32",
            *(f"*{t}",) * 2,
            "*fp32",
            "*i32",
            f"*{t}",
            *cache_types(t, kind),
            "i32",
            "fp32",
        ),
        constexprs={
            "G": G,
            "Hq": Hq,
            "Hkv": Hkv,
            "D": D,
            "N": n,
            "E": E,
            "M": m,
            "R": min(16, m),
            "BLOCK_E": block,
            "SPLITS": splits,
            "SPLIT_E": split,
            "NORM": norm,
            "BIAS": bias,
            **constexprs_of(form),
            "LEFT": left,
            "KV": kind,
        },
        num_warps=warps,
        num_stages=stages,
        dot=dtype != torch.float32,
        left=left and form is not None,
        wide=wide_rows(dtype, E, arch, form),
        smoke=dtype == torch.bfloat16 and (E, Hq) == (4096, 32) and G == 1 and form in (None, COMMON[2]),
        options={"maxnreg": 255} if warps == 4 else {},
    )


def variants(arch: int) -> Iterator[Variant]:
    """The variants that the compile-only checks compile for sm_`arch`; the launcher takes any sizes."""
    bf16, llama = torch.bfloat16, Shape(torch.bfloat16, 1, 32, 8, 128, 4096)
    for shape in (
        llama,  # Llama-3-8B
        llama._replace(norm=True),  # Qwen3-8B
        Shape(bf16, 1, 32, 8, 64, 2048),  # Llama-3.2-1B
        llama._replace(G=4),
        Shape(bf16, 4, 32, 8, 64, 2048),
        Shape(bf16, 1, 14, 2, 64, 896, bias=True),  # Qwen2.5-0.5B
        Shape(bf16, 1, 32, 32, 96, 3072),  # Phi-3-mini
        Shape(bf16, 1, 8, 1, 256, 2048),
        llama._replace(dtype=torch.float16),
        llama._replace(dtype=torch.float32, norm=True, bias=True),
    ):
        yield _variant(shape, arch)
    for form in COMMON:
        yield _variant(llama._replace(form=form), arch)
    yield _variant(Shape(torch.float16, 2, 32, 8, 64, 2048, norm=True, bias=True, form=COMMON[3]), arch)
    yield _variant(llama._replace(dtype=torch.float32, form=COMMON[0]), arch)
    for kind in NARROW.values():
        yield _variant(llama._replace(kind=kind), arch)
    if arch == 90:
        for few in (None, COMMON[0], COMMON[3]):
            yield _variant(llama._replace(form=few, few=True), arch)
        yield _variant(Shape(bf16, 1, 32, 8, 64, 2048, few=True), arch)


@takes(Arguments)
def launch(args: Arguments) -> Tensor:
    x, weight, bias, positions, slots, rope, k_cache, v_cache, q_norm, k_norm, eps, k_scale, v_scale = args
    w, scale, shift = arguments_of(weight)
    if not rope.is_contiguous():
        raise ValueError(f"rope must be contiguous, got strides {rope.stride()}")
    x, positions, slots = x.contiguous(), positions.contiguous(), slots.contiguous()
    (*layers, T, E), O, (Hkv, D) = x.shape, weight.shape[-2], k_cache.shape[2:]
    G, Hq = math.prod(layers), O // D - 2 * Hkv
    q = x.new_empty(G * T, Hq, D)
    if not q.numel():
        return q
    on = arch(x.device)
    norm, form, kind = q_norm is not None, format_of(weight), kind_of(k_cache)
    shape = Shape(x.dtype, G, Hq, Hkv, D, E, norm, bias is not None, form, kind, few_rows(T, on))
    variant = _variant(shape, on, sms(x.device))
    tiles, splits = -(-T // variant.constexprs["M"]), variant.constexprs["SPLITS"]
    sums = x.new_empty((splits, G * T, O), dtype=torch.float32)
    count = counters(x.device, tiles * G * (O // D))
    b, qn, kn = (x if y is None else y.contiguous() for y in (bias, q_norm, k_norm))  # x is a dummy, not read
    grid = (tiles, G * (O // D), splits)
    variant(
        grid,
        x,
        w,
        scale,
        shift,
        b,
        positions,
        slots,
        rope,
        qn,
        kn,
        sums,
        count,
        q,
        as_bytes(k_cache),
        as_bytes(v_cache),
        k_scale,
        v_scale,
        T,
        float(eps),
    )
    return q


def _check(args: Arguments) -> None:
    x, weight, bias, q_norm, k_scale = args.x, args.weight, args.bias, args.q_norm, args.k_scale
    check_product(x, weight)
    G, T, O = math.prod(x.shape[:-2]), math.prod(x.shape[:-1]), weight.shape[-2]
    Hkv, D = check_rows(x, T, args)
    if O % D or 2 * Hkv * D >= O:
        raise ValueError(f"weight must have (Hq + 2*{Hkv}) * {D} rows, got {O}")
    if bias is not None and (bias.shape != weight.shape[:-1] or bias.dtype != x.dtype):
        raise ValueError(f"bias must be {list(weight.shape[:-1])} {x.dtype}, got {tuple(bias.shape)} {bias.dtype}")
    same_device(x, bias=bias)
    if q_norm is not None and len(q_norm) != G:
        raise ValueError(f"q_norm must be [{G}, {D}], a row per layer, got {tuple(q_norm.shape)}")
    if k_scale is not None and len(k_scale) != G:
        raise ValueError(f"k_scale must be [{G}, {Hkv}], a row per layer, got {tuple(k_scale.shape)}")


def _fake(args: Arguments) -> Tensor:
    return fake_q(args.x.new_empty(math.prod(args.x.shape[:-1]), args.weight.shape[-2]), args.k_cache)


def _fits(args: Arguments) -> bool:
    widest = 128 if args.weight.dtype == torch.uint8 else MAX_D  # four bits in tiles of 256 rows spill registers
    return args.x.shape[-2] <= MAX_ROWS and args.k_cache.shape[3] <= widest and streams(args.weight)


_kv_project = register(
    kv_project,
    Arguments,
    check=_check,
    reference=kv_project_ref,
    launch=launch,
    fake=_fake,
    fits=_fits,
    mutates=("k_cache", "v_cache"),
    check_values=check_places,
)
