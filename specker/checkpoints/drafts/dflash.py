"""Read a drafter of blocks that reads the target's hidden states: DFlash, DFlash2, DSpark, Domino, DSpine and LiLiCorr.

Three layouts are read. z-lab's DFlash and DFlash2 have a flat config.json with `dflash_config`, and use the target's
embedding and LM head; so do Domino, DSpine and LiLiCorr drafters. DeepSpec's DSpark has a flat config.json, its own
embedding and head, and perhaps a Markov and a confidence head. speculators, which vLLM reads, nests the config of the
layers under `transformer_layer_config`. `docs/checkpoints.md` lists the tensors.

A drafter of the wrong format drafts badly without any error, so every tensor and every field of config.json must be
known.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specker.checkpoints.architectures.architecture import LAYER_TYPES, SLIDING
from specker.checkpoints.architectures.heads import BLOCKS
from specker.checkpoints.buffers import Storage, activations
from specker.checkpoints.checkpoint import Checkpoint
from specker.checkpoints.drafts import pair_heads
from specker.checkpoints.drafts.heads import (
    IGNORED,
    Files,
    HeadLayout,
    check_parts,
    check_shared,
    check_target,
    head_pieces,
    ids_of,
)
from specker.checkpoints.numbers import check_size
from specker.checkpoints.parse import SHARED, parse_config, reason
from specker.checkpoints.pieces import Piece, pieces_of
from specker.checkpoints.quantised.schemes import scheme_of
from specker.model.config import CheckpointError, ModelConfig
from specker.model.dflash import BlockSpec, BlockWeights, Convolution, Markov, Selector
from specker.model.lilicorr import Corrector
from specker.model.split import WHOLE

FLAT = {  # architectures of flat configs
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash2",
    "DominoDraftModel": "domino",
    "DSpineDraftModel": "dspine",
    "LiLiCorrDraftModel": "lilicorr",
    "Qwen3DSparkModel": "dspark",
}
KINDS = "dflash", "dflash2", "dspark"  # of speculators
PROJECTORS = {"dflash": "dflash", "domino": "domino", "causal_v5": "domino"}  # of DFlashDraftModel
MASK = "mask_embedding.pt"  # beside the weights: the embedding of a mask, if it is not a row of the embedding
FIELDS = {  # fields of config.json that say what the drafter computes, beside those of its layers
    "aux_hidden_state_layer_ids",
    "block_size",
    "confidence_head_with_markov",
    "dflash_config",
    "draft_vocab_size",
    "enable_confidence_head",
    "final_logit_softcapping",
    "is_causal",
    "markov_head_type",
    "markov_rank",
    "mask_token_id",
    "num_target_layers",
    "sample_from_anchor",
    "sliding_window_non_causal",
    "target_hidden_size",
    "target_layer_ids",
}
INNER = {"block_size", "causal", "causal_head", "mask_token", "mask_token_id", "num_target_layers"}
INNER |= {"sample_from_anchor", "target_layer_ids", "projector_type"}  # fields of `dflash_config`
CAUSAL = "is_causal", "causal", "causal_head"  # who names it first decides; causal_head is JetSpec's
FACTORS = {"final_logit_softcapping", "input_embedding_scale", "output_multiplier"}
SECOND = {"conv_group_size", "conv_kernel_size", "selector_rank", "selector_top_k"}  # of DFlash2
GRU = {"emb_dim", "gru_hidden_dim", "pure_draft_prefix_len", "shift_label"}  # of Domino, in `dflash_config`
# A kind's fields, in `dflash_config` or outside
OWN = {
    "dflash": FACTORS,
    "dflash2": FACTORS | SECOND,
    "domino": GRU,
    "dspark": {"input_embedding_scale"},
    "lilicorr": pair_heads.LILICORR,
}
MIXTURE = {"moe_experts_implementation", "moe_intermediate_size", "num_experts", "num_experts_per_tok"}
MIXTURE |= {"shared_expert_intermediate_size"}  # of speculators' DFlash2, unused with dense layers
# Fields that change nothing here: how it was trained, and what transformers or speculators may add to an outer config.
TRAINING = {"max_anchors", "num_anchors"}
OUTER = {"bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "use_cache"}
MARKOV = "vanilla", "gated", "rnn"  # kinds of a Markov head
SIZES = "block_size", "markov_rank", "mask_token_id", "num_target_layers", "pure_draft_prefix_len"  # whole numbers
SIZED = {  # whole numbers from 1 on that a kind needs
    "dflash2": ("conv_group_size", "conv_kernel_size", "selector_rank", "selector_top_k"),
    "domino": ("emb_dim", "gru_hidden_dim"),
    **pair_heads.SIZED,
}
CANDIDATES = "selector_top_k", "dspine_config.top_k", "lilicorr_candidate_topk"
MOST_FACTOR = 1e38  # in float32


@dataclass(frozen=True, eq=False)
class BlockCheckpoint(Checkpoint):
    """A drafter of blocks: its layers as a model of their own, and what a model does not have."""

    spec: BlockSpec = field(kw_only=True)
    parts: BlockWeights = field(kw_only=True)

    @property
    def head_ids(self) -> Tensor | None:
        return self.parts.ids


@dataclass(frozen=True, eq=False)
class Layout(HeadLayout):
    has: frozenset[str]  # parts of BLOCKS
    markov: str  # the kind of the Markov head
    sizes: dict[str, int]  # of BLOCKS
    fields: dict[str, Any]  # of config.json
    plain: int = 0  # of `Markov`

    strategy, reads = "dflash", (*FLAT, *(f"speculators {kind}" for kind in KINDS))
    made = BlockCheckpoint
    extra = "d2t", "t2d", pair_heads.READY
    more = (MASK,)

    @classmethod
    def of(cls, files: Files, target: ModelConfig) -> "Layout":
        source, folder, raw, names, extra = files
        check_parts(folder, raw)
        nested = raw.get("transformer_layer_config")
        given = raw if nested is None else nested
        inner = raw.get("dflash_config") or {}
        kind = _kind(source, raw)
        _check_fields(raw, nested, inner, kind)
        flat = {**raw, **inner}
        if kind == "dspine":
            inside = pair_heads.DSPINE | (raw.get("dspine_config") or {})
            flat |= {f"dspine_config.{name}": value for name, value in inside.items()}
        for name in SIZES:
            if name in flat and (type(flat[name]) is not int or flat[name] < 0):
                raise CheckpointError(f"{name} of {folder} must be a whole number, got {flat[name]!r}")
        fits = {
            "of width {}": (flat.get("target_hidden_size") or given.get("hidden_size"), target.hidden_size),
            "with {} ids": (given.get("vocab_size"), target.vocab_size),
            "with {} layers": (flat.get("num_target_layers") or target.num_layers, target.num_layers),
        }
        check_target(folder, "a drafter for a target", fits)
        convolved = any(flat.get(name) for name in pair_heads.CONVOLUTIONS)
        needed: dict[str, Any] = {name: flat.get(name) for name in SIZED.get(kind, ())}
        needed |= {name: flat.get(name) for name in pair_heads.CONVOLUTIONS if convolved}
        for name, count in needed.items():
            check_size(name, count, str(folder))
        size = flat.get("block_size") or 0
        following = bool(flat.get("shift_label" if kind == "domino" else "sample_from_anchor", kind == "dspark"))
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
        causal = next((flat[name] for name in CAUSAL if flat.get(name) is not None), None)
        if not isinstance(causal, bool | None):
            raise CheckpointError(f"{' or '.join(CAUSAL)} of {folder} must be true or false, got {causal!r}")
        pair_heads.check_head(kind, folder, causal, following, extra.get(pair_heads.READY))
        causal = True if kind == "dspine" else causal
        aside = raw.get("sliding_window_non_causal", kind == "dflash2" and nested is not None)
        spec = BlockSpec(
            _depths(folder, raw, inner, nested is not None, len(windowed), target),
            target.hidden_size,
            raw.get("draft_vocab_size") or target.vocab_size,
            size,
            following,
            tuple((n and not aside) if causal is None else causal for n in windowed),
            next((needed[name] for name in CANDIDATES if name in needed), 0),
        )
        own = frozenset(name for name in SHARED if f"{name}.weight" in names and kind not in pair_heads.NAMES)
        # z-lab trained with the target's module, which in Gemma scales its rows, and speculators with the rows alone.
        scaled = config if "embed_tokens" in own or nested is not None else target
        mask = flat.get("mask_token_id")
        scale, multiplier = (_factor(folder, flat, name) for name in ("input_embedding_scale", "output_multiplier"))
        # Where config.json may name a factor of its own, the rows are read as they are stored.
        second = (kind == "dflash2" or "input_embedding_scale" in flat) and "embed_tokens" not in own
        config = replace(
            config,
            tied=False,
            causal=False,
            shifted_logits=following,
            mask_token_id=mask,
            eos_ids=(),
            embed_scale=scale * (1.0 if second else scaled.embed_scale),
            embed_rounded=scaled.embed_rounded and not second,
            logits_scale=multiplier,
            logits_cap=_cap(folder, flat),
        )
        rank, confident = raw.get("markov_rank") or 0, bool(raw.get("enable_confidence_head"))
        markov = raw.get("markov_head_type", "vanilla")
        if kind == "domino":
            rank, markov = needed["emb_dim"], "gru"
        elif rank and str(markov) not in MARKOV:
            raise CheckpointError(f"{folder} has a Markov head of type {markov!r}; specker runs {', '.join(MARKOV)}")
        if (rank or kind in pair_heads.NAMES) and config.logits_cap:
            whose = "a Markov head" if rank else pair_heads.NAMES[kind]
            raise CheckpointError(f"{folder} says final_logit_softcapping, and specker caps no logits of {whose}")
        joined = confident and bool(raw.get("confidence_head_with_markov"))
        if joined and not rank:
            raise CheckpointError(f"{folder} says confidence_head_with_markov, and has no Markov head")
        if convolved and config.hidden_size % needed["conv_group_size"]:
            raise CheckpointError(
                f"conv_group_size {needed['conv_group_size']} of {folder} must divide its width {config.hidden_size}"
            )
        if kind in SIZED and spec.rows != target.vocab_size:
            raise CheckpointError(f"{folder} has a head of {spec.rows} rows; a drafter of kind {kind} needs every id")
        check_shared(folder, own, config, spec.rows, target)
        if mask is None or mask >= config.vocab_size:
            raise CheckpointError(
                f"config.json of {folder} must name mask_token_id, an id below {config.vocab_size}; it is {mask}"
            )
        H, has = config.hidden_size, {*own}
        sizes = {"H": H, "V": config.vocab_size, "D": spec.rows, "L": config.num_layers, "r": rank, **needed}
        sizes |= {"inputs": len(spec.aux_layers) * spec.width, "read": H + rank * joined}
        if rank:
            has |= {"gru"} if markov == "gru" else {"markov", markov}
        if confident:
            has |= {"confidence"}
        if convolved:
            has |= {"conv"}
            sizes["kernels"] = needed["conv_kernel_size"] * H // needed["conv_group_size"]
        if kind == "dflash2":
            has |= {"selector"}
        if kind == "dspine":
            has |= {"injection"}
            sizes |= {name.removeprefix("dspine_config."): count for name, count in needed.items()}
        if kind == "lilicorr":
            sizes |= pair_heads.lilicorr_sizes(folder, flat, H, size)
            has |= {"lilicorr", *(("token_proj",) if sizes["h"] != H else ())}
        first = flat.get("pure_draft_prefix_len") or 0
        scheme = scheme_of(raw, str(source))
        return cls(source, folder, config, ropes, scheme, spec, frozenset(has), markov, sizes, flat, first)

    def pieces(self) -> Iterator[Piece]:
        shares = *(name for name in SHARED if name not in self.has), "lm_head"  # its head may have other rows
        yield from pieces_of(replace(self.config, shares=shares), WHOLE, True)
        yield from head_pieces(BLOCKS, self.sizes, self.has, self.config)

    def storage(self, quantize: str | None, dtype: torch.dtype, device: torch.device) -> Storage:
        return Storage(self.scheme, quantize, dtype, device)

    def parts(self, found: dict[str, Any], files: Files, storage: Storage) -> BlockWeights:
        c, vectors = self.config, activations(storage.dtype, storage.device)
        mask = _mask(files.folder, c)
        around = (self._convolutions(found, part) for part in ("attention", "mlp"))
        return BlockWeights(
            fc=found["fc"],
            hidden_norm=found["hidden_norm"],
            mask=None if mask is None else mask.to(storage.device, vectors),
            ids=ids_of(files, self.spec.rows, c.vocab_size, storage.device),
            markov=self._markov(found, vectors) if self.sizes["r"] else None,
            confidence=(found["confidence"], found["confidence_bias"]) if "confidence" in self.has else None,
            convolutions=tuple(zip(*around, strict=True)),
            selector=self._selector(found) if "selector" in self.has else None,
            injection=pair_heads.injection(found, c.num_layers) if "injection" in self.has else None,
            corrector=self._corrector(found, vectors) if "lilicorr" in self.has else None,
        )

    def _corrector(self, found: dict[str, Any], dtype: torch.dtype) -> Corrector:
        return pair_heads.corrector(found, self.sizes, self.fields, self.config.rms_norm_eps, dtype)

    def _selector(self, found: dict[str, Any]) -> Selector:
        """The final norm contains the factor of the logits, which the selector's rows have not."""
        return Selector(found["before"], found["after"], found["project"] / self.config.logits_scale)

    def _markov(self, found: dict[str, Any], dtype: torch.dtype) -> Markov:
        """The GRU's matrices are in the activations' `dtype`."""
        own: dict[str, Any] = {name: found[name] for name in Markov._fields if name in found}
        own |= {name: own[name].to(dtype) for name in ("entering", "recurrent") if name in own}
        return Markov(self.markov, own.pop("w1", None), **own, plain=self.plain)

    def _convolutions(self, found: dict[str, Any], part: str) -> list[Convolution]:
        """The convolutions around each layer's attention or feed-forward."""
        if "conv" not in self.has:
            return []
        L, taps, H = (self.sizes[name] for name in ("L", "conv_kernel_size", "H"))
        bases, weights = found[f"{part}_base"].view(L, 2, taps, H), found[part].view(L, -1, H)
        return [Convolution(base, weight) for base, weight in zip(bases, weights, strict=True)]


