"""kv_calibrate: split qkv, normalise and rotate q and k, write K/V at their slots, one pass; kv_commit: move rows.

Contract of `kv_calibrate`: qkv [T, (Hq + 2 Hkv) * D] (q heads, then k, then v), positions [T] int64, slots [T] int64,
rope [C, 2, D] (see `rope_table`), k_cache and v_cache [pages, page_size, Hkv, D] (mutated), q_norm and k_norm [G, D]
or None -> q [T, Hq, D]. Row t belongs to group t // (T / G): G layers' rows run as one launch. A slot is
page * page_size + offset. Heads are first RMS-normalised over D (Qwen3), then rotated:
    out = x * cos + swap(x) * sin,   swap([a, b]) = [b, a] over the halves of D, the sign folded into the table.
Traffic: qkv read once, q, k and v written once.

Contract of `kv_commit`: k_cache and v_cache [L, pages, page_size, Hkv, D] (mutated), src and dst [M] int64 slots of
one layer: row dst[i] <- row src[i] in every layer, as if all were read before any is written (src and dst may overlap).
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def kv_calibrate(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    rope: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """qkv [T, (Hq + 2 Hkv) * D] -> q [T, Hq, D]; K/V of the rows go to `slots`. See the module for the contract."""
    _check(qkv, positions, slots, rope, k_cache, v_cache, q_norm, k_norm)
    return kv_calibrate_ref(qkv, positions, slots, rope, k_cache, v_cache, q_norm, k_norm, eps)


def kv_calibrate_ref(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    rope: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    T = qkv.shape[0]
    Hkv, D = k_cache.shape[-2:]
    heads = qkv.view(T, -1, D)
    Hq = heads.shape[1] - 2 * Hkv
    qk = heads[:, : Hq + Hkv]  # rotated together: they lie side by side
    if q_norm is not None and k_norm is not None:
        qk = torch.cat((_norm(qk[:, :Hq], q_norm, eps), _norm(qk[:, Hq:], k_norm, eps)), dim=1)
    cos, sin = rope[positions].unsqueeze(2).unbind(1)  # [T, 1, D]
    qk = torch.addcmul(qk * cos, qk.roll(D // 2, dims=-1), sin).to(qkv.dtype)
    k_cache.view(-1, Hkv, D).index_copy_(0, slots, qk[:, Hq:])
    v_cache.view(-1, Hkv, D).index_copy_(0, slots, heads[:, Hq + Hkv :])
    return qk[:, :Hq]


def kv_calibrate_cost(qkv: Tensor, *_: object, **__: object) -> tuple[int, int]:
    """(bytes, flops) of one call; positions, slots and the table's rows are small beside qkv and left out."""
    return 2 * qkv.numel() * qkv.element_size(), 3 * qkv.numel()


def rope_table(inv_freq: Tensor, scale: float, length: int, dtype: torch.dtype) -> Tensor:
    """[length, 2, D] from inv_freq [D/2]: cos twice, and [-sin, sin], so that rotate_half needs no negation.

    Angles, cos and sin are float32 whatever `dtype`, as in transformers; half types keep a float32 table.
    """
    angles = torch.arange(length, dtype=torch.float32, device=inv_freq.device)[:, None] * inv_freq.float()
    cos, sin = angles.cos() * scale, angles.sin() * scale
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)
    return table.to(torch.float64) if dtype == torch.float64 else table


def kv_commit(k_cache: Tensor, v_cache: Tensor, src: Tensor, dst: Tensor) -> None:
    """Move rows src [M] to dst [M] in every layer of k_cache, v_cache [L, pages, page_size, Hkv, D], in place."""
    if k_cache.shape != v_cache.shape or k_cache.dim() != 5:
        raise ValueError(f"caches must be [L, pages, page, Hkv, D], got {tuple(k_cache.shape)}, {tuple(v_cache.shape)}")
    if src.shape != dst.shape or src.dim() != 1:
        raise ValueError(f"src and dst must be [M], got {tuple(src.shape)} and {tuple(dst.shape)}")
    kv_commit_ref(k_cache, v_cache, src, dst)


def kv_commit_ref(k_cache: Tensor, v_cache: Tensor, src: Tensor, dst: Tensor) -> None:
    for cache in (k_cache, v_cache):
        rows = cache.view(cache.shape[0], -1, *cache.shape[3:])
        rows.index_copy_(1, dst, rows.index_select(1, src))


def kv_commit_cost(k_cache: Tensor, v_cache: Tensor, src: Tensor, dst: Tensor) -> tuple[int, int]:
    """(bytes, flops) of one call."""
    L, _, _, Hkv, D = k_cache.shape
    return 4 * L * src.shape[0] * Hkv * D * k_cache.element_size(), 0


def _norm(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over D of [T, H, D], row t with weight[t // (T / G)]."""
    if weight.shape[0] == 1:
        return F.rms_norm(heads, heads.shape[-1:], weight[0], eps)
    grouped = heads.unflatten(0, (weight.shape[0], -1))
    return (F.rms_norm(grouped, heads.shape[-1:], None, eps) * weight[:, None, None, :]).flatten(0, 1)


def _check(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    rope: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
) -> None:
    T = qkv.shape[0]
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape:
        raise ValueError(f"caches must be [pages, page, Hkv, D], got {tuple(k_cache.shape)}, {tuple(v_cache.shape)}")
    Hkv, D = k_cache.shape[2:]
    if qkv.dim() != 2 or qkv.shape[1] % D or qkv.shape[1] <= 2 * Hkv * D:
        raise ValueError(f"qkv must be [T, (Hq + 2*{Hkv}) * {D}], got {tuple(qkv.shape)}")
    if positions.shape != (T,) or slots.shape != (T,):
        raise ValueError(f"positions and slots must be [{T}], got {tuple(positions.shape)}, {tuple(slots.shape)}")
    if rope.dim() != 3 or rope.shape[1:] != (2, D):
        raise ValueError(f"rope must be [C, 2, {D}], got {tuple(rope.shape)}")
    if k_cache.dtype != qkv.dtype:
        raise ValueError(f"the caches must have qkv's dtype: {k_cache.dtype}, {qkv.dtype}")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm come together or not at all")
    if q_norm is not None and (q_norm.dim() != 2 or q_norm.shape[1] != D or T % q_norm.shape[0]):
        raise ValueError(f"q_norm must be [G, {D}] with G dividing {T} rows, got {tuple(q_norm.shape)}")
