"""Small models of every kind with their drafters: captured rounds against plain decoding and rounds without graphs.

On a GPU in bfloat16; on a CPU the same functions run in float64, with shorter texts."""

import functools
from typing import Any

import cases
import pytest
from make_assistant import CLUSTERS, TARGETS, make_assistant
from make_checkpoint import GEMMA3, GEMMA4, GPT_OSS, LFM2, QWEN3_5, QWEN3_MOE, edit, make
from make_mxfp4 import make_mxfp4
from pairs import perturbed

import specker

LONG_WINDOW = {"sliding_window": 256}  # a GPU's kernels take none below 128
SIZES = {"hidden": 64, "heads": 6, "kv_heads": 6, "head_dim": 32, "ffn": 96, "vocab": 120}
RANDOM: dict[str, dict[str, Any]] = {  # what a random model with a perturbed copy as its draft has
    "mixture": QWEN3_MOE,
    "int4 mixture": QWEN3_MOE,
    "rings": {**GEMMA3, **LONG_WINDOW},
    "gemma 4": {**GEMMA4, **LONG_WINDOW, "global_head_dim": 512},
    "sinks": {**GPT_OSS, **LONG_WINDOW},
    "delta nets": QWEN3_5,
    "convolutions": LFM2,
    "pard": {"arch": "llama"},
}
HEADS = {  # strategy and layout of heads.py
    "eagle": ("eagle", "trained longer"),
    "mtp": ("mtp", "mimo, 3 heads"),
    "dflash": ("dflash", "dflash"),
    "dflash2": ("dflash", "dflash2"),
    "domino": ("dflash", "domino"),
}
MADE = [*HEADS, *RANDOM, "mxfp4", "assistant", "clusters"]
MANY = [[3 * n % 110 + 1 for n in range(length)] for length in (5, 40, 90)]
PAST_WINDOWS = [[*MANY[2]] * 6, MANY[1], [*MANY[2]] * 3]
CPU, GPU = {"device": "cpu", "dtype": "float64"}, {"device": "cuda", "dtype": "bfloat16"}
DEVICES = [pytest.param(CPU, 6, id="cpu"), pytest.param(GPU, 60, id="cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def made(heads, tmp_path_factory):
    """A function of a name in MADE: the arguments that load a small model of its kind, with a drafter, and prompts."""

    def of(name):
        if name in HEADS:
            pair = heads(*HEADS[name])
            folders = [pair.target] if name == "mtp" else [pair.target, pair.folder]
            return folders, {"strategy": HEADS[name][0]}, MANY
        target, draft = (tmp_path_factory.mktemp(name) / part for part in ("target", "draft"))
        if name in ("assistant", "clusters"):
            make(target, max_context=1024, seed=2, **TARGETS["31b"] | LONG_WINDOW)
            make_assistant(draft, target, CLUSTERS if name == "clusters" else None)
            return [target, draft], {"strategy": "mtp"}, MANY
        if name == "mxfp4":
            make_mxfp4(target, max_context=1024, **GPT_OSS | LONG_WINDOW | SIZES)
            return [target, make(draft, max_context=1024, layers=1, vocab=SIZES["vocab"])], {}, PAST_WINDOWS
        make(target, max_context=1024, **RANDOM[name])
        perturbed(target, draft)
        if name == "pard":
            edit(draft, pard_token=126, spd_type="pard")
        prompts = PAST_WINDOWS if "sliding_window" in RANDOM[name] else MANY
        return [target, draft], {"quantize": "int4"} if name == "int4 mixture" else {}, prompts

    @functools.cache
    def made(name):
        folders, options, prompts = of(name)
        return [str(folder) for folder in folders], {"draft_tokens": 3, "policy": "fixed", **options}, prompts

    return made


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
    alignment = engine.loop.slots.prefix_alignment
    first = [5 * n % 120 + 1 for n in range(alignment + 100)]
    prompts = first, [*first[:-20], *MANY[1][:20]]
    outs = [engine.generate(prompt, count) for prompt in prompts]
    assert [out.stats.prefilled for out in outs] == [len(first) - 1, len(first) - 1 - alignment]
    assert [out.tokens for out in outs] == [engine.generate_ar(prompt, count).tokens for prompt in prompts]
