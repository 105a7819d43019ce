"""A server's page: what `Live` keeps of requests that are being decoded. test_browser.py looks at the page itself."""

import json
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import specker
from specker.options import Params
from specker.runtime.round.state import Request
from specker.view import live as lives
from specker.view.live import Live
from specker.view.page import LIVE_POLICY, data
from specker.view.read import parse, parse_unfinished
from specker.view.trace import Trace


@pytest.fixture(scope="module")
def served(pair: tuple[str, str]) -> Any:
    """An engine that decodes two requests at once, in drafts of three, which the target's copy guesses right."""
    options: dict[str, Any] = {"strategy": "draft", "policy": "fixed", "draft_tokens": 3, "batch_size": 2}
    return specker.load(pair[0], pair[0], device="cpu", dtype="float32", **options)


@pytest.fixture
def engine(served: Any) -> Iterator[Any]:
    yield served
    served.trace = None
    for request in served.loop.requests:
        served.session.cancel(request)
    assert not served.loop.busy


def queue() -> dict[str, int | float]:
    return {"running": 1, "waiting": 0, "load": 0.5}


def request(engine: Any, live: Live, index: int, tokens: int = 12, **options: Any) -> Request:
    made: Request = engine.session.request(f"request {index}", Params.of(max_new_tokens=tokens, **options), index=index)
    live.begin(made, "/v1/completions", f"text {index}")
    engine.session.submit(made)
    return made


def step(engine: Any, live: Live, *requests: Request) -> None:
    """Step once, or until the requests have ended."""
    while True:
        for event in engine.session.step():
            if event.finished:
                live.end(event.request)
        if all(each.finished for each in requests):
            return


def page(live: Live) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(live.data())
    assert len(found["states"]) == len(found["traces"])
    return found


def test_two_requests_one_of_them_running(engine: Any) -> None:
    """At each moment the page's data are those of the same rounds' trace."""
    live, rows = Live(engine, queue), []

    def trace(row: dict[str, Any]) -> None:
        rows.append(row)
        live.round(row)

    def told(request: Request) -> Any:
        lines = Trace(engine, request.sampling)
        lines.begin(request, "/v1/completions", 1, f"text {request.index}")
        for row in rows:
            if row["prompt"] == request.index:
                lines.round(row)
        if request.finished:
            lines.end(request.index, request.finished, request.stats)
        return json.loads(json.dumps(data(parse_unfinished(lines.lines, f"request {request.index}"))))

    engine.trace = trace
    assert page(live) == {"engine": "draft, tiny-target + tiny-target", "queue": queue(), "begun": 0, "states": [],
                          "traces": []}  # fmt: skip
    first, second = request(engine, live, 4, 8), request(engine, live, 7, 60, temperature=1.0, seed=7)
    found = page(live)
    assert [state["state"] for state in found["states"]] == ["waiting", "waiting"]
    assert [trace["turns"][0]["prompt"] for trace in found["traces"]] == ["text 4", "text 7"]
    while not first.finished:
        step(engine, live)
        found = page(live)
        assert found["traces"] == [told(first), told(second)]
    one, other = found["states"]
    assert [state["id"] for state in (one, other)] == [4, 7] and one["tokens"] == 8
    assert [state["state"] for state in (one, other)] == ["length", "running"]
    assert one["acceptance_length"] == round(first.stats.acceptance_length, 3) and other["tokens_per_second"] > 0
    assert [trace["turns"][0]["finished"] for trace in found["traces"]] == ["length", None]
    assert max(n for trace in found["traces"] for n in trace["turns"][0]["rounds"]["sequences"]) == 2
    engine.session.cancel(second)
    live.end(second)
    found = page(live)
    assert found["states"][1]["state"] == "cancelled" and found["traces"] == [told(first), told(second)]
    live.round(rows[-1])
    assert rows[-1]["prompt"] == 7 and page(live) == found, "a request that has ended stays as it is"
    tokens = [token for piece in found["traces"][1]["turns"][0]["rounds"]["tokens"] for token in piece]
    assert tokens == second.tokens


