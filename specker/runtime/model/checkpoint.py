"""A Hugging Face checkpoint (local folder or hub id) read into fused, layer-stacked tensors.

Each kind of weight is one buffer [L, ...] for all layers, so a group of layers is a slice. Tensors are cast while they
are copied from the memory-mapped safetensors file to their buffer: there is never a second copy of the weights.
Matrices in eight and four bits (kernels/quant.py) are a list of the layers' instead.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specker.kernels import quant
from specker.kernels.cpu import native
from specker.kernels.quant import Matrix, Quantized
from specker.runtime.model import gguf, memory
from specker.runtime.model.config import (
    CheckpointError,
    ModelConfig,
    layer_elements,
    parse_config,
    read_json,
    reason,
)
from specker.runtime.model.parts import Part
from specker.runtime.model.quantised import Get, Scheme, scheme_of

WHOLE = Part()
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SIZES = {"F64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1, "F8_E4M3": 1}  # of safetensors dtypes
CHUNK = 1 << 22  # elements cast at a time: the host stages casts for a GPU
REOPEN = 1 << 27  # bytes after which files are mapped anew: pages that were read stay resident until then

SHARED_ROWS = ("specker.shared_ids", "specker.shared_rows")  # [n] int64, [n, E]: rows of the target's embedding
ALIKE = 0.98  # least cosine of such a row and the target's: quantisation to 4 bits gives 0.997, another model 0

CONFIG_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]  # config, generation config, tokenizer, chat template
OTHER_FORMATS = ["consolidated*", "*/*"]  # a second copy of the weights, in the original format


Stacked = Matrix | Sequence[Matrix]


@dataclass(frozen=True, eq=False)
class Weights:
    """Weights on the run's device: the matrices in its dtype, the vectors in that of its activations (`activations`). V
    vocabulary, E hidden size, F intermediate size, L layers, Hq query heads and Hkv KV heads of dimension D. A tensor
    [L, ..] may also be a list of the layers' tensors. A `Stacked` matrix may be `Quantized`, or a list of the layers'."""

    embed: Tensor  # [V, E]
    qkv: Stacked  # [L, (Hq + 2 * Hkv) * D, E], rows: q heads, k heads, v heads
    qkv_bias: Tensor | None  # [L, (Hq + 2 * Hkv) * D]
    q_norm: Tensor | None  # [L, D]
    k_norm: Tensor | None  # [L, D]
    o: Stacked  # [L, E, Hq * D]
    o_bias: Tensor | None  # [L, E]
    gate_up: Stacked  # [L, 2 * F, E], gate rows first
    gate_up_bias: Tensor | None  # [L, 2 * F]
    down: Stacked  # [L, E, F]
    down_bias: Tensor | None  # [L, E]
    norm_in: Tensor  # [L, E]
    norm_post: Tensor  # [L, E]
    norm: Tensor  # [E]
    head: Matrix  # [V, E], the same tensor as `embed` if tied and not quantised
    inv_freq: Tensor  # [D / 2] float32 in every run
    rope_scale: float  # factor of cos and sin (yarn)


def _matrices(w: Weights) -> list[Matrix]:
    """The layers' matrices, stacked or each."""
    stacks = w.qkv, w.o, w.gate_up, w.down
    return [x for stack in stacks for x in ((stack,) if isinstance(stack, Tensor | Quantized) else stack)]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    config: ModelConfig  # of the whole model
    weights: Weights  # of the part; the head may be whole
    folder: Path
    part: Part = WHOLE

    @property
    def local(self) -> ModelConfig:
        """The part as a model of its own."""
        return self.part.config(self.config)

    @property
    def own_head(self) -> Matrix:
        """The part's rows of the head."""
        first, count = self.part.vocabulary(self.config)
        head = self.weights.head
        return head[first : first + count] if self.part.size > 1 and len(head) > count else head

    @property
    def layer_bytes(self) -> float:
        """Bytes of all layers' matrices, of the whole model."""
        w, c = self.weights, self.local
        return sum(x.nbytes for x in _matrices(w)) * layer_elements(self.config) / layer_elements(c)

    @property
    def quantised(self) -> str | None:
        """The kinds of the quantised matrices, for reports: "int4 and int8"; None if there are none."""
        every = (*_matrices(self.weights), self.weights.head)
        return " and ".join(sorted({x.kind for x in every if isinstance(x, Quantized)})) or None

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer with its chat template, read on first use. Raises CheckpointError if there is none."""
        return _tokenizer(self.folder, self.config.architecture)

    @property
    def recommended(self) -> dict[str, float]:
        """The sampling settings that generation_config.json recommends, fields of `specker.config.Sampling`; {} if it
        recommends greedy decoding or nothing. They are never taken by themselves."""
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
    def vocabulary(self) -> dict[str, int] | None:
        """The tokenizer's tokens with their ids; None without a tokenizer."""
        tokenizer = self.tokenizer_or_none
        return None if tokenizer is None else tokenizer.get_vocab()


