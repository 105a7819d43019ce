"""One round of n requests: draft -> verify -> sample + accept -> commit. The only implementation
of a round.

Words: the *root* is the last committed token, its K/V not yet in the target's cache. *accepted*: draft tokens kept.
*recovered*: the target's own token where a draft was refused; *bonus*: its token after a wholly accepted path; both are
the new root. The target's token after each row is a function of the seed, the position and the logits alone
(`sample_rows`), so a round commits exactly what plain decoding would, whatever was drafted and whatever shares the
batch.

All requests of a round have one shape, which may be fixed (batch.py): then its graph segments are CUDA graphs.
"""

import math
import operator
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specker.kernels.adjust_rows import adjust_rows
from specker.kernels.delta_rows import BLOCK
from specker.kernels.round.settle import Texts, settle
from specker.kernels.sample_rows import Splits
from specker.model.cache import KVCache, Rows
from specker.model.decoder import Model, Output, experts_read, forward
from specker.model.prefill import Part, prefill_parts
from specker.model.rows import begin
from specker.runtime.control.choose import worth_rows
from specker.runtime.control.policy import UNLIMITED, WHOLE, Reading
from specker.runtime.control.reasons import BEHIND
from specker.runtime.round.batch import Batch
from specker.runtime.round.branches import drafted
from specker.runtime.round.constrain import constrain, masked
from specker.runtime.round.drafter import Draft, Drafter
from specker.runtime.round.state import Request, to_host

STAGES = ("prefill", "draft", "verify", "accept")  # the prefill is of a drafter that missed tokens


@dataclass(eq=False)
class Round:
    """A batch's round: what was launched, what it cost, and what the host knows of it."""

    batch: Batch
    draft: Draft = field(default_factory=Draft)
    reason: str = ""  # why nothing is drafted (choose.py)
    skips_drafter: bool = (
        False  # whether it is plain decoding's own round: neither policies nor the drafter have a part
    )
    trial: bool = False  # whether the draft finds out if drafting pays (choose.py)
    paired: bool = False  # whether plain rounds were timed not long before (`Chooser.paired`)
    warm: bool = True  # whether it followed enough rounds of its kind (`Chooser.warm`)
    forced: bool = False  # whether grammars force the next token of every text, so that the drafter has no part
    drawn: bool = False  # whether the verify pass draws the target's tokens, and writes no logits
    allowed: Tensor | None = None  # [rows, W] int32, bits of the tokens that may follow each row; None: all may
    instead: Tensor | None = None  # tokens [n, N] int64 to verify instead of the draft's first N, to measure costs
    reading: Reading = WHOLE  # what the drafter may prefill before it drafts
    reads: bool = False  # whether the one with a model does, also if it drafts nothing itself
    behind: int = 0  # tokens that it prefilled
    prices: Sequence[float] = ()  # what 0, 1, .. further rows of the verify pass cost, in tokens (Costs.row_prices)
    parts: Sequence[Part] = ()  # of prompts whose rows come with the verify pass
    part_layers: tuple[int, ...] = ()  # depths at which the parts' rows are kept
    part_rows: list[dict[int, Tensor]] = field(default_factory=list)  # of each part, depth -> [rows, E]
    part_seconds: float = 0.0  # of the verify pass, the parts' share, known once finished
    places: Tensor | None = None
    """If the sequences verify unequally many rows: which entries of [n, size + 1] they are, [rows] int64."""
    host: dict[str, Tensor] = field(default_factory=dict)  # copies on the host, complete once `done`
    cut: set[int] = field(default_factory=set)  # slots whose path the text's limit or a grammar cut
    broken: set[int] = field(default_factory=set)  # slots whose logits are not finite, known once collected
    seconds: dict[str, float] = field(default_factory=dict)  # by stage, known once collected
    began: float = 0.0  # when the host began with it
    other: float = 0.0  # seconds of the host beside the stages, known once collected: the choice of the shape, copies
    experts: float = 0.0  # that the verify pass read in a layer, on average, known once collected
    done: Any = None  # the event after the copies
    wait: Callable[[Any], None] = operator.methodcaller("synchronize")  # for `done`
    share: Callable[[Batch, Draft], Draft] | None = None  # of ranks: rank 0's draft in place of this rank's own
    marks: list[Any] = field(default_factory=list)  # times, or events, around the stages

    @property
    def requests(self) -> list[Request]:
        return self.batch.requests

    @property
    def rows(self) -> int:
        """Rows of the verify pass: the root and the draft of every sequence."""
        return self.batch.n * (self.draft.size + 1) if self.places is None else len(self.places)

    def padded(self, x: Tensor, fill: int) -> Tensor:
        """A value of every verified row [rows] -> [n, size + 1], with `fill` where a sequence has no row."""
        if self.places is None:
            return x.view(self.batch.n, -1)
        out = x.new_full((self.batch.n, self.draft.size + 1), fill)
        out.view(-1)[self.places] = x
        return out


