"""What a round asks of a drafter.

A draft is a tree of guesses under the root: draft j stands in row j + 1 of the window and its parent in row
parents[j] <= j, row 0 being the root. A chain, a tree and a trie of paths are all of this form.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specker.runtime.head import Head
from specker.runtime.model.cache import KVCache
from specker.runtime.model.decoder import Model
from specker.runtime.sampling import Draws

if TYPE_CHECKING:
    from specker.runtime.policy import Budget
    from specker.runtime.round import Round


class Drafter:
    """The whole protocol; the defaults are those of a drafter without a model."""

    model: Model | None = None
    cache: KVCache | None = None  # the target's own where the target drafts; None without a model
    head: Head | None = None
    reads: bool = False
    """Whether `draft` reads device memory or the text on the host. If so, a round is launched only after the round
    before it was collected."""

    def prefill(self, slot: int, text: list[int]) -> None:
        """Before a sequence's first round: `text` is its prompt."""

    def room(self, length: int) -> int:
        """Draft tokens that may follow a text of `length` tokens; at most 0 where this drafter's context ends."""
        return 1 << 30

    def fixed(self, length: int, budget: "Budget") -> bool:
        """Whether a draft for a text of `length` can have fixed shapes and be placed by the device."""
        return False

    def draft(self, r: "Round") -> None:
        """Write the drafts to r.window[:, 1:], of a tree r.state.parents too, and set r.size, r.drafted and r.tree."""
        raise NotImplementedError

    def observe(self, r: "Round", slot: int, path: list[int]) -> None:
        """`path`: the rows kept of the sequence in `slot`, whose text holds their tokens by now."""

    def watch(self, taps: dict[int, Tensor], draws: Draws, target: Tensor, positions: Tensor) -> tuple:
        """What each tapped layer would have said: (match, confidence), numpy [layers, rows]. Only for drafters whose
        policies ask for taps."""
        raise NotImplementedError

    def move(self, source: int, target: int) -> None:
        """The sequence in slot `source` moves to slot `target`; its K/V has moved."""

    def reset(self, slot: int) -> None:
        """Forget the sequence in `slot`; its K/V is gone."""


def top_nodes(tokens: Tensor, parents: Tensor, scores: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` best nodes of each tree: tokens, parents, scores [n, N], scores never growing from parent to child ->
    tokens and parents [n, count] and the kept nodes' numbers [n, count]. Earlier nodes win ties, so that the kept nodes
    are a tree again."""
    n, N = tokens.shape
    if count >= N:
        return tokens, parents, torch.arange(N, device=tokens.device).expand(n, N)
    order = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :count]
    kept = order.sort(1).values
    numbers = torch.arange(1, count + 1, device=kept.device).expand(n, count)
    row_of = torch.zeros(n, N + 1, dtype=torch.int64, device=kept.device).scatter_(1, kept + 1, numbers)
    return tokens.gather(1, kept), row_of.gather(1, parents.gather(1, kept)), kept
