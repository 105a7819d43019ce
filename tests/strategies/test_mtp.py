"""Strategy mtp: heads in the target's own checkpoint, and those that do not fit. test_draft_heads.py has what
holds for all heads."""

import pytest
import torch
from heads import MTP, TEXT, traced
from make_checkpoint import make
from make_mtp import make_mtp
from safetensors.torch import load_file, save_file

import specker


def load(target, strategy="mtp", **options):
    return specker.load(str(target), strategy=strategy, device="cpu", dtype="float64", **options)


def test_each_head_has_a_layer_of_the_cache(heads):
    few, many = (load(heads("mtp", name).target) for name in ("mimo", "mimo, 3 heads"))
    assert len(few.drafter.cache.layers) == 1 and len(many.drafter.cache.layers) == 3
    costs = [e.recipe.memory.configs for e in (few, many)]
    assert [len(configs) for configs in costs] == [2, 4]


@pytest.mark.parametrize("name", ["mimo", "qwen3-next", "deepseek, 3 heads"])
def test_other_strategies_ignore_the_head(heads, tmp_path, name):
    how = {field: value for field, value in MTP[name].items() if field not in ("layout", "heads")}
    plain = make(tmp_path / "plain", layers=4, max_context=256, seed=2, **how)
    engines = (load(folder, "ar") for folder in (heads("mtp", name).target, plain))
    first, second = (engine.generate(TEXT, 12).tokens for engine in engines)
    assert first == second


def changed(target, folder, drop=(), **tensors):
    folder.mkdir()
    for file in target.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    x = {name: t for name, t in load_file(target / "model.safetensors").items() if name not in drop}
    save_file(x | tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


BAD = {
    "another tensor": ({"model.mtp_layers.0.extra.weight": torch.ones(3)}, (), "has model.mtp_layers.0.extra.weight"),
    "missing": ({}, ("model.mtp_layers.0.mlp.up_proj.weight",), "lacks model.mtp_layers.0.mlp.up_proj.weight"),
    "shape": ({"model.mtp_layers.0.input_proj.weight": torch.ones(64, 64)}, (), "input_proj.weight has shape"),
    "a gap": (
        {"model.mtp_layers.2.input_proj.weight": torch.ones(64, 128)},
        (),
        r"are numbered \[0, 2\]; 0 is the first",
    ),
    "half a second head": (
        {"model.mtp_layers.1.input_proj.weight": torch.ones(64, 128)},
        (),
        "lacks model.mtp_layers.1",
    ),
}


@pytest.mark.parametrize("way", BAD)
def test_heads_that_do_not_fit_are_refused(heads, tmp_path, way):
    tensors, drop, says = BAD[way]
    with pytest.raises(ValueError, match=says):
        load(changed(heads("mtp", "mimo").target, tmp_path / "target", drop, **tensors))


def test_heads_with_other_lm_heads_are_refused(tmp_path):
    target = make_mtp(tmp_path / "target", **MTP["deepseek's own rows"], heads=2)
    other = changed(target, tmp_path / "other", **{"model.layers.5.shared_head.head.weight": torch.ones(128, 64)})
    with pytest.raises(ValueError, match=r"MTP head 2 has model.layers.5.shared_head.head.weight, which is not"):
        load(other)


def test_a_target_without_a_head_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no MTP heads"):
        load(make(tmp_path / "target", layers=4, max_context=256))


def only_heads(target, folder, drop=("model.embed_tokens", "model.layers", "model.norm", "lm_head")):
    """A checkpoint with the heads of `target` alone, and one without them."""
    named = [*load_file(target / "model.safetensors")]
    rest = tuple(name for name in named if name.startswith(drop))
    return (
        changed(target, folder / "heads", rest),
        changed(target, folder / "model", tuple(name for name in named if name not in rest)),
    )


@pytest.mark.parametrize("name", ["mimo", "mimo, 3 heads", "qwen3-next"])
def test_heads_of_another_checkpoint_draft_as_the_targets_own(heads, tmp_path, name):
    own = heads("mtp", name).target
    apart, plain = only_heads(own, tmp_path)
    first, second = (load(target, draft=draft, policy="fixed") for target, draft in ((own, None), (plain, str(apart))))
    (one, ours), (other, theirs) = (traced(engine, TEXT, 16) for engine in (first, second))
    assert one.tokens == other.tokens == load(plain, "ar").generate(TEXT, 16).tokens and one.stats.drafted > 0
    drafts = [[(row["draft"], row.get("probability")) for row in rows if row["draft"]] for rows in (ours, theirs)]
    assert drafts[0] == drafts[1]
    assert (first.draft_name, second.draft_name) == (None, "heads")


def test_a_draft_without_heads_or_of_another_model_is_refused(heads, tmp_path):
    own = heads("mtp", "mimo").target
    with pytest.raises(
        ValueError, match=r"has no MTP heads .* and is no assistant, with which strategy mtp drafts; pa"
    ):
        load(own, draft=str(make(tmp_path / "plain", layers=4, max_context=256)))
    wider = make(tmp_path / "wider", layers=4, max_context=256, vocab=160)
    with pytest.raises(ValueError, match=r"is MTP heads for a target with 128 ids, and the target has 160: it was tr"):
        load(wider, draft=str(own))
