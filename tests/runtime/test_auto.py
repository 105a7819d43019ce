"""Policy `auto` on simulated rounds: known costs, known acceptance, no clock."""

import collections
import itertools
import math
import random
from dataclasses import replace

import cases
import pytest

from specker.runtime.control.auto import DIFFER, Acceptance, AcceptanceHistory, Auto
from specker.runtime.control.choose import (
    AGAIN,
    APART,
    BEHIND,
    FIRST,
    LATER,
    LOOK,
    MEASURED,
    REPAID,
    RESTS,
    RUN,
    SHARE,
    START,
    SWITCH,
    TRIED,
    Chooser,
    _Texts,
    worth_rows,
)
from specker.runtime.control.costs import FORGET, SOON, Costs, Curve
from specker.runtime.control.policy import (
    LENGTHS,
    TREES,
    Budget,
    Chain,
    DraftAndVerify,
    Fixed,
    Match,
    Means,
    Offer,
    Outcome,
    StopRule,
    after,
)
from specker.runtime.strategies.join import JoinedPolicy
from specker.runtime.strategies.lookup import RATES, NgramPolicy

STEP = 0.030  # seconds of a plain round
COPIED = Budget(16, 16, part=1)  # the longest copied draft


class World:
    """Rounds of a machine: a draft step takes `step` plain rounds and a further verify row `row`; the target agrees
    with each draft token with the probability that `agrees(n)` gives for round n. `cold`: how many times as long the
    draft of the first round after a change between drafts and plain rounds takes. `doubled`: the share of stages that
    an interruption doubles. `slow`: the share of rounds after which up to six take 1.5 to 5 times as long."""

    def __init__(
        self,
        step,
        row,
        agrees,
        confident=False,
        noise=0.0,
        seed=1,
        sequences=1,
        known=None,
        cold=1.0,
        doubled=0.0,
        slow=0.0,
    ):
        self.known = known or AcceptanceHistory(Costs(lambda budget: step * budget.nodes))
        self.chooser = Chooser(self.known.costs)
        self.policies = [Auto(self.known.drafts, Budget(16, 16), confident) for _ in range(sequences)]
        self.step, self.row, self.agrees, self.confident, self.noise = step, row, agrees, confident, noise
        self.cold, self.doubled, self.same = cold, doubled, 0  # same: rounds of one kind in a row
        self.slow, self.phases, self.until = slow, random.Random(seed), -1
        self.random, self.n = random.Random(seed), 0
        self.seconds = self.tokens = 0.0
        self.drafted, self.spent = [], []  # of each round: draft tokens; plain rounds beyond its tokens

    def true(self, k):
        """(seconds of the draft, of the rest)."""
        return STEP * self.step * k, STEP * (1 + self.row * k)

    def rate(self, k, a):
        """Expected tokens per second of rounds with k draft tokens."""
        return sum(a**i for i in range(k + 1)) / sum(self.true(k))

    def round(self):
        n, a = len(self.policies), self.agrees(self.n)
        shape = self.chooser.choose(self.policies, [10_000] * n)
        trial, reason, warm = self.chooser.trial, self.chooser.reason, self.chooser.warm
        paired = self.chooser.paired and shape.nodes > 0
        prices = self.chooser.prices(self.policies, shape) if shape.nodes else ()
        for p in self.policies:
            p.taken(shape, prices)
        k, confidences = 0, [[] for _ in self.policies]
        while k < shape.nodes:
            k += 1
            for c in confidences:
                c.append(min(0.99, max(0.01, self.random.gauss(a, 0.1))))
            if self.confident and sum(p.next_worth(c[-1]) for p, c in zip(self.policies, confidences, strict=True)) < n:
                break
        tokens = 0
        for p, c in zip(self.policies, confidences, strict=True):
            right = next((j for j in range(k) if self.random.random() > (c[j] if self.confident else a)), k)
            p.observe(Outcome(k, list(range(right + 1)), c if self.confident else []))
            tokens += 1 + right
        self.same = self.same + 1 if self.drafted and (k > 0) == (self.drafted[-1] > 0) else 0
        longer = 1 + (self.cold - 1) / 2**self.same if self.same < 3 else 1.0
        draft, rest = (
            s * (1 + self.noise * self.random.random()) * (2 if self.random.random() < self.doubled else 1)
            for s in self.true(k)
        )
        draft, rest = draft * longer, rest * (1 + (longer - 1) / 2)
        if self.slow and self.n > self.until and self.phases.random() < self.slow:
            self.until = self.n + self.phases.randint(1, 6)
        if self.n <= self.until:
            draft, rest = draft * self.phases.uniform(1.5, 5), rest * self.phases.uniform(1.5, 5)
        if reason in (RESTS, MEASURED) and not k:
            self.chooser.measured(n, rest, reason == RESTS)
        else:
            self.known.costs.observe(n, shape, k, draft, rest, warm=warm, paired=paired)
            self.chooser.finished(n, shape, k, tokens, trial)
        self.n += 1
        self.seconds, self.tokens = self.seconds + draft + rest, self.tokens + tokens / n
        self.drafted.append(k)
        self.spent.append((draft + rest) / STEP - tokens / n)

    def text(self, rounds):
        """Rounds of a new text."""
        first = self.policies[0]
        self.policies = [Auto(self.known.drafts, first.shapes[-1], self.confident)]
        self.chooser.admitted()
        return self.run(rounds)

    def run(self, rounds):
        for _ in range(rounds):
            self.round()
        return self

    @property
    def speedup(self):
        return self.tokens * STEP / self.seconds


@pytest.mark.parametrize(
    ("price", "a"), cases.one_in(2, [(0.05, 0.02), (0.25, 0.1), (0.02, 0.3)], [0.95, 0.8, 0.6, 0.3, 0.05])
)
def test_it_converges_to_the_best_length(price, a):
    """Including none: the speed is within a few percent of the best fixed length, whatever the costs."""
    world = World(*price, lambda n: a, noise=0.2).run(600)
    late = World(*price, lambda n: a, noise=0.2, seed=2, known=world.known).run(1500)
    best = max(world.rate(k, a) * STEP for k in (0, *LENGTHS))
    assert 1.1 * late.speedup > 0.94 * best, "the noise lengthens every round by a tenth on average"
    if best == 1:
        assert late.drafted.count(0) > 0.9 * len(late.drafted)