def test_a_requests_own_stop_ids_and_strings_end_its_trace(engine: Any) -> None:
    """In the middle of a round, whose other tokens it leaves out."""
    plain = engine.generate("request 1", 40, temperature=1.0)
    live = Live(engine, queue)
    engine.trace = live.round
    at = next(n for n, token in enumerate(plain.tokens) if n % 4 == 1 and n > 4 and token not in plain.tokens[:n])
    one = request(engine, live, 1, 40, temperature=1.0, stop_ids=(plain.tokens[at],))
    step(engine, live, one)
    letter = next(c for n, c in enumerate(plain.text) if n > 4 and c.isascii() and c not in plain.text[:n])
    other = engine.session.request("request 1", Params.of(max_new_tokens=40, temperature=1.0, stop=letter), index=2)
    live.begin(other, "/v1/completions", "text")
    engine.session.submit(other)
    step(engine, live, other)
    first, second = (trace["turns"][0] for trace in page(live)["traces"])
    assert [token for piece in first["rounds"]["tokens"] for token in piece] == one.tokens == plain.tokens[: at + 1]
    assert [turn["finished"] for turn in (first, second)] == ["stop", "stop"]
    assert "".join(piece for pieces in second["rounds"]["pieces"] for piece in pieces) == plain.text.split(letter)[0]


def test_the_memory_is_bounded(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each request the first rounds, and requests that have ended make room; others' rounds are left out."""
    monkeypatch.setattr(lives, "ROUNDS", 2)
    live = Live(engine, queue, last=2)
    engine.trace = live.round
    engine.generate("of nobody", 4)
    for n in range(1, 4):
        step(engine, live, request(engine, live, n, 20))
    found = page(live)
    assert [state["id"] for state in found["states"]] == [2, 3] and found["begun"] == 3
    assert [len(trace["turns"][0]["rounds"]["tokens"]) for trace in found["traces"]] == [2, 2]
    assert all("rounds after the first 2 are left out" in trace["remarks"] for trace in found["traces"])
    assert found["states"][1]["tokens"] == 20, "counted beyond them"
    many = [request(engine, live, n, 30) for n in range(4, 9)]
    assert [state["id"] for state in page(live)["states"]] == [4, 5]
    live.end(many[0])  # as a server does whose client has gone
    step(engine, live, many[2])
    for each in many:
        engine.session.cancel(each)
        live.end(each)
    assert [state["id"] for state in page(live)["states"]] == [7, 8]
    assert len(live._kept) == 2 and not any(each.rows or each.trace.lines for each in live._kept.values())
    live.begin(engine.session.request("x", index=9), "/v1/completions", "y" * 10_003)
    assert page(live)["traces"][-1]["turns"][0]["prompt"] == "y" * 10_000 + "\n(3 more characters)"
    with pytest.raises(ValueError, match="last must be at least 1, not 0"):
        Live(engine, queue, last=0)


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns every microsecond."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def test_threads_ask_while_a_step_runs(engine: Any, hasty: None) -> None:
    """Each answer is whole, and no round is lost or doubled."""
    live = Live(engine, queue)
    engine.trace = live.round
    requests = [request(engine, live, n, 24) for n in range(4)]
    wrong: list[BaseException] = []

    def ask() -> None:
        before = [0] * 4
        try:
            while not all(each.finished for each in requests):
                found = page(live)
                counts = [len(trace["turns"][0]["rounds"]["tokens"]) for trace in found["traces"]]
                assert all(a <= b for a, b in zip(before, counts, strict=True))
                before = counts
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    step(engine, live, *requests)
    for thread in threads:
        thread.join()
    assert wrong == []
    for each, trace in zip(requests, page(live)["traces"], strict=True):
        assert [token for piece in trace["turns"][0]["rounds"]["tokens"] for token in piece] == each.tokens


def test_the_page_holds_its_data_and_loads_nothing(engine: Any) -> None:
    evil = "</script><script>alert(1)</script><!-- @@data@@ \u2028"
    live = Live(engine, queue)
    live.begin(engine.session.request("x", index=0), evil, evil)
    html = live.html()
    assert html.count("</script>") == 3 and "<!--" not in html.replace("<!doctype", "")
    (blob,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert json.loads(blob) == page(live) and json.loads(blob)["traces"][0]["turns"][0]["prompt"] == evil
    assert f'content="{LIVE_POLICY}"' in html and not re.search(r'(src|href)="(?!data:)', html)
    with pytest.raises(ValueError, match="the trace has no rounds"):  # which a finished trace must have
        parse(live._kept[0].trace.lines, "t")
