"""kv_commit against eager torch, at Llama-3-8B's shape.

It moves 12 rows in each of 32 layers, 3 MiB in total, in one launch and one round trip; torch takes four.
"""

from collections.abc import Iterator

import torch

from bench.kernels import common
from bench.kernels.bench_kv_calibrate import HKV, PAGE, D, randn
from bench.kernels.common import DEVICE, Built, Case, Goal
from specker.kernels.kv_commit import kv_commit, kv_commit_cost, kv_commit_ref


def build(L: int, M: int) -> Built:
    total = 32 * PAGE
    caches = [randn(L, total // PAGE, PAGE, HKV, D) for _ in "kv"]
    dst = 4000 + torch.arange(M, device=DEVICE)
    src = 4001 + 2 * torch.arange(M, device=DEVICE)

    def check() -> None:
        before = [c.clone() for c in caches]
        kv_commit(*caches, src, dst)
        kv_commit_ref(*before, src, dst)
        assert all(map(torch.equal, caches, before)), "the moved rows"

    ways = {"specker": lambda: kv_commit(*caches, src, dst), "torch": lambda: kv_commit_ref(*caches, src, dst)}
    return Built(ways, check, kv_commit_cost(*caches, src, dst))


def cases() -> Iterator[Case]:
    L = 32 if DEVICE == "cuda" else 2
    yield Case(f"12 rows, {L} layers", lambda: build(L, 12), Goal(over_empty=3e-6))
    yield Case(f"64 rows, {L} layers", lambda: build(L, 64))


test_kv_commit = common.benchmarks(cases())

if __name__ == "__main__":
    common.main("kv_commit", cases())
