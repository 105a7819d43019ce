"""The weights of a model in memory: one tensor for each kind of weight, stacked over the layers (`Weights`), and the
same tensors by layer (`Group`)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specker.cpu.packed import Packed
from specker.kernels import quant
from specker.kernels.quant import Quantized
from specker.model.config import ModelConfig, layer_elements
from specker.model.split import WHOLE, Part

Matrix = Tensor | Quantized | Packed
Stacked = Matrix | Sequence[Matrix]


class Rope(NamedTuple):
    """The parameters of a RoPE table (kernels.rope_table). Frequencies of 0 rotate nothing."""

    inv_freq: Tensor  # [D / 2] float32 in every run
    scale: float | Tensor = 1.0  # factor of cos and sin (yarn, longrope), or one for each frequency [D / 2]

    def to(self, device: torch.device) -> "Rope":
        scale = self.scale
        return Rope(self.inv_freq.to(device), scale.to(device) if isinstance(scale, Tensor) else scale)


@dataclass(frozen=True, eq=False)
class Weights:
    """Weights on the run's device: the matrices in the run's dtype, the vectors in the dtype of its activations. V
    vocabulary, E hidden size, F intermediate size, L layers, Hq query heads and Hkv KV heads of dimension D. A tensor
    [L, ..] may also be a list of the layers' tensors, and the layers' matrices and the head may be `Quantized` or
    `Packed`."""

    embed: Tensor | Packed  # [V, E]
    qkv: Stacked
    """[L, (Hq + 2 * Hkv) * D, E], rows: the gate's if attention has one, q heads, k heads, v heads (without
    those of v if KV.single, without those of k and v if there is a KV.source)."""
    qkv_bias: Tensor | None  # [L, (Hq + 2 * Hkv) * D]
    q_norm: Tensor | None  # [L, D], or over the whole projection [L, Hq * D]
    k_norm: Tensor | None  # [L, D] or [L, Hkv * D]
    o: Stacked  # [L, E, Hq * D]
    o_bias: Tensor | None  # [L, E]
    gate_up: Stacked  # [L, 2 * F, E], gate rows first; of X experts one after another [L, X * 2 * F, E]
    gate_up_bias: Tensor | None  # [L, 2 * F], of experts [L, X, 2 * F]
    down: Stacked  # [L, E, F], of experts [L, X * E, F]
    down_bias: Tensor | None  # [L, E], of experts [L, X, E]
    norm_in: Tensor | None  # [L, E], before attention
    norm_post: Tensor | None  # [L, E], before the feed-forward
    norm: Tensor  # [E]
    head: Matrix  # [V, E], the same tensor as `embed` if tied and not quantised
    ropes: tuple[Rope, ...]  # the layers' RoPE parameters, see LayerSpec.ropes
    norm_o: Tensor | None = None  # [L, E], norm of the attention's output
    norm_down: Tensor | None = None  # [L, E], norm of the feed-forward's output
    router: Tensor | Sequence[Tensor | None] | None = None  # [L, X, E], of mixtures of experts
    router_bias: Any = None  # [L, X], see Experts.biased
    shared_gate_up: Any = None  # [L, 2 * S, E], of a mixture's expert that every row reads
    shared_down: Any = None  # [L, E, S]
    shared_gate: Any = None  # [L, 1, E]
    sinks: Tensor | None = None  # [L, Hq], see LayerSpec.sinks
    # Of layers with a recurrent state (config.Mixer), whose in-projection is `qkv` and whose out-projection is `o`; a
    # layer that attends has None.
    gates: Any = None  # [L, 2 * Hv, E], rows: b, then a of each value head; None where `qkv` ends with them
    conv: Any = None  # [L, channels, K]
    a_log: Any = None  # [L, Hv]
    dt_bias: Any = None  # [L, Hv]
    norm_mix: Any = None  # [L, Dv]
    # Of experts beside a feed-forward (Experts.beside), which is the shared expert
    router_norm: Any = None  # [L, E], weight of the norm that the router reads
    router_scale: Any = None  # [L, X], factor of each expert's score
    norm_experts: Any = None  # [L, E], of what the experts read
    norm_mixed: Any = None  # [L, E], of the experts' output
    norm_shared: Any = None  # [L, E], of the shared expert's output
    # Of per-layer embeddings (PLE) of width P
    ple_table: Tensor | None = None  # [tokens, L P], on the host in the file's dtype, memory-mapped from it
    ple_in: Tensor | None = None  # [L P, E]
    norm_ple_in: Tensor | None = None  # [P]
    ple_gate: Any = None  # [L, P, E]
    ple_out: Any = None  # [L, E, P]
    norm_ple: Any = None  # [L, E]
    scalar: Any = None  # [L, 1], by which a layer multiplies the stream at its end


def _matrices(w: Weights) -> list[Matrix]:
    """The layers' matrices, stacked or each."""
    stacks = w.qkv, w.o, w.gate_up, w.down, w.shared_gate_up, w.shared_down, w.ple_gate, w.ple_out
    each = (x for stack in stacks if stack is not None for x in ((stack,) if isinstance(stack, Matrix) else stack))
    return [x for x in each if x is not None]


