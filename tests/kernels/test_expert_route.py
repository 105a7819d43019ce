"""expert_route: its reference and its kernels in Triton's interpreter against sorting in Python and float64."""

import importlib
import math

import pytest
import torch
from compile_only import compilations
from formulas import randn
from reads_only import reads

from specker.kernels.expert_route import expert_route, expert_route_cost, expert_route_ref

op = importlib.import_module("specker.kernels.expert_route")
# T, X, k: one of one; all chosen; odd sizes; Mixtral; Qwen3-30B-A3B; the most that the kernels serve.
SIZES = [(1, 1, 1), (5, 6, 6), (7, 13, 3), (1, 8, 2), (9, 128, 8), (3, 512, 16), (0, 8, 2)]


def logits_of(T, X, dtype=torch.float32):
    """With equal ones in most rows."""
    return (3 * randn(T, X)).round(decimals=1 if X > 8 else 0).to(dtype)


def formula(logits, k, normalise, scoring="softmax", bias=None, scale=1.0, eps=0.0):
    T, X = logits.shape
    if bias is not None and scoring == "softmax":
        logits, bias = logits + bias, None
    p = logits.double().sigmoid() if scoring == "sigmoid" else logits.double().softmax(-1)
    rank = logits if bias is None else p + bias
    experts = [sorted(range(X), key=lambda i, row=row: (-row[i], i))[:k] for row in rank.tolist()]
    scores = torch.stack([p[t, row] for t, row in enumerate(experts)]) if T else p[:, :k]
    flat = [i for row in experts for i in row]
    order = sorted(range(T * k), key=lambda c: (flat[c], c))
    starts = [sum(i < x for i in flat) for x in range(X + 1)]
    scores = scale * (scores / (scores.sum(-1, keepdim=True) + eps) if normalise else scores)
    return torch.tensor(experts).view(T, k), scores, torch.tensor(order), torch.tensor(starts)


