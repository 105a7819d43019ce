"""A request takes over the K/V of earlier texts with the same beginning, and its tokens are those without it."""

import random

import cases
import pytest
import torch
from make_checkpoint import make
from one_round import after_every_round, apart
from pairs import perturbed

import specker
from specker import cpu
from specker.model.prefixes import Match, Prefixes

pytestmark = pytest.mark.usefixtures("cheap")  # drafts do not depend on the clock
WAYS = {
    "ar": {"strategy": "ar"},
    "draft": {"draft_tokens": 4},
    "tree": {"tree": "3x3"},
    "easyspec": {"strategy": "easyspec", "layer_parallel": "[[0],[1,2]]"},
    "del": {"strategy": "del"},
    "diffuspec": {"strategy": "diffuspec", "cps": "off", "adl": "2-4"},
    "lookup": {"strategy": "lookup"},
}
START = [n * 7 % 90 + 3 for n in range(60)]
TURN = [99, 5, 9, 40]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    target = make(folder / "target", "qwen2", layers=3, max_context=400)
    return {"": target, "draft": perturbed(target, folder / "draft"), "dream": make(folder / "dream", "dream")}


def load(models, way, **more):
    options = {"strategy": "draft", "prefix_cache": "all", **WAYS[way], **more}
    side = {"ar": [], "del": [], "lookup": [], "diffuspec": [models["dream"]]}.get(
        options["strategy"], [models["draft"]]
    )
    return specker.load(models[""], *side, **{"dtype": "float64", "device": "cpu", "page_size": 16, **options})


@pytest.mark.parametrize(("way", "graphs", "size"), cases.diagonal(WAYS, ["off", "on"], [1, 3]))
def test_a_turn_costs_only_its_new_tokens(models, way, graphs, size, monkeypatch):
    """In a batch too, beside other texts. The caches hold what a fresh pass computes."""
    engine, prompt, worst = load(models, way, graphs=graphs, batch_size=size), list(START), []

    def look(loop, r):
        drafts = loop.drafter is not None and way in ("draft", "tree", "easyspec")
        pairs = [(loop.target, loop.cache), *([(loop.drafter.model, loop.drafter.cache)] if drafts else [])]
        for slot, request in enumerate(r.requests):
            for model, cache in pairs:
                worst.append(
                    apart(model, cache, request.token_ids, min(cache.exact_len[slot], len(request.token_ids)), slot)
                )

    for turn, how in enumerate(({}, {"temperature": 0.7}, {"temperature": 1.0, "seed": 3})):
        beside = [[turn + 1] * 9] * (size - 1)
        with after_every_round(monkeypatch, look):
            got, *_ = engine.generate([prompt, *beside], 8, **how)
        assert got.tokens == cases.plain(models[""], prompt, 8, **how)
        new = len(prompt) - 1 if turn == 0 else len(TURN)  # the last token of an answer has no K/V yet
        assert got.stats.prefilled == new
        prompt += got.tokens + TURN
    assert max(worst) < 1e-12


@pytest.mark.parametrize("way", ["draft", "del", "lookup"])
def test_an_answer_that_was_cut_short(models, way):
    """The user ends a turn; the next one continues from the part that was shown."""
    engine = load(models, way)
    stream, tokens = engine.stream(START, 40), []
    while len(tokens) < 7:
        tokens += next(stream).tokens
    stream.close()
    prompt = START + tokens + TURN
    got = engine.generate(prompt, 20)
    assert got.tokens == cases.plain(models[""], prompt, 20) and got.stats.prefilled <= len(TURN) + 5


def test_only_the_common_beginning_is_kept(models):
    engine = load(models, "draft")
    engine.generate(START, 20)
    other = START[:31] + [7, 7] + START[33:]
    got = engine.generate(other, 20)
    assert got.tokens == cases.plain(models[""], other, 20) and got.stats.prefilled == len(other) - 1 - 31
    got = engine.generate(other[:20], 20)
    assert got.tokens == cases.plain(models[""], other[:20], 20) and got.stats.prefilled == 0


def test_a_running_request_shares_its_prompt(models):
    """Its pages have two owners then, and outlive it."""
    engine = load(models, "draft", batch_size=3)
    first = engine.stream(START, 60)
    next(first)
    got = engine.generate(START + [5], 20)
    assert got.tokens == cases.plain(models[""], START + [5], 20) and got.stats.prefilled == 1
    first.close()
    got = engine.generate(START + [6], 20)
    assert got.tokens == cases.plain(models[""], START + [6], 20) and got.stats.prefilled == 0


def test_what_keeps_nothing(models):
    """`prefix_cache` off, of the engine or a request; plain decoding; a warm-up; logits that are not finite."""
    off, engine = {"prefix_cache": "off"}, load(models, "draft")
    for each, how in ((load(models, "draft", **off), {}), (engine, off)):
        for _ in range(2):
            assert each.generate(START, 5, **how).stats.prefilled == len(START) - 1
    assert engine.generate_ar(START, 5).stats.prefilled == len(START) - 1
    assert engine.generate(START, 5).stats.prefilled == len(START) - 1
    engine.warmup()
    assert engine.generate(START, 5).stats.prefilled == len(START) - 1
    assert engine.generate(START, 5).stats.prefilled == 0


