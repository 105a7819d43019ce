"""One round of n sequences: draft -> verify -> sample + accept -> commit. There is no other.

Words: the *root* is the last committed token, its K/V not yet in the target's cache. *accepted*: draft tokens kept.
*recovered*: the target's own token where a draft was refused; *bonus*: its token after a wholly accepted path; both are
the new root. The target's token after each row is a function of the seed, the position and the logits alone
(kernels/sample.py), so a round commits exactly what plain decoding would, whatever was drafted and whatever shares the
batch.

All sequences of a round have one shape (`Budget`). Rows are placed in one of two ways. A round of *fixed* shape reads
on the device how long each text is: its launches do not depend on what the last round decided, so on a GPU its
stretches of work are CUDA graphs, and the next round may be launched before this one's tokens are known. In any other
round the host knows every length and places exactly the rows that are needed.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specker.kernels.kv import kv_commit
from specker.kernels.round.grow import grow
from specker.kernels.round.settle import settle
from specker.model.cache import KVCache, Lengths
from specker.model.decoder import Final, Model, forward
from specker.model.rows import begin
from specker.model.sampling import Draws
from specker.runtime import state as states
from specker.runtime.draft import Drafter
from specker.runtime.graphs import Graphs
from specker.runtime.head import Head
from specker.runtime.policy import Budget
from specker.runtime.state import State
from specker.runtime.stats import DiffusionStats
from specker.runtime.synthetic import synthetic

STAGES = ("prefill", "draft", "verify", "accept")  # the prefill is of a drafter that missed tokens


@dataclass(eq=False)
class Round:
    """A pending round. The drafter sets the second group of fields."""

    sequences: list[states.Sequence]
    state: State  # of their slots, and of idle slots where the batch is padded
    budget: Budget
    graphs: Graphs
    fixed: bool
    draws: Draws
    lengths: Lengths  # the texts' lengths, which place the rows
    bucket: int = 0  # columns that attention sees, 0 for all
    asks: bool = False  # whether policies end the draft by the confidence of each token
    traced: bool = False  # whether a trace wants the draft and its probabilities
    reason: str = ""  # why nothing is drafted (choose.py)
    trial: bool = False  # whether the draft finds out if drafting pays (choose.py)
    behind: int = 0  # tokens that the drafter prefilled before it drafted

    size: int = 0  # draft tokens of each sequence in the window
    drafted: list[int] = field(default_factory=list)  # of them, each sequence's own; []: `size` for all
    tree: bool = False
    depth: int = 0  # tokens of the longest path
    confidence: list[list[float]] = field(default_factory=list)  # of each draft token, of every sequence
    found: list[DiffusionStats] = field(default_factory=list)  # of a diffusion drafter, one a sequence
    generated: bool = False  # whether `found` follows from the draft's tokens (`Drafter.observe`)
    hidden: Tensor | None = None  # [n, size, E], rows 0..size-1 at the exit of a self-drafted chain
    taps: dict[int, Tensor] = field(default_factory=dict)  # depth of the target -> [n * rows, E]
    nodes: Tensor | None = None  # [n, size], which of the grown nodes of a tree the draft holds
    scores: list[Tensor] = field(
        default_factory=list
    )  # for a trace: log-probabilities [n, ..] of draft tokens in order
    forwarded: int = 0  # grown nodes whose K/V stands behind the drafter's exact columns

    _kept: dict[str, Tensor] = field(default_factory=dict)
    _rooms: dict[str, Tensor] = field(default_factory=dict)  # memory that `room` handed out
    host: dict[str, Tensor] = field(default_factory=dict)  # copies on the host, complete once `done`
    broken: set[int] = field(default_factory=set)  # slots whose logits are not finite, known once collected
    done: Any = None  # the event after the copies
    marks: list[Any] = field(default_factory=list)  # times, or events, around the stages

    @property
    def n(self) -> int:
        """Sequences, idle slots included."""
        return len(self.state.length)

    @property
    def window(self) -> Tensor:
        """[n, R] int64: the root, then the draft."""
        return self.state.window

    def run(self, name: Any, work: Callable[[], None], attends: bool = True, draws: bool = True) -> None:
        """Run a piece of work, captured if shapes are fixed. Its launches may depend only on `name`, the number of
        sequences, the KV bucket (if it `attends`) and the kind of draws (if it `draws`)."""
        key = name, self.n, self.bucket if attends else 0, self.draws.kind if draws else ""
        self.graphs.run(key if self.fixed else None, work)

    def keep(self, name: str, value: Tensor) -> None:
        """Pass `value` to a later piece of work, which reads it with `kept`. A replayed graph runs no Python, so rounds
        of fixed shape pass values through the state, where an op may have written them (`room`)."""
        if not self.fixed:
            self._kept[name] = value
        elif value is not self._rooms.get(name):
            getattr(self.state, name)[: len(value)].copy_(value)

    def room(self, name: str, count: int) -> Tensor | None:
        """The state's memory for the first `count` entries of what will be kept, for an op that can write there; None
        if the op must allocate."""
        if not self.fixed:
            return None
        self._rooms[name] = getattr(self.state, name)[:count]
        return self._rooms[name]

    def kept(self, name: str, count: int) -> Tensor:
        """The first `count` entries of what was kept."""
        return (getattr(self.state, name) if self.fixed else self._kept[name])[:count]

    def last(self, count: int) -> Tensor:
        """The last committed tokens of each sequence, [n, count] int64, read on the device."""
        s = self.state
        return s.committed.gather(1, s.length[:, None] + torch.arange(-count, 0, device=s.length.device))

    def write(self, tokens: list[list[int]], parents: list[list[int]]) -> None:
        """Write drafts made on the host: tokens and parents (rows) of each sequence, of any size. Shorter drafts are
        padded with a token that the target verifies like any other."""
        n, N = len(tokens), max(map(len, tokens))
        self.size, self.drafted = N, [len(each) for each in tokens]
        self.tree = any(up != list(range(len(up))) for up in parents)
        self.depth = max(path_length(up) for up in parents)
        if not N:
            return
        device = self.window.device
        padded = [each + [0] * (N - len(each)) for each in tokens]
        self.window[:n, 1 : N + 1] = torch.tensor(padded, device=device)
        if self.tree:
            rows = [up + list(range(len(up), N)) for up in parents]
            self.state.parents[:n, :N] = torch.tensor(rows, device=device)
            self.state.parents[n:, :N] = 0

    def extend(self, head: Head, final: Final, positions: Tensor, out: Tensor) -> None:
        """Write the best candidate of each row [n, E] at `positions` [n] to `out` [n, 1]. If policies ask, keep its
        log-probability for `goes_on`: the chain is a tree of width 1 that grows."""
        scored = self.traced and not self.fixed  # a replayed graph runs no Python
        if not self.asks and not scored:
            head.best(final, self.draws, positions, out[:, 0])
            return
        ids, logits, lse = head.ranked(final, 1, self.draws, positions)
        if scored:
            self.scores.append(logits - lse.unsqueeze(1))
        if not self.asks:
            out.copy_(ids)
            return
        scores = self.room("confidence", self.n)
        scores = logits.new_empty(self.n) if scores is None else scores
        grow(ids, logits, lse, out, self.state.parents[:, :1], scores.unsqueeze(1), 0)
        self.keep("confidence", scores)

    def goes_on(self) -> bool:
        """Whether at least half of the sequences' policies draft another token; reads `extend`'s log-probabilities on
        the host."""
        scores = self.kept("confidence", self.n)
        if scores.is_cuda:
            scores = to_host(scores)
            torch.cuda.current_stream().synchronize()
        return self.vote([math.exp(x) for x in scores.tolist()[: len(self.sequences)]])

    def vote(self, confidence: list[float]) -> bool:
        self.confidence.append(confidence)
        votes = sum(s.policy.keep_drafting(p) for s, p in zip(self.sequences, confidence, strict=True))
        return 2 * votes >= len(self.sequences)


def launch(r: Round, target: Model, cache: KVCache, drafter: Drafter | None) -> None:
    """Start the round: launch drafting, the verify pass and acceptance."""
    capture = r.graphs.capture
    r.marks.append(now(capture))
    drafts = drafter is not None and min(r.budget.nodes, r.budget.depth) > 0
    if drafter is not None and drafts:
        for slot in range(len(r.sequences)):
            r.behind += drafter.catch_up(r, slot)
    r.marks.append(now(capture))
    if drafter is not None and drafts:
        drafter.draft(r)
    r.marks.append(now(capture))
    verify(r, target, cache)
    r.marks.append(now(capture))
    accept(r, target, cache)
    r.marks.append(now(capture))


def verify(r: Round, model: Model, cache: KVCache) -> None:
    """One target forward over the root and the draft of every sequence: the logits after each row. A self-drafted chain
    has already run layers [0, exit) on all rows but the last."""
    exit = r.budget.exit if r.size else 0
    r.run(("verify", r.size, r.tree, exit), lambda: _verify(r, model, cache, exit), draws=False)


def _verify(r: Round, model: Model, cache: KVCache, exit: int) -> None:
    s, N = r.state, r.size
    room = r.room("positions", r.n * (N + 1))
    if exit:
        assert r.hidden is not None
        below = tuple(n for n in r.budget.taps if n < exit)
        last, hidden = begin(model, cache, r.lengths, 1, N, s.window[:, N : N + 1])
        out = forward(model, cache, last, hidden, slice(exit), below)
        hidden = _beside(r.hidden, out.hidden)
        taps = {n: _beside(r.taps[n], out.taps[n]) for n in below}
        rows = cache.place(r.lengths, 1, 0, N + 1, positions=room)
        out = forward(model, cache, rows, hidden, slice(exit, None), tuple(n for n in r.budget.taps if n >= exit))
        r.taps = taps | out.taps
    else:
        parents = s.parents[:, :N] if r.tree else None
        rows, hidden = begin(model, cache, r.lengths, 1, 0, s.window[:, : N + 1], parents, positions=room)
        out = forward(model, cache, rows, hidden, taps=r.budget.taps)
        r.taps = out.taps
    r.keep("logits", model.logits(out.final, r.room("logits", r.n * (N + 1))))
    r.keep("positions", rows.positions)


def _beside(rows: Tensor, last: Tensor) -> Tensor:
    """[n, N, E] and [n, E] -> [n * (N + 1), E], each sequence's last row after its other rows."""
    return torch.cat((rows, last.unsqueeze(1)), 1).flatten(0, 1)


