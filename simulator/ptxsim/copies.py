"""cp.async: copies from global to shared memory. Their bytes arrive when their thread waits for their group, and not
before, the latest that the hardware allows."""

from dataclasses import dataclass

import numpy as np

from ptxsim.instruction import Instruction
from ptxsim.threads import Threads
from ptxsim.values import U32, U64, Array, Unsupported

WORDS = {4: U32, 8: U64, 16: U64}  # bytes of a copy -> the type that it moves


@dataclass
class Copy:
    """What one instruction copies for n threads."""

    lanes: Array  # [n]
    offsets: Array  # [n], into shared memory
    data: Array  # [n, words]
    group: Array  # [n]: the thread's groups that were committed before
    grains: Array  # [n, grains]

    def part(self, chosen: Array) -> "Copy":
        return Copy(*(x[chosen] for x in (self.lanes, self.offsets, self.data, self.group, self.grains)))


class AsyncCopies:
    def __init__(self, machine: Threads):
        self.machine, self.shared, self.report = machine, machine.shared, machine.report
        self.committed = np.zeros(machine.shape, np.int32)  # groups of each thread
        self.in_flight: list[Copy] = []

    def copy(self, i: Instruction, target: Array, source: Array, width: int, given: Array) -> None:
        """Copy `width` bytes per active thread, or write zeros where `given` [threads] is 0."""
        m, shared = self.machine, self.shared
        lanes = m.lanes()
        if ((given[lanes] != 0) & (given[lanes] != width)).any():
            raise Unsupported(f"part of a copy: {i}")
        word = WORDS[width]
        data = np.zeros((m.shape[0], width // np.dtype(word).itemsize), word)
        mask = m.mask
        reads = given == width if mask is None else (given == width) & mask
        if reads.any():
            m.mask = reads
            at = m.memory.load(i, source, width)[reads] // np.dtype(word).itemsize
            data[reads] = m.memory.view(word)[at[:, None] + np.arange(data.shape[1])]
            m.mask = mask
        live, at, _ = shared.offsets(i, target, width, lanes)
        grains = shared.grains(at, width)
        twice = shared.check_write(i, grains, shared.tags(live), "cp.async")
        self.report.check(twice, f"race: cp.async to what another warp wrote since the last barrier: {i}")
        shared.copying[grains] += 1
        self.in_flight.append(Copy(live, at, data[live], self.committed[live], grains))

    def commit(self) -> None:
        self.committed[self.machine.lanes()] += 1

    def wait(self, pending: int) -> None:
        """Complete the active threads' groups but the last `pending`."""
        m, shared = self.machine, self.shared
        kept = []
        for copy in self.in_flight:
            done = copy.group < self.committed[copy.lanes] - pending
            if m.mask is not None:
                done &= m.mask[copy.lanes]
            if done.any():
                now = copy.part(done)
                view, places = shared.data.view(now.data.dtype), now.offsets // now.data.itemsize
                view[places[:, None] + np.arange(now.data.shape[1])] = now.data
                shared.copying[now.grains] -= 1
                shared.note_written(now.grains, shared.tags(now.lanes))
                copy = copy.part(~done)
            if len(copy.lanes):
                kept.append(copy)
        self.in_flight = kept
