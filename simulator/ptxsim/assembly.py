"""What a compiled kernel consists of, read from its PTX, its SASS or its AMD assembly: instruction counts, and orders
that the results depend on. static.py reports them.
"""

import re
from collections.abc import Iterator
from typing import Any

MATRIX = {
    "wgmma.rs": r"\bwgmma\.mma_async[^{};]*\{[^}]*\},\s*\{",
    "wgmma": r"\bwgmma\.mma_async[^{};]*\{[^}]*\},\s*[^{\s]",
    "tcgen05": r"\btcgen05\.mma",
    "mma": r"(?<![.\w])mma\.sync",
}
_LOAD = re.compile(r"\bld\.global[.\w:]*?(?:\.v(\d))?\.[busf](\d+)\b")
_ASYNC = re.compile(r"\bcp\.async\.c[ag]\.shared\S* .*?,.*?, *(0x[0-9a-f]+|\d+)")


def mix(ptx: str) -> dict[str, Any]:
    """Counts of matrix, load and store instructions, and the share of loaded bytes that is read wide."""
    plain = [int(vector or 1) * int(bits) // 8 for vector, bits in _LOAD.findall(ptx)]
    copies = [int(size, 0) for size in _ASYNC.findall(ptx)]
    bulk = len(re.findall(r"\bcp\.async\.bulk\S*global", ptx))
    total = sum(plain) + sum(copies)
    wide = sum(size for size in plain if size >= 16) + sum(copies)
    return {
        "matrix": ", ".join(f"{name} {n}" for name, p in MATRIX.items() if (n := len(re.findall(p, ptx)))),
        "loads": len(plain) + len(copies) + bulk,
        "wide": 1.0 if bulk else wide / total if total else 0.0,
        "asynchronous": len(copies) + bulk,
        "stores": len(re.findall(r"\b(?:st|red|atom)\.global", ptx)),
    }


_TENSOR_MEMORY = re.compile(r"\btcgen05\.alloc\b.*\], *(0x[0-9a-f]+|\d+) *;")


def tensor_columns(ptx: str) -> int:
    """Columns of tensor memory that a block takes. An SM has 512."""
    return sum(int(columns, 0) for columns in _TENSOR_MEMORY.findall(ptx))


def allocates_late(ptx: str) -> bool:
    """Whether a block may let the next kernel start (`griddepcontrol.launch_dependents`) before it has allocated its
    tensor memory. Blocks of the next kernel could then take the columns, and hold them while they wait for this kernel.
    One warp allocates, so a barrier of the block must come between."""
    allocations = list(_TENSOR_MEMORY.finditer(ptx))
    start = ptx.find("griddepcontrol.launch_dependents")
    return bool(allocations) and start >= 0 and "bar.sync" not in ptx[allocations[-1].end() : start]


_AMD_LOAD = re.compile(
    r"^\s*(?:buffer|global)_load_(?:lds_)?(?:(d?word)(?:x(\d))?|[us]?(byte|short)\w*)\b.*$", re.MULTILINE
)


def amd_mix(text: str) -> dict[str, Any]:
    """`mix` of an AMD kernel's assembly. Loads straight into LDS count as asynchronous."""
    sizes, direct = [], 0
    for found in _AMD_LOAD.finditer(text):
        sizes.append({"byte": 1, "short": 2}.get(found[3], 4 * int(found[2] or 1)))
        direct += " lds" in found[0] or "_lds_" in found[0]
    return {
        "matrix": f"mfma {n}" if (n := len(re.findall(r"\bv_mfma_", text))) else "",
        "loads": len(sizes),
        "wide": sum(size for size in sizes if size >= 16) / sum(sizes) if sizes else 0.0,
        "asynchronous": direct,
        "stores": len(re.findall(r"\b(?:buffer|global)_(?:store|atomic)_", text)),
    }


def amd_resources(text: str) -> dict[str, int]:
    """REG (vector registers of a lane), STACK (scratch bytes of a lane), LOCAL (spilled vector registers; scalar ones
    are spilled to vector registers, not to memory)."""
    value = {key: int(n) for key, n in re.findall(r"^\s*\.(\w+):\s+(\d+)\s*$", text, re.MULTILINE)}
    scratch = value["private_segment_fixed_size"]
    return {"REG": value["vgpr_count"], "STACK": scratch, "LOCAL": value["vgpr_spill_count"]}


_AMD_WRITE = re.compile(r"(?:buffer|global|flat)_(?:store|atomic)")
_AMD_ARRIVED = re.compile(r"s_waitcnt\b.*\bvmcnt\(0\)")


def published_early(text: str) -> int:
    """How many releases of an AMD kernel's assembly (`buffer_wbl2`, before an atomic that counts arrivals) may publish
    too early: on a path to them, a write to memory is not followed by a wait for its arrival (`s_waitcnt vmcnt(0)`) and
    then a barrier. The release waits for the writes of its own wave; the other waves must have waited at the barrier.
    """
    blocks = dict(_blocks(text))
    states: dict[str, set[tuple[bool, bool]]] = {name: set() for name in blocks}
    todo = [(next(iter(blocks)), (False, False))]
    early = set()
    while todo:
        name, state = todo.pop()
        if state in states[name]:
            continue
        states[name].add(state)
        flying, unsafe = state  # a write has not arrived; a write had not arrived at the last barrier, or is newer
        lines, targets = blocks[name]
        for n, line in enumerate(lines):
            if _AMD_WRITE.match(line):
                flying = unsafe = True
            elif _AMD_ARRIVED.match(line):
                flying = False
            elif line.startswith("s_barrier"):
                unsafe = flying
            elif line.startswith("buffer_wbl2") and unsafe:
                early.add((name, n))
        todo += [(target, (flying, unsafe)) for target in targets]
    return len(early)


def _blocks(text: str) -> Iterator[tuple[str, tuple[list[str], list[str]]]]:
    """(name, (instructions, names of the blocks that may follow)) of each basic block of an AMD kernel's assembly, in
    order."""
    name, lines, targets = "", list[str](), list[str]()
    for n, line in enumerate(line.strip() for line in text.splitlines()):
        label = re.match(r"(\.LBB\w+):", line)
        if label:
            yield name, (lines, [*targets, label[1]])
            name, lines, targets = label[1], [], []
        elif re.match(r"[a-z]\w+(?:\s|$)", line):
            lines.append(line)
            jump = re.match(r"s_(c?)branch\w* (\.LBB\w+)", line)
            if jump or line.startswith("s_endpgm"):
                after = f"after line {n}"
                yield name, (lines, [*([jump[2]] if jump else []), *([after] if jump and jump[1] else [])])
                name, lines, targets = after, [], []
    yield name, (lines, targets)


_SASS = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@\S+\s+)?([A-Z]\S*)\s*(.*?)\s*;")
_SASS_LABEL = re.compile(r"^\s*(\.L\w+):")
_RESULT = re.compile(r"(?:P[0-9T], )?R(\d+)\b")  # SHFL and atomics name a predicate before it
_LEFT = re.compile(r"R\d+, R(\d+)\b")  # of a wgmma; a left operand in shared memory is "gdesc[UR4]"
_NO_RESULT = ("BAR", "BRX", "CALL", "FCHK", "JMX", "NANOSLEEP", "RET", "WARPSYNC")  # they read their first register


