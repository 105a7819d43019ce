"""Models in a GGUF file whose config is made from the file's keys: those with recurrent layers, Qwen3.5, Qwen3-Next,
LFM2 and LFM2-MoE, and gpt-oss (gpt_oss.py).

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

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specker.checkpoints.architectures import APART, FULL, TILED
from specker.checkpoints.gguf import gpt_oss
from specker.checkpoints.gguf.blocks import BLOCKS, Value, moved, rows
from specker.checkpoints.gguf.experts import NAMES as EXPERTS
from specker.checkpoints.gguf.families import NAMES, OUTER
from specker.checkpoints.gguf.keys import Keys
from specker.checkpoints.pieces import RENAMED
from specker.model.config import CheckpointError

# Names in GGUF -> in the checkpoint, of a layer's tensors.
QWEN = {name: own for name, own in NAMES.items() if name != "ffn_norm"} | {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",  # of Qwen3-Next, in files of 2025
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_ba": "linear_attn.in_proj_ba",  # of Qwen3-Next
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
QWEN_EXPERTS = (
    QWEN
    | EXPERTS
    | {
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    }
)
LFM2 = {name: RENAMED["Lfm2ForCausalLM"].get(own, own) for name, own in NAMES.items()} | {
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
}
LFM2_EXPERTS = LFM2 | {name: own.replace("mlp.", "feed_forward.") for name, own in EXPERTS.items()}
# Names that have no `.weight` in the checkpoint.
WHOLE = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
LFM2_WHOLE = {"exp_probs_b.bias": "feed_forward.expert_bias"}  # of the mixture
LFM2_OUTER = {**{n: OUTER[n] for n in ("token_embd", "output")}, "token_embd_norm": "model.embedding_norm"}
MTP = {
    "nextn.eh_proj": "fc",
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
}
SIGMOID = 2  # of llama_expert_gating_func_type
BLOCK = re.compile(r"blk\.(\d+)\.(.+)")


def _common(keys: Keys, tensors: Sequence[Any], fields: Mapping[str, Any], ropes: Sequence[str]) -> dict[str, Any]:
    """Fields of config.json that all have. `fields`: all keys of the file. `ropes`: `Hybrid.ropes`."""
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


def _qwen(keys: Keys) -> dict[str, Any]:
    layers = keys["block_count"] - keys.get("nextn_predict_layers", 0)
    recurrent, interval = keys.get("attention.recurrent_layers"), keys.get("full_attention_interval", 4)
    if not isinstance(recurrent, list):
        recurrent = [(n + 1) % interval != 0 for n in range(layers)]
    width, heads, key_heads = keys["attention.key_length"], keys["ssm.time_step_rank"], keys["ssm.group_count"]
    if not key_heads or not heads or heads % key_heads:
        raise CheckpointError(
            f"{keys.path} has {keys.start}ssm.time_step_rank {heads}, which must be a multiple of its "
            f"{keys.start}ssm.group_count {key_heads}"
        )
    keys.no("attention.value_length", width)
    rope = {"rope_type": "default", "rope_theta": keys["rope.freq_base"]}
    return {
        "num_hidden_layers": layers,
        "layer_types": ["linear_attention" if each else FULL for each in recurrent[:layers]],
        "num_key_value_heads": keys["attention.head_count_kv"],
        "head_dim": width,
        "rms_norm_eps": keys["attention.layer_norm_rms_epsilon"],
        "rope_parameters": rope | {"partial_rotary_factor": keys["rope.dimension_count"] / width},
        "linear_conv_kernel_dim": keys["ssm.conv_kernel"],
        "linear_key_head_dim": keys["ssm.state_size"],
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": heads,
        "linear_value_head_dim": keys["ssm.inner_size"] // heads,
    }


def _dense(keys: Keys) -> dict[str, Any]:
    return _qwen(keys) | {"intermediate_size": keys["feed_forward_length"]}


def _mixture(keys: Keys) -> dict[str, Any]:
    """llama.cpp divides the scores of the chosen experts by their sum, as transformers does."""
    for name in ("expert_gating_func", "expert_group_count"):
        keys.no(name, 0, 1)  # a softmax over all experts
    width = keys["expert_feed_forward_length"]
    return _qwen(keys) | {
        "intermediate_size": keys.get("feed_forward_length", width),
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": keys["expert_shared_feed_forward_length"],
        "num_experts": keys["expert_count"],
        "num_experts_per_tok": keys["expert_used_count"],
    }


def _convolutions(keys: Keys) -> dict[str, Any]:
    """A layer without KV heads is a convolution."""
    keys.no("attention.sliding_window", 0)
    heads, layers = keys["attention.head_count_kv"], keys["block_count"]
    if not isinstance(heads, list) or len(heads) != layers or len(set(heads) - {0}) != 1:
        raise CheckpointError(
            f"{keys.path} must have {keys.start}attention.head_count_kv with one number, or 0, for each of its "
            f"{layers} layers, but has {heads}"
        )
    return {
        "num_hidden_layers": layers,
        "layer_types": [FULL if each else "conv" for each in heads],
        "num_key_value_heads": max(heads),
        "intermediate_size": keys["feed_forward_length"],
        "norm_eps": keys["attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_type": "default", "rope_theta": keys["rope.freq_base"]},
        "conv_L_cache": keys["shortconv.l_cache"],
    }


def _lfm2(keys: Keys) -> dict[str, Any]:
    return _convolutions(keys) | {"block_auto_adjust_ff_dim": False}  # the file has the result


def _lfm2_mixture(keys: Keys) -> dict[str, Any]:
    """llama.cpp divides the scores of the chosen experts by their sum, at least 2^-14, where transformers adds 1e-6 to
    it. A file names no factor, and llama.cpp has none."""
    keys.no("expert_gating_func", SIGMOID)
    keys.no("expert_group_count", 0, 1)
    keys.no("expert_weights_norm", True)
    keys.no("expert_weights_scale", 1.0, 0.0)
    return _convolutions(keys) | {
        "num_dense_layers": keys.get("leading_dense_block_count", 0),
        "moe_intermediate_size": keys["expert_feed_forward_length"],
        "num_experts": keys["expert_count"],
        "num_experts_per_tok": keys["expert_used_count"],
        "use_expert_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


class Hybrid(NamedTuple):
    """An architecture of llama.cpp."""

    model_type: str  # transformers'
    fields: Callable[[Keys], dict[str, Any]]  # of config.json
    names: Mapping[str, str]
    outer: Mapping[str, str] = OUTER
    whole: Mapping[str, str] = WHOLE
    tiled: bool = False  # the value heads
    ropes: tuple[str, ...] = ("none",)  # kinds of scaling


HYBRIDS = {
    "qwen35": Hybrid("qwen3_5_text", _dense, QWEN, tiled=True),
    "qwen35moe": Hybrid("qwen3_5_moe_text", _mixture, QWEN_EXPERTS, tiled=True),
    "qwen3next": Hybrid("qwen3_5_moe_text", _mixture, QWEN_EXPERTS),
    "lfm2": Hybrid("lfm2", _lfm2, LFM2, LFM2_OUTER, whole={}),
    "lfm2moe": Hybrid("lfm2_moe", _lfm2_mixture, LFM2_EXPERTS, LFM2_OUTER, whole=LFM2_WHOLE),
    "gpt-oss": Hybrid("gpt_oss", gpt_oss.fields, gpt_oss.NAMES, whole=gpt_oss.WHOLE, ropes=("none", "yarn")),
}


def config_of(path: Path, file: Any, arch: str, keys: Mapping[str, Any]) -> Any:
    """transformers' config of an architecture of HYBRIDS. `keys`: those of the open file without the architecture's
    prefix. Raises CheckpointError."""
    from transformers import AutoConfig

    hybrid, own = HYBRIDS[arch], Keys(keys, path, arch)
    fields = {name: field.contents() for name, field in file.fields.items() if name.endswith("_token_id")}
    common = _common(own, file.tensors, fields, hybrid.ropes)
    return AutoConfig.for_model(hybrid.model_type, **common, **hybrid.fields(own))


def name_of(hybrid: Hybrid, layers: int, name: str, path: Path) -> str:
    """The name in a Hugging Face checkpoint of `layers` layers of the tensor `name`. Raises CheckpointError."""
    stem, _, kind = name.rpartition(".")
    if stem in hybrid.outer:
        return f"{hybrid.outer[stem]}.{kind}"
    if (block := BLOCK.fullmatch(name)) is not None:
        n, own = int(block[1]), block[2]
        layer = f"model.layers.{n}" if n < layers else f"mtp.layers.{n - layers}"
        if own in hybrid.whole:
            return f"{layer}.{hybrid.whole[own]}"
        stem, _, kind = own.rpartition(".")
        if stem in hybrid.names:
            return f"{layer}.{hybrid.names[stem]}.{kind}"
        if stem in MTP and n == layers:  # the heads share them
            return f"mtp.{MTP[stem]}.{kind}"
    raise CheckpointError(f"{path} has the tensor {name}, which no supported architecture uses")


def reader(
    arch: str, config: Any, tensors: Sequence[Any], dense: bool
) -> tuple[Callable[[str, Path], str], Callable[[str, Value], Iterator[tuple[str, Value]]], dict[str, Any]]:
    """For the tensors of a file: `name_of`; what the checkpoint has instead of a tensor, by its new name (as
    families.undone); and further fields of config.json. `dense`: no matrix keeps its blocks."""
    named = partial(name_of, HYBRIDS[arch], config.num_hidden_layers)
    if arch in ("lfm2", "lfm2moe"):
        return named, _of_convolutions, {}
    if arch == "gpt-oss":
        return named, _as_it_is, {APART: True}
    nets = _DeltaNets(config, HYBRIDS[arch].tiled)
    wide = {t.tensor_type.name for t in tensors if t.name.endswith(".ssm_out.weight")} & BLOCKS.keys()
    stays = nets.moves and not dense and any(config.linear_value_head_dim % BLOCKS[kind].weights for kind in wide)
    return named, partial(nets.undone, stays), {TILED: True} if stays else {}


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
