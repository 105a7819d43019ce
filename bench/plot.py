"""Plot the results: `python bench/plot.py [FOLDER of bench/results ...]`.

Each machine's folder is plotted with the newest row of every (op, case, way), and with the newest run of bench/e2e.py
on each pair. tables.py writes the same rows as Markdown.
Kernels: the share of the hardware's limit, with the goal if it names one, and the speed over each baseline. End to end:
tokens/s and acceptance length. SVG files go next to the rows; a table of everything is printed.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.papers import picture

Row = dict[str, Any]
RESULTS = Path(__file__).parent / "results"


def read(folder: Path) -> list[Row]:
    """Rows of every .jsonl in `folder`, oldest first. ValueError names the file and line of a broken one."""
    rows = []
    for path in sorted(folder.glob("*.jsonl")):
        for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {n}: {error}") from None
    return sorted(rows, key=lambda row: row.get("date", ""))


def newest(rows: Iterable[Row], key: Callable[[Row], Any]) -> list[Row]:
    """The last row of each key, at the place of the first."""
    return list({key(row): row for row in rows}.values())


def kernels(rows: Iterable[Row]) -> list[list[Row]]:
    """Each case's rows of one run, specker's first, by op and case."""
    timed = (r for r in rows if r.get("bench") == "kernels" and "reason" not in r)
    rows = newest(timed, lambda row: (row["op"], row["case"], row["way"]))
    cases: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        cases.setdefault((row["op"], row["case"]), []).append(row)
    return [[r for r in ways if r["date"] == ways[0]["date"]] for _, ways in sorted(cases.items())]


def end_to_end(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of the newest run of each pair and kind of questions, by name: e2e for the bundled family."""
    runs: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("bench") == "e2e" and "reason" not in row:
            named = filter(None, ("e2e", row.get("target"), *row.get("categories", "").split(",")))
            runs.setdefault("-".join(named), []).append(row)
    for name, run in runs.items():
        last = [row for row in run if origin_of(row) == origin_of(run[-1])]
        runs[name] = newest(last, lambda row: (row["temperature"], row["way"]))
    return runs


def origin_of(row: Row) -> tuple[Any, ...]:
    """The same for all rows of a run."""
    return row.get("command"), row.get("commit")


