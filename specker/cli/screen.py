"""What a run prints: the streamed text, notes, progress bars and the closing table."""

import contextlib
import io
import logging
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from specker.cli.report import Result, ar_stats_of, speedup, stats_of, verdict
from specker.command.exits import silence
from specker.runtime.control.reasons import counted
from specker.runtime.control.stats import Stats

if TYPE_CHECKING:  # `--help` and errors in the flags need no rich
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

# A model's control characters must not steer the terminal: print Unicode's control pictures instead. Those from U+0080
# on, with which many terminals begin commands, too, have none.
CONTROLS: dict[int, int] = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
CONTROLS |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


class Screen:
    """Prints text and tables to the right stream, coloured on a terminal."""

    def __init__(self, json_to_stdout: bool, quiet: bool = False) -> None:
        """`json_to_stdout`: text goes to stderr. `quiet`: print nothing, because another process of the job prints."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # an ASCII terminal cannot encode every token
        self.failure: OSError | None = None  # the error that ended the writing of the text
        self.out = sys.stderr if json_to_stdout else sys.stdout
        if quiet:
            self.out = open(os.devnull, "w")  # noqa: SIM115  open until the process ends
        self.terminal = self.out.isatty()
        self.titled = False  # whether a title was printed
        self.reasons = False  # whether reasoning was printed last
        self.answer: Any = None  # answer.Answer, which renders the texts of a conversation on a terminal
        self.notes_to = self.out if self.terminal or quiet else sys.stderr
        # Whether notes go to a pipe or a file. Then text is written without rich, whose import takes 0.1 s.
        self.plain = not os.environ.get("FORCE_COLOR") and not self.notes_to.isatty()

    @cached_property
    def text(self) -> "Console":
        from rich.console import Console

        return Console(file=self.out, highlight=False)

    @cached_property
    def notes(self) -> "Console":
        from rich.console import Console

        return self.text if self.notes_to is self.out else Console(file=self.notes_to, highlight=False)

    def _mark(self, text: str, style: str, end: str = "\n") -> None:
        """Print to the notes' stream."""
        if self.plain:
            print(text, file=self.notes_to, end=end, flush=True)
        else:
            self.notes.print(_styled(text, style), end=end, soft_wrap=True)

    def note(self, line: str, style: str = "dim") -> None:
        """Print a sentence. A terminal's lines end between words; no path is broken."""
        if not self.plain:
            wrap = partial(textwrap.fill, width=self.notes.width, break_long_words=False, break_on_hyphens=False)
            line = "\n".join(map(wrap, line.split("\n")))
        self._mark(line, style)

    def remarks(self, engine: Any) -> None:
        """Print what drafts, where that is not plain from the command, and the engine's warnings."""
        notes = engine.recipe.notes
        for name in notes.shown:
            self.note(notes[name])
        for sentence in engine.warnings.values():
            self.note(sentence, "yellow")

    @contextlib.contextmanager
    def log_notes(self) -> Iterator[None]:
        """Print the warnings of the logger `specker` as notes."""
        show = partial(self.note, style="yellow")
        with _handled(logging.getLogger("specker"), _Shown(show, logging.WARNING)):
            yield

    @contextlib.contextmanager
    def progress(self, what: str) -> Iterator[Callable[..., None]]:
        """A transient progress bar on a terminal. Yields a function to call with (done, total), and perhaps with the
        part of `what` that this is, such as "target, 1 of 2". Steps that the logger `specker.steps` names are shown
        too: by the bar, or as notes where there is none."""
        shown = partial(_handled, logging.getLogger("specker.steps"))
        if self.plain:
            with shown(_Shown(self.note, logging.INFO)):
                yield lambda done, of, part="": None
            return
        from rich.progress import Progress

        with Progress(console=self.notes, transient=True) as bar:
            task = bar.add_task(what, total=None)
            with shown(_Shown(lambda step: bar.update(task, description=step, total=None), logging.INFO)):
                yield lambda done, of, part="": bar.update(
                    task, description=f"{what} {part}".rstrip(), completed=done, total=of
                )

    def prompt(self, text: str, title: str | None = None) -> None:
        """Print the prompt. On a terminal its continuation follows without a line break. Elsewhere `title`, the name of
        one text among several, begins that text, as `head` prints the names of several files."""
        if self.terminal:
            self._put(text, "dim")
            return
        if title is not None:
            gap = "\n" if self.titled else ""
            self._put(f"{gap}==> {title} <==\n", "")
            self.titled = True
        self._mark(text, "dim")

    def render_answers(self) -> None:
        """From here on, texts are answers: a terminal that can move its cursor gets them as Markdown."""
        if self.terminal and not self.text.is_dumb_terminal:
            from specker.cli.answer import Answer  # rich.markdown takes long to import

            self.answer = Answer(self.text)

    def reasoning(self, text: str) -> None:
        """Print reasoning before or between the parts of an answer: dim and, like notes, not where a pipe reads."""
        if self.answer is not None and not self.reasons:
            self.answer.end()
        self.reasons = True
        self._mark(text.translate(CONTROLS), "dim", end="")

    def _end_reasoning(self) -> None:
        if self.reasons:
            self.reasons = False
            self._mark("", "", end="\n\n")

    def pieces(self, pieces: list[tuple[str, bool]]) -> None:
        if pieces:
            self._end_reasoning()
        if self.answer is not None:
            self.answer.add([(text.translate(CONTROLS), drafted) for text, drafted in pieces])
            return
        for text, drafted in pieces:
            self._put(text, "green" if drafted else "")

    def newline(self) -> None:
        """End a text."""
        self._end_reasoning()
        if self.answer is not None:
            self.answer.end()
        else:
            self._put("\n", "")

    def _put(self, text: str, style: str) -> None:
        if self.terminal:
            self.text.print(_styled(text.translate(CONTROLS), style), end="", soft_wrap=True)
        elif self.failure is None:
            try:
                self.out.write(text)
                self.out.flush()
            except BrokenPipeError:
                raise
            except OSError as error:  # such as a full disk: the run goes on, for its other results
                self.failure = error
                if self.out is sys.stdout:
                    silence()

    def table(self, engine: Any, results: list[Result]) -> None:
        """Print the closing table and what a reader of it should know."""
        trim = engine.trim_report(stats_of(results))
        self.notes.print()
        self.note(engine.title, "bold")
        self.notes.print(_table(engine, results, trim))
        for line, style in _comments(engine, results):
            self.note(line, style)


