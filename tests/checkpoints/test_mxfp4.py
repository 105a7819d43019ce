"""MXFP4 experts in safetensors files: no bit is lost, and logits are those of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from make_checkpoint import QWEN3_MOE, edit, exact_oracle, make, oracle, oracle_logits
from safetensors.torch import load_file, save_file
from torch import Tensor

import specker
from specker.checkpoints.checkpoint import read
from specker.checkpoints.quantised.mxfp4 import halved
from specker.cpu import Packed
from specker.kernels.quant import Quantized
from specker.model.cache import KVCache
from specker.model.config import CheckpointError
from specker.model.decoder import Final, Model
from specker.model.prefill import prefill
from specker.model.split import Part

SIZES = {"hidden": 64, "heads": 6, "kv_heads": 6, "head_dim": 32, "vocab": 120, "layers": 2}
EXPERTS = "model.layers.{}.mlp.experts."
TEXT = [n * 7 % 120 for n in range(40)]


def drawn(X: int, O: int, E: int, seed: int) -> tuple[Tensor, Tensor]:
    """Blocks [X, O, E / 32, 16] and scales [X, O, E / 32] of weights of about 0.1."""
    by = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (X, O, E // 32, 16), dtype=torch.uint8, generator=by)
    return blocks, torch.randint(121, 124, (X, O, E // 32), dtype=torch.uint8, generator=by)


def formula(blocks: Tensor, scales: Tensor) -> Tensor:
    """The weights [X, O, E] in float32, by transformers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2).contiguous()


def with_mxfp4(folder: Path) -> dict[str, Tensor]:
    """Replace a mixture's experts by drawn ones in gpt-oss's tensors. Returns their weights by transformers' names."""
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    kept, expected = {name: x for name, x in tensors.items() if ".mlp.experts." not in name}, {}
    X, E, F = config["num_local_experts"], config["hidden_size"], config["moe_intermediate_size"]
    for layer in range(config["num_hidden_layers"]):
        for n, (name, O, I) in enumerate((("gate_up_proj", 2 * F, E), ("down_proj", E, F))):
            module = EXPERTS.format(layer) + name
            blocks, scales = drawn(X, O, I, seed=2 * layer + n)
            kept |= {f"{module}_blocks": blocks, f"{module}_scales": scales}
            expected[module] = formula(blocks, scales)
    save_file(kept, folder / "model.safetensors")
    edit(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return expected


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Tensor]]:
    """A Qwen3-MoE with MXFP4 experts, the plain one that it was made from, and the experts' weights."""
    folders = [tmp_path_factory.mktemp(name) for name in ("mxfp4", "plain")]
    for folder in folders:
        make(folder, **SIZES | QWEN3_MOE | {"moe_intermediate_size": 96})
    return *folders, with_mxfp4(folders[0])


def test_numbers_move_to_other_bytes() -> None:
    blocks, _ = drawn(1, 3, 64, 0)
    columns = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)  # [.., 32]
    got = halved(blocks)
    assert torch.equal(torch.cat((got & 15, got >> 4), -1), columns)


def test_the_weights_are_those_of_transformers(mixture: tuple[Path, Path, dict[str, Tensor]]) -> None:
    """Packed for the compiled layers and not, and those of a rank. No byte is added."""
    folder, _, expected = mixture
    for layer in range(2):
        gate_up, down = (expected[EXPERTS.format(layer) + name] for name in ("gate_up_proj", "down_proj"))
        F = down.shape[-1]
        for pack in (False, True):
            w = read(folder, dtype=torch.float32, device="cpu", pack=pack).weights
            for got, want in ((w.gate_up[layer], gate_up), (w.down[layer], down)):
                assert isinstance(got, Packed if pack else Quantized) and got.kinds == {"mxfp4"}
                assert torch.equal(got.dequantised(torch.float32), want.flatten(0, 1))
                assert got.nbytes == want.numel() * 17 // 32
        plain = read(folder, dtype=torch.float32, device="cpu", quantize="none").weights
        assert torch.equal(plain.gate_up[layer], gate_up.flatten(0, 1))
        last = read(folder, dtype=torch.float32, device="cpu", part=Part(2, 3), pack=False).weights
        want = gate_up.unflatten(1, (2, F))[:, :, 64:].flatten(0, 2)
        assert torch.equal(last.gate_up[layer].dequantised(torch.float32), want)
        assert torch.equal(last.down[layer].dequantised(torch.float32), down[..., 64:].flatten(0, 1))


def test_logits_are_those_of_transformers(
    mixture: tuple[Path, Path, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, and by the compiled layers with activations that are not rounded."""
    exact_oracle(monkeypatch)
    folder, plain, expected = mixture
    model = oracle(plain, torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in expected:
                p.copy_(expected[name])
        want = oracle_logits(model.double(), torch.tensor(TEXT))
    for dtype, most in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        ours = Model(read(folder, dtype=dtype, device="cpu", activations="float32"))
        cache = KVCache(ours.config, 64, dtype=dtype, device="cpu")
        with torch.inference_mode():
            got = ours.logits(Final(prefill(ours, cache, TEXT, aux_layers=(2,), last=40)[2]))
        assert (got - want).abs().max() <= most * want.abs().max(), dtype
    engine = specker.load(folder, strategy="lookup", device="cpu")
    assert engine.target.quantised == "mxfp4"
    assert engine.check(TEXT[:5], engine.generate(TEXT[:5], 30), 30).identical


FILES: list[tuple[str, Any, str]] = [
    ("scales", lambda s, m: s.pop(f"{m}_scales"), "the checkpoint lacks {}_scales,"),
    ("blocks", lambda s, m: s[f"{m}_blocks"].resize_(4, 192, 1, 16), r"{}_blocks has shape \(.*\), but"),
    ("dtype", lambda s, m: s.update({f"{m}_scales": s[f"{m}_scales"].float()}), "{}_scales is stored as F32"),
    ("nan", lambda s, m: s[f"{m}_scales"].view(-1)[7:8].fill_(255), "{}_scales has scales that are NaN; download"),
    ("weights", lambda s, m: s.update({m: torch.zeros(4, 192, 64)}), "the checkpoint has {}, which"),
]


@pytest.mark.parametrize(("change", "message"), [f[1:] for f in FILES], ids=[f[0] for f in FILES])
def test_files_that_do_not_fit_are_refused(
    tmp_path: Path, mixture: tuple[Path, Path, dict[str, Tensor]], change: Any, message: str
) -> None:
    state, module = load_file(mixture[0] / "model.safetensors"), EXPERTS.format(1) + "gate_up_proj"
    change(state, module)
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((mixture[0] / "config.json").read_text())
    with pytest.raises(CheckpointError, match=message.format(module)):
        read(tmp_path, dtype=torch.float32, device="cpu")


def test_sizes_that_do_not_fit_are_refused(tmp_path: Path, mixture: tuple[Path, Path, dict[str, Tensor]]) -> None:
    with pytest.raises(CheckpointError, match="has mxfp4 weights, which cannot be split over so many ranks"):
        read(mixture[0], dtype=torch.float32, device="cpu", part=Part(0, 2), pack=False)
    make(tmp_path, **SIZES | QWEN3_MOE | {"moe_intermediate_size": 80})
    edit(tmp_path, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(
        CheckpointError, match=r"cannot be read: mxfp4 needs groups of a multiple of 32 .* got 80 columns"
    ):
        read(tmp_path, dtype=torch.float32, device="cpu")
