"""Ctrl-C while a command's modules are imported, which takes up to a second, and while it decodes."""

import os
import signal
import sys
import threading
from typing import Any


def exit_on_ctrl_c() -> None:
    """From here on Ctrl-C ends the process with one line, not with a traceback through half-imported modules."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a background job ignores it
        signal.signal(signal.SIGINT, _exit)


def raise_on_ctrl_c() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(*_: Any) -> None:
    sys.stderr.write("specker: interrupted\n")
    sys.stderr.flush()
    os._exit(130)


class CtrlC:
    """Within it, the first Ctrl-C only sets `pressed`, so that decoding stops after the current chunk and counts and
    text agree; the second one raises KeyboardInterrupt."""

    pressed = False

    def __enter__(self) -> "CtrlC":
        self.before: Any = None
        if threading.current_thread() is threading.main_thread():
            self.before = signal.signal(signal.SIGINT, self._press)
        return self

    def _press(self, *_: Any) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True

    def __exit__(self, *_: Any) -> None:
        if self.before is not None:
            signal.signal(signal.SIGINT, self.before)
