"""Runs the threads of a stack of CTAs.

Of a divergent group the threads with the lowest program counter run first,
under a mask, so they meet the others again by themselves.
"""

from typing import Any

import numpy as np

from ptxsim.access import GlobalAccess
from ptxsim.copies import AsyncCopies
from ptxsim.dependent import Dependence
from ptxsim.memory import Memory
from ptxsim.program import Program
from ptxsim.report import Report, Traffic
from ptxsim.shadow import Shadow
from ptxsim.shared import SharedMemory
from ptxsim.threads import Threads
from ptxsim.values import I64, Array, Unsupported
from ptxsim.warpgroups import Warpgroups


class Machine(Threads):
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
        super().__init__(ctas, grid, program.threads, len(program.names.widths), parameters, report)
        self.program, self.limit = program, limit
        self.steps = np.zeros(len(ctas), I64)  # basic blocks that each CTA has executed
        self.dependence = Dependence(memory, report, len(self.cta), len(ctas)) if dependent else None
        self.memory = GlobalAccess(self, memory, report, traffic, shadow, self.dependence)
        self.shared = SharedMemory(self, shared, program.grain)
        self.copies = AsyncCopies(self)
        self.warpgroups = Warpgroups(self)

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
