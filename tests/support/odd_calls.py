"""Odd calls of the ops: valid ones (op_calls.py) with one or two arguments changed. Each must either compute what the
same call with plain copies of its arguments computes, with and without compiled kernels, or be refused in a sentence
of the op's own.

python tests/support/odd_calls.py COUNT [SEED [OP..]]     runs so many in this process
"""

import importlib
import random
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from op_calls import CALLS, ROUND_CALLS, op
from torch import Tensor

from specker.kernels import cpu, noise
from specker.kernels.quant import Quantized

adjust = importlib.import_module("specker.kernels.adjust_rows")
clusters = importlib.import_module("specker.kernels.cluster_topk")
linear = importlib.import_module("specker.kernels.row_linear")
sample = importlib.import_module("specker.kernels.sample_rows")

LIMIT = 60  # seconds of a call that takes milliseconds
WITH_KERNELS = adjust, clusters, linear, noise, sample
PACKAGE = str(Path(adjust.__file__).parents[1])
DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
INTEGERS = -1, -2, 0, 1, 2, 5, 63, 100, 10**6, 2**31 - 1, 2**31, -(2**31), 2**62, 2**63 - 1, -(2**63)
FLOATS = 0.0, -0.0, -1.0, 1e-30, 1e30, -1e30, float("inf"), float("-inf"), float("nan")
SIZES = {("rope_table", "length"), ("repeat_rows", "layers")}  # any number is valid, and so much memory is taken


class Fault(AssertionError):
    """A call that is neither served right nor refused in a sentence."""


