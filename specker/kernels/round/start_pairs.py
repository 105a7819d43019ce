"""start_pairs: the first launch of a forward of a head that reads the target (model/heads.py): gather the embeddings of
its tokens and the features beside them, norm both, and place the rows.

Contract: embedding [V, E], tokens int64, features [B * m, E], norms of both, the rest as for place_rows ->

    stream [B * count, E]       h: the row's feature, or its norm
    joined [B * count, 2 * E]   [norm(embedding) | norm(h)], or [embedding | h] without norms
    positions, slots, kv_len, ancestors     as place_rows gives them

A chain's row takes the feature of the same number. A tree's row takes that of its parent, one of the m rows before row
`first`. Each norm is that of residual_merge: computed in float32 and rounded once. Traffic: two rows read and three
written for each row. Without this op it would be two norms, a gather and a concatenation.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specker.kernels.registry import explained, takes
from specker.kernels.round.place_rows import (
    PLACING,
    Window,
    check_place,
    masks,
    place,
    place_rows_cost,
    placing_of,
)
from specker.kernels.round.start_rows import embedded, explain_start, start_rows
from specker.kernels.variant import TYPES, Variant, rowwise, same_device, start_after_previous, tl, triton

Norms = tuple[Tensor, Tensor]  # weights [E] for the embedding and for the feature


class Arguments(NamedTuple):
    embedding: Tensor
    tokens: Tensor
    text: bool
    features: Tensor
    norms: Norms | None
    eps: float
    normed: bool
    window: Window


def _check(args: Arguments) -> int:
    """Raise ValueError unless features and norms fit. Returns the features of a sequence."""
    embedding, _, _, features, norms, _, normed, window = args
    length, count = window.length, window.rows
    if embedding.dim() != 2 or length.dim() != 1 or features.dim() != 2:
        raise ValueError(
            f"embedding and features must be matrices and length [B], got {tuple(embedding.shape)}, "
            f"{tuple(features.shape)} and {tuple(length.shape)}"
        )
    B, E = len(length), embedding.shape[1]
    m = len(features) // max(B, 1)
    if features.shape != (B * m, E) or m not in ({count} if window.parents is None else {1, count}):
        raise ValueError(f"expected features [{B} * {count}, {E}], or [{B}, {E}] for a tree: {tuple(features.shape)}")
    if any(x.dtype != embedding.dtype for x in (features, *(norms or ()))):
        raise ValueError(f"features and norms must have the embedding's dtype, {embedding.dtype}")
    if norms is not None and any(weight.shape != (E,) for weight in norms):
        raise ValueError(f"norms must be [{E}], got {[tuple(weight.shape) for weight in norms]}")
    if normed and norms is None:
        raise ValueError("without norms there is no norm of the features")
    return m


@takes(Arguments)
def _explain(args: Arguments) -> None:
    _check(args)
    window = args.window
    explain_start(args.embedding, args.tokens, args.text, window)
    weights = args.norms or (None, None)
    same_device(window.length, features=args.features, norm_e=weights[0], norm_h=weights[1])
    if window.parents is not None and window.first < 1:
        raise ValueError(f"a tree's rows begin at row 1, below a feature, got {window.first}")


@explained(_explain)
@takes(Arguments)
def start_pairs(args: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """embedding [V, E], tokens and `text` as for `start_rows`, features [B * m, E], norms of the embedding's and the
    feature's [E] or None, their eps, the other arguments as for `place_rows` -> stream [B * count, E], joined
    [B * count, 2 * E] and the four results of `place_rows`.

    m is `count` without parents; with them it is 1 or count, and row first + i takes feature parents[first + i - 1] -
    (first - m) of its sequence, clamped to 0..m - 1. `normed`: the stream is the norm of the feature. All tensors but
    integers have the embedding's dtype. Raises ValueError as `start_rows` does, and for other features and norms.
    """
    m = _check(args)
    embedding, tokens, text, features, norms, eps, normed, window = args
    if window.length.is_cuda:
        check_place(window, None)
        return launch(*args)
    embedded, *placed = start_rows(embedding, tokens, text, window)
    if window.parents is not None:
        first = window.first
        row = (window.parents[:, first - 1 : first - 1 + window.rows] - (first - m)).clamp(0, m - 1)
        own = m * torch.arange(len(row), dtype=torch.int64, device=row.device)
        features = features[(row + own.unsqueeze(1)).reshape(-1)]
    beside = features
    if norms is not None:
        embedded, beside = (F.rms_norm(x, w.shape, w, eps) for x, w in zip((embedded, features), norms, strict=True))
    return beside if normed else features, torch.cat((embedded, beside), -1), *placed  # type: ignore[return-value]


@takes(Arguments)
def start_pairs_cost(args: Arguments) -> tuple[int, int]:
    """(bytes, operations) of one call."""
    placed, operations = place_rows_cost(args.window)
    T, E = len(args.window.length) * args.window.rows, args.embedding.shape[1]
    weights = 0 if args.norms is None else 2 * E
    return placed + 8 * T + (5 * T * E + weights) * args.embedding.element_size(), operations + 8 * T * E


@triton.jit(
    do_not_specialize=[
        *("eps", "width", "token_stride", "back", "first", "columns", "page_size", "last_position", "up_stride"),
        "table_stride",
    ],
    do_not_specialize_on_alignment=["tokens_ptr", "length_ptr", "parents_ptr", "table_ptr"],
)
def _start_pairs_kernel(
    embedding_ptr,  # [V, E]
    tokens_ptr,  # [B, width]
    features_ptr,  # [B, M, E]
    norm_e_ptr,  # [E]; not read unless NORMS
    norm_h_ptr,  # [E]; not read unless NORMS
    stream_ptr,  # [B, count, E]
    joined_ptr,  # [B, count, 2, E]
    eps,
    width,
    token_stride,  # from a sequence's tokens to the next one's
    length_ptr,  # [B]; from here on as in `Placing`
    parents_ptr,  # [B, >= first + count - 1]
    table_ptr,  # [B, P]
    positions_ptr,  # [B, count]
    slots_ptr,  # [B, count]
    kv_len_ptr,  # [B]
    words_ptr,  # [B, count, W]
    back,
    first,
    columns,  # P * page_size
    page_size,
    last_position,
    up_stride,
    table_stride,
    V: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two, at least E
    NORMS: tl.constexpr,
    NORMED: tl.constexpr,  # the stream is the norm of the feature
    ONE: tl.constexpr,  # a tree's first level: all rows of a sequence take its only feature
    TEXT: tl.constexpr,  # tokens are texts: a row reads its own column
    W: tl.constexpr,
    W_PAD: tl.constexpr,
    TREE: tl.constexpr,
    PDL: tl.constexpr,
):
    start_after_previous(PDL)
    i, i_b, count = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    start = tl.load(length_ptr + i_b) - back
    column = start + first + i if TEXT else i
    o_e = tl.arange(0, BLOCK)
    m_e = o_e < E
    b_e = embedded(embedding_ptr, tokens_ptr, i_b, token_stride, column, width, o_e, V, E, TEXT)
    if ONE:
        row = i_b
    elif TREE:
        parent = tl.load(parents_ptr + i_b * up_stride + first + i - 1) - (first - count)
        row = i_b * count + tl.minimum(tl.maximum(parent, 0), count - 1)
    else:
        row = i_b * count + i
    b_h = tl.load(features_ptr + row * E + o_e, mask=m_e, other=0.0)
    pointers = (parents_ptr, table_ptr, positions_ptr, slots_ptr, kv_len_ptr, words_ptr)
    sizes = (columns, page_size, last_position, up_stride, table_stride)
    place(i, i_b, count, start, first, pointers, sizes, W, W_PAD, TREE)
    o_row = (i_b * count + i) * E
    b_beside = b_h
    if NORMS:
        b_e = _norm(b_e, norm_e_ptr, o_e, m_e, eps, E)
        b_beside = _norm(b_h, norm_h_ptr, o_e, m_e, eps, E)
    tl.store(stream_ptr + o_row + o_e, b_beside if NORMED else b_h, mask=m_e)
    tl.store(joined_ptr + 2 * o_row + o_e, b_e, mask=m_e)
    tl.store(joined_ptr + 2 * o_row + E + o_e, b_beside, mask=m_e)


@triton.jit
def _norm(b_x, weight_ptr, o_e, m_e, eps, E: tl.constexpr):
    """The RMSNorm of a row, in the row's dtype."""
    b_weight = tl.load(weight_ptr + o_e, mask=m_e, other=0.0).to(tl.float32)
    b_y = b_x.to(tl.float32)
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(b_y * b_y, axis=0), E * 1.0) + eps))
    return (b_y * scale * b_weight).to(b_x.dtype)


