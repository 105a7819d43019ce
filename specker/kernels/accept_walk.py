"""accept_walk: find the accepted path by following each draft as far as the target agrees."""

import itertools
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specker.kernels.registry import register, takes
from specker.kernels.variant import TYPES, Variant, rowwise, same_device, start_after_previous, tl, triton


def accept_walk(
    tokens: Tensor, parents: Tensor | None, target: Tensor, cu_drafts: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Follow each of B drafts as far as the target agrees.

        row 0 is the root, draft j is in row j + 1 below row parents[j] <= j
        from row r the walk goes to the child whose token is target[r], the first of equal siblings, else it stops

    The emitted tokens are the target's own, so the output is exact. Drafts come in one of two forms. Equal sizes:
    tokens [B, N]. Ragged: tokens [N] hold the drafts of all trees, one tree after another; tree b's rows start at
    cu_drafts[b] + b.

    Args:
        tokens: [B, N] or [N] int64; N may be 0. Row-strided views are not copied.
        parents: like tokens, rows of the same tree; None: chains.
        target: [B, N + 1] or [N + B] int64, the target's token after each row.
        cu_drafts: [B + 1] int32 or int64, ragged drafts only: where each tree's drafts start, then N; None: one tree.

    Returns:
        path [B, N + 1] int64, the tree's rows from the root on, padded with -1; count [B], accepted drafts + 1; next
        [B], the target's token after the path's last row.

    Raises:
        TypeError: an argument of another type.
        ValueError: other shapes, dtypes or devices and, on a CPU, values that are not trees. On CUDA the host reads
            nothing: such values give a meaningless result, but no access out of bounds.

    Source: Leviathan et al., arXiv 2211.17192, with a draw that is shared by draft and target; trees as in SpecInfer,
    arXiv 2305.09781.

    Examples:
        >>> import torch
        >>> from specker.kernels import accept_walk
        >>> path, count, after = accept_walk(torch.tensor([[5, 6, 7]]), None, torch.tensor([[5, 6, 9, 1]]))
        >>> path.tolist(), count.tolist(), after.tolist()
        ([[0, 1, 2, -1]], [3], [9])
    """
    return _accept_walk(tokens, parents, target, cu_drafts)


class Arguments(NamedTuple):
    tokens: Tensor
    parents: Tensor | None
    target: Tensor
    cu_drafts: Tensor | None = None


@takes(Arguments)
def accept_walk_ref(args: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    tokens, parents, target, cu_drafts = args
    N = tokens.shape[-1]
    token, wanted = tokens.tolist(), target.tolist()
    parent = None if parents is None else parents.tolist()
    if tokens.dim() == 2:
        ups = [None] * len(token) if parent is None else parent
    else:
        starts = [0, N] if cu_drafts is None else cu_drafts.tolist()
        if starts[0] != 0 or starts[-1] != N or starts != sorted(starts):
            raise ValueError(f"cu_drafts must rise from 0 to {N}, got {starts}")
        trees = [slice(first, stop) for first, stop in itertools.pairwise(starts)]
        token = [token[tree] for tree in trees]
        ups = [None if parent is None else parent[tree] for tree in trees]
        wanted = [wanted[tree.start + b : tree.stop + b + 1] for b, tree in enumerate(trees)]
    paths, counts, nexts = [], [], []
    for mine, up, its in zip(token, ups, wanted, strict=True):
        path = follow(mine, up, its)
        counts.append(len(path))
        nexts.append(its[path[-1]])
        paths.append(path + [-1] * (N + 1 - len(path)))
    # numpy converts a list in a third of torch's time.
    path_ = torch.from_numpy(np.array(paths, np.int64).reshape(len(paths), N + 1))
    count, following = (torch.from_numpy(np.array(numbers, np.int64)) for numbers in (counts, nexts))
    if tokens.is_cpu:
        return path_, count, following
    return path_.to(tokens.device), count.to(tokens.device), following.to(tokens.device)


def follow(tokens: list[int], parents: list[int] | None, wanted: list[int]) -> list[int]:
    """Return one tree's path. Parents precede their children, so one pass meets the path's rows in order."""
    path, row = [0], 0
    for j, token in enumerate(tokens):
        up = j if parents is None else parents[j]
        if not 0 <= up <= j:
            raise ValueError(f"the parent of draft {j} must be a row in 0..{j}, got {up}")
        if up == row and token == wanted[row]:
            row = j + 1
            path.append(row)
    return path


@takes(Arguments)
def accept_walk_cost(args: Arguments) -> tuple[int, int]:
    """(bytes, operations) of one call: reads the inputs once, writes path, count, next; two comparisons per draft."""
    N, R = args.tokens.numel(), args.target.numel()
    B = R - N
    inputs = sum(x.nbytes for x in args if x is not None)
    return inputs + 8 * (B * (args.tokens.shape[-1] + 1) + 2 * B), 2 * N


WALK = 256  # drafts compared at a time
_NONE = tl.constexpr(2**31 - 1)  # no matching child


@triton.jit(
    do_not_specialize=["N", "token_stride", "up_stride", "target_stride"],
    do_not_specialize_on_alignment=["tokens_ptr", "parents_ptr", "target_ptr", "cu_drafts_ptr"],
)
def _accept_walk_kernel(
    tokens_ptr,  # [B, N], or [N] for all trees
    parents_ptr,  # like tokens
    target_ptr,  # [B, N + 1] or [N + B]
    cu_drafts_ptr,  # [B + 1]
    path_ptr,  # [B, N + 1]
    count_ptr,  # [B]
    next_ptr,  # [B]
    N,
    token_stride,  # from one tree to the next
    up_stride,
    target_stride,
    RAGGED: tl.constexpr,  # if false, cu_drafts is not read
    CHAIN: tl.constexpr,  # if true, parents are not read
    WALK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_after_previous(PDL)
    i_b = tl.program_id(0).to(tl.int64)
    n = N
    if RAGGED:  # clamped, so that no value causes a read out of bounds
        first = tl.minimum(tl.maximum(tl.load(cu_drafts_ptr + i_b), 0), N).to(tl.int32)
        last = tl.minimum(tl.maximum(tl.load(cu_drafts_ptr + i_b + 1), first), N).to(tl.int32)
        n = last - first
        p_tokens, p_up, p_wanted = tokens_ptr + first, parents_ptr + first, target_ptr + first + i_b
    else:
        p_tokens, p_up = tokens_ptr + i_b * token_stride, parents_ptr + i_b * up_stride
        p_wanted = target_ptr + i_b * target_stride
    p_path = path_ptr + i_b * (N + 1)
    row = tl.full([], 0, tl.int32)
    count = tl.full([], 1, tl.int32)
    tl.store(p_path, row.to(tl.int64))
    for i in tl.range(0, n, WALK):
        o_j = i + tl.arange(0, WALK)
        m_j = o_j < n
        b_token = tl.load(p_tokens + o_j, mask=m_j, other=0)
        if CHAIN:
            b_parent = o_j.to(tl.int64)
        else:
            b_parent = tl.load(p_up + o_j, mask=m_j, other=-1)
            m_j = m_j & (b_parent >= 0) & (b_parent <= o_j)
        m_j = m_j & (tl.load(p_wanted + b_parent, mask=m_j, other=0) == b_token)
        b_parent = b_parent.to(tl.int32)
        # The comparisons with the target are done; following the rows needs only registers.
        child = tl.min(tl.where(m_j & (b_parent == row), o_j, _NONE), axis=0)
        while child < n:
            row = child + 1
            tl.store(p_path + count, row.to(tl.int64))
            count += 1
            child = tl.min(tl.where(m_j & (b_parent == row), o_j, _NONE), axis=0)
    tl.store(count_ptr + i_b, count.to(tl.int64))
    tl.store(next_ptr + i_b, tl.load(p_wanted + row))
    for i in tl.range(0, N + 1, WALK):
        o_j = i + tl.arange(0, WALK)
        tl.store(p_path + o_j, tl.full([WALK], -1, tl.int64), mask=(o_j >= count) & (o_j <= N))


@lru_cache
def _walk_variant(starts: torch.dtype | None, chain: bool) -> Variant:
    """One program per tree. A step of the walk is a comparison and a minimum in registers. One warp, because a minimum
    over several would wait at a barrier."""
    return Variant(
        name=("chain" if chain else "walk") + (f" {TYPES[starts]} starts" if starts else ""),
        kernel=_accept_walk_kernel,
        arguments=("*i64", "*i64", "*i64", f"*{TYPES[starts or torch.int64]}", "*i64", "*i64", "*i64", *("i32",) * 4),
        constexprs={"RAGGED": starts is not None, "CHAIN": chain, "WALK": WALK},
        num_warps=1,
        wide=False,  # a tree's drafts may start at any offset
        smoke=starts is None and not chain,
    )


def variants(arch: int) -> Iterator[Variant]:
    """The variants that the compile-only checks compile for sm_`arch`; the launcher takes any N."""
    for starts in (None, torch.int64, torch.int32):
        for chain in (False, True):
            yield _walk_variant(starts, chain)


@takes(Arguments)
def launch(args: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    tokens, parents, target, cu_drafts = args
    N = tokens.shape[-1]
    tokens, target = (rowwise(x) for x in (tokens, target))
    up = tokens if parents is None else rowwise(parents)  # tokens is a dummy, not read
    starts = tokens if cu_drafts is None else cu_drafts.contiguous()
    path, count, following = results = _results(args)
    if B := len(count):
        stride, up_stride, target_stride = (x.stride(0) if x.dim() == 2 else 0 for x in (tokens, up, target))
        variant = _walk_variant(None if cu_drafts is None else starts.dtype, parents is None)
        variant((B,), tokens, up, target, starts, path, count, following, N, stride, up_stride, target_stride)
    return results


def _check(args: Arguments) -> None:
    tokens, parents, target, cu_drafts = args
    shape = tokens.shape
    if not 1 <= len(shape) <= 2 or tokens.dtype != torch.int64:
        raise ValueError(f"tokens must be [N] or [B, N] int64, got {tuple(shape)} {tokens.dtype}")
    if parents is not None and (parents.shape != shape or parents.dtype != torch.int64):
        raise ValueError(f"parents must be {list(shape)} int64 like tokens, got {tuple(parents.shape)} {parents.dtype}")
    if len(shape) == 2:
        if cu_drafts is not None:
            raise ValueError("trees of one size, tokens [B, N], need no cu_drafts")
        rows: tuple[int, ...] = (shape[0], shape[1] + 1)
    else:
        B = 1
        if cu_drafts is not None:
            if cu_drafts.dim() != 1 or cu_drafts.shape[0] < 1 or cu_drafts.dtype not in (torch.int32, torch.int64):
                raise ValueError(
                    f"cu_drafts must be [B + 1] int32 or int64, got {tuple(cu_drafts.shape)} {cu_drafts.dtype}"
                )
            B = cu_drafts.shape[0] - 1
        rows = (shape[0] + B,)
    if target.shape != rows or target.dtype != torch.int64:
        raise ValueError(
            f"target must have a row for each draft and each root, {list(rows)} int64, got {tuple(target.shape)} "
            f"{target.dtype}"
        )
    same_device(tokens, parents=parents, target=target, cu_drafts=cu_drafts)


def _results(args: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for path, count and next."""
    tokens, N, R = args.tokens, args.tokens.shape[-1], args.target.shape[0]
    B = R if tokens.dim() == 2 else R - N
    return tokens.new_empty(B, N + 1), tokens.new_empty(B), tokens.new_empty(B)


_accept_walk = register(accept_walk, Arguments, check=_check, reference=accept_walk_ref, launch=launch, fake=_results)
