"""Grow a tree through the lattice of a block that was guessed in one pass, on the device.

The lattice has the best candidates of each position. A scorer says what a path adds to their logits; the most probable
beginnings of paths are then found level by level, as EAGLE-2 finds those of its trees (kernels/round/grow.py). A
candidate c after a path has

    log p(c | path) = z(c) - log sum over candidates of exp(z) + log(mass of the candidates)
    z(c)            = the drafter's logit + what the scorer adds, both over the temperature, + the noise of the draw

where the mass is the drafter's own. A level keeps its `WIDTH` best nodes, after which a scorer runs for all of them at
once; the tree is the best candidates of all levels (DARTree, arXiv 2608.13524).
"""

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from specker.kernels.round.grow import Candidates, grow, prune
from specker.runtime.round.batch import Batch
from specker.runtime.round.drafter import Draft

WIDTH = 8  # nodes of a level after which candidates are scored


class Lattice(NamedTuple):
    """Candidates of k positions of n blocks."""

    ids: Tensor  # [n, k, K] int64
    logits: Tensor  # [n, k, K], over the temperature, with the noise of the draws; -inf: not in the lattice
    mass: Tensor  # [n, k], log of the candidates' share of the drafter's probability


def lattice(ids: Tensor, logits: Tensor, lse: Tensor, mass: float) -> Lattice:
    """The lattice of candidates [n, k, K], descending by their logits [n, k, K], of which the fewest that have the
    probability `mass` together stay. lse [n, k]: over all tokens."""
    log_p = logits - lse.unsqueeze(2)
    before = log_p.exp().cumsum(2).roll(1, 2)
    before[..., 0] = 0.0
    kept = log_p.masked_fill(before >= mass, -math.inf)
    return Lattice(ids, kept + lse.unsqueeze(2), kept.logsumexp(2).clamp_(max=0.0))


def size(depth: int, candidates: int, nodes: int) -> int:
    """The nodes of a tree of `depth` levels: `nodes`, or as many as there are."""
    width = min(WIDTH, nodes)
    each = min(width, candidates)
    return min(nodes, sum(min(each**level, width * each) for level in range(1, depth + 1)))


class Scorer(Protocol):
    def added(self, depth: int, tokens: Tensor, up: Tensor) -> Tensor | None:
        """What is added to the logits of the candidates of position `depth` after m nodes of each block, [n, m, K] over
        the temperature; None for nothing. Called for depths 0, 1, .. in turn. tokens [n, m] int64: of the nodes, at
        first the roots; up [n, m] int64: the node of the last level that each one follows."""
        ...


def grow_tree(batch: Batch, draft: Draft, lattice: Lattice, scorer: Scorer | None) -> None:
    """Write trees of `draft.size` nodes, of which the lattice has as many (`size`)."""
    (n, k, K), device, width = lattice.ids.shape, lattice.ids.device, min(WIDTH, draft.size)
    tokens, parents = torch.empty((2, n, width * k), dtype=torch.int64, device=device).unbind(0)
    scores = lattice.logits.new_empty((n, width * k))
    every = Candidates.empty(n, width, k, scores.dtype, device)
    nodes, up = batch.window[:, :1], tokens.new_zeros((n, 1))
    for depth in range(k):
        at, m = depth * width, nodes.shape[1]
        z = lattice.logits[:, depth].unsqueeze(1).expand(n, m, K)
        if scorer is not None and (added := scorer.added(depth, nodes, up)) is not None:
            z = z + added.to(z.dtype)
        if width > K:
            z = pad(z, (0, width - K), value=-math.inf)
        best, which = z.topk(width)
        ids = lattice.ids[:, depth].unsqueeze(1).expand(n, m, K).gather(2, which.clamp(max=K - 1))
        lse = z.logsumexp(2) - lattice.mass[:, depth : depth + 1]
        grow(ids.view(-1, width), best.view(-1, width), lse.view(-1), tokens, parents, scores, at, every)
        nodes = tokens[:, at : at + width]
        up = parents[:, at : at + width]
        up = up - (at - width + 1) if at else up
    prune(every, batch.window[:, 1 : draft.size + 1], batch.state.parents[:, : draft.size])
