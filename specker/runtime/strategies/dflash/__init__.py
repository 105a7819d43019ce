"""Strategy `dflash`: a trained drafter that reads the target's hidden states guesses a block of tokens in one pass
(DFlash, arXiv 2602.06036; DFlash2; DSpark; Domino, 2605.29707; DSpine; LiLiCorr). model/dflash.py has the equations.

A committed token costs the drafter one product and no attention. A draft of k tokens runs a block of k + 1 rows, or of
k rows if a row predicts the next position, even if the checkpoint was trained with longer blocks. DSpark's Markov head,
Domino's GRU, DFlash2's selector and the tables of DSpine and LiLiCorr choose the tokens one after another. Without
them, DiffuSpec's path search through the block's candidates applies (strategies/blocks/), and its adaptive length in
any case. A policy that ends drafts by confidence uses the checkpoint's confidence head, or without one the probability
of each token.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from specker.fields import option
from specker.options import Options
from specker.runtime.control.policy import CONFIDENT, MAX_NODES
from specker.runtime.strategies.base import DraftContext, PolicyContext
from specker.runtime.strategies.blocks import BlockStrategy

if TYPE_CHECKING:
    from specker.checkpoints.checkpoint import Opened, OpenedHead
    from specker.runtime.strategies.dflash.block_drafter import BlockDrafter


class DFlash(BlockStrategy):
    name = "dflash"
    summary = "a trained drafter that reads the target's hidden states guesses a block in one pass"
    paper = "DFlash (2602.06036), DSpark, Domino (2605.29707)"
    needs_draft = True
    reads_target = True

    @property
    def needs(self) -> str:
        return "a trained drafter of blocks"

    def check(self, options: Options) -> None:
        super().check(options)
        policy = options.policy or self.default_policy(options)
        if policy in CONFIDENT and options.own.search != "off":
            other = f"{option('cps', options.own.search)} drafts a whole path"
            raise ValueError(f"{option('policy', policy)} ends a draft token by token, but {other}")

    def open_head(self, source: str | Path | None, target: Opened) -> OpenedHead:
        from specker.checkpoints.drafts import dflash

        assert source is not None
        return dflash.Layout.open(source, target.config)

    def with_draft(self, options: Options, draft: Opened) -> Options:
        """By default a draft is as long as the checkpoint's block allows. Raises ValueError for longer ones, and for
        path searches where a Markov head makes tokens depend on one another."""
        from specker.checkpoints.drafts.dflash import Layout

        assert isinstance(draft, Layout)
        most, own = draft.spec.most, options.own
        longest = {"draft_tokens": options.draft_tokens or 0, "adl": 0 if own.adl is None else own.adl[1]}
        for name, length in longest.items():
            if length > most:
                asked = option(name, options.draft_tokens if name == "draft_tokens" else "{}-{}".format(*own.adl))
                raise ValueError(f"{asked} is more than this drafter's blocks have: at most {most} tokens in a row")
        parts = {"selector": "candidate selector", "gru": "GRU", "markov": "Markov head"}
        parts |= {"injection": "transition table", "lilicorr": "transition table"}
        chained = next((called for part, called in parts.items() if part in draft.has), "")
        refused = {"cps": "chain" if own.search == "chain" else None, "ngram": own.ngram, "cps_lambda": own.cps_lambda}
        for name, value in refused.items():
            if chained and value is not None:
                raise ValueError(
                    f"{option(name, value)} does not apply: the drafter's {chained} guesses one token after another"
                )
        if own.search == "tree" and draft.spec.candidates:  # those that its head ranks
            own = replace(own, cps_candidates=draft.spec.candidates)
        first, *rest = options.sources
        sources = replace(first, options=own), *rest
        return replace(options, draft_tokens=options.draft_tokens or most, sources=sources)

    def length(self, options: Options) -> int:
        return options.draft_tokens or MAX_NODES  # `with_draft` names the block's

    def lengths(self, context: PolicyContext) -> tuple[int, int]:
        longest = self.length(context.options)
        return context.options.own.adl or (max(1, longest // 2), longest)

    def drafter(self, context: DraftContext) -> BlockDrafter:
        from specker.checkpoints.drafts.dflash import BlockCheckpoint
        from specker.model.dflash import BlockModel
        from specker.runtime.strategies.blocks.search import read
        from specker.runtime.strategies.dflash.block_drafter import BlockDrafter

        checkpoint = context.draft
        assert isinstance(checkpoint, BlockCheckpoint)
        block = BlockModel(checkpoint, checkpoint.spec, checkpoint.parts)
        ranks_paths = block.weights.markov is not None or block.spec.candidates > 0
        how = read(context, block.model.device, ranks_paths)
        stop_ids = frozenset(context.target.config.eos_ids)
        return BlockDrafter(block, context.allocate(block.model), context.head(block.model), how, stop_ids)
