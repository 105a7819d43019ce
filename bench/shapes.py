"""Shapes of real models, and the bytes that a decoding step reads."""

import json
from pathlib import Path
from typing import Any

from specker.kernels.delta_rows import BLOCK
from specker.model.config import DeltaNet, ModelConfig, ShortConv, layer_elements


def _config(
    arch: str, vocab: int, hidden: int, ffn: int, layers: int, heads: int, kv: int, dim: int, tied: bool
) -> Any:
    return {
        "architectures": [f"{arch}ForCausalLM"],
        "model_type": arch.lower(),
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": dim,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1 << 17,  # room for every context; the length does not change RoPE's cost
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }


def _mixture(arch: str, kind: str, sizes: tuple[int, ...], **experts: Any) -> Any:
    return _config(arch, *sizes, False) | {"model_type": kind, **experts}


def _hybrid(sizes: tuple[int, ...], delta: tuple[int, int, int]) -> Any:
    """Three layers with a gated delta net, whose key heads, value heads and their size are `delta`, for each one that
    attends."""
    names = "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"
    own = dict(zip(names, (*delta, delta[2]), strict=True))
    return _config("Qwen3_5", *sizes, False) | {"model_type": "qwen3_5_text", **own}


SHAPES: dict[str, dict[str, Any]] = {
    "1b": _config("Llama", 128256, 2048, 8192, 16, 32, 8, 64, True),  # Llama-3.2-1B
    "8b": _config("Llama", 128256, 4096, 14336, 32, 32, 8, 128, False),  # Llama-3-8B
    "32b": _config("Qwen2", 152064, 5120, 27648, 64, 40, 8, 128, False),  # Qwen2.5-32B
    "0.6b": _config("Qwen3", 151936, 1024, 3072, 28, 16, 8, 128, True),  # Qwen3-0.6B
    "30b-a3b": _mixture(
        "Qwen3Moe",
        "qwen3_moe",
        (151936, 2048, 6144, 48, 32, 4, 128),
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    ),  # Qwen3-30B-A3B
    "8x7b": _mixture(
        "Mixtral", "mixtral", (32000, 4096, 14336, 32, 32, 8, 128), num_local_experts=8, num_experts_per_tok=2
    ),  # Mixtral-8x7B
    "9b": _hybrid((248320, 4096, 12288, 32, 16, 4, 256), (16, 32, 128)),  # Qwen3.5-9B
    "tiny": _config("Llama", 512, 64, 96, 2, 4, 2, 16, True),
    "tiny-hybrid": _hybrid((512, 64, 96, 4, 4, 2, 16), (2, 4, 16)),
}


def write(folder: Path) -> None:
    """A folder per shape that holds only config.json, for `load="dummy"`."""
    for name, config in SHAPES.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))


def step_bytes(c: ModelConfig, context: int, itemsize: int) -> int:
    """Bytes read by a step of one row: the layers' linears, norms and biases, the head, the K/V of `context` columns,
    and a gated delta net's states with the fewest records after them. The embedding's single row is not counted."""
    qkv = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    heads = {"": 0, "head": 2, "projection": c.num_heads + c.num_kv_heads}[c.layer.qk_norm]
    attention = heads * c.head_dim + qkv * c.layer.qkv_bias + c.hidden_size * c.layer.o_bias
    every = (4 if c.layer.norms == "both" else 2) * c.hidden_size
    every += (2 * c.intermediate_size + c.hidden_size) * c.layer.mlp_bias
    weights = layer_elements(c) + c.num_layers * every + c.hidden_size + c.vocab_size * c.hidden_size
    wide = 0  # elements in float32
    for m in map(c.layer.mixer, range(c.num_layers)):
        match m:
            case None:
                weights += attention + 2 * c.num_kv_heads * c.head_dim * context
            case DeltaNet():
                weights += m.channels * m.kernel + m.value_dim
                record = m.key_heads * m.key_dim + m.value_heads * (m.value_dim + 4)
                wide += 2 * m.value_heads + m.values * m.key_dim + min(context, BLOCK) * record
            case ShortConv():
                weights += m.channels * m.kernel
    return weights * itemsize + wide * max(itemsize, 4)
