"""The seconds of a round's stages on this machine with these models: measured by the warm-up, corrected by every round.

Before anything is measured, a stage costs as many plain decoding steps as it reads bytes of weights (the prior).
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from specker.runtime.control.policy import Budget

TABLE = 33  # sizes whose prior is tabulated
# How far one round moves an estimate of the logarithm. Interruptions only ever lengthen a round, so an estimate rises
# more slowly than it falls.
RISE = 0.15
FALL = 0.3
MAX_RISE = math.log(2)  # of the logarithm of one measurement, over what was expected
REPEATED = 3  # rounds that a careful measurement counts for
FEW = 4  # fewer measurements of a size may all have been interrupted
# A size that no draft had for so many rounds is taken to be like the others again:
SOON = 8  # for each of its measurements
FORGET = 64  # at most
LEAST = 1e-9  # seconds; a stage that the clock cannot resolve
STEP = 0.05  # weight of a round's measurement for the factor of its number of sequences
WITHIN = 0.3  # of the logarithm: the most that one measurement changes this factor
MANY = 16  # rows whose arithmetic takes longer than reading the weights, on a CPU


class Curve:
    """Seconds of a stage by its size. Sizes in between are interpolated, as multiples of the prior; larger sizes
    go on as the last two measured ones do, or as all do on the whole if that rises less. A factor that all sizes share
    follows changes that affect every size, such as a longer text.

    A long measurement must not keep a size from being used, and so from being measured again. So the first measurements
    of a size count as much as what was expected if they are longer, and a size that few rounds have measured is soon
    forgotten, and costs at most what the next larger one does and, by unit, what the next smaller one does."""

    def __init__(self, prior: Callable[[float], float]):
        """`prior`: the cost of a size in plain decoding steps, positive."""
        self.prior = prior
        self.factor: float | None = None  # seconds per unit of the prior; None: nothing was measured
        self.ratios: dict[int, float] = {}  # measured cost over the prior, by size
        self.kept = {1}  # sizes that are never forgotten
        self._seen: dict[int, tuple[int, int]] = {}  # of sizes of rounds: number of measurements, and the last one's
        self._rounds = 0  # number of measurements of sizes that are not kept
        self.largest = 0  # size that was measured here, not taken from another curve
        self._fit: tuple[list[int], list[float], float] | None = None  # sizes, their ratios; growth beyond them
        self._priors = [prior(x) for x in range(TABLE)]

    def at(self, size: float) -> float:
        """The cost of this size, divided by `factor`."""
        below = int(size)
        if below + 1 >= TABLE:
            return self.prior(size) * self._ratio(size)
        cost = self._priors[below] * self._ratio(below)
        if below == size:
            return cost
        return cost + (size - below) * (self._priors[below + 1] * self._ratio(below + 1) - cost)

    def _ratio(self, size: float) -> float:
        """The cost over the prior: between two measured sizes on the line through them."""
        if self._fit is None:
            self._fit = self._fitted()
        known, values, slope = self._fit
        above = bisect_left(known, size)
        if above == len(known):
            return values[-1] + slope * (size - known[-1])
        if not above:
            return values[0]
        share = (size - known[above - 1]) / (known[above] - known[above - 1])
        return values[above - 1] + share * (values[above] - values[above - 1])

    def learn(self, size: int, seconds: float, warm: bool = True, alone: bool = False, unit: float = 0.0) -> None:
        """Take a measurement into account. `warm`: False if it may be too long. `alone`: it says nothing of other sizes
        (`Costs.observe`). `unit`: the seconds of a unit of the prior before any measurement, if known."""
        seconds, known = max(seconds, LEAST), size in self.ratios
        expected = self.prior(size) * self.ratios[size] if known else self.at(size)
        if not warm and (self.factor is None or seconds > self.factor * expected):
            return
        if self.factor is None:
            self.factor = seconds / expected
            if 0 < unit < self.factor:
                seconds *= math.sqrt(unit / self.factor)
                self.factor = seconds / expected
        error = min(math.log(seconds / (self.factor * expected)), MAX_RISE)
        if error < 0:
            step = error * (FALL if known else 1.0)
        else:  # what was expected counts as the first measurement
            seen = self._seen.get(size, (FEW, 0))[0] if known else 0
            step = error * max(RISE, 1 / (seen + 2))
        shared = step / 2 if known and not alone else 0.0
        self.factor *= math.exp(shared)
        self.ratios[size] = expected / self.prior(size) * math.exp(step - shared)
        self.largest = max(self.largest, size)
        self._forget(size)
        self._fit = None

    def _forget(self, size: int) -> None:
        """Count a measurement of a size, and drop the sizes that were not measured for long."""
        if size not in self.kept:
            self._rounds += 1
            self._seen[size] = self._seen.get(size, (0, 0))[0] + 1, self._rounds
            for old, (count, last) in list(self._seen.items()):
                if last <= self._rounds - min(FORGET, SOON * count):
                    del self._seen[old], self.ratios[old]

    def set(self, size: int, seconds: float) -> None:
        """Replace the estimate of this size by a careful measurement."""
        if self.factor is None:
            self.factor = max(seconds, LEAST) / self.prior(size)
        self.ratios[size] = max(seconds, LEAST) / (self.factor * self.prior(size))
        self._seen.pop(size, None)
        self.largest = max(self.largest, size)
        self._fit = None

    def like(self, other: "Curve", times: float = 1.0) -> None:
        """Start from `times` what another curve has measured."""
        assert other.factor is not None
        self.factor, self.ratios, self._fit = other.factor * times, dict(other.ratios), None

    def _fitted(self) -> tuple[list[int], list[float], float]:
        """`_fit`, of the measurements so far."""
        known = sorted(self.ratios)
        if not known:
            return [0], [1.0], 0.0
        priors = [self._priors[x] if x < TABLE else self.prior(x) for x in known]
        costs = [prior * self.ratios[x] for prior, x in zip(priors, known, strict=True)]
        few = [self._seen.get(x, (FEW, 0))[0] < FEW for x in known]
        for i in reversed(range(len(known) - 1)):
            if few[i]:
                costs[i] = min(costs[i], costs[i + 1])
        for i in range(1, len(known)):
            if few[i]:
                costs[i] = min(costs[i], costs[i - 1] * known[i] / known[i - 1])
        values = [cost / prior for cost, prior in zip(costs, priors, strict=True)]
        slopes = [(values[-1] - values[i]) / (known[-1] - known[i]) for i in (0, -2)] if len(known) > 1 else [0.0]
        return known, values, max(min(slopes), 0.0)


class Factor(NamedTuple):
    """Of the passes of some number of sequences."""

    value: float = 1.0
    measurements: int = 0
    plain: bool = False  # whether one of them was a plain round


class Costs:
    """Seconds of drafts and of verify passes.

    A verify pass over R rows in all costs V(R), whatever the number n of sequences: the weights are read once, and each
    row has its arithmetic. What else depends on n is a factor of all passes of n sequences. Drafts have a curve for
    each way to draft and each n."""

    def __init__(self, prior: Callable[[Budget], float], reads: Callable[[float], float] = lambda rows: 1.0):
        """`prior`: the cost of a draft of this shape in plain decoding steps, by the weights that it reads. `reads`:
        the weights that a verify pass over so many rows reads, in any unit; more rows choose more experts."""
        self.prior, self.reads = prior, reads
        self.clear()

    def clear(self) -> None:
        """Forget all measurements."""
        self._verify: dict[int, Curve] = {}  # by exit, of rows in all
        self._factors: dict[int, Factor] = {}  # by number of sequences
        self._draft: dict[tuple[int, int, int, bool], Curve] = {}  # by sequences, exit, part, and whether it is a tree
        self.plain_rounds = 0  # number of measured rounds without a draft
        self._prefill = 0.0  # seconds per token that the drafter prefills, of MANY or more
        self._row = 0.0  # seconds per row of the target in long passes

    def verify(self, n: int, rows: float, exit: int = 0) -> float:
        """Seconds of a verify pass over `rows` rows of n sequences in all, and of all that follows it in the round.
        `exit`: layers of the target that have already run on all rows but one of each sequence."""
        curve = self._verifying(exit)
        return max(curve.at(rows) * (curve.factor or 1.0), self._least(curve, rows, exit)) * self._factor(n)

    def _least(self, curve: Curve, rows: float, exit: int) -> float:
        """What a verify pass costs at least, by its arithmetic, where it is larger than any that was measured. A few
        rows cost what reading the weights does, so they tell nothing of many."""
        return self._row * rows if rows > max(1, curve.largest) and not exit else 0.0

    def _factor(self, n: int) -> float:
        """The factor of all passes of n sequences: of the nearest n that was measured."""
        if n not in self._factors:
            return self._factors[min(self._factors, key=lambda known: abs(known - n))].value if self._factors else 1.0
        return self._factors[n].value

    def draft(self, n: int, budget: Budget, tokens: float) -> float:
        """Seconds of a draft of `tokens` tokens for each of n sequences; `budget` says what drafts."""
        if not tokens:
            return 0.0
        curve = self._drafting(n, budget)
        return curve.at(tokens) * (curve.factor or self._unit(n))

    def round(self, n: int, budget: Budget, tokens: float | None = None, verified: float | None = None) -> float:
        """Seconds of a round of n sequences with drafts of `tokens` tokens, by default the budget's nodes.
        `verified`: as in `observe`."""
        tokens = budget.nodes if tokens is None else tokens
        verified = tokens if verified is None else verified
        return self.draft(n, budget, tokens) + self.verify(n, n * (verified + 1), budget.exit if verified else 0)

    def rounds(self, n: int, budget: Budget, most: int) -> list[float]:
        """Seconds of rounds of n sequences with drafts of 0 to `most` tokens."""
        draft, beside = self._drafting(n, budget), 0 if budget.beside is None else budget.beside.nodes
        each = draft.factor or self._unit(n)
        passes = (self.verify(n, n * (k + 1 + beside), budget.exit) for k in range(1, most + 1))
        return [self.plain(n), *(draft.at(k) * each + seconds for k, seconds in enumerate(passes, 1))]

    def plain(self, n: int) -> float:
        """Seconds of a round of n sequences without a draft."""
        return self.verify(n, n)

    def prefill(self, tokens: int) -> float:
        """Seconds that the drafter takes to prefill `tokens` tokens. Fewer than MANY take as long as MANY, because the
        weights are read once. Before a prefill is measured, a token takes as much of the time of a prompt's row in the
        target as the drafter has of its weights."""
        each = self._prefill or self._row * self.prior(Budget(1, 1))
        return each * max(tokens, MANY) if tokens else 0.0

    def prices(self, n: int, budget: Budget, rate: float) -> tuple[float, ...]:
        """What a draft's second, third, .. token costs, and the one after the longest draft's last: the tokens of one
        sequence that a batch of n emits meanwhile at `rate` tokens per second."""
        each = rate / n
        _, *total = self.rounds(n, budget, budget.depth + 1)
        return tuple(each * max(0.0, b - a) for a, b in pairwise(total))

    def row_prices(self, n: int, budget: Budget, rate: float) -> tuple[float, ...]:
        """What 0, 1, .. further rows cost in the verify pass of a batch of n, as tokens that it emits meanwhile at
        `rate` tokens per second: up to the rows of n of the budget's longest drafts."""
        first = self.plain(n)
        rows = range(n, n * (budget.depth + 1) + 1)
        return tuple(rate * (self.verify(n, count, budget.exit) - first) for count in rows)

    def observe(
        self,
        n: int,
        budget: Budget,
        tokens: int,
        draft: float,
        verify: float,
        verified: float | None = None,
        warm: bool = True,
        paired: bool = False,
    ) -> None:
        """Learn from a round of n sequences: its draft of `tokens` tokens took `draft` seconds, the rest `verify`.
        `verified`: how many draft tokens a sequence had in the verify pass, on average; None: `tokens`. `warm`: False
        for the first rounds after a change between plain rounds and drafts. They load the processor's caches anew, so
        they count only if they were shorter than expected. `paired`: plain rounds were timed just before, so another
        time than expected says nothing of the machine's speed, which all sizes of a verify pass share."""
        verified = tokens if verified is None else verified
        rows, exit = n * (1 + verified), budget.exit if verified else 0
        self.plain_rounds += not tokens
        curve, size = self._verifying(exit), grouped(rows)
        if not tokens:
            curve.kept.add(size)
        factor = self._seen(n, rows, exit, verify, warm, plain=not tokens)
        curve.learn(size, verify / factor * curve.at(size) / curve.at(rows), warm, paired)
        if tokens:
            self._drafting(n, budget).learn(tokens, draft, warm, unit=self._unit(n))

    def measured(self, n: int, budget: Budget, tokens: int, draft: float, verify: float) -> None:
        """Like `observe`, for careful measurements."""
        rows, exit = n * (1 + tokens), budget.exit if tokens else 0
        self.plain_rounds += REPEATED * (not tokens)
        if not tokens:
            self._verifying(exit).kept.add(rows)
        self._verifying(exit).set(
            rows, verify / self._seen(n, rows, exit, verify, plain=not tokens, measurements=REPEATED)
        )
        if tokens:
            self._drafting(n, budget).set(tokens, draft)

    def _seen(
        self,
        n: int,
        rows: float,
        exit: int,
        seconds: float,
        warm: bool = True,
        plain: bool = False,
        measurements: int = 1,
    ) -> float:
        """Learn the factor of n from a pass of n sequences that took `seconds`, where passes over as many rows are
        known. `warm`: as of `observe`. `plain`: it was a plain round's. Once there was one, drafts do not count: slow
        drafts would make plain rounds look slow. Returns the factor. The first n that is measured has 1; the factor of
        another one is at first the mean of its measurements and of the nearest n's factor."""
        curve = self._verifying(exit)
        if curve.factor is None or self._factors.keys() <= {n}:
            return self._factors.setdefault(n, Factor(plain=True)).value
        factor, known = self._factors.get(n, Factor(self._factor(n))), min(curve.ratios) <= rows <= curve.largest
        error = math.log(max(seconds, LEAST) / self.verify(n, rows, exit))
        if known and (warm or error < 0) and (plain or not factor.plain):
            step = max(STEP * measurements, measurements / (factor.measurements + measurements + 1))
            value = factor.value * math.exp(step * max(-WITHIN, min(WITHIN, error)))
            factor = Factor(value, factor.measurements + measurements, plain)
        self._factors[n] = factor
        return factor.value

    def follow(self, n: int, seconds: float) -> None:
        """Take the seconds of a plain round of n sequences, as careful measurements found it while nothing was drafted.
        Another time than before is taken for a change of the machine's speed, which changes all costs alike, unless no
        plain round of n was measured."""
        curve, seconds = self._verifying(0), max(seconds, LEAST)
        if curve.factor is None or not self._factors.get(n, Factor()).plain:
            self.measured(n, Budget(0, 0), 0, 0.0, seconds)
            return
        change = seconds / self.plain(n)
        self._prefill, self._row = self._prefill * change, self._row * change
        for each in (*self._verify.values(), *self._draft.values()):
            if each.factor is not None:
                each.factor *= change

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Learn from a prefill of `tokens` tokens by the drafter. A shorter time than before is taken as it is: the
        first prefills may read the weights from a disk. A longer one moves the estimate a little."""
        each, known = seconds / max(tokens, MANY), self._prefill
        self._prefill = each if not known or each < known else known + RISE * (min(each, 2 * known) - known)

    def observe_rows(self, rows: int, seconds: float) -> None:
        """Learn from a pass of the target over so many rows of prompts, at least MANY."""
        if rows >= MANY:
            each = seconds / rows
            self._row += (each - self._row) * (0.3 if self._row else 1.0)

    def _verifying(self, exit: int) -> Curve:
        curve = self._verify.get(exit)
        if curve is None:
            one = self.reads(1)
            curve = self._verify[exit] = Curve(lambda rows: self.reads(max(1.0, rows)) / one)
        if curve.factor is None and (known := [key for key, each in self._verify.items() if each.factor is not None]):
            curve.like(self._verify[min(known, key=lambda key: abs(key - exit))])
        return curve

    def _drafting(self, n: int, budget: Budget) -> Curve:
        """The curve of this way to draft. A new one starts from the nearest n that was measured: a draft step of n rows
        takes as much longer as a pass of the target over n rows does."""

        def prior(tokens: float) -> float:
            whole = max(1, math.ceil(tokens))
            depth = max(1, whole // 2) if budget.tree else whole
            return self.prior(Budget(whole, depth, budget.exit, budget.part))

        key = n, budget.exit, budget.part, budget.tree
        curve = self._draft.get(key)
        if curve is None:
            curve = self._draft[key] = Curve(prior)
        if curve.factor is None:
            alike = [k for k, each in self._draft.items() if each.factor is not None and k[2:] == key[2:]]
            if alike:
                near = min(alike, key=lambda k: (abs(k[0] - n), abs(k[1] - budget.exit)))
                curve.like(self._draft[near], self.plain(n) / self.plain(near[0]))
        return curve

    def _unit(self, n: int) -> float:
        """Seconds of a plain step, as far as known; 1 before any measurement."""
        return 1.0 if self._verifying(0).factor is None else self.plain(n)


def grouped(rows: float) -> int:
    """The number of rows under which a pass is counted: many are rounded to an eighth."""
    whole = round(rows)
    unit = 1 << max(0, whole.bit_length() - 5)
    return round(whole / unit) * unit
