"""The parts of `make gpu`: their commands, and the minutes that each needs.

`make gpu SHORT=1`, nine minutes:

warm       processes at once that compile what the next parts launch, on models of few layers, check every op, and make
           the inflated family
bits       bench/gpu/bits.py: products repeated beside another kernel, and rows alone and among others
family     bench/e2e.py: tokens and speed of every strategy with the bundled models in a real model's shape
ar         bench/decode.py: plain decoding of five models in 16 and fewer bits, and of batches
attention  tree_attention over rows, columns and sizes of heads
round      bench/decode.py: a round's launches, its share outside of the models, the first token, prefill
groups     EasySpec's groups of layers against layers in turn
ab         the decode rate with PDL and CUDA graphs off and on, and with weights prefetched, in turn

`make gpu SHORT=2`, three minutes more:

untried    tests that no GPU has run
delay      one kernel after another sleeps before it stores; decoding with PDL must give the bits without PDL

`make gpu`, and what it leaves out:

smoke      every op against its reference; decoding with PDL and CUDA graphs off and on gives equal tokens
decode     bench/decode.py: how close decoding comes to the memory limit; its cases with goals come first
kernels    bench/kernels: each op against its limit and its alternatives
tests      every test that needs a GPU, in several processes; then, alone, those that measure time
gsan       the ops under Triton's sanitizer for races in global memory
sanitizer  the ops under compute-sanitizer: memcheck, racecheck, synccheck, initcheck
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

MINUTES = 20.0
DEFAULT = ("smoke", "decode", "kernels", "tests")
SHORT = {  # minutes and parts
    "1": (9.0, ("warm", "bits", "family", "ar", "attention", "round", "groups", "ab")),
    "2": (3.0, ("untried", "delay")),
}
ON_GPU = ("--device", "cuda", "--dtype", "bfloat16")
FIRST = ("row_linear", "tree_attention", "vocab_topk", "residual_merge", "kv_project")  # these get three times as long
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
NO_TESTS = 5  # pytest's exit code if it selects no test
WARM_LAYERS = 6  # the fewest with every kind of layer
THIN = "8b/12"  # the family as 8b, with no layer between the toy's
WARM_CASES = (
    "ar 8b 512,ar 8b batch",
    "ar 8b fp8,ar 8b int8,ar 8b int4,prefill 8b 512",
    "ar 1b,first 8b+1b,round 8b+1b",
    "ar 9b",
    "ar 30b-a3b",
    "ar gpt-oss",
)
EVERY = "ar,draft,draft tree 4x4,vocabtrim,easyspec,diffuspec,del,lookup,draft+lookup,vocabtrim+lookup"
SOME = "ar,draft,lookup,draft+lookup,vocabtrim+lookup"  # with several texts at once
FEW = "ar,draft,vocabtrim+lookup"
OWN_HEAD = ("ar,lookup,mtp,mtp+lookup", "--target", "hybrid-target")  # of a target with recurrent layers
UNTRIED = "hybrid or sinks or delta or convolutions or gemma4 or assistant or mxfp4 or small_models or penalties"


@dataclass(frozen=True)
class Setting:
    """What the commands of a part depend on."""

    python: str
    notes: Path  # where processes note what Triton compiles
    folder: Path  # of the results
    limit: float = 600.0  # seconds of the part
    memory: int = 0  # bytes of the GPU
    cache: Path | None = None  # Triton's, if it was carried here (pack.py)
    pdl: bool = True
    graphs: bool = True

    def command(self, *argv: str, **env: str) -> Command:
        """A script, or -m and a module, whose compilations are noted."""
        return Command((self.python, "-m", "bench.gpu.compiling", str(self.notes), *argv), self.environment(**env))

    def environment(self, **env: str) -> dict[str, str]:
        carried = {} if self.cache is None else {"TRITON_CACHE_DIR": str(self.cache)}
        path = os.pathsep.join((".", "tests/support"))
        return {"PYTHONPATH": path, "SPECKER_PDL": str(int(self.pdl)), **carried, **env}


@dataclass(frozen=True)
class Part:
    minutes: float  # that it needs; it gets the same share of what is left
    steps: Callable[[Setting], list[Step]]
    needs: tuple[str, ...] = field(default=())  # a program, by name or path: the first that exists


def ops(s: Setting) -> Command:
    return s.command("bench/gpu/ops.py", SPECKER_PDL="0")


def form(s: Setting, f: Form, file: Path) -> Command:
    """Decode a chain, which must have the tokens of plain decoding bit for bit, and write them to `file`."""
    how = ("--strategy", "draft", "--draft-tokens", "4", "--max-new-tokens", "64", "--prompt", "def fibonacci(n):")
    argv = ("-m", "specker.run", "--check", *how, *ON_GPU, "--json", str(file))
    return s.command(*argv, SPECKER_PDL=str(int(f.pdl)), SPECKER_GRAPHS="on" if f.graphs else "off")


def warm(s: Setting) -> list[Step]:
    ops = [s.command("bench/gpu/ops.py", f"{i}/3") for i in range(3)]
    few = "--layers", str(WARM_LAYERS), "--rounds", "2", "--capture", str(s.graphs)
    models = [s.command("bench/decode.py", *few, "--cases", cases) for cases in WARM_CASES]
    made = s.command("-m", "bench.papers.models", THIN, "1b", "8b", "--device", "cuda")
    attends = s.command("bench/kernels/bench_tree_attention.py", "-k", "8192, D")
    multiplies = s.command("bench/gpu/bits.py", "--repeats", "1")
    first = Step((*ops, *models, attends, multiplies, made), 3.0)
    ways = EVERY.split(",")[1:]
    each = [_strategies(s, shape, 1, ",".join(ways[n::3])) for shape in (THIN, "1b") for n in range(3)]
    others = [_strategies(s, THIN, 8, SOME), _strategies(s, THIN, 32, FEW)]
    return [first, Step((*each, *others, _strategies(s, THIN, 1, *OWN_HEAD)), 2.0)]


def bits(s: Setting) -> list[Step]:
    return [_one(s.command("bench/gpu/bits.py", "--save"))]


def family(s: Setting) -> list[Step]:
    runs = (
        (66.0, "8b", 1, EVERY),
        (46.0, "8b", 8, SOME),
        (25.0, "8b", 1, *OWN_HEAD),
        (45.0, "8b", 32, FEW),
        (35.0, "1b", 1, EVERY),
    )
    return [Step((_strategies(s, *run, "--save"),), weight) for weight, *run in runs]


def _strategies(s: Setting, shape: str, size: int, ways: str, *more: str) -> Command:
    """`size` texts at once, each of them once to warm up and once for the time."""
    how = ("--shape", shape, "--batch_size", str(size), "--prompts", str(max(4, size)), "--ways", ways)
    few = ("--max_new_tokens", "64", "--rounds", "1", "--transformers", "false")
    return s.command("bench/e2e.py", *ON_GPU, *how, *few, *more)


def ar(s: Setting) -> list[Step]:
    return _decode(s, "--cases", "ar 8b,ar 9b,ar 1b,ar 30b-a3b,ar gpt-oss")


def attention(s: Setting) -> list[Step]:
    return [_one(s.command("bench/kernels/bench_tree_attention.py", "-k", ", D", "--save"))]


def rounds(s: Setting) -> list[Step]:
    return _decode(s, "--cases", "launches 8b,round 8b+1b,first 8b+1b,prefill 8b")


def groups(s: Setting) -> list[Step]:
    return [_one(s.command("bench/kernels/bench_layer_group.py", "--save"))]


def decode(s: Setting) -> list[Step]:
    return _decode(s)


def _decode(s: Setting, *more: str) -> list[Step]:
    seconds = max(10.0, 0.9 * s.limit - 12)  # a case that has begun ends
    how = ("--seconds", f"{seconds:.0f}", "--save", "--capture", str(s.graphs))
    return [_one(s.command("bench/decode.py", *how, *more))]


def kernels(s: Setting) -> list[Step]:
    names = {path.stem.removeprefix("bench_"): path for path in sorted(ROOT.glob("bench/kernels/bench_*.py"))}
    ordered = sorted(names, key=lambda name: name not in FIRST)
    return [Step((s.command(f"bench/kernels/bench_{n}.py", "--save"),), 3.0 if n in FIRST else 1.0) for n in ordered]


def tests(s: Setting) -> list[Step]:
    """What measures time runs after the others, alone."""
    return [Step(_shared(s), 5.0), _one(_pytest(s, "gpu and alone", *gpu_tests()))]


def untried(s: Setting) -> list[Step]:
    return [Step(_shared(s, "-k", UNTRIED))]


def _shared(s: Setting, *more: str) -> tuple[Command, ...]:
    """The tests that measure no time, in as many processes as there are cores, up to 8 and up to one for each 8 GiB of
    the GPU, since most of the time goes into compiling kernels."""
    count = max(1, min(8, os.cpu_count() or 1, s.memory // (8 << 30)))
    parts = [("--part", f"{i}/{count}") for i in range(count)]
    return tuple(_pytest(s, "gpu and not alone", *more, *part, *gpu_tests()) for part in parts)


def gpu_tests() -> list[str]:
    """The files that hold tests marked `gpu`. Others may import what the machine lacks, which would end a run."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(f.relative_to(ROOT)) for f in files if "mark.gpu" in f.read_text(encoding="utf-8")]


