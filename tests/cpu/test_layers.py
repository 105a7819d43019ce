"""The compiled CPU kernels against torch, and the promise that a row's bits do not depend on other rows."""

import os
import subprocess
import sys
import threading

import pytest
import torch
from make_checkpoint import make
from numba import njit
from torch.nn import functional as F

import specker
from specker.kernels import linear, native
from specker.kernels.linear import row_linear
from specker.runtime import loop
from specker.runtime.model.cache import KVCache
from specker.runtime.model.checkpoint import load
from specker.runtime.model.decoder import Final, Model, forward, prefill
from specker.runtime.strategies.easyspec import LayerParallel, Schedule

SIZES = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 96, "layers": 4}


@pytest.mark.parametrize(
    ("dtype", "half"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)], ids=str
)
@pytest.mark.parametrize("O", [1, 3, 46, 961])
def test_product(O, dtype, half):
    torch.manual_seed(0)
    w, every = torch.randn(O, 96).to(dtype), torch.randn(70, 96)
    if half:
        every = every.bfloat16().float()  # then rounding x loses nothing
    alone = torch.cat([native.product(row[None], w, half) for row in every])
    for T in (1, 2, 3, 5, 6, 7, 16, 70):
        y = native.product(every[:T], w, half)
        assert torch.equal(y, alone[:T]), "a row's bits depend on other rows"
    exact = every.double() @ w.double().T
    assert (alone - exact).abs().max() < 96 * 2**-24 * float((every.abs() @ w.float().abs().T).max())


@pytest.mark.parametrize("epilogue", ["none", "silu_mul"])
@pytest.mark.parametrize("bias", [False, True])
def test_row_linear_takes_float32_rows_beside_bfloat16_weights(epilogue, bias):
    torch.manual_seed(0)
    for w in (torch.randn(600, 512).bfloat16(), torch.randn(30, 33).bfloat16()):  # compiled; torch's own
        x, b = torch.randn(5, w.shape[1]), torch.randn(len(w)) if bias else None
        y = F.linear(x, w.float(), b)
        if epilogue == "silu_mul":
            gate, up = y.chunk(2, dim=-1)
            y = F.silu(gate) * up
        got = row_linear(x, w, b, epilogue)
        assert got.dtype == torch.float32 and (got - y).abs().max() < 0.02 * y.abs().max()


def test_a_cpu_without_bfloat16_products_rounds_only_the_weight(monkeypatch):
    w, x = torch.randn(30, 33).bfloat16(), torch.randn(5, 33)
    monkeypatch.setattr(linear, "multiplies_bfloat16", lambda: False)
    torch.testing.assert_close(row_linear(x, w), x @ w.float().T)
    monkeypatch.setattr(linear, "multiplies_bfloat16", lambda: True)
    assert (row_linear(x, w) - x @ w.float().T).abs().max() > 1e-3


def test_it_tells_once_when_something_is_compiled():
    told = []
    with native.on_compile(lambda: told.append(1)):
        for _ in range(2):
            njit(lambda x: x + 1)(1)
    njit(lambda x: x + 2)(1)
    assert told == [1]


def model_of(folder, arch="llama", dtype=torch.float32, quantize=None, **sizes):
    checkpoint = load(make(folder, arch, **{**SIZES, **sizes}), dtype=dtype, device="cpu", quantize=quantize)
    model = Model(checkpoint)
    assert model.stack is not None, "the compiled kernels decline these sizes"
    return model


def cache_of(model, sequences=1):
    cache = KVCache(model.config, 128, dtype=torch.float32, device="cpu", page_size=16, sequences=sequences)
    cache.k.zero_(), cache.v.zero_()
    for slot in range(sequences if sequences > 1 else 0):
        cache.take(slot, 100)
    return cache


def both(model, call, sequences=1, texts=((1, 2, 3, 4, 5),)):
    """(result, K/V) of `call(cache)` by the compiled kernels and by run_layers."""
    found = []
    for stack in (model.stack, None):
        cache, kept = cache_of(model, sequences), model.stack
        for slot, text in enumerate(texts):
            prefill(model, cache, list(text), slot=slot)
        model.stack = stack
        with torch.inference_mode():
            found.append((call(cache), cache.k.clone(), cache.v.clone()))
        model.stack = kept
    return found


