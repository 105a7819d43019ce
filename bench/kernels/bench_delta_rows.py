"""delta_rows at the size of Qwen3.5-9B's layer (32 value heads on 16 key heads, 128 x 128), for chains of drafts.

A layer's state is 2.1 MB and a record 24 KB. The op reads the state once, and with block 32 the records of 32 to 64
columns, 0.8 to 1.6 MB. The usual kernel reads and writes the state in each step, and once more for each draft token
that it may have to take back. The torch baseline is the definition, a step for each row.
"""

from collections.abc import Iterator

import torch

from bench.kernels import common
from bench.kernels.common import DEVICE, Built, Case, Goal
from specker.kernels.ancestors import chain_words
from specker.kernels.delta_rows import BLOCK, PAGE, delta_rows, delta_rows_cost, delta_rows_ref

HEADS = (16, 32, 128, 128) if DEVICE == "cuda" else (1, 2, 16, 16)


def build(rows: int, length: int, dtype: torch.dtype) -> Built:
    """`rows` rows after a text of `length` tokens."""
    Hk, Hv, Dk, Dv = HEADS
    g = torch.Generator().manual_seed(rows)
    page, first = PAGE, length - BLOCK
    pages = -(-(length + rows) // page)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g).to(dtype)

    sizes = (Hk, Dk), (Hk, Dk), (Hv, Dv), (Hv,), (Hv,)
    before = [draw(first, *s) for s in sizes]
    heads = [draw(Hv).float() for _ in "ad"]
    states = torch.zeros(1, 2, Hv, Dk, Dv)
    records = [torch.zeros(pages, page, *s) for s in ((Hk, Dk), (Hv, Dv), (Hv, 4))]
    table = torch.arange(pages, dtype=torch.int32)[None]
    memory = states, torch.zeros(1, dtype=torch.int64), torch.zeros(1, Hv, dtype=torch.int64), *records

    def places(start: int, n: int, chained: bool) -> list[torch.Tensor | None]:
        at = torch.arange(start, start + n)
        ints = [torch.tensor(x, dtype=torch.int32) for x in ([start + n], [n if chained else 0], [0, n])]
        return [at, at, table, *ints, chain_words(n) if chained else None]

    delta_rows_ref(*before, *heads, *memory, *places(0, first, False), BLOCK)
    args = [*(draw(rows, *s) for s in sizes), *heads, *memory, *places(first, rows, True), BLOCK]
    on = [x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in args]

    def eager() -> torch.Tensor:
        q, k, v, a, b, a_log, dt_bias = (x.float() for x in on[:7])
        S, out = on[7][0, 0], []
        q, k = (torch.nn.functional.normalize(x, dim=-1).repeat_interleave(Hv // Hk, 1) for x in (q, k))
        decay = torch.exp(-a_log.exp() * torch.nn.functional.softplus(a + dt_bias))
        for i in range(rows):
            S = S * decay[i][:, None, None]
            u = torch.sigmoid(b[i])[:, None] * (v[i] - (S * k[i][:, :, None]).sum(1))
            S = S + k[i][:, :, None] * u[:, None]
            out.append((S * q[i][:, :, None]).sum(1) * Dk**-0.5)
        return torch.stack(out).to(dtype)

    def check() -> None:
        want = delta_rows_ref(*(x.clone() if isinstance(x, torch.Tensor) else x for x in args))
        error = float((delta_rows(*on).cpu() - want).abs().max())
        assert error <= 2e-2 if dtype != torch.float32 else error <= 1e-4, error

    ways = {"specker": lambda: delta_rows(*on), "torch": eager}
    return Built(ways, check, delta_rows_cost(*args))


def cases() -> Iterator[Case]:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    for rows in (1, 5, 16, 60) if DEVICE == "cuda" else (1, 5):
        yield Case(f"chain of {rows}", lambda rows=rows: build(rows, 128, dtype), Goal())


test_delta_rows = common.benchmarks(cases())

if __name__ == "__main__":
    common.main("delta_rows", cases())
