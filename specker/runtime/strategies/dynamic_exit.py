"""Strategy `del`: the target drafts with its own first layers (LayerSkip, arXiv 2404.16710), and DEL (arXiv 2504.05598)
picks the exit layer and the length each round.

Draft and target share weights and K/V cache. A draft step runs layers [0, E) on one row and writes its K/V in place for
the verify pass. `Round.hidden` keeps the rows after layer E - 1, so verification runs [0, E) on the last row only and
[E, L) on all rows.

DEL models a target of L layers that drafts g tokens with its first l layers. With a_l the share of positions at which
layer l's own ("shadow") token equals the full model's, a round yields (1 - a_l^(g+1)) / (1 - a_l) tokens on average and
loads g * l + L layers:

    TPL(l, g) = ((1 - a_l^(g+1)) / (1 - a_l)) / (L + g * (l + c_head))       g in 0..17

c_head is the cost of the LM head in layers. The paper sets it to 0; here it counts, because a draft step also reads the
head. By default (--exit-cost measured) the denominator is the measured seconds of such a round (costs.py), once rounds
were measured, and a round drafts nothing while plain rounds are faster (choose.py).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specker.config import Options
from specker.flags import opt, settle
from specker.runtime.costs import Costs
from specker.runtime.draft import Drafter
from specker.runtime.head import Head
from specker.runtime.model.cache import KVCache
from specker.runtime.model.decoder import Final, Group, Model, forward
from specker.runtime.policy import AUTO, GENERAL, LENGTHS, LONGEST, Budget, Chain, Outcome, Policy, StopRule, general
from specker.runtime.round import Round
from specker.runtime.rows import begin, begin_step
from specker.runtime.sampling import Draws
from specker.runtime.strategies.base import DraftContext, Plan, PolicyContext, Strategy

DECAY = 0.95  # of a layer's statistics at each update of that layer
REFRESH = 32  # uses of the costs of rounds before they are asked for again
PATIENCE = 0.1  # g = 0 must beat the best TPL by this share
ELIGIBLE = 8  # maximum number of exit layers


class EarlyExitDrafter(Drafter):
    model: Model  # the target
    cache: KVCache  # the target's
    head: Head  # of the draft steps, perhaps trimmed

    def __init__(self, model: Model, cache: KVCache, head: Head):
        self.model, self.cache, self.head = model, cache, head

    def fixed(self, length: int, budget: Budget) -> bool:
        return not budget.taps

    def draft(self, r: Round) -> None:
        """Draft a chain with layers [0, r.budget.exit); one CUDA graph per exit runs a step."""
        if self.head.kept is not None:
            self.head.follow(r.sequences)
        budget, s = r.budget, r.state
        hidden: list[Tensor] = []
        tapped: dict[int, list[Tensor]] = {n: [] for n in budget.taps if n < budget.exit}
        if r.fixed:
            s.step.zero_()
        for n in range(min(budget.depth, budget.nodes)):
            r.run(("exit", budget.exit), lambda n=n: self._step(r, n, hidden, tapped))  # type: ignore[misc]
            r.size = r.depth = n + 1
            if r.asks and not r.goes_on():
                break
        r.taps = {layer: torch.stack(kept, 1) for layer, kept in tapped.items()}
        r.hidden = self._room(r)[:, : r.size] if r.fixed else torch.stack(hidden, 1)

    def _room(self, r: Round) -> Tensor:
        return r.state.hidden.view(-1, r.window.shape[1], self.model.config.hidden_size)[: r.n]

    def _step(self, r: Round, n: int, hidden: list[Tensor], tapped: dict[int, list[Tensor]]) -> None:
        """Draft token n of each sequence. Captured work reads n from the state, so one graph serves all n."""
        s, model, cache = r.state, self.model, self.cache
        if r.fixed:
            rows, embedded = begin_step(model, cache, s.window, s.length, s.step)
        else:
            rows, embedded = begin(model, cache, r.lengths, 1, n, s.window[:, n : n + 1])
        out = forward(model, cache, rows, embedded, slice(r.budget.exit), tuple(tapped))
        if r.fixed:
            self._room(r).index_copy_(1, s.step, out.hidden.unsqueeze(1))
            s.step.add_(1)
            best = s.window.new_empty(r.n, 1)
            r.extend(self.head, out.final, rows.positions, best)
            s.window.index_copy_(1, s.step, best)
            return
        r.extend(self.head, out.final, rows.positions, s.window[:, n + 1 : n + 2])
        hidden.append(out.hidden)
        for layer, kept in tapped.items():
            kept.append(out.taps[layer])

    def watch(self, taps: dict[int, Tensor], draws: Draws, target: Tensor, positions: Tensor) -> tuple[Any, Any]:
        match, confidence = shadows(self.head, taps, target, positions, draws)
        return match.cpu().numpy(), confidence.cpu().numpy()  # waits for the GPU


def _bytes(layer: Group) -> int:
    """Bytes of a layer's matrices."""
    return sum(w.nbytes for w in (layer.attention.qkv, layer.attention.o, layer.mlps[0].gate_up, layer.mlps[0].down))


