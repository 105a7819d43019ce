"""Which tensors of a checkpoint hold a model's weights: a `Piece` says where a tensor's part lies in the buffers.

A mixture of experts has one of two layouts. Most checkpoints have three matrices for each expert; Mixtral names them
differently. The fused layout, which transformers has in memory and into which GGUF files are converted, has two tensors
for all experts of a layer: gate_up_proj [X, 2 F, E], with each expert's gate rows first, and down_proj [X, E, F]. In
memory both become matrices [X * 2 F, E] and [X * E, F] (Weights.gate_up and .down). gpt-oss has always two tensors, in
which rows of gate and up take turns, and with matrices that are not quantised [X, E, 2 F] and [X, F, E]
(Experts.turns), unless it was a GGUF file.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specker.checkpoints.architectures import ARCHITECTURES
from specker.checkpoints.architectures.names import GATE_UP
from specker.layer_weights import KINDS, shape_of
from specker.model.config import DeltaNet, Experts, ModelConfig, ShortConv
from specker.model.split import Part

HOST = "ple_table"  # stays where it is, memory-mapped from the file: rows of it are gathered


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
    parts: int = 1  # of all experts: the tensor's second dimension has so many equal parts, and the piece some of each
    alternate: bool = False  # the tensor's parts take turns, row by row; the piece has one after another
    transposed: bool = False  # the file has each expert's matrix as [columns, rows]

    @classmethod
    def tensor(cls, name: str, buffer: str, *shape: int, offset: float = 0.0) -> "Piece":
        """A whole tensor that is no layer's."""
        return cls(name, buffer, None, 0, shape, shape, (0,) * len(shape), offset)

    @property
    def whole(self) -> bool:
        return self.shape == self.stored and not self.order and not self.alternate

    @property
    def in_file(self) -> tuple[int, ...]:
        """The whole tensor's shape in a file that does not have it quantised."""
        return (*self.stored[:-2], *self.stored[:-3:-1]) if self.transposed else self.stored

    @property
    def at(self) -> tuple[slice, ...]:
        return tuple(slice(first, first + count) for first, count in zip(self.first, self.shape, strict=True))

    @property
    def is_matrix(self) -> bool:
        """Whether it is a layer's matrix that may be quantised."""
        return self.layer is not None and KINDS[self.buffer].quantisable

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1]) if len(self.shape) > 1 else self.shape[0]

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of the whole tensor as a matrix."""
        return math.prod(self.stored[:-1]), self.stored[-1]

    def rows_of(self, x: Tensor) -> Tensor:
        """The piece's rows of the whole tensor's [rows, columns] or [rows]."""
        if self.order:
            return x[list(self.order)]
        if len(self.stored) < 3 and self.parts == 1:
            return x[self.first[0] : self.first[0] + self.shape[0]]
        (X, O), count, columns = self.stored[:2], self.shape[1], x.shape[-1:] if len(self.stored) == 3 else ()
        if self.alternate:
            parts = x.reshape((X, O // self.parts, self.parts, *columns)).transpose(1, 2)
        else:
            parts = x.reshape((X, self.parts, O // self.parts, *columns))
        return parts[:, :, self.first[1] : self.first[1] + count // self.parts].flatten(0, 2)

    def read(self, file: Any, name: str) -> Tensor:
        """The piece of the tensor `name` of an open safetensors file, [rows, columns] or [rows]."""
        found: Tensor
        if len(self.stored) < 3 and not self.order and self.parts == 1:
            if self.whole:
                return file.get_tensor(name)  # type: ignore[no-any-return]
            with torch.device("cpu"):  # safetensors puts slices, but not whole tensors, on torch's default device
                found = file.get_slice(name)[self.at]
            return found
        found = file.get_tensor(name)
        if self.transposed:
            found = found.mT
        if len(self.stored) > 2 and not self.alternate:
            found = found.flatten(0, -2)
        if self.whole:
            return found
        found = self.rows_of(found)
        if len(self.stored) == 2 and self.parts > 1:
            return found.view(self.shape)
        return found if found.dim() == 1 else found[:, self.first[-1] : self.first[-1] + self.shape[-1]]


NORMS = {  # of LayerSpec.norms
    "before": ("norm_in", "norm_post"),
    "after": ("norm_o", "norm_down"),
    "both": ("norm_in", "norm_o", "norm_post", "norm_down"),
}


def _field(key: str) -> str:
    """The field of LayerWeights of a key of Architecture.names."""
    return key.partition(".")[0]


def _blocks(heads: range, size: int) -> range:
    """The rows of heads of `size` rows each."""
    return range(heads.start * size, heads.stop * size)


def _halves(rows: range, c: ModelConfig, D: int) -> list[int]:
    """Rows of q or k, in an order in which RoPE rotates (i, i + D / 2) of a head, with the dimensions that it does not
    rotate at the ends of the halves."""
    R = c.rotated or D
    halves = [range(R // 2), range(R, (R + D) // 2), range(R // 2, R), range((R + D) // 2, D)]
    return [head + i for head in rows[::D] for half in halves for i in half]


def pieces_of(c: ModelConfig, part: Part, whole_head: bool, fused: bool = False) -> Iterator[Piece]:
    """The piece of each tensor that `part` holds; with `whole_head`, all rows of the head. `fused`: the layout of
    experts."""
    V, e = c.vocab_size, c.hidden_size
    if "embed_tokens" not in c.shares:
        yield Piece.tensor("embed_tokens.weight", "embed", V, e)
    if P := c.layer.ple * c.num_layers:
        yield Piece.tensor("embed_tokens_per_layer.weight", HOST, c.ple_ids, P)
        yield Piece.tensor("per_layer_model_projection.weight", "ple_in", P, e)
        yield Piece.tensor("per_layer_projection_norm.weight", "norm_ple_in", c.layer.ple)
    for i in range(c.num_layers):
        yield from _Layer(c, i, part).pieces(fused)
    final = ARCHITECTURES[c.architecture].final.tensor
    yield replace(Piece.tensor(final, "norm", e, offset=c.norm_offset), factor=c.logits_scale)
    if not c.tied and "lm_head" not in c.shares:
        first, count = (0, V) if whole_head else part.vocabulary(c)
        yield Piece("lm_head.weight", "head", None, 0, (count, e), (V, e), (first, 0))


def is_fused(names: Iterable[str]) -> bool:
    """Whether a checkpoint with these tensors has the fused layout of experts."""
    return any(GATE_UP.removeprefix("mlp") in name for name in names)


class Share(NamedTuple):
    """The rows or columns of a tensor that a part holds."""

    indices: Sequence[int]
    total: int  # of the whole tensor
    bias: bool = False  # there is one, split in the same way; columns' bias is whole, and only rank 0 adds it


Shares = dict[str, Share]  # by the keys of Architecture.names


class _Layer:
    """The pieces of layer i."""

    def __init__(self, c: ModelConfig, i: int, part: Part):
        self.c, self.i, self.part = c, i, part
        self.names = ARCHITECTURES[c.architecture].names
        self.mixer, self.mixture, self.below = c.layer.mixer(i), c.layer.mixture(i), Counter[str]()
        self.sizes = {"E": c.hidden_size, "P": c.layer.ple}
        if self.mixture is not None:
            self.sizes |= {"X": self.mixture.count}
        if isinstance(self.mixer, DeltaNet):
            self.sizes |= {"Dv": self.mixer.value_dim}

    def pieces(self, fused: bool) -> Iterator[Piece]:
        c, spec, mixer, mixture = self.c, self.c.layer, self.mixer, self.mixture
        if mixture is not None:
            yield from self._experts(mixture, fused)
        if isinstance(mixer, DeltaNet):
            shares = self._delta_net(mixer)
        else:
            shares = self._attention() if mixer is None else self._short_conv(mixer)
        for key, share in (shares | (self._feed_forward() if mixture is None else {})).items():
            yield from self._split(key, share)
        fields = [
            *(["norm_mix"] if isinstance(mixer, DeltaNet) else []),
            *(["ple_gate", "ple_out", "norm_ple"] if spec.ple else []),
            *(["scalar"] if spec.scaled else []),
        ]
        for field in (*fields, *NORMS[spec.norms]):
            yield self._whole(field, c.norm_offset if field in NORMS[spec.norms] else 0.0)
        if spec.qk_norm and mixer is None:
            yield self._head_norm("q_norm", c.num_heads)
            if c.kv(self.i).source is None:
                yield self._head_norm("k_norm", c.num_kv_heads)

    def _piece(self, key: str, *places: Any, end: str = ".weight", buffer: str = "", **more: Any) -> Piece:
        """`places`: row, shape, stored and first of the piece. `buffer`: the field, if the key does not begin with
        it."""
        found, field = self.names[key], _field(key)
        name = found.name if found.whole else found.name + end
        return Piece(f"layers.{self.i}.{name}", buffer or field, self.i, *places, **more)

    def _whole(self, key: str, offset: float = 0.0) -> Piece:
        """A tensor of which each part has the whole."""
        shape = shape_of(KINDS[_field(key)].shape, self.sizes)
        return self._piece(key, 0, shape, shape, (0,) * len(shape), offset)

    def _split(self, key: str, share: Share) -> Iterator[Piece]:
        """A part of a tensor, and of its bias. The tensors of a field lie one below the other."""
        field, E, count = _field(key), self.c.hidden_size, len(share.indices)
        first, bias = share.indices[0], {"end": ".bias", "buffer": f"{field}_bias"}
        if KINDS[field].split == "columns":
            yield self._piece(key, 0, (E, count), (E, share.total), (0, first))
            if share.bias:
                yield self._piece(key, 0, (E,), (E,), (0,), **bias)
            return
        columns = (1, self.mixer.kernel) if field == "conv" and self.mixer else (E,) if KINDS[field].product else ()
        row, self.below[field] = self.below[field], self.below[field] + count
        consecutive = list(share.indices) == [*range(first, first + count)]
        order = () if consecutive and (field != "conv" or count == share.total) else tuple(share.indices)
        starts = first, *(0 for _ in columns)
        yield self._piece(key, row, (count, *columns), (share.total, *columns), starts, order=order)
        if share.bias:
            yield self._piece(key, row, (count,), (share.total,), (first,), order=order, **bias)

    def _attention(self) -> Shares:
        c, part, own, bias = self.c, self.part.mixer, self.c.kv(self.i), self.c.layer.qkv_bias
        q, kv, D = part.share(c.num_heads), part.kv_heads(own.heads), own.dim
        Q, KV = c.num_heads * D, own.heads * D
        qs, vs = _blocks(q, D), _blocks(kv, D)
        o = Share(qs, Q, c.layer.o_bias)
        sinks = {"sinks": Share(q, c.num_heads)} if c.layer.sinks else {}
        rows, ks = _halves(qs, c, D), _halves(vs, c, D)
        if "qkv" in self.names:
            rows = [*rows, *(Q + i for i in ks), *(Q + KV + i for i in vs)]
            return sinks | {"qkv": Share(rows, Q + 2 * KV, bias), "o": o}
        if c.layer.gated:  # the checkpoint's q_proj has q and the gate of each head one after the other
            gates = [head * 2 * D + D + i for head in q for i in range(D)]
            rows, Q = gates + [row // D * 2 * D + row % D for row in rows], 2 * Q
        shares = sinks | {"qkv.q": Share(rows, Q, bias), "o": o}
        if own.source is None:
            shares |= {"qkv.k": Share(ks, KV, bias)} | ({} if own.single else {"qkv.v": Share(vs, KV, bias)})
        return shares

    def _head_norm(self, key: str, heads: int) -> Piece:
        """The norm of q or of k."""
        c, D = self.c, self.c.kv(self.i).dim
        if c.layer.qk_norm == "projection":
            D = heads * c.head_dim
        order = tuple(_halves(range(D), c, D)) if c.rotated else ()
        return self._piece(key, 0, (D,), (D,), (0,), c.norm_offset, order=order)

    def _short_conv(self, mixer: ShortConv) -> Shares:
        own, C = self.part.mixer.share(mixer.channels), mixer.channels
        rows = [n * C + j for n in range(3) for j in own]
        return {"qkv.bcx": Share(rows, 3 * C), "conv": Share(own, C), "o.mixer": Share(own, C)}

    def _delta_net(self, mixer: DeltaNet) -> Shares:
        Hk, Hv, Dk, Dv, C = mixer.key_heads, mixer.value_heads, mixer.key_dim, mixer.value_dim, mixer.channels
        heads, key_heads = self.part.mixer.share(Hv), self.part.mixer.share(Hk)
        keys, values = _blocks(key_heads, Dk), _blocks(heads, Dv)
        channels = [*keys, *(Hk * Dk + j for j in keys), *(2 * Hk * Dk + j for j in values)]
        if "qkv.qkv" in self.names:
            shares = {"qkv.qkv": Share(channels, C), "qkv.z": Share(values, Hv * Dv)}
            shares |= {"gates.b": Share(heads, Hv), "gates.a": Share(heads, Hv)}
        else:  # by key head: q, k, v and z; then b and a
            each, group = 2 * Dk + 2 * Hv // Hk * Dv, Hv // Hk
            parts = [(0, Dk), (Dk, Dk), (2 * Dk, group * Dv), (2 * Dk + group * Dv, group * Dv)]
            rows = [n * each + first + j for first, count in parts for n in key_heads for j in range(count)]
            gates = [(j * 2 + of) * group + n for of in (0, 1) for j in key_heads for n in range(group)]
            shares = {"qkv.qkvz": Share(rows, Hk * each), "gates.ba": Share(gates, 2 * Hv)}
        by_head = {"a_log": Share(heads, Hv), "dt_bias": Share(heads, Hv)}
        return shares | {"conv": Share(channels, C)} | by_head | {"o.mixer": Share(values, Hv * Dv)}

    def _feed_forward(self) -> Shares:
        F, bias = self.c.width(self.i), self.c.layer.mlp_bias
        own = self.part.columns(self.c) if self.part.size > 1 else range(F)
        down = {"down": Share(own, F, bias)}
        if "gate_up" in self.names:
            return {"gate_up": Share([*own, *(F + n for n in own)], 2 * F, bias)} | down
        return {"gate_up.gate": Share(own, F, bias), "gate_up.up": Share(own, F, bias)} | down

    def _experts(self, experts: Experts, fused: bool) -> Iterator[Piece]:
        """The router and the experts, in the order of their rows in memory, and what every row reads beside them."""
        X, E, F, turns, names = experts.count, self.c.hidden_size, experts.width, experts.turns, self.names
        own, S = self.part.share(F), experts.shared
        first, count = own.start, len(own)
        fused = fused or "down.expert" not in names
        yield self._whole("router.single" if "router.single" in names and not fused else "router")
        if experts.biased:
            yield self._whole("router_bias")
        if experts.beside:
            yield replace(self._whole("router_norm"), factor=E**-0.5)
            yield self._whole("router_scale")
        if fused:
            shape, stored = (X, 2 * count, E), (X, 2 * F, E)
            both: dict[str, Any] = {"parts": 2, "alternate": turns}  # gate and up
            yield self._piece("gate_up.experts", 0, shape, stored, (0, first, 0), end="", **both, transposed=turns)
            yield self._piece("down.experts", 0, (X, E, count), (X, E, F), (0, 0, first), end="", transposed=turns)
            if self.c.layer.mlp_bias:
                bias: dict[str, Any] = {"end": "_bias", "buffer": "gate_up_bias"}
                yield self._piece("gate_up.experts", 0, shape[:2], stored[:2], (0, first), **bias, **both)
                bias["buffer"] = "down_bias"
                yield self._piece("down.experts", 0, (X, E), (X, E), (0, 0), **bias)
        for n in range(0 if fused else X):
            for i, key in enumerate(("gate_up.expert_gate", "gate_up.expert_up")):
                yield self._numbered(n, self._piece(key, (2 * n + i) * count, (count, E), (F, E), (first, 0)))
            yield self._numbered(n, self._piece("down.expert", n * E, (E, count), (E, F), (0, first)))
        for key in ("shared_gate_up.gate", "shared_gate_up.up", "shared_down") if S else ():
            yield from self._split(key, Share(self.part.share(S), S))
        if S:
            for key in ("norm_experts", "norm_mixed", "norm_shared") if experts.beside else ("shared_gate",):
                yield self._whole(key)

    @staticmethod
    def _numbered(n: int, p: Piece) -> Piece:
        """The piece of expert n."""
        return replace(p, name=p.name.replace("#", str(n)))
