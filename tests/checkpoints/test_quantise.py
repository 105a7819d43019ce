"""--quantize: matrices rounded when a checkpoint is loaded, and every strategy on such a target."""

import json
from pathlib import Path

import cases
import pytest
import torch
from make_checkpoint import QWEN3_5, QWEN3_MOE, make, oracle

import specker
from specker.checkpoints.buffers import Storage
from specker.checkpoints.checkpoint import read, read_config
from specker.cpu.packed import Packed, of_quantised
from specker.kernels import quant
from specker.kernels.quant import Quantized
from specker.layer_weights import KINDS
from specker.model.config import CheckpointError
from specker.model.split import Part
from specker.options import QUANTIZE

SIZES = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 96, "layers": 3}
PROMPT = [5, 17, 80, 3, 41]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("target"), tied=True, **SIZES)


@pytest.fixture(scope="module")
def draft(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("draft"), seed=3, **SIZES | {"layers": 2})


def rounded(folder: Path, kind: str):
    """transformers' model with the rounded weights, in float64."""
    model = oracle(folder, torch.float32)
    head = model.lm_head.weight.detach().clone()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "proj" in name:
                p.copy_(quant.quantised(p, kind).dequantised(torch.float32))
    eight = "int8" if kind == "int4" else kind
    model.lm_head.weight = torch.nn.Parameter(quant.quantised(head, eight).dequantised(torch.float32))
    return model.double()


@pytest.mark.parametrize(("kind", "tied"), cases.diagonal(QUANTIZE[:3], [False, True]))
def test_tokens_are_those_of_transformers_with_the_rounded_weights(tmp_path, kind, tied):
    folder = make(tmp_path, tied=tied, **SIZES)
    model = rounded(folder, kind)
    want = model.generate(torch.tensor([PROMPT]), max_new_tokens=30, do_sample=False, eos_token_id=-1, pad_token_id=0)
    engine = specker.load(folder, strategy="ar", dtype="float64", quantize=kind, device="cpu")
    assert engine.target.quantised is None, "float64 has no kernels: the rounded weights are restored"
    want = want[0, len(PROMPT) :].tolist()
    assert engine.generate(PROMPT, 30).tokens == want
    exact = specker.load(folder, strategy="ar", dtype="float64", device="cpu")
    assert tied or exact.generate(PROMPT, 30).tokens != want, "rounding changed nothing: this proves little"


@pytest.mark.parametrize(("pack", "matrix"), [(True, Packed), (False, Quantized)])
@pytest.mark.parametrize("kind", QUANTIZE[:3])
def test_the_run_keeps_the_bits(target, kind, pack, matrix):
    kept = read(target, dtype=torch.float32, device="cpu", quantize=kind, pack=pack)
    exact = read(target, dtype=torch.float64, device="cpu", quantize=kind)
    w = kept.weights
    assert kept.quantised == ("int4 and int8" if kind == "int4" else kind) and exact.quantised is None
    assert isinstance(w.head, matrix) and isinstance(w.embed, torch.Tensor)
    for name in ("qkv", "o", "gate_up", "down"):
        for n in range(3):
            one = getattr(w, name)[n]
            assert isinstance(one, matrix) and one.kinds == {kind}
            assert torch.equal(one.dequantised(torch.float64), getattr(exact.weights, name)[n])
    assert torch.equal(w.head.dequantised(torch.float64), exact.weights.head)
    assert torch.equal(w.embed.double(), exact.weights.embed), "a tied embedding is not rounded"
    elements = sum(stack[0].numel() for stack in (w.qkv, w.o, w.gate_up, w.down)) * 3
    assert 0.6 * elements < kept.layer_bytes < 1.3 * elements


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_drafts_change_no_token_of_restored_weights(target, draft, kind):
    """The conformance table has what the kernels compute with rounded weights; float64 restores them."""
    both = {"dtype": "float64", "quantize": kind, "device": "cpu"}
    fast = specker.load(target, draft, strategy="draft", tree="3x3", draft_quantize=kind, **both)
    for how in ({}, {"temperature": 0.7, "seed": 1}):
        out = fast.generate(PROMPT, 14, **how)
        assert out.tokens == fast.generate_ar(PROMPT, 14, **how).tokens and out.stats.drafted > 0


def test_none_restores(target, tmp_path):
    whole = read(target, dtype=torch.float32, device="cpu", quantize="none")
    assert whole.quantised is None and torch.equal(
        whole.weights.qkv, read(target, dtype=torch.float32, device="cpu").weights.qkv
    )


def test_a_cpu_without_the_kernels_restores(target, monkeypatch):
    kept = read(target, dtype=torch.float32, device="cpu", quantize="int8")
    monkeypatch.setattr("specker.checkpoints.buffers.available", lambda: False)
    whole = read(target, dtype=torch.float32, device="cpu", quantize="int8")
    assert whole.quantised is None
    assert torch.equal(whole.weights.down[1], kept.weights.down[1].dequantised(torch.float32))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_random_weights_are_rounded_too(target, kind):
    ck = read(target, dtype=torch.float32, device="cpu", quantize=kind, random=0)
    assert ck.weights.gate_up[2].kinds == {kind} and ck.weights.norm.eq(1).all()
    assert 0.015 < ck.weights.gate_up[2].dequantised(torch.float32).std() < 0.025


