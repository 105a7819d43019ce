"""The weights of a model in memory: one tensor for each kind of weight, stacked over the layers (`Weights`), and the
same tensors by layer (`LayerWeights` in a `Group`)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specker.cpu.packed import Packed
from specker.kernels.quant import Quantized
from specker.layer_weights import KINDS, LayerWeights
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


@dataclass(frozen=True, eq=False, kw_only=True)
class Weights(LayerWeights):
    """Weights on the run's device: the matrices in the run's dtype, the vectors in the dtype of its activations. Each
    weight of a layer is stacked over the L layers, [L, ..] (q_norm, k_norm and sinks without their 1), or a list of the
    layers' tensors. V vocabulary, E hidden size, P width of per-layer embeddings."""

    embed: Tensor | Packed  # [V, E]
    norm: Tensor  # [E]
    head: Matrix  # [V, E], the same tensor as `embed` if tied and not quantised
    ropes: tuple[Rope, ...]  # the layers' RoPE parameters, see LayerSpec.ropes
    ple_table: Tensor | Packed | None = None  # [tokens, L P], on the host in the file's dtype, memory-mapped from it
    ple_in: Tensor | None = None  # [L P, E]
    norm_ple_in: Tensor | None = None  # [P]


def _matrices(w: Weights) -> list[Matrix]:
    """The layers' matrices that may be quantised, stacked or each."""
    stacks = (getattr(w, name) for name, kind in KINDS.items() if kind.quantisable)
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
        held = 0.0 if w.ple_in is None else float(w.ple_in.nbytes)
        for name in (name for name, kind in KINDS.items() if kind.product):
            for n, matrix in enumerate(() if (stack := getattr(w, name)) is None else stack):
                read = c.layer.share(n) if name in ("gate_up", "down") else 1  # a row reads its own experts
                held += 0 if matrix is None else matrix.nbytes * read
        return held * layer_elements(self.config) / layer_elements(c)

    @property
    def quantised(self) -> str | None:
        """The kinds of the quantised matrices, for reports: "int4, int5 and int8"; None if there are none."""
        every = (*_matrices(self.weights), self.weights.head)
        kinds = sorted({kind for x in every if not isinstance(x, Tensor) for kind in x.kinds})
        return " and ".join(filter(None, (", ".join(kinds[:-1]), *kinds[-1:]))) or None


class Group(NamedTuple):
    """Weights of N layers that attend side by side from one input. An ordinary layer is a group of one."""

    mixer: LayerWeights
    """Up to `o_bias`: those of the layer, or of N layers stacked [N, ..], q_norm, k_norm and sinks without their 1; if
    ranks share the group, only of this rank's layers."""
    layers: tuple[LayerWeights, ...]  # [N]
    rope: Tensor  # [C, 2, D], the table of all N layers
    sliding_window: int  # the sliding window of all N layers, see LayerSpec.sliding_windows


ONE_ROW = "q_norm", "k_norm", "sinks"  # vectors of a layer [1, ..]


def layers_of(weights: Weights, c: ModelConfig, ropes: Sequence[Tensor]) -> list[Group]:
    """Each layer's weights, its RoPE table of `ropes` and its sliding window."""

    def own(name: str, n: int) -> Any:
        stack = getattr(weights, name)
        if stack is None or stack[n] is None:
            return None
        mixture = c.layer.mixture(n) if name in ("gate_up", "down") else None
        if mixture is not None and not isinstance(stack[n], Packed):  # the compiled layers read experts as rows
            return by_expert(stack[n], mixture.count)
        return stack[n].unsqueeze(0) if name in ONE_ROW else stack[n]

    layers = [LayerWeights(**{name: own(name, n) for name in KINDS}) for n in range(c.num_layers)]
    return [Group(w, (w,), ropes[c.layer.rope(n)], c.layer.sliding_window(n)) for n, w in enumerate(layers)]


def by_expert(matrix: Tensor | Quantized, count: int) -> Tensor | Quantized:
    """The matrices of `count` experts one after another [X * O, E] as [X, O, E]."""
    if isinstance(matrix, Quantized):
        return matrix.map_parts(lambda part: part.unflatten(0, (count, -1)))
    return matrix.unflatten(0, (count, -1))
