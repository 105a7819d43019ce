"""delta_rows: in prompts, decoding, chains and trees the definition with one state; the kernel and the reference."""

from itertools import cycle, repeat

import pytest
import torch
from compile_only import compilations
from paths import BLOCK, World, apart, defined, gates, inputs, normed
from torch.library import opcheck

from specker.kernels.ancestors import ancestor_words, chain_words
from specker.kernels.delta_rows import Arguments, _fits, anchor, delta_rows, delta_rows_cost, delta_rows_ref, launch

SIZES = (55, 1, 2, 16, 8)  # tokens, key heads, value heads, Dk, Dv
WAYS = {
    "decoding": lambda world: world.chains(repeat(1)),
    "a prompt in chunks": lambda world: world.chains(cycle([52, 2]), words=False),
    "chains": lambda world: world.chains(cycle([5, 1, 17])),
    "trees": lambda world: world.trees(7),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_definition(way):
    given = inputs(*SIZES, torch.float64)
    got = WAYS[way](World(delta_rows, given))
    assert float((got - defined(given)).abs().max()) < 1e-12


@pytest.mark.parametrize("way", WAYS)
def test_the_kernel(way):
    given = inputs(*SIZES, torch.float32)
    want = defined(given)
    world, plain = World(launch, given), World(delta_rows_ref, given)
    error, own = (float((WAYS[way](each).double() - want).abs().max()) for each in (world, plain))
    assert error <= 2 * own + 1e-6
    for got, ref in zip((world.states, *world.records), (plain.states, *plain.records), strict=True):
        assert torch.allclose(got, ref, atol=1e-5, equal_nan=True)  # the kernel writes nothing else


@pytest.mark.parametrize(("op", "dtype", "most"), [(delta_rows, torch.float64, 1e-12), (launch, torch.float32, 2e-5)])
def test_the_norm(op, dtype, most):
    given, gate = inputs(*SIZES, dtype), gates(55, 2, 8, dtype)
    got = World(op, given, gate=gate).chains(cycle([5, 1, 17]))
    assert float((got - normed(defined(given), gate)).abs().max()) < most


def test_back_to_an_earlier_column():
    """A later text may go on from a column whose anchor's state is still there."""
    given = inputs(*SIZES, torch.float64)
    world, plain = World(delta_rows, given), World(delta_rows, given)
    for each, n in ((world, 50), (plain, 33)):
        each.run(list(range(n)), 0, torch.arange(n), None)
    assert int(world.anchors[1, 0]) == 32
    world.anchors[1] = anchor(33, BLOCK)
    got, want = (each.run(list(range(33, 55)), 33, torch.arange(33, 55), None) for each in (world, plain))
    assert torch.allclose(got, want, rtol=0, atol=1e-14)


def test_refused_drafts_leave_no_trace():
    given = inputs(*SIZES, torch.float64)
    world, other = World(delta_rows, given), World(delta_rows, given)
    for each in (world, other):
        each.run(list(range(30)), 0, torch.arange(30), None)
    world.run([30, 9, 9, 9], 30, torch.arange(30, 34), chain_words(4))
    a, b = (each.run([30, 31], 30, torch.arange(30, 32), chain_words(2)) for each in (world, other))
    assert torch.equal(a, b)


def test_several_sequences_and_strided_rows():
    """Sequences of unequal length share a launch, each with its own state and pages."""
    given = inputs(*SIZES, torch.float32)
    q, k, v, a, b, a_log, dt_bias = given
    one, two = World(launch, given), World(launch, given)
    for world, n in ((one, 37), (two, 5)):
        world.run(list(range(n)), 0, torch.arange(n), None)
    args = [w.arguments(r, r[0], torch.tensor(r), chain_words(len(r))) for w, r in ((one, [37, 38]), (two, [5, 6, 7]))]
    want = torch.cat([launch(*x) for x in args])
    joint = torch.cat([torch.cat([x[i].flatten(1) for i in range(5)], 1) for x in args])
    widths = [x.flatten(1).shape[1] for x in (q, k, v, a, b)]
    rows = [x.unflatten(1, y.shape[1:]) for x, y in zip(joint.split(widths, 1), (q, k, v, a, b), strict=True)]
    assert not rows[0].is_contiguous()
    states = torch.cat((one.states, two.states))
    records = [torch.cat(pair) for pair in zip(one.records, two.records, strict=True)]
    pages, page = one.records[0].shape[:2]
    places = torch.tensor([37, 38, 5, 6, 7]), torch.cat((args[0][14], args[1][14] + pages * page))
    table = torch.cat((one.table, two.table + pages))
    ints = [torch.tensor(x, dtype=torch.int32) for x in ([39, 8], [2, 3], [0, 2, 5])]
    words = torch.cat((args[0][19], args[1][19]))
    memory = states, torch.tensor([1, 4]), torch.cat((one.anchors, two.anchors)), *records
    fixed = a_log, dt_bias, *memory, *places, table, *ints, words, BLOCK
    assert torch.equal(launch(*rows, *fixed), want)


def test_any_strides_of_numbers_and_places():
    """Of q, k, v, a, b and z rows may be apart, of the memory nothing, of the others all numbers."""
    given, found = inputs(*SIZES, torch.float32), []
    for strided in (False, True):
        world = World(launch, given, gate=gates(55, 2, 8, torch.float32))
        world.run(list(range(18)), 0, torch.arange(18), None)
        args = [*world.arguments([18, 3, 4], 18, torch.tensor([18, 19, 19]), ancestor_words(torch.tensor([0, 0])))]
        for n in (5, 6, 8, *range(13, 20), 22) if strided else ():
            args[n] = apart(args[n])
        found.append((launch(*args), *(record.nan_to_num(9) for record in world.records)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("Dk", "Dv", "fits"), [(16, 16, True), (96, 8, True), (48, 16, False), (8, 16, False), (16, 24, False)]
)
def test_heads_that_the_kernel_serves(Dk, Dv, fits):
    given = inputs(20, 1, 2, Dk, Dv, torch.float32)
    assert _fits(Arguments(*given, *[None] * 14)) == fits
    if fits:
        got, want = (World(op, given).chains(cycle([5, 1, 17])) for op in (launch, delta_rows_ref))
        assert torch.allclose(got, want, atol=1e-5)


def test_keys_at_late_columns():
    """A column times the keys' stride needs more than 31 bits, as after 209,715 tokens of Qwen3.5-27B."""
    first, given = 1 << 16, inputs(36, 1, 1, 16, 8, torch.float32)
    late = torch.empty(36, 1 << 15)[:, :16].unflatten(1, (1, 16)).copy_(given[1])
    found = []
    for k in (given[1], late):
        world = World(launch, given, columns=first + 64)
        world.states.zero_(), world.anchors.fill_(anchor(first, BLOCK))
        for record in world.records:
            record.zero_()
        q, _, *rest = world.arguments(list(range(36)), first, torch.arange(first, first + 36), None)
        found.append((launch(q, k, *rest), world.states[1], world.anchors[1]))
    assert int(found[0][2]) > first
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_anchors():
    assert [anchor(p, 16) for p in (0, 15, 16, 31, 32, 47, 48)] == [0, 0, 0, 0, 16, 16, 32]


def test_the_registered_op():
    world = World(delta_rows, inputs(20, 1, 2, 16, 4, torch.float32))
    world.run(list(range(18)), 0, torch.arange(18), None)
    args = world.arguments([18, 3], 18, torch.tensor([18, 19]), ancestor_words(torch.tensor([0])))
    opcheck(torch.ops.specker.delta_rows.default, args, test_utils=("test_schema", "test_faketensor"))


def test_cost():
    world = World(delta_rows, inputs(70, 2, 4, 16, 8, torch.float32))
    args = world.arguments([40, 41], 40, torch.tensor([40, 41]), chain_words(2))
    record = 4 * (2 * 16 + 4 * (8 + 4))
    row = 4 * (2 * 2 * 16 + 4 * (2 * 8 + 2)) + record
    assert delta_rows_cost(*args)[0] == 4 * 4 * 16 * 8 + (40 - 16) * record + 2 * row


def launches():
    """Runs in a compiling process: any number of rows, columns and sequences, at any offset."""
    given = inputs(70, 2, 4, 16, 16, torch.float32)
    for words in (True, False):
        for n, first in ((1, 0), (5, 33), (16, 16)):
            world = World(launch, given)
            rows = torch.arange(first, first + n)
            launch(*world.arguments(rows.tolist(), first, rows, chain_words(n) if words else None))


def test_no_length_recompiles():
    assert compilations(__file__) == {"_delta_rows_kernel": 2}


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, torch.zeros(2, 2, 16, dtype=torch.int64), r"q must be \[T, Hk, Dk\] and v \[T, Hv, Dv\], floating"),
        (1, torch.zeros(2, 2, 16), r"k must be \[2, 1, 16\] torch.float32, got \(2, 2, 16\)"),
        (7, torch.zeros(3, 2, 16, 8), r"states must be \[3, 2, 2, 16, 8\] torch.float32"),
        (10, None, "k_records must be Tensor, got None"),
        (12, torch.zeros(16, 8, 4), r"g_records must be \[16, 8, 2, 4\]"),
        (13, torch.zeros(2, dtype=torch.int32), r"positions must be \[2\] torch.int64, got \(2,\) torch.int32"),
        (18, torch.zeros(3, dtype=torch.int32), r"cu_rows must be \[2\] torch.int32"),
        (19, torch.zeros(3, 1, dtype=torch.int64), r"ancestors must be \[2, 1..4\] int64"),
        (20, 24, "block must be a power of two in 16..1073741824, got 24"),
        (21, torch.zeros(2, 2, 8), "z and norm go together"),
        (1, apart(torch.zeros(2, 1, 16)), "the heads of k must be adjacent"),
        (7, apart(torch.zeros(3, 2, 2, 16, 8)), "states must be contiguous"),
        (11, apart(torch.zeros(16, 8, 2, 8)), "u_records must be contiguous"),
    ],
)
def test_refusals(at, value, message):
    args = [
        *World(delta_rows, inputs(*SIZES, torch.float32)).arguments([3, 4], 3, torch.tensor([3, 4]), chain_words(2))
    ]
    args[at : at + 1] = [value]
    with pytest.raises((TypeError, ValueError), match=message):
        delta_rows(*args)
