"""Strategy `mtp`: the multi-token prediction heads in the target's own checkpoint draft (DeepSeek-V3, arXiv
2412.19437). model/heads.py has the equations.

A target that was trained with such heads needs no draft checkpoint. A head drafts as an EAGLE head does, with the
target's embedding, LM head and last hidden states. Several heads take turns (drafter.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from specker.runtime.strategies.eagle import Eagle

if TYPE_CHECKING:
    import torch

    from specker.checkpoints.checkpoint import Checkpoint
    from specker.runtime.strategies.base import DraftContext
    from specker.runtime.strategies.eagle.drafter import HeadDrafter


class MultiTokenPrediction(Eagle):
    name = "mtp"
    summary = "the multi-token prediction heads of the target's own checkpoint draft a chain or a tree"
    paper = "DeepSeek-V3 (2412.19437)"
    needs_draft = False

    @property
    def needs(self) -> str:
        return "a target with such heads"

    def read_head(
        self, source: str | Path | None, target: Checkpoint, dtype: torch.dtype, quantize: str | None
    ) -> Checkpoint:
        from specker.checkpoints.drafts import mtp

        return mtp.read(target, dtype=dtype, quantize=quantize)

    def drafter(self, context: DraftContext) -> HeadDrafter:
        from specker.checkpoints.drafts.heads import HeadCheckpoint
        from specker.model.heads import DraftHead
        from specker.runtime.strategies.eagle.agreement import chosen
        from specker.runtime.strategies.mtp.drafter import MTPDrafter

        first = context.draft
        assert isinstance(first, HeadCheckpoint)
        if not first.further:
            return super().drafter(context)
        each = [first, *(replace(head, config=first.config) for head in first.further)]  # of the run's context
        final_norm = context.target.weights.norm, context.target.config.rms_norm_eps
        heads = [DraftHead(head, head.spec, head.parts, final_norm) for head in each]
        if context.model is not None:  # another engine's target cannot be asked
            chosen(context.target, context.model, heads[0], context.notes)
        cache, own = context.allocate(heads[0].model, len(heads)), context.head(heads[0].model)
        return MTPDrafter(heads, cache, own, context.options.width)
