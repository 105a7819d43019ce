"""bench/results/<gpu>/report.md: everything of a run in one Markdown file, to attach to an issue.

It is written after every part, to a temporary file that then replaces it, so an interrupted run leaves a report too.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu.preflight import Facts, Problem, Smi, table
from bench.gpu.smoke import Smoke

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


def keep(folder: Path) -> None:
    """Rename the report of an earlier run to report-<start>.md."""
    path = folder / "report.md"
    if path.exists():
        found = re.search(r"^Started (\S+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        os.replace(path, folder / f"report-{found[1].strip(',').replace(':', '') if found else 'earlier'}.md")


def text(run: Run) -> str:
    name = run.facts.name or "a GPU"
    parts = [f"# specker on {name}", opening(run), *(section(run) for section in SECTIONS)]
    return "\n\n".join(parts) + "\n"


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
            number = f"{r['value']:.1%}" if r["unit"] == "%" else f"{r['value']:.2f}x"
            value = f"{number} of {r['of']}"
        if "launches" in r:
            value = f"{r['launches']} launches"
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
    outcome = run.outcomes.get("tests")
    log = "" if outcome is None or outcome.log is None else outcome.log.read_text(encoding="utf-8", errors="replace")
    said = re.findall(
        r"^=*\s*(\d+ (?:passed|failed|skipped)\b.* in [\d.]+s\b.*?|.* turned by rounding)\s*=*$", log, re.M
    )
    return "\n\n".join(["## Tests", "\n".join(f"* {line}" for line in said) or "No counts."])


def failures(run: Run) -> str:
    found = []
    for name, outcome in run.outcomes.items():
        if outcome.bad:
            ends = [f"```\n{end.replace('```', chr(39) * 3)}\n```" for end in outcome.ends]
            found.append("\n\n".join([f"### {name}: {outcome.state}", *(ends or [outcome.note or "No log."])]))
    return "\n\n".join(["## Failures", *(found or ["None."])])


SECTIONS = (parts, preflight, smoke, ab, decode, kernels, tests, failures)


def titled(title: str, head: Iterable[str], rows: list[tuple[str, ...]]) -> str:
    return f"## {title}\n\n{markdown(head, rows) if rows else 'No rows.'}"


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; bars and line ends within a cell would break it."""
    head = tuple(head)
    cells = [tuple(re.sub(r"\s+", " ", cell).replace("|", "\\|") for cell in row) for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ("---",) * len(head), *cells])
