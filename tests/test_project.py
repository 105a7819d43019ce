"""bench/latency.py and bench/project.py: times by hand, limits, and solver results checked in the model."""

import json
import re
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import torch
from recorded import recording

from bench import latency, project
from bench.kernels.bench_layer_group import SHAPES as WIDTHS
from bench.latency import SHAPES, Cost, Inputs, Shape
from specker import zoo
from specker.checkpoints import checkpoint
from specker.checkpoints.parse import parse_config
from specker.kernels.round.grow import grow
from specker.model.cache import KVCache
from specker.model.config import layer_elements
from specker.model.decoder import Model, forward
from specker.model.rows import begin
from specker.model.sampling import GREEDY
from specker.runtime.round.lm_head import LMHead
from specker.runtime.strategies.easyspec.parallel import LayerParallel, Schedule

ROOT = Path(__file__).parents[1]
# Memory and links move one byte per microsecond; layers of 48 and 96 elements in groups 0, 1-4, 5.
SMALL = Shape(6, 4, 2, 1, 2, inner=8, vocab=10, attention_launches=6)
SLOW = Inputs(
    bandwidth=1e-6, memory=1.0, host_us=5, node_us=2, base_us=10, step_us=1, bus=4e-3, tau=2, keep=0.5, depth=2, width=3
)
FREE = {"base_us": 0.0, "step_us": 0.0, "bus": inf, "node_us": 0.0, "host_us": 0.0}
H200 = Inputs(bandwidth=4.3, memory=141, bus=360, tau=5.0, keep=1.0)


def test_elements():
    assert (SMALL.attention, SMALL.mlp, SMALL.head, SMALL.elements, SMALL.stored) == (48, 96, 40, 904, 944)
    assert SHAPES["1b"].stored == SHAPES["1b"].elements
    config, *_ = parse_config(Path(zoo.path("code-target")), None, None)
    bundled = project.bundled("code-target")
    assert bundled.elements - bundled.head == layer_elements(config)
    assert 69.4e9 < SHAPES["70b"].elements < 69.6e9 and 7.4e9 < SHAPES["8b"].elements < 7.6e9


def test_collectives_by_hand():
    assert latency.all_reduce(SLOW, 4, 100) == Cost(wire=10 + 6 + 150, calls=1)
    assert latency.all_gather(SLOW, 4, 100) == Cost(wire=10 + 3 + 75, calls=1)
    assert latency.all_reduce(SLOW, 1, 100) == latency.all_gather(SLOW, 1, 100) == Cost()


def test_forwards_by_hand():
    one = latency.tensor_parallel(SLOW, SMALL, 3, 1, 5, 24)
    assert one == Cost(bytes=1808, launches=59)
    two = latency.tensor_parallel(SLOW, SMALL, 3, 2, 5, 24)
    assert two == Cost(bytes=904, launches=59, wire=12 * (12 + 24) + (11 + 24), calls=13)
    assert two.us(SLOW, "graphs") == two.us(SLOW, "eager") == 904 + 118 + 467
    assert two.us(replace(SLOW, host_us=30), "eager") == (59 + 13) * 30

    def side(ranks, share, wire, calls):
        layers = 2 * 2 * 144 + 2 * (share * 48 + 4 * 96)
        assert latency.layer_parallel(SLOW, SMALL, 3, ranks) == Cost(80 + layers, 5 + 18 + 4 + 12 + 1, wire, calls)

    side(1, 4, 0, 0)
    side(2, 2, 11 + 48, 1)
    side(3, 2, 12 + 64, 1)
    side(8, 1, 17 + 84, 1)
    assert latency.layer_parallel(replace(SLOW, parallel=1), SMALL, 3, 8) == one


