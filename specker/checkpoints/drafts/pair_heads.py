"""Read the heads of drafters of blocks that score pairs of neighbouring candidates: DSpine's and LiLiCorr's fields of
config.json, and their tensors (architectures/heads.py)."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specker.checkpoints.numbers import check_size
from specker.model.config import CheckpointError
from specker.model.dspine import Injection
from specker.model.lilicorr import Affine, Corrector, CorrectorLayer

NAMES = {"dspine": "DSpine", "lilicorr": "LiLiCorr"}
READY = "transfer_ready"  # a tensor: whether DSpine's codes were made
DSPINE = {"transfer_rank": 1024, "message_size": 512, "top_k": 16}  # of `dspine_config`, if it does not say otherwise
LOSSES = {"alignment_warmup_steps", "alignment_weight", "candidate_mass_threshold", "ce_weight"}  # of DSpine's training
LOSSES |= {f"replacement_{name}" for name in ("layers", "probability", "hold_ratio", "end_ratio")}
COUNTS = "lilicorr_candidate_topk", "lilicorr_num_layers", "lilicorr_num_heads", "lilicorr_factor_dim"
FACTORS = "lilicorr_mlp_ratio", "lilicorr_vector_eps", "lilicorr_logit_scale"
CONVOLUTIONS = "conv_kernel_size", "conv_group_size"
LILICORR = {*COUNTS, *FACTORS, *CONVOLUTIONS, "lilicorr_enabled", "lilicorr_hidden_size"}
SIZED = {"dspine": tuple(f"dspine_config.{name}" for name in DSPINE), "lilicorr": COUNTS}


def check_head(kind: str, folder: Path, causal: bool | None, following: bool, ready: Tensor | None) -> None:
    """Raise CheckpointError for a drafter of these kinds that computes something else, and for DSpine's tensor `ready`
    where it must not be."""
    if kind == "dspine" and causal is False:
        raise CheckpointError(f"{folder} says that it is not causal, and a DSpine drafter is")
    if kind in NAMES and following:
        raise CheckpointError(
            f"{folder} says sample_from_anchor, and a {NAMES[kind]} drafter's rows predict their own tokens"
        )
    if kind == "dspine" and (ready is None or not bool(ready.all())):
        raise CheckpointError(f"{folder} lacks {READY}, or it is false: its transfer_codes were not made")
    if kind != "dspine" and ready is not None:
        raise CheckpointError(f"{folder} has {READY}, which only a DSpine drafter has")


def lilicorr_sizes(folder: Path, flat: dict[str, Any], H: int, size: int) -> dict[str, int]:
    """The sizes of LiLiCorr's tensors, for a drafter of width H with blocks of `size` rows. Raises CheckpointError."""
    if flat.get("lilicorr_enabled", True) is not True:
        raise CheckpointError(f"{folder} is a LiLiCorr drafter, and says lilicorr_enabled {flat['lilicorr_enabled']!r}")
    for name in FACTORS:
        if type(flat.get(name)) not in (int, float) or not 0 < flat[name] < 1e9:
            raise CheckpointError(f"{name} of {folder} must be a number above 0, got {flat.get(name)!r}")
    width = flat.get("lilicorr_hidden_size")
    if width != 0 or type(width) is not int:  # 0: the drafter's
        check_size("lilicorr_hidden_size", width, str(folder))
    K, layers, heads, f = (flat[name] for name in COUNTS)
    h = width or H
    if h % heads:
        raise CheckpointError(f"lilicorr_num_heads {heads} of {folder} must divide the head's width {h}")
    sizes = {"h": h, "K": K, "corrector_layers": layers, "heads": heads, "f": f}
    return sizes | {"inner": int(h * flat["lilicorr_mlp_ratio"]), "slots": size - 1, "distances": 2 * size - 1}


def injection(found: dict[str, Any], layers: int) -> Injection:
    each = {name: found[name].unflatten(0, (layers, -1)) for name in ("readouts", "writes")}
    return Injection(**{name: found[name] for name in Injection._fields} | each)


def corrector(
    found: dict[str, Any], sizes: dict[str, int], flat: dict[str, Any], eps: float, dtype: torch.dtype
) -> Corrector:
    """Its matrices are in the activations' `dtype`."""

    def affine(name: str) -> Affine:
        return Affine(*(found[f"{name}.{part}"].to(dtype) for part in ("weight", "bias")))

    def each(name: str) -> list[Tensor]:
        return list(found[f"layers.#.{name}"].to(dtype).unflatten(0, (sizes["corrector_layers"], -1)))

    def affines(name: str, dot: str = ".") -> list[Affine]:
        return [Affine(*parts) for parts in zip(*(each(f"{name}{dot}{x}") for x in ("weight", "bias")), strict=True)]

    parts = affines("attn.in_proj", "_"), affines("attn.out_proj"), each("mlp_norm.weight"), affines("mlp.0")
    layers = zip(each("attn_norm.weight"), *parts, affines("mlp.2"), strict=True)
    return Corrector(
        tokens=affine("token_proj") if "token_proj.weight" in found else None,
        rows=affine("pass_hidden_proj"),
        feature_norm=affine("feature_mlp.0"),
        features=(affine("feature_mlp.1"), affine("feature_mlp.3")),
        slots=found["slot_embedding"].to(dtype),
        ranks=found["rank_embedding"].to(dtype),
        distance=found["relative_slot_bias"].to(dtype),
        same=found["same_slot_bias"].to(dtype),
        anchor=affine("context_proj"),
        layers=tuple(CorrectorLayer(*layer) for layer in layers),
        output_norm=found["output_norm.weight"].to(dtype),
        anchor_norm=found["anchor_norm.weight"].to(dtype),
        factor=affine("factor_input_proj"),
        outgoing=affine("out_head"),
        incoming=affine("in_head"),
        start=affine("anchor_out_head"),
        eps=eps,
        least=float(flat["lilicorr_vector_eps"]),
        scale=float(flat["lilicorr_logit_scale"]),
    )
