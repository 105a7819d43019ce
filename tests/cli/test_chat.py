"""A conversation in the terminal: what is typed and pasted, commands, and what is refused."""

import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import stat
import subprocess
import sys
import termios
import time
import tty
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from make_checkpoint import edit, make

import specker
from specker.cli import run
from specker.cli.decode import Decoding, Sample
from specker.options import Sampling
from specker.paths import cache_root
from specker.serve.app import Server
from specker.serve.settings import Serving

ROOT = Path(__file__).parents[2]
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z~]|\r")
CUT = re.compile(r"\x1b(\[[0-9;?]*)?$")  # one whose rest has not come yet
END = "\x04"


def pasted(text: str) -> str:
    """What a terminal sends for a paste of `text`."""
    return "\x1b[200~" + text.replace("\n", "\r") + "\x1b[201~"


class Terminal:
    """`specker.run --chat` in a pseudo-terminal that is its controlling one."""

    def __init__(self, *argv: str, cache: Path):
        self.main, side = pty.openpty()
        command = [sys.executable, "-m", "specker.run", "--chat", "--device", "cpu", *argv]
        more = {"OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "100", "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **more, "SPECKER_CACHE": str(cache)},
            stdin=side,
            stdout=side,
            stderr=side,
            start_new_session=True,
            preexec_fn=self._owned,
        )
        os.close(side)
        self.raw, self.seen, self.cut = "", "", ""  # all that came; since the last match, without escape sequences

    @staticmethod
    def _owned() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a background job ignores it
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    @property
    def echoes(self) -> bool:
        return bool(termios.tcgetattr(self.main)[tty.LFLAG] & termios.ECHO)

    def until(self, pattern: str, seconds: float = 90) -> str:
        """Read until `pattern` matches what came since the last match, without escape sequences; returns that."""
        deadline = time.monotonic() + seconds
        while (found := re.search(pattern, self.seen, re.DOTALL)) is None:
            assert time.monotonic() < deadline, f"{pattern!r} did not come: {self.seen[-2000:]!r}"
            if select.select([self.main], [], [], 0.2)[0]:
                try:
                    came = os.read(self.main, 65536).decode(errors="replace")
                except OSError:  # the other side is closed
                    deadline = 0
                    continue
                self.raw += came
                cut = CUT.search(came := self.cut + came)
                whole = cut.start() if cut else len(came)
                self.seen, self.cut = self.seen + ESCAPES.sub("", came[:whole]), came[whole:]
        text, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return text

    def type(self, text: str) -> None:
        os.write(self.main, text.encode())

    def ended(self) -> int:
        self.until("tokens/s after prefill")  # the closing table
        code = self.process.wait(60)
        assert self.echoes
        os.close(self.main)
        return code


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target without stop ids that recommends sampling."""
    folder = make(tmp_path_factory.mktemp("endless") / "endless", tokenizer=True, max_context=4096)
    edit(folder, "tokenizer_config.json", eos_token=...)
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_p": 0.92}')
    return str(folder)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A cache of its own, with the user's compiled kernels."""
    (tmp_path / "cache").mkdir()
    (cache_root() / "cpu").mkdir(parents=True, exist_ok=True)
    (tmp_path / "cache" / "cpu").symlink_to(cache_root() / "cpu")
    return tmp_path / "cache"


@dataclass
class Chat:
    rows: list[Any]  # of --json
    messages: list[dict[str, str]]  # of the last conversation, as /save wrote them
    text: str  # what a pipe got
    notes: str  # what the user saw beside it

    @property
    def turns(self) -> list[str]:
        return [message["content"] for message in self.messages if message["role"] == "user"]


