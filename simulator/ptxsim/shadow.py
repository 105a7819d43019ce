"""Races in global memory: who read and wrote each two bytes in a launch.

Two CTAs of a launch may run in any order, unless atomics synchronise them (order.py), and so may two warps of a CTA
between barriers. So memory that one writes must not be read or written by the other, unless both write the same value
(reported as benign).

A tag names a warp in one epoch, the time between two barriers of its CTA: 64 * epoch + warp.
"""

import numpy as np

from ptxsim.instruction import Instruction
from ptxsim.memory import UNIT, Memory
from ptxsim.order import SEVERAL, Accesses, Order, acquires, releases
from ptxsim.report import Report
from ptxsim.threads import Threads
from ptxsim.values import I32, Array

GRAIN = 2  # bytes
SEVERAL_WARPS = 63


class Shadow:
    def __init__(self, memory: Memory, report: Report, mixed: Array | None, synchronises: bool):
        """`mixed`: the storages whose readers are tracked, too. A first pass goes without (None), since readers matter
        only where a launch reads and writes one storage. `synchronises`: the program acquires or releases."""
        self.memory, self.report, self._mixed = memory, report, mixed
        self.order = Order() if synchronises else None
        self._was_read, self._was_written = (np.zeros(len(memory.has_fresh), bool) for _ in "rw")  # of each storage
        grains = memory.size // GRAIN + 64
        self._write, self._read = (Accesses(*(np.zeros(grains, I32) for _ in range(4))) for _ in "wr")  # the last ones
        self._is_atomic = np.zeros(grains, bool)  # the last write was atomic
        self._reads: list[tuple[int, int, Array, Accesses]] = []  # all, if the program synchronises: see load
        self._atomics: dict[int, dict[int, Accesses]] = {}  # likewise: grain -> CTA -> its last since a plain store

    def mixed(self) -> Array:
        """The storages that the launch has read and written."""
        mixed = self._was_read & self._was_written
        mixed[0] = False  # nobody's
        return mixed

    def _who(self, m: Threads, lanes: Array, o: Array, width: int) -> tuple[Array, Accesses]:
        """The grains of the accesses, and who makes each."""
        grains = (o[:, None] + np.arange(0, width, min(width, GRAIN))) // GRAIN
        tag = (m.epoch[m.cta[lanes]] * 64 + m.warp[lanes]).astype(I32)
        stamp = np.full(len(lanes), self.order.stamp if self.order else 0, I32)
        who = Accesses(m.cta_id[lanes] + 1, tag, (lanes % m.threads).astype(I32), stamp)
        return grains.ravel(), Accesses(*(np.repeat(x, grains.shape[1]) for x in who))

    def load(self, m: Threads, i: Instruction, lanes: Array, o: Array, width: int) -> None:
        storages = self.memory.owner[o // UNIT]
        self._was_read[storages] = True
        if self._mixed is None:
            return
        tracked = self._mixed[storages]
        if not tracked.any():
            return
        g, now = self._who(m, lanes[tracked], o[tracked], width)
        other, near = self._against_writes(g, now)
        self.report.check(other, f"race: read of global memory that another CTA of the launch writes: {i}")
        self.report.check(near, f"race: read of global memory that another warp wrote since the last barrier: {i}")
        past = self._read.part(g)
        several = (past.cta != 0) & (past.cta != now.cta)
        _note(self._read, g, now)
        self._read.cta[g[several | (self._read.cta[g] != now.cta)]] = SEVERAL
        warps = _near(past, now) | (self._read.tag[g] != now.tag)
        self._read.tag[g[warps]] |= SEVERAL_WARPS
        if self.order:
            self._reads.append((int(g.min()), int(g.max()), g, now))

    def store(self, m: Threads, i: Instruction, lanes: Array, o: Array, width: int, changed: Array) -> None:
        """`changed`: whether each thread wrote something else than was there."""
        self._was_written[self.memory.owner[o // UNIT]] = True
        g, now = self._who(m, lanes, o, width)
        other, near = self._against_reads(g, now)
        self.report.check(other, f"race: write to global memory that another CTA of the launch reads: {i}")
        self.report.check(near, f"race: write to global memory that another warp read since the last barrier: {i}")
        other, near = self._against_writes(g, now)
        atomic = other & self._is_atomic[g]
        self.report.check(atomic, f"race: plain write to what is accessed atomically in the same launch: {i}")
        twice = other | near
        if (changed & twice.reshape(len(o), -1).any(1)).any():
            self.report.check(twice, f"race: global memory is written twice, with different values: {i}")
        elif twice.any():
            self.report.benign[f"global memory is written twice with the same value: {i}"] += int(twice.sum())
        _note(self._write, g, now)
        if (self._write.cta[g] != now.cta).any() or (self._write.tag[g] != now.tag).any():
            self.report.benign[f"warps or CTAs write the same value to global memory: {i}"] += 1
        atomics = g[self._is_atomic[g]]
        self._is_atomic[atomics] = False
        for grain in atomics.tolist():
            self._atomics.pop(grain, None)

    def atomic(self, m: Threads, i: Instruction, lanes: Array, o: Array, width: int) -> None:
        """An atomic, or a load that may run beside atomics: `tl.atomic_add` of 0 can become one."""
        self._was_written[self.memory.owner[o // UNIT]] = True
        if self.order is None:
            self._atomic(m, i, lanes, o, width)
            return
        for n, lane in enumerate(lanes.tolist()):  # one after another, as their values are computed
            cta = int(m.cta[lane])
            who = int(m.cta_id[lane]) + 1, int(m.epoch[cta]), lane % m.threads, int(o[n]) // GRAIN
            if acquires(i):
                self.order.acquire(*who)
            self._atomic(m, i, lanes[n : n + 1], o[n : n + 1], width)
            if releases(i):
                self.order.release(*who)

    def _atomic(self, m: Threads, i: Instruction, lanes: Array, o: Array, width: int) -> None:
        g, now = self._who(m, lanes, o, width)
        plain = np.logical_or(*self._against_reads(g, now))
        plain |= np.logical_or(*self._against_writes(g, now)) & ~self._is_atomic[g]
        self.report.check(plain, f"race: atomic on what is plainly accessed in the same launch: {i}")
        past = self._write.part(g)
        several = self._is_atomic[g] & (past.cta != now.cta)
        self._is_atomic[g] = True
        _note(self._write, g, now)
        if self.order:
            for n, grain in enumerate(g.tolist()):
                self._atomics.setdefault(grain, {})[int(now.cta[n])] = self._write.part(g[n : n + 1])
        else:
            self._write.cta[g[several | (self._write.cta[g] != now.cta)]] = SEVERAL

    def _against_writes(self, g: Array, now: Accesses) -> tuple[Array, Array]:
        """Whether the last write of each grain was by another CTA and did not happen before; was by another warp of
        this one since its last barrier."""
        other, near = self._against(self._write, g, now)
        if self.order:
            for n in np.flatnonzero(self._is_atomic[g]):  # many CTAs may have written: none is the last
                own, past = now.part([n]), self._atomics[int(g[n])].values()
                near[n] = any(_near(p, own)[0] for p in past)
                other[n] = not all(p.cta[0] == own.cta[0] or self.order.before(p, own)[0] for p in past)
        return other, near

    def _against_reads(self, g: Array, now: Accesses) -> tuple[Array, Array]:
        """Likewise, of the reads of each grain."""
        other, near = self._against(self._read, g, now)
        several = np.flatnonzero(other & (self._read.cta[g] == SEVERAL))
        if self.order and len(several):
            other[several] = self._unordered_reads(g[several], now.part(several))
        return other, near

    def _against(self, last: Accesses, g: Array, now: Accesses) -> tuple[Array, Array]:
        past = last.part(g)
        other = (past.cta != 0) & (past.cta != now.cta)
        if self.order and other.any():
            at = np.flatnonzero(other)
            other[at] = ~self.order.before(past.part(at), now.part(at))
        return other, _near(past, now)

    def _unordered_reads(self, g: Array, now: Accesses) -> Array:
        """Whether another CTA has read each of the grains and that did not happen before."""
        assert self.order is not None
        out, order = np.zeros(len(g), bool), np.argsort(g)
        low, high = int(g.min()), int(g.max())
        for first, last, grains, past in self._reads:
            if first > high or last < low:
                continue
            read = np.flatnonzero(np.isin(grains, g))
            mine = order[np.searchsorted(g, grains[read], sorter=order)]
            others = np.flatnonzero(past.cta[read] != now.cta[mine])
            read, mine = read[others], mine[others]
            out[mine[~self.order.before(past.part(read), now.part(mine))]] = True
        return out


def _near(past: Accesses, now: Accesses) -> Array:
    """Whether an access was by another warp of the same CTA in the same epoch."""
    return (past.cta == now.cta) & (past.tag // 64 == now.tag // 64) & (past.tag != now.tag)


def _note(last: Accesses, g: Array, now: Accesses) -> None:
    """Note the last access of grains. Of several threads of a CTA in one epoch, none is the last."""
    past = last.part(g)
    threads = (past.cta == now.cta) & (past.tag // 64 == now.tag // 64) & (past.thread != now.thread)
    for kept, new in zip(last, now, strict=True):
        kept[g] = new
    last.thread[g[threads | (last.thread[g] != now.thread)]] = SEVERAL
