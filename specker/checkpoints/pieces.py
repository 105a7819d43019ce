"""Which tensors of a checkpoint hold a model's weights: a `Piece` says where a tensor's part lies in the buffers.

A mixture of experts has one of two layouts. Most checkpoints have three matrices for each expert; Mixtral names them
differently. The fused layout, which transformers has in memory and into which GGUF files are converted, has two tensors
for all experts of a layer: gate_up_proj [X, 2 F, E], with each expert's gate rows first, and down_proj [X, E, F]. In
memory both become matrices [X * 2 F, E] and [X * E, F] (Weights.gate_up and .down). gpt-oss has always two tensors, in
which rows of gate and up take turns, and with matrices that are not quantised [X, E, 2 F] and [X, F, E]
(Experts.turns), unless it was a GGUF file.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specker.checkpoints.architectures import ARCHITECTURES
from specker.checkpoints.architectures.names import GATE_UP
from specker.layer_weights import KINDS
from specker.model.config import DeltaNet, Experts, Mixer, ModelConfig
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
    def tensor(
        cls, name: str, buffer: str, *shape: int, layer: int | None = None, row: int = 0, offset: float = 0.0
    ) -> "Piece":
        """A whole tensor."""
        return cls(name, buffer, layer, row, shape, shape, (0,) * len(shape), offset)

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
        if len(self.stored) == 3 and not self.alternate:
            found = found.flatten(0, -2)
        if self.whole:
            return found
        found = self.rows_of(found)
        if len(self.stored) == 2 and self.parts > 1:
            return found.view(self.shape)
        return found if found.dim() == 1 else found[:, self.first[-1] : self.first[-1] + self.shape[-1]]


QK_NORMS = "q_norm", "k_norm"
NORMS = {  # of LayerSpec.norms
    "before": ("norm_in", "norm_post"),
    "after": ("norm_o", "norm_down"),
    "both": ("norm_in", "norm_o", "norm_post", "norm_down"),
}


def norms_of(c: ModelConfig) -> dict[str, str]:
    """A layer's norms, including those of q and k: field of LayerWeights -> name in the checkpoint."""
    names = ARCHITECTURES[c.architecture].names
    return {field: names[field].name for field in (*NORMS[c.layer.norms], *(QK_NORMS if c.layer.qk_norm else ()))}


def final_norm(weight: Tensor, c: ModelConfig) -> Tensor:
    """The weights of the final norm [E], as a run needs them."""
    moved = weight + c.norm_offset if c.norm_offset else weight
    return moved if c.logits_scale == 1 else moved * c.logits_scale


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


class Rows(NamedTuple):
    """The rows of a matrix, and of its bias, that a part holds."""

    key: str  # of Architecture.names
    rows: Sequence[int]
    of: int  # rows of the whole matrix
    bias: bool = False


