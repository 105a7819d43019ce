"""K and V in fewer bits on the compiled layers: what a cache holds, what attention makes of it, and the promise that a
row's bits, and so every strategy's tokens, do not depend on other rows."""

import cases
import pytest
import torch
from heads import OFTEN, made
from make_checkpoint import FULL, GEMMA3, GEMMA4, GEMMA4_WIDE, GPT_OSS, MIXED, SLIDING, make
from stacks import SIZES, cache_of, checked_chain, model_of

import specker
from specker.model.cache import KVCache
from specker.model.decoder import forward
from specker.model.kv_formats import keys, rotated, rounded, widened
from specker.model.memory import Cost
from specker.model.prefill import prefill
from specker.options import Options
from specker.runtime.strategies.base import kv_dtype

NARROW = {
    "bfloat16": 2**-8,
    "float16": 2**-11,
    "int8": 1 / 254,
}  # the largest error, in parts of a head's largest number
TEXT, MORE = list(range(1, 38)), [5, 9, 2, 7, 7, 1]


def test_heads_are_rounded_to_the_nearest():
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5] * 8, [1e-4] * 31 + [0.0], [0.0] * 32])
    codes = rounded(x, torch.int8)
    assert codes.shape == (3, 36) and codes[0, :4].tolist() == [127, 0, 2, -2]
    assert torch.equal(widened(codes, torch.float32)[2], x[2]) and codes[1, :2].tolist() == [127, 127]
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    back = keys(rounded(rotated(x), torch.int8), torch.float32)
    assert (back - x).norm() < 0.01 * x.norm() < 0.02 * (rotated(x) / 32**0.5 - x).norm()
    big = torch.tensor([1e9, -1e9, 65519.0])
    assert rounded(big, torch.float16).tolist() == [65504.0, -65504.0, 65504.0]


@pytest.mark.parametrize("kind", NARROW)
@pytest.mark.parametrize("head_dim", [32, 64, 96])
def test_attention_reads_what_was_rounded(tmp_path, kind, head_dim):
    """The first layer's K and V are those of a plain cache, rounded. Attention over them is that of torch's operators,
    which round no queries, within this error. A tree after a prompt, over pages in any order."""
    model, dtype = model_of(tmp_path, "qwen3", heads=6, head_dim=head_dim), getattr(torch, kind)
    compiled, found = model.stack, []
    for kept, stack in ((None, compiled), (dtype, compiled), (dtype, None)):
        how = {"page_size": 16, "pages": torch.tensor([3, 0, 6, 2, 1, 5, 4, 7]), "kv_dtype": kept}
        cache = KVCache(model.config, 128, dtype=torch.float32, device="cpu", **how)
        cache.k.fill_(1), cache.v.fill_(1)
        model.stack = compiled
        prefill(model, cache, TEXT)
        model.stack = stack
        with torch.inference_mode():
            rows = cache.place(torch.tensor([37]), 0, 0, 5, torch.tensor([[-1, 0, 0, 1, 2]]))
            hidden = forward(model, cache, rows, model.embed_tokens(torch.arange(5) * 7)).hidden
        cache.check()
        found.append((hidden, *(x.flatten(1, 2)[:, cache.slots(0, 0, 42)] for x in (cache.k, cache.v))))
    (plain, k, v), (got, *codes), (want, *others) = found
    for x, kept, other in zip((rotated(k) if kind == "int8" else k, v), codes, others, strict=True):
        assert torch.equal(rounded(x[0], dtype), kept[0])
        size, back = x.abs().amax(-1), widened(kept, torch.float32)
        assert 0 < ((back[0] - x[0]).abs().amax(-1) / size[0]).max() <= NARROW[kind] * 1.001
        assert ((back - widened(other, torch.float32)).abs().amax(-1) / size).max() <= 8 * NARROW[kind]
    assert (got - want).abs().max() <= 4 * NARROW[kind] * want.abs().max() and not torch.equal(got, plain)


