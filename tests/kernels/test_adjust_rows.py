"""adjust_rows: the reference against plain Python, and the compiled and interpreted kernels against the reference."""

import math

import pytest
import torch
from compile_only import compilations
from torch.library import opcheck

from specker.kernels.adjust_rows import MAX_BIASES, adjust_rows, adjust_rows_cost, adjust_rows_ref, launch

INF = math.inf
NEUTRAL = (1.0, 0.0, 0.0, INF)
RULES = {  # numbers of a sequence
    "neutral": NEUTRAL,
    "repetition": (1.3, 0.0, 0.0, INF),
    "presence and frequency": (1.0, 0.7, -0.4, INF),
    "all": (0.8, -0.5, 0.25, 2.0),
    "floor": (1.0, 0.0, 0.0, 0.5),
}


EVERY = tuple(RULES.values())


def arguments(rules=EVERY, V=37, R=5, C=70, trees=False, placed=False, K=0, seed=0, dtype=torch.float32):
    """Arguments with a sequence for each rule, whose texts repeat few ids; what is not to be read is no id at all."""
    made = torch.Generator().manual_seed(seed)
    B = len(rules)

    def ids(*shape):
        return torch.randint(0, 9, shape, generator=made)

    length = torch.randint(2, C, (B,), generator=made)
    prompt = (length * torch.rand(B, generator=made)).long()
    text = torch.where(torch.arange(C) < length[:, None], ids(B, C), -7)
    window = torch.cat((text.gather(1, length[:, None] - 1), ids(B, R - 1)), 1)
    parents = (torch.rand(B, R - 1, generator=made) * torch.arange(1, R)).long() if trees else None
    places = torch.arange(B * R)[torch.rand(B * R, generator=made) < 0.6] if placed else None
    T = B * R if places is None else len(places)
    logits = torch.randn(T, V, generator=made, dtype=dtype) * 3
    logits[:, 1::5] = -INF
    bias_ids = bias = None
    if K:
        order = torch.stack([torch.randperm(V, generator=made)[:K] for _ in range(B)])
        count = torch.randint(0, K + 1, (B, 1), generator=made)
        bias_ids = torch.where(torch.arange(K) < count, order, -1)
        bias = torch.randn(B, K, generator=made) * 5
    numbers = torch.tensor(rules)
    floors = bool((numbers[:, 3] < INF).any())
    return [logits, text, prompt, length, window, numbers, parents, places, bias_ids, bias, floors]


def plain(logits, text, prompt, length, window, numbers, parents, places, bias_ids, bias, floors):
    """The contract, one id at a time, in float64."""
    out = logits.double().clone()
    R = window.shape[1]
    for t in range(len(logits)):
        b, row = divmod(t if places is None else int(places[t]), R)
        said = text[b, prompt[b] : length[b]].tolist()
        while row:
            said.append(int(window[b, row]))
            row = row - 1 if parents is None else int(parents[b, row - 1])
        seen = {*said, *text[b, : prompt[b]].tolist()}
        repetition, presence, frequency, reach = numbers[b].double().tolist()
        if bias_ids is not None:
            for i, x in zip(bias_ids[b].tolist(), bias[b].tolist(), strict=True):
                if i >= 0:
                    out[t, i] += x
        for i in seen:
            out[t, i] = out[t, i] / repetition if out[t, i] > 0 else out[t, i] * repetition
            if i in said:
                out[t, i] -= presence + frequency * said.count(i)
        least = out[t].max() - reach
        out[t] = torch.where(out[t] < least, -INF, out[t]) if floors else out[t]
    return out