@pytest.mark.parametrize("confident", [False, True])
@pytest.mark.parametrize("a", [0.0, 0.1, 0.3])
def test_drafts_that_do_not_pay_cost_little(a, confident):
    """At most what the chooser allows: the first losses, and a share of the time."""
    world = World(0.4, 0.2, lambda n: a, confident).run(2000)
    assert world.drafted.count(0) > 1900 and sum(k > 0 for k in world.drafted) > 5
    assert sum(world.spent) < FIRST + 2 + SHARE * 2000
    tries = [n for n, k in enumerate(world.drafted) if k]
    assert max(b - a for a, b in itertools.pairwise(tries)) > 4 * (tries[1] - tries[0] + 1), "trials become rarer"


@pytest.mark.parametrize("confident", [False, True])
def test_it_recovers_when_the_text_becomes_predictable(confident):
    world = World(0.1, 0.05, lambda n: 0.05 if n < 600 else 0.95, confident).run(600)
    assert world.drafted[300:].count(0) > 240
    world.run(300)
    first = next(n for n, k in enumerate(world.drafted[600:]) if k)
    assert first < 170
    plain = world.drafted[600 + first + 40 :].count(0)
    assert plain <= 3 * LOOK, "only to measure plain decoding"


def texts(step, row, a, confident, seed):
    """The speedup and the share of drafting rounds in texts 5 to 10, on a machine whose caches must be filled anew
    after each change, with interruptions."""
    world = World(step, row, lambda n: a, confident, noise=0.2, seed=seed, cold=1.6, doubled=0.03)
    for _ in range(4):
        world.text(64)
    world.seconds = world.tokens = 0.0
    begun = len(world.drafted)
    for _ in range(6):
        world.text(64)
    return 1.13 * world.speedup, sum(k > 0 for k in world.drafted[begun:]) / (6 * 64)


@pytest.mark.parametrize(("a", "confident"), cases.one_in(2, [0.75, 0.85], [False, True]))
def test_luck_does_not_decide_whether_drafts_are_made(a, confident):
    """Single drafts after plain rounds take so much longer that they lose, though drafts in a row win."""
    best = max(World(0.25, 0.1, None).rate(k, a) * STEP for k in LENGTHS)
    found = [texts(0.25, 0.1, a, confident, seed) for seed in range(8)]
    assert min(share for _, share in found) > 0.4
    assert min(speed for speed, _ in found) > 0.8 * best > 1.05


@pytest.mark.parametrize("confident", [False, True])
@pytest.mark.parametrize(("step", "row", "a"), [(0.5, 0.2, 0.4), (0.3, 0.25, 0.1)])
def test_drafts_that_cannot_win_cost_a_hundredth(step, row, a, confident):
    found = [texts(step, row, a, confident, seed) for seed in range(8)]
    assert sum(share for _, share in found) / 8 < 0.04 and sum(speed for speed, _ in found) / 8 > 0.98
    world = World(step, row, lambda n: a, confident).text(96)
    for _ in range(10):
        begun = sum(world.spent)
        world.text(96)
        assert sum(world.spent) - begun < FIRST + 3
    assert sum(world.spent) < 2 * FIRST + 3 + 2 * SHARE * 960


def promising(tokens):
    """`Policy.means` of drafts that have their whole length. `tokens`: what they commit, by shape."""
    return lambda shape: Means(tokens(shape), shape.depth, shape.depth)


def test_a_text_that_lost_does_not_silence_the_next_ones():
    """Its drafts spent the credit. A new text drafts at once if that promises a gain, and not if it does not."""
    world = World(0.1, 0.05, lambda n: 0.9).text(64)
    for expected, drafts in ((4.0, True), (1.0, False)):
        world.chooser.left = -3.0
        world.text(0)
        world.policies[0].means = promising(lambda shape, n=expected: n)
        before = len(world.drafted)
        world.run(AGAIN)
        assert any(world.drafted[before:]) == drafts
        assert world.chooser.left > 0 or not drafts


def test_overrated_drafts_are_stopped_by_the_credit():
    """A policy that always expects much cannot lose more than the credit."""
    world = World(0.5, 0.2, lambda n: 0.0)
    world.policies[0].means = promising(lambda shape: 100.0)
    world.run(3000)
    assert 0 < sum(world.spent) - FIRST < 15 + SHARE * 3000 * 1.1


def test_a_stop_rule_gains_as_much_as_the_best_one():
    """Against all thresholds on the probability that a chain is right, by brute force on the same world."""

    def brute(least):
        rng, tokens, seconds = random.Random(3), 0.0, 0.0
        for _ in range(8_000):
            joint, k, right = 1.0, 0, True
            while k < 16:
                c = min(0.99, max(0.01, rng.gauss(0.8, 0.25)))
                k, joint = k + 1, joint * c
                right = right and rng.random() < c
                tokens += right
                if joint < least:
                    break
            tokens, seconds = tokens + 1, seconds + STEP * (1 + 0.25 * k)
        return tokens * STEP / seconds

    best = max(brute(least / 20) for least in range(1, 20))

    class Mixed(World):
        def round(self):
            self.random.gauss = lambda mu, sigma, rng=self.random: random.Random.gauss(rng, 0.8, 0.25)
            super().round()

    worlds = [Mixed(0.15, 0.1, lambda n: 0.8, confident=True, seed=seed).run(4000) for seed in range(3)]
    assert sum(world.speedup for world in worlds) / 3 > 0.95 * best


