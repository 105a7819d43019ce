"""Traces -> the page. The page's data are columns with an entry for each round, so that no field's name is repeated
100,000 times."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from specker.view.read import Traced, Turn

COLUMNS = "position", "tokens", "pieces", "accepted", "last", "draft", "target", "path"  # as every round has them
MAY_MISS = {"exit": 0, "source": None, "matched": None, "sequences": 1, "outside": None}
STAGES = ("draft", "verify", "accept", "watch", "commit")


def html(traces: list[Traced]) -> str:
    """One page with the traces side by side. It loads nothing."""
    shown = [data(trace) for trace in traces]
    if len({each["file"] for each in shown}) < len(shown):  # show the folders, which tell them apart
        shown = [each | {"file": trace.name} for each, trace in zip(shown, traces, strict=True)]
    return filled(json.dumps(shown, separators=(",", ":")))


FILES = ("page.html", "page.css", "uplot.min.css", "uplot.min.js", "uplot.LICENSE", "text.js", "charts.js", "page.js",
         "live.js")  # fmt: skip
# The page's Content-Security-Policy. A live page may also ask its own server.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
LIVE_POLICY = f"{POLICY}; connect-src 'self'"
UNFRAMED = "frame-ancestors 'none'"  # for the header alone: browsers ignore it in the page


def filled(shown: str, live: bool = False) -> str:
    """The page with its data, which are JSON. `live`: of a server, which it asks for newer ones (live.py)."""
    here = files("specker.view")
    parts = {name: here.joinpath(name).read_text("utf-8") for name in FILES}
    page = parts.pop("page.html")
    parts |= {"data": script_safe(shown), "policy": LIVE_POLICY if live else POLICY}
    if not live:
        parts["live.js"] = ""
    # One pass over the page: a text that looks like a mark stays a text.
    pieces = page.split("@@")
    return "".join(parts[piece] if n % 2 else piece for n, piece in enumerate(pieces))


def script_safe(text: str) -> str:
    """JSON that cannot end its <script> element or open a comment in it."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def data(trace: Traced) -> dict[str, Any]:
    """What page.js shows of a trace. `names`: text by id."""
    header = trace.header
    return {
        "file": Path(trace.name).name,
        "strategy": header["strategy"],
        "target": header["target"],
        "draft": header.get("draft"),
        "device": f"{header.get('device', '?')}, {header.get('dtype', '?')}",
        "settings": {**header.get("settings", {}), **header.get("sampling", {})},
        "remarks": [*header.get("remarks", {}).values(), *([trace.warning] if trace.warning else [])],
        "stages": STAGES,
        "names": trace.names,
        "turns": [_turn(turn) for turn in trace.turns],
    }


def _turn(turn: Turn) -> dict[str, Any]:
    rounds, begin = turn.rounds, turn.begin
    known = any("diffusion" in r for r in rounds)
    columns: dict[str, Any] = {name: [r[name] for r in rounds] for name in COLUMNS}
    columns |= {name: [r.get(name, usual) for r in rounds] for name, usual in MAY_MISS.items()}
    columns |= {name: [_rounded(r.get(name)) for r in rounds] for name in ("probability", "agreed", "own")}
    columns["parents"] = [None if r["parents"] == list(range(len(r["parents"]))) else r["parents"] for r in rounds]
    columns["milliseconds"] = [_rounded(_stages(r)) for r in rounds]
    columns["diffusion"] = [_diffusion(r) for r in rounds] if known else None
    return {
        "title": f"{begin.get('where', 'prompt')}, turn {begin.get('turn', 1)}, seed {begin.get('seed', 0)}",
        "prompt": begin["text"],
        "finished": turn.end.get("finished") if turn.end else None,
        "tail": turn.end.get("tail", "") if turn.end else "",
        "rounds": columns,
    }


def _stages(row: dict[str, Any]) -> list[float]:
    """Milliseconds by stage."""
    return [1e3 * row["seconds"].get(stage, 0.0) for stage in STAGES]


def _diffusion(row: dict[str, Any]) -> list[float] | None:
    """[tokens of the block, mean candidates per position, score of the path per token]."""
    found = row.get("diffusion")
    if found is None:
        return None
    return [_depth(row["parents"]), round(found.get("width", 1.0), 2), round(found.get("score", 0.0), 3)]


def _depth(parents: list[int]) -> int:
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return max(depths)


def _rounded(values: list[float] | None) -> list[float] | None:
    return None if values is None else [round(x, 3) for x in values]
