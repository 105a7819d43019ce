"""The results of a launch: problems, and counters of instructions, sectors of global memory and bank conflicts."""

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np

from ptxsim.values import Array

SECTOR = 32  # bytes that global memory moves at once
LINE = 128  # bytes that a prefetch reads
_CLASSES = (  # the first that matches the beginning of an opcode
    ("tensor", ("mma", "wgmma.mma")),
    ("global", ("ld.global", "st.global", "red.", "atom", "cp.async.c")),
    ("shared", ("ld.shared", "st.shared", "ldmatrix", "stmatrix")),
    ("shuffle", ("shfl", "redux", "vote", "match")),
    ("barrier", ("bar", "fence", "cp.async", "wgmma", "membar")),
    ("special", ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "div", "sin", "cos", "tanh", "rem")),
    ("branch", ("bra", "ret", "exit")),
    ("convert", ("cvt",)),
    ("move", ("mov", "ld.param", "selp", "createpolicy")),
    ("compare", ("setp",)),
)


def class_of(op: str) -> str:
    for name, starts in _CLASSES:
        if op.startswith(starts):
            return name
    return "float" if op.endswith(("f32", "f64", "f16", "f16x2", "bf16", "bf16x2")) else "integer"


@dataclass
class Place:
    """The accesses of one instruction in a launch: to global memory, or to shared memory."""

    op: str
    cost: float = 0  # sectors of all accesses; or wavefronts of one access by a warp, on average
    ideal: float = 0  # the least cost that these bytes need
    amount: int = 0  # bytes; or accesses by a warp
    seen: int = 0  # executions; or those that were measured


@dataclass
class Report:
    name: str = ""
    problems: Counter[str] = field(default_factory=Counter)  # text -> how often
    benign: Counter[str] = field(default_factory=Counter)  # oddities that cannot change a result
    classes: Counter[str] = field(default_factory=Counter)  # warp instructions issued
    ctas: int = 0
    threads: int = 0
    barriers: int = 0  # of all CTAs
    executed: int = 0  # thread instructions
    read_bytes: int = 0  # requested by threads
    write_bytes: int = 0
    read_sectors: int = 0  # of each warp's accesses
    write_sectors: int = 0
    ideal_read_sectors: int = 0
    ideal_write_sectors: int = 0
    unique_read: int = 0  # bytes of distinct sectors
    unique_write: int = 0
    prefetched: int = 0  # bytes of distinct lines
    waves: float = 0  # of shared memory
    ideal_waves: float = 0
    shared_places: dict[str, Place] = field(default_factory=dict)  # of an instruction's line
    global_places: dict[str, Place] = field(default_factory=dict)

    def problem(self, text: str, times: int = 1) -> None:
        self.problems[text] += int(times)

    def check(self, wrong: Array, text: str) -> bool:
        """Report a problem if any is wrong. Returns whether it did."""
        times = int(wrong.sum())
        if times:
            self.problem(text, times)
        return times > 0

    @classmethod
    def total(cls, reports: list[Self]) -> Self:
        """The sum of several reports, without the places."""
        out = cls("all launches")
        for report in reports:
            for f in fields(cls):
                mine, other = getattr(out, f.name), getattr(report, f.name)
                if isinstance(mine, Counter):
                    mine.update(other)
                elif isinstance(mine, int | float):
                    setattr(out, f.name, mine + other)
        return out


