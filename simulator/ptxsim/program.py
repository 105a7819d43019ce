"""PTX text -> a Program: the entry's parameters, its registers, and basic blocks of instructions."""

import re
from typing import NamedTuple

from ptxsim import arithmetic, bits, control, matrix, moves, order, transfer
from ptxsim.instruction import Instruction, members, split
from ptxsim.names import Names

TRANSLATORS = {
    **moves.TRANSLATORS,
    **arithmetic.TRANSLATORS,
    **bits.TRANSLATORS,
    **control.TRANSLATORS,
    **transfer.TRANSLATORS,
    **matrix.TRANSLATORS,
}
ENDS = ("bra", "ret", "exit", "bar.sync", "barrier", "trap")  # instructions that end a basic block


class _Line(NamedTuple):
    label: str  # of a line that is a label; otherwise empty
    text: str  # the instruction
    number: int  # in the PTX, from 1 on
    where: str  # in the kernel's source


class Program:
    """The first entry of a PTX module. ValueError if there is none, Unsupported for what this package cannot run."""

    def __init__(self, ptx: str):
        lines = ptx.split("\n")
        start = next((i for i, line in enumerate(lines) if ".entry" in line), None)
        if start is None:
            raise ValueError("expected PTX with an .entry, found none")
        body = next(i for i in range(start, len(lines)) if lines[i].startswith("{"))
        header = "\n".join(lines[start:body])
        self.name = _found(r"\.entry (\w+)", header)
        self.threads = int(_found(r"\.reqntid (\d+)", header))  # of a CTA
        self.parameters = [(name, kind) for kind, name in re.findall(r"\.param \.(\w+).*? (\w+_param_\d+)", header)]
        self.names = Names()
        files = dict(re.findall(r'\.file\s+(\d+)\s+"(.*?)"', ptx))
        code = self._code(lines, body + 1, files)
        texts = [line.text for line in code]
        self.names.accumulators = {
            self.names.register(name)
            for text in texts
            if "wgmma.mma_async" in text
            for name in members(_found(r"(\{.*?\})", text))
        }
        narrow = re.findall(r"(?:ld|st)\.shared\S*\.[bus](8|16)\b", "\n".join(texts))
        self.grain = min([4, *(int(n) // 8 for n in narrow)])  # bytes at which accesses to shared memory are tracked
        self.blocks: list[list[Instruction]] = [[]]
        for line in code:
            if self.blocks[-1] and (line.label or self.blocks[-1][-1].op.startswith(ENDS)):
                self.blocks.append([])
            if line.label:
                self.names.starts[line.label] = len(self.blocks) - 1
            else:
                self.blocks[-1].append(Instruction(self.names, line.text, line.number, line.where))
        instructions = [instruction for block in self.blocks for instruction in block]
        for instruction in instructions:
            instruction.translate(TRANSLATORS)
        ops = {instruction.op for instruction in instructions}
        self.synchronises = any(order.acquires(i) or order.releases(i) for i in instructions)
        self.depends = any(op.startswith("griddepcontrol") for op in ops)
        self.launches_dependents = "griddepcontrol.launch_dependents" in ops

    def _code(self, lines: list[str], first: int, files: dict[str, str]) -> list[_Line]:
        """The labels and instructions from line `first` on; notes the declared registers."""
        code: list[_Line] = []
        where, depth = "", 0  # inline assembly may stand in a scope of several lines
        for n in range(first, len(lines)):
            line = lines[n].split("//")[0].strip()
            depth += line.count("{") - line.count("}")
            if depth < 0:
                break
            if m := re.match(r"\.loc\s+(\d+) (\d+)", line):
                where = f"{files.get(m.group(1), '?').rsplit('/', 1)[-1]}:{m.group(2)}"
                continue
            if m := re.match(r"(\$?[\w$]+):\s*(.*)$", line):
                code.append(_Line(m.group(1), "", n + 1, where))
                line = m.group(2)
            if m := re.match(r"\.reg \.(\w+)\s+(.*?);?$", line):
                self.names.declare(m.group(1), split(m.group(2)))
            elif not line.startswith("."):
                parts = line.strip("{} ") if line.startswith(("{", "}")) else line
                code += [_Line("", part.strip(), n + 1, where) for part in parts.split(";") if part.strip()]
        return code


def _found(pattern: str, text: str) -> str:
    m = re.search(pattern, text)
    if m is None:
        raise ValueError(f"expected {pattern} in the PTX: {text[:200]}")
    return m.group(1)
