"""Rounds of two drafts: copied text beside the draft of a head or a diffusion model, as a branch of one tree."""

from types import SimpleNamespace

import cases
import pytest
import torch
from make_checkpoint import make
from one_round import after_every_round

import specker
from specker.runtime import strategies
from specker.runtime.control.choose import NONE, Chooser
from specker.runtime.control.costs import Costs
from specker.runtime.control.policy import Budget, Fixed, Match, Outcome
from specker.runtime.ranks.dist import Ranks
from specker.runtime.round import branches
from specker.runtime.round.batch import Batch, Shape
from specker.runtime.round.branches import Branches
from specker.runtime.round.drafter import Draft, Drafter
from specker.runtime.round.graphs import Graphs
from specker.runtime.round.state import State
from specker.runtime.strategies.join import JoinedPolicy, shared
from specker.runtime.strategies.lookup import NgramPolicy

SIZES = {"layers": 3, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 96, "max_context": 256}
DIFFUSION = {  # name -> options
    "chain": {"cps": "off", "draft_tokens": 4},
    "tree": {"cps": "tree", "draft_tokens": 3},
}
HEADS = {  # name -> (strategy, layout, options)
    "eagle": ("eagle", "nested", {}),
    "eagle, tree": ("eagle", "3.1", {"tree": "3x2"}),
    "parallel": ("eagle", "parallel", {}),
    "mtp": ("mtp", "mimo", {}),
    "mtp of 3 heads": ("mtp", "deepseek, 3 heads", {}),
    "dflash": ("dflash", "dflash", {}),
    "dflash2": ("dflash", "dflash2", {}),
    "dspark, tree": ("dflash", "dspark", {"cps": "tree"}),
}
REPEATS = [5, 9, 40, 77, 8, 3, 11, 60]
MODES = [(graphs, size, temperature) for graphs in ("off", "on") for size in (1, 4) for temperature in (0.0, 0.7)]


@pytest.fixture
def both(monkeypatch, cheap):
    """Rounds have two drafts whenever there is a match."""
    real = JoinedPolicy.means

    def means(self, shape):
        found = real(self, shape)
        return found._replace(tokens=found.tokens + 99 * bool(shape.beside))

    monkeypatch.setattr(JoinedPolicy, "means", means)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target and a diffusion model."""
    folder = tmp_path_factory.mktemp("models")
    return make(folder / "target", arch="qwen2", **SIZES), make(folder / "dream", "dream")


def texts(target):
    """Prompts that the target goes on repeating, and one that it does not."""
    one = REPEATS * 3 + cases.plain(target, REPEATS * 3, 40)
    return [one, [1], REPEATS * 2, one[-45:]]


def assert_plain(engine, target, size, temperature, monkeypatch):
    """The tokens are those of plain decoding. Asked again, they are copied: then paths end in rows of the copy. Returns
    which draft's rows accepted paths ended in, and "fixed" if rounds had a fixed shape."""
    prompts, ends = texts(target)[:size], set()
    want = [cases.plain(target, prompt, 24, temperature=temperature, seed=3) for prompt in prompts]

    def look(_, r):
        if isinstance(r.draft, Branches):
            found = [report[1 : 1 + report[0]] for report in r.host["report"].tolist()]
            ends.update(["fixed"] if r.batch.fixed else [])
            ends.update("copy" if path[-1] > r.draft.base.size else "own" for path in found if len(path) > 1)

    for _ in range(2):
        with after_every_round(monkeypatch, look):
            out = engine.generate(prompts, 24, temperature=temperature, seed=3)
        assert [each.tokens for each in out] == want
    assert sum(each.stats.beside for each in out) > 1 and "copy" in ends
    return ends


