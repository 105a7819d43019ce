"""Exchanges between the ranks of one machine, through memory that all of them map (csrc/communicator.c)."""

import ctypes
import mmap
import os
import tempfile
import weakref
from pathlib import Path
from typing import Any

from torch import Tensor

from specker.cpu.library import Exchanges, available, native
from specker.fields import JobError

FOLDER = Path("/dev/shm")  # files in memory, which processes of one machine share
ROOM = 1 << 20  # bytes that a rank sends at once
LINE = 128  # bytes of a rank's count; see csrc/communicator.c


class RankLost(JobError):
    """Another process of the job ended or did not answer in time; one sentence."""


class Communicator:
    """What the compiled layers and Python exchange with. All ranks must call the same in the same order."""

    def __init__(self, path: str, rank: int, size: int):
        """`path`: a file of `new_file`. Raises OSError if it is not on this machine."""
        import fcntl  # Windows has none, and no FOLDER

        file = os.open(path, os.O_RDWR)
        weakref.finalize(self, os.close, file)
        fcntl.lockf(file, fcntl.LOCK_EX, 1, rank)
        self._memory = mmap.mmap(file, bytes_of(size))
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.struct = Exchanges(address, rank, size, ROOM, file)

    def limit(self, seconds: float) -> None:
        """Wait so long for a rank from now on."""
        self.struct.limit = int(seconds * 1e9)

    def gather(self, x: Tensor, out: Tensor) -> None:
        """out [size, ...] = every rank's x; both are contiguous. Raises RankLost."""
        native().gather_ranks(ctypes.byref(self.struct), x.data_ptr(), x.nbytes, out.data_ptr())
        self.check()

    def check(self) -> None:
        """Raise RankLost if a rank ended or did not answer; what was received since is garbage."""
        if self.struct.lost:
            limit = self.struct.limit / 1e9
            raise RankLost(f"another process of this job ended, or did not answer within {limit:g} s")


def bytes_of(size: int) -> int:
    return size * (LINE + 2 * ROOM)


def new_file(size: int) -> str | None:
    """A file of memory for a communicator of so many ranks, which no other user may open; None if the system has no
    such files, or no room, and without the compiled library."""
    if not FOLDER.is_dir() or not available():
        return None
    file, path = tempfile.mkstemp(prefix="specker-", dir=FOLDER)
    try:
        os.posix_fallocate(file, 0, bytes_of(size))  # else a full file system ends the process when it writes
    except OSError:
        os.unlink(path)
        return None
    finally:
        os.close(file)
    return path


def opened(path: str | None, rank: int, size: int) -> Communicator | None:
    """This rank's end of the communicator; None without the compiled library, and if the file is not on this
    machine."""
    if path is None or not available():
        return None
    try:
        return Communicator(path, rank, size)
    except OSError:
        return None


def struct_of(communicator: Communicator | None) -> Any:
    """A pointer for a struct."""
    return None if communicator is None else ctypes.pointer(communicator.struct)
