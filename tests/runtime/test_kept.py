"""What an engine learnt about its drafts is kept for the next process: it may change how much is drafted, never a
token."""

import json
import os

import pytest
from make_checkpoint import make
from pairs import perturbed

import specker
from specker.paths import remember, remembered
from specker.runtime import engine as engines
from specker.runtime.control.auto import ENGINE_DECAY, AcceptanceHistory, Share
from specker.runtime.control.costs import Costs
from specker.runtime.control.policy import Budget, Outcome

PROMPTS = [[5, 9, 40, 5, 9], [1, 2], list(range(3, 60))]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    target = make(folder / "target", layers=2, max_context=256, tokenizer=True)
    return str(target), str(perturbed(target, folder / "draft"))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECKER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SPECKER_LEARN", "on")
    return tmp_path / "cache" / "learnt"


@pytest.fixture
def measured(monkeypatch):
    """Whether each warm-up measured."""
    found, real = [], engines.warm_up

    def warm_up(*args, measures, **more):
        found.append(measures)
        real(*args, measures=measures, **more)

    monkeypatch.setattr(engines, "warm_up", warm_up)
    return found


def load(models, **options):
    return specker.load(*models, dtype="float64", device="cpu", page_size=16, **options)


def decoded(engine):
    engine.warmup()
    return [engine.generate(prompt, 24).tokens for prompt in PROMPTS]


@pytest.mark.parametrize("strategy", ["draft", "vocabtrim+lookup", "lookup", "del"])
def test_the_next_engine_knows_what_the_last_one_learnt(models, cache, measured, strategy):
    models = models if "draft" in strategy or "trim" in strategy else models[:1]
    with load(models, strategy=strategy) as first:
        want = [first.generate_ar(prompt, 24).tokens for prompt in PROMPTS]
        assert decoded(first) == want and not cache.exists()
        known = first.loop.history.state()
    (file,) = cache.iterdir()
    with load(models, strategy=strategy) as second:
        second.warmup()
        assert json.dumps(second.loop.history.state()) == json.dumps(known) == remembered(file).decode()
        assert [second.generate(prompt, 24).tokens for prompt in PROMPTS] == want
    assert measured == [True, False]
    assert [*cache.iterdir()] == [file] and json.loads(remembered(file)) != json.loads(json.dumps(known))


def test_a_file_is_for_its_models_options_and_machine(models, cache, measured, monkeypatch):
    for options in ({}, {"batch_size": 2}, {"prefix_cache": "off"}):
        with load(models, **options) as engine:
            decoded(engine)
    assert len([*cache.iterdir()]) == 3
    with load(models[::-1]) as engine:
        decoded(engine)
    monkeypatch.setattr(engines, "machine", lambda device: "another")
    with load(models) as engine:
        decoded(engine)
    assert len([*cache.iterdir()]) == 5 and all(measured)


@pytest.mark.parametrize("damage", ["a bit", "JSON", "a field", "a type"])
def test_a_file_that_cannot_be_used_is_replaced(models, cache, measured, damage):
    with load(models) as engine:
        want = decoded(engine)
    (file,) = cache.iterdir()
    state = json.loads(remembered(file))
    if damage == "a bit":
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    elif damage == "JSON":
        remember(file, b"{")
    elif damage == "a field":
        del state["drafts"]["spans"]
        remember(file, json.dumps(state).encode())
    else:
        remember(file, json.dumps(state | {"costs": None}).encode())
    for _ in range(2):
        with load(models) as engine:
            assert decoded(engine) == want
    assert measured == [True, True, False]


def test_nothing_is_kept_unless_something_was_learnt(models, cache, monkeypatch):
    with load(models) as engine:
        engine.warmup()
    for options in ({"strategy": "ar"}, {"policy": "fixed"}):
        with load(models if "policy" in options else models[:1], **options) as engine:
            decoded(engine)
    monkeypatch.setenv("SPECKER_LEARN", "off")
    with load(models) as engine:
        decoded(engine)
    assert not cache.exists()


def test_a_cache_that_cannot_be_written_ends_no_run(models, cache):
    cache.parent.mkdir(parents=True)
    cache.write_text("a file in place of the folder")
    with load(models) as engine:
        assert decoded(engine)
    assert cache.read_text() == "a file in place of the folder"


def test_an_engine_that_is_dropped_keeps_it_too(models, cache):
    engine = load(models)
    decoded(engine)
    del engine
    assert len(os.listdir(cache)) == 1


def test_a_state_restores_every_number():
    """Curves of several kinds, trees, copies and exit layers."""
    history = AcceptanceHistory(Costs(lambda budget: 0.1 * budget.nodes + 0.01))
    costs = history.costs
    for n, k in ((1, 0), (1, 4), (4, 2), (4, 40)):
        for exit, part in ((0, 0), (0, 1), (2, 0)):
            budget = Budget(k, k, exit, part)
            costs.measured(n, budget, k, 0.01 * k, 0.1 + 0.01 * n * k)
            costs.observe(n, budget, k, 0.01 * k, 0.1)
    costs.observe(1, Budget(16, 8), 16, 0.2, 0.4)
    costs.observe_prefill(40, 0.5)
    costs.observe_rows(64, 0.7)
    for outcome in (Outcome(4, [0, 1, 2], [0.9, 0.8, 0.3, 0.5]), Outcome(16, [0, 1, 3], tree=True), Outcome(1, [0])):
        for each in (history.drafts, history.of(1).drafts):
            each.add(outcome)
    history.matches["past", 4] = Share(ENGINE_DECAY, 2.0, 3.0)
    history.ended(0.5, 20, 8)
    state = json.loads(json.dumps(history.state()))
    other = AcceptanceHistory(Costs(costs.prior))
    other.restore(state)
    assert json.loads(json.dumps(other.state())) == state
    for n in (1, 4):
        for budget in (Budget(4, 4), Budget(3, 3, 2), Budget(5, 5, 0, 1), Budget(16, 8)):
            assert other.costs.round(n, budget) == pytest.approx(costs.round(n, budget), rel=1e-12)
    assert other.costs.prefill(30) == costs.prefill(30) and other.costs.verify(1, 90) == costs.verify(1, 90)
    assert other.drafts.caps() == history.drafts.caps() and other.drafts.gains() == history.drafts.gains()
    assert other.drafts.expected(5) == history.drafts.expected(5) and other.spread == history.spread
    assert (other.texts, other.matches, other.used) == (0, history.matches, history.used)
