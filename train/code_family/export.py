"""Write trained networks as Hugging Face folders: config.json, model.safetensors (bf16), tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from .corpus import EOS, MASK, PAD
from .net import Net, NetConfig


def hf_state(net: Net) -> dict[str, Tensor]:
    """Weights under transformers' names; the head is tied, so there is no lm_head."""
    c, state = net.c, {"model.embed_tokens.weight": net.embed, "model.norm.weight": net.norm}
    rows = (c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim)
    for i, b in enumerate(net.blocks):
        at = f"model.layers.{i}"
        for name, w in zip("qkv", b.qkv.split(rows), strict=True):
            state[f"{at}.self_attn.{name}_proj.weight"] = w
        if b.bias is not None:
            for name, w in zip("qkv", b.bias.split(rows), strict=True):
                state[f"{at}.self_attn.{name}_proj.bias"] = w
        state[f"{at}.self_attn.o_proj.weight"] = b.out
        state[f"{at}.mlp.gate_proj.weight"], state[f"{at}.mlp.up_proj.weight"] = b.gate_up.chunk(2)
        state[f"{at}.mlp.down_proj.weight"] = b.down
        state[f"{at}.input_layernorm.weight"], state[f"{at}.post_attention_layernorm.weight"] = b.norm1, b.norm2
    return {k: v.detach().cpu() for k, v in state.items()}


def hf_config(c: NetConfig, dtype: str = "bfloat16") -> dict:
    shared = {
        "vocab_size": c.vocab, "hidden_size": c.hidden, "intermediate_size": c.ffn, "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads, "head_dim": c.head_dim, "hidden_act": "silu",
        "max_position_embeddings": c.context, "rms_norm_eps": c.eps, "rope_theta": c.rope_theta,
        "tie_word_embeddings": True, "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True,
        "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 2, "dtype": dtype, "torch_dtype": dtype,
    }  # fmt: skip
    if c.diffusion:
        own = {"mask_token_id": 1, "use_sliding_window": False, "sliding_window": None, "rope_scaling": None}
        return {"architectures": ["DreamModel"], "model_type": "Dream"} | shared | own
    own = {"attention_bias": False, "mlp_bias": False, "rope_scaling": None, "pretraining_tp": 1}
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | shared | own


def export(net: Net, tokenizer: Path, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write `folder`, replacing its files; `tokenizer` is a tokenizer.json."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    state = {k: v.to(dtype).contiguous() for k, v in hf_state(net).items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = hf_config(net.c, str(dtype).removeprefix("torch."))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    whole = json.loads(tokenizer.read_text())
    small = json.dumps(whole, separators=(",", ":"), ensure_ascii=False)  # 0.2 MB instead of 0.5, in all four folders
    (folder / "tokenizer.json").write_text(small + "\n")
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": net.c.context,
        "bos_token": EOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "mask_token": MASK,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")
    if not net.c.diffusion:
        generation = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 2}
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def load(folder: Path, compute: torch.dtype = torch.float32) -> Net:
    """Load an exported folder as a Net."""
    from safetensors.torch import load_file

    j, w = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    names += ("vocab_size", "head_dim", "max_position_embeddings", "rope_theta", "rms_norm_eps")
    c = NetConfig(*(j[n] for n in names), diffusion=j["model_type"] == "Dream")
    net = Net(c, compute)
    with torch.no_grad():
        for name, view in hf_state(net).items():  # on the CPU these are views of the parameters
            view.copy_(w[name])
    return net
