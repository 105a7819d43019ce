"""Which parts of prompts a step of the loop prefills, and how many rows.

Prompts are prefilled in parts, the oldest request's first. With the compiled layers of a CPU, whose rows have the same
bits in any company, parts of several prompts share a pass, and while other requests decode this is the round's verify
pass, which reads the weights anyway. Otherwise a step prefills one chunk of one prompt, or a slice of the layers of a
long chunk, and then runs a round.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from torch import Tensor

from specker.cpu import one_torch_thread
from specker.model.decoder import Model
from specker.model.prefill import COMPILED_CHUNK, Part, most_rows, prefill_chunk, prefill_parts
from specker.runtime.batches import Batches
from specker.runtime.control.costs import Costs
from specker.runtime.draft_runner import DraftRunner
from specker.runtime.ranks.dist import Ranks
from specker.runtime.round.round import Round
from specker.runtime.round.state import Request
from specker.runtime.slots import Slots

AT_ONCE = 2048  # tokens of prompts that a step prefills if nothing decodes meanwhile
STALL = 1.6  # usual rounds by which prompts may lengthen a round: the p95 between tokens stays below three of its usual
MIN_PROMPT_ROWS = 4  # that a step prefills then
UNMEASURED_PROMPT_ROWS = 32  # until a prefill was timed
MEASURE = 64  # rounds in a row with such rows, until one without them measures the usual time
NEW = 0.3  # weight of a new measurement


class Fill(NamedTuple):
    """A part of a prompt that a pass prefills."""

    request: Request
    begun: int  # the column of its first row
    rows: int
    ends: bool  # whether the prompt is then complete


@dataclass(eq=False)
class Running:
    """A chunk of a prompt, of which a slice runs before each round."""

    fill: Fill
    slices: Iterator[dict[int, Tensor]]  # see `prefill_chunk`
    seconds: float = 0.0  # that the slices so far took


@dataclass(eq=False)
class Pace:
    """Measured seconds of a prompt's row, and of rounds without rows of prompts."""

    row: float = 0.0  # smoothed; 0: not measured
    rounds: dict[int, float] = field(default_factory=dict)  # by sequences, smoothed
    joined: int = 0  # rounds in a row that had rows of prompts

    def observe_row(self, seconds: float) -> None:
        self.row += (NEW if self.row else 1.0) * (seconds - self.row)

    def observe_round(self, n: int, seconds: float) -> None:
        usual = self.rounds.get(n, seconds)
        self.rounds[n] = usual + NEW * (min(seconds, 2 * usual) - usual)

    def usual(self, n: int) -> float:
        """The measured seconds of a round of n sequences. If n was never measured: those of the nearest n, plus half a
        prompt row's time for each further sequence (a guess between 0 and 1). 0 if unknown."""
        if not self.rounds:
            return 0.0
        nearest = min(self.rounds, key=lambda measured: abs(measured - n))
        usual = self.rounds[nearest]
        return max(usual / 2, usual + (n - nearest) * self.row / 2)


