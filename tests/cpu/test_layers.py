"""The compiled layers against run_layers, and the promise that a row's bits do not depend on other rows."""

import itertools
from dataclasses import replace

import cases
import pytest
import torch
from make_checkpoint import (
    FULL,
    GEMMA3,
    GEMMA4,
    GEMMA4_ALL,
    GEMMA4_PLE,
    GEMMA4_SHARED,
    GEMMA4_WIDE,
    GEMMA4_WIDE_PLE,
    GPT_OSS,
    QWEN3_5,
    QWEN3_MOE,
    SLIDING,
    make,
)
from stacks import SIZES, cache_of, checked_chain, model_of, near

import specker
from specker.checkpoints.checkpoint import read
from specker.cpu import Packed, library
from specker.model.cache import KVCache
from specker.model.decoder import Final, Model, forward
from specker.model.prefill import prefill
from specker.runtime.strategies.easyspec.layer_groups import LayerParallel, Schedule

MATRICES = "qkv", "o", "gate_up", "down"
KINDS = {
    "llama": {},
    "qwen2": {"arch": "qwen2"},
    "qwen3": {"arch": "qwen3"},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "gated": QWEN3_5 | {"attention_bias": True},
    "geglu": {"hidden_act": "gelu_pytorch_tanh", "mlp_bias": True},
    "gelu": {"arch": "qwen2", "hidden_act": "gelu"},
    "gemma3": GEMMA3 | {"layer_types": [SLIDING, FULL, FULL, SLIDING]},
    "olmo2": {"arch": "olmo2", "attention_bias": True},
    "smollm3": {"arch": "smollm3"},
    "experts": QWEN3_MOE | {"mlp_only_layers": [2]},
    "gpt-oss": GPT_OSS | {"layer_types": [SLIDING, FULL, FULL, SLIDING]},
    "gemma4": GEMMA4 | GEMMA4_WIDE,
    "gemma4-full-first": GEMMA4 | GEMMA4_WIDE | {"layer_types": [FULL, SLIDING, SLIDING, FULL]},
    "gemma4-k-is-v": GEMMA4_SHARED | GEMMA4_WIDE | {"attention_k_eq_v": True, "num_kv_shared_layers": 2},
    "gemma4-heads-alike": GEMMA4_SHARED | {"global_head_dim": 32},
    "gemma4-e2b": GEMMA4_PLE | GEMMA4_WIDE_PLE,
    "gemma4-all": GEMMA4_ALL | GEMMA4_WIDE_PLE,
}


def both(model, call, sequences=1, texts=((1, 2, 3, 4, 5),)):
    """(result, K/V) of `call(cache)` by the compiled kernels and by run_layers."""
    found = []
    for stack in (model.stack, None):
        cache, kept = cache_of(model, sequences), model.stack
        for slot, text in enumerate(texts):
            prefill(model, cache, list(text), slot=slot)
        model.stack = stack
        with torch.inference_mode():
            found.append((call(cache), *[kv.clone() for kv in cache.kv]))
        model.stack = kept
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_those_of_run_layers(tmp_path, kind):
    """Every kind of layer; a chain of rows over several pages, taps."""
    model = model_of(tmp_path, **KINDS[kind])
    text = tuple(range(1, 40))

    def call(cache):
        rows = cache.after([len(text)], [7])
        return forward(model, cache, rows, model.embed_tokens(torch.arange(7)), aux_layers=(0, 2, 4))

    (got, *kv), (want, *kv_) = both(model, call, texts=(text,))
    assert near(got.hidden, want.hidden) and got.aux_hidden_states.keys() == want.aux_hidden_states.keys() == {0, 2, 4}
    assert all(near(got.aux_hidden_states[n], want.aux_hidden_states[n]) for n in got.aux_hidden_states)
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