@pytest.fixture
def typed(
    endless: str, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Chat]:
    """A function that runs a conversation, in float64, whose keys wait in the terminal from the start."""
    from prompt_toolkit.application import create_app_session  # without it, all share the first one's stdin
    from prompt_toolkit.input import create_input
    from prompt_toolkit.input.typeahead import clear_typeahead

    monkeypatch.setenv("SPECKER_CACHE", str(own))
    out, saved = tmp_path / "out.json", tmp_path / "saved.jsonl"

    def chat(keys: str, *more: str, target: str = endless, code: int = 0, usual: bool = False) -> Chat:
        main, side = pty.openpty()
        tty.setraw(side)
        before = termios.tcgetattr(side)
        before[tty.LFLAG] |= termios.ECHO
        termios.tcsetattr(side, termios.TCSANOW, before)
        os.write(main, f"{keys}/save {saved}\r{END}".encode("utf-8", "surrogateescape"))
        argv = ["--target", target, "--strategy", "ar", "--chat", "--device", "cpu", "--dtype", "float64"]
        argv += [] if usual else ["--temperature", "0", "--top-p", "1"]
        with os.fdopen(side) as stdin, monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", stdin)
            with create_app_session(create_input(stdin)) as session:
                assert run.main([*argv, "--max-new-tokens", "6", "--json", str(out), *more]) == code
                clear_typeahead(session.input)
            assert termios.tcgetattr(side) == before, "the terminal is as it was"
        os.close(main)
        rows = json.loads(out.read_text())["prompts"] if out.exists() else []
        messages = json.loads(saved.read_text())["messages"] if saved.exists() else []
        for file in (out, saved):
            file.unlink(missing_ok=True)
        return Chat(rows, messages, *capsys.readouterr())

    return chat


def test_a_conversation(endless: str, own: Path, tmp_path: Path) -> None:
    """Tab completes a command; two answers, a text that Ctrl-C discards, an answer that Ctrl-C ends, one more. Keys
    pressed during an answer wait for its end, Ctrl-D and a paste of several lines, too, which stays one turn; the
    terminal is told to mark it."""
    out, saved = tmp_path / "o.json", tmp_path / "talk.jsonl"
    more = ["--target", endless, "--strategy", "ar", "--max-new-tokens", "300", "--json", str(out)]
    shell = Terminal(*more, cache=own)
    said = shell.until("\n>")
    assert "temperature 0.6, top_p 0.92, top_k 0, seed 0, max_new_tokens 300; /set changes them" in said
    assert said.count("/help") == 1
    shell.type("/hel")
    shell.until("/hel")
    shell.type("\t")
    shell.until("p")
    shell.type("\r")
    shell.until("show this.+\n>")
    shell.type("one\r")
    said = shell.until(r"one\n.+\n>")
    assert "the answer ends at max_new_tokens" in said
    shell.type("half a li\x03")
    shell.until(r"half a li *\n>")
    shell.type("\x03")
    shell.until(r"\nCtrl-D ends the conversation.\n>")
    shell.type("two\r")
    shell.until(r"two\n.{8}")
    assert not shell.echoes, "^C would be part of the answer"
    shell.type("\x03")
    shell.until("\n>")
    shell.type(pasted("x" * 4000) + "\r")
    shell.until("this turn: the prompt has")
    shell.until("\n>")
    shell.type("\r")
    shell.until("\n>")
    shell.type("three\r")
    shell.until(r"three\n.{8}")
    assert shell.raw.rindex("\x1b[?2004h") > shell.raw.rindex("\x1b[?2004l")
    shell.type(pasted("four\nfive") + "\rsix\x1b\rseven\r/save " + str(saved) + "\r" + END)
    shell.until(r"> four *\n  five *\n.+saved: ")
    assert shell.ended() == 0
    rows = json.loads(out.read_text())["prompts"]
    assert [row["finish_reason"] for row in rows] == ["length", "interrupted", *["length"] * 3]
    counts = [len(row["tokens"]) for row in rows]
    assert counts == [300, counts[1], *[300] * 3] and 0 < counts[1] < 300
    lengths = [row["prompt_tokens"] for row in rows]
    assert lengths[0] + 250 < lengths[1] < lengths[2], "the answers are part of the conversation"
    messages = json.loads(saved.read_text())["messages"]
    turns = [message["content"] for message in messages if message["role"] == "user"]
    assert turns == ["one", "two", "three", "four\nfive", "six\nseven"]
    assert shell.raw.rindex("\x1b[?2004h") < shell.raw.rindex("\x1b[?2004l")


def test_completion(tmp_path: Path) -> None:
    from prompt_toolkit.completion import CompleteEvent
    from prompt_toolkit.document import Document

    from specker.cli.chat import COMMANDS, SETTINGS
    from specker.cli.terminal import Commands

    def offers(text: str) -> list[str]:
        return [each.text for each in Commands(COMMANDS, SETTINGS).get_completions(Document(text), CompleteEvent())]

    (tmp_path / "talk.jsonl").touch()
    assert (
        offers("/s") == ["/system ", "/set ", "/seed ", "/save "]
        and offers("/set top") == ["/set top_p ", "/set top_k "]
        and offers("/h") == ["/help"]
        and len(offers("")) == len(COMMANDS)
    )
    assert offers(f"/save {tmp_path}/ta") == ["lk.jsonl"] and offers("a") == offers("a /s") == offers("/system /") == []


