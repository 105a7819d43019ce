"""Strategy dflash in rounds of fixed shape, whose rows the device places."""

import json

import cases
import pytest
from make_checkpoint import make
from make_dflash import Formula, make_dflash

import specker

OFTEN = [74, 89, 119]  # ids that the target writes often, so that a random drafter with these rows is often right
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9], [7], [n % 100 for n in range(40)], [5, 6]]
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}
DRAFTERS = {
    "z-lab": {"layout": "zlab"},
    "dflash": {"layout": "dflash", "ids": OFTEN},
    "dspark": {"layout": "dspark", "ids": OFTEN, "markov": 6, "confidence": "rows and markov"},
    "DeepSpec": {"layout": "deepspec", "markov": 6, "markov_kind": "rnn", "layer": WINDOWS},
}
SAMPLING = {"greedy": {}, "sampled": {"temperature": 0.9, "seed": 4, "top_k": 20}}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make(tmp_path_factory.mktemp("dflash") / "target", layers=8, max_context=256, seed=2)


@pytest.fixture(scope="module")
def drafters(target, tmp_path_factory):
    """Drafters by name."""
    folder, raw = tmp_path_factory.mktemp("drafters"), json.loads((target / "config.json").read_text())
    return {name: make_dflash(folder / name, raw, **how) for name, how in DRAFTERS.items()}


def load(target, drafter, strategy="dflash", **options):
    how = {"policy": "fixed", "graphs": "on", "device": "cpu", "dtype": "float64", **options}
    return specker.load(str(target), str(drafter), strategy=strategy, **how)


def assert_drafts(engine, seen, text, drafter, taps_of):
    """The drafts of a trace are those of the formula."""
    formula = Formula(drafter, engine.model.embed, engine.model.head)
    for row in seen:
        before = text[: row["position"]]
        if row["draft"]:
            taps = taps_of(before, engine.drafter.aux_layers)
            assert row["draft"] == formula.block(taps, before, len(row["draft"]))[0]


@pytest.mark.parametrize("order", ["device only", "host first", "device first"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_are_those_of_the_formula(target, drafters, taps_of, name, order):
    """Also when rounds that the host places and rounds of fixed shape follow each other."""
    engine = load(target, drafters[name])
    seen, turn, fixes = [], [0], engine.loop.runner.fixes

    def alternating(budget):
        turn[0] += 1
        return fixes(budget) and (turn[0] // 2) % 2 == (order == "device first")

    if order != "device only":
        engine.loop.runner.fixes = alternating
    engine.trace = seen.append
    out = engine.generate(PROMPTS[0], 40)
    assert 4 < engine.loop.launched < len(seen) + (4 if order == "device only" else -4)
    assert engine.check(PROMPTS[0], out, 40).identical
    assert name in ("z-lab", "DeepSpec") or out.stats.accepted > 1
    assert_drafts(engine, seen, PROMPTS[0] + out.tokens, drafters[name], taps_of)


WAYS = "dflash of dflash", "dflash of dspark", "dflash+lookup of dspark", "dflash+vocabtrim of DeepSpec"


@pytest.mark.parametrize(
    ("way", "sampling", "policy"),
    cases.one_in(3, WAYS, SAMPLING, ["fixed", "draft-and-verify", "plus-minus-one"]),
)
def test_tokens_of_batches(target, drafters, way, sampling, policy):
    """Texts of unequal length take turns in three slots: slots are idle, requests move to other slots."""
    strategy, name = way.split(" of ")
    trim = {"vocab_keep": "30", "vocab_text": 8, "vocab_learn": "off"} if "vocabtrim" in strategy else {}
    engine = load(target, drafters[name], strategy, batch_size=3, page_size=16, policy=policy, **trim)
    counts = [20, 9, 30, 12]
    for prompts in (PROMPTS, PROMPTS[::-1]):
        plain = [engine.generate_ar(p, n, **SAMPLING[sampling]).tokens for p, n in zip(prompts, counts, strict=True)]
        out = engine.generate(prompts, counts, **SAMPLING[sampling])
        assert [each.tokens for each in out] == plain
        if strategy == "dflash":
            assert any(each.stats.accepted for each in out)
    assert engine.loop.launched > 20


def test_a_warm_up_runs_rounds_of_fixed_shape(target, drafters):
    engine = load(target, drafters["dspark"], policy=None)
    engine.warmup()
    out = engine.generate(PROMPTS[0], 24)
    assert engine.check(PROMPTS[0], out, 24).identical
