"""The search of blocks: candidates, chains and trees against their definitions over all paths."""

import math
from types import SimpleNamespace

import numpy as np
import path_search
import pytest
import torch
from path_search import Lattice, Search, log_p

from specker.kernels.round.grow import launch_prune
from specker.kernels.round.lattice import Lattice as Found
from specker.kernels.round.lattice import cut_lattice, launch_cut, launch_search
from specker.runtime.strategies.blocks import tree
from specker.runtime.strategies.blocks.ngram import NGram, NGramCounts
from specker.runtime.strategies.blocks.ngram_scorer import NGramScorer, Tables

V = 12
STOP = 0
BEFORE = (3, 5)


@pytest.fixture(autouse=True, params=["torch", "kernel"])
def form(request, monkeypatch):
    """Which form of the ops searches: torch's, or their kernels."""
    if request.param == "kernel":
        monkeypatch.setattr(tree, "search_lattice", launch_search)
        monkeypatch.setattr(tree, "prune", launch_prune)
    return request.param


def ngram(seed: int = 0) -> NGram:
    counts = NGramCounts(V)
    counts.add(np.random.default_rng(seed).integers(0, V, 600).tolist())
    return NGram.fit(counts)


def random_lattices(count: int, k: int, M: int, noisy: bool) -> list[Lattice]:
    """With the stop id as an extra candidate at every position."""
    made = []
    for seed in range(count):
        rng = np.random.default_rng(seed)
        ids = np.stack([np.append(rng.choice(np.arange(1, V), M, replace=False), STOP) for _ in range(k)])
        p = np.log(rng.dirichlet(np.ones(M + 1), k))
        kept = rng.random((k, M + 1)) < 0.8
        kept[:, 0] = True
        noise = rng.gumbel(size=p.shape) if noisy else None
        if noise is not None:  # the drafter's probabilities, with the noise, are those of all tokens
            p -= np.log(np.exp(p + noise).sum(1, keepdims=True))
        made.append(Lattice(ids, p, noise, kept))
    return made


def on_device(found: list[Lattice], nodes: int) -> tuple[SimpleNamespace, Found]:
    """A batch with room for `nodes` draft tokens, and the lattices of its sequences."""
    n = len(found)
    noise = None if found[0].noise is None else torch.from_numpy(np.stack([x.noise for x in found]))
    ids, p, kept = (torch.from_numpy(np.stack([getattr(x, name) for x in found])) for name in ("ids", "log_p", "kept"))
    p = (p if noise is None else p + noise).masked_fill(~kept, -math.inf)
    window = torch.full((n, nodes + 1), BEFORE[1])
    state = SimpleNamespace(parents=torch.full((n, nodes), -1))
    draws = SimpleNamespace(heat=lambda: 1.0 if noise is None else 0.7, gumbel=lambda positions, ids: noise)
    batch = SimpleNamespace(window=window, state=state, draws=draws, before_root=lambda: torch.tensor([BEFORE[:1]] * n))
    return batch, Found(ids, p, p.logsumexp(2).clamp(max=0.0))


def searched(found: list[Lattice], how: Search, nodes: int = 0, paths: int = 0, stops: tuple[int, ...] = (STOP,)):
    """The tokens [n, nodes or k] that the device drafts, their parents and the best paths' scores."""
    batch, lattices = on_device(found, nodes or len(found[0].ids))
    scorer, ends = None, torch.tensor(stops, dtype=torch.int64)
    if how.ngram is not None:
        tables = Tables.of(how.ngram, torch.device("cpu"))
        scorer = NGramScorer(batch, lattices, torch.zeros(0), tables, how.weight, how.both)
    if nodes:
        score = tree.write_tree(batch, lattices, scorer, ends, nodes)
    else:
        score = tree.write_chain(batch, lattices, scorer, ends, paths)
    return batch.window[:, 1:].tolist(), batch.state.parents.tolist(), (score * len(found[0].ids)).tolist()


def path_of(tokens: list[int]) -> tuple[int, ...]:
    """A drafted path, which repeats the stop token at which it ended."""
    end = tokens.index(STOP) + 1 if STOP in tokens else len(tokens)
    assert set(tokens[end:]) <= {STOP}
    return tuple(tokens[:end])


