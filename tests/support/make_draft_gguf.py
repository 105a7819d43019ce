"""Drafters of blocks, Gemma 4 and its assistants as GGUF files, named as llama.cpp's converter does (conversion/qwen.py
and gemma.py). Tests that import this are skipped without the package `gguf`."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from make_gguf import GEMMA, LAYER, ended, gguf, quantised
from safetensors.torch import load_file

BLOCKS = LAYER | {
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
}
OUTER = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "hidden_norm": "enc.output_norm",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection": "selector_hidden",
    "pre_projection": "nextn.pre_projection",
    "post_projection": "nextn.post_projection",
    "embed_tokens_per_layer": "per_layer_token_embd",
    "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
}
GEMMA4 = GEMMA | {
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "layer_scalar": "layer_output_scale.weight",
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
}


def stored(name: str, names: dict[str, str]) -> str:
    """The name in a file of a checkpoint's tensor."""
    name = name.removeprefix("model.")
    stem, end = re.fullmatch(r"(.+?)(\.weight|\.bias)?", name).groups()  # type: ignore[union-attr]
    if (layer := re.fullmatch(r"layers\.(\d+)\.(.+)", stem)) is not None:
        return f"blk.{layer[1]}.{names[layer[2]]}{end or ''}"
    return OUTER.get(stem, stem) + (end or "")


def write(path: Path, arch: str, keys: dict[str, Any], tensors: dict[str, np.ndarray], kinds: dict[str, str]) -> Path:
    """A file with keys after "arch.", or whole ones with a dot before them. `kinds`: formats of tensors by a part of
    their names; others are in float32."""
    out = gguf.GGUFWriter(path, arch)
    for name, value in keys.items():
        whole = name[1:] if name.startswith(".") else f"{arch}.{name}"
        put = {bool: out.add_bool, int: out.add_uint32, float: out.add_float32, str: out.add_string}
        put.get(type(value), out.add_array)(whole, value)
    for name, x in tensors.items():
        kind = next((own for part, own in kinds.items() if part in name and x.ndim > 1), None)
        if kind is None or x.dtype == np.int64:
            out.add_tensor(name, x)
        else:
            out.add_tensor(name, quantised(x, kind), raw_dtype=gguf.GGMLQuantizationType[kind])
    ended(out)
    return path


def common(c: dict[str, Any]) -> dict[str, Any]:
    return {
        "block_count": c["num_hidden_layers"],
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "feed_forward_length": c["intermediate_size"],
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": c["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(c["rms_norm_eps"]),
        ".tokenizer.ggml.tokens": [f"<{n}>" for n in range(c["vocab_size"])],
    }


