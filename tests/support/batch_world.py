"""Simulated batches: requests that decode together on a machine with known prices. The real draft runner, chooser and
policies decide; only the models and the clock are made up.

A text is drawn beforehand: for each place, whether the draft model agrees with the target there if it agreed before it,
and the probability that it names. So every way to draft meets the same texts, and `best_fixed` finds what the best
fixed one would have taken."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from specker.runtime.control.auto import AcceptanceHistory, Auto
from specker.runtime.control.choose import worth_rows
from specker.runtime.control.costs import Costs
from specker.runtime.control.policy import WHOLE, Budget, Offer, Outcome
from specker.runtime.control.reasons import BEHIND
from specker.runtime.draft_runner import DraftRunner
from specker.runtime.round.drafter import Draft, Drafter
from specker.runtime.round.round import weighted

LONGEST = Budget(17, 17)


@dataclass(frozen=True)
class Machine:
    """What passes take, in seconds: of the target over so many rows, and of the draft model."""

    rows: dict[int, float]  # rows of a pass of the target -> seconds; in between and beyond: straight lines
    draft: float = 0.35  # seconds of the draft model's pass over those of the target's
    prompt: float = 0.001  # of a row of a prompt, in the draft model
    own_prompt: float = 0.003  # and in the target
    noise: float = 0.1  # each pass takes up to this share longer
    doubled: float = 0.01  # the share of passes that an interruption doubles
    cold: float = 1.2  # how many times as long the first draft or plain round after the other kind takes

    def verify(self, rows: float) -> float:
        known = sorted(self.rows)
        if rows > known[-1]:
            slope = (self.rows[known[-1]] - self.rows[known[-2]]) / (known[-1] - known[-2])
            return self.rows[known[-1]] + slope * (rows - known[-1])
        return float(np.interp(rows, known, [self.rows[n] for n in known]))


CODER = Machine(  # Qwen2.5-Coder 1.5B in Q4_K_M with its 0.5B, two cores of a Zen 5
    {1: 0.0225, 2: 0.0215, 3: 0.0218, 8: 0.0245, 9: 0.026, 12: 0.034, 16: 0.046, 32: 0.090, 64: 0.186}
)


@dataclass
class Text:
    """A request's text: `agrees[t]` and `probability[t]` of the draft's token at place t."""

    agrees: list[bool]
    probability: list[float]


def text(rng: random.Random, length: int, easy: float, trust: float = 1.0) -> Text:
    """A text whose places are easy with the probability `easy`: there the draft is right in 97 of 100 cases, elsewhere
    in 35. `trust`: by what power the draft overrates (below 1) or underrates (above 1) itself."""
    right = [rng.uniform(0.94, 1.0) if rng.random() < easy else rng.uniform(0.1, 0.6) for _ in range(length + 32)]
    return Text([rng.random() < p for p in right], [p**trust for p in right])


class Reads(Drafter):
    """A draft model that must read each prompt before its first draft for the text."""

    model = SimpleNamespace(ranks=None)

    def __init__(self, world: "BatchWorld"):
        self.world = world

    def prepare(self, requests):
        return Offer(missing=[self._missing(s) for s in requests])

    def _missing(self, request) -> int:
        missing = len(request.token_ids) - request.read
        return missing - 1 if not request.read or missing > 64 else 0

    def idle(self, requests) -> dict[int, str]:
        return {slot: BEHIND for slot, request in enumerate(requests) if self._missing(request)}

    def advance(self, requests, reading=WHOLE, fixed=False):
        (most, slots), count = reading, 0
        for request in requests if slots is None else [requests[slot] for slot in slots]:
            if self._missing(request) and count < most:
                rows = min(most - count, len(request.token_ids) - 1 - request.read)
                request.read, count = request.read + rows, count + rows
        if count:
            w = self.world
            w.spend(max(count * w.machine.prompt, w.machine.draft * w.machine.verify(1)))
        return count


@dataclass
class BatchWorld:
    machine: Machine
    texts: list[Text]
    prompt: int = 200  # tokens of each prompt
    tokens: int = 128  # that each request adds
    seed: int = 1
    confident: bool = True
    known: AcceptanceHistory | None = None
    together: bool = True  # whether the texts are awaited together
    seconds: float = 0.0
    rounds: list[tuple[int, int, float]] = field(default_factory=list)  # sequences, rows, seconds
    reasons: dict[str, int] = field(default_factory=dict)

    def __post_init__(self):
        self.rng, self.kind, self.same = random.Random(self.seed), None, 0
        if self.known is None:
            self.known = AcceptanceHistory(Costs(lambda budget: self.machine.draft * budget.nodes))
            self.warm_up()
        call = object() if self.together else None
        self.requests = [
            SimpleNamespace(
                text=each,
                token_ids=[0] * self.prompt,
                limit=self.prompt + self.tokens,
                read=0,
                call=call,
                accepted=0,
                drafts=0,
                prompt_length=self.prompt,
                policy=Auto(self.known.drafts, LONGEST, self.confident),
                stats=SimpleNamespace(seconds={"prefill": 0.0}),
            )
            for each in self.texts
        ]

    def warm_up(self) -> None:
        """Measure rounds of one text, as an engine does at load. The larger draft sizes and batches take too long."""
        m, costs = self.machine, self.known.costs
        for size in (0, 4, 1, 8):
            draft, verify = (
                min(self.spend(each), self.spend(each)) for each in (size * m.draft * m.verify(1), m.verify(1 + size))
            )
            costs.measured(1, Budget(size, size), size, draft, verify)
        costs.observe_prefill(32, self.spend(32 * m.prompt))
        self.seconds = 0.0

    def spend(self, seconds: float) -> float:
        seconds *= 1 + self.machine.noise * self.rng.random()
        seconds *= 2 if self.rng.random() < self.machine.doubled else 1
        self.seconds += seconds
        return seconds

    def plain(self) -> float:
        """Seconds of plain decoding."""
        noise = 1 + self.machine.noise / 2 + self.machine.doubled
        return self.tokens * self.machine.verify(len(self.texts)) * noise

    def run(self) -> float:
        """Decode all texts. Returns plain decoding's seconds over the seconds that it took."""
        runner = DraftRunner([Reads(self)], self.known, LONGEST, 512)
        for _ in self.requests:
            self.known.costs.observe_rows(self.prompt, self.prompt * self.machine.own_prompt)
            runner.chooser.admitted()
        runner.stall = 0.8 * self.machine.verify(len(self.texts))
        while active := [s for s in self.requests if len(s.token_ids) < s.limit]:
            self._round(runner, active)
        for s in self.requests:
            self.known.ended(1.0, s.accepted, s.drafts)
        return self.plain() / self.seconds

    def _round(self, runner: DraftRunner, active: list) -> None:
        n, began = len(active), self.seconds
        if runner.will_skip_drafter(n):
            budget, reason = Budget(0, 0), runner.chooser.reason
        else:
            budget, reason = runner.shape(active)
            budget = runner.clipped(active, budget)
        chooser = runner.chooser
        trial, paired, warm = chooser.trial, chooser.paired, chooser.warm
        at, seconds = self.seconds, {"prefill": 0.0, "accept": 0.0, "commit": 0.0}
        behind = 0
        if budget.nodes or runner.reads:
            behind = runner.drafter.advance(active, runner.reading)
            seconds["prefill"] = self.seconds - at
        idle = runner.drafter.idle(active)
        counts, confidence = self._draft(active, budget, runner.row_prices(active, budget), idle)
        drafted = len(confidence)
        kind = drafted > 0
        self.same = self.same + 1 if kind == self.kind else 0
        self.kind = kind
        longer = 1 + (self.machine.cold - 1) / 2**self.same if self.same < 3 else 1.0
        seconds["draft"] = sum(self.spend(self.machine.draft * self.machine.verify(n) * longer) for _ in confidence)
        rows = n + sum(counts)
        seconds["verify"] = self.spend(self.machine.verify(rows) * longer)
        paths = []
        for slot, (request, count) in enumerate(zip(active, counts, strict=True)):
            place, right = len(request.token_ids) - self.prompt, 0
            while right < count and request.text.agrees[place + right]:
                right += 1
            right = min(right, request.limit - len(request.token_ids) - 1)
            paths.append(list(range(right + 1)))
            request.token_ids += [0] * (right + 1)
            request.accepted += right
            request.drafts += drafted > 0 and slot not in idle
            if drafted and slot not in idle:
                request.read = len(request.token_ids) - 1
            request.policy.observe(Outcome(count, paths[-1], [c[slot] for c in confidence] if slot not in idle else []))
        draft = Draft(drafted, depth=drafted, idle=idle)
        r = SimpleNamespace(
            requests=active,
            batch=SimpleNamespace(budget=budget),
            draft=draft,
            seconds=seconds,
            forced=False,
            parts=(),
            reason=reason,
            other=0.0,
            places=None if rows == n * (1 + drafted) else range(rows),
            behind=behind,
            warm=warm,
            trial=trial,
            paired=paired,
        )
        runner.learn(r, paths)
        self.rounds.append((n, rows, self.seconds - began))
        for slot in range(n):
            why = reason or idle.get(slot, "")
            self.reasons[why] = self.reasons.get(why, 0) + 1

    def _draft(self, active: list, budget: Budget, prices: Sequence[float], idle: dict[int, str]):
        """The draft tokens that each sequence verifies, and the confidence of each draft token of every sequence."""
        confidence: list[list[float]] = []
        ready = [slot for slot in range(len(active)) if slot not in idle]
        while ready and len(confidence) < budget.depth:
            k = len(confidence)
            confidence.append([s.text.probability[len(s.token_ids) - self.prompt + k] for s in active])
            if self.confident:
                draft = Draft(0, idle=idle)
                if not draft.judge(active, confidence[-1]):
                    break
        counts = [len(confidence) * (slot in ready) for slot in range(len(active))]
        if prices:
            own = [[c[slot] for c in confidence] for slot in range(len(active))]
            counts = worth_rows(weighted(active, counts, own), prices)
        return counts, confidence


def best_fixed(world: BatchWorld) -> tuple[float, tuple[int, float]]:
    """Plain decoding's seconds over those of the best fixed way to draft, which knows everything but the texts: the
    most tokens of a chain, and the least probability of a chain so far that is worth a row. Without noise."""
    m, best = world.machine, (1.0, (0, 1.0))
    for depth in range(1, 13):
        for least in (0.0, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9):
            places, seconds = [0] * len(world.texts), len(world.texts) * world.prompt * m.prompt
            while active := [slot for slot, at in enumerate(places) if at < world.tokens]:
                counts, steps = [], 0
                for slot in active:
                    joint, count = 1.0, 0
                    while count < depth:
                        joint *= world.texts[slot].probability[places[slot] + count]
                        steps = max(steps, count + 1)
                        if joint < least:
                            break
                        count += 1
                    counts.append(count)
                seconds += steps * m.draft * m.verify(len(active)) + m.verify(len(active) + sum(counts))
                for slot, count in zip(active, counts, strict=True):
                    right = 0
                    while right < count and world.texts[slot].agrees[places[slot] + right]:
                        right += 1
                    places[slot] += right + 1
            speed = world.tokens * m.verify(len(world.texts)) / seconds
            best = max(best, (speed, (depth, least)))
    return best
