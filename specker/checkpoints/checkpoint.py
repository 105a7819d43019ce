"""A Hugging Face checkpoint (local folder or hub id) read into fused, layer-stacked tensors.

Tensors are cast while they are copied from the memory-mapped safetensors file to their buffer (buffers.py).
"""

import math
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specker.checkpoints.buffers import Buffers, Piece, Storage, packs, part_of, pieces_of, random_weights
from specker.checkpoints.experts import is_fused
from specker.checkpoints.gguf import convert as gguf
from specker.checkpoints.parse import parse_config, read_json, reason
from specker.checkpoints.quantised.schemes import Scheme, scheme_of
from specker.checkpoints.tokenizer import Tokens
from specker.cpu.packed import Packed
from specker.model import memory
from specker.model.config import CheckpointError, ModelConfig
from specker.model.split import WHOLE, Part
from specker.model.weights import Matrix, Parameters, Rope, Weights

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
REOPEN = 1 << 27  # bytes after which the files are mapped anew, because pages that were read stay resident until then

SHARED_ROWS = ("specker.shared_ids", "specker.shared_rows")  # [n] int64, [n, E]: rows of the target's embedding
ALIKE = 0.98  # least cosine similarity to the target's rows: quantisation to 4 bits gives 0.997, another model 0

CONFIG_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]  # config, generation config, tokenizer, chat template
OTHER_FORMATS = ["consolidated*", "*/*"]  # a second copy of the weights, in the original format


@dataclass(frozen=True, eq=False)
class Checkpoint(Parameters):
    """A model's weights and where they come from."""

    folder: Path
    restored: tuple[str, ...] = ()  # GGUF formats that were restored to the run's dtype
    shared: Tokens | None = None  # shared with copies of this checkpoint, and with a draft that has the same tokenizer

    def __post_init__(self) -> None:
        if self.shared is None:
            object.__setattr__(self, "shared", Tokens(self.folder, self.config.architecture))

    @property
    def tokens(self) -> Tokens:
        assert self.shared is not None
        return self.shared

    @property
    def tokenizer(self) -> Any:
        """The tokenizer with its chat template, read on first use. Raises CheckpointError if there is none."""
        return self.tokens.tokenizer

    @property
    def recommended(self) -> dict[str, float]:
        """The sampling settings that generation_config.json recommends, fields of `specker.options.Sampling`; {} if it
        recommends greedy decoding or nothing. specker never applies them by itself."""
        raw = read_json(self.folder / "generation_config.json", required=False)
        if not raw.get("do_sample"):
            return {}
        given = {name: raw.get(name) for name in ("temperature", "top_p", "top_k")}
        return {name: value for name, value in given.items() if isinstance(value, int | float)}

    @property
    def tokenizer_or_none(self) -> Any:
        """The tokenizer, or None if there is none: prompts and results are then token ids only."""
        try:
            return self.tokenizer
        except CheckpointError:
            return None

    @property
    def further(self) -> "tuple[Checkpoint, ...]":
        """Other models of the checkpoint that draft in turn with this one: further MTP heads."""
        return ()

    @property
    def head_ids(self) -> Tensor | None:
        """The target's id of each row of the LM head, [rows] int64, if a head chooses its ids; None: row i is id i."""
        return None

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


def opened(source: str | Path, *, max_context: int | None = None, bidirectional: bool | None = None) -> Opened:
    """Open a local folder, a GGUF file or a hub id ("org/name"). A GGUF file is converted first; no weights are
    downloaded. `max_context` lowers the number of positions (default: all that the checkpoint supports).
    `bidirectional=True` makes a Qwen2 or Qwen3 checkpoint a masked-diffusion drafter; Dream always is one. Raises
    CheckpointError."""
    folder = folder_of(source, weights=False)
    raw = read_json(folder / "config.json")
    parsed = parse_config(folder, max_context, bidirectional, raw)
    return Opened(source, folder, *parsed, scheme_of(raw, str(source)))


