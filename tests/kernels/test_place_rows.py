"""place_rows and start_rows: the functions on a CPU and their kernels (in the interpreter) against plain Python."""

import random

import cases
import numpy as np
import pytest
import torch
from compile_only import compilations
from windows import POISON, a_tree, among, table

from specker.kernels.ancestors import chain_words
from specker.kernels.round.place_rows import Window, launch_place, place_rows, place_rows_cost
from specker.kernels.round.start_rows import launch, start_rows, start_rows_cost

I64 = torch.int64

WINDOWS = [(0, 1), (0, 9), (3, 1), (5, 60), (0, 65), (60, 130), (0, 256), (255, 1)]  # first row, count


@pytest.mark.parametrize("place", [place_rows, launch_place])
@pytest.mark.parametrize(("window", "tree", "lengths"), cases.diagonal(WINDOWS, [False, True], [[100], [100, 17, 301]]))
def test_rows_are_placed_after_each_text(place, window, tree, lengths):
    first, count = window
    rng, page, B = random.Random(first + count), 16, len(lengths)
    blocks, rows, back = table(40, B), first + count, 3
    trees = [a_tree(rows - 1, rng) if tree else list(range(rows - 1)) for _ in lengths]
    given = among([[*parents, 7, 7] for parents in trees])[0] if tree else None  # more than requested
    positions, slots, kv_len, words = place(
        Window(torch.tensor(lengths), back, first, count, given, blocks, page, 10**6)
    )
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


@pytest.mark.parametrize("place", [place_rows, launch_place])
def test_a_draft_beyond_the_end_stays_inside(place):
    blocks = table(2, 2)
    positions, slots, kv_len, _ = place(Window(torch.tensor([30, 1]), 3, 0, 9, None, blocks, 16, 31))
    assert positions.tolist() == [27, 28, 29, 30, *[31] * 5, 0, 0, *range(7)]
    last = int(blocks[0, 1]) * 16 + 15
    assert slots[:9].tolist() == [*range(last - 4, last), *[last] * 5]
    first = int(blocks[1, 0]) * 16
    assert slots[9:].tolist() == [first, first, *range(first, first + 7)]
    assert kv_len.tolist() == [32, 7]  # attention reads no page beyond the table
    pads = torch.tensor([[0, -1, -1]])
    assert place(Window(torch.tensor([9]), 1, 0, 4, pads, table(2), 16, 31))[0].tolist() == [8, 9, 9, 9]


def start(*args, kernel, text=False, parents=None, positions=None, ahead=None):
    """A forward's rows by `start_rows` on a CPU or by its kernel."""
    embedding, tokens, length, back, first, count, blocks, page, last = args
    window = Window(length, back, first, count, parents, blocks, page, last)
    return (launch if kernel else start_rows)(embedding, tokens, text, window, positions, ahead=ahead)


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize(("E", "dtype"), [(1, torch.float32), (17, torch.bfloat16), (64, torch.float64)])
@pytest.mark.parametrize("tree", [False, True])
def test_a_forward_starts_with_the_embeddings_of_its_tokens(kernel, E, dtype, tree):
    rng, page, (first, count), lengths = random.Random(E), 16, (3, 5), [40, 17]
    embedding = torch.randn(50, E).to(dtype)
    tokens = among([[rng.randrange(50) for _ in range(count + 2)] for _ in lengths])[0]  # more than are read
    parents = among([a_tree(first + count - 1, rng) for _ in lengths])[0] if tree else None
    n, blocks = torch.tensor(lengths), table(9, 2)
    hidden, *placed = start(embedding, tokens, n, 1, first, count, blocks, page, 999, kernel=kernel, parents=parents)
    assert torch.equal(hidden, embedding[tokens[:, :count].reshape(-1)])
    want = place_rows(Window(n, 1, first, count, parents, blocks, page, 999))
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(placed, want, strict=True))