def near(a, b):
    return (a - b).abs().max() <= 2e-5 * b.abs().max()


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "llama-bias"])
def test_layers_are_those_of_run_layers(tmp_path, arch):
    """Every architecture: biases, norms of heads, grouped queries; a chain of rows over several pages, taps."""
    options = {"arch": "llama", "attention_bias": True, "mlp_bias": True} if arch == "llama-bias" else {"arch": arch}
    model = model_of(tmp_path, **options)
    text = tuple(range(1, 40))

    def call(cache):
        rows = cache.after([len(text)], [7])
        return forward(model, cache, rows, model.embed_tokens(torch.arange(7)), taps=(0, 2, 4))

    (got, *kv), (want, *kv_) = both(model, call, texts=(text,))
    assert near(got.hidden, want.hidden) and got.taps.keys() == want.taps.keys() == {0, 2, 4}
    assert all(near(got.taps[n], want.taps[n]) for n in got.taps)
    assert all(near(a, b) for a, b in zip(kv, kv_, strict=True))


def test_a_tree_and_a_batch_of_unequal_sequences(tmp_path):
    model = model_of(tmp_path)
    texts = tuple(tuple(range(1, n)) for n in (4, 40, 18))
    parents = torch.tensor([[-1, 0, 0, 1, 2]] * 3)

    def call(cache):
        lengths = torch.tensor([len(t) for t in texts])
        rows = cache.place(lengths, 0, 0, 5, parents)
        return forward(model, cache, rows, model.embed_tokens(torch.arange(15))).hidden

    (got, *_), (want, *_) = both(model, call, 3, texts)
    assert near(got, want)


def test_slices_of_layers_and_groups(tmp_path):
    """DEL runs the layers in two parts, EasySpec several side by side."""
    model = model_of(tmp_path, layers=6)

    def parts(cache):
        rows, hidden = cache.after([5], [3]), model.embed_tokens(torch.arange(3))
        return forward(model, cache, rows, forward(model, cache, rows, hidden, slice(2)).hidden, slice(2, None)).hidden

    def groups(cache):
        parallel = LayerParallel(model, cache, Schedule(((0,), (1, 2, 3), (4,), (5,))))
        return parallel.forward(cache.after([5], [3]), model.embed_tokens(torch.arange(3))).hidden

    for call in (parts, groups):
        (got, *kv), (want, *kv_) = both(model, call)
        assert near(got, want) and all(near(a, b) for a, b in zip(kv, kv_, strict=True))


FORMS = [(dtype, kind) for dtype in (torch.float32, torch.bfloat16) for kind in (None, "int8", "int4", "fp8")]


@pytest.mark.parametrize(("dtype", "quantize"), FORMS, ids=str)
def test_a_row_has_the_same_bits_alone_in_a_chain_and_in_a_batch(tmp_path, dtype, quantize):
    """Plain decoding's rows, one at a time, against a chain that verifies them, alone and beside another text."""
    model, text, more = model_of(tmp_path, "llama", dtype, quantize), list(range(1, 38)), [5, 9, 2, 7, 7, 1]

    def embedded(ids):
        return model.embed_tokens(torch.tensor(ids))

    with torch.inference_mode():
        cache, alone = cache_of(model), []
        prefill(model, cache, text)
        for n, token in enumerate(more):
            alone.append(forward(model, cache, cache.after([len(text) + n], [1]), embedded([token])).hidden)
        alone = torch.cat(alone)
        cache = cache_of(model)
        prefill(model, cache, text)
        chain = forward(model, cache, cache.after([len(text)], [len(more)]), embedded(more)).hidden
        assert torch.equal(chain, alone)
        cache = cache_of(model, 2)
        prefill(model, cache, text, slot=1)
        prefill(model, cache, [3, 4], slot=0)
        rows = cache.after([2, len(text)], [3, len(more)])
        beside = forward(model, cache, rows, embedded([8, 8, 8, *more])).hidden[3:]
        assert torch.equal(beside, alone)
        assert torch.equal(model.logits(Final(chain)), torch.cat([model.logits(Final(row[None])) for row in alone]))


