"""Build command lines from frozen dataclasses, and turn errors into exit codes. Every `python -m specker.<command>`
uses it."""

import argparse
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields
from typing import Any, NoReturn

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
    """A dataclass field that becomes a flag. `settle` applies the arguments: `parse` converts a string (or a value
    already parsed) to the field's type; `choices`, `least` and `most` limit the value. `offers` are values that help
    and completion name although others are allowed. `bare`: the value of a flag that is given without one."""
    about = {"help": help, "metavar": metavar, "parse": parse, "choices": choices, "least": least, "most": most}
    about |= {"offers": offers, "bare": bare}
    return field(default=default, metadata=about)


def flag(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def settle(options: Any) -> None:
    """Parse and check every field of a frozen dataclass against its `opt`. Call it from `__post_init__`. Raises
    ValueError with a sentence that names the flag. None means the flag was left out and skips the checks."""
    for f in fields(options):
        about, value = f.metadata, getattr(options, f.name)
        if value is None:
            continue
        if about.get("parse"):
            value = about["parse"](value)
            object.__setattr__(options, f.name, value)
        if about.get("choices") and value not in about["choices"]:
            raise ValueError(f"{flag(f.name)} must be one of {', '.join(about['choices'])}, got {value!r}")
        least, most = about.get("least"), about.get("most")
        if least is not None and not (least <= value and (most is None or value <= most)):
            bounds = f"at least {least}" if most is None else f"between {least} and {most}"
            raise ValueError(f"{flag(f.name)} must be {bounds}, got {value}")


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
    Ctrl-C, 141 for a closed pipe. `speaks`, called on an error, says whether this process of the job prints it."""
    try:
        code = command()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("specker: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader closed the pipe, such as `| head`; the interpreter must not flush into it
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
