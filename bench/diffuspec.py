"""A diffusion drafter on held-out prompts of the bundled pair: path search x length policy.

Search: off (argmax), chain (the best path), tree (the best paths as one trie). Length: ADL with the paper's 20..30 and
with a range that suits small models, chunks, fixed blocks. For comparison: `ar`, the sequential `draft`, the exact
prefix and a trimmed head. All take turns. MAT is the acceptance length without the target's own token, as in the paper.
Rows and a picture go to bench/results/<machine>/diffuspec.jsonl and .svg.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console
from transformers import HfArgumentParser

import specker
from bench import harness
from bench.ablations import ExactPrefix, drafting_as
from bench.e2e import differing, ours, row_of, share_target
from specker.runtime.engine import Engine
from specker.runtime.strategies.diffuspec.drafter import DiffusionDrafter

SEARCHES = ("off", "chain", "tree")


@dataclass
class Args:
    prompts: int = field(default=8, metadata={"help": "held-out prompts"})
    max_new_tokens: int = 64
    temperatures: str = "0,0.7"
    fixed: str = field(default="3,4,8,16,24", metadata={"help": "block lengths, comma separated"})
    adl: str = field(default="20-30,3-8", metadata={"help": "ranges of the adaptive length, comma separated"})
    chunk: str = field(default="4:0.5", metadata={"help": "tokens a pass, probability to go on; comma separated"})
    rounds: int = 3
    save: bool = True
    device: str = "cpu"
    dtype: str = "float32"


def lengths(args: Args) -> dict[str, dict[str, Any]]:
    """The length policies by name."""
    ways: dict[str, dict[str, Any]] = {f"k {k}": {"draft_tokens": int(k)} for k in args.fixed.split(",")}
    ways |= {f"adl {span}": {"policy": "adl", "adl": span} for span in args.adl.split(",")}
    return ways | {f"chunk {chunk}": {"policy": "chunk", "chunk": chunk} for chunk in args.chunk.split(",")}


def share_drafter(engine: Engine, base: Engine) -> None:
    """All engines share one diffusion model and cache, since they decode in turn."""
    mine, other = engine.drafter, base.drafter
    assert isinstance(mine, DiffusionDrafter) and isinstance(other, DiffusionDrafter)
    mine.model, mine.cache, mine.head = other.model, other.cache, other.head
    engine.draft = base.draft


def bench(args: Args, temperature: float, engines: dict[str, Engine], about: dict[str, dict], prompts: Any) -> list:
    ways: dict[str, Any] = {
        name: lambda e=engine: ours(e, prompts, args.max_new_tokens, temperature) for name, engine in engines.items()
    }
    timings = harness.measure(ways, args.rounds)
    plain = timings["ar"].last
    rows = []
    for name, timing in timings.items():
        done = timing.last
        stats, wall = done.stats, done.stats.wall
        row = row_of("diffuspec", name, temperature, args, timings) | about[name]
        row |= {"acceptance_length": stats.acceptance_length, "mat": stats.acceptance_length - 1}
        row |= {"seconds": {stage: seconds / wall for stage, seconds in stats.seconds.items()}}
        if stats.found:
            row |= {"diffusion": stats.diffusion, "search_of_round": stats.seconds["search"] / wall}
        if engines[name].strategy != "ar":
            how = {"temperature": temperature}
            row["differing_within_rounding"] = differing(engines[name], prompts, done, plain, args, how)
        rows.append(row)
    return rows


def show(rows: list[dict], temperature: float) -> None:
    columns = ("way", "tokens/s", "over ar", "tau", "MAT", "k", "L_gen", "width", "draft", "search", "verify")
    table = harness.table_of(temperature, columns)
    for row in rows:
        found, share = row.get("diffusion"), row["seconds"]
        table.add_row(
            row["way"],
            f"{row['tokens_per_second']:.0f}",
            f"{row['over_ar']:.2f}",
            f"{row['acceptance_length']:.2f}",
            f"{row['mat']:.2f}",
            *((f"{found[name]:.1f}" for name in ("k", "L_gen", "lattice_width")) if found else ("", "", "")),
            f"{share['draft']:.0%}",
            f"{share['search']:.1%}" if found else "",
            f"{share['verify']:.0%}",
        )
    Console(width=120).print(table)


def draw(rows: list[dict], title: str) -> Any:
    """Acceptance length and speed per length policy, with a bar per search; one row of panels per temperature."""
    from matplotlib.figure import Figure

    temperatures = sorted({row["temperature"] for row in rows})
    figure = Figure(figsize=(13, 3.4 * len(temperatures)), layout="constrained")
    figure.suptitle(title, fontsize=10)
    panels = (("acceptance_length", "acceptance length"), ("over_ar", "x ar"))
    for axes, temperature in zip(figure.subplots(len(temperatures), 2, squeeze=False), temperatures, strict=True):
        mine = [row for row in rows if row["temperature"] == temperature and "search" in row]
        names = list(dict.fromkeys(row["length"] for row in mine))
        for axis, (key, label) in zip(axes, panels, strict=True):
            for n, search in enumerate(SEARCHES):
                bars = [(names.index(r["length"]) + 0.27 * (n - 1), r[key]) for r in mine if r["search"] == search]
                axis.bar(*zip(*bars, strict=True), width=0.25, label=f"search {search}")
            axis.axhline(1, color="grey", linewidth=0.8)
            axis.set_xticks(range(len(names)), names, fontsize=8)
            axis.set_ylabel(f"{label}, T {temperature:g}", fontsize=9)
        axes[0].legend(fontsize=7)
    return figure


def main() -> None:
    args = HfArgumentParser(Args).parse_args_into_dataclasses()[0]
    heldout = [row["prompt"] for row in specker.zoo.heldout()]
    how = {"device": args.device, "dtype": args.dtype, "prefix_cache": "off"}
    engines = {"ar": specker.load(strategy="ar", **how), "draft": specker.load(strategy="draft", **how)}
    about: dict[str, dict] = {"ar": {}, "draft": {}}
    base = None

    def add(
        name: str, more: dict[str, Any], strategy: str = "diffuspec", kind: Any = DiffusionDrafter, **facts: Any
    ) -> None:
        nonlocal base
        with drafting_as(kind):
            engines[name] = specker.load(strategy=strategy, **how, **more)
        share_target(list(engines.values()))
        about[name] = facts
        if strategy == "diffuspec":
            base = base or engines[name]
            share_drafter(engines[name], base)

    for length, options in lengths(args).items():
        for search in SEARCHES:
            add(f"{length} {search}", {"cps": search, **options}, search=search, length=length)
    add("default", {})
    add("default, exact prefix", {}, kind=ExactPrefix)
    add("default, trimmed head", {}, "diffuspec+vocabtrim")
    add("k 8 chain, lambda 0.5", {"cps": "chain", "draft_tokens": 8})
    paper: Any = engines["k 8 chain, lambda 0.5"].drafter
    paper.search = replace(paper.search, weight=0.5)
    prompts = [engines["ar"].encode(text) for text in heldout[: args.prompts]]
    harness.report("diffuspec", args, lambda temperature: bench(args, temperature, engines, about, prompts), show, draw)


if __name__ == "__main__":
    main()
