"""grow and prune: add a level to the draft trees of B sequences, and keep the best nodes; one launch each.

A tree's nodes are columns 0, 1, .. of tokens, parents and scores [B, N]; node j is row j + 1 of a window, whose row 0
is the root. grow adds a level of w nodes, the best of the w candidates after each of the m last nodes (m = w), or after
the root (m = 1, the first level):

    score(child) = score(parent) + min(logit - lse, 0)     rounding must not lift a child above its parent; root: 0
    the w largest, descending

prune keeps the `count` best nodes of a whole tree, in their order; earlier nodes win ties. No child scores higher than
its parent, so they form a tree. Scores are float32, float64 for float64. In a kernel, a tie between candidates goes to
the first; in torch, to any of them. Traffic: a few kilobytes; on a GPU the host reads nothing.
"""

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from specker.kernels.variant import TYPES, Variant, same_device, start_after_previous, tl, triton


def grow(ids: Tensor, logits: Tensor, lse: Tensor, tokens: Tensor, parents: Tensor, scores: Tensor, at: int) -> None:
    """ids [B * m, w] int64, logits [B * m, w], descending, and lse [B * m] of `vocab_topk`, at the last m nodes ->
    nodes at..at + w - 1 of tokens! and parents! [B, N] int64 and scores! [B, N], which are updated and may be
    row-strided views. at = 0 is the first level, with m = 1; otherwise m = w. Raises ValueError on other shapes and
    dtypes."""
    (T, w), (B, N) = ids.shape, tokens.shape
    m = w if at else 1
    if B * m != T or logits.shape != ids.shape or lse.shape != (T,) or at % w or at + w > N:
        raise ValueError(
            f"expected ids and logits [{B * m}, w], lse [{B * m}] and room for nodes {at}..{at + w - 1}: "
            f"{tuple(ids.shape)}, {tuple(logits.shape)}, {tuple(lse.shape)}, {N} nodes"
        )
    _check(tokens, parents, scores)
    if not ids.dtype == tokens.dtype or not logits.dtype == lse.dtype == scores.dtype:
        raise ValueError(f"ids must be int64, scores like logits and lse: {ids.dtype}, {logits.dtype}, {lse.dtype}")
    if ids.is_cuda:
        _launch_grow(ids, logits, lse, tokens, parents, scores, at)
        return
    level = slice(at, at + w)
    total = (logits - lse.unsqueeze(-1)).clamp_(max=0).view(B, m * w)
    if not at:
        tokens[:, level], scores[:, level], parents[:, level] = ids, total, 0
        return
    total += scores[:, at - m : at].repeat_interleave(w, 1)
    scores[:, level], best = total.topk(w)
    tokens[:, level] = ids.view(B, -1).gather(1, best)
    parents[:, level] = best // w + (at - m + 1)


def grow_cost(
    ids: Tensor, logits: Tensor, lse: Tensor, tokens: Tensor, parents: Tensor, scores: Tensor, at: int
) -> tuple[int, int]:
    """(bytes, operations) of one call, which reads only the new nodes' ids."""
    B, (T, w), size = len(tokens), ids.shape, scores.element_size()
    read = (T * w + T * (2 if at else 1)) * size  # logits, lse and, below the first level, the parents' scores
    return read + B * w * (8 + 8 + 8 + size), (2 + w) * T * w


def prune(tokens: Tensor, parents: Tensor, scores: Tensor, kept: Tensor, up: Tensor) -> Tensor:
    """tokens, parents and scores [B, N] -> the best nodes' tokens in kept! [B, count] and parents in up! [B, count],
    and their indices [B, count], all int64 but the scores. Raises ValueError on other shapes and dtypes."""
    (B, N), count = tokens.shape, kept.shape[1]
    _check(tokens, parents, scores)
    if kept.shape != (B, count) or up.shape != kept.shape or not 1 <= count <= N:
        raise ValueError(f"expected room for 1..{N} nodes of {B} trees: {tuple(kept.shape)}, {tuple(up.shape)}")
    if not kept.dtype == up.dtype == torch.int64:
        raise ValueError(f"nodes must be int64: {kept.dtype}, {up.dtype}")
    if tokens.is_cuda:
        return _launch_prune(tokens, parents, scores, kept, up)
    order = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :count]
    nodes = order.sort(1).values
    row_of = torch.zeros(B, N + 1, dtype=torch.int64).scatter_(
        1, nodes + 1, torch.arange(1, count + 1).expand(B, count)
    )
    kept.copy_(tokens.gather(1, nodes)), up.copy_(row_of.gather(1, parents.gather(1, nodes)))
    return nodes


