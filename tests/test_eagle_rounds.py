"""Strategy eagle: chains and trees, rounds that the host places and rounds of fixed shape, trimmed heads."""

import json

import cases
import pytest
from make_checkpoint import make
from make_head import Formula, make_head

import specker

OFTEN = [74, 89, 119]  # ids that the target writes often, so that a random head with these rows is often right
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9], [7], [n % 100 for n in range(40)], [5, 6]]
SHAPES = {
    "chain": {"draft_tokens": 3},
    "tree": {"tree": "3x2"},
    "pruned tree": {"tree": "2x3", "draft_tokens": 4},
}
SAMPLING = {"greedy": {}, "sampled": {"temperature": 0.9, "seed": 4, "top_k": 20}}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make(tmp_path_factory.mktemp("eagle") / "target", layers=8, max_context=256, seed=2)


def head_of(target, folder, **how):
    return make_head(folder, json.loads((target / "config.json").read_text()), **how)


@pytest.fixture(scope="module")
def heads(target, tmp_path_factory):
    """Heads by name."""
    folder = tmp_path_factory.mktemp("heads")
    return {
        "few rows": head_of(target, folder / "few", layout="nested", ids=OFTEN),
        "3.1": head_of(target, folder / "3.1", layout="nested", ids=OFTEN, fc_norm=True, norm_output=True, layers=2),
        "every id": head_of(target, folder / "every", layout="flat"),
        "eagle1": head_of(target, folder / "eagle1", layout="eagle1"),
    }


def load(target, head, strategy="eagle", **options):
    return specker.load(str(target), str(head), strategy=strategy, device="cpu", dtype="float64", **options)


@pytest.mark.parametrize(
    ("shape", "head", "graphs"), cases.one_in(2, SHAPES, ["few rows", "3.1", "eagle1"], ["off", "on"])
)
def test_drafts_are_those_of_the_formula(target, heads, taps_of, shape, head, graphs):
    engine = load(target, heads[head], graphs=graphs, policy="fixed", **SHAPES[shape])
    own, seen = engine.model, []
    formula = Formula(heads[head], own.embed, own.head, own.norm, own.config.rms_norm_eps)
    engine.trace = seen.append
    out = engine.generate(PROMPTS[0], 24)
    assert engine.check(PROMPTS[0], out, 24).identical
    assert head == "eagle1" or out.stats.accepted > 1
    assert (engine.loop.launched > 4) == (graphs == "on")
    text, size = PROMPTS[0] + out.tokens, engine.plan.largest
    for row in seen:
        before = text[: row["position"]]
        taps = taps_of(before, engine.drafter.aux_layers)
        if shape == "chain":
            assert row["draft"] == formula.chain(taps, before, len(row["draft"]))[0]
        elif len(text) - len(before) > size.depth:  # the end of a text cuts the tree
            want = formula.tree(taps, before, engine.options.width, size.depth, size.nodes)
            assert (row["draft"], row["parents"]) == want
    assert any(len(row["draft"]) == size.nodes for row in seen)


HEADS = {"eagle": "few rows", "eagle+lookup": "few rows", "eagle+vocabtrim": "every id"}


@pytest.mark.parametrize(("strategy", "sampling", "shape"), cases.one_in(2, HEADS, SAMPLING, ["chain", "pruned tree"]))
def test_tokens_of_batches_in_rounds_of_fixed_shape(target, heads, strategy, sampling, shape):
    """Texts of unequal length take turns in three slots: slots are idle, requests move to other slots."""
    trim = {"vocab_keep": "30", "vocab_text": 8} if "vocabtrim" in strategy else {}
    how = {"graphs": "on", "batch_size": 3, "page_size": 16, "policy": "fixed", **trim, **SHAPES[shape]}
    engine, counts = load(target, heads[HEADS[strategy]], strategy, **how), [20, 9, 30, 12]
    for prompts in (PROMPTS, PROMPTS[::-1]):
        plain = [engine.generate_ar(p, n, **SAMPLING[sampling]).tokens for p, n in zip(prompts, counts, strict=True)]
        out = engine.generate(prompts, counts, **SAMPLING[sampling])
        assert [each.tokens for each in out] == plain
        if strategy == "eagle":
            assert sum(each.stats.accepted for each in out) > 1
    assert engine.loop.launched > 20


@pytest.mark.parametrize("order", ["host first", "device first"])
def test_rounds_of_either_kind_follow_each_other(target, heads, taps_of, order):
    """A round without a draft, one that the host places and one of fixed shape pass the head's state to each other."""
    engine = load(target, heads["few rows"], graphs="on", policy="fixed", draft_tokens=3)
    own, seen, drafting = engine.model, [], engine.loop.runner
    formula = Formula(heads["few rows"], own.embed, own.head, own.norm, own.config.rms_norm_eps)
    turn, fixes = [0], drafting.fixes

    def alternating(budget):
        turn[0] += 1
        return fixes(budget) and (turn[0] // 2) % 2 == (order == "device first")

    drafting.fixes = alternating
    engine.trace = seen.append
    out = engine.generate(PROMPTS[0], 40)
    assert 4 < engine.loop.launched < len(seen) - 4
    assert engine.check(PROMPTS[0], out, 40).identical
    text = PROMPTS[0] + out.tokens
    for row in seen:
        before = text[: row["position"]]
        assert row["draft"] == formula.chain(taps_of(before, engine.drafter.aux_layers), before, len(row["draft"]))[0]
    assert sum(len(row["draft"]) == 3 for row in seen) > 10


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_a_request_that_moves_to_another_slot_keeps_its_state(target, heads, taps_of, graphs):
    """The first text ends early, and the last slot's request takes its slot."""
    engine, seen = load(target, heads["few rows"], graphs=graphs, batch_size=3, policy="fixed", draft_tokens=3), []
    own, prompts = engine.model, PROMPTS[::2] + PROMPTS[3:]
    formula = Formula(heads["few rows"], own.embed, own.head, own.norm, own.config.rms_norm_eps)
    engine.trace = seen.append
    out = engine.generate(prompts, [6, 16, 16])
    for row in seen:
        before = (prompts[row["prompt"]] + out[row["prompt"]].tokens)[: row["position"]]
        assert row["draft"] == formula.chain(taps_of(before, engine.drafter.aux_layers), before, len(row["draft"]))[0]


def test_a_trimmed_head_drafts_kept_ids_alone(target, heads):
    engine, seen = load(target, heads["every id"], "eagle+vocabtrim", vocab_keep="16", vocab_text=0), []
    engine.trace = seen.append
    out = engine.generate(PROMPTS[0], 20)
    assert engine.check(PROMPTS[0], out, 20).identical
    drafted = {token for row in seen for token in row["draft"]}
    assert drafted and drafted <= engine.drafter.head.known and len(engine.drafter.head.known) < 30


def test_a_head_with_rows_of_its_own_is_not_trimmed(target, heads):
    with pytest.raises(ValueError, match=r"has 3 rows for ids of its own choice .d2t.: leave out \+vocabtrim"):
        load(target, heads["few rows"], "eagle+vocabtrim")
