"""A draft head in a GGUF file as a folder that its reader (drafts/) opens: EAGLE-3, DFlash, DFlash2, DSpark and Gemma
4's assistants.

llama.cpp stores a head's own settings under its architecture's name, and its tokenizer is the target's. `target_layers`
(earlier `extract_layers`) names the inputs of layers, and `d2t` holds the target's ids instead of their distances. The
tensors of the architecture `dflash` say the kind. An assistant's clusters of ids are left out, as in llama.cpp: its LM
head is read whole. Sources: llama.cpp's conversion/qwen.py and gemma.py, src/models/dflash.cpp and
gemma4-assistant.cpp.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specker.checkpoints.architectures import gemma4
from specker.checkpoints.architectures.architecture import FULL, SLIDING
from specker.checkpoints.architectures.gguf import FREQUENCIES, File, Keys, Undo, as_it_is, scaled
from specker.checkpoints.architectures.heads import ASSISTANT, BLOCKS, EAGLE, HeadTable
from specker.checkpoints.architectures.llama import interleaved
from specker.checkpoints.architectures.names import LAYER, Names, TensorName, gguf_block
from specker.model.config import CheckpointError

# Keys after the architecture's name -> fields of config.json
REQUIRED = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
OPTIONAL = {
    "context_length": "max_position_embeddings",
    "attention.head_count_kv": "num_key_value_heads",
    "rope.freq_base": "rope_theta",
}
OF_EAGLE = {name: name for name in ("target_hidden_size", "norm_before_residual", "norm_before_fc")}
OF_BLOCKS = {
    "attention.causal": "is_causal",
    "embedding_scale": "input_embedding_scale",
    "logit_scale": "output_multiplier",
    "mask_token_id": "mask_token_id",
    **{name: name for name in ("block_size", "sample_from_anchor", "final_logit_softcapping")},
    **{name: name for name in ("conv_group_size", "conv_kernel_size", "selector_rank", "selector_top_k")},
}
LAYERS = "target_layers", "extract_layers"
READ = {  # otherwise, or without effect
    *LAYERS,
    "attention.key_length",
    "attention.value_length",
    "attention.sliding_window",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "mask_token_id",
    FREQUENCIES,
}


def config_of(keys: Keys, head: "Head") -> dict[str, Any]:
    """config.json of a head. Raises CheckpointError for keys that are missing, or that specker does not know."""
    optional = {**OPTIONAL, **head.optional}
    if unknown := sorted(keys.keys() - REQUIRED.keys() - optional.keys() - READ - head.read):
        raise CheckpointError(
            f"{keys.path} has the key {keys.start}{unknown[0]}, which specker does not know; the head may need it"
        )
    found = {field: keys[name] for name, field in REQUIRED.items()}
    found |= {field: keys[name] for name, field in optional.items() if name in keys}
    return head.config(keys, found)


def name_of(head: "Head", name: str, path: Any) -> str | None:
    """The name of a tensor in the checkpoint; None if it is not read. Raises CheckpointError for an unknown one."""
    if (block := gguf_block(head.layers, name)) is not None:
        return "{}layers.{}.{}".format(head.prefix, *block)
    if name not in head.tensors:
        raise CheckpointError(f"{path} has the tensor {name}, which specker does not know; the head may need it")
    return head.tensors[name]


def distances(ids: Tensor) -> Tensor:
    """The target's id of each row of the LM head [D] -> `d2t` [D] int64, as in safetensors."""
    return ids.long() - torch.arange(len(ids), dtype=torch.int64, device="cpu")


def _reading_rows(keys: Keys, found: dict[str, Any]) -> dict[str, Any]:
    """The fields of a head that reads hidden rows of the target, but for their depths."""
    found = {"num_key_value_heads": found["num_attention_heads"], "tie_word_embeddings": False} | found
    if (width := keys.get("attention.key_length") or keys.get("rope.dimension_count")) is not None:
        found["head_dim"] = width
    if (scaling := scaled(keys))["rope_type"] != "default":
        found["rope_scaling"] = scaling
    rows = keys.shapes.get("d2t") or keys.shapes.get("output.weight")
    return found | {"draft_vocab_size": rows[0] if rows else None}


def _depths(keys: Keys) -> list[int]:
    """The layers of the target whose inputs are read."""
    return list(keys[next((name for name in LAYERS if name in keys), LAYERS[0])])


