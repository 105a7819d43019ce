"""delta_rows: the gated delta rule for draft rows, without a state that has to be rewound.

A layer keeps its state only at anchors, columns that are multiples of BLOCK and lie at least BLOCK before a row. For
each column after its anchor it keeps a record, as attention keeps K and V. A row reads the state of its anchor once,
and the records of its path. So a refused draft is a record that is overwritten, a tree is the ancestor bits that
attention has, and what a row computes depends on its path alone.

A program computes 32 columns of one value head of one sequence; of a head's programs the last one to finish norms its
rows. Products with the state and between keys are matrix products. What they weigh, the updates u of a row's path, is
added column by column in the order of the path, 32 columns in one product of FMAs, and columns that a row does not see
add an exact 0. So a row has the same bits whether it is decoded alone, in a chain or in a tree. The rows of a tile
depend on each other: all are computed anew, from the same sums, as often as the longest path in the tile has steps.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specker.kernels.ancestors import check_sequences, check_words, parent_of
from specker.kernels.registry import register, takes
from specker.kernels.variant import (
    TYPES,
    Kinds,
    Variant,
    check_dims,
    check_kinds,
    check_within,
    counters,
    is_last,
    rowwise,
    same_device,
    start_after_previous,
    tl,
    triton,
)

EPS = 1e-6  # of the norm of q and k
BLOCK = 32  # of the models here, whose drafts are at most so deep
MAX_BLOCK = 1 << 30
PAGE = 64  # records of a page, likewise
WRITTEN = "states", "anchors", "k_records", "u_records", "g_records"


def delta_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    state_of: Tensor,
    anchors: Tensor,
    k_records: Tensor,
    u_records: Tensor,
    g_records: Tensor,
    positions: Tensor,
    slots: Tensor,
    block_table: Tensor,
    kv_len: Tensor,
    window: Tensor,
    cu_rows: Tensor,
    ancestors: Tensor | None,
    block: int,
    z: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """The gated delta rule for draft rows, prompts and decoding: each row by its own path, over an anchored state.

        g = -exp(a_log) * softplus(a + dt_bias),  beta = sigmoid(b);  q and k of length 1, q times Dk^-0.5
        S_i = exp(g_i) S_p + k_i u_i^T,  u_i = beta_i (v_i - exp(g_i) S_p^T k_i),  o_i = S_i^T q_i   (p: i's parent)

    unrolled to the anchor A of row i, with G_i the sum of g over the path from A to i, and j its ancestors from A on:

        u_i = beta_i (v_i - exp(G_i) S_A^T k_i - sum_j exp(G_i - G_j) (k_j . k_i) u_j)
        o_i = exp(G_i) S_A^T q_i + sum_j exp(G_i - G_j) (k_j . q_i) u_j + (k_i . q_i) u_i

    The anchor of position p is (p // block - 1) * block, at least 0: a state is of text that no draft can change, as
    long as a draft's path has at most `block` tokens. A column's record is (k, u, decays), which the op writes at the
    row's slot, as attention's K and V are written. States move on within the op: when a row's anchor is beyond
    `anchors`, the records of the next block are added to the state, in order; the state before it is kept beside.

    With `z` and `norm` the output is normalised and gated: o * rsqrt(mean(o^2) + eps) * norm * silu(z), by head.

    Value heads are independent; each Hv / Hk of them share a key head. A row's bits depend on its path alone: sums over
    columns run in the path's order, and columns that a row does not see add 0. Memory moves each sequence's state and
    the records after it once, 64 to 96 of them with block 32, and a new state once in `block` tokens. The kernel serves
    heads with Dk 16 or a multiple of 32 and Dv a power of two, the reference others.

    Args:
        q: [T, Hk, Dk], the rows of all sequences, one sequence after another; heads adjacent, rows at any stride.
        k: as q.
        v: [T, Hv, Dv], likewise.
        a: [T, Hv], likewise.
        b: [T, Hv], likewise.
        a_log: [Hv], float32 (float64 for float64).
        dt_bias: [Hv], as a_log.
        states: [X, 2, Hv, Dk, Dv] float32 (float64 for float64); the state of anchor A stands in half A / block % 2. A
            new text's half 0 must be 0.
        state_of: [B] int64, each sequence's states.
        anchors: [X, Hv] int64, the highest anchor so far of a row in each text, which the op moves on; 0 at its
            beginning. To go back to an earlier column, set that column's anchor, if its half still has the state.
        k_records: [pages, page_size, Hk, Dk], of states' dtype; columns before kv_len must be finite.
        u_records: [pages, page_size, Hv, Dv], likewise.
        g_records: [pages, page_size, Hv, 4], likewise: the decays since the beginning of the column's block, those of
            the block before, the column's position, and 1 / |k| before it was scaled.
        positions: [T] int64, of each row in its text: one more than its parent's.
        slots: [T] int64, where the row's record is written, as an index into the flattened pages.
        block_table: [B, P] int32, page ids.
        kv_len: [B] int32, columns of each sequence, the window included. The rows are its last ones, in order.
        window: [B] int32, columns of the window.
        cu_rows: [B + 1] int32; sequence b owns rows cu_rows[b] to cu_rows[b + 1].
        ancestors: [T, W] int64, W <= 4; see `ancestor_words`. None: the rows of a sequence are a chain after all
            columns before them.
        block: a power of two from 16 to 2^30.
        z: [T, Hv, Dv] or None, strided like v.
        norm: [Dv], if there is a z.
        eps: of the norm.

    Returns:
        [T, Hv, Dv], of v's dtype.

    Raises:
        TypeError: an argument of another type.
        ValueError: other shapes, dtypes or devices; on a CPU also slots, pages, rows and columns outside of the cache,
            positions behind their columns, states that are none, and anchors between blocks.

    Source: gated delta rule, arXiv 2412.06464; its WY form, arXiv 2406.06484, with an ancestor mask.

    Examples:
        >>> import torch
        >>> from specker.kernels import delta_rows
        >>> ones, zeros, first = torch.ones(2, 1, 1), torch.zeros(2, 1), torch.zeros(1, dtype=torch.int64)
        >>> own = ones, ones, ones, zeros - 100, zeros, torch.zeros(1), torch.zeros(1)  # no decay, beta 0.5
        >>> records = [torch.zeros(1, 16, 1, n) for n in (1, 1, 4)]  # one page of 16 columns
        >>> ints = [torch.tensor(x, dtype=torch.int32) for x in ([[0]], [2], [0], [0, 2])]
        >>> at, states, anchors = torch.arange(2), torch.zeros(1, 2, 1, 1, 1), first[None]
        >>> out = delta_rows(*own, states, first, anchors, *records, at, at, *ints, None, 16)
        >>> [round(x, 2) for x in out.flatten().tolist()]  # each token halves what is missing to its value, 1
        [0.5, 0.75]
    """
    return _delta_rows(
        q,
        k,
        v,
        a,
        b,
        a_log,
        dt_bias,
        states,
        state_of,
        anchors,
        k_records,
        u_records,
        g_records,
        positions,
        slots,
        block_table,
        kv_len,
        window,
        cu_rows,
        ancestors,
        block,
        z,
        norm,
        eps,
    )


def anchor(position: int, block: int) -> int:
    """The columns that the state of a row at `position` holds."""
    return max(0, position // block - 1) * block


def _anchors(positions: Tensor, block: int) -> Tensor:
    return (positions // block - 1).clamp_(min=0) * block


class Arguments(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    a_log: Tensor
    dt_bias: Tensor
    states: Tensor
    state_of: Tensor
    anchors: Tensor
    k_records: Tensor
    u_records: Tensor
    g_records: Tensor
    positions: Tensor
    slots: Tensor
    block_table: Tensor
    kv_len: Tensor
    window: Tensor
    cu_rows: Tensor
    ancestors: Tensor | None
    block: int
    z: Tensor | None = None
    norm: Tensor | None = None
    eps: float = 1e-6


@takes(Arguments)
def delta_rows_ref(args: Arguments) -> Tensor:
    q, k, v, block, ancestors = args.q, args.k, args.v, args.block, args.ancestors
    positions, slots, kv_len, window, cu_rows = args.positions, args.slots, args.kv_len, args.window, args.cu_rows
    states, state_of, anchors, block_table = args.states, args.state_of, args.anchors, args.block_table
    Hv, Hk, (pages, page) = v.shape[1], q.shape[1], args.k_records.shape[:2]
    if q.is_cpu:
        check_within("slots", slots, pages * page)
        check_sequences(len(q), pages, page, args)
        _check_states(args)
    wide = torch.promote_types(q.dtype, torch.float32)
    scale = torch.rsqrt((k.to(wide) ** 2).sum(-1) + EPS)
    q, k = unit(q.to(wide)) * q.shape[-1] ** -0.5, unit(k.to(wide))
    g = -args.a_log.exp() * F.softplus(args.a.to(wide) + args.dt_bias)
    beta = args.b.to(wide).sigmoid()
    out = torch.empty(v.shape, dtype=wide, device=v.device)
    flat = [x.flatten(0, 1) for x in (args.k_records, args.u_records, args.g_records)]
    offsets = torch.arange(page, dtype=torch.int64, device=q.device)
    for n in range(len(kv_len)):
        first, last = int(cu_rows[n]), int(cu_rows[n + 1])
        length, at = int(kv_len[n]), int(state_of[n])
        column = (block_table[n].long()[:, None] * page + offsets).flatten()
        for t in range(first, last, last - first if ancestors is not None else block):  # a chain in blocks
            rows = slice(t, min(last, t + block) if ancestors is None else last)
            start = length - (last - t)  # the column of the first of these rows
            p = positions[rows]
            at_of = _anchors(p, block)
            low, count = int(at_of.min()), len(p)
            seen = torch.ones(count, start - low + count, dtype=torch.bool, device=q.device).tril(start - low - 1)
            if ancestors is not None:
                before = length - int(window[n]) - low
                seen[:, before:] &= bits_of(ancestors[rows], seen.shape[1] - before)
            own = states[at]
            for done in range(int(anchors[at].max()), int(at_of.max()), block):
                past = column[done : done + block]
                own[(done // block + 1) % 2] = _folded(own[done // block % 2], *(x[past] for x in flat))
                anchors[at] = done + block
            c, e = _decays(g[rows], p, seen, flat[2][column[low:start]], block)
            where = slots[rows]
            ends = p.to(wide)[:, None].expand_as(c)
            flat[0][where] = k[rows]
            flat[2][where] = torch.stack((c, e, ends, scale[rows].repeat_interleave(Hv // Hk, 1)), -1)
            columns = torch.cat((column[low:start], where))
            out[rows] = _rows(q[rows], k[rows], v[rows].to(wide), beta[rows], own, seen, columns, flat, block)
    if args.z is not None and args.norm is not None:
        out = F.rms_norm(out, out.shape[-1:], None, args.eps) * args.norm.to(wide) * F.silu(args.z.to(wide))
    return out.to(v.dtype)


def _check_states(args: Arguments) -> None:
    """Raise ValueError for positions behind their columns, states that are none, and anchors between blocks. Reads them
    on the host."""
    starts = args.cu_rows.tolist()
    for b, length in enumerate(args.kv_len.tolist()):
        check_within("positions", args.positions[starts[b] : starts[b + 1]], length)
    check_within("state_of", args.state_of, len(args.anchors))
    anchors = args.anchors[args.state_of]
    if bool((anchors % args.block).any()) or bool((anchors < 0).any()):
        raise ValueError(f"anchors must be multiples of block {args.block}, at least 0, got {anchors.tolist()}")


def bits_of(words: Tensor, count: int) -> Tensor:
    """The first `count` bits of words [T, W] int64, [T, count] bool."""
    at = torch.arange(count, dtype=torch.int64, device=words.device)
    return (words[:, at // 64] >> at % 64 & 1).bool()


def _folded(S: Tensor, k: Tensor, u: Tensor, g: Tensor) -> Tensor:
    """The state [Hv, Dk, Dv] after a block of records."""
    total = g[-1, :, 0]
    kj = (total - g[..., 0]).exp()[..., None] * k.repeat_interleave(u.shape[1] // k.shape[1], 1)
    return total.exp()[:, None, None] * S + torch.einsum("jhk,jhv->hkv", kj, u)


def _decays(g: Tensor, p: Tensor, seen: Tensor, earlier: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The decays [T, Hv] since the beginning of each row's block, and of the block before it."""
    each = list(earlier[..., :2].unbind(0))
    before = seen.cumsum(1).argmax(1).tolist()  # each row's parent
    some = seen.any(1).tolist()
    for t, position in enumerate(p.tolist()):
        c, e = each[before[t]].unbind(-1) if some[t] else (torch.zeros_like(g[t]), torch.zeros_like(g[t]))
        each.append(torch.stack((c + g[t], e) if position % block else (g[t], c), -1))
    c, e = torch.stack(each[len(earlier) :]).unbind(-1)
    return c, e


def _rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    S: Tensor,
    seen: Tensor,
    columns: Tensor,
    records: list[Tensor],
    block: int,
) -> Tensor:
    """The outputs [T, Hv, Dv] of rows that see the `columns` marked in `seen` [T, columns]. The last T columns are the
    rows' own; their records are complete but for u, which is written."""
    ks, us, gs = records
    group = v.shape[1] // k.shape[1]
    q, k = q.repeat_interleave(group, 1), k.repeat_interleave(group, 1)
    count = len(columns) - len(q)
    past, own = columns[:count], columns[count:]
    c, e, p = gs[columns, :, 0], gs[own, :, 1], gs[columns, 0, 2].long()
    at_of = _anchors(p[count:], block)
    far = c[count:] + e
    reach = torch.where((p[count:] < at_of + block)[:, None], c[count:], far).exp()[..., None]
    kS, qS = torch.empty_like(v), torch.empty_like(v)
    for at in at_of.unique().tolist():
        kS[at_of == at], qS[at_of == at] = (
            torch.einsum("thk,hkv->thv", x[at_of == at], S[at // block % 2]) for x in (k, q)
        )
    near = (p // block)[None] == (p[count:] // block)[:, None]
    w = torch.where(near[..., None], c[count:, None], far[:, None]) - c[None]
    w = torch.where((seen & (p[None] >= at_of[:, None]))[..., None], w.exp(), 0.0).movedim(2, 0)  # [Hv, T, S]
    kj = ks[columns].repeat_interleave(group, 1)
    kk, qk = (torch.einsum("thk,jhk->htj", x, kj) * w for x in (k, q))
    known = us[past]
    rest = v - reach * kS - torch.einsum("htj,jhv->thv", kk[..., :count], known)
    system = beta.T[..., None] * kk[..., count:]
    u = torch.linalg.solve_triangular(system, (beta[..., None] * rest).transpose(0, 1), upper=False, unitriangular=True)
    us[own] = u.transpose(0, 1)
    o = reach * qS + torch.einsum("htj,jhv->thv", qk[..., :count], known)
    return o + torch.einsum("htj,hjv->thv", qk[..., count:], u) + (k * q).sum(-1, keepdim=True) * us[own]


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)


@triton.jit
def _row(p_table, column, PAGE: tl.constexpr):
    """Where a column's records are."""
    return tl.load(p_table + column // PAGE).to(tl.int64) * PAGE + column % PAGE


@triton.jit
def _keys(k_rec, p_new, k_stride, start, o_j, m_j, b_row, b_scale, o_d, STRIDE: tl.constexpr):
    """The keys [columns, o_d] of columns o_j as the op was given them: a record divided by its scale rounds to that.
    Those of the pass itself, from column `start` on, are read where they came from, since other programs write their
    records."""
    b_k = tl.load(k_rec + b_row[:, None] * STRIDE + o_d[None, :], mask=(m_j & (o_j < start))[:, None], other=0.0)
    if tl.max(o_j, axis=0) >= start:
        p_k = p_new + o_j[:, None].to(tl.int64) * k_stride + o_d[None, :]
        b_new = tl.load(p_k, mask=(m_j & (o_j >= start))[:, None], other=0.0).to(tl.float32)
        b_k += b_new * b_scale[:, None]  # one of them is 0
    return _unscaled(b_k, b_scale, p_new.dtype.element_ty)


@triton.jit
def _unscaled(b_k, b_scale, dtype: tl.constexpr):
    """Keys of length 1 as they were before they were scaled."""
    return (b_k * (1 / tl.where(b_scale > 0, b_scale, 1.0))[:, None]).to(dtype)


@triton.jit
def _fold(
    k_rec,
    u_rec,
    g_rec,
    p_own,
    p_new,
    k_stride,
    start,
    p_table,
    p_from,
    p_to,
    A,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    OWN: tl.constexpr,
    SLICE: tl.constexpr,
    BV: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The state at p_to [DK, BV] of anchor A + BLOCK, from the one at p_from of anchor A and the records between. Their
    pointers are those of the program's heads and its part of Dv."""
    o_v, o_c = tl.arange(0, BV), tl.arange(0, COLUMNS)
    total = tl.load(_decays_of(g_rec, p_own, start, A + BLOCK - 1, _row(p_table, A + BLOCK - 1, PAGE), HV, OWN))
    for d in tl.range(0, DK, SLICE):
        o_d = d + tl.arange(0, SLICE)
        b_s = tl.exp(total) * tl.load(p_from + o_d[None, :] * DV + o_v[:, None])
        for j in tl.range(A, A + BLOCK, COLUMNS):
            o_j = j + o_c
            b_row = _row(p_table, o_j, PAGE)
            p_g = _decays_of(g_rec, p_own, start, o_j, b_row, HV, OWN)
            b_scale = tl.load(p_g + 3)
            b_k = _keys(k_rec, p_new, k_stride, start, o_j, o_j >= 0, b_row, b_scale, o_d, HK * DK)
            b_u = tl.load(u_rec + b_row[None, :] * (HV * DV) + o_v[:, None])
            b_s = _dot(b_u * (tl.exp(total - tl.load(p_g)) * b_scale)[None, :], b_k, b_s)
        tl.store(p_to + o_d[None, :] * DV + o_v[:, None], b_s)


@triton.jit
def _decays_of(g_rec, p_own, start, o_j, b_row, HV: tl.constexpr, OWN: tl.constexpr):
    """Where the decays of columns are: those of the pass itself are read where this program wrote them."""
    return tl.where(o_j < start, g_rec + b_row * (HV * 4), p_own + (o_j - start).to(tl.int64) * OWN)


@triton.jit
def _store_decays(p_g, m, b_c, b_e, b_p, b_s):
    tl.store(p_g, b_c, mask=m)
    tl.store(p_g + 1, b_e, mask=m)
    tl.store(p_g + 2, b_p.to(tl.float32), mask=m)
    tl.store(p_g + 3, b_s, mask=m)


@triton.jit
def _dot(b_x, b_y, b_sum):
    """b_sum + b_x b_y, of which one is float32, the other of the model's type. Where that has 16 bits, bfloat16 parts
    are multiplied, whose products are exact: a float32 is the sum of three, a float16 of two."""
    if b_x.dtype == b_y.dtype:
        return tl.dot(b_x, b_y, b_sum, input_precision="ieee")
    else:
        b_x_high, b_x_mid, b_x_low = _parts(b_x)
        b_y_high, b_y_mid, b_y_low = _parts(b_y)
        if b_x.dtype == tl.float16 or b_y.dtype == tl.float16:
            b_sum = tl.dot(b_x_mid, b_y_mid, b_sum)
        if b_x.dtype == tl.float32:
            b_sum = tl.dot(b_x_low, b_y_high, b_sum)
        else:
            b_sum = tl.dot(b_x_high, b_y_low, b_sum)
        if b_x.dtype != tl.bfloat16:
            b_sum = tl.dot(b_x_mid, b_y_high, b_sum)
        if b_y.dtype != tl.bfloat16:
            b_sum = tl.dot(b_x_high, b_y_mid, b_sum)
        return tl.dot(b_x_high, b_y_high, b_sum)


@triton.jit
def _parts(b_x):
    """Three bfloat16 whose sum is b_x."""
    b_high = b_x.to(tl.bfloat16)
    b_rest = b_x.to(tl.float32) - b_high.to(tl.float32)
    b_mid = b_rest.to(tl.bfloat16)
    return b_high, b_mid, (b_rest - b_mid.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _weights(m, b_p, b_c, b_far, b_pj, b_cj, b_sj, BLOCK: tl.constexpr):
    """What weighs the product of each row and column: the decay between them, if the row sees the column, and the
    scale of the column's key."""
    near = (b_pj // BLOCK)[None, :] == (b_p // BLOCK)[:, None]
    b_decay = tl.exp(tl.where(near, b_c[:, None], b_far[:, None]) - b_cj[None, :])
    return tl.where(m, b_decay * b_sj[None, :], 0.0)


@triton.jit
def _picked(b_x, b_at, o_r):
    """b_x[b_at]; 0 where that is out of range."""
    return tl.sum(tl.where(b_at[:, None] == o_r[None, :], b_x[None, :], 0.0), axis=1)


@triton.jit(
    do_not_specialize=["q_stride", "k_stride", "v_stride", "a_stride", "b_stride", "z_stride", "table_stride"],
    do_not_specialize_on_alignment=[
        *("a_ptr", "b_ptr", "state_of_ptr", "anchors_ptr", "positions_ptr", "slots_ptr", "table_ptr", "kv_len_ptr"),
        *("window_ptr", "cu_rows_ptr", "words_ptr"),
    ],
)
def _delta_rows_kernel(
    q_ptr,  # [T, HK, DK]
    k_ptr,  # [T, HK, DK]
    v_ptr,  # [T, HV, DV]
    a_ptr,  # [T, HV]
    b_ptr,  # [T, HV]
    a_log_ptr,  # [HV]
    dt_bias_ptr,  # [HV]
    states_ptr,  # [X, 2, HV, DK, DV] fp32
    state_of_ptr,  # [B]
    anchors_ptr,  # [X, HV]
    k_rec_ptr,  # [pages, PAGE, HK, DK] fp32
    u_rec_ptr,  # [pages, PAGE, HV, DV] fp32
    g_rec_ptr,  # [pages, PAGE, HV, 4] fp32
    positions_ptr,  # [T]
    slots_ptr,  # [T]
    table_ptr,  # [B, P] int32
    kv_len_ptr,  # [B] int32
    window_ptr,  # [B] int32
    cu_rows_ptr,  # [B + 1] int32
    words_ptr,  # [T, W]
    z_ptr,  # [T, HV, DV]
    norm_ptr,  # [DV]
    out_ptr,  # [T, HV, DV]
    own_ptr,  # [T, HV, DV // BV, BV + 4] fp32: each program's outputs before the norm, and decays
    count_ptr,  # [B, HV] int32, zeros
    eps,
    q_stride,
    k_stride,
    v_stride,
    a_stride,
    b_stride,
    z_stride,
    table_stride,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    W: tl.constexpr,  # words of a row; 0: rows are chains
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLICE: tl.constexpr,
    BV: tl.constexpr,
    NORM: tl.constexpr,
    UNIT: tl.constexpr,  # of strides, so that the compiler knows that they are multiples of it
    PDL: tl.constexpr,
    ON_AMD: tl.constexpr,
):
    q_stride, k_stride, v_stride, z_stride = q_stride * UNIT, k_stride * UNIT, v_stride * UNIT, z_stride * UNIT
    start_after_previous(PDL)
    i_b, i_h, i_v = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_k = i_h // (HV // HK)
    first, last = tl.load(cu_rows_ptr + i_b), tl.load(cu_rows_ptr + i_b + 1)
    if first == last:
        return
    columns = tl.load(kv_len_ptr + i_b)
    before = columns - tl.load(window_ptr + i_b)
    p_table = table_ptr + i_b.to(tl.int64) * table_stride
    HALF: tl.constexpr = HV * DK * DV
    PARTS: tl.constexpr = DV // BV
    OWN: tl.constexpr = HV * PARTS * (BV + 4)
    state = tl.load(state_of_ptr + i_b)
    p_state = states_ptr + (state * 2 * HV + i_h) * DK * DV + i_v * BV
    p_anchor = anchors_ptr + state * HV + i_h
    A = tl.load(p_anchor).to(tl.int32)
    rate, dt_bias = -tl.exp(tl.load(a_log_ptr + i_h)), tl.load(dt_bias_ptr + i_h)
    o_r, o_s, o_v, o_c = tl.arange(0, ROWS), tl.arange(0, SLICE), tl.arange(0, BV), tl.arange(0, COLUMNS)
    start = columns - (last - first)  # the first column of the pass
    shift = (first - start).to(tl.int64)  # from a column of the pass to its row
    p_new, q_new = k_ptr + shift * k_stride + i_k * DK, q_ptr + shift * q_stride + i_k * DK
    p_own = own_ptr + first.to(tl.int64) * OWN + (i_h * PARTS + i_v) * (BV + 4) + BV
    k_rec, g_rec, u_rec = k_rec_ptr + i_k * DK, g_rec_ptr + i_h * 4, u_rec_ptr + i_h * DV + i_v * BV
    # disable_licm: values that the compiler hoists out of this loop and the next take up to 100 registers.
    for r in tl.range(first, last, ROWS, disable_licm=True):
        o_t = (r + o_r).to(tl.int64)
        m_r = r + o_r < last
        own = columns - last + r  # the column of the tile's first row
        b_p = tl.load(positions_ptr + r + o_r, mask=m_r, other=0).to(tl.int32)
        b_at = tl.maximum(b_p // BLOCK - 1, 0) * BLOCK
        low = tl.min(tl.where(m_r, b_at, 2147483647), axis=0)
        high = tl.max(b_at, axis=0)
        depth = tl.max(b_p, axis=0) - tl.min(tl.where(m_r, b_p, 2147483647), axis=0)  # most steps of a path in the tile
        while high > A:
            p_from, p_to = p_state + A // BLOCK % 2 * HALF, p_state + (A // BLOCK + 1) % 2 * HALF
            _fold(
                k_rec,
                u_rec,
                g_rec,
                p_own,
                p_new,
                k_stride,
                start,
                p_table,
                p_from,
                p_to,
                A,
                HK,
                HV,
                DK,
                DV,
                BLOCK,
                PAGE,
                OWN,
                SLICE,
                BV,
                min(COLUMNS, BLOCK),
            )
            A += BLOCK
            tl.debug_barrier()

        x = tl.load(a_ptr + o_t * a_stride + i_h, mask=m_r, other=0.0).to(tl.float32) + dt_bias
        b_g = rate * tl.where(x > 20, x, tl.log(1 + tl.exp(tl.minimum(x, 20.0))))
        # Decays since the beginning of each row's block, and of the whole block before it, each from its parent's.
        b_up = own + o_r - 1  # the parent's column
        if W > 0:
            b_up = before + parent_of(words_ptr, o_t, m_r, own + o_r - before, W)
        m_up = m_r & (b_up >= 0) & (b_up < own)
        b_up_row = tl.load(p_table + b_up // PAGE, mask=m_up, other=0).to(tl.int64) * PAGE + b_up % PAGE
        p_up = _decays_of(g_rec, p_own, start, b_up, b_up_row, HV, OWN)
        b_old_c, b_old_e = tl.load(p_up, mask=m_up, other=0.0), tl.load(p_up + 1, mask=m_up, other=0.0)
        new = b_p % BLOCK == 0
        b_c, b_e = tl.where(new, 0.0, b_old_c) + b_g, tl.where(new, b_old_c, b_old_e)
        for _ in tl.range(0, depth):
            b_up_c = b_old_c + _picked(b_c, b_up - own, o_r)  # one of them is 0
            b_e = tl.where(new, b_up_c, b_old_e + _picked(b_e, b_up - own, o_r))
            b_c = tl.where(new, 0.0, b_up_c) + b_g
        b_far = b_c + b_e

        # The rows' products with the state of their anchor.
        p_k = p_new + (own + o_r)[:, None].to(tl.int64) * k_stride + o_s[None, :]
        p_q = q_new + (own + o_r)[:, None].to(tl.int64) * q_stride + o_s[None, :]
        b_kk, b_qq = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
        b_u, b_o = tl.zeros([ROWS, BV], tl.float32), tl.zeros([ROWS, BV], tl.float32)
        for d in tl.range(0, DK, SLICE):
            b_k = tl.load(p_k + d, mask=m_r[:, None], other=0.0)
            b_q = tl.load(p_q + d, mask=m_r[:, None], other=0.0)
            b_kk += tl.sum(b_k.to(tl.float32) * b_k.to(tl.float32), axis=1)
            b_qq += tl.sum(b_q.to(tl.float32) * b_q.to(tl.float32), axis=1)
            for at in tl.range(low, high + 1, BLOCK):
                m_at = (b_at == at)[:, None]  # rows of other anchors add an exact 0
                b_s = tl.load(p_state + at // BLOCK % 2 * HALF + (d + o_s)[:, None] * DV + o_v[None, :])
                b_u = _dot(tl.where(m_at, b_k, 0.0), b_s, b_u)
                b_o = _dot(tl.where(m_at, b_q, 0.0), b_s, b_o)
        b_kk = 1 / tl.sqrt_rn(b_kk + 1e-6)
        b_qq = DK**-0.5 / tl.sqrt_rn(b_qq + 1e-6)
        b_reach = tl.exp(tl.where(b_p < b_at + BLOCK, b_c, b_far))
        p_v = v_ptr + o_t[:, None] * v_stride + i_h * DV + i_v * BV + o_v[None, :]
        b_u = tl.load(p_v, mask=m_r[:, None], other=0.0).to(tl.float32) - (b_reach * b_kk)[:, None] * b_u
        b_o = b_reach[:, None] * b_o

        # Columns before the tile's rows. The products sum them in order.
        for j in tl.range(low, own, COLUMNS, disable_licm=True):
            o_j = j + o_c
            m_j = o_j < own
            b_row = tl.load(p_table + o_j // PAGE, mask=m_j, other=0).to(tl.int64) * PAGE + o_j % PAGE
            p_g = _decays_of(g_rec, p_own, start, o_j, b_row, HV, OWN)
            b_cj = tl.load(p_g, mask=m_j, other=0.0)
            b_pj = tl.load(p_g + 2, mask=m_j, other=0.0).to(tl.int32)
            b_sj = tl.load(p_g + 3, mask=m_j, other=1.0)
            b_uj = tl.load(u_rec + b_row[:, None] * (HV * DV) + o_v[None, :], mask=m_j[:, None], other=0.0)
            m_seen = m_j[None, :] & (b_pj[None, :] >= b_at[:, None])
            if W > 0:
                o_wj = o_j - before
                p_wj = words_ptr + r * W + o_r[:, None] * W + (o_wj >> 6)[None, :]
                b_bits = tl.load(p_wj, mask=m_seen & (o_wj >= 0)[None, :] & m_r[:, None], other=-1)
                m_seen = m_seen & ((b_bits >> (o_wj & 63)[None, :] & 1) != 0)
            b_wj = _weights(m_seen, b_p, b_c, b_far, b_pj, b_cj, b_sj, BLOCK)
            b_kuj, b_quj = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
            for d in tl.range(0, DK, SLICE):
                b_k = tl.load(p_k + d, mask=m_r[:, None], other=0.0)
                b_q = tl.load(p_q + d, mask=m_r[:, None], other=0.0)
                b_kj = tl.trans(_keys(k_rec, p_new, k_stride, start, o_j, m_j, b_row, b_sj, d + o_s, HK * DK))
                b_kuj = tl.dot(b_k, b_kj, b_kuj, input_precision="ieee")
                b_quj = tl.dot(b_q, b_kj, b_quj, input_precision="ieee")
            b_u = tl.dot(b_kuj * b_wj * -b_kk[:, None], b_uj, b_u, input_precision="ieee")
            b_o = tl.dot(b_quj * b_wj, b_uj, b_o, input_precision="ieee")

        # The tile's own rows: a row is right once those on its path are.
        m = (o_r[None, :] < o_r[:, None]) & m_r[:, None]
        if W > 0:
            o_w = own - before + o_r
            p_w = words_ptr + r * W + o_r[:, None] * W + (o_w >> 6)[None, :]
            b_bits = tl.load(p_w, mask=m, other=0) >> (o_w & 63)[None, :]
            m = m & ((b_bits & 1) != 0)
        b_w = _weights(m, b_p, b_c, b_far, b_p, b_c, b_kk, BLOCK)
        b_slot = tl.load(slots_ptr + r + o_r, mask=m_r, other=0)
        b_ku, b_qu = tl.zeros([ROWS, ROWS], tl.float32), tl.zeros([ROWS, ROWS], tl.float32)
        for d in tl.range(0, DK, SLICE):
            b_k = tl.load(p_k + d, mask=m_r[:, None], other=0.0)
            b_q = tl.load(p_q + d, mask=m_r[:, None], other=0.0)
            b_unit = b_k.to(tl.float32) * b_kk[:, None]
            tl.store(k_rec + b_slot[:, None] * (HK * DK) + d + o_s[None, :], b_unit, mask=m_r[:, None] & (i_v == 0))
            b_own = tl.trans(_unscaled(b_unit, b_kk, b_k.dtype))  # as later passes will have it
            b_ku = tl.dot(b_k, b_own, b_ku, input_precision="ieee")
            b_qu = tl.dot(b_q, b_own, b_qu, input_precision="ieee")
        b_ku = b_ku * b_w * -b_kk[:, None]
        b_qu *= tl.where(o_r[None, :] == o_r[:, None], b_kk[None, :], b_w)
        b_beta = 1 / (1 + tl.exp(-tl.load(b_ptr + o_t * b_stride + i_h, mask=m_r, other=0.0).to(tl.float32)))[:, None]
        b_rest = b_u
        b_u *= b_beta
        for _ in tl.range(0, depth):
            b_u = tl.dot(b_ku, b_u, b_rest, input_precision="ieee") * b_beta
        b_o = tl.dot(b_qu, b_u, b_o, input_precision="ieee") * b_qq[:, None]
        tl.store(u_rec + b_slot[:, None] * (HV * DV) + o_v[None, :], b_u, mask=m_r[:, None])
        p_o = p_own + (o_t - first) * OWN
        _store_decays(g_rec + b_slot * (HV * 4), m_r & (i_v == 0), b_c, b_e, b_p, b_kk)
        _store_decays(p_o, m_r, b_c, b_e, b_p, b_kk)
        if NORM:
            tl.store((p_o - BV)[:, None] + o_v[None, :], b_o, mask=m_r[:, None])
        else:
            p_out = out_ptr + (o_t[:, None] * HV + i_h) * DV + i_v * BV + o_v[None, :]
            tl.store(p_out, b_o.to(out_ptr.dtype.element_ty), mask=m_r[:, None])
        tl.debug_barrier()

    if not is_last(count_ptr + i_b * HV + i_h, PARTS, ON_AMD):
        return
    tl.store(p_anchor, A.to(tl.int64))  # now that all parts have read it
    if NORM:
        o_n = tl.arange(0, DV)
        for r in tl.range(first, last, ROWS):
            o_t = (r + o_r).to(tl.int64)[:, None]
            m_r = o_t < last
            p_o = p_own + (o_t - first) * OWN + (o_n // BV * (BV + 4) + o_n % BV - i_v * (BV + 4) - BV)[None, :]
            b_o = tl.load(p_o, mask=m_r, other=0.0)
            b_z = tl.load(z_ptr + o_t * z_stride + i_h * DV + o_n[None, :], mask=m_r, other=0.0).to(tl.float32)
            b_o *= (1 / tl.sqrt_rn(tl.sum(b_o * b_o, axis=1) / DV + eps))[:, None]
            b_o *= tl.load(norm_ptr + o_n).to(tl.float32)[None, :] * b_z / (1 + tl.exp(-b_z))
            tl.store(out_ptr + (o_t * HV + i_h) * DV + o_n[None, :], b_o.to(out_ptr.dtype.element_ty), mask=m_r)


class Shape(NamedTuple):
    dtype: torch.dtype
    Hk: int
    Hv: int
    Dk: int
    Dv: int
    block: int
    page: int
    words: int  # of a row's ancestors; 0: rows are chains
    norm: bool
    unit: int = 16  # of strides

    @property
    def part(self) -> int:
        """The columns of a head that a program computes."""
        return min(32, self.Dv)


@lru_cache
def _variant(shape: Shape) -> Variant:
    t, words = TYPES[shape.dtype], f"W{shape.words}" if shape.words else "chains"
    heads = f"{shape.Hk}/{shape.Hv} D{shape.Dk}/{shape.Dv}"
    more = " norm" * shape.norm + " unaligned" * (shape.unit == 1)
    return Variant(
        name=f"{t} {heads} block {shape.block} page {shape.page} {words}{more}",
        kernel=_delta_rows_kernel,
        arguments=(
            *(f"*{t}",) * 5,
            *("*fp32",) * 3,
            *("*i64",) * 2,
            *("*fp32",) * 3,
            *("*i64",) * 2,
            *("*i32",) * 4,
            "*i64",
            *(f"*{t}",) * 3,
            "*fp32",
            "*i32",
            "fp32",
            *("i32",) * 7,
        ),
        constexprs={
            "HK": shape.Hk,
            "HV": shape.Hv,
            "DK": shape.Dk,
            "DV": shape.Dv,
            "BLOCK": shape.block,
            "PAGE": shape.page,
            "W": shape.words,
            "ROWS": 16,
            "COLUMNS": 32,
            "SLICE": min(128 // shape.dtype.itemsize, shape.Dk & -shape.Dk),
            "BV": shape.part,
            "NORM": shape.norm,
            "UNIT": shape.unit,
        },
        num_warps=4,
        dot=shape.dtype.itemsize == 2,
        wide=False,
        smoke=shape.dtype == torch.bfloat16 and shape.words == 1 and shape.unit == 16,
        options={"maxnreg": 255},  # else ptxas may spill to have more programs on an SM
    )


def variants(arch: int) -> Iterator[Variant]:
    """The variants that the compile-only checks compile for sm_`arch`."""
    for words in (0, 1, 2):
        yield _variant(Shape(torch.bfloat16, 16, 32, 128, 128, BLOCK, PAGE, words, norm=True))
    yield _variant(Shape(torch.float16, 16, 16, 128, 128, BLOCK, PAGE, 1, norm=False))
    yield _variant(Shape(torch.bfloat16, 16, 32, 128, 128, BLOCK, PAGE, 1, norm=True, unit=1))


@takes(Arguments)
def launch(args: Arguments) -> Tensor:
    q, k, v, a, b, z, block_table = args.q, args.k, args.v, args.a, args.b, args.z, rowwise(args.block_table)
    (T, HK, DK), (_, HV, DV), B = q.shape, v.shape, len(args.kv_len)
    out = v.new_empty(T, HV, DV)
    W = 0 if args.ancestors is None else args.ancestors.shape[1]
    strides = [0 if rows is None else rows.stride(0) for rows in (q, k, v, z)]
    unit = 1 if any(stride % 16 for stride in strides) else 16
    shape = Shape(q.dtype, HK, HV, DK, DV, args.block, args.k_records.shape[1], W, z is not None, unit)
    parts = DV // shape.part
    q_stride, k_stride, v_stride, z_stride = (stride // unit for stride in strides)
    _variant(shape)(
        (B, HV, parts),
        q,
        k,
        v,
        a,
        b,
        args.a_log.contiguous(),
        args.dt_bias.contiguous(),
        args.states,
        args.state_of.contiguous(),
        args.anchors,
        args.k_records,
        args.u_records,
        args.g_records,
        args.positions.contiguous(),
        args.slots.contiguous(),
        block_table,
        args.kv_len.contiguous(),
        args.window.contiguous(),
        args.cu_rows.contiguous(),
        (args.positions if args.ancestors is None else args.ancestors).contiguous(),
        v if z is None else z,
        v if args.norm is None else args.norm.contiguous(),
        out,
        v.new_empty(T, HV, DV + 4 * parts, dtype=torch.float32),
        counters(v.device, B * HV),
        float(args.eps),
        q_stride,
        k_stride,
        v_stride,
        a.stride(0),
        b.stride(0),
        z_stride,
        block_table.stride(0),
    )
    return out


@takes(Arguments)
def delta_rows_cost(args: Arguments) -> tuple[int, int]:
    """(bytes, operations) of one call, which reads positions: states, records after the first row's anchor, rows."""
    (T, Hk, Dk), (_, Hv, Dv), size, block = args.q.shape, args.v.shape, args.states.element_size(), args.block
    record = (Hk * Dk + Hv * (Dv + 4)) * size
    row = (2 * Hk * Dk + Hv * ((2 if args.z is None else 3) * Dv + 2)) * args.q.element_size() + record
    read = operations = 0
    for n in range(len(args.kv_len)):
        own = args.positions[int(args.cu_rows[n]) : int(args.cu_rows[n + 1])].tolist()
        if own:
            each = {anchor(p, block) for p in own}
            before = min(own) - min(each)
            read += Hv * Dk * Dv * size * len(each) + before * record
            operations += Hv * sum(4 * Dk * Dv + 4 * (p - anchor(p, block)) * (Dk + Dv) for p in own)
    return read + T * row, operations


def _check(args: Arguments) -> None:
    q, v, k_records, block = args.q, args.v, args.k_records, args.block
    if q.dim() != 3 or v.dim() != 3 or not q.is_floating_point() or q.dtype.itemsize == 1:
        raise ValueError(
            f"q must be [T, Hk, Dk] and v [T, Hv, Dv], floating: {tuple(q.shape)}, {tuple(v.shape)}, {q.dtype}"
        )
    forms = {"kv_len": "[B]", "block_table": "[B, P]", "k_records": "[pages, page_size >= 1, Hk, Dk]"}
    check_dims(args, forms)
    (T, Hk, Dk), (_, Hv, Dv), B = q.shape, v.shape, args.kv_len.shape[0]
    (pages, page), P = k_records.shape[:2], args.block_table.shape[-1]
    S, own, wide = args.states.shape[:1], q.dtype, torch.promote_types(q.dtype, torch.float32)
    i64, i32 = torch.int64, torch.int32
    kinds: Kinds = {
        "k": ((T, Hk, Dk), own),
        "v": ((T, Hv, Dv), own),
        "a": ((T, Hv), own),
        "b": ((T, Hv), own),
        "a_log": ((Hv,), wide),
        "dt_bias": ((Hv,), wide),
        "states": ((*S, 2, Hv, Dk, Dv), wide),
        "state_of": ((B,), i64),
        "anchors": ((*S, Hv), i64),
        "k_records": ((pages, page, Hk, Dk), wide),
        "u_records": ((pages, page, Hv, Dv), wide),
        "g_records": ((pages, page, Hv, 4), wide),
        "positions": ((T,), i64),
        "slots": ((T,), i64),
        "block_table": ((B, P), i32),
        "kv_len": ((B,), i32),
        "window": ((B,), i32),
        "cu_rows": ((B + 1,), i32),
    }
    if (args.z is None) != (args.norm is None):
        raise ValueError("z and norm go together")
    if args.z is not None:
        kinds |= {"z": ((T, Hv, Dv), own), "norm": ((Dv,), own)}
        if not args.eps >= 0:
            raise ValueError(f"eps must be at least 0, got {args.eps}")
    check_kinds(args, kinds)
    for name in ("q", "k", "v", "a", "b", "z"):
        rows = getattr(args, name)
        if rows is not None and not (rows.is_contiguous() or rows[:1].is_contiguous()):
            raise ValueError(f"the heads of {name} must be adjacent, got strides {rows.stride()}")
    for name in WRITTEN:
        if not getattr(args, name).is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {getattr(args, name).stride()}")
    if not Hk or Hv % Hk:
        raise ValueError(f"v's {Hv} heads must be a multiple of q's {Hk}")
    if not 16 <= block <= MAX_BLOCK or block & (block - 1):
        raise ValueError(f"block must be a power of two in 16..{MAX_BLOCK}, got {block}")
    check_words(args.ancestors, T)
    same_device(q, ancestors=args.ancestors)


def _fits(args: Arguments) -> bool:
    """Whether the kernel serves the heads: it reads Dk in whole slices, and Dv in equal parts."""
    Dk, Dv = args.q.shape[2], args.v.shape[2]
    return (Dk == 16 or (Dk > 0 and Dk % 32 == 0)) and Dv > 0 and Dv & (Dv - 1) == 0


_delta_rows = register(
    delta_rows,
    Arguments,
    check=_check,
    reference=delta_rows_ref,
    launch=launch,
    fake=lambda args: torch.empty_like(args.v, memory_format=torch.contiguous_format),
    fits=_fits,
    mutates=WRITTEN,
)
