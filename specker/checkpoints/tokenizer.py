"""The tokenizer of a checkpoint's folder, read when it is first used.

tokenizer.json is read by the tokenizers library where transformers, whose import takes seconds, would read it
unchanged: `Tokenizer`. Otherwise transformers reads the folder.
"""

import ctypes
import hashlib
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from specker.checkpoints.gguf.cache import DONE
from specker.checkpoints.gguf.convert import WHOLE
from specker.checkpoints.parse import read_json, reason
from specker.checkpoints.spelling import Spelling
from specker.model.config import CheckpointError

NAMES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
# Further files that may define tokens or ids.
MORE = ("merges.txt", "added_tokens.json", "special_tokens_map.json")
NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))

# What of a tokenizer_config.json may change tokens or texts. With one of these `Tokenizer` is not used.
CHANGES = (
    *("auto_map", "split_special_tokens", "fix_mistral_regex", "model_specific_special_tokens", "init_inputs"),
    *("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", "vocab", "merges"),
)
CHECKED: dict[str, Any] = {
    "model_max_length": (int, float),
    "max_len": (int, float),
    "padding_side": str,
    "truncation_side": str,
}


class Class(NamedTuple):
    """What a tokenizer class of transformers makes of the vocabulary and merges of any tokenizer.json. The parts are as
    tokenizer.json has them."""

    normalizer: Any
    pre_tokenizer: Any
    decoder: Any
    special: dict[str, str]  # special tokens that tokenizer_config.json may leave out
    model: dict[str, Any]  # settings of the BPE


