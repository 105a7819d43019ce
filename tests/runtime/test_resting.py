"""A strategy that rests runs plain decoding's own rounds: counted in Python calls, which are equal on any machine."""

import sys

import cases
import pytest
from make_checkpoint import make
from pairs import perturbed

import specker
from specker.runtime import draft_runner
from specker.runtime.control.policy import Match, Offer
from specker.runtime.control.reasons import MEASURED, MISSING
from specker.runtime.draft_runner import PATIENCE
from specker.runtime.strategies.lookup.copy_drafter import LookupDrafter

PROMPTS = [[5, 9, 40], [1, 7], [*range(3, 30)]]
# Calls of a resting round beyond plain decoding's: the chooser counts it, two of its estimates take its time, and a
# policy passes a call on.
MORE, EACH = 8, 2


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resting")
    target = make(folder / "target", "qwen2", layers=3, max_context=256)
    return {"draft": perturbed(target, folder / "draft"), "dream": make(folder / "dream", "dream"), "target": target}


def steps(engine, monkeypatch):
    """Decode the prompts. Returns the texts and the number of Python calls in each step, in ascending order."""
    counts = []
    step = engine.loop.step

    def counted():
        def profile(frame, event, argument):
            counts[-1] += event == "call"

        counts.append(0)
        sys.setprofile(profile)
        try:
            return step()
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(engine.loop, "step", counted)
    texts = engine.generate(PROMPTS[: engine.options.batch_size], 48)
    return [out.tokens for out in texts], sorted(counts), texts


HOW = {"easyspec": {"layer_parallel": "[[0],[1,2]]"}, "diffuspec": {"cps": "off", "adl": "2-4"}}


@pytest.mark.parametrize(("strategy", "size"), cases.diagonal(["draft", "easyspec", "del", "diffuspec"], [1, 3]))
def test_a_resting_round_is_plain_decoding_s(models, strategy, size, steady, monkeypatch):
    """`steady`: no cost is measured, and a draft token is assumed to cost a hundred plain rounds."""
    monkeypatch.setattr("specker.runtime.engine.draft_cost", lambda budget, *_: 100.0 * budget.depth)
    drafts = {"del": [], "diffuspec": [models["dream"]]}.get(strategy, [models["draft"]])
    load = {"device": "cpu", "batch_size": size}
    plain = specker.load(models["target"], strategy="ar", **load)
    rests = specker.load(models["target"], *drafts, strategy=strategy, **load, **HOW.get(strategy, {}))
    want, least, _ = steps(plain, monkeypatch)
    got, counts, texts = steps(rests, monkeypatch)
    assert got == want and not any(out.stats.drafted for out in texts)
    assert all(out.stats.rests["slower"] >= 45 for out in texts)
    most = counts[3 * len(counts) // 4]  # a few rounds ask the policies
    assert most <= least[len(least) // 2] + MORE + EACH * size


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(("share", "most"), [(1e-9, 0.5), (1e9, 1.0)])
def test_looks_for_copies_in_vain_become_rare(models, steady, monkeypatch, size, share, most):
    """Where they would take more than their share of the time. What is found counts again in the next round."""
    monkeypatch.setattr(draft_runner, "LOOKING", share)
    engine = specker.load(models["target"], strategy="lookup", device="cpu", batch_size=size)
    looks, found, prepare = [], False, LookupDrafter.prepare

    def prepared(self, requests):
        prepare(self, requests)
        looks.append(self)
        assert all(len(self._indices[r]) == len(r.token_ids) for r in requests), "skipped rounds are indexed later"
        return Offer(matches=[[Match(3, 9) if found else Match()] for _ in requests])

    monkeypatch.setattr(LookupDrafter, "prepare", prepared)
    prompts = PROMPTS[:size]
    out = engine.generate(prompts, 48)
    rounds = max(each.stats.rounds for each in out)
    assert rounds >= 47 and [o.tokens for o in out] == [engine.generate_ar(p, 48).tokens for p in prompts]
    assert all(each.stats.rests[MISSING] == each.stats.rounds for each in out)
    first = len(looks)
    assert first == rounds if most == 1 else 4 + PATIENCE < first < most * rounds
    found = True
    looks.clear()
    rounds = max(each.stats.rounds for each in engine.generate(prompts, 48))
    assert len(looks) > 0.9 * rounds
    found = False
    looks.clear()
    engine.generate(prompts, 48)
    assert len(looks) == first, "a draft begins the count anew"
    found = True
    looks.clear()
    monkeypatch.setattr("specker.runtime.control.choose.LOOK", 5)
    measured = sum(each.stats.rests[MEASURED] for each in engine.generate(prompts, 48)) // size
    assert measured >= 40 and len(looks) < 12, "rounds that measure plain decoding look once in five rounds"
