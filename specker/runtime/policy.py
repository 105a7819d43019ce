"""How much to draft each round: a fixed amount, rules that follow acceptance, and DEL, which picks the exit layer too.

DEL (arXiv 2504.05598) models a target of L layers that drafts g tokens with its first l layers. With a_l the share of
positions at which layer l's own ("shadow") token is the full model's, a round yields (1 - a_l^(g+1)) / (1 - a_l) tokens
on average and loads g * l + L layers:

    TPL(l, g) = ((1 - a_l^(g+1)) / (1 - a_l)) / (L + g * (l + c_head))       g in 0..17

c_head, the LM head in layers, is 0 in the paper; a draft step reads it as well, so it counts here unless asked not to.
Where it is measured, it also holds what one more row costs the verify pass.
"""

import math
import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from specker.runtime.stats import Found

LONGEST = 17  # the largest g that TPL is asked for; a draft that confidence ends may be one longer
DECAY = 0.95  # of DEL's statistics of a layer, a round in which it is heard of
PATIENCE = 0.1  # share by which drafting nothing has to have DEL's best TPL
ELIGIBLE = 8  # exit layers that are watched at most


@dataclass(frozen=True)
class Budget:
    nodes: int  # draft tokens at most
    depth: int  # longest path at most
    exit: int = 0  # layers that the target drafts with by itself; 0: another model drafts
    taps: tuple[int, ...] = ()  # depths of the target whose rows `learn` wants to hear of this round
    block: int = 0  # tokens that a diffusion drafter guesses in one pass; 0: all of `depth`

    def clip(self, nodes: int, depth: int) -> "Budget":
        """No more nodes and no longer a path."""
        return replace(self, nodes=max(0, min(self.nodes, nodes)), depth=max(0, min(self.depth, depth)))


@dataclass(frozen=True)
class Outcome:
    """What became of one sequence's draft."""

    drafted: int  # tokens
    path: list[int]  # rows kept, row 0 (the root) first
    confidence: list[float] = field(default_factory=list)  # of each draft token, where policies are asked
    found: Found | None = None  # of a diffusion drafter


class Policy:
    """The rule by which one sequence proposes how much to draft. A round has one shape: of the proposals it takes the
    one that promises most tokens for its cost (`expected`, round.best_shape)."""

    confident: bool = False  # whether `keep_drafting` is asked after each token of a chain
    layers: tuple[int, ...] = ()  # depths of the target that `learn` may ever want to hear of
    rate: float = 0.8  # smoothed share of draft tokens on the path that were right

    def budget(self) -> Budget:
        """The shape that this sequence proposes."""
        raise NotImplementedError

    def taken(self, budget: Budget) -> None:
        """The round has this shape, perhaps another sequence's proposal."""

    def expected(self, budget: Budget) -> float:
        """Tokens that a round of this shape commits for this sequence: 1 + a + a^2 + .. + a^depth, a the smoothed
        acceptance rate."""
        return sum(self.rate**i for i in range(min(budget.depth, budget.nodes) + 1))

    def keep_drafting(self, confidence: float) -> bool:
        """After a draft token of this probability: draft another?"""
        return True

    def observe(self, outcome: Outcome) -> None:
        """Called once a round."""
        if outcome.drafted:
            right = len(outcome.path) - 1
            seen = min(right + 1, outcome.drafted)
            self.rate += min(0.1 * seen, 1.0) * (right / seen - self.rate)

    def learn(self, layers: tuple[int, ...], match: Any, confidence: Any, seconds: float = 0.0) -> None:
        """numpy [len(layers), rows]: whether each layer's shadow token was the target's, and its probability; `seconds`
        is what it took to find out."""


@dataclass
class Fixed(Policy):
    """The same budget every round."""

    nodes: int
    depth: int
    exit: int = 0

    def budget(self) -> Budget:
        return Budget(self.nodes, self.depth, self.exit)


@dataclass
class PlusMinusOne(Fixed):
    """A chain one longer after a wholly accepted draft, one shorter after any other."""

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        if outcome.drafted:
            whole = len(outcome.path) > outcome.drafted
            self.depth = min(self.depth + 1, LONGEST) if whole else max(1, self.depth - 1)
            self.nodes = self.depth


