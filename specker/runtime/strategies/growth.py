"""Grow drafts token by token, or EAGLE-2's trees level by level (arXiv 2406.16858), or guess a chain in one pass. Where
the CPU's compiled library can, it drafts a whole chain in one call (cpu/chain.py).

What computes the rows is a `Steps`: a draft model with its cache, or a head that reads the target's hidden states.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from specker.cpu import Chains, Committed, Translated, Vocabulary, draft_chain, takes
from specker.kernels.round.grow import Candidates, grow, prune
from specker.model.cache import KVCache, Rows
from specker.model.decoder import Final, Model
from specker.model.recurrent import cached_rows
from specker.runtime.round.batch import Batch
from specker.runtime.round.drafter import Draft
from specker.runtime.round.lm_head import LMHead


class Steps(Protocol):
    """Forwards draft tokens of all sequences of a batch."""

    model: Model
    cache: KVCache
    head: LMHead

    def start(self, batch: Batch) -> tuple[Final, Tensor]:
        """The rows of the roots [n, E] for the LM head, and their positions [n] int64."""
        ...

    def step(self, batch: Batch, first: int, tokens: Tensor, parents: Tensor | None = None) -> tuple[Final, Tensor]:
        """Forward draft tokens [n, count] int64, rows first, first + 1, .. of each window, whose row 0 is the root.
        parents [n, >= first + count - 1] int64: of a tree's rows. Returns the rows for the LM head and their
        positions."""
        ...


def grown(batch: Batch, steps: Steps, width: int, idle: Mapping[int, str] | None = None) -> Draft:
    """Draft for all sequences but the `idle` slots: a chain, or with `width` > 1 a tree. A confidence policy ends a
    chain token by token."""
    depth = min(batch.budget.depth, batch.budget.nodes)
    draft = Draft(depth, depth=depth, idle=idle or {})
    if width > 1:
        draft.size, draft.tree = min(batch.budget.nodes, width * depth), True
        batch.run(("draft", draft.size, depth), lambda: _tree(batch, draft, steps, width))
    elif batch.confident:
        for n in range(depth):
            batch.run(("step", n), lambda n=n: _step(batch, draft, steps, n))  # type: ignore[misc]
            draft.size = draft.depth = n + 1
            if not draft.goes_on(batch):
                break
    else:
        batch.run(("draft", depth), lambda: _chain(batch, draft, steps))
    return draft


def _chain(batch: Batch, draft: Draft, steps: Steps) -> None:
    for n in range(draft.depth):
        _step(batch, draft, steps, n)


def _step(batch: Batch, draft: Draft, steps: Steps, n: int) -> None:
    """Draft token n of each sequence. Nothing forwards the last token: its K/V is written by a later draft."""
    final, positions = steps.step(batch, n, batch.window[:, n : n + 1]) if n else steps.start(batch)
    draft.forwarded = n
    draft.extend(batch, steps.head, final, positions, batch.window[:, n + 1 : n + 2])


def _tree(batch: Batch, draft: Draft, steps: Steps, width: int) -> None:
    """Each level grows its `width` best nodes, and the draft is the best candidates of all levels. Grown node j of a
    sequence is j columns after its root; scores are cumulative log-probabilities."""
    n, count, device = batch.n, width * draft.depth, steps.model.device
    tokens, parents = torch.empty((2, n, count), dtype=torch.int64, device=device).unbind(0)
    wide = torch.float64 if steps.model.dtype == torch.float64 else torch.float32
    scores = tokens.new_empty((n, count), dtype=wide)
    every = Candidates.empty(n, width, draft.depth, wide, device)
    final, positions = steps.start(batch)
    for at in range(0, count, width):
        if at:  # the last level's nodes, which end at row `at`
            final, positions = steps.step(batch, at - width + 1, tokens[:, at - width : at], parents[:, :at])
        grow(*steps.head.ranked(final, width, batch.draws, positions), tokens, parents, scores, at, every)
    draft.forwarded = count - width
    up = batch.state.parents[:, : draft.size]
    best, draft.nodes = prune(every, batch.window[:, 1 : draft.size + 1], up)
    if batch.traced and not batch.fixed:  # a replayed graph runs no Python
        kept = every.scores.gather(1, best)
        above = torch.cat((torch.zeros_like(kept[:, :1]), kept), 1).gather(1, up)
        draft.scores.append(kept - above)


def guess(batch: Batch, draft: Draft, head: LMHead, final: Final, positions: Tensor) -> None:
    """Write chains that one pass drafts: its rows [n * draft.size, E] at `positions` predict a token each."""
    n, depth = batch.n, draft.size
    ids, logits, lse = head.ranked(final, 1, batch.draws, positions)
    batch.window[:n, 1 : depth + 1] = ids.view(n, depth)
    scores = (logits[:, 0] - lse).view(n, depth)
    draft.end(batch, scores, scores.exp())


def readable(model: Model, head: LMHead) -> bool:
    """Whether the compiled library drafts chains of this model's layers and can read its embedding and the LM head."""
    return model.stack is not None and model.stack.chains and takes(model.embed) and takes(head.weight)


def compiled_chain(
    batch: Batch,
    steps: Steps,
    rows: Rows,
    committed: Committed,
    columns: Sequence[int],
    normed: bool = False,
    groups: list[int] | None = None,
    idle: Mapping[int, str] | None = None,
    translated: Translated | None = None,
) -> Draft:
    """Draft a chain of each sequence but those in the `idle` slots. `normed`: whether the layers' outputs have the
    final norm. `groups`: the first layer of each group of layers that a draft step runs side by side, then the number
    of layers; None: one after another. The other arguments: see cpu/chain.py."""
    model, cache, head = steps.model, steps.cache, steps.head
    layers = [*range(len(model.layers) + 1)]
    assert model.stack is not None
    requests, idle = batch.requests, idle or {}
    rules = [None if n in idle else s.policy.rule for n, s in enumerate(requests)] if batch.confident else None
    drafted, probability = draft_chain(
        model.stack,
        Vocabulary(
            model.embed,
            model.embed_scale,
            head.weight,
            head.token_ids,
            None if normed else head.norm,
            head.activations,
            head.cap,
            head.communicator,
        ),
        cached_rows(cache, rows),
        committed,
        (layers, groups or layers),
        Chains(
            columns,
            cache.last_position,
            steps=min(batch.budget.depth, batch.budget.nodes),
            sampling=[(s.sampling.temperature, s.sampling.seed) for s in requests],
            rules=rules,
        ),
        translated,
    )
    probability[:, list(idle)] = 0
    draft = Draft(len(drafted), idle=idle, depth=len(drafted), forwarded=len(drafted) - 1)
    batch.window[: batch.n, 1 : draft.size + 1] = torch.from_numpy(drafted.T)
    if batch.confident:
        draft.confidence = probability.tolist()
    if batch.traced:
        draft.scores = [torch.from_numpy(probability.T).log()]
    return draft
