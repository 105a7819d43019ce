"""How much to draft each round: the budget, and the policies that any strategy can use. A policy from one paper is in
that paper's strategy file."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

LONGEST = 17  # tokens of the longest chain that a policy chooses; drafts that confidence ends may have one more
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)  # draft lengths that policy `auto` chooses from, besides 0
TREES = (8, 16, 32, 48, 64)  # nodes of the trees that it chooses from where drafts may be trees
TRIED = 4  # tokens in the longest draft of a trial
UNLIMITED = 1 << 30  # draft tokens, where no context limits them
MAX_NODES = 255  # draft tokens; a verify pass has one more row, the root

# What a drafter copies from:
PREDICTION = "prediction"  # what the request says that its text will be
OWN = "text"  # the text itself
PAST = "past"  # ended texts
CORPUS = "corpus"  # the user's files


class Match(NamedTuple):
    """What a drafter could copy for a text."""

    matched: int = 0  # length of the text's suffix that occurred before; 0: there is nothing to copy
    available: int = 0  # tokens that follow there
    source: str = OWN


@dataclass(frozen=True)
class Budget:
    nodes: int  # maximum draft tokens
    depth: int  # maximum path length
    exit: int = 0  # layers of the target that draft; 0: another model drafts
    part: int = 0  # which of the batch's drafters runs
    extra: tuple[int, ...] = ()  # what only the strategy's own drafter and policy read; costs do not depend on it
    beside: "Budget | None" = None  # of another drafter's chain, which is a branch of the same tree (round/branches.py)

    @property
    def tree(self) -> bool:
        """Whether not all nodes fit into one path."""
        return self.nodes > self.depth

    def clip(self, nodes: int, depth: int) -> "Budget":
        """Limit the nodes and the path length. A chain stays one."""
        beside = None if self.beside is None else self.beside.clip(depth, depth)
        if 0 <= self.nodes <= nodes and 0 <= self.depth <= depth and beside is self.beside:  # `replace` is slow
            return self
        nodes = min(self.nodes, nodes) if self.tree else min(self.nodes, nodes, depth)
        return replace(self, nodes=max(0, nodes), depth=max(0, min(self.depth, depth)), beside=beside)


@dataclass(frozen=True)
class Offer:
    """What a drafter can do for each text of a batch, before the round's shape is chosen. The default suits one without
    a model."""

    missing: Sequence[int] = ()  # committed tokens of each text that `advance` would prefill before a draft; (): none
    room: Sequence[int] = ()  # draft tokens that fit behind each text in a model's context; (): any number
    matches: Sequence[Sequence[Match]] = ()
    """For each text, the match in each source that it may copy from."""
    fixes: Callable[[Budget], bool] = lambda budget: False
    """Whether a draft of this shape can have fixed shapes and be placed by the device."""

    @property
    def most(self) -> int:
        """Draft tokens that fit behind the text with the most room."""
        return max(self.room, default=UNLIMITED)


class Reading(NamedTuple):
    """What a drafter with a model may prefill before a round's draft."""

    most: int = UNLIMITED  # tokens
    slots: Sequence[int] | None = None  # whose texts, in this order; None: all


WHOLE = Reading()


@dataclass(frozen=True)
class Outcome:
    """The result of one sequence's draft."""

    drafted: int  # tokens
    path: list[int]  # accepted rows, row 0 (the root) first
    confidence: list[float] = field(default_factory=list)  # probability of each draft token; empty unless `confident`
    note: Any = None  # `Draft.note`
    tree: bool = False  # whether the draft is a tree, whose nodes descend by their probability
    beside: "Outcome | None" = None  # of the chain that another drafter added (`Budget.beside`)

    @property
    def copied(self) -> "Outcome":
        """Of the draft that is a copy, if one is."""
        return self.beside or self


@dataclass(frozen=True)
class StopRule:
    """When a chain that is drafted token by token ends. Plain numbers, so that compiled code can apply it."""

    token: float = 0.0  # least probability of a token after which drafting continues
    joint: tuple[float, ...] = ()  # least probability that all tokens so far are right, by length; last: all longer
    scales: tuple[float, ...] = (1.0,)
    """Correction factors of the draft's own probability of a token, one for each of equal intervals of that
    probability."""


@dataclass(frozen=True)
class Chain:
    """A chain so far."""

    tokens: int = 0
    joint: float = 1.0  # probability that all of them are right


def after(rule: StopRule, chain: Chain, probability: float) -> tuple[Chain, float]:
    """The chain with another token of this probability, and how many times its price one more token is worth: the
    least of its probabilities over those that the rule demands."""
    scale = rule.scales[min(int(probability * len(rule.scales)), len(rule.scales) - 1)]
    longer = Chain(chain.tokens + 1, chain.joint * min(1.0, probability * scale))
    least = rule.joint[min(chain.tokens, len(rule.joint) - 1)] if rule.joint else 0.0
    worth = longer.joint / least if least > 0 else math.inf
    return longer, min(worth, probability / rule.token) if rule.token > 0 else worth


class Means(NamedTuple):
    """What a round of some shape is expected to do for one sequence."""

    tokens: float  # committed
    drafted: float  # tokens that the drafter drafts
    verified: float  # draft tokens in the verify pass, if no other sequence is in it


