"""Some ranks draft and all ranks of a replica verify. Rank 0 broadcasts the drafts once per round, with the texts'
lengths and last tokens; ranks that disagree stop with an error."""

import torch

from specker.runtime.ranks.dist import RankLost, Ranks
from specker.runtime.round.batch import Batch
from specker.runtime.round.drafter import Draft, Drafter, Wrapper

HEADER = 3  # numbers at the start of a message: size, depth, tree


class SharedDrafter(Wrapper):
    """Wraps a drafter that runs on some ranks and sends its drafts to all."""

    def __init__(self, inner: Drafter | None, ranks: Ranks):
        """`inner`: the drafter; None on ranks that do not draft."""
        super().__init__(inner or Drafter())
        self.ranks, self.synchronous = ranks, True  # every rank waits for rank 0's message

    def propose(self, batch: Batch) -> Draft:
        """Take rank 0's drafts. In rounds of fixed shape every rank computes the same draft and sends nothing. Raises
        RankLost if this rank's texts differ from rank 0's."""
        ranks, s, n = self.ranks, batch.state, len(batch.requests)
        draft = self.inner.propose(batch) if ranks.drafts else Draft()
        if batch.fixed:
            return draft
        texts = [len(x.token_ids) for x in batch.requests] + [x.token_ids[-1] for x in batch.requests]
        most = s.parents.shape[1]
        message = torch.zeros(HEADER + n * (3 + 2 * most), dtype=torch.int64, device=ranks.device)
        if ranks.rank == 0:
            header = [draft.size, draft.depth, int(draft.tree), *texts, *(draft.count(slot) for slot in range(n))]
            message[: len(header)] = torch.tensor(header, dtype=torch.int64, device="cpu")
            body = message[HEADER + 3 * n :].view(2, n, most)
            body[0, :, : draft.size], body[1, :, : draft.size] = (
                s.window[:, 1 : draft.size + 1],
                s.parents[:, : draft.size],
            )
        received = ranks.first(message)
        size, depth, tree, *rest = ranks.numbers(received[: HEADER + 3 * n])
        if rest[: 2 * n] != texts:
            b = next(b for b in range(n) if (rest[b], rest[n + b]) != (texts[b], texts[n + b]))
            raise RankLost(
                f"the ranks' texts differ: rank {ranks.rank} has {texts[b]} tokens ending in {texts[n + b]}, "
                f"rank 0 has {rest[b]} ending in {rest[n + b]}"
            )
        if ranks.rank:
            draft.size, draft.depth, draft.tree, draft.draft_lengths = size, depth, bool(tree), rest[2 * n :]
            body = received[HEADER + 3 * n :].view(2, n, most)
            s.window[:, 1 : size + 1], s.parents[:, :size] = body[0, :, :size], body[1, :, :size]
        return draft
