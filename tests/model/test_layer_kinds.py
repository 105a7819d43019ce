"""Layers that compute other things than Llama's: their texts are those of transformers, by every way of decoding."""

from dataclasses import replace

import cases
import pytest
import torch
from make_checkpoint import (
    FULL,
    GEMMA2,
    GEMMA3,
    GEMMA4,
    GEMMA4_MIXED,
    GEMMA4_PLE,
    GEMMA4_SHARED,
    GEMMA4_WIDE,
    GEMMA4_WIDE_PLE,
    GPT_OSS,
    GRANITE,
    LFM2,
    LFM2_MOE,
    LONGROPE,
    MIXTRAL,
    OLMO3,
    PHI4,
    QWEN3_5,
    QWEN3_MOE,
    QWEN3_NEXT,
    SHORT,
    SLIDING,
    edit,
    exact_oracle,
    make,
    oracle,
    oracle_logits,
)
from pairs import perturbed
from recorded import kernels, recording

import specker
from specker.checkpoints.checkpoint import read
from specker.cpu import Packed
from specker.model.cache import KVCache
from specker.model.config import CheckpointError, LayerSpec
from specker.model.decoder import Model, check_sliding_windows, forward
from specker.model.prefill import prefill

GEMMA = GEMMA3 | {"layers": 4, "tied": False}  # a random tied model repeats its last token
KINDS = {  # the windows are shorter than the prompts, and than some drafts
    "geglu": {"arch": "llama", "layers": 4, "hidden_act": "gelu_pytorch_tanh"},
    "gemma2": GEMMA2 | {"layers": 4, "tied": False, "layer_types": [SLIDING, FULL, FULL, SLIDING]},
    "gemma3": GEMMA | {"layer_types": [SLIDING, FULL, FULL, SLIDING]},
    "gemma3-window-of-2": GEMMA | {"layer_types": [SLIDING, SLIDING, SLIDING, FULL], "sliding_window": 2},
    "gemma4-31b": GEMMA4 | {"tied": False},
    "gemma4-shared": GEMMA4_SHARED | {"tied": False},
    "gemma4-e2b": GEMMA4_PLE | {"tied": False},
    "gemma4-26b-a4b": GEMMA4_MIXED | {"tied": False},
    "mistral": {"arch": "mistral", "layers": 4, "sliding_window": 5},
    "qwen2": {"arch": "qwen2", "layers": 4, "max_window_layers": 1, **SHORT},
    "olmo2": {"arch": "olmo2", "layers": 4},
    "smollm3": {"arch": "smollm3", "layers": 4},
    "granite": GRANITE | {"layers": 4},
    "phi4-mini": PHI4 | {"layers": 4, "seed": 3},
    "ministral": {"arch": "ministral", "layers": 4, "sliding_window": 5, "layer_types": [SLIDING, FULL] * 2},
    "mixtral": {**MIXTRAL, "layers": 4, "sliding_window": 5},
    "qwen3-moe": {**QWEN3_MOE, "layers": 4, "mlp_only_layers": [2], "seed": 5},
    "qwen3.5": QWEN3_5,
    "qwen3-next": QWEN3_NEXT,
    "lfm2": LFM2 | {"layer_types": ["conv", "full_attention", "conv", "conv"], "layers": 4},
    "lfm2-moe": LFM2_MOE,
    "gpt-oss": GPT_OSS | {"layer_types": [SLIDING, FULL, FULL, SLIDING], "layers": 4},
    "olmo3": OLMO3 | {"layer_types": [SLIDING, FULL, SLIDING, SLIDING], "layers": 4},
}
HOW = {
    "chain": {"strategy": "draft", "draft_tokens": 4},
    "tree": {"strategy": "draft", "tree": "3x3"},
    "lookup": {"strategy": "lookup"},
    "exit": {"strategy": "del", "policy": "fixed", "exit_layer": 3, "draft_tokens": 3},
    "static": {"strategy": "draft", "tree": "3x3", "graphs": "on"},  # the device places the rows
}
PROMPT = [5, 9, 40, 77, 3, 8, 5, 9, 40, 21, 60, 2, 2, 18, 33, 70, 5, 9, 40]
OTHERS = [[7], [3, 4] * 20]  # in batches


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """kind -> (target, draft)."""
    made = {}
    for kind, options in KINDS.items():
        target = make(tmp_path_factory.mktemp(kind), max_context=160, **options)
        made[kind] = target, perturbed(target, tmp_path_factory.mktemp(f"{kind}-draft"), amount=0.05)
    return made


@pytest.fixture(scope="module")
def texts(pairs):
    """kind -> the texts of plain decoding after each prompt, made once."""
    known = {}

    def of(kind):
        if kind not in known:
            engine = specker.load(pairs[kind][0], strategy="ar", dtype="float64")
            known[kind] = [engine.generate(prompt, max_new_tokens=40).tokens for prompt in (PROMPT, *OTHERS)]
        return known[kind]

    return of


