"""Record GPU launches without a GPU. Within `recording`, torch ops run on meta tensors: they have no values, and
reading one on the host raises. Every tensor claims to be on a GPU. Kernels and ops are logged, kernels not launched."""

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo  # its import lists the attributes of Tensor, which `recording` patches
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from specker.checkpoints import buffers
from specker.kernels import variant as variants
from specker.kernels.ancestors import chain_words
from specker.kernels.variant import Variant
from specker.model import cache, dflash
from specker.runtime.round.graphs import Graphs
from specker.runtime.strategies.diffuspec import drafter as diffuspec
from specker.runtime.strategies.eagle import pairs as eagle

CPU, META = torch.device("cpu"), torch.device("meta")
QUIET = {"aten.new_empty.default", "aten.empty_like.default", "aten.empty.memory_format", "prim.device.default"}


class Log(list):
    """The launches, in order."""

    def __init__(self) -> None:
        self.segments: list[tuple[Any, int, int]] = []  # key, first launch, end of the launches


def described(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return str(x.dtype), tuple(x.shape), tuple(x.stride()), x.storage_offset()
    if isinstance(x, (list, tuple)):
        return tuple(described(y) for y in x)
    return x


_to = Tensor.to


def to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`Tensor.to`, which copies nothing if the device is the one that all tensors report."""
    if x.is_meta:
        args = tuple(META if y == CPU else y for y in args)
        kwargs = {name: META if y == CPU else y for name, y in kwargs.items()}
    return _to(x, *args, **kwargs)


FROM_HOST = (torch.tensor, torch.as_tensor, torch.from_numpy, torch.Tensor.cpu, torch.Tensor.cuda)


class Capturing(TorchFunctionMode):
    """During a graph capture, copies from or to the host are forbidden: they would end the capture."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        devices = [x for x in (*args[1:], *(kwargs or {}).values()) if isinstance(x, (torch.device, str))]
        moved = func is to and devices
        assert func not in FROM_HOST and not moved, f"{func} within a graph"
        return func(*args, **(kwargs or {}))


class Ops(TorchDispatchMode):
    """Log torch ops, and run them on meta tensors."""

    def __init__(self, log: Log):
        super().__init__()
        self.log = log
        self.meta: dict[int, tuple[Tensor, Tensor]] = {}  # a tensor with values, and its stand-in

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not func.is_view and str(func) not in QUIET:
            self.log.append((str(func), described(args), described(tuple(kwargs.items()))))
        if func is torch.ops.aten.normal_.default:  # with a generator, torch draws real numbers
            return self.without_values(args[0])
        kwargs = {name: self.without_values(x) for name, x in kwargs.items()}
        if creates(func):
            kwargs["device"] = META
        return func(*map(self.without_values, args), **kwargs)

    def without_values(self, x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return [self.without_values(y) for y in x]
        if isinstance(x, torch.device):
            return META
        if not isinstance(x, Tensor) or x.is_meta:
            return x
        if id(x) not in self.meta:
            last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else -1
            with torch.inference_mode(x.is_inference()):
                memory = torch.empty(x.storage_offset() + last + 1, dtype=x.dtype, device=META)
                self.meta[id(x)] = x, memory.as_strided(x.shape, x.stride(), x.storage_offset())
        return self.meta[id(x)][1]


@functools.cache
def creates(func: Any) -> bool:
    """Whether an op takes a device and no tensor."""
    kinds = [str(argument.type) for argument in func._schema.arguments]
    return "Optional[Device]" in kinds and not any("Tensor" in kind for kind in kinds)


@contextmanager
def recording() -> Iterator[Log]:
    """Log the launches in this context. Tensors created here have no values; existing ones are accepted."""
    log = Log()
    seen, run = set(), Graphs.run

    def segment(graphs: Graphs, key: Any, work: Any) -> None:
        start = len(log)
        with Capturing() if key in seen else nullcontext():  # `Graphs` captures on the second run
            run(graphs, key, work)
        seen.add(key)
        log.segments.append((key, start, len(log)))

    def launched(variant: Variant, grid: tuple[int, ...], *arguments: Any) -> None:
        log.append((f"{variant.kernel.fn.__name__}: {variant.name}", tuple(grid), described(arguments)))

    _forget()
    try:
        with ExitStack() as stack:
            for place, name, value in (
                (Tensor, "is_cuda", property(lambda self: True)),
                (Tensor, "is_cpu", property(lambda self: False)),
                (Tensor, "device", property(lambda self: CPU)),
                (Tensor, "to", to),
                (Variant, "__call__", launched),
                (Graphs, "run", segment),
                (buffers, "activations", lambda dtype, device: dtype),
            ):
                stack.enter_context(patch.object(place, name, value))
            stack.enter_context(Ops(log))
            yield log
    finally:
        _forget()


def _forget() -> None:
    """Clear cached constants: those created while recording have no values, and every recording must create them."""
    made = cache.sequence_bounds, cache.window_sizes, cache._full_words, diffuspec._full_words, chain_words
    for each in (*made, eagle._before, dflash._full, dflash._chain):
        each.cache_clear()
    variants._shared.clear()


def kernels(log: Log) -> list[str]:
    """The Triton kernels alone, by name."""
    return [name for name, *_ in log if not name.startswith("aten.")]
