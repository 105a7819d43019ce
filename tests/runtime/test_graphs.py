"""Graphs: run, capture, replay, and what follows a capture that fails. CUDA is a stand-in (support/fake_cuda.py)."""

import gc
import threading
import weakref

import pytest
import torch
from fake_cuda import Again, FakeCuda
from make_checkpoint import make

import specker
from specker.model import prefill
from specker.runtime import loop, prompts
from specker.runtime.round import graphs as module
from specker.runtime.round.graphs import FAILURES, Graphs
from specker.runtime.strategies.dynamic_exit import USUAL, eligible_layers

GPU = torch.device("cuda", 0)


@pytest.fixture
def cuda(monkeypatch):
    return FakeCuda().install(monkeypatch)


def test_run_then_capture_then_replay(cuda):
    graphs, calls = Graphs(GPU), []
    for _ in range(4):
        graphs.run("a", lambda: calls.append("a"))
        graphs.run(None, lambda: calls.append("free"))
    assert calls == ["a", "free", "a", "free", "free", "free"] and graphs.captured["a"].replays == 3
    for _ in range(2):
        graphs.run("b", lambda: None)
    assert cuda.pools == [1, 1], "all graphs share a pool"


def test_without_a_device_nothing_is_captured():
    graphs, calls = Graphs(), []
    for _ in range(3):
        graphs.run("a", lambda: calls.append("a"))
    assert len(calls) == 3 and not graphs.captured


def failing(cuda, graphs, key="a"):
    """Run work whose capture is invalidated. Returns how often it ran."""
    calls = []

    def work():
        calls.append(key)
        if cuda.recording:
            cuda.invalidate()

    for _ in range(3):
        graphs.run(key, work)
    return len(calls)


def test_after_a_failed_capture_the_work_is_launched_and_other_keys_are_captured(cuda, caplog):
    graphs, outside = Graphs(GPU), cuda.stream
    assert failing(cuda, graphs) == 4  # once, the capture, the launch in its place, and once more
    [record] = caplog.records
    assert record.name.startswith("specker.") and record.levelname == "WARNING"
    assert record.getMessage().endswith("one by one (a): operation not permitted when stream is capturing")
    assert not graphs.captured and not cuda.recording and cuda.stream == outside
    for _ in range(3):
        graphs.run("b", lambda: None)
    assert graphs.captured["b"].replays == 2 and cuda.stream == outside
    assert cuda.pools == [1, 2], "the pool of a failed capture is not used again"


def test_a_capture_that_cannot_begin_leaves_no_trace(cuda, monkeypatch, caplog):
    graphs, outside = Graphs(GPU), cuda.stream
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 7)
    cuda.recording.add(7)  # another library's capture failed
    for _ in range(2):
        graphs.run("a", lambda: None)
    assert "already recording" in caplog.text and cuda.stream == outside and not cuda.recording


def test_after_two_failures_nothing_more_is_captured(cuda, caplog):
    graphs = Graphs(GPU)
    for key in range(FAILURES):
        failing(cuda, graphs, key)
    assert [r.getMessage() for r in caplog.records][-1].startswith("2 captures failed: nothing more is captured")
    calls = []
    for _ in range(3):
        graphs.run("c", lambda: calls.append("c"))
    assert len(calls) == 3 and not graphs.captured


def test_nothing_is_collected_during_a_capture(cuda, caplog, often_collected):
    """A graph that dies in a capture invalidates it, and so a cycle that holds one must live until it has ended."""

    class Dead:
        def __init__(self):
            self.own = self

        def __del__(self):
            died.append(bool(cuda.recording))
            cuda.invalid |= bool(cuda.recording)

    def work():
        if cuda.recording:
            for _ in range(3):
                Dead()
            assert len([[] for _ in range(100)]) == 100  # each allocation may collect

    died, graphs = [], Graphs(GPU)
    for _ in range(2):
        graphs.run("a", work)
    assert graphs.captured and not caplog.records and gc.isenabled()
    gc.collect()
    assert died == [False] * 3
    graphs.run("b", lambda: None)
    with pytest.raises(TypeError):
        graphs.run("b", lambda: int(None))
    assert gc.isenabled()


