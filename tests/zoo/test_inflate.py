"""The bundled family in a larger shape computes the same function: its tokens and drafts are the toy's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import specker
from specker import zoo
from specker.checkpoints.checkpoint import opened, read
from specker.zoo.inflate import MEMBERS, SHAPES, Inflated, Shape, inflate, main
from train.head.blocks import Blocks
from train.head.export import export_blocks

SHAPE = Shape(512, 800, 17, 12, 3)  # twice as wide; layers, heads and their groups no multiples of the toy's
PROMPTS = ["def add(a, b):", "class Node:\n    def __init__"]
FIXED = {"policy": "fixed", "draft_tokens": 4}
CASES = {
    "draft": ("code-target", "code-draft", FIXED, {}),
    "diffuspec": ("code-target", "code-diffusion", FIXED, {}),
    "del": ("code-target", None, FIXED | {"exit_layer": 6}, {"exit_layer": 8}),  # six of the toy's layers
    "easyspec": ("code-target", "code-draft-deep", FIXED | {"layer_parallel": "1"}, {}),
    "mtp": ("hybrid-target", None, FIXED, {}),
}


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    out = tmp_path_factory.mktemp("inflated")
    for name in MEMBERS:
        inflate(zoo.path(name), SHAPE, out / name)
    return out


@pytest.mark.parametrize("strategy", CASES)
def test_tokens_and_drafts_are_the_toys(family: Path, strategy: str) -> None:
    target, draft, options, wide = CASES[strategy]
    found = []
    for folder, own in ((zoo.FOLDER, {}), (family, wide)):
        models = [folder / name for name in (target, draft) if name is not None]
        engine = specker.load(*models, strategy=strategy, dtype="float64", device="cpu", **options | own)
        outs = engine.generate(PROMPTS, 10, temperature=0.5)
        found.append([(out.tokens, out.stats.drafted, out.stats.accepted) for out in outs])
    assert found[0] == found[1]
    assert sum(accepted for _, _, accepted in found[0]) > 4


@pytest.mark.parametrize("kind", ["dflash", pytest.param("dspark", marks=pytest.mark.slow), "domino"])
def test_a_drafter_of_blocks_grows_with_its_target(family: Path, tmp_path: Path, kind: str) -> None:
    dense = read(opened(zoo.path("code-target")), dtype=torch.float32, device="cpu", pack=False)
    net = Blocks(dense, (2, 6, 9), 319, 4, 2, kind, 8)
    for name, x in net.named_parameters():
        if name in net.tables:
            x.data.normal_(std=0.3)
    export_blocks(net, zoo.path("code-target"), tmp_path / kind)
    inflate(tmp_path / kind, SHAPE, tmp_path / "wide")
    fields = json.loads((tmp_path / "wide" / "config.json").read_text())
    assert {**fields, **fields.get("dflash_config", {})}["target_layer_ids"] == [1, 7, 11]  # of 17 layers
    found: list[list[list[int]]] = []
    for models in ((zoo.path("code-target"), tmp_path / kind), (family / "code-target", tmp_path / "wide")):
        engine = specker.load(*models, strategy="dflash", dtype="float64", device="cpu", **FIXED)
        rows: list[dict[str, Any]] = []
        engine.trace = rows.append
        engine.generate(PROMPTS[0], 8, temperature=0.5)
        found.append([row["draft"] for row in rows])
    assert found[0] == found[1] and len({token for draft in found[0] for token in draft}) > 3


def test_every_member_gets_the_shape_in_proportion() -> None:
    sizes = {name: Inflated(zoo.path(name), SHAPES["1b"]).config for name in MEMBERS}
    named = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    assert [sizes["code-target"][n] for n in named] == [2048, 8192, 16, 32, 8]
    assert [sizes["code-draft"][n] for n in named] == [768, 2976, 3, 16, 4]
    assert [sizes["code-draft-deep"][n] for n in named[:3]] == [768, 2976, 16]
    assert sizes["hybrid-target"]["layer_types"].count("full_attention") == 3
    assert len(sizes["hybrid-target"]["layer_types"]) == sizes["hybrid-target"]["num_hidden_layers"] == 11


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "1b", SHAPE)
    monkeypatch.setattr("specker.zoo.inflate.SHARD", 5_000_000)  # bytes, of 5.5 million
    assert main(["--shape", "1b", "--out", str(tmp_path), "code-draft"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'code-draft'}: 3M parameters\n"
    assert [path.name for path in tmp_path.iterdir()] == ["code-draft"]
    index = json.loads((tmp_path / "code-draft" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {"model-00000.safetensors", "model-00001.safetensors"}
    assert main(["--shape", "1b", "--out", str(tmp_path), "code-draft"]) == 2  # nobody's folder is removed
    assert f"{tmp_path / 'code-draft'} exists: remove it" in capsys.readouterr().err
    assert main(["--shape", "1b", "--out", str(tmp_path), "toy"]) == 2
    assert "expected models of code-target, code-draft, " in capsys.readouterr().err
