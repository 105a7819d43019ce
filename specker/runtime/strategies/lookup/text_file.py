"""Texts from which later runs may copy, too (`--lookup-file`): those of this engine that ended, with their prompts.

The file begins with MAGIC and a line of JSON: the number `made_of` stands for the model, `tokenizer` for the token ids,
`key` and the pools' names for the salts (pool.py), and `texts` has for each text its pool and its length, the least
recently copied first. Then follow the ids of all texts (int32, little endian) and the SHA-256 of everything before it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from pathlib import Path
from typing import Any

from specker.checkpoints.checkpoint import Checkpoint
from specker.fields import option
from specker.paths import probe, write_file
from specker.runtime.strategies.lookup.pool import Pools

MAGIC = b"specker lookup 1\n"
SUM = 32  # bytes of the SHA-256


class TextFile:
    """The file of `--lookup-file`."""

    def __init__(self, path: str, target: Checkpoint):
        """Raises ValueError if the file could not be written."""
        self.path, self._named = Path(path).expanduser(), option("lookup_file", path)
        self._vocab, self._tokenizer, self._made_of = target.config.vocab_size, target.tokens.digest, made_of(target)
        if self.path.exists() and not self.path.is_file():
            raise ValueError(f"{self._named} is not a file")
        probe(str(self.path), option("lookup_file"))

    def read(self, pools: Pools) -> None:
        """Add the texts of the file, if there is one, to pools that are still empty. As everywhere, those that take
        more than `MEMORY` go, the least recently copied first. Raises ValueError for a file that is damaged,
        of another model or not made by `write`."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise ValueError(f"{self._named} cannot be read: {error.strerror}") from None
        if not data.startswith(MAGIC):
            raise ValueError(f"{self._named} is no file of texts that lookup kept: name another one")
        try:
            about, key, texts = _unpacked(data)
        except (ValueError, LookupError, TypeError):
            raise ValueError(f"{self._named} is damaged or incomplete: delete it, or name another one") from None
        for field, own, what in (("tokenizer", self._tokenizer, "tokenizer"), ("made_of", self._made_of, "model")):
            if about[field] != own:
                raise ValueError(f"{self._named} has the texts of another {what}: name another file")
        if any(max(tokens) >= self._vocab for _, tokens in texts):
            raise ValueError(f"{self._named} has token ids that the model lacks: delete it, or name another one")
        pools.key = key
        for name, tokens in texts:
            pools.put(name, tokens)

    def write(self, key: bytes, texts: list[tuple[str, array[int]]]) -> None:
        """Replace the file; only its owner can read it. `key`, `texts`: of the pools. Raises OSError."""
        names = list(dict.fromkeys(name for name, _ in texts))
        number = {name: i for i, name in enumerate(names)}
        about = {
            "tokenizer": self._tokenizer,
            "made_of": self._made_of,
            "key": key.hex(),
            "pools": names,
            "texts": [(number[name], len(tokens)) for name, tokens in texts],
        }
        head = MAGIC + json.dumps(about).encode() + b"\n"
        data = b"".join((head, *(_bytes(tokens) for _, tokens in texts)))
        write_file(self.path, data + hashlib.sha256(data).digest(), private=True)


def made_of(target: Checkpoint) -> str:
    """A digest of the model's sizes and of the norms of its first layer and of its end, in bfloat16, so that it does
    not depend on the form of the matrices. A finetune with the same norms passes for the same model: its drafts may be
    worse, its tokens stay its own."""
    import torch

    config, weights = target.config, target.weights
    total = hashlib.sha256(f"{config.num_layers} {config.hidden_size} {config.vocab_size}".encode())
    for norm in (weights.norm, None if weights.norm_in is None else weights.norm_in[0]):
        if norm is not None:
            total.update(norm.detach().cpu().to(torch.bfloat16).view(torch.int16).numpy().tobytes())
    return total.hexdigest()


def _unpacked(data: bytes) -> tuple[dict[str, Any], bytes, list[tuple[str, array[int]]]]:
    """What the file says about its texts, their pools' key, and each text with the name of its pool. Raises ValueError,
    LookupError or TypeError for anything that `TextFile.write` does not write."""
    if hashlib.sha256(data[:-SUM]).digest() != data[-SUM:]:
        raise ValueError
    end = data.index(b"\n", len(MAGIC)) + 1
    about, tokens, texts, start = json.loads(data[len(MAGIC) : end]), _ids(data[end:-SUM]), [], 0
    for pool, length in about["texts"]:
        texts.append((str(about["pools"][pool]), tokens[start : start + length]))
        start += length
    if start != len(tokens) or not all(tokens and min(tokens) >= 0 for _, tokens in texts):
        raise ValueError
    return {name: about[name] for name in ("tokenizer", "made_of")}, bytes.fromhex(about["key"]), texts


def _bytes(tokens: array[int]) -> bytes:
    if sys.byteorder == "big":
        tokens = array("i", tokens)
        tokens.byteswap()
    return tokens.tobytes()


def _ids(data: bytes) -> array[int]:
    tokens = array("i")
    tokens.frombytes(data)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens
