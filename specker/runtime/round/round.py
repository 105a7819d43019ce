"""One round of n requests: draft -> verify -> sample + accept -> commit. There is no other.

Words: the *root* is the last committed token, its K/V not yet in the target's cache. *accepted*: draft tokens kept.
*recovered*: the target's own token where a draft was refused; *bonus*: its token after a wholly accepted path; both are
the new root. The target's token after each row is a function of the seed, the position and the logits alone
(kernels/sample.py), so a round commits exactly what plain decoding would, whatever was drafted and whatever shares the
batch.

All requests of a round have one shape. Rows are placed in one of two ways. A round of *fixed* shape reads on the device
how long each text is: its launches do not depend on what the last round decided, so on a GPU its graph segments are
CUDA graphs, and the next round may be launched before this one's tokens are known. In any other round the host knows
every length and places exactly the rows that are needed.
"""

import math
import os
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specker.kernels.round.settle import settle
from specker.kernels.sample import Splits
from specker.model.cache import KVCache, Lengths
from specker.model.decoder import Model, experts_read, forward
from specker.model.rows import begin
from specker.model.sampling import Draws
from specker.runtime.control.policy import Budget
from specker.runtime.round.constrain import constrain, masked
from specker.runtime.round.drafter import Draft, Drafter
from specker.runtime.round.graphs import Graphs
from specker.runtime.round.state import Request, State, to_host
from specker.runtime.round.synthetic import synthetic

STAGES = ("prefill", "draft", "verify", "accept")  # the prefill is of a drafter that missed tokens


class Shape(NamedTuple):
    """What the launches of a round depend on. Captures are keyed by it."""

    sequences: int  # idle slots included
    budget: Budget
    fixed: bool = False
    bucket: int = 0  # columns that attention sees; 0: all
    draws: str = "greedy"  # the kind of draws (model/sampling.py)

    def key(self, name: Hashable, attends: bool = True, draws: bool = True) -> Hashable | None:
        """The key of a graph segment whose launches depend only on `name`, the number of sequences, the KV bucket (if
        it `attends`) and the kind of draws (if it `draws`); None if it must not be captured."""
        return (
            (name, self.sequences, self.bucket if attends else 0, self.draws if draws else "") if self.fixed else None
        )


class Workspace:
    """Values that one graph segment passes to the next. A replayed graph runs no Python, so rounds of fixed shape
    pass them through the state's memory; other rounds just keep the tensors."""

    def __init__(self, state: State, fixed: bool):
        self.state, self.fixed = state, fixed
        self._values: dict[str, Tensor] = {}

    def out(self, name: str, count: int) -> Tensor | None:
        """The state's memory for the first `count` entries of `name`, for an op that can write there; None if the op
        must allocate."""
        if not self.fixed:
            return None
        self._values[name] = getattr(self.state, name)[:count]
        return self._values[name]

    def put(self, name: str, value: Tensor) -> None:
        """Pass on `value`, which may be the memory that `out` gave."""
        if not self.fixed:
            self._values[name] = value
        elif value is not self._values.get(name):
            getattr(self.state, name)[: len(value)].copy_(value)

    def get(self, name: str, count: int) -> Tensor:
        """The first `count` entries of `name`."""
        return (getattr(self.state, name) if self.fixed else self._values[name])[:count]

    def put_taps(self, taps: list[Tensor]) -> None:
        """Pass on the hidden rows after some depths, [rows, E] each."""
        if self.fixed:
            torch.stack(taps, 1, out=self.state.taps[: len(taps[0]), : len(taps)])
        else:
            self._values["taps"] = torch.stack(taps, 1)

    def taps(self, depths: int, rows: int) -> Tensor:
        """What `put_taps` passed on, [rows, depths, E]."""
        return (self.state.taps if self.fixed else self._values["taps"])[:rows, :depths]


