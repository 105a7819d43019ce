"""Heads by the compiled layers: every layout's rows, and whole chains, against torch's operators and the formula."""

import json

import pytest
import torch
from make_checkpoint import make
from make_head import Formula, make_head

import specker
from specker.kernels.noise import gumbel_at
from specker.model.cache import KVCache
from specker.model.decoder import prefill

SIZES = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 96, "layers": 8, "max_context": 256, "seed": 2}
OWN = {"heads": (4, 2, 32), "inner": 48}  # of the head
OFTEN = [35, 74, 119]
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]
SLIDING = {"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]}
LAYOUTS = {
    "eagle3": {"layout": "flat", "ids": OFTEN},
    "norms before fc": {"layout": "nested", "norm_before_fc": True, "norm_before_residual": True},
    "3.1": {"layout": "nested", "fc_norm": True, "norm_output": True, "layers": 2, "qk_norm": True},
    "biases, own embedding": {"layout": "flat", "bias": True, "own_embedding": True, "ids": OFTEN},
    "windows": {"layout": "flat", "layers": 2, "layer": SLIDING},
    "another width": {"layout": "flat", "own_embedding": True, "width": 96, "heads": (3, 1, 32)},
    "eagle1": {"layout": "eagle1"},
    "eagle1, no bias": {"layout": "eagle1", "fc_bias": False, "layers": 2, "layer": {"max_position_embeddings": 16}},
}
SAMPLING = {"greedy": {}, "sampled": {"temperature": 0.7, "seed": 5}}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make(tmp_path_factory.mktemp("heads") / "target", **SIZES)


@pytest.fixture(scope="module")
def rows_of(target):
    """A function of (text, depths): the target's rows of all tokens but the last at each depth, in float64."""
    model = specker.load(str(target), strategy="ar", device="cpu", dtype="float64").model

    def rows_of(text, depths):
        cache = KVCache(model.config, 256, dtype=model.dtype, device="cpu")
        rows = prefill(model, cache, text[:-1], depths, len(text))
        return [rows[depth] for depth in depths]

    return rows_of


def head_of(target, folder, **how):
    return make_head(folder, json.loads((target / "config.json").read_text()), **OWN | how)


def load(target, head, **options):
    options = {"policy": "fixed", "draft_tokens": 3, "dtype": "float32", "prefix_cache": "off", **options}
    engine = specker.load(str(target), str(head), strategy="eagle", device="cpu", **options)
    assert engine.drafter.model.stack is not None, "the compiled layers decline this head"
    return engine


def uncompiled(engine):
    """Lets torch's operators run the head from now on."""
    engine.drafter.model.stack = None
    return engine


def near(a, b, tolerance=2e-5):
    return (a - b).abs().max() <= tolerance * b.abs().max()


def assert_best(seen, text, formula, rows_of, depths, temperature=0.0, seed=0):
    """Each drafted token is, up to rounding, the best by the formula after the text and the drafted tokens before it.
    Returns their number."""
    count = 0
    for row in seen:
        before, path = text[: row["position"]], row["draft"]
        taps = rows_of(before, depths) if path else []
        for n, token in enumerate(path):
            log = formula.after(taps, before, path[:n])
            z, ids = log, formula.ids()
            if temperature:
                z = z / temperature + gumbel_at(seed, torch.tensor([len(before) + n - 1]), ids[None])[0]
            at = ids.tolist().index(token)
            assert z[at] >= z.max() - 1e-3
            assert abs(row["probability"][n] - z.softmax(-1)[at]) < 1e-3
            count += 1
    return count


@pytest.mark.parametrize("way", LAYOUTS)
def test_rows_are_those_of_torchs_operators(target, tmp_path, way):
    """Pairs of a prompt, several in one sequence, then a tree's level in two: outputs, rows for the LM head, K and V."""
    head = load(target, head_of(target, tmp_path / "head", **LAYOUTS[way])).drafter.reading
    model, found = head.model, []
    taps = torch.randn(40, len(head.spec.taps), SIZES["hidden"], generator=torch.Generator().manual_seed(1))
    parents = torch.tensor([[0, 0, 1, 2]] * 2)
    for stack in (model.stack, None):
        model.stack = stack
        cache = KVCache(model.config, 64, dtype=torch.float32, device="cpu", page_size=16, sequences=2)
        cache.k.zero_(), cache.v.zero_()
        cache.take(0, 64), cache.take(1, 64)
        features, tokens = head.features(taps), torch.arange(40) * 3
        with torch.inference_mode():
            rows = cache.after([0, 0], [25, 15])
            pairs = head.pairs(features, model.embed_tokens(tokens), rows.positions)
            output, final = head.forward(cache, rows, *pairs)
            levels = [output, final.rows]
            level = output[[24, 39]]
            for first, count in ((1, 2), (3, 2)):
                placed = head.begin(cache, [26, 16], 2, first, torch.tensor([[7, 8], [9, 1]]), level, parents[:, : first + count - 1])
                level, final = head.forward(cache, *placed)
                levels += [level, final.rows]
        found.append([*levels, cache.k, cache.v])
    assert all(near(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(("way", "sampling"), [(w, s) for w in LAYOUTS for s in SAMPLING])
def test_chains_are_those_of_the_formula(target, tmp_path, rows_of, way, sampling):
    engine, seen = load(target, head_of(target, tmp_path / "head", **LAYOUTS[way])), []
    own, how = engine.model, SAMPLING[sampling]
    formula = Formula(tmp_path / "head", own.embed, own.head, own.norm, own.config.rms_norm_eps)
    engine.trace = seen.append
    out = engine.generate(TEXT, 16, **how)
    assert out.tokens == engine.generate_ar(TEXT, 16, **how).tokens
    assert assert_best(seen, TEXT + out.tokens, formula, rows_of, engine.drafter.taps, **how) > 10
