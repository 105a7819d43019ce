"""Copied text joined with every other drafter."""

import cases
import pytest
from make_checkpoint import make
from one_round import after_every_round, apart
from pairs import perturbed

import specker
from specker.runtime import strategies
from specker.runtime.control.policy import Budget, Match, Outcome

# name -> (the options, whether the draft is a diffusion model; None: no draft)
JOINS = {
    "draft": ({}, False),
    "chain": ({"strategy": "draft+lookup", "draft_tokens": 3}, False),
    "tree": ({"strategy": "draft+lookup", "tree": "3x3"}, False),
    "easyspec": ({"layer_parallel": "2"}, False),
    "del": ({}, None),
    "del-fixed": ({"strategy": "del+lookup", "policy": "fixed", "exit_layer": 2}, None),
    "diffuspec": ({"adl": "2-5", "cps": "off"}, True),
    "diffuspec-tree": ({"strategy": "diffuspec+lookup", "cps": "tree", "draft_tokens": 4}, True),
    "vocabtrim": ({"vocab_keep": "100", "vocab_text": 8}, False),
    "del+vocabtrim": ({"vocab_keep": "100", "vocab_text": 8}, None),
    "easyspec+vocabtrim": ({"vocab_keep": "100", "vocab_text": 8, "layer_parallel": "2"}, False),
}
PROMPTS = ([5, 9, 40, 77, 8, 3, 5, 9, 40], [1], [*range(3, 40)] * 2)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("join")
    target = make(folder / "target", "qwen2", layers=3, max_context=256)
    return target, perturbed(target, folder / "draft", amount=0.05), make(folder / "dream", "dream")


def load(world, name, scores, **more):
    options, diffuses = JOINS[name]
    if "vocab_keep" in options:
        options = {**options, "vocab_scores": scores}
    drafts = [] if diffuses is None else [world[2 if diffuses else 1]]
    how = {"strategy": f"{name}+lookup", **options, **more}
    return specker.load(world[0], *drafts, dtype="float64", device="cpu", page_size=16, **how)


@pytest.fixture(scope="module")
def scores(tmp_path_factory):
    import torch

    from specker.runtime.strategies.vocabtrim.scores import VocabScores

    path = tmp_path_factory.mktemp("scores") / "s.safetensors"
    path.write_bytes(VocabScores.from_counts(torch.arange(128)).to_bytes())
    return str(path)


HOW = ({}, {"graphs": "on"}, {"graphs": "on", "temperature": 0.7}, {"temperature": 0.7})


@pytest.mark.parametrize(("name", "how"), cases.one_in(3, JOINS, HOW))
def test_tokens_equal_plain_decoding(world, scores, name, how, cheap, monkeypatch):
    """One by one and as a batch; both parts draft."""
    parts, temperature = set(), how.get("temperature", 0.0)
    for size in (1, 3):
        engine = load(world, name, scores, graphs=how.get("graphs", "off"), batch_size=size)
        want = [cases.plain(world[0], prompt, 16, temperature=temperature) for prompt in PROMPTS]
        with after_every_round(monkeypatch, lambda _, r: parts.add(r.draft.size and 1 + r.batch.budget.part)):
            if size == 1:
                got = [engine.generate(prompt, 16, temperature=temperature) for prompt in PROMPTS]
            else:
                got = engine.generate(list(PROMPTS), 16, temperature=temperature)
        assert [g.tokens for g in got] == want
    weak = name in ("del", "del+vocabtrim")  # no early exit of a random model is worth its rows
    assert {2} | ({0} if weak else {1}) <= parts, "only one of the two drafted: this proves little"
    assert sum(g.stats.accepted for g in got) > 0


def test_the_models_cache_stays_exact_while_text_is_copied(world, scores, cheap, monkeypatch):
    lags = []

    def sound(batch, r):
        [sequence] = r.requests
        cache = batch.drafter.cache
        cache.check()
        [length] = cache.exact_len
        lags.append(len(sequence.token_ids) - length)
        assert apart(batch.drafter.model, cache, sequence.token_ids, length) < 1e-12

    engine = load(world, "chain", scores)
    with after_every_round(monkeypatch, sound):
        out = engine.generate(PROMPTS[2], 50)
    assert max(lags) > 5 and min(lags) < 3 and 0 < out.stats.copied < out.stats.rounds


def test_the_part_that_promises_more_drafts(world, scores, cheap):
    """A long match beats a model that is seldom right, and the other way round."""
    engine = load(world, "draft", scores)
    policy, chooser = engine.policy(), engine.loop.runner.chooser
    policy.announced([Match(8, 30)])
    model, copied = policy.parts
    copied.earlier.clear()
    for _ in range(50):
        model.seen.tokens.add(1.1), model.seen.drafted.add(2)
    assert chooser.choose([policy], 500).part == 1
    for _ in range(200):
        model.seen.tokens.add(15), model.seen.drafted.add(15)
    assert chooser.choose([policy], 500) == Budget(16, 16)
    policy.announced([Match()])
    assert chooser.choose([policy], 500).part == 0


def test_the_share_of_the_text_that_is_left_to_the_model(world, scores):
    """It falls while rounds copy, which choose.py sets against a model's prefill, and rises again after them."""
    policy = load(world, "draft", scores).policy()

    def rounds(count, part, tokens):
        for _ in range(count):
            policy.part = part
            policy.observe(Outcome(tokens - 1, list(range(tokens))))
        return policy.uncopied

    assert policy.uncopied == 1
    assert 0.9 < rounds(3, 0, 5) <= 1 and rounds(20, 1, 17) < 0.3 and rounds(100, 0, 1) > 0.8


def test_names_in_any_order():
    for name in ("lookup+draft", "draft+lookup"):
        made = strategies.options(strategy=name, ngram_most=5)
        assert (made.base, made.copy.ngram_most, made.trim) == ("draft", 5, None)
    made = strategies.options(strategy="lookup+vocabtrim")
    assert made.base == "draft" and made.copy is not None and made.trim is not None
    assert strategies.options(strategy="lookup").copy is None
    with pytest.raises(ValueError, match="strategies draft and lookup and lookup do not compose"):
        strategies.options(strategy="draft+lookup+lookup")
