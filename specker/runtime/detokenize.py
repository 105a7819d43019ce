"""Streaming detokenisation: token ids -> text, never half a character."""

from typing import Any

UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # what tokenizers make of bytes that are no character


def whole(text: str) -> str:
    """A text without the beginning of a character at its end, where the limit of tokens cut it."""
    return text.rstrip(UNKNOWN)


class Detokenizer:
    """Text of a growing list of ids. Special tokens are left out; without a tokenizer the text is empty."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.start = 0  # ids before this are settled: their text no longer depends on what follows
        self.shown = ""  # text of ids[start:] already returned

    def add(self, token: int) -> str:
        """The text that `token` completes; empty while a character is unfinished."""
        self.ids.append(token)
        text = self._decode()
        if text.endswith(UNKNOWN):
            return ""
        new = text[len(self.shown) :]
        # Keep one settled token as context: many tokenizers render a first token without its leading space.
        self.start = max(self.start, len(self.ids) - 1)
        self.shown = self._decode()
        return new

    def flush(self) -> str:
        """The remaining text at the end, without an unfinished character."""
        text = whole(self._decode())
        new, self.shown = text[len(self.shown) :], text
        return new

    def _decode(self) -> str:
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(self.ids[self.start :], skip_special_tokens=True)
