"""Options as fields of frozen dataclasses: their help, bounds and checks, and how messages name them."""

import json
import numbers
import operator
import typing
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import field, fields
from functools import cache
from typing import Any

T = typing.TypeVar("T")


def opt(
    default: Any,
    help: str,
    metavar: str | None = None,
    *,
    parse: Callable[[Any], Any] | None = None,
    choices: tuple[str, ...] = (),
    offers: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
    bare: Any = None,
    flag: bool = True,
) -> Any:
    """A dataclass field that becomes a flag. `check_fields` applies the arguments: `parse` converts a string (or a
    value already parsed) to the field's type; `choices`, `least` and `most` limit the value. `offers` are values that
    help and completion name although others are allowed. `bare`: the value of a flag that is given without one.
    `flag` False: an option of Python only, without a flag."""
    about = {"help": help, "metavar": metavar, "parse": parse, "choices": choices, "least": least, "most": most}
    about |= {"offers": offers, "bare": bare, "flag": flag}
    return field(default=default, metadata=about)


def flag(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


_ON_COMMAND_LINE: ContextVar[bool] = ContextVar("on command line", default=False)  # True inside of `named_by_flags`
_WITHOUT_FLAG: set[str] = set()  # options of Python only, of the classes that were checked so far


@contextmanager
def named_by_flags() -> Iterator[None]:
    """Context manager in which messages name options by their flags."""
    before = _ON_COMMAND_LINE.set(True)
    try:
        yield
    finally:
        _ON_COMMAND_LINE.reset(before)


def option(name: str, value: Any = None) -> str:
    """An option in a message, perhaps with a value, as its user writes it: `--policy adl` on a command line and
    `policy='adl'` in Python, as are options without a flag on a command line."""
    if _ON_COMMAND_LINE.get() and name not in _WITHOUT_FLAG:
        return flag(name) if value is None else f"{flag(name)} {value}"
    return name if value is None else f"{name}={value if isinstance(value, int | float) else str(value)!r}"


def check_fields(options: Any) -> None:
    """Parse and check every field of a frozen dataclass against its type and its `opt`. Call it from `__post_init__`.
    Raises ValueError with a sentence that names the option. A default of None skips the checks."""
    kinds = _kinds(type(options))  # type: ignore[arg-type]
    for f in fields(options):
        about, value = f.metadata, getattr(options, f.name)
        if not about.get("flag", True):
            _WITHOUT_FLAG.add(f.name)
        if value is None and f.default is None:
            continue
        if f.name in kinds:
            value = _of_kind(f.name, value, kinds[f.name])
            object.__setattr__(options, f.name, value)
        if about.get("parse"):
            value = about["parse"](value)
            object.__setattr__(options, f.name, value)
        if about.get("choices") and value not in about["choices"]:
            raise ValueError(f"{option(f.name)} must be one of {', '.join(about['choices'])}, got {value!r}")
        least, most = about.get("least"), about.get("most")
        if least is not None and not (least <= value and (most is None or value <= most)):
            bounds = f"at least {least}" if most is None else f"between {least} and {most}"
            raise ValueError(f"{option(f.name)} must be {bounds}, got {value}")


@cache
def _kinds(cls: Hashable) -> dict[str, type]:
    """The type of each field that is a number, a string or a bool, and is not parsed from a string."""
    found: dict[str, type] = {}
    hints = typing.get_type_hints(cls)
    for f in fields(cls):  # type: ignore[arg-type]
        kinds = {*typing.get_args(hints[f.name]), hints[f.name]} & {int, float, str, bool}
        if len(kinds) == 1 and not f.metadata.get("parse") and typing.get_origin(hints[f.name]) is not tuple:
            (found[f.name],) = kinds
    return found


def _of_kind(name: str, value: Any, kind: type) -> Any:
    """`value` converted to `kind`: a caller from Python may have passed another type. numpy's numbers count as
    numbers."""
    if kind is bool or kind is str:
        if isinstance(value, kind):
            return value
    elif not isinstance(value, bool):
        if kind is float and isinstance(value, numbers.Real):
            return float(value)
        if kind is int and hasattr(value, "__index__"):
            return operator.index(value)
    wanted = {int: "a whole number", float: "a number", str: "a string", bool: "True or False"}[kind]
    raise ValueError(f"{option(name)} must be {wanted}, got {value!r}")


def make(cls: type[T], values: dict[str, Any]) -> T:
    """Build `cls` from the parsed flags that are its fields; lists become tuples."""
    taken = {f.name: values[f.name] for f in fields(cls) if f.name in values}  # type: ignore[arg-type]
    return cls(**{name: tuple(v) if isinstance(v, list) else v for name, v in taken.items()})


class JobError(RuntimeError):
    """The job's environment failed, not specker or the command line: one sentence, exit code 1."""


def not_json(where: str, error: ValueError | RecursionError) -> ValueError:
    """The error for a line that json.loads cannot read. `where`: names the line."""
    if not isinstance(error, json.JSONDecodeError):
        return ValueError(f"{where}: the JSON has a number of too many digits or is nested too deeply")
    return ValueError(f"{where}: not JSON: {error.msg.removesuffix(' at')} at column {error.colno}")
