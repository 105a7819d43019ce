"""cluster_topk: the reference against a float64 formula in Python, the kernels in Triton's interpreter and the compiled
CPU form against the reference, and the op's contract.

Inputs are small integers unless stated otherwise: sums are exact, so ids must be equal, and many logits and centroids
tie.
"""

import importlib
import math

import cases
import pytest
import torch
from compile_only import compilations

from specker import cpu
from specker.kernels.cluster_topk import cluster_topk, cluster_topk_cost, cluster_topk_ref, launch
from specker.kernels.noise import gumbel_at, pack_draw
from specker.kernels.quant import quantised
from specker.kernels.vocab_topk import Noise, vocab_topk_ref

op = importlib.import_module("specker.kernels.cluster_topk")
# T, E, C, R, clusters, k: one of each, odd sizes, clusters in two tiles, more rows than a tile, k above R
SIZES = [(1, 1, 1, 1, 1, 1), (3, 33, 10, 7, 3, 5), (2, 8, 70, 40, 5, 1), (17, 16, 20, 3, 9, 10), (2, 48, 6, 4, 2, 8)]
NUMBERS = [(7, 0.9), (1, 0.0), ((1 << 64) - 5, 1.7)]


def integers(T, E, C, R, dtype=torch.float32):
    g = torch.Generator().manual_seed(T + E + C + R)
    hidden, weight, centroids = (torch.randint(-3, 4, (n, E), generator=g).to(dtype) for n in (T, C * R, C))
    return hidden, weight, centroids, torch.randperm(3 * C * R, generator=g)[: C * R].view(C, R)


def noises(T):
    """No noise, the same noise for all rows, and three sequences' own, one of them greedy; positions around 2^32."""
    positions = torch.arange(T) + (1 << 32) - T // 2
    held = [Noise(0, positions, 9.0, torch.stack([pack_draw(*each) for each in NUMBERS]))] if T % 3 == 0 else []
    return [None, Noise((1 << 64) - 5, positions, 0.8), *held]


def assert_same(got, want):
    assert torch.equal(got[0], want[0]) and got[0].dtype == torch.int64
    assert all(x.dtype == torch.promote_types(want[1].dtype, torch.float32) for x in (*got[1:], *want[1:]))
    for a, b in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=4e-6)  # the logarithms of the noise


