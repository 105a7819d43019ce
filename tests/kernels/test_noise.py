"""noise: the generator against published vectors and plain integers, the Gumbel values against float64, the cache."""

import math

import numpy as np
import pytest
import torch
from compile_only import compilations
from formulas import chi_square_bound

from specker import cpu
from specker.kernels import noise
from specker.kernels.noise import add_gumbel_, gumbel, gumbel_ref, philox4x32

MASK = 0xFFFFFFFF


def slow_philox(counter, key):
    """Philox4x32-10 in Python integers, as Random123 writes it."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        hi0, lo0 = divmod(0xD2511F53 * c0, 1 << 32)
        hi1, lo1 = divmod(0xCD9E8D57 * c2, 1 << 32)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


def slow_gumbel(seed, position, token):
    counter = (token // 4, position & MASK, position >> 32 & MASK, 0x73706563)
    x = slow_philox(counter, (seed & MASK, seed >> 32))[token % 4]
    return -math.log(-math.log1p(-(x + 0.5) / 2**32))


def bits(x):
    """fp32 as integers, to compare bits: 0.0 == -0.0 compares values."""
    return x.contiguous().view(torch.int32)


# Random123's kat_vectors, philox4x32 10.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK,) * 4, (MASK,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("counter, key, expected", KNOWN)
def test_philox_known_answers(counter, key, expected):
    assert slow_philox(counter, key) == expected
    seed = key[0] | key[1] << 32
    for words in (
        [np.array([[c]], dtype=np.uint64) for c in counter],
        [torch.tensor([[c]], dtype=torch.int64) for c in counter],
    ):
        assert tuple(int(w[0, 0]) for w in philox4x32(*words, seed)) == expected


def test_philox_against_plain_integers_and_numpy_against_torch():
    rng = np.random.default_rng(0)
    words = rng.integers(0, 1 << 32, (4, 200), dtype=np.uint64)
    seed = int(rng.integers(0, 1 << 63)) * 2 + 1
    ours = philox4x32(*words, seed)
    torchs = philox4x32(*torch.from_numpy(words.astype(np.int64)), seed)
    for i in range(200):
        expected = slow_philox([int(w[i]) for w in words], (seed & MASK, seed >> 32))
        assert tuple(int(w[i]) for w in ours) == expected
        assert tuple(int(w[i]) for w in torchs) == expected


@pytest.mark.parametrize("seed", [0, 1, 1 << 32, (1 << 63) + 5, (1 << 64) - 1])
def test_value_is_the_documented_function(seed):
    positions = torch.tensor([0, 1, 15, 16, 12345, (1 << 32) - 1, 1 << 32, (7 << 40) + 3])
    g = gumbel(seed, positions, 23)
    expected = [[slow_gumbel(seed, p, v) for v in range(23)] for p in positions.tolist()]
    torch.testing.assert_close(g.double(), torch.tensor(expected, dtype=torch.float64), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("vocab", [1, 2, 3, 4, 5, 100, 1023, 8191, 8192, 8193, 50257])
def test_cache_changes_no_bit(vocab):
    for wanted in ([7], [5, 6, 7], [14, 15, 16, 17], [3, 3, 4, 4, 4, 5], [900, 2, 31, 32, 33, (1 << 40) + 3, -1]):
        positions = torch.tensor(wanted)
        uncached = noise._rows(11, positions.numpy(), noise._padded(vocab))[:, :vocab]
        torch.testing.assert_close(uncached, gumbel_ref(11, positions, vocab), rtol=5e-7, atol=5e-7)
        expected = bits(uncached)
        noise._block.cache_clear()
        assert torch.equal(bits(gumbel(11, positions, vocab)), expected)
        assert torch.equal(bits(gumbel(11, positions, vocab)), expected)  # and again, from the cache


def test_value_does_not_depend_on_the_rest_of_the_call():
    positions = torch.arange(600)  # beyond CACHED_ROWS, which takes another path
    whole = gumbel(3, positions, 1000)
    assert whole.shape == (600, 1000) and whole.dtype == torch.float32
    order = torch.randperm(600, generator=torch.Generator().manual_seed(0))
    assert torch.equal(gumbel(3, order, 1000), whole[order])
    assert torch.equal(gumbel(3, order[:40], 1000), whole[order[:40]])
    for i in (0, 17, 599):
        for vocab in (1, 7, 999):
            assert torch.equal(gumbel(3, positions[i : i + 1], vocab)[0], whole[i, :vocab])
    assert torch.equal(gumbel(3, positions[:4], 40000)[:, :1000], whole[:4])


def test_positions_may_be_empty_or_a_view():
    assert gumbel(0, torch.empty(0, dtype=torch.int64), 9).shape == (0, 9)
    spread = torch.arange(40)[3::7]
    assert torch.equal(gumbel(0, spread, 9), gumbel(0, spread.clone(), 9))


def test_add_gumbel_takes_the_noise_of_the_full_vocabulary_id():
    positions = torch.tensor([4, 9, 9])
    full = gumbel(5, positions, 5000)
    ids = torch.randperm(5000, generator=torch.Generator().manual_seed(1))[:777]
    z = torch.randn(3, 777, generator=torch.Generator().manual_seed(2))
    assert torch.equal(add_gumbel_(z.clone(), 5, positions, ids), z + full[:, ids])
    assert torch.equal(add_gumbel_(z.clone(), 5, positions, ids.int()), z + full[:, ids])
    without_host_read = noise._gumbel_at(5, positions, ids)
    torch.testing.assert_close(without_host_read, full[:, ids], rtol=5e-7, atol=5e-7)
    assert add_gumbel_(z.double(), 5, positions).dtype == torch.float64


def test_the_kernel_has_the_noise_of_each_rows_own_seed():
    g = torch.Generator().manual_seed(3)
    numbers = torch.randint(-(1 << 62), 1 << 62, (3, 4), generator=g)  # as `pack_draw` lays them out
    positions, ids = torch.tensor([0, 7, 1 << 40]), torch.randint(0, 150000, (3, 41), generator=g)
    got, want = (go(numbers[:, :1], positions, ids) for go in (noise.launch_at, noise.gumbel_at))
    torch.testing.assert_close(got, want, rtol=5e-7, atol=5e-7)
    assert noise.launch_at(numbers[:0, :1], positions[:0], ids[:0]).shape == (0, 41)


def test_extreme_integers_stay_finite_and_precise():
    top = 1 << 32
    x = [0, 1, 2, 3, 1000, (1 << 23) - 1, 1 << 23, 1 << 24, (1 << 31) + 1, top - 256, top - 128, top - 1]
    g = noise._from_bits(torch.tensor(x, dtype=torch.int64).float())
    assert torch.isfinite(g).all()
    assert g.min() >= -2.82 and g.max() <= 22.88
    assert (g[:-1] >= g[1:]).all() and (g[:5].diff() < -1e-4).all()  # large values stay distinct
    exact = torch.tensor([-math.log(-math.log1p(-(v + 0.5) / 2**32)) for v in x[:9]], dtype=torch.float64)
    torch.testing.assert_close(g[:9].double(), exact, rtol=2e-7, atol=2e-7)


def test_compiled_noise_is_the_formula():
    """At every size of a run of ids, over all 32 bits of the words: also where log's argument is close to one."""
    position = torch.tensor([5, (1 << 40) + 3])
    for padded in (4, 60, 64, 68, 4096):
        got = cpu.gumbel(11, position, padded)
        assert torch.equal(got, cpu.gumbel(11, position, 4096)[:, :padded])
        torch.testing.assert_close(got, gumbel_ref(11, position, padded), rtol=5e-7, atol=5e-7)
    extremes = cpu.gumbel(3, torch.arange(64), 65536)
    exact = gumbel_ref(3, torch.arange(64), 65536).double()
    assert extremes.max() > 13.5 and extremes.min() < -2.6  # of four million draws
    torch.testing.assert_close(extremes.double(), exact, rtol=1e-6, atol=1e-6)


