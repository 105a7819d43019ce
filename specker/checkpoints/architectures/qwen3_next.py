"""Qwen3-Next and Qwen3.5: gated delta nets, and attention with a gate in every fourth layer."""

from dataclasses import replace
from typing import Any

from specker.checkpoints.architectures.architecture import FULL, Architecture, check_kernel
from specker.checkpoints.architectures.gguf import Gguf, Keys
from specker.checkpoints.architectures.names import EXPERTS, LAYER, TensorName
from specker.model.config import CheckpointError, DeltaNet

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
    qk_norm="head",
    biases="attention",
    partial=True,
    norm_offset=1.0,
    recurrent=("linear_attention", _delta_net),
    gated=True,
    experts=SIZES,
    normalises="norm_topk_prob",
)
QWEN3_5_MOE = replace(
    QWEN3_NEXT,
    model_type="qwen3_5_moe_text",
    names=COMMON | JOINED | APART | QWEN_EXPERTS,
    gguf=Gguf(ends=ENDS, files=("qwen35moe", "qwen3next"), fields=_mixture),
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
        gguf=Gguf(ends=ENDS, files=("qwen35",), fields=_dense),
        experts=(),
        config="Qwen3_5TextConfig",
        text="qwen3_5",
    ),
    "Qwen3_5MoeForCausalLM": QWEN3_5_MOE,
}