@dataclass(frozen=True, eq=False)
class Parameters:
    """The weights of a model, or of a tensor-parallel rank's part, and the settings that say what they are."""

    config: ModelConfig  # config of the whole model
    weights: Weights  # weights of the part; the head may be whole
    part: Part = field(default=WHOLE, kw_only=True)
    activations: str = field(default="int8", kw_only=True)
    """On a CPU, the type to which products with quantised weights round their input rows (cpu.ACTIVATIONS)."""

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
        """Bytes of the layers' matrices that a step of one row reads in the whole model, not only in this part."""
        w, c = self.weights, self.local
        if not sum(x.nbytes for x in _matrices(w)):  # another engine runs the layers
            return layer_elements(self.config) * w.norm.element_size()
        others = w.router, w.shared_gate_up, w.shared_down, w.gates, w.ple_gate, w.ple_out
        whole: list[Any] = [w.qkv, w.o, *(stack for stack in others if stack is not None)]
        inner: list[Any] = [w.gate_up, w.down]
        held = 0.0 if w.ple_in is None else float(w.ple_in.nbytes)
        for n in range(c.num_layers):
            held += sum(stack[n].nbytes for stack in whole if stack[n] is not None)
            held += sum(stack[n].nbytes for stack in inner) * c.layer.share(n)
        return held * layer_elements(self.config) / layer_elements(c)

    @property
    def quantised(self) -> str | None:
        """The kinds of the quantised matrices, for reports: "int4, int5 and int8"; None if there are none."""
        every = (*_matrices(self.weights), self.weights.head)
        kinds = sorted({kind for x in every if not isinstance(x, Tensor) for kind in x.kinds})
        return " and ".join(filter(None, (", ".join(kinds[:-1]), *kinds[-1:]))) or None


class Attention(NamedTuple):
    """Attention weights of one layer, or of N layers stacked: [N, O, E], biases [N, O], norms [N, ...]. The matrices
    are those of the ops; a model that the compiled CPU layers run has `Packed` ones in their place."""

    norm_in: Tensor | None  # [E]
    qkv: quant.Matrix
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [1, D] or [1, Hq * D], stacked [N, ...]
    k_norm: Tensor | None
    o: quant.Matrix
    o_bias: Tensor | None
    sinks: Tensor | None = None  # [1, Hq], stacked [N, Hq]


class Recurrent(NamedTuple):
    """Weights of a layer with a recurrent state: a gated delta net, or a short convolution, which has neither gates nor
    what follows `conv`."""

    norm_in: Tensor | None  # [E]
    qkv: quant.Matrix  # in-projection [config.Mixer.projected, E], without b and a if these are `gates`
    gates: Tensor | None  # [2 Hv, E], rows: b, then a
    conv: Tensor  # [channels, K]
    a_log: Tensor | None  # [Hv]
    dt_bias: Tensor | None  # [Hv]
    norm: Tensor | None  # [Dv]
    o: quant.Matrix  # out-projection [E, values]


class Shared(NamedTuple):
    """A mixture's expert that every row reads."""

    gate_up: quant.Matrix  # [2 S, E]
    down: quant.Matrix  # [E, S]
    gate: Tensor | None  # [1, E]; None: its output is added as it is


class Beside(NamedTuple):
    """The norms [E] of a mixture beside a feed-forward, and each expert's factor (Experts.beside)."""

    router: Tensor
    scale: Tensor  # [X]
    experts: Tensor
    mixed: Tensor
    shared: Tensor


class PerLayer(NamedTuple):
    """How a layer reads its part x [T, P] of per-layer embeddings: h + norm(out(activation(gate(h)) x))."""

    gate: quant.Matrix  # [P, E]
    out: quant.Matrix  # [E, P]
    norm: Tensor  # [E]


