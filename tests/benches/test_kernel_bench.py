"""bench/kernels/common.py: goals, and a whole bench on this machine."""

import collections
import json
from pathlib import Path

import pytest
import torch
import warm

from bench.harness import Timing
from bench.kernels import common
from bench.kernels.common import Built, Case, Goal, Machine

ROOT = Path(__file__).parents[2]


def timing(seconds: float) -> Timing:
    return Timing((seconds,), None)


def test_the_limit_is_the_slower_of_bytes_and_flops():
    machine = Machine(bandwidth=4e12, matmul=8e14, empty=2e-6, replay=3e-6, specified=5e12)
    assert machine.limit((4_000_000, 8)) == 1e-6
    assert machine.limit((4_000_000, 8), machine.specified) == 8e-7
    assert machine.limit((4, 800_000_000_000)) == 1e-3


def test_a_replay_is_told_from_an_empty_kernel():
    """A replay of 5 us, 1.5 us an empty kernel."""
    medians = {"read": 6.5e-6 + 1e-3, "matmul": 6.5e-6 + 2e-3, "one": 6.5e-6, "many": 5e-6 + 33 * 1.5e-6}
    machine = common.rates_of(medians, 4 * 10**9, 10**12, None)
    assert machine.empty == pytest.approx(1.5e-6) and machine.replay == pytest.approx(5e-6)
    assert machine.bandwidth == pytest.approx(4e12) and machine.matmul == pytest.approx(5e14)


def test_every_part_of_a_goal_counts():
    times = {"specker": timing(10e-6), "torch": timing(15e-6)}
    for goal, met in [
        (Goal(), True),
        (Goal(share=0.8), True),
        (Goal(share=0.9), False),
        (Goal(over_empty=8.1e-6), True),
        (Goal(over_empty=7.9e-6), False),
        (Goal(seconds=10e-6), True),
        (Goal(seconds=9e-6), False),
        (Goal(over=(("torch", 1.5),)), True),
        (Goal(over=(("torch", 1.6),)), False),
        (Goal(share=0.8, over=(("torch", 1.6),)), False),
        (Goal(over=(("flex", 1.0),)), None),
        (Goal(over=(("torch", 1.6), ("flex", 1.0))), False),
    ]:
        assert goal.met(times, limit=8.5e-6, empty=2e-6) is met, goal
    assert str(Goal(0.85, 3e-6, over=(("torch", 1.15),))) == ">= 85%, <= empty + 3 us, >= 1.15x torch"
    assert str(Goal(seconds=6e-5)) == "<= 60 us"


def test_rows_and_a_wrong_result(monkeypatch, command_line, capsys):
    monkeypatch.setattr(common, "DEVICE", "cpu")
    x = torch.ones(4)
    right = Case("right", lambda: Built({"a": x.clone, "b": x.exp}, lambda: None, (32, 4)), Goal(share=0.5))
    rows = common.rows_of("op", right)
    assert [(r["case"], r["way"], r["bytes"]) for r in rows] == [("right", "a", 32), ("right", "b", 32)]
    assert rows[0]["ours_over_this"] == 1 and "share" not in rows[0] and "met" not in rows[0]

    def wrong() -> None:
        raise AssertionError("off by one")

    command_line(["bench"])
    with pytest.raises(SystemExit, match="op, wrong: wrong, so not timed: off by one"):
        common.main("op", [Case("wrong", lambda: Built({"a": x.clone}, wrong, (1, 1)))])
    assert "wrong, so not timed: off by one" in capsys.readouterr().out
    command_line(["bench", "-k", "right"])
    common.main("op", [right, Case("other", right.build)])
    shown = capsys.readouterr().out
    assert "right" in shown and "other" not in shown and "/results/" not in shown


def test_pytest_runs_the_benches(tmp_path):
    """`pytest bench --benchmark-only --small` for some modules on a CPU times every selected case."""
    out = tmp_path / "benchmarks.json"
    named = "residual_merge or accept_walk or start_rows or settle or grow"
    only = ["-k", named, "-p", "no:cacheprovider", "-p", "no:xdist"]
    quick = ["--benchmark-only", "--benchmark-min-rounds=1", "--benchmark-max-time=0.01", f"--benchmark-json={out}"]
    done = warm.run("-m", "pytest", "bench", "-q", "--small", *only, *quick, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    timed = json.loads(out.read_text())["benchmarks"]
    assert collections.Counter(row["name"].split("[")[0] for row in timed) == {
        "test_residual_merge": 8,
        "test_accept_walk": 2,
        "test_start_rows": 5,
        "test_settle": 6,
        "test_grow": 6,
    }
    assert all(row["stats"]["rounds"] > 0 and row["stats"]["min"] > 0 for row in timed)


def test_a_failure_is_a_row_and_the_bench_goes_on(monkeypatch, command_line, capsys):
    """A missing baseline or a case that does not compile does not lose the other measurements."""
    x = torch.ones(4)
    monkeypatch.setattr(common, "DEVICE", "cpu")

    def absent() -> None:
        raise ImportError("no such engine\nand a long story")

    def broken() -> Built:
        raise RuntimeError("out of registers")

    def fine() -> Built:
        return Built({"a": x.clone, "b": absent, "c": x.exp}, lambda: None, (32, 4))

    rows = common.rows_of("op", Case("fine", fine))
    assert [(r["way"], r.get("reason")) for r in rows] == [
        ("a", None),
        ("c", None),
        ("b", "ImportError: no such engine"),
    ]
    cases = [Case("fine", fine), Case("broken", broken), Case("also fine", fine)]
    command_line(["bench"])
    with pytest.raises(SystemExit, match=r"^op, broken: RuntimeError: out of registers$"):
        common.main("op", cases)
    shown = capsys.readouterr().out
    assert shown.count("fine") >= 2 and "also fine" in shown, "the bench ended early"
    assert "no such engine" in shown and "out of registers" in shown and "long story" not in shown
