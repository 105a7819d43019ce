"""Instructions that compute numbers. Approximate ones (ex2, rcp, ...) are computed in float64 and rounded once."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxsim.instruction import Instruction, Read, Run, Write, all_threads
from ptxsim.values import (
    F32,
    F64,
    HALVES,
    I64,
    PAIRS,
    U16,
    U32,
    U64,
    WIDER,
    Array,
    bits_of,
    flush,
    from_float,
    to_float,
)

LOW, HALF = U64(0xFFFFFFFF), U64(32)
Function = Callable[..., Any]


def binary(function: Function) -> Callable[[Instruction], Run]:
    """The translator of an instruction d = function(a, b)."""
    return lambda i: _binary(i, function)


def _binary(i: Instruction, function: Function) -> Run:
    kind = i.type
    if kind in HALVES:
        return halves(i, function)
    if kind in PAIRS:
        return pairs(i, function)
    d, a, b = i.args
    kind = bool if kind == "pred" else kind
    put, x, y = i.writer(d), i.reader(a, kind), i.reader(b, kind)
    if "ftz" in i.parts:
        return lambda m: put(m, flush(function(flush(x(m)), flush(y(m)))))
    return lambda m: put(m, function(x(m), y(m)))


def halves(i: Instruction, function: Function) -> Run:
    """bf16, bf16x2 and f16x2: computed in float64 and rounded once."""
    name = i.type
    pair = name.endswith("x2")
    kind, word = name.removesuffix("x2"), U32 if pair else U16
    put, gets = i.writer(i.args[0]), i.readers(i.args[1:], word)

    def run(m: Any) -> None:
        raw = [all_threads(m, get(m)) for get in gets]
        low = _half(function, raw, kind)
        if pair:
            high = _half(function, [r >> U32(16) for r in raw], kind)
            low = low.astype(U32) | (high.astype(U32) << U32(16))
        put(m, low)

    return run


def pairs(i: Instruction, function: Function) -> Run:
    """s16x2 and u16x2: the lower and the upper 16 bits, each by itself."""
    kind = PAIRS[i.type]
    put, gets = i.writer(i.args[0]), i.readers(i.args[1:], U32)

    def run(m: Any) -> None:
        put(m, function(*(np.ascontiguousarray(all_threads(m, get(m))).view(kind) for get in gets)).view(U32))

    return run


def _half(function: Function, raw: list[Array], kind: str) -> Array:
    return from_float(function(*(to_float(r.astype(U16), kind).astype(F64) for r in raw)), kind)


def unary(function: Function) -> Callable[[Instruction], Run]:
    """The translator of an instruction d = function(a) in a's own type."""

    def translate(i: Instruction) -> Run:
        if i.type in HALVES:
            return halves(i, function)
        kind = bool if i.type == "pred" else i.type
        put, get = i.writer(i.args[0]), i.reader(i.args[1], kind)
        return lambda m: put(m, function(get(m)))

    return translate


def approximate(function: Function) -> Callable[[Instruction], Run]:
    """The translator of an instruction d = function(a), computed in float64."""

    def translate(i: Instruction) -> Run:
        kind = i.type
        put, get = i.writer(i.args[0]), i.reader(i.args[1], kind)
        if "ftz" in i.parts:
            return lambda m: put(m, flush(function(flush(get(m)).astype(F64)).astype(kind)))
        return lambda m: put(m, function(get(m).astype(F64)).astype(kind))

    return translate


def extreme(quiet: Function, strict: Function) -> Callable[[Instruction], Run]:
    """The translator of min or max. `quiet` returns the number beside a NaN, `strict` (.NaN) returns NaN."""

    def translate(i: Instruction) -> Run:
        is_float = isinstance(i.type, str) or np.dtype(i.type).kind == "f"
        return _binary(i, quiet if is_float and "NaN" not in i.parts else strict)

    return translate


