"""Run a drafter for one round after a given text, and inspect caches between rounds."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from specker.model.cache import KVCache
from specker.model.decoder import Model
from specker.model.prefill import prefill
from specker.model.sampling import Draws
from specker.options import Sampling
from specker.runtime import loop
from specker.runtime.control.policy import Budget, Fixed, Outcome, Policy
from specker.runtime.control.stats import BlockStats
from specker.runtime.round import state as states
from specker.runtime.round.batch import Batch, Shape
from specker.runtime.round.drafter import Accepted, Drafter
from specker.runtime.round.graphs import Graphs
from specker.runtime.round.round import Round


def new_round(
    drafter: Drafter,
    text: list[int],
    budget: Budget,
    sampling: Sampling | None = None,
    policy: Policy | None = None,
    fixed: bool = False,
) -> Round:
    """A round of one sequence, not yet drafted. `policy` is asked after each token; the default never stops early."""
    assert drafter.model is not None
    sampling = sampling or Sampling()
    model = drafter.model
    wide, columns, vocab = model.config.hidden_size, model.config.max_context, len(model.head)
    sizes = {"rows": budget.nodes + 1, "wide": wide, "vocab": vocab, "columns": columns}
    state = states.State.empty(model.dtype, model.device, sequences=1, **sizes)
    policy = policy or Fixed(budget.nodes, budget.depth)
    request = states.Request(index=0, token_ids=list(text), limit=1 << 30, sampling=sampling, policy=policy)
    state.write(0, request)
    draws = Draws.of([request.sampling], state.draw, fixed)
    lengths, shape = state.length if fixed else [len(text)], Shape(1, budget, fixed, draws=draws.kind)
    return Round(Batch([request], state, shape, draws, lengths, Graphs(), confident=request.policy.confident))


@torch.inference_mode()
def draft(drafter: Drafter, *args: Any, **more: Any) -> Round:
    """Draft the round of `new_round`. A drafter with an empty cache prefills the text first, as at admission."""
    r = new_round(drafter, *args, **more)
    if not len(drafter.cache.slots(0, 0, 1)):  # an engine's cache, whose sequences take their pages at admission
        drafter.cache.take(0, drafter.cache.capacity)
    if drafter.cache.exact_len == [0]:
        drafter.advance(r.requests)
    r.batch.aux_layers = drafter.reads(r.batch.budget)
    r.draft = drafter.propose(r.batch)
    return r


def fresh(engine: Any) -> None:
    """Give the sequence in slot 0 all pages of the engine's caches, and no exact column."""
    engine.loop.clear(forget=True)
    for cache in engine.loop.slots.caches:
        cache.release(0)
        cache.take(0, cache.capacity)


def tokens(r: Round) -> list[int]:
    return r.batch.window[0, 1 : r.draft.size + 1].tolist()


def parents(r: Round) -> list[int]:
    return r.batch.state.parents[0, : r.draft.size].tolist() if r.draft.tree else list(range(r.draft.size))


def accept(drafter: Drafter, r: Round, path: list[int], token: int) -> list[int]:
    """Accept the rows `path` followed by the target's `token`; returns the text."""
    text = r.requests[0].token_ids
    text += [int(r.batch.window[0, row]) for row in path[1:]] + [token]
    kinds = {"": list, "draft": lambda: [tokens(r)], "search": lambda: r.batch.memory.get("search", 1).tolist()}
    drafter.accept(r.batch, r.draft, Accepted([path], kinds[r.draft.observed](), {}, 0.0))
    return text


def outcome(drafted: int, accepted: int, confidence: tuple[float, ...] = (), note: BlockStats | None = None) -> Outcome:
    """The outcome of a chain."""
    return Outcome(drafted, list(range(accepted + 1)), list(confidence), note)


def apart(model: Model, cache: KVCache, text: list[int], length: int, slot: int = 0) -> float:
    """The largest difference between the K/V of the first `length` columns and a fresh pass over the text."""
    fresh = KVCache(model.config, max(length, 1), dtype=model.dtype, device="cpu")
    prefill(model, fresh, [min(token, model.config.vocab_size - 1) for token in text[:length]])
    own = cache.slots(slot, 0, length)
    pairs = ((cache.k, fresh.k), (cache.v, fresh.v))
    return max(
        (float((a.flatten(1, 2)[:, own] - b.flatten(1, 2)[:, :length]).abs().max()) for a, b in pairs if length),
        default=0.0,
    )


@contextmanager
def after_every_round(patch: Any, look: Any) -> Iterator[list[int]]:
    """Call look(loop, round) after every round, when its texts have grown; yields a list with one entry per call."""
    finish, seen = loop.Loop.finish, []

    def finished(self: loop.Loop, r: Round) -> Any:
        out = finish(self, r)
        look(self, r)
        seen.append(r.draft.size)
        return out

    with patch.context() as now:
        now.setattr(loop.Loop, "finish", finished)
        yield seen
