"""The runtime on a CUDA device: the same promises, and the same tokens as on a CPU where arithmetic allows."""

import pytest

import specker

pytestmark = pytest.mark.gpu
SHAPES = [{"draft_tokens": 4}, {"tree": "3x4"}]


@pytest.mark.parametrize("options", SHAPES, ids=["chain", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_float64_tokens_equal_plain_decoding_and_the_cpu(pair, options, temperature):
    engine = specker.load(*pair, device="cuda", dtype="float64", **options)
    out = engine.generate("def f(x):", 60, temperature=temperature)
    assert out.stats.accepted > 0
    assert engine.check("def f(x):", out, 60, temperature=temperature).identical
    on_cpu = specker.load(*pair, device="cpu", dtype="float64", **options)
    assert on_cpu.generate("def f(x):", 60, temperature=temperature).tokens == out.tokens


@pytest.mark.parametrize("strategy", ["vocabtrim", "easyspec", "del", "diffuspec", "diffuspec+vocabtrim"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_every_strategy_in_float64(strategy, temperature):
    engine = specker.load(strategy=strategy, device="cuda", dtype="float64")
    out = engine.generate(specker.zoo.PROMPTS[0], 60, temperature=temperature)
    assert out.stats.accepted > 0
    assert engine.check(specker.zoo.PROMPTS[0], out, 60, temperature=temperature).identical


@pytest.mark.parametrize("options", SHAPES, ids=["chain", "tree"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_bundled_family_passes_its_check(options, dtype):
    engine = specker.load(device="cuda", dtype=dtype, **options)
    for prompt in specker.zoo.PROMPTS:
        out = engine.generate(prompt, 96)
        result = engine.check(prompt, out, 96)
        assert result.ok, result.message
        assert out.stats.acceptance_length > 2
