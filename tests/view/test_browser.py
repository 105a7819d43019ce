"""The page in headless Chromium: clicks, keys, colours, and 100,000 tokens."""

import io
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import traces
from PIL import Image

import specker
from specker.cli import view
from specker.options import Params
from specker.runtime.round.state import Request
from specker.view.live import Live
from specker.view.page import LIVE_POLICY

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: make setup installs it")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
         "--disable-sync", "--no-first-run"]  # fmt: skip
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield made
        made.close()


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Open a page of traces. At the end: nothing in the console, no error, no request."""
    said: list[str] = []
    pages = []

    def made(*paths: str, **options: Any) -> Any:
        assert view.main([*paths, "--out", str(tmp_path / "page.html")]) == 0
        page = browser.new_page(**options)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda r: said.append(r.url) if not r.url.startswith(("file:", "data:")) else None)
        page.goto((tmp_path / "page.html").as_uri())
        page.wait_for_selector(".panel h3")
        pages.append(page)
        return page

    yield made
    for page in pages:
        page.close()
    assert said == []


def test_a_round_on_click_hover_and_key(show: Open, tmp_path: Path) -> None:
    page = show(traces.small(tmp_path / "t"))
    panel, text = page.locator(".panel"), page.locator(".text")
    assert panel.locator("h3").inner_text() == "Round 1 of 2: new tokens 1 to 3"
    assert panel.locator(".details").first.inner_text() == "Counted from the start of the prompt: tokens 2 to 4."
    order = panel.locator("tbody tr").all_inner_texts()
    assert [" ".join(row.split()) for row in order] == [
        "1 ␣a 0.75 0.60 ␣a 0.60 ✓ accepted", "2 └ ␣b 0.50 0.70 ␣b 0.70 ✓ accepted", "1 ␣x 0.20 0.010 ␣a 0.60 ✗ refused"
    ]  # fmt: skip
    page.locator("[data-round='1']").hover()
    assert panel.locator("h3").inner_text().startswith("Round 2")
    page.locator("[data-round='0']").first.click()
    page.locator("[data-round='1']").hover()
    assert panel.locator("h3").inner_text().startswith("Round 1"), "a clicked round stays"
    text.focus()
    page.keyboard.press("ArrowRight")
    assert panel.locator("h3").inner_text() == "Round 2 of 2: new token 4"
    assert panel.locator(".details").first.inner_text() == "Counted from the start of the prompt: token 5."
    assert page.locator(".spoken").inner_text() == (
        "Round 2 of 2. 2 copied from this text after 6 matching tokens, 0 accepted. "
        "Last, recovered: the target's own token where the draft was refused: “ y”."
    )
    assert panel.locator("tbody tr").last.inner_text().split()[-2:] == ["not", "reached"]
    page.keyboard.press("Home")
    assert "2 accepted: “ a” “ b”. Last, bonus" in page.locator(".spoken").inner_text()
    page.keyboard.press("Escape")
    page.locator("[data-round='1']").hover()
    assert panel.locator("h3").inner_text().startswith("Round 2"), "Escape lets go"


def test_kinds_differ_in_shape(show: Open, tmp_path: Path) -> None:
    """Without colour, box shadows tell the kinds apart; the text is one tab stop."""
    page = show(traces.small(tmp_path / "t"))
    shapes = [
        re.sub(
            r"rgba?\([^)]*\)", "", page.locator(f".text .t.{kind}").first.evaluate("e => getComputedStyle(e).boxShadow")
        )
        for kind in ("accepted", "recovered", "bonus")
    ]
    assert len({*shapes, "none"}) == 4
    assert page.locator(".text .outside").count() == 1
    assert page.locator(".text [tabindex], .text a, .text button").count() == 0
    seen = []
    for _ in range(4):
        page.keyboard.press("Tab")
        seen.append(
            page.evaluate(
                "document.activeElement.id || document.activeElement.className || document.activeElement.tagName"
            )
        )
    assert seen == ["theme", "SUMMARY", "text", "panel"]


CONTRAST = """() => {
  const light = (c) => { const [r, g, b] = c.match(/[\\d.]+/g).slice(0, 3).map((x) => { x /= 255;
    return x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    if (!/, 0\\)$/.test(c)) return c; } return "rgb(255, 255, 255)"; };
  return [...document.querySelectorAll("body *")].filter((e) => !/SCRIPT|STYLE/.test(e.tagName) &&
      [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())).map((e) => {
    const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), e.className || e.tagName]; }); }"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_and_narrow_windows(show: Open, tmp_path: Path, scheme: str) -> None:
    page = show(traces.small(tmp_path / "t"), color_scheme=scheme, viewport={"width": 700, "height": 900})
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    for _ in range(2):
        found = page.evaluate(CONTRAST)
        assert len(found) > 30 and [each for each in found if each[0] < 4.5] == []
        page.locator("#theme").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 700
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    back, *drawn = (color for _, color in sorted(picture.getcolors(1 << 20), reverse=True))
    assert (sum(back) > 380) == (scheme == "light") and len(drawn) > 30, "a page of text and charts"


