"""row_linear, kv_project and vocab_topk over quantised weights: the kernels in Triton's interpreter (`gpu`: on a
device, in bfloat16) against the float64 product of the dequantised weight, and their contract."""

import importlib
import math

import cases
import pytest
import torch
from compile_only import compilations
from formulas import randn
from reads_only import reads
from torch._subclasses.fake_tensor import FakeTensorMode

from specker.kernels.kv_calibrate import kv_calibrate, rope_table
from specker.kernels.kv_project import kv_project, kv_project_ref
from specker.kernels.noise import gumbel
from specker.kernels.quant import FOUR_BITS, Format, Quantized, packed, quantised
from specker.kernels.row_linear import row_linear, row_linear_ref
from specker.kernels.vocab_topk import Noise, vocab_topk, vocab_topk_ref

linear = importlib.import_module("specker.kernels.row_linear")
project = importlib.import_module("specker.kernels.kv_project")
topk = importlib.import_module("specker.kernels.vocab_topk")
HALF = [torch.float32, torch.float16]
MXFP4 = "mxfp4", 32, False, torch.uint8
# kind, group (None: a row), shift, dtype of the scales
FORMATS = [
    ("int8", None, False, torch.float16),
    ("int8", 16, False, torch.float32),
    ("int8", 32, True, torch.float16),
    ("int8", 48, False, torch.float16),
    ("fp8", None, False, torch.float32),
    ("fp8", 32, True, torch.float16),
    ("int4", None, True, torch.float16),
    ("int4", 32, False, torch.float16),
    ("int4", 32, True, torch.float32),
    ("int4", 64, True, torch.float16),
    ("int4", 96, False, torch.float32),
    ("int4", 192, False, torch.float16),
    MXFP4,
]
# O, E: one tile, whole tiles, K in two and in three splits (the last one short).
SIZES = [(2, 192), (34, 576), (46, 1152), (70, 1728)]
ROWS = {torch.float32: 17, torch.float16: 65}  # one more than a tile has


def a_weight(form, *shape, seed=1, device="cpu"):
    """Random numbers of every value, with scales that make the products about 1."""
    kind, group, shift, dtype = form
    group, generator = group or shape[-1], torch.Generator().manual_seed(seed)
    scales = (*shape[:-1], shape[-1] // group)
    scale = (0.5 + torch.rand(scales, generator=generator)) / math.sqrt(shape[-1])
    offset = torch.randn(scales, generator=generator) / math.sqrt(shape[-1]) if shift else None
    if kind in FOUR_BITS:
        q = torch.randint(256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, generator=generator)
        if kind == "mxfp4":
            bits = torch.randint(-3, 1, scales, generator=generator) + 127 - round(math.log2(shape[-1]) / 2)
            return Quantized(q, bits.to(torch.uint8), None).to(device)
        scale /= 4
    elif kind == "int8":
        q = torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)
        scale /= 64
    else:
        q = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        q = torch.where(q & 127 == 127, 0, q).view(torch.float8_e4m3fn)  # no NaN
        scale /= 128
    return Quantized(q, scale.to(dtype), None if offset is None else offset.to(dtype)).to(device)


def formula(x, weight, bias=None, epilogue="none"):
    y = x.double() @ weight.widened(x.dtype, torch.float32).double().mT + (
        0 if bias is None else bias.double().unsqueeze(-2)
    )
    if epilogue == "silu_mul":
        gate, up = y.chunk(2, dim=-1)
        y = gate / (1 + torch.exp(-gate)) * up
    return y


def close(got, want, dtype):
    """Within one rounding of the result and float32's error of the sum."""
    scale = want.abs().max() if want.numel() else 1.0
    own = 1.01 * torch.finfo(dtype).eps * want.abs() / 2
    return want.shape == got.shape and bool(((got.double() - want).abs() <= own + 1e-5 * scale).all())


@pytest.fixture
def tiles_of_64(monkeypatch):
    """Tiles large enough for the weight to be the left operand, and two splits."""
    monkeypatch.setattr(linear, "tiles", lambda *_: (64, 64, 64, 3, 2))
    linear._variants.cache_clear()
    yield
    linear._variants.cache_clear()


