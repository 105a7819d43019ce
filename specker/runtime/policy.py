"""How much to draft each round: the budget, and the policies that any strategy can use. Policies of one paper stand in
its strategy's file."""

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from specker.runtime.draft import Draft

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


class Policy(Protocol):
    layers: tuple[int, ...]  # depths of the target that it may ever want to hear of; () for most

    @property
    def confident(self) -> bool:
        """Whether `keep_drafting` is to be asked after each token of a chain."""

    def budget(self) -> Budget: ...

    def keep_drafting(self, confidence: float) -> bool:
        """After a draft token of this probability among all: draft another?"""

    def observe(self, draft: Draft, path: list[int]) -> None:
        """What became of the round's draft: `path` are the rows kept, row 0 first."""

    def learn(self, layers: tuple[int, ...], match: Any, confidence: Any, seconds: float = 0.0) -> None:
        """numpy [len(layers), rows]: whether each layer's shadow token was the target's, and its probability; `seconds`
        is what it took to find out."""


@dataclass
class Fixed:
    """The same budget every round."""

    nodes: int
    depth: int
    exit: int = 0
    confident: bool = field(default=False, init=False)
    layers: tuple[int, ...] = field(default=(), init=False)

    def budget(self) -> Budget:
        return Budget(self.nodes, self.depth, self.exit)

    def keep_drafting(self, confidence: float) -> bool:
        return True

    def observe(self, draft: Draft, path: list[int]) -> None:
        pass

    def learn(self, layers: tuple[int, ...], match: Any, confidence: Any, seconds: float = 0.0) -> None:
        pass


@dataclass
class PlusMinusOne(Fixed):
    """A chain one longer after a wholly accepted draft, one shorter after any other."""

    def observe(self, draft: Draft, path: list[int]) -> None:
        if len(draft):
            self.depth = min(self.depth + 1, LONGEST) if len(path) > len(draft) else max(1, self.depth - 1)
            self.nodes = self.depth


@dataclass
class DraftAndVerify(Fixed):
    """Stop after a token less probable than a threshold, which is moved towards `goal` accepted of those drafted
    (arXiv 2309.08168, equations 5 and 6, with its constants)."""

    threshold: float = 0.6
    goal: float = 0.9
    accepted: float = 0.9  # smoothed share

    def __post_init__(self) -> None:
        self.confident = True

    def keep_drafting(self, confidence: float) -> bool:
        return confidence >= self.threshold

    def observe(self, draft: Draft, path: list[int]) -> None:
        if len(draft):
            self.accepted = 0.5 * self.accepted + 0.5 * (len(path) - 1) / len(draft)
            step = 0.01 if self.accepted <= self.goal else -0.01
            self.threshold = min(max(0.9 * self.threshold + 0.1 * (self.threshold + step), 0.0), 1.0)


GENERAL: dict[str, type[Fixed]] = {  # the policies that suit any strategy; made from nodes, depth and exit
    "fixed": Fixed,
    "plus-minus-one": PlusMinusOne,
    "draft-and-verify": DraftAndVerify,
}