@pytest.mark.parametrize(
    ("keys", "turns"),
    [
        (pasted("def f():\n\treturn 1\n\nwhy?\n") + "\r", ["def f():\n\treturn 1\n\nwhy?"]),
        ("a " + pasted("b\nc") + " d\r", ["a b\nc d"]),
        ("a\x1b\rb\r", ["a\nb"]),
        ('"""a\rb\r  c"""\rd\r', ["a\nb\n  c", "d"]),
        ('"""\r/clear\r\rb\r"""\r', ["/clear\n\nb"]),
        ('"""\rdef f():\r  """doc"""\r"""\r', ['def f():\n  """doc"""']),
        ('what is """?\r""""""\r"""a"""\r', ['what is """?', "a"]),
        (pasted('"""Doc."""\nimport os') + "\r", ['"""Doc."""\nimport os']),
        ("//clear\r/etc/hosts is what?\r// c\r/* c */\r", ["/clear", "/etc/hosts is what?", "// c", "/* c */"]),
        ("one\x01\x0b\r  \rtwo\x7f\r", ["tw"]),
        ("caf\udce9\rok\r", ["ok"]),
    ],
)
def test_what_is_one_turn(typed: Callable[..., Chat], keys: str, turns: list[str]) -> None:
    """Pastes, Alt-Enter, blocks in quotes, texts that start with a slash, edited lines."""
    chat = typed(keys)
    assert chat.turns == turns and len(chat.rows) == len(turns)
    assert ("not valid text in the terminal's encoding" in chat.notes) == ("\udce9" in keys)


def test_commands_that_are_refused(typed: Callable[..., Chat], tmp_path: Path) -> None:
    """One sentence each; nothing is sent to the model and nothing is written."""
    chat = typed(f"/sistem x\r/bye\r/\r/save\r/save {tmp_path}/x\r/system\r")
    for line in (
        "there is no /sistem; did you mean /system? (//sistem sends it to the model)",
        "there is no /bye; see /help (//bye sends it to the model)",
        "there is no /; see /help (// sends it to the model)",
        "/save needs the name of a file",
        "there is no answer to save yet",
        "none is set; the chat template may have its own",
    ):
        assert f"\n{line}\n" in chat.notes
    assert not chat.rows and not (tmp_path / "x").exists() and "tokens/s" not in chat.notes


def test_help_names_every_command(typed: Callable[..., Chat]) -> None:
    from specker.cli.chat import COMMANDS
    from specker.cli.terminal import KEYS

    said = typed("/help\r").notes
    for name in (*COMMANDS, "//TEXT", *KEYS):
        assert f"\n  {name} " in said
    for goodbye in ("/exit", "/quit", " exit "):
        assert typed(f"one\r{goodbye}\rtwo\r").rows[1:] == []
    assert typed('exit code 1?\r"""exit"""\r').turns == ["exit code 1?", "exit"]


def test_a_new_conversation_is_a_fresh_one(typed: Callable[..., Chat], tmp_path: Path, prefilled: list[int]) -> None:
    """After /clear and /system: no message and no K/V of the turns before, and the texts of a conversation that starts
    there, greedy and sampled, also where drafts are copied from the earlier one."""
    traced = "--trace", str(tmp_path / "t.jsonl")
    for how in ((), ("--temperature", "0.9", "--seed", "5", "--strategy", "lookup")):
        prefilled.clear()
        chat = typed(
            "/clear\rone two one two\rtwo\r/clear\rone\rtwo\r/system be brief\rone\r/clear\rone\r", *how, *traced
        )
        begun = [row for row in map(json.loads, (tmp_path / "t.jsonl").read_text().splitlines()) if "begin" in row]
        assert [row["begin"] for row in begun] == list(range(6)) and [r["turn"] for r in begun] == [1, 2, 1, 2, 1, 1]
        lengths = [row["prompt_tokens"] for row in chat.rows]
        assert [n - 1 == p for n, p in zip(lengths, prefilled, strict=False)] == [True, False, True, False, True, True]
        assert [message["content"] for message in chat.messages] == ["be brief", "one"]
        assert chat.notes.count("the conversation is forgotten") == 3
        assert chat.text == "".join(f"{row['text']}\n" for row in chat.rows)
        assert "the system message is set; the conversation begins anew\n" in chat.notes
        fresh = typed("one\rtwo\r", *how).rows + typed("/system be brief\rone\r", *how).rows
        assert [row["tokens"] for row in chat.rows[2:5]] == [row["tokens"] for row in fresh]
        assert chat.rows[5]["tokens"] == fresh[2]["tokens"] != chat.rows[2]["tokens"]


