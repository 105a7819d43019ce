"""conv_rows: in prompts, decoding, chains and trees the text's causal convolution; the kernel and the reference."""

from itertools import cycle, repeat

import pytest
import torch
from compile_only import compilations
from paths import Signal, apart
from torch.library import opcheck

from specker.kernels.ancestors import ancestor_words, chain_words
from specker.kernels.conv_rows import conv_rows, conv_rows_cost, conv_rows_ref, launch

KINDS = {  # size of the convolution, activation, and whether there are a bias and gates
    "silu": (4, "silu", False, False),
    "gates": (3, "none", False, True),
    "bias": (2, "silu", True, True),
}
WAYS = {
    "decoding": lambda text: text.chains(repeat(1)),
    "a prompt in chunks": lambda text: text.chains(cycle([52, 2]), words=False),
    "chains": lambda text: text.chains(cycle([5, 1, 17])),
    "trees": lambda text: text.trees(7),
}


def signal(op, kind, dtype, **sizes):
    return Signal(op, *KINDS[kind], dtype, **sizes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_the_definition(kind, way):
    text = signal(conv_rows, kind, torch.float64)
    assert float((WAYS[way](text) - text.defined()).abs().max()) < 1e-13


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel(kind):
    """Every way has the same bits, and the reference's values."""
    texts = {way: signal(launch, kind, torch.float32, C=70) for way in WAYS}
    got = {way: WAYS[way](text) for way, text in texts.items()}
    want = texts["decoding"].defined()
    assert all(torch.equal(each, got["decoding"]) for each in got.values())
    assert float((got["decoding"].double() - want).abs().max()) < 1e-5
    plain = signal(conv_rows_ref, kind, torch.float32, C=70)
    WAYS["trees"](plain)
    assert torch.equal(
        texts["trees"].records[0].nan_to_num(9), plain.records[0].nan_to_num(9)
    )  # it writes nothing else


def test_a_ring():
    """A cache whose pages repeat holds the last columns."""
    text, ring = (signal(launch, "silu", torch.float32) for _ in range(2))
    ring.table = ring.table[:, [0, 1, 2] * 5]
    ring.slots = (ring.table[0].long()[:, None] * 8 + torch.arange(8)).flatten()
    want, got = (each.chains(cycle([20, 1]), words=False) for each in (text, ring))
    assert torch.equal(got, want)


def test_several_sequences_and_strided_rows():
    """Sequences of unequal length share a launch; one of them has no rows."""
    one, two = (signal(launch, "gates", torch.float32) for _ in range(2))
    for text, n in ((one, 37), (two, 5)):
        text.run(list(range(n)), 0, torch.arange(n), None)
    given = (one, list(range(37, 57))), (two, [5, 6, 7])
    each = [text.arguments(rows, rows[0], torch.tensor(rows), chain_words(len(rows))) for text, rows in given]
    want = torch.cat([launch(*args) for args in each])
    wide = [torch.cat([args[n] for args in each]) for n in (0, 11, 12)]
    x, before, after = torch.cat(wide, 1).split(6, 1)
    assert not x.is_contiguous()
    pages, inputs = len(one.records[0]), torch.cat((one.records[0], two.records[0]))
    slots = torch.cat((each[0][4], each[1][4] + pages * 8))
    table = torch.cat((one.table, one.table, two.table + pages))
    ints = [torch.tensor(x, dtype=torch.int32) for x in ([57, 9, 8], [20, 0, 3], [0, 20, 20, 23])]
    words = torch.cat((each[0][9], each[1][9]))
    got = launch(x, one.weight, None, inputs, slots, table, *ints, words, "none", before, after)
    assert torch.equal(got, want)


def test_any_strides_of_biases_and_places():
    found = []
    for strided in (False, True):
        text = signal(launch, "bias", torch.float32)
        text.run(list(range(18)), 0, torch.arange(18), None)
        args = [*text.arguments([18, 3, 4], 18, torch.tensor([18, 19, 19]), ancestor_words(torch.tensor([0, 0])))]
        for n in (2, *range(4, 10)) if strided else ():
            args[n] = apart(args[n])
        found.append((launch(*args), text.records[0].nan_to_num(9)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_no_sequences():
    args = [*signal(launch, "silu", torch.float32).arguments([], 0, torch.arange(0), None)]
    args[5:9] = args[5][:0], args[6][:0], args[7][:0], args[8][:1]
    assert launch(*args).shape == conv_rows_ref(*args).shape == (0, 6)


def test_the_registered_op():
    text = signal(conv_rows, "silu", torch.float32)
    text.run(list(range(18)), 0, torch.arange(18), None)
    args = text.arguments([18, 3], 18, torch.tensor([18, 19]), ancestor_words(torch.tensor([0])))
    opcheck(torch.ops.specker.conv_rows.default, args, test_utils=("test_schema", "test_faketensor"))


def test_cost():
    args = signal(conv_rows, "gates", torch.float32).arguments([4, 5], 4, torch.tensor([4, 5]), chain_words(2))
    assert conv_rows_cost(*args) == ((3 * 2 + 2 * 2 + 2) * 6 * 4 + 6 * 3 * 4, 2 * 2 * 6 * 3)


def launches():
    """Runs in a compiling process: any number of rows, columns and sequences, at any offset."""
    for words in (True, False):
        for n, first in ((1, 0), (5, 33), (16, 16), (33, 7)):
            text, rows = signal(launch, "silu", torch.float32, C=64), torch.arange(first, first + n)
            launch(*text.arguments(rows.tolist(), first, rows, chain_words(n) if words else None))


def test_no_length_recompiles():
    assert compilations(__file__) == {"_conv_rows_kernel": 2}


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, torch.zeros(2, 6, dtype=torch.int64), r"x must be \[T, C\], floating"),
        (0, torch.zeros(6, 2).T, "the channels of x must be adjacent"),
        (1, torch.zeros(6, 9), "weight must have 2 to 8 columns, got 9"),
        (1, torch.zeros(6, 4, dtype=torch.float16), r"weight must be \[6, 4\] torch.float32"),
        (3, None, "inputs must be Tensor, got None"),
        (3, torch.zeros(16, 8, 12)[..., ::2], "weight and inputs must be contiguous"),
        (4, torch.zeros(3, dtype=torch.int64), r"slots must be \[2\] torch.int64, got \(3,\)"),
        (9, torch.zeros(3, 1, dtype=torch.int64), r"ancestors must be \[2, 1..4\] int64"),
        (10, "gelu", "activation must be one of none, silu, got 'gelu'"),
        (11, torch.zeros(2, 5), r"before must be \[2, 6\] torch.float32"),
    ],
)
def test_refusals(at, value, message):
    args = [*signal(conv_rows, "silu", torch.float32).arguments([3, 4], 3, torch.tensor([3, 4]), chain_words(2))]
    args[at] = value
    with pytest.raises((TypeError, ValueError), match=message):
        conv_rows(*args)
