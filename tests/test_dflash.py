"""Strategy dflash: drafters of every layout draft what an independent formula says, and change no token."""

import itertools
import json
import math
from dataclasses import replace

import cases
import numpy as np
import pytest
import torch
from make_checkpoint import edit, make
from make_dflash import Formula, make_dflash
from safetensors.torch import load_file, save_file

import specker
from specker.kernels.noise import gumbel_at
from specker.model.cache import KVCache
from specker.model.prefill import prefill
from specker.options import Params
from specker.runtime.round.drafter import path_length
from specker.runtime.strategies.blocks.ngram import NGram, NGramCounts
from specker.runtime.strategies.blocks.ngram import read as read_ngram

OFTEN = [35, 74, 119]  # ids that the target writes often, so that a random drafter with these rows is often right
FULL, SLIDING = "full_attention", "sliding_attention"
MIXED = {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 12, "use_sliding_window": True}
LAYOUTS = {
    "z-lab": {"layout": "zlab"},
    "z-lab, one layer": {"layout": "zlab", "layers": 1},
    "z-lab, block in dflash_config": {
        "layout": "zlab",
        "size": 9,
        "layer_ids": [1, 5],
        "outer": {"block_size": None, "dflash_config": {"block_size": 9, "mask_token_id": 90}},
    },
    "z-lab, causal": {
        "layout": "zlab",
        "outer": {"dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 4, 6], "causal": True}},
    },
    "z-lab, mask file": {"layout": "zlab", "mask_file": "tensor"},
    "z-lab, mask table": {"layout": "zlab", "mask_file": "table"},
    "z-lab, biases": {"layout": "zlab", "bias": True},
    "z-lab, windows": {"layout": "zlab", "layers": 3, "layer": MIXED},
    "speculators dflash": {"layout": "dflash", "ids": OFTEN},
    "speculators dflash, every id": {"layout": "dflash"},
    "another width": {"layout": "dflash", "ids": OFTEN, "width": 24, "heads": (3, 1, 8)},
    "speculators dflash, the target's head": {"layout": "dflash", "own": ("embed_tokens",)},
    "speculators dflash from its anchor": {"layout": "dflash", "ids": OFTEN, "outer": {"sample_from_anchor": True}},
    "speculators dflash, windows": {
        "layout": "dflash",
        "ids": OFTEN,
        "layers": 3,
        "layer": MIXED,
        "outer": {"sliding_window_non_causal": True},
    },
    "speculators dspark": {"layout": "dspark", "ids": OFTEN, "markov": 6, "confidence": "rows and markov"},
    "speculators dspark, bonus anchor": {
        "layout": "dspark",
        "ids": OFTEN,
        "markov": 6,
        "confidence": "rows",
        "outer": {"sample_from_anchor": False},
    },
    "DeepSpec": {"layout": "deepspec", "markov": 6, "confidence": "rows and markov"},
    "DeepSpec, gated": {"layout": "deepspec", "markov": 6, "markov_kind": "gated", "confidence": "rows and markov"},
    "speculators, recurrent": {"layout": "dspark", "ids": OFTEN, "markov": 6, "markov_kind": "rnn"},
    "DeepSpec without heads": {"layout": "deepspec", "layer_ids": [-1, 3, 5]},
    "DeepSpec, confidence alone": {"layout": "deepspec", "confidence": "rows"},
}
DEPTHS = {"DeepSpec without heads": (0, 4, 6), "z-lab, block in dflash_config": (2, 6)}
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make(tmp_path_factory.mktemp("dflash") / "target", layers=8, max_context=256, seed=2)


@pytest.fixture(scope="module")
def usual(target, tmp_path_factory):
    return drafter_of(target, tmp_path_factory.mktemp("drafter"), layout="dflash", ids=OFTEN)


@pytest.fixture(scope="module")
def spark(target, tmp_path_factory):
    how = {"layout": "dspark", "ids": OFTEN, "markov": 6, "confidence": "rows and markov"}
    return drafter_of(target, tmp_path_factory.mktemp("spark"), **how)


def drafter_of(target, folder, **how):
    return make_dflash(folder, json.loads((target / "config.json").read_text()), **how)


def load(target, drafter, strategy="dflash", **options):
    options = {"policy": "fixed", **options}
    return specker.load(str(target), str(drafter), strategy=strategy, device="cpu", dtype="float64", **options)


def formula_of(engine, drafter):
    return Formula(drafter, engine.model.embed, engine.model.head)


def assert_drafts(seen, text, formula, taps_of, depths, most):
    """The drafts of a trace, and their probabilities, are those of the formula after the same texts; shorter at the end
    of the text."""
    for row in seen:
        before, size = text[: row["position"]], len(row["draft"])
        assert size == min(most, len(text) - len(before) - 1)
        if size:
            tokens, scores, _ = formula.block(taps_of(before, depths), before, size)
            assert row["draft"] == tokens
            assert row["probability"] == pytest.approx([math.exp(s) for s in scores], rel=1e-6)


@pytest.mark.parametrize("way", cases.one_in(2, LAYOUTS))
def test_drafts_are_those_of_the_formula(target, tmp_path, taps_of, way):
    drafter = drafter_of(target, tmp_path / "drafter", **LAYOUTS[way])
    engine = load(target, drafter)
    seen = []
    engine.trace = seen.append
    out = engine.generate(TEXT, 32)
    assert engine.check(TEXT, out, 32).identical
    assert engine.drafter.aux_layers == DEPTHS.get(way, (2, 5, 7))
    assert (out.stats.accepted > 0) or ("ids" not in LAYOUTS[way])
    most = engine.drafter.spec.most
    assert most == LAYOUTS[way].get("size", 5) - (not formula_of(engine, drafter).following)
    assert_drafts(seen, TEXT + out.tokens, formula_of(engine, drafter), taps_of, engine.drafter.aux_layers, most)


def test_sampled_drafts_are_ranked_under_the_noise_of_the_targets_draws(target, usual, spark, taps_of):
    for drafter in (usual, spark):
        engine = load(target, drafter)
        formula, most, seen = formula_of(engine, drafter), engine.drafter.spec.most, []
        engine.trace = seen.append
        out = engine.generate(TEXT, 24, temperature=0.7, seed=5)
        assert engine.check(TEXT, out, 24, temperature=0.7, seed=5).identical
        engine.trace = None  # drafts without their probabilities take another way
        assert (
            out.stats.accepted
            and engine.generate(TEXT, 24, temperature=0.7, seed=5).stats.accepted == out.stats.accepted
        )
        text, every = TEXT + out.tokens, torch.arange(128)
        for row in seen:
            before, size = text[: row["position"]], len(row["draft"])
            assert size == min(most, len(text) - len(before) - 1)
            if size:
                at = len(before) - 1 + torch.arange(size)
                noise = gumbel_at(5, at, every.expand(size, -1)).double()
                taps = taps_of(before, engine.drafter.aux_layers)
                assert row["draft"] == formula.block(taps, before, size, 0.7, noise)[0]


@pytest.mark.parametrize("kind", ["confidence head", "probability"])
def test_confidence_ends_drafts(target, usual, spark, taps_of, kind):
    """Policy draft-and-verify reads the confidence head where there is one, and else the token's probability."""
    drafter = spark if kind == "confidence head" else usual
    engine = load(target, drafter, policy="draft-and-verify")
    formula, most, seen = formula_of(engine, drafter), engine.drafter.spec.most, []
    engine.trace = seen.append
    out = engine.generate(TEXT, 40)
    assert engine.check(TEXT, out, 40).identical
    text, sizes = TEXT + out.tokens, set()
    for row in seen:
        before, size = text[: row["position"]], len(row["draft"])
        if size:
            tokens, scores, sure = formula.block(taps_of(before, engine.drafter.aux_layers), before, min(most, 40))
            confidence = sure if kind == "confidence head" else [math.exp(s) for s in scores]
            if len(text) - len(before) > most:  # a shorter text has shorter blocks
                assert row["draft"] == tokens[:size]
                assert row["confidence"] == pytest.approx(confidence[:size], rel=1e-5)
                sizes.add(size)
    assert len(sizes) > 1


def test_a_scaled_embedding_of_the_target(tmp_path):
    """Gemma multiplies the rows of its embedding, also for a drafter that uses them."""
    target = make(tmp_path / "target", arch="gemma3", tied=True, layers=4, max_context=128)
    drafter = drafter_of(target, tmp_path / "drafter", layout="zlab", layer_ids=[0, 1, 2])
    engine, seen = load(target, drafter), []
    engine.trace = seen.append
    out = engine.generate(TEXT, 12)
    model = engine.model
    formula = Formula(drafter, model.embed * model.embed_scale, model.head)

    def taps_of(text, depths):
        cache = KVCache(model.config, 128, dtype=model.dtype, device="cpu")
        return list(prefill(model, cache, text[:-1], depths, len(text)).values())

    assert model.embed_scale > 2
    assert_drafts(seen, TEXT + out.tokens, formula, taps_of, engine.drafter.aux_layers, 4)


SAMPLING = {"greedy": {}, "sampled": {"temperature": 0.9, "seed": 4, "top_k": 20}}


@pytest.mark.parametrize("strategy", ["dflash", "dflash+lookup"])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_batches_change_no_token(target, usual, spark, strategy, sampling):
    """Texts of unequal length in fewer slots than there are, prompts of one token and of several chunks among them."""
    prompts = [TEXT, [7], TEXT[:5] * 2, [n % 100 for n in range(90)], TEXT[::-1], [5, 6]]
    counts = [20, 9, 30, 12, 25, 16]
    for drafter in (usual, spark):
        engine = load(target, drafter, strategy, batch_size=3, max_context=256, page_size=16)
        plain = [engine.generate_ar(p, n, **SAMPLING[sampling]).tokens for p, n in zip(prompts, counts, strict=True)]
        out = engine.generate(prompts, counts, **SAMPLING[sampling])
        assert [each.tokens for each in out] == plain
        if strategy == "dflash":  # measured times decide how often text is copied instead
            assert sum(each.stats.accepted for each in out) > 1


def test_drafts_in_a_batch_are_those_of_the_formula(target, spark, taps_of):
    prompts, seen = [TEXT, TEXT[:9], TEXT[::-1]], []
    engine = load(target, spark, batch_size=2)
    engine.trace = seen.append
    out = engine.generate(prompts, 24)
    formula = formula_of(engine, spark)
    for n, (prompt, each) in enumerate(zip(prompts, out, strict=True)):
        rows = [row for row in seen if row["prompt"] == n and len(prompt) + 24 - row["position"] > 6]
        assert rows
        for row in rows:
            before = (prompt + each.tokens)[: row["position"]]
            taps = taps_of(before, engine.drafter.aux_layers)
            assert row["draft"] == formula.block(taps, before, len(row["draft"]))[0]


@pytest.mark.parametrize("prefixes", ["all", "exact"])
def test_a_known_beginning_gives_the_drafts_of_a_fresh_prompt(target, usual, taps_of, prefixes):
    engine = load(target, usual, prefix_cache=prefixes, page_size=8)
    formula = formula_of(engine, usual)
    first = engine.generate(TEXT, 20)
    for prompt in (TEXT + [8, 8, 8], (TEXT + first.tokens)[:30], TEXT[:12] + [1, 2, 3, 4], TEXT):
        seen = []
        engine.trace = seen.append
        out = engine.generate(prompt, 12)
        assert_drafts(seen, prompt + out.tokens, formula, taps_of, engine.drafter.aux_layers, 4)
        if prefixes == "all":  # a column depends on no later token, so every common one is taken over
            pairs = zip(prompt[:-1], TEXT + first.tokens, strict=False)
            same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
            assert out.stats.prompt <= len(prompt) - 1 - same


def test_cancelled_requests_leave_the_others_alone(target, usual):
    engine = load(target, usual, batch_size=2)
    plain = engine.generate_ar(TEXT, 30).tokens
    session = engine.session
    requests = [session.submit(TEXT, Params(max_new_tokens=30)) for _ in range(4)]
    session.step(), session.step()
    session.cancel(requests[1])
    while session.busy:
        session.step()
    assert [r.finished for r in requests] == ["length", "cancelled", "length", "length"]
    assert all(r.tokens == plain for i, r in enumerate(requests) if i != 1)
    assert engine.drafter.cache.free_pages == engine.drafter.cache.spare


@pytest.mark.parametrize("markov", [0, 6])
def test_a_trimmed_head_drafts_the_best_of_its_rows(target, tmp_path, taps_of, markov):
    layout = {"layout": "deepspec", "markov": markov} if markov else {"layout": "zlab"}
    drafter = drafter_of(target, tmp_path / "drafter", **layout)
    engine = load(target, drafter, "dflash+vocabtrim", vocab_keep=40, vocab_text=0, vocab_learn="off")
    seen = []
    engine.trace = seen.append
    out = engine.generate(TEXT, 24)
    assert engine.check(TEXT, out, 24).identical
    formula, text = formula_of(engine, drafter), TEXT + out.tokens
    kept = torch.zeros(128).index_fill_(0, engine.kept.ids, 1).log().double()  # -inf for other ids
    assert len(engine.kept.ids) == 40
    for row in seen:
        if size := len(row["draft"]):
            before = text[: row["position"]]
            want = formula.block(taps_of(before, engine.drafter.aux_layers), before, size, 1.0, kept.expand(size, -1))
            assert row["draft"] == want[0]


def block_scores(formula, taps_of, depths, before, size, heat=1.0):
    """The formula's log-probabilities [size, rows] of a block's tokens at a temperature."""
    rows = formula.rows(taps_of(before, depths), before[-1], size)
    return (rows @ formula.head.T / heat).log_softmax(-1)


@pytest.mark.parametrize(("length", "nodes"), [(3, 6), (4, 12)])
def test_a_tree_holds_the_most_probable_beginnings_of_paths(target, usual, taps_of, length, nodes):
    """Tokens of a block are guessed independently, so a path's probability is the product of theirs."""
    engine = load(target, usual, policy=None, cps="tree", draft_tokens=length)
    engine.drafter.search = replace(engine.drafter.search, nodes=nodes // length, mass=1.0)
    formula, seen = formula_of(engine, usual), []
    engine.trace = seen.append
    out = engine.generate(TEXT, 24)
    assert engine.check(TEXT, out, 24).identical and out.stats.accepted
    text, ids = TEXT + out.tokens, formula.ids().tolist()
    for row in seen:
        before = text[: row["position"]]
        if len(text) - len(before) <= nodes:  # the end of a text cuts the tree
            continue
        scores = block_scores(formula, taps_of, engine.drafter.aux_layers, before, length)
        total = {}
        for depth in range(1, length + 1):
            for path in itertools.product(range(len(ids)), repeat=depth):
                total[tuple(ids[n] for n in path)] = float(sum(scores[i, n] for i, n in enumerate(path)))
        paths = [()]
        for token, parent in zip(row["draft"], row["parents"], strict=True):
            paths.append((*paths[parent], token))
        best = sorted(total, key=lambda path: -total[path])
        assert paths[1:] == best[:nodes]


@pytest.fixture(scope="module")
def ngram(target, tmp_path_factory):
    """A file with the trigrams of texts of the target, and what it reads as."""
    plain, counts = specker.load(str(target), strategy="ar", device="cpu", dtype="float64"), NGramCounts(128)
    for seed in range(3):
        counts.add(plain.generate([seed], 120, temperature=1.0, seed=seed).tokens)
    path = tmp_path_factory.mktemp("ngram") / "ngram"
    path.write_bytes(NGram.fit(counts, totals={"texts": 3}).to_bytes())
    return path


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_searched_path_is_the_best_one_by_both_models_and_the_noise(target, usual, taps_of, ngram, temperature):
    """lambda log p + (1 - lambda) log p_ngram / T + g, with lambda 1 at the first position."""
    engine = load(target, usual, cps="chain", draft_tokens=3, ngram=str(ngram))
    engine.drafter.search = replace(engine.drafter.search, paths=64, mass=1.0, weight=0.3)
    formula, model, seen = formula_of(engine, usual), read_ngram(ngram), []
    engine.trace = seen.append
    out = engine.generate(TEXT, 24, temperature=temperature, seed=5)
    assert engine.check(TEXT, out, 24, temperature=temperature, seed=5).identical and out.stats.accepted
    text, ids, heat = TEXT + out.tokens, formula.ids().numpy(), temperature or 1.0
    differs = 0
    for row in seen:
        before, size = text[: row["position"]], len(row["draft"])
        if size < 3:
            continue
        scores = block_scores(formula, taps_of, engine.drafter.aux_layers, before, size, heat).numpy()
        noise = np.zeros_like(scores)
        if temperature:
            at = len(before) - 1 + torch.arange(size)
            noise = gumbel_at(5, at, torch.from_numpy(ids).expand(size, -1)).double().numpy()
        total = {}
        for path in itertools.product(range(len(ids)), repeat=size):
            tokens, score = [*before, *ids[list(path)].tolist()], 0.0
            for i, n in enumerate(path):
                tail = np.array([tokens[len(before) + i - 2 : len(before) + i]])
                share = 0.7 * float(model.log_p(tail, ids[n : n + 1])[0, 0]) / heat if i else 0.0
                score += (0.3 if i else 1.0) * scores[i, n] + share + noise[i, n]
            total[tuple(tokens[len(before) :])] = score
        best = max(total, key=total.get)
        assert tuple(row["draft"]) == best
        differs += list(best) != ids[(scores + noise).argmax(1)].tolist()
    assert differs  # from the best token of each position


@pytest.mark.usefixtures("cheap")  # the rule does not depend on the clock
@pytest.mark.parametrize(("cps", "graphs"), [("off", "off"), ("off", "on"), ("chain", "off"), ("tree", "off")])
def test_the_adaptive_length_follows_its_rule(target, usual, cps, graphs):
    """k of every round, by ADL's formula, from the guesses before a stop token and the accepted ones. A round of fixed
    shape starts before the one before it is known, so its k is a round late."""
    engine = load(target, usual, policy=None, adl="1-4", cps=cps, graphs=graphs)
    assert engine.options.policy == "adl"
    seen = []
    engine.trace = seen.append
    out = engine.generate(TEXT, 40)
    assert engine.check(TEXT, out, 40).identical and out.stats.accepted
    generated = accepted = 0.0
    rule = [4, 4] if graphs == "on" else [4]
    for row in seen:
        if not row["draft"] or len(TEXT) + 40 - row["position"] <= 12:  # the end of a text cuts drafts
            continue
        length = rule.pop(0)
        assert row["diffusion"]["generated"] == length  # none of OFTEN is a stop token
        assert path_length(row["parents"] if cps == "tree" else range(len(row["draft"]))) <= length
        generated += 0.5 * (length - generated)
        accepted += 0.5 * (len(row["path"]) - 1 - accepted)
        rule.append(min(max(int(generated) + 10 * (accepted >= generated), 1), 4))
    assert generated < 3


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_the_measured_policy_drafts_after_a_warm_up(target, usual, spark, monkeypatch, kind):
    """Policy auto chooses lengths up to the block's, and the warm-up measures what blocks cost."""
    engine = load(target, usual if kind == "dflash" else spark, policy=None)
    sizes, propose = [], engine.drafter.propose

    def watched(batch):
        made = propose(batch)
        sizes.append((made.size, min(batch.budget.nodes, batch.budget.depth)))
        return made

    monkeypatch.setattr(engine.drafter, "propose", watched)
    engine.warmup()
    assert len(sizes) > 8 and all(size == asked for size, asked in sizes)
    most = engine.drafter.spec.most
    assert engine.plan.largest.depth == engine.options.draft_tokens == most
    assert engine.policy().budgets()[-1].depth == most and not engine.policy().confident
    out = engine.generate(TEXT, 40)
    assert engine.check(TEXT, out, 40).identical


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_other_types_and_quantised_drafters(tmp_path, dtype, quantize):
    """With sizes that the CPU's compiled layers run."""
    target = make(tmp_path / "target", layers=4, hidden=64, heads=2, kv_heads=1, head_dim=64, ffn=128, max_context=128)
    how = {"layout": "dspark", "ids": OFTEN, "markov": 32, "confidence": "rows and markov", "layer_ids": [0, 1]}
    drafter = drafter_of(target, tmp_path / "drafter", heads=(2, 1, 64), inner=128, **how)
    options = {"strategy": "dflash", "policy": "fixed", "device": "cpu", "dtype": dtype, "draft_quantize": quantize}
    engine = specker.load(str(target), str(drafter), **options)
    out = engine.generate(TEXT, 24)
    assert engine.check(TEXT, out, 24).identical and out.stats.drafted > 24


def changed(drafter, folder, tensors=None, drop=(), **config):
    """A copy of a drafter with other tensors and fields."""
    folder.mkdir()
    x = {name: t for name, t in load_file(drafter / "model.safetensors").items() if name not in drop}
    save_file({**x, **(tensors or {})}, folder / "model.safetensors")
    (folder / "config.json").write_text((drafter / "config.json").read_text())
    edit(folder, **config)
    return folder


BAD = {
    "another width": ({"target_hidden_size": 32}, "a drafter for a target of width 32, and the target has 64"),
    "other layers": ({"num_target_layers": 36}, "a drafter for a target with 36 layers, and the target has 8"),
    "another kind": ({"speculators_model_type": "eagle3"}, "of type 'eagle3'; dflash reads dflash and dspark"),
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
    "confidence without Markov": (
        {"enable_confidence_head": True, "confidence_head_with_markov": True},
        "says confidence_head_with_markov, and has no Markov head",
    ),
}


@pytest.mark.parametrize("way", BAD)
def test_configs_that_do_not_fit_are_refused(target, usual, tmp_path, way):
    fields, says = BAD[way]
    with pytest.raises(ValueError, match=says):
        load(target, changed(usual, tmp_path / "drafter", **fields))


LAYERS = {
    "another architecture": (
        {"outer": {"architectures": ["DSparkDraftModel"]}},
        "its architecture is DSparkDraftModel",
    ),
    "outputs beyond the layers": ({"layer_ids": [1, 7]}, "must ascend and name outputs of the target's layers -1 to 6"),
    "another vocabulary": ({"layer": {"vocab_size": 96}}, "a drafter for a target with 96 ids, and the target has 128"),
    "windows somewhere": ({"layer": {"use_sliding_window": True}}, "names no layer_types, which say where"),
    "too few kinds": ({"layer": {"layer_types": [FULL]}}, "layer_types of .* must name one of"),
    "no window": ({"layer": {"layer_types": [FULL, SLIDING]}}, "sliding window, and names no sliding_window"),
    "other biases": ({"layer": {"mlp_bias": True}}, "says mlp_bias, and a drafter of blocks has no bias there"),
    "no embedding": ({"width": 24, "heads": (3, 1, 8), "outer": {"target_hidden_size": 64}}, "lacks embed_tokens"),
}


@pytest.mark.parametrize("way", LAYERS)
def test_flat_configs_that_do_not_fit_are_refused(target, tmp_path, way):
    how, says = LAYERS[way]
    with pytest.raises(ValueError, match=says):
        load(target, drafter_of(target, tmp_path / "drafter", layout="zlab", **how))


TENSORS = {
    "one too many": ({"layers.0.extra.weight": torch.ones(3)}, (), "has layers.0.extra.weight, which"),
    "one too few": ({}, ("layers.0.mlp.up_proj.weight",), "lacks layers.0.mlp.up_proj.weight"),
    "a Markov head too many": ({"markov_head.markov_w1.weight": torch.ones(128, 4)}, (), "has markov_head.markov_w1"),
    "no map": ({}, ("d2t",), "a head of 3 rows for 128 ids and no d2t"),
    "no head": ({}, ("lm_head.weight",), "lacks lm_head.weight, and the target's head"),
    "a map twice": ({"d2t": torch.tensor([5, 4, 9])}, (), "must name 3 different ids"),
    "NaN": ({"hidden_norm.weight": torch.full((64,), float("nan"))}, (), "hidden_norm.weight of .* holds NaN"),
    "another shape": ({"fc.weight": torch.ones(63, 192)}, (), "fc.weight has shape"),
}


@pytest.mark.parametrize("way", TENSORS)
def test_tensors_that_do_not_fit_are_refused(target, usual, tmp_path, way):
    tensors, drop, says = TENSORS[way]
    with pytest.raises(ValueError, match=says):
        load(target, changed(usual, tmp_path / "drafter", tensors, drop))


MASKS = {
    "another id": ({"mask_token_id": 3, "embedding": torch.ones(64)}, "is for mask_token_id 3, not 126"),
    "another size": (torch.ones(63), "must hold the embedding of a mask, 64 finite numbers"),
    "NaN": (torch.full((64,), float("nan")), "64 finite numbers"),
    "no tensor": ({"embedding": 3}, "64 finite numbers"),
    "code": (print, "is not a file of tensors"),
}


@pytest.mark.parametrize("way", MASKS)
def test_a_mask_that_does_not_fit_is_refused(target, tmp_path, way):
    drafter, (saved, says) = drafter_of(target, tmp_path / "drafter", layout="zlab"), MASKS[way]
    torch.save(saved, drafter / "mask_embedding.pt")
    with pytest.raises(ValueError, match=says):
        load(target, drafter)


OPTIONS = {
    "random weights": ({"load": "dummy"}, "reads a trained drafter"),
    "too long": ({"draft_tokens": 5}, "draft_tokens=5 is more than this drafter's blocks have: at most 4 tokens"),
    "too long at most": ({"policy": "adl", "adl": "2-5"}, "adl='2-5' is more than this drafter's blocks have"),
    "another tree": ({"tree": "2x3"}, "strategy dflash drafts a block: tree does not apply, but cps='tree' does"),
    "a path token by token": (
        {"policy": "draft-and-verify", "cps": "chain"},
        "ends a draft token by token, but cps='chain' drafts a whole path",
    ),
    "ids of its own": ({"strategy": "dflash+vocabtrim"}, r"has 3 rows for ids of its own choice \(d2t\)"),
}


@pytest.mark.parametrize("way", OPTIONS)
def test_options_that_do_not_apply_are_refused(target, usual, way):
    options, says = OPTIONS[way]
    with pytest.raises(ValueError, match=says):
        load(target, usual, **options)


@pytest.mark.parametrize("cps", ["chain", "tree"])
def test_a_markov_head_is_not_searched(target, spark, cps):
    with pytest.raises(ValueError, match=f"cps='{cps}' does not apply: the drafter's Markov head guesses one token"):
        load(target, spark, cps=cps)


def test_a_plain_draft_is_no_drafter_of_blocks(target):
    with pytest.raises(ValueError, match="not a drafter of blocks that specker reads: its architecture is Llama"):
        load(target, target)