@pytest.mark.parametrize("kind", NARROW)
@pytest.mark.parametrize("head_dim", [32, 64])
def test_a_row_has_the_same_bits_alone_in_a_chain_a_tree_and_a_batch(tmp_path, kind, head_dim):
    """With one thread and with two; slots that must not be read hold NaN."""
    model, dtype, found = model_of(tmp_path, "qwen3", heads=6, head_dim=head_dim), getattr(torch, kind), []
    parents, path = torch.tensor([[-1, 0, 0, 0, 2, 2, 1, 5, 5, 4]] * 2), [0, 2, 5, 8]
    tokens, before = torch.tensor([5, 3, 9, 6, 4, 2, 8, 1, 7, 3]), torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            with torch.inference_mode():
                chain = checked_chain(model, TEXT, MORE, dtype)
                cache = cache_of(model, 2, kv_dtype=dtype)
                for x in cache.kv:
                    x.view(torch.uint8).fill_(255)  # NaN, also in scales
                prefill(model, cache, [3, 4], slot=0), prefill(model, cache, TEXT, slot=1)
                rows = cache.after([2, len(TEXT)], [3, len(MORE)])
                batch = forward(model, cache, rows, model.embed_tokens(torch.tensor([8, 8, 8, *MORE]))).hidden
                assert torch.equal(batch[3:], chain)
                rows = cache.place(torch.tensor([2, len(TEXT)]), 0, 0, 10, parents)
                tree = forward(model, cache, rows, model.embed_tokens(tokens.repeat(2))).hidden[10:]
                assert torch.equal(tree[path], checked_chain(model, TEXT, [5, 9, 2, 7], dtype))
        finally:
            torch.set_num_threads(before)
        found.append((chain, tree))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


WINDOW = {"sliding_window": 300, "layer_types": [FULL, SLIDING]}
SPANS = {
    "all columns": {"arch": "qwen3"},
    "window": {"arch": "qwen3", "use_sliding_window": True, **WINDOW},
    "unlike heads": GEMMA4 | GEMMA4_WIDE | {"kv_heads": 3, **WINDOW, "layer_types": [SLIDING, FULL]},
}


@pytest.mark.parametrize(("layers", "kind"), cases.one_in(3, SPANS, ["float32", *NARROW]))
def test_a_row_has_the_same_bits_on_both_sides_of_the_end_of_a_span(tmp_path, kind, layers):
    """Sums over 512 columns are added, from the row on that sees 768 columns. Rows that see a column fewer and more, in
    a chain, a tree and a batch, whose threads divide the columns or the heads; with one thread and three."""
    model = model_of(tmp_path, **SPANS[layers] | {"heads": 6, "layers": 2, "max_context": 1400})
    long, dtype = [[n * n % 90 + 3 for n in range(length)] for length in (764, 1277)], getattr(torch, kind)
    more, parents, path = [5, 9, 2, 7, 8, 4], torch.tensor([[0, 0, 2, 1, 3, 5, 4, 6, 8, 0]]), [0, 2, 3, 5, 6, 8]
    ids, before, found = torch.tensor([5, 1, 9, 2, 3, 7, 8, 6, 4, 1]), torch.get_num_threads(), []

    def tree(count, slots, filled):
        cache = cache_of(model, count, 1312, dtype)
        for slot, text in zip(slots, filled, strict=True):
            prefill(model, cache, text, slot=slot)
        rows = cache.place(torch.tensor([len(text) for text in filled]), 0, 0, 10, parents.repeat(count, 1))
        return forward(model, cache, rows, model.embed_tokens(ids.repeat(count))).hidden.unflatten(0, (count, 10))

    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            with torch.inference_mode():
                chains = [checked_chain(model, text, more, dtype, length=1312) for text in long]
                both = tree(2, (0, 1), long)
                for n, text in enumerate(long):
                    assert torch.equal(both[n, path], chains[n])
                    assert torch.equal(tree(1, (0,), [text])[0, path], chains[n])
        finally:
            torch.set_num_threads(before)
        found += [*chains, both]
    assert all(torch.equal(a, b) for a, b in zip(found[:3], found[3:], strict=True))


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """kind -> a target."""
    folder = tmp_path_factory.mktemp("targets")
    windows = {"sliding_window": 12, "layer_types": [FULL, SLIDING] * 2}
    kinds = {
        "llama": {},
        "windows": GEMMA3 | windows,
        "sinks": GPT_OSS | windows,
        "hybrid": MIXED | {"arch": "qwen3_5"},
    }
    sizes = SIZES | {"max_context": 340}
    return {name: make(folder / name, **sizes | how) for name, how in kinds.items()}


