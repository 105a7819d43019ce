"""Join copied text with another drafter: `draft+lookup`, `del+lookup`, `easyspec+vocabtrim+lookup`, ..

Each round one of the two drafts for all sequences: the one whose proposal promises most tokens per second (choose.py).
A round that copies text runs no draft model, so the model's cache falls behind. Its next draft must catch up first, and
the time for that counts against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specker.runtime.control.policy import Budget, Outcome, Policy, StopRule
from specker.runtime.round.drafter import Draft, Drafter
from specker.runtime.strategies.base import Plan
from specker.runtime.strategies.lookup import LookupDrafter, NgramPolicy

if TYPE_CHECKING:
    from torch import Tensor

    from specker.runtime.round.round import Round
    from specker.runtime.round.state import Request

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

    def announced(self, matched: int, available: int) -> None:
        self.parts[1].announced(matched, available)

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


class JoinedDrafter(Drafter):
    synchronous = True  # copied text needs the tokens of the previous round

    def __init__(self, inner: Drafter, copying: LookupDrafter):
        self.inner, self.copying = inner, copying
        self.model, self.cache, self.head = inner.model, inner.cache, inner.head
        self.taps, self.ahead = inner.taps, inner.ahead

    def _of(self, budget: Budget) -> Drafter:
        return self.copying if budget.part else self.inner

    @property
    def keeps_prefix(self) -> bool:
        return self.inner.keeps_prefix

    def announce(self, sequences: list[Request]) -> None:
        self.inner.announce(sequences)
        self.copying.announce(sequences)

    def behind(self, sequences: list[Request]) -> int:
        return self.inner.behind(sequences)

    def catch_up(self, r: Round, slot: int) -> int:
        return self._of(r.budget).catch_up(r, slot)

    def advance(self, requests: list[Request], most: int) -> int:
        return self.inner.advance(requests, most)

    def prefill(self, slot: int, text: list[int]) -> None:
        self.inner.prefill(slot, text)

    def left(self, length: int) -> int:
        return self.inner.left(length)

    def fixed(self, length: int, budget: Budget) -> bool:
        return self._of(budget).fixed(length, budget)

    def draft(self, r: Round) -> Draft:
        return self._of(r.budget).draft(r)

    def observe(self, r: Round, slot: int, path: list[int]) -> None:
        self._of(r.budget).observe(r, slot, path)

    def reads(self, budget: Budget) -> tuple[int, ...]:
        return self.inner.reads(budget)

    def accepted(self, r: Round) -> None:
        self.inner.accepted(r)

    def prefilled(self, slot: int, request: Request, first: int, rows: dict[int, Tensor]) -> None:
        self.inner.prefilled(slot, request, first, rows)

    def learn(self, r: Round, paths: list[list[int]]) -> None:
        self.inner.learn(r, paths)

    def move(self, source: int, target: int) -> None:
        self.inner.move(source, target)
        self.copying.move(source, target)

    def reset(self, slot: int) -> None:
        self.inner.reset(slot)
        self.copying.reset(slot)


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
