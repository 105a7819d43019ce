"""Lets Triton launch here instead of on a CUDA device.

    with simulated(90) as simulation:
        kernel[grid](...)  # or any function that launches kernels on CPU tensors
    simulation.problems()

Triton compiles with the arguments' real specialisation for that architecture, and `launch` runs the PTX. What
`torch.empty` and its kin make meanwhile is memory that nobody has written.
"""

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from ptxsim.launch import launch
from ptxsim.memory import Memory
from ptxsim.program import Program
from ptxsim.report import Report, described, summed

Constants = Mapping[str, Collection[str]]  # kernel -> parameters


@dataclass(frozen=True)
class _Driver:
    """The part of a Triton driver that compiling needs. Device n is an sm_n: Triton caches kernels by device."""

    arch: int

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", self.arch, 32)


class _Fresh(TorchFunctionMode):
    """Tensors that are made empty are unwritten."""

    def __init__(self, memory: Memory):
        super().__init__()
        self.memory = memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.empty, torch.empty_like, torch.Tensor.new_empty) and out.device.type == "cpu":
            self.memory.fresh(out)
        return out


@dataclass(frozen=True)
class Launch:
    name: str  # of the kernel
    grid: tuple[int, ...]
    warps: int  # of a CTA
    shared: int  # bytes of a CTA
    report: Report

    def __str__(self) -> str:
        return described(f"{self.name} grid {self.grid} {self.warps} warps {self.shared} B", self.report)


@dataclass
class Simulation:
    launches: list[Launch] = field(default_factory=list)

    def problems(self) -> Counter[str]:
        """Text -> how often, of all launches."""
        found: Counter[str] = Counter()
        for each in self.launches:
            found.update({f"{each.name}: {text}": n for text, n in each.report.problems.items()})
        return found

    def benign(self) -> int:
        return sum(each.report.benign.total() for each in self.launches)

    def __str__(self) -> str:
        """The counters of each launch, and of all."""
        lines = [str(launch) for launch in self.launches]
        if len(lines) > 1:
            lines.append(summed("all launches", Report.total([each.report for each in self.launches])))
        return "\n".join(lines)


def simulate(
    kernel: Any, grid: Any, *arguments: Any, arch: int = 90, constant: Collection[str] = (), **options: Any
) -> Simulation:
    """Launch a Triton kernel once, as `kernel[grid](*arguments, **options)`, on CPU tensors. `constant` names the
    parameters that no kernel writes. Raises as `simulated`."""
    with simulated(arch, constant={kernel.__name__: constant}) as simulation:
        kernel[grid](*arguments, **options)
    return simulation


@contextmanager
def simulated(
    arch: int, change: Callable[[str], str] = str, constant: Constants = MappingProxyType({}), **options: Any
) -> Iterator[Simulation]:
    """Run the launches of Triton kernels for sm_`arch`. `change` edits their PTX; `constant` names the parameters of
    each kernel that no kernel writes; `options` are those of `launch`. RuntimeError if kernels are interpreted.
    ValueError if `constant` names something that is no parameter."""
    if os.environ.get("TRITON_INTERPRET"):
        raise RuntimeError("TRITON_INTERPRET is set, so kernels are interpreted and there is no PTX")
    simulation, memory = Simulation(), Memory()
    compile_or_run = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = compile_or_run(self, *args, grid=grid, warmup=True, **kwargs)
        if not warmup:
            bound = self.device_caches[arch][4](*args, **kwargs)[0]  # arguments by name
            sizes = tuple(grid(bound) if callable(grid) else grid)
            with torch._C.DisableTorchFunctionSubclass():
                program, fixed = _program(change(compiled.asm["ptx"])), constant.get(self.fn.__name__, ())
                report = _launched(compiled, program, sizes, bound, memory, fixed, options)
            how = compiled.metadata
            simulation.launches.append(Launch(self.fn.__name__, sizes, how.num_warps, how.shared, report))
        return compiled

    driver = patch.object(triton.runtime.driver, "_active", _Driver(arch))
    with driver, patch.object(JITFunction, "run", run), _Fresh(memory):
        yield simulation


@cache
def _program(ptx: str) -> Program:
    return Program(ptx)


def _launched(
    compiled: Any,
    program: Program,
    grid: tuple[int, ...],
    bound: dict[str, Any],
    memory: Memory,
    constant: Collection[str],
    options: dict[str, Any],
) -> Report:
    if unknown := set(constant) - set(bound):
        raise ValueError(f"expected parameters of {compiled.metadata.name}, got the constants {sorted(unknown)}")
    memory.begin()
    values = {name: bound[name] for name, kind in compiled.src.signature.items() if kind != "constexpr"}
    tensors = {name: v for name, v in values.items() if isinstance(v, torch.Tensor)}
    parameters = [memory.map(v, name in constant) if name in tensors else v for name, v in values.items()]
    parameters += [0] * (len(program.parameters) - len(parameters))  # Triton's scratch memory, which no op uses
    produced = [name for name, v in tensors.items() if name in constant and memory.was_produced(v)]
    how = {"dependent": compiled.metadata.launch_pdl, **options}
    report = launch(program, grid, parameters, memory, compiled.metadata.shared, **how)
    for name in produced:
        report.problem(f"{name} is declared constant, but an earlier launch wrote it")
    if program.depends and not compiled.metadata.launch_pdl:
        report.benign["griddepcontrol in a kernel that is launched without launch_pdl"] += 1
    memory.end(list(tensors.values()))
    return report
