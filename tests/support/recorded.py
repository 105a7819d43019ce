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
from torch.utils._python_dispatch import TorchDispatchMode

from specker.checkpoints import buffers
from specker.kernels import variant as variants
from specker.kernels.ancestors import chain_words
from specker.kernels.variant import Variant
from specker.model import cache, dflash
from specker.runtime.round.graphs import Graphs
from specker.runtime.strategies.diffuspec import diffusion_drafter as diffuspec
from specker.runtime.strategies.eagle import pairs as eagle

CPU, META = torch.device("cpu"), torch.device("meta")
QUIET = {"aten.new_empty.default", "aten.empty_like.default", "aten.empty.memory_format", "prim.device.default"}


class Log(list):
    """The launches, in order."""

    def __init__(self) -> None:
        self.segments: list[tuple[Any, int, int]] = []  # key, first launch, end of the launches


PLAIN = {int, float, bool, str, type(None)}


def described(x: Any) -> Any:
    if type(x) in PLAIN:  # most arguments
        return x
    if isinstance(x, torch.Tensor):
        return x.dtype, x.shape, x.stride(), x.storage_offset()
    if isinstance(x, (list, tuple)):
        return tuple([described(y) for y in x])
    return x


_to = Tensor.to
_capturing = False


def to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`Tensor.to`, which copies nothing if the device is the one that all tensors report."""
    moved = any(isinstance(y, (torch.device, str)) for y in (*args, *kwargs.values()))
    assert not (_capturing and moved), "Tensor.to within a graph"
    if x.is_meta:
        args = tuple(META if y == CPU else y for y in args)
        kwargs = {name: META if y == CPU else y for name, y in kwargs.items()}
    return _to(x, *args, **kwargs)


FROM_HOST = (torch, "tensor"), (torch, "as_tensor"), (torch, "from_numpy"), (Tensor, "cpu"), (Tensor, "cuda")


@contextmanager
def capturing() -> Iterator[None]:
    """During a graph capture, copies from or to the host are forbidden: they would end the capture."""
    global _capturing

    def forbidden(name: str) -> Any:
        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError(f"{name} within a graph")

        return refuse

    with ExitStack() as stack:
        for place, name in FROM_HOST:
            stack.enter_context(patch.object(place, name, forbidden(name)))
        _capturing = True
        try:
            yield
        finally:
            _capturing = False


class Ops(TorchDispatchMode):
    """Log torch ops, and run them on meta tensors."""

    def __init__(self, log: Log):
        super().__init__()
        self.log = log
        self.meta: dict[int, tuple[Tensor, Tensor]] = {}  # a tensor with values, and its stand-in
        self.made: dict[Any, tuple[Any, ...]] = {}  # by call: the shape, strides and type of the new tensor

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and to skip it costs more than most of the calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        called = str(func), described(args), described(tuple(kwargs.items()))
        if not func.is_view and called[0] not in QUIET:
            self.log.append(called)
        if func is torch.ops.aten.normal_.default:  # with a generator, torch draws real numbers
            return self.without_values(args[0])
        if called not in self.made:
            kwargs = {name: self.without_values(x) for name, x in kwargs.items()}
            if creates(func):
                kwargs["device"] = META
            result = func(*map(self.without_values, args), **kwargs)
            if not isinstance(result, Tensor) or not fresh(func):
                return result
            self.made[called] = tuple(result.shape), result.stride(), result.dtype
        shape, stride, dtype = self.made[called]
        return torch.empty_strided(shape, stride, dtype=dtype, device=META)

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


@functools.cache
def fresh(func: Any) -> bool:
    """Whether an op returns one new tensor, which depends on no tensor's values, and changes none."""
    returned = func._schema.returns
    return not func.is_view and not func._schema.is_mutable and len(returned) == 1 and returned[0].alias_info is None


@contextmanager
def recording() -> Iterator[Log]:
    """Log the launches in this context. Tensors created here have no values; existing ones are accepted."""
    log = Log()
    seen, run = set(), Graphs.run

    def segment(graphs: Graphs, key: Any, work: Any) -> None:
        start = len(log)
        with capturing() if key in seen else nullcontext():  # `Graphs` captures on the second run
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
