"""Strategy `del`: the target drafts with its own first layers (LayerSkip, arXiv 2404.16710), and DEL (arXiv 2504.05598)
picks the exit layer and the length each round. Python has a keyword `del`, so code, its bench and that bench's rows
call the strategy `dynamic_exit`; users call it `del`.

Draft and target share weights and K/V cache. A draft step runs layers [0, E) on one row and writes its K/V in place for
the verify pass. `Draft.resume` keeps the rows after layer E - 1, so verification runs [0, E) on the last row only and
[E, L) on all rows.

DEL models a target of L layers that drafts g tokens with its first l layers. With a_l the share of positions at which
layer l's own ("shadow") token equals the full model's, a round yields (1 - a_l^(g+1)) / (1 - a_l) tokens on average and
loads g * l + L layers:

    TPL(l, g) = ((1 - a_l^(g+1)) / (1 - a_l)) / (L + g * (l + c_head))       g in 0..17

c_head is the cost of the LM head in layers. The paper sets it to 0; here it counts, because a draft step also reads the
head. By default (--exit-cost measured) the denominator is the measured seconds of such a round (costs.py), once rounds
were measured, and a round drafts nothing while plain rounds are faster (choose.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from specker.fields import check_fields, opt, option
from specker.options import Options
from specker.runtime.control.policy import AUTO, GENERAL, LENGTHS, LONGEST, Budget, Policy, general
from specker.runtime.strategies.base import DraftContext, Plan, PolicyContext, Strategy

if TYPE_CHECKING:
    from specker.model.decoder import Model
    from specker.runtime.strategies.dynamic_exit.early_exit import EarlyExitDrafter

ELIGIBLE = 8  # maximum number of exit layers, unless the user names them
WINDOW = 0.95  # w of a layer's statistics
USUAL = 6  # longest draft whose verify passes the warm-up captures for each exit


def eligible_layers(total: int, head_cost: float = 0.0, asked: str | tuple[int, ...] | None = None) -> tuple[int, ...]:
    """The exit layers of --eligible-layers. By default at most ELIGIBLE, spread over 1..total - 1. Except for layer 1,
    it drops layers whose draft step costs a whole pass: with l + c_head >= L, even drafts that are always right have a
    TPL of at most 1 / L."""
    import numpy as np

    if asked is not None:
        return tuple(range(1, total)) if isinstance(asked, str) else asked
    spread = sorted({round(n) for n in np.linspace(1, total - 1, min(ELIGIBLE, total - 1))}) if total > 1 else []
    return tuple(n for n in spread if n == 1 or n + head_cost < total)


def layers_of(value: Any) -> str | tuple[int, ...]:
    """Parse `all` or ascending layers, such as `2,4,8`."""
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    layers = tuple(map(int, text.split(","))) if re.fullmatch(r"\d{1,4}(,\d{1,4})*", text) else ()
    if text != "all" and (not layers or layers[0] < 1 or list(layers) != sorted(set(layers))):
        raise ValueError(f"{option('eligible_layers')} must be all, or ascending layers such as 2,4,8, got {value!r}")
    return layers or text


@dataclass(frozen=True)
class DynamicExitOptions:
    exit_layer: int | None = opt(
        None, "layers that draft, for policies with a fixed exit layer (default: half)", least=1
    )
    exit_cost: str = opt(
        "measured",
        "what DEL compares: measured seconds of rounds, bytes of the layers and the LM head, or layers as in the paper",
        choices=("layers", "bytes", "measured"),
    )
    eligible_layers: str | tuple[int, ...] | None = opt(
        None,
        f"exit layers that DEL chooses from: all, or layers such as 2,4,8 (default: {ELIGIBLE}, spread)",
        "all|N,N,..",
        parse=layers_of,
    )
    exit_window: float = opt(WINDOW, "what a round leaves of DEL's earlier counts", least=0, most=1)
    exit_rules: str = opt(
        "specker",
        "paper: each round watches all layers, a draft ends by its last confidence, and the best TPL is taken as it is",
        choices=("specker", "paper"),
        flag=False,
    )

    def __post_init__(self) -> None:
        check_fields(self)

    def exit(self, layers: int) -> int:
        """The exit layer for a target of `layers`, for policies that do not choose it."""
        return self.exit_layer or max(1, layers // 2)


class SelfDrafting(Strategy):
    name = "del"
    summary = "the target drafts with its own first layers"
    paper = "DEL (2504.05598)"
    options = DynamicExitOptions
    policies = ("del", "del-length")
    usual = "del"
    self_drafting = True

    def published(self, given: Mapping[str, Any]) -> dict[str, Any] | None:
        if given.get("policy", self.usual) not in self.policies:
            return {}
        settings = {"eligible_layers": "all", "exit_cost": "layers", "exit_window": WINDOW, "exit_rules": "paper"}
        return {"policy": self.usual} | settings

    def check(self, options: Options) -> None:
        if options.tree is not None:
            raise ValueError(f"strategy del drafts a chain: {option('tree')} does not apply")
        own, chooses = options.own, options.policy in (None, *self.policies)
        chosen = {"exit_layer": (own.exit_layer, "layer"), "draft_tokens": (options.draft_tokens, "length")}
        for name, (given, what) in chosen.items():
            if chooses and given is not None:
                policies = option("policy", ", ".join(GENERAL))
                raise ValueError(f"{option(name)} is for {policies}: del chooses the {what}")
        if own.eligible_layers is not None and not chooses:
            raise ValueError(f"{option('eligible_layers')} is for {option('policy', ', '.join(self.policies))}")

    def default_policy(self, options: Options) -> str:
        return self.usual

    def check_target(self, options: Options, layers: int) -> None:
        exit_layer = options.own.exit_layer
        if exit_layer is not None and exit_layer >= layers:
            raise ValueError(f"{option('exit_layer')} must be below the target's {layers} layers")
        eligible = options.own.eligible_layers
        if isinstance(eligible, tuple) and eligible[-1] >= layers:
            raise ValueError(f"{option('eligible_layers')} must be below the target's {layers} layers")
        if layers < 2:
            raise ValueError(f"strategy {options.strategy!r} needs a target of at least 2 layers")

    def drafter(self, context: DraftContext) -> EarlyExitDrafter:
        from specker.runtime.strategies.dynamic_exit.early_exit import EarlyExitDrafter

        assert context.model is not None and context.cache is not None
        # The whole head of several ranks, so a draft step needs no other rank.
        rows = None if context.ranks is None else context.target.weights.head
        own, head = context.options.own, context.head(context.model, rows)
        watched: tuple[int, ...] = ()
        if context.options.policy in self.policies:
            watched = eligible_layers(context.target.config.num_layers, asked=own.eligible_layers)
        return EarlyExitDrafter(context.model, context.cache, head, watched, spares=own.exit_rules != "paper")

    def head_cost(self, options: Options, head_bytes: int, model: Model) -> float:
        """The LM head's bytes, in layers of the target."""
        return 0.0 if options.own.exit_cost == "layers" else head_bytes / _bytes(model) * len(model.layers)

    def policy(self, context: PolicyContext) -> Policy:
        from specker.runtime.strategies.dynamic_exit.exit_policy import PAPER, DynamicExit

        layers, rule, own = context.layers, context.options.policy or "del", context.options.own
        if rule in self.policies:
            history = context.history
            assert history is not None
            return DynamicExit(
                eligible_layers(layers, context.head_cost, own.eligible_layers),
                layers,
                context.head_cost,
                by_length=rule == "del-length",
                costs=history.costs if own.exit_cost == "measured" else None,
                window=own.exit_window,
                earlier=history,
                **(PAPER if own.exit_rules == "paper" else {}),
            )
        exit, size = context.options.own.exit(layers), self.size(context.options)
        return self.auto(context, replace(size, exit=exit)) if rule == AUTO else general(rule, size, exit)

    def plan(self, context: PolicyContext) -> Plan:
        """Draft steps are captured one by one, so the plan holds a whole draft only for a fixed length. A verify pass
        depends on exit and length, and 8 exits with 18 lengths are too many: the plan has drafts of up to `USUAL`."""
        size, rule = self.size(context.options), context.options.policy or "del"
        exits: tuple[int, ...] = (context.options.own.exit(context.layers),)
        if rule in self.policies:
            exits = eligible_layers(context.layers, context.head_cost, context.options.own.eligible_layers)
            size = Budget(LONGEST + 1, LONGEST + 1)
        elif rule == "plus-minus-one":
            size = Budget(max(size.depth, LONGEST), max(size.depth, LONGEST))
        if rule in self.policies and context.options.own.exit_rules == "paper":
            return Plan(size, (), (0,), (0,))  # a round that watches layers is not captured
        if rule == AUTO and not context.confident:
            lengths = (*(n for n in LENGTHS if n < size.depth), size.depth)
            return Plan(size, tuple(Budget(n, n, exits[0]) for n in lengths), (0,), (0,))
        length = size.depth if rule == "fixed" else 1
        sizes = (0,) if rule == "fixed" else tuple(range(size.nodes + 1))
        usual = () if rule == "fixed" else range(length + 1, min(USUAL, size.depth) + 1)
        pairs = tuple(Budget(n, n, exit) for exit, n in product(exits, usual))
        return Plan(size, tuple(Budget(length, length, exit) for exit in exits), (0,), sizes, pairs)


def _bytes(model: Model) -> float:
    """Bytes of the layers' matrices that a step of one row reads."""
    share, layers = model.config.layer.share, model.layers
    mixing = sum(w.mixer.qkv.nbytes + w.mixer.o.nbytes for w in layers)
    feeding = [(w.layers[0].gate_up.nbytes + w.layers[0].down.nbytes) * share(n) for n, w in enumerate(layers)]
    return mixing + sum(feeding)
