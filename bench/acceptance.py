"""A made-up acceptance: the target agrees with each token of a draft chain with probability p, whatever the models say.

Benches of shapes have random weights, whose drafts are almost never right. `made_up` patches the one function of a
round that gives the target's tokens. The row at position i agrees iff u(seed, i) < p, with u uniform and independent
(Philox, on another stream than the sampling noise), so a round with a chain of k commits (1 - p^(k+1)) / (1 - p) tokens
on average. The rest of the round is unchanged; the text is meaningless.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from specker.kernels.noise import MASK, STREAM, philox4x32
from specker.model.decoder import Model
from specker.runtime.round import round as stage

COINS = STREAM + 1  # the fourth counter word


def coins(p: float, seed: int, count: int) -> Tensor:
    """Whether the row at each position 0..count-1 agrees: [count] bool on the CPU. It depends only on p, seed and
    position, and a larger p agrees at a superset of positions."""
    positions = torch.arange(count, dtype=torch.int64, device="cpu")
    words = philox4x32(torch.zeros_like(positions), positions & MASK, positions >> 32, COINS, seed)[0]
    return words < p * 2.0**32


def agreeing(target: Tensor, drafts: Tensor, agrees: Tensor) -> Tensor:
    """The target's tokens [n, N + 1] int64, where each row before a draft token [n, N] takes it if `agrees` [n, N], and
    else another one."""
    other = torch.where(target[:, :-1] == drafts, (drafts == 0).long(), target[:, :-1])
    return torch.cat((torch.where(agrees, drafts, other), target[:, -1:]), 1)


@contextmanager
def made_up(p: float, device: str | torch.device, columns: int, seed: int = 0) -> Iterator[None]:
    """Context manager in which every round agrees with its chains like this, in texts of up to `columns` tokens. CUDA
    graphs that were captured inside must be replayed inside."""
    own, table = stage.target_tokens, coins(p, seed, columns).to(device)

    def tokens(r: stage.Round, model: Model) -> Tensor:
        if r.draft.tree or r.places is not None:
            raise ValueError("a made-up acceptance is for chains of one length")
        n, N, memory = r.batch.n, r.draft.size, r.batch.memory
        positions = memory.get("positions", r.rows)
        if r.drawn:
            target = memory.get("target", r.rows)
        else:
            target = model.draw(r.batch.draws, memory.get("logits", r.rows), positions)
        agrees = table[positions.view(n, N + 1)[:, :N]]
        return agreeing(target.view(n, N + 1), r.batch.state.window[:, 1 : N + 1], agrees).view(-1)

    stage.target_tokens = tokens
    try:
        yield
    finally:
        stage.target_tokens = own
