"""What a load costs: no file is parsed, read or hashed twice."""

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import caches
import pytest
import safetensors
import torch
from make_checkpoint import byte_tokenizer, edit, make
from safetensors.torch import load_file, save_file

import specker
from specker import cpu
from specker.checkpoints import checkpoint
from specker.checkpoints.tokenizer import MORE, NAMES, Tokens

EMBED = "model.embed_tokens.weight"


@dataclass
class Work:
    """How often each file was used, by its path; and how many bytes were hashed."""

    configs: Counter[Path] = field(default_factory=Counter)
    tokenizers: Counter[Path] = field(default_factory=Counter)
    headers: Counter[Path] = field(default_factory=Counter)
    read: Counter[Path] = field(default_factory=Counter)
    hashed: int = 0


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Work:
    monkeypatch.setenv("SPECKER_CACHE", str(caches.empty(tmp_path / "cache")))
    done = Work()

    def count(counter: Counter[Path], inner: Callable[..., Any], where: Callable[[Any], Path]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            counter[where(args[0])] += 1
            return inner(*args, **options)

        return counted

    class Hash:
        def __init__(self, data: bytes = b""):
            self.inner = sha256()
            self.update(data)

        def update(self, data: bytes) -> None:
            done.hashed += len(data)
            self.inner.update(data)

        def digest(self) -> bytes:
            return self.inner.digest()

        def hexdigest(self) -> str:
            return self.inner.hexdigest()

    cpu.available()  # it hashes the sources of the compiled kernels, once in a process
    sha256 = hashlib.sha256
    monkeypatch.setattr(hashlib, "sha256", Hash)
    monkeypatch.setattr(checkpoint, "parse_config", count(done.configs, checkpoint.parse_config, Path))
    tokenizer = count(done.tokenizers, Tokens.tokenizer.func, lambda tokens: tokens.folder)
    monkeypatch.setattr(Tokens.tokenizer, "func", tokenizer)
    monkeypatch.setattr(safetensors, "safe_open", count(done.headers, safetensors.safe_open, Path))
    monkeypatch.setattr(Path, "read_bytes", count(done.read, Path.read_bytes, Path))
    return done


def sharing(target: Path, folder: Path) -> Path:
    """A draft that shares the target's embedding."""
    make(folder, layers=4, seed=1, tied=True)
    weights = load_file(folder / "model.safetensors")
    del weights[EMBED]
    rows = load_file(target / "model.safetensors")[EMBED][[0, 5, 77]]
    weights |= {"specker.shared_ids": torch.tensor([0, 5, 77]), "specker.shared_rows": rows}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder, specker={"shares": ["embed_tokens"]})
    return folder


@pytest.mark.parametrize("strategy", ["draft", "easyspec", "vocabtrim+lookup"])
@pytest.mark.parametrize("shares", [False, True])
def test_no_file_is_parsed_read_or_hashed_twice(tmp_path: Path, work: Work, strategy: str, shares: bool) -> None:
    target = make(tmp_path / "target", layers=2, tied=True)
    draft = sharing(target, tmp_path / "draft") if shares else make(tmp_path / "draft", layers=4, seed=1, tied=True)
    folders = target, draft
    for folder in folders:
        byte_tokenizer().save_pretrained(folder)
    own = {folder / name for folder in folders for name in (*NAMES, *MORE)}
    size = sum(path.stat().st_size for path in own if path.is_file())
    work.headers.clear()
    work.read.clear()
    engine = specker.load(*folders, strategy, device="cpu", dtype="float32")
    engine.generate("hello", 4)
    assert work.configs == dict.fromkeys(folders, 1)
    assert work.tokenizers == {target: 1}, "the draft has the target's"
    files = [path for path in work.headers.elements() if path.parent in folders]
    assert sorted(files) == sorted(folder / "model.safetensors" for folder in folders)
    read = {path: times for path, times in work.read.items() if path in own}
    assert set(read.values()) == {1}
    assert size <= work.hashed < 1.5 * size + 2048
