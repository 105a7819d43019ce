"""few: the small ops for few rows on a CPU, in numpy. Each equals its reference, and returns None for arguments that
are not its own to handle (many rows, a GPU, half precision, or shapes that the op's check must speak about).

A decoding step is some hundreds of operations on a few kilobytes each, and between them the weights sweep the caches:
what an operation costs is the code that has to be fetched again. A numpy view or ufunc costs a third of a torch one
(bench/LOG.md has the step's time with and without). More rows are torch's, which has threads.
"""

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specker.kernels.ancestors import MAX_WORDS, ancestor_mask, unpack_words

FEW_ROWS = 64
NUMPY_PRODUCTS = 1 << 18  # multiply-adds of one numpy product; from here OpenBLAS wakes threads of its own, which
# torch's waiting ones keep off the cores: 20 us become 3,700
_TYPES = (torch.float32, torch.float64)  # numpy has no bfloat16, and its float16 is slow


def _few(x: Tensor) -> bool:
    return x.is_cpu and x.dtype in _TYPES and x.shape[0] <= FEW_ROWS and not x.requires_grad


def rms_norm(x: Any, weight: Any, eps: float) -> Any:
    """RMSNorm over the last dimension of a numpy array: x / sqrt(mean(x^2) + eps) * weight."""
    if x.ndim == 2 and len(x) == 1 and x.size <= 8192:  # a decoding step: the factor is one number
        y = x * ((float(x[0] @ x[0]) / x.shape[1] + eps) ** -0.5)
        y *= weight
        return y
    scale = np.vecdot(x, x)[..., None]
    scale /= x.shape[-1]
    scale += eps
    np.sqrt(scale, out=scale)
    return x / scale * weight


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor | None:
    """RMSNorm of x [T, E]."""
    if not _few(x) or weight.dtype != x.dtype or weight.requires_grad:
        return None
    return torch.from_numpy(rms_norm(x.numpy(), weight.numpy(), eps))


def largest(z: Tensor) -> tuple[Tensor, Tensor] | None:
    """The largest value of each row of z [T, K] and its column, both [T, 1], the lower column of equals."""
    if not _few(z):
        return None
    rows = z.numpy()
    column = rows.argmax(-1)[:, None]
    return torch.from_numpy(np.take_along_axis(rows, column, -1)), torch.from_numpy(column)


def count_equal(z: Tensor, values: Tensor) -> int:
    """How many elements of z [T, K] on a CPU equal their row's value, values [T, 1]."""
    return int(np.count_nonzero(z.detach().numpy() == values.detach().numpy()))


def residual_merge(
    x: Tensor, deltas: Tensor, norm_weight: Tensor | None, eps: float, last: Tensor | None = None
) -> tuple[Tensor, Tensor] | None:
    if not _few(x) or deltas.requires_grad or (norm_weight is not None and norm_weight.requires_grad):
        return None
    y, d = x.numpy(), deltas.numpy()
    if y.ndim != 2 or d.shape[1:] != y.shape or d.dtype != y.dtype:
        return None
    if last is not None and (last.shape != x.shape or last.dtype != x.dtype or last.requires_grad):
        return None
    w = np.empty((0, y.shape[1]), y.dtype) if norm_weight is None else norm_weight.numpy()
    if w.shape[1:] != y.shape[1:] or w.dtype != y.dtype:
        return None
    y = y + d[0] if len(d) else y.copy()
    for p in range(1, len(d)):
        y += d[p]
    if last is not None:
        y += last.numpy()
    normed = rms_norm(y, w, eps)[None] if len(w) == 1 else rms_norm(y[None], w[:, None], eps)
    return torch.from_numpy(y), torch.from_numpy(normed)


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor] | None:
    if not _few(x) or weight.requires_grad or (delta is not None and delta.requires_grad):
        return None
    y, w = x.numpy(), weight.numpy()
    if y.ndim != 2 or w.shape != y.shape[1:] or w.dtype != y.dtype:
        return None
    if delta is not None:
        d = delta.numpy()
        if d.shape != y.shape or d.dtype != y.dtype:
            return None
        y = y + d
        x = torch.from_numpy(y)
    return x, torch.from_numpy(rms_norm(y, w, eps))


