"""How much to draft each round: the budget, and the policies that any strategy can use. Policies of one paper stand in
its strategy's file."""

from dataclasses import dataclass, field, replace
from typing import Any

from specker.runtime.stats import DiffusionStats

LONGEST = 17  # tokens of the longest chain that a policy chooses; a draft that confidence ends may be one longer
MAX_NODES = 255  # of a draft: with the root, the window of a verify pass


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
    found: DiffusionStats | None = None  # of a diffusion drafter


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


GENERAL: dict[str, type[Fixed]] = {  # the policies that suit any strategy; made from nodes, depth and exit
    "fixed": Fixed,
    "plus-minus-one": PlusMinusOne,
    "draft-and-verify": DraftAndVerify,
}