@pytest.mark.parametrize(("form", "dtype", "epilogue"), cases.one_in(8, FORMATS, HALF, ["none", "silu_mul"]))
def test_row_linear(poisoned, form, dtype, epilogue):
    """Every second size has a bias: with an epilogue those that have none without it."""
    for n, ((O, E), T) in enumerate(zip(SIZES, (0, ROWS[dtype], 7, 1), strict=True), int(epilogue == "none")):
        x, weight = randn(T, E, dtype=dtype), a_weight(form, O, E)
        bias = randn(O, dtype=dtype, seed=2) if n % 2 else None
        got = linear.launch(x, weight, bias, epilogue)
        assert got.dtype == dtype and close(got, formula(x, weight, bias, epilogue), dtype), (O, E, T)


@pytest.mark.parametrize(("form", "epilogue"), cases.one_in(2, FORMATS[::3], ["none", "silu_mul"]))
def test_layers_side_by_side(poisoned, form, epilogue):
    """Each with its own numbers, scales and shifts."""
    for G, (O, E) in ((1, SIZES[1]), (3, SIZES[0]), (2, SIZES[2])):
        x, weight = randn(G, 3, E, dtype=torch.float16), a_weight(form, G, O, E)
        bias = randn(G, O, dtype=torch.float16, seed=2)
        got = linear.launch(x, weight, bias, epilogue)
        assert close(got, formula(x, weight, bias, epilogue), torch.float16), (G, O, E)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("E", [1, 33, 200])
def test_odd_rows_with_one_scale(poisoned, kind, E):
    for dtype in HALF:
        x, weight = randn(5, E, dtype=dtype), a_weight((kind, None, False, torch.float32), 37, E)
        assert linear._fits(linear.Arguments(x, weight))
        assert close(linear.launch(x, weight, None, "none"), formula(x, weight), dtype)


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_every_number_is_exact(kind):
    """Times one, with a scale of one: all numbers of eight or four bits but NaN, fp8's subnormal ones included."""
    weight = a_weight((kind, None, False, torch.float16), 256, 32)
    q = torch.arange(256).to(torch.uint8)
    if kind == "fp8":
        q = torch.where(q & 127 == 127, 0, q)
    numbers = q.view(weight.q.dtype)[:, None].expand_as(weight.q)
    weight = Quantized(numbers, torch.ones(256, 1, dtype=torch.float16), None)
    got = linear.launch(torch.eye(32), weight, None, "none").T
    assert torch.equal(got, weight.dequantised(torch.float32))
    assert len(got.unique()) == {"int8": 256, "fp8": 253, "int4": 16}[kind]  # 0 and -0 are one


@pytest.mark.parametrize("left", [False, True])
def test_every_mxfp4_is_exact(request, left):
    """Bit for bit: rows of the identity give all numbers times all scales that leave them finite."""
    if left:
        request.getfixturevalue("tiles_of_64")
    numbers = packed(torch.arange(192, dtype=torch.uint8).remainder(16).expand(253, 192))
    scales = ((torch.arange(253)[:, None] + torch.arange(6) * 40) % 253).to(torch.uint8)
    weight = Quantized(numbers, scales, None)
    assert torch.equal(linear.launch(torch.eye(192), weight, None, "none").T, weight.dequantised(torch.float32))
    some = Quantized(weight.q, scales.clamp(95, 140), None)  # float16 rounds the smallest numbers to 0
    half = some.dequantised(torch.float16)
    assert half.isfinite().all() and (half.abs() < 2**-14).sum() > half.count_nonzero() / 4
    assert torch.equal(linear.launch(torch.eye(192).half(), some, None, "float32").T, half.float())


@pytest.mark.parametrize("form", [form for form in FORMATS if form[0] == "int4" and form[1] in (32, 64)])
def test_int4_weights_are_rounded_once(tiles_of_64, form):
    """Bit for bit: rows of the identity give the weights, for scales and shifts of all magnitudes."""
    E, dtype = 192, form[3]
    weight = a_weight(form, 70, E)
    sizes = 2.0 ** torch.arange(-30, 16)[torch.randperm(46, generator=torch.Generator().manual_seed(4))].repeat(2)[:70]
    scale = (weight.scale.float() * sizes[:, None]).to(dtype)
    shift = None if weight.shift is None else (weight.shift.float() * sizes.flip(0)[:, None]).to(dtype)
    wide = Quantized(weight.q, scale, shift)
    assert (scale.abs() < torch.finfo(torch.float16).smallest_normal).any() and wide.dequantised(
        torch.float32
    ).isfinite().all()
    assert torch.equal(linear.launch(torch.eye(E), wide, None, "none").T, wide.dequantised(torch.float32))
    half = linear.launch(torch.eye(E).half(), weight, None, "float32").T
    assert torch.equal(half, weight.dequantised(torch.float16).float())