def accept(r: Round, model: Model, cache: KVCache) -> None:
    """Draw the target's tokens, find the path that agrees with them, extend the texts and keep the path's K/V."""
    r.run(("accept", r.size, r.tree), lambda: _accept(r, model, cache), attends=False)


def _accept(r: Round, model: Model, cache: KVCache) -> None:
    s, N, n = r.state, r.size, r.n
    logits, positions = r.kept("logits", n * (N + 1)), r.kept("positions", n * (N + 1))
    tokens, parents = s.window[:, 1 : N + 1], s.parents[:, :N] if r.tree else None
    forced = s.agrees.shape[1] > 0
    target = model.draw(r.draws, logits, positions) if forced or model.ranks else r.draws.splits(logits, positions)
    if isinstance(target, Tensor):
        target = target.view(n, N + 1)
        target = synthetic(target, tokens, parents, positions.view(n, N + 1), s.agrees) if forced else target
    texts = s.committed, s.length, s.window, s.limit, cache.block_table[:n], cache.page_size
    report, drawn = r.room("report", n * (3 + 2 * N)), r.room("target", n * (N + 1))
    report, drawn, src, dst = settle(tokens, parents, target, *texts, report, drawn)
    if r.tree:  # a chain's accepted rows are in place already
        kv_commit(cache.k, cache.v, src, dst)
    r.keep("report", report)
    r.keep("target", drawn)


