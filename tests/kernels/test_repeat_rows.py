"""repeat_rows: on a CPU and as a kernel (in the interpreter), against plain Python."""

import pytest
import torch
from compile_only import compilations

from specker.kernels.round.repeat_rows import launch, repeat_rows

I64, I32 = torch.int64, torch.int32


def rows(T, W=1, B=1, P=3, seed=0):
    """Positions, slots, kv_len, window, ancestors, table, all with distinct numbers; the table is a row-strided view
    with poison beyond it."""
    g = torch.Generator().manual_seed(seed)
    positions, slots = torch.randperm(10**5, generator=g)[: 2 * T].view(2, T)
    words = torch.randint(-(1 << 62), 1 << 62, (T, W), generator=g)
    kv_len, window = (torch.arange(start, start + B, dtype=I32) for start in (10**6, 10**7))
    wide = torch.full((B, P + 5), -9, dtype=I32)
    wide[:, 2 : P + 2] = torch.arange(B * P, dtype=I32).view(B, P) + 10**8
    return positions, slots, kv_len, window, words, wide[:, 2 : P + 2]


@pytest.mark.parametrize("op", [repeat_rows, launch])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize(("T", "W", "B", "P"), [(1, 1, 1, 1), (6, 2, 3, 2), (33, 1, 1, 300), (150, 4, 2, 70)])
def test_rows_of_every_layer(op, layers, T, W, B, P):
    given = rows(T, W, B, P)
    out = op(*given, layers, 2**31 - 1, 10**6)
    assert [x.dtype for x in out] == [I64, I64, I32, I32, I64, I32]
    assert [x.shape[0] for x in out] == [layers * n for n in (T, T, B, B, T, B)]
    for l in range(layers):
        its, sequences = slice(l * T, (l + 1) * T), slice(l * B, (l + 1) * B)
        assert torch.equal(out.positions[its], given[0]) and torch.equal(out.ancestors[its], given[4])
        assert out.slots[its].tolist() == [slot + l * (2**31 - 1) for slot in given[1].tolist()]
        assert torch.equal(out.kv_len[sequences], given[2]) and torch.equal(out.window[sequences], given[3])
        assert torch.equal(out.table[sequences], given[5] + l * 10**6)


def test_views():
    given = rows(4, 2, 2)
    apart = [torch.stack((x, -x), 1)[:, 0] for x in given]
    apart[5] = torch.stack((given[5], -given[5]), 2)[..., 0]
    assert not any(x.is_contiguous() for x in apart)
    for op in (repeat_rows, launch):
        assert all(map(torch.equal, op(*apart, 3, 64, 4), repeat_rows(*given, 3, 64, 4)))


def test_the_rows_are_not_changed():
    given = rows(3)
    out = repeat_rows(*given, 1, 64, 4)
    for x in out:
        x.zero_()
    assert all(map(torch.equal, given, rows(3)))


def launches():
    """Runs in a compiling process: many lengths, layers and sequences, rows that are views at any offset."""
    ids, numbers = torch.arange(400), torch.arange(4000, dtype=I32)
    for n, T in enumerate((1, 2, 3, 15, 16, 33, 256)):
        for B, P in ((1, 1), (2, 16), (16, 17)):
            given = ids[n : n + T], ids[n + 1 : n + 1 + T], numbers[n : n + B], numbers[n + 3 : n + 3 + B]
            table = numbers[n:][: B * 32].view(B, 32)[:, :P]
            for layers in (1, 4, 16):
                launch(*given, ids[n : n + T, None], table, layers, (1, 16, 4096)[n % 3], (1, 16, 5)[n % 3])


def test_no_length_recompiles():
    assert compilations(__file__) == {"_repeat_rows_kernel": 1}


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, torch.zeros(3, 1, dtype=I64), "positions must be"),
        (0, torch.zeros(3, dtype=I32), "positions must be"),
        (0, torch.tensor(3), "positions must be"),
        (1, torch.zeros(3, dtype=I32), "slots and ancestors int64"),
        (1, torch.zeros(4, dtype=I64), r"slots must be \[3\], like positions, got"),
        (2, torch.zeros(1, dtype=I64), "kv_len, window and block_table must be int32"),
        (2, torch.zeros(2, dtype=I32), "expected kv_len"),
        (3, torch.zeros(2, dtype=I32), "expected kv_len"),
        (4, torch.zeros(4, 1, dtype=I64), "ancestors must be"),
        (4, torch.zeros(3, 1, dtype=I32), "slots and ancestors int64"),
        (4, torch.zeros(3, 5, dtype=I64), "1..4"),
        (5, torch.zeros(2, 3, dtype=I32), "expected kv_len"),
        (5, torch.zeros(1, 0, dtype=I32), "none empty"),
        (5, torch.zeros(1, 3), "must be int32"),
        (6, 0, "layers must be at least 1"),
    ],
)
def test_refusals(at, value, message):
    bad = [*rows(3), 2, 64, 4]
    bad[at] = value
    with pytest.raises(ValueError, match=message):
        repeat_rows(*bad)
    with pytest.raises(ValueError, match="slots must be on cpu, got meta"):
        launch(*rows(3)[:1], torch.zeros(3, dtype=I64, device="meta"), *rows(3)[2:], 2, 64, 4)


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "W", "B"), [(1, 1, 1), (33, 2, 3)])
def test_on_a_gpu(T, W, B):
    given = rows(T, W, B)
    got = repeat_rows(*(x.cuda() for x in given), 30, 2**31 - 1, 77)
    assert all(torch.equal(x.cpu(), y) for x, y in zip(got, repeat_rows(*given, 30, 2**31 - 1, 77), strict=True))
