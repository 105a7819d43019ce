"""Strategy `diffuspec`: a diffusion language model drafts a block in one denoising step over the text and a block of
masks (DiffuSpec, arXiv 2510.02358).

A round forwards the committed tokens that the cache lacks (including the root) and k masks; all of them see each other
and the cached columns. The cache keeps the tokens' columns and drops the masks', so a round costs accepted + 1 + k rows
instead of the whole text. The kept K/V saw an earlier round's masks: an approximation that can cost acceptance but not
correctness.

The path search through the block's candidates (CPS) and the adaptive block length (ADL) are in strategies/blocks/.
Row i predicts position i + 1 in Dream's checkpoints (shifted logits) and position i in plain masked-diffusion ones,
unless `shifted_logits` in config.json says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specker.fields import option
from specker.options import STORED, Options
from specker.runtime.control.policy import AUTO, CONFIDENT, LENGTHS
from specker.runtime.strategies.base import DraftContext, PolicyContext, shaped
from specker.runtime.strategies.blocks import BlockStrategy

if TYPE_CHECKING:
    from specker.runtime.strategies.diffuspec.diffusion_drafter import DiffusionDrafter

BLOCK = 4  # the measured winner on the bundled pair
ADL = (20, 30)  # the paper's values


class DiffuSpec(BlockStrategy):
    name = "diffuspec"
    summary = "a diffusion language model drafts a block in one pass"
    paper = "DiffuSpec (2510.02358)"
    needs_draft = True
    causal = False

    def published(self, given: Mapping[str, Any]) -> dict[str, Any] | None:
        settings: dict[str, Any] = {"draft_quantize": STORED}
        if not shaped(given) or given.get("policy") == "adl":
            settings |= {"policy": "adl", "adl": "20-30", "adl_step": 10, "adl_rho": 0.5}
        if (search := given.get("cps", "chain")) != "off":
            settings |= {"cps": search, "cps_tau": 0.8, "cps_candidates": 15, "cps_lambda": 0.5, "cps_first": "both"}
            settings |= {"cps_beam": 3} if search == "chain" else {}
        return settings

    def check(self, options: Options) -> None:
        super().check(options)
        policy = options.policy or self.default_policy(options)
        if policy in CONFIDENT:
            raise ValueError(f"{option('policy', policy)} ends a draft token by token, but diffuspec drafts a block")

    def drafter(self, context: DraftContext) -> DiffusionDrafter:
        from specker.runtime.strategies.diffuspec.diffusion_drafter import made

        return made(context, self)

    def lengths(self, context: PolicyContext) -> tuple[int, int]:
        return context.options.own.adl or ADL

    def length(self, options: Options) -> int:
        return options.draft_tokens or (LENGTHS[-1] if options.policy == AUTO else BLOCK)
