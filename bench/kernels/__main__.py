"""The cases of several kernel benches in turn, in one process and for a limited time.

    python -m bench.kernels [row_linear vocab_topk ...] [--seconds 60] [--rounds 20] [--compiled] [--save]

Each op's first case comes first, then each op's second, so that a short run sees every op. Baselines that compile for
many seconds are left out unless `--compiled` is set. On a CPU, small shapes are timed, and a line says whether the
op calls compiled C or is the reference in torch.
"""

import argparse
import importlib
import itertools
import pkgutil
import sys
import time
from collections.abc import Iterator

from bench import harness, kernels
from bench.kernels import common
from bench.kernels.common import Built, Case

COMPILED = ("torch.compile", "flex_attention", "flashinfer")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__.partition("\n")[0])
    known = [m.name.removeprefix("bench_") for m in pkgutil.iter_modules(kernels.__path__) if m.name[:6] == "bench_"]
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"some of {', '.join(known)} (default: all)")
    parser.add_argument("--seconds", type=float, default=60.0, help="after which no case begins")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--compiled", action="store_true", help="also baselines that compile for many seconds")
    args = common.arguments(parser)
    if unknown := set(args.ops) - set(known):
        parser.error(f"there is no op {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    common.ROUNDS = args.rounds
    deadline = time.monotonic() + args.seconds
    failed, done = [], 0
    every = list(in_turn(args.ops or known))
    for op, case in every:
        if time.monotonic() > deadline:
            break
        try:
            rows = common.rows_of(op, case if args.compiled else without(case))
        except Exception as error:  # a wrong result or a failed compilation must not lose other rows
            failed.append(f"{op}, {case.name}: {type(error).__name__}: {error}")
            continue
        finally:
            done += 1
        if args.save:
            harness.save(op, rows, common.DEVICE)
        print(line(op, rows), flush=True)
    print(f"{done} of {len(every)} cases")
    if failed:
        sys.exit("\n".join(failed))


def in_turn(ops: list[str]) -> Iterator[tuple[str, Case]]:
    """The first case of each op, then the second, and so on."""
    each = [[(op, case) for case in importlib.import_module(f"bench.kernels.bench_{op}").cases()] for op in ops]
    return (pair for group in itertools.zip_longest(*each) for pair in group if pair is not None)


def without(case: Case) -> Case:
    """The case without the baselines that compile."""

    def build() -> Built:
        built = case.build()
        return Built({n: call for n, call in built.ways.items() if n not in COMPILED}, built.check, built.cost)

    return Case(case.name, build, case.goal)


def line(op: str, rows: list[dict[str, object]]) -> str:
    ours, *others = rows
    median, low, high = (f"{ours[key] * 1e6:.1f}" for key in ("median", "p20", "p80"))  # type: ignore[operator]
    found = [f"{median} us ({low} to {high}{', ' + str(ours['runs']) if 'runs' in ours else ''})"]
    found += [f"{ours['share']:.0%} of the limit"] if "share" in ours else []
    found += [f"{row['way']} {row['ours_over_this']:.2f}x" for row in others if "ours_over_this" in row]
    met = {True: "met", False: "missed"}.get(ours.get("met"), "")  # type: ignore[call-overload]
    return f"{op:<15} {ours['case']:<40} {', '.join(found)}" + (
        f", goal {ours['goal']} {met}" if "goal" in ours else ""
    )


if __name__ == "__main__":
    main()
