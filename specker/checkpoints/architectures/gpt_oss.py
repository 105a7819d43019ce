"""gpt-oss.

What llama.cpp's converter changes: the rows of gate and up, which take turns in a checkpoint, are a tensor each, and so
are their biases; matrices that are not quantised are no longer transposed; numbers in MXFP4 stand in other bytes. The
converted checkpoint keeps gate and up apart, so that a CPU multiplies by the memory-mapped file itself, and config.json
says so (`Experts.turns`).

Sources: llama.cpp's conversion/gpt_oss.py and src/models/openai-moe-iswa.cpp.
"""

from reprlib import repr as short
from typing import Any

from specker.checkpoints.architectures.architecture import FULL, SLIDING, Architecture
from specker.checkpoints.architectures.gguf import File, Gguf, Keys, Undo, as_it_is
from specker.checkpoints.architectures.names import FUSED_EXPERTS, LAYER, TensorName
from specker.kernels.row_linear import ALPHA, LIMIT
from specker.model.config import CheckpointError, LayerSpec

APART = "experts_gate_and_up_apart"  # not Experts.turns, in config.json of a converted GGUF file
SOFTMAX_OF_CHOSEN = 3  # of llama_expert_gating_func_type


def _gpt_oss_mixture(hf: Any) -> dict[str, Any]:
    for name, own in (("swiglu_alpha", ALPHA), ("swiglu_limit", LIMIT)):
        if getattr(hf, name, own) != own:
            raise CheckpointError(f"{name} {short(getattr(hf, name))} is not supported; it must be {own}")
    return {"biased": True, "turns": getattr(hf, APART, False) is not True}


def _fields(keys: Keys) -> dict[str, Any]:
    """Fields of config.json. llama.cpp has the first layer's window in every second layer, and scores that are the
    softmax of the chosen experts' logits.

    A file does not say that the range of frequencies that YaRN scales is not rounded to whole ones, which is so in all
    checkpoints of the architecture (`truncate`); llama.cpp rounds it."""
    keys.no("expert_gating_func", 0, SOFTMAX_OF_CHOSEN)
    width = keys["attention.key_length"]
    for name in ("attention.value_length", "rope.dimension_count"):
        keys.no(name, width)
    rope = {"rope_type": "default", "rope_theta": keys["rope.freq_base"]}
    if keys.get("rope.scaling.type", "none") == "yarn":
        context = keys["rope.scaling.original_context_length"]
        rope |= {"rope_type": "yarn", "factor": keys["rope.scaling.factor"], "truncate": False}
        rope |= {"original_max_position_embeddings": context}
        for name, own in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            rope[name] = keys.get(f"rope.scaling.yarn_{name}", own)
    return {
        "num_hidden_layers": keys["block_count"],
        "layer_types": [FULL if n % 2 else SLIDING for n in range(keys["block_count"])],
        "sliding_window": keys["attention.sliding_window"],
        "num_key_value_heads": keys["attention.head_count_kv"],
        "head_dim": width,
        "intermediate_size": keys["expert_feed_forward_length"],
        "rms_norm_eps": keys["attention.layer_norm_rms_epsilon"],
        "rope_parameters": rope,
        "num_local_experts": keys["expert_count"],
        "num_experts_per_tok": keys["expert_used_count"],
    }


def _apart(file: File) -> tuple[Undo, dict[str, Any]]:
    return as_it_is(file)[0], {APART: True}


NAMES = {
    "norm_post": TensorName("post_attention_layernorm", "post_attention_norm"),
    "sinks": TensorName("self_attn.sinks", "attn_sinks.weight", whole=True),
    "router": TensorName("mlp.router", "ffn_gate_inp"),
    "router_bias": TensorName("mlp.router.bias", whole=True),
}
FAMILY = {
    "GptOssForCausalLM": Architecture(
        "gpt_oss",
        LAYER | FUSED_EXPERTS | NAMES,
        gguf=Gguf(_apart, files=("gpt-oss",), fields=_fields, ropes=("none", "yarn")),
        biases="all",
        activation="",
        layer=LayerSpec("clamped_silu", sinks=True),
        experts=("num_local_experts", "num_experts_per_tok", "intermediate_size"),
        mixture=_gpt_oss_mixture,
        defaults={"mlp_bias": True},
    ),
}
