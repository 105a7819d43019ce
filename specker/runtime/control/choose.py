"""Choose the shape of each round: how much to draft, or nothing while that is faster.

The n texts of a batch still add W tokens in all. A plain round takes V(n) seconds and adds n of them. A round of shape
s is expected to take C(s) seconds and to add T(s) tokens (costs.py, policies), once a model has read the texts, which
takes it F(s) seconds. The texts then end after

    t(s) = F(s) + W C(s) / T(s)        t(plain) = W V(n) / n

and the round takes the shape with the least t: what the reading costs is paid once, and all tokens to come repay it. A
text that adds too few tokens to repay its own reading REPAID times is not read. It adds one token a round while the
others draft.

Where others may follow, as in a server, a token of any text is worth the same, and T(s) is the sum of the tokens e_i
that each text is expected to add. Texts that are awaited together, those of one call, end when the last one does. With
L_i the tokens that text i still adds, it takes L_i / e_i rounds, and

    T(s) = n M(L) / M(L / e)        M(x) = (mean of x_i^4)^(1/4), a smooth maximum

so a text that ends before the others gains little by drafts. Texts differ: of those that a model has not read, e_i - 1
is spread as it was among earlier texts. A token of text i is worth the derivative of T by e_i: of the draft tokens of a
batch those are verified that promise most worth, and chains go on while the next tokens are worth their price.

The estimates are wrong at first, and texts change. So

* drafts may lose only so many plain rounds, `left`: a few at the start, and a share of the time. Gains add to it. At
  zero drafts stop;
* the other choice, drafts or plain decoding, is tried from time to time, for a few rounds in a row. That may cost a
  share of the time since it was last tried: half as much after a trial of drafts that lost.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from statistics import NormalDist
from typing import Any

from specker.runtime.control.costs import Costs
from specker.runtime.control.policy import Budget, Means, Offer, Policy
from specker.runtime.control.reasons import BEHIND, ENDED, MEASURED, MISSING, RESTS

NONE = Budget(0, 0)
FIRST = 3.0  # plain rounds that drafts may lose at the start
MOST = 8.0  # plain rounds that they may lose after they have gained
SHARE = 0.01  # of the time: what they may lose besides
TRIED = 0.02  # of the time since the other choice was last tried: what trying it may cost
RUN = 4  # drafts in a row that are a trial: one on its own takes up to 1.5 times as long, since caches are cold
LOOK = 5  # plain rounds in a row that are one
APART = 16  # the fewest drafts between those
SWITCH = 1.0  # plain rounds that a change between drafts and plain rounds costs, because caches are cold
START = 1.03  # what drafts must promise after a plain round, as a multiple of plain decoding's rate
STAY = 0.95  # after a draft: a few drafts tell little, and a rest is long. `left` limits what that loses
COLD = 2  # rounds after a change, in which the processor's caches hold other data
AGAIN = 16  # plain rounds until drafts are considered again,
LATER = 64  # at most, if they may not be tried before
REPAID = 1.25  # times that drafts must be expected to repay the reading of texts
REFRESH = 8  # rounds that prices are kept for
SMOOTH = 4  # exponent of the smooth maximum: how long a text takes is uncertain
NORMAL = NormalDist()
PHASE = 1.25  # a measurement that differs by this factor tells that the machine has another speed, for drafts as well


class Chooser:
    """The rule above.

    Plain rounds are chosen several at once: until it is time to ask the policies again, `keeps_resting` counts them,
    and the loop runs them without policies and drafter (`DraftRunner.will_skip_drafter`).
    """

    def __init__(self, costs: Costs, learns: bool = True):
        """`learns`: every round's seconds are measured. Without measurements there is no telling whether drafts pay
        off, so every round drafts."""
        self.costs, self.learns = costs, learns
        self.clear()

    def clear(self) -> None:
        """Forget the past, such as a warm-up's."""
        self.reason = ""  # why the last choice drafts nothing; empty if it drafts
        self.trial = False  # whether the last choice is a trial
        self.unread: frozenset[int] = frozenset()  # slots that a model is to read before the round is chosen
        self.worths: list[float] = []  # of a token of each text in the last chosen round
        self.left = FIRST
        self._drafting = False  # whether drafts are the choice, and plain rounds the other one
        self._since = 0.0  # plain rounds' time since the other choice was tried
        self._drafts = 0  # since plain rounds were measured
        self._lost = False  # whether the last trial of drafts lost
        self._run, self._gained = 0, 0.0  # drafts of this trial still to come; what it has gained, in plain rounds
        self._new = 0  # texts that were admitted since the policies were asked
        self._ahead, self._sequences, self._none = 0, 0, NONE  # plain rounds still to come, for so many sequences
        self._cold, self._drafted = 0, False  # rounds until caches are warm; what the last chosen round did
        self._plain, self._prices, self._rows = PlainSpeed(), Kept(), Kept()
        self._texts = _Texts((), (), (), self.costs)  # of the last choice

    def admitted(self) -> None:
        """A new text may suit the drafts better than the last one."""
        self._lost, self._run, self._ahead, self._new = False, 0, 0, self._new + 1

    @property
    def paired(self) -> bool:
        """Whether plain rounds were timed not long before the round of the last choice, which drafts."""
        return self.trial or (self._drafting and self._drafts < RUN)

    @property
    def warm(self) -> bool:
        """Whether the round of the last choice finds the caches as rounds of its kind leave them."""
        return self._cold == 0

    def keeps_resting(self, n: int) -> bool:
        """Whether the next round of n sequences is plain like the last one, without asking the policies. Counts it."""
        if not self._ahead or n != self._sequences:
            return False
        self._ahead -= 1
        return True

    def choose(
        self,
        policies: Sequence[Policy],
        remaining: Sequence[float],
        offers: Sequence[Offer] = (),
        reads: bool = True,
        spread: float | None = None,
    ) -> Budget:
        """The shape of the next round. `remaining`: tokens that each text is expected to add. `offers`: of each
        `Budget.part`; (): every text has room for every draft, and nothing is to be read. `reads`: whether a model may
        read texts first. Then `unread` may name slots: it shall read some of their tokens, and the shape is to be asked
        for again, with the new offers and without `reads`. `spread`: the texts are awaited together, and so
        much texts differ in the tokens that a draft adds, as a standard deviation over the mean; None: others may
        follow."""
        self.unread = frozenset()
        self._texts = texts = _Texts(policies, remaining, offers, self.costs, spread)
        shape = self._choose(texts, reads)
        self.worths = texts.worths(shape)
        if self.unread:
            return NONE
        if shape.nodes or self.reason not in (MISSING, ENDED):  # a match that is missing is no change
            changed = (shape.nodes > 0) != self._drafted
            self._cold, self._drafted = COLD if changed else max(0, self._cold - 1), shape.nodes > 0
        return shape

    def _choose(self, texts: "_Texts", reads: bool) -> Budget:
        policies, n = texts.policies, len(texts.policies)
        if (self.reason == MEASURED or not any(p.copies for p in policies)) and self.keeps_resting(n):
            return self._none
        quiet = self.reason == RESTS and self.keeps_resting(n)  # a model's drafts were slower: only copies are weighed
        if not quiet:
            self._ahead = 0
        proposed: Collection[Budget] = policies[0].budgets()
        if n > 1:  # one text proposes no shape twice
            proposed = dict.fromkeys(shape for p in policies for shape in p.budgets())
        shapes = [shape for shape in proposed if texts.served(shape, True)]
        ended = len(shapes) < len(proposed)
        was, self.reason, self.trial = self.reason, "" if shapes or not ended else ENDED, False
        if not policies[0].may_skip_drafting or not self.learns:
            return self._always(texts, shapes, reads)
        drafts = [shape for shape in shapes if shape.nodes]
        first = shapes[0] if shapes else NONE
        if quiet and drafts:
            drafts, reads = [shape for shape in drafts if texts.copies(shape)], False
            if not drafts:
                self.reason = RESTS
                return self._none
        if not drafts:
            return self._rest(n, first, RESTS if shapes else ENDED if ended else MISSING)
        plain = n / self.costs.plain(n)
        bar = (STAY if self._drafting else START) * plain
        rates = [texts.rate(shape, False) for shape in drafts]
        if reads and texts.behind and (self.left > 0 or self._new) and self._reads(texts, drafts, rates, START * plain):
            return NONE
        rate = max(rates)
        best = drafts[rates.index(rate)]
        if not rate:
            best = max(drafts, key=lambda shape: texts.rate(shape, True))
            slot = max(texts.unread(best), key=lambda slot: texts.remaining[slot])
            late = texts.reading(best, [slot]) * plain / n
            if reads and self._due(texts, best, plain, late):
                self.unread = frozenset([slot])
                return NONE
            return self._rest(n, first, RESTS if reads else BEHIND)
        if self._new and rate > bar:
            self.left = max(self.left, min(FIRST, max(0.0, self.left) + FIRST * self._new / n))
        self._new = 0
        if rate > bar and self.left > 0:
            look = SWITCH + LOOK * max(0.0, 1 - plain / rate)
            due = self._drafts >= APART and look <= TRIED * self._since
            if LOOK and (due or not self.costs.plain_rounds):
                self._since, self._drafts = 0.0, 0
                return self._rounds(n, first, MEASURED, LOOK)
            self._run = RUN - 1 if not self._drafting else max(0, self._run - 1)
            self._drafting = True
            return best
        if self._drafting:
            self._since = 0.0
        self._drafting = False
        # Drafts that look slower than a plain round that was just measured may have been timed in a slower phase.
        if self._run == 0 and n < texts.left:
            self._due(texts, best, plain, at_once=was == MEASURED)
        if self._run > 0 and self.left > -FIRST:  # one that ends early tells nothing
            self._run, self.trial = self._run - 1, True
            return texts.trial(best)
        if quiet:
            self.reason = RESTS
            return self._none
        count = AGAIN
        if not policies[0].layers:  # DEL's learn from rounds without drafts
            count = max(AGAIN, min(LATER, int(self._price(texts, best, plain) / TRIED - self._since)))
        return self._rest(n, first, RESTS if reads else BEHIND, count)

    def _always(self, texts: "_Texts", shapes: Sequence[Budget], reads: bool) -> Budget:
        """The shape of a policy that never rests, once a model has read the texts."""
        if not shapes:
            return NONE
        best = shapes[0] if len(shapes) == 1 else max(shapes, key=lambda shape: texts.rate(shape, True))
        if not best.nodes or texts.served(best, False) == texts.served(best, True):
            return best
        if reads:
            self.unread = texts.unread(best)
        elif not texts.served(best, False):
            self.reason = BEHIND
            return NONE
        return best

    def _reads(self, texts: "_Texts", drafts: Sequence[Budget], rates: Sequence[float], plain: float) -> bool:
        """Set `unread` to the slots that a model is to read, if there are any: those whose tokens repay it. Of texts
        that are awaited together all or none: one without drafts would end last. `rates`: of the drafts, as far as
        texts are read. `plain`: tokens per second without drafts. Copies do not count as what goes on otherwise: a
        match ends."""
        behind = {shape: texts.rate(shape, True) for shape in drafts if texts.unread(shape)}
        if not behind:
            return False
        now = max([plain, *(rate for shape, rate in zip(drafts, rates, strict=True) if not texts.copies(shape))])
        best = max(behind, key=behind.__getitem__)
        saved = texts.left * (1 / now - 1 / behind[best])  # seconds
        slots = [*texts.unread(best)]
        if not texts.together:
            each = saved / sum(texts.remaining[slot] for slot in slots)
            slots = [s for s in slots if texts.remaining[s] * each > REPAID * texts.reading(best, [s])]
        if slots and saved > REPAID * texts.reading(best, slots):
            self.unread = frozenset(slots)
        return bool(self.unread)

    def _due(self, texts: "_Texts", shape: Budget, plain: float, late: float = 0.0, at_once: bool = False) -> bool:
        """Begin a trial of drafts if what it may lose is within its share. `late`: as of `_price`."""
        price = self._price(texts, shape, plain, late)
        due = self.left > 0 and (at_once or (price <= TRIED * self._since and min(price, FIRST) <= self.left))
        if due:
            self._run, self._gained, self._since = RUN, -SWITCH - late, 0.0
        return due

    def _price(self, texts: "_Texts", shape: Budget, plain: float, late: float = 0.0) -> float:
        """What a trial may lose, in plain rounds; twice that if the last one lost. `late`: of reading, in plain
        rounds."""
        n, (tokens, seconds) = len(texts.policies), texts.expected(texts.trial(shape), True)
        return (1 + self._lost) * (SWITCH + late + RUN * max(0.0, seconds * plain - tokens) / n)

    def _rest(self, n: int, shape: Budget, reason: str, count: int = AGAIN) -> Budget:
        if self._drafting:
            self._since = 0.0
        self._drafting, self._run = False, 0
        return self._rounds(n, shape, reason, 1 if reason == BEHIND else count)

    def _rounds(self, n: int, shape: Budget, reason: str, count: int) -> Budget:
        """Draft nothing for so many rounds, instead of this shape."""
        self._ahead, self._sequences, self.reason = count - 1, n, reason
        none = replace(shape, nodes=0, depth=0)
        self._none = replace(none, extra=())
        return none

    def rate(self, policies: Sequence[Policy], shape: Budget) -> float:
        """Expected tokens per second of a round of this shape, in which all texts have a draft."""
        return _Texts(policies, (), (), self.costs).rate(shape, True)

    def prices(self, policies: Sequence[Policy], shape: Budget) -> tuple[float, ...]:
        """What each further token of a draft costs, for policies that decide when a draft ends (`Policy.taken`)."""
        n = len(policies)

        def made() -> tuple[float, ...]:
            return self.costs.prices(n, shape, self._worth(policies, shape))

        return self._prices.of((n, shape, self.trial), made)

    def row_prices(self, policies: Sequence[Policy], shape: Budget) -> tuple[float, ...]:
        """What further rows cost in the verify pass of a batch (`Costs.row_prices`)."""
        n = len(policies)
        return self._rows.of((n, shape), lambda: self.costs.row_prices(n, shape, self._worth(policies, shape)))

    def _worth(self, policies: Sequence[Policy], shape: Budget) -> float:
        """Tokens per second that a batch emits otherwise."""
        plain = len(policies) / self.costs.plain(len(policies))
        texts = replace(self._texts, policies=policies, offers=())
        return plain if self.trial else max(plain, texts.rate(shape, True))

    def measured(self, n: int, seconds: float, rests: bool) -> None:
        """Take the seconds of a plain round of n sequences (`PlainSpeed.observe`)."""
        self.left = min(MOST, self.left + SHARE)
        self._since += not self._drafting
        self._plain.observe(self.costs, n, seconds, rests)

    def finished(
        self, n: int, shape: Budget, drafted: int, tokens: float, trial: bool, verified: float | None = None
    ) -> float:
        """Account for a round of n sequences with drafts of `drafted` tokens that committed `tokens` in all, by their
        worth. `verified`: as in `Costs.observe`. Returns the plain rounds that drafts have gained."""
        took = self.costs.round(n, shape, drafted, verified) / self.costs.plain(n)
        self.left = min(MOST, self.left + SHARE * took)
        if not drafted:
            self._since += took * (not self._drafting)
            return 0.0
        gained = tokens / n - took
        self.left = min(MOST, self.left + gained)
        self._drafts, self._since = self._drafts + 1, self._since + took * self._drafting
        if trial:
            self._gained += gained
            if not self._run:
                self._lost = self._gained <= 0
                self.left -= SWITCH
        return gained


