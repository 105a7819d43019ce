"""variant: one compiled form of a kernel. What a launcher launches and what the compile-only checks compile is the same
object, so the resource table speaks of the code that runs.

An op file keeps its tile table in a cached function that returns the `Variant` for a dtype and shape, launches through
it, and lists representative ones:

    @lru_cache
    def _variant(dtype: torch.dtype, E: int, arch: int) -> Variant: ...      # the tile table
    def variants(arch: int) -> Iterator[Variant]: ...                         # what `make static` compiles

    _variant(x.dtype, E, arch(x.device))((T,), x, y, T)                       # in the launcher: grid, then arguments

A kernel takes its runtime arguments first and its constexprs last. Integers that change from call to call (lengths) are
named in `do_not_specialize`, and pointers to small index tensors, which may be views at any offset, in
`do_not_specialize_on_alignment`; sizes that belong to a model (E, D, heads) are constexprs.

FP fusion is off, for these kernels only. With it the compiler turns a * b + c into one FMA where it sees fit, so the
bits of a row could change with the code around the expression: with P, with a tile's size, with the compiler's version
(Triton 3.10 flips the default). Without it the code says what is computed, `tl.fma` where one rounding is wanted, and
the interpreter computes the same. `TRITON_DEFAULT_FP_FUSION` would set it for every kernel of the process, other
libraries' too; the launch option does not.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # there are no wheels outside Linux: the references run, the kernels do not exist

    class _Absent:
        """Stands for the module, its decorators and its types, so that kernels can still be defined."""

        def __getattr__(self, name: str) -> Any:
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self

    triton = tl = _Absent()

__all__ = ["FP_FUSION", "TYPES", "Variant", "arch", "same_device", "tl", "triton"]

FP_FUSION = False
TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True, eq=False)
class Variant:
    """A kernel with everything its compilation depends on."""

    name: str  # unique within the op: "bf16 P2 Q1 E4096"
    kernel: Any  # a @triton.jit function: runtime arguments first, constexprs last
    arguments: tuple[str | None, ...]  # types of the runtime arguments: "*bf16", "i32"; None for a None
    constexprs: Mapping[str, Any]
    num_warps: int
    num_stages: int = 1
    dot: bool = False  # a half-precision dot is meant to become matrix instructions
    wide: bool = True  # the big operand is meant to be read 16 bytes at a time, or asynchronously
    smoke: bool = False  # `make test` compiles it: bfloat16, D 128 where it applies, a few an op
    options: Mapping[str, Any] = field(default_factory=dict)  # further compiler options, such as maxnreg

    def compile_options(self) -> dict[str, Any]:
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": FP_FUSION,
            **self.options,
        }

    def __call__(self, grid: tuple[int, ...], *arguments: Any) -> None:
        """Launch on the device of the first argument, a tensor: Triton would take the current one."""
        device = arguments[0].device
        other = device.type == "cuda" and device.index != torch.cuda.current_device()
        with torch.cuda.device(device) if other else nullcontext():
            self.kernel[grid](*arguments, **self.constexprs, **self.compile_options())


@lru_cache
def arch(device: torch.device) -> int:
    """The column of the tile tables: 80, 90 (wgmma) or 100 (tcgen05). Consumer cards of any generation have sm_80's
    matrix instructions and at most 100 KiB of shared memory. The interpreter follows Hopper's."""
    if device.type != "cuda":
        return 90
    return {9: 90, 10: 100}.get(torch.cuda.get_device_capability(device)[0], 80)


def same_device(first: Tensor, **others: Tensor | None) -> None:
    """Raise ValueError unless every tensor is where `first` is: a kernel would read another device's addresses."""
    for name, other in others.items():
        if other is not None and other.device != first.device:
            raise ValueError(f"{name} must be on {first.device}, got {other.device}")
