"""Strategy eagle: trees, trimmed heads, and heads that do not fit. test_draft_heads.py has what holds for all heads."""

import cases
import pytest
import torch
from heads import DEEPSPEC, SLIDING, TEXT, HeadPair, assert_drafts, changed, made, plain_target, traced
from make_checkpoint import GRANITE, make
from safetensors.torch import load_file

from specker.checkpoints import checkpoint
from specker.checkpoints.drafts import dflash, eagle, mtp
from specker.model.config import CheckpointError


@pytest.fixture(scope="module")
def usual(heads):
    return heads("eagle", "nested")


@pytest.mark.parametrize(
    ("name", "shape", "graphs"),
    cases.one_in(2, ["3.1", "eagle1"], [{"tree": "3x2"}, {"tree": "2x3", "draft_tokens": 4}], ["off", "on"]),
)
def test_a_tree_holds_the_most_probable_nodes(heads, name, shape, graphs):
    head = heads("eagle", name)
    engine = head.load(graphs=graphs, **shape)
    out, rows = traced(engine, TEXT, 16)
    assert engine.check(TEXT, out, 16).identical
    assert (engine.loop.launched > 4) == (graphs == "on")
    assert assert_drafts(engine, head.formula(engine), rows, TEXT + out.tokens) > 1


def test_a_trimmed_head_drafts_kept_ids_alone(heads):
    engine = heads("eagle", "every id").load("+vocabtrim", vocab_keep="16", vocab_text=0)
    out, rows = traced(engine, TEXT, 20)
    assert engine.check(TEXT, out, 20).identical
    drafted = {token for row in rows for token in row["draft"]}
    assert drafted and drafted <= engine.drafter.head.draftable and len(engine.drafter.head.draftable) < 30


def test_a_tree_wider_than_the_heads_vocabulary_is_refused(usual):
    with pytest.raises(ValueError, match="tree='4x2' is wider than the 3 rows of this head's vocabulary"):
        usual.load(tree="4x2")


BAD = {
    "another width": ({"target_hidden_size": 32}, "a head for a target of width 32, and the target has 64"),
    "another kind": ({"speculators_model_type": "dflash"}, "speculators dflash is not supported by strategy eagle"),
    "unknown field": ({"gating": 2}, "the field 'gating', which specker does not know"),
    "another number of taps": ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "fc.weight has 192 columns, but"),
    "a tap too deep": ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "must ascend within the target's 8 layers"),
    "a norm that is missing": ({"fc_norm": True}, "says fc_norm True, and the checkpoint lacks fc_norm"),
    "another head size": ({"draft_vocab_size": 4}, "lm_head.weight has shape"),
    "another kind of layer": (
        {"layer": {"layer_types": ["chunked_attention"]}},
        "layer_types must name full_attention or sliding_",
    ),
    "too few layers": ({"layer": {"layer_types": []}}, "for each of the head's 1 layers, got"),
    "a window without a size": ({"layer": {"layer_types": [SLIDING]}}, "names sliding_attention layers, and the head"),
    "a window without a number": ({"layer": {"sliding_window": "4k", "layer_types": [SLIDING]}}, "from 0 on, got '4k'"),
    "a context without a number": ({"layer": {"max_position_embeddings": "2k"}}, "from 0 on, got '2k'"),
    "no hidden states": ({"eagle_config": {"use_aux_hidden_state": False}}, "says use_aux_hidden_state false"),
}


@pytest.mark.parametrize("way", BAD)
def test_configs_that_do_not_fit_are_refused(usual, tmp_path, way):
    fields, says = BAD[way]
    with pytest.raises(ValueError, match=says):
        changed(usual, tmp_path / "head", **fields).load()


@pytest.mark.parametrize("module", [eagle, dflash, mtp])
def test_a_target_in_another_scale_has_no_heads(tmp_path, module):
    """They were trained with its hidden states as they are."""
    target = checkpoint.opened(make(tmp_path, **GRANITE))
    with pytest.raises(CheckpointError, match=r"keeps those of GraniteForCausalLM in another scale .* no heads for it"):
        mtp.opened(target) if module is mtp else module.Layout.open("head", target.config)


PARALLEL = {
    "no mask token": (
        {"mask_token_id": None},
        {},
        (),
        "a P-EAGLE head needs mask_token_id, an id below 128; it is None",
    ),
    "a mask beyond the ids": ({"mask_token_id": 128}, {}, (), "an id below 128; it is 128"),
    "no mask_hidden": ({}, {}, ("mask_hidden",), "has a mask token and lacks mask_hidden"),
    "another size": ({}, {"mask_hidden": torch.ones(1, 1, 64)}, (), "mask_hidden of .* must hold 192 finite numbers"),
    "NaN": ({}, {"mask_hidden": torch.full((192,), float("nan"))}, (), "must hold 192 finite numbers"),
    "no field": (
        {"speculators_model_type": "eagle3", "mask_token_id": None},
        {},
        (),
        "config.json lacks mask_token_id",
    ),
}


@pytest.mark.parametrize("way", PARALLEL)
def test_parallel_heads_that_do_not_fit_are_refused(heads, tmp_path, way):
    fields, tensors, drop, says = PARALLEL[way]
    with pytest.raises(ValueError, match=says):
        changed(heads("eagle", "parallel"), tmp_path / "head", tensors, drop, **fields).load()


def test_a_tree_of_a_parallel_head_is_refused(heads):
    with pytest.raises(ValueError, match="a P-EAGLE head drafts a chain: tree does not apply"):
        heads("eagle", "parallel").load(tree="2x2")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"num_target_layers": 36}, "a head for a target of 36 layers, and the target has 8"),
        ({"target_layer_ids": [0, 2, 3, 4, 7]}, "target_layer_ids names the last of the target's 8 layers"),
        ({"target_layer_ids": [0, 2, 3, 4, 8]}, "target_layer_ids names the depths .* must ascend"),
        ({"target_layer_ids": [0, "2"]}, "target_layer_ids must be a list of layers' numbers"),
        (
            {"architectures": ["Gemma4Eagle3Model"]},
            "Gemma4Eagle3Model is not supported by strategy eagle, .*: LlamaForCaus",
        ),
        ({"layers": 2}, "a DeepSpec head of 2 layers"),
    ],
)
def test_deepspec_heads_for_other_targets_are_refused(tmp_path, fields, says):
    with pytest.raises(ValueError, match=says):
        made(tmp_path / "head", "eagle", **{**DEEPSPEC, **fields}).load()


def test_another_vocabulary_is_refused(tmp_path):
    target = make(tmp_path / "target", layers=8, max_context=256, vocab=96)
    head = made(tmp_path / "head", "eagle", target)
    with pytest.raises(ValueError, match="a head for a vocabulary of 96 ids, and the target has 128"):
        HeadPair("eagle", plain_target(tmp_path / "other"), head.folder).load()


def test_a_pickled_file_is_read_as_tensors_only(usual, tmp_path):
    head = changed(usual, tmp_path / "head")
    file = head.folder / "pytorch_model.bin"
    torch.save(load_file(head.folder / "model.safetensors"), file)
    (head.folder / "model.safetensors").unlink()
    want = usual.load().generate(TEXT, 12)
    assert head.load().generate(TEXT, 12).stats.drafted == want.stats.drafted
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="is not a file of tensors, or truncated"):
        head.load()
    torch.save({"x": print}, file)
    with pytest.raises(ValueError, match="is not a file of tensors"):
        head.load()
