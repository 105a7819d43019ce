"""Quantised checkpoints of other libraries: GPTQ, AWQ and fp8; compressed.py has compressed-tensors.

Each class is a `Scheme` (quantised.py). All store integers or float8 numbers q with a scale, and maybe a zero point,
for each block of weights:

    w = (q - zero) * scale = q * scale + shift,  shift = -zero * scale

`shift` is exact for scales in float16 and bfloat16, and rounded once for float32 ones. A block may be any rectangle:
the whole matrix, a row, a group of columns, or 128 x 128 weights. In memory it is rows of groups.

Many checkpoints were made for quantised activations too (W8A8; static or dynamic scales). They are read for their
weights alone: activations stay in the run's dtype. transformers' dequantised model is the same. Tokens may differ from
those of an engine that rounds activations.

Sources: AutoGPTQ's QuantLinear, AutoAWQ's WQLinear_GEMM, DeepSeek-V3's fp8 blocks.
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

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FLOATS = ("F32", "F16", "BF16")
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where an int32 holds its columns: column 1 is the fifth number


def refused(what: str) -> CheckpointError:
    return CheckpointError(f"quantised weights ({what}) are not supported; use the unquantised checkpoint")


def is_layer(module: str) -> bool:
    """Whether the module is one of a layer's matrices."""
    return module.rpartition(".")[2] in LAYERS


@dataclass(frozen=True)
class Blocks:
    """Weights that share a scale: `rows` x `columns`, 0 for all. `kind` as in `Quantized`."""

    kind: str
    rows: int
    columns: int

    def __post_init__(self) -> None:
        if min(self.rows, self.columns) < 0:
            raise ValueError(f"weights cannot share scales in {self}")

    def grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Blocks along the rows and columns of a matrix. The last ones may be smaller."""
        return math.ceil(shape[0] / (self.rows or shape[0])), math.ceil(shape[1] / (self.columns or shape[1]))

    def group(self, module: str, shape: tuple[int, int]) -> int:
        """Columns of a group of the `Quantized` matrix. A smaller last block makes all groups smaller. Raises
        CheckpointError if the kernels cannot take them."""
        group = math.gcd(self.columns or shape[1], shape[1])
        try:
            quant.check(self.kind, shape, group)
        except ValueError as error:
            raise CheckpointError(f"the quantised weights of {module} cannot be read: {error}") from error
        return group

    def matrix(self, module: str, q: Tensor, scale: Tensor, zero: Tensor | None) -> Quantized:
        """q [O, E] int8, float8 or, for int4, uint8 of 0 to 15; scale and zero one for each block."""
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


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Numbers of four or eight bits in int32 words, lowest first: [.., n] -> [.., n * 32 / bits] uint8."""
    octets = words.contiguous().view(torch.uint8)  # of a little-endian machine: lowest first
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), -1).flatten(-2)


def numbers(codes: Tensor, bits: int) -> Tensor:
    """Unsigned numbers as `Blocks.matrix` takes them: of eight bits, 128 becomes 0."""
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


def _among(module: str, names: Sequence[str]) -> bool:
    """Whether one of the names is the module's, or consecutive parts of it: mlp of layers.0.mlp.up_proj."""
    return any(f".{name}." in f".{module}." for name in names)


def patterns(given: Any) -> tuple[str, ...]:
    """Raises re.error for what is no regular expression."""
    return tuple(re.compile(str(pattern)).pattern for pattern in given)


