"""The buffers of a model's weights: in which form the run stores a checkpoint's tensors.

Each kind of weight is one buffer [L, ...] for all layers, so a group of layers is a slice. Matrices in eight or four
bits (kernels/quant.py) are instead a list with one matrix for each layer. Tensors are cast while they are copied to
their buffer, so there is never a second copy of the weights.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specker.checkpoints.pieces import HOST, Piece
from specker.checkpoints.quantised.schemes import Get, Scheme
from specker.cpu import Stack, available, packed
from specker.cpu.packed import Packed
from specker.kernels import quant
from specker.kernels.quant import Quantized
from specker.layer_weights import KINDS
from specker.model.config import CheckpointError, DeltaNet, ModelConfig
from specker.model.weights import Matrix

SIZES = {"F64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1, "F8_E4M3": 1}  # bytes per element
AUTO = "auto"  # quantise to int8 where the compiled CPU kernels then compute, unless the checkpoint is quantised
CHUNK = 1 << 22  # elements cast at a time, because the host stages casts for a GPU


def served(c: ModelConfig) -> bool:
    """Whether the compiled CPU kernels support such layers, with float32, bfloat16 and quantised weights."""
    mixtures = [c.layer.mixture(n) for n in range(c.num_layers)]
    if not available() or Stack.lacks(c.layer):
        return False
    inner = {c.width(n) if mixture is None else mixture.width for n, mixture in enumerate(mixtures)}
    sizes = {mixture.shared for mixture in mixtures if mixture is not None and mixture.shared}
    if (mixer := c.layer.recurrent) is not None:
        sizes |= {mixer.channels, mixer.values}
    if isinstance(mixer, DeltaNet):
        sizes |= {mixer.key_dim, mixer.value_dim}
    dims = {c.kv(n).dim for n in range(c.num_layers)}
    sizes |= {c.hidden_size, c.layer.ple, *inner}
    return all(Stack.takes_sizes(dim, (c.num_heads * dim, *sizes)) for dim in dims)


def packs(c: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether quantised matrices of such layers are stored for the compiled CPU kernels, as `Packed`."""
    return device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and served(c)


