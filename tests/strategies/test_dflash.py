"""Strategy dflash: drafts under noise, by confidence and by search, adaptive lengths, and drafters that do not fit.
test_draft_heads.py has what holds for all heads."""

import functools
import itertools
import math
from dataclasses import replace

import cases
import numpy as np
import pytest
import torch
from heads import (
    DOMINO,
    DSPINE,
    FULL,
    LILICORR,
    OFTEN,
    SLIDING,
    TEXT,
    ZLAB,
    ZLAB2,
    assert_drafts,
    changed,
    hidden,
    made,
    traced,
)
from make_checkpoint import make
from make_dflash import SECOND
from path_search import log_p

import specker
from specker import cpu
from specker.kernels.noise import gumbel_at
from specker.model.sampling import Draws, pack
from specker.options import Sampling
from specker.runtime.control import policy
from specker.runtime.control.policy import Budget, Fixed
from specker.runtime.round.drafter import path_length
from specker.runtime.strategies.blocks.ngram import NGram, NGramCounts
from specker.runtime.strategies.blocks.ngram import read as read_ngram


@pytest.fixture(scope="module")
def usual(heads):
    return heads("dflash", "dflash")


@pytest.fixture(scope="module")
def spark(heads):
    return heads("dflash", "dspark")


def drafted(engine, rows, text):
    """The rows of a trace with a draft, each with the target's rows and the text that it follows."""
    taps = hidden(engine.model, text, engine.drafter.aux_layers)
    for row in rows:
        if row["draft"]:
            yield row, [depth[: row["position"] - 1] for depth in taps], text[: row["position"]]


@pytest.mark.parametrize("name", ["dflash", "dspark", "dflash2, factors", "domino", "dspine", "lilicorr"])
def test_sampled_drafts_are_ranked_under_the_noise_of_the_targets_draws(heads, name):
    head, how = heads("dflash", name), {"temperature": 0.7, "seed": 5}
    engine = head.load()
    formula, most = head.formula(engine), engine.drafter.spec.most
    out, rows = traced(engine, TEXT, 20, **how)
    assert out.tokens == cases.plain(head.target, TEXT, 20, **how) and out.stats.accepted
    # drafts without their probabilities take another way
    assert engine.generate(TEXT, 20, **how).stats.accepted == out.stats.accepted
    text, every = TEXT + out.tokens, torch.arange(128)
    assert [len(row["draft"]) for row in rows] == [min(most, len(text) - row["position"] - 1) for row in rows]
    for row, taps, before in drafted(engine, rows, text):
        size = len(row["draft"])
        noise = gumbel_at(5, len(before) - 1 + torch.arange(size), every.expand(size, -1)).double()
        assert row["draft"] == formula.block(taps, before, size, 0.7, noise)[0]


def test_noisy_logits_of_each_text_are_divided_by_its_temperature():
    each = [Sampling(), Sampling(temperature=0.7, seed=3)]
    both = Draws.of(each, torch.stack([pack(s) for s in each]), True)
    assert both.heat().tolist() == [1.0, 0.7]
    assert [Draws.one(s).heat() for s in each] == [1.0, 0.7]


@pytest.mark.parametrize("kind", ["confidence head", "probability"])
def test_confidence_ends_drafts(usual, spark, kind):
    """Policy draft-and-verify reads the confidence head where there is one, and else the token's probability."""
    head = spark if kind == "confidence head" else usual
    engine = head.load(policy="draft-and-verify")
    formula, most, sizes = head.formula(engine), engine.drafter.spec.most, set()
    out, rows = traced(engine, TEXT, 30)
    assert out.tokens == cases.plain(head.target, TEXT, 30)
    text = TEXT + out.tokens
    for row, taps, before in drafted(engine, rows, text):
        if len(text) - len(before) > most:  # a shorter text has shorter blocks
            size = len(row["draft"])
            tokens, scores, sure = formula.block(taps, before, most)
            confidence = sure if kind == "confidence head" else [math.exp(s) for s in scores]
            assert row["draft"] == tokens[:size]
            assert row["confidence"] == pytest.approx(confidence[:size], rel=1e-5)
            sizes.add(size)
    assert len(sizes) > 1