@lru_cache
def _variant(
    dtype: torch.dtype,
    V: int,
    E: int,
    words: int,
    tree: bool,
    text: bool,
    norms: bool = True,
    normed: bool = False,
    one: bool = False,
) -> Variant:
    """One program per row: 16 elements of each of its two rows per thread."""
    t, block = TYPES[dtype], triton.next_power_of_2(E)
    kind = "tree" if tree else "chain"
    flags = " text" * text + " plain" * (not norms) + " normed" * normed + " one" * one
    return Variant(
        name=f"{t} V{V} E{E} {kind} W{words}{flags}",
        kernel=_start_pairs_kernel,
        arguments=(f"*{t}", "*i64", *(f"*{t}",) * 5, "fp32", "i32", "i32", *PLACING),
        constexprs={
            "V": V,
            "E": E,
            "BLOCK": block,
            "NORMS": norms,
            "NORMED": normed,
            "ONE": one,
            "TEXT": text,
            **masks(words, tree),
        },
        num_warps=min(max(block // 512, 1), 16),
        wide=E * dtype.itemsize % 16 == 0,
        smoke=words == 1 and tree and E == 4096,
    )


def variants(arch: int) -> Iterator[Variant]:
    """The variants that the compile-only checks compile for sm_`arch`."""
    bf16 = torch.bfloat16
    for dtype, E, words, tree, text in (
        (bf16, 4096, 1, False, False),
        (bf16, 4096, 1, False, True),
        (bf16, 4096, 1, True, False),
        (bf16, 2048, 4, True, False),
        (bf16, 8192, 1, False, False),
        (bf16, 1023, 1, False, False),
        (torch.float16, 4096, 1, False, False),
        (torch.float32, 4096, 1, False, True),
    ):
        yield _variant(dtype, 128256, E, words, tree, text)
    yield _variant(bf16, 128256, 4096, 1, True, False, one=True)
    yield _variant(bf16, 128256, 4096, 1, False, False, normed=True)
    yield _variant(bf16, 128256, 4096, 1, False, False, norms=False)


@takes(Arguments)
def launch(args: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    embedding, tokens, text, features, norms, eps, normed, window = args
    norm_e, norm_h = norms or (features, features)  # the kernel ignores features here
    length, tree = window.length, window.parents is not None
    same_device(length, embedding=embedding, tokens=tokens, features=features, norm_e=norm_e, norm_h=norm_h)
    placing = placing_of(window)
    (V, E), B, T = embedding.shape, len(length), len(length) * window.rows
    stream, joined = embedding.new_empty(T, E), embedding.new_empty(T, 2 * E)
    tokens, one = rowwise(tokens), tree and len(features) == B
    variant = _variant(embedding.dtype, V, E, placing.ancestors.shape[1], tree, text, norms is not None, normed, one)
    variant(
        (window.rows, B),
        embedding.contiguous(),
        tokens,
        features.contiguous(),
        norm_e.contiguous(),
        norm_h.contiguous(),
        stream,
        joined,
        eps,
        tokens.shape[1],
        tokens.stride(0),
        *placing,
    )
    return stream, joined, *placing.results
