"""Gemma 2 and Gemma 3."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from specker.checkpoints.architectures.architecture import BASE, FULL, SLIDING, Architecture
from specker.checkpoints.architectures.gguf import File, Gguf, Undo, scaled
from specker.checkpoints.architectures.names import LAYER, NORMS_BOTH
from specker.model.config import CheckpointError, LayerSpec, ModelConfig


def _scaled(hf: Any, c: ModelConfig) -> ModelConfig:
    if hf.model_type != "gemma2" and hf.attn_logit_softcapping is not None:  # transformers ignores it
        cap = hf.attn_logit_softcapping
        raise CheckpointError(f"attn_logit_softcapping {cap} is not supported; Gemma 3's scores have no soft cap")
    if hf.use_bidirectional_attention:
        raise CheckpointError("use_bidirectional_attention is not supported; Gemma must be causal")
    scale, cap = hf.query_pre_attn_scalar**-0.5, float(hf.attn_logit_softcapping or 0)
    return replace(
        c,
        layer=replace(c.layer, scale=scale, cap=cap),
        embed_scale=hf.hidden_size**0.5,
        embed_rounded=True,
        logits_cap=float(hf.final_logit_softcapping or 0),
    )


def _gemma3_gguf(config: dict[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Every sixth layer attends to all columns, and has RoPE of another base, perhaps scaled."""
    layers, pattern = config["num_hidden_layers"], keys.get("attention.sliding_window_pattern", 6)
    slides = pattern if isinstance(pattern, list) else [(n + 1) % pattern != 0 for n in range(layers)]
    whole = {"rope_theta": keys.get("rope.freq_base", 1e6)} | scaled(keys)
    largest, width = layers == 62, config["hidden_size"] // config["num_attention_heads"]  # 27B is the exception
    found = {
        "layer_types": [SLIDING if slide else FULL for slide in slides],
        "rope_parameters": {
            FULL: whole,
            SLIDING: {"rope_type": "default", "rope_theta": keys.get("rope.freq_base_swa", 1e4)},
        },
        "query_pre_attn_scalar": width if largest else config["head_dim"],
    }
    caps = {name: keys[name] for name in ("attn_logit_softcapping", "final_logit_softcapping") if name in keys}
    return found | caps


def _norms(file: File) -> tuple[Undo, dict[str, Any]]:
    """In a file the norms' weights contain the 1 that they lack in a checkpoint."""
    return lambda name, x: {name: x - 1 if isinstance(x, Tensor) and name.endswith("norm.weight") else x}, {}


GEMMA = BASE | {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "use_bidirectional_attention": None,
}
GEMMA2 = Architecture(
    "gemma2",
    LAYER | NORMS_BOTH,
    layer=LayerSpec(norms="both"),
    biases="attention",
    norm_offset=1.0,
    activation="hidden_activation",
    finish=_scaled,
    fills=GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
)
FAMILY = {
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": replace(
        GEMMA2,
        model_type="gemma3_text",
        gguf=Gguf(_norms, ends=("<end_of_turn>",), mend=_gemma3_gguf),
        layer=LayerSpec(norms="both", qk_norm="head"),
        ropes="by type",
        config="Gemma3TextConfig",
        fills=GEMMA
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "use_bidirectional_attention": False},
    ),
}
