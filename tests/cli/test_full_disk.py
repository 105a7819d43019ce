"""Output on a full device, which /dev/full plays: the flag is named, and the run's other results are kept."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from make_checkpoint import make

from specker.cli import run

FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full")


@pytest.fixture(scope="module")
def argv(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    target = make(tmp_path_factory.mktemp("target"), layers=1, tokenizer=True)
    how = ["--target", str(target), "--strategy", "ar", "--prompt", "a prompt", "--max-new-tokens", "5"]
    return [*how, "--device", "cpu"]


def test_stdout(argv: list[str], tmp_path: Path) -> None:
    """In a process of its own: the interpreter's end writes what is left, and must not fail."""
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "specker.run", *argv, "--json", str(out)]
    with FULL.open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and "the text: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert len(json.loads(out.read_text())["prompts"][0]["tokens"]) == 5


def test_json_and_trace(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "rounds.jsonl"
    with monkeypatch.context() as patch, FULL.open("w") as full:  # its end flushes, which must not fail
        patch.setattr(sys, "stdout", full)
        assert run.main([*argv, "--json", "-", "--trace", str(trace)]) == 2
    assert "--json -: cannot be written: No space left on device" in capsys.readouterr().err
    assert len(trace.read_text().splitlines()) > 5
    assert run.main([*argv, "--trace", str(FULL), "--json", "-"]) == 2
    out, err = capsys.readouterr()
    assert "--trace /dev/full: cannot be written: No space left on device" in err
    assert json.loads(out)["prompts"][0]["tokens"]
