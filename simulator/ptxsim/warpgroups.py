"""wgmma: products of matrices by a warpgroup (four warps) that run beside its other instructions.

Until a warpgroup waits for a product, its accumulators must not be touched and its operands in shared memory must not
be overwritten. wgmma reads shared memory through another path (proxy) than threads, so a fence must come between.
"""

import numpy as np

from ptxsim.instruction import SHARED_BASE, Instruction
from ptxsim.shared import SEVERAL
from ptxsim.threads import Threads
from ptxsim.values import I64, U16, U64, Array, Unsupported

SWIZZLES = {1: (128, 7), 2: (64, 3), 3: (32, 1)}  # a descriptor's mode -> bytes of a row, bits that are swizzled


class Warpgroups:
    def __init__(self, machine: Threads):
        self.machine, self.shared, self.report = machine, machine.shared, machine.report
        self.per_cta = machine.threads // 128
        count = machine.ctas * max(self.per_cta, 1)
        self.committed, self.done = np.zeros(count, I64), np.zeros(count, I64)  # groups of products
        self.used: dict[int, Array] = {}  # accumulator -> the group of its last product, of each warpgroup
        self.reading: list[tuple[int, int, Array]] = []  # warpgroup, group, grains of operands
        self.written: set[int] = set()  # accumulators that were written since the last wgmma.fence

    def _active(self) -> Array:
        mask = self.machine.mask
        return np.arange(len(self.done)) if mask is None else np.flatnonzero(mask.reshape(-1, 128).any(1))

    def fence(self) -> None:
        self.written.clear()

    def commit(self) -> None:
        self.committed[self._active()] += 1

    def wait(self, pending: int) -> None:
        """Complete the active warpgroups' groups but the last `pending`."""
        groups = self._active()
        self.done[groups] = np.maximum(self.done[groups], self.committed[groups] - pending)
        kept = []
        for group, number, grains in self.reading:
            if number < self.done[group]:
                self.shared.multiplying[grains] -= 1
                epoch = self.machine.epoch[group // self.per_cta]
                self.shared.reader[grains] = epoch * 64 + SEVERAL  # a barrier must come before they are overwritten
            else:
                kept.append((group, number, grains))
        self.reading = kept

    def touch(self, i: Instruction) -> None:
        """An instruction other than wgmma uses accumulators."""
        groups = self._active()
        for register in i.touched:
            used = self.used.get(register)
            if used is not None and (used[groups] >= self.done[groups]).any():
                self.report.problem(f"accumulator of a wgmma in flight is touched: {i}")
        if not i.op.startswith("mov"):  # ptxas allocates registers, and it places copies before the fence
            self.written |= i.touched

    def use(self, i: Instruction, registers: list[int], groups: Array) -> None:
        """A product of `groups` writes these accumulators."""
        if self.written & set(registers):
            self.report.problem(f"wgmma without wgmma.fence after its accumulators were written: {i}")
        for register in registers:
            used = self.used.setdefault(register, np.full(len(self.committed), -1, I64))
            used[groups] = self.committed[groups]

    def operand(self, i: Instruction, descriptors: Array, groups: Array, rows: int, transposed: bool) -> Array:
        """The bits [groups, rows, 16] of an operand in shared memory: K-major, or MN-major where `transposed`."""
        d = np.broadcast_to(descriptors, self.machine.shape).reshape(-1, 128)[groups]
        self.report.check(d != d[:, :1], f"a descriptor that differs within its warpgroup: {i}")
        offsets = _addresses(i, d[:, 0], rows, transposed) - SHARED_BASE
        shared, cta = self.shared, groups // self.per_cta
        outside = (offsets < 0) | (offsets + 2 > shared.size)
        if self.report.check(outside, f"wgmma reads outside shared memory: {i}"):
            offsets = np.clip(offsets, 0, shared.size - 2)
        at = offsets + (cta * shared.size)[:, None, None]
        g = at // shared.grain
        written, now = shared.writer[g], self.machine.epoch[cta][:, None, None]
        self.report.check(written == 0, f"wgmma reads shared memory that nobody wrote: {i}")
        self.report.check(shared.copying[g] > 0, f"wgmma reads shared memory while cp.async is in flight: {i}")
        # Four warps read together, so even what one of them wrote needs a barrier.
        race = written // 64 == now
        self.report.check(race, f"race: wgmma reads shared memory written since the last barrier: {i}")
        self.report.check(shared.by_threads[g], f"wgmma reads what threads wrote, without a proxy fence: {i}")
        for n, group in enumerate(groups):
            mine = np.unique(g[n])
            shared.multiplying[mine] += 1
            self.reading.append((int(group), int(self.committed[group]), mine))
        return shared.data.view(U16)[at // 2]


def _addresses(i: Instruction, d: Array, rows: int, transposed: bool) -> Array:
    """The address [groups, rows, 16] of each element that descriptors [groups] describe."""
    start, lead, stride = (
        (((d >> U64(bit)) & U64(0x3FFF)) << U64(4)).astype(I64)[:, None, None] for bit in (0, 16, 32)
    )
    mode = int(d[0] >> U64(62))
    if ((d >> U64(49)) & U64(7)).any() or (mode == 0 and transposed):
        raise Unsupported(f"matrix descriptor {int(d[0]):#x}: {i}")
    r, k = np.arange(rows)[None, :, None], np.arange(16)[None, None, :]
    if mode == 0:
        return start + (r // 8) * stride + (r % 8) * 16 + (k // 8) * lead + (k % 8) * 2
    row, swizzled = SWIZZLES[mode]
    if transposed:
        per = row // 2  # elements of a chunk along the rows
        address = start + (r // per) * lead + (r % per) * 2 + (k % 8) * row + (k // 8) * stride
    else:
        address = start + (r // 8) * stride + (r % 8) * row + k * 2
    return address ^ (((address >> 7) & swizzled) << 4)
