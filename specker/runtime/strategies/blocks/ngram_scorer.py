"""Score the candidates of blocks by an n-gram model, on the device: CPS of DiffuSpec (arXiv 2510.02358).

A token's score after a path is

    z(token) = lambda log p_drafter(token) + (1 - lambda) log p_ngram(token | two before) + g(token)

where lambda is 1 at the first position: there the drafter sees the whole text, an n-gram model only two tokens. (The
paper uses one lambda for all positions, as `both` does; bench/LOG.md compares them.) From the second position on, the
n-gram model knows the previous token and the drafter does not. g is the noise of the target's draw at that position (0
when greedy), so a path is the likeliest *draw*; at temperature T the target draws from p^(1 / T), so the n-gram model's
share is divided by T.
"""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from specker.kernels.round.lattice import Lattice
from specker.runtime.round.batch import Batch
from specker.runtime.strategies.blocks.ngram import NGram


class Tables(NamedTuple):
    """An `NGram` on a device. Keys ascend and end with a sentinel, so that a look-up needs no bounds check."""

    vocab_size: int  # V
    unigrams: Tensor  # [V] log p1
    back_off: Tensor  # [V] log b(v)
    bigrams: tuple[Tensor, Tensor]  # keys v V + w, log p2
    contexts: tuple[Tensor, Tensor]  # keys u V + v, log b(u v)
    trigrams: tuple[Tensor, Tensor]  # keys (u V + v) V + w, log p3

    @classmethod
    def of(cls, model: NGram, device: torch.device) -> Self:
        def moved(array: Any) -> Tensor:
            return torch.from_numpy(array).to(device)

        two, contexts, three = ((moved(x), moved(y)) for x, y in (model.two, model.contexts, model.three))
        return cls(model.vocab_size, moved(model.unigrams), moved(model.back_off), two, contexts, three)

    def log_p(self, before: Tensor, last: Tensor, ids: Tensor) -> Tensor:
        """log p(id | before last) [n, m, K] float32: `before` and `last` [n, m] int64, ids [n, K] int64. `before` is -1
        where the text begins with `last`."""
        V, u, v, w = self.vocab_size, before.unsqueeze(2), last.unsqueeze(2), ids.unsqueeze(1)
        p2, listed = _find(self.bigrams, v * V + w)
        lower = torch.where(listed, p2, self.unigrams[w] + self.back_off[v])
        b, known = _find(self.contexts, torch.where(u < 0, -1, u * V + v))
        p3, listed = _find(self.trigrams, torch.where(known, (u * V + v) * V + w, -1))
        return torch.where(listed, p3, torch.where(known, lower + b, lower))


class NGramScorer:
    """The path search's n-gram model, for drafters whose tokens are guessed independently of each other."""

    def __init__(self, batch: Batch, found: Lattice, positions: Tensor, tables: Tables, weight: float, both: bool):
        """`positions` [n * k]: after which the target draws the candidates. `weight`: lambda from the second position
        on, and with `both` at the first one."""
        self.ids, self.tables, self.share, self.both = found.ids, tables, 1 - weight, both
        heat = batch.draws.heat()
        self.heat = heat.to(found.log_p.dtype).view(-1, 1, 1) if isinstance(heat, Tensor) else heat
        noise = batch.draws.gumbel(positions, found.ids.flatten(0, 1))
        own = found.log_p if noise is None else found.log_p - noise.view(found.ids.shape)
        self.own = own.masked_fill(found.log_p.isneginf(), 0.0)  # log p_drafter
        self.last = batch.before_root()  # tokens of the level before

    def table(self, roots: Tensor) -> None:
        """It depends on two tokens."""

    def added(self, depth: int, tokens: Tensor, up: Tensor | None) -> Tensor | None:
        before, self.last = self.last if up is None else self.last.gather(1, up), tokens
        if not depth and not self.both:
            return None
        own = self.own[:, depth].unsqueeze(1)
        return self.share * (self.tables.log_p(before, tokens, self.ids[:, depth]) / self.heat - own)


def _find(table: tuple[Tensor, Tensor], wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Look up `wanted` among the table's keys: (values, found). The values are arbitrary where none is found."""
    keys, values = table
    place = torch.searchsorted(keys, wanted)
    return values[place], keys[place] == wanted
