"""Projects EasySpec's draft layouts to several GPUs with a model (bench/latency.py), not a measurement.

    python bench/project.py [--gpus h200,a100] [--pairs 70b+8b,70b+1b] [--tau X] [any other input]

For each GPU, pair and kind of engine: times of a round, speed over plain decoding under the same tensor parallelism,
and the conditions for the paper's numbers. Writes bench/results/projection.md, .jsonl (rows have "model": true and
their inputs) and a picture. If one GPU was measured, predicted over measured comes last.
"""

import dataclasses
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import HfArgumentParser

import specker
from bench import latency, plot
from bench.latency import ENGINES, GPUS, LAYOUTS, SHAPES, Inputs, Row, Shape, arg
from specker.paths import write_file

RESULT = plot.RESULTS / "projection.md"
WARNING = "A model, not a measurement."
PAPER_DRAFT, PAPER_TOTAL = 1.62, 4.17  # arXiv 2502.02493, abstract: "up to", over all its pairs; 8 A100s


@dataclass(frozen=True)
class Run:
    gpus: str = arg("h200,a100", "comma-separated")
    pairs: str = arg("70b+8b,70b+1b", "target+draft, comma-separated")
    ranks: str = arg("1,2,4,8", "comma-separated; what stands last is compared with the paper")
    save: bool = arg(True, "write bench/results/projection.*")


# --- sources of inputs, and measurements


def resolved(i: Inputs, gpu: str, rows: Iterable[Row]) -> tuple[Inputs, dict[str, str]]:
    """`i` with every 0 filled in, and the sources of these values. `rows`: all committed rows."""
    if gpu not in GPUS:
        raise ValueError(f"gpu {gpu!r} is not known; there are {', '.join(GPUS)}")
    sheet, rows, found = GPUS[gpu], list(rows), {}
    timed = [r for r in rows if r.get("bandwidth") and gpu in str(r.get("machine", "")).lower()]
    if not i.bandwidth:
        newest = max(timed, key=lambda r: r.get("date", ""), default=None)
        i = replace(i, bandwidth=newest["bandwidth"] / 1e12 if newest else sheet.bandwidth * i.efficiency)
        found["bandwidth"] = f"measured on {newest['machine']}" if newest else f"data sheet x {i.efficiency:g}"
    i = replace(i, memory=i.memory or sheet.memory, bus=i.bus or sheet.bus)
    if not (i.tau and i.keep):
        tree, kind = f"{i.width}x{i.depth}", ("bench", "shape", "calibrate", "temperature")
        wanted = ("easyspec", tree, "every", i.temperature)
        mine = {r["parallel"]: r for r in rows if tuple(r.get(name) for name in kind) == wanted}
        if 1 not in mine or i.parallel not in mine:
            what = f"trees {tree} in groups of {i.parallel} at T {i.temperature:g}"
            raise ValueError(f"there are no committed rows of {what}; give --tau and --keep")
        # A value above 1 comes from the choice of prompts and is not a gain.
        keep = min(1.0, mine[i.parallel]["acceptance_length"] / mine[1]["acceptance_length"])
        i = replace(i, tau=i.tau or mine[1]["acceptance_length"], keep=i.keep or keep)
        prompts = f"{mine[1]['prompts']} prompts"
        found["tau"] = f"where not given, the bundled pair's trees {tree} at T {i.temperature:g}, {prompts}"
    return i, found


