"""A conversation in the terminal: `specker.run --chat` without a prompt."""

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

from specker.report import Screen

if TYPE_CHECKING:
    from specker.run import Decoding, Line


def converse(decoding: "Decoding", line: "Line", screen: Screen) -> None:
    """Answer until the user ends the input. Each turn is decoded after the whole conversation so far, whose K/V is kept
    from the turn before. Ctrl-C ends an answer, and what was shown of it stays in the conversation."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  gives input() editing and history

    screen.note("Ctrl-C ends an answer, Ctrl-D the conversation.")
    while True:
        try:
            said = _asked(screen)
            if said is None:
                return
            if said.strip():
                _answer(decoding, line, said, screen)
        except KeyboardInterrupt:  # discards what was typed
            screen.notes.print()


def _asked(screen: Screen) -> str | None:
    """The user's next line; None at the end of the input."""
    try:
        if screen.terminal:
            return input("> ")
        screen.notes.print("> ", end="")
        return input()
    except EOFError:
        screen.notes.print()
        return None


def _answer(decoding: "Decoding", line: "Line", said: str, screen: Screen) -> None:
    known = len(line.results)
    line.talk = replace(line.talk, turns=(*line.talk.turns[:known], said))
    try:
        decoding.turn([line])
    except ValueError as error:  # the turn does not fit, or is not valid text
        del line.messages[2 * known :], line.results[known:]
        screen.note(f"{error}", "yellow")
    except KeyboardInterrupt:
        result = line.results[known] if len(line.results) > known else None
        if result is None or not result.stats.rounds:  # with --check, plain decoding may go first
            del line.messages[2 * known :], line.results[known:]
            screen.notes.print()
        elif result.finished is None:
            result.finished = "interrupted"
            line.messages.append({"role": "assistant", "content": result.text})