def multiply(i: Instruction) -> Run:
    if "wide" not in i.parts and "hi" not in i.parts:
        return _binary(i, np.multiply)
    kind = i.type
    d, a, b = i.args
    put, x, y = i.writer(d), i.reader(a, kind), i.reader(b, kind)
    if "hi" not in i.parts:
        wide = WIDER[kind]
        return lambda m: put(m, x(m).astype(wide) * y(m).astype(wide))
    if kind == U64:
        return lambda m: put(m, _high_half(x(m), y(m)))
    if kind not in WIDER:
        raise i.unsupported()
    widest, shift = (I64 if np.dtype(kind).kind == "i" else U64), bits_of(kind)
    return lambda m: put(m, ((x(m).astype(widest) * y(m).astype(widest)) >> widest(shift)).astype(kind))


def _high_half(x: Array, y: Array) -> Array:
    """The upper 64 bits of the product of two uint64."""
    x_low, x_high, y_low, y_high = x & LOW, x >> HALF, y & LOW, y >> HALF
    middle = x_high * y_low + ((x_low * y_low) >> HALF)
    other = x_low * y_high + (middle & LOW)
    return x_high * y_high + (middle >> HALF) + (other >> HALF)


def multiply_add(i: Instruction) -> Run:
    kind = i.type
    d, a, b, c = i.args
    wide = WIDER[kind] if "wide" in i.parts else kind
    if wide == kind and "lo" not in i.parts:
        raise i.unsupported()
    put, x, y, z = i.writer(d), i.reader(a, kind), i.reader(b, kind), i.reader(c, wide)
    return lambda m: put(m, x(m).astype(wide) * y(m).astype(wide) + z(m))


def fused(i: Instruction) -> Run:
    """fma. A product of two float32 is exact in float64; rounding the sum twice differs from once in rare ties."""
    if i.type in HALVES:
        return halves(i, lambda x, y, z: x * y + z)
    if i.type != F32:
        raise i.unsupported()
    d, *rest = i.args
    put, (x, y, z) = i.writer(d), i.readers(rest, F32)
    if "ftz" in i.parts:
        return lambda m: put(m, flush(_fma(flush(x(m)), flush(y(m)), flush(z(m)))))
    return lambda m: put(m, _fma(x(m), y(m), z(m)))


def _fma(x: Array, y: Array, z: Array) -> Array:
    return (x.astype(F64) * y.astype(F64) + z.astype(F64)).astype(F32)


def _operands(i: Instruction) -> tuple[Write, Read, Read]:
    d, a, b = i.args
    return i.writer(d), i.reader(a, i.type), i.reader(b, i.type)


def divide(i: Instruction) -> Run:
    kind = i.type
    put, x, y = _operands(i)
    if np.dtype(kind).kind == "f":
        return lambda m: put(m, x(m) / y(m))

    def run(m: Any) -> None:
        a, b = np.broadcast_arrays(x(m), y(m))
        zero = b == 0 if m.mask is None else (b == 0) & m.mask
        m.report.check(zero, f"integer division by zero: {i}")
        b = np.where(b == 0, kind(1), b)
        quotient = a // b  # numpy rounds down, PTX towards zero
        put(m, quotient + ((a % b != 0) & ((a < 0) != (b < 0))).astype(kind))

    return run


def remainder(i: Instruction) -> Run:
    kind = i.type
    put, x, y = _operands(i)

    def run(m: Any) -> None:
        a, b = np.broadcast_arrays(x(m), y(m))
        put(m, np.fmod(a, np.where(b == 0, kind(1), b)))

    return run


TRANSLATORS = {
    "add": binary(np.add),
    "sub": binary(np.subtract),
    "neg": unary(np.negative),
    "abs": unary(np.abs),
    "min": extreme(np.fmin, np.minimum),
    "max": extreme(np.fmax, np.maximum),
    "mul": multiply,
    "mad": multiply_add,
    "fma": fused,
    "div": divide,
    "rem": remainder,
    "ex2": approximate(np.exp2),
    "lg2": approximate(np.log2),
    "rcp": approximate(np.reciprocal),
    "sqrt": approximate(np.sqrt),
    "rsqrt": approximate(lambda x: 1 / np.sqrt(x)),
}
