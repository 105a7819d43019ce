"""expert_linear: a linear layer in which each row has experts of its own (a mixture of experts), for few rows.

A program multiplies one tile of an expert's weight with up to 64 of its rows. It finds its expert from the experts'
counts of rows, so the grid is as large as the worst routing needs, and programs without rows end at once. The products
are row_linear's, tiles and splits of K those of k layers side by side: the experts of one row. More rows have more
programs, of the same tiles. Weighted sums leave the kernel as one float32 term per choice and split, which a second
kernel, or the caller's `residual_merge`, adds up in order, without atomics.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from specker.kernels.prefetch import NONE, Prefetch, prefetch_of, prefetch_share
from specker.kernels.quant import Format, Matrix, Quantized, arguments_of, constexprs_of, format_of, streams, types_of
from specker.kernels.registry import register, takes
from specker.kernels.row_linear import GATES, gate_mul, merge_variant, row_linear
from specker.kernels.stream import gate_and_up, stream_rows, tile_rows
from specker.kernels.tiles import COMMON, MXFP4, Product, few_rows, like, split_of, tiles, weight_left, wide_rows
from specker.kernels.variant import (
    AMD,
    TYPES,
    Variant,
    arch,
    let_next_start,
    same_device,
    sms,
    sum_dtype,
    tl,
    triton,
    wait_for_previous,
)

EPILOGUES = ("none", *GATES, "sum", "split")
ROWS = 2048  # most rows that the kernel serves: with a prompt in such chunks its experts are read seldom


def expert_linear(
    x: Tensor,
    weight: Matrix,
    experts: Tensor,
    order: Tensor,
    starts: Tensor,
    epilogue: str = "none",
    scores: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    following: Matrix | None = None,
) -> Tensor:
    """A linear layer in which each row has k experts of X, such as `expert_route` chooses.

        y[t, j] = x[t, j] W_e^T + bias_e, e = experts[t, j]    "none"; x[t] in place of x[t, j] if x is [T, E]
        y[t]    = sum over j of scores[t, j] * y[t, j]         "sum"

    Memory moves the matrix of each chosen expert once for all its rows, and no other expert's. Sums run in float32
    (float64 for float64) and are rounded once, to the result. The kernel serves up to 2,048 rows, in tiles of 64 of one
    expert, and is batch-invariant: a row's bits depend on that row, its experts, their weights, k and the architecture
    alone. It reads nothing on the host. The reference serves float64, CPUs and more rows; it reads `starts` on the host
    and multiplies expert by expert with `row_linear`, whose limits on invariance and dtypes apply.

    Args:
        x: [T, E], each row for all its experts, or [T, k, E], a row for each choice.
        weight: [X, O, E] of x's dtype, or a `Quantized` matrix; on a CPU also bfloat16 beside float32.
        experts: [T, k] int32, a row's experts, all different.
        order: [T * k] int32, the choices t * k + j sorted by expert, then by t.
        starts: [X + 1] int32, where each expert's choices begin in `order`.
        epilogue: "none"; "silu_mul": each expert's first O / 2 rows are the gate Wg, the rest the up projection Wu, and
            the result is silu(x Wg^T) * (x Wu^T); "gelu_tanh_mul" and "clamped_silu_mul": the same with `row_linear`'s
            other gates; "sum": the weighted sum of a row's experts, added in the order of j; "split": its terms, which
            `residual_merge` adds up in order to the same bits.
        scores: [T, k] float32 (float64 for float64), for "sum" and "split" only.
        bias: [X, O] of x's dtype, or None.
        following: the matrices [X, .., ..] of the product that reads the result, of which SPECKER_PREFETCH prefetches
            the chosen experts' (kernels/prefetch.py).

    Returns:
        [T, k, O] for "none", [T, k, O / 2] with a gate, [T, O] for "sum", all in x's dtype; [S * k, T, O] float32
        (float64 for float64) for "split", where S, the number of splits of K, depends on (k, O, E, device) alone.

    Raises:
        TypeError: an argument of another type.
        ValueError: other shapes, dtypes or devices, an unknown epilogue, scores missing or without use; on a CPU also
            an order that is none, and starts that do not rise to the number of choices.

    Source: Mixtral, arXiv 2401.04088, section 2.1; experts of few rows: Megablocks, arXiv 2211.15841.

    Examples:
        >>> import torch
        >>> from specker.kernels import expert_linear, expert_route
        >>> experts, scores, *rows = expert_route(torch.tensor([[0.0, 9.0, 0.0]]), 1)
        >>> weight = torch.stack([n * torch.eye(2) for n in range(3)])
        >>> expert_linear(torch.tensor([[3.0, 4.0]]), weight + weight, experts, *rows, "sum", scores).tolist()
        [[6.0, 8.0]]
    """
    return _expert_linear(x, weight, experts, order, starts, epilogue, scores, bias, following)


class Arguments(NamedTuple):
    x: Tensor
    weight: Matrix
    experts: Tensor
    order: Tensor
    starts: Tensor
    epilogue: str = "none"
    scores: Tensor | None = None
    bias: Tensor | None = None
    following: Matrix | None = None


@takes(Arguments)
def expert_linear_ref(args: Arguments) -> Tensor:
    x, weight, experts, order, starts, epilogue, scores, bias, _ = args
    (T, k), O, E = experts.shape, *weight.shape[1:]
    if x.is_cpu:
        _check_choices(order, starts)
    S, size = _split_of(x, weight, k) if epilogue == "split" else (1, E)
    how = epilogue if scores is None else "float32"
    dtype = x.dtype if scores is None else sum_dtype(x.dtype)
    y = x.new_empty(S, T * k, O // 2 if epilogue in GATES else O, dtype=dtype)
    rows = x if x.dim() == 2 else x.flatten(0, 1)
    for e, (start, stop) in enumerate(pairwise(starts.tolist())):
        if start == stop:
            continue
        choices = order[start:stop].long()
        some, matrix = rows[choices // k if x.dim() == 2 else choices], weight[e]
        if S > 1 and isinstance(matrix, Quantized):
            some, matrix = some.to(dtype), matrix.widened(x.dtype, dtype)
        for s in range(S):
            columns = slice(s * size, (s + 1) * size)
            whole = S == 1
            y[s, choices] = row_linear(
                some if whole else some[:, columns],
                matrix if whole else matrix[:, columns],
                None if bias is None or s else bias[e],
                how,
            )
    if scores is None:
        return y.view(T, k, y.shape[-1])
    terms = (y.view(S, T, k, O) * scores.unsqueeze(-1)).permute(2, 0, 1, 3).flatten(0, 1)
    if epilogue == "split":
        return terms.contiguous()
    total = torch.zeros_like(terms[0])
    for term in terms:
        total = total + term
    return total.to(x.dtype)


def _check_choices(order: Tensor, starts: Tensor) -> None:
    """Raise ValueError unless `order` holds every choice once, and `starts` rise from 0 to their number. Reads them on
    the host."""
    ends, count = starts.tolist(), len(order)
    if ends[0] != 0 or ends[-1] != count or ends != sorted(ends):
        raise ValueError(f"starts must rise from 0 to the {count} choices, got {ends}")
    if sorted(order.tolist()) != list(range(count)):
        raise ValueError(f"order must hold each of the choices 0..{count - 1} once, got {order.tolist()}")


@takes(Arguments)
def expert_linear_cost(args: Arguments) -> tuple[int, int]:
    """(bytes, flops) that any implementation needs: x, the chosen experts' matrices and biases and the routing read
    once, the result written."""
    x, weight, experts, order, starts, epilogue, scores, bias, _ = args
    (T, k), (X, O, E) = experts.shape, weight.shape
    out = {"sum": T * O, **dict.fromkeys(GATES, T * k * O // 2)}.get(epilogue, T * k * O)
    written = out * (sum_dtype(x.dtype) if epilogue == "split" else x.dtype).itemsize
    routing = order.nbytes + starts.nbytes + (0 if scores is None else scores.nbytes)
    read = len(experts.unique()) * ((weight.nbytes + (0 if bias is None else bias.nbytes)) // X)
    return x.nbytes + read + routing + written, 2 * T * k * O * E


def _split_of(x: Tensor, weight: Matrix, k: int) -> tuple[int, int]:
    """The number of K's splits on x's device, and the columns of each but the last: those of k layers side by side."""
    return split_of(x, weight[:k])


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["order_ptr", "starts_ptr", "scores_ptr"])
def _expert_linear_kernel(
    x_ptr,  # [T, E], or [T, K, E] with EACH
    w_ptr,  # [X, O, E]; four bits: int16 [X, O, E / 4]
    scale_ptr,  # [X, O, E / GROUP], or None
    shift_ptr,  # [X, O, E / GROUP], or None
    order_ptr,  # [T * K]
    starts_ptr,  # [X + 1]
    scores_ptr,  # [T, K]; not read unless WEIGHTED
    bias_ptr,  # [X, O], or None
    following_ptr,  # what PREFETCH describes, for each expert, or None
    y_ptr,  # [T, K, O], or [T, K, O / 2] with GATE; with PARTS float32 [SPLITS, T, K, O], WEIGHTED [K, SPLITS, T, O]
    T,
    X: tl.constexpr,
    K: tl.constexpr,
    O: tl.constexpr,
    E: tl.constexpr,
    X_PAD: tl.constexpr,  # a power of two
    M: tl.constexpr,  # rows of x per program
    N: tl.constexpr,  # rows of the weight per program; with GATE two make an output column
    BLOCK_E: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_E: tl.constexpr,  # a multiple of BLOCK_E
    PARTS: tl.constexpr,  # write the splits' sums; always true if SPLITS > 1
    GATE: tl.constexpr,  # "" or a value of GATES
    EACH: tl.constexpr,
    WEIGHTED: tl.constexpr,  # write the terms of the weighted sums; only with PARTS
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    LEFT: tl.constexpr,
    PREFETCH: tl.constexpr,
    SM: tl.constexpr,
    PDL: tl.constexpr,
):
    tl.static_assert(SPLIT_E % BLOCK_E == 0 and SPLITS * SPLIT_E >= E and N * E < 2**31 and 2048 * K * E < 2**31)
    wait_for_previous(PDL)
    HALF: tl.constexpr = O // 2 if GATE != "" else 0
    COLUMNS: tl.constexpr = HALF if GATE != "" else O
    BLOCK: tl.constexpr = N // 2 if GATE != "" else N  # output columns per program
    ROW: tl.constexpr = E // 4 if w_ptr.dtype.element_ty == tl.int16 else E  # elements of a row of the weight
    i_tile = tl.program_id(0)  # tiles of rows, expert by expert: programs of one weight tile are adjacent
    o_x = tl.arange(0, X_PAD)
    m_x = o_x < X
    b_count = tl.load(starts_ptr + 1 + o_x, mask=m_x, other=0) - tl.load(starts_ptr + o_x, mask=m_x, other=0)
    b_ends = tl.cumsum((b_count + (M - 1)) // M, axis=0)
    i_x = tl.sum((b_ends <= i_tile).to(tl.int32), axis=0)
    if i_x >= X:  # no tile is left
        return
    i_own = i_tile - tl.max(tl.where(b_ends <= i_tile, b_ends, 0), axis=0)  # the tile's number among its expert's
    if PREFETCH[0]:  # noqa: SIM102 - a constant condition: without programs following_ptr is None
        if i_own == 0:
            p = following_ptr + i_x.to(tl.int64) * (PREFETCH[1] * PREFETCH[2])
            i_program = tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)
            prefetch_share(p, i_program, PREFETCH, tl.sum((b_count > 0).to(tl.int32), axis=0))
    first = tl.load(starts_ptr + i_x) + i_own * M
    stop = tl.load(starts_ptr + i_x + 1)
    o_place = first + tl.arange(0, M)
    m_m = o_place < stop
    o_choice = tl.load(order_ptr + o_place, mask=m_m, other=0)
    o_t = o_choice // K
    i_n = tl.program_id(1) * BLOCK
    i_s = tl.program_id(2)
    o_w, o_column = tile_rows(N, HALF)
    m_w = i_n + o_column < COLUMNS
    i_row = i_x * O + i_n  # row index in all experts' weights
    b_y = stream_rows(
        x_ptr,
        w_ptr + i_row.to(tl.int64) * ROW,
        scale_ptr,
        shift_ptr,
        i_row,
        o_choice if EACH else o_t,
        m_m,
        o_w,
        m_w,
        i_s * SPLIT_E if SPLITS > 1 else 0,
        tl.minimum(i_s * SPLIT_E + SPLIT_E, E) if SPLITS > 1 else E,
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
    # The rows again, in another form, or the compiler would keep them: a thread may write a column of all 64 rows, and
    # the loop needs the registers.
    m_m = tl.arange(0, M) < stop - first
    o_choice = tl.load(order_ptr + first + tl.arange(0, M), mask=m_m, other=0)
    if bias_ptr is not None:  # the first split adds it
        p_bias, m_bias = bias_ptr + i_x * O + i_n + o_w, m_w & (i_s == 0)
        b_y += tl.load(p_bias, mask=m_bias, other=0.0).to(tl.float32)[None, :]
    if PARTS:
        if WEIGHTED:
            o_t = o_choice // K
            o_y = ((o_choice % K) * SPLITS + i_s).to(tl.int64) * T + o_t
            b_y *= tl.load(scores_ptr + o_choice, mask=m_m, other=0.0)[:, None]
        else:
            o_y = i_s.to(tl.int64) * T * K + o_choice
        p_y = y_ptr + o_y[:, None] * O + i_n + o_w[None, :]
        tl.store(p_y, b_y, mask=m_m[:, None] & m_w[None, :])
    else:
        if GATE != "":
            b_gate, b_up = gate_and_up(b_y)
            b_y = gate_mul(b_gate, b_up, GATE)
        o_n = i_n + tl.arange(0, BLOCK)
        p_y = y_ptr + o_choice.to(tl.int64)[:, None] * COLUMNS + o_n[None, :]
        tl.store(p_y, b_y.to(y_ptr.dtype.element_ty), mask=m_m[:, None] & (o_n < COLUMNS)[None, :])


@lru_cache(maxsize=256)
def _variants(
    product: Product, X: int, k: int, epilogue: str, each: bool, bias: bool = False, prefetch: Prefetch = NONE
) -> tuple[Variant, Variant | None]:
    """The kernel, and the merge kernel if K is split or for "sum". `product` without G and split, which follow from
    the rest.

    The tiles are `row_linear`'s (`tiles`, which gives the reasons) for k layers side by side, with
    splits of K that cost no launch for "sum" and "split". With one row, k experts are read:
    * Qwen3-30B-A3B, 8 of 128 experts: 2048 -> 1536 is 192 tiles of 64 rows, 768 -> 2048 256 of them, for 132 SMs.
    * Mixtral, 2 of 8: 4096 -> 28672 is 448 tiles, 14336 -> 4096 64 times two splits.
    With more rows the programs are more of the same. A tile of 64 rows is mostly empty: at 8 rows of 8 choices of 128
    experts, 51 experts have a row or two. Its empty rows are zeros that are written to shared memory and multiplied
    there, but not read. Nothing is prefetched before the wait, since the expert is not known then.
    """
    dtype, O, E, arch, _, _, _, form, few = product
    weighted, gate = epilogue in ("sum", "split"), GATES.get(epilogue, "")
    m, n, block, stages, splits = tiles(product._replace(G=min(k, X), split=weighted))
    t, half = TYPES[dtype], dtype != torch.float32
    left = half and weight_left(n, arch, form)
    # In a weighted sum on AMD, or of int4 on sm_100, where each thread weights a column of all rows, and in float32's
    # small tiles, the indices of rows are too large a part of what is read.
    indices = weighted and (arch in AMD or (left and arch == 100))
    wide = half and wide_rows(dtype, E, arch, form) and not indices
    parts = weighted or splits > 1
    name = f"{t} X{X} k{k} {E}->{O}" + " each" * each + f" {epilogue}" * (epilogue != "none")
    name += " bias" * bias + ("" if form is None else f" {form}") + " few" * few
    if prefetch.programs:  # those of an expert
        name += f" prefetch {prefetch.rows}x{prefetch.lines}"
        prefetch = prefetch._replace(programs=-(-O // n) * splits)
    smoke = dtype == torch.bfloat16 and (X, k, form) == (128, 8, None) and epilogue in ("silu_mul", "split")
    stream = Variant(
        name=name,
        kernel=_expert_linear_kernel,
        arguments=(
            f"*{t}",
            *types_of(t, form),
            "*i32",
            "*i32",
            "*fp32" if weighted else "*i32",  # without scores the launcher passes `order`
            f"*{t}" if bias else None,
            "*u8" if prefetch.programs else None,
            "*fp32" if parts else f"*{t}",
            "i32",
        ),
        constexprs={
            "X": X,
            "K": k,
            "O": O,
            "E": E,
            "X_PAD": triton.next_power_of_2(X),
            "M": m,
            "N": n,
            "BLOCK_E": block,
            "SPLITS": splits,
            "SPLIT_E": -(-E // (splits * block)) * block,
            "PARTS": parts,
            "GATE": gate,
            "EACH": each,
            "WEIGHTED": weighted,
            **constexprs_of(form),
            "LEFT": left,
            "PREFETCH": prefetch,
        },
        num_warps=4,
        num_stages=stages,
        dot=half,
        left=left and form is not None,
        wide=wide,
        smoke=smoke,
        # See row_linear.py. On sm_80 the default limits suffice, and with 255 ptxas of Triton 3.7 spills 8 bytes.
        options={} if arch == 80 else {"maxnreg": 255},
    )
    if epilogue == "split" or not parts:
        return stream, None
    sizes = {"G": 1, "O": O, "SPLITS": splits * k if weighted else splits, "GATE": gate, "BIAS": False}
    return stream, merge_variant(name, (f"*{t}", f"*{t}"), sizes, smoke=False, least=128)


def variants(arch: int) -> Iterator[Variant]:
    """The variants that the compile-only checks compile for sm_`arch`; the launcher takes any sizes."""
    bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
    qwen, mixtral = (128, 8, 1536, 2048), (8, 2, 28672, 4096)
    qwen_down, mixtral_down = (128, 8, 2048, 768), (8, 2, 4096, 14336)
    for dtype, (X, k, O, E), epilogue, each, form in (
        (bf16, qwen, "silu_mul", False, None),
        (bf16, qwen_down, "split", True, None),
        (bf16, qwen_down, "sum", True, None),
        (bf16, mixtral, "silu_mul", False, None),
        (bf16, mixtral_down, "split", True, None),
        (bf16, qwen, "none", False, None),
        (bf16, (4, 2, 128, 4096), "silu_mul", False, None),  # K in several splits, and a merge
        (bf16, (60, 4, 1023, 1023), "none", True, None),
        (f16, qwen, "silu_mul", False, None),
        (f32, qwen, "silu_mul", False, None),
        (f32, qwen_down, "sum", True, None),
        *((bf16, qwen, "silu_mul", False, form) for form in (COMMON[0], COMMON[1], COMMON[3])),
        *((bf16, mixtral_down, "split", True, form) for form in (COMMON[2], COMMON[3])),
        (bf16, qwen_down, "split", True, Format("int8", 768, f16, None)),
        (bf16, qwen_down, "split", True, Format("fp8", 128, f32, None)),
        (bf16, qwen_down, "split", True, COMMON[3]),
        (f16, mixtral, "silu_mul", False, Format("int4", 64, f16, None)),
        (f32, qwen_down, "split", True, COMMON[3]),
        (bf16, qwen, "silu_mul", False, MXFP4),
    ):
        if form is not None and form.group == 4096:  # a scale per row
            form = form._replace(group=E)
        product = Product(dtype, O, E, arch, form=form)
        yield from (v for v in _variants(product, X, k, epilogue, each) if v is not None)
    for form in (None, COMMON[3], MXFP4):  # gpt-oss-20b
        for O, epilogue, each in ((5760, "clamped_silu_mul", False), (2880, "split", True)):
            product = Product(bf16, O, 2880, arch, form=form)
            yield from (v for v in _variants(product, 32, 4, epilogue, each, bias=True) if v is not None)
    if arch == 90:
        for (X, k, O, E), epilogue, each, form in (
            (qwen, "silu_mul", False, None),
            (qwen_down, "split", True, None),
            (mixtral_down, "sum", True, None),
            (qwen, "silu_mul", False, COMMON[3]),
            (qwen_down, "split", True, Format("int8", 768, f16, None)),
            ((32, 4, 5760, 2880), "clamped_silu_mul", False, MXFP4),
        ):
            product = Product(bf16, O, E, 90, form=form, few=True)
            yield from (v for v in _variants(product, X, k, epilogue, each) if v is not None)
        product = Product(bf16, 1536, 2048, 90, few=True)
        yield _variants(product, 128, 8, "silu_mul", False, prefetch=Prefetch(132, 2048, 1536, 128))[0]


@takes(Arguments)
def launch(args: Arguments) -> Tensor:
    x, weight, experts, order, starts, epilogue, scores, bias, following = args
    (T, k), (X, O, E), on = experts.shape, weight.shape, arch(x.device)
    few = few_rows(T * k // X, on)  # rows of an expert
    product = Product(x.dtype, O, E, on, sms=sms(x.device), form=format_of(weight), few=few)
    w, prefetch = prefetch_of(following, experts=True)
    stream, merge = _variants(product, X, k, epilogue, x.dim() == 3, bias is not None, prefetch)
    sizes = stream.constexprs
    M, splits, columns = sizes["M"], sizes["SPLITS"], O // 2 if epilogue in GATES else O
    if epilogue == "split":
        y = x.new_empty(splits * k, T, O, dtype=torch.float32)
    else:
        y = x.new_empty(*(T,) if epilogue == "sum" else (T, k), columns)
    if not T:
        return y
    rows = y.numel() // columns
    out = y if merge is None else x.new_empty(merge.constexprs["SPLITS"], rows, O, dtype=torch.float32)
    busy = min(X, T * k)  # the most experts that have rows; each may leave its last tile almost empty
    grid = (T * k + busy * (M - 1)) // M, -(-O // sizes["N"]), splits
    order = order.contiguous()
    own = order if scores is None else scores.contiguous()  # `order` is a dummy, not read
    bias = None if bias is None else bias.contiguous()
    stream(grid, x.contiguous(), *arguments_of(weight), order, starts.contiguous(), own, bias, w, out, T)
    if merge is not None:
        merge((rows, -(-columns // merge.constexprs["BLOCK"])), out, x, y, rows)
    return y


def _check(args: Arguments) -> None:
    x, weight, experts, order, starts, epilogue, scores, bias, following = args
    if (
        experts.dim() != 2
        or weight.dim() != 3
        or x.shape
        not in (
            (len(experts), weight.shape[-1]),
            (*experts.shape, weight.shape[-1]),
        )
    ):
        raise ValueError(
            "expected x [T, E] or [T, k, E], weight [X, O, E], experts [T, k]: "
            f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, experts {tuple(experts.shape)}"
        )
    if not like(x, weight):
        raise ValueError(f"weight must be like x: x {x.dtype} {x.device}, weight {weight.dtype} {weight.device}")
    if not experts.shape[1] or not weight.numel():
        raise ValueError(f"expected experts and weights: experts {list(experts.shape)}, weight {list(weight.shape)}")
    for name, given, shape in (
        ("experts", experts, experts.shape),
        ("order", order, (experts.numel(),)),
        ("starts", starts, (len(weight) + 1,)),
    ):
        if given.shape != shape or given.dtype != torch.int32:
            raise ValueError(f"{name} must be {list(shape)} int32, got {list(given.shape)} {given.dtype}")
    if epilogue not in EPILOGUES:
        raise ValueError(f"epilogue must be one of {EPILOGUES}, got {epilogue!r}")
    if epilogue in GATES and weight.shape[1] % 2:
        raise ValueError(f"{epilogue} needs an even number of weight rows, got {weight.shape[1]}")
    if (scores is None) == (epilogue in ("sum", "split")):
        raise ValueError(
            f"scores belong to sum and split, got {epilogue!r} {'without' if scores is None else 'with'} them"
        )
    if scores is not None and (scores.shape != experts.shape or scores.dtype != sum_dtype(x.dtype)):
        raise ValueError(
            f"scores must be {list(experts.shape)} {sum_dtype(x.dtype)}, got {list(scores.shape)} {scores.dtype}"
        )
    if bias is not None and (bias.shape != weight.shape[:2] or bias.dtype != x.dtype):
        raise ValueError(f"bias must be {list(weight.shape[:2])} {x.dtype}, got {list(bias.shape)} {bias.dtype}")
    if following is not None and (following.dim() != 3 or len(following) != len(weight)):
        raise ValueError(f"following must be [{len(weight)}, .., ..], got {[*following.shape]}")
    same_device(x, experts=experts, order=order, starts=starts, scores=scores, bias=bias)


def _fake(args: Arguments) -> Tensor:
    x, epilogue, (T, k), O = args.x, args.epilogue, args.experts.shape, args.weight.shape[1]
    if epilogue == "split":
        return x.new_empty(_split_of(x, args.weight, k)[0] * k, T, O, dtype=sum_dtype(x.dtype))
    if epilogue == "sum":
        return x.new_empty(T, O)
    return x.new_empty(T, k, O // 2 if epilogue in GATES else O)


def _fits(args: Arguments) -> bool:
    return len(args.x) <= ROWS and streams(args.weight)


_expert_linear = register(
    expert_linear, Arguments, check=_check, reference=expert_linear_ref, launch=launch, fake=_fake, fits=_fits
)