@dataclass(eq=False)
class Round:
    """A pending round."""

    requests: list[Request]
    state: State  # of their slots, and of idle slots where the batch is padded
    shape: Shape
    draws: Draws
    lengths: Lengths  # the texts' lengths, which place the rows
    graphs: Graphs
    confident: bool = False  # whether policies end the draft by the confidence of each token
    traced: bool = False  # whether a trace wants the draft and its probabilities
    reason: str = ""  # why nothing is drafted (choose.py)
    trial: bool = False  # whether the draft finds out if drafting pays (choose.py)
    forced: bool = False  # whether grammars force the next token of every text, so that the drafter has no part
    allowed: Tensor | None = None  # [rows, W] int32, bits of the tokens that may follow each row; None: all may
    draft: Draft = field(default_factory=Draft)
    instead: Tensor | None = None  # tokens [n, N] int64 to verify instead of the draft's first N, to measure costs
    taps: tuple[int, ...] = ()  # depths of the target whose hidden rows the drafter reads
    behind: int = 0  # tokens that the drafter prefilled before it drafted
    price: float = 0.0  # what a further row of one sequence costs in the verify pass, in tokens (Costs.row_price)
    memory: Workspace = field(init=False)
    host: dict[str, Tensor] = field(default_factory=dict)  # copies on the host, complete once `done`
    broken: set[int] = field(default_factory=set)  # slots whose logits are not finite, known once collected
    seconds: dict[str, float] = field(default_factory=dict)  # by stage, known once collected
    experts: float = 0.0  # that the verify pass read in a layer, on average, known once collected
    usual: float | None = None  # mean seconds of a round of fixed shape; None where there are none
    places: Tensor | None = None
    """If the sequences verify unequally many rows: which entries of [n, size + 1] they are, [rows] int64."""
    done: Any = None  # the event after the copies
    marks: list[Any] = field(default_factory=list)  # times, or events, around the stages

    def __post_init__(self) -> None:
        self.memory = Workspace(self.state, self.shape.fixed)

    @property
    def n(self) -> int:
        """Sequences, idle slots included."""
        return self.shape.sequences

    @property
    def fixed(self) -> bool:
        return self.shape.fixed

    @property
    def budget(self) -> Budget:
        return self.shape.budget

    @property
    def window(self) -> Tensor:
        """[n, R] int64: the root, then the draft."""
        return self.state.window

    @property
    def exits(self) -> Tensor:
        """[n, R, E]: in a round of fixed shape, the rows after the exit layer of a self-drafted chain."""
        hidden = self.state.hidden
        return hidden.view(-1, self.window.shape[1], hidden.shape[-1])[: self.n]

    @property
    def rows(self) -> int:
        """Rows of the verify pass: the root and the draft of every sequence."""
        return self.n * (self.draft.size + 1) if self.places is None else len(self.places)

    def padded(self, x: Tensor, fill: int) -> Tensor:
        """A value of every verified row [rows] -> [n, size + 1], with `fill` where a sequence has no row."""
        if self.places is None:
            return x.view(self.n, -1)
        out = x.new_full((self.n, self.draft.size + 1), fill)
        out.view(-1)[self.places] = x
        return out

    def run(self, name: Hashable, work: Callable[[], None], attends: bool = True, draws: bool = True) -> None:
        """Run a graph segment, captured if shapes are fixed (see `Shape.key`)."""
        self.graphs.run(self.shape.key(name, attends, draws), work)

    def last(self, count: int) -> Tensor:
        """The last committed tokens of each sequence, [n, count] int64, read on the device."""
        s = self.state
        return s.committed.gather(1, s.length[:, None] + torch.arange(-count, 0, device=s.length.device))

    def tapped(self, slot: int, rows: int) -> dict[int, Tensor]:
        """The first `rows` verified rows of a sequence after each depth in `taps`, [rows, E]."""
        first = slot * (self.draft.size + 1)
        taps = self.memory.taps(len(self.taps), self.rows)[first : first + rows]
        return {depth: taps[:, i] for i, depth in enumerate(self.taps)}


def launch(r: Round, target: Model, cache: KVCache, drafter: Drafter | None) -> None:
    """Start the round: launch drafting, the verify pass and acceptance."""
    capture = r.graphs.capture
    r.graphs.counters.reset()
    r.marks.append(now(capture))
    drafts = drafter is not None and min(r.budget.nodes, r.budget.depth) > 0
    if drafter is not None and drafts:
        for slot in range(len(r.requests)):
            r.behind += drafter.catch_up(r, slot)
    r.marks.append(now(capture))
    if drafter is not None:
        r.taps = drafter.reads(r.budget)
        if drafts:
            r.draft = drafter.draft(r)
            r.places = unequal(r, target)
            if r.instead is not None:
                r.window[: len(r.instead), 1 : r.instead.shape[1] + 1] = r.instead
    r.marks.append(now(capture))
    r.allowed = constrain(r)
    verify(r, target, cache)
    r.marks.append(now(capture))
    accept(r, target, cache)
    if drafter is not None and r.taps:
        drafter.accepted(r)
    r.marks.append(now(capture))


