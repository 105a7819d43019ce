"""SmolLM3: some layers have no RoPE."""

from specker.checkpoints.architectures.architecture import Architecture
from specker.checkpoints.architectures.qwen import QWEN

FAMILY = {
    "SmolLM3ForCausalLM": Architecture(
        "smollm3",
        biases="all",
        ropes="some",
        fills=QWEN | {"rope_theta": 2000000.0, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True},
    ),
}
