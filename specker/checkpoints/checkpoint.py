"""A Hugging Face checkpoint (local folder or hub id) read into fused, layer-stacked tensors.

Tensors are cast while they are copied from the memory-mapped safetensors file to their buffer (buffers.py).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specker.checkpoints.buffers import Buffers, Storage, packs, random_weights
from specker.checkpoints.files import SHARED_ROWS, check_tensors, folder_of, open_files, read_piece
from specker.checkpoints.gguf.cache import origin
from specker.checkpoints.parse import parse_config, read_json, text_config
from specker.checkpoints.pieces import HOST, Piece, is_fused, pieces_of
from specker.checkpoints.quantised.schemes import Scheme, scheme_of
from specker.checkpoints.tokenizer import Tokens
from specker.checkpoints.translation import Translation
from specker.cpu.packed import Packed
from specker.fields import option
from specker.model import memory
from specker.model.config import CheckpointError, ModelConfig
from specker.model.split import WHOLE, Part
from specker.model.weights import Parameters, Rope, Weights
from specker.options import RECOMMENDED

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
REOPEN = 1 << 27  # bytes after which the files are mapped anew, because pages that were read stay resident until then

PREFIXES = "model.language_model.", "model."  # of the names of a text model's tensors; the first in multimodal files
OTHERS = "visual", "vision_tower", "audio_tower", "embed_vision", "embed_audio"
UNREAD = tuple(f"{start}{name}." for start in ("model.", "") for name in OTHERS)  # the other tensors of these files
ALIKE = 0.98  # least cosine similarity to the target's rows: quantisation to 4 bits gives 0.997, another model 0


@dataclass(frozen=True, eq=False)
class Checkpoint(Parameters):
    """A model's weights and where they come from."""

    folder: Path
    restored: tuple[str, ...] = ()  # GGUF formats that were restored to the run's dtype
    shared: Tokens | None = None  # shared with copies of this checkpoint, and with a draft that has the same tokenizer
    translation: Translation | None = None  # of a draft with another tokenizer; its head has the shared tokens' rows

    def __post_init__(self) -> None:
        if self.shared is None:
            object.__setattr__(self, "shared", Tokens(self.folder, self.config.architecture))

    @property
    def tokens(self) -> Tokens:
        assert self.shared is not None
        return self.shared

    @property
    def called(self) -> str:
        """Its name in messages: the GGUF file that was converted into its folder, or else the folder."""
        return origin(self.folder) or str(self.folder)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer with its chat template, read on first use. Raises CheckpointError if there is none."""
        return self.tokens.tokenizer

    @property
    def recommended(self) -> dict[str, float]:
        """The sampling settings that generation_config.json recommends, fields of `specker.options.Sampling`; {} if it
        recommends greedy decoding or nothing. See `Engine.usual_sampling`."""
        raw = read_json(self.folder / "generation_config.json", required=False)
        if not raw.get("do_sample"):
            return {}
        given = {name: raw.get(name) for name in RECOMMENDED}
        return {name: value for name, value in given.items() if isinstance(value, int | float)}

    @property
    def tokenizer_or_none(self) -> Any:
        """The tokenizer, or None if there is none: prompts and results are then token ids only."""
        try:
            return self.tokenizer
        except CheckpointError:
            return None

    @property
    def head_ids(self) -> Tensor | None:
        """The target's id of each row of the LM head, [rows] int64, if a head chooses its ids; None: row i is id i."""
        return None

    @property
    def untrimmed(self) -> str:
        """Why the LM head cannot be trimmed, after the checkpoint's name; empty if it can."""
        return "" if self.head_ids is None else f"has {len(self.head_ids)} rows for ids of its own choice (d2t)"

    @property
    def vocabulary(self) -> dict[str, int] | None:
        """The tokenizer's tokens with their ids; None without a tokenizer."""
        return None if self.tokenizer_or_none is None else self.tokens.vocabulary


@dataclass(frozen=True, eq=False)
class Opened:
    """A checkpoint whose config was read and checked, but whose weights were not read."""

    source: str | Path  # as the user named it
    folder: Path
    config: ModelConfig
    ropes: tuple[Rope, ...]
    scheme: Scheme | None  # how matrices are stored; None: not quantised

    @property
    def configs(self) -> tuple[ModelConfig, ...]:
        """Of its models: several MTP heads draft in turn."""
        return (self.config,)


@dataclass(frozen=True, eq=False)
class OpenedHead(Opened, ABC):
    """A head that was opened for a target; `config`: of its layers."""

    @abstractmethod
    def read(self, target: Checkpoint, dtype: torch.dtype, quantize: str | None = None) -> Checkpoint:
        """Read the head in `dtype` onto the target's device. `quantize` rounds the matrices of its layers and its LM
        head as `checkpoint.read` does. Raises CheckpointError."""