def unequal(r: Round, model: Model) -> Tensor | None:
    """Leave the end of a chain out of the verify pass where it is less likely to be accepted than its rows cost.
    Returns `Round.places` if the chains then have unequal lengths. A round of fixed shape, a tree, traces,
    log-probabilities, grammars and drafters that read hidden rows want equally many rows of each sequence: None, and
    shorter drafts are padded."""
    d = r.draft
    whole = r.fixed or d.tree or d.hidden is not None or r.taps or r.traced or model.ranks or r.state.agrees.shape[1]
    if whole or any(request.logprobs or request.guide for request in r.requests):
        return None
    counts = [d.count(slot) for slot in range(r.n)]
    if r.price:
        sure = [[each[slot] for each in d.confidence] for slot in range(r.n)]
        counts = [min(c, s.policy.worth(r.price, p)) for c, s, p in zip(counts, r.requests, sure, strict=True)]
    if min(counts) == d.size:
        return None
    d.counts, first = counts, range(0, r.n * (d.size + 1), d.size + 1)
    places = [at + row for at, count in zip(first, counts, strict=True) for row in range(count + 1)]
    return torch.tensor(places, device=r.window.device)


def verify(r: Round, model: Model, cache: KVCache) -> None:
    """One target forward over the root and the draft of every sequence: the logits after each row. A self-drafted chain
    has already run layers [0, exit) on all rows but the last."""
    exit = 0 if r.draft.hidden is None else r.budget.exit
    name = "verify", r.draft.size, r.draft.tree, exit, r.taps
    r.run(name, lambda: _verify(r, model, cache, exit), draws=False)


def _verify(r: Round, model: Model, cache: KVCache, exit: int) -> None:
    s, d, N = r.state, r.draft, r.draft.size
    positions = r.memory.out("positions", r.rows)
    if r.places is not None:
        counts = [d.count(slot) + 1 for slot in range(r.n)]
        rows = cache.after([length - 1 for length in r.lengths], counts)
        hidden = model.embed_tokens(s.window[:, : N + 1].reshape(-1)[r.places])
        outs, taps = [forward(model, cache, rows, hidden)], {}
    elif exit:
        assert d.hidden is not None
        below = tuple(n for n in r.taps if n < exit)
        last, hidden = begin(model, cache, r.lengths, 1, N, s.window[:, N : N + 1])
        first = forward(model, cache, last, hidden, slice(exit), below)
        hidden = _beside(d.hidden, first.hidden)
        taps = {n: _beside(d.taps[n], first.taps[n]) for n in below}
        rows = cache.place(r.lengths, 1, 0, N + 1, positions=positions)
        outs = [first, forward(model, cache, rows, hidden, slice(exit, None), tuple(n for n in r.taps if n >= exit))]
        taps |= outs[1].taps
    else:
        parents = s.parents[:, :N] if d.tree else None
        rows, hidden = begin(model, cache, r.lengths, 1, 0, s.window[:, : N + 1], parents, positions=positions)
        outs = [forward(model, cache, rows, hidden, taps=r.taps)]
        taps = outs[0].taps
    if r.taps:
        r.memory.put_taps([taps[n] for n in r.taps])
    if model.counts_experts:
        r.memory.put("experts", experts_read(model, outs))
    r.memory.put("logits", model.logits(outs[-1].final, r.memory.out("logits", r.rows)))
    r.memory.put("positions", rows.positions)


def _beside(rows: Tensor, last: Tensor) -> Tensor:
    """[n, N, E] and [n, E] -> [n * (N + 1), E], each sequence's last row after its other rows."""
    return torch.cat((rows, last.unsqueeze(1)), 1).flatten(0, 1)


def accept(r: Round, model: Model, cache: KVCache) -> None:
    """Draw the target's tokens, find the path that agrees with them, extend the texts and keep the path's K/V."""
    r.run(("accept", r.draft.size, r.draft.tree), lambda: _accept(r, model, cache), attends=False)


