"""quant: weight matrices in eight and four bits.

    w[o, e] = q[o, e] * scale[o, e // group] + shift[o, e // group]

in float32, rounded once. `row_linear`, `kv_project` and `vocab_topk` take a `Quantized` matrix instead of a tensor and
compute with these w, rounded to the dtype of the activations; nothing else is quantised. Where a row, or (but on sm_80)
a multiple of 128 columns, has one scale and no shift, kernels multiply float32 sums by it and round no weight. Four
kinds of q:

* int8: int8 [O, E].
* fp8: float8_e4m3fn [O, E].
* int4: uint8 [O, E / 2], numbers 0 to 15; without shifts they stand for -8 to 7. 16 bytes hold 32 columns: their low
  four bits the first 16 columns, their high four bits the last 16, as in GGUF. A kernel then needs no shuffle: it
  multiplies the two halves separately.
* mxfp4: uint8 [O, E / 2], laid out like int4: e2m1, which is a sign, two bits of exponent with bias 1 and one of
  mantissa (0, 0.5, 1, 1.5, 2, 3, 4, 6). There is no shift, and a scale is 2^(b - 127) for a byte b of 0 to 254 (e8m0),
  usually for 32 columns.

The other kinds' scales and shifts are both float16 if that is exact, else both float32. Formats with zero points have
shift = -zero * scale. On a GPU, a model in bfloat16 rounds int4's to bfloat16 when it is loaded (`for_bfloat16`).
Sources: GGUF's block formats (ggml-common.h), compressed-tensors, GPTQ (arXiv 2210.17323), AWQ (arXiv 2306.00978), and
the OCP Microscaling Formats (MX) Specification 1.0.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specker.kernels.variant import TYPES, same_device

KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8, "mxfp4": torch.uint8}  # the dtype of q
FOUR_BITS = "int4", "mxfp4"  # kinds that have two numbers in a byte
HALF = 16  # columns in each half of a block of four bits
LARGEST = {"int8": 127.0, "fp8": 448.0}  # the largest q
LEAST = {"int8": 16, "fp8": 16, "int4": 2 * HALF, "mxfp4": 2 * HALF}  # a group is a multiple of this
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the numbers of mxfp4; 8 more are their negatives
SCALES = torch.float16, torch.bfloat16, torch.float32, torch.uint8  # dtypes of scales; uint8: mxfp4's
CHUNK = 1 << 22  # weights quantised or restored at a time


class Format(NamedTuple):
    """The properties of a quantised matrix that a compiled kernel depends on."""

    kind: str
    group: int
    scale: torch.dtype
    shift: torch.dtype | None

    def __str__(self) -> str:
        return f"{self.kind}/{self.group}" + " shift" * (self.shift is not None)

    @property
    def four_bits(self) -> bool:
        """Whether a byte of q holds two numbers."""
        return self.kind in FOUR_BITS

    def size(self, columns: int) -> int:
        """Bytes of q in `columns` columns of a row."""
        return columns // 2 if self.four_bits else columns

    def block(self, block: int, columns: int) -> int:
        """The widest tile, at most `block` columns (a power of two), for rows of `columns` columns: it holds whole
        groups or lies within one."""
        whole = self.group == columns or self.group & (self.group - 1) == 0
        return block if whole else min(block, self.group & -self.group)


@dataclass(frozen=True, eq=False)
class Quantized:
    """A matrix [.., O, E]. Indexing selects along all dimensions but the last, as with a tensor."""

    q: Tensor  # [.., O, E] int8 or float8_e4m3fn; [.., O, E / 2] uint8 for int4 and mxfp4
    scale: Tensor  # [.., O, E / group] float16, bfloat16 or float32; uint8 for mxfp4
    shift: Tensor | None  # like scale; None: no shift

    @property
    def kind(self) -> str:
        if self.scale.dtype == torch.uint8:
            return "mxfp4"
        return next(kind for kind, dtype in KINDS.items() if dtype == self.q.dtype)

    @property
    def kinds(self) -> set[str]:
        return {self.kind}

    @property
    def dtype(self) -> torch.dtype:
        return self.q.dtype

    @property
    def shape(self) -> torch.Size:
        *rows, columns = self.q.shape
        return torch.Size((*rows, columns * (2 if self.q.dtype == torch.uint8 else 1)))

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.shape[-1] // self.scale.shape[-1]

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def is_cuda(self) -> bool:
        return self.q.is_cuda

    @property
    def format(self) -> Format:
        return Format(self.kind, self.group, self.scale.dtype, None if self.shift is None else self.shift.dtype)

    @property
    def streams(self) -> bool:
        """Whether the Triton kernels accept it: its groups satisfy `check`, or one group is a whole row."""
        return self.group % LEAST[self.kind] == 0 or (self.kind not in FOUR_BITS and self.group == self.shape[-1])

    @property
    def scales_sums(self) -> bool:
        """Whether kernels multiply sums by the scales instead of the weights, which they then do not round; on sm_80
        only where a row has one scale."""
        return self.shift is None and self.kind != "mxfp4" and (self.group == self.shape[-1] or self.group % 128 == 0)

    def for_bfloat16(self) -> "Quantized":
        """The matrix for activations in bfloat16: int4 whose scales and shifts are rounded to it, too, so that kernels
        on sm_90 compute two weights at a time; others, and int4 of which sums are scaled, as they are."""
        if self.kind != "int4" or self.scales_sums:
            return self
        return Quantized(self.q, self.scale.bfloat16(), None if self.shift is None else self.shift.bfloat16())

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """q, scale and shift for the Triton kernels: contiguous; float8 as int8, which every device can load, and four
        bits as int16, four numbers each."""
        q = as_bytes(self.q).contiguous()
        if self.kind in FOUR_BITS:
            q = (q.clone() if q.storage_offset() % 2 else q).view(torch.int16)
        return q, self.scale.contiguous(), None if self.shift is None else self.shift.contiguous()

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """q, scale and, if there is one, shift."""
        return (self.q, self.scale) if self.shift is None else (self.q, self.scale, self.shift)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def check(self) -> None:
        """Raise TypeError or ValueError unless q, scale and shift fit together."""
        for name, part in (("q", self.q), ("scale", self.scale), ("shift", self.shift)):
            if not isinstance(part, Tensor) and (part is not None or name != "shift"):
                raise TypeError(f"{name} of a matrix must be Tensor, got {type(part).__name__}")
        if not self.q.dim():
            raise ValueError(f"q of a matrix must be [.., O, E], got {[*self.q.shape]}")
        scale, shape = self.scale, self.shape
        same_device(self.q, scale=scale, shift=self.shift)
        groups = scale.shape[-1] if scale.dim() else 0
        kinds = (torch.uint8,) if scale.dtype == torch.uint8 else KINDS.values()
        if self.q.dtype not in kinds or scale.dtype not in SCALES:
            raise ValueError(f"unknown kind of matrix: q {self.q.dtype}, scale {scale.dtype}")
        if self.kind == "mxfp4" and self.shift is not None:
            raise ValueError(f"mxfp4 has no shift, got {[*self.shift.shape]}")
        if scale.shape[:-1] != shape[:-1] or not groups or shape[-1] % groups:
            raise ValueError(f"scale must be {[*shape[:-1], 'groups']} for a matrix {[*shape]}, got {[*scale.shape]}")
        if self.shift is not None and (self.shift.shape != scale.shape or self.shift.dtype != scale.dtype):
            raise ValueError(f"shift must be like scale, {[*scale.shape]} {scale.dtype}, got {[*self.shift.shape]}")

    def dim(self) -> int:
        return self.q.dim()

    def numel(self) -> int:
        """The number of weights."""
        return math.prod(self.shape)

    def __len__(self) -> int:
        return len(self.q)

    def __getitem__(self, rows: Any) -> "Quantized":
        return self.map_parts(lambda part: as_bytes(part)[rows].view(part.dtype))

    def __setitem__(self, rows: Any, other: "Quantized") -> None:
        for part, new in zip(self.parts, other.parts, strict=True):
            as_bytes(part)[rows] = as_bytes(new)

    def map_parts(self, function: Callable[[Tensor], Tensor]) -> "Quantized":
        """A matrix with `function` applied to q, scale and shift."""
        shift = None if self.shift is None else function(self.shift)
        return Quantized(function(self.q), function(self.scale), shift)

    def columns(self, first: int, count: int) -> "Quantized":
        """Columns first .. first + count - 1, whole groups."""
        E = self.shape[-1]
        return self.map_parts(
            lambda part: part[..., first * part.shape[-1] // E : (first + count) * part.shape[-1] // E]
        )

    def contiguous(self) -> "Quantized":
        return self.map_parts(Tensor.contiguous)

    def to(self, device: torch.device | str) -> "Quantized":
        return self.map_parts(lambda part: part.to(device))

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weights, rounded to float32 and then to `dtype`. [.., O, E]."""
        out = torch.empty(self.shape, dtype=dtype, device=self.device)
        rows = max(1, CHUNK // self.shape[-1])
        flat, whole = out.view(-1, self.shape[-1]), self.map_parts(lambda part: part.reshape(-1, part.shape[-1]))
        for i in range(0, len(flat), rows):
            flat[i : i + rows] = _restored(whole[i : i + rows])
        return out

    def widened(self, dtype: torch.dtype, wide: torch.dtype) -> Tensor:
        """The weights in `wide`, as products of rows in `dtype` take them: rounded to it unless sums are scaled."""
        return self.dequantised(wide if self.scales_sums else dtype).to(wide)


Matrix = Tensor | Quantized


def format_of(weight: Matrix) -> Format | None:
    return weight.format if isinstance(weight, Quantized) else None


def streams(weight: Matrix) -> bool:
    """Whether the Triton kernels accept `weight`."""
    return isinstance(weight, Tensor) or weight.streams


def arguments_of(weight: Matrix) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The kernels' arguments: weight, scale, shift."""
    return (weight.contiguous(), None, None) if isinstance(weight, Tensor) else weight.arguments


def types_of(dtype: str, form: Format | None) -> tuple[str | None, ...]:
    """The Triton types of `arguments_of` for a weight in format `form`, or without `form` for a tensor of type
    `dtype`."""
    if form is None:
        return f"*{dtype}", None, None
    shift = None if form.shift is None else f"*{TYPES[form.shift]}"
    return "*i16" if form.four_bits else "*i8", f"*{TYPES[form.scale]}", shift


def constexprs_of(form: Format | None) -> dict[str, Any]:
    return {"KIND": "plain", "GROUP": 0} if form is None else {"KIND": form.kind, "GROUP": form.group}


def as_bytes(part: Tensor) -> Tensor:
    """`part` in a dtype that torch indexes and every device loads: a float8 of any kind as int8."""
    return part.view(torch.int8) if part.dtype.itemsize == 1 and part.dtype.is_floating_point else part


def _restored(w: Quantized) -> Tensor:
    """Two-dimensional `w` in float32, as a fused multiply-add gives it: the product is exact before the sum is
    rounded."""
    if w.kind == "mxfp4":
        numbers = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=torch.float32, device=w.device)[unpacked(w.q).int()]
        return numbers.unflatten(-1, (-1, w.group)).mul_(powers(w.scale).unsqueeze(-1)).flatten(-2)
    q = unpacked(w.q) if w.kind == "int4" else w.q.to(torch.float32)
    if w.kind == "int4" and w.shift is None:
        q = q - 8.0
    single = w.shift is None or w.scale.dtype != torch.float32  # then the product is exact in float32, or the only step
    q = q.to(torch.float32 if single else torch.float64).unflatten(-1, (-1, w.group))
    q = q.mul_(w.scale.to(q.dtype).unsqueeze(-1))
    if w.shift is not None:
        q = q.add_(w.shift.to(q.dtype).unsqueeze(-1))
    return q.flatten(-2).float()