def peers(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of the run of bench/peers.py in which the most engines ran, for each model and kind of questions, the
    newest of several, by name."""
    runs: dict[str, dict[tuple[Any, ...], list[Row]]] = {}
    for row in rows:
        if row.get("bench") == "peers":
            named = filter(None, ("peers", row["target"], *row.get("categories", "").split(",")))
            runs.setdefault("-".join(named), {}).setdefault(origin_of(row), []).append(row)

    def ran(run: list[Row]) -> tuple[int, str]:
        return sum("reason" not in row for row in run), run[-1]["date"]

    return {name: max(each.values(), key=ran) for name, each in runs.items()}


def contexts(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of the newest run of bench/contexts.py for each model, by name."""
    runs: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("bench") == "contexts":
            runs.setdefault(f"contexts-{row['target']}", []).append(row)
    return {name: [row for row in run if origin_of(row) == origin_of(run[-1])] for name, run in runs.items()}


def serving(rows: Iterable[Row]) -> dict[str, dict[str, list[Row]]]:
    """The rows of the newest run of bench/serving.py with specker for each model and mix of prompts, by name."""
    runs: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        if "concurrency" in row and "mix" in row:
            runs.setdefault(f"serving-{row['model']}", {}).setdefault(row["mix"], []).append(row)

    def last(run: list[Row]) -> list[Row]:
        own = [row for row in run if row["way"].startswith("specker")]
        return [row for row in run if origin_of(row) == origin_of((own or run)[-1])]

    return {name: {mix: last(run) for mix, run in mixes.items()} for name, mixes in runs.items()}


def on_gpus(folder: Path, rows: list[Row]) -> dict[str, list[Row]]:
    """The newest rows of a GPU's kernels and of decoding there, by "kernels-<folder>" and "decode-<folder>"."""
    timed = [row for ways in kernels(rows) for row in ways if "share" in row]
    decoded = [row for row in rows if row.get("bench") == "decode" and row["device"] == "cuda" and "median" in row]
    decoded = newest(decoded, lambda row: (row["case"], row["way"]))
    named = {f"kernels-{folder.name}": timed, f"decode-{folder.name}": decoded}
    return {name: found for name, found in named.items() if found}


def goal_share(row: Row) -> float | None:
    """The share of the limit in a goal such as ">= 85%, >= 1x torch"."""
    found = re.match(r">= (\d+)%", row.get("goal", ""))
    return int(found[1]) / 100 if found else None


def draw_kernels(cases: list[list[Row]], title: str) -> Any:
    """Left: share of the limit. Right: speed over each baseline, on a log axis."""
    from matplotlib.figure import Figure

    names = [f"{ways[0]['op']}: {ways[0]['case']}" for ways in cases]
    figure = Figure(figsize=(13, 1.2 + 0.32 * len(cases)), layout="constrained")
    figure.suptitle(title, fontsize=10)
    left, right = figure.subplots(1, 2, sharey=True)
    at = range(len(cases))
    left.barh(at, [100 * ways[0].get("share", 0) for ways in cases], color="#4878a8", height=0.6)
    goals = [(i, goal_share(ways[0])) for i, ways in enumerate(cases)]
    marks = [(100 * share, i) for i, share in goals if share is not None]
    if marks:
        left.scatter(*zip(*marks, strict=True), marker="|", s=160, color="black", label="goal")
        left.legend(loc="lower right", fontsize=8)
    left.set_yticks(at, names, fontsize=8)
    left.invert_yaxis()
    left.set_xlim(0, 100)
    left.set_xlabel("% of max(bytes / bandwidth, flops / matmul rate)")
    for baseline in dict.fromkeys(row["way"] for ways in cases for row in ways[1:]):
        points = [(r["ours_over_this"], i) for i, ways in enumerate(cases) for r in ways[1:] if r["way"] == baseline]
        right.scatter(*zip(*points, strict=True), s=22, label=baseline)
    right.axvline(1, color="grey", linewidth=0.8)
    right.set_xscale("log")
    right.set_xlabel("times as fast as")
    if right.collections:
        right.legend(fontsize=7)
    return figure


def draw_end_to_end(rows: list[Row], title: str) -> Any:
    """Tokens/s per configuration, with a panel per temperature and acceptance lengths next to the bars."""
    from matplotlib.figure import Figure

    temperatures = sorted({row["temperature"] for row in rows})
    figure = Figure(figsize=(6.5 * len(temperatures), 1.2 + 0.32 * len(rows) / len(temperatures)), layout="constrained")
    figure.suptitle(title, fontsize=10)
    for axis, temperature in zip(figure.subplots(1, len(temperatures), squeeze=False)[0], temperatures, strict=True):
        ways = [row for row in rows if row["temperature"] == temperature]
        speeds = [row["tokens_per_second"] for row in ways]
        bars = axis.barh(range(len(ways)), speeds, color="#4878a8", height=0.6)
        lengths = [row.get("acceptance_length") for row in ways]
        axis.bar_label(bars, [f" {tau:.2f}" if tau and tau != 1 else "" for tau in lengths], fontsize=8)
        axis.set_yticks(range(len(ways)), [row["way"] for row in ways], fontsize=8)
        axis.invert_yaxis()
        axis.margins(x=0.12)
        axis.set_title(f"temperature {temperature:g}", fontsize=9)
        axis.set_xlabel("tokens a second (acceptance length at the bar)")
    return figure


def draw_peers(kinds: dict[str, list[Row]], dark: bool) -> Any:
    """Tokens/s of each engine, a panel for each kind of prompt; for a light or a dark page. specker's bars are blue."""
    from matplotlib.figure import Figure

    ink, ours, theirs = ("#e6edf3", "#58a6ff", "#6e7681") if dark else ("#1f2328", "#0969da", "#afb8c1")
    ways = [row["way"] for row in next(iter(kinds.values()))]
    figure = Figure(figsize=(4.2 * len(kinds), 0.8 + 0.3 * len(ways)), layout="constrained")
    figure.patch.set_alpha(0)
    for axis, (kind, rows) in zip(
        figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0], kinds.items(), strict=True
    ):
        found = {row["way"]: row for row in rows if "reason" not in row}
        speeds = [found[way]["tokens_per_second"] if way in found else 0.0 for way in ways]
        colors = [ours if way.startswith("specker") else theirs for way in ways]
        bars = axis.barh(range(len(ways)), speeds, color=colors, height=0.7)
        axis.bar_label(bars, [f" {speed:.0f}" for speed in speeds], fontsize=9, color=ink)
        axis.set_yticks(range(len(ways)), ways, fontsize=9, color=ink)
        axis.set_xticks([])
        axis.invert_yaxis()
        axis.margins(x=0.14)
        axis.set_title(kind, fontsize=10, color=ink)
        axis.set_facecolor("none")
        axis.tick_params(length=0)
        for side in axis.spines.values():
            side.set_visible(False)
    figure.supxlabel("tokens a second, whole requests", fontsize=9, color=ink)
    return figure