def opened(source: str | Path, *, max_context: int | None = None, bidirectional: bool | None = None) -> Opened:
    """Open a local folder, a GGUF file or a hub id ("org/name"). A GGUF file is converted first; no weights are
    downloaded. `max_context` lowers the number of positions (default: all that the checkpoint supports).
    `bidirectional=True` makes a Qwen2 or Qwen3 checkpoint a masked-diffusion drafter; Dream always is one. Raises
    CheckpointError."""
    folder = folder_of(source, weights=False)
    raw = text_config(read_json(folder / "config.json"))
    config, ropes = parse_config(folder, max_context, bidirectional, raw)
    return Opened(source, folder, config, ropes, scheme_of(raw, str(source)))


def read(
    source: str | Path | Opened,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    random: int | None = None,
    part: Part = WHOLE,
    whole_head: bool = False,
    layers: bool = True,
    owner: Checkpoint | None = None,
    quantize: str | None = None,
    activations: str | None = None,
    pack: bool = True,
    on_progress: Callable[[int, int], None] | None = None,
) -> Checkpoint:
    """Read a checkpoint in `dtype` onto `device`. `source`: as of `opened`, or what that returned.

    `random` is a seed for random weights: no weight file is opened or downloaded. `part`: the tensor-parallel rank's
    part; with `whole_head`, or if the head is tied, it has all rows of the LM head. Without `layers`, only the
    embedding, the final norm and the head are read, for a model that another engine runs. `owner`: the target of a
    draft that shares its embedding or head. `quantize`: int8, int4 or fp8 rounds the layers' matrices and the head
    (int4 rounds the head to int8), `none` dequantises them to `dtype`, and None leaves them as stored; `buffers.AUTO`
    is int8 for a CPU's compiled kernels and a checkpoint that is not quantised. Weights are also dequantised for
    float64 runs and on CPUs without compiled kernels. `activations`: on a CPU, the type to which products with
    quantised weights round their input rows: int8 (default), bfloat16 or float32. Without `pack`, a CPU keeps quantised
    weights as `Quantized`, for layers that the compiled library will not run. `on_progress` is called with (elements
    read, total elements). Raises CheckpointError, and ValueError if memory is too small.
    """
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype must be one of {', '.join(map(str, DTYPES))}; got {dtype}")
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CheckpointError(f"device {device} needs a CUDA GPU, and torch finds none; use cpu")
    found = source if isinstance(source, Opened) else opened(source)  # checks config.json before a download of weights
    source, folder, config, scheme = found.source, found.folder, found.config, found.scheme
    part.check(config, "target" if owner is None else "draft")
    if config.shares:
        _check_owner(source, config, owner)
    storage = Storage(scheme, quantize, dtype, device, pack and packs(part.config(config), dtype, device))

    def pieces_in(fused: bool) -> list[Piece]:
        return [p for p in pieces_of(config, part, whole_head, fused) if layers or p.layer is None]

    pieces = pieces_in(is_fused(getattr(scheme, "modules", ())))
    elements = sum(math.prod(p.shape) for p in pieces if p.buffer != HOST)
    name, size, free = str(source), storage.bytes_of(pieces, config), memory.free(device)
    memory.check_weights(name, size, elements, dtype, free, device.type)
    with memory.reported_as(lambda: memory.too_heavy(name, size, elements, dtype, free, device.type)):
        if random is None:
            if not Path(source).expanduser().exists():  # a hub id
                folder = folder_of(source, weights=True)

            def proof(where: dict[str, Any]) -> None:
                if owner is not None and config.shares and not _same_rows(source, where, config, owner):
                    raise _another(source, config, owner, "the rows of its embedding differ")

            buffers = _read_weights(folder, config, pieces_in, storage, part, proof, on_progress)
        else:
            buffers = random_weights(config, pieces, storage, random)
    if owner is not None and "embed_tokens" in config.shares:
        buffers["embed"] = owner.weights.embed
    if owner is not None and "lm_head" in config.shares:
        buffers["head"] = owner.weights.head
    buffers.setdefault("head", buffers["embed"])
    weights = Weights(**buffers, ropes=tuple(rope.to(device) for rope in found.ropes))
    restored = getattr(scheme, "restored", ())
    return Checkpoint(config, weights, folder, restored, part=part, activations=activations or "int8")


def read_config(source: str | Path, *, max_context: int | None = None) -> ModelConfig:
    """The config of a source, which `opened` describes. Raises CheckpointError."""
    return opened(source, max_context=max_context).config


def made_for(folder: Path, target: Checkpoint) -> bool:
    """Whether the draft in `folder` fits `target`: it shares no tensors, or `target` has the embedding that it
    shares."""
    config = read_config(folder)
    if not config.shares:
        return True
    with ExitStack() as stack:
        return _same_rows(folder, open_files(folder, stack), config, target)


def read_tokenizer(source: str | Path) -> Any:
    """The tokenizer of a source. Raises CheckpointError."""
    found = opened(source)
    return Tokens(found.folder, found.config.architecture).tokenizer


