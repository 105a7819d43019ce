"""Speculation changes no token: for every architecture, strategy and way of running of the table, each request has the
text that plain decoding gives it alone. And that text is the one of transformers' model."""

import functools
import json
from collections import Counter, deque

import pytest
import torch
from make_checkpoint import edit, exact_oracle, make, oracle, oracle_logits
from make_dflash import make_dflash
from make_head import make_head
from pairs import perturbed
from table import ARCHITECTURES, ARITHMETIC, GROUPS, REQUESTS, SIZES, STRATEGIES, WAYS, fits, quick

import specker
from specker.cpu import Packed
from specker.options import Params
from specker.runtime.strategies.dynamic_exit.exit_policy import DynamicExit
from specker.runtime.strategies.vocabtrim.scores import VocabScores

NO_DRAFT = ("ar", "del", "lookup")  # nor a head
# What is drafted is right by chance, or may end after a few drafts that were wrong.
UNRELATED = ("ar", "lookup", "diffuspec", "eagle", "dflash", "del as published", "del+lookup")


class Models:
    """Checkpoints of the table's architectures and strategies, and the texts of plain decoding, made once."""

    def __init__(self, folder):
        self.folder = folder
        self.target = functools.cache(self.target)
        self.draft = functools.cache(self.draft)
        self.plain = functools.cache(self.plain)
        self.scores = folder / "scores.safetensors"
        self.scores.write_bytes(VocabScores.from_counts(torch.arange(128)).to_bytes())

    def target(self, architecture):
        return make(self.folder / architecture, **ARCHITECTURES[architecture])

    def draft(self, architecture, kind):
        """`kind`: "draft", "pard", "diffuspec", "eagle" or "dflash"."""
        folder, target = self.folder / f"{architecture}-{kind}", self.target(architecture)
        if kind == "diffuspec":
            return make(folder, "dream", **SIZES)
        if kind in ("draft", "pard"):
            perturbed(target, folder, amount=0.05)
            if kind == "pard":
                edit(folder, pard_token=126, spd_type="pard")
            return folder
        like = {"hidden": ARCHITECTURES[architecture]["hidden"], "layers": 4, "max_context": 256}
        config = json.loads((make(self.folder / f"{architecture}-like", "qwen2", **like) / "config.json").read_text())
        if kind == "eagle":
            return make_head(
                folder, config, layout="nested", heads=(2, 1, 32), inner=64, eagle_aux_hidden_state_layer_ids=[1, 2, 3]
            )
        return make_dflash(folder, config, layout="dspark", heads=(2, 1, 64), inner=128, layer_ids=[1, 2])

    def plain(self, architecture, arithmetic):
        """Of each request, the text of an engine that decodes it alone, keeps nothing and drafts nothing."""
        target = self.target(architecture)
        engine = specker.load(target, strategy="ar", device="cpu", prefix_cache="off", **dict(arithmetic))
        assert (engine.model.stack is not None) == (dict(arithmetic)["dtype"] == "float32"), "compiled layers decline"
        texts = [engine.generate(prompt, **how).tokens for prompt, how in REQUESTS]
        turn = REQUESTS[0][0] + texts[0] + [2, 2]
        return texts, turn, engine.generate(turn, 8).tokens

    def engine(self, architecture, strategy, way):
        options = {"device": "cpu", **WAYS[way], **STRATEGIES[strategy]}
        first = options["strategy"].removeprefix("lookup+").partition("+")[0]
        if "vocab_keep" in options:
            options["vocab_scores"] = str(self.scores)
        if first == "easyspec":
            options["layer_parallel"] = GROUPS[architecture]
        kind = {"easyspec": "draft", "vocabtrim": "draft"}.get(first, "pard" if strategy == "pard" else first)
        drafts = [] if first in NO_DRAFT else [self.draft(architecture, kind)]
        if kind in ("draft", "pard") and "quantize" in options:
            options["draft_quantize"] = options["quantize"]
        return specker.load(self.target(architecture), *drafts, **options)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return Models(tmp_path_factory.mktemp("conformance"))


def served(engine, requests):
    """The ended requests. Two are there from the start, one more arrives every three events."""
    waiting = deque(engine.session.request(prompt, Params.of(**how)) for prompt, how in requests)
    every = list(waiting)
    stream = engine.session.stream([waiting.popleft() for _ in every[:2]])
    for events, _ in enumerate(stream, 1):
        if waiting and (events % 3 == 0 or not engine.session.busy):
            stream.submit(waiting.popleft())
    return every


