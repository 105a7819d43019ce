"""What the head learns from: one pass of the target over the texts, its hidden rows kept in memory-mapped files.

For each shard of texts (train/corpus.py) the folder holds NAME.rows.npy [n, A + 1, H], bfloat16 bits as int16: the
target's rows after each of the A tapped depths, then its last rows after the final norm; and NAME.best.npy [n] int32,
the target's most probable token after each position. A target of width H takes 2 (A + 1) H + 4 bytes for a token.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specker.checkpoints.checkpoint import Opened
from specker.checkpoints.checkpoint import read as read_checkpoint
from specker.kernels.residual_merge import add_norm
from specker.model.cache import KVCache
from specker.model.chunks import Chunks
from specker.model.decoder import Final, Model
from specker.model.prefill import prefill

PROMPT = 0.2  # weight of a prompt's token in the loss; an answer's token counts 1
RESERVE = 1 << 30  # bytes of the disk that the files leave free
ABOUT = "about.json"  # whose rows these are


@dataclass(frozen=True)
class Texts:
    """The texts of a shard, one after another."""

    ids: np.ndarray  # [n] tokens
    ends: np.ndarray  # [m] where each text ends
    answers: np.ndarray  # [m] where each answer starts in its text

    @classmethod
    def read(cls, path: Path) -> "Texts":
        with np.load(path) as shard:
            return cls(shard["ids"], shard["ends"], shard["answers"])

    @property
    def starts(self) -> np.ndarray:
        return np.concatenate([[0], self.ends[:-1]])

    def __iter__(self):
        return iter(np.split(self.ids, self.ends[:-1]))


def write(
    shards: Sequence[Path], out: Path, target: Opened, taps: tuple[int, ...], dtype: torch.dtype, device: str = "cpu"
) -> int:
    """Run the target over the shards that `out` does not hold yet. Returns the number of tokens that were run. Raises
    ValueError if the disk has no room for the files."""
    left = [path for path in shards if not (out / f"{path.stem}.rows.npy").exists()]
    if not left:
        return 0
    out.mkdir(parents=True, exist_ok=True)
    if (out / ABOUT).exists():
        check(out, target, taps)
    tokens = sum(len(Texts.read(path).ids) for path in left)
    need = tokens * (2 * (len(taps) + 1) * target.config.hidden_size + 4)
    if need + RESERVE > (free := shutil.disk_usage(out).free):
        raise ValueError(
            f"the target's rows of {tokens:,} tokens take {need / 1e9:.1f} GB in {out}, which has {free / 1e9:.1f} GB "
            "free; lower --tokens or name another folder"
        )
    model = Model(read_checkpoint(target, dtype=dtype, device=device))
    longest = max(len(text) for path in left for text in Texts.read(path))
    if longest > model.config.max_context:
        raise ValueError(f"a text has {longest} tokens, but the target's context is {model.config.max_context}")
    (out / ABOUT).write_text(json.dumps(_about(target, taps)) + "\n")
    cache = KVCache(model.config, longest, dtype=model.dtype, device=model.device)
    for path in left:
        texts = Texts.read(path)
        rows, best = zip(*(run(model, cache, text.tolist(), taps) for text in texts), strict=True)
        _save(out / f"{path.stem}.best.npy", torch.cat(best).to(torch.int32).cpu().numpy())
        _save(out / f"{path.stem}.rows.npy", torch.cat(rows).to(torch.bfloat16).view(torch.int16).cpu().numpy())
        print(f"{path.stem}: the target's rows of {len(texts.ids):,} tokens", flush=True)
    return tokens


def check(out: Path, target: Opened, taps: tuple[int, ...]) -> None:
    """Raise ValueError if the rows in `out` are another target's, or were kept after other depths."""
    if (found := json.loads((out / ABOUT).read_text())) != (wanted := _about(target, taps)):
        raise ValueError(f"{out} holds rows of {found}, and not of {wanted}: name another --out, or remove the folder")


def _about(target: Opened, taps: tuple[int, ...]) -> dict[str, Any]:
    c = target.config
    return {"taps": list(taps), "layers": c.num_layers, "width": c.hidden_size, "vocabulary": c.vocab_size}


