"""Drafts: the tree equals its definition, level by level, also with the target's noise."""

import itertools
import math
from functools import partial

import pytest
import torch
from make_checkpoint import make, oracle
from one_round import accept, apart, draft, new_round, parents, tokens
from safetensors.torch import load_file, save_file

import specker
from specker.checkpoints.checkpoint import read
from specker.kernels.noise import gumbel
from specker.model.cache import KVCache
from specker.model.decoder import Model
from specker.model.prefill import prefill
from specker.options import Sampling
from specker.runtime.control.policy import Budget, Fixed
from specker.runtime.round.lm_head import LMHead
from specker.runtime.round.round import launch
from specker.runtime.strategies.dynamic_exit.early_exit import EarlyExitDrafter
from specker.runtime.strategies.model_drafter import AutoregressiveDrafter

PROMPT = [7, 3, 99, 12, 50, 8, 61]
DEPTH = 6  # of the longest draft: rounds of fixed shape forward one token more than this again


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A model confident of some tokens, so that a capped tree is deep in places."""
    folder = make(tmp_path_factory.mktemp("draft"), layers=2, max_context=64)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] *= 6
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return Model(read(folder, dtype=torch.float64, device="cpu")), oracle(folder, torch.float64)


def new_cache(model):
    return KVCache(model.config, 128, dtype=torch.float64, device="cpu", page_size=8)


def drafter(model, width):
    head = LMHead(model.head, model.norm, model.config.rms_norm_eps)
    return AutoregressiveDrafter(model, new_cache(model), head, width, depth=DEPTH)


def tree(model, sampling, width, depth, count, text=PROMPT):
    """Each level grows the best `width` children of the level above by cumulative probability; the tree is the `count`
    best of all children. Returns tokens, parents, scores, and which grown node each one is (width * depth: none)."""

    def children(ids):
        with torch.no_grad():
            z = model(torch.tensor([ids]), use_cache=False).logits[0, -1].double()
        if sampling.temperature > 0:
            z = z / sampling.temperature + gumbel(sampling.seed, torch.tensor([len(ids) - 1]), len(z))[0]
        return z.log_softmax(0)

    level, grown, every = [([], 0, 0.0)], [], []  # (path of tokens, row, score)
    for _ in range(depth):
        first = len(every)
        for path, row, score in level:
            logp = children(text + path)
            every += [(path + [t], row, score + float(logp[t])) for t in logp.topk(width).indices.tolist()]
        best = sorted(range(first, len(every)), key=lambda i: -every[i][2])[:width]
        grown += best
        level = [(every[i][0], i + 1, every[i][2]) for i in best]
    kept = sorted(range(len(every)), key=lambda i: -every[i][2])[:count]
    rows = {0: 0, **{i + 1: row for row, i in enumerate(kept, 1)}}
    nodes = [grown.index(i) if i in grown else width * depth for i in kept]
    paths, parents, scores = zip(*(every[i] for i in kept), strict=True)
    return [path[-1] for path in paths], [rows[up] for up in parents], list(scores), nodes


@pytest.mark.parametrize("fixed", [False, True], ids=["by the host", "by the device"])
@pytest.mark.parametrize("shape", [(1, 6), (3, 4), (8, 1), (5, 2)])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=4)], ids=["greedy", "T0.8"])
def test_the_tree_equals_its_definition(world, shape, sampling, fixed):
    model, reference = world
    width, depth = shape
    r = draft(drafter(model, width), PROMPT, Budget(width * depth, depth), sampling, fixed=fixed)
    want, up, *_ = tree(reference, sampling, width, depth, width * depth)
    assert tokens(r) == want and parents(r) == up
    assert r.draft.tree == (width > 1) and r.draft.depth == depth


class Asked(Fixed):
    """Drafts as long as `Fixed` does, but hears of each token's confidence."""

    confident = True


