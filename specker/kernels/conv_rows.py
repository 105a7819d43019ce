"""conv_rows: the short causal convolution before a recurrent layer, for draft rows, each along its own path.

A program computes some channels of a tile of one sequence's rows. It reads columns of the pass itself where they came
from, since other programs write the cache, and earlier ones from the cache, K - 1 for each row. So the cache may be a
ring that holds K - 1 columns more than a pass has rows.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specker.kernels.ancestors import check_sequences, check_words, parent_of
from specker.kernels.delta_rows import bits_of
from specker.kernels.registry import register, takes
from specker.kernels.variant import (
    TYPES,
    Kinds,
    Variant,
    check_dims,
    check_kinds,
    check_within,
    rowwise,
    same_device,
    start_after_previous,
    tl,
    triton,
)

ACTIVATIONS = "none", "silu"
KERNELS = range(2, 9)  # sizes of the convolution
ROWS = 8  # of a tile


def conv_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inputs: Tensor,
    slots: Tensor,
    block_table: Tensor,
    kv_len: Tensor,
    window: Tensor,
    cu_rows: Tensor,
    ancestors: Tensor | None,
    activation: str = "silu",
    before: Tensor | None = None,
    after: Tensor | None = None,
) -> Tensor:
    """The causal depthwise convolution of draft rows, prompts and decoding: each row along its own path.

        r_t = x_t * before_t,  y_t = activation(bias + sum_i weight[:, K - 1 - i] * r_(i-th ancestor of t)) * after_t

    with row t itself as its ancestor 0, and 0 for ancestors before the text. The op writes each row's r at its slot, as
    attention's K and V are written; a refused draft is a column that is overwritten.

    Products are added in float32, the row's own first. A row's bits depend on its path alone. Memory moves x, r and y
    once, and K - 1 earlier columns of each sequence.

    Args:
        x: [T, C], the rows of all sequences, one sequence after another; channels adjacent, rows at any stride.
        weight: [C, K], of float32 at least; K from 2 to 8.
        bias: [C] or None, as weight.
        inputs: [pages, page_size, C] of x's dtype: r of each column.
        slots: [T] int64, where r of the row is written, as an index into the flattened pages.
        block_table: [B, P] int32, page ids. They may repeat, as a ring of at least K - 1 columns and a pass's rows.
        kv_len: [B] int32, columns of each sequence, the window included. The rows are its last ones, in order.
        window: [B] int32, columns of the window.
        cu_rows: [B + 1] int32; sequence b owns rows cu_rows[b] to cu_rows[b + 1].
        ancestors: [T, W] int64, W <= 4; see `ancestor_words`. None: the rows of a sequence are a chain after all
            columns before them.
        activation: "silu" or "none".
        before: [T, C] or None, strided like x; r is rounded to x's dtype.
        after: as before.

    Returns:
        [T, C], of x's dtype.

    Raises:
        TypeError: an argument of another type.
        ValueError: other shapes, dtypes or devices, or another activation; on a CPU also slots, pages, rows and columns
            outside of the cache.

    Source: the convolution before Mamba's state, arXiv 2312.00752, section 3.4; with two gates, LFM2's.

    Examples:
        >>> import torch
        >>> from specker.kernels import conv_rows
        >>> x, weight = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[10.0, 1.0]])
        >>> ints = [torch.tensor(x, dtype=torch.int32) for x in ([[0]], [3], [3], [0, 3])]
        >>> tree = torch.tensor([[0b001], [0b011], [0b101]])  # rows 1 and 2 follow row 0
        >>> conv_rows(x, weight, None, torch.zeros(1, 8, 1), torch.arange(3), *ints, tree, "none").flatten().tolist()
        [1.0, 12.0, 13.0]
    """
    return _conv_rows(
        x, weight, bias, inputs, slots, block_table, kv_len, window, cu_rows, ancestors, activation, before, after
    )


class Arguments(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    inputs: Tensor
    slots: Tensor
    block_table: Tensor
    kv_len: Tensor
    window: Tensor
    cu_rows: Tensor
    ancestors: Tensor | None
    activation: str = "silu"
    before: Tensor | None = None
    after: Tensor | None = None


@takes(Arguments)
def conv_rows_ref(args: Arguments) -> Tensor:
    x, weight, inputs, slots, ancestors = args.x, args.weight, args.inputs, args.slots, args.ancestors
    block_table, kv_len, window, cu_rows = args.block_table, args.kv_len, args.window, args.cu_rows
    (T, C), K, page = x.shape, weight.shape[1], inputs.shape[1]
    if x.is_cpu:
        check_within("slots", slots, len(inputs) * page)
        check_sequences(T, len(inputs), page, args)
    raw, flat = x if args.before is None else x * args.before, inputs.flatten(0, 1)
    taken = raw.new_empty(T, K, C)
    offsets = torch.arange(page, dtype=torch.int64, device=x.device)
    for n in range(len(kv_len)):
        first, last, length = int(cu_rows[n]), int(cu_rows[n + 1]), int(kv_len[n])
        start = length - (last - first)
        column = (block_table[n].long()[:, None] * page + offsets).flatten()
        own = torch.arange(start, length, dtype=torch.int64, device=x.device)[:, None]
        path = own - torch.arange(K, dtype=torch.int64, device=x.device)
        if ancestors is not None:
            low = max(0, length - int(window[n]) - K)
            every = torch.arange(low, length, dtype=torch.int64, device=x.device)
            seen = every <= own
            seen[:, length - int(window[n]) - low :] &= bits_of(ancestors[first:last], int(window[n]))
            path = F.pad(every.where(seen, -1), (K, 0), value=-1).topk(K).values
        now = (path >= start)[..., None]
        each = raw[(first + path - start).clamp_(min=0)].where(now, flat[column[path.clamp(min=0)]])
        taken[first:last] = each.where((path >= 0)[..., None], 0)
    y = torch.zeros(T, C, dtype=weight.dtype, device=x.device)
    for i in range(K):
        y = y + weight[:, K - 1 - i] * taken[:, i]
    y = y if args.bias is None else y + args.bias
    y = F.silu(y) if args.activation == "silu" else y
    flat[slots] = raw
    return (y if args.after is None else y * args.after).to(x.dtype)


@triton.jit(
    do_not_specialize=["x_stride", "before_stride", "after_stride", "table_stride"],
    do_not_specialize_on_alignment=["slots_ptr", "table_ptr", "kv_len_ptr", "window_ptr", "cu_rows_ptr", "words_ptr"],
)
def _conv_rows_kernel(
    x_ptr,  # [T, C]
    weight_ptr,  # [C, K] fp32
    bias_ptr,  # [C] fp32
    inputs_ptr,  # [pages, PAGE, C]
    slots_ptr,  # [T]
    table_ptr,  # [B, P] int32
    kv_len_ptr,  # [B] int32
    window_ptr,  # [B] int32
    cu_rows_ptr,  # [B + 1] int32
    words_ptr,  # [T, W]
    before_ptr,  # [T, C]
    after_ptr,  # [T, C]
    out_ptr,  # [T, C]
    x_stride,
    before_stride,
    after_stride,
    table_stride,
    C: tl.constexpr,
    K: tl.constexpr,
    PAGE: tl.constexpr,
    W: tl.constexpr,  # words of a row; 0: rows are chains
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    UNIT: tl.constexpr,  # of strides, so that the compiler knows that they are multiples of it
    ROWS: tl.constexpr,
    BC: tl.constexpr,
    PDL: tl.constexpr,
):
    x_stride, before_stride, after_stride = x_stride * UNIT, before_stride * UNIT, after_stride * UNIT
    start_after_previous(PDL)
    i_c, i_b = tl.program_id(0), tl.program_id(1)
    first = tl.load(cu_rows_ptr + i_b)
    last = tl.load(cu_rows_ptr + i_b + 1)
    columns = tl.load(kv_len_ptr + i_b)
    before = columns - tl.load(window_ptr + i_b)
    start = columns - (last - first)
    p_table = table_ptr + i_b.to(tl.int64) * table_stride
    o_c = i_c * BC + tl.arange(0, BC)
    m_c = o_c < C
    o_r = tl.arange(0, ROWS)
    # disable_licm: the loop mostly runs once, and addresses that the compiler hoists take up to 16 registers.
    for r in tl.range(first + tl.program_id(2) * ROWS, last, tl.num_programs(2) * ROWS, disable_licm=True):
        o_t = (r + o_r).to(tl.int64)
        m_r = r + o_r < last
        o_j = start + (r - first) + o_r  # the ancestor's column
        b_y = tl.zeros([ROWS, BC], tl.float32)
        for i in tl.static_range(K):
            now = m_r & (o_j >= start)
            m_now = now[:, None] & m_c[None, :]
            o_x = (first + o_j - start).to(tl.int64)
            b_r = tl.load(x_ptr + o_x[:, None] * x_stride + o_c[None, :], mask=m_now, other=0.0)
            if BEFORE:
                b_b = tl.load(before_ptr + o_x[:, None] * before_stride + o_c[None, :], mask=m_now, other=0.0)
                b_r = (b_r.to(tl.float32) * b_b.to(tl.float32)).to(b_r.dtype)
            if i == 0:
                b_slot = tl.load(slots_ptr + o_t, mask=m_r, other=0)
                tl.store(inputs_ptr + b_slot[:, None] * C + o_c[None, :], b_r, mask=m_now)
            else:
                old = m_r & (o_j >= 0) & (o_j < start)
                b_row = tl.load(p_table + o_j // PAGE, mask=old, other=0).to(tl.int64) * PAGE + o_j % PAGE
                p_old = inputs_ptr + b_row[:, None] * C + o_c[None, :]
                b_r = tl.where(now[:, None], b_r, tl.load(p_old, mask=old[:, None] & m_c[None, :], other=0.0))
            b_w = tl.load(weight_ptr + o_c * K + (K - 1 - i), mask=m_c, other=0.0)
            b_y += b_w[None, :] * b_r.to(tl.float32)
            if W > 0:
                b_w_j = o_j - before  # in the window
                o_j = before + tl.where(b_w_j >= 0, parent_of(words_ptr, o_t, m_r, b_w_j, W), b_w_j - 1)
            else:
                o_j -= 1
        if BIAS:
            b_y += tl.load(bias_ptr + o_c, mask=m_c, other=0.0)[None, :]
        if SILU:
            b_y = b_y / (1 + tl.exp(-b_y))
        m_o = m_r[:, None] & m_c[None, :]
        if AFTER:
            b_y *= tl.load(after_ptr + o_t[:, None] * after_stride + o_c[None, :], mask=m_o, other=0.0).to(tl.float32)
        tl.store(out_ptr + o_t[:, None] * C + o_c[None, :], b_y.to(out_ptr.dtype.element_ty), mask=m_o)


class Shape(NamedTuple):
    dtype: torch.dtype
    C: int
    K: int
    page: int
    words: int  # of a row's ancestors; 0: rows are chains
    bias: bool = False
    silu: bool = False
    before: bool = False
    after: bool = False
    unit: int = 16  # of strides


@lru_cache
def _variant(shape: Shape) -> Variant:
    t, words = TYPES[shape.dtype], f"W{shape.words}" if shape.words else "chains"
    steps = "".join(f" {step}" for step in ("bias", "silu", "before", "after") if getattr(shape, step))
    return Variant(
        name=f"{t} C{shape.C} K{shape.K} page {shape.page} {words}{steps}{' unaligned' * (shape.unit == 1)}",
        kernel=_conv_rows_kernel,
        arguments=(
            *(f"*{t}", "*fp32", "*fp32", f"*{t}", "*i64", "*i32", "*i32", "*i32", "*i32", "*i64"),
            *(f"*{t}",) * 3,
            *("i32",) * 4,
        ),
        constexprs={
            "C": shape.C,
            "K": shape.K,
            "PAGE": shape.page,
            "W": shape.words,
            "BIAS": shape.bias,
            "SILU": shape.silu,
            "BEFORE": shape.before,
            "AFTER": shape.after,
            "UNIT": shape.unit,
            "ROWS": ROWS,
            "BC": 64,
        },
        num_warps=4,
        wide=False,
        smoke=shape.dtype == torch.bfloat16 and shape.words == 1 and shape.silu,
    )


def variants(arch: int) -> Iterator[Variant]:
    """The variants that the compile-only checks compile for sm_`arch`."""
    for words in (0, 1, 2):
        yield _variant(Shape(torch.bfloat16, 8192, 4, 64, words, silu=True))
        yield _variant(Shape(torch.bfloat16, 2048, 3, 64, words, before=True, after=True))
    yield _variant(Shape(torch.float16, 6144, 4, 64, 1, bias=True, silu=True))
    yield _variant(Shape(torch.bfloat16, 8192, 4, 64, 1, silu=True, unit=1))


@takes(Arguments)
def launch(args: Arguments) -> Tensor:
    x, weight, bias, before, after = args.x, args.weight, args.bias, args.before, args.after
    slots, block_table, ancestors = args.slots.contiguous(), rowwise(args.block_table), args.ancestors
    (T, C), B = x.shape, len(args.kv_len)
    out = x.new_empty(T, C)
    strides = [0 if rows is None else rows.stride(0) for rows in (x, before, after)]
    shape = Shape(
        x.dtype,
        C,
        weight.shape[1],
        args.inputs.shape[1],
        words=0 if ancestors is None else ancestors.shape[1],
        bias=bias is not None,
        silu=args.activation == "silu",
        before=before is not None,
        after=after is not None,
        unit=1 if any(stride % 16 for stride in strides) else 16,
    )
    _variant(shape)(
        (-(-C // 64), B, max(1, -(-T // (ROWS * max(B, 1))))),  # as many tiles as sequences have on average
        x,
        weight,
        weight if bias is None else bias.contiguous(),
        args.inputs,
        slots,
        block_table,
        args.kv_len.contiguous(),
        args.window.contiguous(),
        args.cu_rows.contiguous(),
        slots if ancestors is None else ancestors.contiguous(),
        x if before is None else before,
        x if after is None else after,
        out,
        *(stride // shape.unit for stride in strides),
        block_table.stride(0),
    )
    return out


@takes(Arguments)
def conv_rows_cost(args: Arguments) -> tuple[int, int]:
    """(bytes, operations) of one call, which reads nothing: rows, what they add to the cache, and the columns before
    them."""
    (T, C), K = args.x.shape, args.weight.shape[1]
    moved = (3 + (args.before is not None) + (args.after is not None)) * T + (K - 1) * len(args.kv_len)
    return moved * C * args.x.element_size() + args.weight.numel() * args.weight.element_size(), 2 * T * C * K


def _check(args: Arguments) -> None:
    x, weight, inputs = args.x, args.weight, args.inputs
    if x.dim() != 2 or not x.is_floating_point() or x.dtype.itemsize == 1:
        raise ValueError(f"x must be [T, C], floating: {tuple(x.shape)}, {x.dtype}")
    forms = {"weight": "[C, K]", "inputs": "[pages, page_size >= 1, C]", "kv_len": "[B]", "block_table": "[B, P]"}
    check_dims(args, forms)
    (T, C), (pages, page), B, P = x.shape, inputs.shape[:2], len(args.kv_len), args.block_table.shape[-1]
    wide, i64, i32 = torch.promote_types(x.dtype, torch.float32), torch.int64, torch.int32
    kinds: Kinds = {
        "weight": ((C, weight.shape[-1]), wide),
        "inputs": ((pages, page, C), x.dtype),
        "slots": ((T,), i64),
        "block_table": ((B, P), i32),
        "kv_len": ((B,), i32),
        "window": ((B,), i32),
        "cu_rows": ((B + 1,), i32),
    }
    if args.bias is not None:
        kinds["bias"] = (C,), wide
    kinds |= {gate: ((T, C), x.dtype) for gate in ("before", "after") if getattr(args, gate) is not None}
    check_kinds(args, kinds)
    for name, strided in (("x", x), ("before", args.before), ("after", args.after)):
        if strided is not None and C > 1 and strided.stride(1) != 1:
            raise ValueError(f"the channels of {name} must be adjacent")
    if not (weight.is_contiguous() and inputs.is_contiguous()):
        raise ValueError("weight and inputs must be contiguous")
    if weight.shape[1] not in KERNELS:
        raise ValueError(f"weight must have {KERNELS[0]} to {KERNELS[-1]} columns, got {weight.shape[1]}")
    if args.activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {args.activation!r}")
    check_words(args.ancestors, T)
    same_device(x, ancestors=args.ancestors)


_conv_rows = register(
    conv_rows,
    Arguments,
    check=_check,
    reference=conv_rows_ref,
    launch=launch,
    fake=lambda args: torch.empty_like(args.x, memory_format=torch.contiguous_format),
    mutates=("inputs",),
)