def test_a_scaled_embedding_of_the_target(tmp_path):
    """Gemma multiplies the rows of its embedding, also for a drafter that uses them."""
    target = make(tmp_path / "target", arch="gemma3", tied=True, layers=4, max_context=128)
    head = made(tmp_path / "drafter", "dflash", target, layout="zlab", layer_ids=[0, 1, 2])
    engine = head.load()
    out, rows = traced(engine, TEXT, 12)
    assert engine.model.embed_scale > 2
    assert assert_drafts(engine, head.formula(engine), rows, TEXT + out.tokens) > 1


@pytest.mark.parametrize("how", [{"layout": "deepspec", "markov": 6}, ZLAB, ZLAB2, DOMINO, DSPINE])
def test_a_trimmed_head_drafts_the_best_of_its_rows(tmp_path, how):
    head = made(tmp_path / "drafter", "dflash", **how)
    engine = head.load("+vocabtrim", vocab_keep=40, vocab_text=0)
    out, rows = traced(engine, TEXT, 16)
    assert out.tokens == cases.plain(head.target, TEXT, 16)
    formula = head.formula(engine)
    kept = torch.zeros(128).index_fill_(0, engine.trimmed_head.ids, 1).log().double()  # -inf for other ids
    assert len(engine.trimmed_head.ids) == 40
    for row, taps, before in drafted(engine, rows, TEXT + out.tokens):
        size = len(row["draft"])
        assert row["draft"] == formula.block(taps, before, size, 1.0, kept.expand(size, -1))[0]


def block_scores(formula, taps, before, size, heat=1.0):
    """The formula's log-probabilities [size, rows] of a block's tokens at a temperature."""
    rows = formula.rows(taps, before[-1], size)
    return (rows @ formula.head.T / heat).log_softmax(-1)


TREES = {
    "dflash": {},  # tokens are guessed independently of each other
    "jetspec": {},
    "dspark": {},
    "deepspec, gated": {},
    "dspark, recurrent": {},
    "domino": {},
    "dflash2": {},
    "dspine": {},
    "lilicorr": {},
}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", TREES)
def test_a_tree_holds_the_most_probable_beginnings_of_paths(heads, monkeypatch, name, temperature):
    """By what the drafter's head says after each path. A level is as wide as a tree, so that none is missed."""
    monkeypatch.setattr("specker.runtime.strategies.blocks.tree.WIDTH", 9)
    head, how = heads("dflash", name), {"temperature": temperature, "seed": 5}
    length, nodes = 3, 9
    engine = head.load(policy=None, cps="tree", draft_tokens=length, cps_candidates=64, cps_tau=1.0)
    formula, seen, candidates = head.formula(engine), 0, engine.drafter.spec.candidates or 64
    out, rows = traced(engine, TEXT, 20, **how)
    assert out.tokens == cases.plain(head.target, TEXT, 20, **how)
    text = TEXT + out.tokens
    for row, taps, before in drafted(engine, rows, text):
        if len(text) - len(before) <= nodes:  # the end of a text cuts the tree
            continue
        noise = None
        if temperature:
            every = torch.arange(128).expand(length, -1)
            noise = gumbel_at(5, len(before) - 1 + torch.arange(length), every).double()
        paths = [()]
        for token, parent in zip(row["draft"], row["parents"], strict=True):
            paths.append((*paths[parent], token))
        want = formula.probable(taps, before, (length, nodes, candidates), temperature or 1.0, noise)
        assert paths[1:] == want
        seen += 1
    assert seen > 2


@pytest.fixture(scope="module")
def ngram(usual, tmp_path_factory):
    """A file with the trigrams of texts of the target, and what it reads as."""
    how = {"strategy": "ar", "device": "cpu", "dtype": "float64", "batch_size": 3}
    plain, counts = specker.load(str(usual.target), **how), NGramCounts(128)
    for out in plain.generate([[0], [1], [2]], 120, temperature=1.0, seed=[0, 1, 2]):
        counts.add(out.tokens)
    path = tmp_path_factory.mktemp("ngram") / "ngram"
    path.write_bytes(NGram.fit(counts, totals={"texts": 3}).to_bytes())
    return path


