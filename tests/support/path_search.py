"""The beam search of blocks on the host, in numpy and float64: the reference for the device's (CPS of DiffuSpec, arXiv
2510.02358). The equations are in specker/runtime/strategies/blocks/tree.py and ngram_scorer.py.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from specker.runtime.strategies.blocks import BEAM
from specker.runtime.strategies.blocks.ngram import NGram


@dataclass(frozen=True)
class Lattice:
    """Candidates of k positions, numpy: M columns of candidates, then one column per stop id."""

    ids: Any  # [k, M + stops] int64
    log_p: Any  # [k, M + stops] float, of the diffusion model at the temperature, without noise; with noise, up to a
    # constant per position, which does not change the order of paths
    noise: Any  # [k, M + stops] float, or None
    kept: Any  # [k, M + stops] bool: whether the candidate is in the lattice


@dataclass(frozen=True)
class Path:
    tokens: tuple[int, ...]  # at most k, fewer if it ended
    score: float  # the sum in the module docstring
    ended: bool = False  # whether it ends with a stop token


@dataclass(frozen=True)
class Search:
    """Parameters of the path search."""

    ngram: NGram | None = None
    paths: int = BEAM  # B of a chain's beam
    weight: float = 0.85  # lambda from the second position on (0.5 in the paper); 1 without an n-gram model
    both: bool = False  # whether lambda is the same at the first position, as in the paper; else it is 1


def log_p(model: NGram, contexts: Any, ids: Any) -> Any:
    """contexts [B, 2] int64 (the token before last, the last), ids [M] -> log p(id | context) [B, M], by the equations
    of ngram.py. -1 as the token before last: the text begins with the last."""
    u, v, V = contexts[:, :1], contexts[:, 1:], model.vocab_size

    def found(table: Any, keys: Any) -> tuple[Any, Any]:
        place = table[0].searchsorted(keys)
        return table[0][place] == keys, table[1][place]

    listed, p2 = found(model.two, v * V + ids)
    lower = np.where(listed, p2, model.unigrams[ids] + model.back_off[v])
    known, back = found(model.contexts, np.where(u < 0, -1, u * V + v))
    listed, p3 = found(model.three, np.where(known, (u * V + v) * V + ids, -1))
    return np.where(listed, p3, lower + np.where(known, back, 0))


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
            terms = terms + _ngram_share(how, temperature) * log_p(how.ngram, tails, ids)
        total = (np.array([[path.score] for path in living]) + terms).ravel()
        toll, tokens = float(terms.max()), ids.tolist()
        beam = [Path(path.tokens, path.score + toll, True) for path in beam if path.ended]
        for n in (-total).argsort(kind="stable")[: how.paths].tolist():
            row, column = divmod(n, len(tokens))
            token = tokens[column]
            beam.append(Path((*living[row].tokens, token), float(total[n]), token in stop_ids))
        beam = sorted(beam, key=lambda path: -path.score)[: how.paths]
    return beam


def _own_scores(found: Lattice, how: Search) -> Any:
    """The part of the candidates' scores that does not depend on the path, [k, M + stops]."""
    weight: Any = np.full((len(found.ids), 1), 1.0 if how.ngram is None else how.weight)
    weight[0] = weight[0] if how.both else 1.0
    own = weight * found.log_p
    return own if found.noise is None else own + found.noise


def _ngram_share(how: Search, temperature: float) -> float:
    """The factor of the n-gram model's log-probabilities. At temperature T the target draws from p^(1 / T)."""
    return (1 - how.weight) / (temperature or 1.0)
