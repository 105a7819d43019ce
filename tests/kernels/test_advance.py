"""place_rows and advance: references and kernels (in the interpreter) against plain Python."""

import random

import pytest
import torch
from compile_only import compilations

from specker.runtime.ops.rounds import _launch_advance, _launch_place, advance, advance_ref, place_rows, place_rows_ref

I64 = torch.int64


def table(pages, seed=0):
    order = list(range(pages))
    random.Random(seed).shuffle(order)
    return torch.tensor([order], dtype=torch.int32)


def a_tree(n, rng):
    return [rng.randint(0, j) for j in range(n)]


@pytest.mark.parametrize("place", [place_rows_ref, _launch_place])
@pytest.mark.parametrize(("first", "count"), [(0, 1), (0, 9), (3, 1), (5, 60), (0, 65), (60, 130), (0, 256), (255, 1)])
@pytest.mark.parametrize("tree", [False, True])
def test_rows_stand_where_they_should(place, first, count, tree):
    rng, page, blocks = random.Random(first + count), 16, table(40)
    rows, length, back = first + count, 100, 3
    parents = a_tree(rows - 1, rng) if tree else list(range(rows - 1))
    given = torch.tensor([*parents, 7, 7], dtype=I64) if tree else None  # more than are asked for
    positions, slots, kv_len, words = place(torch.tensor([length]), back, first, count, given, blocks, page, 10**6)
    for i, r in enumerate(range(first, rows)):
        way = [r]
        while way[-1]:
            way.append(parents[way[-1] - 1])
        assert positions[i] == length - back + len(way) - 1
        column = length - back + r
        assert slots[i] == blocks[0, column // page] * page + column % page
        bits = sum((int(word) & (1 << 64) - 1) << 64 * w for w, word in enumerate(words[i]))
        assert bits == sum(1 << x for x in way)
    assert kv_len.tolist() == [length - back + rows] and kv_len.dtype == torch.int32
    assert words.shape == (count, -(-rows // 64)) and positions.dtype == slots.dtype == words.dtype == I64


@pytest.mark.parametrize("place", [place_rows_ref, _launch_place])
def test_a_draft_beyond_the_end_stays_inside(place):
    positions, slots, _, _ = place(torch.tensor([30]), 1, 0, 9, None, table(2), 16, 31)
    assert positions.tolist() == [29, 30, *[31] * 7]
    assert slots[-1] == slots[2]  # the last column
    pads = torch.tensor([0, -1, -1])
    assert place(torch.tensor([9]), 1, 0, 4, pads, table(2), 16, 31)[0].tolist() == [8, 9, 9, 9]


@pytest.mark.parametrize("go", [advance_ref, _launch_advance])
@pytest.mark.parametrize("seed", range(12))
def test_a_round_is_committed(go, seed):
    rng = random.Random(seed)
    rows, page, blocks = rng.choice([1, 2, 7, 16, 33]), 8, table(30, seed)
    path = [0]
    while len(path) < rows and rng.random() < 0.8:
        path.append(rng.randint(path[-1] + 1, rows - 1)) if path[-1] < rows - 1 else None
        if path[-1] == rows - 1:
            break
    count = len(path)
    length, limit = 40, rng.choice([40, 42, 200, 1000])
    target = [rng.randrange(1000) for _ in range(rows)]
    committed = torch.full((150,), -7, dtype=I64)
    n, window = torch.tensor([length]), torch.tensor([-3, -4])
    report, src, dst = go(
        torch.tensor([path + [-1] * (rows - count)]),
        torch.tensor([count]),
        torch.tensor(target),
        committed,
        n,
        window,
        torch.tensor([limit]),
        blocks,
        page,
    )
    emitted = [target[row] for row in path]
    assert window.tolist() == [emitted[-1], -4]
    pad = [-1] * (rows - count)
    assert report.tolist() == [count, *path, *pad, *emitted, *pad]
    moved = max(0, min(count, limit - length))
    assert n.tolist() == [length + moved]
    want = [-7] * 150
    want[length : length + moved] = emitted[:moved]
    assert committed.tolist() == want

    def slot(row):
        column = length - 1 + row
        return int(blocks[0, column // page]) * page + column % page

    assert dst.tolist() == [slot(i) for i in range(rows)]
    assert src.tolist() == [slot(path[i]) if i < count else slot(i) for i in range(rows)]


def test_nothing_is_written_behind_the_text():
    committed, n = torch.zeros(12, dtype=I64), torch.tensor([10])
    args = torch.tensor([[0, 1, 2, 3]]), torch.tensor([4]), torch.tensor([5, 6, 7, 8])
    _launch_advance(*args, committed, n, torch.tensor([0]), torch.tensor([99]), table(4), 8)
    assert n.tolist() == [12] and committed.tolist() == [0] * 10 + [5, 6]


def test_registration():
    parents = torch.tensor([0, 1, 1])
    torch.library.opcheck(torch.ops.specker.place_rows, (torch.tensor([9]), 1, 0, 4, parents, table(2), 16, 31))
    rest = torch.tensor([[0, 1, -1]]), torch.tensor([2]), torch.tensor([5, 6, 7])
    state = torch.zeros(30, dtype=I64), torch.tensor([9]), torch.zeros(4, dtype=I64), torch.tensor([20]), table(4), 8
    torch.library.opcheck(torch.ops.specker.advance, (*rest, *state))

    @torch.compile(fullgraph=True, backend="eager")
    def both(length, committed):
        placed = place_rows(length, 1, 0, 4, parents, table_, 8, 31)
        return placed, advance(*rest, committed, length, *state[2:])

    table_ = table(4)
    placed, (report, _, _) = both(torch.tensor([9]), torch.zeros(30, dtype=I64))
    assert placed[0].tolist() == [8, 9, 10, 10] and report.tolist() == [2, 0, 1, -1, 5, 6, -1]


def launches():
    """Run in a process that compiles: windows of one word and of two, chains and trees, texts and tables of many
    lengths, each a view at any offset."""
    ids, numbers = torch.arange(400), torch.arange(40, dtype=torch.int32)
    for n, (first, count) in enumerate([(0, 1), (0, 2), (3, 1), (0, 16), (16, 16), (0, 33), (1, 63)]):
        for more in (0, 64 - first):
            blocks, page, last = numbers[None, n : 16 * n + 1 + n], (16, 5, 1, 256)[n % 4], (31, 1, 16)[n % 3]
            for parents in (None, ids[n : n + 130]):
                _launch_place(
                    ids[n : n + 1], (1, 3, 16)[n % 3], first + more, count, parents, blocks[:, :40], page, last
                )
    for n, rows in enumerate((1, 1, 1, 9, 12, 15, 16, 16, 17, 32)):
        blocks, page = numbers[None, n : 3 * n + 1 + n], (1, 16, 7, 256)[n % 4]
        path, target = ids[n : n + rows][None], ids[n + 1 : n + 1 + rows]
        state = (
            torch.zeros(300, dtype=I64)[n : n + (1, 16, 48, 149)[n % 4]],
            *(ids[n + i : n + i + 1] for i in (1, 2, 5)),
        )
        _launch_advance(path, ids[n + 3 : n + 4], target, *state, blocks, page)


def test_no_length_recompiles():
    """A form for each number of words, of chains and of trees; and for each power of two of advance's rows."""
    assert compilations(__file__, "launches") == {"_place_rows_kernel": 4, "_advance_kernel": 3}


def test_refusals():
    good = torch.tensor([9]), 1, 0, 4, None, table(2), 16, 31
    for at, value, message in [
        (0, torch.tensor([9, 9]), "length must be"),
        (3, 0, "a window has"),
        (3, 257, "a window has"),
        (4, torch.tensor([0, 1]), "need as many parents"),
        (4, torch.tensor([0, 1, 1]).int(), "parents must be"),
        (5, table(2)[0], "block_table"),
        (6, 0, "page size"),
    ]:
        bad = list(good)
        bad[at] = value
        with pytest.raises(ValueError, match=message):
            place_rows(*bad)
    args = [torch.tensor([[0, 1]]), torch.tensor([2]), torch.tensor([5, 6])]
    args += [torch.zeros(30, dtype=I64), torch.tensor([9]), torch.tensor([0]), torch.tensor([20]), table(4), 8]
    for at, value, message in [
        (0, torch.tensor([0, 1]), "expected path"),
        (1, torch.tensor(2), "count must be"),
        (3, torch.zeros(30), "committed must be"),
        (5, torch.tensor([1.0]), "window must be"),
    ]:
        bad = list(args)
        bad[at] = value
        with pytest.raises(ValueError, match=message):
            advance(*bad)
