"""cpu: how an op reaches the compiled CPU kernels of specker.cpu."""

from functools import cache
from importlib import import_module
from typing import Any

from torch import Tensor
from torch.compiler import is_dynamo_compiling


@cache
def native() -> Any:
    """The compiled CPU backend, specker.cpu. None if it cannot be compiled, or if these ops were copied out of the
    package (scripts/hub_kernel.py); torch's slower operators then do the work."""
    if __name__ != "specker.kernels.cpu":
        return None
    cpu: Any = import_module("specker.cpu")
    return cpu if cpu.available() else None


def eager(x: Tensor) -> bool:
    """Whether compiled kernels may read x: a CPU tensor outside autograd and torch.compile, and not one of
    torch.export's fake tensors."""
    return type(x) is Tensor and x.is_cpu and not (x.requires_grad or is_dynamo_compiling())