def _read_weights(
    folder: Path,
    c: ModelConfig,
    pieces_in: Callable[[bool], list[Piece]],
    storage: Storage,
    part: Part,
    proof: Callable[[dict[str, Any]], None],
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Check every tensor's name, shape and dtype against the config, then fill the buffers (fields of Weights). Reads
    only this part of split tensors. `pieces_in`: the pieces, given whether experts are fused (pieces.py). `proof` is
    called with the open files before any weight is read, and may raise."""
    with ExitStack() as stack:
        where = open_files(folder, stack)
        proof(where)
        where = {name: file for name, file in where.items() if not name.startswith(UNREAD)}
        prefix = next((p for p in PREFIXES if any(name.startswith(p) for name in where)), "")
        kept = pieces_in(is_fused(where))
        pieces = {p.name if p.name == "lm_head.weight" else prefix + p.name: p for p in kept}
        heads = bool(where)
        where = _without_heads(where, prefix, c.num_layers)
        if heads and not where:
            raise CheckpointError(
                f"{origin(folder) or folder} holds only MTP heads: pass it as {option('draft')} of its model, with "
                f"{option('strategy', 'mtp')}"
            )
        check_tensors({name: x for name, x in where.items() if not idle(c, prefix, name)}, pieces, c, prefix, storage)

        buffers = Buffers(pieces, c, storage)
        mapped = done = 0
        elements = sum(math.prod(p.shape) for p in pieces.values())
        for name, p in pieces.items():
            source = read_piece(p, name, where, storage)
            kept_map = p.buffer == HOST or (isinstance(source, Packed) and storage.packs)
            mapped += 0 if kept_map else source.nbytes
            buffers.put(p, source)
            done += math.prod(p.shape)
            if on_progress is not None:
                on_progress(done, elements)
            if mapped > REOPEN:
                del source, where
                stack.close()
                where, mapped = open_files(folder, stack), 0
        found = buffers.done()
        for name, own in (("o_bias", part.mixer), ("down_bias", part)):
            for bias in found.get(name, ()) if own.rank else ():
                bias.zero_()
    return found


def _without_heads(where: dict[str, Any], prefix: str, layers: int) -> dict[str, Any]:
    """The tensors but those of MTP heads, which only strategy `mtp` reads (drafts/mtp.py)."""
    starts = ["mtp.", f"{prefix}mtp_layers."]
    while f"{prefix}layers.{layers}.eh_proj.weight" in where:
        starts.append(f"{prefix}layers.{layers}.")
        layers += 1
    return {name: file for name, file in where.items() if not name.startswith(tuple(starts))}


def idle(c: ModelConfig, prefix: str, name: str) -> bool:
    """Whether a tensor is of a layer's own K and V although the layer reads those of another one (KV.source)."""
    part = name.removeprefix(f"{prefix}layers.").split(".")
    if len(part) < 3 or part[1] != "self_attn" or part[2] not in ("k_proj", "v_proj", "k_norm", "v_norm"):
        return False
    return part[0].isdigit() and int(part[0]) < c.num_layers and c.kv(int(part[0])).source is not None


def _check_owner(source: str | Path, c: ModelConfig, owner: Checkpoint | None) -> None:
    """Raise CheckpointError if `owner` is missing, or cannot be the target whose tensors the draft shares."""
    if owner is None:
        raise CheckpointError(
            f"{source} is a draft that shares its target's {' and '.join(c.shares)}; it runs only beside its target"
        )
    sizes = (c.vocab_size, c.hidden_size), (owner.config.vocab_size, owner.config.hidden_size)
    if sizes[0] != sizes[1]:
        raise _another(source, c, owner, f"its embedding is {sizes[0]}, the target's {sizes[1]}")


def _another(source: str | Path, c: ModelConfig, owner: Checkpoint, why: str) -> CheckpointError:
    shared = " and ".join(c.shares)
    return CheckpointError(f"the draft {source} shares the {shared} of another target than {owner.called}: {why}")


def _same_rows(source: str | Path, where: dict[str, Any], c: ModelConfig, owner: Checkpoint) -> bool:
    """Whether the embedding rows in the draft's file (SHARED_ROWS) are `owner`'s. Rows are compared by their cosine,
    because rounding and quantisation may have changed the target's: a hash would refuse a target in another dtype or in
    four bits. Raises CheckpointError if the file has no such rows."""
    embed = owner.weights.embed
    none = torch.empty(0, dtype=torch.float32, device="cpu")
    ids, rows = (where[name].get_tensor(name) if name in where else none for name in SHARED_ROWS)
    known = ids.dtype == torch.int64 and rows.shape == (len(ids), c.hidden_size)
    if not known or not ((ids >= 0) & (ids < len(embed))).all():
        missing = f"{' and '.join(SHARED_ROWS)} of {source} are missing or do not fit together"
        raise CheckpointError(f"{missing}; export the draft again")
    own = embed[ids.to(embed.device)]
    own = (own if isinstance(own, Tensor) else own.dequantised(torch.float32)).float().cpu()
    return bool((torch.cosine_similarity(own, rows.float(), dim=-1) >= ALIKE).all())