def launch(r: Round, target: Model, cache: KVCache, drafters: Sequence[Drafter]) -> None:
    """Start the round: launch drafting, the verify pass and acceptance. `drafters`: none for plain decoding. One of
    them drafts, `Budget.part`, or two (branches.py); only the first may have a model, and read the target's hidden
    rows."""
    b = r.batch
    events = b.graphs.capture
    b.graphs.counters.reset()
    r.marks.append(now(events))
    drafting = drafters[b.budget.part] if drafters and min(b.budget.nodes, b.budget.depth) > 0 else None
    reader = drafters[0] if drafters and (r.reads or r.reason == BEHIND) else drafting
    if reader is not None:
        r.behind = reader.advance(b.requests, r.reading, b.fixed)
    r.marks.append(now(events))
    if drafters:
        b.aux_layers = drafters[0].reads(b.budget)
        if drafting is not None:
            r.draft = drafted(b, drafters)
            if r.share is not None:
                r.draft = r.share(b, r.draft)
            r.places = shorten_drafts(r, target)
            if r.instead is not None:
                b.window[: len(r.instead), 1 : r.instead.shape[1] + 1] = r.instead
    r.marks.append(now(events))
    r.allowed = constrain(b, r.draft, BLOCK if target.config.layer.recurrent else UNLIMITED)
    verify(r, target, cache)
    r.marks.append(now(events))
    accept(r, target, cache)
    if b.aux_layers:
        drafters[0].accept_on_device(b, r.draft)
    r.marks.append(now(events))


def shorten_drafts(r: Round, model: Model) -> Tensor | None:
    """Leave out the draft tokens that are less likely to be accepted than their rows cost. Returns `Round.places` if
    some drafts are then shorter than others. A batch of fixed shape, a tree, traces, log-probabilities, grammars and
    drafters that read hidden rows want equally many rows of each sequence: None, and shorter drafts are padded."""
    b, d = r.batch, r.draft
    whole = b.fixed or d.tree or d.resume is not None or b.aux_layers or b.traced or model.ranks
    if whole or any(request.logprobs or request.guide for request in b.requests):
        return None
    counts = [d.count(slot) for slot in range(b.n)]
    if r.prices:
        confidence = [[of_token[slot] for of_token in d.confidence] for slot in range(b.n)]
        counts = worth_rows(weighted(b.requests, counts, confidence), r.prices)
    if min(counts) == d.size:
        return None
    d.draft_lengths, first = counts, range(0, b.n * (d.size + 1), d.size + 1)
    places = [at + row for at, count in zip(first, counts, strict=True) for row in range(count + 1)]
    return torch.tensor(places, dtype=torch.int64, device=b.window.device)


def weighted(
    requests: Sequence[Request], counts: Sequence[int], confidence: Sequence[list[float]]
) -> list[list[float]]:
    """How probable it is that each token of each chain is accepted, times what a token of that text is worth."""
    texts = zip(requests, counts, confidence, strict=True)
    return [[s.policy.worth * p for p in s.policy.chances(count, own)] for s, count, own in texts]