def prune_cost(tokens: Tensor, parents: Tensor, scores: Tensor, kept: Tensor, up: Tensor) -> tuple[int, int]:
    """(bytes, operations) of one call: reads every score and the kept nodes' tokens and parents, writes three numbers
    each."""
    return scores.numel() * scores.element_size() + 40 * kept.numel(), 2 * tokens.numel() * tokens.shape[1]


def _check(tokens: Tensor, parents: Tensor, scores: Tensor) -> None:
    if parents.shape != tokens.shape or scores.shape != tokens.shape or not tokens.numel():
        raise ValueError(
            f"tokens, parents and scores must be [B >= 1, N >= 1]: {tuple(tokens.shape)}, {tuple(parents.shape)}, "
            f"{tuple(scores.shape)}"
        )
    if not tokens.dtype == parents.dtype == torch.int64 or not scores.is_floating_point():
        raise ValueError(f"tokens and parents must be int64: {tokens.dtype}, {parents.dtype}, {scores.dtype}")


_NONE = tl.constexpr(2**31 - 1)  # no candidate


@triton.jit(
    do_not_specialize=["at", "token_stride", "up_stride", "score_stride"],
    do_not_specialize_on_alignment=["tokens_ptr", "parents_ptr", "scores_ptr"],
)
def _grow_kernel(
    ids_ptr,  # [B, M, WIDTH]
    logits_ptr,  # [B, M, WIDTH]
    lse_ptr,  # [B, M]
    tokens_ptr,  # [B, N]
    parents_ptr,  # [B, N]
    scores_ptr,  # [B, N]
    at,
    token_stride,  # from one sequence to the next
    up_stride,
    score_stride,
    WIDTH: tl.constexpr,
    M: tl.constexpr,  # nodes with candidates; 1: the root
    BLOCK: tl.constexpr,  # a power of two, at least M * WIDTH
    FIRST: tl.constexpr,
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
    b_total = tl.where(m, b_total, float("-inf"))
    for i in range(WIDTH):
        best = tl.max(b_total, axis=0)
        child = tl.min(tl.where(m & (b_total == best), o, _NONE), axis=0)
        child = tl.minimum(child, M * WIDTH - 1)  # NaN: take any candidate
        tl.store(p_scores + i, best)
        tl.store(tokens_ptr + i_b * token_stride + at + i, tl.load(p_ids + child))
        parent = child * 0 if FIRST else at - M + 1 + child // WIDTH
        tl.store(parents_ptr + i_b * up_stride + at + i, parent.to(tl.int64))
        m = m & (o != child)
        b_total = tl.where(m, b_total, float("-inf"))


@triton.jit(
    do_not_specialize=["N", "count", "token_stride", "up_stride", "score_stride", "kept_stride", "kept_up_stride"],
    do_not_specialize_on_alignment=["tokens_ptr", "parents_ptr", "scores_ptr", "kept_ptr", "kept_up_ptr"],
)
def _prune_kernel(
    tokens_ptr,  # [B, N]
    parents_ptr,  # [B, N]
    scores_ptr,  # [B, N]
    kept_ptr,  # [B, count]
    kept_up_ptr,  # [B, count]
    nodes_ptr,  # [B, count]
    stays_ptr,  # [B, N] int32: work space
    N,
    count,
    token_stride,
    up_stride,
    score_stride,
    kept_stride,
    kept_up_stride,
    BLOCK: tl.constexpr,  # a power of two, at least N
    PDL: tl.constexpr,
):
    start_after_previous(PDL)
    i_b = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, BLOCK)
    m = o < N
    p_scores, p_stays = scores_ptr + i_b * score_stride, stays_ptr + i_b * N
    b_score = tl.load(p_scores + o, mask=m, other=float("-inf"))
    b_rank = tl.zeros([BLOCK], tl.int32)
    for i in tl.range(0, N):
        other = tl.load(p_scores + i)
        b_rank += ((other > b_score) | ((other == b_score) & (i < o))).to(tl.int32)
    m = m & (b_rank < count)
    tl.store(p_stays + o, m.to(tl.int32), mask=o < N)
    tl.debug_barrier()  # other threads read these values
    b_up = tl.load(parents_ptr + i_b * up_stride + o, mask=m, other=0).to(tl.int32)
    b_node = tl.zeros([BLOCK], tl.int32)  # kept nodes before this one
    b_row = tl.zeros([BLOCK], tl.int32)  # kept nodes up to its parent, which is row b_up, node b_up - 1
    for i in tl.range(0, N):
        stays = tl.load(p_stays + i)
        b_node += tl.where(i < o, stays, 0)
        b_row += tl.where(i < b_up, stays, 0)
    m = m & (b_node < count)  # with NaN as scores, more could stay
    b_token = tl.load(tokens_ptr + i_b * token_stride + o, mask=m, other=0)
    tl.store(kept_ptr + i_b * kept_stride + b_node, b_token, mask=m)
    tl.store(kept_up_ptr + i_b * kept_up_stride + b_node, tl.minimum(b_row, b_node).to(tl.int64), mask=m)
    tl.store(nodes_ptr + i_b * count + b_node, o.to(tl.int64), mask=m)


