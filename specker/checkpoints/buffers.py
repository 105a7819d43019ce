"""The buffers of a model's weights: which tensors of a checkpoint they hold, and in which form.

Each kind of weight is one buffer [L, ...] for all layers, so a group of layers is a slice. Matrices in eight or four
bits (kernels/quant.py) are instead a list with one matrix for each layer. Tensors are cast while they are copied to
their buffer, so there is never a second copy of the weights.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specker.checkpoints import experts
from specker.checkpoints.quantised.schemes import Get, Scheme
from specker.cpu import packed
from specker.cpu.packed import Packed
from specker.kernels import quant
from specker.kernels.cpu import native
from specker.kernels.quant import Quantized
from specker.model.config import CheckpointError, LayerSpec, ModelConfig
from specker.model.split import Part
from specker.model.weights import Matrix

SIZES = {"F64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1, "F8_E4M3": 1}  # bytes per element
CHUNK = 1 << 22  # elements cast at a time, because the host stages casts for a GPU


def served(c: ModelConfig) -> bool:
    """Whether the compiled CPU kernels support such layers, with float32, bfloat16 and quantised weights."""
    kernels, mixtures = native(), [c.layer.mixture(n) for n in range(c.num_layers)]
    if kernels is None or kernels.Stack.lacks(c.layer):
        return False
    inner = {c.intermediate_size if mixture is None else mixture.width for mixture in mixtures}
    return kernels.Stack.takes_sizes(c.head_dim, c.hidden_size, c.num_heads * c.head_dim, *inner)


def packs(c: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether quantised matrices of such layers are stored for the compiled CPU kernels, as `Packed`."""
    return device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and served(c)


