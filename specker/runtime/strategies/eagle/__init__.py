"""Strategy `eagle`: a trained head that reads the target's hidden states drafts (EAGLE-3, arXiv 2503.01840; EAGLE-1,
2401.15077). model/heads.py has the equations.

Each accepted token runs through the head again with the target's true hidden states, as in EasySpec's bonus
calibration; what the head wrote for drafted tokens is dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specker.flags import option
from specker.options import Options
from specker.runtime.strategies.base import DraftContext, Strategy

if TYPE_CHECKING:
    from specker.runtime.strategies.eagle.drafter import EagleDrafter


class Eagle(Strategy):
    name = "eagle"
    summary = "a trained head that reads the target's hidden states drafts a chain"
    paper = "EAGLE-3 (2503.01840), EAGLE (2401.15077), P-EAGLE (2602.01469)"
    needs_draft = True
    reads_target = True
    no_head = "a trained head brings its own rows"

    @property
    def needs(self) -> str:
        return "a trained head"

    def check(self, options: Options) -> None:
        if options.tree is not None:
            raise ValueError(f"strategy {self.name} drafts a chain: {option('tree')} does not apply")
        if options.load == "dummy":
            raise ValueError(f"strategy {self.name} reads a trained head: {option('load', 'dummy')} does not apply")

    def drafter(self, context: DraftContext) -> EagleDrafter:
        from specker.checkpoints.heads import HeadCheckpoint
        from specker.model.heads import ReadingHead
        from specker.runtime.strategies.eagle.agreement import chosen
        from specker.runtime.strategies.eagle.drafter import EagleDrafter
        from specker.runtime.strategies.eagle.parallel import ParallelDrafter

        assert isinstance(context.draft, HeadCheckpoint) and context.model is not None
        checkpoint = context.draft
        head = ReadingHead(checkpoint, checkpoint.spec, checkpoint.parts, context.model)
        head.spec = chosen(context.target, context.model, head, context.notes)
        make = EagleDrafter if head.spec.mask is None else ParallelDrafter
        return make(head, context.allocate(head.model), context.head(head.model))