class Policy:
    """Proposes how much to draft for one sequence. All sequences of a round share one shape (choose.py)."""

    confident: bool = False  # whether drafts end by `rule`, token by token
    may_skip_drafting: bool = False  # whether rounds draft nothing while that is faster
    copies: bool = False  # whether the n-gram index has a match
    source: str = OWN  # what to copy from, of the sources of the last `announced`
    layers: tuple[int, ...] = ()  # depths of the target that `learn` may watch; at most so long is `Budget.extra`
    rule: StopRule = StopRule()  # this round's
    worth: float = 1.0  # of a token of this sequence in this round, beside those of the others (choose.py)
    rate: float = 0.8  # smoothed acceptance rate of the draft tokens on the path
    _chain: Chain = Chain()

    def budget(self) -> Budget:
        """The shape that this sequence proposes."""
        raise NotImplementedError

    def budgets(self) -> Sequence[Budget]:
        """All shapes that this sequence proposes, perhaps none."""
        return (self.budget(),)

    def means(self, budget: Budget) -> Means:
        """What a round of this shape is expected to do. By default it commits 1 + a + a^2 + .. + a^depth tokens, with a
        the smoothed acceptance rate (arXiv 2211.17192, equation 1)."""
        depth = min(budget.depth, budget.nodes)
        return Means(sum(self.rate**i for i in range(depth + 1)), depth, depth)

    def trial(self, budget: Budget) -> Budget:
        """The shape of a trial, which finds out whether drafts of the shape `budget`, one of this policy's, pay off by
        now."""
        return budget.clip(TRIED, TRIED) if self.confident else budget

    def announced(self, matches: Sequence[Match]) -> None:
        """Called before each round of a drafter that copies text, with the match in each source. Chooses the `source`
        that a draft copies from: by default the one with the longest match."""
        self.source = max(matches, key=lambda match: match.matched).source  # the first of equals

    def taken(self, budget: Budget, prices: Sequence[float] = ()) -> None:
        """Called with the round's shape, which may be another sequence's proposal. `prices`: what the draft's second,
        third, .. token costs, in tokens of a sequence (Costs.prices); empty if the shape has no alternative."""
        self._chain = Chain()

    def next_worth(self, probability: float) -> float:
        """How many times its price another token is worth after one with this probability. Chains go on while it is at
        least 1 on average over the batch."""
        self._chain, worth = after(self.rule, self._chain, probability)
        return worth

    def chances(self, count: int, confidence: Sequence[float]) -> list[float]:
        """How probable it is that the first 1, 2, .. `count` tokens of this round's chain are accepted. `confidence`:
        the draft's probability of each token; empty unless `confident`."""
        return [self.rate ** (i + 1) for i in range(count)]

    def observe(self, outcome: Outcome) -> None:
        """Called once per round."""
        if outcome.drafted:
            right = len(outcome.path) - 1
            seen = min(right + 1, outcome.drafted)
            self.rate += min(0.1 * seen, 1.0) * (right / seen - self.rate)

    def learn(self, layers: tuple[int, ...], match: Any, confidence: Any, seconds: float = 0.0) -> None:
        """Called with what watched layers predicted. numpy [len(layers), rows]: `match`, whether a layer's shadow token
        was the target's token, and `confidence`, its probability. `seconds`: the cost of computing them."""


@dataclass
class Fixed(Policy):
    """The same budget every round."""

    nodes: int
    depth: int
    exit: int = 0

    def budget(self) -> Budget:
        return Budget(self.nodes, self.depth, self.exit)


@dataclass
class PlusMinusOne(Fixed):
    """Lengthen the chain by one after a fully accepted draft; shorten it by one after any other."""

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        if outcome.drafted:
            whole = len(outcome.path) > outcome.drafted
            self.depth = min(self.depth + 1, LONGEST) if whole else max(1, self.depth - 1)
            self.nodes = self.depth


@dataclass
class DraftAndVerify(Fixed):
    """Stop after a token less probable than a threshold. The threshold moves so that the share of accepted draft tokens
    approaches `goal` (arXiv 2309.08168, equations 5 and 6, with its constants)."""

    threshold: float = 0.6
    goal: float = 0.9
    accepted: float = 0.9  # smoothed share
    confident = True

    @property
    def rule(self) -> StopRule:  # type: ignore[override]
        return StopRule(token=self.threshold)

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        if outcome.drafted:
            self.accepted = 0.5 * self.accepted + 0.5 * (len(outcome.path) - 1) / outcome.drafted
            step = 0.01 if self.accepted <= self.goal else -0.01
            self.threshold = min(max(0.9 * self.threshold + 0.1 * (self.threshold + step), 0.0), 1.0)


GENERAL: dict[str, type[Fixed]] = {  # the policies besides `auto` that suit any strategy
    "fixed": Fixed,
    "plus-minus-one": PlusMinusOne,
    "draft-and-verify": DraftAndVerify,
}
AUTO = "auto"  # runtime/control/auto.py
OFF = "off"  # of a request: it drafts nothing
CONFIDENT = tuple(name for name, policy in GENERAL.items() if policy.confident)


def general(rule: str, size: Budget, exit: int = 0) -> Policy:
    """A fresh policy of GENERAL that starts from `size`."""
    return GENERAL[rule](size.nodes, size.depth, exit)
