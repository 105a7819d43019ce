"""A strategy that rests runs plain decoding's own rounds: counted in Python calls, which are equal on any machine."""

import sys

import cases
import pytest
from make_checkpoint import make
from pairs import perturbed

import specker

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