def draws(r: Round, model: Model) -> bool:
    """Whether the verify pass draws the target's tokens itself (`Model.sampled`). Filters, penalties, grammars,
    log-probabilities and traces need the logits. The tokens are the same either way."""
    b = r.batch
    wanted = b.traced or b.early or r.allowed is not None or any(request.logprobs for request in b.requests)
    return model.samples and b.draws.kind != "filtered" and not b.draws.adjusts and not wanted


def verify(r: Round, model: Model, cache: KVCache) -> None:
    """One target forward over the root and the draft of every sequence: the logits or the target's token after each
    row."""
    r.drawn = draws(r, model)
    layer = 0 if r.draft.resume is None else r.draft.resume.layer
    name = "verify", r.draft.size, r.draft.tree, layer, r.batch.aux_layers, r.drawn
    r.batch.run(name, lambda: _verify(r, model, cache), draws=False)


def _verify(r: Round, model: Model, cache: KVCache) -> None:
    b, d, N = r.batch, r.draft, r.draft.size
    s, memory, lengths = b.state, b.memory, b.lengths
    positions = memory.out("positions", r.rows)
    if r.places is not None:
        counts = [d.count(slot) + 1 for slot in range(b.n)]
        rows = cache.after([length - 1 for length in lengths], counts)
        hidden = model.embed_tokens(s.window[:, : N + 1].reshape(-1)[r.places])
        outs = [_forward(r, model, cache, rows, hidden)]
        aux = {}
    elif d.resume is not None:  # the last row alone lacks the first layers
        layer = d.resume.layer
        below, above = (tuple(n for n in b.aux_layers if (n < layer) == low) for low in (True, False))
        last, hidden = begin(model, cache, lengths, 1, N, s.window[:, N : N + 1])
        first = forward(model, cache, last, hidden, slice(layer), below)
        hidden = model.entering(_beside(d.resume.hidden, first.hidden), s.window[:, : N + 1])
        rows = cache.place(lengths, 1, 0, N + 1, positions=positions)
        outs = [first, forward(model, cache, rows, hidden, slice(layer, None), above)]
        aux = {n: _beside(d.resume.aux[n], first.aux_hidden_states[n]) for n in below} | outs[1].aux_hidden_states
    else:
        parents = s.parents[:, :N] if d.tree else None
        rows, hidden = begin(model, cache, lengths, 1, 0, s.window[:, : N + 1], parents, positions=positions)
        if model.counts_experts and b.fixed:
            rows = rows._replace(idle=s.unused)
        outs = [_forward(r, model, cache, rows, hidden)]
        aux = outs[0].aux_hidden_states
    if r.parts and not r.part_rows:
        _, r.part_rows = prefill_parts(model, cache, r.parts, r.part_layers)
    if b.aux_layers:
        memory.put_aux([aux[n] for n in b.aux_layers])
    if model.counts_experts:
        memory.put("experts", experts_read(model, outs))
    if r.drawn:
        own = b.draws if r.places is None else b.draws.each(r.places // (N + 1))
        out, out_peak = memory.out("target", r.rows), memory.out("peak", r.rows)
        tokens, peak = model.sampled(outs[-1].final, own, rows.positions, out, out_peak)
        memory.put("target", tokens)
        memory.put("peak", peak)
    else:
        memory.put("logits", model.logits(outs[-1].final, memory.out("logits", r.rows)))
    memory.put("positions", rows.positions)


def _forward(r: Round, model: Model, cache: KVCache, rows: Rows, hidden: Tensor) -> Output:
    """The target's forward over a round's rows and, if these are chains, the parts of prompts. One pass reads the
    weights once for both. A mixture of experts counts what the round's rows read, so its parts have their own pass."""
    layers = r.batch.aux_layers
    if not r.parts or r.draft.tree or model.counts_experts:
        return forward(model, cache, rows, hidden, aux_layers=layers)
    both = tuple(sorted({*layers, *r.part_layers}))
    out, parts = prefill_parts(model, cache, r.parts, both, (rows, hidden))
    r.part_rows = [{depth: part[depth] for depth in r.part_layers} for part in parts]
    return out


def _beside(rows: Tensor, last: Tensor) -> Tensor:
    """[n, N, E] and [n, E] -> [n * (N + 1), E], each sequence's last row after its other rows."""
    return torch.cat((rows, last.unsqueeze(1)), 1).flatten(0, 1)


def accept(r: Round, model: Model, cache: KVCache) -> None:
    """Draw the target's tokens, unless the verify pass has, find the path that agrees with them, extend the texts and
    keep the path's K/V."""
    draws = r.batch.draws
    name = "accept", r.draft.size, r.draft.tree, None if r.drawn else (draws.kind, draws.adjusts, r.batch.early)
    r.batch.run(name, lambda: _accept(r, model, cache), attends=False, draws=False)


def _accept(r: Round, model: Model, cache: KVCache) -> None:
    b, N, n = r.batch, r.draft.size, r.batch.n
    s, memory = b.state, b.memory
    tokens, parents = s.window[:, 1 : N + 1], s.parents[:, :N] if r.draft.tree else None
    if r.places is not None:
        tokens = r.padded(s.window[:, : N + 1].reshape(-1)[r.places], -2)[:, 1:]
    target = target_tokens(r, model)
    if isinstance(target, Tensor):
        target = r.padded(target, -1)  # it equals no draft token
    report, drawn, src, dst = settle(
        tokens,
        parents,
        target,
        Texts(s.committed, s.length, s.window, s.limit, cache.block_table[:n], cache.page_size),
        memory.out("report", n * (3 + 2 * N)),
        memory.out("target", n * (N + 1)),
    )
    if r.draft.tree:  # a chain's accepted rows are in place already
        cache.shift(src, dst)
    memory.put("report", report)
    memory.put("target", drawn)


def target_tokens(r: Round, model: Model) -> Tensor | Splits:
    """The target's own token after each row [rows] int64, or what `settle` reduces to it: what drafts must equal."""
    draws, memory, early = r.batch.draws, r.batch.memory, r.batch.early
    if r.drawn:
        return memory.get("target", r.rows)
    logits, positions = memory.get("logits", r.rows), memory.get("positions", r.rows)
    if r.allowed is not None:
        logits = masked(logits, r.allowed)
    if early:
        logits = without_stop_ids(r, model.whole_logits(logits), positions)
    if draws.adjusts:
        logits = adjusted(r, logits if early else model.whole_logits(logits))
    if r.places is not None:
        return draws.each(r.places // (r.draft.size + 1)).tokens(logits, positions)
    if model.ranks and not (draws.adjusts or early):
        return model.draw(draws, logits, positions)
    return draws.splits(logits, positions)


def without_stop_ids(r: Round, logits: Tensor, positions: Tensor) -> Tensor:
    """A copy of the logits [rows, V] at `positions` [rows], with -inf for the stop ids of a row whose text has too few
    tokens to end. A row of which a grammar leaves nothing else keeps them."""
    s, N = r.batch.state, r.draft.size
    ids, earliest = (x.repeat_interleave(N + 1, 0) for x in (s.stop_ids, s.earliest))
    if r.places is not None:
        ids, earliest = ids[r.places], earliest[r.places]
    found = logits.gather(1, ids)
    out = logits.scatter(1, ids, found.masked_fill((positions < earliest).unsqueeze(1), float("-inf")))
    return out if r.allowed is None else torch.where(out.isneginf().all(1, keepdim=True), logits, out)


def adjusted(r: Round, logits: Tensor) -> Tensor:
    """The rows' logits [rows, V] after biases, penalties and min_p, each by its own text. The launches are the same
    whichever of these a request has, so that one CUDA graph serves all."""
    s, N = r.batch.state, r.draft.size
    window, parents = s.window[:, : N + 1], s.parents[:, :N] if r.draft.tree else None
    return adjust_rows(
        logits, s.committed, s.prompt, s.length, window, s.rules, parents, r.places, s.bias_ids, s.bias, floors=True
    )


def send(r: Round, model: Model) -> None:
    """Start copying the round's results to the host; a trace adds the draft, the target's tokens and probabilities."""
    b, N, n = r.batch, r.draft.size, r.batch.n
    s, memory = b.state, b.memory
    # One logit tells: a number that is not finite in a hidden row spoils them all.
    one = memory.get("peak", r.rows) if r.drawn else memory.get("logits", r.rows)[:, 0]
    copies = {"report": memory.get("report", n * (3 + 2 * N)).view(n, -1), "one": r.padded(one, 0)}
    if model.counts_experts:
        copies["experts"] = memory.get("experts", 1)
    if b.traced or r.draft.observed == "draft":
        copies["draft"] = s.window[:, 1 : N + 1]
    if r.draft.observed == "search":
        copies["search"] = memory.get("search", n)
    if b.traced:
        copies |= {"target": memory.get("target", r.rows).view(n, -1)}
        copies |= _probabilities(r, model.config.vocab_size)
        copies |= {"parents": s.parents[:, :N]} if r.draft.tree else {}
    if (most := max(request.logprobs for request in r.requests)) > 0:
        copies |= _logprobs(r, model.whole_logits(memory.get("logits", r.rows)), most)
    if not s.length.is_cuda:
        r.host = {name: x.clone() if b.fixed or name in ("draft", "parents") else x for name, x in copies.items()}
        return
    r.host = {name: to_host(x) for name, x in copies.items()}
    r.done = torch.cuda.Event()
    r.done.record()


def _probabilities(r: Round, vocab: int) -> dict[str, Tensor]:
    """For a trace, natural logarithms of probabilities: the draft's of its tokens [n, N], if its head computed them;
    the target's, before temperature and filters, of its own token after each row [n, N + 1] and of each draft token
    [n, N], unless a rank holds only a part of the logits."""
    s, N, n, scores = r.batch.state, r.draft.size, r.batch.n, r.draft.scores
    out = {"probability": torch.cat(scores, 1)} if N and sum(x.shape[1] for x in scores) == N else {}
    logits = r.batch.memory.get("logits", r.rows)
    if logits.shape[-1] != vocab:
        return out
    logits = logits.view(n, N + 1, vocab)
    lse = logits.logsumexp(-1)
    own = r.batch.memory.get("target", r.rows).view(n, N + 1, 1)
    out["own"] = logits.gather(-1, own).squeeze(-1) - lse
    each = torch.arange(n, dtype=torch.int64, device=logits.device).unsqueeze(1)
    rows = s.parents[:, :N] if r.draft.tree else torch.arange(N, dtype=torch.int64, device=logits.device)
    out["agreed"] = logits[each, rows, s.window[:, 1 : N + 1]] - lse[each, rows]
    return out


def _logprobs(r: Round, logits: Tensor, most: int) -> dict[str, Tensor]:
    """Log-probabilities after each row, before temperature and filters, from logits [n * (N + 1), V]: of the target's
    own token [n, N + 1], and the `most` best ids and theirs [n, N + 1, most]."""
    logits = logits.view(r.batch.n, r.draft.size + 1, -1)
    own = r.batch.memory.get("target", r.rows).view(*logits.shape[:2], 1)
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
        r.wait(r.done)
    if os.environ.get("SPECKER_DEBUG"):
        r.batch.graphs.counters.check()
    each = []
    reports, one = r.host["report"].tolist(), r.host["one"].tolist()
    for slot, (count, *rest) in enumerate(reports[: len(r.requests)]):
        sound = next((i for i in range(count) if not math.isfinite(one[slot][rest[i]])), count)
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
