"""Draft heads of every strategy and layout draft what an independent formula says, and change no token."""

from collections import Counter
from itertools import count, takewhile

import cases
import pytest
import torch
from heads import (
    DFLASH,
    EAGLE,
    FULL,
    MTP,
    SLIDING,
    TABLES,
    TEXT,
    HeadPair,
    assert_drafts,
    changed,
    hidden,
    made,
    traced,
)
from make_checkpoint import GEMMA4_ALL, GPT_OSS, exact_oracle, make, oracle

from specker.checkpoints.checkpoint import read
from specker.model.decoder import Model
from specker.options import Params
from specker.runtime.control.choose import NONE
from specker.runtime.control.policy import Fixed
from specker.runtime.strategies.eagle import pairs as eagle
from specker.runtime.strategies.mtp import heads_in_turn as mtp

LAYOUTS = [*cases.one_in(1, ["eagle"], EAGLE), *cases.one_in(2, ["dflash"], DFLASH), *cases.one_in(1, ["mtp"], MTP)]
DEPTHS = {  # of the target's rows that a head reads, by strategy and layout
    ("eagle", "taps"): (0, 3, 5),
    ("eagle", "inner taps"): (1, 3, 5),
    ("eagle", "deepspec"): (1, 3, 4, 5, 7),
    ("eagle", "eagle1"): (8,),
    ("eagle", "eagle1, no bias"): (8,),
    ("dflash", "deepspec without heads"): (0, 4, 6),
    ("dflash", "z-lab, block in dflash_config"): (2, 6),
}
USUAL_DEPTHS = {"eagle": (2, 4, 5), "dflash": (2, 5, 7), "mtp": (4,)}


@pytest.mark.parametrize(("strategy", "name"), LAYOUTS)
def test_drafts_are_those_of_the_formula(heads, strategy, name):
    head: HeadPair = heads(strategy, name)
    engine = head.load()
    out, rows = traced(engine, TEXT, 16)
    text, most = TEXT + out.tokens, engine.plan.largest.nodes
    assert out.tokens == cases.plain(head.target, TEXT, 16)
    assert engine.drafter.aux_layers == DEPTHS.get((strategy, name), USUAL_DEPTHS[strategy])
    assert [len(row["draft"]) for row in rows] == [min(most, len(text) - row["position"] - 1) for row in rows]
    assert assert_drafts(engine, head.formula(engine), rows, text) > 1
    assert all(len(row["probability"]) == len(row["draft"]) for row in rows if row["draft"])
    assert out.stats.accepted or strategy == "mtp" or "ids" not in TABLES[strategy][name]


TWO_KINDS = {"layers": 8, "layer_types": [SLIDING, FULL] * 4, "tied": False}  # a tied random Gemma repeats a token
OTHERS = {"gpt-oss": {**GPT_OSS, **TWO_KINDS}, "gemma4": {**GEMMA4_ALL, **TWO_KINDS}}
ON_OTHERS = {
    "eagle": ("eagle", "nested", {}),
    "eagle of GELU, graphs": ("eagle", "GELU", {"graphs": "on"}),
    "eagle with the target's head, tree": ("eagle", "the target's head", {"tree": "3x2"}),
    "eagle1": ("eagle", "eagle1", {}),
    "parallel": ("eagle", "parallel, the target's embedding", {}),
    "z-lab": ("dflash", "z-lab, soft cap", {}),
    "dflash2": ("dflash", "dflash2", {}),
    "speculators' dflash": ("dflash", "dflash, the target's embedding", {"graphs": "on"}),
}


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """The folders of the targets OTHERS, and the three ids that each writes most often."""
    folders = {name: make(tmp_path_factory.mktemp(name), seed=2, **how) for name, how in OTHERS.items()}
    often = {
        name: [token for token, _ in Counter(cases.plain(folder, TEXT, 40)).most_common(3)]
        for name, folder in folders.items()
    }
    return {name: (folders[name], sorted(often[name])) for name in OTHERS}


@pytest.mark.parametrize(("target", "way"), cases.one_in(4, OTHERS, ON_OTHERS))
def test_heads_of_gpt_oss_and_gemma4(others, tmp_path, target, way):
    """EAGLE heads read the rows of Gemma's embedding as they are, z-lab's DFlash drafters scaled; the soft cap of the
    target's logits bends neither's."""
    (folder, often), (strategy, name, options) = others[target], ON_OTHERS[way]
    how = TABLES[strategy][name]
    head = made(tmp_path / "head", strategy, folder, **how | ({"ids": often} if "ids" in how else {}))
    engine = head.load(**options)
    out, rows = traced(engine, TEXT, 24)
    assert out.tokens == cases.plain(folder, TEXT, 24)
    assert assert_drafts(engine, head.formula(engine), rows, TEXT + out.tokens) > 4
    assert out.stats.accepted or "ids" not in how
    sampling = {"temperature": 0.7, "seed": 3}
    assert engine.generate(TEXT, 16, **sampling).tokens == cases.plain(folder, TEXT, 16, **sampling)


