"""Instructions about threads: branches, barriers, fences, and exchanges within a warp."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxsim.instruction import Instruction, Run, all_threads
from ptxsim.values import I64, U32, U64, Array


def branch(i: Instruction) -> Run:
    label, starts = i.args[0], i.names.starts
    if i.guard is None:
        return lambda m: m.jump(starts[label], None)
    taken = i.guarding()
    return lambda m: m.jump(starts[label], taken(m))


def leave(i: Instruction) -> Run:
    return lambda m: m.leave()


def trap(i: Instruction) -> Run:
    return lambda m: m.report.problem(f"trap: {i}")


def nothing(i: Instruction) -> Run:
    return lambda m: None


def barrier(i: Instruction) -> Run:
    if i.op == "bar.warp.sync":
        return nothing(i)
    if i.op != "bar.sync" or i.args != ["0"]:
        raise i.unsupported()
    return lambda m: m.arrive()


def fence(i: Instruction) -> Run:
    return (lambda m: m.shared.proxy_fence()) if i.op.startswith("fence.proxy.async") else nothing(i)


def depend(i: Instruction) -> Run:
    if i.op == "griddepcontrol.launch_dependents":
        return nothing(i)
    if i.op != "griddepcontrol.wait":
        raise i.unsupported()
    return lambda m: m.dependence.wait(m.lanes())


def check_whole_warps(m: Any, i: Instruction) -> None:
    if m.mask is not None:
        warps = m.mask.reshape(-1, 32)
        torn = warps.any(1) & ~warps.all(1)
        m.report.check(torn, f"part of a warp executes a warp-wide instruction: {i}")


def _by_warp(m: Any, values: Array) -> Array:
    return all_threads(m, values).reshape(-1, 32)


def shuffle(i: Instruction) -> Run:
    d, a, b, c, _ = i.args
    target, _, found = d.partition("|")
    put, put_found = i.writer(target), i.writer(found) if found else None
    value, distance, clamp = i.readers([a, b, c], U32)
    lane, mode = np.arange(32)[None, :], i.parts[2]

    def run(m: Any) -> None:
        check_whole_warps(m, i)
        n = _by_warp(m, distance(m)).astype(I64) & 31
        packed = _by_warp(m, clamp(m)).astype(I64)  # the segments' mask and the last lane
        segment = (packed >> 8) & 31
        last = (lane & segment) | (packed & 31 & ~segment)
        if mode == "up":
            source = lane - n
            inside = source >= last
        else:
            source = {"down": lane + n, "bfly": lane ^ n, "idx": (lane & segment) | (n & ~segment)}[mode]
            inside = source <= last
        put(m, np.take_along_axis(_by_warp(m, value(m)), np.where(inside, source, lane), 1).reshape(m.shape))
        if put_found is not None:
            put_found(m, inside.reshape(m.shape))

    return run


REDUCTIONS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def reduce(i: Instruction) -> Run:
    function, kind = REDUCTIONS[i.parts[2]], i.type
    return _across_warp(i, kind, lambda v: function.reduce(v, 1, dtype=kind))


def _ballot(v: Array) -> Array:
    return (v.astype(U64) << np.arange(32, dtype=U64)).sum(1).astype(U32)


VOTES = {"ballot": _ballot, "any": lambda v: v.any(1), "all": lambda v: v.all(1)}


def vote(i: Instruction) -> Run:
    if i.parts[2] not in VOTES:
        raise i.unsupported()
    return _across_warp(i, bool, VOTES[i.parts[2]])


def _across_warp(i: Instruction, kind: Any, function: Callable[[Array], Array]) -> Run:
    """One number from the 32 lanes of each warp, which all of them receive."""
    put, get = i.writer(i.args[0]), i.reader(i.args[1], kind)

    def run(m: Any) -> None:
        check_whole_warps(m, i)
        put(m, np.repeat(function(_by_warp(m, get(m))), 32))

    return run


TRANSLATORS = {
    "bra": branch,
    "ret": leave,
    "exit": leave,
    "trap": trap,
    "bar": barrier,
    "barrier": barrier,
    "fence": fence,
    "membar": nothing,
    "griddepcontrol": depend,
    "shfl": shuffle,
    "redux": reduce,
    "vote": vote,
}
