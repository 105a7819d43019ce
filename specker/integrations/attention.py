"""`tree_attention` as an attention implementation of transformers: a 4D mask verifies a tree of drafts."""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from specker.kernels.ancestors import MAX_WORDS
from specker.kernels.tree_attention import tree_attention

WINDOW = 64 * MAX_WORDS  # columns in which the rows of a sequence may differ
PAGE = 256  # columns of a page; one size, so that a GPU compiles one kernel


def register_attention(name: str = "specker") -> str:
    """Register `tree_attention` with transformers as an attention implementation, and return its name:

        model.set_attn_implementation(register_attention())
        model(ids, attention_mask=mask, position_ids=positions)  # verifies a tree of drafts

    A mask is [B or 1, 1, T, S]: truth values (seen), or 0 (seen) and numbers of at most -1e4. A mask [B, S] and no mask
    are expanded as for torch's SDPA. Up to 256 rows run on the op: from the first column that a sequence's rows see,
    there must be any number of columns that all of them see and then at most 256 in which they may differ in any way.
    That expresses a prompt, and a text with a chain or tree of drafts, with or without left padding. A row that sees
    nothing, such as a padding row, gets arbitrary finite numbers. More rows (a long prompt) run on torch's SDPA, or 256
    at a time on the op where the model has sinks (gpt-oss) or a soft cap (Gemma 2).

    Each call copies K and V into pages, as transformers' dynamic cache does at each step. There is no backward pass.
    Raises ValueError for another mask, dropout, biases and where a gradient is asked for.
    """
    known = WeakTensorKeyDictionary()  # every layer of a forward gets the same mask

    def attention(
        module: nn.Module,
        query: Tensor,  # [B, Hq, T, D]
        key: Tensor,  # [B, Hkv, S, D]
        value: Tensor,  # like key
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,  # [Hq], sinks
        **more: Any,
    ) -> tuple[Tensor, None]:
        B, _, T, D = query.shape
        if dropout > 0 or more.get("position_bias") is not None:
            lacks = "dropout" if dropout > 0 else "position_bias"
            raise ValueError(f"specker's attention has no {lacks}: use another attn_implementation")
        if T > WINDOW and softcap is None and s_aux is None:
            more |= {"scaling": scaling, "is_causal": is_causal}
            return sdpa_attention_forward(module, query, key, value, attention_mask, **more)
        if query.requires_grad and torch.is_grad_enabled():
            raise ValueError("specker's attention has no backward pass: use torch.no_grad()")
        causal = T > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if T > WINDOW:
            mask = attention_mask
            if mask is None:
                mask = torch.ones(1, 1, T, T if causal else key.shape[2], dtype=torch.bool, device=query.device)
                mask = mask.tril() if causal else mask
            how: dict[str, Any] = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux}
            parts = zip(query.split(WINDOW, 2), mask.split(WINDOW, 2), strict=True)
            return torch.cat([attention(module, q, key, value, m, **how)[0] for q, m in parts], dim=1), None
        if attention_mask is None:
            rows = _unmasked(B, T, T if causal else key.shape[2], causal, query.device)
        else:
            seen_at, rows = known.get(attention_mask, (None, None))
            if rows is None or len(rows.kv_len) != B or not _unchanged(attention_mask, seen_at):
                rows = _rows(_seen(attention_mask, B))
                at = attention_mask.clone() if attention_mask.is_inference() else attention_mask._version
                known[attention_mask] = at, rows
        k, v = (_paged(x, rows) for x in (key, value))
        flat = query.transpose(1, 2).reshape(B * T, -1, D)
        scale = D**-0.5 if scaling is None else scaling
        out, _ = tree_attention(
            flat,
            k,
            v,
            rows.table,
            rows.kv_len,
            rows.window,
            rows.cu_rows,
            rows.ancestors,
            scale,
            cap=softcap or 0.0,
            sinks=None if s_aux is None else s_aux.detach()[None],
        )
        return out.view(B, T, -1, D), None

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


