"""Tiny checkpoints as GGUF files, named and ordered as llama.cpp does. Tests that import this are skipped without the
package `gguf`."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specker.checkpoints.gguf_blocks import BLOCKS

gguf = pytest.importorskip("gguf")

LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    # mixtures: Qwen3-MoE's names, and Mixtral's
    **{f"{module}.gate": "ffn_gate_inp" for module in ("mlp", "block_sparse_moe")},
    **{f"mlp.experts.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
    **{f"block_sparse_moe.experts.w{n}": f"ffn_{part}_exps" for n, part in ((1, "gate"), (3, "up"), (2, "down"))},
    "hidden_norm": "attn_norm_2",  # an EAGLE-3 head's
}
GEMMA = LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
HEAD = {"fc": "fc", "embed_tokens": "token_embd", "input_norm": "enc.output_norm", "norm": "output_norm"}


def begun(path: Path, arch: str, config: dict[str, Any]) -> Any:
    """A writer with the keys of every model and head."""
    out = gguf.GGUFWriter(path, arch)
    out.add_block_count(config["num_hidden_layers"])
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(config["num_attention_heads"])
    out.add_head_count_kv(config["num_key_value_heads"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_rope_dimension_count(config["head_dim"] or config["hidden_size"] // config["num_attention_heads"])
    out.add_vocab_size(config["vocab_size"])
    return out


def ended(out: Any) -> None:
    """Write the file."""
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def interleaved(name: str, x: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """The rows of q and k in llama.cpp's order, in which the halves of a head that RoPE rotates alternate."""
    counts = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    if (count := counts.get(name.split(".")[-1])) is None:
        return x
    return x.reshape(count, 2, -1, x.shape[1]).swapaxes(1, 2).reshape(x.shape)


def add(out: Any, name: str, x: np.ndarray, kind: str) -> None:
    """Add a tensor in blocks of `kind`."""
    out.add_tensor(f"{name}.weight", quantised(x, kind), raw_dtype=gguf.GGMLQuantizationType[kind])


def quantised(x: np.ndarray, kind: str) -> np.ndarray:
    """Blocks of `kind`: x rounded, or random numbers where the package `gguf` does not round."""
    type_ = gguf.GGMLQuantizationType[kind]
    if x.ndim == 3:
        return quantised(x.reshape(-1, x.shape[2]), kind).reshape(*x.shape[:2], -1)
    try:
        return gguf.quants.quantize(np.ascontiguousarray(x), type_)
    except NotImplementedError:
        return random_blocks(kind, x.shape[0], x.shape[1], seed=x.size)


