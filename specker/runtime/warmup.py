"""Warm-up before the first request: compile every kernel and capture every graph, so that no request waits for them."""

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from specker.model.chunks import LONG_FROM, Chunks
from specker.options import Params, Sampling
from specker.runtime.control.choose import NONE
from specker.runtime.control.policy import Budget, Fixed, Policy
from specker.runtime.loop import Loop
from specker.runtime.round.drafter import Draft, Resume
from specker.runtime.round.round import accept, collect, draws, launch, send, shorten_drafts, verify
from specker.runtime.round.state import Request
from specker.runtime.session import Session
from specker.runtime.strategies.base import Plan

# To measure costs:
MAX_SECONDS = 0.6  # for all kinds of rounds
MIN_ROUNDS = 2  # of each kind
ENOUGH_SECONDS = 0.02  # shorter ones get more rounds, up to MAX_ROUNDS: one interruption is much of a short round
MAX_ROUNDS = 12
TEXT_TOKENS = 32
DRAFT_SIZES = 0, 4, 1, 8, 16, 2  # tokens, the most informative number first

CHUNK_ROWS = *range(64, 512, 64), *range(512, 2049, 256)  # of the chunks of prompts that are prefilled

DRAWS = Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.5, top_k=2)  # one of each kind
PENALISED = tuple(replace(sampling, presence_penalty=1.0) for sampling in DRAWS)


def warm_up(
    session: Session, plan: Plan, policy: Callable[[], Policy], on_progress: Callable[[int, int], None] | None = None
) -> None:
    """On a GPU, compile every kernel and capture the usual graphs (`warm_rounds`). DEL's verify passes of long drafts,
    of which there is one per exit and length, are captured at their second use. Then, on any device, decode a few
    tokens with and without the drafter, and measure what rounds cost, for policies that rest. `on_progress` is called
    with (done, of)."""
    loop = session.loop
    loop.pages.all()
    if loop.graphs.capture:
        gc.collect()  # the graphs of engines that were dropped: torch does not collect before a capture
    if loop.fixed:
        with session.alone():
            warm_rounds(loop, plan.budgets, plan.verified, plan.accepted, policy().confident, on_progress, plan.exits)
    filters: tuple[dict[str, Any], ...] = ({}, {"top_k": 2}, {"top_p": 0.5}, {"top_k": 2, "top_p": 0.5})
    sampled: tuple[dict[str, Any], ...] = tuple({"temperature": 1.0, **f} for f in filters)
    # On a CPU nothing is left to compile: a first round reads the weights' pages.
    compiles = loop.fixed or loop.target.device.type != "cpu"
    told: tuple[dict[str, Any], ...] = ({"logprobs": 1}, {"logprobs": 1, "temperature": 1.0})
    hows = {}, *sampled, *(told if loop.target.samples else ())
    taken = hows if compiles else ({},)
    for done, how in enumerate(taken, 1):
        _decode(session, 2, 8 if compiles else 2, True, **how)
        _decode(session, 2, 2, False, **how)
        if loop.fixed and loop.drafter is not None:
            with session.alone():
                _on_the_host(loop, Params.of(**how), policy().confident)
        if on_progress is not None and not loop.fixed:  # otherwise the rounds of fixed shape are most of the work
            on_progress(done, len(taken) + 1)
    if loop.fixed and loop.drafter is not None:
        with session.alone():
            for sampling in PENALISED:
                _on_the_host(loop, Params(sampling=sampling), policy().confident)
    if loop.graphs.capture:  # torch's linears load their kernels on the first call with a similar number of rows
        for length in _prompts(Chunks.of(loop.target.config), loop.target.config.max_context - 3):
            _decode(session, length + 1, 2, True)
    loop.history.clear()  # of what the first rounds took, which compiled, and of the drafts for these texts
    if loop.runner is not None:
        loop.runner.chooser.clear()
    with session.alone():
        if loop.drafter is not None and policy().may_skip_drafting:
            measure(loop, (*plan.budgets, *policy().budgets()) or (loop.largest,), policy().confident)
        loop.clear(forget=True)
    if on_progress is not None and not loop.fixed:
        on_progress(len(taken) + 1, len(taken) + 1)
    loop.graphs.warmed()
    if loop.ranks is not None:
        loop.ranks.warmed()