@pytest.mark.parametrize("kernel", [False, True])
def test_a_forward_starts_with_the_end_of_each_text(kernel):
    """Ids beyond the embedding become its last one; columns before a text's first, its first."""
    texts, blocks, n = among([[5, 6, 7, 8, 9], [1, 2, 3, 99, POISON]])[0], table(2, 2), torch.tensor([5, 4])
    embedding = torch.randn(8, 3)
    args = embedding, texts, n, 3, 0, 3, blocks, 16, 99
    assert torch.equal(start(*args, kernel=kernel, text=True)[0], embedding[[7, 7, 7, 2, 3, 7]])
    args = embedding, texts, n, 3, 1, 1, blocks, 16, 99
    assert torch.equal(start(*args, kernel=kernel, text=True)[0], embedding[[7, 3]])
    args = embedding, texts, n, 6, 0, 3, blocks, 16, 99
    assert torch.equal(start(*args, kernel=kernel, text=True)[0], embedding[[5, 5, 6, 1, 1, 1]])


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("text", [False, True])
def test_a_step_starts_further_ahead(kernel, text):
    """By a number in memory: rows of longer texts, and later tokens, of which there is none beyond the last."""
    tokens, blocks, n = among([[5, 6, 7, 0], [1, 2, 3, 4]])[0], table(9, 2), torch.tensor([40, 17])
    n = torch.tensor([2, 1]) if text else n
    embedding = torch.randn(8, 3)
    for step in (0, 1, 3, 5):
        got = start(embedding, tokens, n, 1, 0, 2, blocks, 16, 99, kernel=kernel, text=text, ahead=torch.tensor([step]))
        first = n - 1 + step if text else torch.tensor([step, step])
        columns = (first[:, None] + torch.arange(2)).clamp(max=3)
        assert torch.equal(got[0], embedding[tokens.gather(1, columns).reshape(-1)])
        want = place_rows(Window(n + step, 1, 0, 2, None, blocks, 16, 99))
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got[1:], want, strict=True))


def test_positions_are_written_where_asked():
    positions = torch.full((4,), POISON)
    args = torch.randn(8, 3), torch.zeros(2, 2, dtype=I64), torch.tensor([9, 4]), 1, 0, 2, table(2, 2), 16, 99
    out = start(*args, kernel=True, positions=positions)
    assert out[1] is positions and positions.tolist() == [8, 9, 3, 4]
    positions.fill_(POISON)
    assert launch_place(Window(*args[2:6], None, *args[6:]), positions)[0] is positions and positions.tolist() == [
        8,
        9,
        3,
        4,
    ]


def test_costs():
    """Two sequences of five rows after row 2, then of rows 62..66, whose masks have two words."""
    lengths, parents, blocks = torch.tensor([40, 17]), torch.zeros(2, 6, dtype=I64), table(9, 2)
    shared = 8 + 4 + 4  # length, kv_len, a page
    assert place_rows_cost(Window(lengths, 1, 2, 5, None, blocks, 16, 999)) == (2 * (5 * 24 + shared), 2 * 5 * 7)
    assert place_rows_cost(Window(lengths, 1, 62, 5, None, blocks, 16, 999))[0] == 2 * (5 * 32 + shared)
    window = Window(lengths, 1, 2, 5, parents, blocks, 16, 999)
    assert place_rows_cost(window)[0] == 2 * (5 * 24 + 6 * 8 + shared)
    embedding, tokens = torch.zeros(50, 3, dtype=torch.bfloat16), torch.zeros(2, 9, dtype=I64)
    copied = 10 * (8 + 2 * 3 * 2)  # ids, then embeddings in and out
    bytes, operations = place_rows_cost(window)
    assert start_rows_cost(embedding, tokens, False, window) == (bytes + copied, operations)


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
                launch_place(Window(ids[n : n + B], back, first + more, count, parents, blocks, page, last))
    embedding = torch.zeros(20, 64, dtype=torch.bfloat16)
    for n, (first, count) in enumerate([(0, 1), (0, 2), (3, 1), (0, 16), (16, 16), (0, 33)]):
        B, page, last = (1, 2, 16)[n % 3], (16, 5, 1, 256)[n % 4], (31, 1, 16)[n % 3]
        blocks = numbers[n:][: 16 * B].view(B, 16)[:, : n + 1]
        tokens, positions = ids[n:][: 70 * B].view(B, 70)[:, n:], ids[n : n + B * count]
        window = Window(ids[n : n + B], (1, 3, 16)[n % 3], first, count, None, blocks, page, last)
        for parents in (None, tokens):
            launch(embedding, tokens, False, window._replace(parents=parents), positions)
        launch(embedding, tokens, True, window)
        launch(embedding, tokens, False, window, ahead=ids[n : n + 1])


