"""A draft with another tokenizer: which ids mean the same as the target's, and the target's text in the draft's ids.

Two ids are the same token if they stand for the same bytes, however their vocabularies spell them (spelling.py).
Special tokens are the same if their texts are.

The draft reads its own tokens: the text of the target's tokens, divided by the draft's tokenizer (`Reader`). It writes
in one of two ways (both in arXiv 2502.05202). A chain may have any tokens of the draft, and the target's tokenizer
divides their text (string level). The nodes of a tree, and a trimmed head, have shared tokens only (token-level
intersection): those are valid for the target as they are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from specker.checkpoints.tokenizer import Tokens

LEAST = 0.1  # share of the draft's ids that must be the target's, too
# Appending text can retokenise the last word. Ids are final once a word boundary is followed by SETTLED_AFTER more ids.
# Text without spaces, such as Chinese: once UNSPACED ids are there, all but the last SETTLED_AFTER.
SETTLED_AFTER = 12
UNSPACED = 96


@dataclass(frozen=True)
class TokenTexts:
    """What each id of a vocabulary stands for."""

    texts: list[bytes]  # by id; b"" of special tokens and of ids without a token
    fallback: set[int]  # ids of sentencepiece's single bytes, which may have another token, too
    special: dict[str, int]  # the special tokens' texts, with their ids

    @classmethod
    def of(cls, tokens: Tokens) -> TokenTexts:
        """The texts of a tokenizer's tokens. Raises CheckpointError if it cannot be read."""
        vocabulary, spelling = tokens.vocabulary, tokens.spelling
        texts = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for token, n in vocabulary.items():
            texts[n] = spelling.read(token)
        fallback = {n for token, n in vocabulary.items() if spelling.is_byte(token)}
        special = {token: vocabulary[token] for token, its in spelling.added.items() if its and token in vocabulary}
        return cls(texts, fallback, special)

    @cached_property
    def ids(self) -> dict[bytes, int]:
        """The id of each text; of several the first, and a single byte of sentencepiece only if there is no other."""
        found: dict[bytes, int] = {}
        for n in sorted(range(len(self.texts)), key=self.fallback.__contains__):
            found.setdefault(self.texts[n], n)
        found.pop(b"", None)
        return found