@pytest.mark.parametrize(("name", "mode"), cases.one_in(3, DIFFUSION, MODES))
@pytest.mark.usefixtures("both")
def test_a_diffusion_models_draft_beside_a_copy_changes_no_token(models, name, mode, monkeypatch):
    (target, dream), (graphs, size, temperature) = models, mode
    how = DIFFUSION[name] | {"dtype": "float64", "device": "cpu", "page_size": 16, "graphs": graphs}
    engine = specker.load(target, dream, "diffuspec+lookup", batch_size=size, **how)
    ends = assert_plain(engine, target, size, temperature, monkeypatch)
    assert ("fixed" in ends) == (graphs == "on")


@pytest.mark.parametrize(("name", "mode"), cases.one_in(5, HEADS, MODES))
@pytest.mark.usefixtures("both")
def test_a_heads_draft_beside_a_copy_changes_no_token(heads, name, mode, monkeypatch):
    (strategy, layout, options), (graphs, size, temperature) = HEADS[name], mode
    head = heads(strategy, layout)
    engine = head.load("+lookup", graphs=graphs, batch_size=size, page_size=16, **options)
    ends = assert_plain(engine, head.target, size, temperature, monkeypatch)
    assert ("fixed" in ends) == (graphs == "on" and layout not in ("parallel", "deepseek, 3 heads"))


@pytest.mark.usefixtures("both")
def test_a_trace_says_which_rows_are_copied(heads):
    head = heads("eagle", "nested")
    engine, rows = head.load("+lookup", lookup_share="off"), []
    engine.trace = rows.append
    out = engine.generate(texts(head.target)[0], 24)
    found = [row for row in rows if "branch" in row]
    assert len(found) == out.stats.beside <= out.stats.copied and found
    for row in found:
        assert row["source"] == "head" and row["branch"]["source"] == "text" and row["branch"]["matched"] > 0
        assert len(row["draft"]) == len(row["parents"]) >= row["branch"]["row"] - 1 >= len(row["confidence"])


@pytest.mark.usefixtures("both")
def test_a_prediction_beside_a_draft_is_counted(heads):
    head = heads("eagle", "nested")
    want = cases.plain(head.target, REPEATS, 24)
    out = head.load("+lookup", draft_tokens=3).generate(REPEATS, 24, prediction=want[:-4] + [1, 2, 3, 4])
    assert out.tokens == want and out.stats.beside > 0
    assert out.stats.predicted > out.stats.predicted_right > 10


def test_ranks_agree_on_both_drafts():
    ranks = SimpleNamespace(device="cpu", first=lambda x: x, numbers=lambda x: x.tolist())
    for budget in (Budget(4, 3, 0, 1, (7, 8)), Budget(12, 4, beside=Budget(8, 8, part=1)), Budget(0, 0)):
        assert Ranks.budget(ranks, budget, 3) == budget


class Writes(Drafter):
    """Drafts what it is told."""

    def __init__(self, tokens, parents):
        self.tokens, self.parents = tokens, parents

    def propose(self, batch):
        return Draft.of(batch, self.tokens, self.parents)


def drafted(base, parents, chain, fixed):
    """The round's draft and state, of a first draft (tokens and rows) and a chain of each sequence."""
    n, first, longest = len(base), max(map(len, base)), max(map(len, chain))
    sizes = {"rows": 1 + first + longest, "wide": 1, "vocab": 1, "columns": 1}
    state = State.empty(torch.float64, torch.device("cpu"), sequences=n, **sizes)
    shape = Shape(n, Budget(first, first, beside=Budget(longest, longest, part=1)), fixed)
    batch = Batch([SimpleNamespace(guide=None)] * n, state, shape, None, [1] * n, Graphs())
    chains = Writes(chain, [list(range(len(each))) for each in chain])
    return branches.drafted(batch, [Writes(base, parents), chains]), state


def paths(tokens, parents):
    """All beginnings of a tree's paths."""
    known = [()]
    for token, parent in zip(tokens, parents, strict=True):
        known.append((*known[parent], token))
    return known[1:]


