"""settle against eager torch: what B sequences commit after a verify pass.

A few hundred bytes per sequence, so a call's time is its launch, a few dependent round trips (the target's tokens, the
emitted ones, the length) and, in a tree, one step per accepted draft. So the goals are microseconds over an empty
kernel, or in total for the longest walk. The torch baseline never reads on the host either, else no graph could capture
it: a chain's path is a cumulative product, a tree's rows are accepted one generation at a time. Texts have room for the
timed calls; after that a call writes no token to them, and the rest stays.
"""

from collections.abc import Iterator

import torch
from torch.nn import functional as F

from bench.kernels import common
from bench.kernels.common import DEVICE, Built, Case, Goal
from specker.kernels.round.settle import Texts, settle, settle_cost
from specker.kernels.sample_rows import Splits

PAGE = 256  # columns
PAGES = 16  # of a sequence
LENGTH = 1000  # of the texts
CAPACITY = PAGE * PAGES - 64  # every row of a window has a page
SPLITS = 32  # parts of a row of 128,256 logits


def build(B: int, N: int, width: int, splits: bool) -> Built:
    """`width` 0: chains of N drafts, all accepted. Otherwise trees with `width` children a node, of which the second
    agrees, down to a leaf."""
    R, tree = N + 1, width > 0
    j = torch.arange(N, device=DEVICE)
    tokens = (j % width if tree else j).expand(B, N).contiguous()
    parents = (j // width).expand(B, N).contiguous() if tree else None
    target = torch.ones(B, R, dtype=torch.int64, device=DEVICE) if tree else F.pad(tokens, (0, 1))
    generations = _generations(N, width) if tree else N
    table = torch.randperm(B * PAGES, device=DEVICE).view(B, PAGES).int()
    limit = torch.full((B,), CAPACITY, device=DEVICE)
    ids = target.view(-1, 1) + torch.arange(SPLITS, device=DEVICE)
    # All values are equal, so the lowest id is drawn: the first split's.
    drawn: torch.Tensor | Splits = Splits((ids - ids).float(), ids.int()) if splits else target
    row = torch.arange(R, device=DEVICE)

    def texts() -> tuple[torch.Tensor, ...]:
        length = LENGTH + torch.arange(B, device=DEVICE)
        return torch.zeros(B, CAPACITY, dtype=torch.int64, device=DEVICE), length, torch.zeros_like(target)

    def ours(texts: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return settle(tokens, parents, drawn, Texts(*texts, limit, table, PAGE))

    def eager(texts: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        committed, length, window = texts
        wanted = drawn.tokens().view(B, R) if isinstance(drawn, Splits) else drawn
        if parents is None:
            count = (tokens == wanted[:, :-1]).long().cumprod(1).sum(1) + 1
            path = row.expand(B, R)
        else:
            agrees = F.pad(tokens == wanted.gather(1, parents), (1, 0), value=True)
            up, taken = F.pad(parents, (1, 0)), (row == 0).expand(B, R)
            for _ in range(generations):
                taken = (taken.gather(1, up) & agrees) | (row == 0)
            count = taken.sum(1)
            path = taken.long().sort(dim=1, descending=True, stable=True).indices
        inside = row < count[:, None]
        emitted = wanted.gather(1, path)
        columns = length[:, None] + row
        kept = inside & (columns < limit[:, None])
        at = columns.clamp(max=CAPACITY - 1)
        committed.scatter_(1, at, torch.where(kept, emitted, committed.gather(1, at)))
        window[:, 0] = emitted.gather(1, count[:, None] - 1)[:, 0]
        report = torch.cat((count[:, None], path.where(inside, -1), emitted.where(inside, -1)), 1)
        if parents is None:
            src = dst = row[:0]
        else:
            src, dst = (length[:, None] - 1 + x for x in (path.where(inside, row), row))
            src, dst = ((table.gather(1, c // PAGE).long() * PAGE + c % PAGE).view(-1) for c in (src, dst))
        length.copy_(torch.minimum(length + count, limit))
        return report.view(-1), wanted.reshape(-1), src, dst

    def check() -> None:
        mine, theirs = texts(), texts()
        for a, b in zip((*ours(mine), *mine), (*eager(theirs), *theirs), strict=True):
            assert torch.equal(a, b), "report, drawn, src, dst, text, length or root"
        assert (mine[1] - LENGTH - torch.arange(B, device=DEVICE) == generations + 1).all(), "the path's length"

    mine, theirs = texts(), texts()
    ways = {"specker": lambda: ours(mine), "torch": lambda: eager(theirs)}
    return Built(ways, check, settle_cost(tokens, parents, drawn))


def _generations(N: int, width: int) -> int:
    """Accepted drafts: the second child of each node, as long as there is one."""
    row = count = 0
    while row * width + 1 < N:
        row, count = row * width + 2, count + 1
    return count


def cases() -> Iterator[Case]:
    short, walk = Goal(over_empty=3e-6), Goal(seconds=10e-6)
    for B, N, width, splits, goal in (
        (1, 8, 0, False, short),
        (8, 8, 0, False, short),
        (8, 8, 0, True, Goal(over_empty=4e-6)),  # one more round trip: the splits
        (1, 60, 4, False, walk),
        (8, 60, 4, False, walk),
        (8, 60, 4, True, walk),
    ):
        name = f"{'tree' if width else 'chain'} of {N}, B {B}" + ", splits" * splits
        yield Case(name, lambda B=B, N=N, w=width, splits=splits: build(B, N, w, splits), goal)


test_settle = common.benchmarks(cases())

if __name__ == "__main__":
    common.main("settle", cases())
