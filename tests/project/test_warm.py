"""A command in a fork does what it does in an interpreter of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import warm

SHOWN = "import os, sys; print(sys.argv, sys.path[0], os.getcwd(), os.environ['A'], os.environ.get('PYTEST_VERSION'))"
CASES = {
    "code": ["-c", SHOWN, "a", "b"],
    "file": ["shown.py", "c"],
    "module": ["-m", "shown", "-x"],
    "status": ["-c", "import sys; print('to', file=sys.stderr); sys.exit(3)"],
    "message": ["-c", "import sys; sys.exit('a sentence')"],
    "signal": ["-c", "import os; os.kill(os.getpid(), 9)"],
    "end": ["-c", "import atexit; atexit.register(print, 'at the end'); print('before')"],
}


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_an_interpreter(name: str, tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text(SHOWN)
    own = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")} | {"A": "1"}
    command = [part.replace("shown.py", str(tmp_path / "shown.py")) for part in CASES[name]]
    want = subprocess.run([sys.executable, *command], cwd=tmp_path, env=own, capture_output=True, text=True)
    got = warm.run(*command, cwd=tmp_path, env={"A": "1"})
    assert (got.returncode, got.stdout) == (want.returncode, want.stdout)
    assert got.stderr.splitlines()[-1:] == want.stderr.splitlines()[-1:]


def test_an_error_shows_its_traceback() -> None:
    done = warm.run("-c", "raise ValueError('wrong')")
    assert done.returncode == 1 and done.stderr.endswith("ValueError: wrong\n") and "Traceback" in done.stderr


def test_commands_run_at_the_same_time(tmp_path: Path) -> None:
    """Each waits for the file of the other."""
    code = "import os, sys, time\nopen(sys.argv[1], 'w')\nwhile not os.path.exists(sys.argv[2]): time.sleep(0.01)"
    files = [str(tmp_path / name) for name in "ab"]
    done = warm.beside((["-c", code, *files], {}), (["-c", code, *files[::-1]], {}))
    assert [each.returncode for each in done] == [0, 0]