def test_a_gpu_in_bfloat16_has_the_scales_of_int4_in_bfloat16(monkeypatch):
    monkeypatch.setattr(Quantized, "to", lambda self, device: self)  # no GPU is needed
    w, half, bf16 = quant.quantised(torch.randn(4, 64), "int4"), torch.float16, torch.bfloat16
    for device, dtype, scales in (("cuda", bf16, bf16), ("cuda", half, half), ("cpu", bf16, half)):
        stored = Storage(None, "int4", dtype, torch.device(device)).as_stored(w)
        assert stored.scale.dtype == stored.shift.dtype == scales


def own_format(folder: Path, source: Path, kind: str, group: int) -> Path:
    """`source` in specker's own format."""
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    tensors, modules = {}, {}
    for name, x in load_file(source / "model.safetensors").items():
        if "proj" in name:
            w, module = quant.quantised(x, kind, group), name.removesuffix(".weight")
            (run,) = of_quantised(w).runs
            tensors[f"{module}.packed"], modules[module] = run.data, run.format
        else:
            tensors[name] = x
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "specker", "modules": modules}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("kind", "group"), [("int4", 32), ("int4", 64), ("int8", 64), ("int8", 32)])
def test_the_parts_of_a_split_model_are_slices(tmp_path, kind, group):
    source = make(tmp_path / "source", **SIZES | {"ffn": 128})
    folder = own_format(tmp_path / "own", source, kind, group)
    whole = read(folder, dtype=torch.float64, device="cpu").weights
    for rank in range(2):
        part = read(folder, dtype=torch.float32, device="cpu", part=Part(rank, 2)).weights
        rows = torch.cat([torch.arange(64) + 64 * rank, torch.arange(64) + 128 + 64 * rank])
        assert torch.equal(part.gate_up[1].dequantised(torch.float64), whole.gate_up[1][rows])
        assert torch.equal(part.down[1].dequantised(torch.float64), whole.down[1][:, 64 * rank : 64 * rank + 64])


def test_groups_cannot_be_cut_by_ranks(target, tmp_path):
    folder = own_format(tmp_path / "own", target, "int4", 32)
    with pytest.raises(CheckpointError, match="has int4 weights, which cannot be split over so many ranks"):
        read(folder, dtype=torch.float32, device="cpu", part=Part(0, 2))


@pytest.mark.parametrize("requantised", [None, "int8", "none"])
def test_quantised_checkpoints_may_be_rounded_again(target, tmp_path, requantised):
    folder = own_format(tmp_path / "own", target, "int4", 32)
    stored = read(folder, dtype=torch.float32, device="cpu")
    assert (
        isinstance(stored.weights.o[0], Packed)
        and stored.quantised == "int4"
        and isinstance(stored.weights.head, torch.Tensor)
    )
    assert read_config(folder).hidden_size == 64
    got = read(folder, dtype=torch.float32, device="cpu", quantize=requantised)
    assert got.quantised == {None: "int4", "int8": "int8", "none": None}[requantised]
    want = stored.weights.o[0].dequantised(torch.float32)
    one = got.weights.o[0]
    one = one if isinstance(one, torch.Tensor) else one.dequantised(torch.float32)
    torch.testing.assert_close(one, want, atol=2e-3 if requantised == "int8" else 0, rtol=0)


@pytest.mark.parametrize("form", ["int3", ["int8", 20, "F16", False], None])
def test_a_damaged_own_format_is_refused(target, tmp_path, form):
    folder = own_format(tmp_path / "own", target, "int8", 32)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["modules"] = {"model.layers.0.mlp.up_proj": form}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"the quantization_config of .* is damaged; convert the checkpoint again"
    ):
        read(folder, dtype=torch.float32, device="cpu")


def test_sizes_that_cannot_be_rounded_are_named(tmp_path):
    folder = make(tmp_path, **SIZES | {"ffn": 80})
    with pytest.raises(CheckpointError, match=r"layers\.0.mlp.down_proj.weight cannot be quantised: int4 needs groups"):
        read(folder, dtype=torch.float32, device="cpu", quantize="int4")
    read(folder, dtype=torch.float32, device="cpu", quantize="int8")


@pytest.mark.parametrize("options", [QWEN3_5, QWEN3_MOE], ids=["gates", "router"])
def test_exact_matrices_are_not_rounded(tmp_path, options):
    """Those that decide what is read, or what is kept (`LayerWeights`)."""
    folder = make(tmp_path / "model", **options | {"hidden": 64})
    stored, rounded = (
        read(folder, dtype=torch.float32, device="cpu", quantize=kind).weights for kind in ("none", "int8")
    )
    exact = [name for name, kind in KINDS.items() if kind.product and not kind.quantisable]
    pairs = [(getattr(stored, name), getattr(rounded, name)) for name in exact if getattr(stored, name) is not None]
    assert pairs and not isinstance(rounded.qkv[0], torch.Tensor)
    for a, b in pairs:
        assert all(x is y is None or torch.equal(x, y) for x, y in zip(a, b, strict=True))