@torch.inference_mode()
def run(model: Model, cache: KVCache, text: list[int], taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """A text's rows [T, A + 1, H] in the model's dtype, and the most probable token after each row [T]. In chunks as
    the engine prefills a prompt, so that the head sees the very rows that it will read."""
    cache.truncate(0)
    last, chunks = len(model.layers), Chunks.of(model.config)
    rows, best = [], []
    while (first := cache.exact_len[0]) < len(text):
        chunk = text[first : first + chunks.rows(first)]
        out = prefill(model, cache, chunk, tuple(sorted({*taps, last})), len(chunk))
        final = add_norm(out[last].contiguous(), None, model.norm, model.config.rms_norm_eps)[1]
        rows.append(torch.stack([*(out[depth] for depth in taps), final], 1))
        best.append(model.logits(Final(out[last], False)).argmax(-1))
    return torch.cat(rows), torch.cat(best)


def _save(path: Path, x: np.ndarray) -> None:
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.save(file, x)
    part.rename(path)


@dataclass(frozen=True)
class Batch:
    """B windows of W positions. Row i is about position i: the target's row there was computed from the token ids[i]
    and what stands before it."""

    ids: Tensor  # [B, W] int64
    text: Tensor  # [B, W] int64, the number of the text
    place: Tensor  # [B, W] int64, the position within the text
    weight: Tensor  # [B, W] float32, of what row i predicts: the token at i + 1; 0 for a text's last one
    taps: Tensor  # [B, W, A, H] float32
    last: Tensor  # [B, W, H] float32
    best: Tensor  # [B, W] int64


class Shard:
    """A shard's texts with the rows of `write`, which stay on the disk."""

    def __init__(self, path: Path, out: Path):
        texts = Texts.read(path)
        lengths = np.diff(texts.ends, prepend=0)
        self.ids = texts.ids.astype(np.int64)
        self.text = np.repeat(np.arange(len(lengths)), lengths)
        self.place = np.arange(len(self.ids)) - np.repeat(texts.starts, lengths)
        self.weight = np.where(self.place >= np.repeat(texts.answers, lengths) - 1, 1.0, PROMPT).astype(np.float32)
        self.weight[texts.ends - 1] = 0
        self.rows = np.load(out / f"{path.stem}.rows.npy", mmap_mode="r")
        self.best = np.load(out / f"{path.stem}.best.npy", mmap_mode="r")


class Lessons:
    """All shards, cut into windows. The windows of each shard's last texts, 1 / HELD of its tokens, are only judged."""

    HELD = 32

    def __init__(self, shards: Sequence[Path], out: Path, length: int, beyond: int):
        """`length`: positions at which a window's chains start; `beyond`: further positions that chains reach."""
        self.shards = [Shard(path, out) for path in shards]
        self.size = length + beyond
        self.trained: list[tuple[int, int]] = []  # (shard, start)
        self.held: list[tuple[int, int]] = []
        for n, shard in enumerate(self.shards):
            total = len(shard.ids)
            begins = np.flatnonzero(shard.place == 0)
            before = begins[begins <= total - max(self.size, total // self.HELD)]
            split = int(before[-1]) if len(before) else 0
            self.trained += [(n, start) for start in range(0, split - self.size + 1, length)]
            self.held += [(n, start) for start in range(split, total - self.size + 1, length)]
        if not self.trained:
            raise ValueError(
                f"no shard has texts for two windows of {self.size} tokens, one to train on and one to judge: raise "
                "--tokens or lower --length"
            )

    @property
    def tokens(self) -> int:
        return sum(len(shard.ids) for shard in self.shards)

    def counts(self, vocab: int) -> Tensor:
        """How often each token is one of an answer, or the target's most probable one there. [vocab] int64"""
        total = np.zeros(vocab, np.int64)
        for shard in self.shards:
            answer = shard.weight == 1
            total += np.bincount(shard.best[answer], minlength=vocab)
            total += np.bincount(shard.ids[1:][answer[:-1]], minlength=vocab)
        return torch.from_numpy(total)

    def batch(self, windows: Sequence[tuple[int, int]], device: str = "cpu") -> Batch:
        def read(name: str) -> Tensor:
            parts = [getattr(self.shards[n], name)[start : start + self.size] for n, start in windows]
            return torch.from_numpy(np.stack(parts)).to(device)

        rows = read("rows").view(torch.bfloat16).float()
        about = read("ids"), read("text"), read("place"), read("weight")
        return Batch(*about, rows[:, :, :-1], rows[:, :, -1], read("best").long())
