"""The numpy forms of the small ops equal their references, and step aside where they must."""

import pytest
import torch

from specker.kernels import few
from specker.kernels.ancestors import ancestor_words
from specker.kernels.attention import tree_attention, tree_attention_ref
from specker.kernels.kv import kv_calibrate_ref
from specker.kernels.merge import residual_merge_ref

DTYPES = [torch.float32, torch.float64]


def randn(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(got, want):
    bound = 32 * torch.finfo(want.dtype).eps * max(1.0, float(want.abs().max())) if want.numel() else 0
    return got.shape == want.shape and got.dtype == want.dtype and bool(((got - want).abs() <= bound).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("P", "Q"), [(0, 1), (1, 0), (1, 1), (2, 1), (1, 4), (3, 2)])
def test_residual_merge(dtype, P, Q):
    x, deltas, weight = (
        randn(5, 24, dtype=dtype),
        randn(P, 5, 24, dtype=dtype, seed=1),
        randn(Q, 24, dtype=dtype, seed=2),
    )
    args = x, deltas, weight if Q else None, 1e-5
    before = x.clone()
    got, want = few.residual_merge(*args), residual_merge_ref(*args)
    assert all(map(close, got, want))
    got[0].zero_()
    assert torch.equal(x, before), "the output aliases x"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [0, 1, 3])
def test_kv_calibrate(dtype, groups):
    T, Hq, Hkv, D = 6, 4, 2, 8
    qkv, rope = randn(T, (Hq + 2 * Hkv) * D, dtype=dtype), randn(40, 2, D, dtype=dtype, seed=3)
    positions, slots = torch.tensor([3, 3, 7, 0, 39, 12]), torch.tensor([9, 2, 3, 11, 0, 7])
    norms = [1 + 0.1 * randn(groups, D, dtype=dtype, seed=s) for s in (1, 2)] if groups else [None, None]
    caches = [[torch.zeros(3, 4, Hkv, D, dtype=dtype) for _ in range(2)] for _ in range(2)]
    got = few.kv_calibrate(qkv, positions, slots, rope, *caches[0], *norms, 1e-5)
    want = kv_calibrate_ref(qkv, positions, slots, rope, *caches[1], *norms, 1e-5)
    assert close(got, want) and all(map(close, *caches))


def test_kv_calibrate_of_no_rows_and_of_a_strided_cache():
    nothing, k = torch.zeros(0, dtype=torch.int64), torch.zeros(2, 4, 2, 8)
    args = torch.zeros(0, 64), nothing, nothing, torch.zeros(9, 2, 8), k, k.clone(), None, None, 1e-5
    assert few.kv_calibrate(*args).shape == (0, 4, 8)
    strided = torch.zeros(2, 4, 4, 8)[:, :, ::2]
    assert few.kv_calibrate(*args[:4], strided, strided, *args[6:]) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pages", [[0, 1, 2, 3], [2, 3, 4, 5], [5, 0, 3, 1]])
@pytest.mark.parametrize("parents", [[], [0, 1, 2], [0, 0, 1, 1, 3, 0]])
@pytest.mark.parametrize("fused", [False, True])
def test_tree_attention(dtype, pages, parents, fused, monkeypatch):
    if fused:  # large products must not reach numpy, whose BLAS would wake its own threads
        monkeypatch.setattr(few, "NUMPY_PRODUCTS", 0)
        monkeypatch.setattr(few.np, "matmul", None)
    T, prefix, Hq, Hkv, D, page = len(parents) + 1, 7, 4, 2, 8, 4
    k, v = (randn(6, page, Hkv, D, dtype=dtype, seed=s) for s in (1, 2))
    q, words = randn(T, Hq, D, dtype=dtype), ancestor_words(torch.tensor(parents, dtype=torch.int64))
    table = torch.tensor([pages], dtype=torch.int32)
    sizes = (torch.tensor([n], dtype=torch.int32) for n in (prefix + T, T))
    args = (q, k, v, table, *sizes, torch.tensor([0, T], dtype=torch.int32), words, D**-0.5)
    want = tree_attention_ref(*args)
    got = few.tree_attention(*args, True)
    if pages == sorted(pages):
        assert all(map(close, got, want))
        assert close(few.tree_attention(*args, False)[0], want[0])
    else:
        assert got is None
    assert few.tree_attention(q.half(), k.half(), v.half(), *args[3:], True) is None
    strided = torch.stack((k, v), -2).flatten(2, 3)[:, :, ::2]
    assert few.tree_attention(q, strided, strided, *args[3:], True) is None


def side_by_side(B, parents, prefix=7, page=4, dtype=torch.float64):
    """The rows of one tree in B layers of a cache of five, two pages to spare in each."""
    T, Hq, Hkv, D, pages = len(parents) + 1, 4, 2, 8, 5
    k, v = (randn(5 * pages, page, Hkv, D, dtype=dtype, seed=s) for s in (1, 2))
    q, words = randn(B * T, Hq, D, dtype=dtype), ancestor_words(torch.tensor(parents, dtype=torch.int64))
    table = torch.arange(pages, dtype=torch.int32) + pages * torch.arange(1, B + 1, dtype=torch.int32)[:, None]
    sizes = (torch.full((B,), n, dtype=torch.int32) for n in (prefix + T, T))
    bounds = torch.arange(0, B * T + 1, T, dtype=torch.int32)
    return [q, k, v, table, *sizes, bounds, words.repeat(B, 1), D**-0.5]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("B", [2, 4])
