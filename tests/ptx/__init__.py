"""Execute the PTX that Triton compiles, in numpy, without a GPU.

Triton's interpreter runs the Python of a kernel. This package runs the PTX that ptxas would receive: `mma.sync` and
`wgmma`, `cp.async` whose data arrive at the wait, `ldmatrix`, shuffles, barriers, bfloat16 and float16 as they are. It
compares each op with its reference, and it reports accesses out of bounds, reads of memory that nobody wrote, races
between warps and between blocks (CTAs), and missing waits and fences. It also counts instructions, 32-byte sectors and
bank conflicts.

    program.py        PTX text -> a Program of Instructions; instruction.py: an instruction's operands
    arithmetic.py     what each instruction does: numbers; bits.py; moves.py: copies, comparisons, conversions;
    control.py          branches, barriers, shuffles; transfer.py: loads and stores; matrix.py: mma, wgmma
    machine.py        threads, registers and masks: which threads run next
    memory.py         global memory: bounds and unwritten bytes; shadow.py: its races; order.py: acquire and release
    dependent.py      griddepcontrol: what may happen before the grid before has finished
    shared.py         shared memory and its races; copies.py: cp.async; warpgroups.py: wgmma
    report.py         problems and counters
    launch.py         one launch; driver.py: makes Triton launch here
    ops.py, rounds.py the ops' cases; checks.py: values, invariance; counting.py: counters
    mutants.py        faults put into PTX, which must be reported; grids.py: faults between CTAs and between grids
    __main__.py       the command; processes.py: its processes; plugin.py: the kernels' own tests on PTX

CTAs run in several orders, and only atomics with acquire and release order their accesses. A kernel that is launched as
a dependent of the grid before it (`launch_pdl`, or griddepcontrol in its PTX) may read before its wait only the
parameters that `ops.CONSTANT` names; a launch that writes one of them is reported. A CTA that does not end is reported
after `launch.LIMIT` basic blocks.

What the hardware leaves open is checked rather than modelled. Not covered: time, ptxas and its scheduling, caches,
sm_100 (tcgen05), TMA, fences that are not part of an atomic (they order nothing here), the tensor cores' own rounding
(here products are exact and a dot is added in float64 and rounded once), the last bits of approximate instructions, and
hazards between the lanes of one warp.
"""
