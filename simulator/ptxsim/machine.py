"""The threads of a stack of CTAs: registers, masks, and which threads run next.

A register is an array over all threads. Of a divergent group the threads with the lowest program counter run first,
under a mask, so they meet the others again by themselves.
"""

from typing import Any

import numpy as np

from ptxsim.copies import AsyncCopies
from ptxsim.dependent import Dependence
from ptxsim.memory import GlobalAccess, Memory
from ptxsim.program import Program
from ptxsim.report import Report, Traffic
from ptxsim.shadow import Shadow
from ptxsim.shared import SharedMemory
from ptxsim.values import I64, U32, Array, Unsupported
from ptxsim.warpgroups import Warpgroups


class Machine:
    def __init__(
        self,
        program: Program,
        ctas: list[tuple[int, int, int]],
        grid: tuple[int, int, int],
        parameters: dict[str, Any],
        memory: Memory,
        shared: int,  # bytes of a CTA
        report: Report,
        traffic: Traffic,
        shadow: Shadow | None,
        dependent: bool,  # the grid may start before the one before has finished
        limit: int,  # basic blocks that a CTA may execute
    ):
        T, C = program.threads, len(ctas)
        N = T * C
        self.program, self.parameters, self.report = program, parameters, report
        self.shape, self.threads, self.ctas, self.warps = (N,), T, C, N // 32
        self.registers: list[Any] = [None] * len(program.widths)
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
        self.limit, self.steps = limit, np.zeros(C, I64)  # basic blocks that each CTA has executed
        self.dependence = Dependence(memory, report, N, C) if dependent else None
        self.memory = GlobalAccess(self, memory, report, traffic, shadow, self.dependence)
        self.shared = SharedMemory(self, shared, C)
        self.copies = AsyncCopies(self)
        self.warpgroups = Warpgroups(self)

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

    def run(self) -> bool:
        """Whether all threads have ended; not so if a CTA reaches the limit."""
        with np.errstate(all="ignore"):
            while True:
                if self.waiting.any():
                    self._pass_barriers()
                active = self.alive & ~self.waiting
                if not active.any():
                    break
                number = int(self.pc[active].min())  # the first block that threads wait for
                self._run_block(number, active & (self.pc == number))
                if self.steps.max() > self.limit:
                    at = self.program.blocks[number][0]
                    self.report.problem(f"a CTA has not ended after {self.limit} basic blocks, {at}")
                    return False
        if self.copies.in_flight:
            self.report.benign["cp.async in flight when the program ends"] += 1
        if self.dependence:
            self.dependence.finish()
        return True

    def _run_block(self, number: int, mask: Array) -> None:
        """Run a block with the threads of the mask."""
        full = bool(mask.all())
        self.mask = None if full else mask
        self.write_mask = None if full or bool((mask == self.alive).all()) else mask
        self.target = np.full(self.shape, number + 1, np.int32)
        block = self.program.blocks[number]
        self.steps[slice(None) if full else mask.reshape(self.ctas, -1).any(1)] += 1
        warps = self.warps if full else int(mask.reshape(-1, 32).any(1).sum())
        self.report.executed += int(mask.sum()) * len(block)
        for i in block:
            self.report.classes[i.kind] += warps
            if i.touched and not i.op.startswith("wgmma"):
                self.warpgroups.touch(i)
            try:
                i.run(self)
            except Unsupported:
                raise
            except Exception as error:
                raise RuntimeError(f"{type(error).__name__}: {error} at {i}") from error
        self.pc[mask] = self.target[mask]

    def _pass_barriers(self) -> None:
        """CTAs all of whose threads wait, or have ended, go on."""
        waiting, alive = (x.reshape(self.ctas, -1) for x in (self.waiting, self.alive))
        passing = (waiting | ~alive).all(1) & waiting.any(1)
        at = self.pc.reshape(self.ctas, -1)
        for c in np.flatnonzero(passing):
            if len(np.unique(at[c][waiting[c]])) > 1:
                self.report.problem("threads of a CTA wait at different barriers")
            if not waiting[c].all():
                self.report.benign["a barrier that exited threads do not reach"] += 1
        self.report.barriers += int(passing.sum())
        self.epoch[passing] += 1
        waiting[passing] = False
