"""What `del` and `diffuspec` draft by default, against fixed settings, on simulated rounds of short texts: known costs,
known acceptance, no clock."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from specker.runtime import strategies
from specker.runtime.control.auto import AcceptanceHistory
from specker.runtime.control.choose import FIRST, RESTS, SHARE, Chooser
from specker.runtime.control.costs import Costs
from specker.runtime.control.policy import Budget, Fixed, Outcome
from specker.runtime.strategies.base import PolicyContext
from specker.runtime.strategies.dynamic_exit import exit_policy

LAYERS = 12
TEXT = 96  # tokens
WATCH = 0.1  # plain rounds


class Engine:
    """Rounds of one engine; a plain round takes a second. `seconds(k, exit)`: of a draft of k tokens, and of the rest.
    `said(exit)`: whether the next token of a draft is right, and its confidence, by a random number that all exits
    share. `policy`: makes each text's policy of the engine's history."""

    def __init__(self, seconds, said, policy, exits=(0,), seed=0):
        self.known = AcceptanceHistory(Costs(lambda budget: seconds(budget.nodes, budget.exit)[0]))
        self.seconds, self.said, self.make, self.random = seconds, said, policy, random.Random(seed)
        self.chooser, self.now = Chooser(self.known.costs), 0.0
        self.drafted = []  # of each round: the exit layer and the draft's tokens
        for exit in exits:
            for k in (0, 4):
                self.known.costs.measured(1, Budget(k, k, exit), k, *seconds(k, exit))

    def text(self):
        policy, left, start = self.make(self.known), TEXT, self.now
        self.chooser.admitted()
        while left > 0:
            left -= self.round(policy, left)
        return self.now - start

    def round(self, policy, left):
        shape = self.chooser.choose([policy], [left])
        trial, reason, warm = self.chooser.trial, self.chooser.reason, self.chooser.warm
        paired = self.chooser.paired and shape.nodes > 0
        policy.taken(shape, self.chooser.prices([policy], shape) if shape.nodes else ())
        luck = [self.random.random() for _ in range(max(1, left))]
        said = [self.said(shape.exit, x) for x in luck]
        k, most = 0, min(shape.depth, left - 1)
        while k < most:
            k += 1
            if policy.confident and policy.next_worth(said[k - 1][1]) < 1:
                break
        right = next((j for j in range(k) if not said[j][0]), k)
        draft, rest = (s * self.random.uniform(1, 1.1) for s in self.seconds(k, shape.exit))
        policy.observe(Outcome(k, list(range(right + 1)), [c for _, c in said[:k]] if policy.confident else []))
        self.now += draft + rest
        if shape.extra:
            seen = np.array([[self.said(exit, x) for x in luck[: right + 1]] for exit in shape.extra])
            policy.learn(shape.extra, seen[..., 0] > 0, seen[..., 1], WATCH)
            self.now += WATCH
        elif reason == RESTS:
            self.chooser.measured(1, rest, True)
        else:
            self.known.costs.observe(1, shape, k, draft, rest, warm=warm, paired=paired)
        if reason != RESTS:
            self.chooser.finished(1, shape, k, right + 1, trial)
        self.drafted.append((shape.exit, k))
        return right + 1


def speed(make, texts=3, engines=12):
    """Tokens a second of the texts of some engines, over plain decoding's. `make(seed)`: an engine."""
    took = sum(engine.text() for engine in map(make, range(engines)) for _ in range(texts))
    return engines * texts * TEXT * 1.05 / took


@pytest.fixture
def clock(monkeypatch):
    """What DEL's share of watching is measured by: the running engine's time."""
    running = []
    monkeypatch.setattr(exit_policy, "time", SimpleNamespace(perf_counter=lambda: running[-1].now))
    return running


RATES = {1: 0.2, 2: 0.35, 4: 0.7, 5: 0.86, 7: 0.9, 8: 0.93, 10: 0.95, 11: 0.97}  # by exit layer


def of_exits(clock, rates, policy, seed):
    """An engine whose target of LAYERS layers agrees with its exits at `rates`, deeper ones wherever shallower ones
    do, and whose exits are surer of right tokens."""

    def said(exit, luck):
        right = luck < rates.get(exit, 0.0)
        return right, (0.6 if right else 0.3) + 0.4 * (luck * 7919 % 1)

    def seconds(k, exit):
        return k * (exit / LAYERS + 0.05), 1 + 0.05 * k

    clock.append(Engine(seconds, said, policy, RATES, seed))
    return clock[-1]


def usual(strategy):
    options = strategies.options(strategy=strategy)
    return lambda known: strategies.policy(PolicyContext(options, LAYERS, None, known))


def test_del_is_as_fast_as_its_best_fixed_setting(clock):
    best = max(
        speed(lambda seed, e=exit, k=length: of_exits(clock, RATES, lambda known: Fixed(k, k, e), seed))
        for exit in (4, 5)  # among 4, 5 and 7, and 1 to 6 tokens, the best setting is one of these
        for length in (2, 3, 4)
    )
    assert best > 1.1
    assert speed(lambda seed: of_exits(clock, RATES, usual("del"), seed)) > 0.96 * best


def test_exits_that_never_agree_cost_little(clock):
    engine = of_exits(clock, {}, usual("del"), 1)
    for _ in range(10):
        engine.text()
    assert engine.now / 1.05 - 10 * TEXT < FIRST + 2 + SHARE * 10 * TEXT
    assert sum(k > 0 for _, k in engine.drafted) < 0.05 * len(engine.drafted)


def test_diffuspec_drafts_short_blocks_where_long_ones_lose():
    """A pass over a block of 30 costs more than its tokens bring, one over a block of 4 much less."""

    def made(policy, seed=0):
        def seconds(k, exit):
            return (0.3 + 0.02 * k if k else 0.0), 1 + 0.03 * k + 0.005 * k * k

        return Engine(seconds, lambda exit, luck: (luck < 0.7, luck), policy, seed=seed)

    best = max(speed(lambda seed, k=k: made(lambda known: Fixed(k, k), seed)) for k in (2, 3, 4, 6))
    assert best > 1.5 > 1 > speed(lambda seed: made(lambda known: Fixed(30, 30), seed))
    assert speed(lambda seed: made(usual("diffuspec"), seed)) > 0.93 * best
    engine = made(usual("diffuspec"))
    engine.text()
    assert all(2 <= k <= 8 for _, k in engine.drafted[4:-1])