@pytest.mark.parametrize("kind", KINDS)
def test_plain_decoding_has_the_text_of_transformers(pairs, texts, kind, monkeypatch):
    """Each token is the best one of transformers' logits after the tokens before it."""
    exact_oracle(monkeypatch)
    model = oracle(pairs[kind][0], torch.float64)
    for prompt, text in zip((PROMPT, *OTHERS), texts(kind), strict=True):
        best = oracle_logits(model, torch.tensor(prompt + text))[len(prompt) - 1 : -1].argmax(-1)
        assert best.tolist() == text
        assert len(set(text)) > 3


@pytest.mark.parametrize(("kind", "how"), cases.one_in(5, KINDS, HOW))
def test_every_strategy_has_the_text_of_plain_decoding(pairs, texts, kind, how):
    target, draft = pairs[kind]
    side = draft if HOW[how]["strategy"] == "draft" else None
    one = specker.load(target, side, dtype="float64", page_size=16, **HOW[how])
    out = one.generate(PROMPT, max_new_tokens=14)
    assert out.tokens == texts(kind)[0][:14]
    assert 0 < out.stats.accepted < out.stats.drafted or how in ("lookup", "exit")
    three = specker.load(target, side, dtype="float64", page_size=16, batch_size=3, **HOW[how])
    outs = three.generate([PROMPT, *OTHERS], max_new_tokens=14)
    assert [out.tokens for out in outs] == [text[:14] for text in texts(kind)]


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_trees_too(pairs, kind):
    target, draft = pairs[kind]
    how = {"max_new_tokens": 12, "temperature": 0.8, "seed": 3}
    engine = specker.load(target, draft, strategy="draft", tree="3x3", dtype="float64")
    assert engine.generate(PROMPT, **how).tokens == engine.generate_ar(PROMPT, **how).tokens


GROUPS = {
    "gemma2": "[[0],[1,2],[3]]",
    "gemma3": "[[0],[1,2],[3]]",
    "gemma3-window-of-2": "[[0,1,2],[3]]",
    "qwen2": "2",
    "olmo2": "2",
}
GROUPS |= {"gpt-oss": "[[0],[1,2],[3]]", "mixtral": "2", "qwen3-moe": "[[0],[1,2],[3]]"}


@pytest.mark.parametrize("kind", GROUPS)
def test_layers_side_by_side(pairs, texts, kind):
    target, draft = pairs[kind]
    for shape in ({"draft_tokens": 4}, {"tree": "2x3", "batch_size": 3}):
        engine = specker.load(target, draft, "easyspec", dtype="float64", layer_parallel=GROUPS[kind], **shape)
        outs = engine.generate([PROMPT, *OTHERS], max_new_tokens=14)
        assert [out.tokens for out in outs] == [text[:14] for text in texts(kind)]
        assert sum(out.stats.accepted for out in outs) > 5


@pytest.mark.parametrize("kind", ["gemma3", "qwen2", "smollm3"])
def test_a_group_of_unlike_layers_is_refused(pairs, kind):
    target, draft = pairs[kind]
    with pytest.raises(ValueError, match=r"different sliding windows or RoPE side by side: .* layer_parallel groups"):
        specker.load(target, draft, "easyspec", dtype="float64", layer_parallel="[[0,1,2,3]]")


# The CPU's compiled layers

SIZES = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 96}
TWICE = {name: LONGROPE[name] * 2 for name in ("short_factor", "long_factor")}  # for heads twice as wide
OTHER_SIZES = {"phi4-mini": {"hidden": 128, "rope": LONGROPE | TWICE}}  # the head's width follows from hidden
OTHER_SIZES |= dict.fromkeys(("gemma4-31b", "gemma4-shared", "gemma4-26b-a4b"), GEMMA4_WIDE)
OTHER_SIZES["gemma4-e2b"] = GEMMA4_WIDE_PLE


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_layers_with_unlike_heads_are_not_side_by_side(tmp_path, quantize):
    target = make(tmp_path / "target", max_context=160, **KINDS["gemma4-31b"] | SIZES | GEMMA4_WIDE)
    how = {"dtype": "float32", "quantize": quantize, "draft_quantize": quantize}
    with pytest.raises(ValueError, match="EasySpec cannot run layers of Gemma4ForCausalLM side by side"):
        specker.load(target, target, "easyspec", layer_parallel="[[0],[1],[2,3]]", **how)


@pytest.mark.parametrize(("kind", "quantize"), [("31b", None), ("31b", "int8"), ("e2b", "int8"), ("26b-a4b", "int8")])
def test_what_is_not_compiled_runs_on_torch(pairs, kind, quantize):
    """Here heads of 16, for example. It says so, and drafts the text of plain decoding."""
    engine = specker.load(*pairs[f"gemma4-{kind}"], draft_tokens=4, dtype="float32", quantize=quantize)
    assert engine.model.stack is None and "take heads of a multiple of 32" in engine.remarks["cpu"]
    assert (engine.target.quantised == "int8") == (quantize is not None)
    out = engine.generate(PROMPT, 15)
    assert out.tokens == engine.generate_ar(PROMPT, 15).tokens and out.stats.accepted > 0


