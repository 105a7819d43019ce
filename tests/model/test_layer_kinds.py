"""Layers that compute other things than Llama's: what the CPU compiles, what a GPU launches, what is refused. The
conformance table has their texts."""

from dataclasses import replace

import pytest
import torch
from make_checkpoint import (
    FULL,
    GEMMA3,
    GEMMA4,
    GEMMA4_MIXED,
    GEMMA4_PLE,
    GPT_OSS,
    GRANITE,
    LFM2,
    MIXTRAL,
    QWEN3_5,
    SLIDING,
    edit,
    make,
)
from pairs import perturbed
from recorded import kernels, recording
from table import ARCHITECTURES

import specker
from specker.checkpoints.checkpoint import read
from specker.model.cache import KVCache
from specker.model.config import CheckpointError, LayerSpec
from specker.model.decoder import Model, check_sliding_windows, forward
from specker.model.prefill import prefill

PROMPT = [5, 9, 40, 77, 3, 8, 5, 9, 40, 21, 60, 2, 2, 18, 33, 70, 5, 9, 40]
OTHERS = [[7], [3, 4] * 20]  # in batches


@pytest.mark.parametrize("kind", ["gemma3", "qwen2", "smollm3"])
def test_a_group_of_unlike_layers_is_refused(tmp_path, kind):
    target = make(tmp_path, **ARCHITECTURES[kind])
    with pytest.raises(ValueError, match=r"different sliding windows or RoPE side by side: .* layer_parallel groups"):
        specker.load(target, target, "easyspec", dtype="float64", layer_parallel="[[0,1,2,3]]")


# The CPU's compiled layers


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_layers_with_unlike_heads_are_not_side_by_side(tmp_path, quantize):
    target = make(tmp_path / "target", **ARCHITECTURES["gemma4-31b"])
    how = {"dtype": "float32", "quantize": quantize, "draft_quantize": quantize}
    with pytest.raises(ValueError, match="EasySpec cannot run layers of Gemma4ForCausalLM side by side"):
        specker.load(target, target, "easyspec", layer_parallel="[[0],[1],[2,3]]", **how)


NARROW = {"gemma4-31b": GEMMA4, "gemma4-e2b": GEMMA4_PLE, "gemma4-26b-a4b": GEMMA4_MIXED}  # with heads of 16
NOT_COMPILED = [("gemma4-31b", None), *((kind, "int8") for kind in NARROW)]


@pytest.mark.parametrize(("kind", "quantize"), NOT_COMPILED)
def test_what_is_not_compiled_runs_on_torch(tmp_path, kind, quantize):
    """It says so, and drafts the text of plain decoding."""
    target = make(tmp_path / "target", max_context=160, **NARROW[kind] | {"tied": False})
    draft = perturbed(target, tmp_path / "draft", amount=0.05)
    engine = specker.load(target, draft, draft_tokens=4, dtype="float32", quantize=quantize)
    assert engine.model.stack is None and "take heads of a multiple of 32" in engine.remarks["cpu"]
    assert (engine.target.quantised == "int8") == (quantize is not None)
    out = engine.generate(PROMPT, 15)
    assert out.tokens == engine.generate_ar(PROMPT, 15).tokens and out.stats.accepted > 0


@pytest.mark.parametrize("options", [{}, {"quantize": "int8"}, {"dtype": "float32", "batch_size": 3}], ids=str)
@pytest.mark.parametrize("kind", ["gemma3", "gemma4-31b", "gemma4-e2b"])
def test_a_draft_that_is_the_target_is_always_right(tmp_path, kind, options):
    """A chain drafted in one call has the bits of the verify pass, from the scaled embedding too; so has one of layers
    with unlike heads, which is drafted token by token."""
    folder = make(tmp_path, **ARCHITECTURES[kind])
    how = {"draft_quantize": options.get("quantize", "none")}
    engine = specker.load(
        folder, folder, strategy="draft", draft_tokens=4, policy="fixed", device="cpu", **options, **how
    )
    assert engine.model.embed_scale == 8 and engine.model.stack is not None
    for out in engine.generate([PROMPT, *OTHERS], max_new_tokens=21):
        assert out.stats.accepted == out.stats.drafted > 10


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_draft_ranks_under_the_cap_of_the_logits(tmp_path, dtype):
    """With noise the cap changes the choice, in a chain drafted in one call and in the drafter's head."""
    folder = make(tmp_path, **ARCHITECTURES["gemma2"])
    engine = specker.load(folder, folder, strategy="draft", draft_tokens=4, policy="fixed", device="cpu", dtype=dtype)
    assert (engine.model.stack is not None) == (dtype == "float32")
    out = engine.generate(PROMPT, max_new_tokens=31, temperature=1.5, seed=3)
    assert out.stats.accepted == out.stats.drafted > 10
    assert out.tokens == engine.generate_ar(PROMPT, max_new_tokens=31, temperature=1.5, seed=3).tokens


def test_a_gpu_takes_no_short_window(tmp_path):
    """Its kernels hide columns only before the window of a verify pass, which the engine keeps short."""
    config = read(make(tmp_path, "mistral", layers=1), dtype=torch.float32, device="cpu").config
    for window, device in ((128, "cuda"), (127, "cpu"), (0, "cuda")):
        check_sliding_windows(replace(config, layer=LayerSpec(sliding_windows=(window,))), torch.device(device))
    with pytest.raises(CheckpointError, match="window of 127, and a GPU's kernels take none below 128; use device="):
        check_sliding_windows(replace(config, layer=LayerSpec(sliding_windows=(0, 127))), torch.device("cuda"))


