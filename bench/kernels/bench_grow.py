"""grow and prune against eager torch: a draft tree's levels, and the whole tree's best nodes.

A few kilobytes, so a call's time is its launch and its dependent steps: grow takes `width` maxima of width^2 candidates
one after the other, prune compares every node with every other. So the goals are microseconds over an empty kernel for
few steps and in total for many. torch takes about ten launches for either; its topk and sorts are several each.
"""

from collections.abc import Iterator

import torch

from bench.kernels import common
from bench.kernels.common import DEVICE, Built, Case, Goal
from specker.kernels.round.grow import grow, grow_cost, prune, prune_cost


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
        grow(ids, logits, lse, *mine, at)
        eager()
        assert all(map(torch.equal, mine, theirs)), "tokens, parents or scores"

    args = ids, logits, lse, *mine, at
    return Built({"specker": lambda: grow(*args), "torch": eager}, check, grow_cost(*args))


def best(B: int, width: int, depth: int, count: int) -> Built:
    """The `count` best nodes of trees with `depth` levels of `width` nodes."""
    N = width * depth
    tokens, parents, scores = trees(B, N)
    j = torch.arange(N, device=DEVICE)
    tokens += j
    parents[:, width:] = j[width:] // width * width - width + 1  # the best node of the level above
    scores += -(j // width).float() - torch.rand(B, N, device=DEVICE)
    scores[:, ::width] = scores[:, ::width].ceil()  # no child above its parent
    results = [tokens.new_empty(2, B, count) for _ in "ab"]

    def eager() -> torch.Tensor:
        kept, up = results[1]
        nodes = scores.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(1).values
        row_of = torch.zeros(B, N + 1, dtype=torch.int64, device=DEVICE)
        row_of.scatter_(1, nodes + 1, torch.arange(1, count + 1, device=DEVICE).expand(B, count))
        kept.copy_(tokens.gather(1, nodes)), up.copy_(row_of.gather(1, parents.gather(1, nodes)))
        return nodes

    args = tokens, parents, scores, *results[0]

    def check() -> None:
        assert torch.equal(prune(*args), eager()) and torch.equal(*results), "nodes, tokens or parents"

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
        yield Case(f"prune 12x5 to 48, B {B}", lambda B=B: best(B, 12, 5, 48), Goal(seconds=10e-6))


test_grow = common.benchmarks(cases())

if __name__ == "__main__":
    common.main("grow", cases())