def load(
    source: str | Path,
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
    tell: Callable[[int, int], None] | None = None,
) -> Checkpoint:
    """Read a local folder or a hub id ("org/name") in `dtype` onto `device`.

    `max_context` lowers the number of positions (default: all that the checkpoint supports). `bidirectional=True` makes
    a Qwen2 or Qwen3 checkpoint a masked-diffusion drafter; Dream always is one. `random` is a seed for random weights:
    no weight file is opened or downloaded. `part`: the tensor-parallel rank's part; with `whole_head`, or if the head
    is tied, it has all rows of the LM head. Without `layers`, only the embedding, the final norm and the head are read:
    another engine runs the model. `owner`: the target of a draft that shares its embedding or head. `quantize`: int8,
    int4 or fp8, to which the layers' matrices and the head are rounded; none restores quantised ones to `dtype`; by
    default they stay as they are stored. int4 keeps the head in int8. float64 runs restore the stored values, and so
    does a CPU without kernels for them. `tell` is called with (elements read, of all). Raises CheckpointError, and
    ValueError if memory is too small.
    """
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype must be one of {', '.join(map(str, DTYPES))}; got {dtype}")
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CheckpointError(f"device {device} needs a CUDA GPU, and torch finds none; use cpu")
    folder = folder_of(source, weights=False)  # check config.json before downloading weights
    config, inv_freq, rope_scale = parse_config(folder, max_context, bidirectional)
    part.check(config)
    if config.shares:
        _check_owner(source, config, owner)
    scheme = scheme_of(read_json(folder / "config.json"), str(source))
    storage = Storage(scheme, quantize, dtype, device)
    pieces = [p for p in _pieces(config, part, whole_head) if layers or p.layer is None]
    elements = sum(math.prod(p.shape) for p in pieces)
    size = str(source), storage.bytes_of(pieces, config), elements, dtype, memory.free(device), device.type
    memory.check_weights(*size)
    with memory.reported_as(lambda: memory.too_heavy(*size)):
        if random is None:
            folder = folder_of(source, weights=True)
            if owner is not None and config.shares and not _same_rows(source, folder, config, owner):
                raise _another(source, config, owner, "the rows of its embedding differ")
            buffers = _read_weights(folder, config, pieces, storage, part, tell)
        else:
            buffers = _random_weights(config, pieces, storage, random)
    if owner is not None and "embed_tokens" in config.shares:
        buffers["embed"] = owner.weights.embed
    if owner is not None and "lm_head" in config.shares:
        buffers["head"] = owner.weights.head
    buffers.setdefault("head", buffers["embed"])
    absent = dict.fromkeys(("qkv_bias", "q_norm", "k_norm", "o_bias", "gate_up_bias", "down_bias"))
    if not layers:
        absent |= dict.fromkeys(("qkv", "o", "gate_up", "down", "norm_in", "norm_post"), buffers["norm"].new_empty(0))
    weights = Weights(**{**absent, **buffers}, inv_freq=inv_freq.to(device), rope_scale=rope_scale)  # type: ignore[arg-type]
    return Checkpoint(config, weights, folder, part)


