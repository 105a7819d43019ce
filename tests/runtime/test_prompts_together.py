"""Parts of several prompts share a pass, with the rows of the requests that decode: every request has the tokens that
it has alone, the oldest prompt comes first, and a beginning that prompts share is computed once."""

import functools
import random
from collections import Counter

import cases
import pytest
import torch
from make_checkpoint import GEMMA3, LFM2, QWEN3_5, make
from pairs import perturbed

import specker
from specker import cpu
from specker.options import Params
from specker.runtime import loop as loops
from specker.runtime import prompts
from specker.runtime.strategies.dynamic_exit.exit_policy import DynamicExit

pytestmark = [
    pytest.mark.usefixtures("cheap"),
    pytest.mark.skipif(cpu.problem() is not None, reason="without compiled kernels bits depend on the company"),
]
SIZES = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 96}
KINDS = {
    "llama": {"arch": "llama", "layers": 3, "max_context": 700} | SIZES,
    "windows": {**GEMMA3, "max_context": 700} | SIZES,
    "qwen3.5": QWEN3_5 | {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "seed": 3, "max_context": 700},
    "lfm2": LFM2 | {"tied": False, "seed": 1, "heads": 2, "kv_heads": 1, "head_dim": 32, "max_context": 700},
    "experts": {"arch": "mixtral", "layers": 2, "max_context": 700} | SIZES,
}
WAYS = {
    "ar": {"strategy": "ar"},
    "draft": {"strategy": "draft", "policy": "fixed", "draft_tokens": 3},
    "tree": {"strategy": "draft", "tree": "2x3"},
    "lookup": {"strategy": "lookup", "draft_tokens": 4},
    "del": {"strategy": "del"},
}
EXITS = {
    "del": {},
    "del-length": {"policy": "del-length"},
    "plus-minus-one": {"policy": "plus-minus-one", "exit_layer": 2},
    "del+vocabtrim": {"vocab_keep": "100", "vocab_text": 8},
    "del+lookup": {},
}
CASES = [("llama", way) for way in WAYS] + [(kind, way) for kind in list(KINDS)[1:] for way in ("ar", "draft")]
BUDGET = 13  # rows of prompts in a pass with others


def text_of(length: int, seed: int = 0) -> list[int]:
    g = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, 90, (length,), generator=g).tolist()


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """kind -> (target, draft)."""
    made = {}
    for kind, options in KINDS.items():
        target = make(tmp_path_factory.mktemp("target") / kind, **options)
        made[kind] = target, perturbed(target, tmp_path_factory.mktemp("draft") / kind, amount=0.05)
    return made


def load(targets, kind="llama", way="ar", size=5, **more):
    target, draft = targets[kind]
    drafts = [draft] if WAYS[way]["strategy"] == "draft" else []
    engine = specker.load(
        target, *drafts, dtype="float32", device="cpu", batch_size=size, page_size=16, **WAYS[way], **more
    )
    assert engine.loop.slots.several == (size > 1 or engine.model.stack is not None)
    return engine


@pytest.fixture
def passes(monkeypatch):
    """The sizes of each pass's parts; passes with others have BUDGET rows of prompts, whatever the clock says."""
    seen, forward = [], prompts.prefill_parts

    def counted(model, cache, parts, *rest):
        seen.append([len(part.tokens) for part in parts])
        return forward(model, cache, parts, *rest)

    monkeypatch.setattr(prompts, "prefill_parts", counted)
    monkeypatch.setattr("specker.runtime.round.round.prefill_parts", counted)
    monkeypatch.setattr(prompts.Prompts, "_chunk", lambda self: BUDGET)
    return seen


def decoding(engine, count=60):
    """A request that decodes from now on."""
    request = engine.session.submit(text_of(3, seed=9), Params(max_new_tokens=count))
    while not request.tokens:
        engine.session.step()
    return request


def finish(engine, order=None):
    """Run all requests to their ends. `order`: gets them in the order of their first tokens."""
    while engine.session.busy:
        for event in engine.session.step():
            if order is not None and event.request not in order:
                order.append(event.request)
    for cache in engine.loop.slots.caches:
        assert cache.free_pages == cache.spare, "every page is back in the pool"


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_tokens_are_those_of_each_request_alone(targets, passes, kind, way):
    """Greedy and sampled, of prompts longer and shorter than a part, which arrive while others are prefilled."""
    lengths = (5, 140, 4, 1, 77, 300, 9, 33)
    asked = [
        (text_of(length, seed=n), {"max_new_tokens": 7 + n, "temperature": (0.0, 0.7)[n % 2], "seed": n})
        for n, length in enumerate(lengths)
    ]
    alone = load(targets, kind, "ar", size=1, prefix_cache="off")
    want = [alone.generate(text, **how).tokens for text, how in asked]
    engine, requests = load(targets, kind, way), []
    passes.clear()
    for text, how in asked:
        requests.append(engine.session.submit(text, Params.of(**how)))
        engine.session.step()
    finish(engine)
    assert [request.tokens for request in requests] == want
    assert max(map(len, passes)) > 1, "no pass had parts of several prompts"
    assert sum(map(sum, passes)) == sum(request.stats.prefilled for request in requests)


