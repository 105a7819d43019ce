"""What a path adds to the logits of the candidates after it: the heads of drafters of blocks as scorers of candidates,
for trees (blocks/tree.py) and for chains that choose among candidates."""

import torch
from torch import Tensor

from specker.kernels.variant import sum_dtype
from specker.model.dflash import BlockModel


class MarkovScorer:
    """A Markov head, or a GRU whose state follows each path."""

    def __init__(self, block: BlockModel, normed: Tensor, ids: Tensor, heat: Tensor | float):
        """`normed` [n, k, H]: the block's rows that predict. `ids` [n, k, K] int64: the candidates. `heat`: the
        temperature, or [n] those of the blocks."""
        self.block, self.normed, self.heat = block, normed, heat
        markov, own = block.weights.markov, block.weights.ids
        assert markov is not None
        self.w2 = markov.w2[ids if own is None else torch.searchsorted(own, ids)]  # [n, k, K, r]
        self.state: Tensor | None = None

    def added(self, depth: int, tokens: Tensor, up: Tensor) -> Tensor | None:
        (n, m), state = tokens.shape, self.state
        if state is not None:
            state = state.gather(1, up.unsqueeze(2).expand(-1, -1, state.shape[2])).flatten(0, 1)
        latent = self.block.latent(tokens.flatten())
        found, state = self.block.before(latent, _each(self.normed[:, depth], m), state, depth)
        self.state = None if state is None else state.view(n, m, -1)
        if found is None:
            return None
        wide = sum_dtype(found.dtype)
        return found.view(n, m, -1).to(wide) @ self.w2[:, depth].to(wide).transpose(1, 2) / _over(self.heat)


class SelectorScorer:
    """DFlash2's candidate selector."""

    def __init__(self, block: BlockModel, normed: Tensor, ids: Tensor, heat: Tensor | float):
        assert block.weights.selector is not None
        self.block, self.ids, self.heat = block, ids, heat
        n, k, _ = normed.shape
        self.projected = block.model.linear(normed.flatten(0, 1), block.weights.selector.project).view(n, k, -1)

    def added(self, depth: int, tokens: Tensor, up: Tensor) -> Tensor | None:
        n, m = tokens.shape
        ids, projected = (_each(x[:, depth], m) for x in (self.ids, self.projected))
        return self.block.scores(tokens.flatten(), ids, projected).view(n, m, -1) / _over(self.heat)


class TableScorer:
    """A table of each position: the logits of its candidates after each candidate of the position before (DSpine,
    LiLiCorr)."""

    def __init__(self, table: Tensor, ids: Tensor, logits: Tensor, heat: Tensor | float):
        """`table` [n, k, K, K] takes the place of the drafter's own `logits` [n, k, K]; of the first position, all rows
        are the root's."""
        self.ids = ids
        change = table - logits.unsqueeze(2)
        self.change = change / (heat.view(-1, 1, 1, 1) if isinstance(heat, Tensor) else heat)

    def added(self, depth: int, tokens: Tensor, up: Tensor) -> Tensor | None:
        change = self.change[:, depth]
        if depth == 0:
            return change[:, :1]
        candidate = (tokens.unsqueeze(2) == self.ids[:, depth - 1 : depth]).int().argmax(2, keepdim=True)
        return change.gather(1, candidate.expand(-1, -1, change.shape[2]))


def _each(x: Tensor, m: int) -> Tensor:
    """Rows [n, W], each m times [n * m, W]."""
    return x.unsqueeze(1).expand(-1, m, -1).flatten(0, 1)


def _over(heat: Tensor | float) -> Tensor | float:
    return heat.view(-1, 1, 1) if isinstance(heat, Tensor) else heat
