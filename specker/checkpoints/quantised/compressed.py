"""The compressed-tensors format, which llm-compressor writes, as a `Scheme` (schemes.py).

As in stored.py, w = (q - zero) * scale, and activations are not quantised. Each config group names its modules, its
format and which weights share a scale. Source: the compressors of compressed-tensors 0.20.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

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
    single,
    strings,
    unpacked,
)
from specker.kernels.quant import Quantized


@dataclass(frozen=True)
class Layout:
    """How compressed-tensors stores the modules of one config group."""

    form: str
    bits: int
    blocks: Blocks
    symmetric: bool

    @property
    def packed(self) -> bool:
        return self.form == "pack-quantized"


@dataclass(frozen=True)
class Compressed:
    """An unpacked module stores weight [O, E] as int8 or float8_e4m3fn and, if it is not symmetric, weight_zero_point
    as int8. A packed module stores unsigned numbers in weight_packed int32 [O, E * bits / 32], and its zero points are
    packed along O. Both store weight_scale."""

    layouts: tuple[tuple[str, Layout], ...]  # targets: "Linear", a module's name or "re:" and a pattern
    ignored: tuple[str, ...]  # names of modules that are not quantised, or "re:" and a pattern

    @property
    def name(self) -> str:
        found = dict.fromkeys(f"{layout.form}, {layout.bits} bits, {layout.blocks}" for _, layout in self.layouts)
        return f"compressed-tensors ({'; '.join(found)})"

    def covers(self, module: str) -> bool:
        return self._layout(module) is not None

    def _layout(self, module: str) -> Layout | None:
        """The layout of the target that matches best: an exact name before a pattern, a pattern before "Linear", and
        the alphabetically first of several. None if the module is not quantised."""
        if not (is_layer(module) or module == "lm_head") or any(_rank(each, module) for each in self.ignored):
            return None
        found = [(rank, target, layout) for target, layout in self.layouts if (rank := _rank(target, module))]
        return min(found, key=lambda each: each[:2])[2] if found else None

    def stored(self, module: str, shape: tuple[int, int]) -> Stored:
        layout = self._layout(module)
        assert layout is not None
        blocks, packed, bits = layout.blocks, layout.packed, layout.bits
        blocks.group(module, shape)
        (O, E), (rows, columns) = shape, blocks.grid(shape)
        if packed:
            found: Stored = {f"{module}.weight_packed": ((O, math.ceil(E * bits / 32)), ("I32",))}
        else:
            found = {f"{module}.weight": (shape, ("F8_E4M3" if blocks.kind == "fp8" else "I8",))}
        if blocks.rows:
            found[f"{module}.weight_scale"] = (rows, columns), FLOATS
            if not layout.symmetric:
                zeros = ((math.ceil(rows * bits / 32), columns), ("I32",)) if packed else ((rows, columns), ("I8",))
                found[f"{module}.weight_zero_point"] = zeros
        return found

    def optional(self, module: str) -> tuple[str, ...]:
        parts = "weight_scale", "weight_zero_point", "weight_shape", "input_scale", "input_zero_point"
        return tuple(f"{module}.{part}" for part in parts)

    def read(self, module: str, shape: tuple[int, int], get: Get) -> Quantized:
        layout = self._layout(module)
        assert layout is not None
        scale = needed(get, f"{module}.weight_scale")
        zero = None if layout.symmetric else needed(get, f"{module}.weight_zero_point")
        if not layout.blocks.rows:
            scale = single(f"{module}.weight_scale", scale)
            zero = None if zero is None else single(f"{module}.weight_zero_point", zero)
        if not layout.packed:
            return layout.blocks.matrix(module, needed(get, f"{module}.weight"), scale, zero)
        q = numbers(unpacked(needed(get, f"{module}.weight_packed"), layout.bits)[:, : shape[1]], layout.bits)
        if zero is not None:
            rows = layout.blocks.grid(shape)[0]
            zero = numbers(unpacked(zero.t(), layout.bits)[:, :rows], layout.bits).t()
        return layout.blocks.matrix(module, q, scale, zero)


def compressed_tensors(settings: dict[str, Any]) -> Compressed:
    method = "compressed-tensors"
    if settings.get("kv_cache_scheme"):
        raise refused(f"{method} with a quantised KV cache")
    sparse = (settings.get("sparsity_config") or {}).get("format", "dense")
    if sparse != "dense":
        raise refused(f"{method} with sparsity in the format {sparse}")
    if (settings.get("transform_config") or {}).get("config_groups"):
        raise refused(f"{method} with transforms")
    if (status := settings.get("quantization_status", "compressed")) != "compressed":
        raise refused(f"{method} with the status {status}")
    layouts = []
    for group in settings["config_groups"].values():
        if group.get("output_activations"):
            raise refused(f"{method} with quantised outputs")
        if group.get("weights"):
            layout = _layout(group["weights"], str(group.get("format") or settings["format"]))
            layouts += [(target, layout) for target in strings(group["targets"])]
    ignored = strings(settings.get("ignore"))
    patterns(name[3:] for name in (*ignored, *(target for target, _ in layouts)) if name.startswith("re:"))
    return Compressed(tuple(layouts), ignored)


def _layout(weights: dict[str, Any], form: str) -> Layout:
    method, bits, number = "compressed-tensors", int(weights["num_bits"]), str(weights.get("type", "int"))
    symmetric, size = bool(weights.get("symmetric", True)), weights.get("group_size")
    allowed = {  # format -> {(type, bits) of its numbers: kind of the `Quantized` matrix}
        "pack-quantized": {("int", 4): "int4", ("int", 8): "int8"},
        "int-quantized": {("int", 4): "int8", ("int", 8): "int8"},
        "float-quantized": {("float", 8): "fp8"},
    }
    if form not in allowed:
        raise refused(f"{method} in the format {form}")
    if (kind := allowed[form].get((number, bits))) is None or (kind == "fp8" and not symmetric):
        raise refused(f"{method}: {form} with {bits} bits of type {number}{'' if symmetric else ' and zero points'}")
    if weights.get("actorder") in (True, "group", "dynamic"):
        raise refused(f"{method} with actorder {weights['actorder']}")
    if weights.get("dynamic"):
        raise refused(f"{method} with dynamic scales of weights")
    strategy = str(weights.get("strategy") or {None: "tensor", -1: "channel"}.get(size, "group"))
    if strategy == "group":
        rows, columns = 1, int(weights["group_size"])
    elif strategy == "block":
        rows, columns = (int(n) for n in weights["block_structure"])
    elif strategy in ("tensor", "channel"):
        rows, columns = int(strategy == "channel"), 0
    else:
        raise refused(f"{method} with the strategy {strategy}")
    if form == "pack-quantized" and not symmetric and strategy in ("tensor", "block"):
        raise refused(f"{method}: {form} with zero points and the strategy {strategy}")
    return Layout(form, bits, Blocks(kind, rows, columns), symmetric)


def _rank(target: str, module: str) -> int:
    """0 if the target does not match the module; otherwise, the more specific the match, the smaller the number."""
    if target == module:
        return 1
    if target.startswith("re:"):
        return 2 * (re.match(target[3:], module) is not None)
    return 3 * (target == "Linear")
