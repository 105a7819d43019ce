"""The families of models that llama.cpp stores in GGUF files, and how they differ from a Hugging Face folder.

transformers makes the config from a file's keys; `mend` corrects what it leaves out. The sources are llama.cpp's
convert_hf_to_gguf.py for tensors, and src/models for values that no key of a file states.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specker.checkpoints.architectures import FULL, SLIDING
from specker.checkpoints.gguf import experts
from specker.checkpoints.gguf.blocks import Value, rows
from specker.model.config import CheckpointError

NAMES = {  # of a layer's tensors: name in GGUF -> name in the checkpoint
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
GEMMA = NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
EXPERTS = NAMES | experts.NAMES
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
QWEN_ENDS = "<|im_end|>", "<|endoftext|>"
FREQUENCIES = "rope_freqs"  # [D / 2], divisors of RoPE's frequencies, which config.json defines


class Family(NamedTuple):
    names: Mapping[str, str] = NAMES
    permuted: bool = False  # the halves of a head that RoPE rotates are interleaved
    norm_offset: float = 0.0  # was added to the norms' weights
    ends: tuple[str, ...] = ()  # tokens that end an answer, which a file does not name
    mend: Callable[[dict[str, Any], Mapping[str, Any]], dict[str, Any]] = lambda config, keys: {}
    """(transformers' config, the file's keys without the architecture's prefix) -> fields of config.json to change.
    The divisors FREQUENCIES are among the keys. Raises CheckpointError."""


NEUTRAL = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}
SCALING = {"type", "factor", "original_context_length", "finetuned", "yarn_beta_fast", "yarn_beta_slow"}


def scaled(keys: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE's scaling as config.json has it. As llama.cpp reads a file, a factor without a type is linear, and YaRN has
    the numbers of its paper unless the file has others. Raises CheckpointError for other scaling."""
    start = "rope.scaling."
    own = {name.removeprefix(start): value for name, value in keys.items() if name.startswith(start)}
    kind, factor = own.get("type", "linear"), own.get("factor", keys.get("rope.scale_linear")) or 1.0
    if kind == "none" or (kind == "linear" and factor == 1):
        return {"rope_type": "default"}
    for name in own.keys() - SCALING:
        if own[name] != NEUTRAL.get(name):
            raise CheckpointError(f"{start}{name} {own[name]} is not supported")
    found = {"rope_type": kind, "factor": factor}
    if kind == "linear":
        return found
    if kind != "yarn":
        raise CheckpointError(f"{start}type {kind} is not supported; RoPE may be scaled linearly or by YaRN")
    original = own.get("original_context_length", keys.get("context_length"))
    betas = {"beta_fast": own.get("yarn_beta_fast", 32.0), "beta_slow": own.get("yarn_beta_slow", 1.0)}
    return found | betas | {"original_max_position_embeddings": original}


def _scaled(config: dict[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """transformers leaves out how RoPE is scaled."""
    return {"rope_parameters": config["rope_parameters"] | scaled(keys)}


def _llama(config: dict[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Llama 3.1 and later: a file has the divisors of RoPE's frequencies, and not the numbers that make them."""
    divisors = keys.get(FREQUENCIES)
    if divisors is None:
        return _scaled(config, keys)
    if (kind := scaled(keys)["rope_type"]) != "default":
        raise CheckpointError(f"rope.scaling.type {kind} beside {FREQUENCIES} is not supported")
    base, factor = keys.get("rope.freq_base", 1e4), max(divisors)
    low, high, original = 1.0, 4.0, 8192  # in Meta's config.json
    for i, divisor in enumerate(divisors):
        turns = original * base ** (-i / len(divisors)) / math.tau  # of this frequency within the original context
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        if not math.isclose(divisor, 1 / ((1 - smooth) / factor + smooth), rel_tol=1e-4):
            raise CheckpointError(
                f"the file has {FREQUENCIES} that are not those of Llama 3, and specker reads no others"
            )
    given = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": original}
    return {"rope_parameters": {"rope_type": "llama3", "rope_theta": base, "factor": factor} | given}


def _mixtral(config: dict[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """In a file it is a Llama with experts."""
    check_experts(keys)
    counts = {"num_local_experts": keys["expert_count"], "num_experts_per_tok": keys["expert_used_count"]}
    return _llama(config, keys) | {"model_type": "mixtral"} | counts


def _qwen3_moe(config: dict[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """transformers leaves out the experts' intermediate size."""
    check_experts(keys)
    width = keys["expert_feed_forward_length"]
    return _scaled(config, keys) | {"moe_intermediate_size": width, "norm_topk_prob": True}


def check_experts(keys: Mapping[str, Any]) -> None:
    """Raise CheckpointError for routers that the decoder does not compute."""
    usual = {"expert_gating_func": (0, 1), "expert_shared_count": (0,), "expert_group_count": (0, 1)}
    for name, values in usual.items():
        if (value := keys.get(name, values[0])) not in values:
            raise CheckpointError(f"{name} {value} is not supported; a router must be a softmax over all experts")


def _gemma(config: dict[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Gemma 3: every sixth layer attends to all columns, and has RoPE of another base, perhaps scaled."""
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


FAMILIES = {  # by model_type
    "llama": Family(permuted=True, mend=_llama),
    "mistral": Family(permuted=True, mend=_scaled),
    "mixtral": Family(EXPERTS, permuted=True, mend=_mixtral),
    "qwen2": Family(mend=_scaled),
    "qwen3": Family(mend=_scaled),
    "qwen3_moe": Family(EXPERTS, mend=_qwen3_moe),
    "gemma3_text": Family(GEMMA, norm_offset=1.0, ends=("<end_of_turn>",), mend=_gemma),
    # hybrids.py reads these
    "qwen3_5_text": Family(ends=QWEN_ENDS),
    "qwen3_5_moe_text": Family(ends=QWEN_ENDS),
    "lfm2": Family(),
    "lfm2_moe": Family(),
    "gpt_oss": Family(),
}


def name_of(family: Family, name: str, path: Path) -> str | None:
    """The name in a Hugging Face checkpoint of the tensor `name`; None if it is not used. Raises CheckpointError."""
    stem, kind = name.rsplit(".", 1)
    if stem == FREQUENCIES:
        return None
    outer, layer = OUTER.get(stem), stem.split(".")
    if outer is None and layer[0] == "blk" and len(layer) == 3 and layer[2] in family.names:
        outer = f"model.layers.{layer[1]}.{family.names[layer[2]]}"
    if outer is None:
        raise CheckpointError(f"{path} has the tensor {name}, which no supported architecture uses")
    return f"{outer}.{kind}"


def undone(family: Family, config: Any, name: str, x: Value) -> Iterator[tuple[str, Value]]:
    """What the checkpoint has instead of x, which llama.cpp's converter made of the tensor `name`: names and values.
    `config`: transformers'."""
    part = name.split(".")[-2]
    head_counts = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    if part in head_counts and family.permuted:
        count = len(x) if isinstance(x, Tensor) else len(x.codes)
        each = torch.arange(count, dtype=torch.int64, device="cpu").view(head_counts[part], -1, 2)
        x = rows(x, each.transpose(1, 2).flatten())
    if family.norm_offset and part.endswith("norm") and isinstance(x, Tensor):
        x = x - family.norm_offset
    yield name, x
