"""DSpine's head (sgl-project/SpecForge, specforge/modeling/draft/dspine.py): after each layer, a row of a block hears
what the row before it says of itself, and the last layer scores pairs of neighbouring candidates.

After layer l, every row h of a block but the root's becomes

    h <- h + |h| / sqrt(H) W_l (sigmoid(G z + P p + b) * M p),  z = sqrt(r) R_l h / |R_l h|

where p is z of the row before, and at the first row sqrt(r) code[root]. The logits of candidates c of a row after
candidate a of the row before come from the last layer's h, injected with p = sqrt(r) code[a] instead:

    logits(c) = head[c] . norm(h injected with a)
"""

from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from specker.kernels.residual_merge import add_norm
from specker.kernels.variant import sum_dtype
from specker.model.decoder import Model


class Injection(NamedTuple):
    """The tensors of DSpine's head, of rank r, with messages of M numbers."""

    readouts: Tensor  # R [L, r, H]
    writes: Tensor  # W [L, H, M]
    message: Tensor  # M [M, r]
    receiver: Tensor  # G [M, r]
    predecessor: Tensor  # P [M, r]
    bias: Tensor  # b [M]
    codes: Tensor  # [V, r], by the target's ids


def inject(model: Model, w: Injection, layer: int, hidden: Tensor, roots: Tensor) -> Tensor:
    """The rows [n * count, H] of n blocks after `layer`, with what the rows before them say. roots [n] int64."""
    h = hidden.view(len(roots), -1, hidden.shape[1])
    features = _features(model, w, layer, h)
    before = torch.cat((_codes(w, roots, h.dtype).unsqueeze(1), features[:, 1:-1]), 1)
    return torch.cat((h[:, :1], _injected(model, w, layer, h[:, 1:], features[:, 1:], before)), 1).view_as(hidden)


def transitions(model: Model, w: Injection, last: Tensor, roots: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    """The logits of the candidates `ids` [n, k, K] int64 after each candidate of the position before, [n, k, K, K]; of
    the first position after the root. last [n, k, H]: the last layer's rows before they were injected. rows [n, k, K,
    H]: of the LM head, of the candidates."""
    n, _, K = ids.shape
    layer, wide = len(w.writes) - 1, sum_dtype(last.dtype)
    before = torch.cat((roots.view(n, 1, 1).expand(n, 1, K), ids[:, :-1]), 1)
    h = last.unsqueeze(2)
    refined = _injected(model, w, layer, h, _features(model, w, layer, h), _codes(w, before, h.dtype))
    normed = add_norm(refined.flatten(0, 2), None, model.norm, model.config.rms_norm_eps)[1].view_as(refined)
    return normed.to(wide) @ rows.to(wide).mT


def _codes(w: Injection, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    return w.codes[tokens].to(dtype) * sqrt(w.codes.shape[1])


def _features(model: Model, w: Injection, layer: int, h: Tensor) -> Tensor:
    """z of rows [..., H], [..., r]."""
    read = _linear(model, h, w.readouts[layer])
    return (normalize(read.to(sum_dtype(h.dtype)), dim=-1) * sqrt(read.shape[-1])).to(h.dtype)


def _injected(model: Model, w: Injection, layer: int, h: Tensor, features: Tensor, before: Tensor) -> Tensor:
    """Rows h [..., H] with their `features` z [..., r] after rows that say `before`, p [..., r]."""
    gate = _linear(model, features, w.receiver) + _linear(model, before, w.predecessor, w.bias)
    said = _linear(model, torch.sigmoid(gate) * _linear(model, before, w.message), w.writes[layer])
    length = torch.linalg.vector_norm(h, dim=-1, keepdim=True, dtype=sum_dtype(h.dtype))
    return h + (length / sqrt(h.shape[-1])).to(h.dtype) * said


def _linear(model: Model, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return model.linear(x.flatten(0, -2), weight, bias).view(*x.shape[:-1], -1)