def conforms(models, architecture, engine, way):
    arithmetic = tuple((name, value) for name, value in WAYS[way].items() if name in ARITHMETIC)
    texts, turn, last = models.plain(architecture, arithmetic)
    stop = texts[0][6]
    requests = [(prompt, how | ({"stop_ids": [stop]} if n == 0 else {})) for n, (prompt, how) in enumerate(REQUESTS)]
    ended = served(engine, requests)
    assert [request.tokens for request in ended] == [texts[0][: texts[0].index(stop) + 1], *texts[1:]]
    assert [request.finished for request in ended] == ["stop"] + ["length"] * (len(texts) - 1)
    again = engine.generate(turn, 8)
    assert again.tokens == last
    stats = sum((request.stats for request in ended), again.stats)
    assert 0 <= stats.accepted + stats.rounds - stats.tokens <= 1  # a token after the stop is dropped
    for cache in engine.loop.slots.caches:
        cache.check()
        assert cache.free_pages == cache.spare, "every page is back in the pool"
    return stats


@pytest.mark.parametrize(("architecture", "strategy", "way"), [*quick()], ids=lambda each: each.replace(" ", "-"))
@pytest.mark.usefixtures("cheap")  # drafts do not depend on the clock
def test_tokens_are_those_of_plain_decoding(models, architecture, strategy, way):
    engine = models.engine(architecture, strategy, way)
    stats = conforms(models, architecture, engine, way)
    assert (stats.drafted > 0) == (strategy != "ar")
    assert stats.accepted < stats.drafted or strategy == "ar", "no draft ever erred: this proves little"
    assert stats.accepted > 0 or strategy.startswith(UNRELATED), "no draft was ever right: this proves little"
    assert (engine.loop.launched > 0) == ("graphs" in WAYS[way])
    assert all(isinstance(w, Packed) for w in engine.target.weights.o) == ("quantize" in WAYS[way])


REPLAYED = (  # the others' drafts differ so much that few rounds have one shape
    *("ar", "chain", "tree", "pruned tree", "draft-and-verify", "easyspec", "easyspec tree", "del", "one exit"),
    *("diffuspec", "diffuspec tree", "eagle", "dflash", "lookup tree", "draft+lookup", "del+lookup"),
)


MET = {strategy for _, strategy, way in quick() if way == "fixed shapes"}


@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=[pytest.mark.slow] if name in MET else []) for name in REPLAYED]
)
@pytest.mark.usefixtures("cheap")
def test_captured_work_replays_in_later_rounds(models, strategy, monkeypatch):
    """A CUDA graph replays the launches of its capture and runs no Python. So here the work of a key's second call
    replaces the work of every later call."""
    captured, times = {}, Counter()
    monkeypatch.setattr(DynamicExit, "_affordable", lambda self: False)  # rounds that watch layers are not captured

    def run(key, work):
        times[key] += 1
        if key is not None and times[key] == 2:
            captured[key] = work
        captured.get(key, work)()

    engine = models.engine("llama", strategy, "fixed shapes")
    engine.loop.graphs.run = run
    conforms(models, "llama", engine, "fixed shapes")
    assert sum(times[key] - 2 for key in captured) > 3


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.usefixtures("cheap")
def test_the_whole_table(models, architecture, way):
    for strategy in STRATEGIES:
        if fits(architecture, strategy):
            conforms(models, architecture, models.engine(architecture, strategy, way), way)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_plain_decoding_has_the_text_of_transformers(models, architecture, monkeypatch):
    """Each token of a greedy text is the best one of transformers' logits after the tokens before it."""
    exact_oracle(monkeypatch)
    model = oracle(models.target(architecture), torch.float64)
    texts, turn, last = models.plain(architecture, (("dtype", "float64"),))
    for prompt, text in [*zip((REQUESTS[0][0], REQUESTS[2][0]), (texts[0], texts[2]), strict=True), (turn, last)]:
        best = oracle_logits(model, torch.tensor(prompt + text))[len(prompt) - 1 : -1].argmax(-1)
        assert best.tolist() == text
        assert len(set(text)) > 3