def draw_contexts(rows: list[Row], dark: bool) -> Any:
    """Tokens/s of each engine over the length of the prompt: of the prompt, and after it with its limit by bytes."""
    figure, (left, right), lines = _lines(rows, 2, dark)
    lines(left, rows, "prompt_tokens", "prefill_tokens_per_second")
    lines(right, rows, "prompt_tokens", "decode_tokens_per_second", limit="limit")
    left.set_title("prompt tokens a second")
    right.set_title("tokens a second after it (dotted: by bytes)")
    for axis in (left, right):
        axis.set_xlabel("tokens of the prompt")
    return figure


def draw_serving(mixes: dict[str, list[Row]], dark: bool) -> Any:
    """Tokens/s of each server over the requests at once, a panel for each mix of prompts."""
    figure, axes, lines = _lines([row for rows in mixes.values() for row in rows], len(mixes), dark)
    for axis, (mix, rows) in zip(axes, mixes.items(), strict=True):
        lines(axis, rows, "concurrency", "tokens_per_second")
        axis.set_title(f"{mix} prompts: tokens a second of answers")
        axis.set_xlabel("requests at once")
    return figure


def _lines(rows: list[Row], panels: int, dark: bool) -> tuple[Any, list[Any], Callable[..., None]]:
    """A figure for a light or a dark page, its axes, and a function that draws a line for each way into one of them.
    specker's lines are blue."""
    from matplotlib.figure import Figure

    ink, ours, theirs = ("#e6edf3", "#58a6ff", "#8b949e") if dark else ("#1f2328", "#0969da", "#6e7781")
    figure = Figure(figsize=(4.8 * panels, 3.4), layout="constrained")
    figure.patch.set_alpha(0)
    marks = dict(zip(dict.fromkeys(row["way"] for row in rows), "os^Dv*PX<>ph", strict=False))

    def lines(axis: Any, own: list[Row], x: str, y: str, limit: str | None = None) -> None:
        for way, mark in marks.items():
            if not (some := sorted((row for row in own if row["way"] == way), key=lambda row: row[x])):
                continue
            at, color = [row[x] for row in some], ours if way.startswith("specker") else theirs
            axis.plot(at, [row[y] for row in some], marker=mark, color=color, label=way, linewidth=1.5, markersize=5)
            if limit is not None:
                axis.plot(at, [row[limit] for row in some], ":", color=color, linewidth=0.8)
        every = sorted({row[x] for row in own})
        axis.set_xscale("log", base=2)
        axis.set_xticks(every, [f"{n:,}" for n in every])
        axis.set_ylim(bottom=0)
        axis.set_facecolor("none")
        axis.tick_params(colors=ink, labelsize=9)
        for text in (axis.title, axis.xaxis.label):
            text.set(color=ink, fontsize=10)
        for side in axis.spines.values():
            side.set_color(theirs)
        axis.legend(fontsize=8, labelcolor=ink, frameon=False)

    return figure, list(figure.subplots(1, panels, squeeze=False)[0]), lines


