"""Kernels for a CPU, compiled by numba: a team of threads, products with few rows, and whole decoder layers.

A decoding step reads every weight once, so memory bandwidth limits it, if nothing else takes time. PyTorch spends half
of the step elsewhere: a layer is a dozen operators, and each fetches its code and wakes its threads again. Here the
threads run through all layers in one call and meet at barriers of their own.

`product` computes y = x W^T for up to MAX_ROWS rows. `_dots` is its tile: R rows of W times T rows of x, in vector
registers, so that each loaded value is used several times. W may be bfloat16 or `Quantized` beside a float32 x;
`_quantised_dots` turns eight or four bits into float32 in registers.

Determinism: the order of a sum depends only on its length, not on other rows, threads or tiles. A row of `product` and
of `_layers` has the same bits in any batch.

All compiled functions are in this file: numba's cache does not notice a change in another one.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils, config, event
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic
from torch import Tensor

from specker.kernels.quant import LEAST, Matrix, Quantized

MAX_ROWS = 256
SPINS = 50_000  # checks before a waiting thread sleeps, so that another process may run
PARTS = 2, 16  # of a matrix for each thread: its first one is 1/2 of its share, the others 1/16
ASKED = 2048  # bytes of the next part to prefetch
AHEAD = {1: 1, 4: 4}  # tiles between the rows in use and the prefetched ones, by the rows of a tile
_FEATURES = (get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES).split(",")
_WIDE, _HALVES = (name in _FEATURES for name in ("+avx512f", "+f16c"))  # vectors of 16; float16 conversions
_BFLOATS = all(name in _FEATURES for name in ("+avx512bf16", "+avx512bw"))  # products of bfloat16
LANES = 16 if _WIDE else 8  # float32 in a vector register
TALL, MOST = 4, 6 if _WIDE else 2  # rows of W and of x in a tile: TALL * MOST sums fit the registers
BLOCK = 16  # sums run in steps of so many elements
UNFOLD = 16  # rows of a quantised matrix whose scales are converted at once
TALL_FROM = 2  # rows of x from which a tile has TALL rows of a bfloat16 matrix; for fewer one stream is faster

F32, I8, I16, I32, I64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
V32, V16, V8 = (ir.VectorType(kind, LANES) for kind in (F32, I16, I8))
FLOAT32, BFLOAT16, INT8, FP8, INT4 = range(5)  # kinds of matrices


def compiled(function: Callable[..., Any]) -> Any:
    how = {"nogil": True, "error_model": "numpy", "fastmath": {"contract", "nsz", "arcp"}}
    try:
        return njit(cache=True, **how)(function)
    except RuntimeError:  # no folder for the cache is writable
        return njit(**how)(function)


class _Compiling(event.Listener):
    """Calls a function when numba begins to compile, once."""

    def __init__(self, tell: Callable[[], None]):
        self.tell: Callable[[], None] | None = tell

    def on_start(self, event: Any) -> None:
        if self.tell is not None:
            tell, self.tell = self.tell, None
            tell()

    def on_end(self, event: Any) -> None:
        pass


def on_compile(tell: Callable[[], None]) -> AbstractContextManager[Any]:
    """Context manager: calls `tell` once if a kernel is not in numba's cache and has to be compiled."""
    return event.install_listener("numba:compile", _Compiling(tell))


# --- instructions that numba lacks


def _at(builder: Any, base: Any, offset: Any, kind: Any) -> Any:
    """A pointer to `kind` at address `base` + `offset` elements."""
    size = {F32: 4, I16: 2, I64: 8, V32: 4, V16: 2, V8: 1}[kind]
    address = builder.add(base, builder.mul(offset, I64(size)))
    return builder.inttoptr(address, kind.as_pointer())


def _load(builder: Any, base: Any, offset: Any, narrow: bool = False) -> Any:
    """A vector of float32 at `base` + `offset` elements, which are bfloat16 if `narrow`."""
    if not narrow:
        return builder.load(_at(builder, base, offset, V32), align=4)
    bits = builder.load(_at(builder, base, offset, V16), align=2)
    wide = builder.zext(bits, ir.VectorType(I32, LANES))
    return builder.bitcast(builder.shl(wide, ir.Constant(wide.type, [16] * LANES)), V32)