def powers(scale: Tensor) -> Tensor:
    """e8m0 -> float32: a byte b of 0 to 254 is 2^(b - 127), of which 2^-127 is subnormal."""
    return (scale.to(torch.int32) << 23).clamp_min(1 << 22).view(torch.float32)


def packed(q: Tensor) -> Tensor:
    """q [.., E] uint8 of 0 to 15, E a multiple of 32 -> [.., E / 2] uint8, two in a byte."""
    low, high = q.unflatten(-1, (-1, 2, HALF)).unbind(-2)
    return (low | high << 4).flatten(-2)


def unpacked(q: Tensor) -> Tensor:
    """[.., E / 2] uint8 -> [.., E] uint8 of 0 to 15."""
    blocks = q.unflatten(-1, (-1, HALF))
    return torch.stack((blocks & 15, blocks >> 4), -2).flatten(-3)


def exact(scale: Tensor, shift: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Convert float32 scales and shifts to float16 if that is exact."""
    given = [scale] if shift is None else [scale, shift]
    halves = [x.half() for x in given]
    fitting = all(torch.equal(half.float(), x) for half, x in zip(halves, given, strict=True))
    scale, *rest = halves if fitting else given
    return scale, rest[0] if rest else None


def joined(parts: Sequence[Quantized], stack: bool = False) -> Quantized:
    """Concatenate matrices with equal columns to [sum of O, E], or stack them to [N, O, E]. Different kinds become
    int8, different groups their greatest common divisor; both without loss. Raises ValueError for fp8 beside another
    kind."""
    if len({(w.kind, w.shift is None, w.group) for w in parts}) > 1:
        group = math.gcd(*(w.group for w in parts))
        if "fp8" in (kinds := {w.kind for w in parts}) and len(kinds) > 1:
            raise ValueError("fp8 and integers cannot be joined")
        parts = [spread(w, group, len(kinds) > 1, any(w.shift is not None for w in parts)) for w in parts]
    join = torch.stack if stack else torch.cat

    def of(each: list[Tensor]) -> Tensor:
        dtype = each[0].dtype if len({x.dtype for x in each}) == 1 else torch.float32
        return join([as_bytes(x if x.element_size() == 1 else x.to(dtype)) for x in each]).view(dtype)

    shifts = [w.shift for w in parts if w.shift is not None]
    scale, shift = of([w.scale for w in parts]), of(shifts) if shifts else None
    if shift is not None and shift.dtype != scale.dtype:
        scale, shift = scale.float(), shift.float()
    return Quantized(of([w.q for w in parts]), scale, shift)


def spread(w: Quantized, group: int, wide: bool = False, shifted: bool = False) -> Quantized:
    """The same weights in smaller groups; `group` divides w's group. `wide` turns four bits into int8, and `shifted`
    adds shifts where there are none."""
    times, q = w.group // group, w.q
    scale = w.scale.repeat_interleave(times, -1)
    shift = None if w.shift is None else w.shift.repeat_interleave(times, -1)
    if w.kind == "mxfp4" and (wide or shifted):  # twice the numbers are integers
        halves = torch.tensor([int(2 * x) for x in E2M1], dtype=torch.int8, device=w.device)
        q, scale = torch.cat((halves, -halves))[unpacked(q).int()], powers(scale) / 2
        return Quantized(q, scale, torch.zeros_like(scale) if shifted else None)
    centred = w.kind == "int4" and shift is None
    if wide and w.kind == "int4":
        q = unpacked(q).to(torch.int8) - (8 if centred else 0)
    if shifted and shift is None:
        shift = scale * (-8 if centred and not wide else 0)
    return Quantized(q, scale, shift)


def quantised(weight: Tensor, kind: str, group: int | None = None) -> Quantized:
    """Quantise a weight [.., O, E] to `kind`, rounding to nearest. int8 and fp8 have one scale per row, int4 has a
    scale and a shift per 32 columns, mxfp4 a scale; `group` sets another number of columns. Raises ValueError for a
    kind or sizes that do not fit.

        int8, fp8   scale = largest |w| / 127 or 448
        int4        scale = (largest w - least w) / 15, shift = least w
        mxfp4       scale = 2^(floor(log2(largest |w|)) - 2); what exceeds 6 becomes 6
    """
    check(kind, weight.shape, group)
    E = weight.shape[-1]
    group = group or (LEAST[kind] if kind in FOUR_BITS else E)
    columns = E // 2 if kind in FOUR_BITS else E
    q = torch.empty(*weight.shape[:-1], columns, dtype=KINDS[kind], device=weight.device)
    scales_in = torch.uint8 if kind == "mxfp4" else torch.float16
    scale = torch.empty(*weight.shape[:-1], E // group, dtype=scales_in, device=weight.device)
    shift = torch.empty_like(scale) if kind == "int4" else None
    rows = max(1, CHUNK // E)
    flat = [None if part is None else part.view(-1, part.shape[-1]) for part in (weight.contiguous(), q, scale, shift)]
    source, codes, scales, shifts = flat
    assert source is not None and codes is not None and scales is not None
    for i in range(0, len(source), rows):
        w = source[i : i + rows].float().unflatten(-1, (-1, group))
        if shifts is not None:
            low, high = w.aminmax(dim=-1)
            low = low.half().float()
            step = _step((high - low) / 15)
            shifts[i : i + rows] = low
            numbers = ((w - low.unsqueeze(-1)) / step.unsqueeze(-1)).round_().clamp_(0, 15)
            codes[i : i + rows] = packed(numbers.flatten(-2).to(torch.uint8))
        elif kind == "mxfp4":
            top = w.abs().amax(-1)
            step = torch.where(top > 0, top.frexp().exponent + 124, 0).clamp_(0, 254).to(torch.uint8)
            codes[i : i + rows] = packed(_e2m1((w / powers(step).unsqueeze(-1)).flatten(-2)))
        else:
            most = LARGEST[kind]
            step = _step(w.abs().amax(-1) / most)
            numbers = (w / step.unsqueeze(-1)).flatten(-2).clamp_(-most, most)
            as_bytes(codes)[i : i + rows] = as_bytes((numbers.round_() if kind == "int8" else numbers).to(codes.dtype))
        scales[i : i + rows] = step
    return Quantized(q, scale, shift)


def _e2m1(x: Tensor) -> Tensor:
    """The nearest e2m1 in uint8: of two the smaller, 0 rather than -0."""
    numbers = torch.tensor(E2M1, dtype=torch.float32, device=x.device)
    size = torch.bucketize(x.abs(), (numbers[1:] + numbers[:-1]) / 2).to(torch.uint8)
    return torch.where((x < 0) & (size > 0), size + 8, size)


def _step(x: Tensor) -> Tensor:
    """x >= 0 as a scale: the nearest float16 that is not 0 or infinite."""
    return x.clamp(2.0**-24, 65504).half().float()


def check(kind: str, shape: Sequence[int], group: int | None = None) -> None:
    """Raise ValueError unless a matrix of `shape` can be of `kind`, with groups of `group` columns (default: the kind's
    own)."""
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    E, least = shape[-1], LEAST[kind]
    if E % least or (group is not None and (group <= 0 or group % least or E % group)):
        what = "" if group is None else f" in groups of {group}"
        raise ValueError(
            f"{kind} needs groups of a multiple of {least} columns that divide a row; got {E} columns{what}"
        )
