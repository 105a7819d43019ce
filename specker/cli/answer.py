"""An answer on a terminal, as Markdown.

The block that is being written, such as a paragraph, a list or a piece of code, is shown as plain text that wraps
between words. Once the next block begins, it is printed for good, rendered. Nothing of the text is lost: line breaks
stay, HTML is shown as it is written, links show their addresses, and code has no padding, so that it can be copied.
"""

import re
from collections.abc import Iterable
from typing import ClassVar

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich import markdown
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.syntax import Syntax
from rich.text import Text

# References and images would hide parts of the text. With breaks, a line of the text is a line on the screen.
PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).disable(["reference", "image"])
THEME = "ansi_dark"  # the terminal's own colours


class Answer:
    """Shows one answer after another on a terminal."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live: Live | None = None
        self._text = Text()  # what is not yet printed for good
        self._printed = False  # whether this answer has blocks above

    def add(self, pieces: Iterable[tuple[str, bool]]) -> None:
        """Show the next pieces of the answer, and whether each was drafted."""
        lines = self._text.plain.count("\n")
        for piece, drafted in pieces:
            self._text.append(piece, "green" if drafted else "")
        if self._live is None:
            # It is erased at the end, and nothing refreshes it meanwhile: the terminal's cursor stays where it is put.
            self._live = Live(
                console=self.console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
                vertical_overflow="visible",
            )
            self._live.start()
        if self._text.plain.count("\n") > lines and (end := _begin_of_last(self._text.plain)):
            whole, self._text = self._text.plain[:end], self._text[end:]
            self._live.update(_Tail(self._text))
            self._print(whole)
        self._live.update(_Tail(self._text), refresh=True)

    def end(self) -> None:
        """Print the rest of the answer. The next pieces begin another one."""
        if self._live is not None:
            rest, self._text = self._text.plain, Text()
            self._live.update(self._text)
            self._live.stop()
            self._print(rest)
            self._live, self._printed = None, False

    def _print(self, text: str) -> None:
        for block in _blocks(text):
            if self._printed:
                self.console.print()
            self._printed = True
            self.console.print(block, soft_wrap=isinstance(block, Text))


class _Tail:
    """The last lines of a text, as many as fit on the screen."""

    def __init__(self, text: Text) -> None:
        self.text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # A blank line at the end is not shown: it may be the gap before the next block.
        shown = self.text.copy()
        shown.rstrip()
        lines = shown.wrap(console, options.max_width)
        yield from lines[-max(1, console.height - 1) :]


def _begin_of_last(text: str) -> int:
    """Where the last block of a text begins; 0 if there is only one."""
    begins = [token.map[0] for token in PARSER.parse(text) if token.level == 0 and token.map]
    if len(begins) < 2:
        return 0
    return sum(len(line) + 1 for line in text.split("\n")[: begins[-1]])


def _blocks(text: str) -> list["Text | _Rendered"]:
    """A text's blocks: code as a text, whose lines the terminal wraps, and the others rendered."""
    found: list[Text | _Rendered] = []
    tokens: list[Token] = []
    for token in PARSER.parse(text):
        tokens.append(token)
        if token.level == 0 and token.nesting <= 0:
            code = token.type in ("fence", "code_block")
            found.append(_code(token) if code else _Rendered(tokens))
            tokens = []
    return found


def _code(token: Token) -> Text:
    """Code in colours, without its fence."""
    lexer = re.match(r"\w*", token.info)
    made = Syntax("", (lexer and lexer[0]) or "text", theme=THEME).highlight(token.content)
    made.rstrip()
    return made


class _Code(markdown.CodeBlock):
    """Code within a list or a quotation."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Syntax(str(self.text).rstrip(), self.lexer_name, theme=self.theme, word_wrap=True)


class _Heading(markdown.Heading):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.text  # at the left, without a frame


class _Rendered(markdown.Markdown):
    """A block, without the spaces with which rich fills its lines."""

    elements: ClassVar = {
        **markdown.Markdown.elements,
        "fence": _Code,
        "code_block": _Code,
        "heading_open": _Heading,
    }

    def __init__(self, tokens: list[Token]) -> None:
        super().__init__("", code_theme=THEME, hyperlinks=False)
        self.parsed = tokens
        for child in (child for token in tokens for child in token.children or ()):
            if child.type == "softbreak":
                child.type = "hardbreak"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = list(Segment.split_lines(super().__rich_console__(console, options)))  # type: ignore[arg-type]
        for line in lines:
            while line and not line[-1].text.strip():
                line.pop()
            if line:
                line[-1] = Segment(line[-1].text.rstrip(), line[-1].style)
        filled = [n for n, line in enumerate(lines) if line]
        for line in lines[filled[0] : filled[-1] + 1] if filled else ():
            yield from (*line, Segment.line())
