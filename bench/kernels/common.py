"""Times kernels against the hardware's limit and against the baselines that a user would otherwise call.

On a CUDA device each call is captured in a graph and replayed with a cold L2: between replays a buffer of twice L2's
size, and of 256 MB at least, is read (not written, since the timed kernel would pay for writing back dirty lines).
Calls take turns within a round and CUDA events time them; medians with p20 and p80 are reported.

A replay costs time of its own, which a kernel within a larger graph does not. Replays of graphs of one and of 33 empty
kernels, timed the same way, tell the cost of a replay from that of an empty kernel. The former is subtracted from every
time, so a time is what the call takes within a captured round: its own start is included. The limit of a call is

    max(bytes / bandwidth, flops / matmul rate)

with the bytes and flops that any implementation needs, from the op's `_cost` (partial results of ours do not count),
and both rates measured in the same process. Shares are also given of the limit at the device's specified bandwidth,
where it is known. Results are checked before they are timed. A call that fails or returns a wrong result has a row with
the reason, and the others continue. `--save` appends rows to bench/results/<gpu>/<op>.jsonl.

On a CPU the same benches run on small shapes, only to show that they work: `ON_CPU` says what their times are.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.table import Table

from bench import harness
from bench.conftest import NO_GPU
from bench.harness import Timing
from specker.cpu import library
from specker.kernels.variant import Variant, tl, triton

ROUNDS = 50
EMPTIES = 33  # kernels of the longer graph of empty ones
# Specified bandwidths in bytes a second, by the device's name: NVIDIA's data sheets.
SPECIFIED = {
    "NVIDIA A100-SXM4-80GB": 2.039e12,
    "NVIDIA H100 80GB HBM3": 3.35e12,
    "NVIDIA H100 PCIe": 2.0e12,
    "NVIDIA H20": 4.0e12,
    "NVIDIA H200": 4.8e12,
    "NVIDIA B200": 8.0e12,
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_CPU = (
    "There is no GPU here. These are small shapes on a CPU, which show only that the benches work: no Triton kernel\n"
    "runs, there is no limit to compare with, and rows are not saved. Times are medians with p20 and p80. `compiled`:\n"
    "the op calls compiled C; `reference`: it is plain torch."
)


@dataclass(frozen=True)
class Goal:
    """The goals of a case; None means no goal."""

    share: float | None = None  # of the limit
    over_empty: float | None = None  # seconds above an empty kernel
    seconds: float | None = None  # in total
    over: tuple[tuple[str, float], ...] = ()  # (baseline, how many times as fast)

    def __str__(self) -> str:
        parts = [f">= {self.share:.0%}"] if self.share else []
        parts += [f"<= empty + {self.over_empty * 1e6:g} us"] if self.over_empty else []
        parts += [f"<= {self.seconds * 1e6:g} us"] if self.seconds else []
        return ", ".join(parts + [f">= {times:g}x {way}" for way, times in self.over])

    def met(self, timings: dict[str, Timing], limit: float, empty: float) -> bool | None:
        """None if every possible comparison meets the goal, but a baseline did not run."""
        ours = next(iter(timings.values())).median
        met = (
            (self.share is None or limit / ours >= self.share)
            and (self.over_empty is None or ours - empty <= self.over_empty)
            and (self.seconds is None or ours <= self.seconds)
            and all(timings[way].median / ours >= times for way, times in self.over if way in timings)
        )
        return None if met and any(way not in timings for way, _ in self.over) else met


@dataclass(frozen=True)
class Built:
    """A case with its tensors."""

    ways: dict[str, Callable[[], Any]]  # specker's first
    check: Callable[[], None]  # raises AssertionError if specker's is wrong
    cost: tuple[int, int]  # bytes, flops


@dataclass(frozen=True)
class Case:
    name: str  # "P2 Q1, T 8"
    build: Callable[[], Built]
    goal: Goal = Goal()


@dataclass(frozen=True)
class Machine:
    """This device's measured peak rates."""

    bandwidth: float  # bytes a second, reading
    matmul: float  # flops a second, bfloat16
    empty: float  # seconds that an empty kernel takes within a graph
    replay: float  # seconds of a graph's replay besides its kernels
    specified: float | None = None  # bytes a second, by the data sheet

    def limit(self, cost: tuple[int, int], bandwidth: float | None = None) -> float:
        """Seconds; `bandwidth`: default the measured one."""
        return max(cost[0] / (bandwidth or self.bandwidth), cost[1] / self.matmul)


@triton.jit
def _empty_kernel(
    x_ptr,  # [1]
):
    tl.static_assert(True)


