"""EasySpec: groups of layers beside the same draft in sequence.

Width of the tree x layers in a group x calibration are counted on the bundled family as it is, whose groups hold
trained layers alone; inflated, a group also holds layers that add zero. There, a draft step of one row and of twelve is
timed, and the cosine is taken between the final rows of a chain in groups and in sequence, after the same exact prefix.
On a CPU two ranks of one thread each also draft in every layout; these are jobs of their own, one after another.
"""

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from bench import harness
from bench.papers.measure import Row, Setting, about, flags, turns
from bench.papers.models import Pair, small
from specker import zoo
from specker.fields import flag
from specker.model.decoder import forward
from specker.model.prefill import prefill
from specker.runtime.strategies.easyspec.layer_groups import LayerParallel

PAPER = "easyspec"
WIDTHS = (1, 4, 8, 12)  # nodes of a tree's level; 1: a chain
GROUPS = (1, 2, 3, 4, 5)  # layers side by side
DEPTH = 5
CALIBRATIONS = ("every", "mismatch", "never")
ROWS = (1, 12)  # of a draft step
STEPS = 15  # timed
CHAIN = 4  # tokens of a chain for the cosine
DRAFT = "deep_draft"
LAYOUT_TOKENS = 32  # that a job decodes after each prompt
SEQUENCE = "in sequence"
GROUPED = "groups of 4"

CHAINS = (
    Setting(f"{SEQUENCE}, chains of 4", {"strategy": "draft", "draft_tokens": 4}, "", DRAFT),
    Setting(f"{GROUPED}, chains of 4", {"strategy": "easyspec", "draft_tokens": 4}),
)
SETTINGS = (
    *CHAINS,
    Setting(f"{SEQUENCE}, length by `auto`", {"strategy": "draft"}, "", DRAFT),
    Setting("as published, trees of 60", {"strategy": "easyspec", "as_published": True}, "up to 4.17", sampled=False),
    Setting("the default", {"strategy": "easyspec"}),
)


def run(pair: Pair, temperatures: list[float], seconds: float, settings: tuple[Setting, ...] = SETTINGS) -> list[Row]:
    rows: list[Row] = []
    for temperature in temperatures:
        done = turns(PAPER, pair, settings, temperature, seconds / len(temperatures))
        for title, turn in done.items():
            row = turn.row
            if title.startswith(GROUPED):
                base = done[title.replace(GROUPED, SEQUENCE)].row
                row["of_sequence"] = row["acceptance_length"] / base["acceptance_length"]
            rows.append(row)
    return rows


def by_group(pair: Pair, temperatures: list[float], widths: tuple[int, ...], groups: tuple[int, ...]) -> list[Row]:
    """Acceptance lengths of every width, layers in a group and calibration."""
    pair, rows = small(pair), []
    for width in widths:
        shape = {"draft_tokens": DEPTH} if width == 1 else {"tree": f"{width}x{DEPTH}"}
        for size in groups:
            for calibration in CALIBRATIONS:
                if size == 1 and calibration != "every":
                    continue  # layers in sequence need no calibration
                engine = pair.load("easyspec", layer_parallel=size, calibrate=calibration, **shape)
                for temperature in temperatures:
                    texts = [engine.generate(p, pair.max_new_tokens, temperature=temperature) for p in pair.texts]
                    stats = sum((text.stats for text in texts[1:]), texts[0].stats)
                    row = about(PAPER, pair, "groups", temperature) | {"width": width, "layers": size}
                    rows.append(row | {"calibration": calibration, "acceptance_length": stats.acceptance_length})
    return rows


def by_layout(pair: Pair, layouts: tuple[str, ...]) -> list[Row]:
    """The time of drafts on two ranks of one thread, by how they share the draft model."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        prompts, out = Path(folder) / "prompts.jsonl", Path(folder) / "out.json"
        texts = [row["prompt"] for row in zoo.heldout()[: pair.prompts]]
        prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        for layout in layouts:
            options = {"strategy": "easyspec", "draft_layout": layout, "draft_tokens": CHAIN}
            job = {"target": pair.target, "draft": pair.deep_draft, "prompts": prompts, "json": out}
            job |= {"max_new_tokens": min(LAYOUT_TOKENS, pair.max_new_tokens)}
            job |= {"quantize": pair.quantize} if pair.quantize else {}
            words = [word for name, value in (options | job).items() for word in (flag(name), str(value))]
            ranks = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "specker.run"]
            one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run([*ranks, *words], capture_output=True, text=True, env=one_thread, check=False)
            if done.returncode:
                raise SystemExit(f"{layout}: the ranks failed:\n{done.stderr}")
            total = json.loads(out.read_text())["total"]
            row = about(PAPER, pair, "layouts", 0.0) | {"way": layout, "flags": flags(options)}
            row |= {"round_ms": 1e3 * total["seconds"]["draft"] / total["rounds"]}
            rows.append(row | {"acceptance_length": total["acceptance_length"]})
    return rows


@torch.inference_mode()
def steps(pair: Pair, groups: tuple[int, ...]) -> list[Row]:
    """Milliseconds of a draft step and the cosine of its rows, by layers in a group. The groups take turns."""
    texts = [engine.generate(ids, 48, temperature=0.7).tokens for engine in [pair.load("ar")] for ids in pair.texts]
    ways: dict[Any, Any] = {}
    cosines = {}
    for size in groups:
        drafter: Any = pair.load("easyspec", layer_parallel=size).drafter
        parallel = drafter.layers
        cosines[size] = cosine(parallel, texts)
        drafter.cache.take(0, len(texts[0]) + max(ROWS))
        prefill(drafter.model, drafter.cache, texts[0])
        for count in ROWS:
            ways[size, count] = partial(step, parallel, texts[0], count)
    timings = harness.measure(ways, STEPS, warmup=2)
    rows = []
    for size in groups:
        row = about(PAPER, pair, "steps", 0.0) | {"layers": size, "cosine": cosines[size], "draft_rows": ROWS}
        rows.append(row | {"step_ms": [1e3 * timings[size, count].median for count in ROWS]})
    return rows


def step(parallel: LayerParallel, text: list[int], count: int) -> None:
    """A draft step of `count` rows after the text."""
    ids = torch.tensor(text[-count:], device=parallel.model.device)
    parallel.forward(parallel.cache.after([len(text)], [count]), parallel.model.embed_tokens(ids))


def cosine(parallel: LayerParallel, texts: list[list[int]]) -> float:
    """Mean cosine of fuzzy and exact final rows of chains, at every eighth position."""
    model, cache, found = parallel.model, parallel.cache, []
    for text in texts:
        cache.take(0, len(text))
        for start in range(16, len(text) - CHAIN, 8):
            ids = torch.tensor(text[start : start + CHAIN], device=model.device)
            pair = []
            for run in (parallel.forward, partial(forward, model, cache)):
                cache.truncate(0)
                prefill(model, cache, text[:start])
                places = [cache.after([start + i], [1]) for i in range(CHAIN)]
                hidden = [run(place, model.embed_tokens(ids[i : i + 1])).hidden for i, place in enumerate(places)]
                pair.append(torch.cat(hidden).float())
            found += F.cosine_similarity(*pair, dim=-1).tolist()
        cache.release(0)
    return sum(found) / len(found)
