"""Random inputs and float64 formulas that several op tests share."""

import math

import torch


def randn(*shape, dtype=torch.float64, seed=0, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)


def close(got, want, dtype, roundings=4):
    """Equal shapes, and values within `roundings` units of `dtype`'s eps, relative to the largest value."""
    scale = want.abs().max() if want.numel() else 1.0
    within = (got.double() - want).abs() <= roundings * torch.finfo(dtype).eps * scale
    return want.shape == got.shape and bool(within.all())


def law(logits, temperature, top_k, top_p):
    """The distribution [V] that sample_rows draws from, in float64; ids are ranked by sorting."""
    z = [x / temperature for x in logits]
    kept = range(len(z))
    if top_k:
        edge = sorted(z, reverse=True)[min(top_k, len(z)) - 1]
        kept = [v for v in kept if z[v] >= edge]
    weight = {v: math.exp(z[v] - max(z)) for v in kept}
    if top_p < 1:
        total, mass = sum(weight.values()), 0.0
        for v in sorted(kept, key=lambda v: -z[v]):
            mass += weight[v]
            if mass >= top_p * total:
                break
        weight = {w: x for w, x in weight.items() if z[w] >= z[v]}
    total = sum(weight.values())
    return torch.tensor([weight.get(v, 0.0) / total for v in range(len(z))], dtype=torch.float64)


def chi_square_bound(df, z=3.09):
    """The value that a chi-square of df degrees exceeds with p = 0.001 (Wilson and Hilferty)."""
    return df * (1 - 2 / (9 * df) + z * math.sqrt(2 / (9 * df))) ** 3
