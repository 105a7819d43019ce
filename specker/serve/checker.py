"""Compile each new grammar in a child process first, which can be killed: llguidance's own limits leave schemas that
take for ever and all memory."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specker.runtime.round.grammars import sentence

MEMORY = 128 << 20  # bytes that compiling a grammar may take
WALL = 20  # seconds to wait for each CPU second that the child has, on a machine that others use


class Checker:
    """The child starts with the first grammar and stays. It is used by one thread at a time."""

    def __init__(self, about: Callable[[], dict[str, Any]], limits: dict[str, int], seconds: float):
        """`about`: returns the arguments of llguidance's tokenizer. `limits`: of its parser. `seconds`: CPU time for
        one grammar."""
        self._about, self._limits, self._seconds = about, limits, seconds
        self._child: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def __call__(self, grammar: str) -> None:
        """Raises ValueError with one sentence for a grammar that is invalid or takes more than the limits."""
        with self._lock:
            child = self._child = self._child or self._started()
            late = threading.Timer(WALL * self._seconds, child.kill)
            late.start()
            try:
                error = _asked(child, grammar)
            finally:
                late.cancel()
            if error is None:
                self._child = None
                code = child.wait()
        if error is None and code > 0:
            raise RuntimeError(f"the process that checks grammars ended with code {code}")
        if error is None:
            raise ValueError(
                f"the grammar is too complex: compiling it takes more than {self._seconds:g} s or {MEMORY >> 20} MiB"
            )
        if error:
            raise ValueError(f"the grammar is invalid: {sentence(error)}")

    def close(self) -> None:
        """End the child, also in the middle of a grammar."""
        if (child := self._child) is not None:
            child.kill()

    def _started(self) -> "subprocess.Popen[str]":
        script = str(Path(__file__).with_name("compiling.py"))
        child = subprocess.Popen(
            [sys.executable, "-P", script],  # -P: its folder's modules hide none of the library's
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C is for the server
        )
        limits = {"limits": self._limits, "seconds": self._seconds, "memory": MEMORY}
        _send(child, limits | {"tokenizer": self._about()})
        return child


def _asked(child: "subprocess.Popen[str]", grammar: str) -> str | None:
    """What is wrong with a grammar, "" for nothing; None if the child has ended."""
    try:
        _send(child, grammar)
        line = child.stdout.readline()  # type: ignore[union-attr]
    except OSError:
        return None
    return json.loads(line) if line else None


def _send(child: "subprocess.Popen[str]", what: Any) -> None:
    assert child.stdin is not None
    child.stdin.write(json.dumps(what) + "\n")
    child.stdin.flush()
