"""How much to draft each round."""

from dataclasses import dataclass
from typing import Protocol

from specker.runtime.draft import Draft


@dataclass(frozen=True)
class Budget:
    nodes: int  # draft tokens at most
    depth: int  # longest path at most

    def clip(self, depth: int) -> "Budget":
        """No path longer than `depth`."""
        return Budget(self.nodes, max(0, min(self.depth, depth)))


class Policy(Protocol):
    def budget(self) -> Budget: ...

    def observe(self, draft: Draft, path: list[int]) -> None:
        """What became of the round's draft: `path` are the rows kept, row 0 first."""


@dataclass(frozen=True)
class Fixed:
    """The same budget every round."""

    nodes: int
    depth: int

    def budget(self) -> Budget:
        return Budget(self.nodes, self.depth)

    def observe(self, draft: Draft, path: list[int]) -> None:
        pass
