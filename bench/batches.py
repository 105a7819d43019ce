"""Total tokens per second of `ar` and of `draft` for several batch sizes, and of transformers' batched `generate` with
the same target.

All prompts are decoded to the same length. The configurations take turns; medians of rounds are reported. Tokens must
equal plain decoding one by one (in float32 ties within rounding are allowed and counted), or the bench ends.

A step reads every weight once for any batch. While memory bandwidth is the limit, B sequences therefore cost as much as
one. Speculation uses the same idle arithmetic, so it gains less in larger batches. The bundled target's weights (22 MB
in float32) fit into a CPU's caches, where arithmetic is the limit from a few rows on.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench import harness
from bench.decoding import Decoded, Given, Transformers, differing, ours, prompts_of
from specker.runtime.control.stats import Stats
from specker.runtime.engine import Engine

WAYS: dict[str, dict[str, Any]] = {"ar": {}, "draft": {"draft_tokens": 4}}


@dataclass(frozen=True)
class Args(Given):
    sizes: str = field(default="1,2,4,8", metadata={"help": "batch sizes, comma-separated"})
    max_new_tokens: int = 64
    rounds: int = 5
    temperature: float = 0.0
    threads: int = 2
    transformers: bool = field(default=True, metadata={"help": "time transformers' generate too"})


def together(engine: Engine, prompts: list[list[int]], args: Args) -> Decoded:
    done = engine.generate(prompts, args.max_new_tokens, temperature=args.temperature)
    return Decoded([each.tokens for each in done], sum((each.stats for each in done), Stats()))


def main() -> None:
    args = harness.arguments(Args)
    torch.set_num_threads(args.threads)
    plain = args.load("ar")
    prompts, count = prompts_of(args, plain), args.max_new_tokens
    want = ours(plain, prompts, count, args.temperature)
    engines: dict[str, Engine] = {}
    ways: dict[str, Any] = {}
    cases = [(way, size) for way in WAYS for size in map(int, args.sizes.split(","))]
    for way, size in cases:
        engines[f"{way} B {size}"] = engine = args.load(way, batch_size=size, **WAYS[way])
        ways[f"{way} B {size}"] = partial(together, engine, prompts, args)
    if args.transformers:
        hf = Transformers(args, (), drafts=False)
        for size in map(int, args.sizes.split(",")):
            cases.append(("transformers", size))
            ways[f"transformers B {size}"] = partial(hf.decode, prompts, args.temperature, size, min_new_tokens=count)
    timings = harness.measure(ways, args.rounds)
    first = next(iter(timings.values()))
    rows = []
    table = Table("way", "tokens/s", "over ar B 1", "p20", "p80", "acceptance length", "flips")
    for (name, timing), (way, size) in zip(timings.items(), cases, strict=True):
        done: Decoded = timing.last
        row: dict[str, Any] = {"way": way, "batch_size": size, "prompts": len(prompts), **timing.row()}
        row |= {"temperature": args.temperature, "max_new_tokens": count, "over_ar_1": timing.times_as_fast(first)}
        row |= {"tokens": done.count, "tokens_per_second": done.count / timing.median}
        if done.stats is not None:
            row["acceptance_length"] = done.stats.acceptance_length
            row["flips"] = differing(engines[name], prompts, done, want, count, args.temperature)
        rows.append(row)
        numbers = [f"{row['over_ar_1'][n]:.2f}" for n in ("median", "p20", "p80")]
        more = [f"{row.get('acceptance_length', 1):.2f}", str(row.get("flips", ""))]
        table.add_row(name, f"{row['tokens_per_second']:.0f}", *numbers, *more)
    Console().print(table)
    if args.save:
        print(harness.save("batches", rows, args.device))


if __name__ == "__main__":
    main()
