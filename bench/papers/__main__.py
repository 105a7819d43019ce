"""`make papers`: measure each paper's settings, and print the tables of docs/papers.md."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec

import torch

from bench import harness, plot
from bench.decoding import Given
from bench.papers import diffuspec, dynamic_exit, easyspec, page, picture, vocabtrim
from bench.papers.measure import Row
from bench.papers.models import Pair, coder, family, shape_of
from specker.options import LAYOUTS
from specker.runtime.recipe import device_of
from specker.zoo.inflate import SHAPES

SHARES = {"easyspec": 0.22, "del": 0.24, "diffuspec": 0.3, "vocabtrim": 0.24}  # of the time


@dataclass(frozen=True)
class Args(Given):
    papers: str = field(default=",".join(SHARES), metadata={"help": "comma-separated"})
    shape: str = field(default="0.5b", metadata={"help": f"of the inflated family: {', '.join(SHAPES)}"})
    prompts: int = field(default=4, metadata={"help": "number of prompts"})
    temperatures: str = field(default="0,0.7", metadata={"help": "comma-separated"})
    minutes: float = field(default=12.0, metadata={"help": "of timed rounds, for all papers; each setting has one"})
    threads: int = field(default=2, metadata={"help": "on a CPU"})
    dtype: str = field(default="", metadata={"help": "as of specker"})
    quantize: str = field(default="", metadata={"help": "as of specker; default: int8 on a CPU"})
    quick: bool = field(
        default=False, metadata={"help": "one round of one short text in a tiny shape, to see that all of it runs"}
    )


def of_easyspec(args: Args, pair: Pair, temperatures: list[float], seconds: float) -> list[Row]:
    few = slice(2) if args.quick else slice(None)
    widths, groups = easyspec.WIDTHS[few], easyspec.GROUPS[few]
    rows = easyspec.run(pair, temperatures, 0.7 * seconds)
    rows += easyspec.by_group(pair, temperatures, widths, groups) + easyspec.steps(pair, groups)
    if pair.device == "cpu" and pair.deep_draft is not None:
        rows += easyspec.by_layout(pair, LAYOUTS[-1:] if args.quick else LAYOUTS)
    if (real := other(args)) is not None:
        rows += easyspec.run(real, [0.0], 0.3 * seconds, easyspec.CHAINS) + easyspec.steps(real, (1, 4))
    return rows


def of_vocabtrim(args: Args, pair: Pair, temperatures: list[float], seconds: float) -> list[Row]:
    rows = vocabtrim.run(pair, temperatures, 0.5 * seconds)
    if pair.large_draft:
        rows += vocabtrim.by_source(pair, temperatures, *([2] if args.quick else []))
    if (real := other(args)) is not None:
        rows += vocabtrim.run(real, [0.0], 0.5 * seconds, vocabtrim.KEPT[1:3])
    return rows


def other(args: Args) -> Pair | None:
    """A pair of real models, where the paper's figures are of such."""
    return None if args.quick or args.target is not None else coder(args)


RUNS: dict[str, Callable[[Args, Pair, list[float], float], list[Row]]] = {
    "easyspec": of_easyspec,
    "del": lambda args, *how: dynamic_exit.run(*how),
    "diffuspec": lambda args, *how: diffuspec.run(*how),
    "vocabtrim": of_vocabtrim,
}


def measured(args: Args, paper: str) -> list[Row]:
    """The rows of one paper."""
    pair = family(args, "quick" if args.quick else args.shape)
    temperatures = [float(text) for text in args.temperatures.split(",")]
    return RUNS[paper](args, pair, temperatures, 60 * args.minutes * SHARES[paper])


def main() -> None:
    args = harness.arguments(Args)
    papers = args.papers.split(",")
    if unknown := [text for text in papers if text not in SHARES]:
        sys.exit(f"bench: --papers has {unknown[0]!r}; there are {', '.join(SHARES)}")
    try:
        device_of(args.device)
        shape_of(args.shape)
    except ValueError as error:
        sys.exit(f"bench: {error}")
    if args.quick and args.save:
        sys.exit("bench: --quick measures nothing that is worth keeping: leave out --save")
    if args.quick:
        args = replace(args, prompts=1, max_new_tokens=8, minutes=0.0)
    if args.device == "cpu":
        torch.set_num_threads(args.threads)
    for paper in papers:
        rows, origin = measured(args, paper), harness.where_from(args.device)
        print(f"\n## {paper}\n\n{page.of_paper(paper, [origin | row for row in rows])}", flush=True)
        if args.save:
            print(harness.save("papers", rows, args.device))
    if args.save and find_spec("matplotlib"):
        folder = harness.folder(args.device)
        plot.save(picture.draw(page.read_rows([folder])), folder / "papers")


if __name__ == "__main__":
    main()
