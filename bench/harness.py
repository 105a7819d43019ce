"""Timing several ways to do one thing, fairly, and keeping the rows.

The ways take turns within each round, so that a machine that slows down, or another process, hits all of them; a round
rotates who goes first. What is reported is the median with p20 and p80, and the ratio of medians to the first way. Rows
are appended to bench/results/<machine>/<name>.jsonl, each with the machine, versions, commit and command it came from.
"""

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from specker.report import write_file

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Timing:
    """Seconds of each timed round, in their order, and what the last call returned."""

    seconds: tuple[float, ...]
    last: Any

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
        """As `other`: the ratios of the same rounds, in which a slow machine was slow for both, and how many are above
        one."""
        each = [theirs / own for own, theirs in zip(self.seconds, other.seconds, strict=True)]
        named = {name: quantile(each, q) for name, q in (("median", 0.5), ("p20", 0.2), ("p80", 0.8))}
        return named | {"rounds_above_1": sum(ratio > 1 for ratio in each)}


def measure(ways: dict[str, Callable[[], Any]], rounds: int = 5, warmup: int = 1) -> dict[str, Timing]:
    """Call each way `warmup` times untimed, then once in each of `rounds` rounds; CUDA is waited for on both sides."""
    if rounds < 1 or not ways:
        raise ValueError(f"nothing to measure: {len(ways)} ways, {rounds} rounds")
    for _ in range(warmup):
        for call in ways.values():
            call()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    last: dict[str, Any] = {}
    order = list(ways)
    for _ in range(rounds):
        for name in order:
            wait()
            start = time.perf_counter()
            last[name] = ways[name]()
            wait()
            seconds[name].append(time.perf_counter() - start)
        order = order[1:] + order[:1]
    return {name: Timing(tuple(seconds[name]), last[name]) for name in ways}


def measure_each(
    ways: dict[str, Callable[[Any], Any]], items: list[Any], rounds: int = 5, warmup: int = 1
) -> dict[str, Timing]:
    """As `measure`, of ways that take one item: they take turns at every item, not only in every round, so that what is
    compared is seconds apart. A round's seconds are the sum over the items, `last` is the list of their results."""
    if rounds < 1 or not ways or not items:
        raise ValueError(f"nothing to measure: {len(ways)} ways, {len(items)} items, {rounds} rounds")
    seconds = {name: [0.0] * rounds for name in ways}
    last: dict[str, list[Any]] = {}
    order = list(ways)
    for n in range(-warmup, rounds):
        last = {name: [] for name in ways}
        for item in items:
            for name in order:
                wait()
                start = time.perf_counter()
                last[name].append(ways[name](item))
                wait()
                if n >= 0:
                    seconds[name][n] += time.perf_counter() - start
            order = order[1:] + order[:1]
    return {name: Timing(tuple(seconds[name]), last[name]) for name in ways}


def ratios(timings: dict[str, Timing]) -> dict[str, float]:
    """How many times as fast as the first way each is: ratio of medians."""
    base = next(iter(timings.values())).median
    return {name: base / timing.median for name, timing in timings.items()}


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
    """The GPU's name for a CUDA device, else the processor's name and how many of its cores are ours."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists() and (match := re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)):
        model = match[1].strip()
    return f"{model}, {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores"


def folder(device: str = "cpu") -> Path:
    """bench/results/<machine>, in letters that every file system takes."""
    return RESULTS / re.sub(r"[^a-z0-9.]+", "-", machine(device).lower()).strip("-")


def where_from(device: str = "cpu") -> dict[str, Any]:
    """What a number means nothing without; the same fields stand in every row."""
    return {
        "machine": machine(device),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            **{n: _version(n) for n in ("torch", "triton", "transformers")},
        },
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": " ".join(["python", *sys.argv]),
    }


def commit() -> str:
    """The commit's hash, with a + where tracked files differ from it; "unknown" outside a checkout."""
    root = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=root, capture_output=True, text=True)
        # Rows that earlier benches of the same run wrote do not change what is measured.
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


def save(name: str, rows: Iterable[dict[str, Any]], device: str = "cpu") -> Path:
    """Append `rows` to <folder>/<name>.jsonl, all of them or none; returns the file."""
    path = folder(device) / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    origin = where_from(device)
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    new = "".join(json.dumps({**row, **origin}, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    write_file(path, old + new)
    return path
