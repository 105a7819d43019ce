"""start_rows: the first launch of a forward: gather its rows' embeddings and place the rows.

Contract: embedding [V, E], tokens int64, the rest as for place_rows ->

    hidden [B * count, E]     the embedding of row first + i of sequence b in row b * count + i
    positions, slots, kv_len, ancestors     as place_rows gives them

Each row's token is given, or read from its sequence's text at the row's own column. `ahead`, a number in memory,
moves rows and tokens on by that many, so that one captured step drafts every token of a chain. Ids are clamped to
0..V - 1, since a draft's vocabulary may be smaller than its target's. Tokens, tables and parents may be row-strided
views. Traffic: the embeddings read and written once; the rest is a few hundred bytes per sequence. A program waits for
the row's token, then places the row while the embedding arrives, so placing costs no launch and hardly any time.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from specker.kernels.registry import explained, takes
from specker.kernels.round.place_rows import (
    PLACING,
    Window,
    check_place,
    explain_place,
    masks,
    place,
    place_rows,
    place_rows_cost,
    placing_of,
)
from specker.kernels.variant import TYPES, Variant, check_within, rowwise, same_device, start_after_previous, tl, triton


class Arguments(NamedTuple):
    embedding: Tensor
    tokens: Tensor
    text: bool
    window: Window
    positions: Tensor | None = None
    ahead: Tensor | None = None


def _check_tokens(args: Arguments) -> None:
    embedding, tokens, text, window, _, ahead = args
    length, count = window.length, window.rows
    B = length.shape[0] if length.dim() else 0
    if tokens.dim() != 2 or len(tokens) != B or tokens.dtype != torch.int64 or embedding.dim() != 2:
        raise ValueError(
            f"expected embedding [V, E] and tokens [{B}, n] int64: {tuple(embedding.shape)}, {tuple(tokens.shape)} "
            f"{tokens.dtype}"
        )
    if not tokens.shape[1] or (not text and tokens.shape[1] < count):
        raise ValueError(f"{count} rows need as many tokens, got {tokens.shape[1]}")
    if ahead is not None and (ahead.shape != (1,) or ahead.dtype != torch.int64):
        raise ValueError(f"ahead must be [1] int64, got {tuple(ahead.shape)} {ahead.dtype}")


@takes(Arguments)
def explain_start(args: Arguments) -> None:
    _check_tokens(args)
    embedding, tokens, _, window, positions, ahead = args
    explain_place(window, positions)
    same_device(window.length, embedding=embedding, tokens=tokens, ahead=ahead)
    if not len(embedding):
        raise ValueError(f"embedding must be [V >= 1, E], got {tuple(embedding.shape)}")
    if ahead is not None:
        check_within("ahead", ahead, 1 << 31)


@explained(explain_start)
@takes(Arguments)
def start_rows(args: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """embedding [V, E], tokens [B, >= count] int64, the other arguments as for `place_rows` -> hidden [B * count, E]
    and the four results of `place_rows`.

    tokens[b, i] is the token of row first + i of sequence b; with `text`, tokens [B, C] are the texts, and a row reads
    its own column (length - back + first + i, clamped to the text's columns). `ahead` [1] int64 is added to `length`,
    and without `text` to i, clamped to the tokens' columns. Ids are clamped to 0..V - 1. On a GPU the positions are
    written to `positions` [B * count] int64 if given. Raises ValueError as `place_rows` does, and for other tokens.
    """
    _check_tokens(args)
    embedding, tokens, text, window, positions, ahead = args
    if window.length.is_cuda:
        check_place(window, positions)
        return launch(*args)
    if ahead is not None:
        window = window._replace(length=window.length + ahead)
    placed = place_rows(window, positions)
    length, count = window.length, window.rows
    start = length - int(window.back) + int(window.first) if text else ahead
    if start is not None:
        columns = start[:, None] + torch.arange(count, dtype=torch.int64, device=tokens.device).expand(len(length), -1)
        tokens = tokens.gather(1, columns.clamp_(0, tokens.shape[1] - 1))
    ids = tokens[:, :count].reshape(-1).clamp(0, len(embedding) - 1)
    return torch.embedding(embedding, ids), *placed


@takes(Arguments)
def start_rows_cost(args: Arguments) -> tuple[int, int]:
    """(bytes, operations) of one call."""
    placed, operations = place_rows_cost(args.window)
    T = len(args.window.length) * args.window.rows
    return placed + 8 * T + 2 * T * args.embedding.shape[1] * args.embedding.element_size(), operations


@triton.jit
def embedded(
    embedding_ptr,
    tokens_ptr,
    i_b,
    token_stride,
    column,
    width,
    o_e,
    V: tl.constexpr,
    E: tl.constexpr,
    CLAMP: tl.constexpr,  # the column may lie outside of the tokens
):
    """The embedding of the token in a column of sequence i_b, zeros beyond E."""
    if CLAMP:
        column = tl.minimum(tl.maximum(column, 0), width - 1)
    token = tl.load(tokens_ptr + i_b * token_stride + column)
    token = tl.minimum(tl.maximum(token, 0), V - 1)
    return tl.load(embedding_ptr + token * E + o_e, mask=o_e < E, other=0.0)


@triton.jit(
    do_not_specialize=[
        *("width", "token_stride", "back", "first", "columns", "page_size", "last_position", "up_stride"),
        "table_stride",
    ],
    do_not_specialize_on_alignment=[
        "tokens_ptr",
        "ahead_ptr",
        "length_ptr",
        "parents_ptr",
        "table_ptr",
        "positions_ptr",
    ],
)
def _start_rows_kernel(
    embedding_ptr,  # [V, E]
    tokens_ptr,  # [B, width]
    ahead_ptr,  # [1]
    hidden_ptr,  # [B, count, E]
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
    TEXT: tl.constexpr,  # tokens are texts: a row reads its own column
    AHEAD: tl.constexpr,  # if false, ahead is not read
    W: tl.constexpr,
    W_PAD: tl.constexpr,
    TREE: tl.constexpr,
    PDL: tl.constexpr,
):
    start_after_previous(PDL)
    i, i_b, count = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    ahead = tl.load(ahead_ptr) if AHEAD else 0
    start = tl.load(length_ptr + i_b) - back + ahead
    column = start + first + i if TEXT else ahead + i
    o_e = tl.arange(0, BLOCK)
    # in flight while the row is placed
    b_row = embedded(embedding_ptr, tokens_ptr, i_b, token_stride, column, width, o_e, V, E, TEXT or AHEAD)
    pointers = (parents_ptr, table_ptr, positions_ptr, slots_ptr, kv_len_ptr, words_ptr)
    sizes = (columns, page_size, last_position, up_stride, table_stride)
    place(i, i_b, count, start, first, pointers, sizes, W, W_PAD, TREE)
    tl.store(hidden_ptr + (i_b * count + i) * E + o_e, b_row, mask=o_e < E)


@lru_cache
def _variant(dtype: torch.dtype, V: int, E: int, words: int, tree: bool, text: bool, ahead: bool = False) -> Variant:
    """One program per row, which copies its embedding and places it: 32 elements per thread, four 16-byte loads in
    flight."""
    t, block = TYPES[dtype], triton.next_power_of_2(E)
    return Variant(
        name=f"{t} V{V} E{E} {'tree' if tree else 'chain'} W{words}" + " text" * text + " ahead" * ahead,
        kernel=_start_rows_kernel,
        arguments=(f"*{t}", "*i64", "*i64", f"*{t}", "i32", "i32", *PLACING),
        constexprs={
            "V": V,
            "E": E,
            "BLOCK": block,
            "TEXT": text,
            "AHEAD": ahead,
            **masks(words, tree),
        },
        num_warps=min(max(block // 1024, 1), 8),
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
        (bf16, 2048, 1, False, False),
        (bf16, 2048, 4, True, False),
        (bf16, 1023, 1, True, False),
        (torch.float16, 4096, 1, True, False),
        (torch.float32, 4096, 1, False, True),
    ):
        yield _variant(dtype, 128256, E, words, tree, text)
    yield _variant(bf16, 128256, 4096, 1, False, False, True)


@takes(Arguments)
def launch(args: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    embedding, tokens, text, window, positions, ahead = args
    length, tree = window.length, window.parents is not None
    same_device(length, embedding=embedding, tokens=tokens, ahead=ahead)
    placing = placing_of(window, positions)
    (V, E), B = embedding.shape, len(length)
    hidden, tokens = embedding.new_empty(B * window.rows, E), rowwise(tokens)
    variant = _variant(embedding.dtype, V, E, placing.ancestors.shape[1], tree, text, ahead is not None)
    variant(
        (window.rows, B),
        embedding.contiguous(),
        tokens,
        length if ahead is None else ahead,  # without it the pointer is not read
        hidden,
        tokens.shape[1],
        tokens.stride(0),
        *placing,
    )
    return hidden, *placing.results