class _Shown(logging.Handler):
    """Shows the messages of log records."""

    def __init__(self, show: Callable[[str], None], level: int) -> None:
        super().__init__(level)
        self.show = show

    def emit(self, record: logging.LogRecord) -> None:
        self.show(record.getMessage())


@contextlib.contextmanager
def _handled(logger: logging.Logger, handler: logging.Handler) -> Iterator[None]:
    """Pass the logger's records to the handler, from the handler's level on."""
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(handler.level, logger.getEffectiveLevel()))
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


def _styled(text: str, style: str) -> "Text":
    from rich.text import Text

    return Text(text, style)


def _table(engine: Any, results: list[Result], trim: dict[str, Any]) -> "Table":
    """The run's figures, beside those of `ar` with --check. `trim`: as `Engine.trim_report` returns it."""
    from rich.table import Table

    stats, checked = stats_of(results), [r for r in results if r.check]
    columns = [_column(stats)] + ([_column(ar_stats_of(checked))] if checked else [])
    table = Table(show_edge=False)
    table.add_column("", no_wrap=True)
    for name in (engine.strategy, "ar")[: len(columns)]:
        table.add_column(name, justify="right", overflow="fold")
    for name in columns[0]:
        if any(column.get(name) for column in columns):
            table.add_row(name, *(column.get(name, "") for column in columns))
    if trim:
        table.add_section()
        table.add_row("rows of the draft head", f"{trim['kept_rows']} of {trim['vocab_size']}")
        table.add_row("rows ranked by", trim["ranking"])
        table.add_row("tokens in these rows", f"{trim['coverage']:.1%}")
        table.add_row("rounds cut by trimming", f"{trim['rounds_lost']} of {stats.rounds}")
    if checked:
        table.add_section()
        drafted = any(r.stats.drafted for r in checked)
        table.add_row("speedup", f"{speedup(checked) or 0.0:.2f}x" if drafted else "no drafts", "1.00x")
        same = all(r.check.identical for r in checked)
        table.add_row("identical tokens", "[green]yes[/]" if same else "[red]no[/]", "")
    return table


