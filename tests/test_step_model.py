"""bench/step_model.py: launches as recorded, bytes as decode.py counts them, times by hand."""

import dataclasses
import json
from pathlib import Path

import pytest

from bench import latency, shapes, step_model
from bench.decode import CASES
from bench.step_model import STEPS, Changes, Constants, Launch, Shape
from specker.checkpoints.parse import parse_config

AFTER = Changes(**{name: value for _, change in STEPS for name, value in change.items()})


def test_time_by_hand():
    c = Constants(bandwidth=2.0, l2_bandwidth=4.0, start_us=3.0, early_us=1.0, ramp_us=6.0, small_us=5.0, last_us=7.0)
    stream = Launch("o", memory=8e6, l2=12e6, prefetches=True)
    assert stream.us(c, False) == 3 + 6 + 4 and stream.us(c, True) == 1 + 3 + 4
    assert dataclasses.replace(stream, l2=40e6).us(c, False) == 3 + 6 + 10
    assert dataclasses.replace(stream, prefetches=False).us(c, True) == 1 + 6 + 4
    assert Launch("norm", l2=8e6).us(c, False) == 3 + 5 + 2
    attention = Launch("attention", memory=8e6, partials=50e6, merges=True)
    assert attention.us(c, False) == 3 + 6 + 4 + 7  # 50 MB of partials stay in the L2 cache
    assert dataclasses.replace(attention, partials=60e6).us(c, False) == 3 + 6 + (8 + 60 + 60) / 2 + 7
    assert dataclasses.replace(attention, partials=60e6, merges=False).us(c, False) == 3 + 6 + (8 + 60) / 2
    assert Launch("attention merge", partials=60e6).us(c, False) == 3 + 5 + 60 / 2


def test_the_last_program_of_split_kernels_merges():
    s = Shape.of(shapes.SHAPES["8b"])
    launches = {launch.name: launch for launch in step_model.layer(s, 64, 32768, AFTER)}
    assert [name for name, launch in launches.items() if launch.merges] == ["kv_project", "attention"]
    assert launches["attention"].partials == 4 * 64 * 32 * 128 * 65  # float32, rows, heads, head_dim, splits


@pytest.mark.parametrize(("name", "before"), [("8b", 10), ("1b", 11)])
def test_launches_of_a_layer(name, before):
    s = Shape.of(shapes.SHAPES[name])
    counts, how = [], Changes()
    for _, change in STEPS:
        how = dataclasses.replace(how, **change)
        counts.append(len(list(step_model.layer(s, 1, 8192, how))))
    assert (counts[0], counts[-1]) == (before, 7) and counts == sorted(counts, reverse=True)
    names = [launch.name for launch in step_model.layer(s, 1, 8192, AFTER)]
    assert names == ["norm", "kv_project", "attention", "o", "norm", "gate_up", "down"]


def test_launches_beyond_the_layers():
    """bench/latency.py's numbers, which are recorded ones (tests/test_project.py); a chain has no `grow`."""
    s, recorded = Shape.of(shapes.SHAPES["8b"]), latency.Inputs()
    for drafts, beyond in ((False, recorded.verify_launches), (True, recorded.draft_launches - 1)):
        assert len(step_model.forward(s, 1, 8192, AFTER, drafts)) == 7 * s.layers + beyond


@pytest.mark.parametrize("name", ["8b", "1b", "32b"])
def test_bytes_are_those_of_the_bench(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(shapes.SHAPES[name]))
    config, *_ = parse_config(Path(tmp_path), None, None)
    case = next(c for c in CASES if c.kind == "ar" and c.shape == name and c.context == 8192)
    gb = step_model.row(case, 1, Constants(), AFTER)["gb"]
    assert gb == pytest.approx(shapes.step_bytes(config, 8192, 2) / 1e9, rel=1e-3)


def test_fewer_bits_take_fewer_bytes_until_instructions_limit():
    case = next(c for c in CASES if c.kind == "ar" and c.shape == "8b" and c.context == 8192)
    c, (plain, eight, four, _) = Constants(), step_model.BITS.values()
    rows = [step_model.row(case, 1, c, AFTER, **bits) for bits in (plain, eight, four)]
    weights = rows[0]["gb"] - 2 * 8 * 8193 * 128 * 2 * 32 / 1e9
    assert rows[1]["gb"] == pytest.approx(rows[0]["gb"] - weights / 2)
    assert rows[0]["ms"] > 1.5 * rows[1]["ms"] > 1.5 * rows[2]["ms"]
    slow = [step_model.row(case, 1, dataclasses.replace(c, restored=1.0), AFTER, **bits) for bits in (plain, four)]
    assert slow[0] == rows[0] and slow[1]["gb"] == rows[2]["gb"] and slow[1]["ms"] > 2 * rows[2]["ms"]


def test_every_change_saves_time_in_every_case():
    for case, rows in step_model.cases(["8b", "1b", "32b"]):
        how, found = Changes(), []
        for _, change in STEPS:
            how = dataclasses.replace(how, **change)
            found.append(step_model.row(case, rows, Constants(), how))
        times = [r["ms"] for r in found]
        assert times == sorted(times, reverse=True) and times[0] > times[-1], case.name
        assert 0 < found[0]["share"] < found[-1]["share"] < 1
    assert {c.kind for c, _ in step_model.cases(["8b"])} == {"ar", "verify", "round"}


def test_the_first_line_says_that_it_is_a_model(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(step_model, "RESULT", tmp_path / "step_model.md")
    monkeypatch.setattr("sys.argv", ["step_model.py", "--shapes", "1b"])
    step_model.main()
    assert capsys.readouterr().out.startswith("Model, not measurement.")
    page = (tmp_path / "step_model.md").read_text()
    assert page.startswith("Model, not measurement.") and "| norms add up splits | 9 |" in page