@dataclass(frozen=True)
class Gptq:
    """<module>.qweight int32 [E * bits / 32, O], qzeros int32 [groups, O * bits / 32], scales [groups, O], and perhaps
    g_idx [E], each column's group. The first format stores zero points less one; gptq_v2 stores them as they are."""

    bits: int
    blocks: Blocks
    symmetric: bool
    version: int
    only: tuple[str, ...]  # endings of the quantised modules' names; none: all
    skipped: tuple[str, ...]  # patterns
    head: bool

    @property
    def name(self) -> str:
        return f"GPTQ ({self.bits} bits, {self.blocks})"

    def covers(self, module: str) -> bool:
        if any(re.match(pattern, module) for pattern in self.skipped):
            return False
        return (self.head and module == "lm_head") or (
            is_layer(module) and (not self.only or module.endswith(self.only))
        )

    def stored(self, module: str, shape: tuple[int, int]) -> Stored:
        self.blocks.group(module, shape)
        (O, E), (_, groups) = shape, self.blocks.grid(shape)
        return {
            f"{module}.qweight": ((math.ceil(E * self.bits / 32), O), ("I32",)),
            f"{module}.qzeros": ((groups, math.ceil(O * self.bits / 32)), ("I32",)),
            f"{module}.scales": ((groups, O), FLOATS),
        }

    def optional(self, module: str) -> tuple[str, ...]:
        return (f"{module}.g_idx",)

    def read(self, module: str, shape: tuple[int, int], get: Get) -> Quantized:
        O, E = shape
        order = get(f"{module}.g_idx")
        if order is not None and not torch.equal(order.long(), torch.arange(E) // (self.blocks.columns or E)):
            raise CheckpointError(
                f"{module}.g_idx is not in order: quantised weights (gptq with desc_act) are not supported; "
                "use a checkpoint without desc_act"
            )
        codes = unpacked(needed(get, f"{module}.qweight").t(), self.bits)[:, :E]
        zeros = unpacked(needed(get, f"{module}.qzeros"), self.bits)[:, :O]
        most = (1 << self.bits) - 1
        # GPTQModel has written symmetric checkpoints of the first format with the second's zero points
        as_they_are = self.version == 2 or (self.symmetric and bool((zeros == most // 2 + 1).all()))
        if not as_they_are:
            zeros = (zeros + 1) & most  # 0 was stored as -1
        scales = needed(get, f"{module}.scales").t()
        return self.blocks.matrix(module, numbers(codes, self.bits), scales, numbers(zeros, self.bits).t())


def gptq(settings: dict[str, Any]) -> Gptq:
    bits, group = int(settings["bits"]), int(settings.get("group_size", 128))
    form = str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()
    dynamic = dict(settings.get("dynamic") or {})  # GPTQModel: pattern -> other settings; "-:pattern" is not quantised
    if bits not in (4, 8):
        raise refused(f"gptq with {bits} bits")
    if form not in ("gptq", "gptq_v2") or settings.get("is_marlin_format"):
        raise refused(f"gptq in the format {'marlin' if settings.get('is_marlin_format') else form}")
    if settings.get("desc_act") and group > 0 and not settings.get("static_groups"):
        raise refused("gptq with desc_act")
    if any(not key.startswith("-:") for key in dynamic):
        raise refused("gptq with settings for single modules")
    only = [name for names in settings.get("modules_in_block_to_quantize") or [] for name in strings(names)]
    return Gptq(
        bits,
        Blocks(f"int{bits}", 1, 0 if group == -1 else group),
        bool(settings.get("sym", True)),
        2 if form == "gptq_v2" else 1,
        tuple(only),
        patterns(key[2:] for key in dynamic),
        bool(settings.get("lm_head")),
    )


@dataclass(frozen=True)
class Awq:
    """<module>.qweight int32 [E, O / 8], qzeros int32 [groups, O / 8], scales [groups, O]. An int32 holds the even ones
    of eight columns first (AWQ_ORDER)."""

    blocks: Blocks
    skipped: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"AWQ (4 bits, {self.blocks})"

    def covers(self, module: str) -> bool:
        return is_layer(module) and not _among(module, self.skipped)

    def stored(self, module: str, shape: tuple[int, int]) -> Stored:
        self.blocks.group(module, shape)
        (O, E), (_, groups) = shape, self.blocks.grid(shape)
        return {
            f"{module}.qweight": ((E, O // 8), ("I32",)),
            f"{module}.qzeros": ((groups, O // 8), ("I32",)),
            f"{module}.scales": ((groups, O), FLOATS),
        }

    def optional(self, module: str) -> tuple[str, ...]:
        return ()

    def read(self, module: str, shape: tuple[int, int], get: Get) -> Quantized:
        codes, zeros = (
            unpacked(needed(get, f"{module}.{part}"), 4).unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2).t()
            for part in ("qweight", "qzeros")
        )
        return self.blocks.matrix(module, codes, needed(get, f"{module}.scales").t(), zeros)


def awq(settings: dict[str, Any]) -> Awq:
    bits = int(settings.get("bits") or settings["w_bit"])
    group = int(settings.get("group_size") or settings.get("q_group_size") or 128)
    version = str(settings.get("version") or settings.get("checkpoint_format") or "gemm").lower()
    if version != "gemm":
        raise refused(f"awq in the version {version}")
    if bits != 4:
        raise refused(f"awq with {bits} bits")
    if not settings.get("zero_point", True):
        raise refused("awq without zero points")
    return Awq(Blocks("int4", 1, 0 if group == -1 else group), strings(settings.get("modules_to_not_convert")))


@dataclass(frozen=True)
class Fp8:
    """<module>.weight float8_e4m3fn [O, E] and weight_scale_inv, by which it is multiplied, one for each block. If the
    block is the whole matrix, it may be called weight_scale."""

    blocks: Blocks
    skipped: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"fp8 ({self.blocks})"

    def covers(self, module: str) -> bool:
        return is_layer(module) and not _among(module, self.skipped)

    def stored(self, module: str, shape: tuple[int, int]) -> Stored:
        self.blocks.group(module, shape)
        scales: Stored = {f"{module}.weight_scale_inv": (self.blocks.grid(shape), FLOATS)} if self.blocks.rows else {}
        return {f"{module}.weight": (shape, ("F8_E4M3",)), **scales}

    def optional(self, module: str) -> tuple[str, ...]:
        scales = () if self.blocks.rows else ("weight_scale", "weight_scale_inv")
        return tuple(f"{module}.{part}" for part in (*scales, "input_scale", "activation_scale"))

    def read(self, module: str, shape: tuple[int, int], get: Get) -> Quantized:
        if self.blocks.rows:
            scale = needed(get, f"{module}.weight_scale_inv")
        else:
            given = get(f"{module}.weight_scale_inv")
            scale = single(f"{module}.weight_scale", needed(get, f"{module}.weight_scale") if given is None else given)
        return self.blocks.matrix(module, needed(get, f"{module}.weight"), scale, None)


def fp8(settings: dict[str, Any]) -> Fp8:
    form = str(settings.get("fmt") or "e4m3").lower()
    if form not in ("e4m3", "float8_e4m3fn"):
        raise refused(f"fp8 in the format {form}")
    if settings.get("kv_cache_scheme"):
        raise refused("fp8 with a quantised KV cache")
    rows, columns = settings.get("weight_block_size") or (0, 0)
    skipped = settings.get("modules_to_not_convert") or settings.get("ignored_layers")
    return Fp8(Blocks("fp8", int(rows), int(columns)), strings(skipped))