@triton.jit
def _read_kernel(
    x_ptr,  # [programs * STEPS * BLOCK] int32
    out_ptr,  # [programs]
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    o = i * (STEPS * BLOCK) + tl.arange(0, BLOCK)
    b_max = tl.load(x_ptr + o)
    for step in tl.static_range(1, STEPS):
        b_max = tl.maximum(b_max, tl.load(x_ptr + o + step * BLOCK))
    tl.store(out_ptr + i, tl.max(b_max, axis=0))


_READ = Variant("read", _read_kernel, ("*i32", "*i32"), {"STEPS": 4, "BLOCK": 4096}, num_warps=8)
_EMPTY = Variant("empty", _empty_kernel, ("*i32",), {}, num_warps=4)


def _reader(size: int) -> Callable[[], None]:
    """A call that reads `size` bytes, rounded up, from its own buffer."""
    step = _READ.constexprs["STEPS"] * _READ.constexprs["BLOCK"]
    programs = -(-size // (4 * step))
    x = torch.randint(1 << 30, (programs * step,), dtype=torch.int32, device="cuda")
    out = torch.empty(programs, dtype=torch.int32, device="cuda")
    return lambda: _READ((programs,), x, out)


@lru_cache
def _flush() -> Callable[[], None]:
    return _reader(max(2 * torch.cuda.get_device_properties(0).L2_cache_size, 256 << 20))


def graph(call: Callable[[], Any]) -> Callable[[], None]:
    """`call` as a CUDA graph replay, after calls for compilation and allocation."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        call()
    return captured.replay


def measure_cuda(ways: dict[str, Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, Timing]:
    """Graph replays of `ways` in turn with a cold L2, in seconds from CUDA events, replays included."""
    return in_turn({name: graph(call) for name, call in ways.items()}, rounds)


def in_turn(ways: dict[str, Callable[[], Any]], rounds: int, replay: float = 0.0) -> dict[str, Timing]:
    """Calls `ways` in turn with a cold L2, in seconds from CUDA events, less `replay`. The host launches while the GPU
    still flushes L2, so launch time is not counted."""
    flush = _flush()
    times: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    for _ in range(rounds):
        events = {}
        for name in order:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush()
            start.record()
            ways[name]()
            end.record()
            events[name] = start, end
        torch.cuda.synchronize()
        for name, (start, end) in events.items():
            times[name].append(start.elapsed_time(end) * 1e-3 - replay)
        order = order[1:] + order[:1]
    return {name: Timing(tuple(seconds), None) for name, seconds in times.items()}


@lru_cache
def this_machine() -> Machine:
    size, n = 1 << 30, 8192
    x = torch.zeros(1, dtype=torch.int32, device="cuda")
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    ways = {
        "read": _reader(size),
        "matmul": lambda: a @ b,
        "one": lambda: _EMPTY((1,), x),
        "many": lambda: [_EMPTY((1,), x) for _ in range(EMPTIES)],
    }
    medians = {name: timing.median for name, timing in measure_cuda(ways, 20).items()}
    return rates_of(medians, size, 2 * n**3, SPECIFIED.get(torch.cuda.get_device_name()))


def rates_of(medians: dict[str, float], size: int, flops: int, specified: float | None) -> Machine:
    """The rates from the seconds of replays: `read` of `size` bytes, `matmul` of `flops`, `one` and `many` empty
    kernels. The rates exclude launches, since the limit is the hardware's."""
    one, many = medians["one"], medians["many"]
    empty = max(0.0, (many - one) / (EMPTIES - 1))
    return Machine(size / (medians["read"] - one), flops / (medians["matmul"] - one), empty, one - empty, specified)


def rows_of(op: str, case: Case) -> list[dict[str, Any]]:
    """Check, time and compare one case; a row for each of its `ways`."""
    built = case.build()
    built.check()
    on_gpu = DEVICE == "cuda"
    about: dict[str, Any] = {"bench": "kernels", "op": op, "case": case.name, "device": DEVICE}
    ways, missing = _that_run(built.ways)
    timings = in_turn(ways, ROUNDS, this_machine().replay) if on_gpu else harness.measure(ways, ROUNDS)
    ours = next(iter(timings.values())).median
    rows = []
    for i, (name, timing) in enumerate(timings.items()):
        row = {**about, "way": name}
        row |= {**timing.row(), "bytes": built.cost[0], "flops": built.cost[1], "ours_over_this": timing.median / ours}
        if on_gpu:
            machine = this_machine()
            limit = machine.limit(built.cost)
            row |= {"limit": limit, "share": limit / timing.median, "empty": machine.empty, "replay": machine.replay}
            row |= {"bandwidth": machine.bandwidth, "matmul": machine.matmul}
            if machine.specified is not None:
                of_specified = machine.limit(built.cost, machine.specified) / timing.median
                row |= {"specified": machine.specified, "share_specified": of_specified}
            if i == 0 and str(case.goal):
                row |= {"goal": str(case.goal), "met": case.goal.met(timings, limit, machine.empty)}
        elif i == 0:
            row["runs"] = "compiled" if calls_compiled(ways[name]) else "reference"
        rows.append(row)
    return rows + [{**about, "way": name, "reason": reason} for name, reason in missing.items()]


def calls_compiled(call: Callable[[], Any]) -> bool:
    """Whether a call on a CPU uses the compiled library."""
    used = False

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal used
        used |= event == "call" and frame.f_code is library.native.__code__

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return used


def _that_run(ways: dict[str, Callable[[], Any]]) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """The `ways` that run, on a GPU as graphs, and the reasons of the others: a baseline may be missing, not compile,
    or not be capturable. Specker's must run."""
    found, missing = {}, {}
    for n, (name, call) in enumerate(ways.items()):
        try:
            call()
            found[name] = graph(call) if DEVICE == "cuda" else call
        except Exception as error:  # compilers raise many kinds
            if n == 0:
                raise
            missing[name] = _first_line(error)
    return found, missing


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


def show(op: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"{op} on {harness.machine(DEVICE)}")
    columns = (
        "case",
        "way",
        "us",
        "p20",
        "p80",
        "of the limit",
        "specified",
        "over empty, us",
        "ours is",
        "goal",
        "met",
    )
    for column in columns:
        table.add_column(column, justify="left" if column in ("case", "way", "goal") else "right", no_wrap=True)
    for row in rows:
        if "reason" in row:
            table.add_row(row["case"], row["way"], *[""] * 7, row["reason"], "")
            continue
        table.add_row(
            row["case"],
            f"{row['way']}, {row['runs']}" if "runs" in row else row["way"],
            *(f"{row[key] * 1e6:.1f}" for key in ("median", "p20", "p80")),
            f"{row['share']:.0%}" if "share" in row else "",
            f"{row['share_specified']:.0%}" if "share_specified" in row else "",
            f"{(row['median'] - row['empty']) * 1e6:.1f}" if "empty" in row else "",
            f"{row['ours_over_this']:.2f}x",
            row.get("goal", ""),
            {True: "yes", False: "no", None: ""}[row.get("met")],
        )
    Console(width=160).print(table)


def arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line, with the flag `--save`; says what the times are where there is no GPU."""
    parser.add_argument("--save", action="store_true", help=harness.SAVE)
    args = parser.parse_args()
    if DEVICE == "cpu":
        if args.save:
            parser.error("--save needs a GPU: times of small shapes on a CPU are no results")
        print(ON_CPU, flush=True)
    elif not args.save:
        print(harness.NOT_SAVED, file=sys.stderr, flush=True)
    return args


def main(op: str, cases: Iterable[Case]) -> bool:
    """Runs `python bench/kernels/bench_<op>.py [-k PART OF A NAME] [--save]`; returns whether rows are saved."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-k", default="", help="only cases whose name contains this")
    args = arguments(parser)
    rows: list[dict[str, Any]] = []
    failed = []
    try:
        for case in cases:
            if args.k not in case.name:
                continue
            try:
                new = rows_of(op, case)
            except Exception as error:  # a wrong result or a failed compilation must not lose other rows
                wrong = isinstance(error, AssertionError)
                reason = f"wrong, so not timed: {error}" if wrong else _first_line(error)
                about = {"bench": "kernels", "op": op, "case": case.name, "way": "", "device": DEVICE}
                new = [{**about, "reason": reason}]
                failed.append(f"{op}, {case.name}: {reason}")
            rows += new
            if args.save:  # after each case, so that an interrupt keeps the rows
                harness.save(op, new, DEVICE)
    finally:
        show(op, rows)
    if any("share" in row for row in rows):
        machine = this_machine()
        print(
            f"read {machine.bandwidth / 1e12:.2f} TB/s, matmul {machine.matmul / 1e12:.0f} Tflop/s, "
            f"empty kernel {machine.empty * 1e6:.1f} us, replay {machine.replay * 1e6:.1f} us"
        )
    if failed:
        sys.exit("\n".join(failed))
    return args.save


def benchmarks(cases: Iterable[Case]) -> Any:
    """A pytest-benchmark entry point that checks and times specker's call of each case. `main` times the baselines,
    whose names are known only after the tensors are built."""

    @pytest.mark.parametrize("case", list(cases), ids=lambda case: case.name)
    def test(benchmark: Any, case: Case, pytestconfig: pytest.Config) -> None:
        if DEVICE == "cpu" and not pytestconfig.getoption("small"):
            pytest.skip(NO_GPU)
        built = case.build()
        built.check()
        ours = next(iter(built.ways.values()))

        def call() -> None:
            ours()
            if DEVICE == "cuda":
                torch.cuda.synchronize()

        benchmark(call)

    return test
