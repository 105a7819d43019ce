"""Read an EAGLE head: EAGLE-3, and EAGLE-1 and 2.

Two layouts are read. SafeAILab's EAGLE, SpecForge and SGLang have a flat config.json and call an EAGLE-3 head's layer
`midlayer`. speculators, which vLLM reads, nests the layer's config under `transformer_layer_config` and calls it
`layers.0`. DeepSpec, EAGLE-1 and EAGLE-2 have a flat config and `layers.0`. `docs/checkpoints.md` lists the tensors.

A head of the wrong format drafts badly without any error, so every tensor and every field of config.json must be known.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specker.checkpoints.architectures.architecture import FULL, SLIDING
from specker.checkpoints.architectures.heads import EAGLE
from specker.checkpoints.buffers import Storage, activations
from specker.checkpoints.drafts.heads import (
    IGNORED,
    Files,
    HeadLayout,
    check_parts,
    check_shared,
    check_target,
    head_pieces,
    ids_of,
    layer_pieces,
)
from specker.checkpoints.files import BIN
from specker.checkpoints.parse import SHARED, parse_config
from specker.checkpoints.pieces import Piece
from specker.checkpoints.quantised.schemes import scheme_of
from specker.model.config import CheckpointError, ModelConfig
from specker.model.heads import HeadSpec, HeadWeights

MASK = "mask_hidden"  # P-EAGLE's, [1, 1, A * Ht]
FACTORS = "rope_freqs.weight"  # [D / 2], divisors of RoPE's frequencies, in a head that was a GGUF file
DEEPSPEC = "Qwen3Eagle3Model"
FLAT = "LlamaForCausalLMEagle3", "LlamaForCausalLM", "LlamaForCausalLMEagle", DEEPSPEC  # architectures of flat configs
MASK_TOKEN = "mask_token_id", "pard_token", "ptd_token_id"  # speculators' field, and those of flat configs
# Fields of config.json that say what a head computes, beside those of its layers.
FIELDS = {
    "draft_vocab_size",
    "target_hidden_size",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "eagle_aux_hidden_state_layer_ids",
    "eagle_config",
    "target_layer_ids",
    "num_target_layers",
    "bias",
    *MASK_TOKEN,
}
WINDOWS = {"layer_types", "sliding_window", "use_sliding_window", "max_window_layers"}


def _mask(mask: Tensor | None, spec: HeadSpec, source: str | Path) -> Tensor | None:
    """P-EAGLE's mask_hidden as [A * Ht]. Raises CheckpointError unless it fits the config."""
    if mask is None and spec.mask is None:
        return None
    if mask is None:
        raise CheckpointError(f"{source} has a mask token and lacks {MASK}, which a P-EAGLE head has")
    if spec.mask is None:
        raise CheckpointError(f"{source} has {MASK}, and its config.json lacks {MASK_TOKEN[0]}")
    size = len(spec.aux_layers) * spec.width
    if mask.numel() != size or not mask.is_floating_point() or not torch.isfinite(mask).all():
        raise CheckpointError(
            f"{MASK} of {source} must hold {size} finite numbers, got {list(mask.shape)} {mask.dtype}"
        )
    return mask.flatten()


