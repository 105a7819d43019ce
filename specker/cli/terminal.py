"""Reads what a user types in a conversation, with prompt_toolkit."""

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any, TextIO, cast

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.layout.processors import TabsProcessor
from prompt_toolkit.output import create_output

from specker.paths import cache_root

QUOTES = '"""'
KEYS = {
    QUOTES: "begins and ends a text of several lines",
    "Alt-Enter, Esc Enter": "begin a new line",
    "Tab": "complete a command or the name of a file",
    "Up, Down, Ctrl-R": "recall what was typed, in earlier conversations too",
    "Ctrl-C": "end the answer, or discard what is typed",
    "Ctrl-D": "on an empty line: end the conversation",
}


def reader(commands: Mapping[str, tuple[str, str]], settings: Iterable[str], out: IO[str]) -> "PromptSession[str]":
    """Reads texts from the terminal and shows them on `out`. `commands`: name -> (its argument, what it does);
    `settings`: the names that /set takes."""
    keys = KeyBindings()

    @keys.add("escape", "enter")
    @keys.add("enter", filter=Condition(lambda: is_open(get_app().current_buffer.text)))
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return PromptSession(
        "> ",
        history=History(cache_root() / "history"),
        completer=Commands(commands, settings),
        complete_while_typing=False,
        enable_suspend=True,
        key_bindings=keys,
        prompt_continuation="  ",
        input_processors=[TabsProcessor(char1=" ", char2=" ")],
        output=None if out is sys.stdout else create_output(cast(TextIO, out)),  # None heeds TERM=dumb
    )


def is_open(text: str) -> bool:
    """Whether `text`, optionally after /system, begins a block of lines and does not end it."""
    return re.match(rf"\s*(/system\s+)?{QUOTES}", text) is not None and text.count(QUOTES) % 2 == 1


def unquoted(text: str) -> str:
    """`text` without the quotes around a block of lines."""
    bare = text.strip()
    whole = len(bare) >= 2 * len(QUOTES) and bare.startswith(QUOTES) and bare.endswith(QUOTES)
    return bare[len(QUOTES) : -len(QUOTES)] if whole else text


class History(FileHistory):
    """A file that only its owner can read. Errors in reading or writing it are ignored."""

    def load_history_strings(self) -> Iterable[str]:
        with contextlib.suppress(OSError):
            return super().load_history_strings()
        return []

    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError, UnicodeError):  # a byte that the terminal's encoding lacks
            os.makedirs(os.path.dirname(self.filename), exist_ok=True)
            os.close(os.open(self.filename, os.O_CREAT | os.O_WRONLY, 0o600))
            super().store_string(string)


class Commands(Completer):
    """Completes commands, the name of the file of /save and the settings of /set."""

    def __init__(self, commands: Mapping[str, tuple[str, str]], settings: Iterable[str]) -> None:
        self.commands, self.files = commands, PathCompleter(expanduser=True)
        self.settings = tuple(f"/set {name}" for name in settings)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        before = document.text_before_cursor
        if before.startswith("/save "):
            yield from self.files.get_completions(Document(before[len("/save ") :].lstrip()), complete_event)
        if before.startswith("/set "):
            yield from (
                Completion(f"{name} ", -len(before), display=name) for name in self.settings if name.startswith(before)
            )
        for name, (argument, about) in self.commands.items():
            if name.startswith(before):
                whole = f"{name} " if argument else name
                yield Completion(whole, -len(before), display=name, display_meta=about)


@contextlib.contextmanager
def keys_wait(session: "PromptSession[Any]") -> Iterator[None]:
    """Keys pressed between prompts wait for the next prompt. Meanwhile the terminal does not echo them (as ^C, for
    example), change them or divide them into lines."""
    try:
        import termios
        import tty
    except ImportError:  # Windows
        yield
        return
    terminal = session.input.fileno()
    before = termios.tcgetattr(terminal)
    quiet = [*before]
    quiet[tty.IFLAG] &= ~termios.ICRNL
    quiet[tty.LFLAG] &= ~(termios.ECHO | termios.ICANON)
    try:
        termios.tcsetattr(terminal, termios.TCSANOW, quiet)
        yield
    finally:
        session.output.disable_bracketed_paste()
        session.output.flush()
        termios.tcsetattr(terminal, termios.TCSANOW, before)


def ask(session: "PromptSession[str]") -> str:
    """Ask for the user's next text. Text that is pasted before the following prompt stays in one piece, too. Raises
    EOFError at the end of the input and KeyboardInterrupt."""
    text = session.prompt()
    session.output.enable_bracketed_paste()
    session.output.flush()
    return text
