"""A trigram model over token ids, for the path search of a diffusion draft.

Interpolated Kneser-Ney with one discount per order (Chen and Goodman, TR-10-98, sections 2.7 and 3), in back-off form:

    p(w | u v) = p3(u v w)                    if u v w is listed, otherwise b(u v) p(w | v)
    p(w | v)   = p2(v w)                      if v w is listed,   otherwise b(v) p1(w)

The back-off weights b make each p sum to 1 over the vocabulary; they are computed from the listed probabilities when
the model is made or read. The tables are sorted numpy arrays; ngram_scorer.py looks candidates up in them.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specker.fields import option

FORMAT = "specker-ngram"  # of the file
VERSION = 1
MAX_VOCABULARY = 1 << 21  # a trigram's key is below the cube of this, which fits 63 bits
_MERGE = 1 << 20  # unsorted keys to collect before a merge


class NGramCounts:
    """Counts of each trigram in the texts added so far. Trigram u v w has the key (u V + v) V + w. Raises ValueError
    for more than MAX_VOCABULARY ids."""

    def __init__(self, vocab_size: int, keys: Any = None, times: Any = None):
        if not 1 <= vocab_size <= MAX_VOCABULARY:
            raise ValueError(f"the vocabulary must have 1..{MAX_VOCABULARY} ids, got {vocab_size}")
        self.vocab_size = vocab_size
        self._keys = np.empty(0, np.int64) if keys is None else keys
        self._times = np.empty(0, np.int64) if times is None else times
        self._waiting: list[Any] = []

    def add(self, ids: Sequence[int]) -> None:
        """Count one text."""
        x = np.asarray(ids, np.int64)
        if len(x) > 2:
            V = self.vocab_size
            keys = (x[:-2] * V + x[1:-1]) * V + x[2:]
            known = x < V  # a tokenizer may have more tokens than the model has rows
            self._waiting.append(keys[known[:-2] & known[1:-1] & known[2:]])
            if sum(map(len, self._waiting)) > _MERGE:
                self.counts()

    def counts(self) -> tuple[Any, Any]:
        """The keys [n], ascending, and their counts [n], both int64."""
        if self._waiting:
            keys = np.concatenate((self._keys, *self._waiting))
            times = np.concatenate((self._times, np.ones(len(keys) - len(self._keys), np.int64)))
            self._keys, place = np.unique(keys, return_inverse=True)
            self._times = np.bincount(place, times, len(self._keys)).astype(np.int64)
            self._waiting = []
        return self._keys, self._times


@dataclass(frozen=True)
class NGram:
    vocab_size: int
    unigrams: Any  # [V] float32: log p1
    bigrams: Any  # [n] int64 keys v V + w, ascending
    log_p2: Any  # [n] float32
    trigrams: Any  # [m] int64 keys (u V + v) V + w, ascending
    log_p3: Any  # [m] float32
    tokenizer: str | None = None  # vocab_scores.tokenizer_hash
    totals: dict[str, int] = field(default_factory=dict)  # such as texts and tokens
    back_off: Any = field(init=False, repr=False)  # [V] log b(v), 0 if no bigram begins with v
    # (keys, log values), each with the sentinel of `_ended`:
    two: Any = field(init=False, repr=False)  # bigrams
    three: Any = field(init=False, repr=False)  # trigrams
    contexts: Any = field(init=False, repr=False)  # u V + v of listed trigrams, log b(u v)

    def __post_init__(self) -> None:
        V = self.vocab_size
        first, begin = np.unique(self.bigrams // V, return_index=True)
        b1: Any = np.zeros(V, np.float32)
        b1[first] = _back_off(self.log_p2, self.unigrams[self.bigrams % V], begin)
        object.__setattr__(self, "back_off", b1)
        object.__setattr__(self, "two", _ended(self.bigrams, self.log_p2))
        object.__setattr__(self, "three", _ended(self.trigrams, self.log_p3))
        contexts, begin = np.unique(self.trigrams // V, return_index=True)
        lower = self._pairs(self.trigrams // V % V, self.trigrams % V)
        object.__setattr__(self, "contexts", _ended(contexts, _back_off(self.log_p3, lower, begin)))

    @classmethod
    def fit(cls, counts: NGramCounts, least: int = 1, **about: Any) -> "NGram":
        """Fit a model to trigram counts. After computing the probabilities, drop trigrams seen fewer than `least` times
        and bigrams with fewer than `least` different tokens before them. Raises ValueError if nothing remains."""
        keys, times = counts.counts()
        V = counts.vocab_size
        if not len(keys):
            raise ValueError("no text has three tokens, so there are no trigrams to fit")
        # Lower orders count distinct contexts, not occurrences: "Francisco" is frequent but follows few words.
        bigrams, different = np.unique(keys % (V * V), return_counts=True)
        after = np.bincount(bigrams % V, minlength=V)
        p, spare = _discounted(after, np.zeros(V, np.int64), 1)
        p1 = p + spare[0] / V
        p2, spare = _discounted(different, bigrams // V, V)
        p2 += spare[bigrams // V] * p1[bigrams % V]
        contexts, which = np.unique(keys // V, return_inverse=True)
        p3, spare = _discounted(times, which, len(contexts))
        p3 += spare[which] * p2[np.searchsorted(bigrams, keys % (V * V))]
        much, wide = times >= least, different >= least
        if not much.any() or not wide.any():
            rarer = f"keep rarer ones ({option('ngram_least')}) or give more text"
            raise ValueError(f"no n-gram was seen {least} times: {rarer}")
        logs = (np.log(x).astype(np.float32) for x in (p2[wide], p3[much]))
        log_p2, log_p3 = logs
        return cls(V, np.log(p1).astype(np.float32), bigrams[wide], log_p2, keys[much], log_p3, **about)

    def _pairs(self, v: Any, w: Any) -> Any:
        """log p(w | v), broadcast."""
        place, listed = _find(self.two[0], v * self.vocab_size + w)
        return np.where(listed, self.two[1].take(place), self.unigrams.take(w) + self.back_off.take(v))

    def to_bytes(self) -> bytes:
        """The file's content; the same model gives the same bytes."""
        from safetensors.numpy import save

        V = self.vocab_size
        small = np.uint16 if V <= 1 << 16 else np.uint32
        columns = {"v": self.bigrams // V, "w": self.bigrams % V}
        columns |= {"tu": self.trigrams // (V * V), "tv": self.trigrams // V % V, "tw": self.trigrams % V}
        tensors = {name: np.ascontiguousarray(column.astype(small)) for name, column in columns.items()}
        tensors |= {"p1": self.unigrams, "p2": self.log_p2, "p3": self.log_p3}
        about = {"format": FORMAT, "version": VERSION, "vocab_size": V, "tokenizer": self.tokenizer}
        return save(tensors, {"specker": json.dumps(about | {"totals": self.totals}, sort_keys=True)})

    def check(self, vocab_size: int, tokenizer: str | None, path: object) -> None:
        """Raise ValueError if the file shows that the model has another vocabulary. `path` is for the message."""
        if self.vocab_size != vocab_size:
            raise ValueError(f"{path} is of a vocabulary of {self.vocab_size} ids, the target's has {vocab_size}")
        if self.tokenizer is not None and tokenizer is not None and self.tokenizer != tokenizer:
            raise ValueError(f"{path} was counted with another tokenizer than the target's")


def read(path: str | Path) -> NGram:
    """Read a file of `to_bytes`. Raises ValueError if it is missing, corrupt or of another kind."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: there is no such n-gram file")
    try:
        with safe_open(path, framework="np") as file:
            about = json.loads((file.metadata() or {}).get("specker", "null"))
            if about is None or about.get("format") != FORMAT or about.get("version") != VERSION:
                is_ = f"{about.get('format')} version {about.get('version')}" if about else "no n-gram file"
                raise ValueError(f"{path} is {is_}; this reads {FORMAT} version {VERSION}")
            V = int(about["vocab_size"])
            v, w, tu, tv, tw = (file.get_tensor(n).astype(np.int64) for n in ("v", "w", "tu", "tv", "tw"))
            p1, p2, p3 = (file.get_tensor(n) for n in ("p1", "p2", "p3"))
    except (SafetensorError, json.JSONDecodeError, KeyError) as error:
        raise ValueError(f"{path} is corrupt or truncated ({error})") from error
    bigrams, trigrams = v * V + w, (tu * V + tv) * V + tw
    columns = (v, w, tu, tv, tw)
    if len(p1) != V or len(p2) != len(bigrams) or len(p3) != len(trigrams) or any((c >= V).any() for c in columns):
        raise ValueError(f"{path}: its tables do not fit together")
    if any((keys[1:] <= keys[:-1]).any() for keys in (bigrams, trigrams)):
        raise ValueError(f"{path}: its n-grams are not in ascending order")
    return NGram(V, p1, bigrams, p2, trigrams, p3, about["tokenizer"], about["totals"])


def _find(keys: Any, wanted: Any) -> tuple[Any, Any]:
    """Look up `wanted` in the ascending `keys`: (index, found); the index is arbitrary if not found. The sentinel of
    `_ended` keeps every index in range."""
    place = keys.searchsorted(wanted)
    return place, keys.take(place) == wanted


def _ended(keys: Any, values: Any) -> tuple[Any, Any]:
    """Append a sentinel key larger than any other, so a look-up needs no bounds check."""
    return np.append(keys, np.iinfo(np.int64).max), np.append(values, values.dtype.type(0))


def _discounted(times: Any, context: Any, contexts: int) -> tuple[Any, Any]:
    """Counts [n] of n-grams and their contexts [n] -> discounted probabilities [n], left-over mass [contexts]."""
    one, two = int((times == 1).sum()), int((times == 2).sum())
    d = one / (one + 2 * two) if one and two else 0.5  # Ney, Essen and Kneser's estimate
    total = np.bincount(context, times, contexts)
    kept = np.maximum(times - d, 0)
    over = 1 - np.bincount(context, kept, contexts) / np.maximum(total, 1)
    return kept / total[context], over


def _back_off(log_p: Any, lower: Any, begin: Any) -> Any:
    """log b of each context: log of (1 - sum p) / (1 - sum of the lower-order p). A context's listed n-grams start at
    index `begin`."""
    left, below = (1 - np.add.reduceat(np.exp(x.astype(np.float64)), begin) for x in (log_p, lower))
    return np.log(np.maximum(left, 1e-9) / np.maximum(below, 1e-9)).astype(np.float32)
