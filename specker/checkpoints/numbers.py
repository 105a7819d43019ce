"""The bounds of config.json's numbers. They are checked before anything is computed from them: transformers and
`parse.py` make lists with an entry for each layer, and tables with one for each dimension."""

from pathlib import Path
from reprlib import repr as short
from typing import Any

from specker.model.config import CheckpointError

# The largest value of each size: far above any model's.
MOST = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "num_hidden_layers": 1 << 10,
    "num_attention_heads": 1 << 10,
    "intermediate_size": 1 << 20,
    "num_key_value_heads": 1 << 10,
    "head_dim": 1 << 10,
    "max_position_embeddings": (1 << 31) - 1,
    "num_experts": 1 << 12,
    "num_local_experts": 1 << 12,
    "num_experts_per_tok": 1 << 12,
    "moe_intermediate_size": 1 << 20,
    "shared_expert_intermediate_size": 1 << 20,
    "linear_num_key_heads": 1 << 10,
    "linear_num_value_heads": 1 << 10,
    "linear_key_head_dim": 1 << 10,
    "linear_value_head_dim": 1 << 10,
    "linear_conv_kernel_dim": 1 << 10,
    "conv_L_cache": 1 << 10,
    "block_multiple_of": 1 << 20,
    "hidden_size_per_layer_input": 1 << 20,
    "vocab_size_per_layer_input": 1 << 24,
    "top_k_experts": 1 << 12,
    "conv_kernel_size": 1 << 6,
    "conv_group_size": 1 << 20,
    "selector_rank": 1 << 16,
    "selector_top_k": 1 << 6,
    "emb_dim": 1 << 20,
    "gru_hidden_dim": 1 << 20,
}
EXPERTS = 1 << 17  # of all layers together
SIZES = "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"
OPTIONAL_SIZES = (
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "linear_num_key_heads", "linear_num_value_heads"),
    *("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", "conv_L_cache"),
    "block_multiple_of",
)
# transformers 5 writes the second name of the experts, LFM2's files have that of the feed-forward
ALSO = {"num_experts": "num_local_experts", "intermediate_size": "block_ff_dim"}
POSITIVE = (
    "rms_norm_eps",
    "norm_eps",
    "query_pre_attn_scalar",
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "routed_scaling_factor",
    "block_ffn_dim_multiplier",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)
ROPE = (  # of config.json itself in older files
    "rope_theta",
    "rope_local_base_freq",
    "factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
)


def check_sizes(path: Path, raw: dict[str, Any], experts: tuple[str, ...]) -> None:
    """Raise CheckpointError unless the sizes of config.json at `path`, those of `experts` included, are whole numbers
    from 1 to MOST. If one is missing, transformers would use the size of the family's first model."""
    for name in dict.fromkeys((*SIZES, *OPTIONAL_SIZES, *experts)):
        value = raw.get(name, raw.get(ALSO.get(name, "")))
        if value is not None or name not in OPTIONAL_SIZES:
            check_size(name, value, str(path))


def check_size(name: str, value: Any, where: str) -> None:
    """Raise CheckpointError unless a size is a whole number from 1 to MOST. `where`: the file, for the message."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST[name]:
        got = "lacks it" if value is None else f"has {short(value)}"
        raise CheckpointError(f"{name} must be a whole number from 1 to {MOST[name]}, but {where} {got}")


def check_dtype(raw: dict[str, Any]) -> None:
    """Raise CheckpointError unless the stored type is a name. Composite models have one for each part."""
    for name in ("dtype", "torch_dtype"):
        if not isinstance(value := raw.get(name), str | dict | None):
            raise CheckpointError(f"{name} must be a string, but config.json has {short(value)}")


def check_experts(count: int, layers: int) -> None:
    """Raise CheckpointError for more experts in all layers than specker lists."""
    if count * layers > EXPERTS:
        raise CheckpointError(f"{count} experts in each of {layers} layers are more than {EXPERTS} in all")


def check_factors(raw: dict[str, Any]) -> None:
    """Raise CheckpointError unless the factors of config.json, and those of its RoPE, are positive."""
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(given, dict):
        name = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
        raise CheckpointError(f"{name} must be an object, but config.json has {short(given)}")
    parts = raw, given, *(part for part in given.values() if isinstance(part, dict))
    for name in (*POSITIVE, *ROPE):
        for part in parts:
            value = part.get(name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and 1e-38 < value < 1e38):  # float32
                raise CheckpointError(f"{name} must be a positive float32, but config.json has {short(value)}")
