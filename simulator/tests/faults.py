"""Faults in compiled kernels: PTX that is changed on purpose, and kernels that are wrong as they are.

`python tests/faults.py` runs each kernel as it is compiled and with its fault, and prints a line of JSON for each:
name, the problems that were reported without (`before`) and with (`after`) the fault, and, where CTAs run in several
orders, the orders in which the fault was not reported (`missed`) or the right kernel's result is wrong (`unequal`).
"""

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import grids
import torch
import triton
import triton.language as tl
from grids import Fault, product, randn

from ptxsim import simulated

Change = Callable[[str], str]


def _without(pattern: str, which: int | None = None) -> Change:
    """Remove the lines that match, or one of them."""

    def change(ptx: str) -> str:
        lines = ptx.split("\n")
        found = [n for n, line in enumerate(lines) if re.search(pattern, line.split("//")[0])]
        for n in found if which is None else [found[which]]:
            lines[n] = ""
        return "\n".join(lines)

    return change


def _replaced(pattern: str, by: str, count: int = 0) -> Change:
    return lambda ptx: re.sub(pattern, by, ptx, count=count)


def _accumulator_written(ptx: str) -> str:
    """Add zero to an accumulator just before the first wgmma."""
    return re.sub(r"(wgmma\.mma_async\S+ \{(%r\d+))", r"add.f32 \2, \2, 0f00000000; \1", ptx, count=1)


def _plain_write(ptx: str) -> str:
    """Write 0 plainly where the first atomic has counted."""
    return re.sub(r"(atom\S*shared\S*\s+\S+ (\[\S+\]), 1;)", r"\1 st.shared.b32 \2, 0;", ptx, count=1)


@triton.jit
def _norm_kernel(
    x_ptr,  # [rows, E]
    y_ptr,  # [rows, E]: each row divided by its root mean square
    E: tl.constexpr,
):
    o = tl.program_id(0) * E + tl.arange(0, E)
    b_x = tl.load(x_ptr + o).to(tl.float32)
    tl.store(y_ptr + o, (b_x * tl.rsqrt(tl.sum(b_x * b_x) / E)).to(y_ptr.dtype.element_ty))


def _norm() -> None:
    x = randn(2, 4096, dtype=torch.bfloat16)
    _norm_kernel[(2,)](x, torch.empty_like(x), E=4096)


@triton.jit
def _count_kernel(
    x_ptr,  # [BLOCK] int32, below BINS
    y_ptr,  # [BINS] int32: how many of x are 0, 1, ..
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):
    tl.store(y_ptr + tl.arange(0, BINS), tl.histogram(tl.load(x_ptr + tl.arange(0, BLOCK)), BINS))


def _count() -> None:
    """Zeros, atomics and reads of shared memory, with a barrier after each of the first two."""
    _count_kernel[(1,)](_ints(512) % 100, _ints(128), BLOCK=512, BINS=128)


# A predicate that holds for every second thread.
ODD = (
    ".reg .pred %odd; .reg .b32 %oddbits; mov.u32 %oddbits, %tid.x; and.b32 %oddbits, %oddbits, 1;"
    " setp.eq.s32 %odd, %oddbits, 1;"
)

FAULTS: tuple[tuple[str, Callable[[], Any], int, Change], ...] = (
    ("copies are not awaited", product, 80, _without(r"cp\.async\.wait_group")),
    ("copies are awaited late", product, 80, _replaced(r"cp\.async\.wait_group\s+(\d+)", "cp.async.wait_group 7")),
    ("copies are not committed", product, 80, _without(r"cp\.async\.commit_group", 1)),
    ("no barrier after the copies", product, 80, _without(r"bar\.sync", 0)),
    ("copies for wgmma are not awaited", product, 90, _without(r"cp\.async\.wait_group")),
    ("no barrier before wgmma", product, 90, _without(r"bar\.sync", 0)),
    ("no proxy fence", product, 90, _without(r"fence\.proxy\.async")),
    ("an accumulator is written after its fence", product, 90, _accumulator_written),
    ("wgmma is awaited late", product, 90, _replaced(r"(wgmma\.wait_group\S+) \d+", r"\1 7")),
    ("no barrier in a sum", _norm, 80, _without(r"bar\.sync", 0)),
    ("a store elsewhere", _norm, 80, _replaced(r"(st\.global\S* \[ %rd\d+ \+) 0", r"\1 65536")),
    ("an odd address", _norm, 80, _replaced(r"(st\.global\S* \[ %rd\d+ \+) 0", r"\1 2")),
    ("half of a warp shuffles", _norm, 80, _replaced(r"(\n\s*)(shfl\.sync)", r"\1@%odd \2")),
    ("no barrier before atomics in shared memory", _count, 80, _without(r"bar\.sync", 0)),
    ("no barrier after atomics in shared memory", _count, 80, _without(r"bar\.sync", 1)),
    ("a plain write after an atomic", _count, 80, _plain_write),
    ("threads wait at two barriers", product, 80, _replaced(r"(\n\s*)(bar\.sync)", r"\1@%odd \2", 1)),
)


