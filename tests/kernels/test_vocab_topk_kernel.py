"""vocab_topk's kernel in Triton's interpreter (`gpu`: on a device, in bfloat16) against the reference, and its
contract. tests/kernels/test_vocab_topk.py compares the reference with a formula.

Inputs are small integers unless stated otherwise: sums are exact, so ids must be equal, and many logits tie.
"""

import importlib
import math

import cases
import pytest
import torch
from compile_only import compilations
from reads_only import reads

from specker.kernels.noise import pack_draw
from specker.kernels.quant import quantised
from specker.kernels.variant import tl, triton
from specker.kernels.vocab_topk import Noise, launch, vocab_topk, vocab_topk_ref

op = importlib.import_module("specker.kernels.vocab_topk")
linear = importlib.import_module("specker.kernels.row_linear")
sample = importlib.import_module("specker.kernels.sample_rows")
HALF = [torch.float32, torch.float16]
EPS = 1e-5


def integers(T, E, K, dtype=torch.float16, high=3, device="cpu"):
    g = torch.Generator().manual_seed(T + E + K)
    return [torch.randint(-high, high + 1, (n, E), generator=g).to(device, dtype) for n in (T, K)]


def trimmed(K, V, dtype=torch.int64):
    """K distinct ids below V, unordered."""
    return torch.randperm(V, generator=torch.Generator().manual_seed(K))[:K].to(dtype)


def noise_of(T, temperature=0.8, seed=(1 << 64) - 5):
    """Positions on both sides of 2^32."""
    return seed, torch.arange(T) + (1 << 32) - T // 2, temperature


def assert_same(got, want):
    assert torch.equal(got[0], want[0]) and got[0].dtype == torch.int64
    assert got[1].dtype == got[2].dtype == torch.float32
    torch.testing.assert_close(got[1], want[1], rtol=2e-6, atol=4e-6)  # the logarithms of the noise
    torch.testing.assert_close(got[2], want[2], rtol=2e-6, atol=4e-6)


SIZES = [(1, 1, 1), (2, 5, 7), (9, 33, 65), (3, 64, 300)]


@pytest.mark.parametrize(("dtype", "size", "noisy"), cases.one_in(2, HALF, SIZES, [False, True]))
def test_kernel(poisoned, dtype, size, noisy):
    T, E, K = size
    hidden, weight = integers(T, E, K, dtype)
    for k in sorted({1, min(10, K)}):
        for ids in (None, trimmed(K, 5 * K), trimmed(K, 2 * K, torch.int32)) if k > 1 or K == 1 else (trimmed(K, K),):
            args = hidden, weight, ids, k, None, noise_of(T) if noisy else None, True
            assert_same(launch(*args), vocab_topk_ref(*args))


@pytest.mark.parametrize("dtype", HALF)
def test_more_rows_than_a_tile(poisoned, dtype):
    hidden, weight = integers(65, 17, 70, dtype)
    args = hidden, weight, trimmed(70, 300), 3, None, noise_of(65), True
    assert_same(launch(*args), vocab_topk_ref(*args))


@pytest.mark.parametrize(("K", "k"), [(64, 64), (300, 64), (200, 33), (17, 17)])
def test_many_candidates(poisoned, K, k):
    hidden, weight = integers(2, 5, K)
    args = hidden, weight, trimmed(K, 2 * K), k, None, None, True
    assert_same(launch(*args), vocab_topk_ref(*args))


MERGED = [(2, 2), (2, 16), (16, 3), (17, 9), (33, 16), (600, 10), (2050, 4), (300, 20)]


