"""Streaming detokenisation: token ids -> text, never half a character. All text that a model writes comes from here."""

import codecs
from collections.abc import Iterable, Mapping, Sequence

from specker.answers.scanner import Scanner
from specker.checkpoints.tokenizer import Tokens

UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # stands for bytes that form no character
_LONE = dict.fromkeys(range(0xDC80, 0xDD00), UNKNOWN)  # what `surrogateescape` makes of such bytes
_UNFINISHED = 3  # bytes that the beginning of a character has at most


class Detokenizer:
    """Text of a growing list of ids. Special tokens are left out; without a tokenizer the text is empty. The text ends
    before the first of the strings `stops` that is complete in it, the longest if several end there; what may be the
    beginning of one is held back.

    The text goes on from that of `prompt`: together they are the text of all their ids. So it may begin with a space,
    which tokenizers like sentencepiece's leave out where a text begins, and with a character whose first bytes are the
    prompt's last ones.

    Some special tokens divide a text into parts, such as the messages of Harmony and their headers. `parts` has them,
    and whether a stop string may occur behind them; none occurs across them.

    Attributes:
        before: the last id with a text, of the prompt at first; None if there is none.
        written: characters that were whole so far, of stop strings, too.
    """

    def __init__(
        self,
        tokens: Tokens | None,
        prompt: Sequence[int] = (),
        stops: tuple[str, ...] = (),
        parts: Mapping[int, bool] | None = None,
        least: int = 0,
    ):
        """`tokens`: None without a tokenizer. `least`: a stop string that ends within the first so many tokens is text
        like any other."""
        self.tokens, self.parts = tokens, parts or {}
        self._stops = Scanner(stops)
        self._least = least  # tokens to come before the text may end
        self._searched = True  # stop strings may occur here
        self.tail = ""  # what `flush` returned
        self.before: int | None = None
        self.written = 0
        # For the beginning of a character that breaks off, byte-level decoders write one UNKNOWN, others one a byte.
        by_byte = tokens is not None and tokens.spelling.table is None
        self._utf8 = codecs.getincrementaldecoder("utf-8")("surrogateescape" if by_byte else "replace")
        if tokens is not None:
            self._follow(tokens, prompt)

    def add(self, token: int) -> str:
        """The text that `token` completes; empty while a character is unfinished. Before a token of `parts` all that is
        held is complete."""
        early, self._least = self._least > 0, self._least - 1
        if token in self.parts:
            return self._divide(token)
        text = self._read(token)
        if not self._searched:
            return text
        text = self._stops.add(text)
        return text + self._stops.flush() if early and self.stopped else text

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return bool(self._stops.found)

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, None if none has."""
        return self._stops.found or None

    def flush(self) -> str:
        """The remaining text at the end, without an unfinished character."""
        self.tail = "" if self.stopped else self._stops.flush()
        return self.tail

    def all(self, ids: Iterable[int]) -> str:
        """The text of the last ids that are added."""
        return "".join(map(self.add, ids)) + self.flush()

    @property
    def unfinished(self) -> int:
        """Bytes of the unfinished character at the end."""
        return len(self._utf8.getstate()[0])

    def _follow(self, tokens: Tokens, prompt: Sequence[int]) -> None:
        end = b""
        for token in reversed(prompt):
            if token in self.parts or len(end) >= _UNFINISHED:
                break
            if (found := tokens.bytes_of(token, token)) is not None:
                self.before = token if self.before is None else self.before
                end = found + end
        self._utf8.decode(end)

    def _read(self, token: int) -> str:
        found = None if self.tokens is None else self.tokens.bytes_of(token, self.before)
        if found is None:
            return ""
        self.before = token
        text = self._utf8.decode(found)
        self.written += len(text)
        return text if text.isascii() else text.translate(_LONE)

    def _divide(self, token: int) -> str:
        if self.stopped:
            return ""
        self._utf8.reset()
        self._searched = self.parts[token]
        return self._stops.flush()


def prompt_text(tokens: Tokens, prompt: Sequence[int]) -> str:
    """The text of a prompt, without special tokens and an unfinished character at its end."""
    end, left = len(prompt), Detokenizer(tokens, prompt).unfinished
    while left and tokens.spelling.table is None:  # each of these bytes is a token
        end -= 1
        left -= tokens.bytes_of(prompt[end], prompt[end]) is not None
    text: str = tokens.tokenizer.decode(prompt[:end], skip_special_tokens=True)
    return text.removesuffix(UNKNOWN) if left else text
