"""An EAGLE-3 head in a GGUF file (llama.cpp's architecture `eagle3`) as a head in SafeAILab's layout.

llama.cpp stores the head's own settings under `eagle3.` and its tokenizer is the target's. `target_layers` (earlier
`extract_layers`) names the inputs of layers, and `d2t` holds the target's ids instead of their distances.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specker.checkpoints.architectures.gguf import FREQUENCIES
from specker.checkpoints.architectures.heads import EAGLE
from specker.checkpoints.architectures.names import LAYER, gguf_block
from specker.model.config import CheckpointError

ARCHITECTURE = "eagle3"
TENSORS = {own.gguf: own.name for own in EAGLE if own.gguf}  # names in GGUF -> in the checkpoint, outside of layers
TENSORS[f"{FREQUENCIES}.weight"] = f"{FREQUENCIES}.weight"
# Keys after `eagle3.` -> fields of config.json.
REQUIRED = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "target_hidden_size": "target_hidden_size",
}
OPTIONAL = {
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "attention.head_count_kv": "num_key_value_heads",
    "rope.freq_base": "rope_theta",
    "norm_before_residual": "norm_before_residual",
    "norm_before_fc": "norm_before_fc",
}
LAYERS = "target_layers", "extract_layers"
OTHERS = {  # read by their names below, or without effect
    *LAYERS,
    "attention.key_length",
    "attention.value_length",
    "attention.sliding_window",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
}


def config_of(path: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """config.json of the head. `fields`: the file's keys and values. Raises CheckpointError for keys that are missing,
    or that specker does not know."""
    start = f"{ARCHITECTURE}."
    own = {name.removeprefix(start): value for name, value in fields.items() if name.startswith(start)}
    if unknown := sorted(own.keys() - REQUIRED.keys() - OPTIONAL.keys() - OTHERS):
        raise CheckpointError(
            f"{path} has the key {start}{unknown[0]}, which specker does not know; the head may need it"
        )
    ids = next((own[name] for name in LAYERS if name in own), None)
    if missing := [name for name in REQUIRED if name not in own] or ([] if ids is not None else [LAYERS[0]]):
        raise CheckpointError(f"{path} lacks the key {start}{missing[0]}, which an EAGLE-3 head has; convert it again")
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    config |= {field: own[name] for name, field in (REQUIRED | OPTIONAL).items() if name in own}
    config["eagle_aux_hidden_state_layer_ids"] = list(ids or ())
    config.setdefault("vocab_size", len(fields.get("tokenizer.ggml.tokens", ())))
    if (width := own.get("attention.key_length") or own.get("rope.dimension_count")) is not None:
        config["head_dim"] = width
    if window := own.get("attention.sliding_window"):
        config |= {"sliding_window": window, "layer_types": ["sliding_attention"] * config["num_hidden_layers"]}
    if (kind := own.get("rope.scaling.type", "none")) != "none":
        config["rope_scaling"] = {"rope_type": kind, "factor": own.get("rope.scaling.factor")}
        if (original := own.get("rope.scaling.original_context_length")) is not None:
            config["rope_scaling"]["original_max_position_embeddings"] = original
    return config


def name_of(name: str, path: Path) -> str:
    """The name of a tensor in the checkpoint. Raises CheckpointError for an unknown one."""
    block = gguf_block(LAYER, name)
    found = TENSORS.get(name) if block is None else "layers.{}.{}".format(*block)
    if found is None:
        raise CheckpointError(f"{path} has the tensor {name}, which specker does not know; the head may need it")
    return found


def distances(ids: Tensor) -> Tensor:
    """The target's id of each row of the LM head [D] -> `d2t` [D] int64, as in safetensors."""
    return ids.long() - torch.arange(len(ids), dtype=torch.int64, device="cpu")
