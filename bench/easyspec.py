"""Layer-parallel drafting with a deep draft: tree width x layers in a group x calibration, on the bundled pair or, with
--target and --questions, on another one.

For each: acceptance length, speed, median time of a drafting forward, and the cosine between the fuzzy hidden rows and
those of the layers in sequence (same tokens after the same exact prefix). Chain and trees are also compared at equal
budgets. All configurations of a temperature take turns; rows go to bench/results/<machine>/easyspec.jsonl.
"""

import dataclasses
import statistics
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch.nn import functional as F

from bench import harness
from bench.ablations import Uncalibrated, drafting_as
from bench.decoding import Given, measured, prompts_of, row_of, share_target, ways_of
from specker.model.decoder import forward
from specker.model.prefill import prefill
from specker.runtime.engine import Engine
from specker.runtime.strategies.easyspec.layer_groups import LayerParallel, Schedule
from specker.runtime.strategies.model_drafter import AutoregressiveDrafter


@dataclass(frozen=True)
class Args(Given):
    prompts: int = field(default=6, metadata={"help": "prompts"})
    max_new_tokens: int = 48
    widths: str = "1,4,8,12"
    depth: int = 5
    parallel: str = field(default="1,2,3,4,5", metadata={"help": "layers in a group; 1 drafts in sequence"})
    equal: int = field(default=8, metadata={"help": "nodes of the chain and of the capped trees that are compared"})
    temperatures: str = "0,0.7"
    rounds: int = 2


CALIBRATIONS = {"every": AutoregressiveDrafter, "never": Uncalibrated}


def shape(width: int, depth: int) -> dict[str, Any]:
    return {"draft_tokens": depth} if width == 1 else {"tree": f"{width}x{depth}"}


def load(args: Args, calibrate: str = "every", **options: Any) -> Engine:
    """Without graphs on a GPU too, so that forwards can be timed; kernels/bench_layer_group.py times a group with
    graphs."""
    with drafting_as(CALIBRATIONS[calibrate]):
        return args.load("easyspec", graphs="off", **options)


def timed_forward(engine: Engine, times: list[float]) -> None:
    """Append the seconds of every fuzzy forward of the engine's drafter to `times`."""
    parallel = engine.drafter.parallel  # type: ignore[union-attr]
    inner = parallel.forward

    def outer(*args: Any) -> torch.Tensor:
        harness.wait()
        start = time.perf_counter()
        hidden = inner(*args)
        harness.wait()
        times.append(time.perf_counter() - start)
        return hidden

    parallel.forward = outer


@torch.inference_mode()
def cosine(args: Args, texts: list[list[int]], width: int) -> float:
    """Mean cosine of fuzzy and exact final rows of a chain of four draft tokens, at every eighth position."""
    drafter: AutoregressiveDrafter = load(args, layer_parallel=str(width)).drafter  # type: ignore[assignment]
    model, cache = drafter.model, drafter.cache
    parallel = LayerParallel(model, cache, Schedule.parallel(len(model.layers), width))
    found = []
    for text in texts:
        cache.take(0, len(text))
        for start in range(16, len(text) - 4, 8):
            rows = torch.tensor(text[start : start + 4], device=model.device)
            pair = []
            for fuzzy in (True, False):
                cache.truncate(0)
                prefill(model, cache, text[:start])
                run = parallel.forward if fuzzy else partial(forward, model, cache)
                places = [cache.after([start + i], [1]) for i in range(4)]
                hidden = [run(place, model.embed_tokens(rows[i : i + 1])).hidden for i, place in enumerate(places)]
                pair.append(torch.cat(hidden).float())
            found += F.cosine_similarity(*pair, dim=-1).tolist()
        cache.release(0)
    return statistics.mean(found)


def bench(
    args: Args, temperature: float, engines: dict[str, Engine], about: dict[str, dict], prompts: Any
) -> list[dict]:
    times: dict[str, list[float]] = {name: [] for name in engines}
    for name, engine in engines.items():
        if getattr(engine.drafter, "parallel", None) is not None:
            timed_forward(engine, times[name])
    timings = measured(ways_of(engines, args, temperature), prompts, args.rounds)
    rows = []
    for name, timing in timings.items():
        stats = timing.last.stats
        row = row_of("easyspec", name, temperature, args, timings, engines[name], prompts)
        row |= {"draft_share": stats.seconds["draft"] / stats.wall, **about[name]}
        if times[name]:
            row["forward"] = statistics.median(times[name])
        rows.append(row)
    for row in rows:  # compared with the same shape drafted in sequence
        for base in rows:
            if base.get("parallel") == 1 and row.get("shape") == base.get("shape"):
                row["of_sequential"] = row["acceptance_length"] / base["acceptance_length"]
                if "forward" in row and "forward" in base:
                    row["forward_speedup"] = base["forward"] / row["forward"]
    return rows


def show(rows: list[dict], temperature: float) -> None:
    columns = ("way", "tokens/s", "over ar", "tau", "of N 1", "forward, us", "x N 1", "cosine", "draft share")
    table = harness.table_of(temperature, columns)

    def text(row: dict, key: str, form: str) -> str:
        return format(row[key], form) if key in row else ""

    for row in rows:
        table.add_row(
            row["way"],
            text(row, "tokens_per_second", ".0f"),
            text(row, "over_ar", ".2f"),
            text(row, "acceptance_length", ".2f"),
            text(row, "of_sequential", ".1%"),
            f"{row['forward'] * 1e6:.0f}" if "forward" in row else "",
            text(row, "forward_speedup", ".2f"),
            text(row, "cosine", ".3f"),
            text(row, "draft_share", ".0%"),
        )
    Console(width=120).print(table)


def main() -> None:
    args = harness.arguments(Args)
    numbers = [[int(n) for n in text.split(",")] for text in (args.widths, args.parallel)]
    engines = {name: args.load(name) for name in ("ar", "draft")}
    about: dict[str, dict] = {"ar": {}, "draft": {}}
    every = prompts_of(dataclasses.replace(args, prompts=10**6), engines["ar"])
    texts = [engines["ar"].generate(ids, 48, temperature=0.7).tokens for ids in every[-4:]]
    near = {n: cosine(args, texts, n) for n in numbers[1]}
    for width in numbers[0]:
        for parallel in numbers[1]:
            for calibrate in CALIBRATIONS:
                if (parallel, calibrate) == (1, "never"):
                    continue  # layers in sequence need no calibration
                name = f"{width}x{args.depth} N {parallel} {calibrate}"
                how = {"layer_parallel": str(parallel), **shape(width, args.depth)}
                engines[name] = load(args, calibrate, **how)
                share_target(list(engines.values()))
                about[name] = {"width": width, "shape": f"{width}x{args.depth}", "parallel": parallel}
                about[name] |= {"calibrate": calibrate, "cosine": near[parallel]}
    for width in numbers[0]:
        name = f"{args.equal} nodes of width {width}, N 4"
        depth = args.equal if width == 1 else args.depth
        how = {**shape(width, depth), "draft_tokens": args.equal, "layer_parallel": "4"}
        engines[name] = load(args, **how)
        share_target(list(engines.values()))
        about[name] = {"width": width, "cap": args.equal, "parallel": 4, "calibrate": "every"}
    prompts = every[: args.prompts]
    harness.report("easyspec", args, lambda temperature: bench(args, temperature, engines, about, prompts), show)


if __name__ == "__main__":
    main()
