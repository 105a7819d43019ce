"""The path search: candidates, paths and trees against their definitions over all paths."""

import numpy as np
import pytest

from specker.runtime.strategies.blocks.lattice import Lattice, Path, Search, best_paths, best_tree, lattice
from specker.runtime.strategies.blocks.ngram import NGram, NGramCounts

V, STOP = 12, 0


def ngram(seed: int = 0) -> NGram:
    counts = NGramCounts(V)
    counts.add(np.random.default_rng(seed).integers(0, V, 600).tolist())
    return NGram.fit(counts)


def random_lattice(seed: int, k: int, M: int, noisy: bool) -> Lattice:
    """With the stop id as an extra candidate at every position."""
    rng = np.random.default_rng(seed)
    ids = np.stack([np.append(rng.choice(np.arange(1, V), M, replace=False), STOP) for _ in range(k)])
    log_p = np.log(rng.dirichlet(np.ones(M + 1), k))
    kept = rng.random((k, M + 1)) < 0.8
    kept[:, 0] = True
    return Lattice(ids, log_p, rng.gumbel(size=log_p.shape) if noisy else None, kept)


def every_path(found: Lattice, how: Search, before: tuple[int, int], heat: float) -> dict[tuple[int, ...], float]:
    """All paths and their scores by definition."""

    def term(i: int, column: int, prefix: tuple[int, ...]) -> float:
        weight = how.weight if how.ngram and i else 1.0  # the diffusion model alone scores the first position
        score = weight * found.log_p[i, column] + (0 if found.noise is None else found.noise[i, column])
        if weight < 1:
            tail = np.array([((*before, *prefix))[-2:]])
            score += (1 - weight) / heat * how.ngram.log_p(tail, found.ids[i, column : column + 1])[0, 0]
        return score

    living, ended = {(): 0.0}, {}
    for i in range(len(found.ids)):
        columns = np.flatnonzero(found.kept[i])
        grown = {
            (*prefix, int(found.ids[i, c])): (score, term(i, c, prefix))
            for prefix, score in living.items()
            for c in columns
        }
        toll = max(t for _, t in grown.values())  # stopped paths are charged the best term of this position
        ended = {path: score + toll for path, score in ended.items()}
        ended |= {path: a + b for path, (a, b) in grown.items() if path[-1] == STOP}
        living = {path: a + b for path, (a, b) in grown.items() if path[-1] != STOP}
        if not living:
            break
    return living | ended