@dataclass(eq=False)
class Prompts:
    """The requests that wait for a slot, and the prompts that are prefilled in parts."""

    target: Model
    slots: Slots
    batches: Batches
    runner: DraftRunner | None
    costs: Costs  # learns what rows cost
    compiled: bool  # whether compiled layers, which bring their own threads, run all models
    ranks: Ranks | None = None  # whose measured times differ, and which must prefill the same rows
    waiting: deque[Request] = field(default_factory=deque)
    joining: list[Fill] = field(default_factory=list)  # parts for the next round's verify pass
    pace: Pace = field(default_factory=Pace)
    _running: Running | None = None
    _last: tuple[int, float] = (0, 0.0)  # the last round's rows, and seconds of its draft

    # --- what the next pass takes

    def admit_waiting(self) -> None:
        """Prefill prompts, the oldest request's first. If nothing decodes, that is done here. The rows that the next
        round has room for are left to its verify pass if prompts share passes, otherwise one prompt has a chunk."""
        alone, done, self.joining = not self.slots.active, 0, []
        while (self.waiting or self.slots.filling) and done < (AT_ONCE if alone else self._chunk()):
            fills = self._fills(alone)
            if self.slots.several and not alone:
                self.joining = fills
                return
            if not fills:
                assert self.slots.active or not self.waiting, "no slot holds a page, and yet a text that fits does not"
                return
            if not self._prefill(fills, alone):
                return
            done += sum(fill.rows for fill in fills)

    def admit(self, request: Request) -> None:
        """Admit a request and prefill its whole prompt."""
        self._begin(request)
        while request in self.slots.filling:
            if (fill := self._fill(request, COMPILED_CHUNK)) is not None:
                self._prefill([fill], True)

    @property
    def pressing(self) -> bool:
        """Whether a prompt is to be prefilled before the next round."""
        return bool(self.slots.filling) or bool(self.waiting and self.slots.admits(self.waiting[0]))

    def _fills(self, alone: bool) -> list[Fill]:
        """The parts of prompts that the next pass takes: as many rows as may lengthen a round or, if nothing decodes,
        a chunk."""
        left = COMPILED_CHUNK if alone else self._chunk()
        fills: list[Fill] = []
        while left > 0 and (request := self._next(len(fills))) is not None:
            fill = self._fill(request, left)
            if fill is not None:
                fills.append(fill)
                left -= fill.rows
            if fills and not self.slots.several:
                break
        return fills

    def _next(self, taken: int) -> Request | None:
        """The oldest request of which no part is taken; admits one if there is room."""
        filling = list(self.slots.filling)
        if taken < len(filling):
            return filling[taken]
        if not self.waiting or not self.slots.admits(self.waiting[0]):
            return None
        request = self.waiting.popleft()
        self._begin(request)
        return request

    def _fill(self, request: Request, most: int) -> Fill | None:
        """The next part of a prompt: to the end of its chunk or, where bits do not depend on chunks, up to `most` rows.
        None if the prompt is complete; then its request decodes from now on."""
        cache, chunks, end = self.slots.cache, self.slots.chunks, len(request.token_ids) - 1
        begun = cache.exact_len[self.slots.filling[request]]
        if begun == end:
            request.progress(end)
            self._activate(request)
            return None
        most = min(most if chunks is None else chunks.rows(begun), most_rows(self.target, cache))
        count = min(self.slots.stop(request, begun) - begun, most)
        return Fill(request, begun, count, begun + count == end)

    def _chunk(self) -> int:
        """Rows of prompts to prefill with the next round: as many as lengthen it by STALL usual rounds, or by half of
        that if a draft model may have prompts to prefill, too. The usual round is that of all requests that are here,
        as if they all decoded: a loaded server gains more by large passes. Where bits depend on chunks: as many as one
        has, of several short prompts too. A round without such rows, now and then, measures what is usual."""
        if self.slots.chunks is not None:
            return self.slots.chunks.short
        return self._measured_chunk() if self.ranks is None else self.ranks.least(self._measured_chunk())

    def _measured_chunk(self) -> int:
        """`_chunk` where bits do not depend on it, by this process's own measurements."""
        n = len(self.slots.active)
        usual = self.pace.usual(min(self.slots.size, n + len(self.slots.filling) + len(self.waiting)))
        if n and (not usual or self.pace.joined >= MEASURE):
            return 0
        if not usual or not self.pace.row:
            return UNMEASURED_PROMPT_ROWS
        rows, drafting = self._last if self._last[0] >= n else (n, 0.0)
        longer = usual * STALL / self._readers
        if not self.slots.several:  # a pass of their own
            return max(MIN_PROMPT_ROWS, min(COMPILED_CHUNK, int(longer / self.pace.row)))
        most = self.target.stack.most if self.target.stack is not None else COMPILED_CHUNK
        within = int((usual + longer - drafting) / self.pace.row) - rows
        return max(MIN_PROMPT_ROWS, min(COMPILED_CHUNK, most - rows, within))

    @property
    def _readers(self) -> int:
        """Models that prefill prompts before or in the same round."""
        active = self.slots.active
        target_alone = self.runner is None or not active or self.runner.yields_to_prompts(active)
        return 1 if target_alone and self.slots.several else len(self.slots.caches)

    def stall(self, n: int) -> float:
        """Seconds by which prompts may lengthen a round of n sequences."""
        return STALL / self._readers * self.pace.usual(n)

    # --- passes

    def _begin(self, request: Request) -> None:
        self.batches.forget_bucket()
        self.slots.begin(request)
        self.batches.idle.discard(self.slots.filling[request])

    def _prefill(self, fills: list[Fill], alone: bool) -> bool:
        """Prefill parts of prompts while no round runs; of a chunk only its next slice, unless nothing decodes. Returns
        whether the parts are complete."""
        start = time.perf_counter()
        self.batches.see(0)
        with one_torch_thread(self.compiled and self.slots.chunks is None):
            if self.slots.several:
                parts = [self._part(fill) for fill in fills]
                _, rows = prefill_parts(self.target, self.slots.cache, parts, self._read_layers(fills))
            else:
                [fill], running = fills, self._running
                if running is None or running.fill != fill:  # what is left of a cancelled one is dropped
                    slices = prefill_chunk(self.target, self.slots.cache, self._part(fill), self._read_layers(fills))
                    running = self._running = Running(fill, slices)
                rows = list(running.slices if alone else islice(running.slices, 1))[-1:]
                if self.slots.cache.exact_len[self.slots.filling[fill.request]] == fill.begun:
                    running.seconds += time.perf_counter() - start
                    return False
                self._running, start = None, start - running.seconds
        self._filled(fills, rows, start)
        self._observe_rows(sum(fill.rows for fill in fills), time.perf_counter() - start)
        return True

    def join(self, r: Round) -> None:
        """Give a round the parts of prompts that its verify pass takes."""
        if self.joining:
            r.parts, r.part_layers = [self._part(fill) for fill in self.joining], self._read_layers(self.joining)

    def joined(self, r: Round) -> None:
        """A round with parts of prompts has ended."""
        fills, self.joining = self.joining, []
        self._filled(fills, r.part_rows, time.perf_counter() - r.part_seconds)

    def observe(self, r: Round) -> None:
        """Learn from a round; its parts of prompts are charged their share of the verify pass."""
        self._last = r.rows, r.seconds["draft"]
        if r.parts:
            count = sum(len(part.tokens) for part in r.parts)
            self._observe_rows(r.rows + count, r.seconds["verify"] + r.seconds["accept"])
            r.part_seconds = r.seconds["verify"] * count / (r.rows + count)
            r.seconds["verify"] -= r.part_seconds

    def observe_usual(self, r: Round, seconds: float, tokens: int) -> None:
        """Learn the usual time between two tokens of a text from a round that took `seconds` and committed `tokens`. It
        says nothing with rows of prompts or the drafter's prefill. Right after a pass of their own for prompts a round
        takes longer, because the caches hold other data."""
        n = len(r.requests)
        apart = self.slots.several or not self.slots.filling or n not in self.pace.rounds
        if apart and tokens and not r.parts and not r.behind:
            self.pace.observe_round(n, seconds * n / tokens)
        self.pace.joined = self.pace.joined + 1 if r.parts else 0

    def _part(self, fill: Fill) -> Part:
        request, begun, count, _ = fill
        return Part(self.slots.filling[request], request.token_ids[begun : begun + count])

    def _read_layers(self, fills: Sequence[Fill]) -> tuple[int, ...]:
        """The depths of which the drafter reads the hidden rows of these prompts."""
        drafter = self.slots.drafter
        reads = any(f.request.speculates and drafter.reads_prompt(*f[:3]) for f in fills)
        return drafter.aux_layers if reads else ()

    def _observe_rows(self, count: int, seconds: float) -> None:
        """Learn from a pass over `count` rows, most of them of prompts."""
        if count >= MIN_PROMPT_ROWS:
            self.pace.observe_row(seconds / count)
            if self.slots.several:
                self.costs.observe_rows(count, seconds)

    def _filled(self, fills: Sequence[Fill], rows: Sequence[dict[int, Tensor]], start: float) -> None:
        """Parts of prompts were forwarded, in a time that began at `start`: each is charged its rows' share of it. The
        requests whose prompts are complete decode from now on."""
        for fill, own in zip(fills, rows, strict=True):
            request = fill.request
            request.stats.prefilled += fill.rows
            self.slots.prefilled(request, fill.begun)
            if own and request.speculates:
                with one_torch_thread(self.compiled):
                    self.slots.drafter.read(self.slots.filling[request], request, fill.begun, own)
            request.progress(fill.begun + fill.rows)
        for fill in fills:
            if fill.ends:
                self._activate(fill.request)
        each = (time.perf_counter() - start) / sum(fill.rows for fill in fills)
        for request, _, count, _ in fills:
            request.stats.seconds["prefill"] += each * count
            request.stats.wall += each * count

    def _activate(self, request: Request) -> None:
        end, chunks = len(request.token_ids) - 1, self.slots.chunks
        exact = (request.prefixes or self.slots.prefixes) != "all"
        request.prefilled = (end if chunks is None else chunks.whole(end)) if exact else 0
        self.slots.activate(request)
        self.batches.idle.discard(len(self.slots.active) - 1)
        if request.speculates and self.runner is not None:
            self.runner.chooser.admitted()
