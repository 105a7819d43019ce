"""One reader of all heads that have a folder of their own (`HeadLayout`), and what it shares with MTP's."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from reprlib import repr as short
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from specker.checkpoints.architectures.heads import HeadTable
from specker.checkpoints.buffers import Buffers, Storage, packs
from specker.checkpoints.checkpoint import Checkpoint, OpenedHead
from specker.checkpoints.files import BIN, check_tensors, folder_of, open_files, read_piece
from specker.checkpoints.parse import SHARED, read_json, unsupported
from specker.checkpoints.pieces import Piece, pieces_of
from specker.layer_weights import shape_of
from specker.model.config import CheckpointError, ModelConfig
from specker.model.heads import HeadSpec, HeadWeights
from specker.model.split import WHOLE
from specker.model.weights import Rope, Weights

WEIGHTS = {own.name for own in fields(Weights)}
PARTS = "transformer_layer_config", "eagle_config", "dflash_config", "dspine_config"
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


class Files(NamedTuple):
    """The open files of a head."""

    source: str | Path  # as the user names it
    folder: Path
    raw: dict[str, Any]  # config.json
    where: dict[str, Any]  # the file of each tensor, without those of `extra`
    extra: dict[str, Tensor]  # by name, as far as the head has them


@dataclass(frozen=True, eq=False)
class HeadLayout(OpenedHead):
    """A head with a folder of its own: which tensors its files hold, and what they compute."""

    spec: Any  # of the head's model

    made: ClassVar[Callable[..., Checkpoint]] = HeadCheckpoint
    extra: ClassVar[tuple[str, ...]] = "d2t", "t2d"  # tensors that are read apart from `pieces`
    more: ClassVar[tuple[str, ...]] = ()  # files beside or instead of safetensors files
    strategy: ClassVar[str]
    reads: ClassVar[tuple[str, ...]]  # the architectures with which the strategy drafts

    @classmethod
    def open(cls, source: str | Path, target: ModelConfig) -> Self:
        """Open a folder or hub id, whose files are downloaded: the names of the tensors say what the head is. Raises
        CheckpointError."""
        check_stream(source, target)
        folder = folder_of(source, weights=True, formats=("*.safetensors", *cls.more))
        with ExitStack() as stack:
            return cls.of(cls.files(source, folder, stack), target)

    @classmethod
    def files(cls, source: str | Path, folder: Path, stack: ExitStack) -> Files:
        where = open_files(folder, stack, or_bin=BIN in cls.more)
        extra = {name: where.pop(name).get_tensor(name) for name in cls.extra if name in where}
        return Files(source, folder, read_json(folder / "config.json"), where, extra)

    def read(self, target: Checkpoint, dtype: torch.dtype, quantize: str | None = None) -> Checkpoint:
        storage = self.storage(quantize, dtype, target.weights.norm.device)
        with ExitStack() as stack:
            files = self.files(self.source, self.folder, stack)
            found = read_tensors(self.used(files), self.pieces(), self.config, storage, self.source)
        parts = self.parts(found, files, storage)
        return self.made(
            self.config,
            weights_of(found, target.weights, self.ropes),
            self.folder,
            getattr(storage.scheme, "restored", ()),
            shared=target.tokens,
            activations=target.activations,
            spec=self.spec,
            parts=parts,
        )

    @classmethod
    @abstractmethod
    def of(cls, files: Files, target: ModelConfig) -> Self:
        """Raises CheckpointError for what config.json, the tensors and the target do not agree on."""

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """Every tensor that the checkpoint must have, and no other."""

    @abstractmethod
    def parts(self, found: dict[str, Any], files: Files, storage: Storage) -> Any:
        """What the head's model has beside its layers, of the tensors that were read, by field. Raises
        CheckpointError."""

    @classmethod
    def unread(cls, source: str | Path, name: object) -> CheckpointError:
        """What to raise for another architecture."""
        return unsupported(str(name), cls.reads, f" by strategy {cls.strategy}, for which {source} is given")

    def used(self, files: Files) -> dict[str, Any]:
        """`Files.where` without tensors that nothing reads. Raises CheckpointError."""
        return files.where

    def storage(self, quantize: str | None, dtype: torch.dtype, device: torch.device) -> Storage:
        return Storage(self.scheme, quantize, dtype, device, packs(self.config, dtype, device))


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


def check_target(folder: str | Path, what: str, sizes: dict[str, tuple[Any, int]]) -> None:
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


def layer_pieces(c: ModelConfig, fused: bool = False) -> Iterator[Piece]:
    """The tensors of a head's layers. `fused`: see `pieces_of`."""
    return (p for p in pieces_of(replace(c, shares=SHARED), WHOLE, True, fused) if p.layer is not None)


def head_pieces(table: HeadTable, sizes: Mapping[str, int], parts: Collection[str], c: ModelConfig) -> Iterator[Piece]:
    """The tensors of the table that a head with these parts has."""
    for own in table:
        if own.part and own.part not in parts:
            continue
        offset = c.norm_offset if "norm" in own.field else 0.0
        for n in range(sizes[own.copies] if own.copies else 1):
            p = Piece.tensor(own.name.replace("#", str(n)), own.field, *shape_of(own.shape, sizes), offset=offset)
            yield replace(p, row=n * p.rows)


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


def ids_of(files: Files, rows: int, vocab: int, device: torch.device) -> Tensor | None:
    """The target's id of each row of the LM head, by d2t, which holds their distances. Raises CheckpointError."""
    maps, source = files.extra, files.source
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
    return ids.to(device)