def _unchanged(mask: Tensor, seen_at: int | Tensor) -> bool:
    """Whether a mask is as it was at a version, or equal to a copy: in inference mode tensors have no versions."""
    return torch.equal(mask, seen_at) if isinstance(seen_at, Tensor) else mask._version == seen_at


class _Rows(NamedTuple):
    """A mask in the format of tree_attention, for K and V of B sequences in P pages each."""

    columns: Tensor  # [B, P * PAGE] int64, the column of the mask that each slot of the pages holds
    table: Tensor  # [B, P] int32
    kv_len: Tensor  # [B] int32
    window: Tensor  # [B] int32
    cu_rows: Tensor  # [B + 1] int32
    ancestors: Tensor  # [B * T, W] int64


def _seen(mask: Tensor, batch: int) -> Tensor:
    """A mask as truth values [batch, T, S]. Raises ValueError for one with biases or of several heads."""
    if mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[0] not in (1, batch):
        raise ValueError(f"the attention mask must be [{batch} or 1, 1, T, S] for all heads, got {list(mask.shape)}")
    seen = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not (mask.is_floating_point() and (seen | (mask <= -1e4)).all()):
        raise ValueError("an attention mask must hold truth values, or 0 (seen) and numbers of at most -1e4 (not seen)")
    return seen[:, 0].expand(batch, -1, -1)


@lru_cache(maxsize=64)
def _unmasked(batch: int, rows: int, columns: int, causal: bool, device: torch.device) -> _Rows:
    seen = torch.ones(rows, columns, dtype=torch.bool, device=device)
    return _rows((seen.tril() if causal else seen).expand(batch, -1, -1))


def _rows(seen: Tensor) -> _Rows:
    """seen [B, T, S] bool. Raises ValueError if the rows of a sequence differ in too many columns."""
    B, T, S = seen.shape
    each, spans = seen.cpu().numpy(), []
    for b, m in enumerate(each):
        some = np.flatnonzero(m.any(0))
        first, end = (int(some[0]), int(some[-1]) + 1) if len(some) else (0, 1)
        live = m[m.any(1), first:end]  # padding rows see nothing
        shared = int(np.argmin(np.append(live.all(0), False)))
        if end - first - shared > WINDOW:
            raise ValueError(
                f"in sequence {b} the rows' masks differ over {end - first - shared} columns, and specker's attention "
                f"takes {WINDOW} after the columns that all rows see: use another attn_implementation"
            )
        spans.append((first, shared, end))
    widest = max(end - first - shared for first, shared, end in spans)
    bits: Any = np.zeros((B, T, 64 * max(1, -(-widest // 64))), np.uint8)
    for b, (first, shared, end) in enumerate(spans):
        bits[b, :, : end - first - shared] = each[b, :, first + shared : end]
        bits[b, ~each[b].any(1)] = 1  # the op requires that a row sees something
    words = np.packbits(bits, -1, bitorder="little").view(np.int64).reshape(B * T, -1)
    firsts, _, ends = (np.array(x) for x in zip(*spans, strict=True))
    pages = -(-int((ends - firsts).max()) // PAGE)
    columns = np.minimum(firsts[:, None] + np.arange(pages * PAGE), S - 1)
    windows = [end - first - shared for first, shared, end in spans]

    def small(numbers: Any) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=seen.device)

    return _Rows(
        columns=torch.from_numpy(columns).to(seen.device),
        table=small(np.arange(B * pages).reshape(B, pages)),
        kv_len=small(ends - firsts),
        window=small(windows),
        cu_rows=small(np.arange(B + 1) * T),
        ancestors=torch.from_numpy(words).to(seen.device),
    )


def _paged(x: Tensor, rows: _Rows) -> Tensor:
    """K or V [B, Hkv, S, D] -> [B * P, PAGE, Hkv, D]."""
    index = torch.arange(len(x), dtype=torch.int64, device=x.device)[:, None], rows.columns
    return x.transpose(1, 2)[index].reshape(-1, PAGE, x.shape[1], x.shape[3]).contiguous()
