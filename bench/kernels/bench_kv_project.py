"""kv_project against cuBLAS with kv_calibrate, and against row_linear with kv_calibrate, at Llama-3-8B's shape.

The limit is one read of the weight: 50 MB, 11.7 us at an H200's 4.3 TB/s. K is split in three, so that 48 heads fill
132 SMs; at 64 rows the float32 sums of the splits are 4.7 MB, written to and read from L2.
"""

from collections.abc import Iterator

import torch
from torch.nn import functional as F

from bench.kernels import common
from bench.kernels.common import DEVICE, Built, Case, Goal
from specker.kernels.kv_calibrate import kv_calibrate, rope_table
from specker.kernels.kv_project import kv_project, kv_project_cost
from specker.kernels.row_linear import row_linear

PAGE = 256
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
WIDTHS = {"8B": (4096, 32, 8, 128), "1B": (2048, 32, 8, 64)} if DEVICE == "cuda" else {"small": (256, 4, 2, 32)}


def project(width: str, T: int) -> Built:
    E, Hq, Hkv, D = WIDTHS[width]
    x = torch.randn(T, E, dtype=DTYPE, device=DEVICE)
    weight = torch.randn((Hq + 2 * Hkv) * D, E, dtype=DTYPE, device=DEVICE) / E**0.5
    index = torch.arange(T, device=DEVICE)
    rope = rope_table(1e4 ** -torch.linspace(0, 1, D // 2, device=DEVICE), 1.0, T, DTYPE)
    caches = [tuple(torch.zeros(1, PAGE, Hkv, D, dtype=DTYPE, device=DEVICE) for _ in "kv") for _ in "abc"]
    ours, rows, blas = ((index, index, rope, *pair) for pair in caches)
    ways = {
        "specker": lambda: kv_project(x, weight, None, *ours),
        "row_linear, kv_calibrate": lambda: kv_calibrate(row_linear(x, weight), *rows),
        "cuBLAS, kv_calibrate": lambda: kv_calibrate(F.linear(x, weight), *blas),
    }

    def check() -> None:
        q, _, theirs = (way() for way in ways.values())
        for a, b in ((q, theirs), *zip(caches[0], caches[2], strict=True)):
            assert (a.double() - b.double()).abs().max() <= 8 * torch.finfo(DTYPE).eps * b.abs().max(), "q, k or v"

    return Built(ways, check, kv_project_cost(x, weight, None, *ours))


def cases() -> Iterator[Case]:
    for width in WIDTHS:
        for T in (1, 8, 64):
            goal = Goal(share=0.75 if width == "8B" else 0.6) if T < 64 and DEVICE == "cuda" else Goal()
            yield Case(f"{width}, T {T}", lambda width=width, T=T: project(width, T), goal)


test_kv_project = common.benchmarks(cases())

if __name__ == "__main__":
    common.main("kv_project", cases())
