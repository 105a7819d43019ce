"""Execute the PTX that Triton compiles, in numpy, without a GPU.

Triton's interpreter runs the Python of a kernel. This package runs the PTX that ptxas would receive: `mma.sync` and
`wgmma`, `cp.async` whose data arrive at the wait, `ldmatrix`, shuffles, barriers, bfloat16 and float16 as they are. It
reports accesses out of bounds, reads of memory that nobody wrote, races between warps and between blocks (CTAs), and
missing waits and fences. It also counts instructions, 32-byte sectors and bank conflicts.

    driver.py         simulate, simulated: makes Triton launch here; launch.py: one launch
    cases.py          a case: what to launch, and how to judge its results
    program.py        PTX text -> a Program of Instructions; instruction.py: an instruction's operands
    arithmetic.py     what each instruction does: numbers; bits.py; moves.py: copies, comparisons, conversions;
    control.py          branches, barriers, shuffles; transfer.py: loads and stores; matrix.py: mma, wgmma
    machine.py        threads, registers and masks: which threads run next
    memory.py         global memory: bounds and unwritten bytes; shadow.py: its races; order.py: acquire and release
    dependent.py      griddepcontrol: what may happen before the grid before has finished
    shared.py         shared memory and its races; copies.py: cp.async; warpgroups.py: wgmma
    report.py         problems and counters
    static.py         what a kernel compiles to, without running it: registers, spills, shared memory, occupancy, and
                        what is wrong with its instructions (assembly.py: read from PTX, SASS and AMD's assembly)

CTAs run one stack after another, and only atomics with acquire and release order their accesses. A kernel that is
launched as a dependent of the grid before it (`launch_pdl`, or griddepcontrol in its PTX) may read before its wait only
the parameters that the caller names as constant; a launch that writes one of them is reported. A CTA that does not end
is reported after `launch.LIMIT` basic blocks.
"""

from ptxsim.cases import Case, Verdict
from ptxsim.driver import Constants, Launch, Simulation, simulate, simulated
from ptxsim.static import Build, StaticReport, side_by_side, static_report
from ptxsim.values import Unsupported

__all__ = [
    "Build",
    "Case",
    "Constants",
    "Launch",
    "Simulation",
    "StaticReport",
    "Unsupported",
    "Verdict",
    "side_by_side",
    "simulate",
    "simulated",
    "static_report",
]