class _Layer:
    """The pieces of layer i."""

    def __init__(self, c: ModelConfig, i: int, part: Part):
        self.c, self.i, self.part = c, i, part
        self.names = ARCHITECTURES[c.architecture].names

    def pieces(self, fused: bool) -> Iterator[Piece]:
        c, i, part = self.c, self.i, self.part
        mixer, mixture = c.layer.mixer(i), c.layer.mixture(i)
        if mixture is not None and mixture.beside:
            yield from self._beside(mixture)
        elif mixture is not None:
            yield from self._experts(mixture, fused)
        if mixer is not None:
            yield from self._mixer(mixer)
        else:
            (q0, q), D = part.heads(c), c.kv(i).dim
            if c.layer.sinks:
                yield self._some("sinks", q0, q, c.num_heads)
            yield from self._outputs("qkv", self._attention())
        (f0, f), F = (0, c.width(i)) if c.widths else part.inner(c), c.width(i)
        bias = c.layer.mlp_bias
        if mixture is None and "gate_up" in self.names:
            rows = [*range(f0, f0 + f), *range(F + f0, F + f0 + f)]
            yield from self._outputs("gate_up", [Rows("gate_up", rows, 2 * F, bias)])
        elif mixture is None:
            parts = "gate_up.gate", "gate_up.up"
            yield from self._outputs("gate_up", [Rows(key, range(f0, f0 + f), F, bias) for key in parts])
        if mixer is None:
            yield from self._inputs("o", q0 * D, q * D, c.num_heads * D, c.layer.o_bias)
        if mixture is None:
            yield from self._inputs("down", f0, f, F, bias)
        if P := c.layer.ple:
            yield self._whole("ple_gate", P, c.hidden_size)
            yield self._whole("ple_out", c.hidden_size, P)
            yield self._whole("norm_ple", c.hidden_size)
        if c.layer.scaled:
            yield self._whole("scalar", 1)
        for field in NORMS[c.layer.norms]:
            yield self._whole(field, c.hidden_size, offset=c.norm_offset)
        if c.layer.qk_norm and mixer is None:
            yield self._head_norm("q_norm", c.num_heads)
            if c.kv(i).source is None:
                yield self._head_norm("k_norm", c.num_kv_heads)

    def _piece(self, key: str, *places: Any, end: str = ".weight", buffer: str = "", **more: Any) -> Piece:
        """`places`: row, shape, stored and first of the piece. `buffer`: the field, if the key does not begin with
        it."""
        found, field = self.names[key], key.partition(".")[0]
        name = found.name if found.whole else found.name + end
        return Piece(f"layers.{self.i}.{name}", buffer or field, self.i, *places, **more)

    def _whole(self, key: str, *shape: int, row: int = 0, offset: float = 0.0, end: str = ".weight") -> Piece:
        """A whole tensor."""
        return self._piece(key, row, shape, shape, (0,) * len(shape), offset, end=end)

    def _some(self, key: str, first: int, count: int, of: int) -> Piece:
        """Some numbers of a vector."""
        return self._piece(key, 0, (count,), (of,), (first,))

    def _outputs(self, field: str, every: Iterable[Rows]) -> Iterator[Piece]:
        """The rows of the matrices that make up a field, one below the other, and of their biases."""
        e, below = self.c.hidden_size, 0
        for key, rows, of, bias in every:
            first, count = rows[0], len(rows)
            order = () if list(rows) == [*range(first, first + count)] else tuple(rows)
            yield self._piece(key, below, (count, e), (of, e), (first, 0), order=order)
            if bias:
                bias_of = f"{field}_bias"
                yield self._piece(key, below, (count,), (of,), (first,), order=order, end=".bias", buffer=bias_of)
            below += count

    def _inputs(self, key: str, first: int, count: int, of: int, bias: bool = False) -> Iterator[Piece]:
        """Some columns of a matrix, and its whole bias, which only rank 0 adds."""
        e = self.c.hidden_size
        yield self._piece(key, 0, (e, count), (e, of), (0, first))
        if bias:
            yield self._piece(key, 0, (e,), (e,), (0,), end=".bias", buffer=f"{key}_bias")

    def _attention(self) -> list[Rows]:
        """The rows of the gate, of q, k and v."""
        c, part, own, bias = self.c, self.part, self.c.kv(self.i), self.c.layer.qkv_bias
        (q0, q), (k0, kv), D = part.heads(c), part.kv_heads(c) if part.size > 1 else (0, own.heads), own.dim
        Q, KV = c.num_heads * D, own.heads * D
        qs, ks = _halves(range(q0 * D, (q0 + q) * D), c, D), _halves(range(k0 * D, (k0 + kv) * D), c, D)
        vs = range(k0 * D, (k0 + kv) * D)
        if "qkv" in self.names:
            return [Rows("qkv", [*qs, *(Q + i for i in ks), *(Q + KV + i for i in vs)], Q + 2 * KV, bias)]
        if c.layer.gated:  # the checkpoint's q_proj has q and the gate of each head one after the other
            gates = [head * 2 * D + D + i for head in range(q0, q0 + q) for i in range(D)]
            qs, Q = gates + [row // D * 2 * D + row % D for row in qs], 2 * Q
        outputs = [Rows("qkv.q", qs, Q, bias), Rows("qkv.k", ks, KV, bias), Rows("qkv.v", vs, KV, bias)]
        return outputs[: 1 if own.source is not None else 2 if own.single else 3]

    def _head_norm(self, key: str, heads: int) -> Piece:
        """The norm of q or of k."""
        c = self.c
        if c.layer.qk_norm == "projection":
            return self._whole(key, heads * c.head_dim, offset=c.norm_offset)
        D = c.kv(self.i).dim
        order = tuple(_halves(range(D), c, D)) if c.rotated else ()
        return self._piece(key, 0, (D,), (D,), (0,), c.norm_offset, order=order)

    def _conv(self, channels: Sequence[int], of: int, kernel: int) -> Piece:
        """The weight of some channels of a convolution, stored as [of, 1, kernel]."""
        order = () if len(channels) == of else tuple(channels)
        return self._piece("conv", 0, (len(channels), 1, kernel), (of, 1, kernel), (0, 0, 0), order=order)

    def _mixer(self, mixer: Mixer) -> Iterator[Piece]:
        """Those of a layer with a recurrent state."""
        c, part, C, K = self.c, self.part, mixer.channels, mixer.kernel
        if not isinstance(mixer, DeltaNet):
            first, count = part.channels(mixer)
            own = range(first, first + count)
            yield from self._outputs("qkv", [Rows("qkv.bcx", [n * C + j for n in range(3) for j in own], 3 * C)])
            yield self._conv(own, C, K)
            yield self._piece("o.mixer", 0, (c.hidden_size, count), (c.hidden_size, C), (0, first))
            return
        (k0, k), (v0, v), Dk, Dv = part.key_heads(mixer), part.value_heads(mixer), mixer.key_dim, mixer.value_dim
        Hk, Hv = mixer.key_heads, mixer.value_heads
        keys, values = range(k0 * Dk, (k0 + k) * Dk), range(v0 * Dv, (v0 + v) * Dv)
        channels = [*keys, *(Hk * Dk + j for j in keys), *(2 * Hk * Dk + j for j in values)]
        if "qkv.qkv" in self.names:
            yield from self._outputs("qkv", [Rows("qkv.qkv", channels, C), Rows("qkv.z", values, Hv * Dv)])
            heads = range(v0, v0 + v)
            yield from self._outputs("gates", [Rows("gates.b", heads, Hv), Rows("gates.a", heads, Hv)])
        else:  # by key head: q, k, v and z; then b and a
            each, group = 2 * Dk + 2 * Hv // Hk * Dv, Hv // Hk
            starts = [j * each for j in range(k0, k0 + k)]
            parts = [(0, Dk), (Dk, Dk), (2 * Dk, group * Dv), (2 * Dk + group * Dv, group * Dv)]
            rows = [start + first + j for first, count in parts for start in starts for j in range(count)]
            yield from self._outputs("qkv", [Rows("qkv.qkvz", rows, Hk * each)])
            rows = [(j * 2 + of) * group + n for of in (0, 1) for j in range(k0, k0 + k) for n in range(group)]
            yield from self._outputs("gates", [Rows("gates.ba", rows, 2 * Hv)])
        yield self._conv(channels, C, K)
        yield self._some("a_log", v0, v, Hv)
        yield self._some("dt_bias", v0, v, Hv)
        yield self._whole("norm_mix", Dv)
        yield self._piece("o.mixer", 0, (c.hidden_size, v * Dv), (c.hidden_size, Hv * Dv), (0, v0 * Dv))

    def _beside(self, experts: Experts) -> Iterator[Piece]:
        """The experts of a layer of Gemma 4, its router and the feed-forward beside them."""
        X, E, F, S = experts.count, self.c.hidden_size, experts.width, experts.shared
        yield self._whole("router", X, E)
        yield replace(self._whole("router_norm", E), factor=E**-0.5)
        yield self._whole("router_scale", X)
        yield self._whole("gate_up.experts", X, 2 * F, E, end="")
        yield self._whole("down.experts", X, E, F, end="")
        for field in ("norm_experts", "norm_mixed", "norm_shared"):
            yield self._whole(field, E)
        yield self._whole("shared_gate_up.gate", S, E)
        yield self._whole("shared_gate_up.up", S, E, row=S)
        yield self._whole("shared_down", E, S)

    def _experts(self, experts: Experts, fused: bool) -> Iterator[Piece]:
        """The router and the experts, in the order of their rows in memory."""
        X, E, F, turns, names = experts.count, self.c.hidden_size, experts.width, experts.turns, self.names
        first, count = self.part.within(experts)
        fused = fused or "down.expert" not in names
        router = "router.single" if "router.single" in names and not fused else "router"

        yield self._whole(router, X, E)
        if experts.biased:
            yield self._whole("router_bias", X)
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
        if not experts.shared:
            return
        (first, count), F = self.part.beside(experts), experts.shared
        parts = "shared_gate_up.gate", "shared_gate_up.up"
        yield from self._outputs("shared_gate_up", [Rows(key, range(first, first + count), F) for key in parts])
        yield from self._inputs("shared_down", first, count, F)
        yield self._whole("shared_gate", 1, E)

    @staticmethod
    def _numbered(n: int, p: Piece) -> Piece:
        """The piece of expert n."""
        return replace(p, name=p.name.replace("#", str(n)))
