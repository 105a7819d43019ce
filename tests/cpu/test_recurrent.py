"""Layers with a recurrent state, gated attention and shared experts by the compiled layers: against their definition,
and rows whose bits depend on their paths alone."""

import functools
from dataclasses import replace

import cases
import pytest
import torch
from hybrid import CONV, DELTA, TILED, Cache, E, Hybrid
from stacks import near

from specker.cpu.chain import Chains, Committed, Vocabulary, draft_chain
from specker.cpu.layers import Stack, product
from specker.kernels.ancestors import ancestor_words, chain_words
from specker.layer_weights import LayerWeights
from specker.model.config import Experts, LayerSpec, ShortConv

EXPERTS = Experts(count=6, chosen=2, width=48, normalised=True, shared=80)
BIASED = Experts(count=20, chosen=3, width=48, normalised=True, scoring="sigmoid", biased=True, scale=2.5, eps=0.25)
KINDS = {
    "delta": {"mixers": (DELTA, None, DELTA)},
    "gates apart": {"mixers": (DELTA, DELTA), "separate": True},
    "tiled": {"mixers": (TILED, None)},
    "packed": {"mixers": (None, DELTA), "quantize": "int4"},
    "conv": {"mixers": (CONV, CONV, None), "gated": False},
    "experts": {"mixers": (None, DELTA, DELTA), "experts": EXPERTS},
    "biased experts": {"mixers": (CONV, None), "gated": False, "experts": BIASED},
}
LENGTH = 170  # five blocks: states are folded several times, and both halves are used again


@functools.cache
def model_of(kind):
    return Hybrid(**KINDS[kind])


def rows_of(n, seed=0):
    return torch.randn(n, E, generator=torch.Generator().manual_seed(seed))


@functools.cache
def plain(kind, n=LENGTH, seed=0):
    """The rows of a text that is decoded one by one."""
    return Cache(model_of(kind)).text(rows_of(n, seed), [1])


@pytest.mark.parametrize("kind", KINDS)
def test_layers_compute_what_they_are_defined_to(kind):
    assert near(plain(kind), model_of(kind).defined(rows_of(LENGTH)))


def test_sigmoid_scores_without_a_bias():
    """Half as large as those of `BIASED`, and not divided by their sum."""
    experts = replace(BIASED, normalised=False, biased=False, scale=0.5)
    model, x = Hybrid((CONV, None), gated=False, experts=experts), rows_of(40)
    assert near(Cache(model).text(x, [1]), model.defined(x))


def test_a_row_depends_on_all_before_it():
    """So the tests of bits below compare numbers that a wrong state would change."""
    changed = rows_of(LENGTH)
    changed[0] += 1
    got = Cache(model_of("delta")).text(changed, [1])
    assert (got != plain("delta")).any(1).all()


