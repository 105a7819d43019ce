"""What makes each token of a block know those before it, for training: DSpark's Markov head and Domino's GRU, whose
equations stand in specker/model/dflash.py. Both begin without any effect."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PLAIN = 1  # the first tokens of Domino's drafts, which get no bias: the block has read the root


class Markov(nn.Module):
    """DSpark's head of kind vanilla and rank r: w1 [V, r] and w2 [V, r]."""

    def __init__(self, embed: Tensor, rank: int):
        """embed [V, H]: the target's. w1 starts as the r directions in which its rows differ most."""
        super().__init__()
        wide = embed.double()
        _, found = torch.linalg.eigh(wide.T @ wide)
        first = wide @ found[:, -rank:]
        self.w1 = nn.Parameter((first / first.std()).to(embed.dtype))
        self.w2 = nn.Parameter(embed.new_zeros(len(embed), rank))

    def forward(self, before: Tensor, normed: Tensor, embed: Tensor) -> Tensor:
        """b [.., k, r] of blocks of k draft tokens. before [.., k] int64: the token before each one, the root's at
        first; normed [.., k, H]: the block's rows that predict; embed [V, H]."""
        return F.embedding(before, self.w1)


class Gru(nn.Module):
    """Domino's head of rank r: a GRU of as many values, its matrices entering [3 r, H], recurrent [3 r, r] and joint
    [r, H + r], and w2 [V, r]."""

    entering: Tensor
    recurrent: Tensor
    joint: Tensor

    def __init__(self, embed: Tensor, rank: int):
        super().__init__()
        H = embed.shape[1]
        for name, rows, columns in (
            ("entering", 3 * rank, H),
            ("recurrent", 3 * rank, rank),
            ("joint", rank, H + rank),
        ):
            setattr(self, name, nn.Parameter(embed.new_empty(rows, columns).normal_(std=columns**-0.5)))
        self.w2 = nn.Parameter(embed.new_zeros(len(embed), rank))

    def forward(self, before: Tensor, normed: Tensor, embed: Tensor) -> Tensor:
        """As `Markov.forward`."""
        k = before.shape[-1]
        x = F.linear(F.embedding(before, embed), self.entering).flatten(0, -3)  # [.., k, 3 r]
        state, states = x.new_zeros(len(x), self.recurrent.shape[1]), []
        for step in range(k):
            into, over = x[:, step].chunk(3, -1), F.linear(state, self.recurrent).to(x.dtype).chunk(3, -1)
            reset, keep = torch.sigmoid(into[0] + over[0]), torch.sigmoid(into[1] + over[1])
            state = (1 - keep) * torch.tanh(into[2] + reset * over[2]) + keep * state
            states.append(state)
        read = torch.cat([normed, torch.stack(states, 1).view(*before.shape, -1).to(normed.dtype)], -1)
        found = F.silu(F.linear(read, self.joint))
        return found * (torch.arange(k, device=found.device) >= PLAIN)[:, None]


HEADS = {"dspark": Markov, "domino": Gru}
