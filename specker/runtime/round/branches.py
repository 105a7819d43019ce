"""Two drafts in one round: another drafter's chain is a further branch of the tree.

The chain's tokens stand behind the first draft in the window. What both begin with is one path of the tree, here b:

    row        0     1  2  3     4  5
    token      root  b  c  d     x  y       the first draft b c d, the chain b x y
    parent           0  1  2     1  4

Where the host sees the tokens, the chain's rows of the common beginning are left out, as far as all sequences of the
batch have one. Elsewhere they stay: they are siblings of equal ones, of which acceptance takes the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from specker.runtime.control.policy import Outcome
from specker.runtime.round.batch import Batch
from specker.runtime.round.drafter import Draft, Drafter


@dataclass(eq=False)
class Branches(Draft):
    base: Draft = field(default_factory=Draft)  # the first draft
    chain: Draft = field(default_factory=Draft)
    left_out: int = 0  # tokens of the chain that only the first draft has rows for

    @property
    def first(self) -> Draft:
        return self.base

    def count(self, slot: int) -> int:
        if slot in self.constrained or self.draft_lengths:
            return super().count(slot)
        return self.base.count(slot) + max(0, len(self.chain.tokens[slot]) - self.left_out)

    def outcome(self, slot: int, path: list[int], tokens: list[int]) -> Outcome:
        own, chain = self.own(slot, path), self.chain.tokens[slot]
        if self.draft_lengths:  # all of it is part of the first draft, which was cut
            chain = chain[: self.count(slot)]
        agreed = [a == b for a, b in zip(chain, tokens[: len(own) - 1], strict=False)]
        right = agreed.index(False) if False in agreed else len(agreed)
        beside = Outcome(len(chain), list(range(right + 1)), note=self.chain.note(slot))
        first = [row for row in own if row <= self.base.size]
        outcome = self.base.outcome(slot, first, tokens)
        return replace(outcome, drafted=min(outcome.drafted, self.count(slot)), beside=beside)


def drafted(batch: Batch, drafters: Sequence[Drafter]) -> Draft:
    """Draft as the batch's budget says."""
    budget, first = batch.budget, drafters[batch.budget.part]
    beside = budget.beside
    if beside is None or not beside.nodes or any(request.guide is not None for request in batch.requests):
        return first.propose(batch)  # a grammar cuts and extends chains, not trees
    chain = drafters[beside.part].propose(replace(batch, shape=batch.shape._replace(budget=beside)))
    count = beside.depth if batch.fixed else chain.size
    if chain.tree or not count or len(chain.tokens) < len(batch.requests):
        return first.propose(batch)
    # The last columns are out of the way of the first draft.
    batch.window[:, -count:] = batch.window[:, 1 : count + 1].clone()
    base = first.propose(batch)
    draft = Branches(base.size + count, depth=max(base.depth, count), base=base, chain=chain, observed=base.observed)
    draft.confidence, draft.idle = base.confidence, base.idle
    reads = not batch.fixed and not batch.window.is_cuda

    def join() -> None:
        rows = _common(batch, base, count)
        if reads:
            common = [row.index(-1) - 1 if -1 in row else len(row) - 1 for row in rows.tolist()]
            more = [n for n, tokens in zip(common, chain.tokens, strict=True) if n < len(tokens)]
            draft.left_out = min(more, default=count)
        _write(batch, base, count, draft.left_out, rows)

    batch.run(("branches", base.size, base.depth, base.tree, count), join, attends=False, draws=False)
    draft.size -= draft.left_out
    draft.tree = base.tree or draft.size > base.size
    return draft


def _common(batch: Batch, base: Draft, count: int) -> Tensor:
    """The rows of the first draft that have the first tokens of the chain, [n, 1 + the most of these] int64: the root,
    then a path; -1 after its end."""
    tokens, chain = batch.window[:, 1 : base.size + 1], batch.window[:, -count:]
    parents = _parents(batch, base)
    rows = [torch.zeros(batch.n, dtype=torch.int64, device=tokens.device)]
    for n in range(min(count, base.depth)):
        equal = (parents == rows[-1].unsqueeze(1)) & (tokens == chain[:, n : n + 1])
        found, node = equal.to(torch.int64).max(1)
        rows.append(torch.where(found > 0, node + 1, -1))
    return torch.stack(rows, 1)


def _parents(batch: Batch, base: Draft) -> Tensor:
    if base.tree:
        return batch.state.parents[:, : base.size]
    return torch.arange(base.size, dtype=torch.int64, device=batch.window.device).expand(batch.n, -1)


def _write(batch: Batch, base: Draft, count: int, left_out: int, rows: Tensor) -> None:
    """Write the chain's tokens from `left_out` on behind the first draft, and the parents of all. rows: `_common`."""
    size, end = base.size, base.size + count - left_out
    own = torch.arange(size, end, dtype=torch.int64, device=rows.device).expand(batch.n, -1)  # each one's row before it
    above = own.clone()
    common = rows[:, left_out:count]
    above[:, : common.shape[1]] = torch.where(common < 0, above[:, : common.shape[1]], common)
    batch.state.parents[:, :size] = _parents(batch, base)
    batch.state.parents[:, size:end] = above
    batch.window[:, size + 1 : end + 1] = batch.window[:, batch.window.shape[1] - end + size :].clone()
