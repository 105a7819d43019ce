"""Drafts: the tree that is grown is the one the definition gives, level by level, also under the target's noise."""

import pytest
import torch
from make_checkpoint import make, oracle

from specker.config import Sampling
from specker.kernels.noise import gumbel
from specker.runtime.draft import Draft, top_nodes
from specker.runtime.head import Head
from specker.runtime.model.cache import KVCache
from specker.runtime.model.checkpoint import load
from specker.runtime.model.decoder import Model
from specker.runtime.policy import Budget
from specker.runtime.strategies.draft import AutoregressiveDrafter

PROMPT = [7, 3, 99, 12]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = make(tmp_path_factory.mktemp("draft"), layers=2, max_context=64)
    return Model(load(folder, dtype=torch.float64, device="cpu")), oracle(folder, torch.float64)


def drafter(model, width):
    cache = KVCache(model.config, 128, dtype=torch.float64, device="cpu", page_size=8)
    return AutoregressiveDrafter(model, cache, Head(model.head, model.norm, model.config.rms_norm_eps), width)


def grown(model, sampling, width, depth):
    """Level 1: the root's best; each later level the best `width` of all children, by cumulative probability."""

    def children(ids):
        with torch.no_grad():
            z = model(torch.tensor([ids]), use_cache=False).logits[0, -1].double()
        if sampling.temperature > 0:
            z = z / sampling.temperature + gumbel(sampling.seed, torch.tensor([len(ids) - 1]), len(z))[0]
        return z.log_softmax(0)

    level = [([], 0, 0.0)]  # (path of tokens, row, score)
    tokens, parents, scores = [], [], []
    for _ in range(depth):
        candidates = []
        for path, row, score in level:
            logp = children(PROMPT + path)
            for token in logp.topk(width).indices.tolist():
                candidates.append((score + float(logp[token]), path + [token], row))
        candidates.sort(key=lambda c: -c[0])
        level = []
        for score, path, parent in candidates[:width]:
            tokens.append(path[-1])
            parents.append(parent)
            scores.append(score)
            level.append((path, len(tokens), score))
    return tokens, parents, scores


@pytest.mark.parametrize("shape", [(1, 6), (3, 4), (8, 1), (5, 2)])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=4)], ids=["greedy", "T0.8"])
def test_the_tree_is_the_one_defined(world, shape, sampling):
    model, reference = world
    width, depth = shape
    draft = drafter(model, width).propose(PROMPT, Budget(width * depth, depth), sampling)
    tokens, parents, _ = grown(reference, sampling, width, depth)
    assert draft.tokens.tolist() == tokens and draft.parents.tolist() == parents
    assert draft.is_chain == (width == 1)


def test_a_capped_tree_keeps_the_best_nodes(world):
    model, reference = world
    tokens, parents, scores = grown(reference, Sampling(), 4, 3)
    draft = drafter(model, 4).propose(PROMPT, Budget(7, 3), Sampling())
    kept = sorted(sorted(range(12), key=lambda n: -scores[n])[:7])
    assert draft.tokens.tolist() == [tokens[n] for n in kept]
    row = {0: 0, **{n + 1: i + 1 for i, n in enumerate(kept)}}
    assert draft.parents.tolist() == [row[parents[n]] for n in kept]


def test_equal_scores_keep_the_parent_first():
    draft = Draft(torch.arange(4), torch.tensor([0, 1, 2, 0]))
    kept, nodes = top_nodes(draft, torch.zeros(4), 2)
    assert list(nodes) == [0, 1]
    assert kept.tokens.tolist() == [0, 1] and kept.parents.tolist() == [0, 1]


@pytest.mark.parametrize("budget", [Budget(0, 3), Budget(5, 0)])
def test_no_budget_no_draft(world, budget):
    draft = drafter(world[0], 1).propose(PROMPT, budget, Sampling())
    assert len(draft) == 0 and draft.depths() == [0]


def test_the_draft_ends_at_its_models_context(world):
    model, _ = world
    d = drafter(model, 1)
    committed = (PROMPT * 20)[:62]
    assert len(d.propose(committed, Budget(9, 9), Sampling())) == 3  # rows at positions 61, 62, 63
    assert len(drafter(model, 1).propose((PROMPT * 20)[:65], Budget(9, 9), Sampling())) == 0


def test_catch_up_is_exact_after_any_acceptance(world):
    """Whatever was accepted, the next draft is the one a fresh drafter would make."""
    model, _ = world
    for width in (1, 3):
        d = drafter(model, width)
        committed = list(PROMPT)
        for take in (0, 1, 2, 4, 3, 0):
            draft = d.propose(committed, Budget(width * 4, 4), Sampling())
            fresh = drafter(model, width).propose(committed, Budget(width * 4, 4), Sampling())
            assert torch.equal(draft.tokens, fresh.tokens) and torch.equal(draft.parents, fresh.parents)
            path = [0]
            while len(path) <= take:
                following = [r + 1 for r, parent in enumerate(draft.parents.tolist()) if parent == path[-1]]
                if not following:
                    break
                path.append(following[-1])  # the last child: in a tree seldom where it stands already
            committed += [int(draft.tokens[row - 1]) for row in path[1:]] + [5]
            d.observe(path)
            d.cache.check()
