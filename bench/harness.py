"""Fair timing of several configurations, and storage of the rows.

The configurations take turns within each round, so that a slow phase of the machine affects all of them; the order
rotates each round. Reported are the median with p20 and p80, and the ratio of medians to the first configuration.
`--save` appends rows to bench/results/<machine>/<name>.jsonl, each with its machine, versions, commit and command.
"""

import json
import logging
import math
import os
import platform
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.table import Table

from specker.cpu import build
from specker.paths import write_file

# A round that is not captured explains a slow row.
logging.getLogger("specker.runtime.round.graphs").addHandler(logging.lastResort or logging.NullHandler())

os.environ["SPECKER_VOCAB_LEARN"] = "off"  # else a run would change the drafts of the next one

RESULTS = Path(__file__).parent / "results"
SAVE = "append the rows to bench/results/<machine>"
NOT_SAVED = "bench: no rows are written; --save appends them to bench/results"

T = TypeVar("T")


@dataclass(frozen=True)
class Timing:
    """Seconds of each timed round, in order, and the result of the last call."""

    seconds: tuple[float, ...]
    last: Any
    each: tuple[float, ...] = ()  # of `measure_each`: seconds of every call, round after round

    def quantile(self, q: float) -> float:
        return quantile(self.seconds, q)

    @property
    def median(self) -> float:
        return self.quantile(0.5)

    def row(self) -> dict[str, float]:
        return {
            "median": self.median,
            "p20": self.quantile(0.2),
            "p80": self.quantile(0.8),
            "rounds": len(self.seconds),
        }

    def times_as_fast(self, other: "Timing") -> dict[str, float]:
        """Speed relative to `other`: ratios within the same round, where a slow phase affects both, and how many are
        above one."""
        each = [theirs / own for own, theirs in zip(self.seconds, other.seconds, strict=True)]
        return quantiles(each) | {"rounds_above_1": sum(ratio > 1 for ratio in each)}

    def spread(self, other: "Timing") -> dict[str, float]:
        """Speed relative to `other` at single items: ratios of calls with the same item in the same round."""
        return quantiles(theirs / own for own, theirs in zip(self.each, other.each, strict=True))


def measure(ways: dict[str, Callable[[], Any]], rounds: int = 5, warmup: int = 1) -> dict[str, Timing]:
    """Call each way `warmup` times untimed, then once in each of `rounds` rounds, with CUDA synchronised around it. The
    order is drawn anew each time, since a way finds in the caches what the one before it left."""
    if rounds < 1 or not ways:
        raise ValueError(f"nothing to measure: {len(ways)} ways, {rounds} rounds")
    for _ in range(warmup):
        for call in ways.values():
            call()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    last: dict[str, Any] = {}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(ways), len(ways)):
            wait()
            start = time.perf_counter()
            last[name] = ways[name]()
            wait()
            seconds[name].append(time.perf_counter() - start)
    return {name: Timing(tuple(seconds[name]), last[name]) for name in ways}


def measure_each(
    ways: dict[str, Callable[[Any], Any]],
    items: Sequence[Any],
    rounds: int = 5,
    warmup: int = 1,
    seconds: float = math.inf,
) -> dict[str, Timing]:
    """`measure` for ways that take one item. They take turns at every item, so compared calls are seconds apart. A
    round's seconds are the sum over the items; `last` is the list of their results. No further round begins that would
    probably end after `seconds`."""
    if rounds < 1 or not ways or not items:
        raise ValueError(f"nothing to measure: {len(ways)} ways, {len(items)} items, {rounds} rounds")
    each: dict[str, list[float]] = {name: [] for name in ways}
    last: dict[str, list[Any]] = {}
    order = random.Random(0)
    for n in range(-warmup, rounds):
        if n == 0:
            began = time.perf_counter()
        elif n > 0 and (time.perf_counter() - began) * (n + 1) / n > seconds:
            break
        last = {name: [] for name in ways}
        for item in items:
            for name in order.sample(list(ways), len(ways)):
                wait()
                start = time.perf_counter()
                last[name].append(ways[name](item))
                wait()
                if n >= 0:
                    each[name].append(time.perf_counter() - start)
    size = len(items)
    return {
        name: Timing(tuple(sum(own[i : i + size]) for i in range(0, len(own), size)), last[name], tuple(own))
        for name, own in each.items()
    }


