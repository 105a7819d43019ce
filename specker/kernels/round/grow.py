"""grow and prune: add a level to the draft trees of B sequences, and keep the best nodes; one launch each.

A tree is EAGLE-2's (arXiv 2406.16858). Its grown nodes, on which a drafter runs, are columns 0, 1, .. of tokens,
parents and scores [B, N]; node j is row j + 1 of a window, whose row 0 is the root. A level has w of them. grow adds
the best of the w candidates after each of the m last nodes (m = w), or after the root (m = 1, the first level):

    score(child) = score(parent) + min(logit - lse, 0)     rounding must not lift a child above its parent; root: 0
    the w largest, descending

`Candidates` collects all of them. prune keeps the `count` best candidates of a whole tree, in descending order; earlier
ones win ties. No candidate scores higher than its parent, which stands before it, so they form a tree, and the first
nodes of a tree are the tree of so many. A kept node that was not grown is a leaf. Scores are float32, float64 for
float64. In grow's kernel, a tie between candidates goes to the first; in torch, to any of them. Traffic: a few
kilobytes; on a GPU the host reads nothing.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from specker.kernels.registry import check_written, explained, takes
from specker.kernels.variant import TYPES, Variant, check_within, same_device, start_after_previous, tl, triton


class Candidates(NamedTuple):
    """All candidates of the trees of B sequences: C = w + (depth - 1) * w * w columns. Column c < w follows the root;
    any other one follows node (c - w) // w."""

    ids: Tensor  # [B, C] int64, tokens
    scores: Tensor  # [B, C]
    columns: Tensor  # [B, w * depth] int64, the column of each grown node
    width: int  # w

    @classmethod
    def empty(cls, B: int, width: int, depth: int, dtype: torch.dtype, device: torch.device) -> "Candidates":
        """Room for trees of `depth` levels; `dtype` of the scores."""
        count, nodes = width + (depth - 1) * width**2, width * depth
        ids, columns = torch.empty(B * (count + nodes), dtype=torch.int64, device=device).split([B * count, B * nodes])
        scores = torch.empty((B, count), dtype=dtype, device=device)
        return cls(ids.view(B, count), scores, columns.view(B, nodes), width)


class Level(NamedTuple):
    """The arguments of `grow`."""

    ids: Tensor
    logits: Tensor
    lse: Tensor
    tokens: Tensor
    parents: Tensor
    scores: Tensor
    at: int
    candidates: Candidates | None = None


def _check_grow(args: Level) -> tuple[int, int, int, int]:
    """Raise ValueError unless `grow` takes these arguments. Returns B, m, w and the first column of the candidates."""
    ids, logits, lse, tokens, parents, scores, at, candidates = args
    if ids.dim() != 2 or tokens.dim() != 2 or not ids.shape[1]:
        raise ValueError(
            f"ids must be [B * m, w >= 1] and tokens [B, N], got {tuple(ids.shape)}, {tuple(tokens.shape)}"
        )
    (T, w), (B, N) = ids.shape, tokens.shape
    m = w if at else 1
    if B * m != T or logits.shape != ids.shape or lse.shape != (T,) or at < 0 or at % w or at + w > N:
        raise ValueError(
            f"expected ids and logits [{B * m}, w], lse [{B * m}] and room for nodes {at}..{at + w - 1}: "
            f"{tuple(ids.shape)}, {tuple(logits.shape)}, {tuple(lse.shape)}, {N} nodes"
        )
    _check(tokens, parents, scores)
    if not ids.dtype == tokens.dtype or not logits.dtype == lse.dtype == scores.dtype:
        raise ValueError(f"ids must be int64, scores like logits and lse: {ids.dtype}, {logits.dtype}, {lse.dtype}")
    begin = _first(at, w)
    if candidates is not None:
        _check_candidates(candidates, B, at + w, begin + m * w, scores.dtype)
        if candidates.width != w:
            raise ValueError(f"the candidates' width is {candidates.width}, the level's is {w}")
    return B, m, w, begin


