"""Output on a full device, which /dev/full plays: the flag is named, and the run's other results are kept."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from make_checkpoint import make

FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full")


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    target = make(tmp_path_factory.mktemp("target"), layers=1, tokenizer=True)
    how = ["--target", str(target), "--strategy", "ar", "--prompt", "a prompt", "--max-new-tokens", "5"]
    return [sys.executable, "-m", "specker.run", *how]


def test_stdout(command: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    with FULL.open("w") as full:
        done = subprocess.run([*command, "--json", str(out)], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and "the text: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert len(json.loads(out.read_text())["prompts"][0]["tokens"]) == 5


def test_json_and_trace(command: list[str], tmp_path: Path) -> None:
    trace = tmp_path / "rounds.jsonl"
    more = ["--json", "-", "--trace", str(trace)]
    with FULL.open("w") as full:
        done = subprocess.run([*command, *more], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and "--json -: cannot be written: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert len(trace.read_text().splitlines()) > 5
    done = subprocess.run([*command, "--trace", str(FULL), "--json", "-"], capture_output=True, text=True)
    assert done.returncode == 2 and "--trace /dev/full: cannot be written: No space left on device" in done.stderr
    assert json.loads(done.stdout)["prompts"][0]["tokens"]
