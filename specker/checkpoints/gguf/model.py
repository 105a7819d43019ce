"""A model's GGUF file as a Hugging Face checkpoint: the names of its tensors, and config.json where the file's keys say
it. Source: llama.cpp's convert_hf_to_gguf.py."""

from pathlib import Path
from typing import Any

from specker.checkpoints.architectures.architecture import Architecture
from specker.checkpoints.architectures.gguf import FREQUENCIES, Keys
from specker.checkpoints.architectures.heads import QWEN
from specker.checkpoints.architectures.names import gguf_block
from specker.model.config import CheckpointError

OUTER = {  # names in GGUF -> in the checkpoint
    "token_embd": "model.embed_tokens",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
MTP = {own.gguf: f"mtp.{own.name}" for own in QWEN}  # after "blk.#."


def name_of(its: Architecture, layers: int, name: str, path: Path) -> str | None:
    """The name in a Hugging Face checkpoint of `layers` layers of the tensor `name`; None if it is not used. Raises
    CheckpointError."""
    stem, _, kind = name.rpartition(".")
    assert its.gguf is not None
    own_config = bool(its.gguf.files)
    if stem in (its.gguf.unread if own_config else (FREQUENCIES,)):
        return None
    outer = OUTER | {its.final.gguf: f"model.{its.final.name}"}
    if stem in outer:
        return f"{outer[stem]}.{kind}"
    if (block := gguf_block(its.names, name)) is not None:
        n, own = block
        return f"mtp.layers.{n - layers}.{own}" if own_config and n >= layers else f"model.layers.{n}.{own}"
    start = f"blk.{layers}."  # an MTP head, or several that share these
    if own_config and name.startswith(start) and (found := MTP.get(name.removeprefix(start))) is not None:
        return found
    raise CheckpointError(f"{path} has the tensor {name}, which no supported architecture uses")


def only_head(keys: Keys) -> bool:
    """Whether the file holds only the MTP heads of a model: blocks after its last layer, and copies of its embedding,
    final norm and LM head. Its keys are the whole model's (llama.cpp's `convert_hf_to_gguf.py --mtp`)."""
    return bool(keys.get("nextn_predict_layers")) and "blk.0.attn_norm.weight" not in keys.shapes


def config_of(file: Any, its: Architecture, keys: Keys) -> Any:
    """transformers' config of an open file of one of `Gguf.files`: those that transformers does not read, or only in
    its newest versions. Raises CheckpointError."""
    from transformers import AutoConfig

    assert its.gguf is not None
    keys.no("attention.causal", True)
    keys.no("rope.scaling.type", *its.gguf.ropes)
    if "rope.scaling.type" not in keys:  # a factor alone would be linear
        keys.no("rope.scaling.factor", 1.0, 0.0)
    if "token_embd.weight" not in keys.shapes and not only_head(keys):
        raise CheckpointError(f"{keys.path} lacks the tensor token_embd.weight; convert it again")
    tokens = {name: file.fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "padding")}
    ids = {name: None if field is None else field.contents() for name, field in tokens.items()}
    common = {
        "vocab_size": keys.shapes["token_embd.weight"][0] if "token_embd.weight" in keys.shapes else keys["vocab_size"],
        "tie_word_embeddings": "output.weight" not in keys.shapes,
        "max_position_embeddings": keys["context_length"],
        "hidden_size": keys["embedding_length"],
        "num_attention_heads": keys["attention.head_count"],
        "bos_token_id": ids["bos"],
        "eos_token_id": ids["eos"],
        "pad_token_id": ids["padding"],
    }
    return AutoConfig.for_model(its.model_type, **common, **its.gguf.fields(keys))