def _comments(engine: Any, results: list[Result]) -> Iterator[tuple[str, str]]:
    """Sentences below the table, each with its style."""
    stats, checked = stats_of(results), [r for r in results if r.check]
    if cut := sum(result.finished == "context" for result in results):
        full = f"the context of {engine.max_context} tokens is full (--max-context)"
        yield f"{_ends(cut, results)} before --max-new-tokens: {full}", "yellow"
    if stuck := sum(result.finished == "grammar" for result in results):
        yield f"{_ends(stuck, results)} early: no token can follow in the grammar", "yellow"
    if stats.rests and stats.drafted:
        yield _undrafted(stats), "dim"
    if checked and engine.speculates:
        yield verdict(checked), ""
    if engine.speculates and stats.rounds and not stats.drafted:
        yield f"drafting: {stats.drafting}", "dim"
    if not checked and stats.drafted:
        passes = (sum(stats.seconds.values()) - stats.seconds["prefill"]) / stats.seconds["verify"]
        if stats.acceptance_length < 0.95 * passes:
            yield (
                f"plain decoding is probably faster here: a round gives {stats.acceptance_length:.2f} tokens in the "
                f"time of {passes:.2f} verify passes (--check measures both)",
                "yellow",
            )


def _ends(count: int, results: list[Result]) -> str:
    return "the text ends" if len(results) == 1 else f"{count} of {len(results)} texts end"


def _undrafted(stats: Stats) -> str:
    """How many rounds drafted, and why others did not."""
    drafted = sum(count for length, count in stats.lengths.items() if length)
    copied = f", {stats.copied} of them by copying text" if stats.copied else ""
    rest = counted(stats.rounds, drafted, stats.rests)
    return f"{drafted} of {stats.rounds} rounds drafted{copied}; the others did not: {rest}"


def _column(stats: Stats) -> dict[str, str]:
    """A column of the table: label -> cell. A stage below half a percent of the time has an empty cell."""
    column = {
        "tokens": str(stats.tokens),
        "tokens/s": f"{stats.tokens_per_second:.1f}",
        "tokens/s after prefill": f"{stats.decode_tokens_per_second:.1f}",
        "prefill tokens/s": f"{stats.prefill_tokens_per_second:.0f}",
        "acceptance length": f"{stats.acceptance_length:.2f}",
        "acceptance by position": " ".join(f"{share:.0%}" for share in stats.accepted_per_position[:8]),
    }
    if stats.experts:
        column["experts read per layer"] = f"{stats.experts_read:.1f}"
    if stats.found:
        found = stats.diffusion
        column["tokens per block"] = f"{found['k']:.1f}"
        column["candidates per token"] = f"{found['lattice_width']:.1f}"
    column["time"] = f"{stats.wall:.2f} s 100%"
    for name, seconds in stats.seconds.items():
        label, count = (name, 1) if name == "prefill" else (f"{name} per round", stats.rounds or 1)
        share, ms = seconds / (stats.wall or 1), 1e3 * seconds / count
        column[label] = f"{ms:.{0 if ms >= 100 else 2}f} ms {share:4.0%}" if share >= 0.005 else ""
    return column