@pytest.mark.parametrize(("tiles", "k"), [*MERGED, pytest.param(256, 64, marks=pytest.mark.slow)])
def test_the_merge_of_tiles(poisoned, tiles, k):
    """Made-up candidates in the streaming kernel's format: the largest of each tile, in order. Of few, many and odd
    numbers of tiles, up to 16 of them in a group, and of more candidates than there are tiles."""
    T, C = 2, 1 << (k - 1).bit_length()
    g = torch.Generator().manual_seed(tiles)
    token, value = torch.randperm(T * tiles * C, generator=g), torch.rand(T * tiles * C, generator=g) + 1e-3
    key = (value.view(torch.int32).long() << 32 | ~token & (1 << 32) - 1).view(T, tiles, C).sort(-1, descending=True)[0]
    ids, logits, empty = torch.zeros(T, k, dtype=torch.int64), torch.zeros(T, k), torch.zeros(0)
    merge = op._variants(op.Search(torch.float32, 8, k, None, False, False, False, 90), 64 * tiles)[1]
    assert merge.constexprs["TILES"] == tiles and merge.constexprs["C"] == C
    work = torch.empty(T, op._work(merge), dtype=torch.int64)
    merge((T,), key, empty, work, ids, logits, empty, T, k, 1)
    best = key.flatten(1).topk(k)[0]
    assert torch.equal(ids, ~best & (1 << 32) - 1)
    assert torch.equal(logits, (best >> 32).int().view(torch.float32))


@pytest.mark.parametrize("k", [1, 4])
def test_ids_are_written_into_a_view(k):
    """Columns of a window of drafts, with positions that are apart."""
    hidden, weight = integers(5, 8, 300)
    seed, positions, temperature = noise_of(5)
    apart = torch.full((5, 3), -(10**15))
    apart[:, 1] = positions
    args = hidden, weight, trimmed(300, 600), k, None
    want = launch(*args, (seed, positions, temperature), True)
    for op_ in (launch, vocab_topk):
        window = torch.full((5, 9), -1)
        out = window[:, 2 : 2 + 2 * k : 2]
        got = op_(*args, (seed, apart[:, 1], temperature), True, out=out)
        assert got[0] is out and all(map(torch.equal, got, want))
        assert int((window != -1).sum()) == 5 * k, "written outside the view"
    for bad in (window[:4, :k], window[:, : k + 1], window[:, :k].int()):
        with pytest.raises(ValueError, match=f"out must be \\[5, {k}\\] int64"):
            vocab_topk(*args, None, True, out=bad)


@pytest.mark.parametrize("k", [1, 4])
def test_logits_are_written_to_given_memory(k):
    hidden, weight = integers(5, 8, 300)
    args = hidden, weight, trimmed(300, 600), k, None, noise_of(5), False
    want = launch(*args)
    for op_ in (launch, vocab_topk):
        out = torch.full((5, k), -1), torch.full((5, k), math.nan)
        got = op_(*args, out=out)
        assert got[0] is out[0] and got[1] is out[1] and all(map(torch.equal, got[:1], want[:1]))
        torch.testing.assert_close(got[1], want[1], rtol=2e-6, atol=4e-6)
    for bad in (out[1][:4], out[1].double(), torch.zeros(k, 10)[:, ::2].T):
        with pytest.raises(ValueError, match=f"out's logits must be contiguous \\[5, {k}\\] torch.float32"):
            vocab_topk(*args, out=(out[0], bad))
    for bad in ([out[0]], (*out, out[1]), (out[0], None)):
        with pytest.raises(TypeError, match="out must be Tensor"):
            vocab_topk(*args, out=bad)


ROWS = [(1, 1, 1, 1), (6, 33, 65, 3), (65, 17, 70, 1), (130, 5, 300, 2)]


@pytest.mark.parametrize(("dtype", "size"), cases.one_in(2, HALF, ROWS))
def test_one_launch_draws_the_tokens_of_verify_rows(poisoned, launched, dtype, size):
    """sample_rows draws the same ones from row_linear's logits, greedily and sampled, with parameters in memory."""
    T, E, K, sequences = size
    hidden, weight = integers(T, E, K, dtype)
    seed, positions, _ = noise_of(T)
    numbers = [(seed, 0.8), (3, 0.0), (4, 1.7)][:sequences]
    draw = torch.stack([pack_draw(*each) for each in numbers])
    z = linear.launch(hidden, weight, None, "float32")
    for temperature, noise in (
        (1.0, Noise(0, positions, 1.0, draw)),
        (0.7, Noise(5, positions, 0.7)),
        (0.0, Noise(5, positions, 0.0)),
    ):
        want = sample.launch(z, temperature, 0, 1.0, noise.seed, positions, noise.draw)
        del launched[:]
        ids, logits, _ = launch(hidden, weight, None, 1, None, noise, False)
        assert [name for name, _ in launched] == ["_vocab_topk_kernel"] and torch.equal(ids[:, 0], want)
        ref = vocab_topk_ref(hidden, weight, None, 1, None, noise, False)
        assert torch.equal(ref[0], ids)
        torch.testing.assert_close(logits, ref[1], rtol=2e-6, atol=4e-6)


