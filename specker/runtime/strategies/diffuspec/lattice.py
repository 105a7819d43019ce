"""Causal-consistency path search (CPS of DiffuSpec, arXiv 2510.02358) through a diffusion draft.

One denoising step guesses each position independently. The most probable tokens of each position form a lattice; a
beam search goes through it from left to right and ranks paths by

    sum over positions of  lambda log p_diffusion(token) + (1 - lambda) log p_ngram(token | two before) + g(token)

where lambda is 1 at the first position: there the diffusion model sees the whole text, an n-gram model only two tokens.
(The paper uses one lambda for all positions; bench/LOG.md compares both.) From the second position on, the n-gram model
knows the previous token and the diffusion model does not. g is the noise of the target's draw at that position (0 when
greedy), so the path is the likeliest *draw*. A path that reaches a stop token ends there. To keep short paths from
winning by having fewer terms, an ended path adds the best next-token score at each later position.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specker.runtime.strategies.diffuspec.ngram import NGram


@dataclass(frozen=True)
class Lattice:
    """Candidates of k positions, numpy: M columns of candidates, then one column per stop id."""

    ids: Any  # [k, M + stops] int64
    log_p: Any  # [k, M + stops] float, of the diffusion model at the temperature, without noise; with noise, up to a
    # constant per position, which does not change the order of paths
    noise: Any  # [k, M + stops] float, or None
    kept: Any  # [k, M + stops] bool: whether the candidate is in the lattice

    @classmethod
    def joined(cls, blocks: "Sequence[Lattice]") -> "Lattice":
        """Concatenate blocks of positions."""
        first = blocks[0]
        noise = None if first.noise is None else np.concatenate([block.noise for block in blocks])
        ids, log_p, kept = (np.concatenate([getattr(b, name) for b in blocks]) for name in ("ids", "log_p", "kept"))
        return cls(ids, log_p, noise, kept)

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
    """Parameters of the path search."""

    ngram: NGram | None = None
    paths: int = 3  # B of the beam
    tree: bool = False  # True: draft all paths as one trie; False: only the best
    candidates: int = 15  # M, the most candidates per position
    mass: float = 0.8  # tau: keep the fewest candidates with this much probability
    weight: float = 0.85  # lambda from the second position on; 1 without an n-gram model


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
    weight: Any = np.full((len(found.ids), 1), 1.0 if how.ngram is None else how.weight)
    weight[0] = 1.0
    own = weight * found.log_p
    if found.noise is not None:
        own += found.noise
    beam = [Path((), 0.0)]
    for i in range(len(found.ids)):
        living = [path for path in beam if not path.ended]
        if not living:
            break
        ids, terms = found.ids[i, found.kept[i]], own[None, i, found.kept[i]]
        if how.ngram is not None and i:
            tails = np.array([(*before, *path.tokens)[-2:] for path in living], np.int64)
            terms = terms + (1 - how.weight) / (temperature or 1.0) * how.ngram.log_p(tails, ids)
        total = (np.array([[path.score] for path in living]) + terms).ravel()
        toll, tokens = float(terms.max()), ids.tolist()
        beam = [Path(path.tokens, path.score + toll, True) for path in beam if path.ended]
        for n in (-total).argsort(kind="stable")[: how.paths].tolist():
            row, column = divmod(n, len(tokens))
            token = tokens[column]
            beam.append(Path((*living[row].tokens, token), float(total[n]), token in stop_ids))
        beam = sorted(beam, key=lambda path: -path.score)[: how.paths]
    return beam


def trie(paths: Sequence[Path], nodes: int, depth: int) -> tuple[list[int], list[int]]:
    """Merge paths, best first, into a trie: tokens [N] and parents [N] (rows). Common prefixes share nodes. It has at
    most `nodes` nodes and `depth` levels; later paths are cut first."""
    row_of: dict[tuple[int, ...], int] = {(): 0}
    tokens: list[int] = []
    parents: list[int] = []
    for path in paths:
        for n in range(1, min(depth, len(path.tokens)) + 1):
            prefix = path.tokens[:n]
            if prefix not in row_of:
                if len(tokens) == nodes:
                    break
                tokens.append(prefix[-1])
                parents.append(row_of[prefix[:-1]])
                row_of[prefix] = len(tokens)
    return tokens, parents