@pytest.mark.parametrize("way", ["windows", "all"])
def test_drafters_of_blocks(targets, tmp_path, way):
    """They write K and V of the target's rows by torch's operators, and so do layers of which some are causal."""
    layer = (
        {"layer_types": [SLIDING, FULL], "sliding_window": 12, "use_sliding_window": True} if way == "windows" else {}
    )
    how = {"layout": "dspark", "ids": OFTEN, "layer_ids": [0, 1], "layers": 2, "layer": layer, "heads": (2, 1, 64)}
    head = made(tmp_path / "drafter", "dflash", targets["llama"], inner=128, **how)
    engine = head.load(dtype="float32", kv_dtype="int8")
    model = engine.drafter.block.model
    assert model.stack is not None and engine.drafter.cache.k.dtype == torch.int8
    out = engine.generate(TEXT, 24)
    assert engine.check(TEXT, out, 24).identical and out.stats.drafted > 24


def test_a_bidirectional_drafter_reads_a_long_prompt(bundled):
    """In chunks of more rows than the compiled layers take: with torch's attention."""
    how = {"dtype": "float32", "kv_dtype": "int8", "max_context": 512, "policy": "fixed"}  # whatever drafts cost
    engine = specker.load(strategy="diffuspec", device="cpu", **how)
    assert engine.drafter.cache.k.dtype == torch.int8
    prompt = (bundled.encode("def add(a, b):\n    return a + b\n\n") * 60)[:400]
    out = engine.generate(prompt, 24)
    assert engine.check(prompt, out, 24).identical and out.stats.accepted > 0


def test_float16_is_the_default_where_an_instruction_converts_it(targets, monkeypatch):
    def kept(**how):
        return specker.load(targets["llama"], strategy="ar", device="cpu", **{"dtype": "float32", **how}).cache.k.dtype

    for converts, default in ((True, torch.float16), (False, torch.float32)):
        monkeypatch.setattr("specker.cpu.converts_halves", lambda converts=converts: converts)
        assert kept() == default and kept(kv_dtype="float32") == torch.float32
        assert kept(dtype="float64") == torch.float64


def test_memory_and_refusals(targets, tmp_path):
    """What a context takes is counted; where a format cannot be kept, a sentence says so."""
    for kind, size in {"bfloat16": 64, "int8": 36}.items():
        engine = specker.load(targets["llama"], strategy="ar", device="cpu", dtype="float32", kv_dtype=kind)
        config, cache = engine.model.config, engine.cache
        counted = [
            Cost.of(config, torch.float32, kv_dtype=x).kv(1, cache.page_size) for x in (cache.k.dtype, torch.float32)
        ]
        assert cache.k[:, 0].nbytes + cache.v[:, 0].nbytes == 4 * 2 * 2 * size * cache.page_size
        assert counted[1] - counted[0] == 4 * 2 * 2 * (128 - size) * cache.page_size
    with pytest.raises(ValueError, match="kv_dtype='int8' needs a CPU: K/V of a run on a GPU is in bfloat16"):
        kv_dtype(Options(kv_dtype="int8"), torch.bfloat16, torch.device("cuda", 0))
    assert kv_dtype(Options(kv_dtype="bfloat16"), torch.bfloat16, torch.device("cuda", 0)) == torch.bfloat16
    small = make(tmp_path, "llama", **SIZES | {"head_dim": 16})
    with pytest.raises(ValueError, match="needs the CPU's compiled layers, which do not run this model"):
        specker.load(small, strategy="ar", device="cpu", kv_dtype="int8")
