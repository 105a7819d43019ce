"""row_linear: y = x W^T (+ bias) for few rows (a decoding step, a verify pass), with an optional act(gate) * up.

The matrix tile has 64 rows, on sm_90 16 for up to 16 rows; rows beyond T are zeros. Sums run along K in order. The
number of splits of K depends only on (G, O, E, device), and a second kernel adds their float32 partials in order,
without atomics; "split" may have more splits than the other epilogues. Traffic: the weight once, G * O * E elements or
the bytes of a quantised weight's parts, plus G * T * (E + O).
"""

import math
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

from specker.kernels.cpu import eager, native
from specker.kernels.quant import (
    Format,
    Matrix,
    Quantized,
    arguments_of,
    constexprs_of,
    format_of,
    streams,
    types_of,
)
from specker.kernels.registry import refuse, register, takes, write
from specker.kernels.stream import gate_and_up, stream_rows, tile_rows
from specker.kernels.tiles import (
    COMMON,
    MAX_ROWS,
    MXFP4,
    Product,
    check_product,
    few_rows,
    like,
    split_of,
    tiles,
    weight_left,
    wide_rows,
)
from specker.kernels.variant import (
    TYPES,
    Variant,
    arch,
    let_next_start,
    same_device,
    sms,
    start_after_previous,
    sum_dtype,
    tl,
    triton,
    wait_for_previous,
)

# epilogues of a gated feed-forward -> its activation
GATES = {"silu_mul": "silu", "gelu_tanh_mul": "gelu_tanh", "clamped_silu_mul": "clamped_silu"}
# Of clamped_silu:
ALPHA = 1.702
LIMIT = 7.0
EPILOGUES = ("none", *GATES, "float32", "split")
# On a CPU, the compiled products are fastest for weights of at least this many elements (waking their threads takes 20
# to 50 us) and at most this many rows. For more rows in float32, oneDNN on unpacked weights is faster (bench/LOG.md).
COMPILED_MIN = 1 << 18
COMPILED_ROWS = 32


