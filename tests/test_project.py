"""bench/project.py: times by hand, limits, and launches as recorded without a GPU."""

import json
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import torch
from recorded import recording

from bench import harness, project, shapes
from bench.project import GPUS, LAYOUTS, Cost, Inputs, Shape
from specker.checkpoints import checkpoint
from specker.checkpoints.parse import parse_config
from specker.kernels.round.grow import grow
from specker.model.cache import KVCache
from specker.model.decoder import Model, forward
from specker.model.rows import begin
from specker.model.sampling import GREEDY
from specker.runtime.round.lm_head import LMHead
from specker.runtime.strategies.easyspec.parallel import LayerParallel, Schedule

# Memory and links move one byte per microsecond; layers of 48 and 96 elements in groups 0, 1-4, 5.
SMALL = Shape(6, 4, attention=48, mlp=96, head=40, kv=10, sharing=1)
SLOW = Inputs(bandwidth=1e-6, memory=1.0, host_us=5, launch_us=2, base_us=10, step_us=1, bus=4e-3, tau=2, keep=0.5)
SLOW = replace(SLOW, depth=2, width=3, attention_launches=6, restored_rate=1e-6)
FREE = {"base_us": 0.0, "step_us": 0.0, "bus": inf, "launch_us": 0.0, "host_us": 0.0}
H200 = GPUS["h200"]
BIG, MIDDLE = (Shape.of(shapes.SHAPES[name]) for name in ("70b", "8b"))


@pytest.mark.parametrize("name", ["8b", "1b", "32b"])
def test_bytes_are_those_of_the_bench(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(shapes.SHAPES[name]))
    config, *_ = parse_config(tmp_path, None, None)
    gb = project.plain(H200, Shape.of(shapes.SHAPES[name]), 8192)["gb"]
    assert gb == pytest.approx(shapes.step_bytes(config, 8192, 2) / 1e9, rel=1e-3)
    assert (SMALL.elements, SMALL.stored, replace(SMALL, tied=True).stored) == (904, 944, 904)


def test_a_step_by_hand() -> None:
    gaps = 2 * (6 * 9 + 3 + 1)
    row = project.plain(SLOW, SMALL, 9)
    assert row["ms"] == pytest.approx((1808 + 200 + gaps) / 1e3) and row["gb"] == 2008 / 1e9
    assert row["share"] == pytest.approx(2008 / (2008 + gaps)) and row["launches"] == gaps / 2
    four = project.plain(SLOW, SMALL, 9, 4, 16)  # restoring 864 weights takes longer than reading 432 + 80 bytes
    assert four["gb"] == 712 / 1e9 and four["ms"] == pytest.approx((864 + 200 + gaps) / 1e3)
    fast = project.plain(replace(SLOW, restored_rate=1.0), SMALL, 9, 4, 16)
    assert fast["ms"] == pytest.approx((512 + 200 + gaps) / 1e3)


def test_forwards_by_hand() -> None:
    one = project.forward(SLOW, SMALL, 3, 1, 5, 3)
    assert one == Cost(weights=1808, launches=59)
    merged = project.forward(SLOW, replace(SMALL, sharing=4), 3, 1, 5, 3)  # 12 pairs a KV head
    assert merged.launches == 59 + 6
    two = project.forward(SLOW, SMALL, 3, 2, 5, 3)
    assert two == Cost(weights=904, launches=59, wire=12 * (12 + 24) + (11 + 24), calls=13)
    assert two.us(SLOW, "graphs") == two.us(SLOW, "eager") == 904 + 118 + 467
    assert two.us(replace(SLOW, host_us=30), "eager") == (59 + 13) * 30

    def side(ranks: int, share: int, wire: float, calls: int) -> None:
        layers = 2 * 2 * 144 + 2 * (share * 48 + 4 * 96)
        assert project.layer_parallel(SLOW, SMALL, 3, ranks) == Cost(80 + layers, 5 + 18 + 4 + 12 + 1, wire, calls)

    side(1, 4, 0, 0)
    side(2, 2, 11 + 48, 1)
    side(3, 2, 12 + 64, 1)
    side(8, 1, 17 + 84, 1)
    assert project.layer_parallel(replace(SLOW, parallel=1), SMALL, 3, 8) == one