SHAPES = {
    "chains": {},
    "trees": {"trees": True, "K": 3},
    "places": {"placed": True, "K": 1},
    "places of trees": {"placed": True, "trees": True},
    "roots alone": {"R": 1, "K": 36},
    "one sequence": {"rules": (RULES["all"],), "R": 9, "trees": True},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_contract(shape):
    for seed in range(4):
        args = arguments(**SHAPES[shape], seed=seed, dtype=torch.float64)
        want = plain(*args)
        assert torch.equal(want == -INF, (got := adjust_rows(*args)) == -INF)
        assert torch.allclose(got, want, rtol=1e-12, atol=1e-12)
        single = adjust_rows_ref(args[0].float(), *args[1:])
        assert torch.allclose(single, want.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("path", [adjust_rows, launch], ids=["compiled", "interpreted"])
def test_both_kernels_equal_the_reference(path, shape):
    args = arguments(**SHAPES[shape], seed=5)
    assert torch.equal(path(*args), adjust_rows_ref(*args))


@pytest.mark.parametrize("path", [adjust_rows, launch], ids=["compiled", "interpreted"])
def test_texts_and_vocabularies_of_several_parts(path):
    args = arguments(V=4100, C=2500, R=2, K=20, trees=True)
    args[1][:, ::3] = torch.where(args[1][:, ::3] >= 0, args[1][:, ::3] + 4090, args[1][:, ::3])
    assert torch.equal(path(*args), adjust_rows_ref(*args))


@pytest.mark.parametrize("path", [adjust_rows, launch], ids=["compiled", "interpreted"])
def test_views(path):
    args = arguments(trees=True, K=4)
    want = path(*args)
    for at in (1, 4, 6):  # row-strided, as a state's window is
        args[at] = torch.nn.functional.pad(args[at], (0, 3), value=1)[:, : args[at].shape[1]]
    assert torch.equal(path(*args), want)
    for at in (0, 5, 8):
        args[at] = args[at].T.contiguous().T
    assert torch.equal(path(*args), want)


def test_rows_do_not_depend_on_their_neighbours():
    args = arguments(trees=True, K=4)
    whole = adjust_rows(*args)
    for places in torch.randperm(len(whole)).split(7):
        some = [args[0][places], *args[1:7], places, *args[8:]]
        assert torch.equal(adjust_rows(*some), whole[places])


def test_neutral_numbers_change_nothing():
    args = arguments(rules=(NEUTRAL,) * 3)
    assert torch.equal(adjust_rows(*args), args[0])


def test_the_registered_op():
    op = torch.ops.specker.adjust_rows.default
    for shape in ("chains", "trees", "places"):
        opcheck(op, tuple(arguments(**SHAPES[shape])), test_utils=("test_schema", "test_faketensor"))
    compiled = torch.compile(adjust_rows, fullgraph=True, backend="eager")
    args = arguments(K=2)
    assert torch.equal(compiled(*args), adjust_rows(*args))


def test_cost():
    args = arguments(rules=(NEUTRAL,), V=100, R=4)
    assert adjust_rows_cost(*args)[0] == 4 * 100 * 4 * 2 + 8 * int(args[3].sum())
    args = arguments(rules=(RULES["floor"],), V=100, R=4)
    assert adjust_rows_cost(*args)[0] == 4 * 100 * 4 * 4 + 8 * int(args[3].sum())


def launches():
    """Runs in a compiling process: texts, windows and numbers of any length, at any offset."""
    ids, floats = torch.arange(5000), torch.ones(5000)
    for n, (B, R, C) in enumerate(((1, 1, 20), (1, 5, 300), (2, 5, 301), (3, 17, 16), (16, 2, 33))):
        for K, trees, placed, floors in ((0, False, False, False), (300, True, False, True), (0, True, True, True)):
            T = B * R - placed if R > 1 else B
            parents = ids[n:][: B * (R - 1)].view(B, R - 1) if trees else None
            places = ids[n + 1 :][:T] if placed else None
            numbers = floats[n:][: 4 * B].view(B, 4)
            biased = [x[n : n + B * K].view(B, K) for x in (ids, floats)] if K else (None, None)
            texts = ids[n:][: B * C].view(B, C), ids[n : n + B], ids[n + 1 : n + 1 + B], ids[:][: B * R].view(B, R)
            logits = torch.ones(B * R if places is None else T, 5001)
            launch(logits, *texts, numbers, parents, places, *biased, floors)


def test_no_length_recompiles():
    assert compilations(__file__) == {"_count_text_kernel": 1, "_adjust_rows_kernel": 5, "_adjust_floor_kernel": 2}


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (
            0,
            torch.zeros(25, 37).half(),
            r"logits must be \[T, V >= 1\] float32 or float64, got \(25, 37\) torch.float16",
        ),
        (0, torch.zeros(24, 37), r"without places there must be 5 \* 5 rows of logits, got 24"),
        (1, torch.zeros(4, 70).long(), r"text must be \[5, C\], like window, got \(4, 70\)"),
        (1, torch.zeros(5, 70).int(), "text must be int64, got torch.int32"),
        (2, torch.zeros(6).long(), r"prompt and length must be \[5\], got \(6,\) and \(5,\)"),
        (3, None, "length must be Tensor, got None"),
        (4, torch.zeros(5, 0).long(), r"window must be \[B, R >= 1\], got \(5, 0\)"),
        (5, torch.zeros(5, 4).double(), r"numbers must be \[5, 4\] float32, got \(5, 4\) torch.float64"),
        (6, torch.zeros(5, 5).long(), r"parents must be \[5, 4\], got \(5, 5\)"),
        (7, torch.zeros(3).long(), r"places must be \[25\], got \(3,\)"),
        (8, None, "bias_ids and bias must come together"),
        (8, torch.zeros(5, 3).long(), r"bias_ids and bias must be \[5, K <= 1024\]"),
    ],
)
def test_refusals(at, value, message):
    args = arguments(K=2)
    args[at] = value
    with pytest.raises((TypeError, ValueError), match=message):
        adjust_rows(*args)
    assert MAX_BIASES == 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (1, 37, r"text must be in 0\.\.36, got \d+\.\.37"),
        (1, -1, r"text must be in 0\.\.36, got -1\.\.\d"),
        (2, -1, r"prompt must be in 0\.\.length, got \[-1, "),
        (2, 71, r"prompt must be in 0\.\.length, got \[71, .* of \["),
        (3, 71, r"length must be in 0\.\.70, got \d+\.\.71"),
        (3, -(2**62), r"length must be in 0\.\.70, got -4611686018427387904\.\."),
        (4, 2**40, r"window must be in 0\.\.36, got \d\.\.1099511627776"),
        (7, -1, r"places must be in 0\.\.24, got -1\.\."),
        (7, 25, r"places must be in 0\.\.24, got \d+\.\.25"),
        (8, 37, r"bias_ids must be in -1\.\.36, got -?\d+\.\.37"),
        (8, 2**62, r"bias_ids must be in -1\.\.36, got -?\d+\.\.4611686018427387904"),
    ],
)
def test_numbers_that_point_outside(dtype, at, value, message):
    """Compiled code would read and write there. What is not to be read may be any number."""
    args = arguments(rules=(RULES["all"],) * 5, K=3, dtype=dtype)
    args[7] = torch.arange(25)
    want = adjust_rows(*args)
    args[4][:, 0] = value
    assert torch.equal(adjust_rows(*args), want)
    x = args[at]
    x[(0, 1) if at == 4 else (0,) * x.dim()] = value
    with pytest.raises(ValueError, match=message):
        adjust_rows(*args)