@pytest.mark.parametrize("noisy", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("weight", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("seed", range(6))
def test_a_wide_beam_finds_the_best_of_all_paths(seed, weight, noisy):
    found = random_lattice(seed, k=4, M=3, noisy=noisy)
    how = Search(ngram() if weight < 1 else None, paths=500, weight=weight)
    heat = 0.7 if noisy else 1.0
    want = every_path(found, how, (3, 5), heat)
    got = best_paths(found, how, (3, 5), frozenset({STOP}), heat if noisy else 0.0)
    assert len(got) == len(want)
    assert {p.tokens for p in got} == set(want)
    for path in got:
        assert path.score == pytest.approx(want[path.tokens], rel=1e-5, abs=1e-5)
    scores = [p.score for p in got]
    assert scores == sorted(scores, reverse=True) and scores[0] == pytest.approx(max(want.values()), abs=1e-5)


@pytest.mark.parametrize("paths", [1, 2, 3])
def test_a_narrow_beam_keeps_its_width_and_never_beats_the_best(paths):
    for seed in range(8):
        found = random_lattice(seed, k=6, M=3, noisy=False)
        how = Search(ngram(), paths=paths)
        got = best_paths(found, how, (3, 5), frozenset())
        assert len(got) == paths and all(len(p.tokens) == 6 for p in got)
        wide = best_paths(found, Search(ngram(), paths=5000), (3, 5), frozenset())
        assert got[0].score <= wide[0].score + 1e-6


def test_without_an_ngram_model_the_best_path_is_the_argmax():
    found = random_lattice(1, k=5, M=3, noisy=False)
    masked = np.where(found.kept, found.log_p, -np.inf)
    got = best_paths(found, Search(), (1, 1), frozenset())[0]
    assert got.tokens == tuple(found.ids[np.arange(5), masked.argmax(1)].tolist())


def test_an_early_stop_does_not_win_by_having_fewer_terms():
    """By total log-probability alone the path that stops at once would win: -2 against -3.5."""
    ids = np.array([[1, STOP]] + [[2, STOP]] * 5)
    log_p = np.array([[-1.0, -2.0]] + [[-0.5, -6.0]] * 5)
    found = Lattice(ids, log_p, None, np.ones(ids.shape, bool))
    best, *others = best_paths(found, Search(paths=4), (1, 1), frozenset({STOP}))
    assert best.tokens == (1, 2, 2, 2, 2, 2) and best.score == pytest.approx(-3.5)
    assert Path((STOP,), pytest.approx(-2 - 5 * 0.5), True) in others
    log_p[0] = [-3.0, -0.1]  # it wins when it is more likely
    assert best_paths(found, Search(paths=4), (1, 1), frozenset({STOP}))[0].tokens == (STOP,)


def test_the_search_ends_when_every_path_has_stopped():
    ids = np.array([[STOP], [3], [4]])
    found = Lattice(ids, np.zeros((3, 1)), None, np.ones((3, 1), bool))
    assert best_paths(found, Search(), (1, 1), frozenset({STOP})) == [Path((STOP,), 0.0, True)]


def test_candidates_are_the_smallest_set_with_the_mass_plus_stop_ids():
    p = np.array([[0.5, 0.3, 0.1, 0.05], [0.9, 0.04, 0.03, 0.01], [0.25, 0.25, 0.25, 0.2]])
    ids = np.tile(np.arange(1, 5), (3, 1))
    got = lattice(ids, np.log(p), None, 0.8)
    assert got.kept.sum(1).tolist() == [2, 1, 4]  # 0.5 + 0.3 reaches 0.8
    assert got.width == pytest.approx(7 / 3)
    stops = np.full((3, 1), 2)
    ids_, ranks = np.concatenate((ids, stops), 1), np.log(np.concatenate((p, [[0.3], [0.04], [0.25]]), 1))
    got = lattice(ids_, ranks, None, 0.8, stops=1)
    assert got.kept[0].tolist() == [True, True, False, False, False]  # the stop id is the second candidate
    assert got.kept[1].tolist() == [True, False, False, False, True]
    assert got.kept[2].tolist() == [True, True, True, True, False]
    noise = np.random.default_rng(0).gumbel(size=ranks.shape)
    assert np.allclose(lattice(ids_, ranks, noise, 0.8, 1).log_p, ranks - noise)


def every_beginning(found: Lattice, how: Search, before: tuple[int, int], heat: float) -> dict[tuple[int, ...], float]:
    """The log-probability of each beginning of a path, by definition."""
    said, living = {}, {(): 0.0}
    for i, kept in enumerate(found.kept):
        noise = 0.0 if found.noise is None else found.noise[i, kept]
        weight = how.weight if how.ngram and i else 1.0
        grown = {}
        for prefix, score in living.items():
            terms = weight * found.log_p[i, kept] + noise
            if weight < 1:
                tail = np.array([((*before, *prefix))[-2:]])
                terms = terms + (1 - weight) / heat * how.ngram.log_p(tail, found.ids[i, kept])[0]
            share = np.exp(terms) / np.exp(terms).sum() * min(1.0, np.exp(found.log_p[i, kept] + noise).sum())
            tokens = found.ids[i, kept].tolist()
            grown |= {(*prefix, token): score + np.log(p) for token, p in zip(tokens, share, strict=True)}
        said |= grown
        living = {path: score for path, score in grown.items() if path[-1] != STOP}
    return said


@pytest.mark.parametrize("noisy", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("weight", [1.0, 0.5])
@pytest.mark.parametrize("nodes", [1, 5, 40])
def test_a_tree_holds_the_most_probable_beginnings(nodes, weight, noisy):
    """As many as asked for, each once, and behind its parent."""
    for seed in range(4):
        found, heat = random_lattice(seed, k=4, M=3, noisy=noisy), 0.7 if noisy else 1.0
        how = Search(ngram() if weight < 1 else None, True, weight=weight)
        want = every_beginning(found, how, (3, 5), heat)
        paths, parents = best_tree(found, how, (3, 5), frozenset({STOP}), nodes, heat if noisy else 0.0)
        assert len(paths) == len({path.tokens for path in paths}) == min(nodes, len(want))
        for path in paths:
            assert path.score == pytest.approx(want[path.tokens], abs=1e-5)
            assert path.ended == (path.tokens[-1] == STOP)
        most = sorted(want.values(), reverse=True)[: len(paths)]
        assert sum(path.score for path in paths) == pytest.approx(sum(most), abs=1e-4)
        told = [(), *(path.tokens for path in paths)]
        for n, (path, up) in enumerate(zip(paths, parents, strict=True)):
            assert up <= n and told[up] == path.tokens[:-1]


def test_a_tree_of_a_small_lattice_is_whole():
    ids = np.array([[STOP, 2], [3, 4]])
    found = Lattice(ids, np.log([[0.6, 0.4], [0.9, 0.1]]), None, np.ones((2, 2), bool))
    paths, parents = best_tree(found, Search(tree=True), (1, 1), frozenset({STOP}), 99)
    assert [path.tokens for path in paths] == [(STOP,), (2,), (2, 3), (2, 4)] and parents == [0, 0, 2, 2]
