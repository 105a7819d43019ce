"""Read a decoder's settings from a checkpoint's config.json, and name what is not supported.

Where config.json lacks something or has older spellings (plain_config.py), transformers fills in and normalises.
`checkpoint.py` reads the weights.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from reprlib import repr as short
from typing import Any

import numpy as np
import torch

from specker.checkpoints.architectures import ARCHITECTURES
from specker.checkpoints.architectures.architecture import FULL, LAYER_TYPES, SLIDING, Architecture
from specker.checkpoints.numbers import check_dtype, check_experts, check_factors, check_sizes
from specker.checkpoints.plain_config import ROPES as OWN_ROPES
from specker.checkpoints.plain_config import config_of, frequencies
from specker.fields import option
from specker.model.config import CheckpointError, Experts, Mixer, ModelConfig
from specker.model.weights import Rope

SHARED = ("embed_tokens", "lm_head")
# hidden_act (Gemma: hidden_activation) -> LayerSpec.activation
ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
HARMONY = "<|channel|>", "<|message|>"  # special tokens of models that answer in it: answers/harmony.py
HARMONY_ENDS = "<|call|>", "<|return|>"  # those that end an answer
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "proportional")


def parse_config(
    folder: Path, max_context: int | None, bidirectional: bool | None, raw: dict[str, Any] | None = None
) -> tuple[ModelConfig, tuple[Rope, ...]]:
    """Returns (config, the layers' RoPE). `raw`: the content of config.json, if the caller has read it. Raises
    CheckpointError."""
    raw = text_config(read_json(folder / "config.json") if raw is None else raw)
    arch = _architecture(raw)
    its = ARCHITECTURES[arch]
    check_sizes(folder / "config.json", raw, its.experts if not its.mixes or raw.get(its.mixes) else ())
    check_factors(raw)
    check_dtype(raw)
    hf = _hf_config(folder, raw, arch)
    act = getattr(hf, its.activation) if its.activation else "silu"
    if act not in ACTIVATIONS:
        every = ", ".join(ACTIVATIONS)
        raise CheckpointError(f"hidden_act {act!r} is not supported; supported: {every}")
    heads, kvs = hf.num_attention_heads, its.kvs(hf)
    for kv_heads, head_dim, *_ in dict.fromkeys(kvs) or (_heads(hf),):
        if heads % kv_heads or head_dim % 2 or not head_dim:
            raise CheckpointError(
                f"num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}, "
                f"and head_dim {head_dim} positive and even"
            )
    context = _context(hf, max_context)
    _check_reach(hf.rope_parameters or {}, context)
    kinds = _layer_types(hf, its)
    dims = {kind: kv.dim for kind, kv in zip(kinds, kvs, strict=False)}
    kv_heads, head_dim, *_ = kvs[kinds.index(SLIDING) if SLIDING in kinds else 0] if kvs else _heads(hf)
    window = (hf.sliding_window if SLIDING in kinds else None) or context
    if window < 1:
        raise CheckpointError(f"sliding_window must be a whole number from 1 on, but config.json has {short(window)}")
    narrow = window < context  # a window as long as the context hides nothing
    diffusion, mask = _diffusion(raw, arch, bidirectional)
    if diffusion and narrow:
        raise CheckpointError(
            f"{arch} has a sliding window of {window}, which a bidirectional drafter cannot have; use "
            f"{option('max_context', window)} or less"
        )
    ropes, table_of = _ropes(hf, its, head_dim, kinds, dims)
    attention_bias = its.biases in ("attention", "all") and bool(hf.attention_bias)
    config = ModelConfig(
        architecture=arch,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        num_layers=hf.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=hf.intermediate_size,
        rms_norm_eps=float(getattr(hf, its.eps)),
        layer=replace(
            its.layer,
            activation=ACTIVATIONS[act] if its.activation else its.layer.activation,
            qkv_bias=attention_bias or its.biases == "qkv",
            o_bias=attention_bias,
            mlp_bias=its.biases == "all" and bool(hf.mlp_bias),
            mixers=_mixers(hf, its),
            kvs=kvs,
            sliding_windows=tuple(window if kind == SLIDING else 0 for kind in kinds) if narrow else (),
            ropes=table_of,
            experts=_experts(hf, its),
        ),
        tied=bool(hf.tie_word_embeddings),
        causal=not diffusion,
        shifted_logits=not diffusion or _shifted(raw, its.masked == "always"),
        mask_token_id=mask,
        max_context=context,
        eos_ids=eos_ids(folder, raw, hf.vocab_size),
        rotated=_rotated(hf, its, head_dim),
        norm_offset=its.norm_offset,
        shares=_shares(raw, bool(hf.tie_word_embeddings)),
        pard_token=None if diffusion else _pard_token(raw),
    )
    config = its.finish(hf, config)
    if not getattr(hf, "is_causal", True) and not diffusion:
        raise CheckpointError(f"config.json says is_causal false, and as a target or draft {arch} must be causal")
    return config, ropes


def _heads(hf: Any) -> tuple[int, int]:
    """num_key_value_heads and head_dim of a model whose layers have the same."""
    return hf.num_key_value_heads, getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads


def unsupported(name: str, known: Iterable[str], where: str = "") -> CheckpointError:
    """What to raise for an architecture that is not read `where`, a phrase. `known`: those that are."""
    return CheckpointError(f"architecture {name} is not supported{where}; supported: {', '.join(known)}")


def _architecture(raw: dict[str, Any]) -> str:
    """The architecture named by config.json. Raises CheckpointError if it is not supported."""
    kind = raw.get("model_type")
    named = raw.get("architectures") or [arch for arch, its in ARCHITECTURES.items() if its.model_type == kind]
    if not isinstance(named, list):
        raise CheckpointError(f"architectures must be a list of names, but config.json has {short(named)}")
    name = str(named[0]) if named else f"of model_type {kind!r}"
    arch = name if name in ARCHITECTURES else re.sub("Model$", "ForCausalLM", name)
    its = ARCHITECTURES.get(arch)
    if its is None or raw.get("model_type", its.model_type) != its.model_type:
        also = f" with model_type {kind!r}" if arch in ARCHITECTURES else ""
        raise unsupported(f"{name}{also}", ARCHITECTURES)
    # The layers of a Mistral all have the window; transformers and vLLM read one with layer_types as a Ministral.
    return "MinistralForCausalLM" if arch == "MistralForCausalLM" and "layer_types" in raw else arch


def _hf_config(folder: Path, raw: dict[str, Any], arch: str) -> Any:
    """transformers' config object, which fills in defaults and normalises older RoPE spellings; or one with the fields
    that are read here, if config.json has them."""
    its, rope = ARCHITECTURES[arch], raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if its.ropes != "by type" and any(isinstance(value, dict) for value in rope.values()):
        raise CheckpointError(f"RoPE that differs by layer type ({', '.join(rope)}) is not supported")
    if (found := config_of(raw, its)) is not None:
        return found
    import transformers

    try:
        # AutoConfig is not used here, because it imports a table of all models.
        name = its.config or arch.replace("ForCausalLM", "Config")
        given = {k: v for k, v in raw.items() if k not in ("model_type", "auto_map")}
        found = getattr(transformers, name).from_dict({**its.defaults, **given})
        # The initialisers of RoPE do it again: then original_max_position_embeddings outside of RoPE's own counts.
        found.standardize_rope_params()
        return found
    except Exception as error:  # validation raises several types, such as KeyError
        raise CheckpointError(f"{folder / 'config.json'} is not a valid {arch} config ({reason(error)})") from error


def _context(hf: Any, wanted: int | None) -> int:
    """The number of positions to run with."""
    limit = hf.max_position_embeddings
    context = limit if wanted is None else wanted
    if not 1 <= context <= limit:
        raise CheckpointError(
            f"{option('max_context')} must be between 1 and this checkpoint's max_position_embeddings {limit}; got "
            f"{context}"
        )
    return context


def _check_reach(rope: dict[str, Any], context: int) -> None:
    """Raise CheckpointError for a context in which positions change what earlier ones compute. `rope`: the parameters,
    or those of each layer type."""
    for part in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        original = part.get("original_max_position_embeddings") or context
        for what, found in (
            ("longrope changes all frequencies", part.get("rope_type") == "longrope"),
            ("llama_4_scaling_beta scales the queries", bool(part.get("llama_4_scaling_beta"))),
        ):
            if found and context > original:
                raise CheckpointError(
                    f"{what} beyond {original} positions, which is not supported; use "
                    f"{option('max_context', original)} or less"
                )


def _rotated(hf: Any, its: Architecture, head_dim: int) -> int:
    """ModelConfig.rotated."""
    rope = hf.rope_parameters or {}
    parts = [part for part in (rope, *rope.values()) if isinstance(part, dict)]
    # proportional RoPE covers whole heads, with frequencies of 0
    given = [part.get("partial_rotary_factor") for part in parts if part.get("rope_type") != "proportional"]
    partial = next((share for share in given if share not in (None, 1.0)), None)
    if partial is None:
        return 0
    rotated = int(head_dim * partial)
    if not its.partial:
        raise CheckpointError(f"partial_rotary_factor {partial} is not supported; RoPE must rotate whole heads")
    if not 0 < rotated < head_dim or rotated % 2:
        raise CheckpointError(f"partial_rotary_factor {partial} of head_dim {head_dim} must leave an even number")
    return rotated


def text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The config of a checkpoint's text model, if config.json is of a multimodal one (ForConditionalGeneration) whose
    text model is supported; else config.json as it is."""
    kind, text = raw.get("model_type"), raw.get("text_config")
    names = [name for name, its in ARCHITECTURES.items() if its.text and its.text == kind]
    if not names or not isinstance(text, dict):
        return raw
    outer = {name: raw[name] for name in ("tie_word_embeddings", "quantization_config", "specker") if name in raw}
    return {**outer, **text, "architectures": names}


def _mixers(hf: Any, its: Architecture) -> tuple[Mixer | None, ...]:
    """LayerSpec.mixers."""
    if its.recurrent is None or its.recurrent[0] not in hf.layer_types:
        return ()
    kind, of = its.recurrent
    if kind not in hf.layer_types or FULL not in hf.layer_types:
        raise CheckpointError(f"layer_types must name at least one layer of {FULL}")
    mixer = of(hf)
    return tuple(mixer if layer == kind else None for layer in hf.layer_types)


def _layer_types(hf: Any, its: Architecture) -> list[str]:
    """Each layer's kind of attention, FULL or SLIDING; FULL of a layer that has another mixer."""
    if its.kinds in LAYER_TYPES:  # other fields of the file do not matter
        return [its.kinds] * hf.num_hidden_layers
    known = LAYER_TYPES if its.recurrent is None else (FULL, its.recurrent[0])
    if hf.layer_types is None:
        raise CheckpointError(
            f"layer_types must name each layer's kind, {' or '.join(known)}, but config.json lacks it"
        )
    if other := set(hf.layer_types) - set(known):
        kinds = ", ".join(sorted(other))
        raise CheckpointError(f"layer_types {kinds} are not supported; only {' and '.join(known)} are")
    return [kind if kind in LAYER_TYPES else FULL for kind in hf.layer_types]


def _experts(hf: Any, its: Architecture) -> Experts | None:
    """The experts of transformers' config; None if every layer has one feed-forward."""
    if not its.experts or (its.mixes and not getattr(hf, its.mixes)):
        return None
    count, chosen, width, *shared = (getattr(hf, name) for name in its.experts)
    step, only = getattr(hf, "decoder_sparse_step", 1), getattr(hf, "mlp_only_layers", ())
    if chosen > count or step < 1:
        raise CheckpointError(
            f"{its.experts[1]} {chosen} must be at most the number of experts, {count}, and decoder_sparse_step "
            f"{step} at least 1"
        )
    check_experts(count, hf.num_hidden_layers)
    dense = tuple(n for n in range(hf.num_hidden_layers) if n in only or (n + 1) % step)
    given = dict(zip(("shared",), shared, strict=False)) | {"dense": dense} | its.mixture(hf)
    if len(given["dense"]) == hf.num_hidden_layers:
        return None
    normalised = not its.normalises or bool(getattr(hf, its.normalises))
    return Experts(count, chosen, width, normalised, **given)


def _diffusion(raw: dict[str, Any], arch: str, wanted: bool | None) -> tuple[bool, int | None]:
    """Whether the model is a diffusion drafter, and its mask token."""
    masked, mask = ARCHITECTURES[arch].masked, raw.get("mask_token_id")
    if wanted is False and masked == "always":
        raise CheckpointError(f"{arch} is always bidirectional; it cannot be loaded as a causal model")
    if wanted and not masked:
        able = ", ".join(name for name, its in ARCHITECTURES.items() if its.masked)
        raise CheckpointError(f"{arch} cannot be bidirectional; these can: {able}")
    diffusion = masked == "always" or bool(wanted)
    if diffusion and not (isinstance(mask, int) and 0 <= mask < raw["vocab_size"]):
        raise CheckpointError(
            f"a bidirectional {arch} needs mask_token_id in config.json, an id below vocab_size; it is {mask}"
        )
    return diffusion, mask


def _shifted(raw: dict[str, Any], usual: bool) -> bool:
    """Whether row i of a diffusion drafter predicts position i + 1: as the architecture's checkpoints do, unless
    config.json says otherwise."""
    shifted = raw.get("shifted_logits", usual)
    if not isinstance(shifted, bool):
        raise CheckpointError(f"shifted_logits of config.json must be true or false, got {short(shifted)}")
    return shifted


def _pard_token(raw: dict[str, Any]) -> int | None:
    """The mask token of a PARD draft, which AMD's checkpoints name `pard_token` (-1: none) and vLLM also reads as
    `ptd_token_id`."""
    token = raw.get("pard_token", raw.get("ptd_token_id"))
    if token is None or token == -1:
        return None
    if type(token) is not int or not 0 <= token < raw["vocab_size"]:
        raise CheckpointError(f"pard_token must be an id below vocab_size {raw['vocab_size']}, got {short(token)}")
    return token


def _shares(raw: dict[str, Any], tied: bool) -> tuple[str, ...]:
    """The tensors that a draft takes from its target: config.json's `{"specker": {"shares": [...]}}`."""
    own = raw.get("specker") or {}
    shares = own.get("shares", []) if isinstance(own, dict) else None
    allowed = SHARED[:1] if tied else SHARED
    if not isinstance(shares, list) or any(name not in allowed for name in shares):
        head = "; with tie_word_embeddings the head is the embedding" if tied else ""
        raise CheckpointError(
            f"config.json's specker.shares must be a list of {' and '.join(allowed)}, got {shares}{head}"
        )
    return tuple(shares)


def _ropes(
    hf: Any, its: Architecture, head_dim: int, kinds: list[str], dims: dict[str, int]
) -> tuple[tuple[Rope, ...], tuple[int, ...]]:
    """(the model's RoPE, LayerSpec.ropes): Gemma 3 has one for each kind of layer, SmolLM3 has layers without any.
    `dims`: the kinds of layers whose heads have other dimensions than `head_dim`."""
    rope = hf.rope_parameters or {}
    if its.ropes == "by type":
        found = [kind for kind in LAYER_TYPES if kind in kinds]
        if lacking := [kind for kind in found if not isinstance(rope.get(kind), dict)]:
            raise CheckpointError(f"rope_parameters must have those of {lacking[0]} layers, but config.json lacks them")
        ropes = tuple(_rope(hf, dims.get(kind, head_dim), rope[kind], layer_type=kind) for kind in found)
        return ropes, tuple(map(found.index, kinds)) if len(found) > 1 else ()
    one = _rope(hf, _rotated(hf, its, head_dim) or head_dim, rope)
    if rest := head_dim // 2 - len(one.inv_freq):  # of dimensions that are not rotated, nor scaled
        scale = torch.cat((torch.full_like(one.inv_freq, float(one.scale)), one.inv_freq.new_ones(rest)))
        one = Rope(torch.cat((one.inv_freq, one.inv_freq.new_zeros(rest))), scale)
    if its.ropes != "some" or all(hf.no_rope_layers):  # despite the name, 1 for layers with RoPE
        return (one,), ()
    if len(hf.no_rope_layers) != len(kinds):
        raise CheckpointError(f"no_rope_layers must have an entry for each of the {len(kinds)} layers of config.json")
    none = Rope(torch.zeros_like(one.inv_freq))
    return (one, none), tuple(int(not has) for has in hf.no_rope_layers)


def _rope(hf: Any, width: int, rope: dict[str, Any], **which: str) -> Rope:
    """RoPE of `width` dimensions with config.json's parameters `rope`, computed by transformers' initialisers. `which`:
    a keyword argument of these initialisers, which selects the parameters of one layer type."""
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        raise CheckpointError(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    try:
        if kind in OWN_ROPES:
            inv_freq, scale = frequencies(kind, rope, width), 1.0
        else:
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            with torch.device("cpu"):  # they allocate on torch's default device and move only the result
                inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"), **which)
        one = Rope(inv_freq.float(), float(scale))
    except Exception as error:  # transformers' initialisers check nothing
        raise CheckpointError(
            f"rope type {kind!r} lacks a parameter in config.json, or has a wrong one ({reason(error)})"
        ) from error
    finite = one.inv_freq.is_meta or bool(np.isfinite(one.inv_freq.numpy()).all())  # a meta tensor has no numbers
    if one.inv_freq.shape != (width // 2,) or not (finite and 1e-38 < scale < 1e38):
        raise CheckpointError(
            f"the RoPE parameters {short(rope)} of config.json do not give {width // 2} finite frequencies"
        )
    return one


def eos_ids(folder: Path, raw: dict[str, Any], vocab: int) -> tuple[int, ...]:
    """Stop ids from the files only. A config class's default is wrong for other vocabularies: Llama's is id 2. Raises
    CheckpointError for an id that is not one of `vocab`."""
    found: set[int] = set()
    for name, source in ("config.json", raw), ("generation_config.json", None):
        source = read_json(folder / name, required=False) if source is None else source
        ids = source.get("eos_token_id")
        for token in ids if isinstance(ids, list) else [] if ids is None else [ids]:
            if type(token) is not int or not 0 <= token < vocab:
                raise CheckpointError(
                    f"eos_token_id must be an id below vocab_size {vocab}, or a list of them, but {folder / name} has "
                    f"{short(ids)}"
                )
            found.add(token)
    try:
        found.update(token for token in _eos_of_tokenizer(folder) if 0 <= token < vocab)  # others are never written
    except CheckpointError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"the tokenizer's files in {folder} do not name its tokens ({reason(error)})") from error
    return tuple(sorted(found))


def _eos_of_tokenizer(folder: Path) -> list[int]:
    """The ids of the tokenizer's own stop token, and of those that end an answer in Harmony."""
    settings = read_json(folder / "tokenizer_config.json", required=False)
    eos = settings.get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    if text is None:
        return []
    added = [{**token, "id": int(i)} for i, token in settings.get("added_tokens_decoder", {}).items()]
    added = added or read_json(folder / "tokenizer.json", required=False).get("added_tokens", [])
    known = all(any(token.get("content") == mark for token in added) for mark in HARMONY)
    ends = [text, *(HARMONY_ENDS if known else ())]
    return [int(token["id"]) for token in added if token.get("content") in ends]


def read_json(path: Path, required: bool = True) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise CheckpointError(f"{path.parent} has no {path.name}; give a checkpoint's folder")
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({reason(error)}); download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object; download it again")
    return value


def reason(error: Exception) -> str:
    """Format an exception for a message: its type and its first non-empty line, or two if the first announces one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines[1:] and lines[0].endswith(":"):
        lines[0] += f" {lines[1]}"
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
