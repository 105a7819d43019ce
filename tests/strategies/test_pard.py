"""PARD: a small model drafts in one pass. Its drafts are those of transformers' model over the text and masks, and they
change no token."""

from itertools import count

import cases
import pytest
import torch
from heads import traced
from make_checkpoint import SLIDING, edit, exact_oracle, make, oracle, oracle_logits
from pairs import perturbed

import specker
from specker.integrations.drafts import Drafts
from specker.kernels.noise import gumbel
from specker.runtime.control.policy import Budget
from specker.runtime.engine import draft_cost

MASK = 126
PROMPTS, COUNTS = [[5, 9, 40], [1], list(range(3, 90)), [7, 7, 2, 8]], [14, 9, 12, 16]
ARCHS = {"llama": {}, "qwen3": {}, "gemma3": {"tied": True, "layer_types": [SLIDING] * 2, "sliding_window": 12}}
SAMPLING = {"greedy": {}, "T0.7": {"temperature": 0.7, "seed": 3}}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """arch -> (target, PARD draft)"""
    made = {}
    for arch, how in ARCHS.items():
        target = make(tmp_path_factory.mktemp(arch), arch, layers=2, max_context=192, **how)
        draft = perturbed(target, tmp_path_factory.mktemp(arch + "-draft"))
        edit(draft, pard_token=MASK, spd_type="pard")
        made[arch] = target, draft
    return made


def load(pair, more="", **options):
    return specker.load(*pair, strategy="draft" + more, device="cpu", dtype="float64", page_size=16, **options)


def assert_drafts(rows, model, text, sampling):
    """A trace's drafts for one text are the best tokens of `model`'s last rows over the text and masks."""
    for row in rows:
        at, size = row["position"], len(row["draft"])
        if not size:
            continue
        with torch.no_grad():
            z = oracle_logits(model, torch.tensor(text[:at] + [MASK] * (size - 1)))[-size:]
        if temperature := sampling.get("temperature"):
            z = z / temperature + gumbel(sampling["seed"], torch.arange(at - 1, at - 1 + size), z.shape[1])
        assert row["draft"] == z.argmax(1).tolist()
        if "probability" in row:
            best = z.log_softmax(1).max(1).values.exp().tolist()
            assert row["probability"] == pytest.approx(best, rel=1e-9)


CASES = [(*each.values, "host") for each in cases.diagonal(ARCHS, SAMPLING) if not each.marks]
CASES += [("llama", how, placed) for how in SAMPLING for placed in ("device", "either")]


@pytest.mark.parametrize(("arch", "how", "placed"), CASES)
def test_drafts_are_those_of_transformers_over_text_and_masks(pairs, monkeypatch, arch, how, placed):
    """With rows placed by the host, by the device once the text is longer than the longest draft, or by both."""
    exact_oracle(monkeypatch)
    graphs, accepted, turn = "off" if placed == "host" else "on", 0, count()
    model, fast = oracle(pairs[arch][1], torch.float64), load(pairs[arch], draft_tokens=4, graphs=graphs)
    if placed == "either":
        fixes = fast.loop.runner.fixes
        fast.loop.runner.fixes = lambda budget: fixes(budget) and next(turn) // 2 % 2 == 0
    for prompt in PROMPTS:
        out, rows = traced(fast, prompt, 24, **SAMPLING[how])
        assert out.tokens == cases.plain(pairs[arch][0], prompt, 24, **SAMPLING[how])
        assert_drafts(rows, model, prompt + out.tokens, SAMPLING[how])
        assert sum(len(row["draft"]) == 4 for row in rows) > 8
        accepted += out.stats.accepted
    assert accepted and (fast.loop.launched > 20) == (placed != "host")


WAYS = {
    "fixed": ("", {"draft_tokens": 3}),
    "auto": ("", {}),
    "draft-and-verify": ("", {"policy": "draft-and-verify"}),
    "trimmed": ("+vocabtrim", {"draft_tokens": 3, "vocab_keep": "60", "vocab_text": 8}),
    "lookup": ("+lookup", {"draft_tokens": 3}),
    "graphs": ("", {"draft_tokens": 3, "graphs": "on"}),
}


@pytest.mark.usefixtures("cheap")  # drafts do not depend on the clock
@pytest.mark.parametrize(("way", "how"), cases.one_in(2, WAYS, SAMPLING))
def test_batches_change_no_token(pairs, monkeypatch, way, how):
    exact_oracle(monkeypatch)
    more, options = WAYS[way]
    fast = load(pairs["llama"], more, batch_size=3, **options)
    out, rows = traced(fast, PROMPTS, COUNTS, **SAMPLING[how])
    for prompt, each, most in zip(PROMPTS, out, COUNTS, strict=True):
        assert each.tokens == cases.plain(pairs["llama"][0], prompt, most, **SAMPLING[how])
    assert sum(each.stats.drafted for each in out) > 20 and sum(each.stats.accepted for each in out)
    if not more:
        model = oracle(pairs["llama"][1], torch.float64)
        for n, (prompt, each) in enumerate(zip(PROMPTS, out, strict=True)):
            assert_drafts([r for r in rows if r["prompt"] == n], model, prompt + each.tokens, SAMPLING[how])


