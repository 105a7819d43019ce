"""K/V of layers with a sliding window in rings: texts longer than several rings, by every way of decoding."""

import functools
import random
from dataclasses import replace

import cases
import pytest
import torch
from make_checkpoint import (
    FULL,
    GEMMA3,
    GEMMA4,
    GEMMA4_PLE,
    GEMMA4_SHARED,
    GEMMA4_WIDE,
    GEMMA4_WIDE_PLE,
    SHORT,
    SLIDING,
    make,
)
from one_round import after_every_round
from pairs import perturbed

import specker
from specker.checkpoints.checkpoint import read
from specker.kernels.tree_attention import MAX_WORDS
from specker.model import memory, rings
from specker.model.cache import KVCache
from specker.model.decoder import Model, forward
from specker.model.memory import Cost, needed
from specker.model.prefill import COMPILED_CHUNK, prefill
from specker.runtime.strategies.base import LOOKAHEAD
from specker.runtime.strategies.model_drafter import CATCH_UP_ROWS

PAGE, RING = 16, 96  # columns
SIZES = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 96}  # which the compiled layers support
KINDS = {
    "gemma3": GEMMA3 | {"layers": 4, "tied": False, "layer_types": [SLIDING, FULL, SLIDING, SLIDING]} | SIZES,
    "mistral": {"arch": "mistral", "layers": 4, "sliding_window": 20} | SIZES,  # no layer without a window
    "qwen2": {"arch": "qwen2", "layers": 4, "max_window_layers": 2, **SHORT} | SIZES,
}
GEMMA4S = {  # two kinds of heads, the narrow ones in rings
    "gemma4": GEMMA4 | {"tied": False} | SIZES | GEMMA4_WIDE,
    "gemma4-e2b": GEMMA4_PLE | {"tied": False} | SIZES | GEMMA4_WIDE_PLE,
}
HOW = {
    "ar": {"strategy": "ar"},
    "chain": {"strategy": "draft", "draft_tokens": 4},
    "tree": {"strategy": "draft", "tree": "3x3"},
    "lookup": {"strategy": "lookup"},
    "exit": {"strategy": "del", "policy": "fixed", "exit_layer": 3, "draft_tokens": 3},
    "easyspec": {"strategy": "easyspec", "layer_parallel": "[[0],[1],[2,3]]"},
    "static": {"strategy": "draft", "tree": "3x3", "graphs": "on"},  # the device places the rows
}
PROMPTS = [[random.Random(n).randrange(3, 120) for _ in range(n)] for n in (230, 7, 100, 95, 161)]
TURN = [99, 5, 9, 40]


@pytest.fixture(autouse=True)
def short_rings(monkeypatch):
    monkeypatch.setattr(rings, "AHEAD", RING - 20)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """kind -> (target, draft)."""
    made = {}
    for kind, options in (KINDS | GEMMA4S).items():
        target = make(tmp_path_factory.mktemp(kind), max_context=340, **options)
        made[kind] = target, perturbed(target, tmp_path_factory.mktemp(f"{kind}-draft"), amount=0.05)
    return made


@pytest.fixture(scope="module")
def plain(pairs):
    """A function of (kind, prompt, count): the tokens of plain decoding in float64 with all K/V."""

    @functools.cache
    def engine(kind):
        return specker.load(pairs[kind][0], strategy="ar", dtype="float64", page_size=1024)

    @functools.cache
    def tokens(kind, prompt, count, how):
        assert engine(kind).cache.rings is None, "one page holds the context"
        return engine(kind).generate(list(prompt), count, **dict(how)).tokens

    return lambda kind, prompt, count, **how: tokens(kind, tuple(prompt), count, tuple(how.items()))


def load(pair, how, **more):
    target, draft = pair
    side = draft if HOW[how]["strategy"] in ("draft", "easyspec") else None
    engine = specker.load(target, side, **{"dtype": "float64", "page_size": PAGE, **HOW[how], **more})
    assert engine.cache.rings.most * PAGE == RING
    return engine


