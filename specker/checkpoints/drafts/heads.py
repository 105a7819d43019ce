"""What the heads have in common that read the target's hidden states: EAGLE's, MTP's and drafters of blocks."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor

from specker.checkpoints.buffers import Buffers, Storage
from specker.checkpoints.checkpoint import Checkpoint
from specker.checkpoints.files import check_tensors, read_piece
from specker.checkpoints.pieces import Piece
from specker.model.config import CheckpointError, ModelConfig
from specker.model.heads import HeadSpec, HeadWeights
from specker.model.weights import Rope, Weights

WEIGHTS = {own.name for own in fields(Weights)}
PARTS = "transformer_layer_config", "eagle_config", "dflash_config"
# Fields that change nothing here: how the head was trained or saved, and what transformers adds.
IGNORED = {
    "architectures",
    "auto_map",
    "draft_num_hidden_layers",
    "embed_requires_grad",
    "has_no_defaults_at_init",
    "model_type",
    "quantization_config",
    "speculators_config",
    "speculators_model_type",
    "speculators_version",
    "step_loss_decay",
    "target_model_name_or_path",
    "torch_dtype",
    "transformer_layer_config",
    "ttt_length",
}


@dataclass(frozen=True, eq=False)
class HeadCheckpoint(Checkpoint):
    """A head: its layers as a model of their own, and what a model does not have."""

    spec: HeadSpec = field(kw_only=True)
    parts: HeadWeights = field(kw_only=True)
    further: tuple["HeadCheckpoint", ...] = field(default=(), kw_only=True)  # MTP heads that draft in turn with it

    @property
    def head_ids(self) -> Tensor | None:
        return self.parts.ids


def check_stream(source: str | Path, target: ModelConfig) -> None:
    """Raise CheckpointError for a target whose hidden states have another scale here than a head was trained with."""
    if target.residual_scale != 1 or target.logits_scale != 1:
        raise CheckpointError(
            f"{source} is a head that reads the target's hidden states; specker keeps those of {target.architecture} "
            "in another scale (residual_multiplier, logits_scaling) and supports no heads for it"
        )


def check_parts(folder: Path, raw: dict[str, Any]) -> None:
    """Raise CheckpointError unless the parts of config.json that have fields are objects, and `architectures` is a list
    of names."""
    for name in PARTS:
        if not isinstance(raw.get(name), dict | None):
            raise CheckpointError(f"{name} of {folder} must be an object, got {short(raw[name])}")
    named = raw.get("architectures")
    if named is not None and not (isinstance(named, list) and all(isinstance(name, str) for name in named)):
        raise CheckpointError(f"architectures of {folder} must be a list of names, got {short(named)}")


def check_target(folder: Path, what: str, sizes: dict[str, tuple[Any, int]]) -> None:
    """Raise CheckpointError if a head is for another target. `what` it is, and `sizes`: a phrase for each -> (the
    head's, the target's)."""
    for phrase, (its, own) in sizes.items():
        if its != own:
            raise CheckpointError(
                f"{folder} is {what} {phrase.format(its)}, and the target has {own}: it was trained for another model"
            )


def check_shared(folder: Path, own: frozenset[str], c: ModelConfig, rows: int, target: ModelConfig) -> None:
    """Raise CheckpointError unless a head can use the target's embedding and LM head where it has none of its `own`.
    `rows`: of its LM head."""
    H, Ht = c.hidden_size, target.hidden_size
    if "embed_tokens" not in own and Ht != H:
        raise CheckpointError(f"{folder} lacks embed_tokens.weight, and the target's rows have {Ht} instead of {H}")
    if "lm_head" not in own and not c.tied and (rows != target.vocab_size or Ht != H):
        raise CheckpointError(
            f"{folder} lacks lm_head.weight, and the target's head [{target.vocab_size}, {Ht}] is not [{rows}, {H}]"
        )


def read_tensors(
    where: dict[str, Any], pieces: Iterable[Piece], config: ModelConfig, storage: Storage, source: str | Path
) -> dict[str, Any]:
    """Read `pieces`, which must be all tensors of the open files, into buffers by name. Raises CheckpointError."""
    named = {p.name: p for p in pieces}
    check_tensors(where, named, config, "", storage)
    buffers = Buffers(named, config, storage)
    for name, p in named.items():
        x = read_piece(p, name, where, storage)
        if isinstance(x, Tensor) and not torch.isfinite(x).all():
            raise CheckpointError(f"{name} of {source} holds NaN or infinity; export the head again")
        buffers.put(p, x)
    return buffers.done()


def weights_of(found: dict[str, Any], own: Weights, ropes: Iterable[Rope]) -> Weights:
    """A head's layers of the tensors that were read, with the embedding and the LM head of `own`, the target's, where
    it has none."""
    rows = {"embed": own.embed, "head": own.head}
    layers = {name: x for name, x in found.items() if name in WEIGHTS}
    return Weights(**{**rows, **layers}, ropes=tuple(rope.to(own.norm.device) for rope in ropes))


def ids_of(maps: dict[str, Tensor], rows: int, vocab: int, source: str | Path) -> Tensor | None:
    """The target's id of each row of the LM head, by d2t, which holds their distances. Raises CheckpointError."""
    if "d2t" not in maps:
        if rows != vocab:
            raise CheckpointError(f"{source} has a head of {rows} rows for {vocab} ids and no d2t, which says which")
        return None
    offsets = maps["d2t"]
    if offsets.shape != (rows,) or offsets.dtype not in (torch.int64, torch.int32):
        raise CheckpointError(f"d2t of {source} must be [{rows}] int64, got {list(offsets.shape)} {offsets.dtype}")
    ids = torch.arange(rows, dtype=torch.int64, device="cpu") + offsets.long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(ids.unique()) < rows:
        raise CheckpointError(f"d2t of {source} must name {rows} different ids below {vocab}")
    if (kept := maps.get("t2d")) is not None and not (
        kept.shape == (vocab,) and int(kept.sum()) == rows and bool(kept.bool()[ids].all())
    ):
        raise CheckpointError(f"d2t and t2d of {source} name different ids; export the head again")
    return ids