@pytest.mark.parametrize("window", [1, 4, 20, 33])
def test_windows_are_those_of_run_layers(tmp_path, window):
    """Three layers of four see the last columns of a prompt, of a chain and of a tree, whose rows see few of its own. A
    row's bits do not depend on the rows beside it."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    windows = {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}
    model = model_of(tmp_path, "qwen3", **windows)
    assert model.config.layer.sliding_windows == (window, 0, window, window)
    texts = tuple(tuple(range(1, n)) for n in (4, 40, 18))
    parents = torch.tensor([[-1, 0, 0, 1, 2, 4, 3]] * 3)

    def tree(cache):
        rows = cache.place(torch.tensor([len(t) for t in texts]), 0, 0, 7, parents)
        return forward(model, cache, rows, model.embed_tokens(torch.arange(21))).hidden

    def chain(cache):
        rows = cache.after([len(t) for t in texts], [20, 3, 7])
        return forward(model, cache, rows, model.embed_tokens(torch.arange(30))).hidden

    for call in (tree, chain):
        (got, *kv), (want, *kv_) = both(model, call, 3, texts)
        assert near(got, want) and all(near(a, b) for a, b in zip(kv, kv_, strict=True))
    cache = cache_of(model, 3)
    for slot, text in enumerate(texts):
        prefill(model, cache, list(text), slot=slot)
    together = chain(cache)
    for n in range(20):
        rows = cache.after([len(texts[0]) + n], [1])
        assert torch.equal(
            forward(model, cache, rows, model.embed_tokens(torch.arange(n, n + 1))).hidden[0], together[n]
        )


@pytest.mark.parametrize("kind", ["llama", "gemma3", "olmo2", "experts", "gpt-oss"])
def test_slices_of_layers_and_groups(tmp_path, kind):
    """DEL runs the layers in two parts, EasySpec several side by side."""
    windows = {"layer_types": [FULL, *[SLIDING] * 3, FULL, SLIDING]} if "layer_types" in KINDS[kind] else {}
    model = model_of(tmp_path, **KINDS[kind] | windows, layers=6)

    def parts(cache):
        rows, hidden = cache.after([5], [3]), model.embed_tokens(torch.arange(3))
        return forward(model, cache, rows, forward(model, cache, rows, hidden, slice(2)).hidden, slice(2, None)).hidden

    def groups(cache):
        parallel = LayerParallel(model, cache, Schedule(((0,), (1, 2, 3), (4,), (5,))))
        return parallel.forward(cache.after([5], [3]), model.embed_tokens(torch.arange(3))).hidden

    for call in (parts, groups):
        (got, *kv), (want, *kv_) = both(model, call)
        assert near(got, want) and all(near(a, b) for a, b in zip(kv, kv_, strict=True))


def whole(packed):
    """The same model with its matrices restored to float32, for run_layers."""
    model = Model(packed)
    model.stack = None
    model.embed = restored(model.embed)
    model.head = restored(model.head)
    for n, layer in enumerate(model.layers):
        w = replace(layer.mixer, **{name: restored(getattr(layer.mixer, name)) for name in MATRICES})
        model.layers[n] = layer._replace(mixer=w, layers=(w,))
    return model


def restored(weight):
    return weight.dequantised(torch.float32) if isinstance(weight, Packed) else weight.float()


@pytest.mark.parametrize("arch", ["llama", "qwen2", "dream"])
@pytest.mark.parametrize("quantize", ["int4", "int8", "fp8"])
def test_packed_layers_prefill_a_long_prompt(tmp_path, arch, quantize):
    """In several chunks over many pages; a bidirectional model sees all of its own. Against torch's operators with the
    restored weights; what the cache held before must not be read."""
    folder = make(tmp_path, arch, **SIZES, max_context=512)
    checkpoint = read(folder, dtype=torch.float32, device="cpu", quantize=quantize, activations="float32")
    model, text = Model(checkpoint), [n * 7 % 128 for n in range(300)]
    assert model.stack is not None and model.stack.packed and model.config.causal == (arch != "dream")
    found = []
    for one in (model, whole(checkpoint)):
        cache = KVCache(one.config, 512, dtype=torch.float32, device="cpu", page_size=16)
        cache.k.fill_(torch.nan if one is model else 0), cache.v.fill_(torch.nan if one is model else 0)
        taps = prefill(one, cache, text, aux_layers=(0, 2, 4), last=20)
        assert cache.exact_len[0] == 300 and taps.keys() == {0, 2, 4}
        with torch.inference_mode():
            rows = forward(one, cache, cache.after([300], [3]), one.embed_tokens(torch.arange(3))).hidden
        written = cache.slots(0, 0, 303)
        kv = [x.flatten(1, 2)[:, written] for x in (cache.k, cache.v)]
        found.append([*taps.values(), rows, one.logits(Final(rows)), *kv])
    for got, want in zip(*found, strict=True):
        assert got.shape == want.shape and near(got, want)


@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_activations_in_eight_bits_change_little(tmp_path, quantize):
    """And they change something: they are used by default."""
    hidden = []
    for activations in (None, "int8", "bfloat16", "float32"):
        model, text = model_of(tmp_path, quantize=quantize, activations=activations), list(range(1, 40))
        hidden.append(prefill(model, cache_of(model), text, aux_layers=(4,), last=39)[4])
    default, eight, half, exact = hidden
    assert torch.equal(default, eight)
    for got, most in ((eight, 0.05), (half, 0.03)):
        assert 1e-5 < (got - exact).norm() / exact.norm() < most


def test_slots_that_must_not_be_read(tmp_path):
    """A tree and a batch beside NaN, in pages of their own and in the rest of the last page."""
    model = model_of(tmp_path, quantize="int4")
    texts, parents = (list(range(1, 4)), list(range(1, 41))), torch.tensor([[-1, 0, 0, 1, 2]] * 2)
    found = []
    for value in (0.0, torch.nan):
        cache = cache_of(model, 2)
        cache.k.fill_(value), cache.v.fill_(value)
        for slot, text in enumerate(texts):
            prefill(model, cache, text, slot=slot)
        rows = cache.place(torch.tensor([3, 40]), 0, 0, 5, parents)
        with torch.inference_mode():
            found.append(forward(model, cache, rows, model.embed_tokens(torch.arange(10))).hidden)
    assert found[1].isfinite().all() and torch.equal(*found)


FORMS = [(dtype, kind) for dtype in (torch.float32, torch.bfloat16) for kind in (None, "int8", "int4", "fp8")]


ALIKE = [("llama", *form) for form in FORMS]
ALIKE += [("gelu", torch.float32, None), ("gemma3", torch.bfloat16, None), ("olmo2", torch.float32, "int8")]
ALIKE += [("gemma4-k-is-v", torch.float32, None), ("gemma4-all", torch.bfloat16, "int8")]
ALIKE += [("gemma4-e2b", *form) for form in FORMS[:3]]


@pytest.mark.parametrize(("kind", "dtype", "quantize"), ALIKE, ids=str)
def test_a_row_has_the_same_bits_alone_in_a_chain_and_in_a_batch(tmp_path, kind, dtype, quantize):
    """Plain decoding's rows, one at a time, against a chain that verifies them, alone and beside another text."""
    model = model_of(tmp_path, dtype=dtype, quantize=quantize, **KINDS[kind])
    text, more = list(range(1, 38)), [5, 9, 2, 7, 7, 1]
    with torch.inference_mode():
        chain = checked_chain(model, text, more)
        cache = cache_of(model, 2)
        prefill(model, cache, text, slot=1)
        prefill(model, cache, [3, 4], slot=0)
        rows = cache.after([2, len(text)], [3, len(more)])
        tokens = torch.tensor([8, 8, 8, *more])
        assert torch.equal(forward(model, cache, rows, model.embed_tokens(tokens)).hidden[3:], chain)
        assert torch.equal(model.logits(Final(chain)), torch.cat([model.logits(Final(row[None])) for row in chain]))


