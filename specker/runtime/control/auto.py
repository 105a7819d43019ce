"""Policy `auto`: the length of each draft, zero included, from measured costs and from the acceptance seen.

A round with k draft tokens takes C(k) seconds (costs.py) and commits E(k) tokens. With a_j the probability that the
target agrees with draft token j if it agrees with all before,

    E(k) = 1 + a_1 + a_1 a_2 + .. + a_1 .. a_k

and the round takes the k with the largest E(k) / C(k) (choose.py). If the host sees the draft's own probability of each
token, the chain ends by a rule instead: with P_i the probability that all of its i tokens are right and R the best
rate of tokens per second, it goes on while

    P_i a >= R (C(i + 1) - C(i))

The draft's probabilities are corrected by the ratio of right to promised tokens so far. The longest length is still
chosen, by the means that chains of at most k tokens have had: a chain says what every shorter limit would have made of
it (`Acceptance.caps`), and one that was cut off at the limit what its next token would have added, by the rule.

Where drafts may be trees, those of `TREES` nodes compete with the chains. The first nodes of a tree are the smaller
tree, so each outcome tells what every smaller tree would have had accepted, and E of a tree is one more than the mean.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

from specker.runtime.control.costs import Costs
from specker.runtime.control.policy import (
    LENGTHS,
    TREES,
    TRIED,
    UNLIMITED,
    Budget,
    Chain,
    Means,
    Outcome,
    Policy,
    StopRule,
    after,
)

AGREES = 0.75  # a_j before anything was drafted
TEXT_DECAY = 0.9  # of counts at each draft, for one text
ENGINE_DECAY = 0.98  # for all texts of an engine
PRIOR = 4.0  # the earlier texts count as much as this many drafts of a new text
FEWEST = 2.0  # accepted tokens of the smallest tree before anything was drafted
FEW_DRAFTS = 4  # fewer tell nothing of a text
DIFFER = 0.25  # how much texts differ before any has ended: standard deviation of the accepted tokens over their mean
REFRESH = 8  # drafts until the means of an engine's texts are computed anew
BUCKETS = 4  # intervals of the draft's probabilities that are corrected separately


@dataclass
class Share:
    """A decayed mean."""

    decay: float
    total: float = 0.0
    count: float = 0.0

    def add(self, total: float, count: float = 1.0) -> None:
        self.total = self.decay * self.total + total
        self.count = self.decay * self.count + count

    def mean(self, prior: float, weight: float = PRIOR) -> float:
        """The mean, with a prior that counts for `weight`."""
        return (self.total + weight * prior) / (self.count + weight)


class Cap(NamedTuple):
    """What chains of at most so many tokens, which a rule ends, achieve on average."""

    tokens: float  # accepted
    rows: float  # draft tokens that were verified
    steps: float  # draft steps


class Span(NamedTuple):
    """What chains add between two of LENGTHS, if they go on there, on average."""

    tokens: float
    rows: float
    steps: float
    goes_on: float  # the share of them that goes on after it


@dataclass
class Acceptance:
    """What drafts have achieved, in one text or in all texts of an engine."""

    decay: float
    before: Acceptance | None = None  # the acceptance in earlier texts
    agrees: list[Share] = field(default_factory=list)  # agreement by position, among chains that were right before it
    trees: list[Share] = field(init=False)  # tokens that each of `TREES` has accepted beyond the next smaller one
    compared: Share = field(init=False)  # agreement at all positions
    tokens: Share = field(init=False)  # tokens that a round with a draft committed
    drafted: Share = field(init=False)  # tokens of a draft
    buckets: list[Share] = field(init=False)  # right over promised tokens, by the draft's probability
    spans: list[tuple[Share, Share, Share, Share]] = field(init=False)  # the fields of `Span`, up to each of LENGTHS
    _table: list[tuple[float, float]] = field(init=False, default_factory=list)  # for each k: E(k), a_1 .. a_k
    _caps: tuple[list[Span], list[Cap]] = field(init=False, default=([], []))
    _stale: int = field(init=False, default=REFRESH)  # drafts since `_caps` were computed

    def __post_init__(self) -> None:
        self.compared, self.tokens, self.drafted = Share(self.decay), Share(self.decay), Share(self.decay)
        self.buckets = [Share(self.decay) for _ in range(BUCKETS)]
        self.trees = [Share(self.decay) for _ in TREES]
        self.spans = [tuple(Share(self.decay) for _ in Span._fields) for _ in LENGTHS]  # type: ignore[misc]

    def add(self, outcome: Outcome, most: int = 0, onward: float | None = None) -> None:
        """Count one draft, here and in `before`. `most`: tokens at which a chain would have been cut off; 0: no rule
        ends it. `onward`: of a chain that was cut off, how likely its next token would have been right if the rule
        would have drafted it, else 0."""
        if self.before is not None:
            self.before.add(outcome, most, onward)
        if outcome.tree:
            for share, (fewer, nodes) in zip(self.trees, pairwise((0, *TREES)), strict=True):
                if outcome.drafted > fewer:  # with few candidates a tree may lack some of its nodes
                    share.add(accepted_in(nodes, outcome.path) - accepted_in(fewer, outcome.path))
            return
        self._table, self._stale = [], self._stale + 1
        right, drafted = len(outcome.path) - 1, outcome.drafted
        seen = min(right + 1, drafted)  # the tokens after a wrong one were not compared
        self.agrees += [Share(self.decay) for _ in range(seen - len(self.agrees))]
        for j, share in enumerate(self.agrees):
            share.add(j < right, j < seen)
        self.compared.add(right, seen)
        self.tokens.add(1 + right)
        self.drafted.add(drafted)
        for j, probability in enumerate(outcome.confidence[:seen]):
            self.buckets[min(int(probability * BUCKETS), BUCKETS - 1)].add(j < right, probability)
        steps = len(outcome.confidence)
        for i, ((less, cap), shares) in enumerate(zip(pairwise((0, *LENGTHS)), self.spans, strict=True)):
            if i and less == most and onward is not None:
                self.spans[i - 1][3].add(onward > 0)
                if onward:  # the tokens up to `cap`, of which none was drafted
                    agreement, count = self.agreement(), cap - less
                    for share, each in zip(shares, (onward * geometric(agreement, count), count, count), strict=False):
                        share.add(each)
            if steps <= less or cap > most:  # it had ended, or chains of this limit would have been cut off
                break
            for share, count in zip(shares, (right, drafted, steps), strict=False):
                share.add(min(max(count - less, 0), cap - less))
            if cap < most:
                shares[3].add(steps > cap)

    def agreement(self) -> float:
        """The share of compared draft tokens that were right."""
        return self.compared.mean(AGREES if self.before is None else self.before.agreement())

    def at(self, j: int) -> float:
        """a_{j + 1}. A position that few drafts reached is taken to be like the others."""
        overall = self.agreement()
        prior = overall if self.before is None else 0.5 * (overall + self.before.at(j))
        return self.agrees[j].mean(prior) if j < len(self.agrees) else prior

    def expected(self, length: int) -> float:
        """E(length) of the module's docstring."""
        while len(self._table) <= length:
            total, joint = self._table[-1] if self._table else (0.0, 1.0)
            joint *= self.at(len(self._table) - 1) if self._table else 1.0
            self._table.append((total + joint, joint))
        return self._table[length][0]

    def gains(self) -> list[float]:
        """The tokens that each of `TREES` is expected to have accepted beyond the next smaller one. Where none was
        drafted, half of what that one has."""
        earlier, out = [] if self.before is None else self.before.gains(), [2 * FEWEST]
        for i, share in enumerate(self.trees):
            out.append(share.mean(earlier[i] if earlier else out[-1] / 2))
        return out[1:]

    def expected_tree(self, nodes: int) -> float:
        """Expected tokens of a round with a tree of so many nodes, one of `TREES`."""
        return 1 + sum(self.gains()[: TREES.index(nodes) + 1])

    def caps(self) -> list[Cap]:
        """What chains of at most so many tokens achieve, for each of LENGTHS. Where no chain went on so far, it is
        assumed to go on as before. The first one has its whole length."""
        return self._spans()[1]

    def _spans(self) -> tuple[list[Span], list[Cap]]:
        if self._stale < (1 if self.before is not None else REFRESH):
            return self._caps
        before = None if self.before is None else self.before._spans()[0]
        agreement, each, goes_on = self.agreement(), 1.0, 1.0
        spans, caps, sums, reached = [], [], Cap(0.0, 0.0, 0.0), 1.0
        for i, ((less, cap), shares) in enumerate(zip(pairwise((0, *LENGTHS)), self.spans, strict=True)):
            count = cap - less
            if before is None:
                known = Span(each * agreement * geometric(agreement, count), count, count, goes_on)
            else:
                known = before[i]
            tokens, rows, steps, on = shares
            own = Span(tokens.mean(known[0]), rows.mean(known[1]), steps.mean(known[2]), on.mean(known[3]))
            each, goes_on = own.tokens / count, own.goes_on
            sums = Cap(sums[0] + reached * own[0], sums[1] + reached * own[1], sums[2] + reached * own[2])
            reached *= goes_on
            spans.append(own)
            caps.append(sums)
        self._caps, self._stale = (spans, caps), 0
        return self._caps

    def rule(self, prices: Sequence[float], worth: float = 1.0) -> StopRule:
        """The stop rule of the module's docstring. `prices`: as in `Policy.taken`. `worth`: as of a `Policy`."""
        each = max(self.agreement(), 1e-6) * worth
        return StopRule(joint=tuple(p / each for p in prices), scales=self.scales())

    def scales(self) -> tuple[float, ...]:
        """Right over promised tokens, by the draft's probability."""
        prior = (1.0,) * BUCKETS if self.before is None else self.before.scales()
        return tuple(share.mean(p) for share, p in zip(self.buckets, prior, strict=True))


