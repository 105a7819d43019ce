"""The decoder against transformers' own models, in float64: prefill, decoding, a verify pass, taps and layer slices."""

import itertools

import pytest
import torch
from make_checkpoint import (
    CASES,
    FULL,
    GEMMA2,
    GEMMA3,
    GEMMA4,
    GPT_OSS,
    GRANITE,
    PHI4,
    SLIDING,
    exact_oracle,
    make,
    oracle,
    oracle_logits,
)
from recorded import recording

from specker.checkpoints.checkpoint import read
from specker.kernels.tree_attention import ancestor_words
from specker.model import decoder
from specker.model.cache import KVCache, Rows
from specker.model.decoder import Model, forward
from specker.model.prefill import PAGED_ROWS, flash, prefill

F64 = torch.float64


@pytest.fixture(autouse=True)
def float64_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    exact_oracle(monkeypatch)


def build(folder, page_size=16, permute=False, **kwargs):
    make(folder, **kwargs)
    model = Model(read(folder, dtype=F64, device="cpu"))
    capacity = model.config.max_context
    count, mixed = -(-capacity // page_size), torch.Generator().manual_seed(1)
    pages = torch.randperm(count, generator=mixed, dtype=torch.int32) if permute else None
    cache = KVCache(model.config, capacity, dtype=F64, device="cpu", page_size=page_size, pages=pages)
    cache.k.fill_(float("nan"))  # unwritten columns must not be read
    cache.v.fill_(float("nan"))
    return model, cache


def verify(model, cache, tokens, parents=None):
    """The logits of `tokens`, a chain or a tree after the exact columns, and their positions."""
    parents = None if parents is None else torch.tensor([parents])
    rows = cache.place([cache.exact_len[0] + 1], 1, 0, len(tokens), parents)
    return model.logits(forward(model, cache, rows, model.embed_tokens(torch.tensor(tokens))).final), rows.positions


def tokens_of(model: Model, count: int) -> list[int]:
    return torch.randint(0, model.config.vocab_size, (count,), generator=torch.Generator().manual_seed(2)).tolist()


@pytest.mark.parametrize(("name", "kwargs"), CASES, ids=[name for name, _ in CASES])
def test_logits_equal_transformers(tmp_path, name, kwargs):
    model, cache = build(tmp_path, **kwargs)
    ids = tokens_of(model, 32)
    expected = oracle_logits(oracle(tmp_path, F64), torch.tensor(ids), bidirectional=not model.config.causal)
    if not model.config.causal:  # all rows see all columns, in one window
        words = torch.full((32, 1), (1 << 32) - 1, dtype=torch.int64)
        rows = cache.after([0], [32])._replace(ancestors=words)
        got = model.logits(forward(model, cache, rows, model.embed_tokens(torch.tensor(ids))).final)
        assert (got - expected).abs().max() < 1e-9
        return
    prefill(model, cache, ids[:17])
    got = []
    for token in ids[17:22]:  # one row at a time
        logits, positions = verify(model, cache, [token])
        assert positions.tolist() == cache.exact_len
        cache.commit([0])
        got.append(logits)
    logits, _ = verify(model, cache, ids[22:32])  # and ten at once
    got.append(logits)
    assert (torch.cat(got) - expected[17:]).abs().max() < 1e-9


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"arch": "qwen3"},
        *({"arch": "mistral", "sliding_window": n} for n in (1, 2, 3, 6)),
        GEMMA3,
        {"arch": "olmo2"},
        GRANITE,
        PHI4,
        GPT_OSS,
    ],
    ids=str,
)
def test_tree_branches_equal_their_chains(tmp_path, options):
    """Also where a sliding window is shorter than a branch, or than its text."""
    model, cache = build(tmp_path, permute=True, page_size=4, **options)
    ids = tokens_of(model, 14)
    parents = [0, 0, 1, 1, 2, 3, 5, 0, 8]
    prefill(model, cache, ids[:4])
    tree, positions = verify(model, cache, ids[4:], parents)
    theirs = oracle(tmp_path, F64)
    for row in range(len(parents) + 1):
        path = [row]
        while path[0] > 0:
            path.insert(0, parents[path[0] - 1])
        logits, chain_positions = verify(model, cache, [ids[4 + r] for r in path])
        assert positions[row] == chain_positions[-1]
        assert (tree[row] - logits[-1]).abs().max() < 1e-11
        text = torch.tensor(ids[:4] + [ids[4 + r] for r in path])
        assert (tree[row] - oracle_logits(theirs, text)[-1]).abs().max() < 1e-9
        verify(model, cache, ids[4:], parents)