def _eagle(keys: Keys, found: dict[str, Any]) -> dict[str, Any]:
    found = _reading_rows(keys, found) | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    if window := keys.get("attention.sliding_window"):
        found |= {"sliding_window": window, "layer_types": [SLIDING] * found["num_hidden_layers"]}
    return found | {"eagle_aux_hidden_state_layer_ids": _depths(keys), "target_hidden_size": keys["target_hidden_size"]}


def _blocks(keys: Keys, found: dict[str, Any]) -> dict[str, Any]:
    found = _reading_rows(keys, found) | {"model_type": "qwen3", "dflash_config": {}}
    keys.no("rope.dimension_count", found.get("head_dim"))  # RoPE rotates whole heads
    if any(keys.get("rope.dimension_sections", ())[1:]):  # all of them by the position in the text
        raise CheckpointError(f"{keys.path} has {keys.start}rope.dimension_sections, which specker does not read")
    if window := keys.get("attention.sliding_window"):
        slides = keys["attention.sliding_window_pattern"]
        found |= {"use_sliding_window": True, "sliding_window": window}
        found["layer_types"] = [SLIDING if each else FULL for each in slides]
    found["target_layer_ids"] = [n - 1 for n in _depths(keys)]
    shapes, architecture = keys.shapes, "DFlashDraftModel"
    if "selector_hidden.weight" in shapes:
        architecture = "DFlash2DraftModel"
    elif "markov_w1.weight" in shapes:
        architecture = "Qwen3DSparkModel"
        found |= {"markov_rank": shapes["markov_w1.weight"][1], "markov_head_type": "vanilla"}
        if confidence := shapes.get("conf_proj.weight"):
            joined = confidence[-1] > found["hidden_size"]
            found |= {"enable_confidence_head": True, "confidence_head_with_markov": joined}
    return found | {"architectures": [architecture]}


def _assistant(keys: Keys, found: dict[str, Any]) -> dict[str, Any]:
    text = found | gemma4.of_keys(keys) | {"hidden_size_per_layer_input": 0}
    width = keys["embedding_length_out"]
    return {"model_type": "gemma4_assistant", "backbone_hidden_size": width, "text_config": text}


def _named(table: HeadTable, **more: str | None) -> dict[str, str | None]:
    """The names of a table's tensors outside of layers: in GGUF -> in the checkpoint."""
    return {own.gguf: own.name for own in table if own.gguf and "#" not in own.gguf} | more


class Head(NamedTuple):
    """A kind of head in GGUF files."""

    config: Callable[[Keys, dict[str, Any]], dict[str, Any]]
    """(keys, fields by REQUIRED, OPTIONAL and `optional`) -> config.json. Raises CheckpointError."""
    optional: Mapping[str, str]  # further keys that become a field of config.json
    read: frozenset[str]  # further keys that `config` reads, or that change nothing
    tensors: Mapping[str, str | None]  # outside of layers: in GGUF -> in the checkpoint; None: not read
    layers: Names
    prefix: str = ""  # of the layers' names
    undone: Callable[[File], tuple[Undo, dict[str, Any]]] = as_it_is  # see `Gguf`


OUTER = {"token_embd.weight": "embed_tokens.weight", "output_norm.weight": "norm.weight"}
HEADS = {  # by llama.cpp's architecture
    "eagle3": Head(
        _eagle,
        OF_EAGLE,
        frozenset(),
        _named(EAGLE, **{f"{FREQUENCIES}.weight": f"{FREQUENCIES}.weight"}),
        LAYER,
        undone=interleaved,
    ),
    "dflash": Head(
        _blocks,
        OF_BLOCKS,
        frozenset({"attention.sliding_window_pattern", "has_confidence_head", "rope.dimension_sections"}),
        _named(BLOCKS, **OUTER),
        LAYER
        | {
            own.name: TensorName(own.name.removeprefix("layers.#."), own.gguf.removeprefix("blk.#."), whole=True)
            for own in BLOCKS
            if "#" in own.gguf
        },
    ),
    "gemma4-assistant": Head(
        _assistant,
        {},
        frozenset({*gemma4.KEYS, "embedding_length_out", "nextn_predict_layers"}),
        _named(
            ASSISTANT,
            **{own: f"model.{name}" for own, name in OUTER.items()},
            **dict.fromkeys((f"{FREQUENCIES}.weight", "masked_embd_centroids.weight", "masked_embd_ordering")),
        ),
        gemma4.NAMES,
        "model.",
    ),
}
