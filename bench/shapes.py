"""Shapes of real models, and the bytes that a decoding step reads."""

import json
from pathlib import Path
from typing import Any

from specker.kernels.delta_rows import BLOCK
from specker.model.config import DeltaNet
from specker.model.decoder import Model

OF_EXPERTS = ("gate_up", "gate_up_bias", "down", "down_bias")  # a mixture's weights of which a row reads a part


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


def _windows(layers: int, every: int) -> list[str]:
    """The kinds of layers of which every so many attends to all columns."""
    return ["sliding_attention" if n % every else "full_attention" for n in range(1, layers + 1)]


GPT_OSS = _mixture(
    "GptOss",
    "gpt_oss",
    (201088, 2880, 2880, 24, 64, 8, 64),
    num_local_experts=32,
    num_experts_per_tok=4,
    attention_bias=True,
    sliding_window=128,
    layer_types=_windows(24, 2),
    quantization_config={"quant_method": "mxfp4"},
)
GEMMA4 = _config("Gemma4", 262144, 5376, 21504, 60, 32, 16, 256, True) | {
    "model_type": "gemma4_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 1024,
    "layer_types": _windows(60, 6),
    "global_head_dim": 512,
    "num_global_key_value_heads": 4,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    },
}
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
    "gpt-oss-20b": GPT_OSS,  # experts in MXFP4
    "gemma4-31b": GEMMA4,
    "tiny": _config("Llama", 512, 64, 96, 2, 4, 2, 16, True),
    "tiny-hybrid": _hybrid((512, 64, 96, 4, 4, 2, 16), (2, 4, 16)),
}


def write(folder: Path, layers: int = 0) -> None:
    """A folder per shape that holds only config.json, for `load="dummy"`; with `layers`, of models of so many."""
    for name, config in SHAPES.items():
        if layers:
            config = config | {"num_hidden_layers": layers}
            config |= {"layer_types": config["layer_types"][:layers]} if "layer_types" in config else {}
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))


def step_bytes(model: Model, context: int, batch: int = 1) -> int:
    """Bytes read by a step of one row of each of `batch` sequences: the layers' weights, of experts the expected number
    (`Experts.read`), the last norm and the head; the K/V of `context` columns or of the sliding window, and a gated
    delta net's states with the fewest records after them. The embedding's rows are not counted."""
    c, itemsize = model.config, model.dtype.itemsize
    weights: float = model.norm.nbytes + model.head.nbytes
    sequence = 0
    for n, layer in enumerate(model.layers):
        mixture = c.layer.mixture(n)
        share = 1.0 if mixture is None else mixture.read(batch) / mixture.count
        for name, weight in layer.mixer.present().items():
            weights += weight.nbytes * (share if name in OF_EXPERTS else 1)
        match c.layer.mixer(n):
            case None:
                kv = c.kv(n)
                columns = min(context, c.layer.sliding_window(n) or context)
                sequence += 2 * kv.heads * kv.dim * columns * itemsize
            case DeltaNet() as m:
                record = m.key_heads * m.key_dim + m.value_heads * (m.value_dim + 4)
                sequence += (m.values * m.key_dim + min(context, BLOCK) * record) * max(itemsize, 4)
    return round(weights) + batch * sequence