def formula(hidden, weight, centroids, ids, clusters, k, noise):
    """Ranks by (-value, number) in Python: ids and values [T, k], lse [T]."""
    found = []
    for t, row in enumerate(hidden.double()):
        scores = (centroids.double() @ row).tolist()
        chosen = sorted(range(len(ids)), key=lambda c: (-scores[c], c))[:clusters]
        z = {}
        for c in chosen:
            for r, i in enumerate(ids[c].tolist()):
                value = float(weight[c * ids.shape[1] + r].double() @ row)
                if noise is not None:
                    g = gumbel_at(noise.seed, noise.positions[t : t + 1], torch.tensor([[i]]))
                    value = value / noise.temperature + float(g)
                z[i] = value
        best = sorted(z, key=lambda i: (-z[i], i))[:k]
        found.append((best, [z[i] for i in best], float(torch.tensor(list(z.values())).logsumexp(0))))
    return tuple(map(torch.tensor, zip(*found, strict=True)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("noisy", [0, 1])
def test_the_reference_is_the_formula(size, noisy):
    *sizes, clusters, k = size
    given = *integers(*sizes, torch.float64), clusters, k
    noise = noises(sizes[0])[noisy]
    ids, values, lse = cluster_topk(*given, None, noise)
    want = formula(*given, noise)
    assert torch.equal(ids, want[0]) and values.dtype == lse.dtype == torch.float64
    torch.testing.assert_close(values.float(), want[1].float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse.float(), want[2].float(), rtol=1e-6, atol=1e-6)


def test_all_clusters_are_the_whole_head():
    hidden, weight, centroids, ids = integers(6, 24, 10, 7)
    norm = torch.rand(24) + 0.5, 1e-5
    for noise in noises(6):
        got = cluster_topk(hidden, weight, centroids, ids, 10, 9, norm, noise)
        assert_same(got, vocab_topk_ref(hidden, weight, ids.flatten(), 9, norm, noise))


@pytest.mark.parametrize(("dtype", "size"), cases.one_in(2, [torch.float32, torch.float16], SIZES))
def test_kernel(poisoned, monkeypatch, dtype, size):
    """Also where a program ranks its keys in several parts."""
    *sizes, clusters, k = size
    given = *integers(*sizes, dtype), clusters, k
    if sizes[2] == 10:
        monkeypatch.setattr(op, "SOME", 4)
        op._variants.cache_clear()
    for n, noise in enumerate(noises(sizes[0])):
        args = *given[:3], given[3].int() if n else given[3], *given[4:], None, noise, n != 1
        want = cluster_topk_ref(*args)
        assert_same(launch(*args), want)
    op._variants.cache_clear()


def test_sorted_candidates(poisoned):
    """More than 16 clusters and candidates are sorted instead of taken out one by one."""
    args = *integers(1, 4, 20, 2), 17, 20, None, None, True
    assert_same(launch(*args), cluster_topk_ref(*args))


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4", "mxfp4"])
def test_quantised_weights(poisoned, kind):
    g = torch.Generator().manual_seed(0)
    hidden, weight, centroids = (torch.randn(n, 64, generator=g) for n in (2, 9 * 20, 9))
    for dtype in (torch.float32, torch.float16):
        given = hidden.to(dtype), quantised(weight, kind), centroids.to(dtype), torch.arange(180).view(9, 20), 3, 2
        got, want = launch(*given, None, None, True), cluster_topk_ref(*given)
        torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-5)
        assert torch.equal(got[0], want[0])


@pytest.mark.skipif(not cpu.available(), reason="no C compiler")
@pytest.mark.parametrize("size", [(6, 48, 10, 7, 3, 5), (3, 16, 20, 3, 9, 10), (33, 64, 70, 40, 20, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_for_the_cpu(size, dtype):
    *sizes, clusters, k = size
    hidden, weight, centroids, ids = integers(*sizes)
    for noise in noises(sizes[0]):
        given = hidden, weight.to(dtype), centroids.to(dtype), ids, clusters, k, None, noise, True
        assert op._compiled(op.Arguments(*given)) is not None
        assert_same(cluster_topk(*given), cluster_topk_ref(*given))
    hidden, centroids = torch.randn(hidden.shape), torch.randn(centroids.shape)
    given = hidden, weight, centroids, ids, clusters, k, (torch.rand(sizes[1]) + 0.5, 1e-5), noise, True
    for a, b in zip(cluster_topk(*given)[1:], cluster_topk_ref(*given)[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("run", [launch, cluster_topk])
def test_a_row_is_the_same_alone_and_among_others(run):
    g = torch.Generator().manual_seed(0)
    hidden, weight, centroids = (torch.randn(n, 48, generator=g) for n in (18, 100, 20))
    given = weight, centroids, torch.randperm(100, generator=g).view(20, 5), 4, 3, (torch.ones(48), 1e-5)
    positions = torch.arange(18) * 5
    whole = run(hidden, *given, Noise(3, positions, 0.7), True)
    for rows in (slice(1), slice(17, 18), slice(3, 10)):
        got = run(hidden[rows], *given, Noise(3, positions[rows], 0.7), True)
        assert all(torch.equal(a, b[rows]) for a, b in zip(got, whole, strict=True)), rows


@pytest.mark.parametrize("run", [launch, cluster_topk])
def test_ties_go_to_the_lower_cluster_and_the_lower_id(run):
    hidden, weight, centroids = torch.zeros(2, 16), torch.ones(40, 16), torch.ones(8, 16)
    hidden[1] = -0.0
    ids = torch.arange(40).flip(0).view(8, 5)
    best, values, _ = run(hidden, weight, centroids, ids, 2, 6, None, None, True)
    assert best.tolist() == [[30, 31, 32, 33, 34, 35]] * 2  # of clusters 0 and 1
    assert not values.signbit().any()


@pytest.mark.parametrize("run", [launch, cluster_topk])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_infinities_and_rows_that_are_not_finite(run):
    hidden, weight, centroids, ids = integers(3, 16, 8, 5)
    hidden[0], hidden[1] = math.nan, 0.0
    hidden[1, 0] = 1.0
    centroids[:, 0], weight[:, 0] = torch.arange(8.0), -math.inf
    weight[7 * 5 + 3, 0] = 2.0
    best, values, lse = run(hidden, weight, centroids, ids, 2, 2, None, None, True)
    assert set(best[0].tolist()) <= set(ids.flatten().tolist())
    assert best[1, 0] == ids[7, 3] and values[1].tolist() == [2.0, -math.inf] and lse[1] == 2.0


@pytest.mark.parametrize("run", [launch, cluster_topk])
def test_results_are_written_into_given_memory(run):
    given = *integers(3, 16, 10, 7), 3, 4, None, noises(3)[1], False
    want = run(*given)
    window, logits = torch.full((3, 9), -1), torch.full((3, 4), math.nan)
    got = run(*given, out=(window[:, 1:9:2], logits))
    assert torch.equal(window[:, 1:9:2], want[0]) and torch.equal(got[1], want[1]) and got[1] is logits
    assert int((window != -1).sum()) == 12 and want[2].shape == (0,)


def test_no_rows():
    given = *integers(0, 16, 10, 7), 3, 4, (torch.ones(16), 1e-5), Noise(1, torch.arange(0), 0.5), True
    for run in (launch, cluster_topk, cluster_topk_ref):
        ids, logits, lse = run(*given)
        assert ids.shape == logits.shape == (0, 4) and lse.shape == (0,)


def test_the_cost_counts_what_is_read():
    hidden, weight, centroids, ids = integers(2, 8, 10, 7, torch.float16)
    norm, noise = (torch.ones(8), 1e-5), (0, torch.arange(2), 1.0)
    read = 10 * 8 * 2 + (2 * 8 + 8) * 2 + 6 * 7 * (8 * 2 + 8) + 8 * 2
    flops = 2 * 2 * 8 * (10 + 3 * 7)
    assert cluster_topk_cost(hidden, weight, centroids, ids, 3, 4, norm, noise) == (read + 2 * 4 * 12 + 2 * 4, flops)
    eight = cluster_topk_cost(torch.ones(9, 8).half(), weight, centroids, ids, 3, 1, with_lse=False)[0]
    assert eight == 10 * 8 * 2 + 9 * 8 * 2 + 10 * 7 * (8 * 2 + 8) + 9 * 12, "no cluster is counted twice"


def schema(given, norm, noise, with_lse):
    seed, positions, temperature, draw = Noise(*noise) if noise else (0, None, 0.0, None)
    return *given, *(norm or (None, 0.0)), seed - (1 << 64) * (seed >> 63), positions, temperature, draw, with_lse


def test_registration_and_fullgraph():
    given = *integers(3, 16, 10, 7), 3, 4
    for norm, noise in ((None, None), ((torch.ones(16), 1e-5), noises(3)[2])):
        torch.library.opcheck(torch.ops.specker.cluster_topk, schema(given, norm, noise, True))
        want = cluster_topk(*given, norm, noise)
        assert all(map(torch.equal, torch.ops.specker.cluster_topk(*schema(given, norm, noise, True))[:1], want[:1]))

    def call(hidden, positions):
        return cluster_topk(hidden, *given[1:], None, (5, positions, 0.8), False)

    got = torch.compile(call, fullgraph=True, backend="aot_eager")(given[0], torch.arange(3))
    assert torch.equal(got[0], call(given[0], torch.arange(3))[0]) and got[2].shape == (0,)


def launches():
    """Runs in a compiling process: one head, many lengths, seeds of any size, positions at any offset."""
    weight, centroids, positions = torch.zeros(600, 64).bfloat16(), torch.zeros(30, 64).bfloat16(), torch.arange(300)
    ids = torch.arange(601)
    for T, seed in ((1, 0), (2, 1), (16, 16), (17, 1 << 33), (65, (1 << 64) - 1)):
        noise = seed, positions[T : 2 * T], 1.0 if T == 1 else 0.7
        mine = ids[T % 2 :][:600].view(30, 20)
        launch(torch.zeros(T, 64).bfloat16(), weight, centroids, mine, 4, 4, None, noise, True)


def test_nothing_but_the_head_recompiles():
    assert compilations(__file__) == {"_cluster_choose_kernel": 1, "_cluster_rows_kernel": 1}


def test_two_launches_that_read_no_tensor(unlaunched):
    """Fake tensors have no values to read."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        hidden, weight, centroids = (torch.empty(n, 256).bfloat16() for n in (65, 2048 * 128, 2048))
        noise = 0, torch.empty(65, dtype=torch.int64), 0.7
        ids = torch.empty(2048, 128, dtype=torch.int64)
        best, _, lse = launch(hidden, weight, centroids, ids, 32, 10, None, noise, True)
    assert best.shape == (65, 10) and lse.shape == (65,)
    assert unlaunched == [("_cluster_choose_kernel", (2, 32)), ("_cluster_rows_kernel", (65, 128))]


def test_refuses():
    hidden, weight, centroids, ids = integers(2, 8, 10, 7)
    given = {"hidden": hidden, "weight": weight, "centroids": centroids, "token_ids": ids, "clusters": 3, "k": 4}
    for changed, message in (
        ({"token_ids": ids[:9]}, r"token_ids must be \[C, R\] int32 or int64 with C R = 70"),
        ({"token_ids": ids.float()}, r"one for each row of the weight, got \(10, 7\) torch.float32"),
        ({"centroids": centroids[:9]}, r"centroids must be \[10, 8\] torch.float32, got \(9, 8\)"),
        ({"centroids": centroids.double()}, r"centroids must be \[10, 8\] torch.float32, got \(10, 8\) torch.float64"),
        ({"clusters": 11}, r"clusters must be in 1..min\(256, C = 10\), got 11"),
        ({"k": 22}, r"k must be in 1..min\(64, clusters R = 21\), got 22"),
        ({"weight": weight[:, :7]}, r"expected hidden \[T, E\] and weight \[K, E\]"),
        ({"centroids": centroids.to("meta")}, "centroids must be on cpu, got meta"),
        ({"noise": (0, torch.arange(3), 1.0)}, r"noise positions must be \[2\] int64"),
    ):
        with pytest.raises(ValueError, match=message):
            cluster_topk(**given | changed)
    with pytest.raises(TypeError, match="clusters must be int, got str"):
        cluster_topk(**given | {"clusters": "3"})


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1, 10, 64])
@pytest.mark.parametrize(("E", "C", "R", "clusters"), [(256, 2048, 128, 32), (1023, 100, 77, 20), (896, 2374, 64, 32)])
def test_bfloat16_ids_equal_the_references(E, C, R, clusters, k):
    for T in (1, 8, 66):
        given = [x.cuda() if x.dtype == torch.int64 else x.bfloat16().cuda() for x in integers(T, E, C, R)]
        wide = [x.double() if x.is_floating_point() else x for x in given]
        got, want = launch(*given, clusters, k, None, None, True), cluster_topk_ref(*wide, clusters, k)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1].double(), want[1])
        torch.testing.assert_close(got[2].double(), want[2], rtol=1e-5, atol=1e-5)
        noise = Noise(3, torch.arange(T).cuda(), 0.8)
        got, want = launch(*given, clusters, k, None, noise, True), cluster_topk_ref(*wide, clusters, k, None, noise)
        torch.testing.assert_close(got[1].double(), want[1], rtol=1e-5, atol=2e-5)


@pytest.mark.skipif(not cpu.available(), reason="the reference ranks ids of any size")
@pytest.mark.parametrize("wrong", [1 << 32, (1 << 63) - 1, -1])
def test_ids_of_more_than_32_bits_are_refused(wrong):
    """The compiled form ranks by 32 bits of an id, so it would return others."""
    hidden, weight, centroids, ids = integers(3, 32, 8, 5)
    cluster_topk(hidden, weight, centroids, ids, 8, 3)
    ids[2, 1] = wrong
    with pytest.raises(ValueError, match=r"token_ids must be in 0\.\.4294967295, got"):
        cluster_topk(hidden, weight, centroids, ids, 8, 3)
