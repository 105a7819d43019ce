"""grow and prune against eager torch: a draft tree's levels, and the whole tree's best nodes.

A few kilobytes, so a call's time is its launch and its dependent steps: grow takes `width` maxima of width^2 candidates
one after the other, prune counts all candidates once for each bit of a score. So the goals are microseconds over an
empty kernel for few steps and in total for many. torch takes about ten launches for either; its topk and sorts are
several each.
"""

from collections.abc import Iterator

import torch

from bench.kernels import common
from bench.kernels.common import DEVICE, Built, Case, Goal
from specker.kernels.round.grow import Candidates, grow, grow_cost, prune, prune_cost


def trees(B: int, N: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, parents and scores for trees of N nodes."""
    tokens, parents = (torch.zeros(B, N, dtype=torch.int64, device=DEVICE) for _ in "tp")
    return tokens, parents, torch.zeros(B, N, device=DEVICE)


def level(B: int, width: int) -> Built:
    """The second level of a tree."""
    ids = torch.randint(128256, (B * width, width), device=DEVICE)
    logits = torch.randn(B * width, width, device=DEVICE).sort(descending=True)[0]
    lse = 6 + torch.rand(B * width, device=DEVICE)  # above every logit: nothing is clamped, so nothing ties
    mine, theirs = trees(B, 2 * width), trees(B, 2 * width)
    for x in mine, theirs:
        x[2][:, :width] = -torch.arange(width, device=DEVICE) / width
    at, new = width, slice(width, 2 * width)

    def eager() -> None:
        tokens, parents, scores = theirs
        total = (logits - lse[:, None]).clamp_(max=0).view(B, -1) + scores[:, :width].repeat_interleave(width, 1)
        scores[:, new], best = total.topk(width)
        tokens[:, new], parents[:, new] = ids.view(B, -1).gather(1, best), best // width + 1

    def check() -> None:
        grow(*args)
        eager()
        assert all(map(torch.equal, mine, theirs)), "tokens, parents or scores"

    args = ids, logits, lse, *mine, at, Candidates.empty(B, width, 2, torch.float32, torch.device(DEVICE))
    return Built({"specker": lambda: grow(*args), "torch": eager}, check, grow_cost(*args))


def best(B: int, width: int, depth: int, count: int) -> Built:
    """The `count` best candidates of trees with `depth` levels that grow `width` nodes each."""
    every = Candidates.empty(B, width, depth, torch.float32, torch.device(DEVICE))
    mine = trees(B, width * depth)
    for at in range(0, width * depth, width):
        rows = B * (width if at else 1)
        ids = torch.randint(128256, (rows, width), device=DEVICE)
        logits = torch.randn(rows, width, device=DEVICE).sort(descending=True)[0]
        grow(ids, logits, 6 + torch.rand(rows, device=DEVICE), *mine, at, every)
    results = [every.ids.new_empty(2, B, count) for _ in "ab"]
    C, N = every.ids.shape[1], width * depth

    def eager() -> tuple[torch.Tensor, torch.Tensor]:
        kept, up = results[1]
        found = every.scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
        row_of = torch.zeros(B, C, dtype=torch.int64, device=DEVICE)
        row_of.scatter_(1, found, torch.arange(1, count + 1, device=DEVICE).expand(B, count))
        node_of = torch.full((B, C), N, device=DEVICE)
        node_of.scatter_(1, every.columns, torch.arange(N, device=DEVICE).expand(B, N))
        above = row_of.gather(1, every.columns.gather(1, (found - width).clamp(min=0) // width))
        kept.copy_(every.ids.gather(1, found)), up.copy_(torch.where(found < width, 0, above))
        return found, node_of.gather(1, found)

    args = every, *results[0]

    def check() -> None:
        assert all(map(torch.equal, prune(*args), eager())) and torch.equal(*results), "nodes, tokens or parents"

    return Built({"specker": lambda: prune(*args), "torch": eager}, check, prune_cost(*args))


def cases() -> Iterator[Case]:
    for B, width, goal in (
        (1, 4, Goal(over_empty=3e-6)),
        (8, 4, Goal(over_empty=3e-6)),
        (1, 12, Goal(seconds=10e-6)),
        (8, 12, Goal(seconds=10e-6)),
    ):
        yield Case(f"grow by {width}, B {B}", lambda B=B, w=width: level(B, w), goal)
    for B in (1, 8):
        yield Case(f"prune 10x7 to 59, B {B}", lambda B=B: best(B, 10, 7, 59), Goal(seconds=10e-6))


test_grow = common.benchmarks(cases())

if __name__ == "__main__":
    common.main("grow", cases())
