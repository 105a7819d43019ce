"""Strategy `diffuspec`: a diffusion language model drafts a block in one denoising step over the text and a block of
masks (DiffuSpec, arXiv 2510.02358).

A round forwards the committed tokens that the cache lacks (including the root) and k masks; all of them see each other
and the cached columns. The cache keeps the tokens' columns and drops the masks', so a round costs accepted + 1 + k rows
instead of the whole text. The kept K/V saw an earlier round's masks: an approximation that can cost acceptance but not
correctness.

The path search through the block's candidates (CPS) and the adaptive block length (ADL) are in strategies/blocks/.
Row i predicts position i + 1 in Dream's checkpoints (shifted logits) and position i in plain masked-diffusion ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specker.fields import opt, option
from specker.options import Options
from specker.runtime.control.auto import Acceptance, Experienced
from specker.runtime.control.policy import AUTO, CONFIDENT, LENGTHS, MAX_NODES, Budget, Fixed, Policy, StopRule
from specker.runtime.strategies.base import DraftContext, Plan, PolicyContext
from specker.runtime.strategies.blocks import BlockOptions, BlockStrategy, seen

if TYPE_CHECKING:
    from specker.checkpoints.checkpoint import Checkpoint
    from specker.runtime.strategies.diffuspec.drafter import DiffusionDrafter

# The measured winners on the bundled pair.
BLOCK = 4
CHUNK = (4, 0.5)
ADL = (20, 30)  # the paper's values, for models of its size
LONGEST_CHUNKS = 32  # maximum number of tokens in all chunks of a draft


@dataclass
class Chunks(Experienced, Fixed):
    """Draft further blocks while every token is at least as probable as `threshold` (FailFast, arXiv 2512.20573)."""

    block: int = 4
    threshold: float = 0.5
    seen: Acceptance | None = None
    confident = True

    def budget(self) -> Budget:
        return Budget(self.nodes, self.depth, extra=(self.block,))

    @property
    def rule(self) -> StopRule:  # type: ignore[override]
        return StopRule(token=self.threshold)


def chunked(value: str | tuple[int, float]) -> tuple[int, float]:
    """Parse tokens per pass and the probability below which a token ends the draft, such as `8:0.5`."""
    text = str(value)
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], int | float):
        text = f"{value[0]}:{value[1]:f}"
    match = re.fullmatch(r"(\d{1,3}):(0|1|0?\.\d+|1\.0*)", text)
    if not match or not 1 <= int(match[1]) <= 128:
        about = "must be TOKENS:PROBABILITY within 1-128 and 0-1, such as 8:0.5"
        raise ValueError(f"{option('chunk')} {about}, got {value!r}")
    return int(match[1]), float(match[2])


@dataclass(frozen=True)
class DiffuSpecOptions(BlockOptions):
    shifted_logits: str | None = opt(
        None, "whether row i predicts position i + 1 (default: yes for Dream, no for others)", choices=("yes", "no")
    )
    chunk: tuple[int, float] | None = opt(
        None,
        "tokens per pass of --policy chunk, and the probability below which a token ends the draft (default 4:0.5)",
        "TOKENS:X",
        parse=chunked,
    )


class DiffuSpec(BlockStrategy):
    name = "diffuspec"
    summary = "a diffusion language model drafts a block in one pass"
    paper = "DiffuSpec (2510.02358)"
    options = DiffuSpecOptions
    policies = ("adl", "chunk")
    usual = "adl"
    needs_draft = True
    causal = False

    def default_policy(self, options: Options) -> str:
        return self.usual if options.draft_tokens is None else "fixed"

    def check(self, options: Options) -> None:
        super().check(options)
        policy = options.policy or self.default_policy(options)
        if policy in CONFIDENT:
            raise ValueError(f"{option('policy', policy)} ends a draft token by token, but diffuspec drafts a block")
        if options.own.chunk is not None and policy != "chunk":
            raise ValueError(f"{option('chunk')} is for {option('policy', 'chunk')}")

    def adapt(self, options: Options, draft: Checkpoint) -> Checkpoint:
        shifted = options.own.shifted_logits
        if shifted is None:
            return draft
        return replace(draft, config=replace(draft.config, shifted_logits=shifted == "yes"))

    def drafter(self, context: DraftContext) -> DiffusionDrafter:
        from specker.runtime.strategies.diffuspec.drafter import made

        return made(context, self)

    def lengths(self, context: PolicyContext) -> tuple[int, int]:
        return context.options.own.adl or (None if context.family is None else context.family.adl) or ADL

    def length(self, options: Options) -> int:
        return options.draft_tokens or (LENGTHS[-1] if options.policy == AUTO else BLOCK)

    def policy(self, context: PolicyContext) -> Policy:
        options = context.options
        if options.policy != "chunk":
            return super().policy(context)
        block, threshold = options.own.chunk or CHUNK
        longest = options.draft_tokens or LONGEST_CHUNKS
        return Chunks(MAX_NODES, longest, block=block, threshold=threshold, seen=seen(context))

    def plan(self, context: PolicyContext) -> Plan:
        options = context.options
        if options.policy != "chunk":
            return super().plan(context)
        longest = options.draft_tokens or LONGEST_CHUNKS  # its rounds never have fixed shapes
        return Plan(Budget(options.own.nodes(longest), longest), (), (0,), (0,))
