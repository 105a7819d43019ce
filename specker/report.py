"""Output of a run: the streamed text, the closing table and the object that `--json` writes."""

import contextlib
import importlib.metadata
import io
import logging
import os
import platform
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from functools import cache, partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from specker.flags import silence
from specker.options import Common, Options, Sampling
from specker.runtime.stats import Stats

# A model's control characters must not steer the terminal: print Unicode's control pictures instead.
CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}


def probe(path: str, flag: str = "--json") -> None:
    """Raise ValueError now, not after a long run, if `write_file` could not write to `path`. Leaves no file behind."""
    where = Path(path)
    if where.is_dir():
        raise ValueError(f"{flag} {path}: is a directory")
    try:
        with tempfile.TemporaryFile(dir=where.parent) if _replaceable(where) else where.open("a"):
            pass
    except OSError as error:
        raise ValueError(f"{flag} {path}: cannot be written: {error.strerror}") from None


def write_file(path: str | Path, data: str | bytes) -> None:
    """Write the file atomically: no reader sees half of it, and no crash leaves half of it. Raises OSError."""
    where, data = Path(path), data.encode() if isinstance(data, str) else data
    if not _replaceable(where):
        where.write_bytes(data)
        return
    where = Path(os.path.realpath(where))
    part = where.with_name(f".{where.name}.{os.getpid()}.tmp")
    try:
        part.write_bytes(data)
        os.replace(part, where)
    finally:
        part.unlink(missing_ok=True)


def _replaceable(path: Path) -> bool:
    return path.is_file() or not path.exists()  # False for /dev/null, /dev/stdout and named pipes


@dataclass
class Result:
    """One decoded turn: the chunks so far, and the comparison with `ar` if --check is set."""

    tokens: list[int]
    text: str
    stats: Stats
    check: Any = None  # runtime.check.CheckResult
    ids: list[int] = field(default_factory=list)  # token ids of the prompt
    seed: int = 0
    finished: str | None = None  # as in runtime/text.py


def report(engine: Any, results: list[Result], sampling: Sampling, interrupted: bool) -> dict[str, Any]:
    """The object that `--json` writes. `total` joins the prompts; its rates use the summed counts and times."""
    total = Result([t for r in results for t in r.tokens], "".join(r.text for r in results), _total(results))
    checked = [r for r in results if r.check]
    out = {
        "strategy": engine.strategy,
        "target": engine.target_name,
        "draft": engine.draft_name,
        "device": str(engine.device),
        "dtype": str(engine.dtype).removeprefix("torch."),
        "batch_size": engine.options.batch_size,
        "sampling": asdict(sampling),
        "settings": settings(engine.options),
        "versions": versions(),
        "prompts": [_prompt(r) for r in results],
        "total": _row(total, checked),
    }
    trim = engine.trim_report(total.stats)
    if (ranks := engine.ranks) is not None:
        names = {"tp": ranks.size, "dp": ranks.replicas, "draft": ranks.drafting}
        out["ranks"] = names | {"reduce": "ordered" if ranks.ordered else "fast"}
    out |= engine.remarks
    return out | ({"vocabulary": trim} if trim else {}) | ({"interrupted": True} if interrupted else {})


def settings(options: Options) -> dict[str, Any]:
    """The options in effect, by their names as flags; omitted ones without a default are left out."""
    parts = [
        (options, fields(Common)),
        *((own, fields(own)) for own in (options.own, options.copy, options.trim) if own is not None),
    ]
    values = {f.name: getattr(part, f.name) for part, names in parts for f in names}
    plain = (bool, int, float, str, tuple)
    return {name: x if isinstance(x, plain) else str(x) for name, x in values.items() if x is not None}


