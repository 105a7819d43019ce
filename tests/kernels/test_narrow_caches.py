"""K and V in eight bits: the conversions in a kernel, and the ops that write and move them. test_tree_attention.py has
the op that reads them."""

import importlib

import pytest
import torch
from formulas import randn

from specker.kernels import quant
from specker.kernels.kv_calibrate import kv_calibrate, kv_calibrate_cost, rope_table
from specker.kernels.kv_commit import kv_commit
from specker.kernels.kv_commit import launch as launch_commit
from specker.kernels.kv_project import kv_project, kv_project_cost
from specker.kernels.narrow import NARROW, narrow, narrowed, widen
from specker.kernels.quant import LARGEST, as_bytes
from specker.kernels.variant import tl, triton

calibrate = importlib.import_module("specker.kernels.kv_calibrate")
project = importlib.import_module("specker.kernels.kv_project")
KINDS = list(NARROW)


@triton.jit
def _narrow_kernel(x_ptr, out_ptr, back_ptr, scale, n, BLOCK: tl.constexpr, KV: tl.constexpr):
    o = tl.arange(0, BLOCK)
    b = narrow(tl.load(x_ptr + o, mask=o < n, other=0.0), scale, KV)
    tl.store(out_ptr + o, b, mask=o < n)
    tl.store(back_ptr + o, widen(b, tl.float32, KV), mask=o < n)


def edges(dtype):
    """Every number of `dtype`, the points halfway between two, their neighbours, and larger numbers."""
    every = torch.arange(-128, 128).to(torch.int8).view(dtype).float()
    every = every[every.isfinite()].sort().values
    half = (every[1:] + every[:-1]) / 2
    near = (torch.nextafter(half, torch.tensor(to)) for to in (-1e9, 1e9))
    return torch.cat((every, half, *near, torch.tensor([449.0, 464.0, 480.0, 1e9, -1e9, 1e-9, -0.0])))


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_a_kernel_converts_as_torch_does(dtype, scale):
    x = edges(dtype)
    out, back = torch.empty(len(x), dtype=torch.int8), torch.empty(len(x))
    _narrow_kernel[(1,)](x, out, back, scale, len(x), BLOCK=2048, KV=NARROW[dtype])
    want = narrowed(x[:, None, None], torch.tensor([[scale]]), dtype).flatten()
    assert torch.equal(out, as_bytes(want)) and torch.equal(back, want.float())
    assert want.float().abs().max() == LARGEST[NARROW[dtype]]


def inputs(T, G, norm, kind, E=None, dtype=torch.float16, sizes=(4, 2, 8)):
    """Arguments of kv_calibrate, or with E those of kv_project, with caches in eight bits."""
    Hq, Hkv, D = sizes
    rows, O = G * T, (Hq + 2 * Hkv) * D
    lead = (G,) if G > 1 else ()
    first = randn(rows, O, dtype=dtype)
    if E is not None:
        first = randn(*lead, T, E, dtype=dtype), (randn(*lead, O, E, seed=1) / E**0.5).to(dtype), None
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(T))[:rows]
    rope = rope_table(0.9 ** torch.arange(D / 2), 1.0, 40, dtype)
    caches = [torch.full((16, 4, Hkv, D), 77, dtype=torch.int8).view(kind) for _ in "kv"]
    norms = [(1 + 0.1 * randn(G, D, seed=s)).to(dtype) if norm else None for s in (3, 4)]
    scales = torch.rand(2, G, Hkv, generator=torch.Generator().manual_seed(1)) / 50 + 0.004
    head = first if E is not None else (first,)
    return *head, torch.arange(rows) % 40, slots, rope, *caches, *norms, 1e-6, *scales


