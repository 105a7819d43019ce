"""Compile every kernel variant for sm_80, sm_90 and sm_100, or gfx942 and gfx950, without a GPU; record the results.

    python bench/static.py [--ops a,b] [--arch 80,90,100] [--smoke] [--json] [--no-save] [--jobs N]
    python bench/static.py --arch gfx942,gfx950

An op file that has kernels exposes `variants(arch)`. A kernel fails by the checks of `ptxsim.static_report`,
and if it runs in a model's layer and does not fit on an SM beside the next kernel (bench/overlap.py). The tables of all
resources go to bench/results/static.md and static_amd.md.
"""

import argparse
import importlib
import json
import os
import pkgutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ptxsim import StaticReport, static_report

from bench import overlap
from bench.builds import build
from specker.kernels.variant import AMD

ARCHES = (80, 90, 100)
RESULTS = Path(__file__).parent / "results"


def ops() -> dict[str, Any]:
    """The modules of specker.kernels and specker.kernels.round that expose `variants`, by name."""
    packages = [importlib.import_module(name) for name in ("specker.kernels", "specker.kernels.round")]
    modules = {
        m.name: importlib.import_module(f"{package.__name__}.{m.name}")
        for package in packages
        for m in pkgutil.iter_modules(package.__path__)
    }
    return {name: module for name, module in sorted(modules.items()) if hasattr(module, "variants")}


@cache
def variants(op: str, arch: int) -> list[Any]:
    return list(ops()[op].variants(arch))


Item = tuple[str, int, int, bool]  # op, architecture, number among `variants`, whether offsets have 32 bits
Row = tuple[str, StaticReport]  # op, its report


def compiled(item: Item) -> Row:
    op, arch, n, below_2_gib = item
    return op, static_report(build(variants(op, arch)[n], arch, below_2_gib))


def items(arches: tuple[int, ...], names: list[str], smoke: bool) -> list[Item]:
    """What to compile, by op, architecture and variant."""
    found = ops()
    if unknown := set(names) - set(found):
        sys.exit(f"static: no kernels in {', '.join(sorted(unknown))}; there are {', '.join(found)}")
    return [
        (op, arch, n, below_2_gib)
        for op in names or found
        for arch in arches
        for n, variant in enumerate(variants(op, arch))
        if variant.smoke or not smoke
        for below_2_gib in ((False, True) if arch in AMD else (False,))
    ]


def reports(each: list[Item], jobs: int = 1) -> Iterator[Row]:
    """Their reports, from `jobs` processes."""
    if jobs == 1:
        yield from map(compiled, each)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(compiled, each)


def markdown(rows: list[Row], groups: list[overlap.Group], versions: str) -> str:
    lines = [
        "# What the kernels compile to",
        "",
        f"Written by bench/static.py, which compiles without a GPU: {versions}. Nothing here is a timing. Registers",
        "are a thread's; shared memory (bytes) and columns of tensor memory are a block's. *Wide* is the share of the",
        "bytes named by global loads that come 16 or more at a time or asynchronously (*async*: how many such",
        "instructions). *Loop* is the number of instructions in the longest loop with a matrix instruction, which a",
        "warp executes for a tile. *Blocks* an SM (or CU) and *occupancy* are estimates from registers, shared memory,",
        "tensor memory and warps.",
    ]
    for op in sorted({op for op, _ in rows}):
        lines += [
            "",
            f"## {op}",
            "",
            "| kernel | variant | target | warps | stages | registers | stack | shared | tensor | matrix | loads "
            "| wide | async | stores | loop | blocks | occupancy |",
            "|---|---|---|--:|--:|--:|--:|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|",
        ]
        for r in sorted((r for of, r in rows if of == op), key=lambda r: (r.kernel, r.variant, r.arch)):
            cells = (r.kernel, r.variant, r.target, r.warps, r.stages, r.registers, r.stack, r.shared, r.tensor)
            more = (
                r.matrix,
                r.loads,
                f"{r.wide:.0%}",
                r.asynchronous,
                r.stores,
                r.loop,
                r.blocks,
                f"{r.occupancy:.0%}",
            )
            lines.append("| " + " | ".join(map(str, cells + more)) + " |")
    if groups:
        lines += [
            "",
            "## Kernels of a layer that fit on an SM together (bench/overlap.py)",
            "",
            "| model | target | kernels | shared |",
            "|---|---|---|--:|",
        ]
        lines += [f"| {g.model} | sm_{g.arch} | {g.kernels} | {g.shared} |" for g in groups]
    problems = [f"* {op}, {r.variant}, {r.target}: {p}" for op, r in rows for p in r.problems]
    problems += [f"* {g.model}, sm_{g.arch}, {g.kernels}: {p}" for g in groups for p in g.problems]
    return "\n".join([*lines, "", "## Problems", "", *(problems or ["None."]), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile every kernel variant without a GPU.")
    parser.add_argument("--ops", default="", help="comma-separated; default: all, which writes bench/results/static.md")
    parser.add_argument("--arch", default=",".join(map(str, ARCHES)))
    parser.add_argument("--smoke", action="store_true", help="only the variants that `make test` compiles")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument("--no-save", action="store_true", help="leave bench/results/static.md as it is")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one for each core)")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("static: TRITON_INTERPRET=1 turns the compiler off; unset it")
    import triton

    start = time.perf_counter()
    rows = []
    arches = tuple(int(text.removeprefix("gfx").removeprefix("sm_")) for text in args.arch.split(","))
    for op, row in reports(items(arches, [n for n in args.ops.split(",") if n], args.smoke), args.jobs):
        rows.append((op, row))
        print(json.dumps({"op": op, **asdict(row)}) if args.json else f"{op:16} {row}", flush=True)
    whole = not (args.ops or args.smoke)
    groups = [group for arch in arches if arch in overlap.ARCHES and whole for group in overlap.groups(arch)]
    for group in groups:
        if args.json:
            print(json.dumps(asdict(group)))
        else:
            state = "; ".join(group.problems) or f"{group.shared} shared"
            print(f"{group.model:16} sm_{group.arch:<3} {group.kernels:32} {state}", flush=True)
    bad = sum(bool(row.problems) for row in (*(row for _, row in rows), *groups))
    if not args.json:
        print(f"{len(rows)} compiled in {time.perf_counter() - start:.0f} s, {bad} with problems")
        file = {ARCHES: "static.md", AMD: "static_amd.md"}.get(arches)
        if whole and not args.no_save and file is not None:
            RESULTS.mkdir(parents=True, exist_ok=True)
            (RESULTS / file).write_text(markdown(rows, groups, f"triton {triton.__version__}"), encoding="utf-8")
            print(RESULTS / file)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
