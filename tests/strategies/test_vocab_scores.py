"""The score file, the kept ids, EAGLE-3's format, and files with unexpected contents."""

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from specker.options import VocabKeep
from specker.runtime.strategies.vocabtrim import scores as vocab_scores
from specker.runtime.strategies.vocabtrim.scores import VocabScores, read

COUNTS = torch.tensor([3, 0, 50, 7, 7, 0, 1, 32])  # ranked 2, 7, 3, 4, 0, 6


def scores(**about):
    return VocabScores.from_counts(COUNTS, tokenizer="abc", source="target", totals={"tokens": 100}, **about)


def kept(text, always=(), vocab=8):
    return scores().kept(VocabKeep.parse(text), always, vocab).tolist()


def test_ranking_and_coverage():
    s = scores()
    assert s.ids.tolist() == [2, 7, 3, 4, 0, 6] and s.counts.tolist() == [50, 32, 7, 7, 3, 1] and s.tokens == 100
    assert [s.coverage(n) for n in (1, 2, 8)] == [0.5, 0.82, 1.0]


@pytest.mark.parametrize(
    ("text", "always", "want"),
    [
        ("3", (), [2, 3, 7]),
        ("3", (5, 1), [1, 2, 5]),  # ids that are always kept come first and count towards the number
        ("1", (5, 1), [1, 5]),
        ("0.25", (), [2, 7]),
        ("7", (), [0, 1, 2, 3, 4, 6, 7]),  # more than have counts: then the lowest ids
        ("99", (), list(range(8))),
        ("coverage:0.5", (), [2]),
        ("coverage:0.51", (), [2, 7]),
        ("coverage:1", (5,), [0, 2, 3, 4, 5, 6, 7]),
        ("2", (11,), [2, 7]),  # an id beyond the head
    ],
)
def test_what_is_kept(text, always, want):
    assert kept(text, always) == want


def test_coverage_is_that_of_held_out_text(tmp_path):
    """The other text ranks 2, 7, 4, 3, 0; the held-out text has the tokens 2, 3, 3 and 6."""
    held = torch.tensor([0, 0, 1, 2, 0, 0, 1, 0])
    s = VocabScores.from_counts(COUNTS, held)
    assert s.ids.tolist() == [2, 7, 3, 4, 0, 6] and s.held_out.tolist() == [0, 1, 1, 1, 3, 3, 4]
    assert [s.held_out_coverage(n) for n in (1, 4, 6)] == [0.25, 0.75, 0.75] and s.coverage(6) == 1
    assert s.kept(VocabKeep.parse("coverage:0.5"), (), 8).tolist() == [2, 3, 4, 7]  # in-sample, 2 alone has half
    assert s.kept(VocabKeep.parse("coverage:0.9"), (), 8).tolist() == [0, 2, 3, 4, 6, 7]  # never reached: all
    (tmp_path / "s.safetensors").write_bytes(s.to_bytes())
    assert torch.equal(read(tmp_path / "s.safetensors").held_out, s.held_out)
    assert scores().held_out_coverage(3) is None
    assert (
        VocabScores.from_counts(COUNTS, COUNTS).held_out is None
        and VocabScores.from_counts(COUNTS, COUNTS * 0).held_out is None
    )


def test_ids_beyond_a_smaller_draft_are_not_kept():
    assert kept("3", (), vocab=7) == [2, 3, 4]
    assert kept("coverage:0.9", (), vocab=7) == [2, 3, 4]


@pytest.mark.parametrize(
    "text", ["0", "-3", "1.5", "0.0", "coverage:0", "coverage:2", "coverage:", "many", "nan", "3e2"]
)
def test_keep_refuses(text):
    with pytest.raises(ValueError, match="vocab_keep must be rows"):
        VocabKeep.parse(text)


def test_our_file_round_trips_to_the_byte(tmp_path):
    path = tmp_path / "scores.safetensors"
    path.write_bytes(scores().to_bytes())
    again = read(path)
    assert again.to_bytes() == scores().to_bytes()
    assert (again.vocab_size, again.tokenizer, again.source, again.totals) == (8, "abc", "target", {"tokens": 100})


def offsets(ids, vocab_size=None):
    """ids [K] ascending as EAGLE-3's tensors, with a mask of `vocab_size` ids if given."""
    tensors = {"d2t": ids - torch.arange(len(ids))}
    if vocab_size is not None:
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


@pytest.mark.parametrize("vocab_size", [None, 32])
def test_the_format_of_eagle_3(tmp_path, vocab_size):
    ids = torch.tensor([0, 1, 2, 5, 6, 7, 11, 30])
    save_file(offsets(ids, vocab_size), tmp_path / "eagle.safetensors")
    got = read(tmp_path / "eagle.safetensors")
    assert got.counts is None and got.ids.tolist() == ids.tolist() and got.vocab_size == vocab_size
    assert torch.equal(got.kept(VocabKeep(rows=8), (), 32), ids)
    with pytest.raises(ValueError, match="no counts"):
        got.kept(VocabKeep(coverage=0.5), (), 32)


def test_d2t_with_another_mask(tmp_path):
    save_file(offsets(torch.tensor([0, 1, 5])) | {"t2d": torch.arange(9) < 3}, tmp_path / "d2t.safetensors")
    with pytest.raises(ValueError, match="d2t and t2d keep different ids"):
        read(tmp_path / "d2t.safetensors")


