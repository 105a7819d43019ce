"""The decoding loop: rounds over the sequences of a batch, and continuous batching. A finished sequence's slot goes to
the next request; requests of unequal length share every launch.

A request is admitted when a slot is free and every K/V pool has pages for its longest text, so memory never runs out
for an admitted sequence. Its prompt is prefilled before the next round. A request's tokens do not depend on the rest of
the batch, the batch's size or the time of admission.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from specker.flags import option
from specker.kernels.cpu import native
from specker.model.cache import KVCache
from specker.model.decoder import Final, Model, prefill
from specker.model.sampling import Draws
from specker.runtime.auto import Experience
from specker.runtime.choose import NONE, Chooser
from specker.runtime.dist import Ranks
from specker.runtime.draft import Drafter
from specker.runtime.graphs import Graphs
from specker.runtime.policy import Budget, Outcome
from specker.runtime.round import Round, collect, launch, send
from specker.runtime.state import Sequence, State
from specker.runtime.synthetic import agreements

log = logging.getLogger(__name__)

# The last rows of a prompt seed a policy's statistics (DEL): at most 32, as in the paper. Each row meets the LM head
# once for every watched layer, so there is one such product for every PROMPT_SHARE tokens. Short prompts have none: the
# first round watches the same layers.
PROMPT_ROWS, PROMPT_SHARE = 32, 16
NOT_FINITE = "prompt %d ends early: its logits are not finite; the weights may be damaged, or overflow in this dtype"
KV_BUCKETS = tuple(1024 * 4**n for n in range(6))  # columns that attention may see in captured rounds


@dataclass(frozen=True)
class Step:
    """The tokens that a round added to one sequence."""

    sequence: Sequence
    tokens: list[int]  # emitted; a stop id, or the token that completes a stop string, is the last one
    accepted: int  # the first so many of them were draft tokens
    pieces: list[tuple[str, bool]]  # with a reader: the new text, and whether it came from a draft token


@dataclass(eq=False)
class Batch:
    """The models, caches and state of decoding, and the active sequences, which occupy slots 0..len(active)-1."""

    target: Model
    cache: KVCache
    drafter: Drafter | None
    largest: Budget  # of the policies' drafts
    fixed: bool  # whether rounds have fixed shapes where they can (`--graphs on`)
    graphs: Graphs
    known: Experience  # what rounds cost and drafts achieve, for the policies
    scratch: int  # columns of a sequence beyond its text
    acceptance: float | None = None  # synthetic
    ranks: Ranks | None = None
    trace: Callable[[dict[str, Any]], None] | None = None  # called with every sequence's part of every round
    tell: Callable[[int, int], None] | None = None  # called with (prefilled tokens, of all) of the target's prefill
    state: State = field(init=False)
    active: list[Sequence] = field(init=False, default_factory=list)
    launched: int = field(init=False, default=0)  # rounds of fixed shape
    host_seconds: float = field(init=False, default=0.0)  # that it took to launch those
    finished: int = field(init=False, default=0)  # rounds
    _usual: list[float] = field(init=False, default_factory=lambda: [0.0, 0.0])  # rounds of fixed shape, their seconds
    _views: dict[int, State] = field(init=False, default_factory=dict)  # of the first slots
    _idle: set[int] = field(init=False, default_factory=set)  # slots that rounds may run over
    _tables: dict[int, Tensor] = field(init=False, default_factory=dict)  # synthetic acceptance by seed
    _chain: bool = field(init=False, default=False)  # whether the last round was of fixed shape and drafted
    _left: tuple[list[int], list[int]] | None = field(init=False, default=None)
    """In a batch of one, what the last sequence left: its text, and each cache's exact columns."""

    def __post_init__(self) -> None:
        model = self.target if self.drafter is None or self.drafter.model is None else self.drafter.model
        rows = self.size * (self.largest.nodes + 1)
        self._compiled = all(m.stack is not None and rows <= m.stack.most for m in (self.target, model))
        columns, wide = self.target.config.max_context, model.config.hidden_size
        self.state = State.empty(
            self.target.dtype,
            self.target.device,
            sequences=self.size,
            rows=self.largest.nodes + 1,
            wide=wide,
            vocab=len(self.target.head),  # the rank's share of a split model
            columns=columns,
            synthetic=self.acceptance is not None,
        )
        # What a round looks at and writes beyond the text. A KV bucket without room for it within the context is
        # left out.
        self.beyond = 2 * (self.largest.depth + 1) + self.largest.nodes
        context = self.target.config.max_context
        self.buckets = (*(b for b in KV_BUCKETS if b + self.beyond < context), self.cache.capacity)
        self._bucket = 0
        self.chooser = Chooser(self.known.costs)

    @property
    def size(self) -> int:
        """Slots."""
        return len(self.cache.exact_len)

    @property
    def caches(self) -> list[KVCache]:
        own = None if self.drafter is None else self.drafter.cache
        return [self.cache] if own is None or own is self.cache else [self.cache, own]

    # --- requests

    def columns(self, limit: int) -> int:
        """The K/V columns of a sequence whose text has up to `limit` tokens."""
        return limit + self.scratch

    def check_fits(self, prompt: int, limit: int) -> None:
        """Raise ValueError if an empty pool cannot hold a text of `limit` tokens, `prompt` of them in the prompt."""
        for cache in self.caches:
            need, pages = cache.pages_for(self.columns(limit)), cache.k.shape[1] - (self.size > 1)
            if need > pages:
                room = pages * cache.page_size - self.scratch
                raise ValueError(
                    f"the prompt has {prompt} tokens and {limit - prompt} more are asked for, but the K/V pool holds "
                    f"at most {max(0, room)} of one sequence: lower {option('max_new_tokens')} or raise "
                    f"{option('kv_tokens')}"
                )

    def admits(self, sequence: Sequence) -> bool:
        """Whether there is a slot and memory now; requests that draft and those that do not take turns."""
        if len(self.active) == self.size or (self.active and self.active[0].drafting != sequence.drafting):
            return False
        need = self.columns(sequence.limit)
        return self.size == 1 or all(cache.pages_for(need) <= cache.free_pages for cache in self.caches)

    def admit(self, sequence: Sequence) -> None:
        """Give the sequence a slot and pages, and prefill its prompt."""
        start, slot = time.perf_counter(), len(self.active)
        for cache, kept in zip(self.caches, self._kept(sequence), strict=True):
            cache.take(slot, self.columns(sequence.limit))
            cache.exact_len[slot] = kept
        known = self.cache.exact_len[slot]
        self.see(0)
        self.active.append(sequence)
        if self.drafter is not None and sequence.drafting:
            self.drafter.reset(slot)
            self.chooser.admitted()
        self._chain = False
        self._prefill(slot, sequence)
        self.state.load(slot, sequence, self._agrees(sequence))
        seconds = time.perf_counter() - start
        sequence.stats.seconds["prefill"] += seconds
        sequence.stats.wall += seconds
        sequence.stats.prompt = len(sequence.text) - 1 - known

    def retire(self, sequence: Sequence) -> None:
        """Return a sequence's pages; the last slot's sequence moves to its slot."""
        slot, last = self.active.index(sequence), len(self.active) - 1
        if self.size == 1:
            self._left = sequence.text, [cache.exact_len[0] for cache in self.caches]
        for cache in self.caches:
            if self.size > 1:
                cache.release(slot)
            if slot < last:
                cache.move(last, slot)
        if slot < last:
            self.active[slot] = self.active[last]
            self.state.move(last, slot)
            if self.drafter is not None:
                self.drafter.move(last, slot)
        self.active.pop()
        self._idle.discard(last)
        head = None if self.drafter is None else self.drafter.head
        if head is not None and sequence.drafting:  # what plain decoding writes is often the same text again (--check)
            head.count(sequence.text[len(sequence.text) - sequence.stats.tokens :])
        if head is not None and not self.active:
            head.reset()

    def _kept(self, sequence: Sequence) -> list[int]:
        """For each cache the columns that a new sequence takes over from the last one."""
        if self._left is None or not sequence.follows:
            return [0] * len(self.caches)
        text, exact = self._left
        prompt = sequence.text[:-1]
        common = next(
            (i for i, (a, b) in enumerate(zip(text, prompt, strict=False)) if a != b), min(len(text), len(prompt))
        )
        kept = [min(common, columns) for columns in exact]
        if len(kept) > 1 and not (sequence.drafting and self.drafter is not None and self.drafter.keeps_prefix):
            kept[1] = 0
        return kept

    def clear(self, forget: bool = True) -> None:
        """Remove all sequences and reset the caches, which another batch may have overwritten. Without `forget`, a
        request that follows the last sequence may still keep its K/V."""
        self._bucket = -1
        while self.active:
            self.retire(self.active[-1])
        if forget:
            self._left = None
        for cache in self.caches:
            cache.exact_len[:] = [0] * self.size

    def _prefill(self, slot: int, sequence: Sequence) -> None:
        """The prompt's K/V that the cache lacks; a policy that watches layers learns from the last of these rows."""
        prompt, layers = sequence.text[self.cache.exact_len[slot] : -1], sequence.policy.layers
        drafter = self.drafter if sequence.drafting else None
        rows = min(PROMPT_ROWS, int(len(prompt) / (PROMPT_SHARE * len(layers)))) if layers else 0
        if drafter is None or not rows:
            prefill(self.target, self.cache, prompt, slot=slot, tell=self.tell)
        else:
            depth = len(self.target.layers)
            tapped = prefill(self.target, self.cache, prompt, (*layers, depth), rows, slot=slot, tell=self.tell)
            if tapped:
                last, end = tapped.pop(depth), self.cache.exact_len[slot]
                positions = self.target.positions[end - len(last) : end]
                draws = Draws.of([sequence.sampling], self.state.draw, False)
                with self.threads():
                    target = self.target.draw(draws, self.target.logits(Final(last)), positions)
                    sequence.policy.learn(tuple(tapped), *drafter.watch(tapped, draws, target, positions))

    def _agrees(self, sequence: Sequence) -> Tensor | None:
        if self.acceptance is None:
            return None
        if not sequence.drafting:
            return torch.zeros_like(self.state.agrees[0])
        seed = sequence.sampling.seed
        if seed not in self._tables:
            self._tables = {seed: agreements(self.acceptance, seed, self.state.agrees.shape[1])}
        return self._tables[seed].to(self.state.agrees.device)

    # --- rounds

    def see(self, columns: int) -> int:
        """Limit attention to the smallest KV bucket with `columns`; 0 for all columns. Returns the bucket."""
        bucket = next((b for b in self.buckets if b >= columns), self.cache.capacity) if columns else 0
        if bucket != self._bucket:
            self._bucket = bucket
            for cache in self.caches:
                cache.bucket(bucket or cache.capacity)
        return bucket

    def threads(self) -> AbstractContextManager[Any]:
        """Context manager for a round's launch and its results: with compiled kernels, which bring their own threads,
        torch's operators run in one."""
        return native().one_torch_thread() if self._compiled else nullcontext()

    def start(self, ahead: int = 0) -> Round | None:
        """Launch a round of the active sequences. `ahead`: tokens that pending rounds may add to each text. None if
        rounds are pending and the host must know the texts' lengths."""
        began = time.perf_counter()
        drafting = self.drafter is not None and self.active[0].drafting
        budget = self._shape() if drafting else NONE
        fixed = self.fixed and self._can_be_fixed(budget, drafting)
        if ahead and (not fixed or (budget.nodes and not self._chain)):
            return None  # a drafter that missed tokens must first know them
        if not fixed:
            budget = self._clipped(budget)
        r = self.new_round(budget, fixed, ahead)
        r.asks = drafting and self.active[0].policy.confident
        r.traced = self.trace is not None
        r.reason, r.trial = self.chooser.reason, self.chooser.trial
        launch(r, self.target, self.cache, self.drafter if drafting else None)
        send(r, self.target.config.vocab_size)
        self._chain = fixed and r.size > 0 and not budget.part
        if fixed:
            self.launched += 1
            self.host_seconds += time.perf_counter() - began
        return r

    def new_round(self, budget: Budget, fixed: bool, ahead: int = 0) -> Round:
        """A round of the active sequences; one of fixed shape is padded to a power of two of slots."""
        n = len(self.active)
        padded = min(self.size, 1 << (n - 1).bit_length()) if fixed else n
        state = self._views.get(padded) or self._views.setdefault(padded, self.state.first(padded))
        for slot in set(range(n, padded)) - self._idle:  # set up once: a copy from the host would block
            self.state.idle(slot, self.largest.depth + 1)
            self._idle.add(slot)
        longest = max(len(s.text) for s in self.active) + ahead
        bucket = self.see(longest + self.beyond) if fixed else self.see(0)
        draws = Draws.of([s.sampling for s in self.active], state.draw, fixed)
        lengths = state.length if fixed else [len(s.text) for s in self.active]
        return Round(list(self.active), state, budget, self.graphs, fixed, draws, lengths, bucket)

    @property
    def reads(self) -> bool:
        """Whether the next draft needs the results of the previous round."""
        drafting = self.drafter is not None and self.active[0].drafting
        return drafting and (self.drafter.reads or self.active[0].policy.confident)  # type: ignore[union-attr]

    @property
    def usual(self) -> float:
        """Mean seconds of a round of fixed shape; 0 before the first."""
        return self._usual[1] / max(1.0, self._usual[0])

    def _shape(self) -> Budget:
        """The shape that the chooser takes of the policies' proposals. Rank 0 decides, since measured times differ by
        rank."""
        drafter, policies = self.drafter, [s.policy for s in self.active]
        assert drafter is not None
        drafter.announce(self.active)
        remaining = sum(s.limit - len(s.text) for s in self.active)
        budget = self.chooser.choose(policies, remaining, drafter.behind(self.active))
        if self.ranks is not None and (policies[0].rests or policies[0].layers or len(policies) > 1):
            budget = self.ranks.budget(budget, len(policies[0].layers))
        prices = self.chooser.prices(policies, budget) if policies[0].rests and budget.nodes else ()
        for p in policies:
            p.taken(budget, prices)
        return budget

    def _can_be_fixed(self, budget: Budget, drafting: bool) -> bool:
        if not drafting or not budget.nodes:
            return True
        assert self.drafter is not None
        return all(self.drafter.fixed(len(s.text), budget) for s in self.active)

    def _clipped(self, budget: Budget) -> Budget:
        """Limit a draft to the longest remaining text, less one for the target's token, and the drafter's context."""
        if not budget.nodes:
            return budget
        assert self.drafter is not None
        room = max(s.limit - len(s.text) - 1 for s in self.active)
        own = max(self.drafter.room(len(s.text)) for s in self.active)
        return budget.clip(min(budget.nodes, self.largest.nodes), min(room, own))

    def finish(self, r: Round) -> list[tuple[Sequence, list[int], list[int]]]:
        """Wait for a round, extend the texts and update policies and the drafter. Returns (sequence, path, tokens)."""
        each, seconds = collect(r)
        start, n = time.perf_counter(), len(r.sequences)
        if r.fixed:
            self._usual[0] += 1
            self._usual[1] += sum(seconds.values())
        out = []
        for slot, (sequence, (path, tokens)) in enumerate(zip(r.sequences, each, strict=True)):
            room = sequence.limit - len(sequence.text)  # a draft of fixed shape may go beyond the end
            path, tokens = path[:room], tokens[:room]
            out.append((sequence, path, tokens))
            if not tokens or sequence.finished:
                continue
            sequence.text += tokens
            self.cache.exact_len[slot] = len(sequence.text) - 1
            if self.drafter is not None and sequence.drafting:
                self.drafter.observe(r, slot, path)
        watched = self._watch(r, [path for _, path, _ in out], seconds) if r.taps else 0.0
        for slot, (sequence, path, tokens) in enumerate(out):
            if tokens and not sequence.finished:
                self._account(r, slot, sequence, path)
        share = time.perf_counter() - start - watched
        if self.drafter is not None and r.sequences[0].drafting:
            self._learn(r, out, seconds, share)
        for sequence in r.sequences:
            for stage, spent in {**seconds, "commit": share}.items():
                sequence.stats.seconds[stage] += spent / n
        if self.trace is not None:
            spans = {**seconds, "watch": watched, "commit": share}
            for slot, (sequence, path, tokens) in enumerate(out):
                if tokens and not sequence.finished:
                    self.trace(self._told(r, slot, sequence, path, tokens, len(each[slot][0]), spans))
        self.finished += 1
        return out

    def _learn(
        self, r: Round, out: list[tuple[Sequence, list[int], list[int]]], seconds: dict[str, float], share: float
    ) -> None:
        """Take the round's time and tokens into account. Rounds that differ from later ones teach nothing: those in
        which layers were watched, and the last ones of texts, which their limits cut."""
        n, costs = len(r.sequences), self.known.costs
        if r.behind:
            costs.observe_prefill(r.behind, seconds["prefill"])
        if not r.taps:
            rest = seconds["verify"] + seconds["accept"] + (0.0 if self.graphs.capture else share)
            if r.reason == "measured":
                self.chooser.measured(n, rest)
            else:
                costs.observe(n, r.budget, r.size, seconds["draft"], rest)
        tokens = sum(len(tokens) for _, _, tokens in out)
        self.chooser.finished(n, r.budget, r.size, tokens, r.trial, r.behind)

    def _account(self, r: Round, slot: int, sequence: Sequence, path: list[int]) -> None:
        """Policy and stats of one sequence's part of a round."""
        drafted = r.drafted[slot] if r.drafted else r.size
        found = r.found[slot] if r.found else None
        confidence = [each[slot] for each in r.confidence]
        sequence.policy.observe(Outcome(drafted, path, confidence, found))
        stats = sequence.stats
        stats.observe_budget(drafted, r.budget.exit if drafted else 0, r.reason)
        stats.copied += bool(drafted and r.budget.part)
        if found is not None:
            stats.observe_found(found, r.depth, len(path) - 1)

    def _told(
        self,
        r: Round,
        slot: int,
        sequence: Sequence,
        path: list[int],
        tokens: list[int],
        whole: int,
        seconds: dict[str, float],
    ) -> dict[str, Any]:
        """One sequence's part of a round for the trace (specker/trace.py documents it). `whole`: rows of the path
        before the text's limit cut it."""
        N, rows = r.drafted[slot] if r.drafted else r.size, r.host
        parents = rows["parents"][slot, :N].tolist() if r.tree else list(range(N))
        if not N or whole > len(path):
            last = "own"
        else:
            last = "recovered" if path[-1] in parents else "bonus"
        confidence = [each[slot] for each in r.confidence]
        told: dict[str, Any] = {
            "prompt": sequence.index,
            "round": self.finished,
            "position": len(sequence.text) - len(tokens),  # committed tokens before the round
            "draft": rows["draft"][slot, :N].tolist(),
            "parents": parents,
            "confidence": confidence,
            "target": rows["target"][slot, : N + 1].tolist(),
            "path": path,
            "tokens": tokens,
            "last": last,
            "exit": r.budget.exit,
            "sequences": len(r.sequences),
            "seconds": seconds,
        }
        for name, count in (("probability", N), ("agreed", N), ("own", N + 1)):
            if name in rows:
                told[name] = [math.exp(min(0.0, x)) for x in rows[name][slot, :count].tolist()]
        if "probability" not in told and len(confidence) >= N > 0:
            told["probability"] = confidence[:N]
        head = self.drafter.head if self.drafter is not None and sequence.drafting else None
        if head is not None and head.known is not None:
            told["outside"] = [n for n, token in enumerate(tokens) if token not in head.known]
        if r.found:
            told["diffusion"] = asdict(r.found[slot])
        return told

    def _watch(self, r: Round, paths: list[list[int]], stages: dict[str, float]) -> float:
        """Pass each policy the tapped layers' predictions after the accepted rows; later rows follow rejected tokens.
        With captured rounds, the cost also includes how much longer this uncaptured round took than a usual one.
        Returns the seconds it took."""
        assert self.drafter is not None
        start, n, count = time.perf_counter(), len(r.sequences), r.n * (r.size + 1)
        rows, targets = r.kept("positions", count).view(r.n, -1), r.kept("target", count).view(r.n, -1)
        heard = []
        for slot, (sequence, path) in enumerate(zip(r.sequences, paths, strict=True)):
            kept = len(path)
            taps = {layer: x.view(r.n, rows.shape[1], -1)[slot, :kept] for layer, x in r.taps.items()}
            draws = Draws.of([sequence.sampling], r.state.draw, False)
            heard.append(self.drafter.watch(taps, draws, targets[slot, :kept], rows[slot, :kept]))
        spent = time.perf_counter() - start
        for sequence, (match, confidence) in zip(r.sequences, heard, strict=True):
            sequence.stats.seconds["watch"] += spent / n
            longer = sum(stages.values()) + spent - self.usual if self.fixed else 0.0
            sequence.policy.learn(tuple(r.taps), match, confidence, max(spent, longer))
        return spent


