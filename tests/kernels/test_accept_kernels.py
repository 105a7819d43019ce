"""The kernels of sample_rows and accept_walk, and noise's device functions, in the interpreter against the references
and plain Python."""

import importlib
import math
import random

import cases
import pytest
import torch
from compile_only import compilations
from formulas import chi_square_bound, law

from specker.kernels import noise
from specker.kernels.accept_walk import accept_walk, accept_walk_ref
from specker.kernels.accept_walk import launch as launch_walk
from specker.kernels.noise import gumbel_of, gumbel_ref, gumbel_run
from specker.kernels.sample_rows import launch as launch_sample
from specker.kernels.sample_rows import sample_rows, sample_rows_ref
from specker.kernels.variant import tl, triton

module = importlib.import_module("specker.kernels.sample_rows")
walking = importlib.import_module("specker.kernels.accept_walk")
I64 = torch.int64
SEEDS = [0, 1, (1 << 32) + 7, (1 << 63) + 5, (1 << 64) - 1]
POSITIONS = [0, 5, (1 << 32) - 1, 1 << 32, (7 << 40) + 3, -1]
# temperature, top_k, top_p: greedy, no filter, each filter, both
SETTINGS = [(0, 0, 1.0), (0.8, 0, 1.0), (1.0, 7, 1.0), (1.3, 0, 0.9), (0.7, 20, 0.8)]


def signed(seed):
    return torch.tensor([seed - (1 << 64) if seed >> 63 else seed])


@triton.jit
def _run_kernel(
    out_ptr,  # [N]
    position_ptr,  # [1]
    seed_ptr,  # [1]
    first,
    N: tl.constexpr,
):
    g = gumbel_run(first, tl.load(position_ptr), tl.load(seed_ptr), N)
    tl.store(out_ptr + tl.arange(0, N), g)


@triton.jit
def _of_kernel(
    out_ptr,  # [R, N]
    ids_ptr,  # [N]
    position_ptr,  # [R]
    seed_ptr,  # [1]
    R: tl.constexpr,
    N: tl.constexpr,
):
    o_n, o_r = tl.arange(0, N), tl.arange(0, R)[:, None]
    g = gumbel_of(tl.load(ids_ptr + o_n)[None, :], tl.load(position_ptr + o_r), tl.load(seed_ptr))
    tl.store(out_ptr + o_r * N + o_n[None, :], g)


@triton.jit
def _words_kernel(
    out_ptr,  # [4, N]
    block_ptr,  # [N]
    position_ptr,  # [1]
    seed_ptr,  # [1]
    N: tl.constexpr,
):
    o = tl.arange(0, N)
    x0, x1, x2, x3 = noise._philox(tl.load(block_ptr + o), tl.load(position_ptr), tl.load(seed_ptr))
    tl.store(out_ptr + o, x0.to(tl.int64))
    tl.store(out_ptr + N + o, x1.to(tl.int64))
    tl.store(out_ptr + 2 * N + o, x2.to(tl.int64))
    tl.store(out_ptr + 3 * N + o, x3.to(tl.int64))


