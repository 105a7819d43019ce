"""sample_rows' filters against their definition: integer masses in units of 2^-40 of the largest."""

import importlib
import math

import numpy as np
import pytest
import torch

from specker.kernels.noise import pack_draw
from specker.kernels.sample_rows import launch as launch_sample
from specker.kernels.sample_rows import sample_rows_ref
from specker.kernels.variant import tl, triton

module = importlib.import_module("specker.kernels.sample_rows")
P = (1e-9, 1e-3, 0.1, 0.5, 0.9, 0.95, 0.99, 0.999, 0.9999, 1 - 2.0**-20)
V = 200


def randn(n=V, seed=0):
    return np.random.default_rng(seed).standard_normal(n)


ROWS = {
    "narrow": 0.3 * randn(),
    "wide": 3 * randn(seed=1),
    "steep": 1e5 * randn(seed=2),  # a tiny temperature
    "Zipf": -1.1 * np.log(1 + np.arange(V)),
    "equal": np.zeros(V),
    "one bin": 1e-3 * randn(seed=3),
    "ties": np.round(2 * randn(seed=4)) / 2,
    "ties at the edge": np.repeat((0.0, -2.0, -4.0), (3, V - 100, 97)),
    "a far shelf": np.repeat((0.0, -17.0), (1, V - 1)),
    "a shelf of mass 1": np.repeat((0.0, -27.7), (2, V - 2)),  # in the octave bins; a unit of mass each
    "a tail of mass 0": -0.2 * np.arange(V),
    "masked": np.where(np.arange(V) % 3 == 0, randn(seed=5), -math.inf),
}


def below_and_mass(z):
    """Of a row z [n] fp32: how far each id lies below the largest, and its mass."""
    below = np.maximum(z.max() - z, np.float32(0))
    return below, (np.exp(-below) * np.float32(2.0**40)).astype(np.int64)


def share(mass, p):
    """The mass that top_p wants of a mass."""
    return math.ceil(float(mass) * float(np.float32(p)))


def kept(z, k, p):
    """Which ids of a row z [n] fp32 the filters keep."""
    out = np.ones(len(z), bool)
    if 0 < k < len(z):
        out = z >= np.sort(z)[-k]
    if p < 1:
        mass = np.where(out, below_and_mass(z)[1], 0)
        values, level = np.unique(z, return_inverse=True)
        of_value = np.zeros(len(values), np.int64)
        np.add.at(of_value, level, mass)
        out &= z >= values[of_value[::-1].cumsum()[::-1] >= share(mass.sum(), p)][-1]
    return out


