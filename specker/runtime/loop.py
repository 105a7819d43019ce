"""The decoding loop: rounds over the active requests, and continuous batching. A finished request's slot goes to the
next one; requests of unequal length share every launch.

Prompts are prefilled in parts, the oldest request's first. With the compiled layers of a CPU, whose rows have the same
bits in any company, parts of several prompts share a pass, and while other requests decode this is the round's verify
pass, which reads the weights anyway. Otherwise a step prefills one chunk of one prompt and then runs a round. A
request's tokens do not depend on the rest of the batch, the batch's size or the time of admission.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specker.cpu import one_torch_thread
from specker.model.cache import KVCache
from specker.model.decoder import Model
from specker.model.prefill import (
    COMPILED_CHUNK,
    Part,
    most_rows,
    prefill,
    prefill_alignment,
    prefill_chunk,
    prefill_parts,
)
from specker.runtime.batches import Batches
from specker.runtime.control.auto import AcceptanceHistory
from specker.runtime.control.choose import NONE
from specker.runtime.control.policy import Budget
from specker.runtime.draft_runner import BEHIND, PROMPTS, DraftRunner, account
from specker.runtime.events import Event, cancelled, emitted
from specker.runtime.ranks.dist import Ranks
from specker.runtime.record import record
from specker.runtime.round.drafter import Accepted, Drafter
from specker.runtime.round.graphs import Graphs
from specker.runtime.round.round import Round, collect, launch, send
from specker.runtime.round.state import Request, State
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
class Loop:
    """The models, caches and state of decoding, and the requests."""

    target: Model
    cache: KVCache
    drafter: Drafter | None
    largest: Budget  # of the policies' drafts
    fixed: bool  # whether rounds have fixed shapes where they can (option `graphs`)
    graphs: Graphs
    history: AcceptanceHistory  # what rounds cost and drafts achieve, for the policies
    size: int  # requests that decode at once
    reserved: int  # columns of a sequence past its text, for the largest lookahead
    prefixes: str = "off"  # which K/V of earlier texts a request takes over (slots.py)
    ranks: Ranks | None = None
    trace: Callable[[dict[str, Any]], None] | None = None  # called with every request's part of every round
    waiting: deque[Request] = field(init=False, default_factory=deque)
    pending: deque[Round] = field(init=False, default_factory=deque)  # launched rounds
    state: State = field(init=False)
    slots: Slots = field(init=False)
    launched: int = field(init=False, default=0)  # rounds of fixed shape
    host_seconds: float = field(init=False, default=0.0)  # that it took to launch those
    finished: int = field(init=False, default=0)  # rounds
    _usual: list[float] = field(init=False, default_factory=lambda: [0.0, 0.0])  # rounds of fixed shape, their seconds
    _row_seconds: float = field(init=False, default=0.0)  # of a prompt's prefill, smoothed
    _round_seconds: dict[int, float] = field(init=False, default_factory=dict)  # by sequences, smoothed, usual ones
    _joining: list[Fill] = field(init=False, default_factory=list)  # parts of prompts for the next round's verify pass
    _joined: int = field(init=False, default=0)  # rounds in a row with such parts
    _last: tuple[int, float] = field(init=False, default=(0, 0.0))  # the last round's rows, and seconds of its draft
    _chain: bool = field(init=False, default=False)  # whether the last round was of fixed shape and drafted

    def __post_init__(self) -> None:
        drafter = self.drafter or Drafter()
        model, config = drafter.model or self.target, self.target.config
        self._compiled = all(m.stack is not None for m in (self.target, model))
        self.state = State.empty(
            self.target.dtype,
            self.target.device,
            sequences=self.size,
            rows=self.largest.nodes + 1,
            wide=model.config.hidden_size,
            vocab=len(self.target.head),  # the rank's share of a split model
            columns=config.max_context,
            aux=(len(drafter.aux_layers), config.hidden_size),
        )
        alignment = prefill_alignment(self.target)
        own = [] if drafter.cache is None or drafter.cache is self.cache else [drafter.cache]
        self.batches = Batches(self.state, [self.cache, *own], self.largest, config.max_context)
        self.slots = Slots(
            self.cache,
            self.drafter,
            self.state,
            self.size,
            self.reserved,
            self.prefixes,
            prefix_alignment=alignment,
            lookahead=self.batches.lookahead,
            several=alignment == 1 and not self.fixed,
        )
        self.runner = None
        if self.drafter is not None:
            chunk = prefill_chunk(self.target) if alignment > 1 else UNMEASURED_PROMPT_ROWS
            captures = self.graphs.capture
            self.runner = DraftRunner(self.drafter, self.history, self.largest, chunk, self.ranks, captures)

    @property
    def active(self) -> list[Request]:
        return self.slots.active

    @property
    def requests(self) -> list[Request]:
        """All that have not ended or still hold a slot."""
        return [*self.active, *self.slots.filling, *self.waiting]

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.requests)

    def clear(self, forget: bool = False) -> None:
        """Drop all requests; with `forget` also the K/V of earlier texts, which something else may have overwritten."""
        self.batches.forget_bucket()
        self.waiting.clear()
        self._joining = []
        try:
            while self.pending:
                collect(self.pending.popleft())
        finally:
            self.pending.clear()
            self.slots.clear(forget)

    # --- steps

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Prefill and admit what is waiting, run a round, and return what it added."""
        if not self.pending:
            self.retire()  # what was cancelled
            self._admit()
        if not self.active:
            return []
        start = time.perf_counter()
        while not any(s.finished for s in self.active):
            ahead = sum(r.draft.size + 1 for r in self.pending)
            if len(self.pending) >= self._deep or (self.pending and not self.pending[-1].batch.fixed):
                break
            if all(len(s.token_ids) + len(self.pending) >= s.limit for s in self.active):
                break  # the pending rounds end every text
            with self.threads():
                r = self.start(ahead)
            if r is None:
                break
            self.pending.append(r)
        if not self.pending:
            return []
        r = self.pending.popleft()
        running = [s for s in r.requests if not s.finished]
        with self.threads():
            results = self.finish(r)
        share = (time.perf_counter() - start - r.part_seconds) / max(1, len(running))
        for request in running:
            request.stats.wall += share
        events, known = [], self._known_ids
        source = "" if self.drafter is None else self.drafter.source
        for slot, (request, path, tokens) in enumerate(results):
            if request in running and (tokens or slot in r.broken or request.guide is not None):
                ids = known if request.speculates else None
                events.append(emitted(r, slot, path, tokens, ids))
                if self.trace is not None and request.traced and tokens:
                    self.trace(record(r, self.finished - 1, slot, path, events[-1], ids, source))
        if all(s.finished for s in self.active):
            while self.pending:  # rounds that were launched before this was known
                collect(self.pending.popleft())
        if not self.pending:
            self.retire()
        if r.parts:
            fills, self._joining = self._joining, []
            self._filled(fills, r.part_rows, time.perf_counter() - r.part_seconds)
        return events

    def retire(self) -> None:
        """Free the slots of requests that have ended. No round may be pending."""
        for request in [s for s in self.active if s.finished]:
            self.slots.retire(request)

    def cancel(self, request: Request) -> Event | None:
        """End a request, between two steps. Its slot is free after `retire`. Returns its last event; None if it has
        ended already."""
        if request.finished:
            return None
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.slots.filling:
            self.slots.retire(request)
        return cancelled(request)

    @property
    def _deep(self) -> int:
        """Rounds that may be pending: two, so that the device need not wait for the host, unless the host must know
        the first one's tokens, or a prompt is to be prefilled after it."""
        waits = bool(self.slots.filling) or (self.waiting and self.slots.admits(self.waiting[0]))
        if waits or not self.fixed:
            return 1
        request = self.active[0]
        return 1 if request.speculates and self.runner is not None and self.runner.synchronous(request) else 2

    @property
    def _known_ids(self) -> set[int] | None:
        """The ids of a trimmed head."""
        head = None if self.drafter is None else self.drafter.head
        return None if head is None else head.draftable

    # --- prompts

    def _admit(self) -> None:
        """Prefill prompts, the oldest request's first. If nothing decodes, that is done here. The rows that the next
        round has room for are left to its verify pass if prompts share passes, otherwise one prompt has a chunk."""
        alone, done, self._joining = not self.active, 0, []
        while (self.waiting or self.slots.filling) and done < (AT_ONCE if alone else self._chunk()):
            fills = self._fills(alone)
            if self.slots.several and not alone:
                self._joining = fills
                return
            if not fills:
                assert self.active or not self.waiting, "no slot holds a page, and yet a text that fits does not"
                return
            self._prefill(fills)
            done += sum(fill.rows for fill in fills)

    def admit(self, request: Request) -> None:
        """Admit a request and prefill its whole prompt."""
        self._begin(request)
        while request in self.slots.filling:
            if (fill := self._fill(request, prefill_chunk(self.target))) is not None:
                self._prefill([fill])

    def _fills(self, alone: bool) -> list[Fill]:
        """The parts of prompts that the next pass takes: as many rows as may lengthen a round or, if nothing decodes,
        a chunk."""
        left = prefill_chunk(self.target) if alone else self._chunk()
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
        """The next part of a prompt, up to `most` rows, to the end of a chunk. None if the prompt is complete; then its
        request decodes from now on."""
        slot = self.slots.filling[request]
        begun, end, alignment = self.cache.exact_len[slot], len(request.token_ids) - 1, self.slots.prefix_alignment
        if begun == end:
            request.progress(end)
            self._activate(request)
            return None
        most = most - begun % most if alignment > 1 else min(most, most_rows(self.target, self.cache))
        count = min(self.slots.stop(request, begun) - begun, most)
        return Fill(request, begun, count, begun + count == end)

    def _chunk(self) -> int:
        """Rows of prompts to prefill with the next round: as many as lengthen it by STALL usual rounds, or by half of
        that if a draft model may have prompts to prefill, too. The usual round is that of all requests that are here,
        as if they all decoded: a loaded server gains more by large passes. Where bits depend on the chunk it has one
        size. A round without such rows, now and then, measures what is usual."""
        if self.slots.prefix_alignment > 1:
            return prefill_chunk(self.target)
        n = len(self.active)
        usual = self._usual_seconds(min(self.size, n + len(self.slots.filling) + len(self.waiting)))
        if n and (not usual or self._joined >= MEASURE):
            return 0
        if not usual or not self._row_seconds:
            return UNMEASURED_PROMPT_ROWS
        rows, drafting = self._last if self._last[0] >= n else (n, 0.0)
        longer = usual * STALL / self._readers
        if not self.slots.several:  # a pass of their own
            return max(MIN_PROMPT_ROWS, min(COMPILED_CHUNK, int(longer / self._row_seconds)))
        most = self.target.stack.most if self.target.stack is not None else COMPILED_CHUNK
        within = int((usual + longer - drafting) / self._row_seconds) - rows
        return max(MIN_PROMPT_ROWS, min(COMPILED_CHUNK, most - rows, within))

    @property
    def _readers(self) -> int:
        """Models that prefill prompts before or in the same round."""
        target_alone = self.runner is None or not self.active or self.runner.yields_to_prompts(self.active)
        return 1 if target_alone and self.slots.several else len(self.slots.caches)

    def _usual_seconds(self, n: int) -> float:
        """The measured seconds of a round of n sequences without rows of prompts. If n was never measured: those of the
        nearest n, plus half a prompt row's time for each further sequence (a guess between 0 and 1). 0 if unknown."""
        if not self._round_seconds:
            return 0.0
        nearest = min(self._round_seconds, key=lambda measured: abs(measured - n))
        usual = self._round_seconds[nearest]
        return max(usual / 2, usual + (n - nearest) * self._row_seconds / 2)

    def _begin(self, request: Request) -> None:
        self.batches.forget_bucket()
        self.slots.begin(request)
        self.batches.idle.discard(self.slots.filling[request])

    def _prefill(self, fills: list[Fill]) -> None:
        """Prefill parts of prompts while no round runs."""
        start = time.perf_counter()
        self.batches.see(0)
        aux_layers, parts = self._read_layers(fills), [self._part(fill) for fill in fills]
        with self.threads() if self.slots.prefix_alignment == 1 else nullcontext():
            if self.slots.several:
                _, rows = prefill_parts(self.target, self.cache, parts, aux_layers)
            else:
                [(slot, tokens)] = parts
                rows = [prefill(self.target, self.cache, tokens, aux_layers, len(tokens), len(tokens), slot)]
        self._filled(fills, rows, start)
        self._observe_rows(sum(fill.rows for fill in fills), time.perf_counter() - start)

    def _part(self, fill: Fill) -> Part:
        request, begun, count, _ = fill
        return Part(self.slots.filling[request], request.token_ids[begun : begun + count])

    def _read_layers(self, fills: Sequence[Fill]) -> tuple[int, ...]:
        """The depths of which the drafter reads the hidden rows of these prompts."""
        drafter = self.drafter
        if drafter is None or not any(f.request.speculates and drafter.reads_prompt(*f[:3]) for f in fills):
            return ()
        return drafter.aux_layers

    def _observe_rows(self, count: int, seconds: float) -> None:
        """Learn from a pass over `count` rows, most of them of prompts."""
        if count >= MIN_PROMPT_ROWS:
            self._row_seconds += (NEW if self._row_seconds else 1.0) * (seconds / count - self._row_seconds)
            if self.slots.several:
                self.history.costs.observe_rows(count, seconds)

    def _filled(self, fills: Sequence[Fill], rows: Sequence[dict[int, Tensor]], start: float) -> None:
        """Parts of prompts were forwarded, in a time that began at `start`: each is charged its rows' share of it. The
        requests whose prompts are complete decode from now on."""
        for fill, own in zip(fills, rows, strict=True):
            request = fill.request
            request.stats.prefilled += fill.rows
            self.slots.prefilled(request, fill.begun)
            if self.drafter is not None and own and request.speculates:
                with self.threads():
                    self.drafter.read(self.slots.filling[request], request, fill.begun, own)
            request.progress(fill.begun + fill.rows)
        for fill in fills:
            if fill.ends:
                self._activate(fill.request)
        each = (time.perf_counter() - start) / sum(fill.rows for fill in fills)
        for request, _, count, _ in fills:
            request.stats.seconds["prefill"] += each * count
            request.stats.wall += each * count

    def _activate(self, request: Request) -> None:
        end, alignment = len(request.token_ids) - 1, self.slots.prefix_alignment
        request.prefilled = end // alignment * alignment if (request.prefixes or self.slots.prefixes) != "all" else 0
        self.slots.activate(request)
        self.batches.idle.discard(len(self.active) - 1)
        self._chain = False
        if request.speculates and self.runner is not None:
            self.runner.chooser.admitted()

    # --- rounds

    def threads(self) -> AbstractContextManager[Any]:
        """Context manager for a round's launch and its results: with compiled kernels, which bring their own threads,
        torch's operators run in one."""
        return one_torch_thread() if self._compiled else nullcontext()

    def start(self, ahead: int = 0) -> Round | None:
        """Launch a round of the active requests. `ahead`: tokens that pending rounds may add to each text. None if
        rounds are pending and the host must know the texts' lengths."""
        began, requests = time.perf_counter(), self.active
        runner, budget, reason = (self.runner if requests[0].speculates else None), NONE, ""
        if skips_drafter := runner is not None and runner.will_skip_drafter(len(requests)):
            reason = runner.chooser.reason
            runner = None
        guides = [s.guide for s in requests if s.guide is not None]
        forced = runner is not None and len(guides) == len(requests) and all(guide.forced for guide in guides)
        if runner is not None and not forced:
            if len(requests) > 1 and self.slots.prefix_alignment == 1:
                runner.stall = STALL / self._readers * self._usual_seconds(len(requests))
            budget, reason = runner.shape(requests, bool(self._joining))
        fixed = self.fixed and not guides and (runner is None or runner.fixes(budget))
        if ahead and (not fixed or (budget.nodes and not self._chain)):
            return None  # a drafter that missed tokens must first know them
        if not fixed and runner is not None:
            budget = runner.clipped(requests, budget)
        r = self.new_round(budget, fixed, ahead)
        if self._joining:
            r.parts, r.part_layers = [self._part(fill) for fill in self._joining], self._read_layers(self._joining)
        r.began, r.forced, r.skips_drafter, r.reason = began, forced, skips_drafter, reason
        r.batch.traced = self.trace is not None and any(s.traced for s in requests)
        if runner is not None:
            r.trial, r.warm = runner.chooser.trial and reason not in (BEHIND, PROMPTS), runner.chooser.warm
            r.price = 0.0 if self.ranks is not None else runner.price(requests, budget)
        late = self.graphs.late
        launch(r, self.target, self.cache, None if runner is None else runner.drafter)
        send(r, self.target)
        for request in requests if self.graphs.late > late else ():
            request.stats.captures += self.graphs.late - late
        self._chain = fixed and r.draft.size > 0 and not budget.part
        if fixed:
            self.launched += 1
            self.host_seconds += time.perf_counter() - began
        return r

    def _observe_usual(self, r: Round, seconds: float, tokens: int) -> None:
        """Learn the usual time between two tokens of a text from a round that took `seconds` and committed `tokens`. It
        says nothing with rows of prompts or the drafter's prefill. Right after a pass of their own for prompts a round
        takes longer, because the caches hold other data."""
        n = len(r.requests)
        apart = self.slots.several or not self.slots.filling or n not in self._round_seconds
        if apart and tokens and not r.parts and not r.behind:
            each = seconds * n / tokens
            usual = self._round_seconds.get(n, each)
            self._round_seconds[n] = usual + NEW * (min(each, 2 * usual) - usual)
        self._joined = self._joined + 1 if r.parts else 0

    def new_round(self, budget: Budget, fixed: bool, ahead: int = 0) -> Round:
        """A round of the active requests."""
        r = Round(self.batches.make([*self.active], budget, fixed, self.graphs, self.size, ahead))
        if self.ranks is not None:
            r.wait = self.ranks.wait
        return r

    @property
    def usual(self) -> float:
        """Mean seconds of a round of fixed shape; 0 before the first."""
        return self._usual[1] / max(1.0, self._usual[0])

    def finish(self, r: Round) -> list[tuple[Request, list[int], list[int]]]:
        """Wait for a round, extend the texts and update policies and the drafter. Returns (request, path, tokens)."""
        each, runner = collect(r), self.runner if r.requests[0].speculates else None
        start, n, launched = time.perf_counter(), len(r.requests), sum(r.seconds.values())
        self._last = r.rows, launched - r.seconds["verify"] - r.seconds["accept"]
        if r.batch.fixed:
            self._usual[0] += 1
            self._usual[1] += launched
        else:
            r.other = start - r.began - launched
        if r.parts:
            count = sum(len(part.tokens) for part in r.parts)
            self._observe_rows(r.rows + count, r.seconds["verify"] + r.seconds["accept"])
            r.part_seconds = r.seconds["verify"] * count / (r.rows + count)
            r.seconds["verify"] -= r.part_seconds
        out, grown = [], []
        for slot, (request, (path, tokens)) in enumerate(zip(r.requests, each, strict=True)):
            left = request.limit - len(request.token_ids)  # a draft of fixed shape may go beyond the end
            if len(path) > left:
                r.cut.add(slot)
            path, tokens = path[:left], tokens[:left]
            if request.guide is not None and not request.finished:
                count = request.guide.follow(tokens)
                if count < len(path):
                    r.cut.add(slot)
                path, tokens = path[:count], tokens[:count]
            out.append((request, path, tokens))
            grown.append(path if tokens and not request.finished else [])
            if grown[-1]:
                request.token_ids += tokens
                self.cache.exact_len[slot] = len(request.token_ids) - 1
        if runner is not None and not r.skips_drafter:
            drafted = r.host["draft"].tolist() if r.draft.observed else []
            usual = self.usual if self.fixed else runner.usual(r) if r.batch.aux_layers else 0.0
            accepted = Accepted(grown, drafted, r.seconds, usual)
            runner.drafter.accept(r.batch, r.draft, accepted)
        for slot, path in enumerate(grown):
            if path:
                account(r, slot, path)
        self._observe_usual(r, launched, sum(map(len, grown)))
        r.seconds["commit"] = time.perf_counter() - start - r.seconds.get("watch", 0.0)
        if runner is not None:
            runner.learn(r, grown)
        for request in r.requests:
            for stage, spent in r.seconds.items():
                request.stats.seconds[stage] += spent / n
        self.finished += 1
        return out