@pytest.mark.parametrize(
    ("name", "cps", "searched"),
    [*cases.one_in(3, TREES, ["tree"], [False]), ("dflash", "tree", True), ("dflash", "chain", True)],
)
def test_searched_drafts_of_fixed_shape_are_those_of_others(heads, ngram, name, cps, searched):
    """The device searches them, and writes the columns of the rows that it accepted."""
    how = {"cps": cps, "batch_size": 2, **({"ngram": str(ngram)} if searched else {})}
    head = heads("dflash", name)
    fixed, placed = (head.load(graphs=graphs, **how) for graphs in ("on", "off"))
    for how in ({}, {"temperature": 0.7, "seed": 5}):
        fixed.trace, placed.trace = (rows := []).append, (others := []).append
        got, other = (engine.generate([TEXT, TEXT[:9]], 24, **how) for engine in (fixed, placed))
        for prompt, out, want in zip((TEXT, TEXT[:9]), got, other, strict=True):
            assert out.tokens == want.tokens == cases.plain(head.target, prompt, 24, **how)
        ends = [len(TEXT) + 12, 9 + 12]  # the end of a text cuts drafts that the host places
        kept = [[row for row in each if row["position"] < ends[row["prompt"]]] for each in (rows, others)]
        assert len(kept[0]) > 10
        for row, same in zip(*kept, strict=True):
            assert all(row[name] == same[name] for name in ("prompt", "position", "draft", "parents", "path"))
            assert row["diffusion"] == pytest.approx(same["diffusion"])
    assert fixed.loop.launched


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_searched_path_is_the_best_one_by_both_models_and_the_noise(usual, ngram, temperature):
    """lambda log p + (1 - lambda) log p_ngram / T + g, with lambda 1 at the first position."""
    engine = usual.load(cps="chain", draft_tokens=3, ngram=str(ngram))
    engine.drafter.search = replace(engine.drafter.search, paths=64, mass=1.0, weight=0.3)
    formula, model, sampling = usual.formula(engine), read_ngram(ngram), {"temperature": temperature, "seed": 5}
    out, rows = traced(engine, TEXT, 20, **sampling)
    assert out.tokens == cases.plain(usual.target, TEXT, 20, **sampling) and out.stats.accepted
    text, ids, heat = TEXT + out.tokens, formula.ids().numpy(), temperature or 1.0
    differs = 0
    for row, taps, before in drafted(engine, rows, text):
        size = len(row["draft"])
        if size < 3:
            continue
        scores = block_scores(formula, taps, before, size, heat).numpy()
        noise = np.zeros_like(scores)
        if temperature:
            at = len(before) - 1 + torch.arange(size)
            noise = gumbel_at(5, at, torch.from_numpy(ids).expand(size, -1)).double().numpy()
        following = functools.cache(lambda *tail, ids=ids: log_p(model, np.array([tail]), ids)[0])
        total = {}
        for path in itertools.product(range(len(ids)), repeat=size):
            tokens, score = [*before, *ids[list(path)].tolist()], 0.0
            for i, n in enumerate(path):
                tail = tokens[len(before) + i - 2 : len(before) + i]
                share = 0.7 * float(following(*tail)[n]) / heat if i else 0.0
                score += (0.3 if i else 1.0) * scores[i, n] + share + noise[i, n]
            total[tuple(tokens[len(before) :])] = score
        best = max(total, key=total.get)
        assert tuple(row["draft"]) == best
        differs += list(best) != ids[(scores + noise).argmax(1)].tolist()
    assert differs  # from the best token of each position


@pytest.mark.usefixtures("cheap")  # the rule does not depend on the clock
@pytest.mark.parametrize(("cps", "graphs"), [("off", "off"), ("off", "on"), ("chain", "off"), ("tree", "off")])
def test_the_adaptive_length_follows_its_rule(usual, cps, graphs):
    """k of every round, by ADL's formula, from the guesses before a stop token and the accepted ones. A round of fixed
    shape starts before the one before it is known, so its k is a round late."""
    engine = usual.load(policy=None, adl="1-4", cps=cps, graphs=graphs)
    assert engine.options.policy == "adl"
    out, rows = traced(engine, TEXT, 40)
    assert out.tokens == cases.plain(usual.target, TEXT, 40) and out.stats.accepted
    generated = accepted = 0.0
    rule = [4, 4] if graphs == "on" else [4]
    for row in rows:
        if not row["draft"] or len(TEXT) + 40 - row["position"] <= 12:  # the end of a text cuts drafts
            continue
        length = rule.pop(0)
        assert row["diffusion"]["generated"] == length  # none of OFTEN is a stop token
        assert path_length(row["parents"] if cps == "tree" else range(len(row["draft"]))) <= length
        generated += 0.5 * (length - generated)
        accepted += 0.5 * (len(row["path"]) - 1 - accepted)
        rule.append(min(max(int(generated) + 10 * (accepted >= generated), 1), 4))
    assert generated < 3


