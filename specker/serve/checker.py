"""Compile each new grammar in a child process first, which can be killed: llguidance's own limits leave schemas that
take for ever and all memory."""

import json
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specker.runtime.round.grammars import sentence

log = logging.getLogger(__name__)

MEMORY = 128 << 20  # bytes that compiling a grammar may take
WALL = 20  # seconds to wait for each CPU second that the child has, on a machine that others use
START = 60  # seconds to wait for a new child
LIMITS = -signal.SIGPROF, -signal.SIGABRT  # how a child ends that a grammar took beyond its time or memory
SCRIPT = Path(__file__).with_name("compiling.py")

Child = subprocess.Popen[str]


class Unavailable(RuntimeError):
    """Grammars cannot be checked now, whatever they are."""


class Checker:
    """The child starts with the first grammar and stays. One that is ended from outside, or does not answer, is
    replaced once. It is used by one thread at a time."""

    def __init__(self, about: Callable[[], dict[str, Any]], limits: dict[str, int], seconds: float):
        """`about`: returns the arguments of llguidance's tokenizer. `limits`: of its parser. `seconds`: CPU time for
        one grammar."""
        self._about, self._limits, self._seconds = about, limits, seconds
        self._child: Child | None = None
        self._closed = False
        self._lock = threading.Lock()

    def __call__(self, grammar: str) -> None:
        """Raises ValueError with one sentence for a grammar that is invalid or takes more than the limits, and
        Unavailable if two children were ended from outside."""
        with self._lock:
            error = self._checked(grammar)
            if error is None:
                error = self._checked(grammar)
        if error is None:
            raise Unavailable("grammars cannot be checked now, since the process that does it ends; try again later")
        if error:
            raise ValueError(error)

    def close(self) -> None:
        """End the child, also in the middle of a grammar."""
        self._closed = True
        if (child := self._child) is not None:
            child.kill()

    def _checked(self, grammar: str) -> str | None:
        """What is wrong with a grammar, "" for nothing; None if the child ended for another reason."""
        child = self._child = self._child or self._started()
        if child is None:
            return None
        error = _asked(child, grammar, WALL * self._seconds)
        if error is not None:
            return f"the grammar is invalid: {sentence(error)}" if error else ""
        self._child, code = None, child.wait()
        if code in LIMITS:
            return f"the grammar is too complex: compiling it takes more than {self._seconds:g} s or {MEMORY >> 20} MiB"
        self._warn(f"ended with code {code}")
        return None

    def _started(self) -> Child | None:
        """A child that is ready; None if there is none."""
        settings = {"limits": self._limits, "seconds": self._seconds, "memory": MEMORY, "tokenizer": self._about()}
        if self._closed:
            return None
        try:
            child = self._child = subprocess.Popen(  # from here on, `close` ends it
                [sys.executable, "-P", str(SCRIPT)],  # -P: its folder's modules hide none of the library's
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # Ctrl-C is for the server
            )
        except OSError as error:  # such as no memory
            self._warn(f"cannot start: {error.strerror}")
            return None
        if _asked(child, settings, START) is not None:
            return child
        self._warn(f"ended with code {child.wait()} before it was ready")
        return None

    def _warn(self, what: str) -> None:
        if not self._closed:
            log.warning("the process that checks grammars %s", what)


def _asked(child: Child, what: Any, seconds: float) -> Any:
    """The child's answer; None if it has ended, as it does after so many seconds without an answer."""
    assert child.stdin is not None and child.stdout is not None
    late = threading.Timer(seconds, child.kill)
    late.start()
    try:
        child.stdin.write(json.dumps(what) + "\n")
        child.stdin.flush()
        line = child.stdout.readline()
    except OSError:
        return None
    finally:
        late.cancel()
    return json.loads(line) if line else None
