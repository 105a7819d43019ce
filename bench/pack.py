"""Which CPU linear is fastest for weights that do not fit the caches? `python bench/pack.py`

The linears of one decoding step of SmolLM2-135M (30 layers and the head), each with its own weights, run in order as
F.linear and as oneDNN's packed linear, in turn, for several rows. Reported: milliseconds of the whole step (median and
best of the rounds) and the bytes of the weights over the best time, beside the bandwidth of a plain sum.
"""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import HfArgumentParser

from bench import harness
from specker.kernels.linear import PACK_MIN_STREAMED, pack, row_linear

LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # qkv, o, gate and up, down
LAYERS, HEAD = 30, (49152, 576)


@dataclass(frozen=True)
class Args:
    rows: str = field(default="1,2,5,8,16", metadata={"help": "comma-separated"})
    dtypes: str = field(default="float32,bfloat16", metadata={"help": "comma-separated"})
    rounds: int = 9
    threads: int = 2
    save: bool = field(default=True, metadata={"help": "append to bench/results"})


def seconds(weights: list[Tensor], inputs: dict[int, Tensor]) -> float:
    start = time.perf_counter()
    for weight in weights:
        row_linear(inputs[weight.shape[1]], weight)
    return time.perf_counter() - start


def bandwidth(rounds: int) -> float:
    """GB/s of a sum over 256 MiB."""
    x, times = torch.ones(1 << 26), []
    for _ in range(rounds):
        start = time.perf_counter()
        x.sum()
        times.append(time.perf_counter() - start)
    return x.nbytes / min(times) / 1e9


def measure(dtype: torch.dtype, args: Args) -> list[dict[str, Any]]:
    shapes = [*(LAYER * LAYERS), HEAD]
    plain = [torch.randn(shape).to(dtype) for shape in shapes]
    ways = {"linear": plain, "packed": [pack(w, PACK_MIN_STREAMED) for w in plain]}
    size, top, rows = sum(w.nbytes for w in plain), bandwidth(args.rounds), []
    for T in map(int, args.rows.split(",")):
        inputs = {width: torch.randn(T, width).to(dtype) for width in {w.shape[1] for w in plain}}
        for a, b in zip(plain[:4], ways["packed"][:4], strict=True):
            x = inputs[a.shape[1]]
            assert torch.allclose(row_linear(x, a), row_linear(x, b), rtol=0.05, atol=0.5), "another product"
        times: dict[str, list[float]] = {name: [] for name in ways}
        for n in range(args.rounds):
            for name in list(ways)[:: 1 if n % 2 else -1]:
                times[name].append(seconds(ways[name], inputs))
        for name, each in times.items():
            ms = {"median_ms": 1e3 * harness.quantile(each, 0.5), "best_ms": 1e3 * min(each)}
            row = {"linear": name, "dtype": str(dtype)[6:], "rows": T, **ms, "gb_per_s": size / min(each) / 1e9}
            rows.append({**row, "read_gb_per_s": top})
    return rows


def main() -> None:
    (args,) = HfArgumentParser(Args).parse_args_into_dataclasses()
    torch.set_num_threads(args.threads)
    rows = [row for name in args.dtypes.split(",") for row in measure(getattr(torch, name), args)]
    table = Table("dtype", "rows", "linear", "ms, median", "ms, best", "GB/s", "GB/s of a sum")
    for row in rows:
        numbers = [f"{row[name]:.1f}" for name in ("median_ms", "best_ms", "gb_per_s", "read_gb_per_s")]
        table.add_row(row["dtype"], str(row["rows"]), row["linear"], *numbers)
    Console().print(table)
    if args.save:
        print(harness.save("pack", rows))


if __name__ == "__main__":
    main()