@torch.inference_mode()
def decode(batch: Batch, waiting: deque[Sequence], stop_ids: frozenset[int]) -> Iterator[Step]:
    """Decode the requests in `waiting`, to which the caller may add more at any time, until none is left."""
    batch.clear(forget=False)
    pending: deque[Round] = deque()
    start = time.perf_counter()
    while True:
        if not pending:
            for sequence in [s for s in batch.active if s.finished]:
                batch.retire(sequence)
            while waiting and batch.admits(waiting[0]):
                batch.admit(waiting.popleft())
                start = time.perf_counter()  # a prefill is its own request's time
            if not batch.active:
                return
        while not any(s.finished for s in batch.active):
            ahead = sum(r.size + 1 for r in pending)
            deep = 1 if not batch.fixed or batch.reads else 2
            if len(pending) >= deep or (pending and not pending[-1].fixed):
                break
            if all(len(s.text) + len(pending) >= s.limit for s in batch.active):
                break  # the pending rounds end every text
            with batch.threads():
                r = batch.start(ahead)
            if r is None:
                break
            pending.append(r)
        r = pending.popleft()
        running = [s for s in r.sequences if not s.finished]
        with batch.threads():
            results = batch.finish(r)
        share = (time.perf_counter() - start) / max(1, len(running))
        for sequence in running:
            sequence.stats.wall += share
        steps = []
        for slot, each in enumerate(results):
            if each[0] in running and (each[2] or slot in r.broken):
                steps.append(_emitted(batch, r, *each, stop_ids, slot in r.broken))
        yield from steps
        start = time.perf_counter()


