"""What a family's file says about llama.cpp's GGUF files, and their keys.

The sources are llama.cpp's convert_hf_to_gguf.py, and src/models for values that no key of a file states.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specker.checkpoints.gguf_blocks import Value
from specker.model.config import CheckpointError

FREQUENCIES = "rope_freqs"  # [D / 2], divisors of RoPE's frequencies, which config.json defines


class Keys(dict[str, Any]):
    """Keys of a file, without the architecture's prefix: its own, and `vocab_size`, `mask_token_id` and FREQUENCIES, if
    the file says them elsewhere."""

    def __init__(self, keys: Mapping[str, Any], path: Path, arch: str, shapes: Mapping[str, tuple[int, ...]]):
        """`shapes`: of the tensors, by name."""
        super().__init__(keys)
        self.path, self.start, self.shapes = path, f"{arch}.", shapes

    def __missing__(self, name: str) -> Any:
        raise CheckpointError(f"{self.path} lacks the key {self.start}{name}; convert it again")

    def no(self, name: str, *usual: Any) -> None:
        """Raise CheckpointError if the key has another value than `usual`."""
        if (value := self.get(name, usual[0])) not in usual:
            raise CheckpointError(f"{self.path} has {self.start}{name} {value}, which is not supported")


class File(NamedTuple):
    """A GGUF file while it is converted."""

    arch: str  # llama.cpp's architecture
    config: Any  # transformers' config
    tensors: Sequence[Any]
    dense: bool  # no matrix keeps its blocks


Undo = Callable[[str, Value], Mapping[str, Value]]
"""What a checkpoint has instead of a tensor of a file, by names in the checkpoint. Raises CheckpointError."""


def as_it_is(file: File) -> tuple[Undo, dict[str, Any]]:
    return lambda name, x: {name: x}, {}


class Gguf(NamedTuple):
    """How an architecture's files differ from a Hugging Face folder. transformers makes the config from a file's keys,
    and `mend` corrects what it leaves out; or `fields` makes it."""

    undone: Callable[[File], tuple[Undo, dict[str, Any]]] = as_it_is
    """What undoes the converter's changes of tensors, and fields of config.json that say what stays changed."""
    ends: tuple[str, ...] = ()  # tokens that end an answer, which a file does not name
    mend: Callable[[dict[str, Any], Mapping[str, Any]], dict[str, Any]] = lambda config, keys: {}
    """(transformers' config, the file's keys without the architecture's prefix) -> fields of config.json to change.
    The divisors FREQUENCIES are among the keys. Raises CheckpointError."""
    files: tuple[str, ...] = ()  # llama.cpp's architectures with which `fields` makes the config
    fields: Callable[[Keys], dict[str, Any]] = lambda keys: {}  # of config.json
    ropes: tuple[str, ...] = ("none",)  # kinds of RoPE's scaling in `files`
    unread: tuple[str, ...] = ()  # tensors of `files` that only `fields` reads


NEUTRAL = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}
SCALING = {"type", "factor", "original_context_length", "finetuned", "yarn_beta_fast", "yarn_beta_slow"}


def scaled(keys: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE's scaling as config.json has it. As llama.cpp reads a file, a factor without a type is linear, and YaRN has
    the numbers of its paper unless the file has others. Raises CheckpointError for other scaling."""
    start = "rope.scaling."
    own = {name.removeprefix(start): value for name, value in keys.items() if name.startswith(start)}
    kind, factor = own.get("type", "linear"), own.get("factor", keys.get("rope.scale_linear")) or 1.0
    if kind == "none" or (kind == "linear" and factor == 1):
        return {"rope_type": "default"}
    for name in own.keys() - SCALING:
        if own[name] != NEUTRAL.get(name):
            raise CheckpointError(f"{start}{name} {own[name]} is not supported")
    found = {"rope_type": kind, "factor": factor}
    if kind == "linear":
        return found
    if kind != "yarn":
        raise CheckpointError(f"{start}type {kind} is not supported; RoPE may be scaled linearly or by YaRN")
    original = own.get("original_context_length", keys.get("context_length"))
    betas = {"beta_fast": own.get("yarn_beta_fast", 32.0), "beta_slow": own.get("yarn_beta_slow", 1.0)}
    return found | betas | {"original_max_position_embeddings": original}


def with_scaling(config: dict[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """transformers leaves out how RoPE is scaled."""
    return {"rope_parameters": config["rope_parameters"] | scaled(keys)}


def check_experts(keys: Mapping[str, Any]) -> None:
    """Raise CheckpointError for routers that the decoder does not compute."""
    usual = {"expert_gating_func": (0, 1), "expert_shared_count": (0,), "expert_group_count": (0, 1)}
    for name, values in usual.items():
        if (value := keys.get(name, values[0])) not in values:
            raise CheckpointError(f"{name} {value} is not supported; a router must be a softmax over all experts")
