"""kv_project: the kernel against row_linear and kv_calibrate, one after the other, and its contract."""

import importlib
import math

import cases
import pytest
import torch
from compile_only import compilations
from formulas import randn
from recorded import kernels, recording

from specker.kernels.kv_calibrate import kv_calibrate, rope_table
from specker.kernels.kv_project import kv_project, kv_project_cost, kv_project_ref, launch
from specker.kernels.row_linear import row_linear_ref
from specker.kernels.variant import COUNTERS, counters

module = importlib.import_module("specker.kernels.kv_project")
calibrate = importlib.import_module("specker.kernels.kv_calibrate")
EPS = 1e-5
PAGE = 4
PAGES = 64
CONTEXT = 40
# Hq, Hkv, D, E: grouped; one KV head; D not a power of two, and odd E; three splits of K, the last one short; D 2
SIZES = [(4, 2, 8, 64), (3, 1, 16, 40), (2, 1, 24, 33), (2, 1, 64, 1600), (1, 1, 2, 130)]


def inputs(T, size, G=1, norm=False, bias=True, dtype=torch.float16, device="cpu"):
    """All arguments of a call: the caches are NaN, the slots distinct and unordered."""
    Hq, Hkv, D, E = size
    O, rows = (Hq + 2 * Hkv) * D, G * T
    lead = (G,) if G > 1 else ()
    generator = torch.Generator().manual_seed(T)
    x = randn(*lead, T, E, dtype=dtype, device=device)
    weight = (randn(*lead, O, E, seed=1) / math.sqrt(E)).to(device, dtype)
    b = randn(*lead, O, seed=2, dtype=dtype, device=device) if bias else None
    positions = torch.randint(CONTEXT, (rows,), generator=generator).to(device)
    slots = torch.randperm(PAGE * PAGES, generator=generator)[:rows].to(device)
    inv_freq = torch.tensor([0.9**i for i in range(D // 2)])
    rope = rope_table(inv_freq, 1.5, CONTEXT, dtype).to(device)
    k, v = (torch.full((PAGES, PAGE, Hkv, D), math.nan, dtype=dtype, device=device) for _ in range(2))
    norms = [(1 + 0.1 * randn(G, D, seed=s)).to(device, dtype) if norm else None for s in (3, 4)]
    return x, weight, b, positions, slots, rope, k, v, *norms, EPS


def fresh(args):
    """The arguments with caches of their own."""
    return *args[:6], args[6].clone(), args[7].clone(), *args[8:]


def close(args, op):
    """Against kv_calibrate's formula of the unrounded projection, within its rounding and that of the result."""
    x, weight, bias = args[:3]
    exact = row_linear_ref(x.double(), weight.double(), None if bias is None else bias.double()).flatten(0, -2)

    own, k, v = fresh(args)[6:8], *args[6:8]
    qkv = exact.to(x.dtype)
    q = op(*args)
    for got, want in zip((q, k, v), (kv_calibrate(qkv, *args[3:6], *own, *args[8:]), *own), strict=True):
        assert torch.equal(got.isnan(), want.isnan())
        error = (got.double() - want.double()).abs().nan_to_num(0).max()
        assert error <= 6 * torch.finfo(x.dtype).eps * want.double().nan_to_num(0).abs().max()


@pytest.mark.parametrize(("size", "how"), cases.diagonal(SIZES, [(1, False), (1, True), (3, True)]))
def test_kernel(poisoned, size, how):
    G, norm = how
    for T in (1, 7) if size[3] > 1000 or G > 1 else (1, 7, 65):
        close(inputs(T, size, G, norm, bias=T != 1), launch)


@pytest.mark.parametrize("size", SIZES)
def test_without_norms_it_equals_the_two_launches(poisoned, size):
    """Bit for bit: the same products and sums where K is split alike, and the same roundings."""
    args = inputs(5, size, bias=True)
    products = importlib.import_module("specker.kernels.row_linear")
    splits = module._variant(module.Shape(torch.float16, 1, *size, bias=True), 90).constexprs["SPLITS"]
    tile = products.tiles(products.Product(torch.float16, args[1].shape[0], size[3], 90))
    assert splits == tile[4]
    other = fresh(args)
    q = launch(*args)
    qkv = products.launch(*other[:3], "none")
    assert torch.equal(q, calibrate.launch(qkv, *other[3:]))
    for cache, want in zip(args[6:8], other[6:8], strict=True):
        assert torch.equal(cache.nan_to_num(7), want.nan_to_num(7))


def test_the_sizes_cover_splits():
    def splits(*given):
        return module._variant(module.Shape(torch.bfloat16, *given), 90).constexprs["SPLITS"]

    assert [splits(1, *size) for size in SIZES] == [1, 1, 1, 3, 1]
    assert splits(1, 32, 8, 128, 4096) == 5 and splits(4, 32, 8, 128, 4096) == 1 and splits(1, 32, 8, 64, 2048) == 4


@pytest.mark.parametrize("size", [SIZES[0], SIZES[3]])
def test_a_row_is_the_same_alone_and_among_others(size):
    x, weight, bias, positions, slots, *rest = inputs(65, size, norm=True)

    def run(rows):
        given = fresh((x[rows], weight, bias, positions[rows], slots[rows], *rest))
        q = launch(*given)
        return [q, *(c.view(-1, *c.shape[2:])[slots[rows]] for c in given[6:8])]

    whole = run(slice(0, 65))
    for rows in (slice(0, 1), slice(64, 65), slice(30, 37)):
        assert all(torch.equal(a, w[rows]) for a, w in zip(run(rows), whole, strict=True))


@pytest.mark.parametrize(("T", "size"), [(320, (2, 1, 8, 1600)), (1000, (2, 1, 8, 40))])
def test_a_row_of_a_large_round_is_the_same_alone(monkeypatch, T, size):
    """With K in several parts, summed by the last program, and in one."""
    monkeypatch.setattr(f"{__name__}.PAGES", 256)
    x, weight, bias, positions, slots, *rest = inputs(T, size)

    def run(rows):
        given = fresh((x[rows], weight, bias, positions[rows], slots[rows], *rest))
        q = launch(*given)
        return [q, *(c.view(-1, *c.shape[2:])[slots[rows]] for c in given[6:8])]

    whole = run(slice(0, T))
    assert not any(part.isnan().any() for part in whole)
    for row in (0, 64, 257, T - 1):
        rows = slice(row, row + 1)
        assert all(torch.equal(a, w[rows]) for a, w in zip(run(rows), whole, strict=True)), row


def test_the_counters_are_zero_again(poisoned):
    """Two launches in a row, with three splits each, give the same."""
    args = inputs(3, SIZES[3])
    first, again = (launch(*fresh(args)) for _ in range(2))
    assert torch.equal(first, again) and not first.isnan().any()
    assert not counters(torch.device("cpu"), 1).any()
    assert len(counters(torch.device("cpu"), 8)) == COUNTERS and len(counters(torch.device("cpu"), 70000)) == 70000


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("G", [1, 2])
def test_the_reference_is_the_two_ops(dtype, G):
    args = inputs(4, SIZES[0], G, True, dtype=dtype)
    other = fresh(args)
    q = kv_project(*args)
    qkv = row_linear_ref(*other[:3]).flatten(0, -2)
    assert torch.equal(q, kv_calibrate(qkv, *other[3:]))
    assert torch.equal(args[6].nan_to_num(7), other[6].nan_to_num(7)) and q.shape == (4 * G, 4, 8)
    moved = G * (4 * 64 + 64 * 64 + 64 + 4 * 64) * dtype.itemsize
    assert kv_project_cost(*args)[0] == moved


def test_registration():
    args = inputs(3, SIZES[0], dtype=torch.float32)
    args = *args[:6], args[6].nan_to_num(0), args[7].nan_to_num(0), *args[8:]
    torch.library.opcheck(torch.ops.specker.kv_project.default, args)
    compiled = torch.compile(kv_project, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*fresh(args)), kv_project_ref(*fresh(args)))


def test_long_inputs_and_large_heads_take_two_launches():
    def launched(T, D):
        with recording() as log:
            x, weight = torch.empty(T, 64).half(), torch.empty(3 * D, 64).half()
            k, v = torch.empty(2, 2, 256, 1, D).half()
            index = torch.zeros(T, dtype=torch.int64)
            log.clear()
            kv_project(x, weight, None, index, index, torch.empty(8, 2, D), k, v)
        return [name.partition(":")[0] for name in kernels(log)]

    assert launched(1024, 64) == ["_kv_project_kernel"]
    assert launched(8, 320) == ["_row_linear_kernel", "_kv_calibrate_kernel"]
    assert launched(1025, 64) == ["_kv_calibrate_kernel"]  # and torch's product


@pytest.mark.parametrize(
    ("which", "value", "message"),
    [
        (1, torch.zeros(64, 63), "expected x .T, E. and weight"),
        (1, torch.zeros(60, 64), "weight must have"),
        (2, torch.zeros(63), "bias must be"),
        (3, torch.zeros(4, dtype=torch.int64), "positions must be"),
        (4, torch.zeros(3), "slots must be"),
        (5, torch.zeros(3, 2, 4), "rope must be"),
        (7, torch.zeros(1, 4, 2, 8), "caches must be"),
        (8, torch.zeros(1, 8), "come together"),
    ],
)
def test_refusals(which, value, message):
    args = list(inputs(3, SIZES[0], dtype=torch.float32))
    args[which] = value
    with pytest.raises(ValueError, match=message):
        kv_project(*args)


def test_every_layer_has_its_own_norm():
    *args, eps = inputs(3, SIZES[0], norm=True, dtype=torch.float32)
    norms = (x.expand(3, -1) for x in args[8:10])  # three for the three rows of one layer
    with pytest.raises(ValueError, match=r"q_norm must be \[1, 8\], a row per layer"):
        kv_project(*args[:8], *norms, eps)


def launches():
    for T in (1, 2, 16, 17, 64, 65, 256):
        for offset in (0, 1):
            index = torch.arange(T + 1)[offset : T + offset]
            k, v = torch.zeros(2, 9, 32, 2, 64).bfloat16()
            x, weight = torch.zeros(T, 1600).bfloat16(), torch.zeros(8 * 64, 1600).bfloat16()
            launch(x, weight, None, index, index, torch.zeros(300, 2, 64), k, v, None, None, EPS)


def test_no_length_recompiles():
    assert compilations(__file__) == {"_kv_project_kernel": 2}  # up to 16 rows, and more


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(32, 8, 128, 4096), (32, 8, 64, 2048), (14, 2, 64, 896)])
def test_on_a_device(size):
    for G, T in ((1, 1), (1, 65), (2, 7)):
        close(inputs(T, size, G, norm=True, dtype=torch.bfloat16, device="cuda"), launch)
