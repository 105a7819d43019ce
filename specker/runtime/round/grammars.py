"""Grammars of llguidance, and the place of each text in its own (`Guide`).

Where the grammar leaves only one text, llguidance's mask allows only the tokens into which the tokenizer divides that
text (its fast-forward tokens), in plain decoding too. Such *forced* tokens are certain (constrain.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from specker.grammar import library

if TYPE_CHECKING:
    from specker.checkpoints.checkpoint import Checkpoint

log = logging.getLogger(__name__)

KEPT = 64  # compiled grammars that an engine keeps


class Grammars:
    """An engine's compiled grammars, for the tokenizer of its target, which must be a fast one."""

    def __init__(self, target: Checkpoint):
        self.target = target
        self._compiled = lru_cache(KEPT)(self._compile)

    def guide(self, grammar: str, stop_ids: Iterable[int] = ()) -> Guide:
        """A guide at the beginning of a text. `stop_ids`: the request's own; special tokens among them may end the text
        where the grammar does. Raises ValueError with one sentence if the grammar is wrong or llguidance is
        missing."""
        special = (token for token in stop_ids if self._tokenizer.is_special_token(token))
        ends = frozenset((*self.target.config.eos_ids, *special))
        return Guide(self._compiled(grammar), ends, self.target.config.vocab_size)

    @cached_property
    def _tokenizer(self) -> Any:
        library()
        from llguidance.hf import from_tokenizer

        tokenizer = self.target.tokenizer
        count = max(len(tokenizer), self.target.config.vocab_size)
        return from_tokenizer(tokenizer, n_vocab=count, eos_token=[*self.target.config.eos_ids] or None)

    def _compile(self, grammar: str) -> Any:
        matcher = library().LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(f"the grammar is invalid: {_sentence(matcher.get_error())}")
        return matcher


def _sentence(message: str) -> str:
    """llguidance shows the place in the grammar below its first line, and a regular expression's error below that."""
    first, *others = message.splitlines()
    reason = [line.removeprefix("error: ") for line in others if line.startswith("error: ")]
    return " ".join((first, *reason)).rstrip(".: ")


class Guide:
    """The place of one text in its grammar. Between two rounds that is the end of the committed text."""

    def __init__(self, fresh: Any, ends: frozenset[int], vocab: int):
        """`fresh`: a matcher at the beginning of a text. `ends`: tokens that end the text where the grammar does.
        `vocab`: the target's vocabulary."""
        self._fresh, self._matcher, self._ends = fresh, fresh.deep_copy(), ends
        self.words = -(-vocab // 32)
        self._text: list[int] = []  # up to this place
        self.ended: str | None = None
        """Why the text ends: "stop" at the end of its grammar, "grammar" before a token that the grammar refuses, which
        was drawn because no token could follow. None: it goes on."""

    @property
    def forced(self) -> bool:
        """Whether the grammar leaves one next token."""
        return bool(self._matcher.compute_ff_tokens())

    def follow(self, tokens: Sequence[int]) -> int:
        """Go on along committed tokens. Returns how many of them belong to the text."""
        for n, token in enumerate(tokens):
            if token not in self._ends and not self._take(token):
                self.ended = "grammar"
                return n
            if token in self._ends or self._matcher.is_stopped():
                self.ended = "stop"
                return n + 1
        return len(tokens)

    def constrain(self, tokens: Sequence[int], most: int, forces: bool) -> tuple[list[int], int]:
        """A chain of up to `most` tokens that the grammar allows, and how many of them are the first of `tokens`, the
        drafter's. `forces`: forced tokens replace the drafter's and follow them."""
        constrained: list[int] = []
        kept = 0
        while len(constrained) < most and not self._matcher.is_stopped():
            own = tokens[kept] if kept == len(constrained) < len(tokens) else None
            only = self._matcher.compute_ff_tokens()[:1]
            token = only[0] if only and (forces or own == only[0]) else None if only else own
            if token is None or not self._take(token):
                break
            constrained.append(token)
            kept += token == own
        self._back(len(constrained))
        return constrained, kept

    def walk(self, tokens: Sequence[int], parents: Sequence[int], allowed: np.ndarray) -> None:
        """Set the bits of the tokens that may follow the root and each draft token that the grammar allows, [N + 1, W]
        int32. The target cannot reach the other rows, which stay as they are."""
        children: list[list[int]] = [[] for _ in allowed]
        for j, parent in enumerate(parents):
            children[parent].append(j)

        def visit(row: int) -> None:
            if (bits := self._bits()) is not None:
                allowed[row] = bits
            for j in children[row]:
                token = tokens[j]
                if allowed[row, token >> 5] >> (token & 31) & 1 and self._take(token):
                    if not self._matcher.is_stopped():
                        visit(j + 1)
                    self._back(1)

        visit(0)

    def _bits(self) -> np.ndarray | None:
        """The bits of the tokens that may come next, [W] int32; None if there are none, or if they cannot be found."""
        bits: Any = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: self.words]
        if self._matcher.is_error():
            log.warning("a grammar cannot be followed: %s", _sentence(self._matcher.get_error()))
            self._matcher = self._fresh.deep_copy()  # an error never goes away
            self._matcher.consume_tokens(self._text)
            return None
        bits = _with(bits, self._ends) if self._matcher.is_accepting() else bits
        return bits if bits.any() else None

    def _take(self, token: int) -> bool:
        if self._matcher.try_consume_tokens([token]) != 1:
            return False
        self._text.append(token)
        return True

    def _back(self, count: int) -> None:
        if count:
            self._matcher.rollback(count)
            del self._text[-count:]


def _with(bits: np.ndarray, tokens: Iterable[int]) -> np.ndarray:
    """A copy of the bits [W] int32, in which those of `tokens` are set."""
    words: Any = bits.view(np.uint32).copy()
    for token in tokens:
        words[token >> 5] |= np.uint32(1 << (token & 31))
    return words.view(np.int32)
