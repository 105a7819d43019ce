"""bench/harness.py: statistics, taking turns, and rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import harness
from bench.harness import Timing, measure, ratios, save

ROOT = Path(__file__).parents[2]


def test_quantiles() -> None:
    timing = Timing((3.0, 2.0, 10.0, 4.0, 1.0), None)
    assert timing.row() == {"median": 3.0, "p20": pytest.approx(1.8), "p80": pytest.approx(5.2), "rounds": 5}
    assert Timing((1.0, 2.0), None).median == 1.5
    faster = Timing((1.0, 4.0, 5.0), None).times_as_fast(Timing((2.0, 2.0, 20.0), None))
    assert faster == {"median": 2.0, "p20": pytest.approx(1.1), "p80": pytest.approx(3.2), "rounds_above_1": 2}


def test_configurations_take_turns() -> None:
    calls: list[str] = []
    timings = measure({name: lambda name=name: calls.append(name) or name for name in "abc"}, rounds=6, warmup=2)
    rounds = ["".join(calls[n : n + 3]) for n in range(0, 24, 3)]
    assert rounds[:2] == ["abc", "abc"] and all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len(set(rounds)) > 2, "a way does not always follow the same one"
    assert {name: timing.last for name, timing in timings.items()} == {"a": "a", "b": "b", "c": "c"}
    assert all(len(timing.seconds) == 6 for timing in timings.values())
    with pytest.raises(ValueError, match="nothing to measure"):
        measure({}, rounds=3)
    with pytest.raises(ValueError, match="nothing to measure"):
        measure({"a": lambda: None}, rounds=0)


def test_configurations_take_turns_at_every_item() -> None:
    calls: list[str] = []
    ways = {name: lambda item, name=name: calls.append(name + item) or item for name in "ab"}
    timings = harness.measure_each(ways, ["1", "2", "3"], rounds=2, warmup=1)
    turns = [sorted(calls[n : n + 2]) for n in range(0, 18, 2)]
    assert len(calls) == 18 and turns == [[f"a{item}", f"b{item}"] for item in "123"] * 3
    assert {call[0] for call in calls[::2]} == {"a", "b"}, "each of them comes first now and then"
    assert timings["a"].last == ["1", "2", "3"] and len(timings["b"].seconds) == 2 and timings["b"].median > 0
    with pytest.raises(ValueError, match="nothing to measure"):
        harness.measure_each(ways, [])


def test_rows_name_a_program_as_its_user_does(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"bench/papers/__main__.py": "-m bench.papers", "bench/e2e.py": "bench/e2e.py"}
    for inside, said in names.items():
        monkeypatch.setattr("sys.argv", [str(ROOT / inside), "--save"])
        assert harness.where_from()["command"] == f"python {said} --save"
    assert (
        harness.script("bench/e2e.py") == "bench/e2e.py" and harness.script("/elsewhere/e2e.py") == "/elsewhere/e2e.py"
    )


def test_rounds_end_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One round at least, and no further one that would end later."""
    now = [0.0]
    ways = {name: lambda item, s=s: now.__setitem__(0, now[0] + s * item) for name, s in (("a", 1), ("b", 2))}
    monkeypatch.setattr(harness.time, "perf_counter", lambda: now[0])
    for seconds, rounds in ((0.0, 1), (17.9, 1), (18.0, 2), (1e9, 5)):
        timings = harness.measure_each(ways, [1, 2], rounds=5, warmup=1, seconds=seconds)
        assert timings["a"].seconds == (3.0,) * rounds and timings["b"].each == (2.0, 4.0) * rounds
    assert timings["a"].spread(timings["b"]) == {"median": 2.0, "p20": 2.0, "p80": 2.0}


def test_ratios_are_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5.0]

    def takes(seconds: float) -> Callable[[], None]:
        return lambda: now.append(now[-1] + seconds)

    monkeypatch.setattr(harness.time, "perf_counter", lambda: now[-1])
    timings = measure({"slow": takes(3.0), "fast": takes(0.75)}, rounds=3, warmup=0)
    assert timings["slow"].seconds == (3.0, 3.0, 3.0) and timings["fast"].median == 0.75
    assert ratios(timings) == {"slow": 1.0, "fast": 4.0}


def test_rows_are_appended_whole(tmp_path: Path, results: Callable[[], list[dict[str, Any]]]) -> None:
    path = save("e2e", [{"a": 1}, {"a": 2}])
    assert path.parent.parent == tmp_path and path.name == "e2e.jsonl"
    with pytest.raises(ValueError):  # NaN is not JSON
        save("e2e", [{"a": 3}, {"a": float("nan")}])
    assert save("e2e", [{"a": 4}]) == path
    rows = results()
    assert [row["a"] for row in rows] == [1, 2, 4]
    assert set(rows[0]) == {"a", "machine", "threads", "versions", "commit", "date", "command"}
    assert rows[0]["machine"] and rows[0]["versions"]["torch"]
    assert [p.name for p in path.parent.iterdir()] == ["e2e.jsonl"]
