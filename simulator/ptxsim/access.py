"""Accesses of threads to global memory: bounds, alignment, what nobody wrote, and traffic."""

from typing import Any

import numpy as np

from ptxsim.dependent import Dependence
from ptxsim.instruction import Instruction
from ptxsim.memory import BASE, UNIT, Memory
from ptxsim.report import LINE, Report, Traffic
from ptxsim.shadow import Shadow
from ptxsim.threads import Threads
from ptxsim.values import I64, U8, U64, Array


class GlobalAccess:
    """The global memory as the threads of one machine see it."""

    def __init__(
        self,
        machine: Threads,
        memory: Memory,
        report: Report,
        traffic: Traffic,
        shadow: Shadow | None,
        dependence: Dependence | None,
    ):
        self.machine, self.memory, self.report, self.traffic = machine, memory, report, traffic
        self.shadow, self.dependence = shadow, dependence

    def view(self, kind: Any) -> Array:
        return self.memory.view(kind)

    def load(self, i: Instruction, addresses: Array, width: int) -> Array:
        """Check a read by the active threads -> offset of each thread, 0 where it must not read."""
        offsets, lanes = self._checked(i, addresses, width, "read")
        if len(lanes):
            self._check_written(i, offsets[lanes], width, "")
            if self.shadow:
                track = self.shadow.atomic if i.strong else self.shadow.load
                track(self.machine, i, lanes, offsets[lanes], width)
        return offsets

    def prefetch(self, i: "Instruction", addresses: Array) -> None:
        """Check a prefetch by the active threads: within an argument, and before the wait only of constants."""
        lanes, memory = self.machine.lanes(), self.memory
        o = (addresses - U64(BASE)).astype(I64)[lanes]
        bad = (o < 0) | (o >= memory.size)
        bad |= ~memory.allowed[np.where(bad, 0, o)]
        self.report.check(bad, f"prefetch out of bounds: {i}")
        self.traffic.prefetched[o[~bad] // LINE] = True
        if self.dependence and not bad.all():
            self.dependence.check(i, lanes[~bad], o[~bad], 1, "read")

    def atomic(self, i: Instruction, addresses: Array, width: int) -> Array:
        """Check an atomic access -> offsets as `load`."""
        offsets, lanes = self._checked(i, addresses, width, "write")
        if len(lanes):
            self._check_written(i, offsets[lanes], width, "(atomic) ")
            self._check_write(i, offsets[lanes][:, None] + np.arange(width))
            if self.shadow:
                self.shadow.atomic(self.machine, i, lanes, offsets[lanes], width)
        return offsets

    def store(self, i: Instruction, addresses: Array, values: Array) -> None:
        """Store `values` [active threads, n]."""
        width = values.shape[1] * values.itemsize
        offsets, live = self._checked(i, addresses, width, "write")
        if not len(live):
            return
        o, mine = offsets[live], np.ascontiguousarray(values[offsets[self.machine.lanes()] > 0])
        places = o[:, None] + np.arange(width)
        before = self.memory.data[places]
        view, at = self.memory.view(values.dtype), o // values.itemsize
        for n in range(values.shape[1]):
            view[at + n] = mine[:, n]
        self.memory.written[places] = True
        self._check_write(i, places)
        if self.shadow:
            new = mine.view(U8).reshape(len(o), width)
            after = self.memory.data[places]
            self.report.check(
                (after != new).any(1), f"race: lanes write different values to one place of global memory: {i}"
            )
            self.shadow.store(self.machine, i, live, o, width, (before != new).any(1))

    def _checked(self, i: Instruction, addresses: Array, width: int, what: str) -> tuple[Array, Array]:
        """Check bounds and alignment, and count -> offset of each thread, 0 where it is wrong; threads where right."""
        m, memory = self.machine, self.memory
        lanes = m.lanes()
        o = (addresses - U64(BASE)).astype(I64)[lanes]
        bad = (o < 0) | (o + width > memory.size)
        inside = np.where(bad, 0, o)
        bad |= ~(memory.allowed[inside] & memory.allowed[inside + width - 1])
        if bad.any():
            where = memory.name(int(o[np.flatnonzero(bad)[0]]))
            self.report.check(bad, f"global {what} of {width} bytes out of bounds at {where}: {i}")
        crooked = (o % width != 0) & ~bad
        self.report.check(crooked, f"misaligned global access: {i}")
        good = ~(bad | crooked)
        offsets = np.zeros(m.shape, I64)
        offsets[lanes] = np.where(good, o, 0)
        live = lanes[good]
        self.traffic.count(i, m.warp_of_all[live], o[good], width, what == "write")
        if self.dependence and len(live):
            self.dependence.check(i, live, o[good], width, what)
        return offsets, live

    def _check_write(self, i: Instruction, places: Array) -> None:
        """The active threads write these bytes [threads, width]."""
        self.memory.produced[places] = True
        constant = ~self.memory.varies[places].any(1)
        self.report.check(constant, f"write to an argument that is declared constant: {i}")

    def _check_written(self, i: Instruction, o: Array, width: int, how: str) -> None:
        memory = self.memory
        if memory.has_fresh[memory.owner[o // UNIT]].any():
            places = (o[:, None] + np.arange(width)).ravel()
            dry = ~memory.written[places]
            if dry.any():
                where = memory.name(int(places[np.flatnonzero(dry)[0]]))
                self.report.check(dry, f"read of {how}global memory that nobody wrote, {where}: {i}")