def test_exact_takes_over_whole_chunks_of_prefills_alone(models, chunk_prompts):
    """Where bits depend on the chunk. What rounds wrote, and the prompt's last chunk, are computed again."""
    chunk_prompts(24)
    engine = load(models, "draft", prefix_cache="exact")
    got = engine.generate(START, 30)
    prompt = START + got.tokens + TURN
    assert engine.generate(prompt, 5).stats.prefilled == len(prompt) - 1 - 48
    again = engine.generate(prompt, 5)
    assert again.stats.prefilled == (len(prompt) - 1) % 24 and again.tokens == cases.plain(models[""], prompt, 5)
    engine = load(models, "draft", prefix_cache="all")
    assert engine.generate(START, 30).tokens == got.tokens
    assert engine.generate(prompt, 5).stats.prefilled == len(TURN)
    each = [engine.generate(prompt, 5, prefix_cache="exact").stats.prefilled for _ in range(2)]
    assert each == [len(prompt) - 1, (len(prompt) - 1) % 24]


@pytest.mark.parametrize("options", [{}, {"dtype": "float32"}, {"quantize": "int8"}])
def test_exact_has_the_bits_of_a_fresh_prefill(options):
    """With compiled layers rows have the same bits in rounds and in chunks of any size, so that an answer is not
    computed again either."""
    how = {"strategy": "draft", "device": "cpu", "page_size": 16, **options}
    fresh, shared = (specker.load(prefix_cache=kind, **how) for kind in ("off", "exact"))
    prompt = list(START)
    for _ in range(2):
        rows, tokens = [], []
        for engine in (fresh, shared):
            stream = engine.stream(prompt, 20)
            next(stream)
            at = engine.cache.slots(0, 0, len(prompt) - 1)
            rows.append(torch.stack([x.flatten(1, 2)[:, at] for x in (engine.cache.k, engine.cache.v)]))
            stream.close()
            tokens.append(engine.generate(prompt, 20).tokens)
        assert torch.equal(*rows) and tokens[0] == tokens[1]
        prompt += tokens[0] + TURN
    if cpu.problem() is None:
        assert shared.generate(prompt, 1).stats.prefilled == len(TURN)


def test_del_learns_from_the_new_rows(models, monkeypatch):
    """Its statistics start from the last rows of the prompt that were computed, here fewer than it asks for."""
    monkeypatch.setattr("specker.runtime.strategies.dynamic_exit.early_exit.PROMPT_SHARE", 1 / 32)
    engine = load(models, "del")
    tokens, seen = engine.generate(START, 20).tokens, []
    request = engine.session.request(START + tokens + TURN)
    request.policy.learn = lambda layers, match, *_: seen.append(match.shape[1])
    next(engine.session.stream([request]))
    assert seen[0] == len(TURN)


@pytest.mark.parametrize(("way", "keeps"), [("draft", True), ("diffuspec", False)])
def test_a_drafter_with_inexact_columns_starts_anew(models, way, keeps, monkeypatch):
    engine, started = load(models, way), []
    advance, cache = engine.drafter.advance, engine.drafter.cache
    monkeypatch.setattr(
        engine.drafter, "advance", lambda *args, **how: started.append(cache.exact_len[0]) or advance(*args, **how)
    )
    tokens = engine.generate(START, 20).tokens
    started.clear()
    engine.generate(START + tokens + TURN, 20)
    assert (started[0] > len(START)) == keeps and (keeps or started[0] == 0)


def test_the_oldest_texts_go_first(models):
    """The pool has room for the pages of about three texts."""
    engine = load(models, "ar", batch_size=2, kv_tokens=32 * 16)
    texts = [[n] * 60 for n in range(1, 5)]
    for text in texts:
        engine.generate(text, 4)
    assert engine.generate(texts[3], 4).stats.prefilled == 0 < engine.generate(texts[0], 4).stats.prefilled


def common(a, b):
    """The length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_the_tree_against_a_list_of_texts():
    """Random texts over few tokens: matches are the longest common beginnings, and every page has its owners."""
    rng, size = random.Random(3), 4
    users = [0] * 400
    tree, kept, pages = Prefixes(size, users), [], iter(range(400))
    for _ in range(60):
        text = [rng.randrange(2) for _ in range(rng.randrange(1, 16))]
        match = tree.match(text)
        assert match.columns == max((common(each, text) for each in kept), default=0)
        assert len(match.pages) == match.columns // size and (match.copied is None) == (match.columns % size == 0)
        own = [next(pages) for _ in range(-(-len(text) // size))]
        freed = tree.add(text, own, len(text))
        kept.append(text)
        assert all(users[page] == 0 for page in freed)
    held = sum(user > 0 for user in users)
    assert tree.evictable == held and all(user <= 1 for user in users)
    assert len(tree.evict(held)) == held and not any(users) and tree.match(kept[0]) == Match()
