"""The smoke part: every op, then decoding in four forms, each in a process of its own, which must give equal tokens.

The forms are with and without programmatic dependent launch (PDL) and CUDA graphs. If one fails, the rest of the parts
run with it off. If the ops or the plainest form fail, nothing else runs.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from bench.gpu.running import Command, Ended, Step, run, share


@dataclass(frozen=True)
class Form:
    name: str
    pdl: bool
    graphs: bool


FORMS = (
    Form("PDL off, graphs off", False, False),
    Form("PDL on, graphs off", True, False),
    Form("PDL off, graphs on", False, True),
    Form("PDL on, graphs on", True, True),
)
UNCAPTURED = "could not be captured"  # from the warning of specker/runtime/round/graphs.py


@dataclass(frozen=True)
class Checked:
    """One check of the smoke part."""

    name: str
    state: str  # "passed", "failed" or "not run"
    seconds: float = 0.0
    note: str = ""
    end: str = ""  # the last lines of what failed


@dataclass(frozen=True)
class Smoke:
    checks: tuple[Checked, ...]
    pdl: bool = True  # works
    graphs: bool = True  # work
    stop: bool = False  # nothing else can run


def smoke(
    ops: Command,
    form: Callable[[Form, Path], Command],
    forms: Sequence[Form],
    limit: float,
    log: Path,
    scratch: Path,
    grace: float,
) -> Smoke:
    """`form`: the command that decodes in a form and writes its results to a file, as JSON. `scratch`: a folder for
    these files."""
    deadline, weights = time.monotonic() + limit, [1.0] * (len(forms) + 1)

    def step(command: Command, n: int) -> Ended:
        return run(Step((command,)), share(deadline - time.monotonic(), weights[n:]), log, grace)

    ended = step(ops, 0)
    checks = [Checked("ops", "failed" if ended.failed else "passed", ended.seconds, _why(ended), _end(ended))]
    if ended.failed:
        return Smoke(tuple(checks), stop=True)
    pdl = graphs = True
    first: list[list[int]] | None = None
    for n, f in enumerate(forms, 1):
        if (f.pdl and not pdl) or (f.graphs and not graphs):
            checks.append(Checked(f.name, "not run"))
            continue
        file, written = scratch / f"form-{n}.json", log.stat().st_size
        ended = step(form(f, file), n)
        note = _why(ended) or _differs(file, first)
        if not note and f.graphs and UNCAPTURED in log.read_bytes()[written:].decode(errors="replace"):
            note = "a CUDA graph could not be captured"
        checks.append(Checked(f.name, "failed" if note else "passed", ended.seconds, note, _end(ended)))
        if not note:
            first = first or _tokens(file)
        elif not f.pdl and not f.graphs:
            return Smoke(tuple(checks), stop=True)
        elif f.pdl:  # alone, or together with graphs, which work alone
            pdl = False
        else:
            graphs = False
    return Smoke(tuple(checks), pdl, graphs)


def _why(ended: Ended) -> str:
    if ended.late:
        return "reached its time limit"
    return f"exit code {ended.codes[0]}" if ended.failed else ""


def _end(ended: Ended) -> str:
    return "\n".join(ended.ends)


def _tokens(file: Path) -> list[list[int]]:
    return [prompt["tokens"] for prompt in json.loads(file.read_text(encoding="utf-8"))["prompts"]]


def _differs(file: Path, first: list[list[int]] | None) -> str:
    """How the tokens in `file` differ from those of the first form; "" if they do not."""
    try:
        tokens = _tokens(file)
    except (OSError, ValueError, KeyError):
        return "it wrote no tokens"
    if not any(tokens):
        return "it decoded nothing"
    if first is None or tokens == first:
        return ""
    pairs = enumerate(zip(chain(*tokens), chain(*first), strict=False))
    at = next((i for i, (ours, theirs) in pairs if ours != theirs), None)
    return "the number of tokens differs" if at is None else f"token {at} differs from that with PDL and graphs off"
