"""How a checkpoint stores quantised matrices: from `quantization_config` in config.json to `Quantized` or `Packed`."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from specker.checkpoints.numbers import check_size
from specker.checkpoints.parse import reason
from specker.checkpoints.quantised.awq import awq
from specker.checkpoints.quantised.compressed import compressed_tensors
from specker.checkpoints.quantised.fp8 import fp8
from specker.checkpoints.quantised.gptq import gptq
from specker.checkpoints.quantised.mxfp4 import Mxfp4
from specker.checkpoints.quantised.stored import Get, Stored, refused
from specker.cpu.packed import FORMATS, ROWS, Packed, Run
from specker.kernels.quant import Quantized
from specker.model.config import CheckpointError

METHODS: dict[str, Callable[[dict[str, Any]], "Scheme"]] = {  # quant_method -> function that parses its settings
    "awq": awq,
    "compressed-tensors": compressed_tensors,
    "fp8": fp8,
    "gptq": gptq,
}


class Scheme(Protocol):
    """A way to store matrices. `module`: a full dotted name, such as model.layers.0.mlp.up_proj; `shape`: [O, E]."""

    @property
    def name(self) -> str:
        """A description for messages."""
        ...

    def covers(self, module: str) -> bool:
        """Whether the module's matrix is quantised."""
        ...

    def stored(self, module: str, shape: tuple[int, int]) -> Stored:
        """The tensors that the module has instead of `weight`: name -> (shape, safetensors dtypes)."""
        ...

    def optional(self, module: str) -> tuple[str, ...]:
        """The names of further tensors that it may have."""
        ...

    def read(self, module: str, shape: tuple[int, int], get: Get) -> Quantized | Packed:
        """The matrix, on the CPU. Raises CheckpointError."""
        ...


@dataclass(frozen=True)
class OwnFormat:
    """specker's own format, into which GGUF files are converted. <module>.packed holds a matrix in the layout of
    cpu/packed.py, so a CPU multiplies by the memory-mapped file itself. config.json names each module's format."""

    modules: dict[str, str]
    restored: tuple[str, ...] = ()  # GGUF formats of the matrices that were converted to float32
    name: str = "specker"

    def covers(self, module: str) -> bool:
        return module in self.modules

    def stored(self, module: str, shape: tuple[int, int]) -> Stored:
        (O, E), form = shape, FORMATS[self.modules[module]]
        blocks = -(-O // ROWS)
        return {f"{module}.packed": ((blocks, form.bytes_of(O, E) // blocks), ("U8",))}

    def optional(self, module: str) -> tuple[str, ...]:
        return ()

    def read(self, module: str, shape: tuple[int, int], get: Get) -> Packed:
        data = get(f"{module}.packed")
        assert data is not None
        return Packed((Run(data, self.modules[module], shape[0]),), shape[1])


def _own(settings: dict[str, Any], source: str) -> OwnFormat:
    modules = settings.get("modules")
    if not isinstance(modules, dict) or not all(str(form) in FORMATS for form in modules.values()):
        raise CheckpointError(f"the quantization_config of {source} is damaged; convert the checkpoint again")
    return OwnFormat(modules, tuple(map(str, settings.get("restored") or ())))


def scheme_of(raw: dict[str, Any], source: str) -> Scheme | None:
    """The scheme that config.json names; None without one. Raises CheckpointError for one that is not supported."""
    settings = raw.get("quantization_config") or raw.get("compression_config")
    if not settings:
        return None
    method = str(settings.get("quant_method", "unknown method") if isinstance(settings, dict) else settings)
    if method == "mxfp4":
        experts = raw.get("num_local_experts") or raw.get("num_experts") or 1
        check_size("num_local_experts", experts, source)
        return Mxfp4(experts)
    if method not in METHODS and method != "specker":
        raise refused(method)
    try:
        return _own(settings, source) if method == "specker" else METHODS[method](settings)
    except CheckpointError:
        raise
    except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError, re.error) as error:
        raise CheckpointError(f"the quantization_config of {source} cannot be read ({reason(error)})") from error
