"""accept: what a round keeps. `sample_rows` draws the target's own token after each verify row; `accept_walk` follows
the draft as far as it agrees.

sample_rows. Sampling is greedy decoding of perturbed logits. Row t stands at absolute position positions[t]:

    z      = logits / temperature                                                          temperature > 0
    top_k  > 0 keeps the ids with z >= the k-th largest z
    top_p  < 1 keeps, of p = softmax over what top_k left, the ids with z >= that of the token at which the
           descending cumulative mass first reaches top_p
    token  = argmax over the kept ids of z + g(seed, positions[t], id)                     g: noise.py

Ties at a boundary are kept, so the support does not depend on an order; the argmax gives a tie to the lower id. This is
an exact draw from p (the Gumbel-max trick), whatever was drafted. temperature 0 is the argmax of the logits. fp32 from
fp16 and bf16 logits, float64 stays float64. A row depends on nothing but itself. Traffic: the logits, once.

accept_walk. A draft of n tokens is a tree over verify rows 0..n: row 0 the root, draft j in row j + 1 and its parent in
row parents[j] <= j. From row r the walk goes to the child whose token is target[r], the first of equal siblings, and
stops where there is none. The emitted tokens are the target's own, so nothing more is needed to be exact. Integers.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specker.kernels.noise import add_gumbel_, check_seed, gumbel

NUCLEUS = 128  # top-p on a CPU: so many candidates mostly hold the mass; sorting all costs ten times more
MIN_TEMPERATURE = 1e-6  # below it logits / temperature could overflow, and is greedy in effect


def sample_rows(logits: Tensor, temperature: float, top_k: int, top_p: float, seed: int, positions: Tensor) -> Tensor:
    """logits [T, V], positions [T] int64 -> the token after each row, [T] int64.

    temperature 0 or >= 1e-6, top_k >= 0 (0 keeps all), 0 < top_p <= 1, seed in [0, 2^64). ValueError otherwise.
    """
    _check_sample(logits, temperature, top_k, top_p, seed, positions)
    if logits.is_cuda or temperature == 0 or (top_k == 0 and top_p == 1):
        return sample_rows_ref(logits, temperature, top_k, top_p, seed, positions)
    return _sample_few(logits, temperature, top_k, top_p, seed, positions)


def sample_rows_ref(
    logits: Tensor, temperature: float, top_k: int, top_p: float, seed: int, positions: Tensor
) -> Tensor:
    if temperature == 0:
        return first_argmax(logits)
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    dropped = None
    if 0 < top_k < z.shape[1]:
        dropped = z < z.topk(top_k).values[:, -1:]
    if top_p < 1:
        top = (z if dropped is None else z.masked_fill(dropped, -math.inf)).sort(-1, descending=True).values
        mass = (top - top[:, :1]).exp_().cumsum(-1, dtype=torch.float64)
        reached = (mass < top_p * mass[:, -1:]).sum(-1, keepdim=True)
        dropped = z < top.gather(1, reached)
    add_gumbel_(z, seed, positions)
    return first_argmax(z if dropped is None else z.masked_fill_(dropped, -math.inf))


def sample_rows_cost(
    logits: Tensor, temperature: float, top_k: int, top_p: float, seed: int, positions: Tensor
) -> tuple[int, int]:
    """(bytes, operations) of one call: logits and positions in, ids out; one value of noise takes 32 operations."""
    each = 1 if temperature == 0 else 35
    return logits.numel() * logits.element_size() + 16 * logits.shape[0], logits.numel() * each


def accept_walk(
    tokens: Tensor, parents: Tensor, target: Tensor, cu_drafts: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The accepted path in each of B draft trees.

    tokens, parents [N] int64: the drafts of all trees, one tree after another; parents are rows of the own tree.
    target [N + B] int64: the target's token after each verify row; tree b's rows start at cu_drafts[b] + b.
    cu_drafts [B + 1] int32 or int64: where each tree's drafts start, then N; None is one tree. N = 0 is legal.

    Returns int64 path [B, N + 1], the rows of the own tree from the root on, padded with -1 (N bounds every tree and is
    known without reading cu_drafts); count [B] = accepted + 1; next [B], the target after the path's last row.
    Raises ValueError on other shapes and dtypes and, in the reference, on values that are no trees.
    """
    _check_walk(tokens, parents, target, cu_drafts)
    return accept_walk_ref(tokens, parents, target, cu_drafts)