@dataclass(frozen=True, eq=False)
class Layout(HeadLayout):
    layers: tuple[str, ...]  # the prefix of each layer's tensors
    has: frozenset[str]  # parts of EAGLE

    strategy, reads = "eagle", (*FLAT, "speculators eagle3", "speculators peagle")
    extra = *HeadLayout.extra, MASK, FACTORS
    more = (BIN,)

    @classmethod
    def of(cls, files: Files, target: ModelConfig) -> "Layout":
        source, folder, raw, where, extra = files
        check_parts(folder, raw)
        nested = raw.get("transformer_layer_config")
        given = raw if nested is None else nested
        named = (raw.get("architectures") or ["LlamaForCausalLM"])[0]
        if nested is not None:
            named = f"speculators {raw.get('speculators_model_type')}"
        if named not in cls.reads:
            raise cls.unread(source, named)
        _check_fields(raw, nested)
        form = "eagle3" if any(name.endswith("hidden_norm.weight") for name in where) else "eagle1"
        layers = _layers(where)
        if DEEPSPEC in (raw.get("architectures") or ()) and len(layers) > 1:  # all of them read the embedding
            raise CheckpointError(
                f"{folder} is a DeepSpec head of {len(layers)} layers; specker reads those of one layer"
            )
        deep = raw.get("num_target_layers")
        sizes = {
            "a target of width {}": (raw.get("target_hidden_size") or given.get("hidden_size"), target.hidden_size),
            "a target of {} layers": (target.num_layers if deep is None else deep, target.num_layers),
            "a vocabulary of {} ids": (given.get("vocab_size"), target.vocab_size),
        }
        check_target(folder, "a head for", sizes)
        qwen = given.get("model_type") == "qwen3"
        positions = max(_number(given, "max_position_embeddings", 1), target.max_context)  # training does not limit it
        plain = {name: value for name, value in given.items() if name not in FIELDS | WINDOWS}
        plain |= {
            "architectures": ["Qwen3ForCausalLM" if qwen else "LlamaForCausalLM"],
            "model_type": "qwen3" if qwen else "llama",
            "num_hidden_layers": len(layers),
            "max_position_embeddings": positions,
            "eos_token_id": None,  # the target's count
        }
        config, ropes = parse_config(folder, target.max_context, None, plain)
        if FACTORS in extra:
            ropes = tuple(rope._replace(inv_freq=rope.inv_freq / extra[FACTORS]) for rope in ropes)
        modules = *SHARED, "input_norm", "fc_norm"
        has = frozenset(module for module in modules if any(name.startswith(f"{module}.") for name in where))
        D = raw.get("draft_vocab_size") or target.vocab_size
        depths, other = _depths(folder, raw, where, form, target)
        spec = HeadSpec(
            form,
            depths,
            target.hidden_size,
            D,
            residual=not raw.get("norm_before_residual", nested is not None),  # as vLLM reads a missing one
            output=bool(raw.get("norm_output")),
            mask=_mask_token(raw, target.vocab_size),
            other=other,
            # Until September 2026 SpecForge's heads fed back the rows before the norm all the same (its issue 879).
            unsure=nested is None and bool(raw.get("norm_output")),
        )
        sliding_windows = _sliding_windows(given, len(layers), qwen, target.max_context)
        layer = replace(config.layer, first="joined" if form == "eagle3" else "bare", sliding_windows=sliding_windows)
        config = replace(config, layer=layer, tied=config.tied and "embed_tokens" in has, eos_ids=())
        check_shared(folder, has, config, D, target)
        for name, there in (("norm_before_fc", "input_norm"), ("fc_norm", "fc_norm")):
            if bool(raw.get(name)) != (there in has):
                lacks = "lacks" if raw.get(name) else "has"
                raise CheckpointError(f"config.json says {name} {raw.get(name)}, and the checkpoint {lacks} {there}")
        bias = {"bias"} if form == "eagle1" and raw.get("bias", True) else set()
        return cls(source, folder, config, ropes, scheme_of(raw, str(source)), spec, layers, has | bias | {form})

    def pieces(self) -> Iterator[Piece]:
        c, spec, fused = self.config, self.spec, self.spec.form == "eagle3"
        H, A = c.hidden_size, len(spec.aux_layers)
        inputs = A * spec.width if fused else H + spec.width
        sizes = {"V": c.vocab_size, "D": spec.rows, "H": H, "W": spec.width, "A": A, "inputs": inputs}
        for p in (*head_pieces(EAGLE, sizes, self.has, c), *layer_pieces(c)):
            if fused and p.layer == 0 and p.buffer == "qkv":  # it also reads the token's embedding
                shape = p.shape[0], 2 * H
                p = replace(p, shape=shape, stored=shape)
            if fused or p.layer != 0 or p.buffer != "norm_in":
                yield replace(p, name=re.sub(r"^layers\.(\d+)\.", lambda found: self.layers[int(found[1])], p.name))

    def parts(self, found: dict[str, Any], files: Files, storage: Storage) -> HeadWeights:
        vectors = activations(storage.dtype, storage.device)
        if "fc_norm" in found:
            found["fc_norm"] = found["fc_norm"].view(len(self.spec.aux_layers), -1)
        if self.config.tied and "embed" in found:
            found.setdefault("head", found["embed"])
        found.setdefault("norm", torch.ones(self.config.hidden_size, dtype=vectors, device=storage.device))
        mask = _mask(files.extra.get(MASK), self.spec, files.source)
        return HeadWeights(
            fc=found["fc"],
            **{name: found.get(name) for name in ("fc_bias", "hidden_norm", "input_norm", "fc_norm")},
            mask=None if mask is None else mask.to(storage.device, vectors),
            ids=ids_of(files, self.spec.rows, self.config.vocab_size, storage.device),
        )


def _layers(where: dict[str, Any]) -> tuple[str, ...]:
    """The prefix of each layer's tensors. Raises CheckpointError if a number is missing."""
    numbers = sorted({int(found[1]) for name in where if (found := re.match(r"layers\.(\d+)\.", name))})
    first = ["midlayer."] if any(name.startswith("midlayer.") for name in where) else []
    if numbers != list(range(len(first), len(first) + len(numbers))) or not (first or numbers):
        raise CheckpointError(
            f"the head's layers are numbered {numbers}; layers.0 or midlayer is the first one, and none may lack"
        )
    return (*first, *(f"layers.{n}." for n in numbers))


def _mask_token(raw: dict[str, Any], vocab: int) -> int | None:
    """The token of a P-EAGLE head's masks; None for other heads. Raises CheckpointError."""
    token = next((raw[name] for name in MASK_TOKEN if raw.get(name) is not None), None)
    parallel = raw.get("speculators_model_type") == "peagle"
    if (token is None and parallel) or not (token is None or (type(token) is int and 0 <= token < vocab)):
        raise CheckpointError(f"a P-EAGLE head needs {MASK_TOKEN[0]}, an id below {vocab}; it is {token!r}")
    return token


