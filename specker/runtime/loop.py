"""The one decoding loop: draft -> verify -> sample + accept -> commit -> observe, until a stop id or a limit.

Words: the *root* is the last committed token, its K/V not yet in the target's cache. *accepted*: draft tokens kept.
*recovered*: the target's own token where a draft was refused; *bonus*: its token after a wholly accepted path; both
are `next` here, the new root. The target's token after each row is a function of the seed, the position and the
logits alone (kernels/sample_rows.py), so a round commits exactly what plain decoding would, whatever was drafted.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from specker.config import Sampling
from specker.kernels.accept import accept_walk
from specker.runtime.draft import Draft
from specker.runtime.head import Head
from specker.runtime.model.cache import KVCache
from specker.runtime.model.decoder import Model, prefill
from specker.runtime.policy import Budget, Policy
from specker.runtime.rounds import StaticRounds
from specker.runtime.stats import Stats
from specker.runtime.strategies.dynamic_exit import EarlyExitDrafter, shadows
from specker.runtime.synthetic import synthetic
from specker.runtime.verify import verify

PROMPT_ROWS = 32  # that seed a policy's statistics (DEL)


class Drafter(Protocol):
    head: Head

    def reset(self) -> None: ...
    def prefill(self, committed: list[int]) -> None: ...
    def propose(
        self,
        committed: list[int],
        budget: Budget,
        sampling: Sampling,
        keep_drafting: Callable[[float], bool] | None = None,
    ) -> Draft: ...
    def observe(self, path: list[int]) -> None: ...


@dataclass
class Context:
    """All that a decode holds. `committed` ends with the root."""

    target: Model
    cache: KVCache
    drafter: Drafter | None
    policy: Policy
    sampling: Sampling
    stats: Stats
    committed: list[int]
    limit: int  # committed tokens at which decoding ends
    kept: set[int] | None = None  # the ids a trimmed drafter can propose, now; None: all
    trace: Callable[[dict[str, Any]], None] | None = None  # told of every round
    agrees: Tensor | None = None  # [positions] bool: acceptance is given, see synthetic.py
    rounds: StaticRounds | None = None  # rounds of static shape, where the engine runs them


@dataclass(frozen=True)
class Taken:
    """What a round committed."""

    path: list[int]  # accepted rows, row 0 (the root) first
    tokens: list[int]  # accepted draft tokens, then the target's own next token
    drafted: int = 0
    lost: bool = False  # the draft ended early, and a trimmed head could not have proposed the target's token


@torch.inference_mode()
def step(ctx: Context) -> Taken:
    """One round."""
    began = time.perf_counter()
    with ctx.stats.stage("draft"):
        draft, budget = _propose(ctx)
    with ctx.stats.stage("verify"):
        logits, positions, tapped = verify(ctx.target, ctx.cache, ctx.committed[-1], draft, budget.taps)
    with ctx.stats.stage("accept"):
        target = ctx.target.draw(ctx.sampling, logits, positions)
        if ctx.agrees is not None:
            target = synthetic(target, draft.tokens, draft.parents, positions, ctx.agrees)
        taken = _take(draft, target, ctx.kept)
    if tapped:  # rows past the accepted ones follow tokens that are not in the text
        kept = len(taken.path)
        _watch(ctx, {n: rows[:kept] for n, rows in tapped.items()}, target[:kept], positions[:kept], "watch", began)
    with ctx.stats.stage("commit"):
        ctx.cache.commit(taken.path)
        ctx.committed += taken.tokens
        if ctx.drafter is not None:
            ctx.drafter.observe(taken.path)
        ctx.policy.observe(draft, taken.path)
    ctx.stats.observe_budget(len(draft), budget.exit)
    if draft.found is not None:
        ctx.stats.observe_found(draft.found, draft.depth(), len(taken.path) - 1)
    if ctx.trace is not None:
        ctx.trace(_told(ctx, draft, budget, target, taken))
    return taken


def decode(ctx: Context, stop_ids: frozenset[int]) -> Iterator[tuple[list[int], int]]:
    """Rounds until `ctx.limit` tokens are committed or a stop id is: yields each round's emitted tokens and how many
    of them (the first ones) were draft tokens. A stop id ends the text and is its last token."""
    with ctx.stats.stage("prefill"):
        _prefill(ctx)
    yield from proceed(ctx, stop_ids)


def proceed(ctx: Context, stop_ids: frozenset[int]) -> Iterator[tuple[list[int], int]]:
    """`decode` of a text whose K/V is in place."""
    while len(ctx.committed) < ctx.limit:
        taken = _static(ctx) or step(ctx)
        tokens = taken.tokens
        stop = _first_stop(tokens, stop_ids)
        if stop is not None:
            tokens = tokens[: stop + 1]
        accepted = min(len(taken.path) - 1, len(tokens))
        ctx.stats.observe(taken.drafted, accepted, len(tokens))
        if ctx.kept is not None:
            ctx.stats.observe_kept(sum(token in ctx.kept for token in tokens), taken.lost)
        yield tokens, accepted
        if stop is not None:
            return


def _static(ctx: Context) -> Taken | None:
    """One round of static shape, with the next one on its way already; None where `step` has to do it."""
    rounds = ctx.rounds
    if rounds is None:
        return None
    if not rounds.flying and not _launch(ctx, rounds):
        if rounds.loaded:
            rounds.unload(len(ctx.committed))
        return None
    if ctx.drafter is None or not rounds.reads(ctx.policy.confident):
        _launch(ctx, rounds)
    found, seconds = rounds.collect()
    for stage, each in seconds.items():
        ctx.stats.seconds[stage] += each
    flight, room = found.flight, ctx.limit - len(ctx.committed)
    path, tokens = found.path[:room], found.tokens[:room]  # a static draft may reach beyond the end
    with ctx.stats.stage("commit"):
        ctx.committed += tokens
        draft = flight.outline()
        ctx.policy.observe(draft, path)
    ctx.stats.observe_budget(flight.drafted, flight.exit)
    if flight.found is not None:
        ctx.stats.observe_found(flight.found, flight.depth, len(path) - 1)
    lost = ctx.kept is not None and tokens[-1] not in ctx.kept and len(path) - 1 < flight.depth
    return Taken(path, tokens, flight.drafted, lost)


def _launch(ctx: Context, rounds: StaticRounds) -> bool:
    """Start a round of static shape, if there is room for one and a token left to find."""
    known = len(ctx.committed)
    if known + rounds.flying >= ctx.limit:  # the rounds on their way end it
        return False
    budget = ctx.policy.budget() if ctx.drafter is not None else Budget(0, 0)
    if not rounds.fits(known, budget, ctx.drafter is not None):
        return False
    if not rounds.loaded:
        rounds.load(ctx.committed, ctx.limit, ctx.sampling, ctx.agrees)
    asked = ctx.policy.keep_drafting if ctx.policy.confident else None
    rounds.launch(ctx.committed, budget, ctx.sampling, asked, ctx.drafter is not None)
    return True


def _first_stop(tokens: list[int], stop_ids: frozenset[int]) -> int | None:
    return next((i for i, token in enumerate(tokens) if token in stop_ids), None)


def _prefill(ctx: Context) -> None:
    """The prompt's K/V; a policy that watches layers learns from the prompt's last rows."""
    prompt, layers = ctx.committed[:-1], ctx.policy.layers
    if ctx.drafter is None or not layers:
        prefill(ctx.target, ctx.cache, prompt)
    else:
        depth = len(ctx.target.layers)
        tapped = prefill(ctx.target, ctx.cache, prompt, (*layers, depth), PROMPT_ROWS)
        if tapped:
            last, end = tapped.pop(depth), ctx.cache.exact_len
            positions = ctx.target.positions[end - len(last) : end]
            target = ctx.target.draw(ctx.sampling, ctx.target.logits(last), positions)
            _watch(ctx, tapped, target, positions, "prefill")
    if ctx.drafter is not None:
        ctx.drafter.prefill(ctx.committed)


def _watch(
    ctx: Context, tapped: dict[int, Tensor], target: Tensor, positions: Tensor, stage: str, began: float = 0.0
) -> None:
    """Tell the policy what the tapped layers would have said after rows whose target tokens are known, and what it took
    to find out. Where other rounds are of static shape, that is also what this one, which `began` then, took longer."""
    assert isinstance(ctx.drafter, EarlyExitDrafter)
    start = time.perf_counter()
    found = shadows(ctx.drafter.head, tapped, target, positions, ctx.sampling)
    match, confidence = (x.cpu().numpy() for x in found)  # a GPU has done the work by now
    seconds = 0.0
    if stage == "watch":  # the prompt's are part of its prefill
        seconds = time.perf_counter() - start
        ctx.stats.seconds[stage] += seconds
        if ctx.rounds is not None:
            seconds = max(seconds, time.perf_counter() - began - ctx.rounds.usual)
    ctx.policy.learn(tuple(tapped), match, confidence, seconds)


def _propose(ctx: Context) -> tuple[Draft, Budget]:
    if ctx.drafter is None:
        return Draft.empty(ctx.target.device), Budget(0, 0)
    room = ctx.limit - len(ctx.committed) - 1  # the target's own token needs one place
    free = ctx.cache.capacity - ctx.cache.exact_len - 1
    budget = ctx.policy.budget().clip(free, room)
    asked = ctx.policy.keep_drafting if ctx.policy.confident else None
    return ctx.drafter.propose(ctx.committed, budget, ctx.sampling, asked), budget


def _told(ctx: Context, draft: Draft, budget: Budget, target: Tensor, taken: Taken) -> dict[str, Any]:
    """A round as `--trace` writes it."""
    return {
        "position": len(ctx.committed) - len(taken.tokens),  # committed tokens before the round
        "draft": draft.tokens.tolist(),
        "parents": draft.parents.tolist(),
        "confidence": list(draft.confidence),
        "target": target.tolist(),
        "path": taken.path,
        "tokens": taken.tokens,
        "exit": budget.exit,
        **({} if draft.found is None else {"diffusion": asdict(draft.found)}),
    }


def _take(draft: Draft, target: Tensor, kept: set[int] | None) -> Taken:
    if not len(draft):
        return Taken([0], target.tolist())
    path, count, following = accept_walk(draft.tokens, draft.parents, target)
    rows, own = path[0, : int(count)].tolist(), int(following)
    tokens = draft.tokens.tolist()
    lost = kept is not None and own not in kept and len(rows) - 1 < draft.depth()
    return Taken(rows, [tokens[row - 1] for row in rows[1:]] + [own], len(draft), lost)