@pytest.mark.parametrize("parents", [[], [0, 0, 1, 1, 3, 0]])
def test_tree_attention_of_layers_side_by_side(dtype, B, parents):
    args = side_by_side(B, parents, dtype=dtype)
    want = tree_attention_ref(*args)
    assert all(map(close, few.tree_attention(*args, True), want))
    assert close(few.tree_attention(*args, False)[0], want[0])


def test_sequences_that_differ_are_left_to_the_op(monkeypatch):
    """In length, window, number of rows, words, or pages that are not evenly apart, or too few."""
    good = side_by_side(3, [0, 0])
    assert few.tree_attention(*good, True) is not None
    for at, change in [
        (3, lambda table: table[[0, 2, 1]]),
        (3, lambda table: table[[0, 1, 1]]),
        (3, lambda table: table + torch.tensor([[0], [0], [1]], dtype=torch.int32)),
        (3, lambda table: table + torch.tensor([0, 0, 1, 1, 1], dtype=torch.int32)),
        (3, lambda table: table[0] + torch.arange(3, dtype=torch.int32)[:, None]),  # pages in common
        (3, lambda table: table + 8),  # beyond the cache's end, as evenly spaced
        (4, lambda lengths: lengths + torch.tensor([0, 0, 1], dtype=torch.int32)),
        (5, lambda windows: windows - torch.tensor([0, 1, 0], dtype=torch.int32)),
        (6, lambda bounds: bounds + torch.tensor([0, 1, 0, 0], dtype=torch.int32)),
        (7, lambda words: words.index_fill(0, torch.tensor([5]), 1)),
    ]:
        args = list(good)
        args[at] = change(args[at])
        assert few.tree_attention(*args, True) is None, (at, args[at])
    monkeypatch.setattr(few, "NUMPY_PRODUCTS", 3 * 2 * 8 * 10)  # one KV head's of a sequence: t * G * D * S
    assert few.tree_attention(*good, True) is None
    monkeypatch.setattr(few, "NUMPY_PRODUCTS", 3 * 2 * 8 * 10 + 1)
    assert few.tree_attention(*good, True) is not None


def test_columns_of_the_table_that_no_sequence_reaches_do_not_count():
    args = side_by_side(3, [0, 0])
    assert args[3].shape[1] == 5 and args[4].tolist() == [10] * 3  # of pages of 4
    args[3][:, 3:] = torch.arange(6, dtype=torch.int32).view(3, 2) % 4
    assert all(map(close, few.tree_attention(*args, True), tree_attention_ref(*args)))


def test_sequences_without_rows_or_columns_and_narrow_tables_are_left_to_the_op():
    q, k, v, table, lengths, windows, bounds, words, scale = side_by_side(2, [0, 0])
    i32 = torch.int32
    empty_first = torch.tensor([0, 5], dtype=i32), torch.tensor([0, 3], dtype=i32), torch.tensor([0, 0, 3], dtype=i32)
    args = q[:3], k, v, table, *empty_first, words[:3], scale
    assert few.tree_attention(*args, True) is None
    assert all(map(torch.equal, tree_attention(*args), tree_attention_ref(*args)))
    one_row = q[:1], k, v, table, lengths, windows, torch.tensor([0, 0, 1], dtype=i32), words[:1], scale
    assert few.tree_attention(*one_row, True) is None
    assert few.tree_attention(q, k, v, table[:, :2], lengths, windows, bounds, words, scale, True) is None
    assert few.tree_attention(q, k, v, table - 7, lengths, windows, bounds, words, scale, True) is None
    assert few.tree_attention(q, k, v, table, lengths, windows, bounds[:2], words, scale, True) is None
    alone = side_by_side(1, [0, 0])
    assert few.tree_attention(*alone, True) is not None
    alone[6] = torch.tensor([0, 1, 3], dtype=i32)
    assert few.tree_attention(*alone, True) is None
    nobody = table[:0], lengths[:0], windows[:0], bounds[:1], words, scale, True
    assert few.tree_attention(q, k, v, *nobody) is None


def test_many_rows_half_types_and_bad_shapes_are_left_to_the_op():
    x, weight = torch.zeros(few.FEW_ROWS + 1, 8), torch.ones(1, 8)
    assert few.residual_merge(x, x[None], weight, 1e-5) is None
    x = x[:4]
    assert few.residual_merge(x, x[None], weight, 1e-5) is not None
    for bad in (x.bfloat16(), x[:, :4], x.double()):
        assert few.residual_merge(bad, x[None], weight, 1e-5) is None
    assert few.residual_merge(x, x, weight, 1e-5) is None
    assert few.residual_merge(x, x[None], weight[0], 1e-5) is None
    assert few.residual_merge(x.clone().requires_grad_(), x[None], weight, 1e-5) is None
    for last in (x[:2], x.double(), x.clone().requires_grad_()):
        assert few.residual_merge(x, x[None], weight, 1e-5, last) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [1, 5, few.FEW_ROWS + 1])
def test_add_norm(dtype, T):
    from specker.kernels.merge import add_norm

    x, delta, w = randn(T, 24, dtype=dtype), randn(T, 24, dtype=dtype, seed=1), randn(24, dtype=dtype, seed=2)
    for deltas, one in ((delta[None], delta), (x[None][:0], None)):
        y, normed = residual_merge_ref(x, deltas, w[None], 1e-5)
        got = add_norm(x, one, w, 1e-5)
        assert close(got[0], y) and close(got[1], normed[0])
