"""What torchrun tells each process of a job, in its environment."""

import os


def world_size() -> int:
    """The number of the job's processes, 1 without torchrun. Raises ValueError if the variable holds no such number."""
    return max(1, _number("WORLD_SIZE", 1))


def rank() -> int:
    """The number of this process in the job."""
    return _number("RANK", 0)


def local_rank() -> int:
    """The number of this process on its machine."""
    return _number("LOCAL_RANK", 0)


def _number(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    if value and not value.isdecimal():
        raise ValueError(f"the environment variable {name}, which torchrun sets to a number, is {value!r}")
    return int(value) if value else default
