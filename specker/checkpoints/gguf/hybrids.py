"""Models in a GGUF file whose config is made from the file's keys: those with recurrent layers, Qwen3.5, Qwen3-Next,
LFM2 and LFM2-MoE, and gpt-oss.

transformers reads the configs of some of them, and only in its newest versions.
What llama.cpp's converter changes in the tensors of Qwen's gated delta nets:

* `ssm_a` is -exp(A_log); the norms' weights contain the 1 that they lack in a checkpoint, except `ssm_norm`'s; a
  convolution's weight has two dimensions, as it also has in LFM2.
* Qwen3.5's value heads are tiled: the first one of each key head, then the second ones, and so on. A checkpoint has
  them by key head. Where blocks are wider than a head, the out-projection cannot follow without rounding: its columns
  stay, and config.json says so (`DeltaNet.tiled`).
* Qwen3-Next's matrix of q, k, v and z is two, as in Qwen3.5, each in its own format. Both compute the same, so that the
  checkpoint is one of Qwen3.5's mixtures.
* The MTP head is a block after the last layer.

Sources: llama.cpp's conversion/qwen.py, conversion/lfm2.py, src/models/qwen35.cpp, qwen3next.cpp, lfm2.cpp and
lfm2moe.cpp.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specker.checkpoints.architectures.architecture import Architecture
from specker.checkpoints.architectures.gguf import Keys
from specker.checkpoints.architectures.gpt_oss import APART
from specker.checkpoints.architectures.qwen3_next import TILED
from specker.checkpoints.gguf.blocks import BLOCKS, Value, moved, rows
from specker.model.config import CheckpointError

TILING = "qwen35", "qwen35moe"  # the value heads are tiled


def _common(keys: Keys, tensors: Sequence[Any], fields: Mapping[str, Any], ropes: Sequence[str]) -> dict[str, Any]:
    """Fields of config.json that all have. `fields`: all keys of the file. `ropes`: `Gguf.ropes`."""
    keys.no("attention.causal", True)
    keys.no("rope.scaling.type", *ropes)
    if "rope.scaling.type" not in keys:  # a factor alone would be linear
        keys.no("rope.scaling.factor", 1.0, 0.0)
    rows_of = {tensor.name: int(tensor.shape[-1]) for tensor in tensors}
    if "token_embd.weight" not in rows_of:
        raise CheckpointError(f"{keys.path} lacks the tensor token_embd.weight; convert it again")
    return {
        "vocab_size": rows_of["token_embd.weight"],
        "tie_word_embeddings": "output.weight" not in rows_of,
        "max_position_embeddings": keys["context_length"],
        "hidden_size": keys["embedding_length"],
        "num_attention_heads": keys["attention.head_count"],
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
    }


def config_of(path: Path, file: Any, arch: str, its: Architecture, keys: Mapping[str, Any]) -> Any:
    """transformers' config of the file of llama.cpp's architecture `arch`, one of `Gguf.files`. `keys`: those of the
    open file without the architecture's prefix. Raises CheckpointError."""
    from transformers import AutoConfig

    assert its.gguf is not None
    own = Keys(keys, path, arch)
    fields = {name: field.contents() for name, field in file.fields.items() if name.endswith("_token_id")}
    common = _common(own, file.tensors, fields, its.gguf.ropes)
    return AutoConfig.for_model(its.model_type, **common, **its.gguf.fields(own))


def reader(
    arch: str, config: Any, tensors: Sequence[Any], dense: bool
) -> tuple[Callable[[str, Value], Iterator[tuple[str, Value]]], dict[str, Any]]:
    """For the tensors of a file: what the checkpoint has instead of a tensor, by its new name (as tensors.undone), and
    further fields of config.json. `dense`: no matrix keeps its blocks."""
    if arch in ("lfm2", "lfm2moe"):
        return _of_convolutions, {}
    if arch == "gpt-oss":
        return _as_it_is, {APART: True}
    nets = _DeltaNets(config, arch in TILING)
    wide = {t.tensor_type.name for t in tensors if t.name.endswith(".ssm_out.weight")} & BLOCKS.keys()
    stays = nets.moves and not dense and any(config.linear_value_head_dim % BLOCKS[kind].weights for kind in wide)
    return partial(nets.undone, stays), {TILED: True} if stays else {}


