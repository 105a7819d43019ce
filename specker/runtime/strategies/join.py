"""Join copied text with another strategy: `draft+lookup`, `del+lookup`, `easyspec+vocabtrim+lookup`, ..

Each round one of the two drafts for all sequences: the one whose proposal promises most tokens per second (choose.py).
A round that copies text runs no draft model, so the model's cache falls behind. Its next draft must catch up first, and
the time for that counts against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specker.runtime.control.policy import Budget, Match, Outcome, Policy, StopRule
from specker.runtime.strategies.base import Plan
from specker.runtime.strategies.lookup.ngram_policy import NgramPolicy

COPIED = Budget(16, 16, part=1)  # the longest copied draft


class JoinedPolicy(Policy):
    """The proposals of two policies. Part 0 belongs to the model, part 1 to copied text."""

    def __init__(self, model: Policy, copied: NgramPolicy):
        self.parts: tuple[Policy, NgramPolicy] = (model, copied)
        self.may_skip_drafting, self.layers = model.may_skip_drafting, model.layers
        self.part = 0  # the part that drafts in this round

    @property
    def confident(self) -> bool:  # type: ignore[override]
        return self.parts[self.part].confident

    @property
    def copies(self) -> bool:  # type: ignore[override]
        return self.parts[1].matched > 0

    @property
    def source(self) -> str:  # type: ignore[override]
        return self.parts[1].source

    @property
    def rule(self) -> StopRule:  # type: ignore[override]
        return self.parts[self.part].rule

    def budgets(self) -> Sequence[Budget]:
        return (*self.parts[0].budgets(), *self.parts[1].budgets())

    def expected(self, budget: Budget) -> float:
        return self.parts[budget.part].expected(budget)

    def drafts(self, budget: Budget) -> float:
        return self.parts[budget.part].drafts(budget)

    def trial(self, budget: Budget) -> Budget:
        return self.parts[budget.part].trial(budget)

    def announced(self, matches: Sequence[Match]) -> None:
        self.parts[1].announced(matches)

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
    """The warm-up plan with copied drafts, which may have any size."""
    largest = replace(
        plan.largest, nodes=max(plan.largest.nodes, COPIED.nodes), depth=max(plan.largest.depth, COPIED.depth)
    )
    sizes = range(COPIED.nodes + 1)
    return Plan(
        largest,
        plan.budgets,
        tuple(sorted({*plan.verified, *sizes})),
        tuple(sorted({*plan.accepted, *sizes})),
        plan.exits,
    )