def delay(s: Setting) -> list[Step]:
    return [_one(_pytest(s, "gpu", "tests/kernels/test_delay.py"))]


def ab(s: Setting) -> list[Step]:
    return [_one(s.command("bench/gpu/ab.py", "--seconds", f"{0.6 * s.limit:.0f}", "--save"))]


def gsan(s: Setting) -> list[Step]:
    return [_one(Command((s.python, "-m", "triton.tools.gsan", "bench/gpu/ops.py"), s.environment(SPECKER_PDL="0")))]


def sanitizer(s: Setting) -> list[Step]:
    """PyTorch's allocator would hide accesses beyond a tensor."""
    program, env = found(SANITIZERS), s.environment(PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    how = ("--error-exitcode", "9", s.python, "bench/gpu/ops.py")
    return [_one(Command((program, "--tool", tool, *how), env)) for tool in TOOLS]


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
    "warm": Part(1.4, warm),
    "bits": Part(0.4, bits),
    "family": Part(3.5, family),
    "ar": Part(1.3, ar),
    "attention": Part(0.7, attention),
    "round": Part(0.9, rounds),
    "groups": Part(0.4, groups),
    "ab": Part(0.4, ab),
    "decode": Part(6, decode),
    "kernels": Part(5, kernels),
    "untried": Part(2, untried),
    "delay": Part(1, delay),
    "tests": Part(5, tests),
    "gsan": Part(2, gsan),
    "sanitizer": Part(4, sanitizer, SANITIZERS),
    "papers": Part(10, papers),
    "plot": Part(0.5, plot),
}
SMOKE_MINUTES = 4.0


@dataclass(frozen=True)
class Plan:
    """The commands of a run."""

    facts: Command  # of the interpreter that runs the parts
    ops: Callable[[Setting], Command]
    form: Callable[[Setting, Form, Path], Command]
    parts: Mapping[str, Part]
    grace: float = GRACE


PLAN = Plan(Command((sys.executable, "-m", "bench.gpu.facts"), {"PYTHONPATH": "."}), ops, form, PARTS)
