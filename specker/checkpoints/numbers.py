"""The fields of config.json: their types, and the bounds of numbers. These are checked before anything is computed from
them: transformers and `parse.py` make lists with an entry for each layer, and tables with one for each dimension."""

from pathlib import Path
from reprlib import repr as short
from typing import Any, NamedTuple

from specker.model.config import CheckpointError


class Field(NamedTuple):
    """A field of config.json. One without types is read only by transformers, or checked where it is read."""

    types: tuple[type, ...] = ()  # otherwise transformers reads the file
    most: int = 0  # the largest value of a size, a whole number from 1 on: far above any model's
    needed: bool = False  # every config.json must have this size
    given: bool = False  # a size that is checked in every config.json that has it
    positive: bool = False  # a factor


NONE, FACTOR = type(None), Field(positive=True)
FIELDS = {  # in the order of the checks
    "vocab_size": Field((int,), 1 << 24, needed=True),
    "hidden_size": Field((int,), 1 << 20, needed=True),
    "num_hidden_layers": Field((int,), 1 << 10, needed=True),
    "num_attention_heads": Field((int,), 1 << 10, needed=True),
    "intermediate_size": Field((int,), 1 << 20, needed=True),
    "num_key_value_heads": Field((int,), 1 << 10, given=True),
    "head_dim": Field((int, NONE), 1 << 10, given=True),
    "max_position_embeddings": Field((int,), (1 << 31) - 1, given=True),
    # of recurrent layers
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), Field((), 1 << 10, given=True)),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), Field((), 1 << 10, given=True)),
    **dict.fromkeys(("linear_conv_kernel_dim", "conv_L_cache"), Field((), 1 << 10, given=True)),
    "block_multiple_of": Field((), 1 << 20, given=True),
    # of experts (Architecture.experts)
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), Field((int,), 1 << 12)),
    "top_k_experts": Field((), 1 << 12),
    "moe_intermediate_size": Field((int,), 1 << 20),
    "shared_expert_intermediate_size": Field((), 1 << 20),
    # of per-layer embeddings
    "hidden_size_per_layer_input": Field((), 1 << 20),
    "vocab_size_per_layer_input": Field((), 1 << 24),
    # of drafters of blocks
    "conv_kernel_size": Field((), 1 << 6),
    "conv_group_size": Field((), 1 << 20),
    "selector_rank": Field((), 1 << 16),
    "selector_top_k": Field((), 1 << 6),
    "emb_dim": Field((), 1 << 20),
    "gru_hidden_dim": Field((), 1 << 20),
    **dict.fromkeys(("dspine_config.transfer_rank", "dspine_config.message_size"), Field((), 1 << 16)),
    **dict.fromkeys(("dspine_config.top_k", "lilicorr_candidate_topk"), Field((), 1 << 6)),
    **dict.fromkeys(("lilicorr_num_layers", "lilicorr_num_heads"), Field((), 1 << 10)),
    **dict.fromkeys(("lilicorr_hidden_size", "lilicorr_factor_dim"), Field((), 1 << 20)),
    "rms_norm_eps": Field((float,), positive=True),
    "norm_eps": FACTOR,
    "query_pre_attn_scalar": Field((int,), positive=True),
    **dict.fromkeys(("attention_multiplier", "embedding_multiplier"), Field((float, int), positive=True)),
    **dict.fromkeys(("residual_multiplier", "logits_scaling"), Field((float, int), positive=True)),
    "routed_scaling_factor": FACTOR,
    "block_ffn_dim_multiplier": FACTOR,
    "attn_logit_softcapping": Field((float, NONE), positive=True),
    "final_logit_softcapping": Field((float, NONE), positive=True),
    # of RoPE; in older files outside of its parameters
    "rope_theta": Field((float, int), positive=True),
    **dict.fromkeys(("rope_local_base_freq", "factor", "attention_factor", "beta_fast", "beta_slow"), FACTOR),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), FACTOR),
    "partial_rotary_factor": FACTOR,
    "sliding_window": Field((int, NONE)),
    "decoder_sparse_step": Field((int,)),
    **dict.fromkeys(("hidden_act", "hidden_activation"), Field((str,))),
    **dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window"), Field((bool,))),
    "use_bidirectional_attention": Field((bool, NONE)),
    "norm_topk_prob": Field((bool,)),
    "use_cache": Field((bool,)),
    "initializer_range": Field((float,)),
    "bos_token_id": Field((int, NONE)),
    "eos_token_id": Field((int, list, NONE)),
    "pad_token_id": Field((int, NONE)),
}
EXPERTS = 1 << 17  # of all layers together
# transformers 5 writes the second name of the experts, LFM2's files have that of the feed-forward
ALSO = {"num_experts": "num_local_experts", "intermediate_size": "block_ff_dim"}


def check_sizes(path: Path, raw: dict[str, Any], experts: tuple[str, ...]) -> None:
    """Raise CheckpointError unless the sizes of config.json at `path`, those of `experts` included, are whole numbers
    from 1 to their largest. If one is missing, transformers would use the size of the family's first model."""
    sizes = (name for name, field in FIELDS.items() if field.needed or field.given)
    for name in dict.fromkeys((*sizes, *experts)):
        value = raw.get(name, raw.get(ALSO.get(name, "")))
        if value is not None or not FIELDS[name].given:
            check_size(name, value, str(path))


def check_size(name: str, value: Any, where: str) -> None:
    """Raise CheckpointError unless a size is a whole number from 1 to its largest. `where`: the file, for the
    message."""
    if type(value) is not int or not 1 <= value <= FIELDS[name].most:
        got = "lacks it" if value is None else f"has {short(value)}"
        raise CheckpointError(f"{name} must be a whole number from 1 to {FIELDS[name].most}, but {where} {got}")


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
    for name in (name for name, field in FIELDS.items() if field.positive):
        for part in parts:
            value = part.get(name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and 1e-38 < value < 1e38):  # float32
                raise CheckpointError(f"{name} must be a positive float32, but config.json has {short(value)}")