@triton.jit
def _beyond_kernel(
    x_ptr,  # [n]
    y_ptr,  # [n]
    n,
    BLOCK: tl.constexpr,
):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + o, tl.load(x_ptr + o, mask=o <= n), mask=o < n)  # reads one too many


@triton.jit
def _meeting_kernel(
    y_ptr,  # [BLOCK]: every program writes its number there
    BLOCK: tl.constexpr,
):
    tl.store(y_ptr + tl.arange(0, BLOCK), tl.program_id(0) + tl.zeros([BLOCK], tl.int32))


@triton.jit
def _neighbour_kernel(
    y_ptr,  # [programs * BLOCK]: every program reads what the next one writes
    BLOCK: tl.constexpr,
):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    more = tl.program_id(0) < tl.num_programs(0) - 1
    tl.store(y_ptr + o, tl.load(y_ptr + o + BLOCK, mask=more & (o >= 0), other=1) + 1)


@triton.jit
def _reversed_kernel(
    y_ptr,  # [BLOCK], reversed in place, without a barrier
    BLOCK: tl.constexpr,
):
    o = tl.arange(0, BLOCK)
    tl.store(y_ptr + BLOCK - 1 - o, tl.load(y_ptr + o))


@triton.jit
def _copy_kernel(
    x_ptr,  # [BLOCK]
    y_ptr,  # [BLOCK]
    BLOCK: tl.constexpr,
):
    o = tl.arange(0, BLOCK)
    tl.store(y_ptr + o, tl.load(x_ptr + o))


def _ints(n: int) -> torch.Tensor:
    return torch.arange(n, dtype=torch.int32)


KERNELS = (
    Fault(
        "a read beyond the end",
        lambda: _beyond_kernel[(2,)](_ints(101)[:100], _ints(100), 99, BLOCK=64),
        lambda: _beyond_kernel[(2,)](_ints(101)[:100], _ints(100), 100, BLOCK=64),
    ),
    Fault(
        "programs write one place",
        lambda: _meeting_kernel[(1,)](_ints(64), BLOCK=64),
        lambda: _meeting_kernel[(3,)](_ints(64), BLOCK=64),
    ),
    Fault(
        "programs read what others write",
        lambda: _neighbour_kernel[(1,)](_ints(256), BLOCK=64),
        lambda: _neighbour_kernel[(4,)](_ints(256), BLOCK=64),
    ),
    Fault(
        "warps write what others read",
        lambda: _reversed_kernel[(1,)](_ints(32), BLOCK=32, num_warps=1),
        lambda: _reversed_kernel[(1,)](_ints(128), BLOCK=128, num_warps=4),
    ),
    Fault(
        "a read of new memory",
        lambda: _copy_kernel[(1,)](_ints(64), _ints(64), BLOCK=64),
        lambda: _copy_kernel[(1,)](torch.empty(64, dtype=torch.int32), _ints(64), BLOCK=64),
    ),
)


def _problems(work: Callable[[], Any], arch: int, change: Change = str, **options: Any) -> list[str]:
    with simulated(arch, change, **options) as simulation:
        work()
    return sorted(simulation.problems())


def results() -> Iterator[dict[str, Any]]:
    before = cache(_problems)  # faults share kernels
    for name, work, arch, fault in FAULTS:
        yield {"name": name, "before": before(work, arch), "after": _problems(work, arch, _with_odd(fault))}
    for fault in (*KERNELS, *grids.FAULTS):
        yield _in_orders(fault)


ORDERS: tuple[dict[str, Any], ...] = (  # of the CTAs: together, one by one, from the last on, two at a time
    {},
    {"threads": 1},
    {"threads": 1, "backwards": True},
    {"threads": 1, "shuffled": 1},
    {"threads": 256, "shuffled": 2},
)


_run_right: dict[tuple[Any, ...], tuple[list[str], Any]] = {}  # faults share kernels


def _in_orders(fault: Fault) -> dict[str, Any]:
    row: dict[str, Any] = {"name": fault.name, "before": [], "after": [], "missed": [], "unequal": []}
    for order in ORDERS:
        options = {"constant": fault.constant, **order, **fault.options}
        key = fault.right, fault.arch, str(options)
        if key not in _run_right:
            results: list[Any] = []
            problems = _problems(lambda out=results: out.append(fault.right()), fault.arch, **options)
            _run_right[key] = problems, results[0]
        problems, result = _run_right[key]
        row["before"] += problems
        if isinstance(result, tuple) and not torch.equal(*result):
            row["unequal"].append(order)
        change = str if fault.change is str else _with_odd(fault.change)
        problems = _problems(fault.wrong, fault.arch, change, **options)
        row["after"] += problems
        if not problems:
            row["missed"].append(order)
    return row


def _with_odd(fault: Change) -> Change:
    """The fault, where needed with the predicate %odd. ValueError if it changes nothing."""

    def change(ptx: str) -> str:
        out = fault(ptx)
        if out == ptx:
            raise ValueError("the fault changes nothing in this PTX")
        return out.replace("\n{\n", "\n{\n" + ODD.replace("; ", ";\n") + "\n", 1) if "@%odd" in out else out

    return change


if __name__ == "__main__":
    torch.set_num_threads(1)
    for result in results():
        print(json.dumps(result), flush=True)
