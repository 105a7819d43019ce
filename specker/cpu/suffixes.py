"""The index of strategy `lookup`: where in known texts the last tokens of a text occurred before, and what followed.

Texts lie end to end. A place is the position of a token. A text matches a place with m tokens if the m tokens before
the place are the text's last m; more than `most` are not compared. The index finds places by the last n tokens, for a
few lengths n: of the longest n with any, the latest WALK of them (LZ77's hash chains). A suffix tree, as in
SuffixDecoding (arXiv 2411.04975), finds the longest match at any distance, but takes several times the memory.

A draft is a trie over what follows the places with the longest match. It grows by the node that most places share, and
among equals by that of the latest place. A chain is a trie of one path. A tree with fewer than `width` paths goes on
with the places of shorter matches.
"""

import weakref
from array import array
from collections.abc import Iterator, Sequence
from ctypes import byref, c_int32, c_int64
from dataclasses import dataclass
from typing import Protocol

from specker.cpu.library import available, native

WALK = 64  # places of each length that are compared
LENGTHS = (2, 4, 8)  # tokens of the n-grams that are indexed, besides the shortest match; csrc/suffix.c has room for 4
END = -1  # ends a text


@dataclass(frozen=True)
class Copy:
    """A draft of copied tokens."""

    matched: int = 0  # tokens of the match; 0: none
    place: int = 0  # the latest of its places
    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()  # rows, as of a `Draft`


NOTHING = Copy()


class Index(Protocol):
    """What both forms of the index do."""

    @property
    def bytes(self) -> int:
        """Of memory."""

    def __len__(self) -> int:
        """Tokens, with the ends of texts."""

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end; END ends a text. Raises MemoryError."""

    def follow(self, tokens: Sequence[int], most: int, nodes: int) -> tuple[int, int]:
        """Add the next tokens of the last text, and find what `draft` would copy after it: the tokens of the match, up
        to `most`, and those of the chain, up to `nodes`. Raises MemoryError."""

    def draft(self, tail: Sequence[int], most: int, depth: int, nodes: int, width: int = 1) -> Copy:
        """The draft after a text that ends with `tail`: up to `nodes` tokens on up to `width` paths of up to `depth`
        tokens, for matches of up to `most` tokens. nodes: at most 255."""


def new_index(least: int, most: int) -> Index:
    """An empty index for matches of `least` to `most` tokens; without a compiler, the slower one in Python."""
    lengths = (least, *(n for n in LENGTHS if least < n <= most))
    return Compiled(lengths) if available() else Reference(lengths)


class Compiled:
    """The index in csrc/suffix.c."""

    def __init__(self, lengths: Sequence[int]):
        self._lib, self._count = native(), 0
        self._handle = self._lib.suffix_new((c_int64 * len(lengths))(*lengths), len(lengths))
        if not self._handle:
            raise MemoryError
        weakref.finalize(self, self._lib.suffix_free, self._handle)

    def __len__(self) -> int:
        return self._count

    @property
    def bytes(self) -> int:
        return int(self._lib.suffix_bytes(self._handle))

    def append(self, tokens: Sequence[int]) -> None:
        given = tokens if isinstance(tokens, array) else array("i", tokens)
        if not self._lib.suffix_append(self._handle, given.buffer_info()[0], len(given)):
            raise MemoryError
        self._count += len(given)

    def follow(self, tokens: Sequence[int], most: int, nodes: int) -> tuple[int, int]:
        given = array("i", tokens)
        found = self._lib.suffix_follow(self._handle, given.buffer_info()[0], len(given), most, WALK, nodes)
        if found < 0:
            raise MemoryError
        self._count += len(given)
        return found >> 32, found & 0xFFFFFFFF

    def draft(self, tail: Sequence[int], most: int, depth: int, nodes: int, width: int = 1) -> Copy:
        end, out, about = array("i", tail), ((c_int32 * nodes) * 2)(), (c_int32 * 2)()
        count = self._lib.suffix_draft(
            self._handle,
            end.buffer_info()[0],
            len(end),
            most,
            WALK,
            depth,
            nodes,
            width,
            byref(out[0]),
            byref(out[1]),
            byref(about),
        )
        return Copy(about[0], about[1], tuple(out[0][:count]), tuple(out[1][:count])) if count else NOTHING


class Reference:
    """The same in Python."""

    def __init__(self, lengths: Sequence[int]):
        self._tokens: list[int] = []
        self._run = 0  # tokens since the last end of a text
        self._places: dict[int, dict[tuple[int, ...], list[int]]] = {n: {} for n in lengths}

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def bytes(self) -> int:
        return 100 * (1 + len(self._places)) * len(self._tokens)  # about

    def append(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            place = len(self._tokens)
            for n, places in self._places.items():
                if token >= 0 and n <= self._run:
                    places.setdefault(tuple(self._tokens[place - n :]), []).append(place)
            self._tokens.append(token)
            self._run = 0 if token < 0 else self._run + 1

    def follow(self, tokens: Sequence[int], most: int, nodes: int) -> tuple[int, int]:
        self.append(tokens)
        copy = self.draft(self._tokens[-min(most, self._run) :] if self._run else (), most, nodes, nodes)
        return copy.matched, len(copy.tokens)

    def draft(self, tail: Sequence[int], most: int, depth: int, nodes: int, width: int = 1) -> Copy:
        found = dict(self._matches(list(tail), most, width > 1))
        if not found:
            return NOTHING
        trie = Trie(self._tokens, depth, nodes, width)
        longest = max(found.values())
        for matched in range(longest, 0, -1):
            if not trie.full:
                trie.grow([place for place, m in found.items() if m == matched])
        latest = max(place for place, m in found.items() if m == longest)
        return Copy(longest, latest, tuple(trie.tokens), tuple(trie.parents))

    def _matches(self, tail: list[int], most: int, every: bool) -> Iterator[tuple[int, int]]:
        """(place, tokens of its match), the longest n-gram's first and its latest first."""
        above = most + 1
        for n in sorted(self._places, reverse=True):
            if n > len(tail):
                continue
            places = self._places[n].get(tuple(tail[-n:]), [])[-WALK:]
            for place in reversed(places):
                matched = n
                while matched < min(most, len(tail), place) and self._tokens[place - 1 - matched] == tail[-1 - matched]:
                    matched += 1
                if matched < above:
                    yield place, matched
            if places and not every:
                return
            above = n


