"""kv_calibrate and kv_commit: reference and kernel against the formula in float64, and their contracts."""

import importlib
import math

import pytest
import torch
from compile_only import compilations, python
from formulas import randn

from specker.kernels.kv_calibrate import (
    kv_calibrate,
    kv_calibrate_cost,
    kv_calibrate_ref,
    launch,
    rope_table,
)
from specker.kernels.kv_commit import MAX_COMMIT, kv_commit, kv_commit_cost, kv_commit_ref
from specker.kernels.kv_commit import launch as launch_commit

module = importlib.import_module("specker.kernels.kv_calibrate")
EPS = 1e-5
PAGE = 4
PAGES = 8
CONTEXT = 40
ROPE_SCALE = 1.5
NAN = float("nan")
# Hq, Hkv, D: grouped, one KV head, as many KV heads as query heads, three KV heads, D not a power of two, D = 2, and no
# query heads
HEADS = [(4, 2, 8), (3, 1, 16), (2, 2, 64), (6, 3, 24), (2, 1, 96), (1, 1, 2), (0, 2, 8)]


def inv_freq(D):
    return torch.tensor([0.9**i for i in range(D // 2)], dtype=torch.float32)


def inputs(T, heads, groups, dtype, device="cpu", pages=PAGES):
    """All arguments of a call: the caches are NaN, the slots distinct and unordered."""
    Hq, Hkv, D = heads
    generator = torch.Generator().manual_seed(T)
    qkv = randn(T, (Hq + 2 * Hkv) * D, dtype=dtype, device=device)
    positions = torch.randint(CONTEXT, (T,), generator=generator).to(device)
    slots = torch.randperm(PAGE * pages, generator=generator)[:T].to(device)
    rope = rope_table(inv_freq(D), ROPE_SCALE, CONTEXT, dtype).to(device)
    k, v = (torch.full((pages, PAGE, Hkv, D), NAN, dtype=dtype, device=device) for _ in range(2))
    norms = [(1 + 0.1 * randn(groups, D, seed=s)).to(device, dtype) if groups else None for s in (1, 2)]
    return qkv, positions, slots, rope, k, v, *norms, EPS


def formula(qkv, positions, slots, rope, k_cache, v_cache, q_norm, k_norm, eps):
    """q, k, v [T, H, D] in float64."""
    T, (Hkv, D) = len(qkv), k_cache.shape[2:]
    heads = qkv.double().cpu().unflatten(1, (-1, D))
    Hq = heads.shape[1] - 2 * Hkv
    x = heads[:, : Hq + Hkv].clone()
    if q_norm is not None:
        for t in range(T):
            for h in range(Hq + Hkv):
                weight = q_norm if h < Hq else k_norm
                weight = weight.double().cpu()[t // (T // len(weight))]
                x[t, h] = x[t, h] / (x[t, h].square().mean() + eps).sqrt() * weight
    angle = positions.cpu().float()[:, None] * inv_freq(D)  # float32, as in transformers
    c, s = ((f(angle.double()) * ROPE_SCALE)[:, None] for f in (torch.cos, torch.sin))
    a, b = x[..., : D // 2], x[..., D // 2 :]
    x = torch.cat((a * c - b * s, b * c + a * s), -1)
    return x[:, :Hq], x[:, Hq:], heads[:, Hq + Hkv :]


def check(op, args, bound):
    """Run `op` and compare its q, K and V with the formula; the rest of the caches must not change."""
    slots, k, v = args[2], args[4], args[5]
    q = op(*args)
    want_q, want_k, want_v = (w.to(q.device) for w in formula(*args))
    assert q.shape == want_q.shape and q.dtype == k.dtype
    rows_k, rows_v = (cache.view(-1, *cache.shape[2:]) for cache in (k, v))
    pairs = (q, want_q), (rows_k[slots], want_k)
    errors = [(got.double() - want).abs().max() for got, want in pairs if want.numel()]
    scale = max(1.0, *(float(want.abs().max()) for _, want in pairs if want.numel())) if len(slots) else 1.0
    assert all(error <= bound * scale for error in errors), (errors, bound * scale)
    assert torch.equal(rows_v[slots].double(), want_v)
    rest = sorted(set(range(len(rows_k))) - set(slots.tolist()))
    assert rows_k[rest].isnan().all() and rows_v[rest].isnan().all()
    return errors


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("groups", [0, 1, 3])
@pytest.mark.parametrize("op", [kv_calibrate, kv_calibrate_ref])
def test_kv_calibrate(op, dtype, groups):
    bound = max(3 * torch.finfo(dtype).eps, 1e-6)  # the table is float32
    check(op, inputs(6, (4, 2, 8), groups, dtype), bound)
    args = inputs(3, (3, 1, 16), min(groups, 1), dtype)
    check(op, args, bound)
    check(kv_calibrate_ref, inputs(0, (4, 2, 8), groups, dtype), bound)
    assert kv_calibrate_cost(*args)[0] == 2 * args[0].numel() * dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("groups", [0, 1, 3])
@pytest.mark.parametrize("heads", HEADS)
def test_kernel(poisoned, dtype, groups, heads):
    for T in (0, 1, 6) if groups != 3 else (3, 12):
        check(launch, inputs(T, heads, groups, dtype), max(torch.finfo(dtype).eps, 2e-6))


def test_kernel_with_small_tiles(poisoned, monkeypatch):
    """Several blocks of heads and of rows, the last ones partly filled."""
    monkeypatch.setattr(module, "TILE", 16)
    module._variant.cache_clear()
    try:
        for heads, tile in [((6, 3, 24), (1, 1)), ((5, 3, 4), (2, 4)), ((7, 6, 4), (1, 8))]:
            constexprs = module._variant(torch.float32, *heads, True).constexprs
            assert (constexprs["BT"], constexprs["BH"]) == tile
            check(launch, inputs(9, heads, 3, torch.float32), 2e-6)
    finally:
        module._variant.cache_clear()


@pytest.mark.parametrize("T", [1, 2, 7, 64, 65])
def test_a_row_is_the_same_alone_and_among_others(T):
    many = inputs(65, (4, 2, 8), 1, torch.float16, pages=20)

    def run(rows):
        k, v = (torch.full_like(cache, NAN) for cache in many[4:6])
        q = launch(many[0][rows], many[1][rows], many[2][rows], many[3], k, v, *many[6:])
        return [q, *(c.view(-1, 2, 8)[many[2][rows]] for c in (k, v))]

    whole = run(slice(T))
    for t in {0, T // 2, T - 1}:
        assert all(torch.equal(a, w[t : t + 1]) for a, w in zip(run(slice(t, t + 1)), whole, strict=True))


def test_a_launch_of_groups_equals_one_launch_per_group():
    """The rows of three layers in one launch, against three launches."""
    args = inputs(12, (4, 2, 8), 3, torch.float32)
    q = launch(*args)
    for g in range(3):
        rows = slice(4 * g, 4 * g + 4)
        k, v = (torch.full_like(cache, NAN) for cache in args[4:6])
        norms = [w[g : g + 1] for w in args[6:8]]
        assert torch.equal(q[rows], launch(args[0][rows], args[1][rows], args[2][rows], args[3], k, v, *norms, EPS))
        for whole, part in ((args[4], k), (args[5], v)):
            at = args[2][rows]
            assert torch.equal(whole.view(-1, 2, 8)[at], part.view(-1, 2, 8)[at])


def test_views_at_an_offset():
    qkv, positions, slots, rope, k, v, *rest = inputs(6, (4, 2, 8), 1, torch.float32)
    want = launch(qkv, positions, slots, rope, k, v, *rest)
    around = torch.full((qkv.numel() + 9,), NAN)
    around[5:-4] = qkv.flatten()
    ids = torch.full((2, 20), 1 << 40)
    ids[0, 3:9], ids[1, 3:9] = positions, slots
    caches = torch.full((3, 2, *k.shape), NAN)
    got = launch(around[5:-4].view(qkv.shape), ids[0, 3:9], ids[1, 3:9], rope, caches[1, 0], caches[1, 1], *rest)
    assert torch.equal(got, want)
    assert torch.equal(caches[1, 0].nan_to_num(), k.nan_to_num()) and torch.equal(
        caches[1, 1].nan_to_num(), v.nan_to_num()
    )
    assert caches[0].isnan().all() and caches[2].isnan().all()


def moves(M, total, seed=0):
    """An accepted path (src ascending, dst before it), the same with src and dst exchanged, and the path shuffled."""
    generator = torch.Generator().manual_seed(seed)
    src = torch.randperm(total - 1, generator=generator)[:M].sort().values + 1
    dst = torch.arange(M)
    order = torch.randperm(M, generator=generator)
    return [(src, dst), (dst, src), (src[order], dst[order])]


@pytest.mark.parametrize("op", [kv_commit, kv_commit_ref, launch_commit])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("L", "Hkv", "D", "M"), [(1, 1, 2, 1), (3, 2, 8, 12), (2, 3, 96, 17), (2, 1, 300, 70)])
def test_kv_commit_reads_all_before_it_writes(op, dtype, L, Hkv, D, M):
    total = 80
    for src, dst in moves(M, total):
        caches = [randn(L, total // PAGE, PAGE, Hkv, D, dtype=dtype, seed=s) for s in (0, 1)]
        before = [c.clone().view(L, total, Hkv, D) for c in caches]
        op(*caches, src, dst)
        for cache, old in zip(caches, before, strict=True):
            want = old.clone()
            want[:, dst] = old[:, src]
            assert torch.equal(cache.view(L, total, Hkv, D), want)
        assert kv_commit_cost(*caches, src, dst) == (4 * L * M * Hkv * D * dtype.itemsize, 0)


def test_kv_commit_of_nothing_and_of_more_than_a_window():
    k = randn(2, 100, PAGE, 1, 4, dtype=torch.float32)
    before = k.clone()
    for op in (kv_commit, launch_commit):
        op(k, k.clone(), torch.arange(0), torch.arange(0))
        assert torch.equal(k, before)
    src, dst = moves(MAX_COMMIT + 1, 400)[0]
    kv_commit(k, k.clone(), src, dst)
    assert torch.equal(k.view(2, 400, 4)[:, dst], before.view(2, 400, 4)[:, src])


def test_a_programs_stores_wait_for_its_loads():
    """The PTX has all loads, then a barrier, then all stores. The interpreter cannot show this."""
    program = """
import torch
from bench.builds import build
from specker.kernels.kv_commit import _variant
for rows in (16, 64, 256):
    ptx = build(_variant(torch.bfloat16, 1024, rows), 90).compile().asm["ptx"]
    lines = [i for i in ptx.splitlines() if "ld.global" in i or "st.global" in i or "bar.sync" in i]
    print("".join("l" if "ld.global" in i else "s" if "st.global" in i else "b" for i in lines))
"""
    for order in python("-c", program).splitlines():
        last_load, first_store = order.rindex("l"), order.index("s")
        assert "b" in order[last_load:first_store], order


def test_registration():
    for groups in (0, 3):
        args = inputs(6, (4, 2, 8), groups, torch.float32)
        args[4].zero_(), args[5].zero_()  # opcheck compares the caches, and NaN never equals NaN
        torch.library.opcheck(torch.ops.specker.kv_calibrate, args)
        qkv, *rest = args
        torch.library.opcheck(torch.ops.specker.kv_calibrate, (qkv.T.contiguous().T, *rest))
    k, v = (randn(2, 3, PAGE, 1, 4, dtype=torch.float32, seed=s) for s in (0, 1))
    torch.library.opcheck(torch.ops.specker.kv_commit, (k, v, torch.tensor([5, 2]), torch.tensor([1, 2])))


def test_fullgraph():
    args, k5, v5 = inputs(6, (4, 2, 8), 1, torch.float32), *(randn(2, 3, PAGE, 1, 4, seed=s) for s in (0, 1))
    src, dst = torch.tensor([5, 2]), torch.tensor([1, 2])

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(k5, v5, src, dst, *args):
        kv_commit(k5, v5, src, dst)
        return kv_calibrate(*args, EPS)

    want = k5.view(2, 12, 4)[:, src].clone()
    check(lambda *a: compiled(k5, v5, src, dst, *a[:-1]), args, 2e-6)
    assert torch.equal(k5.view(2, 12, 4)[:, dst], want)


def launches():
    """Runs in a compiling process: one model, many lengths, slices of index tables at any offset, caches of any
    size."""
    ids = torch.arange(9000)
    rope = rope_table(inv_freq(64), 1.0, 16, torch.float32)
    for T, first, pages in ((1, 0, 1), (1, 1, 16), (2, 3, 17), (16, 2, 512), (17, 4, 3), (64, 5, 4), (8192, 7, 100)):
        qkv = torch.zeros(1, 8 * 64).bfloat16().expand(T, -1)
        k = torch.zeros(pages, 16, 2, 64).bfloat16()
        at = ids[first : first + T]
        launch(qkv, at, at, rope, k, k, None, None, EPS)
        if T <= 16:
            launch_commit(k[None], k[None], at, at)


def test_no_length_recompiles():
    assert compilations(__file__) == {"_kv_calibrate_kernel": 1, "_kv_commit_kernel": 1}


def test_refuses():
    k = torch.zeros(2, 4, 2, 8)
    rope, at = torch.zeros(9, 2, 8), torch.zeros(3, dtype=torch.int64)
    ok = torch.zeros(3, 48)
    for qkv, positions, table, norm, message in [
        (torch.zeros(3, 40 + 1), at, rope, None, "qkv must be"),
        (torch.zeros(3, 24), at, rope, None, "qkv must be"),
        (ok, at[:2], rope, None, "positions must be"),
        (ok, at.int(), rope, None, "positions must be"),
        (ok, at, torch.zeros(9, 8), None, "rope must be"),
        (ok.half(), at, rope, None, "the caches must both have"),
        (ok, at, rope, torch.zeros(2, 8), "G dividing"),
        (ok, at, rope, torch.zeros(0, 8), "G dividing"),
        (ok, at, rope, torch.zeros(1, 8).double(), "one shape and the input's dtype"),
    ]:
        with pytest.raises(ValueError, match=message):
            kv_calibrate(qkv, positions, at, table, k, k.clone(), norm, norm)
    for q_norm, k_norm in ((3, 1), (1, 3)):
        with pytest.raises(ValueError, match="one shape and the input's dtype"):
            kv_calibrate(ok, at, at, rope, k, k.clone(), torch.ones(q_norm, 8), torch.ones(k_norm, 8))
    with pytest.raises(ValueError, match="slots must be"):
        kv_calibrate(ok, at, at.int(), rope, k, k.clone())
    odd = torch.zeros(2, 4, 2, 7)
    with pytest.raises(ValueError, match="D must be even"):
        kv_calibrate(torch.zeros(3, 42), at, at, torch.zeros(9, 2, 7), odd, odd.clone())
    with pytest.raises(ValueError, match="come together"):
        kv_calibrate(ok, at, at, rope, k, k.clone(), torch.zeros(1, 8), None)
    with pytest.raises(ValueError, match="caches must be"):
        kv_commit(k, k, at, at)
    with pytest.raises(ValueError, match="src and dst"):
        kv_commit(k[None], k[None].clone(), at, at[:1])


def test_other_devices_and_layouts_are_refused():
    args = inputs(3, (4, 2, 8), 1, torch.float32)
    names = ("positions", "slots", "rope", "k_cache", "v_cache", "q_norm", "k_norm")
    for i, name in enumerate(names, 1):
        with pytest.raises(ValueError, match=f"{name} must be on cpu, got meta"):
            kv_calibrate(*args[:i], args[i].to("meta"), *args[i + 1 :])
    with pytest.raises(ValueError, match=r"rope must be \[C, 2, 8\] torch.float32, got .* torch.float16"):
        kv_calibrate(*args[:3], args[3].half(), *args[4:])
    with pytest.raises(ValueError, match="rope must be contiguous, got strides"):
        launch(*args[:3], args[3].repeat(1, 1, 2)[..., ::2], *args[4:])
    apart = args[4].transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="must be contiguous"):
        kv_calibrate(*args[:4], apart, *args[5:])
    k5, at = torch.zeros(2, 3, 4, 1, 8), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="must be contiguous"):
        kv_commit(k5, k5.transpose(1, 2).contiguous().transpose(1, 2), at, at)
    with pytest.raises(ValueError, match="src must be on cpu, got meta"):
        kv_commit(k5, k5, at.to("meta"), at)


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [0, 1, 3])
@pytest.mark.parametrize("heads", [(32, 8, 128), (14, 2, 64), (6, 3, 96)])
def test_bfloat16_is_as_good_as_torch(heads, groups):
    ours = check(kv_calibrate, inputs(33, heads, groups, torch.bfloat16, "cuda", pages=20), math.inf)
    theirs = check(kv_calibrate_ref, inputs(33, heads, groups, torch.bfloat16, "cuda", pages=20), math.inf)
    assert all(a <= 2 * b for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


@pytest.mark.gpu
def test_bfloat16_rows_are_invariant():
    many = inputs(65, (32, 8, 128), 1, torch.bfloat16, "cuda", pages=20)

    def run(rows):
        k, v = (torch.full_like(cache, NAN) for cache in many[4:6])
        q = kv_calibrate(many[0][rows], many[1][rows], many[2][rows], many[3], k, v, *many[6:])
        return [q, *(c.view(-1, 8, 128)[many[2][rows]] for c in (k, v))]

    whole = run(slice(65))
    for T in (1, 2, 7, 64, 65):
        for first in {0, 65 - T}:
            part = run(slice(first, first + T))
            assert all(torch.equal(p, w[first : first + T]) for p, w in zip(part, whole, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 12, 17, 65, MAX_COMMIT])
def test_kv_commit_in_place_many_times(M):
    """A race would show in at least one of a hundred runs."""
    fresh = [randn(4, 128, PAGE, 8, 128, dtype=torch.bfloat16, seed=s, device="cuda") for s in (0, 1)]
    for run in range(100):
        k, v = (c.clone() for c in fresh)
        for src, dst in moves(M, 512, seed=run):
            src, dst = src.cuda(), dst.cuda()
            want = [c.clone().view(4, 512, -1) for c in (k, v)]
            for w in want:
                w[:, dst] = w[:, src].clone()
            kv_commit(k, v, src, dst)
            assert all(torch.equal(c.view(4, 512, -1), w) for c, w in zip((k, v), want, strict=True))
