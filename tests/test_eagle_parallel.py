"""P-EAGLE heads draft in one pass what an independent formula says, and change no token."""

import pytest
import torch
from test_eagle import OFTEN, SAMPLING, SLIDING, TEXT, changed, formula_of, head_of, load, target  # noqa: F401

PEAGLE = {"layout": "peagle", "ids": OFTEN, "mask_token_id": 90, "own_embedding": True}
HEADS = {
    "usual": {},
    "the target's embedding": {"own_embedding": False},
    "norm before residual and fc": {"norm_before_fc": True, "norm_before_residual": True},
    "norms of each tap": {"fc_norm": True, "qk_norm": True},
    "two layers with windows": {"layers": 2, "layer": {"sliding_window": 8, "layer_types": [SLIDING, SLIDING]}},
}


@pytest.mark.parametrize("way", HEADS)
def test_drafts_are_those_of_the_formula(target, tmp_path, taps_of, way):  # noqa: F811
    head = head_of(target, tmp_path / "head", **{**PEAGLE, **HEADS[way]})
    engine = load(target, head)
    formula, seen = formula_of(engine, head), []
    engine.trace = seen.append
    out = engine.generate(TEXT, 32)
    assert engine.check(TEXT, out, 32).identical
    text = TEXT + out.tokens
    drafted = [row for row in seen if row["draft"]]
    assert any(len(set(row["draft"])) > 1 for row in drafted) and out.stats.accepted
    for row in drafted:
        before = text[: row["position"]]
        size = min(3, len(text) - len(before) - 1)
        assert row["draft"] == formula.parallel(taps_of(before, engine.drafter.aux_layers), before, size)


@pytest.mark.parametrize("policy", ["fixed", "auto", "draft-and-verify"])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_batches_change_no_token(target, tmp_path, policy, sampling):  # noqa: F811
    head = head_of(target, tmp_path / "head", **PEAGLE)
    prompts, counts = [TEXT, [7], TEXT[:5] * 2, [n % 100 for n in range(90)], TEXT[::-1]], [20, 9, 30, 12, 25]
    many = {"policy": policy, "draft_tokens": 3 if policy == "fixed" else None}
    engine = load(target, head, batch_size=3, max_context=256, page_size=16, **many)
    plain = [engine.generate_ar(p, n, **SAMPLING[sampling]).tokens for p, n in zip(prompts, counts, strict=True)]
    out = engine.generate(prompts, counts, **SAMPLING[sampling])
    assert [each.tokens for each in out] == plain
    if policy != "auto":
        assert sum(each.stats.drafted for each in out) > 10


def test_a_draft_in_a_batch_is_that_of_one_text(target, tmp_path, taps_of):  # noqa: F811
    head = head_of(target, tmp_path / "head", **PEAGLE)
    engine = load(target, head, batch_size=2, max_context=256, page_size=16)
    formula, seen = formula_of(engine, head), []
    engine.trace = seen.append
    prompts = [TEXT, TEXT[::-1][:9]]
    out = engine.generate(prompts, [24, 30])
    texts = [prompt + each.tokens for prompt, each in zip(prompts, out, strict=True)]
    checked = 0
    for row in seen:
        if row["draft"]:
            before = texts[row["prompt"]][: row["position"]]
            assert row["draft"] == formula.parallel(
                taps_of(before, engine.drafter.aux_layers), before, len(row["draft"])
            )
            checked += 1
    assert checked > 8


BAD = {
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


@pytest.mark.parametrize("way", BAD)
def test_heads_that_do_not_fit_are_refused(target, tmp_path, way):  # noqa: F811
    fields, tensors, drop, says = BAD[way]
    head = head_of(target, tmp_path / "head", **PEAGLE)
    with pytest.raises(ValueError, match=says):
        load(target, changed(head, tmp_path / "other", tensors, drop, **fields))


def test_a_tree_is_refused(target, tmp_path):  # noqa: F811
    with pytest.raises(ValueError, match="a P-EAGLE head drafts a chain: tree does not apply"):
        load(target, head_of(target, tmp_path / "head", **PEAGLE), tree="2x2", draft_tokens=None)