def overwritten(sass: str) -> list[str]:
    """The instructions in loops of an sm_90 kernel that write a register from which a wgmma in flight may still read
    its left operand. No scoreboard protects these registers, only waits: `gsb0` at a wgmma ends a group, and after
    `WARPGROUP.DEPBAR.LE gsb0, n` at most the last n groups are in flight. ptxas fails to wait in some loops.

    A loop with a wgmma is read twice in a row, then what follows it; no jump inside is followed."""
    code, loops = _code(sass)
    wrong = set[int]()
    for start, end in loops:
        if any("GMMA" in name for name, _ in code[start:end]):
            wrong |= _overwritten(code, [*range(start, end), *range(start, len(code))])
    return [" ".join(code[n]) for n in sorted(wrong)]


def longest_loop(sass: str) -> int:
    """The instructions of the longest loop with a matrix instruction, as a warp executes them for a tile; 0 without
    one. No jump inside is followed."""
    code, loops = _code(sass)
    return max((b - a for a, b in loops if any("MMA" in name for name, _ in code[a:b])), default=0)


def _code(sass: str) -> tuple[list[tuple[str, str]], list[tuple[int, int]]]:
    """The (instruction, operands) of SASS, and the (first, end) of the loops among them."""
    code, labels = list[tuple[str, str]](), dict[str, int]()
    for line in sass.splitlines():
        if label := _SASS_LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _SASS.match(line):
            code.append((found[1], found[2]))
    loops = []
    for end, (name, operands) in enumerate(code):
        target = re.search(r"\.L\w+", operands) if name == "BRA" else None
        if target and labels.get(target[0], end) < end:
            loops.append((labels[target[0]], end + 1))
    return code, loops


def _overwritten(code: list[tuple[str, str]], order: list[int]) -> set[int]:
    """Which of these (instruction, operands) write such registers, if they run in this order."""
    group, flying, wrong = set[int](), list[set[int]](), set[int]()  # registers of the open group; of the ended ones
    for n in order:
        name, operands = code[n]
        if re.match(r"[A-Z]GMMA\b", name):
            if left := _LEFT.match(operands):
                group |= {int(left[1]) + i for i in range(4)}
            if operands.endswith("gsb0"):
                flying, group = [*flying, group], set()
        elif name == "WARPGROUP.DEPBAR.LE":
            done = max(len(flying) - int(operands.split(",")[1], 0), 0)
            flying = flying[done:]
        elif _written(name, operands) & group.union(*flying):
            wrong.add(n)
    return wrong


def _written(name: str, operands: str) -> set[int]:
    """The registers that an instruction writes."""
    first, parts = _RESULT.match(operands), {*name.split(".")}
    if first is None or name.startswith(_NO_RESULT):
        return set()
    size = 4 if parts & {"128", "4"} else 2 if parts & {"64", "WIDE", "CS2R"} else 1
    return {int(first[1]) + i for i in range(size)}
