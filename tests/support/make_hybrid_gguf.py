"""Tiny models with recurrent layers as GGUF files, named, ordered and changed as llama.cpp's converter does. Tests that
import this are skipped without the package `gguf`."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from make_checkpoint import BESIDE, LFM2, LFM2_MOE, MIXED, make
from make_gguf import LAYER, add, ended, gguf, together
from make_mtp import make_mtp
from safetensors.torch import load_file, save_file

QWEN = LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
CONVOLUTIONS = {
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    **{f"feed_forward.w{n}": f"ffn_{part}" for n, part in ((1, "gate"), (2, "down"), (3, "up"))},
    **{f"conv.{part}": f"shortconv.{part}" for part in ("conv", "in_proj", "out_proj")},
    "feed_forward.gate": "ffn_gate_inp",
    **{f"feed_forward.experts.w{n}": f"ffn_{part}_exps" for n, part in ((1, "gate"), (2, "down"), (3, "up"))},
    "feed_forward.expert_bias": "exp_probs_b.bias",
}
OUTER = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
}
MTP = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head_norm"}
# llama.cpp's architecture -> arguments of `make` or `make_mtp`. Epsilon is a number of float32, as it is in a file.
SMALL: dict[str, Any] = {**MIXED, "rms_norm_eps": 2**-20, "linear_num_value_heads": 6}
MODELS: dict[str, dict[str, Any]] = {
    "qwen35": {"arch": "qwen3_5", **SMALL},
    "qwen35moe": {"arch": "qwen3_5_moe", **SMALL, **BESIDE},
    "qwen3next": {"arch": "qwen3_next", **SMALL, **BESIDE},
    "lfm2": {**LFM2, "norm_eps": 2**-16},
    "lfm2moe": {**LFM2_MOE, "norm_eps": 2**-16, "num_dense_layers": 2, "routed_scaling_factor": 1.0},
}
CONVOLVING = "lfm2", "lfm2moe"


def source(folder: Path, arch: str, mtp: bool = False, **how: Any) -> Path:
    """A checkpoint of llama.cpp's architecture `arch` in Hugging Face's format, perhaps with an MTP head. Its numbers
    come back from a file as they were: adding 1 does not round the norms, and log brings A_log back."""
    options = MODELS[arch] | how
    if mtp:
        make_mtp(folder, "qwen3-next", **{name: value for name, value in options.items() if name != "layers"})
    else:
        make(folder, **options)
    tensors, seed = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(7)
    for name, x in tensors.items():
        if "norm" in name:
            x.mul_(2**16).round_().mul_(2**-16)
        elif name.endswith("A_log"):
            x.copy_(2 + 0.75 * torch.rand(x.shape, generator=seed))
            assert torch.equal(x, torch.log(torch.exp(x)))
        elif name.endswith("dt_bias"):
            x.sub_(4)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def write(
    path: Path,
    folder: Path,
    arch: str,
    kind: str = "F32",
    kinds: dict[str, str] | None = None,
    change: Callable[[dict[str, Any]], object] = lambda keys: None,
    drop: str = "nothing",
    part: str = "whole",
    extra: str | None = None,
    pre: str | None = None,
    sign: int = 1,
    early: bool = False,
) -> Path:
    """The checkpoint in `folder` as a GGUF file of llama.cpp's architecture `arch`. `kinds`: formats of tensors by a
    part of their names in the file. `change` edits the keys after "arch."; tensors whose names contain `drop` are left
    out, and one named `extra` is added. `part`: "model" is without MTP heads, "heads" has only them and what is outside
    of layers, and "blocks" has nothing but the heads' blocks. `pre`: the pre-tokenizer. `sign`: of ssm_a. `early`:
    Qwen3-Next's q, k, v and z are one tensor."""
    config = json.loads((folder / "config.json").read_text())
    out = gguf.GGUFWriter(path, arch)
    keys = lfm2_keys(config) if arch in CONVOLVING else qwen_keys(config)
    if part == "model":
        keys["block_count"] -= keys.pop("nextn_predict_layers")
    change(keys)
    for name, value in keys.items():
        put = {bool: out.add_bool, int: out.add_uint32, float: out.add_float32, list: out.add_array}
        (out.add_string if isinstance(value, str) else put[type(value)])(f"{arch}.{name}", value)
    letters = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
    tokens = [*letters[: config["vocab_size"] - 8], "ab", "<|im_end|>", "<|endoftext|>", "<think>"]
    tokens += [f"[PAD{n}]" for n in range(len(tokens), config["vocab_size"])]
    normal, control, defined, unused = 1, 3, 4, 5
    kinds_of = {"<|im_end|>": control, "<|endoftext|>": control, "<think>": defined}
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre(pre or ("lfm2" if arch in CONVOLVING else "qwen2" if arch == "qwen3next" else "qwen35"))
    out.add_token_list(tokens)
    out.add_token_types([unused if "PAD" in token else kinds_of.get(token, normal) for token in tokens])
    out.add_token_merges(["a b"])
    out.add_eos_token_id(tokens.index("<|im_end|>"))
    out.add_bos_token_id(tokens.index("<|endoftext|>"))
    out.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    for name, tensor in together(load_file(folder / "model.safetensors")).items():
        if early and name.endswith("in_proj_qkvz.weight"):
            found = iter([(f"blk.{name.split('.')[2]}.ssm_in.weight", tensor.numpy())])
        else:
            found = lfm2_tensors(name, tensor) if arch in CONVOLVING else qwen_tensors(name, tensor, config, arch)
        for stored, x in found:
            of_head = stored.startswith("blk.") and int(stored.split(".")[1]) >= config["num_hidden_layers"]
            others = {"whole": True, "model": True, "heads": stored[:4] != "blk.", "blocks": False}[part]
            if drop in stored or not (part != "model" if of_head else others):
                continue
            stem, plain = stored.removesuffix(".weight"), ("ssm_conv1d", "shortconv.conv", "ffn_gate_inp")
            own = next((other for part, other in (kinds or {}).items() if part in stored), kind)
            if stem == stored:  # ssm_a, ssm_dt.bias and exp_probs_b.bias
                out.add_tensor(stored, sign * x if stored.endswith("ssm_a") else x)
            else:
                add(out, stem, x, "F32" if x.ndim == 1 or any(part in stem for part in plain) else own)
    if extra is not None:
        add(out, extra, np.ones(4, np.float32), "F32")
    ended(out)
    return path


