"""The tokenizer of a GGUF file with a BPE, for models whose files transformers does not read everywhere: byte-level, or
Gemma 4's, in which a space is a letter and a byte that no token spells is one of its own.

Source: llama.cpp's src/llama-vocab.cpp.
"""

from pathlib import Path
from typing import Any, NamedTuple

from specker.model.config import CheckpointError

CONTROL, USER_DEFINED = 3, 4  # types of tokens that text is first searched for
GEMMA4, SPACE = "gemma4", "\N{LOWER ONE EIGHTH BLOCK}"
ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"


class Kind(NamedTuple):
    """What a file's `tokenizer.ggml.pre` says."""

    words: str = ""  # a regular expression: the pieces of text within which pairs are merged
    normalised: bool = False  # text is brought to Unicode's form NFC
    whole: bool = False  # a piece that is a token needs no merges
    begins: bool = False  # a text begins with the token `bos`, unless the file says otherwise


def _words(letters: str = r"\p{L}", digits: str = r"\p{N}", marks: str = "") -> str:
    """`marks`: a class of further characters that are not punctuation."""
    return (
        rf"{ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )


UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BEFORE = r"[^\r\n\p{L}\p{N}]?"  # of a word
GPT_4O = (  # a word has small letters after large ones, and ends with its contraction
    rf"{BEFORE}{UPPER}*{LOWER}+{ENGLISH}?|{BEFORE}{UPPER}+{LOWER}*{ENGLISH}?|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA = Kind(_words(digits=r"\p{N}{1,3}"), whole=True, begins=True)
KINDS = {
    "qwen2": Kind(_words(), normalised=True),
    "qwen35": Kind(_words(r"[\p{L}\p{M}]", marks=r"\p{M}"), normalised=True),
    "llama-bpe": LLAMA,
    "lfm2": LLAMA,
    "gpt-4o": Kind(GPT_4O, whole=True),
}


def tokenizer_of(path: Path, file: Any) -> Any:
    """The tokenizer of an open file, as transformers' PreTrainedTokenizerFast. Raises CheckpointError."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    def key(name: str, default: Any = None) -> Any:
        field = file.fields.get(f"tokenizer.{name}")
        return default if field is None else field.contents()

    model, name = key("ggml.model"), key("ggml.pre")
    if model != GEMMA4 and (model != "gpt2" or name not in KINDS):
        raise CheckpointError(
            f"{path} has the tokenizer {model!r} with the pre-tokenizer {name!r}, which is not supported for this "
            f"architecture; supported: 'gpt2' with {', '.join(KINDS)}, and {GEMMA4!r}"
        )
    kind, tokens = Kind(begins=True) if model == GEMMA4 else KINDS[name], key("ggml.tokens", [])
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in key("ggml.merges", [])]
    if model == GEMMA4:
        unknown = tokens[key("ggml.unknown_token_id", vocab.get("<unk>", 0))]
        core = Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
        core.normalizer = normalizers.Replace(" ", SPACE)
        steps = decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()
        core.decoder = decoders.Sequence([*steps])
    else:
        core = Tokenizer(models.BPE(vocab, merges, ignore_merges=kind.whole))
        core.normalizer = normalizers.NFC() if kind.normalised else None
        pieces = pre_tokenizers.Split(Regex(kind.words), "isolated")
        core.pre_tokenizer = pre_tokenizers.Sequence([pieces, pre_tokenizers.ByteLevel(False, use_regex=False)])
        core.decoder = decoders.ByteLevel()
    core.add_tokens(
        [
            AddedToken(token, normalized=False, special=type_ == CONTROL)
            for token, type_ in zip(tokens, key("ggml.token_type", []), strict=False)
            if type_ in (CONTROL, USER_DEFINED)
        ]
    )
    named = {
        f"{end}_token": tokens[i]
        for end, own in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
        if (i := key(f"ggml.{own}_token_id")) is not None and i < len(tokens)
    }
    if key("ggml.add_bos_token", kind.begins) and "bos_token" in named:
        bos = named["bos_token"]
        core.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=core, **named)
    fast.chat_template = key("chat_template")
    return fast
