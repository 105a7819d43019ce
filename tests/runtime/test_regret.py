"""Policy `auto` never loses much against plain decoding, and gains most of what there is to gain: batches of one engine
on a made-up clock (tests/support/batch_world.py)."""

import random
from dataclasses import replace
from types import SimpleNamespace

import cases
import pytest
from batch_world import CODER, BatchWorld, Machine, best_fixed, text

from specker.runtime.control.auto import Acceptance, Auto
from specker.runtime.control.choose import Chooser
from specker.runtime.control.policy import Budget
from specker.runtime.draft_runner import DraftRunner
from specker.runtime.round.drafter import Draft
from specker.runtime.round.round import weighted

MACHINES = {
    "coder pair": CODER,
    "cheap rows": replace(CODER, rows={1: 0.0225, 8: 0.0245, 16: 0.031, 32: 0.055, 64: 0.11}, prompt=0.0007),
    "GPU": Machine(
        {1: 0.01, 64: 0.0102, 128: 0.014, 256: 0.024}, draft=0.12, prompt=2e-5, own_prompt=1e-4, noise=0.02, cold=1.0
    ),
}
EASY = (0.9, 0.6, 0.1)  # the share of places where drafts are nearly always right
SIZES = (1, 2, 3, 4, 8, 16)


def batches(machine, size, easy, tokens, count, seed=0, known=None):
    """Plain decoding's time over the time of each of `count` batches of an engine, and what the best fixed drafts
    achieve in the last one."""
    out = []
    for n in range(count):
        rng = random.Random(100 * seed + n)
        made = [text(rng, tokens, easy) for _ in range(size)]
        world = BatchWorld(machine, made, tokens=tokens, seed=100 * seed + n, known=known)
        out.append(world.run())
        known = world.known
    return out, best_fixed(world)


@pytest.mark.parametrize(
    ("name", "size", "easy", "tokens"), cases.one_in(3, MACHINES, SIZES, EASY, (64, 128)), ids=lambda each: str(each)
)
def test_batches_lose_little_and_gain_most(name, size, easy, tokens):
    """An engine knows nothing of its draft at first: then a batch may lose the reading of its texts, once."""
    first, *later = (speeds := batches(MACHINES[name], size, easy, tokens, 5))[0]
    assert first > 0.8 and min(later[2:]) > 0.95
    best, _ = speeds[1]
    assert sum(later[2:]) / 2 > 0.88 + 0.5 * (best - 1), "half of what there is to gain, less what noise may cost"


@pytest.mark.parametrize(
    ("name", "size", "gain"), [("coder pair", 4, 0.0), ("coder pair", 8, 0.0), ("GPU", 4, 0.08), ("GPU", 2, 0.1)]
)
def test_texts_that_differ_lose_nothing_where_the_last_one_ends_the_batch(name, size, gain):
    """Half of the texts are easy. Where they alone were drafted, their rows would cost the others time."""
    known, speeds = None, []
    for n in range(5):
        rng = random.Random(n)
        made = [text(rng, 128, 0.9 if i % 2 else 0.1) for i in range(size)]
        world = BatchWorld(MACHINES[name], made, tokens=128, seed=n, known=known)
        speeds.append(world.run())
        known = world.known
    assert min(speeds) > 0.95 and sum(speeds) / 5 > 0.98 + gain


def test_what_drafts_gained_counts_by_worth(monkeypatch):
    """Tokens of a text that ends before the others do not restore what drafts may lose."""
    seen, learn, finished = [], DraftRunner.learn, Chooser.finished

    def learned(runner, r, paths):
        seen.append([sum(s.policy.worth * len(path) for s, path in zip(r.requests, paths, strict=True))])
        learn(runner, r, paths)

    def counted(chooser, n, shape, drafted, tokens, trial, verified=None):
        seen[-1].append(tokens)
        finished(chooser, n, shape, drafted, tokens, trial, verified)

    monkeypatch.setattr(DraftRunner, "learn", learned)
    monkeypatch.setattr(Chooser, "finished", counted)
    rng = random.Random(1)
    made = [text(rng, 128, easy) for easy in (0.9, 0.1)]
    BatchWorld(MACHINES["GPU"], made, tokens=128).run()
    counts = [each for each in seen if len(each) == 2]
    assert all(own == pytest.approx(tokens) for own, tokens in counts) and len(counts) > 30
    assert any(tokens % 1 > 0.01 for _, tokens in counts)


def test_draft_tokens_and_rows_count_by_worth():
    texts = [SimpleNamespace(policy=Auto(Acceptance(0.98), Budget(8, 8), True)) for _ in range(3)]
    for slot, request in enumerate(texts):
        request.policy.worth = (2.5, 0.25, 0.25)[slot]
        request.policy.taken(Budget(8, 8), (0.5,) * 7)
    assert Draft(0).judge(texts, [0.9, 0.1, 0.1]), "one is worth the tokens of three"
    for request in texts:
        request.policy.taken(Budget(8, 8), (0.5,) * 7)
    assert not Draft(0).judge(texts, [0.01, 1.0, 1.0])
    assert weighted(texts, [1, 1, 0], [[0.5], [0.5], []]) == [[1.25], [0.125], []]
