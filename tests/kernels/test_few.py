"""The numpy forms of the small ops equal their references, and decline calls that they do not support."""

import pytest
import torch
from formulas import randn
from torch.nn import functional as F

from specker.kernels import attention, linear
from specker.kernels.ancestors import ancestor_words
from specker.kernels.attention import _few_rows, tree_attention, tree_attention_ref
from specker.kernels.cpu import FEW_ROWS
from specker.kernels.kv import _kv_calibrate_few, kv_calibrate_ref
from specker.kernels.linear import row_linear
from specker.kernels.residual import _residual_merge_few, add_norm, residual_merge, residual_merge_ref

DTYPES = [torch.float32, torch.float64]


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
    got, want = _residual_merge_few(*args), residual_merge_ref(*args)
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
    got = _kv_calibrate_few(qkv, positions, slots, rope, *caches[0], *norms, 1e-5)
    want = kv_calibrate_ref(qkv, positions, slots, rope, *caches[1], *norms, 1e-5)
    assert close(got, want) and all(map(close, *caches))


def test_kv_calibrate_of_no_rows_and_of_a_strided_cache():
    nothing, k = torch.zeros(0, dtype=torch.int64), torch.zeros(2, 4, 2, 8)
    args = torch.zeros(0, 64), nothing, nothing, torch.zeros(9, 2, 8), k, k.clone(), None, None, 1e-5
    assert _kv_calibrate_few(*args).shape == (0, 4, 8)
    strided = torch.zeros(2, 4, 4, 8)[:, :, ::2]
    assert _kv_calibrate_few(*args[:4], strided, strided, *args[6:]) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pages", [[0, 1, 2, 3], [2, 3, 4, 5], [5, 0, 3, 1]])
@pytest.mark.parametrize("parents", [[], [0, 1, 2], [0, 0, 1, 1, 3, 0]])
@pytest.mark.parametrize("fused", [False, True])
def test_tree_attention(dtype, pages, parents, fused, monkeypatch):
    if fused:  # large products must not reach numpy, whose BLAS would start its own threads
        monkeypatch.setattr(attention, "NUMPY_PRODUCTS", 0)
        monkeypatch.setattr(attention.np, "matmul", None)
    T, prefix, Hq, Hkv, D, page = len(parents) + 1, 7, 4, 2, 8, 4
    k, v = (randn(6, page, Hkv, D, dtype=dtype, seed=s) for s in (1, 2))
    q, words = randn(T, Hq, D, dtype=dtype), ancestor_words(torch.tensor(parents, dtype=torch.int64))
    table = torch.tensor([pages], dtype=torch.int32)
    sizes = (torch.tensor([n], dtype=torch.int32) for n in (prefix + T, T))
    args = (q, k, v, table, *sizes, torch.tensor([0, T], dtype=torch.int32), words, D**-0.5)
    want = tree_attention_ref(*args)
    got = _few_rows(*args, True)
    if pages == sorted(pages):
        assert all(map(close, got, want))
        assert close(_few_rows(*args, False)[0], want[0])
    else:
        assert got is None
    assert _few_rows(q.half(), k.half(), v.half(), *args[3:], True) is None
    strided = torch.stack((k, v), -2).flatten(2, 3)[:, :, ::2]
    assert _few_rows(q, strided, strided, *args[3:], True) is None


def side_by_side(B, parents, prefix=7, page=4, dtype=torch.float64):
    """The rows of one tree in B layers of a cache with five, each with two spare pages."""
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
    assert all(map(close, _few_rows(*args, True), want))
    assert close(_few_rows(*args, False)[0], want[0])


def alone(args, b, with_lse=True):
    """Sequence b of a batch, as a batch of one."""
    q, k, v, table, lengths, windows, bounds, words, scale = args
    its, one = slice(int(bounds[b]), int(bounds[b + 1])), slice(b, b + 1)
    cu = torch.tensor([0, its.stop - its.start], dtype=torch.int32)
    its_own = q[its], k, v, table[one], lengths[one], windows[one], cu, words[its], scale
    return tree_attention(*its_own, with_lse=with_lse)


