"""A program that answers lines of JSON, in a process group of its own."""

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any


class Ended(Exception):
    """The program ended instead of answering; says why."""


class Process:
    def __init__(self, command: list[Any], log: Path | None = None, cwd: Path | None = None, **env: str):
        """`log`: of stderr. A server that the program starts belongs to its group, so `end` ends both."""
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.log, how = log, pipes | {"cwd": cwd, "env": os.environ | env, "start_new_session": True}
        if log is None:
            self.popen = subprocess.Popen(command, **how)
            return
        with log.open("w") as errors:
            self.popen = subprocess.Popen(command, stderr=errors, **how)

    def ask(self, request: Any = None) -> Any:
        """The answer to a request; without one, the first line that the program writes. Raises Ended."""
        try:
            if request is not None:
                print(json.dumps(request), file=self.popen.stdin, flush=True)
            return json.loads(self.popen.stdout.readline())
        except (ValueError, OSError):
            code = self.popen.wait()
            said = "" if self.log is None else self.log.read_text(errors="replace")
            lines = [line.strip() for line in said.splitlines() if line.strip()] or ["no message"]
            raise Ended(f"exit code {code}: {lines[-1][:160]}") from None

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)

    def end(self) -> None:
        """End the program and what it started."""
        self.signal(signal.SIGKILL)
        self.popen.communicate()
