"""Ctrl-C while a command's modules are imported, which takes up to a second, and while it decodes."""

import os
import signal
import threading
from contextlib import suppress
from typing import Any, NoReturn


def exit_on_ctrl_c() -> None:
    """From here on Ctrl-C ends the process with one line, not with a traceback through half-imported modules."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a background job ignores it
        signal.signal(signal.SIGINT, _exit)


def raise_on_ctrl_c() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def leave(number: int, said: str) -> NoReturn:
    """End the process at once, with the code that shells give for a signal, from a signal's handler: sys.stderr raises
    RuntimeError in a handler that interrupts a write to it."""
    with suppress(OSError):  # standard error may be closed
        os.write(2, f"{said}\n".encode())
    os._exit(128 + number)


def _exit(number: int, _: Any) -> None:
    leave(number, "specker: interrupted")


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
