"""While the draft model reads long prompts, in chunks, the other texts of a batch go on drafting. A text that waits to
be read is idle in these rounds: its draft means nothing, and leaves no trace in the draft model's cache."""

import math
import random
from collections import deque

import cases
import pytest
import torch
from make_checkpoint import QWEN3_5, edit, make
from one_round import after_every_round, apart
from pairs import perturbed

import specker
from specker import cpu
from specker.options import Params
from specker.runtime.control.auto import AcceptanceHistory, Auto
from specker.runtime.control.choose import NONE, Chooser
from specker.runtime.control.costs import Costs
from specker.runtime.control.policy import UNLIMITED, Budget, Outcome, Reading
from specker.runtime.control.reasons import BEHIND
from specker.runtime.round import round as rounds
from specker.runtime.round.drafter import Draft
from specker.runtime.strategies import model_drafter

pytestmark = pytest.mark.usefixtures("cheap", "turns")

SIZES = {"layers": 3, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 96, "max_context": 400}
FLOAT32 = {"device": "cpu", "dtype": "float32", "kv_dtype": "float32"}
CHUNK = 24  # tokens that a draft model reads before a round of several requests
WAYS = {
    "draft": {"strategy": "draft", "draft_tokens": 3},
    "auto": {"strategy": "draft"},
    "vocabtrim": {"strategy": "vocabtrim", "vocab_keep": "60", "vocab_text": 8, "draft_tokens": 3},
    "easyspec": {"strategy": "easyspec", "layer_parallel": "[[0],[1,2]]", "draft_tokens": 3},
    "tree": {"strategy": "draft", "tree": "2x3"},
    "pard": {"strategy": "draft", "draft_tokens": 3},
    "diffuspec": {"strategy": "diffuspec", "adl": "2-4", "cps": "off"},
    "diffuspec tree": {"strategy": "diffuspec", "draft_tokens": 3, "cps": "tree"},
}
LENGTHS = (5, 130, 40, 200, 1, 90, 160)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reading")
    target = make(folder / "target", "qwen2", seed=1, **SIZES)
    pard = perturbed(target, folder / "pard", amount=0.05)
    edit(pard, pard_token=126, spd_type="pard")
    dream = make(folder / "dream", "dream", **SIZES)
    draft = perturbed(target, folder / "draft", amount=0.05)
    return {"target": target, "draft": draft, "pard": pard, "diffuspec": dream, "diffuspec tree": dream}


def load(models, way, copies=False, **more):
    options = {**FLOAT32, "batch_size": 4, "page_size": 16, **WAYS[way], **more}
    options["strategy"] += "+lookup" * copies
    engine = specker.load(models["target"], models.get(way, models["draft"]), **options)
    engine.loop.runner.most = lambda requests: UNLIMITED if len(requests) == 1 else CHUNK
    return engine


