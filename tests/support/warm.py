"""Run Python commands without waiting for imports. `run` is `subprocess.run` with this interpreter, but each command
runs in a fork of a process that has imported torch, triton, transformers and this repository's kernels. Importing them
takes longer than most of the tests' commands.

Commands that test imports or a terminal, or that need variables which torch reads when it is imported, start an
interpreter of their own. Here OMP_NUM_THREADS is 1, kernels are compiled, and pytest is not a worker of this run.
"""

import atexit
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
WITHOUT = ("TRITON_INTERPRET", "PYTEST_")
LIMIT = 600  # seconds until a command is ended
_one_at_a_time = threading.Lock()


def run(*command: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The result of `python *command`, which starts with -c, -m or a file. `env` adds to this process's variables."""
    [done] = beside((command, env or {}), cwd=cwd)
    return done


def beside(
    *commands: tuple[Sequence[str], Mapping[str, str]], cwd: Path = ROOT
) -> list[subprocess.CompletedProcess[str]]:
    """The results of commands that run at the same time, each with its variables."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            _job(command, cwd, env, f"{folder}/{n}.out", f"{folder}/{n}.err")
            for n, (command, env) in enumerate(commands)
        ]
        codes = _ask(_ask(jobs))
        texts = [[Path(path).read_text() for path in job["paths"]] for job in jobs]
    return [
        subprocess.CompletedProcess(c, code, *text) for (c, _), code, text in zip(commands, codes, texts, strict=True)
    ]


class Running:
    """`subprocess.Popen` of `python *command`, whose stderr is a pipe."""

    returncode: int | None = None

    def __init__(self, *command: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            os.mkfifo(pipe := f"{folder}/err")
            [self.pid] = _ask([_job(command, ROOT, {}, os.devnull, pipe)])
            self.stderr = open(pipe)  # noqa: SIM115  once the command has opened it, too

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> None:
        if self.returncode is None:
            [self.returncode] = _ask([self.pid])

    def communicate(self) -> str:
        """The rest of stderr, when the command has ended."""
        said = self.stderr.read()
        self.wait()
        return said

    def kill(self) -> None:
        if self.returncode is None:
            self.send_signal(signal.SIGKILL)


def _job(command: Sequence[str], cwd: Path, env: Mapping[str, str], out: str, err: str) -> dict[str, Any]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(WITHOUT)}
    own = {**inherited, "OMP_NUM_THREADS": "1", **env}
    return {"command": [str(part) for part in command], "cwd": str(cwd), "env": own, "paths": [out, err]}


def _ask(jobs: list[Any]) -> list[int]:
    """The process ids of jobs that begin now; of process ids, the exit codes, when these have ended."""
    with _one_at_a_time:
        server = _server()
        assert server.stdin and server.stdout
        server.stdin.write(json.dumps(jobs) + "\n")
        server.stdin.flush()
        answer: list[int] = json.loads(server.stdout.readline())
    return answer


@cache
def _server() -> subprocess.Popen[str]:
    """It ends with this process, which holds its standard input."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(WITHOUT)} | {"OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen([sys.executable, __file__], env=env, **pipes)
    atexit.register(server.communicate)
    return server


def _serve() -> dict[str, Any]:
    """Answers each line as `_ask` says. Returns in a fork, with its job."""
    import torch.distributed  # noqa: F401
    from transformers import AutoConfig, AutoTokenizer  # noqa: F401
    from triton.runtime.cache import triton_key

    sys.path[0] = str(ROOT)
    import specker.kernels  # noqa: F401

    triton_key()  # the hash of Triton's files, which each process that compiles a kernel needs
    gc.freeze()
    for line in sys.stdin:
        answer = []
        for job in json.loads(line):
            if isinstance(job, int):
                answer.append(os.waitstatus_to_exitcode(os.waitpid(job, 0)[1]))
            elif child := os.fork():
                answer.append(child)
            else:
                return job
        print(json.dumps(answer), flush=True)
    sys.exit(0)


def _become(job: dict[str, Any]) -> None:
    """Run the job as a fresh interpreter would."""
    signal.alarm(LIMIT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in enumerate(job["paths"], 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115  a pipe, unlike the server's
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    how, *arguments = job["command"]
    first = {"-c": "", "-m": job["cwd"]}.get(how, str(Path(how).parent))
    sys.path[:] = [first, *filter(None, job["env"].get("PYTHONPATH", "").split(os.pathsep)), *sys.path[1:]]
    if how == "-c":
        code, *rest = arguments
        sys.argv = ["-c", *rest]
        module = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), module.__dict__)
    elif how == "-m":
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [how, *arguments]
        runpy.run_path(how, run_name="__main__")


def _end(error: BaseException | None) -> None:
    """End as an interpreter does, but leave its memory to the system: to free it object by object takes a second."""
    code = error.code if isinstance(error, SystemExit) else error and 1
    if not isinstance(error, SystemExit | None):
        traceback.print_exception(error)
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1 if code else 0)


if __name__ == "__main__":
    job = _serve()
    try:
        _become(job)
    except BaseException as error:
        _end(error)
    _end(None)
