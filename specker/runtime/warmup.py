"""Warm-up before the first request: compile every kernel and capture every graph, so that no request waits for them."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from specker.config import Sampling
from specker.model.decoder import PREFILL_CHUNK
from specker.runtime import state as states
from specker.runtime.choose import NONE
from specker.runtime.policy import Budget, Fixed
from specker.runtime.round import Round, accept, collect, launch, send, verify

if TYPE_CHECKING:
    from specker.runtime.engine import Engine
    from specker.runtime.loop import Batch

# To measure costs: the largest number of seconds that it takes, the fewest rounds of each kind, and the seconds below
# which there are more (up to MANY), since one interruption is much of a short round; tokens of the texts, and the sizes
# of drafts, the most informative first.
LIMIT, REPEATS, ENOUGH, MANY, MEASURED, SIZES = 0.6, 2, 0.02, 12, 32, (0, 4, 1, 8, 16, 2)
DRAWS = Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.5, top_k=2)  # one of each kind


def warm_up(engine: "Engine", tell: Callable[[int, int], None] | None = None) -> None:
    """On a GPU, compile every kernel and capture every graph, except DEL's verify passes: there is one per exit and
    length, captured at its second use. Then, on any device, decode a few tokens with and without the drafter, and
    measure what rounds cost, for policies that rest. `tell` is called with (done, of)."""
    batch = engine.batch
    if batch.fixed:
        plan = engine.plan
        with engine.alone():
            warm_rounds(batch, plan.budgets, plan.verified, plan.accepted, engine.policy().confident, tell)
    filters: tuple[dict[str, Any], ...] = ({}, {"top_k": 2}, {"top_p": 0.5}, {"top_k": 2, "top_p": 0.5})
    sampled: tuple[dict[str, Any], ...] = tuple({"temperature": 1.0, **f} for f in filters)
    # On a CPU nothing is left to compile: a first round reads the weights' pages.
    compiles = batch.fixed or batch.target.device.type != "cpu"
    for how in ({}, *sampled) if compiles else ({},):
        engine.generate([0, 0], 8 if compiles else 2, **how)
        engine.generate_ar([0, 0], 2, **how)
        if batch.fixed and batch.drafter is not None:
            with engine.alone():
                _on_the_host(batch, Sampling(**how), engine.policy().confident)
    if engine.captures:  # torch's linears in a prefill are slow on their first call, for a first and a later chunk
        for length in (PREFILL_CHUNK // 4, PREFILL_CHUNK + PREFILL_CHUNK // 2):
            engine.generate([0] * min(length, engine.max_context - 2), 2)
    batch.known.clear()  # of what the first rounds took, which compiled, and of the drafts for these texts
    batch.chooser.clear()
    if engine.drafter is not None and engine.policy().rests:
        with engine.alone():
            policy = engine.policy()
            budgets = (*engine.plan.budgets, *policy.budgets()) or (batch.largest,)
            measure(batch, budgets, policy.confident)


@torch.inference_mode()
def warm_rounds(
    batch: "Batch",
    budgets: Sequence[Budget],
    verified: Sequence[int],
    accepted: Sequence[int],
    asks: bool = False,
    tell: Callable[[int, int], None] | None = None,
) -> None:
    """Run every round of fixed shape that a request may use, for every padded number of slots. `budgets`: the shapes
    that policies may propose (empty: no draft); `verified`, `accepted`: further draft sizes to verify and to accept.
    `asks`: policies end drafts by confidence. `tell` is called with (done, of)."""
    for cache in batch.caches:
        cache.k.zero_(), cache.v.zero_()  # finite K/V gives finite logits and valid ids
    todo: list[Callable[[], None]] = []
    lengths = [
        max(min(b, batch.target.config.max_context) - batch.beyond, batch.largest.depth + 1) for b in batch.buckets
    ]
    sizes = [n for n in (1 << i for i in range(9)) if n < 2 * batch.size]
    for n, (before, length) in itertools.product(sizes, itertools.pairwise((0, *lengths))):
        n = min(n, batch.size)
        for sampling, budget in itertools.product(DRAWS, budgets):
            todo.append(partial(_drafted, batch, n, before, length, sampling, budget, asks))
        todo.append(partial(_sizes, batch, n, length, DRAWS[0], verified, False))
    for n, sampling in itertools.product(sizes, DRAWS):
        todo.append(partial(_sizes, batch, min(n, batch.size), lengths[0], sampling, accepted, True))
    for done, work in enumerate(todo, 1):
        work()
        if tell is not None:
            tell(done, len(todo))
    batch.clear()


@torch.inference_mode()
def measure(batch: "Batch", budgets: Sequence[Budget], asks: bool) -> None:
    """Time rounds of one sequence, and of a full batch, with drafts of several sizes: the most informative first, as
    many as fit into about LIMIT seconds. `budgets`: shapes whose ways to draft are timed; `asks`: as in
    `warm_rounds`."""
    start, most = time.perf_counter(), batch.largest.depth
    ways = dict.fromkeys(replace(b, nodes=1, depth=1, taps=()) for b in budgets if b.nodes)
    sizes = dict.fromkeys(min(size, most) for size in SIZES)
    for n, size in itertools.product(sorted({1, batch.size}), sizes):
        if len(batch.active) != n and not _admitted(batch, n):
            break
        for way in ways if size else (NONE,):
            _time(batch, replace(way, nodes=size, depth=size), asks)
            if time.perf_counter() - start > LIMIT:
                batch.clear()
                return
    batch.clear()


def _admitted(batch: "Batch", n: int) -> bool:
    """Fill the batch with n texts that never grow. False if there is no memory for them."""
    batch.clear()
    for slot in range(n):
        sequence = states.Sequence(
            slot, [i % (MEASURED // 2) for i in range(MEASURED)], MEASURED, Sampling(), Fixed(0, 0)
        )
        if batch.target.config.max_context < 2 * MEASURED or not batch.admits(sequence):
            return False
        batch.admit(sequence)
    return True


def _time(batch: "Batch", budget: Budget, asks: bool) -> None:
    """Learn the costs of rounds with drafts of this size: of each stage the shortest time, since interruptions only
    lengthen it. The first of several rounds does not count."""
    drafter, costs, n = batch.drafter, batch.known.costs, len(batch.active)
    assert drafter is not None
    own = drafter.cache if drafter.cache is not batch.cache else None
    fixed = batch.fixed and (not budget.nodes or drafter.fixed(MEASURED, budget))
    rounds, began = [], time.perf_counter()
    for repeat in range(MANY + 1):
        if own is not None:  # as before a first draft; then as after a round of which nothing was accepted
            own.exact_len[:n] = [0 if repeat < 2 else MEASURED - 1] * n
        r = batch.new_round(budget, fixed)
        r.asks = asks and not budget.part
        with batch.threads():
            launch(r, batch.target, batch.cache, drafter)
            send(r, batch.target.config.vocab_size)
            _, stages = collect(r)
        if r.behind and (repeat or not costs.prefill(1)):
            costs.observe_prefill(r.behind, stages["prefill"])
        rounds.append(stages)
        spent = time.perf_counter() - began
        if spent > LIMIT / 4 or (repeat >= REPEATS and spent > ENOUGH):
            break
    counted = rounds[1:] or rounds
    draft, verify, accept = (min(stages[name] for stages in counted) for name in ("draft", "verify", "accept"))
    costs.measured(n, budget, r.size, draft, verify + accept)


def _texts(batch: "Batch", n: int, length: int, sampling: Sampling) -> None:
    """Fill the batch with n texts of `length` tokens that never grow."""
    batch.clear()
    for slot in range(n):
        sequence = states.Sequence(slot, [0] * length, length, sampling, Fixed(0, 0))
        if batch.size > 1:
            for cache in batch.caches:
                cache.take(slot, 1)
        for cache in batch.caches:
            cache.exact_len[slot] = length - 1
        batch.active.append(sequence)
        batch.state.load(slot, sequence)


@torch.inference_mode()
def _on_the_host(batch: "Batch", sampling: Sampling, asks: bool) -> None:
    """A round that the host places, such as a text's first: other forms of the kernels than captured rounds use."""
    length = batch.largest.depth + 2
    if length + batch.beyond > batch.target.config.max_context:
        return
    _texts(batch, 1, length, sampling)
    if all(cache.grow(0, batch.columns(length)) for cache in batch.caches):
        r = batch.new_round(batch.largest, False)
        r.asks = asks
        launch(r, batch.target, batch.cache, batch.drafter)
    batch.clear()


