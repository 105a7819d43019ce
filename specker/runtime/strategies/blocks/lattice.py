"""Causal-consistency path search (CPS of DiffuSpec, arXiv 2510.02358) through a block that was guessed in one pass.

One pass guesses each position independently. The most probable tokens of each position form a lattice, and a token's
score after a path is

    s(token) = lambda log p_drafter(token) + (1 - lambda) log p_ngram(token | two before) + g(token)

where lambda is 1 at the first position: there the drafter sees the whole text, an n-gram model only two tokens. (The
paper uses one lambda for all positions, as `Search.both` does; bench/LOG.md compares them.) From the second position
on, the n-gram model knows the previous token and the drafter does not. g is the noise of the target's draw at that
position (0 when greedy), so a path is the likeliest *draw*. A path that reaches a stop token ends there.

A chain is the path with the largest sum of scores that a beam search from left to right finds. To keep short paths from
winning by having fewer terms, an ended path adds the best next-token score at each later position.

A tree is made of the beginnings of paths that are most probable, found best first: a token has the share of exp(s)
among the candidates after the same path, times the drafter's probability of these candidates. A beginning is at least
as probable as what continues it, so the most probable ones are a tree, and no other tree of this size has a larger sum
of probabilities, which is the expected number of accepted tokens.
"""

import heapq
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from specker.runtime.strategies.blocks import BEAM, CANDIDATES, TREE_NODES
from specker.runtime.strategies.blocks.ngram import NGram


@dataclass(frozen=True)
class Lattice:
    """Candidates of k positions, numpy: M columns of candidates, then one column per stop id."""

    ids: Any  # [k, M + stops] int64
    log_p: Any  # [k, M + stops] float, of the diffusion model at the temperature, without noise; with noise, up to a
    # constant per position, which does not change the order of paths
    noise: Any  # [k, M + stops] float, or None
    kept: Any  # [k, M + stops] bool: whether the candidate is in the lattice

    @property
    def width(self) -> float:
        """Mean candidates per position."""
        return float(self.kept.sum(1).mean())


@dataclass(frozen=True)
class Path:
    tokens: tuple[int, ...]  # at most k, fewer if it ended
    score: float  # the sum in the module docstring
    ended: bool = False  # whether it ends with a stop token


@dataclass(frozen=True)
class Search:
    """Parameters of the path search. The defaults are the fastest measured with the bundled models."""

    ngram: NGram | None = None
    tree: bool = False  # True: draft the most probable beginnings of paths; False: the best path
    paths: int = BEAM  # B of a chain's beam
    nodes: int = TREE_NODES  # most tokens of a tree for each position of its block
    candidates: int = CANDIDATES  # M, the most candidates per position
    mass: float = 0.8  # tau: keep the fewest candidates with this much probability
    weight: float = 0.85  # lambda from the second position on (0.5 in the paper); 1 without an n-gram model
    both: bool = False  # whether lambda is the same at the first position, as in the paper; else it is 1


def lattice(ids: Any, ranks: Any, noise: Any, mass: float, stops: int = 0) -> Lattice:
    """For each position, the smallest set of candidates with probability `mass`, and the stop ids.

    ids [k, M + stops] int64: M candidates by descending `ranks`, then the stop ids. ranks [k, M + stops]:
    log-probabilities, perturbed above temperature 0. noise [k, M + stops] or None.
    """
    M = ids.shape[1] - stops
    kept = np.ones(ids.shape, bool)
    before = np.exp(ranks[:, :M]).cumsum(1)[:, :-1]
    kept[:, 1:M] = before < mass
    if stops:  # drop a stop id's column if it is already a candidate
        twice = (ids[:, M:, None] == ids[:, None, :M]) & kept[:, None, :M]
        kept[:, M:] = ~twice.any(2)
    return Lattice(ids, ranks if noise is None else ranks - noise, noise, kept)


