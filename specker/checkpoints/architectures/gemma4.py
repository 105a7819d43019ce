"""Gemma 4.

In a GGUF file, the tensors say whether full layers project V, and the divisors of their frequencies how much of a head
RoPE rotates. Sources: llama.cpp's conversion/gemma.py and src/models/gemma4.cpp.
"""

from dataclasses import replace
from typing import Any

from specker.checkpoints.architectures.architecture import FULL, SLIDING, Architecture
from specker.checkpoints.architectures.gguf import FREQUENCIES, Gguf, Keys
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
    "router": TensorName("router.proj", "ffn_gate_inp"),
    "router_norm": TensorName("router.scale", "ffn_gate_inp.scale", whole=True),
    "router_scale": TensorName("router.per_expert_scale", "ffn_down_exps.scale", whole=True),
    "gate_up.experts": TensorName("experts.gate_up_proj", "ffn_gate_up_exps"),
    "gate_up.experts_gate": TensorName("experts.gate_proj", "ffn_gate_exps"),
    "gate_up.experts_up": TensorName("experts.up_proj", "ffn_up_exps"),
    "down.experts": TensorName("experts.down_proj", "ffn_down_exps"),
    "norm_experts": TensorName("pre_feedforward_layernorm_2", "pre_ffw_norm_2"),
    "norm_mixed": TensorName("post_feedforward_layernorm_2", "post_ffw_norm_2"),
    "norm_shared": TensorName("post_feedforward_layernorm_1", "post_ffw_norm_1"),
    "shared_gate_up.gate": TensorName("mlp.gate_proj"),
    "shared_gate_up.up": TensorName("mlp.up_proj"),
    "shared_down": TensorName("mlp.down_proj"),
}
PER_LAYER = {
    "ple_gate": TensorName("per_layer_input_gate", "inp_gate"),
    "ple_out": TensorName("per_layer_projection", "proj"),
    "norm_ple": TensorName("post_per_layer_input_norm", "post_norm"),
    "scalar": TensorName("layer_scalar", "layer_output_scale.weight", whole=True),
}
NAMES = LAYER | NORMS_BOTH | BESIDE | PER_LAYER
KEYS = {  # that `of_keys` reads
    "attention.key_length",
    "attention.key_length_swa",
    "attention.shared_kv_layers",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attention.value_length_swa",
    "embedding_length_per_layer_input",
    "expert_count",
    "expert_feed_forward_length",
    "expert_used_count",
    "final_logit_softcapping",
    "rope.dimension_count_swa",
    "rope.freq_base_swa",
    FREQUENCIES,
}


def of_keys(keys: Keys) -> dict[str, Any]:
    """Fields of config.json by a file's keys and tensors. Raises CheckpointError."""
    kinds = [SLIDING if slides else FULL for slides in keys["attention.sliding_window_pattern"]]
    first = {kind: kinds.index(kind) if kind in kinds else 0 for kind in (SLIDING, FULL)}
    heads, widths = keys["attention.head_count_kv"], keys["feed_forward_length"]
    if not isinstance(heads, list):
        heads = [heads] * len(kinds)
    if not isinstance(widths, list):
        widths = [widths] * len(kinds)
    width, near = keys["attention.key_length"], keys["attention.key_length_swa"]
    keys.no("attention.value_length", width)
    keys.no("attention.value_length_swa", near)
    keys.no("rope.dimension_count", width)
    keys.no("rope.dimension_count_swa", near)
    rotated = sum(divisor == 1 for divisor in keys[FREQUENCIES])
    if any(1 < divisor < 1e29 for divisor in keys[FREQUENCIES]):
        raise CheckpointError(f"{keys.path} has {FREQUENCIES} that scale frequencies, which Gemma 4 does not")
    whole = {"rope_type": "proportional", "rope_theta": keys["rope.freq_base"]}
    found = {
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "sliding_window": keys["attention.sliding_window"],
        "num_key_value_heads": heads[first[SLIDING]],
        "num_global_key_value_heads": heads[first[FULL]],
        "head_dim": near,
        "global_head_dim": width,
        "attention_k_eq_v": f"blk.{first[FULL]}.attn_v.weight" not in keys.shapes,
        "num_kv_shared_layers": keys.get("attention.shared_kv_layers", 0),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": keys["attention.layer_norm_rms_epsilon"],
        "rope_parameters": {
            FULL: whole | {"partial_rotary_factor": 2 * rotated / width},
            SLIDING: {"rope_type": "default", "rope_theta": keys.get("rope.freq_base_swa", 1e4)},
        },
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
        "hidden_size_per_layer_input": keys.get("embedding_length_per_layer_input", 0),
    }
    if table := keys.shapes.get("per_layer_token_embd.weight"):
        found["vocab_size_per_layer_input"] = table[0]
    if experts := keys.get("expert_count"):
        found |= {"enable_moe_block": True, "num_experts": experts, "top_k_experts": keys["expert_used_count"]}
        found["moe_intermediate_size"] = keys["expert_feed_forward_length"]
    return found


FAMILY = {
    "Gemma4ForCausalLM": Architecture(
        "gemma4_text",
        NAMES,
        gguf=Gguf(
            ends=("<eos>", "<turn|>", "<|tool_response>"),
            files=("gemma4",),
            fields=of_keys,
            unread=(FREQUENCIES,),
        ),
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