def _as_it_is(name: str, x: Value) -> Iterator[tuple[str, Value]]:
    yield name, x


def _of_convolutions(name: str, x: Value) -> Iterator[tuple[str, Value]]:
    yield name, x.unsqueeze(1) if name.endswith("conv.conv.weight") and isinstance(x, Tensor) else x


class _DeltaNets:
    """The orders in which a file has the heads of gated delta nets."""

    def __init__(self, config: Any, tiled: bool):
        Hk, Hv, Dk = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_key_head_dim
        group, Dv, each_key = Hv // Hk, config.linear_value_head_dim, torch.arange(Hk, dtype=torch.int64, device="cpu")
        heads = torch.arange(Hv, dtype=torch.int64, device="cpu")
        self.heads = heads.view(group, Hk).T.flatten() if tiled else heads
        self.moves = tiled and Hk < Hv
        keys, values = torch.arange(2 * Hk * Dk, dtype=torch.int64, device="cpu"), _rows_of(self.heads, Dv)
        every, shares = torch.cat((keys, len(keys) + values)), (Dk, Dk, group * Dv, group * Dv)
        starts = each_key * sum(shares)
        q, k, v, z = (_from(starts + sum(shares[:n]), count) for n, count in enumerate(shares))
        self.parts = {  # of linear_attn: the tensor in the file -> each tensor in the checkpoint, and its rows
            "A_log": {"A_log": self.heads},
            "dt_bias": {"dt_bias": self.heads},
            "in_proj_a.weight": {"in_proj_a.weight": self.heads},
            "in_proj_b.weight": {"in_proj_b.weight": self.heads},
            "in_proj_z.weight": {"in_proj_z.weight": values},
            "in_proj_qkv.weight": {"in_proj_qkv.weight": every},
            "conv1d.weight": {"conv1d.weight": every},
            "in_proj_ba.weight": {
                "in_proj_b.weight": _rows_of(2 * each_key, group),
                "in_proj_a.weight": _rows_of(2 * each_key + 1, group),
            },
            "in_proj_qkvz.weight": {"in_proj_qkv.weight": torch.cat((q, k, v)), "in_proj_z.weight": z},
        }

    def undone(self, stays: bool, name: str, x: Value) -> Iterator[tuple[str, Value]]:
        """`stays`: the order of the out-projections' columns."""
        layer, _, own = name.rpartition("linear_attn.")
        if not layer:
            if isinstance(x, Tensor) and "norm" in name:
                x = x - 1
            elif isinstance(x, Tensor) and name.endswith("shared_expert_gate.weight"):
                x = x.view(1, -1)
            yield name, x
        elif own in self.parts:
            if own == "A_log":
                x = _log(name, x)
            for part, order in self.parts[own].items():
                found = rows(x, order)
                if own == "conv1d.weight" and isinstance(found, Tensor):
                    found = found.unsqueeze(1)
                yield f"{layer}linear_attn.{part}", found
        else:
            yield name, moved(x, self.heads) if own == "out_proj.weight" and self.moves and not stays else x


def _from(starts: Tensor, count: int) -> Tensor:
    """So many rows from each start on."""
    return (starts[:, None] + torch.arange(count, dtype=torch.int64, device="cpu")).flatten()


def _rows_of(heads: Tensor, size: int) -> Tensor:
    """The rows of heads of `size` rows each."""
    return _from(heads * size, size)


def _log(name: str, x: Value) -> Tensor:
    """A_log, of -exp(A_log)."""
    if not isinstance(x, Tensor) or not bool((x < 0).all()):
        raise CheckpointError(
            f"the numbers that {name} is made of, -exp(A_log), must be negative; convert the file again"
        )
    return torch.log(-x)
