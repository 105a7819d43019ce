"""Graphs: run, capture, replay, and what follows a capture that fails. CUDA is a stand-in."""

import contextlib

import pytest
import torch

from specker.runtime.graphs import Graphs


class Recorded:
    """Stands in for torch.cuda.CUDAGraph: counts replays."""

    def __init__(self):
        self.replays = 0

    def replay(self):
        self.replays += 1

    def pool(self):
        return "pool"


@pytest.fixture
def cuda(monkeypatch):
    """The pools that captures were given."""
    pools = []

    @contextlib.contextmanager
    def graph(_, pool):
        pools.append(pool)
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    return pools


def test_run_then_capture_then_replay(cuda):
    graphs, calls = Graphs(True), []
    for _ in range(4):
        graphs.run("a", lambda: calls.append("a"))
        graphs.run(None, lambda: calls.append("free"))
    assert calls == ["a", "free", "a", "free", "free", "free"] and graphs.captured["a"].replays == 3
    for _ in range(2):
        graphs.run("b", lambda: None)
    assert cuda == [None, "pool"], "all graphs share a pool"


def test_work_that_cannot_be_captured_is_launched(cuda, caplog):
    graphs, calls, capturing = Graphs(True), [], iter((False, True, False, False))

    def work():
        calls.append("work")
        if next(capturing):
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    graphs.run("a", work)
    graphs.run("a", work)
    [record] = caplog.records
    assert record.name.startswith("specker.") and record.levelname == "WARNING"
    assert record.getMessage().endswith("one by one (a): operation not permitted when stream is capturing")
    graphs.run("a", work)
    assert len(caplog.records) == 1  # said once
    assert calls == ["work"] * 4 and not graphs.captured  # the second run: the capture, then the launch


def test_a_mistake_in_the_work_is_not_hidden(cuda):
    graphs = Graphs(True)

    def work():
        raise TypeError("wrong")

    for _ in range(2):
        graphs._seen.add("a")
        with pytest.raises(TypeError):
            graphs.run("a", work)
