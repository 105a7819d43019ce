"""expert_linear: its reference and its kernel in Triton's interpreter (`gpu`: on a device, in bfloat16) against the
formula in float64, and its contract."""

import importlib
import math

import cases
import pytest
import torch
from compile_only import compilations
from formulas import close, randn
from reads_only import reads
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.errors import InterpreterError

from specker.kernels.expert_linear import expert_linear, expert_linear_cost, expert_linear_ref
from specker.kernels.quant import quantised
from specker.kernels.residual_merge import residual_merge

op, linear = (importlib.import_module(f"specker.kernels.{name}") for name in ("expert_linear", "row_linear"))
HALF = [torch.float32, torch.float16]
EPILOGUES = ["none", "silu_mul", "sum", "split"]
# T, X, k, O, E: one of one; one row; odd sizes; all chosen; whole tiles; K in several splits, the last one short; more
# rows of an expert than a tile has.
SIZES = [
    (1, 1, 1, 2, 1),
    (1, 9, 3, 34, 40),
    (6, 7, 2, 46, 33),
    (3, 4, 4, 64, 128),
    (2, 3, 2, 40, 1100),
    (70, 5, 2, 10, 24),
]


def routing(T, X, k, seed=0, of=None):
    """Random experts, of `of` if it is given, and scores; the first expert gets most of the rows."""
    z = randn(T, X, seed=seed) - 9 * torch.arange(X).ge(of or X) + 2 * torch.arange(X).eq(0)
    experts = z.topk(k).indices.int()
    return rows_of(experts, X), torch.rand(T, k, generator=torch.Generator().manual_seed(seed))


def rows_of(experts, X):
    flat = experts.flatten().tolist()
    order = sorted(range(len(flat)), key=lambda c: (flat[c], c))
    starts = [sum(e < x for e in flat) for x in range(X + 1)]
    return experts, torch.tensor(order, dtype=torch.int32), torch.tensor(starts, dtype=torch.int32)


def inputs(size, dtype, each=False, device="cpu"):
    T, X, k, O, E = size
    x = randn(*((T, k, E) if each else (T, E)), dtype=dtype, device=device)
    return x, (randn(X, O, E, seed=1) / math.sqrt(E)).to(device, dtype)


def formula(x, weight, experts, epilogue, scores, bias=None):
    """In float64, choice by choice: [T, k, ..], or [T, O] for both weighted epilogues."""
    T, k = experts.shape
    each = x if x.dim() == 3 else x.unsqueeze(1).expand(T, k, -1)
    y = torch.stack(
        [torch.stack([weight[e].double() @ row.double() for e, row in zip(*both, strict=True)])
         for both in zip(experts.tolist(), each, strict=True)]
    )  # fmt: skip
    if bias is not None:
        y = y + bias.double()[experts.long()]
    if epilogue.endswith("_mul"):
        gate, up = y.chunk(2, -1)
        y = activation(gate, up, epilogue)
    return y if scores is None else (y * scores.double().unsqueeze(-1)).sum(1)


