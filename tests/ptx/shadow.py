"""Races in global memory: who read and wrote each two bytes in a launch.

Two CTAs of a launch may run in any order, and so may two warps of a CTA between barriers. So memory that one writes
must not be read or written by the other, unless both write the same value (reported as benign).

A tag names a warp in one epoch, the time between two barriers of its CTA: 64 * epoch + warp.
"""

from typing import TYPE_CHECKING

import numpy as np

from ptx.memory import UNIT, Memory
from ptx.report import Report
from ptx.values import Array

if TYPE_CHECKING:
    from ptx.instruction import Instruction
    from ptx.machine import Machine

GRAIN = 2  # bytes
SEVERAL_CTAS, SEVERAL_WARPS = -1, 63


class Shadow:
    def __init__(self, memory: Memory, report: Report, reads: bool):
        """With `reads`, also tracks who reads. A first pass goes without: it is needed only where a launch reads and
        writes one storage."""
        self.memory, self.report, self.reads = memory, report, reads
        self._read, self._written = (np.zeros(len(memory.has_fresh), bool) for _ in "rw")  # of each storage
        grains = memory.size // GRAIN + 64
        self.writer, self.write_tag, self.reader, self.read_tag = (np.zeros(grains, np.int32) for _ in range(4))
        self.is_atomic = np.zeros(grains, bool)  # writer and reader are CTA + 1, 0 for none

    def mixed(self) -> bool:
        """Whether the launch has read and written one storage."""
        return bool((self._read & self._written)[1:].any())

    def _who(self, m: "Machine", lanes: Array, o: Array, width: int) -> tuple[Array, Array, Array]:
        """The grains of the accesses, and the CTA and tag of each."""
        grains = (o[:, None] + np.arange(0, width, min(width, GRAIN))) // GRAIN
        tag = (m.epoch[m.cta[lanes]] * 64 + m.warp[lanes]).astype(np.int32)
        return grains.ravel(), *(np.repeat(x, grains.shape[1]) for x in (m.cta_id[lanes] + 1, tag))

    def load(self, m: "Machine", i: "Instruction", lanes: Array, o: Array, width: int) -> None:
        self._read[self.memory.owner[o // UNIT]] = True
        if not self.reads:
            return
        g, cta, tag = self._who(m, lanes, o, width)
        other, near = _others(self.writer[g], self.write_tag[g], cta, tag)
        self.report.check(other, f"race: read of global memory that another CTA of the launch writes: {i}")
        self.report.check(near, f"race: read of global memory that another warp wrote since the last barrier: {i}")
        several, warps = _others(self.reader[g], self.read_tag[g], cta, tag)
        self.reader[g], self.read_tag[g] = cta, tag
        self.reader[g[several | (self.reader[g] != cta)]] = SEVERAL_CTAS
        self.read_tag[g[warps | (self.read_tag[g] != tag)]] |= SEVERAL_WARPS

    def store(self, m: "Machine", i: "Instruction", lanes: Array, o: Array, width: int, changed: Array) -> None:
        """`changed`: whether each thread wrote something else than was there."""
        self._written[self.memory.owner[o // UNIT]] = True
        g, cta, tag = self._who(m, lanes, o, width)
        other, near = _others(self.reader[g], self.read_tag[g], cta, tag)
        self.report.check(other, f"race: write to global memory that another CTA of the launch reads: {i}")
        self.report.check(near, f"race: write to global memory that another warp read since the last barrier: {i}")
        mixed = self.is_atomic[g] & (self.writer[g] != cta)
        self.report.check(mixed, f"race: plain write to what is accessed atomically in the same launch: {i}")
        other, near = _others(self.writer[g], self.write_tag[g], cta, tag)
        twice = other | near
        if (changed & twice.reshape(len(o), -1).any(1)).any():
            self.report.check(twice, f"race: global memory is written twice, with different values: {i}")
        elif twice.any():
            self.report.benign[f"global memory is written twice with the same value: {i}"] += int(twice.sum())
        self.writer[g], self.write_tag[g] = cta, tag
        if (self.writer[g] != cta).any() or (self.write_tag[g] != tag).any():
            self.report.benign[f"warps or CTAs write the same value to global memory: {i}"] += 1

    def atomic(self, m: "Machine", i: "Instruction", lanes: Array, o: Array, width: int) -> None:
        self._written[self.memory.owner[o // UNIT]] = True
        g, cta, tag = self._who(m, lanes, o, width)
        plain = (self.writer[g] != 0) & ~self.is_atomic[g]
        plain |= (self.reader[g] != 0) & (self.reader[g] != cta)
        self.report.check(plain, f"race: atomic on what is plainly accessed in the same launch: {i}")
        self.is_atomic[g] = True
        self.writer[g], self.write_tag[g] = cta, tag


def _others(whose: Array, at: Array, cta: Array, tag: Array) -> tuple[Array, Array]:
    """Whether the last access was by another CTA; by another warp of this one in this epoch."""
    return (whose != 0) & (whose != cta), (whose == cta) & (at // 64 == tag // 64) & (at != tag)
