"""Strategy mtp with an assistant that reads the target's K/V: it drafts what transformers' own does, and changes no
token."""

import json

import cases
import pytest
import torch
from heads import TEXT, assert_drafts, traced
from make_assistant import CLUSTERS, OFTEN, TARGETS, Oracle, load, make_assistant, make_target
from make_checkpoint import GEMMA4_WIDE, GEMMA4_WIDE_PLE, GRANITE, PHI4, exact_oracle, make
from safetensors.torch import load_file, save_file
from since import since

import specker
from specker.cpu import Packed
from specker.integrations.drafts import Drafts
from specker.runtime import strategies
from specker.runtime.strategies.base import DraftContext

PROMPTS, COUNTS = [TEXT, [7], [n % 100 for n in range(40)], TEXT[::-1][:9], [5, 6]], [14, 9, 6, 12, 10]
HEADS = {"whole": None, "clusters": CLUSTERS}


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A function of a kind of target and of head: the folders of both."""
    folder, known = tmp_path_factory.mktemp("assistants"), {}

    def folders(kind, head="clusters"):
        target = known.setdefault(kind, None) or make_target(folder / kind, kind)
        known[kind] = target
        if (kind, head) not in known:
            known[kind, head] = make_assistant(folder / f"{kind}-{head}", target, HEADS[head], OFTEN[kind])
        return target, known[kind, head]

    return folders


@pytest.fixture
def exact(monkeypatch):
    exact_oracle(monkeypatch)


@since("transformers", "5.23", "drafts with an assistant by other arguments")
@pytest.mark.parametrize(("kind", "head"), cases.diagonal(OFTEN, HEADS))
def test_drafts_are_those_of_transformers(made, exact, kind, head):
    """The text is longer than the windows of 12."""
    target, assistant = made(kind, head)
    engine = load(target, assistant)
    out, rows = traced(engine, TEXT, 16)
    text = TEXT + out.tokens
    assert out.tokens == cases.plain(target, TEXT, 16)
    assert out.stats.accepted or head == "clusters"
    assert [len(row["draft"]) for row in rows] == [min(3, len(text) - row["position"] - 1) for row in rows]
    assert assert_drafts(engine, Oracle(target, assistant), rows, text) > 8
    assert all(len(row["probability"]) == len(row["draft"]) for row in rows if row["draft"])


SAMPLING = {"greedy": {}, "sampled": {"temperature": 0.7, "seed": 4, "top_k": 20}}
WAYS = {  # rest of the strategy, options
    "chain": ("", {}),
    "tree": ("", {"tree": "3x3"}),
    "pruned tree": ("", {"tree": "2x3", "draft_tokens": 4}),
    "lookup": ("+lookup", {}),
    "vocabtrim": ("+vocabtrim", {"vocab_keep": "30", "vocab_text": 8}),
    "auto": ("", {"policy": "auto", "draft_tokens": None}),
    "draft-and-verify": ("", {"policy": "draft-and-verify", "draft_tokens": None}),
}
MODES = [("greedy", "off"), ("sampled", "on"), ("sampled", "off"), ("greedy", "on")]


@since("transformers", "5.23", "drafts with an assistant by other arguments")
@pytest.mark.parametrize(("kind", "way", "mode"), cases.diagonal(OFTEN, WAYS, MODES))
def test_batches_change_no_token(made, exact, chunk_prompts, kind, way, mode):
    """Texts of unequal length take turns in three slots, with prompts of one token or of several chunks. Windows stand
    in rings."""
    chunk_prompts(16)
    (more, options), (sampling, graphs) = WAYS[way], mode
    target, assistant = made(kind, "whole" if "trim" in more else "clusters")
    engine = load(target, assistant, f"mtp{more}", graphs=graphs, batch_size=3, page_size=8, **options)
    assert engine.cache.rings is not None
    out, rows = traced(engine, PROMPTS, COUNTS, **SAMPLING[sampling])
    for prompt, each, count in zip(PROMPTS, out, COUNTS, strict=True):
        assert each.tokens == cases.plain(target, prompt, count, **SAMPLING[sampling])
    if not more and "policy" not in options:  # otherwise measured times decide what is drafted
        assert sum(each.stats.drafted for each in out) > 20
        assert graphs == "off" or engine.loop.launched > 8
        if sampling == "greedy":
            formula = Oracle(target, assistant)
            each_text = enumerate(prompt + each.tokens for prompt, each in zip(PROMPTS, out, strict=True))
            by_text = [([row for row in rows if row["prompt"] == n], text) for n, text in each_text]
            assert sum(assert_drafts(engine, formula, *each) for each in by_text) > 6


@since("transformers", "5.23", "drafts with an assistant by other arguments")
@pytest.mark.parametrize("prefixes", ["all", "exact"])
def test_a_known_beginning_gives_the_drafts_of_a_fresh_prompt(made, exact, prefixes):
    """Of a prompt that is known to its end, one column is computed anew: the first draft needs the target's row."""
    target, assistant = made("e2b")
    engine = load(target, assistant, prefix_cache=prefixes, page_size=4)
    formula, first = Oracle(target, assistant), engine.generate(TEXT, 12)
    known = TEXT + first.tokens
    for prompt, new in ((known[:30], 1), (TEXT[:12] + [1, 2, 3, 4], 3), (TEXT, 8), (TEXT, 1)):  # one ring is kept
        out, rows = traced(engine, prompt, 8)
        assert out.tokens == cases.plain(target, prompt, 8)
        assert rows[0]["draft"] and assert_drafts(engine, formula, rows, prompt + out.tokens)
        assert out.stats.prefilled == new or prefixes == "exact"