@pytest.mark.parametrize(
    ("kind", "sizes", "words"), cases.one_in(2, KINDS, [[LENGTH], [1, 100, 3], [7], [33, 32, 31]], [False, True])
)
def test_chunks_of_any_length_have_the_bits_of_plain_decoding(kind, sizes, words):
    assert torch.equal(Cache(model_of(kind)).text(rows_of(LENGTH), sizes, words=words), plain(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_records_in_a_ring(kind):
    """As small as it may be: two blocks and the rows of a call."""
    for ring, size in ((72, 8), (104, 40)):
        assert torch.equal(Cache(model_of(kind), ring=ring).text(rows_of(LENGTH), [size, 1]), plain(kind))


@pytest.mark.parametrize("ring", [0, 96])
@pytest.mark.parametrize("kind", KINDS)
def test_trees_have_the_bits_of_plain_decoding_and_leave_no_trace(kind, ring):
    """The true path is hidden among wrong nodes, and a random part of it is kept. Ends of drafts lie on both sides of
    each anchor."""
    x, cache, g = rows_of(LENGTH), Cache(model_of(kind), ring=ring), torch.Generator().manual_seed(1)

    def draw(most):
        return int(torch.randint(0, most, (1,), generator=g))

    at = 0
    while at < LENGTH:
        rows, parents, right = [x[at]], [], [0]
        for step in range(1, min(1 + draw(9), LENGTH - at)):
            for _ in range(draw(3)):
                parents.append(draw(len(rows)))
                rows.append(torch.randn(E, generator=g))
            parents.append(right[-1])
            right.append(len(rows))
            rows.append(x[at + step])
        words = ancestor_words(torch.tensor(parents)) if parents else chain_words(1)
        got = cache.run(torch.stack(rows), [(0, len(rows), words)])
        kept = right[: 1 + draw(len(right))]
        assert torch.equal(got[kept], plain(kind)[at : at + len(kept)])
        cache.keep(0, kept)
        at += len(kept)


@pytest.mark.parametrize("kind", KINDS)
def test_refused_drafts_leave_no_trace(kind):
    """Chains of 20 wrong rows after each few right ones, which move states on before they are refused."""
    x, cache, at = rows_of(LENGTH), Cache(model_of(kind), ring=96), 0
    while at < LENGTH:
        right = x[at : at + 3]
        rows = torch.cat((right, rows_of(20, seed=at)))
        assert torch.equal(cache.run(rows, [(0, len(rows), None)])[: len(right)], plain(kind)[at : at + 3])
        cache.keep(0, range(len(right)))
        at += len(right)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_has_the_bits_of_its_sequences(kind):
    cache, lengths = Cache(model_of(kind), sequences=3, ring=128), (40, 3, 90)
    for b, n in enumerate(lengths):
        cache.text(rows_of(LENGTH, b)[:n], [64], b)
    for counts in ((5, 1, 50), (17, 4, 5)):
        which = [2, 0, 1]
        spans = [slice(cache.lengths[b], cache.lengths[b] + counts[b]) for b in which]
        x = torch.cat([rows_of(LENGTH, b)[span] for b, span in zip(which, spans, strict=True)])
        got = cache.run(x, [(b, counts[b], None) for b in which])
        want = [plain(kind, seed=b)[span] for b, span in zip(which, spans, strict=True)]
        assert torch.equal(got, torch.cat(want))
        for b in which:
            cache.keep(b, range(counts[b]))


@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_threads_changes_no_bit(kind):
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            got = Cache(model_of(kind)).text(rows_of(LENGTH), [64, 1, 5])
        finally:
            torch.set_num_threads(before)
        assert torch.equal(got, plain(kind)), threads


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(0, 40), (60, 30)])
def test_a_chain_in_one_call_drafts_what_its_tokens_would(kind, lengths):
    """Over the end of a block, from committed rows that the cache lacks."""
    model, steps, g = model_of(kind), 9, torch.Generator().manual_seed(2)
    embed, head = torch.randn(50, E, generator=g), torch.randn(50, E, generator=g)
    tokens = [torch.randint(0, 50, (n + 3,), generator=g) for n in lengths]
    caches = [Cache(model, 2, ring=128) for _ in range(2)]
    for cache in caches:
        for b, n in enumerate(lengths):
            cache.text(embed[tokens[b][:n]], [64], b)
    want = []
    for b, n in enumerate(lengths):
        hidden = caches[0].run(embed[tokens[b][n:]], [(b, 3, None)])[-1:]
        caches[0].keep(b, range(3))
        drafted = []
        for step in range(steps):
            drafted.append(int(product(hidden, head).argmax()))
            if step + 1 < steps:
                hidden = caches[0].run(embed[drafted[-1:]], [(b, 1, None)])
                caches[0].keep(b, [0])
        want.append(drafted)
    rows = caches[1].arguments([(b, 3, None) for b in (0, 1)])
    groups = list(range(len(model.layers) + 1))
    got, _ = draft_chain(
        model.stack,
        Vocabulary(embed, 1.0, head, None, None, "float32"),
        rows,
        Committed(torch.cat([each[-3:] for each in tokens])),
        (groups, groups),
        Chains([n + 3 for n in lengths], 500, steps, [(0.0, 0), (0.0, 0)], None),
    )
    assert got.T.tolist() == want
    for x, y in zip(caches[0].memory, caches[1].memory, strict=True):
        assert x is None or torch.equal(x.nan_to_num(7), y.nan_to_num(7))


def test_sizes_and_layers_that_the_kernels_decline():
    assert Stack.takes_sizes(32, (64, DELTA.channels, DELTA.value_dim)) and not Stack.takes_sizes(32, (64, 40))
    layer = LayerWeights(**model_of("delta").layers[0])
    assert Stack.takes([layer], 32)
    for name, wrong in (("conv", torch.zeros(40, 4)), ("norm_mix", torch.zeros(24)), ("qkv_bias", torch.zeros(520))):
        assert not Stack.takes([replace(layer, **{name: wrong})], 32), name
    long = LayerSpec(mixers=(ShortConv(channels=80, kernel=17),))
    assert Stack.lacks(long) == "convolutions over 17 columns" and not Stack.lacks(LayerSpec(mixers=(CONV,)))
    other = LayerSpec(experts=replace(BIASED, scoring="relu"))
    assert Stack.lacks(other) == "routers that score by relu" and not Stack.lacks(LayerSpec(experts=BIASED))
