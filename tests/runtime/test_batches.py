"""Batches: pages, admission, statistics and the interface. The conformance table asserts that the tokens of a request
do not depend on the rest of its batch."""

import random
import time
from collections import deque

import pytest
from make_checkpoint import make
from pairs import perturbed

import specker
from specker.options import Params
from specker.runtime import prompts
from specker.runtime.control.stats import Stats
from specker.runtime.round import round
from specker.runtime.strategies import model_drafter

STRATEGIES = {"chain": {"draft_tokens": 4}, "tree": {"tree": "3x3"}, "del": {"strategy": "del"}}
DRAWS = [
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 3},
    {"temperature": 1.0, "top_p": 0.8, "top_k": 20, "seed": 5},
    {"temperature": 0.0, "seed": 9},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "seed": 2**63},
    {"temperature": 1.2, "top_k": 5, "seed": 1},
]
LENGTHS = (1, 300, 20, 2, 77, 5, 64)
COUNTS = (16, 8, 1, 9, 18, 14, 11)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Models, requests, and their tokens from plain decoding one by one. Some texts end early, with a stop id."""
    folder = tmp_path_factory.mktemp("batches")
    target = make(folder / "target", "qwen2", layers=3, max_context=400)
    draft = perturbed(target, folder / "draft", amount=0.05)
    rng = random.Random(1)
    requests = []
    for n, (length, count) in enumerate(zip(LENGTHS, COUNTS, strict=True)):
        prompt = [rng.randrange(3, 90) for _ in range(length)]
        requests.append((prompt, {"max_new_tokens": count, **DRAWS[n % len(DRAWS)]}))
    plain = specker.load(target, strategy="ar", dtype="float64", device="cpu")
    texts = [plain.generate(prompt, **how).tokens for prompt, how in requests]
    stop = texts[4][9]
    for _, how in requests:
        how["stop_ids"] = [stop]
    cut = [text[: text.index(stop) + 1] if stop in text else text for text in texts]
    assert sum(len(a) < len(b) for a, b in zip(cut, texts, strict=True)) >= 1
    return {"target": target, "draft": draft, "requests": requests, "stop": stop, "texts": cut}


def load(world, name, **options):
    how = {"strategy": "draft", **STRATEGIES[name], **options}
    drafts = [] if how["strategy"] == "del" else [world["draft"]]
    return specker.load(world["target"], *drafts, dtype="float64", device="cpu", **how)


def served(engine, requests, drafting=lambda n: True, every=3):
    """The tokens of each request. A few requests are there from the start; one more arrives every `every` chunks."""
    waiting = deque(made(engine, requests, drafting))
    tokens, stream = [[] for _ in requests], engine.session.stream([waiting.popleft(), waiting.popleft()])
    for events, event in enumerate(stream, 1):
        tokens[event.prompt_index] += event.tokens
        if waiting and (events % every == 0 or not engine.session.busy):
            stream.submit(waiting.popleft())
    assert not waiting
    return tokens


def made(engine, requests, drafting=lambda n: True):
    return [
        engine.session.request(prompt, Params.of(**how), index=n, speculates=drafting(n))
        for n, (prompt, how) in enumerate(requests)
    ]


@pytest.mark.parametrize("name", ["chain", "del"])
def test_plain_decoding_is_batch_invariant(world, name, cheap):
    """Plain requests only, and mixed with requests that draft."""
    engine = load(world, name, batch_size=5)
    assert served(engine, world["requests"], lambda n: False) == world["texts"]
    mixed = made(engine, world["requests"], lambda n: n % 3 > 0)
    assert all(event.tokens for event in engine.session.stream(mixed))
    assert [request.tokens for request in mixed] == world["texts"]
    assert sum(mixed[n].stats.drafted for n in (0, 3, 6)) == 0 < mixed[1].stats.drafted


def test_vocabtrim_follows_all_texts_of_the_batch(cheap):
    """Rows that follow the text hold tokens of every prompt in the batch. A batch of new texts begins with the rows as
    loaded."""
    plain = specker.load(strategy="ar", dtype="float64", device="cpu")
    engine = specker.load(strategy="vocabtrim", vocab_keep="64", dtype="float64", device="cpu", batch_size=4)
    head = engine.drafter.head
    before = set(head.draftable)
    prompts = [plain.encode(text) for text in ("class Zebra:", "import zlib, gzip", "def quux(xyzzy):")]
    prompts = [ids + ids for ids in prompts]
    rare = [next(t for t in ids if t not in before) for ids in prompts]
    stream = engine.stream(prompts, 10, temperature=0.7)
    for _ in range(4):
        next(stream)
    assert all(token in head.draftable for token in rare)
    stream.close()
    out = engine.generate(prompts, 10, temperature=0.7)
    assert [o.tokens for o in out] == [plain.generate(ids, 10, temperature=0.7).tokens for ids in prompts]
    assert not head.draftable <= before
    alone = engine.generate(sorted(before)[-4:], 10, temperature=0.7)
    assert head.draftable - before <= set(alone.tokens)


def test_admission_by_free_pages(world):
    """In a pool smaller than the batch's contexts, requests wait for free pages and keep their tokens."""
    engine = load(world, "chain", batch_size=8, page_size=16, kv_tokens=700)
    most = 0
    tokens = [[] for _ in world["requests"]]
    for event in engine.session.stream(made(engine, world["requests"])):
        tokens[event.prompt_index] += event.tokens
        most = max(most, len(engine.loop.active))
    assert tokens == world["texts"] and 1 <= most < 4
    with pytest.raises(
        ValueError, match=r"the prompt has 390 tokens and 10 more are asked for, but the K/V pool holds"
    ):
        load(world, "chain", batch_size=8, page_size=16, kv_tokens=400).generate([5] * 390, 20)