def test_a_round_by_hand():
    exact, plain = 1808 + 118, 904 + 118 + 12 * 20 + 19 + 11
    check = 904 + 118 + 12 * (12 + 56) + 67 + 11
    row = latency.project(SLOW, SMALL, SMALL, 2, "layer-parallel", "graphs")
    assert row["model"] is True
    assert (row["verify_us"], row["plain_us"], row["tau"]) == (check, plain, 1)
    assert row["draft_forward_us"] == 1616 + 80 + 59 and row["draft_us"] == exact + 1755
    assert row["speedup"] == plain / (exact + 1755 + check)
    assert row["draft_speedup"] == 2 * exact / (exact + 1755)
    same = latency.project(SLOW, SMALL, SMALL, 2, "replicated", "graphs")
    assert same["draft_us"] == 2 * exact and same["draft_speedup"] == 1 and same["tau"] == 2
    tensor = latency.project(SLOW, SMALL, SMALL, 2, "tensor", "graphs")
    first, other = (904 + 118 + 12 * (12 + 8 * rows) + 11 + rows * 24 for rows in (3, 3))
    assert tensor["draft_us"] == first + other  # depth + 1 and width are both 3
    assert tensor["weights_gb"] == pytest.approx(944 * 2 * 2e-9 / 2) and same["weights_gb"] > tensor["weights_gb"]
    tight = replace(SLOW, memory=same["weights_gb"])
    assert not latency.project(tight, SMALL, SMALL, 2, "replicated", "graphs")["fits"] and same["fits"]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_infinite_bandwidth_leaves_launches_and_collectives(ranks):
    for layout in latency.LAYOUTS:
        for cost in latency.drafts(H200, SHAPES["8b"], ranks, layout):
            assert cost.us(replace(H200, bandwidth=inf), "graphs") == cost.launches * H200.node_us + cost.wire
            late = replace(H200, bandwidth=inf, node_us=0.0)
            assert cost.us(late, "eager") == max((cost.launches + cost.calls) * H200.host_us, cost.wire)


def test_free_launches_and_links_leave_the_ratio_of_bytes():
    """Attention is 19% of an 8B layer's bytes, so groups of four give at most 1.15 over four ranks, and 1 on one."""
    free, m = replace(H200, **FREE), SHAPES["8b"]
    assert m.attention / (m.attention + m.mlp) == pytest.approx(0.19, abs=0.005)

    def ratio(ranks):
        costs = latency.drafts(free, m, ranks, "replicated")[1], latency.drafts(free, m, ranks, "layer-parallel")[1]
        return costs[0].us(free, "graphs") / costs[1].us(free, "graphs")

    assert ratio(1) == 1
    assert ratio(4) == ratio(8) == pytest.approx(m.elements / (m.elements - 22 * m.attention))
    assert 1.13 < ratio(4) < 1.15
    for engine in latency.ENGINES:
        tensor = latency.project(free, SHAPES["70b"], m, 8, "tensor", engine)
        assert tensor["draft_speedup"] == pytest.approx(8)
        assert tensor["plain_us"] == tensor["verify_us"]


def test_speed_is_monotonic_in_its_inputs():
    for engine in latency.ENGINES:
        for layout in latency.LAYOUTS:

            def speed(i, ranks=8, layout=layout, engine=engine):
                return latency.project(i, SHAPES["70b"], SHAPES["8b"], ranks, layout, engine)["tokens_per_second"]

            here = speed(H200)
            assert here < speed(replace(H200, tau=5.5))
            assert here < speed(replace(H200, bandwidth=5.0))
            assert here >= speed(replace(H200, base_us=5.0))
            assert here >= speed(replace(H200, node_us=1.5)) and here >= speed(replace(H200, host_us=7.0))
            speeds = [speed(replace(H200, **FREE), ranks) for ranks in (1, 2, 4, 8)]
            assert speeds == sorted(speeds) and speeds[0] < speeds[-1]


@pytest.mark.parametrize("stage", [False, True])
def test_the_solved_attention_share_gives_the_speedup(stage):
    share = latency.attention_share(H200, SHAPES["8b"], 8, 1.3, stage)
    assert 0 < share < 1
    free, bare = replace(H200, **FREE), replace(SHAPES["8b"], vocab=0)
    m = replace(bare, inner=bare.attention * (1 / share - 1) / (3 * bare.hidden))
    exact, other = (cost.us(free, "graphs") for cost in latency.drafts(free, m, 8, "layer-parallel"))
    got = 5 * exact / (exact + 4 * other) if stage else exact / other
    assert got == pytest.approx(1.3)
    assert latency.attention_share(H200, m, 1, 1.3, stage) == inf
    assert latency.attention_share(H200, SHAPES["8b"], 8, 1.62, False) == pytest.approx(0.56, abs=0.01)


def test_solved_launches_give_the_speedup():
    pair, how = (SHAPES["70b"], SHAPES["8b"]), (8, "layer-parallel", "eager")
    need = latency.launches_for(H200, *pair, 8, 1.62)
    shape = replace(SHAPES["8b"], attention_launches=need)
    more = replace(H200, group_launches=H200.group_launches + need - 4)
    assert latency.project(more, pair[0], shape, *how)["draft_speedup"] == pytest.approx(1.62)
    host = latency.host_for(more, pair[0], shape, 8, 1.4)
    assert 0 < host < 5
    assert latency.project(replace(more, host_us=host), pair[0], shape, *how)["draft_speedup"] == pytest.approx(1.4)
    assert latency.host_for(H200, *pair, 8, 1.62) is None
    assert latency.host_for(H200, *pair, 8, 1.01) == 0
    assert latency.solve(lambda x: x * x, 2, 0, 2) == pytest.approx(2**0.5)


