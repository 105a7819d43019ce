"""Drafts for a foreign engine: they must be those of specker's own loop, however requests come, move and go."""

import json
import random
from pathlib import Path

import cases
import pytest
import torch
from fake_cuda import Again, FakeCuda
from make_checkpoint import edit, make
from make_head import Formula, make_head
from pairs import perturbed
from safetensors.torch import load_file, save_file

import specker
from specker.integrations.drafts import Drafts
from specker.model.cache import KVCache
from specker.model.prefill import prefill
from specker.options import Sampling
from specker.runtime.strategies import model_drafter

WAYS = {
    "draft": {},
    "easyspec": {"layer_parallel": "2"},
    "lookup": {},
    "asks": {"strategy": "draft", "policy": "draft-and-verify"},
    "shorter": {"strategy": "draft", "policy": "plus-minus-one"},
    "fixed": {"strategy": "draft", "graphs": "on"},
    "fixed easyspec": {"strategy": "easyspec", "layer_parallel": "2", "graphs": "on"},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("drafts")
    target = make(folder / "target", layers=4, max_context=512)
    return str(target), str(perturbed(target, folder / "draft"))


def options_of(way: str, draft: str, length: int = 4) -> dict:
    own = {"strategy": way, **WAYS[way]}
    if own["strategy"] != "lookup":
        own["draft"] = draft
    if "policy" not in own:
        own["draft_tokens"] = length
    return own


@pytest.mark.parametrize(("way", "how"), cases.diagonal(WAYS, ["greedy", "sampled"]))
def test_drafts_are_those_of_the_loop(tiny, way, how):
    """The same drafts in every round, so the K/V of accepted tokens is kept and policies see the same outcomes."""
    target, draft = tiny
    sampling = {} if how == "greedy" else {"temperature": 0.8, "seed": 5}
    own = options_of(way, draft)
    engine = specker.load(target, device="cpu", dtype="float64", **own)
    seen: list[dict] = []
    engine.trace = seen.append
    prompt = [3, 1, 4, 1, 5, 9, 2, 6] * 12
    text = prompt + engine.generate(prompt, 80 if way == "lookup" else 50, **sampling).tokens
    drafts = Drafts(target, device="cpu", dtype="float64", **own)
    accepted = 0
    for row in seen:
        if row["position"] > len(text) - 19:  # at the end the loop shortens its drafts
            break
        given = None if not sampling else [Sampling(**sampling)]
        assert drafts.draft([text[: row["position"]]], 17, given) == [row["draft"]]
        accepted += len(row["tokens"]) - 1
    assert accepted > (1 if own["strategy"] == "lookup" and sampling else 5) and accepted < sum(
        len(row["draft"]) for row in seen
    )


@pytest.mark.parametrize("strategy", ["diffuspec", "vocabtrim", "easyspec+vocabtrim"])
def test_the_bundled_family_drafts(strategy):
    from specker import zoo

    own = {"strategy": strategy, "draft_tokens": 4, **({"cps": "off", "policy": "fixed"} if "diff" in strategy else {})}
    engine = specker.load(device="cpu", dtype="float32", **own)
    seen: list[dict] = []
    engine.trace = seen.append
    prompt = engine.encode("def add(a, b):\n    return")
    text = prompt + engine.generate(prompt, 24).tokens
    drafts = Drafts(zoo.path("code-target"), device="cpu", dtype="float32", **own)
    found = [drafts.draft([text[: row["position"]]], 4)[0] for row in seen[:-2]]
    same = sum(a == row["draft"] for a, row in zip(found, seen, strict=False))
    assert same >= len(found) - 1, "float32 may turn one near tie"
    assert sum(len(row["tokens"]) - 1 for row in seen) > 4


class Foreign:
    """An engine with its own scheduler, as the drafter sees it: requests arrive, move, wait, shrink and end."""

    def __init__(self, seed: int, prompts: int = 10):
        self.rng = random.Random(seed)
        shared = [self.rng.randrange(120) for _ in range(70)]
        self.waiting = [
            shared[: self.rng.choice((0, 20, 70))] + [self.rng.randrange(120) for _ in range(self.rng.randrange(1, 40))]
            for _ in range(prompts)
        ]
        self.waiting.append(list(self.waiting[0]))  # a duplicate
        self.running: list[list[int]] = []

    def step(self) -> list[list[int]]:
        """The texts of a step: some requests are not in it."""
        while self.waiting and len(self.running) < 5:
            self.running.append(self.waiting.pop(0))
        self.rng.shuffle(self.running)
        return [text for text in self.running if self.rng.random() < 0.8]

    def verify(self, texts: list[list[int]], drafts: list[list[int]]) -> None:
        for text, draft in zip(texts, drafts, strict=True):
            kept = self.rng.randrange(len(draft) + 1)
            text += [*draft[:kept], self.rng.randrange(120)]
            if self.rng.random() < 0.1:
                del text[-self.rng.randrange(1, 6) :]
            if self.rng.random() < 0.08:
                self.running.remove(text)


@pytest.mark.parametrize(
    ("way", "kv_tokens"),
    [
        *(("draft", 400), ("lookup", None), ("fixed easyspec", None)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("easyspec", None), ("fixed", 400))),
    ],
)
def test_requests_come_move_wait_shrink_and_end(tiny, way, kv_tokens):
    """Each draft is the one that a drafter without memory of earlier steps makes."""
    target, draft = tiny
    own = {"device": "cpu", "dtype": "float64", **options_of(way, draft)}
    drafts, foreign = Drafts(target, requests=5, kv_tokens=kv_tokens, page_size=16, **own), Foreign(3, prompts=6)
    fresh, cache = Drafts(target, **{**own, "graphs": "off"}), drafts.drafter.cache
    steps = missing = fixed = 0
    while foreign.waiting or foreign.running:
        texts = foreign.step()
        found = drafts.draft([list(text) for text in texts], 4)
        fixed += drafts._last is not None and drafts._last[0].fixed
        for text, got in zip(texts, found, strict=True):
            fresh.draft([[7]], 1)  # forgets the last text
            want = fresh.draft([text], 4)[0]
            if kv_tokens is None or got:
                assert got == want
            missing += got != want
        if cache is not None:
            for slot in range(6):
                cache.check(slot=slot)
        foreign.verify(texts, found)
        steps += 1
    assert steps > 20 and (fixed > steps / 2 if way.startswith("fixed") else not fixed)
    assert (missing > 0) == (kv_tokens is not None and way != "lookup")