def test_no_length_recompiles():
    """One compilation per number of words for chains and for trees; of start_rows also one for texts and one for
    steps ahead."""
    assert compilations(__file__) == {"_place_rows_kernel": 4, "_start_rows_kernel": 4}


def test_refusals():
    good = Window(torch.tensor([9]), 1, 0, 4, None, table(2), 16, 31)
    for field, value, message in [
        ("length", torch.tensor([[9]]), "length must be"),
        ("length", torch.tensor([9.0]), "length must be"),
        ("length", torch.tensor([9, 9]), "block_table \\[2, P\\]"),
        ("rows", 0, "a window has"),
        ("rows", 257, "a window has"),
        ("parents", torch.tensor([[0, 1]]), "need as many parents"),
        ("parents", torch.tensor([0, 1, 1]), "parents must be"),
        ("parents", torch.tensor([[0, 1, 1]]).int(), "parents must be"),
        ("block_table", table(2)[0], "block_table"),
        ("page_size", 0, "page size"),
    ]:
        with pytest.raises(ValueError, match=message):
            place_rows(good._replace(**{field: value}))
    given = torch.zeros(8, 3), torch.zeros(1, 4, dtype=I64), False, good
    for at, value, message in [
        (0, torch.zeros(8), "expected embedding"),
        (1, torch.zeros(2, 4, dtype=I64), "expected embedding"),
        (1, torch.zeros(1, 4), "expected embedding"),
        (1, torch.zeros(1, 3, dtype=I64), "4 rows need as many tokens, got 3"),
        (3, good._replace(rows=257), "257 rows need"),
        (3, good._replace(block_table=table(2)[0]), "block_table"),
    ]:
        bad = list(given)
        bad[at] = value
        with pytest.raises(ValueError, match=message):
            start_rows(*bad)
    for positions in (torch.zeros(3, dtype=I64), torch.zeros(4)):
        with pytest.raises(ValueError, match="positions must be"):
            start_rows(*given, positions)
    for ahead in (torch.zeros(2, dtype=I64), torch.zeros(1)):
        with pytest.raises(ValueError, match="ahead must be"):
            start_rows(*given, ahead=ahead)


def test_integers_of_numpy_and_bool_are_integers():
    """Also where the words of a chain are not in a cache."""
    length, table = torch.tensor([9, 30]), torch.arange(8, dtype=torch.int32).view(2, 4)
    for first in (59, 3):
        chain_words.cache_clear()
        got = place_rows(Window(length, True, np.int64(first), np.int64(2), None, table, 16, 127))
        assert all(map(torch.equal, got, place_rows(Window(length, 1, first, 2, None, table, 16, 127))))
    embedding, tokens = torch.randn(12, 4), torch.arange(20).view(2, 10)
    length -= 20 * (length > 20)
    got = start_rows(embedding, tokens, True, Window(length, True, np.int64(0), 2, None, table, 16, 127))
    want = start_rows(embedding, tokens, True, Window(length, 1, 0, 2, None, table, 16, 127))
    assert all(map(torch.equal, got, want))
