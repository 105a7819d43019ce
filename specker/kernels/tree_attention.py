"""tree_attention: draft rows attend to [paged prefix | window], the window seen through an ancestor bit mask.

The kernel's tiles and splits start at fixed columns, whatever the length. Split boundaries are the numbers with four
mantissa bits (0, 1, .. 31, 32, 34, .. 62, 64, 68, ..) times a unit set by the number of KV heads. A split is thus about
1/16 of the columns before it, and each doubling of the context adds 16. The last, longest splits start first. A masked
column adds exactly 0 to sum and accumulator, and so does a split in which a row sees no column. Every tile runs through
the same loop. The splits of a (row, query head) pair are merged in split order. For few pairs one launch is enough: for
each KV head and 64 pairs, the last program to finish merges them. It would merge many pairs one after another, so a
second kernel merges those, with the same arithmetic for a pair. A verify row of a chain therefore equals, bit for bit
at any length, the row that plain decoding computes at its position.

A sequence of several splits also writes and reads a float32 partial per split. A masked column contributes 0 times its
V, so V must be finite. A block_table wider than needed costs scratch memory and, for one sequence, programs that exit
at once. Where the lengths are known to stay below n * page_size, pass a narrower slice (`block_table[:, :n]`). For
several sequences the launch has at most `PROGRAMS` programs per SM, which share the work that the lengths require.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from specker.kernels.ancestors import (
    MAX_WORDS,
    ancestor_mask,
    ancestor_words,
    chain_words,
    first_bits,
    pack_bits,
    reach_mask,
    unpack_words,
)
from specker.kernels.narrow import NARROW, cache_types, check_cache, kind_of, named, widen
from specker.kernels.prefetch import NONE, Prefetch, prefetch_of, prefetch_share
from specker.kernels.quant import Matrix, as_bytes
from specker.kernels.registry import register, takes
from specker.kernels.variant import (
    AMD,
    TYPES,
    Variant,
    arch,
    counters,
    is_last,
    let_next_start,
    rowwise,
    same_device,
    sms,
    start_after_previous,
    tl,
    triton,
    wait_for_previous,
)

__all__ = [
    "MAX_WORDS",
    "ancestor_mask",
    "ancestor_words",
    "attend",
    "chain_words",
    "gather_pages",
    "pack_bits",
    "tree_attention",
    "tree_attention_cost",
    "tree_attention_ref",
]

PROGRAMS = 4  # most programs per SM for several sequences; 2 or 3 run at once
MERGED = 8  # most pairs of a KV head, in a sequence, that the last program merges: four at a time, 1 us each
SMALL = ["kv_len_ptr", "cu_rows_ptr"]  # of one number a sequence, which may be a part of a tensor
LAYERS = ["sink_ptr", "k_scale_ptr", "v_scale_ptr"]  # of one row a layer
_LOG2E = 1 / math.log(2)


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    kv_len: Tensor,
    window: Tensor,
    cu_rows: Tensor,
    ancestors: Tensor,
    scale: float,
    reach: int = 0,
    cap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    following: Matrix | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of draft rows over a paged prefix and a window of drafts, in which a row sees itself and its ancestors.

        z   = scale * q k^T                                  with `cap`: cap * tanh(scale * q k^T / cap)
        lse = log(sum(exp(z + mask)))                        with `sinks`: log(exp(sink) + sum(exp(z + mask)))
        out = exp(z + mask - lse) v

    Sequence b has kv_len[b] columns, and the last window[b] of them are its window. Its rows see every column before
    the window, and the window's column j where bit j % 64 of word j // 64 of their `ancestors` is set. The set bits
    mark the row itself and its ancestors; each row must see at least one column. The rows need not be the window's last
    columns, and their number may differ from `window`. With `reach` a row sees only the last `reach` of these columns,
    as in sliding-window attention. This also works in a tree, where columns are not positions: without `reach`, a row
    at position p sees p + 1 columns, those of its path. A batch can hold sequences of several layers: on the flattened
    cache, layer l has page ids l * pages + page.

    A sink is a logit of a query head that takes its share of each row's softmax and adds nothing (gpt-oss). A soft cap
    bounds the scores (Gemma 2). Caches in eight bits (kernels/narrow.py) halve the traffic; k_scale multiplies the
    scores, v_scale the result.

    Softmax and sums run in float32 (float64 for float64). The op is batch-invariant: a row's bits depend on its query
    and on the K, V and positions of the columns it sees, not on other rows or sequences, kv_len or the width of
    block_table. Memory moves K and V of each sequence once per KV head, q and out once. If a KV head has more than 64
    (row, query head) pairs, each further 64 read K and V again, from L2.

    Args:
        q: [T, Hq, D], the rows of all sequences, one sequence after another.
        k_cache: [pages, page_size, Hkv, D] of q's dtype, int8 or float8_e4m3fn. Query heads g * Hq / Hkv and following
            share KV head g. Columns before kv_len must be finite, even those that a row does not see; other memory may
            hold anything.
        v_cache: as k_cache.
        block_table: [B, P] int32, page ids. A table wider than needed costs time: pass a slice.
        kv_len: [B] int32, columns of each sequence, the window included.
        window: [B] int32, columns of the window.
        cu_rows: [B + 1] int32; sequence b owns rows cu_rows[b] to cu_rows[b + 1].
        ancestors: [T, W] int64, W <= 4; see `ancestor_words`.
        scale: positive, usually D ** -0.5.
        reach: a row sees at most this many columns, the last ones, its own included; 0 for all. The GPU kernel serves
            values of at least 64 * W, which hide only columns before the window; the reference serves smaller ones.
        cap: the soft cap of the scores; 0 for none.
        sinks: [G, Hq] of any floating dtype, or None. The sequences come in G equal runs, one for each layer.
        k_scale: [G, Hkv] float32, of caches in eight bits; G as for the sinks.
        v_scale: as k_scale.
        following: the matrix of the product that reads `out`, which SPECKER_PREFETCH prefetches (kernels/prefetch.py).

    Returns:
        out [T, Hq, D], and lse [T, Hq], float32 (float64 for float64).

    Raises:
        TypeError: an argument of another type.
        ValueError: other shapes, dtypes or devices. On a CPU also kv_len beyond the table, a window longer than kv_len,
            page ids beyond the cache, and cu_rows that do not cover q's rows. On CUDA, where the host must not wait, a
            sequence with kv_len beyond the table gets rows of NaN.

    Source: tree attention of SpecInfer, arXiv 2305.09781, section 4.2.

    Examples:
        >>> import torch
        >>> from specker.kernels import ancestor_words, tree_attention
        >>> keys = torch.zeros(1, 16, 1, 32)  # one page of 16 columns, one KV head
        >>> values = torch.arange(16.0)[None, :, None, None].repeat(1, 1, 1, 32)  # column c holds c
        >>> ints = [torch.tensor(x, dtype=torch.int32) for x in ([[0]], [6], [3], [0, 3])]
        >>> tree = ancestor_words(torch.tensor([0, 0]))  # a root, in column 3, and two children of it
        >>> out, lse = tree_attention(torch.zeros(3, 1, 32), keys, values, *ints, tree, 1.0)
        >>> [round(x, 1) for x in out[:, 0, 0].tolist()]  # means of columns 0-3, 0-4, and 0-3 with 5
        [1.5, 2.0, 2.2]
    """
    return _tree_attention(
        q,
        k_cache,
        v_cache,
        block_table,
        kv_len,
        window,
        cu_rows,
        ancestors,
        scale,
        reach,
        cap,
        sinks,
        k_scale,
        v_scale,
        following,
    )


