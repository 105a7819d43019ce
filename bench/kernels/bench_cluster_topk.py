"""cluster_topk against the whole head and against a trimmed head of as many rows as it reads.

The limit is one read of the centroids and of each row's clusters: for Gemma 4 E4B's assistant (2,048 centroids of 256,
32 clusters of 128 rows) 3.1 MB for one row, 0.7 us at an H200's 4.3 TB/s. Two launches take longer than that, so the
time is that of the launches and of two selections; the whole head's 134 MB take 31 us. Rows that share clusters share
their reads; random rows share few.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from bench.kernels import common
from bench.kernels.common import DEVICE, Built, Case, Goal
from specker.kernels.cluster_topk import cluster_topk, cluster_topk_cost
from specker.kernels.noise import gumbel_at
from specker.kernels.quant import quantised
from specker.kernels.vocab_topk import Noise, vocab_topk

DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
E = 256 if DEVICE == "cuda" else 64
C = 2048 if DEVICE == "cuda" else 128  # clusters
R = 128 if DEVICE == "cuda" else 32  # rows of each
CHOSEN = 32 if DEVICE == "cuda" else 8  # clusters of a hidden row


def build(T: int, k: int, noisy: bool = False, kind: str | None = None, width: int = E) -> Built:
    g = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randn(T, width, dtype=DTYPE, device=DEVICE, generator=g)
    centroids = torch.randn(C, width, device=DEVICE, generator=g) / width**0.5
    plain = (centroids.repeat_interleave(R, 0) + torch.randn(C * R, width, device=DEVICE, generator=g) / width**0.5).to(
        DTYPE
    )
    centroids = centroids.to(DTYPE)
    weight = plain if kind is None else quantised(plain, kind).for_bfloat16()
    ids = torch.randperm(C * R, device=DEVICE, generator=g).view(C, R)
    noise = Noise(1, torch.arange(T, device=DEVICE), 0.7) if noisy else None
    fixed, kept = plain[: CHOSEN * R].contiguous(), ids.flatten()[: CHOSEN * R].contiguous()

    def ours() -> tuple[Tensor, Tensor, Tensor]:
        return cluster_topk(hidden, weight, centroids, ids, CHOSEN, k, None, noise)

    def check() -> None:
        best, logits, lse = ours()
        restored = weight if isinstance(weight, Tensor) else weight.dequantised(DTYPE)
        scores = hidden.double() @ centroids.double().T
        chosen = scores.topk(CHOSEN + 1)
        rows = (chosen.indices[:, :CHOSEN, None] * R + torch.arange(R, device=DEVICE)).flatten(1)
        exact, tokens = (hidden.double() @ restored.double().T).gather(1, rows), ids.flatten()[rows]
        if noise is not None:
            exact = exact / noise.temperature + gumbel_at(noise.seed, noise.positions, tokens).double()
        # A matrix unit may truncate its float32 sum at each of width / 16 steps, by up to 2^-22 of the sum.
        error = max(1e-5, width / 16 * 2**-22) * exact.abs().max()
        sure = chosen.values[:, CHOSEN - 1] - chosen.values[:, CHOSEN] > error  # rounding cannot swap two clusters
        assert sure.any(), "no row's clusters are certain"
        at = (tokens[:, None, :] == best[:, :, None]).int()
        assert (at.sum(2) == 1)[sure].all(), "an id of another cluster"
        assert (exact.gather(1, at.argmax(2)) - logits)[sure].abs().max() <= error, "logits are not those of the ids"
        assert (exact.topk(k).values - logits)[sure].abs().max() <= error, "not the largest"
        assert (exact.logsumexp(-1) - lse)[sure].abs().max() <= error, "lse"

    ways: dict[str, Callable[[], Any]] = {
        "specker": ours,
        "fixed rows": lambda: vocab_topk(hidden, fixed, kept, k, None, noise),
        "whole head": lambda: vocab_topk(hidden, plain, ids.flatten(), k, None, noise),
    }
    return Built(ways, check, cluster_topk_cost(hidden, weight, centroids, ids, CHOSEN, k, None, noise))


def cases() -> Iterator[Case]:
    for T in (1, 8):
        yield Case(f"T {T}, k 1", lambda T=T: build(T, 1), Goal(over=(("whole head", 1.5),)))
    yield Case("T 8, k 10, noise", lambda: build(8, 10, noisy=True))
    yield Case("T 8, k 10, int8", lambda: build(8, 10, kind="int8"))
    yield Case("T 1, k 1, 1024 wide", lambda: build(1, 1, width=1024 if DEVICE == "cuda" else 128))


test_cluster_topk = common.benchmarks(cases())

if __name__ == "__main__":
    common.main("cluster_topk", cases())