def best_paths(
    found: Lattice, how: Search, before: tuple[int, int], stop_ids: frozenset[int], temperature: float = 0.0
) -> list[Path]:
    """The `how.paths` best paths, best first. `before`: the last two tokens of the text, -1 for none."""
    own = _own_scores(found, how)
    beam = [Path((), 0.0)]
    for i in range(len(found.ids)):
        living = [path for path in beam if not path.ended]
        if not living:
            break
        ids, terms = found.ids[i, found.kept[i]], own[None, i, found.kept[i]]
        if how.ngram is not None and (i or how.both):
            tails = np.array([(*before, *path.tokens)[-2:] for path in living], np.int64)
            terms = terms + _ngram_share(how, temperature) * how.ngram.log_p(tails, ids)
        total = (np.array([[path.score] for path in living]) + terms).ravel()
        toll, tokens = float(terms.max()), ids.tolist()
        beam = [Path(path.tokens, path.score + toll, True) for path in beam if path.ended]
        for n in (-total).argsort(kind="stable")[: how.paths].tolist():
            row, column = divmod(n, len(tokens))
            token = tokens[column]
            beam.append(Path((*living[row].tokens, token), float(total[n]), token in stop_ids))
        beam = sorted(beam, key=lambda path: -path.score)[: how.paths]
    return beam


def best_tree(
    found: Lattice,
    how: Search,
    before: tuple[int, int],
    stop_ids: frozenset[int],
    nodes: int,
    temperature: float = 0.0,
) -> tuple[list[Path], list[int]]:
    """The `nodes` most probable beginnings of paths, best first, and their parents (rows, 0 is the root). `before`: the
    last two tokens of the text, -1 for none. A path's score is its log-probability."""
    own, depth = _own_scores(found, how), len(found.ids)
    known: list[
        Any
    ] = []  # what does not depend on the path: ids, scores and log-probability of a position's candidates
    for i in range(depth):
        at = found.kept[i]
        ranks = found.log_p[i, at] + (0.0 if found.noise is None else found.noise[i, at])
        known.append((found.ids[i, at], own[i, at], min(0.0, _log_sum(ranks))))
    waiting: list[tuple[float, int, Path, int]] = []
    order = itertools.count()  # of equal beginnings the one found first
    paths: list[Path] = []
    parents: list[int] = []

    def expand(path: Path, row: int) -> None:
        i = len(path.tokens)
        if path.ended or i == depth:
            return
        ids, scores, mass = known[i]
        if how.ngram is not None and (i or how.both):
            tail = np.array([(*before, *path.tokens)[-2:]], np.int64)
            scores = scores + _ngram_share(how, temperature) * how.ngram.log_p(tail, ids)[0]
        scores = path.score + np.minimum(scores - _log_sum(scores) + mass, 0.0)
        for token, score in zip(ids.tolist(), scores.tolist(), strict=True):
            longer = Path((*path.tokens, token), score, token in stop_ids)
            heapq.heappush(waiting, (-score, next(order), longer, row))

    expand(Path((), 0.0), 0)
    while waiting and len(paths) < nodes:
        *_, path, row = heapq.heappop(waiting)
        paths.append(path)
        parents.append(row)
        if len(paths) < nodes:
            expand(path, len(paths))
    return paths, parents


def _own_scores(found: Lattice, how: Search) -> Any:
    """The part of the candidates' scores that does not depend on the path, [k, M + stops]."""
    weight: Any = np.full((len(found.ids), 1), 1.0 if how.ngram is None else how.weight)
    weight[0] = weight[0] if how.both else 1.0
    own = weight * found.log_p
    return own if found.noise is None else own + found.noise


def _ngram_share(how: Search, temperature: float) -> float:
    """The factor of the n-gram model's log-probabilities. At temperature T the target draws from p^(1 / T)."""
    return (1 - how.weight) / (temperature or 1.0)


def _log_sum(x: Any) -> float:
    """log(sum(exp(x)))"""
    most = x.max()
    return float(most + np.log(np.exp(x - most).sum()))
