"""Strategy `lookup` drafts the continuation of the longest suffix that occurred before."""

import random

import cases
import pytest
from make_checkpoint import make

import specker
from specker.runtime.control.policy import Budget
from specker.runtime.strategies.lookup import Index


def drafts(text: list[int], least: int, most: int, length: int) -> list[tuple[int, ...]]:
    """The definition: for each suffix, longest first, its earlier occurrences, latest first."""
    out = []
    for n in range(min(most, len(text) - 1), least - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[len(text) - n :]:
                out.append(tuple(text[end : end + length]))
    return out


@pytest.mark.parametrize("seed", range(5))
def test_the_index_matches_the_definition(seed):
    """In a text that grows by one to five tokens a round."""
    rng = random.Random(seed)
    index, text = Index(1, 3), [rng.randrange(4)]
    while len(text) < 60:
        index.follow(text)
        assert list(index.continuations(text, 5)) == drafts(text, 1, 3, 5)
        text += [rng.randrange(4) for _ in range(rng.randint(1, 5))]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make(tmp_path_factory.mktemp("target"), layers=2)


def rounds_of(engine, prompt, count=24, **sampling):
    rows = []
    engine.trace = rows.append
    out = engine.generate(prompt, count, **sampling)
    return out, rows


def test_it_drafts_what_followed_before(target):
    """The first draft continues the prompt's repetition; without a repetition nothing is drafted."""
    engine = specker.load(target, strategy="lookup", draft_tokens=4, dtype="float64", device="cpu")
    _, rows = rounds_of(engine, [5, 9, 40, 77, 8, 5, 9, 40])
    assert rows[0]["draft"] == [77, 8, 5, 9] and rows[0]["parents"] == [0, 1, 2, 3]
    out, rows = rounds_of(engine, [5, 9, 40, 77])
    assert rows[0]["draft"] == [] and out.stats.lengths[0] >= 1


def test_a_long_match_drafts_more_than_a_short_one(target, steady):
    """By the shares that a match of this length starts with (test_auto.py), at the costs of a machine."""
    engine = specker.load(target, strategy="lookup", dtype="float64", device="cpu")
    for rows in (1, 17):
        engine.loop.history.costs.measured(1, Budget(16, 16), rows - 1, 1e-3, 1 + 0.06 * (rows - 1))
    _, rows = rounds_of(engine, [5, 9, 40, 77, 8, *range(50, 70), 5, 9, 40, 77, 8])
    assert rows[0]["draft"] == [50, 51, 52, 53, 54, 55]
    _, rows = rounds_of(engine, [5, 9, 40, 77, 8, *range(50, 70), 5])
    assert rows[0]["draft"] == [9, 40]
    out, rows = rounds_of(engine, [5, 9, 40])
    assert rows[0]["draft"] == [] and out.stats.rests["nothing found"] > 0.8 * out.stats.lengths[0]


def test_a_tree_merges_what_continuations_share(target):
    engine = specker.load(target, strategy="lookup", tree="2x3", dtype="float64", device="cpu")
    _, rows = rounds_of(engine, [7, 1, 2, 3, 7, 1, 5, 6, 7])
    assert rows[0]["draft"] == [1, 5, 6, 2, 3] and rows[0]["parents"] == [0, 1, 2, 1, 4]
    capped = specker.load(target, strategy="lookup", tree="2x3", draft_tokens=4, dtype="float64", device="cpu")
    assert rounds_of(capped, [7, 1, 2, 3, 7, 1, 5, 6, 7])[1][0]["draft"] == [1, 5, 6, 2]


@pytest.mark.parametrize("options", [{}, {"tree": "3x4"}, {"policy": "plus-minus-one"}, {"graphs": "on"}])
def test_tokens_equal_plain_decoding(target, options, steady):
    engine = specker.load(target, strategy="lookup", dtype="float64", device="cpu", **options)
    for prompt in ([3], [5, 9, 40, 5, 9], list(range(40)) * 2):
        for how in ({}, {"temperature": 0.7, "seed": 4}, {"temperature": 1.0, "top_p": 0.8}):
            out = engine.generate(prompt, 20, **how)
            assert out.tokens == cases.plain(target, prompt, 20, **how)
    text = cases.plain(target, [5, 9], 100)
    assert engine.generate([5, 9, *text], 40).stats.accepted > 0, "a looping text is never accepted: proves little"


def test_requests_do_not_share_texts(target):
    engine = specker.load(target, strategy="lookup", dtype="float64", device="cpu")
    rounds_of(engine, [5, 9, 40, 77, 8], 1)
    _, rows = rounds_of(engine, [60, 5, 9])
    assert rows[0]["draft"] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ngram_least": 5, "ngram_most": 2}, "ngram_least must be at most ngram_most, got 5 and 2"),
        ({"ngram_most": 0}, "ngram_most must be between 1 and 64, got 0"),
        ({"policy": "draft-and-verify"}, "lookup runs none"),
        ({"strategy": "ar+lookup"}, "strategies ar and lookup do not compose: ar drafts nothing"),
        ({"strategy": "draft", "ngram_most": 3}, "ngram_most is for strategy lookup, not 'draft'"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        specker.load(**{"strategy": "lookup", "device": "cpu", **options})
