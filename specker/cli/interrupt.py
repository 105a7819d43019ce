"""Ctrl-C while a command's modules are imported, before the command handles it itself. Importing takes up to a
second."""

import os
import signal
import sys
from typing import Any


def ends_imports() -> None:
    """From here on Ctrl-C ends the process with one line, not with a traceback through half-imported modules."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a background job ignores it
        signal.signal(signal.SIGINT, _end)


def raises() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*_: Any) -> None:
    sys.stderr.write("specker: interrupted\n")
    sys.stderr.flush()
    os._exit(130)
