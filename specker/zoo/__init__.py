"""The bundled files: a small code model with its drafts and held-out prompts, a hybrid that learnt from it, and token
counts of SmolLM2-135M-Instruct and Qwen2.5-Coder-1.5B-Instruct.

The files are a distribution of their own, specker-models. Everything that needs none of them works without it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specker.model.config import no_source


def _folder() -> Path:
    """Where the models are: beside the package in a clone, else in the installed specker_models."""
    beside = Path(__file__).parents[2] / "models" / "specker_models"
    if not beside.is_dir() and (spec := find_spec("specker_models")) is not None and spec.origin is not None:
        return Path(spec.origin).parent
    return beside


FOLDER = _folder()
MISSING = "the bundled models are not installed: run `pip install ./models` in a clone of specker's repository"
NAMES = ("code-target", "code-draft", "code-diffusion", "code-draft-deep", "hybrid-target")


def path(name: str) -> Path:
    """The folder of a bundled checkpoint. Raises ValueError for another name, or if the models are not installed."""
    if name not in NAMES:
        raise ValueError(f"expected one of {', '.join(NAMES)}, got {name!r}")
    require()
    return FOLDER / name


def source_of(source: Any) -> Any:
    """What a caller named: the folder of a bundled checkpoint for its name, unless there is a file of that name; any
    other source as it is. Raises ValueError if the models are not installed, and for a bare name that is none."""
    if not isinstance(source, str) or "/" in source or source.endswith(".gguf") or Path(source).expanduser().exists():
        return source
    if source not in NAMES:
        raise ValueError(no_source(f"folder {source}", f"a bundled checkpoint: {', '.join(NAMES)}"))
    return path(source)


def target_of(name: object) -> Family | None:
    """The family of the bundled target with this name; None for other targets."""
    return next((f for f in FAMILIES if f.target is not None and f.target.name == name), None)


def installed() -> bool:
    """Whether specker-models is installed."""
    return FOLDER.is_dir()


def require() -> None:
    """Raise ValueError, with the command to install them, if the models are not installed."""
    if not installed():
        raise ValueError(MISSING)


@dataclass(frozen=True)
class Family:
    """The files made for one target, and the settings that were fastest with it (bench/results)."""

    name: str
    sizes: Mapping[str, int]  # fields of the target's ModelConfig, by which it is recognised
    vocab_scores: Path  # counts of tokens that the target wrote; see strategies/vocabtrim/scores.py
    drafts: Mapping[str, Path] = field(default_factory=dict)  # strategy -> the draft's checkpoint folder
    ngram: Path | None = None  # trigrams of tokens that the target wrote; see strategies/blocks/ngram.py
    target: Path | None = None  # None: not bundled; the user brings it
    strategy: str | None = None  # the default strategy; None: as for any target
    draft_tokens: int | None = None  # the length of that strategy's drafts; None: as policy auto finds


CODE = Family(
    "code",
    {"hidden_size": 256, "num_layers": 12, "num_heads": 4, "intermediate_size": 704, "vocab_size": 8192},
    FOLDER / "vocab_scores.safetensors",
    {"draft": FOLDER / "code-draft", "easyspec": FOLDER / "code-draft-deep", "diffuspec": FOLDER / "code-diffusion"},
    FOLDER / "ngram.safetensors",
    target=FOLDER / "code-target",
)

# Qwen3.5's layers; its MTP head, in the same folder, drafts for it.
HYBRID = Family(
    "hybrid",
    {"hidden_size": 192, "num_layers": 8, "num_heads": 4, "intermediate_size": 320, "vocab_size": 8192},
    FOLDER / "vocab_scores.safetensors",
    target=FOLDER / "hybrid-target",
    strategy="mtp+vocabtrim",
    draft_tokens=3,
)

# The user brings the drafts of these two, such as Qwen2.5-Coder-0.5B-Instruct.
SMOLLM2 = Family(
    "smollm2",
    {"hidden_size": 576, "num_layers": 30, "num_heads": 9, "intermediate_size": 1536, "vocab_size": 49152},
    FOLDER / "smollm2-vocab_scores.safetensors",
)
CODER = Family(
    "qwen2.5-coder",
    {"hidden_size": 1536, "num_layers": 28, "num_heads": 12, "intermediate_size": 8960, "vocab_size": 151936},
    FOLDER / "qwen2.5-coder-vocab_scores.safetensors",
)

FAMILIES = (CODE, HYBRID, SMOLLM2, CODER)

PROMPTS = (
    '''\
def load_json(path):
    """Load a JSON file and return its contents."""''',
    '''\
def is_number(value):
    """Return True if value is a number."""
    try:''',
    '''\
def get_version(name):
    """Return the version of an installed package, or None."""
    try:''',
    '''\
class Node:
    """A node of a linked list."""

    def __init__(self, value, next=None):
        self.value = value
        self.next = next

    def __repr__(self):''',
)
# With these settings the toy model writes about as well as it can; greedily it soon repeats itself.
SAMPLING = {"temperature": 0.7, "top_p": 0.9, "seed": 7}


def family_of(config: Any) -> Family | None:
    """The family for a target with this ModelConfig, by its sizes; None if there is none. Its files may be missing."""
    for family in FAMILIES:
        if all(getattr(config, name) == size for name, size in family.sizes.items()):
            return family
    return None


def require_for(config: Any) -> None:
    """Raise ValueError if there are bundled drafts for a target with this ModelConfig, but they are not installed."""
    if (family := family_of(config)) is not None and family.drafts:
        require()


def heldout() -> list[dict[str, str]]:
    """Function beginnings from modules never trained on, each {"prompt", "source" ("module:line"), "licence"}.
    Raises ValueError if the models are not installed."""
    require()
    text = (FOLDER / "heldout.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]
