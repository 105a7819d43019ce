"""How a checkpoint stores quantised matrices: from `quantization_config` in config.json to `Quantized`."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from specker.kernels.quant import LEAST, Quantized
from specker.runtime.model.compressed import compressed_tensors
from specker.runtime.model.config import CheckpointError, reason
from specker.runtime.model.schemes import Get, Stored, awq, fp8, gptq, refused

METHODS: dict[str, Callable[[dict[str, Any]], "Scheme"]] = {  # quant_method -> what reads its settings
    "awq": awq,
    "compressed-tensors": compressed_tensors,
    "fp8": fp8,
    "gptq": gptq,
}


class Scheme(Protocol):
    """A way to store matrices. `module`: a full dotted name, such as model.layers.0.mlp.up_proj; `shape`: [O, E]."""

    @property
    def name(self) -> str:
        """For messages."""
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

    def read(self, module: str, shape: tuple[int, int], get: Get) -> Quantized:
        """The matrix, on the CPU. Raises CheckpointError."""
        ...


@dataclass(frozen=True)
class Own:
    """specker's own format, which GGUF files are converted to: <module>.q, .scale and .shift, as in kernels/quant.py.
    config.json lists (kind, group, dtype of the scales, whether there are shifts) of each module."""

    modules: dict[str, tuple[str, int, str, bool]]
    restored: tuple[str, ...] = ()  # GGUF formats of further matrices, which it holds in float32
    name: str = "specker"

    def covers(self, module: str) -> bool:
        return module in self.modules

    def stored(self, module: str, shape: tuple[int, int]) -> Stored:
        kind, group, dtype, shifts = self.modules[module]
        O, E = shape
        columns, code = (E // 2, "U8") if kind == "int4" else (E, {"int8": "I8", "fp8": "F8_E4M3"}[kind])
        scales = {f"{module}.{part}": ((O, E // group), (dtype,)) for part in ("scale", "shift")[: 1 + shifts]}
        return {f"{module}.q": ((O, columns), (code,)), **scales}

    def optional(self, module: str) -> tuple[str, ...]:
        return ()

    def read(self, module: str, shape: tuple[int, int], get: Get) -> Quantized:
        q, scale, shift = (get(f"{module}.{part}") for part in ("q", "scale", "shift"))
        assert q is not None and scale is not None
        return Quantized(q, scale, shift)


def _own(settings: dict[str, Any], source: str) -> Own:
    modules = settings.get("modules")
    try:
        parsed = {name: (str(k), int(g), str(d), bool(s)) for name, (k, g, d, s) in modules.items()}  # type: ignore[union-attr]
        fitting = all(g > 0 and g % LEAST[k] == 0 and d in ("F16", "F32") for k, g, d, _ in parsed.values())
    except (AttributeError, KeyError, TypeError, ValueError):
        fitting, parsed = False, {}
    if not fitting:
        raise CheckpointError(f"the quantization_config of {source} is damaged; convert the checkpoint again")
    return Own(parsed, tuple(map(str, settings.get("restored") or ())))


def scheme_of(raw: dict[str, Any], source: str) -> Scheme | None:
    """The scheme that config.json names; None without one. Raises CheckpointError for one that is not supported."""
    settings = raw.get("quantization_config") or raw.get("compression_config")
    if not settings:
        return None
    method = str(settings.get("quant_method", "unknown method") if isinstance(settings, dict) else settings)
    if method == "specker":
        return _own(settings, source)
    if method not in METHODS:
        raise refused(method)
    try:
        return METHODS[method](settings)
    except CheckpointError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, re.error) as error:
        raise CheckpointError(f"the quantization_config of {source} cannot be read ({reason(error)})") from error