def activations(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of the residual stream and the K/V for weights of `dtype`. On a CPU only matrix products are fast in
    bfloat16, so everything else there is float32."""
    return torch.float32 if device.type == "cpu" and dtype == torch.bfloat16 else dtype


@dataclass(frozen=True)
class Piece:
    """A tensor of the checkpoint, or a part of one, stored at buffers[buffer][layer][row : row + rows]. A tensor of all
    experts has three dimensions, of which the first two become rows."""

    name: str  # without the "model." prefix
    buffer: str  # a field of Weights
    layer: int | None  # None: the buffer is not stacked
    row: int
    shape: tuple[int, ...]  # shape of the part
    stored: tuple[int, ...]  # shape of the whole tensor
    first: tuple[int, ...]  # first index of the part in the tensor
    offset: float = 0.0  # added to the tensor, in the buffer's dtype
    factor: float = 1.0  # multiplied with it after that
    order: tuple[int, ...] = ()  # the tensor's rows in the piece's order; empty: consecutive ones
    parts: int = 1  # of three dimensions: the tensor's second one has so many equal parts, and the piece some of each

    @property
    def whole(self) -> bool:
        return self.shape == self.stored and not self.order

    @property
    def at(self) -> tuple[slice, ...]:
        return tuple(slice(first, first + count) for first, count in zip(self.first, self.shape, strict=True))

    @property
    def is_matrix(self) -> bool:
        """Whether it is a layer's matrix that may be quantised. Routers stay as they are: they are small, and decide
        which experts are read."""
        return self.layer is not None and len(self.shape) > 1 and self.buffer != "router"

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1]) if len(self.shape) > 1 else self.shape[0]

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of the whole tensor as a matrix."""
        return math.prod(self.stored[:-1]), self.stored[-1]

    def rows_of(self, x: Tensor) -> Tensor:
        """The piece's rows of the whole tensor's [rows, ...]."""
        if self.order:
            return x[list(self.order)]
        if len(self.stored) < 3:
            return x[self.first[0] : self.first[0] + self.shape[0]]
        (X, O, _), (_, count, _) = self.stored, self.shape
        each = x.reshape(X, self.parts, O // self.parts, *x.shape[1:])
        return each[:, :, self.first[1] : self.first[1] + count // self.parts].flatten(0, 2)

    def read(self, file: Any, name: str) -> Tensor:
        """The piece of the tensor `name` of an open safetensors file, [rows, columns] or [rows]."""
        found: Tensor
        if len(self.stored) < 3 and not self.order:
            found = file.get_tensor(name) if self.whole else file.get_slice(name)[self.at]
            return found
        found = file.get_tensor(name)
        found = found.flatten(0, -2) if len(self.stored) == 3 else found
        if self.whole:
            return found
        found = self.rows_of(found)
        return found if found.dim() == 1 else found[:, self.first[-1] : self.first[-1] + self.shape[-1]]


NORMS = {  # LayerSpec.norms -> the field of Weights and the checkpoint's name of each norm
    "before": {"norm_in": "input_layernorm", "norm_post": "post_attention_layernorm"},
    "after": {"norm_o": "post_attention_layernorm", "norm_down": "post_feedforward_layernorm"},
    "both": {
        "norm_in": "input_layernorm",
        "norm_o": "post_attention_layernorm",
        "norm_post": "pre_feedforward_layernorm",
        "norm_down": "post_feedforward_layernorm",
    },
}


def norms_of(layer: LayerSpec) -> dict[str, str]:
    """A layer's norms, including those of q and k: field of Weights -> name in the checkpoint."""
    heads = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"} if layer.qk_norm else {}
    return NORMS[layer.norms] | heads


def final_norm(weight: Tensor, c: ModelConfig) -> Tensor:
    """The weights of the final norm [E], as a run needs them."""
    moved = weight + c.norm_offset if c.norm_offset else weight
    return moved if c.logits_scale == 1 else moved * c.logits_scale


def _halves(rows: range, c: ModelConfig) -> list[int]:
    """Rows of q or k, in an order in which RoPE rotates (i, i + D / 2) of a head, with the dimensions that it does not
    rotate at the ends of the halves."""
    R, D = c.rotated or c.head_dim, c.head_dim
    halves = [range(R // 2), range(R, (R + D) // 2), range(R // 2, R), range((R + D) // 2, D)]
    return [head + i for head in rows[::D] for half in halves for i in half]


def pieces_of(c: ModelConfig, part: Part, whole_head: bool, fused: bool = False) -> Iterator[Piece]:
    """The piece of each tensor that `part` holds; with `whole_head`, all rows of the head. `fused`: the layout of
    experts (experts.py)."""
    (q0, q), (k0, kv), (f0, f) = part.heads(c), part.kv_heads(c), part.inner(c)
    D, e = c.head_dim, c.hidden_size
    q0, q, k0, kv = q0 * D, q * D, k0 * D, kv * D
    Q, KV, F = c.num_heads * D, c.num_kv_heads * D, c.intermediate_size
    qs, ks = _halves(range(q0, q0 + q), c), _halves(range(k0, k0 + kv), c)
    vs, fs = range(k0, k0 + kv), range(f0, f0 + f)
    rows: list[tuple[str, str, int, Sequence[int], int, bool]]
    if c.fused:
        every = [*qs, *(Q + i for i in ks), *(Q + KV + i for i in vs)]
        both = [*fs, *(F + i for i in fs)]
        rows = [
            ("self_attn.qkv_proj", "qkv", 0, every, Q + 2 * KV, c.layer.qkv_bias),
            ("mlp.gate_up_proj", "gate_up", 0, both, 2 * F, c.layer.mlp_bias),
        ]
    else:  # matrices split by output: name, buffer, first row there, rows of how many, has a bias
        rows = [
            ("self_attn.q_proj", "qkv", 0, qs, Q, c.layer.qkv_bias),
            ("self_attn.k_proj", "qkv", q, ks, KV, c.layer.qkv_bias),
            ("self_attn.v_proj", "qkv", q + kv, vs, KV, c.layer.qkv_bias),
            ("mlp.gate_proj", "gate_up", 0, fs, F, c.layer.mlp_bias),
            ("mlp.up_proj", "gate_up", f, fs, F, c.layer.mlp_bias),
        ]
    orders = [() if list(rs) == [*range(rs[0], rs[0] + len(rs))] else tuple(rs) for _, _, _, rs, _, _ in rows]
    columns = [  # matrices split by input; only rank 0 adds the bias
        ("self_attn.o_proj", "o", (q0, q, Q), c.layer.o_bias),
        ("mlp.down_proj", "down", (f0, f, F), c.layer.mlp_bias),
    ]

    def vector(name: str, buffer: str, layer: int | None, count: int, offset: float = 0.0) -> Piece:
        return Piece(name, buffer, layer, 0, (count,), (count,), (0,), offset)

    widths = {"q_norm": D, "k_norm": D} if c.layer.qk_norm == "head" else {"q_norm": Q, "k_norm": KV}
    V = c.vocab_size
    if "embed_tokens" not in c.shares:
        yield Piece("embed_tokens.weight", "embed", None, 0, (V, e), (V, e), (0, 0))
    for i in range(c.num_layers):
        mixture = c.layer.mixture(i)
        for s in () if mixture is None else experts.slices(c, mixture, part, fused):
            yield Piece(f"layers.{i}.{s.name}", s.buffer, i, s.row, s.shape, s.stored, s.first, parts=s.parts)
        for (name, buffer, row, rs, of, bias), order in zip(rows, orders, strict=True):
            if mixture is not None and buffer != "qkv":
                continue
            first, count, name = rs[0], len(rs), f"layers.{i}.{name}"
            yield Piece(f"{name}.weight", buffer, i, row, (count, e), (of, e), (first, 0), order=order)
            if bias:
                yield Piece(f"{name}.bias", f"{buffer}_bias", i, row, (count,), (of,), (first,), order=order)
        for name, buffer, (first, count, of), bias in columns if mixture is None else columns[:1]:
            yield Piece(f"layers.{i}.{name}.weight", buffer, i, 0, (e, count), (e, of), (0, first))
            if bias:
                yield vector(f"layers.{i}.{name}.bias", f"{buffer}_bias", i, e)
        for buffer, name in norms_of(c.layer).items():
            yield vector(f"layers.{i}.{name}.weight", buffer, i, widths.get(buffer, e), c.norm_offset)
    yield replace(vector("norm.weight", "norm", None, e, c.norm_offset), factor=c.logits_scale)
    if not c.tied and "lm_head" not in c.shares:
        first, count = (0, V) if whole_head else part.vocabulary(c)
        yield Piece("lm_head.weight", "head", None, 0, (count, e), (V, e), (first, 0))


@dataclass(frozen=True)
class Storage:
    """How the run stores matrices: which ones are quantised, as `Quantized` or, for the compiled CPU layers, as
    `Packed`."""

    scheme: Scheme | None  # how the checkpoint stores matrices; None: not quantised
    quantize: str | None  # see `checkpoint.read`
    dtype: torch.dtype  # dtype of the matrices that are not quantised
    device: torch.device
    packs: bool = False  # whether the CPU's compiled layers will run

    @property
    def keeps(self) -> bool:
        """Whether quantised matrices stay quantised. Otherwise they are dequantised to `dtype`."""
        served = self.packs or self.device.type != "cpu" or native() is not None
        return self.quantize != "none" and self.dtype != torch.float64 and served

    def own(self, source: Quantized | Packed) -> Matrix:
        """A quantised matrix as the run stores it."""
        if self.packs:
            made = source if isinstance(source, Packed) else packed.of_quantised(source)
            return source.dequantised(self.dtype) if made is None else made
        if isinstance(source, Packed):
            source = quant.joined(source.quantised())
        return source.to(self.device)

    def covers(self, name: str) -> bool:
        """Whether the checkpoint has the matrix `name` (a tensor's full name) in eight or four bits."""
        return self.scheme is not None and self.scheme.covers(name.removesuffix(".weight"))

    def rounding(self, p: Piece, c: ModelConfig) -> str | None:
        """The kind (int8, int4 or fp8) to which a piece is rounded; None if it is not rounded."""
        head = p.name == "lm_head.weight" or (c.tied and p.name == "embed_tokens.weight")
        if self.quantize in (None, "none") or not (p.is_matrix or head):
            return None
        return "int8" if head and self.quantize == "int4" else self.quantize

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
        """About how many bytes the weights take."""
        return int(sum(math.prod(p.shape) * self._each(p, c) for p in pieces))

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
        self._parts: dict[tuple[str, int | None], list[Matrix]] = {key: [] for key in self.stays}

    def put(self, p: Piece, source: Matrix) -> None:
        """Copy a piece to its place in a buffer, rounded if `storage` says so. The embedding of a tied model is never
        rounded itself; a rounded copy of it becomes the head."""
        storage, given, kind = self.storage, source, self.storage.rounding(p, self.c)
        if kind is not None:
            wide = source if isinstance(source, Tensor) else source.dequantised(torch.float32)
            try:
                source = quant.quantised(wide.to(storage.device), kind)
            except ValueError as error:
                raise CheckpointError(f"{p.name} cannot be quantised: {error}") from error
        stays = (p.buffer, p.layer) in self.stays
        if not isinstance(source, Tensor) and p.buffer == "embed":
            head = storage.own(source)
            if self.c.tied:
                kept = storage.keeps or isinstance(head, Tensor)
                self.dense["head"] = head if kept else head.dequantised(storage.dtype)  # type: ignore[union-attr]
            if stays:  # the head's own matrix, or the one that the head was rounded from
                embed = given if isinstance(given, Tensor) else storage.own(given)
                self._parts[p.buffer, p.layer].append(head if kind is None else embed)
                return
            source = given
        elif not isinstance(source, Tensor) and stays:
            self._parts[p.buffer, p.layer].append(storage.own(source))
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
        return self.dense


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
    if isinstance(whole, Packed):
        whole = quant.joined(whole.quantised())
    if p.order:
        return whole[torch.tensor(p.order)]
    column, columns = p.first[-1], p.shape[-1]
    group = math.gcd(whole.group, column, columns)
    if group != whole.group:  # the ranks' columns split a group
        if group % quant.LEAST[whole.kind]:
            raise CheckpointError(f"{name} has {whole.kind} weights, which cannot be split over so many ranks")
        whole = quant.spread(whole, group)
    return whole.each(p.rows_of).columns(column, columns)


def _allocated(
    pieces: Iterable[Piece], c: ModelConfig, storage: Storage, stays: set[tuple[str, int | None]]
) -> dict[str, Any]:
    """Allocate uninitialised buffers (fields of Weights). Matrices that stay quantised get None. A buffer with such a
    matrix is a list with one entry for each layer; so is one whose layers differ, with None where a layer has none."""
    last = {(p.buffer, p.layer): p for p in pieces}  # a matrix ends with its last piece
    buffers: dict[str, Any] = {}
    kinds, device = {1: activations(storage.dtype, storage.device), 2: storage.dtype}, storage.device

    def empty(shape: tuple[int, ...], *layers: int) -> Tensor:
        return torch.empty((*layers, *shape), dtype=kinds[len(shape)], device=device)

    for name in dict.fromkeys(name for name, _ in last):
        shapes = {n: (p.row + p.rows, *p.shape[1:][-1:]) for (own, n), p in last.items() if own == name}
        if None in shapes:
            buffers[name] = None if (name, None) in stays else empty(shapes[None])
        elif len(shapes) < c.num_layers or len({*shapes.values()}) > 1 or any((name, n) in stays for n in shapes):
            made = {n: None if (name, n) in stays else empty(shape) for n, shape in shapes.items()}
            buffers[name] = [made.get(n) for n in range(c.num_layers)]
        else:
            buffers[name] = empty(shapes[0], c.num_layers)
    return buffers


def random_weights(c: ModelConfig, pieces: Sequence[Piece], storage: Storage, seed: int) -> dict[str, Any]:
    """Buffers filled in place: norms 1, biases 0, all others normal with std 0.02. Unsplit tensors are equal on all
    ranks; the split ones do not form one model. Before mixtures of experts the embedding has std 1, and so outweighs
    what layers add to it: else all tokens would soon choose the same experts."""
    generator = torch.Generator(storage.device).manual_seed(seed)
    embed_std = 0.02 if c.layer.experts is None else 1.0
    named = {p.name: p for p in pieces}
    if storage.quantize in (None, "none"):
        found = _allocated(pieces, c, storage, set())
        for name, buffer in found.items():
            _fill(name, buffer, generator, embed_std)
        return found
    buffers = Buffers(named, c, storage)
    for p in pieces:
        source = torch.empty(p.rows, *p.shape[1:][-1:], device=storage.device)
        _fill(p.buffer, source, generator, embed_std)
        buffers.put(replace(p, offset=0.0, factor=1.0), source)
    return buffers.done()


def _fill(name: str, x: Any, generator: torch.Generator, embed_std: float) -> None:
    if isinstance(x, list):  # of layers that differ
        for each in x:
            _fill(name, each, generator, embed_std)
        return
    if x is None:
        return
    if "norm" in name:
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
