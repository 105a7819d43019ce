"""Strategy `diffuspec`: a diffusion language model drafts a block in one denoising step over the text and a block of
masks (DiffuSpec, arXiv 2510.02358).

A round forwards the committed tokens that the cache lacks (including the root) and k masks; all of them see each other
and the cached columns. The cache keeps the tokens' columns and drops the masks', so a round costs accepted + 1 + k rows
instead of the whole text. The kept K/V saw an earlier round's masks: an approximation that can cost acceptance but not
correctness.

CPS, the path search through the block's candidates, is in lattice.py. ADL, the adaptive block length, is
`AdaptiveLength` below: with L_gen the guesses before the first stop token and L_acc the accepted ones,

    ema <- (1 - rho) ema + rho L          k = clip(floor(ema_gen) + step [ema_acc >= ema_gen], shortest, longest)

Row i predicts position i + 1 in Dream's checkpoints (shifted logits) and position i in plain masked-diffusion ones.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from specker.flags import check_fields, opt, option
from specker.options import Options
from specker.runtime.auto import TEXT, Acceptance, Experienced
from specker.runtime.policy import (
    AUTO,
    CONFIDENT,
    LENGTHS,
    LONGEST,
    MAX_NODES,
    Budget,
    Fixed,
    Outcome,
    Policy,
    StopRule,
    general,
)
from specker.runtime.strategies.base import DraftContext, Plan, PolicyContext, Strategy
from specker.zoo import Family

if TYPE_CHECKING:
    from specker.checkpoints.checkpoint import Checkpoint
    from specker.runtime.strategies.diffuspec.drafter import DiffusionDrafter

# The measured winners on the bundled pair.
BLOCK = 4
CHUNK = (4, 0.5)
ADL = (20, 30)  # the paper's values, for models of its size
CPS_LAMBDA = 0.85  # 0.5 in the paper
LONGEST_CHUNKS = 32  # maximum number of tokens in all chunks of a draft


@dataclass
class AdaptiveLength(Experienced):
    """ADL of DiffuSpec (arXiv 2510.02358): follow the number of guesses before the first stop token, and add `step`
    while the target accepts as many.

        k = clip(floor(ema_generated) + step [ema_accepted >= ema_generated], shortest, longest)

    with ema <- (1 - rho) ema + rho L, starting from 0. The first block has the longest length.
    """

    shortest: int = 20
    longest: int = 30
    step: int = 10
    rho: float = 0.5
    nodes: int = 255  # draft tokens of all paths together
    seen: Acceptance | None = None
    length: int = field(init=False)  # k
    generated: float = field(default=0.0, init=False)  # the smoothed L_gen
    accepted: float = field(default=0.0, init=False)  # the smoothed L_acc

    def __post_init__(self) -> None:
        self.length = self.longest

    def budget(self) -> Budget:
        return Budget(self.nodes, self.length)

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        if outcome.found is None or not outcome.drafted:
            return
        self.generated += self.rho * (outcome.found.generated - self.generated)
        self.accepted += self.rho * (len(outcome.path) - 1 - self.accepted)
        grown = self.step if self.accepted >= self.generated else 0
        self.length = min(max(math.floor(self.generated) + grown, self.shortest), self.longest)


@dataclass
class Chunks(Experienced, Fixed):
    """Draft further blocks while every token is at least as probable as `threshold` (FailFast, arXiv 2512.20573)."""

    block: int = 4
    threshold: float = 0.5
    seen: Acceptance | None = None
    confident = True

    def budget(self) -> Budget:
        return Budget(self.nodes, self.depth, block=self.block)

    @property
    def rule(self) -> StopRule:  # type: ignore[override]
        return StopRule(token=self.threshold)


def span(value: str | tuple[int, int]) -> tuple[int, int]:
    """Parse the shortest and the longest block, such as `20-30`."""
    text = "-".join(map(str, value)) if isinstance(value, tuple) else str(value)
    match = re.fullmatch(r"(\d{1,3})-(\d{1,3})", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]) <= 255:
        raise ValueError(f"{option('adl')} must be SHORTEST-LONGEST within 1-255, such as 20-30, got {value!r}")
    return int(match[1]), int(match[2])


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
class DiffuSpecOptions:
    cps: str | None = opt(
        None,
        "off: take the argmax of each position (default without search options); chain: search the lattice of "
        "candidates for the best path; tree: verify the best paths as one tree",
        choices=("off", "chain", "tree"),
    )
    cps_paths: int | None = opt(None, "width of the search's beam (default 3)", least=1, most=64)
    cps_candidates: int | None = opt(None, "maximum candidates per position (default 15)", least=1, most=64)
    cps_mass: float | None = opt(
        None, "keep the fewest candidates of a position with this probability (default 0.8)", least=0, most=1
    )
    cps_lambda: float | None = opt(
        None, "weight of the diffusion model against the n-gram model (default 0.85)", least=0, most=1
    )
    ngram: str | None = opt(
        None,
        "the search's n-gram model (default: the bundled one for the target); see python -m specker.calibrate",
        "FILE",
    )
    shifted_logits: str | None = opt(
        None, "whether row i predicts position i + 1 (default: yes for Dream, no for others)", choices=("yes", "no")
    )
    adl: tuple[int, int] | None = opt(
        None,
        "shortest and longest block of --policy adl (default 20-30; with bundled drafts the fastest measured)",
        "SHORTEST-LONGEST",
        parse=span,
    )
    chunk: tuple[int, float] | None = opt(
        None,
        "tokens per pass of --policy chunk, and the probability below which a token ends the draft (default 4:0.5)",
        "TOKENS:X",
        parse=chunked,
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.cps == "off" and self._search_options:
            others = ", ".join(map(option, self._search_options))
            raise ValueError(f"{option('cps', 'off')} disables the search: leave out {others}")

    @property
    def _search_options(self) -> list[str]:
        names = ("cps_paths", "cps_candidates", "cps_mass", "cps_lambda", "ngram")
        return [name for name in names if getattr(self, name) is not None]

    @property
    def search(self) -> str:
        """The mode of the path search: off, chain or tree."""
        return self.cps or ("chain" if self._search_options else "off")

    def lengths(self, family: Family | None) -> tuple[int, int]:
        """The shortest and the longest block of --policy adl, in tokens."""
        return self.adl or (None if family is None else family.adl) or ADL


class DiffuSpec(Strategy):
    name = "diffuspec"
    summary = "a diffusion language model drafts a block in one pass"
    paper = "DiffuSpec (2510.02358)"
    options = DiffuSpecOptions
    policies = ("adl", "chunk")
    needs_draft = True
    causal = False

    def default_policy(self, options: Options) -> str:
        return "adl" if options.draft_tokens is None else "fixed"

    def check(self, options: Options) -> None:
        own: DiffuSpecOptions = options.own
        policy = options.policy or self.default_policy(options)
        if options.tree is not None:
            other = f"{option('tree')} does not apply, but {option('cps', 'tree')} does"
            raise ValueError(f"strategy diffuspec drafts a block: {other}")
        if policy in CONFIDENT:
            raise ValueError(f"{option('policy', policy)} ends a draft token by token, but diffuspec drafts a block")
        if policy in ("plus-minus-one", AUTO) and own.search == "tree":
            raise ValueError(f"{option('policy', policy)} is for chains: leave out {option('cps', 'tree')}")
        for name in self.policies:
            if getattr(own, name) is not None and policy != name:
                raise ValueError(f"{option(name)} is for {option('policy', name)}")
        if policy == "adl" and options.draft_tokens is not None:
            other = f"{option('adl')} bounds it, {option('draft_tokens')} does not apply"
            raise ValueError(f"{option('policy', 'adl')} chooses the block's length: {other}")

    def adapt(self, options: Options, draft: Checkpoint) -> Checkpoint:
        shifted = options.own.shifted_logits
        if shifted is None:
            return draft
        return replace(draft, config=replace(draft.config, shifted_logits=shifted == "yes"))

    def chains(self, options: Options) -> bool:
        return options.own.search != "tree"

    def drafter(self, context: DraftContext) -> DiffusionDrafter:
        from specker.runtime.strategies.diffuspec.drafter import made

        return made(context, self)

    def policy(self, context: PolicyContext) -> Policy:
        """All paths of a block have its length, so the policies limit the depth; only MAX_NODES limits the nodes."""
        options, own = context.options, context.options.own
        length, rule = options.draft_tokens or BLOCK, options.policy or "fixed"
        seen = None if context.known is None else Acceptance(TEXT, context.known.drafts)
        if rule == "adl":
            shortest, longest = own.lengths(context.family)
            return AdaptiveLength(shortest, longest, seen=seen)
        if rule == "chunk":
            block, threshold = own.chunk or CHUNK
            longest = options.draft_tokens or LONGEST_CHUNKS
            return Chunks(MAX_NODES, longest, block=block, threshold=threshold, seen=seen)
        if rule == AUTO:
            longest = options.draft_tokens or LENGTHS[-1]
            return self.auto(replace(context, confident=False), Budget(longest, longest))
        return general(rule, Budget(MAX_NODES if rule == "fixed" else length, length))

    def plan(self, context: PolicyContext) -> Plan:
        """A searched path may end anywhere, so the warm-up verifies drafts of every size."""
        from specker.runtime.strategies.diffuspec.lattice import Search

        options, own = context.options, context.options.own
        rule, shortest, longest = options.policy, 1, options.draft_tokens or BLOCK
        if rule == AUTO:
            longest = options.draft_tokens or LENGTHS[-1]
        if rule == "adl":
            shortest, longest = own.lengths(context.family)
        elif rule == "plus-minus-one":
            longest = max(longest, LONGEST)
        elif rule == "fixed":
            shortest = longest
        elif rule == "chunk":  # its rounds never have fixed shapes
            longest = options.draft_tokens or LONGEST_CHUNKS
            return Plan(Budget(min(longest * (own.cps_paths or Search.paths), MAX_NODES), longest), (), (0,), (0,))
        paths = (own.cps_paths or Search.paths) if own.search == "tree" else 1
        nodes = min(paths * longest, MAX_NODES)
        sizes = (0,) if own.search == "off" else tuple(range(nodes + 1))
        lengths = tuple(Budget(nodes, n) for n in range(shortest, longest + 1))
        return Plan(Budget(nodes, longest), lengths, sizes, sizes)
