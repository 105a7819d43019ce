"""bench/timeline.py: a round's kernels by start, length and gap, from made-up events of torch.profiler."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from bench import decode, timeline
from bench.decode import Args, Bench, Case

KINDS = torch.autograd.DeviceType


def event(name, start, end, kind=KINDS.CUDA):
    return SimpleNamespace(name=name, device_type=kind, time_range=SimpleNamespace(start=start, end=end))


EVENTS = [
    event("norm", 1008.0, 1010.0),  # 3 us after the product
    event("product", 1000.0, 1005.0),
    event("aten::mm", 900.0, 2000.0, KINDS.CPU),
    event("copy", 1009.0, 1009.5),  # starts early, as a dependent launch does, and ends early
    event("norm", 1020.0, 1021.0),
]


def test_starts_lengths_and_gaps():
    ran = timeline.of(EVENTS)
    assert [(r.name, r.start, r.length, r.gap) for r in ran] == [
        ("product", 0, 5, 0),
        ("norm", 8, 2, 3),
        ("copy", 9, 0.5, -1),
        ("norm", 20, 1, 10),
    ]
    assert timeline.idle(ran) == (13, 21)
    assert list(timeline.by_name(ran).items()) == [("product", [1, 5, 0]), ("norm", [2, 3, 13]), ("copy", [1, 0.5, 0])]
    assert timeline.of([]) == timeline.of(EVENTS[2:3]) == []


def test_a_round_is_printed_kernel_by_kernel(tmp_path, monkeypatch, capsys):
    profile = SimpleNamespace(events=lambda: EVENTS)
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: contextlib.nullcontext(profile))
    bench = Bench(Args(device="cpu", dtype="float32"), tmp_path)
    row = decode.launches(bench, Case("launches", "tiny", 64))["a round"]
    assert row["launches"] == 4 and row["span"] == pytest.approx(21e-6) and row["value"] == pytest.approx(13 / 21)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["20.0", "1.0", "10.0", "norm"] in lines and ["2", "3.0", "13.0", "norm"] in lines
