"""The bytes that a token stands for, however its vocabulary spells them.

Byte-level BPE writes " the" as "Ġthe", sentencepiece as "▁the", and a byte without a token of its own as "<0x0A>"."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SPACE = "\u2581"  # sentencepiece's


@dataclass(frozen=True)
class Spelling:
    """Attributes:
    added: the added tokens, and whether they are special.
    table: the characters that stand for bytes, of a byte-level vocabulary; None for others.
    known: whether the tokenizer decodes as `read` does; others, such as WordPiece, spell words in another way.
    """

    added: Mapping[str, bool]
    table: Mapping[int, str] | None
    known: bool = True

    @classmethod
    def of(cls, tokenizer: Any) -> "Spelling":
        added = {token.content: token.special for token in getattr(tokenizer, "added_tokens_decoder", {}).values()}
        bytes_in_tokens, known = _decodes(tokenizer)
        return cls(added, _byte_characters() if bytes_in_tokens else None, known)

    def is_special(self, token: str) -> bool:
        return self.added.get(token, False)

    def read(self, token: str) -> bytes:
        """The bytes of a token of the vocabulary; none of a special token."""
        if self.is_special(token):
            return b""
        if self.table is not None:
            if token in self.added:
                return token.encode()
            try:
                return token.translate(self.table).encode("latin-1")
            except UnicodeEncodeError:  # a character that stands for no byte: an added token that is not listed
                return token.encode(errors="ignore")
        return bytes.fromhex(token[3:5]) if self.is_byte(token) else token.replace(SPACE, " ").encode(errors="ignore")

    def is_byte(self, token: str) -> bool:
        """Whether a token is one of sentencepiece's single bytes, which may have another token, too."""
        named = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        return named and self.table is None and token not in self.added


def _byte_characters() -> dict[int, str]:
    """The character with which byte-level BPE (GPT-2) writes each byte -> the character of the byte's number."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {256 + n: chr(byte) for n, byte in enumerate(others)}


def _decodes(tokenizer: Any) -> tuple[bool, bool]:
    """Whether tokens spell bytes as GPT-2's do, and whether they are spelled in one of the two known ways."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    if decoder is None:
        vocabulary = tokenizer.get_vocab()
        return "\u0120" in vocabulary and SPACE not in vocabulary, backend is None
    state: bytes = decoder.__getstate__()
    byte_level = b'"ByteLevel"' in state
    return byte_level, byte_level or (SPACE.encode() in state and b'"ByteFallback"' in state)
