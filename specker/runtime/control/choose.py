"""Choose the shape of each round: how much to draft, or nothing while that is faster."""

from collections.abc import Sequence
from dataclasses import replace

from specker.runtime.control import estimates
from specker.runtime.control.costs import Costs
from specker.runtime.control.estimates import NONE, RUN, SWITCH, Credit, PlainSpeed, TokenPrices, Trials
from specker.runtime.control.policy import Budget, Offer, Policy
from specker.runtime.control.reasons import ENDED, MEASURED, MISSING, RESTS

COLD = 2  # rounds after a change between plain rounds and drafts, in which the processor's caches hold other data
# What drafts must promise, as a multiple of plain decoding's rate:
START = 1.03  # after a plain round, because they disturb the CPU's caches
STAY = 0.9  # after a draft: a few drafts tell little, and a rest is long. `Credit` limits what that loses


class Chooser:
    """Takes the shape with the most expected tokens per second over all sequences.

    Policies that may skip drafting do so while plain rounds are expected to be faster. From time to time a trial, a run
    of short drafts, finds out whether that has changed. Trials become rarer while they lose. Expectations can be wrong,
    so drafting also spends a budget that grows with time and measured gains; at zero it stops.

    While drafts are made, a few plain rounds now and then measure plain decoding. They are more frequent when drafts
    gain little: the time that they cost stays within LOOK_SHARE.

    Plain rounds are chosen several at once: until it is time to ask the policies again, `keeps_resting` counts them,
    and the loop runs them without policies and drafter (`DraftRunner.will_skip_drafter`).
    """

    def __init__(self, costs: Costs, learns: bool = True):
        """`learns`: every round's seconds are measured. Without measurements there is no telling whether drafts pay
        off, so every round drafts."""
        self.costs, self.learns = costs, learns
        self.reason = ""  # why the last choice drafts nothing; empty if it drafts
        self.trial = False  # whether the last choice is a trial
        # For each `Budget.part` at the last choice: seconds of prefill before a draft, and the draft tokens that fit
        # behind each text, () if that is one at least behind all.
        self._late: list[float] = []
        self._room: list[Sequence[int]] = []
        self.clear()

    def clear(self) -> None:
        """Forget the past, such as a warm-up's."""
        self.credit, self._trials, self._prices, self._speed = Credit(), Trials(), TokenPrices(), PlainSpeed()
        self.trial = False
        self._cold, self._drafted = 0, False  # rounds until caches are warm; what the last chosen round did
        self._ahead = self._sequences = 0  # plain rounds to come without asking the policies; for so many sequences
        self._drafting = False  # whether the last round drafted for its gain
        self._new = False  # whether a text was admitted since the policies were asked
        self._none = NONE  # the strategy's shape of a round without a draft
        self._missed = 0.0  # seconds that drafts of a model would have saved since copies were preferred

    def admitted(self) -> None:
        """A new text may suit the drafts better than the last one: try again soon, and at once if drafts promise a gain
        (`Credit.renewed`), because one unlucky text says little of the next. Now pay for the prefills that the last
        text's drafts began with."""
        self.credit.admitted(self._trials.lost > 0, self._trials.price)
        self._trials.admitted()
        self._ahead, self._new, self._missed = 0, True, 0.0

    def choose(self, policies: Sequence[Policy], remaining: int, offers: Sequence[Offer] = ()) -> Budget:
        """The shape of the next round. `remaining`: tokens that the texts may still grow by. `offers`: of each
        `Budget.part`; (): every text has room for every draft, and nothing is to be prefilled."""
        self._late = [self.costs.prefill(sum(offer.missing)) for offer in offers]
        self._room = [() if min(offer.room, default=1) > 0 else offer.room for offer in offers]
        shape = self._choose(policies, remaining)
        if shape.nodes or self.reason not in (MISSING, ENDED):  # a match that is missing is no change
            changed = (shape.nodes > 0) != self._drafted
            self._cold, self._drafted = COLD if changed else max(0, self._cold - 1), shape.nodes > 0
        return shape

    def keeps_resting(self, n: int) -> bool:
        """Whether the next round of n sequences is plain like the last one, without asking the policies. Counts it."""
        if not self._ahead or n != self._sequences:
            return False
        self._ahead, self._trials.waited = self._ahead - 1, self._trials.waited + 1
        return True

    @property
    def warm(self) -> bool:
        """Whether the round of the last choice finds the caches as rounds of its kind leave them."""
        return self._cold == 0

    def _choose(self, policies: Sequence[Policy], remaining: int) -> Budget:
        n = len(policies)
        if (self.reason == MEASURED or not any(p.copies for p in policies)) and self.keeps_resting(n):
            return self._none
        self._ahead = 0
        proposed = dict.fromkeys(shape for p in policies for shape in p.budgets())
        shapes = [shape for shape in proposed if self._drafted_for(policies, shape)]
        ended = len(shapes) < len(proposed)
        measured, self.reason, self.trial = self.reason == MEASURED, "" if shapes or not ended else ENDED, False
        if not policies[0].may_skip_drafting or not self.learns:
            if len(shapes) < 2:  # as under a fixed policy: nothing to compare
                return shapes[0] if shapes else NONE
            return max(shapes, key=lambda shape: self.rate(policies, shape))
        drafts = [shape for shape in shapes if shape.nodes]
        none = replace(shapes[0], nodes=0, depth=0) if shapes else NONE
        if not drafts:
            return self._rest(n, none, RESTS if shapes else ENDED if ended else MISSING)
        plain = n / self.costs.plain(n)
        expected = {shape: self._expected(policies, shape) for shape in drafts}
        rates = {shape: tokens / seconds for shape, (tokens, seconds) in expected.items()}
        bar = (STAY if self._drafting else START) * plain
        best = self._best(expected, rates, bar, remaining)
        # A prefill serves all drafts to come, so it counts against all tokens to come, not against this round.
        late, rate = self._prefill(best), rates[best]
        looks = estimates.LOOK if self._speed.due(1 - plain / rate) or not self.costs.plain_rounds else 0
        if looks:
            self._speed.begin()
            return self._plain(n, none, MEASURED, looks)
        if self._new and rate > bar:
            self.credit.renew()
        self._new = False
        trials = self._trials
        if rate > bar and self.credit.left > 0 and (not late or remaining * (1 / plain - 1 / rate) > late):
            trials.left = trials.left - 1 if self._drafting else RUN - 1
            trials.waited, self._drafting = 0, True
            return best
        trial = policies[0].trial(best)
        tokens, seconds = self._expected(policies, trial)
        loss = RUN * (seconds * plain - tokens)
        trials.price = SWITCH + (max(0.0, loss) + self._prefill(trial) * plain) / n
        # Drafts that look slower than a plain round that was just measured may have been timed in a slower phase.
        if (measured or trials.due) and trials.price <= self.credit.left and n < remaining:
            trials.begin()
        if trials.left > 0 and self.credit.left > 0:
            trials.left, self.trial = trials.left - 1, True
            return trial
        return self._rest(n, none, RESTS)

    def _best(
        self, expected: dict[Budget, tuple[float, float]], rates: dict[Budget, float], bar: float, remaining: int
    ) -> Budget:
        """The best shape, by the expected tokens of a round and per second. Copying may go on, so a model that must
        first read the texts waits while copies beat `bar`. It reads them once its drafts would have saved as much time
        as that takes (the ski-rental rule: at most twice the least cost), unless the texts end too soon."""
        best = max(rates, key=lambda shape: rates[shape])
        late = self._prefill(best)
        copies = [shape for shape in rates if rates[shape] > bar and not self._prefill(shape)] if late else []
        if copies:
            copied = max(copies, key=lambda shape: rates[shape])
            saved = 1 / rates[copied] - 1 / rates[best]  # seconds a token
            self._missed += expected[copied][0] * saved
            if late >= min(self._missed, remaining * saved):
                return copied
        if not best.part:
            self._missed = 0.0
        return best

    def _rest(self, n: int, none: Budget, reason: str) -> Budget:
        self._drafting, self._trials.left = False, 0
        return self._plain(n, none, reason, estimates.AGAIN - self._trials.waited % estimates.AGAIN)

    def _plain(self, n: int, none: Budget, reason: str, rounds: int) -> Budget:
        """Draft nothing for so many rounds."""
        self._ahead, self._sequences, self._trials.waited = rounds - 1, n, self._trials.waited + 1
        self.reason, self._none = reason, replace(none, extra=())
        return none

    def rate(self, policies: Sequence[Policy], shape: Budget) -> float:
        """Expected tokens per second of a round of this shape."""
        tokens, seconds = self._expected(policies, shape)
        return tokens / seconds

    def prices(self, policies: Sequence[Policy], shape: Budget) -> tuple[float, ...]:
        """What each further token of a draft costs, for policies that decide when a draft ends (`Policy.taken`)."""
        n = len(policies)

        def made() -> tuple[float, ...]:
            plain = n / self.costs.plain(n)
            return self.costs.prices(n, shape, plain if self.trial else max(plain, self.rate(policies, shape)))

        return self._prices.of((n, shape, self.trial), made)

    def measured(self, n: int, seconds: float, rests: bool) -> None:
        """Take the seconds of a plain round of n sequences (`PlainSpeed.observe`)."""
        self.credit.add(self.credit.per_resting_round, self._trials.price)
        self._speed.observe(self.costs, n, seconds, rests)

    def row_price(self, policies: Sequence[Policy], shape: Budget) -> float:
        """What a further row of one sequence costs in the verify pass of a batch (`Costs.row_price`)."""
        n = len(policies)
        return self.costs.row_price(n, shape, max(n / self.costs.plain(n), self.rate(policies, shape)))

    def finished(
        self,
        n: int,
        shape: Budget,
        drafted: int,
        tokens: int,
        trial: bool,
        behind: int = 0,
        verified: float | None = None,
    ) -> None:
        """Account for a round of n sequences with drafts of `drafted` tokens that committed `tokens` in all. `behind`:
        tokens that were prefilled for it. `verified`: as in `Costs.observe`."""
        plain = self.costs.plain(n)
        took = self.costs.round(n, shape, drafted, verified) / plain
        gained = (self.credit.per_round if drafted else self.credit.per_resting_round) * took
        if drafted:
            self._speed.drafted(took)
            late = self.costs.prefill(behind) / plain
            if trial:
                gained += self._trials.finished(tokens / n - took - late)
            else:
                gained += tokens / n - took
                self.credit.late += late  # this time is already spent, so it must not end the drafts for this text
        self.credit.add(gained, self._trials.price)

    def _expected(self, policies: Sequence[Policy], shape: Budget) -> tuple[float, float]:
        """Expected tokens and seconds of a round of this shape."""
        n, served = len(policies), self._drafted_for(policies, shape)
        tokens = n - len(served) + sum([p.expected(shape) for p in served])
        drafted = sum([p.drafts(shape) for p in served]) / n
        verified = drafted
        if shape.beside is not None:  # of several sequences, all verify equally many rows
            verified = policies[0].verified(shape) if n == 1 else drafted + shape.beside.nodes
        return tokens, self.costs.round(n, shape, drafted, verified)

    def _drafted_for(self, policies: Sequence[Policy], shape: Budget) -> Sequence[Policy]:
        """The policies of the texts that get a draft of this shape: those with room for it."""
        room = self._room[shape.part] if self._room else ()
        return [p for p, left in zip(policies, room, strict=True) if left > 0] if room else policies

    def _prefill(self, shape: Budget) -> float:
        """Seconds of prefill before a draft."""
        return self._late[shape.part] if self._late else 0.0
