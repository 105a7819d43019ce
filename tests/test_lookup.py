"""Strategy `lookup` drafts the continuation of the longest suffix that occurred before."""

import json
from functools import partial

import cases
import pytest
from make_checkpoint import make

import specker
from specker.runtime.control.policy import Budget
from specker.runtime.strategies.lookup import LookupOptions, corpus
from specker.runtime.strategies.lookup.pool import Pools


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
    alone = {"strategy": "lookup", "lookup_share": "off", "dtype": "float64", "device": "cpu"}
    engine = specker.load(target, draft_tokens=4, **alone)
    _, rows = rounds_of(engine, [5, 9, 40, 77, 8, 5, 9, 40])
    assert rows[0]["draft"] == [77, 8, 5, 9] and rows[0]["parents"] == [0, 1, 2, 3]
    out, rows = rounds_of(engine, [5, 9, 40, 77])
    assert rows[0]["draft"] == [] and out.stats.lengths[0] >= 1


def test_a_long_match_drafts_more_than_a_short_one(target, steady):
    """By the shares that a match of this length starts with (test_auto.py), at the costs of a machine."""
    engine = specker.load(target, strategy="lookup", lookup_share="off", dtype="float64", device="cpu")
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


def test_ended_texts_are_copied_within_a_salt(target):
    """The second answer to a prompt is the first one. Plain decoding adds no text, and other salts share none."""
    engine = specker.load(target, strategy="lookup", draft_tokens=8, dtype="float64", device="cpu")
    prompt = [60, 5, 9, 40, 77, 8]
    engine.generate_ar(prompt, 24)
    first, rows = rounds_of(engine, prompt)
    assert "past" not in first.stats.sources and rows[0]["draft"] == []
    for salt in ("other", None):
        assert "past" not in engine.generate(prompt, 24, cache_salt=salt).stats.sources
    again, rows = rounds_of(engine, prompt)
    assert again.tokens == first.tokens and again.stats.sources["past"] > 0
    assert rows[0]["draft"] == first.tokens[:8] and rows[0]["copied"] == {"source": "past", "matched": 6}
    assert again.stats.rounds <= 4 and again.stats.to_json()["sources"] == again.stats.sources
    assert engine.generate(prompt, 24, cache_salt="other").stats.rounds <= 4
    alone = specker.load(target, strategy="lookup", lookup_share="off", dtype="float64", device="cpu")
    assert [alone.generate(prompt, 24).stats.sources.get("past") for _ in range(2)] == [None, None]


def test_a_join_copies_ended_texts_too(target):
    engine = specker.load(
        target, target, strategy="draft+lookup", dtype="float64", device="cpu", batch_size=2, max_context=256
    )
    prompts = [[60, 5, 9, 40, 77, 8], [3, 50, 20, 31, 8, 8]]
    for _ in range(2):
        out = engine.generate(prompts, 24)
        assert [o.tokens for o in out] == [cases.plain(target, p, 24) for p in prompts]
    [lookup] = [engine.drafter.copying]
    engine.generate(prompts[:1], 1)
    assert [len(tokens) for tokens in lookup.pools.texts()[""]] == [30, 30]


def test_memory_is_bounded_and_the_least_recently_copied_text_goes_first():
    """A text that another begins with is kept once."""
    pools = Pools(LookupOptions(lookup_memory=1))
    for n in range(60):
        pools.add("", [n, *range(1000)])
        pools.add("b" if n % 2 else "c", [n] * 50)
        if n == 0:
            pools.add("", [0, *range(1005)])
            pools.add("", [0, *range(20)])
            assert [len(tokens) for tokens in pools.texts()[""]] == [1006]
        pools.of("").used(pools.of("").index.draft([0, 0, 1, 2], 8, 4, 4).place)
        assert pools.bytes <= 1 << 20
    texts = pools.texts()[""]
    assert {tokens[0] for tokens in texts} >= {0, 59} and 20 < len(texts) < 60
    copy = pools.of("").index.draft([0, 0, 1, 2], 8, 4, 4)
    assert copy.tokens == (3, 4, 5, 6) and copy.matched == 4


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A target with a tokenizer."""
    return make(tmp_path_factory.mktemp("reader"), "qwen2", layers=2, tokenizer=True)


def test_a_corpus_of_files(reader, tmp_path, monkeypatch):
    """Texts and JSON lines in a folder, beside files that are not text; tokenised once."""
    monkeypatch.setattr(corpus, "cache_root", lambda: tmp_path)
    plain = specker.load(reader, strategy="ar", dtype="float64", device="cpu")
    want = plain.generate("ab cd ef", 24)
    folder = tmp_path / "corpus"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("gh")
    (folder / "picture.png").write_bytes(b"\xff\xd8")
    (folder / "deep" / "b.jsonl").write_text('"ij"\n\n' + json.dumps({"prompt": "ab", "completion": "cd"}))
    tokens = [*plain.encode("ab cd ef"), *want.tokens]
    load = partial(specker.load, reader, strategy="lookup", draft_tokens=8, dtype="float64", device="cpu")

    def texts_of(engine):
        return [list(text.tokens) for text in engine.drafter.corpus.texts]

    engine = load(lookup_corpus=str(folder))
    assert texts_of(engine) == [plain.encode(text) for text in ("gh", "ij", "ab\ncd")]
    engine.drafter.corpus.add(tokens)
    out = engine.generate("ab cd ef", 24, cache_salt=None)
    assert out.tokens == want.tokens and out.stats.rounds <= 4 and set(out.stats.sources) == {"corpus"}
    monkeypatch.setattr(corpus, "write_cached", None)
    assert texts_of(load(lookup_corpus=str(folder)))[:2] == [plain.encode("gh"), plain.encode("ij")]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"\xff", "a.txt is not text: not UTF-8 at byte 0"),
        ("a.txt", b"a\0b", "a.txt is not text: it has zero bytes"),
        ("a.txt", b"", "a.txt' holds no text"),
        ("a.jsonl", b"{", "a.jsonl, line 1: not JSON: "),
        ("a.jsonl", b'"a"\n{"answer": "b"}', "a.jsonl, line 2: expected a string, or an object with `text`"),
        ("a.jsonl", b'{"turns": ["b", 3]}', "a.jsonl, line 1: expected a string, or an object with `text`"),
        ("a.txt", b"ab cd " * 100_000, "takes more than 1 MiB: raise lookup_memory"),
    ],
)
def test_bad_corpora(reader, tmp_path, name, data, message, monkeypatch):
    monkeypatch.setattr(corpus, "cache_root", lambda: tmp_path / "cache")
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        specker.load(
            reader,
            strategy="lookup",
            lookup_corpus=str(tmp_path / name),
            lookup_memory=1,
            dtype="float64",
            device="cpu",
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ngram_least": 5, "ngram_most": 2}, "ngram_least must be at most ngram_most, got 5 and 2"),
        ({"ngram_most": 0}, "ngram_most must be between 1 and 64, got 0"),
        ({"policy": "draft-and-verify"}, "lookup runs none"),
        ({"strategy": "ar+lookup"}, "strategies ar and lookup do not compose: ar drafts nothing"),
        ({"lookup_corpus": "/no/such"}, "lookup_corpus='/no/such': there is no such file or folder"),
        ({"lookup_share": "yes"}, "lookup_share must be one of on, off, got 'yes'"),
        ({"strategy": "draft", "ngram_most": 3}, "ngram_most is for strategy lookup, not 'draft'"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        specker.load(**{"strategy": "lookup", "device": "cpu", **options})
