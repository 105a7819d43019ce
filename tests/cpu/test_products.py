"""Packed matrices and their products: every format against its formula in float64, and a row's bits."""

import packings
import pytest
import torch
import warm
from packings import COLUMNS, ROWS, TALL, bound, exact, inputs, numbers, rounded

from specker import cpu
from specker.cpu import build
from specker.cpu.packed import FORMATS, Numbers, joined, of_quantised, pack, unpack
from specker.kernels import quant
from specker.kernels.quant import Quantized
from specker.kernels.row_linear import row_linear_ref
from specker.model.decoder import packed_linear


def same(a: Numbers, b: Numbers) -> bool:
    return a.format == b.format and all(
        x is y if x is None or y is None else x.dtype == y.dtype and torch.equal(x, y)
        for x, y in zip(a[1:], b[1:], strict=True)
    )


@pytest.mark.parametrize("name", FORMATS)
def test_packing_is_undone(name):
    for O in (1, 16, ROWS, 257):
        n = numbers(name, O)
        w = pack(n)
        assert same(unpack(w.runs[0], COLUMNS), n)
        assert w.shape == (O, COLUMNS) == (len(w), COLUMNS) and w.numel() == O * COLUMNS
        assert w.nbytes == FORMATS[name].bytes_of(O, COLUMNS) and w.kinds == {name.split()[0]}


@pytest.mark.parametrize("name", FORMATS)
def test_the_weights_are_those_of_the_formula(name):
    for O in (1, ROWS):
        n = numbers(name, O)
        want, w = exact(n).weight.float(), pack(n)
        assert torch.equal(w.dequantised(torch.float32), want)
        assert torch.equal(w.dequantised(torch.bfloat16), want.bfloat16())
        (other,) = w.quantised()
        assert torch.equal(other.dequantised(torch.float32), want)
        ids = torch.arange(7) * 5 % O
        assert torch.equal(cpu.restored(w, torch.float32, ids), want[ids])


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_copied_for_a_trimmed_head(name):
    w, want = pack(numbers(name)), exact(numbers(name)).weight.float()
    ids = torch.tensor([5, 45, 5, 0, 17, *range(20, 36)])
    chosen = w[ids]
    assert torch.equal(chosen.dequantised(torch.float32), want[ids]) and len(chosen) == len(ids)
    assert torch.equal(w[:33].dequantised(torch.float32), want[:33]) and len(w[:99]) == ROWS
    chosen.copy(torch.tensor([20, 1]), w, torch.tensor([44, 2]))
    ids[[20, 1]] = torch.tensor([44, 2])
    assert torch.equal(chosen.dequantised(torch.float32), want[ids])
    for at, source in (([21], [0]), ([-1], [0]), ([0], [ROWS])):
        with pytest.raises(ValueError, match="rows must be 0 to "):
            chosen.copy(torch.tensor(at), w, torch.tensor(source))
    other = pack(numbers("int8" if name == "int4" else "int4"))
    with pytest.raises(ValueError, match=r"rows of int[48] \[512\] do not fit"):
        chosen.copy(torch.tensor([0]), other, torch.tensor([0]))


