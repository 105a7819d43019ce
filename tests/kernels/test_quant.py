"""Matrices in eight and four bits: how they are packed, rounded and joined, and their products on a CPU."""

import cases
import numpy as np
import pytest
import torch

from specker.cpu.packed import of_quantised
from specker.kernels import quant
from specker.kernels.quant import Quantized
from specker.kernels.row_linear import row_linear
from specker.kernels.vocab_topk import vocab_topk

# kind, group, whether it has shifts, dtype of the scales
FORMATS = [
    ("int8", None, False, torch.float16),
    ("int8", 16, True, torch.float32),
    ("int8", 32, False, torch.float16),
    ("fp8", None, False, torch.float32),
    ("fp8", 64, False, torch.float16),
    ("int4", 32, True, torch.float16),
    ("int4", 32, False, torch.float16),
    ("int4", 64, True, torch.float32),
    ("int4", None, False, torch.float32),
    ("mxfp4", 32, False, torch.uint8),
]


def matrix(kind: str, group: int | None, shifts: bool, scales: torch.dtype, *shape: int) -> Quantized:
    """Random codes, all of them, with random scales."""
    rows, E = shape[:-1], shape[-1]
    if kind == "fp8":
        q = torch.randint(0, 127, (*rows, E), dtype=torch.uint8) | torch.randint(0, 2, (*rows, E)).to(torch.uint8) << 7
        q = q.view(torch.float8_e4m3fn)  # every number, subnormals too; 127 and 255 are NaN
    elif kind == "int8":
        q = torch.randint(-128, 128, (*rows, E)).to(torch.int8)
    else:
        q = torch.randint(0, 256, (*rows, E // 2)).to(torch.uint8)
    groups = E // (group or E)
    if kind == "mxfp4":
        return Quantized(q, torch.randint(110, 130, (*rows, groups), dtype=torch.uint8), None)
    scale = (torch.rand(*rows, groups) * 0.02 + 1e-3).to(scales)
    return Quantized(q, scale, torch.randn(*rows, groups).mul_(0.1).to(scales) if shifts else None)


def slow(w: Quantized) -> torch.Tensor:
    """The weights by the formula, one by one, in float64."""
    rows, E = w.shape
    out = torch.zeros(rows, E, dtype=torch.float64)
    for o in range(rows):
        for e in range(E):
            scale = float(w.scale[o, e // w.group])
            if w.kind in quant.FOUR_BITS:
                block, at = divmod(e, 32)
                byte = int(w.q[o, 16 * block + at % 16])
                q = float(byte >> 4 if at >= 16 else byte & 15)
                if w.kind == "mxfp4":
                    sign, power, half = int(q) >> 3, int(q) >> 1 & 3, int(q) & 1
                    q = (-1) ** sign * (half / 2 if power == 0 else (1 + half / 2) * 2 ** (power - 1))
                    scale = 2 ** (scale - 127)
                elif w.shift is None:
                    q -= 8
            else:
                q = float(w.q[o, e])
            shift = 0.0 if w.shift is None else float(w.shift[o, e // w.group])
            out[o, e] = q * scale + shift
    return out


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_the_weights_are_those_of_the_formula(form):
    torch.manual_seed(0)
    w = matrix(*form, 3, 64)
    want = slow(w)
    assert torch.equal(w.dequantised(torch.float32), want.float())
    assert torch.equal(w.dequantised(torch.bfloat16), want.float().bfloat16())
    assert w.shape == (3, 64) and w.numel() == 192 and len(w) == 3 and w.group == (form[1] or 64)
    assert w.nbytes == sum(part.nbytes for part in w.parts)


def test_packing_is_undone():
    q = torch.randint(0, 16, (5, 96), dtype=torch.uint8)
    assert torch.equal(quant.unpacked(quant.packed(q)), q)
    assert quant.packed(q)[0, 3] == q[0, 3] | q[0, 19] << 4  # GGUF's order: the halves of 32


@pytest.mark.parametrize(
    ("form", "epilogue", "dtype"),
    cases.one_in(3, FORMATS, ["none", "silu_mul", "float32", "split"], [torch.float32, torch.bfloat16, torch.float64]),
)
def test_row_linear(form, epilogue, dtype):
    torch.manual_seed(0)
    for T, O in ((1, 14), (3, 2048), (70, 2048)):
        w, x = matrix(*form, O, 192), torch.randn(T, 192).to(dtype)
        b = None if epilogue == "split" else torch.randn(O).to(dtype)
        got, want = row_linear(x, w, b, epilogue), row_linear(x, w.dequantised(dtype), b, epilogue)
        assert got.dtype == want.dtype and got.shape == want.shape
        most = 2e-2 if dtype == torch.bfloat16 or (dtype == torch.float32 and T > 32) else 2e-5
        assert (got - want).abs().max() <= (0 if dtype == torch.float64 else most * want.abs().max())


@pytest.mark.parametrize("T", [33, 65, 300])
@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_many_rows_are_as_exact_as_few(kind, T):
    """A verify pass of many sequences, or a prefill."""
    torch.manual_seed(0)
    w, x = matrix(kind, 32, False, torch.float16, 600, 512), torch.randn(T, 512)
    exact = x.double() @ w.dequantised(torch.float64).T
    assert (row_linear(x, w) - exact).abs().max() < 2e-6 * float((x.abs() @ w.dequantised(torch.float32).abs().T).max())
    half = row_linear(x.bfloat16(), w)
    assert torch.equal(half, x.bfloat16() @ w.dequantised(torch.bfloat16).T)


def test_layers_side_by_side_and_a_head():
    torch.manual_seed(0)
    w, x = matrix(*FORMATS[5], 3, 40, 96), torch.randn(3, 2, 96, dtype=torch.float64)
    assert torch.equal(row_linear(x, w), row_linear(x, w.dequantised(torch.float64)))
    assert torch.equal(w[1].dequantised(torch.float32), w.dequantised(torch.float32)[1])
    head, ids = matrix(*FORMATS[0], 500, 96), torch.randperm(500)
    kept, rows = head[ids[:90]], torch.randn(4, 96)
    got, want = (vocab_topk(rows, h, ids[:90], 5) for h in (kept, kept.dequantised(torch.float32)))
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])


def test_int4s_scales_and_shifts_in_bfloat16():
    """Those of other kinds and of scaled sums stay, and beside float16 they become float32."""
    torch.manual_seed(0)
    x = torch.randn(10, 256)
    w = quant.quantised(x, "int4")
    narrow = w.for_bfloat16()
    assert torch.equal(narrow.scale, w.scale.bfloat16()) and torch.equal(narrow.shift, w.shift.bfloat16())
    q, scale, shift = (
        y.double().repeat_interleave(n, 1)
        for y, n in zip((quant.unpacked(narrow.q), narrow.scale, narrow.shift), (1, 32, 32), strict=True)
    )
    assert torch.equal(narrow.dequantised(torch.float32), (q * scale + shift).float())
    both = quant.joined([narrow, w])
    assert both.scale.dtype == both.shift.dtype == torch.float32
    parts = [part.dequantised(torch.float32) for part in (narrow, w)]
    assert torch.equal(both.dequantised(torch.float32), torch.cat(parts))
    assert torch.equal(of_quantised(narrow).dequantised(torch.float32), parts[0])
    sums = Quantized(w.q, w.scale[:, ::4].contiguous(), None)
    for other in (sums, quant.quantised(x, "int8", 32), quant.quantised(x, "mxfp4")):
        assert other.for_bfloat16() is other
    assert Quantized(w.q, w.scale, None).for_bfloat16().scale.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", quant.KINDS)
def test_rows_and_columns(kind):
    torch.manual_seed(0)
    w = quant.quantised(torch.randn(10, 128), kind, 32)
    dense = w.dequantised(torch.float32)
    for rows in (3, slice(2, 7), torch.tensor([4, 4, 0])):
        assert torch.equal(w[rows].dequantised(torch.float32), dense[rows])
    assert torch.equal(w.columns(32, 64).dequantised(torch.float32), dense[:, 32:96])
    w[torch.tensor([0, 5])] = w[torch.tensor([5, 9])]
    assert torch.equal(w.dequantised(torch.float32)[[0, 5]], dense[[5, 9]])


def every_mxfp4() -> tuple[torch.Tensor, torch.Tensor]:
    """A row for each scale but NaN, with all numbers in the columns: blocks [255, 1, 16], adjacent columns in a byte,
    and scales [255, 1]. gpt-oss stores such tensors."""
    numbers = torch.arange(32, dtype=torch.uint8).remainder(16).expand(255, 32)
    return (numbers[:, ::2] | numbers[:, 1::2] << 4).unsqueeze(1), torch.arange(255, dtype=torch.uint8).unsqueeze(1)


def test_mxfp4_is_what_transformers_and_gguf_make_of_it():
    """transformers reads adjacent columns from a byte, GGUF the same blocks as specker after their scale."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = every_mxfp4()
    w = Quantized(quant.packed(torch.stack((blocks & 15, blocks >> 4), -1).flatten(1)), scales, None)
    w.check()
    got = w.dequantised(torch.float32)
    assert int(got.isinf().sum()) == 4 * (4 + 2) and got[0, 1] == 2.0**-128  # 2 to 6 times 2^127, 4 and 6 times 2^126
    for dtype in (torch.float32, torch.bfloat16):
        want = convert_moe_packed_tensors(blocks[:, None], scales[:, None], dtype=dtype)[:, :, 0]
        assert torch.equal(w.dequantised(dtype), want)
    file = torch.cat((scales, w.q), 1).numpy()
    with np.errstate(over="ignore"):
        assert torch.equal(got, torch.from_numpy(dequantize(file, GGMLQuantizationType.MXFP4).copy()))


def test_mxfp4_is_rounded_as_gguf_rounds():
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    torch.manual_seed(0)
    x = torch.randn(40, 96) * torch.logspace(-3, 3, 40)[:, None]
    x[3, :32] = 0
    x[4] = torch.arange(96) / 8 - 6  # ties
    w = quant.quantised(x, "mxfp4")
    blocks = torch.cat((w.scale.unsqueeze(-1), w.q.unflatten(-1, (3, 16))), -1).flatten(1)
    assert torch.equal(blocks, torch.from_numpy(quantize(x.numpy(), GGMLQuantizationType.MXFP4)))


@pytest.mark.parametrize(("kind", "least"), [("int8", 127), ("fp8", 14), ("int4", 15)])
def test_rounding_is_to_the_nearest(kind, least):
    torch.manual_seed(0)
    x = torch.randn(2, 6, 128)
    w = quant.quantised(x, kind, 32)
    span = (x.unflatten(-1, (-1, 32)).aminmax(dim=-1).max - x.unflatten(-1, (-1, 32)).aminmax(dim=-1).min).max()
    error = (w.dequantised(torch.float32) - x).abs()
    if kind == "fp8":
        assert (error <= x.abs() / 16 + 448 * 2**-10 * 2e-3).all()  # three bits of mantissa
    else:
        assert error.max() <= span / least * 0.51 + span * 2**-10
    assert error.max() > 0
    zeros = quant.quantised(torch.zeros(2, 64), kind)
    assert zeros.dequantised(torch.float32).count_nonzero() == 0
    again = quant.quantised(w.dequantised(torch.float32), kind, 32)
    if kind == "int4":  # both ends of a group are kept, so a second rounding changes almost nothing
        torch.testing.assert_close(again.dequantised(torch.float32), w.dequantised(torch.float32), atol=5e-3, rtol=0)


@pytest.mark.parametrize("stack", [False, True])
def test_joining_loses_nothing(stack):
    torch.manual_seed(0)
    several = [matrix(*form, 6, 96) for form in FORMATS if form[0] != "fp8" and form[1] in (16, 32)]
    join = torch.stack if stack else torch.cat
    for parts in (several, several[2:4], several[1:2] * 2, several[-1:] * 2, several[-2:]):
        got = quant.joined(parts, stack)
        assert torch.equal(got.dequantised(torch.float32), join([w.dequantised(torch.float32) for w in parts]))
    assert quant.joined(several[2:4]).kind == "int4" and quant.joined(several).group == 16
    assert quant.joined(several[-1:] * 2).kind == "mxfp4"
    eights = [matrix("fp8", None, False, torch.float16, 4, 64) for _ in range(2)]
    assert quant.joined(eights).kind == "fp8"
    with pytest.raises(ValueError, match="fp8 and integers cannot be joined"):
        quant.joined([several[0], matrix("fp8", 16, False, torch.float16, 4, 96)])


def test_scales_are_float16_if_that_is_exact():
    scale = torch.tensor([[0.5, 2.0**-14]])
    assert quant.exact(scale, None)[0].dtype == torch.float16
    assert {x.dtype for x in quant.exact(scale, scale / 3) if x is not None} == {torch.float32}


@pytest.mark.parametrize(
    ("kind", "shape", "group", "words"),
    [
        ("int3", (4, 32), None, "kind must be one of int8, fp8, int4, mxfp4, got 'int3'"),
        ("int4", (4, 48), None, "int4 needs groups of a multiple of 32 columns that divide a row; got 48 columns"),
        ("int8", (4, 96), 64, "int8 needs groups of a multiple of 16 .* got 96 columns in groups of 64"),
    ],
)
def test_sizes_that_do_not_fit(kind, shape, group, words):
    with pytest.raises(ValueError, match=words):
        quant.quantised(torch.zeros(shape), kind, group)


def test_bad_arguments():
    w = matrix(*FORMATS[0], 8, 64)
    with pytest.raises(ValueError, match="expected x"):
        row_linear(torch.zeros(2, 32), w)
    four, eight = matrix(*FORMATS[-1], 8, 64), matrix(*FORMATS[2], 8, 64)
    for wrong, words in (
        (Quantized(four.q, four.scale, four.scale), "mxfp4 has no shift, got "),
        (Quantized(eight.q, four.scale, None), "unknown kind of matrix: q torch.int8, scale torch.uint8"),
    ):
        with pytest.raises(ValueError, match=words):
            wrong.check()
    with pytest.raises(ValueError, match="weight must be like x"):
        row_linear(torch.zeros(2, 64, dtype=torch.int32), w)


@pytest.mark.parametrize("form", [FORMATS[0], FORMATS[5], FORMATS[6], FORMATS[-1]], ids=str)
def test_the_operators_are_registered(form):
    torch.manual_seed(0)
    w, x = matrix(*form, 40, 64), torch.randn(3, 64)
    scales = w.scale, w.shift
    torch.library.opcheck(torch.ops.specker.row_linear.default, (x, w.q, None, "none", *scales))
    bare = (x, w.q, None, 5, None, 0.0, 0, None, 0.0, None, True)
    torch.library.opcheck(torch.ops.specker.vocab_topk.default, (*bare, *scales))
    run = torch.compile(lambda x, *parts: row_linear(x, Quantized(*parts)), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(x, w.q, *scales), row_linear(x, w), atol=1e-4, rtol=1e-4)
