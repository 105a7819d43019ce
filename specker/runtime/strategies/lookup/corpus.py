"""Files of the user from which drafts are copied (`--lookup-corpus`). Their tokens are cached, in a file named by a
digest of the text and of the tokenizer."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

from specker.checkpoints.checkpoint import Checkpoint
from specker.cpu.suffixes import END
from specker.fields import not_json, option
from specker.paths import cache_root, remember, remembered
from specker.runtime.strategies.lookup import MEMORY, LookupOptions
from specker.runtime.strategies.lookup.pool import Pool

VERSION = 1  # raise it when a file's tokens change
LINES = ".jsonl"


class NotText(ValueError):
    """A file does not hold text."""


def read(options: LookupOptions, target: Checkpoint, memory: int = MEMORY) -> Pool | None:
    """The texts of `--lookup-corpus`, tokenised; None if it is not given. Raises ValueError for what is not text or
    takes more than `memory` bytes."""
    if options.lookup_corpus is None:
        return None
    if target.tokenizer_or_none is None:
        raise ValueError(f"{option('lookup_corpus')} needs a tokenizer, and the target has none")
    root, pool = Path(options.lookup_corpus).expanduser(), Pool(count(1))
    for path in _files(root):
        try:
            texts = _texts(path)
        except NotText:
            if path == root:
                raise
            continue  # a folder may hold pictures beside its texts
        for tokens in _tokens(texts, target):
            pool.add(tokens)
        if pool.bytes > memory:
            asked = option("lookup_corpus", options.lookup_corpus)
            raise ValueError(f"{asked} takes more than {memory >> 20} MiB of memory: name fewer texts")
    if not pool.texts:
        raise ValueError(f"{option('lookup_corpus', options.lookup_corpus)} holds no text")
    return pool


def _files(root: Path) -> Iterator[Path]:
    """The file, or those of a folder whose paths have no hidden part, in order."""
    if not root.is_dir():
        yield root
        return
    for path in sorted(root.rglob("*")):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts):
            yield path


def _texts(path: Path) -> list[str]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise NotText(f"{path} is not text: not UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if "\0" in text:
        raise NotText(f"{path} is not text: it has zero bytes")
    if path.suffix != LINES:
        return [text]
    lines = enumerate(text.splitlines(), 1)
    return [_row(line, f"{path}, line {n}") for n, line in lines if line.strip()]


def _row(line: str, where: str) -> str:
    """The text of a line: a string, or an object with `text`, `turns`, `messages`, or `prompt` and `completion`."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise not_json(where, error) from None
    parts: Any = [row]
    if isinstance(row, dict):
        parts = row.get("turns") or [row.get("text") or row.get("prompt")]
        if isinstance(messages := row.get("messages"), list):
            parts = [message.get("content") if isinstance(message, dict) else None for message in messages]
        parts = [*parts, row["completion"]] if "completion" in row and isinstance(parts, list) else parts
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise ValueError(f"{where}: expected a string, or an object with `text`, `turns`, `messages` or `prompt`")
    return "\n".join(parts)


def _tokens(texts: list[str], target: Checkpoint) -> Iterator[list[int]]:
    """The tokens of each text that is not empty, from the cache or the tokenizer."""
    about = f"{VERSION} {version('transformers')} {target.tokens.architecture} {target.tokens.digest}"
    digest = hashlib.sha256("\0".join((about, *texts)).encode("utf-8", "surrogatepass")).hexdigest()
    path, known = cache_root() / "lookup" / f"{digest[:32]}.tokens", array("i")
    if (data := remembered(path)) is not None:
        known.frombytes(data)
    else:
        for text in texts:
            known.extend(target.tokenizer(text, add_special_tokens=False)["input_ids"])
            known.append(END)
        remember(path, known.tobytes())
    start = 0
    while start < len(known):
        end = known.index(END, start)
        if end > start:
            yield known[start:end].tolist()
        start = end + 1
