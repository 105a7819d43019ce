"""cpu: the compiled kernels that the ops use for tensors on the CPU: those of the backend that registered itself."""

import sys
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.compiler import is_dynamo_compiling


class Backend(Protocol):
    """Compiled kernels for tensors on the CPU."""

    def available(self) -> bool:
        """Whether they can be compiled on this machine. The first call may compile them."""

    def serves(self, x: Tensor, weight: Tensor) -> bool:
        """Whether `product` takes these arguments."""

    def product(self, x: Tensor, weight: Tensor, activations: str) -> Tensor:
        """x [T, E] float32 times weight [O, E]^T, float32 or bfloat16 -> [T, O] float32. `activations`: the type to
        which x is rounded."""

    def clusters(self, args: Any, draws: Sequence[tuple[float, int]]) -> tuple[Tensor, Tensor, Tensor]:
        """What `cluster_topk` returns for its `Arguments` with rows [T, E] float32. `draws`: temperature and seed for
        all rows, or for each of as many equal runs of rows. Rows are rounded to bfloat16 beside a weight of
        bfloat16."""

    def gumbel(self, seed: int, positions: Tensor, padded: int) -> Tensor:
        """The noise (noise.py) of ids 0 .. padded - 1 at `positions` [T] int64: [T, padded] float32."""

    def sample(
        self, logits: Tensor, draws: Sequence[tuple[float, int, float, int]], positions: Tensor, run: int
    ) -> Tensor:
        """The tokens [T] int64 that `sample_rows` draws from logits [T, V] float32 at `positions` [T] int64. `draws`:
        temperature, top_k, top_p and seed for each `run` rows."""

    def adjust(self, args: Any) -> Tensor:
        """What `adjust_rows` returns for its `Arguments` with logits [T, V] float32."""


_backend: Backend | None = None


def use(backend: Backend) -> None:
    """From now on the ops use these kernels on a CPU, if they are available."""
    global _backend
    _backend = backend


def native() -> Backend | None:
    """The registered backend. None without one, or if it is not available; torch's slower operators then do the work.
    A program may have imported nothing but these ops: then their package says first which backends it has, unless the
    ops were copied out of it (scripts/hub_kernel.py)."""
    if _backend is None:
        package = sys.modules.get(__name__.partition(".")[0])
        getattr(package, "_register_backends", lambda: None)()
    return _backend if _backend is not None and _backend.available() else None


def eager(x: Tensor) -> bool:
    """Whether compiled kernels may read x: a CPU tensor outside autograd and torch.compile, and not one of
    torch.export's fake tensors."""
    return type(x) is Tensor and x.is_cpu and not (x.requires_grad or is_dynamo_compiling())