@pytest.mark.parametrize("fixed", [False, True], ids=["by the host", "by the device"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=4)], ids=["greedy", "T0.8"])
@pytest.mark.parametrize("own", [False, True], ids=["a small model", "the target's layers"])
def test_policies_hear_each_tokens_probability(world, own, sampling, fixed):
    model, reference = world
    mine = drafter(model, 1)
    if own:  # all of the target's layers: the target's own chain
        mine = EarlyExitDrafter(model, mine.cache, mine.head)
        prefill(model, mine.cache, PROMPT[:-1])
    r = draft(mine, PROMPT, Budget(4, 4, len(model.layers)), sampling, Asked(4, 4), fixed=fixed)
    want, _, scores, _ = tree(reference, sampling, 1, 4, 4)
    alone = [math.exp(b - a) for a, b in itertools.pairwise([0.0, *scores])]
    assert tokens(r) == want and r.draft.size == 4
    assert [p for [p] in r.draft.confidence] == pytest.approx(alone, rel=1e-5) and max(alone) < 1


@pytest.mark.parametrize("fixed", [False, True], ids=["by the host", "by the device"])
def test_a_capped_tree_keeps_the_best_nodes(world, fixed):
    model, reference = world
    want, up, _, nodes = tree(reference, Sampling(), 4, 3, 11)
    r = draft(drafter(model, 4), PROMPT, Budget(11, 3), fixed=fixed)
    assert tokens(r) == want and parents(r) == up
    assert nodes != list(range(11)) and 12 in nodes and r.draft.nodes.tolist() == [nodes]


@pytest.mark.parametrize("budget", [Budget(0, 3), Budget(5, 0)])
def test_no_budget_no_draft(world, budget):
    """The drafter does not run, and the round is a step of plain decoding."""
    model, reference = world
    cache, mine = new_cache(model), drafter(model, 1)
    with torch.inference_mode():
        prefill(model, cache, PROMPT[:-1])
        r = new_round(mine, PROMPT, budget)
        launch(r, model, cache, [mine])
    [want], *_ = tree(reference, Sampling(), 1, 1, 1)
    assert r.draft.size == 0 and mine.cache.exact_len == [0]
    assert r.batch.memory.get("report", 3).tolist() == [1, 0, want]


def test_the_draft_ends_at_its_models_context(world):
    model, reference = world
    text = (PROMPT * 20)[:62]
    mine = drafter(model, 1)
    assert [mine.room(n) for n in (62, 64, 65)] == [3, 1, 0]  # rows at positions 61, 62, 63
    want, *_ = tree(reference, Sampling(), 1, 3, 3, text)
    assert tokens(draft(mine, text, Budget(3, 3))) == want
    assert [mine.fits(n, Budget(3, 3)) for n in (6, 7, 50, 51)] == [False, True, True, False]


@pytest.mark.parametrize("fixed", [False, True], ids=["by the host", "by the device"])
@pytest.mark.parametrize(("width", "nodes"), [(1, 4), (3, 12), (3, 7)])
def test_catch_up_is_exact_after_any_acceptance(world, width, nodes, fixed):
    """After any acceptance the next draft equals a fresh drafter's, and the cache's exact columns equal a pass over the
    text."""
    model, _ = world
    mine, text = drafter(model, width), list(PROMPT)
    for take in (0, 1, 2, 4, 3, 0):
        r = draft(mine, text, Budget(nodes, 4), fixed=fixed)
        fresh = draft(drafter(model, width), text, Budget(nodes, 4))
        assert tokens(r) == tokens(fresh) and parents(r) == parents(fresh)
        path = [0]
        while len(path) <= take:
            following = [row + 1 for row, parent in enumerate(parents(r)) if parent == path[-1]]
            if not following:
                break
            path.append(following[-1])  # the last child, which in a tree usually has to move
        length = len(text)
        text = accept(mine, r, path, 5)
        mine.cache.check()
        exact = mine.cache.exact_len[0]
        assert apart(model, mine.cache, text, exact) < 1e-12
        if fixed:
            assert exact == len(text) - mine.repeated
        else:  # of the accepted nodes, those that were forwarded
            held = range(r.draft.size) if r.draft.nodes is None else r.draft.nodes[0].tolist()
            assert exact == length + sum(held[row - 1] < r.draft.forwarded for row in path[1:])


def test_a_tree_may_be_as_wide_as_the_vocabulary(tmp_path):
    folder = make(tmp_path, vocab=8, layers=1)
    load = partial(specker.load, folder, folder, "draft", device="cpu")
    assert len(load(tree="8x1").generate([1], 5, ignore_eos=True).tokens) == 5
    with pytest.raises(ValueError, match="tree='9x1' is wider than the vocabulary"):
        load(tree="9x1")
