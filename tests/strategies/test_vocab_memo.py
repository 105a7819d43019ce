"""What is remembered of a tokenizer, and when it is computed again."""

import json
from pathlib import Path

import pytest
import torch
from make_checkpoint import make

from specker.checkpoints.tokenizer import Tokens
from specker.runtime.strategies.vocabtrim import order as vocab_order
from specker.runtime.strategies.vocabtrim import scores as vocab_scores


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECKER_CACHE", str(tmp_path / "cache"))
    return make(tmp_path / "model", tokenizer=True)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was computed, in order."""
    done: list[str] = []
    for module, name in ((vocab_scores, "tokenizer_hash"), (vocab_order, "ranked")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda x, name=name, real=real: done.append(name) or real(x))
    return done


def facts(folder: Path) -> tuple[str | None, list[int]]:
    tokens = Tokens(folder, "LlamaForCausalLM")
    return vocab_order.tokenizer_hash(tokens), vocab_order.learnt(tokens, 120).tolist()


def test_hash_and_order_are_computed_once_for_each_tokenizer(folder: Path, computed: list[str]) -> None:
    tokenizer = Tokens(folder, "LlamaForCausalLM").tokenizer
    want = vocab_scores.tokenizer_hash(tokenizer), vocab_order.completed(vocab_order.ranked(tokenizer), 120).tolist()
    computed.clear()
    assert [facts(folder) for _ in range(3)] == [want] * 3
    assert computed == ["tokenizer_hash", "ranked"]
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"<|mask|>"', '"<|hidden|>"'))
    for _ in range(2):
        assert facts(folder)[0] not in (None, want[0])
    assert computed == ["tokenizer_hash", "ranked"] * 2


@pytest.mark.parametrize("damage", ["", "short", "wrong"])
def test_damaged_files_are_ignored_and_replaced(folder: Path, computed: list[str], damage: str) -> None:
    want = facts(folder)
    files = {path: path.read_bytes() for path in (folder.parent / "cache" / "tokenizers").iterdir()}
    assert {path.suffix for path in files} == {".json", ".order"} and len(files) == 2
    for path, data in files.items():
        wrong = json.dumps({"tokenizer_hash": "ab"}).encode() if path.suffix == ".json" else data[:-4] + b"\0\0\0\1"
        path.write_bytes({"": b"", "short": data[:20], "wrong": wrong}[damage])
    computed.clear()
    assert [facts(folder) for _ in range(2)] == [want] * 2
    assert computed == ["tokenizer_hash", "ranked"]
    assert {path: path.read_bytes() for path in files} == files


def test_a_cache_that_cannot_be_written_costs_only_time(folder: Path, computed: list[str]) -> None:
    (folder.parent / "cache").write_text("a file where the folder should be")
    assert facts(folder) == facts(folder)
    assert computed == ["tokenizer_hash", "ranked"] * 2


def test_without_a_tokenizer_there_is_no_hash_and_ids_rank_by_number(tmp_path: Path) -> None:
    assert facts(make(tmp_path)) == (None, list(range(120)))


def test_an_order_does_not_depend_on_the_size_of_the_vocabulary(folder: Path) -> None:
    tokens = Tokens(folder, "LlamaForCausalLM")
    for size in (5, 96, 200):
        want = vocab_order.completed(vocab_order.ranked(tokens.tokenizer), size)
        assert torch.equal(vocab_order.learnt(tokens, size), want)
