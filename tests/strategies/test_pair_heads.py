"""Heads that score pairs of neighbouring candidates: recurrent targets, and files that do not fit."""

import json

import cases
import pytest
import torch
from heads import DFLASH, TEXT, changed, made, traced
from make_checkpoint import QWEN3_5, make


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory):
    return make(tmp_path_factory.mktemp("recurrent"), **QWEN3_5, max_context=256, seed=2)


@pytest.mark.parametrize(("name", "cps"), cases.one_in(2, ["dspine", "lilicorr"], ["off", "tree"]))
def test_drafts_for_a_target_with_recurrent_states(recurrent, tmp_path, name, cps):
    head = made(tmp_path / "head", "dflash", recurrent, **DFLASH[name], layer_ids=[0, 1])
    engine = head.load(cps=cps, batch_size=2)
    for how in ({}, {"temperature": 0.7, "seed": 5}):
        out, _ = traced(engine, [TEXT, TEXT[:9]], 20, **how)
        for prompt, each in zip((TEXT, TEXT[:9]), out, strict=True):
            assert each.tokens == cases.plain(recurrent, prompt, 20, **how)
            assert each.stats.drafted > 20


CODES = {"transfer_rank": 12, "message_size": 6, "top_k": 5}
BAD = {  # changed and missing tensors, fields, and the refusal
    "another rank": ({}, (), {"dspine_config": CODES | {"transfer_rank": 8}}, "injection.readouts.0.weight has shape"),
    "no message": ({}, ("injection.message.weight",), {}, "lacks injection.message.weight"),
    "a write too many": (
        {"injection.writes.2.weight": torch.ones(64, 6)},
        (),
        {},
        "has injection.writes.2.weight, which",
    ),
    "codes of other ids": ({"transfer_codes": torch.ones(96, 12)}, (), {}, "transfer_codes has shape"),
    "no codes": ({}, ("transfer_codes",), {}, "lacks transfer_codes"),
    "codes that were not made": ({"transfer_ready": torch.tensor(False)}, (), {}, "its transfer_codes were not made"),
    "nothing about codes": ({}, ("transfer_ready",), {}, "lacks transfer_ready, or it is false"),
    "an own embedding": ({"embed_tokens.weight": torch.ones(128, 64)}, (), {}, "has embed_tokens.weight, which"),
    "other sizes": ({}, (), {"dspine_config": None}, "injection.readouts.0.weight has shape"),
    "no candidates": ({}, (), {"dspine_config": CODES | {"top_k": 0}}, "dspine_config.top_k must be a whole number"),
    "an unknown field": ({}, (), {"dspine_config": CODES | {"passes": 2}}, "the field 'dspine_config.passes'"),
    "no object": ({}, (), {"dspine_config": [5]}, r"dspine_config of .* must be an object, got \[5\]"),
    "blocks that see themselves": ({}, (), {"is_causal": False}, "says that it is not causal"),
    "rows that predict the next": ({}, (), {"sample_from_anchor": True}, "says sample_from_anchor, and a DSpine"),
    "a soft cap": ({}, (), {"final_logit_softcapping": 30.0}, "specker caps no logits of DSpine"),
}


@pytest.mark.parametrize("way", BAD)
def test_dspine_drafters_that_do_not_fit_are_refused(heads, tmp_path, way):
    tensors, drop, fields, says = BAD[way]
    with pytest.raises(ValueError, match=says):
        changed(heads("dflash", "dspine"), tmp_path / "head", tensors, drop, **fields).load()


SLOTS = torch.ones(1, 1, 7, 1, 24)
BAD_CORRECTORS = {
    "no embedding of slots": ({}, ("lilicorr.slot_embedding",), {}, "lacks lilicorr.slot_embedding"),
    "slots of other blocks": ({"lilicorr.slot_embedding": SLOTS}, (), {}, "lilicorr.slot_embedding has shape"),
    "a layer too many": ({"lilicorr.layers.2.mlp.2.bias": torch.ones(24)}, (), {}, "has lilicorr.layers.2.mlp.2.bias"),
    "convolutions": ({"layers.0.mlp_conv.base_kernel": torch.ones(2, 2, 64)}, (), {}, "has layers.0.mlp_conv.base"),
    "an own embedding": ({"embed_tokens.weight": torch.ones(128, 64)}, (), {}, "has embed_tokens.weight, which"),
    "half of a convolution": ({}, (), {"conv_kernel_size": 2}, "conv_group_size must be a whole number from 1"),
    "no scale": (
        {},
        (),
        {"lilicorr_logit_scale": None},
        "lilicorr_logit_scale of .* must be a number above 0, got None",
    ),
    "no length": ({}, (), {"lilicorr_vector_eps": 0}, "lilicorr_vector_eps of .* must be a number above 0, got 0"),
    "another width": (
        {},
        (),
        {"lilicorr_hidden_size": 0, "lilicorr_num_heads": 4},
        "pass_hidden_proj.weight has shape",
    ),
    "no width": ({}, (), {"lilicorr_hidden_size": False}, "lilicorr_hidden_size must be a whole number"),
    "heads that leave a rest": ({}, (), {"lilicorr_num_heads": 5}, "lilicorr_num_heads 5 of .* must divide"),
    "too many candidates": ({}, (), {"lilicorr_candidate_topk": 65}, "lilicorr_candidate_topk must be a whole number"),
    "no head": ({}, (), {"lilicorr_enabled": False}, "a LiLiCorr drafter, and says lilicorr_enabled False"),
    "an unknown field": ({}, (), {"lilicorr_passes": 2}, "the field 'dflash_config.lilicorr_passes'"),
    "another projector": ({}, (), {"projector_type": "domino"}, "with projector_type 'domino'; specker reads lilicorr"),
    "a soft cap": ({}, (), {"final_logit_softcapping": 30.0}, "the field 'dflash_config.final_logit_softcapping'"),
}


@pytest.mark.parametrize("way", BAD_CORRECTORS)
def test_lilicorr_drafters_that_do_not_fit_are_refused(heads, tmp_path, way):
    tensors, drop, fields, says = BAD_CORRECTORS[way]
    head = heads("dflash", "lilicorr")
    inner = json.loads((head.folder / "config.json").read_text())["dflash_config"] | fields
    with pytest.raises(ValueError, match=says):
        changed(head, tmp_path / "head", tensors, drop, dflash_config=inner).load()


def test_fields_of_training_are_passed_over(heads, tmp_path):
    trained = CODES | {"ce_weight": 0.1, "alignment_warmup_steps": 146, "replacement_hold_ratio": 0.2}
    assert changed(heads("dflash", "dspine"), tmp_path / "head", dspine_config=trained).load().generate(TEXT, 4).tokens


def test_other_drafters_have_no_transfer_codes(heads, tmp_path):
    with pytest.raises(ValueError, match="has transfer_ready, which only a DSpine drafter has"):
        changed(heads("dflash", "z-lab"), tmp_path / "head", {"transfer_ready": torch.tensor(False)}).load()
