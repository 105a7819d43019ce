"""The MXFP4 checkpoint format of gpt-oss, as a `Scheme` (schemes.py). Source: transformers' integrations/mxfp4.py.

<module>_blocks is uint8 [X, O, E / 32, 16], the e2m1 numbers of all experts of a layer: a byte has two adjacent
columns, the even one in its low four bits. <module>_scales is uint8 [X, O, E / 32], the exponents of e8m0. Only the
experts are stored so. Reading moves numbers to other bytes (kernels/quant.py) and changes none.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specker.checkpoints.architectures.names import DOWN, GATE_UP
from specker.checkpoints.quantised.stored import Get, Stored, needed
from specker.kernels import quant
from specker.kernels.quant import Quantized
from specker.model.config import CheckpointError

GROUP = 32  # columns that share a scale
NAN = 255  # the scale that is no number


@dataclass(frozen=True)
class Mxfp4:
    experts: int
    name: str = "mxfp4"
    modules: tuple[str, ...] = (GATE_UP, DOWN)

    def covers(self, module: str) -> bool:
        return module.endswith(self.modules)

    def stored(self, module: str, shape: tuple[int, int]) -> Stored:
        O, E = shape
        try:
            quant.check("mxfp4", shape)
        except ValueError as error:
            raise CheckpointError(f"the quantised weights of {module} cannot be read: {error}") from error
        scales = self.experts, O // self.experts, E // GROUP
        return {f"{module}_blocks": ((*scales, GROUP // 2), ("U8",)), f"{module}_scales": (scales, ("U8",))}

    def optional(self, module: str) -> tuple[str, ...]:
        return ()

    def read(self, module: str, shape: tuple[int, int], get: Get) -> Quantized:
        blocks, scales = (needed(get, f"{module}_{part}").flatten(0, 1) for part in ("blocks", "scales"))
        if bool((scales == NAN).any()):
            raise CheckpointError(f"{module}_scales has scales that are NaN; download the checkpoint again")
        return Quantized(halved(blocks).flatten(1), scales, None)


def halved(blocks: Tensor) -> Tensor:
    """Blocks [.., 16] with two adjacent columns in a byte -> the same numbers in the order of kernels/quant.py: the
    first 16 in the low four bits, the others in the high ones."""
    first, last = blocks.chunk(2, -1)
    return torch.stack((first & 15 | last << 4, first >> 4 | last & 240), -1).flatten(-2)
