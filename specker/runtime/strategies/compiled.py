"""Chains that the CPU's compiled library drafts in one call (cpu/chain.py)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from specker.cpu import Chains, Committed, Translated, Vocabulary, draft_chain, takes
from specker.model.cache import KVCache, Rows
from specker.model.decoder import Model
from specker.model.recurrent import cached_rows
from specker.runtime.round.batch import Batch
from specker.runtime.round.drafter import Draft
from specker.runtime.round.lm_head import LMHead


def readable(model: Model, head: LMHead) -> bool:
    """Whether the compiled library drafts chains of this model's layers and can read its embedding and the LM head."""
    return model.stack is not None and model.stack.chains and takes(model.embed) and takes(head.weight)


class ChainModel(NamedTuple):
    """What drafts chains."""

    model: Model
    cache: KVCache
    head: LMHead
    normed: bool = False  # whether the layers' outputs have the final norm
    groups: list[int] | None = None
    """The first layer of each group of layers that a draft step runs side by side, then the number of layers; None: one
    after another."""


def compiled_chain(
    batch: Batch,
    drafting: ChainModel,
    rows: Rows,
    committed: Committed,
    columns: Sequence[int],
    idle: frozenset[int] = frozenset(),
    translated: Translated | None = None,
) -> Draft:
    """Draft a chain of each sequence but those in the `idle` slots. The other arguments: see cpu/chain.py."""
    model, cache, head, normed, groups = drafting
    layers = [*range(len(model.layers) + 1)]
    assert model.stack is not None
    requests = batch.requests
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
