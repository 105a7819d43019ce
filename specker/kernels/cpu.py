"""cpu: shared code of the CPU forms for few rows. Such a form computes the op's reference in numpy. It returns
None to decline its arguments: many rows, a GPU, half precision, or shapes that the op's check rejects.

A decoding step runs some hundreds of operations on a few kilobytes each. In between, the weights evict their code from
the caches, so an operation costs as much as refetching its code. A numpy view or ufunc costs a third of a torch one
(bench/LOG.md has the step's time with and without). Torch handles more rows: it has threads.
"""

from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

FEW_ROWS = 64
_TYPES = (torch.float32, torch.float64)  # numpy has no bfloat16, and its float16 is slow


@cache
def native() -> Any:
    """The CPU's compiled backend, specker.cpu; None if it cannot be compiled, or if these ops are a copy outside of the
    package (scripts/hub_kernel.py). Torch's operators then serve, more slowly."""
    if __name__ != "specker.kernels.cpu":
        return None
    cpu: Any = import_module("specker.cpu")
    return cpu if cpu.available() else None


def few(x: Tensor) -> bool:
    """Whether x [T, ..] has few rows of a type that numpy handles."""
    return plain(x) and x.shape[0] <= FEW_ROWS  # in this order a graph gets no guard on the number of rows


def plain(x: Tensor) -> bool:
    """Whether numpy may have x: a CPU tensor outside of autograd, torch.compile and torch.export (a fake tensor)."""
    return x.dtype in _TYPES and eager(x)


def eager(x: Tensor) -> bool:
    """Whether compiled kernels may read x: as for `plain`, in any dtype."""
    return type(x) is Tensor and x.is_cpu and not (x.requires_grad or is_dynamo_compiling())


def rms_norm(x: Any, weight: Any, eps: float) -> Any:
    """RMSNorm over the last dimension of a numpy array: x / sqrt(mean(x^2) + eps) * weight."""
    if x.ndim == 2 and len(x) == 1 and x.size <= 8192:  # a decoding step: the factor is one number
        y = x * ((float(x[0] @ x[0]) / x.shape[1] + eps) ** -0.5)
        y *= weight
        return y
    scale = np.vecdot(x, x)[..., None]
    scale /= x.shape[-1]
    scale += eps
    np.sqrt(scale, out=scale)
    return x / scale * weight


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor | None:
    """RMSNorm of x [T, E]."""
    if not few(x) or weight.dtype != x.dtype or weight.requires_grad:
        return None
    return torch.from_numpy(rms_norm(x.numpy(), weight.numpy(), eps))
