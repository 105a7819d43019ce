"""Build command lines from frozen dataclasses, and turn errors into exit codes. Every `python -m specker.<command>`
uses it."""

import argparse
import difflib
import json
import numbers
import operator
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import field, fields
from functools import cache
from typing import Any, NoReturn

from specker import interrupt

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
) -> Any:
    """A dataclass field that becomes a flag. `check_fields` applies the arguments: `parse` converts a string (or a
    value already parsed) to the field's type; `choices`, `least` and `most` limit the value. `offers` are values that
    help and completion name although others are allowed. `bare`: the value of a flag that is given without one."""
    about = {"help": help, "metavar": metavar, "parse": parse, "choices": choices, "least": least, "most": most}
    about |= {"offers": offers, "bare": bare}
    return field(default=default, metadata=about)


def flag(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


_ON_COMMAND_LINE: ContextVar[bool] = ContextVar("on command line", default=False)  # True inside of `ended`


def option(name: str, value: Any = None) -> str:
    """An option in a message, perhaps with a value, as its user writes it: `--policy adl` on a command line and
    `policy='adl'` in Python."""
    if _ON_COMMAND_LINE.get():
        return flag(name) if value is None else f"{flag(name)} {value}"
    return name if value is None else f"{name}={value if isinstance(value, int | float) else str(value)!r}"


def check_fields(options: Any) -> None:
    """Parse and check every field of a frozen dataclass against its type and its `opt`. Call it from `__post_init__`.
    Raises ValueError with a sentence that names the option. A default of None skips the checks."""
    kinds = _kinds(type(options))  # type: ignore[arg-type]
    for f in fields(options):
        about, value = f.metadata, getattr(options, f.name)
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


class JobError(RuntimeError):
    """The job's environment failed, not specker or the command line: one sentence, exit code 1."""


class _Print(argparse.Action):
    """Print a text and end with exit code 0."""

    def __init__(self, *names: Any, text: Callable[[Any], str], **how: Any) -> None:
        super().__init__(*names, **{**how, "default": argparse.SUPPRESS})
        self.text = text

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, *_: Any) -> None:
        sys.stdout.write(self.text(values))
        sys.stdout.flush()  # a closed pipe must fail here, where `ended` handles it
        parser.exit()


class Parser(argparse.ArgumentParser):
    """One flag per dataclass field. transformers' HfArgumentParser does the same but takes a second to import.
    `usage`, `description` and `epilog` are printed as they are."""

    def __init__(self, prog: str, usage: str, description: str, epilog: str) -> None:
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=False,
            allow_abbrev=False,
        )
        self.offered: dict[argparse.Action, tuple[str, ...]] = {}  # flag -> its values for the completion
        self._titled: dict[str, Any] = {}

    def error(self, message: str) -> NoReturn:  # argparse would also print the usage and exit
        if unknown := re.match(r"unrecognized arguments: (--[\w-]+)", message):
            flags = [name for name in self._option_string_actions if name.startswith("--")]
            near = [name for name in flags if name.startswith(unknown[1])]
            if near := near or difflib.get_close_matches(unknown[1], flags, 1, cutoff=0.8):
                raise ValueError(f"there is no flag {unknown[1]}; did you mean {near[0]}?")
        raise ValueError(f"{message} (see --help)")

    def group(self, title: str, description: str | None = None) -> Any:
        """The group of flags with this title, made on the first call."""
        if title not in self._titled:
            self._titled[title] = self.add_argument_group(title, description)
        return self._titled[title]

    def add(
        self,
        cls: type,
        title: str,
        description: str | None = None,
        *,
        only: Sequence[str] | None = None,
        offers: Mapping[str, tuple[str, ...]] | None = None,
        **words: str,
    ) -> None:
        """Add the fields of `cls`, or `only` those named, to the group `title`. `words` replace their {names} in help
        texts and metavars; `offers` adds to the fields' own. An omitted flag sets no value, because the dataclass owns
        the defaults."""
        group = self.group(title, description)
        hints = typing.get_type_hints(cls)
        for f in fields(cls):
            if only is not None and f.name not in only:
                continue
            types_ = (*typing.get_args(hints[f.name]), hints[f.name])
            kind = str if f.metadata["parse"] else next(t for t in types_ if t not in (types.NoneType, ...))
            about = f.metadata["help"].format(**words) if words else f.metadata["help"]
            if kind is bool:
                group.add_argument(flag(f.name), action="store_true", default=argparse.SUPPRESS, help=about)
                continue
            values = f.metadata["choices"] or f.metadata["offers"]
            named = f"{{{','.join(values)}}}" if values else {int: "N", float: "X"}.get(kind, "TEXT")
            metavar = (f.metadata["metavar"] or "").format(**words) or named
            several: dict[str, Any] = {"nargs": "+"} if typing.get_origin(hints[f.name]) is tuple else {}
            if hints[f.name] == tuple[str, ...]:
                several["action"] = "extend"  # the flag may be repeated
            if f.metadata["bare"] is not None:
                several = {"nargs": "?", "const": f.metadata["bare"]}
            default = f"{f.default:g}" if isinstance(f.default, float) else f.default
            about += "" if f.default in (None, ()) else f" (default: {default})"
            action = group.add_argument(
                flag(f.name), type=kind, default=argparse.SUPPRESS, metavar=metavar, help=about, **several
            )
            self.offered[action] = (offers or {}).get(f.name, values)

    def arrange(
        self,
        groups: Mapping[str, Sequence[str]],
        *classes: type,
        offers: Mapping[str, tuple[str, ...]] | None = None,
        **words: str,
    ) -> None:
        """Add fields of several classes in groups: title -> the names of its fields, in order."""
        owner = {f.name: cls for cls in classes for f in fields(cls)}
        for title, names in groups.items():
            for name in names:
                self.add(owner[name], title, only=(name,), offers=offers, **words)

    def prints(
        self, title: str, *names: str, help: str, text: Callable[[Any], str], choices: tuple[str, ...] = ()
    ) -> None:
        """Add a flag to the group `title` that prints `text(value)` and ends with exit code 0. It takes a value if
        there are `choices`."""
        how: dict[str, Any] = {"choices": choices} if choices else {"nargs": 0}
        self.group(title).add_argument(*names, action=_Print, text=text, help=help, **how)


