"""cpu: what the ops use of the compiled CPU kernels in specker/cpu, where there are any."""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any, Protocol

from torch import Tensor
from torch.compiler import is_dynamo_compiling


class Backend(Protocol):
    """Compiled kernels for tensors on the CPU."""

    def serves(self, x: Tensor, weight: Tensor) -> bool:
        """Whether `product` takes these arguments."""

    def product(self, x: Tensor, weight: Tensor, activations: str) -> Tensor:
        """x [T, E] float32 times weight [O, E]^T, float32 or bfloat16 -> [T, O] float32. `activations`: the type to
        which x is rounded."""

    def clusters(
        self,
        hidden: Tensor,
        weight: Tensor,
        centroids: Tensor,
        token_ids: Tensor,
        count: int,
        k: int,
        norm: tuple[Tensor, float] | None,
        draws: Sequence[tuple[float, int]],
        positions: Tensor | None,
        with_lse: bool,
        activations: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What `cluster_topk` returns for rows [T, E] float32 that read `count` clusters each. `draws`: temperature and
        seed for all rows, or for each of as many equal runs of rows. `activations`: the type to which x is rounded."""

    def gumbel(self, seed: int, positions: Tensor, padded: int) -> Tensor:
        """The noise (noise.py) of ids 0 .. padded - 1 at `positions` [T] int64: [T, padded] float32."""

    def sample(
        self, logits: Tensor, draws: Sequence[tuple[float, int, float, int]], positions: Tensor, run: int
    ) -> Tensor:
        """The tokens [T] int64 that `sample_rows` draws from logits [T, V] float32 at `positions` [T] int64. `draws`:
        temperature, top_k, top_p and seed for each `run` rows."""

    def adjust(
        self,
        logits: Tensor,
        text: Tensor,
        prompt: Tensor,
        length: Tensor,
        window: Tensor,
        numbers: Tensor,
        parents: Tensor | None,
        places: Tensor | None,
        bias_ids: Tensor | None,
        bias: Tensor | None,
        floors: bool,
    ) -> Tensor:
        """What `adjust_rows` returns for logits [T, V] float32."""


@cache
def native() -> Backend | None:
    """The kernels of specker.cpu. None if they cannot be compiled, or if these ops were copied out of the package
    (scripts/hub_kernel.py); torch's slower operators then do the work. The import is by name, because specker.cpu
    imports this package; `specker.cpu.OPS` is where their types are checked."""
    if __name__ != "specker.kernels.cpu":
        return None
    cpu: Any = import_module("specker.cpu")
    return cpu.OPS if cpu.available() else None


def eager(x: Tensor) -> bool:
    """Whether compiled kernels may read x: a CPU tensor outside autograd and torch.compile, and not one of
    torch.export's fake tensors."""
    return type(x) is Tensor and x.is_cpu and not (x.requires_grad or is_dynamo_compiling())
