"""What the strategies that guess a block of tokens in one pass share (`diffuspec`, `dflash`): DiffuSpec's path search
and its adaptive length (arXiv 2510.02358), with their options.

CPS, the path search through the block's candidates, is in tree.py, its n-gram model in ngram_scorer.py; search.py makes
drafts of them. ADL, the adaptive length, is `AdaptiveLength` below.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from specker.fields import check_fields, opt, option
from specker.options import Options
from specker.runtime.control.auto import TEXT_DECAY, Acceptance, Auto
from specker.runtime.control.policy import (
    AUTO,
    CONFIDENT,
    LONGEST,
    MAX_NODES,
    TREES,
    Budget,
    Means,
    Outcome,
    Policy,
    general,
)
from specker.runtime.strategies.base import Plan, PolicyContext, Strategy

CANDIDATES = 15  # M_max: the most candidates of a position
MASS = 0.8  # tau: keep the fewest candidates with this much probability
# Of a tree whose paths the drafter's own head ranks, which finds tokens likely that the block did not:
RANKED_CANDIDATES = 60  # with up to four stop tokens they fill 64
RANKED_MASS = 0.99
BEAM = 3  # B: paths that the search for a chain keeps
SEARCHED = ("ngram", "cps_tau", "cps_candidates", "cps_beam", "cps_lambda")  # options of the path search
ADAPTED = ("adl", "adl_step", "adl_rho")  # options of policy adl
MOST_CANDIDATES = 64  # that vocab_topk finds
TREE_NODES = 3  # tokens of a tree for each position of its block
SHARED = "which of a block's guesses are verified, and how long blocks are"  # what the options are for


@dataclass
class AdaptiveLength(Policy):
    """ADL of DiffuSpec (arXiv 2510.02358): follow the number of guesses before the first stop token, and add `step`
    while the target accepts as many. With L_gen the guesses before the first stop token and L_acc the accepted ones,

        ema <- (1 - rho) ema + rho L, starting from 0
        k = clip(floor(ema_gen) + step [ema_acc >= ema_gen], shortest, longest)

    The first block has the longest length. Unlike in the paper, nothing is drafted while plain rounds are faster.
    """

    may_skip_drafting = True
    shortest: int = 20
    longest: int = 30
    step: int = 10
    rho: float = 0.5
    nodes: Callable[[int], int] = lambda length: length  # draft tokens of a block of this length
    seen: Acceptance | None = None  # what drafts have achieved in this text; None: use the smoothed rate
    length: int = field(init=False)  # k
    generated: float = field(default=0.0, init=False)  # the smoothed L_gen
    accepted: float = field(default=0.0, init=False)  # the smoothed L_acc

    def __post_init__(self) -> None:
        self.length = self.longest

    def budget(self) -> Budget:
        return Budget(self.nodes(self.length), self.length)

    def means(self, budget: Budget) -> Means:
        means = super().means(budget)
        return means if self.seen is None else means._replace(tokens=self.seen.expected(int(means.drafted)))

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        if outcome.drafted and self.seen is not None:
            self.seen.add(outcome)
        if outcome.note is None or not outcome.drafted:
            return
        self.generated += self.rho * (outcome.note.generated - self.generated)
        self.accepted += self.rho * (len(outcome.path) - 1 - self.accepted)
        grown = self.step if self.accepted >= self.generated else 0
        self.length = min(max(math.floor(self.generated) + grown, self.shortest), self.longest)


def span(value: str | tuple[int, int]) -> tuple[int, int]:
    """Parse the shortest and the longest block, such as `20-30`."""
    text = "-".join(map(str, value)) if isinstance(value, tuple) else str(value)
    match = re.fullmatch(r"(\d{1,3})-(\d{1,3})", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]) <= MAX_NODES:
        raise ValueError(f"{option('adl')} must be SHORTEST-LONGEST within 1-{MAX_NODES}, such as 20-30, got {value!r}")
    return int(match[1]), int(match[2])


@dataclass(frozen=True)
class BlockOptions:
    cps: str | None = opt(
        None,
        "off: take the argmax of each position (default unless an option of the search is given); chain: search the "
        "lattice of candidates for the best path; tree: verify the most probable beginnings of paths as one tree",
        choices=("off", "chain", "tree"),
    )
    ngram: str | None = opt(
        None,
        "the search's n-gram model (default: the bundled one for the target, or none); see specker calibrate",
        "FILE",
    )
    adl: tuple[int, int] | None = opt(
        None,
        "--policy adl with this shortest and longest block (default: the paper's 20-30 for diffuspec; half of the "
        "checkpoint's block and all of it for dflash)",
        "SHORTEST-LONGEST",
        parse=span,
    )
    cps_tau: float | None = opt(
        None,
        f"candidates of a position: the fewest with this probability together (default: {MASS}; {RANKED_MASS} of trees "
        "that a trained head ranks)",
        least=0,
        most=1,
    )
    cps_candidates: int | None = opt(
        None,
        f"the most candidates of a position (default: {CANDIDATES}; {RANKED_CANDIDATES} of trees that a trained head "
        "ranks)",
        least=1,
        most=MOST_CANDIDATES,
    )
    cps_beam: int | None = opt(
        None, f"paths that the search for a chain keeps at each position (default: {BEAM})", least=1
    )
    cps_lambda: float | None = opt(
        None,
        "weight of the drafter's log-probabilities against those of the n-gram model (default: 0.85; 0.5 as published)",
        least=0,
        most=1,
    )
    cps_first: str = opt(
        "drafter",
        "what ranks the first position of a block: the drafter alone, or both models, as published",
        choices=("drafter", "both"),
        flag=False,
    )
    adl_step: int | None = opt(
        None, "tokens that --policy adl adds while as many are accepted as were guessed (default: 10)", least=0
    )
    adl_rho: float | None = opt(
        None, "weight of the last block in the means that --policy adl follows (default: 0.5)", least=0, most=1
    )

    def __post_init__(self) -> None:
        check_fields(self)
        given = [name for name in SEARCHED if getattr(self, name) is not None]
        if self.cps == "off" and given:
            raise ValueError(f"{option('cps', 'off')} disables the search: leave out {option(given[0])}")
        if self.cps == "tree" and self.cps_beam is not None:
            raise ValueError(f"{option('cps_beam')} is for {option('cps', 'chain')}: the search for a tree has no beam")
        most = self.cps_candidates or CANDIDATES
        if self.cps_beam is not None and self.cps_beam > most:
            asked = option("cps_beam", self.cps_beam)
            raise ValueError(f"{asked} is wider than the candidates of a position, {option('cps_candidates', most)}")

    @property
    def search(self) -> str:
        """The mode of the path search: off, chain or tree."""
        return self.cps or ("chain" if any(getattr(self, name) is not None for name in SEARCHED) else "off")

    def nodes(self, length: int) -> int:
        """The most draft tokens of a block of `length`."""
        return min(TREE_NODES * length, MAX_NODES) if self.search == "tree" else length


class BlockStrategy(Strategy):
    """A strategy that guesses a block in one pass. Its options are `BlockOptions`."""

    options = BlockOptions
    policies: tuple[str, ...] = ("adl",)
    branches = True

    def default_policy(self, options: Options) -> str | None:
        usual = super().default_policy(options)
        adapts = any(getattr(options.own, name) is not None for name in ADAPTED)
        return "adl" if adapts and usual == self.usual else usual

    def check(self, options: Options) -> None:
        own: BlockOptions = options.own
        policy = options.policy or self.default_policy(options)
        if options.tree is not None:
            other = f"{option('tree')} does not apply, but {option('cps', 'tree')} does"
            raise ValueError(f"strategy {self.name} drafts a block: {other}")
        if policy not in ("fixed", AUTO, *self.policies) and own.search == "tree":
            raise ValueError(f"{option('policy', policy)} is for chains: leave out {option('cps', 'tree')}")
        given = [name for name in ADAPTED if getattr(own, name) is not None]
        if given and policy != "adl":
            raise ValueError(f"{option(given[0])} is for {option('policy', 'adl')}")
        if policy == "adl" and options.draft_tokens is not None:
            other = f"{option('adl')} bounds it, {option('draft_tokens')} does not apply"
            raise ValueError(f"{option('policy', 'adl')} chooses the block's length: {other}")

    def chains(self, options: Options) -> bool:
        return options.own.search != "tree"

    def lengths(self, context: PolicyContext) -> tuple[int, int]:
        """The shortest and the longest block of policy adl, in tokens."""
        raise NotImplementedError

    def length(self, options: Options) -> int:
        """The length of a block of policy fixed, and the longest one of policy auto."""
        raise NotImplementedError

    def trees(self, options: Options) -> tuple[Budget, ...]:
        """The trees that policy auto chooses from, beside chains."""
        from specker.runtime.strategies.blocks.tree import size

        if options.own.search != "tree":
            return ()
        longest, candidates = self.length(options), options.own.cps_candidates or CANDIDATES
        shapes = (Budget(nodes, min(longest, nodes // 2)) for nodes in TREES)
        return tuple(shape for shape in shapes if size(shape.depth, candidates, shape.nodes) == shape.nodes)

    def policy(self, context: PolicyContext) -> Policy:
        options, own = context.options, context.options.own
        rule, length = options.policy or "fixed", self.length(options)
        if rule == "adl":
            assert context.history is not None
            given = {"step": own.adl_step, "rho": own.adl_rho}
            constants: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
            seen = Acceptance(TEXT_DECAY, context.history.drafts)
            return AdaptiveLength(*self.lengths(context), nodes=own.nodes, seen=seen, **constants)
        if rule == AUTO:
            assert context.history is not None
            return Auto(context.history.drafts, Budget(length, length), False, self.trees(options))
        return general(rule, Budget(own.nodes(length), length))

    def plan(self, context: PolicyContext) -> Plan:
        options, own = context.options, context.options.own
        rule, longest = options.policy, self.length(context.options)
        if rule in CONFIDENT or rule == AUTO:
            plan, trees = super().plan(replace(context, confident=False)), self.trees(options)
            nodes = max((tree.nodes for tree in trees), default=0)
            largest = replace(plan.largest, nodes=max(plan.largest.nodes, nodes))
            return replace(plan, largest=largest, budgets=(*plan.budgets, *trees))
        shortest = longest if rule == "fixed" else 1
        if rule == "adl":
            shortest, longest = self.lengths(context)
        elif rule == "plus-minus-one":
            longest = max(longest, LONGEST)
        budgets = tuple(Budget(own.nodes(n), n) for n in range(shortest, longest + 1))
        return Plan(budgets[-1], budgets, (0,), (0,))
