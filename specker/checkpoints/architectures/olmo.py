"""OLMo 2 and OLMo 3: norms of what attention and the feed-forward add."""

from specker.checkpoints.architectures.architecture import BASE, FULL, Architecture
from specker.checkpoints.architectures.names import LAYER, NORMS_AFTER
from specker.model.config import LayerSpec

NORMS = LayerSpec(norms="after", qk_norm="projection")
FAMILY = {
    "Olmo2ForCausalLM": Architecture(
        "olmo2",
        LAYER | NORMS_AFTER,
        layer=NORMS,
        biases="attention",
        kinds=FULL,
        fills=BASE | {"attention_bias": False, "rms_norm_eps": 1e-5},
    ),
    "Olmo3ForCausalLM": Architecture("olmo3", LAYER | NORMS_AFTER, layer=NORMS, biases="attention", ropes="by type"),
}
