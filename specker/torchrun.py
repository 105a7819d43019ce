"""What torchrun tells each process of a job, in its environment."""

import contextlib
import json
import os
import time
from pathlib import Path


def world_size() -> int:
    """The number of the job's processes, 1 without torchrun. Raises ValueError if the variable holds no such number."""
    return max(1, _number("WORLD_SIZE", 1))


def rank() -> int:
    """The number of this process in the job."""
    return _number("RANK", 0)


def local_rank() -> int:
    """The number of this process on its machine."""
    return _number("LOCAL_RANK", 0)


def processes_here() -> int:
    """The number of the job's processes on this machine."""
    return max(1, _number("LOCAL_WORLD_SIZE", 1))


def leave_error(said: str) -> None:
    """Hand an error to torchrun, whose own report, printed after the last process, then ends with it."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        about = {"message": said, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": about}))


def _number(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    if value and not value.isdecimal():
        raise ValueError(f"the environment variable {name}, which torchrun sets to a number, is {value!r}")
    return int(value) if value else default
