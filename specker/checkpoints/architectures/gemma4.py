"""Gemma 4."""

from dataclasses import replace
from typing import Any

from specker.checkpoints.architectures.architecture import FULL, Architecture
from specker.checkpoints.architectures.names import LAYER, NORMS_BOTH, TensorName
from specker.checkpoints.numbers import check_size
from specker.model.config import KV, CheckpointError, LayerSpec, ModelConfig


def _finish(hf: Any, c: ModelConfig) -> ModelConfig:
    if hf.use_bidirectional_attention == "all":  # "vision" concerns images only
        raise CheckpointError("use_bidirectional_attention 'all' is not supported; Gemma must be causal")
    if hf.enable_moe_block and hf.use_double_wide_mlp and hf.num_kv_shared_layers:
        raise CheckpointError("use_double_wide_mlp is not supported beside enable_moe_block")
    ple, ple_ids = _ple(hf)
    return replace(
        c,
        layer=replace(c.layer, ple=ple),
        widths=_widths(hf),
        embed_scale=hf.hidden_size**0.5,
        embed_rounded=True,
        logits_cap=float(hf.final_logit_softcapping or 0),
        ple_ids=ple_ids,
    )


def _kvs(hf: Any) -> tuple[KV, ...]:
    """LayerSpec.kvs. Raises CheckpointError for heads that differ between layers of one kind."""
    if not hasattr(hf, "per_layer_config"):
        raise CheckpointError("Gemma 4 needs a later version of transformers: pip install -U transformers")
    kvs: list[KV] = []
    kinds, shared = hf.layer_types, hf.num_kv_shared_layers
    own = kinds[: hf.num_hidden_layers - shared]
    if not 0 <= shared < hf.num_hidden_layers or set(own) != set(kinds):
        raise CheckpointError(
            f"num_kv_shared_layers {shared} of {hf.num_hidden_layers} layers must leave one of each kind before them"
        )
    last = {kind: len(own) - 1 - own[::-1].index(kind) for kind in set(own)}
    first: dict[str, KV] = {}
    for n, (layer, kind) in enumerate(zip(hf.per_layer_config, hf.layer_types, strict=True)):
        for name in ("head_dim", "num_key_value_heads"):
            check_size(name, getattr(layer, name), f"config.json for layer {n}")
        single, source = bool(hf.attention_k_eq_v) and kind == FULL, None if n < len(own) else last[kind]
        kv = KV(layer.num_key_value_heads, layer.head_dim, single, source)
        if first.setdefault(kind, kv)[:3] != kv[:3]:
            raise CheckpointError(f"layer {n} of config.json has other heads than the {kind} layers before it")
        kvs.append(kv)
    return tuple(kvs)


def _ple(hf: Any) -> tuple[int, int]:
    """LayerSpec.ple and ModelConfig.ple_ids."""
    if hf.hidden_size_per_layer_input in (0, None):
        return 0, 0
    for name in ("hidden_size_per_layer_input", "vocab_size_per_layer_input"):
        check_size(name, getattr(hf, name), "config.json")
    if hf.vocab_size_per_layer_input < hf.vocab_size:
        raise CheckpointError(
            f"vocab_size_per_layer_input {hf.vocab_size_per_layer_input} must be at least vocab_size {hf.vocab_size}"
        )
    return hf.hidden_size_per_layer_input, hf.vocab_size_per_layer_input


def _widths(hf: Any) -> tuple[int, ...]:
    """ModelConfig.widths: with use_double_wide_mlp, layers that read the K/V of others are twice as wide."""
    if not hf.use_double_wide_mlp or not hf.num_kv_shared_layers:
        return ()
    first = hf.num_hidden_layers - hf.num_kv_shared_layers
    return tuple(hf.intermediate_size * (1 + (n >= first)) for n in range(hf.num_hidden_layers))


BESIDE = {  # of experts beside a feed-forward, which is the shared expert
    "router": TensorName("router.proj"),
    "router_norm": TensorName("router.scale", whole=True),
    "router_scale": TensorName("router.per_expert_scale", whole=True),
    "gate_up.experts": TensorName("experts.gate_up_proj"),
    "down.experts": TensorName("experts.down_proj"),
    "norm_experts": TensorName("pre_feedforward_layernorm_2"),
    "norm_mixed": TensorName("post_feedforward_layernorm_2"),
    "norm_shared": TensorName("post_feedforward_layernorm_1"),
    "shared_gate_up.gate": TensorName("mlp.gate_proj"),
    "shared_gate_up.up": TensorName("mlp.up_proj"),
    "shared_down": TensorName("mlp.down_proj"),
}
PER_LAYER = {
    "ple_gate": TensorName("per_layer_input_gate"),
    "ple_out": TensorName("per_layer_projection"),
    "norm_ple": TensorName("post_per_layer_input_norm"),
    "scalar": TensorName("layer_scalar", whole=True),
}
FAMILY = {
    "Gemma4ForCausalLM": Architecture(
        "gemma4_text",
        LAYER | NORMS_BOTH | BESIDE | PER_LAYER,
        layer=LayerSpec(norms="both", qk_norm="head", scale=1.0, v_norm=True, scaled=True),
        ropes="by type",
        activation="hidden_activation",
        kvs=_kvs,
        finish=_finish,
        experts=("num_experts", "top_k_experts", "moe_intermediate_size", "intermediate_size"),
        mixes="enable_moe_block",
        mixture=lambda hf: {"beside": True},
        config="Gemma4TextConfig",
        text="gemma4",
    ),
}
