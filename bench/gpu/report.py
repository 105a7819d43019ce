"""bench/results/<gpu>/report.md: everything of a run in one Markdown file, to attach to an issue; and an archive of it
with the rows and logs, to unpack in bench/results.

Both are written after every part, to a temporary file that then replaces them, so an interrupted run leaves them too.
"""

import contextlib
import io
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu.preflight import Facts, Problem, Smi, table
from bench.gpu.smoke import Smoke

ARCHIVE = "run.tar.gz"
Row = dict[str, Any]
YES = {True: "yes", False: "**no**", None: ""}


@dataclass(frozen=True)
class Outcome:
    """How a part ended."""

    state: str  # "passed", "failed", "reached its time limit", "skipped", "interrupted"
    seconds: float = 0.0
    limit: float = 0.0
    note: str = ""
    log: Path | None = None
    compiled: Mapping[str, float] = field(default_factory=dict)  # see compiling.noted
    ends: tuple[str, ...] = ()  # commands that failed, with the last lines of what they wrote

    @property
    def bad(self) -> bool:
        return self.state not in ("passed", "skipped")


@dataclass
class Run:
    """What is known of a run so far."""

    folder: Path
    start: str  # UTC, as the rows' dates
    command: str
    parts: tuple[str, ...]
    minutes: float
    facts: Facts
    smi: Smi | None
    problems: list[Problem]
    smoke: Smoke | None = None
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def rows(self, name: str) -> list[Row]:
        """The rows that this run added to a file of the folder."""
        path = self.folder / f"{name}.jsonl"
        if not path.exists():
            return []
        rows = []
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # a broken line must not cost the report
                rows.append(json.loads(line))
        return [row for row in rows if row.get("date", "") >= self.start]

    def kernels(self) -> list[Row]:
        rows = [row for path in sorted(self.folder.glob("*.jsonl")) for row in self.rows(path.stem)]
        return [row for row in rows if row.get("bench") == "kernels"]


def write(run: Run) -> Path:
    """Write the report of `run`; returns its path."""
    path = run.folder / "report.md"
    part = path.with_suffix(".part")
    part.write_text(text(run), encoding="utf-8")
    os.replace(part, path)
    return path


def archive(run: Run, out: Path) -> None:
    """Pack the report, which need not have been written, the rows and the logs of `run`."""
    out.mkdir(parents=True, exist_ok=True)
    part = out / f".{ARCHIVE}.part"
    logs = [outcome.log for outcome in run.outcomes.values() if outcome.log is not None and outcome.log.exists()]
    try:
        with tarfile.open(part, "w:gz") as tar:
            data, about = text(run).encode(), tarfile.TarInfo(f"{run.folder.name}/report.md")
            about.size = len(data)
            tar.addfile(about, io.BytesIO(data))
            for file in (*sorted(run.folder.glob("*.jsonl")), *logs):
                tar.add(file, f"{run.folder.name}/{file.name}")
        os.replace(part, out / ARCHIVE)
    finally:
        part.unlink(missing_ok=True)


def summary(run: Run) -> str:
    """The run in about ten lines."""
    bad = [f"{name} {outcome.state}" for name, outcome in run.outcomes.items() if outcome.bad]
    compiled = [outcome.compiled for outcome in run.outcomes.values() if outcome.compiled]
    made, seconds, cached = (sum(each[key] for each in compiled) for key in ("compiled", "seconds", "cached"))
    lines = [
        f"commit {run.facts.commit}, {len(run.outcomes)} of {len(run.parts)} parts; "
        f"not passed: {', '.join(bad) or 'none'}",
        f"kernels: {made:.0f} compiled in {seconds:.0f} s of all processes, {cached:.0f} from the cache",
    ]
    if rows := run.rows("bits"):
        wrong = [f"{row['op']} {row['kind']}: {row['found']}" for row in rows if row["found"] != "equal bits"]
        lines.append(f"bits of {len(rows)} products: {'; '.join(wrong) or 'all equal'}")
    speeds: dict[str, list[Row]] = {}
    for row in run.rows("e2e"):
        speeds.setdefault(f"{row.get('target', '')}, batch {row.get('batch_size', 1)}", []).append(row)
    for name, rows in speeds.items():
        wrong = [f"{row['way']}: {row['reason']}" for row in rows if "reason" in row]
        right = sorted((row for row in rows if "reason" not in row), key=lambda row: -row["over_ar"])
        best = [f"{row['over_ar']:.2f}x {row['way']} at T {row['temperature']:g}" for row in right[:3]]
        turned = [row["way"] for row in right if row.get("differing_within_rounding")]
        tokens = f"wrong tokens or no run: {'; '.join(wrong) or 'none'}; by rounding: {', '.join(turned) or 'none'}"
        lines.append(f"{name}: {len(right) - len(turned)} with the tokens of ar, {', '.join(best)}; {tokens}")
    decoded = [row for row in run.rows("decode") if "value" in row]
    shares = [f"{row['case'].removeprefix('ar ')} {row['value']:.0%}" for row in decoded if row["way"] == "ar"]
    others = [f"{row['case']} {row['way']} {_found(row)}" for row in decoded if row["way"] != "ar"]
    others += [f"{row['case']} {row['launches']}" for row in run.rows("decode") if "launches" in row]
    ops = {op: [row for row in run.kernels() if row["op"] == op] for op in ("tree_attention", "layer_group")}
    ours = [row for row in ops["tree_attention"] if row["way"] == "specker" and "share" in row]
    columns = [f"{row['case'].removeprefix('B 1, ')} {row['share']:.0%}" for row in ours]
    sequence = [row for row in ops["layer_group"] if row["way"] == "sequence" and "ours_over_this" in row]
    groups = [f"{row['case']} {row['ours_over_this']:.2f}x" for row in sequence]
    ways = [f"{row['way']} {row['times']:.2f}x" for row in run.rows("ab") if "times" in row]
    named = {"ar, of the bandwidth": shares, "decode": others, "tree_attention, of the limit": columns}
    named |= {"groups of layers over layers in turn": groups, "ab": ways}
    return "\n".join(lines + [f"{name}: {', '.join(values)}" for name, values in named.items() if values])