def _prefetch(builder: Any, place: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    name = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(name, [builder.bitcast(place, I8.as_pointer()), I32(0), I32(3), I32(1)])  # to read, keep, data


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(V32, [V32] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32"), [a, b, c])


def _total(builder: Any, vector: Any) -> Any:
    """The sum of a vector's lanes, halves upon halves."""
    lanes = LANES
    while lanes > 1:
        lanes //= 2
        low, high = (ir.Constant(ir.VectorType(I32, lanes), list(range(at, at + lanes))) for at in (0, lanes))
        vector = builder.fadd(builder.shuffle_vector(vector, vector, low), builder.shuffle_vector(vector, vector, high))
    return builder.extract_element(vector, I32(0))


def _splat(builder: Any, value: Any) -> Any:
    one = builder.insert_element(ir.Constant(V32, ir.Undefined), value, I32(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, LANES), [0] * LANES))


def _loop(
    builder: Any, count: Any, step: int, sums: list[Any], body: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """for i in range(0, count, step): sums = body(i, sums). Returns the sums, vectors."""
    before, inside, after = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("done")
    builder.cbranch(builder.icmp_signed(">", count, I64(0)), inside, after)
    builder.position_at_end(inside)
    i, held = builder.phi(I64), [builder.phi(V32) for _ in sums]
    new = body(i, held)
    following = builder.add(i, I64(step))
    end = builder.block
    for phi, first, last in zip([i, *held], [I64(0), *sums], [following, *new], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(last, end)
    builder.cbranch(builder.icmp_signed("<", following, count), inside, after)
    builder.position_at_end(after)
    out = [builder.phi(V32) for _ in sums]
    for phi, first, last in zip(out, sums, new, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(last, end)
    return out


def _zeros(count: int) -> list[Any]:
    return [ir.Constant(V32, [0.0] * LANES)] * count


def _apart(builder: Any, name: str, args: Any, emit: Callable[..., None]) -> None:
    """Call the function `name`, whose body `emit(builder, *args)` writes, once per module: LLVM must not copy it to
    every caller."""
    function = builder.module.globals.get(name)
    if function is None:
        kind = ir.FunctionType(ir.VoidType(), [a.type for a in args])
        function = ir.Function(builder.module, kind, name)
        function.linkage = "linkonce_odr"
        function.attributes.add("noinline")
        inner = ir.IRBuilder(function.append_basic_block("entry"))
        emit(inner, *function.args)
        inner.ret_void()
    builder.call(function, args)


def _switch(builder: Any, key: Any, cases: dict[int, Callable[[], None]]) -> None:
    """Run cases[key]; nothing for another key."""
    after = builder.append_basic_block("end")
    switch = builder.switch(key, after)
    for value, emit in cases.items():
        block = builder.append_basic_block(f"case{value}")
        switch.add_case(I64(value), block)
        builder.position_at_end(block)
        emit()
        builder.branch(after)
    builder.position_at_end(after)


@intrinsic
def _dots(_, R, T, narrow, w, x, y, E, row_w, row_x, row_y):
    """y[t, r] = sum over e < E of w[r, e] x[t, e], for R in (1, TALL) rows of w and T <= MOST of x. E is a multiple of
    BLOCK; addresses in bytes, strides in elements."""

    def emit(builder: Any, rows: Any, count: Any, half: Any, w: Any, x: Any, y: Any, E: Any, *strides: Any) -> None:
        row_w, row_x, row_y = strides

        def tile(R: int, T: int, narrow: bool) -> None:
            def body(i: Any, held: list[Any]) -> list[Any]:
                a = [_load(builder, w, builder.add(builder.mul(I64(r), row_w), i), narrow) for r in range(R)]
                for r in range(R):
                    ahead = builder.add(builder.mul(I64(r + AHEAD[R] * R), row_w), i)
                    _prefetch(builder, _at(builder, w, ahead, I16 if narrow else F32))
                new = []
                for t in range(T):
                    b = _load(builder, x, builder.add(builder.mul(I64(t), row_x), i))
                    new += [_fma(builder, a[r], b, held[t * R + r]) for r in range(R)]
                return new

            for n, held in enumerate(_loop(builder, E, LANES, _zeros(R * T), body)):
                t, r = divmod(n, R)
                at = builder.add(builder.mul(I64(t), row_y), I64(r))
                builder.store(_total(builder, held), _at(builder, y, at, F32))

        key = builder.add(builder.mul(builder.add(builder.mul(rows, I64(16)), count), I64(2)), half)
        shapes = [(R, T, narrow) for R in (1, TALL) for T in range(1, MOST + 1) for narrow in (False, True)]
        _switch(builder, key, {(R * 16 + T) * 2 + narrow: partial(tile, R, T, narrow) for R, T, narrow in shapes})

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _apart(builder, "specker_dots", args, emit)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10), generate


def _numbers(builder: Any, kind: int, place: Any, half: int) -> Any:
    """A vector of q (quant.py) at a place, as float32; of int4 the low or the high half of each byte. fp8 is
    2^8 too small: its bits are those of a float16 with another bias."""
    wide = ir.VectorType(I32, LANES)
    bits = builder.load(place, align=1)
    if kind == INT8:
        return builder.sitofp(builder.sext(bits, wide), V32)
    if kind == FP8:
        shifted = builder.shl(builder.sext(bits, V16), ir.Constant(V16, [7] * LANES))
        halves = builder.and_(shifted, ir.Constant(V16, [0xBFFF] * LANES))
        return builder.fpext(builder.bitcast(halves, ir.VectorType(ir.HalfType(), LANES)), V32)
    fours = builder.zext(bits, wide)
    if half:
        return builder.uitofp(builder.lshr(fours, ir.Constant(wide, [4] * LANES)), V32)
    return builder.uitofp(builder.and_(fours, ir.Constant(wide, [15] * LANES)), V32)


def _looked_up(builder: Any, table: Any, place: Any, half: int) -> Any:
    """The numbers of a table of 16 that the low or high halves of 16 bytes name. One instruction of AVX-512, which
    ignores the higher bits."""
    wide = ir.VectorType(I32, LANES)
    index = builder.zext(builder.load(place, align=1), wide)
    if half:
        index = builder.lshr(index, ir.Constant(wide, [4] * LANES))
    kind = ir.FunctionType(V32, [V32, wide])
    name = "llvm.x86.avx512.permvar.sf.512"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [table, index])


@intrinsic
def _quantised_dots(_, R, T, kind, w, scales, to_shifts, x, y, E, group, row_w, row_x, row_y):
    """`_dots` for INT8, FP8 or INT4. scales: address of float32 [R, E / group], shifts `to_shifts` bytes further. row_w
    in bytes. Sums run in the order of `_dots`."""

    def emit(builder: Any, rows: Any, count: Any, kind: Any, *places: Any) -> None:
        w, scales, to_shifts, x, y, E, group, row_w, row_x, row_y = places
        groups, shifts = builder.udiv(E, group), builder.add(scales, to_shifts)

        def tile(R: int, T: int, kind: int) -> None:
            fours = kind == INT4
            step = 2 * BLOCK if fours else BLOCK

            def of_group(g: Any, held: list[Any]) -> list[Any]:
                factors = []
                for r in range(R):
                    at = builder.add(builder.mul(I64(r), groups), g)
                    both = [builder.load(_at(builder, base, at, F32)) for base in (scales, shifts)]
                    factors.append([_splat(builder, number) for number in both])
                if fours and _WIDE:
                    sixteen = ir.Constant(V32, [float(n) for n in range(16)])
                    tables = [_fma(builder, sixteen, *factors[r]) for r in range(R)]
                first = builder.mul(g, group)

                def of_block(i: Any, held: list[Any]) -> list[Any]:
                    e = builder.add(first, i)
                    bytes_ = builder.lshr(e, I64(1)) if fours else e
                    lines = [builder.add(builder.mul(I64(r), row_w), bytes_) for r in range(R)]
                    for r in range(R):
                        ahead = builder.add(builder.mul(I64(r + AHEAD[R] * R), row_w), bytes_)
                        _prefetch(builder, _at(builder, w, ahead, V8))
                    for n in range(step // LANES):
                        half, lane = divmod(n * LANES, BLOCK) if fours else (0, n * LANES)
                        new, a = [], []
                        for r in range(R):
                            place = _at(builder, w, builder.add(lines[r], I64(lane)), V8)
                            if fours and _WIDE:
                                a.append(_looked_up(builder, tables[r], place, half))
                            else:
                                a.append(_fma(builder, _numbers(builder, kind, place, half), *factors[r]))
                        for t in range(T):
                            at = builder.add(builder.mul(I64(t), row_x), builder.add(e, I64(n * LANES)))
                            b = _load(builder, x, at)
                            new += [_fma(builder, a[r], b, held[t * R + r]) for r in range(R)]
                        held = new
                    return held

                return _loop(builder, group, step, held, of_block)

            for n, held in enumerate(_loop(builder, groups, 1, _zeros(R * T), of_group)):
                t, r = divmod(n, R)
                at = builder.add(builder.mul(I64(t), row_y), I64(r))
                builder.store(_total(builder, held), _at(builder, y, at, F32))

        key = builder.add(builder.mul(builder.add(builder.mul(rows, I64(16)), count), I64(8)), kind)
        shapes = [(R, T, kind) for R in (1, TALL) for T in range(1, MOST + 1) for kind in (INT8, FP8, INT4)]
        _switch(builder, key, {(R * 16 + T) * 8 + kind: partial(tile, R, T, kind) for R, T, kind in shapes})

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _apart(builder, "specker_quantised_dots", args, emit)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 13), generate


class _BFloat(ir.types.Type):
    """LLVM's bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def _call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    kind = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


@intrinsic
def _half_dots(_, R, T, kind, w, scales, to_shifts, x, y, E, group, row_w, row_x, row_y):
    """y[t, r] = sum over e < E of w[r, e] x[t, e] by bfloat16 instructions of AVX-512: x is bfloat16, and so is w, of
    the kind BFLOAT16 or rounded from INT8, FP8 or INT4. E and group are multiples of 2 BLOCK; row_w is in bytes, and
    scales, to_shifts and the other strides are as in `_quantised_dots`."""
    halves, words = ir.VectorType(_BFloat(), 2 * LANES), ir.VectorType(I16, 2 * LANES)
    twice = ir.Constant(ir.VectorType(I32, 2 * LANES), [*range(LANES)] * 2)

    def emit(builder: Any, rows: Any, count: Any, kind: Any, *places: Any) -> None:
        w, scales, to_shifts, x, y, E, group, row_w, row_x, row_y = places
        shifts = builder.add(scales, to_shifts)

        def load(base: Any, offset: Any) -> Any:
            """2 BLOCK bfloat16 at a base + `offset` bytes."""
            address = builder.inttoptr(builder.add(base, offset), words.as_pointer())
            return builder.bitcast(builder.load(address, align=2), halves)

        def tile(R: int, T: int, kind: int) -> None:
            def of_block(e: Any, tables: list[Any], factors: list[Any], held: list[Any]) -> list[Any]:
                wide = {BFLOAT16: builder.shl(e, I64(1)), INT4: builder.lshr(e, I64(1))}.get(kind, e)
                lines = [builder.add(builder.mul(I64(r), row_w), wide) for r in range(R)]
                for r in range(R):
                    ahead = builder.add(builder.mul(I64(r + AHEAD[R] * R), row_w), wide)
                    _prefetch(builder, _at(builder, w, ahead, V8))
                a = []
                for r in range(R):
                    place = _at(builder, w, lines[r], V8)
                    if kind == BFLOAT16:
                        a.append(load(w, lines[r]))
                    elif kind == INT4:
                        bytes_ = builder.zext(builder.load(place, align=1), V16)
                        both = builder.shuffle_vector(bytes_, bytes_, twice)
                        index = builder.lshr(both, ir.Constant(words, [0] * LANES + [4] * LANES))
                        found = _call(builder, "llvm.x86.avx512.permvar.hi.512", words, tables[r], index)
                        a.append(builder.bitcast(found, halves))
                    else:
                        further = _at(builder, w, builder.add(lines[r], I64(LANES)), V8)
                        low, high = (_numbers(builder, kind, at, 0) for at in (place, further))
                        low, high = (_fma(builder, numbers, *factors[r]) for numbers in (low, high))
                        a.append(_call(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", halves, high, low))
                new = []
                for t in range(T):
                    b = load(x, builder.shl(builder.add(builder.mul(I64(t), row_x), e), I64(1)))
                    name = "llvm.x86.avx512bf16.dpbf16ps.512"
                    new += [_call(builder, name, V32, held[t * R + r], a[r], b) for r in range(R)]
                return new

            def of_group(g: Any, held: list[Any]) -> list[Any]:
                groups, factors, tables = builder.udiv(E, group), [], []
                for r in range(R):
                    at = builder.add(builder.mul(I64(r), groups), g)
                    both = [builder.load(_at(builder, base, at, F32)) for base in (scales, shifts)]
                    factors.append([_splat(builder, number) for number in both])
                    if kind == INT4:
                        table = _fma(builder, ir.Constant(V32, [float(n) for n in range(16)]), *factors[r])
                        half = ir.VectorType(_BFloat(), LANES)
                        bits = builder.bitcast(_call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", half, table), V16)
                        tables.append(builder.shuffle_vector(bits, bits, twice))
                first = builder.mul(g, group)

                def inner(i: Any, held: list[Any]) -> list[Any]:
                    return of_block(builder.add(first, i), tables, factors, held)

                return _loop(builder, group, 2 * BLOCK, held, inner)

            if kind == BFLOAT16:
                sums = _loop(builder, E, 2 * BLOCK, _zeros(R * T), lambda e, held: of_block(e, [], [], held))
            else:
                sums = _loop(builder, builder.udiv(E, group), 1, _zeros(R * T), of_group)
            for n, held in enumerate(sums):
                t, r = divmod(n, R)
                at = builder.add(builder.mul(I64(t), row_y), I64(r))
                builder.store(_total(builder, held), _at(builder, y, at, F32))

        if not _BFLOATS:
            return
        key = builder.add(builder.mul(builder.add(builder.mul(rows, I64(16)), count), I64(8)), kind)
        kinds = BFLOAT16, INT8, FP8, INT4
        shapes = [(R, T, kind) for R in (1, TALL) for T in range(1, MOST + 1) for kind in kinds]
        _switch(builder, key, {(R * 16 + T) * 8 + kind: partial(tile, R, T, kind) for R, T, kind in shapes})

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _apart(builder, "specker_half_dots", args, emit)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 13), generate


@intrinsic
def _restored(_, kind, w, scales, shifts, y, E, group):
    """A row of E weights of kind INT8, FP8 or INT4 in float32. scales, shifts: addresses of float32 [E / group]."""

    def emit(builder: Any, kind: Any, w: Any, scales: Any, shifts: Any, y: Any, E: Any, group: Any) -> None:
        groups = builder.udiv(E, group)

        def row(kind: int) -> None:
            fours = kind == INT4
            step = 2 * BLOCK if fours else BLOCK

            def of_group(g: Any, held: list[Any]) -> list[Any]:
                both = [builder.load(_at(builder, base, g, F32)) for base in (scales, shifts)]
                factors = [_splat(builder, number) for number in both]

                def of_block(i: Any, held: list[Any]) -> list[Any]:
                    e = builder.add(builder.mul(g, group), i)
                    for n in range(step // LANES):
                        half, lane = divmod(n * LANES, BLOCK) if fours else (0, n * LANES)
                        bytes_ = builder.add(builder.lshr(e, I64(1)) if fours else e, I64(lane))
                        numbers = _numbers(builder, kind, _at(builder, w, bytes_, V8), half)
                        place = _at(builder, y, builder.add(e, I64(n * LANES)), V32)
                        builder.store(_fma(builder, numbers, *factors), place, align=4)
                    return []

                return _loop(builder, group, step, [], of_block)

            _loop(builder, groups, 1, [], of_group)

        _switch(builder, kind, {kind: partial(row, kind) for kind in (INT8, FP8, INT4)})

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _apart(builder, "specker_restored", args, emit)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


@intrinsic
def _narrow(_, source, target, count):
    """`count` float32 at one address, a multiple of BLOCK, rounded to bfloat16 at another."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, target, count = args
        wide = ir.VectorType(I32, LANES)

        def body(i: Any, held: list[Any]) -> list[Any]:
            if _BFLOATS:
                half = ir.VectorType(_BFloat(), LANES)
                halves = _call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", half, _load(builder, source, i))
                builder.store(builder.bitcast(halves, V16), _at(builder, target, i, V16), align=2)
                return []
            bits = builder.bitcast(_load(builder, source, i), wide)
            odd = builder.and_(builder.lshr(bits, ir.Constant(wide, [16] * LANES)), ir.Constant(wide, [1] * LANES))
            rounded = builder.add(bits, builder.add(odd, ir.Constant(wide, [0x7FFF] * LANES)))  # to nearest, even
            halves = builder.trunc(builder.lshr(rounded, ir.Constant(wide, [16] * LANES)), V16)
            builder.store(halves, _at(builder, target, i, V16), align=2)
            return []

        _loop(builder, count, LANES, [], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def _widen(_, source, target, count, factor):
    """target[i] = source[i] * factor: `count` float16 at one address to float32 at another."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, target, count, factor = args
        vectors = builder.and_(count, I64(-LANES))
        halves, half = ir.VectorType(ir.HalfType(), LANES), ir.HalfType()

        def body(i: Any, held: list[Any]) -> list[Any]:
            bits = builder.load(_at(builder, source, i, V16), align=2)
            wide = builder.fpext(builder.bitcast(bits, halves), V32)
            builder.store(builder.fmul(wide, _splat(builder, factor)), _at(builder, target, i, V32), align=4)
            return []

        def one(i: Any, held: list[Any]) -> list[Any]:
            i = builder.add(vectors, i)
            wide = builder.fpext(builder.bitcast(builder.load(_at(builder, source, i, I16)), half), F32)
            builder.store(builder.fmul(wide, factor), _at(builder, target, i, F32))
            return []

        _loop(builder, vectors, LANES, [], body)
        _loop(builder, builder.sub(count, vectors), 1, [], one)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.float32), generate


@intrinsic
def _mixture(_, T, p, v, y, S, row_p, row_v, row_y):
    """y[t, d] += sum over s < S of p[t, s] v[s, d], for T <= MOST rows and d < BLOCK; addresses in bytes, strides in
    elements. Adds to y one s after the other, so that terms of 0 change nothing, wherever they are."""
    parts = BLOCK // LANES

    def emit(builder: Any, count: Any, p: Any, v: Any, y: Any, S: Any, *strides: Any) -> None:
        row_p, row_v, row_y = strides

        def tile(T: int) -> None:
            def body(i: Any, held: list[Any]) -> list[Any]:
                base = builder.mul(i, row_v)
                a = [_load(builder, v, builder.add(base, I64(n * LANES))) for n in range(parts)]
                new = []
                for t in range(T):
                    at = builder.add(builder.mul(I64(t), row_p), i)
                    b = _splat(builder, builder.load(_at(builder, p, at, F32)))
                    new += [_fma(builder, a[n], b, held[t * parts + n]) for n in range(parts)]
                return new

            rows = [builder.mul(I64(t), row_y) for t in range(T)]
            places = [
                _at(builder, y, builder.add(row, I64(part * LANES)), V32) for row in rows for part in range(parts)
            ]
            sums = _loop(builder, S, 1, [builder.load(place, align=4) for place in places], body)
            for place, held in zip(places, sums, strict=True):
                builder.store(held, place, align=4)

        _switch(builder, count, {T: partial(tile, T) for T in range(1, MOST + 1)})

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _apart(builder, "specker_mixture", args, emit)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), generate


@intrinsic
def _squares(_, x, count):
    """The sum of the squares of `count` float32 at address x, a multiple of BLOCK."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, count = args

        def body(i: Any, held: list[Any]) -> list[Any]:
            value = _load(builder, x, i)
            return [_fma(builder, value, value, held[0])]

        return _total(builder, _loop(builder, count, LANES, _zeros(1), body)[0])

    return types.float32(types.int64, types.int64), generate


@intrinsic
def _add(_, address, value):
    """Atomically add to the int64 at an address; returns the old value."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], I64.as_pointer()), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _read(_, address):
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def _write(_, address, value):
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], builder.inttoptr(args[0], I64.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _power(_, n):
    """2^n as float32, for -127 <= n <= 127; 0 for -127."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.shl(builder.add(args[0], I32(127)), I32(23)), F32)

    return types.float32(types.int32), generate


@intrinsic
def _fetch(_, address):
    """Start to read the cache line at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _prefetch(builder, builder.inttoptr(args[0], I8.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def _floats(_, address):
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], F32.as_pointer())

    return types.CPointer(types.float32)(types.int64), generate


_sleep = types.ExternalFunction("usleep", types.int32(types.uint32))


# --- a team of threads


@compiled
def _meet(team, sync):
    """Wait for all threads of the team; then the work counter is 0. sync: address of four int64, each on its own cache
    line: the work counter, how many threads have arrived, the number of meetings, whether the work is given up."""
    if team == 1:
        _write(sync, 0)
        return
    meeting = _read(sync + 128)
    if _add(sync + 64, 1) == team - 1:
        _write(sync, 0)
        _write(sync + 64, 0)
        _write(sync + 128, meeting + 1)
        return
    spins = 0
    while _read(sync + 128) == meeting:
        spins += 1
        if spins > SPINS:
            if _read(sync + 192):
                return
            _sleep(np.uint32(20))  # a thread that slept runs soon after; one that yields waits for a whole time slice


def _cpus() -> set[int]:
    """The CPUs of all threads of this process; empty where the system does not tell. OpenMP may bind each of its
    threads, and the calling one, to a CPU (OMP_PROC_BIND, KMP_AFFINITY), which new threads would inherit."""
    tasks = Path("/proc/self/task")
    if not tasks.is_dir() or not hasattr(os, "sched_getaffinity"):
        return set()
    found: set[int] = set()
    for task in tasks.iterdir():
        with suppress(OSError):  # the thread has ended
            found |= os.sched_getaffinity(int(task.name))
    return found


class Team:
    """Threads that run a compiled function together: the caller and `size` - 1 others, which sleep in between."""

    def __init__(self, size: int):
        self.size, self.pid = size, os.getpid()
        self.memory: Any = np.zeros(4 * 8, np.int64)
        self.sync = self.memory.ctypes.data
        self._work: Any = None
        self._lock = threading.Lock()
        self._cpus = _cpus()
        self._gates = [threading.Lock() for _ in range(size - 1)]
        for n, gate in enumerate(self._gates, 1):
            gate.acquire()
            threading.Thread(target=self._serve, args=(n, gate), daemon=True).start()

    def _serve(self, n: int, gate: Any) -> None:
        if self._cpus:
            os.sched_setaffinity(0, self._cpus)
        while True:
            gate.acquire()
            function, args = self._work
            function(n, self.size, self.sync, *args)

    def run(self, function: Any, *args: Any) -> None:
        """function(n, size, sync, *args) in thread n of all. It must end with `_meet`."""
        with self._lock:
            self._work = function, args
            try:
                for gate in self._gates:
                    gate.release()
                function(0, self.size, self.sync, *args)
            except BaseException:  # Ctrl-C before this thread took part: the others would wait for it
                self.memory[24] = 1
                _team.cache_clear()
                raise


@cache
def _team(size: int, pid: int) -> Team:
    return Team(size)


_asked = threading.local()


def team() -> Team:
    """The team of this process with torch's number of threads."""
    return _team(getattr(_asked, "threads", 0) or torch.get_num_threads(), os.getpid())


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Let torch's operators run in the calling thread only; the team keeps its size. Torch's other threads spin for
    some milliseconds after each operator, on the cores that the team needs."""
    before, outer = torch.get_num_threads(), getattr(_asked, "threads", 0)
    _asked.threads = outer or before
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _asked.threads = outer


# --- products with few rows


@compiled
def _rows(w, x, y, R, T, narrow, E, row_w, row_x, row_y):
    """`_dots` for R weight rows and T rows of x, any numbers."""
    size = np.int64(2 if narrow else 4)
    tiles = (T + MOST - 1) // MOST
    for r in range(0, R, TALL):
        least = 6 if narrow else 3  # with fewer rows of x the tile waits for memory, which likes one stream
        tall = R - r >= TALL and least <= T
        for i in range(r, min(r + TALL, R), TALL if tall else 1):
            for n in range(tiles):  # of about equal height
                first, last = n * T // tiles, (n + 1) * T // tiles
                _dots(
                    TALL if tall else 1,
                    last - first,
                    narrow,
                    w + i * row_w * size,
                    x + first * row_x * 4,
                    y + (first * row_y + i) * 4,
                    E,
                    row_w,
                    row_x,
                    row_y,
                )


# A matrix [O, E] as eight int64: address, kind, bytes of a row; of a quantised one also the columns of a group, the
# addresses of scales and shifts (0: none), and whether those are float32; last, whether to multiply in bfloat16.
PLACE, KIND, LINE, GROUP, SCALE, SHIFT, WIDE, ROUNDS = range(8)


@compiled
def _unfold(m, row, count, groups, room):
    """Scales and shifts of `count` rows in float32: room [2, count, groups]."""
    n = count * groups
    scales, shifts = _floats(room), _floats(room + n * 4)
    factor = np.float32(256 if m[KIND] == FP8 else 1)  # see `_numbers`
    if m[WIDE]:
        source = _floats(m[SCALE] + row * groups * 4)
        for i in range(n):
            scales[i] = source[i] * factor
    else:
        _widen(m[SCALE] + row * groups * 2, room, n, factor)
    if m[SHIFT] == 0:
        middle = np.float32(-8 if m[KIND] == INT4 else 0)
        for i in range(n):
            shifts[i] = scales[i] * middle
    elif m[WIDE]:
        source = _floats(m[SHIFT] + row * groups * 4)
        for i in range(n):
            shifts[i] = source[i]
    else:
        _widen(m[SHIFT] + row * groups * 2, room + n * 4, n, np.float32(1))


@compiled
def _times(m, row, x, y, R, T, E, row_x, row_y, room):
    """y[t, r] = row `row` + r of matrix m times x[t], for R rows of the matrix and T of x, float32 or, with ROUNDS,
    bfloat16. room: address of this thread's memory, see `_room`."""
    kind, half, group, line = m[KIND], m[ROUNDS] != 0, m[GROUP], m[LINE]
    if kind <= BFLOAT16 and not half:
        _rows(m[PLACE] + row * line, x, y, R, T, kind, E, E, row_x, row_y)
        return
    tiles, size = (T + MOST - 1) // MOST, np.int64(2 if half else 4)
    groups = 0 if kind == BFLOAT16 else E // group
    for start in range(0, R, UNFOLD):
        rows, i = min(UNFOLD, R - start), 0
        if groups:
            _unfold(m, row + start, rows, groups, room)
        while i < rows:
            count = TALL if rows - i >= TALL and (groups or T >= TALL_FROM) else 1
            place = m[PLACE] + (row + start + i) * line
            scales, to_shifts = room + i * groups * 4, rows * groups * 4
            at = y + (start + i) * 4
            for n in range(tiles):
                first, last = n * T // tiles, (n + 1) * T // tiles
                rows_x, rows_y = x + first * row_x * size, at + first * row_y * 4
                c, t = count, last - first
                if half:
                    _half_dots(c, t, kind, place, scales, to_shifts, rows_x, rows_y, E, group, line, row_x, row_y)
                else:
                    _quantised_dots(c, t, kind, place, scales, to_shifts, rows_x, rows_y, E, group, line, row_x, row_y)
            i += count


@compiled
def _as_factor(m, x, T, E, row_x, room):
    """The rows of x [T, E] as `_times` takes them for matrix m: (address, stride). With ROUNDS they are rounded to
    bfloat16 in this thread's room, behind the scales."""
    if m[ROUNDS] == 0:
        return x, row_x
    groups = 0 if m[KIND] == BFLOAT16 else E // m[GROUP]
    target = room + 2 * UNFOLD * groups * 4
    for t in range(T):
        _narrow(x + t * row_x * 4, target + t * E * 2, E)
    return target, np.int64(E)


@compiled
def _chunk(O, parts):
    """Rows in one of `parts` parts of a matrix: 16 at least, a multiple of TALL."""
    return max(16, (O + parts * TALL - 1) // (parts * TALL) * TALL)


@compiled
def _parts(O, size):
    """Rows of a matrix that one of `size` threads takes first, and then at once. A part is a stream from memory that
    starts with a wait, so the first is long; the others are short, because one thread may be slower."""
    return _chunk(O, PARTS[0] * size), _chunk(O, PARTS[1] * size)


@compiled
def _ask(m, row, O, E):
    """Prefetch where the rows from `row` on of matrix m [O, E] begin: their numbers, scales and shifts."""
    if row >= O:
        return
    place = m[PLACE] + row * m[LINE]
    for i in range(0, min(ASKED, (O - row) * m[LINE]), 64):
        _fetch(place + i)
    if m[GROUP]:
        groups = E // m[GROUP] * (4 if m[WIDE] else 2)
        for i in range(0, min(UNFOLD, O - row) * groups, 64):
            _fetch(m[SCALE] + row * groups + i)
            if m[SHIFT]:
                _fetch(m[SHIFT] + row * groups + i)


@compiled
def _share(me, size, sync, m, x, y, O, T, E, row_x, row_y, room):
    """This thread's parts of y [T, O] = x W^T: part `me`, then those that no other thread has taken."""
    x, row_x = _as_factor(m, x, T, E, row_x, room)
    count, part = _parts(O, size)
    first, rest = me * count, size * count
    while first < O:
        then = rest + _add(sync, 1) * part
        _ask(m, then, O, E)
        _times(m, first, x, y + first * 4, min(count, O - first), T, E, row_x, row_y, room)
        first, count = then, part


@compiled
def _product(me, size, sync, m, x, y, room, own, O, T, E):
    """room: address of `own` float32 for each thread."""
    _share(me, size, sync, m, x, y, O, T, E, E, O, room + me * own * 4)
    _meet(size, sync)


@compiled
def _restore(me, size, sync, m, y, room, own, O, E, narrow):
    """The quantised matrix m in float32 or, if `narrow`, rounded to bfloat16: y [O, E]."""
    groups, room = E // m[GROUP], room + me * own * 4
    full = room + 2 * UNFOLD * groups * 4
    while True:
        first = _add(sync, 1) * UNFOLD
        if first >= O:
            break
        rows = min(UNFOLD, O - first)
        _unfold(m, first, rows, groups, room)
        for r in range(rows):
            o, scales = first + r, room + r * groups * 4
            to = full if narrow else y + o * E * 4
            _restored(m[KIND], m[PLACE] + o * m[LINE], scales, scales + rows * groups * 4, to, E, m[GROUP])
            if narrow:
                _narrow(full, y + o * E * 2, E)
    _meet(size, sync)


# --- whole decoder layers


NORM_IN, QKV, QKV_BIAS, Q_NORM, K_NORM, O, O_BIAS, NORM_POST, GATE_UP, GATE_UP_BIAS, DOWN, DOWN_BIAS = range(12)
MATRICES = QKV, O, GATE_UP, DOWN


@compiled
def _exp(x):
    """exp(x) for x <= 0 within 2e-7; 0 below -87."""
    t = max(x * np.float32(1.4426950408889634), np.float32(-127))
    n = np.floor(t + np.float32(0.5))
    f = t - n
    p = np.float32(1.5469732e-4)  # 2^f on [-0.5, 0.5], a fit at Chebyshev nodes
    p = p * f + np.float32(1.3400432e-3)
    p = p * f + np.float32(9.6180256e-3)
    p = p * f + np.float32(5.5503272e-2)
    p = p * f + np.float32(2.4022651e-1)
    p = p * f + np.float32(6.9314721e-1)
    p = p * f + np.float32(1)
    return p * _power(np.int32(n))


@compiled
def _normed(x, y, weight, T, E, eps):
    """y = RMSNorm(x) * weight, [T, E] float32 at addresses."""
    w = _floats(weight)
    for t in range(T):
        a, b = _floats(x + t * E * 4), _floats(y + t * E * 4)
        factor = np.float32(1) / np.sqrt(_squares(x + t * E * 4, E) / np.float32(E) + eps)
        for e in range(E):
            b[e] = a[e] * factor * w[e]


@compiled
def _grow(x, delta, bias, T, E):
    """x += delta + bias, [T, E] and [E] at addresses; bias may be 0."""
    for t in range(T):
        a, b = _floats(x + t * E * 4), _floats(delta + t * E * 4)
        if bias:
            c = _floats(bias)
            for e in range(E):
                a[e] += b[e] + c[e]
        else:
            for e in range(E):
                a[e] += b[e]


@compiled
def _rotated(source, target, norm, turn, D, eps):
    """Normalise a head (with weight `norm`, unless it is 0) and rotate it by `turn` [2, D] (kernels/kv.py)."""
    a, b, c = _floats(source), _floats(target), _floats(turn)
    if norm:
        _normed(source, source, norm, 1, D, eps)
    for d in range(D // 2):
        low, high = a[d], a[D // 2 + d]
        b[d] = low * c[d] + high * c[D + d]
        b[D // 2 + d] = high * c[D // 2 + d] + low * c[D + D // 2 + d]


@compiled
def _attend(q, k, v, out, room, rows, heads, S, w, words, row_q, row_out, row_k, pages, page, D, scale):
    """Attention of the query heads that share a KV head, for the rows of a sequence (kernels/attention.py). q, out:
    addresses of the first row's first head; k, v: of the head in the cache; room: of BLOCK + n * (2 * D + BLOCK + S)
    float32 with n = rows * heads and S rounded up to BLOCK.

    A row's sums run over the columns in order, and masked columns add 0. So a tree's row has the bits of the same
    token in a chain, although other nodes lie between its ancestors."""
    n, wide, row = rows * heads, (S + BLOCK - 1) // BLOCK * BLOCK, D + BLOCK  # of sums: D of p v, then one of p
    ones, gathered, sums = room, room + BLOCK * 4, room + (BLOCK + n * D) * 4
    p = sums + n * row * 4
    a = _floats(ones)
    for i in range(BLOCK):
        a[i] = 1
    for i in range(n):
        a = _floats(q + ((i // heads) * row_q + (i % heads) * D) * 4)
        b, c = _floats(gathered + i * D * 4), _floats(sums + i * row * 4)
        for d in range(D):
            b[d] = a[d]
        for d in range(row):
            c[d] = 0
    for first in range(0, S, page):
        count = min(page, S - first)
        base = k + np.int64(pages[first // page]) * page * row_k * 4
        _rows(base, gathered, p + first * 4, count, n, 0, D, row_k, D, wide)
    for i in range(n):
        a = _floats(p + i * wide * 4)
        for j in range(w):
            if not (words[i // heads, j // 64] >> (j % 64)) & 1:
                a[S - w + j] = -np.inf
        top = np.float32(-np.inf)
        for j in range(S):
            top = max(top, a[j])
        for j in range(S):
            a[j] = _exp((a[j] - top) * scale)
        for j in range(S, wide):
            a[j] = 0
    tiles = (n + MOST - 1) // MOST
    for first in range(0, S, page):
        count = min(page, S - first)
        base = v + np.int64(pages[first // page]) * page * row_k * 4
        for tile in range(tiles):
            low, high = tile * n // tiles, (tile + 1) * n // tiles
            at, to = p + (low * wide + first) * 4, sums + low * row * 4
            for d in range(0, D, BLOCK):
                _mixture(high - low, at, base + d * 4, to + d * 4, count, wide, row_k, row)
            _mixture(high - low, at, ones, to + D * 4, count, wide, 0, row)
    for i in range(n):
        a, b = _floats(out + ((i // heads) * row_out + (i % heads) * D) * 4), _floats(sums + i * row * 4)
        factor = np.float32(1) / b[D]
        for d in range(D):
            a[d] = b[d] * factor


@compiled
def _layers(
    me,
    size,
    sync,
    sizes,
    weights,
    matrices,
    kv,
    groups,
    taps,
    x,
    out,
    scratch,
    rope,
    places,
    seqs,
    words,
    table,
    eps,
    scale,
):
    """Thread `me` of `size` runs groups of layers; see `Stack.run`.

    sizes: T, E, Hq, Hkv, D, F, page size, longest sequence, float32 that a thread needs for factors. weights [L, 12]:
    addresses of vectors; matrices [L, 12, 8]. kv: addresses of layer 0's K and V, and the bytes from a layer
    to the next. groups [n + 1]: the first layer of each group, and the
    end. x [T, E]; out [1 + taps, T, E]. places [2, T]: positions, slots. seqs [3, B + 1]: cu_rows, kv_len, window.
    words [T, W], table [B, P]. Every thread keeps the residual stream.
    """
    T, E, Hq, Hkv, D, F, page, longest, unfolded = sizes
    H = Hq + 2 * Hkv
    wide = (longest + BLOCK - 1) // BLOCK * BLOCK
    B, most = len(seqs[0]) - 1, groups[1] - groups[0]
    for g in range(len(groups) - 1):
        most = max(most, groups[g + 1] - groups[g])
    own = unfolded + 2 * T * E + BLOCK + T * Hq // Hkv * (2 * D + BLOCK + wide)  # float32 of each thread
    shared = scratch + size * own * 4
    scales = scratch + me * own * 4
    stream = scales + unfolded * 4
    normed, room = stream + T * E * 4, stream + 2 * T * E * 4
    qkv = shared
    mixed = qkv + most * T * H * D * 4
    added = mixed + most * T * Hq * D * 4
    gate = added + most * T * E * 4
    up = gate + T * F * 4
    a = carray(_floats(stream), (T, E))
    a[:] = x
    for g in range(len(groups) - 1):
        first, last = groups[g], groups[g + 1]
        if me == 0:
            for i in range(len(taps)):
                if taps[i] == first:
                    out[1 + i] = a
        for n in range(first, last):
            _normed(stream, normed, weights[n, NORM_IN], T, E, eps)
            at = qkv + (n - first) * T * H * D * 4
            _share(me, size, sync, matrices[n, QKV], normed, at, H * D, T, E, E, H * D, scales)
            _meet(size, sync)
        for i in range(me, (last - first) * T * H, size):
            n, t, h = first + i // (T * H), i // H % T, i % H
            head = qkv + i * D * 4
            if weights[n, QKV_BIAS]:
                _grow(head, weights[n, QKV_BIAS] + h * D * 4, 0, 1, D)
            turn, place = rope + places[0, t] * 2 * D * 4, places[1, t] * Hkv
            if h < Hq:
                _rotated(head, head, weights[n, Q_NORM], turn, D, eps)
            elif h < Hq + Hkv:
                _rotated(head, kv[0] + n * kv[2] + (place + h - Hq) * D * 4, weights[n, K_NORM], turn, D, eps)
            else:
                b, c = _floats(head), _floats(kv[1] + n * kv[2] + (place + h - Hq - Hkv) * D * 4)
                for d in range(D):
                    c[d] = b[d]
        _ask(matrices[first, O], me * _parts(E, size)[0], E, Hq * D)
        _meet(size, sync)
        while True:
            i = _add(sync, 1)
            if i >= (last - first) * B * Hkv:
                break
            n, b, h = i // (B * Hkv), i // Hkv % B, i % Hkv
            t, end = seqs[0, b], seqs[0, b + 1]
            if t < end:
                heads = Hq // Hkv
                _attend(
                    qkv + ((n * T + t) * H + h * heads) * D * 4,
                    kv[0] + (first + n) * kv[2] + h * D * 4,
                    kv[1] + (first + n) * kv[2] + h * D * 4,
                    mixed + ((n * T + t) * Hq + h * heads) * D * 4,
                    room,
                    end - t,
                    heads,
                    seqs[1, b],
                    seqs[2, b],
                    words[t:end],
                    H * D,
                    Hq * D,
                    Hkv * D,
                    table[b],
                    page,
                    D,
                    scale,
                )
        _meet(size, sync)
        for n in range(first, last):
            source, target = mixed + (n - first) * T * Hq * D * 4, added + (n - first) * T * E * 4
            _share(me, size, sync, matrices[n, O], source, target, E, T, Hq * D, Hq * D, E, scales)
            _ask(matrices[n, GATE_UP], me * _parts(F, size)[0], F, E)
            _meet(size, sync)
        for n in range(first, last):
            _grow(stream, added + (n - first) * T * E * 4, weights[n, O_BIAS], T, E)
            _normed(stream, normed, weights[n, NORM_POST], T, E, eps)
            _mlp(me, size, sync, weights[n], matrices[n], normed, gate, up, added, T, E, F, scales)
            if n + 1 < len(matrices):
                _ask(matrices[n + 1, QKV], me * _parts(H * D, size)[0], H * D, E)
            _meet(size, sync)
            _grow(stream, added, weights[n, DOWN_BIAS], T, E)
    if me == 0:
        out[0] = a
        for i in range(len(taps)):
            if taps[i] == groups[-1]:
                out[1 + i] = a
    _meet(size, sync)


@compiled
def _mlp(me, size, sync, weights, matrices, x, gate, up, y, T, E, F, scales):
    """y = down(silu(gate(x)) * up(x)), without the last bias. x: this thread's copy."""
    both = matrices[GATE_UP]
    most, part = _parts(F, size)
    rows, row_x = _as_factor(both, x, T, E, E, scales)
    i, rest = me * most, size * most
    while i < F:
        then = rest + _add(sync, 1) * part
        count = min(most, F - i)
        _ask(both, F + i, 2 * F, E)
        _times(both, i, rows, gate + i * 4, count, T, E, row_x, F, scales)
        _ask(both, then, F, E)
        _times(both, F + i, rows, up + i * 4, count, T, E, row_x, F, scales)
        for t in range(T):
            a, b = _floats(gate + (t * F + i) * 4), _floats(up + (t * F + i) * 4)
            if weights[GATE_UP_BIAS]:
                _grow(gate + (t * F + i) * 4, weights[GATE_UP_BIAS] + i * 4, 0, 1, count)
                _grow(up + (t * F + i) * 4, weights[GATE_UP_BIAS] + (F + i) * 4, 0, 1, count)
            for j in range(count):
                z = a[j]
                e = _exp(-abs(z))  # of a number that is not positive: no overflow
                a[j] = z * b[j] * (np.float32(1) if z >= 0 else e) / (np.float32(1) + e)
        i, most = then, part
    _ask(matrices[DOWN], me * _parts(E, size)[0], E, F)
    _meet(size, sync)
    _share(me, size, sync, matrices[DOWN], gate, y, E, T, F, F, E, scales)


@compiled
def _head(me, size, sync, x, norm, m, scratch, own, y, T, O, E, eps):
    """y [T, O] = RMSNorm(x) * norm W^T; scratch holds `own` float32 for each thread, a normalised copy [T, E] first."""
    copy = scratch + me * own * 4
    _normed(x, copy, norm, T, E, eps)
    _share(me, size, sync, m, copy, y, O, T, E, E, O, copy + T * E * 4)
    _meet(size, sync)


# --- noise


M0, M1, LOW = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57), np.uint64(0xFFFFFFFF)
W0, W1, HALF = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85), np.uint64(32)


@compiled
def _log(x, less):
    """The natural logarithm of 1 - less, which is x > 0 up to rounding; see kernels/noise.py."""
    i = np.float32(x).view(np.int32) - np.int32(0x3F3504F3)  # sqrt(1/2)
    e = np.float32(i >> 23)
    m = np.int32((i & np.int32(0x7FFFFF)) + np.int32(0x3F3504F3)).view(np.float32) - np.float32(1)
    if e == 0 and less < 0.5:
        m = -less
    y = m * np.float32(7.0376836292e-2) + np.float32(-1.1514610310e-1)
    y = y * m + np.float32(1.1676998740e-1)
    y = y * m + np.float32(-1.2420140846e-1)
    y = y * m + np.float32(1.4249322787e-1)
    y = y * m + np.float32(-1.6668057665e-1)
    y = y * m + np.float32(2.0000714765e-1)
    y = y * m + np.float32(-2.4999993993e-1)
    y = y * m + np.float32(3.3333331174e-1)
    square = m * m
    y = e * np.float32(-2.12194440e-4) + y * m * square
    y = square * np.float32(-0.5) + y
    return e * np.float32(0.693359375) + (m + y)


@compiled
def gumbel(out, positions, stream, seed):
    """out [T, n, 4] float32: the noise of ids 0 .. 4 n - 1 at positions [T]; see kernels/noise.py. positions, stream,
    seed: uint64. In one thread: torch's own, once woken, spin for a while and slow down the team."""
    for t in range(len(positions)):
        low, high = positions[t] & LOW, positions[t] >> HALF
        for j in range(out.shape[1]):
            c0, c1, c2, c3 = np.uint64(j), low, high, stream
            k0, k1 = seed & LOW, seed >> HALF
            for _ in range(10):
                a, b = c0 * M0, c2 * M1
                c0, c2 = (b >> HALF) ^ c1 ^ k0, (a >> HALF) ^ c3 ^ k1
                c1, c3 = b & LOW, a & LOW
                k0, k1 = (k0 + W0) & LOW, (k1 + W1) & LOW
            out[t, j, 0], out[t, j, 1] = np.float32(np.uint32(c0)), np.float32(np.uint32(c1))
            out[t, j, 2], out[t, j, 3] = np.float32(np.uint32(c2)), np.float32(np.uint32(c3))
        row = out[t].reshape(-1)
        for i in range(len(row)):
            u = min((row[i] + np.float32(0.5)) * np.float32(2.0**-32), np.float32(1 - 2.0**-24))
            x = -_log(np.float32(1) - u, u)
            row[i] = -_log(x, np.float32(1))


_KINDS = {
    torch.float32: FLOAT32,
    torch.bfloat16: BFLOAT16,
    torch.int8: INT8,
    torch.float8_e4m3fn: FP8,
    torch.uint8: INT4,
}


def _described(weight: Matrix, half: bool) -> list[int]:
    """The eight numbers of a matrix [O, E]. `half`: multiply in bfloat16 if the CPU and the sizes allow."""
    half = half and _BFLOATS and weight.shape[-1] % (2 * BLOCK) == 0
    if isinstance(weight, Tensor):
        own = half and weight.dtype == torch.bfloat16
        return [weight.data_ptr(), _KINDS[weight.dtype], weight.shape[-1] * weight.element_size(), 0, 0, 0, 0, int(own)]
    q, scale, shift = weight.q, weight.scale, weight.shift
    places = scale.data_ptr(), 0 if shift is None else shift.data_ptr()
    wide, half = scale.dtype == torch.float32, half and weight.group % (2 * BLOCK) == 0
    return [q.data_ptr(), _KINDS[q.dtype], q.shape[-1], weight.group, *places, int(wide), int(half)]


def _unfolded(weight: Matrix) -> int:
    """How many float32 a thread needs for the scales and shifts of UNFOLD rows."""
    return 0 if isinstance(weight, Tensor) else UNFOLD * 2 * weight.scale.shape[-1]


def _room(weight: Matrix, T: int) -> int:
    """How many float32 a thread needs as `room`: for scales and shifts, and for T rows of x in bfloat16."""
    return _unfolded(weight) + (T * weight.shape[-1] + 1) // 2


class Stack:
    """A model's decoder layers on a CPU."""

    most = MAX_ROWS

    def __init__(
        self, layers: Sequence[Sequence[Any]], heads: tuple[int, int], rope: Tensor, eps: float, half: bool = False
    ):
        """Each layer: norm_in [E], qkv [(Hq + 2 Hkv) D, E], its bias, q_norm [D], k_norm, o [E, Hq D], its bias,
        norm_post, gate_up [2 F, E], its bias, down [E, F], its bias; None where it is absent. heads: Hq, Hkv; rope [C,
        2, D]. A matrix is float32, bfloat16 or `Quantized`, everything else float32. `half`: products other than with
        float32 take rows rounded to bfloat16, where the CPU has such instructions."""
        self.layers, self.rope, self.heads, self.eps = layers, rope, heads, np.float32(eps)
        self.sizes = rope.shape[2], layers[0][DOWN].shape[1]
        self.weights, self.matrices = (np.zeros((len(layers), 12, *more), np.int64) for more in ((), (8,)))
        self.unfolded = 0
        for n, layer in enumerate(layers):
            for i, w in enumerate(layer):
                if i in MATRICES:
                    self.matrices[n, i] = _described(w, half)
                    self.unfolded = max(self.unfolded, _unfolded(w))
                elif w is not None:
                    self.weights[n, i] = w.data_ptr()
        self._scratch: Any = np.empty(0, np.float32)

    @staticmethod
    def takes(layers: Sequence[Sequence[Any]], rope: Tensor) -> bool:
        """Whether the kernel serves such layers."""
        matrices = [layer[n] for layer in layers for n in MATRICES]
        others = [w for layer in layers for n, w in enumerate(layer) if n not in MATRICES]
        return (
            all(w is not None and takes(w) for w in matrices)
            and Stack.takes_sizes(rope.shape[2], *(w.shape[1] for w in matrices))
            and all(w is None or (fits(w) and w.dtype == torch.float32) for w in others)
        )

    @staticmethod
    def takes_sizes(head_dim: int, *sizes: int) -> bool:
        """Whether the kernel serves layers with rows of these numbers of elements: E, Hq D and F."""
        return head_dim % (2 * BLOCK) == 0 and all(size % BLOCK == 0 for size in sizes)

    def run(
        self,
        x: Tensor,
        kv: tuple[Tensor, Tensor],
        groups: Sequence[int],
        taps: Sequence[int],
        places: tuple[Tensor, Tensor],
        sequences: tuple[Tensor, Tensor, Tensor],
        words: Tensor,
        table: Tensor,
        scale: float,
    ) -> Tensor:
        """Run groups of layers, as decoder.run_layers does, over x [T, E]. kv: K and V [L, pages, page size, Hkv, D],
        written at the rows' slots. groups: the first layer of each group, then the end. places: positions and slots [T]
        int64. sequences: cu_rows [B + 1], kv_len and window [B] int32; words [T, W] int64; table [B, P] int32 (see
        kernels/attention.py). Returns [1 + taps, T, E]: the residual stream after the last layer, and at the depths
        `taps`."""
        (T, E), (Hq, Hkv), (D, F), (k, v) = x.shape, self.heads, self.sizes, kv
        bounds, lengths, windows = (s.numpy() for s in sequences)
        seqs: Any = np.zeros((3, len(bounds)), np.int64)
        seqs[0], seqs[1, :-1], seqs[2, :-1] = bounds, lengths, windows
        starts, depths = np.array(groups, np.int64), np.array(taps, np.int64)
        longest, most, crew = int(lengths.max()), int(np.diff(starts).max()), team()
        wide, factors = longest + BLOCK, self.unfolded + (T * max(E, Hq * D, F) + 1) // 2
        need = crew.size * (factors + 2 * T * E + BLOCK + T * Hq // Hkv * (2 * D + BLOCK + wide))
        need += most * T * ((2 * Hq + 2 * Hkv) * D + E) + 2 * T * F
        if len(self._scratch) < need:
            self._scratch = np.empty(need + need // 4, np.float32)
        out: Any = np.empty((1 + len(depths), T, E), np.float32)
        crew.run(
            _layers,
            (T, E, Hq, Hkv, D, F, k.shape[2], longest, factors),
            self.weights,
            self.matrices,
            np.array([k.data_ptr(), v.data_ptr(), 4 * k.stride(0)]),
            starts,
            depths,
            x.contiguous().numpy(),
            out,
            self._scratch.ctypes.data,
            self.rope.data_ptr(),
            np.stack([place.numpy() for place in places]),
            seqs,
            words.contiguous().numpy(),
            table.contiguous().numpy(),
            self.eps,
            np.float32(scale),
        )
        return torch.from_numpy(out)


def head(x: Tensor, norm: Tensor, eps: float, weight: Matrix, half: bool = False) -> Tensor:
    """The logits [T, O] float32 of x [T, E] float32, T <= MAX_ROWS: RMSNorm with weight `norm` [E] float32, times
    weight [O, E] float32, bfloat16 or `Quantized`; E is a multiple of BLOCK. `half`: as in `Stack`."""
    (T, E), O, crew = x.shape, weight.shape[0], team()
    x, y = x.contiguous(), torch.empty(T, O)
    own = T * E + _room(weight, T)
    scratch: Any = np.empty(crew.size * own, np.float32)
    m = np.array(_described(weight, half))
    crew.run(_head, x.data_ptr(), norm.data_ptr(), m, scratch.ctypes.data, own, y.data_ptr(), T, O, E, np.float32(eps))
    return y


def fits(x: Tensor) -> bool:
    """Whether a kernel may read x: a contiguous CPU tensor outside of autograd and torch.compile."""
    plain = type(x) in (Tensor, torch.nn.Parameter) and x.is_cpu and not (x.requires_grad and torch.is_grad_enabled())
    return plain and x.layout is torch.strided and x.is_contiguous()


def reads_halves() -> bool:
    """Whether the CPU converts float16, the type of most scales."""
    return _HALVES


def takes(weight: Matrix) -> bool:
    """Whether the kernels can read a matrix."""
    if isinstance(weight, Tensor):
        return fits(weight) and weight.dtype in (torch.float32, torch.bfloat16)
    return reads_halves() and all(fits(part) for part in weight.parts) and weight.group % LEAST[weight.kind] == 0


def serves(x: Tensor, weight: Matrix) -> bool:
    """Whether `product` takes these arguments."""
    return x.shape[1] == weight.shape[1] and len(x) > 0 and weight.shape[1] % BLOCK == 0 and takes(weight)


def product(x: Tensor, weight: Matrix, half: bool = False) -> Tensor:
    """x [T, E] float32, T <= MAX_ROWS, weight [O, E] float32, bfloat16 or `Quantized`, E a multiple of BLOCK -> [T, O]
    float32. `half`: as in `Stack`."""
    (T, E), O, crew = x.shape, weight.shape[0], team()
    x, y, own = x.contiguous(), torch.empty(T, O), _room(weight, T)
    room: Any = np.empty(crew.size * own, np.float32)
    m = np.array(_described(weight, half))
    crew.run(_product, m, x.data_ptr(), y.data_ptr(), room.ctypes.data, own, O, T, E)
    return y


def restored(weight: Quantized, dtype: torch.dtype) -> Tensor:
    """weight [O, E] in float32 or bfloat16, by the team's threads."""
    (O, E), crew = weight.shape, team()
    y, own = torch.empty(O, E, dtype=dtype), _unfolded(weight) + E
    room: Any = np.empty(crew.size * own, np.float32)
    m = np.array(_described(weight, False))
    crew.run(_restore, m, y.data_ptr(), room.ctypes.data, own, O, E, int(dtype == torch.bfloat16))
    return y