def test_a_context_within_the_window(made):
    """Then layers of the two kinds still differ in their heads."""
    target, assistant = made("31b")
    engine = load(target, assistant, max_context=12)
    assert not engine.model.config.layer.sliding_windows
    assert engine.generate(TEXT[:4], 8).tokens == cases.plain(target, TEXT[:4], 8)


def test_quantised(made):
    """The layers and a whole head, but no rows that are ordered by cluster."""
    for head, said in (("whole", "int8"), ("clusters", "int8")):
        target, assistant = made("31b", head)
        engine = load(target, assistant, dtype="float32", draft_quantize="int8")
        assert engine.draft.quantised == said
        assert isinstance(engine.draft.weights.head, torch.Tensor) == (head == "clusters")
        assert all(isinstance(w, Packed) for w in engine.draft.weights.qkv)
        assert engine.generate(TEXT, 12).tokens == engine.generate_ar(TEXT, 12).tokens


@pytest.mark.parametrize(("kind", "how"), cases.one_in(2, TARGETS, [{}, {"tree": "3x3"}, {"batch_size": 3}]))
def test_a_compiled_target(tmp_path, kind, how):
    """Its K/V is in float16, where the CPU converts it."""
    sizes = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 96, "seed": 2}
    more = GEMMA4_WIDE if kind == "31b" else GEMMA4_WIDE_PLE
    target = make(tmp_path / "target", max_context=512, **TARGETS[kind] | sizes | more)
    assistant = make_assistant(tmp_path / "assistant", target, None, [1, 2])
    engine = load(target, assistant, dtype="bfloat16", quantize="int8", **how)
    assert engine.model.stack is not None
    plain = specker.load(target, strategy="ar", dtype="bfloat16", quantize="int8")
    for sampling in SAMPLING.values():
        outs = engine.generate(PROMPTS, COUNTS, **sampling)
        for prompt, count, out in zip(PROMPTS, COUNTS, outs, strict=True):
            assert out.tokens == plain.generate(prompt, count, **sampling).tokens
            assert out.stats.drafted


def test_it_says_how_often_the_first_guess_is_right(tmp_path):
    target = make(tmp_path / "target", max_context=512, seed=2, tokenizer=True, **TARGETS["31b"])
    assistant = make_assistant(tmp_path / "assistant", target)
    engine = load(target, assistant)
    assert "the assistant's first guess is the target's own token at" in engine.remarks["head"]
    assert "implausibly rare" in engine.remarks["head"]


