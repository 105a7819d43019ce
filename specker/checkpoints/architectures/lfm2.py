"""LFM2 and LFM2-MoE: gated short convolutions, and attention in some layers.

Sources of their GGUF files: llama.cpp's conversion/lfm2.py, src/models/lfm2.cpp and lfm2moe.cpp.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from specker.checkpoints.architectures.architecture import FULL, Architecture, check_kernel
from specker.checkpoints.architectures.gguf import File, Gguf, Keys, Undo
from specker.checkpoints.architectures.names import FUSED_EXPERTS, LAYER, TensorName
from specker.checkpoints.numbers import check_size
from specker.model.config import CheckpointError, LayerSpec, ModelConfig, ShortConv

SIGMOID = 2  # of llama_expert_gating_func_type


def _short_conv(hf: Any) -> ShortConv:
    if hf.conv_bias:
        raise CheckpointError("conv_bias is not supported; specker's short convolutions have no biases")
    check_kernel("conv_L_cache", hf.conv_L_cache)
    return ShortConv(hf.hidden_size, hf.conv_L_cache)


def _adjusted(hf: Any, c: ModelConfig) -> ModelConfig:
    """The intermediate size, as transformers' Lfm2MLP computes it."""
    if not hf.block_auto_adjust_ff_dim:
        return c
    width, step = int(2 * hf.intermediate_size / 3), hf.block_multiple_of
    if hf.block_ffn_dim_multiplier is not None:
        width = int(hf.block_ffn_dim_multiplier * width)
    width = -(-width // step) * step
    check_size("intermediate_size", width, "config.json, adjusted as block_auto_adjust_ff_dim says,")
    return replace(c, intermediate_size=width)


def _lfm_mixture(hf: Any) -> dict[str, Any]:
    """As transformers' Lfm2MoeTopKRouter and its decoder layer compute it; eps is a number in their code."""
    return {
        "scoring": "sigmoid",
        "biased": bool(hf.use_expert_bias),
        "scale": float(hf.routed_scaling_factor),
        "eps": 1e-6,
        "dense": tuple(range(min(hf.num_dense_layers, hf.num_hidden_layers))),
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


def _kernels(file: File) -> tuple[Undo, dict[str, Any]]:
    """A convolution's weight has two dimensions in a file."""
    return lambda name, x: {
        name: x.unsqueeze(1) if isinstance(x, Tensor) and name.endswith("conv.conv.weight") else x
    }, {}


def _dense(keys: Keys) -> dict[str, Any]:
    return _convolutions(keys) | {"block_auto_adjust_ff_dim": False}  # the file has the result


def _mixture(keys: Keys) -> dict[str, Any]:
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


LFM2_LAYER = LAYER | {
    "norm_in": TensorName("operator_norm", "attn_norm"),
    "q_norm": TensorName("self_attn.q_layernorm", "attn_q_norm"),
    "k_norm": TensorName("self_attn.k_layernorm", "attn_k_norm"),
    "o": TensorName("self_attn.out_proj", "attn_output"),
    "qkv.bcx": TensorName("conv.in_proj", "shortconv.in_proj"),
    "conv": TensorName("conv.conv", "shortconv.conv"),
    "o.mixer": TensorName("conv.out_proj", "shortconv.out_proj"),
    "norm_post": TensorName("ffn_norm", "ffn_norm"),
    "gate_up.gate": TensorName("feed_forward.w1", "ffn_gate"),
    "gate_up.up": TensorName("feed_forward.w3", "ffn_up"),
    "down": TensorName("feed_forward.w2", "ffn_down"),
}
LFM2_EXPERTS = {
    key: found._replace(name=found.name.replace("mlp.", "feed_forward.")) for key, found in FUSED_EXPERTS.items()
} | {
    "router_bias": TensorName("feed_forward.expert_bias", "exp_probs_b.bias", whole=True),
    "gate_up.expert_gate": TensorName("feed_forward.experts.#.w1"),
    "gate_up.expert_up": TensorName("feed_forward.experts.#.w3"),
    "down.expert": TensorName("feed_forward.experts.#.w2"),
}
LFM2 = Architecture(
    "lfm2",
    LFM2_LAYER,
    TensorName("embedding_norm", "token_embd_norm"),
    layer=LayerSpec(qk_norm="head"),
    activation="",
    eps="norm_eps",
    recurrent=("conv", _short_conv),
)
FAMILY = {
    "Lfm2ForCausalLM": replace(LFM2, gguf=Gguf(_kernels, files=("lfm2",), fields=_dense), finish=_adjusted),
    "Lfm2MoeForCausalLM": replace(
        LFM2,
        model_type="lfm2_moe",
        names=LFM2_LAYER | LFM2_EXPERTS,
        gguf=Gguf(_kernels, files=("lfm2moe",), fields=_mixture),
        experts=("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
        normalises="norm_topk_prob",
        mixture=_lfm_mixture,
    ),
}