def row_linear(
    x: Tensor, weight: Matrix, bias: Tensor | None = None, epilogue: str = "none", *, out: Tensor | None = None
) -> Tensor:
    """A linear layer over few rows (a decoding step, a verify pass), with the same bits for any number of rows.

        y = x W^T + bias

    Sums run in float32 (float64 for float64). The kernel serves up to 1,024 rows, in tiles of 64, and is
    batch-invariant: a row's bits depend on that row, the weight and the architecture alone. It applies bias and gate
    before its only rounding. Memory moves the weight once. One call can run G layers side by side. The reference serves
    float64 and more rows, such as a long prompt's: it calls cuBLAS, whose bits depend on the number of rows, and rounds
    before the gate. For 1,025 rows or more with invariant bits, call the op on parts of at most 1,024 rows.

    On a CPU, up to 32 float32 rows with a large unquantised matrix are batch-invariant too (specker/cpu); in other
    cases a row's last bits may depend on the other rows.

    On a CPU, x and bias may be float32 with a bfloat16 weight; the result is then float32. The compiled product, which
    serves up to 32 rows and a large matrix, rounds x to bfloat16. Otherwise CPUs with AVX-512 BF16 round x and the
    product to bfloat16, also for "float32", and without a bias they compute the gate in bfloat16, too.

    Args:
        x: [T, E] or [G, T, E].
        weight: [O, E] or [G, O, E] of x's dtype, or a `Quantized` matrix, whose weights are rounded to x's
            dtype before the product, unless sums are scaled (quant.py); on a CPU also bfloat16 beside float32.
        bias: [O] or [G, O], or None.
        epilogue: "none"; "silu_mul": the weight's first O / 2 rows are the gate Wg, the rest the up projection Wu, and
            the result is silu(x Wg^T) * (x Wu^T); "gelu_tanh_mul": the same with GELU's tanh form; "clamped_silu_mul":
            g sigmoid(1.702 g) (u + 1), where g is the gate's product, at most 7, and u the other one, between -7 and 7
            (gpt-oss); "float32": the result is not rounded, for logits; "split", without a bias: the sums over S splits
            of K, which `residual_merge` adds up.
        out: contiguous, of the result's shape and dtype; the result is written there and returned.

    Returns:
        [T, O], with a leading G if x has one; [T, O / 2] with a gate; [T, O] float32 (float64 for float64) for
        "float32"; [S, T, O] float32 (float64 for float64) for "split", where S depends on (G, O, E, device) alone.

    Raises:
        TypeError: an argument of another type.
        ValueError: other shapes, dtypes or devices, an unknown epilogue, or "split" with a bias.

    Source: GEGLU and SwiGLU, arXiv 2002.05202, equation 6; GELU's tanh form, arXiv 1606.08415, section 2.

    Examples:
        >>> import torch
        >>> from specker.kernels import row_linear
        >>> row_linear(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])).tolist()
        [[1.0, 2.0, 3.0]]
    """
    try:  # check after a failure only, to spare decoding steps the checks
        if epilogue == "float32" and x.dtype in (torch.float32, torch.float64):
            epilogue = "none"
        y = _compiled(x, weight, bias, epilogue)
        if y is None:
            matrices = x.dim() == weight.dim() > 1
            simple = epilogue == "none" or (epilogue in GATES and matrices and weight.shape[-2] % 2 == 0)
            concrete = type(x) is type(weight) is Tensor and not is_dynamo_compiling()  # no fake one of torch.export
            if concrete and x.is_cpu and bias is None and matrices and simple and like(x, weight):
                y = row_linear_ref(x, weight, bias, epilogue)
    except Exception:
        refuse(row_linear, lambda *args: _check(Arguments(*args)), (x, weight, bias, epilogue, out))
        raise
    if y is None:
        y = _row_linear(x, weight, bias, epilogue, out)
    if out is None or y is out:  # the kernel has written it
        return y
    _check_out(out, y)
    return write(out, y)


class Arguments(NamedTuple):
    x: Tensor
    weight: Matrix
    bias: Tensor | None = None
    epilogue: str = "none"
    out: Tensor | None = None


@takes(Arguments)
def row_linear_ref(args: Arguments) -> Tensor:
    x, weight, bias, epilogue, _ = args
    size = split_of(x, weight)[1] if epilogue == "split" else 0  # a quantised weight has its own splits
    if isinstance(weight, Quantized):
        weight = weight.widened(x.dtype, sum_dtype(x.dtype) if epilogue in ("float32", "split") else x.dtype)
    if epilogue == "split":
        parts = zip(x.split(size, -1), weight.split(size, -1), strict=True)
        sums = [row_linear_ref(a, w, None, "float32") for a, w in parts]
        return torch.stack(sums)
    if epilogue == "float32" and x.dtype != sum_dtype(x.dtype):
        x, weight, bias = x.float(), weight.float(), None if bias is None else bias.float()
    if x.dtype != weight.dtype:
        if multiplies_bfloat16():
            y = row_linear_ref(x.to(weight.dtype), weight)
            if bias is None and epilogue in GATES:  # moves half the bytes of float32
                return gated(y, GATES[epilogue]).to(x.dtype)
            y = y.to(x.dtype)
        else:  # without AVX-512 BF16, torch's bfloat16 product takes several times as long as a cast and a float32 one
            y = row_linear_ref(x, weight.to(x.dtype))
        if bias is not None:
            y += bias.unsqueeze(-2)
    elif x.dim() == 2:
        y = F.linear(x, weight, bias)
    else:
        by = weight.transpose(1, 2)
        y = torch.bmm(x, by) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, by)
    return gated(y, GATES[epilogue]) if epilogue in GATES else y