def every_path(found: Lattice, how: Search, heat: float) -> dict[tuple[int, ...], float]:
    """All paths and their scores by definition."""

    def term(i: int, column: int, prefix: tuple[int, ...]) -> float:
        weight = how.weight if how.ngram and (i or how.both) else 1.0  # the drafter alone scores the first position
        score = weight * found.log_p[i, column] + (0 if found.noise is None else found.noise[i, column])
        if weight < 1:
            tail = np.array([((*BEFORE, *prefix))[-2:]])
            score += (1 - weight) / heat * log_p(how.ngram, tail, found.ids[i, column : column + 1])[0, 0]
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
@pytest.mark.parametrize(("weight", "both"), [(1.0, False), (0.5, False), (0.5, True), (0.0, False)])
def test_a_wide_beam_finds_the_best_of_all_paths(form, weight, both, noisy):
    k, paths = (3, 16) if form == "kernel" else (4, 300)  # the interpreter is slow
    found = random_lattices(6, k, M=3, noisy=noisy)
    how = Search(ngram() if weight < 1 else None, weight=weight, both=both)
    drafts, _, scores = searched(found, how, paths=paths)
    for one, tokens, score in zip(found, drafts, scores, strict=True):
        want = every_path(one, how, 0.7 if noisy else 1.0)
        assert path_of(tokens) == max(want, key=want.get)
        assert score == pytest.approx(max(want.values()), abs=1e-5)