class Arguments(NamedTuple):
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    kv_len: Tensor
    window: Tensor
    cu_rows: Tensor
    ancestors: Tensor
    scale: float
    reach: int = 0
    cap: float = 0.0
    sinks: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    following: Matrix | None = None


@takes(Arguments)
def tree_attention_ref(args: Arguments) -> tuple[Tensor, Tensor]:
    q, k_cache, v_cache, block_table, reach = args.q, args.k_cache, args.v_cache, args.block_table, args.reach
    sinks, k_scale, v_scale = args.sinks, args.k_scale, args.v_scale
    starts, lens, windows = args.cu_rows.tolist(), args.kv_len.tolist(), args.window.tolist()
    words = args.ancestors.tolist()
    if starts[0] != 0 or starts[-1] != len(q) or starts != sorted(starts):
        raise ValueError(f"cu_rows must rise from 0 to q's {len(q)} rows, got {starts}")
    outs, lses = [], []
    for b in range(len(lens)):
        if starts[b] == starts[b + 1]:
            continue
        if lens[b] > block_table.shape[1] * k_cache.shape[1]:
            raise ValueError(
                f"kv_len {lens[b]} exceeds block_table: {block_table.shape[1]} pages of {k_cache.shape[1]}"
            )
        if not 0 <= windows[b] <= lens[b]:
            raise ValueError(f"window must be in 0..kv_len, got {windows[b]} of {lens[b]} columns in sequence {b}")
        rows = slice(starts[b], starts[b + 1])
        bits, first, page = unpack_words(words[rows]), 0, k_cache.shape[1]
        if reach:
            first, mask = reach_mask(bits, lens[b], windows[b], reach, q.dtype)
        else:
            mask = ancestor_mask(bits, lens[b], windows[b], q.dtype)
        pages, skipped = block_table[b, first // page :], first // page * page
        k = gather_pages(k_cache, pages, lens[b] - skipped)[first - skipped :]
        v = gather_pages(v_cache, pages, lens[b] - skipped)[first - skipped :]
        own = q[rows]
        if k_scale is not None and v_scale is not None:
            own = own.to(torch.promote_types(q.dtype, torch.float32))
            i_g = b * len(k_scale) // len(lens)
            k, v = (x.to(own.dtype) * by[i_g, :, None] for x, by in ((k, k_scale), (v, v_scale)))
        out, lse = attend(own, k, v, None if mask is None else mask.to(q.device, own.dtype), args.scale, args.cap)
        if sinks is not None:
            whole = torch.logaddexp(lse, sinks[b * len(sinks) // len(lens)].to(lse.dtype))
            out, lse = out * (lse - whole).exp().unsqueeze(-1), whole
        out = out.to(q.dtype)
        outs.append(out)
        lses.append(lse)
    if len(outs) == 1:
        return outs[0].contiguous(), lses[0].contiguous()  # torch's kernel keeps q's layout, `_fake` does not
    if not outs:
        return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
    return torch.cat(outs), torch.cat(lses)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """One sequence: q [T, Hq, D], k and v [S, Hkv, D], additive mask [T, S] or None -> out [T, Hq, D], lse [T, Hq]."""
    T, Hq, D = q.shape
    if q.device.type == "cpu" and not cap:  # the fused CPU kernel also returns the log-sum-exp
        q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))  # the kernel takes it for granted
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q.transpose(0, 1).unsqueeze(0),
            k.transpose(0, 1).unsqueeze(0),
            v.transpose(0, 1).unsqueeze(0),
            attn_mask=mask,
            scale=scale,
        )
        return out.squeeze(0).transpose(0, 1), lse.view(Hq, T).t()
    acc = torch.promote_types(q.dtype, torch.float32)
    G = Hq // k.shape[1]
    scores = torch.einsum("tgrd,sgd->tgrs", q.to(acc).unflatten(1, (-1, G)), k.to(acc)) * scale
    if cap:
        scores = cap * (scores / cap).tanh()
    if mask is not None:
        scores = scores + mask[:, None, None, :]
    lse = scores.logsumexp(-1)
    out = torch.einsum("tgrs,sgd->tgrd", (scores - lse.unsqueeze(-1)).exp(), v.to(acc))
    return out.reshape(T, Hq, D).to(q.dtype), lse.reshape(T, Hq)