def save(figure: Any, path: Path) -> None:
    """`path` without its ending -> SVG; the same rows give the same file."""
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": path.name}):
        figure.savefig(path.with_name(f"{path.name}.svg"), metadata={"Date": None})


def show(machine: str, cases: list[list[Row]], runs: dict[str, list[Row]]) -> None:
    table = Table(title=f"{machine}: what stands in the results")
    for column in ("bench", "case", "us or tokens/s", "of the limit", "over baselines", "goal", "met"):
        table.add_column(column, justify="left" if column in ("bench", "case", "over baselines", "goal") else "right")
    for ways in cases:
        ours = ways[0]
        table.add_row(
            ours["op"],
            ours["case"],
            f"{ours['median'] * 1e6:.1f}",
            f"{ours['share']:.0%}" if "share" in ours else "",
            ", ".join(f"{row['ours_over_this']:.2f}x {row['way']}" for row in ways[1:]),
            ours.get("goal", ""),
            {True: "yes", False: "no", None: ""}[ours.get("met")],
        )
    for name, rows in runs.items():
        for row in rows:
            case, speed = f"{row['way']}, T {row['temperature']:g}", f"{row['tokens_per_second']:.0f}"
            table.add_row(name, case, speed, "", f"{row['over_ar']:.2f}x ar", "", "")
    Console(width=170).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw and list what stands in bench/results.")
    parser.add_argument("folders", nargs="*", type=Path, help="default: every machine's folder of bench/results")
    args = parser.parse_args()
    every = sorted(path for path in RESULTS.iterdir() if path.is_dir())
    for folder in args.folders or every:
        try:
            rows = read(folder)
        except ValueError as error:
            parser.error(str(error))
        cases, runs = kernels(rows), end_to_end(rows)
        lengths, loads = contexts(rows), serving(rows)
        papers = [row for row in rows if row.get("bench") == "papers"]
        if not cases and not runs and not lengths and not loads and not papers:
            if args.folders:
                parser.error(f"{folder}: there are no rows to draw")
            continue
        machine = rows[-1]["machine"]
        timed = [ways for ways in cases if "share" in ways[0]]  # on a CPU there is no limit
        show(machine, cases, runs)
        drawn = {"kernels": draw_kernels(timed, machine)} if timed else {}
        drawn |= {name: draw_end_to_end(run, machine) for name, run in runs.items()}
        beside: dict[str, dict[str, list[Row]]] = {}  # target -> kind of prompts -> rows
        for run in peers(rows).values():
            if kind := run[0].get("categories"):
                beside.setdefault(run[0]["target"], {})[kind] = run
        drawn |= {"papers": picture.draw(papers)} if papers else {}
        for target, kinds in beside.items():
            drawn |= {f"peers-{target}-{shade}": draw_peers(kinds, shade == "dark") for shade in ("light", "dark")}
        for shade in ("light", "dark"):
            drawn |= {f"{name}-{shade}": draw_contexts(run, shade == "dark") for name, run in lengths.items()}
            drawn |= {f"{name}-{shade}": draw_serving(mixes, shade == "dark") for name, mixes in loads.items()}
        for name, figure in drawn.items():
            save(figure, folder / name)
            print(folder / f"{name}.svg", file=sys.stderr)


if __name__ == "__main__":
    main()