def _factor(folder: Path, flat: dict[str, Any], name: str) -> float:
    """A factor of config.json; 1 if it is missing. Raises CheckpointError."""
    factor = flat.get(name, 1.0)
    if type(factor) not in (int, float) or not 0 < factor < MOST_FACTOR:
        raise CheckpointError(f"{name} of {folder} must be a number above 0, got {factor!r}")
    return float(factor)


def _cap(folder: Path, raw: dict[str, Any]) -> float:
    """The soft cap of the logits, which z-lab's drafters for Gemma 4 name; 0 for none. That of the target's own head is
    not meant. Raises CheckpointError."""
    cap = raw.get("final_logit_softcapping") or 0.0
    if type(cap) not in (int, float) or not 0 <= cap < MOST_FACTOR:
        raise CheckpointError(f"final_logit_softcapping of {folder} must be a number from 0 on, got {cap!r}")
    return float(cap)


def _kind(folder: str | Path, raw: dict[str, Any]) -> str:
    """What kind of drafter it is, one of FLAT. Raises CheckpointError for other drafters."""
    if "transformer_layer_config" not in raw:
        named = (raw.get("architectures") or [None])[0]
        if named not in FLAT:
            raise Layout.unread(folder, named)
        usual = FLAT[named]
        known = PROJECTORS if usual in PROJECTORS else {usual: usual}
        projector = (raw.get("dflash_config") or {}).get("projector_type", usual)
        if str(projector) not in known or (usual == "domino" and known[projector] != usual):
            names = ", ".join(known)
            raise CheckpointError(f"{folder} is a {named} with projector_type {projector!r}; specker reads {names}")
        return known[projector]
    if (kind := raw.get("speculators_model_type")) not in KINDS:
        raise Layout.unread(folder, f"speculators {kind}")
    if raw.get("draft_ffn_type", "dense") != "dense":
        raise CheckpointError(f"{folder} has layers of type {raw['draft_ffn_type']!r}; specker reads dense ones")
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


