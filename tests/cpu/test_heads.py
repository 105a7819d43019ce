"""Heads by the compiled layers: every layout's rows, and whole chains, against torch's operators and the formula."""

import json
from dataclasses import replace

import cases
import pytest
import torch
from heads import hidden
from make_checkpoint import make
from make_head import Formula, make_head
from make_mtp import Formula as MtpFormula
from make_mtp import make_mtp

import specker
from specker.kernels.noise import gumbel_at
from specker.model.cache import KVCache
from specker.model.heads import DraftHead
from specker.model.prefill import prefill
from specker.runtime.control.policy import Fixed, StopRule
from specker.runtime.strategies.eagle.pairs import PairDrafter

SIZES = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 96, "layers": 8, "max_context": 256, "seed": 2}
OWN = {"heads": (4, 2, 32), "inner": 64}  # of the head
OFTEN = [28, 40, 44]  # ids that the target writes often, so that a random head with these rows is often right
MATRICES = "qkv", "o", "gate_up", "down"
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
    options = {"strategy": "eagle", "policy": "fixed", "dtype": "float32", "prefix_cache": "off", **options}
    options |= {} if "tree" in options else {"draft_tokens": options.get("draft_tokens", 3)}
    options = {"kv_dtype": "float32", **options}  # the formula's
    engine = specker.load(str(target), str(head), device="cpu", **options)
    assert engine.drafter.model.stack is not None, "the compiled layers decline this head"
    return engine


def restored(model):
    """The model on torch's operators, with its matrices in float32."""
    model.stack = None
    for n, layer in enumerate(model.layers):
        w = replace(layer.mixer, **{name: plain(getattr(layer.mixer, name)) for name in MATRICES})
        model.layers[n] = layer._replace(mixer=w, layers=(w,))


def plain(weight):
    return weight if isinstance(weight, torch.Tensor) else weight.dequantised(torch.float32)


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


