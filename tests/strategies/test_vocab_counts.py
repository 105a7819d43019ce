"""Counts of written tokens between runs: what is kept, what an error does, and several processes at once."""

import errno
import fcntl
import os
from pathlib import Path

import pytest
import torch
import warm

from specker.runtime.strategies.vocabtrim import counts as vocab_counts
from specker.runtime.strategies.vocabtrim import scores as vocab_scores
from specker.runtime.strategies.vocabtrim.counts import VocabCounts, folder

ROOT = Path(__file__).parents[2]
NAME = "ab" * 32


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECKER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vocab"


def opened(name=NAME):
    """Counts that had no error."""
    notes: dict[str, str] = {}
    counts = VocabCounts(name, notes)
    assert not notes
    return counts


def test_counted_ids_go_first_and_the_order_ranks_the_rest(cache):
    order = torch.tensor([3, 1, 0, 4, 2, 5])
    first = opened()
    assert first.path == cache / f"{NAME}.safetensors" and folder() == cache
    assert torch.equal(first.first(order), order)  # nothing counted yet
    first.add([2, 4, 4, 0])
    assert opened().first(order).tolist() == [4, 0, 2, 3, 1, 5]  # 0 and 2 came once: 0 is earlier in the order
    first.add([5, 5, 5, 9])  # 9: beyond a smaller vocabulary
    first.save()
    assert opened().first(order).tolist() == [5, 4, 0, 2, 3, 1]


def test_the_file_is_a_score_file():
    opened().add([2, 4, 4, 0])
    scores = vocab_scores.read(opened().path)
    assert scores.ids.tolist() == [4, 0, 2] and scores.counts.tolist() == [2, 1, 1]
    assert (scores.tokenizer, scores.source, scores.totals) == (NAME, "target", {"tokens": 4})
    scores.check(152064, NAME, "f")  # vocabularies may be padded


def test_the_first_tokens_are_written_at_once_and_later_ones_now_and_then(monkeypatch):
    monkeypatch.setattr(vocab_counts, "SAVE_EVERY", 10)
    counts = opened()
    for written, total in [(1, 1), (9, 1), (2, 12), (9, 12), (1, 22)]:
        counts.add([7] * written)
        assert opened().earlier == {7: total}


def test_what_waits_is_written_when_the_process_ends():
    code = f"from specker.runtime.strategies.vocabtrim.counts import VocabCounts; c = VocabCounts({NAME!r}, {{}})"
    code += "; c.add([1]); c.add([2, 2])"
    assert warm.run("-c", code).returncode == 0
    assert opened().earlier == {1: 1, 2: 2}


def test_nothing_is_counted_while_paused():
    counts = opened()
    with counts.paused():
        counts.add([1, 2, 3])
    counts.save()
    assert not counts.path.exists()
    counts.add([4])
    assert opened().earlier == {4: 1}


def test_tokenizers_never_share_counts():
    opened().add([1, 1])
    other = opened("cd" * 32)
    assert not other.earlier
    other.path.write_bytes(opened().path.read_bytes())  # someone renamed the file
    notes: dict[str, str] = {}
    assert not VocabCounts("cd" * 32, notes).earlier
    assert "has no counts of this tokenizer's tokens" in notes["vocab_learn"]


@pytest.mark.parametrize("data", [b"", b"nonsense", None])
def test_a_damaged_file_is_a_remark_and_counting_begins_anew(data):
    opened().add([1, 1])
    path = opened().path
    path.write_bytes(path.read_bytes()[:-8] if data is None else data)
    notes: dict[str, str] = {}
    counts = VocabCounts(NAME, notes)
    assert notes["vocab_learn"].startswith(f"the counts of earlier runs are lost: {path}") and not counts.earlier
    counts.add([3])
    assert opened().earlier == {3: 1}


def test_a_cache_that_cannot_be_written_is_a_remark(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECKER_CACHE", str(tmp_path / "file"))
    notes: dict[str, str] = {}
    counts = VocabCounts(NAME, notes)
    assert "file/vocab cannot be written (Not a directory), so the tokens of this run are not" in notes["vocab_learn"]
    counts.add([1])
    counts.save()
    assert not counts._new


def test_a_full_disk_is_one_warning_and_loses_nothing(monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(vocab_counts, "SAVE_EVERY", 2)
    replace, counts = vocab_counts.write_cached, opened()
    counts.add([1])
    monkeypatch.setattr(vocab_counts, "write_cached", full)
    for _ in range(4):
        counts.add([2, 2])
    assert [r.getMessage() for r in caplog.records] == [
        f"{folder()} cannot be written (No space left on device), so the counts of this run may be lost"
    ]
    monkeypatch.setattr(vocab_counts, "write_cached", replace)
    counts.save()
    assert opened().earlier == {1: 1, 2: 8}


def test_an_interrupted_write_leaves_the_old_file_alone(cache, monkeypatch):
    counts = opened()
    counts.add([1])

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    counts.add([2])
    with pytest.raises(KeyboardInterrupt):
        counts.save()
    assert sorted(p.name for p in cache.iterdir()) == [f"{NAME}.lock", f"{NAME}.safetensors"]
    assert opened().earlier == {1: 1}


def test_counts_are_bounded_and_newer_text_weighs_more(monkeypatch):
    monkeypatch.setattr(vocab_counts, "MOST", 100)
    monkeypatch.setattr(vocab_counts, "SAVE_EVERY", 1)
    counts = opened()
    counts.add([1] * 60 + [2] * 39 + [3])
    assert opened().earlier == {1: 60, 2: 39, 3: 1}
    counts.add([4] * 40)
    assert opened().earlier == {1: 30, 2: 19, 4: 20}  # 3 has left
    counts.add([5] * 1000)
    assert opened().earlier.total() <= 100 and opened().earlier[5] > 60


def test_processes_at_once_lose_nothing():
    code = f"""
from specker.runtime.strategies.vocabtrim import counts as vocab_counts
vocab_counts.SAVE_EVERY, vocab_counts.WAIT = 1, 600  # however busy the machine is
import sys
counts = vocab_counts.VocabCounts({NAME!r}, {{}})
for n in range(30):
    counts.add([int(sys.argv[1]), 9])
"""
    jobs = warm.beside(*((["-c", code, str(n)], {}) for n in range(3)))
    assert [job.returncode for job in jobs] == [0, 0, 0]
    assert opened().earlier == {0: 30, 1: 30, 2: 30, 9: 90}


def test_a_lock_that_is_never_released_does_not_stop_a_run(cache, monkeypatch):
    monkeypatch.setattr(vocab_counts, "WAIT", 0.05)
    counts = opened()
    with (cache / f"{NAME}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        counts.add([1])
    assert opened().earlier == {1: 1}