SHELLS = ("bash", "zsh", "fish")


def completion(parser: Parser, shell: str) -> str:
    """A script with which `shell` completes the flags of `parser`, their values and file names. It changes the parser,
    which must not parse afterwards."""
    import shtab

    for action, values in parser.offered.items():
        if values:
            action.choices = values
        elif isinstance(action.metavar, str) and re.search("FILE|DIR", action.metavar):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return shtab.complete(parser, shell)


def make(cls: type[T], values: dict[str, Any]) -> T:
    """Build `cls` from the parsed flags that are its fields; lists become tuples."""
    taken = {f.name: values[f.name] for f in fields(cls) if f.name in values}  # type: ignore[arg-type]
    return cls(**{name: tuple(v) if isinstance(v, list) else v for name, v in taken.items()})


def ended(command: Callable[[], int], speaks: Callable[[], bool] = lambda: True) -> int:
    """Run a command and turn its errors into one line on stderr; SPECKER_DEBUG=1 raises them instead. Returns the exit
    code: 0 for success, 1 if specker itself or the job failed, 2 for an error that the user can correct, 130 after
    Ctrl-C, 141 for a closed pipe. `speaks`, called on an error, says whether this process of the job prints it.
    While the command runs, messages name options by their flags."""
    interrupt.raises()
    before = _ON_COMMAND_LINE.set(True)
    try:
        code = command()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("specker: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader closed the pipe, such as `| head`; the interpreter must not flush into it
        silence()
        return 141
    except Exception as error:
        if os.environ.get("SPECKER_DEBUG"):
            raise
        if (lacks := _lacks_memory(error)) is not None:
            error = ValueError(lacks)
        mine = not isinstance(error, (ValueError, OSError, JobError))
        about = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        line = " ".join(about.split())
        if mine:
            line = f"{type(error).__name__}: {line} (internal; set SPECKER_DEBUG=1 for the traceback)"
        if speaks():
            print(f"specker: error: {line}", file=sys.stderr)
        return 1 if mine or isinstance(error, JobError) else 2
    finally:
        _ON_COMMAND_LINE.reset(before)


def not_json(where: str, error: json.JSONDecodeError) -> ValueError:
    """The error for a line that is not JSON. `where`: names the line."""
    return ValueError(f"{where}: not JSON: {error.msg.removesuffix(' at')} at column {error.colno}")


def silence() -> None:
    """Drop what is written to stdout from now on, including what the interpreter would write when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _lacks_memory(error: Exception) -> str | None:
    """A sentence for the user if the error says that the system refused memory (in torch, safetensors or Python), else
    None."""
    text = str(error)
    if not isinstance(error, MemoryError) and not re.search("[Cc]annot allocate memory|can't allocate memory", text):
        return None
    need = re.search(r"(\d+) bytes", text)
    more = f": {int(need[1]) / 1e9:.2f} GB more are needed at once" if need else ""
    return f"not enough memory{more}; see --max-context and --quantize, or raise the limit (ulimit -v)"