def test_the_last_program_merges_any_number_of_tiles(poisoned):
    """More tiles than it holds at a time. In each column of the weight another row is the largest."""
    largest = [0, 40_000, 64 * 1030 - 1]
    weight = torch.full((64 * 1030, 3), 2.0)
    weight[largest, range(3)] = 3.0
    hidden = torch.cat([torch.eye(3), -torch.eye(3), torch.zeros(1, 3)])
    ids, logits, _ = launch(hidden, weight, None, 1, None, None, False)
    assert ids.flatten().tolist() == [*largest, 1, 0, 0, 0]
    assert logits.flatten().tolist() == [3.0] * 3 + [-2.0] * 3 + [0.0]


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_a_row_that_is_not_finite_has_a_logit_that_is_not_and_a_valid_id():
    hidden, weight = integers(3, 8, 100, torch.float32)
    hidden[0], hidden[2, 3] = math.nan, math.inf
    for noise in (None, Noise(0, torch.arange(3), 1.0, pack_draw(3, 0.8))):
        ids, logits, _ = launch(hidden, weight, None, 1, None, noise, False)
        assert not logits[[0, 2]].isfinite().any() and logits[1].isfinite()
        assert ids[0] == 0 and 0 <= ids[2] < 100


@pytest.mark.parametrize("best_in", ["one tile", "every tile", "the last tile"])
@pytest.mark.parametrize("k", [2, 10, 16])
def test_candidates_may_lie_anywhere(best_in, k):
    """With one hidden unit, the logits are the weights."""
    weight = torch.randperm(700, generator=torch.Generator().manual_seed(1)).float() - 1000
    at = {
        "one tile": torch.arange(128, 128 + k),
        "every tile": torch.arange(k) * 43,
        "the last tile": 700 - k + torch.arange(k),
    }
    weight[at[best_in]] = torch.arange(k).float()
    ids, logits, _ = launch(torch.ones(1, 1), weight[:, None], None, k, None, None, True)
    assert torch.equal(ids[0], at[best_in].flip(0)) and logits[0].tolist() == list(range(k - 1, -1, -1))


@pytest.mark.parametrize("k", [1, 3, 16])
def test_ties_go_to_the_lower_mapped_id(k):
    hidden, weight = integers(3, 4, 300)
    hidden[0] = 0  # every logit equal
    hidden[1] = -0.0
    weight[::2] = -weight[::2].abs()  # zeros of both signs
    for ids in (torch.arange(300).flip(0), trimmed(300, 5000), trimmed(300, 300) + (1 << 31)):
        got = launch(hidden, weight, ids, k, None, None, True)
        assert_same(got, vocab_topk_ref(hidden, weight, ids, k, None, None, True))
        assert got[0][0].tolist() == got[0][1].tolist() == ids.sort().values[:k].tolist()
        assert not got[1][:2].signbit().any()
        assert all(map(torch.equal, launch(hidden, weight, ids, k, None, None, False)[:2], got))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, of 0 * inf
def test_infinities_are_ranked():
    inf = math.inf
    weight = torch.tensor([-inf, 2.0, -inf, 5.0] + [-inf] * 90 + [1.0])[:, None]
    for k in (1, 5):
        got = launch(torch.ones(1, 1), weight, None, k, None, None, True)
        assert_same(got, vocab_topk_ref(torch.ones(1, 1), weight, None, k, None, None, True))
    ids, logits, lse = launch(torch.ones(1, 1), torch.full((70, 1), -inf), None, 2, None, None, True)
    assert ids.tolist() == [[0, 1]] and logits.tolist() == [[-inf, -inf]] and lse.tolist() == [-inf]
    weight[80] = inf
    ids, logits, lse = launch(torch.ones(1, 1), weight, None, 2, None, None, True)
    assert ids.tolist() == [[80, 3]] and logits.tolist() == [[inf, 5.0]] and lse.tolist() == [inf]
    ids, logits, _ = launch(torch.ones(1, 1), torch.full((70, 1), -inf), None, 1, None, None, False)
    assert ids.tolist() == [[0]] and logits.tolist() == [[-inf]]


