"""vocab_topk against a float64 formula that ranks by (-value, id) in Python; ties, trimming, noise, norm. Also the
kernel, in the interpreter, for many rows; tests/kernels/test_vocab_topk_kernel.py has its other tests."""

import importlib
import itertools
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from specker.kernels.noise import gumbel
from specker.kernels.row_linear import row_linear
from specker.kernels.sample_rows import sample_rows
from specker.kernels.tiles import COMMON
from specker.kernels.variant import Variant
from specker.kernels.vocab_topk import MAX_K, _largest, _select, launch, vocab_topk, vocab_topk_cost

module = importlib.import_module("specker.kernels.vocab_topk")  # the package's attribute of this name is the function
I64 = torch.int64


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def formula(hidden, weight, token_ids, k, norm=None, noise=None):
    """ids, logits, lse in float64; the noise is that of the whole vocabulary."""
    h, w = hidden.double(), weight.double()
    if norm is not None:
        h = h / (h.pow(2).mean(-1, keepdim=True) + norm[1]).sqrt() * norm[0].double()
    z = h @ w.T
    ids = list(range(len(weight))) if token_ids is None else token_ids.tolist()
    if noise is not None and noise[2] > 0:
        seed, positions, temperature = noise
        z = z / temperature + gumbel(seed, positions, max(ids) + 1).double()[:, ids]
    best = [sorted(range(len(ids)), key=lambda c: (-row[c], ids[c]))[:k] for row in z.tolist()]
    columns = torch.tensor(best, dtype=I64).view(len(z), k)
    return torch.tensor(ids)[columns], z.gather(1, columns), z.exp().sum(-1).log()


def assert_matches(out, expected, tolerance):
    for x, y in zip(out[1:], expected[1:], strict=True):
        torch.testing.assert_close(x.double(), y, rtol=tolerance, atol=tolerance)
    assert out[0].dtype == I64 and torch.equal(out[0], expected[0])


