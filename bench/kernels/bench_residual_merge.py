"""residual_merge against eager torch and torch.compile, at Llama-3-8B's width.

Only bytes matter. 8 rows take one launch and two round trips to memory (the row, and the weight, which is requested
before the reduction). 8192 rows are a stream of (2 + P + Q) * 2 E bytes per row; eager torch moves (3 P + 2 Q) * 2 E in
P + Q launches.
"""

from collections.abc import Iterator

import torch
from torch.nn import functional as F

from bench.kernels import common
from bench.kernels.common import DEVICE, Built, Case, Goal
from specker.kernels.residual_merge import residual_merge, residual_merge_cost

EPS = 1e-5
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def build(P: int, Q: int, T: int, E: int, apart: bool) -> Built:
    x, deltas = torch.randn(T, E, dtype=DTYPE, device=DEVICE), torch.randn(P, T, E, dtype=DTYPE, device=DEVICE)
    weight = torch.randn(Q, E, dtype=DTYPE, device=DEVICE)

    given = (x, deltas[:-1], weight, EPS, deltas[-1].clone()) if apart else (x, deltas, weight, EPS)

    def eager() -> tuple:
        y = x
        for delta in deltas:
            y = y + delta
        return y, [F.rms_norm(y, (E,), w, EPS) for w in weight]

    def check() -> None:
        y, normed = residual_merge(*given)
        eps = torch.finfo(DTYPE).eps
        exact = x.double() + deltas.double().sum(0)
        assert (y - exact).abs().max() <= eps * exact.abs().max(), "the sum"
        norm = F.rms_norm(y.double(), (E,), None, EPS) * weight.double()[:, None]
        assert (normed - norm).abs().max() <= 2 * eps * norm.abs().max(), "the norms"

    ways = {"specker": lambda: residual_merge(*given), "torch": eager}
    if DEVICE == "cuda":
        ways["torch.compile"] = torch.compile(eager, dynamic=False)
    return Built(ways, check, residual_merge_cost(*given))


def cases() -> Iterator[Case]:
    E, few, many = (4096, 8, 8192) if DEVICE == "cuda" else (256, 8, 128)
    for P, Q, apart in ((2, 1, False), (2, 1, True), (1, 4, False), (1, 1, False)):
        for T, goal in ((few, Goal(over_empty=3e-6)), (many, Goal(share=0.85))):
            name = f"P{P}{' apart' if apart else ''} Q{Q}, T {T}"
            yield Case(name, lambda P=P, Q=Q, T=T, apart=apart: build(P, Q, T, E, apart), goal)


test_residual_merge = common.benchmarks(cases())

if __name__ == "__main__":
    common.main("residual_merge", cases())
