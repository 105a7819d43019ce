"""row_linear's kernel in Triton's interpreter (`gpu`: on a device, in bfloat16) against the formula in float64, and
its contract. tests/kernels/test_row_ops.py has the reference."""

import importlib
import math
from itertools import product

import cases
import pytest
import torch
from compile_only import compilations
from formulas import randn
from reads_only import reads
from recorded import recording
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.errors import InterpreterError

from specker.kernels.row_linear import launch, row_linear, row_linear_ref
from specker.kernels.tiles import COMMON

op = importlib.import_module("specker.kernels.row_linear")
HALF = [torch.float32, torch.float16]
# O, E: size one, odd sizes, whole tiles, K in two and in four splits (the last one short).
SIZES = [(2, 1), (46, 33), (64, 128), (34, 200), (40, 1100), (66, 2100)]
ROWS = {torch.float32: 17, torch.float16: 65}  # one more than a tile has


def inputs(T, O, E, dtype, device="cpu"):
    w = randn(O, E, seed=1) / math.sqrt(E)
    return randn(T, E, dtype=dtype, device=device), w.to(device, dtype), randn(O, dtype=dtype, seed=2, device=device)


def formula(x, weight, bias, epilogue):
    y = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    if epilogue in op.GATES:
        gate, up = y.chunk(2, dim=1)
        cube = (2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3)
        y = (gate / (1 + torch.exp(-gate)) if epilogue == "silu_mul" else gate * (1 + torch.tanh(cube)) / 2) * up
    return y


def close(got, want, dtype, roundings):
    """Within the rounding of the result and float32's error of the sum."""
    scale = want.abs().max() if want.numel() else 1.0
    own = roundings * torch.finfo(dtype).eps * want.abs() / 2
    return want.shape == got.shape and bool(((got.double() - want).abs() <= own + 1e-5 * scale).all())


@pytest.mark.parametrize(
    ("dtype", "size", "epilogue"),
    [*cases.one_in(2, HALF, SIZES, ["none", "silu_mul"]), *product(HALF, (SIZES[1], SIZES[4]), ["gelu_tanh_mul"])],
)
def test_kernel(poisoned, dtype, size, epilogue):
    O, E = size
    for T in (0, 1, 7, ROWS[dtype]) if E < 1000 else (3, ROWS[dtype]) if E < 2000 else (3,):
        x, weight, b = inputs(T, O, E, dtype)
        for bias in (None, b):
            got = launch(x, weight, bias, epilogue)
            assert got.dtype == dtype
            assert close(got, formula(x, weight, bias, epilogue), dtype, 1.01), (T, bias is None)


def a_group(G, T, O, E, dtype, device="cpu"):
    x, weight, bias = inputs(G * T, G * O, E, dtype, device)
    return x.view(G, T, E), weight.view(G, O, E), bias.view(G, O)


def formulas(x, weight, bias, epilogue):
    each = bias if bias is not None else [None] * len(x)
    return torch.stack([formula(*layer, epilogue) for layer in zip(x, weight, each, strict=True)])


@pytest.mark.parametrize(("size", "dtype", "epilogue"), cases.one_in(2, SIZES, HALF, ["none", "silu_mul"]))
def test_layers_side_by_side(poisoned, size, dtype, epilogue):
    """Each with its own weight and bias. T is no multiple of the tile, so a row in the wrong layer would show."""
    O, E = size
    for G, T in ((1, 3), (3, 1), (2, ROWS[dtype])) if E < 1000 else ((3, 2),):
        x, weight, b = a_group(G, T, O, E, dtype)
        for bias in (None, b):
            got = launch(x, weight, bias, epilogue)
            assert got.dtype == dtype and close(got, formulas(x, weight, bias, epilogue), dtype, 1.01), (G, T)


