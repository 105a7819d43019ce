"""What the choice of a round's shape stands on beside costs: how much drafts may still lose, when a trial is due, what
a further token of a draft costs, and whether the machine has changed its speed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from specker.runtime.control.costs import Costs
from specker.runtime.control.policy import Budget

SWITCH = 1.0  # what a trial costs because caches are cold, in plain rounds
RUN = 4  # the fewest drafts in a row, so that some find warm caches: a draft on its own takes up to 1.5 times as long
WAIT = 16  # plain rounds before a trial
MAX_DOUBLINGS = 3  # of WAIT, one for each trial in a row that lost
AGAIN = 16  # plain rounds until drafts are considered again; divides WAIT
REFRESH = 8  # rounds that prices are kept for
LOOK = 5  # plain rounds in a row that measure plain decoding
LOOK_SHARE = 0.015  # of the time with drafts: the most that measuring plain decoding may cost
PHASE = 1.25  # a measurement that differs by this factor tells that the machine has another speed, for drafts as well
APART = 16  # the fewest drafts between two such measurements
NONE = Budget(0, 0)


@dataclass(eq=False)
class Credit:
    """What drafts may lose against plain decoding, in plain rounds. It grows with time and measured gains; at zero
    drafts stop."""

    left: float = 5.0
    per_round: float = 0.015  # earned in the time of a plain round while drafts are made
    per_resting_round: float = 0.008  # earned by a plain round while drafts rest
    at_most: float = 12.0
    carried_over: float = 4.5  # the most that a new text takes over from one in which drafts lost
    renewed: float = 4.0  # the least that a new text begins with if drafts promise a gain
    late: float = 0.0  # cost of the prefills before drafts for these texts, which the next text pays

    def add(self, gained: float, price: float) -> None:
        """`price`: what a trial is expected to lose, which can always be earned."""
        self.left = min(self.left + gained, max(self.at_most, price))

    def renew(self) -> None:
        self.left = max(self.left, self.renewed)

    def admitted(self, lost: bool, price: float) -> None:
        """A text was admitted. `lost`: whether the last trial lost."""
        self.left, self.late = self.left - self.late, 0.0
        if lost:
            self.left = min(self.left, max(self.carried_over, price))


@dataclass(eq=False)
class Trials:
    """Runs of short drafts that find out whether drafts pay again. They become rarer while they lose."""

    waited: int = 0  # plain rounds since drafts were made
    lost: int = 0  # trials in a row that lost
    left: int = 0  # drafts of this run that are still to come
    gained: float = 0.0  # by the drafts of this trial so far, in plain rounds
    price: float = 0.0  # what the next trial is expected to lose, in plain rounds

    def admitted(self) -> None:
        """A text was admitted, which may suit drafts better: try again soon."""
        self.lost, self.left = min(self.lost, 1), 0

    @property
    def due(self) -> bool:
        return self.waited >= WAIT << min(self.lost, MAX_DOUBLINGS)

    def begin(self) -> None:
        self.left, self.waited, self.gained = RUN, 0, 0.0

    def finished(self, gained: float) -> float:
        """A draft of a trial gained so much. Returns that, less what the trial cost if it was its last one."""
        self.gained += gained
        if self.left:
            return gained
        self.lost = 0 if self.gained > 0 else self.lost + 1
        return gained - SWITCH


@dataclass(eq=False)
class TokenPrices:
    """What each further token of a draft costs, kept for REFRESH rounds of the same shape."""

    _prices: tuple[float, ...] = ()
    _key: Any = None
    _kept: int = 0

    def of(self, key: Any, made: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
        if self._key != key or self._kept >= REFRESH:
            self._prices, self._key, self._kept = made(), key, 0
        self._kept += 1
        return self._prices


@dataclass(eq=False)
class PlainSpeed:
    """Measures plain decoding by a few plain rounds in a row, and notices that the machine has another speed."""

    drafts: int = 0  # since the last measurement
    spent: float = 0.0  # their time in plain rounds
    _seconds: list[float] = field(default_factory=list)  # of the last plain rounds, for the next measurement
    _of: tuple[int, bool] = (0, False)  # number of sequences in those rounds, and whether drafts rested

    def drafted(self, took: float) -> None:
        """A round with drafts took so many plain rounds' time."""
        self.drafts, self.spent = self.drafts + 1, self.spent + took

    def due(self, gain: float) -> bool:
        """Whether a measurement costs little: LOOK rounds without the drafts' `gain`, a share of a round's time."""
        return self.drafts >= APART and LOOK * gain <= LOOK_SHARE * self.spent

    def begin(self) -> None:
        self.drafts, self.spent = 0, 0.0

    def observe(self, costs: Costs, n: int, seconds: float, rests: bool) -> None:
        """Take the seconds of a plain round of n sequences, chosen to measure plain decoding or because drafts are
        slower (`rests`). Several such rounds are one measurement. In the first ones the processor's caches still hold a
        draft's data, so a short round counts: the shortest but for a quarter of them, because draft rounds are not
        timed at their luckiest either. Between drafts the last two measurements count together, so that plain decoding
        does not look slow after one that was interrupted. One that differs by PHASE from the estimate changes all costs
        (`Costs.follow`), and so does every one while drafts rest."""
        if (n, rests) != self._of:  # a text was admitted or ended meanwhile, or drafts began or ended
            self._seconds, self._of = [], (n, rests)
        self._seconds.append(seconds)
        if len(self._seconds) % (AGAIN if rests else LOOK):
            return
        usual = sorted(self._seconds)[len(self._seconds) // 4]
        if rests or not 1 / PHASE < usual / costs.plain(n) < PHASE:
            costs.follow(n, usual)
        else:
            costs.measured(n, NONE, 0, 0.0, usual)
        self._seconds = [] if rests else self._seconds[-LOOK:]
