"""Strategy dflash: drafters of every layout draft what an independent formula says, and change no token."""

import json
import math

import pytest
from make_checkpoint import make
from make_dflash import Formula, make_dflash

import specker
from specker.model.cache import KVCache
from specker.model.decoder import prefill

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


@pytest.fixture(scope="module")
def taps_of(target):
    """A function of (text, depths): the target's rows of all tokens but the last, at each depth."""
    model = specker.load(str(target), strategy="ar", device="cpu", dtype="float64").model

    def taps_of(text, depths):
        cache = KVCache(model.config, 256, dtype=model.dtype, device="cpu")
        rows = prefill(model, cache, text[:-1], depths, len(text))
        return [rows[depth] for depth in depths]

    return taps_of


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


@pytest.mark.parametrize("way", LAYOUTS)
def test_drafts_are_those_of_the_formula(target, tmp_path, taps_of, way):
    drafter = drafter_of(target, tmp_path / "drafter", **LAYOUTS[way])
    engine = load(target, drafter)
    seen = []
    engine.trace = seen.append
    out = engine.generate(TEXT, 32)
    assert engine.check(TEXT, out, 32).identical
    assert engine.drafter.taps == DEPTHS.get(way, (2, 5, 7))
    assert (out.stats.accepted > 0) or ("ids" not in LAYOUTS[way])
    most = engine.drafter.spec.most
    assert most == LAYOUTS[way].get("size", 5) - (not formula_of(engine, drafter).following)
    assert_drafts(seen, TEXT + out.tokens, formula_of(engine, drafter), taps_of, engine.drafter.taps, most)