CHAIN = [0, 1, 2]
TREES = {  # tokens, parents, chain -> rows without those of the common beginning
    "nothing in common": ([4, 5, 6], CHAIN, [7, 8], 5),
    "the first token": ([4, 5, 6], CHAIN, [4, 8, 9], 5),
    "the whole draft": ([4, 5, 6], CHAIN, [4, 5, 6, 7, 8], 5),
    "the whole copy": ([4, 5, 6], CHAIN, [4, 5], 3),
    "a later branch of a tree": ([4, 9, 5, 6, 7], [0, 0, 2, 3, 2], [9, 5, 8], 6),
    "a token in another branch": ([4, 9, 5], [0, 0, 1], [9, 5], 4),
    "equal tokens below each other": ([4, 4, 4], CHAIN, [4, 4, 5], 4),
}


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("name", TREES)
def test_the_tree_has_the_paths_of_both_drafts(name, fixed):
    tokens, parents, chain, rows = TREES[name]
    draft, state = drafted([tokens], [parents], [chain], fixed)
    N = draft.size
    assert (len(tokens) + len(chain) if fixed else rows) == N and draft.count(0) == N
    up = state.parents[0, :N].tolist() if draft.tree else list(range(N))
    found = paths(state.window[0, 1 : N + 1].tolist(), up)
    assert {*found} == {*paths(tokens, parents), *paths(chain, range(len(chain)))}
    assert fixed or len({*found}) == N
    # Acceptance goes to the first of equal siblings: its children are in the tree.
    firsts = {}
    for row, (path, parent) in enumerate(zip(found, up, strict=True), 1):
        firsts.setdefault(path, row)
        assert parent == firsts.get(path[:-1], 0)


def test_sequences_of_unequal_agreement_share_a_shape():
    base, chain = [[4, 5, 6], [4, 5, 6], [4, 5, 6]], [[4, 5, 7, 8], [4, 9, 9, 9], [4]]
    draft, state = drafted(base, [CHAIN] * 3, chain, False)
    assert draft.size == 3 + 3 and [draft.count(slot) for slot in range(3)] == [6, 6, 3]
    for slot in range(3):
        found = paths(state.window[slot, 1:7].tolist(), state.parents[slot, :6].tolist())
        assert {*paths(base[slot], CHAIN), *paths(chain[slot], range(len(chain[slot])))} <= {*found}


@pytest.mark.parametrize(
    ("path", "emitted", "own", "copied"),
    [
        ([0], [9], 0, 0),
        ([0, 1, 2], [4, 5, 9], 2, 1),  # along the first draft
        ([0, 1, 4, 5], [4, 7, 8, 9], 1, 3),  # along the copy
        ([0, 1, 2, 3], [4, 5, 6, 7], 3, 1),
    ],
)
def test_each_draft_learns_what_it_had_right(path, emitted, own, copied):
    chain = Draft(3, tokens=[[4, 7, 8]])
    draft = Branches(5, tree=True, depth=3, base=Draft(3, depth=3), chain=chain, left_out=1)
    outcome = draft.outcome(0, path, emitted)
    assert (outcome.drafted, len(outcome.path) - 1) == (3, own)
    assert (outcome.beside.drafted, len(outcome.beside.path) - 1) == (3, copied)


def joined(own=4, branches=True):
    policy = JoinedPolicy([Fixed(own, own), NgramPolicy({}, Budget(16, 16, part=1))], branches)
    policy.announced([Match(6, 16)])
    return policy


def test_a_cut_draft_verifies_and_learns_no_more_than_it_has():
    """A policy may cut a chain that the copy agrees with: its rows, and what is known of both drafts, end there."""
    chain = Draft(3, depth=3, tokens=[[7, 8, 9], [7]])
    draft = Branches(4, depth=4, base=Draft(4, depth=4), chain=chain, left_out=3)
    assert [draft.count(slot) for slot in (0, 1)] == [4, 4]
    draft.draft_lengths = [2, 3]
    assert [draft.count(slot) for slot in (0, 1)] == [2, 3]
    first, second = draft.outcome(0, [0, 1, 2], [7, 8, 5]), draft.outcome(1, [0, 1], [7, 4])
    assert (first.drafted, first.path, first.beside.drafted, first.beside.path) == (2, [0, 1, 2], 2, [0, 1, 2])
    assert (second.drafted, second.path, second.beside.drafted, second.beside.path) == (3, [0, 1], 1, [0, 1])


