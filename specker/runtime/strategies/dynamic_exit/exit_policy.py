"""DEL's choice of the exit layer and the length, by the equations of the package's docstring."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from specker.runtime.control.auto import ENGINE_DECAY, TEXT_DECAY, Acceptance, AcceptanceHistory
from specker.runtime.control.costs import Costs
from specker.runtime.control.policy import LONGEST, Budget, Chain, Means, Outcome, Policy, StopRule
from specker.runtime.strategies.dynamic_exit import WINDOW

REFRESH = 8  # number of budgets after which the costs of rounds are asked for again
EARLIER = 16.0  # rows that the engine's earlier texts count as, for each layer
ASSUMED = 2.0  # rows that a layer's assumed match rate counts as, sqrt(l / L), where measured seconds are compared
TRUST = 2.0  # draft tokens allowed for each row on which the exit layer's match rate was counted
PATIENCE = 0.1  # g = 0 must beat the best TPL by this share
# The fields of `DynamicExit` that make it the paper's: all layers are watched in every round, and one row of counts
# allows the longest draft.
PAPER: dict[str, Any] = {"overhead": 1e9, "trust": LONGEST, "patience": 0.0, "joint": False}


class Choice(NamedTuple):
    """What follows from the statistics and the costs of rounds."""

    seconds: Any  # of rounds: the array that it follows from
    table: Any  # TPL(l, g), [layers, 18]
    rates: list[float]  # a_l; 0 for layers without data
    lengths: list[int]  # for each layer, the g of its best TPL, of those that draft
    chosen: tuple[int, int]  # the best TPL's index into layers, and its g
    threshold: float | None  # of the chosen layer


@dataclass
class DynamicExit(Policy):
    """DEL (arXiv 2504.05598). The best TPL selects the exit layer. Confidence ends the draft, or TPL's g does
    (`by_length`). The differences from the paper were measured (bench/LOG.md).

    A round's draft consists of its exit layer's shadow tokens, so that layer's statistics update every round for free;
    watching the other layers may take the share `overhead` of the time. A layer's counts decay at its own updates, not
    every round: a_l and the mean confidences are ratios, and a decay without new data would not change them.

    Where measured seconds are compared, a draft ends as policy auto's drafts do, once its next token costs more than it
    promises. The paper's threshold knows no costs; it ends drafts by the product of their confidences, not by the last
    one: a token is useful only if all tokens before it are right.

    A round without a draft yields no statistics, so a few bad rows could stop drafting for a long time. Therefore g = 0
    must win by `patience`; otherwise a draft is proposed, which may be a trial (choose.py)."""

    may_skip_drafting = True
    layers: tuple[int, ...] = field()  # eligible exit layers, ascending, below `total`
    total: int = field()  # L
    head_cost: float = 0.0  # c_head
    by_length: bool = False
    overhead: float = 0.005  # maximum share of the time spent on watching layers
    window: float = WINDOW  # decay of a layer's statistics at each update of that layer
    trust: float = TRUST
    patience: float = PATIENCE
    joint: bool = True  # whether the product of a draft's confidences ends it; False: its last confidence, as published
    costs: Costs | None = None  # measured seconds of rounds; None: TPL counts layers
    earlier: AcceptanceHistory = field(default_factory=lambda: AcceptanceHistory(Costs(lambda budget: 1.0)))
    """The statistics of the engine's earlier texts, which a text starts from."""
    chosen: tuple[int, int] = field(default=(0, 0), init=False)  # (index into layers, g)
    threshold: float | None = field(default=None, init=False)
    _by_layers: Any = field(init=False, repr=False)  # [layers, 18]: layers that a round runs
    _choice: Choice | None = field(default=None, init=False, repr=False)  # None: the statistics have changed
    _seen: dict[int, Acceptance] = field(default_factory=dict, init=False, repr=False)  # of this text, by exit layer
    _counts: Any = field(init=False, repr=False)  # [layers, (match, mismatch)], decayed
    _sums: Any = field(init=False, repr=False)  # sums of confidence, [layers, (match, mismatch)], decayed
    _rule: StopRule | None = field(default=None, init=False)  # by this round's prices
    _last: float = field(default=0.0, init=False)  # seconds of the last watch
    _since: float | None = field(default=None, init=False)  # start time of the last round

    def __post_init__(self) -> None:
        self._by_layers = self.total + np.arange(LONGEST + 1) * (np.array(self.layers)[:, None] + self.head_cost)
        self._counts, self._sums = np.zeros((2, len(self.layers), 2))
        if self.earlier.exits is not None:
            rows = self.earlier.exits[0].sum(1, keepdims=True)
            self._counts, self._sums = self.earlier.exits * np.minimum(1, EARLIER / np.maximum(rows, 1))

    @property
    def confident(self) -> bool:  # type: ignore[override]
        return not self.by_length

    def budget(self) -> Budget:
        """The budget by the best TPL. The first round drafts one token with the first eligible layer."""
        if not self._counts.any():
            self.chosen, self.threshold = (0, 1), None
        else:
            self.earlier.asked += 1
            choice = self.choice()
            self.chosen, self.threshold = choice.chosen, choice.threshold
        self._chain = Chain()
        index, g = self.chosen
        longest = LONGEST + 1 if self.threshold is not None and g else g
        watched = tuple(n for i, n in enumerate(self.layers) if i != index or not g)
        return Budget(longest, longest, self.layers[index], extra=watched if self._affordable() else ())

    def taken(self, budget: Budget, prices: Sequence[float] = ()) -> None:
        """The round may use another sequence's exit layer. The threshold follows from what was seen until now, not from
        when this policy was last asked: ranks ask at different times, and must end a draft at the same token."""
        super().taken(budget, prices)
        if not (budget.nodes or budget.extra):
            return
        index = self.layers.index(budget.exit)
        if index != self.chosen[0]:
            self.chosen = index, budget.depth
        self.threshold = self._threshold(index)
        priced = prices and self.costs is not None and not self.by_length
        self._rule = self._seen_at(budget.exit).rule(prices, self.worth) if priced else None

    def means(self, budget: Budget) -> Means:
        """1 + a + .. + a^g committed tokens, with a the match rate of the exit layer. If confidence ends drafts, what
        this exit layer's drafts achieved so far: confidence lets a draft go on where the layer mostly agrees, so the
        match rate of drafted tokens is too high to tell from it how long drafts are. Before the layer's first draft:
        what TPL expects."""
        index = self.layers.index(budget.exit)
        if self.by_length:
            return Means(self._by_rate(index, budget.depth), budget.depth, budget.depth)
        seen, g = self._seen_at(budget.exit), self.choice().lengths[index]
        before = seen.before
        assert before is not None
        tokens, drafted = before.tokens.mean(self._by_rate(index, g), 1.0), before.drafted.mean(g, 1.0)
        drafted = min(budget.depth, seen.drafted.mean(drafted))
        return Means(seen.tokens.mean(tokens), drafted, drafted)

    def _by_rate(self, index: int, g: int) -> float:
        a = self.choice().rates[index]
        return sum(a**i for i in range(g + 1))

    def _seen_at(self, exit: int) -> Acceptance:
        """What drafts of this exit layer achieved in this text, after earlier ones."""
        if exit not in self._seen:
            before = self.earlier.exit_drafts.setdefault(exit, Acceptance(ENGINE_DECAY))
            self._seen[exit] = Acceptance(TEXT_DECAY, before)
        return self._seen[exit]

    def _affordable(self) -> bool:
        """Whether another watch, at the last one's cost, keeps watching within its share of the time."""
        now, earlier = time.perf_counter(), self.earlier
        earlier.decoding += 0.0 if self._since is None else now - self._since
        self._since = now
        return earlier.watching + self._last <= self.overhead * earlier.decoding

    @property
    def rule(self) -> StopRule:  # type: ignore[override]
        """By this round's prices. Without prices, the draft ends when the product of its confidences, or the last one,
        falls below the threshold."""
        if self._rule is not None or self.threshold is None:
            return self._rule or StopRule()
        return StopRule(joint=(self.threshold,)) if self.joint else StopRule(token=self.threshold)

    def observe(self, outcome: Outcome) -> None:
        """Update the exit layer from its own rows: the accepted tokens and the first rejected one."""
        if outcome.drafted:
            self._seen_at(self.layers[self.chosen[0]]).add(outcome)
            rows = min(len(outcome.path), outcome.drafted)
            match = np.arange(rows) < len(outcome.path) - 1
            confidence = np.array(outcome.confidence[:rows] or np.zeros(rows))  # unused with `by_length`
            self._count([self.chosen[0]], match[None], confidence[None])

    def learn(self, layers: tuple[int, ...], match: Any, confidence: Any, seconds: float = 0.0) -> None:
        if seconds:
            self._last = seconds
            self.earlier.watching += seconds
        self._count([self.layers.index(n) for n in layers], match, confidence)

    def _count(self, at: list[int], match: Any, confidence: Any) -> None:
        """Update the statistics of the layers with indices `at` from match and confidence [len(at), rows]."""
        split = np.stack((match, ~match), axis=-1)  # [layers, rows, 2]
        new = np.stack((split.sum(1), (split * confidence[..., None]).sum(1)))
        self._choice = None
        self._counts[at] = self.window * self._counts[at] + new[0]
        self._sums[at] = self.window * self._sums[at] + new[1]
        if self.earlier.exits is None:
            self.earlier.exits = np.zeros((2, len(self.layers), 2))
        self.earlier.exits[:, at] = ENGINE_DECAY * self.earlier.exits[:, at] + new

    def choice(self) -> Choice:
        """The best TPL(l, g) of the package's docstring, for g = 0..17, and what else follows. While plain rounds are
        faster nothing changes between two questions, so the answer is kept."""
        seconds = self._round_seconds()
        if self._choice is None or self._choice.seconds is not seconds:
            total = self._counts.sum(1)
            assumed = 0.0 if self.costs is None else ASSUMED
            prior = assumed * np.sqrt(np.array(self.layers) / self.total)
            rates = (self._counts[:, 0] + prior) / np.maximum(total + assumed, 1e-9)
            a, g = rates[:, None], np.arange(LONGEST + 1)
            table = np.where(a < 1, (1 - a ** (g + 1)) / np.where(a < 1, 1 - a, 1), g + 1.0) / seconds
            patient = table.copy()
            patient[:, 0] *= 1 - self.patience
            index, best = divmod(int(patient.argmax()), LONGEST + 1)
            best = min(best, int(self.trust * total[index]))  # one match out of one row would make the longest draft
            lengths, threshold = (1 + table[:, 1:].argmax(1)).tolist(), self._threshold(index)
            self._choice = Choice(seconds, table, rates.tolist(), lengths, (index, best), threshold)
        return self._choice

    def _round_seconds(self) -> Any:
        """The cost of a round for each exit and g, [layers, 18]: its layers, or measured seconds, which all texts of an
        engine refresh together."""
        earlier = self.earlier
        if self.costs is None or not self.costs.plain_rounds:
            return self._by_layers
        if earlier.exit_seconds is None or earlier.asked >= REFRESH:
            rounds = [self.costs.rounds(1, Budget(1, 1, exit), LONGEST) for exit in self.layers]
            earlier.exit_seconds, earlier.asked = np.array(rounds), 0
        return earlier.exit_seconds

    def _threshold(self, index: int) -> float | None:
        """The midpoint of a layer's mean confidences for matches and for mismatches. None if one of them has no data or
        if g ends the draft."""
        if self.by_length or not self._counts[index].all():
            return None
        return float((self._sums[index] / self._counts[index]).mean())
