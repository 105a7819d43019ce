"""The supported architectures, an entry each: what an architecture's name says about a checkpoint's layers.

`parse.py` joins an entry with the fields of config.json to a `ModelConfig`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from reprlib import repr as short
from typing import Any, NamedTuple

from specker.checkpoints.numbers import check_size
from specker.kernels.row_linear import ALPHA, LIMIT
from specker.model.config import KV, CheckpointError, DeltaNet, Mixer, ShortConv

# In config.json of a converted GGUF file:
TILED = "linear_out_proj_tiled"  # DeltaNet.tiled
APART = "experts_gate_and_up_apart"  # not Experts.turns, of gpt-oss
FULL, SLIDING = LAYER_TYPES = ("full_attention", "sliding_attention")


class Scales(NamedTuple):
    """What an architecture multiplies with."""

    scores: float | None = None  # LayerSpec.scale
    embedding: float = 1.0  # ModelConfig.embed_scale, without `residual`
    rounded: bool = False  # ModelConfig.embed_rounded
    residual: float = 1.0  # ModelConfig.residual_scale
    logits: float = 1.0  # ModelConfig.logits_scale
    cap: float = 0.0  # LayerSpec.cap
    logits_cap: float = 0.0  # ModelConfig.logits_cap


def _gemma(hf: Any) -> Scales:
    """Raises CheckpointError for what the decoder does not compute."""
    if hf.model_type != "gemma2" and hf.attn_logit_softcapping is not None:  # transformers ignores it
        cap = hf.attn_logit_softcapping
        raise CheckpointError(f"attn_logit_softcapping {cap} is not supported; Gemma 3's scores have no soft cap")
    if hf.use_bidirectional_attention:
        raise CheckpointError("use_bidirectional_attention is not supported; Gemma must be causal")
    return Scales(
        scores=hf.query_pre_attn_scalar**-0.5,
        embedding=hf.hidden_size**0.5,
        rounded=True,
        cap=float(hf.attn_logit_softcapping or 0),
        logits_cap=float(hf.final_logit_softcapping or 0),
    )


def _gemma4(hf: Any) -> Scales:
    """Raises CheckpointError for what the decoder does not compute."""
    if hf.use_bidirectional_attention == "all":  # "vision" concerns images only
        raise CheckpointError("use_bidirectional_attention 'all' is not supported; Gemma must be causal")
    if hf.enable_moe_block and hf.use_double_wide_mlp and hf.num_kv_shared_layers:
        raise CheckpointError("use_double_wide_mlp is not supported beside enable_moe_block")
    return Scales(1.0, hf.hidden_size**0.5, rounded=True, logits_cap=float(hf.final_logit_softcapping or 0))


def _gemma4_kvs(hf: Any) -> tuple[KV, ...]:
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


def _gemma4_ple(hf: Any) -> tuple[int, int]:
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


def _gemma4_widths(hf: Any) -> tuple[int, ...]:
    """ModelConfig.widths: with use_double_wide_mlp, layers that read the K/V of others are twice as wide."""
    if not hf.use_double_wide_mlp or not hf.num_kv_shared_layers:
        return ()
    first = hf.num_hidden_layers - hf.num_kv_shared_layers
    return tuple(hf.intermediate_size * (1 + (n >= first)) for n in range(hf.num_hidden_layers))


def _delta_net(hf: Any) -> DeltaNet:
    heads, dims = ("linear_num_key_heads", "linear_num_value_heads"), ("linear_key_head_dim", "linear_value_head_dim")
    mixer = DeltaNet(*(getattr(hf, name) for name in (*heads, *dims, "linear_conv_kernel_dim")))
    mixer = replace(mixer, tiled=getattr(hf, TILED, False) is True)
    if mixer.value_heads % mixer.key_heads:
        raise CheckpointError(f"{heads[1]} {mixer.value_heads} must be a multiple of {heads[0]} {mixer.key_heads}")
    for name, size in zip(dims, (mixer.key_dim, mixer.value_dim), strict=True):
        if size < 16 or size & (size - 1):
            raise CheckpointError(f"{name} {size} is not supported; it must be a power of two, at least 16")
    _check_kernel("linear_conv_kernel_dim", mixer.kernel)
    if hf.hidden_act != "silu":  # it is also the activation behind the convolution
        raise CheckpointError(f"hidden_act {hf.hidden_act!r} is not supported beside gated delta nets; it must be silu")
    return mixer


def _short_conv(hf: Any) -> ShortConv:
    if hf.conv_bias:
        raise CheckpointError("conv_bias is not supported; specker's short convolutions have no biases")
    _check_kernel("conv_L_cache", hf.conv_L_cache)
    return ShortConv(hf.hidden_size, hf.conv_L_cache)


def _check_kernel(name: str, size: int) -> None:
    if not 2 <= size <= 8:
        raise CheckpointError(f"{name} {size} is not supported; it must be between 2 and 8")


def _lfm_width(hf: Any) -> int:
    """The intermediate size, as transformers' Lfm2MLP computes it."""
    if not hf.block_auto_adjust_ff_dim:
        return int(hf.intermediate_size)
    width, step = int(2 * hf.intermediate_size / 3), hf.block_multiple_of
    if hf.block_ffn_dim_multiplier is not None:
        width = int(hf.block_ffn_dim_multiplier * width)
    width = -(-width // step) * step
    check_size("intermediate_size", width, "config.json, adjusted as block_auto_adjust_ff_dim says,")
    return width


def _lfm_mixture(hf: Any) -> dict[str, Any]:
    """As transformers' Lfm2MoeTopKRouter and its decoder layer compute it; eps is a number in their code."""
    return {
        "scoring": "sigmoid",
        "biased": bool(hf.use_expert_bias),
        "scale": float(hf.routed_scaling_factor),
        "eps": 1e-6,
        "dense": tuple(range(min(hf.num_dense_layers, hf.num_hidden_layers))),
    }


def _gpt_oss_mixture(hf: Any) -> dict[str, Any]:
    for name, own in (("swiglu_alpha", ALPHA), ("swiglu_limit", LIMIT)):
        if getattr(hf, name, own) != own:
            raise CheckpointError(f"{name} {short(getattr(hf, name))} is not supported; it must be {own}")
    return {"biased": True, "turns": getattr(hf, APART, False) is not True}


def _granite(hf: Any) -> Scales:
    return Scales(
        scores=hf.attention_multiplier,
        embedding=hf.embedding_multiplier,
        residual=hf.residual_multiplier,
        logits=1 / hf.logits_scaling,
    )


@dataclass(frozen=True)
class Architecture:
    """What the name of an architecture says; config.json says the rest. The weights of a base model (LlamaModel) are
    the same, under names without "model."."""

    model_type: str
    norms: str = "before"  # LayerSpec.norms
    qk_norm: str = ""  # LayerSpec.qk_norm
    biases: str = ""
    """Which linears have biases: "qkv" always, those of "attention" if the field attention_bias says so, or "all",
    those of the feed-forward by mlp_bias. "": none."""
    kinds: str = "layer_types"  # where each layer's kind of attention stands; or FULL or SLIDING for all layers
    ropes: str = ""  # "by type": a RoPE for each kind of layer; "some": for the layers that no_rope_layers names
    partial: bool = False  # RoPE may rotate only a head's first dimensions
    fused: bool = False  # ModelConfig.fused
    norm_offset: float = 0.0  # ModelConfig.norm_offset
    activation: str = "hidden_act"  # the field that names the activation; "": none does
    gate: str = "silu"  # LayerSpec.activation, if no field names it
    sinks: bool = False  # LayerSpec.sinks
    eps: str = "rms_norm_eps"  # the field with the norms' epsilon
    width: Callable[[Any], int] = lambda hf: hf.intermediate_size  # of the feed-forward, from transformers' config
    recurrent: tuple[str, Callable[[Any], Mixer]] | None = None  # layers of this type, and what they compute
    gated: bool = False  # LayerSpec.gated
    kvs: Callable[[Any], tuple[KV, ...]] = lambda hf: ()  # LayerSpec.kvs, from transformers' config
    widths: Callable[[Any], tuple[int, ...]] = lambda hf: ()  # ModelConfig.widths, from transformers' config
    v_norm: bool = False  # LayerSpec.v_norm
    scaled: bool = False  # LayerSpec.scaled
    ple: Callable[[Any], tuple[int, int]] = lambda hf: (0, 0)  # LayerSpec.ple and ModelConfig.ple_ids
    scales: Callable[[Any], Scales] = lambda hf: Scales()  # of transformers' config
    experts: tuple[str, ...] = ()
    """The fields with the number of experts, how many each row chooses, an expert's intermediate size, and perhaps that
    of an expert that every row reads. Empty: every layer has one feed-forward."""
    mixes: str = ""  # the field that says whether there are experts; "": there are
    normalises: str = ""  # the field that says whether chosen experts' scores are divided by their sum; "": they are
    mixture: Callable[[Any], dict[str, Any]] = lambda hf: {}
    """Further fields of Experts, from transformers' config: the router's rule, if it is not a softmax over the experts,
    and the dense layers, if other fields than those of Qwen3-MoE name them."""
    masked: str = ""  # "always": a diffusion drafter; "may be": if the user says so
    config: str = ""  # the name of a class of transformers with the same fields; "": the architecture's own
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of fields that this class sets otherwise
    text: str = ""  # the model type that the text model's config has, if it may be part of a multimodal checkpoint
    fills: Mapping[str, Any] | None = None
    """The fields that config.json may leave out, with the values that transformers' class gives them (`settings.py`).
    None: transformers reads config.json."""


# transformers does not know Dream and MiMo. LlamaConfig imports `generate` and with it torch's compiler, which takes
# 1.7 s.
LLAMA = {"num_key_value_heads": None, "max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False}
BASE = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "head_dim": None,
    "rope_theta": 10000.0,
}
QWEN = BASE | {"max_position_embeddings": 32768, "use_sliding_window": False}
GEMMA = BASE | {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "use_bidirectional_attention": None,
}
QWEN_EXPERTS = "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"
QWEN3_NEXT = Architecture(
    "qwen3_next",
    qk_norm="head",
    biases="attention",
    partial=True,
    norm_offset=1.0,
    recurrent=("linear_attention", _delta_net),
    gated=True,
)
GEMMA2 = Architecture(
    "gemma2",
    norms="both",
    biases="attention",
    norm_offset=1.0,
    activation="hidden_activation",
    scales=_gemma,
    fills=GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
)
ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(
        "llama", biases="all", kinds=FULL, config="Qwen2Config", defaults=LLAMA, fills=BASE | LLAMA
    ),
    "MistralForCausalLM": Architecture("mistral", kinds=SLIDING, fills=BASE),
    "MinistralForCausalLM": Architecture("ministral"),
    "Ministral3ForCausalLM": Architecture("ministral3", kinds=SLIDING),
    "MixtralForCausalLM": Architecture(
        "mixtral", kinds=SLIDING, experts=("num_local_experts", "num_experts_per_tok", "intermediate_size")
    ),
    "Qwen2ForCausalLM": Architecture("qwen2", biases="qkv", masked="may be", fills=QWEN),
    "Qwen3ForCausalLM": Architecture(
        "qwen3",
        qk_norm="head",
        biases="attention",
        masked="may be",
        fills=QWEN | {"head_dim": 128, "attention_bias": False},
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3_moe",
        qk_norm="head",
        biases="attention",
        kinds=SLIDING,
        experts=("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
        normalises="norm_topk_prob",
        fills=QWEN
        | {"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": False},
    ),
    "Qwen3NextForCausalLM": replace(QWEN3_NEXT, experts=QWEN_EXPERTS, normalises="norm_topk_prob"),
    "Qwen3_5ForCausalLM": replace(QWEN3_NEXT, model_type="qwen3_5_text", config="Qwen3_5TextConfig", text="qwen3_5"),
    "Qwen3_5MoeForCausalLM": replace(
        QWEN3_NEXT,
        model_type="qwen3_5_moe_text",
        experts=QWEN_EXPERTS,
        config="Qwen3_5MoeTextConfig",
        text="qwen3_5_moe",
    ),
    "Lfm2ForCausalLM": Architecture(
        "lfm2", qk_norm="head", activation="", eps="norm_eps", width=_lfm_width, recurrent=("conv", _short_conv)
    ),
    "Lfm2MoeForCausalLM": Architecture(
        "lfm2_moe",
        qk_norm="head",
        activation="",
        eps="norm_eps",
        recurrent=("conv", _short_conv),
        experts=("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
        normalises="norm_topk_prob",
        mixture=_lfm_mixture,
    ),
    "GptOssForCausalLM": Architecture(
        "gpt_oss",
        biases="all",
        activation="",
        gate="clamped_silu",
        sinks=True,
        experts=("num_local_experts", "num_experts_per_tok", "intermediate_size"),
        mixture=_gpt_oss_mixture,
        defaults={"mlp_bias": True},
    ),
    "MiMoForCausalLM": Architecture("mimo", biases="qkv", config="Qwen2Config", fills=QWEN),
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": replace(
        GEMMA2,
        model_type="gemma3_text",
        qk_norm="head",
        ropes="by type",
        config="Gemma3TextConfig",
        fills=GEMMA
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "use_bidirectional_attention": False},
    ),
    "Gemma4ForCausalLM": Architecture(
        "gemma4_text",
        norms="both",
        qk_norm="head",
        ropes="by type",
        activation="hidden_activation",
        scales=_gemma4,
        kvs=_gemma4_kvs,
        widths=_gemma4_widths,
        v_norm=True,
        scaled=True,
        ple=_gemma4_ple,
        experts=("num_experts", "top_k_experts", "moe_intermediate_size", "intermediate_size"),
        mixes="enable_moe_block",
        mixture=lambda hf: {"beside": True},
        config="Gemma4TextConfig",
        text="gemma4",
    ),
    "Olmo2ForCausalLM": Architecture(
        "olmo2",
        norms="after",
        qk_norm="projection",
        biases="attention",
        kinds=FULL,
        fills=BASE | {"attention_bias": False, "rms_norm_eps": 1e-5},
    ),
    "Olmo3ForCausalLM": Architecture("olmo3", norms="after", qk_norm="projection", biases="attention", ropes="by type"),
    "SmolLM3ForCausalLM": Architecture(
        "smollm3",
        biases="all",
        ropes="some",
        fills=QWEN | {"rope_theta": 2000000.0, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True},
    ),
    "GraniteForCausalLM": Architecture(
        "granite",
        biases="all",
        kinds=FULL,
        scales=_granite,
        fills=BASE
        | {"attention_bias": False, "mlp_bias": False, "attention_multiplier": 1.0, "embedding_multiplier": 1.0}
        | {"residual_multiplier": 1.0, "logits_scaling": 1.0},
    ),
    "Phi3ForCausalLM": Architecture("phi3", kinds=SLIDING, partial=True, fused=True),
    "DreamModel": Architecture("Dream", biases="qkv", masked="always", config="Qwen2Config", fills=QWEN),
}
