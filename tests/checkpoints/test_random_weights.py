"""Weights made from config.json alone: the same layout as read weights, without reading any file of weights."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from make_checkpoint import CASES, GEMMA3, GPT_OSS, make

import specker
from specker.checkpoints import files
from specker.checkpoints.checkpoint import read


def copy_config(folder: Path, to: Path) -> Path:
    to.mkdir(exist_ok=True)
    shutil.copy(folder / "config.json", to)
    return to


@pytest.mark.parametrize(("name", "options"), CASES, ids=[name for name, _ in CASES])
def test_the_layout_equals_that_of_read_weights(tmp_path, name, options):
    folder = make(tmp_path / "whole", **options)
    bare = copy_config(folder, tmp_path / "bare")
    stored = read(folder, dtype=torch.float32, device="cpu")
    made = read(bare, dtype=torch.float32, device="cpu", random=0)
    assert made.config == stored.config
    for field, want in vars(stored.weights).items():
        got = getattr(made.weights, field)
        assert type(got) is type(want), field
        if field == "ropes" or want is None:
            continue
        pairs = zip(got, want, strict=True) if isinstance(got, list) else [(got, want)]
        for a, b in pairs:
            if a is None or b is None:  # a dense layer's router
                assert a is b
                continue
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()), field
        whole = torch.cat([x.flatten() for x in got if x is not None]) if isinstance(got, list) else got
        if "norm" in field:
            assert bool((whole == 1).all())
        elif field.endswith("bias"):
            assert not whole.any()
        elif whole.numel() > 2000:
            wide = made.config.layer.experts and got is made.weights.embed  # so that experts differ by token
            std = 1 if wide else 0.02
            assert float(whole.std()) == pytest.approx(std, rel=0.05) and abs(float(whole.mean())) < 0.1 * std
    for ours, theirs in zip(made.weights.ropes, stored.weights.ropes, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))
    assert (made.weights.head is made.weights.embed) == made.config.tied


def test_experts_stored_in_mxfp4_are_random_in_mxfp4(tmp_path):
    """As a checkpoint of gpt-oss has them, and no other matrix; `--quantize` rounds to something else."""
    folder = copy_config(make(tmp_path / "whole", **GPT_OSS | {"hidden": 64}), tmp_path / "bare")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))

    def kinds(quantize):
        made = read(folder, dtype=torch.float32, device="cpu", random=0, quantize=quantize, pack=False).weights
        return [{getattr(x, "kind", "plain") for x in part} for part in (made.gate_up, made.down, made.qkv)]

    assert kinds(None) == [{"mxfp4"}, {"mxfp4"}, {"plain"}]
    assert kinds("none") == [{"plain"}] * 3 and kinds("int8") == [{"int8"}] * 3


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_random_norms_are_1_where_files_leave_out_the_1(tmp_path, quantize):
    folder = copy_config(make(tmp_path / "whole", **GEMMA3), tmp_path / "bare")
    weights = read(folder, dtype=torch.float32, device="cpu", random=0, quantize=quantize).weights
    norms = weights.norm, weights.norm_in, weights.norm_o, weights.norm_post, weights.norm_down, weights.q_norm
    assert all(bool((norm == 1).all()) for norm in norms)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_depend_only_on_the_seed(tmp_path, dtype):
    folder = copy_config(make(tmp_path / "whole"), tmp_path / "bare")
    a, again, other = (read(folder, dtype=dtype, device="cpu", random=seed).weights for seed in (0, 0, 1))
    assert a.embed.dtype == a.qkv[0].dtype == dtype
    assert torch.equal(a.qkv[2], again.qkv[2]) and not torch.equal(a.qkv[2], other.qkv[2])
    assert not torch.equal(a.qkv[1], a.qkv[2])


def test_a_hub_id_downloads_no_weights(tmp_path, monkeypatch, free_memory):
    asked = []
    folder = copy_config(make(tmp_path / "whole"), tmp_path / "bare")
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda source, **how: asked.append(how["allow_patterns"]) or str(folder)
    )
    read("org/name", dtype=torch.float32, device="cpu", random=0)
    assert asked == [files.CONFIG_FILES] and not any("safetensors" in pattern for pattern in asked[0])
    free_memory(1000, weights=True)
    with pytest.raises(ValueError, match="org/name needs"):  # before its weights are downloaded
        read("org/name", dtype=torch.float32, device="cpu")
    assert asked == 2 * [files.CONFIG_FILES]


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("ar", {}),
        ("draft", {}),
        ("draft", {"tree": "3x3"}),
        ("easyspec", {}),
        ("del", {}),
        ("vocabtrim", {}),
        ("vocabtrim", {"vocab_keep": "0.5", "vocab_text": 0}),
        ("del+vocabtrim", {}),
        ("diffuspec", {}),
        ("diffuspec", {"cps": "tree"}),
        ("diffuspec+vocabtrim", {"vocab_text": 8}),
    ],
)
def test_every_strategy_runs_without_a_weight(tmp_path, monkeypatch, strategy, options):
    monkeypatch.setattr("safetensors.safe_open", lambda *_, **__: pytest.fail("a file of weights was opened"))
    target = copy_config(make(tmp_path / "t", "qwen3", layers=4), tmp_path / "target")
    draft = copy_config(make(tmp_path / "d", "qwen3", layers=4, mask=127), tmp_path / "draft")
    alone = strategy.split("+")[0] in ("ar", "del")
    side = None if alone else draft
    engine = specker.load(target, side, strategy, device="cpu", dtype="float64", load="dummy", **options)
    out = engine.generate([1, 2, 3], 12)
    assert len(out.tokens) == 12 and out.finished == "length" and out.text == ""
    assert engine.check([1, 2, 3], out, 12).identical
    assert "random weights" in engine.warnings["sizing"]


def test_coverage_needs_a_score_file(tmp_path):
    folder = copy_config(make(tmp_path / "whole"), tmp_path / "bare")
    with pytest.raises(ValueError, match="vocab_keep='coverage:X' needs a score file"):
        specker.load(folder, folder, "vocabtrim", device="cpu", load="dummy", vocab_keep="coverage:0.9")
