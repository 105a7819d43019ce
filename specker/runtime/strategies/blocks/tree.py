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

from typing import Protocol

from torch import Tensor

from specker.kernels.round.grow import prune
from specker.kernels.round.lattice import Lattice, Paths, search_lattice
from specker.runtime.round.batch import Batch

WIDTH = 8  # nodes of a tree's level after which candidates are scored


def size(depth: int, candidates: int, nodes: int) -> int:
    """The nodes of a tree of `depth` levels: `nodes`, or as many as there are."""
    width = min(WIDTH, nodes)
    each = min(width, candidates)
    return min(nodes, sum(min(each**level, width * each) for level in range(1, depth + 1)))


class Scorer(Protocol):
    def table(self, roots: Tensor) -> Tensor | None:
        """What is added to the scores of the candidates of all positions over the temperature [n, k, K, K], where that
        depends only on the token before: row c after candidate c of the position before. At first all rows are those
        after the `roots` [n, 1] int64. None if it depends on more of a path: then `added` says it."""
        ...

    def added(self, depth: int, tokens: Tensor, up: Tensor | None) -> Tensor | None:
        """What is added to the scores of the candidates of position `depth` after m nodes of each block, [n, m, K] over
        the temperature; None for nothing. Called for depths 0, 1, .. in turn. tokens [n, m] int64: of the nodes, at
        first the roots; up [n, m] int64: the node of the last level that each one follows, None for roots."""
        ...


def write_tree(
    batch: Batch, found: Lattice, scorer: Scorer | None, stops: Tensor, nodes: int, score: Tensor | None = None
) -> Tensor:
    """Write trees of `nodes` nodes, of which the lattice has as many (`size`). `stops` [s] int64: ids after which
    nothing is worth a node. Returns the scores of the best paths through all positions, a token's share [n]; in
    `score` [n] if given."""
    (n, k, _), width = found.ids.shape, min(WIDTH, nodes)
    paths = Paths.empty(n, width, k, found.log_p.dtype, found.ids.device)
    score = _levels(batch, found, scorer, stops, paths, score)
    prune(paths.candidates, batch.window[:, 1 : nodes + 1], batch.state.parents[:, :nodes])
    return score


def write_chain(
    batch: Batch, found: Lattice, scorer: Scorer | None, stops: Tensor, width: int, score: Tensor | None = None
) -> Tensor:
    """Write the best paths that a beam of `width` paths finds. `stops` [s] int64: ids at which a path ends. Returns as
    `write_tree`."""
    n, k, _ = found.ids.shape
    paths = Paths.empty(n, width, k, found.log_p.dtype, found.ids.device)
    return _levels(batch, found, scorer, stops, paths, score, batch.window[:, 1 : k + 1])


def _levels(
    batch: Batch,
    found: Lattice,
    scorer: Scorer | None,
    stops: Tensor,
    paths: Paths,
    score: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    """Grow all levels of trees, or of beams, whose best path is written to `out`. Where no more than the token before
    matters, in one call."""
    (n, k, _), width, roots = found.ids.shape, paths.candidates.width, batch.window[:, :1]
    score = found.log_p.new_empty(n) if score is None else score
    table = None if scorer is None else scorer.table(roots)
    if scorer is None or table is not None:
        search_lattice(found, table, stops, paths, score, 0, k, out)
        return score
    nodes, up = roots, None
    for depth in range(k):
        search_lattice(found, scorer.added(depth, nodes, up), stops, paths, score, depth, 1, out)
        level = slice(depth * width, (depth + 1) * width)
        nodes, up = paths.tokens[:, level], paths.up[:, level]
    return score
