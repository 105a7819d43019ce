"""The ranking of ids by the tokenizer alone."""

from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, models

from specker.runtime.strategies.vocabtrim.order import completed, ranked


def learnt(tokenizer, vocab_size):
    return completed(ranked(tokenizer), vocab_size)


def wrapped(core):
    return SimpleNamespace(backend_tokenizer=core)


def byte_pairs():
    """Ids are in no order of the merges: "é" takes part in the last merge, "ß" and the digits in none."""
    vocab = {"the": 0, "ß": 1, "é": 2, "th": 3, "t": 4, "Ġ": 5, "7": 6, "h": 7, "e": 8, "Ġthe": 9, "té": 10}
    return models.BPE(vocab=vocab, merges=[("t", "h"), ("th", "e"), ("Ġ", "the"), ("t", "é")])


def test_merges_rank_by_their_order_and_ascii_characters_come_first():
    core = Tokenizer(byte_pairs())
    assert learnt(wrapped(core), 11).tolist() == [4, 6, 7, 8, 3, 0, 5, 9, 2, 10, 1]


def test_ids_that_no_merge_makes_come_last_and_a_vocabulary_may_be_padded_or_cut():
    core = Tokenizer(byte_pairs())
    core.add_special_tokens([AddedToken("<|end|>", special=True)])  # id 11
    assert learnt(wrapped(core), 14).tolist() == [4, 6, 7, 8, 3, 0, 5, 9, 2, 10, 1, 11, 12, 13]
    assert learnt(wrapped(core), 8).tolist() == [4, 6, 7, 3, 0, 5, 2, 1]


def test_unigram_ranks_by_its_scores():
    """The score 0 is that of control and byte pieces."""
    pieces = [("<unk>", 0.0), ("<0x0A>", 0.0), ("a", -3.5), ("the", -2.0), ("zebra", -9.0), ("b", -3.5)]
    core = Tokenizer(models.Unigram(pieces, unk_id=0))
    assert learnt(wrapped(core), 7).tolist() == [3, 2, 5, 4, 0, 1, 6]


@pytest.mark.parametrize(
    "tokenizer",
    [None, SimpleNamespace(), wrapped(Tokenizer(models.WordLevel({"b": 1, "a": 0}, unk_token="a")))],
    ids=["none", "slow", "words"],
)
def test_without_an_order_the_lowest_ids_come_first(tokenizer):
    assert learnt(tokenizer, 5).tolist() == [0, 1, 2, 3, 4]


def test_the_order_of_a_real_tokenizer_ranks_frequent_tokens_first():
    """Of the bundled tokenizer, on text that it was not trained on: its first quarter covers far more than the rest."""
    from specker import zoo
    from specker.checkpoints.checkpoint import read_tokenizer

    tokenizer = read_tokenizer(zoo.path("code-target"))
    order = learnt(tokenizer, 8192).tolist()
    assert sorted(order) == list(range(8192)) and order[:200] != list(range(200))
    first = set(order[:2048])
    tokens = [i for row in zoo.heldout() for i in tokenizer(row["prompt"])["input_ids"]]
    assert sum(i in first for i in tokens) > 0.75 * len(tokens)
