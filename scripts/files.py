"""How many files of specker a reader meets who follows a prompt: `python scripts/files.py [--list]`.

Counts the files of the package in which a function runs: for a first prompt, from `specker.load` to its text, and for a
second one. Code that runs while a module is imported counts for the first prompt if it is within a function.
"""

import argparse
import inspect
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a command is run from anywhere

import specker  # noqa: E402

PACKAGE = Path(specker.__file__).parent
INLINE = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}  # part of the code around them, as in Python 3.12


class Files:
    """The files of the package in which a function runs within this context manager."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def __enter__(self) -> "Files":
        threading.setprofile(self._enter)
        sys.setprofile(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _enter(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if code.co_name in INLINE or not code.co_flags & inspect.CO_OPTIMIZED:
            return
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            self.found.add(code.co_filename.removeprefix(f"{PACKAGE}/"))


def count() -> tuple[set[str], set[str]]:
    """The files of a first prompt and of a second one, on a CPU by the default strategy and the bundled models."""
    with Files() as first:
        engine = specker.load("code-target", device="cpu")
        engine.generate("def add(a, b):", 32)
    with Files() as second:
        engine.generate("class Stack:", 32)
    return first.found, second.found


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the files in which a function runs for a prompt.")
    parser.add_argument("--list", action="store_true", help="name the files")
    listed = parser.parse_args().list
    first, second = count()
    print(f"files in which a function runs: {len(first)} for a first prompt, {len(second)} for a second one")
    for file in sorted(first) if listed else ():
        print("  both " if file in second else "  first", file)


if __name__ == "__main__":
    main()
