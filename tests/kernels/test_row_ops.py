"""row_linear, residual_merge, kv_calibrate and kv_commit against float64 formulas."""

import math

import pytest
import torch

from specker.kernels.kv_calibrate import kv_calibrate, kv_commit, rope_table
from specker.kernels.residual_merge import residual_merge, residual_merge_cost
from specker.kernels.row_linear import pack, row_linear, row_linear_cost

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def randn(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(got, want, dtype, roundings=4):
    scale = want.abs().max() if want.numel() else 1.0
    return want.shape == got.shape and bool(
        ((got.double() - want).abs() <= roundings * torch.finfo(dtype).eps * scale).all()
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [0, 1, 7, 65])
@pytest.mark.parametrize("epilogue", ["none", "silu_mul"])
def test_row_linear(dtype, T, epilogue):
    x, w, b = randn(T, 33, dtype=dtype), randn(46, 33, dtype=dtype, seed=1), randn(46, dtype=dtype, seed=2)
    for bias in (None, b):
        want = x.double() @ w.double().T + (0 if bias is None else bias.double())
        if epilogue == "silu_mul":
            gate, up = want[:, :23], want[:, 23:]
            want = gate / (1 + torch.exp(-gate)) * up
        assert close(row_linear(x, w, bias, epilogue), want, dtype, 8)


def test_a_packed_weight_gives_the_same_product():
    w = randn(2100, 1024, dtype=torch.float32)
    packed = pack(w)
    assert packed.shape == w.shape and packed is not w, "this machine's torch has oneDNN, yet nothing was packed"
    for T in (1, 3, 16, 70):
        x = randn(T, 1024, dtype=torch.float32, seed=3)
        assert close(row_linear(x, packed), x.double() @ w.double().T, torch.float32, 64)
    for small in (w[:10], w.bfloat16(), w.double()):
        assert pack(small) is small


def test_row_linear_refuses():
    x, w = torch.zeros(2, 8), torch.zeros(6, 8)
    with pytest.raises(ValueError, match="expected x"):
        row_linear(x, torch.zeros(6, 7))
    with pytest.raises(ValueError, match="weight must be like x"):
        row_linear(x, w.double())
    with pytest.raises(ValueError, match="bias must be"):
        row_linear(x, w, torch.zeros(5))
    with pytest.raises(ValueError, match="epilogue must be"):
        row_linear(x, w, epilogue="gelu")
    with pytest.raises(ValueError, match="even number"):
        row_linear(x, torch.zeros(5, 8), epilogue="silu_mul")
    assert row_linear_cost(x, w) == ((2 * 8 + 6 * 8 + 2 * 6) * 4, 2 * 2 * 6 * 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("P", "Q"), [(0, 1), (1, 0), (1, 1), (2, 1), (1, 4), (3, 2)])
def test_residual_merge(dtype, P, Q):
    x, deltas, weight = (
        randn(5, 24, dtype=dtype),
        randn(P, 5, 24, dtype=dtype, seed=1),
        randn(Q, 24, dtype=dtype, seed=2),
    )
    y, normed = residual_merge(x, deltas, weight if Q else None, 1e-5)
    want = x.double() + deltas.double().sum(0)
    assert close(y, want, dtype, 2) and y.data_ptr() != x.data_ptr()
    rounded = y.double()
    norm = rounded / (rounded.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert close(normed, norm * weight.double()[:, None], dtype)
    assert (
        residual_merge_cost(x, deltas, weight if Q else None, 1e-5)[0]
        == ((2 + P + Q) * 120 + Q * 24) * x.element_size()
    )


def test_residual_merge_refuses():
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="expected x"):
        residual_merge(x, torch.zeros(2, 8), None, 1e-5)
    with pytest.raises(ValueError, match="must have x's dtype"):
        residual_merge(x, torch.zeros(1, 2, 8).half(), None, 1e-5)
    with pytest.raises(ValueError, match="norm_weight must be"):
        residual_merge(x, torch.zeros(1, 2, 8), torch.zeros(8), 1e-5)


@pytest.mark.parametrize("groups", [0, 1, 3])
def test_kv_calibrate(groups):
    T, Hq, Hkv, D, page = 6, 4, 2, 8, 4
    qkv, inv_freq = randn(T, (Hq + 2 * Hkv) * D), torch.tensor([1.0, 0.3, 0.1, 0.02])
    rope = rope_table(inv_freq, 1.5, 40, torch.float64)
    positions, slots = torch.tensor([3, 3, 7, 0, 39, 12]), torch.tensor([9, 2, 3, 11, 0, 7])
    k, v = (torch.full((3, page, Hkv, D), math.nan, dtype=torch.float64) for _ in range(2))
    norms = [1 + 0.1 * randn(groups, D, seed=s) for s in (1, 2)] if groups else [None, None]
    q = kv_calibrate(qkv, positions, slots, rope, k, v, *norms, eps=1e-5)
    heads = qkv.view(T, -1, D)

    def expected(row, head):
        x = heads[row, head].clone()
        if groups:
            weight = norms[0 if head < Hq else 1][row // (T // groups)]
            x = x / (x.square().mean() + 1e-5).sqrt() * weight
        out = x.clone()
        for i in range(D // 2):
            angle = positions[row].float() * inv_freq[i]
            c, s = (float(f(angle)) * 1.5 for f in (torch.cos, torch.sin))
            out[i], out[i + D // 2] = x[i] * c - x[i + D // 2] * s, x[i + D // 2] * c + x[i] * s
        return out

    for t in range(T):
        for h in range(Hq):
            assert (q[t, h] - expected(t, h)).abs().max() < 1e-6  # the table is float32
        for h in range(Hkv):
            where = slots[t] // page, slots[t] % page, h
            assert (k[where] - expected(t, Hq + h)).abs().max() < 1e-6
            assert torch.equal(v[where], heads[t, Hq + Hkv + h])
    untouched = [s for s in range(12) if s not in slots.tolist()]
    assert k.view(12, Hkv, D)[untouched].isnan().all() and v.view(12, Hkv, D)[untouched].isnan().all()


def test_kv_commit_reads_all_before_it_writes():
    k, v = randn(3, 2, 4, 2, 8), randn(3, 2, 4, 2, 8, seed=1)
    before = [c.clone().view(3, 8, 2, 8) for c in (k, v)]
    src, dst = torch.tensor([5, 2, 3]), torch.tensor([2, 3, 4])  # 2 and 3 are read and written
    kv_commit(k, v, src, dst)
    for cache, old in zip((k, v), before, strict=True):
        rows = cache.view(3, 8, 2, 8)
        assert torch.equal(rows[:, dst], old[:, src])
        rest = [0, 1, 5, 6, 7]
        assert torch.equal(rows[:, rest], old[:, rest])


def test_kv_ops_refuse():
    k = torch.zeros(2, 4, 2, 8)
    rope, at = torch.zeros(9, 2, 8), torch.zeros(3, dtype=torch.int64)
    ok = torch.zeros(3, 48)
    for qkv, positions, table, norm, message in [
        (torch.zeros(3, 40 + 1), at, rope, None, "qkv must be"),
        (torch.zeros(3, 32), at, rope, None, "qkv must be"),
        (ok, at[:2], rope, None, "positions and slots"),
        (ok, at, torch.zeros(9, 8), None, "rope must be"),
        (ok.half(), at, rope, None, "caches must have"),
        (ok, at, rope, torch.zeros(2, 8), "G dividing"),
    ]:
        with pytest.raises(ValueError, match=message):
            kv_calibrate(qkv, positions, at, table, k, k.clone(), norm, norm)
    with pytest.raises(ValueError, match="come together"):
        kv_calibrate(ok, at, at, rope, k, k.clone(), torch.zeros(1, 8), None)
    with pytest.raises(ValueError, match="caches must be"):
        kv_commit(k, k, at, at)
    with pytest.raises(ValueError, match="src and dst"):
        kv_commit(k[None], k[None].clone(), at, at[:1])
