"""registry: register an op from the one signature of its documented function.

An op file ends with a registration; the op's function calls the result:

    def add_rows(x: Tensor, deltas: Tensor) -> Tensor:
        \"""x [T, E], deltas [P, T, E] -> [T, E].\"""
        return _add_rows(x, deltas)

    class Arguments(NamedTuple):
        x: Tensor
        deltas: Tensor

    @takes(Arguments)
    def add_rows_ref(args: Arguments) -> Tensor:
        return args.x + args.deltas.sum(0)

    _add_rows = register(add_rows, Arguments, check=_check, reference=add_rows_ref, launch=launch, fake=_fake)

The annotations give the schema of `torch.ops.specker.add_rows`; keyword-only parameters stay out of it. A parameter of
type `Matrix` is a Tensor in the schema, which then ends with the scales and shifts of a `Quantized` one. The other
functions take the same arguments as one record, keyword-only ones last; `takes` marks those that are also called
directly, with the arguments themselves. `check` raises on bad arguments and runs before every path. It may assume that
the arguments' types are right: after a failure, `refuse` compares them with the annotations.
"""

import functools
import inspect
import numbers
import re
import types
import typing
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling

from specker.kernels.quant import Matrix, Quantized

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")

_LIBRARY = torch.library.Library("specker", "FRAGMENT")  # costs less per call than custom_op


