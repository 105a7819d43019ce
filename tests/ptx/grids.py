"""Faults between CTAs: the last arriver of a launch, and loops without an end.

Each fault is a kernel that is launched right and launched, or changed, wrong.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from formulas import randn
from torch import Tensor

from specker.kernels.variant import tl, triton

Equal = tuple[Tensor, Tensor]  # a result, and what it must be
COUNT, BLOCK, F32 = 3, 256, torch.float32


@dataclass(frozen=True)
class Fault:
    name: str
    right: Callable[[], Equal | None]
    wrong: Callable[[], Any]
    arch: int = 80
    change: Callable[[str], str] = str  # of the PTX of `wrong`
    options: Mapping[str, Any] = field(default_factory=dict)  # of `launch`


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
def _endless_kernel(
    flag_ptr,  # [1]: never becomes 1 by itself
):
    while tl.load(flag_ptr, volatile=True) == 0:
        pass


def _spin(flag: int) -> None:
    _endless_kernel[(2,)](torch.tensor([flag]))


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
    Fault("a loop without an end", lambda: _spin(1), lambda: _spin(0), options={"limit": 200}),
)
