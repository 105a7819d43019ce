"""Streaming detokenisation: token ids -> text, never half a character."""

from collections.abc import Mapping
from typing import Any

UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # what tokenizers return for bytes that form no character


def whole(text: str) -> str:
    """Drop an unfinished character at the end of a text, which the limit of tokens has cut."""
    return text.rstrip(UNKNOWN)


class Detokenizer:
    """Text of a growing list of ids. Special tokens are left out; without a tokenizer the text is empty. The text ends
    before the first of the strings `stops` that is complete in it, the longest if several end there; what may be the
    beginning of one is held back.

    Some special tokens divide a text into parts, such as the messages of Harmony and their headers. `parts` has them,
    and whether a stop string may occur behind them; none occurs across them."""

    def __init__(self, tokenizer: Any, stops: tuple[str, ...] = (), parts: Mapping[int, bool] | None = None):
        self.tokenizer, self.stops, self.parts = tokenizer, [Stop(text) for text in stops], parts or {}
        self.searched = True  # stop strings may occur here
        self.stopped = False  # one of `stops` has occurred
        self.held = ""  # text that may be the beginning of a stop string
        self.tail = ""  # what `flush` returned
        self.ids: list[int] = []
        self.start = 0  # ids before this are settled: their text no longer depends on what follows
        self.shown = ""  # text of ids[start:] already returned

    def add(self, token: int) -> str:
        """The text that `token` completes; empty while a character is unfinished. Before a token of `parts` all that is
        held is complete."""
        if token in self.parts:
            return self._divide(token)
        self.ids.append(token)
        text = self._decode()
        if text.endswith(UNKNOWN):
            return ""
        new = text[len(self.shown) :]
        # Keep one settled token as context: many tokenizers render a first token without its leading space.
        self.start = max(self.start, len(self.ids) - 1)
        self.shown = self._decode()
        return self._before_stop(new)

    def flush(self) -> str:
        """The remaining text at the end, without an unfinished character."""
        self.tail = self._rest()
        return self.tail

    def _rest(self) -> str:
        text = whole(self._decode())
        new, self.shown = text[len(self.shown) :], text
        rest, self.held = self._before_stop(new) + self.held, ""
        return rest

    def _divide(self, token: int) -> str:
        rest = self._rest()
        if not self.stopped:
            self.ids.append(token)
            self.start, self.shown, self.searched = len(self.ids) - 1, "", self.parts[token]
            for stop in self.stops:
                stop.begun = 0
        return rest

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, None if none has."""
        ended = [stop.text for stop in self.stops if stop.begun == stop.length]
        return max(ended, key=len, default=None) if self.stopped else None

    def _before_stop(self, new: str) -> str:
        """The part of the held text and `new` that certainly comes before the first stop string."""
        if self.stopped or not self.stops or not self.searched:
            return "" if self.stopped else new
        text = self.held + new
        end = len(text)
        for n, character in enumerate(new, len(self.held) + 1):
            found = max(stop.length if stop.ends(character) else 0 for stop in self.stops)
            if found:
                self.stopped, end = True, n - found
                break
        else:
            end -= max(stop.begun for stop in self.stops)
        self.held = "" if self.stopped else text[end:]
        return text[:end]

    def _decode(self) -> str:
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(self.ids[self.start :], skip_special_tokens=True)


class Stop:
    """Finds a string in a text that grows by single characters, each in constant time on average: Knuth, Morris and
    Pratt, https://doi.org/10.1137/0206024."""

    def __init__(self, text: str):
        self.text, self.length = text, len(text)
        self.begun = 0  # characters of the string that the end of the text has
        self._falls = [0, 0]  # after how many characters -> of how many a proper end is also the string's beginning
        for n in range(1, self.length):
            self._falls.append(self._after(text[n], self._falls[n]))

    def ends(self, character: str) -> bool:
        """Whether the next character completes the string, after which none may follow."""
        self.begun = self._after(character, self.begun)
        return self.begun == self.length

    def _after(self, character: str, begun: int) -> int:
        while begun and self.text[begun] != character:
            begun = self._falls[begun]
        return begun + (self.text[begun] == character)
