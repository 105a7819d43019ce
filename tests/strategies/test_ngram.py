"""The n-gram model: Kneser-Ney probabilities that sum to 1, and self-describing files."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from specker.runtime.strategies.blocks.ngram import NGram, NGramCounts, read
from specker.runtime.strategies.blocks.ngram_scorer import Tables

V = 23


def log_p(model: NGram, contexts: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """contexts [B, 2] (the token before last, -1 for none, and the last), ids [M] -> log p(id | context) [B, M]."""
    before, last = torch.from_numpy(contexts).T.unsqueeze(1)
    return Tables.of(model, torch.device("cpu")).log_p(before, last, torch.from_numpy(ids).unsqueeze(0))[0].numpy()


def text(seed: int, length: int = 400) -> list[int]:
    """A random walk: each token depends on the two before it, with some noise."""
    rng = np.random.default_rng(seed)
    ids = [1, 2]
    while len(ids) < length:
        habit = (3 * ids[-2] + 5 * ids[-1] + 1) % (V - 4)
        ids.append(int(habit if rng.random() < 0.7 else rng.integers(V - 4)))
    return ids


def counted(*texts: list[int], vocab: int = V) -> NGramCounts:
    counts = NGramCounts(vocab)
    for ids in texts:
        counts.add(ids)
    return counts


@pytest.fixture(scope="module")
def model() -> NGram:
    return NGram.fit(counted(text(0), text(1)), tokenizer="t", totals={"texts": 2, "tokens": 800})


def slow(texts: list[list[int]], u: int, v: int, w: int) -> float:
    """Interpolated Kneser-Ney by definition, with dictionaries."""
    tri = Counter(t for ids in texts for t in zip(ids, ids[1:], ids[2:], strict=False))
    bi = Counter((b, c) for _, b, c in tri)  # number of contexts
    uni = Counter(c for _, c in bi)

    def discount(table: Counter) -> float:
        n1, n2 = (sum(n == k for n in table.values()) for k in (1, 2))
        return n1 / (n1 + 2 * n2) if n1 and n2 else 0.5

    def level(table: Counter, context: tuple, lower) -> float:
        d = discount(table)
        same = {k: n for k, n in table.items() if k[: len(context)] == context}
        total = sum(same.values())
        if not total:
            return lower
        over = sum(min(d, n) for n in same.values()) / total
        return max(same.get((*context, w), 0) - d, 0) / total + over * lower

    p1 = level(Counter({(c,): n for c, n in uni.items()}), (), 1 / V)
    return level(tri, (u, v), level(bi, (v,), p1))


def test_probabilities_are_kneser_neys(model):
    rng = np.random.default_rng(2)
    texts = [text(0), text(1)]
    seen = [(texts[0][i], texts[0][i + 1]) for i in rng.integers(0, 390, 12)]
    for u, v in [*seen, (22, 22), (22, 3), (3, 22)]:  # 19..22 never occur
        got = np.exp(log_p(model, np.array([[u, v]]), np.arange(V)))[0]
        assert got == pytest.approx([slow(texts, u, v, w) for w in range(V)], rel=1e-4)


@pytest.mark.parametrize("least", [1, 2, 5])
def test_probabilities_sum_to_one(least):
    """For every kind of context, also when rare n-grams were dropped."""
    pruned = NGram.fit(counted(text(0), text(1)), least)
    contexts = np.array([(u, v) for u in range(-1, V) for v in range(V)])
    p = np.exp(log_p(pruned, contexts, np.arange(V)).astype(np.float64))
    assert p.shape == (len(contexts), V) and (p > 0).all()
    assert np.abs(p.sum(1) - 1).max() < 1e-5
    if least == 5:
        whole = NGram.fit(counted(text(0), text(1)))
        assert len(pruned.trigrams) < len(whole.trigrams) and len(pruned.bigrams) < len(whole.bigrams)


def test_the_beginning_of_a_text_has_less_context(model):
    """-1 means no token, and selects the bigram."""
    got = log_p(model, np.array([[-1, 4]]), np.arange(V))
    assert got == pytest.approx(log_p(model, np.array([[22, 4]]), np.arange(V)))  # 22 4 never occurs


def test_it_learns(model):
    """Unseen text from the same source is far more likely than chance."""
    ids = text(7)
    tri = zip(ids, ids[1:], ids[2:], strict=False)
    nats = [-log_p(model, np.array([[u, v]]), np.array([w]))[0, 0] for u, v, w in tri]
    assert np.mean(nats) < 0.75 * math.log(V)


def test_counting_in_parts_equals_counting_at_once(monkeypatch):
    monkeypatch.setattr("specker.runtime.strategies.blocks.ngram._MERGE", 50)
    texts = [text(n, 100) for n in range(6)]
    many = counted(*texts)
    tri = Counter(t for ids in texts for t in zip(ids, ids[1:], ids[2:], strict=False))
    keys, times = many.counts()
    assert {(k // V // V, k // V % V, k % V): n for k, n in zip(keys.tolist(), times.tolist(), strict=True)} == tri
    assert (keys[1:] > keys[:-1]).all()


def test_keys_of_a_large_vocabulary_do_not_overflow():
    V = 152_064
    model = NGram.fit(counted([V - 1, V - 2, V - 1, V - 2, V - 1, 5], vocab=V))
    p = np.exp(log_p(model, np.array([[V - 1, V - 2]]), np.array([V - 1, V - 2, 0])))[0]
    assert p[0] > 0.5 and p[1] < 0.3 and 0 < p[2] < 1e-3
    with pytest.raises(ValueError, match=r"must have 1\.\.2097152 ids"):
        NGramCounts(1 << 22)


def test_files(model, tmp_path):
    path = tmp_path / "n.safetensors"
    path.write_bytes(model.to_bytes())
    again = read(path)
    assert again.totals == {"texts": 2, "tokens": 800} and again.tokenizer == "t"
    anew = NGram.fit(counted(text(0), text(1)), tokenizer="t", totals=again.totals)
    assert again.to_bytes() == model.to_bytes() == anew.to_bytes()
    contexts = np.array([[1, 2], [-1, 3], [22, 22]])
    assert np.array_equal(log_p(again, contexts, np.arange(V)), log_p(model, contexts, np.arange(V)))
    again.check(V, "t", path)
    again.check(V, None, path)
    for args, words in (((V + 1, "t"), "vocabulary of 23 ids, the target's has 24"), ((V, "u"), "another tokenizer")):
        with pytest.raises(ValueError, match=words):
            again.check(*args, path)


def test_broken_files_are_refused(model, tmp_path):
    from safetensors.numpy import load, save

    from specker import zoo

    path, whole = tmp_path / "n.safetensors", model.to_bytes()
    with pytest.raises(ValueError, match="no such n-gram file"):
        read(path)
    for data, words in ((whole[: len(whole) // 2], "corrupt or truncated"), (b"", "corrupt or truncated")):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=words):
            read(path)
    with pytest.raises(ValueError, match="specker-vocab-scores version 1; this reads specker-ngram version 1"):
        read(zoo.CODE.vocab_scores)
    about = {"specker": '{"format": "specker-ngram", "version": 1, "vocab_size": 23, "tokenizer": null, "totals": {}}'}
    tensors = load(whole)
    for change, words in (
        ({"p2": tensors["p2"][:-1]}, "do not fit together"),
        ({"tw": tensors["tw"][::-1].copy()}, "not in ascending order"),
        ({"v": tensors["v"] + 200}, "do not fit together"),
    ):
        path.write_bytes(save({**tensors, **change}, about))
        with pytest.raises(ValueError, match=words):
            read(path)


def test_nothing_to_fit():
    with pytest.raises(ValueError, match="no text has three tokens"):
        NGram.fit(counted([1, 2]))
