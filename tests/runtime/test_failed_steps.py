"""A step that fails, at any point: every request ends with all of its tokens or with the error, none waits for ever,
and the session serves later requests."""

import threading

import cases
import pytest
from make_checkpoint import make
from pairs import perturbed

import specker
from specker.options import Params
from specker.runtime import loop as loops
from specker.runtime import prompts

pytestmark = pytest.mark.usefixtures("cheap")
WAYS = {"draft": {"draft_tokens": 3}, "del": {}, "draft+lookup": {}, "captured": {"draft_tokens": 3, "graphs": "on"}}
POINTS = [
    *(("round", name) for name in ("launch", "send", "collect", "emitted")),
    *(("prompt passes", name) for name in ("prefill_chunk", "prefill_parts")),
    *(("loop", name) for name in ("finish", "start")),
    *(("prompts", name) for name in ("_filled", "_activate", "_fills")),
    *(("slots", name) for name in ("begin", "activate", "prefilled", "retire", "admits")),
    *(("drafter", name) for name in ("prepare", "advance", "propose", "accept", "read", "move", "reset")),
    *(("cache", name) for name in ("take", "release", "move", "remember")),
    ("state", "write"),
]
PROMPTS = [[5, 9, 40], [7] * 50, [11], [*range(3, 40)]]


class Fault(Exception):
    """What a step raises."""


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    sizes = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 96}
    target = make(folder / "target", "qwen2", layers=3, max_context=300, eos=None, **sizes)
    draft, made = perturbed(target, folder / "draft", amount=0.05), {}

    def load(way):
        if way not in made:
            how = {"strategy": "draft" if way == "captured" else way, "batch_size": 2, "page_size": 16, **WAYS[way]}
            made[way] = specker.load(target, *([] if way == "del" else [draft]), dtype="float32", device="cpu", **how)
        return made[way]

    return load


def broken(monkeypatch, engine, of, name, call):
    """Call number `call` of a function of the step raises Fault."""
    loop = engine.loop
    owner = {
        "prompts": loop.prompts,
        "prompt passes": prompts,
        "loop": loop,
        "slots": loop.slots,
        "drafter": loop.drafter,
        "cache": engine.cache,
        "state": type(loop.state),
    }
    function, left = getattr(owner.get(of, loops), name), [call]

    def fails(*arguments, **more):
        left[0] -= 1
        if not left[0]:
            raise Fault(name)
        return function(*arguments, **more)

    monkeypatch.setattr(owner.get(of, loops), name, fails)


def free(engine):
    for cache in engine.loop.slots.caches:
        cache.check()
    return all(cache.free_pages == cache.spare for cache in engine.loop.slots.caches) and not engine.loop.busy


@pytest.mark.parametrize(("way", "call"), cases.one_in(3, WAYS, [1, 2, 5]))
def test_every_request_gets_its_tokens_or_the_error(engines, way, call):
    """One thread runs the steps; requests arrive before the failure and after it."""
    engine, failed = engines(way), set()
    session, want = engine.session, [engine.generate_ar(prompt, 5 + n).tokens for n, prompt in enumerate(PROMPTS)]
    for of, name in POINTS:
        with pytest.MonkeyPatch.context() as monkeypatch:
            broken(monkeypatch, engine, of, name, call)
            seen, sent = [[] for _ in PROMPTS], 0
            while sent < len(PROMPTS) or session.busy:
                if sent < len(PROMPTS):
                    session.submit(PROMPTS[sent], Params(max_new_tokens=5 + sent), deliver=seen[sent].append)
                    sent += 1
                try:
                    session.step()
                except Fault:
                    failed.add(name)
        for (*events, last), tokens in zip(seen, want, strict=True):
            assert not any(isinstance(entry, Fault) or entry.finished for entry in events), name
            if not isinstance(last, Fault):
                assert [token for event in (*events, last) for token in event.tokens] == tokens, name
                assert last.finished == "length", name
        assert free(engine), name
    assert len(failed) > 8, failed


@pytest.mark.parametrize(
    "way", ["draft+lookup", "captured", *(pytest.param(way, marks=pytest.mark.slow) for way in ("draft", "del"))]
)
def test_nobody_waits_for_a_step_that_failed(engines, way):
    """Four threads decode over and over in two slots, and whoever does not wait runs a step. Each `generate` returns
    the right tokens or raises the error, and all of them come to an end."""
    engine = engines(way)
    want = [engine.generate_ar(prompt, 5 + n).tokens for n, prompt in enumerate(PROMPTS)]
    counts = {"failed": 0, "decoded": 0}

    def work(n):
        for _ in range(2):
            try:
                assert engine.generate(PROMPTS[n], 5 + n).tokens == want[n]
                counts["decoded"] += 1
            except Fault:
                counts["failed"] += 1

    for at, (of, name) in enumerate(POINTS):
        with pytest.MonkeyPatch.context() as monkeypatch:
            broken(monkeypatch, engine, of, name, 1 + at % 4)
            threads = [threading.Thread(target=work, args=[n], daemon=True) for n in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive(), f"{name}: a request waits for ever"
        assert free(engine), name
    assert sum(counts.values()) == 8 * len(POINTS) and min(counts.values()) > 4, counts