@pytest.mark.parametrize(("name", "graphs"), cases.one_in(2, ["dflash", "dspark"], ["off", "on"]))
def test_the_measured_policy_drafts_after_a_warm_up(heads, name, graphs):
    """Policy auto chooses lengths up to the block's."""
    head = heads("dflash", name)
    engine = head.load(policy=None, graphs=graphs)
    engine.warmup()
    most = engine.drafter.spec.most
    assert engine.plan.largest.depth == engine.options.draft_tokens == most
    assert engine.policy().budgets()[-1].depth == most and not engine.policy().confident
    assert engine.generate(TEXT, 30).tokens == cases.plain(head.target, TEXT, 30)


@pytest.mark.parametrize(("name", "graphs"), cases.one_in(2, ["dflash", "domino", "dflash2"], ["off", "on"]))
def test_the_measured_policy_drafts_trees_or_chains(heads, monkeypatch, name, graphs):
    """Policy auto chooses among chains and trees, of which every one drafts what the budget says."""
    head = heads("dflash", name)
    engine = head.load(policy=None, cps="tree", graphs=graphs)
    most, shapes = engine.drafter.spec.most, engine.policy().budgets()
    assert {shape.nodes for shape in shapes if shape.tree} <= set(policy.TREES) and any(shape.tree for shape in shapes)
    assert engine.plan.budgets == shapes and engine.plan.largest == Budget(max(shape.nodes for shape in shapes), most)
    for shape in shapes:
        monkeypatch.setattr(engine.session, "_policy", lambda asked, shape=shape: Fixed(shape.nodes, shape.depth))
        out, rows = traced(engine, TEXT, 14)
        assert out.tokens == cases.plain(head.target, TEXT, 14)
        for row in rows:
            if len(TEXT) + 14 - row["position"] > most + 1:  # the end of a text cuts drafts
                assert len(row["draft"]) == min(shape.nodes, 60 if name == "dflash" else 64)  # its head has three ids
                assert path_length(row["parents"]) <= shape.depth
                assert shape.tree or row["parents"] == list(range(shape.nodes))


@pytest.mark.parametrize(
    ("name", "candidates", "mass"), [("dflash", 15, 0.8), ("dspark", 60, 0.99), ("domino", 60, 0.99)]
)
def test_a_head_that_ranks_paths_has_more_candidates(heads, name, candidates, mass):
    how = heads("dflash", name).load(cps="tree").drafter.search
    assert (how.candidates, how.mass) == (candidates, mass)
    how = heads("dflash", name).load(cps="tree", cps_candidates=7, cps_tau=0.5).drafter.search
    assert (how.candidates, how.mass) == (7, 0.5)


@pytest.mark.parametrize(("dtype", "quantize"), cases.one_in(2, ["float32", "bfloat16"], [None, "int8", "int4"]))
def test_other_types_and_quantised_drafters(tmp_path, dtype, quantize):
    """With sizes that the CPU's compiled layers run."""
    target = make(tmp_path / "target", layers=4, hidden=64, heads=2, kv_heads=1, head_dim=64, ffn=128, max_context=128)
    spark = {"layout": "dspark", "ids": OFTEN, "markov": 32, "confidence": "rows and markov"}
    for name, how in {
        "dspark": spark,
        "dflash2": ZLAB2,
        "domino": DOMINO,
        "dspine": DSPINE,
        "lilicorr": LILICORR,
    }.items():
        head = made(tmp_path / name, "dflash", target, heads=(2, 1, 64), inner=128, layer_ids=[0, 1], **how)
        engine = head.load(dtype=dtype, draft_quantize=quantize, quantize=quantize)
        out = engine.generate(TEXT, 24)
        assert engine.check(TEXT, out, 24).identical and out.stats.drafted > 24
        if quantize is None and cpu.available():
            assert (engine.drafter.model.stack is None) == (name == "dflash2")


