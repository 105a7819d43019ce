"""Run Python in a process of its own, since a kernel's definition decides whether it is interpreted or compiled."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def python(*command: str) -> str:
    """The output of `python *command`; AssertionError with stdout and stderr if it fails."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_INTERPRET", "PYTEST_"))}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
