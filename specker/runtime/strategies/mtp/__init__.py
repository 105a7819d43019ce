"""Strategy `mtp`: the multi-token prediction heads in the target's own checkpoint draft (DeepSeek-V3, arXiv
2412.19437; model/heads.py has the equations), or an assistant that was trained with the target (Gemma 4;
model/assistant.py).

A target that was trained with such heads needs no draft checkpoint, unless a file of its own holds them. A head drafts
as an EAGLE head does, with the target's embedding, LM head and last hidden states. Several heads take turns
(heads_in_turn.py). An assistant is a checkpoint of its own, which reads the target's K/V and has none (assistant.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from specker.fields import option
from specker.runtime.strategies.eagle import Eagle

if TYPE_CHECKING:
    from specker.checkpoints.checkpoint import Opened, OpenedHead
    from specker.checkpoints.drafts.assistant import AssistantCheckpoint
    from specker.runtime.round.drafter import Drafter
    from specker.runtime.strategies.base import DraftContext


class MultiTokenPrediction(Eagle):
    name = "mtp"
    summary = "the target's own multi-token prediction heads, or its assistant, draft a chain or a tree"
    paper = "DeepSeek-V3 (2412.19437)"
    needs_draft = False
    may_draft = True

    @property
    def needs(self) -> str:
        return "a target with such heads, or an assistant"

    def open_head(self, source: str | Path | None, target: Opened) -> OpenedHead:
        from specker.checkpoints.drafts import assistant, mtp
        from specker.checkpoints.files import folder_of
        from specker.checkpoints.parse import read_json

        if source is not None:
            raw = read_json(folder_of(source, weights=False) / "config.json")
            if raw.get("model_type") == assistant.KIND:
                return assistant.Layout.open(source, target.config)
        return mtp.opened(target, source)

    def drafter(self, context: DraftContext) -> Drafter:
        from specker.checkpoints.drafts.assistant import AssistantCheckpoint
        from specker.checkpoints.drafts.heads import HeadCheckpoint
        from specker.model.heads import DraftHead
        from specker.runtime.strategies.eagle.agreement import chosen
        from specker.runtime.strategies.mtp.heads_in_turn import MTPDrafter

        first = context.draft
        if isinstance(first, AssistantCheckpoint):
            return _assistant(context, first)
        assert isinstance(first, HeadCheckpoint)
        if not first.further:
            return super().drafter(context)
        each = [first, *(replace(head, config=first.config) for head in first.further)]  # of the run's context
        final_norm = context.target.weights.norm, context.target.config.rms_norm_eps
        heads = [DraftHead(head, head.spec, head.parts, final_norm) for head in each]
        own = context.head(heads[0].model)
        if context.model is not None:  # another engine's target cannot be asked
            chosen(context.target, context.model, heads[0], own, context.notes)
        cache = context.allocate(heads[0].model, len(heads))
        return MTPDrafter(heads, cache, own, context.options.width)


def _assistant(context: DraftContext, checkpoint: AssistantCheckpoint) -> Drafter:
    """Raises ValueError if several ranks divide the K/V that the assistant reads, and for a tree that is wider than the
    ids of its clusters."""
    from specker.model.assistant import Assistant
    from specker.runtime.strategies.mtp.assistant import AssistantDrafter, ClusteredHead, measure

    if context.ranks is not None:
        raise ValueError(
            f"an assistant reads the target's K/V, which {option('tp')} divides among the ranks: leave out "
            f"{option('tp')} or {option('draft')}"
        )
    assert context.model is not None and context.cache is not None  # `Drafts` refuses assistants for other engines
    assistant, parts = Assistant(checkpoint, checkpoint.spec, checkpoint.parts), checkpoint.parts
    head, width, chosen = context.head(assistant.model), context.options.width, checkpoint.spec.chosen
    if parts.centroids is not None and parts.order is not None:
        head = ClusteredHead(
            head.weight, head.norm, head.eps, centroids=parts.centroids, order=parts.order, chosen=chosen
        )
        if width > head.most:
            raise ValueError(
                f"{option('tree', context.options.tree)} is wider than the {head.most} ids of {chosen} clusters, among "
                "which the assistant chooses"
            )
    measure(context.target, context.model, assistant, head, context.notes)
    return AssistantDrafter(assistant, context.model, context.cache, head, width)
