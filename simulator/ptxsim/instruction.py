"""One instruction of a program: its text, and functions that read and write its operands.

An instruction is translated once into `run(machine)`. A translator (such as `arithmetic.multiply`) takes the
Instruction and returns that function. It obtains readers and writers of the operands first, so that executing the
instruction is a few numpy calls over all threads of the machine.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ptxsim.names import Names
from ptxsim.report import class_of
from ptxsim.threads import Threads
from ptxsim.values import F32, SIGNED, U32, U64, UNSIGNED, Array, Unsupported, number_type

Read = Callable[[Threads], Any]
Write = Callable[[Threads, Any], None]
Run = Callable[[Threads], None]
SHARED_BASE = 1024  # a block's own shared memory begins here, after the system's first KiB; swizzles need 1024
SPECIALS = {"%tid.x", "%laneid", "%ntid.x", *(f"%{of}.{d}" for of in ("ctaid", "nctaid") for d in "xyz")}
_INTEGER = re.compile(r"^-?(0x[0-9a-fA-F]+|\d+)U?$")


def split(text: str) -> list[str]:
    """The operands of "a, {b, c}, [d]": split at the commas outside brackets."""
    return [x.strip() for x in re.split(r",(?![^{\[]*[}\]])", text) if x.strip()]


def members(operand: str) -> list[str]:
    """The registers of "{a, b}"; of "a", just a."""
    return [x.strip() for x in operand.strip("{} ").split(",")]


class Instruction:
    def __init__(self, names: Names, text: str, line: int, where: str):
        self.names, self.text, self.line, self.where = names, text, line, where
        self.guard: tuple[int, bool] | None = None  # a predicate register, and whether it is negated
        if guard := re.match(r"@(!?)(\S+)\s+(.*)$", text):
            self.guard = names.register(guard.group(2)), bool(guard.group(1))
            text = guard.group(3)
        self.op, operands = (text.split(None, 1) + [""])[:2]
        self.args = split(operands)
        self.parts = self.op.split(".")
        self.kind = class_of(self.op)
        self.strong = self.parts[0] == "ld" and self.part("acquire|relaxed") is not None  # no race with an atomic
        registers = re.findall(r"%[a-z]+\d+", text) if names.accumulators else []
        self.touched = {names.register(x) for x in registers} & names.accumulators
        self.run: Run

    def __str__(self) -> str:
        return f"PTX line {self.line} ({self.where}): {self.text[:110]}"

    @property
    def type(self) -> Any:
        """The type of the result: a numpy type, or the name of a half type or "pred"."""
        return number_type(self.parts[-1])

    def part(self, pattern: str) -> str | None:
        """The first part of the opcode that matches."""
        return next((p for p in self.parts if re.fullmatch(pattern, p)), None)

    def unsupported(self) -> Unsupported:
        return Unsupported(str(self))

    def translate(self, translators: dict[str, Callable[["Instruction"], Run]]) -> None:
        head = self.parts[0]
        if head not in translators:
            raise self.unsupported()
        run = translators[head](self)
        self.run = run if self.guard is None or head == "bra" else self._guarded(run)

    def _guarded(self, run: Run) -> Run:
        """`run` for the threads whose predicate holds. A branch reads its guard by itself."""
        holds = self.guarding()

        def guarded(m: Threads) -> None:
            before = m.mask, m.write_mask
            mask = holds(m)
            if m.mask is not None:
                mask = m.mask & mask
            if mask.any():
                m.mask = m.write_mask = None if mask.all() else mask
                run(m)
                m.mask, m.write_mask = before

        return guarded

    def guarding(self) -> Read:
        assert self.guard is not None
        register, negate = self.guard
        return (lambda m: ~m.registers[register]) if negate else (lambda m: m.registers[register])

    def reader(self, operand: str, kind: Any) -> Read:
        """A function of the machine that returns the operand's bits as numpy type `kind`."""
        dtype = np.dtype(kind)
        if operand in SPECIALS:
            return lambda m: m.special[operand]
        constant = _constant(operand, dtype)
        if constant is not None:
            return lambda m: constant
        i = self.names.register(operand.lstrip("!"))
        if dtype.kind == "b":
            return (lambda m: ~m.registers[i]) if operand.startswith("!") else (lambda m: m.registers[i])
        width, bits = self.names.widths[i], dtype.itemsize * 8
        if width == bits:
            return lambda m: m.registers[i].view(dtype)
        if width < bits and dtype.kind == "i":
            return lambda m: m.registers[i].view(SIGNED[width]).astype(dtype)
        return lambda m: m.registers[i].astype(UNSIGNED[bits]).view(dtype)  # extended by zeros, or the low bits

    def writer(self, operand: str) -> Write:
        """A function of the machine and of values that writes them to a register, for the active threads."""
        if operand == "_":
            return lambda m, values: None
        i = self.names.register(operand)
        width = self.names.widths[i]
        raw = np.dtype(bool) if width == 1 else np.dtype(UNSIGNED[width])

        def write(m: Threads, values: Any) -> None:
            v = np.asarray(values)
            if v.dtype != raw:
                if raw.kind != "b" and v.dtype.itemsize * 8 == width:
                    v = v.view(raw)
                elif v.dtype.kind == "i":
                    v = v.astype(SIGNED[width]).view(raw)
                else:
                    v = v.astype(raw)
            if v.shape != m.shape:
                v = np.broadcast_to(v, m.shape)
            old = m.registers[i]
            if m.write_mask is not None:
                v = np.where(m.write_mask, v, raw.type(0) if old is None else old)
            elif not v.flags.c_contiguous:
                v = np.ascontiguousarray(v)
            m.registers[i] = v

        return write

    def readers(self, operands: list[str], kind: Any) -> list[Read]:
        return [self.reader(x, kind) for x in operands]

    def writers(self, operands: list[str]) -> list[Write]:
        return [self.writer(x) for x in operands]

    def address(self, operand: str) -> Read:
        """A function of the machine that returns the uint64 addresses of "[register + offset]"."""
        inner = operand.strip("[] ")
        base, offset = inner, 0
        if m := re.match(r"^(.*?)\s*([+-])\s*(-?\w+)$", inner):
            base, offset = m.group(1).strip(), int(m.group(2) + "1") * int(m.group(3), 0)
        if base.startswith("global_smem"):
            fixed = np.array(SHARED_BASE + offset, U64)
            return lambda m: np.broadcast_to(fixed, m.shape)
        i = self.names.register(base)
        if self.names.widths[i] == 32:
            o = U32(offset & 0xFFFFFFFF)
            return lambda m: (m.registers[i] + o).astype(U64)
        far = U64(offset & 0xFFFFFFFFFFFFFFFF)
        return (lambda m: m.registers[i] + far) if offset else (lambda m: m.registers[i])


def _constant(operand: str, dtype: np.dtype) -> Array | None:
    """The value of a literal, of `dtype`; None for a register."""
    bits = dtype.itemsize * 8
    if _INTEGER.match(operand):
        value = int(operand.rstrip("U"), 0)
        if dtype.kind == "b":
            return np.bool_(value != 0)
        return np.array(value & ((1 << bits) - 1), UNSIGNED[bits]).view(dtype)[()]
    if operand.startswith("0f"):
        single = np.array(int(operand[2:], 16), U32)
        return (single.view(dtype) if bits == 32 else single.view(F32).astype(dtype))[()]
    if operand.startswith("0d"):
        return np.array(int(operand[2:], 16), U64).view(dtype)[()]
    if operand.startswith("global_smem"):
        offset = int(operand.split("+")[1], 0) if "+" in operand else 0
        return UNSIGNED[bits](SHARED_BASE + offset)
    return None


def all_threads(m: Threads, values: Any) -> Array:
    """One value per thread, where an operand may be a constant."""
    return np.broadcast_to(values, m.shape)