@pytest.mark.parametrize(
    ("how", "dtype"), cases.diagonal(["chain", "tree", "unequal", "groups"], [torch.float32, torch.bfloat16])
)
def test_a_round_of_more_rows_than_the_layers_take_at_once(tmp_path, dtype, how):
    """It runs in blocks of sequences; each sequence has the bits that it has alone."""
    model, n = model_of(tmp_path, dtype=dtype), 70
    calls, run, counts = [], model.stack.run, [5] * n
    model.stack.run = lambda x, *rest, **more: (calls.append(len(x)), run(x, *rest, **more))[1]
    cache, texts = cache_of(model, n), [[*range(1, 3 + slot % 19)] for slot in range(n)]
    for slot, text in enumerate(texts):
        prefill(model, cache, text, slot=slot)
    lengths, parents = torch.tensor(cache.exact_len), torch.tensor([[-1, 0, 0, 1, 2]] * n)
    if how == "unequal":
        counts = [1 + slot * 7 % 9 for slot in range(n)]
        rows = cache.after(cache.exact_len, counts)
    else:
        rows = cache.place(lengths, 0, 0, 5, parents if how == "tree" else None)
    starts = [sum(counts[:slot]) for slot in range(n + 1)]
    hidden = model.embed_tokens(torch.arange(starts[-1]) * 31 % 128)
    parallel = LayerParallel(model, cache, Schedule(((0,), (1, 2), (3,))))

    def forwarded(rows, hidden):
        if how == "groups":
            return parallel.forward(rows, hidden)
        return forward(model, cache, rows, hidden, aux_layers=(2, 4))

    with torch.inference_mode():
        calls.clear()
        whole = forwarded(rows, hidden)
        assert len(calls) == 2 and max(calls) <= model.stack.most and sum(calls) == starts[-1] > model.stack.most
        logits = model.logits(whole.final)
        for slot, (first, end) in enumerate(itertools.pairwise(starts)):
            (_, one), *_ = itertools.islice(rows.blocks(1), slot, None)
            alone = forwarded(one, hidden[first:end])
            assert torch.equal(alone.hidden, whole.hidden[first:end]), slot
            for n, kept in whole.aux_hidden_states.items():
                assert torch.equal(alone.aux_hidden_states[n], kept[first:end])
            assert torch.equal(model.logits(alone.final), logits[first:end])