def checked(rows: Iterable[Row]) -> list[Row]:
    """Predicted over measured tokens/s on one GPU: plain decoding and chains, in graphs, in 16 bits. Rows of other
    benches, configurations, models or of a CPU are ignored. Measured times include the prompt, predicted ones do not.
    Bandwidth comes from the same machine's rows, otherwise from the data sheet."""
    rows, out = list(rows), []
    for row in rows:
        machine, (way, speed) = str(row.get("machine", "")), _measured(row)
        gpu = next((name for name in GPUS if name in machine.lower()), None)
        shapes, chain = _shapes(row), re.search(r"\bchain[ -](\d+)", way)
        on_gpu = gpu and row.get("device") == "cuda" and row.get("dtype") in ("bfloat16", "float16")
        if not (on_gpu and speed and shapes and (way == "ar" or (chain and row.get("acceptance_length")))):
            continue
        given = Inputs(tau=row.get("acceptance_length") or 1.0, keep=1.0, depth=int(chain[1]) if chain else 0, width=1)
        i, _ = resolved(given, gpu, [r for r in rows if r.get("machine") == machine])
        if chain:
            predicted = latency.project(i, *shapes, 1, "replicated", "graphs")["tokens_per_second"]
        else:
            predicted = 1e6 / latency.verify(i, shapes[0], 1, 1).us(i, "graphs")
        about = {"machine": machine, "bench": row["bench"], "way": way, "temperature": row.get("temperature")}
        out.append({"model": True, **about, "predicted": predicted, "measured": speed, "ratio": predicted / speed})
    return out


def _measured(row: Row) -> tuple[str, float | None]:
    """What was decoded, and its tokens/s. Rows of bench/decode.py hold the seconds of a step, or the speed of
    rounds."""
    way, speed = str(row.get("way", "")), row.get("tokens_per_second")
    if row.get("bench") != "decode":
        return way, speed
    if row.get("kind") == "ar" and row.get("median"):
        return way, 1 / row["median"]
    return ("chain 5", speed) if way == "over ar" else ("", None)


def _shapes(row: Row) -> tuple[Shape, Shape] | None:
    """Target and draft: the bundled pair for bench/e2e.py, the named shapes for bench/decode.py."""
    if row.get("bench") == "e2e" and "target" not in row:
        return bundled("code-target"), bundled("code-draft")
    target = SHAPES.get(str(row.get("shape"))) if row.get("bench") == "decode" else None
    return None if target is None else (target, SHAPES.get(str(row.get("draft")), target))


def bundled(name: str) -> Shape:
    c = json.loads((Path(specker.zoo.path(name)) / "config.json").read_text(encoding="utf-8"))
    heads = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    return Shape(c["num_hidden_layers"], c["hidden_size"], *heads, c["intermediate_size"], c["vocab_size"])


# --- output

COLUMNS = {
    "R": lambda r: str(r["ranks"]),
    "draft": lambda r: r["layout"],
    "draft forward, us": lambda r: f"{r['draft_forward_us']:.0f}",
    "draft stage, us": lambda r: f"{r['draft_us']:.0f}",
    "verify, us": lambda r: f"{r['verify_us']:.0f}",
    "round, us": lambda r: f"{r['round_us']:.0f}",
    "plain step, us": lambda r: f"{r['plain_us']:.0f}",
    "tokens/s": lambda r: f"{r['tokens_per_second']:.0f}",
    "over plain": lambda r: f"{r['speedup']:.2f}",
    "draft stage over replicated": lambda r: f"{r['draft_speedup']:.2f}",
    "weights, GB a rank": lambda r: f"{r['weights_gb']:.0f}" + ("" if r["fits"] else " (does not fit)"),
}


def best(rows: Iterable[Row]) -> dict[int, str]:
    """The fitting layout with the most tokens/s at each R."""
    out: dict[int, Row] = {}
    for row in rows:
        if (
            row["fits"]
            and row["tokens_per_second"] > out.get(row["ranks"], {"tokens_per_second": 0})["tokens_per_second"]
        ):
            out[row["ranks"]] = row
    return {ranks: row["layout"] for ranks, row in out.items()}


