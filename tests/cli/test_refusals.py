"""Trouble outside of specker, said in one line: little memory, Ctrl-C at a bad moment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import warm

from specker.command.exits import run_cli

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "not enough memory; see --max-context"),
        (
            RuntimeError("unable to mmap 3086914904 bytes from file <a.safetensors>: Cannot allocate memory (12)"),
            "not enough memory: 3.09 GB more are needed at once; see",
        ),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 52000000 bytes."),
            "not enough memory: 0.05 GB more are needed at once; see",
        ),
    ],
)
def test_little_memory(error: Exception, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        raise error

    assert run_cli(command) == 2
    assert said in (told := capsys.readouterr().err) and "internal" not in told


@pytest.mark.parametrize("module", ["specker.run", "specker"])
@pytest.mark.parametrize("slow_import", ["difflib", "random"])
def test_an_interrupt_while_modules_are_imported(tmp_path: Path, module: str, slow_import: str) -> None:
    """`slow_import` meets Ctrl-C; `random` is one of the first imports."""
    slow = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(30)\n"
    (tmp_path / f"{slow_import}.py").write_text(slow)
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-m", module, "--help"], env=env, capture_output=True, text=True)
    assert done.returncode == 130 and done.stderr == "specker: interrupted\n"


WRITES = """
import io, os, signal, sys
from specker.command import interrupt

class Interrupted(io.FileIO):
    def write(self, text):
        os.kill(os.getpid(), signal.SIGINT)
        return super().write(text)

interrupt.exit_on_ctrl_c()
sys.stderr = io.TextIOWrapper(io.BufferedWriter(Interrupted(2, "w")), line_buffering=True)
print("a line", file=sys.stderr)
"""


def test_an_interrupt_while_a_line_is_written() -> None:
    """Then sys.stderr cannot be written."""
    done = warm.run("-c", WRITES)
    assert done.returncode == 130 and done.stderr == "specker: interrupted\n"