def test_a_draft_of_fixed_shape_is_captured_and_replayed(tiny, monkeypatch):
    target, draft = tiny
    own = {"device": "cpu", "dtype": "float64", "requests": 3, **options_of("fixed", draft)}
    plain, drafts = Drafts(target, **own), Drafts(target, **own)
    FakeCuda().install(monkeypatch)
    drafts.graphs = Again(torch.device("cuda", 0))
    drafts.warm_up(4)
    assert len(drafts.graphs.captured) == 2, "for one text and for three"
    texts = [[n, *range(20)] for n in range(3)]
    for step in range(4):
        for n in (1, 3):
            assert drafts.draft(texts[:n], 4) == plain.draft(texts[:n], 4)
        for text in texts:
            text.append(step)
    assert drafts.graphs.late == 0 and all(graph.replays > 4 for graph in drafts.graphs.captured.values())


def test_a_known_text_is_not_forwarded_again(tiny, monkeypatch):
    """K/V survives a step without the request, a move to another row, and an ended request with the same beginning."""
    target, draft = tiny
    drafts = Drafts(target, draft, device="cpu", dtype="float64", requests=3)
    rows, forward = [], model_drafter.forward
    counted = lambda model, cache, r, *a, **k: (rows.append(len(r.positions)), forward(model, cache, r, *a, **k))[1]  # noqa: E731
    monkeypatch.setattr(model_drafter, "forward", counted)
    prefill = model_drafter.prefill
    prefilled = lambda model, cache, tokens, **k: (rows.append(len(tokens)), prefill(model, cache, tokens, **k))[1]  # noqa: E731
    monkeypatch.setattr(model_drafter, "prefill", prefilled)
    one, two = list(range(40)), list(range(60, 110))
    drafts.draft([one, two], 1)
    rows.clear()
    drafts.draft([two + [1]], 1)
    drafts.draft([two + [1, 2], one + [1]], 1)
    assert rows == [1, 2]
    rows.clear()
    drafts.draft([[*one, 1, 9, 9, 9]], 1)  # `one` goes on
    drafts.draft([[*one, 1, 9, 8, 8, 8]], 1)  # another request with its beginning
    assert rows == [3, 3]
    rows.clear()
    drafts.draft([two[:9] + [3, 3]], 1)  # shares too little of `two`, which only waits
    drafts.draft([two + [1, 2, 3]], 1)
    assert rows == [10, 1, 1]


def test_each_text_has_its_own_sampling(tiny):
    texts, how = [[1, 2, 3], [4, 5, 6], [1, 2, 9]], [Sampling(0.9, seed=3), Sampling(), Sampling(0.9, seed=4)]
    drafts = Drafts(*tiny, device="cpu", dtype="float64", requests=3)
    alone = [
        Drafts(*tiny, device="cpu", dtype="float64").draft([t], 4, [s])[0] for t, s in zip(texts, how, strict=True)
    ]
    assert drafts.draft(texts, 4, how) == alone


