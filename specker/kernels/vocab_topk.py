"""vocab_topk: LM head over the kept rows of the vocabulary, the k best tokens of each row, the log-sum-exp of all.

Contract. Kept row c holds token id(c) = token_ids[c], or c without token_ids. For row t:

    h        = hidden[t], or hidden[t] * rsqrt(mean(hidden[t]^2) + eps) * norm weight  (fp32, rounded once to the dtype)
    z[c]     = h . weight[c]                                             noise None, or its temperature 0
    z[c]     = h . weight[c] / temperature + g(seed, position, id(c))    noise (seed, positions, temperature): noise.py
    logits   = the k largest z, descending, ties to the lower id(c); ids = their id(c)
    lse      = log sum_c exp z[c]

so exp(logits - lse) is a confidence over the kept rows in the very ranking that was used. A trimmed head sees the whole
head's noise, and the order of its rows does not matter. hidden [T, E] and weight [K, E] of one dtype; ids [T, k] int64
in the full vocabulary; logits [T, k] and lse [T] fp32, float64 for float64. Traffic: the weight once, K * E elements;
logits do not reach memory in the kernel. The reference rounds them to hidden's dtype, as `row_linear` does.
Source of the trimmed head: VocabTrim, arXiv 2506.22694.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from specker.kernels import few
from specker.kernels.accept import MIN_TEMPERATURE, first_argmax
from specker.kernels.noise import add_gumbel_, check_seed
from specker.kernels.row_linear import row_linear

MAX_K = 64

Norm = tuple[Tensor, float]  # weight [E], eps
Noise = tuple[int, Tensor, float]  # seed, positions [T] int64, temperature


def vocab_topk(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor | None,
    k: int,
    norm: Norm | None = None,
    noise: Noise | None = None,
    with_lse: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [T, E], weight [K, E] (plain or packed), token_ids [K] -> ids [T, k], logits [T, k], lse [T].

    token_ids are distinct, int32 or int64. 1 <= k <= min(64, K). norm = (weight [E], eps), noise = (seed, positions [T]
    int64, temperature 0 or >= 1e-6). Without `with_lse` lse is empty, [0]: on a CPU it costs as much as the search.
    Raises ValueError on other shapes, dtypes and ranges.
    """
    _check(hidden, weight, token_ids, k, norm, noise)
    return vocab_topk_ref(hidden, weight, token_ids, k, norm, noise, with_lse)


def vocab_topk_ref(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor | None,
    k: int,
    norm: Norm | None = None,
    noise: Noise | None = None,
    with_lse: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    if norm is not None:
        normed = few.normed(hidden, *norm)
        hidden = F.rms_norm(hidden, hidden.shape[-1:], *norm) if normed is None else normed
    z = row_linear(hidden, weight)
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    if noise is not None and noise[2] > 0:
        seed, positions, temperature = noise
        z = add_gumbel_(z.div_(temperature), seed, positions, token_ids)
    values, columns = (_largest if z.is_cuda else _select)(z, token_ids, k)
    ids = columns if token_ids is None else token_ids[columns].long()
    return ids, values, z.logsumexp(-1) if with_lse else z.new_empty(0)


def vocab_topk_cost(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor | None,
    k: int,
    norm: Norm | None = None,
    noise: Noise | None = None,
    with_lse: bool = True,
) -> tuple[int, int]:
    """(bytes, flops) of one call: weight, hidden, ids and norm once, the results out; two flops a weight and row."""
    (T, E), K = hidden.shape, weight.shape[0]
    read = (K * E + T * E + (E if norm is not None else 0)) * hidden.element_size()
    if token_ids is not None:
        read += K * token_ids.element_size()
    if noise is not None:
        read += 8 * T
    size = 8 if hidden.dtype == torch.float64 else 4
    return read + T * k * (8 + size) + T * size * with_lse, 2 * T * K * E


def _largest(z: Tensor, token_ids: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row and their columns, ties to the lower id: sorts everything, without a host read."""
    by_id = torch.arange(z.shape[1], device=z.device) if token_ids is None else token_ids.argsort()
    values, order = z[:, by_id].sort(dim=-1, descending=True, stable=True)
    return values[:, :k].contiguous(), by_id[order[:, :k]]


def _select(z: Tensor, token_ids: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """`_largest` on a CPU: selects, and orders by id only where there is a tie (torch.topk orders ties anyhow)."""
    if k == 1:
        best = few.largest(z)
        if best is None:
            columns = first_argmax(z)[:, None]
            best = z.gather(1, columns), columns
        values, columns = best
        if token_ids is None or (z == values).sum() == z.shape[0]:
            return values, columns
    m = min(k + 1, z.shape[1])  # one more shows a tie at the edge
    values, columns = z.topk(m)
    rows = values.tolist()
    values, columns = values[:, :k].contiguous(), columns[:, :k].contiguous()
    for t, row in enumerate(rows):
        if len(set(row)) < m:
            at = (~(z[t] < values[t, -1])).nonzero()[:, 0]  # every candidate; NaN is one, as for topk
            if token_ids is not None:
                at = at[token_ids[at].argsort()]
            values[t], order = (x[:k] for x in z[t, at].sort(descending=True, stable=True))
            columns[t] = at[order]
    return values, columns


def _check(
    hidden: Tensor, weight: Tensor, token_ids: Tensor | None, k: int, norm: Norm | None, noise: Noise | None
) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"expected hidden [T, E] and weight [K, E]: hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}"
        )
    if not hidden.is_floating_point() or hidden.dtype != weight.dtype or hidden.device != weight.device:
        raise ValueError(
            f"hidden and weight must be of one floating dtype and device: hidden {hidden.dtype} {hidden.device}, "
            f"weight {weight.dtype} {weight.device}"
        )
    T, K = hidden.shape[0], weight.shape[0]
    if not 1 <= k <= min(MAX_K, K):
        raise ValueError(f"k must be in 1..min({MAX_K}, K = {K}), got {k}")
    if token_ids is not None and (token_ids.shape != (K,) or token_ids.dtype not in (torch.int32, torch.int64)):
        raise ValueError(f"token_ids must be [{K}] int32 or int64, got {tuple(token_ids.shape)} {token_ids.dtype}")
    if norm is not None and norm[0].shape != hidden.shape[1:]:
        raise ValueError(f"norm weight must be [{hidden.shape[1]}], got {tuple(norm[0].shape)}")
    if noise is not None:
        seed, positions, temperature = noise
        check_seed(seed)
        if positions.shape != (T,) or positions.dtype != torch.int64:
            raise ValueError(f"noise positions must be [{T}] int64, got {tuple(positions.shape)} {positions.dtype}")
        if not (temperature == 0 or MIN_TEMPERATURE <= temperature < math.inf):
            raise ValueError(f"noise temperature must be 0 or in [{MIN_TEMPERATURE}, inf), got {temperature}")