@pytest.fixture
def often_collected():
    usual = gc.get_threshold()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*usual)


@pytest.mark.parametrize("strategy", ["draft", "del", "lookup"])
def test_a_dropped_engine_is_freed_at_once(pair, strategy):
    """Without the cyclic collector, which might run in a later engine's capture."""
    engine = specker.load(*pair[: 1 + (strategy == "draft")], strategy=strategy, device="cpu", dtype="float32")
    engine.generate([5, 9], 4)
    gc.collect()
    gc.disable()
    try:
        parts = [weakref.ref(part) for part in (engine, engine.loop, engine.loop.graphs, engine.drafter, engine.cache)]
        del engine
        assert [part() for part in parts] == [None] * len(parts)
    finally:
        gc.enable()


@pytest.mark.parametrize("error", [TypeError, KeyboardInterrupt])
@pytest.mark.parametrize("invalid", [False, True])
def test_another_error_of_the_work_is_not_hidden(cuda, error, invalid):
    graphs, outside = Graphs(GPU), cuda.stream
    graphs.run("a", lambda: None)

    def work():
        cuda.invalid = invalid
        raise error("wrong")

    with pytest.raises(error):
        graphs.run("a", work)
    assert cuda.stream == outside and not cuda.recording and not graphs.captured


def test_late_captures_are_counted_and_bounded(cuda, monkeypatch):
    monkeypatch.setattr(module, "LATE", 2)
    graphs, calls = Graphs(GPU), []
    for key in range(2):
        for _ in range(2):
            graphs.run(key, lambda: None)
    assert graphs.late == 0
    graphs.warmed()
    for key in range(2, 6):
        for _ in range(3):
            graphs.run(key, lambda: calls.append(0))
    assert graphs.late == 2 and len(graphs.captured) == 4
    assert len(calls) == 2 * 2 + 2 * 3


@pytest.mark.parametrize("strategy", ["draft", "del"])
def test_a_worker_thread_uses_the_engines_own_device(cuda, monkeypatch, strategy):
    """Rounds, captures, copies and results of an engine on cuda:1, in a thread whose current device is cuda:0."""
    engine = specker.load(strategy=strategy, policy="fixed", device="cpu", dtype="float64", graphs="on")
    plain = engine.generate("def f(x):", 24)
    engine.loop.graphs, engine.session.device = Again(torch.device("cuda", 1)), torch.device("cuda", 1)
    for name in ("launch", "send", "collect"):
        work = getattr(loop, name)
        monkeypatch.setattr(loop, name, lambda *args, name=name, work=work: (cuda.note(name), work(*args))[1])
    out = []

    def decode():
        out.append(engine.generate("def f(x):", 24))
        out.append(cuda.device)

    thread = threading.Thread(target=decode)
    thread.start()
    thread.join()
    assert out[0].tokens == plain.tokens and out[1] == 0
    assert {"launch", "send", "collect", "capture", "replay", "event", "record"} <= {what for what, _ in cuda.seen}
    assert {device for _, device in cuda.seen} == {1}


def test_usual_early_exits_are_captured_in_the_warm_up_and_later_captures_counted(cuda, tmp_path):
    target = make(tmp_path / "target", layers=4, vocab=64)
    # By bytes: by measured seconds, drafts would be as long as the clock says.
    engine = specker.load(target, strategy="del", device="cpu", dtype="float64", graphs="on", exit_cost="bytes")
    graphs = engine.loop.graphs = Again(GPU)
    engine.warmup()
    assert graphs.late == 0
    verified = {(key[0][3], key[0][1]) for key in graphs.captured if key[0][0] == "verify" and key[0][3]}
    exits = {exit for exit, _ in verified}
    assert verified >= {(exit, n) for exit in exits for n in range(1, USUAL + 1)}  # and what is timed
    assert exits == set(eligible_layers(engine.target.config.num_layers, engine.policies.head_cost))
    engine.loop.history.clear()  # of costs, by which this policy would rest
    out = [engine.generate([n, *range(9)], 40) for n in range(3)]
    assert sum(each.stats.captures for each in out) == graphs.late > 0
    assert all(each.stats.to_json().get("captures", 0) == each.stats.captures for each in out)


