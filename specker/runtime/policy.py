"""How much to draft each round: the budget, and the policies that any strategy can use. A policy from one paper is in
that paper's strategy file."""

from dataclasses import dataclass, field, replace
from typing import Any

from specker.runtime.stats import DiffusionStats

LONGEST = 17  # tokens of the longest chain that a policy chooses; drafts that confidence ends may have one more
RECENT = 0.95  # decay of a count at each round
MAX_NODES = 255  # draft tokens; a verify pass has one more row, the root


@dataclass(frozen=True)
class Budget:
    nodes: int  # maximum draft tokens
    depth: int  # maximum path length
    exit: int = 0  # layers of the target that draft; 0: another model drafts
    taps: tuple[int, ...] = ()  # depths of the target that `learn` watches this round
    block: int = 0  # tokens that a diffusion drafter guesses per pass; 0: all of `depth`

    def clip(self, nodes: int, depth: int) -> "Budget":
        """Limit the nodes and the path length."""
        return replace(self, nodes=max(0, min(self.nodes, nodes)), depth=max(0, min(self.depth, depth)))


@dataclass(frozen=True)
class Outcome:
    """The result of one sequence's draft."""

    drafted: int  # tokens
    path: list[int]  # accepted rows, row 0 (the root) first
    confidence: list[float] = field(default_factory=list)  # of each draft token; empty unless `confident`
    found: DiffusionStats | None = None  # of a diffusion drafter


class Policy:
    """Proposes how much to draft for one sequence. All sequences of a round share one shape: the proposal with the most
    expected tokens for its cost (`expected`, round.best_shape)."""

    confident: bool = False  # whether the round calls `keep_drafting` after each token of a chain
    layers: tuple[int, ...] = ()  # depths of the target that `learn` may watch
    rate: float = 0.8  # smoothed acceptance rate of the draft tokens on the path

    def budget(self) -> Budget:
        """The shape that this sequence proposes."""
        raise NotImplementedError

    def taken(self, budget: Budget) -> None:
        """Called with the round's shape, which may be another sequence's proposal."""

    def expected(self, budget: Budget) -> float:
        """Expected tokens that a round of this shape commits for this sequence: 1 + a + a^2 + .. + a^depth, with a the
        smoothed acceptance rate (arXiv 2211.17192, equation 1)."""
        return sum(self.rate**i for i in range(min(budget.depth, budget.nodes) + 1))

    def keep_drafting(self, confidence: float) -> bool:
        """Whether to draft another token after one with this probability."""
        return True

    def observe(self, outcome: Outcome) -> None:
        """Called once per round."""
        if outcome.drafted:
            right = len(outcome.path) - 1
            seen = min(right + 1, outcome.drafted)
            self.rate += min(0.1 * seen, 1.0) * (right / seen - self.rate)

    def learn(self, layers: tuple[int, ...], match: Any, confidence: Any, seconds: float = 0.0) -> None:
        """Called with what tapped layers predicted. numpy [len(layers), rows]: `match`, whether a layer's shadow token
        was the target's token, and `confidence`, its probability. `seconds`: the cost of computing them."""


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
    """Lengthen the chain by one after a fully accepted draft; shorten it by one after any other."""

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        if outcome.drafted:
            whole = len(outcome.path) > outcome.drafted
            self.depth = min(self.depth + 1, LONGEST) if whole else max(1, self.depth - 1)
            self.nodes = self.depth


@dataclass
class DraftAndVerify(Fixed):
    """Stop after a token less probable than a threshold. The threshold moves so that the share of accepted draft tokens
    approaches `goal` (arXiv 2309.08168, equations 5 and 6, with its constants)."""

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
class Worthwhile(Fixed):
    """Draft another token while it gains more tokens for its cost than the round does on average. With p_j the
    probability that the target agrees with token j if it agrees with all before, P_i = p_1 .. p_i, a the smoothed
    acceptance rate and c the cost of a token, a draft of i tokens grows while

        P_i a / c > (1 + P_1 + .. + P_i) / (1 + c i)

    p_j is the draft's own probability times the ratio of accepted to expected tokens so far."""

    cost: float = 0.1  # c: drafting and verifying one token, in steps of plain decoding
    right: float = 8.0  # accepted tokens and what the draft's probabilities promised, decayed
    promised: float = 8.0
    reach: float = 1.0  # P_i of this round
    tokens: float = 1.0  # 1 + P_1 + .. + P_i
    drafted: int = 0  # i
    confident = True

    def taken(self, budget: Budget) -> None:
        self.reach, self.tokens, self.drafted = 1.0, 1.0, 0

    def keep_drafting(self, confidence: float) -> bool:
        self.reach *= min(1.0, confidence * self.right / self.promised)
        self.tokens += self.reach
        self.drafted += 1
        return self.reach * self.rate * (1 + self.cost * self.drafted) > self.cost * self.tokens

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        if outcome.confidence:
            right = len(outcome.path) - 1
            compared = outcome.confidence[: right + 1]  # the tokens after a wrong one are not compared
            self.right = RECENT * self.right + right
            self.promised = RECENT * self.promised + sum(compared)


GENERAL: dict[str, type[Fixed]] = {  # the policies that suit any strategy
    "fixed": Fixed,
    "plus-minus-one": PlusMinusOne,
    "draft-and-verify": DraftAndVerify,
    "worthwhile": Worthwhile,
}
CONFIDENT = tuple(name for name, policy in GENERAL.items() if policy.confident)


def general(rule: str, size: Budget, exit: int = 0, cost: float = 0.0) -> Policy:
    """A fresh policy of GENERAL that starts from `size`. `cost`: of drafting and verifying one token, in steps of plain
    decoding."""
    if rule == "worthwhile":
        return Worthwhile(size.nodes, size.depth, exit, cost)
    return GENERAL[rule](size.nodes, size.depth, exit)
