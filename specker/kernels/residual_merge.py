"""residual_merge: y = x + deltas[0] + ... + deltas[P-1]; normed[q] = RMSNorm(y; norm_weight[q]), in one pass.

Contract: x [T, E], deltas [P, T, E], norm_weight [Q, E] or None, one dtype -> y [T, E], normed [Q, T, E] (Q = 0
without weights). Sums run in float32 (float64 for float64) in the order p = 0..P-1 and are rounded once, to y; the
norm is taken of the rounded y, so a row's bits depend on that row alone. RMSNorm(y; w) = y / sqrt(mean(y^2) + eps) * w.
P = 1, Q = 1 is a decoder layer's residual add + norm; P = 0 is a norm alone; P = 2, Q = 1 and P = 1, Q = N serve a
group of N layers that run side by side. Traffic: (1 + P + 1 + Q) * T * E elements.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def residual_merge(x: Tensor, deltas: Tensor, norm_weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """x [T, E], deltas [P, T, E], norm_weight [Q, E] or None -> y [T, E], normed [Q, T, E]. Neither aliases x."""
    _check(x, deltas, norm_weight)
    return residual_merge_ref(x, deltas, norm_weight, eps)


def residual_merge_ref(x: Tensor, deltas: Tensor, norm_weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    P = deltas.shape[0]
    if x.dtype in (torch.float16, torch.bfloat16) and P > 1:
        acc = x.float()
        for delta in deltas:
            acc = acc + delta.float()
        y = acc.to(x.dtype)
    elif P == 0:
        y = x.clone()
    else:
        y = x + deltas[0]
        for p in range(1, P):
            y = y + deltas[p]
    if norm_weight is None:
        return y, y.new_empty(0, *y.shape)
    if norm_weight.shape[0] == 1:
        return y, F.rms_norm(y, y.shape[-1:], norm_weight[0], eps).unsqueeze(0)
    return y, torch.stack([F.rms_norm(y, y.shape[-1:], weight, eps) for weight in norm_weight])


def residual_merge_cost(x: Tensor, deltas: Tensor, norm_weight: Tensor | None, eps: float) -> tuple[int, int]:
    """(bytes, flops) of one call."""
    P, Q = deltas.shape[0], 0 if norm_weight is None else norm_weight.shape[0]
    weights = 0 if norm_weight is None else norm_weight.numel()
    return ((2 + P + Q) * x.numel() + weights) * x.element_size(), (P + 3 * (Q > 0) + Q) * x.numel()


def _check(x: Tensor, deltas: Tensor, norm_weight: Tensor | None) -> None:
    if x.dim() != 2 or deltas.dim() != 3 or deltas.shape[1:] != x.shape:
        raise ValueError(f"expected x [T, E], deltas [P, T, E]: x {tuple(x.shape)}, deltas {tuple(deltas.shape)}")
    if deltas.dtype != x.dtype or (norm_weight is not None and norm_weight.dtype != x.dtype):
        raise ValueError(f"deltas and norm_weight must have x's dtype, {x.dtype}")
    if norm_weight is not None and (norm_weight.dim() != 2 or norm_weight.shape[1] != x.shape[1]):
        raise ValueError(f"norm_weight must be [Q, {x.shape[1]}], got {tuple(norm_weight.shape)}")