@takes(Level)
def _explain_grow(args: Level) -> None:
    _check_grow(args)
    ids, logits, lse, tokens, parents, scores, _, candidates = args
    same_device(ids, logits=logits, lse=lse, tokens=tokens, parents=parents, scores=scores)
    for name, x in (("tokens", tokens), ("parents", parents), ("scores", scores)):
        check_written(name, x)
    if candidates is not None:
        same_device(ids, candidates=candidates.ids, scores=candidates.scores, columns=candidates.columns)
        check_written("candidates.scores", candidates.scores)


@explained(_explain_grow)
@takes(Level)
def grow(args: Level) -> None:
    """ids [B * m, w] int64, logits [B * m, w], descending, and lse [B * m] of `vocab_topk`, at the last m nodes ->
    nodes at..at + w - 1 of tokens! and parents! [B, N] int64 and scores! [B, N], which are updated and may be
    row-strided views. at = 0 is the first level, with m = 1; otherwise m = w. The level's candidates go to candidates!,
    whose tensors are contiguous. Raises ValueError on other shapes and dtypes."""
    B, m, w, begin = _check_grow(args)
    ids, logits, lse, tokens, parents, scores, at, candidates = args
    if ids.is_cuda:
        launch_grow(*args)
        return
    level = slice(at, at + w)
    total = (logits - lse.unsqueeze(-1)).clamp_(max=0).reshape(B, m * w)
    if at:
        total += scores[:, at - m : at].repeat_interleave(w, 1)
    # The first level's candidates are in order already; a draft of one level may hold NaN.
    best = total.topk(w).indices if at else torch.arange(w, dtype=torch.int64, device=ids.device).expand(B, w)
    tokens[:, level], scores[:, level] = ids.reshape(B, -1).gather(1, best), total.gather(1, best)
    parents[:, level] = best // w + (at - m + 1) if at else 0
    if candidates is not None:
        these = slice(begin, begin + m * w)
        candidates.ids[:, these], candidates.scores[:, these] = ids.reshape(B, -1), total
        candidates.columns[:, level] = best + begin


@takes(Level)
def grow_cost(args: Level) -> tuple[int, int]:
    """(bytes, operations) of one call, which reads only the new nodes' ids if nothing collects the candidates."""
    B, (T, w), size = len(args.tokens), args.ids.shape, args.scores.element_size()
    read = (T * w + T * (2 if args.at else 1)) * size  # logits, lse and, below the first level, the parents' scores
    moved = read + B * w * (8 + 8 + 8 + size)
    if args.candidates is not None:
        moved += T * w * (8 + size) + B * w * 8 + (T * w - B * w) * 8
    return moved, (2 + w) * T * w


def _check_prune(candidates: Candidates, kept: Tensor, up: Tensor) -> tuple[int, int, int, int]:
    """Raise ValueError unless `prune` takes these arguments. Returns B, C, N and count."""
    if any(x.dim() != 2 for x in (*candidates[:3], kept)):
        shapes = [tuple(x.shape) for x in (*candidates[:3], kept)]
        raise ValueError(f"candidates must be [B, C] and [B, N], kept [B, count]: {shapes}")
    (B, C), N, count = candidates.ids.shape, candidates.columns.shape[1], kept.shape[1]
    _check_candidates(candidates, B, N, C, candidates.scores.dtype)
    if kept.shape != (B, count) or up.shape != kept.shape or not 1 <= count <= C:
        raise ValueError(f"expected room for 1..{C} nodes of {B} trees: {tuple(kept.shape)}, {tuple(up.shape)}")
    if not kept.dtype == up.dtype == torch.int64:
        raise ValueError(f"nodes must be int64: {kept.dtype}, {up.dtype}")
    return B, C, N, count


def _explain_prune(candidates: Candidates, kept: Tensor, up: Tensor) -> None:
    _, C, _, _ = _check_prune(candidates, kept, up)
    same_device(candidates.ids, scores=candidates.scores, columns=candidates.columns, kept=kept, up=up)
    check_within("columns", candidates.columns, C)
    check_written("kept", kept)
    check_written("up", up)