def test_generate_and_stream_take_batches(world):
    engine = load(world, "tree", batch_size=3)
    prompts = [prompt for prompt, _ in world["requests"]]
    columns = {
        name: [how.get(name, 0 if name != "top_p" else 1.0) for _, how in world["requests"]] for name in DRAWS[2]
    }
    columns |= {"max_new_tokens": list(COUNTS), "stop_ids": [world["stop"]]}
    out = engine.generate(prompts, **columns)
    assert [o.tokens for o in out] == world["texts"]
    assert {o.finished for o in out} == {"stop", "length"} and all(o.stats.rounds for o in out)
    chunks = list(engine.stream(prompts, **columns))
    assert [[t for c in chunks if c.prompt_index == n for t in c.tokens] for n in range(len(prompts))] == world["texts"]
    last = {c.prompt_index: c.finished for c in chunks}
    assert [last[n] for n in range(len(prompts))] == [o.finished for o in out]
    with pytest.raises(ValueError, match="seed has 2 values for 7 prompts"):
        engine.generate(prompts, seed=[1, 2])
    with pytest.raises(ValueError, match="the prompt is empty"):
        engine.generate([[1, 2], []])


def test_seconds_of_a_batch_add_up(world, monkeypatch):
    """Each sequence is charged its share of a round, so sums over requests are the machine's time: here a second for
    each pass through a model, and nothing for the rest."""
    engine, now = load(world, "chain", batch_size=5), [0.0]

    def timed(call):
        def timed_call(*args, **more):
            now[0] += 1
            return call(*args, **more)

        return timed_call

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    passes = (prompts, "prefill_chunk"), (round, "forward"), (model_drafter, "forward"), (model_drafter, "prefill")
    for module, name in passes:
        monkeypatch.setattr(module, name, timed(getattr(module, name)))
    out = engine.generate([prompt for prompt, _ in world["requests"]], 10)
    total = sum((o.stats for o in out), Stats())
    assert total.tokens == sum(len(o.tokens) for o in out) and now[0] > 40
    assert total.wall == pytest.approx(now[0]) == sum(total.seconds.values())
    assert (
        total.seconds["prefill"] == pytest.approx(2 * (len(out) - 1))
        and total.seconds["draft"] > total.seconds["verify"] > 5
    )


def test_an_abandoned_stream_frees_its_pages(world):
    engine = load(world, "chain", batch_size=3, page_size=16)
    stream = engine.stream([[5, 9], [7] * 30, [8] * 60, [4]], 20)
    next(stream)
    assert engine.loop.active
    stream.close()
    out = engine.generate([prompt for prompt, _ in world["requests"][:4]], 12)
    assert len(out) == 4 and engine.cache.free_pages == engine.cache.spare
