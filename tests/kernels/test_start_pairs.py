"""start_pairs: the function on a CPU and its kernel (in the interpreter) against a plain formula."""

import random

import cases
import pytest
import torch
from compile_only import compilations
from windows import a_tree, among, table

from specker.kernels.round.place_rows import Window, place_rows, place_rows_cost
from specker.kernels.round.start_pairs import launch, start_pairs, start_pairs_cost
from specker.kernels.round.start_rows import start_rows

EPS = 1e-5


def normed(x, weight):
    y = x.double()
    return (y * (y.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()).to(x.dtype)


def near(got, want):
    """Equal but for the rounding of one step."""
    return torch.allclose(got.double(), want.double(), rtol={2: 2**-7, 4: 1e-6, 8: 1e-12}[got.itemsize], atol=1e-7)


SIZES = [(1, torch.float32), (17, torch.bfloat16)]


OPS = [*((op, *size) for op in (start_pairs, launch) for size in SIZES), (start_pairs, 64, torch.float64)]
FORMS = "norms", "normed stream", "plain"


@pytest.mark.parametrize(
    ("case", "kind", "form"), cases.one_in(2, OPS, ["chain", "first level", "level", "text"], FORMS)
)
def test_rows_join_their_tokens_and_their_parents_features(case, kind, form):
    op, E, dtype = case
    rng, page, count, lengths = random.Random(E), 16, 4, [40, 17]
    tree, text, m = "level" in kind, kind == "text", 1 if kind == "first level" else count
    first = {"first level": 1, "level": 5}.get(kind, 3)
    embedding, features = torch.randn(50, E).to(dtype), torch.randn(2 * m, E).to(dtype)
    norms = None if form == "plain" else tuple((1 + 0.3 * torch.randn(E)).to(dtype) for _ in range(2))
    tokens = among([[rng.randrange(50) for _ in range(45 if text else count + 2)] for _ in lengths])[0]
    parents = None
    if tree:  # the rows before `first` form the level before, and the root is row 0
        trees = [[*a_tree(first - 1, rng), *(rng.randrange(first - m, first) for _ in range(count))] for _ in lengths]
        parents = among(trees)[0]
    n, blocks = torch.tensor(lengths), table(9, 2)
    window = Window(n, 2, first, count, parents, blocks, page, 999)
    stream, joined, *placed = op(embedding, tokens, text, features, norms, EPS, form == "normed stream", window)
    for b, i in ((b, i) for b in range(2) for i in range(count)):
        at = b * count + i
        token = tokens[b, lengths[b] - 2 + first + i if text else i]
        h = features[b * m + (int(parents[b, first + i - 1]) - (first - m) if tree else i)]
        e, u = (embedding[token], h) if norms is None else (normed(embedding[token], norms[0]), normed(h, norms[1]))
        assert near(joined[at], torch.cat((e, u))) and near(stream[at], u if form == "normed stream" else h)
        assert norms is not None or torch.equal(joined[at], torch.cat((e, u)))
    assert joined.shape == (2 * count, 2 * E) and stream.dtype == joined.dtype == dtype
    want = place_rows(window)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(placed, want, strict=True))


@pytest.mark.parametrize("op", [start_pairs, launch])
def test_parents_outside_of_the_level_before_are_clamped(op):
    """A sequence without a text has meaningless parents, which must not be read."""
    features, blocks = torch.arange(3.0).view(3, 1), table(9)
    given = torch.zeros(8, 1), torch.zeros(1, 3, dtype=torch.int64), False, features, None, EPS, False
    window = Window(torch.tensor([9]), 2, 4, 3, torch.tensor([[0, 0, 0, -7, 3, 90]]), blocks, 16, 99)
    stream = op(*given, window)[0]
    assert stream.flatten().tolist() == [0, 2, 2]


def test_embeddings_are_those_of_start_rows():
    """The same ids are clamped, and the same columns of a text read."""
    tokens, n = torch.randint(-5, 90, (2, 30)), torch.tensor([12, 31])
    embedding, features, blocks = torch.randn(50, 8), torch.zeros(12, 8), table(9, 2)
    window = Window(n, 3, 0, 6, None, blocks, 16, 99)
    for op in (start_pairs, launch):
        joined = op(embedding, tokens, True, features, None, EPS, False, window)[1]
        assert torch.equal(joined[:, :8], start_rows(embedding, tokens, True, window)[0])


def test_cost():
    window = Window(torch.tensor([40, 17]), 1, 2, 5, None, table(9, 2), 16, 999)
    embedding, features = torch.zeros(50, 3, dtype=torch.bfloat16), torch.zeros(10, 3, dtype=torch.bfloat16)
    bytes, operations = place_rows_cost(window)
    weight = torch.zeros(3, dtype=torch.bfloat16)
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    got = start_pairs_cost(embedding, tokens, False, features, (weight, weight), EPS, False, window)
    moved = 10 * (8 + 2 * 5 * 3) + 2 * 2 * 3  # ids, two rows in and three out; two norms
    assert got == (bytes + moved, operations + 8 * 10 * 3)


def launches():
    """Runs in a compiling process: chains, levels of trees and texts, of many lengths, each a view at any offset."""
    ids, numbers = torch.arange(4000), torch.arange(400, dtype=torch.int32)
    embedding, weight = torch.zeros(20, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
    for n, (first, count) in enumerate([(1, 1), (2, 1), (3, 2), (5, 16), (16, 16), (9, 33)]):
        B, page, last = (1, 2, 16)[n % 3], (16, 5, 1, 256)[n % 4], (31, 1, 16)[n % 3]
        blocks = numbers[n:][: 16 * B].view(B, 16)[:, : n + 1]
        tokens, features = ids[n:][: 70 * B].view(B, 70)[:, n:], embedding.new_zeros(B * count, 64)
        for text, parents in ((False, None), (False, tokens), (True, None)):
            window = Window(ids[n : n + B], (1, 3, 16)[n % 3], first, count, parents, blocks, page, last)
            launch(embedding, tokens, text, features, (weight, weight), 1e-5 * (n + 1), False, window)


def test_no_length_recompiles():
    """One compilation for chains, one for texts, one for levels of trees and one where a level's `count` is 1."""
    assert compilations(__file__) == {"_start_pairs_kernel": 4}


def test_refusals():
    window = Window(torch.tensor([9]), 1, 0, 4, None, table(2), 16, 31)
    weight = torch.ones(3)
    good = torch.zeros(8, 3), torch.zeros(1, 4, dtype=torch.int64), False, torch.zeros(4, 3), (weight, weight), EPS
    for at, value, message in [
        (3, torch.zeros(1, 3), r"expected features \[1 \* 4, 3\]"),
        (3, torch.zeros(4, 2), "expected features"),
        (3, torch.zeros(4, 3).double(), "must have the embedding's dtype"),
        (4, (weight, weight.half()), "must have the embedding's dtype"),
        (4, (weight, torch.ones(4)), r"norms must be \[3\]"),
        (1, torch.zeros(1, 3, dtype=torch.int64), "4 rows need as many tokens"),
    ]:
        bad = list(good)
        bad[at] = value
        with pytest.raises(ValueError, match=message):
            start_pairs(*bad, False, window)
    with pytest.raises(ValueError, match="without norms"):
        start_pairs(*good[:4], None, EPS, True, window)
