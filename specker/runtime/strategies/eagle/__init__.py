"""Strategy `eagle`: a trained head that reads the target's hidden states drafts (EAGLE-3, arXiv 2503.01840; EAGLE-1,
2401.15077). model/heads.py has the equations.

Each accepted token runs through the head again with the target's true hidden states, as in EasySpec's bonus
calibration; what the head wrote for drafted tokens is dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specker.fields import option
from specker.runtime.strategies.base import DraftContext, Strategy

if TYPE_CHECKING:
    from specker.runtime.round.drafter import Drafter


class Eagle(Strategy):
    name = "eagle"
    summary = "a trained head that reads the target's hidden states drafts a chain or a tree"
    paper = "EAGLE-3 (2503.01840), EAGLE (2401.15077), P-EAGLE (2602.01469)"
    needs_draft = True
    reads_target = True
    branches = True

    @property
    def needs(self) -> str:
        return "a trained head"

    def drafter(self, context: DraftContext) -> Drafter:
        from specker.checkpoints.drafts.heads import HeadCheckpoint
        from specker.model.heads import DraftHead, HeadSpec
        from specker.runtime.strategies.eagle.agreement import chosen
        from specker.runtime.strategies.eagle.head_drafter import EagleDrafter, ParallelDrafter

        assert isinstance(context.draft, HeadCheckpoint)
        checkpoint, target = context.draft, context.target
        if checkpoint.spec.form != "eagle3" and not target.config.rms_norm_eps:
            raise ValueError(
                f"this head reads the target's rows after its final norm, which specker does not know for "
                f"{target.config.architecture}"
            )
        final_norm = target.weights.norm, target.config.rms_norm_eps

        def made(spec: HeadSpec) -> DraftHead:
            return DraftHead(checkpoint, spec, checkpoint.parts, final_norm)

        head = made(checkpoint.spec)
        own = context.head(head.model)
        if context.model is not None:  # another engine's target cannot be asked; then the documented reading counts
            head = chosen(target, context.model, head, own, context.notes, made)
        if head.spec.mask is not None and context.options.tree is not None:
            raise ValueError(f"a P-EAGLE head drafts a chain: {option('tree')} does not apply")
        cache = context.allocate(head.model)
        if head.spec.mask is not None:
            return ParallelDrafter(head, cache, own)
        if context.options.width > own.most:
            tree = option("tree", context.options.tree)
            raise ValueError(f"{tree} is wider than the {own.most} rows of this head's vocabulary")
        return EagleDrafter(head, cache, own, context.options.width)