@pytest.mark.parametrize(("kind", "how"), cases.one_in(3, KINDS, HOW))
def test_texts_of_several_rings(pairs, plain, kind, how):
    """Alone, and in a batch whose slots and rings go to later requests."""
    texts = [plain(kind, prompt, 8) for prompt in PROMPTS]
    assert load(pairs[kind], how).generate(PROMPTS[0], 8).tokens == texts[0]
    three = load(pairs[kind], how, batch_size=3)
    assert [out.tokens for out in three.generate(PROMPTS, 8)] == texts


@pytest.mark.parametrize("how", ["ar", "tree", "exit"])
def test_sampled_texts(pairs, plain, how):
    engine, sampling = load(pairs["gemma3"], how), {"temperature": 0.8, "seed": 3}
    got = engine.generate(PROMPTS[0], 40, **sampling)
    assert got.tokens == plain("gemma3", PROMPTS[0], 40, **sampling)


@pytest.mark.parametrize(("kind", "how"), [("gemma3", "tree"), ("mistral", "exit"), ("gemma3", "static")])
def test_no_row_reads_a_column_that_left_its_window(pairs, plain, kind, how, monkeypatch):
    """Before every round all places of rings but those that the next rows see are NaN, which would spread."""
    engine = load(pairs[kind], how)
    own = engine.cache.rings
    for x in (own.k, own.v):
        x.fill_(float("nan"))

    def look(loop, r):
        length = len(r.requests[0].token_ids)
        # On a CPU, a round that is pending has run already.
        seen = own.slots[engine.cache.slots(0, max(0, length - own.sliding_window), length + loop.reserved)]
        for x in (own.k.flatten(1, 2), own.v.flatten(1, 2)):
            kept = x[:, seen].clone()
            x.fill_(float("nan"))
            x[:, seen] = kept

    with after_every_round(monkeypatch, look) as rounds:
        assert engine.generate(PROMPTS[0], 50).tokens == plain(kind, PROMPTS[0], 50)
    assert len(rounds) > 12


@pytest.mark.parametrize(("kind", "dtype"), [("gemma3", torch.float64), ("mistral", torch.float32)])
def test_the_values_are_those_of_all_columns(pairs, kind, dtype):
    """Of K, V and outputs: of chunks of a prompt and of chains of rows. Compiled layers compute the same bits."""
    model = Model(read(pairs[kind][0], dtype=dtype, device="cpu"))
    bound = 1e-12 if model.stack is None else 0
    how = {"dtype": dtype, "device": "cpu", "page_size": PAGE}
    plain, ringed = caches = [KVCache(model.config, 340, rings=rings, **how) for rings in (False, True)]
    text, sliding_window, outs = PROMPTS[0] + PROMPTS[4], max(model.config.layer.sliding_windows), []
    for cache in caches:
        prefill(model, cache, text[:250], chunk=RING - sliding_window)
        rows = []
        for start in range(250, 338, 8):
            embedded = model.embed_tokens(torch.tensor(text[start : start + 8]))
            rows.append(forward(model, cache, cache.after([start], [8]), embedded).hidden)
            cache.exact_len[0] = start + 8
        cache.check()
        outs.append(torch.cat(rows))
    assert (outs[0] - outs[1]).abs().max() <= bound
    assert plain.rings is None and ringed.rings is not None
    for n, (ours, theirs) in enumerate(zip(ringed.layers, plain.layers, strict=True)):
        first = 338 - sliding_window if model.config.layer.sliding_window(n) else 0
        at = [cache.slots(0, first, 338) for cache in (ringed, plain)]
        at[0] = ringed.rings.slots[at[0]] if first else at[0]
        for a, b in zip(ours, theirs, strict=True):
            assert (a.flatten(0, 1)[at[0]] - b.flatten(0, 1)[at[1]]).abs().max() <= bound


