"""tree_attention: draft rows attend to [paged prefix | window], the window seen through an ancestor bit mask.

Contract: q [T, Hq, D]; k_cache, v_cache [pages, page_size, Hkv, D]; block_table [B, max_pages] int32 (page ids);
kv_len [B] int32, window included; window [B] int32; cu_rows [B + 1] int32: sequence b owns rows
cu_rows[b]..cu_rows[b+1]; ancestors [T, W] int64, W <= 4 -> out [T, Hq, D], lse [T, Hq] float32 (float64 for float64).
    out = softmax(scale * q k^T + mask) v,   lse = log(sum(exp(scale * q k^T + mask)))
Columns before kv_len - window are seen by all rows of the sequence; column kv_len - window + j by the rows whose bit j
(bit j % 64 of word j // 64) is set: the row itself and its ancestors. The rows need not be the window's last columns,
nor as many. Query heads g*Hq/Hkv.. share KV head g (GQA). Several layers are a batch of sequences: page ids of layer l
are l * num_pages + page on the flattened cache. Every row sees at least one column.
Traffic: K and V of each sequence read once per KV head; q and out once. Softmax in float32 (float64 for float64).
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

MAX_WORDS = 4
_WORD = (1 << 64) - 1


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
) -> tuple[Tensor, Tensor]:
    """Returns out [T, Hq, D], lse [T, Hq]; see the module for shapes. Raises ValueError on other shapes or dtypes."""
    _check(q, k_cache, v_cache, block_table, kv_len, window, cu_rows, ancestors)
    return tree_attention_ref(q, k_cache, v_cache, block_table, kv_len, window, cu_rows, ancestors, scale)


def tree_attention_ref(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    kv_len: Tensor,
    window: Tensor,
    cu_rows: Tensor,
    ancestors: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    starts, lens, windows = cu_rows.tolist(), kv_len.tolist(), window.tolist()
    words = ancestors.tolist()
    outs, lses = [], []
    for b in range(len(lens)):
        rows = slice(starts[b], starts[b + 1])
        mask = ancestor_mask(_bits(words[rows]), lens[b], windows[b], q.dtype)
        k = gather_pages(k_cache, block_table[b], lens[b])
        v = gather_pages(v_cache, block_table[b], lens[b])
        out, lse = attend(q[rows], k, v, None if mask is None else mask.to(q.device), scale)
        outs.append(out)
        lses.append(lse)
    if len(outs) == 1:
        return outs[0], lses[0]
    return torch.cat(outs), torch.cat(lses)


def tree_attention_cost(q: Tensor, k_cache: Tensor, kv_len: Sequence[int], rows: Sequence[int]) -> tuple[int, int]:
    """(bytes, flops) of one call over sequences of `kv_len` columns with `rows` query rows each."""
    Hkv, D = k_cache.shape[-2:]
    Hq = q.shape[1]
    bytes_ = 2 * sum(kv_len) * Hkv * D * k_cache.element_size() + 2 * q.numel() * q.element_size()
    return bytes_, sum(4 * n * t * Hq * D for n, t in zip(kv_len, rows, strict=True))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """One sequence: q [T, Hq, D], k and v [S, Hkv, D], additive mask [T, S] or None -> out [T, Hq, D], lse [T, Hq]."""
    T, Hq, D = q.shape
    if q.device.type == "cpu":  # the fused CPU kernel gives the log-sum-exp too
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q.transpose(0, 1).unsqueeze(0),
            k.transpose(0, 1).unsqueeze(0),
            v.transpose(0, 1).unsqueeze(0),
            attn_mask=mask,
            scale=scale,
        )
        return out.squeeze(0).transpose(0, 1), lse.view(Hq, T).t()
    acc = torch.promote_types(q.dtype, torch.float32)
    G = Hq // k.shape[1]
    scores = torch.einsum("tgrd,sgd->tgrs", q.to(acc).unflatten(1, (-1, G)), k.to(acc)) * scale
    if mask is not None:
        scores = scores + mask[:, None, None, :]
    lse = scores.logsumexp(-1)
    out = torch.einsum("tgrs,sgd->tgrd", (scores - lse.unsqueeze(-1)).exp(), v.to(acc))
    return out.reshape(T, Hq, D).to(q.dtype), lse.reshape(T, Hq)


def gather_pages(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """The first `length` rows [length, Hkv, D] of one sequence; a view where its pages lie one after another."""
    page_size = cache.shape[1]
    ids = pages[: -(-length // page_size)].tolist()
    if ids == list(range(ids[0], ids[0] + len(ids))):
        return cache[ids[0] : ids[0] + len(ids)].flatten(0, 1)[:length]
    return cache[ids].flatten(0, 1)[:length]


def ancestor_words(parents: Tensor) -> Tensor:
    """parents [N] (rows, 0 = root, parents[n] <= n) -> [N + 1, W] int64: row r sees itself and its ancestors,
    where verify row r stands at window column r. W = ceil((N + 1) / 64)."""
    bits = [1]
    for n, parent in enumerate(parents.tolist()):
        if not 0 <= parent <= n:
            raise ValueError(f"parents[{n}] must be a row in 0..{n}, got {parent}")
        bits.append(bits[parent] | 1 << (n + 1))
    return pack_bits(bits, len(bits)).to(parents.device)


@lru_cache(maxsize=512)
def chain_words(rows: int, first: int = 0) -> Tensor:
    """Ancestor words [rows, W] of a chain: row r sees window columns 0..first + r."""
    return pack_bits([(2 << (first + r)) - 1 for r in range(rows)], first + rows)


def pack_bits(bits: Sequence[int], columns: int) -> Tensor:
    """Rows of arbitrarily long bit sets -> [rows, W] int64 words, W = ceil(columns / 64) and at least 1."""
    W = max(1, -(-columns // 64))
    if W > MAX_WORDS:
        raise ValueError(f"a window has at most {64 * MAX_WORDS} columns, got {columns}")
    words = [[(b >> 64 * w) & _WORD for w in range(W)] for b in bits]
    return torch.tensor([[x - (1 << 64) if x >> 63 else x for x in row] for row in words], dtype=torch.int64)


def _bits(words: list[list[int]]) -> tuple[int, ...]:
    """int64 words of each row -> one unbounded int of its bits."""
    if len(words[0]) == 1:
        return tuple(row[0] & _WORD for row in words)
    return tuple(sum((x & _WORD) << 64 * w for w, x in enumerate(row)) for row in words)


@lru_cache(maxsize=64)
def ancestor_mask(bits: tuple[int, ...], kv_len: int, window: int, dtype: torch.dtype) -> Tensor | None:
    """Additive mask [rows, kv_len] (0 or -inf), or None where every row sees every column. All layers of a forward
    ask for the same one, hence the cache."""
    full = (1 << window) - 1
    if all(b & full == full for b in bits):
        return None
    column = torch.arange(window)
    seen = pack_bits(bits, window)[:, column // 64] >> (column % 64) & 1
    mask = torch.zeros(len(bits), kv_len, dtype=dtype)
    mask[:, kv_len - window :].masked_fill_(seen == 0, float("-inf"))
    return mask


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    kv_len: Tensor,
    window: Tensor,
    cu_rows: Tensor,
    ancestors: Tensor,
) -> None:
    if q.dim() != 3 or k_cache.dim() != 4 or k_cache.shape != v_cache.shape or q.shape[2] != k_cache.shape[3]:
        raise ValueError(
            "expected q [T, Hq, D] and caches [pages, page, Hkv, D]: "
            f"q {tuple(q.shape)}, k_cache {tuple(k_cache.shape)}, v_cache {tuple(v_cache.shape)}"
        )
    if q.shape[1] % k_cache.shape[2]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k_cache.shape[2]} KV heads")
    if q.dtype != k_cache.dtype or q.dtype != v_cache.dtype:
        raise ValueError(f"q and the caches must have one dtype: {q.dtype}, {k_cache.dtype}, {v_cache.dtype}")
    B = kv_len.shape[0]
    if block_table.dim() != 2 or block_table.shape[0] != B or window.shape != (B,) or cu_rows.shape != (B + 1,):
        raise ValueError(
            f"for {B} sequences expected block_table [{B}, P], window [{B}], cu_rows [{B + 1}]: "
            f"{tuple(block_table.shape)}, {tuple(window.shape)}, {tuple(cu_rows.shape)}"
        )
    if ancestors.dim() != 2 or ancestors.shape[0] != q.shape[0] or not 1 <= ancestors.shape[1] <= MAX_WORDS:
        raise ValueError(f"ancestors must be [{q.shape[0]}, 1..{MAX_WORDS}], got {tuple(ancestors.shape)}")
    if ancestors.dtype != torch.int64:
        raise ValueError(f"ancestors must be int64 words, got {ancestors.dtype}")