def test_traces_side_by_side_move_together(show: Open, tmp_path: Path) -> None:
    page = show(
        traces.small(tmp_path / "a"), traces.small(tmp_path / "b", "lookup"), viewport={"width": 1400, "height": 900}
    )
    names = ["a: draft, big + small", "b: lookup, big + small"]
    assert page.title() == " | ".join(names) and page.locator("h2").all_inner_texts() == names
    assert page.locator("h1").inner_text() == "Rounds of 2 traces"
    left, right = page.locator("section").nth(0), page.locator("section").nth(1)
    assert left.bounding_box()["y"] == right.bounding_box()["y"]
    left.locator("[data-round='1']").click()
    assert right.locator("h3").inner_text().startswith("Round 2")
    page.locator("#linked").click()
    left.locator("[data-round='0']").first.click()
    assert left.locator("h3").inner_text().startswith("Round 1") and right.locator("h3").inner_text().startswith(
        "Round 2"
    )
    assert left.locator("figure").count() == 4 and "drafted 2.50" in left.locator("figure").first.get_attribute(
        "aria-label"
    )
    left.locator(".u-over").first.click(position={"x": 5, "y": 20})
    assert left.locator("h3").inner_text().startswith("Round 1")


def test_one_trace_is_named_and_moves_alone(show: Open, tmp_path: Path) -> None:
    begin = {**traces.BEGIN, "begin": 1, "where": "p.jsonl line 2"}
    rows = {**traces.HEADER, "draft": None}, traces.BEGIN, traces.TREE, begin, {**traces.TREE, "prompt": 1}
    page = show(traces.write(tmp_path / "t.jsonl", *rows))
    assert page.title() == page.locator("h1").inner_text() == "t.jsonl: draft, big"
    assert not page.locator("h2").is_visible() and not page.locator("#linked").is_visible()
    page.locator(".text [data-round='1']").first.click()
    assert page.locator(".panel h3").inner_text() == "Round 1 of 1: new tokens 1 to 3"
    assert page.locator(".panel .details").first.inner_text() == (
        "p.jsonl line 2, turn 1, seed 0. Counted from the start of the prompt: tokens 2 to 4."
    )
    axis = "x: new tokens of all prompts, the prompts not counted; y: each round"
    assert page.locator(".charts .about").inner_text() == axis
    assert page.locator(".u-series th").first.inner_text() == "new token"
    assert page.locator(".u-value").first.inner_text() == "4", "the selected round begins with it"


def test_a_short_trace_and_its_charts_fit_a_window(show: Open, tmp_path: Path) -> None:
    size = {"width": 1280, "height": 800}
    page = show(traces.small(tmp_path / "short"), viewport=size)
    lines = page.locator(".text .line").count()
    assert page.locator(".text").bounding_box()["height"] == 24 * lines + 10, "the lines, a margin and a border"
    charts = page.locator(".charts").bounding_box()
    assert charts["y"] + charts["height"] <= 800
    page = show(traces.long(tmp_path / "long", 4000), viewport=size)
    assert page.locator(".charts .about").inner_text().endswith("y: mean of the last 32 rounds")
    chart = page.locator("figure").first.bounding_box()
    assert page.locator(".text").bounding_box()["height"] == 272 and chart["y"] + chart["height"] <= 800