def common_keys(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "attention.head_count": config["num_attention_heads"],
        "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        "attention.layer_norm_rms_epsilon": float(config.get("rms_norm_eps", config.get("norm_eps"))),
    }


def qwen_keys(config: dict[str, Any]) -> dict[str, Any]:
    heads, D = config["linear_num_value_heads"], config["head_dim"]
    share, extra = config["rope_parameters"]["partial_rotary_factor"], config.get("num_nextn_predict_layers", 0)
    keys = common_keys(config) | {
        "block_count": config["num_hidden_layers"] + extra,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": D,
        "attention.value_length": D,
        "rope.dimension_count": int(D * share),
        "rope.dimension_sections": [11, 11, 10, 0],
        "full_attention_interval": 4,
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * config["linear_value_head_dim"],
    }
    if extra:
        keys["nextn_predict_layers"] = extra
    if "num_experts" not in config:
        return keys | {"feed_forward_length": config["intermediate_size"]}
    return keys | {
        "expert_count": config["num_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
    }


def lfm2_keys(config: dict[str, Any]) -> dict[str, Any]:
    kv = config["num_key_value_heads"]
    keys = common_keys(config) | {
        "block_count": config["num_hidden_layers"],
        "attention.head_count_kv": [kv if kind == "full_attention" else 0 for kind in config["layer_types"]],
        "vocab_size": config["vocab_size"],
        "shortconv.l_cache": config["conv_L_cache"],
    }
    if "num_experts" not in config:
        width, step = int(2 * config["intermediate_size"] / 3), config["block_multiple_of"]
        return keys | {"feed_forward_length": -(-width // step) * step}
    return keys | {
        "feed_forward_length": config["intermediate_size"],
        "expert_count": config["num_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "leading_dense_block_count": config["num_dense_layers"],
        "expert_gating_func": 2,
    }


def stored_name(name: str, names: dict[str, str], layers: int = 0) -> str:
    """The name of a checkpoint's tensor in a file, without its last part. The head is a block after the last layer."""
    stem = re.sub(r"\.(weight|bias)$", "", name)
    if (found := re.fullmatch(r"(model|mtp)\.layers\.(\d+)\.(.+)", stem)) is not None:
        return f"blk.{int(found[2]) + layers * (found[1] == 'mtp')}.{names.get(found[3], found[3])}"
    return f"blk.{layers}.nextn.{MTP[stem[4:]]}" if stem.startswith("mtp.") else OUTER[stem]


def lfm2_tensors(name: str, x: torch.Tensor) -> Iterator[tuple[str, np.ndarray]]:
    stored = stored_name(name, CONVOLUTIONS)
    stored += "" if stored.endswith(".bias") else ".weight"
    yield stored, x.numpy().squeeze(1) if "conv.conv" in name else x.numpy()


def tiled(x: np.ndarray, axis: int, config: dict[str, Any]) -> np.ndarray:
    """The value heads of an axis, the first one of each key head first."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    shape = x.shape[:axis], x.shape[axis + 1 :]
    split = x.reshape(*shape[0], keys, heads // keys, -1, *shape[1])
    return split.swapaxes(axis, axis + 1).reshape(x.shape)


def qwen_tensors(name: str, t: torch.Tensor, config: dict[str, Any], arch: str) -> Iterator[tuple[str, np.ndarray]]:
    x, stored, own = t.numpy(), stored_name(name, QWEN, config["num_hidden_layers"]), name.rpartition("linear_attn.")[2]
    keys, Dk = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values, key_rows = config["linear_num_value_heads"] * config["linear_value_head_dim"], 2 * keys * Dk
    if arch != "qwen3next" and own in ("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight", "in_proj_z.weight"):
        x = tiled(x, 0, config)
    if arch != "qwen3next" and own in ("in_proj_qkv.weight", "conv1d.weight"):
        x = np.concatenate((x[:key_rows], tiled(x[key_rows:], 0, config)))
    if arch != "qwen3next" and own == "out_proj.weight":
        x = tiled(x, 1, config)
    if own == "A_log":
        yield stored.replace("linear_attn.A_log", "ssm_a"), -torch.exp(torch.from_numpy(x)).numpy()
    elif own == "dt_bias":
        yield stored.replace("linear_attn.dt_bias", "ssm_dt.bias"), x
    elif own == "conv1d.weight":
        yield f"{stored}.weight", x.squeeze(1)
    elif own == "in_proj_qkvz.weight":
        each = x.reshape(keys, -1, x.shape[1])
        q, k, v, z = np.split(each, np.cumsum((Dk, Dk, values // keys)), 1)
        flat = [part.reshape(-1, x.shape[1]) for part in (q, k, v, z)]
        block = stored.removesuffix("linear_attn.in_proj_qkvz")
        yield f"{block}attn_qkv.weight", np.concatenate(flat[:3])
        yield f"{block}attn_gate.weight", flat[3]
    elif ("norm" in name and own != "norm.weight") or name.startswith(("model.norm", "mtp.norm")):
        yield f"{stored}.weight", x + 1
    else:
        yield f"{stored}.weight", x