_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPACES = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
_END = "<|endoftext|>"
_PLAIN = {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "unk_token": None}
_PIECES = {"fuse_unk": True, "byte_fallback": True, "ignore_merges": False}
CLASSES = {
    "Qwen2Tokenizer": Class(
        {"type": "NFC"},
        {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": _WORDS}, "behavior": "Isolated", "invert": False},
                _BYTES,
            ],
        },
        {"type": "ByteLevel"},
        {"unk_token": _END, "eos_token": _END, "pad_token": _END},
        _PLAIN,
    ),
    "GPT2Tokenizer": Class(
        None,
        _BYTES | {"use_regex": True},
        {"type": "ByteLevel"},
        {"unk_token": _END, "bos_token": _END, "eos_token": _END},
        _PLAIN,
    ),
    "GemmaTokenizer": Class(
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
        {"type": "Sequence", "decoders": [_SPACES, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        {f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")},
        _PIECES,
    ),
}
# The class that transformers takes for a model type if tokenizer_config.json names none or (True) another one.
OF_MODEL = {
    "qwen2": ("Qwen2Tokenizer", True),
    **dict.fromkeys(("qwen3", "qwen3_moe", "qwen3_next"), ("Qwen2Tokenizer", False)),
    **dict.fromkeys(("gemma2", "gemma3", "gemma3_text"), ("GemmaTokenizer", False)),
    **dict.fromkeys(("granite", "olmo2", "olmo3"), (WHOLE, True)),
    **dict.fromkeys(("llama", "smollm3", "lfm2", "lfm2_moe", "gpt_oss", "qwen3_5_text"), ("", False)),
}


class Tokenizer:
    """A tokenizer.json with its chat template: the part of the interface of transformers' tokenizers that specker uses.

    It has no settings that a call changes, so several threads may use it.

    Args:
        backend: tokenizers.Tokenizer.
        special: the texts of the special tokens, by names such as eos_token; chat templates read them.
        extra: texts of further special tokens.
        template: the chat template, or several by their names; None: none.
    """

    is_fast = True

    def __init__(self, backend: Any, special: dict[str, str], extra: Iterable[str], template: Any):
        self.backend_tokenizer, self.special_tokens_map, self.chat_template = backend, special, template
        self.all_special_tokens = [*dict.fromkeys((*special.values(), *extra))]

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """`encode`, under the name input_ids."""
        return {"input_ids": self.encode(text, add_special_tokens)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. `add_special_tokens`: with those that the tokenizer puts around each text. Raises
        TypeError or UnicodeError for what is no text."""
        # encode itself holds Python's lock, which would stall the server's other threads
        one = self.backend_tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        ids: list[int] = one.ids
        return ids

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        """The text of token ids: a list or tensor [n], or one id."""
        ids = ids.tolist() if hasattr(ids, "tolist") else ids
        text: str = self.backend_tokenizer.decode([ids] if isinstance(ids, int) else ids, skip_special_tokens)
        return text

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def get_vocab(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """The added tokens (tokenizers.AddedToken) by their ids."""
        return dict(sorted(self.backend_tokenizer.get_added_tokens_decoder().items()))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """The id of a token, or those of a list; of unknown ones that of `unk_token`, or None."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        found = self.backend_tokenizer.token_to_id(tokens)
        unknown = self.special_tokens_map.get("unk_token")
        return self.backend_tokenizer.token_to_id(unknown) if found is None and unknown is not None else found

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """The token of an id, or those of a list; of unknown ones None."""
        one = self.backend_tokenizer.id_to_token
        return one(ids) if isinstance(ids, int) else [one(int(i)) for i in ids]

    @property
    def all_special_ids(self) -> list[int]:
        ids: list[int] = self.convert_tokens_to_ids(self.all_special_tokens)
        return ids

    def __getattr__(self, name: str) -> Any:
        """`eos_token`, `eos_token_id` and those of the other special tokens; None without such a token."""
        token = name.removesuffix("_id")
        if token not in NAMED:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        text = self.special_tokens_map.get(token)
        return text if text is None or token == name else self.backend_tokenizer.token_to_id(text)

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        tools: list[Any] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> Any:
        """The text of a conversation, or with `tokenize` its ids as `__call__` returns them. `chat_template`: another
        template, or the name of one. The other arguments and the errors are those of `template.render`."""
        from specker.checkpoints.template import render  # jinja2 takes a while to import

        template = self.chat_template
        if isinstance(template, dict):
            usual = "tool_use" if tools is not None and "tool_use" in template else "default"
            template = template.get(chat_template or usual, chat_template)
        else:
            template = chat_template or template
        if not isinstance(template, str):
            raise ValueError("the tokenizer has no chat template of this name")
        text = render(
            template,
            conversation,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **{**self.special_tokens_map, **variables},
        )
        return self(text, add_special_tokens=False) if tokenize else text


@dataclass(frozen=True, eq=False)
class Tokens:
    folder: Path
    architecture: str

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer with its chat template: `Tokenizer`, or transformers' with the same interface. Raises
        CheckpointError if there is none."""
        folder = self.folder
        if not self.exist:
            raise CheckpointError(f"{folder} has no tokenizer ({', '.join(NAMES)}); copy it there or pass token ids")
        try:
            found = self._direct() or self._read()
            found.encode("a")  # some wrong settings matter only here
            _trim()
            return found
        except Exception as error:  # transformers raises many types
            raise CheckpointError(f"the tokenizer in {folder} cannot be read ({reason(error)})") from error

    def _read(self) -> Any:
        import transformers as hf  # it imports each class only on first use

        if self._whole:
            return hf.PreTrainedTokenizerFast.from_pretrained(self.folder, local_files_only=True)
        if self.architecture != "DreamModel":
            return hf.AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False, local_files_only=True)
        # AutoTokenizer would require Dream's own code, but this is Qwen2's tokenizer with a few more special tokens
        fast = (self.folder / "tokenizer.json").is_file()
        kind = hf.PreTrainedTokenizerFast if fast else hf.Qwen2Tokenizer
        return kind.from_pretrained(self.folder, local_files_only=True)

    def _direct(self) -> Tokenizer | None:
        """The tokenizer, if transformers would neither change tokenizer.json nor refuse the settings; else None."""
        settings = read_json(self.folder / "tokenizer_config.json", required=False)
        kind = WHOLE if self._whole else self._class(settings)
        if kind is None or not (self.folder / "tokenizer.json").is_file() or not _usual(settings):
            return None
        lists = "added_tokens_decoder" in settings
        if not lists and any((self.folder / name).is_file() for name in MORE[1:]):
            return None
        its = None if kind == WHOLE else CLASSES[kind]
        given = {name: token for name, x in settings.items() if name.endswith("_token") and (token := _text(x))}
        absent = {} if its is None else {name: x for name, x in its.special.items() if name not in settings}
        special = {name: token for name in NAMED if (token := (absent | given).get(name))}
        special |= {name: token for name, token in given.items() if name not in NAMED}
        further = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
        if isinstance(further, dict):
            special, further = special | {name: _text(x) or "" for name, x in further.items()}, []
        extra = [_text(token) or "" for token in further]

        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Backend

        backend = Backend.from_file(str(self.folder / "tokenizer.json"))
        added = {str(token.content): token for token in backend.get_added_tokens_decoder().values()}
        if backend.padding is not None or any(
            token not in added or not added[token].special for token in (*special.values(), *extra)
        ):
            return None
        same = {repr(token) for token in added.values()}
        if any(repr(AddedToken(**token)) not in same for token in settings.get("added_tokens_decoder", {}).values()):
            return None
        bpe = type(backend.model).__name__ == "BPE"
        if its is not None and not (bpe and _alike(backend, its, special) and not settings.get("add_prefix_space")):
            return None
        if not bpe and settings.get("clean_up_tokenization_spaces"):
            return None
        backend.no_truncation()
        return Tokenizer(backend, special, extra, self._template(settings))

    def _class(self, settings: dict[str, Any]) -> str | None:
        """The class with which AutoTokenizer would read the folder: WHOLE or one of CLASSES; None for others."""
        if self.architecture == "DreamModel":
            return WHOLE
        config = read_json(self.folder / "config.json", required=False)
        if config.get("model_type") not in OF_MODEL:
            return None
        usual, always = OF_MODEL[config["model_type"]]
        named = settings.get("tokenizer_class") or config.get("tokenizer_class") or usual
        named = usual if always else str(named).removesuffix("Fast")
        if named == "LlamaTokenizer" and b'"ByteLevel"' in (_bytes(self.folder / "tokenizer.json") or b""):
            return WHOLE  # that class is for sentencepiece
        named = WHOLE if named in (WHOLE.removesuffix("Fast"), "TokenizersBackend") else named
        return named if named == WHOLE or named in CLASSES else None

    def _template(self, settings: dict[str, Any]) -> Any:
        """The chat template, or several by their names; None: none. Files take precedence over settings."""
        files = {"default": self.folder / "chat_template.jinja"}
        files |= {path.stem: path for path in sorted((self.folder / "additional_chat_templates").glob("*.jinja"))}
        found: Any = {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()}
        if not found:
            found = settings.get("chat_template")
            if isinstance(found, list):
                found = {each["name"]: each["template"] for each in found}
            return found
        return found["default"] if [*found] == ["default"] else found

    @property
    def _whole(self) -> bool:
        """Whether AutoTokenizer would read tokenizer.json unchanged. AutoTokenizer itself finds out by importing the
        model's config class, which is slow."""
        settings = read_json(self.folder / "tokenizer_config.json", required=False)
        generic = settings.get("tokenizer_class") == WHOLE and "auto_map" not in settings
        llama = self.architecture == "LlamaForCausalLM" and (self.folder / "tokenizer.json").is_file()
        return generic and (llama or (self.folder / DONE).is_file())

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """The tokens with their ids. Raises CheckpointError."""
        found: dict[str, int] = self.tokenizer.get_vocab()
        return found

    @cached_property
    def spelling(self) -> Spelling:
        """What the tokens stand for. Raises CheckpointError."""
        return Spelling.of(self.tokenizer)

    def bytes_of(self, token: int, before: int | None) -> bytes | None:
        """The bytes that an id adds to a text. `before`: the last id there that is no special token; None: the text
        begins, and many tokenizers leave out its first space. None for special tokens and ids without a token. Raises
        CheckpointError."""
        spelled = self.tokenizer.convert_ids_to_tokens(token)
        if spelled is None or self.spelling.is_special(spelled):
            return None
        if self.spelling.known:
            found = self.spelling.read(spelled)
            leads = before is None and self.spelling.table is None and found.startswith(b" ")
            return self.tokenizer.decode([token]).encode() if leads else found
        context = [] if before is None else [before]
        text: str = self.tokenizer.decode([*context, token])
        return text[len(self.tokenizer.decode(context)) :].encode()

    @cached_property
    def special(self) -> dict[str, int]:
        """The special tokens that were added to the vocabulary, with their ids; none without a tokenizer."""
        try:
            added = getattr(self.tokenizer, "added_tokens_decoder", {})
        except CheckpointError:
            return {}
        return {token.content: n for n, token in added.items() if token.special}

    @cached_property
    def digest(self) -> str:
        """A SHA-256 of the tokenizer's files."""
        total = hashlib.sha256()
        for name in (*NAMES, *MORE):
            data = _bytes(self.folder / name)
            total.update(f"{name} {-1 if data is None else len(data)}\n".encode() + (data or b""))
        return total.hexdigest()

    @property
    def exist(self) -> bool:
        """Whether the folder has files of a tokenizer."""
        return any((self.folder / name).is_file() for name in NAMES)

    def equal(self, other: "Tokens") -> bool:
        """Whether both folders have the same tokenizer files, byte for byte. Comparing digests is much cheaper than
        comparing vocabularies, which needs both tokenizers. False does not mean that the tokens differ: the files may
        differ only in a chat template."""
        return self.exist and self.digest == other.digest


def _trim() -> None:
    """Return freed memory to the system. Reading a vocabulary of 150,000 tokens leaves 55 MiB of small free pieces,
    which glibc would keep; returning them takes 5 ms. Other C libraries have no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _usual(settings: dict[str, Any]) -> bool:
    """Whether nothing in tokenizer_config.json needs transformers, which also checks it."""
    known = all(isinstance(settings[name], kind) for name, kind in CHECKED.items() if settings.get(name) is not None)
    tokens = all(x is None or _text(x) for name, x in settings.items() if name in NAMED)
    return known and tokens and not any(settings.get(name) for name in CHANGES)


def _text(token: Any) -> str | None:
    """The text of a special token in tokenizer_config.json; None if it is not one."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _alike(backend: Any, its: Class, special: dict[str, str]) -> bool:
    """Whether the parts of tokenizer.json are those that the class would put in their place."""
    model = {"unk_token": special.get("unk_token")} | its.model
    return (
        _part(backend.normalizer) == its.normalizer
        and _part(backend.pre_tokenizer) == its.pre_tokenizer
        and _part(backend.decoder, decodes=True) == its.decoder
        and all(getattr(backend.model, name) == value for name, value in model.items())
        and not any(
            getattr(backend.model, name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
        )
    )


def _part(part: Any, decodes: bool = False) -> Any:
    """A part as tokenizer.json has it, without what changes no ids and texts."""

    def kept(x: dict[str, Any]) -> dict[str, Any]:
        if x.get("type") == "ByteLevel" and decodes:
            return {"type": "ByteLevel"}
        return {name: value for name, value in x.items() if name != "trim_offsets"}

    return None if part is None else json.loads(part.__getstate__(), object_hook=kept)


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