def test_accepted_tokens_lead(show: Open, tmp_path: Path) -> None:
    """Accepted tokens are bold on a tint; refused ones are as pale as those that the target did not reach."""
    page = show(traces.small(tmp_path / "t"))

    def style(selector: str, name: str) -> str:
        return page.locator(selector).first.evaluate("(e, name) => getComputedStyle(e)[name]", name)

    tint, clear = style("tr.yes", "backgroundColor"), "rgba(0, 0, 0, 0)"
    assert tint != clear == style("tr.no", "backgroundColor")
    assert [style(f"tr.{kind} .verdict", "fontWeight") for kind in ("yes", "no")] == ["600", "400"]
    assert "line-through" in style("tr.no .token code", "textDecoration")
    accepted, refused = style("tr.yes .verdict", "color"), style("tr.no .verdict", "color")
    page.locator("[data-round='1']").click()
    assert style(".text .accepted", "backgroundColor") == tint != style(".text .recovered", "backgroundColor")
    assert refused == style("tr.off .verdict", "color") == style("tr.no .verdict", "color") != accepted


CUT_OFF = """() => [...document.querySelectorAll("body *")].filter((e) => !e.closest(".spoken, .uplot") &&
  (getComputedStyle(e).textOverflow === "ellipsis" || e.scrollWidth > Math.max(e.clientWidth, 1) + 1 &&
   getComputedStyle(e).display !== "inline")).map((e) => e.className || e.tagName)"""


def test_nothing_is_cut_off_in_420_pixels(show: Open, tmp_path: Path) -> None:
    names = {"target": "SmolLM2-135M-Instruct.Q4_1-b179c9523d0e6a0f", "draft": "organisation/a-draft-model-of-60-M"}
    words = {"5": " incomprehensibilities", "7": " " * 40, "8": "=" * 30}
    rows = {**traces.HEADER, **names}, traces.BEGIN, {**traces.TREE, "names": words}, traces.CHAIN
    page = show(traces.write(tmp_path / "t.jsonl", *rows), viewport={"width": 420, "height": 900})
    assert page.locator(".panel tbody tr").count() == 3 and page.locator("figure").count() == 4
    assert page.evaluate("document.documentElement.scrollWidth") <= 420 and page.evaluate(CUT_OFF) == []
    assert page.locator("h1").inner_text() == f"t.jsonl: draft, {names['target']} + {names['draft']}"


@pytest.mark.parametrize(
    ("finished", "words"),
    [
        ("stop", "ended by a stop token or string"),
        ("length", "ended at its limit of tokens"),
        ("context", "ended because the context is full"),
        ("not finite", "ended because the logits are not finite"),
        (None, "the trace ends here: the run was interrupted, or the file is cut"),
    ],
)
def test_how_a_text_ended(show: Open, tmp_path: Path, finished: str | None, words: str) -> None:
    """In a trace without drafts, which has a chart of times alone; with and without its last line."""
    plain = {**traces.CHAIN, "draft": [], "parents": [], "target": [9], "last": "own"}
    path = Path(traces.write(tmp_path / "t", traces.HEADER, traces.BEGIN, plain, {**traces.END, "finished": finished}))
    if finished is None:
        path.write_bytes(path.read_bytes()[:-3])
    page = show(str(path))
    assert page.locator(".text .line").last.inner_text() == f"({words})"
    remarks = ["the trace is cut in line 4, which is left out"] if finished is None else []
    assert page.locator(".remark").all_inner_texts() == remarks
    assert page.locator("figcaption").all_inner_texts() == ["time of a round (ms)"]


def test_the_page_begins_with_the_first_draft(show: Open, tmp_path: Path) -> None:
    plain = {**traces.CHAIN, "position": 1, "draft": [], "parents": [], "target": [9], "last": "own"}
    tree = {**traces.TREE, "position": 2}
    page = show(traces.write(tmp_path / "t", traces.HEADER, traces.BEGIN, plain, tree))
    assert page.locator(".panel h3").inner_text() == "Round 2 of 2: new tokens 2 to 4"


