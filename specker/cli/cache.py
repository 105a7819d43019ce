"""List, verify and remove what specker keeps on disk: `specker cache --help`.

Everything there is made or fetched again when it is needed, except the token counts and the history of conversations,
which come from your own runs.
"""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specker.command.exits import run_cli
from specker.command.parser import Parser
from specker.paths import cache_root

ABOUT = {
    "cpu": "compiled kernels",
    "digests": "SHA-256 of GGUF files",
    "gguf": "converted GGUF files",
    "history": "what was typed in conversations",
    "locks": "locks",
    "lookup": "tokens of the files of --lookup-corpus",
    "peers": "files of bench/peers.py",
    "tokenizers": "orders and hashes of tokenizers",
    "vocab": "counts of the tokens that targets wrote",
}
USAGE = "specker cache [--verify] [--clear NAME ...]"


@dataclass(frozen=True)
class Entry:
    """A file or folder of the cache."""

    name: str  # its path within the cache
    path: Path
    about: str
    size: int  # bytes


def entries() -> list[Entry]:
    """The cache's entries by name. Each converted GGUF file is an entry of its own."""
    found = []
    for path in sorted(cache_root().iterdir()) if cache_root().is_dir() else ():
        for each in sorted(path.iterdir()) if path.name == "gguf" else [path]:
            about = ABOUT.get(path.name, "a fetched file" if path.suffix == ".gguf" else "")
            found.append(Entry(str(each.relative_to(cache_root())), each, about, size_of(each)))
    return found


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    files = path.rglob("*") if path.is_dir() and not path.is_symlink() else [path]
    return sum(file.lstat().st_size for file in files if not file.is_dir() or file.is_symlink())


def remove(names: Sequence[str]) -> list[Entry]:
    """Remove entries and return them. Raises ValueError for a name that is not in the list."""
    known = {entry.name: entry for entry in entries()}
    if unknown := [name for name in names if name not in known and name != "all"]:
        raise ValueError(f"--clear: the cache has no {unknown[0]}; it has {', '.join(known) or 'nothing'}")
    chosen = list(known.values()) if "all" in names else [known[name] for name in dict.fromkeys(names)]
    for entry in chosen:
        if entry.path.is_dir() and not entry.path.is_symlink():
            shutil.rmtree(entry.path)
        else:
            entry.path.unlink()
    return chosen


def verified() -> int:
    """Print for each converted GGUF file whether it is as it was written. Returns how many are not."""
    from specker.checkpoints.gguf.cache import verify

    damaged = 0
    for entry in entries():
        if entry.about != ABOUT["gguf"]:
            continue
        try:
            wrong = verify(entry.path)
        except LookupError:
            print(f"{entry.name}: made by an earlier version, without digests")
            continue
        damaged += wrong is not None
        remedy = f"; specker cache --clear {entry.name} removes it, and the next use converts the file again"
        print(f"{entry.name}: {'as it was converted' if wrong is None else f'damaged, {wrong}{remedy}'}", flush=True)
    return damaged


def run(verify: bool, clear: Sequence[str]) -> int:
    if verify and clear:
        raise ValueError("--verify and --clear exclude each other")
    if verify:
        return int(verified() > 0)
    if clear:
        gone = remove(clear)
        print(f"removed {len(gone)} of {cache_root()}: {readable(sum(entry.size for entry in gone))}")
        return 0
    found = entries()
    from rich.console import Console
    from rich.table import Table

    table = Table(title=str(cache_root()), title_justify="left", show_edge=False)
    for column in ("name", "what it is"):
        table.add_column(column)
    table.add_column("size", justify="right")
    for entry in found:
        table.add_row(entry.name, entry.about, readable(entry.size))
    table.add_section()
    table.add_row("all", "", readable(sum(entry.size for entry in found)))
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    return 0


def readable(size: int) -> str:
    for unit, count in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= count:
            return f"{size / count:.1f} {unit}"
    return f"{size} B"


def parser() -> Parser:
    top = Parser("specker cache", USAGE, "List what specker keeps on disk ($SPECKER_CACHE), verify or remove it.", "")
    about = "compare converted GGUF files with what was written; exit code 1 if one is damaged"
    top.group("options").add_argument("--verify", action="store_true", help=about)
    about = "remove these entries of the list; `all` removes everything"
    top.group("options").add_argument("--clear", nargs="+", action="extend", default=[], metavar="NAME", help=about)
    top.prints("options", "-h", "--help", help="show this help and exit", text=lambda _: top.format_help())
    return top


def main(argv: Sequence[str] | None = None) -> int:
    return run_cli(lambda: run(**vars(parser().parse_args(argv))))