@pytest.mark.parametrize("dtype", HALF)
def test_the_norm_equals_the_references(dtype):
    """With weight = 1, the logits are the normed row, rounded to the dtype. Its squares overflow float16."""
    g = torch.Generator().manual_seed(0)
    hidden = (300 * torch.randn(3, 64, generator=g)).to(dtype)
    norm = torch.rand(64, generator=g).to(dtype) + 0.5, EPS
    args = hidden, torch.eye(64, dtype=dtype), None, 10, norm, None, True
    (ids, logits, lse), want = launch(*args), vocab_topk_ref(*args)
    wide = hidden.double()
    normed = (wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * norm[0].double()).float()
    assert torch.equal(logits, logits.to(dtype).float())
    torch.testing.assert_close(
        logits, normed.gather(1, ids), rtol=(0.51 if dtype == torch.float16 else 2) * torch.finfo(dtype).eps, atol=0
    )
    torch.testing.assert_close(lse, want[2], rtol=torch.finfo(dtype).eps, atol=0)


def test_logits_are_not_rounded_to_the_dtype():
    hidden = torch.ones(1, 2, dtype=torch.float16)
    weight = torch.tensor([[1.0, 2.0**-14], [1.0, 2.0**-13]], dtype=torch.float16)  # equal in float16
    ids, logits, _ = launch(hidden, weight, None, 2, None, None, True)
    assert ids.tolist() == [[1, 0]] and logits.tolist() == [[1 + 2.0**-13, 1 + 2.0**-14]]


