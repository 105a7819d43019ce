"""residual_merge: reference and kernel against the formula in float64, and its contract."""

import importlib

import pytest
import torch
from compile_only import compilations
from formulas import close, randn
from recorded import kernels, recording

from specker.kernels.residual_merge import add_norm, launch, residual_merge, residual_merge_cost, residual_merge_ref
from specker.kernels.vocab_topk import vocab_topk

module = importlib.import_module("specker.kernels.residual_merge")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(0, 1), (1, 0), (1, 1), (2, 1), (1, 4), (3, 2)]
EPS = 1e-5


def inputs(T, E, P, Q, dtype, device="cpu"):
    x, deltas = randn(T, E, dtype=dtype, device=device), randn(P, T, E, dtype=dtype, seed=1, device=device)
    return x, deltas, randn(Q, E, dtype=dtype, seed=2, device=device) if Q else None


def apart(x, deltas, weight):
    """The arguments with the last delta passed separately."""
    return x, deltas[:-1], weight, EPS, deltas[-1]


def formula(x, deltas, weight, y):
    """The sum, and the norms of `y`, the rounded sum, in float64."""
    norm = y.double() / (y.double().square().mean(-1, keepdim=True) + EPS).sqrt()
    weight = x.new_empty(0, x.shape[1]) if weight is None else weight
    return x.double() + deltas.double().sum(0), norm * weight.double()[:, None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("P", "Q"), SHAPES)
@pytest.mark.parametrize("op", [residual_merge, residual_merge_ref])
def test_residual_merge(op, dtype, P, Q):
    args = inputs(5, 24, P, Q, dtype)
    y, normed = op(*args, EPS)
    want, norm = formula(*args, y)
    assert close(y, want, dtype, 2) and y.data_ptr() != args[0].data_ptr()
    assert close(normed, norm, dtype, 4)
    assert residual_merge_cost(*args, EPS)[0] == ((2 + P + Q) * 120 + Q * 24) * y.element_size()
    if P:
        assert all(map(torch.equal, op(*apart(*args)), (y, normed)))
        assert residual_merge_cost(*apart(*args)) == residual_merge_cost(*args, EPS)


def test_who_reads_the_norms_weight_early():
    """A decoder layer, whose weight is its model's; not vocab_topk, which may have just cast it."""
    with recording() as log:
        x, weight = torch.empty(3, 64).half(), torch.empty(64).half()
        residual_merge(x, x[None], weight[None], EPS)
        residual_merge(x, x[None], weight[None], EPS, constant=True)
        residual_merge(x, x[None], None, EPS)
        add_norm(x, x, weight, EPS)
        add_norm(x, x.float()[None], weight, EPS)
        vocab_topk(x, torch.empty(30, 64).half(), None, 3, (weight.float(), EPS))
    merges = [name for name in kernels(log) if "residual_merge" in name]
    assert [name.endswith(" written") for name in merges] == [True, False, False, False, False, True]
    with recording(), pytest.raises(ValueError, match="norm_weight must be"):
        residual_merge(torch.empty(3, 64), torch.empty(1, 3, 64), torch.empty(1, 60), EPS, constant=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [1, 5, 65])
def test_add_norm(dtype, T):
    """The form of a decoder layer: one delta or none, one weight. Without a delta the stream is not copied."""
    x, delta, weight = randn(T, 24, dtype=dtype), randn(T, 24, dtype=dtype, seed=1), randn(24, dtype=dtype, seed=2)
    for deltas, one in ((delta[None], delta), (x[None][:0], None)):
        want = residual_merge_ref(x, deltas, weight[None], EPS)
        y, normed = add_norm(x, one, weight, EPS)
        assert torch.equal(y, want[0]) and torch.equal(normed, want[1][0])
    assert y is x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("P", "Q"), SHAPES)
@pytest.mark.parametrize(("T", "E"), [(0, 8), (1, 1), (3, 7), (2, 64), (5, 1023)])
def test_kernel(poisoned, dtype, P, Q, T, E):
    args = inputs(T, E, P, Q, dtype)
    y, normed = launch(*args, EPS)
    want, norm = formula(*args, y)
    assert y.dtype == normed.dtype == dtype
    assert close(y, want, dtype, 1) and close(normed, norm, dtype, 2)
    if P:
        assert all(map(torch.equal, launch(*apart(*args)), (y, normed)))