@pytest.mark.parametrize("noisy", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("paths", [1, 2, 3])
def test_a_narrow_beam_is_that_of_the_host(paths, noisy):
    found = random_lattices(12, k=6, M=3, noisy=noisy)
    how = Search(ngram(), paths=paths)
    drafts, _, scores = searched(found, how, paths=paths)
    ended = 0
    for one, tokens, score in zip(found, drafts, scores, strict=True):
        best = path_search.best_paths(one, how, BEFORE, frozenset({STOP}), 0.7 if noisy else 0.0)[0]
        assert path_of(tokens) == best.tokens
        assert score == pytest.approx(best.score, abs=1e-5)
        ended += best.ended
    assert ended or paths == 1


def test_without_an_ngram_model_the_best_path_is_the_argmax():
    found = random_lattices(4, k=5, M=3, noisy=False)
    drafts, _, _ = searched(found, Search(), paths=3, stops=())
    for one, tokens in zip(found, drafts, strict=True):
        masked = np.where(one.kept, one.log_p, -np.inf)
        assert tokens == one.ids[np.arange(5), masked.argmax(1)].tolist()


def test_an_early_stop_does_not_win_by_having_fewer_terms():
    """By total log-probability alone the path that stops at once would win: -2 against -3.5."""
    ids = np.array([[1, STOP]] + [[2, STOP]] * 5)
    p = np.array([[-1.0, -2.0]] + [[-0.5, -6.0]] * 5)
    found = Lattice(ids, p, None, np.ones(ids.shape, bool))
    drafts, _, scores = searched([found], Search(), paths=4)
    assert drafts == [[1, 2, 2, 2, 2, 2]] and scores == [pytest.approx(-3.5)]
    p[0] = [-3.0, -0.1]  # it wins when it is more likely
    assert searched([found], Search(), paths=4)[0] == [[STOP] * 6]


def test_a_path_that_has_ended_stays_the_best_where_no_other_lives():
    ids = np.array([[STOP], [3], [4]])
    found = Lattice(ids, np.zeros((3, 1)), None, np.ones((3, 1), bool))
    assert searched([found], Search(), paths=3) == ([[STOP] * 3], [[-1] * 3], [0.0])


def test_candidates_are_the_smallest_set_with_the_mass_plus_stop_ids(form):
    go = launch_cut if form == "kernel" else cut_lattice
    p = torch.tensor([[[0.5, 0.3, 0.1, 0.05], [0.9, 0.04, 0.03, 0.01], [0.25, 0.25, 0.25, 0.2]]]).log()
    ids, report = torch.arange(1, 5).expand(1, 3, 4), torch.zeros(1, 3)

    def cut(ids, log_p, share, extra=0):
        """The logits are some numbers above the log-probabilities."""
        lse = torch.tensor([[0.5, -1.0, 2.0]])
        return go(ids, log_p + lse.unsqueeze(2), lse, torch.tensor([2]), report, share, extra)

    got = cut(ids, p, 0.79)
    assert got.log_p.isfinite().sum(2).tolist() == [[2, 1, 4]]  # 0.5 + 0.3 reaches 0.79
    assert got.mass.exp()[0].tolist() == pytest.approx([0.8, 0.9, 0.95])
    assert report[0, :2].tolist() == [3.0, pytest.approx(7 / 3)]
    assert cut(ids, p, 0.0).log_p.isfinite().sum(2).tolist() == [[1, 1, 1]]
    stops = torch.tensor([[[0.3], [0.04], [0.25]]]).log()
    got = cut(torch.cat((ids, torch.full((1, 3, 1), 2)), 2), torch.cat((p, stops), 2), 0.79, 1)
    assert got.log_p.isfinite()[0].tolist() == [
        [True, True, False, False, False],  # the stop id is the second candidate
        [True, False, False, False, True],
        [True, True, True, True, False],
    ]


def every_beginning(found: Lattice, how: Search, heat: float) -> dict[tuple[int, ...], float]:
    """The log-probability of each beginning of a path, by definition."""
    said, living = {}, {(): 0.0}
    for i, kept in enumerate(found.kept):
        noise = 0.0 if found.noise is None else found.noise[i, kept]
        weight = how.weight if how.ngram and i else 1.0
        grown = {}
        for prefix, score in living.items():
            terms = weight * found.log_p[i, kept] + noise
            if weight < 1:
                tail = np.array([((*BEFORE, *prefix))[-2:]])
                terms = terms + (1 - weight) / heat * log_p(how.ngram, tail, found.ids[i, kept])[0]
            share = np.exp(terms) / np.exp(terms).sum() * min(1.0, np.exp(found.log_p[i, kept] + noise).sum())
            tokens = found.ids[i, kept].tolist()
            grown |= {(*prefix, token): score + np.log(p) for token, p in zip(tokens, share, strict=True)}
        said |= grown
        living = {path: score for path, score in grown.items() if path[-1] != STOP}
    return said


@pytest.mark.parametrize("noisy", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("weight", [1.0, 0.5])
@pytest.mark.parametrize("nodes", [1, 5, 20])
def test_a_tree_holds_the_most_probable_beginnings(form, monkeypatch, nodes, weight, noisy):
    """As many as asked for, each once, and behind its parent. A level is as wide as a tree, so that none is missed."""
    k, wide = (3, 16) if form == "kernel" else (4, 64)
    monkeypatch.setattr(tree, "WIDTH", wide)
    found, how = random_lattices(4, k, M=3, noisy=noisy), Search(ngram() if weight < 1 else None, weight=weight)
    drafts, parents, _ = searched(found, how, nodes)
    for one, tokens, up in zip(found, drafts, parents, strict=True):
        want = every_beginning(one, how, 0.7 if noisy else 1.0)
        paths = [()]
        for row, (token, parent) in enumerate(zip(tokens, up, strict=True)):
            assert 0 <= parent <= row and paths[parent][-1:] != (STOP,)
            paths.append((*paths[parent], token))
        assert len(want) >= nodes
        assert paths[1:] == sorted(want, key=want.get, reverse=True)[:nodes]


def test_a_tree_of_a_small_lattice_is_whole():
    ids = np.array([[STOP, 2], [3, 4]])
    found = Lattice(ids, np.log([[0.6, 0.4], [0.9, 0.1]]), None, np.ones((2, 2), bool))
    drafts, parents, _ = searched([found], Search(), 4)
    paths = {(token, parent) for token, parent in zip(drafts[0], parents[0], strict=True)}
    row = drafts[0].index(2) + 1
    assert paths == {(STOP, 0), (2, 0), (3, row), (4, row)}