def activations(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of the residual stream and the K/V for weights of `dtype`. On a CPU only matrix products are fast in
    bfloat16, so everything else there is float32."""
    return torch.float32 if device.type == "cpu" and dtype == torch.bfloat16 else dtype


@dataclass(frozen=True)
class Storage:
    """How the run stores matrices: which ones are quantised, as `Quantized` or, for the compiled CPU layers, as
    `Packed`."""

    scheme: Scheme | None  # how the checkpoint stores matrices; None: not quantised
    quantize: str | None  # see `checkpoint.read`
    dtype: torch.dtype  # dtype of the matrices that are not quantised
    device: torch.device
    packs: bool = False  # whether the CPU's compiled library will compute the products

    @property
    def keeps(self) -> bool:
        """Whether quantised matrices stay quantised. Otherwise they are dequantised to `dtype`."""
        served = self.packs or self.device.type != "cpu" or available()
        return self.quantize != "none" and self.dtype != torch.float64 and served

    def as_stored(self, source: Quantized | Packed) -> Matrix:
        """A quantised matrix as the run stores it."""
        if self.packs:
            made = source if isinstance(source, Packed) else packed.of_quantised(source)
            return source.dequantised(self.dtype) if made is None else made
        if isinstance(source, Packed):
            source = quant.joined(source.quantised())
        source = source.to(self.device)
        return source.for_bfloat16() if (self.device.type, self.dtype) == ("cuda", torch.bfloat16) else source

    def covers(self, name: str) -> bool:
        """Whether the checkpoint has the matrix `name` (a tensor's full name) in eight or four bits."""
        return self.scheme is not None and self.scheme.covers(name.removesuffix(".weight"))

    @property
    def kind(self) -> str | None:
        """The kind (int8, int4 or fp8) to which matrices are rounded; None if they are not rounded."""
        if self.quantize == AUTO:
            return "int8" if self.packs and self.scheme is None else None
        return None if self.quantize == "none" else self.quantize

    def rounding(self, p: Piece, c: ModelConfig) -> str | None:
        """The kind (int8, int4 or fp8) to which a piece is rounded; None if it is not rounded."""
        head = p.buffer == "head" or (c.tied and p.name == "embed_tokens.weight")
        if not (p.is_matrix or head):
            return None
        return "int8" if head and self.kind == "int4" else self.kind

    def stays(self, pieces: dict[str, Piece], c: ModelConfig) -> set[tuple[str, int | None]]:
        """The matrices (buffer, layer) that are quantised in the run, because all their pieces are. An embedding stays
        quantised only if it is `Packed`."""
        found: dict[tuple[str, int | None], bool] = {}
        for name, p in pieces.items():
            if p.buffer == "embed" and self.packs and self.keeps and self.covers(name):
                found[p.buffer, p.layer] = True
            elif p.is_matrix or p.buffer == "head":
                whole = self.keeps and (self.covers(name) or self.rounding(p, c) is not None)
                found[p.buffer, p.layer] = found.get((p.buffer, p.layer), True) and whole
        return {key for key, whole in found.items() if whole}

    def bytes_of(self, pieces: Iterable[Piece], c: ModelConfig) -> int:
        """About how many bytes the weights take on the device."""
        return int(sum(math.prod(p.shape) * self._each(p, c) for p in pieces if p.buffer != HOST))

    def _each(self, p: Piece, c: ModelConfig) -> float:
        if self.keeps and (kind := self.rounding(p, c)) is not None:
            head = self.dtype.itemsize if p.name == "embed_tokens.weight" else 0  # the embedding is not rounded
            return head + (0.625 if kind == "int4" else 1.0)
        name = p.name if p.name == "lm_head.weight" else f"model.{p.name}"
        if self.keeps and self.scheme is not None and self.covers(name):
            tensors = self.scheme.stored(name.removesuffix(".weight"), p.matrix).values()
            return sum(math.prod(shape) * SIZES.get(kinds[0], 4) for shape, kinds in tensors) / math.prod(p.stored)
        return self.dtype.itemsize


class Buffers:
    """A model's weights while they are read: the fields of `Weights`."""

    def __init__(self, pieces: dict[str, Piece], c: ModelConfig, storage: Storage):
        """`pieces`: every piece that `put` will get, by its full name."""
        self.c, self.storage, self.stays = c, storage, storage.stays(pieces, c)
        self.dense = _allocated(pieces.values(), c, storage, self.stays)
        self._joined = _joined_gates(pieces.values(), storage, self.stays)
        self._parts: dict[tuple[str, int | None], list[Matrix]] = {key: [] for key in self.stays}

    def put(self, p: Piece, source: Matrix) -> None:
        """Copy a piece to its place in a buffer, rounded if `storage` says so. The embedding of a tied model is never
        rounded itself; a rounded copy of it becomes the head."""
        storage, given, kind = self.storage, source, self.storage.rounding(p, self.c)
        if p.buffer == HOST:
            if not isinstance(source, Tensor) and not (isinstance(source, Packed) and available()):
                source = source.dequantised(storage.dtype)
            self.dense[HOST] = source
            return
        if kind is not None:
            wide = source if isinstance(source, Tensor) else source.dequantised(torch.float32)
            try:
                source = quant.quantised(wide.to(storage.device), kind)
            except ValueError as error:
                raise CheckpointError(f"{p.name} cannot be quantised: {error}") from error
        stays = (p.buffer, p.layer) in self.stays
        if not isinstance(source, Tensor) and p.buffer == "embed":
            head = storage.as_stored(source)
            if self.c.tied:
                kept = storage.keeps or isinstance(head, Tensor)
                self.dense["head"] = head if kept else head.dequantised(storage.dtype)  # type: ignore[union-attr]
            if stays:  # the head's own matrix, or the one that the head was rounded from
                embed = given if isinstance(given, Tensor) else storage.as_stored(given)
                self._parts[p.buffer, p.layer].append(head if kind is None else embed)
                return
            source = given
        elif not isinstance(source, Tensor) and stays:
            self._parts[p.buffer, p.layer].append(storage.as_stored(source))
            return
        if not isinstance(source, Tensor):
            source = source.dequantised(torch.float32)
        whole = self.dense[p.buffer] if p.layer is None else self.dense[p.buffer][p.layer]
        place = whole[p.row : p.row + p.rows]
        _copy(place, source)
        if p.offset:
            place += p.offset
        if p.factor != 1:
            place *= p.factor

    def done(self) -> dict[str, Any]:
        """All buffers. Raises CheckpointError if the quantised pieces of a matrix do not fit together."""
        for (buffer, layer), parts in self._parts.items():
            try:
                whole = _joined(parts, self.storage.dtype)
                experts = buffer in ("gate_up", "down") and layer is not None and self.c.layer.mixture(layer)
                if experts and isinstance(whole, Packed):  # the compiled layers find an expert by its first row
                    one, dtype = packed.merged(whole), self.storage.dtype
                    whole = one or torch.cat([run.dequantised(dtype) for run in whole.quantised()])
            except ValueError as error:
                raise CheckpointError(f"the {buffer} matrix of layer {layer} cannot be read: {error}") from error
            parts.clear()
            if layer is None:
                self.dense[buffer] = whole
            else:
                self.dense[buffer][layer] = whole
        return _without(self._joined, self.dense)


def _joined(parts: Sequence[Matrix], dtype: torch.dtype) -> Matrix:
    """Concatenate matrices along their rows. The result is packed or quantised if all of them are, else in `dtype`."""
    if all(isinstance(x, Packed) for x in parts) and not any(len(x) % packed.ROWS for x in parts[:-1]):
        return packed.joined(parts)  # type: ignore[arg-type]
    if all(isinstance(x, Quantized) for x in parts):
        whole = parts[0] if len(parts) == 1 else quant.joined(parts)  # type: ignore[arg-type]
        return whole.contiguous()  # type: ignore[union-attr]
    return torch.cat([x.to(dtype) if isinstance(x, Tensor) else x.dequantised(dtype) for x in parts])


def part_of(p: Piece, name: str, scheme: Scheme, get: Get) -> Quantized | Packed:
    """Read a piece of the matrix `name`, which the checkpoint stores in eight or fewer bits."""
    whole = scheme.read(name.removesuffix(".weight"), p.matrix, get)
    if p.whole:
        return whole
    every = torch.arange(len(whole), dtype=torch.int64, device="cpu")
    rows = p.rows_of(every.unsqueeze(1)).flatten()
    if not torch.equal(rows, every):
        whole = whole[rows]
    column, columns = p.first[-1], p.shape[-1]
    if columns == whole.shape[-1]:
        return whole
    if isinstance(whole, Packed):
        if (part := whole.columns_of(column, columns)) is not None:
            return part
        whole = quant.joined(whole.quantised())
    group = math.gcd(whole.group, column, columns)
    if group != whole.group:  # the ranks' columns split a group
        if group % quant.LEAST[whole.kind]:
            raise CheckpointError(f"{name} has {whole.kind} weights, which cannot be split over so many ranks")
        whole = quant.spread(whole, group)
    return whole.columns(column, columns)


def _allocated(
    pieces: Iterable[Piece], c: ModelConfig, storage: Storage, stays: set[tuple[str, int | None]]
) -> dict[str, Any]:
    """Allocate uninitialised buffers (fields of Weights). Matrices that stay quantised get None. A buffer with such a
    matrix is a list with one entry for each layer; so is one whose layers differ, with None where a layer has none.
    Gates that are joined to qkv are its last rows."""
    pieces = list(pieces)
    last = {(p.buffer, p.layer): p for p in pieces}  # a matrix ends with its last piece
    joined = _joined_gates(pieces, storage, stays)
    buffers: dict[str, Any] = {}
    vectors, matrices = activations(storage.dtype, storage.device), storage.dtype
    wide = torch.promote_types(vectors, torch.float32)

    def empty(name: str, shape: tuple[int, ...], *layers: int) -> Tensor:
        kind = KINDS.get(name)
        product = len(shape) > 1 if kind is None else kind.product
        dtype = wide if kind is not None and kind.wide else matrices if product else vectors
        return torch.empty((*layers, *shape), dtype=dtype, device=storage.device)

    for name in dict.fromkeys(name for name, _ in last if name != HOST):
        shapes = {n: (p.row + p.rows, *p.shape[1:][-1:]) for (own, n), p in last.items() if own == name}
        if name == "qkv":
            shapes = {n: (rows + joined.get(n, 0), columns) for n, (rows, columns) in shapes.items()}  # type: ignore
        if name == "gates":
            qkv = buffers["qkv"]
            made = {n: qkv[n][-joined[n] :] if n in joined else empty(name, shape) for n, shape in shapes.items()}
            buffers[name] = [made.get(n) for n in range(c.num_layers)]
        elif None in shapes:
            buffers[name] = None if (name, None) in stays else empty(name, shapes[None])
        elif len(shapes) < c.num_layers or len({*shapes.values()}) > 1 or any((name, n) in stays for n in shapes):
            made = {n: None if (name, n) in stays else empty(name, shape) for n, shape in shapes.items()}
            buffers[name] = [made.get(n) for n in range(c.num_layers)]
        else:
            buffers[name] = empty(name, shapes[0], c.num_layers)
    return buffers


def _joined_gates(pieces: Iterable[Piece], storage: Storage, stays: set[tuple[str, int | None]]) -> dict[int, int]:
    """The layers whose gates become the last rows of qkv, so that one product computes both, and how many rows. The
    compiled CPU layers round the input of qkv, but not that of the gates, and a quantised qkv cannot hold them."""
    if storage.packs:
        return {}
    ends = {p.layer: p.row + p.rows for p in pieces if p.buffer == "gates"}
    return {n: rows for n, rows in ends.items() if n is not None and ("qkv", n) not in stays}


def _without(joined: Iterable[int], buffers: dict[str, Any]) -> dict[str, Any]:
    """The buffers without the gates that are joined to qkv."""
    for n in joined:
        buffers["gates"][n] = None
    return buffers


def random_weights(c: ModelConfig, pieces: Sequence[Piece], storage: Storage, seed: int) -> dict[str, Any]:
    """Buffers filled in place: norms 1, biases 0, all others normal with std 0.02. Unsplit tensors are equal on all
    ranks; the split ones do not form one model. Before mixtures of experts the embedding has std 1, and so outweighs
    what layers add to it: else all tokens would soon choose the same experts. Experts that the checkpoint has in MXFP4
    are rounded to it."""
    generator = torch.Generator(storage.device).manual_seed(seed)
    embed_std = 0.02 if c.layer.experts is None else 1.0
    host = [p for p in pieces if p.buffer == HOST]
    pieces = [p for p in pieces if p.buffer != HOST]
    named = {p.name: p for p in pieces}
    there = torch.Generator().manual_seed(seed)
    empty = {p.buffer: torch.empty(p.shape, dtype=storage.dtype, device="cpu") for p in host}
    apart = {name: x.normal_(std=0.02, generator=there) for name, x in empty.items()}
    in_mxfp4 = storage.kind is None and storage.keeps and storage.scheme is not None and storage.scheme.name == "mxfp4"
    if storage.kind is None and not in_mxfp4:
        found = _allocated(pieces, c, storage, set())
        for name, buffer in found.items():
            _fill(name, buffer, generator, embed_std)
        return _without(_joined_gates(pieces, storage, set()), found) | apart
    buffers = Buffers(named, c, storage)
    for p in pieces:
        source = torch.empty(p.rows, *p.shape[1:][-1:], dtype=torch.float32, device=storage.device)
        _fill(p.buffer, source, generator, embed_std)
        stored = quant.quantised(source, "mxfp4") if in_mxfp4 and storage.covers(p.name) else source
        buffers.put(replace(p, offset=0.0, factor=1.0), stored)
    return buffers.done() | apart


def _fill(name: str, x: Any, generator: torch.Generator, embed_std: float) -> None:
    if isinstance(x, list):  # of layers that differ
        for each in x:
            _fill(name, each, generator, embed_std)
        return
    if x is None:
        return
    if "norm" in name or name in ("scalar", "router_scale"):
        x.fill_(1)
    elif name.endswith("bias"):
        x.zero_()
    else:
        x.normal_(std=embed_std if name == "embed" else 0.02, generator=generator)


def _copy(target: Tensor, source: Tensor) -> None:
    """target[:] = source, cast in pieces."""
    rows = max(1, CHUNK // max(1, source[0].numel()))
    for i in range(0, len(source), rows):
        target[i : i + rows].copy_(source[i : i + rows])
