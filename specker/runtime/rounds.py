"""Rounds of static shape, as CUDA graphs on a GPU: what a round launches does not depend on what the last one decided.

How long the text is, where rows stand, what the draft was and the numbers of the draw are kept in `State`, on the
device; a round is a few stretches of work over it (draft, verify, accept), each captured once for its number of rows
and for how far attention reaches, and replayed. The host reads what a round committed by an asynchronous copy, one
round behind where it can: the next round is on its way before the last one's tokens are looked at, so a stop id may
waste one round, whose tokens are never emitted. A drafter that the host has a say in is waited for: a confidence of 4
bytes a draft token (DEL, draft-and-verify), the candidates of a block where a path is searched (DiffuSpec).

On a CPU the same rounds run without graphs (`--graphs on`): every stretch of work then is what a graph would hold.
What has no static form runs as loop.py's own step: the first rounds of a prompt shorter than a draft, a drafter at the
end of its context, rounds in which DEL watches other layers, `--calibrate` other than every, `--diffusion-prefix exact`
and the chunks of a diffusion drafter.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specker.config import Sampling
from specker.kernels.accept import accept_walk
from specker.kernels.ancestors import MAX_WORDS
from specker.kernels.kv import kv_commit
from specker.runtime.draft import Draft, Resume
from specker.runtime.model.cache import KVCache, Start
from specker.runtime.model.decoder import Model
from specker.runtime.ops.rounds import advance
from specker.runtime.policy import Budget
from specker.runtime.sampling import Held, kind, pack
from specker.runtime.stats import DiffusionStats
from specker.runtime.strategies.diffuspec import DiffusionDrafter
from specker.runtime.strategies.draft import AutoregressiveDrafter
from specker.runtime.strategies.dynamic_exit import EarlyExitDrafter
from specker.runtime.synthetic import synthetic
from specker.runtime.verify import resume_static, verify_static

KINDS = Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.5, top_k=2)
REACHES = tuple(1024 * 4**n for n in range(6))  # columns that attention may look at; a capture for each
STAGES = ("draft", "verify", "accept")


class Graphs:
    """Stretches of work by name. On a GPU the first call runs one as it is, which compiles what it needs, the second
    captures it, and from then on it is replayed; elsewhere it just runs."""

    def __init__(self, capture: bool):
        self.capture, self.passes = capture, 2 if capture else 1  # `passes` until nothing is left to do once
        self.captured: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._seen: set[Hashable] = set()
        self._pool: Any = None

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        if not self.capture:
            work()
        elif key in self.captured:
            self.captured[key].replay()
        elif key not in self._seen:
            self._seen.add(key)
            work()
        else:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                work()
            self._pool = self._pool or graph.pool()
            self.captured[key] = graph
            graph.replay()


@dataclass(frozen=True)
class State:
    """What one round leaves to the next, at addresses that stay."""

    committed: Tensor  # [C] int64, the text
    length: Tensor  # [1] int64, tokens of it that count; the last is the root
    limit: Tensor  # [1] int64
    window: Tensor  # [rows] int64: the root, then the draft
    parents: Tensor  # [rows - 1] int64, of a tree
    step: Tensor  # [1] int64: draft tokens in the window, where they come one by one
    hidden: Tensor  # [rows, E of the drafter]: rows of a self-drafted chain at its exit, or those that guess a block
    confidence: Tensor  # [1] float32, the last draft token's log-probability
    positions: Tensor  # [rows] int64
    logits: Tensor  # [rows, V]
    report: Tensor  # [1 + 2 rows] int64, of `advance`
    draw: Tensor  # [4] int64, of `noise.pack_draw`

    @classmethod
    def empty(cls, model: Model, rows: int, wide: int) -> "State":
        """For drafts of up to rows - 1 tokens and hidden rows of `wide`."""
        device, vocab = model.device, model.head.shape[0]  # of a split model the part's
        wide_type = torch.float64 if model.dtype == torch.float64 else torch.float32

        def ints(n: int) -> Tensor:
            return torch.zeros(n, dtype=torch.int64, device=device)

        return cls(
            committed=ints(model.config.max_context + rows),
            length=ints(1),
            limit=ints(1),
            window=ints(rows),
            parents=ints(rows - 1),
            step=ints(1),
            hidden=torch.zeros(rows, wide, dtype=model.dtype, device=device),
            confidence=torch.zeros(1, dtype=wide_type, device=device),
            positions=ints(rows),
            logits=torch.zeros(rows, vocab, dtype=wide_type, device=device),
            report=ints(1 + 2 * rows),
            draw=ints(4),
        )


@dataclass
class Flight:
    """A round on its way."""

    drafted: int
    depth: int  # the longest path's tokens
    exit: int
    tree: bool
    confidence: tuple[float, ...]
    found: DiffusionStats | None
    report: Tensor  # on the host, once `done`
    tokens: Tensor | None  # the draft, likewise, where a policy asks what it was
    done: Any  # the event after the copy
    marks: list[Any]  # times, or events, around the stages

    @classmethod
    def of(cls, drafted: int, tree: bool, report: Tensor, exit: int = 0, now: Any = None) -> "Flight":
        return cls(drafted, drafted, exit, tree, (), None, report, None, None, [now])

    def outline(self) -> Draft:
        """What a policy may want to know of the draft."""
        draft = Draft.chain(torch.empty(self.drafted, dtype=torch.int64), confidence=self.confidence)
        return draft if self.found is None else draft.with_found(self.found)


@dataclass(frozen=True)
class Report:
    """What became of a round."""

    path: list[int]
    tokens: list[int]  # as many: those the target drew along the path
    flight: Flight


class StaticRounds:
    """The rounds of one engine's requests, one request after another."""

    def __init__(self, target: Model, cache: KVCache, drafter: Any, nodes: int, depth: int, capture: bool):
        """For drafts of up to `nodes` tokens on paths of up to `depth`; `capture`: as CUDA graphs."""
        self.target, self.cache, self.drafter = target, cache, drafter
        self.most, self.catch_up = nodes, depth + 1
        self.trees = nodes > depth
        self.graphs = Graphs(capture)
        wide = target.config.hidden_size if drafter is None else drafter.model.config.hidden_size
        self.state = State.empty(target, nodes + 1, wide)
        self.launched, self.host_seconds = 0, 0.0  # rounds, and what it took to launch them
        self._collected, self._seconds_of = 0, 0.0  # rounds, and what their stages took
        # What a round looks at and writes beyond the text; a reach that has no room for it within the context is none.
        self._beyond = 2 * self.catch_up + nodes
        self._reaches = (*(r for r in REACHES if r + self._beyond < target.config.max_context), cache.capacity)
        self._counting = torch.arange(max(nodes, depth) + 1, device=target.device)
        self._flying: deque[Flight] = deque()
        self._sampling = Held()  # of the request that is loaded
        self._agrees: Tensor | None = None
        self.loaded = False  # whether the device knows the request
        self._reach = 0

    # --- a request

    def reset(self) -> None:
        """Forget the last request, and what of it may still be on its way."""
        self._flying.clear()
        self._leave()

    def load(self, committed: list[int], limit: int, sampling: Sampling, agrees: Tensor | None = None) -> None:
        """Bring a request, its text so far or anew, to the device. `agrees` [positions]: of an acceptance that is given
        (synthetic.py), at an address that stays."""
        s, n = self.state, len(committed)
        s.committed[:n] = torch.tensor(committed)
        s.length.fill_(n)
        s.limit.fill_(limit)
        s.window[:1] = committed[-1]
        s.draw.copy_(pack(sampling))
        self._sampling = Held(sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed, s.draw)
        self._agrees = agrees
        self.loaded = True

    def fits(self, committed: int, budget: Budget, drafting: bool) -> bool:
        """Whether a text of so many tokens has room for a round of static shape: before it for the tokens that are
        forwarded again, behind it in the drafter's context; and whether the budget asks for no more."""
        if not drafting or isinstance(self.drafter, EarlyExitDrafter):
            return not budget.taps
        if isinstance(self.drafter, DiffusionDrafter):
            again = self.catch_up + min(budget.depth, budget.nodes)  # rows, in one window
            if self.drafter.exact or budget.block or again > 64 * MAX_WORDS:
                return False
        if isinstance(self.drafter, AutoregressiveDrafter) and self.drafter.calibrate != "every":
            return False
        context = self.drafter.model.config.max_context
        return committed >= self.catch_up and committed + 2 * self.catch_up <= context

    def unload(self, committed: int) -> None:
        """Tell the caches' host side where the device left them: a round of loop.py's own follows."""
        self._leave()
        self.cache.exact_len, drafter = committed - 1, self.drafter
        if drafter is not None and drafter.cache is not self.cache:
            drafter.cache.exact_len = max(0, committed - self.catch_up)
            if isinstance(drafter, AutoregressiveDrafter):
                drafter.forget()

    def _leave(self) -> None:
        """What is not a static round looks at all columns."""
        self.loaded, self._reach = False, 0
        for cache in (self.cache, *([self.drafter.cache] if self.drafter else [])):
            cache.reach(cache.capacity)

    # --- a round

    @property
    def flying(self) -> int:
        return len(self._flying)

    def reads(self, confident: bool) -> bool:
        """Whether the host has a say in a draft, so that a round must be over before the next is drafted."""
        return confident or (isinstance(self.drafter, DiffusionDrafter) and self.drafter.search is not None)

    @torch.inference_mode()
    def launch(
        self,
        committed: list[int],
        budget: Budget,
        sampling: Sampling,
        keep_drafting: Callable[[float], bool] | None,
        drafting: bool = True,
    ) -> None:
        """Start a round. `committed` is the text as far as the host knows it, a round behind perhaps."""
        start = time.perf_counter()
        ahead = sum(flight.drafted + 1 for flight in self._flying)
        self.reach(len(committed) + ahead + 2 * self.catch_up + min(budget.nodes, self.most))
        flight = Flight.of(0, False, self.state.report, budget.exit, self._now())
        if drafting and min(budget.nodes, budget.depth):
            self.drafter.head.follow(committed)
            if isinstance(self.drafter, EarlyExitDrafter):
                self._draft_exit(flight, budget, keep_drafting)
            elif isinstance(self.drafter, DiffusionDrafter):
                self._draft_block(flight, committed, budget, sampling)
            elif keep_drafting is None:
                self._draft(flight, budget)
            else:
                self._draft_asking(flight, budget, keep_drafting)
        flight.marks.append(self._now())
        self._verify(flight)
        flight.marks.append(self._now())
        self._accept(flight)
        flight.marks.append(self._now())
        self._send(flight)
        self._flying.append(flight)
        self.launched += 1
        self.host_seconds += time.perf_counter() - start

    @torch.inference_mode()
    def judge(self, size: int, tree: bool = False) -> None:
        """Verify and accept what stands in the window as if it were a draft of `size`, and tell nobody."""
        self._verify(flight := Flight.of(size, tree, self.state.report))
        self._accept(flight)

    def collect(self) -> tuple[Report, dict[str, float]]:
        """The oldest round on its way, once it is over, and the seconds of its stages."""
        flight = self._flying.popleft()
        if flight.done is not None:
            flight.done.synchronize()
        count, *rest = flight.report.tolist()
        rows = len(rest) // 2
        if flight.tokens is not None:
            flight.found = DiffusionStats(self.drafter.stopped(flight.tokens.tolist()))
        between = zip(flight.marks, flight.marks[1:], strict=False)
        seconds = {stage: self._seconds(a, b) for stage, (a, b) in zip(STAGES, between, strict=True)}
        self._collected, self._seconds_of = self._collected + 1, self._seconds_of + sum(seconds.values())
        return Report(rest[:count], rest[rows : rows + count], flight), seconds

    @property
    def usual(self) -> float:
        """Mean seconds of a round; 0 before the first."""
        return self._seconds_of / max(1, self._collected)

    def reach(self, columns: int) -> None:
        """Let attention look at `columns` at least, of both caches."""
        reach = next((r for r in self._reaches if r >= columns), self.cache.capacity)
        if reach != self._reach:
            self._reach = reach
            self.cache.reach(reach)
            if self.drafter is not None:
                self.drafter.cache.reach(reach)

    def _run(self, name: Hashable, work: Callable[[], None]) -> None:
        """A stretch that attends; the numbers of a draw are of no matter to it, their kind is."""
        self.graphs.run((name, self._reach, kind(self._sampling)), work)

    def _draft(self, flight: Flight, budget: Budget) -> None:
        """A small model's chain or tree, all of it."""
        drafter, s, R = self.drafter, self.state, self.catch_up
        depth = min(budget.depth, budget.nodes)
        tree = drafter.width > 1
        N = min(budget.nodes, drafter.width * depth) if tree else depth

        def work() -> None:
            draft = drafter.propose_static(Start(s.length, R), self._last(R), budget, self._sampling)
            s.window[1 : N + 1] = draft.tokens
            if tree:
                s.parents[:N] = draft.parents

        self._run(("draft", N, depth), work)
        flight.drafted, flight.depth, flight.tree = N, depth, tree

    def _draft_asking(self, flight: Flight, budget: Budget, keep_drafting: Callable[[float], bool]) -> None:
        """A small model's chain, whose length the host decides token by token."""
        drafter, s, R = self.drafter, self.state, self.catch_up
        confidence: list[float] = []
        for n in range(min(budget.depth, budget.nodes)):

            def work(n: int = n) -> None:
                token, score = (
                    drafter.step_static(Start(s.length, 0), s.window[n : n + 1], n - 1, self._sampling)
                    if n
                    else drafter.first_static(Start(s.length, R), self._last(R), self._sampling)
                )
                s.window[n + 1 : n + 2] = token
                s.confidence.copy_(score)

            self._run(("step", n), work)
            confidence.append(self._read_confidence())
            if not keep_drafting(confidence[-1]):
                break
        flight.drafted = flight.depth = len(confidence)
        flight.confidence = tuple(confidence)

    def _draft_exit(self, flight: Flight, budget: Budget, keep_drafting: Callable[[float], bool] | None) -> None:
        """A chain by the target's first layers, one graph for a step of each exit."""
        drafter, s, exit = self.drafter, self.state, budget.exit

        def work() -> None:
            token = s.window.index_select(0, s.step)
            token, score, hidden = drafter.step_static(token, Start(s.length + s.step, 1), exit, self._sampling)
            s.hidden.index_copy_(0, s.step, hidden)
            s.step.add_(1)
            s.window.index_copy_(0, s.step, token)
            s.confidence.copy_(score)

        s.step.zero_()
        confidence: list[float] = []
        for _ in range(min(budget.depth, budget.nodes)):
            self._run(("exit", exit), work)
            flight.drafted += 1
            if keep_drafting is not None:
                confidence.append(self._read_confidence())
                if not keep_drafting(confidence[-1]):
                    break
        flight.depth, flight.confidence = flight.drafted, tuple(confidence)

    def _draft_block(self, flight: Flight, committed: list[int], budget: Budget, sampling: Sampling) -> None:
        """A diffusion model's block; where its paths are searched, the host reads the candidates and says the draft."""
        drafter, s, R = self.drafter, self.state, self.catch_up
        k = min(budget.depth, budget.nodes)

        def work() -> None:
            hidden = drafter.hidden_static(Start(s.length, R), self._last(R), k)
            if drafter.search is not None:
                s.hidden[:k] = hidden
                return
            asked = self._counting[:k] + (s.length - 1)  # the positions that plain decoding would draw after
            s.window[1 : k + 1] = drafter.head.best(hidden, self._sampling, asked)

        self._run(("block", k), work)
        flight.drafted = flight.depth = k
        if drafter.search is None:
            return
        draft, flight.found = drafter.search_static(s.hidden[:k], committed, budget, sampling)
        flight.drafted, flight.depth, flight.tree = len(draft), draft.depth(), not draft.is_chain
        s.window[1 : len(draft) + 1] = draft.tokens
        if flight.tree:
            s.parents[: len(draft)] = draft.parents

    def _verify(self, flight: Flight) -> None:
        s, N, exit = self.state, flight.drafted, flight.exit if flight.drafted else 0
        rows, root = N + 1, Start(s.length, 1)

        def work() -> None:
            window, logits = s.window[:rows], s.logits[:rows]
            if exit:
                resume = Resume(exit, s.hidden[:N], {})
                s.positions[:rows] = resume_static(self.target, self.cache, window, resume, root, logits)
            else:
                parents = s.parents[:N] if flight.tree else None
                s.positions[:rows] = verify_static(self.target, self.cache, window, parents, root, logits)

        self.graphs.run((("verify", N, flight.tree, exit), self._reach), work)

    def _accept(self, flight: Flight) -> None:
        s, N = self.state, flight.drafted
        rows = N + 1

        def work() -> None:
            target = self.target.draw(self._sampling, s.logits[:rows], s.positions[:rows])
            tokens = s.window[1:rows]
            parents = s.parents[:N] if flight.tree else self._counting[:N]
            if self._agrees is not None:
                target = synthetic(target, tokens, parents, s.positions[:rows], self._agrees)
            path, count, _ = accept_walk(tokens, parents, target)
            table = self.cache.block_table
            state = s.committed, s.length, s.window, s.limit, table, self.cache.page_size
            report, src, dst = advance(path, count, target, *state)
            if flight.tree:  # a chain's accepted rows are in place already
                kv_commit(self.cache.k, self.cache.v, src, dst)
            s.report[: len(report)] = report

        self.graphs.run(("accept", N, flight.tree, kind(self._sampling), self._agrees is not None), work)

    def _send(self, flight: Flight) -> None:
        """Start the copy of the report, and of a diffusion drafter's guesses."""
        report, tokens = self.state.report[: 3 + 2 * flight.drafted], self.state.window[1 : flight.drafted + 1]
        asked = isinstance(self.drafter, DiffusionDrafter) and flight.found is None and flight.drafted > 0
        if self.target.device.type != "cuda":
            flight.report, flight.tokens = report.clone(), tokens.clone() if asked else None
            return
        flight.report = self._to_host(report)
        flight.tokens = self._to_host(tokens) if asked else None
        flight.done = torch.cuda.Event()
        flight.done.record()

    def _last(self, count: int) -> Tensor:
        """The last `count` committed tokens."""
        s = self.state
        return s.committed.index_select(0, self._counting[:count] + (s.length - count))

    def _read_confidence(self) -> float:
        score = self.state.confidence
        if score.is_cuda:  # 4 bytes, which are waited for
            score = self._to_host(score)
            torch.cuda.current_stream().synchronize()
        return math.exp(float(score))

    @staticmethod
    def _to_host(x: Tensor) -> Tensor:
        """A pinned copy on its way; torch keeps such memory for the next."""
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        return host.copy_(x, non_blocking=True)

    def _now(self) -> Any:
        if not self.graphs.capture:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, a: Any, b: Any) -> float:
        return a.elapsed_time(b) / 1e3 if self.graphs.capture else b - a

    # --- before the first request

    @torch.inference_mode()
    def warmup(
        self,
        budgets: list[Budget],
        verified: list[int],
        accepted: list[int],
        asking: bool = False,
        agrees: Tensor | None = None,
        tell: Callable[[int, int], None] | None = None,
    ) -> None:
        """Run all that a request may meet: it is compiled, and on a GPU captured. `budgets` that the policy may ask
        for (none: nothing is drafted), sizes of drafts that are `verified` and `accepted` beside those of the budgets,
        `asking`: by confidence. `tell` hears (done, of) now and then.

        What DEL verifies is left out, exits times lengths, where a draft may have any: it is captured when it is met a
        second time."""
        for cache in {id(c): c for c in (self.cache, *([self.drafter.cache] if self.drafter else []))}.values():
            cache.k.zero_(), cache.v.zero_()  # numbers, that is, so that tokens are tokens
        todo: list[Callable[[], None]] = []
        lengths = self._lengths()
        for before, length in itertools.pairwise((0, *lengths)):
            for sampling, budget in itertools.product(KINDS, budgets if self._drafts_beyond(before) else ()):
                todo.append(partial(self._meet_budget, length, sampling, agrees, budget, asking))
            todo.append(partial(self._meet, length, KINDS[0], agrees, verified, self._verify))
        for sampling in KINDS:
            todo.append(partial(self._meet, lengths[0], sampling, agrees, accepted, self._accept))
        for done, work in enumerate(todo, 1):
            work()
            if tell is not None:
                tell(done, len(todo))
        self.reset()

    def _meet_budget(
        self, length: int, sampling: Sampling, agrees: Tensor | None, budget: Budget, asking: bool
    ) -> None:
        self.reset()
        there = min(length, self._drafted_to)  # launched as if it were `length`, for attention's reach
        if self.fits(there, budget, True):
            self.load([0] * there, there, sampling, agrees)  # the limit is reached: the text stays as long as it is
            for _ in range(self.graphs.passes):
                self.launch([0] * length, budget, sampling, (lambda _: True) if asking else None)
                self._flying.clear()

    def _meet(
        self,
        length: int,
        sampling: Sampling,
        agrees: Tensor | None,
        sizes: list[int],
        work: Callable[[Flight], None],
    ) -> None:
        """`work` on drafts of the given sizes, as chains and, where there are any, as trees."""
        self.reset()
        self.load([0] * length, length, sampling, agrees)
        self.reach(length + self._beyond)
        for size in sizes:
            for tree in {False, self.trees and size > 0}:
                for _ in range(self.graphs.passes):
                    work(Flight.of(size, tree, self.state.report))

    @property
    def _drafted_to(self) -> int:
        """The longest text that a static draft may have before it."""
        context = self.target.config.max_context
        return context if self.drafter is None else self.drafter.model.config.max_context - 2 * self.catch_up

    def _drafts_beyond(self, length: int) -> bool:
        """Whether a draft may stand behind so long a text, as the host knows it with a round on its way."""
        return length == 0 or self._drafted_to + self.most + 1 > length

    def _lengths(self) -> list[int]:
        """A text for each reach."""
        context = self.target.config.max_context
        return [max(min(reach, context) - self._beyond, self.catch_up) for reach in self._reaches]
