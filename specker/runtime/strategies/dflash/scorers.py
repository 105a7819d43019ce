"""What a path adds to the logits of the candidates after it, for the trees of drafters of blocks (blocks/tree.py)."""

import torch
from torch import Tensor

from specker.kernels.variant import sum_dtype
from specker.model.dflash import BlockModel
from specker.runtime.strategies.blocks.tree import Lattice, Scorer


class MarkovScorer:
    """A Markov head, or a GRU whose state follows each path."""

    def __init__(self, block: BlockModel, normed: Tensor, lattice: Lattice, heat: Tensor | float):
        """normed [n, k, H]: the block's rows that predict. `heat`: the temperature, or [n] those of the blocks."""
        self.block, self.normed, self.heat = block, normed, heat
        markov, own = block.weights.markov, block.weights.ids
        assert markov is not None
        rows = lattice.ids if own is None else torch.searchsorted(own, lattice.ids)
        self.w2 = markov.w2[rows]  # [n, k, K, r]
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

    def __init__(self, block: BlockModel, normed: Tensor, lattice: Lattice, heat: Tensor | float):
        assert block.weights.selector is not None
        self.block, self.ids, self.heat = block, lattice.ids, heat
        n, k, _ = normed.shape
        self.projected = block.model.linear(normed.flatten(0, 1), block.weights.selector.project).view(n, k, -1)

    def added(self, depth: int, tokens: Tensor, up: Tensor) -> Tensor | None:
        n, m = tokens.shape
        ids, projected = (_each(x[:, depth], m) for x in (self.ids, self.projected))
        return self.block.scores(tokens.flatten(), ids, projected).view(n, m, -1) / _over(self.heat)


def scorer(block: BlockModel, normed: Tensor, lattice: Lattice, heat: Tensor | float) -> Scorer | None:
    """The scorer of a drafter; None if its rows say everything."""
    if block.weights.selector is not None:
        return SelectorScorer(block, normed, lattice, heat)
    return None if block.weights.markov is None else MarkovScorer(block, normed, lattice, heat)


def _each(x: Tensor, m: int) -> Tensor:
    """Rows [n, W], each m times [n * m, W]."""
    return x.unsqueeze(1).expand(-1, m, -1).flatten(0, 1)


def _over(heat: Tensor | float) -> Tensor | float:
    return heat.view(-1, 1, 1) if isinstance(heat, Tensor) else heat
