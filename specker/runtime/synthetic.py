"""Acceptance that is given instead of earned, to size a deployment before its draft is trained: after each row on the
drafted path the target agrees with the draft with probability p, whatever the models say.

The row at position i agrees iff u(seed, i) < p, u uniform and independent (Philox, apart from the noise of sampling). A
position stands on the accepted path exactly once, so a round whose longest path is of k drafts commits
(1 - p^(k+1)) / (1 - p) tokens on average. Nothing else of a round changes; the generated text is meaningless.
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


def synthetic(target: Tensor, tokens: Tensor, parents: Tensor | None, positions: Tensor, table: Tensor) -> Tensor:
    """The target's tokens [n, N + 1], made to agree as `table` [n, P] (bool, by position) says. A row that agrees has
    the token of its first child on the longest path below it (in a chain: of its child). One that does not keeps its
    own, or where that is a child's takes the lowest id of no child.

    tokens, parents [n, N]: the drafts, parents as rows, None for chains; a parent of -1 is padding, whatever its token.
    positions [n, N + 1] of the rows, within the table: depth by depth one more. All int64. A row's children must not be
    the whole vocabulary. Shapes depend on n and N alone and nothing is read on the host, as CUDA graphs require."""
    n, N = tokens.shape
    if N == 0:
        return target
    rows = torch.arange(N + 1, device=target.device)
    if parents is None:
        parents = rows[:N].expand(n, N)
    child = parents.unsqueeze(1) == rows[:, None]  # [n, N + 1, N]
    deepest = _deepest(parents, positions)
    first = torch.where(child & (deepest[:, None, 1:] == deepest.unsqueeze(2)), rows[:N], N).amin(2)  # N: no child
    agrees = table.gather(1, positions) & (first < N)
    known = child & (tokens.unsqueeze(1) == target.unsqueeze(2))
    wide = N + 2  # rows -1..N; ids 0..N, then all above them
    taken = torch.zeros(n, wide * wide, dtype=torch.bool, device=target.device)
    taken.scatter_(1, (parents + 1) * wide + tokens.clamp(0, N + 1), True)
    free = torch.where(taken.view(n, wide, wide)[:, 1:, : N + 1], N, rows).amin(2)  # N drafts leave one of N + 1 ids
    own = torch.where(known.any(2), free, target)
    return torch.where(agrees, tokens.gather(1, first.clamp(max=N - 1)), own)


def _deepest(parents: Tensor, positions: Tensor) -> Tensor:
    """The last position [n, N + 1] of any row below each row, or its own. The steps up double: after i of them a row
    has heard of all that stand less than 2^i below it."""
    n, N = parents.shape
    padded = torch.where(parents < 0, N + 1, parents)
    up = torch.cat((parents.new_zeros(n, 1), padded, parents.new_full((n, 1), N + 1)), 1)
    deepest = torch.cat((positions, positions[:, :1]), 1)  # the last row is the padding's parent
    for _ in range(N.bit_length()):
        deepest = deepest.scatter_reduce(1, up, deepest, "amax")
        up = up.gather(1, up)
    return deepest[:, :-1]
