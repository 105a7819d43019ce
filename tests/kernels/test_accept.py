"""sample_rows draws from the stated law (chi-square against float64), accept_walk against plain recursion."""

import math
import random

import pytest
import torch
from formulas import chi_square_bound, law

from specker.kernels.accept_walk import accept_walk, accept_walk_cost
from specker.kernels.noise import gumbel
from specker.kernels.sample_rows import first_argmax, sample_rows, sample_rows_cost, sample_rows_ref

I64 = torch.int64


def assert_drawn_from(tokens, p):
    """tokens of N draws against the enumerated distribution p; ids of expected count < 8 share one cell."""
    count = torch.bincount(tokens, minlength=len(p)).double()
    assert len(count) == len(p) and count[p == 0].sum() == 0
    expected = p * len(tokens)
    rare = expected < 8
    count = torch.cat([count[~rare], count[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    count, expected = count[expected > 0], expected[expected > 0]
    if len(count) == 1:
        return
    assert ((count - expected) ** 2 / expected).sum() < chi_square_bound(len(count) - 1)


def draw(logits, temperature=1.0, top_k=0, top_p=1.0, seed=0, n=20000, first=0):
    """n tokens from one row of logits, at positions first..first + n - 1."""
    rows = torch.tensor(logits, dtype=torch.float32).expand(n, -1)
    return sample_rows(rows, temperature, top_k, top_p, seed, torch.arange(first, first + n))


LOGITS = [1.3, -0.4, 0.9, 2.0, 0.9, -3.0, 0.0, 1.1, 0.2, -1.5, 2.6]
SETTINGS = [(1.0, 0, 1.0), (0.7, 0, 1.0), (2.5, 0, 1.0), (1.0, 4, 1.0), (0.7, 0, 0.8), (1.3, 5, 0.9), (0.5, 6, 0.95)]


@pytest.mark.parametrize("temperature, top_k, top_p", SETTINGS)
def test_draws_from_the_law_over_positions(temperature, top_k, top_p):
    tokens = draw(LOGITS, temperature, top_k, top_p, seed=17)
    assert_drawn_from(tokens, law(LOGITS, temperature, top_k, top_p))


@pytest.mark.parametrize("temperature, top_k, top_p", [(1.0, 0, 1.0), (0.8, 6, 0.9)])
def test_draws_from_the_law_over_seeds(temperature, top_k, top_p):
    row, position = torch.tensor([LOGITS]), torch.tensor([123])
    tokens = torch.cat([sample_rows(row, temperature, top_k, top_p, seed, position) for seed in range(4000)])
    assert_drawn_from(tokens, law(LOGITS, temperature, top_k, top_p))


def test_draws_from_the_law_at_32k():
    V, step, n = 32000, 200, 3000
    logits = -1.1 * torch.arange(1, V + 1).double().log()  # Zipf: rare ids hold much of the mass
    logits = logits[torch.randperm(V, generator=torch.Generator().manual_seed(0))]
    rows = logits.float().expand(step, -1)
    tokens = torch.cat([sample_rows(rows, 1.0, 0, 1.0, 5, torch.arange(i, i + step)) for i in range(0, n, step)])
    p = logits.softmax(-1)
    assert_drawn_from(tokens, p)
    rank = p.argsort(descending=True)
    cell = torch.empty(V, dtype=I64)
    cell[rank] = (p[rank].cumsum(-1) * 50).long().clamp(max=49)  # 50 cells of about equal mass, most with rare ids
    assert_drawn_from(cell[tokens], torch.zeros(50, dtype=torch.float64).index_add_(0, cell, p))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_sampled_in_fp32(dtype):
    row = torch.tensor(LOGITS).to(dtype)
    tokens = sample_rows(row.expand(20000, -1), 0.9, 0, 1.0, 2, torch.arange(20000))
    assert_drawn_from(tokens, law(row.tolist(), 0.9, 0, 1.0))
    assert torch.equal(tokens, sample_rows(row.float().expand(20000, -1), 0.9, 0, 1.0, 2, torch.arange(20000)))


def test_float64_logits_stay_float64():
    row = torch.zeros(1, 6, dtype=torch.float64)
    row[0, 1] = row[0, 4] = 1.0
    row[0, 4] += 1e-12  # lost in fp32
    assert sample_rows(row, 1.0, 1, 1.0, 0, torch.tensor([0])).tolist() == [4]
    assert sample_rows(row, 0.0, 0, 1.0, 0, torch.tensor([0])).tolist() == [4]
    assert set(sample_rows(row.float().expand(50, -1), 1.0, 1, 1.0, 0, torch.arange(50)).tolist()) == {1, 4}


def joint(a, b, V):
    return a * V + b


@pytest.mark.parametrize("shift", [1, 2, 16])
def test_positions_are_independent(shift):
    logits = [0.0, 0.7, -0.5, 1.2]
    tokens = draw(logits, n=40000 + shift, seed=3)
    p = law(logits, 1.0, 0, 1.0)
    i = torch.arange(40000)
    first = i[i // shift % 2 == 0]  # disjoint pairs
    assert_drawn_from(joint(tokens[first], tokens[first + shift], 4), torch.outer(p, p).flatten())


def test_seeds_are_independent():
    logits = [0.0, 0.7, -0.5, 1.2]
    p = law(logits, 1.0, 0, 1.0)
    for other in (1, 1 << 32):
        a, b = draw(logits, seed=0), draw(logits, seed=other)
        assert_drawn_from(joint(a, b, 4), torch.outer(p, p).flatten())


LN = [math.log(x) for x in (0.4, 0.3, 0.2, 0.1)]


@pytest.mark.parametrize(
    "logits, temperature, top_k, top_p, support",
    [
        ([0.0, 3.0, 1.0, 2.0], 1.0, 2, 1.0, {1, 3}),
        ([0.0, 3.0, 1.0, 2.0], 1.0, 4, 1.0, {0, 1, 2, 3}),
        ([0.0, 3.0, 1.0, 2.0], 1.0, 99, 1.0, {0, 1, 2, 3}),
        ([1.0, 1.0, 2.0, 1.0], 1.0, 2, 1.0, {0, 1, 2, 3}),  # ties at the k-th are kept
        ([1.0, 1.0, 2.0, 0.0], 1.0, 2, 1.0, {0, 1, 2}),
        ([2.0, 1.0, 2.0, 0.0], 1.0, 1, 1.0, {0, 2}),
        (LN, 1.0, 0, 0.39, {0}),
        (LN, 1.0, 0, 0.41, {0, 1}),
        (LN, 1.0, 0, 0.69, {0, 1}),
        (LN, 1.0, 0, 0.71, {0, 1, 2}),
        (LN, 1.0, 0, 0.91, {0, 1, 2, 3}),
        (LN, 1.0, 0, 1e-9, {0}),
        ([0.0] * 4, 1.0, 0, 0.3, {0, 1, 2, 3}),  # all tie with the token that reaches the mass
        ([math.log(x) for x in (0.5, 0.2, 0.2, 0.1)], 1.0, 0, 0.6, {0, 1, 2}),
        (LN, 1.0, 2, 0.55, {0}),  # top-k first, then renormalised: 0.4 / 0.7 = 0.571
        (LN, 1.0, 3, 0.45, {0, 1}),  # 0.4 / 0.9 = 0.444
        (LN, 1.0, 3, 0.44, {0}),
        (LN, 0.5, 0, 0.5, {0}),  # temperature first: 16 / 30 = 0.533
        (LN, 4.0, 0, 0.5, {0, 1}),  # 0.299 + 0.278
        ([1.0, 0.5, 0.5, -math.inf], 1.0, 0, 0.999, {0, 1, 2}),
        ([1.0, 1.0, 1.0, 0.0], 1.0, 2, 0.9, {0, 1, 2}),  # a tie kept by top-k counts in the mass
        ([2.0, 1.0, 1.0, 0.0], 1.0, 2, 0.7, {0, 1, 2}),  # e / (e + 2) = 0.576; without the tie 0.731
    ],
)
def test_supports(logits, temperature, top_k, top_p, support):
    assert set(draw(logits, temperature, top_k, top_p, n=600).tolist()) == support
    assert {v for v, x in enumerate(law(logits, temperature, top_k, top_p)) if x} == support


def test_greedy_takes_the_lower_id_among_equals():
    generator = torch.Generator().manual_seed(0)
    for V in (1, 2, 7, 33, 1000, 8192, 32001):
        logits = torch.randint(0, 4, (5, V), generator=generator).float()
        first = [row.index(max(row)) for row in logits.tolist()]
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            tokens = sample_rows(logits.to(dtype), 0, 0, 1.0, 0, torch.arange(5))
            assert tokens.dtype == I64 and tokens.tolist() == first
        assert logits.max(-1).indices.tolist() == first  # the path of CUDA tensors
    wide = torch.randint(0, 4, (5, 64), generator=generator).float()
    assert first_argmax(wide[:, 1::2]).tolist() == [row.index(max(row)) for row in wide[:, 1::2].tolist()]


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_perturbed_argmax_is_the_definition(temperature):
    logits, positions = torch.randn(9, 500, generator=torch.Generator().manual_seed(2)), torch.arange(9) + 60
    expected = (logits / temperature + gumbel(77, positions, 500)).argmax(-1)
    before = logits.clone()
    assert torch.equal(sample_rows(logits, temperature, 0, 1.0, 77, positions), expected)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("V", [3, 130, 3000])
def test_rows_are_independent_and_both_paths_agree(dtype, V):
    generator = torch.Generator().manual_seed(V)
    logits = (torch.randn(12, V, generator=generator) * torch.linspace(0.1, 5, 12)[:, None]).to(dtype)
    positions = torch.randint(0, 90, (12,), generator=generator)
    for setting in [(0, 0, 1.0), (1.0, 0, 1.0), (0.7, 20, 1.0), (1.5, 0, 0.9), (1.5, 0, 0.999), (0.7, 50, 0.5)]:
        whole = sample_rows(logits, *setting, 4, positions)
        assert torch.equal(whole, sample_rows_ref(logits, *setting, 4, positions))
        one_by_one = [sample_rows(logits[i : i + 1], *setting, 4, positions[i : i + 1]) for i in range(12)]
        assert torch.equal(whole, torch.cat(one_by_one))
        order = torch.randperm(12, generator=generator)
        assert torch.equal(whole[order], sample_rows(logits[order], *setting, 4, positions[order]))


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_no_rows(temperature):
    for top_p in (1.0, 0.5):
        tokens = sample_rows(torch.empty(0, 9), temperature, 3, top_p, 0, torch.empty(0, dtype=I64))
        assert tokens.shape == (0,) and tokens.dtype == I64


def test_shared_noise_couples_drafter_and_target():
    """Agreement >= (1 - TV) / (1 + TV), arXiv 2408.07978; no coupling exceeds 1 - TV; equal laws always agree."""
    generator = torch.Generator().manual_seed(1)
    n = 8000
    for sharpness in (0.2, 1.0, 3.0):
        for _ in range(3):
            target, drafter = (sharpness * torch.randn(2, 24, generator=generator)).tolist()
            p, q = (law(x, 1.0, 0, 1.0) for x in (target, drafter))
            tv = float((p - q).abs().sum()) / 2
            wanted = draw(target, seed=9, n=n)
            agree = float((wanted == draw(drafter, seed=9, n=n)).float().mean())
            error = 4 * math.sqrt(0.25 / n)
            assert (1 - tv) / (1 + tv) - error <= agree <= 1 - tv + error
            assert torch.equal(wanted, draw(target, seed=9, n=n))
            other = float((wanted == draw(drafter, seed=10, n=n)).float().mean())
            assert abs(other - float((p * q).sum())) < error  # without the shared seed: chance


def test_sample_rows_checks_its_arguments():
    logits, positions = torch.zeros(2, 5), torch.arange(2)
    good = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 0}
    for change, message in [
        ({"temperature": -0.5}, r"temperature must be 0 or in \[1e-06, inf\), got -0.5"),
        ({"temperature": math.inf}, "got inf"),
        ({"temperature": math.nan}, "got nan"),
        ({"temperature": 1e-9}, "got 1e-09"),
        ({"top_k": -1}, r"top_k must be an integer >= 0 \(0 keeps every token\), got -1"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.1}, "got 1.1"),
        ({"top_p": math.nan}, "got nan"),
        ({"seed": -3}, "seed must be in .*, got -3"),
        ({"seed": 1 << 64, "temperature": 0}, "seed must be a number of 64 bits"),
    ]:
        with pytest.raises(ValueError, match=message):
            sample_rows(logits, **(good | change), positions=positions)
    with pytest.raises(TypeError, match="top_k must be int, got float"):
        sample_rows(logits, **(good | {"top_k": 2.5}), positions=positions)
    with pytest.raises(ValueError, match=r"logits must be \[T, V >= 1\] floating point, got \(5,\)"):
        sample_rows(logits[0], **good, positions=positions)
    with pytest.raises(ValueError, match=r"got \(2, 0\)"):
        sample_rows(logits[:, :0], **good, positions=positions)
    with pytest.raises(ValueError, match=r"got \(2, 5\) torch.int64"):
        sample_rows(logits.long(), **good, positions=positions)
    with pytest.raises(ValueError, match=r"positions must be \[2\] int64, got \(3,\)"):
        sample_rows(logits, **good, positions=torch.arange(3))
    with pytest.raises(ValueError, match=r"positions must be \[2\] int64, got \(2,\) torch.int32"):
        sample_rows(logits, **good, positions=positions.int())
    with pytest.raises(ValueError, match="positions must be on cpu, got meta"):
        sample_rows(logits, **good, positions=positions.to("meta"))


def test_sample_rows_cost_reads_the_logits_once():
    assert sample_rows_cost(torch.zeros(3, 100), 1.0, 0, 1.0, 0, torch.arange(3))[0] == 3 * 100 * 4 + 3 * 16


def walk(tokens, parents, target, row=0):
    """One tree by plain recursion: the rows of the path, the root first."""
    children = [j + 1 for j in range(len(tokens)) if parents[j] == row and tokens[j] == target[row]]
    return [row] + (walk(tokens, parents, target, children[0]) if children else [])


def random_tree(rng, n, shape, ids=3):
    parents = {
        "chain": lambda: list(range(n)),
        "star": lambda: [0] * n,
        "random": lambda: [rng.randint(0, j) for j in range(n)],
        "deep": lambda: [rng.randint(max(0, j - 2), j) for j in range(n)],
    }[shape]()
    return [rng.randrange(ids) for _ in range(n)], parents, [rng.randrange(ids) for _ in range(n + 1)]


def assert_walk(trees):
    N = sum(len(tokens) for tokens, _, _ in trees)
    flat = [torch.tensor([x for tree in trees for x in tree[i]], dtype=I64) for i in range(3)]
    cu = torch.tensor([0] + [len(tokens) for tokens, _, _ in trees]).cumsum(0)
    expected = [walk(*tree) for tree in trees]
    forms = [cu, cu.int()] + ([None] if len(trees) == 1 else [])
    for form in forms:
        path, count, following = accept_walk(*flat, form)
        assert path.dtype == count.dtype == following.dtype == I64
        assert path.tolist() == [p + [-1] * (N + 1 - len(p)) for p in expected]
        assert count.tolist() == [len(p) for p in expected]
        assert following.tolist() == [tree[2][p[-1]] for tree, p in zip(trees, expected, strict=True)]
    return expected


@pytest.mark.parametrize("shape", ["chain", "star", "random", "deep"])
def test_walk_against_recursion(shape):
    rng = random.Random(shape)
    lengths = []
    for n in [*range(6), *(rng.randint(1, 64) for _ in range(150))]:
        for ids in (1, 2, 3, 50):  # one id: everything is accepted, and all siblings are equal
            lengths += [len(p) for p in assert_walk([random_tree(rng, n, shape, ids)])]
    assert min(lengths) == 1 and max(lengths) > (1 if shape == "star" else 4)


def test_walk_ragged_batches():
    rng = random.Random(5)
    for _ in range(100):
        shapes = rng.choices(["chain", "star", "random", "deep"], k=rng.randint(1, 6))
        assert_walk([random_tree(rng, rng.choice([0, 0, 1, 2, 5, 17]), shape, 2) for shape in shapes])


def test_walk_of_a_chain_by_hand():
    path, count, following = accept_walk(torch.tensor([5, 6, 7]), torch.tensor([0, 1, 2]), torch.tensor([5, 6, 8, 9]))
    assert (path.tolist(), count.tolist(), following.tolist()) == ([[0, 1, 2, -1]], [3], [8])  # 8 was recovered
    path, count, following = accept_walk(torch.tensor([5, 6, 7]), torch.tensor([0, 1, 2]), torch.tensor([5, 6, 7, 9]))
    assert (path.tolist(), count.tolist(), following.tolist()) == ([[0, 1, 2, 3]], [4], [9])  # 9 is the bonus


def test_walk_takes_the_first_of_equal_siblings():
    tokens, parents = torch.tensor([4, 4, 8, 8]), torch.tensor([0, 0, 2, 1])
    path, count, _ = accept_walk(tokens, parents, torch.tensor([4, 8, 8, 0, 3]))
    assert path.tolist() == [[0, 1, 4, -1, -1]] and count.tolist() == [3]


def test_walk_without_drafts():
    none = torch.empty(0, dtype=I64)
    path, count, following = accept_walk(none, none, torch.tensor([7]))
    assert (path.tolist(), count.tolist(), following.tolist()) == ([[0]], [1], [7])
    path, count, following = accept_walk(none, none, torch.tensor([7, 8]), torch.tensor([0, 0, 0]))
    assert (path.tolist(), count.tolist(), following.tolist()) == ([[0], [0]], [1, 1], [7, 8])
    path, count, following = accept_walk(none, none, none, torch.tensor([0]))
    assert path.shape == (0, 1) and count.shape == following.shape == (0,)
    assert path.dtype == count.dtype == following.dtype == I64


def test_trees_of_one_size_and_chains_without_parents():
    rng = random.Random(3)
    for n in (0, 1, 5, 20):
        for shape in ("chain", "random"):
            for B in (1, 4):
                trees = [random_tree(rng, n, shape, 2) for _ in range(B)]
                expected = [walk(*tree) for tree in trees]
                tokens, parents, target = (
                    torch.tensor([tree[i] for tree in trees], dtype=I64).view(B, n + (i == 2)) for i in range(3)
                )
                calls = [(tokens, parents, target)]
                if shape == "chain":
                    cu = torch.arange(B + 1) * n
                    calls += [(tokens, None, target), (tokens.flatten(), None, target.flatten(), cu)]
                for call in calls:
                    path, count, following = accept_walk(*call)
                    assert path[:, : n + 1].tolist() == [p + [-1] * (n + 1 - len(p)) for p in expected]
                    assert bool((path[:, n + 1 :] == -1).all()) and count.tolist() == [len(p) for p in expected]
                    assert following.tolist() == [tree[2][p[-1]] for tree, p in zip(trees, expected, strict=True)]
                    assert path.dtype == count.dtype == following.dtype == I64
    nobody = accept_walk(torch.empty(0, 3, dtype=I64), None, torch.empty(0, 4, dtype=I64))
    assert [x.shape for x in nobody] == [(0, 4), (0,), (0,)]


def test_sampled_targets_are_emitted_whatever_is_drafted():
    """The emitted tokens are the target's own after each accepted row; drafts change only their number."""
    rng = random.Random(0)
    for _ in range(50):
        tokens, parents, target = random_tree(rng, 30, "random", 2)
        (path,) = assert_walk([(tokens, parents, target)])
        assert [tokens[row - 1] for row in path[1:]] == [target[row] for row in path[:-1]]


def test_accept_walk_checks_its_arguments():
    tokens, parents, target = torch.tensor([1, 2]), torch.tensor([0, 1]), torch.tensor([1, 2, 3])
    for arguments, message in [
        ((tokens.int(), parents, target), r"tokens must be \[N\] or \[B, N\] int64, got \(2,\) torch.int32"),
        ((tokens, parents[None], target), r"parents must be \[2\] int64 like tokens, got \(1, 2\)"),
        ((tokens, parents, target.float()), r"each root, \[3\] int64, got \(3,\) torch.float32"),
        ((tokens, parents[:1], target), r"parents must be \[2\] int64 like tokens, got \(1,\)"),
        (
            (tokens, parents, target[:2]),
            r"each draft and each root, \[3\] int64, got \(2,\)",
        ),
        ((tokens, parents, target, torch.tensor([0, 1, 2])), r"\[4\] int64, got \(3,\)"),
        (
            (tokens, parents, target, torch.tensor([0.0, 2.0])),
            r"cu_drafts must be \[B \+ 1\] int32 or int64, got \(2,\)",
        ),
        ((tokens, parents, target, torch.tensor([0, 1])), r"cu_drafts must rise from 0 to 2, got \[0, 1\]"),
        ((tokens, parents, torch.arange(5), torch.tensor([0, 2, 1, 2])), "cu_drafts must rise from 0 to 2"),
        ((tokens, torch.tensor([0, 2]), target), r"the parent of draft 1 must be a row in 0..1, got 2"),
        ((tokens[None], parents[None], target), r"each root, \[1, 3\] int64, got \(3,\)"),
        ((tokens[None], parents, target[None]), r"parents must be \[1, 2\] int64 like tokens, got \(2,\)"),
        ((tokens[None, None], None, target), r"tokens must be \[N\] or \[B, N\]"),
        ((tokens[None], None, target[None], torch.tensor([0, 2])), "need no cu_drafts"),
        ((tokens, torch.tensor([-1, 0]), target), r"the parent of draft 0 must be a row in 0..0, got -1"),
    ]:
        with pytest.raises(ValueError, match=message):
            accept_walk(*arguments)


def test_accept_walk_cost_counts_every_tensor_once():
    tokens, target = torch.zeros(5, dtype=I64), torch.zeros(7, dtype=I64)
    cu = torch.tensor([0, 2, 5], dtype=torch.int32)
    out = accept_walk(tokens, tokens, target, cu)
    assert accept_walk_cost(tokens, tokens, target, cu)[0] == sum(
        x.numel() * x.element_size() for x in (tokens, tokens, target, cu, *out)
    )
