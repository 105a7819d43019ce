"""Command lines from frozen dataclasses: one flag per field."""

import argparse
import difflib
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NoReturn

from specker.fields import flag


class _Print(argparse.Action):
    """Print a text and end with exit code 0."""

    def __init__(self, *names: Any, text: Callable[[Any], str], **how: Any) -> None:
        super().__init__(*names, **{**how, "default": argparse.SUPPRESS})
        self.text = text

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, *_: Any) -> None:
        sys.stdout.write(self.text(values))
        sys.stdout.flush()  # a closed pipe must fail here, where `run_cli` handles it
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
        if words := re.match(r"unrecognized arguments: ([^-].*)", message):
            raise ValueError(f"unexpected {words[1]!r}: a text with spaces needs quotes (see --help)")
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
        usual: Mapping[str, str] | None = None,
        **words: str,
    ) -> None:
        """Add the flags of the fields of `cls`, or `only` of those named, to the group `title`. `words` replace their
        {names} in help texts and metavars; `offers` adds to the fields' own. An omitted flag sets no value, because the
        dataclass owns the defaults; `usual` says what the command makes of some of them."""
        group = self.group(title, description)
        hints = typing.get_type_hints(cls)
        for f in fields(cls):
            if not f.metadata.get("flag") or (only is not None and f.name not in only):
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
            default = (usual or {}).get(f.name, default)
            about += "" if default in (None, ()) else f" (default: {default})"
            action = group.add_argument(
                flag(f.name), type=kind, default=argparse.SUPPRESS, metavar=metavar, help=about, **several
            )
            self.offered[action] = (offers or {}).get(f.name, values)

    def arrange(
        self,
        groups: Mapping[str, Sequence[str]],
        *classes: type,
        offers: Mapping[str, tuple[str, ...]] | None = None,
        usual: Mapping[str, str] | None = None,
        **words: str,
    ) -> None:
        """Add fields of several classes in groups: title -> the names of its fields, in order."""
        owner = {f.name: cls for cls in classes for f in fields(cls)}
        for title, names in groups.items():
            for name in names:
                self.add(owner[name], title, only=(name,), offers=offers, usual=usual, **words)

    def prints(
        self, title: str, *names: str, help: str, text: Callable[[Any], str], choices: tuple[str, ...] = ()
    ) -> None:
        """Add a flag to the group `title` that prints `text(value)` and ends with exit code 0. It takes a value if
        there are `choices`."""
        how: dict[str, Any] = {"choices": choices} if choices else {"nargs": 0}
        self.group(title).add_argument(*names, action=_Print, text=text, help=help, **how)


SHELLS = ("bash", "zsh", "fish")


def completion(parser: Parser, shell: str, commands: Mapping[str, Parser] | None = None) -> str:
    """A script with which `shell` completes the flags of `parser`, their values and file names, and those of
    `commands`. It changes the parsers, which must not parse afterwards."""
    import shtab

    commands = commands or {}
    for action, values in [item for each in (parser, *commands.values()) for item in each.offered.items()]:
        if values:
            action.choices = values
        elif isinstance(action.metavar, str) and re.search("FILE|DIR", action.metavar):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    if commands:  # in place of the prompt, the first word may be a command
        parser._actions[:] = [action for action in parser._actions if action.option_strings]
        parser._positionals._group_actions.clear()

        def named(prog: str, **_: Any) -> Parser:
            return commands[prog.split()[-1]]

        made = parser.add_subparsers(parser_class=named)  # type: ignore[call-overload]
        for name in commands:
            made.add_parser(name, help=commands[name].description)
    return shtab.complete(parser, shell)