BAD = {
    "another width": ({"target_hidden_size": 32}, "a drafter for a target of width 32, and the target has 64"),
    "other layers": ({"num_target_layers": 36}, "a drafter for a target with 36 layers, and the target has 8"),
    "another kind": (
        {"speculators_model_type": "eagle3"},
        "architecture speculators eagle3 is not supported by strategy dflash",
    ),
    "a size that is missing": ({"speculators_model_type": "dflash2"}, "conv_group_size must be a whole number from 1"),
    "a mixture": ({"speculators_model_type": "dflash2", "draft_ffn_type": "moe"}, "of type 'moe'; specker reads dense"),
    "kept rows of DFlash2": (
        {"speculators_model_type": "dflash2", **SECOND},
        "has a head of 3 rows; a drafter of kind dflash2 needs every id",
    ),
    "unknown field": ({"gating": 2}, "the field 'gating', which specker does not know there"),
    "a field of the layers": (
        {"sliding_window": 2048},
        "the field 'sliding_window', which specker does",
    ),
    "unknown inner field": ({"dflash_config": {"conv_kernel_size": 2}}, "the field 'dflash_config.conv_kernel_size'"),
    "no layers": ({"aux_hidden_state_layer_ids": None}, "must be a list of layers, got None"),
    "layers that descend": ({"aux_hidden_state_layer_ids": [5, 2, 7]}, "must ascend and name inputs of the target's"),
    "the last layer's output": ({"aux_hidden_state_layer_ids": [2, 5, 8]}, "of the target's layers 0 to 7"),
    "another number of layers": ({"aux_hidden_state_layer_ids": [2, 5]}, "fc.weight has shape"),
    "another head size": ({"draft_vocab_size": 4}, "lm_head.weight has shape"),
    "no block": ({"block_size": None}, "block_size of .* must be a whole number, got None"),
    "an empty block": ({"block_size": 1}, "block_size 1, which leaves no token to draft"),
    "no mask": ({"mask_token_id": 128}, "must name mask_token_id, an id below 128; it is 128"),
    "a Markov head of another type": (
        {"markov_rank": 4, "markov_head_type": "gru"},
        "type 'gru'; specker runs vanilla, gated",
    ),
    "a Markov head that is missing": ({"markov_rank": 4}, "lacks markov_head.markov_w1.weight"),
    "a confidence head that is missing": ({"enable_confidence_head": True}, "lacks confidence_head.proj.weight"),
    "a soft cap with Markov": (
        {"markov_rank": 4, "final_logit_softcapping": 30.0},
        "specker caps no logits of a Markov head",
    ),
    "confidence without Markov": (
        {"enable_confidence_head": True, "confidence_head_with_markov": True},
        "says confidence_head_with_markov, and has no Markov head",
    ),
}


@pytest.mark.parametrize("way", BAD)
def test_configs_that_do_not_fit_are_refused(usual, tmp_path, way):
    fields, says = BAD[way]
    with pytest.raises(ValueError, match=says):
        changed(usual, tmp_path / "drafter", **fields).load()


def test_a_markov_head_without_its_rank_is_refused(usual, tmp_path):
    tensors = {"markov_head.markov_w1.weight": torch.ones(128, 4)}
    with pytest.raises(ValueError, match=r"has markov_head\.markov_w1"):
        changed(usual, tmp_path / "drafter", tensors).load()


def test_a_head_that_the_target_cannot_replace_is_refused(usual, tmp_path):
    with pytest.raises(ValueError, match=r"lacks lm_head\.weight, and the target's head"):
        changed(usual, tmp_path / "drafter", drop=("lm_head.weight",)).load()


