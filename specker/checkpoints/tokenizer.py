"""The tokenizer of a checkpoint's folder, read when it is first used."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from specker.checkpoints.gguf.cache import DONE
from specker.checkpoints.gguf.convert import WHOLE
from specker.checkpoints.parse import read_json, reason
from specker.model.config import CheckpointError

NAMES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
# Further files that may define tokens or ids.
MORE = ("merges.txt", "added_tokens.json", "special_tokens_map.json")


@dataclass(frozen=True, eq=False)
class Tokens:
    folder: Path
    architecture: str

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer with its chat template. Raises CheckpointError if there is none."""
        folder = self.folder
        if not self.exist:
            raise CheckpointError(f"{folder} has no tokenizer ({', '.join(NAMES)}); copy it there or pass token ids")
        try:
            found = self._read()
            found.encode("a")  # some wrong settings matter only here
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


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