def _sliding_windows(given: dict[str, Any], layers: int, qwen: bool, context: int) -> tuple[int, ...]:
    """LayerSpec.sliding_windows of the head's layers: those of its config, and at most the positions that it was
    trained for. A head that attends to more columns than in training drafts badly."""
    kinds = given.get("layer_types")
    if kinds is None:  # as Qwen3 in transformers; Llama has no window without layer_types
        first = _number(given, "max_window_layers", 28) if qwen and given.get("use_sliding_window") else layers
        kinds = [FULL if n < first else SLIDING for n in range(layers)]
    if not isinstance(kinds, list) or len(kinds) < layers or any(kind not in (FULL, SLIDING) for kind in kinds):
        raise CheckpointError(
            f"layer_types must name {FULL} or {SLIDING} for each of the head's {layers} layers, got {kinds}"
        )
    size = _number(given, "sliding_window", 0)
    if SLIDING in kinds[:layers] and not size:
        raise CheckpointError(f"layer_types names {SLIDING} layers, and the head's config has no sliding_window")
    trained = _number(given, "max_position_embeddings", 0) or context
    seen = [min(trained, size if kind == SLIDING else context) for kind in kinds[:layers]]
    return tuple(n if n < context else 0 for n in seen) if min(seen) < context else ()


def _number(given: dict[str, Any], name: str, default: int) -> int:
    """A whole number of config.json from 0 on, or the default if it is null or missing. Raises CheckpointError."""
    value = given.get(name)
    if value is not None and (type(value) is not int or value < 0):
        raise CheckpointError(f"{name} of a head must be a whole number from 0 on, got {value!r}")
    return default if value is None else value


def _depths(
    folder: Path, raw: dict[str, Any], where: dict[str, Any], form: str, target: ModelConfig
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The depths of the target that the head reads: depth n is the input of layer n, or the last layer's output. Then
    the depths by the other reading of the field, () if there is none."""
    total = target.num_layers
    if form == "eagle1":
        return (total,), ()
    if not any(name.startswith("fc.") for name in where):
        raise CheckpointError(f"{folder} lacks fc.weight, which an EAGLE-3 head has")
    own = raw.get("eagle_config") or {}
    if own.get("use_aux_hidden_state") is False:
        raise CheckpointError(f"{folder} says use_aux_hidden_state false, and an EAGLE-3 head reads hidden states")
    name = "eagle_aux_hidden_state_layer_ids"
    other: tuple[int, ...] = ()
    if raw.get("target_layer_ids") is not None:  # DeepSpec: the output of layer n
        field = "target_layer_ids"
        depths = tuple(n + 1 for n in _numbers(raw[field], field))
        if total in depths:  # transformers norms this one, and specker does not
            raise CheckpointError(f"{field} names the last of the target's {total} layers, which specker does not read")
    elif raw.get(name) is not None:  # vLLM and speculators: the input of layer n
        field, depths = name, _numbers(raw[name], name)
        other = tuple(n + 1 for n in depths)
    elif own.get(name) is not None:  # SGLang and SpecForge: the output of layer n
        field = f"eagle_config.{name}"
        other = _numbers(own[name], field)
        depths = tuple(n + 1 for n in other)
    else:
        depths, field = (2, total // 2, total - 3), "the default"
    if "fc.weight" in where:  # not quantised
        columns = where["fc.weight"].get_slice("fc.weight").get_shape()[-1]
        if columns != len(depths) * target.hidden_size:
            raise CheckpointError(
                f"fc.weight has {columns} columns, but {field} makes it {len(depths) * target.hidden_size}"
            )

    def fits(depths: tuple[int, ...]) -> bool:
        return list(depths) == sorted(set(depths)) and all(0 <= n <= total for n in depths)

    if not fits(depths):
        raise CheckpointError(
            f"{field} names the depths {depths}, which must ascend within the target's {total} layers"
        )
    return depths, other if fits(other) else ()


def _numbers(ids: Any, field: str) -> tuple[int, ...]:
    """The list `ids`. Raises CheckpointError unless it holds whole numbers."""
    if not isinstance(ids, list) or any(type(n) is not int for n in ids):
        raise CheckpointError(f"{field} must be a list of layers' numbers, got {ids!r}")
    return tuple(ids)


def _check_fields(raw: dict[str, Any], nested: dict[str, Any] | None) -> None:
    """Raise CheckpointError for a field of config.json that specker does not know."""
    import transformers

    known = set(transformers.Qwen2Config().to_dict()) | set(transformers.Qwen3Config().to_dict())
    known |= {"mlp_bias", "pretraining_tp", "rope_theta", "rope_scaling", "num_key_value_heads", "tie_word_embeddings"}
    known |= FIELDS | WINDOWS | IGNORED | set(vars(transformers.PretrainedConfig())) | {"attention_bias"}
    for part in (raw, nested or {}):
        if unknown := sorted(name for name in part if name not in known and not name.startswith("_")):
            raise CheckpointError(
                f"config.json has the field {unknown[0]!r}, which specker does not know; it may change what the head "
                "computes, and then the head would draft badly"
            )
