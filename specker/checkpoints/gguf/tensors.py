"""The tensors of a GGUF file as a Hugging Face checkpoint has them. Source: llama.cpp's convert_hf_to_gguf.py."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specker.checkpoints.architectures.architecture import Architecture
from specker.checkpoints.architectures.gguf import FREQUENCIES
from specker.checkpoints.architectures.names import from_gguf
from specker.checkpoints.gguf.blocks import Value, rows
from specker.model.config import CheckpointError

# Names in GGUF -> in the checkpoint, outside of the layers and of an MTP head.
OUTER = {"token_embd": "model.embed_tokens", "output": "lm_head"}
MTP = {
    "nextn.eh_proj": "fc",
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
}
BLOCK = re.compile(r"blk\.(\d+)\.(.+)")


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
    if (block := BLOCK.fullmatch(name)) is not None:
        n, own, names = int(block[1]), block[2], from_gguf(its.names)
        head = own_config and n >= layers
        layer = f"mtp.layers.{n - layers}" if head else f"model.layers.{n}"
        if own in names and names[own].whole:
            return f"{layer}.{names[own].name}"
        stem = own.rpartition(".")[0]
        if stem in names and not names[stem].whole:
            return f"{layer}.{names[stem].name}.{kind}"
        if stem in MTP and head and n == layers:  # the heads share them
            return f"mtp.{MTP[stem]}.{kind}"
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
