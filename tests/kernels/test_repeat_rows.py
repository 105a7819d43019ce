"""repeat_rows: reference and kernel (in the interpreter) against plain Python."""

import pytest
import torch
from compile_only import compilations

from specker.runtime.ops.repeat import _launch, repeat_rows, repeat_rows_cost, repeat_rows_ref

I64, I32 = torch.int64, torch.int32


def rows(T, W=1, seed=0):
    """Positions, slots, kv_len, window, ancestors: numbers that none of the others has."""
    g = torch.Generator().manual_seed(seed)
    positions, slots = torch.randperm(10**5, generator=g)[: 2 * T].view(2, T)
    words = torch.randint(-(1 << 62), 1 << 62, (T, W), generator=g)
    return positions, slots, torch.tensor([10**6 + T], dtype=I32), torch.tensor([10**7 + T], dtype=I32), words


@pytest.mark.parametrize("op", [repeat_rows, repeat_rows_ref, _launch])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize(("T", "W"), [(1, 1), (5, 2), (33, 1), (70, 4)])
def test_rows_of_every_layer(op, layers, T, W):
    given = rows(T, W)
    positions, slots, kv_len, window, words = op(*given, layers, 2**31 - 1)
    for l in range(layers):
        its = slice(l * T, (l + 1) * T)
        assert torch.equal(positions[its], given[0]) and torch.equal(words[its], given[4])
        assert slots[its].tolist() == [slot + l * (2**31 - 1) for slot in given[1].tolist()]
    assert kv_len.tolist() == [10**6 + T] * layers and window.tolist() == [10**7 + T] * layers
    assert len(positions) == len(slots) == len(words) == layers * T
    assert (kv_len.dtype, window.dtype, positions.dtype, slots.dtype, words.dtype) == (I32, I32, I64, I64, I64)


def test_views():
    given = rows(4, 2)
    apart = [torch.stack((x, -x), 1)[:, 0] for x in given]
    assert not apart[0].is_contiguous() and not apart[4].is_contiguous()
    assert all(map(torch.equal, _launch(*apart, 3, 64), repeat_rows_ref(*given, 3, 64)))


def test_cost():
    assert repeat_rows_cost(*rows(5, 2), 3, 100) == (4 * (5 * 8 * 4 + 8), 15)


def test_registration():
    torch.library.opcheck(torch.ops.specker.repeat_rows, (*rows(3, 2), 2, 64))
    compiled = torch.compile(lambda *a: repeat_rows(*a, 3, 64), fullgraph=True, backend="aot_eager")
    given = rows(4)
    assert all(map(torch.equal, compiled(*given), repeat_rows_ref(*given, 3, 64)))


def launches():
    """Run in a process that compiles: many lengths and layers, rows that are views at any offset."""
    ids, numbers = torch.arange(400), torch.arange(40, dtype=I32)
    for n, T in enumerate((1, 2, 3, 15, 16, 33, 256)):
        given = ids[n : n + T], ids[n + 1 : n + 1 + T], numbers[n : n + 1], numbers[n + 3 : n + 4]
        for layers in (1, 4, 16):
            _launch(*given, ids[n : n + T, None], layers, (1, 16, 4096)[n % 3])


def test_no_length_recompiles():
    assert compilations(__file__, "launches") == {"_repeat_rows_kernel": 1}


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, torch.zeros(3, 1, dtype=I64), "positions must be"),
        (0, torch.zeros(3, dtype=I32), "positions must be"),
        (0, torch.tensor(3), "positions must be"),
        (1, torch.zeros(3, dtype=I32), "slots must be"),
        (1, torch.zeros(4, dtype=I64), "slots must be as many as positions, 3, got 4"),
        (2, torch.zeros(1, dtype=I64), "kv_len must be"),
        (3, torch.zeros(2, dtype=I32), "window must be"),
        (4, torch.zeros(4, 1, dtype=I64), "ancestors must be"),
        (4, torch.zeros(3, 1, dtype=I32), "ancestors must be"),
        (4, torch.zeros(3, 5, dtype=I64), "1..4 words"),
        (5, 0, "at least one layer"),
    ],
)
def test_refusals(at, value, message):
    bad = [*rows(3), 2, 64]
    bad[at] = value
    with pytest.raises(ValueError, match=message):
        repeat_rows(*bad)
    with pytest.raises(ValueError, match="slots must be on cpu, got meta"):
        _launch(*rows(3)[:1], torch.zeros(3, dtype=I64, device="meta"), *rows(3)[2:], 2, 64)


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "W"), [(1, 1), (33, 2)])
def test_on_a_gpu(T, W):
    given = [x.cuda() for x in rows(T, W)]
    assert all(map(torch.equal, repeat_rows(*given, 30, 2**33), repeat_rows_ref(*given, 30, 2**33)))
