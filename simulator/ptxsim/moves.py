"""Instructions that copy, select, compare and convert values."""

from typing import Any

import numpy as np

from ptxsim.instruction import Instruction, Run, all_threads, members
from ptxsim.values import F32, F64, U16, U32, U64, UNSIGNED, Array, bits_of, flush, from_float, number_type, to_float

ROUNDINGS = {"rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil, "rni": np.rint}
COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
    "num": lambda x, y: ~_unordered(x, y),
    "nan": lambda x, y: _unordered(x, y),
}
COMBINATIONS = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def move(i: Instruction) -> Run:
    target, source = i.args
    if i.parts[-1] == "pred":
        put, get = i.writer(target), i.reader(source, bool)
        return lambda m: put(m, get(m))
    whole = UNSIGNED[int(i.parts[-1][1:])]
    if target.startswith("{"):
        return _unpack(i, members(target), source, whole)
    put = i.writer(target)
    if not source.startswith("{"):
        get = i.reader(source, whole)
        return lambda m: put(m, get(m))
    names = members(source)
    bits = bits_of(whole) // len(names)
    gets = i.readers(names, UNSIGNED[bits])

    def pack(m: Any) -> None:
        v = whole(0)
        for n, part in enumerate(gets):
            v = v | (part(m).astype(whole) << whole(bits * n))
        put(m, v)

    return pack


def _unpack(i: Instruction, targets: list[str], source: str, whole: Any) -> Run:
    get, puts = i.reader(source, whole), i.writers(targets)
    bits = bits_of(whole) // len(puts)

    def run(m: Any) -> None:
        v = get(m)
        for n, put in enumerate(puts):
            put(m, (v >> whole(bits * n)).astype(UNSIGNED[bits]))

    return run


def select(i: Instruction) -> Run:
    d, a, b, p = i.args
    kind = UNSIGNED[int(i.parts[-1][1:])]
    put, (x, y), holds = i.writer(d), i.readers([a, b], kind), i.reader(p, bool)
    return lambda m: put(m, np.where(holds(m), x(m), y(m)))


def convert_address(i: Instruction) -> Run:
    """cvta: here generic and specific addresses are the same."""
    put, get = i.writer(i.args[0]), i.reader(i.args[1], U64)
    return lambda m: put(m, get(m))


def create_policy(i: Instruction) -> Run:
    put = i.writer(i.args[0])
    return lambda m: put(m, U64(0))


def _unordered(x: Array, y: Array) -> Array:
    return np.isnan(x) | np.isnan(y)


def compare(i: Instruction) -> Run:
    kind, comparison, combined = i.type, i.parts[1], COMBINATIONS.get(i.parts[2])
    d, a, b, *rest = i.args
    if "|" in d or (isinstance(kind, str) and kind.endswith("x2")):
        raise i.unsupported()
    put, third = i.writer(d), i.reader(rest[0], bool) if rest else None
    is_bfloat = kind == "bf16"
    x, y = i.readers([a, b], U16 if is_bfloat else kind)
    is_float = is_bfloat or np.dtype(kind).kind == "f"
    or_unordered = len(comparison) == 3 and comparison.endswith("u")  # "ltu": less, or one is NaN
    function = COMPARISONS[comparison[:2] if or_unordered else comparison]
    ftz = "ftz" in i.parts

    def run(m: Any) -> None:
        v, w = x(m), y(m)
        if is_bfloat:
            v, w = (to_float(all_threads(m, bits), kind) for bits in (v, w))
        if ftz:
            v, w = flush(v), flush(w)
        result = function(v, w)
        if is_float and comparison == "ne":
            result = result & ~_unordered(v, w)
        if or_unordered:
            result = result | _unordered(v, w)
        put(m, combined(result, third(m)) if combined and third else result)

    return run


def convert(i: Instruction) -> Run:
    *how, to, source = i.parts[1:]
    d, *operands = i.args
    put = i.writer(d)
    if (to, source) == ("f16x2", "e4m3x2"):
        raw = i.reader(operands[0], U16)
        return lambda m: put(m, _from_e4m3(all_threads(m, raw(m))))
    if to in ("bf16x2", "f16x2"):
        return _convert_pair(i, how, to.removesuffix("x2"))
    if source in ("bf16", "f16"):
        raw = i.reader(operands[0], U16)
        values, from_is_float = (lambda m: to_float(all_threads(m, raw(m)), source)), True
    else:
        values, from_is_float = i.reader(operands[0], number_type(source)), source[0] == "f"
    if to in ("bf16", "f16"):
        return lambda m: put(m, from_float(all_threads(m, values(m)), to))
    kind: Any = number_type(to)
    to_is_float = to[0] == "f"
    rounding = next((ROUNDINGS[x] for x in how if x in ROUNDINGS), None)
    if rounding is not None and from_is_float:
        if to_is_float:
            return lambda m: put(m, rounding(values(m)).astype(kind))
        return lambda m: put(m, _to_integer(rounding(values(m).astype(F64)), kind))
    if "sat" in how or (from_is_float and not to_is_float):
        raise i.unsupported()
    if to_is_float and "rn" not in how and (not from_is_float or bits_of(kind) < 32):
        raise i.unsupported()
    return lambda m: put(m, np.asarray(values(m)).astype(kind))


def _convert_pair(i: Instruction, how: list[str], kind: str) -> Run:
    if "relu" in how:
        raise i.unsupported()
    d, *operands = i.args
    put, (high, low) = i.writer(d), i.readers(operands, F32)

    def run(m: Any) -> None:
        upper, lower = (from_float(all_threads(m, get(m)), kind).astype(U32) for get in (high, low))
        put(m, (upper << U32(16)) | lower)

    return run


def _from_e4m3(pair: Array) -> Array:
    """Two e4m3 (a sign, four bits of exponent with bias 7, three of mantissa) in 16 bits -> two float16 in 32 bits."""
    halves = []
    for code in (pair & U16(0xFF), pair >> U16(8)):
        bits = (code & U16(0x80)) << U16(8) | (code & U16(0x7F)) << U16(7)  # of the number times 2^-8
        number = from_float(to_float(bits, "f16") * F32(256), "f16")
        halves.append(np.where(code & U16(0x7F) == 0x7F, U16(0x7FFF), number).astype(U32))
    return halves[1] << U32(16) | halves[0]


def _to_integer(v: Array, kind: Any) -> Array:
    """Rounded float64 -> integers, clamped to the type's range; NaN becomes 0."""
    low, high = np.iinfo(kind).min, np.iinfo(kind).max
    above = v >= float(high) + (1 if bits_of(kind) < 64 else 0)
    inside = np.where(np.isnan(v) | above, 0, np.maximum(v, float(low)))
    return np.where(above, kind(high), inside.astype(kind))


TRANSLATORS = {
    "mov": move,
    "selp": select,
    "cvta": convert_address,
    "createpolicy": create_policy,
    "setp": compare,
    "cvt": convert,
}
