"""How many tokens does a round commit with a drafter of blocks, by what is verified of a block?

    python bench/blocks.py --strategy dflash --draft FOLDER        # see train/head
    python bench/blocks.py --strategy diffuspec --k 4              # the bundled diffusion drafter

Compared are the argmax of each position, the path that the search finds, trees of the most probable beginnings of paths
with as many tokens as the chain and with more, each by the drafter alone (lambda 1) and with the n-gram model, and the
adaptive length. Nothing is timed: acceptance does not depend on the machine. Rounds draft whether it pays or not; those
that cannot are not counted.
"""

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.console import Console
from transformers import HfArgumentParser

import specker
from bench.harness import table_of
from specker.runtime.strategies.blocks import TREE_NODES, AdaptiveLength


@dataclass
class Args:
    strategy: str = "dflash"
    draft: str = field(default="", metadata={"help": "the drafter's folder; default: the bundled one"})
    target: str = field(default="", metadata={"help": "default: the bundled one"})
    k: int = field(default=7, metadata={"help": "tokens of a block"})
    prompts: int = field(default=16, metadata={"help": "held-out prompts"})
    max_new_tokens: int = 64
    temperatures: str = "0,0.7"
    only: str = field(default="", metadata={"help": "the ways whose names begin with this"})
    dtype: str = "float32"


def ways(args: Args) -> dict[str, dict[str, Any]]:
    """The options of each way by its name; `search` holds what differs from the usual `Search`."""
    chain = {"draft_tokens": args.k}
    found: dict[str, dict[str, Any]] = {"argmax": {**chain, "cps": "off"}, "path, n-gram": {**chain, "cps": "chain"}}
    for wide in (1, TREE_NODES):
        tree, name = {**chain, "cps": "tree"}, f"tree of {wide * args.k}"
        found[name] = {**tree, "search": {"nodes": wide, "ngram": None}}
        found[f"{name}, n-gram"] = {**tree, "search": {"nodes": wide}}
    adl = {"policy": "adl", "adl": f"1-{args.k}"}
    return found | {f"adl 1-{args.k}": {**adl, "cps": "off"}, f"adl 1-{args.k}, path": {**adl, "cps": "chain"}}


def measure(args: Args, options: dict[str, Any], texts: list[str], temperature: float) -> dict[str, float]:
    """Tokens and verified rows of a round that drafts, over all texts."""
    AdaptiveLength.may_skip_drafting = False
    target = args.target or (specker.zoo.path("code-target") if args.draft else None)
    own = {name: value for name, value in options.items() if name != "search"}
    engine = specker.load(target, args.draft or None, args.strategy, device="cpu", dtype=args.dtype, **own)
    if search := options.get("search"):
        engine.drafter.search = replace(engine.drafter.search, **search)
    done = [engine.generate(text, args.max_new_tokens, temperature=temperature, seed=n) for n, text in enumerate(texts)]
    stats = [each.stats for each in done]
    rounds = sum(each.rounds - each.lengths.get(0, 0) for each in stats)
    accepted, drafted = (sum(getattr(each, name) for each in stats) for name in ("accepted", "drafted"))
    return {"rounds": rounds, "tokens": 1 + accepted / max(1, rounds), "rows": 1 + drafted / max(1, rounds)}


def main() -> None:
    args = HfArgumentParser(Args).parse_args_into_dataclasses()[0]
    texts = [row["prompt"] for row in specker.zoo.heldout()][: args.prompts]
    for temperature in map(float, args.temperatures.split(",")):
        table = table_of(temperature, ("way", "tokens a round", "verified rows a round", "rounds"))
        for name, options in ways(args).items():
            if not name.startswith(args.only):
                continue
            found = measure(args, options, texts, temperature)
            table.add_row(name, f"{found['tokens']:.2f}", f"{found['rows']:.1f}", str(found["rounds"]))
        Console(width=100).print(table)
    print(json.dumps(asdict(args)))


if __name__ == "__main__":
    main()
