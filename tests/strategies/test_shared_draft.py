"""A draft that shares its target's embedding or head: the same drafts as with its own copy; other targets refused."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from make_checkpoint import edit, make
from safetensors.torch import load_file, save_file

import specker
from specker import zoo
from specker.checkpoints.checkpoint import read as read_checkpoint
from specker.model.config import CheckpointError

pytestmark = pytest.mark.usefixtures("cheap")  # drafts do not depend on the clock
HOW = {"dtype": "float64", "device": "cpu", "page_size": 16}
NAMES = {"embed_tokens": "model.embed_tokens.weight", "lm_head": "lm_head.weight"}


def shared(target, whole, folder, shares, ids=(0, 5, 77)):
    """A copy of the draft `whole` that shares tensors of `target`."""
    shutil.copytree(whole, folder)
    weights = load_file(whole / "model.safetensors")
    embed = load_file(target / "model.safetensors")[NAMES["embed_tokens"]]
    weights = {name: w for name, w in weights.items() if name not in [NAMES[s] for s in shares]}
    weights |= {"specker.shared_ids": torch.tensor(ids), "specker.shared_rows": embed[list(ids)].bfloat16()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder, specker={"shares": list(shares)})
    return folder


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def family(tmp_path, request):
    """(target, a draft with copies of the target's embedding and head, the same draft that shares them)."""
    tied = request.param
    target = make(tmp_path / "target", layers=3, tied=tied)
    whole = make(tmp_path / "whole", layers=4, seed=1, tied=tied)  # easyspec needs four
    source, weights = load_file(target / "model.safetensors"), load_file(whole / "model.safetensors")
    shares = ["embed_tokens"] if tied else ["embed_tokens", "lm_head"]
    weights |= {NAMES[name]: source[NAMES[name]] for name in shares}
    save_file(weights, whole / "model.safetensors", metadata={"format": "pt"})
    return target, whole, shared(target, whole, tmp_path / "shared", shares)


@pytest.mark.parametrize("strategy", ["draft", "easyspec"])
def test_it_drafts_as_with_its_own_copy(family, strategy):
    target, whole, thin = family
    own, sharing = (specker.load(target, draft, strategy=strategy, **HOW) for draft in (whole, thin))
    assert (thin / "model.safetensors").stat().st_size < (whole / "model.safetensors").stat().st_size
    assert sharing.draft.weights.embed is sharing.target.weights.embed
    assert sharing.draft.weights.head is sharing.target.weights.head
    for prompt in ([5, 9, 40], list(range(3, 60))):
        a, b = (engine.generate(prompt, 20, temperature=0.7) for engine in (own, sharing))
        assert a.tokens == b.tokens and (a.stats.drafted, a.stats.hits) == (b.stats.drafted, b.stats.hits)
    assert b.stats.accepted > 0


def test_a_quantised_target_is_the_same_target(family):
    target, _, thin = family
    weights = load_file(target / "model.safetensors")
    embed = weights[NAMES["embed_tokens"]]
    weights[NAMES["embed_tokens"]] = (embed / embed.std() * 8).round() / 8 * embed.std()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    assert specker.load(target, thin, **HOW).generate([5, 9], 20).tokens


def test_another_target_is_refused(family, tmp_path):
    target, _, thin = family
    tied = json.loads((target / "config.json").read_text())["tie_word_embeddings"]
    same_size = make(tmp_path / "other", layers=3, seed=9, tied=tied)
    with pytest.raises(CheckpointError, match=r"of another target than .*other: the rows of its embedding differ"):
        specker.load(same_size, thin, **HOW)
    wider = make(tmp_path / "wider", layers=3, hidden=128, tied=tied)
    with pytest.raises(CheckpointError, match=r"its embedding is \(128, 64\), the target's \(128, 128\)"):
        specker.load(wider, thin, **HOW)


def test_a_bundled_draft_is_found_by_the_embedding(family, tmp_path, monkeypatch):
    """A target of a family's sizes without --draft gets the family's draft, unless its embedding is another one."""
    target, _, thin = family
    sizes = {"hidden_size": 64, "num_layers": 3}
    made = replace(zoo.CODE, sizes=sizes, drafts={"draft": thin, "easyspec": thin, "diffuspec": thin})
    monkeypatch.setattr(zoo, "FAMILIES", (made,))
    engine = specker.load(target, strategy="easyspec", **HOW)
    assert engine.draft.folder == thin and engine.draft_name == "shared"
    tied = json.loads((target / "config.json").read_text())["tie_word_embeddings"]
    other = make(tmp_path / "other", layers=3, seed=9, tied=tied)
    with pytest.raises(ValueError, match=r"'easyspec' needs a draft checkpoint for .*other: pass draft"):
        specker.load(other, strategy="easyspec", **HOW)
    monkeypatch.setitem(sizes, "num_layers", 4)
    with pytest.raises(ValueError, match="needs a draft checkpoint"):
        specker.load(target, strategy="easyspec", **HOW)


def test_it_does_not_run_alone(family):
    _, _, thin = family
    with pytest.raises(CheckpointError, match="it runs only beside its target"):
        specker.load(thin, strategy="ar", **HOW)


@pytest.mark.parametrize("shares", ["embed_tokens", ["norm"], ["lm_head"], {"a": 1}])
def test_a_wrong_declaration_is_refused(tmp_path, shares):
    folder = make(tmp_path / "x", tied=True)
    edit(folder, specker={"shares": shares})
    with pytest.raises(CheckpointError, match=r"specker.shares must be a list of embed_tokens, got .*the head is the"):
        read_checkpoint(folder, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("ids", [None, (0, 5, 128), (-1, 5, 7)])
def test_wrong_rows_are_refused(family, tmp_path, ids):
    target, _, thin = family
    weights = load_file(thin / "model.safetensors")
    if ids is None:
        del weights["specker.shared_ids"]
    else:
        weights["specker.shared_ids"] = torch.tensor(ids)
    save_file(weights, thin / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"shared_rows of .* are missing or do not fit together"):
        specker.load(target, thin, **HOW)


def test_a_draft_from_the_hub(family, tmp_path, monkeypatch):
    """Its rows are compared after the download of its weights, which comes after its config.json was checked."""
    target, _, thin = family
    taken = []

    def download(name, allow_patterns, **_):
        here = tmp_path / "snapshot"
        taken.append("weights" if "*.safetensors" in allow_patterns else "config")
        names = [path for path in thin.iterdir() if taken[-1] == "weights" or path.suffix != ".safetensors"]
        here.mkdir(exist_ok=True)
        for path in names:
            shutil.copy(path, here)
        return str(here)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    engine = specker.load(target, "org/draft", **HOW)
    assert engine.generate([5, 9], 10).tokens and taken[-1] == "weights" and "config" in taken
