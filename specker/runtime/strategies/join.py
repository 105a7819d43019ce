"""Join strategies: `draft+lookup`, `easyspec+vocabtrim+lookup`, a user's own with any other, ..

Each round one of them drafts for all sequences: the one whose proposal promises most tokens per second (choose.py).
Only the first may run a model. A round in which another drafts does not run it, so the model's cache falls behind. Its
next draft must catch up first, and the time for that counts against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specker.options import Options
from specker.runtime.control.policy import AUTO, OWN, Budget, Match, Outcome, Policy, StopRule
from specker.runtime.strategies.base import Plan

JOINED = Budget(16, 16)  # the longest draft of the sources after the first


def options_of(options: Options, part: int) -> Options:
    """The options as a source after the first sees them: it drafts chains, as long as pays."""
    length = JOINED.depth
    return replace(options, sources=(options.sources[part],), draft_tokens=length, tree=None, policy=AUTO)


class JoinedPolicy(Policy):
    """The proposals of each source's policy. Their shapes have the source's number as `part`."""

    def __init__(self, parts: Sequence[Policy]):
        self.parts = parts
        self.may_skip_drafting, self.layers = parts[0].may_skip_drafting, parts[0].layers
        self.part = 0  # the part that drafts in this round

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
        return [shape for policy in self.parts for shape in policy.budgets()]

    def expected(self, budget: Budget) -> float:
        return self.parts[budget.part].expected(budget)

    def drafts(self, budget: Budget) -> float:
        return self.parts[budget.part].drafts(budget)

    def trial(self, budget: Budget) -> Budget:
        return self.parts[budget.part].trial(budget)

    def announced(self, matches: Sequence[Match]) -> None:
        for policy in self.parts:
            policy.announced(matches)

    def taken(self, budget: Budget, prices: Sequence[float] = ()) -> None:
        super().taken(budget, prices)
        self.part = budget.part
        self.parts[self.part].taken(budget, prices)

    def worth(self, price: float, confidence: Sequence[float]) -> int:
        return self.parts[self.part].worth(price, confidence)

    def observe(self, outcome: Outcome) -> None:
        self.parts[self.part].observe(outcome)

    def learn(self, layers: tuple[int, ...], match: Any, confidence: Any, seconds: float = 0.0) -> None:
        self.parts[0].learn(layers, match, confidence, seconds)


def joined_plan(plan: Plan) -> Plan:
    """The warm-up plan with the drafts of other sources, which may have any size."""
    largest = replace(
        plan.largest, nodes=max(plan.largest.nodes, JOINED.nodes), depth=max(plan.largest.depth, JOINED.depth)
    )
    sizes = range(JOINED.nodes + 1)
    verified, accepted = (tuple(sorted({*known, *sizes})) for known in (plan.verified, plan.accepted))
    return replace(plan, largest=largest, verified=verified, accepted=accepted)