def findings(i: Inputs, target: Shape, draft: Shape, rows: list[Row]) -> list[str]:
    """Sentences with computed numbers; `rows` are of one engine."""
    winners, ranks, engine = best(rows), rows[-1]["ranks"], rows[-1]["engine"]
    where = ", ".join(f"R {r}: {winners.get(r, 'nothing fits')}" for r in dict.fromkeys(r["ranks"] for r in rows))
    last = {row["layout"]: row for row in rows if row["ranks"] == ranks}
    here = last["layer-parallel"]
    out = [
        f"Most tokens a second: {where}.",
        f"At R {ranks} the draft stage side by side is {here['draft_speedup']:.2f} times as fast as replicated (paper: "
        f"up to {PAPER_DRAFT}), the whole {here['speedup']:.2f} times plain decoding (paper: up to {PAPER_TOTAL}, over "
        "all its pairs).",
    ]
    out += (_for_drafting_eager if engine == "eager" else _for_drafting)(i, target, draft, ranks)
    for layout, row in last.items():
        tau, room = latency.tau_for(row, PAPER_TOTAL), latency.room_for(row, PAPER_TOTAL)
        beyond = f", more than the {i.depth + 1} that depth {i.depth} can give" if tau > i.depth + 1 else ""
        free = f"even free drafting gives {row['tau'] * row['plain_us'] / row['verify_us']:.2f}"
        may = f"drafting may take {room:.0f} us, where the model says {row['draft_us']:.0f}" if room > 0 else free
        needs = f"needs an acceptance length of {tau:.1f}{beyond}"
        out.append(f"{PAPER_TOTAL}, draft {layout}, {needs}; at {row['tau']:.2f} {may}.")
    return out


def _for_drafting(i: Inputs, target: Shape, draft: Shape, ranks: int) -> list[str]:
    one, stage = (latency.attention_share(i, draft, ranks, PAPER_DRAFT, stage) for stage in (False, True))
    if one == float("inf"):
        return [f"At R {ranks} nothing is shared out, so {PAPER_DRAFT} is not to be had."]
    share = draft.layers * draft.attention / draft.elements
    return [
        f"With free communication {PAPER_DRAFT} needs attention to take {one:.0%} of a forward in sequence, "
        f"{stage:.0%} where the exact one of {i.depth} counts too; of the bytes it is {share:.0%}."
    ]


def _for_drafting_eager(i: Inputs, target: Shape, draft: Shape, ranks: int) -> list[str]:
    how = (target, draft, ranks, "layer-parallel", "eager")
    host, need = (f(i, target, draft, ranks, PAPER_DRAFT) for f in (latency.host_for, latency.launches_for))
    bound = latency.project(replace(i, host_us=1000.0), *how)
    out = [
        f"{PAPER_DRAFT} needs launches of {host:.1f} us."
        if host is not None
        else f"No cost of a launch gives {PAPER_DRAFT}: where launches are all that counts, it is "
        f"{bound['draft_speedup']:.2f}, and the whole {bound['speedup']:.2f}."
    ]
    if need is not None:
        ours = f"ours has {draft.attention_launches:g} beside the feed-forward's {i.mlp_launches:g}"
        out.append(f"At {i.host_us:g} us a launch it needs {need:.0f} launches in a layer's attention; {ours}.")
    return out


