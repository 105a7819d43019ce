"""Global memory: the storages of torch tensors at made-up addresses, and which bytes a launch may touch.

A launch may touch the bytes that its arguments' views span. `Memory.fresh` marks a tensor that nobody has written yet;
reading its bytes before a kernel writes them is a problem. So is writing an argument that is declared constant.
"""

import ctypes
from typing import Any

import numpy as np
from torch import Tensor

from ptxsim.values import U8, Array

BASE = 0x7F00_0000_0000
UNIT = 512  # storages begin at multiples, with a gap between them that belongs to nobody


class Memory:
    def __init__(self) -> None:
        self.size = 0
        self.data = np.zeros(0, U8)
        self.written, self.allowed = np.zeros(0, bool), np.zeros(0, bool)
        self.varies = np.zeros(0, bool)  # of an argument of this launch that is not constant
        self.produced = np.zeros(0, bool)  # some launch wrote it
        self.owner = np.zeros(0, np.int16)  # the storage of each UNIT, from 1 on; 0 is nobody
        self.has_fresh = np.zeros(1, bool)  # of each storage: some of it was unwritten when it was mapped
        self._storages: dict[int, tuple[Tensor, int, int]] = {}  # address -> a tensor kept alive, offset, bytes
        self._grow(8 * UNIT)

    def _grow(self, size: int) -> None:
        if size > len(self.data):
            room = -(-max(size, 2 * len(self.data)) // UNIT) * UNIT
            self.data, self.written = _extended(self.data, room, 0), _extended(self.written, room, True)
            self.allowed, self.varies, self.produced = (
                _extended(old, room, False) for old in (self.allowed, self.varies, self.produced)
            )
            self.owner = _extended(self.owner, room // UNIT + 1, 0)
        self.size = size

    def _storage(self, tensor: Tensor) -> tuple[int, int]:
        """Offset and bytes of a tensor's storage."""
        storage = tensor.untyped_storage()
        key, n = storage.data_ptr(), storage.nbytes()
        if key not in self._storages:
            offset = -(-self.size // UNIT) * UNIT + UNIT
            self._grow(offset + n + UNIT)
            self._storages[key] = tensor, offset, n
            self.owner[offset // UNIT : -(-(offset + n) // UNIT)] = len(self._storages)
            self.has_fresh = np.append(self.has_fresh, False)
        return self._storages[key][1:]

    def fresh(self, tensor: Tensor) -> None:
        """The tensor's storage has not been written yet."""
        if tensor.untyped_storage().nbytes():
            offset, n = self._storage(tensor)
            self.written[offset : offset + n] = False
            self.has_fresh[self.owner[offset // UNIT]] = True

    def begin(self) -> None:
        """The next launch may touch nothing yet."""
        self.allowed[:] = self.varies[:] = False

    def map(self, tensor: Tensor, constant: bool = False) -> int:
        """The address of a launch's argument, whose bytes are copied as they are now."""
        if tensor.numel() == 0:
            return BASE + 16  # nobody's
        offset, n = self._storage(tensor)
        self.data[offset : offset + n] = _bytes(tensor)
        span = self._span(tensor)
        self.allowed[span] = True
        if not constant:
            self.varies[span] = True
        return BASE + span.start

    def _span(self, tensor: Tensor) -> slice:
        """From the first to the last byte of a tensor that has elements."""
        start = self._storage(tensor)[0] + tensor.storage_offset() * tensor.element_size()
        last = sum((s - 1) * abs(d) for s, d in zip(tensor.shape, tensor.stride(), strict=True))
        return slice(start, start + (last + 1) * tensor.element_size())

    def was_produced(self, tensor: Tensor) -> bool:
        """Whether a launch wrote some of the bytes of a constant argument. Those of other arguments do not count: a
        launcher may pass any tensor for one that is not read."""
        if tensor.numel() == 0:
            return False
        span = self._span(tensor)
        return bool((self.produced[span] & ~self.varies[span]).any())

    def end(self, tensors: list[Tensor]) -> None:
        """Copy the bytes back after a launch."""
        for key in {t.untyped_storage().data_ptr() for t in tensors if t.numel()}:
            tensor, offset, n = self._storages[key]
            _bytes(tensor)[:] = self.data[offset : offset + n]

    def save(self) -> tuple[Array, Array]:
        return self.data[: self.size].copy(), self.written[: self.size].copy()

    def restore(self, saved: tuple[Array, Array]) -> None:
        self.data[: self.size], self.written[: self.size] = saved

    def name(self, offset: int) -> str:
        for tensor, start, n in self._storages.values():
            if start - UNIT <= offset < start + n + UNIT:
                return f"storage of {tuple(tensor.shape)} {tensor.dtype} byte {offset - start} of {n}"
        return f"offset {offset:#x} (nobody's)"

    def view(self, kind: Any) -> Array:
        return self.data.view(kind)


def _extended(old: Array, size: int, value: Any) -> Array:
    new = np.full(size, value, old.dtype)
    new[: len(old)] = old
    return new


def _bytes(tensor: Tensor) -> Array:
    storage = tensor.untyped_storage()
    return np.ctypeslib.as_array((ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr()))
