"""The tensors of a mixture of experts in a checkpoint.

There are two layouts. Most checkpoints have three matrices for each expert; Mixtral names them differently. The fused
layout, which transformers has in memory and into which GGUF files are converted, has two tensors for all experts of a
layer: gate_up_proj [X, 2 F, E], with each expert's gate rows first, and down_proj [X, E, F]. In memory both become
matrices [X * 2 F, E] and [X * E, F] (Weights.gate_up and .down).
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from specker.model.config import Experts, ModelConfig
from specker.model.split import Part

GATE_UP, DOWN = FUSED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
MIXTRAL = "MixtralForCausalLM"


class Names(NamedTuple):
    """A layer's tensors, without ".weight"."""

    router: str
    expert: str  # # stands for an expert's number
    gate: str
    up: str
    down: str


QWEN = Names("mlp.gate", "mlp.experts.#", "gate_proj", "up_proj", "down_proj")
NAMES = {MIXTRAL: Names("block_sparse_moe.gate", "block_sparse_moe.experts.#", "w1", "w3", "w2")}  # others: QWEN


class Slice(NamedTuple):
    """A tensor of a layer and the part of it that a rank holds: fields as in `buffers.Piece`."""

    name: str
    buffer: str
    row: int
    shape: tuple[int, ...]
    stored: tuple[int, ...]
    first: tuple[int, ...]
    parts: int = 1


def is_fused(names: Iterable[str]) -> bool:
    """Whether a checkpoint with these tensors has the fused layout."""
    return any(GATE_UP in name for name in names)


def slices(c: ModelConfig, experts: Experts, part: Part, fused: bool) -> Iterator[Slice]:
    """The router and the experts of one layer, in the order of their rows in memory."""
    X, E, F = experts.count, c.hidden_size, experts.width
    first, count = part.within(experts)
    names = QWEN if fused else NAMES.get(c.architecture, QWEN)
    yield Slice(f"{names.router}.weight", "router", 0, (X, E), (X, E), (0, 0))
    if fused:
        yield Slice(GATE_UP, "gate_up", 0, (X, 2 * count, E), (X, 2 * F, E), (0, first, 0), parts=2)
        yield Slice(DOWN, "down", 0, (X, E, count), (X, E, F), (0, 0, first))
        return
    for n in range(X):
        own = names.expert.replace("#", str(n))
        for i, name in enumerate((names.gate, names.up)):
            row = (2 * n + i) * count
            yield Slice(f"{own}.{name}.weight", "gate_up", row, (count, E), (F, E), (first, 0))
        yield Slice(f"{own}.{names.down}.weight", "down", n * E, (E, count), (E, F), (0, first))