def test_a_round_by_hand() -> None:
    exact, plain = 1808 + 118, 904 + 118 + 12 * 20 + 19 + 11
    check = 904 + 118 + 12 * (12 + 56) + 67 + 11
    row = project.project(SLOW, SMALL, SMALL, 2, "layer-parallel", "graphs")
    assert row["model"] is True
    assert (row["verify_us"], row["plain_us"], row["tau"]) == (check, plain, 1)
    assert row["draft_forward_us"] == 1616 + 80 + 59 and row["draft_us"] == exact + 1755
    assert row["speedup"] == plain / (exact + 1755 + check)
    assert row["draft_speedup"] == 2 * exact / (exact + 1755)
    same = project.project(SLOW, SMALL, SMALL, 2, "replicated", "graphs")
    assert same["draft_us"] == 2 * exact and same["draft_speedup"] == 1 and same["tau"] == 2
    tensor = project.project(SLOW, SMALL, SMALL, 2, "tensor", "graphs")
    first, other = (904 + 118 + 12 * (12 + 8 * rows) + 11 + rows * 24 for rows in (3, 3))
    assert tensor["draft_us"] == first + other  # depth + 1 and width are both 3
    assert tensor["weights_gb"] == pytest.approx(944 * 2 * 2e-9 / 2) and same["weights_gb"] > tensor["weights_gb"]
    tight = replace(SLOW, memory=same["weights_gb"])
    assert not project.project(tight, SMALL, SMALL, 2, "replicated", "graphs")["fits"] and same["fits"]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_infinite_bandwidth_leaves_launches_and_collectives(ranks: int) -> None:
    for layout in LAYOUTS:
        for cost in project.drafts(H200, MIDDLE, ranks, layout):
            assert cost.us(replace(H200, bandwidth=inf), "graphs") == cost.launches * H200.launch_us + cost.wire
            late = replace(H200, bandwidth=inf, launch_us=0.0)
            assert cost.us(late, "eager") == max((cost.launches + cost.calls) * H200.host_us, cost.wire)


def test_free_launches_and_links_leave_the_ratio_of_bytes() -> None:
    """Attention is 19% of an 8B layer's bytes, so groups of four give at most 1.15 over four ranks, and 1 on one."""
    free, m = replace(H200, **FREE), MIDDLE
    assert m.attention / (m.attention + m.mlp) == pytest.approx(0.19, abs=0.005)

    def ratio(ranks: int) -> float:
        one, other = (project.drafts(free, m, ranks, layout)[1] for layout in ("replicated", "layer-parallel"))
        return one.us(free, "graphs") / other.us(free, "graphs")

    assert ratio(1) == 1
    assert ratio(4) == ratio(8) == pytest.approx(m.elements / (m.elements - 22 * m.attention))
    assert 1.13 < ratio(4) < 1.15
    for engine in project.ENGINES:
        tensor = project.project(free, BIG, m, 8, "tensor", engine)
        assert tensor["draft_speedup"] == pytest.approx(8)
        assert tensor["plain_us"] == tensor["verify_us"]


