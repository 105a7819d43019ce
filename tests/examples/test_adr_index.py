"""Retrieval: the order of the results, the index file, and that a record never finds itself."""

import random

import pytest

from examples.adr import index as module
from examples.adr.index import Index
from examples.adr.records import Record, trigrams

WORDS = [
    "queue",
    "event",
    "cache",
    "token",
    "route",
    "table",
    "disk",
    "shard",
    "retry",
    "image",
    "build",
    "deploy",
    "secret",
    "key",
    "user",
    "log",
    "alert",
    "node",
]


def record(n: int, context: str, decision: str, repository: str = "r", title: str = "") -> Record:
    return Record(f"{repository}/{n:03}.md", repository, title or f"Title {n}", "", context, decision, "")


def some(count: int, seed: int) -> list[Record]:
    """Random records. Every fifth is another one with a word changed, every seventh an exact copy elsewhere."""
    draw, out = random.Random(seed), []
    for n in range(count):
        context, decision = (" ".join(draw.choices(WORDS, k=k)) for k in (40, 30))
        if n % 5 == 4:
            other = draw.choice(out)
            context, decision = other.context.replace("queue", "line"), other.decision + " now"
        elif n % 7 == 6:
            other = draw.choice(out)
            context, decision = other.context, other.decision
        out.append(record(n, context, decision, draw.choice("abc")))
    return out


def test_the_best_match_comes_first():
    index = Index.build(
        [
            record(1, "the deploys fail when the registry is down", "mirror images"),
            record(2, "users forget passwords", "single sign-on"),
            record(3, "logs fill the disk", "rotate logs"),
        ]
    )
    assert [r.path for r in index.search("passwords of users are forgotten", 1)] == ["r/002.md"]
    assert [r.path for r in index.search("disk full of logs", 3)] == ["r/003.md", "r/001.md", "r/002.md"]
    assert [r.path for r in index.search("xyzzy", 2)] == ["r/001.md", "r/002.md"], "ties by path"
    assert index.search("logs", 5, among={"r/002.md"}) == [index.records[1]]


@pytest.mark.parametrize("seed", range(4))
def test_a_record_finds_neither_itself_nor_what_is_like_it(seed):
    records = some(60, seed)
    index = Index.build(records)
    near = 0
    for r in records:
        found = index.search(r.context, len(records), without=r)
        assert r not in found and found
        grams = trigrams(r.text)
        for other in found:
            own = trigrams(other.text)
            assert len(grams & own) / len(grams | own) < module.NEAR
        near += len(records) - len(found) > 1
    assert near > 10, "the set has copies"


def test_revisions_under_one_title_are_alike():
    a = record(1, "one two three four", "five six seven", title="Use Kafka")
    b = record(2, "other words entirely", "and another decision", title="Use  kafka")
    elsewhere = record(3, "different words again", "a third decision", repository="s", title="Use Kafka")
    assert Index.build([a, b, elsewhere]).search("words", 3, without=a) == [elsewhere]


def test_the_file_holds_what_was_indexed(tmp_path):
    index, path = Index.build(some(20, 0)), tmp_path / "index.npz"
    index.save(path)
    again = Index.load(path)
    assert again.records == index.records
    assert again.search("queue of events", 5) == index.search("queue of events", 5)
    assert [p.name for p in tmp_path.iterdir()] == ["index.npz"]


def test_files_that_are_no_index(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="no such index"):
        Index.load(tmp_path / "none")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ValueError, match="not an index"):
        Index.load(tmp_path / "text")
    Index.build(some(3, 0)).save(tmp_path / "old")
    monkeypatch.setattr(module, "VERSION", 2)
    with pytest.raises(ValueError, match="version 1, not 2"):
        Index.load(tmp_path / "old")


def test_vectors_of_a_model(monkeypatch, tmp_path):
    class Encoder:
        """Counts of three words."""

        def encode(self, texts, normalize_embeddings):
            assert normalize_embeddings
            rows = [[t.lower().count(w) for w in ("queue", "disk", "user")] for t in texts]
            return [[x / (sum(y * y for y in row) ** 0.5 or 1) for x in row] for row in rows]

    monkeypatch.setattr(module, "_encoder", lambda name: Encoder())
    index = Index.build(
        [record(1, "queue queue", "x"), record(2, "disk", "y"), record(3, "user user disk", "z")], "any"
    )
    index.save(tmp_path / "i")
    assert [r.path for r in Index.load(tmp_path / "i").search("user and disk", 2)] == ["r/003.md", "r/002.md"]