ADJUSTED = {
    "presence": {"presence_penalty": 1.5},
    "as Qwen3.5 recommends": {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "presence_penalty": 1.5},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "biases": {"logit_bias": {5: 4.0}, "repetition_penalty": 1.2},
    "min_tokens": {"min_tokens": 5, "stop_ids": [3, 7]},
}


@pytest.mark.parametrize("strategy", ["ar", "draft"])
def test_no_round_with_penalties_or_a_least_number_of_tokens_is_captured_late(cuda, pair, strategy):
    engine = specker.load(
        *pair[: 1 + (strategy == "draft")], strategy=strategy, device="cpu", dtype="float64", graphs="on", batch_size=2
    )
    graphs = engine.loop.graphs = Again(GPU)
    engine.warmup()
    for how in ADJUSTED.values():
        alone = engine.generate([5, 9], 9, **how)
        several = engine.generate([[5, 9], [7, 1, 3]], [9, 6], **how)
        assert several[0].tokens == alone.tokens and alone.stats.captures == several[0].stats.captures == 0
    for kind in ((True, False), (False, True)):  # penalties, and a text that may not end yet
        assert any(key[0][0] == "accept" and key[0][3] == ("greedy", *kind) for key in graphs.captured)
    count = len(graphs.captured)
    assert graphs.to_json() == {"captured": count, "late": 0, "seconds": graphs.seconds, "bytes": count << 20}
    assert graphs.seconds > 0


def test_long_texts_in_a_batch_that_is_not_full_are_captured_on_demand(cuda, tmp_path):
    """Their kernels are compiled in the warm-up, and the first of their rounds captures."""
    target = make(tmp_path / "target", layers=1, vocab=64, max_context=1200)
    engine = specker.load(target, strategy="ar", device="cpu", dtype="float64", graphs="on", batch_size=4)
    graphs = engine.loop.graphs = Again(GPU)
    engine.warmup()
    short, long = engine.loop.batches.buckets

    def captured(name):
        return {key[1:3] for key in graphs.captured if key[0][0] == name}

    assert captured("verify") == {(1, short), (2, short), (4, short), (1, long), (4, long)}
    assert captured("accept") == {(1, 0), (2, 0), (4, 0)}
    assert engine.generate([0] * 1100, 3).stats.captures == 0
    assert [out.stats.captures for out in engine.generate([[n] * 1100 for n in range(2)], 3)] == [1, 1]
    assert (2, long) in captured("verify") and graphs.late == 1


def test_prompts_of_every_length_are_prefilled_in_the_warm_up(cuda, tmp_path, monkeypatch):
    """In steps of 64 rows, in long chunks of 256, in target and draft: torch loads kernels of products by the number
    of rows."""
    seen, chunk = set(), prefill.prefill_chunk

    def counted(model, cache, part, *rest):
        seen.add((model, -(-len(part.tokens) // 64), cache.exact_len[part.slot] > 0))
        return chunk(model, cache, part, *rest)

    for reader in (prefill, prompts):
        monkeypatch.setattr(reader, "prefill_chunk", counted)
    how = {"policy": "fixed", "draft_tokens": 2}
    target, draft = (make(tmp_path / name, max_context=4200, layers=1) for name in ("target", "draft"))
    engine = specker.load(target, draft, strategy="draft", device="cpu", dtype="float64", graphs="on", **how)
    engine.loop.graphs = Again(GPU)
    engine.warmup()
    for model in (engine.model, engine.drafter.model):
        assert {steps for of, steps, later in seen if of is model and not later} >= set(range(1, 9))
        assert {steps for of, steps, later in seen if of is model and later} >= {4, *range(12, 33, 4)}