def test_commit_keeps_what_a_sequential_pass_writes(tmp_path):
    model, cache = build(tmp_path, permute=True, page_size=4)
    ids = tokens_of(model, 12)
    prefill(model, cache, ids[:6])
    verify(model, cache, [ids[6], 9, ids[7], 3, ids[8]], [0, 0, 1, 2])
    cache.commit([0, 2, 4])
    cache.check(committed=10)
    _, straight = build(tmp_path, page_size=4)
    prefill(model, straight, ids[:9])
    for ours, theirs in ((cache.k, straight.k), (cache.v, straight.v)):
        a = ours.flatten(1, 2)[:, cache.slots(0, 0, 9)]
        b = theirs.flatten(1, 2)[:, straight.slots(0, 0, 9)]
        assert (a - b).abs().max() < 1e-12


def test_layer_slices_and_taps_compose(tmp_path):
    model, cache = build(tmp_path)
    ids = tokens_of(model, 9)
    prefill(model, cache, ids[:5])
    rows = cache.after([5], [4])
    x = model.embed_tokens(torch.tensor(ids[5:]))
    whole = forward(model, cache, rows, x, aux_layers=(0, 1, 3))
    assert torch.equal(whole.aux_hidden_states[0], x) and torch.equal(whole.aux_hidden_states[3], whole.hidden)
    first = forward(model, cache, rows, x, layers=slice(0, 1))
    assert torch.equal(first.hidden, whole.aux_hidden_states[1])
    rest = forward(model, cache, rows, first.hidden, layers=slice(1, None))
    assert torch.equal(rest.hidden, whole.hidden)
    # A late slice over the last row alone, as a self-speculative verify runs the first layers.
    assert forward(model, cache, rows, x, layers=slice(0, 0)).hidden is x


@pytest.mark.parametrize("window", [None, 3, 8, 20])
def test_prefill_does_not_depend_on_the_chunk_size(tmp_path, window):
    model, cache = build(tmp_path, arch="mistral", sliding_window=window)
    assert model.config.layer.sliding_window(0) == (window or 0)
    ids = tokens_of(model, 30)
    prefill(model, cache, ids)
    whole = [cache.k.flatten(1, 2)[:, :30].clone(), cache.v.flatten(1, 2)[:, :30].clone()]
    cache.truncate(0)
    cache.k.fill_(float("nan")), cache.v.fill_(float("nan"))
    prefill(model, cache, ids, chunk=7)
    for ours, theirs in zip((cache.k, cache.v), whole, strict=True):
        assert (ours.flatten(1, 2)[:, :30] - theirs).abs().max() < 1e-12


