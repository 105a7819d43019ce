"""VocabTrim: rows that the draft's head keeps, beside the whole head, and which text to count tokens in.

MBSU is the paper's memory-bound speed-up, by the counted rounds and the models' bytes: a model, not a measurement. The
sources of counts are compared on the bundled family as it is, by counts alone, with the same number of tokens each: the
target's text, the draft's text, and Python's standard library without the held-out modules.
"""

import json
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

from bench.papers.measure import Row, Setting, about, turns
from bench.papers.models import Pair, small
from specker import zoo
from specker.cli import calibrate
from specker.runtime.strategies.vocabtrim import scores as vocab_scores
from specker.runtime.strategies.vocabtrim import trim
from train.code_family.corpus import is_held_out

PAPER = "vocabtrim"
CHAIN = {"draft_tokens": 4}
WHOLE = Setting("whole head, chains of 4", {"strategy": "draft", **CHAIN})
AUTO = Setting("whole head, length by `auto`", {"strategy": "draft"})
PUBLISHED = Setting("whole head, as published", {"strategy": "draft", "as_published": True})
KEPT = ("0.5", "0.25", "0.125", "0.0625")  # of the head's rows
KEEP = 1024  # rows with counts of each source
CALIBRATION_PROMPTS = 32
CALIBRATION_TOKENS = 128  # after each of them


def settings(kept: tuple[str, ...]) -> list[Setting]:
    trimmed = ({"strategy": "vocabtrim", "vocab_keep": share, **CHAIN} for share in kept)
    chains = (Setting(f"{options['vocab_keep']} of the rows, chains of 4", options) for options in trimmed)
    paper = Setting("as published", {"strategy": "vocabtrim", "as_published": True}, "1.16 of the whole head, modelled")
    return [AUTO, Setting("the default", {"strategy": "vocabtrim"}), PUBLISHED, paper, WHOLE, *chains]


def run(pair: Pair, temperatures: list[float], seconds: float, kept: tuple[str, ...] = KEPT) -> list[Row]:
    rows: list[Row] = []
    for temperature in temperatures:
        done = turns(PAPER, pair, settings(kept), temperature, seconds / len(temperatures))
        for turn in done.values():
            row, engine, stats = turn
            if engine.draft is not None:
                whole = PUBLISHED if engine.options.as_published else WHOLE if engine.options.draft_tokens else AUTO
                base = done[whole.title]
                if base.engine.options.draft_tokens:  # `auto` rests now and then
                    row["of_whole"] = row["acceptance_length"] / base.row["acceptance_length"]
                row["over_whole"] = base.row["median"] / row["median"]
                row["mbsu"] = trim.mbsu(engine.target, engine.draft, engine.drafter.head_bytes, engine.options, stats)
            rows.append(row | engine.trim_report(stats))
    return rows


def by_source(pair: Pair, temperatures: list[float], prompts: int = CALIBRATION_PROMPTS) -> list[Row]:
    """Rows of the sources of counts. `prompts`: how many texts each model writes for that."""
    pair, rows = small(pair), []
    engines = {"whole head": pair.load("draft", **CHAIN)}
    with tempfile.TemporaryDirectory() as folder:
        for source, file in score_files(Path(folder), pair, prompts).items():
            how = {"vocab_scores": str(file), "vocab_keep": KEEP, "vocab_text": 0, **CHAIN}
            engines[source] = pair.load("vocabtrim", **how)
    for temperature in temperatures:
        for source, engine in engines.items():
            done = [engine.generate(ids, pair.max_new_tokens, temperature=temperature) for ids in pair.texts]
            stats = sum((each.stats for each in done[1:]), done[0].stats)
            row = about(PAPER, pair, "source", temperature) | {"way": source, **engine.trim_report(stats)}
            row["mbsu"] = trim.mbsu(engine.target, engine.draft, engine.drafter.head_bytes, engine.options, stats)
            rows.append(row | {"acceptance_length": stats.acceptance_length})
    return rows


def score_files(folder: Path, pair: Pair, prompts: int) -> dict[str, Path]:
    """A score file for each source."""
    held_out = [row["prompt"] for row in zoo.heldout()][pair.prompts :][:prompts]
    lines, out = folder / "prompts.jsonl", {}
    lines.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in held_out))
    for source in ("target", "draft"):
        out[f"text of the {source}"] = file = folder / f"{source}.safetensors"
        how = ["--prompts", str(lines), "--max-new-tokens", str(CALIBRATION_TOKENS), "--temperature", "0.7"]
        with redirect_stdout(sys.stderr):
            code = calibrate.main([*how, "--source", source, "--device", pair.device, "--out", str(file)])
        if code:
            raise SystemExit(code)
    read = vocab_scores.read(file)
    counts = torch.zeros(read.vocab_size or 0, dtype=torch.int64)
    for ids in library(read.tokens, pair.load("ar").tokenizer):
        counts += torch.bincount(torch.tensor(ids), minlength=len(counts))
    scores = vocab_scores.VocabScores.from_counts(counts, tokenizer=read.tokenizer, source="text")
    out["Python's standard library"] = folder / "text.safetensors"
    out["Python's standard library"].write_bytes(scores.to_bytes())
    return out


def library(budget: int, tokenizer: Any) -> Iterator[list[int]]:
    """Token ids of the standard library's files, without the held-out ones, until there are `budget` of them."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.glob("*.py")):
        if is_held_out(path.name) or budget <= 0:
            continue
        ids = tokenizer(path.read_text(encoding="utf-8", errors="replace"), add_special_tokens=False)["input_ids"]
        yield ids[: min(budget, 500)]  # the beginnings of many files instead of a few whole ones
        budget -= min(budget, 500, len(ids))