def changed(folder, to, text=None, drop=(), tensors=None, **config):
    """A copy of an assistant with other fields and tensors."""
    raw = json.loads((folder / "config.json").read_text())
    x = {name: t for name, t in load_file(folder / "model.safetensors").items() if name not in drop}
    to.mkdir()
    save_file(x | (tensors or {}), to / "model.safetensors")
    (to / "config.json").write_text(json.dumps({**raw, "text_config": raw["text_config"] | (text or {}), **config}))
    return to


ORDER = "masked_embedding.token_ordering"
BAD = {  # changes of an assistant, and the refusal
    "no assistant": (
        {"model_type": "llama"},
        "has no MTP heads .* and is no assistant, with which strategy mtp drafts",
    ),
    "no layers": ({"text_config": 3}, "text_config of .* must be an object, got 3"),
    "another width": ({"backbone_hidden_size": 96}, "an assistant for a target of width 96, and the target has 64"),
    "another vocabulary": ({"text": {"vocab_size": 127}}, "for a target with 127 ids, and the target has 128"),
    "another window": ({"text": {"sliding_window": 13}}, "with sliding windows of 13, and the target has 12"),
    "experts": ({"text": {"enable_moe_block": True}}, "enable_moe_block of an assistant must be off"),
    "clusters": ({"num_centroids": 12}, "num_centroids of .* is 12, which does not divide its 128 ids"),
    "too many chosen": ({"centroid_intermediate_top_k": 17}, "must be between 1 and 16, got 17"),
    "a missing tensor": ({"drop": ("post_projection.weight",)}, "lacks post_projection.weight"),
    "no order": ({"drop": (ORDER,)}, f"lacks {ORDER}, each cluster's ids"),
    "an id twice": ({"tensors": {ORDER: torch.zeros(128, dtype=torch.int64)}}, "must hold each of the 128 ids once"),
    "another tensor": ({"tensors": {"model.extra.weight": torch.ones(3)}}, "has model.extra.weight, which"),
    "another head": ({"tensors": {"lm_head.weight": torch.ones(128, 32)}}, "differs from model.embed_tokens.weight"),
}


@pytest.mark.parametrize("way", BAD)
def test_assistants_that_do_not_fit_are_refused(made, tmp_path, way):
    target, assistant = made("e2b")
    changes, says = BAD[way]
    with pytest.raises(ValueError, match=says):
        load(target, changed(assistant, tmp_path / "assistant", **changes))


def test_an_assistant_for_other_heads_is_refused(made):
    with pytest.raises(ValueError, match="whose full_attention layers have 2 K/V heads, and the target has 1"):
        load(made("31b")[0], made("e2b")[1])


def test_what_does_not_join_is_refused(made):
    target, assistant = made("e2b")
    with pytest.raises(ValueError, match=r"reads 3 of 16 clusters of its LM head's rows in each step: leave out \+voc"):
        load(target, assistant, "mtp+vocabtrim")
    with pytest.raises(ValueError, match="wider than the 24 ids of 3 clusters"):
        load(target, assistant, tree="25x2")
    with pytest.raises(ValueError, match="with an assistant reads the target's K/V, which another engine keeps"):
        Drafts(target, assistant, "mtp")
    engine = load(target, assistant)
    how = engine.options, engine.target, engine.model, engine.cache, engine.draft, None
    with pytest.raises(
        ValueError, match="reads the target's K/V, which tp divides among the ranks: leave out tp or draft"
    ):
        strategies.drafters(DraftContext(*how, ranks=object()))
    with pytest.raises(ValueError, match="has no MTP heads"):
        specker.load(str(target), strategy="mtp", device="cpu")


def test_an_assistant_for_layers_that_the_target_lacks_is_refused(made, tmp_path):
    for name, how, says in (
        ("llama", {}, "reads the K/V of sliding_attention layers, and the target has none"),
        ("phi3", PHI4, "reads no K/V of Phi3ForCausalLM, whose heads are rotated in part"),
        ("granite", GRANITE, "specker keeps those of GraniteForCausalLM in another scale"),
    ):
        with pytest.raises(ValueError, match=says):
            load(make(tmp_path / name, **how), made("e2b")[1])
