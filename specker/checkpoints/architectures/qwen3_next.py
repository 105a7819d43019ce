"""Qwen3-Next and Qwen3.5: gated delta nets, and attention with a gate in every fourth layer.

What llama.cpp's converter changes in the tensors:

* `ssm_a` is -exp(A_log); the norms' weights contain the 1 that they lack in a checkpoint, except `ssm_norm`'s; a
  convolution's weight has two dimensions.
* Qwen3.5's value heads are tiled: the first one of each key head, then the second ones, and so on. A checkpoint has
  them by key head. Where blocks are wider than a head, the out-projection cannot follow without rounding: its columns
  stay, and config.json says so (`DeltaNet.tiled`).
* Qwen3-Next's matrix of q, k, v and z is two, as in Qwen3.5, each in its own format. Both compute the same, so that the
  checkpoint is one of Qwen3.5's mixtures.
* The MTP head is a block after the last layer.

Sources: llama.cpp's conversion/qwen.py, src/models/qwen35.cpp and qwen3next.cpp.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specker.checkpoints.architectures.architecture import FULL, Architecture, check_kernel
from specker.checkpoints.architectures.gguf import File, Gguf, Keys, Undo
from specker.checkpoints.architectures.names import EXPERTS, LAYER, TensorName
from specker.checkpoints.gguf_blocks import BLOCKS, Value, moved, rows
from specker.model.config import CheckpointError, DeltaNet, LayerSpec

TILING = "qwen35", "qwen35moe"  # llama.cpp's architectures with tiled value heads
TILED = "linear_out_proj_tiled"  # DeltaNet.tiled, in config.json of a converted GGUF file


def _delta_net(hf: Any) -> DeltaNet:
    heads, dims = ("linear_num_key_heads", "linear_num_value_heads"), ("linear_key_head_dim", "linear_value_head_dim")
    mixer = DeltaNet(*(getattr(hf, name) for name in (*heads, *dims, "linear_conv_kernel_dim")))
    mixer = replace(mixer, tiled=getattr(hf, TILED, False) is True)
    if mixer.value_heads % mixer.key_heads:
        raise CheckpointError(f"{heads[1]} {mixer.value_heads} must be a multiple of {heads[0]} {mixer.key_heads}")
    for name, size in zip(dims, (mixer.key_dim, mixer.value_dim), strict=True):
        if size < 16 or size & (size - 1):
            raise CheckpointError(f"{name} {size} is not supported; it must be a power of two, at least 16")
    check_kernel("linear_conv_kernel_dim", mixer.kernel)
    if hf.hidden_act != "silu":  # it is also the activation behind the convolution
        raise CheckpointError(f"hidden_act {hf.hidden_act!r} is not supported beside gated delta nets; it must be silu")
    return mixer


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


class _DeltaNets:
    """The orders in which a file has the heads of gated delta nets."""

    def __init__(self, file: File):
        config, tiled = file.config, file.arch in TILING
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

        wide = {t.tensor_type.name for t in file.tensors if t.name.endswith(".ssm_out.weight")} & BLOCKS.keys()
        crossed = not file.dense and any(Dv % BLOCKS[kind].weights for kind in wide)
        self.stays = self.moves and crossed  # the order of the out-projections' columns

    def undo(self, name: str, x: Value) -> dict[str, Value]:
        layer, _, own = name.rpartition("linear_attn.")
        if not layer:
            if isinstance(x, Tensor) and "norm" in name:
                x = x - 1
            elif isinstance(x, Tensor) and name.endswith("shared_expert_gate.weight"):
                x = x.view(1, -1)
            return {name: x}
        if own not in self.parts:
            return {name: moved(x, self.heads) if own == "out_proj.weight" and self.moves and not self.stays else x}
        if own == "A_log":
            x = _log(name, x)
        found = {f"{layer}linear_attn.{part}": rows(x, order) for part, order in self.parts[own].items()}
        if own == "conv1d.weight":
            found = {part: y.unsqueeze(1) if isinstance(y, Tensor) else y for part, y in found.items()}
        return found


def _undone(file: File) -> tuple[Undo, dict[str, Any]]:
    nets = _DeltaNets(file)
    return nets.undo, {TILED: True} if nets.stays else {}


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


ENDS = "<|im_end|>", "<|endoftext|>"
COMMON = LAYER | {
    "norm_post": TensorName("post_attention_layernorm", "post_attention_norm"),
    "conv": TensorName("linear_attn.conv1d", "ssm_conv1d"),
    "a_log": TensorName("linear_attn.A_log", "ssm_a", whole=True),
    "dt_bias": TensorName("linear_attn.dt_bias", "ssm_dt.bias", whole=True),
    "norm_mix": TensorName("linear_attn.norm", "ssm_norm"),
    "o.mixer": TensorName("linear_attn.out_proj", "ssm_out"),
}
JOINED = {  # in GGUF files of Qwen3-Next; the first one in those of 2025
    "qkv.qkvz": TensorName("linear_attn.in_proj_qkvz", "ssm_in"),
    "gates.ba": TensorName("linear_attn.in_proj_ba", "ssm_ba"),
}
APART = {
    "qkv.qkv": TensorName("linear_attn.in_proj_qkv", "attn_qkv"),
    "qkv.z": TensorName("linear_attn.in_proj_z", "attn_gate"),
    "gates.b": TensorName("linear_attn.in_proj_b", "ssm_beta"),
    "gates.a": TensorName("linear_attn.in_proj_a", "ssm_alpha"),
}
QWEN_EXPERTS = EXPERTS | {
    "shared_gate_up.gate": TensorName("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    "shared_gate_up.up": TensorName("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    "shared_down": TensorName("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    "shared_gate": TensorName("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
}
SIZES = "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"
QWEN3_NEXT = Architecture(
    "qwen3_next",
    COMMON | JOINED | QWEN_EXPERTS,
    layer=LayerSpec(qk_norm="head", gated=True),
    biases="attention",
    partial=True,
    norm_offset=1.0,
    recurrent=("linear_attention", _delta_net),
    experts=SIZES,
    normalises="norm_topk_prob",
)
QWEN3_5_MOE = replace(
    QWEN3_NEXT,
    model_type="qwen3_5_moe_text",
    names=COMMON | JOINED | APART | QWEN_EXPERTS,
    gguf=Gguf(_undone, ENDS, files=("qwen35moe", "qwen3next"), fields=_mixture),
    normalises="",
    config="Qwen3_5MoeTextConfig",
    text="qwen3_5_moe",
)
FAMILY = {
    "Qwen3NextForCausalLM": QWEN3_NEXT,
    "Qwen3_5ForCausalLM": replace(
        QWEN3_5_MOE,
        model_type="qwen3_5_text",
        names=COMMON | JOINED | APART,
        gguf=Gguf(_undone, ENDS, files=("qwen35",), fields=_dense),
        experts=(),
        config="Qwen3_5TextConfig",
        text="qwen3_5",
    ),
    "Qwen3_5MoeForCausalLM": QWEN3_5_MOE,
}
