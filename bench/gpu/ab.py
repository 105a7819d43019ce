"""The decode rate with and without programmatic dependent launch (PDL), CUDA graphs and prefetched weights, in turn in
one process.

The case is bench/decode.py's `ar`: one token after another, batch 1, random weights. Each way decodes --rounds tokens,
and the ways take turns until --seconds are over, at least twice; the first turn compiles and captures, and does not
count. All ways compute the same over the same memory; without graphs the host launches the kernels one by one.
"""

import itertools
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench import decode, harness
from bench.decode import Bench
from bench.harness import Timing
from specker.kernels import prefetch, variant
from specker.runtime.round.graphs import Graphs

WAYS = {  # PDL, graphs, MiB of the next matrix that small kernels prefetch (kernels/prefetch.py)
    "neither": (False, False, 0),
    "PDL": (True, False, 0),
    "graphs": (False, True, 0),
    "PDL and graphs": (True, True, 0),
    "8 MiB ahead": (True, True, 8),
    "32 MiB ahead": (True, True, 32),
}


@dataclass(frozen=True)
class Args:
    case: str = field(default="ar 8b 8192", metadata={"help": "a case of bench/decode.py that decodes plainly"})
    rounds: int = field(default=40, metadata={"help": "tokens of each way and turn"})
    seconds: float = field(default=60, metadata={"help": "after which no turn begins"})
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: str = "bfloat16" if torch.cuda.is_available() else "float32"
    save: bool = harness.save_flag()


def compared(args: Args) -> list[dict[str, Any]]:
    """A row for each way. ValueError for an unknown case."""
    case = next((case for case in decode.CASES if case.name == args.case and case.kind == "ar"), None)
    if case is None:
        raise ValueError(f"no case is called {args.case!r}")
    start = time.monotonic()
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(decode.Args(rounds=args.rounds, device=args.device, dtype=args.dtype), Path(folder))
        engine = bench.engine(case)
        graphs = {way: bench.graphs(engine) if captures else Graphs() for way, (_, captures, _) in WAYS.items()}
        order, before = list(WAYS), (variant.PDL, prefetch.MEBIBYTES)
        try:
            for turn in itertools.count():
                if turn > 2 and time.monotonic() - start > args.seconds:
                    break
                for way in order:
                    variant.PDL, _, prefetch.MEBIBYTES = WAYS[way]
                    engine.loop.graphs = graphs[way]
                    done = decode.decode(bench, engine, case.context, False)
                    seconds[way] += done.timing.seconds if turn else ()
                order = order[1:] + order[:1]
        finally:
            variant.PDL, prefetch.MEBIBYTES = before
    timings = {way: Timing(tuple(times), None) for way, times in seconds.items()}
    times = harness.ratios(timings)
    about = {"bench": "ab", "case": case.name, "dtype": args.dtype, "device": args.device, "remarks": engine.remarks}
    return [{**about, "way": way, **timing.row(), "times": times[way]} for way, timing in timings.items()]


def main() -> None:
    args = harness.arguments(Args)
    try:
        rows = compared(args)
    except ValueError as error:
        sys.exit(f"bench: {error}")
    for row in rows:
        print(f"{row['way']:<16} {row['median'] * 1e3:.3f} ms a token, {row['times']:.3f} times as fast as neither")
    if args.save:
        print(harness.save("ab", rows, args.device))


if __name__ == "__main__":
    main()
