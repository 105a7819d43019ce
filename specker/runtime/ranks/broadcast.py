"""Some ranks draft and all ranks of a replica verify. Rank 0 broadcasts the drafts once per round, with the texts'
lengths and last tokens; ranks that disagree stop with an error."""

import torch

from specker.runtime.ranks.dist import RankLost, Ranks
from specker.runtime.round.batch import Batch
from specker.runtime.round.drafter import Draft, Drafter

HEADER = 3  # numbers at the start of a message: size, depth, tree


class Silent(Drafter):
    """The drafter of a rank that takes its drafts from rank 0."""

    def propose(self, batch: Batch) -> Draft:
        return Draft()


def share(ranks: Ranks, batch: Batch, draft: Draft) -> Draft:
    """Take rank 0's drafts; `draft` is this rank's own. In rounds of fixed shape every rank computes the same draft
    and sends nothing. Raises RankLost if this rank's texts differ from rank 0's."""
    s, n = batch.state, len(batch.requests)
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
