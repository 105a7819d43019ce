"""Granite."""

from dataclasses import replace
from typing import Any

from specker.checkpoints.architectures.architecture import BASE, FULL, Architecture
from specker.model.config import ModelConfig


def _scaled(hf: Any, c: ModelConfig) -> ModelConfig:
    """See ModelConfig.residual_scale."""
    m = hf.residual_multiplier
    return replace(
        c,
        layer=replace(c.layer, scale=hf.attention_multiplier),
        rms_norm_eps=c.rms_norm_eps / m**2,
        embed_scale=hf.embedding_multiplier / m,
        residual_scale=m,
        logits_scale=1 / hf.logits_scaling,
    )


FAMILY = {
    "GraniteForCausalLM": Architecture(
        "granite",
        biases="all",
        kinds=FULL,
        finish=_scaled,
        fills=BASE
        | {"attention_bias": False, "mlp_bias": False, "attention_multiplier": 1.0, "embedding_multiplier": 1.0}
        | {"residual_multiplier": 1.0, "logits_scaling": 1.0},
    ),
}
