"""Granite."""

from typing import Any

from specker.checkpoints.architectures.architecture import BASE, FULL, Architecture, Scales


def _granite(hf: Any) -> Scales:
    return Scales(
        scores=hf.attention_multiplier,
        embedding=hf.embedding_multiplier,
        residual=hf.residual_multiplier,
        logits=1 / hf.logits_scaling,
    )


FAMILY = {
    "GraniteForCausalLM": Architecture(
        "granite",
        biases="all",
        kinds=FULL,
        scales=_granite,
        fills=BASE
        | {"attention_bias": False, "mlp_bias": False, "attention_multiplier": 1.0, "embedding_multiplier": 1.0}
        | {"residual_multiplier": 1.0, "logits_scaling": 1.0},
    ),
}