def test_prefill_reads_nothing_on_the_host(tmp_path, monkeypatch):
    """For any order of pages. On a GPU each read would wait for the device."""
    ids = list(range(30))
    model, straight = build(tmp_path, page_size=4, layers=3)
    prefill(model, straight, ids)
    _, mixed = build(tmp_path, page_size=4, layers=3, permute=True)
    reads, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(1) or tolist(self))
    prefill(model, mixed, ids, chunk=20)
    assert not reads
    for ours, theirs in ((mixed.k, straight.k), (mixed.v, straight.v)):
        a, b = (x.flatten(1, 2)[:, c.slots(0, 0, 30)] for x, c in ((ours, mixed), (theirs, straight)))
        assert (a - b).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("pages", "adjacent"),
    [([0, 1, 2, 3], 4), ([2, 3, 0, 1], 2), ([3, 2, 1, 0], 1), ([1, 2, 3, 0], 3), ([0, 2, 1, 3], 1)],
)
def test_a_span_is_a_slice_if_its_pages_are_adjacent(tmp_path, pages, adjacent):
    config = read(make(tmp_path, layers=1), dtype=F64, device="cpu").config
    cache = KVCache(config, 16, dtype=F64, device="cpu", page_size=4, pages=torch.tensor(pages, dtype=torch.int32))
    for length in range(17):
        span = cache.span(length)
        assert isinstance(span, slice) == (length <= adjacent * 4)
        assert torch.equal(torch.arange(16)[span], cache.slots(0, 0, length))


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_sequences_in_one_forward_equal_each_alone(tmp_path, arch):
    """A chain of 3 rows after 5 tokens and a tree of 5 rows after 19, with their pages interleaved."""
    model, pool = build(tmp_path, page_size=4, arch=arch, layers=3, max_context=64)
    ids, caches, each, alone = tokens_of(model, 32), [], [], []
    for pages in ([9, 0, 4, 15, 2, 7, 11], [8, 1, 13, 3, 12, 6, 10]):
        pages = torch.tensor(pages, dtype=torch.int32)
        cache = KVCache(model.config, 28, dtype=F64, device="cpu", page_size=4, pages=pages)
        cache.k, cache.v, cache.layers = pool.k, pool.v, pool.layers
        caches.append(cache)
    prefill(model, caches[0], ids[:5])
    prefill(model, caches[1], ids[5:24])
    first, second = (cache.after(cache.exact_len, [count]) for cache, count in zip(caches, (3, 5), strict=True))
    words = ancestor_words(torch.tensor([0, 0, 1, 2]))
    second = second._replace(positions=torch.tensor([0, 1, 1, 2, 2]) + 19, ancestors=words)
    for rows, tokens in ((first, ids[24:27]), (second, ids[27:])):
        each.append(model.embed_tokens(torch.tensor(tokens)))
        alone.append(forward(model, pool, rows, each[-1], aux_layers=(1, 3)))
    written = pool.k.clone(), pool.v.clone()
    slots = torch.cat((first.slots, second.slots))
    for x in (pool.k, pool.v):
        x.flatten(1, 2)[:, slots] = float("nan")
    joined = map(torch.cat, zip(first[:7], second[:7], strict=True))
    rows = Rows(*joined)._replace(cu_rows=torch.tensor([0, 3, 8], dtype=torch.int32), bounds=(0, 3, 8))
    together = forward(model, pool, rows, torch.cat(each), aux_layers=(1, 3))
    for n in (1, 3):
        apart = torch.cat([out.aux_hidden_states[n] for out in alone])
        assert (together.aux_hidden_states[n] - apart).abs().max() < 1e-12
    assert (together.hidden - torch.cat([out.hidden for out in alone])).abs().max() < 1e-12
    for x, want in zip((pool.k, pool.v), written, strict=True):
        assert (x.flatten(1, 2)[:, slots] - want.flatten(1, 2)[:, slots]).abs().max() < 1e-12


def test_blocks_of_rows(tmp_path):
    """Whole sequences, as many as fit; one that has more rows alone."""
    model, _ = build(tmp_path, page_size=4, max_context=64)
    cache = KVCache(model.config, 40, dtype=F64, device="cpu", page_size=4, sequences=6)
    for slot in range(6):
        cache.take(slot, 40)
    counts = [3, 2, 4, 9, 1, 5]
    unequal = cache.after([5, 2, 0, 7, 1, 3], counts)
    equal = cache.place(torch.tensor([5, 2, 9, 7, 1, 3]), 0, 0, 4)
    for rows, most, want in (
        (unequal, 6, [[0, 1], [2], [3], [4, 5]]),
        (unequal, 9, [[0, 1, 2], [3], [4, 5]]),
        (unequal, 100, [[0, 1, 2, 3, 4, 5]]),
        (equal, 9, [[0, 1], [2, 3], [4, 5]]),
        (equal, 3, [[0], [1], [2], [3], [4], [5]]),
    ):
        at = 0
        for (where, block), slots in zip(rows.blocks(most), want, strict=True):
            sizes = [counts[slot] if rows is unequal else 4 for slot in slots]
            assert where == slice(at, at := at + sum(sizes)) and len(block.positions) == sum(sizes)
            assert block.cu_rows.tolist() == list(block.bounds) == [0, *itertools.accumulate(sizes)]
            for name in ("positions", "slots", "ancestors"):
                assert torch.equal(getattr(block, name), getattr(rows, name)[where])
            for name in ("kv_len", "window", "table"):
                assert torch.equal(getattr(block, name), getattr(rows, name)[slots])
        assert at == len(rows.positions)


