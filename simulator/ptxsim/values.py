"""The number types of PTX as numpy types; bfloat16, which numpy lacks, as 16 bits."""

import numpy as np

Array = np.ndarray
U8 = np.uint8
U16 = np.uint16
U32 = np.uint32
U64 = np.uint64
I16 = np.int16
I32 = np.int32
I64 = np.int64
F16 = np.float16
F32 = np.float32
F64 = np.float64
UNSIGNED = {8: U8, 16: U16, 32: U32, 64: U64}
SIGNED = {8: np.int8, 16: I16, 32: I32, 64: I64}
FLOAT = {16: F16, 32: F32, 64: F64}
WIDER = {U16: U32, I16: I32, U32: U64, I32: I64}
HALVES = ("bf16", "bf16x2", "f16x2")  # types that are computed in a wider one and rounded once
PAIRS = {"s16x2": I16, "u16x2": U16}  # two integers in 32 bits
SMALLEST_NORMAL = np.finfo(F32).tiny


class Unsupported(Exception):
    """PTX that this package does not execute."""


def number_type(name: str) -> type | str:
    """The numpy type of a PTX type such as "u32"; a half type, a pair or "pred" stays a name."""
    if name in HALVES or name in PAIRS or name == "pred":
        return name
    return {"u": UNSIGNED, "s": SIGNED, "b": UNSIGNED, "f": FLOAT}[name[0]][int(name[1:])]


def bits_of(kind: type) -> int:
    return np.dtype(kind).itemsize * 8


def flush(v: Array) -> Array:
    """Subnormal float32 numbers become zeros of their sign (.ftz)."""
    return np.where(np.abs(v) < SMALLEST_NORMAL, np.copysign(F32(0), v), v) if v.dtype == F32 else v


def to_float(bits: Array, kind: str) -> Array:
    """uint16 bits of "bf16" or "f16" -> float32."""
    return bits.view(F16).astype(F32) if kind == "f16" else (bits.astype(U32) << U32(16)).view(F32)


def from_float(v: Array, kind: str) -> Array:
    """float32 or float64 -> uint16 bits of "bf16" or "f16", rounded to nearest even."""
    if kind == "f16":
        return np.where(np.isnan(v), U16(0x7FFF), v.astype(F16).view(U16))
    bits = _to_odd(v) if v.dtype == F64 else np.ascontiguousarray(v).view(U32)
    rounded = ((bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16)).astype(U16)
    return np.where(np.isnan(v), U16(0x7FFF), rounded)


def _to_odd(v: Array) -> Array:
    """float64 -> float32 bits, rounded to odd, so that rounding them again does not round twice."""
    f = v.astype(F32)
    bits = f.view(U32)
    inexact = (f.astype(F64) != v) & ~np.isnan(v) & np.isfinite(f)
    away = np.abs(f.astype(F64)) > np.abs(v)
    return np.where(inexact, np.where(away, bits - U32(1), bits) | U32(1), bits)
