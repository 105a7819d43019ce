"""A conversation in the terminal, through a pseudo-terminal, and what is refused."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from make_checkpoint import edit, make

from specker import run

ROOT = Path(__file__).parents[1]


class Terminal:
    """`specker.run --chat` in a pseudo-terminal."""

    def __init__(self, *argv: str):
        self.main, side = pty.openpty()
        command = [sys.executable, "-m", "specker.run", "--chat", "--device", "cpu", *argv]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "100"}
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdin=side,
            stdout=side,
            stderr=side,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job ignores it
        )
        os.close(side)
        self.seen = ""

    def until(self, pattern: str, seconds: float = 60) -> str:
        """Read until `pattern` matches what came since the last match; returns that."""
        deadline = time.monotonic() + seconds
        while (found := re.search(pattern, self.seen, re.DOTALL)) is None:
            assert time.monotonic() < deadline, f"{pattern!r} did not come: {self.seen[-2000:]!r}"
            if select.select([self.main], [], [], 0.2)[0]:
                try:
                    self.seen += os.read(self.main, 65536).decode(errors="replace")
                except OSError:  # the other side is closed
                    assert re.search(pattern, self.seen, re.DOTALL), f"{pattern!r} did not come: {self.seen[-2000:]!r}"
        text, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return text

    def waits(self, seconds: float = 60) -> None:
        """Return once the main thread sleeps: it has printed all and reads the next key."""
        deadline = time.monotonic() + seconds
        stat = Path(f"/proc/{self.process.pid}/stat")
        while stat.read_text().rsplit(")", 1)[1].split()[0] != "S":
            assert time.monotonic() < deadline, "it never waits for a key"
            time.sleep(0.01)

    def type(self, text: str) -> None:
        os.write(self.main, text.encode())

    def ended(self) -> int:
        self.until(r"$^|tokens/s")  # the closing table
        code = self.process.wait(60)
        os.close(self.main)
        return code


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target without stop ids that recommends sampling."""
    folder = make(tmp_path_factory.mktemp("endless") / "endless", tokenizer=True, max_context=4096)
    edit(folder, "tokenizer_config.json", eos_token=...)
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_p": 0.92}')
    return str(folder)


def test_a_conversation(endless: str, tmp_path: Path) -> None:
    """Two answers, a line that Ctrl-C discards, an answer that Ctrl-C ends, one more, Ctrl-D."""
    out = tmp_path / "o.json"
    more = ["--target", endless, "--strategy", "ar", "--max-new-tokens", "600", "--json", str(out)]
    shell = Terminal(*more)
    told = shell.until("> ")
    assert "the checkpoint recommends --temperature 0.6 --top-p 0.92" in told and "Ctrl-C ends an answer" in told
    shell.type("one\n")
    shell.until(r"one\r\n.+\r\n> ")
    shell.type("half a li")
    shell.until("half a li")
    shell.waits()  # readline would see an earlier signal only with the next key
    os.killpg(shell.process.pid, signal.SIGINT)
    shell.until("> ")
    shell.type("two\n")
    shell.until(r"two\r\n.{8}")
    os.killpg(shell.process.pid, signal.SIGINT)
    shell.until("> ")
    shell.type("x" * 4000 + "\n")
    shell.until("this turn: the prompt has")
    shell.until("> ")
    shell.type("\n")
    shell.until("> ")
    shell.type("three\n")
    shell.until(r"three\r\n.+\r\n> ")
    shell.type("\x04")
    assert shell.ended() == 0
    rows = json.loads(out.read_text())["prompts"]
    assert [row["finish_reason"] for row in rows] == ["length", "interrupted", "length"]
    assert [len(row["tokens"]) for row in rows][::2] == [600, 600] and 0 < len(rows[1]["tokens"]) < 600
    lengths = [row["prompt_tokens"] for row in rows]
    assert lengths[0] + 500 < lengths[1] < lengths[2], "the answers are part of the conversation"


def test_the_kv_of_earlier_turns_is_kept(endless: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a file of conversations too. The answers are those without it."""
    from specker.runtime.loop import Batch
    from specker.runtime.stats import Stats

    talks, out = tmp_path / "talks.jsonl", tmp_path / "o.json"
    talks.write_text(json.dumps({"turns": ["one " * 60, "two", "three"]}) + "\n")
    argv = ["--target", endless, "--strategy", "lookup", "--chat", "--prompts", str(talks), "--max-new-tokens", "12"]
    argv += ["--dtype", "float64", "--device", "cpu", "--json", str(out)]
    prefilled: list[int] = []
    to_json = Stats.to_json
    monkeypatch.setattr(Stats, "to_json", lambda self: prefilled.append(self.prompt) or to_json(self))
    assert run.main(argv) == 0
    kept = json.loads(out.read_text())["prompts"]
    assert prefilled[0] == kept[0]["prompt_tokens"] - 1 and max(prefilled[1:3]) < 60
    monkeypatch.setattr(Batch, "_kept", lambda self, sequence: [0] * len(self.caches))
    prefilled.clear()
    assert run.main(argv) == 0
    assert prefilled[1] == kept[1]["prompt_tokens"] - 1
    assert [row["tokens"] for row in json.loads(out.read_text())["prompts"]] == [row["tokens"] for row in kept]


@pytest.mark.parametrize("more", [["--samples", "2"], ["--batch-size", "2"]])
def test_a_conversation_is_one(endless: str, more: list[str]) -> None:
    shell = Terminal("--target", endless, "--strategy", "ar", *more)
    shell.until("a conversation in the terminal is one: leave out torchrun, --samples and --batch-size")
    assert shell.process.wait(60) == 2
