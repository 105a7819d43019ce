"""Rounds whose verify pass draws the target's tokens emit the same texts as rounds that write logits.

On a CPU rounds write logits, so `Model.samples` is replaced: the op's reference then draws, in float64.
"""

import cases
import pytest
import torch
from make_checkpoint import make
from pairs import perturbed

import specker
from specker.model.decoder import Model
from specker.options import Params
from specker.runtime.round import round as stage

PROMPTS = [[5, 9, 40, 77], [7, 7, 7], [3, 60, 12, 9, 4]]
GREEDY = {}
HOT = {"temperature": 0.8, "seed": 11}
FILTERED = {"temperature": 0.9, "top_p": 0.7, "top_k": 9, "seed": 3}
WAYS = {
    "ar": {"strategy": "ar"},
    "chain": {"strategy": "draft", "draft_tokens": 4},
    "tree": {"strategy": "draft", "tree": "3x3"},
    "lookup": {"strategy": "lookup"},  # sequences verify unequally many rows
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    target = make(tmp_path_factory.mktemp("target"), layers=2)
    return target, perturbed(target, tmp_path_factory.mktemp("draft"))


def loaded(made, way, **options):
    models = made if WAYS[way]["strategy"] == "draft" else made[:1]
    how = {"dtype": "float64", "device": "cpu", "page_size": 8, "batch_size": 3}
    return specker.load(*models, **WAYS[way], **how, **options)


@pytest.fixture
def drawing(monkeypatch):
    """Sets whether a model's verify passes may draw tokens."""
    return lambda whether: monkeypatch.setattr(Model, "samples", property(lambda model: whether()))


@pytest.fixture
def forms(monkeypatch):
    """Which rounds drew in the verify pass."""
    seen, verify = [], stage.verify

    def noted(r, model, cache):
        verify(r, model, cache)
        seen.append(r.drawn)

    monkeypatch.setattr(stage, "verify", noted)
    return seen


def texts(engine, samplings):
    requests = [
        engine.session.request(prompt, Params.of(max_new_tokens=12, **how))
        for prompt, how in zip(PROMPTS, samplings, strict=True)
    ]
    for _ in engine.session.stream(requests):
        pass
    return [request.tokens for request in requests]


@pytest.mark.parametrize(("way", "graphs"), cases.one_in(2, WAYS, ["off", "on"]))
def test_the_texts_are_those_of_rounds_that_write_logits(made, forms, drawing, way, graphs):
    """A round with a filter or log-probabilities writes logits, for the other sequences too; rounds after its end do
    not."""
    engine = loaded(made, way, graphs=graphs)
    mixed = [[GREEDY, HOT, GREEDY], [HOT, HOT, GREEDY], [HOT, FILTERED, GREEDY], [{**HOT, "logprobs": 2}, HOT, GREEDY]]
    want = [texts(engine, each) for each in mixed]
    assert not any(forms)
    drawing(lambda: True)
    for each, those, drawn in zip(mixed, want, (True, True, False, False), strict=True):
        del forms[:]
        assert texts(engine, each) == those
        assert all(forms) if drawn else not forms[0]


def test_a_switch_between_the_two_within_a_text_changes_nothing(made, forms, drawing):
    engine = loaded(made, "chain", graphs="on")
    want = texts(engine, [HOT, GREEDY, HOT])
    drawing(lambda: len(forms) % 3 != 1)
    assert texts(engine, [HOT, GREEDY, HOT]) == want and set(forms) == {False, True}


def test_logits_that_are_not_finite_end_the_text(made, forms, drawing):
    engine = loaded(made, "ar", graphs="on")
    drawing(lambda: True)
    engine.model.norm[3] = torch.nan
    generation = engine.generate(PROMPTS[0], 8)
    assert generation.finished == "not finite" and generation.tokens == [] and forms and all(forms)
