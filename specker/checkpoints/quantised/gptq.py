"""The GPTQ checkpoint format, as a `Scheme` (schemes.py). Source: AutoGPTQ's QuantLinear."""

import math
import re
from dataclasses import dataclass
from typing import Any

import torch

from specker.checkpoints.quantised.stored import (
    FLOATS,
    Blocks,
    Get,
    Stored,
    is_layer,
    needed,
    numbers,
    patterns,
    refused,
    strings,
    unpacked,
)
from specker.kernels.quant import Quantized
from specker.model.config import CheckpointError


@dataclass(frozen=True)
class Gptq:
    """<module>.qweight int32 [E * bits / 32, O], qzeros int32 [groups, O * bits / 32], scales [groups, O], and perhaps
    g_idx [E], each column's group. The format gptq stores each zero point minus one; gptq_v2 stores it unchanged."""

    bits: int
    blocks: Blocks
    symmetric: bool
    version: int
    only: tuple[str, ...]  # name endings of the quantised modules; empty: all modules
    skipped: tuple[str, ...]  # patterns of modules that are not quantised
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
        groups = torch.arange(E, dtype=torch.int64, device="cpu") // (self.blocks.columns or E)
        if order is not None and not torch.equal(order.long(), groups):
            raise CheckpointError(
                f"{module}.g_idx is not in order: quantised weights (gptq with desc_act) are not supported; "
                "use a checkpoint without desc_act"
            )
        codes = unpacked(needed(get, f"{module}.qweight").t(), self.bits)[:, :E]
        zeros = unpacked(needed(get, f"{module}.qzeros"), self.bits)[:, :O]
        most = (1 << self.bits) - 1
        # GPTQModel has written symmetric gptq checkpoints with the zero points of gptq_v2
        as_they_are = self.version == 2 or (self.symmetric and bool((zeros == most // 2 + 1).all()))
        if not as_they_are:
            zeros = (zeros + 1) & most  # 0 was stored as -1
        scales = needed(get, f"{module}.scales").t()
        return self.blocks.matrix(module, numbers(codes, self.bits), scales, numbers(zeros, self.bits).t())


def gptq(settings: dict[str, Any]) -> Gptq:
    bits, group = int(settings["bits"]), int(settings.get("group_size", 128))
    form = str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()
    dynamic = dict(settings.get("dynamic") or {})  # of GPTQModel: pattern -> its settings; "-:pattern": not quantised
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