def test_more_texts_than_slots_and_long_texts_get_no_draft(tiny):
    target, draft = tiny
    drafts = Drafts(target, draft, device="cpu", dtype="float64", requests=2, max_context=64)
    found = drafts.draft([[1, 2], [3, 4], [5, 6]], 4)
    assert [len(tokens) for tokens in found] == [4, 4, 0]
    found = drafts.draft([[1] * 62, [2] * 64], 4)
    assert [len(tokens) for tokens in found] == [2, 0]
    assert [len(tokens) for tokens in drafts.draft([[1] * 62, [3] * 9], 4)] == [2, 4]
    assert drafts.draft([[1, 2]], 0) == [[]] and drafts.draft([], 4) == []


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"strategy": "del"}, "does not draft for another engine"),
        ({"strategy": "ar"}, "does not draft for another engine"),
        ({"strategy": "eagle"}, "needs a draft checkpoint"),
        ({"tree": "2x2"}, "one path"),
        ({"strategy": "diffuspec", "cps": "tree"}, "one path"),
        ({"strategy": "lookup", "draft": "x"}, "uses no draft checkpoint"),
        ({}, "needs a draft checkpoint"),
        ({"requests": 0}, "between 1 and 255"),
    ],
)
def test_what_is_refused(tiny, own, said):
    with pytest.raises(ValueError, match=said):
        Drafts(tiny[0], **own)


def test_an_unknown_option_is_refused(tiny):
    with pytest.raises(TypeError, match="draft_token'"):
        Drafts(*tiny, draft_token=3)


def test_targets_that_the_decoder_lacks(tmp_path, tiny):
    """Of such a target only the vocabulary and a few sizes count."""
    foreign = tmp_path / "gpt2"
    foreign.mkdir()
    (foreign / "config.json").write_text(
        '{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 128, "n_positions": 64,'
        ' "n_embd": 8, "n_layer": 1, "n_head": 1}'
    )
    drafts = Drafts(foreign, tiny[1], device="cpu", dtype="float64")
    assert drafts.limit == 64 and len(drafts.draft([[1, 2, 3]], 4)[0]) == 4
    with pytest.raises(ValueError, match="lacks the model's sizes"):
        (foreign / "config.json").write_text('{"architectures": ["X"], "model_type": "x"}')
        Drafts(foreign, tiny[1], device="cpu")


def test_a_draft_that_shares_the_targets_embedding(tmp_path, tiny):
    folder = perturbed(Path(tiny[0]), tmp_path / "shares")
    weights = load_file(folder / "model.safetensors")
    whole = load_file(tiny[0] + "/model.safetensors")
    embed = whole["model.embed_tokens.weight"]
    del weights["model.embed_tokens.weight"]
    weights |= {"specker.shared_ids": torch.arange(4), "specker.shared_rows": embed[:4].contiguous()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder, specker={"shares": ["embed_tokens"]})
    drafts = Drafts(tiny[0], folder, device="cpu", dtype="float64")
    assert torch.equal(drafts.drafter.model.embed.float(), embed.float())
    assert len(drafts.draft([[1, 2, 3]], 4)[0]) == 4


def test_a_warm_up_leaves_nothing_behind(tiny):
    target, draft = tiny
    drafts = Drafts(target, draft, device="cpu", dtype="float64", requests=3)
    pages = drafts.drafter.cache.free_pages
    drafts.warm_up(4)
    assert drafts.drafter.cache.free_pages == pages and drafts._used == {}
    assert drafts.draft([[1, 2, 3]], 4) == Drafts(target, draft, device="cpu", dtype="float64").draft([[1, 2, 3]], 4)


def test_a_head_drafts_from_the_rows_that_an_engine_passes(tiny, tmp_path):
    """Rows of all new tokens, or of more than are new; a text whose rows are missing gets no draft."""
    target, _ = tiny
    c = json.loads((Path(target) / "config.json").read_text())
    folder = make_head(tmp_path / "head", c, layout="nested", eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    engine = specker.load(target, strategy="ar", device="cpu", dtype="float64")
    drafts = Drafts(target, folder, "eagle", device="cpu", dtype="float64", draft_tokens=3, requests=2)
    model = engine.model
    formula = Formula(folder, model.embed, model.head, model.norm, model.config.rms_norm_eps)

    def rows(text):
        cache = KVCache(model.config, 128, dtype=model.dtype, device="cpu")
        return prefill(model, cache, text[:-1], drafts.aux_layers, len(text))

    def last(held, count):
        return {depth: x[-count:] for depth, x in held.items()}

    texts = [[3, 1, 4, 1, 5, 9], [2, 7, 1, 8]]
    for more in ([], [5, 3], [8]):  # the first text grows by these tokens
        texts[0] = texts[0] + more
        held = [rows(text) for text in texts]
        if more:
            held[0] = last(held[0], len(more) + (more == [8]))
        found = drafts.draft(texts, 3, rows=held)
        assert found == [
            formula.chain([x[d] for d in drafts.aux_layers], t, 3)[0]
            for t, x in zip(texts, map(rows, texts), strict=True)
        ]
    texts[0] = [*texts[0], 6, 6]
    found = drafts.draft(texts, 3, rows=[last(rows(texts[0]), 1), rows(texts[1])])
    assert found[0] == [] and len(found[1]) == 3
    with pytest.raises(ValueError, match="pass rows"):
        drafts.draft(texts, 3)
