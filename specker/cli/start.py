"""The start of a command that decodes: loading the engine, and its process's garbage collection and malloc."""

import atexit
import ctypes
import gc
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `quicken` goes before any other import
    from specker.cli.flags import Job
    from specker.cli.screen import Screen
    from specker.options import Options

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


def load(job: "Job", options: "Options", screen: "Screen") -> Any:
    """The engine (runtime.engine.Engine)."""
    with screen.progress("loading") as on_progress:  # torch alone takes more than a second
        from specker.cpu import on_compile
        from specker.runtime.load import load  # not specker.load: a folder `specker` here would hide the package

        with on_compile(screen.note):
            engine = load(job.target, job.draft, options, device=job.device, dtype=job.dtype, on_progress=on_progress)
    loaded()
    return engine


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