OFFSETS = torch.tensor([0, 0, 0, 2, 2, 2, 5, 5, 9, 20])
ABSOLUTE = OFFSETS + torch.arange(10)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (ABSOLUTE * 2, "look like absolute ids"),  # absolute given as offsets
        (ABSOLUTE.flip(0), "look like absolute ids"),
        (OFFSETS.float(), "vector of integers"),
        (OFFSETS[:0], "ranks no ids"),
    ],
)
def test_refusals_name_the_problem(tmp_path, value, words):
    save_file({"d2t": value}, tmp_path / "d2t.safetensors")
    with pytest.raises(ValueError, match=words):
        read(tmp_path / "d2t.safetensors")


@pytest.mark.parametrize(
    ("ids", "words"),
    [([4, 9, 4], "the id 4 2 times"), ([4, 9, -1], "the id -1"), ([0.5, 1.0, 2.0], "vector of integers")],
)
def test_ids_that_are_no_ranking_are_refused(tmp_path, ids, words):
    s = VocabScores(torch.tensor(ids), torch.tensor([3, 2, 1]), tokenizer="abc")
    (tmp_path / "s.safetensors").write_bytes(s.to_bytes())
    with pytest.raises(ValueError, match=words):
        read(tmp_path / "s.safetensors")


@pytest.mark.parametrize("name", ["scores.csv", "freq.pt", "d2t.npy"])
def test_other_files_are_refused(tmp_path, name):
    (tmp_path / name).write_text("x")
    with pytest.raises(ValueError, match=f"{name}: expected .safetensors, with specker's scores or EAGLE-3's d2t"):
        read(tmp_path / name)


def test_truncated_files_are_refused(tmp_path):
    path = tmp_path / "s.safetensors"
    for data in (scores().to_bytes(), save(offsets(torch.arange(0, 400, 3), 500))):
        path.write_bytes(data[: len(data) // 2])
        with pytest.raises(ValueError, match="is corrupt or truncated"):
            read(path)
    with pytest.raises(ValueError, match="no such vocabulary score file"):
        read(tmp_path / "absent.safetensors")


def test_our_file_with_other_contents_is_refused(tmp_path):
    path = tmp_path / "s.safetensors"
    path.write_bytes(scores().to_bytes())
    tensors = load_file(path)
    path.write_bytes(save(tensors))
    with pytest.raises(ValueError, match="neither vocabulary scores nor"):
        read(path)
    path.write_bytes(save(tensors, {"specker": '{"format": "specker-vocab-scores", "version": 2}'}))
    with pytest.raises(ValueError, match="version 2; this reads specker-vocab-scores version 1"):
        read(path)
    path.write_bytes(save(tensors, {"specker": "{"}))
    with pytest.raises(ValueError, match="neither vocabulary scores nor"):
        read(path)
    path.write_bytes(scores().to_bytes().replace(b'"version\\": 1', b'"version\\": 3'))
    with pytest.raises(ValueError, match="version 3"):
        read(path)


def test_another_vocabulary_is_refused():
    s = scores()
    s.check(8, "abc", "f")
    s.check(8, None, "f")
    s.check(9, "abc", "f")  # the same tokenizer, padded to another size
    with pytest.raises(ValueError, match="a vocabulary of 8 ids, the target's has 9"):
        s.check(9, None, "f")
    with pytest.raises(ValueError, match="the id 7, but the target's vocabulary ends at 6"):
        s.check(7, "abc", "f")
    with pytest.raises(ValueError, match="another tokenizer"):
        s.check(8, "abd", "f")
    with pytest.raises(ValueError, match="the id 7, but the target's vocabulary ends at 4"):
        VocabScores(s.ids, None).check(5, None, "f")


def test_the_tokenizer_of_a_file_is_read_without_its_scores(tmp_path):
    path = tmp_path / "s.safetensors"
    assert vocab_scores.tokenizer_of(path) is None
    path.write_bytes(scores().to_bytes())
    assert vocab_scores.tokenizer_of(path) == "abc"
    path.write_bytes(VocabScores.from_counts(COUNTS).to_bytes())
    assert vocab_scores.tokenizer_of(path) is None
    for data in (save({"d2t": OFFSETS}), save({"d2t": OFFSETS}, {"specker": "[]"}), b"", b"nonsense"):
        path.write_bytes(data)
        assert vocab_scores.tokenizer_of(path) is None


def test_special_ids_and_the_hash_follow_the_tokenizer():
    from transformers import AutoTokenizer

    from specker import zoo
    from specker.checkpoints.checkpoint import read_tokenizer

    tokenizer = AutoTokenizer.from_pretrained(zoo.path("code-target"))
    assert vocab_scores.special_ids(tokenizer) >= set(tokenizer.all_special_ids)
    before = vocab_scores.tokenizer_hash(tokenizer)
    assert before == vocab_scores.tokenizer_hash(read_tokenizer(zoo.path("code-draft")))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    assert vocab_scores.tokenizer_hash(tokenizer) != before
    assert tokenizer.convert_tokens_to_ids("<|turn|>") in vocab_scores.special_ids(tokenizer)
