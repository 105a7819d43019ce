"""A recipe decides from options and configs alone, before any weights are read."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from make_checkpoint import make

import specker
from specker.model.config import CheckpointError
from specker.runtime import strategies
from specker.runtime.recipe import resolve


@pytest.fixture
def configs(pair, tmp_path):
    """Folders of a target and a draft that have no file of weights."""
    folders = []
    for source, name in zip(pair, ("target", "draft"), strict=True):
        (tmp_path / name).mkdir()
        shutil.copy(Path(source) / "config.json", tmp_path / name)
        folders.append(str(tmp_path / name))
    return folders


def test_a_recipe_needs_no_weights(configs):
    options = strategies.options(strategy="draft", draft_tokens=3, max_context=40)
    recipe = resolve(options, *configs, device="cpu", dtype="float64")
    assert (recipe.target_name, recipe.draft_name) == ("target", "draft")
    assert recipe.target.config.max_context == 40 and recipe.draft.config.num_layers > 0
    assert recipe.device == torch.device("cpu") and recipe.dtype == torch.float64
    assert recipe.options == options and not recipe.bundled_draft and recipe.models == 2


def test_an_engine_is_what_its_recipe_says(pair):
    engine = specker.load(*pair, "draft", device="cpu", dtype="float32", max_context=40, batch_size=2, kv_tokens=1024)
    recipe = engine.recipe
    assert recipe.target.config == engine.target.config and recipe.options == engine.options
    assert [config.max_context for config in recipe.memory.configs] == [40, 40]
    assert engine.max_context == 40 and engine.options.kv_tokens == 1024


@pytest.mark.parametrize(
    ("strategy", "draft", "how", "said"),
    [
        ("ar", True, {}, "strategy 'ar' uses no draft checkpoint"),
        ("draft", False, {}, "needs a draft checkpoint for .*target: pass draft"),
        ("draft", True, {"dtype": "int3"}, "dtype must be one of"),
        ("draft", True, {"device": "tpu"}, "unknown device 'tpu'"),
        ("del", False, {"exit_layer": 99, "policy": "fixed"}, "exit_layer must be below the target's"),
        ("draft", True, {"kv_dtype": "int8", "dtype": "float64"}, "kv_dtype=.*needs a run in float32 or bfloat16"),
    ],
)
def test_what_cannot_run_is_refused_before_weights_are_read(configs, strategy, draft, how, said):
    with pytest.raises(ValueError, match=said):
        specker.load(configs[0], configs[1] if draft else None, strategy, **{"device": "cpu", **how})


@pytest.mark.parametrize(
    ("strategy", "layout", "count"), [("eagle", "nested", 1), ("dflash", "z-lab", 1), ("mtp", "mimo, 3 heads", 3)]
)
def test_heads_are_opened_before_weights_are_read(heads, strategy, layout, count):
    made = heads(strategy, layout)
    recipe = resolve(strategies.options(strategy=strategy), made.target, made.folder, device="cpu", dtype="float64")
    engine = made.load(draft_tokens=None, policy=None)
    assert recipe.draft.config == engine.draft.config and recipe.options == replace(engine.options, kv_tokens=None)
    assert recipe.memory == engine.recipe.memory and len(recipe.memory.configs) == 1 + count


def test_a_head_for_another_target_is_refused_before_weights_are_read(configs, heads):
    with pytest.raises(CheckpointError, match=r"is a head for .*: it was trained for another model"):
        specker.load(configs[0], heads("eagle", "nested").folder, "eagle", device="cpu")


def test_a_recipe_checks_the_configs(tmp_path):
    folder = make(tmp_path, layers=1)
    raw = json.loads((folder / "config.json").read_text()) | {"hidden_size": -8}
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="hidden_size"):
        resolve(strategies.options(strategy="ar"), folder, device="cpu")
