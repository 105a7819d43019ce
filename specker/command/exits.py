"""Run a command: its errors become one line on stderr and an exit code."""

import os
import re
import sys
from collections.abc import Callable

from specker.command import interrupt
from specker.fields import JobError, named_by_flags
from specker.torchrun import leave_error


def run_cli(command: Callable[[], int], prints_errors: Callable[[], bool] = lambda: True) -> int:
    """Run a command and turn its errors into one line on stderr; SPECKER_DEBUG=1 raises them instead. Returns the exit
    code: 0 for success, 1 if specker itself or the job failed, 2 for an error that the user can correct, 130 after
    Ctrl-C, 141 for a closed pipe. `prints_errors`, called on an error, says whether this process of the job prints it.
    While the command runs, messages name options by their flags."""
    interrupt.raise_on_ctrl_c()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller, as with `>&-`: write to nowhere
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    try:
        with named_by_flags():
            code = command()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("specker: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader closed the pipe, such as `| head`; the interpreter must not flush into it
        silence()
        return 141
    except Exception as error:
        if os.environ.get("SPECKER_DEBUG"):
            raise
        if (lacks := _lacks_memory(error)) is not None:
            error = ValueError(lacks)
        mine = not isinstance(error, (ValueError, OSError, JobError))
        about = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        line = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in " ".join(about.split()))
        if mine:
            line = f"{type(error).__name__}: {line} (internal; set SPECKER_DEBUG=1 for the traceback)"
        said = f"specker: error: {line}"
        if prints_errors():
            print(said, file=sys.stderr)
        leave_error(said)
        return 1 if mine or isinstance(error, JobError) else 2


def silence() -> None:
    """Drop what is written to stdout from now on, including what the interpreter would write when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _lacks_memory(error: Exception) -> str | None:
    """A sentence for the user if the error says that the system refused memory (in torch, safetensors or Python), else
    None."""
    text = str(error)
    if not isinstance(error, MemoryError) and not re.search("[Cc]annot allocate memory|can't allocate memory", text):
        return None
    need = re.search(r"(\d+) bytes", text)
    more = f": {int(need[1]) / 1e9:.2f} GB more are needed at once" if need else ""
    return f"not enough memory{more}; see --max-context and --quantize, or raise the limit (ulimit -v)"
