"""delta_rows: the gated delta rule for draft rows, without a state that has to be rewound.

A layer keeps its state only at anchors, columns that are multiples of BLOCK and lie at least BLOCK before a row. For
each column after its anchor it keeps a record, as attention keeps K and V. A row reads the state of its anchor once,
and the records of its path. So a refused draft is a record that is overwritten, a tree is the ancestor bits that
attention has, and what a row computes depends on its path alone.

A program computes one value head of one sequence. Products with the state and between keys are matrix products; what
they weigh is added column by column in the order of the path, and columns that a row does not see add an exact 0. So a
row has the same bits whether it is decoded alone, in a chain or in a tree.
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
        positions: [T] int64, of each row in its text.
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
def _fold(
    p_new,  # keys of the pass, of column 0 if it had one
    k_stride,
    start,  # the first column of the pass
    k_rec,
    u_rec,
    g_rec,
    p_table,
    p_from,
    p_to,
    A,
    i_k,
    i_h,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    SLICE: tl.constexpr,
):
    """The state at p_to [DK, DV] of anchor A + BLOCK, from the one at p_from of anchor A and the records between."""
    o_v = tl.arange(0, DV)
    end = A + BLOCK - 1
    total = tl.load(g_rec + ((tl.load(p_table + end // PAGE).to(tl.int64) * PAGE + end % PAGE) * HV + i_h) * 4)
    decay = tl.exp(total)
    for d in tl.range(0, DK, SLICE):
        o_d = d + tl.arange(0, SLICE)
        b_s = decay * tl.load(p_from + o_d[:, None] * DV + o_v[None, :])
        for j in tl.range(0, BLOCK):
            at = _row(p_table, A + j, PAGE)
            p_g = g_rec + (at * HV + i_h) * 4
            if A + j >= start:
                b_k = tl.load(p_new + (A + j).to(tl.int64) * k_stride + o_d).to(tl.float32) * tl.load(p_g + 3)
            else:
                b_k = tl.load(k_rec + (at * HK + i_k) * DK + o_d)
            b_k *= tl.exp(total - tl.load(p_g))
            b_s += b_k[:, None] * tl.load(u_rec + (at * HV + i_h) * DV + o_v)[None, :]
        tl.store(p_to + o_d[:, None] * DV + o_v[None, :], b_s)


@triton.jit
def _row(p_table, column, PAGE: tl.constexpr):
    """Where a column's records are."""
    return tl.load(p_table + column // PAGE).to(tl.int64) * PAGE + column % PAGE


@triton.jit
def _of(b_x, o_r, i):
    """Entry i of a vector."""
    return tl.sum(tl.where(o_r == i, b_x, 0), axis=0)


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
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    start_after_previous(PDL)
    i_b, i_h = tl.program_id(0), tl.program_id(1)
    i_k = i_h // (HV // HK)
    first, last = tl.load(cu_rows_ptr + i_b), tl.load(cu_rows_ptr + i_b + 1)
    if first == last:
        return
    columns = tl.load(kv_len_ptr + i_b)
    before = columns - tl.load(window_ptr + i_b)
    p_table = table_ptr + i_b.to(tl.int64) * table_stride
    p_state = states_ptr + (tl.load(state_of_ptr + i_b) * 2 * HV + i_h) * DK * DV
    HALF: tl.constexpr = HV * DK * DV
    p_anchor = anchors_ptr + tl.load(state_of_ptr + i_b) * HV + i_h
    o_r, o_s, o_v, o_c = tl.arange(0, ROWS), tl.arange(0, SLICE), tl.arange(0, DV), tl.arange(0, COLUMNS)
    # A program reads keys of the pass itself where they came from, since other programs write their records, too.
    start = columns - (last - first)
    p_new = k_ptr + (first - start).to(tl.int64) * k_stride + i_k * DK
    # disable_licm: values that the compiler hoists out of this loop and the next take up to 100 registers.
    for r in tl.range(first, last, ROWS, disable_licm=True):
        o_t = (r + o_r).to(tl.int64)
        m_r = r + o_r < last
        own = columns - last + r  # the column of the tile's first row
        b_p = tl.load(positions_ptr + r + o_r, mask=m_r, other=0).to(tl.int32)
        b_at = tl.maximum(b_p // BLOCK - 1, 0) * BLOCK
        low = tl.min(tl.where(m_r, b_at, 2147483647), axis=0)
        high = tl.max(b_at, axis=0)
        A = tl.load(p_anchor).to(tl.int32)  # from memory for each tile, as a tile's registers are full
        while high > A:
            p_to = p_state + (A // BLOCK + 1) % 2 * HALF
            _fold(
                p_new,
                k_stride,
                start,
                k_rec_ptr,
                u_rec_ptr,
                g_rec_ptr,
                p_table,
                p_state + A // BLOCK % 2 * HALF,
                p_to,
                A,
                i_k,
                i_h,
                HK,
                HV,
                DK,
                DV,
                BLOCK,
                PAGE,
                SLICE,
            )
            A += BLOCK
            tl.debug_barrier()
            tl.store(p_anchor, A.to(tl.int64))

        x = tl.load(a_ptr + o_t * a_stride + i_h, mask=m_r, other=0.0).to(tl.float32) + tl.load(dt_bias_ptr + i_h)
        b_g = -tl.exp(tl.load(a_log_ptr + i_h)) * tl.where(x > 20, x, tl.log(1 + tl.exp(tl.minimum(x, 20.0))))
        # Decays since the beginning of each row's block, and of the whole block before it, along the row's path.
        b_c, b_e = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
        for i in tl.range(0, tl.minimum(ROWS, last - r)):
            column = own + i - 1
            if W > 0:
                parent = parent_of(words_ptr, r + i, True, own + i - before, W)
                column = tl.where(parent < 0, before - 1, before + parent)
            c, e = 0.0, 0.0
            if column >= own:
                c, e = _of(b_c, o_r, column - own), _of(b_e, o_r, column - own)
            elif column >= 0:
                p_g = g_rec_ptr + (_row(p_table, column, PAGE) * HV + i_h) * 4
                c, e = tl.load(p_g), tl.load(p_g + 1)
            new = _of(b_p, o_r, i) % BLOCK == 0
            e = tl.where(new, c, e)
            c = tl.where(new, 0.0, c) + _of(b_g, o_r, i)
            b_c, b_e = tl.where(o_r == i, c, b_c), tl.where(o_r == i, e, b_e)
        b_far = b_c + b_e

        # The rows' products with the state of their anchor, and with each other.
        p_k = k_ptr + o_t[:, None] * k_stride + i_k * DK + o_s[None, :]
        p_q = q_ptr + o_t[:, None] * q_stride + i_k * DK + o_s[None, :]
        b_kk, b_qq = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
        for d in tl.range(0, DK, SLICE):
            b_k = tl.load(p_k + d, mask=m_r[:, None], other=0.0).to(tl.float32)
            b_q = tl.load(p_q + d, mask=m_r[:, None], other=0.0).to(tl.float32)
            b_kk += tl.sum(b_k * b_k, axis=1)
            b_qq += tl.sum(b_q * b_q, axis=1)
        b_kk = 1 / tl.sqrt_rn(b_kk + 1e-6)
        b_qq = DK**-0.5 / tl.sqrt_rn(b_qq + 1e-6)
        b_u, b_o = tl.zeros([ROWS, DV], tl.float32), tl.zeros([ROWS, DV], tl.float32)
        for at in tl.range(low, high + 1, BLOCK):
            m_at = (b_at == at)[:, None]  # rows of other anchors add an exact 0
            p_s = p_state + at // BLOCK % 2 * HALF + o_s[:, None] * DV + o_v[None, :]
            for d in tl.range(0, DK, SLICE):
                b_k = tl.load(p_k + d, mask=m_r[:, None] & m_at, other=0.0).to(tl.float32) * b_kk[:, None]
                b_q = tl.load(p_q + d, mask=m_r[:, None] & m_at, other=0.0).to(tl.float32) * b_qq[:, None]
                b_s = tl.load(p_s + d * DV)
                b_u = tl.dot(b_k, b_s, b_u, input_precision="ieee")
                b_o = tl.dot(b_q, b_s, b_o, input_precision="ieee")
        b_reach = tl.exp(tl.where(b_p < b_at + BLOCK, b_c, b_far))[:, None]
        p_v = v_ptr + o_t[:, None] * v_stride + i_h * DV + o_v[None, :]
        b_u = tl.load(p_v, mask=m_r[:, None], other=0.0).to(tl.float32) - b_reach * b_u
        b_o = b_reach * b_o

        # Columns before the tile's rows, in order.
        for j in tl.range(low, own, COLUMNS, disable_licm=True):
            o_j = j + o_c
            m_j = o_j < own
            b_row = tl.load(p_table + o_j // PAGE, mask=m_j, other=0).to(tl.int64) * PAGE + o_j % PAGE
            p_g = g_rec_ptr + (b_row * HV + i_h) * 4
            b_cj = tl.load(p_g, mask=m_j, other=0.0)
            b_pj = tl.load(p_g + 2, mask=m_j, other=0.0).to(tl.int32)
            b_sj = tl.load(p_g + 3, mask=m_j & (o_j >= start), other=0.0)
            m = m_j[None, :] & (b_pj[None, :] >= b_at[:, None])
            if W > 0:
                o_w = o_j - before
                p_w = words_ptr + r * W + o_r[:, None] * W + (o_w >> 6)[None, :]
                b_bits = tl.load(p_w, mask=m & (o_w >= 0)[None, :] & m_r[:, None], other=-1) >> (o_w & 63)[None, :]
                m = m & ((b_bits & 1) != 0)
            near = (b_pj // BLOCK)[None, :] == (b_p // BLOCK)[:, None]
            b_w = tl.where(m, tl.exp(tl.where(near, b_c[:, None], b_far[:, None]) - b_cj[None, :]), 0.0)
            b_ku, b_qu = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
            for d in tl.range(0, DK, SLICE):
                b_k = tl.load(p_k + d, mask=m_r[:, None], other=0.0).to(tl.float32) * b_kk[:, None]
                b_q = tl.load(p_q + d, mask=m_r[:, None], other=0.0).to(tl.float32) * b_qq[:, None]
                p_kj = k_rec_ptr + (b_row[None, :] * HK + i_k) * DK + d + o_s[:, None]
                b_kj = tl.load(p_kj, mask=(m_j & (o_j < start))[None, :], other=0.0)
                p_kj = p_new + o_j[None, :].to(tl.int64) * k_stride + d + o_s[:, None]
                b_new = tl.load(p_kj, mask=(m_j & (o_j >= start))[None, :], other=0.0).to(tl.float32)
                b_kj += b_new * b_sj[None, :]  # one of them is 0
                b_ku = tl.dot(b_k, b_kj, b_ku, input_precision="ieee")
                b_qu = tl.dot(b_q, b_kj, b_qu, input_precision="ieee")
            b_ku, b_qu = b_ku * b_w, b_qu * b_w
            for i in tl.range(0, tl.minimum(COLUMNS, own - j)):
                b_uj = tl.load(u_rec_ptr + (_row(p_table, j + i, PAGE) * HV + i_h) * DV + o_v)[None, :]
                b_u -= tl.sum(tl.where((o_c == i)[None, :], b_ku, 0.0), axis=1)[:, None] * b_uj
                b_o += tl.sum(tl.where((o_c == i)[None, :], b_qu, 0.0), axis=1)[:, None] * b_uj

        # The tile's own rows, in order: each is complete when the ones before it are.
        m = o_r[None, :] < o_r[:, None]
        if W > 0:
            o_w = own - before + o_r
            p_w = words_ptr + r * W + o_r[:, None] * W + (o_w >> 6)[None, :]
            b_bits = tl.load(p_w, mask=m & m_r[:, None], other=0) >> (o_w & 63)[None, :]
            m = m & ((b_bits & 1) != 0)
        near = (b_p // BLOCK)[None, :] == (b_p // BLOCK)[:, None]
        b_w = tl.where(m, tl.exp(tl.where(near, b_c[:, None], b_far[:, None]) - b_c[None, :]), 0.0)
        b_slot = tl.load(slots_ptr + r + o_r, mask=m_r, other=0)
        b_ku, b_qu = tl.zeros([ROWS, ROWS], tl.float32), tl.zeros([ROWS, ROWS], tl.float32)
        for d in tl.range(0, DK, SLICE):
            b_k = tl.load(p_k + d, mask=m_r[:, None], other=0.0).to(tl.float32) * b_kk[:, None]
            b_q = tl.load(p_q + d, mask=m_r[:, None], other=0.0).to(tl.float32) * b_qq[:, None]
            b_ku = tl.dot(b_k, tl.trans(b_k), b_ku, input_precision="ieee")
            b_qu = tl.dot(b_q, tl.trans(b_k), b_qu, input_precision="ieee")
            tl.store(k_rec_ptr + (b_slot[:, None] * HK + i_k) * DK + d + o_s[None, :], b_k, mask=m_r[:, None])
        b_ku = b_ku * b_w
        b_qu = tl.where(o_r[None, :] == o_r[:, None], b_qu, b_qu * b_w)
        b_beta = 1 / (1 + tl.exp(-tl.load(b_ptr + o_t * b_stride + i_h, mask=m_r, other=0.0).to(tl.float32)))
        for i in tl.range(0, tl.minimum(ROWS, last - r)):
            m_i = (o_r == i)[:, None]
            b_u = tl.where(m_i, b_u * b_beta[:, None], b_u)
            b_ui = tl.sum(tl.where(m_i, b_u, 0.0), axis=0)[None, :]
            b_u -= tl.sum(tl.where((o_r == i)[None, :], b_ku, 0.0), axis=1)[:, None] * b_ui
            b_o += tl.sum(tl.where((o_r == i)[None, :], b_qu, 0.0), axis=1)[:, None] * b_ui
        tl.store(u_rec_ptr + (b_slot[:, None] * HV + i_h) * DV + o_v[None, :], b_u, mask=m_r[:, None])
        p_g = g_rec_ptr + (b_slot * HV + i_h) * 4
        tl.store(p_g, b_c, mask=m_r)
        tl.store(p_g + 1, b_e, mask=m_r)
        tl.store(p_g + 2, b_p.to(tl.float32), mask=m_r)
        tl.store(p_g + 3, b_kk, mask=m_r)
        if NORM:
            b_z = tl.load(z_ptr + o_t[:, None] * z_stride + i_h * DV + o_v[None, :], mask=m_r[:, None], other=0.0)
            b_z = b_z.to(tl.float32)
            b_o *= (1 / tl.sqrt_rn(tl.sum(b_o * b_o, axis=1) / DV + eps))[:, None]
            b_o *= tl.load(norm_ptr + o_v).to(tl.float32)[None, :] * b_z / (1 + tl.exp(-b_z))
        p_out = out_ptr + (o_t[:, None] * HV + i_h) * DV + o_v[None, :]
        tl.store(p_out, b_o.to(out_ptr.dtype.element_ty), mask=m_r[:, None])
        tl.debug_barrier()


@lru_cache
def _variant(dtype: torch.dtype, sizes: tuple[int, ...], block: int, page: int, words: int, norm: bool) -> Variant:
    """`sizes`: Hk, Hv, Dk and Dv."""
    t, (HK, HV, DK, DV) = TYPES[dtype], sizes
    return Variant(
        name=f"{t} {HK}/{HV} D{DK}/{DV} block {block} page {page} {f'W{words}' if words else 'chains'}{' norm' * norm}",
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
            "fp32",
            *("i32",) * 7,
        ),
        constexprs={
            "HK": HK,
            "HV": HV,
            "DK": DK,
            "DV": DV,
            "BLOCK": block,
            "PAGE": page,
            "W": words,
            "ROWS": 16,
            "COLUMNS": 16,
            "SLICE": min(32, DK),
            "NORM": norm,
        },
        num_warps=8,
        wide=False,
        smoke=dtype == torch.bfloat16 and words == 1 and HV == 32,
    )


def variants(arch: int) -> Iterator[Variant]:
    """The variants that the compile-only checks compile for sm_`arch`."""
    for words in (0, 1, 2):
        yield _variant(torch.bfloat16, (16, 32, 128, 128), BLOCK, PAGE, words, True)
    yield _variant(torch.float16, (16, 16, 128, 128), BLOCK, PAGE, 1, False)


@takes(Arguments)
def launch(args: Arguments) -> Tensor:
    q, k, v, a, b, z, block_table = args.q, args.k, args.v, args.a, args.b, args.z, rowwise(args.block_table)
    (T, HK, DK), (_, HV, DV), B = q.shape, v.shape, len(args.kv_len)
    out = v.new_empty(T, HV, DV)
    W = 0 if args.ancestors is None else args.ancestors.shape[1]
    variant = _variant(q.dtype, (HK, HV, DK, DV), args.block, args.k_records.shape[1], W, z is not None)
    variant(
        (B, HV),
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
        float(args.eps),
        q.stride(0),
        k.stride(0),
        v.stride(0),
        a.stride(0),
        b.stride(0),
        0 if z is None else z.stride(0),
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
    """Whether the kernel serves the heads: it reads Dk in whole slices, and Dv as one tile."""
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
