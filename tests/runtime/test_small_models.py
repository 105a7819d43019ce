"""Small models of every kind with their drafters: captured rounds against plain decoding and rounds without graphs.

On a GPU in bfloat16; on a CPU the same functions run in float64, with shorter texts."""

import functools

import cases
import pytest
from small_models import MADE, MANY, small_model

import specker

CPU, GPU = {"device": "cpu", "dtype": "float64"}, {"device": "cuda", "dtype": "bfloat16"}
DEVICES = [pytest.param(CPU, 6, id="cpu"), pytest.param(GPU, 60, id="cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def made(heads, tmp_path_factory):
    """`small_model` of a name."""
    return functools.cache(lambda name: small_model(name, tmp_path_factory.mktemp(name), heads))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", MADE)
def test_captured_rounds_have_the_tokens_of_plain_decoding(made, name, size):
    assert_tokens_of_plain_decoding(made(name), GPU, 60, size)


@pytest.mark.parametrize("name", cases.one_in(4, MADE))
def test_the_same_on_a_cpu(made, name):
    models, options, prompts = made(name)
    assert_tokens_of_plain_decoding((models, options, [prompt[:20] for prompt in prompts]), CPU, 6, 4)


def assert_tokens_of_plain_decoding(made, where, count, size):
    models, options, prompts = made
    graphs, eager = (specker.load(*models, graphs=on, batch_size=size, **where, **options) for on in ("on", "off"))
    for sampling in ({}, {"temperature": 0.7, "seed": 3}):
        plain = [out.tokens for out in graphs.generate_ar(prompts, count, **sampling)]
        for engine in (graphs, eager):
            out = engine.generate(prompts, count, **sampling)
            assert [each.tokens for each in out] == plain and sum(each.stats.drafted for each in out) > 0


@pytest.mark.parametrize(("where", "count"), DEVICES)
@pytest.mark.parametrize("name", ["delta nets", "convolutions"])
def test_saved_states_change_no_token(made, name, where, count):
    """A second prompt goes on from states that the first one's prefill saved."""
    models, options, _ = made(name)
    engine = specker.load(*models, graphs="on", prefix_cache="exact", **where, **options)
    chunks = engine.loop.slots.chunks
    chunk = 1 if chunks is None else chunks.short
    first = [5 * n % 120 + 1 for n in range(chunk + 100)]
    prompts = first, [*first[:-20], *MANY[1][:20]]
    outs = [engine.generate(prompt, count) for prompt in prompts]
    assert [out.stats.prefilled for out in outs] == [len(first) - 1, len(first) - 1 - chunk]
    assert [out.tokens for out in outs] == [engine.generate_ar(prompt, count).tokens for prompt in prompts]
