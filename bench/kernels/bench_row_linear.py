"""row_linear against torch's linear (cuBLAS), on the linears of an 8B model.

The limit is one read of the weight: at an H200's 4.3 TB/s 7.8 us for 4096 -> 4096, 55 for 4096 -> 28672, 27 for 14336
-> 4096. Up to 64 rows the matrix units are no limit. The overheads are the start of the stream, which matters in a
short call; the merge's launch if K is split (14336 -> 4096; "split" leaves the sums to residual_merge); and x, which
every program reads again from L2: at 64 rows twice the weight's bytes for tiles of 32 outputs, half of them for tiles
of 128. The baseline of silu_mul is the linear and two pointwise kernels; "torch.compile" makes one of these. "4 x" is a
group of four layers side by side, of a 1B and an 8B draft, against torch.bmm.

Weights in eight and four bits: the limit is one read of their bytes. int4 cannot reach it: a tile of 128 rows moves 7
bytes through shared memory per weight, which allows an H100 64% of its bandwidth, and decoding takes 6.5 instructions
per weight, which allows 69%. The baselines are row_linear with the bfloat16 weight and torch's own products, which
quantise to formats of their own and are timed but not compared.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.kernels import common
from bench.kernels.common import DEVICE, Built, Case, Goal
from specker.kernels.quant import quantised
from specker.kernels.row_linear import GATES, gated, row_linear, row_linear_cost, row_linear_ref

DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32

QUANTISED = ((4096, 4096, "none"), (4096, 28672, "none"), (4096, 28672, "silu_mul"), (14336, 4096, "none"))


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
        if epilogue in GATES:
            exact = gated(exact, GATES[epilogue])
        ours = result()
        error, own = (ours - exact).abs().max(), (theirs() - exact).abs().max()
        assert error <= 3 * own, f"error {error:.2e}, torch's is {own:.2e}"
        for rows in (slice(0, 1), slice(T // 2, T)):
            assert DEVICE == "cpu" or torch.equal(result(rows), ours[..., rows, :]), "a row's bits depend on the others"

    ways: dict[str, Callable[[], Any]] = {"specker": lambda: row_linear(x, weight, None, epilogue), "torch": theirs}
    if DEVICE == "cuda" and epilogue == "silu_mul":
        ways["torch.compile"] = torch.compile(theirs, dynamic=False)
    return Built(ways, check, row_linear_cost(x, weight, None, epilogue))


def build_quantised(T: int, E: int, O: int, epilogue: str, kind: str, group: int | None) -> Built:
    x = torch.randn(T, E, dtype=DTYPE, device=DEVICE)
    plain = torch.randn(O, E, dtype=DTYPE, device=DEVICE) / E**0.5
    weight = quantised(plain, kind, group).for_bfloat16()

    def check() -> None:
        restored = weight.dequantised(DTYPE)
        exact = x.double() @ restored.double().T
        if epilogue == "silu_mul":
            gate, up = exact.chunk(2, -1)
            exact = F.silu(gate) * up
        ours = row_linear(x, weight, None, epilogue)
        error = (ours - exact).abs().max()
        own = (row_linear_ref(x, restored, None, epilogue) - exact).abs().max()
        assert error <= 3 * own, f"error {error:.2e}, torch's is {own:.2e}"
        alone = row_linear(x[-1:], weight, None, epilogue)
        assert DEVICE == "cpu" or torch.equal(alone, ours[-1:]), "a row's bits depend on the others"

    ways: dict[str, Callable[[], Any]] = {
        "specker": lambda: row_linear(x, weight, None, epilogue),
        "bfloat16": lambda: row_linear(x, plain, None, epilogue),
    }
    if DEVICE == "cuda" and epilogue == "none":
        if kind == "int8":
            scale = weight.scale[:, 0].to(DTYPE)
            ways["torch int8"] = lambda: torch.ops.aten._weight_int8pack_mm(x, weight.q, scale)
        if kind == "int4" and group is not None:
            packed = cache(lambda: torch.ops.aten._convert_weight_to_int4pack(weight.q, 8))  # torch may lack it
            numbers = torch.stack((weight.scale, weight.scale), -1).transpose(0, 1).contiguous().to(DTYPE)
            ways["torch int4"] = lambda: torch.ops.aten._weight_int4pack_mm(x, packed(), group, numbers)
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
    for E, O, epilogue in ((256, 512, "silu_mul"),) if DEVICE == "cpu" else QUANTISED:
        for kind, group, share in (("int8", None, 0.80), ("fp8", None, 0.75), ("int4", 32, 0.50), ("int4", 128, 0.50)):
            for T in (1, 8, 64):
                goal = Goal(share=share, over=(("bfloat16", 1.5),)) if DEVICE == "cuda" and E * O > 1 << 25 else Goal()
                name = f"{E} -> {O}" + f" {epilogue}" * (epilogue != "none") + f" {kind}" + f"/{group}" * bool(group)
                given = T, E, O, epilogue, kind, group
                yield Case(f"{name}, T {T}", lambda given=given: build_quantised(*given), goal)


test_row_linear = common.benchmarks(cases())

if __name__ == "__main__":
    common.main("row_linear", cases())
