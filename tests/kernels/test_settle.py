"""settle: the function on a CPU and its kernel (in the interpreter) against plain Python."""

import functools
import random

import cases
import pytest
import torch
from compile_only import compilations
from windows import POISON, a_tree, among, table

from specker.kernels.accept_walk import accept_walk
from specker.kernels.round import settle as ops
from specker.kernels.round.settle import Texts, settle, settle_cost
from specker.kernels.sample_rows import Arguments, Splits, _launch

I64 = torch.int64


def kernel(tokens, parents, target, texts, report=None, drawn=None):
    """`settle` as on a GPU."""
    B, R = ops._check(ops.Arguments(tokens, parents, target, texts, report, drawn))
    report, drawn = (
        torch.full((n,), POISON) if x is None else x for n, x in ((B * (1 + 2 * R), report), (B * R, drawn))
    )
    return report, drawn, *ops.launch(tokens, parents, target, texts, report, drawn)


BOTH = pytest.mark.parametrize("go", [settle, kernel])


@BOTH
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_a_round_is_settled(go, tree, B, seed):
    """The path is accept_walk's; text, root, report and moves follow from it."""
    rng = random.Random(seed)
    rows, page, blocks = rng.choice([1, 2, 7, 16, 33]), 8, table(30, B, seed)
    lengths, limits = ([rng.choice(some) for _ in range(B)] for some in ([40, 67, 148], [40, 42, 150, 1000]))
    parents = among([a_tree(rows - 1, rng) for _ in range(B)])[0] if tree else None
    tokens = among([[rng.randrange(2) for _ in range(rows - 1)] for _ in range(B)])[0]
    targets = [[rng.randrange(2) for _ in range(rows)] for _ in range(B)]
    if seed == 5:  # everything is accepted
        tokens, targets = torch.ones_like(tokens), [[1] * rows for _ in range(B)]
    committed, text = among([[-7] * 150] * B)
    window, roots = among([[-3, -4]] * B)
    n = torch.tensor(lengths)
    texts = Texts(committed, n, window, torch.tensor(limits), blocks, page)
    report, drawn, src, dst = go(tokens, parents, among(targets)[0], texts)
    paths, counts, following = accept_walk(tokens, parents, torch.tensor(targets))
    assert drawn.tolist() == [token for target in targets for token in target] and src.shape == dst.shape == (
        B * rows * tree,
    )
    assert report.dtype == drawn.dtype == src.dtype == dst.dtype == I64
    report = report.view(B, 1 + 2 * rows)
    for b, (target, length) in enumerate(zip(targets, lengths, strict=True)):
        count = int(counts[b])
        path = paths[b, :count].tolist()
        emitted = [target[row] for row in path]
        assert window[b].tolist() == [emitted[-1], -4] and emitted[-1] == following[b]
        pad = [-1] * (rows - count)
        assert report[b].tolist() == [count, *path, *pad, *emitted, *pad]
        moved = max(0, min(count, limits[b] - length, 150 - length))
        assert n[b] == length + moved
        want = [-7] * 150
        want[length : length + moved] = emitted[:moved]
        assert committed[b].tolist() == want

        def slot(row, b=b, length=length):
            column = length - 1 + row
            return int(blocks[b, column // page]) * page + column % page

        its = slice(b * rows, (b + 1) * rows)
        if tree:
            assert dst[its].tolist() == [slot(i) for i in range(rows)]
            assert src[its].tolist() == [slot(path[i]) if i < count else slot(i) for i in range(rows)]
    for whole, width in ((text, 150), (roots, 2)):
        assert int((whole != POISON).sum()) == B * width, "written outside the view"


@functools.cache
def drawn(T, V, temperature):
    """Tokens of T rows and their splits: ties in two splits, a row of NaN and one of -inf."""
    logits = torch.randn(T, V)
    logits[:, [4, 4099]] = 40.0
    logits[-1] = float("nan")
    logits[0] = float("-inf")
    args = logits, temperature, 0, 1.0, 7, torch.arange(T)
    return _launch(Arguments(*args), merged=True), _launch(Arguments(*args), merged=False)


@BOTH
@pytest.mark.parametrize(
    ("sizes", "tree"), cases.diagonal([(1, 5000, 0.0), (5, 9000, 0.7), (12, 140_000, 0.0)], [False, True])
)
def test_splits_give_the_tokens_of_sample_rows(go, tree, sizes):
    """Of greedy and noisy draws, with ties in two splits, and rows of NaN and of -inf, which give id 0."""
    rows, V, temperature = sizes
    B, rng = 2, random.Random(rows)
    want, splits = drawn(B * rows, V, temperature)
    assert isinstance(splits, Splits) and splits.value.shape == (B * rows, -(-V // 4096))
    assert torch.equal(splits.tokens(), want) and want[-1] == 0 and (temperature or want[1:-1].eq(4).all())
    parents = torch.tensor([a_tree(rows - 1, rng) for _ in range(B)], dtype=I64).view(B, rows - 1) if tree else None
    tokens = want.view(B, rows)[:, :-1]
    results = []
    for target in (want.view(B, rows), splits):
        texts = torch.zeros(B, 100, dtype=I64), torch.tensor([9, 30]), torch.zeros(B, 1, dtype=I64)
        out = go(tokens, parents, target, Texts(*texts, torch.tensor([99, 99]), table(9, B), 16))
        results.append([*out, *texts])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert tree or torch.equal(results[1][0].view(B, -1)[:, 0], torch.full((B,), rows))


@BOTH
def test_nothing_is_written_after_the_text(go):
    committed, n = torch.zeros(2, 12, dtype=I64), torch.tensor([10, 0])
    window = torch.zeros(2, 1, dtype=I64)
    args = torch.tensor([[5, 6, 7]] * 2), None, torch.tensor([[5, 6, 7, 8]] * 2)
    go(*args, Texts(committed, n, window, torch.tensor([99, 0]), table(4, 2), 8))
    assert n.tolist() == [12, 0] and committed.tolist() == [[0] * 10 + [5, 6], [0] * 12]
    assert window.tolist() == [[8], [8]]


@BOTH
def test_results_are_written_where_asked(go):
    report, drawn = torch.full((10,), POISON), torch.full((4,), POISON)
    texts = torch.zeros(2, 9, dtype=I64), torch.tensor([1, 1]), torch.zeros(2, 2, dtype=I64), torch.tensor([9, 9])
    target = torch.tensor([[5, 6], [7, 8]])
    out = go(torch.tensor([[5], [5]]), None, target, Texts(*texts, table(4, 2), 8), report=report, drawn=drawn)
    assert out[0] is report and out[1] is drawn
    assert report.tolist() == [2, 0, 1, 5, 6, 1, 0, -1, 7, -1] and drawn.tolist() == [5, 6, 7, 8]


def test_drafts_that_are_no_tree():
    """Parents that do not come before their child: a CPU refuses them, a GPU accepts none and reads inside."""
    texts = torch.zeros(1, 9, dtype=I64), torch.tensor([1]), torch.zeros(1, 2, dtype=I64), torch.tensor([9])
    for up in (-1, 1, 5, POISON):
        args = torch.tensor([[5]]), torch.tensor([[up]]), torch.tensor([[5, 6]]), Texts(*texts, table(4), 8)
        with pytest.raises(ValueError, match=f"the parent of draft 0 must be a row in 0..0, got {up}"):
            settle(*args)
        assert kernel(*args)[0].tolist() == [1, 0, -1, 5, -1]


def test_costs():
    """Two sequences of three drafts: chains, trees, and the splits of their logits."""
    tokens, target = torch.zeros(2, 3, dtype=I64), torch.zeros(2, 4, dtype=I64)
    splits = Splits(torch.zeros(8, 32), torch.zeros(8, 32, dtype=torch.int32))
    read = 3 + 4 + 2  # tokens, target, length and limit
    written = 4 + (1 + 4 + 4) + 3  # drawn, report, and a token, the length and the root
    assert settle_cost(tokens, None, target) == (2 * 8 * (read + written), 12)
    assert settle_cost(tokens, tokens, target)[0] == 2 * (8 * (read + written + 3 + 4 + 4) + 4)  # and a page
    assert settle_cost(tokens, None, splits)[0] == 2 * 8 * (read - 4 + written) + 8 * 32 * (4 + 4)


def launches():
    """Runs in a compiling process: chains and trees of many sizes, with splits and without, as views at any offset."""
    ids, numbers = torch.arange(4000), torch.arange(400, dtype=torch.int32)
    for n, rows in enumerate((1, 1, 1, 9, 12, 15, 16, 16, 17, 32)):
        B, page = (1, 3, 16)[n % 3], (1, 16, 7, 256)[n % 4]
        blocks = numbers[n:][: 16 * B].view(B, 16)[:, : n + 1]
        tokens, up, target = (
            ids[i:][: B * 40].view(B, 40)[:, :size] for i, size in enumerate((rows - 1, rows - 1, rows), n)
        )
        text = torch.zeros(B, 300, dtype=I64)[:, n : n + (1, 16, 48, 149)[n % 4]]
        window = torch.zeros(B, 20, dtype=I64)[:, n:]
        length, limit = (ids[n + i : n + i + B] for i in (1, 2))
        report, drawn = ids[n:][: B * (1 + 2 * rows)], ids[n:][: B * rows]
        splits = Splits(torch.zeros(B * rows, 32), torch.zeros(B * rows, 32, dtype=torch.int32))
        for parents in (None, up):
            for mine in (target, splits):
                texts = Texts(text, length, window, limit, blocks, page)
                ops.launch(tokens, parents, mine, texts, report, drawn)


def test_no_length_recompiles():
    """One compilation per power of two of rows, for chains and for trees, with splits and without."""
    assert compilations(__file__) == {"_settle_kernel": 12}


def test_refusals():
    args = [torch.tensor([[5]]), None, torch.tensor([[5, 6]]), torch.zeros(1, 30, dtype=I64)]
    args += [torch.tensor([9]), torch.tensor([[0]]), torch.tensor([20]), table(4), 8, None, None]
    split = torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.int32)
    for at, value, message in [
        (0, torch.tensor([0, 1]), "tokens must be"),
        (0, torch.zeros(1, 256, dtype=I64), "tokens must be"),
        (0, torch.zeros(0, 1, dtype=I64), "tokens must be"),
        (1, torch.tensor([[0, 0]]), "parents must be"),
        (2, torch.tensor([[5]]), "target must be"),
        (2, torch.tensor([5, 6]), "target must be"),
        (2, torch.tensor([[5.0, 6.0]]), "must be int64"),
        (2, Splits(*split), "expected splits of 2 rows"),
        (4, torch.tensor([9, 9]), "length and limit must be"),
        (3, torch.zeros(1, 30), "must be int64"),
        (3, torch.zeros(30, dtype=I64), "committed and window must be"),
        (3, torch.zeros(1, 30, 2, dtype=I64)[..., 0], "committed and window must be"),
        (5, torch.zeros(1, 0, dtype=I64), "committed and window must be"),
        (7, table(4, 2), "block_table"),
        (9, torch.zeros(4, dtype=I64), "expected report"),
        (10, torch.zeros(1, 2, dtype=I64), "expected report"),
        (10, torch.zeros(2), "must be int64"),
    ]:
        bad = list(args)
        bad[at] = value
        with pytest.raises(ValueError, match=message):
            settle(*bad[:3], Texts(*bad[3:9]), *bad[9:])