def test_text_is_never_markup(show: Open, tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)></script><b>bold</b>"
    rows = traces.HEADER, {**traces.BEGIN, "text": evil}, {**traces.CHAIN, "pieces": [evil], "names": {"9": evil}}
    page = show(traces.write(tmp_path / "t", *rows))
    assert page.locator("img, main b").count() == 0
    assert "".join(page.locator(".text .prompt").all_text_contents()) == evil
    assert page.locator(".text .recovered").inner_text() == evil


SCROLL = """async () => {
  const box = document.querySelector(".text"), times = [];
  for (let n = 0; n < 60; n++) {
    const began = performance.now();
    box.scrollTop += 997;
    await new Promise(requestAnimationFrame);
    await new Promise(requestAnimationFrame);
    times.push(performance.now() - began);
  }
  return times.sort((a, b) => a - b)[54];
}"""


def test_a_long_text_scrolls(show: Open, tmp_path: Path) -> None:
    """Of 100,000 tokens only the visible lines are elements. Two frames, which take 33 ms, stay below 150 ms."""
    page = show(traces.long(tmp_path / "t", 100_000))
    assert page.locator(".text .t").count() < 2000
    assert page.evaluate(SCROLL) < 150
    page.locator(".text").focus()
    page.keyboard.press("End")
    assert page.locator(".panel h3").inner_text().startswith("Round 25001 of 25001")
    page.wait_for_selector(".text .marked")  # drawn in the next frame
    assert page.locator(".text .marked").count() == 4
    assert (tmp_path / "page.html").stat().st_size < 8_000_000


class Site:
    """`Live` behind an address."""

    def __init__(self, engine: Any):
        self.live = Live(engine, lambda: {"running": len(engine.loop.active), "<b>waiting</b>": 0.25}, last=3)
        self.engine, self.port = engine, 0
        engine.trace = self.live.round

    def start(self) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(handler) -> None:
                page = handler.path == "/view"
                assert page or handler.path == "/view/data", handler.path
                body = (self.live.html() if page else self.live.data()).encode()
                handler.send_response(200)
                handler.send_header("Content-Type", "text/html" if page else "application/json")
                handler.send_header("Content-Length", str(len(body)))
                handler.send_header("Content-Security-Policy", LIVE_POLICY)
                handler.end_headers()
                handler.wfile.write(body)

            def log_message(handler, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, args=(0.01,)).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def begin(self, index: int, tokens: int, text: str = "text") -> Request:
        request: Request = self.engine.session.request("x", Params(tokens), index=index)
        self.live.begin(request, f"/v1/completions {index}", text)
        self.engine.session.submit(request)
        return request

    def step(self, steps: int) -> None:
        for _ in range(steps):
            for event in self.engine.session.step():
                if event.finished:
                    self.live.end(event.request)


@pytest.fixture
def site(pair: tuple[str, str]) -> Iterator[Site]:
    options: dict[str, Any] = {"strategy": "draft", "policy": "fixed", "draft_tokens": 3, "batch_size": 2}
    made = Site(specker.load(*pair, device="cpu", dtype="float32", **options))
    made.start()
    yield made
    made.stop()


@pytest.fixture
def watch(browser: Any, site: Site) -> Iterator[Any]:
    """The page of a server, whose clock stands still: `look` passes two seconds. At the end: nothing in the console but
    failed requests, no error, and no request beyond the page's own."""
    said: list[str] = []
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    own = f"http://127.0.0.1:{site.port}/view"
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda r: said.append(r.url) if r.url not in (own, f"{own}/data", "data:,") else None)
    page.clock.install()
    page.goto(own)
    yield page
    page.close()
    assert [each for each in said if "ERR_CONNECTION_REFUSED" not in each] == []


def look(page: Any) -> None:
    with page.expect_event("requestfinished"):
        page.clock.run_for(2000)
    page.clock.run_for(50)  # frames


def states(page: Any) -> list[list[str]]:
    return [row.split("\t") for row in page.locator("#requests tbody tr").all_inner_texts()]


