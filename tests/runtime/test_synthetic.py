"""Synthetic acceptance: the walk follows only the coins, for every kind of draft."""

import random

import pytest
import torch
from make_checkpoint import edit, make
from torch._subclasses.fake_tensor import FakeTensorMode

import specker
from specker.kernels.accept import accept_walk
from specker.runtime.round.drafter import path_length
from specker.runtime.round.synthetic import agreements, synthetic

BASE = 7  # the root's position in tests without an engine
K = 4


def rounds(p, tokens, parents, depths, count=3000, seed=3):
    """Accepted tokens of `count` sequences of one batch, with the same draft at different positions."""
    longest = max(depths) + 1
    table = agreements(p, seed, count * longest).expand(count, -1)
    target = torch.full((count, len(tokens) + 1), 99)
    tokens, parents = tokens.expand(count, -1), parents.expand(count, -1)
    positions = torch.tensor(depths) + torch.arange(count)[:, None] * longest
    got = synthetic(target, tokens, parents, positions, table)
    return (accept_walk(tokens, parents, got)[1] - 1).tolist()


def expected(p, k):
    """Mean and variance of the number of accepted tokens on a path of k."""
    chance = [p**n * (1 - p) for n in range(k)] + [p**k]
    mean = sum(n * c for n, c in enumerate(chance))
    return mean, sum(n * n * c for n, c in enumerate(chance)) - mean**2


@pytest.mark.parametrize("p", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_acceptance_length(p, shape):
    if shape == "chain":
        tokens, parents, depths = torch.arange(5, 5 + K), torch.arange(K), list(range(K + 1))
    else:  # three children on each of four levels; one of them, not always the first, has children
        tokens, parents = torch.arange(5, 17), torch.tensor([0, 0, 0, 1, 1, 1, 6, 6, 6, 8, 8, 8])
        depths = [0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    found = rounds(p, tokens, parents, depths)
    mean, variance = expected(p, K)
    if p < 1:
        assert 1 + mean == pytest.approx((1 - p ** (K + 1)) / (1 - p))
    assert sum(found) / len(found) == pytest.approx(mean, abs=4 * (variance / len(found)) ** 0.5 + 1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_every_row_of_a_random_tree(seed):
    """Against the rule in plain Python, including equal siblings and padding, alone and in a batch."""
    draw = random.Random(seed)
    N = draw.randint(1, 24)
    trees = [random_tree(draw, N) for _ in range(3)]
    tables = torch.tensor([[draw.random() < 0.5 for _ in range(2 * (BASE + N) + 2)] for _ in trees])
    each = [torch.tensor(x) for x in zip(*trees, strict=True)]
    together = synthetic(*each, tables)
    for b, tree in enumerate(trees):
        judged(together[b].tolist(), *tree, tables[b])
        assert torch.equal(together[b : b + 1], synthetic(*(x[b : b + 1] for x in each), tables[b : b + 1]))


def random_tree(draw, N):
    """Target, tokens, parents and positions."""
    parents = [draw.choice([-1, draw.randint(0, n)]) if n % 5 == 4 else draw.randint(0, n) for n in range(N)]
    tokens = [draw.randint(0, 6) for _ in range(N)]
    target = [draw.randint(0, 6) for _ in range(N + 1)]
    positions = [BASE]
    for up in parents:
        positions.append(positions[up] + 1 if up >= 0 else draw.randint(0, BASE + N))
    return target, tokens, parents, positions


def judged(got, target, tokens, parents, positions, table):
    N = len(tokens)

    def deepest(row):
        return max([positions[row]] + [deepest(n + 1) for n in range(N) if parents[n] == row])

    for row in range(N + 1):
        below = [n for n in range(N) if parents[n] == row]
        children = [tokens[n] for n in below]
        if children and table[positions[row]]:
            assert got[row] == tokens[max(below, key=lambda n: deepest(n + 1))]  # the first of equally deep ones
        elif target[row] in children:
            assert got[row] == min(set(range(N + 1)) - set(children))
        else:
            assert got[row] == target[row]


def test_padding_changes_nothing():
    target, tokens, parents = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, 8, 9]]), torch.tensor([[0, 1, 1]])
    table = torch.tensor([[False, True, False, True]])
    want = synthetic(target, tokens, parents, torch.tensor([[0, 1, 2, 2]]), table)
    more = torch.tensor([[0, -5]])  # the tokens of padding do not matter
    got = synthetic(
        torch.cat((target, torch.tensor([[0, 0]])), 1),
        torch.cat((tokens, more), 1),
        torch.cat((parents, torch.tensor([[-1, -1]])), 1),
        torch.tensor([[0, 1, 2, 2, 0, 0]]),
        table,
    )
    assert torch.equal(got[:, :4], want) and want.tolist() == [[0, 8, 3, 4]]
    assert synthetic(target[:, :1], tokens[:, :0], parents[:, :0], torch.tensor([[1]]), table).tolist() == [[1]]


def test_static_shapes_and_no_host_reads():
    """On fake tensors, .item(), nonzero and boolean masks raise."""
    with FakeTensorMode():
        target, tokens, parents, positions = (torch.empty(2, n, dtype=torch.int64) for n in (9, 8, 8, 9))
        assert synthetic(target, tokens, parents, positions, torch.empty(2, 64, dtype=torch.bool)).shape == (2, 9)


