"""Read and check a trace. specker/view/trace.py documents its lines."""

import codecs
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specker.fields import not_json
from specker.view.trace import VERSION

LISTS = ("tokens", "draft", "parents", "target", "path", "pieces")
MEASURED = (  # what page.py calculates with
    *("draft", "verify", "accept", "watch", "commit"),
    *("width", "score"),
)
MOST = 300  # digits of a number: a page's JSON has no infinity, and page.py multiplies seconds by 1000
LASTS = ("recovered", "bonus", "own", "accepted")


class _Unfit(ValueError):
    """A number that a page cannot hold."""


def _number(digits: str) -> float:
    if not abs(number := float(digits)) < 10.0**MOST:  # NaN, too
        raise _Unfit(digits)
    return number


def _whole(digits: str) -> int:
    if len(digits) > MOST:
        raise _Unfit(digits)
    return int(digits)


JSON = json.JSONDecoder(parse_float=_number, parse_int=_whole, parse_constant=_number)


@dataclass
class Turn:
    """One request: a prompt and its rounds in order."""

    begin: dict[str, Any]
    rounds: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None  # None if the run was interrupted or the file is cut


@dataclass
class Traced:
    name: str  # the file's
    header: dict[str, Any]
    turns: list[Turn]
    names: dict[int, str]  # text of every id in the trace
    warning: str = ""  # a sentence for the user if the last line is cut


def read(path: str) -> Traced:
    """Read a trace. Raises OSError, or ValueError with one sentence that names the file and the line."""
    raw = Path(path).read_bytes()
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(raw)  # drops a character that the end of the file cuts
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 at byte {error.start}") from None
    return parse(text.split("\n"), path)


def parse(lines: Iterable[str], name: str) -> Traced:
    """The lines of a trace -> its turns. `name`: for messages and titles. A last line that is cut is left out, with a
    warning. Raises ValueError as `read` does."""
    found = parse_unfinished(lines, name)
    found.turns = [turn for turn in found.turns if turn.rounds]
    if not found.turns:
        raise ValueError(f"{name}: the trace has no rounds")
    return found


def parse_unfinished(lines: Iterable[str], name: str) -> Traced:
    """`parse` for a trace whose requests may have no rounds yet."""
    lines = list(lines)
    found: Traced | None = None
    open_: dict[int, Turn] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{name} line {number}"
        try:
            row = JSON.decode(line)
        except _Unfit as error:
            raise ValueError(f"{where}: {str(error)[:20]} is no number of a trace: it must be below 1e{MOST}") from None
        except (ValueError, RecursionError) as error:
            cut = isinstance(error, json.JSONDecodeError) and number == len(lines) and line.startswith("{")
            if found is None or not cut:
                raise not_json(where, error) from None
            found.warning = f"the trace is cut in line {number}, which is left out"
            break
        if not isinstance(row, dict):
            raise ValueError(f"{where}: expected an object, not {type(row).__name__}")
        if found is None:
            found = Traced(name, _header(row, where), [], {})
        elif "path" in row:
            _round(row, open_, found.names, where)
        elif _is_whole(row.get("begin")) and isinstance(row.get("text"), str):
            open_[row["begin"]] = turn = Turn(row)
            found.turns.append(turn)
        elif _is_whole(row.get("end")) and row["end"] in open_:
            open_[row["end"]].end = row
        else:
            raise ValueError(f"{where}: not a line of a trace: it begins no request, ends none and is no round")
    if found is None:
        raise ValueError(f"{name}: the trace is empty")
    return found


def _header(row: dict[str, Any], where: str) -> dict[str, Any]:
    if "specker_trace" not in row:
        if {"prompt", "draft", "path"} <= set(row):
            raise ValueError(f"{where}: an old trace, without text: run specker.run --trace again")
        raise ValueError(f"{where}: not a trace of specker.run: its first line has no specker_trace")
    if row["specker_trace"] != VERSION or row["specker_trace"] is True:
        raise ValueError(f"{where}: a trace of version {row['specker_trace']}, but this specker reads {VERSION}")
    if not isinstance(row.get("strategy"), str) or not isinstance(row.get("target"), str):
        raise ValueError(f"{where}: the header has no strategy or no target")
    for key in ("draft", "device", "dtype"):
        if not isinstance(row.get(key), str | None):
            raise ValueError(f"{where}: the header's {key!r} must be a string, not {row[key]!r:.60}")
    for key in ("sampling", "settings", "remarks"):
        if not isinstance(row.get(key, {}), dict):
            raise ValueError(f"{where}: the header's {key!r} must be an object")
    return row


def _round(row: dict[str, Any], turns: dict[int, Turn], names: dict[int, str], where: str) -> None:
    """Check a round and add it to its turn."""
    for key in LISTS:
        if not isinstance(row.get(key), list):
            raise ValueError(f"{where}: the round has no list {key!r}")
    N = len(row["draft"])
    chances = [(row.get(key, [0.0] * n), n) for key, n in (("probability", N), ("agreed", N), ("own", N + 1))]
    fits = len(row["parents"]) == N and len(row["target"]) == N + 1 and len(row["pieces"]) == len(row["tokens"])
    fits = fits and all(isinstance(values, list) and len(values) == n and _numbers(values) for values, n in chances)
    fits = fits and all(_is_whole(p) and 0 <= p <= n for n, p in enumerate(row["parents"]))
    fits = fits and all(_is_whole(n) and 0 <= n <= N for n in row["path"]) and row["path"][:1] == [0]
    fits = fits and all(_is_whole(t) for key in ("tokens", "draft", "target") for t in row[key])
    fits = fits and all(isinstance(t, str) for t in row["pieces"])
    fits = fits and _is_whole(row.get("accepted")) and 0 <= row["accepted"] <= len(row["tokens"])
    fits = fits and row.get("last") in LASTS and _is_whole(row.get("position"))
    for times in (row.get("seconds"), row.get("diffusion", {})):
        fits = fits and isinstance(times, dict) and _numbers(times.get(key, 0) for key in MEASURED)
    if not fits:
        raise ValueError(f"{where}: the round's lists do not fit together, or it lacks a field")
    if not _is_whole(row.get("prompt")) or row["prompt"] not in turns:
        raise ValueError(f"{where}: a round of prompt {row.get('prompt')!r}, which has not begun")
    turns[row["prompt"]].rounds.append(row)
    try:
        names.update((int(token), str(text)) for token, text in row.get("names", {}).items())
    except (AttributeError, ValueError):
        raise ValueError(f"{where}: `names` must hold a text for each id") from None


def _numbers(values: Iterable[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _is_whole(value: Any) -> bool:
    """Whether it is a whole number; true and false are numbers of Python's."""
    return isinstance(value, int) and not isinstance(value, bool)