def check(got, want, eps):
    for a, b in zip(got[:1] + got[2:], want[:1] + want[2:], strict=True):
        assert a.dtype == torch.int32 and a.tolist() == b.tolist()
    assert got[1].shape == want[1].shape and bool(((got[1].double() - want[1]).abs() <= 32 * eps * want[1]).all())


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_route(poisoned, size, normalise):
    T, X, k = size
    for dtype in (torch.float64, torch.float32):
        logits = logits_of(T, X, dtype)
        got = expert_route(logits, k, normalise)
        assert got[1].dtype == dtype
        check(got, formula(logits, k, normalise), torch.finfo(dtype).eps)
    check(op.launch(logits, k, normalise), formula(logits, k, normalise), torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("size", SIZES)
def test_biased_logits(poisoned, size):
    """A bias that changes the choice and the scores, also of logits that are to be added up."""
    T, X, k = size
    bias = (torch.arange(X) * 5 % 7 / 2).float()
    for normalise in (True, False):
        logits, how = logits_of(T, X), (None, "softmax", bias, 1.5)
        want = formula(logits, k, normalise, *how[1:])
        for route in (expert_route, op.launch):
            for given in (logits, torch.stack([logits, torch.zeros_like(logits)])):
                check(route(given, k, normalise, *how), want, torch.finfo(torch.float32).eps)
        assert T < 2 or want[0].tolist() != formula(logits, k, normalise)[0].tolist()


@pytest.mark.parametrize("size", SIZES)
def test_sigmoid(poisoned, size):
    """With a bias that changes the choice, and without one. An eps as large as the scores would not go unnoticed."""
    T, X, k = size
    for dtype in (torch.float64, torch.float32):
        logits, bias = logits_of(T, X, dtype), (torch.arange(X) * 5 % 7 / 8).to(dtype)
        plain = formula(logits, k, True, "sigmoid")
        for normalise, own, scale, eps in (
            (True, bias, 2.5, 0.25),
            (False, bias, 0.5, 0.25),
            (True, None, 1.0, 0.0),
            (False, None, 1.0, 0.0),
        ):
            how = logits, k, normalise, None, "sigmoid", own, scale, eps
            want = formula(logits, k, normalise, "sigmoid", own, scale, eps)
            got = expert_route(*how)
            assert got[1].dtype == dtype
            check(got, want, torch.finfo(dtype).eps)
            if dtype == torch.float32:
                check(op.launch(*how), want, torch.finfo(dtype).eps)
            assert own is None or k == X or not T or not torch.equal(want[0], plain[0])


def test_the_bias_is_no_part_of_the_scores():
    """The case of one row that can be computed by hand: e ** z is 1, 3, 1 / 3."""
    logits, bias = torch.tensor([[0.0, math.log(3), -math.log(3)]]), torch.tensor([0.0, -0.5, 1.0])
    for route in (expert_route_ref, op.launch):
        experts, scores, *_ = route(logits, 2, True, None, "sigmoid", bias, 3.0, 0.25)
        assert experts.tolist() == [[2, 0]]
        assert scores[0].tolist() == pytest.approx([0.75, 1.5])
        assert route(logits, 2, False, None, "sigmoid", bias)[1][0].tolist() == pytest.approx([0.25, 0.5])
        assert route(logits, 2, False, None, "sigmoid", None)[0].tolist() == [[1, 0]]


@pytest.mark.parametrize("T", [3, 20])
def test_logits_that_are_to_be_added_up(poisoned, T):
    """In order, to the bits of the sum: few choices, and more than the last program puts in order."""
    parts = torch.stack([logits_of(T, 13), 1e4 * randn(T, 13, seed=2).float(), -1e4 * randn(T, 13, seed=2).float()])
    whole = (parts[0] + parts[1]) + parts[2]
    assert not torch.equal(whole, parts[0] + (parts[1] + parts[2]))
    bias = (torch.arange(13) * 5 % 7 / 8).float()
    for route in (expert_route_ref, op.launch):
        for how in ((), (None, "sigmoid", bias, 2.0, 1e-6)):
            for got, want in zip(route(parts, 4, True, *how), route(whole, 4, True, *how), strict=True):
                assert torch.equal(got, want)
    check(expert_route(parts, 4), formula(whole, 4, True), torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_of_idle_sequences_have_the_experts_of_row_0(poisoned, dtype):
    """Few choices and many, with partial logits too; the other rows keep their bits."""
    for T, B, k in ((6, 3, 2), (40, 4, 4)):
        logits = logits_of(T, 13, dtype)
        idle = torch.tensor([n in (1, 3) for n in range(B)])
        rows = idle.repeat_interleave(T // B)
        taken = torch.where(rows[:, None], logits[:1], logits)
        plain = expert_route_ref(logits, k)
        for route in (expert_route, *([op.launch] if dtype == torch.float32 else [])):
            for given in (logits, torch.stack([logits, torch.zeros_like(logits)])):
                got = route(given, k, True, idle)
                check(got, formula(taken, k, True), torch.finfo(dtype).eps)
                assert torch.equal(got[0][~rows], plain[0][~rows]) and not torch.equal(got[0], plain[0])
                bias = (torch.arange(13) * 5 % 7 / 8).to(dtype)
                want = formula(taken, k, True, "sigmoid", bias)
                check(route(given, k, True, idle, "sigmoid", bias), want, torch.finfo(dtype).eps)


def test_the_last_program_puts_few_choices_in_order(launched):
    for T, k in ((8, 8), (64, 1), (9, 8)):
        logits = logits_of(T, 60)
        check(op.launch(logits, k, True), formula(logits, k, True), torch.finfo(torch.float32).eps)
    assert [name for name, _ in launched] == ["_expert_route_kernel"] * 3 + ["_expert_rows_kernel"]


def test_choices_of_several_blocks(poisoned):
    """1,050 choices are two blocks, the second one short."""
    logits = logits_of(350, 5)
    check(op.launch(logits, 3, True), formula(logits, 3, True), torch.finfo(torch.float32).eps)


def test_zeros_infinities_and_nan_rank_alike():
    """-0 equals 0, so the lower id goes first; NaN of either sign goes first of all."""
    nan = math.nan
    logits = torch.tensor(
        [
            [-0.0, 0.0, -1.0, -0.0, 0.0],
            [-math.inf, 3.0, -math.inf, -math.inf, 2.0],
            [math.inf, 1.0, 0.0, 2.0, 3.0],
            [1.0, nan, 2.0, -nan, 0.0],
            [-math.inf] * 5,
        ]
    )
    logits[3, 3] = -logits[3, 1]
    assert logits[3, 3].view(torch.int32) != logits[3, 1].view(torch.int32)
    for route in (expert_route_ref, op.launch):
        experts, scores, *_ = route(logits, 4, True)
        assert experts.tolist() == [[0, 1, 3, 4], [1, 4, 0, 2], [0, 4, 3, 1], [1, 3, 2, 0], [0, 1, 2, 3]]
        assert scores[0].tolist() == [0.25] * 4 and scores[1, 2:].tolist() == [0.0] * 2
        assert scores[2:].isnan().all(1).tolist() == [True, True, True]
        for bias in (None, torch.zeros(5)):
            experts, scores, *_ = route(logits, 4, False, None, "sigmoid", bias)
            assert experts.tolist() == [[0, 1, 3, 4], [1, 4, 0, 2], [0, 4, 3, 1], [1, 3, 2, 0], [0, 1, 2, 3]]
            assert scores[0].tolist() == [0.5] * 4 and scores[1, 2:].tolist() == [0.0] * 2 and scores[2, 0] == 1
            assert scores[3].isnan().tolist() == [True, True, False, False] and scores[4].tolist() == [0.0] * 4
        assert route(logits, 4, True, None, "sigmoid", bias)[1][3].isnan().all()


def test_a_row_is_the_same_alone_and_among_others():
    logits = randn(20, 60, dtype=torch.float32)
    biased = None, "sigmoid", randn(60, seed=3, dtype=torch.float32) / 4
    for how in ((True,), (False,), (True, *biased), (False, *biased)):
        whole = op.launch(logits, 4, *how)
        for t in (0, 7, 19):
            alone = op.launch(logits[t : t + 1], 4, *how)
            assert torch.equal(alone[0][0], whole[0][t]) and torch.equal(alone[1][0], whole[1][t])


def test_reads_only_the_logits_and_the_bias(monkeypatch):
    around = torch.full((9 * 13,), math.nan)
    around[5:60] = logits_of(5, 11).flatten()
    logits = around[5:60].view(5, 11)
    want = formula(logits, 3, True)
    with reads(monkeypatch, logits):
        check(op.launch(logits, 3, True), want, torch.finfo(torch.float32).eps)
    bias = torch.full((20,), math.nan)
    bias[4:15] = torch.arange(11) * 5 % 7 / 8
    with reads(monkeypatch, logits, bias[4:15]):
        got = op.launch(logits, 3, True, None, "sigmoid", bias[4:15])
        check(got, formula(logits, 3, True, "sigmoid", bias[4:15]), torch.finfo(torch.float32).eps)
    wide = torch.cat((logits, logits * math.nan), dim=1)[:, :11]
    check(op.launch(wide, 3, True), want, torch.finfo(torch.float32).eps)


def test_more_than_the_kernels_serve():
    for X, k in ((513, 2), (40, 17)):
        logits = logits_of(3, X)
        assert not op._fits(op.Arguments(logits, k))
        check(expert_route(logits, k), formula(logits, k, True), torch.finfo(torch.float32).eps)
        bias = (torch.arange(X) * 5 % 7 / 8).float()
        assert not op._fits(op.Arguments(logits, k, True, None, "sigmoid", bias))
        got = expert_route(logits, k, True, None, "sigmoid", bias)
        check(got, formula(logits, k, True, "sigmoid", bias), torch.finfo(torch.float32).eps)
    assert op._fits(op.Arguments(logits_of(3, 512), 16))


def test_cost():
    assert expert_route_cost(torch.zeros(3, 8), 2) == (3 * 8 * 4 + 3 * 2 * 12 + 9 * 4, 3 * 8 * 5)
    biased = expert_route_cost(torch.zeros(3, 8), 2, True, None, "sigmoid", torch.zeros(8))
    assert biased == (3 * 8 * 4 + 8 * 4 + 3 * 2 * 12 + 9 * 4, 3 * 8 * 6)
    assert expert_route_cost(torch.zeros(4, 3, 8), 2) == (4 * 3 * 8 * 4 + 3 * 2 * 12 + 9 * 4, 3 * 8 * (5 + 3))


def test_registration():
    for T in (3, 0):
        for logits in (logits_of(T, 8), logits_of(8, T).T):
            torch.library.opcheck(torch.ops.specker.expert_route, (logits, 2, True))
        given = logits_of(T, 8), 2, True, None, "sigmoid", torch.arange(8.0), 2.5, 1e-6
        torch.library.opcheck(torch.ops.specker.expert_route, given)
    compiled = torch.compile(lambda z: expert_route(z, 2, False), fullgraph=True, backend="aot_eager")
    logits = logits_of(3, 8)
    for got, want in zip(compiled(logits), expert_route_ref(logits, 2, False), strict=True):
        assert torch.equal(got, want)


def launches():
    """Runs in a compiling process."""
    for T in (0, 1, 2, 16, 17, 64, 512):
        op.launch(torch.zeros(T, 128), 8, True)
    for T, B in ((2, 1), (4, 4), (6, 2), (32, 8), (34, 17)):
        op.launch(torch.zeros(T, 128), 8, True, torch.zeros(B + 1, dtype=torch.bool)[1:])
    for n in range(4):  # biases of layers, wherever they stand
        op.launch(torch.zeros(2, 30), 4, True, None, "sigmoid", torch.zeros(40)[n : n + 30], 1.0 + n, 1e-6)


def test_no_length_recompiles():
    """The router compiles for few choices and for many, with and without idle sequences, and for a bias."""
    assert compilations(__file__) == {"_expert_route_kernel": 5, "_expert_rows_kernel": 1}


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
def test_on_a_gpu(size):
    T, X, k = size
    for normalise in (True, False):
        logits = logits_of(T, X)
        got = [y.cpu() for y in expert_route(logits.cuda(), k, normalise)]
        check(tuple(got), formula(logits, k, normalise), torch.finfo(torch.float32).eps)
        bias = (torch.arange(X) * 5 % 7 / 8).float()
        got = [y.cpu() for y in expert_route(logits.cuda(), k, normalise, None, "sigmoid", bias.cuda(), 2.5, 0.25)]
        want = formula(logits, k, normalise, "sigmoid", bias, 2.5, 0.25)
        check(tuple(got), want, torch.finfo(torch.float32).eps)