@pytest.mark.parametrize("op", [residual_merge_ref, launch])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("S", "Q", "E"), [(1, 1, 7), (4, 0, 64), (4, 2, 1023)])
def test_the_splits_of_one_delta(poisoned, op, dtype, S, Q, E):
    """Bit for bit what the sum in order, rounded, gives as a delta."""
    x, _, weight = inputs(3, E, 1, Q, dtype)
    parts, last = randn(S, 3, E, seed=4, dtype=torch.float32), randn(3, E, dtype=dtype, seed=5)
    total = torch.zeros(3, E)
    for part in parts:
        total = total + part
    delta = total.to(dtype).unsqueeze(0)
    for other in (None, last):
        got = op(x, parts, weight, EPS, other, True)
        assert all(map(torch.equal, got, op(x, delta, weight, EPS, other, False)))
    if dtype == torch.float16 and S > 1:  # a sum that is not rounded differs
        unrounded = (x.float() + total).to(dtype)
        assert not torch.equal(op(x, parts, weight, EPS, None, True)[0], unrounded)


def test_the_sums_of_splits_are_float32():
    x = torch.zeros(2, 4, dtype=torch.float16)
    with pytest.raises(ValueError, match="the sums of splits must be float32"):
        residual_merge(x, x.unsqueeze(0), None, EPS, split=True)
    assert residual_merge_cost(x, torch.zeros(3, 2, 4), None, EPS, split=True)[0] == 2 * 8 * 2 + 3 * 8 * 4


@pytest.mark.parametrize("Q", [0, 1, 3])
def test_a_row_too_long_for_the_registers(poisoned, monkeypatch, Q):
    monkeypatch.setattr(module, "MAX_BLOCK", 16)
    module._variant.cache_clear()
    try:
        args = inputs(3, 45, 2, Q, torch.float16)
        y, normed = launch(*args, EPS)
        assert module._variant(torch.float16, 2, Q, 45).constexprs["BLOCK"] == 16
    finally:
        module._variant.cache_clear()
    want, norm = formula(*args, y)
    assert close(y, want, torch.float16, 1) and close(normed, norm, torch.float16, 2)


@pytest.mark.parametrize("op", [residual_merge_ref, launch])
def test_the_sum_is_rounded_once_and_in_order(op):
    x = torch.full((1, 8), 2048.0, dtype=torch.float16)  # next value 2050: a sum rounded twice stays 2048
    deltas = torch.ones(2, 1, 8, dtype=torch.float16)
    assert op(x, deltas, None, EPS)[0].tolist() == [[2050.0] * 8]
    x, deltas = torch.full((1, 8), 1e8), torch.tensor([-1e8, 1.0]).view(2, 1, 1).expand(2, 1, 8).contiguous()
    assert op(x, deltas, None, EPS)[0].tolist() == [[1.0] * 8]
    assert op(x, deltas.flip(0), None, EPS)[0].tolist() == [[0.0] * 8]
    assert op(*apart(x, deltas, None))[0].tolist() == [[1.0] * 8]
    assert op(*apart(x, deltas.flip(0), None))[0].tolist() == [[0.0] * 8]


def test_the_norm_is_of_the_rounded_sum_and_rounded_once():
    x, deltas, weight = inputs(4, 256, 1, 1, torch.float16)
    y, normed = launch(x, deltas, weight, EPS)
    want = formula(x, deltas, weight, y)[1].half()
    assert (normed == want).double().mean() > 0.995  # the rest is within float32's error of a tie


def test_views_at_an_offset_surrounded_by_nan():
    x, deltas, weight = inputs(3, 20, 2, 2, torch.float32)
    want = launch(x, deltas, weight, EPS)

    def inside(tensor):
        around = torch.full((tensor.numel() + 9,), float("nan"))
        around[5 : 5 + tensor.numel()] = tensor.flatten()
        return around[5 : 5 + tensor.numel()].view(tensor.shape)

    got = launch(inside(x), inside(deltas), inside(weight), EPS)
    assert all(map(torch.equal, got, want))
    strided = [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in (x, deltas, weight)]
    assert not strided[0].is_contiguous()
    assert all(map(torch.equal, launch(*strided, EPS), want))
    for last in (inside(deltas[1]), strided[1][1]):
        assert all(map(torch.equal, launch(x, deltas[:1], weight, EPS, last), want))