def assert_as_alone(args):
    """Every sequence has the same bits as alone, and the reference's values."""
    got, bounds = _few_rows(*args, True), args[6].tolist()
    assert all(map(close, got, tree_attention_ref(*args)))
    without = _few_rows(*args, False)
    assert torch.equal(without[0], got[0])
    for b in range(len(bounds) - 1):
        if bounds[b] < bounds[b + 1]:
            its = slice(bounds[b], bounds[b + 1])
            assert all(torch.equal(x[its], y) for x, y in zip(got, alone(args, b), strict=True)), b
            assert torch.equal(without[0][its], alone(args, b, False)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("products", [0, 100, 500, 1 << 18])
def test_a_batch_of_unlike_sequences(dtype, products, monkeypatch):
    """Different lengths, windows, row counts and trees, one sequence without rows and one with scattered pages;
    products are large for some, all or none. Memory that no sequence owns is poison."""
    monkeypatch.setattr(attention, "NUMPY_PRODUCTS", products)
    monkeypatch.setattr(attention, "FEW_ROWS", 5)  # the third has more
    Hq, Hkv, D, page = 4, 2, 8, 4
    trees = [[], [0, 0, 1], [0, 0, 1, 1, 3, 0], None, [0, 1]]
    prefixes, pages = [7, 13, 0, 4, 9], [[4, 5, 6], [8, 9, 10, 11, 12], [0, 1, 2], [3], [20, 7, 14, 18]]
    k, v = (torch.full((22, page, Hkv, D), float("nan"), dtype=dtype) for _ in range(2))
    table = torch.full((5, 8), 10**6, dtype=torch.int32)
    rows = [0 if tree is None else len(tree) + 1 for tree in trees]
    for b, mine in enumerate(pages):
        table[b, : len(mine)] = torch.tensor(mine)
        for cache, seed in ((k, b), (v, 50 + b)):
            whole = randn(len(mine) * page, Hkv, D, dtype=dtype, seed=seed)
            whole[prefixes[b] + rows[b] :] = float("nan")
            cache[mine] = whole.view(-1, page, Hkv, D)
    words = torch.cat([ancestor_words(torch.tensor(tree, dtype=torch.int64)) for tree in trees if tree is not None])
    sizes = ([p + n for p, n in zip(prefixes, rows, strict=True)], rows, [sum(rows[:b]) for b in range(6)])
    lengths, windows, bounds = (torch.tensor(x, dtype=torch.int32) for x in sizes)
    q = randn(sum(rows), Hq, D, dtype=dtype, seed=9)
    assert_as_alone([q, k, v, table[:, :6], lengths, windows, bounds, words, D**-0.5])


def test_sequences_that_differ_run_one_by_one(monkeypatch):
    """That is, in length, window, row count or words, or with pages unevenly or too closely spaced."""
    good = side_by_side(3, [0, 0])
    calls = []
    monkeypatch.setattr(
        attention, "_products", lambda *args, at=attention._products: calls.append(args[5]) or at(*args)
    )
    assert_as_alone(good)
    assert calls[0] == 3
    for at, change in [
        (3, lambda table: table[[0, 2, 1]]),
        (3, lambda table: table[[0, 1, 1]]),
        (3, lambda table: table + torch.tensor([[0], [0], [1]], dtype=torch.int32)),
        (3, lambda table: table + torch.tensor([0, 0, 1, 1, 1], dtype=torch.int32)),
        (3, lambda table: table[0] + torch.arange(3, dtype=torch.int32)[:, None]),  # shared pages
        (4, lambda lengths: lengths + torch.tensor([0, 0, 1], dtype=torch.int32)),
        (5, lambda windows: windows - torch.tensor([0, 1, 0], dtype=torch.int32)),
        (6, lambda bounds: bounds + torch.tensor([0, 1, 0, 0], dtype=torch.int32)),
        (7, lambda words: words.index_fill(0, torch.tensor([5]), 1)),
    ]:
        args = list(good)
        args[at] = change(args[at])
        calls.clear()
        assert_as_alone(args)
        assert 3 not in calls, (at, args[at])
    for products, first in ((3 * 2 * 8 * 10, []), (3 * 2 * 8 * 10 + 1, [3])):  # per KV head: t * G * D * S
        monkeypatch.setattr(attention, "NUMPY_PRODUCTS", products)
        calls.clear()
        assert_as_alone(good)
        assert calls[:1] == first


def test_unused_table_columns_do_not_count():
    args = side_by_side(3, [0, 0])
    assert args[3].shape[1] == 5 and args[4].tolist() == [10] * 3  # pages hold 4
    args[3][:, 3:] = torch.arange(6, dtype=torch.int32).view(3, 2) % 4
    assert all(map(close, _few_rows(*args, True), tree_attention_ref(*args)))


def test_sequences_without_rows_or_columns_and_narrow_tables():
    q, k, v, table, lengths, windows, bounds, words, scale = side_by_side(2, [0, 0])
    i32 = torch.int32
    empty_first = torch.tensor([0, 5], dtype=i32), torch.tensor([0, 3], dtype=i32), torch.tensor([0, 0, 3], dtype=i32)
    args = q[:3], k, v, table, *empty_first, words[:3], scale
    assert_as_alone(args)
    assert_as_alone((q[:1], k, v, table, lengths, windows, torch.tensor([0, 0, 1], dtype=i32), words[:1], scale))
    for cu in ([0, 4, 2], [1, 3, 6], [0, 3, 5]):
        assert (
            _few_rows(q, k, v, table[[1, 0]], lengths, windows, torch.tensor(cu, dtype=i32), words, scale, True) is None
        )
    assert _few_rows(q, k, v, table, lengths, windows, bounds[:2], words, scale, True) is None
    one = side_by_side(1, [0, 0])
    assert _few_rows(*one, True) is not None
    for shift in (-7, 40):  # pages outside the cache
        assert _few_rows(*one[:3], one[3] + shift, *one[4:], True) is None
    assert _few_rows(*one[:3], one[3][:, :2], *one[4:], True) is None
    one[6] = torch.tensor([0, 1, 3], dtype=i32)
    assert _few_rows(*one, True) is None
    nobody = table[:0], lengths[:0], windows[:0], bounds[:1], words, scale, True
    assert _few_rows(q, k, v, *nobody) is None


def test_many_rows_half_types_and_bad_shapes_are_left_to_the_op():
    x, weight = torch.zeros(FEW_ROWS + 1, 8), torch.ones(1, 8)
    assert _residual_merge_few(x, x[None], weight, 1e-5) is None
    x = x[:4]
    assert _residual_merge_few(x, x[None], weight, 1e-5) is not None
    for bad in (x.bfloat16(), x[:, :4], x.double()):
        assert _residual_merge_few(bad, x[None], weight, 1e-5) is None
    assert _residual_merge_few(x, x, weight, 1e-5) is None
    assert _residual_merge_few(x, x[None], weight[0], 1e-5) is None
    assert _residual_merge_few(x.clone().requires_grad_(), x[None], weight, 1e-5) is None
    for last in (x[:2], x.double(), x.clone().requires_grad_()):
        assert _residual_merge_few(x, x[None], weight, 1e-5, last) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [1, 5, FEW_ROWS + 1])
