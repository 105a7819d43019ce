"""The tensors of a GGUF file as a Hugging Face checkpoint has them. Source: llama.cpp's convert_hf_to_gguf.py."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specker.checkpoints.architectures.architecture import Architecture
from specker.checkpoints.architectures.gguf import FREQUENCIES
from specker.checkpoints.architectures.heads import QWEN
from specker.checkpoints.architectures.names import gguf_block
from specker.checkpoints.gguf.blocks import Value, rows
from specker.model.config import CheckpointError

OUTER = {"token_embd": "model.embed_tokens", "output": "lm_head"}  # names in GGUF -> in the checkpoint
MTP = {own.gguf: f"mtp.{own.name}" for own in QWEN}  # after "blk.#."


def name_of(its: Architecture, layers: int, name: str, path: Path) -> str | None:
    """The name in a Hugging Face checkpoint of `layers` layers of the tensor `name`; None if it is not used. Raises
    CheckpointError."""
    stem, _, kind = name.rpartition(".")
    own_config = its.gguf is not None and bool(its.gguf.files)
    if stem == FREQUENCIES and not own_config:
        return None
    outer = OUTER | {its.final.gguf: f"model.{its.final.name}"}
    if stem in outer:
        return f"{outer[stem]}.{kind}"
    if (block := gguf_block(its.names, name)) is not None:
        n, own = block
        return f"mtp.layers.{n - layers}.{own}" if own_config and n >= layers else f"model.layers.{n}.{own}"
    start = f"blk.{layers}."  # an MTP head, or several that share these
    if own_config and name.startswith(start) and (found := MTP.get(name.removeprefix(start))) is not None:
        return found
    raise CheckpointError(f"{path} has the tensor {name}, which no supported architecture uses")


def undone(its: Architecture, config: Any, name: str, x: Value) -> Iterator[tuple[str, Value]]:
    """What the checkpoint has instead of x, which llama.cpp's converter made of the tensor `name`: names and values.
    `config`: transformers'."""
    part = name.split(".")[-2]
    head_counts = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    if part in head_counts and its.gguf is not None and its.gguf.permuted:
        count = len(x) if isinstance(x, Tensor) else len(x.codes)
        each = torch.arange(count, dtype=torch.int64, device="cpu").view(head_counts[part], -1, 2)
        x = rows(x, each.transpose(1, 2).flatten())
    if its.norm_offset and part.endswith("norm") and isinstance(x, Tensor):
        x = x - its.norm_offset
    yield name, x
