"""What would be launched on a GPU, without one: every tensor is fake, has no numbers, and says that it is CUDA's.
Reading one on the host raises; a kernel is written down instead of launched, and so is every torch op."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from specker.kernels.ancestors import chain_words
from specker.kernels.variant import Variant
from specker.runtime.graphs import Graphs
from specker.runtime.model import cache
from specker.runtime.strategies import diffuspec

QUIET = {"aten.new_empty.default", "aten.empty_like.default", "aten.empty.memory_format", "prim.device.default"}


class Log(list):
    """What is launched, in order."""

    def __init__(self) -> None:
        self.stretches: list[tuple[Any, int, int]] = []  # key, and where its launches begin and end


def described(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return str(x.dtype), tuple(x.shape), tuple(x.stride()), x.storage_offset()
    if isinstance(x, (list, tuple)):
        return tuple(described(y) for y in x)
    return x


FROM_HOST = (torch.tensor, torch.as_tensor, torch.from_numpy, torch.Tensor.cpu, torch.Tensor.cuda)


class Cuda(TorchFunctionMode):
    """Tensors are on a GPU as far as the ops can tell. While a graph would be captured nothing may come from the host
    or go to it: such a copy would end the capture."""

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
    """What is launched meanwhile. Tensors made meanwhile are fake; others are let in."""
    log = Log()
    cuda, seen, run = Cuda(), set(), Graphs.run

    def stretch(graphs: Graphs, key: Any, work: Any) -> None:
        cuda.capturing = key in seen  # the second time, as `Graphs` does
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
        with calls[0], calls[1], FakeTensorMode(allow_non_fake_inputs=True), Ops(log), cuda:
            yield log
    finally:
        _forget()


def _forget() -> None:
    """Constants that are made once: those made meanwhile have no numbers, and all recordings make them."""
    for made in (cache.sequence_bounds, cache._repeated, cache._full_words, diffuspec._full_words, chain_words):
        made.cache_clear()


def kernels(log: Log) -> list[str]:
    """The Triton kernels alone, by name."""
    return [name for name, *_ in log if not name.startswith("aten.")]