@dataclass(frozen=True, eq=False)
class Translation:
    """Between the ids of a target and those of a draft."""

    target: TokenTexts
    draft: TokenTexts
    theirs: Tokens  # the target's
    tokens: Tokens  # the draft's
    size: int  # the target's number of ids
    free: bool  # whether the draft writes tokens that are not shared
    bos: int | None  # the target's token before a text; None: it has none
    ids: Tensor  # [K] int64, the target's ids of the shared tokens, ascending
    rows: Tensor  # [K] int64, the draft's ids of these

    @classmethod
    def between(cls, target: Tokens, draft: Tokens, sizes: tuple[int, int], free: bool) -> Translation:
        """`sizes`: the target's and the draft's number of ids, in their embeddings. Raises CheckpointError if a
        tokenizer cannot be read."""
        its, own = TokenTexts.of(target), TokenTexts.of(draft)
        pairs = {n: own.ids[text] for text, n in its.ids.items() if text in own.ids}
        pairs |= {n: own.special[text] for text, n in its.special.items() if text in own.special}
        ids = sorted(n for n, other in pairs.items() if n < sizes[0] and other < sizes[1])
        return cls(
            its,
            own,
            target,
            draft,
            sizes[0],
            free,
            bos=getattr(target.tokenizer, "bos_token_id", None),
            ids=torch.tensor(ids, dtype=torch.int64, device="cpu"),
            rows=torch.tensor([pairs[n] for n in ids], dtype=torch.int64, device="cpu"),
        )

    @property
    def share(self) -> float:
        """The share of the draft's tokens that are the target's, too."""
        return len(self.ids) / max(1, len(self.draft.ids) + len(self.draft.special))

    @property
    def sentence(self) -> str:
        """What is shared, for the user."""
        total = len(self.draft.ids) + len(self.draft.special)
        return f"the draft reads its own tokens: {len(self.ids):,} of its {total:,} tokens are the target's, too"

    @cached_property
    def names(self) -> Tensor:
        """[draft's ids] int64: what noise calls each of the draft's tokens: the target's id if it is shared, else a
        number that is no id of the target."""
        out = self.size + torch.arange(len(self.draft.texts), dtype=torch.int64, device="cpu")
        out[self.rows] = self.ids
        return out

    @cached_property
    def own(self) -> Tensor:
        """[numbers] int64: the draft's id of each of `names`; of the target's ids that are not shared `start`."""
        out = torch.full((self.size + len(self.draft.texts),), self.start, dtype=torch.int64, device="cpu")
        out[self.names] = torch.arange(len(self.draft.texts), dtype=torch.int64, device="cpu")
        return out

    @cached_property
    def special(self) -> dict[int, int]:
        """The target's special tokens that are shared -> the draft's ids."""
        both = self.target.special.items()
        return {n: self.draft.special[text] for text, n in both if text in self.draft.special}

    @cached_property
    def spelled(self) -> dict[int, bytes]:
        """The target's other special tokens, which the draft reads letter by letter."""
        return {n: text.encode() for text, n in self.target.special.items() if n not in self.special}

    @cached_property
    def prefix(self) -> list[int]:
        """The ids that the draft's tokenizer puts before each text."""
        tokenizer = self.tokens.tokenizer
        whole, bare = list(tokenizer.encode("a")), self.encode("a")
        for n in range(len(whole) - len(bare) + 1):
            if whole[n : n + len(bare)] == bare:
                return whole[:n]
        return []

    @cached_property
    def start(self) -> int:
        """What a text without tokens begins with."""
        tokenizer = self.tokens.tokenizer
        named = (getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos"))
        return next((n for n in (*self.prefix, *named) if n is not None), 0)

    @cached_property
    def spaced(self) -> bool:
        """Whether the draft's tokenizer puts a space before each text."""
        return _spaced(self.tokens.tokenizer, self.draft)

    def write(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """The target's ids of tokens that the draft has written behind a text, and how many of them each needs."""
        texts = self.draft.texts
        count = next((i for i, n in enumerate(ids) if not texts[n]), len(ids))
        out = self._divided(b"".join(texts[n] for n in ids[:count]))
        ends, lengths = [*accumulate(len(texts[n]) for n in ids[:count])], [len(self.target.texts[n]) for n in out]
        needs = [min(bisect_left(ends, end) + 1, count) for end in accumulate(lengths)]
        if count < len(ids) and (special := self._theirs_special.get(ids[count])) is not None:
            more, further = self.write(ids[count + 1 :])
            out, needs = [*out, special, *more], [*needs, *(count + 1 + n for n in (0, *further))]
        return out, needs

    @cached_property
    def _theirs_special(self) -> dict[int, int]:
        return {own: n for n, own in self.special.items()}

    def _divided(self, text: bytes) -> list[int]:
        return _divided(text, True, self.theirs.tokenizer, self.target, self._theirs_spaced)

    @cached_property
    def _theirs_spaced(self) -> bool:
        return _spaced(self.theirs.tokenizer, self.target)

    def encode(self, text: str) -> list[int]:
        """The draft's ids of a text, without those around it."""
        return list(self.tokens.tokenizer.encode(text, add_special_tokens=False))

    def read(self, text: bytes, within: bool) -> list[int]:
        """The draft's ids of a text; see `_divided`."""
        return _divided(text, within, self.tokens.tokenizer, self.draft, self.spaced)


def _spaced(tokenizer: Any, vocabulary: TokenTexts) -> bool:
    """Whether a tokenizer puts a space before each text."""
    return b"".join(vocabulary.texts[n] for n in tokenizer.encode("a", add_special_tokens=False)) == b" a"


def _divided(text: bytes, within: bool, tokenizer: Any, vocabulary: TokenTexts, spaced: bool) -> list[int]:
    """The ids of a text, which may begin or end within a character. Bytes of no whole character become the tokens of
    single bytes, if there are any. `within`: it follows other text, so that the space that a tokenizer puts before each
    text (`spaced`) is the one that the text begins with, or none."""
    out: list[int] = []
    while text:
        try:
            whole, broken, text = text.decode(), b"", b""
        except UnicodeDecodeError as error:
            whole, broken, text = text[: error.start].decode(), text[error.start : error.end], text[error.end :]
        if whole:
            begins = whole.startswith(" ")
            ids = tokenizer.encode(whole[1:] if within and spaced and begins else whole, add_special_tokens=False)
            alone = within and spaced and not begins and vocabulary.texts[ids[0]] == b" "
            out += ids[1:] if alone else ids
        out += [n for byte in broken if (n := vocabulary.ids.get(bytes((byte,)))) is not None]
        within = True
    return out


class Reader:
    """A growing text of the target's ids in the draft's ids."""

    def __init__(self, translation: Translation):
        self.translation, self.seen = translation, 0  # the target's tokens that were read
        self.ids = list(translation.prefix)
        self.settled = len(self.ids)  # ids before this do not change while the text grows
        self._rest = b""  # the text of the ids behind
        self._within = False  # whether it follows other text
        self._guessed = False

    def read(self, tokens: Sequence[int]) -> int:
        """Read the text `tokens`, which begins with what was read before. Returns how many of the earlier `ids` are
        still true: ids before this number are the same as before."""
        t, same = self.translation, len(self.ids)
        if self.seen == 0 and tokens and tokens[0] == t.bos:
            self.seen = 1
        for token in tokens[self.seen :]:
            if (own := t.special.get(token)) is not None:
                same = min(same, self._divide())
                self.ids.append(own)
                self.settled, self._rest, self._within = len(self.ids), b"", False
            else:
                self._rest += t.spelled.get(token) or (t.target.texts[token] if token < len(t.target.texts) else b"")
        if self.seen < len(tokens) or self._guessed:
            same = min(same, self._divide())
            self._settle()
        self.seen, self._guessed = len(tokens), False
        if not self.ids:
            self.ids.append(t.start)  # until the text has an id
        return same

    def guess(self, ids: Sequence[int]) -> None:
        """The draft has read `ids` behind the text, until the next call of `read`."""
        self.ids += ids
        self._guessed = True

    def _divide(self) -> int:
        """Divide the text that is not settled. Returns the first id that is another one than before."""
        new, first = self.translation.read(self._rest, self._within), self.settled
        old = self.ids[first:]
        same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        self.ids[first + same :] = new[same:]
        return first + same

    def _settle(self) -> None:
        """Settle ids at the end of which a new word begins."""
        count = len(self.ids) - self.settled
        if count < 2 * SETTLED_AFTER:
            return
        texts = self.translation.draft.texts
        pieces = [texts[n] for n in self.ids[self.settled :]]
        whole = b"".join(pieces)
        spaced = whole != self._rest and whole == b" " + self._rest  # the tokenizer's own space
        if not spaced and whole != self._rest:  # the tokenizer has changed the text
            if count >= UNSPACED and self._rest.decode(errors="replace").encode() == self._rest:
                self.settled, self._rest, self._within = len(self.ids), b"", True
            return
        starts = [0, *accumulate(map(len, pieces))]
        words, characters = (
            next((n for n in range(count - SETTLED_AFTER, 0, -1) if begins(whole[starts[n] : starts[n] + 2])), 0)
            for begins in (_begins_word, _begins_character)
        )
        if end := words or (characters if count >= UNSPACED else 0):
            self._rest = self._rest[starts[end] - spaced :]
            self.settled += end
            self._within = True


def _begins_word(text: bytes) -> bool:
    return text[:1] == b" " and text[1:].isalnum()


def _begins_character(text: bytes) -> bool:
    return bool(text) and text[0] & 0xC0 != 0x80
