"""Execute every op's compiled kernels in numpy: `make ptx ARGS='--only row_linear'`.

`check` compares the ops with their references and reports hazards. `invariance` compares rows alone with rows among
others, bit for bit. `counters` prints traffic, bank conflicts and instructions. Exits with 1 if anything is wrong.
"""

import argparse
import sys

import torch

from ptx import checks, counting, ops, rounds

PARTS = ("check", "invariance", "counters")


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    torch.set_num_threads(1)
    total = wrong = 0
    for arch in args.arch:
        for dtype in args.dtype:
            for part in args.what:
                if part == "counters":
                    for text in counting.counters(arch, dtype, args.only, args.first):
                        print(text, flush=True)
                    continue
                for row in getattr(checks, part)(arch, dtype, args.only, args.first):
                    print(row, flush=True)
                    total, wrong = total + 1, wrong + bool(row.wrong)
    print(f"{total} cases, {wrong} wrong")
    return int(wrong > 0)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ptx", description=__doc__)
    names = [op.__name__ for op in (*ops.OPS, *rounds.OPS)]
    parser.add_argument("--arch", type=_listed([80, 90]), default=[80, 90], help="80,90")
    parser.add_argument("--dtype", type=_listed(list(checks.TYPES)), default=list(checks.TYPES), help="bf16,fp16")
    parser.add_argument("--what", type=_listed(list(PARTS)), default=list(PARTS), help=",".join(PARTS))
    parser.add_argument("--only", type=_listed(names), default=[], metavar="OPS", help=",".join(names))
    parser.add_argument("--first", type=int, metavar="N", help="only the first N cases of each op, which are small")
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
