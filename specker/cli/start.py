"""A faster start of a command that decodes, and less memory: its process's garbage collection and malloc."""

import atexit
import ctypes
import gc
import os
import sys

ARENA_MAX = -8  # M_ARENA_MAX in malloc.h
ARENAS = 2  # what locks cost with so few was too little to measure


def quicken() -> None:
    """From here on, until `loaded`, Python collects no garbage: importing torch makes a million objects that stay, and
    looking through them takes a tenth of a start. To be called before torch is imported, in a process of specker's
    own."""
    gc.disable()


def loaded() -> None:
    """Collect garbage again after `quicken`, but never look through what was made so far."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
        atexit.register(_unfreeze)


def share_arenas() -> None:
    """Let all threads take memory from two of glibc's arenas. By default a thread that allocates may get one of its
    own, and what a request has freed stays in its arena. To be called before threads start. Does nothing with other C
    libraries, or if the user has set the number."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(ARENA_MAX, ARENAS)


def _unfreeze() -> None:
    """Triton reports its objects as leaks if the interpreter does not collect them at exit."""
    if "triton" in sys.modules:
        gc.unfreeze()