def accept_walk_ref(
    tokens: Tensor, parents: Tensor, target: Tensor, cu_drafts: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    token, parent, wanted = tokens.tolist(), parents.tolist(), target.tolist()
    N = len(token)
    starts = [0, N] if cu_drafts is None else cu_drafts.tolist()
    if starts[0] != 0 or starts[-1] != N or starts != sorted(starts):
        raise ValueError(f"cu_drafts must rise from 0 to {N}, got {starts}")
    paths, counts, nexts = [], [], []
    for b in range(len(starts) - 1):
        first, n = starts[b], starts[b + 1] - starts[b]
        root = first + b  # of target
        row, path = 0, [0]
        for j in range(n):  # parents come before their children, so one pass meets the path's rows in order
            up = parent[first + j]
            if not 0 <= up <= j:
                raise ValueError(f"parents[{first + j}] must be a row in 0..{j}, got {up}")
            if up == row and token[first + j] == wanted[root + row]:
                row = j + 1
                path.append(row)
        counts.append(len(path))
        nexts.append(wanted[root + row])
        paths.append(path + [-1] * (N + 1 - len(path)))
    path_rows = torch.tensor(paths, dtype=torch.int64, device=tokens.device).view(-1, N + 1)  # B = 0 too
    return path_rows, tokens.new_tensor(counts), tokens.new_tensor(nexts)


def accept_walk_cost(
    tokens: Tensor, parents: Tensor, target: Tensor, cu_drafts: Tensor | None = None
) -> tuple[int, int]:
    """(bytes, operations) of one call: every input once, path, count and next out; two comparisons a draft."""
    N, R = tokens.numel(), target.numel()
    B = R - N
    starts = 0 if cu_drafts is None else cu_drafts.numel() * cu_drafts.element_size()
    return 8 * (2 * N + R + B * (N + 1) + 2 * B) + starts, 2 * N


def first_argmax(z: Tensor) -> Tensor:
    """z [T, V] -> the column of each row's largest value, the lowest of equals. [T] int64."""
    if z.is_cuda:
        return z.max(-1).indices
    if z.dtype in (torch.float16, torch.bfloat16):
        z = z.float()
    return torch.from_numpy(z.detach().numpy().argmax(-1))  # 0.5 us for a row of 8192, where torch.max takes 4


def _sample_few(logits: Tensor, temperature: float, top_k: int, top_p: float, seed: int, positions: Tensor) -> Tensor:
    """`sample_rows_ref` on a CPU, several times faster: selects instead of sorting, adds noise to the kept ids only."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    z = (logits.detach().to(wide) / temperature).numpy()
    noise = gumbel(seed, positions, z.shape[1]).numpy()
    tokens = []
    for row, g in zip(z, noise, strict=True):
        kept = np.flatnonzero(~(row < _least_kept(row, top_k, top_p)))
        tokens.append(kept[(row[kept] + g[kept]).argmax()])
    return torch.tensor(tokens, dtype=torch.int64)


def _least_kept(z: Any, top_k: int, top_p: float) -> float:
    """The smallest value of z [V] (numpy) that top_k, then top_p leave."""
    V = m = len(z)
    if 0 < top_k < V:
        edge = np.partition(z, V - top_k)[V - top_k]
        if top_p == 1:
            return edge
        z = z[z >= edge]
        V = m = len(z)
    elif top_p < 1:
        m = min(NUCLEUS, V)
    whole = np.exp(z - z.max()).sum(dtype=np.float64)
    while True:
        top = np.sort(np.partition(z, V - m)[V - m :])[::-1]
        mass = np.exp(top - top[0]).cumsum(dtype=np.float64)
        if m == V or mass[-1] >= top_p * whole:
            return top[min(int(mass.searchsorted(top_p * whole)), m - 1)]
        m = min(8 * m, V)


def _check_sample(logits: Tensor, temperature: float, top_k: int, top_p: float, seed: int, positions: Tensor) -> None:
    if logits.dim() != 2 or logits.shape[1] == 0 or not logits.is_floating_point():
        raise ValueError(f"logits must be [T, V >= 1] floating point, got {tuple(logits.shape)} {logits.dtype}")
    if positions.shape != logits.shape[:1] or positions.dtype != torch.int64:
        raise ValueError(f"positions must be [{logits.shape[0]}] int64, got {tuple(positions.shape)} {positions.dtype}")
    if positions.device != logits.device:
        raise ValueError(f"positions must be on {logits.device}, got {positions.device}")
    if not (temperature == 0 or MIN_TEMPERATURE <= temperature < math.inf):
        raise ValueError(f"temperature must be 0 or in [{MIN_TEMPERATURE}, inf), got {temperature}")
    if not isinstance(top_k, int) or top_k < 0:
        raise ValueError(f"top_k must be an integer >= 0 (0 keeps every token), got {top_k}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}")
    check_seed(seed)


def _check_walk(tokens: Tensor, parents: Tensor, target: Tensor, cu_drafts: Tensor | None) -> None:
    for name, x in (("tokens", tokens), ("parents", parents), ("target", target)):
        if x.dim() != 1 or x.dtype != torch.int64:
            raise ValueError(f"{name} must be a vector of int64, got {tuple(x.shape)} {x.dtype}")
    if parents.shape != tokens.shape:
        raise ValueError(f"parents must be [{tokens.shape[0]}] like tokens, got {tuple(parents.shape)}")
    B = 1
    if cu_drafts is not None:
        if cu_drafts.dim() != 1 or cu_drafts.shape[0] < 1 or cu_drafts.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"cu_drafts must be [B + 1] int32 or int64, got {tuple(cu_drafts.shape)} {cu_drafts.dtype}"
            )
        B = cu_drafts.shape[0] - 1
    if target.shape[0] != tokens.shape[0] + B:
        raise ValueError(
            f"target must have a row for each draft and each root, [{tokens.shape[0]} + {B}], got {tuple(target.shape)}"
        )