@pytest.mark.parametrize(("dtype", "noisy"), [(torch.float32, False), (torch.float16, True)])
def test_a_row_is_the_same_alone_and_among_others(dtype, noisy):
    g = torch.Generator().manual_seed(0)
    n = 17 if dtype == torch.float32 else 65  # one row more than a tile has
    hidden, weight = (torch.randn(rows, 40, generator=g).to(dtype) for rows in (n, 70))
    ids, norm = trimmed(70, 400), (torch.ones(40, dtype=dtype), EPS)
    seed, positions, temperature = noise_of(n)
    whole = launch(hidden, weight, ids, 3, norm, (seed, positions, temperature) if noisy else None, True)
    for T, first in ((1, 0), (1, n - 1), (2, n // 2), (7, 0), (7, n - 7), (n - 1, 1), (n, 0)):
        rows = slice(first, first + T)
        noise = (seed, positions[rows], temperature) if noisy else None
        got = launch(hidden[rows], weight, ids, 3, norm, noise, True)
        assert all(torch.equal(a, b[rows]) for a, b in zip(got, whole, strict=True)), (T, first)


@pytest.mark.parametrize("T", [320])
def test_a_row_of_a_large_round_is_the_same_alone(T):
    """With a norm and noise, whose positions are a column of a wider tensor."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 40, generator=g).half() for n in (T, 70))
    norm = torch.ones(40).half(), EPS
    positions = torch.arange(3 * T).view(T, 3)[:, 1]
    whole = launch(hidden, weight, None, 3, norm, (5, positions, 0.8), True)
    for row in (0, 64, 257, T - 1):
        rows = slice(row, row + 1)
        alone = launch(hidden[rows], weight, None, 3, norm, (5, positions[rows], 0.8), True)
        assert all(torch.equal(a, b[rows]) for a, b in zip(alone, whole, strict=True)), row


@pytest.mark.parametrize("k", [1, 4])
def test_without_lse_and_without_temperature_the_rest_is_the_same(k):
    hidden, weight = integers(3, 8, 100)
    hidden, weight = hidden.abs() + 1, -weight.abs() - 1  # below the value used for rows beyond K
    token_ids = trimmed(100, 500) + 1
    want = vocab_topk_ref(hidden, weight, token_ids, k, None, None, True)
    assert_same(launch(hidden, weight, token_ids, k, None, None, True), want)
    for noise in (None, noise_of(3, 0.0)):
        ids, logits, lse = launch(hidden, weight, token_ids, k, None, noise, False)
        assert torch.equal(ids, want[0]) and torch.equal(logits, want[1]) and lse.shape == (0,)


def test_no_rows():
    hidden, weight = integers(0, 8, 100)
    ids, logits, lse = launch(hidden, weight, None, 4, (torch.ones(8), EPS), noise_of(0), True)
    assert ids.shape == logits.shape == (0, 4) and lse.shape == (0,)


def test_reads_only_its_tensors_and_takes_views(monkeypatch):
    hidden, weight = integers(5, 33, 70)
    ids, norm, noise = trimmed(70, 200), (torch.ones(33, dtype=torch.float16), EPS), noise_of(5)
    with reads(monkeypatch, hidden, weight, ids, norm[0], noise[1]):
        want = launch(hidden, weight, ids, 10, norm, noise, True)
    pairs = [torch.stack((x, x), dim=1)[:, 0] for x in (ids, noise[1])]
    wide = torch.cat((hidden, hidden * math.nan), dim=1)[:, :33]
    assert not any(x.is_contiguous() for x in (*pairs, wide))
    got = launch(wide, weight.T.contiguous().T, pairs[0], 10, norm, (noise[0], pairs[1], noise[2]), True)
    assert all(map(torch.equal, got, want))


@triton.jit
def _key_kernel(
    z_ptr,  # [n] float32
    ids_ptr,  # [n] int64
    key_ptr,  # [n] int64
    value_ptr,  # [n] float32
    id_ptr,  # [n] int64
    n: tl.constexpr,
):
    o = tl.arange(0, n)
    b_key = op.rank_key(tl.load(z_ptr + o), tl.load(ids_ptr + o))
    tl.store(key_ptr + o, b_key)
    tl.store(value_ptr + o, op.value_of(b_key))
    tl.store(id_ptr + o, op.id_of(b_key))


def test_a_key_orders_by_value_then_by_the_lower_id():
    values = [-math.inf, -3e38, -1.0, -1e-45, 0.0, 1e-45, 1.0, 3e38, math.inf]
    ids = [(1 << 32) - 1, 1 << 31, 7, 0]
    z, i = (torch.tensor(x) for x in zip(*[(v, n) for v in values for n in ids], strict=True))
    pad = 64 - len(z)
    z, i = torch.cat((z.float(), torch.zeros(pad))), torch.cat((i, torch.zeros(pad, dtype=torch.int64)))
    key, back, who = torch.empty(64, dtype=torch.int64), torch.empty(64), torch.empty(64, dtype=torch.int64)
    _key_kernel[(1,)](z, i, key, back, who, n=64)
    count = len(values) * len(ids)
    assert (key[1:count] > key[: count - 1]).all() and torch.equal(back, z) and torch.equal(who, i)
    _key_kernel[(1,)](-torch.zeros(64), i, key, back, who, n=64)
    assert not back.signbit().any()


def schema(hidden, weight, ids, k, norm, noise, with_lse):
    """The arguments of torch.ops.specker.vocab_topk."""
    seed, positions, temperature = noise or (0, None, 0.0)
    seed -= (1 << 64) * (seed >> 63)
    return hidden, weight, ids, k, *(norm or (None, 0.0)), seed, positions, temperature, None, with_lse


@pytest.mark.parametrize("k", [1, 4])
def test_draw_parameters_in_memory(k):
    """Seed and temperature come from memory; the arguments are ignored."""
    hidden, weight = integers(3, 8, 30, torch.float32)
    seed, positions, temperature = noise_of(3)
    want = vocab_topk(hidden, weight, None, k, None, (seed, positions, temperature))
    held = Noise(1, positions, 9.0, pack_draw(seed, temperature))
    assert_same(vocab_topk(hidden, weight, None, k, None, held), want)
    assert_same(launch(hidden, weight, None, k, None, held, True), want)
    torch.library.opcheck(
        torch.ops.specker.vocab_topk,
        (hidden, weight, None, k, None, 0.0, 1, positions, 9.0, pack_draw(seed, temperature), True),
    )
    with pytest.raises(ValueError, match="draw must be"):
        vocab_topk(hidden, weight, None, k, None, Noise(1, positions, 9.0, torch.zeros(3)))
    for op in (vocab_topk, lambda *args: launch(*args, True)):
        with pytest.raises(ValueError, match="3 rows cannot be shared evenly by the 2 sets"):
            op(hidden, weight, None, k, None, Noise(1, positions, 9.0, pack_draw(1, 0.5).repeat(2, 1)))


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("op", [vocab_topk, launch])
def test_sequences_with_their_own_parameters_share_a_launch(poisoned, op, rows, k):
    """Each sequence, greedy or sampled, has the bits of a call with its parameters alone; 21 rows make two tiles."""
    numbers = [(7, 0.9), (1, 0.0), ((1 << 64) - 5, 1.7)]
    hidden, weight = integers(3 * rows, 16, 150, torch.float32)
    positions = torch.arange(3 * rows) * 5 + (1 << 32) - 8
    draw = torch.stack([pack_draw(*mine) for mine in numbers])
    for ids in (None, trimmed(150, 400))[: 1 if rows > 1 else 2]:
        got = op(hidden, weight, ids, k, None, Noise(0, positions, 9.0, draw), True)
        for b, (seed, temperature) in enumerate(numbers):
            its = slice(b * rows, (b + 1) * rows)
            alone = op(hidden[its], weight, ids, k, None, (seed, positions[its], temperature), True)
            assert all(torch.equal(x[its], y) for x, y in zip(got, alone, strict=True)), b
            if temperature == 0:
                without = op(hidden[its], weight, ids, k, None, None, True)
                assert all(map(torch.equal, alone, without))


@pytest.mark.parametrize("noisy", [False, True])
def test_registration(noisy):
    hidden, weight = integers(3, 8, 30, torch.float32)
    norm, noise = (torch.ones(8), EPS) if noisy else None, noise_of(3) if noisy else None
    for with_lse in (True, False):
        args = hidden, weight, trimmed(30, 60), 4, norm, noise, with_lse
        torch.library.opcheck(torch.ops.specker.vocab_topk, schema(*args))
        got, want = torch.ops.specker.vocab_topk(*schema(*args)), vocab_topk(*args)
        assert all(map(torch.equal, got, want))


def test_fullgraph():
    hidden, weight = integers(3, 8, 30, torch.float32)
    norm, (seed, positions, temperature) = (torch.ones(8), EPS), noise_of(3)

    def call(hidden, positions):
        return vocab_topk(hidden, weight, None, 4, norm, (seed, positions, temperature))

    got = torch.compile(call, fullgraph=True, backend="aot_eager")(hidden, positions)
    assert all(map(torch.equal, got, call(hidden, positions)))


def launches():
    """Runs in a compiling process: one head, many lengths, seeds of any size, positions at any offset."""
    weight, ids, positions = torch.zeros(300, 64).bfloat16(), torch.arange(301), torch.arange(300)
    for T, seed in ((1, 0), (2, 1), (16, 16), (17, 1 << 33), (64, 1 << 63), (65, (1 << 64) - 1)):
        noise = seed, positions[T : 2 * T], 1.0 if T == 1 else 0.7
        launch(torch.zeros(T, 64).bfloat16(), weight, ids[T % 2 :][:300], 10, None, noise, True)


def test_nothing_but_the_head_recompiles():
    """But up to 16 rows have a kernel of their own."""
    assert compilations(__file__) == {"_vocab_topk_kernel": 2, "_vocab_topk_merge_kernel": 1}


def test_the_launcher_reads_no_tensor(unlaunched):
    """Fake tensors have no values to read."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        hidden, weight = (torch.empty(n, 4096, dtype=torch.bfloat16) for n in (65, 32768))
        noise = 0, torch.empty(65, dtype=torch.int64), 0.7
        ids, logits, lse = launch(hidden, weight, None, 10, (hidden[0], EPS), noise, True)
    assert ids.shape == logits.shape == (65, 10) and lse.shape == (65,)
    assert unlaunched[1:] == [("_vocab_topk_kernel", (2, 256)), ("_vocab_topk_merge_kernel", (65,))]


def test_refuses():
    hidden, weight = integers(2, 8, 30, torch.float32)
    meta = torch.zeros(30, dtype=torch.int64, device="meta")
    for arguments, message in [
        ((meta, 1, None, None), "token_ids must be on cpu, got meta"),
        ((None, 1, (torch.ones(8, device="meta"), EPS), None), "norm_weight must be on cpu, got meta"),
        ((None, 1, None, (0, meta[:2], 1.0)), "positions must be on cpu, got meta"),
    ]:
        with pytest.raises(ValueError, match=message):
            vocab_topk(hidden, weight, *arguments)
    with pytest.raises(RuntimeError, match="k must be in"):
        torch.compile(lambda x: vocab_topk(x, weight, None, 65), fullgraph=True, backend="aot_eager")(hidden)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1, 10, 64])
