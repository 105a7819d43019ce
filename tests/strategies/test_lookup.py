"""Strategy `lookup` drafts the continuation of the longest suffix that occurred before."""

import hashlib
import json
from functools import partial
from random import Random

import caches
import cases
import pytest
from make_checkpoint import make

import specker
from specker.runtime.control.policy import Budget
from specker.runtime.strategies import copier
from specker.runtime.strategies.lookup import LookupOptions, corpus
from specker.runtime.strategies.lookup.pool import Pools
from specker.runtime.strategies.lookup.text_file import TextFile


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
    assert rows[0]["draft"] == [50, 51, 52, 53, 54, 55, 56, 57]
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
    assert rows[0]["draft"] == first.tokens[:8] and (rows[0]["source"], rows[0]["matched"]) == ("past", 6)
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
    lookup = copier(engine.drafters)
    engine.generate(prompts[:1], 1)
    assert [len(tokens) for tokens in texts_of(lookup.pools)] == [30, 30]


def texts_of(pools, salt=""):
    return [list(tokens) for name, tokens in pools.texts() if name == pools.name(salt)]


def test_a_file_keeps_the_texts_of_each_salt(target, tmp_path):
    """The next engine copies them, within their salts, and of too many the last ones. The file does not tell salts."""
    path = tmp_path / "texts"
    alone = {"strategy": "draft+lookup", "draft_tokens": 4, "dtype": "float64", "device": "cpu"}
    load = partial(specker.load, target, target, lookup_file=str(path), **alone)
    prompts = {"": [60, 5, 9, 40, 77, 8], "tenant-a": [3, 50, 20, 31, 8, 8]}
    engine = load()
    for salt, prompt in prompts.items():
        engine.generate(prompt, 24, cache_salt=salt)
    engine.generate([9, 9, 9], 24, cache_salt=None)
    engine.save_lookup()
    data = path.read_bytes()
    assert b"tenant-a" not in data and path.stat().st_mode & 0o777 == 0o600
    again = load()
    for salt, prompt in prompts.items():
        assert texts_of(copier(again.drafters).pools, salt) == [[*prompt, *cases.plain(target, prompt, 24)]]
        out = again.generate(prompt, 24, cache_salt=salt)
        assert out.tokens == cases.plain(target, prompt, 24) and out.stats.sources["past"] > 0
        assert "past" not in again.generate(prompt, 24, cache_salt=salt + "x").stats.sources
    path.unlink()
    again.save_lookup()
    assert len(copier(again.drafters).pools.texts()) == 4 and path.exists(), "what was read is kept, too"

    many = [Random(n).choices(range(128), k=1000) for n in range(40)]
    for text in many:
        copier(again.drafters).pools.add("", text)
    again.save_lookup()
    pools = Pools(1 << 20)
    TextFile(str(path), again.target).read(pools)
    few = texts_of(pools)
    assert 10 < len(few) < 40 and few == many[-len(few) :]
    with pytest.raises(ValueError, match="there is no file for the texts: load the engine with lookup_file"):
        specker.load(target, target, **alone).save_lookup()


def test_bad_files_of_texts(target, tmp_path):
    path = tmp_path / "texts"
    alone = {"strategy": "lookup", "dtype": "float64", "device": "cpu", "lookup_file": str(path)}
    engine = specker.load(target, **alone)
    engine.generate([60, 5, 9], 24)
    engine.save_lookup()
    data = path.read_bytes()
    head, _, rest = data.partition(b"}")
    longer = head.replace(b"27]", b"28]") + b"}" + rest[:-32]
    other = data[:-36] + (1000).to_bytes(4, "little")
    for bad, message in (
        (b"", "is no file of texts that lookup kept: name another one"),
        (b"hello\n", "is no file of texts"),
        (data[:-1], "is damaged or incomplete: delete it, or name another one"),
        (data[:40], "is damaged or incomplete"),
        (data[:-40] + bytes([data[-40] ^ 1]) + data[-39:], "is damaged or incomplete"),
        (longer + hashlib.sha256(longer).digest(), "is damaged or incomplete"),
        (other + hashlib.sha256(other).digest(), "has token ids that the model lacks"),
    ):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match=f"lookup_file='.*texts' {message}"):
            specker.load(target, **alone)
    path.write_bytes(data)
    with pytest.raises(ValueError, match="has the texts of another model: name another file"):
        specker.load(make(tmp_path / "other", layers=3), **alone)
    specker.load(target, **alone)  # it is read again as long as it is sound
    path.unlink()
    with pytest.raises(ValueError, match=r"lookup_file .*: cannot be written: No such file or directory"):
        specker.load(target, **{**alone, "lookup_file": str(tmp_path / "none" / "texts")})
    with pytest.raises(ValueError, match="is not a file"):
        specker.load(target, **{**alone, "lookup_file": str(tmp_path)})


