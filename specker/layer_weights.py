"""`LayerWeights`: which weights a decoder layer may have. Reading a checkpoint, its parts for ranks, the layers, their
memory and the struct of the compiled CPU layers (cpu/csrc/layers.h) take names, kinds and shapes from this one list."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from torch import Tensor


class Kind(NamedTuple):
    """How a weight is stored and read."""

    shape: str  # of one layer; see LayerWeights
    note: str = ""
    product: bool = False  # a matrix of a product
    quantisable: bool = False  # a matrix that may be Quantized or Packed, and whose product may round its input
    wide: bool = False  # in float32 at least
    split: str = ""  # "rows" or "columns": of which a tensor-parallel rank holds a part; "": each has the whole tensor


def shape_of(shape: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """A shape such as "2 F, E" or "3 r, 2 r + E" with the values of its sizes."""

    def term(factors: str) -> int:
        return math.prod(int(factor) if factor.isdigit() else sizes[factor] for factor in factors.split())

    return tuple(sum(map(term, size.split("+"))) for size in shape.split(","))


def _vector(shape: str, note: str = "", **kind: Any) -> Any:
    """`kind`: fields of Kind."""
    return field(default=None, metadata={"shape": shape, "note": note, **kind})


def _matrix(shape: str, note: str = "", **kind: Any) -> Any:
    return _vector(shape, note, product=True, quantisable=True, **kind)


def _exact(shape: str, note: str = "", **kind: Any) -> Any:
    """A small matrix on which much depends: it decides what is read, or what is kept. It is never quantised, and its
    input is not rounded."""
    return _vector(shape, note, product=True, **kind)


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerWeights:
    """The weights of a decoder layer; None: it has none. E hidden size, F intermediate size, Hq query heads and Hkv KV
    heads of dimension D, X experts, S width of the shared expert, P width of per-layer embeddings; of recurrent layers
    (model/config.py: Mixer) C channels of the convolution over K columns, Hv value heads of dimension Dv.

    qkv lacks the rows of v if v is k (KV.single), and those of k and v if the layer reads another layer's (KV.source).
    Of a recurrent layer it has Mixer.projected rows, and o has Mixer.values columns.

    Vectors and exact matrices are tensors. The matrices of the ops are tensors or `Quantized`; those of a model that
    the compiled CPU layers run are tensors or `Packed`. Of experts, gate_up is [X, 2 F, E] and down [X, E, F], or, for
    the compiled layers, [X * 2 F, E] and [X * E, F]; their biases are [X, 2 F] and [X, E]."""

    norm_in: Tensor | None = _vector("E", "before attention")
    qkv: Any = _matrix(
        "(Hq + 2 Hkv) D, E",
        "rows: the gate's of a gated layer, q's, k's and v's; of a recurrent layer the in-projection",
        split="rows",
    )
    qkv_bias: Tensor | None = _vector("(Hq + 2 Hkv) D", split="rows")
    q_norm: Tensor | None = _vector("1, D", "or over all heads [1, Hq D]")
    k_norm: Tensor | None = _vector("1, D", "or over all heads [1, Hkv D]")
    sinks: Tensor | None = _vector("1, Hq", "logits that add nothing but their share of the softmax", split="rows")
    gates: Tensor | None = _exact(
        "2 Hv, E", "rows: b, then a of each value head; absent where qkv ends with them", split="rows"
    )
    conv: Tensor | None = _vector("C, K", "in the struct [K, C]", wide=True, split="rows")
    a_log: Tensor | None = _vector("Hv", wide=True, split="rows")
    dt_bias: Tensor | None = _vector("Hv", wide=True, split="rows")
    norm_mix: Tensor | None = _vector("Dv")
    o: Any = _matrix("E, Hq D", "of a recurrent layer the out-projection", split="columns")
    o_bias: Tensor | None = _vector("E")
    norm_o: Tensor | None = _vector("E", "of the output of attention")
    norm_post: Tensor | None = _vector("E", "before the feed-forward")
    gate_up: Any = _matrix("2 F, E", "gate rows first", split="rows")
    gate_up_bias: Tensor | None = _vector("2 F", split="rows")
    down: Any = _matrix("E, F", split="columns")
    down_bias: Tensor | None = _vector("E")
    norm_down: Tensor | None = _vector("E", "of the output of the feed-forward")
    router: Tensor | None = _exact("X, E", "of a mixture of experts")
    router_bias: Tensor | None = _vector("X", "see Experts.biased", wide=True)
    shared_gate_up: Any = _matrix("2 S, E", "of a mixture's expert that every row reads", split="rows")
    shared_down: Any = _matrix("E, S", split="columns")
    shared_gate: Tensor | None = _vector("1, E", "absent: the shared expert's output is added as it is")
    # Of experts beside a feed-forward (Experts.beside), which is the shared expert
    router_norm: Tensor | None = _vector("E", "of what the router reads")
    router_scale: Tensor | None = _vector("X", "factor of each expert's score", wide=True)
    norm_experts: Tensor | None = _vector("E", "of what the experts read")
    norm_mixed: Tensor | None = _vector("E", "of the experts' output")
    norm_shared: Tensor | None = _vector("E", "of the shared expert's output")
    # Of per-layer embeddings: the layer adds norm_ple(ple_out(activation(ple_gate(h)) x)) for its part x [P] of them
    ple_gate: Any = _matrix("P, E")
    ple_out: Any = _matrix("E, P")
    norm_ple: Tensor | None = _vector("E")
    scalar: Tensor | None = _vector("1", "factor of the stream at the layer's end")

    @property
    def recurrent(self) -> bool:
        """Whether the layer has a recurrent state; otherwise it attends."""
        return self.conv is not None

    def present(self) -> dict[str, Any]:
        """The weights that the layer has, by name."""
        return {name: own for name in KINDS if (own := getattr(self, name)) is not None}

    def products(self) -> list[Any]:
        """The matrices of the layer's products."""
        return [own for name, own in self.present().items() if KINDS[name].product]


KINDS = {own.name: Kind(**own.metadata) for own in fields(LayerWeights)}