def test_noise_without_compiled_kernels(monkeypatch):
    positions = np.array([3, 900])
    compiled = noise._rows(11, positions, 4096)
    monkeypatch.setattr(noise, "native", lambda: None)
    torch.testing.assert_close(noise._rows(11, positions, 4096), compiled, rtol=5e-7, atol=5e-7)


def test_distribution():
    g = torch.cat([gumbel(seed, torch.arange(32) + 5 * seed, 8192) for seed in range(4)]).double().flatten()
    n = len(g)
    variance = math.pi**2 / 6
    assert abs(g.mean() - 0.5772156649) < 4 * math.sqrt(variance / n)
    assert abs(g.var() - variance) < 4 * variance * math.sqrt(4.4 / n)  # the kurtosis of a Gumbel is 5.4
    for bins in (100, 4000):
        count = torch.histc((-(-g).exp()).exp(), bins, 0, 1)
        assert ((count - n / bins) ** 2 / (n / bins)).sum() < chi_square_bound(bins - 1)


def test_no_correlation_between_seeds_positions_and_ids():
    def uniform(seed, first):
        return (-(-gumbel(seed, torch.arange(first, first + 64), 4096).double()).exp()).exp()

    a = uniform(1, 0)
    pairs = {
        "seed": (a, uniform(2, 0)),
        "seed high word": (a, uniform(1 + (1 << 32), 0)),
        "position": (a, uniform(1, 1)),
        "position high word": (a, uniform(1, 1 << 32)),
        "position and seed": (a, uniform(2, 1)),
        "id": (a[:, :-1], a[:, 1:]),
        "lane": (a[:, :-4], a[:, 4:]),
    }
    for name, (x, y) in pairs.items():
        r = torch.corrcoef(torch.stack([x.flatten(), y.flatten()]))[0, 1]
        assert abs(r) < 4 / math.sqrt(x.numel()), (name, r)


