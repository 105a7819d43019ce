"""Join strategies: `draft+lookup`, `easyspec+vocabtrim+lookup`, a user's own with any other, ..

Each round drafts what promises most tokens per second (choose.py): the draft of one source, or the first source's with
another's chain as a second branch of the tree (round/branches.py). With the tokens E and F that the two drafts commit
alone, both commit

    E + F - 1 - m        m: draft tokens that both have right

If they were right independently, E = 1 + a + a^2 + .. and F = 1 + b + b^2 + .. would give m = ab + (ab)^2 + .., that is
ab / (1 - ab). But drafts are right in the same places: m was 1.0 to 2.0 times as much where copies after short matches
stood beside a small model's and a diffusion model's drafts, on average 1.3 times (bench/LOG.md).

Only the first source may run a model. A round in which another drafts alone does not run it, so the model's cache falls
behind. Its next draft must catch up first, and the time for that counts against it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from specker.options import Options
from specker.runtime.control.policy import AUTO, OWN, Budget, Match, Means, Outcome, Policy, StopRule
from specker.runtime.strategies.base import Plan

JOINED = Budget(16, 16)  # the longest draft of the sources after the first
BRANCHES = (2, 4, 8)  # depths of drafts that are branches of one tree
MOST = 63  # draft tokens of two drafts together: with the root, as many rows as a word has bits
AGREE = 1.3  # m over what it would be independently


def options_of(options: Options, part: int) -> Options:
    """The options as a source after the first sees them: it drafts chains, as long as pays."""
    length = JOINED.depth
    return replace(options, sources=(options.sources[part],), draft_tokens=length, tree=None, policy=AUTO)


class JoinedPolicy(Policy):
    """The proposals of each source's policy. Their shapes have the source's number as `part`."""

    def __init__(self, parts: Sequence[Policy], branches: bool = False):
        """`branches`: whether a round may have two drafts."""
        self.parts, self.branches = parts, branches
        self.may_skip_drafting, self.layers = parts[0].may_skip_drafting, parts[0].layers
        self.part = 0  # the part that drafts in this round
        self._beside: Budget | None = None  # of the other part that drafts, too

    @property
    def confident(self) -> bool:  # type: ignore[override]
        return self.parts[self.part].confident

    @property
    def copies(self) -> bool:  # type: ignore[override]
        return any(policy.copies and policy.budgets() for policy in self.parts[1:])

    @property
    def source(self) -> str:  # type: ignore[override]
        return next((policy.source for policy in self.parts if policy.copies), OWN)

    @property
    def rule(self) -> StopRule:  # type: ignore[override]
        return self.parts[self.part].rule

    def budgets(self) -> Sequence[Budget]:
        first, others = self.parts[0].budgets(), [shape for policy in self.parts[1:] for shape in policy.budgets()]
        return [*first, *others, *(pairs(first, others) if self.branches else ())]

    def means(self, budget: Budget) -> Means:
        own = self.parts[budget.part].means(budget)
        if budget.beside is None:
            return own
        other = self.means(budget.beside)
        both = shared(own.tokens, other.tokens)
        tokens = min(own.tokens + other.tokens - 1 - both, 1 + max(budget.depth, budget.beside.depth))
        return Means(tokens, own.drafted, own.verified + max(0.0, other.drafted - both))

    def trial(self, budget: Budget) -> Budget:
        return self.parts[budget.part].trial(budget)

    def announced(self, matches: Sequence[Match]) -> None:
        for policy in self.parts:
            policy.announced(matches)

    def taken(self, budget: Budget, prices: Sequence[float] = ()) -> None:
        super().taken(budget, prices)
        self.part, self._beside = budget.part, budget.beside
        self.parts[self.part].worth = self.worth
        self.parts[self.part].taken(budget, prices)

    def chances(self, count: int, confidence: Sequence[float]) -> list[float]:
        return self.parts[self.part].chances(count, confidence)

    def observe(self, outcome: Outcome) -> None:
        self.parts[self.part].observe(outcome)
        if (beside := outcome.beside) is not None and self._beside is not None:
            self.parts[self._beside.part].observe(beside)

    def learn(self, layers: tuple[int, ...], match: Any, confidence: Any, seconds: float = 0.0) -> None:
        self.parts[0].learn(layers, match, confidence, seconds)


def pairs(first: Sequence[Budget], others: Sequence[Budget]) -> Iterator[Budget]:
    """Shapes with two drafts."""
    some = [shape for shape in first if shape.depth in BRANCHES or len(first) == 1]
    for shape, chain in product(some, [shape for shape in others if shape.depth in BRANCHES]):
        if 0 < shape.nodes <= MOST - chain.nodes:
            yield replace(shape, beside=chain)


def shared(own: float, other: float) -> float:
    """m of the module's docstring, of drafts that commit so many tokens."""
    both = (1 - 1 / own) * (1 - 1 / other)
    return min(own - 1, other - 1, AGREE * both / (1 - both))


def joined_plan(plan: Plan, branches: bool) -> Plan:
    """The warm-up plan with the drafts of other sources, which may have any size, and with rounds of two drafts."""
    chains = [Budget(length, length, part=1) for length in BRANCHES] if branches else []
    both = tuple(pairs(plan.budgets or (plan.largest,), chains))
    nodes = max((shape.nodes + shape.beside.nodes for shape in both if shape.beside is not None), default=0)
    nodes, depth = max(plan.largest.nodes, nodes, JOINED.nodes), max(plan.largest.depth, JOINED.depth)
    sizes = range(JOINED.nodes + 1)
    verified, accepted = (tuple(sorted({*known, *sizes})) for known in (plan.verified, plan.accepted))
    largest, budgets = replace(plan.largest, nodes=nodes, depth=depth), plan.budgets and (*plan.budgets, *both)
    return replace(plan, largest=largest, budgets=budgets, verified=verified, accepted=accepted)
