"""accept_walk: what a round keeps: follow the draft as far as it agrees.

A draft of n tokens is a tree over verify rows 0..n: row 0 the root, draft j in row j + 1 and its parent in
row parents[j] <= j. From row r the walk goes to the child whose token is target[r], the first of equal siblings, and
stops where there is none. The emitted tokens are the target's own, so nothing more is needed to be exact. Integers.
"""

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from specker.kernels.variant import TYPES, Variant, same_device, tl, triton


def accept_walk(
    tokens: Tensor, parents: Tensor, target: Tensor, cu_drafts: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The accepted path in each of B draft trees.

    tokens, parents [N] int64: the drafts of all trees, one tree after another; parents are rows of the own tree.
    target [N + B] int64: the target's token after each verify row; tree b's rows start at cu_drafts[b] + b.
    cu_drafts [B + 1] int32 or int64: where each tree's drafts start, then N; None is one tree. N = 0 is legal.

    Returns int64 path [B, N + 1], the rows of the own tree from the root on, padded with -1 (N bounds every tree and is
    known without reading cu_drafts); count [B] = accepted + 1; next [B], the target after the path's last row.
    Raises ValueError on other shapes and dtypes and, on a CPU, on values that are no trees. On CUDA nothing is read on
    the host: from such values comes rubbish, but nothing is read or written out of bounds.
    """
    if torch.compiler.is_compiling():
        return torch.ops.specker.accept_walk(tokens, parents, target, cu_drafts)
    return _accept_walk(tokens, parents, target, cu_drafts)


def _accept_walk(
    tokens: Tensor, parents: Tensor, target: Tensor, cu_drafts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    _check_walk(tokens, parents, target, cu_drafts)
    if tokens.is_cuda:
        return _launch_walk(tokens, parents, target, cu_drafts)
    return accept_walk_ref(tokens, parents, target, cu_drafts)


def accept_walk_ref(
    tokens: Tensor, parents: Tensor, target: Tensor, cu_drafts: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    token, parent, wanted = tokens.tolist(), parents.tolist(), target.tolist()
    N = len(token)
    starts = [0, N] if cu_drafts is None else cu_drafts.tolist()
    if starts[0] != 0 or starts[-1] != N or starts != sorted(starts):
        raise ValueError(f"cu_drafts must rise from 0 to {N}, got {starts}")
    paths, counts, nexts = [], [], []
    for b in range(len(starts) - 1):
        first, n = starts[b], starts[b + 1] - starts[b]
        root = first + b  # of target
        row, path = 0, [0]
        for j in range(n):  # parents come before their children, so one pass meets the path's rows in order
            up = parent[first + j]
            if not 0 <= up <= j:
                raise ValueError(f"parents[{first + j}] must be a row in 0..{j}, got {up}")
            if up == row and token[first + j] == wanted[root + row]:
                row = j + 1
                path.append(row)
        counts.append(len(path))
        nexts.append(wanted[root + row])
        paths.append(path + [-1] * (N + 1 - len(path)))
    path_rows = torch.tensor(paths, dtype=torch.int64, device=tokens.device).view(-1, N + 1)  # B = 0 too
    return path_rows, tokens.new_tensor(counts), tokens.new_tensor(nexts)


def accept_walk_cost(
    tokens: Tensor, parents: Tensor, target: Tensor, cu_drafts: Tensor | None = None
) -> tuple[int, int]:
    """(bytes, operations) of one call: every input once, path, count and next out; two comparisons a draft."""
    N, R = tokens.numel(), target.numel()
    B = R - N
    starts = 0 if cu_drafts is None else cu_drafts.numel() * cu_drafts.element_size()
    return 8 * (2 * N + R + B * (N + 1) + 2 * B) + starts, 2 * N


WALK = 256  # drafts at a time
_NONE = tl.constexpr(2**31 - 1)  # no id


@triton.jit(
    do_not_specialize=["N"],
    do_not_specialize_on_alignment=["tokens_ptr", "parents_ptr", "target_ptr", "cu_drafts_ptr"],
)
def _accept_walk_kernel(
    tokens_ptr,  # [N]
    parents_ptr,  # [N]
    target_ptr,  # [N + B]
    cu_drafts_ptr,  # [B + 1]
    path_ptr,  # [B, N + 1]
    count_ptr,  # [B]
    next_ptr,  # [B]
    N,
    SEVERAL: tl.constexpr,  # trees; else cu_drafts is not read
    WALK: tl.constexpr,
):
    i_b = tl.program_id(0)
    first, last = 0, N
    if SEVERAL:  # clamped, so that whatever they hold nothing is read out of bounds
        first = tl.minimum(tl.maximum(tl.load(cu_drafts_ptr + i_b), 0), N).to(tl.int32)
        last = tl.minimum(tl.maximum(tl.load(cu_drafts_ptr + i_b + 1), first), N).to(tl.int32)
    n = last - first
    p_wanted = target_ptr + first + i_b
    p_path = path_ptr + i_b.to(tl.int64) * (N + 1)
    row = tl.full([], 0, tl.int32)
    count = tl.full([], 1, tl.int32)
    tl.store(p_path, row.to(tl.int64))
    for i in tl.range(0, n, WALK):
        o_j = i + tl.arange(0, WALK)
        m_j = o_j < n
        b_token = tl.load(tokens_ptr + first + o_j, mask=m_j, other=0)
        b_parent = tl.load(parents_ptr + first + o_j, mask=m_j, other=-1)
        m_j = m_j & (b_parent >= 0) & (b_parent <= o_j)
        m_j = m_j & (tl.load(p_wanted + b_parent, mask=m_j, other=0) == b_token)
        b_parent = b_parent.to(tl.int32)
        # All comparisons with the target are made; what is left is to follow the rows, in registers.
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
def _walk_variant(several: bool, starts: torch.dtype) -> Variant:
    """One program a tree. A step of the walk is a comparison and a minimum in registers; of a single warp, since the
    minimum over several would wait at a barrier."""
    return Variant(
        name=f"walk {TYPES[starts]} starts" if several else "walk one tree",
        kernel=_accept_walk_kernel,
        arguments=("*i64", "*i64", "*i64", f"*{TYPES[starts]}", "*i64", "*i64", "*i64", "i32"),
        constexprs={"SEVERAL": several, "WALK": WALK},
        num_warps=1,
        wide=False,  # drafts may start anywhere
        smoke=not several,
    )


def variants(arch: int) -> Iterator[Variant]:
    """What the compile-only checks compile for sm_`arch`; the launcher takes any N."""
    yield _walk_variant(False, torch.int64)
    yield _walk_variant(True, torch.int64)
    yield _walk_variant(True, torch.int32)


def _launch_walk(
    tokens: Tensor, parents: Tensor, target: Tensor, cu_drafts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    same_device(tokens, parents=parents, target=target, cu_drafts=cu_drafts)
    tokens, parents, target = tokens.contiguous(), parents.contiguous(), target.contiguous()
    starts = tokens if cu_drafts is None else cu_drafts.contiguous()  # without it nothing is read there
    N = tokens.shape[0]
    B = target.shape[0] - N
    path, count, following = tokens.new_empty(B, N + 1), tokens.new_empty(B), tokens.new_empty(B)
    if B:
        variant = _walk_variant(cu_drafts is not None, starts.dtype)
        variant((B,), tokens, parents, target, starts, path, count, following, N)
    return path, count, following


def _check_walk(tokens: Tensor, parents: Tensor, target: Tensor, cu_drafts: Tensor | None) -> None:
    for name, x in (("tokens", tokens), ("parents", parents), ("target", target)):
        if x.dim() != 1 or x.dtype != torch.int64:
            raise ValueError(f"{name} must be a vector of int64, got {tuple(x.shape)} {x.dtype}")
    if parents.shape != tokens.shape:
        raise ValueError(f"parents must be [{tokens.shape[0]}] like tokens, got {tuple(parents.shape)}")
    B = 1
    if cu_drafts is not None:
        if cu_drafts.dim() != 1 or cu_drafts.shape[0] < 1 or cu_drafts.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"cu_drafts must be [B + 1] int32 or int64, got {tuple(cu_drafts.shape)} {cu_drafts.dtype}"
            )
        B = cu_drafts.shape[0] - 1
    if target.shape[0] != tokens.shape[0] + B:
        raise ValueError(
            f"target must have a row for each draft and each root, [{tokens.shape[0]} + {B}], got {tuple(target.shape)}"
        )


def _fake_walk(
    tokens: Tensor, parents: Tensor, target: Tensor, cu_drafts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    _check_walk(tokens, parents, target, cu_drafts)
    B = target.shape[0] - tokens.shape[0]
    return tokens.new_empty(B, tokens.shape[0] + 1), tokens.new_empty(B), tokens.new_empty(B)


_lib = torch.library.Library("specker", "FRAGMENT")
_lib.define("accept_walk(Tensor tokens, Tensor parents, Tensor target, Tensor? cu_drafts) -> (Tensor, Tensor, Tensor)")
_lib.impl("accept_walk", _accept_walk, "CompositeExplicitAutograd")
torch.library.register_fake("specker::accept_walk", _fake_walk, lib=_lib)