def test_the_system_message(typed: Callable[..., Chat], endless: str, tmp_path: Path) -> None:
    chat = typed('/system """be\rbrief"""\r/system\rone\r/system ' + "x" * 5000 + "\r/system\r")
    assert chat.messages[0] == {"role": "system", "content": "be\nbrief"} and chat.rows[1:] == []
    assert chat.notes.count("\nbe\nbrief\n") == 2 and "\nthe system message is set\n" in chat.notes
    assert "the prompt has 50" in chat.notes, "one that does not fit leaves the conversation as it is"
    picky = tmp_path / "picky"
    shutil.copytree(endless, picky)
    only = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}user: "
    (picky / "chat_template.jinja").write_text(only)
    chat = typed("one\r/system x\r/system\r", target=str(picky))
    assert "the chat template of picky refuses the conversation: no system role\n" in chat.notes
    assert chat.turns == ["one"] and "none is set;" in chat.notes


def test_a_saved_conversation_is_answered_again(
    typed: Callable[..., Chat], endless: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file, out = tmp_path / "talk.jsonl", tmp_path / "o.json"
    file.write_text("old")
    chat = typed(
        f'/system be brief\rone\r"""\rtwo \u00e9\r"""\r/save ~/{file.name}\r/save {tmp_path}/no/x\r/save {tmp_path}\r'
    )
    assert f"saved: {file}\n" in chat.notes
    assert f"/save {tmp_path}/no/x: cannot be written: No such file or directory" in chat.notes
    assert f"/save {tmp_path}: cannot be written: Is a directory" in chat.notes
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "talk.jsonl"}, "no part of a file is left"
    assert file.read_text().count("\n") == 1
    row = json.loads(file.read_text())
    assert [message["content"] for message in row["messages"]] == [
        "be brief",
        "one",
        chat.rows[0]["text"],
        "two \u00e9",
    ]
    assert row["answer"] == chat.rows[1]["text"]
    argv = ["--target", endless, "--strategy", "ar", "--chat", "--prompts", str(file), "--max-new-tokens", "6"]
    assert run.main([*argv, "--dtype", "float64", "--device", "cpu", "--json", str(out)]) == 0
    (again,) = json.loads(out.read_text())["prompts"]
    assert again["tokens"] == chat.rows[1]["tokens"]


