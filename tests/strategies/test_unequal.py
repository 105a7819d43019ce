"""Batches in which each sequence verifies as many draft tokens as are worth their rows. Tokens stay those of plain
decoding."""

import math
import random
from itertools import accumulate

import cases
import pytest
import torch
from make_checkpoint import make
from pairs import perturbed

import specker
from specker.runtime import loop as loops
from specker.runtime.control.auto import Acceptance, Auto
from specker.runtime.control.costs import Costs
from specker.runtime.control.policy import Budget, Fixed, Match, Outcome
from specker.runtime.strategies.lookup import RATES, NgramPolicy

PROMPTS = [[5, 6, 7, 8] * 6, [9, 30, 11], [12, 13, 12, 13, 12], [40]]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    target = make(folder / "target", "qwen2", layers=2, max_context=300, tokenizer=True, eos=None)
    return target, perturbed(target, folder / "draft", amount=0.05)


@pytest.fixture
def row_price(monkeypatch):
    """Sets what each row costs, of a plain round."""

    def priced(price):
        def prices(costs, n, budget, rate):
            return tuple(accumulate((price() for _ in range(n * budget.depth)), initial=0.0))

        monkeypatch.setattr("specker.runtime.control.costs.Costs.row_prices", prices)

    return priced


@pytest.fixture
def rounds(monkeypatch):
    """Every round of several requests that drafted."""
    seen = []
    finish = loops.Loop.finish

    def spy(self, r):
        if len(r.requests) > 1 and r.draft.size:
            seen.append(r)
        return finish(self, r)

    monkeypatch.setattr(loops.Loop, "finish", spy)
    return seen


PRICES = (0.0, 0.05, 0.3, 0.6, 0.9)
SAMPLED = {"temperature": 0.9, "top_k": 30, "top_p": 0.95}


@pytest.mark.parametrize(
    ("strategy", "sampling"),
    cases.one_in(3, ["lookup", "draft", "draft+lookup", "vocabtrim+lookup"], [{}, {"temperature": 0.8}, SAMPLED]),
)
@pytest.mark.usefixtures("cheap", "turns")
def test_tokens_are_those_of_plain_decoding(models, rounds, row_price, strategy, sampling):
    """With prices drawn at random, so that every sequence verifies a part of its own."""
    rng = random.Random(1)
    row_price(lambda: rng.choice([0.0, 0.05, 0.3, 0.6, 0.9]))
    draft = [] if strategy == "lookup" else [models[1]]
    engine = specker.load(models[0], *draft, strategy=strategy, dtype="float64", device="cpu", batch_size=4)
    got = engine.generate(PROMPTS, 40, seed=[1, 2, 3, 4], **sampling)
    want = engine.generate_ar(PROMPTS, 40, seed=[1, 2, 3, 4], **sampling)
    assert [g.tokens for g in got] == [w.tokens for w in want]
    unequal = [r for r in rounds if r.places is not None]
    assert len(unequal) > 3 and all(r.rows < r.batch.n * (r.draft.size + 1) for r in unequal)
    assert all(r.rows == sum(r.draft.count(slot) + 1 for slot in range(r.batch.n)) for r in unequal)
    assert sum(g.stats.accepted for g in got) > 0 or (sampling and strategy == "lookup")  # random text repeats nothing


def test_log_probabilities_and_traces_verify_whole_drafts(models, rounds, row_price):
    row_price(lambda: 0.3)
    engine = specker.load(models[0], strategy="lookup", dtype="float64", device="cpu", batch_size=4)
    assert all(len(g.logprobs) == 30 for g in engine.generate(PROMPTS, 30, logprobs=2))
    assert rounds and all(r.places is None for r in rounds)


def test_the_kernels_verify_unequal_rows(models, row_price):
    """The same in Triton's interpreter: rows are bit-equal, however many their sequence has."""
    row_price(lambda: 0.3)
    engine = specker.load(models[0], strategy="lookup", dtype="float32", device="cpu", batch_size=2)
    got = engine.generate(PROMPTS[:2], 20)
    assert [g.tokens for g in got] == [w.tokens for w in engine.generate_ar(PROMPTS[:2], 20)]


def test_chances_of_copied_tokens():
    policy = NgramPolicy({}, Budget(16, 16))
    policy.announced([Match(2, 9)])
    assert policy.chances(4, []) == pytest.approx([math.prod(RATES[1 : 2 + k]) for k in range(4)])
    policy.announced([Match()])
    assert policy.chances(2, []) == [0.0, 0.0]


def test_chances_of_a_drafted_chain():
    policy = Auto(Acceptance(0.98), Budget(8, 8), confident=True)
    assert policy.chances(3, [0.9, 0.8, 0.6, 0.9]) == pytest.approx([0.9, 0.72, 0.432])
    assert policy.chances(0, [0.9]) == [] and Fixed(3, 3).chances(2, []) == pytest.approx([0.8, 0.64])
    whole = Auto(Acceptance(0.98), Budget(8, 8), confident=False)
    assert whole.chances(2, []) == pytest.approx([0.75, 0.75**2]), "before anything was drafted"
    before = policy.means(Budget(8, 8)).tokens
    for _ in range(20):  # drafts that are never worth a row commit one token a round, and the policy must learn that
        policy.observe(Outcome(0, [0], [0.1]))
    assert policy.means(Budget(8, 8)).tokens < 2 < before


def test_the_price_of_a_row_and_what_a_round_of_unequal_rows_teaches():
    costs, shape = Costs(lambda budget: 0.1), Budget(4, 4)
    for rows, seconds in ((1, 1.0), (5, 3.0)):
        costs.measured(8, Budget(0, 0), rows - 1, 0.1, seconds)
    prices = costs.row_prices(8, shape, 8.0)  # of 8 tokens a second
    assert len(prices) == 4 * 8 + 1 and [prices[8 * k] for k in range(5)] == pytest.approx([0.0, 4.0, 8.0, 12.0, 16.0])
    before = costs.verify(8, 24)
    for _ in range(30):
        costs.observe(8, shape, 4, 0.1, 2 * costs.verify(8, 8 * 2.4), 1.4)
    assert costs.verify(8, 8 * 2.4) > 1.6 * before


def test_a_round_that_the_host_places_only(models):
    """Rounds of fixed shape, as CUDA graphs replay them, keep equally many rows."""
    torch.manual_seed(0)
    engine = specker.load(models[0], strategy="lookup", graphs="on", dtype="float32", device="cpu", batch_size=2)
    got = engine.generate(PROMPTS[:2], 20)
    assert [g.tokens for g in got] == [w.tokens for w in engine.generate_ar(PROMPTS[:2], 20)]