def gather_pages(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """The first `length` rows [length, Hkv, D] of one sequence; a view if its pages are consecutive."""
    page_size = cache.shape[1]
    ids = pages[: -(-length // page_size)].tolist()
    if min(ids) < 0 or max(ids) >= len(cache):
        raise ValueError(f"block_table must hold page ids in 0..{len(cache) - 1}, got {min(ids)}..{max(ids)}")
    if ids == list(range(ids[0], ids[0] + len(ids))):
        return cache[ids[0] : ids[0] + len(ids)].flatten(0, 1)[:length]
    return cache[ids].flatten(0, 1)[:length]


def tree_attention_cost(q: Tensor, k_cache: Tensor, kv_len: Sequence[int], rows: Sequence[int]) -> tuple[int, int]:
    """(bytes, flops) that any implementation needs: K and V of all columns and q read once, the result written.
    `kv_len` and `rows` are each sequence's columns and query rows."""
    Hkv, D = k_cache.shape[-2:]
    Hq = q.shape[1]
    bytes_ = 2 * sum(kv_len) * Hkv * D * k_cache.element_size() + 2 * q.numel() * q.element_size()
    return bytes_, sum(4 * n * t * Hq * D for n, t in zip(kv_len, rows, strict=True))


# Split i holds the columns from _split_start(i) up to _split_start(i + 1).
def split_unit(Hkv: int) -> int:
    """Columns of the shortest splits: 256 for 8 KV heads, otherwise in proportion (a power of two from 128 to
    1,024), so that the number of programs stays about the same."""
    return min(max(32 << (Hkv - 1).bit_length(), 128), 1024)


def partial_bytes(rows: int, Hq: int, D: int) -> int:
    """Bytes of scratch memory for each split of a sequence of several: a partial result, its maximum and its sum."""
    return rows * Hq * (D + 2) * 4


def split_count(kv_len: int, unit: int) -> int:
    """The number of splits of `kv_len` columns, on the host: `_split_of(kv_len - 1) + 1`."""
    x = (kv_len - 1) // unit
    shift = max(x.bit_length() - 5, 0)
    return 16 * shift + (x >> shift) + 1


@triton.jit
def _split_of(column, UNIT: tl.constexpr):
    """The split of a column: the exponent and four bits of the mantissa of column / UNIT as a float."""
    x = column // UNIT
    return tl.where(x < 16, x, (x.to(tl.float32).to(tl.int32, bitcast=True) >> 19) - (130 << 4))


@triton.jit
def _split_start(split, UNIT: tl.constexpr):
    octave = tl.maximum(split // 16 - 1, 0)
    return (split - 16 * octave << octave) * UNIT


@triton.jit
def _items_of(
    i_b,
    m_b,
    kv_len_ptr,
    cu_rows_ptr,
    columns,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    M: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Sequence i_b's work items: M (row, query head) pairs of a KV head over one split."""
    rows = tl.load(cu_rows_ptr + i_b + 1, mask=m_b, other=0) - tl.load(cu_rows_ptr + i_b, mask=m_b, other=0)
    kv_len = tl.minimum(tl.load(kv_len_ptr + i_b, mask=m_b, other=1), columns)
    return tl.cdiv(rows * (HQ // HKV), M) * HKV * (_split_of(kv_len - 1, UNIT) + 1)


@triton.jit
def _window_bits(words_ptr, o_t, m_t, j, W):
    """Bits j..j+63 of each row's words; bits before the first word and after the last are 0."""
    o_w = tl.zeros_like(o_t) + (j >> 6)
    shift = (j & 63).to(tl.uint64)
    p_words = words_ptr + o_t * W + o_w
    low = tl.load(p_words, mask=m_t & (o_w >= 0) & (o_w < W), other=0).to(tl.uint64, bitcast=True)
    high = tl.load(p_words + 1, mask=m_t & (o_w >= -1) & (o_w + 1 < W), other=0).to(tl.uint64, bitcast=True)
    return (low >> shift) | ((high << 1) << (63 - shift))


@triton.jit
def _count_bits(words_ptr, o_t, m_t, window, W):
    """How many of the first `window` bits of each row's words are set, int32."""
    count = tl.zeros_like(o_t).to(tl.int32)
    for i_w in range(W):
        word = tl.load(words_ptr + o_t * W + i_w, mask=m_t, other=0).to(tl.uint64, bitcast=True)
        word = word & first_bits(window - 64 * i_w)
        for i_half in tl.static_range(2):
            x = (word >> (32 * i_half)).to(tl.uint32)
            x = x - ((x >> 1) & 0x55555555)
            x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
            x = (x + (x >> 4)) & 0x0F0F0F0F
            count += ((x * 0x01010101) >> 24).to(tl.int32)
    return count


@triton.jit(
    do_not_specialize=["run", "T", "B", "W", "table_stride", "columns", "max_splits"],
    do_not_specialize_on_alignment=["table_ptr", "window_ptr", "words_ptr", *LAYERS, *SMALL],
)
def _tree_attention_kernel(
    q_ptr,  # [T, HQ, D]
    k_ptr,  # [pages, PAGE, HKV, D], strides PAGE_STRIDE, COLUMN_STRIDE, HEAD_STRIDE, 1
    v_ptr,  # like k
    table_ptr,  # [B, max_pages]
    kv_len_ptr,  # [B]
    window_ptr,  # [B]
    cu_rows_ptr,  # [B + 1]
    words_ptr,  # [T, W]
    partial_ptr,  # [T, HQ, max_splits, D] float32
    stats_ptr,  # [2, T, HQ, max_splits] float32: base-2 maximum of the scores, sum of their powers of 2
    count_ptr,  # [slots, HKV] zeros; reset to zeros at the end
    out_ptr,  # [T, HQ, D]
    lse_ptr,  # [T, HQ] float32
    sink_ptr,  # [G, HQ], or None
    k_scale_ptr,  # [G, HKV], or None
    v_scale_ptr,  # [G, HKV], or None
    following_ptr,  # what PREFETCH describes, or None
    scale2,  # scale * log2(e)
    cap2,  # cap * log2(e)
    run,  # sequences of a layer, B / G
    T,
    B,
    W,
    table_stride,
    columns,  # the table's capacity in columns
    max_splits,  # splits of a sequence that fills the table
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,  # a power of two, at least 16
    D_V: tl.constexpr,  # columns of V per product: D_PAD, or half of it
    OWN: tl.constexpr,  # read K transposed, so that on sm_80 a warp owns whole rows
    PAGE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    UNIT: tl.constexpr,  # columns of the shortest splits
    M: tl.constexpr,  # (row, query head) pairs per program
    N: tl.constexpr,  # columns at a time; divides UNIT, at most 64
    P: tl.constexpr,  # pairs merged at a time; divides M
    S: tl.constexpr,  # splits merged at a time
    SEQS: tl.constexpr,  # a power of two, at least B
    REACH: tl.constexpr,  # most columns that a row sees, at least 64 * W; 0: no limit
    CAP: tl.constexpr,  # whether scores have a soft cap
    KV: tl.constexpr,  # "plain", or the kind of a cache in eight bits
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
    ON_AMD: tl.constexpr,
    APART: tl.constexpr,  # another kernel merges the splits
):
    """For one sequence, the grid has a program for each work item that the table has room for; programs without an item
    return at once. For several sequences, a limited number of programs takes the items in turn: with a grid for the
    longest possible sequences, most programs would have no item."""
    programs = tl.num_programs(0) - PREFETCH[0]
    if PREFETCH[0]:  # noqa: SIM102 - a constant condition: without programs following_ptr is None
        if tl.program_id(0) >= programs:
            prefetch_share(following_ptr, tl.program_id(0) - programs, PREFETCH)
            wait_for_previous(PDL)
            return
    wait_for_previous(PDL)
    tl.static_assert(N <= 64 and UNIT % N == 0 and PAGE * COLUMN_STRIDE < 2**31)
    pointers = q_ptr, k_ptr, v_ptr, table_ptr, words_ptr, partial_ptr, stats_ptr, count_ptr, out_ptr, lse_ptr
    numbers = scale2, cap2, T, W, table_stride, columns, max_splits
    if SEQS == 1:
        i_b = tl.full([], 0, tl.int32)
        i_item = tl.program_id(0)
        if i_item >= _items_of(i_b, True, kv_len_ptr, cu_rows_ptr, columns, HQ, HKV, M, UNIT):
            return
        _attend(
            pointers,
            numbers,
            sink_ptr,
            k_scale_ptr,
            v_scale_ptr,
            run,
            kv_len_ptr,
            window_ptr,
            cu_rows_ptr,
            i_b,
            i_item,
            HQ,
            HKV,
            D,
            D_PAD,
            D_V,
            OWN,
            PAGE,
            PAGE_STRIDE,
            COLUMN_STRIDE,
            HEAD_STRIDE,
            UNIT,
            M,
            N,
            P,
            S,
            REACH,
            CAP,
            KV,
            PDL,
            ON_AMD,
            APART,
        )
    else:
        o_b = tl.arange(0, SEQS)
        items = _items_of(o_b, o_b < B, kv_len_ptr, cu_rows_ptr, columns, HQ, HKV, M, UNIT)
        ends = tl.cumsum(items, axis=0)
        # disable_licm: values that the compiler hoists out of the loop take up to 60 registers. Triton 3.7 tells only
        # LLVM and hoists indices itself.
        for i_item in tl.range(tl.program_id(0), tl.sum(items, axis=0), programs, disable_licm=True):
            i_b = tl.sum((ends <= i_item).to(tl.int32), axis=0)
            i_first = tl.max(tl.where(ends <= i_item, ends, 0), axis=0)
            _attend(
                pointers,
                numbers,
                sink_ptr,
                k_scale_ptr,
                v_scale_ptr,
                run,
                kv_len_ptr,
                window_ptr,
                cu_rows_ptr,
                i_b,
                i_item - i_first,
                HQ,
                HKV,
                D,
                D_PAD,
                D_V,
                OWN,
                PAGE,
                PAGE_STRIDE,
                COLUMN_STRIDE,
                HEAD_STRIDE,
                UNIT,
                M,
                N,
                P,
                S,
                REACH,
                CAP,
                KV,
                PDL,
                ON_AMD,
                APART,
            )


@triton.jit
def _attend(
    pointers,
    numbers,
    sink_ptr,
    k_scale_ptr,
    v_scale_ptr,
    run,
    kv_len_ptr,
    window_ptr,
    cu_rows_ptr,
    i_b,
    i_item,  # index among the items of sequence i_b
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    D_V: tl.constexpr,
    OWN: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    UNIT: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    S: tl.constexpr,
    REACH: tl.constexpr,
    CAP: tl.constexpr,
    KV: tl.constexpr,
    PDL: tl.constexpr,
    ON_AMD: tl.constexpr,
    APART: tl.constexpr,
):
    """Process one work item. In a sequence's item numbers the tile varies fastest, then the KV head, then the split,
    which runs from the last and longest one to the first."""
    q_ptr, k_ptr, v_ptr, table_ptr, words_ptr, partial_ptr, stats_ptr, count_ptr, out_ptr, lse_ptr = pointers
    scale2, cap2, T, W, table_stride, columns, max_splits = numbers
    G: tl.constexpr = HQ // HKV
    first = tl.load(cu_rows_ptr + i_b)
    pairs = (tl.load(cu_rows_ptr + i_b + 1) - first) * G
    kv_len = tl.load(kv_len_ptr + i_b)
    shared = kv_len - tl.load(window_ptr + i_b)  # all rows see the columns before this one
    valid = tl.where(kv_len <= columns, 1.0, float("nan"))  # multiplies the results
    kv_len = tl.minimum(kv_len, columns)
    splits = _split_of(kv_len - 1, UNIT) + 1
    tiles = tl.cdiv(pairs, M)
    i_m = i_item % tiles * M
    i_kv = i_item // tiles % HKV
    i_split = splits - 1 - i_item // (tiles * HKV)
    # Sequence b's counters start at cu_rows[b] * G // M + b, so the counters of different sequences never overlap.
    i_slot = first * G // M + i_b + i_m // M
    # Rows and pairs count from the tile's first: with one 64-bit address a tensor, 32 bits a row pass through the loop.
    m_m = tl.arange(0, M) < pairs - i_m
    i_t = (first + i_m // G).to(tl.int64)
    i_th = i_t * HQ + i_kv * G  # index into [T, HQ]
    o_r = tl.arange(0, M) + (i_m % G if M % G else 0)
    o_t = o_r // G
    o_th = o_t * HQ + o_r % G
    words_ptr += i_t * W
    o_d = tl.arange(0, D_PAD)
    m_md = m_m[:, None] & (o_d < D)[None, :]
    b_q = tl.load(q_ptr + i_th * D + (o_th[:, None] * D + o_d[None, :]), mask=m_md, other=0.0)

    i_layer = i_b // run
    if sink_ptr is not None:
        sink_ptr += i_layer * HQ
    if KV != "plain":
        scale2 *= tl.load(k_scale_ptr + i_layer * HKV + i_kv)
    if CAP:
        inner = scale2 * (2 / cap2 * 1.4426950408889634)
        scale2 = cap2
    p_table = table_ptr + i_b.to(tl.int64) * table_stride
    o_n = tl.arange(0, N)
    o_v = tl.arange(0, D_V)
    o_head = i_kv.to(tl.int64) * HEAD_STRIDE
    b_max = tl.full([M], float("-inf"), tl.float32)
    b_sum = tl.zeros([M], tl.float32)
    b_acc = tl.zeros([M, D_V], tl.float32)
    b_half = tl.zeros([M, D_V], tl.float32)  # second half of the accumulator, if D_V < D_PAD
    start = _split_start(i_split, UNIT)
    stop = tl.minimum(_split_start(i_split + 1, UNIT), kv_len)
    if REACH:  # skip the tiles before the first column of every row
        b_first = shared - REACH + _count_bits(words_ptr, o_t, m_m, kv_len - shared, W)
        start = tl.maximum(start, tl.min(tl.where(m_m, b_first, kv_len), axis=0) // N * N)
        all_see = tl.max(tl.where(m_m, b_first, 0), axis=0)  # from this column on, reach hides no column from any row
    # Load the page id one tile ahead, so that the loads of K and V depend on nothing in their own iteration. A
    # dependent load would be issued only when it is needed.
    if PAGE % N == 0:
        page = tl.load(p_table + start // PAGE)
    else:
        page = tl.load(p_table + (start + o_n) // PAGE, mask=start + o_n < stop, other=0)
    for i_n in tl.range(start, stop, N):
        o_c = i_n + o_n
        if PAGE % N == 0:
            o_page = page.to(tl.int64) * PAGE_STRIDE + (i_n % PAGE) * COLUMN_STRIDE
            o_row = o_n * COLUMN_STRIDE  # a scalar and a constant tile need few registers
        else:
            o_page = 0
            o_row = page.to(tl.int64) * PAGE_STRIDE + (o_c % PAGE) * COLUMN_STRIDE
        m_c = o_c < kv_len
        if not OWN:
            # V first, so that it has arrived when the first product waits for K. Before the second product Triton 3.7
            # puts no fence between the threads' copies of V to shared memory and wgmma, which reads it.
            o_kv = o_head + o_page + (o_row[:, None] + o_d[None, :])
            m_kv = m_c[:, None] & (o_d < D)[None, :]
            b_v = widen(tl.load(v_ptr + o_kv, mask=m_kv, other=0), b_q.dtype, KV)
            b_k = tl.trans(widen(tl.load(k_ptr + o_kv, mask=m_kv, other=0), b_q.dtype, KV))
        if PAGE % N == 0:
            page = tl.load(p_table + tl.minimum(i_n + N, stop - 1) // PAGE)
        else:
            page = tl.load(p_table + (o_c + N) // PAGE, mask=o_c + N < stop, other=0)
        if OWN:
            p_k = k_ptr + o_head + o_page + (o_row[None, :] + o_d[:, None])
            b_k = widen(tl.load(p_k, mask=m_c[None, :] & (o_d < D)[:, None], other=0), b_q.dtype, KV)
        b_s = tl.dot(b_q, b_k, input_precision="ieee")
        if CAP:
            b_s = 1.0 - 2.0 / (tl.exp2(b_s * inner) + 1.0)  # tanh(scale * b_s / cap)
        if i_n + N > shared:
            bits = _window_bits(words_ptr, o_t, m_m, i_n - shared, W)
            bits = (bits | first_bits(shared - i_n)) & first_bits(kv_len - i_n)
            # Use 32-bit halves: the compiler keeps 1 << column of every column; 64-bit values would take 48 registers.
            low, high = bits.to(tl.uint32)[:, None], (bits >> 32).to(tl.uint32)[:, None]
            seen = (tl.where(o_n[None, :] < 32, low, high) >> (o_n % 32)[None, :].to(tl.uint32)) & 1
            b_s = tl.where(seen != 0, b_s, float("-inf"))
        if REACH:  # noqa: SIM102 - without a reach, all_see is undefined
            if i_n < all_see:
                b_s = tl.where(o_n[None, :] >= (b_first - i_n)[:, None], b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, axis=1) * scale2)
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new)  # the row has seen no column yet
        b_p = tl.exp2(tl.fma(b_s, scale2, -b_base[:, None]))
        b_shrink = tl.exp2(b_max - b_base)
        b_sum = b_sum * b_shrink + tl.sum(b_p, axis=1)
        b_p = b_p.to(b_q.dtype)
        b_acc = b_acc * b_shrink[:, None]
        if OWN:
            p_v = v_ptr + o_head + o_page + (o_row[:, None] + o_v[None, :])
            b_v = widen(tl.load(p_v, mask=m_c[:, None] & (o_v < D)[None, :], other=0), b_q.dtype, KV)
        b_acc = tl.dot(b_p, b_v, b_acc, input_precision="ieee")
        if D_V < D_PAD:
            b_v = widen(tl.load(p_v + D_V, mask=m_c[:, None] & (o_v + D_V < D)[None, :], other=0), b_q.dtype, KV)
            b_half = b_half * b_shrink[:, None]
            b_half = tl.dot(b_p, b_v, b_half, input_precision="ieee")
        b_max = b_new
    let_next_start(PDL)

    if D_V < D_PAD:
        b_acc = tl.reshape(tl.permute(tl.join(b_acc, b_half), (0, 2, 1)), (M, D_PAD))
    if KV != "plain":
        b_acc *= tl.load(v_scale_ptr + i_layer * HKV + i_kv)

    if splits == 1:
        b_sum = tl.where(m_m, b_sum, 1.0)
        o_h = i_kv * G + o_r % G
        rows = out_ptr + i_th * D, lse_ptr + i_th
        _finish(rows, sink_ptr, o_th, o_h, m_m, b_acc, b_max, b_sum, valid, D, D_PAD)
    else:
        stats = max_splits.to(tl.int64) * T * HQ
        o_p = (i_th + o_th) * max_splits + i_split
        tl.store(partial_ptr + o_p[:, None] * D + o_d[None, :], b_acc, mask=m_md)
        tl.store(stats_ptr + o_p, b_max, mask=m_m)
        tl.store(stats_ptr + stats + o_p, b_sum, mask=m_m)
        if not APART and is_last(count_ptr + i_slot * HKV + i_kv, splits, ON_AMD):
            for i_p in tl.range(0, tl.minimum(M, pairs - i_m), P):
                o_pair = i_m + i_p + tl.arange(0, P)
                o_h = i_kv * G + o_pair % G
                o_row = (first + o_pair // G).to(tl.int64) * HQ + o_h
                parts = partial_ptr, stats_ptr, out_ptr, lse_ptr
                m_pair = o_pair < pairs
                _merge(parts, sink_ptr, o_row, o_h, m_pair, splits, max_splits, stats, valid, D, D_PAD, P, S)


@triton.jit(
    do_not_specialize=["run", "T", "B", "columns", "max_splits"],
    do_not_specialize_on_alignment=["sink_ptr", *SMALL],
)
def _tree_attention_merge_kernel(
    partial_ptr,
    stats_ptr,
    kv_len_ptr,
    cu_rows_ptr,
    out_ptr,
    lse_ptr,
    sink_ptr,
    run,
    T,
    B,
    columns,
    max_splits,
    HQ: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    UNIT: tl.constexpr,
    P: tl.constexpr,
    S: tl.constexpr,
    SEQS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the splits of P heads of a row; the arguments are those of _tree_attention_kernel."""
    start_after_previous(PDL)
    i_t = tl.program_id(0)
    i_b = tl.full([], 0, tl.int32)
    if SEQS > 1:
        o_b = tl.arange(0, SEQS)
        ends = tl.load(cu_rows_ptr + 1 + o_b, mask=o_b < B, other=2**31 - 1)
        i_b = tl.minimum(tl.sum((ends <= i_t).to(tl.int32), axis=0), B - 1)
    kv_len = tl.load(kv_len_ptr + i_b)
    valid = tl.where(kv_len <= columns, 1.0, float("nan"))
    splits = _split_of(tl.minimum(kv_len, columns) - 1, UNIT) + 1
    if splits > 1:
        if sink_ptr is not None:
            sink_ptr += i_b // run * HQ
        o_h = tl.program_id(1) * P + tl.arange(0, P)
        stats = max_splits.to(tl.int64) * T * HQ
        parts = partial_ptr, stats_ptr, out_ptr, lse_ptr
        o_th = i_t.to(tl.int64) * HQ + o_h
        _merge(parts, sink_ptr, o_th, o_h, o_h < HQ, splits, max_splits, stats, valid, D, D_PAD, P, S)


@triton.jit
def _merge(
    pointers,  # partial_ptr, stats_ptr, out_ptr, lse_ptr of the kernel
    sink_ptr,  # [HQ], or None
    o_th,  # [P] (row, query head) pairs
    o_h,  # [P] their query heads
    m,  # [P] whether each exists
    splits,
    max_splits,
    stats,  # distance in elements from a maximum to its sum
    valid,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    P: tl.constexpr,
    S: tl.constexpr,
):
    """Merge the splits of each pair in order. Splits are the first axis of the tiles: Triton distributes warps over the
    axes from the last to the first, so each warp owns whole pairs, and a sum over splits stays within a thread."""
    partial_ptr, stats_ptr, out_ptr, lse_ptr = pointers
    o_d = tl.arange(0, D_PAD)
    o_first = (o_th * max_splits)[None, :]
    b_best = tl.full([P], float("-inf"), tl.float32)
    for i_s in tl.range(0, splits, S):
        o_s = i_s + tl.arange(0, S)[:, None]
        b_max = tl.load(stats_ptr + o_first + o_s, mask=m[None, :] & (o_s < splits), other=float("-inf"))
        b_best = tl.maximum(b_best, tl.max(b_max, axis=0))
    b_best = tl.where(m, b_best, 0.0)
    b_sum = tl.zeros([P], tl.float32)
    b_acc = tl.zeros([P, D_PAD], tl.float32)
    for i_s in tl.range(0, splits, S):
        o_s = i_s + tl.arange(0, S)[:, None]
        m_s = m[None, :] & (o_s < splits)
        o_sp = o_first + o_s
        b_max = tl.load(stats_ptr + o_sp, mask=m_s, other=float("-inf"))
        b_part_sum = tl.load(stats_ptr + stats + o_sp, mask=m_s, other=0.0)
        p_part = partial_ptr + o_sp[:, :, None] * D + o_d[None, None, :]
        b_part = tl.load(p_part, mask=m_s[:, :, None] & (o_d < D)[None, None, :], other=0.0)
        b_weight = tl.exp2(b_max - b_best[None, :])
        b_sum += tl.sum(b_weight * b_part_sum, axis=0)
        b_acc += tl.sum(b_weight[:, :, None] * b_part, axis=0)
    b_sum = tl.where(m, b_sum, 1.0)
    _finish((out_ptr, lse_ptr), sink_ptr, o_th, o_h, m, b_acc, b_best, b_sum, valid, D, D_PAD)


@triton.jit
def _finish(pointers, sink_ptr, o_th, o_h, m, b_acc, b_max, b_sum, valid, D: tl.constexpr, D_PAD: tl.constexpr):
    """Write out and lse of the (row, query head) pairs o_th, of the heads o_h: b_acc [pairs, D_PAD] over b_sum [pairs],
    to which a sink adds. `valid`: 1, or NaN for rows without a result."""
    out_ptr, lse_ptr = pointers
    o_d = tl.arange(0, D_PAD)
    if sink_ptr is not None:
        b_sink = tl.load(sink_ptr + o_h, mask=m, other=0.0).to(tl.float32) * 1.4426950408889634
        b_top = tl.maximum(b_max, b_sink)
        b_shrink = tl.exp2(b_max - b_top)
        b_acc *= b_shrink[:, None]
        b_sum = b_sum * b_shrink + tl.exp2(b_sink - b_top)
        b_max = b_top
    b_out = b_acc / b_sum[:, None] * valid
    m_md = m[:, None] & (o_d < D)[None, :]
    tl.store(out_ptr + o_th[:, None] * D + o_d[None, :], b_out.to(out_ptr.dtype.element_ty), mask=m_md)
    tl.store(lse_ptr + o_th, (b_max + tl.log2(b_sum)) * 0.6931471805599453 * valid, mask=m)


class Shape(NamedTuple):
    dtype: torch.dtype
    B: int
    Hq: int
    Hkv: int
    D: int
    page: int
    strides: tuple[int, ...]  # of the caches' pages, columns and heads
    reach: int = 0
    cap: bool = False
    sinks: torch.dtype | None = None
    kind: str = "plain"
    apart: bool = False  # the splits are merged by a launch of its own
    prefetch: Prefetch = NONE


@lru_cache(maxsize=256)
def _variant(shape: Shape, arch: int) -> Variant:
    """The M tile is 64 for any number of rows, 32 for D 512. wgmma requires 64; on sm_80 the tile decides how Triton
    places the warps, and with it the order of the sums. 4 warps make one warpgroup.

    sm_80: each warp owns 16 whole rows, so no data of a row crosses warps, and a tile of columns needs only the three
    barriers of its copies. Triton assigns the warps this way only if it sees that the loop's products are connected,
    and if no result has more columns than rows. It follows values, but neither into the mask's `if` nor through a
    transposition. So K is read transposed (OWN), which connects the products by the tile's address, and V of 128
    columns is multiplied in halves (D_V). Each warp would convert a whole tile of eight bits itself, so there the warps
    share the columns instead. D 256 needs 8 warps for its accumulator, two for each 16 rows: there a
    row's maximum crosses warps, and a tile takes eight barriers.

    sm_90, half precision, D 128: a tile of 64 columns is 32 KiB of K and V. Two tiles are in flight while one is
    computed. Three buffers and q's 16 KiB take 112 KiB, so two blocks fill an SM's shared memory and registers. 64 to
    128 KiB per SM are in flight; 132 SMs at 4.3 TB/s and 1 us latency need 33. One block's exponentials overlap the
    other's products. sm_100 has the same space. sm_80 (164 KiB) takes tiles of 32 columns, three in flight, for two
    blocks per SM. gfx942 (64 KiB of LDS) keeps one tile of 64 columns in LDS and one in registers; gfx950 (160 KiB)
    keeps two and one. D 256 splits the accumulator over 8 warps. D 512 (Gemma 4's full layers) does the same with 32
    rows: the accumulator of 64 takes 128 registers of each thread, and with the indices of a batch that Triton 3.7
    hoists out of the loop, sm_90 and sm_100 spill. Their 32 rows run on mma.sync. A tile of 32 columns is 64 KiB of K
    and V, one in flight while one is computed; with q that is 98 KiB. AMD takes 16 columns. float32 uses FMA in small
    tiles, for correctness only.

    The merge holds 32 splits of four pairs, 64 KiB at D 128, in the registers that the accumulator no longer needs. A
    warp owns a pair, so sums over splits stay within a thread. For one row of Llama-3-8B at 8,192 columns (four pairs a
    KV head, 32 splits) that takes one round of loads from L2; 32,768 columns (64 splits) take two.
    """
    dtype, B, Hq, Hkv, D, page, strides, reach, cap, sinks, kind, apart, prefetch = shape
    t, d_pad = TYPES[dtype], max(16, 1 << (D - 1).bit_length())
    half = dtype != torch.float32
    M, N = (64, 32 if d_pad > 128 or arch == 80 else 64) if half else (16, 32)
    if d_pad > 256:
        M, N = min(M, 32), 32 if half and arch not in AMD else 16
    if arch in AMD:
        stages = 3 if arch == 950 else 2
    else:
        stages = 3 if arch > 80 else 2 if d_pad > 128 else 4 if half else 3  # 99 KiB is the limit of consumer cards
    if d_pad > 256:
        stages = 2 if half or (arch > 80 and arch not in AMD) else 1  # with two, float32 spills on sm_80
    own = arch == 80 and half and d_pad <= 128 and kind == "plain"
    seqs = 1 if B == 1 else max(16, 1 << (B - 1).bit_length())
    name = f"{t} {Hq}/{Hkv} D{D} page {page}" + (f" B{seqs}" if seqs > 1 else "")
    name += f" reach {reach}" if reach else ""
    name += " capped" * cap + (f" sinks {TYPES[sinks]}" if sinks else "") + named(kind)
    name += f" prefetch {prefetch.rows}x{prefetch.lines}" * bool(prefetch.programs)
    name += " apart" if apart else ""
    smoke = dtype == torch.bfloat16 and D == 128 and B == 1 and page == 256 and not apart
    limit = None  # of registers
    if half and d_pad <= 64:
        # Three blocks an SM: for sm_100, ptxas of Triton 3.9 tries four, whose shared memory does not fit, and spills.
        # With several sequences on sm_80 three would spill 8 bytes, and two keep enough in flight.
        limit = 168 if seqs == 1 else 176 if arch == 80 and not apart else None
    k, v, *scales = cache_types(t, kind)
    return Variant(
        name=name,
        kernel=_tree_attention_kernel,
        arguments=(
            *(f"*{t}", k, v),
            *("*i32",) * 4,
            "*i64",
            "*fp32",
            "*fp32",
            "*i32",
            f"*{t}",
            "*fp32",
            f"*{TYPES[sinks]}" if sinks else None,
            *scales,
            "*u8" if prefetch.programs else None,
            "fp32",
            "fp32",
            *("i32",) * 7,
        ),
        constexprs={
            "HQ": Hq,
            "HKV": Hkv,
            "D": D,
            "D_PAD": d_pad,
            "D_V": min(d_pad, 64) if own else d_pad,
            "OWN": own,
            "PAGE": page,
            "PAGE_STRIDE": strides[0],
            "COLUMN_STRIDE": strides[1],
            "HEAD_STRIDE": strides[2],
            "UNIT": split_unit(Hkv),
            "M": M,
            "N": N,
            "P": 4 if half else 16,
            "S": (32 if d_pad <= 128 else 16) if half else 1,
            "SEQS": seqs,
            "REACH": reach,
            "CAP": cap,
            "KV": kind,
            "PREFETCH": prefetch,
            "APART": apart,
        },
        num_warps=8 if d_pad > 128 else 4,
        num_stages=stages,
        dot=half,
        wide=D * (dtype.itemsize if kind == "plain" else 1) % 16 == 0,
        smoke=smoke,
        options={} if limit is None else {"maxnreg": limit},
    )


@lru_cache(maxsize=256)
def _merge_variant(of: Variant) -> Variant:
    """The kernel that merges the splits of the variant `of`, with as many warps: a pair's sums have the same order."""
    names = ("HQ", "D", "D_PAD", "UNIT", "P", "S", "SEQS")
    return Variant(
        name=f"merge {of.name.removesuffix(' apart')}",
        kernel=_tree_attention_merge_kernel,
        arguments=("*fp32", "*fp32", "*i32", "*i32", of.arguments[0], "*fp32", of.arguments[13], *("i32",) * 5),
        constexprs={name: of.constexprs[name] for name in names},
        num_warps=of.num_warps,
        wide=of.wide and of.constexprs["S"] > 1,  # in float32 maxima and sums are too large a part of what is read
        smoke=of.smoke,
    )


def variants(arch: int) -> Iterator[Variant]:
    """The variants compiled by the compile-only checks for sm_`arch`; the launcher takes any heads, D, page,
    strides."""
    bf16, f16 = torch.bfloat16, torch.float16
    llama = _shape(bf16, 1, 32, 8, 128)
    for shape in (
        llama,
        llama._replace(B=16),
        llama._replace(reach=4096),
        llama._replace(prefetch=Prefetch(132, 4096, 8192, 16)),
        _shape(bf16, 1, 32, 8, 128, page=16),
        _shape(bf16, 1, 32, 8, 64),
        _shape(bf16, 16, 32, 8, 64),
        _shape(bf16, 1, 14, 2, 64),
        _shape(bf16, 1, 32, 32, 96),
        _shape(bf16, 1, 16, 8, 256),
        _shape(bf16, 16, 32, 4, 512),
        llama._replace(dtype=f16),
        llama._replace(dtype=torch.float32),
    ):
        yield _variant(shape, arch)
        yield _variant(shape._replace(apart=True), arch)
        yield _merge_variant(_variant(shape, arch))
    for shape, window in (
        (_shape(bf16, 1, 64, 8, 64)._replace(sinks=bf16), 128),  # gpt-oss
        (_shape(bf16, 1, 16, 8, 256)._replace(cap=True), 4096),  # Gemma 2
    ):
        yield _variant(shape._replace(reach=window, apart=True), arch)
        yield _merge_variant(_variant(shape._replace(reach=window, apart=True), arch))
        yield _variant(shape._replace(B=16), arch)
    for kind in NARROW.values():
        for shape in (_shape(bf16, 1, 32, 8, 64), llama, llama._replace(B=16), _shape(bf16, 1, 32, 8, 256)):
            yield _variant(shape._replace(kind=kind), arch)
        yield _variant(_shape(f16, 1, 32, 8, 128, page=16)._replace(kind=kind), arch)


def _shape(dtype: torch.dtype, B: int, Hq: int, Hkv: int, D: int, page: int = 256) -> Shape:
    """A shape with contiguous caches."""
    return Shape(dtype, B, Hq, Hkv, D, page, (page * Hkv * D, Hkv * D, D))


@takes(Arguments)
def launch(args: Arguments) -> tuple[Tensor, Tensor]:
    q, k_cache, v_cache, block_table = args.q.contiguous(), args.k_cache, args.v_cache, rowwise(args.block_table)
    kv_len, cu_rows, sinks, k_scale = args.kv_len.contiguous(), args.cu_rows.contiguous(), args.sinks, args.k_scale
    scale, cap, strides = float(args.scale), float(args.cap), k_cache.stride()  # they may be numpy's numbers
    if strides != v_cache.stride() or strides[3] != 1:
        raise ValueError(
            f"the caches must have one layout with adjacent elements, got strides {strides} and {v_cache.stride()}"
        )
    (T, Hq, D), (_, page, Hkv, _), (B, max_pages) = q.shape, k_cache.shape, block_table.shape
    out, lse = torch.empty_like(q), q.new_empty((T, Hq), dtype=torch.float32)
    if T == 0:
        return out, lse
    splits = split_count(max_pages * page, split_unit(Hkv))
    several = splits if splits > 1 else 0
    apart = splits > 1 and T * (Hq // Hkv) > MERGED * B
    sink = None if sinks is None else sinks.dtype
    w, prefetch = prefetch_of(args.following)
    kind = kind_of(k_cache)
    shape = Shape(q.dtype, B, Hq, Hkv, D, page, strides[:3], args.reach, cap > 0, sink, kind, apart, prefetch)
    variant = _variant(shape, arch(q.device))
    partial = q.new_empty((T, Hq, several, D), dtype=torch.float32)
    stats = q.new_empty((2, T, Hq, several), dtype=torch.float32)
    # A sequence with x (row, query head) pairs takes ceil(x / M) tiles; sum(x) // M + B slots hold them all.
    slots = T * (Hq // Hkv) // variant.constexprs["M"] + B
    count = counters(q.device, slots * Hkv)
    run = B // max(len(x) if x is not None else 1 for x in (sinks, k_scale))
    columns = max_pages * page
    programs = slots * Hkv * splits
    if B > 1:
        programs = min(programs, PROGRAMS * sms(q.device))
    sinks = None if sinks is None else sinks.contiguous()
    variant(
        (programs + prefetch.programs,),
        q,
        as_bytes(k_cache),
        as_bytes(v_cache),
        block_table,
        kv_len,
        args.window.contiguous(),
        cu_rows,
        args.ancestors.contiguous(),
        partial,
        stats,
        count,
        out,
        lse,
        sinks,
        k_scale,
        args.v_scale,
        w,
        scale * _LOG2E,
        cap * _LOG2E,
        run,
        T,
        B,
        args.ancestors.shape[1],
        block_table.stride(0),
        columns,
        splits,
    )
    if apart:
        merge = _merge_variant(variant)
        grid = T, -(-Hq // merge.constexprs["P"])
        merge(grid, partial, stats, kv_len, cu_rows, out, lse, sinks, run, T, B, columns, splits)
    return out, lse


def _check(args: Arguments) -> None:
    q, k_cache, v_cache, block_table, kv_len = args.q, args.k_cache, args.v_cache, args.block_table, args.kv_len
    window, cu_rows, ancestors, sinks, k_scale = args.window, args.cu_rows, args.ancestors, args.sinks, args.k_scale
    if q.dim() != 3 or k_cache.dim() != 4 or k_cache.shape != v_cache.shape or q.shape[2] != k_cache.shape[3]:
        raise ValueError(
            "expected q [T, Hq, D] and caches [pages, page, Hkv, D]: "
            f"q {tuple(q.shape)}, k_cache {tuple(k_cache.shape)}, v_cache {tuple(v_cache.shape)}"
        )
    if q.shape[1] % k_cache.shape[2]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k_cache.shape[2]} KV heads")
    check_cache(q, k_cache, v_cache, k_scale, args.v_scale)
    B = block_table.shape[0] if block_table.dim() else 0
    if kv_len.shape != (B,) or block_table.dim() != 2 or window.shape != (B,) or cu_rows.shape != (B + 1,):
        raise ValueError(
            "expected block_table [B, P], kv_len [B], window [B], cu_rows [B + 1]: "
            f"{tuple(block_table.shape)}, {tuple(kv_len.shape)}, {tuple(window.shape)}, {tuple(cu_rows.shape)}"
        )
    if not block_table.dtype == kv_len.dtype == window.dtype == cu_rows.dtype == torch.int32:
        raise ValueError(
            "block_table, kv_len, window and cu_rows must be int32, "
            f"got {block_table.dtype}, {kv_len.dtype}, {window.dtype}, {cu_rows.dtype}"
        )
    if ancestors.dim() != 2 or ancestors.shape[0] != q.shape[0] or not 1 <= ancestors.shape[1] <= MAX_WORDS:
        raise ValueError(f"ancestors must be [{q.shape[0]}, 1..{MAX_WORDS}], got {tuple(ancestors.shape)}")
    if ancestors.dtype != torch.int64:
        raise ValueError(f"ancestors must be int64 words, got {ancestors.dtype}")
    if not args.scale > 0:
        raise ValueError(f"scale must be positive, got {args.scale}")
    if args.reach < 0:
        raise ValueError(f"reach must be at least 0, got {args.reach}")
    if not 0 <= args.cap < math.inf:
        raise ValueError(f"cap must be at least 0, and 0 is none; got {args.cap}")
    if sinks is not None and (sinks.dim() != 2 or sinks.shape[1] != q.shape[1] or not sinks.is_floating_point()):
        raise ValueError(f"sinks must be [G, {q.shape[1]}] floating, got {tuple(sinks.shape)} {sinks.dtype}")
    for name, layers in (("sinks", sinks), ("k_scale", k_scale)):
        if layers is not None and (not len(layers) or B % len(layers)):
            raise ValueError(f"{name} must have G rows for G equal runs of {B} sequences, got {tuple(layers.shape)}")
    if sinks is not None and k_scale is not None and len(sinks) != len(k_scale):
        raise ValueError(f"sinks and k_scale must have as many rows, got {len(sinks)} and {len(k_scale)}")
    same_device(q, sinks=sinks)
    others = {"block_table": block_table, "kv_len": kv_len, "window": window, "cu_rows": cu_rows}
    same_device(q, k_cache=k_cache, v_cache=v_cache, ancestors=ancestors, **others)


def _fake(args: Arguments) -> tuple[Tensor, Tensor]:
    q = args.q
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))


def _fits(args: Arguments) -> bool:
    """Whether the kernel serves the arguments: the reach must not hide a column of the window."""
    return args.reach == 0 or args.reach >= 64 * args.ancestors.shape[1]


_tree_attention = register(
    tree_attention, Arguments, check=_check, reference=tree_attention_ref, launch=launch, fake=_fake, fits=_fits
)