def _prompts(chunks: Chunks, most: int) -> Iterator[int]:
    """Lengths of prompts up to `most` whose last chunks are short and long, a text's first and later ones."""
    lengths = [rows for rows in CHUNK_ROWS if rows <= chunks.short]
    lengths += [chunks.short + chunks.short // 2]
    lengths += [LONG_FROM + rows for rows in CHUNK_ROWS if chunks.short < rows <= chunks.long]
    yield from dict.fromkeys(min(length, most) for length in lengths)


def _decode(session: Session, length: int, count: int, speculates: bool, **sampling: Any) -> None:
    """Decode `count` tokens after a prompt of `length`."""
    params = Params.of(max_new_tokens=count, prefix_cache="off", cache_salt=None, **sampling)
    request = session.request([0] * length, params, speculates=speculates, traced=speculates, reads=False)
    for _ in session.stream([request]):
        pass


@torch.inference_mode()
def warm_rounds(
    loop: Loop,
    budgets: Sequence[Budget],
    verified: Sequence[int],
    accepted: Sequence[int],
    confident: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
    exits: Sequence[Budget] = (),
) -> None:
    """Run every round of fixed shape that a request may use, for every padded number of slots. All are captured but
    those of long texts in a batch that is neither one text nor full: a request that uses one captures it. `budgets`:
    the shapes that policies may propose (empty: no draft); `verified`, `accepted`: further draft sizes to verify and to
    accept; `exits`: further drafts of the target's first layers to verify, for one text and for a full batch.
    `confident`: policies end drafts by confidence. `on_progress` is called with (done, of)."""
    for cache in loop.slots.caches:
        for kv in cache.kv:
            kv.zero_()  # finite K/V gives finite logits and valid ids
    todo: list[tuple[bool, Callable[[], None]]] = []
    most, ahead = loop.target.config.max_context, loop.batches.lookahead
    lengths = [max(min(b, most) - ahead, loop.largest.depth + 1) for b in loop.batches.buckets]
    # A verify pass that draws the tokens and one that writes logits are different graphs. So is the acceptance after
    # logits for each kind of draws, with and without penalties, and where a text may not end yet; it does not depend on
    # the KV bucket.
    plain = [Params(sampling=sampling) for sampling in DRAWS]
    penalised = [Params(sampling=sampling) for sampling in PENALISED]
    told = [Params(sampling=sampling, logprobs=1) for sampling in DRAWS[:2] if loop.target.samples]
    every = [*plain, *penalised, *told]
    early = [replace(params, min_tokens=1) for params in plain]  # with penalties, a first use captures
    sizes = dict.fromkeys(min(1 << i, loop.size) for i in range(loop.size.bit_length() + 1))
    for n, (before, length) in itertools.product(sizes, itertools.pairwise((0, *lengths))):
        rare = bool(before) and n not in (1, loop.size)
        for params, budget in itertools.product(plain if before else every, budgets):
            todo.append((rare, partial(_drafted, loop, n, before, length, params, budget, confident)))
        for params in (plain[0], penalised[0]):
            todo.append((rare, partial(_sizes, loop, n, length, params, verified, False)))
            if exits and n in (1, loop.size):
                todo.append((False, partial(_exits, loop, n, length, params, exits)))
    for n, params in itertools.product(sizes, (*every, *early)):
        todo.append((False, partial(_sizes, loop, n, lengths[0], params, accepted, True)))
    for done, (rare, work) in enumerate(todo, 1):
        with loop.graphs.compiling() if rare else nullcontext():
            work()
        if on_progress is not None:
            on_progress(done, len(todo))
    loop.clear()


@torch.inference_mode()
def measure(loop: Loop, budgets: Sequence[Budget], confident: bool) -> None:
    """Time rounds of one sequence, and of a full batch, with drafts of several sizes: the most informative first, as
    many as fit into about MAX_SECONDS. `budgets`: shapes whose ways to draft are timed; `confident`: as in
    `warm_rounds`. Ranks run the same rounds: each waits for the others in every one."""
    start, most = time.perf_counter(), loop.largest.depth
    ways = dict.fromkeys(replace(b, nodes=1, depth=1, extra=(), beside=None) for b in budgets if b.nodes)
    trees = {b.nodes: b for b in budgets if b.tree and b.beside is None}
    sizes = dict.fromkeys(size if size in trees else min(size, most) for size in DRAFT_SIZES)
    for n, size in itertools.product(sorted({1, loop.size}), sizes):
        if len(loop.active) != n and not _admitted(loop, n):
            break
        shapes = [replace(way, nodes=size, depth=size) for way in (ways if size else (NONE,)) if size <= most]
        for shape in (*shapes, *([trees[size]] if size in trees else [])):
            _time(loop, shape, confident)
            if _agreed(loop, time.perf_counter() - start > MAX_SECONDS):
                loop.clear()
                return
    loop.clear()


def _admitted(loop: Loop, n: int) -> bool:
    """Fill the batch with n texts that never grow. False if there is no memory for them."""
    loop.clear()
    for slot in range(n):
        request = _text(_varied(loop, slot, 0, TEXT_TOKENS // 2) * 2, Params())
        if loop.target.config.max_context < 2 * TEXT_TOKENS or not loop.slots.admits(request):
            return False
        loop.prompts.admit(request)
    return True


def _varied(loop: Loop, slot: int, begin: int, count: int) -> list[int]:
    """Tokens from all over the vocabulary for `count` places in a slot's text. They choose different experts, as those
    of a real text do; after a text without meaning, a drafter may repeat one token, whose rows share their experts."""
    vocab = loop.target.config.vocab_size
    return [(7919 * place + 104729 * slot + 1) % vocab for place in range(begin, begin + count)]


def _time(loop: Loop, budget: Budget, confident: bool) -> None:
    """Learn the costs of rounds with drafts of this size: of each stage the shortest time, since interruptions only
    lengthen it. The first of several rounds does not count."""
    drafter, costs, n = loop.drafter, loop.history.costs, len(loop.active)
    assert drafter is not None
    own = drafter.cache if drafter.cache is not loop.cache else None
    fixed = loop.fixed and (not budget.nodes or loop.drafters[budget.part].prepare(loop.active).fixes(budget))
    rounds, began = [], time.perf_counter()
    instead = None
    if loop.target.config.layer.experts is not None:
        each = [_varied(loop, slot, len(s.token_ids), budget.nodes) for slot, s in enumerate(loop.active)]
        instead = torch.tensor(each, dtype=torch.int64, device=loop.target.device)
    for repeat in range(MAX_ROUNDS + 1):
        # As before a first draft; then as after a round of which nothing was accepted. A drafter that reads the target
        # never lacks the prompt.
        if own is not None and not drafter.aux_layers:
            own.exact_len[:n] = [len(drafter.cache_ids(s)) - 1 if repeat > 1 else 0 for s in loop.active]
        start = time.perf_counter()
        r = loop.new_round(budget, fixed)
        r.batch.confident = confident and not budget.part
        r.instead = instead
        with loop.threads():
            launch(r, loop.target, loop.cache, loop.drafters)
            send(r, loop.target)
            collect(r)
        stages = r.seconds
        other = 0.0 if fixed or loop.graphs.capture else time.perf_counter() - start - sum(stages.values())
        if r.behind and (repeat or not costs.prefill(1)):
            costs.observe_prefill(r.behind, stages["prefill"])
        rounds.append(stages | {"other": other})
        spent = time.perf_counter() - began
        if _agreed(loop, spent > MAX_SECONDS / 4 or (repeat >= MIN_ROUNDS and spent > ENOUGH_SECONDS)):
            break
    counted = rounds[1:] or rounds
    draft, *rest = (min(stages[name] for stages in counted) for name in ("draft", "verify", "accept", "other"))
    costs.measured(n, budget, r.draft.size, draft, sum(rest))


def _agreed(loop: Loop, ends: bool) -> bool:
    """Whether to end, by this process's clock, or by that of any rank."""
    return ends if loop.ranks is None else loop.ranks.least(int(not ends)) == 0


def _texts(loop: Loop, n: int, length: int, params: Params) -> None:
    """Fill the batch with n texts of `length` tokens that never grow."""
    loop.clear()
    for slot in range(n):
        request = _text([0] * length, params)
        for cache in loop.slots.caches:
            cache.take(slot, 1)
            cache.exact_len[slot] = length - 1
        loop.active.append(request)
        loop.state.write(slot, request)


def _text(ids: list[int], params: Params) -> Request:
    """A text that never grows."""
    return Request(
        index=0,
        token_ids=ids,
        limit=len(ids),
        sampling=params.sampling,
        policy=Fixed(0, 0),
        prefixes="off",
        stop_ids=frozenset({0}),
        min_tokens=params.min_tokens,
        logprobs=params.logprobs,
    )


@torch.inference_mode()
def _on_the_host(loop: Loop, params: Params, confident: bool) -> None:
    """A round that the host places, such as a text's first: other forms of the kernels than captured rounds use. In a
    batch also one of two texts that verify unequally many rows, where drafts allow it."""
    length = loop.largest.depth + 2
    if length + loop.batches.lookahead > loop.target.config.max_context:
        return
    for n in range(1, min(2, loop.size) + 1):
        _texts(loop, n, length, params)
        columns = loop.slots.columns(length)
        if all(cache.extend(slot, columns) for cache in loop.slots.caches for slot in range(n)):
            r = loop.new_round(loop.largest, False)
            r.batch.confident = confident
            launch(r, loop.target, loop.cache, loop.drafters)
            if n > 1 and r.draft.size:
                r.draft.draft_lengths = [r.draft.size, 0]
                if (places := shorten_drafts(r, loop.target)) is not None:
                    r.places = places
                    verify(r, loop.target, loop.cache)
                    accept(r, loop.target, loop.cache)
    loop.clear()


def _drafted(loop: Loop, n: int, before: int, length: int, params: Params, budget: Budget, confident: bool) -> None:
    """Run a whole round for the longest text in the KV bucket (before, length] that allows a draft of fixed shape."""
    drafter, there = loop.drafters[budget.part], length

    def fixes(length: int) -> bool:
        _texts(loop, n, length, params)
        return drafter.prepare(loop.active).fixes(budget)

    while there > before and not fixes(there):
        there -= max(1, (there - before) // 64)
    if there <= before:
        return
    for _ in range(loop.graphs.passes):
        r = loop.new_round(budget, True, length - there)
        r.batch.confident = confident
        launch(r, loop.target, loop.cache, loop.drafters)


def _exits(loop: Loop, n: int, length: int, params: Params, budgets: Sequence[Budget]) -> None:
    """Run verify passes for chains that the target's first layers drafted."""
    _texts(loop, n, length, params)
    for budget in budgets:
        for _ in range(loop.graphs.passes):
            r = loop.new_round(budget, True)
            rows = Resume.memory(r.batch)[:, : budget.depth]
            r.draft = Draft(budget.depth, resume=Resume(budget.exit, rows))
            verify(r, loop.target, loop.cache)


def _sizes(loop: Loop, n: int, length: int, params: Params, sizes: Sequence[int], accepting: bool) -> None:
    """Run verify passes, or acceptance, for drafts of `sizes` tokens: chains, and trees if the strategy drafts them."""
    _texts(loop, n, length, params)
    trees = loop.largest.nodes > loop.largest.depth
    for size in sizes:
        for tree in {False, trees and size > 0}:
            for _ in range(loop.graphs.passes):
                r = loop.new_round(Budget(size, size), True)
                r.draft = Draft(size, tree=tree, depth=size)
                if accepting:
                    r.drawn = draws(r, loop.target)
                    accept(r, loop.target, loop.cache)
                    if loop.drafter is not None and (aux_layers := loop.drafter.reads(r.batch.budget)):
                        r.batch.aux_layers = aux_layers
                        loop.drafter.accept_on_device(r.batch, r.draft)
                else:
                    verify(r, loop.target, loop.cache)
