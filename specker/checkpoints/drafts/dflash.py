"""Read a drafter of blocks that reads the target's hidden states: DFlash, and DSpark.

Three layouts are read. z-lab's DFlash has a flat config.json with `dflash_config`, and uses the target's embedding and
LM head. DeepSpec's DSpark has a flat config.json, its own embedding and head, and perhaps a Markov and a confidence
head. speculators, which vLLM reads, nests the config of the layers under `transformer_layer_config`.
`docs/checkpoints.md` lists the tensors.

A drafter of the wrong format drafts badly without any error, so every tensor and every field of config.json must be
known.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specker.checkpoints.architectures import LAYER_TYPES, SLIDING
from specker.checkpoints.buffers import Storage
from specker.checkpoints.checkpoint import Checkpoint
from specker.checkpoints.drafts.heads import (
    IGNORED,
    check_parts,
    check_shared,
    check_stream,
    check_target,
    ids_of,
    read_tensors,
)
from specker.checkpoints.files import folder_of, open_files
from specker.checkpoints.numbers import check_size
from specker.checkpoints.parse import SHARED, parse_config, read_json, reason
from specker.checkpoints.pieces import Piece, pieces_of
from specker.model.config import CheckpointError, ModelConfig
from specker.model.dflash import BlockSpec, BlockWeights, Markov
from specker.model.split import WHOLE
from specker.model.weights import Weights

FLAT = {"DFlashDraftModel": "dflash", "Qwen3DSparkModel": "dspark"}  # architectures of flat configs
KINDS = "dflash", "dspark"  # of speculators
MASK = "mask_embedding.pt"  # beside the weights: the embedding of a mask, if it is not a row of the embedding
FIELDS = {  # fields of config.json that say what the drafter computes, beside those of its layers
    "aux_hidden_state_layer_ids",
    "block_size",
    "confidence_head_with_markov",
    "dflash_config",
    "draft_vocab_size",
    "enable_confidence_head",
    "final_logit_softcapping",
    "markov_head_type",
    "markov_rank",
    "mask_token_id",
    "num_target_layers",
    "sample_from_anchor",
    "sliding_window_non_causal",
    "target_hidden_size",
    "target_layer_ids",
}
INNER = {"block_size", "causal", "mask_token", "mask_token_id", "num_target_layers", "sample_from_anchor"}
INNER |= {"target_layer_ids"}  # fields of `dflash_config`
# Fields that change nothing here: how it was trained, and what transformers or speculators may add to an outer config.
TRAINING = {"max_anchors", "num_anchors"}
OUTER = {"bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "use_cache"}
MARKOV = "w1", "w2", "joint", "joint_bias"
JOINT = {"vanilla": None, "gated": "gate_proj", "rnn": "joint_proj"}  # W of a Markov head in the files, by its kind
SIZES = "block_size", "markov_rank", "mask_token_id", "num_target_layers"  # whole numbers


@dataclass(frozen=True, eq=False)
class BlockCheckpoint(Checkpoint):
    """A drafter of blocks: its layers as a model of their own, and what a model does not have."""

    spec: BlockSpec = field(kw_only=True)
    parts: BlockWeights = field(kw_only=True)

    @property
    def head_ids(self) -> Tensor | None:
        return self.parts.ids


def read(source: str | Path, target: Checkpoint, *, dtype: torch.dtype, quantize: str | None = None) -> BlockCheckpoint:
    """Read a drafter for `target` from a folder or hub id, in `dtype`, onto the target's device. `quantize` rounds the
    matrices of its layers and its LM head as `checkpoint.read` does. Raises CheckpointError."""
    check_stream(source, target.config)
    own = target.weights
    device = own.norm.device
    folder = folder_of(source, weights=True, formats=("*.safetensors", MASK))
    raw = read_json(folder / "config.json")
    with ExitStack() as stack:
        where = open_files(folder, stack)
        maps: dict[str, Tensor] = {name: where.pop(name).get_tensor(name) for name in ("d2t", "t2d") if name in where}
        layout = Layout.of(folder, raw, frozenset(where), target.config)
        config, spec = layout.config, layout.spec
        found = read_tensors(where, layout.pieces(), config, Storage(None, quantize, dtype, device), source)
    ids = ids_of(maps, spec.rows, config.vocab_size, source)
    parts = BlockWeights(
        fc=found.pop("fc"),
        hidden_norm=found.pop("hidden_norm"),
        mask=_mask(folder, config, own.norm),
        ids=None if ids is None else ids.to(device),
        markov=Markov(layout.markov, *(found.pop(name, None) for name in MARKOV)) if layout.rank else None,
        confidence=(found.pop("confidence"), found.pop("confidence_bias")) if layout.confident else None,
    )
    usual: dict[str, Any] = {"embed": own.embed, "head": own.head, "qkv_bias": None, "o_bias": None}
    usual |= {"gate_up_bias": None, "down_bias": None} | found
    ropes = tuple(rope.to(device) for rope in layout.ropes)
    return BlockCheckpoint(
        config,
        Weights(**usual, ropes=ropes),
        folder,
        shared=target.tokens,
        activations=target.activations,
        spec=spec,
        parts=parts,
    )


@dataclass(frozen=True)
class Layout:
    """Which tensors the files hold, and what they compute."""

    config: ModelConfig  # of the drafter's layers
    ropes: tuple[Any, ...]
    spec: BlockSpec
    own: frozenset[str]  # embed_tokens and lm_head, as far as the drafter has its own
    rank: int  # of the Markov head; 0: there is none
    markov: str  # its kind, of JOINT
    confident: bool  # it has a confidence head
    joined: bool  # the confidence head also reads the Markov head's w1

    @classmethod
    def of(cls, folder: Path, raw: dict[str, Any], names: frozenset[str], target: ModelConfig) -> "Layout":
        """Raises CheckpointError for what config.json, the tensors and the target do not agree on."""
        check_parts(folder, raw)
        nested = raw.get("transformer_layer_config")
        given = raw if nested is None else nested
        inner = raw.get("dflash_config") or {}
        _check_fields(raw, nested, inner)
        kind = _kind(folder, raw)
        flat = {**raw, **inner}
        for name in SIZES:
            if name in flat and (type(flat[name]) is not int or flat[name] < 0):
                raise CheckpointError(f"{name} of {folder} must be a whole number, got {flat[name]!r}")
        sizes = {
            "of width {}": (flat.get("target_hidden_size") or given.get("hidden_size"), target.hidden_size),
            "with {} ids": (given.get("vocab_size"), target.vocab_size),
            "with {} layers": (flat.get("num_target_layers") or target.num_layers, target.num_layers),
        }
        check_target(folder, "a drafter for a target", sizes)
        size = flat.get("block_size") or 0
        following = bool(flat.get("sample_from_anchor", kind == "dspark"))
        if size < (1 if following else 2):
            raise CheckpointError(f"{folder} has block_size {flat.get('block_size')}, which leaves no token to draft")
        window, windowed = _windows(folder, given)
        if (positions := given.get("max_position_embeddings")) is not None:
            check_size("max_position_embeddings", positions, str(folder))
        plain = {name: value for name, value in given.items() if name not in FIELDS} | {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "max_position_embeddings": max(positions or 0, target.max_context),
            "use_sliding_window": window,
            "eos_token_id": None,  # the target's count
        }
        if plain.get("mlp_bias"):
            raise CheckpointError(f"{folder} says mlp_bias, and a drafter of blocks has no bias there")
        config, ropes = parse_config(folder, target.max_context, None, plain)
        causal = inner.get("causal")
        spec = BlockSpec(
            _depths(folder, raw, inner, nested is not None, len(windowed), target),
            target.hidden_size,
            raw.get("draft_vocab_size") or target.vocab_size,
            size,
            following,
            tuple((n and not raw.get("sliding_window_non_causal")) if causal is None else causal for n in windowed),
        )
        own = frozenset(name for name in SHARED if f"{name}.weight" in names)
        # z-lab trained with the target's module, which in Gemma scales its rows, and speculators with the rows alone.
        source = config if "embed_tokens" in own or nested is not None else target
        mask = flat.get("mask_token_id")
        config = replace(
            config,
            tied=False,
            causal=False,
            shifted_logits=following,
            mask_token_id=mask,
            eos_ids=(),
            embed_scale=source.embed_scale,
            embed_rounded=source.embed_rounded,
            logits_cap=_cap(folder, raw),
        )
        rank, confident = raw.get("markov_rank") or 0, bool(raw.get("enable_confidence_head"))
        markov = raw.get("markov_head_type", "vanilla")
        if rank and str(markov) not in JOINT:
            raise CheckpointError(f"{folder} has a Markov head of type {markov!r}; specker runs {', '.join(JOINT)}")
        if rank and config.logits_cap:
            raise CheckpointError(f"{folder} says final_logit_softcapping, and specker caps no logits of a Markov head")
        joined = confident and bool(raw.get("confidence_head_with_markov"))
        if joined and not rank:
            raise CheckpointError(f"{folder} says confidence_head_with_markov, and has no Markov head")
        check_shared(folder, own, config, spec.rows, target)
        if mask is None or mask >= config.vocab_size:
            raise CheckpointError(
                f"config.json of {folder} must name mask_token_id, an id below {config.vocab_size}; it is {mask}"
            )
        return cls(config, ropes, spec, own, rank, markov, confident, joined)

    def pieces(self) -> Iterator[Piece]:
        """Every tensor that the checkpoint must have, and no other."""
        c, spec, r = self.config, self.spec, self.rank

        shares = *(name for name in SHARED if name not in self.own), "lm_head"  # its head may have other rows
        yield from pieces_of(replace(c, shares=shares), WHOLE, True)
        H, V = c.hidden_size, c.vocab_size
        yield Piece.tensor("fc.weight", "fc", H, len(spec.aux_layers) * spec.width)
        yield Piece.tensor("hidden_norm.weight", "hidden_norm", H)
        if "lm_head" in self.own:
            yield Piece.tensor("lm_head.weight", "head", spec.rows, H)
        if r:
            yield Piece.tensor("markov_head.markov_w1.weight", "w1", V, r)
            yield Piece.tensor("markov_head.markov_w2.weight", "w2", spec.rows, r)
        if r and (joint := JOINT[self.markov]):
            out, inputs = (r, H + r) if self.markov == "gated" else (3 * r, 2 * r + H)
            yield Piece.tensor(f"markov_head.{joint}.weight", "joint", out, inputs)
            yield Piece.tensor(f"markov_head.{joint}.bias", "joint_bias", out)
        if self.confident:
            yield Piece.tensor("confidence_head.proj.weight", "confidence", 1, H + r * self.joined)
            yield Piece.tensor("confidence_head.proj.bias", "confidence_bias", 1)


def _cap(folder: Path, raw: dict[str, Any]) -> float:
    """The soft cap of the logits, which z-lab's drafters for Gemma 4 name; 0 for none. That of the target's own head is
    not meant. Raises CheckpointError."""
    cap = raw.get("final_logit_softcapping") or 0.0
    if type(cap) not in (int, float) or not 0 <= cap < math.inf:
        raise CheckpointError(f"final_logit_softcapping of {folder} must be a number from 0 on, got {cap!r}")
    return float(cap)


def _kind(folder: Path, raw: dict[str, Any]) -> str:
    """dflash or dspark. Raises CheckpointError for other drafters."""
    if "transformer_layer_config" not in raw:
        named = (raw.get("architectures") or [None])[0]
        if named not in FLAT:
            raise CheckpointError(
                f"{folder} is not a drafter of blocks that specker reads: its architecture is {named}"
            )
        return FLAT[named]
    if (kind := raw.get("speculators_model_type")) not in KINDS:
        raise CheckpointError(f"{folder} is a speculators drafter of type {kind!r}; dflash reads {' and '.join(KINDS)}")
    return kind


def _windows(folder: Path, given: dict[str, Any]) -> tuple[bool, tuple[bool, ...]]:
    """Whether any layer has a sliding window, and which ones. Raises CheckpointError where that is not clear."""
    kinds, layers = given.get("layer_types"), given.get("num_hidden_layers", 0)
    check_size("num_hidden_layers", layers, str(folder))
    if kinds is None:
        if given.get("use_sliding_window"):
            raise CheckpointError(f"{folder} says use_sliding_window and names no layer_types, which say where")
        return False, (False,) * layers
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in LAYER_TYPES for kind in kinds):
        raise CheckpointError(f"layer_types of {folder} must name one of {', '.join(LAYER_TYPES)} for {layers} layers")
    if SLIDING in kinds and not given.get("sliding_window"):
        raise CheckpointError(f"{folder} has layers with a sliding window, and names no sliding_window")
    return SLIDING in kinds, tuple(kind == SLIDING for kind in kinds)


def _depths(
    folder: Path, raw: dict[str, Any], inner: dict[str, Any], nested: bool, layers: int, target: ModelConfig
) -> tuple[int, ...]:
    """The depths of the target that the drafter reads: depth n is the input of layer n."""
    total = target.num_layers
    if nested:  # speculators: the input of layer n
        name, ids, more = "aux_hidden_state_layer_ids", raw.get("aux_hidden_state_layer_ids"), 0
    else:  # z-lab and DeepSpec: the output of layer n, where -1 is the embedding
        name, ids, more = "target_layer_ids", inner.get("target_layer_ids", raw.get("target_layer_ids")), 1
    if ids is None and not nested and "dflash_config" in raw:  # z-lab's default
        ids = [round(1 + i * (total - 4) / (layers - 1)) for i in range(layers)] if layers > 1 else [total // 2]
    if not isinstance(ids, list) or not ids or any(type(n) is not int for n in ids):
        raise CheckpointError(f"{name} of {folder} must be a list of layers, got {ids!r}")
    depths = tuple(n + more for n in ids)
    if list(depths) != sorted(set(depths)) or not all(0 <= n < total for n in depths):
        # The output of the last layer is read before or after the final norm, depending on the program.
        raise CheckpointError(
            f"{name} of {folder} is {ids}; it must ascend and name outputs of the target's layers -1 to {total - 2}"
            if more
            else f"{name} of {folder} is {ids}; it must ascend and name inputs of the target's layers 0 to {total - 1}"
        )
    return depths


def _mask(folder: Path, config: ModelConfig, like: Tensor) -> Tensor | None:
    """The embedding of a mask [H], if it is a file of its own: a tensor, or a table with `embedding`."""
    path = folder / MASK
    if not path.is_file():
        return None
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle and zip raise many types
        raise CheckpointError(f"{path} is not a file of tensors, or truncated ({reason(error)})") from error
    if isinstance(found, dict):
        if found.get("mask_token_id", config.mask_token_id) != config.mask_token_id:
            raise CheckpointError(f"{path} is for mask_token_id {found['mask_token_id']}, not {config.mask_token_id}")
        found = found.get("embedding")
    if not isinstance(found, Tensor) or found.numel() != config.hidden_size or not torch.isfinite(found).all():
        raise CheckpointError(f"{path} must hold the embedding of a mask, {config.hidden_size} finite numbers")
    return found.flatten().to(like)


def _check_fields(raw: dict[str, Any], nested: dict[str, Any] | None, inner: dict[str, Any]) -> None:
    """Raise CheckpointError for a field of config.json that specker does not know, or that stands where nobody reads
    it."""
    import transformers

    anywhere = IGNORED | TRAINING | OUTER | set(vars(transformers.PretrainedConfig()))
    layers = set(transformers.Qwen3Config().to_dict()) | {"mlp_bias", "pretraining_tp", "rope_theta", "rope_scaling"}
    parts = {"": (raw, anywhere | FIELDS | (layers if nested is None else set())), "dflash_config.": (inner, INNER)}
    if nested is not None:
        parts["transformer_layer_config."] = nested, anywhere | layers
    for prefix, (part, known) in parts.items():
        if unknown := sorted(name for name in part if name not in known and not name.startswith("_")):
            raise CheckpointError(
                f"config.json has the field {prefix + unknown[0]!r}, which specker does not know there; it may change "
                "what the drafter computes, and then it would draft badly"
            )
