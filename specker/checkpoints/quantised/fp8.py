"""The fp8 checkpoint format, as a `Scheme` (schemes.py). Source: DeepSeek-V3's fp8 blocks."""

from typing import Any

from specker.checkpoints.quantised.stored import (
    FLOATS,
    Blocks,
    Get,
    LayerMatrices,
    Stored,
    needed,
    refused,
    single,
    strings,
)
from specker.kernels.quant import Quantized


class Fp8(LayerMatrices):
    """<module>.weight is float8_e4m3fn [O, E]. weight_scale_inv holds the factor of each block's weights. If the block
    is the whole matrix, the factor may be called weight_scale."""

    @property
    def name(self) -> str:
        return f"fp8 ({self.blocks})"

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