@pytest.mark.parametrize("engine", project.ENGINES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_speed_is_monotonic_in_its_inputs(engine: str, layout: str) -> None:
    def speed(i: Inputs, ranks: int = 8) -> float:
        return project.project(i, BIG, MIDDLE, ranks, layout, engine)["tokens_per_second"]

    here = speed(H200)
    assert here < speed(replace(H200, tau=6.0)) and here < speed(replace(H200, bandwidth=5.0))
    for more in ({"base_us": 5.0}, {"launch_us": 3.0}, {"host_us": 7.0}):
        assert here >= speed(replace(H200, **more))
    speeds = [speed(replace(H200, **FREE), ranks) for ranks in (1, 2, 4, 8)]
    assert speeds == sorted(speeds) and speeds[0] < speeds[-1]


def test_row_counts_limited_by_flops_are_refused() -> None:
    with pytest.raises(ValueError, match="129 rows: beyond 128 flops take longer"):
        project.verify(H200, MIDDLE, 129, 1)


@pytest.mark.parametrize("name", ["8b", "1b"])
def test_launches_equal_the_recorded_ones(tmp_path: Path, name: str) -> None:
    """Of layers in sequence and of groups, at true widths, on fake tensors: eight a layer for 12 rows."""
    (tmp_path / "config.json").write_text(json.dumps(shapes.SHAPES[name] | {"num_hidden_layers": 6}))
    with recording() as log, torch.inference_mode():
        made = checkpoint.read(str(tmp_path), dtype=torch.bfloat16, device="cpu", random=0)
        model = Model(made)
        cache = KVCache(model.config, 2304, dtype=torch.bfloat16, device="cpu")
        cache.bucket(2048)
        rows = cache.place(torch.tensor([2000]), 0, 0, 12)
        x = torch.empty(12, model.config.hidden_size, dtype=torch.bfloat16)
        length, tokens = torch.tensor([2000]), torch.zeros(1, 12, dtype=torch.int64)
        head, tree = (
            LMHead(model.head, model.norm, 1e-5),
            (*torch.zeros(2, 1, 24, dtype=torch.int64), torch.zeros(1, 24)),
        )

        def verify() -> None:
            model.logits(forward(model, cache, *begin(model, cache, length, 1, 0, tokens)).final)

        def level() -> None:
            final = forward(model, cache, *begin(model, cache, length, 1, 1, tokens)).final
            grow(*head.ranked(final, 12, GREEDY, rows.positions), *tree, 12)

        def side_by_side(width: int) -> float:
            parallel = LayerParallel(model, cache, Schedule.parallel(6, width))
            return launches(lambda: parallel.forward(rows, x))

        def launches(work) -> int:
            work()  # creates the constants
            log.clear()
            work()
            return len(log)

        m = replace(Shape.of(shapes.SHAPES[name]), layers=6)
        assert launches(verify) == project.forward(H200, m, 12, 1, H200.verify_launches, 12).launches == 6 * 8 + 3
        assert launches(level) == project.forward(H200, m, 12, 1, H200.draft_launches, 12).launches
        last_sum = 1  # the launch after the last layer
        for width in (2, 3, 4):
            cost = project.layer_parallel(replace(H200, parallel=width), m, 12, 1)
            assert side_by_side(width) == cost.launches - H200.draft_launches + last_sum


def test_predicted_over_measured() -> None:
    step = {"machine": "NVIDIA H200", "bench": "decode", "way": "ar", "case": "ar 8b 8192", "shape": "8b"}
    step |= {"dtype": "bfloat16", "median": 2e-3 * project.plain(H200, MIDDLE, 8192)["ms"]}
    passed = [{**step, "dtype": "float32"}, {**step, "machine": "a processor"}, {**step, "bench": "e2e"}]
    (line,) = project.checked([*passed, step, {**step, "way": "over ar"}])
    assert line.startswith("NVIDIA H200, ar 8b 8192: ") and line.endswith("measured, 0.50")
    assert project.checked(passed) == ["no measurement yet"]


def test_every_output_says_that_it_is_a_model(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(project, "RESULT", tmp_path / "projection.md")
    flags = "--gpus a100 --pairs 70b+1b --ranks 1,8 --set tau=4,depth=4"
    monkeypatch.setattr("sys.argv", ["project", *flags.split()])
    project.main()
    shown = capsys.readouterr()
    assert not [*tmp_path.iterdir()] and shown.err == f"{harness.NOT_SAVED}\n"
    monkeypatch.setattr("sys.argv", ["project", *flags.split(), "--save"])
    project.main()
    page = (tmp_path / "projection.md").read_text()
    assert capsys.readouterr() == (page, "") and shown.out == page and page.count(project.WARNING) == 4
    rows = [json.loads(line) for line in (tmp_path / "projection.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * 2 * 3
    assert all(r["model"] and r["inputs"]["tau"] == 4 and r["inputs"]["depth"] == 4 for r in rows)
    assert "R 8: tensor" in page and "R 1" not in page.split("Most tokens")[1].splitlines()[0]  # 70B does not fit
    monkeypatch.setattr("sys.argv", ["project", "--gpus", "b200"])
    with pytest.raises(ValueError, match="gpu 'b200' is not known; there are h200, a100"):
        project.main()
