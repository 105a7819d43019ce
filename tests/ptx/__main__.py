"""Execute every op's compiled kernels in numpy: `make ptx ARGS='--only row_linear'`.

`check` compares the ops with their references and reports hazards. `invariance` compares rows alone with rows among
others, bit for bit. `counters` prints traffic, bank conflicts and instructions. Exits with 1 if anything is wrong.

With both dtypes, cases take turns: every second one of `check` is in bfloat16 on sm_90 and in float16 on sm_80, the
others the other way round; the other parts are in bfloat16 on sm_90 and in float16 on sm_80. `--whole` runs everything
in both.
"""

import argparse
import os
import sys

from ptx import checks, ops, rounds
from ptx.processes import everything

PARTS = ("check", "invariance", "counters")


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    takes_turns = len(args.dtype) == 2 and not args.whole
    items = [
        (part, arch, dtype, op.__name__, args.first, turn if takes_turns and op in ops.OPS else None)
        for arch in args.arch
        for turn, dtype in enumerate(args.dtype if arch == 90 else reversed(args.dtype))
        for part in args.what
        for op in (*ops.OPS, *rounds.OPS)
        if (not args.only or op.__name__ in args.only)
        and (op in ops.OPS or dtype == args.dtype[0])
        and (part == "check" or not takes_turns or not turn or op in rounds.OPS)
    ]
    total = wrong = 0
    for (part, *_), rows in zip(items, everything(items, args.jobs), strict=True):
        for text, bad in rows:
            print(text, flush=True)
            total, wrong = total + (part != "counters"), wrong + bad
    print(f"{total} cases, {wrong} wrong")
    return int(wrong > 0)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ptx", description=__doc__)
    names = [op.__name__ for op in (*ops.OPS, *rounds.OPS)]
    parser.add_argument("--arch", type=_listed([80, 90]), default=[80, 90], help="80,90")
    parser.add_argument("--dtype", type=_listed(list(checks.TYPES)), default=list(checks.TYPES), help="bf16,fp16")
    parser.add_argument("--what", type=_listed(list(PARTS)), default=list(PARTS), help=",".join(PARTS))
    parser.add_argument("--only", type=_listed(names), default=[], metavar="OPS", help=",".join(names))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one for each core)")
    parser.add_argument("--first", type=int, metavar="N", help="only the first N cases of each op, which are small")
    parser.add_argument("--whole", action="store_true", help="every case in both dtypes, on both architectures")
    return parser.parse_args(argv)


def _listed(known: list) -> object:
    """A type for argparse: a list of known values, separated by commas."""

    def values(text: str) -> list:
        given = [type(known[0])(x) for x in text.split(",")]
        if unknown := [x for x in given if x not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not known; there are {', '.join(map(str, known))}")
        return given

    return values


if __name__ == "__main__":
    sys.exit(main())
