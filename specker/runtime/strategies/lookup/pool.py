"""Texts from which others may copy. The texts of one pool share an index; those of different salts share nothing."""

from __future__ import annotations

import hashlib
import os
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from specker.cpu.suffixes import END, Index, new_index
from specker.runtime.strategies.lookup import MEMORY, SUFFIXES

SHORTEST = 2  # tokens of a match in another text
LONGEST = SUFFIXES[1]
KEPT = 0.75  # of the memory, once texts are dropped: each time the index is made anew
TOKEN_BYTES = 4  # beside the index
TEXT_BYTES = 380  # of a text's objects


@dataclass(eq=False, slots=True)
class Text:
    tokens: array[int]
    start: int  # its place in the index
    used: int  # when it was added, or last copied


class Pool:
    """The texts of one salt, or a corpus."""

    def __init__(self, clock: count[int]):
        self._clock = clock
        self.index: Index = new_index(SHORTEST, LONGEST)
        self.texts: list[Text] = []  # ascending by start
        self._beginnings: dict[bytes, list[Text]] = {}

    @property
    def bytes(self) -> int:
        return self.index.bytes + TOKEN_BYTES * len(self.index) + TEXT_BYTES * len(self.texts)

    def add(self, tokens: Sequence[int]) -> None:
        """Add a text. One that begins a known text is known; one that a known text begins, such as a conversation that
        went on, replaces it."""
        text = Text(array("i", tokens), len(self.index), next(self._clock))
        similar = self._beginnings.setdefault(_beginning(text), [])
        for other in list(similar):
            if _begins(other.tokens, text.tokens):
                other.used = text.used
                return
            if _begins(text.tokens, other.tokens):
                similar.remove(other)
                other.used = -1  # its tokens stay in the index until it is made anew
        similar.append(text)
        self._append(text)

    def _append(self, text: Text) -> None:
        text.start = len(self.index)
        self.index.append(text.tokens)
        self.index.append([END])
        self.texts.append(text)

    def used(self, place: int) -> None:
        """Note that a draft copies what follows a place."""
        text = self.texts[bisect_right(self.texts, place, key=lambda text: text.start) - 1]
        if text.used >= 0:
            text.used = next(self._clock)

    def drop(self, dropped: set[Text]) -> None:
        """Make the index anew without these texts."""
        texts = [text for text in self.texts if text not in dropped]
        self.index, self.texts, self._beginnings = new_index(SHORTEST, LONGEST), [], {}
        for text in texts:
            self._beginnings.setdefault(_beginning(text), []).append(text)
            self._append(text)


class Pools:
    """A pool for each salt. In all they take `memory` bytes: the texts that were not copied for the longest time go
    first. A pool's name is a digest of its salt under a random key, since a file (text_file.py) must not tell the
    salts."""

    def __init__(self, memory: int = MEMORY):
        self._limit = memory
        self._pools: dict[str, Pool] = {}
        self._clock = count(1)
        self.key = os.urandom(16)
        self.added = 0  # texts so far

    def name(self, salt: str) -> str:
        """The name of a salt's pool."""
        return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), key=self.key, digest_size=16).hexdigest()

    def of(self, salt: str) -> Pool | None:
        return self._pools.get(self.name(salt)) if self._pools else None

    @property
    def bytes(self) -> int:
        return sum(pool.bytes for pool in self._pools.values())

    def add(self, salt: str, tokens: Sequence[int]) -> None:
        self.put(self.name(salt), tokens)

    def put(self, name: str, tokens: Sequence[int]) -> None:
        """Add a text to the pool of this name."""
        if name not in self._pools:
            self._pools[name] = Pool(self._clock)
        self._pools[name].add(tokens)
        self.added += 1
        if self.bytes > self._limit:
            self._evict()

    def texts(self) -> list[tuple[str, array[int]]]:
        """The name of its pool and the tokens of each text, the least recently used first."""
        alive = [(text.used, name, text) for name, pool in self._pools.items() for text in pool.texts if text.used >= 0]
        return [(name, text.tokens) for _, name, text in sorted(alive, key=lambda each: each[0])]

    def _evict(self) -> None:
        """Drop texts until the others take KEPT of the memory."""
        left, goal, dropped = self.bytes, KEPT * self._limit, set[Text]()
        each = {pool: pool.bytes / max(1, len(pool.index)) for pool in self._pools.values()}
        known = [(text.used, pool, text) for pool in each for text in pool.texts]
        for used, pool, text in sorted(known, key=lambda entry: entry[0]):
            if used < 0 or left > goal:
                dropped.add(text)
                left -= int(each[pool] * (len(text.tokens) + 1))
        for name, pool in [*self._pools.items()]:
            if dropped.issuperset(pool.texts):
                del self._pools[name]
            elif not dropped.isdisjoint(pool.texts):
                pool.drop(dropped)


def _begins(long: array[int], short: array[int]) -> bool:
    """Whether `long` begins with `short`."""
    return len(long) >= len(short) and long[len(short) - 1] == short[-1] and long[: len(short)] == short


def _beginning(text: Text) -> bytes:
    return text.tokens[:8].tobytes()