@pytest.mark.parametrize("vocab", [1, 100, 8192, 32000, 152064])
def test_cache_is_bounded(vocab):
    padded = noise._padded(vocab)
    assert padded >= vocab and padded % 4 == 0
    assert noise._block_rows(padded) * padded * 4 <= max(1 << 19, 4 * padded)
    assert noise._block.cache_info().maxsize == noise.CACHED_BLOCKS <= 64


def test_block_made_in_inference_mode_serves_training():
    noise._block.cache_clear()
    with torch.inference_mode():
        gumbel(8, torch.tensor([3]), 16)
    z = torch.zeros(1, 16, requires_grad=True)
    (z * gumbel(8, torch.tensor([3]), 16)).sum().backward()
    assert torch.equal(z.grad, gumbel(8, torch.tensor([3]), 16))


@pytest.mark.parametrize("seed", [-1, 1 << 64])
def test_seed_out_of_range(seed):
    with pytest.raises(ValueError, match=rf"seed must be in \[0, 2\*\*64\), got {seed}"):
        gumbel(seed, torch.arange(2), 8)


def test_arguments_are_checked():
    with pytest.raises(TypeError, match="seed must be an integer, got float"):
        gumbel(1.5, torch.arange(2), 8)
    with pytest.raises(ValueError, match=r"positions must be \[T\] int64, got \(2,\) torch.int32"):
        gumbel(1, torch.arange(2, dtype=torch.int32), 8)
    with pytest.raises(ValueError, match=r"positions must be \[T\] int64, got \(1, 2\)"):
        gumbel(1, torch.arange(2)[None], 8)
    with pytest.raises(ValueError, match="vocab_size must be at least 1, got 0"):
        gumbel(1, torch.arange(2), 0)
    assert torch.equal(gumbel(np.int64(4), torch.arange(2), 8), gumbel(4, torch.arange(2), 8))


def launches():
    """Runs in a compiling process: candidates of any number, as views at any offset."""
    ids = torch.arange(4000, dtype=torch.int64)
    for n, (rows, count) in enumerate(((1, 1), (2, 16), (9, 33), (16, 80))):
        seed = torch.zeros(rows, n + 1, dtype=torch.int64)[:, n:]
        noise.launch_at(seed, ids[n : n + rows], ids[n:][: rows * count].view(rows, count))


def test_no_size_recompiles():
    assert compilations(__file__) == {"_gumbel_at_kernel": 1}