@pytest.mark.parametrize("how", [*HOW, "static exit"])
def test_per_layer_embeddings(pairs, texts, how):
    """Every way of placing rows hands each layer what it reads of their tokens."""
    target, draft = pairs["gemma4-e2b"]
    options = {**HOW["exit"], "graphs": "on"} if how == "static exit" else HOW[how]
    side = draft if options["strategy"] == "draft" else None
    engine = specker.load(target, side, dtype="float64", page_size=16, batch_size=3, **options)
    assert [out.tokens for out in engine.generate([PROMPT, *OTHERS], 14)] == [text[:14] for text in texts("gemma4-e2b")]
    sampled = {"max_new_tokens": 12, "temperature": 0.7, "seed": 3}
    assert engine.generate(PROMPT, **sampled).tokens == engine.generate_ar(PROMPT, **sampled).tokens


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_compiled(tmp_path, kind):
    folder = make(tmp_path / "target", max_context=160, **KINDS[kind] | SIZES | OTHER_SIZES.get(kind, {}))
    engine = specker.load(folder, strategy="lookup", device="cpu", dtype="float32")
    assert engine.model.stack is not None and "cpu" not in engine.remarks
    exact = specker.load(folder, strategy="ar", device="cpu", dtype="float64").generate(PROMPT, max_new_tokens=15)
    assert engine.generate(PROMPT, max_new_tokens=15).tokens == exact.tokens
    half = {"device": "cpu", "quantize": "int4"}
    draft = perturbed(folder, tmp_path / "draft", amount=0.05)
    fast = specker.load(folder, draft, strategy="draft", draft_quantize="int8", **half)
    assert fast.model.dtype == torch.float32 and all(isinstance(w, Packed) for w in fast.target.weights.qkv)
    assert fast.generate(PROMPT, 15).tokens == fast.generate_ar(PROMPT, 15).tokens


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", ["gemma4-e2b", "gemma4-26b-a4b"])
def test_compiled_layers_with_unlike_heads(tmp_path, kind, how):
    """A text has the same tokens alone, in a batch and drafted in any way."""
    options = HOW[how]
    folder = make(tmp_path / "target", max_context=160, **KINDS[kind] | SIZES | OTHER_SIZES[kind])
    draft = perturbed(folder, tmp_path / "draft", amount=0.05) if options["strategy"] == "draft" else None
    engine = specker.load(folder, draft, page_size=16, batch_size=3, quantize="int8", **options)
    plain = specker.load(folder, strategy="ar", quantize="int8", prefix_cache="off")
    assert engine.model.stack is not None
    for sampling in ({}, {"temperature": 0.7, "seed": 3}):
        texts = [plain.generate(prompt, 14, **sampling).tokens for prompt in (PROMPT, *OTHERS)]
        assert [out.tokens for out in engine.generate([PROMPT, *OTHERS], 14, **sampling)] == texts


@pytest.mark.parametrize("options", [{}, {"quantize": "int8"}, {"dtype": "float32", "batch_size": 3}], ids=str)
@pytest.mark.parametrize("kind", ["gemma3", "gemma4-31b", "gemma4-e2b"])
def test_a_draft_that_is_the_target_is_always_right(tmp_path, kind, options):
    """A chain drafted in one call has the bits of the verify pass, from the scaled embedding too; so has one of layers
    with unlike heads, which is drafted token by token."""
    folder = make(tmp_path, max_context=160, **KINDS[kind] | SIZES | OTHER_SIZES.get(kind, {}))
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
    folder = make(tmp_path, max_context=160, **KINDS["gemma2"] | SIZES)
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


def test_a_rope_of_its_own_for_each_kind_changes_the_text(pairs, texts, tmp_path):
    """The tests above would pass if both kinds had the same."""
    folder = make(tmp_path, max_context=160, **KINDS["gemma3"])
    same = dict.fromkeys((SLIDING, FULL), KINDS["gemma3"]["rope"][FULL])
    edit(folder, rope_parameters=same)
    changed = specker.load(folder, strategy="ar", dtype="float64").generate(PROMPT, max_new_tokens=14)
    assert changed.tokens != texts("gemma3")[0][:14]


def test_a_spec_names_each_layer():
    layer = LayerSpec(sliding_windows=(4, 0), ropes=(1, 0))
    assert [layer.sliding_window(0), layer.sliding_window(1), layer.rope(0), layer.rope(1)] == [4, 0, 1, 0]
    assert (LayerSpec().sliding_window(7), LayerSpec().rope(7)) == (0, 0)
