"""Write a trained head as a folder for engines: an EAGLE-3 head in SafeAILab's flat layout (SpecForge, SGLang) or in
speculators' (vLLM), a drafter of blocks in z-lab's, DeepSpec's or SpecForge's."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specker.checkpoints.parse import read_json
from train.head.assistant import Reader
from train.head.blocks import Blocks
from train.head.chained import PLAIN, Gru, Markov
from train.head.eagle import Head
from train.head.net import Net

LAYOUTS = ("flat", "speculators")
ARCHITECTURES = {"dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel", "domino": "DominoDraftModel"}
# Head's parameters -> their names in files, where LAYER is midlayer. (flat) or layers.0. (speculators)
NAMES = {
    "fc": "fc.weight",
    "q": "LAYER.self_attn.q_proj.weight",
    "k": "LAYER.self_attn.k_proj.weight",
    "v": "LAYER.self_attn.v_proj.weight",
    "o": "LAYER.self_attn.o_proj.weight",
    "gate": "LAYER.mlp.gate_proj.weight",
    "up": "LAYER.mlp.up_proj.weight",
    "down": "LAYER.mlp.down_proj.weight",
    "embedding_norm": "LAYER.input_layernorm.weight",
    "hidden_norm": "LAYER.hidden_norm.weight",
    "post_norm": "LAYER.post_attention_layernorm.weight",
    "norm": "norm.weight",
    "head": "lm_head.weight",
}
BLOCK_NAMES = {  # a layer's parameters of Blocks -> their names in files
    **{name: f"self_attn.{name}_proj.weight" for name in "qkvo"},
    **{name: f"self_attn.{name}.weight" for name in ("q_norm", "k_norm")},
    **{name: f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    "norm_in": "input_layernorm.weight",
    "norm_post": "post_attention_layernorm.weight",
}

CHAINED_NAMES = {  # parameters of what chains a block's tokens -> their names in files
    "dspark": {name: f"markov_head.markov_{name}.weight" for name in ("w1", "w2")},
    "domino": {
        "entering": "prefix_gru.weight_ih_l0",
        "recurrent": "prefix_gru.weight_hh_l0",
        "joint": "embed_proj.0.weight",
        "w2": "embed_proj.2.weight",
    },
}
READER_NAMES = {  # a layer's parameters of Reader -> their names in files
    **{name: f"self_attn.{name}_proj.weight" for name in "qo"},
    "q_norm": "self_attn.q_norm.weight",
    **{name: f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    "norm_in": "input_layernorm.weight",
    "norm_o": "post_attention_layernorm.weight",
    "norm_post": "pre_feedforward_layernorm.weight",
    "norm_down": "post_feedforward_layernorm.weight",
}


def export(net: Head, target: Path, folder: Path, layout: str, name: str) -> None:
    """Write the head in bfloat16, without the embedding, which is the target's. `target`: its folder. `name`: its name
    for readers of config.json."""
    layer = "midlayer" if layout == "flat" else "layers.0"
    tensors = {
        file.replace("LAYER", layer): getattr(net, own).detach().to(torch.bfloat16).contiguous()
        for own, file in NAMES.items()
    }
    tensors |= maps(net.ids, net.config.vocab_size)
    _write(folder, tensors, flat(net, target) if layout == "flat" else speculators(net, target, name))


def export_blocks(net: Blocks, target: Path, folder: Path) -> None:
    """Write a drafter of blocks in bfloat16, without embedding and LM head, which are the target's. `target`: its
    folder. DFlash and DSpark in the layouts of z-lab and DeepSpec, Domino in SpecForge's."""
    tensors = {f"{name}.weight": getattr(net, name) for name in ("fc", "hidden_norm", "norm")}
    for n, layer in enumerate(net.layers):
        tensors |= {f"layers.{n}.{file}": getattr(layer, own) for own, file in BLOCK_NAMES.items()}
    tensors |= {file: getattr(net.chained, own) for own, file in CHAINED_NAMES.get(net.kind, {}).items()}
    tensors = {name: x.detach().to(torch.bfloat16).contiguous() for name, x in tensors.items()}
    config = {"architectures": [ARCHITECTURES[net.kind]], **layer_config(net, target, "qwen3")}
    config |= {"num_hidden_layers": len(net.layers), "tie_word_embeddings": True, "torch_dtype": "bfloat16"}
    config |= {"block_size": net.size, "num_target_layers": net.config.num_layers}
    own: dict[str, Any] = {
        "mask_token_id": int(net.mask),
        "target_layer_ids": [depth - 1 for depth in net.taps],  # the outputs of layers
    }
    if isinstance(net.chained, Markov):
        config |= own | {"markov_rank": net.chained.w2.shape[1], "markov_head_type": "vanilla"}
    elif isinstance(net.chained, Gru):
        rank = net.chained.w2.shape[1]
        own |= {"emb_dim": rank, "gru_hidden_dim": rank, "pure_draft_prefix_len": PLAIN, "shift_label": False}
        config["dflash_config"] = own
    else:
        config["dflash_config"] = own
    _write(folder, tensors, config)


