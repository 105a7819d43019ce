"""Rounds that draft nothing record why, and one sentence says it."""

import pytest
from make_checkpoint import make
from pairs import perturbed

import specker
from specker.runtime.control.choose import Chooser
from specker.runtime.control.costs import Costs
from specker.runtime.control.reasons import WORDS, counted, drafting
from specker.runtime.control.stats import Stats


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    target = make(tmp_path_factory.mktemp("target"), layers=2)
    return target, perturbed(target, tmp_path_factory.mktemp("draft"), amount=0.05)


def test_the_most_frequent_reason_is_said():
    assert drafting(0, 0, {}) == "not yet" and drafting(3, 9, {"slower": 8}) == "yes"
    for reason, words in WORDS.items():
        assert drafting(0, 9, {"prefill": 1, reason: 8}) == f"no, because {words}"
    assert drafting(0, 9, {}) == "no, because no round asked for a draft"
    assert counted(9, 2, {"grammar": 3}) == "3 because the grammar left one token, 4 for other reasons"


def test_every_reason_of_a_chooser_has_words():
    assert Chooser(Costs(lambda budget: 0.1, float)).reason == "" and set(WORDS) >= {"slower", "measured", "context"}


@pytest.mark.parametrize("tokens", [None, 4])
def test_nothing_to_copy(pair, tokens):
    """Whether the policy rests or always drafts."""
    engine = specker.load(pair[0], strategy="lookup", draft_tokens=tokens, lookup_share="off", device="cpu")
    out = engine.generate([7, 8], 6)
    assert out.stats.drafted == 0 and out.stats.drafting == "no, because there was nothing to copy"
    assert out.stats.to_json()["drafting"] == out.stats.drafting


def test_plain_decoding_asks_for_no_draft(pair):
    engine = specker.load(*pair, strategy="draft", draft_tokens=3, device="cpu")
    assert engine.generate([7, 8], 6).stats.drafting == "yes"
    for out in (engine.generate_ar([7, 8], 6), engine.generate([7, 8], 6, policy="off")):
        assert out.stats.drafting == "no, because no round asked for a draft" and not out.stats.rests
    assert (Stats() + out.stats).drafting == out.stats.drafting


def test_a_grammar_that_forces_every_token():
    pytest.importorskip("llguidance")
    engine = specker.load(strategy="draft", draft_tokens=2, device="cpu")
    out = engine.generate("a = ", 8, grammar='start: "yes"')
    assert out.text == "yes" and out.stats.rests == {"grammar": out.stats.rounds}
