"""Instructions that move data: loads, stores, atomics, asynchronous copies, ldmatrix and stmatrix."""

from typing import Any

import numpy as np

from ptxsim.control import check_whole_warps
from ptxsim.instruction import Instruction, Run, all_threads, members
from ptxsim.values import SIGNED, U16, U32, UNSIGNED, Array, bits_of

SPACE = r"global|shared|shared::cta"
ATOMICS: dict[str, Any] = {
    "add": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "or": np.bitwise_or,
    "and": np.bitwise_and,
    "exch": lambda old, new: new,
}


def _space(i: Instruction) -> str:
    space = i.part(SPACE)
    if space is None:
        raise i.unsupported()
    return "global" if space == "global" else "shared"


def load(i: Instruction) -> Run:
    if i.parts[1] == "param":
        put, name = i.writer(i.args[0]), i.args[1].strip("[] ")
        return lambda m: put(m, m.parameters[name])
    in_global = _space(i) == "global"
    puts, address = i.writers(members(i.args[0])), i.address(i.args[1])
    bits = int(i.parts[-1][1:])
    kind: Any = (SIGNED if i.parts[-1][0] == "s" else UNSIGNED)[bits]
    width = len(puts) * bits // 8

    def run(m: Any) -> None:
        if in_global:
            at, view = m.memory.load(i, address(m), width), m.memory.view(kind)
        else:
            at, view = m.shared.load(i, address(m), width, m.lanes()), m.shared.data.view(kind)
        at = at // (bits // 8)
        for n, put in enumerate(puts):
            put(m, view[at + n])

    return run


def store(i: Instruction) -> Run:
    in_global = _space(i) == "global"
    address, gets = i.address(i.args[0]), i.readers(members(i.args[1]), UNSIGNED[int(i.parts[-1][1:])])

    def run(m: Any) -> None:
        lanes = m.lanes()
        values = np.stack([all_threads(m, get(m))[lanes] for get in gets], 1)
        if in_global:
            m.memory.store(i, address(m), values)
        else:
            m.shared.store(i, address(m), values, lanes)

    return run


def atomic(i: Instruction) -> Run:
    """atom and red; threads in the order of their numbers."""
    returns, in_global = i.parts[0] == "atom", _space(i) == "global"
    kind, name = i.type, i.part("|".join(ATOMICS))
    if name is None or isinstance(kind, str):
        raise i.unsupported()
    width = bits_of(kind) // 8
    function = ATOMICS[name]
    where, value = i.args[1:3] if returns else i.args[:2]
    address, get = i.address(where), i.reader(value, kind)
    put = i.writer(i.args[0]) if returns else None

    def run(m: Any) -> None:
        lanes = m.lanes()
        if in_global:
            at, view = m.memory.atomic(i, address(m), width), m.memory.view(kind)
        else:
            at, view = m.shared.atomic(i, address(m), width, lanes), m.shared.data.view(kind)
        at, v = at // width, all_threads(m, get(m))
        if put is None:
            function.at(view, at[lanes], v[lanes])
            return
        old = np.zeros(m.shape, kind)
        for lane in lanes:
            old[lane] = view[at[lane]]
            view[at[lane]] = function(old[lane], v[lane])
        put(m, old)

    return run


def prefetch(i: Instruction) -> Run:
    if i.op != "prefetch.global.L2":
        raise i.unsupported()
    address = i.address(i.args[0])
    return lambda m: m.memory.prefetch(i, all_threads(m, address(m)))


def copy_async(i: Instruction) -> Run:
    if i.op == "cp.async.commit_group":
        return lambda m: m.copies.commit()
    if i.op == "cp.async.wait_group":
        pending = int(i.args[0], 0)
        return lambda m: m.copies.wait(pending)
    if i.op == "cp.async.wait_all":
        return _wait_all
    if not i.op.startswith(("cp.async.ca.shared.global", "cp.async.cg.shared.global")):
        raise i.unsupported()
    args = i.args[:-1] if "cache_hint" in i.op else i.args  # the last one is the cache policy
    target, source, width = i.address(args[0]), i.address(args[1]), int(args[2], 0)
    size = args[3] if len(args) > 3 else str(width)
    given = i.reader(size, U32)
    return lambda m: m.copies.copy(i, target(m), source(m), width, all_threads(m, given(m)))


def _wait_all(m: Any) -> None:
    m.copies.commit()
    m.copies.wait(0)


class _Tiles:
    """The layout of ldmatrix and stmatrix: n tiles of 8 x 8 halves. Lane 8 j + r has the address of row r of tile j.
    Each lane holds two halves of each tile."""

    def __init__(self, i: Instruction):
        matched = i.part(r"x\d")
        if matched is None:
            raise i.unsupported()
        self.n = int(matched[1:])
        lane = np.arange(32)
        self.low, self.high = (lane // 4, 2 * (lane % 4)), (lane // 4, 2 * (lane % 4) + 1)  # row, column
        if "trans" in i.parts:
            self.low, self.high = self.low[::-1], self.high[::-1]

    def lanes(self, m: Any) -> Array:
        """The active threads whose addresses are used."""
        return m.lanes()[m.lanes() % 32 < 8 * self.n]


def load_matrix(i: Instruction) -> Run:
    tiles, address, puts = _Tiles(i), i.address(i.args[1]), i.writers(members(i.args[0]))

    def run(m: Any) -> None:
        check_whole_warps(m, i)
        at = m.shared.load(i, address(m), 16, tiles.lanes(m))
        rows = at.reshape(-1, 32)[:, : 8 * tiles.n].reshape(-1, tiles.n, 8)
        halves = m.shared.data.view(U16)[(rows // 2)[..., None] + np.arange(8)]  # [warps, n, 8, 8]
        for n, put in enumerate(puts):
            low, high = (halves[:, n][:, row, column].astype(U32) for row, column in (tiles.low, tiles.high))
            put(m, (low | (high << U32(16))).reshape(m.shape))

    return run


def store_matrix(i: Instruction) -> Run:
    tiles, address, gets = _Tiles(i), i.address(i.args[0]), i.readers(members(i.args[1]), U32)

    def run(m: Any) -> None:
        check_whole_warps(m, i)
        halves = np.zeros((m.warps, tiles.n, 8, 8), U16)
        for n, get in enumerate(gets):
            v = all_threads(m, get(m)).reshape(-1, 32)
            for shift, (row, column) in ((0, tiles.low), (16, tiles.high)):
                halves[:, n, row, column] = (v >> U32(shift)).astype(U16)
        values = np.zeros((m.warps, 32, 8), U16)
        values[:, : 8 * tiles.n] = halves.reshape(-1, 8 * tiles.n, 8)
        lanes = tiles.lanes(m)
        m.shared.store(i, address(m), values.reshape(-1, 8)[lanes], lanes)

    return run


TRANSLATORS = {
    "ld": load,
    "st": store,
    "red": atomic,
    "atom": atomic,
    "cp": copy_async,
    "prefetch": prefetch,
    "ldmatrix": load_matrix,
    "stmatrix": store_matrix,
}
