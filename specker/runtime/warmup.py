"""Before the first request: run once whatever a request may meet, so that none waits for a compiler or a capture."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from specker.config import Sampling
from specker.runtime import state as states
from specker.runtime.model.decoder import PREFILL_CHUNK
from specker.runtime.policy import Budget, Fixed
from specker.runtime.round import Round, accept, launch, verify

if TYPE_CHECKING:
    from specker.runtime.engine import Engine
    from specker.runtime.loop import Batch

DRAWS = Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.5, top_k=2)  # one of each kind


def warm_up(engine: "Engine", tell: Callable[[int, int], None] | None = None) -> None:
    """On a GPU every kernel is compiled and every graph captured (but DEL's verify passes, exits times lengths, which
    are captured when they are met twice); elsewhere a few tokens are decoded with and without the drafter."""
    batch = engine.batch
    if batch.fixed:
        plan = engine.plan
        with engine.in_memory():
            warm_rounds(batch, plan.budgets, plan.verified, plan.accepted, engine.policy().confident, tell)
    filters = ({"top_k": 2}, {"top_p": 0.5}, {"top_k": 2, "top_p": 0.5})
    for how in ({}, {"temperature": 1.0}, *({"temperature": 1.0, **f} for f in filters)):
        engine.generate([0, 0], 8, **how)
        engine.generate_ar([0, 0], 2, **how)
    if engine.captures:  # a prompt's linears are torch's own: their first call, for a first chunk and a second, is slow
        for length in (PREFILL_CHUNK // 4, PREFILL_CHUNK + PREFILL_CHUNK // 2):
            engine.generate([0] * min(length, engine.max_context - 2), 2)


@torch.inference_mode()
def warm_rounds(
    batch: "Batch",
    budgets: Sequence[Budget],
    verified: Sequence[int],
    accepted: Sequence[int],
    asks: bool = False,
    tell: Callable[[int, int], None] | None = None,
) -> None:
    """Run the rounds of fixed shape that a request may meet: `budgets` that policies may ask for (none: nothing is
    drafted), and sizes of drafts that are `verified` and `accepted` beside those of the budgets. `asks`: policies end
    drafts by confidence. Every number of slots that a batch is padded to is gone through."""
    for cache in batch.caches:
        cache.k.zero_(), cache.v.zero_()  # finite numbers, so that tokens are tokens
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


def _texts(batch: "Batch", n: int, length: int, sampling: Sampling) -> None:
    """Put n texts of `length` that never grow into the batch."""
    batch.clear()
    for slot in range(n):
        sequence = states.Sequence(slot, [0] * length, length, sampling, Fixed(0, 0))
        if batch.size > 1:
            for cache in batch.caches:
                cache.take(slot, 1)
        batch.active.append(sequence)
        batch.state.load(slot, sequence)


def _drafted(batch: "Batch", n: int, before: int, length: int, sampling: Sampling, budget: Budget, asks: bool) -> None:
    """A whole round, for the longest text of a KV bucket that a draft may have before it."""
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
    """Verify passes, or their acceptance, of drafts of the given sizes, as chains and, where there are any, trees."""
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
