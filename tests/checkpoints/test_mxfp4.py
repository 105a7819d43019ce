"""gpt-oss with experts in MXFP4: no bit is lost, and logits are those of transformers, which reads the same file."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from make_checkpoint import GPT_OSS, edit, exact_oracle, make, oracle, oracle_logits
from make_mxfp4 import drawn, make_mxfp4
from safetensors.torch import load_file, save_file

import specker
from specker.checkpoints.architectures.names import DOWN, GATE_UP
from specker.checkpoints.buffers import Storage
from specker.checkpoints.checkpoint import opened, read
from specker.checkpoints.pieces import pieces_of
from specker.checkpoints.quantised.mxfp4 import halved
from specker.cpu import Packed
from specker.kernels.quant import Quantized
from specker.model.cache import KVCache
from specker.model.config import CheckpointError
from specker.model.decoder import Final, Model
from specker.model.prefill import prefill
from specker.model.split import Part

SIZES = {**GPT_OSS, "hidden": 64, "heads": 6, "kv_heads": 6, "head_dim": 32, "ffn": 96, "vocab": 120}
EXPERTS = "model.layers.{}.mlp.experts."
TEXT = [n * 7 % 120 for n in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mxfp4(tmp_path_factory.mktemp("mxfp4"), **SIZES)


def test_numbers_move_to_other_bytes() -> None:
    blocks, _ = drawn(1, 3, 64, 0)
    columns = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)  # [.., 32]
    got = halved(blocks)
    assert torch.equal(torch.cat((got & 15, got >> 4), -1), columns)


def test_the_weights_are_those_of_transformers(folder: Path) -> None:
    """Packed for the compiled layers and not, and those of a rank, with the rows of gate and up apart. No byte is
    added."""
    experts = oracle(folder).state_dict()
    for layer in (0, 2):
        gate_up, down = (experts[EXPERTS.format(layer) + name].mT for name in ("gate_up_proj", "down_proj"))
        gate_up, F = torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), 1), down.shape[-1]
        assert gate_up.shape == (6, 192, 64) and 0.05 < gate_up.std() < 1
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


def test_the_memory_that_it_takes_is_known_beforehand(folder: Path) -> None:
    found = opened(folder)
    storage = Storage(found.scheme, None, torch.float32, torch.device("cpu"), packs=True)
    pieces = list(pieces_of(found.config, Part(), False))
    experts = [math.prod(p.shape) for p in pieces if p.name.endswith((GATE_UP, DOWN))]
    others = sum(math.prod(p.shape) for p in pieces) - sum(experts)
    assert storage.bytes_of(pieces, found.config) == 4 * others + sum(experts) * 17 // 32 and len(experts) == 6


def test_logits_are_those_of_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, and by the compiled layers with activations that are not rounded."""
    exact_oracle(monkeypatch)
    with torch.no_grad():  # transformers 5.18 restores the experts to bfloat16, which has them exactly
        want = oracle_logits(oracle(folder, torch.float64).double(), torch.tensor(TEXT))
    for dtype, most in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        ours = Model(read(folder, dtype=dtype, device="cpu", activations="float32"))
        cache = KVCache(ours.config, 64, dtype=dtype, device="cpu")
        with torch.inference_mode():
            got = ours.logits(Final(prefill(ours, cache, TEXT, aux_layers=(3,), last=40)[3]))
        assert (got - want).abs().max() <= most * want.abs().max(), dtype
    engine = specker.load(folder, strategy="lookup", device="cpu")
    assert engine.target.quantised == "mxfp4"
    assert engine.check(TEXT[:5], engine.generate(TEXT[:5], 30), 30).identical


FILES: list[tuple[str, Any, str]] = [
    ("scales", lambda s, m: s.pop(f"{m}_scales"), "the checkpoint lacks {}_scales,"),
    ("blocks", lambda s, m: s[f"{m}_blocks"].resize_(6, 192, 1, 16), r"{}_blocks has shape \(.*\), but"),
    ("dtype", lambda s, m: s.update({f"{m}_scales": s[f"{m}_scales"].float()}), "{}_scales is stored as F32"),
    ("nan", lambda s, m: s[f"{m}_scales"].view(-1)[7:8].fill_(255), "{}_scales has scales that are NaN; download"),
    ("weights", lambda s, m: s.update({m: torch.zeros(6, 64, 192)}), "the checkpoint has {}, which"),
]


@pytest.mark.parametrize(("change", "message"), [f[1:] for f in FILES], ids=[f[0] for f in FILES])
def test_files_that_do_not_fit_are_refused(tmp_path: Path, folder: Path, change: Any, message: str) -> None:
    state, module = load_file(folder / "model.safetensors"), EXPERTS.format(1) + "gate_up_proj"
    change(state, module)
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match=message.format(module)):
        read(tmp_path, dtype=torch.float32, device="cpu")


def test_sizes_that_do_not_fit_are_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(CheckpointError, match="has mxfp4 weights, which cannot be split over so many ranks"):
        read(folder, dtype=torch.float32, device="cpu", part=Part(0, 2), pack=False)
    make(tmp_path, **SIZES | {"ffn": 80})
    edit(tmp_path, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(
        CheckpointError, match=r"cannot be read: mxfp4 needs groups of a multiple of 32 .* got 80 columns"
    ):
        read(tmp_path, dtype=torch.float32, device="cpu")