def _emitted(
    batch: Batch,
    r: Round,
    sequence: Sequence,
    path: list[int],
    tokens: list[int],
    stop_ids: frozenset[int],
    broken: bool,
) -> Step:
    """Cut the tokens after a stop id or string and update the counters. `broken`: the next token's logits are not
    finite."""
    stop = next((i for i, token in enumerate(tokens) if token in stop_ids), None)
    texts: list[str] = []
    if (reader := sequence.reader) is not None:
        for i, token in enumerate(tokens if stop is None else tokens[: stop + 1]):
            texts.append(reader.add(token))
            if reader.stopped:
                stop = i
                break
    drafted = r.drafted[r.sequences.index(sequence)] if r.drafted else r.size
    head = batch.drafter.head if batch.drafter is not None and sequence.drafting else None
    known = None if head is None else head.known  # the ids of a trimmed head
    ended = known is not None and bool(tokens) and tokens[-1] not in known
    lost = ended and not r.budget.part and len(path) - 1 < r.depth
    if stop is not None:
        del sequence.text[len(sequence.text) - len(tokens) + stop + 1 :]
        tokens = tokens[: stop + 1]
        sequence.finished = "stop"
    elif broken:
        sequence.finished = "not finite"
        log.warning(NOT_FINITE, sequence.index)
    elif len(sequence.text) >= sequence.limit:
        sequence.finished = sequence.ends
    accepted = max(0, min(len(path) - 1, len(tokens)))
    pieces = [(text, n < accepted) for n, text in enumerate(texts)]
    if reader is not None and sequence.finished:
        pieces.append((reader.flush(), False))
    sequence.stats.observe(drafted, accepted, len(tokens))
    if known is not None:
        sequence.stats.observe_kept(sum(token in known for token in tokens), lost)
    return Step(sequence, tokens, accepted, [piece for piece in pieces if piece[0]])