@triton.jit
def _float_kernel(
    g_ptr,  # [N]
    log_ptr,  # [N]
    x_ptr,  # [N] int64
    N: tl.constexpr,
):
    o = tl.arange(0, N)
    b_x = tl.load(x_ptr + o).to(tl.uint32)
    tl.store(g_ptr + o, noise._gumbel_from(b_x))
    u = tl.minimum((b_x.to(tl.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    tl.store(log_ptr + o, noise._log1m(u))


@triton.jit
def _bins_kernel(
    out_ptr,  # [N]
    below_ptr,  # [N]
    N: tl.constexpr,
):
    o = tl.arange(0, N)
    tl.store(out_ptr + o, module._bin(tl.load(below_ptr + o)))


@pytest.mark.parametrize(("setting", "V"), cases.one_in(2, SETTINGS, [50, 5000]))
def test_draw_parameters_in_memory(setting, V):
    """The four parameters come from memory. The arguments only say whether noise and filters are used at all; a neutral
    value in memory keeps every token."""
    temperature, top_k, top_p = setting
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(V)) * 3
    positions, seed = torch.tensor([4, 1 << 33, 9]), SEEDS[3]
    want = sample_rows(logits, *setting, seed, positions)
    draw = noise.pack_draw(seed, temperature, top_k or 1 << 31, top_p)
    assert noise.unpack_draw(draw) == (seed, temperature, top_k or 1 << 31, top_p)
    kinds = [(9.0, 3, 0.5)] if temperature else []
    if (top_k, top_p) == (0, 1.0):
        kinds.append((9.0 if temperature else 0, 0, 1.0))
    for kind in kinds:
        held = noise.pack_draw(seed, temperature, min(top_k or 1 << 30, 1 << 30), top_p)
        assert torch.equal(sample_rows(logits, *kind, 1, positions, held), want), kind
        assert torch.equal(launch_sample(logits, *kind, 1, positions, held), want), kind
        if not top_k:  # every value that keeps all tokens
            for all_of_them in (0, V, 1 << 31, (1 << 32) + 1, 1 << 40)[:: 1 if V == 50 else 4]:
                held = noise.pack_draw(seed, temperature, all_of_them, top_p)
                assert torch.equal(launch_sample(logits, *kind, 1, positions, held), want), all_of_them
    torch.library.opcheck(torch.ops.specker.sample_rows, (logits, *setting, 1, positions, draw))
    for bad in (draw[:3], draw[None, None], draw.float(), draw[None][:0]):
        with pytest.raises(ValueError, match="draw must be"):
            sample_rows(logits, *setting, seed, positions, bad)
    with pytest.raises(ValueError, match="3 rows cannot be shared evenly by the 2 sets"):
        sample_rows(logits, *setting, seed, positions, draw.repeat(2, 1))


# Parameters of requests in memory; large or neutral values keep all tokens.
HELD = [(0.0, 3, 0.2), (0.8, 2**31 - 1, 1.0), (1.0, 7, 1.0), (1.3, 2**31 - 1, 0.9), (0.7, 20, 0.8), (0.9, 0, 1.0)]


@pytest.mark.parametrize(
    ("go", "kind", "run"),
    [
        *((lambda *args: launch_sample(*args), kind, run) for kind, run in (((9.0, 3, 0.5), 2), ((9.0, 0, 1.0), 3))),
        *((sample_rows, kind, 1) for kind in ((9.0, 3, 1.0), (9.0, 0, 0.5))),
    ],
)
def test_sequences_with_their_own_parameters_share_a_launch(tiles, go, kind, run):
    """Greedy, sampled and filtered sequences each draw the same as alone with only their own settings. Logits tie, to
    test greedy; one row has infinities and one is steep."""
    tiles()
    B = len(HELD)
    logits = torch.cat([rows(B * run, 333, seed=1), rows(B * run, 333, scale=40.0, seed=2)], 1)
    logits[0] = torch.randint(-3, 4, (666,), generator=torch.Generator().manual_seed(0)).float()
    logits[-1, ::2] = -math.inf
    draw = torch.stack([noise.pack_draw(SEEDS[b % 5], *mine) for b, mine in enumerate(HELD)])
    got = go(logits, *kind, 5, at(B * run), draw)
    for b, (temperature, top_k, top_p) in enumerate(HELD):
        its, filters = slice(b * run, (b + 1) * run), (top_k if kind[1] else 0, top_p if kind[2] < 1 else 1.0)
        if temperature == 0 or filters[0] > 666:
            filters = (0, filters[1])
        alone = go(logits[its], temperature, *filters, SEEDS[b % 5], at(B * run)[its])
        assert torch.equal(got[its], alone), (b, got[its], alone)
    wide = torch.full((B, 6), -1)
    wide[:, 1:5] = draw
    if run == 3:
        assert torch.equal(go(logits, *kind, 5, at(B * run), wide[:, 1:5]), got)  # a view
        torch.library.opcheck(torch.ops.specker.sample_rows, (logits, *kind, 5, at(B * run), draw))


@pytest.mark.parametrize("go", [sample_rows, lambda *args: launch_sample(*args)])
def test_neutral_filters_keep_every_token(go):
    """A long flat row with a long tail, whose sum of masses is not exact in float64."""
    logits = rows(2, 9000, scale=0.01, seed=4)
    logits[:, ::3] -= 24.0
    held = noise.pack_draw(3, 1.0, 2**31 - 1, 1.0)
    want = go(logits, 1.0, 0, 1.0, 3, at(2))
    for kind in ((1.0, 5, 0.5), (1.0, 0, 0.5), (1.0, 5, 1.0)):
        assert torch.equal(go(logits, *kind, 0, at(2), held), want)


def test_bins_are_monotonic():
    """Otherwise the k-th largest could lie outside its bin. Steep rows hardly show this, since their largest wins."""
    known = {
        0.0: 0,
        0.015: 0,
        1 / 64: 1,
        15.99: 1023,
        16.0: 1024,
        31.99: 1087,
        32.0: 1088,
        2.0**20: 2047,
        math.inf: 2047,
    }
    below = torch.cat([torch.linspace(0, 40, 2000), torch.logspace(-30, 36, 2096 - len(known)), torch.tensor([*known])])
    bins = torch.empty(4096, dtype=torch.int32)
    _bins_kernel[(1,)](bins, below, 4096)
    assert bins[-len(known) :].tolist() == [*known.values()]
    assert (bins[below.argsort()].diff() >= 0).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_philox_words(seed):
    blocks = torch.randint(0, 1 << 30, (64,), generator=torch.Generator().manual_seed(0))
    for position in POSITIONS:
        words = torch.empty(4, 64, dtype=I64)
        _words_kernel[(1,)](words, blocks, torch.tensor([position]), signed(seed), 64)
        want = noise.philox4x32(*noise._counter(blocks, torch.tensor([position])), seed)
        assert torch.equal(words, torch.cat(want))


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_is_the_reference(seed):
    positions = torch.tensor(POSITIONS[:4])
    want = gumbel_ref(seed, positions, 151936 + 512)[:, 151936:]
    ids = 151936 + torch.randperm(512, generator=torch.Generator().manual_seed(1))
    for chosen in (ids, ids.int()):
        got = torch.empty(4, 512)
        _of_kernel[(1,)](got, chosen, positions, signed(seed), 4, 512)
        torch.testing.assert_close(got, want[:, ids - 151936], rtol=5e-7, atol=5e-7)
    for i in range(4):
        run = torch.empty(512)
        _run_kernel[(1,)](run, positions[i : i + 1], signed(seed), 151936, 512)
        assert torch.equal(run[ids - 151936], got[i])  # one Philox for four ids or one each


def test_logarithms():
    top = 1 << 32
    generator = torch.Generator().manual_seed(0)
    knee = int((1 - 0.5**0.5) * top)  # the exponent of 1 - u changes here
    x = [torch.arange(1 << 14), top - 1 - torch.arange(1 << 14), knee + torch.arange(-(1 << 14), 1 << 14)]
    x += [torch.randint(0, top, (1 << 15,), generator=generator)]
    x += [(2 ** (32 * torch.rand(1 << 15, generator=generator, dtype=torch.float64))).long().clamp(max=top - 1)]
    bits = torch.cat(x)
    g, log = torch.empty(len(bits)), torch.empty(len(bits))
    _float_kernel[(1,)](g, log, bits, len(bits))
    u = ((bits.float() + 0.5) * 2.0**-32).clamp(max=noise.U_MAX).double()
    assert u.min() == 2.0**-33 and u.max() == noise.U_MAX
    exact = torch.log1p(-u)
    assert ((log - exact) / exact).abs().max() < 2e-7
    exact = -torch.log(-exact)
    assert ((g - exact).abs() / exact.abs().clamp(min=1)).max() < 2.5e-7


@pytest.fixture
def tiles(monkeypatch):
    """Small tiles, so that a few hundred logits make several splits and a dozen listed ids several blocks."""

    def shrink(tile=128, finish=128, walk=8):
        for name, size in (("TILE", tile), ("FINISH", finish), ("WALK", walk)):
            monkeypatch.setattr(walking if name == "WALK" else module, name, size)
        module._sample_variants.cache_clear()
        walking._walk_variant.cache_clear()

    yield shrink
    module._sample_variants.cache_clear()
    walking._walk_variant.cache_clear()


def rows(T, V, dtype=torch.float32, scale=2.0, seed=0):
    return (scale * torch.randn(T, V, generator=torch.Generator().manual_seed(seed))).to(dtype)


def at(T):
    return torch.arange(T) * 3 + (1 << 33)


def same(logits, temperature, top_k, top_p, seed=9, positions=None):
    positions = at(len(logits)) if positions is None else positions
    got = launch_sample(logits, temperature, top_k, top_p, seed, positions)
    assert got.dtype == I64
    assert torch.equal(got, sample_rows_ref(logits, temperature, top_k, top_p, seed, positions))
    return got


@pytest.mark.parametrize(
    ("setting", "V", "dtype"), cases.one_in(2, SETTINGS, [1, 128, 333], [torch.float32, torch.float16])
)
def test_sample_rows(tiles, setting, V, dtype):
    tiles()
    tokens = same(rows(3, V, dtype, seed=1), *setting)
    assert V < 300 or (tokens >= 128).any()  # not all in the first split


@pytest.mark.parametrize("setting", SETTINGS)
def test_sample_rows_with_full_size_tiles(setting):
    same(rows(1, 5001), *setting)


@pytest.mark.parametrize("setting", SETTINGS)
def test_no_rows(setting):
    same(rows(0, 300), *setting)


@pytest.mark.parametrize(
    "scale, top_k, top_p",
    [
        (1e-3, 150, 0.6),
        (0.5, 0, 0.999),
        (0.5, 0, 1e-9),
        (2.0, 1, 1.0),
        (2.0, 299, 1.0),
        (30.0, 5, 0.99),
        (1e4, 40, 1.0),
    ],
)
def test_flat_and_steep_rows(tiles, scale, top_k, top_p):
    """All of a flat row is in one bin and is listed in blocks; steep rows reach the octave bins and the last bin."""
    tiles(finish=64)
    same(rows(2, 300, scale=scale), 0.9, top_k, top_p)


@pytest.mark.parametrize("seed", [3, (1 << 64) - 1])
def test_seeds_and_positions(tiles, seed):
    tiles()
    for setting in (SETTINGS[1], SETTINGS[4]):
        same(rows(6, 200), *setting, seed=seed, positions=torch.tensor(POSITIONS))


LN = [math.log(x) for x in (0.4, 0.3, 0.2, 0.1)]


@pytest.mark.parametrize(
    "logits, top_k, top_p, kept",
    [
        ([0.0, 3.0, 1.0, 2.0], 2, 1.0, {1, 3}),
        ([1.0, 1.0, 2.0, 1.0], 2, 1.0, {0, 1, 2, 3}),  # ties at the k-th are kept
        ([1.0, 1.0, 2.0, 0.0], 2, 1.0, {0, 1, 2}),
        ([0.0, -0.0, 1.0, -1.0], 2, 1.0, {0, 1, 2}),  # the zeros are equal
        ([-0.0, 0.0, 1.0, -1.0], 2, 1.0, {0, 1, 2}),
        (LN, 0, 0.39, {0}),
        (LN, 0, 0.41, {0, 1}),
        (LN, 0, 0.91, {0, 1, 2, 3}),
        ([0.0] * 4, 0, 0.3, {0, 1, 2, 3}),  # all tie with the token that reaches the mass
        ([0.0, -0.0, 0.0, -9.0], 0, 0.3, {0, 1, 2}),
        ([math.log(x) for x in (0.5, 0.2, 0.2, 0.1)], 0, 0.6, {0, 1, 2}),
        (LN, 2, 0.55, {0}),  # top-k first, then renormalised: 0.4 / 0.7 = 0.571
        (LN, 3, 0.45, {0, 1}),
        (LN, 3, 0.44, {0}),
        ([1.0, 1.0, 1.0, 0.0], 2, 0.9, {0, 1, 2}),  # a tie kept by top-k counts in the mass
        ([2.0, 1.0, 1.0, 0.0], 2, 0.7, {0, 1, 2}),
        ([i * 1e-3 for i in range(8)], 3, 1.0, {5, 6, 7}),  # all in one bin: its keys decide
        ([i * 1e-3 for i in range(8)], 0, 0.4, {4, 5, 6, 7}),
        ([i * 1e-3 for i in range(8)], 5, 0.5, {5, 6, 7}),
        ([1.0, 0.5, 0.5, -math.inf], 0, 0.999, {0, 1, 2}),
        ([1.0, 0.5, -math.inf, -math.inf], 3, 1.0, {0, 1}),
    ],
)
def test_supports(logits, top_k, top_p, kept):
    """At positions where each id in turn would win without a filter, a kept id wins and any other does not."""
    row = torch.tensor(logits)
    winners = (row + gumbel_ref(4, torch.arange(5000), len(logits))).argmax(-1).tolist()
    finite = [v for v in range(len(logits)) if logits[v] > -math.inf]
    positions = torch.tensor([winners.index(v) for v in finite])
    rows = row.expand(len(finite), -1)
    tokens = launch_sample(rows, 1.0, top_k, top_p, 4, positions)
    assert [v if v in kept else None for v in finite] == [
        v if v == w else None for v, w in zip(finite, tokens.tolist(), strict=True)
    ]
    assert set(tokens.tolist()) <= kept
    assert torch.equal(tokens, sample_rows_ref(rows, 1.0, top_k, top_p, 4, positions))


@pytest.mark.parametrize("setting", SETTINGS)
def test_ties_and_infinities(tiles, setting):
    """Integer logits tie in whole levels at both edges. SETTINGS' top-p is not within rounding of a level's mass."""
    tiles()
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-3, 4, (5, 300), generator=generator).float()
    logits[1:3, ::2] = -math.inf
    logits[3] = -math.inf
    logits[4, :299] = -math.inf
    same(logits, *setting)
    same(logits.clamp(min=-9.0) * torch.tensor([1.0, -1.0]).repeat(150), *setting)


def test_greedy_takes_the_lower_id_among_equals(tiles):
    tiles()
    logits = torch.zeros(3, 400)
    logits[0, 130:] = -0.0
    logits[1, [139, 300]] = 1.0
    logits[2, 399] = 1e-30
    assert launch_sample(logits, 0, 5, 0.5, 0, at(3)).tolist() == [0, 139, 399]


@pytest.mark.parametrize("setting", SETTINGS)
def test_views_at_an_offset_surrounded_by_nan(tiles, setting):
    tiles()
    logits, positions = rows(3, 201), at(3)
    want = launch_sample(logits, *setting, 9, positions)
    around = torch.full((5 + 3 * 201 + 4,), math.nan)
    around[5:608] = logits.flatten()
    ids = torch.arange(99)
    ids[7:10] = positions
    assert torch.equal(launch_sample(around[5:608].view(3, 201), *setting, 9, ids[7:10]), want)
    apart = torch.full((3, 230), math.nan)
    apart[:, 20:221] = logits
    assert torch.equal(launch_sample(apart[:, 20:221], *setting, 9, positions.repeat_interleave(2)[::2]), want)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_row_is_the_same_alone_and_among_others(tiles, setting):
    tiles()
    logits = torch.cat([rows(4, 260), rows(3, 260, scale=40.0)])
    tokens = launch_sample(logits, *setting, 9, at(7))
    for t in range(7):
        assert torch.equal(launch_sample(logits[t : t + 1], *setting, 9, at(7)[t : t + 1]), tokens[t : t + 1])


@pytest.mark.parametrize(("setting", "counts"), [(SETTINGS[1], (1, 2, 7, 64)), (SETTINGS[4], (1, 2, 7))])
def test_rows_are_invariant(tiles, setting, counts):
    """1, 2, 7, 64 or 65 rows in a launch give the same draws. (The interpreter needs 80 ms for a filtered row.)"""
    tiles()
    logits, positions = torch.cat([rows(60, 70), rows(5, 70, scale=40.0)]), at(65)
    whole = launch_sample(logits, *setting, 9, positions)
    assert len(whole.unique()) > 20 and torch.equal(whole, sample_rows_ref(logits, *setting, 9, positions))
    for T in counts:
        part = slice(65 - T, 65)
        assert torch.equal(launch_sample(logits[part], *setting, 9, positions[part]), whole[part]), T


@pytest.mark.parametrize(
    "setting, n, device",
    [
        ((1.0, 0, 1.0), 500, "cpu"),
        *[pytest.param(s, 20000, "cuda", marks=pytest.mark.gpu) for s in ((1.0, 0, 1.0), (0.7, 6, 0.95))],
    ],
)
def test_draws_from_the_law(setting, n, device):
    logits = [1.3, -0.4, 0.9, 2.0, 0.9, -1.0, 0.0, 1.1, 0.2, -0.8, 2.4]
    rows = torch.tensor(logits, device=device).expand(n, -1)
    tokens = launch_sample(rows, *setting, 17, torch.arange(n, device=device)).cpu()
    expected = n * law(logits, *setting)
    count = torch.bincount(tokens, minlength=len(logits)).double()
    assert count[expected == 0].sum() == 0
    count, expected = count[expected > 0], expected[expected > 0]
    assert expected.min() > 5
    assert ((count - expected) ** 2 / expected).sum() < chi_square_bound(len(count) - 1)


def forest(sizes, seed, shape="random", vocab=4):
    """Trees of these sizes with equal siblings, and a target that often agrees with some child."""
    rng = random.Random(seed)
    tokens, parents, target = [], [], []
    for n in sizes:
        up = {
            "random": [rng.randint(0, j) for j in range(n)],
            "chain": list(range(n)),
            "star": [0] * n,
            "bushy": [j // 3 for j in range(n)],
        }[shape]
        token = [rng.randrange(vocab) for _ in range(n)]
        wanted = [rng.randrange(vocab) for _ in range(n + 1)]
        for j in range(n):
            if rng.random() < 0.8:
                wanted[up[j]] = token[j]
        tokens, parents, target = tokens + token, parents + up, target + wanted
    starts = [sum(sizes[:b]) for b in range(len(sizes) + 1)]
    return (*(torch.tensor(x, dtype=I64) for x in (tokens, parents, target)), torch.tensor(starts))


def plain_walk(tokens, parents, target, starts):
    """By recursion over the rows' children."""
    paths, nexts = [], []
    for b in range(len(starts) - 1):
        lo, hi = int(starts[b]), int(starts[b + 1])
        row, path = 0, [0]
        while True:
            children = [j for j in range(hi - lo) if parents[lo + j] == row and tokens[lo + j] == target[lo + b + row]]
            if not children:
                break
            row = children[0] + 1
            path.append(row)
        paths.append(path + [-1] * (len(tokens) + 1 - len(path)))
        nexts.append(int(target[lo + b + row]))
    return paths, [sum(r >= 0 for r in p) for p in paths], nexts


def walks(tokens, parents, target, starts):
    got = launch_walk(tokens, parents, target, starts)
    plain = [torch.arange(2) * len(tokens)] if starts is None else [starts]
    assert [x.tolist() for x in got] == list(plain_walk(tokens, parents, target, *plain))
    want = accept_walk_ref(tokens, parents, target, starts)
    assert all(a.dtype == I64 and torch.equal(a, b) for a, b in zip(got, want, strict=True))
    return got


@pytest.mark.parametrize(
    ("shape", "n"), cases.one_in(2, ["random", "chain", "star", "bushy"], [0, 1, 7, 8, 9, 16, 33, 64])
)
def test_accept_walk(tiles, shape, n):
    tiles()
    accepted = 0
    for seed in range(3):
        accepted += int(walks(*forest([n], seed, shape)[:3], None)[1])
    assert n < 7 or accepted > 3
    tiles(walk=walking.WALK * 32)
    walks(*forest([n], 5, shape)[:3], None)


@pytest.mark.parametrize(
    ("sizes", "kind"),
    cases.one_in(2, [[], [0], [0, 0], [3], [5, 0, 1, 17, 0], [1, 64, 9, 30]], [torch.int32, torch.int64]),
)
def test_ragged_trees(tiles, sizes, kind):
    tiles()
    for seed in range(3):
        *tensors, starts = forest(sizes, seed)
        walks(*tensors, starts.to(kind))
        room = torch.arange(len(starts) + 5).to(kind)
        room[3 : 3 + len(starts)] = starts
        walks(*(torch.cat([x[:1], x])[1:] for x in tensors), room[3 : 3 + len(starts)])
        tokens, parents, target, starts = forest(sizes, seed, "chain")
        chains = launch_walk(tokens, None, target, starts.to(kind))
        assert all(map(torch.equal, chains, walks(tokens, parents, target, starts.to(kind))))


def strided(x, poison):
    """[B, n] as a row-strided view with poison around."""
    around = torch.full((x.shape[0] + 2, x.shape[1] + 3), poison)
    around[1:-1, 1:-2] = x
    return around[1:-1, 1:-2]


@pytest.mark.parametrize(("n", "B", "chain"), cases.one_in(2, [0, 1, 8, 21], [1, 3], [False, True]))
def test_trees_of_one_size(tiles, n, B, chain):
    """Each equals its tree alone. Memory around the views would lead the walk to a 777."""
    tiles()
    for seed in range(4):
        trees = [forest([n], 10 * seed + b, "chain" if chain else "random")[:3] for b in range(B)]
        tokens, parents, target = (torch.stack(x) for x in zip(*trees, strict=True))
        up = None if chain else strided(parents, n)
        views = strided(tokens, 777), up, strided(target, 777)
        for walk in (launch_walk, accept_walk):
            got = walk(*views)
            for b, tree in enumerate(trees):
                alone = accept_walk_ref(*tree)
                assert all(torch.equal(a[b : b + 1], x) for a, x in zip(got, alone, strict=True))
    torch.library.opcheck(torch.ops.specker.accept_walk, (*views, None))


def test_a_chain_longer_than_a_tile_is_wholly_accepted():
    N = 2 * walking.WALK + 5
    tokens = torch.arange(N) % 7
    path, count, following = walks(tokens, torch.arange(N), torch.cat([tokens, torch.tensor([99])]), None)
    assert path.tolist() == [list(range(N + 1))] and (count.item(), following.item()) == (N + 1, 99)


def test_a_malformed_tree_stays_in_bounds(tiles):
    """A walk over random parents ends. Memory around the tensors would lead it to a 777."""
    tiles()
    rng = random.Random(0)
    for _ in range(20):
        N, B = rng.randint(1, 40), rng.randint(1, 3)
        tokens, target = torch.zeros(N + 200, dtype=I64), torch.full((N + B + 200,), 777)
        target[100 : 100 + N + B] = 0
        parents = torch.zeros(N + 200, dtype=I64)
        parents[100 : 100 + N] = torch.tensor(
            [rng.choice([rng.randint(-3, N + 3), 1 << 40, -1 << 62]) for _ in range(N)]
        )
        starts = torch.tensor([rng.choice([rng.randint(-2, N + 5), -50, N + 50]) for _ in range(B + 1)])
        inside = [tokens[100 : 100 + N], parents[100 : 100 + N], target[100 : 100 + N + B]]
        path, count, following = launch_walk(*inside, starts)
        assert path.shape == (B, N + 1) and (path >= -1).all() and (path <= N).all()
        assert torch.equal((path >= 0).sum(1), count) and (following == 0).all()


def test_registration():
    for setting in SETTINGS:
        for seed in (3, -1):
            torch.library.opcheck(
                torch.ops.specker.sample_rows, (rows(3, 20), *map(float, setting[:1]), *setting[1:], seed, at(3))
            )
    tokens, parents, target, starts = forest([3, 0, 5], 0)
    torch.library.opcheck(torch.ops.specker.accept_walk, (tokens, parents, target, starts))
    torch.library.opcheck(torch.ops.specker.accept_walk, (*forest([4], 0)[:3], None))
    assert torch.equal(
        torch.ops.specker.sample_rows(rows(3, 50), 1.0, 0, 1.0, -3, at(3)),
        sample_rows(rows(3, 50), 1.0, 0, 1.0, (1 << 64) - 3, at(3)),
    )


def test_fullgraph():
    logits, positions = rows(3, 40), at(3)
    for seed in SEEDS:
        call = torch.compile(
            lambda x, p, s=seed: sample_rows(x, 0.8, 5, 0.9, s, p), fullgraph=True, backend="aot_eager"
        )
        assert torch.equal(call(logits, positions), sample_rows(logits, 0.8, 5, 0.9, seed, positions))
    tensors = forest([3, 0, 5], 0)
    compiled = torch.compile(accept_walk, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, compiled(*tensors), accept_walk_ref(*tensors)))
    one = forest([9], 0)[:3]
    assert all(map(torch.equal, compiled(*one), accept_walk_ref(*one)))
    chains = one[0].view(3, 3), None, at(12).view(3, 4)
    assert all(map(torch.equal, compiled(*chains), accept_walk_ref(*chains)))


def launches():
    """Runs in a compiling process: one model, any lengths and seeds, index buffers at any offset."""
    ids = torch.arange(9000)
    for T, first, seed in (
        (1, 0, 0),
        (1, 1, 1),
        (2, 3, 16),
        (16, 2, 1 << 40),
        (17, 4, (1 << 64) - 1),
        (64, 5, 1 << 31),
    ):
        logits = torch.zeros(1, 4096 * 2).bfloat16().expand(T, -1)
        at = ids[first : first + T]
        launch_sample(logits, 0.7, 0, 1.0, seed, at)
        launch_sample(logits, 1, first + 1, 0.9, seed, at)
    for N, first in ((1, 0), (2, 1), (16, 2), (17, 3), (64, 4), (255, 5), (1000, 7)):
        launch_walk(ids[first : first + N], ids[:N], ids[first : first + N + 1], None)
        for B in (1, 3):
            tokens, target = ids[first:][: B * 1100].view(B, 1100), ids[: B * 1100].view(B, 1100)[:, : N + 1]
            launch_walk(tokens[:, :N], tokens[:, 2 : N + 2], target)


def test_no_length_recompiles():
    kernels = ("argmax", "merge", "peak", "histogram", "select")
    assert compilations(__file__) == {f"_sample_{k}_kernel": 1 for k in kernels} | {"_accept_walk_kernel": 1}


def test_kernels_per_launch_with_and_without_filter():
    assert len(module._sample_variants(torch.float16, 4096, True, False, False)) == 1
    assert len(module._sample_variants(torch.float16, 4097, True, False, False)) == 2
    assert len(module._sample_variants(torch.float16, 4097, True, True, False)) == 3


def test_other_devices_are_refused():
    with pytest.raises(ValueError, match="positions must be on cpu, got meta"):
        sample_rows(rows(2, 8), 1.0, 0, 1.0, 0, at(2).to("meta"))
    tensors = forest([3, 2], 0)
    for i, name in enumerate(("parents", "target", "cu_drafts"), 1):
        with pytest.raises(ValueError, match=f"{name} must be on cpu, got meta"):
            accept_walk(*tensors[:i], tensors[i].to("meta"), *tensors[i + 1 :])


def test_the_ops_refuse_what_the_functions_refuse():
    with pytest.raises(ValueError, match=r"temperature must be 0 or in"):
        torch.ops.specker.sample_rows(rows(2, 8), -1.0, 0, 1.0, 0, at(2))
    with pytest.raises(ValueError, match=r"top_p must be in \(0, 1\]"):
        torch.ops.specker.sample_rows(rows(2, 8), 1.0, 0, 0.0, 0, at(2))
    with pytest.raises(ValueError, match=r"target must have a row for each draft and each root"):
        torch.ops.specker.accept_walk(at(2), at(2), at(2), None)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("V", [1000, 50257, 128256])
@pytest.mark.parametrize("setting", SETTINGS)
def test_gpu_agrees_with_the_cpu(setting, V, dtype):
    """At most one row in 64 differs: two ids within rounding of the noise, or a mass within rounding of top_p."""
    logits, positions = rows(64, V, dtype), at(64)
    ours = sample_rows(logits.cuda(), *setting, 9, positions.cuda()).cpu()
    theirs = sample_rows_ref(logits, *setting, 9, positions)
    assert (ours != theirs).sum() <= (1 if setting[0] else 0)


@pytest.mark.gpu
@pytest.mark.parametrize("setting", SETTINGS)
def test_gpu_rows_are_invariant(setting):
    logits, positions = rows(65, 128256, torch.bfloat16).cuda(), at(65).cuda()
    whole = sample_rows(logits, *setting, 9, positions)
    for T in (1, 2, 7, 64, 65):
        for first in {0, 65 - T}:
            part = slice(first, first + T)
            assert torch.equal(sample_rows(logits[part], *setting, 9, positions[part]), whole[part])


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [[64], [0, 5, 64, 17]])
def test_gpu_walks(sizes):
    for shape in ("random", "chain", "bushy"):
        tensors = forest(sizes, 1, shape)
        got = accept_walk(*(x.cuda() for x in tensors))
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, accept_walk_ref(*tensors), strict=True))


@pytest.mark.parametrize("setting", [(0.0, 0, 1.0), (0.7, 0, 1.0), (0.7, 6, 0.9), (0.7, 6, 1.0), (0.7, 0, 0.9)])
def test_a_row_of_nans_gives_a_valid_id(setting):
    """The id will index an embedding: unused rows of a round hold uninitialised memory."""
    logits = torch.full((2, 9000), math.nan)
    assert launch_sample(logits, *setting, 5, torch.arange(2)).tolist() == [0, 0]
    assert sample_rows(logits, *setting, 5, torch.arange(2)).tolist() == [0, 0]
    logits[:, 9:] = torch.randn(2, 8991)
    tokens = sample_rows(logits, *setting, 5, torch.arange(2))
    assert tokens.min() >= 0 and tokens.max() < 9000