@explained(_explain_prune)
def prune(candidates: Candidates, kept: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The best candidates' tokens in kept! [B, count], descending by score, and their parents, as rows, in up!
    [B, count], both int64, which may be row-strided views. Returns their columns [B, count] int64, and which grown node
    each one is [B, count] int64, w * depth if it was not grown. Raises ValueError on other shapes and dtypes."""
    B, C, N, count = _check_prune(candidates, kept, up)
    ids, scores, columns, w = candidates
    if ids.is_cuda:
        return launch_prune(candidates, kept, up)
    best = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :count]
    number = torch.arange(max(N, count + 1), dtype=torch.int64, device=ids.device).expand(B, -1)
    row_of = ids.new_zeros(B, C).scatter_(1, best, number[:, 1 : count + 1])
    node_of = ids.new_full((B, C), N).scatter_(1, columns, number[:, :N])
    above = columns.gather(1, (best - w).clamp(min=0) // w)
    kept.copy_(ids.gather(1, best)), up.copy_(torch.where(best < w, 0, row_of.gather(1, above)))
    return best, node_of.gather(1, best)


def prune_cost(candidates: Candidates, kept: Tensor, up: Tensor) -> tuple[int, int]:
    """(bytes, operations) of one call: reads every score and the columns of grown nodes, and the kept nodes' tokens;
    writes four numbers for each of these. A comparison of every score for each bit of a score finds the worst kept
    one, and a comparison of each two kept ones their order."""
    scores, columns = candidates.scores, candidates.columns
    compared = 8 * scores.element_size() * scores.numel() + kept.shape[1] * kept.numel()
    return scores.numel() * scores.element_size() + 8 * columns.numel() + 40 * kept.numel(), compared


def _first(at: int, width: int) -> int:
    """The first column of the candidates of the level whose nodes begin at `at`."""
    return width + (at // width - 1) * width**2 if at else 0


def _check_candidates(x: Candidates, B: int, nodes: int, count: int, dtype: torch.dtype) -> None:
    """Raise ValueError unless there is room for `nodes` grown nodes and `count` candidates."""
    if x.ids.dim() != 2 or x.columns.dim() != 2 or x.width < 1:
        raise ValueError(
            f"candidates must be [B, C] and [B, N] of a width of at least 1: {tuple(x.ids.shape)}, "
            f"{tuple(x.columns.shape)}, {x.width}"
        )
    (b, C), (b_, N), w = x.ids.shape, x.columns.shape, x.width
    if not b == b_ == B or x.scores.shape != x.ids.shape or w + (N - w) * w != C or count > C or nodes > N:
        raise ValueError(
            f"candidates must have room for {count} columns and {nodes} nodes of {B} trees of width {w}: "
            f"{tuple(x.ids.shape)}, {tuple(x.scores.shape)}, {tuple(x.columns.shape)}"
        )
    if not x.ids.dtype == x.columns.dtype == torch.int64 or x.scores.dtype != dtype or dtype.itemsize == 1:
        raise ValueError(f"candidates' ids and columns must be int64, their scores {dtype}: {x.scores.dtype}")
    if not all(t.is_contiguous() for t in x[:3]):
        raise ValueError("candidates must be contiguous")


def _check(tokens: Tensor, parents: Tensor, scores: Tensor) -> None:
    if parents.shape != tokens.shape or scores.shape != tokens.shape or not tokens.numel():
        raise ValueError(
            f"tokens, parents and scores must be [B >= 1, N >= 1]: {tuple(tokens.shape)}, {tuple(parents.shape)}, "
            f"{tuple(scores.shape)}"
        )
    if not tokens.dtype == parents.dtype == torch.int64 or not scores.is_floating_point() or scores.dtype.itemsize == 1:
        raise ValueError(f"tokens and parents must be int64: {tokens.dtype}, {parents.dtype}, {scores.dtype}")


_NONE = tl.constexpr(2**31 - 1)  # no candidate
_RANKED = tl.constexpr(32)  # kept candidates that prune ranks at once
_BESIDE = tl.constexpr(16)  # and with which it compares them at once


@triton.jit(
    do_not_specialize=["at", "token_stride", "up_stride", "score_stride", "C", "N"],
    do_not_specialize_on_alignment=["tokens_ptr", "parents_ptr", "scores_ptr", "all_ids_ptr", "columns_ptr"],
)
def _grow_kernel(
    ids_ptr,  # [B, M, WIDTH]
    logits_ptr,  # [B, M, WIDTH]
    lse_ptr,  # [B, M]
    tokens_ptr,  # [B, N]
    parents_ptr,  # [B, N]
    scores_ptr,  # [B, N]
    all_ids_ptr,  # [B, C]; these three: of the candidates
    all_scores_ptr,  # [B, C]
    columns_ptr,  # [B, N]
    at,
    token_stride,  # from one sequence to the next
    up_stride,
    score_stride,
    C,
    N,
    WIDTH: tl.constexpr,
    M: tl.constexpr,  # nodes with candidates; 1: the root
    BLOCK: tl.constexpr,  # a power of two, at least M * WIDTH
    FIRST: tl.constexpr,
    COLLECTS: tl.constexpr,
    PDL: tl.constexpr,
):
    start_after_previous(PDL)
    i_b = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, BLOCK)
    m = o < M * WIDTH
    o_row = o // WIDTH
    p_ids = ids_ptr + i_b * (M * WIDTH)
    b_lse = tl.load(lse_ptr + i_b * M + o_row, mask=m, other=0.0)
    b_total = tl.load(logits_ptr + i_b * (M * WIDTH) + o, mask=m, other=0.0) - b_lse
    b_total = tl.minimum(b_total, 0.0)
    p_scores = scores_ptr + i_b * score_stride + at
    if not FIRST:
        b_total += tl.load(p_scores - M + o_row, mask=m, other=0.0)
    if COLLECTS:
        begin = 0 if FIRST else WIDTH + (at // WIDTH - 1) * (WIDTH * WIDTH)
        p_all = i_b * C + begin + o
        tl.store(all_scores_ptr + p_all, b_total, mask=m)
        tl.store(all_ids_ptr + p_all, tl.load(p_ids + o, mask=m, other=0), mask=m)
    b_total = tl.where(m, b_total, float("-inf"))
    for i in range(WIDTH):
        best = tl.max(b_total, axis=0)
        child = tl.min(tl.where(m & (b_total == best), o, _NONE), axis=0)
        child = tl.minimum(child, M * WIDTH - 1)  # NaN: take any candidate
        tl.store(p_scores + i, best)
        tl.store(tokens_ptr + i_b * token_stride + at + i, tl.load(p_ids + child))
        parent = child * 0 if FIRST else at - M + 1 + child // WIDTH
        tl.store(parents_ptr + i_b * up_stride + at + i, parent.to(tl.int64))
        if COLLECTS:
            tl.store(columns_ptr + i_b * N + at + i, (begin + child).to(tl.int64))
        m = m & (o != child)
        b_total = tl.where(m, b_total, float("-inf"))


@triton.jit
def _key(scores_ptr, o, C, BITS: tl.constexpr):
    """Integers that order the candidates at `o`, best first. No score is positive, so the bits of -score grow as the
    score falls. NaN and what lies beyond C come last."""
    b_score = tl.load(scores_ptr + o, mask=o < C, other=float("-inf"))
    most: tl.constexpr = 0x7FFFFFFF if BITS == 31 else 0x7FFFFFFFFFFFFFFF
    if BITS == 31:
        b_key = (0.0 - b_score).to(tl.int32, bitcast=True)
    else:
        b_key = (0.0 - b_score).to(tl.int64, bitcast=True)
    return tl.where(o < C, b_key & most, most)


@triton.jit(
    do_not_specialize=["C", "N", "count", "kept_stride", "kept_up_stride"],
    do_not_specialize_on_alignment=["ids_ptr", "columns_ptr", "kept_ptr", "kept_up_ptr", "best_ptr", "nodes_ptr"],
)
def _prune_kernel(
    ids_ptr,  # [B, C]
    scores_ptr,  # [B, C]
    columns_ptr,  # [B, N]
    kept_ptr,  # [B, count]
    kept_up_ptr,  # [B, count]
    best_ptr,  # [B, count]
    nodes_ptr,  # [B, count]
    rows_ptr,  # [B, C] int32, work space: the row of each candidate, 0 if it goes
    C,
    N,
    count,
    kept_stride,
    kept_up_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two, at least C
    CHUNK: tl.constexpr,  # candidates that are placed at once
    NODES: tl.constexpr,  # a power of two, at least N
    BITS: tl.constexpr,  # of a score, but for its sign
    PDL: tl.constexpr,
):
    start_after_previous(PDL)
    i_b = tl.program_id(0).to(tl.int64)
    ids_ptr, scores_ptr, rows_ptr = ids_ptr + i_b * C, scores_ptr + i_b * C, rows_ptr + i_b * C
    columns_ptr, best_ptr, nodes_ptr = columns_ptr + i_b * N, best_ptr + i_b * count, nodes_ptr + i_b * count
    o = tl.arange(0, BLOCK)
    b_key = _key(scores_ptr, o, C, BITS)
    last = tl.min(b_key, axis=0) * 0  # the key of the worst candidate that stays, found bit by bit
    for i in tl.range(0, BITS):
        trial = last | ((last * 0 + 1) << (BITS - 1 - i))
        last = tl.where(tl.sum(((o < C) & (b_key < trial)).to(tl.int32), axis=0) < count, trial, last)
    ties = count - tl.sum(((o < C) & (b_key < last)).to(tl.int32), axis=0)  # how many of the worst ones stay
    rows = ties * 0  # kept so far
    for first in tl.range(0, C, CHUNK):  # in parts, which need few registers
        o_c = first + tl.arange(0, CHUNK)
        b_c = _key(scores_ptr, o_c, C, BITS)
        b_tie = ((o_c < C) & (b_c == last)).to(tl.int32)
        m_stays = ((o_c < C) & (b_c < last)) | ((b_tie == 1) & (tl.cumsum(b_tie, axis=0) <= ties))
        b_number = rows + tl.cumsum(m_stays.to(tl.int32), axis=0)
        tl.store(rows_ptr + o_c, 0, mask=o_c < C)
        tl.store(nodes_ptr + b_number - 1, o_c.to(tl.int64), mask=m_stays)  # those that stay, in their order
        ties -= tl.sum(b_tie, axis=0)
        rows += tl.sum(m_stays.to(tl.int32), axis=0)
    tl.debug_barrier()  # other threads read what stays, and overwrite these rows
    for first in tl.range(0, count, _RANKED):
        o_i = first + tl.arange(0, _RANKED)
        b_c = tl.load(nodes_ptr + o_i, mask=o_i < count, other=0)
        b_own = _key(scores_ptr, b_c, C, BITS)
        b_rank = o_i * 0
        for other in tl.range(0, count, _BESIDE):
            o_j = other + tl.arange(0, _BESIDE)
            b_j = _key(scores_ptr, tl.load(nodes_ptr + o_j, mask=o_j < count, other=0), C, BITS)
            m_tie = (b_j[None, :] == b_own[:, None]) & (o_j[None, :] < o_i[:, None])
            m_first = ((b_j[None, :] < b_own[:, None]) | m_tie) & (o_j < count)[None, :]
            b_rank += tl.sum(m_first.to(tl.int32), axis=1)
        tl.store(rows_ptr + b_c, b_rank + 1, mask=o_i < count)
        tl.store(best_ptr + b_rank, b_c, mask=o_i < count)
    tl.debug_barrier()  # other threads read these rows, and overwrite these nodes
    for first in tl.range(0, count, _RANKED):
        o_i = first + tl.arange(0, _RANKED)
        m_i = o_i < count
        b_c = tl.load(best_ptr + o_i, mask=m_i, other=0)
        tl.store(kept_ptr + i_b * kept_stride + o_i, tl.load(ids_ptr + b_c, mask=m_i, other=0), mask=m_i)
        below = m_i & (b_c >= WIDTH)
        b_above = tl.load(columns_ptr + tl.maximum(b_c - WIDTH, 0) // WIDTH, mask=below, other=0)
        b_up = tl.load(rows_ptr + b_above, mask=below, other=0)
        tl.store(kept_up_ptr + i_b * kept_up_stride + o_i, b_up.to(tl.int64), mask=m_i)
        tl.store(nodes_ptr + o_i, (o_i * 0 + N).to(tl.int64), mask=m_i)
    tl.debug_barrier()  # other threads overwrite these nodes
    o_node = tl.arange(0, NODES)
    b_own = tl.load(rows_ptr + tl.load(columns_ptr + o_node, mask=o_node < N, other=0), mask=o_node < N, other=0)
    tl.store(nodes_ptr + b_own - 1, o_node.to(tl.int64), mask=b_own > 0)


@lru_cache
def _grow_variant(dtype: torch.dtype, width: int, first: bool, collects: bool) -> Variant:
    """One program per sequence. One warp if a thread then has at most 16 candidates: a step is a maximum and a
    minimum, for which several warps would wait at barriers."""
    m = 1 if first else width
    t, block = TYPES[dtype], triton.next_power_of_2(m * width)
    return Variant(
        name=f"grow {t} {width}" + " first" * first + " collects" * collects,
        kernel=_grow_kernel,
        arguments=("*i64", f"*{t}", f"*{t}", "*i64", "*i64", f"*{t}", "*i64", f"*{t}", "*i64", *("i32",) * 6),
        constexprs={"WIDTH": width, "M": m, "BLOCK": block, "FIRST": first, "COLLECTS": collects},
        num_warps=min(max(block // 512, 1), 8),
        wide=False,
        smoke=width == 12,
    )


@lru_cache
def _prune_variant(dtype: torch.dtype, width: int, block: int, nodes: int) -> Variant:
    """One program per sequence. A thread counts its candidates once for each bit of a score: 8 of them, and 16 of the
    widest trees."""
    t = TYPES[dtype]
    return Variant(
        name=f"prune {t} {width} {block}",
        kernel=_prune_kernel,
        arguments=("*i64", f"*{t}", "*i64", *("*i64",) * 4, "*i32", *("i32",) * 5),
        constexprs={
            "WIDTH": width,
            "BLOCK": block,
            "CHUNK": min(block, 1024),
            "NODES": nodes,
            "BITS": 8 * dtype.itemsize - 1,
        },
        num_warps=min(max(block // 256, 1), 32),
        wide=False,
        smoke=block == 1024,
    )


def variants(arch: int) -> Iterator[Variant]:
    """The variants that the compile-only checks compile for sm_`arch`."""
    for width in (2, 4, 12, 64):
        for first in (False, True):
            yield _grow_variant(torch.float32, width, first, True)
    yield _grow_variant(torch.float32, 1, True, False)
    for width, depth in ((2, 2), (4, 5), (10, 7), (64, 3)):  # 64x3 has the most candidates
        nodes = width * depth
        yield _prune_variant(
            torch.float32, width, *map(triton.next_power_of_2, (width + (nodes - width) * width, nodes))
        )


@takes(Level)
def launch_grow(args: Level) -> None:
    ids, logits, lse, tokens, parents, scores, at, candidates = args
    all_ids, all_scores, columns = (tokens, scores, parents) if candidates is None else candidates[:3]
    same_device(ids, logits=logits, lse=lse, tokens=tokens, parents=parents, scores=scores, candidates=all_ids)
    _rows(tokens, parents, scores)
    variant = _grow_variant(scores.dtype, ids.shape[1], not at, candidates is not None)
    variant(
        (len(tokens),),
        ids.contiguous(),
        logits.contiguous(),
        lse.contiguous(),
        tokens,
        parents,
        scores,
        all_ids,
        all_scores,
        columns,
        at,
        tokens.stride(0),
        parents.stride(0),
        scores.stride(0),
        all_ids.shape[1],
        columns.shape[1],
    )


def launch_prune(candidates: Candidates, kept: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    ids, scores, columns, width = candidates
    same_device(ids, scores=scores, columns=columns, kept=kept, up=up)
    _rows(kept, up)
    (B, C), N, count = ids.shape, columns.shape[1], kept.shape[1]
    best, nodes = ids.new_empty(2, B, count).unbind(0)
    rows = ids.new_empty((B, C), dtype=torch.int32)
    variant = _prune_variant(scores.dtype, width, triton.next_power_of_2(C), triton.next_power_of_2(N))
    kept_stride, up_stride = kept.stride(0), up.stride(0)
    variant((B,), ids, scores, columns, kept, up, best, nodes, rows, C, N, count, kept_stride, up_stride)
    return best, nodes


def _rows(*tensors: Tensor) -> None:
    if any(x.shape[1] > 1 and x.stride(1) != 1 for x in tensors):
        raise ValueError(f"a tree's nodes must be adjacent: strides {[x.stride() for x in tensors]}")