@pytest.mark.parametrize("layout", latency.LAYOUTS)
def test_solved_acceptance_length_and_room_give_the_speedup(layout):
    how = (SHAPES["70b"], SHAPES["1b"], 8, layout, "graphs")
    row = latency.project(H200, *how)
    tau = latency.tau_for(row, 4.17)
    assert latency.project(replace(H200, tau=tau), *how)["speedup"] == pytest.approx(4.17)
    room = latency.room_for(row, 2.0)
    assert row["tau"] * row["plain_us"] / (room + row["verify_us"]) == pytest.approx(2.0)
    assert latency.room_for(row, 100) < 0


def test_row_counts_limited_by_flops_are_refused():
    with pytest.raises(ValueError, match="129 rows: beyond 128 flops take longer"):
        latency.verify(H200, SHAPES["8b"], 129, 1)


@pytest.mark.parametrize("name", ["8B", "1B"])
def test_launches_equal_the_recorded_ones(tmp_path, name):
    """Of layers in sequence and of groups, at true widths, on fake tensors: seven a layer."""
    hidden, heads, kv_heads, inner = WIDTHS[name]
    attention = SHAPES[name.lower()].attention_launches
    assert attention + Inputs().mlp_launches == 7
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 6,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 2304,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with recording() as log, torch.inference_mode():
        made = checkpoint.read(str(tmp_path), dtype=torch.bfloat16, device="cpu", random=0)
        model = Model(made)
        cache = KVCache(model.config, 2304, dtype=torch.bfloat16, device="cpu")
        cache.bucket(2048)
        rows = cache.place(torch.tensor([2000]), 0, 0, 12)
        x = torch.empty(12, hidden, dtype=torch.bfloat16)

        def launches(schedule):
            parallel = LayerParallel(model, cache, schedule)
            parallel.forward(rows, x)  # creates the constants
            log.clear()
            parallel.forward(rows, x)
            return len(log)

        def verify():
            model.logits(forward(model, cache, *begin(model, cache, length, 1, 0, tokens)).final)

        def level():
            final = forward(model, cache, *begin(model, cache, length, 1, 1, tokens)).final
            grow(*head.ranked(final, 12, GREEDY, rows.positions), *tree, 12)

        i, m = Inputs(), replace(SHAPES[name.lower()], layers=6)
        length, tokens = torch.tensor([2000]), torch.zeros(1, 12, dtype=torch.int64)
        head, tree = (
            LMHead(model.head, model.norm, 1e-5),
            (*torch.zeros(2, 1, 24, dtype=torch.int64), torch.zeros(1, 24)),
        )
        for work, beyond in ((verify, i.verify_launches), (level, i.draft_launches)):
            work()  # creates the constants
            log.clear()
            work()
            assert len(log) == m.layers * (attention + i.mlp_launches) + beyond, work.__name__
        last_sum = 1  # the launch after the last layer
        for width in (2, 3, 4):
            found = launches(Schedule.parallel(6, width))
            cost = latency.layer_parallel(replace(i, parallel=width, bus=1.0), m, 12, 1)
            assert found == cost.launches - i.draft_launches + last_sum


# --- sources of the inputs, and outputs


def easyspec(parallel, length, **more):
    row = {"bench": "easyspec", "shape": "12x5", "calibrate": "every", "temperature": 0.0, "parallel": parallel}
    return {**row, "acceptance_length": length, "prompts": 3, "machine": "a processor", **more}