def ratios(timings: dict[str, Timing]) -> dict[str, float]:
    """How many times as fast as the first each is: ratio of medians."""
    base = next(iter(timings.values())).median
    return {name: base / timing.median for name, timing in timings.items()}


def quantiles(values: Iterable[float]) -> dict[str, float]:
    values = list(values)
    return {name: quantile(values, q) for name, q in (("median", 0.5), ("p20", 0.2), ("p80", 0.8))}


def quantile(values: Iterable[float], q: float) -> float:
    values = sorted(values)
    place = q * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - low) * (values[high] - values[low])


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def machine(device: str = "cpu") -> str:
    """The GPU's name for a CUDA device, otherwise the processor's name, the level of its instructions in cpu/build.py
    (a name such as "AMD EPYC" serves several generations) and the number of usable cores."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists() and (match := re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)):
        model = match[1].strip()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model} ({build.level()}), {cores} cores"


def folder(device: str = "cpu") -> Path:
    """bench/results/<machine>, with characters that every file system accepts."""
    return RESULTS / re.sub(r"[^a-z0-9.]+", "-", machine(device).lower()).strip("-")


def where_from(device: str = "cpu") -> dict[str, Any]:
    """The origin of a number; every row has these fields."""
    return {
        "machine": machine(device),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            **{n: _version(n) for n in ("torch", "triton", "transformers")},
        },
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": " ".join(["python", script(sys.argv[0]), *sys.argv[1:]]).replace(str(Path.home()), "~"),
    }


def script(name: str) -> str:
    """A program as its user names it from the repository's folder: Python gives the whole path of a module's file."""
    path, root = Path(name), Path(__file__).resolve().parents[1]
    if not path.is_absolute() or not path.is_relative_to(root):
        return name
    inside = path.relative_to(root)
    return f"-m {'.'.join(inside.parent.parts)}" if inside.name == "__main__.py" else str(inside)


def commit() -> str:
    """The commit's hash, with a + if tracked files differ from it; "unknown" outside a checkout."""
    root = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=root, capture_output=True, text=True)
        # Results do not affect measurements, so rows of earlier benches do not count as changes.
        command = ["git", "diff", "--quiet", "HEAD", "--", ":/", ":(top,exclude)bench/results"]
        dirty = subprocess.run(command, cwd=root, capture_output=True)
    except OSError:
        return "unknown"
    return head.stdout.strip() + ("+" if dirty.returncode else "") if head.returncode == 0 else "unknown"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def save_flag(help: str = SAVE) -> Any:
    """The field `save` of a bench's arguments: nothing is written without `--save`, so that trying a bench leaves the
    published numbers as they are."""
    return field(default=False, metadata={"help": help})


def arguments(kind: type[T]) -> T:
    """The command line as a `kind`, whose field `save` is a `save_flag`."""
    from transformers import HfArgumentParser  # slow

    (args,) = HfArgumentParser(kind).parse_args_into_dataclasses()
    if not args.save:
        print(NOT_SAVED, file=sys.stderr, flush=True)
    return args


def table_of(temperature: float, columns: Iterable[str]) -> Table:
    """An empty table for one temperature; all columns but "way" are numbers."""
    table = Table(title=f"temperature {temperature:g}")
    for column in columns:
        table.add_column(column, justify="left" if column == "way" else "right", no_wrap=True)
    return table


def report(
    name: str,
    args: Any,
    measured: Callable[[float], list[dict[str, Any]]],
    show: Callable[[list[dict[str, Any]], float], None],
) -> None:
    """Measure and show each of `args.temperatures`, then save all rows; without --save print `args`."""
    rows = []
    for temperature in map(float, args.temperatures.split(",")):
        new = measured(temperature)
        show(new, temperature)
        rows += new
    if args.save:
        print(save(name, rows, args.device))
    else:
        print(json.dumps(asdict(args)))


def save(name: str, rows: Iterable[dict[str, Any]], device: str = "cpu") -> Path:
    """Append `rows` to <folder>/<name>.jsonl, all of them or none; returns the file. A row may name the `threads` of
    the processes that it measured."""
    path = folder(device) / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    origin = where_from(device)

    def own(row: dict[str, Any]) -> dict[str, Any]:
        return {"threads": row["threads"]} if "threads" in row else {}

    old = path.read_text(encoding="utf-8") if path.exists() else ""
    new = "".join(json.dumps({**row, **origin, **own(row)}, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    write_file(path, old + new)
    return path