def test_a_live_page_follows_its_server(site: Site, watch: Any) -> None:
    evil = "<img src=x onerror=alert(1)></script><b>bold</b>"
    assert watch.locator("#queue").inner_text() == "running 0, <b>waiting</b> 0.25, no request yet"
    assert watch.locator("section").count() == 0 and not watch.locator("#requests").is_visible()
    assert watch.locator("h1").inner_text() == watch.title() == "Requests of specker: draft, tiny-target + tiny-draft"
    site.begin(0, 400, evil)
    look(watch)
    assert states(watch) == [["0", "waiting", "0", "–", "–", evil]]
    assert watch.locator(".text .line").last.inner_text() == "(waiting)" and watch.locator("figure").count() == 0
    site.step(1)
    look(watch)
    assert states(watch)[0][1:4:2] == ["running", "1.00"] and watch.locator("figure").count() == 3
    assert watch.locator(".text .line").last.inner_text() == "(running)"
    assert watch.locator(".panel h3").inner_text().startswith("Round 1 of 1")
    assert "".join(watch.locator(".text .prompt").all_text_contents()) == evil
    assert watch.locator("main img, #requests img, main b, #queue b").count() == 0


def test_a_live_page_keeps_what_the_user_does(site: Site, watch: Any) -> None:
    """Selection, focus, scroll positions and open parts, while the request grows and another one begins."""
    watch.set_viewport_size({"width": 800, "height": 400})
    site.begin(0, 400, "a line\n" * 30)
    site.step(40)
    look(watch)
    text, panel = watch.locator(".text"), watch.locator(".panel")
    watch.locator("summary").click()
    text.focus()
    watch.keyboard.press("Home")
    watch.keyboard.press("ArrowRight")
    panel.evaluate("e => { e.style.height = e.style.minHeight = '80px'; e.scrollTop = 7; }")  # it overflows
    watch.evaluate("window.scrollTo(0, 1e6)")
    watch.clock.run_for(50)
    before = watch.evaluate(PLACES)
    assert before[0] > 0 and watch.evaluate("scrollY") > 300 and before[2:] == [7, "text"]
    one = panel.locator("h3").inner_text()
    site.begin(5, 3)
    site.step(20)
    look(watch)
    assert [row[:2] for row in states(watch)] == [["5", "ended: length"], ["0", "running"]]
    after = watch.evaluate(PLACES)
    assert after == [before[0], pytest.approx(before[1], abs=2), *before[2:]], "the page scrolls by whole pixels"
    assert watch.locator("details[open]").count() == 1
    assert watch.locator(".text .marked").count() > 0
    number, of = re.findall(r"\d+", panel.locator("h3").inner_text())[:2]
    assert [number, int(of) > 50] == [re.findall(r"\d+", one)[0], True]
    watch.get_by_role("button", name="5", exact=True).click()
    assert watch.locator("[aria-current]").inner_text().startswith("5")
    watch.clock.run_for(50)
    assert not watch.locator("#follow").is_checked()
    assert watch.locator("section .about").first.inner_text().startswith("3 new tokens in 3 rounds")
    assert watch.locator(".text .line").last.inner_text() == "(ended at its limit of tokens)"
    assert watch.evaluate("document.documentElement.scrollWidth") <= 1280


PLACES = """() => { const [text, panel] = [".text", ".panel"].map((name) => document.querySelector(name));
  return [text.scrollTop, panel.getBoundingClientRect().top, panel.scrollTop, document.activeElement.className]; }"""


def test_a_live_page_without_its_server(site: Site, watch: Any) -> None:
    """It says so and goes on asking. Requests that the server has dropped leave the table."""
    for n in range(4):
        site.begin(n, 2)
    site.step(12)
    look(watch)
    assert [row[0] for row in states(watch)] == ["3", "2", "1"]
    assert watch.locator("#queue").inner_text().endswith("3 of 4 requests are shown")
    assert watch.locator("h2").inner_text().startswith("request 3: "), "it follows the newest"
    site.stop()
    with watch.expect_event("requestfailed"):
        watch.clock.run_for(2000)
    watch.wait_for_function("document.getElementById('lost').textContent.startsWith('no connection')")
    assert len(states(watch)) == 3
    site.start()
    site.begin(4, 9)
    site.step(1)
    look(watch)
    assert watch.locator("#lost").inner_text() == "" and [row[0] for row in states(watch)] == ["4", "3", "2"]
    assert watch.locator("h2").inner_text().startswith("request 4: ")