def test_add_norm(dtype, T):
    x, delta, w = randn(T, 24, dtype=dtype), randn(T, 24, dtype=dtype, seed=1), randn(24, dtype=dtype, seed=2)
    for deltas, one in ((delta[None], delta), (x[None][:0], None)):
        y, normed = residual_merge_ref(x, deltas, w[None], 1e-5)
        got = add_norm(x, one, w, 1e-5)
        assert close(got[0], y) and close(got[1], normed[0])


@pytest.mark.parametrize("strict", [True, False])
def test_a_graph_holds_the_op_and_not_its_cpu_form(strict):
    class Layer(torch.nn.Module):
        def forward(self, x, w):
            y, normed = residual_merge(x, x[None], w[None], 1e-5)
            return add_norm(y, normed[0], w, 1e-5)

    x, w = randn(2, 8), randn(8, seed=1)
    program = torch.export.export(Layer(), (x, w), strict=strict)
    ops = [node.target for node in program.graph.nodes if "specker" in str(node.target)]
    assert ops == [torch.ops.specker.residual_merge.default] * 2
    assert all(map(close, program.module()(x, w), Layer()(x, w)))


@pytest.mark.parametrize("epilogue", ["none", "silu_mul"])
@pytest.mark.parametrize("bias", [False, True])
def test_row_linear_takes_float32_rows_beside_bfloat16_weights(epilogue, bias):
    torch.manual_seed(0)
    for w in (torch.randn(600, 512).bfloat16(), torch.randn(30, 33).bfloat16()):  # compiled; torch's own
        x, b = torch.randn(5, w.shape[1]), torch.randn(len(w)) if bias else None
        y = F.linear(x, w.float(), b)
        if epilogue == "silu_mul":
            gate, up = y.chunk(2, dim=-1)
            y = F.silu(gate) * up
        got = row_linear(x, w, b, epilogue)
        assert got.dtype == torch.float32 and (got - y).abs().max() < 0.02 * y.abs().max()


def test_a_cpu_without_bfloat16_products_rounds_only_the_weight(monkeypatch):
    w, x = torch.randn(30, 33).bfloat16(), torch.randn(5, 33)
    monkeypatch.setattr(linear, "multiplies_bfloat16", lambda: False)
    torch.testing.assert_close(row_linear(x, w), x @ w.float().T)
    monkeypatch.setattr(linear, "multiplies_bfloat16", lambda: True)
    assert (row_linear(x, w) - x @ w.float().T).abs().max() > 1e-3
