"""The page of a running server: its last requests, as far as they have got.

The engine's thread only stores what a round reports. The thread that asks for the page formats it: trace.py makes lines
of new rounds, read.py reads them and page.py makes the page's data. live.js asks for them every two seconds.
"""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from specker.runtime.engine import Engine
from specker.runtime.round.state import Request
from specker.view.page import data, filled
from specker.view.read import parse_unfinished
from specker.view.trace import Trace

ROUNDS = 2000  # of a request, from its first on, that the page shows
CHARACTERS = 10_000  # of its prompt: the page asks for all of it every two seconds


@dataclass(eq=False)
class _Kept:
    """A request of the page."""

    request: Request
    trace: Trace  # its lines are dropped once the request has ended and was shown
    rows: list[dict[str, Any]] = field(default_factory=list)  # rounds that the trace lacks
    rounds: int = 0  # all, those beyond ROUNDS included
    first: int = 0  # tokens of the first round
    times: tuple[float, float] = (0.0, 0.0)  # when the first and the last round ended
    ended: bool = False
    shown: str = ""  # its trace in page.py's format, as JSON

    def add(self, row: dict[str, Any], now: float) -> None:
        self.times = (self.times[0] if self.rounds else now, now)
        self.first = self.first if self.rounds else len(row["tokens"])
        self.rounds += 1
        if self.rounds <= ROUNDS:
            self.rows.append(row)

    def take(self) -> tuple[list[dict[str, Any]], bool]:
        """What is new: the rounds, and whether the request has ended."""
        rows, self.rows = self.rows, []
        return rows, self.ended and bool(self.trace.lines)

    def show(self, rows: list[dict[str, Any]], end: bool) -> None:
        number = self.request.index
        for row in rows:
            self.trace.round(row)
        if end:
            self.trace.end(number, self.request.finished or "failed", self.request.stats)
        if rows or end or not self.shown:
            found = parse_unfinished(self.trace.lines, f"request {number}")
            if self.rounds > ROUNDS:
                found.warning = f"rounds after the first {ROUNDS} are left out"
            self.shown = json.dumps(data(found), separators=(",", ":"))
        if end:
            self.trace.lines.clear()

    def state(self) -> dict[str, Any]:
        """How far the request has got. Its speed is what a client sees: the tokens after the first round, over the
        time since then, in which other requests had their share (`Stats` counts only the request's own)."""
        request, stats, seconds = self.request, self.request.stats, self.times[1] - self.times[0]
        return {
            "id": request.index,
            "state": request.finished or ("running" if self.rounds else "prefill" if stats.prefilled else "waiting"),
            "tokens": stats.tokens,
            "acceptance_length": round(stats.acceptance_length, 3) if stats.rounds else None,
            "tokens_per_second": round((stats.tokens - self.first) / seconds, 3) if seconds > 0 else None,
        }


class Live:
    """The last requests of a server for its page, from any thread.

    It holds all requests that have not ended and, as far as these leave room among the `last`, those that ended last:
    of each the first 10,000 characters of the prompt and the first 2,000 rounds.
    """

    def __init__(self, engine: Engine, queue: Callable[[], dict[str, int | float]], last: int = 20):
        """`queue`: figures that the page shows as they are, by name: {"running": 2, "waiting": 5}. `last`: number of
        requests that the page shows. Raises ValueError if that is below 1."""
        if last < 1:
            raise ValueError(f"last must be at least 1, not {last}")
        self.engine, self.queue, self.last = engine, queue, last
        self._kept: dict[int, _Kept] = {}  # in the order of `begin`
        self._begun = 0  # requests so far
        self._lock = threading.Lock()  # of these; never held while anything is formatted
        self._formatting = threading.Lock()  # one thread at a time

    def begin(self, request: Request, where: str, text: str) -> None:
        """Add a request, before it is submitted. `request.index`: unique in the server. `where`: its title, such as
        the API's path and its id. `text`: the user's, which the page shows as the prompt."""
        if (more := len(text) - CHARACTERS) > 0:
            text = f"{text[:CHARACTERS]}\n({more} more characters)"
        trace = Trace(self.engine, request.sampling)
        trace.begin(request, where, 1, text)
        with self._lock:
            self._kept[request.index] = _Kept(request, trace)
            self._begun += 1
            self._forget()

    def round(self, row: dict[str, Any]) -> None:
        """Set it as `engine.trace`: it takes every request's part of every round (runtime/record.py). Requests that
        have not begun here, such as a warm-up's, are left out."""
        now = time.monotonic()
        with self._lock:
            kept = self._kept.get(row["prompt"])
            if kept is not None and not kept.ended:
                kept.add(row, now)

    def end(self, request: Request) -> None:
        """The request is complete, was cancelled or has failed: no round of it follows."""
        with self._lock:
            if (kept := self._kept.get(request.index)) is not None:
                kept.ended = True
            self._forget()

    def html(self) -> str:
        """The page. It asks for `view/data`, relative to its own address, every two seconds. It needs no more than
        `page.LIVE_POLICY` as its Content-Security-Policy."""
        return filled(self.data(), live=True)

    def data(self) -> str:
        """What the page shows now, as JSON: `engine` (its name), `queue`, `begun` (the number of requests so far),
        `traces` (of the last requests, in page.py's format) and `states` (theirs, in the same order)."""
        with self._formatting:
            with self._lock:
                kept = [*self._kept.values()][: self.last]  # if more are kept, some of the others wait
                total, new = self._begun, [each.take() for each in kept]
            for each, what in zip(kept, new, strict=True):
                each.show(*what)
            around = {
                "engine": f"{self.engine.strategy}, {self.engine.models}",
                "queue": self.queue(),
                "begun": total,
                "states": [each.state() for each in kept],
            }
            return f'{json.dumps(around)[:-1]}, "traces": [{",".join(each.shown for each in kept)}]}}'

    def _forget(self) -> None:
        """Drop the oldest requests that have ended, down to `last` in all."""
        ended = [number for number, each in self._kept.items() if each.ended]
        for number in ended[: max(0, len(self._kept) - self.last)]:
            del self._kept[number]
