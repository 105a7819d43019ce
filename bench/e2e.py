"""End to end: the gain from speculation and the overhead of the runtime, on any pair.

    python bench/e2e.py                                                      # the bundled family, its held-out prompts
    python bench/e2e.py --target DIR --questions bench/spec_bench.jsonl --ways ar,lookup,del
    python bench/e2e.py --target DIR --draft DIR --questions FILE --categories summarization,rag
    python bench/e2e.py --repeats 10 --rounds 1 --prompts 8                  # how steady the strategies are
    python bench/e2e.py --repeats 10 --rounds 1 --prompts 8 --batch-size 4   # of four texts at once
    python bench/e2e.py --target FILE.gguf --draft FILE.gguf --questions bench/coder_prompts.jsonl --transformers false
    python bench/e2e.py --shape 8b --device cuda --dtype bfloat16 --transformers false   # with a real model's times

One process decodes the prompts: held-out code for the bundled family, otherwise the first turns of `--questions`, or
its conversations (`messages`), through the target's chat template; a `prompt` is continued as it is. The configurations
take turns at every prompt, or at every group of `--batch-size` prompts; medians of rounds are reported.
Configurations: `ar`, `draft`, chains and trees of it, every other strategy with its defaults, transformers' `generate`,
its assisted generation with the models of `draft` and its prompt lookup, in the same dtype. A strategy that needs a
checkpoint or a file that is neither given nor bundled is left out. Speedup over `ar` should be

    tau / (k * c + v)      tau: acceptance length, k: draft tokens, c: a draft step over a target step,
                           v: a verify pass (with accept and commit) over a target step

so c, v and the predicted speedup are printed with the measured one. Tokens must equal those of `ar` (in float32, ties
within rounding are allowed and counted). A configuration that fails this or cannot run here has a row with the reason
and no times. Distinct 4-grams are printed because looping text raises acceptance.
"""

import dataclasses
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rich.console import Console

from bench import harness
from bench.decoding import (
    HF,
    Decoded,
    Given,
    Transformers,
    WrongTokens,
    measured,
    prompts_of,
    row_of,
    share_target,
)
from bench.papers.models import HYBRID, MEMBERS, family, shape_of
from specker.checkpoints.checkpoint import read_config
from specker.runtime.control.stats import Stats
from specker.runtime.engine import Engine

SHAPES: dict[str, dict[str, Any]] = {
    "ar": {"strategy": "ar"},
    "ar again": {"strategy": "ar"},  # how far it is from 1 is noise
    "draft": {},
    "draft chain 2": {"draft_tokens": 2},
    "draft chain 3": {"draft_tokens": 3},
    "draft chain 4": {"draft_tokens": 4},
    "draft tree 2x4": {"tree": "2x4"},
    "draft tree 4x4": {"tree": "4x4"},
    **{name: {"strategy": name} for name in ("vocabtrim", "easyspec", "diffuspec", "del", "del+vocabtrim", "lookup")},
    **{name: {"strategy": name} for name in ("draft+lookup", "vocabtrim+lookup")},
    **{name: {"strategy": name} for name in ("mtp", "mtp+lookup")},
}
NAMED = ("mtp", "mtp+lookup")  # only with targets that have a head for them, so only if --ways names them


@dataclass(frozen=True)
class Args(Given):
    ways: str = field(default="", metadata={"help": "comma-separated: only these configurations"})
    rounds: int = 5
    repeats: int = field(
        default=1, metadata={"help": "runs with new engines, which have to learn again what drafts cost and achieve"}
    )
    batch_size: int = field(default=1, metadata={"help": "prompts that are decoded at once"})
    shape: str = field(
        default="",
        metadata={"help": f"inflate the bundled family, or --target {HYBRID}, to a real model's shape, such as 8b"},
    )
    temperatures: str = field(default="0,0.7", metadata={"help": "comma-separated"})
    transformers: bool = field(default=True, metadata={"help": "time transformers' generate too"})

    @property
    def rows(self) -> str:
        """The name of the file of its rows."""
        return "e2e" if self.repeats == 1 else "e2e_repeats"

    @property
    def models(self) -> Given:
        return family(self, self.shape, MEMBERS) if self.shape else self