def integers(T, E, K, high=3, seed=0):
    """Small integers: exact in every dtype, and full of ties."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randint(-high, high + 1, (T, E), generator=generator).float()
    return hidden, torch.randint(-high, high + 1, (K, E), generator=generator).float()


def trimmed(K, V, seed=0):
    """K distinct ids below V, unordered."""
    return torch.randperm(V, generator=torch.Generator().manual_seed(seed))[:K]


SHAPES = [(1, 1, 1), (1, 5, 7), (3, 17, 64), (7, 33, 129), (2, 64, 1000), (12, 31, 257)]


@pytest.mark.parametrize("T, E, K", SHAPES)
@pytest.mark.parametrize("ids", ["all", "ascending", "shuffled", "int32"])
def test_float64_against_the_formula(T, E, K, ids):
    generator = torch.Generator().manual_seed(K)
    hidden, weight = (torch.randn(n, E, generator=generator, dtype=torch.float64) for n in (T, K))
    norm = (torch.rand(E, generator=generator, dtype=torch.float64) + 0.5, 1e-5)
    token_ids = {
        "all": None,
        "ascending": trimmed(K, 2 * K).sort().values,
        "shuffled": trimmed(K, 2 * K),
        "int32": trimmed(K, 2 * K).int(),
    }[ids]
    positions = torch.arange(T) + 13
    for k in sorted({1, min(3, K), min(MAX_K, K)}):
        for n in (None, norm):
            for noise in (None, (7, positions, 0.6), (7, positions, 1.0)):
                out = vocab_topk(hidden, weight, token_ids, k, n, noise)
                assert all(x.dtype == torch.float64 for x in out[1:])
                assert out[0].shape == out[1].shape == (T, k) and out[2].shape == (T,)
                assert_matches(out, formula(hidden, weight, token_ids, k, n, noise), 1e-10)


@pytest.mark.parametrize(
    ("call", "T", "dtype", "noisy"),
    [
        *itertools.product((vocab_topk,), (130, 256, 257, 300), (torch.float64, torch.float32), (False, True)),
        (launch, 130, torch.float32, True),
        (launch, 256, torch.float16, False),
    ],
)
def test_many_rows_against_the_formula(call, T, dtype, noisy):
    """With integers both rank the same sums, and many tie. Noise differs in its last bits, so ids may swap if their
    logits are equal up to rounding."""
    K, k = (40, 1) if call is launch and T == 256 else (70, 5)  # one kernel tile, or two
    hidden, weight = integers(T, 9, K)
    token_ids = trimmed(K, 300)
    noise = (7, torch.arange(T) + 13, 0.6) if noisy else None
    ids, logits, lse = call(hidden.to(dtype), weight.to(dtype), token_ids, k, None, noise, True)
    want, values, total = formula(hidden, weight, token_ids, k, None, noise)
    bound = 1e-10 if dtype == torch.float64 and not noisy else 2e-5
    torch.testing.assert_close(logits.double(), values, rtol=bound, atol=bound)
    torch.testing.assert_close(lse.double(), total, rtol=bound, atol=bound)
    assert ((ids == want) | (noisy & ((logits - values).abs() < 2e-5))).all() and (ids == want).float().mean() > 0.99
    assert (ids.sort().values.diff() > 0).all(), "different ids"


def test_the_kernel_takes_any_number_of_rows_and_the_reference_float64(monkeypatch):
    """Fake tensors stand in for a GPU."""
    went = []

    def largest(z, token_ids, k):  # used by the reference: a fake GPU cannot index
        went.append(("reference", len(z)))
        return z.narrow(1, 0, k), z.narrow(1, 0, k).long()

    monkeypatch.setattr(module, "_largest", largest)
    monkeypatch.setattr(module, "arch", lambda device: 90)
    monkeypatch.setattr(module, "sms", lambda device: 132)
    monkeypatch.setattr(Variant, "__call__", lambda self, grid, x, *_: went.append((self.kernel, len(x))))
    with FakeTensorMode():
        for T, dtype in ((1, torch.float32), (256, torch.bfloat16), (70000, torch.bfloat16), (2, torch.float64)):
            vocab_topk(*(torch.empty(n, 8, dtype=dtype, device="cuda") for n in (T, 20)), None, 3)
    kernels = module._vocab_topk_kernel, module._vocab_topk_merge_kernel
    assert went == [*((k, T) for T in (1, 256, 70000) for k in kernels), ("reference", 2)]


def test_where_the_sums_are_those_of_row_linear(monkeypatch):
    """Not where it splits them, nor where tiles of int4 differ. Fake tensors stand in for a GPU."""
    monkeypatch.setattr(module, "sms", lambda device: 132)
    for arch in (80, 90, 100, 942):
        monkeypatch.setattr(module, "arch", lambda device, arch=arch: arch)
        with FakeTensorMode():
            for K, E, alike in ((128256, 4096, True), (32000, 2048, True), (1024, 4096, False), (8192, 14336, False)):
                hidden, weight = (torch.empty(n, E, dtype=torch.bfloat16, device="cuda") for n in (3, K))
                assert module.draws_alike(hidden, weight) == (alike and arch != 942)
            assert not module.draws_alike(hidden.double(), weight.double())
            int4 = [
                module._sums_alike(torch.bfloat16, *size, arch, 132, COMMON[3]) for size in ((32000, 2048), (999, 256))
            ]
            assert int4 == [arch != 942, arch == 80]
            assert not module.draws_alike(hidden.cpu(), weight.cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 2, 5, 12, 64])
@pytest.mark.parametrize("order", ["all", "ascending", "descending", "shuffled"])
def test_ties_go_to_the_lower_mapped_id(dtype, k, order):
    hidden, weight = integers(6, 4, 300)
    hidden[0] = 0  # every logit equal
    token_ids = {
        "all": None,
        "ascending": torch.arange(300) * 3,
        "descending": torch.arange(300).flip(0),
        "shuffled": trimmed(300, 5000),
    }[order]
    ids, logits, lse = vocab_topk(hidden.to(dtype), weight.to(dtype), token_ids, k)
    assert logits.dtype == lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_matches((ids, logits, lse), formula(hidden, weight, token_ids, k), 1e-5)
    expected = range(k) if token_ids is None else token_ids.sort().values[:k].tolist()
    assert ids[0].tolist() == list(expected)


def test_k_may_be_all_rows_and_infinities_are_ranked():
    hidden, weight = torch.ones(1, 1), torch.tensor([[-math.inf], [2.0], [-math.inf], [5.0]])
    for token_ids, expected in [(None, [3, 1, 0, 2]), (torch.tensor([9, 4, 2, 7]), [7, 4, 2, 9])]:
        ids, logits, lse = vocab_topk(hidden, weight, token_ids, 4)
        assert ids.tolist() == [expected]
        assert logits.tolist() == [[5.0, 2.0, -math.inf, -math.inf]]
        torch.testing.assert_close(lse, torch.tensor([math.log(math.exp(5) + math.exp(2))]))


def test_order_of_the_kept_rows_does_not_matter():
    hidden, weight = integers(5, 8, 200)
    ids = trimmed(200, 1000)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(3))
    positions = torch.arange(5)
    for k in (1, 4, 20):
        for noise in (None, (1, positions, 0.9)):
            a = vocab_topk(hidden, weight, ids, k, None, noise)
            b = vocab_topk(hidden, weight[order], ids[order], k, None, noise)
            assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
            torch.testing.assert_close(a[2], b[2])


@pytest.mark.parametrize("k", [1, 3, 10])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_noise_is_that_of_the_whole_head(k, temperature):
    """A trimmed head gives the kept ids the same values in the same order as the whole head."""
    hidden, weight = integers(4, 16, 3000)  # integers: the two matmuls agree exactly
    kept = trimmed(1000, 2900)
    noise = (21, torch.tensor([0, 15, 16, 1 << 33]), temperature)
    whole, values, _ = vocab_topk(hidden, weight, None, 64, None, noise)
    ids, logits, lse = vocab_topk(hidden, weight[kept], kept, k, None, noise)
    inside = torch.isin(whole, kept)
    for t in range(4):
        assert ids[t].tolist() == whole[t][inside[t]][:k].tolist()
        assert torch.equal(logits[t], values[t][inside[t]][:k])
    z = (hidden @ weight.T) / temperature + gumbel(21, noise[1], 3000)
    assert torch.equal(logits, z.gather(1, ids))
    torch.testing.assert_close(lse, z[:, kept].logsumexp(-1))


def test_best_draft_is_the_token_the_target_draws():
    """With the same head, seed and position, sample_rows draws exactly the drafter's first candidate. Logits in 16 bits
    are float32 sums, as in a verify pass."""
    positions = torch.arange(20) + 5
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        hidden, weight = torch.randn(20, 32).to(dtype), torch.randn(500, 32).to(dtype)
        for temperature in (0.0, 0.7, 1.0):
            logits = row_linear(hidden, weight, epilogue="float32")
            drawn = sample_rows(logits, temperature, 0, 1.0, 3, positions)
            for k in (1, 4):
                ids, _, _ = vocab_topk(hidden, weight, None, k, None, (3, positions, temperature))
                assert torch.equal(ids[:, 0], drawn)


def test_temperature_zero_is_no_noise():
    hidden, weight = torch.randn(3, 16), torch.randn(100, 16)
    plain = vocab_topk(hidden, weight, None, 5)
    greedy = vocab_topk(hidden, weight, None, 5, None, (9, torch.arange(3), 0.0))
    assert all(torch.equal(a, b) for a, b in zip(plain, greedy, strict=True))
    cold = vocab_topk(hidden, weight, None, 5, None, (9, torch.arange(3), 0.01))
    torch.testing.assert_close(cold[1] * 0.01, plain[1], rtol=0, atol=0.25)  # 0.01 of at most 22.9


@pytest.mark.parametrize("noise", [None, (4, torch.arange(6), 0.3)])
def test_confidences_are_normalised(noise):
    hidden, weight = 3 * torch.randn(6, 24), torch.randn(60, 24)  # exp of these logits leaves fp32's range
    _, logits, lse = vocab_topk(hidden, weight, None, 60, None, noise)
    torch.testing.assert_close((logits - lse[:, None]).exp().sum(-1), torch.ones(6), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, logits.logsumexp(-1), rtol=1e-6, atol=1e-6)
    assert (logits[:, :-1] >= logits[:, 1:]).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norm_is_rounded_once(dtype):
    generator = torch.Generator().manual_seed(0)
    hidden = (300 * torch.randn(3, 64, generator=generator)).to(dtype)  # squares overflow fp16
    norm = (torch.rand(64, generator=generator).to(dtype) + 0.5, 1e-6)
    wide = hidden.double()
    normed = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm[0].double()
    ids, logits, _ = vocab_topk(hidden, torch.eye(64, dtype=dtype), None, 64, norm)
    close = torch.finfo(dtype).eps / 2 * 1.001  # half a unit in the last place, and fp32's own error
    torch.testing.assert_close(logits.double(), normed.gather(1, ids), rtol=close, atol=0)


def test_fp32_error_is_that_of_the_matmul():
    hidden, weight = torch.randn(8, 256), torch.randn(999, 256)
    _, logits, lse = vocab_topk(hidden, weight, None, 10)
    exact = hidden.double() @ weight.double().T
    bound = 2 * float((hidden @ weight.T - exact).abs().max()) + 1e-6
    assert (logits - exact.topk(10).values).abs().max() <= bound
    assert (lse - exact.logsumexp(-1)).abs().max() <= bound + 1e-5


def test_inputs_are_left_alone_and_views_are_taken():
    wide = torch.randn(6, 40)
    hidden, weight = wide[::2, 8:24], torch.randn(50, 16)
    before = wide.clone(), weight.clone()
    noise = (2, torch.arange(6)[::2], 0.8)
    a = vocab_topk(hidden, weight, None, 3, (torch.ones(16), 1e-5), noise)
    b = vocab_topk(hidden.contiguous(), weight, None, 3, (torch.ones(16), 1e-5), (2, torch.tensor([0, 2, 4]), 0.8))
    assert torch.equal(a[0], b[0])
    assert torch.equal(wide, before[0]) and torch.equal(weight, before[1])


@pytest.mark.parametrize("noise", [None, (0, torch.empty(0, dtype=I64), 1.0)])
def test_no_rows(noise):
    for k in (1, 3):
        for token_ids in (None, torch.arange(9)):
            ids, logits, lse = vocab_topk(torch.empty(0, 4), torch.ones(9, 4), token_ids, k, None, noise)
            assert ids.shape == logits.shape == (0, k) and lse.shape == (0,) and ids.dtype == I64


@pytest.mark.parametrize("V", [1, 2, 9, 400])
def test_selecting_is_sorting(V):
    generator = torch.Generator().manual_seed(V)
    for high in (1, 3, 1000):
        z = torch.randint(-high, high + 1, (8, V), generator=generator).float()
        for token_ids in (None, trimmed(V, 3 * V)):
            for k in {1, min(2, V), min(30, V), min(MAX_K, V)}:
                for a, b in zip(_select(z, token_ids, k), _largest(z, token_ids, k), strict=True):
                    assert torch.equal(a, b)


def test_cost_reads_the_weight_once():
    hidden, weight, ids = torch.zeros(2, 8), torch.zeros(20, 8), torch.arange(20)
    read, flops = vocab_topk_cost(hidden, weight, ids, 3, (torch.ones(8), 1e-5), (0, torch.arange(2), 1.0))
    once = 4 * (20 * 8 + 2 * 8 + 8) + 8 * 20 + 8 * 2 + 2 * 3 * (8 + 4) + 2 * 4
    assert (read, flops) == (once, 2 * 2 * 20 * 8)
    doubles = hidden.double(), weight.double(), None, 3
    assert vocab_topk_cost(*doubles, with_lse=False)[0] == 8 * (20 * 8 + 2 * 8) + 2 * 3 * (8 + 8)


def test_arguments_are_checked():
    hidden, weight, positions = torch.zeros(2, 8), torch.zeros(20, 8), torch.arange(2)
    for arguments, message in [
        (
            (hidden[0], weight, None, 1),
            r"expected hidden \[T, E\] and weight \[K, E\]: hidden \(8,\), weight \(20, 8\)",
        ),
        ((hidden, weight[:, :4], None, 1), r"hidden \(2, 8\), weight \(20, 4\)"),
        (
            (hidden, weight.double(), None, 1),
            "of one floating dtype and device: hidden torch.float32 cpu, weight torch.f",
        ),
        ((hidden.long(), weight.long(), None, 1), "of one floating dtype and device: hidden torch.int64"),
        ((hidden, weight.to("meta"), None, 1), "of one floating dtype and device: .* weight torch.float32 meta"),
        ((hidden, weight, None, 0), r"k must be in 1..min\(64, K = 20\), got 0"),
        ((hidden, weight, None, 21), r"k must be in 1..min\(64, K = 20\), got 21"),
        ((hidden, torch.zeros(99, 8), None, 65), r"k must be in 1..min\(64, K = 99\), got 65"),
        ((hidden, weight, torch.arange(19), 1), r"token_ids must be \[20\] int32 or int64, got \(19,\) torch.int64"),
        (
            (hidden, weight, torch.arange(20).float(), 1),
            r"token_ids must be \[20\] int32 or int64, got \(20,\) torch.fl",
        ),
        ((hidden, weight, None, 1, (torch.ones(7), 1e-5)), r"norm weight must be \[8\] floating, got \(7,\)"),
        ((hidden, weight, None, 1, None, (0, positions[:1], 1.0)), r"noise positions must be \[2\] int64, got \(1,\)"),
        ((hidden, weight, None, 1, None, (0, positions.int(), 1.0)), r"noise positions .* got \(2,\) torch.int32"),
        ((hidden, weight, None, 1, None, (0, positions, -1.0)), "noise temperature must be 0 or in .*, got -1.0"),
        ((hidden, weight, None, 1, None, (0, positions, math.nan)), "noise temperature must be 0 or in .*, got nan"),
        ((hidden, weight, None, 1, None, (-5, positions, 1.0)), "seed must be in .*, got -5"),
    ]:
        with pytest.raises(ValueError, match=message):
            vocab_topk(*arguments)
    with pytest.raises(ValueError, match="token_ids must be on cpu, got meta"):
        vocab_topk(hidden, weight, torch.arange(20, device="meta"), 1)
    with pytest.raises(ValueError, match="seed must be in"):
        torch.compile(vocab_topk, backend="eager")(hidden, weight, None, 1, None, (-5, positions, 1.0))


def test_a_parameter_may_be_the_norm():
    """A module's weights require gradients, which numpy refuses."""
    hidden, weight, norm = torch.randn(2, 8), torch.randn(20, 8), torch.nn.Parameter(torch.rand(8))
    want = vocab_topk(hidden, weight, None, 3, (norm.detach(), 1e-5))
    assert all(map(torch.equal, vocab_topk(hidden, weight, None, 3, (norm, 1e-5))[:1], want[:1]))


@pytest.mark.parametrize("k", [1, 3])
def test_without_lse_the_rest_is_the_same(k: int) -> None:
    hidden, weight = torch.randn(2, 8), torch.randn(11, 8)
    ids, logits, lse = vocab_topk(hidden, weight, None, k)
    bare = vocab_topk(hidden, weight, None, k, with_lse=False)
    assert torch.equal(bare[0], ids) and torch.equal(bare[1], logits)
    assert lse.shape == (2,) and bare[2].shape == (0,)
