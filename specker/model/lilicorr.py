"""LiLiCorr's head (arXiv 2608.20530; sgl-project/sglang, srt/models/lilicorr.py): a small transformer over the
best K candidates of all positions of a block at once scores the pairs of neighbouring ones.

The state of a candidate is a sum of its embedding, its position's row h, five features of its log-probability p and its
rank r by p, an embedding of the position and one of the rank:

    x = tokens(embedding) + rows(h) + features(p, exp p, p - max p, r / (K - 1), r = 0) + slot + rank

Every candidate attends to all others, with a bias for the distance of their positions. With the anchor a, which is what
the drafter reads of the target at the column before the root, and y = norm(x) after the layers,

    f = silu(factor [y | a | y * a]),  out = unit(outgoing f),  in = unit(incoming f)

and the logits of candidate c after candidate b of the position before are scale * < out_b, in_c >; at the first
position they are scale * < unit(start a), in_c >.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specker.kernels.variant import sum_dtype

FEATURES = 5


class Affine(NamedTuple):
    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class CorrectorLayer(NamedTuple):
    attn_norm: Tensor  # [h]
    qkv: Affine  # [3 h, h]
    out: Affine  # [h, h]
    mlp_norm: Tensor  # [h]
    up: Affine
    down: Affine


class Corrector(NamedTuple):
    """The tensors of LiLiCorr's head, of width h, for blocks of B rows."""

    tokens: Affine | None  # [h, H]; None: h is H
    rows: Affine  # [h, H]
    feature_norm: Affine  # [FEATURES]
    features: tuple[Affine, Affine]
    slots: Tensor  # [B - 1, h]
    ranks: Tensor  # [K, h]
    distance: Tensor  # [heads, 2 B - 1], the bias of the distances 1 - B .. B - 1
    same: Tensor  # [heads], a further one within a position
    anchor: Affine  # [h, H]
    layers: tuple[CorrectorLayer, ...]
    output_norm: Tensor  # [h]
    anchor_norm: Tensor  # [h]
    factor: Affine  # [h, 3 h]
    outgoing: Affine
    incoming: Affine
    start: Affine
    eps: float  # of the norms
    least: float  # the smallest length by which `unit` divides
    scale: float


class Anchors(NamedTuple):
    """What the drafter reads of the target at the column before the root of each block."""

    rows: Tensor  # [n, H]
    known: Tensor  # [n] bool, whether there is such a column


def transitions(w: Corrector, embedded: Tensor, log_p: Tensor, normed: Tensor, anchors: Anchors) -> Tensor:
    """The logits of the candidates of k positions after each candidate of the position before, [n, k, K, K]; of the
    first position after the root. Their embeddings [n, k, K, H] and log-probabilities [n, k, K] in any order; `normed`
    [n, k, H]: the rows that predict them."""
    n, k, K = log_p.shape
    ranks = log_p.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    states = (embedded if w.tokens is None else w.tokens(embedded)) + w.rows(normed).unsqueeze(2)
    states = states + _features(w, log_p, ranks, states.dtype) + w.slots[:k].unsqueeze(1) + w.ranks[ranks]
    bias = _bias(w, k).repeat_interleave(K, 1).repeat_interleave(K, 2)
    x = states.flatten(1, 2)
    for layer in w.layers:
        x = x + _attended(w, layer, x, bias)
        x = x + layer.down(F.silu(layer.up(_norm(w, x, layer.mlp_norm))))
    y = _norm(w, x, w.output_norm).view_as(states)
    a = _norm(w, w.anchor(anchors.rows) * anchors.known.unsqueeze(1), w.anchor_norm)
    beside = a.view(n, 1, 1, -1).expand_as(y)
    f = F.silu(w.factor(torch.cat((y, beside, y * beside), -1)))
    wide = sum_dtype(f.dtype)
    start, out, into = (_unit(w, x).to(wide) for x in (w.start(a), w.outgoing(f), w.incoming(f)))
    first = (into[:, :1] @ start.view(n, 1, -1, 1)).mT.expand(n, 1, K, K)
    return w.scale * torch.cat((first, out[:, :-1] @ into[:, 1:].mT), 1)


def _features(w: Corrector, log_p: Tensor, ranks: Tensor, dtype: torch.dtype) -> Tensor:
    share = ranks.to(log_p.dtype) / max(1, ranks.shape[-1] - 1)
    best = (ranks == 0).to(log_p.dtype)
    parts = torch.stack((log_p, log_p.exp(), log_p - log_p.amax(-1, keepdim=True), share, best), -1)
    up, down = w.features
    return down(F.silu(up(F.layer_norm(parts.to(dtype), (FEATURES,), *w.feature_norm))))


def _bias(w: Corrector, k: int) -> Tensor:
    """What is added to the scores of attention between k positions, [heads, k, k]."""
    at = torch.arange(k, dtype=torch.int64, device=w.same.device)
    apart = at.unsqueeze(1) - at
    zero = w.distance.shape[1] // 2
    return w.distance[:, apart + zero] + w.same.view(-1, 1, 1) * (apart == 0)


def _attended(w: Corrector, layer: CorrectorLayer, x: Tensor, bias: Tensor) -> Tensor:
    q, k, v = layer.qkv(_norm(w, x, layer.attn_norm)).unflatten(2, (3, len(bias), -1)).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.unsqueeze(0))
    return layer.out(mixed.transpose(1, 2).flatten(2))


def _norm(w: Corrector, x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, w.eps)


def _unit(w: Corrector, x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1, eps=w.least)
