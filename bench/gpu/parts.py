"""The parts of `make gpu`: their commands, and the weight of each in the time.

smoke      every op against its reference; decoding with PDL and CUDA graphs off and on gives equal tokens
decode     bench/decode.py: how close decoding comes to the memory limit; its cases with goals come first
kernels    bench/kernels: each op against its limit and its alternatives
tests      every test that needs a GPU, in several processes; then, alone, those that measure time
delay      one kernel after another sleeps before it stores; decoding with PDL must give the bits without PDL
ab         the decode rate with PDL and CUDA graphs off and on, in turn
gsan       the ops under Triton's sanitizer for races in global memory
sanitizer  the ops under compute-sanitizer: memcheck, racecheck, synccheck, initcheck
e2e        bench/e2e.py: every strategy with the bundled models
papers     bench/papers: the papers' settings, with the bundled models in a real model's shape
plot       figures of the rows
"""

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.gpu.running import GRACE, ROOT, Command, Step
from bench.gpu.smoke import Form

DEFAULT = ("smoke", "decode", "kernels", "tests")
ON_GPU = ("--device", "cuda", "--dtype", "bfloat16")
FIRST = ("row_linear", "tree_attention", "vocab_topk", "residual_merge", "kv_project")  # these get three times as long
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
NO_TESTS = 5  # pytest's exit code if it selects no test


@dataclass(frozen=True)
class Setting:
    """What the commands of a part depend on."""

    python: str
    notes: Path  # where processes note what Triton compiles
    folder: Path  # of the results
    limit: float = 600.0  # seconds of the part
    memory: int = 0  # bytes of the GPU
    pdl: bool = True
    graphs: bool = True

    def command(self, *argv: str, **env: str) -> Command:
        """A script, or -m and a module, whose compilations are noted."""
        return Command((self.python, "-m", "bench.gpu.compiling", str(self.notes), *argv), self.environment(**env))

    def environment(self, **env: str) -> dict[str, str]:
        return {"PYTHONPATH": os.pathsep.join((".", "tests/support")), "SPECKER_PDL": str(int(self.pdl)), **env}


@dataclass(frozen=True)
class Part:
    weight: float
    steps: Callable[[Setting], list[Step]]
    needs: tuple[str, ...] = field(default=())  # a program, by name or path: the first that exists


def ops(s: Setting) -> Command:
    return s.command("bench/gpu/ops.py", SPECKER_PDL="0")


def form(s: Setting, f: Form, file: Path) -> Command:
    """Decode a chain, which must have the tokens of plain decoding bit for bit, and write them to `file`."""
    how = ("--strategy", "draft", "--draft-tokens", "4", "--max-new-tokens", "64", "--prompt", "def fibonacci(n):")
    argv = ("-m", "specker.run", "--check", *how, *ON_GPU, "--json", str(file))
    return s.command(*argv, SPECKER_PDL=str(int(f.pdl)), SPECKER_GRAPHS="on" if f.graphs else "off")


def decode(s: Setting) -> list[Step]:
    seconds = max(30.0, 0.85 * s.limit - 15)  # a case that has begun ends
    return [_one(s.command("bench/decode.py", "--seconds", f"{seconds:.0f}", "--save", "--capture", str(s.graphs)))]


def kernels(s: Setting) -> list[Step]:
    names = {path.stem.removeprefix("bench_"): path for path in sorted(ROOT.glob("bench/kernels/bench_*.py"))}
    ordered = sorted(names, key=lambda name: name not in FIRST)
    return [Step((s.command(f"bench/kernels/bench_{n}.py", "--save"),), 3.0 if n in FIRST else 1.0) for n in ordered]


def tests(s: Setting) -> list[Step]:
    """In as many processes as there are cores, up to 8 and up to one for each 8 GiB of the GPU, since most of the time
    goes into compiling kernels. What measures time runs after them, alone."""
    count = max(1, min(8, os.cpu_count() or 1, s.memory // (8 << 30)))
    files = gpu_tests()
    each = [_pytest(s, "gpu and not alone", "--part", f"{i}/{count}", *files) for i in range(count)]
    return [Step(tuple(each), 5.0), _one(_pytest(s, "gpu and alone", *files))]


def gpu_tests() -> list[str]:
    """The files that hold tests marked `gpu`. Others may import what the machine lacks, which would end a run."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(f.relative_to(ROOT)) for f in files if "mark.gpu" in f.read_text(encoding="utf-8")]


def delay(s: Setting) -> list[Step]:
    return [_one(_pytest(s, "gpu", "tests/kernels/test_delay.py"))]


def ab(s: Setting) -> list[Step]:
    return [_one(s.command("bench/gpu/ab.py", "--seconds", f"{max(20.0, 0.7 * s.limit):.0f}", "--save"))]


def gsan(s: Setting) -> list[Step]:
    return [_one(Command((s.python, "-m", "triton.tools.gsan", "bench/gpu/ops.py"), s.environment(SPECKER_PDL="0")))]


def sanitizer(s: Setting) -> list[Step]:
    """PyTorch's allocator would hide accesses beyond a tensor."""
    program, env = found(SANITIZERS), s.environment(PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    how = ("--error-exitcode", "9", s.python, "bench/gpu/ops.py")
    return [_one(Command((program, "--tool", tool, *how), env)) for tool in TOOLS]


def e2e(s: Setting) -> list[Step]:
    return [_one(s.command("bench/e2e.py", *ON_GPU, "--save"))]


def papers(s: Setting) -> list[Step]:
    how = ("--device", "cuda", "--shape", "8b", "--minutes", f"{0.5 * s.limit / 60:.2f}")  # of timed rounds
    return [_one(s.command("-m", "bench.papers", *how, "--save"))]


def plot(s: Setting) -> list[Step]:
    return [_one(Command((s.python, "bench/plot.py", str(s.folder)), s.environment()))]


def _one(command: Command) -> Step:
    return Step((command,))


def _pytest(s: Setting, marks: str, *more: str) -> Command:
    command = s.command("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, *more)
    return Command(command.argv, command.env, (0, NO_TESTS))


def found(programs: tuple[str, ...]) -> str:
    """The path of the first of these programs that exists, else ""."""
    return next((path for program in programs if (path := shutil.which(program)) is not None), "")


SANITIZERS = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")
PARTS = {  # after smoke
    "decode": Part(6, decode),
    "kernels": Part(5, kernels),
    "delay": Part(2, delay),
    "tests": Part(5, tests),
    "ab": Part(2, ab),
    "gsan": Part(2, gsan),
    "sanitizer": Part(4, sanitizer, SANITIZERS),
    "e2e": Part(5, e2e),
    "papers": Part(10, papers),
    "plot": Part(0.5, plot),
}
SMOKE_WEIGHT = 4.0


@dataclass(frozen=True)
class Plan:
    """The commands of a run."""

    facts: Command  # of the interpreter that runs the parts
    ops: Callable[[Setting], Command]
    form: Callable[[Setting, Form, Path], Command]
    parts: Mapping[str, Part]
    grace: float = GRACE


PLAN = Plan(Command((sys.executable, "-m", "bench.gpu.facts"), {"PYTHONPATH": "."}), ops, form, PARTS)