@pytest.mark.parametrize("T", [1, 2, 7, 64, 65])
def test_a_row_is_the_same_alone_and_among_others(T):
    x, deltas, weight = inputs(65, 40, 2, 2, torch.float16)
    y, normed = launch(x[:T], deltas[:, :T].contiguous(), weight, EPS)
    for t in {0, T // 2, T - 1}:
        alone, alone_normed = launch(x[t : t + 1], deltas[:, t : t + 1].contiguous(), weight, EPS)
        assert torch.equal(y[t : t + 1], alone) and torch.equal(normed[:, t : t + 1], alone_normed)


def test_registration():
    for P, Q in (*SHAPES[:2], SHAPES[-1]):
        args = inputs(3, 8, P, Q, torch.float32)
        torch.library.opcheck(torch.ops.specker.residual_merge, (*args, EPS))
        if P:
            torch.library.opcheck(torch.ops.specker.residual_merge, apart(*args))
        x, *rest = args
        torch.library.opcheck(torch.ops.specker.residual_merge, (x.T.contiguous().T, *rest, EPS))


def test_fullgraph():
    args = inputs(3, 8, 2, 2, torch.float32)
    compiled = torch.compile(lambda *a: residual_merge(*a, EPS), fullgraph=True, backend="aot_eager")
    y, normed = compiled(*args)
    want, norm = formula(*args, y)
    assert close(y, want, torch.float32, 2) and close(normed, norm, torch.float32, 4)


def launches():
    """Runs in a compiling process: one model, many lengths, buffers at any offset of 16 bytes."""
    for T in (1, 2, 16, 17, 64, 8192):
        x = torch.zeros(1, 64).bfloat16().expand(T, 64)
        launch(x, x.expand(2, T, 64), torch.ones(1, 64).bfloat16(), EPS)
        launch(x, x.expand(1, T, 64), torch.ones(1, 64).bfloat16(), EPS, x)


@pytest.mark.parametrize("strict", [True, False])
def test_a_graph_holds_the_op_and_not_its_reference(strict):
    class Layer(torch.nn.Module):
        def forward(self, x, weight):
            y, normed = residual_merge(x, x[None], weight[None], EPS)
            return add_norm(y, normed[0], weight, EPS)

    x, weight = randn(2, 8), randn(8, seed=1)
    program = torch.export.export(Layer(), (x, weight), strict=strict)
    ops = [node.target for node in program.graph.nodes if "specker" in str(node.target)]
    assert ops == [torch.ops.specker.residual_merge.default] * 2
    assert all(map(torch.equal, program.module()(x, weight), Layer()(x, weight)))


def test_no_length_recompiles():
    assert compilations(__file__) == {"_residual_merge_kernel": 2}


def test_refuses():
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="expected x"):
        residual_merge(x, torch.zeros(2, 8), None, EPS)
    with pytest.raises(ValueError, match=r"last \[T, E\]: .* last \(8,\)"):
        residual_merge(x, torch.zeros(1, 2, 8), None, EPS, torch.zeros(8))
    for bad in ((torch.zeros(1, 2, 8).half(),), (torch.zeros(1, 2, 8), torch.zeros(2, 8).half())):
        with pytest.raises(ValueError, match="must have x's dtype"):
            residual_merge(x, bad[0], None, EPS, *bad[1:])
    with pytest.raises(ValueError, match="last must be on cpu, got meta"):
        residual_merge(x, torch.zeros(1, 2, 8), None, EPS, torch.zeros(2, 8, device="meta"))
    with pytest.raises(ValueError, match="norm_weight must be"):
        residual_merge(x, torch.zeros(1, 2, 8), torch.zeros(8), EPS)
    with pytest.raises(ValueError, match="deltas must be on cpu, got meta"):
        residual_merge(x, torch.zeros(1, 2, 8, device="meta"), None, EPS)
    with pytest.raises(ValueError, match="norm_weight must be on cpu, got meta"):
        residual_merge(x, torch.zeros(1, 2, 8), torch.zeros(1, 8, device="meta"), EPS)


@pytest.mark.gpu
@pytest.mark.parametrize(("P", "Q"), SHAPES)
@pytest.mark.parametrize("E", [1023, 4096, 5120, 18432])
def test_bfloat16_is_as_good_as_torch(P, Q, E):
    x, deltas, weight = inputs(33, E, P, Q, torch.bfloat16, "cuda")
    y, normed = residual_merge(x, deltas, weight, EPS)
    exact = x.double() + deltas.double().sum(0)
    torch_y, torch_normed = residual_merge_ref(x, deltas, weight, EPS)
    assert (y - exact).abs().max() <= 2 * (torch_y - exact).abs().max()
    if Q:
        # each norm is compared with the formula for the same rounded sum
        ours, theirs = (formula(x, deltas, weight, rounded)[1] for rounded in (y, torch_y))
        assert (normed - ours).abs().max() <= 2 * (torch_normed - theirs).abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("E", [4096, 18432])
def test_bfloat16_rows_are_invariant(E):
    x, deltas, weight = inputs(65, E, 2, 2, torch.bfloat16, "cuda")
    whole = residual_merge(x, deltas, weight, EPS)
    for T in (1, 2, 7, 64, 65):
        for first in {0, 65 - T}:
            rows = slice(first, first + T)
            y, normed = residual_merge(x[rows], deltas[:, rows], weight, EPS)
            assert torch.equal(y, whole[0][rows]) and torch.equal(normed, whole[1][:, rows])
