"""row_linear against torch's linear (cuBLAS), on the linears of an 8B model.

The limit is one read of the weight: at an H200's 4.3 TB/s 7.8 us for 4096 -> 4096, 55 for 4096 -> 28672, 27 for 14336
-> 4096. Up to 64 rows the matrix units are no limit. The overheads are the start of the stream, which matters in a
short call; the merge's launch if K is split (14336 -> 4096; "split" leaves the sums to residual_merge); and x, which
every program reads again from L2: at 64 rows twice the weight's bytes for tiles of 32 outputs, half of them for tiles
of 128. The baseline of silu_mul is the linear and two pointwise kernels; "torch.compile" makes one of these. "4 x" is a
group of four layers side by side, of a 1B and an 8B draft, against torch.bmm.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.kernels import common
from bench.kernels.common import DEVICE, Built, Case, Goal
from specker.kernels.linear import row_linear, row_linear_cost, row_linear_ref

DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def build(T: int, E: int, O: int, epilogue: str, G: int) -> Built:
    layers = (G,) if G > 1 else ()
    x = torch.randn(*layers, T, E, dtype=DTYPE, device=DEVICE)
    weight = torch.randn(*layers, O, E, dtype=DTYPE, device=DEVICE) / E**0.5

    def theirs() -> Tensor:
        return row_linear_ref(x, weight, None, "none" if epilogue == "split" else epilogue)

    def result(rows: slice = slice(None)) -> Tensor:
        y = row_linear(x[..., rows, :], weight, None, epilogue)
        return y.sum(0) if epilogue == "split" else y

    def check() -> None:
        exact = x.double() @ weight.double().mT
        if epilogue == "silu_mul":
            gate, up = exact.chunk(2, -1)
            exact = F.silu(gate) * up
        ours = result()
        error, own = (ours - exact).abs().max(), (theirs() - exact).abs().max()
        assert error <= 3 * own, f"error {error:.2e}, torch's is {own:.2e}"
        for rows in (slice(0, 1), slice(T // 2, T)):
            assert DEVICE == "cpu" or torch.equal(result(rows), ours[..., rows, :]), "a row's bits depend on the others"

    ways: dict[str, Callable[[], Any]] = {"specker": lambda: row_linear(x, weight, None, epilogue), "torch": theirs}
    if DEVICE == "cuda" and epilogue == "silu_mul":
        ways["torch.compile"] = torch.compile(theirs, dynamic=False)
    return Built(ways, check, row_linear_cost(x, weight, None, epilogue))


def cases() -> Iterator[Case]:
    if DEVICE == "cpu":
        shapes = (
            (256, 256, "none", 1, None),
            (256, 512, "silu_mul", 1, None),
            (1024, 256, "none", 1, None),
            (1024, 256, "split", 1, None),
            (256, 384, "none", 4, None),
        )
    else:
        shapes = (
            (4096, 4096, "none", 1, 0.70),
            (4096, 28672, "none", 1, 0.88),
            (4096, 28672, "silu_mul", 1, 0.88),
            (14336, 4096, "none", 1, 0.80),
            (14336, 4096, "split", 1, 0.85),
            (2048, 3072, "none", 4, 0.75),
            (2048, 2048, "none", 4, 0.75),
            (4096, 6144, "none", 4, 0.85),
            (4096, 4096, "none", 4, 0.85),
        )
    for E, O, epilogue, G, share in shapes:
        for T in (1, 12) if G > 1 else (1, 8, 64):
            goal = Goal(share=share, over=(("torch", 1.0),)) if share else Goal()
            name = (f"{G} x " if G > 1 else "") + f"{E} -> {O}" + f" {epilogue}" * (epilogue != "none")
            yield Case(f"{name}, T {T}", lambda T=T, E=E, O=O, e=epilogue, G=G: build(T, E, O, e, G), goal)


test_row_linear = common.benchmarks(cases())

if __name__ == "__main__":
    common.main("row_linear", cases())
