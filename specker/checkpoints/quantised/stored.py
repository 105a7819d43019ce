"""What the formats of other libraries share: gptq.py, awq.py, fp8.py and compressed.py.

All store integers or float8 numbers q with a scale, and maybe a zero point, for each block of weights:

    w = (q - zero) * scale = q * scale + shift,  shift = -zero * scale

`shift` is exact for scales in float16 and bfloat16, and rounded once for float32 ones. A block may be any rectangle:
the whole matrix, a row, a group of columns, or 128 x 128 weights. In memory, every row of a block becomes a row of
groups with the block's scale.

Many checkpoints were made for quantised activations, too (W8A8; static or dynamic scales). Only their weights are read:
activations stay in the run's dtype, as in transformers' dequantised model. Tokens may differ from those of an engine
that rounds activations as the checkpoint asks.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specker.kernels import quant
from specker.kernels.quant import Quantized
from specker.model.config import CheckpointError

Get = Callable[[str], Tensor | None]  # a tensor's full name -> the tensor, None if the checkpoint lacks it
Stored = dict[str, tuple[tuple[int, ...], tuple[str, ...]]]  # a tensor's full name -> (shape, safetensors dtypes)

MIXTRAL = "w1", "w2", "w3"  # an expert's gate, down and up
LAYERS = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj", *MIXTRAL),
    *("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "in_proj_qkvz", "in_proj_ba", "in_proj", "out_proj"),
)
FLOATS = ("F32", "F16", "BF16")


def refused(what: str) -> CheckpointError:
    return CheckpointError(f"quantised weights ({what}) are not supported; use the unquantised checkpoint")


def is_layer(module: str) -> bool:
    """Whether the module is one of a layer's matrices."""
    return module.rpartition(".")[2] in LAYERS


@dataclass(frozen=True)
class Blocks:
    """The shape of a block of weights that share a scale: `rows` x `columns`, where 0 means all of them. `kind` as in
    `Quantized`."""

    kind: str
    rows: int
    columns: int

    def __post_init__(self) -> None:
        if min(self.rows, self.columns) < 0 or (self.columns and not self.rows):
            raise ValueError(f"weights cannot share scales in {self}")

    def grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        """How many blocks lie along the rows and along the columns of a matrix. The last ones may be smaller."""
        return math.ceil(shape[0] / (self.rows or shape[0])), math.ceil(shape[1] / (self.columns or shape[1]))

    def group(self, module: str, shape: tuple[int, int]) -> int:
        """The number of columns in each group of the `Quantized` matrix. It divides the size of the last block, too, so
        a smaller last block makes all groups smaller. Raises CheckpointError if the kernels do not support it."""
        group = math.gcd(self.columns or shape[1], shape[1])
        try:
            quant.check(self.kind, shape, group)
        except ValueError as error:
            raise CheckpointError(f"the quantised weights of {module} cannot be read: {error}") from error
        return group

    def matrix(self, module: str, q: Tensor, scale: Tensor, zero: Tensor | None) -> Quantized:
        """Make the matrix from q [O, E] (int8, float8 or, for int4, uint8 from 0 to 15), and one scale and zero point
        for each block."""
        shape = q.shape[0], q.shape[1]
        group, grid = self.group(module, shape), self.grid(shape)
        scale = scale.float().reshape(grid)
        if zero is None or bool((zero == (8 if self.kind == "int4" else 0)).all()):
            shift = None
        else:
            shift = -zero.float().reshape(grid) * scale
        scale, shift = quant.exact(scale, shift)
        times = self.rows or shape[0], (self.columns or shape[1]) // group

        def spread(x: Tensor) -> Tensor:
            x = x.repeat_interleave(times[0], 0)[: shape[0]]
            return x.repeat_interleave(times[1], 1)[:, : shape[1] // group].contiguous()

        q = quant.packed(q) if self.kind == "int4" else q.contiguous()
        return Quantized(q, spread(scale), None if shift is None else spread(shift))

    def __str__(self) -> str:
        if self.rows == 1:
            return f"groups of {self.columns}" if self.columns else "one scale a row"
        return f"blocks of {self.rows} x {self.columns}" if self.rows else "one scale a matrix"


@dataclass(frozen=True)
class LayerMatrices:
    """What the formats share that quantise all matrices of the layers alike."""

    blocks: Blocks
    skipped: tuple[str, ...]  # modules that are not quantised: names, or parts such as `mlp` of layers.0.mlp.up_proj

    def covers(self, module: str) -> bool:
        return is_layer(module) and not any(f".{name}." in f".{module}." for name in self.skipped)


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Numbers of four or eight bits in int32 words, lowest first: [.., n] -> [.., n * 32 / bits] uint8."""
    octets = words.contiguous().view(torch.uint8)  # little-endian: the lowest byte comes first
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), -1).flatten(-2)


def numbers(codes: Tensor, bits: int) -> Tensor:
    """Unsigned numbers in the form that `Blocks.matrix` takes. Eight-bit ones become int8, and 128 becomes 0."""
    return codes if bits == 4 else (codes ^ 128).contiguous().view(torch.int8)


def needed(get: Get, name: str) -> Tensor:
    found = get(name)
    if found is None:
        raise CheckpointError(f"the checkpoint lacks {name}, which config.json requires")
    return found


def single(name: str, x: Tensor) -> Tensor:
    if x.numel() != 1:
        raise CheckpointError(
            f"{name} has shape {tuple(x.shape)}, but config.json makes it one number; they must agree"
        )
    return x


def strings(names: Sequence[str] | str | None) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(str(name) for name in names or ())


def patterns(given: Any) -> tuple[str, ...]:
    """The patterns as strings. Raises re.error for an invalid regular expression."""
    return tuple(re.compile(str(pattern)).pattern for pattern in given)
