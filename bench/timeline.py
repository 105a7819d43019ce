"""The kernels of a profiled round in their order: each one's start and length, and how long nothing ran before."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Launched:
    """A kernel or copy; times in microseconds."""

    name: str
    start: float  # since the first one's
    length: float
    gap: float  # since the end of all earlier ones; below 0 where it started before that


def of(events: Iterable[Any]) -> list[Launched]:
    """Those of torch.profiler's events that a GPU ran."""
    ran = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    ran.sort(key=lambda e: e.time_range.start)
    found: list[Launched] = []
    end = first = ran[0].time_range.start if ran else 0.0
    for e in ran:
        start, stop = e.time_range.start, e.time_range.end
        found.append(Launched(e.name, start - first, stop - start, start - end))
        end = max(end, stop)
    return found


def idle(round_: list[Launched]) -> tuple[float, float]:
    """Microseconds in which nothing ran, and from the first start to the last end."""
    return sum(max(0.0, each.gap) for each in round_), max(each.start + each.length for each in round_)


def by_name(round_: list[Launched]) -> dict[str, list[float]]:
    """Name -> how often, microseconds in all, and those in which nothing ran before; the longest first."""
    sums: dict[str, list[float]] = {}
    for each in round_:
        own = sums.setdefault(each.name, [0, 0.0, 0.0])
        for n, x in enumerate((1, each.length, max(0.0, each.gap))):
            own[n] += x
    return dict(sorted(sums.items(), key=lambda item: -item[1][1]))


def told(round_: list[Launched]) -> str:
    """A line for each, and one for each name."""
    lines = [f"{'start':>9} {'length':>8} {'gap':>7} us"]
    lines += [f"{each.start:9.1f} {each.length:8.1f} {each.gap:7.1f}    {each.name}" for each in round_]
    lines += [f"{'count':>9} {'length':>8} {'gaps':>7} us"]
    lines += [f"{n:9.0f} {length:8.1f} {gaps:7.1f}    {name}" for name, (n, length, gaps) in by_name(round_).items()]
    return "\n".join(lines)