def test_the_history_lasts(typed: Callable[..., Chat], own: Path) -> None:
    typed(pasted("one\ntwo") + "\r")
    file = own / "history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    up = "\x1b[A"
    assert typed(up * 3 + "\r").turns == ["one\ntwo"], "two lines, below /save"
    file.unlink()
    file.mkdir()
    assert typed(up + "one\r").turns == ["one"], "a folder can be neither read nor written"


@pytest.mark.parametrize(("tokens", "finished"), [(0, None), (1, None), (1, "length")])
def test_an_answer_that_is_interrupted(
    typed: Callable[..., Chat], monkeypatch: pytest.MonkeyPatch, tokens: int, finished: str | None
) -> None:
    """Before its first token, after it, and once it is complete."""
    turn, count = Decoding.turn, 0

    def interrupted(self: Decoding, samples: list[Sample]) -> None:
        nonlocal count
        count += 1
        turn(self, samples)
        if count == 2:
            if finished is None:
                samples[0].messages.pop()
                result = samples[0].results[-1]
                result.finished, result.tokens, result.stats.rounds = None, result.tokens[:tokens], tokens
            raise KeyboardInterrupt

    monkeypatch.setattr(Decoding, "turn", interrupted)
    chat = typed("/system brief\rone\rtwo\rthree\r")
    kept = ["one", "two", "three"] if tokens else ["one", "three"]
    assert chat.turns == kept and len(chat.rows) == len(kept)
    assert [message["role"] for message in chat.messages] == ["system", *["user", "assistant"] * len(kept)][:-1]
    ends = [row["finish_reason"] for row in chat.rows]
    assert ("interrupted" in ends) == (tokens == 1 and finished is None)


def test_an_error_restores_the_terminal(typed: Callable[..., Chat], monkeypatch: pytest.MonkeyPatch) -> None:
    from prompt_toolkit.output.plain_text import PlainTextOutput

    def fails(self: Decoding, samples: list[Sample]) -> None:
        assert not termios.tcgetattr(sys.stdin)[tty.LFLAG] & termios.ECHO
        raise RuntimeError("broken")

    monkeypatch.setattr(Decoding, "turn", fails)
    marked: list[bool] = []  # whether the terminal marks what is pasted
    monkeypatch.setattr(PlainTextOutput, "enable_bracketed_paste", lambda self: marked.append(True))
    monkeypatch.setattr(PlainTextOutput, "disable_bracketed_paste", lambda self: marked.append(False))
    assert "RuntimeError: broken" in typed("one\r", code=1).notes
    assert marked[-2:] == [True, False]


def test_a_conversation_in_python(endless: str) -> None:
    """The answer is that of the prompt which the chat template makes, with `generate`'s options, drafted or not."""
    engine = specker.load(endless, strategy="lookup", policy="fixed", dtype="float64", device="cpu")
    assert isinstance(engine, specker.Engine)
    messages = [{"role": "user", "content": "one two one two"}]
    ids = engine.encode_chat(messages)
    for how in ({}, {"seed": 3, **engine.usual_sampling}):
        out = engine.chat(messages, 12, **how)
        assert out.tokens == engine.generate_ar(ids, 12, **how).tokens and len(out.tokens) == 12
        assert out.stats.drafted and "".join(e.text for e in engine.stream(ids, 12, **how)) == out.text
    stopped = engine.chat(messages, 12, out.text[2:4], **how)
    assert stopped.finished == "stop" and stopped.text == out.text[: out.text.index(out.text[2:4])]
    with pytest.raises(ValueError, match="messages must be a list of dicts"):
        engine.chat("hello")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unknown option 'temprature'"):
        engine.chat(messages, temprature=1)  # type: ignore[call-arg]


def test_the_kv_of_earlier_turns_is_kept(endless: str, tmp_path: Path, prefilled: list[int]) -> None:
    """In a file of conversations too. The answers are those without it."""
    conversations, out = tmp_path / "conversations.jsonl", tmp_path / "o.json"
    conversations.write_text(json.dumps({"turns": ["one " * 60, "two", "three"]}) + "\n")
    argv = [
        "--target",
        endless,
        "--strategy",
        "lookup",
        "--chat",
        "--prompts",
        str(conversations),
        "--max-new-tokens",
        "12",
    ]
    argv += ["--dtype", "float64", "--device", "cpu", "--json", str(out)]
    assert run.main(argv) == 0
    kept = json.loads(out.read_text())["prompts"]
    assert prefilled[0] == kept[0]["prompt_tokens"] - 1 and max(prefilled[1:3]) < 60
    prefilled.clear()
    assert run.main([*argv, "--prefix-cache", "off"]) == 0
    assert prefilled[1] == kept[1]["prompt_tokens"] - 1
    assert [row["tokens"] for row in json.loads(out.read_text())["prompts"]] == [row["tokens"] for row in kept]


@pytest.mark.parametrize("more", [["--samples", "2"], ["--batch-size", "2"]])
def test_a_conversation_is_one(endless: str, own: Path, more: list[str]) -> None:
    shell = Terminal("--target", endless, "--strategy", "ar", *more, cache=own)
    shell.until("a conversation in the terminal is one: leave out torchrun, --samples and --batch-size")
    assert shell.process.wait(60) == 2


def test_a_target_without_a_chat_template(typed: Callable[..., Chat], endless: str, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(endless, bare)
    (bare / "chat_template.jinja").unlink()
    notes = typed("one\r", target=str(bare), code=2).notes
    assert notes.splitlines()[-1] == ("specker: error: the tokenizer of bare has no chat template, which --chat needs")


def test_a_conversation_samples_as_the_checkpoint_recommends(
    typed: Callable[..., Chat], endless: str, tmp_path: Path
) -> None:
    """Else at temperature 0.7, as the server; flags go first."""
    from specker.cli.run import main

    bare, out = tmp_path / "bare", tmp_path / "o.json"
    shutil.copytree(endless, bare)
    (bare / "generation_config.json").unlink()
    for target, flags, want in (
        (endless, [], {"temperature": 0.6, "top_p": 0.92}),
        (str(bare), [], {"temperature": 0.7, "top_p": 1.0}),
        (endless, ["--temperature", "0", "--seed", "3"], {"temperature": 0.0, "top_p": 0.92}),
    ):
        chat = typed("one\r", *flags, target=target, usual=True)
        shown = f"temperature {want['temperature']}, top_p {want['top_p']}, top_k 0, seed {3 if flags else 0}, "
        assert f"{shown}max_new_tokens 6; /set changes them\n" in chat.notes
        asked = [text for name, x in want.items() for text in (f"--{name.replace('_', '-')}", str(x))]
        argv = ["--target", target, "--strategy", "ar", "--chat", "--prompt", "one", "--max-new-tokens", "6", *asked]
        assert main([*argv, *flags[2:], "--dtype", "float64", "--device", "cpu", "--json", str(out)]) == 0
        assert json.loads(out.read_text())["prompts"][0]["tokens"] == chat.rows[0]["tokens"]
        if not flags:
            server = Server(specker.load(target, strategy="ar", device="cpu"), Serving(), {})
            assert Sampling(**server.sampling) == Sampling(**want)


def test_settings_change_the_answers_to_come(typed: Callable[..., Chat], endless: str) -> None:
    chat = typed(
        "one\r/clear\r/set temperature 0.9\r/set top-p 0.8\r/seed 7\r/set max_new_tokens 9\rone\r/set\r"
        "/set warmth 1\r/set temprature 1\r/set temperature hot\r/set top_p 2\r/set max_new_tokens 0\r/seed\r"
    )
    shown = "temperature 0.9, top_p 0.8, top_k 0, seed 7, max_new_tokens 9\n"
    assert chat.notes.count(f"\n{shown}") == 2
    for line in (
        "there is no setting warmth; there are temperature, top_p, top_k, min_p, repetition_penalty, presence_penalty, "
        "frequency_penalty, seed, max_new_tokens",
        "there is no setting temprature; did you mean temperature?",
        "temperature must be a number, got hot",
        "top_p must be in (0, 1], got 2.0",
        "max_new_tokens must be a whole number of at least 1, got 0",
        "seed must be a whole number, got nothing",
    ):
        assert f"\n{line}\n" in chat.notes
    assert [len(row["tokens"]) for row in chat.rows] == [6, 9]
    assert "sampling" not in chat.rows[0] and chat.rows[1]["sampling"]["top_p"] == 0.8
    fresh = typed("one\r", "--temperature", "0.9", "--top-p", "0.8", "--seed", "7", "--max-new-tokens", "9")
    assert fresh.rows[0]["tokens"] == chat.rows[1]["tokens"]


def test_a_turn_is_answered_again(typed: Callable[..., Chat]) -> None:
    """With the next seed, after the same messages; the results keep both answers."""
    hot = "--temperature", "0.9", "--top-p", "1"
    chat = typed("/retry\r/system be brief\rone\rtwo\r/retry\rthree\r/clear\rfour\r", *hot)
    assert "\nthere is no answer to replace yet\n" in chat.notes and [
        message["content"] for message in chat.messages
    ] == ["be brief", "four"]
    assert [row["seed"] for row in chat.rows] == [0, 0, 1, 1, 1]
    lengths = [row["prompt_tokens"] for row in chat.rows]
    assert lengths[1] == lengths[2] and chat.rows[1]["tokens"] != chat.rows[2]["tokens"]
    chat = typed("one\rtwo\r/retry\rthree\r", *hot)
    assert chat.turns == ["one", "two", "three"] and chat.messages[3]["content"] == chat.rows[2]["text"]
    assert "\nat temperature 0 the answer would be the same: " in typed("one\r/retry\r").notes


def test_a_line_below_each_answer_says_how_fast_it_came(typed: Callable[..., Chat]) -> None:
    said = typed("one\rtwo\r", "--strategy", "lookup", "--policy", "fixed").notes
    lines = re.findall(
        r"^6 tokens, \d+\.\d tokens/s, acceptance length (\d\.\d\d); the answer ends at max_new_", said, re.M
    )
    assert len(lines) == 2 and all(float(length) >= 1 for length in lines)
    assert re.search(r"^6 tokens, \d+\.\d tokens/s; the answer ends", typed("one\r").notes, re.M)