def test_no_request_waits_for_a_later_one(targets, passes):
    """First tokens come in the order of arrival. While nothing decodes yet all prompts have one pass; a round has at
    most BUDGET rows of prompts."""
    lengths = (90, 5, 40, 2)
    for before in (False, True):
        engine, order = load(targets), []
        beside = decoding(engine) if before else None
        passes.clear()
        requests = [engine.session.submit(text_of(n), Params(max_new_tokens=30)) for n in lengths]
        grown = len(beside.token_ids) if beside else 0
        engine.session.step()
        if beside:
            assert len(beside.token_ids) > grown and passes == [[BUDGET]]
        else:
            assert passes == [[89, 4, 39, 1]]
        finish(engine, order)
        assert [request for request in order if request is not beside] == requests
        assert max(map(sum, passes[not before :]), default=0) <= BUDGET


@pytest.mark.parametrize(("way", "size"), cases.one_in(2, EXITS, [2, 4]))
def test_prompts_join_rounds_that_watch_layers(targets, passes, monkeypatch, way, size):
    """DEL reads hidden rows of the round, and of a prompt only those at its end. Random arrivals, steps and cancels."""
    watches = functools.partial(DynamicExit, overhead=1e9)  # every round watches
    monkeypatch.setattr("specker.runtime.strategies.dynamic_exit.exit_policy.DynamicExit", watches)
    rng = random.Random(f"{way} {size}")
    how = {"strategy": way if way.startswith("del+") else "del", **EXITS[way]}
    engine = specker.load(targets["llama"][0], dtype="float32", device="cpu", batch_size=size, page_size=16, **how)
    texts = [text_of(length) for length in (3, 20, 45, 150)]
    alone = {len(text): engine.generate_ar(text, 30).tokens for text in texts}
    requests = []
    for _ in range(40):
        while rng.random() < 0.3:
            requests.append(engine.session.submit(rng.choice(texts), Params(max_new_tokens=rng.randrange(1, 30))))
        engine.session.step()
        if requests and rng.random() < 0.05:
            engine.session.cancel(rng.choice(requests))
    finish(engine)
    for request in requests:
        assert request.tokens == alone[request.prompt_length][: len(request.tokens)]
        assert request.finished in ("length", "cancelled")
    assert any(request.stats.drafted for request in requests)


SHARED = 100  # tokens that prompts begin with


def together(engine, tails=(20, 30, 5), **first):
    """Requests that begin alike, which arrive at once while another one decodes."""
    decoding(engine)
    texts = [text_of(SHARED) + text_of(tail, seed=2) for tail in tails]
    return texts, [
        engine.session.submit(text, Params(max_new_tokens=8, **(first if n == 0 else {})))
        for n, text in enumerate(texts)
    ]


@pytest.mark.parametrize("way", ["ar", "draft", "lookup"])
def test_a_shared_beginning_is_computed_once(targets, passes, way):
    """Though the prompts that share it come while it is in flight."""
    engine, alone = load(targets, "llama", way), load(targets, size=1, prefix_cache="off")
    texts, requests = together(engine)
    finish(engine)
    assert [request.tokens for request in requests] == [alone.generate(text, 8).tokens for text in texts]
    own = [SHARED + 19, 29, 4]
    assert [request.stats.prefilled for request in requests] == own


def test_who_computes_a_shared_beginning_may_leave(targets, passes):
    """The next one goes on where it ended."""
    engine, alone = load(targets), load(targets, size=1, prefix_cache="off")
    texts, requests = together(engine)
    for _ in range(4):
        engine.session.step()
    assert list(engine.loop.slots.filling) == requests[:1] and engine.loop.prompts.waiting[0] is requests[1]
    engine.session.cancel(requests[0])
    finish(engine)
    assert [request.tokens for request in requests[1:]] == [alone.generate(text, 8).tokens for text in texts[1:]]
    computed = Counter({request: request.stats.prefilled for request in requests})
    assert computed[requests[0]] == 4 * BUDGET and computed[requests[1]] == SHARED + 29 - 4 * BUDGET
    assert computed[requests[2]] == 4


def test_who_shares_nothing_waits_for_nobody(targets, passes):
    """A request that keeps its K/V to itself is computed beside the others, and they beside it."""
    engine = load(targets)
    _, requests = together(engine, prefix_cache="off")
    finish(engine)
    assert [request.stats.prefilled for request in requests] == [SHARED + 19, SHARED + 29, 4]
    for salt in ("a", "b"):
        engine.session.submit(text_of(40), Params(max_new_tokens=8, cache_salt=salt))
    passes.clear()
    finish(engine)
    assert passes == [[39, 39]]


def test_a_round_lasts_about_three_usual_ones(targets, monkeypatch):
    """Here a row takes a second, and a round ten: its prompts' rows lengthen it by STALL of the usual round, half of
    that if a draft model prefills its prompts, too."""
    for way, share in (("ar", 1.0), ("draft", 0.5)):
        engine, seen, collect = load(targets, "llama", way, size=2), [], loops.collect

        def timed(r, seen=seen, collect=collect):
            count = sum(len(part.tokens) for part in r.parts)
            seen.append(count)
            r.marks = [0.0, 0.0, 0.0, 10.0 + count, 10.0 + count]
            return collect(r)

        monkeypatch.setattr(loops, "collect", timed)
        decoding(engine, 100)
        engine.loop.prompts.pace = prompts.Pace(row=1.0, rounds={1: 10.0, 2: 10.0})
        engine.session.submit(text_of(500), Params(max_new_tokens=1))
        for _ in range(20):
            engine.session.step()
        monkeypatch.setattr(loops, "collect", collect)
        assert 10 * prompts.STALL * share * 0.7 <= seen[-1] <= 10 * prompts.STALL * share, seen