@cache
def multiplies_bfloat16() -> bool:
    """Whether torch may use this CPU's instructions for bfloat16 products: ATEN_CPU_CAPABILITY=avx2 forbids them."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.cpu._is_avx512_bf16_supported()


@takes(Arguments)
def row_linear_cost(args: Arguments) -> tuple[int, int]:
    """(bytes, flops) that any implementation needs: x, weight and bias read once, the result written."""
    x, weight, bias, epilogue, _ = args
    T, E = x.shape[-2:]
    G, O = math.prod(weight.shape[:-2]), weight.shape[-2]
    out = T * O // 2 if epilogue in GATES else T * O
    written = out * (x.element_size() if epilogue in ("none", *GATES) else sum_dtype(x.dtype).itemsize)
    read = T * E + (O if bias is not None else 0)
    return G * (read * x.element_size() + written) + weight.nbytes, 2 * G * T * O * E


def _compiled(x: Tensor, weight: Matrix, bias: Tensor | None, epilogue: str) -> Tensor | None:
    """The compiled CPU product for float32 rows and a large weight; None if it does not serve the arguments."""
    if x.dim() != 2 or not isinstance(weight, Tensor) or weight.dim() != 2 or weight.numel() < COMPILED_MIN:
        return None
    if x.dtype != torch.float32 or not eager(x):
        return None
    kernels = native()
    if kernels is None or not kernels.serves(x, weight):
        return None
    if epilogue not in ("none", *GATES) or (epilogue in GATES and len(weight) % 2):
        return None
    if bias is not None and (bias.dtype != x.dtype or bias.shape != weight.shape[:1] or not bias.is_cpu):
        return None
    if len(x) <= COMPILED_ROWS:
        y = kernels.product(x, weight, "bfloat16" if weight.dtype == torch.bfloat16 else "float32")
    elif weight.dtype == x.dtype and torch.backends.mkldnn.is_available():
        y = torch.ops.mkldnn._linear_pointwise(x.contiguous(), weight, None, "none", [], "")
    else:
        return None
    if bias is not None:
        y += bias
    return gated(y, GATES[epilogue]) if epilogue in GATES else y


def gated(y: Tensor, activation: str) -> Tensor:
    """[.., O] -> activation(first half) * second half, [.., O / 2]. Activations: silu, gelu, gelu_tanh; clamped_silu,
    which clamps both halves and adds 1 to the second one."""
    gate, up = y.chunk(2, dim=-1)
    if activation == "clamped_silu":
        gate = gate.clamp(max=LIMIT)
        return (gate * torch.sigmoid(ALPHA * gate)).mul_(up.clamp(-LIMIT, LIMIT).add_(1))
    if activation == "silu":
        return F.silu(gate).mul_(up)
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none").mul_(up)


@triton.jit
def gate_mul(gate, up, GATE: tl.constexpr):
    """act(gate) * up. GELU's tanh form, x (1 + tanh(c (x + d x^3))) / 2, is x sigmoid(2 c (x + d x^3))."""
    if GATE == "silu":
        z = gate
    elif GATE == "clamped_silu":  # a NaN stays one
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 8.0, tl.where(up < -7.0, -6.0, up + 1.0))
        z = 1.702 * gate
    else:
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return tl.div_rn(gate, 1.0 + tl.exp(-z)) * up