@pytest.mark.parametrize(("dtype", "quantize"), FORMS, ids=str)
@pytest.mark.parametrize("length", [3, 12, 37])  # the windows lie in one page, or across the end of one
def test_a_path_in_a_tree_has_the_bits_of_a_chain(tmp_path, dtype, quantize, length):
    model, text = model_of(tmp_path, "llama", dtype, quantize), list(range(1, length + 1))
    parents, path = [-1, 0, 0, 0, 2, 2, 1, 5, 5, 4], [0, 2, 5, 8]
    tokens = torch.tensor([5, 9, 2, 7, 7, 1, 3, 8, 4, 6])
    with torch.inference_mode():
        cache = cache_of(model, 2)
        prefill(model, cache, text, slot=0), prefill(model, cache, text, slot=1)
        rows = cache.place(torch.tensor([length]), 0, 0, 10, torch.tensor([parents]))
        tree = forward(model, cache, rows, model.embed_tokens(tokens)).hidden[path]
        cache, alone = cache_of(model), []
        prefill(model, cache, text)
        for n, node in enumerate(path):
            one = model.embed_tokens(tokens[node : node + 1])
            alone.append(forward(model, cache, cache.after([length + n], [1]), one).hidden)
        assert torch.equal(tree, torch.cat(alone))


def test_one_thread_gives_the_same_bits(tmp_path):
    model = model_of(tmp_path)

    def call(cache):
        return forward(model, cache, cache.after([0], [4]), model.embed_tokens(torch.arange(4))).hidden

    found, before = [], torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            found.append(both(model, call, texts=((),))[0][0])  # no prefill: torch's products depend on its threads
        finally:
            torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_torch_runs_one_thread_while_rounds_run(tmp_path, monkeypatch):
    """Its others would spin on the team's cores. The caller's setting returns after every round, failed ones too."""
    target = str(make(tmp_path / "target", "llama", **SIZES))
    engine = specker.load(target, strategy="lookup", dtype="float32")
    seen, before, launch = [], torch.get_num_threads(), loop.launch

    def watched(*args):
        seen.append((torch.get_num_threads(), native.team().size))
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
        assert torch.get_num_threads() == 2 and native.team().size == 2
    finally:
        torch.set_num_threads(before)


def test_large_batches_keep_torchs_threads(tmp_path, monkeypatch):
    """Their passes have more rows than the compiled kernels take, so torch multiplies."""
    engine = specker.load(str(make(tmp_path, "llama", **SIZES)), strategy="lookup", dtype="float32", batch_size=64)
    seen, launch = set(), loop.launch
    monkeypatch.setattr(loop, "launch", lambda *args: (seen.add(torch.get_num_threads()), launch(*args))[1])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        engine.generate([1, 2, 3], 4)
    finally:
        torch.set_num_threads(before)
    assert seen == {2}


def test_sizes_that_the_kernels_decline(tmp_path):
    for sizes in ({"head_dim": 16}, {"hidden": 40}, {"ffn": 100}):
        checkpoint = load(make(tmp_path / str(sizes), "llama", **{**SIZES, **sizes}), dtype=torch.float32, device="cpu")
        assert Model(checkpoint).stack is None
    wide = load(make(tmp_path / "wide", "llama", **SIZES), dtype=torch.float64, device="cpu")
    assert Model(wide).stack is None


def test_threads_may_call_at_once():
    """Two Python threads share the team without mixing their results."""
    torch.manual_seed(0)
    w, xs = torch.randn(999, 64), [torch.randn(4, 64) for _ in range(2)]
    want = [native.product(x, w) for x in xs]
    wrong = []

    def work(n):
        for _ in range(200):
            if not torch.equal(native.product(xs[n], w), want[n]):
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
from specker.kernels import native
torch.set_num_threads(2)
w, x = torch.randn(300, 64), torch.randn(2, 64)
want = native.product(x, w)
pid = os.fork()
if pid == 0:
    os._exit(0 if torch.equal(native.product(x, w), want) else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_forked_process_has_a_team_of_its_own():
    assert subprocess.run([sys.executable, "-c", FORK], timeout=120, check=False).returncode == 0


BOUND = """
import os, torch
torch.set_num_threads(2)
torch.randn(300, 300) @ torch.randn(300, 300)  # starts OpenMP's threads
from specker.kernels import native
native.product(torch.randn(1, 64), torch.randn(300, 64))
masks = [os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")]
assert os.sched_getaffinity(0) == {min(set().union(*masks))}, "the main thread is not bound"
assert set().union(*masks) in masks, masks
"""


@pytest.mark.skipif(len(getattr(os, "sched_getaffinity", lambda _: "1")(0)) < 2, reason="needs two CPUs")
def test_a_team_leaves_the_cpu_that_openmp_bound_its_caller_to():
    env = {**os.environ, "OMP_PROC_BIND": "true", "OMP_PLACES": "cores", "OMP_NUM_THREADS": "2"}
    assert subprocess.run([sys.executable, "-c", BOUND], timeout=120, check=False, env=env).returncode == 0
