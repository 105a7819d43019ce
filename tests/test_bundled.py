"""The bundled family: small, lossless on its prompts, and with a good acceptance length."""

from pathlib import Path

import cases
import pytest

import specker
from specker.runtime.model.checkpoint import load, read_config
from specker.runtime.stats import Stats

CHAIN = {"draft_tokens": 4}
# Acceptance lengths on the first held-out prompts, somewhat below the measured ones.
FLOOR = {0.0: 3.1, 0.7: 2.5}
DEEP = {0.0: 3.3, 0.7: 2.5}
DIFFUSION = {0.0: 2.5, 0.7: 2.1}
STRATEGIES = ("vocabtrim", "easyspec", "easyspec+vocabtrim", "del", "del+vocabtrim", "diffuspec", "diffuspec+vocabtrim")


def test_the_code_family_is_at_most_40_megabytes():
    folder = Path(specker.zoo.__file__).parent
    files = [f for f in folder.rglob("*.safetensors") if "smollm2" not in str(f.relative_to(folder))]
    assert len(files) == 6 and sum(f.stat().st_size for f in files) <= 40e6


@pytest.mark.parametrize(("shape", "temperature"), [(CHAIN, 0.0), ({"tree": "3x4"}, 0.7)], ids=["chain", "tree"])
def test_check_passes_on_the_built_in_prompts(shape, temperature):
    engine = specker.load(device="cpu", **shape)
    for prompt in specker.zoo.PROMPTS:
        out = engine.generate(prompt, 64, temperature=temperature)
        result = engine.check(prompt, out, 64, temperature=temperature)
        assert result.ok, result.message


@pytest.mark.parametrize(("strategy", "temperature"), cases.one_in(2, STRATEGIES, FLOOR))
def test_every_strategy_needs_no_flag_and_passes_its_check(strategy, temperature):
    engine = specker.load(strategy=strategy, device="cpu")
    accepted = 0
    for prompt in specker.zoo.PROMPTS[::2]:
        out = engine.generate(prompt, 32, temperature=temperature)
        result = engine.check(prompt, out, 32, temperature=temperature)
        assert result.ok, result.message
        accepted += out.stats.accepted
    assert accepted > 0


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.7])
def test_the_deep_draft_is_accepted_with_its_layers_side_by_side(temperature):
    """With groups of four and calibration, at most 7% below the layers in sequence."""
    found = []
    for width in ("1", "4"):
        engine = specker.load(strategy="easyspec", layer_parallel=width, device="cpu", **CHAIN)
        stats = Stats()
        for row in specker.zoo.heldout()[:8]:
            stats += engine.generate(row["prompt"], 56, temperature=temperature).stats
        found.append(stats.acceptance_length)
    assert found[1] >= DEEP[temperature] and found[1] >= 0.93 * found[0], found


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.7])
def test_the_draft_is_accepted(temperature):
    engine = specker.load(device="cpu", **CHAIN)
    stats = Stats()
    for row in specker.zoo.heldout()[:12]:
        stats += engine.generate(row["prompt"], 64, temperature=temperature).stats
    assert stats.acceptance_length >= FLOOR[temperature]


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.7])
def test_the_diffusion_drafter_is_accepted(temperature):
    engine = specker.load(strategy="diffuspec", device="cpu")
    stats = Stats()
    for row in specker.zoo.heldout()[:8]:
        stats += engine.generate(row["prompt"], 56, temperature=temperature).stats
    assert stats.acceptance_length >= DIFFUSION[temperature]


def test_model_configs_and_sizes():
    import torch

    target, draft, diffusion = (read_config(specker.zoo.path(name)) for name in specker.zoo.NAMES[:3])
    assert target.architecture == draft.architecture == "LlamaForCausalLM"
    assert target.vocab_size == draft.vocab_size == diffusion.vocab_size >= 8192
    assert (diffusion.architecture, diffusion.causal, diffusion.shifted_logits) == ("DreamModel", False, True)
    assert diffusion.qkv_bias and diffusion.mask_token_id is not None

    def read_per_step(name):  # weights read by a decoding step
        w = load(specker.zoo.path(name), dtype=torch.float32, device="cpu").weights
        return w.head.numel() + sum(t.numel() for kind in (w.qkv, w.o, w.gate_up, w.down) for t in kind)

    assert read_per_step("code-draft") <= read_per_step("code-target") / 10
    assert draft.num_layers <= 2
    deep = read_config(specker.zoo.path("code-draft-deep"))
    assert deep.num_layers >= 10 and deep.vocab_size == target.vocab_size