@pytest.mark.parametrize("target", OTHERS)
def test_hidden_rows_of_gpt_oss_and_gemma4_are_those_of_transformers(others, monkeypatch, target):
    exact_oracle(monkeypatch)
    folder, _ = others[target]
    model = Model(read(folder, dtype=torch.float64, device="cpu"))
    text = [*range(3, 40)]
    with torch.inference_mode():
        want = oracle(folder, torch.float64)(torch.tensor([text]), output_hidden_states=True).hidden_states
        got = hidden(model, [*text, 0], (0, 2, 3, 7))
    for depth, rows in zip((0, 2, 3, 7), got, strict=True):
        assert (rows - want[depth][0]).abs().max() < 1e-9


@pytest.mark.parametrize(
    ("strategy", "name", "order"),
    [
        ("eagle", "nested", "host first"),
        ("eagle", "nested", "device first"),
        ("eagle", "3.1", "device only"),
        ("eagle", "eagle1", "device first"),
        *cases.one_in(
            3,
            ["dflash"],
            ["z-lab", "dflash", "dspark", "deepspec, recurrent", "dflash2", "domino", "dspine", "lilicorr"],
            ["device only", "host first", "device first"],
        ),
    ],
)
def test_rounds_of_either_kind_follow_each_other(heads, strategy, name, order):
    """Rounds that the host places and rounds of fixed shape pass the head's state to each other."""
    head: HeadPair = heads(strategy, name)
    engine = head.load(graphs="on")
    turn, fixes = count(1), engine.loop.runner.fixes

    def alternating(budget):
        device = (next(turn) // 2) % 2 == (order == "device first")
        return fixes(budget) and (device or order == "device only")

    engine.loop.runner.fixes = alternating
    out, rows = traced(engine, TEXT, 24)
    assert out.tokens == cases.plain(head.target, TEXT, 24)
    assert 4 < engine.loop.launched < len(rows) + (4 if order == "device only" else -4)
    assert assert_drafts(engine, head.formula(engine), rows, TEXT + out.tokens) > 4


PROMPTS, COUNTS = [TEXT, [7], [n % 100 for n in range(40)], TEXT[::-1][:9], [5, 6]], [14, 9, 6, 12, 10]
SAMPLING = {"greedy": {}, "sampled": {"temperature": 0.9, "seed": 4, "top_k": 20}}
TREE = {"tree": "3x2"}
PRUNED = {"tree": "2x3", "draft_tokens": 4}
TRIM = {"vocab_keep": "30", "vocab_text": 8}
PLACES = {"greedy": ("off", "on"), "sampled": ("on", "off")}
MODES = [f"{how}, graphs {graphs}" for how, both in PLACES.items() for graphs in both]
WAYS: dict[str, tuple] = {  # strategy, layout, rest of the strategy, options
    "eagle": ("eagle", "nested", "", {}),
    "eagle, tree": ("eagle", "3.1", "", TREE),
    "eagle, pruned tree": ("eagle", "nested", "", PRUNED),
    "eagle+lookup": ("eagle", "nested", "+lookup", {}),
    "eagle+vocabtrim": ("eagle", "every id", "+vocabtrim", TRIM),
    "eagle1": ("eagle", "eagle1", "", {}),
    "eagle1, tree": ("eagle", "eagle1", "", TREE),
    "parallel": ("eagle", "parallel", "", {}),
    "parallel, auto": ("eagle", "parallel", "", {"policy": "auto", "draft_tokens": None}),
    "parallel, draft-and-verify": ("eagle", "parallel", "", {"policy": "draft-and-verify", "draft_tokens": None}),
    "dflash": ("dflash", "dflash", "", {}),
    "dflash+lookup": ("dflash", "dflash", "+lookup", {}),
    "dflash, draft-and-verify": ("dflash", "dflash", "", {"policy": "draft-and-verify"}),
    "dspark": ("dflash", "dspark", "", {}),
    "dspark+lookup": ("dflash", "dspark", "+lookup", {}),
    "dspark, plus-minus-one": ("dflash", "dspark", "", {"policy": "plus-minus-one"}),
    "dflash2": ("dflash", "dflash2, wide", "", {}),
    "dflash2+lookup": ("dflash", "dflash2", "+lookup", {}),
    "dflash2, draft-and-verify": ("dflash", "dflash2", "", {"policy": "draft-and-verify"}),
    "domino": ("dflash", "domino", "", {}),
    "dspine": ("dflash", "dspine", "", {}),
    "lilicorr": ("dflash", "lilicorr", "", {}),
    "lilicorr+lookup": ("dflash", "lilicorr, convolutions", "+lookup", {}),
    "dspine+lookup": ("dflash", "dspine, windows", "+lookup", {}),
    "dflash+vocabtrim": ("dflash", "deepspec, recurrent", "+vocabtrim", TRIM),
    "mtp": ("mtp", "mimo", "", {}),
    "mtp+lookup": ("mtp", "mimo", "+lookup", {}),
    "mtp, tree": ("mtp", "deepseek", "", TREE),
    "mtp of 3 heads": ("mtp", "deepseek, 3 heads", "", {"draft_tokens": 2}),
    "mtp of 3 heads+lookup": ("mtp", "deepseek, 3 heads", "+lookup", {}),
    "mtp of 3 heads, each several times": ("mtp", "mimo, 3 heads", "", {"draft_tokens": 7}),
    "mtp of 3 heads, pruned tree": ("mtp", "mimo, 3 heads", "", {"tree": "2x4", "draft_tokens": 6}),
}


@pytest.mark.parametrize(("way", "mode"), cases.one_in(8, WAYS, MODES))
def test_batches_change_no_token(heads, monkeypatch, chunk_prompts, way, mode):
    """Texts of unequal length, some with a prompt of one token or of several chunks, take turns in three slots: slots
    are idle, and requests move to other slots. Pairs of MTP heads run in blocks."""
    chunk_prompts(16)
    monkeypatch.setattr(mtp, "BLOCK", 9)
    strategy, name, more, options = WAYS[way]
    sampling, graphs = mode.split(", graphs ")
    head: HeadPair = heads(strategy, name)
    engine = head.load(more, graphs=graphs, batch_size=3, page_size=16, **options)
    out, rows = traced(engine, PROMPTS, COUNTS, **SAMPLING[sampling])
    for prompt, each, tokens in zip(PROMPTS, out, COUNTS, strict=True):
        assert each.tokens == cases.plain(head.target, prompt, tokens, **SAMPLING[sampling])
    if not more and "policy" not in options:  # otherwise measured times decide what is drafted
        assert sum(each.stats.drafted for each in out) > 20
        if sampling == "greedy":
            each_text = enumerate(prompt + each.tokens for prompt, each in zip(PROMPTS, out, strict=True))
            by_text = [([row for row in rows if row["prompt"] == n], text) for n, text in each_text]
            assert sum(assert_drafts(engine, head.formula(engine), *each) for each in by_text) > 6
    if graphs == "on" and name != "parallel" and "3 heads" not in name:  # the host places the drafts of these
        assert engine.loop.launched > 10


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize(("strategy", "name"), [("eagle", "nested"), ("mtp", "mimo"), ("dflash", "dflash")])
def test_a_copy_may_be_longer_than_the_heads_drafts(heads, strategy, name):
    """In rounds of fixed shape, too, the head follows all of its tokens."""
    head: HeadPair = heads(strategy, name)
    engine = head.load("+lookup", graphs="on", page_size=16)
    for _ in range(2):  # the second time the text is copied from the first
        out, rows = traced(engine, TEXT, 40)
        assert out.tokens == cases.plain(head.target, TEXT, 40)
    assert max(row["accepted"] for row in rows) > 5
    taps = hidden(engine.model, TEXT + out.tokens, engine.drafter.aux_layers)
    for row in rows:
        if row["draft"] and row["source"] == "head" and "branch" not in row:
            known = [depth[: row["position"] - 1] for depth in taps], (TEXT + out.tokens)[: row["position"]]
            assert row["draft"] == head.formula(engine).draft(*known, len(row["draft"]))[0]


@pytest.mark.parametrize("prefixes", ["all", "exact"])
@pytest.mark.parametrize(
    ("strategy", "name", "ahead"),
    [("eagle", "nested", 1), ("dflash", "dflash", 0), ("dflash", "lilicorr", 1), ("mtp", "deepseek, 3 heads", 3)],
)
def test_a_known_beginning_gives_the_drafts_of_a_fresh_prompt(heads, strategy, name, ahead, prefixes):
    """A column depends on as many later tokens as `ahead` says: where two prompts part, it is computed anew."""
    head: HeadPair = heads(strategy, name)
    engine = head.load(prefix_cache=prefixes, page_size=4)
    formula, first = head.formula(engine), engine.generate(TEXT, 16)
    known = TEXT + first.tokens
    for prompt in (TEXT + [8, 8, 8], known[:30], TEXT[:12] + [1, 2, 3, 4], TEXT):
        out, rows = traced(engine, prompt, 8)
        assert out.tokens == cases.plain(head.target, prompt, 8)
        assert assert_drafts(engine, formula, rows, prompt + out.tokens)
        if prefixes == "all":
            same = len([*takewhile(lambda pair: pair[0] == pair[1], zip(prompt[:-1], known, strict=False))])
            assert out.stats.prefilled <= len(prompt) - 1 - same + ahead


@pytest.mark.parametrize("full", [0, 1])
def test_a_pool_without_room_for_a_known_beginning_leaves_it_out_of_both(heads, monkeypatch, full):
    """A head computes no column without the target's row of it, so it may not lack what the target's cache has."""
    head: HeadPair = heads("eagle", "nested")
    engine = head.load(prefix_cache="all", page_size=4)
    first, cache = engine.generate(TEXT, 16), engine.loop.slots.caches[full]
    fits = cache.fits
    monkeypatch.setattr(cache, "fits", lambda columns, match=None: not (match and match.columns) and fits(columns))
    prompt = TEXT + first.tokens + [8, 8, 8]
    out, rows = traced(engine, prompt, 8)
    assert out.tokens == cases.plain(head.target, prompt, 8) and out.stats.prefilled == len(prompt) - 1
    assert assert_drafts(engine, head.formula(engine), rows, prompt + out.tokens)


@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize(("strategy", "name"), [("eagle", "nested"), ("mtp", "mimo, 3 heads")])
def test_rows_do_not_pile_up_while_nothing_is_drafted(heads, monkeypatch, strategy, name, graphs):
    """After 12 rounds without a draft, which may have fixed shapes, the draft is that of the formula."""
    for module in (eagle, mtp):
        monkeypatch.setattr(module, "WAITING", 4)
    head: HeadPair = heads(strategy, name)
    engine, rounds, budget = head.load(graphs=graphs), count(), Fixed.budget
    monkeypatch.setattr(Fixed, "budget", lambda self: NONE if next(rounds) < 12 else budget(self))
    out, rows = traced(engine, TEXT, 20)
    drafted = [row for row in rows if row["draft"]]
    assert len(rows) - len(drafted) >= 12
    assert assert_drafts(engine, head.formula(engine), drafted, TEXT + out.tokens)
    assert (engine.loop.launched >= 12) == (graphs == "on")


@pytest.mark.parametrize(("strategy", "name"), [("eagle", "nested"), ("dflash", "dflash"), ("mtp", "mimo, 3 heads")])
def test_cancelled_requests_leave_the_others_alone(heads, strategy, name):
    head: HeadPair = heads(strategy, name)
    engine = head.load(batch_size=2)
    session = engine.session
    requests = [session.submit(TEXT, Params(max_new_tokens=16)) for _ in range(4)]
    session.step(), session.step()
    session.cancel(requests[1])
    while session.busy:
        session.step()
    assert [r.finished for r in requests] == ["length", "cancelled", "length", "length"]
    assert all(r.tokens == cases.plain(head.target, TEXT, 16) for i, r in enumerate(requests) if i != 1)
    assert engine.drafter.cache.free_pages == engine.drafter.cache.spare


def test_a_draft_that_ends_by_confidence(heads):
    head: HeadPair = heads("mtp", "deepseek, 3 heads")
    engine = head.load(policy="draft-and-verify", draft_tokens=5)
    out, rows = traced(engine, TEXT, 20)
    assert out.tokens == cases.plain(head.target, TEXT, 20)
    assert_drafts(engine, head.formula(engine), rows, TEXT + out.tokens)
    assert len({len(row["draft"]) for row in rows}) > 1


TENSORS = {  # changed and missing tensors of a head, and the refusal
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
@pytest.mark.parametrize(("strategy", "name"), [("eagle", "nested"), ("dflash", "dflash")])
def test_tensors_that_do_not_fit_are_refused(heads, tmp_path, strategy, name, way):
    tensors, drop, says = TENSORS[way]
    with pytest.raises(ValueError, match=says):
        changed(heads(strategy, name), tmp_path / "head", tensors, drop).load()


@pytest.mark.parametrize(("strategy", "name"), [("eagle", "nested"), ("dflash", "dflash")])
def test_a_head_with_rows_of_its_own_is_not_trimmed(heads, strategy, name):
    with pytest.raises(ValueError, match=r"has 3 rows for ids of its own choice .d2t.: leave out \+vocabtrim"):
        heads(strategy, name).load("+vocabtrim")


@pytest.mark.parametrize(
    ("strategy", "name", "says"),
    [
        ("eagle", "nested", "the head's layers are numbered"),
        (
            "dflash",
            "dflash",
            "LlamaForCausalLM is not supported by strategy dflash, .*: DFlashDraftModel, ",
        ),
    ],
)
def test_a_plain_draft_is_no_head(heads, strategy, name, says):
    target = heads(strategy, name).target
    with pytest.raises(ValueError, match=says):
        HeadPair(strategy, target, target).load()
