"""A drafter of blocks: path search x length policy, for the bundled diffusion drafter or another one.

    python bench/blocks.py
    python bench/blocks.py --strategy dflash --draft FOLDER --fixed 7 --adl 1-7      # see train/head

Search: off (the argmax of each position), chain (the best path), tree (the most probable beginnings of paths); the
other ones change a number of the search. Length: ADL with the paper's 20..30 and with a range that suits small models,
fixed blocks. For comparison: `ar`, the sequential `draft`, and of diffuspec the exact prefix and a trimmed
head. All take turns. MAT is the acceptance length without the target's own token, as in the paper; tokens and verified
rows of a round are those of rounds that draft, which do not depend on the machine. `--save` appends rows to
bench/results/<machine>/blocks.jsonl.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console

from bench import harness
from bench.ablations import ExactPrefix, drafting_as
from bench.decoding import Given, measured, prompts_of, row_of, share_target, ways_of
from specker.runtime.engine import Engine
from specker.runtime.strategies.blocks import AdaptiveLength
from specker.runtime.strategies.diffuspec.diffusion_drafter import DiffusionDrafter

SEARCHES: dict[str, tuple[str, dict[str, Any]]] = {  # the flag, and what differs from the usual `Search`
    "off": ("off", {}),
    "chain": ("chain", {}),
    "tree": ("tree", {}),
    "chain, lambda 0.5": ("chain", {"weight": 0.5}),  # the paper's
    "tree without n-grams": ("tree", {"ngram": None}),
    "narrow tree": ("tree", {"nodes": 1}),  # as many tokens as the block
    "narrow tree without n-grams": ("tree", {"nodes": 1, "ngram": None}),
}


@dataclass(frozen=True)
class Args(Given):
    strategy: str = "diffuspec"
    prompts: int = field(default=8, metadata={"help": "prompts"})
    max_new_tokens: int = 64
    temperatures: str = "0,0.7"
    searches: str = field(default="off|chain|tree", metadata={"help": f"separated by |: {', '.join(SEARCHES)}"})
    fixed: str = field(default="3,4,8,16,24", metadata={"help": "block lengths, comma separated"})
    adl: str = field(default="20-30,3-8", metadata={"help": "ranges of the adaptive length, comma separated"})
    always: bool = field(default=False, metadata={"help": "adl drafts whether it pays or not"})
    rounds: int = 3


def lengths(args: Args) -> dict[str, dict[str, Any]]:
    """The length policies by name."""
    fixed, adl = (filter(None, text.split(",")) for text in (args.fixed, args.adl))
    ways: dict[str, dict[str, Any]] = {f"k {k}": {"draft_tokens": int(k)} for k in fixed}
    return ways | {f"adl {span}": {"policy": "adl", "adl": span} for span in adl}


def engines_of(args: Args) -> tuple[dict[str, Engine], dict[str, dict[str, str]]]:
    """An engine for each configuration, and the search and the length of those that vary."""
    engines = {"ar": args.load("ar")}
    if args.strategy == "diffuspec" and args.draft_of("draft"):
        engines["draft"] = args.load("draft")
    about: dict[str, dict[str, str]] = {}
    base: Any = None

    def add(name: str, search: dict[str, Any], kind: Any = DiffusionDrafter, trim: str = "", **options: Any) -> None:
        nonlocal base
        with drafting_as(kind):
            engines[name] = args.load(args.strategy + trim, **options)
        drafter: Any = engines[name].drafter
        if search:
            drafter.search = replace(drafter.search, **search)
        if args.strategy == "diffuspec" and not trim:  # one diffusion model and cache, since engines decode in turn
            base = base or engines[name]
            drafter.model, drafter.cache, drafter.head = (getattr(base.drafter, n) for n in ("model", "cache", "head"))
            engines[name].draft = base.draft
        share_target(list(engines.values()))

    for length, options in lengths(args).items():
        for search in args.searches.split("|"):
            cps, changes = SEARCHES[search]
            add(f"{length} {search}", changes, cps=cps, **options)
            about[f"{length} {search}"] = {"search": search, "length": length}
    add("default", {})
    if args.strategy == "diffuspec":
        add("default, exact prefix", {}, kind=ExactPrefix)
        if args.scores is not None:
            add("default, trimmed head", {}, trim="+vocabtrim", vocab_scores=str(args.scores))
    return engines, about


def bench(args: Args, temperature: float, engines: dict[str, Engine], about: dict[str, Any], prompts: Any) -> list:
    timings = measured(ways_of(engines, args, temperature), prompts, args.rounds)
    rows = []
    for name, timing in timings.items():
        stats = timing.last.stats
        row = row_of("blocks", name, temperature, args, timings, engines[name], prompts) | about.get(name, {})
        row |= {"strategy": args.strategy, "mat": stats.acceptance_length - 1}
        row |= {"seconds": {stage: seconds / stats.wall for stage, seconds in stats.seconds.items()}}
        if drafting := stats.rounds - stats.lengths.get(0, 0):
            row |= {"tokens_a_round": 1 + stats.accepted / drafting, "rows_a_round": 1 + stats.drafted / drafting}
        if stats.found:
            row |= {"diffusion": stats.diffusion, "search_of_round": stats.seconds["search"] / stats.wall}
        rows.append(row)
    return rows


def show(rows: list[dict], temperature: float) -> None:
    columns = ("way", "tokens/s", "over ar", "tau", "MAT", "tokens/round", "rows/round", "k", "L_gen", "width")
    table = harness.table_of(temperature, (*columns, "draft", "search", "verify"))
    for row in rows:
        found, share = row.get("diffusion"), row["seconds"]
        table.add_row(
            row["way"],
            f"{row['tokens_per_second']:.0f}",
            f"{row['over_ar']:.2f}",
            f"{row['acceptance_length']:.2f}",
            f"{row['mat']:.2f}",
            *(f"{row[key]:.2f}" if key in row else "" for key in ("tokens_a_round", "rows_a_round")),
            *((f"{found[name]:.1f}" for name in ("k", "L_gen", "lattice_width")) if found else ("", "", "")),
            f"{share['draft']:.0%}",
            f"{share['search']:.1%}" if found else "",
            f"{share['verify']:.0%}",
        )
    Console(width=140).print(table)


def main() -> None:
    args = harness.arguments(Args)
    AdaptiveLength.may_skip_drafting = not args.always
    engines, about = engines_of(args)
    prompts = prompts_of(args, engines["ar"])
    harness.report("blocks", args, lambda temperature: bench(args, temperature, engines, about, prompts), show)


if __name__ == "__main__":
    main()