def with_caches(args, at):
    """`args` with copies of their caches, and these."""
    own = [as_bytes(c).clone().view(c.dtype) for c in args[at : at + 2]]
    return (*args[:at], *own, *args[at + 2 :]), own


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("T", "G", "norm"), [(5, 1, False), (3, 3, True), (40, 1, True)])
def test_kv_calibrate_writes_what_a_plain_cache_would_hold_over_its_scale(kind, T, G, norm):
    args = inputs(T, G, norm, kind)
    plain = [torch.zeros(c.shape, dtype=torch.float16) for c in args[4:6]]
    q = kv_calibrate(*args[:4], *plain, *args[6:9])
    mine, caches = with_caches(args, 4)
    assert torch.equal(kv_calibrate(*mine), q)
    slots, (Hkv, D) = args[2], plain[0].shape[2:]
    for cache, rows, scale in zip(caches, plain, args[9:], strict=True):
        got, rows = as_bytes(cache).view(-1, Hkv, D), rows.view(-1, Hkv, D)
        assert torch.equal(got[slots], as_bytes(narrowed(rows[slots], scale, kind)))
        rest = torch.ones(len(got), dtype=torch.bool).index_fill(0, slots, False)
        assert (got[rest] == 77).all()
    assert len({int(x) for x in as_bytes(caches[0]).flatten()}) > 20  # the scales use the range


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("T", "G", "norm", "sizes"),
    [(5, 1, False, (4, 2, 8)), (3, 3, True, (4, 2, 8)), (40, 1, False, (1, 1, 24)), (64, 1, True, (3, 1, 16))],
)
def test_the_kernels_write_the_bytes_of_their_own_plain_cache(poisoned, kind, T, G, norm, sizes):
    """Bit for bit; so kv_project equals row_linear and kv_calibrate."""
    for op, E, at in ((calibrate.launch, None, 4), (project.launch, 40, 6)):
        args = inputs(T, G, norm, kind, E, sizes=sizes)
        plain = [torch.zeros(c.shape, dtype=torch.float16) for c in args[at : at + 2]]
        q = op(*args[:at], *plain, *args[at + 2 : at + 5])
        mine, caches = with_caches(args, at)
        assert torch.equal(op(*mine), q)
        slots, (Hkv, D) = args[at - 2], plain[0].shape[2:]
        for cache, rows, scale in zip(caches, plain, args[at + 5 :], strict=True):
            rows = narrowed(rows.view(-1, Hkv, D)[slots], scale, kind)
            assert torch.equal(as_bytes(cache).view(-1, Hkv, D)[slots], as_bytes(rows))


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_of_kv_project_is_the_two_ops(kind):
    args = inputs(3, 2, True, kind, 40, torch.float32)
    first, caches = with_caches(args, 6)
    second, others = with_caches(args, 6)
    qkv = (second[0] @ second[1].mT).flatten(0, 1)
    torch.testing.assert_close(kv_project(*first), kv_calibrate(qkv, *second[3:]))
    assert all((as_bytes(a).int() - as_bytes(b).int()).abs().max() <= 1 for a, b in zip(caches, others, strict=True))
    saved = 2 * 6 * 2 * 8 * 3  # K and V of six rows of two heads of eight
    plain = (*args[:6], *(cache.float() for cache in args[6:8]), *args[8:])
    assert kv_project_cost(*args)[0] == kv_project_cost(*plain)[0] - saved
    assert kv_calibrate_cost(qkv, *args[3:])[0] == kv_calibrate_cost(qkv, *plain[3:])[0] - saved


@pytest.mark.parametrize("op", [kv_commit, launch_commit])
def test_kv_commit_moves_bytes(op):
    g = torch.Generator().manual_seed(0)
    for kind in (*KINDS, torch.float8_e5m2):  # attention reads no e5m2, but other engines' caches hold it
        k, v = (torch.randint(-128, 127, (2, 4, 4, 2, 8), dtype=torch.int8, generator=g).view(kind) for _ in "kv")
        src, dst = torch.tensor([9, 3, 12]), torch.tensor([3, 4, 5])
        rows = [c.view(torch.int8).flatten(1, 2) for c in (k, v)]
        want = [x.index_copy(1, dst, x[:, src]) for x in rows]
        op(k, v, src, dst)
        assert all(torch.equal(x, w) for x, w in zip(rows, want, strict=True))


def test_registration():
    for kind in KINDS:
        args = inputs(3, 1, True, kind, dtype=torch.float32)
        assert torch.compile(kv_calibrate, fullgraph=True, backend="aot_eager")(*args).shape == (3, 4, 8)
    torch.library.opcheck(torch.ops.specker.kv_calibrate.default, inputs(3, 1, True, torch.int8, dtype=torch.float32))
    torch.library.opcheck(torch.ops.specker.kv_project.default, inputs(3, 1, True, torch.int8, 40, torch.float32))


def test_refusals():
    args = list(inputs(4, 2, True, torch.int8, dtype=torch.float32))
    for at, value, message in (
        (9, None, "k_scale belongs to a cache in eight bits, got torch.int8 without it"),
        (10, args[10][:, :1], r"v_scale must be \[G, 2\], got \(2, 1\)"),
        (9, args[9].double(), "k_scale must be contiguous float32, got torch.float64"),
        (4, args[4].float(), "caches must both have the floating dtype of the input, int8 or"),
        (10, args[10][:1], "k_scale and v_scale must have one shape"),
    ):
        with pytest.raises(ValueError, match=message):
            kv_calibrate(*args[:at], value, *args[at + 1 :])
    one = [x[:1].contiguous() for x in args[9:]]
    with pytest.raises(ValueError, match="k_scale must have a row for each of q_norm's 2"):
        kv_calibrate(*args[:9], *one)
    args = inputs(3, 1, False, torch.int8, 40, torch.float32)
    with pytest.raises(ValueError, match=r"k_scale must be \[1, 2\], a row per layer, got \(3, 2\)"):
        kv_project(*args[:11], *(x.repeat(3, 1) for x in args[11:]))


def test_fp8_weights_are_read_by_the_same_bits():
    """Every e4m3 number in one column of a weight."""
    every = edges(torch.float8_e4m3fn)[:254]
    row = importlib.import_module("specker.kernels.row_linear")
    q = torch.zeros(254, 16)
    q[:, 0] = every
    w = quant.Quantized(q.to(torch.float8_e4m3fn), torch.ones(254, 1, dtype=torch.float16), None)
    x = torch.zeros(1, 16, dtype=torch.float16)
    x[0, 0] = 1
    assert torch.equal(row.launch(x, w, None, "none")[0].float(), every)
