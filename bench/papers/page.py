"""The tables of docs/papers.md, as Markdown, which a run prints too."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from bench import tables
from bench.plot import Row, origin_of, read

NOT_YET = "Not measured yet: `make papers ARGS=--save` measures, and `make pages` writes the tables here."
NUMBERS: dict[str, dict[str, str]] = {  # paper -> further columns of its settings: their format
    "easyspec": {"tokens a round, of the draft in sequence": "{of_sequence:.0%}", "ms a draft token": "{draft_ms:.2f}"},
    "del": {"tokens per loaded layer": "{per_layer:.4f}"},
    "diffuspec": {"drafted a round": "{drafted_a_round:.1f}"},
    "vocabtrim": {
        "tokens a round, of the whole head": "{of_whole:.1%}",
        "ms a draft token": "{draft_ms:.2f}",
        "MBSU": "{mbsu:.2f}",
        "speed, of the whole head": "{over_whole:.2f}",
    },
}


def read_rows(folders: Iterable[Path]) -> list[Row]:
    """The rows of all machines, oldest first."""
    rows = [row for folder in folders for row in read(folder) if row.get("bench") == "papers"]
    return sorted(rows, key=lambda row: row["date"])


def of_paper(paper: str, rows: list[Row]) -> str:
    """The tables of the newest run of each model on a CPU and on a GPU."""
    runs: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["paper"] == paper:
            runs.setdefault((row["model"], row["device"]), []).append(row)
    newest = ([row for row in run if origin_of(row) == origin_of(run[-1])] for run in runs.values())
    return "\n\n".join(part for run in newest for part in of_model(paper, run)) or NOT_YET


def of_model(paper: str, rows: list[Row]) -> Iterable[str]:
    """The tables of one run with one model."""
    yield tables.origin(rows[-1])
    for name, made in TABLES.items():
        own = [row for row in rows if row["table"] == name]
        for temperature in sorted({row["temperature"] for row in own}):
            some = [row for row in own if row["temperature"] == temperature]
            model = some[0]["model"][:1].upper() + some[0]["model"][1:]
            yield f"**{model}**, T = {temperature:g}{ABOUT[name]}:"
            yield tables.table(made(paper, some))
            if name == "speed" and (said := nearness(paper, some)):
                yield said


def text(row: Row, form: str) -> str:
    """Fields of a row, or nothing if it lacks one."""
    try:
        return form.format_map(row)
    except KeyError:
        return ""


def of_settings(paper: str, rows: list[Row]) -> list[list[str]]:
    more = NUMBERS[paper]
    head = ["setting", "flags", "times as fast as `ar`", "p20 to p80 over texts", "tokens a round", *more]
    lines = [[*head, "the paper's own speed"], ["---", "---", *["--:"] * (4 + len(more))]]
    for row in rows:
        forms = ("{over_ar:.2f}", "{over_ar_texts[p20]:.2f} to {over_ar_texts[p80]:.2f}", "{acceptance_length:.2f}")
        numbers = [text(row, form) for form in (*forms, *more.values())]
        lines.append([row["way"], f"`{row['flags']}`", *numbers, row["theirs"]])
    return lines


def nearness(paper: str, rows: list[Row]) -> str:
    """How near the default comes to the paper's best setting."""
    own = {row["flags"]: row for row in rows if row["flags"].startswith(f"--strategy {paper}")}
    if (default := own.get(f"--strategy {paper}")) is None:
        return ""
    best = max(own.values(), key=lambda row: row["over_ar"])
    share, rested = default["over_ar"] / best["over_ar"], default["rested"]
    said = f"The default has {share:.0%} of the speed of the fastest of these, `{best['flags']}`"
    return f"{said}. It drafted nothing in {rested:.0%} of its rounds."


def of_sweep(paper: str, rows: list[Row]) -> list[list[str]]:
    head = ["layers that draft", "best length by layers", "tokens a round", "tokens per loaded layer"]
    lines = [[*head, "best length by seconds", "times as fast as `ar`, expected"], ["--:"] * 6]
    forms = ("{exit}", "{g}", "{acceptance_length:.2f}", "{per_layer:.4f}", "{fast_g}", "{by_seconds:.2f}")
    return lines + [[text(row, form) for form in forms] for row in rows]


