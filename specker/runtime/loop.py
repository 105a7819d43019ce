"""The decoding loop: rounds over the active requests, and continuous batching. A finished request's slot goes to the
next one; requests of unequal length share every launch.

prompts.py chooses which parts of prompts a step prefills. A request's tokens do not depend on the rest of the batch,
the batch's size or the time of admission.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from specker.cpu import one_torch_thread
from specker.cpu.pages import HugePages
from specker.model.cache import KVCache
from specker.model.decoder import Model
from specker.model.prefill import prompt_chunks
from specker.runtime.batches import Batches
from specker.runtime.control.auto import AcceptanceHistory
from specker.runtime.control.choose import NONE
from specker.runtime.control.policy import Budget
from specker.runtime.control.reasons import BEHIND, PROMPTS
from specker.runtime.draft_runner import DraftRunner, account
from specker.runtime.events import Event, cancelled, emitted
from specker.runtime.prompts import UNMEASURED_PROMPT_ROWS, Prompts
from specker.runtime.ranks.dist import Ranks
from specker.runtime.record import record
from specker.runtime.round.batch import Batch
from specker.runtime.round.drafter import Accepted, Draft, Drafter
from specker.runtime.round.graphs import Graphs
from specker.runtime.round.round import Round, collect, launch, send
from specker.runtime.round.state import Request, State
from specker.runtime.slots import Slots


@dataclass(eq=False)
class Loop:
    """The models, caches and state of decoding, and the requests."""

    target: Model
    cache: KVCache
    drafters: list[Drafter]  # as in `round.launch`
    largest: Budget  # of the policies' drafts
    fixed: bool  # whether rounds have fixed shapes where they can (option `graphs`)
    graphs: Graphs
    history: AcceptanceHistory  # what rounds cost and drafts achieve, for the policies
    size: int  # requests that decode at once
    reserved: int  # columns of a sequence past its text, for the largest lookahead
    prefixes: str = "off"  # which K/V of earlier texts a request takes over (slots.py)
    ranks: Ranks | None = None
    share: Callable[[Batch, Draft], Draft] | None = None  # `Round.share`
    pages: HugePages = field(default_factory=HugePages)  # of the models' weights
    trace: Callable[[dict[str, Any]], None] | None = None  # called with every request's part of every round
    pending: deque[Round] = field(init=False, default_factory=deque)  # launched rounds
    state: State = field(init=False)
    slots: Slots = field(init=False)
    prompts: Prompts = field(init=False)
    launched: int = field(init=False, default=0)  # rounds of fixed shape
    host_seconds: float = field(init=False, default=0.0)  # that it took to launch those
    finished: int = field(init=False, default=0)  # rounds
    _usual: list[float] = field(init=False, default_factory=lambda: [0.0, 0.0])  # rounds of fixed shape, their seconds
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
        chunks = prompt_chunks(self.target)
        own = [] if drafter.cache is None or drafter.cache is self.cache else [drafter.cache]
        caches = [self.cache, *own]
        self.batches = Batches(self.state, caches, self.largest, config.max_context)
        self.slots = Slots(
            caches,
            drafter,
            self.state,
            self.size,
            self.reserved,
            self.prefixes,
            chunks=chunks,
            lookahead=self.batches.lookahead,
            several=chunks is None and not self.fixed,
        )
        self.runner = None
        if self.drafters:
            chunk = UNMEASURED_PROMPT_ROWS if chunks is None else chunks.short
            captures = self.graphs.capture
            self.runner = DraftRunner(self.drafters, self.history, self.largest, chunk, self.ranks, captures)
        self.prompts = Prompts(
            self.target,
            self.slots,
            self.batches,
            self.runner,
            self.history.costs,
            self._compiled,
            self.ranks,
        )

    @property
    def drafter(self) -> Drafter | None:
        """The one that may have a model."""
        return self.drafters[0] if self.drafters else None

    @property
    def active(self) -> list[Request]:
        return self.slots.active

    @property
    def requests(self) -> list[Request]:
        """All that have not ended or still hold a slot."""
        return [*self.active, *self.slots.filling, *self.prompts.waiting]

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.requests)

    def clear(self, forget: bool = False) -> None:
        """Drop all requests; with `forget` also the K/V of earlier texts, which something else may have overwritten."""
        self.batches.forget_bucket()
        self.prompts.waiting.clear()
        self.prompts.joining = []
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
            self.prompts.admit_waiting()
        if not self.active:
            return []
        start = time.perf_counter()
        with self.threads():
            self._launch()
            if not self.pending:
                return []
            r = self.pending.popleft()
            running = [s for s in r.requests if not s.finished]
            results = self.finish(r)
        share = (time.perf_counter() - start - r.part_seconds) / max(1, len(running))
        for request in running:
            request.stats.wall += share
        events, known = [], self._known_ids
        source = self.drafters[r.batch.budget.part].source if self.drafters else ""
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
            self.prompts.joined(r)
        self.pages.after(time.perf_counter() - start)
        return events

    def _launch(self) -> None:
        """Launch rounds, as many as may be pending."""
        while not any(s.finished for s in self.active):
            ahead = sum(r.draft.size + 1 for r in self.pending)
            if len(self.pending) >= self._deep or (self.pending and not self.pending[-1].batch.fixed):
                return
            if all(len(s.token_ids) + len(self.pending) >= s.limit for s in self.active):
                return  # the pending rounds end every text
            r = self.start(ahead)
            if r is None:
                return
            self.pending.append(r)

    def retire(self) -> None:
        """Free the slots of requests that have ended. No round may be pending."""
        for request in [s for s in self.active if s.finished]:
            added, allowed = len(request.token_ids) - request.prompt_length, request.limit - request.prompt_length
            stats = request.stats
            self.history.ended(added / max(1, allowed), stats.accepted, stats.rounds - sum(stats.rests.values()))
            self.slots.retire(request)

    def cancel(self, request: Request) -> Event | None:
        """End a request, between two steps. Its slot is free after `retire`. Returns its last event; None if it has
        ended already."""
        if request.finished:
            return None
        if request in self.prompts.waiting:
            self.prompts.waiting.remove(request)
        elif request in self.slots.filling:
            self.slots.retire(request)
        return cancelled(request)

    @property
    def _deep(self) -> int:
        """Rounds that may be pending: two, so that the device need not wait for the host, unless the host must know
        the first one's tokens, or a prompt is to be prefilled after it."""
        if self.prompts.pressing or not self.fixed:
            return 1
        request = self.active[0]
        if not request.speculates or self.runner is None:
            return 2
        return 1 if self.share is not None or self.runner.synchronous(request) else 2

    @property
    def _known_ids(self) -> set[int] | None:
        """The ids of a trimmed head."""
        head = self.drafters[0].head if self.drafters else None
        return None if head is None else head.draftable

    # --- rounds

    def threads(self) -> AbstractContextManager[Any]:
        """Context manager for a round's launch and its results: with compiled kernels, which bring their own threads,
        torch's operators run in one."""
        return one_torch_thread(self._compiled)

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
            if len(requests) > 1 and self.slots.chunks is None:
                runner.stall = self.prompts.stall(len(requests))
            runner.more = bool(self.prompts.waiting or self.slots.filling)
            budget, reason = runner.shape(requests, bool(self.prompts.joining))
        fixed = self.fixed and not guides and (runner is None or runner.fixes(budget))
        if ahead and (not fixed or (budget.nodes and not self._chain)):
            return None  # a drafter that missed tokens must first know them
        if not fixed and runner is not None:
            budget = runner.clipped(requests, budget)
        r = self.new_round(budget, fixed, ahead)
        self.prompts.join(r)
        r.began, r.forced, r.skips_drafter, r.reason = began, forced, skips_drafter, reason
        r.batch.traced = self.trace is not None and any(s.traced for s in requests)
        if runner is not None:
            r.trial, r.warm = runner.chooser.trial and reason not in (BEHIND, PROMPTS), runner.chooser.warm
            r.paired = runner.chooser.paired
            r.prices = () if self.ranks is not None else runner.row_prices(requests, budget)
            r.reading, r.reads = runner.reading, runner.reads
        late = self.graphs.late
        launch(r, self.target, self.cache, [] if runner is None else runner.drafters)
        send(r, self.target)
        for request in requests if self.graphs.late > late else ():
            request.stats.captures += self.graphs.late - late
        self._chain = fixed and r.draft.size > 0 and not budget.part and not r.draft.idle
        if fixed:
            self.launched += 1
            self.host_seconds += time.perf_counter() - began
        return r

    def new_round(self, budget: Budget, fixed: bool, ahead: int = 0) -> Round:
        """A round of the active requests."""
        r = Round(self.batches.make([*self.active], budget, fixed, self.graphs, self.size, ahead))
        if self.ranks is not None:
            r.wait, r.share = self.ranks.wait, self.share
        return r

    @property
    def usual(self) -> float:
        """Mean seconds of a round of fixed shape; 0 before the first."""
        return self._usual[1] / max(1.0, self._usual[0])

    def finish(self, r: Round) -> list[tuple[Request, list[int], list[int]]]:
        """Wait for a round, extend the texts and update policies and the drafter. Returns (request, path, tokens)."""
        each, runner = collect(r), self.runner if r.requests[0].speculates else None
        start, n, launched = time.perf_counter(), len(r.requests), sum(r.seconds.values())
        if r.batch.fixed:
            self._usual[0] += 1
            self._usual[1] += launched
        else:
            r.other = start - r.began - launched
        self.prompts.observe(r)
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
            observed = r.host[r.draft.observed].tolist() if r.draft.observed else []
            usual = self.usual if self.fixed else runner.usual(r) if r.batch.aux_layers else 0.0
            accepted = Accepted(grown, observed, r.seconds, usual)
            runner.accept(r.batch, r.draft, accepted)
        for slot, path in enumerate(grown):
            if path:
                account(r, slot, path)
        self.prompts.observe_usual(r, launched, sum(map(len, grown)))
        r.seconds["commit"] = time.perf_counter() - start - r.seconds.get("watch", 0.0)
        if runner is not None:
            runner.learn(r, grown)
        for request in r.requests:
            for stage, spent in r.seconds.items():
                request.stats.seconds[stage] += spent / n
        self.finished += 1
        return out
