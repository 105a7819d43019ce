"""Qwen2, Qwen3 and Qwen3-MoE, and models of the same layers: MiMo and the diffusion drafter Dream."""

from collections.abc import Mapping
from typing import Any

from specker.checkpoints.architectures.architecture import BASE, SLIDING, Architecture
from specker.checkpoints.architectures.gguf import Gguf, check_experts, with_scaling
from specker.checkpoints.architectures.names import EXPERTS, LAYER
from specker.model.config import LayerSpec

QWEN = BASE | {"max_position_embeddings": 32768, "use_sliding_window": False}


def _qwen3_moe(config: dict[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """transformers leaves out the experts' intermediate size."""
    check_experts(keys)
    width = keys["expert_feed_forward_length"]
    return with_scaling(config, keys) | {"moe_intermediate_size": width, "norm_topk_prob": True}


FAMILY = {
    "Qwen2ForCausalLM": Architecture("qwen2", gguf=Gguf(mend=with_scaling), biases="qkv", masked="may be", fills=QWEN),
    "Qwen3ForCausalLM": Architecture(
        "qwen3",
        gguf=Gguf(mend=with_scaling),
        layer=LayerSpec(qk_norm="head"),
        biases="attention",
        masked="may be",
        fills=QWEN | {"head_dim": 128, "attention_bias": False},
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3_moe",
        LAYER | EXPERTS,
        gguf=Gguf(mend=_qwen3_moe),
        layer=LayerSpec(qk_norm="head"),
        biases="attention",
        kinds=SLIDING,
        experts=("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
        normalises="norm_topk_prob",
        fills=QWEN
        | {"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": False},
    ),
}
# transformers does not know these two.
MIMO = {"MiMoForCausalLM": Architecture("mimo", biases="qkv", config="Qwen2Config", fills=QWEN)}
DREAM = {"DreamModel": Architecture("Dream", biases="qkv", masked="always", config="Qwen2Config", fills=QWEN)}
