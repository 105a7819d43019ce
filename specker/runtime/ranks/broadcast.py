"""Some ranks draft and all ranks of a replica verify. Rank 0 broadcasts the drafts once per round, with the texts'
lengths and last tokens; ranks that disagree stop with an error."""

import torch

from specker.runtime.control.policy import Budget
from specker.runtime.ranks.dist import RankLost, Ranks
from specker.runtime.round.drafter import Draft, Drafter
from specker.runtime.round.round import Round
from specker.runtime.round.state import Request

HEADER = 3  # numbers at the start of a message: size, depth, tree


class SharedDrafter(Drafter):
    """Wraps a drafter that runs on some ranks and sends its drafts to all."""

    def __init__(self, inner: Drafter | None, ranks: Ranks):
        """`inner`: the drafter; None on ranks that do not draft."""
        self.inner, self.ranks = inner, ranks
        if inner is not None:
            self.model, self.cache, self.head = inner.model, inner.cache, inner.head
        self.synchronous = True  # every rank waits for rank 0's message

    def announce(self, sequences: list[Request]) -> None:
        if self.inner is not None:
            self.inner.announce(sequences)

    def behind(self, sequences: list[Request]) -> int:
        return 0 if self.inner is None else self.inner.behind(sequences)

    def catch_up(self, r: Round, slot: int) -> int:
        return 0 if self.inner is None else self.inner.catch_up(r, slot)

    def advance(self, requests: list[Request], most: int) -> int:
        return 0 if self.inner is None else self.inner.advance(requests, most)

    def prefill(self, slot: int, text: list[int]) -> None:
        if self.inner is not None:
            self.inner.prefill(slot, text)

    def left(self, length: int) -> int:
        """Ranks that do not draft receive the size of the draft from rank 0."""
        return super().left(length) if self.inner is None else self.inner.left(length)

    def fixed(self, length: int, budget: Budget) -> bool:
        return self.inner is not None and self.inner.fixed(length, budget)

    def draft(self, r: Round) -> Draft:
        """Take rank 0's drafts. In rounds of fixed shape every rank computes the same draft and sends nothing. Raises
        RankLost if this rank's texts differ from rank 0's."""
        ranks, s, n = self.ranks, r.state, len(r.requests)
        draft = Draft() if self.inner is None else self.inner.draft(r)
        if r.fixed:
            return draft
        texts = [len(x.text) for x in r.requests] + [x.text[-1] for x in r.requests]
        most = s.parents.shape[1]
        message = torch.zeros(HEADER + n * (3 + 2 * most), dtype=torch.int64, device=ranks.device)
        if ranks.rank == 0:
            header = [draft.size, draft.depth, int(draft.tree), *texts, *(draft.count(slot) for slot in range(n))]
            message[: len(header)] = torch.tensor(header)
            body = message[HEADER + 3 * n :].view(2, n, most)
            body[0, :, : draft.size], body[1, :, : draft.size] = (
                s.window[:, 1 : draft.size + 1],
                s.parents[:, : draft.size],
            )
        received = ranks.first(message)
        size, depth, tree, *rest = received[: HEADER + 3 * n].tolist()
        if rest[: 2 * n] != texts:
            b = next(b for b in range(n) if (rest[b], rest[n + b]) != (texts[b], texts[n + b]))
            raise RankLost(
                f"the ranks' texts differ: rank {ranks.rank} has {texts[b]} tokens ending in {texts[n + b]}, "
                f"rank 0 has {rest[b]} ending in {rest[n + b]}"
            )
        if ranks.rank:
            draft.size, draft.depth, draft.tree, draft.counts = size, depth, bool(tree), rest[2 * n :]
            body = received[HEADER + 3 * n :].view(2, n, most)
            s.window[:, 1 : size + 1], s.parents[:, :size] = body[0, :, :size], body[1, :, :size]
        return draft

    def observe(self, r: Round, slot: int, path: list[int]) -> None:
        if self.inner is not None:
            self.inner.observe(r, slot, path)

    def move(self, source: int, target: int) -> None:
        if self.inner is not None:
            self.inner.move(source, target)

    def reset(self, slot: int) -> None:
        if self.inner is not None:
            self.inner.reset(slot)