class FeedForward(NamedTuple):
    """Feed-forward weights of one layer, and the norms of its sublayers' outputs."""

    norm_post: Tensor | None  # [E]
    gate_up: quant.Matrix  # [2 F, E], of experts [X, 2 F, E]; biases likewise
    gate_up_bias: Tensor | None
    down: quant.Matrix  # [E, F], of experts [X, E, F]
    down_bias: Tensor | None
    norm_o: Tensor | None  # [E], norm of the attention's output
    norm_down: Tensor | None  # [E], norm of the feed-forward's output
    router: Tensor | None  # [X, E], of a mixture of experts
    router_bias: Tensor | None = None  # [X]
    shared: Shared | None = None
    beside: Beside | None = None
    ple: PerLayer | None = None
    scalar: Tensor | None = None  # [1], factor of the stream at the layer's end


class Group(NamedTuple):
    """Weights of N layers that attend side by side from one input. An ordinary layer is a group of one."""

    mixer: Attention | Recurrent  # stacked if N > 1; if ranks share the group, only this rank's layers
    mlps: tuple[FeedForward, ...]  # [N]
    rope: Tensor  # [C, 2, D], the table of all N layers
    sliding_window: int  # the sliding window of all N layers, see LayerSpec.sliding_windows

    @property
    def attention(self) -> Attention:
        """The weights of layers that attend."""
        assert isinstance(self.mixer, Attention)
        return self.mixer


def layers_of(weights: Weights, c: ModelConfig, ropes: Sequence[Tensor]) -> list[Group]:
    """Each layer's weights, its RoPE table of `ropes` and its sliding window."""

    def at(stack: Any, n: int) -> Any:
        return None if stack is None else stack[n]

    def row(stack: Any, n: int) -> Tensor | None:
        return None if stack is None or stack[n] is None else stack[n].unsqueeze(0)

    def inner(stack: Any, n: int) -> Any:
        """A matrix of the feed-forward; of experts by expert, unless the compiled layers read it."""
        matrix, mixture = stack[n], c.layer.mixture(n)
        if mixture is None or isinstance(matrix, Packed):
            return matrix
        if isinstance(matrix, Quantized):
            return matrix.each(lambda part: part.unflatten(0, (mixture.count, -1)))
        return matrix.unflatten(0, (mixture.count, -1))

    def mixer(n: int) -> Attention | Recurrent:
        first, last = (at(stack, n) for stack in (weights.norm_in, weights.o))
        if c.layer.mixer(n) is None:
            return Attention(
                first,
                at(weights.qkv, n),
                at(weights.qkv_bias, n),
                row(weights.q_norm, n),
                row(weights.k_norm, n),
                last,
                at(weights.o_bias, n),
                row(weights.sinks, n),
            )
        each = weights.qkv, weights.gates, weights.conv, weights.a_log, weights.dt_bias, weights.norm_mix
        return Recurrent._make((first, *(at(stack, n) for stack in each), last))

    beside = weights.router_norm, weights.router_scale, weights.norm_experts, weights.norm_mixed, weights.norm_shared
    per_layer = weights.ple_gate, weights.ple_out, weights.norm_ple

    def shared(n: int) -> Shared | None:
        if at(weights.shared_gate_up, n) is None:
            return None
        return Shared(at(weights.shared_gate_up, n), at(weights.shared_down, n), at(weights.shared_gate, n))

    return [
        Group(
            mixer(n),
            (
                FeedForward(
                    norm_post=at(weights.norm_post, n),
                    gate_up=inner(weights.gate_up, n),
                    gate_up_bias=at(weights.gate_up_bias, n),
                    down=inner(weights.down, n),
                    down_bias=at(weights.down_bias, n),
                    norm_o=at(weights.norm_o, n),
                    norm_down=at(weights.norm_down, n),
                    router=at(weights.router, n),
                    router_bias=at(weights.router_bias, n),
                    shared=shared(n),
                    beside=None if weights.router_norm is None else Beside(*(stack[n] for stack in beside)),
                    ple=None if weights.ple_gate is None else PerLayer(*(stack[n] for stack in per_layer)),
                    scalar=at(weights.scalar, n),
                ),
            ),
            ropes[c.layer.rope(n)],
            c.layer.sliding_window(n),
        )
        for n in range(c.num_layers)
    ]
