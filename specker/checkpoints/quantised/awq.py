"""The AWQ checkpoint format, as a `Scheme` (schemes.py). Source: AutoAWQ's WQLinear_GEMM."""

from typing import Any

from specker.checkpoints.quantised.stored import (
    FLOATS,
    Blocks,
    Get,
    LayerMatrices,
    Stored,
    needed,
    refused,
    strings,
    unpacked,
)
from specker.kernels.quant import Quantized

AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # position of each column within an int32: column 1 is the fifth number


class Awq(LayerMatrices):
    """<module>.qweight int32 [E, O / 8], qzeros int32 [groups, O / 8], scales [groups, O]. Each int32 packs eight
    columns, the even ones first (AWQ_ORDER)."""

    @property
    def name(self) -> str:
        return f"AWQ (4 bits, {self.blocks})"

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
