"""Synthetic acceptance, to size a deployment before its draft is trained: after each row on the drafted path the target
agrees with the draft with probability p, regardless of the models' tokens.

The row at position i agrees iff u(seed, i) < p, with u uniform and independent (Philox, on another stream than the
sampling noise). Each position is on the accepted path exactly once, so a round with a longest path of k drafts commits
(1 - p^(k+1)) / (1 - p) tokens on average. The rest of the round is unchanged; the generated text is meaningless.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from specker.kernels.noise import MASK, STREAM, philox4x32

COINS = STREAM + 1  # the fourth counter word


def agreements(p: float, seed: int, count: int) -> Tensor:
    """Whether the row at each position 0..count-1 agrees: [count] bool on the CPU. It depends only on p, seed and
    position, and a larger p agrees at a superset of positions."""
    positions = torch.arange(count, dtype=torch.int64, device="cpu")
    words = philox4x32(torch.zeros_like(positions), positions & MASK, positions >> 32, COINS, seed)[0]
    return words < p * 2.0**32


def spread(vocab: int, slot: int, places: Iterable[int]) -> list[int]:
    """Tokens from all over the vocabulary, one for each place in a slot's text, which choose different experts. Random
    models, and all models after a text without meaning, may draft one token again and again, whose rows share them."""
    return [(7919 * i + 104729 * slot + 1) % vocab for i in places]


def synthetic(target: Tensor, tokens: Tensor, parents: Tensor | None, positions: Tensor, table: Tensor) -> Tensor:
    """Make the target's tokens [n, N + 1] int64 agree with the draft according to `table` [n, P] bool, by position. A
    row that agrees takes the token of its first child on the longest path below it (a chain's row has one child). A row
    that disagrees keeps its own token, or takes the lowest id that no child has if a child has that token.

    tokens, parents [n, N] int64: the drafts; parents are rows, None for chains, and -1 marks padding. positions
    [n, N + 1] int64, below P: a child's position is its parent's plus one. A row's children must not cover the whole
    vocabulary. Shapes depend on n and N only and the host reads nothing, as CUDA graphs require."""
    n, N = tokens.shape
    if N == 0:
        return target
    rows = torch.arange(N + 1, dtype=torch.int64, device=target.device)
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
    free = torch.where(taken.view(n, wide, wide)[:, 1:, : N + 1], N, rows).amin(2)  # N drafts cannot take all N + 1 ids
    own = torch.where(known.any(2), free, target)
    return torch.where(agrees, tokens.gather(1, first.clamp(max=N - 1)), own)


def _deepest(parents: Tensor, positions: Tensor) -> Tensor:
    """The last position [n, N + 1] int64 of each row's subtree, by pointer doubling: after i steps a row knows all rows
    less than 2^i levels below it."""
    n, N = parents.shape
    padded = torch.where(parents < 0, N + 1, parents)
    up = torch.cat((parents.new_zeros(n, 1), padded, parents.new_full((n, 1), N + 1)), 1)
    deepest = torch.cat((positions, positions[:, :1]), 1)  # the last row is the padding's parent
    for _ in range(N.bit_length()):
        deepest = deepest.scatter_reduce(1, up, deepest, "amax")
        up = up.gather(1, up)
    return deepest[:, :-1]
