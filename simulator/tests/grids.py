"""Faults between CTAs and between grids: the last arriver of a launch, dependent launches, and loops without an end.

Each fault is a kernel that is launched right and launched, or changed, wrong.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

gdc_wait, gdc_launch_dependents = tl.extra.cuda.gdc_wait, tl.extra.cuda.gdc_launch_dependents
Equal = tuple[Tensor, Tensor]  # a result, and what it must be
COUNT = 3
BLOCK = 256
F32 = torch.float32


@dataclass(frozen=True)
class Fault:
    name: str
    right: Callable[[], Equal | None]
    wrong: Callable[[], Any]
    arch: int = 80
    change: Callable[[str], str] = str  # of the PTX of `wrong`
    constant: Mapping[str, Collection[str]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)  # of `launch`


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@triton.jit
def _last_arriver_kernel(
    x_ptr,  # [tiles, BLOCK]: all programs of a tile read it, and the last one replaces it
    partial_ptr,  # [tiles, COUNT, BLOCK]
    counter_ptr,  # [tiles]: 0 before and after the launch
    COUNT: tl.constexpr,
    LAST: tl.constexpr,  # programs that arrive before the last
    BLOCK: tl.constexpr,
    SEM: tl.constexpr,  # "" takes the last program for the last arriver
    SCOPE: tl.constexpr,
    ALL_RESET: tl.constexpr,
):
    i_t, i_s = tl.program_id(0), tl.program_id(1)
    o = tl.arange(0, BLOCK)
    p_x, p_tile = x_ptr + i_t * BLOCK + o, partial_ptr + i_t * COUNT * BLOCK + o
    tl.store(p_tile + i_s * BLOCK, tl.load(p_x) * (i_s + 1))
    tl.debug_barrier()
    arrived = i_s
    if SEM != "":
        arrived = tl.atomic_add(counter_ptr + i_t, 1, sem=SEM, scope=SCOPE)
    if arrived == LAST:
        b_sum = tl.zeros([BLOCK], tl.float32)
        for n in range(COUNT):
            b_sum += tl.load(p_tile + n * BLOCK)
        tl.store(p_x, b_sum)
    if ALL_RESET or arrived == LAST:
        tl.store(counter_ptr + i_t, 0)


def _arrive(
    sem: str = "acq_rel", scope: str = "gpu", last: int = COUNT - 1, all_reset: bool = False, num_warps: int = 4
) -> Equal:
    """Two launches, since the second one needs the counters of the first."""
    x, partials, counters = randn(2, BLOCK, dtype=F32), torch.zeros(2, COUNT, BLOCK), torch.zeros(2, dtype=torch.int32)
    want = x.clone()
    for _ in range(2):
        how = {"COUNT": COUNT, "LAST": last, "BLOCK": BLOCK, "SEM": sem, "SCOPE": scope, "ALL_RESET": all_reset}
        _last_arriver_kernel[(2, COUNT)](x, partials, counters, **how, num_warps=num_warps)
        want = want + want * 2 + want * 3
    return torch.cat((x.flatten(), counters)), torch.cat((want.flatten(), torch.zeros(2)))


@triton.jit
def _chain_kernel(
    x_ptr,  # [BLOCK], written by program 0
    flag_ptr,  # [2]: program 0 tells program 1, and program 1 tells program 2
    y_ptr,  # [BLOCK]: program 2 copies x there
    BLOCK: tl.constexpr,
    SEM: tl.constexpr,
):
    i, o = tl.program_id(0), tl.arange(0, BLOCK)
    if i == 0:
        tl.store(x_ptr + o, o)
        tl.atomic_xchg(flag_ptr, 1, sem="release")
    if i == 1:
        told = tl.atomic_add(flag_ptr, 0, sem=SEM)
        if told == 1:
            tl.atomic_add(flag_ptr + 1, 1, sem="release")
    if i == 2:
        told = tl.atomic_add(flag_ptr + 1, 0, sem="acquire")
        if told == 1:
            tl.store(y_ptr + o, tl.load(x_ptr + o))


def _chain(sem: str) -> Equal:
    x, y = (torch.full((BLOCK,), -1, dtype=torch.int32) for _ in "xy")
    _chain_kernel[(3,)](x, torch.zeros(2, dtype=torch.int32), y, BLOCK=BLOCK, SEM=sem)
    return y, torch.arange(BLOCK, dtype=torch.int32)


def _without_barriers_before_the_atomic(ptx: str) -> str:
    """Triton adds one of its own before a release."""
    before, atomic, after = ptx.partition("atom.global")
    return re.sub(r"bar\.sync\s+0;", "", before) + atomic + after


@triton.jit
def _first_kernel(
    x_ptr,  # [programs * BLOCK]
    y_ptr,  # [programs * BLOCK]
    BLOCK: tl.constexpr,
):
    gdc_launch_dependents()
    gdc_wait()
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + o, tl.load(x_ptr + o) + 1)


@triton.jit
def _second_kernel(
    y_ptr,  # [n * BLOCK], from the launch before
    w_ptr,  # [n * BLOCK]
    z_ptr,  # [n * BLOCK]
    n,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,  # whether the wait comes first
    HOW: tl.constexpr,  # where else it is, or what is wrong
):
    i = tl.program_id(0)
    o = i * BLOCK + tl.arange(0, BLOCK)
    if HOW != "silent":
        gdc_launch_dependents()
    if HOW == "stores":
        tl.store(z_ptr + o, 0.0, mask=o < n * BLOCK)
    if HOW == "counts":
        tl.atomic_add(z_ptr, 0.0, sem="relaxed")
    if FIRST:
        gdc_wait()
    if i >= n:
        if HOW == "prefetches":
            gdc_wait()
        return
    if HOW == "returns":
        gdc_wait()
    b_w = tl.load(w_ptr + o)
    if HOW == "prefetches":
        gdc_wait()
    b_y = tl.load(y_ptr + o)
    if HOW == "loads":
        gdc_wait()
    if HOW == "replaces":
        tl.store(w_ptr + o, b_w)
    tl.store(z_ptr + o, b_y * b_w)


def _dependent(how: str, programs: int = 2, weight_from_launch: bool = False) -> Equal:
    """z = (x + 1) * w by two launches. Of three programs the third has nothing to do."""
    x, w = (randn(2 * BLOCK, seed=seed, dtype=F32) for seed in (0, 1))
    y, z = torch.empty(2 * BLOCK), torch.zeros(2 * BLOCK)
    want = (x + 1) * w
    _first_kernel[(2,)](x, y, BLOCK=BLOCK, launch_pdl=True)
    if weight_from_launch:
        y, w = x, y
    first = how in ("waits", "stores", "counts", "replaces")
    _second_kernel[(programs,)](y, w, z, 2, BLOCK=BLOCK, FIRST=first, HOW=how, launch_pdl=True)
    return z, want


@triton.jit
def _product_kernel(
    x_ptr,  # [64, E], from the launch before if DEPENDENT
    w_ptr,  # [64, E]
    y_ptr,  # [64, 64]
    E: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    if DEPENDENT:
        gdc_wait()
    o, b_y = tl.arange(0, 64), tl.zeros([64, 64], tl.float32)
    for start in tl.range(0, E, 64, num_stages=3):
        at = o[:, None] * E + start + o[None, :]
        b_y = tl.dot(tl.load(x_ptr + at), tl.load(w_ptr + at).T, b_y)
    if DEPENDENT:
        gdc_launch_dependents()
    tl.store(y_ptr + o[:, None] * 64 + o[None, :], b_y)


def product(dependent: bool = False) -> None:
    x, w = (randn(64, 256, seed=seed, dtype=torch.bfloat16) for seed in (0, 1))
    _product_kernel[(1,)](x, w, torch.empty(64, 64), E=256, DEPENDENT=dependent, launch_pdl=dependent)


def _dependent_product() -> None:
    product(dependent=True)


def _wait_behind_the_loop(ptx: str) -> str:
    wait, end = "griddepcontrol.wait ;", "griddepcontrol.launch_dependents ;"
    return ptx.replace(wait, "").replace(end, f"{wait} {end}")


@triton.jit
def _endless_kernel(
    flag_ptr,  # [1]: never becomes 1 by itself
):
    while tl.load(flag_ptr, volatile=True) == 0:
        pass


def _waits() -> Equal:
    return _dependent("waits")


def _spin(flag: int) -> None:
    _endless_kernel[(2,)](torch.tensor([flag]))


WEIGHT = {"_second_kernel": {"w_ptr"}, "_product_kernel": {"w_ptr"}}


def _grid(name: str, right: Callable[[], Equal | None], wrong: Callable[[], Any], **more: Any) -> Fault:
    return Fault(name, right, wrong, 90, constant=WEIGHT, **more)


FAULTS = (
    Fault("the last program, not the last to arrive", _arrive, lambda: _arrive(sem="")),
    Fault("a relaxed counter", _arrive, lambda: _arrive(sem="relaxed")),
    Fault("a counter without acquire", _arrive, lambda: _arrive(sem="release")),
    Fault("a counter without release", _arrive, lambda: _arrive(sem="acquire")),
    Fault("a counter for one CTA", _arrive, lambda: _arrive(scope="cta"), arch=90),
    Fault("no barrier before the counter", _arrive, _arrive, change=_without_barriers_before_the_atomic),
    Fault(
        "one warp without a barrier before the counter",
        lambda: _arrive(num_warps=1),
        lambda: _arrive(num_warps=1),
        90,
        _without_barriers_before_the_atomic,
    ),
    Fault("a count one too small", _arrive, lambda: _arrive(last=COUNT - 2)),
    Fault("every program resets the counter", _arrive, lambda: _arrive(all_reset=True)),
    Fault(
        "a chain of flags with a relaxed one",
        lambda: _chain("acquire"),
        lambda: _chain("relaxed"),
        options={"threads": 1, "backwards": False, "shuffled": None},  # elsewhere nothing is copied
    ),
    _grid("no wait", _waits, lambda: _dependent("never")),
    _grid("a kernel without griddepcontrol", _waits, lambda: _dependent("silent")),
    _grid("a read before the wait", lambda: _dependent("prefetches"), lambda: _dependent("loads")),
    _grid("a write before the wait", _waits, lambda: _dependent("stores")),
    _grid("an atomic before the wait", _waits, lambda: _dependent("counts")),
    _grid("copies before the wait", _dependent_product, _dependent_product, change=_wait_behind_the_loop),
    _grid("a program returns before it waits", lambda: _dependent("waits", 3), lambda: _dependent("returns", 3)),
    _grid(
        "a constant that a launch wrote",
        lambda: _dependent("prefetches", 3),
        lambda: _dependent("prefetches", 3, weight_from_launch=True),
    ),
    _grid("a constant that the launch writes", _waits, lambda: _dependent("replaces")),
    Fault("a loop without an end", lambda: _spin(1), lambda: _spin(0), options={"limit": 200}),
)
