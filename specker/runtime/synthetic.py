"""Acceptance that is given instead of earned, to size a deployment before its draft is trained: after each row on the
drafted path the target agrees with the draft with probability p, whatever the models say.

The row at position i agrees iff u(seed, i) < p, u uniform and independent (Philox, apart from the noise of sampling). A
position stands on the accepted path exactly once, so a round whose longest path is of k drafts commits
(1 - p^(k+1)) / (1 - p) tokens on average. Nothing else of a round changes; its tokens are nobody's.
"""

import torch
from torch import Tensor

from specker.kernels.noise import MASK, STREAM, philox4x32

COINS = STREAM + 1  # the fourth counter word


def agreements(p: float, seed: int, count: int) -> Tensor:
    """Whether the row at each position 0..count-1 agrees: [count] bool, on the CPU, a function of p, seed and position
    alone. Where a p agrees, a larger one does too."""
    positions = torch.arange(count)
    words = philox4x32(torch.zeros_like(positions), positions & MASK, positions >> 32, COINS, seed)[0]
    return words < p * 2.0**32


def synthetic(target: Tensor, tokens: Tensor, parents: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """The target's tokens [N + 1], made to agree as `table` (bool, by position) says. A row that agrees has the token
    of its first child on the longest path below it (in a chain: of its child). One that does not keeps its own, or
    where that is a child's takes the lowest id of no child.

    tokens, parents [N]: the draft, parents as rows; a parent of -1 is padding, whatever its token. positions [N + 1] of
    the rows, within the table: depth by depth one more. All int64. A row's children must not be the whole vocabulary.
    Shapes depend on N alone and nothing is read on the host, so that it can stand in a CUDA graph."""
    N = len(tokens)
    if N == 0:
        return target
    rows = torch.arange(N + 1, device=target.device)
    child = parents == rows[:, None]  # [N + 1, N]
    deepest = _deepest(parents, positions)
    first = torch.where(child & (deepest[1:] == deepest[:, None]), rows[:N], N).amin(1)  # N: no child
    agrees = table[positions] & (first < N)
    known = child & (tokens == target[:, None])
    wide = N + 2  # rows -1..N; ids 0..N, then all above them
    taken = torch.zeros(wide * wide, dtype=torch.bool, device=target.device)
    taken.scatter_(0, (parents + 1) * wide + tokens.clamp(0, N + 1), True)
    free = torch.where(taken.view(wide, wide)[1:, : N + 1], N, rows).amin(1)  # N drafts leave one of N + 1 ids
    own = torch.where(known.any(1), free, target)
    return torch.where(agrees, tokens[first.clamp(max=N - 1)], own)


def _deepest(parents: Tensor, positions: Tensor) -> Tensor:
    """The last position [N + 1] of any row below each row, or its own. The steps up double: after n of them a row has
    heard of all that stand less than 2^n below it."""
    N = len(parents)
    up = torch.cat((parents.new_zeros(1), torch.where(parents < 0, N + 1, parents), parents.new_full((1,), N + 1)))
    deepest = torch.cat((positions, positions[:1]))  # the last row is the padding's parent
    for _ in range(N.bit_length()):
        deepest = deepest.scatter_reduce(0, up, deepest, "amax")
        up = up[up]
    return deepest[:-1]