def test_only_gemmas_embedding_has_a_rounded_scale(tmp_path, gpu_dtypes):
    """It was trained in bfloat16 with it; Granite's model multiplies by the number itself."""
    for name, options, scale in (
        ("gemma3", GEMMA3 | {"hidden": 60}, torch.tensor(60**0.5, dtype=torch.bfloat16).item()),
        ("granite", GRANITE, 6 / 0.22),
    ):
        folder = make(tmp_path / name, **options)
        model = Model(read(folder, dtype=torch.bfloat16, device="cpu", random=0))
        assert model.embed_scale == scale and (name == "gemma3") == (scale != model.config.embed_scale)


NORM, LINEAR = "_residual_merge_kernel", "_row_linear_kernel"
PROJECT, ATTEND = "_kv_project_kernel", "_tree_attention_kernel"
ON_GPU = {  # the kernels of a layer, then of the last sum
    "llama": ({"arch": "llama"}, [NORM, PROJECT, ATTEND, LINEAR, NORM, LINEAR, LINEAR], [NORM]),
    "gemma3": (
        {**GEMMA3, "sliding_window": 256},
        [NORM, PROJECT, ATTEND, LINEAR, NORM, NORM, LINEAR, LINEAR, NORM],
        [NORM],
    ),
    "olmo2": (
        {"arch": "olmo2"},
        [LINEAR, "_kv_calibrate_kernel", ATTEND, LINEAR, NORM, LINEAR, LINEAR, NORM],
        [NORM],
    ),
}


ROUTE, EXPERT = "_expert_route_kernel", "_expert_linear_kernel"
ON_GPU["mixtral"] = (  # the router's partials are added by expert_route, the down projections' by the next norm
    MIXTRAL,
    [NORM, PROJECT, ATTEND, LINEAR, NORM, LINEAR, ROUTE, EXPERT, EXPERT],
    [NORM],
)


ON_GPU["gpt-oss"] = ({**GPT_OSS, "sliding_window": 256}, *ON_GPU["mixtral"][1:])


def launched(tmp_path, **options):
    """The kernels of a pass of three rows through all layers, as on a GPU."""
    folder = make(tmp_path, max_context=512, **options)
    model = Model(read(folder, dtype=torch.bfloat16, device="cpu", random=0, pack=False))
    with recording() as log, torch.inference_mode():
        cache = KVCache(model.config, 512, dtype=torch.bfloat16, device="cpu")
        x = model.embed_tokens(torch.zeros(3, dtype=torch.int64))
        log.clear()
        forward(model, cache, cache.after([300], [3]), x)
    return kernels(log)


@pytest.mark.parametrize("kind", ON_GPU)
def test_the_kernels_of_a_layer_on_a_gpu(tmp_path, gpu_dtypes, kind):
    """Norms of outputs are launches of their own, and only layers with a window have its kernel."""
    options, layer, end = ON_GPU[kind]
    names = launched(tmp_path, layers=3, **options)
    assert [name.partition(":")[0] for name in names] == 3 * layer + end
    reaches = [name.partition(" reach ")[2] for name in names if name.startswith(ATTEND)]
    assert [reach.partition(" ")[0] for reach in reaches] == (
        ["256", "", "256"] if kind in ("gemma3", "gpt-oss") else ["", "", ""]
    )
    assert all((" sinks " in name) == (kind == "gpt-oss") for name in names if name.startswith(ATTEND))


@pytest.mark.parametrize("kind", [LFM2, QWEN3_5])
def test_a_recurrent_layer_mixes_in_five_launches_on_a_gpu(tmp_path, gpu_dtypes, kind):
    """One product computes q, k, v and all gates of a gated delta net."""
    names = [name.partition(":")[0] for name in launched(tmp_path, **kind)]
    delta = ["_delta_rows_kernel"] * (kind is QWEN3_5)
    assert names[: 7 + len(delta)] == [NORM, LINEAR, "_conv_rows_kernel", *delta, LINEAR, NORM, LINEAR, LINEAR]


@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_a_chunk_of_a_quantised_prompt_takes_few_launches_on_a_gpu(tmp_path, gpu_dtypes, quantize):
    """Its matrices stay in the kernels: restored in memory for cuBLAS, each would take some ten launches."""
    folder = make(tmp_path, "llama", layers=3, max_context=1024, hidden=128, heads=8)
    model = Model(read(folder, dtype=torch.bfloat16, device="cpu", random=0, quantize=quantize, pack=False))
    with recording() as log, torch.inference_mode():
        cache = KVCache(model.config, 1024, dtype=torch.bfloat16, device="cpu")
        log.clear()
        prefill(model, cache, [3] * 512)
    products = [name for name, *_ in log if name.startswith(LINEAR)]
    assert len(products) == 3 * 4 and len(log) < 3 * 20


def test_a_rope_of_its_own_for_each_kind_changes_the_text(tmp_path):
    """The conformance table would pass if both kinds had the same."""
    folder, texts = make(tmp_path, **ARCHITECTURES["gemma3"]), []
    for change in ({}, {"rope_parameters": dict.fromkeys((SLIDING, FULL), GEMMA3["rope"][FULL])}):
        edit(folder, **change)
        texts.append(specker.load(folder, strategy="ar", dtype="float64").generate(PROMPT, max_new_tokens=14).tokens)
    assert texts[0] != texts[1]


def test_a_spec_names_each_layer():
    layer = LayerSpec(sliding_windows=(4, 0), ropes=(1, 0))
    assert [layer.sliding_window(0), layer.sliding_window(1), layer.rope(0), layer.rope(1)] == [4, 0, 1, 0]
    assert (LayerSpec().sliding_window(7), LayerSpec().rope(7)) == (0, 0)
