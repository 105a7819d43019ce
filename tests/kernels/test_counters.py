"""The counters of arrivals: who shares them, and how they recover from a launch that was aborted."""

import importlib

import pytest
import torch
from formulas import randn
from test_kv_project import SIZES, fresh, inputs
from test_tree_attention import op as attention
from test_tree_attention import ragged
from torch._subclasses.fake_tensor import FakeTensorMode

from specker.kernels.variant import COUNTERS, count_in, counters, reset_counters
from specker.runtime.round.graphs import Graphs

CPU = torch.device("cpu")
project = importlib.import_module("specker.kernels.kv_project")
sample = importlib.import_module("specker.kernels.sample_rows")
topk = importlib.import_module("specker.kernels.vocab_topk")
clusters = importlib.import_module("specker.kernels.cluster_topk")


def kv_project():
    return project.launch(*fresh(inputs(3, SIZES[3])))  # three splits of K


def tree_attention():
    args, *_ = ragged(1, torch.float32, lengths=((300, 3),))
    return torch.cat([x.flatten() for x in attention.launch(**args)])


def sample_rows():
    return sample.launch(3 * randn(4, 5000), 1.0, 40, 0.9, 5, torch.arange(4))


def vocab_topk():
    return topk.launch(randn(70, 8).float(), randn(300, 8, seed=1).float(), None, 1, None, None, False)[1]


def cluster_topk():
    parts = (randn(n, 8, seed=seed).float() for seed, n in enumerate((3, 140, 70)))
    return clusters.launch(*parts, torch.arange(140).view(70, 2), 4, 1, None, None, False)[1]


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("launched", [kv_project, tree_attention, sample_rows, vocab_topk, cluster_topk])
def test_counts_that_an_aborted_launch_left_are_zeroed(poisoned, launched):
    """Without that, this launch and the next ones are wrong: programs take another one for the last."""
    want = launched()
    assert not want.isnan().any() and not counters(CPU, 1).any()
    counters(CPU, 1).fill_(1)
    assert not any(torch.equal(launched(), want) for _ in range(2))
    reset_counters(CPU)
    assert all(torch.equal(launched(), want) for _ in range(2))
    assert not counters(CPU, 1).any()


def test_every_engine_has_counters_of_its_own():
    """Two engines may run on two streams. A launch outside of their rounds counts elsewhere."""
    seen, engines = [], (Graphs(), Graphs())
    for graphs in (*engines, *engines):
        graphs.run("a", lambda: seen.append(counters(CPU, 8).data_ptr()))
    assert seen[0] == seen[2] != seen[1] == seen[3]
    assert counters(CPU, 8).data_ptr() not in seen
    with pytest.raises(ZeroDivisionError):
        engines[0].run("b", lambda: 1 / 0)
    assert counters(CPU, 8).data_ptr() not in seen, "a failure leaves the engine's counters in use"
    engines[0].counters.block(CPU)[7] = 1
    engines[1].counters.check()
    with pytest.raises(RuntimeError, match="1 arrival counters on cpu are not zero after a round: a kernel was"):
        engines[0].counters.check()
    engines[0].counters.reset()
    engines[0].counters.check()


def test_captures(monkeypatch):
    """A capture uses what the uncaptured run before it filled: the engine's counters, or the device's for graphs of
    other programs. Where there are none, it fills zeros for each launch."""
    cuda, capturing = torch.device("cuda:0"), [False]
    monkeypatch.setattr("specker.kernels.variant._shared", {})
    monkeypatch.setattr("specker.kernels.variant._stream", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    with FakeTensorMode():
        capturing[0] = True
        assert counters(cuda, 8) is not counters(cuda, 8) and len(counters(cuda, 8)) == 8
        capturing[0] = False
        eager = counters(cuda, 8)
        capturing[0] = True
        assert counters(cuda, 8) is counters(cuda, 9) is not eager and len(counters(cuda, 8)) == COUNTERS
        capturing[0] = False
        engine, seen = Graphs(), []
        for capturing[0] in (False, True):
            engine.run("a", lambda: seen.append(counters(cuda, 8)))
        assert seen[0] is seen[1] and seen[0] is engine.counters.block(cuda)
        assert count_in(None) is None
