"""List known heads and drafts, for a target or with a text in their names: `specker drafts --help`."""

from collections.abc import Sequence

from specker.command.exits import run_cli
from specker.command.parser import Parser
from specker.zoo.catalogue import KNOWN, Known, choose, drafts_for, search

USAGE = "specker drafts [TARGET|TEXT]"
EPILOG = """\
The first line of a target is the choice of --draft auto, for a GGUF file the
first one in a GGUF file. `tried` says whether
this project has run the pair; the others are as their sources name them.

examples:
  specker drafts Qwen/Qwen3-8B
  specker drafts qwen3.6
  specker --target Qwen/Qwen3-8B --draft auto --chat
"""


def run(target: str | None) -> int:
    """`target`: a target, or a part of the names to look for; None: all. Raises ValueError if no draft is known."""
    found = KNOWN if target is None else drafts_for(target) or search(target)
    if not found:
        choose(target)  # says so
    print("\n".join(lines(found)))
    return 0


def lines(known: Sequence[Known]) -> list[str]:
    """A title, then a line for each draft."""
    rows = [("target", "draft", "kind", "strategy", "tried", "source")]
    rows += [
        (k.target, k.draft, k.kind, k.strategy, "yes" if k.tried else "no", k.source or "beside the target")
        for k in known
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def parser() -> Parser:
    about = "List the known heads and drafts: all, those for a target, or those with a text in their names."
    top = Parser("specker drafts", USAGE, about, EPILOG)
    what = "a folder, GGUF file or hub id, or a part of a name or kind"
    top.group("options").add_argument("target", nargs="?", metavar="TARGET|TEXT", help=what)
    top.prints("options", "-h", "--help", help="show this help and exit", text=lambda _: top.format_help())
    return top


def main(argv: Sequence[str] | None = None) -> int:
    return run_cli(lambda: run(parser().parse_args(argv).target))
