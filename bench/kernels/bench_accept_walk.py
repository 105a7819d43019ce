"""accept_walk. Its reference reads on the host and cannot be captured, so it is timed on a CPU only."""

from collections.abc import Iterator

import torch

from bench.kernels import common
from bench.kernels.common import DEVICE, Built, Case, Goal
from specker.kernels.accept_walk import accept_walk, accept_walk_cost, accept_walk_ref


def build(N: int, chain: bool) -> Built:
    """A fully accepted chain, which is the longest walk, or a tree in which one child of three agrees."""
    j = torch.arange(N)
    parents, tokens = (j, j % 11) if chain else (j // 3, j % 3)
    target = torch.cat([tokens, tokens[:1]]) if chain else torch.ones(N + 1, dtype=torch.int64)
    args = tuple(x.to(DEVICE) for x in (tokens, parents, target))

    def check() -> None:
        for a, b in zip(accept_walk(*args), accept_walk_ref(*args), strict=True):
            assert torch.equal(a, b), "path, count or next"

    ways = {"specker": lambda: accept_walk(*args)}
    if DEVICE == "cpu":  # reads on the host, so no graph captures it
        ways["reference"] = lambda: accept_walk_ref(*args)
    return Built(ways, check, accept_walk_cost(*args))


def cases() -> Iterator[Case]:
    for chain in (False, True):
        yield Case(f"{'chain' if chain else 'tree'} of 64", lambda c=chain: build(64, c), Goal(seconds=10e-6))


test_accept_walk = common.benchmarks(cases())

if __name__ == "__main__":
    common.main("accept_walk", cases())