@pytest.mark.parametrize("arch", ["llama", pytest.param("qwen2", marks=pytest.mark.slow)])
def test_greedy_equals_transformers_generate(tmp_path, arch):
    import specker

    make(tmp_path, arch, max_context=320, layers=2)
    prompt = tokens_of(Model(read(tmp_path, dtype=F64, device="cpu")), 8)
    out = specker.load(tmp_path, strategy="ar", dtype="float64").generate(prompt, max_new_tokens=264)
    reference = oracle(tmp_path, F64).generate(
        torch.tensor([prompt]), max_new_tokens=264, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert out.tokens == reference[0, 8:].tolist()
    assert len(set(out.tokens)) > 10


def test_a_window_is_the_same_in_a_prompt_and_in_rows(tmp_path):
    """The K/V of a prompt, in chunks longer and shorter than the window, against rows one by one."""
    for window, chunk in ((3, 7), (12, 5), (8, 8)):
        model, cache = build(
            tmp_path, arch="qwen2", use_sliding_window=True, sliding_window=window, max_window_layers=1
        )
        ids = tokens_of(model, 30)
        prefill(model, cache, ids, chunk=chunk)
        want = [c.flatten(1, 2)[:, :30].clone() for c in (cache.k, cache.v)]
        cache.truncate(0)
        for token in ids:
            verify(model, cache, [token])
            cache.commit([0])
        got = [c.flatten(1, 2)[:, :30] for c in (cache.k, cache.v)]
        assert all((a - b).abs().max() < 1e-12 for a, b in zip(got, want, strict=True))


def test_a_chunk_on_a_gpu_is_flash_attention(gpu_dtypes, tmp_path):
    """By name, in first and later chunks and in layers with a window; nothing that plans a length or writes scores."""
    folder = make(tmp_path / "m", layers=3, max_context=1024, **{**GEMMA3, "sliding_window": 256})
    model = Model(read(folder, dtype=torch.bfloat16, device="cpu", random=0))
    with recording() as log, torch.inference_mode():
        cache = KVCache(model.config, 1024, dtype=torch.bfloat16, device="cpu")
        log.clear()
        prefill(model, cache, [3] * 900)
    found = [(name, arguments, dict(named)) for name, arguments, named in log if "attention" in name]
    assert {name for name, *_ in found} == {"aten._flash_attention_forward.default"} and len(found) == 2 * 3
    lengths = [arguments[5:7] for _, arguments, _ in found]
    assert lengths == [(512, 512)] * 3 + [(388, 900)] * 3 and all(arguments[8] for _, arguments, _ in found)
    assert [named["window_size_left"] for *_, named in found] == [255, -1, 255] * 2
    assert {named["window_size_right"] for *_, named in found} == {0}


def as_flash(q, k, v, causal, sliding_window, scale, sinks=None):
    """`prefill.flash` in plain torch."""
    row, column = torch.arange(len(k) - len(q), len(k))[:, None], torch.arange(len(k))
    seen = (column <= row) | (not causal)
    if sliding_window:
        seen &= column > row - sliding_window
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (torch.einsum("tgd,sgd->gts", q, k) * scale).masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(-1, len(q), 1)), -1)
    return torch.einsum("gts,sgd->tgd", scores.softmax(-1)[..., : len(k)], v)