@dataclass
class DraftAndVerify(Fixed):
    """Stop after a token less probable than a threshold, which is moved towards `goal` accepted of those drafted
    (arXiv 2309.08168, equations 5 and 6, with its constants)."""

    threshold: float = 0.6
    goal: float = 0.9
    accepted: float = 0.9  # smoothed share
    confident = True

    def keep_drafting(self, confidence: float) -> bool:
        return confidence >= self.threshold

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        if outcome.drafted:
            self.accepted = 0.5 * self.accepted + 0.5 * (len(outcome.path) - 1) / outcome.drafted
            step = 0.01 if self.accepted <= self.goal else -0.01
            self.threshold = min(max(0.9 * self.threshold + 0.1 * (self.threshold + step), 0.0), 1.0)


@dataclass
class AdaptiveLength(Policy):
    """ADL of DiffuSpec: follow how much the diffusion model generates before it would stop, and grow by `step` while
    the target accepts as much.

        k = clip(floor(ema_generated) + step [ema_accepted >= ema_generated], shortest, longest)

    with ema <- (1 - rho) ema + rho L, from 0; the first block is the longest.
    """

    shortest: int = 20
    longest: int = 30
    step: int = 10
    rho: float = 0.5
    nodes: int = 255  # of all paths
    length: int = field(init=False)  # k
    generated: float = field(default=0.0, init=False)  # smoothed
    accepted: float = field(default=0.0, init=False)

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
class Chunks(Fixed):
    """A diffusion drafter's block, and another behind it as long as it trusts every token (FailFast, 2512.20573)."""

    block: int = 4
    threshold: float = 0.5
    confident = True

    def budget(self) -> Budget:
        return Budget(self.nodes, self.depth, block=self.block)

    def keep_drafting(self, confidence: float) -> bool:
        return confidence >= self.threshold