def _mask(folder: Path, config: ModelConfig) -> Tensor | None:
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
    return found.flatten()


def _check_fields(raw: dict[str, Any], nested: dict[str, Any] | None, inner: dict[str, Any], kind: str) -> None:
    """Raise CheckpointError for a field of config.json that specker does not know, or that stands where nobody reads
    it."""
    import transformers

    anywhere = IGNORED | TRAINING | OUTER | set(vars(transformers.PretrainedConfig()))
    layers = set(transformers.Qwen3Config().to_dict()) | {"mlp_bias", "pretraining_tp", "rope_theta", "rope_scaling"}
    own = OWN.get(kind, set())
    outer = anywhere | FIELDS | own | (layers if nested is None else set())
    outer |= MIXTURE | {"draft_ffn_type"} if kind == "dflash2" else set()
    parts = {"": (raw, outer), "dflash_config.": (inner, INNER | own)}
    if nested is not None:
        parts["transformer_layer_config."] = nested, anywhere | layers
    if kind == "dspine":
        outer.add("dspine_config")
        parts["dspine_config."] = raw.get("dspine_config") or {}, pair_heads.LOSSES | {*pair_heads.DSPINE}
    for prefix, (part, known) in parts.items():
        if unknown := sorted(name for name in part if name not in known and not name.startswith("_")):
            raise CheckpointError(
                f"config.json has the field {prefix + unknown[0]!r}, which specker does not know there; it may change "
                "what the drafter computes, and then it would draft badly"
            )