def takes(record: Callable[P, A]) -> Callable[[Callable[[A], R]], Callable[P, R]]:
    """A decorator: the function of a record takes the record's fields as arguments. `register` undoes it."""
    signature = inspect.signature(record)

    def decorate(function: Callable[[A], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return function(record(*args, **kwargs))

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate


def register(
    function: Callable[..., R],
    record: Callable[P, object],
    *,
    check: Callable[..., object],
    reference: Callable[..., R],
    launch: Callable[..., R],
    fake: Callable[..., R],
    fits: Callable[..., bool] | None = None,
    mutates: tuple[str, ...] = (),
    check_values: Callable[[Any], object] | None = None,
    flat: Any = None,
) -> Callable[P, R]:
    """Define torch.ops.specker.<name of function>. Returns a callable to which `function` passes all arguments in
    order. The other functions take them as a `record`, a NamedTuple.

    `launch` serves CUDA tensors, except float64 and arguments for which `fits` is false; `reference` serves the rest.
    `mutates` names the tensors that the op writes. `check_values` runs only after a failure, behind `check`: it reads
    values on the host.

    Where a schema cannot express the function's arguments, the fields of `flat`, a NamedTuple, are the registered ones:
    `flat.of(record)` gives them, and its method `nested` turns them back into a record.
    """
    name, signature = function.__name__, inspect.signature(function)
    parameters = inspect.signature(flat or function).parameters.values()
    positional = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
    unregistered = tuple(p.default for p in parameters if p.kind is p.KEYWORD_ONLY)
    count = len(positional) if unregistered else None
    reference, launch, fits = inspect.unwrap(reference), inspect.unwrap(launch), fits and inspect.unwrap(fits)
    matrix = next((n for n, p in enumerate(positional) if p.annotation == Matrix), None)
    if matrix is not None:
        plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parts = [inspect.Parameter(p, plain, default=None, annotation=Tensor | None) for p in ("scale", "shift")]
        positional = [p.replace(annotation=Tensor) if p.annotation == Matrix else p for p in positional] + parts
    defaults = tuple(p.default for p in positional)

    # Every field is given, so this leaves out the record's own constructor, a Python function that fills in defaults.
    new: Any = record
    recorded = functools.partial(tuple.__new__, new)

    def explain(*args: Any) -> None:
        check(recorded(args))
        if check_values is not None:
            check_values(recorded(args))

    def refused(args: tuple[Any, ...]) -> None:
        refuse(function, explain, args, mutates)

    def call(*args: Any) -> Any:
        if is_dynamo_compiling() or (type(args[0]) is not Tensor and is_compiling()):  # 40 ns less than is_compiling()
            return overload(*parts_of(args[:count] if flat is None else flat.of(new(*args))))
        try:
            return serve(args)
        except Exception:
            refused(args)
            raise

    def serve(args: tuple[Any, ...]) -> R:
        x, args = args[0], recorded(args)
        check(args)
        on_gpu = x.is_cuda and x.dtype != torch.float64 and (fits is None or fits(args))
        return (launch if on_gpu else reference)(args)

    def parts_of(args: tuple[Any, ...]) -> tuple[Any, ...]:
        if matrix is None or not isinstance(w := args[matrix], Quantized):
            return args
        args += defaults[len(args) : -2]
        return *args[:matrix], w.q, *args[matrix + 1 :], w.scale, w.shift

    def given(args: tuple[Any, ...]) -> tuple[Any, ...]:
        args += defaults[len(args) :]  # the dispatcher drops trailing arguments that equal their defaults
        if matrix is not None:
            *rest, scale, shift = args
            if scale is not None:
                rest[matrix] = Quantized(rest[matrix], scale, shift)
            args = tuple(rest)
        return args + unregistered if flat is None else flat(*args).nested()

    def registered(*args: Any) -> Any:
        args = given(args)
        try:
            return serve(args)
        except Exception:
            refused(args)
            raise

    def abstract(*args: Any) -> Any:
        args = recorded(given(args))
        check(args)
        return fake(args)

    def prototype() -> None: ...

    prototype.__signature__ = signature.replace(parameters=positional)  # type: ignore[attr-defined]
    # Sizes are plain integers, because checks and tile tables need their values.
    text = torch.library.infer_schema(prototype, mutates_args=mutates).replace("SymInt", "int")
    _LIBRARY.define(name + text)
    _LIBRARY.impl(name, registered, "CompositeExplicitAutograd")  # CPU and CUDA; a packed weight has keys of its own
    torch.library.register_fake(f"specker::{name}", abstract, lib=_LIBRARY)
    overload = getattr(torch.ops.specker, name).default
    return cast("Callable[P, R]", call)


def explained(check: Callable[..., object]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator for an op that is not registered, whose failures `check` explains."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except Exception:
                given = signature.bind(*args, **kwargs)
                given.apply_defaults()
                refuse(function, check, tuple(given.arguments.values()))
                raise

        return call

    return decorate


def refuse(
    function: Callable[..., object],
    check: Callable[..., object],
    args: tuple[Any, ...],
    written: tuple[str, ...] = (),
) -> None:
    """Explain the failure of an op that writes the arguments `written`. It runs only after a failure, so type checks
    cost successful calls nothing. Raises TypeError for the first argument that is not of the type in the signature of
    `function`, else ValueError as `check` does. Returns if the arguments are not at fault."""
    named: dict[str, tuple[Any, Any]] = {}
    for p, x in zip(inspect.signature(function).parameters.values(), args, strict=False):
        if hasattr(p.annotation, "_fields") and isinstance(x, p.annotation):  # a record: its fields are the arguments
            kinds = typing.get_type_hints(p.annotation)
            named |= {name: (kind, getattr(x, name)) for name, kind in kinds.items()}
        else:
            named[p.name] = p.annotation, x
    for name, (kind, value) in named.items():
        if not _of_type(value, kind):
            wanted = re.sub(r"\w+\.", "", inspect.formatannotation(kind))
            got = value.layout if isinstance(value, Tensor) else None if value is None else type(value).__name__
            raise TypeError(f"{name} must be {wanted}, got {got}") from None
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, int) and not -(1 << 63) <= part < 1 << 64:
                raise ValueError(f"{name} must be a number of 64 bits, got {part}") from None
    try:
        for value in args:
            if isinstance(value, Quantized):
                value.check()
        check(*args)
        for name in written:
            check_written(name, named[name][1])
    except (TypeError, ValueError) as error:
        raise error from None  # hide the failure that this error explains


def write(out: Tensor, x: Tensor) -> Tensor:
    """`out` with the elements of x. Raises ValueError if it cannot be written."""
    try:
        return out.copy_(x)
    except RuntimeError:
        check_written("out", out)
        raise


def check_written(name: str, x: Tensor) -> None:
    """Raise ValueError if an op cannot write x in place."""
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} is written in place, so it must not require a gradient") from None
    if any(size > 1 and step == 0 for size, step in zip(x.shape, x.stride(), strict=True)):
        raise ValueError(f"{name} is written, so each element needs its own memory, got strides {x.stride()}") from None


def _of_type(value: Any, kind: Any) -> bool:
    """Whether `value` can be an argument annotated with `kind`."""
    if isinstance(kind, types.UnionType):
        return any(_of_type(value, k) for k in kind.__args__)
    if typing.get_origin(kind) is tuple or hasattr(kind, "_fields"):
        named = typing.get_origin(kind) is None
        kinds = tuple(typing.get_type_hints(kind).values()) if named else typing.get_args(kind)
        alike = isinstance(value, kind if named else tuple) and len(value) == len(kinds)
        return alike and all(map(_of_type, value, kinds))
    if kind is Tensor:
        return isinstance(value, Tensor) and value.layout == torch.strided
    if kind is bool:  # any value is true or false, except a tensor of several elements
        return not isinstance(value, Tensor) or value.numel() == 1
    if kind is int:
        return hasattr(value, "__index__") and not isinstance(value, Tensor)
    return isinstance(value, numbers.Real if kind is float else kind)
