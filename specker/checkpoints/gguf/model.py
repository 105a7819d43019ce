"""A model's GGUF file as a Hugging Face checkpoint: the names of its tensors, and config.json where the file's keys say
it. Source: llama.cpp's convert_hf_to_gguf.py."""

from pathlib import Path
from typing import Any

from specker.checkpoints.architectures.architecture import Architecture
from specker.checkpoints.architectures.gguf import FREQUENCIES, Keys
from specker.checkpoints.architectures.heads import QWEN
from specker.checkpoints.architectures.names import gguf_block
from specker.model.config import CheckpointError

OUTER = {"token_embd": "model.embed_tokens", "output": "lm_head"}  # names in GGUF -> in the checkpoint
MTP = {own.gguf: f"mtp.{own.name}" for own in QWEN}  # after "blk.#."


def name_of(its: Architecture, layers: int, name: str, path: Path) -> str | None:
    """The name in a Hugging Face checkpoint of `layers` layers of the tensor `name`; None if it is not used. Raises
    CheckpointError."""
    stem, _, kind = name.rpartition(".")
    own_config = its.gguf is not None and bool(its.gguf.files)
    if stem == FREQUENCIES and not own_config:
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


def config_of(file: Any, its: Architecture, keys: Keys) -> Any:
    """transformers' config of an open file of one of `Gguf.files`: those that transformers does not read, or only in
    its newest versions. Raises CheckpointError."""
    from transformers import AutoConfig

    assert its.gguf is not None
    keys.no("attention.causal", True)
    keys.no("rope.scaling.type", *its.gguf.ropes)
    if "rope.scaling.type" not in keys:  # a factor alone would be linear
        keys.no("rope.scaling.factor", 1.0, 0.0)
    rows_of = {tensor.name: int(tensor.shape[-1]) for tensor in file.tensors}
    if "token_embd.weight" not in rows_of:
        raise CheckpointError(f"{keys.path} lacks the tensor token_embd.weight; convert it again")
    tokens = {name: file.fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "padding")}
    ids = {name: None if field is None else field.contents() for name, field in tokens.items()}
    common = {
        "vocab_size": rows_of["token_embd.weight"],
        "tie_word_embeddings": "output.weight" not in rows_of,
        "max_position_embeddings": keys["context_length"],
        "hidden_size": keys["embedding_length"],
        "num_attention_heads": keys["attention.head_count"],
        "bos_token_id": ids["bos"],
        "eos_token_id": ids["eos"],
        "pad_token_id": ids["padding"],
    }
    return AutoConfig.for_model(its.model_type, **common, **its.gguf.fields(keys))