def activations(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of the residual stream and the K/V beside weights of `dtype`. A CPU is fast in bfloat16 at matrix
    products alone, so there everything else is float32."""
    return torch.float32 if device.type == "cpu" and dtype == torch.bfloat16 else dtype


def read_config(
    source: str | Path, *, max_context: int | None = None, bidirectional: bool | None = None
) -> ModelConfig:
    """Return `load(...).config` without reading or downloading weights. Raises CheckpointError."""
    return parse_config(folder_of(source, weights=False), max_context, bidirectional)[0]


def made_for(folder: Path, target: Checkpoint) -> bool:
    """Whether the draft in `folder` shares nothing, or `target` has the embedding that it shares."""
    config = read_config(folder)
    return not config.shares or _same_rows(folder, folder, config, target)


def read_tokenizer(source: str | Path) -> Any:
    """Return `load(...).tokenizer` without reading or downloading weights. Raises CheckpointError."""
    folder = folder_of(source, weights=False)
    return _tokenizer(folder, parse_config(folder, None, None)[0].architecture)


def folder_of(source: str | Path, weights: bool) -> Path:
    """The local folder of `source`: converted if it is a GGUF file, downloaded if it is a hub id."""
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

    patterns = CONFIG_FILES + (["*.safetensors"] if weights else [])
    try:
        return Path(snapshot_download(source, allow_patterns=patterns, ignore_patterns=OTHER_FORMATS))
    except Exception as error:  # the hub's errors share no base class
        raise CheckpointError(
            f"{source} is not a local folder and could not be downloaded from the hub ({reason(error)}); "
            "check the name, the network and your access rights"
        ) from error


@dataclass(frozen=True)
class _Piece:
    """A tensor of the checkpoint, or a part of one, stored at buffers[buffer][layer][row : row + shape[0]]."""

    name: str  # without the "model." prefix
    buffer: str  # a field of Weights
    layer: int | None  # None: the buffer is not stacked
    row: int
    shape: tuple[int, ...]  # of the part
    stored: tuple[int, ...]  # of the whole tensor
    first: tuple[int, ...]  # first index of the part in the tensor

    @property
    def whole(self) -> bool:
        return self.shape == self.stored

    @property
    def at(self) -> tuple[slice, ...]:
        return tuple(slice(first, first + count) for first, count in zip(self.first, self.shape, strict=True))

    @property
    def is_matrix(self) -> bool:
        """Whether it is a layer's matrix."""
        return self.layer is not None and len(self.shape) == 2


@dataclass(frozen=True)
class Storage:
    """How the run stores matrices: which stay or become `Quantized`."""

    scheme: Scheme | None  # of the checkpoint
    quantize: str | None  # see `load`
    dtype: torch.dtype  # of the others
    device: torch.device

    @property
    def keeps(self) -> bool:
        """Whether `Quantized` matrices stay so, or are restored to `dtype`."""
        kernels = self.device.type == "cuda" or ((cpu := native()) is not None and cpu.reads_halves())
        return self.quantize != "none" and self.dtype != torch.float64 and kernels

    def covers(self, name: str) -> bool:
        """Whether the checkpoint has the matrix `name` (a full name that ends in .weight) in eight or four bits."""
        return self.scheme is not None and name.endswith(".weight") and self.scheme.covers(name[: -len(".weight")])

    def rounding(self, p: _Piece, c: ModelConfig) -> str | None:
        """The kind to which a piece is rounded; None: to none."""
        head = p.name == "lm_head.weight" or (c.tied and p.name == "embed_tokens.weight")
        if self.quantize in (None, "none") or not (p.is_matrix or head):
            return None
        return "int8" if head and self.quantize == "int4" else self.quantize

    def stays(self, pieces: dict[str, _Piece], c: ModelConfig) -> set[tuple[str, int | None]]:
        """The matrices (buffer, layer) that are `Quantized` in the run: those of which all pieces are."""
        found: dict[tuple[str, int | None], bool] = {}
        for name, p in pieces.items():
            if p.is_matrix or p.buffer == "head":
                whole = self.keeps and (self.covers(name) or self.rounding(p, c) is not None)
                found[p.buffer, p.layer] = found.get((p.buffer, p.layer), True) and whole
        return {key for key, whole in found.items() if whole}

    def bytes_of(self, pieces: Iterable[_Piece], c: ModelConfig) -> int:
        """Bytes that the weights take, about."""
        return int(sum(math.prod(p.shape) * self._each(p, c) for p in pieces))

    def _each(self, p: _Piece, c: ModelConfig) -> float:
        if self.keeps and (kind := self.rounding(p, c)) is not None:
            head = self.dtype.itemsize if p.name == "embed_tokens.weight" else 0  # the embedding stays as it is
            return head + (0.625 if kind == "int4" else 1.0)
        name = p.name if p.name == "lm_head.weight" else f"model.{p.name}"
        if self.keeps and self.scheme is not None and self.covers(name):
            O, E = p.stored
            tensors = self.scheme.stored(name[: -len(".weight")], (O, E)).values()
            return sum(math.prod(shape) * SIZES.get(kinds[0], 4) for shape, kinds in tensors) / (O * E)
        return self.dtype.itemsize


def _pieces(c: ModelConfig, part: Part, whole_head: bool) -> Iterator[_Piece]:
    """The piece of each tensor that `part` holds; with `whole_head`, all of the head."""
    (q0, q), (k0, kv), (f0, f) = part.heads(c), part.kv_heads(c), part.inner(c)
    D, e = c.head_dim, c.hidden_size
    q0, q, k0, kv = q0 * D, q * D, k0 * D, kv * D
    Q, KV, F = c.num_heads * D, c.num_kv_heads * D, c.intermediate_size
    rows = [  # split by their outputs: name, buffer, first row, (first, count, of all), has a bias
        ("self_attn.q_proj", "qkv", 0, (q0, q, Q), c.qkv_bias),
        ("self_attn.k_proj", "qkv", q, (k0, kv, KV), c.qkv_bias),
        ("self_attn.v_proj", "qkv", q + kv, (k0, kv, KV), c.qkv_bias),
        ("mlp.gate_proj", "gate_up", 0, (f0, f, F), c.mlp_bias),
        ("mlp.up_proj", "gate_up", f, (f0, f, F), c.mlp_bias),
    ]
    columns = [  # by their inputs; the bias is added once, by rank 0
        ("self_attn.o_proj", "o", (q0, q, Q), c.o_bias),
        ("mlp.down_proj", "down", (f0, f, F), c.mlp_bias),
    ]

    def vector(name: str, buffer: str, layer: int | None, count: int) -> _Piece:
        return _Piece(name, buffer, layer, 0, (count,), (count,), (0,))

    norms = [("input_layernorm", "norm_in", e), ("post_attention_layernorm", "norm_post", e)]
    if c.qk_norm:
        norms += [("self_attn.q_norm", "q_norm", c.head_dim), ("self_attn.k_norm", "k_norm", c.head_dim)]
    V = c.vocab_size
    if "embed_tokens" not in c.shares:
        yield _Piece("embed_tokens.weight", "embed", None, 0, (V, e), (V, e), (0, 0))
    for i in range(c.num_layers):
        for name, buffer, row, (first, count, of), bias in rows:
            yield _Piece(f"layers.{i}.{name}.weight", buffer, i, row, (count, e), (of, e), (first, 0))
            if bias:
                yield _Piece(f"layers.{i}.{name}.bias", f"{buffer}_bias", i, row, (count,), (of,), (first,))
        for name, buffer, (first, count, of), bias in columns:
            yield _Piece(f"layers.{i}.{name}.weight", buffer, i, 0, (e, count), (e, of), (0, first))
            if bias:
                yield vector(f"layers.{i}.{name}.bias", f"{buffer}_bias", i, e)
        for name, buffer, count in norms:
            yield vector(f"layers.{i}.{name}.weight", buffer, i, count)
    yield vector("norm.weight", "norm", None, e)
    if not c.tied and "lm_head" not in c.shares:
        first, count = (0, V) if whole_head else part.vocabulary(c)
        yield _Piece("lm_head.weight", "head", None, 0, (count, e), (V, e), (first, 0))


def _read_weights(
    folder: Path,
    c: ModelConfig,
    kept: Iterable[_Piece],
    storage: "Storage",
    part: Part,
    tell: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Check every tensor's name, shape and dtype against the config, then fill the buffers (fields of Weights). Reads
    only this part of split tensors."""
    with ExitStack() as stack:
        where = _open(folder, stack)
        prefix = "model." if any(name.startswith("model.") for name in where) else ""
        pieces = {p.name if p.name == "lm_head.weight" else prefix + p.name: p for p in kept}
        _check(where, pieces, c, prefix, storage)

        def get(name: str) -> Tensor | None:
            return where[name].get_tensor(name) if name in where else None

        stays = storage.stays(pieces, c)
        buffers, parts = _buffers(pieces.values(), c, storage, stays), defaultdict[Any, list[Quantized]](list)
        mapped = done = 0
        elements = sum(math.prod(p.shape) for p in pieces.values())
        for name, p in pieces.items():
            source: Matrix
            if storage.covers(name):
                source = _part_of(p, name, storage, get)
            else:
                source = where[name].get_tensor(name) if p.whole else where[name].get_slice(name)[p.at]
            mapped += source.nbytes
            _place(p, source, buffers, parts, storage, c, stays)
            done += math.prod(p.shape)
            if tell is not None:
                tell(done, elements)
            if mapped > REOPEN:
                del source, where
                stack.close()
                where, mapped = _open(folder, stack), 0
        if part.rank:
            for name in ("o_bias", "down_bias"):
                for bias in buffers.get(name, ()):
                    bias.zero_()
    for (buffer, layer), every in parts.items():
        _settle(buffers, buffer, layer, every)
    return buffers


def _place(
    p: _Piece,
    source: Matrix,
    buffers: dict[str, Any],
    parts: dict[Any, list[Quantized]],
    storage: Storage,
    c: ModelConfig,
    stays: set[tuple[str, int | None]],
) -> None:
    """Put a piece into its buffer or, if it stays quantised, among the `parts` of its matrix. The embedding of a tied
    model is never quantised; its quantised form is the head."""
    rows = slice(p.row, p.row + p.shape[0])
    kind, tied = storage.rounding(p, c), p.name == "embed_tokens.weight"
    given = source
    if kind is not None:
        dense = source.dequantised(torch.float32) if isinstance(source, Quantized) else source
        try:
            source = quant.quantised(dense.to(storage.device), kind)
        except ValueError as error:
            raise CheckpointError(f"{p.name} cannot be quantised: {error}") from error
    if isinstance(source, Quantized):
        if tied:
            head = source.to(storage.device)
            if c.tied:
                buffers["head"] = head if storage.keeps else head.dequantised(storage.dtype)
            source = given
        elif (p.buffer, p.layer) in stays:
            parts[p.buffer, p.layer].append(source.to(storage.device))
            return
    if isinstance(source, Quantized):
        source = source.dequantised(torch.float32)
    whole = buffers[p.buffer] if p.layer is None else buffers[p.buffer][p.layer]
    _copy(whole[rows], source)


def _settle(buffers: dict[str, Any], buffer: str, layer: int | None, parts: list[Quantized]) -> None:
    """Make one matrix of its quantised pieces."""
    try:
        whole = parts[0] if len(parts) == 1 else quant.joined(parts)
    except ValueError as error:
        raise CheckpointError(f"the {buffer} matrices of layer {layer} cannot be read: {error}") from error
    parts.clear()
    if layer is None:
        buffers[buffer] = whole.contiguous()
    else:
        buffers[buffer][layer] = whole.contiguous()


def _part_of(p: _Piece, name: str, storage: Storage, get: Get) -> Quantized:
    """A piece of a matrix that the checkpoint has in eight or four bits."""
    assert storage.scheme is not None
    whole = storage.scheme.read(name[: -len(".weight")], (p.stored[0], p.stored[1]), get)
    if p.whole:
        return whole
    (row, column), (count, columns), group = p.first, p.shape, whole.group
    if columns != p.stored[1] and (column % group or columns % group):
        raise CheckpointError(f"{name} has groups of {group} columns, which cannot be split over so many ranks")
    return whole[row : row + count].columns(column, columns)


def _check_owner(source: str | Path, c: ModelConfig, owner: Checkpoint | None) -> None:
    """Raise CheckpointError unless `owner` may be the target whose tensors a draft shares."""
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


def _same_rows(source: str | Path, folder: Path, c: ModelConfig, owner: Checkpoint) -> bool:
    """Whether the embedding rows in the draft's file (SHARED_ROWS) are `owner`'s, up to rounding and quantisation.
    Raises CheckpointError if the file has no such rows."""
    with ExitStack() as stack:
        where = _open(folder, stack)
        if any(name not in where for name in SHARED_ROWS):
            raise CheckpointError(f"the draft {source} lacks {SHARED_ROWS[0]} or {SHARED_ROWS[1]}; export it again")
        ids, rows = (where[name].get_tensor(name) for name in SHARED_ROWS)
    if (
        ids.dtype != torch.int64
        or rows.shape != (len(ids), c.hidden_size)
        or not ((ids >= 0) & (ids < len(owner.weights.embed))).all()
    ):
        raise CheckpointError(f"{' and '.join(SHARED_ROWS)} of {source} do not fit together; export it again")
    own = owner.weights.embed[ids.to(owner.weights.embed.device)].float().cpu()
    return bool((torch.cosine_similarity(own, rows.float(), dim=-1) >= ALIKE).all())


def _open(folder: Path, stack: ExitStack) -> dict[str, Any]:
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


def _buffers(
    pieces: Iterable[_Piece], c: ModelConfig, storage: Storage, stays: Set[tuple[str, int | None]] = frozenset()
) -> dict[str, Any]:
    """Allocate uninitialised buffers (fields of Weights). Matrices that stay quantised get None; a buffer with some of
    them is a list."""
    last = {p.buffer: p for p in pieces}  # the last piece of a buffer ends it
    buffers: dict[str, Any] = {}
    kinds, device = {1: activations(storage.dtype, storage.device), 2: storage.dtype}, storage.device
    for name, p in last.items():
        dtype = kinds[len(p.shape)]
        shape = (p.row + p.shape[0], *p.shape[1:])
        if p.layer is None:
            buffers[name] = None if (name, None) in stays else torch.empty(shape, dtype=dtype, device=device)
        elif any((name, n) in stays for n in range(c.num_layers)):
            buffers[name] = [
                None if (name, n) in stays else torch.empty(shape, dtype=dtype, device=device)
                for n in range(c.num_layers)
            ]
        else:
            buffers[name] = torch.empty((c.num_layers, *shape), dtype=dtype, device=device)
    return buffers


def _random_weights(c: ModelConfig, pieces: Sequence[_Piece], storage: Storage, seed: int) -> dict[str, Any]:
    """The buffers of `_read_weights`, filled in place: norms 1, biases 0, all others normal with std 0.02. Unsplit
    tensors are equal on all ranks; the split ones do not form one model."""
    generator = torch.Generator(storage.device).manual_seed(seed)
    if storage.quantize not in (None, "none"):
        return _random_quantised(c, pieces, storage, generator)
    buffers = _buffers(pieces, c, storage)
    for name, buffer in buffers.items():
        if "norm" in name:
            buffer.fill_(1)
        elif name.endswith("bias"):
            buffer.zero_()
        else:
            buffer.normal_(std=0.02, generator=generator)
    return buffers


def _random_quantised(
    c: ModelConfig, pieces: Sequence[_Piece], storage: Storage, generator: torch.Generator
) -> dict[str, Any]:
    """`_random_weights`, rounded piece by piece."""
    named = {p.name: p for p in pieces}
    stays = storage.stays(named, c)
    buffers, parts = _buffers(pieces, c, storage, stays), defaultdict[Any, list[Quantized]](list)
    for p in pieces:
        source = torch.empty(p.shape, device=storage.device)
        if "norm" in p.buffer:
            source.fill_(1)
        elif p.buffer.endswith("bias"):
            source.zero_()
        else:
            source.normal_(std=0.02, generator=generator)
        _place(p, source, buffers, parts, storage, c, stays)
    for (buffer, layer), every in parts.items():
        _settle(buffers, buffer, layer, every)
    return buffers


def _shards(folder: Path) -> list[Path]:
    """The paths of all safetensors files. Raises CheckpointError if one is missing."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise CheckpointError(f"{index} has no weight_map; download it again")
        paths = [folder / str(name) for name in sorted(set(names.values()))]
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


def _check(where: dict[str, Any], pieces: dict[str, _Piece], c: ModelConfig, prefix: str, storage: Storage) -> None:
    """Raise CheckpointError for missing, unexpected and misshapen tensors. Reads only headers, except for a tied
    head."""
    wanted: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {}
    ignored: set[str] = set()
    for name, p in pieces.items():
        if storage.covers(name):
            assert storage.scheme is not None
            wanted |= storage.scheme.stored(name[: -len(".weight")], (p.stored[0], p.stored[1]))
            ignored.update(storage.scheme.optional(name[: -len(".weight")]))
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


def _copy(target: Tensor, source: Tensor) -> None:
    """target[:] = source, cast in pieces."""
    rows = max(1, CHUNK // max(1, source[0].numel()))
    for i in range(0, len(source), rows):
        target[i : i + rows].copy_(source[i : i + rows])


def _tokenizer(folder: Path, arch: str) -> Any:
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if not any((folder / name).is_file() for name in names):
        raise CheckpointError(f"{folder} has no tokenizer ({', '.join(names)}); copy it there or pass token ids")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

    try:
        if arch != "DreamModel":
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        # AutoTokenizer would ask for Dream's own code; it is Qwen2's tokenizer with a few more special tokens
        fast = (folder / "tokenizer.json").is_file()
        return (PreTrainedTokenizerFast if fast else Qwen2Tokenizer).from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises many types
        raise CheckpointError(f"the tokenizer in {folder} cannot be read ({reason(error)})") from error
