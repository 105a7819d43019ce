"""specker's drafters inside vLLM beside vLLM's own: `make vllm`, or `python bench/in_vllm.py --help`.

The bundled pair, greedy, in vLLM's own environment. Every way has an engine in a process of its own
(bench/vllm_engine.py); they take turns at every group of prompts, and all but one are stopped. Reported for each batch
size: tokens/s, its median ratio to plain vLLM and to vLLM's draft_model with the same draft, the acceptance length, and
whether the tokens are plain vLLM's.
"""

import json
import signal
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from bench import harness
from bench.peer_settings import HERE, installed
from bench.processes import Ended, Process
from specker import zoo

PLAIN, THEIRS = "vLLM", "vLLM draft_model"
PROPOSER = "specker.integrations.vllm.Proposer"
STRATEGIES = ("draft", "vocabtrim", "easyspec", "easyspec+vocabtrim", "diffuspec", "lookup")


@dataclass(frozen=True)
class Args:
    ways: str = field(
        default="", metadata={"help": "comma-separated parts of names: only these, plain and draft_model"}
    )
    batches: str = field(default="1,8", metadata={"help": "comma-separated: requests at once"})
    prompts: int = 8
    max_new_tokens: int = 64
    draft_tokens: int = 4
    rounds: int = 5
    dtype: str = field(default="float32", metadata={"help": "of target and draft"})
    save: bool = harness.save_flag()


@dataclass(eq=False)
class Way:
    name: str
    process: Process
    seconds: dict[int, list[float]] = field(default_factory=dict)  # by batch size: of each group, round by round
    tokens: dict[int, list[list[int]]] = field(default_factory=dict)  # by batch size: of each prompt
    drafted: dict[int, int] = field(default_factory=dict)
    accepted: dict[int, int] = field(default_factory=dict)

    def ask(self, request: dict[str, Any] | None = None) -> dict[str, Any]:
        """An answer, without a request the first line. The engine is stopped before and afterwards."""
        self.process.signal(signal.SIGCONT)
        try:
            return self.process.ask(request)
        except Ended as error:
            sys.exit(f"bench: {self.name} ended: {error}")
        finally:
            self.process.signal(signal.SIGSTOP)


def options_of(args: Args) -> dict[str, dict[str, Any]]:
    """The options of each way's engine."""
    draft = str(zoo.path("code-draft"))
    ways = {
        PLAIN: {},
        THEIRS: {"speculative_config": {"method": "draft_model", "model": draft}},
        "vLLM ngram": {"speculative_config": {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1}},
    }
    for strategy in STRATEGIES:
        own = {"specker": {"strategy": strategy, "dtype": args.dtype}}
        ways[f"specker {strategy}"] = {"speculative_config": {"model": PROPOSER}, "additional_config": own}
    parts = [part for part in args.ways.split(",") if part]
    kept = {n: w for n, w in ways.items() if n in (PLAIN, THEIRS) or not parts or any(part in n for part in parts)}
    for way in kept.values():
        if "speculative_config" in way:
            way["speculative_config"]["num_speculative_tokens"] = args.draft_tokens
    common = {"model": str(zoo.path("code-target")), "dtype": args.dtype, "max_model_len": 512}
    common |= {"max_num_seqs": max(map(int, args.batches.split(","))), "enable_prefix_caching": False}
    return {name: common | way for name, way in kept.items()}


def started(name: str, options: dict[str, Any], python: Path, folder: Path) -> Way:
    file = folder / f"{name}.json"
    file.write_text(json.dumps({"options": options}))
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": str(HERE.parent)}
    way = Way(name, Process([python, HERE / "vllm_engine.py", file], folder / f"{name}.log", **env))
    print(name, way.ask().get("ready"), flush=True)
    return way


def measure(ways: list[Way], prompts: list[list[int]], args: Args) -> None:
    """All groups of all batch sizes. The ways take turns at every group; the order rotates."""
    for n in range(-1, args.rounds):  # the first round warms up
        for size in map(int, args.batches.split(",")):
            for at in range(0, len(prompts), size):
                for way in ways:
                    found = way.ask({"prompts": prompts[at : at + size], "count": args.max_new_tokens})
                    if n < 0:
                        continue
                    way.seconds.setdefault(size, []).append(found["seconds"])
                    way.tokens.setdefault(size, [])[at:] = found["tokens"]
                    way.drafted[size] = way.drafted.get(size, 0) + found["drafted"]
                    way.accepted[size] = way.accepted.get(size, 0) + sum(found["accepted"])
                ways = ways[1:] + ways[:1]
        print(f"round {n + 1} of {args.rounds}", flush=True)


def rows_of(way: Way, named: dict[str, Way], args: Args) -> list[dict[str, Any]]:
    rows = []
    for size, seconds in way.seconds.items():

        def over(other: Way, size: int = size, seconds: list[float] = seconds) -> dict[str, float]:
            ratios = [a / b for a, b in zip(other.seconds[size], seconds, strict=True)]
            return {"median": statistics.median(ratios)} | {
                f"p{q}": harness.quantile(ratios, q / 100) for q in (20, 80)
            }

        tokens = size * args.max_new_tokens
        rounds = way.drafted[size] / args.draft_tokens
        rows.append(
            {
                "bench": "in_vllm",
                "way": way.name,
                "batch": size,
                "tokens_per_second": tokens / statistics.median(seconds),
                "over_plain": over(named[PLAIN]),
                "over_draft_model": over(named[THEIRS]),
                "accepted_per_drafted": way.accepted[size] / way.drafted[size] if rounds else None,
                "equal_texts": sum(a == b for a, b in zip(way.tokens[size], named[PLAIN].tokens[size], strict=True)),
                "texts": len(way.tokens[size]),
                "max_new_tokens": args.max_new_tokens,
                "draft_tokens": args.draft_tokens,
                "dtype": args.dtype,
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="inside vLLM, greedy, interleaved")
    for column in ("way", "batch", "tokens/s", "over plain", "over draft_model", "accepted share", "equal texts"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for row in sorted(rows, key=lambda row: row["batch"]):
        ratios = [
            "{median:.2f} ({p20:.2f}-{p80:.2f})".format(**row[f"over_{base}"]) for base in ("plain", "draft_model")
        ]
        share = row["accepted_per_drafted"]
        equal = f"{row['equal_texts']} of {row['texts']}"
        speed, accepted = f"{row['tokens_per_second']:.0f}", "" if share is None else f"{share:.2f}"
        table.add_row(row["way"], str(row["batch"]), speed, *ratios, accepted, equal)
    Console(width=140).print(table)


def main() -> None:
    args = harness.arguments(Args)
    python = installed("vllm")
    tokenizer = AutoTokenizer.from_pretrained(zoo.path("code-target"))
    prompts = tokenizer([row["prompt"] for row in zoo.heldout()[: args.prompts]])["input_ids"]
    with tempfile.TemporaryDirectory() as folder:
        ways: list[Way] = []
        try:
            for name, options in options_of(args).items():
                ways.append(started(name, options, python, Path(folder)))
            measure(ways, prompts, args)
        finally:
            for way in ways:
                way.process.end()
    named = {way.name: way for way in ways}
    rows = [row for way in ways for row in rows_of(way, named, args)]
    show(rows)
    if args.save:
        print(harness.save("in_vllm", rows, "cpu"))


if __name__ == "__main__":
    main()