@pytest.mark.parametrize(("way", "quantize"), [*((way, None) for way in LAYOUTS), ("3.1", "int8"), ("3.1", "int4")])
def test_rows_are_those_of_torchs_operators(target, tmp_path, way, quantize):
    """Many pairs of two sequences, then two levels of a tree, few enough for every thread to keep them all: outputs,
    rows for the LM head, K and V."""
    how = {"draft_quantize": quantize, "activations": "float32"} if quantize else {}
    head = load(target, head_of(target, tmp_path / "head", **LAYOUTS[way]), **how).drafter.reading
    model, found = head.model, []
    assert model.stack.packed == (quantize is not None)
    taps = torch.randn(160, len(head.spec.aux_layers), SIZES["hidden"], generator=torch.Generator().manual_seed(1))
    parents, children = torch.tensor([[0, 0, 1, 2]] * 2), torch.tensor([[7, 8], [9, 1]])
    for prepare in (lambda model: None, restored):
        prepare(model)
        cache = KVCache(model.config, 128, dtype=torch.float32, device="cpu", page_size=16, sequences=2)
        cache.k.zero_(), cache.v.zero_()
        for slot in range(2):
            cache.take(slot, 128)
        with torch.inference_mode():
            rows, features = cache.after([0, 0], [100, 60]), head.features(taps)
            pairs = head.pairs(features, model.embed_tokens(torch.arange(160) * 3 % 128), rows.positions)
            output, final = head.forward(cache, rows, pairs)
            results, level = [output, final.rows], output[[99, 159]]
            for first in (1, 3):
                up = parents[:, : first + 1]
                placed = head.begin(cache, [101, 61], 2, first, children, level, up)
                level, final = head.forward(cache, *placed)
                results += [level, final.rows]
        found.append([*results, cache.k, cache.v])
    assert all(near(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(("way", "sampling"), cases.one_in(2, LAYOUTS, SAMPLING))
def test_chains_are_those_of_the_formula(target, tmp_path, rows_of, way, sampling):
    engine, seen = load(target, head_of(target, tmp_path / "head", **LAYOUTS[way])), []
    own, how = engine.model, SAMPLING[sampling]
    formula = Formula(tmp_path / "head", own.embed, own.head, own.norm, own.config.rms_norm_eps)
    engine.trace = seen.append
    out = engine.generate(TEXT, 16, **how)
    assert out.tokens == engine.generate_ar(TEXT, 16, **how).tokens
    assert assert_best(seen, TEXT + out.tokens, formula, rows_of, engine.drafter.aux_layers, **how) > 10


@pytest.fixture(scope="module")
def usual(target, tmp_path_factory):
    return head_of(target, tmp_path_factory.mktemp("head"), layout="nested", ids=OFTEN, norm_output=True)


@pytest.mark.parametrize("sampling", SAMPLING)
def test_batches_draft_what_single_texts_draft(target, usual, sampling):
    """Unequal texts, one of a single token among them, in fewer slots than there are."""
    prompts = [TEXT, [7], [n % 100 for n in range(90)], TEXT[::-1]]
    engine, how, drafts = load(target, usual, batch_size=3, page_size=8), SAMPLING[sampling], {}
    for n, prompt in enumerate(prompts):
        engine.trace = lambda row, n=n: drafts.update({(n, row["position"]): row["draft"]})
        out = engine.generate(prompt, 20, **how)
        assert out.tokens == engine.generate_ar(prompt, 20, **how).tokens
    seen, accepted = [], 0
    engine.trace = seen.append
    for n, out in enumerate(engine.generate(prompts, 20, **how)):
        assert out.tokens == engine.generate_ar(prompts[n], 20, **how).tokens
        accepted += out.stats.accepted
    # A single text's last drafts are shorter, and a batch drafts nothing while one of its texts has no pair.
    pairs = [(row["draft"], drafts.get((row["prompt"], row["position"]))) for row in seen]
    same = [a[: len(b)] == b[: len(a)] for a, b in pairs if a and b]
    assert all(same) and len(same) > 20 and accepted > 2


@pytest.mark.parametrize("way", ["3.1", "eagle1"])
def test_a_chain_runs_pairs_as_a_pass_of_their_own_does(target, tmp_path, monkeypatch, way):
    """The same bits, and one call of the library instead of two."""
    head, found, calls = head_of(target, tmp_path / "head", **LAYOUTS[way]), [], []
    forward = DraftHead.forward
    monkeypatch.setattr(DraftHead, "forward", lambda *args, **how: calls.append(how) or forward(*args, **how))
    for apart in (False, True):
        if apart:  # the pairs of each text alone, before the chain
            monkeypatch.setattr(PairDrafter, "take", PairDrafter.run_each)
        engine, seen = load(target, head, batch_size=2), []
        engine.trace = lambda row, seen=seen: seen.append((row["draft"], row["probability"] if row["draft"] else []))
        calls.clear()
        engine.generate([TEXT, TEXT[::-1][:9]], 12, **SAMPLING["sampled"])
        drafter, cache = engine.drafter, engine.drafter.cache
        columns = [cache.slots(slot, 0, length) for slot, length in enumerate((len(TEXT) + 8, 17))]
        kv = [x.flatten(1, 2)[:, torch.cat(columns)] for x in (cache.k, cache.v)]
        found.append((seen, [x.clone() for x in (*kv, drafter.output, drafter.last)], len(calls)))
    (seen, bits, few), (same, others, many) = found
    assert seen == same and all(torch.equal(a, b) for a, b in zip(bits, others, strict=True))
    assert few == 2 < many  # the prompts'


class Doubting(Fixed):
    """Drafts on while a token's probability is at least a half."""

    confident, rule = True, StopRule(token=0.5)


def test_chains_end_by_the_rule(target, usual, monkeypatch):
    engine, seen = load(target, usual, draft_tokens=5), []
    monkeypatch.setattr(engine, "policy", lambda: Doubting(5, 5))
    engine.trace = seen.append
    out = engine.generate(TEXT, 40)
    assert out.tokens == engine.generate_ar(TEXT, 40).tokens
    left = [len(TEXT + out.tokens) - row["position"] - 1 for row in seen]
    for row, most in zip(seen, left, strict=True):
        *sure, last = row["confidence"] or [1.0]
        assert all(p >= 0.5 for p in sure) and (last < 0.5 or len(row["draft"]) == min(5, most))
    assert len({len(row["draft"]) for row in seen}) > 2


OTHER_WAYS = {
    "tree": {"tree": "2x3"},
    "placed by the device": {"graphs": "on"},
    "trimmed": {"strategy": "eagle+vocabtrim", "vocab_keep": "16", "vocab_text": 0},
    "int8": {"draft_quantize": "int8"},
    "int4": {"draft_quantize": "int4", "dtype": "bfloat16"},
}


@pytest.mark.parametrize("way", OTHER_WAYS)
def test_other_drafts_change_no_token(target, tmp_path, way):
    engine = load(target, head_of(target, tmp_path / "head", **LAYOUTS["3.1"]), **OTHER_WAYS[way])
    reading, seen = engine.drafter.reading, []
    assert reading.model.stack.packed == way.startswith("int")
    engine.trace = seen.append
    out = engine.generate(TEXT, 24)
    assert engine.check(TEXT, out, 24).identical and out.stats.drafted > 20
    if way == "trimmed":
        assert {token for row in seen for token in row["draft"]} <= set(engine.drafter.head.token_ids.tolist())


MTP = {
    "mimo": {"arch": "mimo"},
    "qwen3-next": {"arch": "qwen3"},
    "deepseek": {"arch": "llama", "own": True},
}


@pytest.mark.parametrize(("layout", "sampling"), cases.one_in(2, MTP, SAMPLING))
def test_mtp_chains_are_those_of_the_formula(tmp_path, layout, sampling):
    sizes = {name: size for name, size in SIZES.items() if name in ("hidden", "kv_heads", "head_dim")}
    folder = make_mtp(tmp_path / "target", layout, **MTP[layout], **sizes)
    how = {"strategy": "mtp", "policy": "fixed", "draft_tokens": 3, "device": "cpu"}
    exact, engine = (specker.load(str(folder), dtype=dtype, **how) for dtype in ("float64", "float32"))
    assert engine.drafter.model.stack is not None
    formula = MtpFormula(folder)
    seen, draws = [], SAMPLING[sampling]
    engine.trace = seen.append
    for text in (TEXT, TEXT[:2]):  # the second one has a pair at position 0 alone
        out = engine.generate(text, 12, **draws)
        assert out.tokens == engine.generate_ar(text, 12, **draws).tokens
        assert (
            assert_best(seen, text + out.tokens, formula, lambda *text: hidden(exact.model, *text), (4,), **draws) > 10
        )
        seen.clear()
