"""The team of threads: torch's own meanwhile, several callers, a forked process, OpenMP's bound threads."""

import os
import subprocess
import sys
import threading

import pytest
import torch
import warm
from make_checkpoint import make

import specker
from specker import cpu
from specker.runtime import loop

SIZES = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 96, "layers": 4}


def test_torch_runs_one_thread_while_rounds_run(tmp_path, monkeypatch):
    """Its others would spin on the team's cores. The caller's setting returns after every round, failed ones too."""
    target = str(make(tmp_path / "target", "llama", **SIZES))
    engine = specker.load(target, strategy="lookup", dtype="float32")
    seen, before, launch = [], torch.get_num_threads(), loop.launch

    def watched(*args):
        seen.append((torch.get_num_threads(), cpu.team().size))
        return launch(*args)

    monkeypatch.setattr(loop, "launch", watched)
    torch.set_num_threads(2)
    try:
        for _ in engine.stream([1, 2, 3], 4):
            assert torch.get_num_threads() == 2
        assert seen and set(seen) == {(1, 2)}
        monkeypatch.setattr(loop, "launch", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.generate([1, 2, 3], 4)
        assert torch.get_num_threads() == 2 and cpu.team().size == 2
    finally:
        torch.set_num_threads(before)


def test_large_batches_run_in_the_team_too(tmp_path, monkeypatch):
    """Their passes have more rows than the compiled layers take at once, so they run in blocks."""
    engine = specker.load(str(make(tmp_path, "llama", **SIZES)), strategy="lookup", dtype="float32", batch_size=64)
    seen, launch = set(), loop.launch
    monkeypatch.setattr(loop, "launch", lambda *args: (seen.add(torch.get_num_threads()), launch(*args))[1])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        engine.generate([1, 2, 3], 4)
    finally:
        torch.set_num_threads(before)
    assert seen == {1}


def test_threads_may_call_at_once():
    """Two Python threads share the team without mixing their results."""
    torch.manual_seed(0)
    w, xs = torch.randn(999, 64), [torch.randn(4, 64) for _ in range(2)]
    want = [cpu.product(x, w) for x in xs]
    wrong = []

    def work(n):
        for _ in range(200):
            if not torch.equal(cpu.product(xs[n], w), want[n]):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "the team is stuck"
    assert not wrong


FORK = """
import os, torch
from specker import cpu
torch.set_num_threads(2)
w, x = torch.randn(300, 64), torch.randn(2, 64)
want = cpu.product(x, w)
pid = os.fork()
if pid == 0:
    os._exit(0 if torch.equal(cpu.product(x, w), want) else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_forked_process_has_a_team_of_its_own():
    assert warm.run("-c", FORK).returncode == 0


BOUND = """
import os, torch
torch.set_num_threads(2)
torch.randn(300, 300) @ torch.randn(300, 300)  # starts OpenMP's threads
from specker import cpu
cpu.product(torch.randn(1, 64), torch.randn(300, 64))
masks = [os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")]
assert os.sched_getaffinity(0) == {min(set().union(*masks))}, "the main thread is not bound"
assert set().union(*masks) in masks, masks
"""


@pytest.mark.skipif(len(getattr(os, "sched_getaffinity", lambda _: "1")(0)) < 2, reason="needs two CPUs")
def test_a_team_leaves_the_cpu_that_openmp_bound_its_caller_to():
    env = {**os.environ, "OMP_PROC_BIND": "true", "OMP_PLACES": "cores", "OMP_NUM_THREADS": "2"}
    assert subprocess.run([sys.executable, "-c", BOUND], timeout=120, check=False, env=env).returncode == 0
