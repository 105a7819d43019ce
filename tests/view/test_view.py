"""Traces: what a run writes, what the page gets of it, and what is refused."""

import dataclasses
import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import traces
from traces import BEGIN, CHAIN, END, HEADER, TREE, write
from transformers import AutoModelForCausalLM

import specker
from specker.cli import flags, run, view
from specker.paths import write_file
from specker.runtime.control.choose import NONE, Chooser
from specker.runtime.control.policy import Budget, Policy
from specker.view.page import data, html
from specker.view.read import parse, read

SETTINGS = {
    "ar": ["--strategy", "ar"],
    "chain": ["--strategy", "draft", "--policy", "fixed", "--draft-tokens", "4"],
    "asks": ["--strategy", "draft", "--policy", "draft-and-verify", "--temperature", "0.8", "--seed", "3"],
    "pruned": ["--strategy", "draft", "--tree", "3x3", "--draft-tokens", "5"],
    "graphs": ["--strategy", "draft", "--tree", "3x3"],
    "lookup": ["--strategy", "lookup", "--tree", "2x4"],
    "easyspec": ["--strategy", "easyspec", "--tree", "2x3"],
    "del": ["--strategy", "del"],
    "diffuspec": ["--strategy", "diffuspec", "--cps", "tree"],
    "vocabtrim": ["--strategy", "vocabtrim", "--vocab-keep", "64"],
}


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in ("chain", "graphs", "pruned") else [])
        for name in SETTINGS
    ],
)
def test_the_trace_of_a_run(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trace holds the tokens and the text of an untraced run, and its rounds are consistent. Every proposed draft is
    made: whether one pays depends on measured times."""

    def longest(self: Chooser, policies: Sequence[Policy], _: Any, __: Any, reads: bool = True, **___: Any) -> Budget:
        self.unread = frozenset(range(len(policies)) if reads else ())
        self.worths = [1.0] * len(policies)
        return max((shape for p in policies for shape in p.budgets()), key=lambda shape: shape.nodes, default=NONE)

    monkeypatch.setattr(Chooser, "choose", longest)
    if name == "graphs":
        monkeypatch.setenv("SPECKER_GRAPHS", "on")
    argv = [
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--prompt",
        "def f(x):\n",
        "--max-new-tokens",
        "16",
        *SETTINGS[name],
    ]
    assert run.main([*argv, "--json", str(tmp_path / "plain")]) == 0
    assert run.main([*argv, "--json", str(tmp_path / "o"), "--trace", str(tmp_path / "t")]) == 0
    plain, told = (json.loads((tmp_path / n).read_text())["prompts"][0] for n in ("plain", "o"))
    assert told["tokens"] == plain["tokens"]
    header, begin, *rounds, end = rows(tmp_path / "t")
    assert header["specker_trace"] == 1 and header["strategy"] in (name, "draft", "diffuspec", "draft+vocabtrim")
    assert (begin["text"], begin["prompt_tokens"]) == ("def f(x):\n", told["prompt_tokens"])
    assert [t for r in rounds for t in r["tokens"]] == plain["tokens"]
    assert "".join(p for r in rounds for p in r["pieces"]) + end["tail"] == plain["text"]
    assert sum(r["accepted"] for r in rounds) == told["accepted"] and end["finished"] == told["finish_reason"]
    names = {int(k): v for r in rounds for k, v in r.get("names", {}).items()}
    for r in rounds:
        N, whole = len(r["draft"]), r["path"][-1] not in r["parents"]
        if r["last"] != "accepted":
            assert r["accepted"] == len(r["path"]) - 1
        if r["last"] in ("bonus", "recovered"):
            assert whole == (r["last"] == "bonus") and r["tokens"][-1] == r["target"][r["path"][-1]]
        for parent, row in zip(r["path"], r["path"][1:], strict=False):  # the path follows the parents and the target
            assert r["parents"][row - 1] == parent and r["draft"][row - 1] == r["target"][parent]
        assert all(0 < p <= 1 for p in r.get("probability", [])) and len(r.get("probability", [0] * N)) == N
        assert {*r["tokens"], *r["draft"], *r["target"]} <= names.keys()
        assert len(r["agreed"]) == N and len(r["own"]) == N + 1
        for agreed, token, parent in zip(r["agreed"], r["draft"], r["parents"], strict=True):
            if token == r["target"][parent]:
                assert agreed == r["own"][parent]
        assert (
            r["seconds"].keys() == {"prefill", "draft", "verify", "accept", "watch", "commit"}
            and r["seconds"]["verify"] > 0
        )
    drafting = [r for r in rounds if r["draft"]]
    assert bool(drafting) == (name != "ar") or name == "lookup"
    assert all(("probability" in r) == (name not in ("graphs", "lookup", "diffuspec")) for r in drafting)
    if name == "del":
        assert all(r["exit"] for r in drafting)
    sources = {"del": "layers", "lookup": "text"}
    assert all(r["source"] == sources.get(name, "model") for r in drafting)
    assert all(("source" in r) == bool(r["draft"]) and ("matched" in r) == (name == "lookup") for r in drafting)
    assert all(("outside" in r) == (name == "vocabtrim") for r in rounds)
    assert any(r.get("outside") for r in rounds) == (name == "vocabtrim")
    assert view.main([str(tmp_path / "t")]) == 0 and capsys.readouterr().out.endswith("trace.html\n")


@pytest.mark.parametrize(("tree", "kept"), [("3x2", 6), ("3x2", 4), (None, 4)])
def test_probabilities_are_those_of_the_models(tree: str | None, kept: int) -> None:
    """Compared with transformers in float64, for a whole tree, a pruned one and a chain."""
    engine, seen = specker.load(strategy="draft", tree=tree, draft_tokens=kept, device="cpu", dtype="float64"), []
    engine.trace = seen.append
    prompt = engine.encode("def f(x):")
    text = prompt + engine.generate(prompt, 8).tokens
    draft, target = (
        AutoModelForCausalLM.from_pretrained(part.folder, dtype=torch.float64) for part in (engine.draft, engine.target)
    )

    @functools.cache
    def law(model: Any, known: tuple[int, ...]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([known])).logits[0, -1].softmax(-1)

    nodes = 0
    for r in seen:
        known = {0: tuple(text[: r["position"]])}
        for row, (token, parent) in enumerate(zip(r["draft"], r["parents"], strict=True), 1):
            for model, name in ((draft, "probability"), (target, "agreed")):
                wanted = law(model, known[parent])[token].item()
                assert r[name][row - 1] == pytest.approx(wanted, rel=1e-6)
            known[row] = (*known[parent], token)
            nodes += 1
    assert nodes > 10


def test_batches_and_conversations(pair: tuple[str, str], tmp_path: Path) -> None:
    """Sequences interleave in the trace and are apart on the page; each turn of a conversation begins anew."""
    (tmp_path / "p").write_text('{"turns": ["one", "two"]}\n{"turns": ["three"]}\n')
    argv = ["--target", pair[0], "--draft", pair[1], "--chat", "--prompts", str(tmp_path / "p"), "--batch-size", "2"]
    argv += ["--max-new-tokens", "12", "--device", "cpu", "--trace", str(tmp_path / "t"), "--json", str(tmp_path / "o")]
    assert run.main(argv) == 0
    found = data(read(str(tmp_path / "t")))
    told = {tuple(row["tokens"]) for row in json.loads((tmp_path / "o").read_text())["prompts"]}
    assert {tuple(t for r in turn["rounds"]["tokens"] for t in r) for turn in found["turns"]} == told
    assert sorted(turn["prompt"] for turn in found["turns"]) == ["one", "three", "two"]
    assert max(n for turn in found["turns"] for n in turn["rounds"]["sequences"]) == 2


def test_view_after_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.chdir(tmp_path)
    argv = ["--device", "cpu", "--prompt", "def f(", "--max-new-tokens", "4"]
    assert run.main([*argv, "--view"]) == 0 and (tmp_path / "trace.html").exists()
    assert run.main([*argv, "--view", "page.html"]) == 0
    assert run.main([*argv, "--trace", str(tmp_path / "sub.jsonl"), "--view"]) == 0
    assert run.main([*argv, "--view"]) == 0
    names = "trace.html", "page.html", "sub.html", "trace-2.html"  # no earlier page is lost
    assert opened == [(tmp_path / name).as_uri() for name in names]
    assert all(f'"file":"{file}"' in (tmp_path / page).read_text() for file, page in
               (("this run", "trace.html"), ("sub.jsonl", "sub.html")))  # fmt: skip


def test_the_pages_data() -> None:
    found = data(parse([json.dumps(row) for row in (HEADER, BEGIN, TREE, CHAIN, END)], "some/where.jsonl"))
    (turn,) = found["turns"]
    assert found["file"] == "where.jsonl" and found["names"][5] == " a" and turn["prompt"] == "Hi"
    columns = turn["rounds"]
    assert columns["parents"] == [[0, 0, 1], None], "a chain's parents are implied"
    assert columns["probability"] == [[0.75, 0.2, 0.5], None] and columns["last"] == ["bonus", "recovered"]
    assert columns["source"] == ["model", "text"] and columns["matched"] == [None, 6]
    assert columns["milliseconds"][0] == [2.0, 4.0, 1.0, 0.0, 0.0] and columns["diffusion"] is None
    assert turn["finished"] == "length"


def test_a_search_is_shown() -> None:
    found = {**CHAIN, "diffusion": {"generated": 2, "width": 2.5, "score": -0.25}}
    (turn,) = data(parse(map(json.dumps, (HEADER, BEGIN, found)), "t"))["turns"]
    assert turn["rounds"]["milliseconds"][0][:2] == [2.0, 4.0] and turn["finished"] is None
    assert turn["rounds"]["diffusion"] == [[2, 2.5, -0.25]]


def test_text_cannot_leave_its_element() -> None:
    evil = "</script><script>alert(1)</script><!-- @@data@@ \u2028"
    page = html([parse(map(json.dumps, (HEADER, {**BEGIN, "text": evil}, {**CHAIN, "pieces": [evil]})), evil)])
    assert page.count("</script>") == 3 and "alert(1)" in page and "<!--" not in page.replace("<!doctype", "")
    (blob,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert json.loads(blob)[0]["turns"][0]["prompt"] == evil
    assert not re.search(r'(src|href)="(?!data:)', page), "the page loads nothing"


def test_files_of_one_name_are_told_apart() -> None:
    lines = [json.dumps(row) for row in (HEADER, BEGIN, TREE)]

    def names(*paths: str) -> list[str]:
        page = html([parse(lines, path) for path in paths])
        (blob,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
        return [each["file"] for each in json.loads(blob)]

    assert names("a/t.jsonl", "b/t.jsonl") == ["a/t.jsonl", "b/t.jsonl"]
    assert names("a/t.jsonl", "b/u.jsonl") == ["t.jsonl", "u.jsonl"]


BAD = {
    "empty": ([], "the trace is empty"),
    "no rounds": ([HEADER, BEGIN], "the trace has no rounds"),
    "other JSON": ([{"prompt": "x"}], "line 1: not a trace of specker.run"),
    "a list": ([[1]], "line 1: expected an object, not list"),
    "old": ([CHAIN], "line 1: an old trace, without text"),
    "version": ([{**HEADER, "specker_trace": 7}], "line 1: a trace of version 7, but this specker reads 1"),
    "header": ([{"specker_trace": 1}], "line 1: the header has no strategy or no target"),
    "unknown": ([HEADER, {"x": 1}], "line 2: not a line of a trace"),
    "unbegun": ([HEADER, CHAIN], "line 2: a round of prompt 0, which has not begun"),
    "no pieces": ([HEADER, BEGIN, {**CHAIN, "pieces": None}], "line 3: the round has no list 'pieces'"),
    "parents": ([HEADER, BEGIN, {**CHAIN, "parents": [0, 2]}], "line 3: the round's lists do not fit together"),
    "target": ([HEADER, BEGIN, {**CHAIN, "target": [1]}], "line 3: the round's lists do not fit together"),
    "remarks": ([{**HEADER, "remarks": []}, BEGIN, CHAIN], "line 1: the header's 'remarks' must be an object"),
    "an end": ([HEADER, BEGIN, CHAIN, {"end": []}], "line 4: not a line of a trace"),
    "a prompt": ([HEADER, BEGIN, {**CHAIN, "prompt": []}], "line 3: a round of prompt [], which has not begun"),
    "times": ([HEADER, BEGIN, {**CHAIN, "seconds": {"draft": "a"}}], "line 3: the round's lists do not fit together"),
    "a search": ([HEADER, BEGIN, {**CHAIN, "diffusion": {"width": "a"}}], "line 3: the round's lists do not fit"),
    "chances": ([HEADER, BEGIN, {**CHAIN, "own": ["a", 0, 0]}], "line 3: the round's lists do not fit together"),
    "names": ([HEADER, BEGIN, {**CHAIN, "names": {"x": "y"}}], "line 3: `names` must hold a text for each id"),
    "a true version": ([{**HEADER, "specker_trace": True}], "line 1: a trace of version True, but"),
    "a true type": (
        [{**HEADER, "dtype": True}, BEGIN, CHAIN],
        "line 1: the header's 'dtype' must be a string, not True",
    ),
    "a device": ([{**HEADER, "device": 5}, BEGIN, CHAIN], "line 1: the header's 'device' must be a string, not 5"),
    "a draft": ([{**HEADER, "draft": []}, BEGIN, CHAIN], "line 1: the header's 'draft' must be a string, not []"),
    "true chances": ([HEADER, BEGIN, {**CHAIN, "own": [True, 0, 0]}], "line 3: the round's lists do not fit together"),
}
TRUE = ("position", "accepted", "prompt", "draft", "parents", "target", "path", "tokens")  # of a round with ones
HUGE = {"NaN": "NaN", "Infinity": "Infinity", "-Infinity": "-Infinity", "1e999": "1e999", "-1e301": "-1e301"}
HUGE |= {str(10**400): "1" + "0" * 19, str(-(10**400)): "-1" + "0" * 18}


@pytest.mark.parametrize("name", BAD)
def test_bad_traces(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, sentence = BAD[name]
    path = write(tmp_path / "t.jsonl", *lines)
    assert view.main([path]) == 2
    error = capsys.readouterr().err
    assert error.startswith("specker: error: ") and sentence in error and error.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["t.jsonl"]


@pytest.mark.parametrize("field", TRUE)
def test_true_is_no_number_of_a_round(field: str) -> None:
    one = {"prompt": 1, "position": 1, "draft": [1], "parents": [0], "target": [1, 1], "path": [0, 1], "accepted": 1}
    one = {**TREE, **one, "tokens": [1, 1], "pieces": ["a", "a"], "probability": [1], "agreed": [1], "own": [1, 1]}
    lines = [json.dumps(line) for line in (HEADER, {**BEGIN, "begin": 1})]
    assert parse([*lines, json.dumps(one)], "t").turns
    value: Any = one[field]
    wrong = [True, *value[1:]] if isinstance(value, list) and field != "parents" else [False] if value == [0] else True
    with pytest.raises(ValueError, match="t line 3: "):
        parse([*lines, json.dumps(one | {field: wrong})], "t")


@pytest.mark.parametrize("number", HUGE, ids=HUGE.values())
def test_a_number_that_no_page_can_hold_is_refused_wherever_it_stands(number: str) -> None:
    places = (
        (0, {**HEADER, "settings": {"x": [1, "HERE"]}}),
        (1, {**BEGIN, "seed": "HERE"}),
        (2, {**TREE, "own": [0.6, "HERE", 0.5, 0.9]}),
        (2, {**TREE, "position": "HERE"}),
        (2, {**TREE, "seconds": {"draft": "HERE"}}),
        (2, {**TREE, "anything": "HERE"}),
        (3, {**END, "wall": "HERE"}),
    )
    for at, row in places:
        lines = [json.dumps(line) for line in (HEADER, BEGIN, TREE, END)]
        lines[at] = json.dumps(row).replace('"HERE"', number)
        with pytest.raises(ValueError, match=rf"t line {at + 1}: {HUGE[number]} is no number of a trace"):
            parse(lines, "t")


@pytest.mark.parametrize("number", ["1e299", "-1e299", str(10**299), str(2**64)])
def test_the_largest_numbers_make_a_page_that_is_json(number: str) -> None:
    lines = [json.dumps(line) for line in (HEADER, BEGIN, {**TREE, "seconds": {"draft": "HERE"}})]
    found = data(parse((line.replace('"HERE"', number) for line in lines), "t"))
    json.dumps(found, allow_nan=False)


def test_the_trace_here_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an argument. On a terminal the browser opens it."""
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    traces.small(tmp_path / "trace.jsonl")
    monkeypatch.chdir(tmp_path)
    assert view.main([]) == 0 and capsys.readouterr().out == "trace.html\n" and not opened
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert view.main([]) == 0 and opened == [(tmp_path / "trace.html").as_uri()]


def test_bad_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = traces.small(tmp_path / "good")
    (tmp_path / "text").write_text(f"{json.dumps(HEADER)}\nnot json\n")
    (tmp_path / "quote").write_text('{"specker')
    (tmp_path / "deep").write_text("[" * 10**5)
    (tmp_path / "bytes").write_bytes(b"\xff")
    for argv, sentence in (
        ([str(tmp_path / "missing")], "No such file"),
        (["/"], "/: Is a directory"),
        (["."], ".: Is a directory"),
        ([str(tmp_path / "text")], "text line 2: not JSON: Expecting value at column 1"),
        ([str(tmp_path / "quote")], "quote line 1: not JSON: Unterminated string starting at column 2"),
        ([str(tmp_path / "deep")], "deep line 1: the JSON has a number of too many digits or is nested too deeply"),
        ([str(tmp_path / "bytes")], "not UTF-8 at byte 0"),
        ([], "there is no trace.jsonl here: specker --trace trace.jsonl writes one"),
        ([good, "--out", str(tmp_path)], "is a directory"),
        ([good, "--out", str(tmp_path / "no" / "x")], "cannot be written"),
        ([good, "--out", good], "would replace a trace"),
    ):
        assert view.main(argv) == 2
        assert sentence in capsys.readouterr().err
    assert not (tmp_path / "trace.html").exists()


def test_a_cut_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Wherever the last line is cut, the page has the lines before it, and a warning names the line."""
    whole = Path(traces.small(tmp_path / "t")).read_bytes()
    before = b"".join(whole.splitlines(keepends=True)[:-2])
    line = json.dumps({**CHAIN, "pieces": [" é"]}, ensure_ascii=False).encode()
    cut = "the trace is cut in line 4, which is left out"
    shown = data(parse(before.decode().splitlines(), "t"))
    for end in range(1, len(line)):
        (tmp_path / "t").write_bytes(before + line[:end])
        assert data(read(str(tmp_path / "t"))) == {**shown, "remarks": [cut]}
    assert view.main([str(tmp_path / "t")]) == 0
    out, error = capsys.readouterr()
    assert error == f"specker: warning: {tmp_path / 't'}: {cut}\n" and out.endswith("trace.html\n")
    (tmp_path / "t").write_bytes(before + line)
    assert read(str(tmp_path / "t")).warning == "" and len(read(str(tmp_path / "t")).turns[0].rounds) == 2
    for broken in (line[:-1] + b"\n", b"not json", b"\xff"):  # not what a cut leaves
        (tmp_path / "t").write_bytes(before + broken)
        assert view.main([str(tmp_path / "t")]) == 2


def test_a_failed_write_leaves_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trace.html").write_text("old")
    monkeypatch.setattr("specker.paths.os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_file(str(tmp_path / "trace.html"), "new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("trace.html", "old")]


def test_view_records_one_replica(capsys: pytest.CaptureFixture[str]) -> None:
    job, options, *sampling = flags.parse(["--prompt", "x", "--view"])
    with pytest.raises(ValueError, match="--view records one replica only"):
        run.run(job, dataclasses.replace(options, dp=2), *sampling)