def _drafted(batch: "Batch", n: int, before: int, length: int, sampling: Sampling, budget: Budget, asks: bool) -> None:
    """Run a whole round for the longest text in the KV bucket (before, length] that allows a draft of fixed shape."""
    assert batch.drafter is not None
    there = length
    while there > before and not batch.drafter.fixed(there, budget):
        there -= max(1, (there - before) // 64)
    if there <= before or not batch.drafter.fixed(there, budget):
        return
    _texts(batch, n, there, sampling)
    for _ in range(batch.graphs.passes):
        r = batch.new_round(budget, True, length - there)
        r.asks = asks
        launch(r, batch.target, batch.cache, batch.drafter)


def _sizes(batch: "Batch", n: int, length: int, sampling: Sampling, sizes: Sequence[int], accepting: bool) -> None:
    """Run verify passes, or acceptance, for drafts of `sizes` tokens: chains, and trees if the strategy drafts them."""
    _texts(batch, n, length, sampling)
    trees = batch.largest.nodes > batch.largest.depth
    for size in sizes:
        for tree in {False, trees and size > 0}:
            for _ in range(batch.graphs.passes):
                r: Round = batch.new_round(Budget(size, size), True)
                r.size, r.tree = size, tree
                if accepting:
                    accept(r, batch.target, batch.cache)
                else:
                    verify(r, batch.target, batch.cache)
