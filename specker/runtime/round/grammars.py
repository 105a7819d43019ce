"""Grammars of llguidance, and the place of each text in its own (`Guide`).

Where the grammar leaves only one text, llguidance's mask allows only the tokens into which the tokenizer divides that
text (its fast-forward tokens), in plain decoding too. Such *forced* tokens are certain (constrain.py).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from specker.grammar import library

if TYPE_CHECKING:
    from specker.checkpoints.checkpoint import Checkpoint

log = logging.getLogger(__name__)

KEPT = 16  # compiled grammars that an engine keeps
LIMITS = {"max_lexer_states": 50_000}  # of llguidance's LLParserLimits; 1-2 KiB each, for all texts of a grammar
LOOP = "NoExtensionBias"  # llguidance's error for a JSON schema whose references lead nowhere
AHEAD = 20  # tokens whose time a text may spend before it has them


class Grammars:
    """An engine's compiled grammars, for the tokenizer of its target, which must be a fast one.

    Attributes:
        check: called with each grammar before it is compiled, in the same thread; raises ValueError to refuse it.
        pace: CPU seconds a token that a text may spend in its grammar; a text that needs more ends.
        limits: of llguidance, by the names of LLParserLimits.
    """

    def __init__(self, target: Checkpoint):
        self.target = target
        self.check: Callable[[str], None] = lambda _: None
        self.pace = math.inf
        self.limits: dict[str, int] = LIMITS
        self._kept: dict[str, Compiled] = {}  # the last one was used last
        self._lock = threading.Lock()  # of _kept

    def guide(self, grammar: str, stop_ids: Iterable[int] = ()) -> Guide:
        """A guide at the beginning of a text. `stop_ids`: the request's own; special tokens among them may end the text
        where the grammar does. Raises ValueError with one sentence if the grammar is wrong or llguidance is
        missing."""
        special = (token for token in stop_ids if self._tokenizer.is_special_token(token))
        ends = frozenset((*self.target.config.eos_ids, *special))
        return Guide(self._compiled(grammar), ends, self.target.config.vocab_size, self.pace)

    def knows(self, grammar: str) -> bool:
        """Whether a grammar is compiled already."""
        return grammar in self._kept

    def tokenizer(self) -> dict[str, Any]:
        """The arguments of llguidance's tokenizer, as JSON has them."""
        config = self.target.config
        count = max(len(self.target.tokenizer), config.vocab_size)
        return {"tokenizer": self._backend.to_str(), "n_vocab": count, "eos_token": [*config.eos_ids] or None}

    @cached_property
    def _backend(self) -> Any:
        """The tokenizer without the settings that encoding prompts may change. Copying it takes a second or two."""
        backend = copy(self.target.tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        return backend

    @cached_property
    def _tokenizer(self) -> Any:
        about = self.tokenizer()
        found = library().LLTokenizer(**about)
        added = self._backend.get_added_tokens_decoder()
        special = {token for token in added if found.is_special_token(token)}
        if not (text := {token for token in special if not added[token].special}):
            return found
        # llguidance takes every added token of the form <...> for a special one, which text cannot spell, and yet
        # divides a forced <tool_call> into that token: no token could follow. Tell it which ones are text.
        own = library().TokenizerWrapper(Described(self._backend, found, about, special - text))
        return library().LLTokenizer(own, n_vocab=about["n_vocab"], eos_token=about["eos_token"])

    def _compiled(self, grammar: str) -> Compiled:
        with self._lock:
            if (found := self._kept.pop(grammar, None)) is not None:
                self._kept[grammar] = found
                return found
        self.check(grammar)
        found = Compiled(partial(self._compile, grammar))
        with self._lock:
            self._kept[grammar] = found
            while len(self._kept) > KEPT:
                del self._kept[next(iter(self._kept))]
        return found

    def _compile(self, grammar: str) -> Any:
        limits = library().LLParserLimits(**self.limits)
        matcher = library().LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        matcher.compute_bitmask()  # of the first token: the grammar may be too complex for it
        if matcher.is_error():
            raise ValueError(f"the grammar is invalid: {sentence(matcher.get_error())}")
        return matcher


class Described:
    """A tokenizer as llguidance's TokenizerWrapper reads it."""

    bos_token_id = None

    def __init__(self, backend: Any, read: Any, about: dict[str, Any], special: Iterable[int]):
        """`backend`: the tokenizer. `read`: what llguidance makes of it by itself, which knows the bytes of each token.
        `about`: llguidance's arguments. `special`: the special tokens."""
        self.eos_token_id, self.special_token_ids = (about["eos_token"] or [0])[0], sorted(special)
        known = {*backend.get_vocab().values()}
        self.tokens = [read.decode_bytes([token]) if token in known else b"" for token in range(about["n_vocab"])]
        self._backend = backend

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("a text is encoded, not its bytes")  # by which the wrapper finds out what to pass
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids


class Compiled:
    """A grammar's matcher. Its copies share a lexer. When one text makes the lexer meet a limit, the lexer has failed
    for all of them, so it is then compiled anew."""

    def __init__(self, compile: Callable[[], Any]):
        """Raises as `compile`."""
        self._compile, self._matcher = compile, compile()

    def matcher(self) -> Any:
        """A matcher at the beginning of a text."""
        matcher = self._matcher.deep_copy()
        matcher.compute_bitmask()
        if matcher.is_error():
            self._matcher = self._compile()
            matcher = self._matcher.deep_copy()
        return matcher


def sentence(message: str) -> str:
    """llguidance's error in one line. It shows the place in the grammar below its first line, and a regular
    expression's error below that."""
    first, *others = message.replace(LOOP, "a $ref leads back to itself").splitlines()
    reason = [line.removeprefix("error: ") for line in others if line.startswith("error: ")]
    return " ".join((first, *reason)).rstrip(".: ")


class Guide:
    """The place of one text in its grammar. Between two rounds that is the end of the committed text."""

    def __init__(self, compiled: Compiled, ends: frozenset[int], vocab: int, pace: float):
        """`ends`: tokens that end the text where the grammar does. `vocab`: the target's vocabulary. `pace`: as in
        `Grammars`."""
        self._compiled, self._matcher, self._ends = compiled, compiled.matcher(), ends
        self.words = -(-vocab // 32)
        self._text: list[int] = []  # up to this place
        self._failed: dict[tuple[int, ...], str] = {}  # texts of this round after which llguidance met a limit, and why
        self._pace, self._seconds = pace, 0.0
        self.ended: str | None = None
        """Why the text ends: "stop" at the end of its grammar, "grammar" before a token that the grammar refuses, which
        was drawn because no token could follow, or at a limit. None: it goes on."""
        self.error = ""
        """The limit at which the text ends, in a sentence."""

    @property
    def forced(self) -> bool:
        """Whether the grammar leaves one next token."""
        with self._timed():
            return bool(self._matcher.compute_ff_tokens())

    def follow(self, tokens: Sequence[int]) -> int:
        """Go on along committed tokens. Returns how many of them belong to the text."""
        with self._timed():
            count = self._follow(tokens)
        self._failed.clear()
        if self.ended is None and self._seconds > self._pace * (AHEAD + len(self._text)):
            self.ended, self.error = "grammar", f"the grammar takes more than {self._pace:g} s a token to follow"
        if self.error:
            log.warning("a text ends: %s", self.error)
        return count

    def _follow(self, tokens: Sequence[int]) -> int:
        for n, token in enumerate(tokens):
            if self._failed and (error := self._failed.get(tuple(self._text))):
                self.ended, self.error = "grammar", error
                return n
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
        with self._timed():
            return self._constrain(tokens, most, forces)

    def _constrain(self, tokens: Sequence[int], most: int, forces: bool) -> tuple[list[int], int]:
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

        with self._timed():
            visit(0)

    def _bits(self) -> np.ndarray | None:
        """The bits of the tokens that may come next, [W] int32; None if there are none, or if llguidance meets a
        limit."""
        for _ in range(2):  # the first error may be another text's, whose lexer this one shares
            bits: Any = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: self.words]
            if not self._matcher.is_error():
                bits = _with(bits, self._ends) if self._matcher.is_accepting() else bits
                return bits if bits.any() else None
            error = sentence(self._matcher.get_error())
            self._matcher = self._compiled.matcher()  # an error never goes away
            self._matcher.consume_tokens(self._text)
        self._failed[tuple(self._text)] = f"the grammar cannot be followed: {error}"
        return None

    def _take(self, token: int) -> bool:
        if self._matcher.try_consume_tokens([token]) != 1:
            return False
        self._text.append(token)
        return True

    def _back(self, count: int) -> None:
        if count:
            self._matcher.rollback(count)
            del self._text[-count:]

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.thread_time()
        yield
        self._seconds += time.thread_time() - began


def _with(bits: np.ndarray, tokens: Iterable[int]) -> np.ndarray:
    """A copy of the bits [W] int32, in which those of `tokens` are set."""
    words: Any = bits.view(np.uint32).copy()
    for token in tokens:
        words[token >> 5] |= np.uint32(1 << (token & 31))
    return words.view(np.int32)
