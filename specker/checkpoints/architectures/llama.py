"""Llama, Mistral, Ministral and Mixtral."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specker.checkpoints.architectures.architecture import BASE, FULL, SLIDING, Architecture
from specker.checkpoints.architectures.gguf import FREQUENCIES, File, Gguf, Undo, check_experts, scaled, with_scaling
from specker.checkpoints.architectures.names import EXPERTS, LAYER, TensorName
from specker.checkpoints.gguf_blocks import Value, rows
from specker.model.config import CheckpointError

# LlamaConfig imports `generate` and with it torch's compiler, which takes 1.7 s.
LLAMA = {"num_key_value_heads": None, "max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False}
MIXTRAL = {
    "router.single": TensorName("block_sparse_moe.gate"),
    "gate_up.expert_gate": TensorName("block_sparse_moe.experts.#.w1"),
    "gate_up.expert_up": TensorName("block_sparse_moe.experts.#.w3"),
    "down.expert": TensorName("block_sparse_moe.experts.#.w2"),
}


def interleaved(file: File) -> tuple[Undo, dict[str, Any]]:
    """The halves of a head that RoPE rotates are interleaved in a file."""
    heads = {"q_proj": file.config.num_attention_heads, "k_proj": file.config.num_key_value_heads}

    def undo(name: str, x: Value) -> dict[str, Value]:
        if (count := heads.get(name.split(".")[-2])) is None:
            return {name: x}
        all_rows = torch.arange(len(x if isinstance(x, Tensor) else x.codes), dtype=torch.int64, device="cpu")
        return {name: rows(x, all_rows.view(count, -1, 2).transpose(1, 2).flatten())}

    return undo, {}


def _llama(config: dict[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Llama 3.1 and later: a file has the divisors of RoPE's frequencies, and not the numbers that make them."""
    divisors = keys.get(FREQUENCIES)
    if divisors is None:
        return with_scaling(config, keys)
    if (kind := scaled(keys)["rope_type"]) != "default":
        raise CheckpointError(f"rope.scaling.type {kind} beside {FREQUENCIES} is not supported")
    base, factor = keys.get("rope.freq_base", 1e4), max(divisors)
    low, high, original = 1.0, 4.0, 8192  # in Meta's config.json
    for i, divisor in enumerate(divisors):
        turns = original * base ** (-i / len(divisors)) / math.tau  # of this frequency within the original context
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        if not math.isclose(divisor, 1 / ((1 - smooth) / factor + smooth), rel_tol=1e-4):
            raise CheckpointError(
                f"the file has {FREQUENCIES} that are not those of Llama 3, and specker reads no others"
            )
    given = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": original}
    return {"rope_parameters": {"rope_type": "llama3", "rope_theta": base, "factor": factor} | given}


def _mixtral(config: dict[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """In a file it is a Llama with experts."""
    check_experts(keys)
    counts = {"num_local_experts": keys["expert_count"], "num_experts_per_tok": keys["expert_used_count"]}
    return _llama(config, keys) | {"model_type": "mixtral"} | counts


FAMILY = {
    "LlamaForCausalLM": Architecture(
        "llama",
        gguf=Gguf(interleaved, mend=_llama),
        biases="all",
        kinds=FULL,
        config="Qwen2Config",
        defaults=LLAMA,
        fills=BASE | LLAMA,
    ),
    "MistralForCausalLM": Architecture("mistral", gguf=Gguf(interleaved, mend=with_scaling), kinds=SLIDING, fills=BASE),
    "MinistralForCausalLM": Architecture("ministral"),
    "Ministral3ForCausalLM": Architecture("ministral3", kinds=SLIDING),
    "MixtralForCausalLM": Architecture(
        "mixtral",
        LAYER | EXPERTS | MIXTRAL,
        gguf=Gguf(interleaved, mend=_mixtral),
        kinds=SLIDING,
        experts=("num_local_experts", "num_experts_per_tok", "intermediate_size"),
    ),
}