@cache
def versions() -> dict[str, str]:
    """The versions of Python, specker and the packages that compute."""
    found = {"python": platform.python_version()}
    for name in ("specker", "torch", "triton", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _prompt(result: Result) -> dict[str, Any]:
    own = {"seed": result.seed, "prompt_tokens": len(result.ids), "finish_reason": result.finished}
    return own | _row(result, [result] if result.check else [])


def _row(result: Result, checked: list[Result]) -> dict[str, Any]:
    row = {"tokens": result.tokens, "text": result.text, **result.stats.to_json()}
    if checked:
        own, plain = _total(checked).tokens_per_second, _total_ar(checked).tokens_per_second
        row |= {"ar_tokens_per_second": plain, "speedup": own / plain if plain else None}
        if _compared(checked):
            row |= {"identical": all(r.check.identical for r in checked)}
    return row


def _compared(checked: list[Result]) -> bool:
    """Whether tokens were compared; they are not with random weights or synthetic acceptance."""
    return all(r.check.identical is not None for r in checked)


def _total(results: list[Result]) -> Stats:
    return sum((r.stats for r in results), Stats())


def _total_ar(results: list[Result]) -> Stats:
    return sum((r.check.ar.stats for r in results), Stats())


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
        self.text = Console(file=self.out, highlight=False)
        silent = self.terminal or quiet
        self.notes = self.text if silent else Console(stderr=True, highlight=False)

    def note(self, line: str, style: str = "dim") -> None:
        """Print a sentence. A terminal's lines end between words; no path is broken."""
        if self.notes.is_terminal:
            wrap = partial(textwrap.fill, width=self.notes.width, break_long_words=False, break_on_hyphens=False)
            line = "\n".join(map(wrap, line.split("\n")))
        self.notes.print(Text(line, style), soft_wrap=True)

    def remarks(self, engine: Any) -> None:
        """Print the engine's remarks, except the one about made-up results, which the table has."""
        for name, sentence in engine.remarks.items():
            if name != "sizing":
                self.note(sentence, "yellow")

    @contextlib.contextmanager
    def records(self) -> Iterator[None]:
        """Print the warnings of the logger `specker` as notes."""
        show = partial(self.note, style="yellow")
        with _heard(logging.getLogger("specker"), _Notes(show, logging.WARNING)):
            yield

    @contextlib.contextmanager
    def progress(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """A transient progress bar on a terminal. Yields a function to call with (done, total). Steps that the logger
        `specker.steps` names are shown too: by the bar, or as notes where there is none."""
        bare = not self.notes.is_terminal
        with Progress(console=self.notes, transient=True, disable=bare) as bar:
            task = bar.add_task(what, total=None)
            shows = self.note if bare else lambda step: bar.update(task, description=step, total=None)
            with _heard(logging.getLogger("specker.steps"), _Notes(shows, logging.INFO)):
                yield lambda done, of: bar.update(task, description=what, completed=done, total=of)

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
        self.notes.print(Text(text, "dim"), soft_wrap=True)

    def pieces(self, pieces: list[tuple[str, bool]]) -> None:
        for text, drafted in pieces:
            self._put(text, "green" if drafted else "")

    def newline(self) -> None:
        self._put("\n", "")

    def _put(self, text: str, style: str) -> None:
        if self.terminal:
            self.text.print(Text(text.translate(CONTROLS), style), end="", soft_wrap=True)
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
        stats, checked = _total(results), [r for r in results if r.check]
        plain = _total_ar(checked) if checked else None
        table = Table(show_edge=False)
        table.add_column("", no_wrap=True)
        for name in (engine.strategy, "ar") if plain else (engine.strategy,):
            table.add_column(name, justify="right", overflow="fold")
        rows = [_column(stats)] + ([_column(plain)] if plain else [])
        for name in rows[0]:
            if any(row.get(name) for row in rows):
                table.add_row(name, *(row.get(name, "") for row in rows))
        if trim := engine.trim_report(stats):
            table.add_section()
            table.add_row("rows of the draft head", f"{trim['kept_rows']} of {trim['vocab_size']}")
            table.add_row("tokens in these rows", f"{trim['coverage']:.1%}")
            table.add_row("rounds cut by trimming", f"{trim['rounds_lost']} of {stats.rounds}")
        if plain:
            table.add_section()
            speedup = _total(checked).tokens_per_second / plain.tokens_per_second if plain.tokens_per_second else 0.0
            table.add_row("speedup", f"{speedup:.2f}x", "1.00x")
            if _compared(checked):
                same = all(r.check.identical for r in checked)
                table.add_row("identical tokens", "[green]yes[/]" if same else "[red]no[/]", "")
        self.notes.print()
        about = [engine.models, str(engine.device), str(engine.dtype).removeprefix("torch."), *engine.options.stand_ins]
        self.note(", ".join(about), "bold")
        self.notes.print(table)
        if sizing := engine.remarks.get("sizing"):
            self.note(sizing, "yellow")
        if trim:
            follow = f"; {trim['text_rows']} of them follow the text" if trim["text_rows"] else ""
            self.note(f"the rows of the draft head were chosen by {trim['ranking']}{follow}")
        if cut := sum(result.finished == "context" for result in results):
            which = "the text ends" if len(results) == 1 else f"{cut} of {len(results)} texts end"
            full = f"the context of {engine.max_context} tokens is full (--max-context)"
            self.note(f"{which} before --max-new-tokens: {full}", "yellow")
        if stats.rests:
            self.note(_rested(stats))
        if not plain and stats.drafted:
            passes = (sum(stats.seconds.values()) - stats.seconds["prefill"]) / stats.seconds["verify"]
            if stats.acceptance_length < 0.95 * passes:
                self.note(
                    f"plain decoding is probably faster here: a round gives {stats.acceptance_length:.2f} tokens in "
                    f"the time of {passes:.2f} verify passes (--check measures both)",
                    "yellow",
                )
        if plain and engine.speculates and speedup < 1:
            self.note(f"plain decoding was faster here (speedup {speedup:.2f}x): try --strategy ar", "yellow")


class _Notes(logging.Handler):
    def __init__(self, show: Callable[[str], None], level: int) -> None:
        super().__init__(level)
        self.show = show

    def emit(self, record: logging.LogRecord) -> None:
        self.show(record.getMessage())


@contextlib.contextmanager
def _heard(logger: logging.Logger, handler: logging.Handler) -> Iterator[None]:
    """Pass the logger's records to the handler, from the handler's level on."""
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(handler.level, logger.getEffectiveLevel()))
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


def _rested(stats: Stats) -> str:
    """How many rounds drafted, and why others did not."""
    why = {
        "slower": "because plain decoding was faster",
        "nothing found": "because there was nothing to copy",
        "measured": "in order to time plain decoding",
    }
    rest = ", ".join(f"{stats.rests[reason]} did not {words}" for reason, words in why.items() if reason in stats.rests)
    drafted = sum(count for length, count in stats.lengths.items() if length)
    copied = f", {stats.copied} of them by copying text" if stats.copied else ""
    return f"{drafted} of {stats.rounds} rounds drafted{copied}; {rest}"


def _column(stats: Stats) -> dict[str, str]:
    """A column's cells by their labels; a stage below half a percent of the time has none."""
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