def test_layers_side_by_side_need_fewer_splits():
    assert [op.tiles(op.Product(torch.float16, 40, 1100, 90, G))[4] for G in (1, 3, 80)] == [2, 2, 1]
    assert (
        op.tiles(op.Product(torch.bfloat16, 1024, 4096, 90))[4] == 4
        and op.tiles(op.Product(torch.bfloat16, 1024, 4096, 90, 4))[4] == 1
    )
    with FakeTensorMode():
        x, weight = (torch.empty(4, n, 4096, dtype=torch.bfloat16) for n in (8, 1024))
        assert op.row_linear_cost(x, weight)[0] == 4 * 2 * (8 * 4096 + 1024 * 4096 + 8 * 1024)
    for args in ((4096, 4096), (6144, 4096), (3072, 2048), (512, 4096)):
        assert op.tiles(op.Product(torch.bfloat16, *args, 90, 4)) == op.tiles(
            op.Product(torch.bfloat16, 4 * args[0], args[1], 90)
        )


@pytest.mark.parametrize("form", [None, *COMMON])
def test_few_rows_change_neither_columns_nor_splits(form):
    """These decide the order of a row's sums. A gate's weight makes at least two programs an SM."""
    for O, E, split in ((28672, 4096, False), (16384, 2048, False), (4096, 14336, True), (2048, 4096, True)):
        product = op.Product(torch.bfloat16, O, E, 90, split=split, form=form)
        (_, _, *own), (_, n, *same) = op.tiles(product), op.tiles(product._replace(few=True))
        assert (own[0], own[2]) == (same[0], same[2])
        assert split or -(-O // n) * own[2] >= 1.9 * 132, n


def test_tiles_follow_the_number_of_sms(monkeypatch):
    """4096 -> 4096: 128 programs of 32 rows fill 132 SMs. 78 SMs (H20) take 64 tiles of 64 rows; 264 split K."""
    tiles = {n: op.tiles(op.Product(torch.bfloat16, 4096, 4096, 90, sms=n)) for n in (0, 132, 78, 264)}
    assert tiles[0] == tiles[132] and [tiles[n][1] for n in (132, 78)] == [32, 64] and tiles[264][4] == 2
    seen = []
    monkeypatch.setattr(op, "sms", lambda device: seen.append(device) or 78)
    x = torch.zeros(1, 1024, dtype=torch.float16)
    launch(x, torch.zeros(512, 1024, dtype=torch.float16), None, "none")
    assert seen == [x.device]


@pytest.mark.parametrize(("O", "E"), [(46, 33), (40, 1100)])
def test_a_row_does_not_depend_on_its_group(O, E):
    x, weight, bias = a_group(3, 65, O, E, torch.float16)
    whole = launch(x, weight, bias, "silu_mul")
    for T in (1, 7, 64):
        some = launch(x[:, :T].contiguous(), weight, bias, "silu_mul")
        assert torch.equal(some, whole[:, :T]), T


def test_the_sizes_cover_splits_and_tiles():
    for dtype in HALF:
        assert [op.tiles(op.Product(dtype, O, E, 90))[4] for O, E in SIZES] == [1, 1, 1, 1, 2, 4]
    assert op.tiles(op.Product(torch.bfloat16, 4096, 14336, 90))[4] == 4
    assert op.tiles(op.Product(torch.bfloat16, 4096, 4096, 90))[1::3] == (32, 1)
    for O, E in [(4096, 4096), (28672, 4096), (4096, 14336), (1024, 4096), (17, 100000), (3072, 8192)]:
        for arch in (80, 90, 100):
            m, n, block, stages, splits = op.tiles(op.Product(torch.bfloat16, O, E, arch))
            shared = (m + n) * block * 2 * (stages - (arch == 80))
            assert (
                m == 64 and stages >= (2 if n == block == 128 else 3) and shared <= (99 if arch == 80 else 227) * 1024
            )
            split = -(-E // (splits * block)) * block
            assert (splits - 1) * split < E <= splits * split  # no split is empty


@pytest.mark.parametrize(("tile", "epilogue"), cases.one_in(2, [(64, 64, 128), (64, 128, 64)], ["none", "silu_mul"]))
def test_the_larger_tiles(poisoned, monkeypatch, tile, epilogue):
    monkeypatch.setattr(op, "tiles", lambda *_: (*tile, 3, 2))
    op._variants.cache_clear()
    try:
        x, weight, bias = inputs(3, 150, 200, torch.float16)
        got = launch(x, weight, bias, epilogue)
    finally:
        op._variants.cache_clear()
    assert close(got, formula(x, weight, bias, epilogue), torch.float16, 1.01)


def test_the_result_is_rounded_once():
    one, small = 1.0, 2.0**-11  # 1 + 2^-11 is a tie that falls to 1; three of them are 1.001953 in fp16's grid
    x = torch.tensor([[one, small, small, small]], dtype=torch.float16)
    weight = torch.ones(32, 4, dtype=torch.float16)
    bias = torch.full((32,), -1.0, dtype=torch.float16)
    assert launch(x, weight, bias, "none").unique().tolist() == [3 * small]


@pytest.mark.parametrize(("O", "E"), [(46, 33), (40, 1100), (66, 2100)])
def test_splits_and_unrounded_results(poisoned, O, E):
    """The splits' sums add up, in order, to the float32 result, which rounds to the plain one: bit for bit."""
    for lead in ((), (2,)):
        x, weight, bias = inputs(3, O, E, torch.float16)
        if lead:
            x, weight, bias = a_group(2, 3, O, E, torch.float16)
        parts, whole = (launch(x, weight, None, how) for how in ("split", "float32"))
        assert parts.shape == (op.split_of(x, weight)[0], *lead, 3, O) and parts.dtype == whole.dtype == torch.float32
        total = torch.zeros_like(whole)
        for part in parts:
            total = total + part
        assert torch.equal(total, whole) and torch.equal(whole.half(), launch(x, weight, None, "none"))
        assert torch.equal(launch(x, weight, bias, "float32").half(), launch(x, weight, bias, "none"))
        reference = row_linear(x, weight, epilogue="split")
        assert reference.shape == parts.shape and (reference - parts).abs().max() <= 1e-4
        assert (row_linear(x, weight, bias, "float32") - launch(x, weight, bias, "float32")).abs().max() <= 1e-4


def test_splits_without_a_launch_allow_larger_tiles():
    """4096 -> 4096: 64 tiles of 64 rows times 4 splits instead of 128 tiles of 32; few outputs keep small tiles."""

    def chosen(O, E, **how):
        return op.tiles(op.Product(torch.bfloat16, O, E, 90, **how))[1::3]

    assert chosen(4096, 4096) == (32, 1) and chosen(4096, 4096, split=True) == (64, 4)
    assert chosen(2048, 2048) == (32, 2) and chosen(2048, 2048, split=True) == (64, 4)
    assert chosen(4096, 14336) == chosen(4096, 14336, split=True) == (64, 4)
    assert chosen(28672, 4096, split=True) == (128, 1) and chosen(64, 1024, split=True) == chosen(64, 1024)
    with FakeTensorMode():
        x, weight = (torch.empty(n, 4096, dtype=torch.bfloat16) for n in (3, 4096))
        assert op.split_of(x, weight) == (4, 1024)


def test_the_result_goes_where_it_is_wanted(poisoned):
    x, weight, bias = inputs(3, 40, 1100, torch.float16)
    whole = torch.full((5, 40), math.nan)
    got = launch(x, weight, bias, "float32", whole[1:4])
    assert got.data_ptr() == whole[1].data_ptr() and torch.equal(got, launch(x, weight, bias, "float32"))
    assert whole[0].isnan().all() and whole[4].isnan().all()
    out = torch.empty(3, 40)
    assert row_linear(x, weight, bias, "float32", out=out) is out
    assert torch.equal(out, row_linear(x, weight, bias, "float32"))
    for wrong in (whole[:3, :39], whole[:3].half(), whole[:4], torch.empty(40, 3).T):
        with pytest.raises(ValueError, match="out must be contiguous"):
            launch(x, weight, bias, "float32", wrong)


def test_split_takes_no_bias_and_keeps_float64():
    x, weight, bias = inputs(3, 8, 5, torch.float64)
    with pytest.raises(ValueError, match="split has no bias"):
        row_linear(x, weight, bias, "split")
    parts = row_linear(x, weight, epilogue="split")
    assert parts.dtype == torch.float64 and torch.allclose(parts.sum(0), x @ weight.T, rtol=0, atol=1e-12)
    assert torch.equal(row_linear(x, weight, bias, "float32"), row_linear(x, weight, bias))
    half, matrix = torch.empty(3, 5).half(), torch.empty(8, 5).half()
    assert op.row_linear_cost(half, matrix, None, "float32")[0] == 2 * (15 + 40) + 4 * 24


@pytest.mark.parametrize(("dtype", "size"), cases.one_in(2, HALF, [(46, 33), (34, 200), (40, 1100)]))
def test_a_row_is_the_same_alone_and_among_others(dtype, size):
    (O, E), n = size, ROWS[dtype]
    x, weight, bias = inputs(n, O, E, dtype)
    whole = launch(x, weight, bias, "silu_mul")
    for T, first in ((1, 0), (1, n - 1), (2, n // 2), (7, 0), (7, n - 7), (n - 1, 1), (n, 0)):
        rows = slice(first, first + T)
        assert torch.equal(launch(x[rows], weight, bias, "silu_mul"), whole[rows]), (T, first)


@pytest.mark.parametrize(("dtype", "tiles"), cases.one_in(2, HALF, [5, 16]))
def test_a_row_of_a_large_round_is_the_same_alone(dtype, tiles):
    """With K in one part and in several, whose sums `residual_merge` or another kernel adds."""
    tile = ROWS[dtype] - 1
    T = tiles * tile - tile // 3
    for O, E, epilogue in ((34, 40, "silu_mul"), (34, 1100, "split")):
        x, weight, _ = inputs(T, O, E, dtype)
        whole = launch(x, weight, None, epilogue)
        for row in (0, tile, 4 * tile + 1, T - 1):
            alone = launch(x[row : row + 1], weight, None, epilogue)
            assert torch.equal(alone, whole.narrow(-2, row, 1)), (row, epilogue)


@pytest.mark.parametrize(("size", "epilogue"), cases.one_in(2, [(46, 33), (46, 128), (40, 1100)], ["none", "silu_mul"]))
def test_reads_only_its_tensors(monkeypatch, size, epilogue):
    O, E = size
    x, weight, bias = inputs(3, O, E, torch.float16)
    with reads(monkeypatch, x, weight, bias):
        launch(x, weight, bias, epilogue)
    with reads(monkeypatch, x, weight[: O - 2], bias), pytest.raises(InterpreterError, match="outside every tensor"):
        launch(x, weight, bias, epilogue)
    group = a_group(2, 3, O, E, torch.float16)
    with reads(monkeypatch, *group):
        launch(*group, epilogue)


@pytest.mark.parametrize("E", [33, 128, 1100])
def test_views_surrounded_by_nan(E):
    x, weight, bias = inputs(5, 40, E, torch.float16)
    want = launch(x, weight, bias, "none")

    def inside(tensor):
        around = torch.full((tensor.numel() + 2 * 64 * E,), math.nan, dtype=tensor.dtype)
        around[5 : 5 + tensor.numel()] = tensor.flatten()
        return around[5 : 5 + tensor.numel()].view(tensor.shape)

    assert torch.equal(launch(inside(x), inside(weight), inside(bias), "none"), want)
    strided = torch.cat((x, x * math.nan), dim=1)[:, :E]
    every_second = torch.stack((bias, bias * math.nan), dim=1)[:, 0]
    assert not strided.is_contiguous() and not every_second.is_contiguous()
    assert torch.equal(launch(strided, weight.T.contiguous().T, every_second, "none"), want)


def test_rows_per_layer_choose_kernel_or_bmm():
    """The number of layers does not matter; the kernel takes up to 1,024 rows."""
    with recording() as log:
        for G, T in ((4, 1024), (1300, 1), (4, 1025)):
            row_linear(torch.empty(G, T, 64, dtype=torch.float16), torch.empty(G, 32, 64, dtype=torch.float16))
    names = [name for name, *_ in log if "row_linear" in name or "bmm" in name]
    assert [name.partition(":")[0] for name in names] == [
        "_row_linear_kernel",
        "_row_linear_kernel",
        "aten.bmm.default",
    ]


def test_the_launcher_reads_no_tensor_and_stays_within_its_rows(unlaunched):
    """Fake tensors have no values to read."""
    for T, O, E in ((1, 4096, 4096), (1, 28672, 4096), (65, 28672, 4096), (8, 4096, 14336)):
        with FakeTensorMode():
            x, weight = torch.empty(T, E, dtype=torch.bfloat16), torch.empty(O, E, dtype=torch.bfloat16)
            assert launch(x, weight, None, "silu_mul").shape == (T, O // 2)
    assert unlaunched == [
        ("_row_linear_kernel", (1, 128, 1)),
        ("_row_linear_kernel", (1, 448, 1)),
        ("_row_linear_kernel", (2, 224, 1)),
        ("_row_linear_kernel", (1, 64, 4)),
        ("_row_linear_merge_kernel", (8, 4)),
    ]


@pytest.mark.parametrize("epilogue", ["none", "silu_mul"])
def test_registration(epilogue):
    x, weight, bias = inputs(3, 8, 5, torch.float32)
    for b in (None, bias):
        torch.library.opcheck(torch.ops.specker.row_linear, (x, weight, b, epilogue))
    torch.library.opcheck(torch.ops.specker.row_linear, (x[:0], weight, None, epilogue))
    for how in ("split", "float32"):
        torch.library.opcheck(torch.ops.specker.row_linear, (x.half(), weight.half(), None, how))
    x, weight, bias = a_group(2, 3, 8, 5, torch.float32)
    for b in (None, bias):
        torch.library.opcheck(torch.ops.specker.row_linear, (x, weight, b, epilogue))


def test_fullgraph():
    x, weight, bias = inputs(3, 8, 5, torch.float32)
    compiled = torch.compile(lambda *a: row_linear(*a, epilogue="silu_mul"), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, weight, bias), row_linear_ref(x, weight, bias, "silu_mul"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("epilogue", ["none", "silu_mul"])
def test_the_reference_of_layers_side_by_side(dtype, epilogue):
    x, weight, b = a_group(3, 4, 8, 5, dtype)
    for bias in (None, b):
        got, want = row_linear(x, weight, bias, epilogue), formulas(x, weight, bias, epilogue)
        assert got.dtype == dtype and (got - want).abs().max() <= 8 * torch.finfo(dtype).eps * want.abs().max()
        one, alone = op.row_linear_cost(x, weight, bias, epilogue), None if bias is None else bias[0]
        assert one == tuple(3 * n for n in op.row_linear_cost(x[0], weight[0], alone, epilogue))


def launches():
    """Runs in a compiling process: two weights, one of them with a split K, and many lengths."""
    for T in (1, 2, 16, 17, 64, 65, 256):
        x = torch.zeros(T, 1024).bfloat16()
        launch(x, torch.zeros(64, 1024).bfloat16(), torch.zeros(64).bfloat16(), "silu_mul")
        launch(x[:, :64], torch.zeros(64, 64).bfloat16(), None, "none")
        launch(x.expand(3, T, 1024), torch.zeros(3, 64, 1024).bfloat16(), torch.zeros(3, 64).bfloat16(), "silu_mul")


def test_no_length_recompiles():
    assert compilations(__file__) == {"_row_linear_kernel": 3, "_row_linear_merge_kernel": 2}


def test_refuses():
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="bias must be on cpu, got meta"):
        row_linear(x, torch.zeros(6, 8), torch.zeros(6, device="meta"), "none")
    with pytest.raises(ValueError, match=r"bias must be like x, torch\.float32, got torch\.float64"):
        row_linear(x, torch.zeros(6, 8), torch.zeros(6, dtype=torch.float64))
    with pytest.raises(ValueError, match="expected x"):
        row_linear(torch.zeros(1, 2, 2, 8), torch.zeros(1, 2, 6, 8))
    for weight in (torch.zeros(8), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="expected x"):
            row_linear(weight, weight, epilogue="silu_mul")
    for weight in (torch.zeros(3, 6, 8), torch.zeros(6, 8), torch.zeros(2, 6, 7), torch.zeros(1, 2, 6, 8)):
        with pytest.raises(ValueError, match=r"or x \[G, T, E\] and weight \[G, O, E\]: x \(2, 2, 8\)"):
            row_linear(torch.zeros(2, 2, 8), weight)
    with pytest.raises(ValueError, match=r"bias must be \[2, 6\], got \(6,\)"):
        row_linear(torch.zeros(2, 2, 8), torch.zeros(2, 6, 8), torch.zeros(6))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("O", "E"), [(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (1024, 4096), (4098, 1023)]
)
@pytest.mark.parametrize("epilogue", ["none", "silu_mul"])
def test_bfloat16_is_as_good_as_torch(O, E, epilogue):
    for T in (1, 8, 65):
        x, weight, b = inputs(T, O, E, torch.bfloat16, "cuda")
        for bias in (None, b):
            exact = formula(x, weight, bias, epilogue)
            ours, theirs = row_linear(x, weight, bias, epilogue), row_linear_ref(x, weight, bias, epilogue)
            assert (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize(("O", "E"), [(4096, 4096), (6144, 4096), (3072, 2048), (256, 4096)])
@pytest.mark.parametrize("epilogue", ["none", "silu_mul"])
def test_bfloat16_layers_side_by_side_are_as_good_as_torch(O, E, epilogue):
    for T in (1, 12):
        x, weight, b = a_group(4, T, O, E, torch.bfloat16, "cuda")
        for bias in (None, b):
            exact = formulas(x, weight, bias, epilogue)
            ours, theirs = row_linear(x, weight, bias, epilogue), row_linear_ref(x, weight, bias, epilogue)
            assert (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize(("O", "E"), [(4096, 4096), (28672, 4096), (4096, 14336), (1024, 4096), (4098, 1023)])
def test_bfloat16_rows_are_invariant(O, E):
    x, weight, bias = inputs(256, O, E, torch.bfloat16, "cuda")
    whole = row_linear(x, weight, bias, "silu_mul")
    for T in (1, 2, 7, 64, 65):
        for first in {0, 100, 256 - T}:
            rows = slice(first, first + T)
            assert torch.equal(row_linear(x[rows], weight, bias, "silu_mul"), whole[rows]), (T, first)


@pytest.mark.gpu
def test_more_rows_than_the_kernel_takes():
    x, weight, _ = inputs(300, 64, 128, torch.bfloat16, "cuda")
    assert torch.equal(row_linear(x, weight), row_linear_ref(x, weight))


@pytest.mark.gpu
def test_a_weight_of_more_than_2_31_elements():
    """Its last rows, beyond 32-bit offsets, give the same as the last rows of a small weight."""
    E, last = 8192, 2048
    O = 2**31 // E + last
    try:
        weight = torch.zeros(O, E, dtype=torch.bfloat16, device="cuda")
    except torch.OutOfMemoryError:
        pytest.skip("needs 5 GB")
    assert weight[-last:].storage_offset() >= 2**31
    x, rows = (randn(n, E, dtype=torch.bfloat16, seed=n, device="cuda") for n in (7, last))
    weight[-last:] = rows
    got = row_linear(x, weight)
    assert got.shape == (7, O) and not got[:, :-last].any()
    exact = x.double() @ rows.double().T
    assert (got[:, -last:] - exact).abs().max() <= 2 * (row_linear_ref(x, rows) - exact).abs().max()
    del weight, got
    torch.cuda.empty_cache()


@pytest.mark.parametrize(("O", "E"), [(0, 4), (4, 0)])
def test_the_reference_serves_an_empty_weight(O, E):
    x, weight = torch.ones(2, E), torch.ones(O, E)
    assert not op._fits(op.Arguments(x, weight)) and op._fits(op.Arguments(x[:0], torch.ones(4, 4)))
    assert torch.equal(row_linear(x, weight), torch.zeros(2, O))
