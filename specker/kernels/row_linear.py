"""row_linear: y = x W^T (+ bias), for few rows (a decoding step, a verify pass), with an optional SiLU(gate) * up.

Contract: x [T, E], weight [O, E], bias [O] or None, one dtype -> [T, O]; with epilogue "silu_mul" the weight's first
O/2 rows are the gate and the rest the up projection, and the result is silu(x Wg^T) * (x Wu^T), [T, O/2].
Accumulation is in float32 (float64 for float64). Traffic: the weight is read once, O * E elements; T * (E + O) beside
it. On a CPU a row may differ in the last bits from the same row among others: equal to 1e-12 in float64.

`pack` puts a large float32 CPU weight in oneDNN's blocked layout: a plain float32 linear re-reads the weight as the
rows grow (8 rows cost 2.5x one row), the packed one does not. Below `PACK_MIN` elements that is not noticed, but the
packed call's fixed cost (10 to 40 us) is.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

EPILOGUES = ("none", "silu_mul")
PACK_MIN = 1 << 21
_PACK_ROWS = 16  # the row count the layout is chosen for; measured good from 1 to 64 rows


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, epilogue: str = "none") -> Tensor:
    """x [T, E], weight [O, E] (plain or from `pack`), bias [O] -> [T, O], or [T, O/2] with epilogue "silu_mul"."""
    _check(x, weight, bias, epilogue)
    return row_linear_ref(x, weight, bias, epilogue)


def row_linear_ref(x: Tensor, weight: Tensor, bias: Tensor | None = None, epilogue: str = "none") -> Tensor:
    if weight.layout is torch._mkldnn:  # type: ignore[attr-defined]
        y = torch.ops.mkldnn._linear_pointwise(x.contiguous(), weight, bias, "none", [], "")
    else:
        y = F.linear(x, weight, bias)
    if epilogue == "silu_mul":
        half = y.shape[1] // 2
        y = F.silu(y[:, :half]).mul_(y[:, half:])
    return y


def row_linear_cost(x: Tensor, weight: Tensor, bias: Tensor | None = None, epilogue: str = "none") -> tuple[int, int]:
    """(bytes, flops) of one call."""
    T, E = x.shape
    O = weight.shape[0]
    out = O // 2 if epilogue == "silu_mul" else O
    elements = T * E + O * E + T * out + (O if bias is not None else 0)
    return elements * x.element_size(), 2 * T * O * E


def pack(weight: Tensor) -> Tensor:
    """`weight` [O, E] in the layout `row_linear` runs fastest on here; the weight itself where that is row-major."""
    if (
        weight.layout is torch.strided  # not packed already
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.numel() >= PACK_MIN
        and torch.backends.mkldnn.is_available()
    ):
        return torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
    return weight


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, epilogue: str) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"expected x [T, E] and weight [O, E]: x {tuple(x.shape)}, weight {tuple(weight.shape)}")
    if x.dtype != weight.dtype or x.device != weight.device:
        raise ValueError(f"weight must be like x: x {x.dtype} {x.device}, weight {weight.dtype} {weight.device}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [{weight.shape[0]}], got {tuple(bias.shape)}")
    if epilogue not in EPILOGUES:
        raise ValueError(f"epilogue must be one of {EPILOGUES}, got {epilogue!r}")
    if epilogue == "silu_mul" and weight.shape[0] % 2:
        raise ValueError(f"silu_mul needs an even number of weight rows, got {weight.shape[0]}")