def test_inputs_come_from_rows_then_from_the_data_sheet():
    rows = [easyspec(1, 5.0), easyspec(4, 4.0), easyspec(4, 1.0, temperature=0.7), easyspec(4, 1.0, calibrate="never")]
    i, found = project.resolved(Inputs(), "a100", rows)
    assert (i.bandwidth, i.memory, i.bus, i.tau, i.keep) == (1.8, 80, 235, 5.0, 0.8)
    assert found["bandwidth"] == "data sheet x 0.9" and "12x5 at T 0, 3 prompts" in found["tau"]
    card = {"machine": "NVIDIA A100-SXM4-80GB", "bandwidth": 1.7e12, "date": "2"}
    newer = [{**card, "bandwidth": 1.6e12, "date": "3"}, card, {**card, "machine": "NVIDIA H200", "date": "4"}]
    i, found = project.resolved(Inputs(), "a100", [*rows, *newer])
    assert i.bandwidth == 1.6 and found["bandwidth"] == "measured on NVIDIA A100-SXM4-80GB"
    assert project.resolved(Inputs(), "h200", [easyspec(1, 4.0), easyspec(4, 5.0)])[0].keep == 1
    i, found = project.resolved(Inputs(bandwidth=3.0, tau=2.0, keep=0.9), "h200", [])
    assert (i.bandwidth, i.tau, i.keep, found) == (3.0, 2.0, 0.9, {})
    with pytest.raises(
        ValueError, match="no committed rows of trees 12x5 in groups of 4 at T 0; give --tau and --keep"
    ):
        project.resolved(Inputs(), "h200", [])
    with pytest.raises(ValueError, match="gpu 'b200' is not known; there are h200, a100"):
        project.resolved(Inputs(), "b200", rows)


def test_predicted_over_measured():
    card = {"machine": "NVIDIA H200", "device": "cuda", "dtype": "bfloat16", "temperature": 0.0}
    step = {**card, "bench": "decode", "kind": "ar", "shape": "8b", "draft": None, "way": "ar", "median": 0.005}
    chain = {**step, "kind": "round", "draft": "1b", "way": "over ar", "tokens_per_second": 300.0}
    chain |= {"acceptance_length": 3.0}
    e2e = {**card, "bench": "e2e", "way": "ar", "tokens_per_second": 200.0}
    kernel = {**card, "bench": "kernels", "way": "specker", "bandwidth": 4.3e12}
    passed = [{**step, "device": "cpu"}, {**step, "shape": "32b"}, {**step, "dtype": "float32"}, {"bench": "decode"}]
    passed += [{**e2e, "way": "draft tree 2x4"}, {**chain, "acceptance_length": None}, {**chain, "way": "outside"}]
    one, two, three = project.checked([kernel, step, chain, e2e, *passed])
    us = SHAPES["8b"].elements * 2 / 4.3e6 + 32 * 7 + 3 + 2
    assert one["predicted"] == pytest.approx(1e6 / us) and one["ratio"] == pytest.approx(1e6 / us / 200)
    draft = SHAPES["1b"].elements * 2 / 4.3e6 + 16 * 7 + 5
    assert two["predicted"] == pytest.approx(3e6 / (us + 5 * draft)) and two["model"] is True
    assert two["ratio"] == pytest.approx(two["predicted"] / 300)
    assert three["bench"] == "e2e" and three["predicted"] > one["predicted"]
    assert project.checked([]) == []


def test_the_best_layout_must_fit():
    row = {"ranks": 2, "layout": "a", "fits": True, "tokens_per_second": 1.0}
    rows = [row, {**row, "layout": "b", "tokens_per_second": 2.0}, {**row, "layout": "c", "tokens_per_second": 3.0}]
    rows[2]["fits"] = False
    assert project.best([*rows, {**row, "ranks": 1, "fits": False}]) == {2: "b"}


def test_every_output_says_that_it_is_a_model(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(project, "RESULT", tmp_path / "projection.md")
    flags = "--gpus a100 --pairs 70b+1b --ranks 1,8 --tau 4 --bandwidth 1.8"
    monkeypatch.setattr("sys.argv", ["project", *flags.split()])
    project.main()
    shown, page = capsys.readouterr().out, (tmp_path / "projection.md").read_text()
    rows = [json.loads(line) for line in (tmp_path / "projection.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * 2 * 3
    assert all(r["model"] and r["inputs"]["tau"] == 4 and r["inputs"]["bandwidth"] == 1.8 for r in rows)
    sections = re.findall(
        r"^## a100, 70b\+1b, (\w+)\n\nA model, not a measurement\. .*acceptance length 4.00", page, re.M
    )
    assert sections == ["eager", "graphs"]
    assert shown.count(project.WARNING) == page.count(project.WARNING) - 1 == 2
    assert "</svg>" in (tmp_path / "projection.svg").read_text()
    monkeypatch.setattr("sys.argv", ["project", "--gpus", "a100", "--ranks", "1", "--save", "False"])
    (tmp_path / "projection.md").unlink()
    project.main()
    assert "nothing is shared out" in capsys.readouterr().out and not (tmp_path / "projection.md").exists()