def export_reader(net: Reader, target: Path, whole: Tensor, folder: Path) -> None:
    """Write an assistant in bfloat16, in the layout of gemma4_assistant. Its LM head is a copy of the target's,
    `whole` [V, H]. `target`: its folder."""
    tensors = {"model.norm.weight": net.norm, "model.embed_tokens.weight": whole}
    tensors |= {"pre_projection.weight": net.pre, "post_projection.weight": net.post}
    for n, layer in enumerate(net.layers):
        own = {f"model.layers.{n}.{file}": getattr(layer, name) for name, file in READER_NAMES.items()}
        tensors |= own | {f"model.layers.{n}.layer_scalar": net.norm.new_ones(1)}
    tensors = {name: x.detach().to(torch.bfloat16).contiguous() for name, x in tensors.items()}
    c, full, fields = net.config, "full_attention", layer_config(net, target, "gemma4_text")
    rope = {"rope_type": "default", **(fields.pop("rope_scaling") or {}), "rope_theta": fields.pop("rope_theta")}
    text = fields | {
        "hidden_activation": fields.pop("hidden_act"),
        "num_hidden_layers": len(net.layers),
        "num_kv_shared_layers": len(net.layers),
        "layer_types": [full] * len(net.layers),
        "global_head_dim": c.head_dim,
        "rope_parameters": {full: rope, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}},
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
        "attention_k_eq_v": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config = {"architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant"}
    config |= {"backbone_hidden_size": c.hidden_size, "use_ordered_embeddings": False, "tie_word_embeddings": True}
    _write(folder, tensors, config | {"text_config": text, "dtype": "bfloat16"})


def _write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    part = folder.with_name(f"{folder.name}.part")
    part.mkdir(parents=True, exist_ok=True)
    save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
    (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    folder.mkdir(exist_ok=True)
    for file in part.iterdir():
        file.replace(folder / file.name)
    part.rmdir()


def maps(ids: Tensor, vocab: int) -> dict[str, Tensor]:
    """d2t, the distance from a row's number to its token, and t2d, which tokens are kept; {} if all are."""
    if len(ids) == vocab:
        return {}
    return {"d2t": ids - torch.arange(len(ids)), "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)}


def layer_config(net: Net, target: Path, model_type: str = "llama") -> dict[str, Any]:
    """The fields of layers of the head's sizes. RoPE as engines of all ages read it."""
    c, raw = net.config, read_json(target / "config.json")
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = rope.pop("rope_theta", raw.get("rope_theta", 10000.0))
    scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
    return {
        "model_type": model_type,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": c.vocab_size,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": theta,
        "rope_scaling": rope if scaled else None,
        "max_position_embeddings": c.max_context,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def flat(net: Head, target: Path) -> dict[str, Any]:
    config = {"architectures": ["LlamaForCausalLMEagle3"], **layer_config(net, target), "mlp_bias": False}
    config |= {"draft_vocab_size": len(net.ids), "torch_dtype": "bfloat16"}
    if net.taps != default_taps(net.config.num_layers):  # engines read the nested ids as the outputs of layers
        ids = [depth - 1 for depth in net.taps]
        config["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids}
    return config


def speculators(net: Head, target: Path, name: str) -> dict[str, Any]:
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    architectures = read_json(target / "config.json").get("architectures") or []
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "draft_vocab_size": len(net.ids),
        "norm_before_residual": False,
        "norm_before_fc": False,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": list(net.taps),
        "transformer_layer_config": {**layer_config(net, target), "mlp_bias": False},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": name, "architectures": architectures},
        },
    }


def default_taps(layers: int) -> tuple[int, int, int]:
    """The depths that a head reads if its config names none."""
    return 2, layers // 2, layers - 3
