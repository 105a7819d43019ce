"""Instructions on bits: logic, shifts, fields, bytes, counts."""

from typing import Any

import numpy as np

from ptxsim.arithmetic import binary, unary
from ptxsim.instruction import Instruction, Run, all_threads
from ptxsim.values import I64, U32, U64, Array, bits_of


def shift_left(i: Instruction) -> Run:
    kind, d, a, b = i.type, *i.args
    put, x, count = i.writer(d), i.reader(a, kind), i.reader(b, U32)
    bits = bits_of(kind)

    def run(m: Any) -> None:
        n = count(m)
        put(m, np.where(n >= bits, kind(0), x(m) << (n & U32(bits - 1)).astype(kind)))

    return run


def shift_right(i: Instruction) -> Run:
    kind, d, a, b = i.type, *i.args
    put, x, count = i.writer(d), i.reader(a, kind), i.reader(b, U32)
    bits = bits_of(kind)
    if np.dtype(kind).kind == "i":
        return lambda m: put(m, x(m) >> np.minimum(count(m), U32(bits - 1)).astype(kind))

    def run(m: Any) -> None:
        n = count(m)
        put(m, np.where(n >= bits, kind(0), x(m) >> (n & U32(bits - 1)).astype(kind)))

    return run


def _joined(m: Any, high: Array, low: Array) -> Array:
    """Two uint32 -> uint64."""
    return (all_threads(m, high).astype(U64) << U64(32)) | low.astype(U64)


def funnel_shift(i: Instruction) -> Run:
    d, *operands = i.args
    put, (low, high, count) = i.writer(d), i.readers(operands, U32)
    left, wrap = "l" in i.parts, "wrap" in i.parts

    def run(m: Any) -> None:
        n = count(m)
        n = (n & U32(31) if wrap else np.minimum(n, U32(32))).astype(U64)
        both = _joined(m, high(m), low(m))
        put(m, ((both << n) >> U64(32) if left else both >> n).astype(U32))

    return run


def field(i: Instruction) -> Run:
    """bfe: bits from a position on, extended by zeros or by their sign."""
    kind, d, a, b, c = i.type, *i.args
    signed = np.dtype(kind).kind == "i"
    if signed and bits_of(kind) != 32:
        raise i.unsupported()
    wide = I64 if signed else U64
    put, x, first, length = i.writer(d), i.reader(a, kind), i.reader(b, U32), i.reader(c, U32)

    def run(m: Any) -> None:
        position, n = ((get(m) & U32(255)).astype(wide) for get in (first, length))
        v = x(m).astype(wide) >> np.minimum(position, wide(63))
        if signed:
            drop = wide(64) - np.clip(n, wide(1), wide(32))
            v = np.where(n == 0, wide(0), (v << drop) >> drop)
        else:
            kept = np.where(n > 63, ~wide(0), (wide(1) << np.minimum(n, wide(63))) - wide(1))
            v = np.where(position > 63, wide(0), v & kept)
        put(m, v.astype(kind))

    return run


def permute_bytes(i: Instruction) -> Run:
    if i.op != "prmt.b32":
        raise i.unsupported()
    d, *operands = i.args
    put, (low, high, selector) = i.writer(d), i.readers(operands, U32)

    def run(m: Any) -> None:
        both, chosen = _joined(m, high(m), low(m)), selector(m)
        out = U32(0)
        for n in range(4):
            s = (chosen >> U32(4 * n)) & U32(15)
            byte = (both >> ((s & U32(7)).astype(U64) * U64(8))) & U64(255)
            sign = np.where(byte & U64(128), U64(255), U64(0))
            byte = np.where(s & U32(8), sign, byte)
            out = out | (byte.astype(U32) << U32(8 * n))
        put(m, out)

    return run


def any_logic(i: Instruction) -> Run:
    """lop3: bit by bit, the entry of an eight-bit table that three bits select."""
    d, *operands, table = i.args
    put, (a, b, c), entries = i.writer(d), i.readers(operands, U32), int(table, 0)

    def run(m: Any) -> None:
        x, y, z = a(m), b(m), c(m)
        out = U32(0)
        for n in range(8):
            if entries >> n & 1:
                out = out | ((x if n & 4 else ~x) & (y if n & 2 else ~y) & (z if n & 1 else ~z))
        put(m, out)

    return run


def count_ones(i: Instruction) -> Run:
    put, get = i.writer(i.args[0]), i.reader(i.args[1], i.type)
    return lambda m: put(m, np.bitwise_count(get(m)).astype(U32))


def leading_zeros(i: Instruction) -> Run:
    kind = i.type
    put, get = i.writer(i.args[0]), i.reader(i.args[1], kind)
    bits = bits_of(kind)

    def run(m: Any) -> None:
        v = get(m)
        n = np.full(m.shape, bits, U32)
        for _ in range(bits):
            n = np.where(v != 0, n - U32(1), n)
            v = v >> kind(1)
        put(m, n)

    return run


def reverse_bits(i: Instruction) -> Run:
    put, get = i.writer(i.args[0]), i.reader(i.args[1], U32)

    def run(m: Any) -> None:
        v, out = get(m), U32(0)
        for n in range(32):
            out = out | (((v >> U32(n)) & U32(1)) << U32(31 - n))
        put(m, out)

    return run


TRANSLATORS = {
    "and": binary(np.bitwise_and),
    "or": binary(np.bitwise_or),
    "xor": binary(np.bitwise_xor),
    "not": unary(np.invert),
    "shl": shift_left,
    "shr": shift_right,
    "shf": funnel_shift,
    "bfe": field,
    "prmt": permute_bytes,
    "lop3": any_logic,
    "popc": count_ones,
    "clz": leading_zeros,
    "brev": reverse_bits,
}