LAYERS = {
    "groups that leave a rest": (
        {"layout": "zlab2", "outer": {"dflash_config": {**SECOND, "mask_token_id": 5, "conv_group_size": 48}}},
        "conv_group_size 48 of .* must divide its width 64",
    ),
    "a factor of 0": (
        {"layout": "zlab2", "second": {"output_multiplier": 0}},
        "output_multiplier of .* must be a number above 0, got 0",
    ),
    "no direction": (
        {"outer": {"dflash_config": {"mask_token_id": 5, "causal_head": "yes"}}},
        "is_causal or causal or causal_head of .* must be true or false, got 'yes'",
    ),
    "another projector": (
        {"outer": {"dflash_config": {"mask_token_id": 5, "projector_type": "dspark"}}},
        "a DFlashDraftModel with projector_type 'dspark'; specker reads dflash, domino, causal_v5",
    ),
    "a plain Domino": (
        {"layout": "domino", "gru": {"projector_type": "dflash"}},
        "a DominoDraftModel with projector_type 'dflash'",
    ),
    "another architecture": (
        {"outer": {"architectures": ["DSparkDraftModel"]}},
        "architecture DSparkDraftModel is not supported by strategy dflash",
    ),
    "outputs beyond the layers": ({"layer_ids": [1, 7]}, "must ascend and name outputs of the target's layers -1 to 6"),
    "another vocabulary": ({"layer": {"vocab_size": 96}}, "a drafter for a target with 96 ids, and the target has 128"),
    "windows somewhere": ({"layer": {"use_sliding_window": True}}, "names no layer_types, which say where"),
    "too few kinds": ({"layer": {"layer_types": [FULL]}}, "layer_types of .* must name one of"),
    "no window": ({"layer": {"layer_types": [FULL, SLIDING]}}, "sliding window, and names no sliding_window"),
    "a soft cap below 0": ({"outer": {"final_logit_softcapping": -1}}, "must be a number from 0 on, got -1"),
    "other biases": ({"layer": {"mlp_bias": True}}, "says mlp_bias, and a drafter of blocks has no bias there"),
    "no embedding": ({"width": 24, "heads": (3, 1, 8), "outer": {"target_hidden_size": 64}}, "lacks embed_tokens"),
}


@pytest.mark.parametrize("way", LAYERS)
def test_flat_configs_that_do_not_fit_are_refused(tmp_path, way):
    how, says = LAYERS[way]
    with pytest.raises(ValueError, match=says):
        made(tmp_path / "drafter", "dflash", **(ZLAB | how)).load()


MASKS = {
    "another id": ({"mask_token_id": 3, "embedding": torch.ones(64)}, "is for mask_token_id 3, not 126"),
    "another size": (torch.ones(63), "must hold the embedding of a mask, 64 finite numbers"),
    "NaN": (torch.full((64,), float("nan")), "64 finite numbers"),
    "no tensor": ({"embedding": 3}, "64 finite numbers"),
    "code": (print, "is not a file of tensors"),
}


@pytest.mark.parametrize("way", MASKS)
def test_a_mask_that_does_not_fit_is_refused(tmp_path, way):
    head, (saved, says) = made(tmp_path / "drafter", "dflash", **ZLAB), MASKS[way]
    torch.save(saved, head.folder / "mask_embedding.pt")
    with pytest.raises(ValueError, match=says):
        head.load()


OPTIONS = {
    "too long": ({"draft_tokens": 5}, "draft_tokens=5 is more than this drafter's blocks have: at most 4 tokens"),
    "too long at most": ({"policy": "adl", "adl": "2-5"}, "adl='2-5' is more than this drafter's blocks have"),
    "another tree": ({"tree": "2x3"}, "strategy dflash drafts a block: tree does not apply, but cps='tree' does"),
    "a path token by token": (
        {"policy": "draft-and-verify", "cps": "chain"},
        "ends a draft token by token, but cps='chain' drafts a whole path",
    ),
}


@pytest.mark.parametrize("way", OPTIONS)
def test_options_that_do_not_apply_are_refused(usual, way):
    options, says = OPTIONS[way]
    with pytest.raises(ValueError, match=says):
        usual.load(**options)


def test_a_markov_head_is_not_searched(spark):
    with pytest.raises(ValueError, match="cps='chain' does not apply: the drafter's Markov head guesses one token"):
        spark.load(cps="chain")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("dflash2", "candidate selector"),
        ("domino", "GRU"),
        ("dspine", "transition table"),
        ("lilicorr", "transition table"),
    ],
)
def test_what_chooses_one_token_after_another_is_not_searched(heads, name, what):
    with pytest.raises(ValueError, match=f"the drafter's {what} guesses one token after another"):
        heads("dflash", name).load(cps="chain")