def test_policy_auto_prices_one_pass(pairs):
    """It chooses the length before the pass, and a longer draft is at first taken to cost as much as a short one."""
    fast = load(pairs["llama"])
    assert not fast.policy().confident and len(fast.policy().budgets()) > 5
    fast.warmup()
    out = fast.generate(PROMPTS[0], 24)
    assert out.tokens == cases.plain(pairs["llama"][0], PROMPTS[0], 24)
    costs = {draft_cost(Budget(n, n), fast.target, fast.draft, fast.drafter.head_bytes, 0.0) for n in (1, 4, 16)}
    assert len(costs) == 1


def test_the_draft_ends_at_its_models_context(pairs, tmp_path):
    target, _ = pairs["llama"]
    short = make(tmp_path, "llama", layers=1, max_context=32)
    edit(short, ptd_token_id=MASK)  # vLLM's other name
    fast = load((target, short), draft_tokens=6)
    assert fast.drafter.room(30) == 3
    for prompt, most in (([5, 9, 40], 60), (list(range(40)), 9), (list(range(25)), 9)):
        assert fast.generate(prompt, most).tokens == cases.plain(target, prompt, most)


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_another_engine_gets_the_same_drafts(pairs, graphs):
    target, draft = pairs["llama"]
    out, rows = traced(load((target, draft), draft_tokens=4), PROMPTS[2], 24)
    drafts = Drafts(target, draft, "draft", device="cpu", dtype="float64", draft_tokens=4, graphs=graphs)
    text = PROMPTS[2] + out.tokens
    asked = [row for row in rows if len(row["draft"]) == 4]
    assert len(asked) > 8
    assert all(drafts.draft([text[: row["position"]]], 4) == [row["draft"]] for row in asked)
    assert not drafts.policies.confident


def test_pard_2_runs_without_the_targets_hidden_states(pairs, tmp_path):
    target, draft = pairs["llama"]
    other = perturbed(draft, tmp_path / "draft", 0.0)
    edit(other, spd_type="pard2", pard2_target_layers=[2])
    engines = [load((target, folder), draft_tokens=3) for folder in (draft, other)]
    assert "a PARD-2 draft without its hidden states" in engines[1].remarks["draft_mode"]
    assert "draft_mode" not in engines[0].remarks
    stats = [engine.generate(PROMPTS[0], 20).stats for engine in engines]
    assert stats[0].accepted == stats[1].accepted and stats[0].drafted == stats[1].drafted


def test_other_types_and_quantised_drafts(tmp_path):
    """With sizes that the CPU's compiled layers run."""
    target = make(tmp_path / "target", layers=2, hidden=64, heads=2, kv_heads=1, head_dim=64, ffn=128, max_context=128)
    draft = perturbed(target, tmp_path / "draft")
    edit(draft, pard_token=MASK)
    for how in ({"dtype": "bfloat16"}, {"dtype": "float32", "draft_quantize": "int8"}):
        engine = specker.load(target, draft, "draft", device="cpu", draft_tokens=5, **how)
        out = engine.generate([5, 9, 40], 24)
        assert engine.check([5, 9, 40], out, 24).identical and out.stats.drafted > 24 and out.stats.accepted


REFUSED = {
    "a tree": ("draft", {"tree": "2x3"}, {}, "a PARD model drafts a chain in one pass: tree does not apply"),
    "easyspec": ("easyspec", {}, {}, "a PARD model drafts in one pass, and easyspec shortens many"),
    "a mask beyond the ids": ("draft", {}, {"pard_token": 128}, "pard_token must be an id below vocab_size 128, got 1"),
}


@pytest.mark.parametrize("way", REFUSED)
def test_what_does_not_fit_is_refused(pairs, tmp_path, way):
    strategy, options, fields, says = REFUSED[way]
    target, draft = pairs["llama"]
    other = perturbed(draft, tmp_path / "draft")
    edit(other, **fields)
    with pytest.raises(ValueError, match=says):
        specker.load(target, other, strategy, device="cpu", **options)


def test_a_draft_without_a_mask_is_a_plain_one(pairs, tmp_path):
    """AMD's training writes -1 if it used no mask."""
    other = perturbed(pairs["llama"][1], tmp_path / "draft")
    edit(other, pard_token=-1)
    assert load((pairs["llama"][0], other), tree="2x3").drafter.width == 2