def text_of(length, seed=0):
    rng = random.Random(1000 * seed + length)
    words = [rng.randrange(3, 90) for _ in range(length)]
    return (words[: length // 2] * 2 + words)[:length]  # so that there is something to copy


def poison(cache):
    """What no round has written holds NaN, but for the page of slots without a sequence."""
    for kv in cache.kv:
        kv[:, : cache.spare] = math.nan


def served(engine, requests):
    """Two requests are there from the start, and one more arrives every five steps."""
    waiting = deque(engine.session.request(prompt, Params.of(**how)) for prompt, how in requests)
    every = [*waiting]
    stream = engine.session.stream([waiting.popleft() for _ in range(2)])
    for events, _ in enumerate(stream, 1):
        if waiting and (events % 5 == 0 or not engine.session.busy):
            stream.submit(waiting.popleft())
    return every


def decode(engine, requests, monkeypatch, exact=True):
    """Decode the requests, and look at the draft's cache after every round. Returns them, and of each round whose draft
    was for some texts but not for others, the numbers of both."""
    cache, before, mixed = engine.drafter.cache, {}, []

    def look(loop, r):
        if r.behind or r.draft.first.idle:
            assert r.behind <= r.reading.most and (len(r.requests) > 1 or not r.draft.first.idle)
        for slot, request in enumerate(r.requests):
            if request.finished:
                continue
            if slot in r.draft.first.idle:
                assert r.draft.first.count(slot) == 0 and cache.exact_len[slot] == before[r, slot]
            cache.check(slot=slot)
            if exact:
                assert apart(engine.drafter.model, cache, request.token_ids, cache.exact_len[slot], slot) < 1e-4
        if r.draft.first.idle and r.draft.first.size:
            mixed.append((len(r.requests) - len(r.draft.first.idle), len(r.draft.first.idle)))

    propose = type(engine.drafter).propose

    def proposed(self, batch):
        held = [*cache.exact_len]
        draft = propose(self, batch)
        current.update({slot: held[slot] for slot in draft.idle})
        return draft

    current = {}
    launch = rounds.launch

    def launched(r, *rest):
        current.clear()
        launch(r, *rest)
        before.update({(r, slot): columns for slot, columns in current.items()})

    monkeypatch.setattr("specker.runtime.loop.launch", launched)
    monkeypatch.setattr(type(engine.drafter), "propose", proposed)
    with after_every_round(monkeypatch, look):
        ended = served(engine, requests)
    assert cache.free_pages == cache.spare
    return ended, mixed


@pytest.mark.parametrize(
    ("way", "copies", "graphs"), cases.diagonal([*WAYS], [False, True], ["off", "on"]), ids=lambda each: str(each)
)
def test_tokens_are_those_of_plain_decoding(models, monkeypatch, way, copies, graphs):
    """Texts of unequal lengths, greedy and sampled, which come one after another."""
    torch.manual_seed(1)
    asked = [
        (text_of(length, n), {"max_new_tokens": 16, "temperature": (0.0, 0.7)[n % 2], "seed": n})
        for n, length in enumerate(LENGTHS)
    ]
    alone = specker.load(models["target"], strategy="ar", graphs=graphs, **FLOAT32)
    want = [alone.generate(prompt, **how).tokens for prompt, how in asked]
    engine = load(models, way, copies, graphs=graphs)
    poison(engine.drafter.cache)
    ended, mixed = decode(engine, asked, monkeypatch, exact="diffuspec" not in way)
    assert [request.tokens for request in ended] == want
    assert copies or len(mixed) > 1, "some texts drafted while others were read"
    assert (engine.loop.launched > 0) == (graphs == "on")
    assert sum(request.stats.rests.get(BEHIND, 0) for request in ended) >= sum(idle for _, idle in mixed)


def test_others_draft_while_a_prompt_is_read(models, monkeypatch):
    """The oldest prompt is read first, CHUNK tokens before each round. Only the texts that wait draft nothing."""
    monkeypatch.setattr("specker.runtime.prompts.Prompts._chunk", lambda self: 120)
    engine = load(models, "draft")
    one = engine.session.submit(text_of(20), Params(max_new_tokens=200))
    while one.stats.drafted < 9:
        engine.session.step()
    two, three = (engine.session.submit(text_of(length), Params(max_new_tokens=60)) for length in (230, 120))
    columns = []
    while not three.stats.drafted:
        drafted = one.stats.drafted
        engine.session.step()
        assert one.stats.drafted == drafted + 3
        columns.append([engine.drafter.cache.exact_len[slot] for slot in (1, 2)])
        assert not columns[-1][1] or two.stats.drafted, "the older prompt is read first"
    of_two = [n for n, _ in columns if n]
    assert of_two[:7] == [CHUNK * n for n in range(1, 8)] and two.stats.rests == {BEHIND: 7}
    assert three.stats.rests[BEHIND] > 3 and BEHIND not in one.stats.rests


def test_a_model_reads_while_rounds_copy(models, monkeypatch):
    """The next drafts are worth its reading, and this round's copies are worth more than no draft."""
    engine = load(models, "auto", copies=True, batch_size=2)

    def chosen(self, policies, remaining, offers=(), reads=True, spread=None):
        self.unread = frozenset(slot for slot, count in enumerate(offers[0].missing) if count and reads)
        self.reason, self.trial, self.worths = "", False, [1.0] * len(policies)
        return NONE if self.unread else Budget(2, 2, part=1)

    monkeypatch.setattr(Chooser, "choose", chosen)
    asked = [engine.session.submit(text_of(length), Params(max_new_tokens=40)) for length in (100, 130)]
    columns = []
    while not all(request.finished for request in asked):
        engine.session.step()
        columns.append(engine.drafter.cache.exact_len[:2])
    assert [sum(each) for each in columns[:5]] == [CHUNK * n for n in range(1, 6)]
    assert all(request.stats.copied for request in asked) and not any(r.stats.rests.get(BEHIND) for r in asked)


@pytest.fixture
def passes(monkeypatch):
    """The parts of each pass in which a draft model read several prompts: (slot, rows)."""
    seen, forward = [], model_drafter.prefill_parts

    def counted(model, cache, parts):
        seen.append([(part.slot, len(part.tokens)) for part in parts])
        return forward(model, cache, parts)

    monkeypatch.setattr(model_drafter, "prefill_parts", counted)
    return seen


@pytest.mark.skipif(cpu.problem() is not None, reason="without compiled kernels bits depend on the company")
def test_prompts_share_the_passes_of_the_draft(models, passes):
    """As large as passes may be, and in the order that is asked for. Where rows depend on their company, each text has
    its own."""
    engine = load(models, "draft", batch_size=4)
    requests = [engine.session.request(text_of(n), Params(max_new_tokens=40)) for n in (100, 130, 90)]
    for request in requests:
        engine.loop.prompts.admit(request)
    drafter = engine.drafter
    assert drafter.prepare(requests).missing == [99, 129, 89]
    with torch.inference_mode():
        assert drafter.advance(requests, Reading(20, [1])) == 20 and passes.pop() == [(1, 20)]
        assert drafter.advance(requests, Reading(100, [2, 1, 0])) == 100 and passes.pop() == [(2, 89), (1, 11)]
        assert drafter.prepare(requests).missing == [99, 98, 0]
        assert drafter.idle(requests, False) == {0: BEHIND, 1: BEHIND}
        assert drafter.advance(requests) == 99 + 98 and passes.pop() == [(0, 99), (1, 98)] and not passes
        drafter.cache.truncate(0, 0), drafter.cache.truncate(0, 1)
        assert drafter.advance(requests) == 99 + 129 and passes == [[(0, 99), (1, 129)]]
        drafter.cache.truncate(0, 0), drafter.cache.truncate(0, 1), drafter.cache.truncate(0, 2)
        passes.clear()
        assert drafter.advance(requests) == 99 + 129 + 89 and passes == [[(0, 99), (1, 129), (2, 28)], [(2, 61)]]
    for slot, request in enumerate(requests):
        drafter.cache.check(slot=slot)
        assert apart(drafter.model, drafter.cache, request.token_ids, len(request.token_ids) - 1, slot) < 1e-4
    passes.clear()
    chunked = load(models, "draft", dtype="float64", kv_dtype=None)
    assert chunked.generate([text_of(n) for n in (30, 40)], 8)[0].stats.drafted and not passes


@pytest.mark.parametrize(("kind", "graphs"), cases.diagonal(["pages", "states"], ["off", "on"]))
def test_read_texts_have_the_drafts_of_texts_alone(tmp_path, monkeypatch, kind, graphs):
    """The idle rounds of a text leave nothing in recurrent states, either."""
    states = QWEN3_5 | {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
    options = {**SIZES, **(states if kind == "states" else {"arch": "qwen2"}), "max_context": 1500, "seed": 3}
    target = make(tmp_path / "target", **options)
    models = {"target": target, "draft": perturbed(target, tmp_path / "draft", amount=0.05)}
    asked = [(text_of(length, n), {"max_new_tokens": 24}) for n, length in enumerate((5, 700, 640, 300))]
    drafts, idle = [], 0
    for size, how in ((1, "off"), (4, graphs)):
        engine, known = load(models, "draft", batch_size=size, graphs=how, prefix_cache="off"), {}
        assert (engine.drafter.cache.rings is not None) == (kind == "states")
        propose = engine.drafter.propose
        engine.loop.runner.most = lambda requests: UNLIMITED if len(requests) == 1 else 100

        def proposed(batch, propose=propose, known=known):
            nonlocal idle
            draft = propose(batch)
            idle += len(draft.idle)
            for slot, request in enumerate(batch.requests):
                if slot not in draft.idle:
                    at = request.prompt_length, int(batch.state.length[slot])
                    known[at] = batch.window[slot, 1 : draft.size + 1].tolist()
            return draft

        monkeypatch.setattr(engine.drafter, "propose", proposed)
        served(engine, asked)
        drafts.append(known)
    both = drafts[0].keys() & drafts[1].keys()
    assert idle > 5 and {prompt for prompt, _ in both} == {5, 700, 640, 300}
    pairs = [[*zip(drafts[0][at], drafts[1][at], strict=False)] for at in both]  # the last drafts may be shorter
    assert all(a == b for pair in pairs for a, b in pair) and sum(map(len, pairs)) > 20


def test_an_idle_draft_teaches_nothing():
    """Not even its confidence, from which policies learn when a draft was not worth its rows."""
    draft = Draft(2, depth=2, idle={1: BEHIND}, confidence=[[0.9, 0.1], [0.8, 0.1]])
    assert draft.outcome(0, [0, 1], [7, 8]) == Outcome(2, [0, 1], [0.9, 0.8])
    assert draft.outcome(1, [0], [7]) == Outcome(0, [0])
    before = (history := AcceptanceHistory(Costs(lambda budget: 0.1))).drafts.expected(2)
    policy = Auto(history.drafts, Budget(2, 2), True)
    policy.observe(draft.outcome(1, [0], [7]))
    assert history.drafts.expected(2) == before