@lru_cache
def _grow_variant(dtype: torch.dtype, width: int, first: bool) -> Variant:
    """One program per sequence. One warp if a thread then has at most 16 candidates: a step is a maximum and a
    minimum, for which several warps would wait at barriers."""
    m = 1 if first else width
    t, block = TYPES[dtype], triton.next_power_of_2(m * width)
    return Variant(
        name=f"grow {t} {width}" + " first" * first,
        kernel=_grow_kernel,
        arguments=("*i64", f"*{t}", f"*{t}", "*i64", "*i64", f"*{t}", *("i32",) * 4),
        constexprs={"WIDTH": width, "M": m, "BLOCK": block, "FIRST": first},
        num_warps=min(max(block // 512, 1), 8),
        wide=False,
        smoke=width == 12,
    )


@lru_cache
def _prune_variant(dtype: torch.dtype, block: int) -> Variant:
    """One program per sequence; its threads exchange one number per node."""
    t = TYPES[dtype]
    return Variant(
        name=f"prune {t} {block}",
        kernel=_prune_kernel,
        arguments=("*i64", "*i64", f"*{t}", "*i64", "*i64", "*i64", "*i32", *("i32",) * 7),
        constexprs={"BLOCK": block},
        num_warps=max(1, block // 64),
        wide=False,
        smoke=block == 64,
    )


def variants(arch: int) -> Iterator[Variant]:
    """The variants that the compile-only checks compile for sm_`arch`."""
    for width in (2, 4, 12, 64):
        for first in (False, True):
            yield _grow_variant(torch.float32, width, first)
    yield _grow_variant(torch.float32, 1, True)
    for block in (8, 64, 256):
        yield _prune_variant(torch.float32, block)


def _launch_grow(
    ids: Tensor, logits: Tensor, lse: Tensor, tokens: Tensor, parents: Tensor, scores: Tensor, at: int
) -> None:
    same_device(ids, logits=logits, lse=lse, tokens=tokens, parents=parents, scores=scores)
    trees = tokens, parents, scores
    _rows(*trees)
    strides = (x.stride(0) for x in trees)
    variant = _grow_variant(scores.dtype, ids.shape[1], not at)
    variant((len(tokens),), ids.contiguous(), logits.contiguous(), lse.contiguous(), *trees, at, *strides)


def _launch_prune(tokens: Tensor, parents: Tensor, scores: Tensor, kept: Tensor, up: Tensor) -> Tensor:
    same_device(tokens, parents=parents, scores=scores, kept=kept, up=up)
    given = tokens, parents, scores, kept, up
    _rows(*given)
    (B, N), count = tokens.shape, kept.shape[1]
    nodes, stays = tokens.new_empty(B, count), tokens.new_empty((B, N), dtype=torch.int32)
    variant = _prune_variant(scores.dtype, triton.next_power_of_2(N))
    variant((B,), *given, nodes, stays, N, count, *(x.stride(0) for x in given))
    return nodes


def _rows(*tensors: Tensor) -> None:
    if any(x.shape[1] > 1 and x.stride(1) != 1 for x in tensors):
        raise ValueError(f"a tree's nodes must be adjacent: strides {[x.stride() for x in tensors]}")