def test_memory_is_bounded_and_the_least_recently_copied_text_goes_first():
    """A text that another begins with is kept once."""
    pools = Pools(1 << 20)
    for n in range(60):
        pools.add("", [n, *range(1000)])
        pools.add("b" if n % 2 else "c", [n] * 50)
        if n == 0:
            pools.add("", [0, *range(1005)])
            pools.add("", [0, *range(20)])
            assert [len(tokens) for tokens in texts_of(pools)] == [1006]
        pools.of("").used(pools.of("").index.draft([0, 0, 1, 2], 8, 4, 4).place)
        assert pools.bytes <= 1 << 20
    texts = texts_of(pools)
    assert {tokens[0] for tokens in texts} >= {0, 59} and 20 < len(texts) < 60
    copy = pools.of("").index.draft([0, 0, 1, 2], 8, 4, 4)
    assert copy.tokens == (3, 4, 5, 6) and copy.matched == 4


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A target with a tokenizer."""
    return make(tmp_path_factory.mktemp("reader"), "qwen2", layers=2, tokenizer=True)


def test_a_corpus_of_files(reader, tmp_path, monkeypatch):
    """Texts and JSON lines in a folder, beside files that are not text; tokenised once."""
    monkeypatch.setenv("SPECKER_CACHE", str(caches.empty(tmp_path / "cache")))
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
    written = [(path, path.stat().st_mtime_ns) for path in (tmp_path / "cache" / "lookup").iterdir()]
    assert texts_of(load(lookup_corpus=str(folder)))[:2] == [plain.encode("gh"), plain.encode("ij")]
    assert written == [(path, path.stat().st_mtime_ns) for path, _ in written] != []


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"\xff", "a.txt is not text: not UTF-8 at byte 0"),
        ("a.txt", b"a\0b", "a.txt is not text: it has zero bytes"),
        ("a.txt", b"", "a.txt' holds no text"),
        ("a.jsonl", b"{", "a.jsonl, line 1: not JSON: "),
        ("a.jsonl", b'"a"\n{"answer": "b"}', "a.jsonl, line 2: expected a string, or an object with `text`"),
        ("a.jsonl", b'{"turns": ["b", 3]}', "a.jsonl, line 1: expected a string, or an object with `text`"),
    ],
)
def test_bad_corpora(reader, tmp_path, name, data, message, monkeypatch):
    monkeypatch.setenv("SPECKER_CACHE", str(caches.empty(tmp_path / "cache")))
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        specker.load(
            reader,
            strategy="lookup",
            lookup_corpus=str(tmp_path / name),
            dtype="float64",
            device="cpu",
        )


def test_a_corpus_must_fit_into_its_memory(reader, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECKER_CACHE", str(caches.empty(tmp_path / "cache")))
    (tmp_path / "a.txt").write_bytes(b"ab cd " * 10_000)
    options = LookupOptions(lookup_corpus=str(tmp_path / "a.txt"))
    target = specker.load(reader, strategy="lookup", dtype="float64", device="cpu").target
    assert len(corpus.read(options, target).texts) == 1
    with pytest.raises(ValueError, match=r"lookup_corpus='.*a.txt' takes more than 1 MiB of memory: name fewer texts"):
        corpus.read(options, target, 1 << 20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "draft-and-verify"}, "lookup runs none"),
        ({"strategy": "ar+lookup"}, "strategies ar and lookup do not compose: ar drafts nothing"),
        ({"lookup_corpus": "/no/such"}, "lookup_corpus='/no/such': there is no such file or folder"),
        ({"lookup_file": "a", "lookup_share": "off"}, "lookup_file keeps texts to copy, but lookup_share='off'"),
        ({"lookup_share": "yes"}, "lookup_share must be one of on, off, got 'yes'"),
        ({"strategy": "draft", "lookup_share": "off"}, "lookup_share is for strategy lookup, not 'draft'"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        specker.load(**{"strategy": "lookup", "device": "cpu", **options})
