"""Strategy `dflash`: a trained drafter that reads the target's hidden states guesses a block of tokens in one pass
(DFlash, arXiv 2602.06036; DSpark). model/dflash.py has the equations.

A committed token costs the drafter one product and no attention. A draft of k tokens runs a block of k + 1 rows, with
DSpark of k rows, even if the checkpoint was trained with longer blocks. DSpark's Markov head then chooses the tokens
one after another. A policy that ends drafts by confidence uses the checkpoint's confidence head, or without one the
probability of each token.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from specker.flags import option
from specker.options import Options
from specker.runtime.policy import Policy
from specker.runtime.strategies.base import DraftContext, Plan, PolicyContext, Strategy

if TYPE_CHECKING:
    import torch

    from specker.checkpoints.checkpoint import Checkpoint
    from specker.runtime.strategies.dflash.drafter import BlockDrafter


class DFlash(Strategy):
    name = "dflash"
    summary = "a trained drafter that reads the target's hidden states guesses a block in one pass"
    paper = "DFlash (2602.06036), DSpark"
    needs_draft = True
    reads_target = True

    @property
    def needs(self) -> str:
        return "a trained drafter of blocks"

    def check(self, options: Options) -> None:
        if options.load == "dummy":
            raise ValueError(f"strategy dflash reads a trained drafter: {option('load', 'dummy')} does not apply")

    def read_head(
        self, source: str | Path | None, target: Checkpoint, dtype: torch.dtype, quantize: str | None
    ) -> Checkpoint:
        from specker.checkpoints import dflash

        assert source is not None
        return dflash.read(source, target, dtype=dtype, quantize=quantize)

    def with_draft(self, options: Options, draft: Checkpoint) -> Options:
        """By default a draft is as long as the checkpoint's block allows. Raises ValueError for longer ones, and for
        trees where a Markov head makes tokens depend on one another."""
        from specker.checkpoints.dflash import BlockCheckpoint

        assert isinstance(draft, BlockCheckpoint)
        most, tree = draft.spec.most, options.tree
        length = (options.draft_tokens or most) if tree is None else tree.depth
        if length > most:
            asked = option("draft_tokens", length) if tree is None else option("tree", tree)
            raise ValueError(f"{asked} is more than this drafter's blocks have: at most {most} tokens in a row")
        if tree is not None and draft.parts.markov is not None:
            raise ValueError(
                f"{option('tree', tree)} does not apply: the drafter's Markov head guesses one token after another"
            )
        return options if tree is not None else replace(options, draft_tokens=length)

    def drafter(self, context: DraftContext) -> BlockDrafter:
        from specker.checkpoints.dflash import BlockCheckpoint
        from specker.model.dflash import BlockModel
        from specker.runtime.strategies.dflash.drafter import BlockDrafter

        checkpoint = context.draft
        assert isinstance(checkpoint, BlockCheckpoint)
        block = BlockModel(checkpoint, checkpoint.spec, checkpoint.parts)
        return BlockDrafter(block, context.allocate(block.model), context.head(block.model), context.options.width)

    def policy(self, context: PolicyContext) -> Policy:
        return super().policy(replace(context, confident=False))  # a block is guessed at once: auto takes its length

    def plan(self, context: PolicyContext) -> Plan:
        return super().plan(replace(context, confident=False))
