"""Record GPU launches without a GPU. Every tensor is fake: it has no values and reports a CUDA device. Reading one on
the host raises. Kernels and torch ops are logged instead of launched."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from specker.checkpoints import buffers
from specker.kernels import variant as variants
from specker.kernels.ancestors import chain_words
from specker.kernels.variant import Variant
from specker.model import cache
from specker.runtime.graphs import Graphs
from specker.runtime.strategies.diffuspec import drafter as diffuspec

QUIET = {"aten.new_empty.default", "aten.empty_like.default", "aten.empty.memory_format", "prim.device.default"}


class Log(list):
    """The launches, in order."""

    def __init__(self) -> None:
        self.stretches: list[tuple[Any, int, int]] = []  # key, first launch, end of the launches


def described(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return str(x.dtype), tuple(x.shape), tuple(x.stride()), x.storage_offset()
    if isinstance(x, (list, tuple)):
        return tuple(described(y) for y in x)
    return x


FROM_HOST = (torch.tensor, torch.as_tensor, torch.from_numpy, torch.Tensor.cpu, torch.Tensor.cuda)


class Cuda(TorchFunctionMode):
    """To the ops, every tensor appears to be on a GPU. During a graph capture, copies from or to the host are
    forbidden: they would end the capture."""

    capturing = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_cuda.__get__:
            return True
        if func == torch.Tensor.is_cpu.__get__:
            return False
        if self.capturing:
            devices = [x for x in (*args[1:], *(kwargs or {}).values()) if isinstance(x, (torch.device, str))]
            moved = func is torch.Tensor.to and devices
            assert func not in FROM_HOST and not moved, f"{func} within a graph"
        return func(*args, **(kwargs or {}))


class Ops(TorchDispatchMode):
    def __init__(self, log: Log):
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and str(func) not in QUIET:
            self.log.append((str(func), described(args), described(tuple((kwargs or {}).items()))))
        return func(*args, **(kwargs or {}))


@contextmanager
def recording() -> Iterator[Log]:
    """Log the launches in this context. Tensors created here are fake; existing ones are accepted."""
    log = Log()
    cuda, seen, run = Cuda(), set(), Graphs.run

    def stretch(graphs: Graphs, key: Any, work: Any) -> None:
        cuda.capturing = key in seen  # `Graphs` captures on the second run
        seen.add(key)
        start = len(log)
        run(graphs, key, work)
        log.stretches.append((key, start, len(log)))
        cuda.capturing = False

    def launched(variant: Variant, grid: tuple[int, ...], *arguments: Any) -> None:
        log.append((f"{variant.kernel.fn.__name__}: {variant.name}", tuple(grid), described(arguments)))

    _forget()
    try:
        calls = patch.object(Variant, "__call__", launched), patch.object(Graphs, "run", stretch)
        alike = patch.object(buffers, "activations", lambda dtype, device: dtype)
        with calls[0], calls[1], alike, FakeTensorMode(allow_non_fake_inputs=True), Ops(log), cuda:
            yield log
    finally:
        _forget()


def _forget() -> None:
    """Clear cached constants: those created while recording have no values, and every recording must create them."""
    made = cache.sequence_bounds, cache.window_sizes, cache._full_words, diffuspec._full_words, chain_words
    for each in made:
        each.cache_clear()
    variants._shared.clear()


def kernels(log: Log) -> list[str]:
    """The Triton kernels alone, by name."""
    return [name for name, *_ in log if not name.startswith("aten.")]
