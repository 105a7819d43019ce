"""The threads of a stack of CTAs: their registers, which of them are active, and where each goes next.

A register is an array over all threads. `machine.py` runs the threads; instructions, and what keeps account of memory,
read and change them.
"""

from typing import Any

import numpy as np

from ptxsim.report import Report
from ptxsim.values import I64, U32, Array


class Threads:
    memory: Any  # access.GlobalAccess
    shared: Any  # shared.SharedMemory
    copies: Any  # copies.AsyncCopies
    warpgroups: Any  # warpgroups.Warpgroups
    dependence: Any  # dependent.Dependence, or None

    def __init__(
        self,
        ctas: list[tuple[int, int, int]],
        grid: tuple[int, int, int],
        threads: int,  # of a CTA
        registers: int,
        parameters: dict[str, Any],
        report: Report,
    ):
        T, C = threads, len(ctas)
        N = T * C
        self.parameters, self.report = parameters, report
        self.shape, self.threads, self.ctas, self.warps = (N,), T, C, N // 32
        self.registers: list[Any] = [None] * registers
        thread = np.tile(np.arange(T, dtype=U32), C)
        self.special = {"%tid.x": thread, "%laneid": thread % U32(32), "%ntid.x": U32(T)}
        for n, d in enumerate("xyz"):
            self.special[f"%ctaid.{d}"] = np.repeat(np.array([cta[n] for cta in ctas], U32), T)
            self.special[f"%nctaid.{d}"] = U32(grid[n])
        self.cta = np.repeat(np.arange(C), T)
        self.cta_id = np.repeat(np.array([(z * grid[1] + y) * grid[0] + x for x, y, z in ctas], np.int32), T)
        self.warp_of_all = np.arange(N) // 32
        self.warp = (np.arange(N) % T) // 32  # in its CTA
        self.mask: Array | None = None  # the active threads; None: all
        self.write_mask: Array | None = None  # whose registers are written; None: all, or all that have not ended
        self._lanes: tuple[Array | None, Array] = None, np.arange(N)
        self._everyone = self._lanes[1]
        self.pc = np.zeros(N, np.int32)  # the block that each thread runs next
        self.target = self.pc
        self.alive, self.waiting = np.ones(N, bool), np.zeros(N, bool)
        self.epoch = np.ones(C, I64)  # barriers that each CTA has passed, from 1 on

    def lanes(self) -> Array:
        """The numbers of the active threads."""
        if self.mask is None:
            return self._everyone
        if self._lanes[0] is not self.mask:
            self._lanes = self.mask, np.flatnonzero(self.mask)
        return self._lanes[1]

    def jump(self, block: int, taken: Array | None) -> None:
        """The active threads continue at `block`; with `taken`, only those where it holds."""
        if taken is None:
            self.target[self.lanes()] = block
        else:
            self.target[taken if self.mask is None else taken & self.mask] = block

    def leave(self) -> None:
        self.alive[self.lanes()] = False

    def arrive(self) -> None:
        """The active threads wait at a barrier of their CTA."""
        self.waiting[self.lanes()] = True