def distinct4(texts: Sequence[list[int]]) -> float:
    """Distinct 4-grams of tokens within each text, over all 4-grams."""
    grams = [[tuple(t[i : i + 4]) for i in range(len(t) - 3)] for t in texts]
    return sum(len(set(g)) for g in grams) / max(1, sum(map(len, grams)))


def bench(args: Args, temperature: float, engines: dict[str, Engine], prompts: list[list[int]], hf: Any) -> list[dict]:
    size = args.batch_size
    groups = [prompts[i : i + size] for i in range(0, len(prompts), size)]
    ways: dict[str, Any] = {name: partial(together, e, args, temperature) for name, e in engines.items()}
    for name, how in hf.ways().items() if hf is not None else ():
        if wanted(name, args) and (size == 1 or name == "transformers generate"):  # the others take one text
            ways[name] = lambda group, how=how: hf.decode(group, temperature, size, **how)
    about = about_of(args) | {"temperature": temperature}
    reasons = {name: reason for name, way in ways.items() if (reason := reason_not(lambda w=way: w(groups[0])))}
    ways = {name: way for name, way in ways.items() if name not in reasons}
    timings = measured(ways, groups, args.rounds)
    step = _step(timings["ar"].last.stats)
    rows = []
    for name, timing in timings.items():
        done: Decoded = timing.last
        try:
            row = row_of("e2e", name, temperature, args, timings, engines.get(name), prompts) | about
        except WrongTokens as error:
            reasons[name] = str(error)
            continue
        row["distinct_4grams"] = distinct4(done.tokens)
        if (s := done.stats) is not None:
            row["accepted_per_position"] = s.accepted_per_position
            if s.drafted:
                k = s.drafted / s.rounds
                c, v = s.seconds["draft"] / s.drafted / step, _step(s) / step
                row |= {"k": k, "c": c, "v": v, "predicted": s.acceptance_length / (k * c + v)}
        rows.append(row)
    return rows + [{**about, "way": name, "reason": reason} for name, reason in reasons.items()]


def about_of(args: Args) -> dict[str, Any]:
    """The fields that all rows of a run share."""
    models = {} if args.target is None else {"target": args.name, "categories": args.categories}
    models |= {"target": f"{args.target or 'code-target'} as {args.shape}"} if args.shape else {}
    weights = {"quantize": args.quantize} if args.quantize else {}
    batch = {"batch_size": args.batch_size} if args.batch_size > 1 else {}
    return {"bench": "e2e", **models, "dtype": args.dtype, **weights, **batch, "device": args.device}


def together(engine: Engine, args: Args, temperature: float, prompts: list[list[int]]) -> Decoded:
    done = engine.generate(prompts, args.max_new_tokens, temperature=temperature)
    return Decoded([each.tokens for each in done], sum((each.stats for each in done), Stats()))


def wanted(way: str, args: Args) -> bool:
    return way == "ar" or way in args.ways.split(",") or (not args.ways and way not in NAMED)


def engines_of(args: Args) -> dict[str, Engine]:
    """An engine for each configuration that the given or bundled files allow."""
    engines: dict[str, Engine] = {}
    models = args.models
    for name, shape in SHAPES.items():
        options: dict[str, Any] = {"strategy": "draft", **shape}
        alone = options["strategy"].split("+")[0] in ("ar", "del", "lookup", "mtp")
        if not wanted(name, args) or not (alone or models.draft_of(options["strategy"])):
            continue
        engines[name] = models.load(**options, batch_size=args.batch_size)
        share_target([engines["ar"], engines[name]])  # at once: memory need not hold a target for each
    return engines


def reason_not(call: Callable[[], Any]) -> str:
    """Why `call` fails on this machine, with a traceback on stderr; "" if it succeeds."""
    try:
        call()
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}".split("\n")[0]
    return ""


