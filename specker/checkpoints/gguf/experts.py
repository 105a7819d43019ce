"""Experts in a GGUF file: the gates, the up and the down projections of all experts of a layer are a tensor each.

They become the fused layout (pieces.py), in which a CPU multiplies by the memory-mapped file itself.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from specker.checkpoints.architectures.names import DOWN, GATE_UP
from specker.checkpoints.gguf_blocks import Value
from specker.cpu.packed import Numbers, pack

Named = tuple[str, str, Value]  # name, format in the file, value: of all experts of a layer [X, O, E], or [X * O, E]

WITHIN = ".experts."  # in the names of their tensors, behind the layer's part: "mlp", or another
GATE = "gate_proj"
UP = "up_proj"
FUSED_GATE_UP, FUSED_DOWN = (name.partition(WITHIN)[2] for name in (GATE_UP, DOWN))


def fused(tensors: Iterator[Named], count: int) -> Iterator[Named]:
    """Join the gates and the up projections of `count` experts, and their biases, if they have some. In two formats
    they are restored to float32, because a matrix has one format."""
    waiting: dict[str, Named] = {}  # by the name of what they become
    for name, kind, x in tensors:
        module, _, field = name.rpartition(".")
        part, _, own = module.rpartition(WITHIN)
        end = "_bias" if field == "bias" else ""
        whole = f"{part}{WITHIN}{FUSED_GATE_UP}{end}"
        if not part or own not in (GATE, UP):
            yield (module + end if part and own in (FUSED_GATE_UP, FUSED_DOWN) else name), kind, x
        elif whole not in waiting:
            waiting[whole] = name, kind, x
        else:
            _, other, y = waiting.pop(whole)
            gate, up = (x, y) if own == GATE else (y, x)
            kind = kind if kind == other else f"{kind} and {other}"
            yield whole, kind, _joined(gate, up, count)


def _joined(gate: Value, up: Value, count: int) -> Value:
    if isinstance(gate, Numbers) and isinstance(up, Numbers) and gate.format == up.format:
        pairs = zip(gate[1:], up[1:], strict=True)
        return Numbers(gate.format, *(None if a is None else _beside(a, b, count) for a, b in pairs))  # type: ignore[arg-type]
    return _beside(_plain(gate), _plain(up), count).unflatten(0, (count, -1))


def _plain(x: Value) -> Tensor:
    """The matrix [X * O, E] in float32, or the bias [X * O]."""
    return x.flatten(0, 1) if isinstance(x, Tensor) else pack(x).dequantised(torch.float32)


def _beside(a: Tensor, b: Tensor, count: int) -> Tensor:
    """Each expert's rows of a, then its rows of b."""
    return torch.cat([x.unflatten(0, (count, -1)) for x in (a, b)], 1).flatten(0, 1)