@pytest.mark.parametrize(("dtype", "quantize"), FORMS, ids=str)
@pytest.mark.parametrize("length", [3, 12, 37])  # the windows lie in one page, or across the end of one
def test_a_path_in_a_tree_has_the_bits_of_a_chain(tmp_path, dtype, quantize, length):
    """Of eight query heads to a KV head, so that the tree attends by another path (many.c) than single rows."""
    model = model_of(tmp_path, "llama", dtype, quantize, heads=8, kv_heads=1)
    text = list(range(1, length + 1))
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


@pytest.mark.parametrize("kind", ["qwen3", "gemma3", "gpt-oss", "gemma4"])
def test_many_rows_have_the_bits_of_single_ones(tmp_path, kind):
    """Twenty rows of eight query heads attend a block of columns at a time, a single row all of its columns at once.
    The largest score rises from block to block."""
    model, text = model_of(tmp_path, heads=8, kv_heads=1, **KINDS[kind]), [n * n % 50 for n in range(90)]
    with torch.inference_mode():
        for layer in model.stack.layers:
            (layer.qkv if layer.q_norm is None else layer.q_norm).mul_(6)  # sharper than random weights
        checked_chain(model, text, text[5:25])


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


def test_a_layer_that_computes_something_else_is_declined_by_name(tmp_path, monkeypatch):
    """Its sizes fit, so the compiled layers would compute another model."""
    folder = make(tmp_path, "llama", **SIZES, hidden_act="gelu")
    monkeypatch.delitem(library.GATES, "gelu")
    assert Model(read(folder, dtype=torch.float32, device="cpu")).stack is None
    engine = specker.load(folder, strategy="ar", device="cpu")
    assert engine.remarks["cpu"] == "decoding is slow, because the compiled kernels lack the activation gelu"
    assert engine.model.dtype == torch.float32
    packed = read(folder, dtype=torch.float32, device="cpu", quantize="int4")
    assert not any(isinstance(w, Packed) for w in packed.weights.qkv), "only the compiled layers read packed matrices"
    plain = specker.load(folder, strategy="ar", device="cpu", quantize="int4")
    copied = specker.load(folder, strategy="lookup", device="cpu", quantize="int4")
    assert plain.generate([3, 4, 5] * 5, 20).tokens == copied.generate([3, 4, 5] * 5, 20).tokens


def test_sizes_that_the_kernels_decline(tmp_path):
    for sizes in ({"head_dim": 16}, {"hidden": 40}, {"ffn": 100}):
        checkpoint = read(make(tmp_path / str(sizes), "llama", **{**SIZES, **sizes}), dtype=torch.float32, device="cpu")
        assert Model(checkpoint).stack is None
    wide = read(make(tmp_path / "wide", "llama", **SIZES), dtype=torch.float64, device="cpu")
    assert Model(wide).stack is None
