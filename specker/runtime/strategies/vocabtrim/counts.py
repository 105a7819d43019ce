"""Counts of the tokens that targets write, kept between runs, for a trimmed LM head without a score file.

There is one file for each tokenizer, `vocab/HASH.safetensors` in specker's cache, in the format of score files
(scores.py). A process adds its counts to what the file holds at that time, under a lock, and replaces the file in one
step, so processes that run side by side lose nothing and no reader sees half a file. An error in the cache never ends a
run: it becomes one remark. The counts can change the acceptance, but never a token.
"""

import atexit
import logging
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from specker.paths import cache_root, write_cached
from specker.runtime.notes import Notes
from specker.runtime.strategies.vocabtrim import scores as vocab_scores
from specker.runtime.strategies.vocabtrim.scores import VocabScores

try:
    import fcntl
except ImportError:  # Windows has no such locks: of two writes at the same moment one may be lost
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)
SAVE_EVERY = 16_384  # tokens between two writes: at least a second, even for a full batch on a GPU
MOST = 1 << 20  # tokens in a file. Beyond, all counts are halved: newer text weighs more, and rare ids leave the file
WAIT = 1.0  # seconds for the lock: a process that was stopped while it held the lock must not stop this one


def folder() -> Path:
    """Where the counts of all tokenizers are. Deleting it forgets them."""
    return cache_root() / "vocab"


class VocabCounts:
    """The counts of one tokenizer's tokens from earlier runs, and the counts of this process, which `add` collects."""

    def __init__(self, tokenizer: str, notes: Notes) -> None:
        """Read the counts of earlier runs. `tokenizer`: its hash (`vocab_scores.tokenizer_hash`). Adds a remark to
        `notes` if the file cannot be read, or if this run could not write it; then nothing is counted."""
        self.path = folder() / f"{tokenizer}.safetensors"
        self.tokenizer = tokenizer
        self._new: Counter[int] = Counter()
        self._waiting = 0  # tokens in `_new`
        self._due = 0  # `_new` is written when it has this many tokens; at first at once, so that errors show early
        self._counting = self._warned = self._at_exit = False
        self.earlier: Counter[int] = Counter()  # counts of earlier runs
        try:
            self.earlier = self._read()
        except ValueError as error:
            notes["vocab_learn"] = f"the counts of earlier runs are lost: {error}"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path.parent):
                self._counting = True
        except OSError as error:
            notes["vocab_learn"] = f"{self._unwritten(error)}, so the tokens of this run are not counted"

    def first(self, order: Tensor) -> Tensor:
        """`order` [V] int64, a ranking of all ids, with the ids that earlier runs counted first: the most frequent
        first, ties by `order`."""
        counts = torch.zeros(len(order), dtype=torch.int64, device="cpu")
        for token, count in self.earlier.items():
            if token < len(counts):
                counts[token] = count
        return order[torch.sort(counts[order], descending=True, stable=True).indices]

    def add(self, tokens: Sequence[int]) -> None:
        """Count tokens that the target wrote. Writes the file now and then."""
        if not self._counting:
            return
        self._new.update(tokens)
        self._waiting += len(tokens)
        if not self._at_exit:
            atexit.register(self.save)
            self._at_exit = True
        if self._waiting >= self._due:
            self.save()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing inside the context, because a warm-up decodes made-up prompts."""
        counting, self._counting = self._counting, False
        try:
            yield
        finally:
            self._counting = counting

    def save(self) -> None:
        """Add this process's counts to the file. An error is logged once, and the counts wait for the next try."""
        if not self._waiting:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _alone(self.path.with_suffix(".lock")):
                try:
                    counts = self._read()
                except ValueError:  # the file is damaged: start from zero
                    counts = Counter()
                counts.update(self._new)
                while counts.total() > MOST:
                    counts = Counter({token: count // 2 for token, count in counts.items() if count > 1})
                write_cached(self.path, self._scores(counts).to_bytes())
            self._new.clear()
            self._waiting = 0
        except OSError as error:
            if not self._warned:
                log.warning("%s, so the counts of this run may be lost", self._unwritten(error))
            self._warned = True
        self._due = self._waiting + SAVE_EVERY

    def _read(self) -> Counter[int]:
        """The file's counts; empty if there is no file. Raises ValueError if it cannot be used."""
        try:
            if not self.path.exists():
                return Counter()
            scores = vocab_scores.read(self.path)
        except Exception as error:  # whatever lies in the cache, the run goes on
            raise ValueError(str(error) if isinstance(error, ValueError) else f"{self.path}: {error}") from error
        if scores.counts is None or scores.tokenizer != self.tokenizer:
            raise ValueError(f"{self.path} has no counts of this tokenizer's tokens")
        return Counter(dict(zip(scores.ids.tolist(), scores.counts.tolist(), strict=True)))

    def _scores(self, counts: Counter[int]) -> VocabScores:
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        ids, times = torch.tensor(ranked, dtype=torch.int64, device="cpu").view(-1, 2).unbind(1)
        totals = {"tokens": counts.total()}
        return VocabScores(ids, times, tokenizer=self.tokenizer, source="target", totals=totals)

    def _unwritten(self, error: OSError) -> str:
        return f"{self.path.parent} cannot be written ({error.strerror or error})"


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, so that no other process adds to the counts meanwhile. Goes on without the lock after
    WAIT seconds, and at once where the file system has no locks."""
    with path.open("a") as file:
        until = time.monotonic() + WAIT
        while fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < until:
                    time.sleep(0.01)
                    continue
            except OSError:
                pass
            break
        yield
