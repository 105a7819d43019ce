"""place_rows and advance: the functions on a CPU and their kernels (in the interpreter) against plain Python."""

import random

import cases
import pytest
import torch
from compile_only import compilations

from specker.runtime.ops.rounds import _launch_advance, _launch_place, advance, place_rows

I64 = torch.int64
POISON = -(10**15)


def table(pages, B=1, seed=0):
    """A row-strided view: the first pages of a wider table, whose other columns must not be read."""
    order = list(range(B * pages))
    random.Random(seed).shuffle(order)
    wide = torch.full((B, pages + 3), 10**9, dtype=torch.int32)
    wide[:, :pages] = torch.tensor(order, dtype=torch.int32).view(B, pages)
    return wide[:, :pages]


def among(numbers):
    """A row-strided view with poison before and after it, and the whole tensor."""
    x = torch.tensor(numbers, dtype=I64)
    around = torch.full((x.shape[0] + 2, x.shape[1] + 5), POISON)
    around[1:-1, 2:-3] = x
    return around[1:-1, 2:-3], around


def a_tree(n, rng):
    return [rng.randint(0, j) for j in range(n)]


WINDOWS = [(0, 1), (0, 9), (3, 1), (5, 60), (0, 65), (60, 130), (0, 256), (255, 1)]  # first row, count