def boundaries(z, k):
    """Values of top_p at which the edge moves, as near as fp32 comes, and their neighbours."""
    mass = np.sort(below_and_mass(z)[1][kept(z, k, 1.0)])[::-1].cumsum()
    for at in (0, len(mass) // 3):
        p = np.float32(mass[at] / mass[-1])
        yield from (float(x) for x in (np.nextafter(p, np.float32(0)), p, np.nextafter(p, np.float32(2))) if x < 1)


@triton.jit
def _favour(ids):
    """Noise that lets the largest id win among those that are kept."""
    return (ids + 1).to(tl.float32) * 1e6


@triton.jit
def _favour_of(ids, position, seed):
    return _favour(ids)


@triton.jit
def _favour_run(first, position, seed, N: tl.constexpr):
    return _favour(first + tl.arange(0, N))


@pytest.mark.parametrize("name", ROWS)
def test_the_last_kept_id_wins(monkeypatch, name):
    """Of ids in descending order, with noise for the largest, the token is the last one that is kept."""
    for attribute, value in (("TILE", 128), ("FINISH", 64), ("gumbel_of", _favour_of), ("gumbel_run", _favour_run)):
        monkeypatch.setattr(module, attribute, value)
    module._sample_variants.cache_clear()
    z = -np.sort(-ROWS[name]).astype(np.float32)
    first = list(ROWS).index(name)  # each of P meets a third of the rows, with either k another third
    settings = [(k, p) for k in (0, 7) for p in (*P[(first + k) % 3 :: 3], *boundaries(z, k))]
    settings += [(V // 2, 0.9), (V, 0.5), (40, 1.0), (0, 1.0)]
    draw = torch.cat([pack_draw(3, 1.0, k, p).view(1, 4) for k, p in settings])
    rows = torch.from_numpy(z).expand(len(settings), -1)
    got = launch_sample(rows, 1.0, 1, 0.5, 3, torch.arange(len(settings)), draw)
    module._sample_variants.cache_clear()
    want = [int(np.flatnonzero(kept(z, k, p) & (z > -math.inf))[-1]) for k, p in settings]
    assert dict(zip(settings, got.tolist(), strict=True)) == dict(zip(settings, want, strict=True))


@pytest.mark.parametrize("top_k, top_p", [(0, 0.9), (0, 0.9999), (50, 0.5), (50, 0.99)])
def test_the_reference_agrees(top_k, top_p):
    """Steep rows and ties, at a setting that is not within rounding of an edge."""
    rows = torch.stack([torch.from_numpy(z).float() for name, z in ROWS.items() if "equal" not in name])
    positions = torch.arange(len(rows))
    got = launch_sample(rows, 0.7, top_k, top_p, 5, positions)
    assert torch.equal(got, sample_rows_ref(rows, 0.7, top_k, top_p, 5, positions))


@triton.jit
def _edges_kernel(
    out_ptr,  # [4] int32
    count_ptr,  # [BINS] int32
    top_k,
    top_p,
    BINS: tl.constexpr,
    TOP_K: tl.constexpr,
):
    bin_k, first, last, want_k = module._edges(tl.load(count_ptr + tl.arange(0, BINS)), top_k, top_p, TOP_K, True)
    tl.store(out_ptr, bin_k)
    tl.store(out_ptr + 1, first)
    tl.store(out_ptr + 2, last)
    tl.store(out_ptr + 3, want_k)


def edges(bins, k, p):
    out = torch.empty(4, dtype=torch.int32)
    count = torch.from_numpy(np.bincount(bins, minlength=module.BINS).astype(np.int32))
    _edges_kernel[(1,)](out, count, k, p, module.BINS, k > 0)
    return out.tolist()


def bins_of(below):
    """The bins of `below`, as the docstring of _LINEAR describes them."""
    x = below * np.float32(64)
    octaves = (x.view(np.int32) - np.float32(1024).view(np.int32)) >> 17
    return np.where(x < 1024, np.minimum(x, 1024).astype(np.int32), np.minimum(1024 + octaves, module.BINS - 1))


BIG = {
    "normal, 128,256 ids": 3.5 * randn(128256),
    "Zipf, 128,256 ids": -1.1 * np.log(1 + np.arange(128256)),
    "flat, 128,256 ids": 0.05 * randn(128256),
    "ties": np.round(10 * randn(50000)) / 4,
}


@pytest.mark.parametrize("name", [*ROWS, *BIG])
def test_the_edge_lies_within_the_bounds(name):
    """first..last hold the top-p edge, bin_k the k-th largest, and what is listed is little."""
    rows = {**ROWS, **BIG}
    z, number = rows[name].astype(np.float32), list(rows).index(name)
    below, mass = below_and_mass(z)
    bins, finite = bins_of(below), below < math.inf
    for n, k in enumerate((0, 1, 7, len(z) // 2), number):
        if k > finite.sum():
            continue
        whole = mass[kept(z, k, 1.0)].sum()
        for p in (*P[n % 2 :: 2], *boundaries(z, k)):
            bin_k, first, last, want_k = edges(bins[finite], k, p)
            if k:
                kth = bins[np.argsort(-z, kind="stable")[k - 1]]
                assert (bin_k, want_k) == (kth, k - (bins < kth).sum()), (k, p)
            else:
                assert bin_k == module.BINS
            edge = bins[kept(z, k, p)].max()
            assert first <= edge <= last <= bin_k, (k, p)
            # The odds are known to 1/32 nat on either side, so the mass to p * (1 - p) / 16 in all. The bound has half
            # as much again, since bins are wider beyond 16 nats.
            inside = mass[(bins > first) & (bins < min(last, 1024))].sum() / whole
            assert inside <= 0.1 * p * (1 - p), (k, p)
