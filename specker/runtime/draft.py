"""A draft: a tree of guesses under the root. A chain, a tree and a trie of lattice paths are all this one type."""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from specker.runtime.stats import DiffusionStats


@dataclass(frozen=True)
class Resume:
    """Where verification goes on from a self-drafted chain: layers [0, layer) have run on all rows but the last."""

    layer: int
    hidden: Tensor  # [N, E], rows 0..N-1 of the residual stream entering `layer`
    taps: dict[int, Tensor]  # the same rows after fewer layers, where they are watched


@dataclass(frozen=True)
class Draft:
    """N drafted tokens. Draft n is verify row n + 1; row 0 is the root (the last committed token)."""

    tokens: Tensor  # [N] int64, ids of the target's vocabulary
    parents: Tensor  # [N] int64: the ROW of draft n's parent; 0 = root, parents[n] <= n
    is_chain: bool = False  # parents == 0..N-1
    resume: Resume | None = None
    confidence: tuple[float, ...] = ()  # of each token, where a policy asked for it
    found: DiffusionStats | None = None  # of a diffusion drafter

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @classmethod
    def chain(cls, tokens: Tensor, resume: Resume | None = None, confidence: tuple[float, ...] = ()) -> "Draft":
        return cls(tokens, _arange(len(tokens), tokens.device), True, resume, confidence)

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> "Draft":
        return cls.chain(torch.empty(0, dtype=torch.int64, device=device))

    def with_found(self, found: DiffusionStats) -> "Draft":
        return replace(self, found=found)

    def depths(self) -> list[int]:
        """Of rows 0..N: the root's is 0, its children's 1."""
        depths = [0]
        for parent in self.parents.tolist():
            depths.append(depths[parent] + 1)
        return depths

    def depth(self) -> int:
        """The longest path's."""
        return len(self) if self.is_chain else max(self.depths())


def top_nodes(draft: Draft, scores: Tensor, count: int) -> tuple[Draft, Tensor]:
    """The `count` best nodes of a tree whose scores [N] never grow from parent to child, and their numbers in it;
    earlier nodes win ties, so the kept ones are a tree again."""
    if len(draft) <= count:
        return draft, torch.arange(len(draft), device=scores.device)
    order = torch.sort(scores, descending=True, stable=True).indices[:count]
    kept = order.sort().values
    row_of = torch.zeros(len(draft) + 1, dtype=torch.int64, device=kept.device)
    row_of[kept + 1] = torch.arange(1, count + 1, device=kept.device)
    return Draft(draft.tokens[kept], row_of[draft.parents[kept]]), kept


@lru_cache(maxsize=256)
def _arange(length: int, device: torch.device) -> Tensor:
    return torch.arange(length, device=device)