def test_a_rule_and_its_chain():
    rule = StopRule(token=0.3, joint=(0.5, 0.6), scales=(1.0, 0.5))
    assert after(rule, Chain(), 0.4) == (Chain(1, 0.4), 0.4 / 0.5)
    chain, worth = after(StopRule(token=0.3, joint=(0.35, 0.3), scales=(1.0, 0.5)), Chain(), 0.9)
    assert chain == Chain(1, 0.45) and worth == 0.45 / 0.35
    assert after(StopRule(token=0.3, joint=(0.35, 0.3)), chain, 0.7) == (Chain(2, 0.45 * 0.7), 0.45 * 0.7 / 0.3)
    longer = after(StopRule(token=0.3, joint=(0.35, 0.3)), Chain(7, 0.4), 0.7)
    assert longer[1] == 0.4 * 0.7 / 0.3, "the last threshold holds on"
    assert after(StopRule(token=0.3), Chain(), 0.15)[1] == 0.5 and after(StopRule(), Chain(), 0.0)[1] == math.inf
    p = DraftAndVerify(4, 4)
    assert p.rule == StopRule(token=p.threshold)


def test_the_draft_s_probabilities_are_corrected():
    """A draft that promises 0.9 and is right in half of the cases; what follows a wrong token was not compared."""
    seen = Acceptance(0.98)
    for n in range(300):
        seen.add(Outcome(3, [0, 1] if n % 2 else [0], [0.9, 0.9, 0.9]))
    *_, scale = seen.scales()
    assert scale == pytest.approx(1 / 3 / 0.9, rel=0.2) and seen.scales()[0] == 1.0
    assert seen.agreement() == pytest.approx(1 / 3, rel=0.1)
    assert seen.at(0) == pytest.approx(0.5, rel=0.1) and seen.at(1) < 0.1
    text = Acceptance(0.9, seen)
    assert text.agreement() == seen.agreement() and text.scales() == seen.scales(), "a new text starts from the others"
    text.add(Outcome(2, [0, 1, 2], [0.5, 0.5]))
    assert text.agreement() > seen.agreement() and text.scales()[2] > 1.1


def test_the_end_of_a_context_cuts_a_chain_to_a_chain():
    assert Budget(16, 16).clip(16, 3) == Budget(3, 3) and Budget(16, 16).clip(2, 3) == Budget(2, 3)
    assert Budget(16, 8).clip(16, 3) == Budget(16, 3)


def tree_of(nodes, *path):
    """The outcome of a tree of `nodes` nodes, of which the rows `path` were accepted."""
    return Outcome(nodes, [0, *path], tree=True)


def test_a_trees_outcome_tells_what_every_smaller_one_would_have_had_accepted():
    seen = Acceptance(1.0)
    assert seen.expected_tree(8) == 3.0 and seen.expected_tree(16) == 4.0, "before anything was drafted"
    for _ in range(400):
        seen.add(tree_of(32, 1, 5, 7, 8, 9, 30))  # no more levels than half the nodes
        seen.add(tree_of(32))
    assert [seen.expected_tree(nodes) for nodes in (8, 16, 32)] == pytest.approx([3.0, 3.5, 4.0], rel=0.02)
    assert seen.expected_tree(48) == pytest.approx(4.25, rel=0.02), "half of what the next smaller one added"
    assert seen.expected(4) == Acceptance(1.0).expected(4), "chains are counted apart"
    text = Acceptance(0.9, seen)
    assert text.expected_tree(32) == pytest.approx(4.0, rel=0.02), "a new text starts from the others"
    for _ in range(50):
        text.add(tree_of(8, 1, 2, 3, 4))
    assert text.expected_tree(8) > 4.4, "of 5"
    assert text.expected_tree(16) - text.expected_tree(8) == pytest.approx(0.5, rel=0.1), "not drafted, not changed"


