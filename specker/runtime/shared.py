"""Drafts of one or some ranks, which all ranks of a replica verify. Rank 0 broadcasts the drafts once a round, with the
texts' lengths and last tokens, so that ranks that have come apart end with a message."""

import torch
from torch import Tensor

from specker.runtime.dist import RankLost, Ranks
from specker.runtime.draft import Drafter
from specker.runtime.policy import Budget
from specker.runtime.round import Round
from specker.runtime.sampling import Draws

HEADER = 3  # numbers of a message before those of each sequence


class SharedDrafter(Drafter):
    """A drafter of some ranks, whose drafts all of them verify."""

    def __init__(self, inner: Drafter | None, ranks: Ranks):
        """`inner`: None on ranks that do not draft."""
        self.inner, self.ranks = inner, ranks
        if inner is not None:
            self.model, self.cache, self.head = inner.model, inner.cache, inner.head
        self.reads = True  # the word of rank 0

    def prefill(self, slot: int, text: list[int]) -> None:
        if self.inner is not None:
            self.inner.prefill(slot, text)

    def room(self, length: int) -> int:
        """Ranks that do not draft hear from rank 0 how much was drafted."""
        return super().room(length) if self.inner is None else self.inner.room(length)

    def fixed(self, length: int, budget: Budget) -> bool:
        return self.inner is not None and self.inner.fixed(length, budget)

    def draft(self, r: Round) -> None:
        """Rank 0's drafts. In rounds of fixed shape every rank drafts, the same, and nothing is said."""
        ranks, s, n = self.ranks, r.state, len(r.sequences)
        if self.inner is not None:
            self.inner.draft(r)
        if r.fixed:
            return
        texts = [len(x.text) for x in r.sequences] + [x.text[-1] for x in r.sequences]
        most = s.parents.shape[1]
        message = torch.zeros(HEADER + n * (3 + 2 * most), dtype=torch.int64, device=ranks.device)
        if ranks.rank == 0:
            header = [r.size, r.depth, int(r.tree), *texts, *(r.drafted or [r.size] * n)]
            message[: len(header)] = torch.tensor(header)
            body = message[HEADER + 3 * n :].view(2, n, most)
            body[0, :, : r.size], body[1, :, : r.size] = s.window[:, 1 : r.size + 1], s.parents[:, : r.size]
        said = ranks.first(message)
        size, depth, tree, *rest = said[: HEADER + 3 * n].tolist()
        if rest[: 2 * n] != texts:
            b = next(b for b in range(n) if (rest[b], rest[n + b]) != (texts[b], texts[n + b]))
            raise RankLost(
                f"the ranks have come apart: rank {ranks.rank} has {texts[b]} tokens ending in {texts[n + b]}, "
                f"rank 0 has {rest[b]} ending in {rest[n + b]}"
            )
        if ranks.rank:
            r.size, r.depth, r.tree, r.drafted = size, depth, bool(tree), rest[2 * n :]
            body = said[HEADER + 3 * n :].view(2, n, most)
            s.window[:, 1 : size + 1], s.parents[:, :size] = body[0, :, :size], body[1, :, :size]

    def observe(self, r: Round, slot: int, path: list[int]) -> None:
        if self.inner is not None:
            self.inner.observe(r, slot, path)

    def watch(self, taps: dict[int, Tensor], draws: Draws, target: Tensor, positions: Tensor) -> tuple:
        assert self.inner is not None
        return self.inner.watch(taps, draws, target, positions)

    def move(self, source: int, target: int) -> None:
        if self.inner is not None:
            self.inner.move(source, target)

    def reset(self, slot: int) -> None:
        if self.inner is not None:
            self.inner.reset(slot)
