"""Products of matrices: mma.sync of a warp and wgmma of a warpgroup. Products of halves are exact in float64; a dot is
added up there and rounded once to float32."""

import re
from typing import Any

import numpy as np

from ptxsim.control import check_whole_warps
from ptxsim.instruction import Instruction, Run, all_threads, members
from ptxsim.values import F32, F64, U16, U32, U64, Array, to_float


def _rows_of_a(registers: list[Array], kind: str, warps: int) -> Array:
    """A's fragments -> [warps, 16, 16]. Register j of lane l holds two halves of row l // 4 (+ 8 if j is odd), from
    column 2 (l % 4) (+ 8 for j >= 2) on."""
    a = np.empty((warps, 16, 16), F32)
    for j, v in enumerate(registers):
        row, column = 8 * (j % 2), 8 * (j // 2)
        a[:, row : row + 8, column : column + 8] = _pairs(v, kind, warps)
    return a


def _pairs(v: Array, kind: str, warps: int) -> Array:
    """A register of each lane -> [warps, 8, 8]: two halves each, lane l at row l // 4, columns 2 (l % 4) and next."""
    halves = np.ascontiguousarray(v).view(U16).reshape(warps, 8, 8)
    return to_float(halves, kind)


def _columns(j: int) -> slice:
    """The columns of an accumulator's tile of 8 that its register j holds."""
    return slice(j % 2, None, 2)


def product(i: Instruction) -> Run:
    kind = i.parts[-3]
    if i.parts[3] != "m16n8k16" or kind not in ("bf16", "f16") or i.parts[-1] != "f32":
        raise i.unsupported()
    names = [members(arg) for arg in i.args]
    puts, (gets_a, gets_b) = i.writers(names[0]), (i.readers(x, U32) for x in names[1:3])
    gets_c = i.readers(names[3], F32)

    def run(m: Any) -> None:
        check_whole_warps(m, i)
        a = _rows_of_a([all_threads(m, get(m)) for get in gets_a], kind, m.warps)
        transposed = [_pairs(all_threads(m, get(m)), kind, m.warps) for get in gets_b]
        b = np.concatenate(transposed, 2).transpose(0, 2, 1)  # [warps, 16, 8]
        c = np.empty((m.warps, 2, 8, 8), F64)
        for j, get in enumerate(gets_c):
            c[:, j // 2, :, _columns(j)] = all_threads(m, get(m)).reshape(m.warps, 8, 4)
        d = (np.matmul(a.astype(F64), b.astype(F64)).reshape(c.shape) + c).astype(F32)
        for j, put in enumerate(puts):
            put(m, np.ascontiguousarray(d[:, j // 2, :, _columns(j)]).reshape(m.shape))

    return run


def warpgroup(i: Instruction) -> Run:
    match i.parts[1]:
        case "fence":
            return lambda m: m.warpgroups.fence()
        case "commit_group":
            return lambda m: m.warpgroups.commit()
        case "wait_group":
            pending = int(i.args[0], 0)
            return lambda m: m.warpgroups.wait(pending)
    return _warpgroup_product(i)


def _warpgroup_product(i: Instruction) -> Run:
    """A [64, 16] in registers or shared memory, times B [16, N] in shared memory, added to D [64, N] or to zero."""
    shape = next((m for p in i.parts if (m := re.fullmatch(r"m64n(\d+)k16", p))), None)
    kind = i.parts[-1]
    flags = [int(x, 0) for x in i.args[4:]]  # signs of A and B, then whether operands in shared memory are MN-major
    if shape is None or kind not in ("bf16", "f16") or i.parts[-3] != "f32" or flags[:2] != [1, 1]:
        raise i.unsupported()
    N = int(shape.group(1))
    names, in_registers = members(i.args[0]), i.args[1].startswith("{")
    puts, gets, registers = i.writers(names), i.readers(names, F32), [i.names.register(x) for x in names]
    gets_a = i.readers(members(i.args[1]), U32 if in_registers else U64)
    get_b, scale = i.reader(i.args[2], U64), i.reader(i.args[3], bool)

    def run(m: Any) -> None:
        live = _whole_groups(m, i)
        groups = np.flatnonzero(live)
        m.warpgroups.use(i, registers, groups)
        if in_registers:
            fragments = _rows_of_a([all_threads(m, get(m)) for get in gets_a], kind, m.warps)
            a = fragments.reshape(-1, 64, 16)[groups]
        else:
            a = to_float(m.warpgroups.operand(i, gets_a[0](m), groups, 64, bool(flags[2])), kind)
        b = to_float(m.warpgroups.operand(i, get_b(m), groups, N, bool(flags[-1])), kind)
        added = np.zeros((len(groups), 4, 2, 8, N // 8, 8), F64)  # group, warp, half, lane // 4, tile, column
        keep = all_threads(m, scale(m)).reshape(-1, 128)[groups, 0]
        if keep.any():
            for j, get in enumerate(gets):
                held = get(m).reshape(-1, 4, 8, 4)[groups]
                added[:, :, j // 2 % 2, :, j // 4, _columns(j)] = np.where(keep[:, None, None, None], held, 0)
        out = np.matmul(a.astype(F64), b.astype(F64).transpose(0, 2, 1)).reshape(added.shape) + added
        for j, put in enumerate(puts):
            v = np.zeros((len(live), 4, 8, 4), F32)
            v[groups] = out[:, :, j // 2 % 2, :, j // 4, _columns(j)]
            put(m, v.reshape(m.shape))

    return run


def _whole_groups(m: Any, i: Instruction) -> Array:
    """Which warpgroups are active; a problem if one is in part."""
    active = np.ones(m.shape, bool) if m.mask is None else m.mask
    active = active.reshape(-1, 128)
    m.report.check(active.any(1) & ~active.all(1), f"part of a warpgroup executes wgmma: {i}")
    return active.all(1)


TRANSLATORS = {"mma": product, "wgmma": warpgroup}
