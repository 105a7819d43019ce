"""Runs the compiled CPU kernels under gcc's address and undefined-behaviour sanitizers, one C file after another.

python tests/support/sanitized.py [C_FILE..]     `make sanitize`: the runs of these files, by default of all, at every
                                                 level of instructions that this processor has; a finding ends it with
                                                 exit code 1
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "specker" / "cpu" / "csrc"
LAYERS = "tests/cpu/test_layers.py"
ODD = "odd calls"
# What runs each C file: tests, and odd calls of ops. Files that no line names are part of every run: `team.c`, the
# functions of the calls, and the products.
RUNS: dict[str, tuple[str, ...]] = {
    "adjust.c": (f"{ODD} adjust_rows", "tests/kernels/test_adjust_rows.py"),
    "attention.c": (LAYERS,),
    "calls.c": (f"{ODD} row_linear", "tests/cpu/test_products.py"),
    "chain.c": ("tests/cpu/test_chain.py", "tests/cpu/test_heads.py"),
    "clusters.c": (f"{ODD} cluster_topk", "tests/kernels/test_cluster_topk.py"),
    "communicator.c": ("tests/cpu/test_communicator.py",),
    "experts.c": ("tests/cpu/test_mixtures.py",),
    "few.c": ("tests/cpu/test_products.py",),
    "floats.c": ("tests/cpu/test_products.py",),
    "gates.c": ("tests/cpu/test_gates.py",),
    "integers.c": ("tests/cpu/test_products.py",),
    "kept.c": ("tests/cpu/test_kept.py",),
    "layers.c": (LAYERS,),
    "many.c": ("tests/cpu/test_products.py",),
    "noise.c": (f"{ODD} vocab_topk", "tests/kernels/test_noise.py"),
    "pack.c": ("tests/cpu/test_products.py",),
    "places.c": ("tests/cpu/test_places.py",),
    "plain.c": ("tests/cpu/test_products.py",),
    "products.c": ("tests/cpu/test_products.py",),
    "recurrent.c": ("tests/cpu/test_recurrent.py",),
    "rows.c": ("tests/cpu/test_products.py",),
    "sample.c": (f"{ODD} sample_rows", "tests/cpu/test_sample.py"),
    "squares.c": ("tests/cpu/test_products.py",),
    "suffix.c": ("tests/cpu/test_suffixes.py",),
    "team.c": ("tests/cpu/test_team.py",),
}
CALLS = 1500  # odd calls of an op
FLAGS = "-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:exitcode=99",  # Python and torch never free some memory
    "UBSAN_OPTIONS": "print_stacktrace=1:exitcode=99",
    "PYTHONMALLOC": "malloc",  # of arrays in Python's own pools a read beyond the end is not seen
}


def runtime() -> str | None:
    """What a program that is not built for the address sanitizer loads first: its library, and that of C++, whose
    exceptions it watches. None without gcc or its library."""
    try:
        found = [
            subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
            for name in ("libasan.so", "libstdc++.so.6")
        ]
    except (OSError, subprocess.CalledProcessError):
        return None
    paths = [path.strip() for path in found]
    return " ".join(paths) if all(map(os.path.isabs, paths)) else None


def levels() -> list[str]:
    """The levels of instructions that this processor has, the least one last."""
    from specker.cpu import build

    return [name for name, (needed, _) in build.LEVELS.items() if needed <= build._features()]


def run(what: str, level: str, sources: Path = SOURCES) -> subprocess.CompletedProcess[str]:
    """One run by the library of this level, compiled from `sources`."""
    loaded = runtime()
    assert loaded is not None
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "support")))
    env: Mapping[str, str] = {
        **os.environ,
        **OPTIONS,
        "LD_PRELOAD": loaded,
        "CC": "gcc",
        "SPECKER_CPU": level,
        "SPECKER_CACHE": str(ROOT / "build" / "sanitized"),
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, __file__, "--inside", str(sources), what]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def inside(sources: str, what: str) -> int:
    """The run itself, in a process with the sanitizer's library. Returns its exit code."""
    from specker import cpu
    from specker.cpu import build

    build.SOURCES = Path(sources)
    build.FLAGS = (*(flag for flag in build.FLAGS if flag != "-O3"), *FLAGS)
    if not cpu.available():
        print(cpu.problem())
        return 2
    if what.startswith(ODD):
        import torch
        from odd_calls import every

        torch.set_num_threads(1)
        ends, faults = every(CALLS, 0, *what.removeprefix(ODD).split())
        print(dict(ends), *faults)
        return bool(faults)
    import pytest

    # A sanitizer writes its report to the file of standard error, and then ends the process: pytest must not hold it.
    return int(
        pytest.main(["-q", "--capture=sys", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "not compil", what])
    )


def main(names: list[str]) -> int:
    if unknown := [name for name in names if name not in RUNS]:
        print(f"no C file is named {', '.join(unknown)}: there are {', '.join(RUNS)}")
        return 2
    if runtime() is None:
        print("the sanitizers need gcc and its libasan.so; on Debian and Ubuntu: apt-get install gcc")
        return 2
    failed = 0
    for level in levels():
        done: dict[str, int] = {}
        for name in names or RUNS:
            for what in RUNS[name]:
                if what in done:
                    continue
                found = run(what, level)
                done[what] = found.returncode
                print(f"{level}: {name}: {what}: {'no finding' if not found.returncode else 'FAILED'}", flush=True)
                if found.returncode:
                    failed += 1
                    print(found.stdout[-6000:], found.stderr[-12000:], sep="\n")
    return int(failed > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        sys.exit(inside(*sys.argv[2:4]))
    sys.exit(main(sys.argv[1:]))
