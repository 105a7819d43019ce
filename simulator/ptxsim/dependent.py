"""Programmatic dependent launch: a grid that may start before the grid before it has finished.

What the grid before writes, and what it may still read, is complete only after griddepcontrol.wait. Until a thread has
waited, it may load constants (`ops.CONSTANT`) and nothing else. Every CTA must wait, even if it has nothing to do:
otherwise this grid could end, and the next one start, before the grid before has finished.
griddepcontrol.launch_dependents has no effect on memory and may stand anywhere.
"""

import numpy as np

from ptxsim.instruction import Instruction
from ptxsim.memory import Memory
from ptxsim.report import Report
from ptxsim.values import Array


class Dependence:
    """The threads of one machine that have waited."""

    def __init__(self, memory: Memory, report: Report, threads: int, ctas: int):
        self.memory, self.report, self.ctas = memory, report, ctas
        self.waited = np.zeros(threads, bool)

    def wait(self, lanes: Array) -> None:
        self.waited[lanes] = True

    def check(self, i: Instruction, lanes: Array, o: Array, width: int, what: str) -> None:
        """Threads `lanes` access `width` bytes at `o`; `what`: read or write."""
        early = ~self.waited[lanes]
        if what == "read":
            early &= self.memory.varies[o] | self.memory.varies[o + width - 1]
        if early.any():
            where = self.memory.name(int(o[np.flatnonzero(early)[0]]))
            self.report.check(early, f"{what}s {where} before griddepcontrol.wait: {i}")

    def finish(self) -> None:
        """The CTAs have ended."""
        never = ~self.waited.reshape(self.ctas, -1).any(1)
        self.report.check(never, "a CTA ends without griddepcontrol.wait")
