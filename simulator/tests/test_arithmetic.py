"""Instructions on two numbers in 32 bits, against the numbers one by one. Kernels cover the others."""

from types import SimpleNamespace

import numpy as np
import pytest

from ptxsim.program import Program

PTX = """
.visible .entry one(.param .u64 one_param_0)
.reqntid 32
{{
    .reg .b32 %r<4>;
    .reg .b16 %rs<2>;
    {op};
    ret;
}}
"""


def computed(op: str, **given: np.ndarray) -> np.ndarray:
    """%r3 of 2 CTAs of 32 threads after the instruction, with the given registers."""
    program = Program(PTX.format(op=op))
    machine = SimpleNamespace(shape=(2, 32), mask=None, write_mask=None, registers=[None] * len(program.names.widths))
    for name, bits in given.items():
        machine.registers[program.names.register(name)] = bits
    program.blocks[0][0].run(machine)
    out = machine.registers[program.names.register("%r3")]
    assert out.shape == (2, 32)
    return out


@pytest.mark.parametrize(
    ("op", "kind", "function"),
    [
        ("add.s16x2", np.int16, lambda a, b: a + b),
        ("add.u16x2", np.uint16, lambda a, b: a + b),
        ("min.s16x2", np.int16, min),
        ("max.s16x2", np.int16, max),
        ("min.u16x2", np.uint16, min),
        ("max.u16x2", np.uint16, max),
        ("add.rn.f16x2", np.float16, lambda a, b: a + b),
    ],
)
def test_pairs(op, kind, function):
    """Sums wrap around in their own half, and no half carries into the other."""
    g = np.random.default_rng(0)
    a, b = g.integers(0, 1 << 16, (2, 2, 32, 2)).astype(np.uint16)  # CTAs, threads, halves
    a[0, :4], b[0, :4] = [0xFFFF, 0x7FFF], [1, 1]
    if kind is np.float16:
        a, b = (x & 0xBBFF for x in (a, b))  # numbers below 2
    got = computed(f"{op} %r3, %r1, %r2", **{f"%r{n}": x.view(np.uint32)[..., 0] for n, x in ((1, a), (2, b))})
    with np.errstate(over="ignore"):
        want = [kind(function(x, y)) for x, y in zip(a.view(kind).flat, b.view(kind).flat, strict=True)]
    assert got.reshape(-1, 1).view(kind).ravel().tolist() == [x.item() for x in want]


def test_every_e4m3_becomes_float16():
    """A sign, four bits of exponent with bias 7, three of mantissa; all ones are NaN. The lower byte is the first."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    want = np.where(codes & 127 == 127, np.nan, np.where(codes & 128, -size, size))
    for first in range(0, 256, 64):
        low = np.arange(first, first + 64)
        pairs = (low | (255 - low) << 8).astype(np.uint16).reshape(2, 32)
        got = computed("cvt.rn.f16x2.e4m3x2 %r3, %rs1", **{"%rs1": pairs})
        halves = got.reshape(-1, 1).view(np.float16)
        np.testing.assert_array_equal(halves, np.stack((want[low], want[255 - low]), 1))