class Traffic:
    """Counts the accesses of a launch to global memory."""

    def __init__(self, report: Report, size: int):
        self.report = report
        self.read, self.written = (np.zeros(size // SECTOR + 2, bool) for _ in "rw")  # sectors
        self.prefetched = np.zeros(size // LINE + 2, bool)  # lines

    def count(self, i: Any, warps: Array, offsets: Array, width: int, write: bool) -> None:
        """One instruction of `width` bytes a thread; `warps` and `offsets` of the active threads."""
        n = len(offsets)
        if not n:
            return
        r = self.report
        first, last = offsets // SECTOR, (offsets + width - 1) // SECTOR
        touched = self.written if write else self.read
        touched[first] = touched[last] = True
        place = r.global_places.setdefault(f"{i.line} {i.where}", Place(i.op))
        place.seen += 1
        if place.seen > 8 and place.seen % 16 and n > 1024 and place.amount:  # assumed to be as before
            cost, ideal = (round(x * n * width / place.amount) for x in (place.cost, place.ideal))
        else:
            cost, ideal = _sectors(warps, offsets, width, first, last)
        if write:
            r.write_bytes += n * width
            r.write_sectors += cost
            r.ideal_write_sectors += ideal
        else:
            r.read_bytes += n * width
            r.read_sectors += cost
            r.ideal_read_sectors += ideal
        place.cost += cost
        place.ideal += ideal
        place.amount += n * width

    def finish(self) -> None:
        self.report.unique_read = int(self.read.sum()) * SECTOR
        self.report.unique_write = int(self.written.sum()) * SECTOR
        self.report.prefetched = int(self.prefetched.sum()) * LINE


def _sectors(warps: Array, offsets: Array, width: int, first: Array, last: Array) -> tuple[int, int]:
    """The sectors that the warps touch, and the fewest that their distinct bytes fill."""
    warp = warps << 40
    touched = np.unique(np.concatenate((warp | first, warp | last)))
    distinct = np.bincount(np.unique(warp | offsets) >> 40)
    return len(touched), int((-(-distinct * width // SECTOR)).sum())


def count_shared(report: Report, i: Any, warps: int, lanes: Array, warp: Array, offsets: Array, width: int) -> None:
    """Wavefronts of one access to shared memory by `warps` warps. An instruction's first three executions in a launch
    are measured, in one CTA, whose active lanes, their warps and offsets are given."""
    place = report.shared_places.setdefault(f"{i.line} {i.where}", Place(i.op))
    if place.seen < 3 and len(lanes):
        waves = ideal = 0
        phase = lanes * width // 128  # a wavefront moves at most 128 bytes
        for w, p in {*zip(warp.tolist(), phase.tolist(), strict=True)}:
            mine = offsets[(warp == w) & (phase == p)]
            words = np.unique(mine[:, None] // 4 + np.arange(max(width // 4, 1)))
            waves += int(np.bincount(words % 32).max())
            ideal += -(-len(words) // 32)
        count = len(np.unique(warp))
        place.cost = (place.cost * place.seen + waves / count) / (place.seen + 1)
        place.ideal = (place.ideal * place.seen + ideal / count) / (place.seen + 1)
        place.seen += 1
    place.amount += warps
    report.waves += place.cost * warps
    report.ideal_waves += place.ideal * warps


def described(who: str, r: Report) -> str:
    """The counters of a launch, its three worst places in shared and in global memory, and its problems."""
    lines = [summed(who, r)]
    for at, p in _worst(r.shared_places):
        lines.append(
            f"    bank conflicts: {p.op} at PTX {at}: {p.cost:.1f} waves, ideal {p.ideal:.1f}, {p.amount} times"
        )
    for at, p in _worst(r.global_places):
        if p.amount > 1024:
            lines.append(f"    scattered: {p.op} at PTX {at}: {p.cost} sectors, ideal {p.ideal}, {p.amount} bytes")
    lines += [f"    PROBLEM {n} x {text}" for text, n in r.problems.items()]
    return "\n".join(lines)


def _worst(places: dict[str, Place]) -> list[tuple[str, Place]]:
    most = sorted(places.items(), key=lambda x: x[1].ideal - x[1].cost)[:3]
    return [(at, p) for at, p in most if p.cost > 1.5 * p.ideal]


def summed(who: str, r: Report) -> str:
    def moved(name: str, requested: int, sectors: int, ideal: int) -> str:
        kb = SECTOR / 1e3
        return f"{name} {requested / 1e3:.1f} KB in sectors of {sectors * kb:.1f} (ideal {ideal * kb:.1f})"

    issued = r.classes.total()
    mix = ", ".join(f"{kind} {100 * n / issued:.0f}%" for kind, n in r.classes.most_common(9))
    return (
        f"  {who}: {moved('reads', r.read_bytes, r.read_sectors, r.ideal_read_sectors)}, "
        f"{moved('writes', r.write_bytes, r.write_sectors, r.ideal_write_sectors)}; "
        f"distinct {r.unique_read / 1e3:.1f} and {r.unique_write / 1e3:.1f} KB\n"
        f"    {r.ctas} CTAs, {r.barriers / max(r.ctas, 1):.1f} barriers a CTA, "
        f"{r.executed / max(r.threads, 1):.0f} instructions a thread; shared memory in {r.waves:.0f} waves, ideal "
        f"{r.ideal_waves:.0f} ({r.waves / max(r.ideal_waves, 1):.2f}x); of the instructions: {mix}"
    )
