"""The shared memory of a machine's CTAs, and its races.

Each grain (`Program.grain` bytes) has the tags of its last writer and reader. A tag names a warp in one epoch, the time
between two barriers of its CTA: 64 * epoch + warp + 1, or + 63 for several warps; 0 is nobody. Two warps may run in any
order between barriers, so what one writes there the other must neither read nor write, unless it writes the same value
or both write atomically.
"""

import numpy as np

from ptxsim.instruction import SHARED_BASE, Instruction
from ptxsim.report import count_shared
from ptxsim.threads import Threads
from ptxsim.values import I64, U8, Array

SEVERAL = 63


class SharedMemory:
    def __init__(self, machine: Threads, size: int, grain: int):
        self.machine, self.report = machine, machine.report
        self.grain = grain
        self.size = -(-max(size, 16) // 16) * 16  # bytes of a CTA
        self.data = np.full(machine.ctas * self.size, 0xA5, U8)
        grains = machine.ctas * self.size // self.grain
        self.writer, self.reader = np.zeros(grains, I64), np.zeros(grains, I64)  # tags
        self.copying = np.zeros(grains, np.int16)  # copies in flight that write it
        self.multiplying = np.zeros(grains, np.int16)  # wgmmas in flight that read it
        self.by_threads = np.zeros(grains, bool)  # written by threads since the CTA's last proxy fence
        self.by_atomics = np.zeros(grains, bool)  # the writes of its last writer's epoch were all atomic

    def grains(self, offsets: Array, width: int) -> Array:
        """The grains of each access, [n, width / grain]."""
        return (offsets[:, None] + np.arange(0, width, self.grain)) // self.grain

    def tags(self, lanes: Array) -> Array:
        m = self.machine
        return (m.epoch[m.cta[lanes]] * 64 + m.warp[lanes] + 1)[:, None]

    def offsets(self, i: Instruction, addresses: Array, width: int, lanes: Array) -> tuple[Array, Array, Array]:
        """Check bounds and alignment, and count -> the threads whose access is right, their offsets into `data`, and
        which of `lanes` they are."""
        o = addresses[lanes].astype(I64) - SHARED_BASE
        bad = (o < 0) | (o + width > self.size)
        crooked = (o % width != 0) & ~bad
        self.report.check(bad, f"shared access out of bounds: {i}")
        self.report.check(crooked, f"misaligned shared access: {i}")
        right = ~(bad | crooked)
        m, live = self.machine, lanes[right]
        cta = m.cta[live]
        warps = len(np.unique(m.warp_of_all[live])) if m.mask is not None else m.warps
        first = cta == cta[:1]
        count_shared(self.report, i, warps, live[first] % 32, m.warp[live[first]], o[right][first], width)
        return live, o[right] + cta * self.size, right

    def load(self, i: Instruction, addresses: Array, width: int, lanes: Array) -> Array:
        """Check a read by `lanes` -> the offset of each thread, 0 where it must not read."""
        live, at, _ = self.offsets(i, addresses, width, lanes)
        offsets = np.zeros(self.machine.shape, I64)
        offsets[live] = at
        g, tag = self.grains(at, width), self.tags(live)
        written, copying = self.writer[g], self.copying[g] > 0
        self.report.check((written == 0) & ~copying, f"read of shared memory that nobody wrote: {i}")
        self.report.check(copying, f"read of shared memory while cp.async is in flight: {i}")
        race = (written // 64 == tag // 64) & (written != tag)
        self.report.check(race, f"race: read of shared memory that another warp wrote since the last barrier: {i}")
        self._note(self.reader, g, tag)
        return offsets

    def atomic(self, i: Instruction, addresses: Array, width: int, lanes: Array) -> Array:
        """Check an atomic access by `lanes` -> offsets as `load`."""
        live, at, _ = self.offsets(i, addresses, width, lanes)
        offsets = np.zeros(self.machine.shape, I64)
        offsets[live] = at
        g, tag = self.grains(at, width), self.tags(live)
        self.report.check(self.writer[g] == 0, f"atomic on shared memory that nobody wrote: {i}")
        race = self.check_write(i, g, tag, "atomic") & ~self.by_atomics[g]
        self.report.check(race, f"race: atomic on shared memory that another warp wrote since the last barrier: {i}")
        atomic = (self.writer[g] // 64 != tag // 64) | self.by_atomics[g]
        self._note(self.writer, g, tag)
        self.by_threads[g], self.by_atomics[g] = True, atomic
        return offsets

    def _note(self, last: Array, grains: Array, tag: Array) -> None:
        """Note readers or atomic writers, of which several warps may share an epoch."""
        g, t = grains.ravel(), np.broadcast_to(tag, grains.shape).ravel()
        old = last[g]
        several = (old // 64 == t // 64) & (old != t)
        last[g] = t
        several |= last[g] != t
        last[g[several]] = t[several] | SEVERAL

    def check_write(self, i: Instruction, g: Array, tag: Array, what: str) -> Array:
        """Check a write of grains before it happens -> which of them another warp wrote in this epoch."""
        read, written = self.reader[g], self.writer[g]
        race = (read // 64 == tag // 64) & (read != tag)
        self.report.check(race, f"race: {what} to shared memory that another warp read since the last barrier: {i}")
        self.report.check(self.multiplying[g] > 0, f"{what} to shared memory that a wgmma in flight reads: {i}")
        self.report.check(self.copying[g] > 0, f"{what} to shared memory while cp.async is in flight: {i}")
        return (written // 64 == tag // 64) & (written != tag)

    def store(self, i: Instruction, addresses: Array, values: Array, lanes: Array) -> None:
        """Store `values` [lanes, n] of the threads `lanes`."""
        width = values.shape[1] * values.itemsize
        live, at, right = self.offsets(i, addresses, width, lanes)
        values, g, tag = values[right], self.grains(at, width), self.tags(live)
        twice = self.check_write(i, g, tag, "write").any(1)
        view, places = self.data.view(values.dtype), (at // values.itemsize)[:, None] + np.arange(values.shape[1])
        changed = (view[places] != values).any(1)
        view[places] = values
        lost = view[places] != values
        self.report.check(lost, f"race: lanes write different values to one place of shared memory: {i}")
        different = (changed | self.by_atomics[g].any(1)) & twice
        text = "write to shared memory that another warp wrote since the last barrier"
        same = f"two warps write the same value to shared memory: {i}"
        if not self.report.check(different, f"race: {text}: {i}") and twice.any():
            self.report.benign[same] += int(twice.sum())
        self.note_written(g, tag)
        if (self.writer[g] != tag).any():
            self.report.benign[same] += 1

    def note_written(self, grains: Array, tag: Array) -> None:
        self.writer[grains] = np.broadcast_to(tag, grains.shape)
        self.by_threads[grains], self.by_atomics[grains] = True, False

    def proxy_fence(self) -> None:
        """What the active threads' CTAs have written is visible to wgmma from now on."""
        per = self.size // self.grain
        for c in np.unique(self.machine.cta[self.machine.lanes()]):
            self.by_threads[c * per : (c + 1) * per] = False
