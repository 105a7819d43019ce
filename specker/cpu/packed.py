"""Quantised matrices in the layout that the CPU kernels read: blocks of 16 interleaved rows.

A vector register holds the same column of 16 rows, so a sum over columns needs no reduction.

A block is 16 rows, padded with zeros. It consists of units of 32 columns (256 for the K formats), each with its codes
and then its scales. In 32 columns register i holds columns 4 i .. 4 i + 3 of row r in its bytes 4 r .. 4 r + 3:

    four bits    4 registers; the low halves of the bytes hold registers 0 to 3, the high halves 4 to 7
    five bits    four bits, then one register whose bit i is the fifth bit of register i
    six bits     four bits, then two registers whose bits 2 i and 2 i + 1 are the fifth and sixth of registers 0-3, 4-7
    eight bits   8 registers

    w = (code - zero) scale              without shifts: zero is 2^(bits - 1)
    w = code scale + shift               with shifts; eight bits: (code - 128) scale + shift
    w = e2m1(code) 2^(scale - 127)       mxfp4

A format keeps the numbers of its source, in as many bits as the GGUF file, with two exceptions: Q4_K and Q5_K take 1/8
bit a weight more, since their six-bit s and t become bytes, and Q6_K takes 1/16 bit more, since its units are padded to
whole cache lines.

    half, half shift     float16 for 32 columns          GGUF's Q4_0, Q5_0, Q8_0; Q4_1, Q5_1
    float, float shift   float32 for 32 columns          scales that float16 cannot hold
    super                d s and -m t for 32 columns     Q4_K, Q5_K: float16 d, m for 256 columns, bytes s, t for 32
    sixteen              d s for 16 columns              Q6_K: float16 d for 256 columns, a signed byte s for 16
    power                a byte for 32 columns           MXFP4
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from specker.cpu.pages import Place
from specker.kernels import quant
from specker.kernels.quant import Quantized, packed, unpacked

ROWS = 16  # of a block
GROUP = 32  # columns of a register of codes


class Format(NamedTuple):
    bits: int
    scales: str
    code: int  # value of the enum in csrc/products.h

    @property
    def columns(self) -> int:
        """Columns of a unit."""
        return 256 if self.scales in ("super", "sixteen") else GROUP

    @property
    def coded(self) -> int:
        """Bytes of the codes of 16 rows and 32 columns."""
        return 64 * self.bits

    @property
    def unit(self) -> int:
        """Bytes of a unit of a block."""
        sizes = {
            "half": 32,
            "half shift": 64,
            "float": 64,
            "float shift": 128,
            "super": 320,
            "sixteen": 320,
            "power": 16,
        }
        return self.columns // GROUP * self.coded + sizes[self.scales]

    def bytes_of(self, rows: int, columns: int) -> int:
        return -(-rows // ROWS) * (columns // self.columns) * self.unit


FORMATS = {
    "int4": Format(4, "half", 2),
    "int4 shift": Format(4, "half shift", 3),
    "int4 float shift": Format(4, "float shift", 4),
    "int4 super": Format(4, "super", 5),
    "int5": Format(5, "half", 6),
    "int5 shift": Format(5, "half shift", 7),
    "int5 super": Format(5, "super", 8),
    "int6 sixteen": Format(6, "sixteen", 9),
    "int8": Format(8, "half", 10),
    "int8 shift": Format(8, "half shift", 11),
    "int8 float": Format(8, "float", 12),
    "int8 float shift": Format(8, "float shift", 13),
    "fp8": Format(8, "half", 14),
    "fp8 float": Format(8, "float", 15),
    "mxfp4": Format(4, "power", 16),
}


class Numbers(NamedTuple):
    """A matrix [O, E] by rows, before it is packed and after it is unpacked."""

    format: str
    codes: Tensor  # [O, E] uint8
    scale: Tensor  # [O, E / 32] float16 or float32; super, power: [O, E / 32] uint8; sixteen: [O, E / 16] int8
    shift: Tensor | None = None  # like scale
    d: Tensor | None = None  # super, sixteen: [O, E / 256] float16
    m: Tensor | None = None  # super: [O, E / 256] float16


class Run(NamedTuple):
    """Adjacent rows in one format."""

    data: Tensor  # [blocks, bytes of a block] uint8, contiguous
    format: str
    rows: int


@dataclass(frozen=True, eq=False)
class Packed:
    """A matrix [O, E] for the CPU's kernels. Indexing selects rows: a slice, or a tensor of ids."""

    runs: tuple[Run, ...]
    columns: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self), self.columns))

    @property
    def device(self) -> torch.device:
        return self.runs[0].data.device

    @property
    def nbytes(self) -> int:
        return sum(run.data.nbytes for run in self.runs)

    @property
    def kinds(self) -> set[str]:
        """The kinds of the runs, such as {"int4", "int6"}."""
        return {run.format.split()[0] for run in self.runs}

    is_cuda = False

    def __len__(self) -> int:
        return sum(run.rows for run in self.runs)

    def numel(self) -> int:
        return len(self) * self.columns

    def dim(self) -> int:
        return 2

    def __getitem__(self, rows: slice | Tensor) -> "Packed":
        (run,) = self.runs  # heads have one format
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(run.rows)
            if start % ROWS == 0:
                blocks = run.data[start // ROWS : -(-stop // ROWS)]
                return Packed((Run(blocks, run.format, stop - start),), self.columns)
            rows = torch.arange(start, stop, dtype=torch.int64, device="cpu")
        new = torch.zeros(-(-len(rows) // ROWS), run.data.shape[1], dtype=torch.uint8, device="cpu")
        chosen = Packed((Run(new, run.format, len(rows)),), self.columns)
        chosen.copy(torch.arange(len(rows), dtype=torch.int64, device="cpu"), self, rows)
        return chosen

    def columns_of(self, first: int, count: int) -> "Packed | None":
        """Columns first .. first + count - 1; None if they are no whole units."""
        (run,) = self.runs
        form = FORMATS[run.format]
        if first % form.columns or count % form.columns:
            return None
        units = run.data.unflatten(1, (-1, form.unit))[:, first // form.columns : (first + count) // form.columns]
        return Packed((Run(units.flatten(1).contiguous(), run.format, run.rows),), count)

    def copy(self, at: Tensor, source: "Packed", ids: Tensor) -> None:
        """Row at[i] = row ids[i] of `source`, which has the same format."""
        from specker.cpu.library import native

        (run,), (other,) = self.runs, source.runs
        if run.format != other.format or self.columns != source.columns:
            raise ValueError(f"rows of {other.format} [{source.columns}] do not fit {run.format} [{self.columns}]")
        at, ids = at.contiguous(), ids.contiguous()
        for some, count in ((at, run.rows), (ids, other.rows)):
            if len(some) and (int(some.min()) < 0 or int(some.max()) >= count):
                raise ValueError(f"rows must be 0 to {count - 1}")
        code = FORMATS[run.format].code
        native().copy_rows(
            code,
            self.columns,
            run.data.data_ptr(),
            at.data_ptr(),
            other.data.data_ptr(),
            ids.data_ptr(),
            len(at),
        )

    @property
    def places(self) -> list[Place]:
        """Of the runs."""

        def move(n: int, copy: Tensor) -> None:
            run = self.runs[n]._replace(data=copy.view(self.runs[n].data.shape))
            object.__setattr__(self, "runs", (*self.runs[:n], run, *self.runs[n + 1 :]))

        return [Place(run.data.data_ptr(), run.data.nbytes, partial(move, n)) for n, run in enumerate(self.runs)]

    @property
    def segments(self) -> list[tuple[int, int, int]]:
        """(address, rows, format) of the runs, for the library."""
        return [(run.data.data_ptr(), run.rows, FORMATS[run.format].code) for run in self.runs]

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weights [O, E], rounded to float32 and then to `dtype`."""
        from specker.cpu import available, restored

        if available():
            return restored(self, dtype)
        return torch.cat([w.dequantised(torch.float32) for w in self.quantised()]).to(dtype)

    def quantised(self) -> Sequence[Quantized]:
        """The runs as `Quantized` matrices, without loss."""
        return [_quantised(unpack(run, self.columns)) for run in self.runs]


def joined(parts: Sequence[Packed]) -> Packed:
    """Concatenate matrices with equal columns. All but the last must have a multiple of 16 rows."""
    return Packed(tuple(run for part in parts for run in part.runs), parts[0].columns)


def merged(w: Packed) -> Packed | None:
    """The matrix in one run, without loss; None if no format holds all runs. All but the last must have a multiple of
    16 rows. Raises ValueError for float8 beside integers."""
    if len(w.runs) == 1:
        return w
    if len({run.format for run in w.runs}) > 1:
        return of_quantised(quant.joined(w.quantised()))
    return Packed((Run(torch.cat([run.data for run in w.runs]), w.runs[0].format, len(w)),), w.columns)


def _blocks(x: Tensor, values: int) -> Tensor:
    """[O, units * values] -> the bytes of [blocks, units, values, 16 rows]."""
    O = len(x)
    padded = x.new_zeros(-(-O // ROWS) * ROWS, x.shape[1])
    padded[:O] = x
    by = padded.view(len(padded) // ROWS, ROWS, -1, values).permute(0, 2, 3, 1).contiguous()
    return by.view(torch.uint8).flatten(2)


def _rows(x: Tensor, dtype: torch.dtype, values: int, rows: int) -> Tensor:
    """The inverse of `_blocks`: [blocks, units, bytes] -> [rows, units * values] of `dtype`."""
    by = x.contiguous().view(dtype).unflatten(-1, (values, ROWS))
    return by.permute(0, 3, 1, 2).reshape(len(x) * ROWS, -1)[:rows]


def pack(n: Numbers) -> Packed:
    """Pack a matrix. Raises ValueError unless its columns are whole units."""
    form, (O, E) = FORMATS[n.format], n.codes.shape
    if E % form.columns:
        raise ValueError(f"{n.format} needs a multiple of {form.columns} columns, got {E}")
    codes = n.codes.new_zeros(-(-O // ROWS) * ROWS, E)
    codes[:O] = n.codes
    q = codes.view(-1, ROWS, E // GROUP, 8, 4).permute(0, 2, 3, 1, 4).flatten(3)  # [blocks, groups, register, 64]
    if form.bits == 8:
        body = q.flatten(2)
    else:
        low = q & 15
        parts = [low[:, :, :4] | low[:, :, 4:] << 4]
        if form.bits > 4:
            each = 4 if form.bits == 6 else 8  # registers whose high bits share one register
            wide = form.bits - 4
            for first in range(0, 8, each):
                high = torch.zeros_like(q[:, :, 0])
                for i in range(each):
                    high |= (q[:, :, first + i] >> 4) << wide * i
                parts.append(high.unsqueeze(2))
        body = torch.cat([part.flatten(2) for part in parts], 2)
    units = E // form.columns
    body = body.reshape(len(body), units, -1)
    if form.scales == "super":
        assert n.shift is not None and n.d is not None and n.m is not None
        scales = [_blocks(n.scale, 8), _blocks(n.shift, 8), _blocks(n.d, 1), _blocks(n.m, 1)]
    elif form.scales == "sixteen":
        assert n.d is not None
        scales = [_blocks(n.scale, 16), _blocks(n.d, 1), body.new_zeros(len(body), units, 32)]
    else:
        scales = [_blocks(x, 1) for x in (n.scale, n.shift) if x is not None]
    data = torch.cat([body, *scales], 2).flatten(1)
    return Packed((Run(data, n.format, O),), E)


def unpack(run: Run, E: int) -> Numbers:
    """The inverse of `pack`."""
    form, rows = FORMATS[run.format], run.rows
    units = run.data.view(len(run.data), E // form.columns, form.unit)
    per = form.columns // GROUP
    body = units[..., : per * form.coded].reshape(len(units), -1, form.coded).unflatten(-1, (-1, 64))
    if form.bits == 8:
        q = body
    else:
        q = torch.cat((body[:, :, :4] & 15, body[:, :, :4] >> 4), 2)
        wide, each = form.bits - 4, 4 if form.bits == 6 else 8
        for i in range(8 if wide else 0):
            q[:, :, i] |= (body[:, :, 4 + i // each] >> wide * (i % each) & (1 << wide) - 1) << 4
    codes = q.unflatten(-1, (ROWS, 4)).permute(0, 3, 1, 2, 4).reshape(len(units) * ROWS, E)[:rows]
    rest = units[..., per * form.coded :]
    if form.scales == "super":
        s, t, d, m = rest.split((128, 128, 32, 32), -1)
        s, t = (_rows(x, torch.uint8, 8, rows) for x in (s, t))
        d, m = (_rows(x, torch.float16, 1, rows) for x in (d, m))
        return Numbers(run.format, codes, s, t, d, m)
    if form.scales == "sixteen":
        s, d, _ = rest.split((256, 32, 32), -1)
        return Numbers(run.format, codes, _rows(s, torch.int8, 16, rows), None, _rows(d, torch.float16, 1, rows))
    kinds = {"half": torch.float16, "float": torch.float32, "power": torch.uint8}
    dtype = kinds[form.scales.split()[0]]
    each = ROWS * dtype.itemsize
    scale = _rows(rest[..., :each], dtype, 1, rows)
    shift = _rows(rest[..., each:], dtype, 1, rows) if form.scales.endswith("shift") else None
    return Numbers(run.format, codes, scale, shift)


def of_quantised(w: Quantized) -> Packed | None:
    """Pack a matrix [O, E] of kernels/quant.py without loss; None if its groups are not multiples of 32 columns."""
    rows = max(quant.CHUNK // w.shape[-1] // ROWS, 1) * ROWS  # packing takes several bytes for each weight
    made = (_packed(w[i : i + rows]) for i in range(0, max(len(w), 1), rows))
    parts = [part for part in made if part is not None]
    return merged(joined(parts)) if parts else None


def _packed(w: Quantized) -> Packed | None:
    E = w.shape[-1]
    if w.group % GROUP or E % GROUP:
        return None
    times = w.group // GROUP
    scale, shift = (None if x is None else x.repeat_interleave(times, -1) for x in (w.scale, w.shift))
    assert scale is not None
    halves = scale.dtype == torch.float16
    if scale.dtype == torch.bfloat16:
        scale, shift = scale.float(), None if shift is None else shift.float()
    if w.kind == "mxfp4":
        return pack(Numbers("mxfp4", unpacked(w.q), scale))
    if w.kind == "int4":
        if shift is None and not halves:
            shift = scale * -8
        name = "int4" if shift is None else "int4 shift" if halves else "int4 float shift"
        return pack(Numbers(name, unpacked(w.q), scale, shift))
    if w.kind == "fp8":
        if shift is not None:
            return None
        return pack(Numbers("fp8" if halves else "fp8 float", w.q.view(torch.uint8), scale))
    name = "int8" + ("" if halves else " float") + ("" if shift is None else " shift")
    return pack(Numbers(name, w.q.view(torch.uint8) ^ 128, scale, shift))


def _quantised(n: Numbers) -> Quantized:
    """Convert to `Quantized`: four bits stay four, five and six become eight."""
    form = FORMATS[n.format]
    scale: Tensor
    shift: Tensor | None
    if form.scales == "super":
        assert n.shift is not None and n.d is not None and n.m is not None
        scale = n.scale.float() * n.d.float().repeat_interleave(8, -1)
        shift = -(n.shift.float() * n.m.float().repeat_interleave(8, -1))
    elif form.scales == "sixteen":
        assert n.d is not None
        scale, shift = n.scale.float() * n.d.float().repeat_interleave(16, -1), None
    else:
        scale, shift = n.scale, n.shift
    if n.format.startswith("fp8"):
        return Quantized(n.codes.view(torch.float8_e4m3fn), scale, shift)
    if form.bits == 4:
        return Quantized(packed(n.codes), scale, shift)
    zero = 128 if form.bits == 8 else 0 if shift is not None else 1 << form.bits - 1
    return Quantized((n.codes.to(torch.int16) - zero).to(torch.int8), scale, shift)