def shadows(
    head: Head, taps: dict[int, Tensor], target: Tensor, positions: Tensor, draws: Draws
) -> tuple[Tensor, Tensor]:
    """Each tapped layer's shadow token against the target's. taps: depth -> [T, E], the rows of one sequence; target
    [T] int64, the full model's tokens after the rows at `positions` [T] -> match [n, T] bool and confidence [n, T]. One
    norm and head pass over all rows of all layers, with the noise of the target's draw."""
    n, T = len(taps), len(target)
    ids, scores = head.candidates(Final(torch.cat(list(taps.values()))), 1, draws, positions.repeat(n))
    return ids.view(n, T) == target, scores.exp().view(n, T)


@dataclass
class DynamicExit(Policy):
    """DEL (arXiv 2504.05598). The best TPL selects the exit layer. Confidence ends the draft, or TPL's g does
    (`by_length`). The differences from the paper were measured (bench/LOG.md):

    A round's draft consists of its exit layer's shadow tokens, so that layer's statistics update every round for free;
    `overhead` pays for the other layers. A layer's counts decay at its own updates, not every round: a_l and the mean
    confidences are ratios, and a decay without new data would not change them.

    A draft ends when the product of its confidences falls below the threshold, not the last confidence: a token is
    useful only if all tokens before it are right.

    A round without a draft yields no statistics, so a few bad rows could stop drafting for a long time. Therefore g = 0
    must win by PATIENCE; otherwise at least one token is drafted."""

    rests = True
    layers: tuple[int, ...] = field()  # eligible exit layers, ascending, below `total`
    total: int = field()  # L
    head_cost: float = 0.0  # c_head
    by_length: bool = False
    overhead: float = 0.005  # maximum share of the time spent on watching layers
    costs: Costs | None = None  # measured seconds of rounds; None: TPL counts layers
    chosen: tuple[int, int] = field(default=(0, 0), init=False)  # (index into layers, g)
    threshold: float | None = field(default=None, init=False)
    _seconds: Any = field(default=None, init=False, repr=False)  # of rounds [layers, 18], or layers that they load
    _asked: int = field(default=0, init=False)  # how often those were used
    _counts: Any = field(init=False, repr=False)  # [layers, (match, mismatch)], decayed
    _sums: Any = field(init=False, repr=False)  # sums of confidence, [layers, (match, mismatch)], decayed
    _watching: float = field(default=0.0, init=False)  # seconds spent on watching
    _last: float = field(default=0.0, init=False)  # seconds of the last watch
    _since: float | None = field(default=None, init=False)  # start time of the first round

    def __post_init__(self) -> None:
        self._counts, self._sums = np.zeros((2, len(self.layers), 2))

    @property
    def confident(self) -> bool:  # type: ignore[override]
        return not self.by_length

    def budget(self) -> Budget:
        """The budget by the best TPL. The first round drafts one token with the first eligible layer."""
        if not self._counts.any():
            self.chosen, self.threshold = (0, 1), None
        else:
            table = self.tokens_per_layer()
            table[:, 0] *= 1 - PATIENCE
            best = divmod(int(table.argmax()), table.shape[1])
            self.chosen, self.threshold = best, self._threshold(best[0])
        self._chain = Chain()
        index, g = self.chosen
        longest = LONGEST + 1 if self.threshold is not None and g else g
        watched = tuple(n for i, n in enumerate(self.layers) if i != index or not g)
        return Budget(longest, longest, self.layers[index], watched if self._affordable() else ())

    def taken(self, budget: Budget, prices: Sequence[float] = ()) -> None:
        """If the round uses another sequence's exit layer, use that layer's threshold."""
        super().taken(budget, prices)
        index = self.layers.index(budget.exit)
        if index != self.chosen[0]:
            self.chosen, self.threshold = (index, budget.depth), self._threshold(index)

    def expected(self, budget: Budget) -> float:
        """1 + a + .. + a^g, with a the match rate of the exit layer. If confidence ends drafts, g is at most that of
        this layer's best TPL."""
        a = float(self.match_rates()[self.layers.index(budget.exit)])
        return sum(a**i for i in range(int(self.drafts(budget)) + 1))

    def drafts(self, budget: Budget) -> float:
        if self.by_length:
            return budget.depth
        return min(budget.depth, int(self.tokens_per_layer()[self.layers.index(budget.exit)].argmax()))

    def _affordable(self) -> bool:
        """Whether another watch, at the last one's cost, keeps watching within its share of the time."""
        now = time.perf_counter()
        if self._since is None:
            self._since = now
        return self._watching + self._last <= self.overhead * (now - self._since)

    @property
    def rule(self) -> StopRule:  # type: ignore[override]
        """The draft ends when the product of its confidences falls below the threshold."""
        return StopRule(reach=() if self.threshold is None else (self.threshold,))

    def observe(self, outcome: Outcome) -> None:
        """Update the exit layer from its own rows: the accepted tokens and the first rejected one."""
        if outcome.drafted:
            rows = min(len(outcome.path), outcome.drafted)
            match = np.arange(rows) < len(outcome.path) - 1
            confidence = np.array(outcome.confidence[:rows] or np.zeros(rows))  # unused with `by_length`
            self._hear([self.chosen[0]], match[None], confidence[None])

    def learn(self, layers: tuple[int, ...], match: Any, confidence: Any, seconds: float = 0.0) -> None:
        if seconds:
            self._watching, self._last = self._watching + seconds, seconds
        self._hear([self.layers.index(n) for n in layers], match, confidence)

    def _hear(self, at: list[int], match: Any, confidence: Any) -> None:
        """Update the statistics of the layers with indices `at` from match and confidence [len(at), rows]."""
        split = np.stack((match, ~match), axis=-1)  # [layers, rows, 2]
        self._counts[at] = DECAY * self._counts[at] + split.sum(1)
        self._sums[at] = DECAY * self._sums[at] + (split * confidence[..., None]).sum(1)

    def match_rates(self) -> Any:
        """a_l [layers]; 0 for layers without data."""
        total = self._counts.sum(1)
        return np.divide(self._counts[:, 0], total, out=np.zeros_like(total), where=total > 0)

    def tokens_per_layer(self) -> Any:
        """TPL(l, g) of the module docstring, [layers, 18] for g = 0..17."""
        a, g = self.match_rates()[:, None], np.arange(LONGEST + 1)
        tokens = np.where(a < 1, (1 - a ** (g + 1)) / np.where(a < 1, 1 - a, 1), g + 1.0)
        return tokens / self._round_costs()

    def _round_costs(self) -> Any:
        """The cost of a round for each exit and g, [layers, 18]: its layers, or measured seconds."""
        if self._seconds is None or (self.costs is not None and self._asked % REFRESH == 0):
            g = np.arange(LONGEST + 1)
            if self.costs is None or not self.costs.plain_rounds:
                self._seconds = self.total + g * (np.array(self.layers)[:, None] + self.head_cost)
            else:
                rounds = [[self.costs.round(1, Budget(n, n, exit)) for n in g.tolist()] for exit in self.layers]
                self._seconds = np.array(rounds)
        self._asked += 1
        return self._seconds

    def _threshold(self, index: int) -> float | None:
        """The midpoint of a layer's mean confidences for matches and for mismatches. None if one of them has no data or
        if g ends the draft."""
        if self.by_length or not self._counts[index].all():
            return None
        return float((self._sums[index] / self._counts[index]).mean())


