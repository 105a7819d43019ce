"""Hold a round to the grammars of its requests.

After each row of a round, the logits of the tokens that the grammar refuses there become -inf before the target's token
is drawn. That depends on the row's text alone, so a round commits exactly what plain decoding commits under the same
grammar, whatever was drafted.

A chain takes forced tokens in place of what the drafter guessed, and a round that begins with one needs no drafter.
Elsewhere a chain ends before the first token that the grammar refuses. A tree stays as it is, since the target refuses
such nodes, unless its first token is forced.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from specker.runtime.round.batch import Batch
from specker.runtime.round.drafter import Draft


def constrain(batch: Batch, draft: Draft, most: int) -> Tensor | None:
    """Edit a draft as the grammars of its requests demand. `most`: rows of the longest path that the target allows.
    Returns the bits of the tokens that may follow each row, [rows, W] int32; None if no request has a grammar."""
    guides = [request.guide for request in batch.requests]
    words = max((guide.words for guide in guides if guide is not None), default=0)
    if not words:
        return None
    (_constrain_trees if draft.tree else _constrain_chains)(batch, draft, most)
    N = draft.size
    tokens = batch.window[:, 1 : N + 1].tolist()
    parents = batch.state.parents[:, :N].tolist() if draft.tree else [range(N)] * batch.n
    allowed: Any = np.full((batch.n, N + 1, words), -1, np.int32)
    for slot, guide in enumerate(guides):
        if guide is not None:
            guide.walk(tokens[slot], parents[slot], allowed[slot])
    return torch.from_numpy(allowed).flatten(0, 1).to(batch.window.device)


def _constrain_chains(batch: Batch, draft: Draft, longest: int) -> None:
    """Cut each chain before the first token that its grammar refuses, and put in what it forces. The rows of a chain
    that the target drafted have run its first layers already, so such a chain is only cut."""
    columns = min(batch.window.shape[1] - 1, longest)
    forces = batch.requests[0].speculates and draft.resume is None
    before = batch.window[:, 1 : draft.size + 1].tolist()
    chains = []
    for slot, (request, chain) in enumerate(zip(batch.requests, before, strict=True)):
        constrained = chain[: draft.count(slot)]
        kept = len(constrained)
        if request.guide is not None:
            most = min(columns, request.limit - len(request.token_ids) - 1) if forces else draft.size
            constrained, kept = request.guide.constrain(constrained, most, forces)
        draft.constrain(slot, kept, len(constrained) - kept)
        chains.append(constrained)
    draft.size = size = max(map(len, chains))
    padded = [chain + [0] * (size - len(chain)) for chain in chains]
    if padded != before:
        batch.window[:, 1 : size + 1] = torch.tensor(padded, dtype=torch.int64, device=batch.window.device).view(
            batch.n, size
        )
        draft.scores = []
    if draft.resume is not None:
        draft.resume = draft.resume.first(size)


def _constrain_trees(batch: Batch, draft: Draft, longest: int) -> None:
    """Put the chain of its forced tokens in the place of each tree whose first token is forced. Its padding hangs under
    the root."""
    size = draft.size
    for slot, request in enumerate(batch.requests):
        if request.guide is not None and request.guide.forced:
            most = min(size, longest, request.limit - len(request.token_ids) - 1)
            chain, _ = request.guide.constrain([], most, True)
            draft.constrain(slot, 0, len(chain))
            padding = [0] * (size - len(chain))
            numbers = [chain + padding, [*range(len(chain)), *padding]]
            tokens, parents = torch.tensor(numbers, dtype=torch.int64, device="cpu")
            batch.window[slot, 1 : size + 1], batch.state.parents[slot, :size] = tokens, parents


def masked(logits: Tensor, allowed: Tensor) -> Tensor:
    """A copy of logits [rows, V] with -inf where the bits [rows, W] int32 are 0."""
    bits = torch.arange(32, dtype=torch.int32, device=allowed.device)
    refused = (allowed.unsqueeze(-1) >> bits & 1) == 0
    return logits.masked_fill(refused.flatten(1)[:, : logits.shape[1]], float("-inf"))