def test_the_coins_are_a_function_of_seed_and_position():
    table = agreements(0.6, 11, 4096)
    assert torch.equal(table[:100], agreements(0.6, 11, 100)) and table.dtype == torch.bool
    assert float(table.float().mean()) == pytest.approx(0.6, abs=0.03)
    assert not torch.equal(table, agreements(0.6, 12, 4096))
    assert bool((agreements(0.7, 11, 4096) | ~table).all())
    pairs = table[1:].float() * table[:-1].float()  # neighbours are independent
    assert float(pairs.mean()) == pytest.approx(0.36, abs=0.03)
    assert not agreements(0.0, 11, 4096).any() and agreements(1.0, 2**64 - 1, 4096).all()


# --- in an engine


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A target that may stop at any id, and drafts of the same vocabulary."""
    folder = tmp_path_factory.mktemp("synthetic")
    target = make(folder / "target", layers=4, max_context=1024, eos=list(range(128)))
    return target, make(folder / "draft", layers=2, seed=1), make(folder / "dream", "dream", layers=2, seed=1)


def engine(pair, p, strategy="draft", **options):
    draft = {"del": None, "diffuspec": pair[2]}.get(strategy, pair[1])
    return specker.load(pair[0], draft, strategy, device="cpu", acceptance=f"synthetic:{p}", **options)


WAYS = {
    "chain": ({"draft_tokens": K}, K),
    "easyspec": ({"strategy": "easyspec", "draft_tokens": K, "layer_parallel": "[[0,1]]"}, K),
    "del": ({"strategy": "del", "policy": "fixed", "exit_layer": 2, "draft_tokens": K}, K),
    "diffuspec": ({"strategy": "diffuspec", "draft_tokens": K}, K),
}


@pytest.mark.parametrize("name", WAYS)
def test_every_strategy(pair, name):
    """All or no tokens are accepted, or the expected mean. Stop ids end nothing. Drafts end with their model's
    context."""
    options, k = WAYS[name]
    for p, count in ((0, 20), (0.7, 160), (1, 60)):
        out = engine(pair, p, **options).generate([3, 1, 4], count)
        assert len(out.tokens) == count and out.finished == "length"
        whole = [n for n, times in out.stats.lengths.items() for _ in range(times)]
        if p == 0:
            assert out.stats.accepted == 0 < out.stats.drafted
        elif p == 1:
            assert out.stats.rounds == -(-count // (k + 1))
        else:
            mean, variance = expected(p, k)
            n = len(whole)
            assert out.stats.accepted / n == pytest.approx(mean, abs=3.5 * (variance / n) ** 0.5)


TREES = {
    "grown": {"tree": "3x4"},
    "searched": {"strategy": "diffuspec", "draft_tokens": K, "cps": "tree"},
}


@pytest.mark.parametrize("name", TREES)
def test_a_tree_is_accepted_to_its_end_or_not_at_all(pair, name):
    """Its depth depends on the guesses."""
    for p in (0, 1):
        fast, seen = engine(pair, p, **TREES[name]), []
        fast.trace = seen.append
        out = fast.generate([3, 1, 4], 60)
        assert len(out.tokens) == 60 and out.stats.drafted and out.finished == "length"
        assert all(len(row["path"]) - 1 == p * path_length(row["parents"]) for row in seen if row["draft"])


def test_acceptance_depends_on_the_seed_and_not_on_the_temperature(pair):
    fast = engine(pair, 0.5, draft_tokens=K)
    first, again, warm, other = (
        fast.generate([3, 1, 4], 60, **how).stats.hits for how in ({}, {}, {"temperature": 0.9}, {"seed": 9})
    )
    assert first == again == warm != other
    table = fast.loop.state.agrees
    last = table.clone()
    assert fast.generate([3, 1, 4], 60).stats.hits == first  # the table is rewritten
    assert fast.loop.state.agrees is table  # in place: a captured graph reads it there
    assert not torch.equal(table, last)


def test_check_compares_nothing(pair):
    fast = engine(pair, 0.5)
    out = fast.generate([3, 1, 4], 40)
    result = fast.check([3, 1, 4], out, 40)
    assert result.identical is None and result.ok and len(result.ar.tokens) == 40
    said = "with synthetic acceptance 0.5 a run measures time and memory only: its text means nothing"
    assert fast.remarks["sizing"] == said and result.message == f"the tokens were not compared: {said}"
    plain = specker.load(pair[0], pair[1], device="cpu")
    assert len(plain.generate([3, 1, 4], 40).tokens) == 1  # every id stops it
    assert "sizing" not in plain.remarks and plain.check([3, 1, 4], plain.generate([3, 1, 4], 40), 40).identical


def test_a_tree_must_leave_a_token_to_disagree_with(tmp_path):
    folder = make(tmp_path, vocab=8, layers=1)
    edit(folder, eos_token_id=None)
    assert len(specker.load(folder, folder, tree="8x1", device="cpu").generate([1], 5).tokens) == 5
    with pytest.raises(ValueError, match="tree='8x1' is wider than the vocabulary"):
        specker.load(folder, folder, tree="8x1", device="cpu", acceptance="synthetic:0")
    assert len(specker.load(folder, folder, tree="7x1", device="cpu", acceptance="synthetic:0").generate([1], 5).tokens)