@pytest.mark.parametrize("name", FORMATS)
def test_a_rank_takes_its_rows_and_columns(name):
    """Rows that begin with a block stay where they are; a unit's columns cannot be divided."""
    w, want, unit = pack(numbers(name)), exact(numbers(name)).weight.float(), FORMATS[name].columns
    for first, end in ((0, 20), (16, 33), (5, 40), (32, ROWS)):
        part = w[first:end]
        assert torch.equal(part.dequantised(torch.float32), want[first:end])
        assert (part.runs[0].data.untyped_storage().data_ptr() == w.runs[0].data.data_ptr()) == (first % 16 == 0)
    part = w.columns_of(unit, COLUMNS - unit)
    assert torch.equal(part.dequantised(torch.float32), want[:, unit:]) and part.runs[0].data.is_contiguous()
    assert w.columns_of(unit // 2, unit) is None and w.columns_of(0, unit // 2) is None


@pytest.mark.parametrize("activations", cpu.ACTIVATIONS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_product_is_that_of_the_formula(name, activations):
    """And a row has the same bits alone, beside others, and with any number of threads."""
    every, before = inputs(), torch.get_num_threads()
    for O in (1, ROWS):
        n = numbers(name, O)
        w, x = pack(n), rounded(every, activations, name)
        alone = torch.cat([cpu.product(row[None], w, activations) for row in every])
        assert ((alone.double() - x @ exact(n).weight.T).abs() <= bound(x, activations, n)).all()
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                for T in range(1, len(every) + 1) if threads == 1 else (1, 5, 20):
                    assert torch.equal(cpu.product(every[-T:], w, activations), alone[-T:]), (T, threads)
        finally:
            torch.set_num_threads(before)


@pytest.mark.parametrize("name", [name for name in FORMATS if not name.startswith("fp8")])
def test_the_largest_sums_of_products_are_exact(name):
    """Codes and activations as large as they can be: sums of pairs in 16 bits must not overflow."""
    n = numbers(name)
    n.codes.fill_(7 if name == "mxfp4" else (1 << FORMATS[name].bits) - 1)
    weight = exact(n)
    for T in (1, 3, 6):
        x = torch.ones(T, COLUMNS)  # rounded to 127 without an error
        for sign in (1, -1):
            got = cpu.product(sign * x, pack(n), "int8").double()
            assert ((got - sign * weight.weight.sum(1)).abs() <= bound(x.double(), "int8", n)).all()


def test_mxfp4_products_of_integers_are_exact():
    """Activations that eight bits hold, and sums that float32 holds: so products have no rounding at all."""
    n = numbers("mxfp4")
    n.scale.copy_(n.scale % 3 + 125)
    x = torch.randint(-127, 128, (TALL, COLUMNS), generator=torch.Generator().manual_seed(3)).float()
    x[:, ::32] = 127
    want = (x.double() @ exact(n).weight.T).float()
    for activations in cpu.ACTIVATIONS:
        assert torch.equal(cpu.product(x, pack(n), activations), want)


def test_every_mxfp4_scale_is_exact():
    """All numbers with all scales but those with which some are infinite."""
    codes = torch.arange(32, dtype=torch.uint8).remainder(16).expand(253, 32)
    n = Numbers("mxfp4", codes.contiguous(), torch.arange(253, dtype=torch.uint8).unsqueeze(1))
    want = exact(n).weight.float()
    assert torch.equal(pack(n).dequantised(torch.float32), want) and want[0, 1] == 2.0**-128
    for column in (1, 7, 15, 31):
        x = torch.zeros(1, 32)
        x[0, column] = 1
        assert torch.equal(cpu.product(x, pack(n), "float32")[0], want[:, column])


def test_the_bound_notices_a_wrong_weight():
    """Half a step of one code, in one column of 512."""
    n, every = numbers("int4"), inputs()
    codes = n.codes.clone()
    codes[3, 40] ^= 1
    x, got = rounded(every, "int8", "int4"), cpu.product(every, pack(n._replace(codes=codes)), "int8")
    assert ((got.double() - x @ exact(n).weight.T).abs() > bound(x, "int8", n))[:, 3].any()


def test_more_rows_than_a_call_rounds_at_once():
    n = numbers("int4 super")
    w, x = pack(n), torch.randn(1100, COLUMNS)
    assert torch.equal(cpu.product(x, w, "int8")[[0, 511, 512, 1099]], cpu.product(x[[0, 511, 512, 1099]], w, "int8"))


@pytest.mark.parametrize("name", [name for name in FORMATS if not name.startswith("fp8")])
def test_rows_of_a_prompt_have_the_bits_of_single_rows(name):
    """Many rows may be multiplied in squares: of different heights, more of them than codes are unpacked for, and of
    several blocks of W, of which the last is cut."""
    E = 512 if FORMATS[name].columns == 256 else 352
    many, w = inputs(150, E), pack(numbers(name, 301, E))
    alone = torch.cat([cpu.product(row[None], w, "int8") for row in many])
    for T in (8, 16, 17, 31, 50, 129, 150):
        assert torch.equal(cpu.product(many[:T], w, "int8"), alone[:T]), T


@pytest.mark.parametrize("activations", cpu.ACTIVATIONS)
def test_a_norm_before_the_product(activations):
    x, norm, w = inputs(), torch.rand(COLUMNS) + 0.5, pack(numbers("int5"))
    wide = x.double()
    normed = wide * (wide.square().mean(1, keepdim=True) + 1e-5).rsqrt() * norm.double()
    got = cpu.product(x, w, activations, norm, 1e-5)
    steps = {"int8": 1 / 127, "bfloat16": 2**-8, "float32": 1e-5}[activations]  # the norm's error may move a rounding
    assert (
        (got.double() - normed @ exact(numbers("int5")).weight.T).abs()
        <= steps * (normed.abs() @ exact(numbers("int5")).most.T)
    ).all()
    assert torch.equal(got[3:4], cpu.product(x[3:4], w, activations, norm, 1e-5))


def test_several_formats_in_one_matrix():
    """q, k and v of a Q4_K_M file: their rows lie one under the other."""
    parts = [pack(numbers(name, O)) for name, O in (("int4 super", 48), ("int5 super", 16), ("int6 sixteen", 30))]
    whole, x = joined(parts), inputs()
    assert whole.shape == (94, COLUMNS) and whole.kinds == {"int4", "int5", "int6"}
    for activations in cpu.ACTIVATIONS:
        apart = torch.cat([cpu.product(x, part, activations) for part in parts], 1)
        assert torch.equal(cpu.product(x, whole, activations), apart)
    want = torch.cat([part.dequantised(torch.float32) for part in parts])
    assert torch.equal(whole.dequantised(torch.float32), want)
    ids = torch.tensor([0, 47, 48, 63, 64, 93])
    assert torch.equal(cpu.restored(whole, torch.float32, ids), want[ids])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("O", [1, 3, 46, 961])
def test_plain_weights(O, dtype):
    torch.manual_seed(0)
    w, every = torch.randn(O, 96).to(dtype), torch.randn(70, 96)
    for activations in ("float32", "bfloat16"):
        alone = torch.cat([cpu.product(row[None], w, activations) for row in every])
        for T in (1, 2, 3, 5, 6, 7, 16, 70):
            assert torch.equal(cpu.product(every[:T], w, activations), alone[:T]), "a row's bits depend on other rows"
        halved = dtype == torch.bfloat16 and activations == "bfloat16"
        x = every.bfloat16().double() if halved else every.double()
        exactly = x @ w.double().T
        assert ((alone.double() - exactly).abs() <= 2 * 96 * 2**-24 * (x.abs() @ w.double().abs().T)).all()


@pytest.mark.parametrize(
    ("kind", "group", "shifts", "scales", "name"),
    [
        ("int8", 32, False, torch.float16, "int8"),
        ("int8", 96, True, torch.float16, "int8 shift"),
        ("int8", 32, False, torch.float32, "int8 float"),
        ("int8", 32, True, torch.float32, "int8 float shift"),
        ("int4", 32, False, torch.float16, "int4"),
        ("int4", 96, True, torch.float16, "int4 shift"),
        ("int4", 96, True, torch.float32, "int4 float shift"),
        ("int4", 32, False, torch.float32, "int4 float shift"),
        ("fp8", 96, False, torch.float16, "fp8"),
        ("fp8", 32, False, torch.float32, "fp8 float"),
        ("mxfp4", 32, False, torch.uint8, "mxfp4"),
        ("mxfp4", 96, False, torch.uint8, "mxfp4"),
    ],
)
def test_matrices_of_other_formats_are_packed_without_loss(kind, group, shifts, scales, name):
    torch.manual_seed(0)
    q = quant.quantised(torch.randn(20, 192), kind, group).q
    scale = torch.rand(20, 192 // group)
    scale = (scale * 20 + 110 if scales == torch.uint8 else scale * 0.02 + 1e-3).to(scales)
    w = Quantized(q, scale, torch.randn_like(scale, dtype=torch.float32).mul(0.1).to(scales) if shifts else None)
    got = of_quantised(w)
    assert got is not None and got.runs[0].format == name
    assert torch.equal(got.dequantised(torch.float32), w.dequantised(torch.float32))


def test_large_matrices_are_packed_in_parts(monkeypatch):
    w = quant.quantised(torch.randn(90, 96), "mxfp4")
    whole = of_quantised(w)
    monkeypatch.setattr(quant, "CHUNK", 40 * 96)  # 32 rows
    parts = of_quantised(w)
    assert whole is not None and parts is not None and len(parts.runs) == 1 and len(parts) == 90
    assert torch.equal(parts.runs[0].data, whole.runs[0].data)


def test_matrices_that_cannot_be_packed():
    sixteens = quant.quantised(torch.randn(4, 96), "int8", 16)
    eights = quant.quantised(torch.randn(4, 96), "fp8", 32)
    assert of_quantised(sixteens) is None
    assert of_quantised(Quantized(eights.q, eights.scale, torch.zeros_like(eights.scale))) is None
    with pytest.raises(ValueError, match="int6 sixteen needs a multiple of 256 columns, got 288"):
        pack(numbers("int6 sixteen")._replace(codes=torch.zeros(1, 288, dtype=torch.uint8)))


def other_levels() -> list[str]:
    """Those that this processor can run, besides the one that the tests use."""
    return [name for name, (needs, _) in build.LEVELS.items() if needs <= build._features() and name != build.level()]


@pytest.mark.parametrize(
    "level", [pytest.param(x, marks=[] if x == "portable" else pytest.mark.slow) for x in build.LEVELS]
)
def test_every_level_computes_the_same(level, tmp_path):
    """Integer sums are exact, so with a fused multiply-add products have the same bits, unless other columns of x have
    one scale."""
    if level not in other_levels():
        pytest.skip("this processor has no such instructions, or all tests use them")
    path = tmp_path / "products.pt"
    warm.run(packings.__file__, str(path), env={"SPECKER_CPU": level}).check_returncode()
    found, own, x = torch.load(path), packings.products(), inputs()
    assert found.keys() == own.keys() and len(found) == 5 * len(FORMATS)
    fused = "portable" not in (level, build.level())
    for (name, kind), got in found.items():
        columns = int(found[name, "columns"])
        same = kind != "int8" or columns == own[name, "columns"]
        if kind == "columns":
            assert columns == 32 or level == "amx"
        elif kind == "weights" or (fused and same):
            assert torch.equal(got, own[name, kind]), (name, kind)
        else:
            given = rounded(x, kind, name, columns)
            want = given @ exact(numbers(name)).weight.T
            assert ((got.double() - want).abs() <= bound(given, kind, numbers(name))).all(), (name, kind)


def test_a_linear_over_packed_and_plain_matrices():
    """With bias and gate, as for layers that run on torch's operators."""
    g = torch.Generator().manual_seed(0)
    x, w, bias = (torch.randn(*size, generator=g) for size in ((3, 32), (64, 32), (64,)))
    kept = of_quantised(quant.quantised(w, "int8"))
    linear, wide = packed_linear("float32"), kept.dequantised(torch.float32)
    for epilogue in ("none", "float32", "gelu_tanh_mul"):
        want = row_linear_ref(x, wide, bias, epilogue)
        for matrix in (kept, wide):
            torch.testing.assert_close(linear(x, matrix, bias, epilogue), want, rtol=1e-5, atol=1e-5)
