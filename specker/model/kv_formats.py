"""The formats of K and V in a cache (`--kv-dtype`): the model's own dtype, and on a CPU fewer bits.

float32, bfloat16 and float16 are rounded to the nearest, ties to even. In int8 each head of each column has a scale,

    x = scale q,  scale = max |x| / 127,  q = round(x / scale)

and the D codes q and the four bytes of the scale, a float32, stand together as [D + 4] int8. So whatever copies columns
(commits, pages, rings) copies their scales. K is rounded after RoPE and, in int8, after a rotation by a Hadamard
matrix: it spreads the few large numbers of a head over all of it, so that the scale is smaller, and leaves the products
of equally rotated queries as they are (QuaRot, arXiv 2404.00456).

The compiled layers (cpu/csrc/kept.c) read and write these formats; the functions here are the same in torch, for the
few paths that run without those layers.
"""

import torch
from torch import Tensor

from specker.kernels.kv_calibrate import kv_calibrate
from specker.kernels.quant import LARGEST

SCALE = 4  # bytes
MOST = LARGEST["int8"]


def kept_dim(dim: int, dtype: torch.dtype) -> int:
    """Elements of `dtype` that hold a head of `dim` numbers."""
    return dim + SCALE if dtype == torch.int8 else dim


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Heads x [.., D] float32 of V, or rotated ones of K, in the format `dtype`, [.., `kept_dim`]."""
    if dtype == torch.float16:
        return x.clamp(-65504, 65504).to(dtype)
    if dtype != torch.int8:
        return x.to(dtype)
    top = x.abs().amax(-1, keepdim=True)
    by = torch.where(top > 1e-30, MOST / top, 0)
    codes = (x * by).round_().to(torch.int8)
    return torch.cat((codes, (top / MOST).view(torch.int8)), -1)


def rotated(x: Tensor) -> Tensor:
    """Heads x [.., D], in blocks as long as the largest power of two n that divides D, times a Hadamard matrix of
    entries 1 and -1. Twice this is n x."""
    D = x.shape[-1]
    block, h = D & -D, 1
    while h < block:
        a, b = x.unflatten(-1, (-1, 2, h)).unbind(-2)
        x, h = torch.stack((a + b, a - b), -2).flatten(-3), 2 * h
    return x


def widened(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Heads of V, or rotated ones of K, in a format, [.., `kept_dim`] -> [.., D] of `dtype`."""
    if x.dtype != torch.int8:
        return x.to(dtype)
    scale = x[..., -SCALE:].contiguous().view(torch.float32)
    return (x[..., :-SCALE] * scale).to(dtype)


def keys(k: Tensor, dtype: torch.dtype) -> Tensor:
    """K in a format, [.., `kept_dim`] -> [.., D] of `dtype`."""
    wide = widened(k, dtype)
    if k.dtype != torch.int8:
        return wide
    return rotated(wide) / (wide.shape[-1] & -wide.shape[-1])


def calibrated(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    rope: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> Tensor:
    """`kv_calibrate` with caches in any format."""
    if k_cache.dtype == qkv.dtype:
        return kv_calibrate(qkv, positions, slots, rope, k_cache, v_cache, q_norm, k_norm, eps)
    T, (Hkv, D) = len(qkv), (k_cache.shape[-2], rope.shape[-1])
    k, v = qkv.new_empty(2, 1, T, Hkv, D)
    q = kv_calibrate(qkv, positions, torch.arange(T, dtype=torch.int64, device="cpu"), rope, k, v, q_norm, k_norm, eps)
    k = rotated(k) if k_cache.dtype == torch.int8 else k
    for cache, rows in ((k_cache, k), (v_cache, v)):
        cache.view(-1, *cache.shape[-2:])[slots] = rounded(rows[0], cache.dtype)
    return q