@pytest.mark.parametrize(("K", "E"), [(32768, 4096), (1000, 1023), (8192, 896)])
def test_bfloat16_ids_equal_the_references(K, E, k):
    for T in (1, 8, 65):
        hidden, weight = integers(T, E, K, torch.bfloat16, high=1, device="cuda")
        ids, noise = trimmed(K, 4 * K).cuda(), noise_of(T)
        noise = noise[0], noise[1].cuda(), noise[2]
        args = hidden, weight, ids, k, None
        exact = vocab_topk_ref(hidden.double(), weight.double(), ids, k, None, None, True)
        got = launch(*args, None, True)
        assert torch.equal(got[0], exact[0]) and torch.equal(got[1].double(), exact[1])
        torch.testing.assert_close(got[2].double(), exact[2], rtol=1e-5, atol=1e-5)
        exact = vocab_topk_ref(hidden.double(), weight.double(), ids, k, None, noise, True)
        ids_got, logits, _ = launch(*args, noise, True)
        torch.testing.assert_close(logits.double(), exact[1], rtol=1e-5, atol=2e-5)
        assert ((ids_got == exact[0]) | ((logits - exact[1]).abs() <= 2e-5)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [None, "int8", "fp8", "int4", "mxfp4"])
@pytest.mark.parametrize(("K", "E"), [(128256, 4096), (32000, 2048), (49152, 576)])
def test_bfloat16_tokens_are_those_of_row_linears_logits(K, E, kind):
    g = torch.Generator("cuda").manual_seed(0)
    hidden, weight = (torch.randn(n, E, generator=g, device="cuda").bfloat16() for n in (72, K))
    weight = weight if kind is None else quantised(weight, kind).for_bfloat16()
    draw = torch.stack([pack_draw(n, t) for n, t in enumerate((0.7, 0.0, 1.0, 1.9))]).cuda()
    positions = torch.arange(72, device="cuda") + 5
    assert op.draws_alike(hidden, weight)
    for rows in (slice(4), slice(8, 28), slice(72)):
        z = linear.row_linear(hidden[rows], weight, epilogue="float32")
        ids, logits, _ = vocab_topk(hidden[rows], weight, None, 1, None, Noise(0, positions[rows], 1.0, draw), False)
        assert torch.equal(ids[:, 0], sample.sample_rows(z, 1.0, 0, 1.0, 0, positions[rows], draw))
        ids, logits, _ = vocab_topk(hidden[rows], weight, None, 1, with_lse=False)
        assert torch.equal(logits[:, 0], z.amax(1)) and torch.equal(ids[:, 0], z.argmax(1))


@pytest.mark.gpu
@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize(("K", "E"), [(32768, 4096), (1000, 1023)])
def test_bfloat16_rows_are_invariant(K, E, noisy):
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, E, generator=g).bfloat16().cuda() for n in (65, K))
    norm, (seed, positions, temperature) = (torch.ones(E).bfloat16().cuda(), EPS), noise_of(65)
    positions = positions.cuda()
    whole = vocab_topk(hidden, weight, None, 10, norm, (seed, positions, temperature) if noisy else None)
    for T in (1, 2, 7, 64, 65):
        for first in {0, 65 - T}:
            rows = slice(first, first + T)
            noise = (seed, positions[rows], temperature) if noisy else None
            got = vocab_topk(hidden[rows], weight, None, 10, norm, noise)
            assert all(torch.equal(a, b[rows]) for a, b in zip(got, whole, strict=True)), (T, first)