def _step(stats: Stats) -> float:
    """Seconds of a round outside prefill and drafting."""
    return sum(stats.seconds[name] for name in ("verify", "accept", "commit")) / stats.rounds


def show(rows: list[dict], temperature: float) -> None:
    speeds = ("way", "tokens/s", "over ar", "predicted")
    about = ("tokens/round", "drafts/round", "draft step / ar", "verify / ar", "distinct 4-grams", "differ")
    table = harness.table_of(temperature, (*speeds, *about))

    def number(row: dict, key: str, digits: int) -> str:
        return f"{row[key]:.{digits}f}" if key in row else ""

    for row in rows:
        if "reason" in row:
            table.add_row(row["way"], *[""] * 8, row["reason"])
            continue
        table.add_row(
            row["way"],
            f"{row['tokens_per_second']:.0f}",
            f"{row['over_ar']:.2f}",
            *(number(row, key, 2) for key in ("predicted", "acceptance_length", "k", "c", "v", "distinct_4grams")),
            str(row.get("differing_within_rounding", "")),
        )
    Console(width=140).print(table)


def show_repeats(rows: Sequence[dict[str, Any]], temperature: float) -> None:
    """The speed over `ar` in each run."""
    speeds: dict[str, list[float]] = {}
    for row in rows:
        if "over_ar" in row and row["temperature"] == temperature:
            speeds.setdefault(row["way"], []).append(row["over_ar"])
    table = harness.table_of(temperature, ("way", "least", "median", "most", "over ar in each run"))
    for way, values in speeds.items():
        each = " ".join(f"{value:.2f}" for value in values)
        table.add_row(way, *(f"{harness.quantile(values, q):.2f}" for q in (0, 0.5, 1)), each)
    Console(width=140).print(table)


def run(args: Args, hf: Any, about: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a run with new engines, which are saved after each temperature, so that an interrupt keeps them."""
    engines = engines_of(args)
    plain = engines["ar"]
    rows, warmups = [], {}
    for name, engine in list(engines.items()):
        start = time.perf_counter()
        if reason := reason_not(engine.warmup):  # as the commands do before the first text
            rows.append(about_of(args) | {"way": name, "reason": reason} | about)
            del engines[name]
        warmups[name] = {"warmup_seconds": time.perf_counter() - start}
    if args.save and rows:
        harness.save(args.rows, rows, args.device)
    prompts = prompts_of(replace(args, target=None) if args.shape else args, plain)
    for temperature in map(float, args.temperatures.split(",")):
        if "ar" not in engines:  # no baseline
            break
        new = [row | about | warmups.get(row["way"], {}) for row in bench(args, temperature, engines, prompts, hf)]
        show(new, temperature)
        rows += new
        if args.save:
            print(harness.save(args.rows, new, args.device))
    return rows


def main() -> None:
    args = harness.arguments(Args)
    if unknown := set(args.ways.split(",")) - {"", *SHAPES, *HF}:
        sys.exit(f"bench: --ways has {', '.join(sorted(unknown))}; there are {', '.join((*SHAPES, *HF))}")
    if args.shape and (args.target not in (None, HYBRID) or args.transformers):
        sys.exit(f"bench: --shape takes no --target but {HYBRID}, and --transformers false")
    if args.shape:
        try:
            shape_of(args.shape)
        except ValueError as error:
            sys.exit(f"bench: {error}")
    for name in ("repeats", "batch_size"):
        if getattr(args, name) < 1:
            sys.exit(f"bench: --{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    hf = Transformers(args, read_config(args.source).eos_ids) if args.transformers else None
    rows = []
    for n in range(args.repeats):
        rows += run(args, hf, {"bench": args.rows, "repeat": n} if args.repeats > 1 else {})
    if args.repeats > 1:
        for temperature in map(float, args.temperatures.split(",")):
            show_repeats(rows, temperature)
    if not args.save:
        print(json.dumps(dataclasses.asdict(args)))
    failed = dict.fromkeys(row["way"] for row in rows if "reason" in row)
    if failed:
        sys.exit(f"bench: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