def write_blocks(
    path: Path,
    folder: Path,
    kinds: dict[str, str] | None = None,
    keys: dict[str, Any] | None = None,
    drop: str = "nothing",
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """A drafter of blocks of `make_dflash`. `keys`, `extra`: further keys, and tensors; `drop`: keys, and tensors of
    this name, that are left out."""
    raw = json.loads((folder / "config.json").read_text())
    c = raw | raw.get("transformer_layer_config", {}) | raw.get("dflash_config", {})
    ids = c.get("target_layer_ids") or [n - 1 for n in c["aux_hidden_state_layer_ids"]]
    spark = raw["architectures"][0] == "Qwen3DSparkModel" or raw.get("speculators_model_type") == "dspark"
    tensors = {name: x.float().numpy() if x.is_floating_point() else x for name, x in tensors_of(folder).items()}
    if spark and "d2t" not in tensors:
        tensors.pop("lm_head.weight", None)  # it is the target's
    found = common(c) | {
        "rope.freq_base": float(c["rope_theta"]),
        "attention.key_length": c["head_dim"],
        "attention.value_length": c["head_dim"],
        "block_size": c["block_size"],
        "target_layers": [n + 1 for n in ids],
        ".tokenizer.ggml.mask_token_id": c["mask_token_id"],
    }
    if c.get("use_sliding_window"):
        slides = [kind == "sliding_attention" for kind in c["layer_types"]]
        found |= {"attention.sliding_window": c["sliding_window"], "attention.sliding_window_pattern": slides}
    if spark:
        found |= {"sample_from_anchor": c.get("sample_from_anchor", True)}
        found |= {"has_confidence_head": "confidence_head.proj.weight" in tensors}
    named = {
        "is_causal": "attention.causal",
        "output_multiplier": "logit_scale",
        "input_embedding_scale": "embedding_scale",
        "final_logit_softcapping": "final_logit_softcapping",
        **{name: name for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")},
    }
    found |= {own: c[name] for name, own in named.items() if name in c} | (keys or {})
    if (maps := tensors.pop("d2t", None)) is not None:  # ids instead of distances
        tensors["d2t"] = (maps + torch.arange(len(maps))).numpy()
    tensors.pop("t2d", None)
    tensors = {stored(name, BLOCKS): x for name, x in tensors.items()} | (extra or {})
    found, tensors = ({name: x for name, x in each.items() if name != drop} for each in (found, tensors))
    return write(path, "dflash", found, tensors, kinds or {})


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def gemma4_keys(c: dict[str, Any], raw: dict[str, Any]) -> dict[str, Any]:
    """The keys of a Gemma 4 or, with a config `raw` around its layers' `c`, of an assistant."""
    kinds = [kind == "sliding_attention" for kind in c["layer_types"]]
    full = c.get("per_layer_config", {}).get(str(kinds.index(False)), {})
    wide, near = c.get("global_head_dim") or full["head_dim"], c["head_dim"]
    heads = c.get("num_global_key_value_heads") or full.get("num_key_value_heads")
    shared, ffn = c["num_kv_shared_layers"], c["intermediate_size"]
    whole, sliding = (c["rope_parameters"][f"{kind}_attention"] for kind in ("full", "sliding"))
    keys = common(c) | {
        "attention.key_length": wide,
        "attention.value_length": wide,
        "attention.key_length_swa": near,
        "attention.value_length_swa": near,
        "attention.shared_kv_layers": shared,
        "attention.sliding_window": c["sliding_window"],
        "attention.sliding_window_pattern": kinds,
        "rope.dimension_count": wide,
        "rope.dimension_count_swa": near,
        "rope.freq_base": float(whole["rope_theta"]),
        "rope.freq_base_swa": float(sliding["rope_theta"]),
        "embedding_length_per_layer_input": c["hidden_size_per_layer_input"],
    }
    if heads:
        keys["attention.head_count_kv"] = [c["num_key_value_heads"] if each else heads for each in kinds]
    if c.get("use_double_wide_mlp"):
        keys["feed_forward_length"] = [ffn * (1 + (n >= len(kinds) - shared)) for n in range(len(kinds))]
    if c.get("final_logit_softcapping"):
        keys["final_logit_softcapping"] = float(c["final_logit_softcapping"])
    if c.get("enable_moe_block"):
        keys |= {"expert_count": c["num_experts"], "expert_used_count": c["top_k_experts"]}
        keys["expert_feed_forward_length"] = c["moe_intermediate_size"]
    if raw is not c:
        keys |= {"embedding_length_out": raw["backbone_hidden_size"], "nextn_predict_layers": len(kinds)}
    return keys


SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def gemma4_tokens(vocab: int) -> dict[str, Any]:
    """A tokenizer with the bytes' tokens that Gemma 4's has, as far as there is room."""
    normal, control, byte = 1, 3, 6
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>", SPACE, "a", "b", f"{SPACE}a", "\n", "\n\n"]
    kinds = [control] * 5 + [normal] * 6
    for n in range(min(256, vocab - len(tokens))):
        tokens.append(f"<0x{n:02X}>")
        kinds.append(byte)
    tokens += [f"[{n}]" for n in range(len(tokens), vocab)]
    return {
        ".tokenizer.ggml.model": "gemma4",
        ".tokenizer.ggml.tokens": tokens,
        ".tokenizer.ggml.token_type": kinds + [normal] * (vocab - len(kinds)),
        ".tokenizer.ggml.merges": [f"{SPACE} a", "\n \n"],
        **{f".tokenizer.ggml.{name}_token_id": n for n, name in enumerate(("padding", "eos", "bos", "unknown"))},
    }


def write_gemma4(
    path: Path,
    folder: Path,
    kinds: dict[str, str] | None = None,
    keys: dict[str, Any] | None = None,
    apart: bool = False,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """A Gemma 4 or one of its assistants. `apart`: gates and up projections of experts are two tensors, as in earlier
    files. `keys`, `extra`: further keys and tensors."""
    raw = json.loads((folder / "config.json").read_text())
    c = raw.get("text_config", raw)
    tensors: dict[str, np.ndarray] = {}
    for name, x in tensors_of(folder).items():
        if name.startswith("masked_embedding."):
            continue
        if raw.get("tie_word_embeddings", True) and name == "lm_head.weight":
            name = "model.embed_tokens.weight"
        tensors[stored(name, GEMMA4)] = x.numpy()
    for name in [name for name in tensors if apart and "ffn_gate_up_exps" in name]:
        gate, up = np.split(tensors.pop(name), 2, axis=1)
        tensors |= {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
    found = gemma4_keys(c, raw) | gemma4_tokens(c["vocab_size"])
    half = found["attention.key_length"] // 2
    rotated = int(half * c["rope_parameters"]["full_attention"]["partial_rotary_factor"])
    tensors["rope_freqs.weight"] = np.array([1.0] * rotated + [1e30] * (half - rotated), np.float32)
    arch = "gemma4" if raw is c else "gemma4-assistant"
    return write(path, arch, found | (keys or {}), tensors | (extra or {}), kinds or {})
