import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from make_checkpoint import (
    CASES,
    FULL,
    GEMMA3,
    GEMMA4,
    GEMMA4_MIXED,
    GEMMA4_PLE,
    GEMMA4_SHARED,
    GRANITE,
    LLAMA3,
    LLAMA4,
    LONGROPE,
    OLMO3,
    PHI4,
    edit,
    make,
    oracle,
)
from safetensors.torch import load_file, save_file

from specker.checkpoints.architectures import ARCHITECTURES
from specker.checkpoints.checkpoint import Checkpoint, opened, read, read_config
from specker.checkpoints.files import folder_of
from specker.checkpoints.numbers import FIELDS
from specker.checkpoints.parse import parse_config
from specker.model.config import CheckpointError
from specker.model.split import Part

NAMES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "dream": "DreamModel"}
NAMES |= {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "smollm3": "SmolLM3ForCausalLM"}
NAMES |= {f"gemma{n}": f"Gemma{n}ForCausalLM" for n in (2, 3, 4)}
NAMES |= {"olmo2": "Olmo2ForCausalLM", "mimo": "MiMoForCausalLM"}
NAMES |= {"granite": "GraniteForCausalLM", "phi3": "Phi3ForCausalLM"}
NAMES |= {"ministral": "MinistralForCausalLM", "ministral3": "Ministral3ForCausalLM"}
NAMES |= {"qwen3_5": "Qwen3_5ForCausalLM", "qwen3_5_moe": "Qwen3_5MoeForCausalLM"}
NAMES |= {"qwen3_next": "Qwen3NextForCausalLM", "lfm2": "Lfm2ForCausalLM", "olmo3": "Olmo3ForCausalLM"}
NAMES |= {"lfm2_moe": "Lfm2MoeForCausalLM"}
NAMES |= {"gpt_oss": "GptOssForCausalLM"}
NAMES |= {"mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
LONGROPE_WHOLE = {**LONGROPE, "partial_rotary_factor": 1.0, "short_factor": [1.5] * 8, "long_factor": [4.0] * 8}


def read_here(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    max_context: int | None = None,
    bidirectional: bool | None = None,
    **options: Any,
) -> Checkpoint:
    found = opened(folder, max_context=max_context, bidirectional=bidirectional)
    return read(found, dtype=dtype, device="cpu", **options)


def tensors(ck: Checkpoint) -> dict[str, torch.Tensor]:
    """Every weight, layers stacked."""
    values = {n: torch.stack(v) if isinstance(v, list) else v for n, v in vars(ck.weights).items()}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


# --- what is read -----------------------------------------------------------------------------------------------------


UNLIKE = "qwen3_5", "qwen3_5_moe", "qwen3_next", "lfm2", "lfm2_moe", "gemma4", "gpt_oss"
ALIKE = [case for case in CASES if case[1].get("arch") not in UNLIKE]


@pytest.mark.parametrize(("name", "options"), ALIKE, ids=[name for name, _ in ALIKE])  # of layers of one kind
def test_weights_equal_transformers(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    folder = make(tmp_path, **options)
    ck, model = read_here(folder), oracle(folder)
    c, w, state = ck.config, ck.weights, model.state_dict()
    used = set()

    def stack(*parts: str) -> torch.Tensor | None:
        """The fused pieces of all layers, from transformers' names; None where it has no such parameter."""
        names = [[f"model.layers.{i}.{part}" for part in parts] for i in range(c.num_layers)]
        if names[0][0] not in state:
            return None
        used.update(name for layer in names for name in layer)
        return torch.stack([torch.cat([state[name] for name in layer]) for layer in names])

    def same(got: torch.Tensor | list[torch.Tensor] | None, want: torch.Tensor | None) -> None:
        assert (got is None) == (want is None)
        got = torch.stack(got) if isinstance(got, list) else got
        assert got is None or (got.is_contiguous() and got.dtype == torch.float32 and torch.equal(got, want))

    arch, factors = options.get("arch", "llama"), options if options.get("arch") == "granite" else {}
    apart = arch != "phi3"
    for field, suffix in (("", "weight"), ("_bias", "bias")):
        qkv = stack(*(f"self_attn.{x}_proj.{suffix}" for x in ("q", "k", "v"))) if apart else None
        if not apart and (qkv := stack(f"self_attn.qkv_proj.{suffix}")) is not None and name == "phi4-mini":
            halves = [*range(6), 12, 13, *range(6, 12), 14, 15]  # 12 dimensions rotate, the others end the halves
            order = [16 * head + i for head in range(6) for i in halves]  # four heads of q, two of k
            qkv = torch.cat((qkv[:, order], qkv[:, 96:]), 1)
        same(getattr(w, "qkv" + field), qkv)
        same(getattr(w, "o" + field), stack(f"self_attn.o_proj.{suffix}"))
        if c.layer.experts is None:
            gate_up = ("gate_proj", "up_proj") if apart else ("gate_up_proj",)
            same(getattr(w, "gate_up" + field), stack(*(f"mlp.{name}.{suffix}" for name in gate_up)))
            same(getattr(w, "down" + field), stack(f"mlp.down_proj.{suffix}"))
    if c.layer.experts is not None:
        used |= _same_experts(c, w, state)
        own, theirs = c.layer.experts, model.config
        assert (own.count, own.chosen) == (theirs.num_experts, theirs.num_experts_per_tok)
        assert own.normalised == getattr(theirs, "norm_topk_prob", True)

    def same_norm(got: torch.Tensor | None, name: str) -> None:
        want = stack(f"{name}.weight")
        same(got, None if want is None else want + ("gemma" in arch))

    after = "post_attention_layernorm" if arch in ("gemma2", "gemma3", "olmo2", "olmo3") else ""
    before = dict.fromkeys(("gemma2", "gemma3"), "pre_feedforward_layernorm") | {"olmo2": "", "olmo3": ""}
    before = before.get(arch, "post_attention_layernorm")
    same_norm(w.q_norm, "self_attn.q_norm")
    same_norm(w.k_norm, "self_attn.k_norm")
    same_norm(w.norm_in, "input_layernorm")
    same_norm(w.norm_o, after)
    same_norm(w.norm_post, before)
    same_norm(w.norm_down, "post_feedforward_layernorm")
    same(w.embed, state["model.embed_tokens.weight"])
    same(w.norm, (state["model.norm.weight"] + ("gemma" in arch)) * (1 / factors.get("logits_scaling", 1)))
    same(w.head, state["lm_head.weight"])
    assert state.keys() - used == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert (w.head is w.embed) == c.tied == options.get("tied", False)
    rotary, hf = model.model.rotary_emb, model.config
    for n in range(c.num_layers):  # RoPE and the window of each layer
        kind = f"{hf.layer_types[n]}_" if arch in ("gemma3", "olmo3") else ""
        rotates = arch != "smollm3" or bool(hf.no_rope_layers[n])
        rope = w.ropes[c.layer.rope(n)]
        freq, scale = getattr(rotary, f"{kind}inv_freq") * rotates, getattr(rotary, f"{kind}attention_scaling")
        if name == "phi4-mini":  # of a head's 8 pairs 6 rotate
            same(rope.inv_freq, torch.cat((freq, torch.zeros(2))))
            same(rope.scale, torch.tensor([scale] * 6 + [1.0] * 2))
        else:
            same(rope.inv_freq, freq)
            assert rope.scale == scale
        window = getattr(model.model.layers[n].self_attn, "sliding_window", None)
        window = hf.sliding_window if arch in ("mistral", "mixtral", "ministral3", "phi3") else window
        assert c.layer.sliding_window(n) == (window if (window or 256) < 256 else 0)
    assert len(w.ropes) == 1 + (arch == "smollm3" or len(set(c.layer.ropes)) == 2)

    assert c.architecture == NAMES[arch]
    assert (c.layer.qkv_bias, c.layer.o_bias) == (w.qkv_bias is not None, w.o_bias is not None)
    assert c.layer.mlp_bias == (w.gate_up_bias is not None) == (w.down_bias is not None)
    whole, head = ("olmo2", "olmo3"), ("qwen3", "qwen3_moe", "gemma3")
    assert c.layer.qk_norm == ("projection" if arch in whole else "head" if arch in head else "")
    assert c.layer.norms == ("after" if arch in whole else "both" if "gemma" in arch else "before")
    gemma = options.get("query_pre_attn_scalar", 256) ** -0.5 if "gemma" in arch else None
    assert c.layer.scale == factors.get("attention_multiplier", gemma)
    assert c.embed_scale == (8 if "gemma" in arch else 6 / 0.22 if factors else 1)
    assert (c.residual_scale, c.logits_scale) == ((0.22, 1 / options["logits_scaling"]) if factors else (1, 1))
    assert (c.causal, c.shifted_logits) == (arch != "dream", True)
    assert c.mask_token_id == (127 if arch == "dream" else None)
    assert (c.vocab_size, c.hidden_size, c.num_layers) == (hf.vocab_size, hf.hidden_size, hf.num_hidden_layers)
    assert (c.num_heads, c.num_kv_heads) == (hf.num_attention_heads, hf.num_key_value_heads)
    assert c.head_dim == model.model.layers[0].self_attn.head_dim
    assert (c.intermediate_size, c.rms_norm_eps) == (hf.intermediate_size, hf.rms_norm_eps / c.residual_scale**2)
    assert c.max_context == 256
    assert read_config(folder) == c


def _same_experts(c: Any, w: Any, state: dict[str, torch.Tensor]) -> set[str]:
    """Compare each layer's router and experts, or its ordinary feed-forward. Returns transformers' names."""
    used = set()
    for n in range(c.num_layers):
        sparse = f"model.layers.{n}.mlp.gate.weight" in state
        assert (c.layer.mixture(n) is not None) == sparse
        parts = ("gate.weight",), ("experts.gate_up_proj",), ("experts.down_proj",)
        dense = (), ("gate_proj.weight", "up_proj.weight"), ("down_proj.weight",)
        for got, names in zip((w.router, w.gate_up, w.down), parts if sparse else dense, strict=True):
            names = [f"model.layers.{n}.mlp.{name}" for name in names]
            if not names:
                assert got[n] is None
                continue
            want = torch.cat([state[name] for name in names])
            assert torch.equal(got[n], want.reshape(-1, want.shape[-1])) and got[n].is_contiguous()
            used.update(names)
    return used


def test_cases_cover_every_architecture() -> None:
    assert {NAMES[options.get("arch", "llama")] for _, options in CASES} == set(ARCHITECTURES)


def test_sharded_equals_single(tmp_path: Path) -> None:
    one = make(tmp_path / "one", "qwen3", layers=4)
    many = make(tmp_path / "many", "qwen3", layers=4, shards=4)
    assert len(list(many.glob("*.safetensors"))) >= 4
    a, b = tensors(read_here(one)), tensors(read_here(many))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(tmp_path: Path, stored: torch.dtype) -> None:
    folder = make(tmp_path, "qwen2", dtype=stored)
    state = load_file(folder / "model.safetensors")
    gate, up = (torch.stack([state[f"model.layers.{i}.mlp.{x}_proj.weight"] for i in range(3)]) for x in ("gate", "up"))
    for run in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        ck = read_here(folder, run)
        assert torch.equal(tensors(ck)["gate_up"], torch.cat([gate, up], 1).to(run))
        assert torch.equal(ck.weights.embed, state["model.embed_tokens.weight"].to(run))
        vectors = torch.float32 if run == torch.bfloat16 else run  # a CPU computes in float32 beside bfloat16 matrices
        for name, t in tensors(ck).items():
            assert t.dtype == (run if name in ("embed", "head", "qkv", "o", "gate_up", "down") else vectors), name
        assert ck.weights.ropes[0].inv_freq.dtype == torch.float32


def test_chunked_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor larger than a chunk with a partial last chunk, and rows larger than a chunk."""
    want = tensors(read_here(make(tmp_path)))
    for chunk in (64 * 5, 7):
        monkeypatch.setattr("specker.checkpoints.buffers.CHUNK", chunk)
        got = tensors(read_here(tmp_path))
        assert all(torch.equal(got[name], want[name]) for name in want)


MEMORY = """
import sys, threading, time
import specker.checkpoints.buffers as buffers
import specker.checkpoints.checkpoint as checkpoint
assert not {"transformers", "huggingface_hub", "safetensors"} & sys.modules.keys(), "imports must be lazy"
import torch
torch.set_num_threads(1)

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

peaks = []
def watch():
    while running:
        peaks.append(anonymous())
        time.sleep(0.0005)

plain_copy = buffers._copy
def copy(target, source):
    plain_copy(target, source)
    peaks.append(anonymous())
buffers._copy = copy

tiny, *runs = sys.argv[1:]
checkpoint.read(tiny, dtype=torch.float32, device="cpu")  # what is imported on use is not the weights' memory
for run in runs:
    folder, name = run.rsplit(":", 1)
    running, peaks, before = True, [], anonymous()
    watcher = threading.Thread(target=watch)
    watcher.start()
    ck = checkpoint.read(folder, dtype=getattr(torch, name), device="cpu")
    size = sum({id(t): t.nbytes for t in vars(ck.weights).values() if isinstance(t, torch.Tensor)}.values())
    running = False
    watcher.join()
    print(size, max(peaks) - before)
    del ck
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_stays_below_one_copy(tmp_path: Path) -> None:
    """Anonymous memory while loading < 1.15 x the weights in the run's dtype, without the mapped file."""
    big: dict[str, Any] = {"layers": 6, "hidden": 512, "heads": 8, "head_dim": 64, "ffn": 2304, "vocab": 8000}
    single = make(tmp_path / "single", dtype=torch.bfloat16, **big)
    wide = make(tmp_path / "wide", dtype=torch.float32, shards=2, **big)
    runs = [f"{single}:bfloat16", f"{single}:float32", f"{wide}:float32", f"{wide}:bfloat16"]
    command = [sys.executable, "-c", MEMORY, str(make(tmp_path / "tiny")), *runs]
    root = Path(__file__).resolve().parents[2]
    # With a fixed threshold glibc returns every large block at once, so a run cannot reuse memory freed by another.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for run, line in zip(runs, done.stdout.splitlines(), strict=True):
        size, peak = map(int, line.split())
        assert size > 50e6
        assert 0.9 * size < peak < 1.15 * size, f"{run.rsplit('/')[-1]}: {peak / size:.2f} x the weights"


@pytest.mark.gpu
@pytest.mark.parametrize("arch", sorted(NAMES))
def test_cuda_equals_cpu(tmp_path: Path, arch: str) -> None:
    folder = make(tmp_path, arch, layers=2)
    for dtype in (torch.float32, torch.bfloat16):
        cpu, cuda = tensors(read_here(folder, dtype)), tensors(read(folder, dtype=dtype, device="cuda"))
        assert cpu.keys() == cuda.keys()
        assert all(cuda[name].is_cuda and torch.equal(cuda[name].cpu(), cpu[name]) for name in cpu)


def test_llama3_scaling_is_in_the_frequencies(tmp_path: Path) -> None:
    scaled = read_here(make(tmp_path / "a", rope=LLAMA3)).weights.ropes[0].inv_freq
    ratio = scaled / read_here(make(tmp_path / "b")).weights.ropes[0].inv_freq
    assert ratio[0] == 1 and ratio[-1] == pytest.approx(1 / 8) and ((ratio > 0.13) & (ratio < 0.99)).any()
    outside = {"original_max_position_embeddings": 64}  # of RoPE's parameters, where it counts more
    edit(tmp_path / "a", rope_parameters=LLAMA3 | {"original_max_position_embeddings": 256}, **outside)
    assert torch.equal(read_here(tmp_path / "a").weights.ropes[0].inv_freq, scaled)


def test_names_without_prefix_and_known_extras(tmp_path: Path) -> None:
    """A base model's names, rotary buffers of old checkpoints, and a copy of a tied head are accepted."""
    want = tensors(read_here(make(tmp_path / "full", tied=True)))
    folder = make(tmp_path / "base", tied=True, prefix=False)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaModel"]
    rewrite(folder, lambda s: s.update({"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    rewrite(folder, lambda s: s.update({"lm_head.weight": s["embed_tokens.weight"].clone()}))
    got = tensors(read_here(folder))
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_bidirectional(tmp_path: Path, arch: str) -> None:
    folder = make(tmp_path, arch, mask=5)
    plain = read_config(folder)
    assert (plain.causal, plain.shifted_logits, plain.mask_token_id) == (True, True, 5)
    masked = read_here(folder, bidirectional=True).config
    assert (masked.causal, masked.shifted_logits, masked.mask_token_id) == (False, False, 5)
    edit(folder, shifted_logits=True)
    assert opened(folder, bidirectional=True).config.shifted_logits
    edit(folder, shifted_logits="yes")
    with pytest.raises(CheckpointError, match=r"shifted_logits of config.json must be true or false, got 'yes'"):
        opened(folder, bidirectional=True)


def test_dream_is_bidirectional_and_shifted_whether_asked_or_not(tmp_path: Path) -> None:
    folder = make(tmp_path, "dream", mask=0)
    assert opened(folder, bidirectional=True).config == read_config(folder)
    c = read_config(folder)
    assert (c.causal, c.shifted_logits, c.mask_token_id) == (False, True, 0)


WINDOWS: list[dict[str, Any]] = [
    {"arch": "mistral", "sliding_window": 100},
    {"arch": "qwen2", "use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1},
    {"arch": "qwen3", "use_sliding_window": True, "sliding_window": 100, "layer_types": ["sliding_attention"] * 3},
]


@pytest.mark.parametrize("options", WINDOWS, ids=lambda options: options["arch"])
def test_sliding_window(tmp_path: Path, options: dict[str, Any]) -> None:
    """Within its window, sliding-window attention is full attention."""
    folder = make(tmp_path, **options)
    within = read_here(folder, max_context=100).config
    assert within.max_context == 100 and within.layer.sliding_windows == ()
    assert read_here(folder, max_context=101).config.layer.sliding_windows == (options["arch"] != "qwen2") * (100,) + (
        (0, 100, 100) if options["arch"] == "qwen2" else (100, 100)
    )


def test_a_mistral_with_layer_types_is_a_ministral(tmp_path: Path) -> None:
    """As AutoModel reads it."""
    folder = make(tmp_path, "mistral", sliding_window=12)
    assert read_config(folder).layer.sliding_windows == (12, 12, 12)
    edit(folder, layer_types=["full_attention", "sliding_attention", "full_attention"])
    assert read_config(folder).layer.sliding_windows == (0, 12, 0)
    assert type(oracle(folder)).__name__ == "MinistralForCausalLM"


@pytest.mark.parametrize("options", WINDOWS[1:], ids=lambda options: options["arch"])
def test_a_bidirectional_drafter_has_no_window(tmp_path: Path, options: dict[str, Any]) -> None:
    folder = make(tmp_path, **options, mask=5)
    assert not read_here(folder, max_context=100, bidirectional=True).config.causal
    with pytest.raises(CheckpointError, match=r"window of 100, which a bidirectional .*; use max_context=100 or less"):
        read_here(folder, max_context=101, bidirectional=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping 50\.0 is not supported; Gemma 3's scores"),
        ({"attn_logit_softcapping": 0.0}, r"attn_logit_softcapping must be a positive float32, but .* has 0\.0"),
        ({"final_logit_softcapping": -30.0}, "final_logit_softcapping must be a positive float32"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported; Gemma must be causal"),
        ({"hidden_activation": "relu"}, "hidden_act 'relu' is not supported"),
        ({"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}, "Gemma3ForCond.* is not supp"),
    ],
)
def test_what_of_gemma_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    edit(make(tmp_path, **GEMMA3), **change)
    with pytest.raises(CheckpointError, match=message):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not supported"),
        (
            {"per_layer_config": {"3": {"head_dim": 64}}},
            "layer 3 of config.json has other heads than the full_att.* be",
        ),
        (
            {"per_layer_config": {"1": {"head_dim": 10**6}}},
            "head_dim must be a whole number .* for layer 1 has 1000000",
        ),
        (
            {"per_layer_config": {str(n): {"num_key_value_heads": 3} for n in (1, 3)}},
            "num_attention_heads 4 must be a multiple of .* 3",
        ),
        ({"per_layer_config": 7}, r"config\.json is not a valid Gemma4ForCausalLM config"),
        ({"final_logit_softcapping": 0.0}, "final_logit_softcapping must be a positive float32"),
        (
            {"rope_parameters": LLAMA3},
            "rope_parameters must have those of full_attention layers, but config.json lacks",
        ),
        ({"layer_types": ["sliding_attention"] * 3}, "is not a valid Gemma4ForCausalLM config|layer_types"),
    ],
)
def test_what_of_gemma_4_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    edit(make(tmp_path, **GEMMA4), **change)
    with pytest.raises(CheckpointError, match=message):
        read_config(tmp_path)


def test_the_text_of_a_multimodal_gemma_4(tmp_path: Path) -> None:
    """Its config is within text_config, its tensors are below model.language_model, and other parts are not read."""
    folder = make(tmp_path / "text", **GEMMA4)
    text = json.loads((folder / "config.json").read_text())
    tensors_of = load_file(folder / "model.safetensors")
    whole = tmp_path / "whole"
    whole.mkdir()
    kept = {name.replace("model.", "model.language_model.", 1): x for name, x in tensors_of.items()}
    for name in ("vision_tower.a", "audio_tower.b", "embed_vision.c", "embed_audio.d"):
        kept[f"model.{name}.weight"] = torch.ones(2)
    save_file(kept, whole / "model.safetensors")
    raw = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": text}
    (whole / "config.json").write_text(json.dumps(raw))
    ours, theirs = read_here(whole), read_here(folder)
    assert ours.config == theirs.config
    for name, x in vars(ours.weights).items():
        other = getattr(theirs.weights, name)
        each = list(zip(x, other, strict=True)) if isinstance(x, list) else [(x, other)]
        assert name == "ropes" or all(a is b or torch.equal(a, b) for a, b in each)


@pytest.mark.parametrize("shared", [6, 7, -1, 5])
def test_layers_that_read_earlier_k_and_v(tmp_path: Path, shared: int) -> None:
    edit(make(tmp_path, **GEMMA4_SHARED), num_kv_shared_layers=shared)
    with pytest.raises(CheckpointError, match=f"num_kv_shared_layers {shared} of 6 layers must leave one of each kind"):
        read_config(tmp_path)


def test_k_and_v_that_are_never_read(tmp_path: Path) -> None:
    """Published files have projections of K and V in layers that read those of others; only there they may be."""
    folder = make(tmp_path, **GEMMA4_SHARED)
    state, path = load_file(folder / "model.safetensors"), folder / "model.safetensors"
    more = {f"model.layers.{n}.self_attn.{name}.weight": torch.ones(3) for n in (3, 5) for name in ("k_proj", "v_norm")}
    save_file(state | more, path)
    w = read_here(folder).weights
    assert [len(qkv) for qkv in w.qkv] == [128, 256, 128, 128, 64, 128] and w.k_norm[3] is None
    save_file(state | {"model.layers.2.self_attn.v_norm.weight": torch.ones(16)}, path)
    with pytest.raises(CheckpointError, match=r"has model\.layers\.2\.self_attn\.v_norm\.weight, which Gemma4"):
        read_here(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size_per_layer_input": -4}, "hidden_size_per_layer_input must be a whole number from 1 to 1048576"),
        ({"vocab_size_per_layer_input": 127}, "vocab_size_per_layer_input 127 must be at least vocab_size 128"),
        (
            {"vocab_size_per_layer_input": 129},
            r"per_layer.weight has shape \(128, 96\), but config.json makes it \(129,",
        ),
        ({"hidden_size_per_layer_input": 0}, r"the checkpoint has model\..*per_layer.*, which Gemma4ForCausalLM with"),
    ],
)
def test_per_layer_embeddings_that_do_not_fit(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    edit(make(tmp_path, **GEMMA4_PLE), **change)
    with pytest.raises(CheckpointError, match=message):
        read_here(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": None}, "num_experts must be a whole number from 1 to 4096, but .* lacks it"),
        ({"top_k_experts": 7}, "top_k_experts 7 must be at most the number of experts, 6"),
        (
            {"moe_intermediate_size": 40},
            r"experts\.gate_up_proj has shape \(6, 64, 64\), but .* makes it \(6, 80, 64\)",
        ),
        (
            {"num_kv_shared_layers": 1, "use_double_wide_mlp": True},
            "use_double_wide_mlp is not supported beside enable",
        ),
        ({"enable_moe_block": False}, r"the checkpoint has model\.layers\.\d\.\S+, which Gemma4ForCausalLM with this"),
    ],
)
def test_experts_of_gemma_4_that_do_not_fit(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    edit(make(tmp_path, **GEMMA4_MIXED), **change)
    with pytest.raises(CheckpointError, match=message):
        read_here(tmp_path)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_the_table_of_per_layer_embeddings_stays_in_its_file(
    tmp_path: Path, quantize: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its dtype, mapped; memory need not hold it."""
    folder = make(tmp_path, dtype=torch.bfloat16, **GEMMA4_PLE)
    sizes: list[int] = []
    monkeypatch.setattr("specker.model.memory.check_weights", lambda name, size, elements, *_: sizes.append(elements))
    ck = read_here(folder, quantize=quantize)
    table = ck.weights.ple_table
    assert table is not None and table.dtype == torch.bfloat16 and ck.weights.ple_in.dtype == torch.float32
    spans = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    mapped = [line[0].split("-") for line in spans if line[-1] == str(folder / "model.safetensors")]
    assert any(int(a, 16) <= table.data_ptr() < int(b, 16) for a, b in mapped)
    state = load_file(folder / "model.safetensors")
    assert torch.equal(table, state["model.embed_tokens_per_layer.weight"])
    assert sizes == [sum(x.numel() for name, x in state.items() if "tokens_per_layer" not in name)]


def test_gemma_4_is_not_split(tmp_path: Path) -> None:
    config = read_config(make(tmp_path, **GEMMA4))
    with pytest.raises(CheckpointError, match="tp=2 cannot split the target: the layers of Gemma4ForCausalLM have un"):
        Part(0, 2).check(config)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (PHI4, "longrope changes all frequencies"),
        ({"arch": "ministral3", "rope": LLAMA4}, "llama_4_scaling_beta .*"),
        (
            {**OLMO3, "rope": OLMO3["rope"] | {FULL: {**LONGROPE_WHOLE, "original_max_position_embeddings": 256}}},
            "longrope changes all frequencies",
        ),
    ],
    ids=["phi3", "ministral3", "by-type"],
)
def test_a_context_in_which_positions_change_earlier_ones(tmp_path: Path, options: Any, what: str) -> None:
    """Up to it they decode; with 257 positions transformers would give the first 256 another K/V."""
    folder = make(tmp_path, **{**options, "max_context": 512})
    assert read_config(folder, max_context=256).max_context == 256
    for context in (None, 257):
        with pytest.raises(CheckpointError, match=f"{what} beyond 256 positions, .* use max_context=256 or less"):
            read_config(folder, max_context=context)


@pytest.mark.parametrize("change", [{"residual_multiplier": 0.0}, {"logits_scaling": -1.0}])
def test_factors_of_granite_are_positive(tmp_path: Path, change: dict[str, float]) -> None:
    edit(make(tmp_path, **GRANITE), **change)
    with pytest.raises(CheckpointError, match=f"{next(iter(change))} must be a positive float32, but config.json has"):
        read_config(tmp_path)


def test_a_rotated_part_of_heads_is_even(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.7}
    edit(make(tmp_path, "phi3"), rope_parameters=rope)
    with pytest.raises(CheckpointError, match=r"partial_rotary_factor 0\.7 of head_dim 16 must leave an even number"):
        read_config(tmp_path)


def test_old_gemma_files_have_two_bases(tmp_path: Path) -> None:
    """As transformers 4 wrote them: the local base, and the scaling of the global one, in keys of their own."""
    folder = make(tmp_path, **GEMMA3)
    scaling = {"rope_type": "linear", "factor": 8.0}
    edit(folder, rope_parameters=..., rope_theta=2e6, rope_local_base_freq=3e4, rope_scaling=scaling, layer_types=...)
    edit(folder, sliding_window_pattern=2)
    ck, powers = read_here(folder), torch.arange(0, 16, 2).double() / 16
    assert ck.config.layer.sliding_windows == (12, 0, 12) and ck.config.layer.ropes == (1, 0, 1)
    for rope, want in zip(ck.weights.ropes, (2e6**-powers / 8, 3e4**-powers), strict=True):
        torch.testing.assert_close(rope.inv_freq.double(), want, rtol=1e-6, atol=0)


def test_every_norm_of_gemma_is_read(tmp_path: Path) -> None:
    for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm", "self_attn.k_norm"):
        folder = make(tmp_path / name, **GEMMA3)
        rewrite(folder, lambda s, name=name: s.pop(f"model.layers.1.{name}.weight"))
        with pytest.raises(CheckpointError, match=rf"lacks model\.layers\.1\.{re.escape(name)}\.weight, which"):
            read_here(folder)
    folder = make(tmp_path / "olmo2", "olmo2")
    rewrite(folder, lambda s: s.update({"model.layers.0.input_layernorm.weight": torch.ones(64)}))
    with pytest.raises(CheckpointError, match=r"has model\.layers\.0\.input_layernorm\.weight, which Olmo2For"):
        read_here(folder)


def test_fused_matrices_are_split_and_quantised_by_their_parts(tmp_path: Path) -> None:
    """A rank's q, k and v, and gate and up, stand apart in the checkpoint's matrices."""
    from specker.model.split import Part

    folder = make(tmp_path, **PHI4)
    whole = tensors(read_here(folder))
    rows = [(0, 32), (64, 16), (96, 16)]  # of q, k and v: the first, those of a rank
    for rank in range(2):
        part = tensors(read_here(folder, part=Part(rank, 2)))
        qkv = [whole["qkv"][:, first + rank * each : first + (rank + 1) * each] for first, each in rows]
        assert torch.equal(part["qkv"], torch.cat(qkv, 1))
        both = [whole["gate_up"][:, first + rank * 48 : first + (rank + 1) * 48] for first in (0, 96)]
        assert torch.equal(part["gate_up"], torch.cat(both, 1))
    packed = read_here(folder, quantize="int8").weights.qkv[0]
    assert (packed.dequantised(torch.float32) - whole["qkv"][0]).abs().max() < 0.02


def test_norms_over_all_heads_are_not_split(tmp_path: Path) -> None:
    from specker.model.split import Part

    folder = make(tmp_path, "olmo2", kv_heads=4)
    with pytest.raises(CheckpointError, match="tp=2 cannot split the target: its norms of q and k are over all heads"):
        read_here(folder, part=Part(0, 2))


def test_a_window_that_no_layer_uses_is_accepted(tmp_path: Path) -> None:
    """Qwen2.5 checkpoints have sliding_window with use_sliding_window false; Llama ignores the key."""
    assert read_config(make(tmp_path / "a", "qwen2", sliding_window=100)).max_context == 256
    folder = make(tmp_path / "b", "qwen2", use_sliding_window=True, sliding_window=100, max_window_layers=3)
    assert read_config(folder).max_context == 256


def test_eos_ids_are_a_union(tmp_path: Path) -> None:
    folder = make(tmp_path, eos=7, tokenizer=True)
    edit(folder, "generation_config.json", eos_token_id=[9, 3, 9])
    c = read_config(folder)
    assert c.eos_ids == (3, 7, 9, 256)  # 256 is the tokenizer's <|end|>
    edit(folder, eos_token_id=[11, 12])
    (folder / "generation_config.json").unlink()
    assert read_config(folder).eos_ids == (11, 12, 256)
    table = {"300": {"content": "<|stop|>"}, "301": {"content": "<|other|>"}}
    edit(folder, "tokenizer_config.json", eos_token={"content": "<|stop|>"}, added_tokens_decoder=table)
    assert read_config(folder).eos_ids == (11, 12, 300)


def test_eos_ids_may_be_empty(tmp_path: Path) -> None:
    """transformers' Llama config defaults to 2 if the file has none."""
    folder = make(tmp_path)
    edit(folder, eos_token_id=...)
    assert read_config(folder).eos_ids == ()


@pytest.mark.parametrize("arch", ["llama", "qwen3", "dream"])
def test_tokenizer(tmp_path: Path, arch: str) -> None:
    ck = read_here(make(tmp_path, arch, tokenizer=True))
    text = "Naïve café, 3 tabs\t\n"
    ids = ck.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text.encode()) and ck.tokenizer.decode(ids) == text
    assert ck.tokenizer is ck.tokenizer and ck.tokenizer.eos_token_id == 256
    chat = ck.tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "user: hi\nassistant: "


def test_tokenizer_absent_or_broken(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer .*copy it there or pass token ids"):
        _ = read_here(make(tmp_path)).tokenizer
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"the tokenizer in .* cannot be read"):
        _ = read_here(tmp_path).tokenizer


# --- what is refused --------------------------------------------------------------------------------------------------


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Apply `change` to the tensors of model.safetensors."""
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")


SUPPORTED = ", ".join(ARCHITECTURES)
CONFIG_REFUSALS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [  # id, edits, options of read_config, message
    ("activation", {"hidden_act": "relu"}, {}, "hidden_act 'relu' is not supported; supported: silu, gelu, gelu_py"),
    (
        "gemma",
        {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"},
        {},
        f"architecture GemmaForCausalLM is not supported; supported: {SUPPORTED}",
    ),
    ("moe", {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"}, {}, "Qwen2MoeForCausalLM is not"),
    ("vision", {"architectures": ["Qwen2VLForConditionalGeneration"]}, {}, "Qwen2VLForConditionalGeneration is not"),
    ("classifier", {"architectures": ["LlamaForSequenceClassification"]}, {}, "LlamaForSequenceClassification is not"),
    ("type-mismatch", {"model_type": "qwen2"}, {}, "LlamaForCausalLM with model_type 'qwen2' is not supported"),
    (
        "no-names",
        {"architectures": ..., "model_type": "bert"},
        {},
        "architecture of model_type 'bert' is not supported",
    ),
    (
        "quantised",
        {"quantization_config": {"quant_method": "gptq", "bits": 3}},
        {},
        r"quantised weights \(gptq with 3 bits\) are not supported",
    ),
    ("heads", {"num_key_value_heads": 3}, {}, "num_attention_heads 4 must be a multiple of num_key_value_heads 3"),
    ("odd-head", {"head_dim": 3}, {}, "head_dim 3 positive and even"),
    ("types", {"hidden_size": "large"}, {}, "hidden_size must be a whole number from 1 to .*, but .*json has 'large'"),
    ("no layers", {"num_hidden_layers": 0}, {}, "num_hidden_layers must be .* from 1 to .*, but .*json has 0"),
    ("fewer layers", {"num_hidden_layers": -1}, {}, "num_hidden_layers must be .* from 1 to .*, but .*json has -1"),
    ("no size", {"hidden_size": ...}, {}, "hidden_size must be a whole number from 1 to 1048576, but .*json lacks it"),
    ("a fraction", {"num_key_value_heads": 1.5}, {}, "num_key_value_heads must be .*, but .*json has 1.5"),
    ("context-long", {}, {"max_context": 257}, "between 1 and .*max_position_embeddings 256; got 257"),
    ("context-zero", {}, {"max_context": 0}, "between 1 and .*; got 0"),
    (
        "rope-dynamic",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        {},
        "rope type 'dynamic' is not supported; supported: default, linear, llama3, yarn, longrope",
    ),
    (
        "rope-dynamic-old-file",
        {"rope_parameters": ..., "rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {},
        "rope type 'dynamic' is not supported",
    ),
    ("rope-unknown", {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, {}, "rope type 'spiral' is not"),
    (
        "rope-partial",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {},
        "partial_rotary_factor 0.5 is not supported",
    ),
    (
        "rope-lacks-factor",
        {"rope_parameters": {k: v for k, v in LLAMA3.items() if k != "high_freq_factor"}},
        {},
        "config.json.*high_freq_factor",
    ),
    ("bidirectional", {"mask_token_id": 5}, {"bidirectional": True}, "LlamaForCausalLM cannot be bidirectional"),
    ("not-causal", {"is_causal": False}, {}, "says is_causal false, and as a target or draft LlamaForCausalLM must be"),
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    """A Llama checkpoint to break."""
    for path in llama.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    ("edits", "options", "message"), [row[1:] for row in CONFIG_REFUSALS], ids=[row[0] for row in CONFIG_REFUSALS]
)
def test_config_refusals(folder: Path, edits: dict[str, Any], options: dict[str, Any], message: str) -> None:
    edit(folder, **edits)
    with pytest.raises(CheckpointError, match=message) as caught:
        opened(folder, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("arch", ["qwen2", "dream"])
def test_a_diffusion_model_needs_a_mask_token(tmp_path: Path, arch: str) -> None:
    folder = make(tmp_path, arch)
    for mask in (None, 128, -1, "<mask>"):
        edit(folder, mask_token_id=mask)
        message = f"a bidirectional {NAMES[arch]} needs mask_token_id .*; it is {mask}"
        with pytest.raises(CheckpointError, match=message):
            read_here(folder, bidirectional=True)


def test_dream_cannot_be_causal(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="DreamModel is always bidirectional"):
        read_here(make(tmp_path, "dream"), bidirectional=False)


def test_layer_types(tmp_path: Path) -> None:
    edit(make(tmp_path, "qwen3"), layer_types=["full_attention", "chunked_attention", "full_attention"])
    with pytest.raises(
        CheckpointError,
        match="chunked_attention are not supported; only full_attention and sliding_at",
    ):
        read_here(tmp_path)
    edit(tmp_path, layer_types=["full_attention"] * 2)
    with pytest.raises(CheckpointError, match=r"not a valid Qwen3ForCausalLM config .*validate_layer_type"):
        read_here(tmp_path)
    edit(make(tmp_path / "smollm3", "smollm3"), no_rope_layers=[1, 1, 0, 0])
    with pytest.raises(CheckpointError, match="no_rope_layers must have an entry for each of the 3 layers"):
        read_here(tmp_path / "smollm3")
    rope = {"rope_type": "default", "rope_theta": 1e4}
    edit(tmp_path, layer_types=["full_attention"] * 3, rope_parameters={"full_attention": rope})
    with pytest.raises(CheckpointError, match=r"RoPE that differs by layer type \(full_attention\) is not supported"):
        read_here(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", None, "has no config.json; give a checkpoint's folder"),
        ("config.json", "{'a': 1}", "config.json is not valid JSON .*download it again"),
        ("config.json", "[]", "config.json must hold a JSON object"),
        ("model.safetensors", None, "has no model.safetensors and no model.safetensors.index.json"),
        ("model.safetensors", "", "model.safetensors is corrupt or truncated .*download it again"),
        ("model.safetensors", "version https://git-lfs.github.com/spec/v1\n" * 4, "corrupt or truncated"),
    ],
)
def test_broken_files(folder: Path, name: str, text: str | None, message: str) -> None:
    (folder / name).unlink()
    if text is not None:
        (folder / name).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_here(folder)


def test_truncated_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors is corrupt or truncated \(SafetensorError.*again"
    ) as caught:
        read_here(folder)
    assert "\n" not in str(caught.value)


def test_only_pytorch_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"has only pytorch_model.bin; convert it"):
        read_here(folder)


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "a/../../model.safetensors"])
def test_files_outside_of_the_folder_are_not_read(tmp_path: Path, name: str) -> None:
    make(tmp_path / "one", shards=2)
    make(tmp_path / "other")
    index = tmp_path / "one" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = name
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"names {re.escape(name)}, which is outside of the checkpoint's folder"):
        read_here(tmp_path / "one")


def test_index_that_does_not_match(tmp_path: Path) -> None:
    make(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00004.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"index.json names model-00002-of-00004.safetensors, which is not in"):
        read_here(tmp_path)
    edit(tmp_path, "model.safetensors.index.json", weight_map=...)
    with pytest.raises(CheckpointError, match="has no weight_map"):
        read_here(tmp_path)


Q = "model.layers.1.self_attn.q_proj.weight"
EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
TENSOR_REFUSALS: list[tuple[str, Callable[[dict[str, torch.Tensor]], Any], str]] = [
    ("missing", lambda s: s.pop(Q), f"lacks {Q}, which config.json requires"),
    ("missing-two", lambda s: (s.pop(Q), s.pop("model.norm.weight")), f"lacks {Q} and 1 more"),
    ("missing-head", lambda s: s.pop(HEAD), f"lacks {HEAD}, .*or set tie_word_embeddings"),
    ("shape", lambda s: s.update({Q: torch.zeros(64, 63)}), rf"{Q} has shape \(64, 63\), .* makes it \(64, 64\);"),
    ("dims", lambda s: s.update({Q: torch.zeros(64)}), rf"{Q} has shape \(64,\), .* makes it \(64, 64\);"),
    (
        "vocab",
        lambda s: s.update({EMBED: torch.zeros(130, 64)}),
        rf"{EMBED} has shape \(130, 64\), .*\(vocab_size 128\)",
    ),
    (
        "extra",
        lambda s: s.update({"model.x.bias": torch.zeros(1)}),
        "has model.x.bias, which LlamaForCausalLM .* not use",
    ),
    (
        "integer",
        lambda s: s.update({Q: s[Q].to(torch.int8)}),
        f"{Q} is stored as I8, but config.json names no quantisation",
    ),
]


@pytest.mark.parametrize(
    ("change", "message"), [row[1:] for row in TENSOR_REFUSALS], ids=[row[0] for row in TENSOR_REFUSALS]
)
def test_tensor_refusals(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any], message: str) -> None:
    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=message):
        read_here(folder)


def test_layers_and_biases_that_config_does_not_mention(folder: Path) -> None:
    edit(folder, num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=r"has model\.layers\.2\..* with this config.json does not use"):
        read_here(folder)
    edit(folder, num_hidden_layers=3, attention_bias=True)
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.0\.self_attn\.q_proj\.bias and 11 more"):
        read_here(folder)


def test_tied_head_that_differs(folder: Path) -> None:
    edit(folder, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from embed_tokens.weight .*set it to false"):
        read_here(folder)


def test_source_that_is_not_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for source in (tmp_path / "absent", str(tmp_path / "absent"), "no-such-folder", "a/b/c", tmp_path / "org" / "name"):
        with pytest.raises(
            CheckpointError, match=r"there is no folder .*; give a checkpoint's folder, a GGUF file or "
        ):
            read_config(source)
    with pytest.raises(CheckpointError, match=r"there is no file absent\.gguf; give "):
        read_config("absent.gguf")
    (tmp_path / "weights.bin").write_text("")
    with pytest.raises(CheckpointError, match=r"weights\.bin is a file; give a GGUF file, or the checkpoint's folder"):
        read_config(tmp_path / "weights.bin")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(
        CheckpointError, match="org/name is not a local folder and could not be downloaded from the hub"
    ) as caught:
        read("org/name", dtype=torch.float32, device="cpu")
    assert "\n" not in str(caught.value) and "check the name, the network" in str(caught.value)


def test_a_gguf_file_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only that file is downloaded, and then it is read as a local one is."""
    asked: list[tuple[str, str]] = []

    def download(repository: str, name: str) -> str:
        asked.append((repository, name))
        return str(tmp_path / Path(name).name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("specker.checkpoints.files.converted", lambda path: path.with_suffix(""))
    assert folder_of("org/name-GGUF/MTP/a-Q8_0.gguf", weights=True) == tmp_path / "a-Q8_0"
    assert asked == [("org/name-GGUF", "MTP/a-Q8_0.gguf")]
    monkeypatch.undo()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(CheckpointError, match=r"org/name/a\.gguf is not a local file and could not be downloaded from"):
        read_config("org/name/a.gguf")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()  # so it is a path
    with pytest.raises(CheckpointError, match=r"there is no file org/name/a\.gguf; give "):
        read_config("org/name/a.gguf")


def test_hub_download_takes_what_is_needed(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils import filter_repo_objects

    files = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt"]
    files += ["chat_template.jinja", "model.safetensors.index.json"]
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    rest = ["consolidated.safetensors", "original/model.safetensors", "onnx/config.json", "pytorch_model.bin", "a.gguf"]
    taken: list[list[str]] = []

    def download(name: str, **patterns: Any) -> str:
        assert name == "org/name"
        taken.append(list(filter_repo_objects(files + shards + rest, **patterns)))
        return str(llama)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert read_config("org/name") == read_config(llama)
    assert read("org/name", dtype=torch.float32, device="cpu").folder == llama
    assert taken == [files, files, files + shards]  # weights come after config.json and memory are checked


def test_dtype_and_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"dtype must be one of torch\.float32, .*; got torch\.int8"):
        read_here(folder, torch.int8)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(CheckpointError, match="device cuda needs a CUDA GPU, and torch finds none; use cpu"):
        read(folder, dtype=torch.float32, device="cuda")


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "olmo2", "smollm3"])
def test_defaults_are_those_of_transformers(tmp_path: Path, arch: str) -> None:
    """Of each field that config.json may lack, against the class that transformers has for the architecture."""
    make(tmp_path, arch.removesuffix("_text"))
    own = transformers.AutoConfig.for_model(arch).to_dict()
    optional = ("head_dim", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings")
    optional += ("attention_bias", "mlp_bias", "hidden_act", "sliding_window", "rope_parameters", "use_sliding_window")
    optional += ("layer_types", "no_rope_layers", "query_pre_attn_scalar", "hidden_activation")
    edit(tmp_path, **dict.fromkeys(optional, ...), **{name: own[name] for name in FIELDS if FIELDS[name].needed})
    context = min(own["max_position_embeddings"], own.get("sliding_window") or 1 << 30)
    config, ropes = parse_config(tmp_path, context, None)
    found = {
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "tie_word_embeddings": config.tied,
        "attention_bias": config.layer.o_bias,
        "mlp_bias": config.layer.mlp_bias,
        **{name: getattr(config, name) for name in ("head_dim", "vocab_size", "hidden_size")},
        **{name: getattr(config, name) for name in ("intermediate_size", "rms_norm_eps")},
    }
    absent = {"head_dim": own["hidden_size"] // own["num_attention_heads"], "attention_bias": False, "mlp_bias": False}
    assert found == {name: own.get(name, absent.get(name)) for name in found}
    assert config.max_context == context and config.layer.activation == ("gelu_tanh" if "gemma" in arch else "silu")
    assert config.layer.scale == (1 / 16 if "gemma" in arch else None)
    each = [own["rope_parameters"].get(kind) for kind in ("full_attention", "sliding_attention")]
    powers = torch.arange(0, config.head_dim, 2).double() / config.head_dim
    for rope, given in zip(ropes, each if all(each) else [own["rope_parameters"]] * len(ropes), strict=True):
        rotated = rope.inv_freq.any()  # SmolLM3's second table rotates nothing
        assert rope.scale == 1.0 and (rotated or arch == "smollm3")
        if rotated:
            torch.testing.assert_close(rope.inv_freq.double(), given["rope_theta"] ** -powers)
    kinds = own.get("layer_types")
    assert arch != "gemma3_text" or config.layer.ropes == tuple(int(kind == "sliding_attention") for kind in kinds)
    assert arch != "smollm3" or config.layer.ropes == tuple(1 - has for has in own["no_rope_layers"])
    edit(tmp_path, max_position_embeddings=...)
    with pytest.raises(CheckpointError, match=f"max_position_embeddings {own['max_position_embeddings']}; got"):
        parse_config(tmp_path, own["max_position_embeddings"] + 1, None)
