"""The cost of `--reduce ordered`: sums by all-reduce, against gathering and adding in the order of ranks; and on a CPU,
those through memory that the ranks share, which are ordered too.

    torchrun --nproc-per-node 2 bench/reduce.py [--device cuda] [--rounds 50]

A target's layer has two such sums over [T, E]. Ordered sends (R - 1) T E elements to each rank, a ring all-reduce
2 (R - 1) / R T E, so latency matters for few rows and bandwidth for many. Times are rank 0's, from call to result; rows
go to bench/results/<machine>/reduce.jsonl.
"""

import json
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.table import Table

from bench import harness
from specker.runtime import strategies
from specker.runtime.ranks import dist

SHAPES = ((1, 4096), (8, 4096), (64, 4096), (8, 8192), (64, 8192))


@dataclass
class Args:
    device: str = "cpu"
    dtype: str = "float32"
    rounds: int = 50
    save: bool = harness.save_flag()


def main() -> None:
    args = harness.arguments(Args)
    torch.set_num_threads(1)
    device = dist.own_device(torch.device(args.device))
    ranks = dist.join(strategies.options(), device)
    if ranks is None:
        raise SystemExit("reduce: there is one process; start it with torchrun --nproc-per-node 2 bench/reduce.py")
    fast = replace(ranks, ordered=False, communicator=None)
    each = {"fast": fast, "ordered": replace(fast, ordered=True)}
    if ranks.communicator is not None:
        each["memory"] = ranks
    rows = []
    for T, E in SHAPES:
        x = torch.randn(T, E, device=device, dtype=getattr(torch, args.dtype))
        ways = {name: lambda x=x, by=by: by.sum(x.clone()) for name, by in each.items()}
        timings = harness.measure(ways, args.rounds, warmup=5)
        sums = [timings[name].last for name in ways]
        bound = 8 * torch.finfo(x.dtype).eps * sums[0].abs().max()
        assert all((other - sums[0]).abs().max() <= bound for other in sums), "the sums differ"
        cost = timings["fast"].times_as_fast(timings["ordered"])
        for name, timing in timings.items():
            row = {"bench": "reduce", "way": name, "rows": T, "width": E, "ranks": fast.size, "dtype": args.dtype}
            rows.append(row | timing.row() | {"ordered_over_fast": cost["median"]})
    if fast.rank == 0:
        table = Table(title=f"sums over {fast.size} ranks, {harness.machine(args.device)}, {args.dtype}")
        for column in ("rows x width", *(f"{name}, us" for name in each), "ordered over fast"):
            table.add_column(column, justify="right")
        for own in (rows[n : n + len(each)] for n in range(0, len(rows), len(each))):
            times = (f"{row['median'] * 1e6:.0f}" for row in own)
            table.add_row(f"{own[0]['rows']} x {own[0]['width']}", *times, f"{own[0]['ordered_over_fast']:.2f}")
        Console(width=100).print(table)
        print(harness.save("reduce", rows, args.device) if args.save else json.dumps(rows[-1]))
    dist.leave(0)


if __name__ == "__main__":
    main()