def read(
    source: str | Path | Opened,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    max_context: int | None = None,
    bidirectional: bool | None = None,
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
    """Read a checkpoint in `dtype` onto `device`.

    `max_context` and `bidirectional` are passed to `opened`, unless `source` is opened already. `random` is a seed for
    random weights: no weight file is opened or downloaded. `part`: the tensor-parallel rank's part; with `whole_head`,
    or if the head is tied, it has all rows of the LM head. Without `layers`, only the embedding, the final norm and the
    head are read, for a model that another engine runs. `owner`: the target of a draft that shares its embedding or
    head. `quantize`: int8, int4 or fp8 rounds the layers' matrices and the head (int4 rounds the head to int8), `none`
    dequantises them to `dtype`, and None leaves them as stored. Weights are also dequantised for float64 runs and on
    CPUs without compiled kernels. `activations`: on a CPU, the type to which products with quantised weights round
    their input rows: int8 (default), bfloat16 or float32. Without `pack`, a CPU keeps quantised weights as `Quantized`,
    which models split over ranks need. `on_progress` is called with (elements read, total elements). Raises
    CheckpointError, and ValueError if memory is too small.
    """
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype must be one of {', '.join(map(str, DTYPES))}; got {dtype}")
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CheckpointError(f"device {device} needs a CUDA GPU, and torch finds none; use cpu")
    if isinstance(source, Opened):
        found = source
    else:  # check config.json before downloading weights
        found = opened(source, max_context=max_context, bidirectional=bidirectional)
    source, folder, config, scheme = found.source, found.folder, found.config, found.scheme
    part.check(config)
    if config.shares:
        _check_owner(source, config, owner)
    storage = Storage(scheme, quantize, dtype, device, pack and packs(config, dtype, device))

    def pieces_in(fused: bool) -> list[Piece]:
        return [p for p in pieces_of(config, part, whole_head, fused) if layers or p.layer is None]

    pieces = pieces_in(is_fused(getattr(scheme, "modules", ())))
    elements = sum(math.prod(p.shape) for p in pieces)
    size = str(source), storage.bytes_of(pieces, config), elements, dtype, memory.free(device), device.type
    memory.check_weights(*size)
    with memory.reported_as(lambda: memory.too_heavy(*size)):
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
    absent = dict.fromkeys(("qkv_bias", "q_norm", "k_norm", "o_bias", "gate_up_bias", "down_bias"))
    absent |= dict.fromkeys(("norm_in", "norm_post", "norm_o", "norm_down"))
    if not layers:
        absent |= dict.fromkeys(("qkv", "o", "gate_up", "down", "norm_in", "norm_post"), buffers["norm"].new_empty(0))
    ropes = tuple(rope.to(device) for rope in found.ropes)
    weights = Weights(**{**absent, **buffers}, ropes=ropes)  # type: ignore[arg-type]
    restored = getattr(scheme, "restored", ())
    return Checkpoint(config, weights, folder, restored, part=part, activations=activations or "int8")


def read_config(
    source: str | Path, *, max_context: int | None = None, bidirectional: bool | None = None
) -> ModelConfig:
    """Return `load(...).config` without reading or downloading weights. Raises CheckpointError."""
    return opened(source, max_context=max_context, bidirectional=bidirectional).config


def made_for(folder: Path, target: Checkpoint) -> bool:
    """Whether the draft in `folder` fits `target`: it shares no tensors, or `target` has the embedding that it
    shares."""
    config = read_config(folder)
    if not config.shares:
        return True
    with ExitStack() as stack:
        return _same_rows(folder, open_files(folder, stack), config, target)


def read_tokenizer(source: str | Path) -> Any:
    """Return `load(...).tokenizer` without reading or downloading weights. Raises CheckpointError."""
    found = opened(source)
    return Tokens(found.folder, found.config.architecture).tokenizer


def folder_of(source: str | Path, weights: bool, formats: tuple[str, ...] = ("*.safetensors",)) -> Path:
    """The local folder of `source`: converted if it is a GGUF file, downloaded if it is a hub id. `formats`: of the
    files with weights."""
    path = Path(source).expanduser()
    if (file := gguf.file_of(path)) is not None:
        return gguf.converted(file)
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{path} is a file; give a GGUF file, or the checkpoint's folder with its config.json")
    if isinstance(source, Path) or not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", source):
        raise CheckpointError(
            f"there is no folder {path}; give a checkpoint's folder or a hub id such as Qwen/Qwen3-0.6B"
        )
    from huggingface_hub import snapshot_download

    patterns = CONFIG_FILES + ([*formats] if weights else [])
    try:
        return Path(snapshot_download(source, allow_patterns=patterns, ignore_patterns=OTHER_FORMATS))
    except Exception as error:  # the hub's errors share no base class
        raise CheckpointError(
            f"{source} is not a local folder and could not be downloaded from the hub ({reason(error)}); "
            "check the name, the network and your access rights"
        ) from error


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
    only this part of split tensors. `pieces_in`: the pieces, given whether experts are fused (experts.py). `proof` is
    called with the open files before any weight is read, and may raise."""
    with ExitStack() as stack:
        where = open_files(folder, stack)
        proof(where)
        prefix = "model." if any(name.startswith("model.") for name in where) else ""
        kept = pieces_in(is_fused(where))
        pieces = {p.name if p.name == "lm_head.weight" else prefix + p.name: p for p in kept}
        check_tensors(_without_heads(where, prefix, c.num_layers), pieces, c, prefix, storage)

        def get(name: str) -> Tensor | None:
            return where[name].get_tensor(name) if name in where else None

        buffers = Buffers(pieces, c, storage)
        mapped = done = 0
        elements = sum(math.prod(p.shape) for p in pieces.values())
        for name, p in pieces.items():
            source: Matrix
            if storage.scheme is not None and storage.covers(name):
                source = part_of(p, name, storage.scheme, get)
            else:
                source = p.read(where[name], name)
            mapped += 0 if isinstance(source, Packed) and storage.packs else source.nbytes  # the run keeps the map
            buffers.put(p, source)
            done += math.prod(p.shape)
            if on_progress is not None:
                on_progress(done, elements)
            if mapped > REOPEN:
                del source, where
                stack.close()
                where, mapped = open_files(folder, stack), 0
        found = buffers.done()
        if part.rank:
            for name in ("o_bias", "down_bias"):
                for bias in found.get(name, ()):
                    bias.zero_()
    return found


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
    return CheckpointError(f"the draft {source} shares the {shared} of another target than {owner.folder}: {why}")


def _same_rows(source: str | Path, where: dict[str, Any], c: ModelConfig, owner: Checkpoint) -> bool:
    """Whether the embedding rows in the draft's file (SHARED_ROWS) are `owner`'s. Rows are compared by their cosine,
    because rounding and quantisation may have changed the target's: a hash would refuse a target in another dtype or in
    four bits. Raises CheckpointError if the file has no such rows."""
    embed = owner.weights.embed
    ids, rows = (where[name].get_tensor(name) if name in where else torch.empty(0) for name in SHARED_ROWS)
    known = ids.dtype == torch.int64 and rows.shape == (len(ids), c.hidden_size)
    if not known or not ((ids >= 0) & (ids < len(embed))).all():
        missing = f"{' and '.join(SHARED_ROWS)} of {source} are missing or do not fit together"
        raise CheckpointError(f"{missing}; export the draft again")
    own = embed[ids.to(embed.device)]
    own = (own if isinstance(own, Tensor) else own.dequantised(torch.float32)).float().cpu()
    return bool((torch.cosine_similarity(own, rows.float(), dim=-1) >= ALIKE).all())


def open_files(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Map all shards: tensor name -> the open file that holds it. Closing `stack` closes them."""
    from safetensors import SafetensorError, safe_open

    where: dict[str, Any] = {}
    for path in _shards(folder):
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is corrupt or truncated ({reason(error)}); download it again") from error
        where.update(dict.fromkeys(file.keys(), file))
    return where


def _shards(folder: Path) -> list[Path]:
    """The paths of all safetensors files. Raises CheckpointError if one is missing."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise CheckpointError(f"{index} has no weight_map; download it again")
        files = [Path(str(name)) for name in sorted(set(map(str, names.values())))]
        for file in files:
            if file.is_absolute() or ".." in file.parts:
                raise CheckpointError(f"{index} names {file}, which is outside of the checkpoint's folder; not read")
        paths = [folder / file for file in files]
        for path in paths:
            if not path.is_file():
                raise CheckpointError(f"{index.name} names {path.name}, which is not in {folder}; download it")
        return paths
    if list(folder.glob("pytorch_model*.bin*")):
        raise CheckpointError(
            f"{folder} has only pytorch_model.bin; convert it: load it with transformers and call save_pretrained"
        )
    raise CheckpointError(
        f"{folder} has no model.safetensors and no model.safetensors.index.json; specker reads only safetensors"
    )


def _without_heads(where: dict[str, Any], prefix: str, layers: int) -> dict[str, Any]:
    """The tensors but those of MTP heads, which only strategy `mtp` reads (mtp.py)."""
    starts = ["mtp.", f"{prefix}mtp_layers."]
    while f"{prefix}layers.{layers}.eh_proj.weight" in where:
        starts.append(f"{prefix}layers.{layers}.")
        layers += 1
    return {name: file for name, file in where.items() if not name.startswith(tuple(starts))}


def check_tensors(
    where: dict[str, Any], pieces: dict[str, Piece], c: ModelConfig, prefix: str, storage: Storage
) -> None:
    """Raise CheckpointError for missing, unexpected and misshapen tensors. Reads only headers, except for a tied
    head."""
    wanted: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {}
    ignored: set[str] = set()
    for name, p in pieces.items():
        if storage.covers(name):
            assert storage.scheme is not None
            wanted |= storage.scheme.stored(name.removesuffix(".weight"), p.matrix)
            ignored.update(storage.scheme.optional(name.removesuffix(".weight")))
        else:
            wanted[name] = p.stored, ("F64", "F32", "F16", "BF16")
    missing = [name for name in wanted if name not in where]
    if missing:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        hint = " (or set tie_word_embeddings)" if missing[0] == "lm_head.weight" else ""
        raise CheckpointError(f"the checkpoint lacks {missing[0]}{more}, which config.json requires{hint}")
    for name, (expected, dtypes) in wanted.items():
        header = where[name].get_slice(name)
        shape, stored = tuple(header.get_shape()), header.get_dtype()
        if shape != expected:
            vocab = f" (vocab_size {c.vocab_size})" if expected[0] == c.vocab_size and ".layers." not in name else ""
            raise CheckpointError(
                f"{name} has shape {shape}, but config.json makes it {expected}{vocab}; they must agree"
            )
        if stored not in dtypes:
            how = (
                "names no quantisation" if storage.scheme is None else f"with {storage.scheme.name} makes it otherwise"
            )
            raise CheckpointError(f"{name} is stored as {stored}, but config.json {how}; download the checkpoint again")
    unread = () if any(p.layer is not None for p in pieces.values()) else (f"{prefix}layers.",)
    for name in where.keys() - wanted.keys() - ignored:
        if name.startswith(unread):
            continue
        if name == "lm_head.weight" and c.tied and f"{prefix}embed_tokens.weight" in where:
            embed, head = (where[n].get_tensor(n) for n in (f"{prefix}embed_tokens.weight", name))
            if embed.dtype != head.dtype or not torch.equal(embed, head):
                raise CheckpointError(
                    "lm_head.weight differs from embed_tokens.weight although tie_word_embeddings is true; "
                    "set it to false in config.json to use both"
                )
        elif not (name.endswith("rotary_emb.inv_freq") or (c.shares and name in SHARED_ROWS)):
            # old checkpoints saved the buffer inv_freq; config.json defines it
            raise CheckpointError(
                f"the checkpoint has {name}, which {c.architecture} with this config.json does not use"
            )
