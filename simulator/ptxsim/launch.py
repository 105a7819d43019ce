"""One launch: the CTAs of a grid, in stacks that run at once, and the report of all."""

import random
from typing import Any

import numpy as np

from ptxsim.machine import Machine
from ptxsim.memory import Memory
from ptxsim.program import Program
from ptxsim.report import Report, Traffic
from ptxsim.shadow import Shadow
from ptxsim.values import FLOAT, UNSIGNED

THREADS = 8192  # that run at once
SHARED = 64 << 20  # bytes of shared memory of the CTAs that run at once
LIMIT = 100_000  # basic blocks that a CTA may execute


def launch(
    program: Program,
    grid: tuple[int, ...],
    parameters: list[Any],
    memory: Memory,
    shared: int = 0,
    threads: int = THREADS,
    races: bool = True,
    backwards: bool = False,
    shuffled: int | None = None,
    dependent: bool = False,
    limit: int = LIMIT,
) -> Report:
    """Run the program. `parameters` in the order of the entry's, addresses as integers; `shared` bytes per CTA. `races`
    in global memory are tracked on request. `backwards`: the last CTA runs first; `shuffled`: a random order's seed.
    `dependent`: a programmatic dependent launch, as is that of each program with griddepcontrol. A CTA that executes
    more than `limit` basic blocks ends the launch with a problem."""
    size = (*grid, 1, 1)[:3]
    ctas = [(x, y, z) for z in range(size[2]) for y in range(size[1]) for x in range(size[0])]
    if backwards:
        ctas.reverse()
    if shuffled is not None:
        random.Random(shuffled).shuffle(ctas)
    at_once = max(1, min(len(ctas), threads // program.threads, SHARED // max(shared, 1)))
    values = {name: _bits(v, kind) for (name, kind), v in zip(program.parameters, parameters, strict=True)}
    saved = memory.save()
    dependent = dependent or program.depends
    mixed = None
    while True:
        report = Report(program.name, ctas=len(ctas), threads=program.threads * len(ctas))
        traffic = Traffic(report, memory.size)
        shadow = Shadow(memory, report, mixed, program.synchronises) if races else None
        stacks = (ctas[n : n + at_once] for n in range(0, len(ctas), at_once))
        ended = all(
            Machine(program, stack, size, values, memory, shared, report, traffic, shadow, dependent, limit).run()
            for stack in stacks
        )
        if not ended or shadow is None or mixed is not None or not shadow.mixed().any():
            break
        mixed = shadow.mixed()
        memory.restore(saved)  # once more, and track the readers of these storages as well
    traffic.finish()
    if dependent and not program.launches_dependents:
        report.benign["a dependent launch without griddepcontrol.launch_dependents"] += 1
    return report


def _bits(value: Any, kind: str) -> Any:
    bits = int(kind[1:])
    if kind.startswith("f"):
        return np.array(value, FLOAT[bits]).view(UNSIGNED[bits])
    return np.array(int(value) & ((1 << bits) - 1), UNSIGNED[bits])
