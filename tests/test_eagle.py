"""Strategy eagle: heads of every layout draft what an independent formula says, and change no token."""

import json
from itertools import count

import pytest
import torch
from make_checkpoint import GRANITE, make
from make_head import Formula, make_head
from safetensors.torch import load_file, save_file

import specker
from specker.checkpoints import checkpoint
from specker.checkpoints.drafts import dflash, eagle, mtp
from specker.model.config import CheckpointError
from specker.options import Params
from specker.runtime.control.choose import NONE
from specker.runtime.control.policy import Fixed
from specker.runtime.strategies.eagle import pairs

OFTEN = [35, 74, 119]  # ids that the target writes often, so that a random head with these rows is often right
SLIDING = "sliding_attention"
QWEN_WINDOW = {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0}
DEEPSPEC = {"layout": "deepspec", "qk_norm": True, "own_embedding": True, "target_layer_ids": [0, 2, 3, 4, 6]}
LAYOUTS = {
    "flat": {"layout": "flat", "ids": OFTEN},
    "nested": {"layout": "nested", "ids": OFTEN},
    "every id": {"layout": "flat"},
    "residual": {"layout": "nested", "norm_before_residual": False, "ids": OFTEN},
    "norm before fc": {"layout": "nested", "norm_before_fc": True, "norm_before_residual": True, "ids": OFTEN},
    "3.1": {"layout": "nested", "fc_norm": True, "norm_output": True, "ids": OFTEN},
    "flat norm_output": {"layout": "flat", "norm_output": True, "ids": OFTEN},
    "qwen3": {"layout": "nested", "qk_norm": True, "ids": OFTEN},
    "biases": {"layout": "flat", "bias": True, "ids": OFTEN},
    "three layers": {"layout": "nested", "layers": 3, "ids": OFTEN},
    "midlayer and one": {"layout": "flat", "layers": 2, "ids": OFTEN},
    "own embedding": {"layout": "flat", "own_embedding": True, "ids": OFTEN},
    "another width": {"layout": "flat", "own_embedding": True, "width": 24, "heads": (3, 1, 8), "ids": OFTEN},
    "the target's head": {"layout": "flat", "own_head": False},
    "taps": {"layout": "nested", "eagle_aux_hidden_state_layer_ids": [0, 3, 5], "ids": OFTEN},
    "inner taps": {"layout": "flat", "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}, "ids": OFTEN},
    "window": {"layout": "nested", "layer": {"sliding_window": 6, "layer_types": [SLIDING]}, "ids": OFTEN},
    "qwen3 window": {"layout": "nested", "qk_norm": True, "layer": QWEN_WINDOW, "ids": OFTEN},
    "one of two layers": {
        "layout": "flat",
        "layers": 2,
        "layer": {"sliding_window": 9, "layer_types": ["full_attention", SLIDING, SLIDING]},
        "ids": OFTEN,
    },
    "llama has no window without layer_types": {"layout": "nested", "layer": QWEN_WINDOW, "ids": OFTEN},
    "trained short": {"layout": "flat", "layer": {"max_position_embeddings": 16}, "ids": OFTEN},
    "deepspec": {**DEEPSPEC, "num_target_layers": 8, "ttt_length": 7, "draft_num_hidden_layers": 1},
    "eagle1": {"layout": "eagle1"},
    "eagle1, no bias": {"layout": "eagle1", "fc_bias": False, "layers": 2},
}
DEPTHS = {
    "taps": (0, 3, 5),
    "inner taps": (1, 3, 5),
    "deepspec": (1, 3, 4, 5, 7),
    "eagle1": (8,),
    "eagle1, no bias": (8,),
}
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make(tmp_path_factory.mktemp("eagle") / "target", layers=8, max_context=256, seed=2)


@pytest.fixture(scope="module")
def usual(target, tmp_path_factory):
    return head_of(target, tmp_path_factory.mktemp("head"), layout="nested", ids=OFTEN)


def head_of(target, folder, **how):
    return make_head(folder, json.loads((target / "config.json").read_text()), **how)


def load(target, head, strategy="eagle", **options):
    options = {"policy": "fixed", "draft_tokens": 3, **options}
    return specker.load(str(target), str(head), strategy=strategy, device="cpu", dtype="float64", **options)


def assert_drafts(seen, text, formula, taps_of, depths):
    """The drafts of a trace are those of the formula after the same texts; shorter at the end of the text."""
    for row in seen:
        before, size = text[: row["position"]], len(row["draft"])
        assert size == min(3, len(text) - len(before) - 1)
        if size:
            assert row["draft"] == formula.chain(taps_of(before, depths), before, size)[0]


def formula_of(engine, head):
    own = engine.model
    return Formula(head, own.embed, own.head, own.norm, own.config.rms_norm_eps)


@pytest.mark.parametrize("way", LAYOUTS)
def test_drafts_are_those_of_the_formula(target, tmp_path, taps_of, way):
    head = head_of(target, tmp_path / "head", **LAYOUTS[way])
    engine = load(target, head)
    seen = []
    engine.trace = seen.append
    out = engine.generate(TEXT, 32)
    assert engine.check(TEXT, out, 32).identical
    assert engine.drafter.aux_layers == DEPTHS.get(way, (2, 4, 5))
    assert (out.stats.accepted > 0) == ("ids" in LAYOUTS[way])
    assert_drafts(seen, TEXT + out.tokens, formula_of(engine, head), taps_of, engine.drafter.aux_layers)


SAMPLING = {"greedy": {}, "sampled": {"temperature": 0.9, "seed": 4, "top_k": 20}}


@pytest.mark.parametrize("strategy", ["eagle", "eagle+lookup"])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_batches_change_no_token(target, usual, strategy, sampling):
    """Texts of unequal length in fewer slots than there are, prompts of one token and of several chunks among them."""
    prompts = [TEXT, [7], TEXT[:5] * 2, [n % 100 for n in range(90)], TEXT[::-1], [5, 6]]
    counts = [20, 9, 30, 12, 25, 16]
    engine = load(target, usual, strategy, batch_size=3, max_context=256, page_size=16)
    plain = [engine.generate_ar(p, n, **SAMPLING[sampling]).tokens for p, n in zip(prompts, counts, strict=True)]
    out = engine.generate(prompts, counts, **SAMPLING[sampling])
    assert [each.tokens for each in out] == plain
    if strategy == "eagle":  # measured times decide how often text is copied instead
        assert sum(each.stats.accepted for each in out) > 1


@pytest.mark.parametrize("prefixes", ["all", "exact"])
def test_a_known_beginning_gives_the_drafts_of_a_fresh_prompt(target, usual, taps_of, prefixes):
    """A column of the head's cache depends on the next token, too: where two prompts part, it is computed anew."""
    engine = load(target, usual, prefix_cache=prefixes, page_size=8)
    formula = formula_of(engine, usual)
    first = engine.generate(TEXT, 20)
    for prompt in (TEXT + [8, 8, 8], (TEXT + first.tokens)[:30], TEXT[:12] + [1, 2, 3, 4], TEXT):
        seen = []
        engine.trace = seen.append
        out = engine.generate(prompt, 12)
        assert_drafts(seen, prompt + out.tokens, formula, taps_of, engine.drafter.aux_layers)
        if prefixes == "all":
            assert out.stats.prompt < len(prompt) - 6


def test_features_do_not_pile_up_while_nothing_is_drafted(target, usual, taps_of, monkeypatch):
    """After 20 rounds without a draft, the draft is that of the formula, and few pairs are left to forward."""
    monkeypatch.setattr(pairs, "WAITING", 4)
    engine, rounds, seen, most = load(target, usual), count(), [], []
    budget, accept = Fixed.budget, engine.drafter.accept
    monkeypatch.setattr(Fixed, "budget", lambda self: NONE if next(rounds) < 20 else budget(self))

    def watched(*round_):
        accept(*round_)
        most.append(0 if (waiting := engine.drafter.pairs.waiting[0]) is None else len(waiting))

    monkeypatch.setattr(engine.drafter, "accept", watched)
    engine.trace = seen.append
    out = engine.generate(TEXT, 32)
    drafted = [row for row in seen if row["draft"]]
    assert len(seen) - len(drafted) >= 20 and drafted and max(most) <= 4
    assert_drafts(drafted, TEXT + out.tokens, formula_of(engine, usual), taps_of, engine.drafter.aux_layers)


def test_streams_of_several_threads_and_cancelled_requests(target, usual):
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


def changed(head, folder, tensors=None, drop=(), layer=None, **config):
    """A copy of a nested head with other tensors and fields; `layer`: fields of its layers."""
    folder.mkdir()
    x = {name: t for name, t in load_file(head / "model.safetensors").items() if name not in drop}
    save_file({**x, **(tensors or {})}, folder / "model.safetensors")
    raw = json.loads((head / "config.json").read_text())
    raw["transformer_layer_config"] |= layer or {}
    (folder / "config.json").write_text(json.dumps(raw | config))
    return folder


BAD = {
    "another width": ({"target_hidden_size": 32}, "a head for a target of width 32, and the target has 64"),
    "another kind": ({"speculators_model_type": "dflash"}, "of type 'dflash'; specker reads eagle3"),
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
def test_configs_that_do_not_fit_are_refused(target, usual, tmp_path, way):
    fields, says = BAD[way]
    with pytest.raises(ValueError, match=says):
        load(target, changed(usual, tmp_path / "head", **fields))


@pytest.mark.parametrize("module", [eagle, dflash, mtp])
def test_a_target_in_another_scale_has_no_heads(tmp_path, module):
    """They were trained with its hidden states as they are."""
    target = checkpoint.read(make(tmp_path, **GRANITE), dtype=torch.float64, device="cpu")
    source = () if module is mtp else ("head",)
    with pytest.raises(CheckpointError, match=r"keeps those of GraniteForCausalLM in another scale .* no heads for it"):
        module.read(*source, target, dtype=torch.float64)


TENSORS = {
    "one too many": ({"layers.0.extra.weight": torch.ones(3)}, (), "has layers.0.extra.weight, which"),
    "one too few": ({}, ("layers.0.mlp.up_proj.weight",), "lacks layers.0.mlp.up_proj.weight"),
    "no map": ({}, ("d2t",), "a head of 3 rows for 128 ids and no d2t"),
    "a map beyond the ids": ({"d2t": torch.tensor([0, 0, 900])}, (), "must name 3 different ids below 128"),
    "a map twice": ({"d2t": torch.tensor([5, 4, 9])}, (), "must name 3 different ids"),
    "maps that differ": ({"d2t": torch.tensor([0, 0, 0])}, (), "d2t and t2d of .* name different ids"),
    "NaN": ({"norm.weight": torch.full((64,), float("nan"))}, (), "norm.weight of .* holds NaN"),
    "another shape": ({"fc.weight": torch.ones(63, 192)}, (), "fc.weight has shape"),
    "another dtype": ({"norm.weight": torch.ones(64, dtype=torch.int64)}, (), "norm.weight is stored as I64"),
}


@pytest.mark.parametrize("way", TENSORS)
def test_tensors_that_do_not_fit_are_refused(target, usual, tmp_path, way):
    tensors, drop, says = TENSORS[way]
    with pytest.raises(ValueError, match=says):
        load(target, changed(usual, tmp_path / "head", tensors, drop))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"num_target_layers": 36}, "a head for a target of 36 layers, and the target has 8"),
        ({"target_layer_ids": [0, 2, 3, 4, 7]}, "target_layer_ids names the last of the target's 8 layers"),
        ({"target_layer_ids": [0, 2, 3, 4, 8]}, "target_layer_ids names the depths .* must ascend"),
        ({"target_layer_ids": [0, "2"]}, "target_layer_ids must be a list of layers' numbers"),
        ({"architectures": ["Gemma4Eagle3Model"]}, "its architecture is Gemma4Eagle3Model"),
        ({"layers": 2}, "a DeepSpec head of 2 layers"),
    ],
)
def test_deepspec_heads_for_other_targets_are_refused(target, tmp_path, fields, says):
    with pytest.raises(ValueError, match=says):
        load(target, head_of(target, tmp_path / "head", **{**DEEPSPEC, **fields}))


def test_another_vocabulary_is_refused(target, tmp_path):
    raw = json.loads((target / "config.json").read_text())
    with pytest.raises(ValueError, match="a head for a vocabulary of 96 ids, and the target has 128"):
        load(target, make_head(tmp_path / "head", {**raw, "vocab_size": 96}))


def test_a_pickled_file_is_read_as_tensors_only(target, usual, tmp_path):
    folder = changed(usual, tmp_path / "head")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    want = load(target, usual).generate(TEXT, 12)
    assert load(target, folder).generate(TEXT, 12).stats.drafted == want.stats.drafted
    whole = (folder / "pytorch_model.bin").read_bytes()
    (folder / "pytorch_model.bin").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="is not a file of tensors, or truncated"):
        load(target, folder)
    torch.save({"x": print}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="is not a file of tensors"):
        load(target, folder)


def test_random_weights_are_refused(target, usual):
    with pytest.raises(ValueError, match="reads a trained head"):
        load(target, usual, load="dummy")


def test_a_plain_draft_is_no_head(target):
    with pytest.raises(ValueError, match="the head's layers are numbered"):
        load(target, target)