@dataclass(eq=False)
class _Texts:
    """The texts of a batch, and what drafts promise for them."""

    policies: Sequence[Policy]
    remaining: Sequence[float]
    offers: Sequence[Offer]
    costs: Costs
    spread: float | None = None  # as of `Chooser.choose`
    _fits: list[Sequence[int]] = field(init=False)  # slots with room for a draft, by `Budget.part`
    _unread: list[frozenset[int]] = field(init=False)  # those of them whose text its drafter must read first

    def __post_init__(self) -> None:
        slots, self._fits, self._unread = range(len(self.policies)), [], []
        for offer in self.offers:
            fits = [slot for slot in slots if offer.room[slot] > 0] if offer.room else slots
            missing = offer.missing if any(offer.missing) else ()
            self._fits.append(fits)
            self._unread.append(frozenset(slot for slot in fits if missing[slot]) if missing else frozenset())

    @property
    def behind(self) -> bool:
        """Whether a drafter must read something first."""
        return any(self._unread)

    @property
    def together(self) -> bool:
        return self.spread is not None

    @property
    def left(self) -> float:
        """Tokens until plain decoding ends them, at n a round."""
        n = len(self.remaining)
        return n * _smooth(self.remaining) if self.together else sum(self.remaining)

    def _means(self, shape: Budget, read: bool) -> dict[int, Means]:
        """Of each slot that gets a draft."""
        return {slot: self.policies[slot].means(shape) for slot in self.served(shape, read)} if shape.nodes else {}

    def _added(self, shape: Budget, read: bool, means: dict[int, Means]) -> list[float]:
        """The tokens that a round of this shape is expected to add to each text."""
        added = [1.0] * len(self.policies)
        for slot, each in means.items():
            added[slot] = each.tokens
        unread = sorted(self.unread(shape)) if read else ()
        for i, slot in enumerate(unread):
            differs = 1 + (self.spread or 0.0) * NORMAL.inv_cdf((i + 0.5) / len(unread))
            added[slot] = 1 + (added[slot] - 1) * max(0.0, differs)
        return added

    def worths(self, shape: Budget, read: bool = False) -> list[float]:
        """What a token of each text is worth in such a round; see the module's docstring."""
        if not self.together:
            return [1.0] * len(self.policies)
        added = self._added(shape, read, self._means(shape, read))
        rounds = [left / more for left, more in zip(self.remaining, added, strict=True)]
        last = max(rounds)
        shares = [(each / last) ** SMOOTH for each in rounds]
        tokens = self.left / _smooth(rounds) / sum(shares)
        return [tokens * share / more for share, more in zip(shares, added, strict=True)]

    def served(self, shape: Budget, read: bool) -> Sequence[int]:
        """The slots that get a draft of this shape: those with room for it, and, unless `read`, whose text is read."""
        if not self.offers:
            return range(len(self.policies))
        fits, unread = self._fits[shape.part], self._unread[shape.part]
        return fits if read or not unread else [slot for slot in fits if slot not in unread]

    def copies(self, shape: Budget) -> bool:
        return bool(self.offers and self.offers[shape.part].matches)

    def unread(self, shape: Budget) -> frozenset[int]:
        """The slots that its drafter must read first."""
        return self._unread[shape.part] if self.offers else frozenset()

    def reading(self, shape: Budget, slots: Sequence[int]) -> float:
        """Seconds that the reading takes."""
        return self.costs.prefill(sum(self.offers[shape.part].missing[slot] for slot in slots))

    def expected(self, shape: Budget, read: bool) -> tuple[float, float]:
        """Expected tokens and seconds of a round of this shape."""
        n = len(self.policies)
        if n == 1 and shape.nodes:  # in every round of one request, for each shape
            one = self.policies[0].means(shape)
            return one.tokens, self.costs.round(1, shape, one.drafted, one.verified)
        means = self._means(shape, read)
        if self.together:
            added = self._added(shape, read, means)
            tokens = self.left / _smooth([left / more for left, more in zip(self.remaining, added, strict=True)])
        else:
            tokens = n - len(means) + sum([each.tokens for each in means.values()])
        drafted = sum([each.drafted for each in means.values()]) / max(1, len(means))
        if shape.beside is None:
            verified = sum([each.verified for each in means.values()]) / n
        else:  # a tree, whose rows all sequences have
            verified = drafted + shape.beside.nodes
        return tokens, self.costs.round(n, shape, drafted, verified)

    def rate(self, shape: Budget, read: bool) -> float:
        """Expected tokens per second; 0 if no text gets a draft."""
        if not self.served(shape, read):
            return 0.0
        tokens, seconds = self.expected(shape, read)
        return tokens / seconds

    def trial(self, shape: Budget) -> Budget:
        return self.policies[0].trial(shape)


