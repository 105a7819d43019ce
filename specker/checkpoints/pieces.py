"""Which tensors of a checkpoint hold a model's weights: a `Piece` says where a tensor's part lies in the buffers.

A mixture of experts has one of two layouts. Most checkpoints have three matrices for each expert; Mixtral names them
differently. The fused layout, which transformers has in memory and into which GGUF files are converted, has two tensors
for all experts of a layer: gate_up_proj [X, 2 F, E], with each expert's gate rows first, and down_proj [X, E, F]. In
memory both become matrices [X * 2 F, E] and [X * E, F] (Weights.gate_up and .down).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from specker.model.config import Experts, LayerSpec, ModelConfig
from specker.model.split import Part

GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"  # of the fused layout


class ExpertNames(NamedTuple):
    """A layer's tensors, without ".weight"."""

    router: str
    expert: str  # # stands for an expert's number
    gate: str
    up: str
    down: str


QWEN = ExpertNames("mlp.gate", "mlp.experts.#", "gate_proj", "up_proj", "down_proj")
MIXTRAL = ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts.#", "w1", "w3", "w2")


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

    @classmethod
    def tensor(
        cls, name: str, buffer: str, *shape: int, layer: int | None = None, row: int = 0, offset: float = 0.0
    ) -> "Piece":
        """A whole tensor."""
        return cls(name, buffer, layer, row, shape, shape, (0,) * len(shape), offset)

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
    experts."""
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

    widths = {"q_norm": D, "k_norm": D} if c.layer.qk_norm == "head" else {"q_norm": Q, "k_norm": KV}
    V = c.vocab_size
    if "embed_tokens" not in c.shares:
        yield Piece.tensor("embed_tokens.weight", "embed", V, e)
    for i in range(c.num_layers):
        mixture = c.layer.mixture(i)
        if mixture is not None:
            yield from _expert_pieces(c, i, mixture, part, fused)
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
                yield Piece.tensor(f"layers.{i}.{name}.bias", f"{buffer}_bias", e, layer=i)
        for buffer, name in norms_of(c.layer).items():
            width = widths.get(buffer, e)
            yield Piece.tensor(f"layers.{i}.{name}.weight", buffer, width, layer=i, offset=c.norm_offset)
    yield replace(Piece.tensor("norm.weight", "norm", e, offset=c.norm_offset), factor=c.logits_scale)
    if not c.tied and "lm_head" not in c.shares:
        first, count = (0, V) if whole_head else part.vocabulary(c)
        yield Piece("lm_head.weight", "head", None, 0, (count, e), (V, e), (first, 0))


def is_fused(names: Iterable[str]) -> bool:
    """Whether a checkpoint with these tensors has the fused layout of experts."""
    return any(GATE_UP in name for name in names)


def _expert_pieces(c: ModelConfig, layer: int, experts: Experts, part: Part, fused: bool) -> Iterator[Piece]:
    """The router and the experts of one layer, in the order of their rows in memory."""
    X, E, F = experts.count, c.hidden_size, experts.width
    first, count = part.within(experts)
    names = MIXTRAL if c.architecture == "MixtralForCausalLM" and not fused else QWEN

    start = f"layers.{layer}."
    yield Piece.tensor(f"{start}{names.router}.weight", "router", X, E, layer=layer)
    if fused:
        both = (X, 2 * count, E), (X, 2 * F, E), (0, first, 0)
        yield Piece(start + GATE_UP, "gate_up", layer, 0, *both, parts=2)
        yield Piece(start + DOWN, "down", layer, 0, (X, E, count), (X, E, F), (0, 0, first))
        return
    for n in range(X):
        own = start + names.expert.replace("#", str(n))
        for i, name in enumerate((names.gate, names.up)):
            row = (2 * n + i) * count
            yield Piece(f"{own}.{name}.weight", "gate_up", layer, row, (count, E), (F, E), (first, 0))
        yield Piece(f"{own}.{names.down}.weight", "down", layer, n * E, (E, count), (E, F), (0, first))