class Trie:
    """A draft that grows node by node."""

    def __init__(self, text: list[int], depth: int, nodes: int, width: int):
        self._text, self._depth, self._nodes, self._width = text, depth, nodes, width
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._paths = 0

    @property
    def full(self) -> bool:
        """Whether no further path can begin."""
        return len(self.tokens) == self._nodes or self._paths == self._width

    def grow(self, places: list[int]) -> None:
        """Add what follows the places, the latest first."""
        open_ = self._branches(0, 0, places)
        while open_ and len(self.tokens) < self._nodes:
            best = max(open_, key=lambda branch: (len(branch[3]), branch[3][0]))
            open_.remove(best)
            parent, token, depth, follow = best
            known = [i + 1 for i, x in enumerate(self.tokens) if (self.parents[i], x) == (parent, token)]
            if not known:
                forks = parent in self.parents or not self.tokens
                if forks and self._paths == self._width:
                    continue
                self._paths += forks
                self.tokens.append(token)
                self.parents.append(parent)
            if depth < self._depth:
                open_ += self._branches(known[0] if known else len(self.tokens), depth, follow)

    def _branches(self, row: int, depth: int, places: list[int]) -> list[tuple[int, int, int, list[int]]]:
        """(parent, token, depth, places) for each token that follows a path of `depth` tokens."""
        by_token: dict[int, list[int]] = {}
        for place in places:
            if place + depth < len(self._text) and (token := self._text[place + depth]) >= 0:
                by_token.setdefault(token, []).append(place)
        return [(row, token, depth + 1, follow) for token, follow in by_token.items()]
