"""Small tokenizers of each kind that writes text in its own way: tokenizers.Tokenizer, each with the special tokens <s>
and </s>. Their tokens cut characters, and some begin in one and end in the next."""

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPACE = "\u2581"
WORDS = ("the", "cat", "naïve", "日本", "語", "e\u0301", "\ufffd", "\n", "END", "a", "b")
CHARACTERS = "日本語é\u0301→🙂👍\ufffdß"
LLAMA = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
BYTES = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
LETTERS = {byte: chr(byte) for byte in BYTES}  # GPT-2's characters for bytes
LETTERS |= {byte: chr(256 + n) for n, byte in enumerate(b for b in range(256) if b not in BYTES)}


def _byte_level() -> Tokenizer:
    """Tokens are all bytes, some words, and pairs of a byte and the beginning of a character."""
    raw = [bytes([n]) for n in range(256)]
    raw += [word.encode() for word in WORDS if len(word.encode()) > 1] + [f" {word}".encode() for word in WORDS]
    raw += [b"D" + c.encode()[:1] for c in CHARACTERS if len(c.encode()) > 1]
    raw += [c.encode()[1:] + b"E" for c in CHARACTERS] + ["🙂".encode()[2:] + "👍".encode()[:3]]
    made = Tokenizer(models.BPE({"".join(map(LETTERS.get, x)): n for n, x in enumerate(dict.fromkeys(raw))}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(False, use_regex=False), decoders.ByteLevel()
    return made


def _pieces(decoder: Any) -> Tokenizer:
    """Like sentencepiece's: words with their space, characters, and bytes that are written <0xF0>."""
    known = ["<unk>", *(f"<0x{n:02X}>" for n in range(256)), SPACE, SPACE * 2]
    known += [*WORDS, *(SPACE + word for word in WORDS), *"日é\u0301"]
    made = Tokenizer(models.BPE({x: n for n, x in enumerate(dict.fromkeys(known))}, [], byte_fallback=True))
    made.decoder = decoder
    return made


def _words(decoder: Any, spelled: str) -> Tokenizer:
    known = ["<unk>", *WORDS, *(spelled.format(word) for word in WORDS), ".", "n't"]
    made = Tokenizer(models.WordPiece({x: n for n, x in enumerate(dict.fromkeys(known))}, unk_token="<unk>"))
    made.decoder = decoder
    return made


def tokenizer(kind: str) -> Tokenizer:
    """One of KINDS."""
    made = KINDS[kind]()
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in (SPACE * 3, "<tool>", "    ")])
    made.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    return made


KINDS = {
    "bytes": _byte_level,
    "llama": lambda: _pieces(decoders.Sequence(LLAMA)),
    "gemma": lambda: _pieces(decoders.Sequence(LLAMA[:3])),
    "metaspace": lambda: _pieces(decoders.Sequence([decoders.Metaspace(), *LLAMA[1:3]])),
    "metaspace, after the bytes": lambda: _pieces(decoders.Sequence([LLAMA[1], decoders.Metaspace()])),
    "metaspace without bytes": lambda: _words(decoders.Metaspace(), SPACE + "{}"),
    "wordpiece": lambda: _words(decoders.WordPiece(cleanup=True), "##{}"),
    "suffixes": lambda: _words(decoders.BPEDecoder("</w>"), "{}</w>"),
    "no decoder": lambda: _words(None, "##{}"),
}