def _found(row: Row) -> str:
    number = f"{row['value']:.1%}" if row["unit"] == "%" else f"{row['value']:.2f}x"
    return f"{number} of {row['of']}"


def keep(folder: Path) -> None:
    """Rename the report of an earlier run to report-<start>.md."""
    path = folder / "report.md"
    if path.exists():
        found = re.search(r"^Started (\S+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        os.replace(path, folder / f"report-{found[1].strip(',').replace(':', '') if found else 'earlier'}.md")


def text(run: Run) -> str:
    name = run.facts.name or "a GPU"
    return "\n\n".join([f"# specker on {name}", *(shown(section, run) for section in (opening, *SECTIONS))]) + "\n"


def shown(section: Callable[[Run], str], run: Run) -> str:
    """A section. A row of a form that it does not expect costs this section alone."""
    try:
        return section(run)
    except Exception as error:
        return f"## {section.__name__}\n\nCannot be shown: {type(error).__name__}: {error}"


def opening(run: Run) -> str:
    ended = sum(outcome.state != "skipped" for outcome in run.outcomes.values())
    bad = [name for name, outcome in run.outcomes.items() if outcome.bad]
    goals = [row for row in [*run.rows("decode"), *run.kernels()] if "goal" in row]
    met = sum(row["met"] is True for row in goals)
    lines = [
        f"Started {run.start}, commit {run.facts.commit}, {run.minutes:g} minutes, `{run.command}`.",
        "",
        f"* parts: {ended} of {len(run.parts)} have ended; not passed: {', '.join(bad) or 'none'}",
        f"* goals: {met} of {len(goals)} measured ones are met",
        f"* mismatches found before the start: {len(run.problems)}",
    ]
    return "\n".join(lines)


def parts(run: Run) -> str:
    """Seconds of compilation are summed over processes, so they may exceed the part's."""
    rows = []
    for name in run.parts:
        outcome = run.outcomes.get(name)
        if outcome is None:
            rows.append((name, "not run", "", "", "", "", "", ""))
            continue
        c = outcome.compiled
        counts = (f"{c['compiled']:.0f}", f"{c['seconds']:.0f}", f"{c['cached']:.0f}") if c else ("", "", "")
        log = f"{outcome.log.name}" if outcome.log is not None else ""
        rows.append((name, outcome.state, f"{outcome.seconds:.0f}", f"{outcome.limit:.0f}", *counts, log))
    head = ("part", "state", "s", "limit, s", "kernels compiled", "compiling, s", "from the cache", "log")
    notes = [f"* {name}: {outcome.note}" for name, outcome in run.outcomes.items() if outcome.note]
    told = "Seconds of compilation are summed over the processes of a part."
    return "\n\n".join(["## Parts", markdown(head, rows), told, *(["\n".join(notes)] if notes else [])])


def preflight(run: Run) -> str:
    found = [f"* {'**stops:** ' if p.fatal else ''}{p.sentence}" for p in run.problems]
    facts = markdown(("", ""), table(run.facts, run.smi))
    return "\n\n".join(["## Preflight", facts, "\n".join(found) or "Nothing that does not fit together was found."])


def smoke(run: Run) -> str:
    if run.smoke is None:
        return "## Smoke\n\nNot run."
    rows = [(c.name, c.state, f"{c.seconds:.0f}", c.note) for c in run.smoke.checks]
    off = [name for name, works in (("PDL", run.smoke.pdl), ("graphs", run.smoke.graphs)) if not works]
    rest = "Nothing else was run." if run.smoke.stop else ""
    rest = rest or (
        f"The other parts ran with {' and '.join(off)} off." if off else "The other parts ran with both on."
    )
    return "\n\n".join(["## Smoke", markdown(("check", "state", "s", ""), rows), rest])


def bits(run: Run) -> str:
    rows = [(r["op"], r["kind"], str(r["repeats"]), r["found"]) for r in run.rows("bits")]
    return titled("Bits of products", ("op", "weights", "repeats beside another kernel", "found"), rows)


def strategies(run: Run) -> str:
    rows = []
    for r in run.rows("e2e"):
        about = (
            r.get("target", ""),
            str(r.get("batch_size", 1)),
            f"{r['temperature']:g}" if "temperature" in r else "",
        )
        if "reason" in r:
            rows.append((*about, r["way"], "", "", "", "", "", r["reason"]))
            continue
        rate = f"{r['tokens_per_second']:.0f}", f"{r['over_ar']:.2f}x", f"{r['acceptance_length']:.2f}"
        differing = r.get("differing_within_rounding")
        equal = "" if differing is None else "all equal" if not differing else f"{differing} texts turned by rounding"
        rows.append((*about, r["way"], *rate, f"{r['warmup_seconds']:.0f}", str(r["prompts"]), equal))
    head = (
        "models",
        "batch",
        "T",
        "way",
        "tokens/s",
        "over ar",
        "tokens a round",
        "warm-up, s",
        "texts",
        "tokens of ar",
    )
    return titled("Strategies", head, rows)


def ab(run: Run) -> str:
    rows = [
        (r["case"], r["way"], r["reason"], "", "", "")
        if "reason" in r
        else (
            r["case"],
            r["way"],
            f"{r['median'] * 1e3:.3f}",
            f"{r['p20'] * 1e3:.3f}",
            f"{r['p80'] * 1e3:.3f}",
            f"{r['times']:.3f}x",
        )
        for r in run.rows("ab")
    ]
    head = ("case", "way", "ms a token", "p20", "p80", "as fast as neither")
    return titled("PDL and graphs, in turn", head, rows)


def decode(run: Run) -> str:
    rows = []
    for r in run.rows("decode"):
        value = r.get("reason", "")
        if "value" in r:
            value = _found(r)
        if "launches" in r:
            value = f"{r['launches']} launches" + (f", {value}" if value else "")
        ms = [f"{r[key] * 1e3:.3f}" if key in r else "" for key in ("median", "p20", "p80")]
        rate = [f"{r[key] / 1e12:.2f}" if key in r else "" for key in ("bandwidth", "specified")]
        size = f"{r['bytes'] / 1e9:.2f}" if "bytes" in r else ""
        rows.append((r["case"], r["way"], *ms, size, *rate, value, r.get("goal", ""), YES[r.get("met")]))
    head = ("case", "way", "ms", "p20", "p80", "GB", "TB/s read", "TB/s specified", "found", "goal", "met")
    told = "With random weights, as bench/decode.py says." if rows else ""
    return "\n\n".join(filter(None, [titled("Decoding against its goals", head, rows), told]))


def kernels(run: Run) -> str:
    rows, all_rows = [], run.kernels()
    for r in all_rows:
        if "reason" in r and not r["way"]:
            rows.append((r["op"], r["case"], "", "", "", "", r["reason"], "", ""))
        elif r["way"] == "specker":
            others = [o for o in all_rows if (o["op"], o["case"]) == (r["op"], r["case"]) and o["way"] != "specker"]
            beside = ", ".join(f"{o['way']} {o['ours_over_this']:.2f}x" for o in others if "reason" not in o)
            shares = [f"{r[key]:.0%}" if key in r else "" for key in ("share", "share_specified")]
            over = f"{(r['median'] - r['empty']) * 1e6:.1f}" if "empty" in r else ""
            us = f"{r['median'] * 1e6:.1f}"
            rows.append((r["op"], r["case"], us, *shares, over, beside, r.get("goal", ""), YES[r.get("met")]))
    head = ("op", "case", "us", "of the limit", "specified", "over empty, us", "times of others", "goal", "met")
    return titled("Kernels", head, rows)


def tests(run: Run) -> str:
    """Each process's count, and how many tokens of a tree rounding turns."""
    logs = [run.outcomes[name].log for name in ("tests", "untried", "delay") if name in run.outcomes]
    text = "\n".join(log.read_text(encoding="utf-8", errors="replace") for log in logs if log is not None)
    said = re.findall(
        r"^=*\s*(\d+ (?:passed|failed|skipped)\b.* in [\d.]+s\b.*?|.* turned by rounding)\s*=*$", text, re.M
    )
    return "\n\n".join(["## Tests", "\n".join(f"* {line}" for line in said) or "No counts."])


def failures(run: Run) -> str:
    found = []
    for name, outcome in run.outcomes.items():
        if outcome.bad:
            ends = [f"```\n{end.replace('```', chr(39) * 3)}\n```" for end in outcome.ends]
            found.append("\n\n".join([f"### {name}: {outcome.state}", *(ends or [outcome.note or "No log."])]))
    return "\n\n".join(["## Failures", *(found or ["None."])])


SECTIONS = (parts, preflight, smoke, bits, strategies, ab, decode, kernels, tests, failures)


def titled(title: str, head: Iterable[str], rows: list[tuple[str, ...]]) -> str:
    return f"## {title}\n\n{markdown(head, rows) if rows else 'No rows.'}"


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; bars and line ends within a cell would break it."""
    head = tuple(head)
    cells = [tuple(re.sub(r"\s+", " ", cell).replace("|", "\\|") for cell in row) for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ("---",) * len(head), *cells])