def send(r: Round, vocab: int) -> None:
    """Start copying the round's results to the host; a trace adds the draft, the target's tokens and probabilities.
    `vocab`: the target's ids."""
    N, s, n = r.size, r.state, r.n
    # One logit tells: a number that is not finite in a hidden row spoils them all.
    first = r.kept("logits", n * (N + 1)).view(n, N + 1, -1)[:, :, 0]
    copies = {"report": r.kept("report", n * (3 + 2 * N)).view(n, -1), "first": first}
    if r.traced or r.generated:
        copies["draft"] = s.window[:, 1 : N + 1]
    if r.traced:
        copies |= {"target": r.kept("target", n * (N + 1)).view(n, -1)} | _probabilities(r, vocab)
        copies |= {"parents": s.parents[:, :N]} if r.tree else {}
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
    s, N, n = r.state, r.size, r.n
    out = {"probability": torch.cat(r.scores, 1)} if N and sum(x.shape[1] for x in r.scores) == N else {}
    logits = r.kept("logits", n * (N + 1))
    if logits.shape[-1] != vocab:
        return out
    logits = logits.view(n, N + 1, vocab)
    lse = logits.logsumexp(-1)
    own = r.kept("target", n * (N + 1)).view(n, N + 1, 1)
    out["own"] = logits.gather(-1, own).squeeze(-1) - lse
    each = torch.arange(n, device=logits.device).unsqueeze(1)
    rows = s.parents[:, :N] if r.tree else torch.arange(N, device=logits.device)
    out["agreed"] = logits[each, rows, s.window[:, 1 : N + 1]] - lse[each, rows]
    return out


def collect(r: Round) -> tuple[list[tuple[list[int], list[int]]], dict[str, float]]:
    """Wait for the round. Returns (path rows, the target's tokens along the path) per sequence, and seconds per
    stage. A path ends before a row whose logits are not finite."""
    if r.done is not None:
        r.done.synchronize()
    each = []
    reports, first = r.host["report"].tolist(), r.host["first"].tolist()
    for slot, (count, *rest) in enumerate(reports[: len(r.sequences)]):
        sound = next((i for i in range(count) if not math.isfinite(first[slot][rest[i]])), count)
        if sound < count:
            r.broken.add(slot)
        each.append((rest[:sound], rest[r.size + 1 : r.size + 1 + sound]))
    seconds = {stage: _seconds(a, b) for stage, a, b in zip(STAGES, r.marks[:-1], r.marks[1:], strict=True)}
    return each, seconds


def path_length(parents: Sequence[int]) -> int:
    """The length of a tree's longest path, in tokens."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return max(depths)


def to_host(x: Tensor) -> Tensor:
    """Start a copy to pinned memory, which torch reuses."""
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)


def now(events: bool) -> Any:
    if not events:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(a: Any, b: Any) -> float:
    return b - a if isinstance(a, float) else a.elapsed_time(b) / 1e3
