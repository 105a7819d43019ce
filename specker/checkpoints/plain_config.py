"""config.json without transformers, whose import takes seconds: where it has all that parse.py reads.

Only files in which nothing has to be computed or refused are read here; a doubtful one is left to transformers, which
fills in more, knows older spellings, and says what is wrong.
"""

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from specker.checkpoints.architectures.architecture import FULL, LAYER_TYPES, SLIDING, Architecture
from specker.checkpoints.numbers import FIELDS

SCALED = "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
ROPES = {"default": (), "linear": SCALED[:1], "llama3": SCALED}  # RoPE's types with the fields that each needs


def config_of(raw: dict[str, Any], its: Architecture) -> Any:
    """The fields of transformers' config object that parse.py reads, as attributes.

    Args:
        raw: the content of config.json, whose sizes and factors were checked (numbers.py).
        its: the architecture.

    Returns:
        The object; None if transformers has to read the file.
    """
    if its.fills is None:
        return None
    fields = {**its.fills, **raw}
    fields["num_key_value_heads"] = fields.get("num_key_value_heads", 0) or (
        fields["num_attention_heads"] if its.fills.get("num_key_value_heads", 0) is None else None
    )
    needs = {name for name, field in FIELDS.items() if field.needed}
    if not needs | {"num_key_value_heads", "max_position_embeddings", *its.experts} <= fields.keys():
        return None
    if not all(type(fields[name]) in field.types for name, field in FIELDS.items() if field.types and name in fields):
        return None
    if fields["hidden_size"] % fields["num_attention_heads"]:
        return None
    kinds = _layer_types(fields, its)
    rope = _rope(fields, its)
    if kinds is None or rope is None:
        return None
    if its.ropes == "some" and not _ints(fields.get("no_rope_layers"), fields["num_hidden_layers"]):
        return None
    if not _ints(fields.get("mlp_only_layers", [])):
        return None
    found = fields | kinds | {"rope_parameters": rope, "model_type": its.model_type}
    return SimpleNamespace(**found)


def _ints(value: Any, count: int | None = None) -> bool:
    return isinstance(value, list) and all(type(x) is int for x in value) and count in (None, len(value))


def _layer_types(fields: dict[str, Any], its: Architecture) -> dict[str, Any] | None:
    """`layer_types` and `sliding_window`, where parse.py reads them; None if transformers computes them."""
    given = fields.get("layer_types")
    if given is not None and not (
        isinstance(given, list)
        and len(given) == fields["num_hidden_layers"]
        and all(isinstance(kind, str) and kind in LAYER_TYPES for kind in given)
    ):
        return None
    if its.kinds == FULL:
        return {}
    slides = fields["use_sliding_window"] if "use_sliding_window" in (its.fills or {}) else None
    window = fields.get("sliding_window") if slides is not False else None
    if slides is None and "sliding_window" not in fields:
        return None
    if its.kinds == SLIDING:
        return {"sliding_window": window}
    if given is None and slides is False:
        given = [FULL] * fields["num_hidden_layers"]
    if slides is False and given is not None and SLIDING in given:  # which of the two counts depends on the class
        return None
    return None if given is None else {"layer_types": given, "sliding_window": window}


def _rope(fields: dict[str, Any], its: Architecture) -> dict[str, Any] | None:
    """RoPE's parameters as transformers 5 writes them; None for what it has to convert."""
    new, old = fields.get("rope_parameters"), fields.get("rope_scaling")
    if (new and old) or "partial_rotary_factor" in fields or "original_max_position_embeddings" in fields:
        return None
    given = new or old or {}
    if its.ropes == "by type":
        whole = given.keys() == {*LAYER_TYPES} and all(isinstance(x, dict) for x in given.values())
        parts = {kind: _typed(x) for kind, x in given.items()} if whole else {}
        return parts if whole and all(map(_known, parts.values())) else None
    if any(isinstance(value, dict) for value in given.values()):
        return None
    rope = _typed({"rope_theta": fields["rope_theta"], **given})
    if rope["rope_type"] == "llama3":
        rope.setdefault("original_max_position_embeddings", fields["max_position_embeddings"])
    return rope if _known(rope) else None


def _typed(rope: dict[str, Any]) -> dict[str, Any]:
    """The parameters with `rope_type`, which older files call `type`."""
    return {**rope, "rope_type": rope.get("rope_type", rope.get("type", "default"))}


def _known(rope: dict[str, Any]) -> bool:
    kind = rope["rope_type"]
    numbers = ("rope_theta", *ROPES[kind]) if isinstance(kind, str) and kind in ROPES else ()
    return bool(numbers) and "partial_rotary_factor" not in rope and all(rope.get(name) is not None for name in numbers)


def frequencies(kind: str, rope: dict[str, Any], width: int) -> Tensor:
    """RoPE's inverse frequencies [width // 2] float32.

    Args:
        kind: "default" (RoFormer, arXiv 2104.09864), "linear" (positions divided by `factor`, arXiv 2306.15595) or
            "llama3", as transformers computes it: waves longer than the original context are stretched by `factor`,
            short ones stay, those between are interpolated.
        rope: the parameters.
        width: dimensions of a head.

    Raises:
        KeyError: a parameter is missing.
    """
    inv_freq = 1.0 / (rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width))
    if kind == "linear":
        return inv_freq / rope["factor"]
    if kind == "llama3":
        factor, low, high, context = (rope[name] for name in SCALED)
        waves = 2 * math.pi / inv_freq
        stretched = torch.where(waves > context / low, inv_freq / factor, inv_freq)
        smooth = (context / waves - low) / (high - low)
        between = (waves >= context / high) & (waves <= context / low)
        mixed = (1 - smooth) * stretched / factor + smooth * stretched
        return torch.where(between, mixed, stretched)
    return inv_freq
