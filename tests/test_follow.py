"""A request that follows another keeps the K/V of their common beginning, and its tokens are those without it."""

from collections import deque

import cases
import pytest
import torch
from make_checkpoint import make
from one_round import apart
from pairs import perturbed

import specker

pytestmark = pytest.mark.usefixtures("cheap")  # drafts do not depend on the clock
WAYS = {
    "ar": {"strategy": "ar"},
    "draft": {"draft_tokens": 4},
    "tree": {"tree": "3x3"},
    "easyspec": {"strategy": "easyspec", "layer_parallel": "2"},
    "del": {"strategy": "del"},
    "diffuspec": {"strategy": "diffuspec", "cps": "off", "adl": "2-4"},
    "lookup": {"strategy": "lookup"},
}
START = [n * 7 % 90 + 3 for n in range(60)]
TURN = [99, 5, 9, 40]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    target = make(folder / "target", "qwen2", layers=4, max_context=400)
    return {"": target, "draft": perturbed(target, folder / "draft"), "dream": make(folder / "dream", "dream")}


def load(models, way, **more):
    options = {"strategy": "draft", **WAYS[way], **more}
    side = {"ar": [], "del": [], "lookup": [], "diffuspec": [models["dream"]]}.get(
        options["strategy"], [models["draft"]]
    )
    return specker.load(models[""], *side, dtype="float64", device="cpu", page_size=16, **options)


def answer(engine, prompt, count=20, stop_after=None, **how):
    """The tokens of a request that follows the last one, and its sequence."""
    request = engine.request(0, prompt, count, **how)
    request.follows = True
    steps, tokens = engine.serve(deque([request])), []
    for step in steps:
        tokens += step.tokens
        if stop_after is not None and len(tokens) >= stop_after:
            steps.close()
            break
    return tokens, request


@pytest.mark.parametrize(("way", "graphs"), cases.one_in(1, WAYS, ["off", "on"]))
def test_a_conversation_has_the_tokens_of_separate_requests(models, way, graphs):
    engine, prompt = load(models, way, graphs=graphs), list(START)
    for turn, how in enumerate(({}, {"temperature": 0.7}, {"temperature": 1.0, "seed": 3})):
        tokens, request = answer(engine, prompt, **how)
        assert tokens == cases.plain(models[""], prompt, 20, **how)
        new = len(prompt) - 1 if turn == 0 else len(TURN) + 1  # the last token of an answer has no K/V yet
        assert request.stats.prompt == (new if turn == 0 else new - 1)
        text = prompt + tokens
        for slot, (model, cache) in enumerate(
            zip((engine.model, engine.drafter and engine.drafter.model), engine.batch.caches, strict=False)
        ):
            length = min(cache.exact_len[0], len(text) - 1)
            if slot == 0 or way in ("draft", "tree", "easyspec"):
                assert length > len(prompt) and apart(model, cache, text, length) < 1e-12
        prompt = text + TURN


@pytest.mark.parametrize("way", ["draft", "del", "lookup"])
def test_an_answer_that_was_cut_short(models, way):
    """The user ends a turn; the next one continues from the part that was shown."""
    engine = load(models, way)
    tokens, _ = answer(engine, START, 40, stop_after=7)
    prompt = START + tokens + TURN
    rest, request = answer(engine, prompt)
    assert rest == cases.plain(models[""], prompt, 20) and request.stats.prompt <= len(TURN) + 5


def test_only_the_common_beginning_is_kept(models):
    engine = load(models, "draft")
    answer(engine, START)
    other = START[:31] + [7, 7] + START[33:]
    tokens, request = answer(engine, other)
    assert tokens == cases.plain(models[""], other, 20) and request.stats.prompt == len(other) - 1 - 31
    shorter = other[:20]
    tokens, request = answer(engine, shorter)
    assert tokens == cases.plain(models[""], shorter, 20) and request.stats.prompt == 0


def test_what_keeps_nothing(models):
    """A request that does not follow, one after plain decoding for the drafter, and batches."""
    engine = load(models, "draft")
    answer(engine, START)
    assert engine.generate(START, 5).stats.prompt == len(START) - 1
    engine.generate_ar(START, 5)
    tokens, request = answer(engine, START)
    assert tokens == cases.plain(models[""], START, 20) and request.stats.prompt == 0
    assert apart(engine.drafter.model, engine.drafter.cache, START + tokens, len(START)) < 1e-12
    engine.warmup()
    assert answer(engine, START)[1].stats.prompt == len(START) - 1
    both = load(models, "draft", batch_size=2)
    answer(both, START)
    tokens, request = answer(both, START)
    assert tokens == cases.plain(models[""], START, 20) and request.stats.prompt == len(START) - 1


def test_del_learns_from_the_new_rows(models, monkeypatch):
    """Its statistics start from the last rows of the prompt that were computed, here fewer than it asks for."""
    monkeypatch.setattr("specker.runtime.loop.PROMPT_SHARE", 1 / 32)
    engine = load(models, "del")
    tokens, _ = answer(engine, START)
    heard = []
    request = engine.request(0, START + tokens + TURN, 20)
    request.follows = True
    request.policy.learn = lambda layers, match, *_: heard.append(match.shape[1])
    list(engine.serve(deque([request])))
    assert heard[0] == len(TURN)
    assert torch.is_inference_mode_enabled() is False


@pytest.mark.parametrize(("way", "keeps"), [("draft", True), ("easyspec", True), ("diffuspec", False)])
def test_a_drafter_with_inexact_columns_starts_anew(models, way, keeps, monkeypatch):
    engine, started = load(models, way), []
    catch_up, cache = engine.drafter.catch_up, engine.drafter.cache
    monkeypatch.setattr(
        engine.drafter, "catch_up", lambda r, slot: started.append(cache.exact_len[slot]) or catch_up(r, slot)
    )
    tokens, _ = answer(engine, START)
    started.clear()
    answer(engine, START + tokens + TURN)
    assert (started[0] > len(START)) == keeps and (keeps or started[0] == 0)
