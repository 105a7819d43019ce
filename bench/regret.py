"""Does policy `auto` ever lose to plain decoding, and what does it gain, at one and at several requests at once?

    python bench/regret.py                                                # the bundled pair
    python bench/regret.py --target T.gguf --draft D.gguf --questions bench/coder_prompts.jsonl

A run decodes a batch of prompts, other ones each time, prefill included, in engines that were warmed up once. `ar`,
`ar` again in an engine of its own and every strategy decode the same batch, in an order drawn anew. Reported are the
ratios of `ar`'s seconds to each way's in the same run: the worst of the runs, and the median. The second `ar` tells how
quiet the machine is. Tokens must be those of `ar`, or the bench ends.
"""

import random
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench import harness
from bench.decoding import Decoded, Given, differing, prompts_of
from specker.runtime.control.stats import Stats

PLAIN = "ar"
AGAIN = "ar again"
SEEDED = 1000  # the seeds of a run's texts follow this many after those of the run before


@dataclass(frozen=True)
class Args(Given):
    strategies: str = "draft,vocabtrim,vocabtrim+lookup,lookup,easyspec,diffuspec,del"
    sizes: str = field(default="1,2,4,8", metadata={"help": "requests at once, comma-separated"})
    temperatures: str = "0"
    max_new_tokens: int = 64
    runs: int = 10
    prompts: int = 1000
    threads: int = 2


def batches(prompts: list[list[int]], size: int, runs: int) -> list[list[list[int]]]:
    """The prompts of each run: all of them in turn, mixed, so that a batch has prompts of several kinds."""
    mixed = random.Random(0).sample(prompts, len(prompts))
    return [[mixed[(run * size + i) % len(mixed)] for i in range(size)] for run in range(runs)]


def measured(args: Args, size: int, temperature: float) -> list[dict[str, Any]]:
    """A row for each way."""
    ways = [PLAIN, AGAIN, *(name for name in args.strategies.split(",") if name)]
    engines = {}
    for way in ways:
        engines[way] = args.load(PLAIN if way == AGAIN else way, batch_size=size)
        engines[way].warmup()
    prompts, count = prompts_of(args, engines[PLAIN]), args.max_new_tokens
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    stats, flips, order = {way: Stats() for way in ways}, dict.fromkeys(ways, 0), random.Random(1)
    for run, batch in enumerate(batches(prompts, size, args.runs)):
        how: dict[str, Any] = {"temperature": temperature, "seed": [run * SEEDED + i for i in range(size)]}
        done = {}
        for way in order.sample(ways, len(ways)):
            start = time.perf_counter()
            texts = engines[way].generate(batch, count, **how)
            seconds[way].append(time.perf_counter() - start)
            done[way] = Decoded([text.tokens for text in texts], sum((text.stats for text in texts), Stats()))
            stats[way] += done[way].stats
        for way in ways[1:]:
            for i, prompt in enumerate(batch):
                own, want = (Decoded([done[each].tokens[i]], None) for each in (way, PLAIN))
                flips[way] += differing(engines[way], [prompt], own, want, count, temperature)
    rows = []
    for way in ways:
        over = [plain / own for plain, own in zip(seconds[PLAIN], seconds[way], strict=True)]
        row: dict[str, Any] = {"way": way, "target": args.name, "requests": size, "temperature": temperature}
        row |= {"max_new_tokens": count, "runs": args.runs, "threads": args.threads, "over_ar": sorted(over)}
        row |= {"tokens_per_second": stats[way].tokens / sum(seconds[way]), "flips": flips[way]}
        rows.append(row | {"acceptance_length": stats[way].acceptance_length})
    return rows


def main() -> None:
    args = harness.arguments(Args)
    torch.set_num_threads(args.threads)
    rows = []
    table = Table("way", "requests", "T", "tokens/s", "worst", "second worst", "median", "tokens a round", "flips")
    for temperature in map(float, args.temperatures.split(",")):
        for size in map(int, args.sizes.split(",")):
            for row in measured(args, size, temperature):
                over = row["over_ar"]
                numbers = [f"{x:.2f}" for x in (over[0], over[min(1, len(over) - 1)], harness.quantile(over, 0.5))]
                first = [row["way"], str(size), f"{temperature:g}", f"{row['tokens_per_second']:.1f}"]
                table.add_row(*first, *numbers, f"{row['acceptance_length']:.2f}", str(row["flips"]))
                print(*first, *numbers, f"{row['acceptance_length']:.2f}", flush=True)
                rows.append(row)
    Console().print(table)
    if args.save:
        print(harness.save("regret", rows, args.device))


if __name__ == "__main__":
    main()