def of_groups(paper: str, rows: list[Row]) -> list[list[str]]:
    sizes, ways = sorted({row["layers"] for row in rows}), list(dict.fromkeys(row["calibration"] for row in rows))
    found = {(row["width"], row["layers"], row["calibration"]): row["acceptance_length"] for row in rows}
    head = [f"{size} in a group" if size > 1 else "in sequence" for size in sizes]
    lines = [["nodes a level", "calibration", *head], ["--:", "---", *["--:"] * len(sizes)]]
    for width in sorted({row["width"] for row in rows}):
        for way in ways:
            each = [found.get((width, size, way)) for size in sizes]
            lines.append([str(width), way, *("" if length is None else f"{length:.2f}" for length in each)])
    return lines


def of_steps(paper: str, rows: list[Row]) -> list[list[str]]:
    counts = rows[0]["draft_rows"]
    head = [name for n in counts for name in (f"ms, {n} row{'s' * (n > 1)}", "times as fast as in sequence")]
    lines = [["layers in a group", "cosine of the final rows", *head], ["--:"] * (2 + len(head))]
    for row in rows:
        pairs = zip(row["step_ms"], rows[0]["step_ms"], strict=True)
        times = [number for own, first in pairs for number in (f"{own:.2f}", f"{first / own:.2f}")]
        lines.append([str(row["layers"]), f"{row['cosine']:.3f}", *times])
    return lines


def of_layouts(paper: str, rows: list[Row]) -> list[list[str]]:
    lines = [["layout", "flags", "tokens a round", "ms a draft"], ["---", "---", "--:", "--:"]]
    forms = ("{way}", "`{flags}`", "{acceptance_length:.2f}", "{round_ms:.1f}")
    return lines + [[text(row, form) for form in forms] for row in rows]


def of_sources(paper: str, rows: list[Row]) -> list[list[str]]:
    lines = [["counted", "share of the text in the kept rows", "tokens a round", "MBSU"], ["---", *["--:"] * 3]]
    forms = ("{way}", "{coverage:.1%}", "{acceptance_length:.2f}", "{mbsu:.2f}")
    return lines + [[text(row, form) for form in forms] for row in rows]


TABLES: dict[str, Callable[[str, list[Row]], list[list[str]]]] = {
    "speed": of_settings,
    "sweep": of_sweep,
    "groups": of_groups,
    "steps": of_steps,
    "layouts": of_layouts,
    "source": of_sources,
}
ABOUT = {  # after the model and the temperature
    "speed": "",
    "sweep": ", a full sweep of fixed exits and lengths, by counts",
    "groups": ", tokens a round by width, layers in a group and calibration",
    "steps": ", a draft step",
    "layouts": ", chains of four tokens on two ranks of one thread each",
    "source": ", rows of the head chosen by counts of different text",
}


def summary(rows: list[Row]) -> str:
    """A line for each paper and temperature: its settings as published, by default, and the best, in times as fast as
    `ar`, from the newest run with the model of the newest row."""
    speeds = [row for row in rows if row["table"] == "speed" and "inflated" in row["model"] and row["device"] == "cpu"]
    if not speeds:
        return NOT_YET
    newest = [row for row in speeds if origin_of(row) == origin_of(speeds[-1])]
    temperatures = sorted({row["temperature"] for row in newest})
    head = [f"{name}, T = {t:g}" for name in ("as published", "by default", "best setting") for t in temperatures]
    lines = [["`--strategy`", *head], ["---", *["--:"] * len(head)]]
    for paper in dict.fromkeys(row["paper"] for row in newest):
        own = [row for row in newest if row["paper"] == paper and row["flags"].startswith(f"--strategy {paper}")]
        numbers = []
        for flag in (f"--strategy {paper} --as-published", f"--strategy {paper}", ""):
            for t in temperatures:
                found = [row["over_ar"] for row in own if row["temperature"] == t and flag in (row["flags"], "")]
                numbers.append(f"{max(found):.2f}" if found else "")
        lines.append([f"[`{paper}`](#{paper})", *numbers])
    return f"{tables.table(lines)}\n\n{tables.origin(newest[-1])}"


def picture(folders: Iterable[Path], page: Path) -> str:
    """The newest picture, as Markdown for a page in the folder `page`; "" if there is none."""
    drawn = {max(row["date"] for row in rows): folder for folder in folders if (rows := read_rows([folder]))}
    if not drawn:
        return ""
    path = os.path.relpath(drawn[max(drawn)] / "papers.svg", page)
    return f"![Bars: how many times as fast as plain decoding each setting is]({path})"