def activation(gate, up, epilogue):
    """In float64, of the epilogue with this name."""
    if epilogue == "silu_mul":
        return gate / (1 + torch.exp(-gate)) * up
    if epilogue == "gelu_tanh_mul":
        return gate / (1 + torch.exp(-2 * (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
    gate, up = gate.minimum(torch.tensor(7.0)), up.maximum(torch.tensor(-7.0)).minimum(torch.tensor(7.0))
    return (up + 1) * gate / (1 + torch.exp(-1.702 * gate))


def given(size, dtype, epilogue, each, device="cpu"):
    (experts, order, starts), scores = routing(*size[:3])
    x, weight = inputs(size, dtype, each, device)
    scores = scores.to(device, torch.promote_types(dtype, torch.float32)) if epilogue in ("sum", "split") else None
    return x, weight, experts.to(device), order.to(device), starts.to(device), epilogue, scores


def right(got, args, roundings):
    x, weight, experts, _, _, epilogue, scores = args
    if epilogue == "split":
        assert got.dtype == torch.promote_types(x.dtype, torch.float32)
        assert len(got) == op._split_of(x, weight, experts.shape[1])[0] * experts.shape[1]
        got = got.sum(0)
    else:
        assert got.dtype == x.dtype
    return close(got, formula(x, weight, experts, epilogue, scores), x.dtype, roundings)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_reference(poisoned, dtype, size, epilogue):
    for each in (False, True):
        args = given(size, dtype, epilogue, each)
        assert right(expert_linear(*args), args, 16), each


@pytest.mark.parametrize(("size", "dtype", "epilogue"), cases.one_in(2, SIZES, HALF, EPILOGUES))
def test_kernel(poisoned, size, dtype, epilogue):
    for each in (False, True):
        args = given(size, dtype, epilogue, each)
        assert right(op.launch(*args), args, 8 if dtype == torch.float32 else 2), each


@pytest.mark.parametrize(
    ("epilogue", "size"), cases.one_in(2, [*EPILOGUES, "clamped_silu_mul", "gelu_tanh_mul"], [SIZES[2], SIZES[4]])
)
def test_biases_and_other_gates(poisoned, epilogue, size):
    """Of each expert, added before the gate, which clamps some of these numbers, or before the weighted sum. Those of
    experts without rows are not read."""
    for each in (False, True):
        for dtype, run, roundings in (
            (torch.float64, expert_linear, 16),
            (torch.bfloat16, expert_linear, 16),
            (torch.float32, op.launch, 8),
            (torch.float16, op.launch, 2),
        ):
            x, weight, experts, *rows, scores = given(size, dtype, epilogue, each)
            weight, bias = 4 * weight, randn(size[1], size[3], seed=3).to(dtype)
            bias[sorted(set(range(size[1])) - set(experts.flatten().tolist()))] = math.nan
            args = x, weight, experts, *rows, scores
            want, plain = (formula(x, weight, experts, epilogue, scores, b) for b in (bias, None))
            for given_, exact in (((*args, bias), want), (args, plain)):
                got = run(*given_).sum(0) if epilogue == "split" else run(*given_)
                assert close(got, exact, dtype, roundings), (each, dtype)
            assert not close(plain, want, torch.float64, 1e9)


def test_a_clamped_gate_keeps_a_nan(poisoned):
    x, rows = torch.full((1, 4), math.nan), rows_of(torch.zeros(1, 1, dtype=torch.int32), 1)
    for run in (op.launch, expert_linear):
        assert run(x, torch.ones(1, 6, 4), *rows, "clamped_silu_mul").isnan().all()


@pytest.mark.parametrize("how", [("int8", None), ("fp8", 32), ("int4", 32), ("mxfp4", 32)])
def test_quantised_experts(poisoned, how):
    for size, epilogues in (((5, 6, 2, 40, 64), EPILOGUES), ((2, 3, 2, 40, 1152), ["split"])):
        for epilogue in epilogues:
            args = given(size, torch.float16, epilogue, False)
            weight = quantised(args[1], *how)
            plain = (args[0], weight.dequantised(torch.float16), *args[2:])
            given_ = (args[0], weight, *args[2:])
            if epilogue != "split":  # the formats have splits of their own
                assert right(op.launch(*given_), plain, 4), epilogue
                assert right(expert_linear(*given_), plain, 16), epilogue
            got = op.launch(*given_)
            assert got.shape == expert_linear(*given_).shape
            assert (got - expert_linear(*given_)).abs().max() <= 0.01, epilogue


@pytest.mark.parametrize(("T", "of"), [(70, 1), (5, 1), (64, 2), (129, 2)])
def test_all_rows_at_few_experts(poisoned, T, of):
    """One expert has all rows, in one tile, a full one or more; the others have none, and their NaN is not read."""
    (experts, order, starts), scores = routing(T, 6, of, of=of)
    x, weight = inputs((T, 6, of, 10, 24), torch.float16)
    assert sorted(experts.unique().tolist()) == list(range(of))
    weight[of:] = math.nan
    args = x, weight, experts, order, starts, "sum", scores
    for run in (op.launch, expert_linear):
        assert right(run(*args), args, 8)


def test_nan_that_no_row_chose_is_not_read(poisoned, monkeypatch):
    """Neither experts without rows, nor what lies beside the tensors."""
    size = (3, 9, 2, 46, 33)
    for epilogue in EPILOGUES:
        x, weight, experts, order, starts, _, scores = given(size, torch.float16, epilogue, False)
        weight[sorted(set(range(9)) - set(experts.flatten().tolist()))] = math.nan
        assert weight.isnan().any()
        args = x, weight, experts, order, starts, epilogue, scores
        held = [t for t in args if isinstance(t, torch.Tensor)]
        with reads(monkeypatch, *held):
            assert right(op.launch(*args), args, 4)
        chosen = [weight[e] for e in experts.unique().tolist()]
        with reads(monkeypatch, *chosen, *(t for t in held if t is not weight)):
            op.launch(*args)
        some = *chosen[1:], *(t for t in held if t is not weight)
        with reads(monkeypatch, *some), pytest.raises(InterpreterError, match="outside every tensor"):
            op.launch(*args)


def test_views():
    x, weight, *rest = given((5, 6, 2, 40, 64), torch.float16, "sum", False)
    want = op.launch(x, weight, *rest)
    wide = torch.cat((x, x * math.nan), dim=1)[:, :64]
    experts, order, starts, epilogue, scores = rest
    shifted = torch.cat((order[:1], order))[1:]
    others = experts, shifted, torch.stack((starts, starts), 1)[:, 0], epilogue, scores.T.contiguous().T
    assert torch.equal(op.launch(wide, weight.mT.contiguous().mT, *others), want)


@pytest.mark.parametrize(("epilogue", "E"), cases.one_in(2, EPILOGUES, [40, 1100]))
def test_a_row_is_the_same_alone_and_among_others(epilogue, E):
    """Also beside rows that fill its experts' tiles, and if it is in another tile of them."""
    T, X, k = (150, 5, 2) if E < 100 else (66, 3, 2)
    x, weight, experts, _, _, _, scores = given((T, X, k, 34, E), torch.float16, epilogue, False)

    def run(rows):
        some = None if scores is None else scores[rows]
        return op.launch(x[rows], weight, *rows_of(experts[rows], X), epilogue, some)

    at = 1 if epilogue == "split" else 0
    whole = run(slice(None))
    for first, count in ((0, 1), (1, 2), (T - 1, 1), (T // 2, 7), (0, T - 1)):
        rows = slice(first, first + count)
        assert torch.equal(run(rows), whole.narrow(at, first, count)), rows
    back = torch.arange(T - 1, -1, -1)
    assert torch.equal(run(back).flip(at), whole)


@pytest.mark.parametrize("size", [(6, 7, 3, 46, 33), (2, 3, 2, 40, 1100)])
def test_the_sum_adds_its_terms_in_order(size):
    """Bit for bit: also as `residual_merge` adds them to a residual stream of zeros."""
    x, weight, *rows, _, scores = given(size, torch.float16, "split", True)
    terms, whole = (op.launch(x, weight, *rows, how, scores) for how in ("split", "sum"))
    total = torch.zeros_like(terms[0])
    for term in terms:
        total = total + term
    assert torch.equal(total.half(), whole)
    assert torch.equal(residual_merge(torch.zeros_like(whole), terms, None, 0.0, None, True)[0], whole)
    plain, k = op.launch(x, weight, *rows), size[2]
    splits = len(terms) // k
    of_last = terms[(k - 1) * splits :].sum(0)
    assert (of_last - plain[:, -1] * scores[:, -1:]).abs().max() <= 2e-3


@pytest.mark.parametrize("weighted", [False, True])
def test_one_layer_of_rows_is_row_linear(weighted):
    """With all rows at one expert, the bits are row_linear's."""
    x, weight = inputs((9, 1, 1, 40, 1100), torch.float16)
    rows = rows_of(torch.zeros(9, 1, dtype=torch.int32), 1)
    if weighted:
        got = op.launch(x, weight, *rows, "split", torch.ones(9, 1))
        assert torch.equal(got, linear.launch(x, weight[0], None, "split"))
    else:
        for epilogue in ("none", "silu_mul"):
            got = op.launch(x, weight, *rows, epilogue)
            assert torch.equal(got[:, 0], linear.launch(x, weight[0], None, epilogue))


def test_float32_rows_beside_bfloat16_weights():
    """On a CPU, as in row_linear, for small matrices and for large ones, which compiled kernels multiply."""
    for size in ((5, 4, 2, 30, 33), (5, 3, 2, 600, 512)):
        for epilogue in EPILOGUES:
            x, weight, *rest = given(size, torch.float32, epilogue, False)
            args = x, weight.bfloat16(), *rest
            got = expert_linear(*args)
            assert got.dtype == torch.float32
            want = formula(args[0], args[1], rest[0], epilogue, rest[-1])
            got = got.sum(0) if epilogue == "split" else got
            assert (got - want).abs().max() <= 0.02 * want.abs().max(), epilogue


def test_tiles_are_those_of_the_experts_of_one_row():
    """And splits do not depend on the number of rows."""
    bf16 = torch.bfloat16

    def chosen(X, k, O, E, epilogue):
        sizes = op._variants(op.Product(bf16, O, E, 90), X, k, epilogue, False)[0].constexprs
        return sizes["M"], sizes["N"], sizes["SPLITS"]

    assert chosen(128, 8, 1536, 2048, "silu_mul") == (64, 128, 1)
    assert chosen(128, 8, 2048, 768, "split") == chosen(128, 8, 2048, 768, "sum") == (64, 64, 1)
    assert chosen(8, 2, 28672, 4096, "silu_mul") == (64, 128, 1)
    assert chosen(8, 2, 4096, 14336, "split") == (64, 64, 2)
    assert chosen(1, 1, 4096, 4096, "split") == linear.tiles(linear.Product(bf16, 4096, 4096, 90, split=True))[:2] + (
        4,
    )


def test_the_launcher_reads_no_tensor_and_covers_the_worst_routing(unlaunched):
    """Fake tensors have no values to read. T rows of k choices are at most T * k experts, or X with a tile each more
    than the choices fill."""
    with FakeTensorMode():
        for T, X, k, O, E, epilogue in (
            (1, 128, 8, 1536, 2048, "silu_mul"),
            (8, 128, 8, 2048, 768, "split"),
            (1024, 128, 8, 2048, 768, "sum"),
        ):
            x, weight = torch.empty(T, E, dtype=torch.bfloat16), torch.empty(X, O, E, dtype=torch.bfloat16)
            rows = torch.empty(T, k).int(), torch.empty(T * k).int(), torch.empty(X + 1).int()
            op.launch(x, weight, *rows, epilogue, None if epilogue == "silu_mul" else torch.empty(T, k))
    assert unlaunched == [
        ("_expert_linear_kernel", (8, 24, 1)),
        ("_expert_linear_kernel", (64, 32, 1)),
        ("_expert_linear_kernel", (254, 32, 1)),
        ("_row_linear_merge_kernel", (1024, 4)),
    ]
    for counts in ((65, 65, 65, 1), (1, 1, 1, 1), (196, 0, 0, 0)):
        assert sum(-(-n // 64) for n in counts) <= (sum(counts) + min(4, sum(counts)) * 63) // 64


def test_cost_counts_the_chosen_experts_once():
    x, weight, *rest = given((3, 9, 2, 46, 33), torch.float16, "silu_mul", False)
    experts = len(rest[0].unique())
    size = 2 * (3 * 33 + experts * 46 * 33 + 3 * 2 * 23) + 4 * (6 + 10)
    assert expert_linear_cost(x, weight, *rest) == (size, 2 * 6 * 46 * 33)
    *rest, _, _ = rest
    scores = torch.ones(3, 2)
    assert expert_linear_cost(x, weight, *rest, "silu_mul", None, weight[:, :, 0])[0] == size + 2 * experts * 46
    apart = [expert_linear_cost(x, weight, *rest, how, scores)[0] for how in ("sum", "split")]
    assert apart == [size - 2 * 6 * 23 + 4 * 6 + written for written in (2 * 3 * 46, 4 * 6 * 46)]


def test_no_rows():
    for epilogue in EPILOGUES:
        args = given((0, 4, 2, 6, 8), torch.float32, epilogue, False)
        assert op.launch(*args).shape == expert_linear(*args).shape
        assert not expert_linear(*args).numel()


@pytest.mark.parametrize(("epilogue", "each"), [("none", False), ("silu_mul", False), ("sum", True), ("split", True)])
def test_registration(epilogue, each):
    args = given((3, 4, 2, 6, 8), torch.float32, epilogue, each)
    torch.library.opcheck(torch.ops.specker.expert_linear, args)
    torch.library.opcheck(torch.ops.specker.expert_linear, (*args, torch.ones(4, 6)))


def test_fullgraph():
    args = given((3, 4, 2, 6, 8), torch.float32, "sum", True)
    compiled = torch.compile(expert_linear, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*args), expert_linear_ref(*args))


def launches():
    """Runs in a compiling process: two weights, one of them with a split K, and many lengths."""
    for T in (1, 2, 16, 17, 64, 65, 256):
        rows = [torch.zeros(*n, dtype=torch.int32) for n in ((T, 2), (2 * T,), (9,))]
        scores = torch.zeros(T, 2)
        for x in (torch.zeros(T, 64).bfloat16(), torch.zeros(T, 2, 64).bfloat16()):
            op.launch(x, torch.zeros(8, 64, 64).bfloat16(), *rows, "sum", scores)
        wide = torch.zeros(T, 1024).bfloat16()
        op.launch(wide, torch.zeros(8, 64, 1024).bfloat16(), *rows, "silu_mul")


def test_no_length_recompiles():
    assert compilations(__file__) == {"_expert_linear_kernel": 3, "_row_linear_merge_kernel": 2}


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(16, 8, 1536, 2048), (16, 8, 2048, 768), (2, 2, 4096, 14336), (60, 4, 1022, 1023)])
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_bfloat16_is_as_good_as_torch(size, epilogue):
    for T in (1, 8, 65):
        args = given((T, *size), torch.bfloat16, epilogue, False, "cuda")
        x, weight, *rest, _, scores = args
        exact = formula(x, weight, rest[0], epilogue, scores)
        ours, theirs = expert_linear(*args), expert_linear_ref(*args)
        if epilogue == "split":
            ours, theirs = ours.sum(0), theirs.sum(0)
        # Unrounded sums show that matrix units add with fewer bits than float32 has.
        more = 4 if epilogue == "split" else 2
        assert (ours - exact).abs().max() <= more * (theirs - exact).abs().max() + 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_bfloat16_rows_are_invariant(epilogue):
    size = 256, 32, 8, 2048, 768
    x, weight, experts, _, _, _, scores = given(size, torch.bfloat16, epilogue, False, "cuda")

    def run(rows):
        of = [t.cuda() for t in rows_of(experts[rows].cpu(), 32)]
        return expert_linear(x[rows], weight, *of, epilogue, None if scores is None else scores[rows])

    at, whole = (1 if epilogue == "split" else 0), run(slice(None))
    for T in (1, 2, 7, 64, 65):
        for first in {0, 100, 256 - T}:
            rows = slice(first, first + T)
            assert torch.equal(run(rows), whole.narrow(at, first, T)), (T, first)
