"""Search the lattice of a block that was guessed in one pass for a chain or a tree, on the device.

One pass guesses each position independently, and the lattice has its best candidates. A scorer says what a path adds to
the scores of the candidates after it, and paths grow level by level: a level keeps its best nodes, after which a scorer
runs for all of them at once. A candidate c after a path scores

    z(c) = log p_drafter(c), at the temperature and with the noise of the target's draw, + what the scorer adds

A *tree* is made of the beginnings of paths that are most probable, as EAGLE-2 finds those of its trees
(kernels/round/grow.py). A candidate has its share of exp(z) among the candidates after the same path, times the
drafter's probability of these candidates:

    log p(c | path) = z(c) - log sum over candidates of exp(z) + log(mass of the candidates)

A beginning is at least as probable as what continues it, so the most probable ones are a tree, and no other tree of
this size has a larger expected number of accepted tokens (DARTree, arXiv 2608.13524, over a level's `WIDTH` nodes).

A *chain* is the path with the largest sum of z that a beam search finds (CPS of DiffuSpec, arXiv 2510.02358). A path
ends at a stop token. To keep short paths from winning by having fewer terms, an ended one adds the best z of each later
position; it goes on with the stop token.
"""

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from specker.kernels.round.grow import Candidates, grow, prune
from specker.runtime.round.batch import Batch

WIDTH = 8  # nodes of a tree's level after which candidates are scored


class Lattice(NamedTuple):
    """Candidates of k positions of n blocks."""

    ids: Tensor  # [n, k, K] int64
    log_p: Tensor  # [n, k, K], over the temperature, with the noise of the draws; -inf: not in the lattice
    mass: Tensor  # [n, k], log of the candidates' share of the drafter's probability


def lattice(ids: Tensor, log_p: Tensor, mass: float, stops: int = 0) -> Lattice:
    """The lattice of candidates [n, k, K], descending by their log_p [n, k, K], of which the fewest that have the
    probability `mass` together stay. Behind them come the ids of `stops` stop tokens, which stay too."""
    best = log_p[..., : ids.shape[2] - stops]
    before = best.exp().cumsum(2).roll(1, 2)
    before[..., 0] = -1.0  # the first one stays
    dropped = before >= mass
    if stops:  # those that are candidates already count once
        again = (ids[..., -stops:, None] == ids[..., None, :-stops]) & ~dropped.unsqueeze(2)
        dropped = torch.cat((dropped, again.any(3)), 2)
    log_p = log_p.masked_fill(dropped, -math.inf)
    return Lattice(ids, log_p, log_p.logsumexp(2).clamp_(max=0.0))


def size(depth: int, candidates: int, nodes: int) -> int:
    """The nodes of a tree of `depth` levels: `nodes`, or as many as there are."""
    width = min(WIDTH, nodes)
    each = min(width, candidates)
    return min(nodes, sum(min(each**level, width * each) for level in range(1, depth + 1)))


class Scorer(Protocol):
    def added(self, depth: int, tokens: Tensor, up: Tensor) -> Tensor | None:
        """What is added to the scores of the candidates of position `depth` after m nodes of each block, [n, m, K] over
        the temperature; None for nothing. Called for depths 0, 1, .. in turn. tokens [n, m] int64: of the nodes, at
        first the roots; up [n, m] int64: the node of the last level that each one follows."""
        ...


def write_tree(batch: Batch, found: Lattice, scorer: Scorer | None, stops: Tensor, nodes: int) -> Tensor:
    """Write trees of `nodes` nodes, of which the lattice has as many (`size`). `stops` [s] int64: ids after which
    nothing is worth a node. Returns the scores of the best paths through all positions [n]."""
    (n, k, _), width = found.ids.shape, min(WIDTH, nodes)
    every = Candidates.empty(n, width, k, found.log_p.dtype, found.ids.device)
    _, _, scores, _ = _levels(batch, found, scorer, stops, width, every)
    prune(every, batch.window[:, 1 : nodes + 1], batch.state.parents[:, :nodes])
    return scores[:, (k - 1) * width]


def write_chain(batch: Batch, found: Lattice, scorer: Scorer | None, stops: Tensor, width: int) -> Tensor:
    """Write the best paths that a beam of `width` paths finds. `stops` [s] int64: ids at which a path ends. Returns the
    paths' scores [n]."""
    n, k, _ = found.ids.shape
    tokens, parents, scores, tolls = _levels(batch, found, scorer, stops, width)
    last = (k - 1) * width  # the best of the last level
    node = tokens.new_full((n, 1), last)
    for depth in reversed(range(k)):
        batch.window[:, depth + 1] = tokens.gather(1, node)[:, 0]
        node = parents.gather(1, node) - 1
    return scores[:, last] + tolls


def _levels(
    batch: Batch, found: Lattice, scorer: Scorer | None, stops: Tensor, width: int, every: Candidates | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Grow all levels, of trees, of which `every` collects the candidates, or of beams. Returns the nodes' tokens and
    parents (rows) [n, width * k] int64 and their scores [n, width * k], and what was taken from those of all paths of a
    beam [n], the best of each position, so that no score is positive."""
    (n, k, K), log_p = found.ids.shape, found.log_p
    tokens, parents = found.ids.new_empty((2, n, width * k)).unbind(0)
    scores, tolls = log_p.new_empty((n, width * k)), log_p.new_zeros(n)
    nodes, up = batch.window[:, :1], tokens.new_zeros((n, 1))
    ended = torch.zeros_like(up, dtype=torch.bool)
    for depth in range(k):
        at, m = depth * width, nodes.shape[1]
        z = log_p[:, depth].unsqueeze(1).expand(n, m, K)
        ids = found.ids[:, depth].unsqueeze(1).expand(n, m, K)
        added = None if scorer is None else scorer.added(depth, nodes, up)
        z = z if added is None else z + added.to(z.dtype)
        if every is not None:
            lse = log_p.new_zeros(n, m) if added is None else z.logsumexp(2) - found.mass[:, depth : depth + 1]
            lse = lse.masked_fill(ended, math.inf)
        else:  # the first candidate of an ended path stands for its last token
            z = z.masked_fill(ended.unsqueeze(2), -math.inf)
            toll = z.amax((1, 2)).masked_fill(ended.all(1), 0.0)
            lse, tolls = toll.unsqueeze(1).expand(n, m), tolls + toll
            z[..., 0] = torch.where(ended, lse, z[..., 0])
            ids = torch.where(ended.unsqueeze(2), nodes.unsqueeze(2), ids)
        if width > K:
            z, ids = pad(z, (0, width - K), value=-math.inf), pad(ids, (0, width - K))
        best, which = z.topk(width)
        ids = ids.gather(2, which)
        grow(ids.view(-1, width), best.view(-1, width), lse.reshape(-1), tokens, parents, scores, at, every)
        level = slice(at, at + width)
        nodes, up = tokens[:, level], parents[:, level] - max(0, at - width + 1)
        ended = (nodes.unsqueeze(2) == stops).any(2)
        if every is None:  # and paths that the lattice does not hold
            ended |= scores[:, level].isneginf()
    return tokens, parents, scores, tolls