class Trees:
    """Rounds of a model that drafts chains or trees of at most 16 levels. Level j of a tree is right in one of the rows
    2 j - 1 and 2 j."""

    def __init__(self, row, agrees, best):
        """`row`: what a verified row costs, of a plain round. `agrees`: of a level of a tree; `best`: of a chain."""
        self.row, self.agrees, self.best, self.random = row, agrees, best, random.Random(3)
        known = AcceptanceHistory(Costs(lambda budget: 0.2))
        self.costs, self.chooser = known.costs, Chooser(known.costs)
        trees = tuple(Budget(nodes, min(16, nodes // 2)) for nodes in TREES)
        self.policy = Auto(known.drafts, Budget(16, 16), False, trees)

    def round(self):
        shape = self.chooser.choose([self.policy], [10_000])
        trial, reason = self.chooser.trial, self.chooser.reason
        right = 0
        while right < shape.depth and self.random.random() < (self.agrees if shape.tree else self.best):
            right += 1
        rows = [2 * j - self.random.randint(0, 1) if shape.tree else j for j in range(1, right + 1)]
        self.policy.observe(Outcome(shape.nodes, [0, *rows], tree=shape.tree))
        draft, rest = 0.2 * STEP * (shape.nodes > 0), STEP * (1 + self.row * shape.nodes)
        if reason in (RESTS, MEASURED) and not shape.nodes:
            self.chooser.measured(1, rest, reason == RESTS)
        else:
            self.costs.observe(1, shape, shape.nodes, draft, rest, paired=trial)
            self.chooser.finished(1, shape, shape.nodes, 1 + right, trial)
        return shape


@pytest.mark.parametrize(
    ("row", "agrees", "best", "tree", "nodes"),
    [
        (0.001, 0.9, 0.5, True, (32, 32)),  # rows that cost little; larger trees accept no more
        (0.03, 0.8, 0.5, True, (8, 16)),
        (0.03, 0.81, 0.8, False, (3, 16)),  # a tree is hardly better than a chain
    ],
)
def test_the_measured_costs_choose_between_chains_and_trees(row, agrees, best, tree, nodes):
    world = Trees(row, agrees, best)
    shapes = [world.round() for _ in range(500)][250:]
    drafts = [shape for shape in shapes if shape.nodes]
    (usual, _), *_ = collections.Counter(drafts).most_common(1)
    assert nodes[0] <= usual.nodes <= nodes[1] and sum(shape.tree == tree for shape in drafts) > 0.8 * len(shapes)
    assert all(shape.depth == min(16, shape.nodes // 2) and shape.nodes in TREES for shape in drafts if shape.tree)


def test_a_batch_shares_one_length():
    """Rows that cost more in a large batch end drafts there."""
    small = World(0.05, 0.02, lambda n: 0.7, sequences=8).run(300)
    large = World(0.5, 1.0, lambda n: 0.7, sequences=8).run(600)
    assert sum(small.drafted[100:]) / 200 > 3 and large.drafted[100:].count(0) > 490


@pytest.mark.parametrize("gain", [1.1, 3.0])
def test_plain_decoding_is_measured_the_more_often_the_less_drafts_gain(gain):
    """What drafts would have gained meanwhile, and the change to plain rounds, cost TRIED of the time."""
    world = World(1e-3, 0.0, lambda n: 0.0)
    world.chooser.left = math.inf
    world.policies[0].means = promising(lambda shape: gain)
    world.run(2000)
    looks = [n for n, k in enumerate(world.drafted) if not k]
    runs = [n for n in looks if n - 1 not in looks]
    assert len(looks) - 4 * LOOK <= LOOK * len(runs) <= len(looks) + LOOK
    apart = [b - a - LOOK for a, b in itertools.pairwise(runs)]
    assert apart[1:] == pytest.approx([(SWITCH + LOOK * (1 - 1 / gain)) / TRIED] * len(apart[1:]), rel=0.1)
    assert min(apart) >= APART


def test_a_measurement_counts_its_second_shortest_round():
    known = AcceptanceHistory(Costs(lambda budget: 1.0))
    chooser = Chooser(known.costs)
    known.costs.measured(1, Budget(0, 0), 0, 0.0, 1.0)
    for n in range(LOOK):
        chooser.measured(1, 0.9 - 0.1 * n, False)
        assert known.costs.plain(1) == (1.0 if n < LOOK - 1 else pytest.approx(0.9 - 0.1 * (n - 1)))
    chooser.measured(1, 0.1, False)
    for _ in range(LOOK):
        chooser.measured(2, 3.0, False)
    assert known.costs.plain(2) == pytest.approx(3.0), "a round of another number of texts does not count"


def test_drafts_that_look_slower_after_a_measurement_are_tried_at_once():
    world = World(0.25, 0.1, None)
    chooser, costs, promised = world.chooser, world.known.costs, 1.1
    world.policies[0].means = promising(lambda shape: promised * costs.round(1, shape) / costs.plain(1))
    for _ in range(LOOK):
        assert not chooser.choose(world.policies, [500]).nodes and chooser.reason == MEASURED
        chooser.measured(1, STEP, False)
    promised = 0.94
    for _ in range(RUN):
        assert chooser.choose(world.policies, [500]).nodes and chooser.trial
        chooser.finished(1, Budget(4, 4), 4, 1, True)
    assert not chooser.choose(world.policies, [500]).nodes and chooser.reason == RESTS
    assert [chooser.keeps_resting(1) for _ in range(LATER)].index(False) > 0 and not chooser.keeps_resting(2)


@pytest.mark.parametrize(("promised", "goes_on"), [(0.95, True), (0.85, False)])
def test_drafts_go_on_while_they_may_yet_gain(promised, goes_on):
    """What a few drafts achieved is uncertain. The credit limits what that costs."""
    world = World(0.1, 0.05, lambda n: 0.9).run(40)
    chooser, costs = world.chooser, world.known.costs
    assert world.drafted[-1]
    chooser._since = 0.0  # plain decoding is not measured now
    world.policies[0].means = promising(lambda shape: promised * costs.round(1, shape) / costs.plain(1))
    assert bool(chooser.choose(world.policies, [500]).nodes) == goes_on
    chooser.left = 0.0
    assert not chooser.choose(world.policies, [500]).nodes


def test_a_trial_says_nothing_of_plain_rounds():
    costs, shape = Costs(lambda budget: 0.1 * budget.nodes), Budget(4, 4)
    for size, seconds in ((0, 1.0), (4, 1.4)):
        costs.measured(1, Budget(size, size), size, 0.5, seconds)
    for trial in (True, False):
        before = costs.round(1, shape)
        costs.observe(1, shape, 4, 0.5, 3.0, paired=trial)
        assert costs.round(1, shape) > 1.05 * before and (costs.plain(1) == 1.0) == trial


def test_a_resting_chooser_asks_its_policies_now_and_then():
    world = World(0.4, 0.2, lambda n: 0.0).run(200)
    asked, policy = [], world.policies[0]
    budgets = policy.budgets
    policy.budgets = lambda: asked.append(world.n) or budgets()
    world.run(320)
    assert 0 < len(asked) < 320 / AGAIN + 12
    policy.copies = True
    asked.clear()
    world.run(32)
    assert len(asked) == 32


def test_a_reading_must_be_repaid():
    world = World(0.05, 0.02, lambda n: 0.8).run(300)
    costs, chooser = world.known.costs, world.chooser
    costs.observe_prefill(100, 100 * STEP / 10)  # ten tokens take a plain round
    best = max(world.policies[0].budgets(), key=lambda shape: chooser.rate(world.policies, shape))
    gain = 1 / START - 1 / (chooser.rate(world.policies, best) * costs.plain(1))  # of a token, in plain rounds
    chooser._drafting = False
    least = REPAID * 200 * costs.prefill(100) / 100 / costs.plain(1) / gain
    for left, reads in ((1.1 * least, True), (0.9 * least, False)):
        shape = chooser.choose(world.policies, [left], [Offer([200])])
        assert not shape.nodes and chooser.unread == ({0} if reads else set()) and (reads or chooser.reason == RESTS)
    chooser.admitted()
    assert chooser.choose(world.policies, [20], [Offer([0])]).nodes, "a text that is read costs nothing more"


def test_a_short_prefill_from_a_disk_says_little_of_a_long_one():
    costs = Costs(lambda budget: 0.1 * budget.nodes)
    assert costs.prefill(100) == 0.0
    costs.observe_prefill(8, 20.0)
    assert costs.prefill(8) == costs.prefill(1) == 20.0 and costs.prefill(32) == 40.0, "its time is that of the weights"
    assert costs.prefill(0) == 0.0
    costs.observe_prefill(31, 3.1)
    assert costs.prefill(100) == pytest.approx(10.0)
    costs.observe_prefill(100, 90.0)
    assert 10.0 < costs.prefill(100) < 13.0, "one long time"
    for _ in range(30):
        costs.observe_prefill(100, 15.0)
    assert costs.prefill(100) == pytest.approx(15.0, rel=0.05)


UNREAD = [Offer(missing=[60] * 4), Offer()]  # of a model, and of copies


@pytest.fixture
def one_match():
    """A chooser, and the policies of four texts that a model drafts well and has yet to read; a match in one of them
    promises 1.1 times plain decoding's rate."""
    known = AcceptanceHistory(Costs(lambda budget: 0.1 * budget.nodes if not budget.part else 1e-3))
    costs = known.costs
    policies = [
        JoinedPolicy([Auto(known.drafts, Budget(4, 4), False), NgramPolicy(known.matches, COPIED)]) for _ in range(4)
    ]
    for k in (0, 1, 2, 4, 8, 16):
        for part in (0, 1):
            costs.measured(4, Budget(k, k, part=part), k, STEP * 0.1 * k * (1 - part), STEP * (1 + 0.06 * k))
    costs.observe_prefill(100, 100 * STEP / 20)
    for policy, matched in zip(policies, (3, 0, 0, 0), strict=True):
        policy.announced([Match(matched, 16 * bool(matched))])
        for _ in range(20):
            policy.parts[0].observe(Outcome(4, [0, 1, 2, 3]))
    return Chooser(costs), policies


def test_a_model_reads_the_texts_where_its_drafts_repay_that(one_match):
    """Beside copies, which may not go on."""
    chooser, policies = one_match
    copied, drafted = (
        max((s for s in policies[0].budgets() if s.part == part), key=lambda s: chooser.rate(policies, s))
        for part in (1, 0)
    )
    saved = 1 / chooser.rate(policies, copied) - 1 / chooser.rate(policies, drafted)  # seconds a token
    least = REPAID * 240 / 20 * STEP / saved
    assert least > 40
    for left, reads in ((0.9 * least, False), (1.1 * least, True)):
        shape = chooser.choose(policies, [left / 4] * 4, UNREAD)
        assert (shape, chooser.unread) == ((Budget(0, 0), {0, 1, 2, 3}) if reads else (copied, set()))


def test_a_match_does_not_keep_a_model_from_reading(one_match):
    """It ends, and all tokens after it are then without drafts."""
    chooser, policies = one_match
    model, copies = UNREAD
    drafted = max((s for s in policies[0].budgets() if not s.part), key=lambda s: chooser.rate(policies, s))
    saved = chooser.costs.plain(4) / 4 / START - 1 / chooser.rate(policies, drafted)  # seconds a token
    least = REPAID * 240 / 20 * STEP / saved
    offers = [model, replace(copies, matches=[[Match(3, 16)], [], [], []])]
    chooser.choose(policies, [1.1 * least / 4] * 4, offers)
    assert chooser.unread == {0, 1, 2, 3}
    chooser.choose(policies, [0.9 * least / 4] * 4, offers)
    assert not chooser.unread


def test_a_text_that_ends_soon_is_not_read(one_match):
    chooser, policies = one_match
    chooser.choose(policies, [1000, 1000, 2, 1000], UNREAD)
    assert chooser.unread == {0, 1, 3}
    chooser.choose(policies, [2] * 4, UNREAD)
    assert not chooser.unread


def test_some_texts_draft_while_others_are_not_read(one_match):
    """They count as one token each; the rows of the others decide what is drafted."""
    chooser, policies = one_match
    for policy in policies:
        policy.announced([Match()])
    few, all_ = (
        chooser.choose(policies, [400] * 4, [Offer(missing=missing), Offer()], False)
        for missing in ([0, 0, 60, 60], [0] * 4)
    )
    assert few.nodes and all_.nodes and few.part == all_.part == 0
    assert not chooser.choose(policies, [400] * 4, [Offer(missing=[60] * 4), Offer()], False).nodes
    assert chooser.reason == BEHIND and not chooser.keeps_resting(4), "the reading goes on in the next round"


def test_texts_that_are_awaited_together_draft_for_those_that_end_last(one_match):
    """A copy for the first text of four gains where others may follow, but not if the others end later."""
    chooser, policies = one_match
    read, waiting, first = [Offer(missing=[60] * 4), Offer()], {"reads": False, "spread": 0.0}, [200, 400, 400, 400]
    assert chooser.choose(policies, first, read, False).part == 1 and chooser.worths == [1.0] * 4
    chooser = Chooser(chooser.costs)  # one that does not stay with drafts
    assert not chooser.choose(policies, first, read, **waiting).nodes
    assert chooser.choose(policies, [4000, 400, 400, 400], read, **waiting).part == 1
    assert chooser.worths[0] > 2 and max(chooser.worths[1:]) < 0.15


def test_a_token_is_worth_what_it_brings_the_end_nearer(one_match):
    chooser, policies = one_match
    for policy, seen in zip(policies, (1, 2, 3, 4), strict=True):
        for _ in range(30):
            policy.parts[0].observe(Outcome(4, [*range(seen)]))
    shape, offers = Budget(4, 4), [Offer(missing=[0] * 4), Offer()]
    texts = _Texts(policies, [90, 120, 150, 200], offers, chooser.costs, 0.0)
    tokens, worths = texts.expected(shape, False)[0], texts.worths(shape)
    for slot, policy in enumerate(policies):
        own = policy.means(shape).tokens
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(policy, "means", lambda budget, own=own: Means(own + 1e-6, 4, 4))
            more = texts.expected(shape, False)[0]
        assert (more - tokens) / 1e-6 == pytest.approx(worths[slot], rel=1e-3, abs=1e-6)
    alike = _Texts(policies[:1] * 4, [100] * 4, offers, chooser.costs, 0.0)
    assert alike.worths(shape) == pytest.approx([1.0] * 4)
    assert alike.expected(shape, False)[0] == pytest.approx(4 * policies[0].means(shape).tokens)


def test_texts_that_are_awaited_together_are_read_together(one_match):
    chooser, policies = one_match
    for policy in policies:
        policy.announced([Match()])
    chooser.choose(policies, [1000, 1000, 2, 1000], UNREAD)
    assert chooser.unread == {0, 1, 3}
    chooser.choose(policies, [1000, 1000, 2, 1000], UNREAD, spread=0.0)
    assert chooser.unread == {0, 1, 2, 3}
    chooser.choose(policies, [1000] * 4, UNREAD, spread=4.0)
    assert not chooser.unread, "the last of texts that differ so much hardly gains"


def test_how_much_texts_differ_is_learnt():
    known = AcceptanceHistory(Costs(lambda budget: 0.1))
    assert known.spread == pytest.approx(DIFFER)
    for _ in range(200):
        known.ended(1.0, 20, 10)
        known.ended(1.0, 5, 2)  # too few drafts
    assert known.spread < 0.1
    for accepted in (5, 35) * 200:
        known.ended(1.0, accepted, 10)
    assert known.spread == pytest.approx(0.75, abs=0.1)


def test_a_text_without_a_match_copies_no_tokens():
    policy = NgramPolicy(AcceptanceHistory(Costs(lambda budget: 1e-3)).matches, COPIED)
    for matched, available, tokens in ((0, 0, 0), (3, 2, 2), (3, 40, 4)):
        policy.announced([Match(matched, available)])
        assert policy.means(Budget(4, 4, part=1)).drafted == tokens


def test_copied_text_is_drafted_by_the_length_of_the_match():
    known = AcceptanceHistory(Costs(lambda budget: 1e-3))
    costs, chooser = known.costs, Chooser(known.costs)
    policy = NgramPolicy(known.matches, Budget(16, 16))
    for rows in (1, 2, 5, 9, 17):
        costs.measured(1, Budget(16, 16), rows - 1, 1e-5, STEP * (1 + 0.06 * (rows - 1)))

    def rate(n):
        return RATES[min(n, len(RATES)) - 1]

    def best(matched, most=16):
        ks = [k for k in LENGTHS if k < most] + [min(k for k in LENGTHS if k >= most)]
        joint = [math.prod(rate(matched + j) for j in range(k)) for k in range(most + 1)]
        return max(ks, key=lambda k: sum(joint[: min(k, most) + 1]) / (1 + 0.06 * k))

    for matched, available in ((1, 40), (2, 40), (8, 40), (20, 40), (8, 3)):
        policy.announced([Match(matched, available)])
        assert policy.rate_of(matched) == pytest.approx(rate(matched))
        assert chooser.choose([policy], [1000]).nodes == best(matched, min(available, 16))
    policy.announced([Match()])
    assert chooser.choose([policy], [1000]).nodes == 0 and chooser.reason == "nothing found"
    policy.announced([Match(2, 40)])
    for _ in range(60):
        policy.observe(Outcome(3, [0, 1, 2, 3]))
    assert min(policy.rate_of(n) for n in (2, 3, 4)) > 0.95, "each right token makes the match longer"
    assert policy.rate_of(1) == RATES[0] and policy.rate_of(5) == RATES[4]
    assert NgramPolicy(known.matches, Budget(16, 16)).rate_of(2) > 0.9, "the next text starts from there"


def test_tokens_of_a_copy_count_by_the_match_before_each():
    """Here a token after a match of one is right in a third of the cases, and all tokens after a longer one are."""
    policy = NgramPolicy({}, Budget(4, 4))
    policy.announced([Match(1, 40)])
    for _ in range(60):
        for path in ([0], [0], [0, 1, 2, 3, 4]):
            policy.observe(Outcome(4, path))
    assert policy.rate_of(1) == pytest.approx(1 / 3, abs=0.05) and policy.rate_of(4) > 0.95
    policy.announced([Match(1, 40)])
    one, four = (policy.means(Budget(k, k)).tokens for k in (1, 4))
    assert one == pytest.approx(1 + 1 / 3, abs=0.05) and four == pytest.approx(1 + 4 / 3, abs=0.15)


def test_nothing_rests_where_nothing_is_measured():
    """As in another engine."""
    chooser = Chooser(Costs(lambda budget: 0.01 * budget.nodes), learns=False)
    known = AcceptanceHistory(chooser.costs)
    assert chooser.choose([Auto(known.drafts, Budget(4, 4), True)], [100]) == Budget(4, 4)
    assert chooser.choose([NgramPolicy(known.matches, Budget(4, 4))], [100]).nodes == 0


def test_fixed_policies_never_rest():
    chooser = Chooser(Costs(lambda budget: pytest.fail("a single shape is compared with nothing")))
    assert all(chooser.choose([Fixed(4, 4)], [100]) == Budget(4, 4) for _ in range(50))


def test_a_curve_interpolates_and_learns():
    curve = Curve(lambda rows: 1.0)
    assert curve.factor is None and curve.at(7) == 1.0
    for rows, seconds in ((1, 2.0), (5, 4.0), (9, 4.0)):
        curve.set(rows, seconds)
    assert [curve.factor * curve.at(x) for x in (1, 3, 4.5, 7, 20)] == pytest.approx([2.0, 3.0, 3.75, 4.0, 4.0])
    rising = Curve(lambda rows: 1.0)
    for rows, seconds in ((1, 1.0), (5, 3.0)):
        rising.set(rows, seconds)
    assert rising.factor * rising.at(9) == pytest.approx(5.0), "the last segment goes on"
    for _ in range(80):
        curve.learn(5, 8.0)
    assert curve.factor * curve.at(5) == pytest.approx(8.0, rel=0.01)
    assert curve.factor * curve.at(1) == pytest.approx(2 * 2**0.5, rel=0.01), "half of it is common to all sizes"
    before = curve.factor * curve.at(5)
    curve.learn(5, 1e6)
    assert curve.factor * curve.at(5) < 1.12 * before, "an interruption moves little"
    steps = Curve(lambda k: 0.1 * k)
    steps.set(1, 0.2)
    assert steps.factor * steps.at(4) == pytest.approx(0.8) and steps.at(0) == 0


def test_the_first_rounds_after_a_change_count_only_if_they_were_short():
    costs, shape = Costs(lambda budget: 0.1 * budget.nodes), Budget(4, 4)
    costs.measured(1, Budget(0, 0), 0, 0.0, 1.0)
    costs.observe(1, shape, 4, 9.0, 1.5, warm=False)
    assert costs.draft(1, shape, 4) == pytest.approx(0.4), "an engine's first draft loads its weights"
    costs.observe(1, shape, 4, 0.6, 1.5)
    before = costs.round(1, shape)
    costs.observe(1, shape, 4, 0.9, 2.5, warm=False)
    assert costs.round(1, shape) == before
    costs.observe(1, shape, 4, 0.3, 1.0, warm=False)
    assert costs.round(1, shape) < before


def test_while_nothing_is_drafted_all_costs_follow_the_plain_round():
    costs, shape = Costs(lambda budget: 0.1 * budget.nodes), Budget(4, 4)
    costs.measured(1, Budget(0, 0), 0, 0.0, 1.0)
    costs.measured(1, shape, 4, 0.5, 1.4)
    costs.measured(4, shape, 4, 0.5, 1.4)
    costs.observe_prefill(10, 2.0)
    chooser = Chooser(costs)
    for count, seconds, before in ((LOOK, 2.0, 1.0), (AGAIN, 3.0, 2.0), (AGAIN, 2.0, 3.0)):
        for n in range(count):
            assert costs.plain(1) == pytest.approx(before)
            chooser.measured(1, seconds if n % 2 else 9.0, True)
    assert costs.plain(1) == pytest.approx(2.0) and costs.prefill(10) == pytest.approx(4.0)
    assert costs.round(1, shape) == costs.round(4, shape) == pytest.approx(3.8)


def test_a_size_that_no_draft_has_had_for_long_is_taken_to_be_like_the_others():
    curve = Curve(lambda rows: 1.0)
    for rows, seconds in ((1, 1.0), (2, 1.2), *(FORGET // SOON) * ((3, 2.5),)):
        curve.learn(rows, seconds)
    for _ in range(FORGET):
        curve.learn(1, 1.0)
    assert curve.factor * curve.at(3) > 1.9, "plain rounds say nothing about drafts"
    for n in range(FORGET):
        assert 3 in curve.ratios, n
        curve.learn(2, 1.2)
        curve.learn(1, 1.0)
    assert curve.factor * curve.at(3) == pytest.approx(1.4, rel=0.05) and curve.factor * curve.at(1) < 1.05


@pytest.mark.parametrize("seed", (3, 33, 44, 45))
def test_slow_phases_of_the_machine_do_not_end_the_drafts(seed):
    world = World(0.2, 0.15, lambda n: 0.75, confident=True, noise=0.15, seed=seed, cold=1.5, slow=0.02).run(100)
    world.tokens = 0.0
    for _ in range(6):
        world.text(96)
    assert world.tokens * STEP / sum(sum(world.true(k)) for k in world.drafted[100:]) > 1.1


def test_a_few_long_measurements_do_not_make_a_size_too_dear_to_be_measured_again():
    """They count half, and lie between the other sizes; one is forgotten soon, four are believed."""
    curve = Curve(lambda rows: 1.0)
    for rows, seconds in ((1, 1.0), (2, 1.2), (3, 9.0)):
        curve.learn(rows, seconds)
    assert curve.factor * curve.at(3) == pytest.approx(1.2 * 2**0.5 * 1.2 ** (1 / 6), rel=0.2) and 3 in curve.ratios
    curve.learn(4, 1.3)
    assert curve.factor * curve.at(3) == pytest.approx(curve.factor * curve.at(4))
    for _ in range(SOON - 1):
        curve.learn(2, 1.2)
    assert 3 not in curve.ratios
    for _ in range(12):
        curve.learn(3, 2.5)
    assert curve.factor * curve.at(3) > 2
    drafts = Curve(lambda tokens: 0.1 * tokens)
    drafts.learn(2, 9.0)
    drafts.learn(1, 0.5)
    assert drafts.factor * drafts.at(2) == pytest.approx(1.0) and drafts.factor * drafts.at(8) == pytest.approx(4.0)
    drafts = Curve(lambda tokens: 0.1 * tokens)
    drafts.learn(1, 0.9, unit=1.0)
    assert drafts.factor * drafts.at(1) == pytest.approx((0.1 * 0.9) ** 0.5), "the bytes that it reads count as much"


def test_a_pass_costs_what_its_rows_do_in_all():
    costs = Costs(lambda budget: 0.1 * budget.nodes)
    assert costs.round(4, Budget(3, 3)) == pytest.approx(1.3), "in plain steps before any measurement"
    for size, seconds in ((0, 1.0), (3, 1.1), (7, 2.0)):
        costs.measured(1, Budget(size, size), size, 0.1 * size, seconds)
    assert costs.plain(4) == pytest.approx(1.1) and costs.plain(8) == costs.verify(2, 8) == pytest.approx(2.0)
    assert costs.draft(8, Budget(4, 4), 4) == pytest.approx(0.8), "a draft step of 8 rows, like the target's"
    costs.measured(4, Budget(0, 0), 0, 0.0, 1.32)
    assert costs.plain(4) == pytest.approx(1.32) and costs.verify(4, 8) == pytest.approx(2.0 * 1.2**0.75), (
        "a factor of n"
    )
    assert costs.verify(1, 4) == pytest.approx(1.32 / 1.2**0.75) and costs.verify(5, 8) == costs.verify(4, 8), (
        "of the nearest n"
    )
    costs.observe_rows(512, 512 * 0.3)
    assert costs.verify(1, 40) == pytest.approx(12.0), "no less than the arithmetic of its rows"
    costs.clear()
    assert costs.verify(4, 8) == 1.0


def test_slow_drafts_do_not_make_plain_rounds_look_slow():
    """Plain rounds of 8 texts were measured; those of 5 were not."""
    costs, draft = Costs(lambda budget: 0.1 * budget.nodes), Budget(1, 1)
    for size in (0, 7, 15):
        costs.measured(1, Budget(size, size), size, 0.1 * size, 1.0 + 0.05 * size)
    costs.measured(8, Budget(0, 0), 0, 0.0, 1.5)
    plain, both = costs.plain(8), costs.verify(8, 16)
    for _ in range(60):
        costs.observe(8, draft, 1, 0.1, 2 * both, paired=True)
    assert costs.plain(8) == pytest.approx(plain) and costs.verify(8, 16) > 1.8 * both
    before, five = costs.verify(1, 8), costs.plain(5)
    costs.observe(5, draft, 1, 0.1, 10 * costs.verify(5, 10), paired=True)
    assert costs.verify(1, 8) == pytest.approx(before)
    assert costs.plain(5) < 1.17 * five, "one interrupted round tells little of 5 texts"
    one = costs.plain(1)
    costs.follow(5, 2.0)
    assert costs.plain(5) == pytest.approx(2.0) and costs.plain(1) == one, "the first plain round of 5 texts"
    costs.follow(5, 3.0)
    assert costs.plain(5) == pytest.approx(3.0) and costs.plain(1) == pytest.approx(1.5 * one), "the machine's speed"


def test_the_first_drafts_after_plain_rounds_are_compared_with_them(monkeypatch):
    world, seen = World(0.05, 0.05, lambda n: 0.9), []
    costs, chooser = world.known.costs, world.chooser
    observe, measured = costs.observe, chooser.measured

    def observed(n, shape, k, *seconds, warm, paired):
        seen.append(paired if k else None)
        observe(n, shape, k, *seconds, warm=warm, paired=paired)

    def timed(*plain):
        seen.append(None)
        measured(*plain)

    monkeypatch.setattr(costs, "observe", observed)
    monkeypatch.setattr(chooser, "measured", timed)
    world.run(1000)
    runs = [[*each] for drafts, each in itertools.groupby(seen, lambda paired: paired is not None) if drafts]
    assert len(runs) > 2 and all(len(each) > RUN for each in runs)
    assert all(each == [True] * RUN + [False] * (len(each) - RUN) for each in runs)


def test_a_reading_costs_the_draft_s_share_of_a_prompt_until_one_is_measured():
    costs = Costs(lambda budget: 0.3 * budget.nodes)
    assert costs.prefill(100) == 0
    costs.observe_rows(100, 1.0)
    assert costs.prefill(200) == pytest.approx(0.3 * 2.0)
    costs.observe_prefill(100, 0.5)
    assert costs.prefill(200) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("chances", "prices", "counts"),
    [
        ([[0.9, 0.8], [0.5, 0.1]], [0.0, 0.1, 0.2, 0.3, 0.5], [2, 1]),
        ([[0.9, 0.8], [0.5, 0.1]], [0.0, 0.1, 0.2, 0.9, 1.6], [2, 0]),
        ([[0.9, 0.8], [0.5, 0.4]], [0.0, 1.0, 1.0, 1.0, 1.0], [2, 2]),  # one is not worth it, four are
        ([[0.9], [0.8]], [0.0, 2.0, 2.0], [0, 0]),
        ([[1.0, 1.0], [1.0]], [0.0] * 4, [2, 1]),
    ],
)
def test_the_rows_that_promise_most_beyond_their_price_are_verified(chances, prices, counts):
    assert worth_rows(chances, prices) == counts


def test_a_chain_that_is_cut_off_tells_what_one_more_token_would_have_added():
    """Half of the chains are surely right and would go on; the others would not."""
    known = Acceptance(0.98)
    policy = Auto(known, Budget(16, 16), True)
    for n in range(400):
        policy.taken(Budget(2, 2), (0.5, 0.5))
        sure = [0.99, 0.99] if n % 2 else [0.9, 0.5]
        policy.observe(Outcome(2, [0, 1, 2] if n % 2 else [0, 1], sure))
    two, three = known.caps()[1:3]
    assert three.tokens - two.tokens == pytest.approx(0.5 * policy.seen.at(2), abs=0.05)
    assert three.steps - two.steps == pytest.approx(0.5, abs=0.05)


def test_chains_tell_what_shorter_limits_would_have_made_of_them():
    rng, seen = random.Random(1), Acceptance(1.0)
    chains = [(rng.choice((1, 2, 3, 5, 8)), rng.random()) for _ in range(4000)]
    for n, (wish, luck) in enumerate(chains):
        most = (8, 2, 4)[n % 3]  # a limit says nothing of what lies beyond it
        steps = min(wish, most)
        right = min(steps, int(8 * luck))
        seen.add(Outcome(steps, list(range(right + 1)), [0.8] * steps), most)
    for cap, found in zip(LENGTHS[:6], seen.caps(), strict=False):
        steps = sum(min(wish, cap) for wish, _ in chains) / len(chains)
        tokens = sum(min(wish, cap, int(8 * luck)) for wish, luck in chains) / len(chains)
        assert tuple(found) == pytest.approx((tokens, steps, steps), rel=0.05)