@pytest.mark.parametrize("place", [place_rows, _launch_place])
@pytest.mark.parametrize(
    ("window", "tree", "lengths"), cases.one_in(2, WINDOWS, [False, True], [[100], [100, 17, 301]])
)
def test_rows_are_placed_after_each_text(place, window, tree, lengths):
    first, count = window
    rng, page, B = random.Random(first + count), 16, len(lengths)
    blocks, rows, back = table(40, B), first + count, 3
    trees = [a_tree(rows - 1, rng) if tree else list(range(rows - 1)) for _ in lengths]
    given = among([[*parents, 7, 7] for parents in trees])[0] if tree else None  # more than requested
    positions, slots, kv_len, words = place(torch.tensor(lengths), back, first, count, given, blocks, page, 10**6)
    for b, (parents, length) in enumerate(zip(trees, lengths, strict=True)):
        for i, r in enumerate(range(first, rows)):
            way, at = [r], b * count + i
            while way[-1]:
                way.append(parents[way[-1] - 1])
            assert positions[at] == length - back + len(way) - 1
            column = length - back + r
            assert slots[at] == blocks[b, column // page] * page + column % page
            bits = sum((int(word) & (1 << 64) - 1) << 64 * w for w, word in enumerate(words[at]))
            assert bits == sum(1 << x for x in way)
    assert kv_len.tolist() == [length - back + rows for length in lengths] and kv_len.dtype == torch.int32
    assert words.shape == (B * count, -(-rows // 64)) and positions.dtype == slots.dtype == words.dtype == I64
    assert positions.shape == slots.shape == (B * count,)


@pytest.mark.parametrize("place", [place_rows, _launch_place])
def test_a_draft_beyond_the_end_stays_inside(place):
    blocks = table(2, 2)
    positions, slots, kv_len, _ = place(torch.tensor([30, 1]), 3, 0, 9, None, blocks, 16, 31)
    assert positions.tolist() == [27, 28, 29, 30, *[31] * 5, 0, 0, *range(7)]
    last = int(blocks[0, 1]) * 16 + 15
    assert slots[:9].tolist() == [*range(last - 4, last), *[last] * 5]
    first = int(blocks[1, 0]) * 16
    assert slots[9:].tolist() == [first, first, *range(first, first + 7)]
    assert kv_len.tolist() == [32, 7]  # attention reads no page beyond the table
    pads = torch.tensor([[0, -1, -1]])
    assert place(torch.tensor([9]), 1, 0, 4, pads, table(2), 16, 31)[0].tolist() == [8, 9, 9, 9]


@pytest.mark.parametrize("go", [advance, _launch_advance])
@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_a_round_is_committed(go, moves, B, seed):
    rng = random.Random(seed)
    rows, page, blocks = rng.choice([1, 2, 7, 16, 33]), 8, table(30, B, seed)
    paths = []
    for _ in range(B):
        paths.append([0])
        while paths[-1][-1] < rows - 1 and rng.random() < 0.8:
            paths[-1].append(rng.randint(paths[-1][-1] + 1, rows - 1))
    lengths, limits = ([rng.choice(some) for _ in range(B)] for some in ([40, 67, 148], [40, 42, 150, 1000]))
    targets = [[rng.randrange(1000) for _ in range(rows)] for _ in range(B)]
    committed, text = among([[-7] * 150] * B)
    window, roots = among([[-3, -4]] * B)
    n = torch.tensor(lengths)
    report, src, dst = go(
        among([path + [-1] * (rows - len(path)) for path in paths])[0],
        torch.tensor([len(path) for path in paths]),
        among(targets)[0],
        committed,
        n,
        window,
        torch.tensor(limits),
        blocks,
        page,
        moves,
    )
    assert report.shape == (B, 1 + 2 * rows) and src.shape == dst.shape == (B * rows * moves,)
    assert report.dtype == src.dtype == dst.dtype == I64
    for b, (path, target, length) in enumerate(zip(paths, targets, lengths, strict=True)):
        count = len(path)
        emitted = [target[row] for row in path]
        assert window[b].tolist() == [emitted[-1], -4]
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
        if moves:
            assert dst[its].tolist() == [slot(i) for i in range(rows)]
            assert src[its].tolist() == [slot(path[i]) if i < count else slot(i) for i in range(rows)]
    for whole, width in ((text, 150), (roots, 2)):
        assert int((whole != POISON).sum()) == B * width, "written outside the view"


@pytest.mark.parametrize("go", [advance, _launch_advance])
def test_nothing_is_written_after_the_text(go):
    committed, n = torch.zeros(2, 12, dtype=I64), torch.tensor([10, 0])
    window = torch.zeros(2, 1, dtype=I64)
    args = torch.tensor([[0, 1, 2, 3]] * 2), torch.tensor([4, 4]), torch.tensor([[5, 6, 7, 8]] * 2)
    go(*args, committed, n, window, torch.tensor([99, 0]), table(4, 2), 8)
    assert n.tolist() == [12, 0] and committed.tolist() == [[0] * 10 + [5, 6], [0] * 12]


def test_a_count_out_of_range_keeps_to_its_row():
    for go in (advance, _launch_advance):
        committed, n, window = torch.zeros(2, 9, dtype=I64), torch.tensor([1, 1]), torch.zeros(2, 1, dtype=I64)
        args = torch.tensor([[0, 1]] * 2), torch.tensor([0, 7]), torch.tensor([[5, 6]] * 2)
        report, _, _ = go(*args, committed, n, window, torch.tensor([9, 9]), table(4, 2), 8)
        assert report.tolist() == [[0, -1, -1, -1, -1], [2, 0, 1, 5, 6]]
        assert n.tolist() == [1, 3] and window.tolist() == [[0], [6]]


def launches():
    """Runs in a compiling process: windows of one word and of two, chains and trees, texts and tables of many lengths,
    one sequence and several, each a view at any offset."""
    ids, numbers = torch.arange(4000), torch.arange(400, dtype=torch.int32)
    for n, (first, count) in enumerate([(0, 1), (0, 2), (3, 1), (0, 16), (16, 16), (0, 33), (1, 63)]):
        for more in (0, 64 - first):
            B, page, last = (1, 2, 16)[n % 3], (16, 5, 1, 256)[n % 4], (31, 1, 16)[n % 3]
            blocks = numbers[n:][: 16 * B].view(B, 16)[:, : n + 1]
            for parents in (None, ids[n:][: B * 140].view(B, 140)[:, n:]):
                back = (1, 3, 16)[n % 3]
                _launch_place(ids[n : n + B], back, first + more, count, parents, blocks, page, last)
    for n, rows in enumerate((1, 1, 1, 9, 12, 15, 16, 16, 17, 32)):
        B, page = (1, 3, 16)[n % 3], (1, 16, 7, 256)[n % 4]
        blocks = numbers[n:][: 16 * B].view(B, 16)[:, : n + 1]
        path, target = (ids[i:][: B * 40].view(B, 40)[:, :rows] for i in (n, n + 1))
        text = torch.zeros(B, 300, dtype=I64)[:, n : n + (1, 16, 48, 149)[n % 4]]
        window = torch.zeros(B, 20, dtype=I64)[:, n:]
        length, limit, count = (ids[n + i : n + i + B] for i in (1, 2, 5))
        for moves in (False, True):
            _launch_advance(path, count, target, text, length, window, limit, blocks, page, moves)


def test_no_length_recompiles():
    """One compilation per number of words for chains and for trees, and one per power of two of advance's rows with and
    without moves."""
    assert compilations(__file__, "launches") == {"_place_rows_kernel": 4, "_advance_kernel": 6}


def test_refusals():
    good = torch.tensor([9]), 1, 0, 4, None, table(2), 16, 31
    for at, value, message in [
        (0, torch.tensor([[9]]), "length must be"),
        (0, torch.tensor([9.0]), "length must be"),
        (0, torch.tensor([9, 9]), "block_table \\[2, P\\]"),
        (3, 0, "a window has"),
        (3, 257, "a window has"),
        (4, torch.tensor([[0, 1]]), "need as many parents"),
        (4, torch.tensor([0, 1, 1]), "parents must be"),
        (4, torch.tensor([[0, 1, 1]]).int(), "parents must be"),
        (5, table(2)[0], "block_table"),
        (6, 0, "page size"),
    ]:
        bad = list(good)
        bad[at] = value
        with pytest.raises(ValueError, match=message):
            place_rows(*bad)
    args = [torch.tensor([[0, 1]]), torch.tensor([2]), torch.tensor([[5, 6]]), torch.zeros(1, 30, dtype=I64)]
    args += [torch.tensor([9]), torch.tensor([[0]]), torch.tensor([20]), table(4), 8]
    for at, value, message in [
        (0, torch.tensor([0, 1]), "expected path"),
        (1, torch.tensor(2), "count, length and limit must be"),
        (4, torch.tensor([9, 9]), "count, length and limit must be"),
        (2, torch.tensor([[5.0, 6.0]]), "must be int64"),
        (3, torch.zeros(1, 30), "must be int64"),
        (3, torch.zeros(30, dtype=I64), "committed and window must be"),
        (3, torch.zeros(1, 30, 2, dtype=I64)[..., 0], "committed and window must be"),
        (5, torch.zeros(1, 0, dtype=I64), "committed and window must be"),
        (7, table(4, 2), "block_table"),
    ]:
        bad = list(args)
        bad[at] = value
        with pytest.raises(ValueError, match=message):
            advance(*bad)
