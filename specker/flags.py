"""Command lines made from frozen dataclasses, and how a command ends: shared by every `python -m specker.<command>`."""

import argparse
import os
import sys
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import field, fields
from typing import Any, NoReturn

T = typing.TypeVar("T")


def opt(default: Any, help: str, metavar: str | None = None) -> Any:
    """A dataclass field with its flag's help."""
    return field(default=default, metadata={"help": help, "metavar": metavar})


class JobError(RuntimeError):
    """What neither specker nor the command is to blame for, one sentence; exit code 1."""


class Parser(argparse.ArgumentParser):
    """One flag per dataclass field. transformers' HfArgumentParser does that too, but costs a second to import."""

    def error(self, message: str) -> NoReturn:  # argparse would print the usage too and exit from here
        raise ValueError(f"{message} (see --help)")

    def add(self, cls: type, title: str, names: Iterable[str] | None = None) -> None:
        """The fields of `cls`, or those of `names`, as a group of flags."""
        group = self.add_argument_group(title)
        hints = typing.get_type_hints(cls)
        for f in fields(cls):
            if names is not None and f.name not in names:
                continue
            kind = next(t for t in (*typing.get_args(hints[f.name]), hints[f.name]) if t not in (types.NoneType, ...))
            flag, about = "--" + f.name.replace("_", "-"), f.metadata["help"]
            if kind is bool:
                group.add_argument(flag, action="store_true", help=about)
                continue
            metavar = f.metadata.get("metavar") or {int: "N", float: "X"}.get(kind, "TEXT")
            several: dict[str, Any] = {"nargs": "+"} if typing.get_origin(hints[f.name]) is tuple else {}
            about += "" if f.default in (None, ()) else f" (default: {f.default})"
            group.add_argument(flag, type=kind, default=f.default, metavar=metavar, help=about, **several)


def make(cls: type[T], values: dict[str, Any]) -> T:
    """`cls` from the parsed flags that are its fields; lists become tuples."""
    taken = {f.name: values[f.name] for f in fields(cls) if f.name in values}  # type: ignore[arg-type]
    return cls(**{name: tuple(v) if isinstance(v, list) else v for name, v in taken.items()})


def ended(command: Callable[[], int], speaks: Callable[[], bool] = lambda: True) -> int:
    """Run a command; its errors become one line on stderr, SPECKER_DEBUG=1 shows where they came from. Returns the exit
    code: 0; 1 where specker itself or the job failed; 2 for what the user can put right; 130 after Ctrl-C. `speaks`:
    whether this process is to say so, asked when there is something to say."""
    try:
        code = command()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("specker: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has gone, `| head` say; keep the interpreter from flushing into the void
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if os.environ.get("SPECKER_DEBUG"):
            raise
        mine = not isinstance(error, (ValueError, OSError, JobError))
        about = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        line = " ".join(about.split())
        if mine:
            line = f"{type(error).__name__}: {line} (internal; set SPECKER_DEBUG=1 for the traceback)"
        if speaks():
            print(f"specker: error: {line}", file=sys.stderr)
        return 1 if mine or isinstance(error, JobError) else 2
