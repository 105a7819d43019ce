"""kv_calibrate against eager torch, at Llama-3-8B's shape (and with Qwen3's head norms).

kv_calibrate reads qkv once and writes it once, to its slots; torch rotates in several launches and scatters in two.
"""

from collections.abc import Iterator

import torch

from bench.kernels import common
from bench.kernels.common import DEVICE, Built, Case, Goal
from specker.kernels.kv_calibrate import (
    kv_calibrate,
    kv_calibrate_cost,
    kv_calibrate_ref,
    rope_table,
)

PAGE = 256
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
HQ = 32 if DEVICE == "cuda" else 4
HKV = 8 if DEVICE == "cuda" else 2
D = 128 if DEVICE == "cuda" else 16


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=DTYPE, device=DEVICE)


def build(T: int, norm: bool) -> Built:
    total = -(-2 * T // PAGE) * PAGE
    qkv, positions = randn(T, (HQ + 2 * HKV) * D), torch.arange(T, device=DEVICE)
    slots = torch.randperm(total // PAGE, device=DEVICE).repeat_interleave(PAGE) * PAGE
    slots = (slots + torch.arange(PAGE, device=DEVICE).repeat(total // PAGE))[:T]  # pages are unordered
    rope = rope_table(1e4 ** -torch.linspace(0, 1, D // 2, device=DEVICE), 1.0, T, DTYPE)
    norms = (1 + 0.1 * randn(1, D), 1 + 0.1 * randn(1, D)) if norm else (None, None)
    caches = [tuple(torch.zeros(total // PAGE, PAGE, HKV, D, dtype=DTYPE, device=DEVICE) for _ in "kv") for _ in "ab"]
    ours, theirs = ((qkv, positions, slots, rope, *pair, *norms) for pair in caches)

    def check() -> None:
        for a, b in [(kv_calibrate(*ours), kv_calibrate_ref(*theirs)), *zip(*caches, strict=True)]:
            assert (a.double() - b.double()).abs().max() <= 4 * torch.finfo(DTYPE).eps * b.abs().max(), "q, k or v"

    ways = {"specker": lambda: kv_calibrate(*ours), "torch": lambda: kv_calibrate_ref(*theirs)}
    return Built(ways, check, kv_calibrate_cost(*ours))


def cases() -> Iterator[Case]:
    few, many = (8, 8192) if DEVICE == "cuda" else (8, 128)
    for norm in (False, True):
        for T, goal in ((few, Goal(over_empty=3e-6)), (many, Goal(share=0.8))):
            name = f"{'head norms, ' if norm else ''}T {T}"
            yield Case(name, lambda T=T, norm=norm: build(T, norm), goal)


test_kv_calibrate = common.benchmarks(cases())

if __name__ == "__main__":
    common.main("kv_calibrate", cases())
