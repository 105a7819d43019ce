"""The compiled index of texts, its reference in Python, and the definition."""

import random

import pytest

from specker.cpu import available, suffixes
from specker.cpu.suffixes import END, NOTHING, WALK, Compiled, Reference


def defined(
    tokens: list[int], tail: list[int], lengths: tuple[int, ...], most: int, depth: int
) -> tuple[int, list[int]]:
    """(tokens of the longest match, the chain), by comparing every place: valid up to WALK places of a length."""

    def matched(place: int) -> int:
        n = 0
        while n < min(most, len(tail), place) and tokens[place - 1 - n] == tail[-1 - n]:
            n += 1
        return n

    found = {place: matched(place) for place in range(1, len(tokens)) if tokens[place] != END}
    longest = max(found.values(), default=0)
    if longest < lengths[0]:
        return 0, []
    places, chain = [place for place, n in found.items() if n == longest], []
    while len(chain) < depth:
        following = {}
        for place in places:
            token = tokens[place + len(chain)] if place + len(chain) < len(tokens) else END
            if token != END:
                following.setdefault(token, []).append(place)
        if not following:
            break
        token, places = max(following.items(), key=lambda item: (len(item[1]), max(item[1])))
        chain.append(token)
    return longest, chain


@pytest.mark.parametrize("seed", range(8))
def test_both_forms_find_what_is_defined(seed):
    """In texts over small alphabets that grow by some tokens at a time and end now and then, for chains and trees."""
    rng = random.Random(seed)
    vocab, lengths = rng.choice((2, 3, 9)), rng.choice(((1, 2, 4, 8), (2, 4), (3,), (5, 8)))
    most = rng.randint(lengths[-1], lengths[-1] + 6)
    indices = [Reference(lengths)] + [Compiled(lengths)] * available()
    tokens: list[int] = []
    while len(tokens) < 600:
        new = [END if rng.random() < 0.02 else rng.randrange(vocab) for _ in range(rng.randint(1, 30))]
        tokens += new
        known = tokens[max((i + 1 for i, token in enumerate(tokens) if token == END), default=0) :][-most:]
        nodes = rng.randint(1, 20)
        found = [index.follow(new, most, nodes) for index in indices]
        own = indices[0].draft(known, most, nodes, nodes)
        assert found == [(own.matched, len(own.tokens))] * len(indices)
        tail = [rng.randrange(vocab) for _ in range(12)] if rng.random() < 0.5 else tokens[-12:]
        tail = tail[-rng.randint(1, 12) :]
        tail = tail[max((i + 1 for i, token in enumerate(tail) if token == END), default=0) :]
        depth, width = rng.randint(1, 9), rng.randint(2, 5)
        chain, *others = [index.draft(tail, most, depth, depth) for index in indices]
        tree, *trees = [index.draft(tail, most, depth, nodes, width) for index in indices]
        assert [chain] * len(others) == others and [tree] * len(trees) == trees
        assert chain.parents == tuple(range(len(chain.tokens)))
        assert len({*range(len(tree.tokens) + 1)} - {*tree.parents}) <= width and len(tree.tokens) <= nodes
        if len(tokens) <= WALK:
            assert (chain.matched, list(chain.tokens)) == defined(tokens, tail, lengths, most, depth)
    assert all(len(index) == len(tokens) for index in indices)


def test_the_most_frequent_continuation_leads_and_a_text_ends(monkeypatch):
    """Of equal ones the latest; nothing is copied past the end of a text. Also without a compiler."""
    for compiled in (True, False):
        monkeypatch.setattr(suffixes, "available", lambda compiled=compiled: compiled and available())
        index = suffixes.new_index(1, 8)
        assert index.draft([1, 2], 8, 4, 4) == NOTHING
        index.append([1, 2, 3, 3, END, 1, 2, 4, END, 1, 2, 3, 5, END, 7, 1])
        assert index.draft([9, 1, 2], 8, 4, 4).tokens == (3, 5)
        tree = index.draft([9, 1, 2], 8, 4, 8, 3)
        assert tree.tokens == (3, 5, 4, 3) and tree.parents == (0, 1, 0, 1) and (tree.matched, tree.place) == (2, 11)
        assert index.draft([7], 8, 4, 4).tokens == (1,)
        assert index.bytes > 0