def draw(rows: list[Row]) -> Any:
    """Speedup over R of each layout, with a panel per GPU, engine and pair; hollow if the weights do not fit."""
    from matplotlib.figure import Figure

    panels: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        panels.setdefault((row["gpu"], row["pair"], row["engine"]), []).append(row)
    figure = Figure(figsize=(11, 0.6 + 2.8 * -(-len(panels) // 2)), layout="constrained")
    figure.suptitle(f"Over plain tensor-parallel decoding. {WARNING}", fontsize=10)
    axes = figure.subplots(-(-len(panels) // 2), 2, squeeze=False).flatten()
    for axis, (panel, mine) in zip(axes, panels.items(), strict=False):
        for n, layout in enumerate(LAYOUTS):
            points = [(r["ranks"], r["speedup"], r["fits"]) for r in mine if r["layout"] == layout]
            ranks, speedups, fits = zip(*points, strict=True)
            axis.plot(ranks, speedups, color=f"C{n}", label=layout, linewidth=1)
            faces = [f"C{n}" if fit else "white" for fit in fits]
            axis.scatter(ranks, speedups, color=faces, edgecolors=f"C{n}", s=26, zorder=3)
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_xticks(ranks, map(str, ranks))
        axis.set_ylim(bottom=0)
        axis.set_title(", ".join(panel), fontsize=9)
        axis.set_xlabel("GPUs (hollow: the weights do not fit)", fontsize=8)
    axes[0].legend(fontsize=7)
    return figure


def section(title: str, about: str, rows: list[Row], said: list[str], console: Console) -> str:
    """Prints a section and returns it as markdown."""
    cells = [[form(row) for form in COLUMNS.values()] for row in rows]
    table = Table(title=f"{title}. {WARNING}", caption=about)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "draft" else "right", no_wrap=name == "draft")
    for line in cells:
        table.add_row(*line)
    console.print(table)
    console.print(*said, "", sep="\n", soft_wrap=True)
    lines = [f"## {title}", "", WARNING + " " + about, "", "| " + " | ".join(COLUMNS) + " |"]
    lines += ["|" + "|".join("--" if name == "draft" else "--:" for name in COLUMNS) + "|"]
    lines += ["| " + " | ".join(line) + " |" for line in cells]
    return "\n".join([*lines, "", *(f"* {line}" for line in said), ""])


def main() -> None:
    given, run = HfArgumentParser((Inputs, Run)).parse_args_into_dataclasses()
    console = Console(width=170, highlight=False)
    committed = [row for folder in sorted(plot.RESULTS.iterdir()) if folder.is_dir() for row in plot.read(folder)]
    page = ["# What several GPUs would do", "", f"{WARNING} Written by `python bench/project.py`; R is how many GPUs."]
    page += ["How times come about stands in `bench/latency.py`, with the sources of the inputs.", ""]
    rows: list[Row] = []
    for gpu in run.gpus.split(","):
        i, found = resolved(given, gpu, committed)
        about = (
            f"Bandwidth {i.bandwidth:.2f} TB/s ({found.get('bandwidth', 'given')}); acceptance length {i.tau:.2f}, "
            f"side by side {i.tau * i.keep:.2f} ({found.get('tau', 'given')}); groups of {i.parallel}."
        )
        for pair in run.pairs.split(","):
            target, draft = (SHAPES[name] for name in pair.split("+"))
            for engine in ENGINES:
                shapes = [(int(ranks), layout) for ranks in run.ranks.split(",") for layout in LAYOUTS]
                mine = [latency.project(i, target, draft, ranks, layout, engine) for ranks, layout in shapes]
                rows += [{**row, "gpu": gpu, "pair": pair, "inputs": dataclasses.asdict(i)} for row in mine]
                said = findings(i, target, draft, mine)
                page.append(section(f"{gpu}, {pair}, {engine}", about, mine, said, console))
    against = checked(committed)
    lines = [
        f"{r['machine']}, {r['bench']}, {r['way']}, T {r['temperature']}: predicted {r['predicted']:.0f} tokens/s, "
        f"measured {r['measured']:.0f}, ratio {r['ratio']:.2f}"
        for r in against
    ] or ["no measurement yet"]
    console.print("One GPU, predicted over measured:", *lines, sep="\n")
    page += ["## One GPU, predicted over measured", "", *(f"* {line}" for line in lines), "", "## Inputs", ""]
    page += ["| input | value | |", "|---|--:|---|"]
    for f in dataclasses.fields(Inputs):
        page.append(f"| `{f.name}` | {getattr(given, f.name) or ''} | {f.metadata['help']} |")
    if run.save:
        write_file(RESULT, "\n".join(page) + "\n")
        text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows + against)
        write_file(RESULT.with_suffix(".jsonl"), text)
        plot.save(draw(rows), RESULT.with_suffix(""))
        print(RESULT)


if __name__ == "__main__":
    main()
