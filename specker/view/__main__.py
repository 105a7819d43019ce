"""Write traces of `specker.run --trace` as one HTML page: `python -m specker.view --help`.

Exit codes: 0; 2 for a file that cannot be read or is no trace, and for a page that cannot be written.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specker.flags import Parser, ended, make, opt
from specker.report import probe, write_file
from specker.view.page import html
from specker.view.read import read


@dataclass(frozen=True)
class View:
    out: str | None = opt(None, "the page (default: trace.html beside the first trace)", "FILE")


def parse(argv: Sequence[str] | None = None) -> tuple[list[str], View]:
    parser = Parser(prog="specker.view", description="The rounds of a run as one HTML page.", allow_abbrev=False)
    parser.add_argument(
        "traces", nargs="+", metavar="TRACE", help="a file of specker.run --trace; several: side by side"
    )
    parser.add(View, "page")
    values = vars(parser.parse_args(argv))
    return values["traces"], make(View, values)


def run(traces: list[str], view: View) -> int:
    out = view.out or str(Path(traces[0]).with_name("trace.html"))
    if any(Path(out).exists() and Path(trace).exists() and Path(out).samefile(trace) for trace in traces):
        raise ValueError(f"--out {out}: would replace a trace")
    found = [read(trace) for trace in traces]
    probe(out, "--out")
    write_file(out, html(found))
    print(out)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return ended(lambda: run(*parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
