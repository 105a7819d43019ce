"""Texts whose K/V stays in a cache's pages after their requests end, so that a request with the same beginning need not
compute it again.

The texts form a tree: a node is a page and the tokens in its columns, and its path from the root is the text before
them. Requests that share pages only read them: every column that a request writes lies behind its exact columns. A page
that is full stays whole; of one that is not, the next request copies the columns it needs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from specker.model.chunks import Chunks


@dataclass(eq=False)
class Node:
    tokens: tuple[int, ...]  # in the page's columns; fewer than a page only in a leaf
    page: int
    parent: "Node | None"
    prefilled: int = 0  # of the columns, the first ones that a prefill wrote
    used: int = 0  # the time of the last match, which evicts the oldest first
    children: dict[tuple[int, ...], "Node"] = field(default_factory=dict)


@dataclass(frozen=True)
class Match:
    """The K/V that a request takes over."""

    columns: int = 0
    pages: tuple[int, ...] = ()  # full pages, shared
    copied: int | None = None  # the page that holds the rest of the columns
    ring: Any = None  # the ring with the columns of the other layers, if there are rings (rings.py)


class Prefixes:
    """The tree of one cache. `users` [pages] counts who holds each page, the tree included."""

    def __init__(self, page_size: int, users: list[int]):
        self.page_size, self.users = page_size, users
        self.root = Node((), -1, None)
        self._clock = count(1)

    def match(self, text: list[int], chunks: Chunks | None = None) -> Match:
        """The K/V of the longest known beginning of `text`. `chunks`: only columns that a prefill wrote, in whole
        chunks, so that the rest is computed in the chunks of a whole prefill, bit for bit."""
        node, pages, columns, now = self.root, [], 0, next(self._clock)
        while columns < len(text):
            key = tuple(text[columns : columns + self.page_size])
            child, shared = node.children.get(key), len(key)
            if child is None:
                each = ((common(tokens, key), other) for tokens, other in node.children.items())
                shared, child = max(each, key=lambda pair: pair[0], default=(0, None))
            if child is None or not shared:
                break
            child.used = now
            pages.append(child.page)
            known = shared if chunks is None else min(shared, child.prefilled)
            columns += known
            node = child
            if known < self.page_size:
                break
        columns = columns if chunks is None else chunks.whole(columns)
        whole, rest = divmod(columns, self.page_size)
        return Match(columns, tuple(pages[:whole]), pages[whole] if rest else None)

    def add(self, text: list[int], pages: list[int], prefilled: int) -> list[int]:
        """Keep the pages of `text`, whose last one may be part full. A prefill wrote the first `prefilled` columns.
        Returns the pages of entries that these replace and nobody holds."""
        node, now, freed = self.root, next(self._clock), []
        for start, page in zip(range(0, len(text), self.page_size), pages, strict=False):
            key = tuple(text[start : start + self.page_size])
            child = node.children.get(key)
            if child is None:
                if any(tokens[: len(key)] == key for tokens in node.children):
                    break  # the beginning of a page that is known
                for shorter in [tokens for tokens in node.children if key[: len(tokens)] == tokens]:
                    freed += self._remove(node.children[shorter])
                child = node.children[key] = Node(key, page, node)
                self.users[page] += 1
            known = max(0, min(len(key), prefilled - start))
            if child.page != page and known > child.prefilled:
                self.users[page] += 1
                self.users[child.page] -= 1
                freed += [] if self.users[child.page] else [child.page]
                child.page = page
            if child.page == page:
                child.prefilled = max(child.prefilled, known)
            child.used, node = now, child
        return freed

    def evict(self, pages: int) -> list[int]:
        """Drop the entries that were unused for the longest time. Returns up to `pages` pages that nobody holds."""
        freed: list[int] = []
        while len(freed) < pages:
            leaves = [node for node in self._nodes() if not node.children and self.users[node.page] == 1]
            if not leaves:
                break
            for node in sorted(leaves, key=lambda node: node.used)[: pages - len(freed)]:
                freed += self._remove(node)
        return freed

    @property
    def evictable(self) -> int:
        """Pages that `evict` can free: only the tree holds them and all pages that continue them."""
        free: set[Node] = set()
        for node in reversed(list(self._nodes())):  # children first
            if self.users[node.page] == 1 and free.issuperset(node.children.values()):
                free.add(node)
        return len(free)

    def _remove(self, node: Node) -> list[int]:
        """Remove a leaf. Returns its page if nobody holds it any more."""
        assert node.parent is not None and not node.children
        del node.parent.children[node.tokens]
        self.users[node.page] -= 1
        return [] if self.users[node.page] else [node.page]

    def _nodes(self) -> Iterator[Node]:
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            yield node


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def copy_columns(k: torch.Tensor, v: torch.Tensor, source: int, target: int, columns: int) -> None:
    """Copy a page's first columns in all layers of k and v [L, pages, page_size, Hkv, D]."""
    for kv in (k, v):
        kv[:, target, :columns] = kv[:, source, :columns]
