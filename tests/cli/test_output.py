"""What a run prints and in which order it decodes: --check, titles in a pipe, the closing table, remarks, Ctrl-C."""

import io
import json
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import specker
from specker.cli import chat, run
from specker.cli.decode import Sample
from specker.cli.prompts import Conversation
from specker.cli.report import Result
from specker.cli.screen import Screen
from specker.options import Sampling
from specker.runtime import strategies
from specker.runtime.control.stats import Stats
from specker.runtime.engine import Engine
from specker.runtime.events import Event
from specker.runtime.session import Session, Stream

CONVERSATIONS = [{"turns": ["one", "two"]}, {"prompt": "three"}, {"prompt": "four, longer"}, {"prompt": "five"}]
Calls = list[tuple[str, list[list[int]]]]


def argv(
    pair: tuple[str, str], tmp: Path, *more: str, conversations: list[dict[str, Any]] = CONVERSATIONS
) -> list[str]:
    """A run of the conversations in float64, whose results go to o.json."""
    (tmp / "p.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in conversations))
    models = ["--target", pair[0], "--draft", pair[1], "--device", "cpu", "--dtype", "float64"]
    models += ["--prompts", str(tmp / "p.jsonl"), "--max-new-tokens", "8"]
    return [*models, "--strategy", "draft", "--json", str(tmp / "o.json"), *more]


def results(tmp: Path) -> dict[str, Any]:
    return json.loads((tmp / "o.json").read_text())


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Who decoded which prompts, in order."""
    calls: Calls = []
    stream = Session.stream

    def recorded(self: Session, requests: Any = ()) -> Stream:
        who = "strategy" if requests[0].speculates else "ar"
        calls.append((who, [list(request.token_ids) for request in requests]))
        return stream(self, requests)

    monkeypatch.setattr(Session, "stream", recorded)
    monkeypatch.setattr(Engine, "warmup", lambda self, on_progress=None: calls.append(("warm-up", [])))
    return calls


# --- who goes first with --check


@pytest.mark.parametrize(("size", "together"), [("1", [1, 1, 1, 1, 1]), ("2", [2, 1, 2]), ("8", [4, 1])])
def test_the_sides_of_a_check_go_first_in_turns(
    pair: tuple[str, str], served: Calls, tmp_path: Path, size: str, together: list[int]
) -> None:
    """Prompt by prompt, turn by turn and batch by batch. Both decode the same prompts in the same batches, and the
    results are those of a run without --check."""
    flags = argv(pair, tmp_path, "--chat", "--batch-size", size)
    assert run.main([*flags, "--check"]) == 0
    checked = results(tmp_path)
    assert served.pop(0)[0] == "warm-up"
    pairs = list(zip(served[::2], served[1::2], strict=True))
    order = [("strategy", "ar"), ("ar", "strategy")] * 3
    assert [(first[0], second[0]) for first, second in pairs] == order[: len(together)]
    assert all(first[1] == second[1] for first, second in pairs)
    assert [len(first[1]) for first, _ in pairs] == together
    assert checked["total"]["identical"] is True and all("speedup" in row for row in checked["prompts"])
    assert run.main(flags) == 0
    assert [row["tokens"] for row in results(tmp_path)["prompts"]] == [row["tokens"] for row in checked["prompts"]]


def test_no_side_keeps_the_kv_of_earlier_turns(
    pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefilled: list[int]
) -> None:
    """Each prefills the whole conversation, whoever goes first."""
    generate_ar = Engine.generate_ar

    def plain(self: Engine, *prompts: Any, **options: Any) -> Any:
        out = generate_ar(self, *prompts, **options)
        prefilled.extend(each.stats.prefilled for each in out)
        return out

    monkeypatch.setattr(Engine, "generate_ar", plain)
    conversations = [{"turns": ["one", "two", "three"]}]
    assert run.main(argv(pair, tmp_path, "--chat", "--check", conversations=conversations)) == 0
    lengths = [row["prompt_tokens"] - 1 for row in results(tmp_path)["prompts"]]
    assert prefilled == [*lengths, *lengths, sum(lengths)]  # of ar, of the strategy, in total


@pytest.mark.parametrize("size", ["1", "2"])
def test_ctrl_c_while_ar_goes_first(
    capsys: pytest.CaptureFixture[str],
    pair: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    size: str,
) -> None:
    """The results so far are those of the prompts before, each of them compared."""
    plain, calls = Engine.generate_ar, []

    def interrupted(self: Engine, *prompts: Any, **options: Any) -> Any:
        calls.append(prompts)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return plain(self, *prompts, **options)

    monkeypatch.setattr(Engine, "generate_ar", interrupted)
    conversations, trace = [{"prompt": text} for text in ("one", "two", "three", "four")], tmp_path / "t.jsonl"
    flags = argv(pair, tmp_path, "--check", "--batch-size", size, "--trace", str(trace), conversations=conversations)
    assert run.main(flags) == 130
    got = results(tmp_path)
    assert got["interrupted"] is True and len(got["prompts"]) == int(size)
    assert all(len(row["tokens"]) == 8 and row["identical"] is True for row in got["prompts"])
    assert got["total"]["identical"] is True and "speedup" in got["total"]
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [row["begin"] for row in lines if "begin" in row] == [row["end"] for row in lines if "end" in row]
    assert "interrupted" in capsys.readouterr().err


def test_ctrl_c_in_a_conversation_while_ar_goes_first() -> None:
    """The turn is dropped: nothing of its answer was shown. A finished answer stays as it is."""
    notes: list[str] = []
    screen, engine = SimpleNamespace(answer=None, note=notes.append), SimpleNamespace(speculates=False)
    sample = Sample(Conversation((), "this turn"), Sampling(), 0)

    def turn(decoded: int, finished: str | None) -> Callable[[list[Sample]], None]:
        def one(samples: list[Sample]) -> None:
            sample.messages.append({"role": "user", "content": sample.conversation.turns[-1]})
            sample.results.append(Result([1] * decoded, "x" * decoded, Stats(rounds=decoded), finished=finished))
            if finished:
                sample.messages.append({"role": "assistant", "content": "x" * decoded})
            raise KeyboardInterrupt

        return one

    for said, decoded, finished in (("a", 0, None), ("b", 3, "stop"), ("c", 0, None), ("d", 2, None)):
        decoding: Any = SimpleNamespace(turn=turn(decoded, finished), samples=[sample], screen=screen, engine=engine)
        chat.Chat(decoding).take(said)
    assert [(m["role"], m["content"]) for m in sample.messages] == [
        ("user", "b"),
        ("assistant", "xxx"),
        ("user", "d"),
        ("assistant", "xx"),
    ]
    assert [result.finished for result in sample.results] == ["stop", "interrupted"]


# --- titles of several texts


def test_titles_name_each_of_several_texts(
    capsys: pytest.CaptureFixture[str], pair: tuple[str, str], tmp_path: Path
) -> None:
    """As `head` names files: by line, by turn where a line has several, and by seed where there are samples."""
    where = f"{tmp_path}/p.jsonl"
    lines = [f"{where} line {place}" for place in ("1, turn 1", "1, turn 2", "2", "3", "4")]
    for more, titles in (
        ([], lines),
        (["--chat"], lines),
        (["--chat", "--batch-size", "3", "--check"], lines),
        (
            ["--chat", "--samples", "2", "--seed", "5", "--temperature", "0.9"],
            [
                f"{title}, seed {seed}"
                for part in (lines[:2], *([t] for t in lines[2:]))
                for seed in (5, 6)
                for title in part
            ],
        ),
    ):
        assert run.main(argv(pair, tmp_path, *more)) == 0
        texts = [row["text"] for row in results(tmp_path)["prompts"]]
        parts = [f"==> {title} <==\n{text}\n" for title, text in zip(titles, texts, strict=True)]
        assert capsys.readouterr().out == "\n".join(parts)


def test_one_text_has_no_title(capsys: pytest.CaptureFixture[str], pair: tuple[str, str], tmp_path: Path) -> None:
    assert run.main(argv(pair, tmp_path, conversations=[{"prompt": "one"}])) == 0
    assert capsys.readouterr().out == results(tmp_path)["prompts"][0]["text"] + "\n"
    assert run.main([*argv(pair, tmp_path)[:-1], "-"]) == 0
    json.loads(capsys.readouterr().out)  # with --json - stdout holds nothing else


def test_ctrl_c_in_a_batch_prints_what_was_decoded(
    capsys: pytest.CaptureFixture[str], pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A title for every text that has begun, none for a prompt that waits; each text ends its line."""
    calls: list[Event] = []

    def interrupts(stream: Stream) -> Event:
        calls.append(after(stream))
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return calls[-1]

    after = Stream.__next__
    monkeypatch.setattr(Stream, "__next__", interrupts)
    flags = argv(pair, tmp_path, "--batch-size", "2", "--draft-tokens", "1", "--max-new-tokens", "64")
    assert run.main(flags) == 130
    texts = [row["text"] for row in results(tmp_path)["prompts"]]
    places = [f"{tmp_path}/p.jsonl line 1, turn {n}" for n in (1, 2)]
    parts = [f"==> {place} <==\n{text}\n" for place, text in zip(places, texts, strict=True)]
    assert capsys.readouterr().out == "\n".join(parts)


# --- names and widths


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def converted(pair: tuple[str, str], tmp_path: Path) -> Path:
    """A folder as in the cache, converted from a GGUF file."""
    folder = shutil.copytree(pair[0], tmp_path / "Tiny-7B-Instruct.Q4_K_M-0123456789abcdef-packed")
    (folder / "converted.json").write_text('{"source": "Tiny-7B-Instruct.Q4_K_M.gguf", "sizes": {}}')
    return folder


def test_a_converted_model_has_the_name_of_its_file(converted: Path, tmp_path: Path) -> None:
    engine = specker.load(converted, strategy="ar", device="cpu")
    assert engine.models == "Tiny-7B-Instruct.Q4_K_M.gguf" and engine.target_name == converted.name
    # The name tells of four bits, but the folder holds floating-point numbers.
    assert engine.title == "Tiny-7B-Instruct.Q4_K_M.gguf (float32 weights), cpu, float32"
    (converted / "converted.json").write_text("{")
    assert engine.models == converted.name


def test_the_title_says_what_is_computed(pair: tuple[str, str]) -> None:
    """Nothing about weights in `dtype`, under a name that does not say otherwise."""
    target, draft = pair
    assert specker.load(target, draft, device="cpu").title == "tiny-target + tiny-draft, cpu, float32"
    rounded = specker.load(target, draft, device="cpu", quantize="int8", draft_tokens=2)
    assert rounded.title == "tiny-target (int8 weights) + tiny-draft, cpu, float32"


def test_a_folder_has_its_own_name(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(pair[0]) / "..")
    for target in ("tiny-target", Path("tiny-target/../tiny-target"), pair[0] + "/"):
        assert specker.load(target, strategy="ar", device="cpu").models == "tiny-target"
    monkeypatch.chdir(pair[0])
    assert specker.load(".", strategy="ar", device="cpu").target_name == "tiny-target"


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("terminal", [False, True])
def test_nothing_is_cut_at_any_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int, terminal: bool
) -> None:
    """No line of the table is longer than the screen, no label, name or number is broken."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    if terminal:
        monkeypatch.setattr(sys, "stdout", Terminal())
    screen = Screen(json_to_stdout=False)
    stats = Stats(tokens=123456, rounds=54321, drafted=98765, accepted=69135, hits=[54321] * 8, wall=1234.5, copied=9)
    stats.lengths, stats.rests = {0: 321, 2: 54000}, {"slower": 300, "measured": 21}
    stats.seconds |= {"prefill": 123.4, "draft": 234.5, "verify": 800.0, "accept": 50.0}
    plain = Stats(tokens=123456, rounds=123456, wall=2345.6)
    plain.seconds |= {"prefill": 123.4, "verify": 2100.0}
    models = "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf + qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
    shown = SimpleNamespace(title=models, strategy="vocabtrim+lookup")
    shown.speculates, shown.options = True, strategies.options()
    shown.trim_report = lambda stats: {
        "kept_rows": 19248,
        "vocab_size": 151936,
        "coverage": 0.987,
        "rounds_lost": 12345,
        "ranking": "qwen2.5-coder-vocab_scores.safetensors",
        "text_rows": 256,
    }
    check = SimpleNamespace(identical=True, ok=True, ar=SimpleNamespace(stats=plain))
    screen.table(shown, [Result([], "", stats, check)])
    path = "/" + "a-folder/" * 20
    screen.note(f"the rounds are in {path}")
    out = sys.stdout.getvalue() if terminal else capsys.readouterr().err  # type: ignore[attr-defined]
    lines = re.sub(r"\x1b\[[\d;]*m", "", out).splitlines()
    assert "…" not in out
    for line in lines:
        assert len(line) <= width or path in line or not (terminal or "│" in line or "━" in line), line
    words = [path, *models.split(" + "), "vocabtrim+lookup"]
    words += ["tokens/s after prefill", "rows of the draft head"]
    words += ["rounds cut by trimming", "12345 of 54321", "19248 of 151936", "14.73 ms  65%", "17.01 ms  90%"]
    for word in words:
        assert any(word in line for line in lines), word
    cells = " ".join(line.split("│")[1].strip() for line in lines if line.count("│") == 2)
    assert " ".join(["100%"] * 8) in cells


def test_the_rounds_that_drafted_nothing_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """By numbers that add up to all rounds: a round may also wait for the drafter's prefill, or draft nothing although
    the policy asked for a draft."""
    rests = {"slower": 132, "measured": 15, "nothing found": 138, "prefill": 1, "prompts": 2}
    stats = Stats(tokens=399, rounds=342, drafted=156, lengths={0: 290, 3: 52}, rests=rests)
    stats.seconds["verify"] = 1.0
    engine = SimpleNamespace(title="t", strategy="lookup", speculates=True)
    engine.trim_report, engine.options = lambda stats: {}, strategies.options()
    Screen(json_to_stdout=False).table(engine, [Result([], "", stats)])
    assert capsys.readouterr().err.splitlines()[-1] == (
        "52 of 342 rounds drafted; the others did not: 132 because plain decoding was faster, 138 because there was "
        "nothing to copy, 15 because plain decoding was timed, 1 because the drafter read the prompt, 2 because other "
        "prompts were read, 2 for other reasons"
    )
    assert stats.rounds == 52 + 132 + 138 + 15 + 1 + 2 + 2


@pytest.mark.parametrize(
    ("drafted", "rests", "said"),
    [
        (0, {"slower": 6, "nothing found": 3}, "drafting: no, because plain decoding was faster"),
        (0, {"slower": 3, "nothing found": 6}, "drafting: no, because there was nothing to copy"),
        (0, {}, "drafting: no, because no round asked for a draft"),
        (3, {"slower": 9}, "1 of 10 rounds drafted; the others did not: 9 because plain decoding was faster"),
    ],
)
def test_the_last_line_says_why_nothing_was_drafted(
    drafted: int, rests: dict[str, int], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = {0: 9, 3: 1} if drafted else {0: 10}
    stats = Stats(tokens=10, rounds=10, drafted=drafted, lengths=lengths, rests=rests)
    stats.seconds["verify"] = 1.0
    engine = SimpleNamespace(title="t", strategy="lookup", speculates=True)
    engine.trim_report, engine.options = lambda stats: {}, strategies.options()
    Screen(json_to_stdout=False).table(engine, [Result([], "", stats)])
    assert capsys.readouterr().err.splitlines()[-1] == said
    assert stats.to_json()["drafting"] == (said.removeprefix("drafting: ") if not drafted else "yes")
    engine.speculates = False
    Screen(json_to_stdout=False).table(engine, [Result([], "", stats)])
    assert ("drafting:" in capsys.readouterr().err) is False


@pytest.mark.parametrize(("drafted", "passes", "warns"), [(9, 2.0, True), (9, 1.51, False), (0, 2.0, False)])
def test_a_run_that_may_be_slower_says_so(
    capsys: pytest.CaptureFixture[str], drafted: int, passes: float, warns: bool
) -> None:
    """A round accepts half a token more than its own, in the time of `passes` verify passes."""
    stats = Stats(tokens=15, rounds=10, drafted=drafted, accepted=5, wall=20.0)
    stats.seconds |= {"draft": 10.0 * (passes - 1), "verify": 10.0}
    engine = SimpleNamespace(title="t", strategy="draft", speculates=True)
    engine.trim_report, engine.options = lambda stats: {}, strategies.options()
    Screen(json_to_stdout=False).table(engine, [Result([], "", stats)])
    said = f"probably faster here: a round gives 1.50 tokens in the time of {passes:.2f} verify passes"
    assert (said in capsys.readouterr().err) == warns


def test_a_failed_check_names_its_text(
    capsys: pytest.CaptureFixture[str], pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain decoding leaves out the last token of the third text, whichever side went first."""
    plain, calls = Engine.generate_ar, []

    def shorter(self: Engine, *prompts: Any, **options: Any) -> Any:
        out = plain(self, *prompts, **options)
        calls.append(out)
        if len(calls) == 3:
            del out[0].tokens[-1]
        return out

    monkeypatch.setattr(Engine, "generate_ar", shorter)
    assert run.main(argv(pair, tmp_path, "--check")) == 1
    said = f"{tmp_path}/p.jsonl line 2: the text has 8 tokens, plain decoding's has 7"
    assert capsys.readouterr().err.splitlines().count(said) == 1
    assert [row["identical"] for row in results(tmp_path)["prompts"]] == [True, True, False, True, True]