WIDE = {name: value for name, value in GEMMA4.items() if name != "layers"}  # flash attention serves one layer of three
WIDE |= {"layer_types": [SLIDING, FULL, FULL], "global_head_dim": 288}


@pytest.mark.parametrize("kind", [GEMMA3, {"arch": "llama"}, {"arch": "dream"}, WIDE, GPT_OSS])
def test_what_a_chunk_hands_to_flash_attention(monkeypatch, tmp_path, kind):
    """The columns, the window and the direction: the K/V that a CPU computes."""
    model, cache = build(tmp_path, layers=3, max_context=128, **kind)
    tokens = tokens_of(model, 70)
    prefill(model, cache, tokens, chunk=32)
    want = [c[:, : cache.capacity // 16].flatten(1, 2)[:, :70].clone() for c in (cache.k, cache.v)]
    monkeypatch.setattr("specker.model.prefill.runs_flash", lambda *_: True)
    calls = []
    monkeypatch.setattr("specker.model.prefill.flash", lambda *given: calls.append(given) or as_flash(*given))
    cache.truncate(0)
    cache.k.fill_(float("nan")), cache.v.fill_(float("nan"))
    prefill(model, cache, tokens, chunk=32)
    got = [c[:, : cache.capacity // 16].flatten(1, 2)[:, :70] for c in (cache.k, cache.v)]
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(got, want, strict=True))
    assert len(calls) == 3 * (1 if kind is WIDE else 3)


@pytest.mark.parametrize("kind", [GEMMA2, GEMMA3, {"arch": "llama"}, WIDE, GPT_OSS])
def test_what_flash_attention_does_not_serve_attends_by_pages(monkeypatch, tmp_path, kind):
    """As on a GPU in float32: several parts a chunk, in layers of every kind, have the K/V that a CPU computes."""
    model, cache = build(tmp_path, layers=3, max_context=256, **kind)
    tokens = tokens_of(model, 170)
    prefill(model, cache, tokens, chunk=100)
    want = [x.flatten(0, 1)[:170].clone() for layer in cache.layers for x in layer]
    monkeypatch.setattr("specker.model.prefill.attends_pages", lambda hidden: True)
    calls, attend = [], decoder.tree_attention
    counted = lambda q, *given, **named: (calls.append(len(q)), attend(q, *given, **named))[1]  # noqa: E731
    monkeypatch.setattr(decoder, "tree_attention", counted)
    cache.truncate(0)
    for kv in cache.kv:
        kv.fill_(float("nan"))
    prefill(model, cache, tokens, chunk=100)
    assert calls == [PAGED_ROWS, 100 - PAGED_ROWS] * 3 + [PAGED_ROWS, 70 - PAGED_ROWS] * 3
    got = [x.flatten(0, 1)[:170] for layer in cache.layers for x in layer]
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(got, want, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns", "causal", "window"), [
    (512, 512, True, 0), (388, 900, True, 0), (388, 900, True, 256), (130, 130, True, 64), (40, 90, False, 0),
])  # fmt: skip
@pytest.mark.parametrize(("heads", "width"), [((32, 8), 128), ((4, 1), 256), ((14, 2), 64)])
def test_flash_attention_sees_these_columns(rows, columns, causal, window, heads, width):
    q, k, v = (
        torch.randn(n, h, width, device="cuda", dtype=torch.bfloat16)
        for n, h in ((rows, heads[0]), (columns, heads[1]), (columns, heads[1]))
    )
    for sinks in (None, 4 * torch.randn(1, heads[0], device="cuda", dtype=torch.bfloat16)):
        got, own = flash(q, k, v, causal, window, width**-0.5, sinks), None if sinks is None else sinks.double().cpu()
        want = as_flash(*(x.double().cpu() for x in (q, k, v)), causal, window, width**-0.5, own)
        assert (got.double().cpu() - want).abs().max() < 2e-2
