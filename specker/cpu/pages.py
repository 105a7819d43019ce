"""Weights on huge pages.

A decoding step reads every weight, and the processor translates the address of every page. Linux maps files in pages of
4 KiB. In a virtual machine each translation has two steps, and a core then reads two thirds of what it could
(bench/LOG.md). So weights that are mapped from files are copied to anonymous memory with pages of 2 MiB, and weights in
anonymous memory get such pages in place. That takes as long as some ten to a hundred decoding steps, and a step is then
a sixth shorter. So it is done at once in a warm-up, otherwise in small parts between steps, once a process has decoded
for as long as moving all probably takes. Kernels may read either copy meanwhile, since both are equal. The process lets
go of the pages of files that were copied, which count as its memory; the system may keep them in its cache.
"""

import ctypes
import mmap
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

HUGE = 2 << 20  # bytes of a page
LINE = 64
ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MAPS = Path("/proc/self/maps")
DETAILS = Path("/proc/self/smaps")  # the same, with what each mapping holds
COLLAPSE = 25  # MADV_COLLAPSE, Linux 6.1
SECONDS = 5.0  # of decoding steps, before any weight moves without a warm-up
MOVING = 0.25  # of a step's time: what moving takes after it


class Place(NamedTuple):
    """Where a kernel reads weights."""

    address: int
    size: int  # bytes
    move: Callable[[Tensor], None]  # lets it read from a copy [size] uint8, and keep that


class HugePages:
    """Moves weights to huge pages, part by part."""

    def __init__(self, places: Sequence[Place] = (), most: int | None = None):
        """`most`: bytes that copies may take; None: any number. More are not made."""
        self._parts: Iterator[None] | None = None
        self._decoded = 0.0  # seconds
        if places and offered():
            self._parts = self._moves(places, most)

    @property
    def done(self) -> bool:
        return self._parts is None

    def after(self, seconds: float) -> None:
        """Called after a step that took so long."""
        self._decoded += seconds
        if self._decoded > SECONDS and self._parts is not None:
            self.some(MOVING * seconds)

    def some(self, seconds: float) -> None:
        """Move parts for so long, at least one unless all are moved."""
        end = time.perf_counter() + seconds
        while self._parts is not None:
            try:
                next(self._parts)
            except StopIteration:
                self._parts = None
            if time.perf_counter() >= end:
                return

    def all(self) -> None:
        """Move all that is left."""
        self.some(float("inf"))

    def _moves(self, places: Sequence[Place], most: int | None) -> Iterator[None]:
        mapped = mapped_files()
        copied = [place for place in places if mapped(place.address)]
        own = [place for place in places if not mapped(place.address)]
        if copied and (most is None or _room(copied) <= most):
            with suppress(OSError):  # no memory: the files stay
                memory, unwritten = allocated(_room(copied)), mapped_files(unwritten=True)
                at = 0
                for place in copied:
                    copy = memory[at : at + place.size]
                    for first in range(0, place.size, HUGE):
                        count = min(HUGE, place.size - first)
                        ctypes.memmove(copy.data_ptr() + first, place.address + first, count)
                        yield
                    place.move(copy)
                    at += _lines(place.size)
                    if unwritten(place.address):
                        _release(place)
        for place in own:
            first, end = -(-place.address // HUGE) * HUGE, (place.address + place.size) // HUGE * HUGE
            if first < end:
                advise(first, end - first, mmap.MADV_HUGEPAGE)
            for at in range(first, end, HUGE):
                advise(at, HUGE, COLLAPSE)
                yield


def offered() -> bool:
    """Whether Linux gives huge pages to memory for which they are asked."""
    try:
        return hasattr(mmap, "MADV_HUGEPAGE") and "[never]" not in ENABLED.read_text() and MAPS.is_file()
    except OSError:
        return False


def allocated(size: int) -> Tensor:
    """[size] uint8 in memory that begins with a huge page. Raises OSError."""
    memory = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the memory
    first = -whole.data_ptr() % HUGE
    return whole[first : first + size]


def advise(address: int, size: int, advice: int) -> None:
    """madvise, for which no answer matters."""
    call = ctypes.CDLL(None).madvise
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    call(address, size, advice)


def mapped_files(unwritten: bool = False) -> Callable[[int], bool]:
    """Tells of an address whether a file is mapped there. `unwritten`: and this process has written to no page of the
    mapping, so that it holds what the file does."""
    extents: list[tuple[int, int]] = []
    file = False
    for line in (DETAILS if unwritten else MAPS).read_text().splitlines():
        name, *words = line.split(maxsplit=5)
        if not name.endswith(":"):
            start, end = name.split("-")
            if file := words[3] != "0":
                extents.append((int(start, 16), int(end, 16)))
        elif file and name == "Anonymous:" and words[0] != "0":
            extents.pop()

    def mapped(address: int) -> bool:
        at = bisect_right(extents, address, key=lambda extent: extent[0]) - 1
        return at >= 0 and address < extents[at][1]

    return mapped


def _release(place: Place) -> None:
    """Let go of the whole pages of a place in a file. One who reads them gets the file's again."""
    first = -(-place.address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (place.address + place.size) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < end:
        advise(first, end - first, mmap.MADV_DONTNEED)


def _lines(size: int) -> int:
    """Rounded up to whole cache lines."""
    return -(-size // LINE) * LINE


def _room(places: Sequence[Place]) -> int:
    return sum(_lines(place.size) for place in places)
