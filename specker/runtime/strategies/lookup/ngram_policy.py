"""Policy `auto` of copied text: how often copies were right, by where they come from and by the length of the match."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from specker.runtime.control.auto import ENGINE_DECAY, TEXT_DECAY, Share, shorter
from specker.runtime.control.policy import LENGTHS, MAX_NODES, OWN, Budget, Match, Outcome, Policy

UNTRIED = Share(TEXT_DECAY)  # the counts of a match that was never tried
# The a_n that a text starts with, for n = 1, 2, ..; the last one applies to all longer matches.
RATES = (0.3, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.8)
OTHERS = 2  # a match in another text is worth as much as one that is so many tokens shorter in the text itself
LONG = 8  # matches of so many tokens or more are counted by powers of 2


class NgramPolicy(Policy):
    """Policy `auto` for copied text: a_n by source and by the length of the match, in this text and in the engine's
    earlier ones. Of several sources it copies from the one that promises most tokens."""

    may_skip_drafting = copies = True

    def __init__(self, earlier: dict[tuple[str, int], Share], size: Budget):
        """`earlier`: the engine's counts, by source and length of a match. `size`: the longest draft."""
        self.earlier = earlier
        self.shares: dict[tuple[str, int], Share] = {}
        lengths = (*(n for n in LENGTHS if n < size.depth), size.depth)
        self.shapes = tuple(replace(size, nodes=n, depth=n) for n in lengths)
        self.matched = self.available = 0

    def announced(self, matches: Sequence[Match]) -> None:
        most = self.shapes[-1].depth

        def promised(match: Match) -> float:
            return total(self.rate_of(match.matched, match.source), min(most, match.available)) if match.matched else 0

        best = max(matches, key=promised)  # the first of equals
        self.matched, self.available, self.source = best

    def budgets(self) -> Sequence[Budget]:
        """Drafts up to the number of tokens that can be copied."""
        if not self.matched:
            return ()
        enough = next((i for i, shape in enumerate(self.shapes) if shape.depth >= self.available), len(self.shapes))
        return self.shapes[: enough + 1]

    def trial(self, budget: Budget) -> Budget:
        return shorter(self.shapes, budget)

    def rate_of(self, matched: int, source: str = OWN) -> float:
        """a_n of the package's docstring, for n = `matched`."""
        key = source, counted(matched)
        worth = matched if source == OWN else max(1, matched - OTHERS)
        prior = self.earlier.get(key, UNTRIED).mean(RATES[min(worth, len(RATES)) - 1])
        return self.shares.get(key, UNTRIED).mean(prior)

    def expected(self, budget: Budget) -> float:
        if not self.matched:
            return 1.0
        return total(self.rate_of(self.matched, self.source), min(budget.depth, self.available))

    def drafts(self, budget: Budget) -> float:
        return min(budget.depth, self.available) if self.matched else 0

    def worth(self, price: float, confidence: Sequence[float]) -> int:
        """The largest k with a_n^k of at least the price."""
        a = self.rate_of(self.matched, self.source) if self.matched else 0.0
        if a >= 1 or price <= 0:
            return MAX_NODES
        return int(math.log(price) / math.log(a)) if a > 0 and price < 1 else 0

    def observe(self, outcome: Outcome) -> None:
        if outcome.drafted and self.matched:
            right, key = len(outcome.path) - 1, (self.source, counted(self.matched))
            seen = min(right + 1, outcome.drafted)  # the tokens after a wrong one are not compared
            for shares, decay in ((self.shares, TEXT_DECAY), (self.earlier, ENGINE_DECAY)):
                shares.setdefault(key, Share(decay)).add(right, seen)


def counted(matched: int) -> int:
    """The length under which matches of `matched` tokens are counted."""
    return matched if matched < LONG else 1 << (matched.bit_length() - 1)


def total(a: float, k: int) -> float:
    """E(k) = 1 + a + .. + a^k"""
    return k + 1.0 if a == 1 else (1 - a ** (k + 1)) / (1 - a)
