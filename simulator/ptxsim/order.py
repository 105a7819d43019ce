"""Which accesses by other CTAs happened before: synchronisation through atomics in global memory.

A release at an address publishes what its thread did before, what the threads of its CTA did before their last barrier,
and what that CTA knew of others. An acquire at the address makes this known to its thread at once, and to its CTA after
the next barrier. Atomics of other threads in between continue the chain. A plain store would end it, but it races with
the atomics unless it is ordered, and then nothing is lost. The order in which CTAs happen to run here, and relaxed
atomics, order nothing.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ptxsim.instruction import Instruction
from ptxsim.values import I64, Array

SEVERAL = -1  # CTAs or threads


def acquires(i: Instruction) -> bool:
    """Whether an atomic, or a load, is an acquire that reaches other CTAs."""
    return _reaches(i) and i.part("acquire|acq_rel") is not None


def releases(i: Instruction) -> bool:
    return _reaches(i) and i.part("release|acq_rel") is not None


def _reaches(i: Instruction) -> bool:
    return i.parts[0] in ("atom", "red", "ld") and i.part("cta|cluster") is None


class Accesses(NamedTuple):
    """Accesses to memory: arrays with one element each."""

    cta: Array  # its number in the grid + 1; 0: nobody; SEVERAL
    tag: Array  # 64 * epoch + warp: see shadow.py
    thread: Array  # of the CTA, or SEVERAL
    stamp: Array  # releases in the launch before it

    def part(self, chosen: Array) -> "Accesses":
        return Accesses(*(x[chosen] for x in self))


@dataclass
class _Known:
    """What is known of one CTA's accesses: all before an epoch, and those of some threads up to a stamp."""

    epoch: int = 0
    threads: dict[int, int] = field(default_factory=dict)  # thread -> stamp

    def covers(self, past: Accesses) -> Array:
        out = past.tag // 64 < self.epoch
        for thread, stamp in self.threads.items():
            out |= (past.thread == thread) & (past.stamp <= stamp)
        return out


Clock = dict[int, _Known]  # by CTA + 1


def _join(into: Clock, other: Clock) -> Clock:
    for cta, known in other.items():
        mine = into.setdefault(cta, _Known())
        mine.epoch = max(mine.epoch, known.epoch)
        for thread, stamp in known.threads.items():
            mine.threads[thread] = max(stamp, mine.threads.get(thread, 0))
    return into


class Order:
    """The synchronisation of one launch. CTAs are numbered from 1 on, addresses are grains."""

    def __init__(self) -> None:
        self.stamp = 0  # releases so far
        self._published: dict[int, Clock] = {}  # by address
        self._known: dict[int, Clock] = {}  # by CTA: what all its threads know
        self._acquired: dict[int, list[tuple[int, int, Clock]]] = {}  # by CTA: epoch, thread, what only it knows yet

    def acquire(self, cta: int, epoch: int, thread: int, address: int) -> None:
        if clock := self._published.get(address):
            self._acquired.setdefault(cta, []).append((epoch, thread, _join({}, clock)))

    def release(self, cta: int, epoch: int, thread: int, address: int) -> None:
        clock = self._published.setdefault(address, {})
        _join(clock, self._of_cta(cta, epoch))
        for _, who, acquired in self._acquired.get(cta, []):
            if who == thread:
                _join(clock, acquired)
        _join(clock, {cta: _Known(epoch, {thread: self.stamp})})
        self.stamp += 1

    def _of_cta(self, cta: int, epoch: int) -> Clock:
        """What all threads of a CTA know in this epoch."""
        clock, fresh = self._known.setdefault(cta, {}), []
        for entry in self._acquired.get(cta, []):
            if entry[0] < epoch:
                _join(clock, entry[2])
            else:
                fresh.append(entry)
        self._acquired[cta] = fresh
        return clock

    def before(self, past: Accesses, now: Accesses) -> Array:
        """Whether each past access happened before the one now, which is by another CTA."""
        out = np.zeros(len(past.cta), bool)
        pairs = (now.cta.astype(I64) << 32) + past.cta
        for pair in np.unique(pairs):
            at = np.flatnonzero(pairs == pair)
            cta, of = int(now.cta[at[0]]), int(past.cta[at[0]])
            if known := self._of_cta(cta, int(now.tag[at[0]]) // 64).get(of):
                out[at] = known.covers(past.part(at))
            for _, thread, clock in self._acquired[cta]:
                mine = at[now.thread[at] == thread]
                if len(mine) and of in clock:
                    out[mine] |= clock[of].covers(past.part(mine))
        return out
