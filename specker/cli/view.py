"""Write traces of `specker --trace` as one HTML page, and show it: `specker view --help`.

Exit codes: 0; 2 for a file that cannot be read or is no trace, and for a page that cannot be written.
"""

import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from specker.command.exits import run_cli
from specker.command.parser import Parser
from specker.paths import probe, write_file
from specker.view.page import html
from specker.view.read import read

TRACE = "trace.jsonl"  # shown unless the user names another


def parser() -> Parser:
    about = "Show the rounds of one or several runs as one HTML page, in the browser if this is a terminal."
    top = Parser("specker view", "specker view [TRACE ...] [--out FILE]", about, "")
    help = f"a file of specker --trace; several: side by side (default: {TRACE})"
    top.add_argument("traces", nargs="*", metavar="TRACE", help=help)
    top.add_argument("--out", metavar="FILE", help="the page (default: trace.html beside the first trace)")
    top.prints("help", "-h", "--help", help="show this help and exit", text=lambda _: top.format_help())
    return top


def parse(argv: Sequence[str] | None = None) -> tuple[list[str], str | None]:
    """The traces and the page that a command line names. Raises ValueError with a sentence for the user."""
    given = parser().parse_args(argv)
    if not given.traces and not Path(TRACE).exists():
        raise ValueError(
            f"there is no {TRACE} here: specker --trace {TRACE} writes one, specker --view shows a run at once"
        )
    return given.traces or [TRACE], given.out


def main(argv: Sequence[str] | None = None) -> int:
    return run_cli(lambda: run(*parse(argv)))


def run(traces: Sequence[str], out: str | None) -> int:
    out = out or str(Path(traces[0]).parent / "trace.html")
    if any(Path(out).exists() and Path(trace).exists() and Path(out).samefile(trace) for trace in traces):
        raise ValueError(f"--out {out}: would replace a trace")
    found = [read(trace) for trace in traces]
    for trace in found:
        if trace.warning:
            print(f"specker: warning: {trace.name}: {trace.warning}", file=sys.stderr)
    probe(out, "--out")
    write_file(out, html(found))
    print(out)
    if sys.stdout.isatty():
        webbrowser.open(Path(out).resolve().as_uri())
    return 0