def each_tensor(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The argument with `change` applied to all of its tensors."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Quantized):
        return Quantized(*(None if part is None else change(part) for part in (value.q, value.scale, value.shift)))
    if isinstance(value, tuple):
        parts = [each_tensor(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def fresh(given: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """The arguments in memory of their own, with random numbers in place of equal ones."""
    made = torch.Generator().manual_seed(draw.randrange(2**31))

    def change(x: Tensor) -> Tensor:
        if x.dtype in (torch.float32, torch.bfloat16) and x.numel() > 1 and bool((x == 1).all()):
            return torch.randn(x.shape, generator=made).to(x.dtype)
        return x.clone()

    return {name: each_tensor(value, change) for name, value in given.items()}


def odd_size(x: Tensor, draw: random.Random) -> Tensor:
    """A dimension is one longer or shorter, or empty."""
    if not x.dim():
        return x[None]
    at = draw.randrange(x.dim())
    n = x.shape[at]
    kept = draw.choice((0, n - 1, n + 1, 2 * n))
    return torch.cat((x, x), at)[(slice(None),) * at + (slice(max(kept, 0)),)]


def odd_layout(x: Tensor, draw: random.Random) -> Tensor:
    """The same numbers in other places."""
    how = draw.randrange(5)
    if how == 0 and x.dim() > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if how == 1 and x.dim():
        return torch.stack((x, x), -1).flatten(-2)[..., ::2]
    if how == 2 and x.dim():
        at = draw.randrange(x.dim())
        return x.narrow(at, 0, min(1, x.shape[at])).expand(x.shape) if x.shape[at] else x
    if how == 3:
        return torch.nn.functional.pad(x.flatten(), (1, 0))[1:].view(x.shape)  # at another offset
    return torch.cat((x, x))[len(x) :] if x.dim() else x


def odd_number(x: Tensor, sizes: list[int], draw: random.Random) -> Tensor:
    """One or several numbers are changed."""
    x = x.clone()
    if not x.numel() or x.dtype in (torch.bool, torch.complex64, torch.float8_e4m3fn):
        return x
    flat = x.view(-1)
    for _ in range(draw.choice((1, 1, 1, 3))):
        at = draw.randrange(len(flat))
        if x.is_floating_point():
            flat[at] = draw.choice(FLOATS)
            continue
        near = int(flat[at]) + draw.choice((-1, 1))
        about = torch.iinfo(x.dtype)
        value = draw.choice((near, near, *INTEGERS, *sizes))
        flat[at] = min(max(value, about.min), about.max)
    return x


def odd_grad(x: Tensor, draw: random.Random) -> Tensor:
    """A tensor that wants a gradient: a leaf, a view of one, or a result."""
    if not x.is_floating_point():
        return x
    leaf = x.clone().requires_grad_()
    return draw.choice((leaf, leaf.view(x.shape), leaf * 1, torch.nn.Parameter(x.clone())))


def odd_object(x: Any, draw: random.Random) -> Any:
    kinds = [None, 5, -1, 0.5, "x", [1, 2], (), {}, object(), torch.ones(2), np.float64(0.5), np.int64(3), True]
    if isinstance(x, Tensor):
        kinds += [x.to("meta"), x.tolist(), x.flatten()[:1], torch.tensor(3), x.unsqueeze(0), x.flatten()]
        kinds += [x.float().to_sparse(), x[:0] if x.dim() else x]
        if x.dtype not in (torch.bfloat16, torch.float8_e4m3fn):
            kinds.append(x.numpy())
    return draw.choice(kinds)


def odd(value: Any, name: tuple[str, str], sizes: list[int], draw: random.Random) -> tuple[str, Any]:
    """What was done to the argument, and the changed one."""
    if isinstance(value, Tensor):
        ways: list[tuple[str, Callable[[], Any]]] = [
            ("dtype", lambda: value.to(draw.choice(DTYPES))),
            ("size", lambda: odd_size(value, draw)),
            ("layout", lambda: odd_layout(value, draw)),
            ("number", lambda: odd_number(value, sizes, draw)),
            ("gradient", lambda: odd_grad(value, draw)),
            ("object", lambda: odd_object(value, draw)),
        ]
        weights = [1, 2, 2, 4 if not value.is_floating_point() else 1, 1 if value.is_floating_point() else 0, 1]
        what, make = draw.choices(ways, weights)[0]
        return what, make()
    if isinstance(value, Quantized):
        parts = [value.q, value.scale, value.shift]
        n = draw.randrange(3)
        if parts[n] is None or draw.random() < 0.1:
            return "object", odd_object(None, draw)
        what, parts[n] = odd(parts[n], name, sizes, draw)
        return what, Quantized(*parts)
    if isinstance(value, tuple) and value and draw.random() < 0.9:
        n = draw.randrange(len(value))
        what, part = odd(value[n], name, sizes, draw)
        parts = (*value[:n], part, *value[n + 1 :])
        return f"{n}, {what}", type(value)(*parts) if hasattr(value, "_fields") else parts
    if isinstance(value, int | float) and name not in SIZES and draw.random() < 0.8:
        return "number", draw.choice((*INTEGERS, *FLOATS, 2**64, 10**30, *sizes, value + 1, value - 1))
    if isinstance(value, str) and draw.random() < 0.7:
        return "name", draw.choice(("", "none", "silu", "silu_mul", "float32", "split", "sum", "gelu", "sigmoid"))
    if isinstance(value, torch.dtype):
        return "dtype", draw.choice((*DTYPES, None, "float32", 3))
    return "object", odd_object(value, draw)


def arguments(name: str, given: dict[str, Any], seed: int) -> tuple[str, dict[str, Any]]:
    """The odd arguments of a seed, always the same ones in new memory."""
    draw = random.Random(seed)
    args = fresh(given, draw)
    sizes = sorted(
        {n + d for x in args.values() if isinstance(x, Tensor) for n in (*x.shape, x.numel()) for d in (0, 1)}
    )
    labels = []
    for argument in draw.sample(list(args), min(draw.choice((1, 1, 2)), len(args))):
        what, args[argument] = odd(args[argument], (name, argument), sizes, draw)
        labels.append(f"{argument}: {what}")
    return "; ".join(labels), args


def plain(x: Tensor) -> Tensor:
    return x if x.is_meta or x.layout != torch.strided else x.detach().clone(memory_format=torch.contiguous_format)


@contextmanager
def limited() -> Iterator[None]:
    """Interrupt a call that does not end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: Any) -> None:
        raise Fault(f"it runs for more than {LIMIT} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def without_kernels() -> Iterator[None]:
    """The ops by their references."""
    kept = [module.native for module in WITH_KERNELS]
    for module in WITH_KERNELS:
        module.native = lambda: None  # type: ignore[assignment]
    noise._block.cache_clear()
    try:
        yield
    finally:
        for module, native in zip(WITH_KERNELS, kept, strict=True):
            module.native = native
        noise._block.cache_clear()


def called(name: str, args: dict[str, Any]) -> tuple[str, list[Tensor]]:
    """The sentence with which the op refuses, or "", its results and the arguments that it may have written."""
    try:
        with limited():
            found = op(name)(**args)
    except (ValueError, TypeError, NotImplementedError) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        own = where.filename.startswith(PACKAGE) and (where.line or "").startswith("raise ")
        if not own or not (error.__suppress_context__ or error.__context__ is None):
            raise Fault(f"{type(error).__name__} of another's: {error} ({where.filename}:{where.lineno})") from error
        return str(error), []
    except Exception as error:
        raise Fault(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else error}") from error
    results: list[Tensor] = []
    each_tensor((found if isinstance(found, tuple) else (found,), tuple(args.values())), results.append)
    return "", [x.detach() for x in results if x is not None]


def compare(got: list[Tensor], want: list[Tensor], what: str, ties: bool) -> None:
    """Raise Fault unless results are as wanted. `ties`: ids of equal logits may differ, as sums round differently."""
    for n, (a, b) in enumerate(zip(got, want, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise Fault(f"{what}: result {n} is {tuple(a.shape)} {a.dtype}, not {tuple(b.shape)} {b.dtype}")
        if a.is_meta or a.layout != torch.strided:
            continue
        if not a.is_floating_point():
            same = ties or torch.equal(a, b)
        else:
            most = 0.05 if a.dtype.itemsize < 4 else 1e-4
            same = torch.allclose(a.double(), b.double(), rtol=most, atol=most, equal_nan=True)
        if not same:
            raise Fault(f"{what}: result {n} differs")


def regular(args: dict[str, Any]) -> bool:
    """Whether all numbers are finite and of ordinary size, so that two orders of a sum give the same."""
    found: list[bool] = []

    def look(x: Tensor) -> None:
        if x.layout == torch.strided and not x.is_meta and x.is_floating_point():
            wide = x.detach().double()
            found.append(bool((wide.isfinite() & (wide.abs() < 1e6)).all()))

    each_tensor(tuple(args.values()), look)
    numbers = [x for x in args.values() if isinstance(x, float)]
    return all(found) and all(abs(x) < 1e6 for x in numbers)


def one(name: str, given: dict[str, Any], seed: int) -> str:
    """Run an odd call. Returns the sentence that refuses it, or "". Raises Fault."""
    label, args = arguments(name, given, seed)
    try:
        said, got = called(name, args)
        if said:
            return said
        copies = {key: each_tensor(value, plain) for key, value in arguments(name, given, seed)[1].items()}
        ordinary = regular(copies)
        ties = "layout" in label and name in ("cluster_topk", "vocab_topk")  # rows may repeat
        again, want = called(name, copies)
        if again:
            raise Fault(f"with plain copies it is refused: {again}")
        if ordinary:
            compare(got, want, "with plain copies", ties)
        if ordinary and "dtype" not in label:  # compiled kernels round what bfloat16 multiplies
            with without_kernels():
                again, want = called(name, arguments(name, given, seed)[1])
            if not again:  # the reference may check numbers that it does not read
                compare(got, want, "without compiled kernels", ties)
    except Fault as fault:
        raise Fault(f"{name}, seed {seed}, {label}: {fault}") from fault.__cause__
    return ""


def every(count: int, seed: int, *names: str) -> tuple[Counter[str], list[str]]:
    """How many of `count` calls were refused and served, and the faults."""
    cpu.native()  # compile it here, where it may take longer than a call
    calls = [call for call in CALLS + ROUND_CALLS if not names or call[0] in names]
    ends: Counter[str] = Counter()
    faults = []
    for n in range(count):
        name, given = calls[n % len(calls)]
        try:
            ends["refused" if one(name, given, seed + n) else "served"] += 1
        except Fault as fault:
            faults.append(str(fault))
            print(fault, flush=True)
    return ends, faults


if __name__ == "__main__":
    torch.set_num_threads(1)
    count, seed, *names = (*sys.argv[1:2], *(sys.argv[2:] or ["0"]))
    ends, faults = every(int(count), int(seed), *names)
    print(dict(ends), f"{len(faults)} faults")
    sys.exit(bool(faults))