@dataclass
class DynamicExit(Policy):
    """DEL. The exit layer is that of the best TPL; the length is ended by confidence, or (`by_length`) is TPL's g. What
    differs from the paper was measured (bench/LOG.md):

    A round's draft is what its exit layer would have said, so that layer is heard of every round without a second look;
    what `overhead` buys goes to the others. A layer's counts decay when it is heard of, not every round: a_l and the
    mean confidences are ratios, which a decay without news would leave as they are.

    A draft ends when the product of its confidences, not the last of them, falls below the threshold: a token is worth
    something only if all before it are right.

    A round that drafts nothing tells nothing about the layers, and a few bad rows would end drafting for long. So g = 0
    has to win by PATIENCE; else one token is drafted at least."""

    layers: tuple[int, ...]  # eligible, ascending, below `total`
    total: int  # L
    head_cost: float = 0.0  # c_head
    by_length: bool = False
    overhead: float = 0.01  # watch only rounds that keep its share of the time below this
    chosen: tuple[int, int] = field(default=(0, 0), init=False)  # (index into layers, g)
    threshold: float | None = field(default=None, init=False)
    _counts: Any = field(init=False, repr=False)  # [layers, (match, mismatch)], decayed
    _sums: Any = field(init=False, repr=False)  # of confidence, likewise
    _watching: float = field(default=0.0, init=False)  # seconds
    _last: float = field(default=0.0, init=False)  # of them, the last time
    _since: float | None = field(default=None, init=False)  # when the first round began
    _sure: float = field(default=1.0, init=False)  # product of the confidences of this round's draft

    def __post_init__(self) -> None:
        self._counts, self._sums = np.zeros((2, len(self.layers), 2))

    @property
    def confident(self) -> bool:  # type: ignore[override]
        return not self.by_length

    def budget(self) -> Budget:
        """The first round, before anything is known, drafts one token with the first eligible layer."""
        if not self._counts.any():
            self.chosen, self.threshold = (0, 1), None
        else:
            table = self.tokens_per_layer()
            table[:, 0] *= 1 - PATIENCE
            best = divmod(int(table.argmax()), table.shape[1])
            self.chosen, self.threshold = best, self._threshold(best[0])
        self._sure = 1.0
        index, g = self.chosen
        longest = LONGEST + 1 if self.threshold is not None and g else g
        watched = tuple(n for i, n in enumerate(self.layers) if i != index or not g)
        return Budget(longest, longest, self.layers[index], watched if self._affordable() else ())

    def taken(self, budget: Budget) -> None:
        """With another sequence's exit layer, that layer's own threshold ends the draft."""
        index = self.layers.index(budget.exit)
        if index != self.chosen[0]:
            self.chosen, self.threshold = (index, budget.depth), self._threshold(index)

    def expected(self, budget: Budget) -> float:
        """1 + a + .. + a^g, a the match rate of the exit layer; where confidence ends drafts, g is that of the best TPL
        of this layer."""
        index = self.layers.index(budget.exit)
        a = float(self.match_rates()[index])
        g = budget.depth if self.by_length else min(budget.depth, int(self.tokens_per_layer()[index].argmax()))
        return sum(a**i for i in range(g + 1))

    def _affordable(self) -> bool:
        """Whether watching once more, at the last price, stays within its share of the time since the first round."""
        now = time.perf_counter()
        if self._since is None:
            self._since = now
        return self._watching + self._last <= self.overhead * (now - self._since)

    def keep_drafting(self, confidence: float) -> bool:
        self._sure *= confidence
        return self.threshold is None or self._sure >= self.threshold

    def observe(self, outcome: Outcome) -> None:
        """The exit layer's own rows: the accepted tokens and the first refused one."""
        if outcome.drafted:
            heard = min(len(outcome.path), outcome.drafted)
            match = np.arange(heard) < len(outcome.path) - 1
            confidence = np.array(outcome.confidence[:heard] or np.zeros(heard))  # unused with `by_length`
            self._hear([self.chosen[0]], match[None], confidence[None])

    def learn(self, layers: tuple[int, ...], match: Any, confidence: Any, seconds: float = 0.0) -> None:
        if seconds:
            self._watching, self._last = self._watching + seconds, seconds
        self._hear([self.layers.index(n) for n in layers], match, confidence)

    def _hear(self, at: list[int], match: Any, confidence: Any) -> None:
        """match, confidence [len(at), rows], of layers by their index."""
        split = np.stack((match, ~match), axis=-1)  # [layers, rows, 2]
        self._counts[at] = DECAY * self._counts[at] + split.sum(1)
        self._sums[at] = DECAY * self._sums[at] + (split * confidence[..., None]).sum(1)

    def match_rates(self) -> Any:
        """a_l [layers]; 0 where nothing is known."""
        total = self._counts.sum(1)
        return np.divide(self._counts[:, 0], total, out=np.zeros_like(total), where=total > 0)

    def tokens_per_layer(self) -> Any:
        """TPL [layers, g = 0..17]."""
        a, g = self.match_rates()[:, None], np.arange(LONGEST + 1)
        tokens = np.where(a < 1, (1 - a ** (g + 1)) / np.where(a < 1, 1 - a, 1), g + 1.0)
        return tokens / (self.total + g * (np.array(self.layers)[:, None] + self.head_cost))

    def _threshold(self, index: int) -> float | None:
        """Between the mean confidence of a layer's matches and of its mismatches; None while it has but one kind, or
        where g is to end the draft."""
        if self.by_length or not self._counts[index].all():
            return None
        return float((self._sums[index] / self._counts[index]).mean())


def eligible_layers(total: int, head_cost: float = 0.0, count: int = ELIGIBLE) -> tuple[int, ...]:
    """At most `count` exit layers, spread over 1..total - 1. Layers whose draft step costs a whole pass are left out,
    but the first: with l + c_head >= L the TPL of drafts that are always right does not exceed 1 / L."""
    spread = sorted({round(n) for n in np.linspace(1, total - 1, min(count, total - 1))}) if total > 1 else []
    return tuple(n for n in spread if n == 1 or n + head_cost < total)