def _accept(r: Round, model: Model, cache: KVCache) -> None:
    s, N, n, memory = r.state, r.draft.size, r.n, r.memory
    logits, positions = memory.get("logits", r.rows), memory.get("positions", r.rows)
    if r.allowed is not None:
        logits = masked(logits, r.allowed)
    tokens, parents = s.window[:, 1 : N + 1], s.parents[:, :N] if r.draft.tree else None
    forced = s.agrees.shape[1] > 0
    target: Tensor | Splits
    if r.places is not None:
        target = r.draws.each(r.places // (N + 1)).tokens(logits, positions)
        tokens = r.padded(s.window[:, : N + 1].reshape(-1)[r.places], -2)[:, 1:]
    elif forced or model.ranks:
        target = model.draw(r.draws, logits, positions)
    else:
        target = r.draws.splits(logits, positions)
    if isinstance(target, Tensor):
        target = r.padded(target, -1)  # it equals no draft token
        target = synthetic(target, tokens, parents, positions.view(n, N + 1), s.agrees) if forced else target
    texts = s.committed, s.length, s.window, s.limit, cache.block_table[:n], cache.page_size
    report, drawn = memory.out("report", n * (3 + 2 * N)), memory.out("target", n * (N + 1))
    report, drawn, src, dst = settle(tokens, parents, target, *texts, report, drawn)
    if r.draft.tree:  # a chain's accepted rows are in place already
        cache.shift(src, dst)
    memory.put("report", report)
    memory.put("target", drawn)


def send(r: Round, model: Model) -> None:
    """Start copying the round's results to the host; a trace adds the draft, the target's tokens and probabilities."""
    N, s, n = r.draft.size, r.state, r.n
    logits = r.memory.get("logits", r.rows)
    # One logit tells: a number that is not finite in a hidden row spoils them all.
    first = r.padded(logits[:, 0], 0)
    copies = {"report": r.memory.get("report", n * (3 + 2 * N)).view(n, -1), "first": first}
    if model.counts_experts:
        copies["experts"] = r.memory.get("experts", 1)
    if r.traced or r.draft.observed:
        copies["draft"] = s.window[:, 1 : N + 1]
    if r.traced:
        copies |= {"target": r.memory.get("target", r.rows).view(n, -1)}
        copies |= _probabilities(r, model.config.vocab_size)
        copies |= {"parents": s.parents[:, :N]} if r.draft.tree else {}
    if (most := max(request.logprobs for request in r.requests)) > 0:
        copies |= _logprobs(r, model.whole_logits(logits), most)
    if not s.length.is_cuda:
        r.host = {name: x.clone() if r.fixed or name in ("draft", "parents") else x for name, x in copies.items()}
        return
    r.host = {name: to_host(x) for name, x in copies.items()}
    r.done = torch.cuda.Event()
    r.done.record()


def _probabilities(r: Round, vocab: int) -> dict[str, Tensor]:
    """For a trace, natural logarithms of probabilities: the draft's of its tokens [n, N], if its head computed them;
    the target's, before temperature and filters, of its own token after each row [n, N + 1] and of each draft token
    [n, N], unless a rank holds only a part of the logits."""
    s, N, n, scores = r.state, r.draft.size, r.n, r.draft.scores
    out = {"probability": torch.cat(scores, 1)} if N and sum(x.shape[1] for x in scores) == N else {}
    logits = r.memory.get("logits", r.rows)
    if logits.shape[-1] != vocab:
        return out
    logits = logits.view(n, N + 1, vocab)
    lse = logits.logsumexp(-1)
    own = r.memory.get("target", r.rows).view(n, N + 1, 1)
    out["own"] = logits.gather(-1, own).squeeze(-1) - lse
    each = torch.arange(n, device=logits.device).unsqueeze(1)
    rows = s.parents[:, :N] if r.draft.tree else torch.arange(N, device=logits.device)
    out["agreed"] = logits[each, rows, s.window[:, 1 : N + 1]] - lse[each, rows]
    return out


def _logprobs(r: Round, logits: Tensor, most: int) -> dict[str, Tensor]:
    """Log-probabilities after each row, before temperature and filters, from logits [n * (N + 1), V]: of the target's
    own token [n, N + 1], and the `most` best ids and theirs [n, N + 1, most]."""
    logits = logits.view(r.n, r.draft.size + 1, -1)
    own = r.memory.get("target", r.rows).view(*logits.shape[:2], 1)
    lse = logits.logsumexp(-1, keepdim=True)
    best = logits.topk(min(most, logits.shape[-1]))
    return {
        "own_logprob": (logits.gather(-1, own) - lse).squeeze(-1),
        "best_ids": best.indices,
        "best_logprobs": best.values - lse,
    }


def collect(r: Round) -> list[tuple[list[int], list[int]]]:
    """Wait for the round. Returns (path rows, the target's tokens along the path) per sequence. A path ends before a
    row whose logits are not finite. With SPECKER_DEBUG=1, raises RuntimeError if kernels left their counters."""
    if r.done is not None:
        r.done.synchronize()
    if os.environ.get("SPECKER_DEBUG"):
        r.graphs.counters.check()
    each = []
    reports, first = r.host["report"].tolist(), r.host["first"].tolist()
    for slot, (count, *rest) in enumerate(reports[: len(r.requests)]):
        sound = next((i for i in range(count) if not math.isfinite(first[slot][rest[i]])), count)
        if sound < count:
            r.broken.add(slot)
        each.append((rest[:sound], rest[r.draft.size + 1 : r.draft.size + 1 + sound]))
    if "experts" in r.host:
        r.experts = float(r.host["experts"])
    r.seconds = {stage: _seconds(a, b) for stage, a, b in zip(STAGES, r.marks[:-1], r.marks[1:], strict=True)}
    return each


def now(events: bool) -> Any:
    if not events:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(a: Any, b: Any) -> float:
    return b - a if isinstance(a, float) else a.elapsed_time(b) / 1e3