def _smooth(values: Sequence[float]) -> float:
    """M of the module's docstring."""
    most = max(values)
    return most * (sum((value / most) ** SMOOTH for value in values) / len(values)) ** (1 / SMOOTH)


@dataclass(eq=False)
class Kept:
    """Prices, kept for REFRESH rounds of the same shape."""

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
    """Measures plain decoding by several plain rounds in a row."""

    _seconds: list[float] = field(default_factory=list)  # of the last plain rounds, for the next measurement
    _of: tuple[int, bool] = (0, False)  # number of sequences in those rounds, and whether drafts rested
    _due: int = LOOK  # such rounds that are a measurement

    def observe(self, costs: Costs, n: int, seconds: float, rests: bool) -> None:
        """Take the seconds of a plain round of n sequences, chosen to measure plain decoding or because drafts are
        slower (`rests`). In the first ones the processor's caches still hold a draft's data, so a short round counts:
        the shortest but for a quarter of them, because draft rounds are not timed at their luckiest either. Between
        drafts the last two measurements count together, so that plain decoding does not look slow after one that was
        interrupted. One that differs by PHASE from the estimate changes all costs (`Costs.follow`), and so does every
        one while drafts rest, for LOOK rounds at first, since copies end many rests, then for AGAIN."""
        if (n, rests) != self._of:  # a text was admitted or ended meanwhile, or drafts began or ended
            self._seconds, self._of, self._due = [], (n, rests), LOOK or AGAIN
        self._seconds.append(seconds)
        if len(self._seconds) % self._due:
            return
        usual = sorted(self._seconds)[len(self._seconds) // 4]
        if rests or not 1 / PHASE < usual / costs.plain(n) < PHASE:
            costs.follow(n, usual)
        else:
            costs.measured(n, NONE, 0, 0.0, usual)
        if rests:
            self._seconds, self._due = [], AGAIN
        self._seconds = self._seconds[-LOOK:]


def worth_rows(chances: Sequence[Sequence[float]], prices: Sequence[float]) -> list[int]:
    """How many tokens of each sequence's chain to verify: the rows that promise most tokens beyond their price.
    `chances`: how probable it is that the first 1, 2, .. tokens of each chain are accepted, descending. `prices`: of 0,
    1, .. further rows of the batch, in tokens (`Costs.row_prices`). The price of many rows may rise in steps, so all
    numbers of rows are compared."""
    order = sorted(((p, slot) for slot, each in enumerate(chances) for p in each), key=lambda row: -row[0])
    promised = accumulate((p for p, _ in order), initial=0.0)
    gains = [total - price for total, price in zip(promised, prices, strict=False)]
    counts = [0] * len(chances)
    for _, slot in order[: gains.index(max(gains))]:
        counts[slot] += 1
    return counts
