"""Copied text joined with every other drafter."""

import json
import shutil

import cases
import pytest
from make_checkpoint import make
from one_round import after_every_round, apart
from pairs import perturbed

import specker
from specker.runtime import strategies
from specker.runtime.control.policy import Budget, Match, Outcome
from specker.runtime.round.branches import Branches

# name -> (the options, whether the draft is a diffusion model; None: no draft)
JOINS = {
    "draft": ({}, False),
    "chain": ({"strategy": "draft+lookup", "draft_tokens": 3}, False),
    "tree": ({"strategy": "draft+lookup", "tree": "3x3"}, False),
    "easyspec": ({"layer_parallel": "[[0],[1,2]]"}, False),
    "del": ({}, None),
    "del-fixed": ({"strategy": "del+lookup", "policy": "fixed", "exit_layer": 2}, None),
    "diffuspec": ({"adl": "2-5", "cps": "off"}, True),
    "diffuspec-tree": ({"strategy": "diffuspec+lookup", "cps": "tree", "draft_tokens": 4}, True),
    "vocabtrim": ({"vocab_keep": "100", "vocab_text": 8}, False),
    "del+vocabtrim": ({"vocab_keep": "100", "vocab_text": 8}, None),
    "easyspec+vocabtrim": ({"vocab_keep": "100", "vocab_text": 8, "layer_parallel": "[[0],[1,2]]"}, False),
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


@pytest.mark.parametrize(("name", "how"), cases.diagonal(JOINS, HOW))
def test_tokens_equal_plain_decoding(world, scores, name, how, cheap, monkeypatch):
    """Both parts draft."""
    parts, temperature = set(), how.get("temperature", 0.0)
    engine = load(world, name, scores, graphs=how.get("graphs", "off"))

    def note(_, r):
        parts.add(r.draft.size and 1 + r.batch.budget.part)
        parts.update([2] if isinstance(r.draft, Branches) else [])

    with after_every_round(monkeypatch, note):
        got = [engine.generate(prompt, 16, temperature=temperature) for prompt in PROMPTS]
    assert [g.tokens for g in got] == [cases.plain(world[0], prompt, 16, temperature=temperature) for prompt in PROMPTS]
    weak = name in ("del", "del+vocabtrim")  # no early exit of a random model is worth its rows
    assert {2} | ({0} if weak else {1}) <= parts, "only one of the two drafted: this proves little"
    assert sum(g.stats.accepted for g in got) > 0


SHORT = 40  # tokens of the draft's context


@pytest.fixture(scope="module")
def shortened(world, tmp_path_factory):
    """The world with drafts of a shorter context."""

    def short(folder):
        copy = tmp_path_factory.mktemp("short") / "draft"
        shutil.copytree(folder, copy)
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": SHORT}))
        return copy

    return world[0], *map(short, world[1:])


@pytest.mark.parametrize(("name", "size"), cases.one_in(3, [n for n in JOINS if JOINS[n][1] is not None], (1, 3)))
def test_copies_go_on_beyond_the_drafts_context(world, shortened, scores, name, size, cheap, monkeypatch):
    """As many tokens are accepted as by copies alone, and texts that end within the context keep their drafts."""
    repeats = [5, 9, 40, 77, 8, 3, 11, 60] * 6  # the target goes on repeating something
    prompts = [repeats + cases.plain(world[0], repeats, 60), *([[1], [5, 9]] if size > 1 else [])]
    want, copied = [cases.plain(world[0], prompt, 30) for prompt in prompts], []
    alone = specker.load(world[0], strategy="lookup", dtype="float64", device="cpu", page_size=16)
    accepted = alone.generate(prompts[0], 30).stats.accepted
    engine = load(shortened, name, scores, batch_size=size)
    assert f"the draft's context ends at {SHORT} of 256 tokens" in engine.remarks["draft_context"]
    with after_every_round(monkeypatch, lambda _, r: copied.append(r.draft.size and r.batch.budget.part)):
        got = engine.generate(prompts, 30)
    assert [g.tokens for g in got] == want
    assert accepted > 4 and got[0].stats.accepted >= (accepted if size == 1 else 1)
    if size == 1:
        assert got[0].stats.copied == copied.count(1) > 0, "only copies are drafted"
    elif name in ("chain", "easyspec+vocabtrim"):  # a text beyond the context has no draft of the model
        assert got[0].stats.copied == sum(count for length, count in got[0].stats.lengths.items() if length)
        assert any(g.stats.accepted > 5 for g in got[1:])


@pytest.mark.parametrize(("width", "graphs"), cases.diagonal([1, 2], ["off", "on"]))
def test_a_text_beyond_the_drafts_context_has_no_vote(shortened, world, cheap, width, graphs):
    """What the draft computes for it reads columns that nobody wrote: NaN, here. Its neighbour's drafts go on."""
    how = {"tree": "2x3"} if width > 1 else {}
    engine = specker.load(
        *shortened[:2], "draft", dtype="float64", device="cpu", page_size=16, batch_size=2, graphs=graphs, **how
    )
    for x in engine.loop.runner.drafter.cache.kv:
        x.fill_(float("nan"))
    prompts = [cases.plain(world[0], [5, 9], 60), [1]]
    got = engine.generate(prompts, 30)
    assert [g.tokens for g in got] == [cases.plain(world[0], prompt, 30) for prompt in prompts]
    assert got[0].stats.accepted == 0 < got[1].stats.accepted


def test_beyond_the_drafts_context_without_copies(shortened, world, cheap):
    engine = specker.load(*shortened[:2], strategy="draft", dtype="float64", device="cpu", page_size=16)
    said = f"the draft's context ends at {SHORT} of 256 tokens: beyond, nothing is drafted"
    assert engine.remarks["draft_context"] == said
    got = engine.generate([5, 9], 60)
    assert got.tokens == cases.plain(world[0], [5, 9], 60)
    assert got.stats.rests["context"] == 2 + 60 - 1 - SHORT
    assert "draft_context" not in specker.load(*world[:2], strategy="draft", dtype="float64", device="cpu").remarks


def test_the_models_cache_stays_exact_while_text_is_copied(world, scores, cheap, turns, monkeypatch):
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


def test_the_part_that_promises_more_drafts(world, scores, cheap, turns):
    """A long match beats a model that is seldom right, and the other way round."""
    engine = load(world, "draft", scores)
    policy, chooser = engine.policy(), engine.loop.runner.chooser
    policy.announced([Match(8, 30)])
    model, copied = policy.parts
    copied.earlier.clear()
    for _ in range(50):
        model.seen.add(Outcome(2, [0], [0.5, 0.5]), 16)
    assert chooser.choose([policy], [500]).part == 1
    for _ in range(200):
        model.seen.add(Outcome(15, list(range(16)), [0.9] * 15), 16)
    assert chooser.choose([policy], [500]) == Budget(16, 16)
    policy.announced([Match()])
    assert chooser.choose([policy], [500]).part == 0


def test_names_in_any_order():
    for name in ("lookup+draft", "draft+lookup"):
        made = strategies.options(strategy=name, lookup_share="off")
        assert (made.base.name, made.sources[1].options.lookup_share, made.trim) == ("draft", "off", None)
    made = strategies.options(strategy="lookup+vocabtrim")
    assert made.base.name == "draft" and len(made.sources) == 2 and made.trim is not None
    assert len(strategies.options(strategy="lookup").sources) == 1
    with pytest.raises(ValueError, match="strategies draft and lookup and lookup do not compose"):
        strategies.options(strategy="draft+lookup+lookup")
