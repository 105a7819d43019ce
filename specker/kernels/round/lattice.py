"""cut_lattice and search_lattice: make the lattice of a guessed block, and grow paths through it; one launch each.

A block of B sequences guesses k positions at once, and a position has K candidates. A path may have a *table* or *rows*
of further terms, which a model of paths adds to the candidates' log-probabilities (runtime/strategies/blocks/tree.py):

    z(c) = log_p(c) + added(c | path)

Level i has w nodes, columns i w, i w + 1, .. of `Paths`, and after the root, which is no column, comes level 0. Each
node of a level gives the w candidates after it that have the largest z, and the next level are the w best of all:

    tree    score(c) = score(node) + min(z(c) - lse + mass, 0), lse over the candidates of the position
            without added terms there is no lse - mass; the candidates after a node that ended have -inf
    beam    score(c) = score(node) + min(z(c) - toll, 0), toll the largest z of the level
            one "candidate" follows an ended node, its own token again, which costs nothing

A node ended if its token is one of `ends`; in a beam also if its score is -inf. The best path of a beam has toll 1 + ..
+ toll k + the score of the last level's first node. Earlier candidates win ties in the kernels; in torch, which serves
CPUs, any of them. Scores are float32, float64 for float64. Traffic: some kilobytes; on a GPU the host reads nothing.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from specker.kernels.registry import check_written, explained, takes
from specker.kernels.round.grow import Candidates, grow
from specker.kernels.variant import TYPES, Variant, same_device, start_after_previous, tl, triton


class Lattice(NamedTuple):
    """Candidates of k positions of B blocks."""

    ids: Tensor  # [B, k, K] int64
    log_p: Tensor  # [B, k, K], -inf: not in the lattice
    mass: Tensor  # [B, k], log of the candidates' share of the probability


class Paths(NamedTuple):
    """The nodes of N = k w columns that a search finds."""

    tokens: Tensor  # [B, N] int64
    up: Tensor  # [B, N] int64, which node of the level before each one follows
    scores: Tensor  # [B, N]
    candidates: Candidates  # of a tree; work space of a beam

    @classmethod
    def empty(cls, B: int, width: int, depth: int, dtype: torch.dtype, device: torch.device) -> Self:
        """Room for `depth` levels of `width` nodes; `dtype` of the scores."""
        tokens, up = torch.empty((2, B, width * depth), dtype=torch.int64, device=device).unbind(0)
        scores = torch.empty((B, width * depth), dtype=dtype, device=device)
        return cls(tokens, up, scores, Candidates.empty(B, width, depth, dtype, device))


class Cut(NamedTuple):
    """The arguments of `cut_lattice`."""

    ids: Tensor
    logits: Tensor
    lse: Tensor
    ends: Tensor
    report: Tensor
    share: float
    extra: int = 0


def _check_cut(args: Cut) -> None:
    """Raise ValueError unless `cut_lattice` takes these arguments."""
    ids, logits, lse, ends, report, _, extra = args
    if ids.dim() != 3 or not ids.numel() or logits.shape != ids.shape or lse.shape != ids.shape[:2]:
        raise ValueError(
            f"expected ids and logits [B, k, K], none empty, and lse [B, k]: {tuple(ids.shape)}, "
            f"{tuple(logits.shape)}, {tuple(lse.shape)}"
        )
    if ends.dim() != 1 or not 0 <= extra < ids.shape[2] or report.shape != (len(ids), 3):
        raise ValueError(
            f"expected ends [S], report [{len(ids)}, 3] and 0..{ids.shape[2] - 1} extra candidates: "
            f"{tuple(ends.shape)}, {tuple(report.shape)}, {extra}"
        )
    _check_types((ids, ends), (logits, lse, report))


@takes(Cut)
def _explain_cut(args: Cut) -> None:
    _check_cut(args)
    same_device(args.ids, logits=args.logits, lse=args.lse, ends=args.ends, report=args.report)
    check_written("report", args.report)


@explained(_explain_cut)
@takes(Cut)
def cut_lattice(args: Cut) -> Lattice:
    """ids [B, k, K] int64, logits [B, k, K] and lse [B, k] of `vocab_topk`, the first K - `extra` descending: of these
    the fewest stay that have the probability `share` together. The last `extra` stay if they are not among them.
    Columns 0 and 1 of report! [B, 3] get the number of positions before the first whose first candidate is one of
    `ends` [S] int64, and the mean number of candidates. Raises ValueError on other shapes and dtypes."""
    _check_cut(args)
    ids, logits, lse, ends, report, share, extra = args
    if ids.is_cuda:
        return launch_cut(*args)
    log_p = logits - lse.unsqueeze(2)
    before = log_p[..., : ids.shape[2] - extra].exp().cumsum(2).roll(1, 2)
    before[..., 0] = -1.0  # the first one stays
    dropped = before >= share
    if extra:  # those that are candidates already count once
        again = (ids[..., -extra:, None] == ids[..., None, :-extra]) & ~dropped.unsqueeze(2)
        dropped = torch.cat((dropped, again.any(3)), 2)
    log_p.masked_fill_(dropped, -math.inf)
    report[:, 0] = (ids[..., :1] != ends).all(2).cumprod(1).sum(1)
    report[:, 1] = log_p.isfinite().sum(2).mean(1, dtype=report.dtype)
    return Lattice(ids, log_p, log_p.logsumexp(2).clamp_(max=0.0))


@takes(Cut)
def cut_lattice_cost(args: Cut) -> tuple[int, int]:
    """(bytes, operations) of one call: reads candidates once and writes their log-probabilities."""
    count, rows, size = args.ids.numel(), args.lse.numel(), args.logits.element_size()
    return count * (8 + 2 * size) + 2 * rows * size + 8 * len(args.ends) + 2 * len(args.ids) * size, 8 * count


class Search(NamedTuple):
    """The arguments of `search_lattice`."""

    found: Lattice
    added: Tensor | None
    ends: Tensor
    paths: Paths
    score: Tensor
    first: int
    levels: int
    out: Tensor | None = None


def _check_search(args: Search) -> tuple[int, int, int, int]:
    """Raise ValueError unless `search_lattice` takes these arguments. Returns B, k, K and w."""
    (ids, log_p, mass), added, ends, (tokens, up, scores, every), score, first, levels, out = args
    if ids.dim() != 3 or not ids.numel() or log_p.shape != ids.shape or mass.shape != ids.shape[:2]:
        raise ValueError(
            f"expected ids and log_p [B, k, K], none empty, and mass [B, k]: {tuple(ids.shape)}, "
            f"{tuple(log_p.shape)}, {tuple(mass.shape)}"
        )
    (B, k, K), w = ids.shape, every.width
    if not 0 <= first < first + levels <= k or ends.dim() != 1 or score.shape != (B,):
        raise ValueError(
            f"expected levels within 0..{k - 1}, ends [S] and score [{B}]: {first}..{first + levels - 1}, "
            f"{tuple(ends.shape)}, {tuple(score.shape)}"
        )
    N, C = k * w, w + (k - 1) * w * w
    shapes = [tuple(x.shape) for x in (tokens, up, scores, *every[:3])]
    if w < 1 or shapes != [(B, N)] * 3 + [(B, C)] * 2 + [(B, N)]:
        raise ValueError(f"paths must have room for {k} levels of {w} nodes of {B} sequences: {shapes}")
    if not all(x.is_contiguous() for x in (*args.found, tokens, up, scores, *every[:3])):
        raise ValueError("the lattice and the paths must be contiguous")
    if added is not None:
        rows = (B, w if first else 1, K)
        if added.shape != (B, k, K, K) and not (added.shape == rows and levels == 1):
            raise ValueError(
                f"added must be a table {[B, k, K, K]} or rows {list(rows)} of one level: {tuple(added.shape)}, "
                f"{levels} levels"
            )
    if out is not None and out.shape != (B, k):
        raise ValueError(f"out must be [{B}, {k}], got {tuple(out.shape)}")
    ints = ids, ends, tokens, up, every.ids, every.columns, *(() if out is None else (out,))
    _check_types(ints, (log_p, mass, scores, every.scores, score, *(() if added is None else (added,))))
    return B, k, K, w


@takes(Search)
def _explain_search(args: Search) -> None:
    _check_search(args)
    (ids, log_p, mass), added, ends, (tokens, up, scores, every), score, _, _, out = args
    written = {"tokens": tokens, "up": up, "scores": scores, "candidates.ids": every.ids}
    written |= {"candidates.scores": every.scores, "candidates.columns": every.columns, "score": score}
    written |= {} if out is None else {"out": out}
    same_device(ids, log_p=log_p, mass=mass, added=added, ends=ends, **written)
    for name, x in written.items():
        check_written(name, x)


@explained(_explain_search)
@takes(Search)
def search_lattice(args: Search) -> None:
    """Grow `levels` levels of paths! through `found`, from level `first` on; earlier calls grew those before. `added`:
    None; a table [B, k, K, K], whose row c of position i belongs to candidate c of position i - 1, and row 0 of
    position 0 to the root; or, for one level, a row for each node before it, [B, w, K] or [B, 1, K]. `ends` [S] int64.
    With `out`! [B, k] int64 the search is a beam, whose best path the last level writes; `out` may be a row-strided
    view. The last level also writes score! [B], which may be strided: the best path's score, divided by k; a beam's
    earlier levels keep the sum of their tolls there. The tensors of lattice and paths are contiguous. Raises ValueError
    on other shapes and dtypes."""
    _, k, _, w = _check_search(args)
    if args.found.ids.is_cuda:
        launch_search(*args)
        return
    _, _, _, paths, score, first, levels, out = args
    tolls = torch.zeros_like(score) if out is None or not first else score.clone()
    for depth in range(first, first + levels):
        tolls += _grow_level(args, depth)
    last = (k - 1) * w
    if first + levels == k:
        score.copy_((paths.scores[:, last] + tolls) / k)
    elif out is not None:
        score.copy_(tolls)
    if first + levels == k and out is not None:
        node = torch.full((len(out), 1), last, dtype=torch.int64, device=out.device)
        for depth in reversed(range(k)):
            out[:, depth] = paths.tokens.gather(1, node)[:, 0]
            node = paths.up.gather(1, node) + (depth - 1) * w


def _grow_level(args: Search, depth: int) -> Tensor | float:
    """The level at `depth`. Returns the tolls [B] of a beam, 0 for a tree."""
    found, added, ends, (tokens, up, scores, every), _, _, _, out = args
    (B, _, K), w = found.ids.shape, every.width
    at, m = depth * w, w if depth else 1
    nodes = tokens[:, at - m : at] if depth else tokens.new_full((B, 1), -1)
    ended = (nodes.unsqueeze(2) == ends).any(2)
    z = found.log_p[:, depth].unsqueeze(1).expand(B, m, K)
    ids = found.ids[:, depth].unsqueeze(1).expand(B, m, K)
    if added is not None and added.dim() == 4:
        added = added[:, depth]
        if depth:
            column = (nodes.unsqueeze(2) == found.ids[:, depth - 1 : depth]).int().argmax(2, keepdim=True)
            added = added.gather(1, column.expand(-1, -1, K))
        else:
            added = added[:, :1]
    z = z if added is None else z + added
    toll: Tensor | float = 0.0
    if out is None:
        lse = z.new_zeros(B, m) if added is None else z.logsumexp(2) - found.mass[:, depth : depth + 1]
        lse = lse.masked_fill(ended, math.inf)
    else:
        if depth:
            ended |= scores[:, at - m : at].isneginf()
        z = z.masked_fill(ended.unsqueeze(2), -math.inf)
        toll = z.amax((1, 2)).masked_fill_(ended.all(1), 0.0)
        lse = toll.unsqueeze(1).expand(B, m)
        z[..., 0] = torch.where(ended, lse, z[..., 0])
        ids = torch.where(ended.unsqueeze(2), nodes.unsqueeze(2), ids)
    if w > K:
        z, ids = pad(z, (0, w - K), value=-math.inf), pad(ids, (0, w - K))
    best, which = z.topk(w)
    ids = ids.gather(2, which)
    grow(ids.view(-1, w), best.view(-1, w), lse.reshape(-1), tokens, up, scores, at, every)
    up[:, at : at + w] -= max(0, at - w + 1)  # of rows
    return toll


@takes(Search)
def search_lattice_cost(args: Search) -> tuple[int, int]:
    """(bytes, operations) of one call: each level reads its position's candidates and what is added to them, writes w
    candidates after each node and reads them, and writes w nodes; a comparison orders each two candidates of a row."""
    B, k, K, w = _check_search(args)
    size, levels = args.score.element_size(), args.levels
    rows = levels * w - (w - 1 if not args.first else 0)  # nodes that candidates follow
    moved = levels * K * (8 + size) + rows * w * 2 * (8 + size) + levels * w * (24 + size)
    moved += 0 if args.added is None else rows * K * size
    return B * (moved + (0 if args.out is None else 24 * k)), B * rows * (K * K + w * w * w)


def _check_types(ints: tuple[Tensor, ...], floats: tuple[Tensor, ...]) -> None:
    kind = floats[0].dtype
    if any(x.dtype != torch.int64 for x in ints) or any(x.dtype != kind for x in floats) or kind not in SCORES:
        got = ", ".join(str(x.dtype) for x in (*ints, *floats))
        raise ValueError(f"ids must be int64, scores all float32 or all float64: {got}")


SCORES = torch.float32, torch.float64
TILE = 4096  # comparisons of candidates at once


@triton.jit(
    do_not_specialize=["D", "K", "S", "extra", "report_stride"],
    do_not_specialize_on_alignment=["ids_ptr", "logits_ptr", "lse_ptr", "ends_ptr", "report_ptr"],
)
def _cut_lattice_kernel(
    ids_ptr,  # [B, D, K]
    logits_ptr,  # [B, D, K]
    lse_ptr,  # [B, D]
    ends_ptr,  # [S]
    log_p_ptr,  # [B, D, K]
    mass_ptr,  # [B, D]
    report_ptr,  # [B, 3]
    share,
    D,
    K,
    S,
    extra,
    report_stride,
    POSITIONS: tl.constexpr,  # at once, a power of two
    BLOCK: tl.constexpr,  # a power of two, at least K
    PDL: tl.constexpr,
):
    start_after_previous(PDL)
    i_b = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, BLOCK)[None, :]
    generated, width = D, D * 0
    for first in tl.range(0, D, POSITIONS):
        o_d = first + tl.arange(0, POSITIONS)
        m_d = o_d < D
        o_row = i_b * D + o_d
        o = o_row[:, None] * K + o_k
        m = m_d[:, None] & (o_k < K)
        b_x = tl.load(logits_ptr + o, mask=m, other=float("-inf"))
        b_x = tl.where(m_d[:, None], b_x, 0.0)  # rows without a position stay finite
        b_x -= tl.load(lse_ptr + o_row, mask=m_d, other=0.0)[:, None]
        m_best = o_k < K - extra
        b_sum = tl.cumsum(tl.where(m_best, tl.exp(b_x), 0.0), axis=1)
        b_kept = tl.sum((m_best & (b_sum < share)).to(tl.int32), axis=1)  # and the one that reaches the share
        b_drop = (m_best & (o_k > b_kept[:, None])).to(tl.int32)
        b_ids = tl.load(ids_ptr + o, mask=m & m_best & (b_drop == 0), other=-1)
        for i in tl.range(K - extra, K):
            b_id = tl.load(ids_ptr + o_row * K + i, mask=m_d, other=-2)
            b_again = tl.max((b_ids == b_id[:, None]).to(tl.int32), axis=1)
            b_drop |= b_again[:, None] & (o_k == i).to(tl.int32)
        b_x = tl.where(b_drop == 1, float("-inf"), b_x)
        b_top = tl.max(b_x, axis=1)
        b_mass = b_top + tl.log(tl.sum(tl.exp(b_x - b_top[:, None]), axis=1))
        tl.store(log_p_ptr + o, b_x, mask=m)
        tl.store(mass_ptr + o_row, tl.minimum(b_mass, 0.0), mask=m_d)
        width += tl.sum(tl.sum((m & (b_x > float("-inf"))).to(tl.int32), axis=1), axis=0)
        b_first = tl.load(ids_ptr + o_row * K, mask=m_d, other=-1)
        b_end = o_d * 0
        for i in tl.range(0, S):
            b_end |= (b_first == tl.load(ends_ptr + i)).to(tl.int32)
        generated = tl.minimum(generated, tl.min(tl.where(m_d & (b_end == 1), o_d, D), axis=0))
    kind = report_ptr.dtype.element_ty
    tl.store(report_ptr + i_b * report_stride, generated.to(kind))
    tl.store(report_ptr + i_b * report_stride + 1, width.to(kind) / D)


@triton.jit
def _scored(log_p_ptr, p_added, o, K, m_m, HAS_ADDED: tl.constexpr):
    """z [M, n] of the candidates `o` [n] after M nodes, whose rows of added terms are at p_added [M]; no NaN."""
    m = o < K
    b_z = tl.load(log_p_ptr + o, mask=m, other=float("-inf"))[None, :] + tl.where(m_m, 0.0, 0.0)[:, None]
    if HAS_ADDED:
        b_z += tl.load(p_added[:, None] + o[None, :], mask=m_m[:, None] & m[None, :], other=0.0)
    return tl.where(b_z == b_z, b_z, float("-inf"))


@triton.jit(
    do_not_specialize=[
        "first",
        "levels",
        "D",
        "K",
        "S",
        "C",
        "added_stride",
        "row_stride",
        "score_stride",
        "out_stride",
    ],
    do_not_specialize_on_alignment=[
        "ids_ptr",
        "log_p_ptr",
        "mass_ptr",
        "added_ptr",
        "ends_ptr",
        "tokens_ptr",
        "up_ptr",
        "scores_ptr",
        "all_ids_ptr",
        "all_scores_ptr",
        "columns_ptr",
        "score_ptr",
        "out_ptr",
    ],
)
def _search_lattice_kernel(
    ids_ptr,  # [B, D, K]
    log_p_ptr,  # [B, D, K]
    mass_ptr,  # [B, D]
    added_ptr,  # [B, D, K, K], [B, M, K] or None
    ends_ptr,  # [S]
    tokens_ptr,  # [B, D * WIDTH]
    up_ptr,  # [B, D * WIDTH]
    scores_ptr,  # [B, D * WIDTH]
    all_ids_ptr,  # [B, C]; these three: of the candidates
    all_scores_ptr,  # [B, C]
    columns_ptr,  # [B, D * WIDTH]
    score_ptr,  # [B]
    out_ptr,  # [B, D] or None
    first,
    levels,
    D,
    K,
    S,
    C,
    added_stride,  # from one sequence to the next
    row_stride,  # from the row of one node to the next
    score_stride,
    out_stride,
    ADDED: tl.constexpr,  # "", "rows" or "table"
    BEAM: tl.constexpr,
    WIDTH: tl.constexpr,
    NODES: tl.constexpr,  # a power of two, at least WIDTH
    BLOCK: tl.constexpr,  # a power of two, at least K and WIDTH
    BESIDE: tl.constexpr,  # candidates with which those of all nodes are compared at once
    PAIRS: tl.constexpr,  # a power of two, at least WIDTH * WIDTH
    PAIRS_BESIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    start_after_previous(PDL)
    i_b = tl.program_id(0).to(tl.int64)
    ids_ptr, log_p_ptr, mass_ptr = ids_ptr + i_b * D * K, log_p_ptr + i_b * D * K, mass_ptr + i_b * D
    o_b = i_b * D * WIDTH
    tokens_ptr, up_ptr, scores_ptr, columns_ptr = tokens_ptr + o_b, up_ptr + o_b, scores_ptr + o_b, columns_ptr + o_b
    all_ids_ptr, all_scores_ptr, score_ptr = (
        all_ids_ptr + i_b * C,
        all_scores_ptr + i_b * C,
        score_ptr + i_b * score_stride,
    )
    o_m = tl.arange(0, NODES)
    o_k = tl.arange(0, BLOCK)
    o_p = tl.arange(0, PAIRS)
    each = tl.maximum(K, WIDTH)  # candidates of a node, absent ones included
    tolls = tl.load(score_ptr, mask=first > 0, other=0.0)  # a beam's
    for depth in tl.range(first, first + levels):
        before = (depth - 1) * WIDTH  # the first node of the level before
        rows = tl.where(depth > 0, WIDTH, 1)
        m_m = o_m < rows
        older = m_m & (depth > 0)
        b_token = tl.load(tokens_ptr + before + o_m, mask=older, other=-1)
        b_score = tl.load(scores_ptr + before + o_m, mask=older, other=0.0)
        b_end = o_m * 0
        for i in tl.range(0, S):
            b_end |= (b_token == tl.load(ends_ptr + i)).to(tl.int32)
        if ADDED == "table":
            b_id = tl.load(ids_ptr + (depth - 1) * K + o_k, mask=(o_k < K) & (depth > 0), other=-2)
            same = b_id[None, :] == b_token[:, None]
            b_row = tl.min(tl.where(same, o_k[None, :], tl.where(depth > 0, K - 1, 0)), axis=1)
            p_added = added_ptr + i_b * added_stride + depth * row_stride * K + b_row * row_stride
        elif ADDED == "rows":
            p_added = added_ptr + i_b * added_stride + o_m * row_stride
        else:
            p_added = o_m
        p_log_p = log_p_ptr + depth * K
        b_z = _scored(p_log_p, p_added, o_k, K, m_m, ADDED != "")
        b_ids = tl.load(ids_ptr + depth * K + o_k, mask=o_k < K, other=0)[None, :]
        if BEAM:
            b_end |= (b_score == float("-inf")).to(tl.int32)
            m_goes_on = m_m & (b_end == 0)
            toll = tl.max(tl.max(tl.where(m_goes_on[:, None], b_z, float("-inf")), axis=1), axis=0)
            toll = tl.where(tl.sum(m_goes_on.to(tl.int32), axis=0) > 0, toll, 0.0)
            tolls += toll
            b_again = tl.where(o_k == 0, toll, float("-inf"))[None, :]
            b_z = tl.where((b_end == 1)[:, None], b_again, b_z)
            b_ids = tl.where((b_end == 1)[:, None], b_token[:, None], b_ids)
            b_total = b_z - toll
        else:
            if ADDED != "":
                b_top = tl.max(b_z, axis=1)
                b_lse = b_top + tl.log(tl.sum(tl.exp(b_z - b_top[:, None]), axis=1)) - tl.load(mass_ptr + depth)
                b_total = b_z - b_lse[:, None]
            else:
                b_total = b_z
            b_total = tl.where((b_end == 1)[:, None], float("-inf"), b_total)
        b_total = tl.minimum(b_total, 0.0) + b_score[:, None]
        b_total = tl.where(b_total == b_total, b_total, float("-inf"))
        b_rank = tl.zeros([NODES, BLOCK], tl.int32)
        for c in tl.range(0, each, BESIDE):
            o_c = c + tl.arange(0, BESIDE)
            b_y = _scored(p_log_p, p_added, o_c, K, m_m, ADDED != "")
            if BEAM:
                b_y = tl.where((b_end == 1)[:, None], tl.where(o_c == 0, toll, float("-inf"))[None, :], b_y)
            m_tie = (b_y[:, None, :] == b_z[:, :, None]) & (o_c[None, None, :] < o_k[None, :, None])
            m_first = ((b_y[:, None, :] > b_z[:, :, None]) | m_tie) & (o_c < each)[None, None, :]
            b_rank += tl.sum(m_first.to(tl.int32), axis=2)
        begin = tl.where(depth > 0, WIDTH + before * WIDTH, 0)
        o = begin + o_m[:, None] * WIDTH + b_rank
        m_best = m_m[:, None] & (o_k < each)[None, :] & (b_rank < WIDTH)
        tl.store(all_scores_ptr + o, b_total, mask=m_best)
        tl.store(all_ids_ptr + o, b_ids, mask=m_best)
        tl.debug_barrier()  # other threads read these candidates
        pairs = rows * WIDTH
        b_own = tl.load(all_scores_ptr + begin + o_p, mask=o_p < pairs, other=float("-inf"))
        b_place = o_p * 0
        for c in tl.range(0, pairs, PAIRS_BESIDE):
            o_q = c + tl.arange(0, PAIRS_BESIDE)
            b_q = tl.load(all_scores_ptr + begin + o_q, mask=o_q < pairs, other=float("-inf"))
            m_tie = (b_q[None, :] == b_own[:, None]) & (o_q[None, :] < o_p[:, None])
            m_first = ((b_q[None, :] > b_own[:, None]) | m_tie) & (o_q < pairs)[None, :]
            b_place += tl.sum(m_first.to(tl.int32), axis=1)
        m_node = (o_p < pairs) & (b_place < WIDTH)
        o = depth * WIDTH + b_place
        tl.store(tokens_ptr + o, tl.load(all_ids_ptr + begin + o_p, mask=m_node, other=0), mask=m_node)
        tl.store(scores_ptr + o, b_own, mask=m_node)
        tl.store(up_ptr + o, (o_p // WIDTH).to(tl.int64), mask=m_node)
        tl.store(columns_ptr + o, (begin + o_p).to(tl.int64), mask=m_node)
        tl.debug_barrier()  # other threads read these nodes
    ends_here = first + levels == D
    best = tl.load(scores_ptr + (D - 1) * WIDTH, mask=ends_here, other=0.0)
    if BEAM:
        best += tolls
    tl.store(score_ptr, tl.where(ends_here, best / D, best), mask=ends_here | BEAM)
    if BEAM:
        node = (D - 1) * WIDTH + i_b * 0
        for i in tl.range(0, tl.where(ends_here, D, 0)):
            tl.store(out_ptr + i_b * out_stride + (D - 1 - i), tl.load(tokens_ptr + node))
            node = tl.load(up_ptr + node) + (D - 2 - i) * WIDTH


@lru_cache
def _cut_variant(dtype: torch.dtype, positions: int, block: int) -> Variant:
    """One program per sequence, which also counts over its positions."""
    t = TYPES[dtype]
    return Variant(
        name=f"cut {t} {positions}x{block}",
        kernel=_cut_lattice_kernel,
        arguments=("*i64", f"*{t}", f"*{t}", "*i64", f"*{t}", f"*{t}", f"*{t}", "fp32", *("i32",) * 5),
        constexprs={"POSITIONS": positions, "BLOCK": block},
        num_warps=min(max(positions * block // 128, 1), 8),
        wide=False,
        smoke=block == 16,
    )


@lru_cache
def _search_variant(dtype: torch.dtype, width: int, block: int, added: str, beam: bool) -> Variant:
    """One program per sequence. Comparisons order the candidates, all at once: maxima one after another would each wait
    for the one before."""
    t, nodes, pairs = TYPES[dtype], triton.next_power_of_2(width), triton.next_power_of_2(width * width)
    return Variant(
        name=f"search {t} {width} of {block}" + f" {added}" * bool(added) + " beam" * beam,
        kernel=_search_lattice_kernel,
        arguments=(
            "*i64",
            f"*{t}",
            f"*{t}",
            f"*{t}" if added else None,
            *("*i64",) * 3,
            f"*{t}",
            "*i64",
            f"*{t}",
            "*i64",
            f"*{t}",
            "*i64" if beam else None,
            *("i32",) * 10,
        ),
        constexprs={
            "ADDED": added,
            "BEAM": beam,
            "WIDTH": width,
            "NODES": nodes,
            "BLOCK": block,
            "BESIDE": min(16, max(1, TILE // (nodes * block))),
            "PAIRS": pairs,
            "PAIRS_BESIDE": min(64, max(1, TILE // pairs)),
        },
        num_warps=4 if max(nodes * block, pairs) <= 512 else 8 if nodes * block < TILE // 2 else 16,
        wide=False,
        smoke=width == 8 and block == 16,
    )


def variants(arch: int) -> Iterator[Variant]:
    """The variants that the compile-only checks compile for sm_`arch`."""
    for positions, block in ((16, 16), (16, 32), (16, 64), (16, 128), (2, 4)):
        yield _cut_variant(torch.float32, positions, block)
    for added in ("", "rows", "table"):
        for width, block in ((8, 16), (8, 32), (8, 64), (8, 128), (1, 4)):
            yield _search_variant(torch.float32, width, block, added, False)
    for added in ("", "rows"):
        for width, block in ((3, 16), (3, 32), (32, 64)):
            yield _search_variant(torch.float32, width, block, added, True)


@takes(Cut)
def launch_cut(args: Cut) -> Lattice:
    ids, logits, lse, ends, report, share, extra = args
    same_device(ids, logits=logits, lse=lse, ends=ends, report=report)
    (B, D, K), block = ids.shape, triton.next_power_of_2(ids.shape[2])
    found = Lattice(ids.contiguous(), torch.empty_like(logits), torch.empty_like(lse))
    variant = _cut_variant(logits.dtype, min(triton.next_power_of_2(D), max(1, 2048 // block)), block)
    variant(
        (B,),
        found.ids,
        logits.contiguous(),
        lse.contiguous(),
        ends,
        found.log_p,
        found.mass,
        report,
        share,
        D,
        K,
        len(ends),
        extra,
        report.stride(0),
    )
    return found


@takes(Search)
def launch_search(args: Search) -> None:
    (ids, log_p, mass), added, ends, (tokens, up, scores, every), score, first, levels, out = args
    same_device(ids, log_p=log_p, mass=mass, added=added, ends=ends, tokens=tokens, up=up, scores=scores)
    same_device(ids, candidates=every.ids, columns=every.columns, score=score, out=out)
    (B, D, K), w = ids.shape, every.width
    kind, sequence, row = "", 0, 0
    if added is not None:
        added = added.contiguous()
        kind, sequence, row = "table" if added.dim() == 4 else "rows", added.stride(0), K
    if out is not None and D > 1 and out.stride(1) != 1:
        raise ValueError(f"a path's tokens must be adjacent: strides {out.stride()}")
    variant = _search_variant(scores.dtype, w, triton.next_power_of_2(max(K, w)), kind, out is not None)
    variant(
        (B,),
        ids,
        log_p,
        mass,
        added,
        ends,
        tokens,
        up,
        scores,
        every.ids,
        every.scores,
        every.columns,
        score,
        out,
        first,
        levels,
        D,
        K,
        len(ends),
        every.ids.shape[1],
        sequence,
        row,
        score.stride(0),
        0 if out is None else out.stride(0),
    )
