"""Drafters of blocks in GGUF files are those of the same drafters in safetensors."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make_checkpoint import make
from make_dflash import make_dflash
from make_draft_gguf import tensors_of, write_blocks
from make_gguf import gguf
from safetensors.torch import save_file
from torch import Tensor

import specker
from specker.checkpoints.checkpoint import read, read_config
from specker.checkpoints.drafts import dflash

SLIDING, FULL = "sliding_attention", "full_attention"
FACTORS = {"output_multiplier": 0.5, "final_logit_softcapping": 3.0, "input_embedding_scale": 1.5}
WINDOW = {"layer_types": [SLIDING, FULL], "sliding_window": 6, "use_sliding_window": True}
SPARK: dict[str, Any] = {"layout": "deepspec", "markov": 6, "own": ("embed_tokens",)}
KINDS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash, windows": {"layer": WINDOW},
    "dflash, causal": {"outer": {"is_causal": True}},
    "dflash, factors": {"outer": FACTORS},
    "dflash2": {"layout": "zlab2", "outer": FACTORS},
    "dspark": {**SPARK, "confidence": "rows and markov"},
    "dspark without confidence": {**SPARK, "own": ()},
    "dspark, speculators": {"layout": "dspark", "markov": 6, "ids": [35, 74, 119]},
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECKER_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf-drafts") / "target"
    return make(folder, layers=8, max_context=256, seed=2, rms_norm_eps=2**-20)


def drafter(target: Path, folder: Path, **how: Any) -> Path:
    how["layer"] = {"rms_norm_eps": 2**-20, **how.get("layer", {})}  # a number of float32, as it is in a file
    return make_dflash(folder, json.loads((target / "config.json").read_text()), **how)


def opened(source: Path, target: Path) -> dflash.Layout:
    return dflash.Layout.open(source, read_config(target))


def same(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor):
        return torch.equal(x, y)
    if isinstance(x, tuple | list):
        return len(x) == len(y) and all(map(same, x, y))
    return x == y


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_holds_the_drafter_that_was_converted(target: Path, tmp_path: Path, kind: str) -> None:
    folder = drafter(target, tmp_path / "draft", **KINDS[kind])
    file = write_blocks(tmp_path / "draft.gguf", folder)
    own, found = (opened(source, target) for source in (folder, file))
    assert replace(found.config, architecture=own.config.architecture) == own.config
    assert (found.spec, found.has, found.markov, found.sizes) == (own.spec, own.has, own.markov, own.sizes)
    base = read(target, dtype=torch.float64, device="cpu")
    one, other = (each.read(base, torch.float64) for each in (own, found))
    assert isinstance(one, dflash.BlockCheckpoint) and isinstance(other, dflash.BlockCheckpoint)
    assert all(map(same, one.parts, other.parts))
    assert all(same(getattr(one.weights, name), x) for name, x in vars(other.weights).items())


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_matrices_keep_their_blocks(target: Path, tmp_path: Path, dtype: str) -> None:
    """In float64 drafts are those of the rounded drafter."""
    folder = drafter(target, tmp_path / "draft", layout="zlab2", inner=64, heads=(4, 2, 16))
    kinds = {"conv_base": "F32", **dict.fromkeys(("attn", "ffn", "fc."), "Q8_0")}
    file = write_blocks(tmp_path / "draft.gguf", folder, kinds)
    how: dict[str, Any] = {"strategy": "dflash", "device": "cpu", "policy": "fixed", "draft_tokens": 3}
    engine, text = specker.load(str(target), str(file), dtype=dtype, **how), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    out = engine.generate(text, 12)
    assert out.stats.drafted and engine.check(text, out, 12).identical
    if dtype == "float32":
        assert engine.draft.quantised == "int8"
        return
    q8 = gguf.GGMLQuantizationType.Q8_0
    rounded = {
        name: torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(x.numpy(), q8), q8))
        if name.startswith(("layers.", "fc.")) and x.dim() == 2
        else x
        for name, x in tensors_of(folder).items()
    }
    save_file(rounded, folder / "model.safetensors")
    seen: list[Any] = [[], []]
    for source, rows in zip((file, folder), seen, strict=True):
        engine = specker.load(str(target), str(source), dtype=dtype, **how)
        engine.trace = rows.append
        engine.generate(text, 12)
    assert [row["draft"] for row in seen[0]] == [row["draft"] for row in seen[1]]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": (
        {"keys": {"attention.value_scale": 0.5}},
        r"has the key dflash\.attention\.value_scale, which spec",
    ),
    "no layers": ({"drop": "target_layers"}, r"lacks the key dflash\.target_layers; convert it again"),
    "no size": ({"drop": "block_count"}, r"lacks the key dflash\.block_count; convert it again"),
    "no pattern": ({"keys": {"attention.sliding_window": 6}}, r"lacks the key dflash\.attention\.sliding_window_patt"),
    "no mask": ({"drop": ".tokenizer.ggml.mask_token_id"}, "must name mask_token_id, an id below 128; it is None"),
    "part of a head": ({"keys": {"rope.dimension_count": 4}}, r"has dflash\.rope\.dimension_count 4, which is not su"),
    "sections": ({"keys": {"rope.dimension_sections": [2, 1, 1, 0]}}, r"dflash\.rope\.dimension_sections, which sp"),
    "unknown tensor": ({"extra": {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}}, r"tensor blk\.0\.attn_sinks"),
    "missing tensor": ({"drop": "blk.1.attn_q.weight"}, r"lacks layers\.1\.self_attn\.q_proj\.weight, which config"),
}


@pytest.mark.parametrize("way", REFUSED)
def test_other_files_are_refused(target: Path, tmp_path: Path, way: str) -> None:
    how, says = REFUSED[way]
    file = write_blocks(tmp_path / "draft.gguf", drafter(target, tmp_path / "draft"), **how)
    with pytest.raises(ValueError, match=says) as caught:
        opened(file, target).read(read(target, dtype=torch.float64, device="cpu"), torch.float64)
    assert "\n" not in str(caught.value)