def test_two_drafts_promise_more_than_the_better_one():
    policy = joined()
    [pair] = [shape for shape in policy.budgets() if shape.beside == Budget(4, 4, part=1)]
    own, copied = (policy.parts[part].means(Budget(4, 4, part=part)).tokens for part in (0, 1))
    assert max(own, copied) < policy.means(pair).tokens < own + copied - 1
    assert policy.means(pair).drafted == 4 < policy.means(pair).verified < 8
    assert shared(2.0, 2.0) == pytest.approx(1.3 * sum(0.25**i for i in range(1, 30)))
    assert shared(9.0, 2.0) == 1.0 and shared(1.0, 5.0) == 0.0
    policy.parts[0].rate = 0.99
    assert policy.means(pair).tokens == 5, "no more tokens than the longer path, and the target's own"


@pytest.mark.parametrize(
    ("rate", "matched", "step", "row", "takes"),
    [
        (0.6, 2, 0.05, 0.01, "both"),  # cheap drafts and rows
        (0.6, 3, 0.05, 0.3, "one"),  # rows are dear
        (0.6, 8, 0.5, 0.03, "copy"),  # a long match spares the model
        (0.9, 1, 0.05, 0.03, "model"),
    ],
)
def test_prices_decide_which_drafts_a_round_has(rate, matched, step, row, takes):
    costs = Costs(lambda budget: 1e-3 if budget.part else step * budget.depth)
    for size in range(17):
        costs.measured(1, NONE, size, 0.0, 1 + row * size)
        for part in (0, 1):
            costs.measured(1, Budget(size, size, part=part), size, 0.001 if part else step * size, 1 + row * size)
    policy = joined()
    policy.parts[0].rate = rate
    policy.announced([Match(matched, 16)])
    shape = Chooser(costs, learns=False).choose([policy], [500])
    found = "both" if shape.beside else "copy" if shape.part else "model"
    assert found == takes or (takes == "one" and found != "both")


def test_both_policies_learn_from_a_pair():
    policy = joined()
    pair = next(shape for shape in policy.budgets() if shape.beside == Budget(4, 4, part=1))
    before = [policy.parts[0].rate, policy.means(pair.beside).tokens]
    policy.taken(pair)
    policy.observe(Outcome(4, [0], beside=Outcome(4, [0, 1, 2, 3, 4])))
    policy.announced([Match(6, 16)])
    assert policy.parts[0].rate < before[0] and policy.means(pair.beside).tokens > before[1]


def test_pairs_are_offered_where_there_is_a_match_and_a_tree_is_allowed():
    policy = joined()
    assert {shape.beside.depth for shape in policy.budgets() if shape.beside} == {2, 4, 8}
    policy.announced([Match()])
    assert not any(shape.beside for shape in policy.budgets())
    assert not any(shape.beside for shape in joined(branches=False).budgets())
    assert not any(shape.beside for shape in joined(own=62).budgets()), "more than 64 rows"


def test_which_drafters_take_turns_with_copies():
    """Heads and drafters of blocks have a copy beside them. A draft model copies by itself what a text repeats."""
    beside = {name for name, strategy in strategies.known().items() if strategy.branches}
    assert beside == {"eagle", "mtp", "dflash", "diffuspec"}


def test_a_clipped_pair_keeps_both_drafts():
    pair = Budget(12, 4, beside=Budget(8, 8, part=1))
    assert pair.clip(20, 9) is pair
    assert pair.clip(20, 5) == Budget(12, 4, beside=Budget(5, 5, part=1))
    assert pair.clip(3, 2) == Budget(3, 2, beside=Budget(2, 2, part=1))