def test_a_ring_moves_with_its_sequence(pairs):
    """Not to the pages that the sequence before it has left."""
    config = read(pairs["gemma3"][0], dtype=torch.float32, device="cpu").config
    cache = KVCache(config, 340, dtype=torch.float32, device="cpu", page_size=PAGE, sequences=3, rings=True)
    cache.take(0, 200), cache.take(1, 200)
    before = cache.rings.block_table[1].clone()
    cache.release(0)
    cache.move(1, 0)
    assert torch.equal(cache.rings.block_table[0], before) and before.unique().tolist() == [*range(6, 12), 18]


def test_blocks_of_a_large_round(pairs):
    """More rows than the kernels serve run in blocks of sequences."""
    config = read(pairs["gemma3"][0], dtype=torch.float32, device="cpu").config
    cache = KVCache(config, 340, dtype=torch.float32, device="cpu", page_size=PAGE, sequences=3, rings=True)
    for slot in range(3):
        cache.take(slot, 100 + 90 * slot)
    rows = cache.after([60, 150, 250], [5, 3, 7])
    blocks = list(rows.blocks(8))
    assert [len(block.slots) for _, block in blocks] == [8, 7] and rows.ring_rows is not None
    for n in range(2):
        assert torch.equal(torch.cat([block.ring_rows[n] for _, block in blocks]), rows.ring_rows[n])
    own = rows.ring_rows.table.unflatten(0, (3, 1))
    for at, (slots, table) in enumerate(zip(rows.ring_rows.slots.split([5, 3, 7]), own, strict=True)):
        columns = torch.arange(len(slots)) + [60, 150, 250][at]
        assert torch.equal(slots, table[0, columns // PAGE] * PAGE + columns % PAGE)


@pytest.mark.parametrize(
    ("kind", "how"),
    [("mistral", "tree"), ("qwen2", "exit"), ("gemma3", "chain"), ("gemma4", "chain"), ("gemma4-e2b", "tree")],
)
def test_compiled_layers_read_rings(pairs, kind, how):
    """Their rows are bit-equal in chunks and rounds, so that a turn continues an answer without `all`."""
    every = specker.load(pairs[kind][0], strategy="ar", dtype="float32", page_size=1024)
    engine, prompts = load(pairs[kind], how, dtype="float32", batch_size=2), PROMPTS[:3]
    assert engine.model.stack is not None and every.cache.rings is None
    want = [out.tokens for out in every.generate(prompts, 30)]
    assert [out.tokens for out in engine.generate(prompts, 30)] == want
    prompt = prompts[0] + want[0] + TURN
    got = engine.generate(prompt, 9)
    assert got.tokens == every.generate(prompt, 9).tokens and got.stats.prefilled == len(TURN)


@pytest.mark.parametrize(("kind", "how"), [(GEMMA4, "ar"), (GEMMA4, "exit"), (GEMMA4_SHARED, "tree")])
def test_layers_with_unlike_heads(tmp_path, kind, how):
    """Those with a window stand in rings, those without one in pages; short of that, each kind has its own tensor."""
    target = make(tmp_path / "target", max_context=340, **kind | {"tied": False})
    pair = target, perturbed(target, tmp_path / "draft", amount=0.05)
    whole = specker.load(target, strategy="ar", dtype="float64", page_size=1024)
    near, far = ((len(kv), *kv.shape[3:]) for kv in whole.cache.kv[::2])
    assert (near, far) == (((2, 2, 16), (2, 1, 32)) if kind is GEMMA4 else ((2, 2, 16), (1, 2, 32)))
    texts = [whole.generate(prompt, 12).tokens for prompt in PROMPTS]
    engine = load(pair, how, batch_size=3)
    assert [(len(kv), *kv.shape[3:]) for kv in engine.cache.kv[::2]] == [far, near]
    assert [out.tokens for out in engine.generate(PROMPTS, 12)] == texts
    sampled = {"temperature": 0.7, "seed": 5}
    assert engine.generate(PROMPTS[0], 20, **sampled).tokens == whole.generate(PROMPTS[0], 20, **sampled).tokens
    for cache, rings_of in ((whole.cache, 0), (engine.cache, 4)):
        page = cache.page_size
        found = sum(x.nbytes * (x.shape[1] - bool(rings_of)) // x.shape[1] for x in cache.kv)
        found += cache.rings.slots.nbytes - page * 8 if rings_of else 0
        cost = Cost.of(whole.model.config, cache.k.dtype, rings_of)
        other = Cost.of(replace(whole.model.config, num_layers=0), cache.k.dtype).position
        assert found == cost.kv(cache.spare, page) - cache.spare * page * other


# --- earlier texts


@pytest.mark.parametrize(("how", "size"), [("chain", 1), ("tree", 3), ("exit", 1)])
def test_a_turn_continues_the_ring_of_the_last_one(pairs, plain, how, size):
    engine, prompt = load(pairs["gemma3"], how, batch_size=size, prefix_cache="all"), list(PROMPTS[2])
    for new in (len(prompt) - 1, len(TURN), len(TURN)):  # the last token of an answer has no K/V yet
        got = engine.generate(prompt, 25)
        assert got.tokens == plain("gemma3", prompt, 25) and got.stats.prefilled == new
        prompt += got.tokens + TURN


@pytest.mark.parametrize("back", [0, 50, 82, 83, 150])
def test_a_beginning_that_left_the_ring_is_computed_again(pairs, plain, back):
    """The pages of the layers without a window still have it, and the ring has 96 columns, of which rows see 12."""
    engine, text = load(pairs["gemma3"], "ar", prefix_cache="all"), PROMPTS[0]
    exact = text + engine.generate(text, 5).tokens[:-1]
    prompt = exact[: len(exact) - back] + [0, *TURN]
    got, new = engine.generate(prompt, 20), len(TURN) if back < 83 else len(prompt) - 1
    assert got.tokens == plain("gemma3", prompt, 20) and got.stats.prefilled == new


def test_a_ring_whose_request_went_back_has_lost_as_many_columns_as_before(pairs, plain):
    """The columns that an earlier request wrote further on stand in their place."""
    engine, text = load(pairs["gemma3"], "ar", prefix_cache="all"), PROMPTS[0]
    for n, new in ((230, 229), (200, 0), (130, 129)):
        prompt = [*text[: n - 1], 0]
        got = engine.generate(prompt, 20 if n == 130 else 1)
        assert got.tokens == plain("gemma3", prompt, 20)[: len(got.tokens)] and got.stats.prefilled == new


def test_two_requests_do_not_share_pages(pairs, plain):
    """Two rings end with the same text, but a page of the other layers leads to one ring."""
    engine, prompt = load(pairs["gemma3"], "tree", batch_size=2, prefix_cache="all"), PROMPTS[2]
    same = engine.generate([prompt, prompt], 20)
    assert [out.tokens for out in same] == [plain("gemma3", prompt, 20)] * 2
    longer = [prompt + same[0].tokens + [end] for end in (5, 6)]
    outs = engine.generate(longer, 60)
    assert [out.tokens for out in outs] == [plain("gemma3", text, 60) for text in longer]
    assert sorted(out.stats.prefilled for out in outs) == [1, len(longer[0]) - 1]


def test_a_ring_cannot_go_back(pairs):
    cache = load(pairs["gemma3"], "ar").cache
    cache.take(0, 300)
    cache.exact_len[0] = 200
    with pytest.raises(ValueError, match="cannot truncate a cache of 200 exact columns to 199"):
        cache.truncate(199)
    cache.truncate(200), cache.truncate(0)


# --- memory


def test_rings_are_long_enough(monkeypatch):
    monkeypatch.undo()
    assert max(COMPILED_CHUNK, CATCH_UP_ROWS + 64 * MAX_WORDS) <= rings.AHEAD
    assert 2 * LOOKAHEAD <= rings.AHEAD  # a round of fixed shape may go back by the longest draft, and ahead by one


@pytest.mark.parametrize(("size", "more"), [(1, {}), (1, {"page_size": 1024}), (3, {}), (3, {"kv_tokens": 350})])
def test_the_cost_equals_the_allocation(pairs, size, more):
    engine = specker.load(pairs["gemma3"][0], strategy="ar", **{"page_size": PAGE, "batch_size": size, **more})
    cache, spare, page = engine.cache, size > 1, engine.options.page_size
    found = sum(x.nbytes * (x.shape[1] - spare) // x.shape[1] for x in cache.kv)
    cost = Cost.of(engine.model.config, cache.k.dtype, size + spare)
    if cache.rings is not None:
        found += cache.rings.slots.nbytes - spare * page * 8
    other = Cost.of(replace(engine.model.config, num_layers=0), cache.k.dtype).position
    assert found == cost.kv(cache.spare, page) - cache.spare * page * other
    assert (cache.rings is None) == (page == 1024 or "kv_tokens" in more)


def test_long_contexts_of_gemma_3_cost_a_fifth(pairs, monkeypatch):
    """By the sizes of the model of 27 billion parameters: 10 of 62 layers see all columns, the others 1,024."""
    monkeypatch.undo()
    config = read(pairs["gemma3"][0], dtype=torch.float32, device="cpu").config
    windows = tuple(0 if n % 6 == 5 else 1024 for n in range(62))
    layer = replace(config.layer, sliding_windows=windows, ropes=tuple(int(window > 0) for window in windows))
    sizes = {"num_layers": 62, "num_heads": 32, "num_kv_heads": 16, "head_dim": 128, "max_context": 131072}
    big = replace(config, layer=layer, **sizes)
    costs = [Cost.of(big, torch.bfloat16, count) for count in (0, 1)]
    whole, ringed = (memory.held([cost], 32768, 256, LOOKAHEAD) for cost in costs)
    assert 4.8 < whole / ringed < 5
    free = memory.held([costs[0]], 32768, 256, LOOKAHEAD) + costs[0].passing * 32768
    assert memory.largest([costs[1]], free, 256, LOOKAHEAD) > 65_000


def test_a_longer_context_is_admitted(pairs, free_memory):
    folder = pairs["gemma3"][0]
    config = read(folder, dtype=torch.float32, device="cpu").config
    spare = memory.reserve([config], torch.float32, torch.device("cpu"))
    plain, ringed = (Cost.of(config, torch.float32, count) for count in (0, 1))
    room = needed([ringed], 340, PAGE, LOOKAHEAD)
    assert memory.largest([plain], room, PAGE, LOOKAHEAD) < 340
    free_memory(room + spare)
    engine = specker.load(folder, strategy="ar", device="cpu", dtype="float32", page_size=PAGE)
    assert engine.max_context == 340 and engine.remarks.keys() <= {"cpu"}


@pytest.mark.parametrize("kind", ["gemma3", "llama"])
def test_a_pool_has_the_positions_that_fit(pairs, tmp_path, kind, free_memory):
    folder = pairs["gemma3"][0] if kind == "gemma3" else make(tmp_path, max_context=340)
    engine = specker.load(folder, strategy="ar", device="cpu", dtype="float32", page_size=PAGE, batch_size=4)
    known = engine.recipe.memory
    [cost], spare = known._costs, known._spare
    passing, first = cost.passing * 340, -(-(340 + LOOKAHEAD) // PAGE)
    for pages in (first, first + 9, 4 * first - 1, 4 * first):
        for short in (0, 1):
            free_memory(cost.kv(pages, PAGE) + passing + spare - short)
            most, note = known.pool(4, None)
            if pages - short >= 4 * first:
                assert most is None and note is None
            else:
                assert most == max(first, pages - short) * PAGE and f"has {most} positions for 4 sequences" in note
