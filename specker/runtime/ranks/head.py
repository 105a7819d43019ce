"""The LM head of a draft that ranks split (`--draft-layout tensor` and `both`): each ranks the candidates of its own
rows, and one gather finds the best of all."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from specker.cpu.communicator import Communicator
from specker.model.decoder import Final
from specker.model.sampling import Draws
from specker.runtime.ranks.dist import Ranks
from specker.runtime.round.lm_head import LMHead


@dataclass
class SplitHead(LMHead):
    """The rows of one rank; `ranked` and `best` return the candidates of all rows, the same on every rank."""

    ranks: Ranks = field(kw_only=True)  # those that draft
    first: int = field(kw_only=True)  # the id of the first row

    def __post_init__(self) -> None:
        last = self.first + self.weight.shape[0]
        self.token_ids = torch.arange(self.first, last, dtype=torch.int64, device=self.norm.device)

    @property
    def communicator(self) -> Communicator | None:
        return self.ranks.communicator

    def _topk(
        self, final: Final, k: int, draws: Draws, positions: Tensor, with_lse: bool = True, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        own = min(k, self.weight.shape[0])
        ids, values, lse = super()._topk(final, own, draws, positions, with_lse)
        # Ids are below 2^24, so float32 holds them.
        sent = [F.pad(values, (0, k - own), value=float("-inf")), F.pad(ids, (0, k - own)).to(values.dtype)]
        every = self.ranks.gather(torch.cat((*sent, *([lse.unsqueeze(1)] if with_lse else [])), 1))
        values, ids = (x.transpose(0, 1).flatten(1) for x in (every[..., :k], every[..., k : 2 * k]))
        # Ids ascend from rank to rank, so a stable sort orders ties by id.
        values, order = values.sort(dim=-1, descending=True, stable=True)
        ids = ids.gather(1, order[:, :k]).long()
        lse = every[..., 2 * k].logsumexp(0) if with_lse else lse
        return (ids if out is None else out.copy_(ids)), values[:, :k], lse
