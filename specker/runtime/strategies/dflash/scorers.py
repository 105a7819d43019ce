"""What a path adds to the logits of the candidates after it: the heads of drafters of blocks as scorers of candidates,
for trees (blocks/tree.py) and for chains that choose among candidates."""

import torch
from torch import Tensor

from specker.kernels.variant import sum_dtype
from specker.model.dflash import BlockModel


class MarkovScorer:
    """A Markov head, or one whose state follows each path."""

    def __init__(self, block: BlockModel, normed: Tensor, ids: Tensor, heat: Tensor | float):
        """`normed` [n, k, H]: the block's rows that predict. `ids` [n, k, K] int64: the candidates. `heat`: the
        temperature, or [n] those of the blocks."""
        self.block, self.normed, self.ids, self.heat = block, normed, ids, heat
        markov, own = block.weights.markov, block.weights.ids
        assert markov is not None
        self.kind, self.wide = markov.kind, sum_dtype(normed.dtype)
        self.w2 = markov.w2[ids if own is None else torch.searchsorted(own, ids)].to(self.wide)  # [n, k, K, r]
        self.state: Tensor | None = None

    def table(self, roots: Tensor) -> Tensor | None:
        if self.kind in ("rnn", "gru"):
            return None
        latent = self.block.latent(_before(self.ids, roots).flatten())
        rows = _each(self.normed.flatten(0, 1), self.ids.shape[2]) if self.kind == "gated" else self.normed
        found, _ = self.block.before(latent, rows, None, 0)
        assert found is not None
        return found.view(*self.ids.shape, -1).to(self.wide) @ self.w2.mT / _over(self.heat, 4, self.wide)

    def added(self, depth: int, tokens: Tensor, up: Tensor | None) -> Tensor | None:
        (n, m), state = tokens.shape, self.state
        if state is not None and up is not None:
            state = state.gather(1, up.unsqueeze(2).expand(-1, -1, state.shape[2])).flatten(0, 1)
        latent = self.block.latent(tokens.flatten())
        found, state = self.block.before(latent, _each(self.normed[:, depth], m), state, depth)
        self.state = None if state is None else state.view(n, m, -1)
        if found is None:
            return None
        return found.view(n, m, -1).to(self.wide) @ self.w2[:, depth].mT / _over(self.heat, 3, self.wide)


class SelectorScorer:
    """DFlash2's candidate selector."""

    def __init__(self, block: BlockModel, normed: Tensor, ids: Tensor, heat: Tensor | float):
        assert block.weights.selector is not None
        self.block, self.ids, self.heat, (n, k, _) = block, ids, heat, normed.shape
        self.wide = sum_dtype(normed.dtype)
        self.projected = block.model.linear(normed.flatten(0, 1), block.weights.selector.project).view(n, k, -1)

    def table(self, roots: Tensor) -> Tensor:
        assert self.block.weights.selector is not None
        rows, after, _ = self.block.weights.selector
        asked = rows[_before(self.ids, roots)].to(self.wide) * self.projected.unsqueeze(2).to(self.wide)
        return asked @ after[self.ids].to(self.wide).mT / _over(self.heat, 4, self.wide)

    def added(self, depth: int, tokens: Tensor, up: Tensor | None) -> Tensor:
        n, m = tokens.shape
        ids, projected = (_each(x[:, depth], m) for x in (self.ids, self.projected))
        return self.block.scores(tokens.flatten(), ids, projected).view(n, m, -1) / _over(self.heat, 3, self.wide)


class TableScorer:
    """A table of each position: the logits of its candidates after each candidate of the position before (DSpine,
    LiLiCorr)."""

    def __init__(self, table: Tensor, ids: Tensor, logits: Tensor, heat: Tensor | float):
        """`table` [n, k, K, K] takes the place of the drafter's own `logits` [n, k, K]; of the first position, all rows
        are the root's."""
        self.ids, self.change = ids, (table - logits.unsqueeze(2)) / _over(heat, 4, logits.dtype)

    def table(self, roots: Tensor) -> Tensor:
        return self.change

    def added(self, depth: int, tokens: Tensor, up: Tensor | None) -> Tensor:
        change = self.change[:, depth]
        if depth == 0:
            return change[:, :1]
        candidate = (tokens.unsqueeze(2) == self.ids[:, depth - 1 : depth]).int().argmax(2, keepdim=True)
        return change.gather(1, candidate.expand(-1, -1, change.shape[2]))


def _before(ids: Tensor, roots: Tensor) -> Tensor:
    """The tokens that candidates [n, k, K] may follow [n, k, K]: the candidates before, first the `roots` [n, 1]."""
    return torch.cat((roots.unsqueeze(2).expand(-1, -1, ids.shape[2]), ids[:, :-1]), 1)


def _each(x: Tensor, m: int) -> Tensor:
    """Rows [n, W], each m times [n * m, W]."""
    return x.unsqueeze(1).expand(-1, m, -1).flatten(0, 1)


def _over(heat: Tensor | float, dims: int, dtype: torch.dtype) -> Tensor | float:
    """What scores with so many dimensions are divided by."""
    return heat.to(dtype).view(-1, *(1,) * (dims - 1)) if isinstance(heat, Tensor) else heat
