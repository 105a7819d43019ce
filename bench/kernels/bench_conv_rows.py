"""conv_rows at the size of Qwen3.5-9B's layer (8,192 channels, kernel 4), for decoding, a chain and a prompt's chunk.

The op reads each row and writes its input and its output: 49 KB a row. The torch baseline is conv1d over the columns,
which are gathered before, and its inputs are copied to the cache.
"""

from collections.abc import Iterator

import torch

from bench.kernels import common
from bench.kernels.common import DEVICE, Built, Case, Goal
from specker.kernels.ancestors import chain_words
from specker.kernels.conv_rows import conv_rows, conv_rows_cost, conv_rows_ref
from specker.kernels.delta_rows import PAGE

C, K = (8192, 4) if DEVICE == "cuda" else (256, 4)


def build(rows: int, length: int, dtype: torch.dtype) -> Built:
    """`rows` rows after a text of `length` tokens, a chain in a window or, of more than 64 rows, a prompt's chunk."""
    g, pages = torch.Generator().manual_seed(rows), -(-(length + rows) // PAGE)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g)

    x, weight, inputs = draw(rows, C).to(dtype), draw(C, K), draw(pages, PAGE, C).to(dtype)
    few, at = rows <= 64, torch.arange(length, length + rows)
    ints = [torch.tensor(n, dtype=torch.int32) for n in ([length + rows], [rows if few else 0], [0, rows])]
    table = torch.arange(pages, dtype=torch.int32)[None]
    args = [x, weight, None, inputs, at, table, *ints, chain_words(rows) if few else None]
    on = [arg.to(DEVICE) if isinstance(arg, torch.Tensor) else arg for arg in args]
    wide = on[1].to(dtype)[:, None]

    def eager() -> torch.Tensor:
        before = on[3].view(-1, C)[length - K + 1 : length]
        on[3].view(-1, C)[on[4]] = on[0]
        y = torch.nn.functional.conv1d(torch.cat((before, on[0])).T[None], wide, groups=C)
        return torch.nn.functional.silu(y[0].T)

    def check() -> None:
        want = conv_rows_ref(*(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args))
        error = float((conv_rows(*on).cpu() - want).abs().max())
        assert error <= (1e-4 if dtype == torch.float32 else 5e-2), error

    return Built({"specker": lambda: conv_rows(*on), "torch": eager}, check, conv_rows_cost(*args))


def cases() -> Iterator[Case]:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    for rows in (1, 16, 512) if DEVICE == "cuda" else (1, 16):
        yield Case(f"{rows} rows", lambda rows=rows: build(rows, 128, dtype), Goal())


test_conv_rows = common.benchmarks(cases())

if __name__ == "__main__":
    common.main("conv_rows", cases())