def random_blocks(kind: str, O: int, E: int, seed: int = 0) -> np.ndarray:
    """Blocks of a K format with random bytes, of weights about 0.1."""
    rng = np.random.default_rng(seed)
    weights, size = BLOCKS[kind][:2]
    out = rng.integers(0, 256, (O, E // weights, size), dtype=np.uint8)
    spread, middle = {"Q4_K": (224, 7.5), "Q5_K": (480, 15.5), "Q6_K": (1330, 0)}[kind]
    d = (0.1 * (0.5 + rng.random((O, E // weights, 1))) / spread).astype(np.float16)
    at = 208 if kind == "Q6_K" else 0
    out[..., at : at + 2] = d.view(np.uint8)
    if middle:  # d s q - m t is about 0 on average
        out[..., 2:4] = (d * np.float16(middle)).view(np.uint8)
    return out.reshape(O, -1)


def write(
    path: Path,
    folder: Path,
    kind: str = "Q8_0",
    arch: str = "llama",
    kinds: dict[str, str] | None = None,
    more: Callable[[Any], object] = lambda out: None,
    extra: dict[str, np.ndarray] | None = None,
    tokenizer: str = "gpt2",
) -> Path:
    """The tiny Llama, Gemma 3 or mixture in `folder` as a GGUF file with a byte-level tokenizer and a chat template.
    `kinds`: formats of single tensors, by a part of their names. `more` adds keys, `extra` tensors."""
    config = json.loads((folder / "config.json").read_text())
    out = begun(path, arch, config)
    rope = config["rope_parameters"]
    out.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    more(out)
    tokens = [*(chr(33 + i) for i in range(94)), "ab"]
    tokens += [f"<{i}>" for i in range(config["vocab_size"] - len(tokens))]
    out.add_tokenizer_model(tokenizer)
    out.add_tokenizer_pre("smollm")
    out.add_token_list(tokens)
    out.add_token_types([gguf.TokenType.NORMAL] * 95 + [gguf.TokenType.CONTROL] * (len(tokens) - 95))
    out.add_token_merges(["a b"])
    out.add_bos_token_id(95)
    out.add_eos_token_id(96)
    out.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    names = GEMMA if arch == "gemma3" else LAYER
    for name, tensor in together(load_file(folder / "model.safetensors")).items():
        stem, x = name.removesuffix(".weight"), tensor.numpy()
        if (stored := OUTER.get(stem)) is None:
            layer, rest = stem.removeprefix("model.layers.").split(".", 1)
            stored = f"blk.{layer}.{names[rest]}"
        if arch == "gemma3" and "norm" in name:
            x = x + 1
        x = interleaved(stored, x, config) if arch == "llama" else x
        own = next((other for part, other in (kinds or {}).items() if part in name), kind)
        add(out, stored, x, "F32" if x.ndim == 1 or name.endswith(".gate.weight") else own)
    for name, array in (extra or {}).items():
        out.add_tensor(name, array)
    ended(out)
    return path


def together(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, with those of a layer's experts as one [X, O, E]."""
    found: dict[str, list[torch.Tensor]] = {}
    for name in sorted(tensors, key=lambda name: [int(x) if x.isdigit() else 0 for x in name.split(".")]):
        found.setdefault(re.sub(r"experts\.\d+", "experts", name), []).append(tensors[name])
    return {name: each[0] if "experts" not in name else torch.stack(each) for name, each in found.items()}


def write_head(
    path: Path,
    folder: Path,
    kind: str = "F32",
    layers: str = "target_layers",
    keys: dict[str, int] | None = None,
    drop: tuple[str, ...] = (),
    tensors: dict[str, torch.Tensor] | None = None,
) -> Path:
    """The EAGLE-3 head of one layer in `folder` as a GGUF file. `layers`: the key of the target's layers that it reads;
    "": without it. `keys`, `tensors`: further ones. `drop`: names of tensors that are left out."""
    config = json.loads((folder / "config.json").read_text())
    out = begun(path, "eagle3", config)
    out.add_rope_freq_base(config["rope_theta"])
    if layers:
        out.add_array(f"eagle3.{layers}", config.get("eagle_aux_hidden_state_layer_ids", [2, 4, 5]))
    out.add_uint32("eagle3.target_hidden_size", config.get("target_hidden_size", config["hidden_size"]))
    out.add_bool("eagle3.norm_before_residual", config.get("norm_before_residual", False))
    if config.get("norm_before_fc"):
        out.add_bool("eagle3.norm_before_fc", True)
    for name, value in (keys or {}).items():
        out.add_uint32(f"eagle3.{name}", value)
    for name, tensor in {**load_file(folder / "model.safetensors"), **(tensors or {})}.items():
        stem, x = name.removesuffix(".weight"), tensor.numpy()
        if name == "d2t":  # llama.cpp stores ids instead of distances
            out.add_tensor("d2t", x + np.arange(len(x)), raw_dtype=gguf.GGMLQuantizationType.I64)
        if name in ("t2d", "d2t", *drop):
            continue
        inner = re.fullmatch(r"(?:midlayer|layers\.0)\.(.+)", stem)
        stored = f"blk.0.{LAYER[inner[1]]}" if inner else (OUTER | HEAD).get(stem, stem)
        x = interleaved(stored, x.astype(np.float32), config)
        add(out, stored, x, kind if x.ndim == 2 else "F32")
    ended(out)
    return path
