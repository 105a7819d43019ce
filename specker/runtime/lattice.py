"""The search through a diffusion draft (CPS of DiffuSpec, arXiv 2510.02358): which path reads best from left to right.

One denoising step guesses each position by itself. The few most probable tokens of each are a lattice; a beam goes
through it from left to right and ranks paths by

    sum over positions of  lambda log p_diffusion(token) + (1 - lambda) log p_ngram(token | two before) + g(token)

where lambda is 1 at the first position: the diffusion model has the whole text before it there, an n-gram model only
two tokens of it (the paper weighs all alike; bench/LOG.md has both). From the second position on the n-gram model knows
what the diffusion model does not: the token before. g is the noise under which the target will draw at that position (0
when greedy), so that the path is the likeliest *draw*. A path that reaches a stop token ends there. It must not win by
having fewer terms: at each later position it pays what the best living path pays for its next token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specker.runtime.ngram import NGram


@dataclass(frozen=True)
class Lattice:
    """Candidates of k positions, numpy; M columns, then those of the stop ids."""

    ids: Any  # [k, M + stops] int64
    log_p: Any  # [k, M + stops] float, of the diffusion model at the temperature, without noise; with noise, known up
    # to a number for each position, which changes no order of paths
    noise: Any  # [k, M + stops] float, or None
    kept: Any  # [k, M + stops] bool: which are in the lattice

    @classmethod
    def joined(cls, blocks: "Sequence[Lattice]") -> "Lattice":
        """Blocks of positions, one behind the other."""
        first = blocks[0]
        noise = None if first.noise is None else np.concatenate([block.noise for block in blocks])
        ids, log_p, kept = (np.concatenate([getattr(b, name) for b in blocks]) for name in ("ids", "log_p", "kept"))
        return cls(ids, log_p, noise, kept)

    @property
    def width(self) -> float:
        """Mean candidates of a position."""
        return float(self.kept.sum(1).mean())


@dataclass(frozen=True)
class Path:
    tokens: tuple[int, ...]  # at most k, fewer where it ended
    score: float  # as in the file's head
    ended: bool = False  # with a stop token


@dataclass(frozen=True)
class Search:
    """How to look for paths."""

    ngram: NGram | None = None
    paths: int = 3  # B of the beam
    tree: bool = False  # draft all of them as one trie; else the best alone
    candidates: int = 15  # M at most, of a position
    mass: float = 0.8  # tau: the fewest candidates with this much probability
    weight: float = 0.85  # lambda from the second position on; 1 without an n-gram model


def lattice(ids: Any, ranks: Any, noise: Any, mass: float, stops: int = 0) -> Lattice:
    """The smallest set of each position's candidates that has `mass`, and the stop ids.

    ids [k, M + stops] int64, the last `stops` columns being the stop ids, the others by falling `ranks`, their
    log-probabilities [k, M + stops] in the ranking used (perturbed above temperature 0); noise [k, M + stops] or None.
    """
    M = ids.shape[1] - stops
    kept = np.ones(ids.shape, bool)
    before = np.exp(ranks[:, :M]).cumsum(1)[:, :-1]
    kept[:, 1:M] = before < mass
    if stops:  # unless a stop id stands among the candidates already
        twice = (ids[:, M:, None] == ids[:, None, :M]) & kept[:, None, :M]
        kept[:, M:] = ~twice.any(2)
    return Lattice(ids, ranks if noise is None else ranks - noise, noise, kept)


def best_paths(
    found: Lattice, how: Search, before: tuple[int, int], stop_ids: frozenset[int], temperature: float = 0.0
) -> list[Path]:
    """The `how.paths` best paths, best first. `before`: the two tokens that the text ends with, -1 for none."""
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
    """Paths, best first, -> tokens [N] and parents [N] (rows) of the tree that holds them: what begins alike is one
    node. At most `nodes`, and no path longer than `depth`; later paths lose their ends first."""
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
