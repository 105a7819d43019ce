"""Chains that the CPU's compiled library drafts in one call (cpu/chain.py)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specker.cpu import Vocabulary, draft_chain, takes
from specker.model.cache import KVCache, Rows
from specker.model.decoder import Model
from specker.model.recurrent import records
from specker.runtime.round.batch import Batch
from specker.runtime.round.drafter import Draft
from specker.runtime.round.lm_head import LMHead


def readable(model: Model, head: LMHead) -> bool:
    """Whether the compiled library drafts chains of this model's layers and can read its embedding and the LM head."""
    return model.stack is not None and model.stack.chains and takes(model.embed) and takes(head.weight)


def compiled_chain(
    batch: Batch,
    model: Model,
    cache: KVCache,
    head: LMHead,
    tokens: Tensor | None,
    rows: Rows,
    columns: Sequence[int],
    *,
    idle: frozenset[int] = frozenset(),
    normed: bool = False,
    groups: list[int] | None = None,
    features: Tensor | None = None,
    output: Tensor | None = None,
    raw: bool = False,
    own: Tensor | None = None,
    further: Sequence[int] = (),
) -> Draft:
    """Draft a chain of each sequence but those in the `idle` slots. tokens, rows, columns, features, output, raw, own,
    further: see cpu/chain.py. `normed`: whether the layers' outputs have the final norm. `groups`: the first layer of
    each group of layers that a draft step runs side by side, then the number of layers; default: one after another."""
    depth, layers = min(batch.budget.depth, batch.budget.nodes), [*range(len(model.layers) + 1)]
    norm = None if normed else head.norm
    assert model.stack is not None
    sequences = rows.cu_rows, rows.kv_len, rows.window
    drafted, probability = draft_chain(
        model.stack,
        Vocabulary(
            *(model.embed, model.embed_scale, head.weight, head.token_ids, norm, head.activations, head.cap),
        ),
        tokens=tokens,
        rows=((cache.k, cache.v), (rows.positions, rows.slots), sequences, rows.ancestors, rows.table),
        groups=(layers, groups or layers),
        columns=columns,
        last_position=cache.last_position,
        steps=depth,
        sampling=[(s.sampling.temperature, s.sampling.seed) for s in batch.requests],
        rules=[None if n in idle else s.policy.rule for n, s in enumerate(batch.requests)] if batch.confident else None,
        records=records(cache, rows.near),
        features=features,
        output=output,
        raw=raw,
        own=own,
        further=further,
    )
    probability[:, list(idle)] = 0
    draft = Draft(len(drafted), idle=idle, depth=len(drafted), forwarded=len(drafted) - 1)
    batch.window[: batch.n, 1 : draft.size + 1] = torch.from_numpy(drafted.T)
    if batch.confident:
        draft.confidence = probability.tolist()
    if batch.traced:
        draft.scores = [torch.from_numpy(probability.T).log()]
    return draft