def eligible_layers(total: int, head_cost: float = 0.0, count: int = ELIGIBLE) -> tuple[int, ...]:
    """At most `count` exit layers, spread over 1..total - 1. Except for layer 1, it drops layers whose draft step costs
    a whole pass: with l + c_head >= L, even drafts that are always right have a TPL of at most 1 / L."""
    spread = sorted({round(n) for n in np.linspace(1, total - 1, min(count, total - 1))}) if total > 1 else []
    return tuple(n for n in spread if n == 1 or n + head_cost < total)


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

    def __post_init__(self) -> None:
        settle(self)

    def exit(self, layers: int) -> int:
        """The exit layer for a target of `layers`, for policies that do not choose it."""
        return self.exit_layer or max(1, layers // 2)


class SelfDrafting(Strategy):
    name = "del"
    summary = "the target drafts with its own first layers"
    paper = "DEL (2504.05598)"
    options = DynamicExitOptions
    policies = ("del", "del-length")
    self_drafting = True

    def check(self, options: Options) -> None:
        if options.tree is not None:
            raise ValueError("strategy del drafts a chain: --tree does not apply")
        if options.own.exit_layer is not None and options.policy in (None, *self.policies):
            raise ValueError(f"--exit-layer is for --policy {', '.join(GENERAL)}: del chooses the layer")

    def default_policy(self, options: Options) -> str:
        return self.policies[0]

    def check_target(self, options: Options, layers: int) -> None:
        exit_layer = options.own.exit_layer
        if exit_layer is not None and exit_layer >= layers:
            raise ValueError(f"--exit-layer must be below the target's {layers} layers")
        if layers < 2:
            raise ValueError(f"strategy {options.strategy!r} needs a target of at least 2 layers")

    def drafter(self, context: DraftContext) -> EarlyExitDrafter:
        """A drafter with the target's head, or with the rows that trimming keeps."""
        assert context.model is not None and context.cache is not None
        rows = None
        if context.draft is not None:
            rows = context.draft.weights.head
        elif context.ranks is not None:
            rows = context.target.weights.head  # the whole head, so a draft step needs no other rank
        return EarlyExitDrafter(context.model, context.cache, context.head(context.model, rows))

    def head_cost(self, options: Options, head: Head | None, model: Model) -> float:
        """The LM head's bytes, in layers of the target."""
        if head is None or options.own.exit_cost == "layers":
            return 0.0
        return head.weight.nbytes / sum(_bytes(layer) for layer in model.layers) * len(model.layers)

    def policy(self, context: PolicyContext) -> Policy:
        layers, rule = context.layers, context.options.policy or "del"
        if rule in self.policies:
            eligible = eligible_layers(layers, context.head_cost)
            costs = context.known.costs if context.known and context.options.own.exit_cost == "measured" else None
            return DynamicExit(eligible, layers, context.head_cost, rule == "del-length", costs=costs)
        exit, size = context.options.own.exit(layers), self.size(context.options)
        return self.auto(context, replace(size, exit=exit)) if rule == AUTO else general(rule, size, exit)

    def plan(self, context: PolicyContext) -> Plan:
        """Draft steps are captured one by one, so the plan holds a whole draft only for a fixed length."""
        size, rule = self.size(context.options), context.options.policy or "del"
        exits: tuple[int, ...] = (context.options.own.exit(context.layers),)
        if rule in self.policies:
            exits, size = eligible_layers(context.layers, context.head_cost), Budget(LONGEST + 1, LONGEST + 1)
        elif rule == "plus-minus-one":
            size = Budget(max(size.depth, LONGEST), max(size.depth, LONGEST))
        if rule == AUTO and not context.confident:
            lengths = (*(n for n in LENGTHS if n < size.depth), size.depth)
            return Plan(size, tuple(Budget(n, n, exits[0]) for n in lengths), (0,), (0,))
        length = size.depth if rule == "fixed" else 1
        sizes = (0,) if rule == "fixed" else tuple(range(size.nodes + 1))
        return Plan(size, tuple(Budget(length, length, exit) for exit in exits), (0,), sizes)