@triton.jit(do_not_specialize=["T"])
def _row_linear_kernel(
    x_ptr,  # [G, T, E]
    w_ptr,  # [G, O, E]; four bits: int16 [G, O, E / 4]
    scale_ptr,  # [G, O, E / GROUP], or None
    shift_ptr,  # [G, O, E / GROUP], or None
    bias_ptr,  # [G, O]
    y_ptr,  # [G, T, O], or [G, T, O / 2] with GATE; with PARTS the sums of the splits [SPLITS, G, T, O] float32
    T,
    G: tl.constexpr,
    O: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,  # rows of x per program
    N: tl.constexpr,  # rows of the weight per program; with GATE two make an output column
    BLOCK_E: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_E: tl.constexpr,  # a multiple of BLOCK_E
    PARTS: tl.constexpr,  # write the splits' sums; always true if SPLITS > 1
    GATE: tl.constexpr,  # "" or a value of GATES
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    LEFT: tl.constexpr,
    SM: tl.constexpr,
    PDL: tl.constexpr,
):
    tl.static_assert(SPLIT_E % BLOCK_E == 0 and SPLITS * SPLIT_E >= E and N * E < 2**31 and 1024 * E < 2**31)
    HALF: tl.constexpr = O // 2 if GATE != "" else 0
    COLUMNS: tl.constexpr = HALF if GATE != "" else O
    BLOCK: tl.constexpr = N // 2 if GATE != "" else N  # output columns per program
    PACK: tl.constexpr = 4 if w_ptr.dtype.element_ty == tl.int16 else 1
    ROW: tl.constexpr = E // PACK  # elements of a row of the weight
    o_m = tl.program_id(0) * M + tl.arange(0, M)  # programs of one weight tile are adjacent
    m_m = o_m < T
    i_n = tl.program_id(1) * BLOCK
    i_s = tl.program_id(2)
    i_row = i_n  # row index in all layers' weights
    if G > 1:
        TILES: tl.constexpr = (O + N - 1) // N
        i_g = tl.program_id(1) // TILES
        i_n = (tl.program_id(1) % TILES) * BLOCK
        i_row = i_g * O + i_n
        x_ptr += i_g.to(tl.int64) * T * E
        w_ptr += i_g.to(tl.int64) * (O * ROW)
        bias_ptr += i_g * O
        y_ptr += i_g.to(tl.int64) * T * (O if PARTS else COLUMNS)
    o_w, o_column = tile_rows(N, HALF)
    m_w = i_n + o_column < COLUMNS
    w_ptr += i_n.to(tl.int64) * ROW
    start = i_s * SPLIT_E if SPLITS > 1 else 0
    stop = tl.minimum(i_s * SPLIT_E + SPLIT_E, E) if SPLITS > 1 else E
    wait_for_previous(PDL)
    b_y = stream_rows(
        x_ptr,
        w_ptr,
        scale_ptr,
        shift_ptr,
        i_row,
        o_m,
        m_m,
        o_w,
        m_w,
        start,
        stop,
        E,
        M,
        N,
        BLOCK_E,
        E % BLOCK_E == 0,
        O % N == 0,
        KIND,
        GROUP,
        LEFT,
        SM,
    )
    let_next_start(PDL)
    if PARTS:
        p_y = y_ptr + (i_s.to(tl.int64) * G * T + o_m)[:, None] * O + i_n + o_w[None, :]
        tl.store(p_y, b_y, mask=m_m[:, None] & m_w[None, :])
    else:
        if BIAS:
            b_y += tl.load(bias_ptr + i_n + o_w, mask=m_w, other=0.0).to(tl.float32)[None, :]
        if GATE != "":
            b_gate, b_up = gate_and_up(b_y)
            b_y = gate_mul(b_gate, b_up, GATE)
        o_n = i_n + tl.arange(0, BLOCK)
        p_y = y_ptr + o_m[:, None].to(tl.int64) * COLUMNS + o_n[None, :]
        tl.store(p_y, b_y.to(y_ptr.dtype.element_ty), mask=m_m[:, None] & (o_n < COLUMNS)[None, :])