def geometric(ratio: float, count: int) -> float:
    """1 + ratio + ratio^2 + .., so many terms."""
    return sum(ratio**j for j in range(count))


def accepted_in(nodes: int, path: Sequence[int]) -> int:
    """The accepted tokens that the tree of the first `nodes` nodes, with at most half as many levels, has of a path."""
    return sum(row <= nodes for row in path[1 : nodes // 2 + 1])


class Auto(Policy):
    """For drafts of a model. One object serves one text; `before` is shared by all texts of an engine."""

    may_skip_drafting = True

    def __init__(self, before: Acceptance, size: Budget, confident: bool, trees: Sequence[Budget] = ()):
        """`size`: the longest chain. `confident`: chains end by the draft's own probabilities. `trees`: of `TREES`
        nodes, ascending, that it may draft too, of at most half as many levels."""
        self.before, self.confident = before, confident
        self.seen = Acceptance(TEXT_DECAY, before)
        lengths = *(n for n in LENGTHS if n < size.depth), size.depth
        self.shapes = (*(replace(size, nodes=n, depth=n) for n in lengths), *trees)
        self.longest = size.depth
        self._most = UNLIMITED  # tokens at which this round's chain is cut off, if longer ones may be drafted

    def budgets(self) -> Sequence[Budget]:
        return self.shapes

    def means(self, budget: Budget) -> Means:
        if self.confident:
            cap = self.seen.caps()[min(bisect_left(LENGTHS, budget.depth), len(LENGTHS) - 1)]
            return Means(1 + cap.tokens, cap.steps, cap.rows)
        tokens = self.seen.expected_tree(budget.nodes) if budget.tree else self.seen.expected(budget.depth)
        return Means(tokens, budget.nodes, budget.nodes)

    def trial(self, budget: Budget) -> Budget:
        return shorter([shape for shape in self.shapes if shape.tree == budget.tree], budget)

    def taken(self, budget: Budget, prices: Sequence[float] = ()) -> None:
        super().taken(budget, prices)
        self._most = budget.depth if budget.depth < self.longest else UNLIMITED
        if self.confident and prices:
            self.rule = self.seen.rule(prices, self.worth)

    def chances(self, count: int, confidence: Sequence[float]) -> list[float]:
        if not confidence:
            return [self.seen.expected(k + 1) - self.seen.expected(k) for k in range(count)]
        scales, chain, out = StopRule(scales=self.seen.scales()), Chain(), []
        for probability in confidence[:count]:
            chain, _ = after(scales, chain, probability)
            out.append(chain.joint)
        return out

    def observe(self, outcome: Outcome) -> None:
        if outcome.drafted or outcome.confidence:  # a draft that was not worth its rows committed one token
            self.seen.add(outcome, self._most if self.confident else 0, self._onward(outcome.confidence))

    def _onward(self, confidence: Sequence[float]) -> float | None:
        """As of `Acceptance.add`."""
        if len(confidence) < self._most:
            return None
        chain, worth = Chain(), 0.0
        for probability in confidence:
            chain, worth = after(self.rule, chain, probability)
        return chain.joint * self.seen.at(chain.tokens) if worth >= 1 else 0.0


def shorter(shapes: Sequence[Budget], budget: Budget) -> Budget:
    """The longest of `shapes`, which ascend, that a trial may use instead of `budget`."""
    most = min(TRIED, budget.depth)
    return next((shape for shape in reversed(shapes) if shape.depth <= most), shapes[0])


class AcceptanceHistory:
    """What an engine has learnt about its drafts: their costs, and the acceptance in all its texts. It decides only how
    much is drafted, never which tokens are emitted."""

    def __init__(self, costs: Costs):
        self.costs = costs
        self.clear()

    def of(self, part: int) -> AcceptanceHistory:
        """The history for the policies of another source."""
        history = copy(self)
        history.drafts = self.joined.setdefault(part, Acceptance(ENGINE_DECAY))
        return history

    def of_one_text(self) -> AcceptanceHistory:
        """A history that takes nothing from other texts, and gives nothing to them."""
        history = copy(self)
        history.forget()
        return history

    def ended(self, added: float, accepted: int, drafts: int) -> None:
        """A text has ended, which added this share of the tokens that its request allowed, and accepted so many draft
        tokens in so many rounds with drafts."""
        self.used.add(added)
        if drafts >= FEW_DRAFTS:
            self.accepted.add(accepted / drafts)
            self.squares.add((accepted / drafts) ** 2)

    @property
    def spread(self) -> float:
        """How much texts differ in the tokens that a draft adds: the standard deviation over the mean."""
        mean, count = self.accepted.mean(0.0, 1e-9), self.accepted.count
        seen = max(0.0, self.squares.mean(0.0, 1e-9) / mean**2 - 1) if mean else 0.0
        return math.sqrt((count * seen + PRIOR * DIFFER**2) / (count + PRIOR))

    def clear(self) -> None:
        """Forget everything, such as a warm-up's texts."""
        self.costs.clear()
        self.forget()

    def forget(self) -> None:
        """Forget what drafts achieved."""
        self.drafts = Acceptance(ENGINE_DECAY)  # acceptance of the first source's drafts
        self.joined: dict[int, Acceptance] = {}  # acceptance of other sources' drafts, by their number
        self.used = Share(ENGINE_DECAY)  # of the tokens that requests allowed, the share that their texts added
        self.accepted, self.squares = Share(ENGINE_DECAY), Share(ENGINE_DECAY)  # of a draft, by ended text
        self.matches: dict[tuple[str, int], Share] = {}  # right copied tokens, by source and length of the match
        self.exits: Any = None  # DEL's counts and sums of confidence, by layer of the target
        self.exit_seconds: Any = None  # of DEL's rounds, by exit layer and length
        self.asked = 0  # number of budgets that DEL has proposed since these seconds were computed
        self.exit_drafts: dict[int, Acceptance] = {}  # acceptance of DEL's drafts, by exit layer
        self.watching = self.decoding = 0.0  # seconds in which DEL watched layers, and in all its rounds
