"""Ranks of one machine as forks of a test, which share memory (cpu/communicator.py)."""

import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from specker.cpu import communicator
from specker.cpu.communicator import Communicator


def in_ranks(size: int, folder: Path, work: Callable[[Communicator], Any]) -> list[Any]:
    """What `work` returns in each of `size` processes, by rank; None of one that ended otherwise."""
    path = communicator.new_file(size)
    assert path is not None
    children = [os.fork() or _work(folder, path, rank, size, work) for rank in range(size)]
    for child in children:
        os.waitpid(child, 0)
    os.unlink(path)
    files = [folder / f"{rank}.pt" for rank in range(size)]
    return [torch.load(file) if file.exists() else None for file in files]


def _work(folder: Path, path: str, rank: int, size: int, work: Callable[[Communicator], Any]) -> int:
    """The whole life of a rank."""
    code = 1
    try:
        memory = communicator.opened(path, rank, size)
        assert memory is not None
        memory.limit(60)
        (folder / f"{rank}.ready").touch()
        while len(list(folder.glob("*.ready"))) < size:  # a rank that has not come yet holds no lock
            time.sleep(0.001)
        torch.save(work(memory), folder / f"{rank}.pt")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def seen_by(memory: Communicator) -> Any:
    """What a model and a schedule read of `dist.Ranks`."""
    return SimpleNamespace(communicator=memory, rank=memory.struct.rank, size=memory.struct.size)