@triton.jit(do_not_specialize=["T"])
def _row_linear_merge_kernel(
    partial_ptr,  # [SPLITS, G, T, O] float32
    bias_ptr,  # [G, O]
    y_ptr,  # [G, T, O], or [G, T, O / 2] with GATE
    T,
    G: tl.constexpr,
    O: tl.constexpr,
    SPLITS: tl.constexpr,
    GATE: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_after_previous(PDL)
    COLUMNS: tl.constexpr = O // 2 if GATE != "" else O
    i_t = tl.program_id(0).to(tl.int64)  # row index among all G * T rows
    o_n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < COLUMNS
    if G > 1:
        bias_ptr += tl.program_id(0) // T * O
    b_y = tl.zeros([BLOCK], tl.float32)
    b_up = tl.zeros([BLOCK], tl.float32)
    for i_s in tl.static_range(SPLITS):
        p_partial = partial_ptr + (i_s * G * T.to(tl.int64) + i_t) * O
        b_y += tl.load(p_partial + o_n, mask=m_n, other=0.0)
        if GATE != "":
            b_up += tl.load(p_partial + COLUMNS + o_n, mask=m_n, other=0.0)
    if BIAS:
        b_y += tl.load(bias_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
    if GATE != "":
        if BIAS:
            b_up += tl.load(bias_ptr + COLUMNS + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_y = gate_mul(b_y, b_up, GATE)
    tl.store(y_ptr + i_t * COLUMNS + o_n, b_y.to(y_ptr.dtype.element_ty), mask=m_n)


@lru_cache(maxsize=256)
def _variants(product: Product, epilogue: str, bias: bool = False) -> tuple[Variant, Variant | None]:
    """The kernel, and the merge kernel if K is split and the caller does not want the splits themselves. `product`
    without split, which follows from the epilogue."""
    dtype, O, E, arch, G, _, _, form, few = product
    t, half, gate, parts = TYPES[dtype], dtype != torch.float32, GATES.get(epilogue, ""), epilogue == "split"
    m, n, block, stages, splits = tiles(product._replace(split=parts))
    out = t if epilogue in ("none", *GATES) else "fp32"
    name = f"{t} {E}->{O}" + f" x{G}" * (G > 1) + f" {epilogue}" * (epilogue != "none") + " bias" * bias
    name += ("" if form is None else f" {form}") + " few" * few
    smoke = dtype == torch.bfloat16 and (O, E, bias) in ((4096, 14336, False), (28672, 4096, False))
    smoke = smoke and (form is None or epilogue == "silu_mul")
    split = -(-E // (splits * block)) * block
    left = half and weight_left(n, arch, form)
    common = {"G": G, "O": O, "SPLITS": splits, "GATE": gate, "BIAS": bias}
    stream = Variant(
        name=name,
        kernel=_row_linear_kernel,
        arguments=(f"*{t}", *types_of(t, form), f"*{t}", "*fp32" if splits > 1 else f"*{out}", "i32"),
        constexprs={
            **common,
            "E": E,
            "M": m,
            "N": n,
            "BLOCK_E": block,
            "SPLIT_E": split,
            "PARTS": parts or splits > 1,
            **constexprs_of(form),
            "LEFT": left,
        },
        num_warps=4,
        num_stages=stages,
        dot=half,
        left=left and form is not None,
        wide=wide_rows(dtype, E, arch, form),
        smoke=smoke,
        options={"maxnreg": 255},  # by default ptxas limits some variants to 96 or 168 registers and spills
    )
    if parts or splits == 1:
        return stream, None
    return stream, merge_variant(name, (f"*{t}", f"*{out}"), common, smoke)


def merge_variant(name: str, types: tuple[str, str], sizes: dict[str, Any], smoke: bool, least: int = 1) -> Variant:
    """The kernel that adds up the splits of the variant `name`. `types` of bias and result; `sizes`: the constexprs but
    BLOCK; `least`: the fewest columns that are read 16 bytes at a time."""
    columns = sizes["O"] // 2 if sizes["GATE"] else sizes["O"]
    return Variant(
        name=name + " merge",
        kernel=_row_linear_merge_kernel,
        arguments=("*fp32", *types, "i32"),
        constexprs={**sizes, "BLOCK": min(triton.next_power_of_2(columns), 512)},
        num_warps=4 if columns > 256 else 1,
        wide=columns % 8 == 0 and columns >= least,
        smoke=smoke,
    )


def variants(arch: int) -> Iterator[Variant]:
    """The variants that the compile-only checks compile for sm_`arch`; the launcher takes any O and E."""
    bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
    for dtype, O, E, epilogue, bias in (
        (bf16, 4096, 4096, "none", False),
        (bf16, 4096, 4096, "split", False),
        (bf16, 6144, 4096, "none", True),
        (bf16, 28672, 4096, "none", False),
        (bf16, 28672, 4096, "silu_mul", False),
        (bf16, 20480, 2560, "gelu_tanh_mul", False),  # Gemma 3 4B
        (bf16, 128256, 4096, "float32", False),
        (bf16, 4096, 14336, "none", False),
        (bf16, 4096, 14336, "split", False),
        (bf16, 1024, 4096, "none", True),
        (bf16, 1024, 4096, "float32", False),
        (bf16, 9728, 896, "silu_mul", True),
        (bf16, 4097, 1023, "none", True),
        (bf16, 2 * 1025, 9001, "silu_mul", True),
        (torch.float16, 28672, 4096, "silu_mul", False),
        (torch.float32, 4096, 4096, "none", False),
        (torch.float32, 1024, 4096, "silu_mul", True),
    ):
        yield from (v for v in _variants(Product(dtype, O, E, arch), epilogue, bias) if v is not None)
    for G, O, E, epilogue, bias in (
        (4, 6144, 4096, "none", False),  # groups of an 8B and a 1B draft model
        (4, 4096, 4096, "none", False),
        (4, 3072, 2048, "none", False),
        (4, 2048, 2048, "none", False),
        (3, 1152, 896, "none", True),
        (2, 512, 4096, "silu_mul", True),
    ):
        yield from (v for v in _variants(Product(bf16, O, E, arch, G), epilogue, bias) if v is not None)
    for dtype, O, E, epilogue, form in (
        *((bf16, 4096, 4096, "none", form) for form in COMMON),
        (bf16, 28672, 4096, "silu_mul", Format("int8", 4096, f16, None)),
        (bf16, 28672, 4096, "silu_mul", Format("int4", 32, bf16, bf16)),
        (bf16, 20480, 2560, "gelu_tanh_mul", Format("int4", 32, bf16, bf16)),
        (bf16, 4096, 14336, "split", Format("int8", 14336, f16, None)),
        (bf16, 4096, 14336, "split", Format("fp8", 128, f32, None)),
        (bf16, 4096, 14336, "split", Format("int4", 128, bf16, bf16)),
        (bf16, 128256, 4096, "float32", Format("int8", 16, f16, None)),  # GGUF's Q6_K
        (bf16, 128256, 4096, "float32", Format("int4", 32, bf16, bf16)),
        (bf16, 2050, 1056, "silu_mul", Format("int4", 96, f16, f16)),
        (bf16, 4097, 1023, "none", Format("int8", 1023, f32, None)),
        (bf16, 4096, 4608, "silu_mul", Format("fp8", 48, f32, None)),  # tiles of 16 columns
        (f16, 28672, 4096, "silu_mul", Format("int4", 64, f16, None)),
        (f32, 4096, 4096, "none", Format("int4", 32, f16, f16)),
        (bf16, 28672, 4096, "silu_mul", MXFP4),
        (f16, 2050, 1056, "float32", MXFP4),
    ):
        yield from (v for v in _variants(Product(dtype, O, E, arch, form=form), epilogue) if v is not None)
    yield _variants(Product(bf16, 4096, 4096, arch, 4, form=COMMON[0]), "none", True)[0]
    if arch != 90:
        return
    int8, fp8, int4 = (Format("int8", 14336, f16, None), Format("fp8", 128, f32, None), COMMON[3])
    forms: tuple[Format | None, ...]
    for O, E, epilogue, forms in (
        (4096, 4096, "split", (None,)),
        (4096, 14336, "none", (None,)),
        (4096, 14336, "split", (None, int8, fp8, int4)),
        (28672, 4096, "silu_mul", (None, COMMON[0], COMMON[3], MXFP4)),
    ):
        for each in forms:
            product = Product(bf16, O, E, 90, form=each, few=True)
            yield from (v for v in _variants(product, epilogue) if v is not None)


@takes(Arguments)
def launch(args: Arguments) -> Tensor:
    x, weight, bias, epilogue, into = args
    x, (w, scale, shift) = x.contiguous(), arguments_of(weight)
    (T, E), O, on = x.shape[-2:], weight.shape[-2], arch(x.device)
    G, columns = math.prod(x.shape[:-2]), O // 2 if epilogue in GATES else O
    product = Product(x.dtype, O, E, on, G, sms(x.device), form=format_of(weight), few=few_rows(T, on))
    stream, merge = _variants(product, epilogue, bias is not None)
    sizes = stream.constexprs
    splits = sizes["SPLITS"]
    if epilogue == "split":
        y = x.new_empty(splits, *x.shape[:-1], O, dtype=torch.float32)
    else:
        y = x.new_empty(*x.shape[:-1], columns, dtype=torch.float32 if epilogue == "float32" else x.dtype)
    if into is not None:
        _check_out(into, y)
        y = into
    if y.numel() == 0:
        return y
    b = x if bias is None else bias.contiguous()  # x is a dummy, not read
    out = y if merge is None else x.new_empty((splits, G, T, O), dtype=torch.float32)
    stream((-(-T // sizes["M"]), G * -(-O // sizes["N"]), splits), x, w, scale, shift, b, out, T)
    if merge is not None:
        merge((G * T, -(-columns // merge.constexprs["BLOCK"])), out, b, y, T)
    return y


def _check(args: Arguments) -> None:
    x, weight, bias, epilogue, _ = args
    check_product(x, weight)
    if bias is not None and bias.shape != weight.shape[:-1]:
        raise ValueError(f"bias must be {list(weight.shape[:-1])}, got {tuple(bias.shape)}")
    if bias is not None and bias.dtype != x.dtype:
        raise ValueError(f"bias must be like x, {x.dtype}, got {bias.dtype}")
    if epilogue not in EPILOGUES:
        raise ValueError(f"epilogue must be one of {EPILOGUES}, got {epilogue!r}")
    if epilogue in GATES and weight.shape[-2] % 2:
        raise ValueError(f"{epilogue} needs an even number of weight rows, got {weight.shape[-2]}")
    if epilogue == "split" and not weight.numel():
        raise ValueError(f"split needs a weight with elements, got {list(weight.shape)}")
    if epilogue == "split" and bias is not None:
        raise ValueError("split has no bias: add it to the sum")
    same_device(x, bias=bias)


def _check_out(out: Tensor, y: Tensor) -> None:
    """Raise TypeError or ValueError unless the result y can be written to `out`."""
    if not isinstance(out, Tensor):
        raise TypeError(f"out must be Tensor | None, got {type(out).__name__}")
    if out.shape != y.shape or out.dtype != y.dtype or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {list(y.shape)} {y.dtype}, got {list(out.shape)} {out.dtype}")
    same_device(y, out=out)


def _fake(args: Arguments) -> Tensor:
    x, weight, _, epilogue, _ = args
    O = weight.shape[-2]
    if epilogue == "split":
        return x.new_empty(split_of(x, weight)[0], *x.shape[:-1], O, dtype=sum_dtype(x.dtype))
    if epilogue == "float32":
        return x.new_empty(*x.shape[:-1], O, dtype=sum_dtype(x.dtype))
    return x.new_empty(*x.shape[:-1], O // 2 if epilogue in GATES else O)


def _fits(args: Arguments) -> bool:
    weight = args.weight
    return args.x.shape[-2] <= MAX_ROWS and streams(weight) and weight.numel() > 0  # an empty one has no tiles


_row_linear = register(
    row_linear, Arguments, check=_check, reference=row_linear_ref, launch=launch, fake=_fake, fits=_fits
)