@pytest.mark.parametrize("form", FORMATS[::2])
def test_splits_add_up_and_results_go_where_they_are_wanted(poisoned, form):
    O, E = SIZES[2]
    x, weight = randn(3, E, dtype=torch.float16), a_weight(form, O, E)
    parts, whole = (linear.launch(x, weight, None, how) for how in ("split", "float32"))
    assert parts.shape == (linear.split_of(x, weight)[0], 3, O) and len(parts) > 1
    total = torch.zeros_like(whole)
    for part in parts:
        total = total + part
    assert torch.equal(total, whole) and torch.equal(whole.half(), linear.launch(x, weight, None, "none"))
    assert (row_linear(x, weight, epilogue="split") - parts).abs().max() <= 1e-4
    around = torch.full((5, O), math.nan)
    assert linear.launch(x, weight, None, "float32", around[1:4]).data_ptr() == around[1].data_ptr()
    assert torch.equal(around[1:4], whole) and around[0].isnan().all() and around[4].isnan().all()
    out = torch.empty(3, O)
    assert row_linear(x, weight, None, "float32", out=out) is out


@pytest.mark.parametrize(("form", "dtype"), cases.one_in(5, FORMATS, HALF))
def test_a_row_is_the_same_alone_and_among_others(form, dtype):
    (O, E), T = SIZES[2], ROWS[dtype]
    x, weight = randn(T, E, dtype=dtype), a_weight(form, O, E)
    whole = linear.launch(x, weight, None, "silu_mul")
    for rows in (slice(0, 1), slice(T - 1, T), slice(T // 2 - 3, T // 2 + 4), slice(0, T - 1)):
        assert torch.equal(linear.launch(x[rows], weight, None, "silu_mul"), whole[rows]), rows


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_eight_bits_equal_the_dequantised_weight(kind):
    """Bit for bit, with the same tiles and splits."""
    x, weight = randn(3, 192, dtype=torch.float16), a_weight((kind, 32, False, torch.float16), 34, 192)
    plain = weight.dequantised(torch.float16)
    assert torch.equal(linear.launch(x, weight, None, "none"), linear.launch(x, plain, None, "none"))


@pytest.mark.parametrize("form", [FORMATS[1], FORMATS[4], FORMATS[8], MXFP4])
def test_reads_only_its_tensors(monkeypatch, form):
    """Nothing beyond the weight's numbers, scales and shifts, in the last rows and columns of tiles as well."""
    for O, E in SIZES[0], SIZES[2]:
        x, weight = randn(3, E, dtype=torch.float16), a_weight(form, O, E)
        held = [part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part for part in weight.parts]
        with reads(monkeypatch, x, *held):
            linear.launch(x, weight, None, "silu_mul")


@pytest.mark.parametrize("form", [FORMATS[0], FORMATS[5], FORMATS[9], MXFP4])
def test_views_surrounded_by_nan(form):
    O, E = SIZES[1]
    x, weight = randn(3, E, dtype=torch.float16), a_weight(form, O, E)
    want = linear.launch(x, weight, None, "none")

    def inside(part):
        bits = part.view(torch.uint8 if part.element_size() == 1 else torch.int16)
        around = torch.full((part.numel() + 2 * E,), 127, dtype=bits.dtype)  # NaN in fp8
        if part.element_size() == 2:
            around.view(torch.float16).fill_(math.nan)
        around[5 : 5 + part.numel()] = bits.flatten()
        return around[5 : 5 + part.numel()].view(part.dtype).view(part.shape)

    assert torch.equal(linear.launch(inside(x), weight.map_parts(inside), None, "none"), want)
    wide = weight.map_parts(
        lambda part: torch.cat((part.view(torch.uint8), part.view(torch.uint8)), -1).view(part.dtype)
    )
    half = wide.map_parts(lambda part: part[..., : part.shape[-1] // 2])
    assert not half.q.is_contiguous() and torch.equal(linear.launch(x, half, None, "none"), want)


@pytest.mark.parametrize("form", [form for form in FORMATS if form[1] not in (48, 96)])
def test_the_weight_as_the_left_operand(poisoned, tiles_of_64, form):
    """In the last tile some rows do not exist, and with eight bits some columns. A row is the same alone and among
    others."""
    O, E, T = 150, 192 if form[0] in FOUR_BITS else 192 + (form[1] or 8), 65
    x, weight, bias = randn(T, E, dtype=torch.float16), a_weight(form, O, E), randn(O, dtype=torch.float16, seed=2)
    stream, _ = linear._variants(linear.Product(x.dtype, O, E, 90, 1, 132, form=weight.format), "none", True)
    assert stream.left and stream.constexprs["LEFT"]
    got = linear.launch(x, weight, bias, "none")
    assert close(got, formula(x, weight, bias), torch.float16)
    for rows in (slice(0, 1), slice(64, 65), slice(29, 36)):
        assert torch.equal(linear.launch(x[rows], weight, bias, "none"), got[rows]), rows


def test_gate_and_up_as_left_operands(poisoned, monkeypatch, tiles_of_64):
    monkeypatch.setattr(linear, "tiles", lambda *_: (64, 128, 64, 3, 1))
    x, weight = randn(3, 192, dtype=torch.float16), a_weight(FORMATS[8], 300, 192)
    product = linear.Product(x.dtype, 300, 192, 90, 1, 132, form=weight.format)
    assert linear._variants(product, "silu_mul")[0].left
    got = linear.launch(x, weight, None, "silu_mul")
    assert close(got, formula(x, weight, None, "silu_mul"), torch.float16)


def test_int4_bytes_may_begin_anywhere():
    """The kernels read int4 two bytes at a time: a view that begins at an odd byte is copied."""
    weight = a_weight(FORMATS[8], 4, 64)
    around = torch.zeros(weight.q.numel() + 1, dtype=torch.uint8)
    around[1:] = weight.q.flatten()
    odd = Quantized(around[1:].view(weight.q.shape), weight.scale, weight.shift)
    for each in (odd, weight):
        q = each.arguments[0]
        assert q.dtype == torch.int16 and q.data_ptr() % 2 == 0 and torch.equal(q.view(torch.uint8), weight.q)
    assert weight.arguments[0].data_ptr() == weight.q.data_ptr()


def projection(form, size, T, G, norm, bias, dtype=torch.float16, device="cpu"):
    """All arguments of kv_project: the caches are NaN."""
    Hq, Hkv, D, E = size
    lead, O = ((G,) if G > 1 else ()), (Hq + 2 * Hkv) * D
    x, b = randn(*lead, T, E, dtype=dtype, device=device), randn(*lead, O, seed=2, dtype=dtype, device=device)
    positions, slots = (torch.randperm(G * T, generator=torch.Generator().manual_seed(n)).to(device) for n in range(2))
    rope = rope_table(torch.tensor([0.9**i for i in range(D // 2)]), 1.5, G * T, dtype).to(device)
    caches = [torch.full((4, 64, Hkv, D), math.nan, dtype=dtype, device=device) for _ in "kv"]
    norms = [randn(G, D, seed=s, dtype=dtype, device=device) if norm else None for s in (3, 4)]
    weight = a_weight(form, *lead, O, E, device=device)
    return x, weight, b if bias else None, positions, slots, rope, *caches, *norms, 1e-5


KV_CASES = [  # size, T, G, norm, bias
    ((3, 1, 16, 192), 5, 1, True, False),
    ((2, 1, 24, 1728), 3, 1, False, True),
    ((2, 1, 16, 576), 3, 2, True, True),
]


@pytest.mark.parametrize(("form", "case"), cases.one_in(2, FORMATS[::2], KV_CASES))
def test_kv_project(poisoned, form, case):
    args = projection(form, *case)
    x, weight, b, *places = args
    want = (*(torch.full_like(c, math.nan) for c in args[6:8]),)
    exact = formula(x, weight, b).flatten(0, -2).to(x.dtype)
    plain = kv_calibrate(exact, *places[:3], *want, *places[5:])
    q = project.launch(*args)
    for got, expected in zip((q, *args[6:8]), (plain, *want), strict=True):
        assert torch.equal(got.isnan(), expected.isnan())
        error = (got.double() - expected.double()).abs().nan_to_num(0).max()
        assert error <= 6 * torch.finfo(x.dtype).eps * expected.double().nan_to_num(0).abs().max()


@pytest.mark.parametrize(("form", "dtype"), cases.one_in(5, FORMATS, HALF))
def test_vocab_topk(poisoned, form, dtype):
    for T, K, E, k, noisy in ((0, 70, 192, 1, False), (3, 300, 576, 10, True), (ROWS[dtype], 70, 192, 1, False)):
        h, weight = randn(T, E, dtype=dtype), a_weight(form, K, E)
        ids = torch.randperm(2 * K, generator=torch.Generator().manual_seed(3))[:K]
        noise = Noise(5, torch.arange(T), 0.8) if noisy else None
        got, logits, lse = topk.launch(h, weight, ids, k, None, noise, True)
        z = formula(h, weight)
        if noise is not None:
            z = z / 0.8 + gumbel(5, noise.positions, 2 * K)[:, ids].double()
        column = torch.full((2 * K,), -1)
        column[ids] = torch.arange(K)
        for value, want in ((logits, z.topk(k).values), (logits, z.gather(1, column[got])), (lse, z.logsumexp(-1))):
            assert value.shape == want.shape and (not T or (value - want).abs().max() <= 1e-5 * z.abs().max()), (T, K)


def test_a_vocab_topk_row_is_the_same_alone_and_among_others():
    h, weight = randn(65, 192, dtype=torch.float16), a_weight(FORMATS[8], 300, 192)
    whole = topk.launch(h, weight, None, 3, None, None, True)
    for rows in (slice(0, 1), slice(64, 65), slice(30, 37)):
        some = topk.launch(h[rows], weight, None, 3, None, None, True)
        assert all(torch.equal(a, b[rows]) for a, b in zip(some, whole, strict=True))


def test_what_the_kernels_take():
    x = torch.zeros(3, 96)
    product = linear.Arguments
    assert all(linear._fits(product(x, a_weight(form, 4, 192))) for form in FORMATS)
    assert linear._fits(product(torch.zeros(1024, 192), a_weight(FORMATS[0], 4, 192)))
    assert not linear._fits(product(torch.zeros(1025, 192), a_weight(FORMATS[0], 4, 192)))
    assert not linear._fits(product(x, a_weight(("int8", 24, False, torch.float16), 4, 96)))  # no multiple of 16
    caches = [torch.empty(4, 64, 1, D) for D in (128, 256)]
    calls = [project.Arguments(x, a_weight(form, 4, 192), *[None] * 4, c, c) for form in FORMATS[::7] for c in caches]
    fits = [project._fits(call) for call in calls]
    assert fits == [True, True, True, False]  # a head of 256 is too much for int4


def test_tiles():
    """K is split as if that cost no launch; blocks are whole groups or within one; no split is empty."""
    f16 = torch.float16
    for O, E in [(4096, 4096), (28672, 4096), (4096, 14336), (1024, 4096), (17, 99840)]:
        for arch in (80, 90, 100, 942, 950):
            for kind, group in (("int8", E), ("fp8", 128), ("int4", 32), ("int4", 128), ("int4", 96)):
                form = Format(kind, group, f16, None)
                if E % group:
                    continue
                m, n, block, stages, splits = linear.tiles(linear.Product(torch.bfloat16, O, E, arch, form=form))
                assert (m, n, block, stages, splits) == linear.tiles(
                    linear.Product(torch.bfloat16, O, E, arch, split=True, form=form)
                )
                assert m == 64 and stages >= 2 and (group == E or group % block == 0 or block % group == 0)
                split = -(-E // (splits * block)) * block
                assert (splits - 1) * split < E <= splits * split
    assert linear.tiles(linear.Product(torch.bfloat16, 4096, 4096, 90, form=Format("int8", 4096, f16, None)))[1:5] == (
        64,
        128,
        4,
        8,
    )
    assert linear.tiles(linear.Product(torch.bfloat16, 4096, 4096, 90, form=Format("int4", 32, f16, None)))[1:5] == (
        128,
        128,
        4,
        8,
    )
    for n, arch, is_left in ((128, 90, True), (64, 100, True), (32, 90, False), (128, 80, False), (128, 942, False)):
        assert linear.weight_left(n, arch, Format("int4", 32, f16, None)) == is_left
    for form in (Format("int8", 32, f16, None), None):  # eight bits and a plain weight only on sm_90
        assert [linear.weight_left(128, arch, form) for arch in (80, 90, 100)] == [False, True, False]
    with FakeTensorMode():
        x, weight = torch.empty(3, 4096, dtype=torch.bfloat16), a_weight(FORMATS[7], 4096, 4096)
        assert linear.split_of(x, weight) == (8, 512)


@pytest.mark.parametrize("form", FORMATS)
def test_registration(form):
    weight, x = a_weight(form, 6, 192), torch.randn(3, 192)
    given = (x, weight.q, None, "none", weight.scale, weight.shift)
    which = ("test_autograd_registration", "test_faketensor") if form[0] == "fp8" else None  # no product of float8
    torch.library.opcheck(torch.ops.specker.row_linear, given, **({"test_utils": which} if which else {}))


@pytest.mark.parametrize("form", FORMATS[::4])
def test_fullgraph(form):
    weight, x = a_weight(form, 70, 192), torch.randn(3, 192)

    def both(x):
        return row_linear(x, weight, epilogue="silu_mul"), vocab_topk(x, weight, None, 3)

    got, (ids, logits, lse) = torch.compile(both, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(got, row_linear_ref(x, weight, None, "silu_mul"))
    for a, b in zip((ids, logits, lse), vocab_topk_ref(x, weight, None, 3), strict=True):
        assert torch.equal(a, b)


def launches():
    """Runs in a compiling process: two formats and many lengths."""
    for form in (("int8", None, False, torch.float16), ("int4", 32, True, torch.float16)):
        weight = a_weight(form, 64, 1024)
        for T in (1, 2, 16, 17, 64, 65, 256):
            linear.launch(torch.zeros(T, 1024).bfloat16(), weight, None, "silu_mul")


def test_no_length_recompiles():
    assert compilations(__file__) == {"_row_linear_kernel": 2, "_row_linear_merge_kernel": 1}


@pytest.mark.gpu
@pytest.mark.parametrize(("O", "E"), [(4096, 4096), (28672, 4096), (4096, 14336)])
@pytest.mark.parametrize(("kind", "group"), [("int8", None), ("fp8", None), ("int4", 32), ("int4", 128)])
def test_bfloat16_is_as_good_as_torch(O, E, kind, group):
    weight = quantised(randn(O, E, seed=1, dtype=torch.float32, device="cuda") / math.sqrt(E), kind, group)
    weight = weight.for_bfloat16()
    for T in (1, 8, 65):
        x = randn(T, E, dtype=torch.bfloat16, device="cuda")
        exact, ours, theirs = formula(x, weight), row_linear(x, weight), row_linear_ref(x, weight)
        assert (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max()
        assert torch.equal(row_linear(x[-1:], weight), ours[-1:])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_products_beside_other_work_have_the_same_bits(kind):
    """On sm_90, an asynchronous product reads decoded weights from registers, which the next tile's decoding must not
    overwrite. Whether it would depends on timing, so another stream keeps the device busy."""
    weight = quantised(randn(8192, 4096, seed=1, dtype=torch.float32, device="cuda") / 64, kind)
    other, aside = randn(2048, 2048, dtype=torch.bfloat16, device="cuda"), torch.cuda.Stream()
    for T in (16, 64):
        x = randn(T, 4096, dtype=torch.bfloat16, device="cuda")
        first = row_linear(x, weight, None, "silu_mul")
        differ = torch.zeros((), dtype=torch.int64, device="cuda")
        aside.wait_stream(torch.cuda.current_stream())
        for n in range(1000):
            if n % 4 == 0:
                with torch.cuda.stream(aside):
                    torch.mm(other, other)
            differ += (row_linear(x, weight, None, "silu_mul") != first).any()
        assert differ.item() == 0, T


@pytest.mark.gpu
@pytest.mark.parametrize("form", [FORMATS[0], FORMATS[4], FORMATS[8]])
def test_bfloat16_projection_and_candidates(form):
    args = projection(form, (8, 2, 64, 1728), 9, 1, True, False, torch.bfloat16, "cuda")
    other = *args[:6], *(c.clone() for c in args[6:8]), *args[8:]
    ours, theirs = kv_project(*args), kv_project_ref(*other)
    assert (ours - theirs).abs().max() <= 4 * torch.finfo(torch.bfloat16).eps * theirs.abs().max()
    h, weight = randn(9, 576, dtype=torch.bfloat16, device="cuda"), a_weight(form, 3000, 576, device="cuda")
    z = formula(h, weight)
    ids, logits, _ = vocab_topk(h, weight, None, 4)
    assert (logits - z.topk(4).values).abs().max() <= 1e-4 and (z.gather(1, ids) - logits).abs().max() <= 1e-4
