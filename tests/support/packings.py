"""Matrices in the formats of specker/cpu/packed.py, their float64 formula, and products with error bounds.

python tests/support/packings.py OUT.pt     products by the compiled library of this process (SPECKER_CPU) -> OUT.pt
"""

import sys
from typing import NamedTuple

import torch
from torch import Tensor

from specker import cpu
from specker.cpu.library import native
from specker.cpu.packed import FORMATS, Numbers, pack

ROUNDING = 2.0**-24  # of float32, relative
ROWS = 46
COLUMNS = 512
TALL = 20


def numbers(name: str, O: int = ROWS, E: int = COLUMNS, seed: int = 0) -> Numbers:
    """Random codes, all of them, and random scales."""
    form, by = FORMATS[name], torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << form.bits, (O, E), dtype=torch.uint8, generator=by)
    if name.startswith("fp8"):
        codes[(codes & 127) == 127] = 0  # NaN

    def some(count: int, dtype: torch.dtype) -> Tensor:
        return (torch.rand(O, count, generator=by) * 0.02 + 1e-3).to(dtype)

    if form.scales == "super":
        six = [torch.randint(0, 64, (O, E // 32), dtype=torch.uint8, generator=by) for _ in range(2)]
        return Numbers(name, codes, *six, some(E // 256, torch.float16), some(E // 256, torch.float16))
    if form.scales == "sixteen":
        eight = torch.randint(-128, 128, (O, E // 16), generator=by).to(torch.int8)
        return Numbers(name, codes, eight, None, some(E // 256, torch.float16))
    if form.scales == "power":
        return Numbers(name, codes, torch.randint(110, 122, (O, E // 32), dtype=torch.uint8, generator=by))
    dtype = torch.float16 if "half" in form.scales else torch.float32
    shift = torch.randn(O, E // 32, generator=by).mul(0.1).to(dtype) if "shift" in form.scales else None
    return Numbers(name, codes, some(E // 32, dtype), shift)


class Exact(NamedTuple):
    weight: Tensor  # [O, E] float64
    most: Tensor  # [O, E] float64: the sum of the absolute terms that make a weight


def exact(n: Numbers) -> Exact:
    """The formula of the module's docstring in float64."""

    def each(x: Tensor, columns: int) -> Tensor:
        return x.double().repeat_interleave(columns, 1)

    form, codes = FORMATS[n.format], n.codes.double()
    if n.format.startswith("fp8"):  # e4m3: sign, four bits of exponent with a bias of 7, three bits of mantissa
        sign, power, rest = n.codes >> 7, (n.codes >> 3 & 15).double(), (n.codes & 7).double()
        value = torch.where(power > 0, (1 + rest / 8) * 2 ** (power - 7), rest / 8 * 2.0**-6)
        weight = torch.where(sign > 0, -value, value) * each(n.scale, 32)
        return Exact(weight, weight.abs())
    if n.format == "mxfp4":  # e2m1: sign, two bits of exponent with a bias of 1, one bit of mantissa
        sign, power, half = n.codes >> 3, (n.codes >> 1 & 3).double(), (n.codes & 1).double()
        value = torch.where(power > 0, (1 + half / 2) * 2 ** (power - 1), half / 2)
        weight, by = torch.where(sign > 0, -value, value), each(2.0 ** (n.scale.double() - 127), 32)
        return Exact(weight * by, (weight + 12) * by)  # products add 6 to a number, and subtract it again
    zero, shift = (0 if n.shift is not None else 1 << form.bits - 1), torch.zeros(1, 1, dtype=torch.float64)
    if form.scales == "super":
        scale, shift = each(n.scale, 32) * each(n.d, 256), -(each(n.shift, 32) * each(n.m, 256))
    elif form.scales == "sixteen":
        scale = each(n.scale, 16) * each(n.d, 256)
    else:
        scale = each(n.scale, 32)
        if n.shift is not None:
            zero, shift = 128 if form.bits == 8 else 0, each(n.shift, 32)
    most = codes + max(zero, 128 if form.bits == 8 else 0)  # some processors multiply eight bits without their offset
    return Exact((codes - zero) * scale + shift, most * scale.abs() + shift.abs())


def scale_columns(name: str) -> int:
    """Columns of x that have one scale in products with such weights; on processors with AMX not 32 everywhere."""
    return int(native().scale_columns(FORMATS[name].code))


def rounded(x: Tensor, activations: str, name: str, columns: int = 0) -> Tensor:
    """What a product multiplies, in float64. `columns` with one scale; 0: in this process."""
    if activations == "float32":
        return x.double()
    if activations == "bfloat16" or name.startswith("fp8"):
        return x.bfloat16().double()
    columns = columns or scale_columns(name)
    groups = x.unflatten(-1, (-1, columns))

    def whole(x: Tensor) -> Tensor:
        top = x.abs().amax(-1, keepdim=True)
        factor = torch.where(top > 0, torch.full_like(top, 127) / top, 0)
        return (x * factor).round().double() * (top / 127).double()

    if columns == 32:
        return whole(groups).flatten(-2)
    far = groups.abs() > 10 * groups.double().square().mean(-1, keepdim=True).sqrt()
    return (whole(groups.masked_fill(far, 0)) + whole(groups.masked_fill(~far, 0))).flatten(-2)


def bound(x: Tensor, activations: str, n: Numbers) -> Tensor:
    """Of a product's error, [T, O]. In integers each group of 32 has up to four roundings of the sum, and its terms
    four; in floats each column has one of the sum, each group one, a weight two. Twice that without a fused
    multiply-add. `x`: as from `rounded`."""
    groups = x.shape[1] // 32
    integers = activations == "int8" and not n.format.startswith("fp8")
    steps = 4 * groups + 4 if integers else 32 + groups + 2
    return 2 * steps * ROUNDING * (x.abs() @ exact(n).most.T)


def inputs(T: int = TALL, E: int = COLUMNS) -> Tensor:
    """Rows with a group of zeros, one of a single number, and rows of very different size."""
    x = torch.randn(T, E, generator=torch.Generator().manual_seed(7)) * torch.logspace(-3, 3, T).unsqueeze(1)
    x[0, :32] = 0
    x[:, 32:64] = 0
    x[:, 40] = -1.5
    return x


def products() -> dict[tuple[str, str], Tensor]:
    packed = {name: pack(numbers(name)) for name in FORMATS}
    found = {(name, kind): cpu.product(inputs(), w, kind) for name, w in packed.items() for kind in cpu.ACTIVATIONS}
    found |= {(name, "columns"): torch.tensor(scale_columns(name)) for name in FORMATS}
    return found | {(name, "weights"): cpu.restored(w, torch.float32) for name, w in packed.items()}


if __name__ == "__main__":
    torch.save(products(), sys.argv[1])
