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
    {op} %r3, %r1, %r2;
    ret;
}}
"""


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
    program, g = Program(PTX.format(op=op)), np.random.default_rng(0)
    a, b = g.integers(0, 1 << 16, (2, 2, 32, 2)).astype(np.uint16)  # CTAs, threads, halves
    a[0, :4], b[0, :4] = [0xFFFF, 0x7FFF], [1, 1]
    if kind is np.float16:
        a, b = (x & 0xBBFF for x in (a, b))  # numbers below 2
    r1, r2, r3 = (program.names.register(f"%r{n}") for n in (1, 2, 3))
    machine = SimpleNamespace(shape=(2, 32), mask=None, write_mask=None, registers=[None] * len(program.names.widths))
    machine.registers[r1], machine.registers[r2] = (x.view(np.uint32)[..., 0] for x in (a, b))
    program.blocks[0][0].run(machine)
    with np.errstate(over="ignore"):
        want = [kind(function(x, y)) for x, y in zip(a.view(kind).flat, b.view(kind).flat, strict=True)]
    assert machine.registers[r3].shape == (2, 32)
    assert machine.registers[r3].reshape(-1, 1).view(kind).ravel().tolist() == [x.item() for x in want]
