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

from specker.layer_weights import KINDS
from specker.model.config import DeltaNet, Experts, LayerSpec, Mixer, ModelConfig
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
LFM2 = ExpertNames("mlp.gate", "mlp.experts.#", "w1", "w3", "w2")  # before RENAMED
NAMED = {"MixtralForCausalLM": MIXTRAL, "Lfm2MoeForCausalLM": LFM2}  # of other architectures: QWEN
GPT_OSS = "GptOssForCausalLM"
HOST = "ple_table"  # stays where it is, memory-mapped from the file: rows of it are gathered
IN_LFM2 = {
    "self_attn.o_proj": "self_attn.out_proj",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.": "feed_forward.",
}
# architecture -> other names of parts of a tensor's name
RENAMED = {"Lfm2ForCausalLM": IN_LFM2, "Lfm2MoeForCausalLM": IN_LFM2}
FINAL = dict.fromkeys(RENAMED, "embedding_norm")  # the name of the final norm, elsewhere "norm"


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


def _halves(rows: range, c: ModelConfig, D: int) -> list[int]:
    """Rows of q or k, in an order in which RoPE rotates (i, i + D / 2) of a head, with the dimensions that it does not
    rotate at the ends of the halves."""
    R = c.rotated or D
    halves = [range(R // 2), range(R, (R + D) // 2), range(R // 2, R), range((R + D) // 2, D)]
    return [head + i for head in rows[::D] for half in halves for i in half]


def pieces_of(c: ModelConfig, part: Part, whole_head: bool, fused: bool = False) -> Iterator[Piece]:
    """The piece of each tensor that `part` holds; with `whole_head`, all rows of the head. `fused`: the layout of
    experts."""
    V, e, names = c.vocab_size, c.hidden_size, RENAMED.get(c.architecture, {})
    if "embed_tokens" not in c.shares:
        yield Piece.tensor("embed_tokens.weight", "embed", V, e)
    if P := c.layer.ple * c.num_layers:
        yield Piece.tensor("embed_tokens_per_layer.weight", HOST, c.ple_ids, P)
        yield Piece.tensor("per_layer_model_projection.weight", "ple_in", P, e)
        yield Piece.tensor("per_layer_projection_norm.weight", "norm_ple_in", c.layer.ple)
    for i in range(c.num_layers):
        for p in _layer_pieces(c, i, part, fused):
            own = p.name
            for usual, name in names.items():
                own = own.replace(usual, name)
            yield replace(p, name=f"layers.{i}.{own}")
    final = FINAL.get(c.architecture, "norm")
    yield replace(Piece.tensor(f"{final}.weight", "norm", e, offset=c.norm_offset), factor=c.logits_scale)
    if not c.tied and "lm_head" not in c.shares:
        first, count = (0, V) if whole_head else part.vocabulary(c)
        yield Piece("lm_head.weight", "head", None, 0, (count, e), (V, e), (first, 0))


# Matrices split by output: name, buffer, first row there, the part's rows, of how many, whether there is a bias
Outputs = list[tuple[str, str, int, Sequence[int], int, bool]]


def _layer_pieces(c: ModelConfig, i: int, part: Part, fused: bool) -> Iterator[Piece]:
    """Those of layer i, by the names of most architectures and without the layer's number."""
    e, mixer, mixture = c.hidden_size, c.layer.mixer(i), c.layer.mixture(i)
    if mixture is not None and mixture.beside:
        yield from _beside_pieces(c, i, mixture)
    elif mixture is not None:
        yield from _expert_pieces(c, i, mixture, part, fused)
    (f0, f), F = (0, c.width(i)) if c.widths else part.inner(c), c.width(i)
    fs = range(f0, f0 + f)
    outputs: Outputs = []
    columns = []  # matrices split by input: name, buffer, columns, bias; only rank 0 adds the bias
    if mixer is None:
        outputs += _attention_rows(c, i, part)
        (q0, q), D = part.heads(c), c.kv(i).dim
        columns += [("self_attn.o_proj", "o", (q0 * D, q * D, c.num_heads * D), c.layer.o_bias)]
        if c.layer.sinks:
            yield Piece("self_attn.sinks", "sinks", i, 0, (q,), (c.num_heads,), (q0,))
    else:
        yield from _mixer_pieces(c, i, mixer, part)
    if mixture is None and c.fused:
        outputs += [("mlp.gate_up_proj", "gate_up", 0, [*fs, *(F + i for i in fs)], 2 * F, c.layer.mlp_bias)]
    elif mixture is None:
        outputs += [("mlp.gate_proj", "gate_up", 0, fs, F, c.layer.mlp_bias)]
        outputs += [("mlp.up_proj", "gate_up", f, fs, F, c.layer.mlp_bias)]
    if mixture is None:
        columns += [("mlp.down_proj", "down", (f0, f, F), c.layer.mlp_bias)]
    for name, buffer, row, rows, of, bias in outputs:
        yield from _output(name, buffer, i, row, rows, (of, e), bias)
    for name, buffer, (first, count, of), bias in columns:
        yield Piece(f"{name}.weight", buffer, i, 0, (e, count), (e, of), (0, first))
        if bias:
            yield Piece.tensor(f"{name}.bias", f"{buffer}_bias", e, layer=i)
    if P := c.layer.ple:
        yield Piece.tensor("per_layer_input_gate.weight", "ple_gate", P, e, layer=i)
        yield Piece.tensor("per_layer_projection.weight", "ple_out", e, P, layer=i)
        yield Piece.tensor("post_per_layer_input_norm.weight", "norm_ple", e, layer=i)
    if c.layer.scaled:
        yield Piece.tensor("layer_scalar", "scalar", 1, layer=i)
    for buffer, name in norms_of(c.layer).items():
        if buffer not in ("q_norm", "k_norm"):
            yield Piece.tensor(f"{name}.weight", buffer, e, layer=i, offset=c.norm_offset)
        elif mixer is None and (buffer == "q_norm" or c.kv(i).source is None):
            yield _head_norm(c, name, buffer, i)


def _output(
    name: str, buffer: str, layer: int, row: int, rows: Sequence[int], of: tuple[int, int], bias: bool = False
) -> Iterator[Piece]:
    """Some rows of a matrix of the shape `of`, and of its bias."""
    first, count = rows[0], len(rows)
    order = () if list(rows) == [*range(first, first + count)] else tuple(rows)
    yield Piece(f"{name}.weight", buffer, layer, row, (count, of[1]), of, (first, 0), order=order)
    if bias:
        yield Piece(f"{name}.bias", f"{buffer}_bias", layer, row, (count,), of[:1], (first,), order=order)


def _attention_rows(c: ModelConfig, i: int, part: Part) -> Outputs:
    """The rows of the gate, of q, k and v in layer i."""
    own = c.kv(i)
    (q0, q), (k0, kv), D = part.heads(c), part.kv_heads(c) if part.size > 1 else (0, own.heads), own.dim
    q0, q, k0, kv, Q, KV = q0 * D, q * D, k0 * D, kv * D, c.num_heads * D, own.heads * D
    qs, ks, vs = _halves(range(q0, q0 + q), c, D), _halves(range(k0, k0 + kv), c, D), range(k0, k0 + kv)
    bias = c.layer.qkv_bias
    if c.fused:
        every = [*qs, *(Q + i for i in ks), *(Q + KV + i for i in vs)]
        return [("self_attn.qkv_proj", "qkv", 0, every, Q + 2 * KV, bias)]
    if c.layer.gated:  # the checkpoint's q_proj has q and the gate of each head one after the other
        qs = [head * 2 * D + D + i for head in range(q0 // D, (q0 + q) // D) for i in range(D)] + [
            row // D * 2 * D + row % D for row in qs
        ]
        q, Q = 2 * q, 2 * Q
    outputs: Outputs = [
        ("self_attn.q_proj", "qkv", 0, qs, Q, bias),
        ("self_attn.k_proj", "qkv", q, ks, KV, bias),
        ("self_attn.v_proj", "qkv", q + kv, vs, KV, bias),
    ]
    return outputs[: 1 if own.source is not None else 2 if own.single else 3]


def _head_norm(c: ModelConfig, name: str, buffer: str, layer: int) -> Piece:
    """The norm of q or of k."""
    if c.layer.qk_norm == "projection":
        heads = c.num_heads if buffer == "q_norm" else c.num_kv_heads
        return Piece.tensor(f"{name}.weight", buffer, heads * c.head_dim, layer=layer, offset=c.norm_offset)
    D = c.kv(layer).dim
    order = tuple(_halves(range(D), c, D)) if c.rotated else ()
    return Piece(f"{name}.weight", buffer, layer, 0, (D,), (D,), (0,), c.norm_offset, order=order)


def _conv_weight(name: str, layer: int, channels: list[int], of: int, kernel: int) -> Piece:
    """The weight of some channels of a convolution, stored as [of, 1, kernel]."""
    order = () if len(channels) == of else tuple(channels)
    shape, stored = (len(channels), 1, kernel), (of, 1, kernel)
    return Piece(f"{name}.weight", "conv", layer, 0, shape, stored, (0, 0, 0), order=order)


def _mixer_pieces(c: ModelConfig, i: int, mixer: Mixer, part: Part) -> Iterator[Piece]:
    """Those of a layer with a recurrent state."""
    e = c.hidden_size
    if not isinstance(mixer, DeltaNet):
        C = mixer.channels
        first, count = part.channels(mixer)
        own = range(first, first + count)
        yield from _output("conv.in_proj", "qkv", i, 0, [n * C + j for n in range(3) for j in own], (3 * C, e))
        yield _conv_weight("conv.conv", i, list(own), C, mixer.kernel)
        yield Piece("conv.out_proj.weight", "o", i, 0, (e, count), (e, C), (0, first))
        return
    (k0, k), (v0, v), Dk, Dv = part.key_heads(mixer), part.value_heads(mixer), mixer.key_dim, mixer.value_dim
    Hk, Hv, C, K = mixer.key_heads, mixer.value_heads, mixer.channels, mixer.kernel
    keys, values = range(k0 * Dk, (k0 + k) * Dk), range(v0 * Dv, (v0 + v) * Dv)
    channels = [*keys, *(Hk * Dk + j for j in keys), *(2 * Hk * Dk + j for j in values)]
    if c.architecture == "Qwen3NextForCausalLM":  # by key head: q, k, v and z; then b and a
        each, group = 2 * Dk + 2 * Hv // Hk * Dv, Hv // Hk
        starts = [j * each for j in range(k0, k0 + k)]
        parts = [(0, Dk), (Dk, Dk), (2 * Dk, group * Dv), (2 * Dk + group * Dv, group * Dv)]
        rows = [start + first + j for first, count in parts for start in starts for j in range(count)]
        yield from _output("linear_attn.in_proj_qkvz", "qkv", i, 0, rows, (Hk * each, e))
        rows = [(j * 2 + of) * group + n for of in (0, 1) for j in range(k0, k0 + k) for n in range(group)]
        yield from _output("linear_attn.in_proj_ba", "gates", i, 0, rows, (2 * Hv, e))
    else:
        yield from _output("linear_attn.in_proj_qkv", "qkv", i, 0, channels, (C, e))
        yield from _output("linear_attn.in_proj_z", "qkv", i, len(channels), values, (Hv * Dv, e))
        for row, name in ((0, "b"), (v, "a")):
            yield from _output(f"linear_attn.in_proj_{name}", "gates", i, row, range(v0, v0 + v), (Hv, e))
    yield _conv_weight("linear_attn.conv1d", i, channels, C, K)
    yield Piece("linear_attn.A_log", "a_log", i, 0, (v,), (Hv,), (v0,))
    yield Piece("linear_attn.dt_bias", "dt_bias", i, 0, (v,), (Hv,), (v0,))
    yield Piece.tensor("linear_attn.norm.weight", "norm_mix", Dv, layer=i)
    yield Piece("linear_attn.out_proj.weight", "o", i, 0, (e, v * Dv), (e, Hv * Dv), (0, v0 * Dv))


def is_fused(names: Iterable[str]) -> bool:
    """Whether a checkpoint with these tensors has the fused layout of experts."""
    return any(GATE_UP.removeprefix("mlp") in name for name in names)


def _beside_pieces(c: ModelConfig, layer: int, experts: Experts) -> Iterator[Piece]:
    """The experts of one layer of Gemma 4, its router and the feed-forward beside them."""
    X, E, F, S = experts.count, c.hidden_size, experts.width, experts.shared
    yield Piece.tensor("router.proj.weight", "router", X, E, layer=layer)
    yield replace(Piece.tensor("router.scale", "router_norm", E, layer=layer), factor=E**-0.5)
    yield Piece.tensor("router.per_expert_scale", "router_scale", X, layer=layer)
    yield Piece.tensor("experts.gate_up_proj", "gate_up", X, 2 * F, E, layer=layer)
    yield Piece.tensor("experts.down_proj", "down", X, E, F, layer=layer)
    yield Piece.tensor("pre_feedforward_layernorm_2.weight", "norm_experts", E, layer=layer)
    yield Piece.tensor("post_feedforward_layernorm_2.weight", "norm_mixed", E, layer=layer)
    yield Piece.tensor("post_feedforward_layernorm_1.weight", "norm_shared", E, layer=layer)
    yield Piece.tensor("mlp.gate_proj.weight", "shared_gate_up", S, E, layer=layer)
    yield Piece.tensor("mlp.up_proj.weight", "shared_gate_up", S, E, layer=layer, row=S)
    yield Piece.tensor("mlp.down_proj.weight", "shared_down", E, S, layer=layer)


def _expert_pieces(c: ModelConfig, layer: int, experts: Experts, part: Part, fused: bool) -> Iterator[Piece]:
    """The router and the experts of one layer, in the order of their rows in memory."""
    X, E, F = experts.count, c.hidden_size, experts.width
    first, count = part.within(experts)
    names = QWEN if fused else NAMED.get(c.architecture, QWEN)
    oss = c.architecture == GPT_OSS
    fused = fused or oss

    yield Piece.tensor(f"{'mlp.router' if oss else names.router}.weight", "router", X, E, layer=layer)
    if experts.biased:
        yield Piece.tensor("mlp.router.bias" if oss else "mlp.expert_bias", "router_bias", X, layer=layer)
    if fused:
        turns = experts.turns
        yield Piece(
            GATE_UP,
            "gate_up",
            layer,
            row=0,
            shape=(X, 2 * count, E),
            stored=(X, 2 * F, E),
            first=(0, first, 0),
            parts=2,
            alternate=turns,
            transposed=turns,
        )
        yield Piece(DOWN, "down", layer, 0, (X, E, count), (X, E, F), (0, 0, first), transposed=turns)
    if c.layer.mlp_bias:
        shape, stored = (X, 2 * count), (X, 2 * F)
        turns = experts.turns
        yield Piece(f"{GATE_UP}_bias", "gate_up_bias", layer, 0, shape, stored, (0, first), parts=2, alternate=turns)
        yield Piece.tensor(f"{DOWN}_bias", "down_bias", X, E, layer=layer)
    for n in range(0 if fused else X):
        own = names.expert.replace("#", str(n))
        for i, name in enumerate((names.gate, names.up)):
            row = (2 * n + i) * count
            yield Piece(f"{own}.{name}.weight", "gate_up", layer, row, (count, E), (F, E), (first, 0))
        yield Piece(f"{own}.{names.down}.weight", "down", layer, n * E, (E, count), (E, F), (0, first))
    if not experts.shared:
        return
    (first, count), F = part.beside(experts), experts.shared
    rows = range(first, first + count)
    yield from _output("mlp.shared_expert.gate_proj", "shared_gate_up", layer, 0, rows, (F, E))
    yield from _output("mlp.shared_expert.up_proj", "shared_gate_up", layer, count, rows, (F, E))
    yield Piece("mlp.shared_expert.down_proj.weight", "shared_down", layer, 0, (E, count), (E, F), (0, first))
    yield Piece.tensor("mlp.shared_expert_gate.weight", "shared_gate", 1, E, layer=layer)