def kv_calibrate(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    rope: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> Tensor | None:
    if not _few(qkv):
        return None
    x, k, v, table = qkv.numpy(), k_cache.numpy(), v_cache.numpy(), rope.numpy()
    T, at, place = len(x), slots.numpy(), positions.numpy()
    if k.ndim != 4 or k.shape != v.shape or not x.dtype == k.dtype == v.dtype == table.dtype:
        return None
    if not at.shape == place.shape == (T,) or not at.dtype == place.dtype == np.int64:
        return None
    if not (k.flags.c_contiguous and v.flags.c_contiguous):  # a reshape would copy, and the rows be lost
        return None
    Hkv, D = k.shape[2:]
    if x.ndim != 2 or x.shape[1] % D or x.shape[1] <= 2 * Hkv * D:
        return None
    if table.ndim != 3 or table.shape[1:] != (2, D) or D % 2:
        return None
    heads = x.reshape(T, x.shape[1] // D, D)
    Hq = heads.shape[1] - 2 * Hkv
    qk = heads[:, : Hq + Hkv]
    if q_norm is not None or k_norm is not None:
        if q_norm is None or k_norm is None or q_norm.shape != k_norm.shape or q_norm.shape[1:] != (D,):
            return None
        if not len(q_norm) or T % len(q_norm) or not q_norm.dtype == k_norm.dtype == qkv.dtype:
            return None
        if q_norm.requires_grad or k_norm.requires_grad:
            return None
        norms = (w.numpy().repeat(T // len(w), axis=0)[:, None] for w in (q_norm, k_norm))
        qk = np.concatenate([rms_norm(h, w, eps) for h, w in zip((qk[:, :Hq], qk[:, Hq:]), norms, strict=True)], 1)
    turn: Any = table.reshape(-1, 2, 1, 2, D // 2).take(place, 0)
    halves = qk.reshape(T, Hq + Hkv, 2, D // 2)
    out = halves * turn[:, 0]
    out += halves[:, :, ::-1] * turn[:, 1]  # the table's sines are signed
    out = out.reshape(T, Hq + Hkv, D)
    k.reshape(-1, Hkv, D)[at] = out[:, Hq:]
    v.reshape(-1, Hkv, D)[at] = heads[:, Hq + Hkv :]
    return torch.from_numpy(out[:, :Hq])


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    kv_len: Tensor,
    window: Tensor,
    cu_rows: Tensor,
    ancestors: Tensor,
    scale: float,
    with_lse: bool,
) -> tuple[Tensor, Tensor] | None:
    """Of one sequence, or of B that differ in their pages alone, evenly apart, as the layers of a group do. Rows, and
    the query heads that share a KV head, are the rows of one product."""
    if not _few(q):
        return None
    x, k, v, table, words = q.numpy(), k_cache.numpy(), v_cache.numpy(), block_table.numpy(), ancestors.numpy()
    lengths, windows = kv_len.numpy(), window.numpy()
    if x.ndim != 3 or k.ndim != 4 or k.shape != v.shape or not x.dtype == k.dtype == v.dtype:
        return None
    (T, Hq, D), (_, page, Hkv, _) = x.shape, k.shape
    if k.shape[3] != D or Hq % Hkv or not (k.flags.c_contiguous and v.flags.c_contiguous):
        return None
    B = len(table)
    if not lengths.shape == windows.shape == (B,) or table.ndim != 2 or not scale > 0:
        return None
    if not lengths.dtype == windows.dtype == table.dtype == np.int32 or cu_rows.dtype != torch.int32:
        return None
    if words.ndim != 2 or words.dtype != np.int64 or len(words) != T or cu_rows.shape[0] != B + 1 or not T:
        return None
    if not 1 <= words.shape[1] <= MAX_WORDS:
        return None
    if not B or not 0 < lengths[0] <= table.shape[1] * page:
        return None
    S, w = int(lengths[0]), int(windows[0])
    pages = table[0, : -(-S // page)]
    if len(pages) > 1 and not np.array_equal(pages[1:], pages[:-1] + 1):
        return None
    first, apart = int(pages[0]) * page, S  # slots, of the first sequence and from each to the next
    if B > 1:
        apart = int(table[1, 0] - table[0, 0]) * page
        alike = T % B == 0 and first >= 0 and apart >= S and first + B * apart <= k.shape[0] * page
        if not alike or not _alike(table[:, : len(pages)], lengths, windows, cu_rows.numpy(), words):
            return None
    if x.size * S // (B * Hkv) >= NUMPY_PRODUCTS:
        if B > 1:
            return None
        mask = _mask(words.tobytes(), T, S, w, q.dtype)
        return _fused(q, k_cache, v_cache, first, S, None if mask is None else torch.from_numpy(mask), scale)
    t = T // B
    k, v = (c.reshape(-1, Hkv, D)[first : first + B * apart].reshape(B, apart, Hkv, D)[:, :S] for c in (k, v))
    rows = x.reshape(B, t, Hkv, -1, D).swapaxes(1, 2).reshape(B, Hkv, -1, D)  # [B, Hkv, t * G, D]
    scores = np.matmul(rows, k.transpose(0, 2, 3, 1))  # [B, Hkv, t * G, S]
    scores *= scale
    mask = _mask(words[:t].tobytes(), t, w, w, q.dtype)
    if mask is not None:
        scores.reshape(B, Hkv, t, -1, S)[..., S - w :] += mask[:, None]
    top = np.maximum.reduce(scores, -1, keepdims=True)
    scores -= top
    np.exp(scores, out=scores)
    total = np.add.reduce(scores, -1, keepdims=True)
    out = np.matmul(scores, v.swapaxes(1, 2))
    out /= total
    out = torch.from_numpy(out.reshape(B, Hkv, t, -1, D).swapaxes(1, 2).reshape(T, Hq, D))
    if not with_lse:
        return out, q.new_empty(0)
    top += np.log(total)
    return out, torch.from_numpy(top.reshape(B, Hkv, t, -1).swapaxes(1, 2).reshape(T, Hq))


def _alike(table: Any, lengths: Any, windows: Any, cu_rows: Any, words: Any) -> bool:
    """Whether sequences have equal lengths, windows, numbers of rows and words, and pages evenly apart."""
    B, t = len(table), len(words) // len(table)
    return (
        bool((lengths == lengths[0]).all() and (windows == windows[0]).all())
        and np.array_equal(cu_rows, np.arange(0, len(words) + 1, t))
        and bool((words.reshape(B, t, -1) == words[:t]).all())
        and bool((table == table[0] + (np.arange(B) * (table[1, 0] - table[0, 0]))[:, None]).all())
    )


@lru_cache(maxsize=64)
def _mask(words: bytes, rows: int, columns: int, window: int, dtype: torch.dtype) -> Any:
    """The additive mask of int64 ancestor words, as numpy; every layer of a forward asks for the same one."""
    bits = unpack_words(np.frombuffer(words, np.int64).reshape(rows, -1).tolist())
    mask = ancestor_mask(bits, columns, window, dtype)
    return None if mask is None else mask.numpy()


def _fused(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, first: int, S: int, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """torch's fused attention of q [T, Hq, D] over S slots from `first` on, a view apart from the reference's."""
    (T, Hq, D), (Hkv, width) = q.shape, (k_cache.shape[2], k_cache.shape[2] * k_cache.shape[3])
    x = q.as_strided((1, Hq, T, D), (0, q.stride(1), q.stride(0), q.stride(2)), q.storage_offset())
    k, v = (
        c.as_strided((1, Hkv, S, D), (0, D, width, 1), c.storage_offset() + first * width) for c in (k_cache, v_cache)
    )
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, k, v, attn_mask=mask, scale=scale)
    return out[0].transpose(0, 1), lse.view(Hq, T).t()
