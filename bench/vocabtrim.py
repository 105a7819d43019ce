"""Trimmed draft heads: number of kept rows x source of the counts, on held-out prompts of the bundled pair. With
--target and --questions, on another pair with a score file, `--sources bundled`.

Sources, with the same number of tokens each: the target's continuations of held-out prompts that are not decoded here,
the draft's continuations of them, and Python source (the standard library without the held-out modules). `bundled` is
the family's own score file, with far more of the target's text; `bundled + text` adds rows that follow the text. All
take turns with the untrimmed `draft` and `ar` at every prompt. The gain over `draft` is the median of the rounds'
ratios, with the number of rounds in which the ratio is above one. Rows go to bench/results/<machine>/vocabtrim.jsonl.
"""

import json
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import specker
from bench import harness
from bench.decoding import Given, measured, prompts_of, row_of, share_target, ways_of
from specker.cli import calibrate
from specker.runtime.engine import Engine
from specker.runtime.strategies.vocabtrim import scores as vocab_scores
from specker.runtime.strategies.vocabtrim import trim
from train.code_family.corpus import is_held_out

SOURCES = ("bundled", "target", "draft", "text")
FOLLOWING = "bundled + text"


@dataclass(frozen=True)
class Args(Given):
    prompts: int = field(default=12, metadata={"help": "prompts to decode; other held-out ones are calibrated on"})
    max_new_tokens: int = 72
    keep: str = field(default="256,512,1024,2048,3072,4096,6144", metadata={"help": "kept rows, comma separated"})
    text: int = field(default=256, metadata={"help": "more rows that follow the text, with the bundled scores"})
    temperatures: str = "0,0.7"
    calibration_tokens: int = field(default=256, metadata={"help": "written after each calibration prompt"})
    draft_tokens: int = 4
    rounds: int = 3
    sources: str = field(default=",".join(SOURCES), metadata={"help": "of the scores, comma separated"})


def texts(budget: int, tokenizer: Any) -> Iterator[list[int]]:
    """Token ids of the standard library's files, without the held-out ones, until there are `budget` of them."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.glob("*.py")):
        if is_held_out(path.name) or budget <= 0:
            continue
        ids = tokenizer(path.read_text(encoding="utf-8", errors="replace"), add_special_tokens=False)["input_ids"]
        yield ids[: min(budget, 2000)]  # the beginnings of many files instead of a few whole ones
        budget -= min(budget, 2000, len(ids))


def score_files(args: Args, prompts: list[str], folder: Path) -> dict[str, Path]:
    """One file per source; `bundled` is the family's own."""
    lines = folder / "prompts.jsonl"
    lines.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    out = {"bundled": args.scores}
    for source in ("target", "draft"):
        out[source] = folder / f"{source}.safetensors"
        how = ["--source", source, "--prompts", str(lines), "--max-new-tokens", str(args.calibration_tokens)]
        code = calibrate.main([*how, "--temperature", "0.7", "--device", args.device, "--out", str(out[source])])
        if code:
            sys.exit(code)
    read = vocab_scores.read(out["target"])
    tokenizer = specker.load(strategy="ar", device="cpu").tokenizer
    counts = torch.zeros(read.vocab_size or 0, dtype=torch.int64)
    for ids in texts(read.tokens, tokenizer):
        counts += torch.bincount(torch.tensor(ids), minlength=len(counts))
    scores = vocab_scores.VocabScores.from_counts(counts, tokenizer=read.tokenizer, source="text")
    out["text"] = folder / "text.safetensors"
    out["text"].write_bytes(scores.to_bytes())
    return out


def bench(args: Args, temperature: float, engines: dict[str, Engine], prompts: list[list[int]]) -> list[dict]:
    timings = measured(ways_of(engines, args, temperature), prompts, args.rounds)
    rows = []
    for name, timing in timings.items():
        stats, engine = timing.last.stats, engines[name]
        source, _, keep = name.rpartition(" ")
        row = row_of("vocabtrim", name, temperature, args, timings, engine, prompts) | {
            "draft_tokens": args.draft_tokens,
            "over_draft": timing.times_as_fast(timings["draft"])["median"],
            "over_draft_rounds": timing.times_as_fast(timings["draft"]),
            "mbsu": 1.0,
        }
        if engine.draft is not None:
            row["mbsu"] = trim.mbsu(engine.target, engine.draft, engine.drafter.head_bytes, engine.options, stats)
        rows.append(row | engine.trim_report(stats) | ({"source": source, "keep": int(keep)} if source else {}))
    return rows


def show(rows: list[dict], temperature: float) -> None:
    columns = (
        "way",
        "tokens/s",
        "over draft (rounds)",
        "over ar",
        "tau",
        "of draft's",
        "coverage",
        "mbsu",
        "head, KiB",
    )
    table = harness.table_of(temperature, columns)
    whole = next(row for row in rows if row["way"] == "draft")["acceptance_length"]
    for row in rows:
        table.add_row(
            row["way"],
            f"{row['tokens_per_second']:.0f}",
            f"{row['over_draft']:.3f} ({row['over_draft_rounds']['rounds_above_1']} of {row['rounds']})",
            f"{row['over_ar']:.2f}",
            f"{row['acceptance_length']:.2f}",
            f"{row['acceptance_length'] / whole:.1%}",
            f"{row['coverage']:.1%}" if "coverage" in row else "",
            f"{row['mbsu']:.2f}",
            f"{row['head_bytes_per_draft_step'] / 1024:.0f}" if "coverage" in row else "",
        )
    Console(width=120).print(table)


def main() -> None:
    args = harness.arguments(Args)
    sources = args.sources.split(",")
    if args.target is not None and (sources != ["bundled"] or args.scores is None):
        sys.exit("bench: --target takes --sources bundled, the target's own score file")
    with tempfile.TemporaryDirectory() as folder:
        heldout = [row["prompt"] for row in specker.zoo.heldout()][args.prompts :]
        files = {"bundled": args.scores} if sources == ["bundled"] else score_files(args, heldout, Path(folder))
        engines = {"ar": args.load("ar"), "draft": args.load("draft", draft_tokens=args.draft_tokens)}
        for source in (*sources, FOLLOWING):
            for keep in args.keep.split(","):
                trimmed = {"vocab_scores": str(files[source.split()[0]]), "vocab_keep": keep}
                trimmed |= {"vocab_text": args.text if source == FOLLOWING else 0, "draft_tokens": args.draft_tokens}
                engines[f"{source} {keep}"] = args.load("vocabtrim", **trimmed)
                share_target(list(engines.values()))
    prompts = prompts_of(args, engines["ar"])
    harness.report("vocabtrim", args, lambda temperature: bench(args, temperature, engines, prompts), show)


if __name__ == "__main__":
    main()
