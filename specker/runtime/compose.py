"""Compose models, options and a strategy into a decoder: the target with its cache, a drafter if any, and a batch."""

from functools import cache as memoised
from typing import NamedTuple

import torch

from specker.checkpoints.checkpoint import Checkpoint
from specker.config import Options
from specker.flags import option
from specker.model import memory
from specker.model.cache import KVCache
from specker.model.decoder import Model
from specker.runtime import strategies
from specker.runtime.auto import Experience
from specker.runtime.broadcast import SharedDrafter
from specker.runtime.costs import Costs
from specker.runtime.dist import Ranks
from specker.runtime.draft import Drafter
from specker.runtime.graphs import Graphs
from specker.runtime.loop import Batch
from specker.runtime.policy import Budget
from specker.runtime.strategies.base import SCRATCH, DraftContext, Plan, PolicyContext, allocate, linear
from specker.runtime.strategies.vocabtrim.head import Kept
from specker.zoo import Family

COPYING = 1e-3  # the cost of a draft that copies text, in steps of plain decoding, before it is measured


class Composed(NamedTuple):
    model: Model  # the target's
    cache: KVCache
    drafter: Drafter | None
    policies: PolicyContext
    plan: Plan  # the warm-up plan
    batch: Batch


def compose(
    target: Checkpoint,
    draft: Checkpoint | None,
    o: Options,
    kept: Kept | None,
    family: Family | None,
    ranks: Ranks | None,
) -> Composed:
    """`draft`, `kept`: the draft checkpoint and the kept rows of its head. `family`: the bundled files for the target.
    Raises ValueError for `graphs` on if rounds cannot be captured."""
    strategy, model = strategies.of(o), Model(target, linear=linear(o), ranks=ranks)
    gpu = model.device.type == "cuda"
    alone = ranks is None or not strategy.drafts or strategy.self_drafting  # else rank 0's drafts are shared
    if o.graphs == "on" and not alone and ranks is not None and ranks.drafting < ranks.size:
        all_draft = f"needs all of them to draft: set {option('draft_ranks')} to {option('tp')}"
        raise ValueError(f"{option('graphs', 'on')} with several ranks {all_draft}")
    if o.graphs == "on" and gpu and model.dtype == torch.float64:
        other = f"use {option('graphs', 'off')} or another {option('dtype')}"
        raise ValueError(f"{option('graphs', 'on')} needs kernels, and float64 has none: {other}")
    cache = allocate(model, o)
    context = DraftContext(o, target, model, cache, draft, kept, family, ranks)
    inner = strategies.drafter(context) if alone or (ranks is not None and ranks.drafts) else None
    drafter = inner if alone or ranks is None else SharedDrafter(inner, ranks)
    head_cost = 0.0 if inner is None else strategy.head_cost(o, inner.head, model)
    if strategy.self_drafting and ranks is not None:  # a measured time differs by rank: take rank 0's
        head_cost = float(ranks.first(torch.tensor([head_cost], dtype=torch.float64, device=model.device)))
    known = Experience(Costs(memoised(lambda budget: draft_cost(budget, target, draft, head_cost))))
    # On a GPU a token's probability is a host read. Ranks that draft together must end a draft at the same token.
    reads = not gpu and (ranks is None or (ranks.drafting == 1 and not strategy.self_drafting))
    policies = PolicyContext(o, target.config.num_layers, family, known, head_cost, reads)
    plan = strategies.plan(policies)
    # float64 has no kernels: its references read numbers on the host. With several ranks the graphs contain
    # collectives, so they need `graphs` on.
    fixed = gpu and model.dtype != torch.float64 and ranks is None if o.graphs is None else o.graphs == "on"
    graphs = Graphs(fixed and gpu)
    batch = Batch(model, cache, drafter, plan.largest, fixed, graphs, known, SCRATCH, o.acceptance, ranks)
    return Composed(model, cache, drafter, policies, plan, batch)


def draft_cost(budget: Budget, target: Checkpoint, draft: Checkpoint | None, head_cost: float) -> float:
    """The cost of a draft of this shape, in steps of plain decoding, by the weights it reads. `head_cost`: the LM
    head's cost in a self-drafting step, in layers of the target."""
    steps = min(budget.nodes, budget.depth)
    if budget.exit:
        return steps * (budget.exit + head_cost) / target.config.num_layers
    if draft is None or budget.part:
        return COPYING
    own = draft.layer_bytes + draft.weights.head.nbytes
    passes = steps if draft.config.causal else 1  # a diffusion model guesses a block in one pass
    head, c = target.weights.head, target.config  # empty if another engine runs the target
    each = head.nbytes / head.numel() if head.numel() else target.weights.norm.element_size()
    whole = target.layer_bytes + each * c.vocab_size * c.hidden_size
    return passes * own / whole


def room_of(target: Checkpoint, draft: Checkpoint | None, options: Options) -> memory.Room:
    """The memory that the caches of target and draft must fit into."""
    own = [target] if draft is None or strategies.of(options).self_drafting else [target, draft]
    norm = target.weights.norm  # has the dtype of the K/V
    return memory.Room(tuple(c.local for c in own), norm.dtype, norm.device, options.page_size, SCRATCH)
