"""Requests go on from recurrent states that were saved in earlier prompts, and their tokens are those without them."""

import cases
import pytest
import torch
from make_checkpoint import LFM2, QWEN3_5, make
from make_mtp import make_mtp
from pairs import perturbed

import specker
from specker.checkpoints.checkpoint import read_config
from specker.model.memory import Cost
from specker.model.prefill import prefill_parts
from specker.model.states import saved_bytes
from specker.runtime.strategies import model_drafter

KINDS = {
    "qwen3.5": QWEN3_5 | {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "seed": 3},
    "lfm2": LFM2 | {"tied": False, "seed": 1, "heads": 2, "kv_heads": 1, "head_dim": 32},
}
LENGTHS = 33, 64, 65, 97
HOW = {
    "ar": {"strategy": "ar"},
    "tree": {"strategy": "draft", "tree": "2x3"},
    "lookup": {"strategy": "lookup", "draft_tokens": 4},
}
pytestmark = pytest.mark.usefixtures("cheap")  # drafts do not depend on the clock


def text_of(length: int, seed: int = 0) -> list[int]:
    g = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, 128, (length,), generator=g).tolist()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """kind -> (target, draft)."""
    made = {}
    for kind, options in KINDS.items():
        target = make(tmp_path_factory.mktemp(kind), max_context=1500, **options)
        made[kind] = target, perturbed(target, tmp_path_factory.mktemp(f"{kind}-draft"), amount=0.04)
    return made


@pytest.fixture(scope="module")
def alone(pairs):
    """kind -> an engine that decodes plainly and takes over nothing."""
    return {
        kind: specker.load(target, strategy="ar", dtype="float32", prefix_cache="off")
        for kind, (target, _) in pairs.items()
    }


def load(pairs, kind, how, saved=None, **more):
    """`saved`: columns that the engine of one sequence saves."""
    target, draft = pairs[kind]
    options = {"dtype": "float32", "page_size": 16, **HOW[how], **more}
    with pytest.MonkeyPatch.context() as patch:
        if saved is not None:
            patch.setattr("specker.runtime.strategies.base.SAVED", saved - 1)
        return specker.load(target, draft if HOW[how]["strategy"] == "draft" else None, **options)


def same(engine, alone, text, count=12, **how):
    """The engine's text after a prompt: its tokens and their log-probabilities are those of `alone`."""
    out, want = (each.generate(text, count, logprobs=1, **how) for each in (engine, alone))
    assert out.tokens == want.tokens
    ours, theirs = ([each.logprob for each in x.logprobs] for x in (out, want))
    assert ours == pytest.approx(theirs, abs=1e-4)
    return out


def check(engine, alone, text, prefilled=None, count=12, **how):
    """The text after a prompt, which is plain decoding's; `prefilled`: tokens of the prompt that were computed. The
    rings and states of requests that have ended, which might serve as well, are gone and overwritten."""
    for rings in [cache.rings for cache in engine.loop.slots.caches if cache.rings is not None]:
        while rings.ended:
            rings.evict()
        if not engine.loop.busy:
            for x in rings.memory:
                if x is not None:
                    x.fill_(3)
    out = same(engine, alone, text, count, **how)
    assert prefilled is None or out.stats.prefilled == prefilled, (out.stats.prefilled, len(text))
    for cache in engine.loop.slots.caches:
        cache.check()
    return out.tokens


@pytest.mark.parametrize(("kind", "how"), cases.one_in(2, KINDS, HOW))
def test_the_third_question_about_a_text_costs_its_own_tokens(pairs, alone, kind, how):
    """The second one finds where the texts part, and saves the states there."""
    engine = load(pairs, kind, how)
    for n in LENGTHS:
        start = text_of(n, 1)
        for turn, own in enumerate((9, 40, 3, 70)):
            new = own if turn > 1 else own + n
            check(engine, alone[kind], start + text_of(own, 2), new - 1, temperature=0.7 * (turn % 2))


def test_a_text_takes_the_place_of_the_one_that_it_leaves(pairs, alone):
    """The pool does not hold both, and the states are saved where they part nevertheless."""
    engine, start = load(pairs, "qwen3.5", "ar"), text_of(900, 1)
    for own, new in ((30, 929), (40, 939), (50, 49)):
        check(engine, alone["qwen3.5"], start + text_of(own, 2), new, 1)


def test_a_short_question_parts_near_its_end(pairs, alone):
    """No chunk ends there, and the states have moved on since, or have not."""
    engine = load(pairs, "qwen3.5", "ar")
    for n in (60, 62, 63, 64):
        start = text_of(n, 1)
        for own, new in ((90, n + 89), (4, n + 3), (40, 39)):
            check(engine, alone["qwen3.5"], start + text_of(own, 2), new)


@pytest.mark.parametrize("kind", KINDS)
def test_another_answer_to_a_prompt_costs_nothing(pairs, alone, kind):
    """The states at its end were saved: also for a turn without the first answer, as chats that leave out thoughts."""
    engine = load(pairs, kind, "tree")
    for n in LENGTHS:
        prompt = text_of(n, 3)
        check(engine, alone[kind], prompt, n - 1, 24)
        check(engine, alone[kind], prompt, 0, 24, temperature=1.0, seed=2)
        check(engine, alone[kind], [*prompt, 1, 2, 3], 3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_ring_that_began_at_a_saved_column_serves_none_before(pairs, alone, kind):
    """Of a convolution's inputs only the last ones before it were saved."""
    engine, text = load(pairs, kind, "ar"), text_of(111, 17)
    check(engine, alone[kind], text, 110)
    for n in (71, 109):
        check(engine, alone[kind], text, 0, 1)
        same(engine, alone[kind], text[:n])


def test_a_ring_whose_request_went_back_serves_no_earlier_state(pairs, alone):
    """It has two states. Where a request goes on from the older one, the newer one stands in place of a third."""
    engine, text = load(pairs, "qwen3.5", "ar", saved=0), text_of(230, 18)
    for n, new in ((230, 229), (220, 0), (190, 189)):
        assert same(engine, alone["qwen3.5"], [*text[: n - 1], 1], 2).stats.prefilled == new


def test_running_requests_share_a_prompt(pairs, alone):
    """Its pages have several owners then."""
    engine, prompt = load(pairs, "qwen3.5", "tree", batch_size=3), text_of(70, 4)
    first = engine.stream(prompt, 60)
    next(first)
    check(engine, alone["qwen3.5"], [*prompt, 5], 1, 20)
    check(engine, alone["qwen3.5"], [*prompt, 6], 0, 20)
    rest = [token for event in first for token in event.tokens]
    assert alone["qwen3.5"].generate(prompt, 60).tokens[-len(rest) :] == rest
    outs = engine.generate([prompt] * 6, 20, temperature=1.0, seed=5)
    assert [out.stats.prefilled for out in outs] == [0] * 6
    assert {tuple(out.tokens) for out in outs} == {
        tuple(alone["qwen3.5"].generate(prompt, 20, temperature=1.0, seed=5).tokens)
    }


def test_the_bits_are_those_of_a_fresh_prefill(pairs):
    engines = [load(pairs, "qwen3.5", "ar", prefix_cache=kind) for kind in ("off", "exact")]
    engines[1].generate(text_of(90, 5) + [1], 4)
    for n in (7, 8):
        prompt, rows = text_of(90, 5) + text_of(n, 6), []
        for engine in engines:
            stream = engine.stream(prompt, 20)
            next(stream)
            at = engine.cache.slots(0, 0, len(prompt) - 1)
            rows.append(torch.stack([x.flatten(1, 2)[:, at] for x in (engine.cache.k, engine.cache.v)]))
            stream.close()
        assert torch.equal(*rows)


def test_where_bits_depend_on_the_chunk_whole_chunks_are_saved(pairs, chunk_prompts):
    chunk_prompts(24)
    alone = load(pairs, "qwen3.5", "ar", dtype="float64", prefix_cache="off")
    engine, start = load(pairs, "qwen3.5", "tree", dtype="float64"), text_of(60, 7)
    for turn, own in enumerate((30, 40, 20)):
        text = start + text_of(own, 8)
        check(engine, alone, text, len(text) - 1 - (48 if turn > 1 else 0))
    check(engine, alone, text, (len(text) - 1) % 24)


@pytest.mark.parametrize("strategy", ["mtp", "draft"])
def test_a_drafter_goes_on_from_the_same_column(tmp_path, alone, pairs, strategy):
    """An MTP head has no pairs of the last columns of a beginning; a recurrent draft model has states of its own."""
    if strategy == "mtp":
        options = {name: value for name, value in KINDS["qwen3.5"].items() if name not in ("layers", "seed")}
        target = make_mtp(tmp_path / "mtp", "qwen3-next", **options)
        how = {"strategy": "mtp", "dtype": "float32", "page_size": 16, "batch_size": 3}
        engine, fresh = (specker.load(target, prefix_cache=kind, **how) for kind in ("exact", "off"))
        plain = specker.load(target, strategy="ar", dtype="float32", prefix_cache="off")
    else:
        engine, fresh = (load(pairs, "qwen3.5", "tree", prefix_cache=kind) for kind in ("exact", "off"))
        plain = alone["qwen3.5"]
    behind = int(strategy == "mtp")
    for n in (130,):
        start, accepted = text_of(n, 9), []
        for turn, own in enumerate((90, 100, 3, 100)):
            text = start + text_of(own, 10)
            new = n + own - 1 if turn < 2 else own - 1 + behind if turn == 2 else behind
            check(engine, plain, text, new, 40)
            accepted.append(engine.generate(text, 40).stats.accepted)
        assert accepted[-1] == fresh.generate(text, 40).stats.accepted


@pytest.mark.parametrize("kind", KINDS)
def test_a_recurrent_draft_of_a_target_without_states(tmp_path, monkeypatch, pairs, kind):
    """It saves its own states: a third question costs it its own tokens, an answer to a known prompt none."""
    target, rows = make(tmp_path / "llama", max_context=1500), []

    def counted(model, cache, parts):
        rows.extend(len(part.tokens) for part in parts)
        return prefill_parts(model, cache, parts)

    monkeypatch.setattr(model_drafter, "prefill_parts", counted)
    plain = specker.load(target, strategy="ar", dtype="float32", prefix_cache="off")
    engine = specker.load(target, pairs[kind][0], dtype="float32", page_size=16, batch_size=2, **HOW["tree"])
    for n in (65, 97):
        start = text_of(n, 18)
        for own, new in ((70, n + 69), (90, n + 89), (80, 79), (80, 0)):
            rows.clear()
            check(engine, plain, start + text_of(own, 19))
            assert sum(rows) == new, (n, own, rows)


def test_states_are_saved_within_a_budget(pairs, alone):
    prompts = [text_of(50, n) for n in range(11, 15)]
    engine = load(pairs, "qwen3.5", "ar", saved=2)
    rings = engine.cache.rings
    for prompt in prompts:
        check(engine, alone["qwen3.5"], prompt, 49)
        assert len(rings.saved) <= 2
    check(engine, alone["qwen3.5"], prompts[2], 0)  # used last now
    check(engine, alone["qwen3.5"], prompts[1], 49)
    check(engine, alone["qwen3.5"], prompts[2], 0)
    check(engine, alone["qwen3.5"], prompts[3], 49)
    engine.cache.forget()
    check(engine, alone["qwen3.5"], prompts[2], 49)


def test_short_prompts_leave_a_long_one_saved(pairs, alone):
    """For as long as the columns that they gain are fewer."""
    engine, text = load(pairs, "qwen3.5", "ar"), text_of(400, 20)
    check(engine, alone["qwen3.5"], text, 399, 1)
    for n in range(20):
        check(engine, alone["qwen3.5"], text_of(40, 21 + n), 39, 1)
    check(engine, alone["qwen3.5"], [*text, 1, 2], 2, 1)
    engine, text = load(pairs, "qwen3.5", "ar", saved=2), text_of(100, 20)
    for count, new in ((3, 0), (4, 99)):
        engine.cache.forget()
        check(engine, alone["qwen3.5"], text, 99, 1)
        for n in range(count):
            check(engine, alone["qwen3.5"], text_of(40, 21 + n), 39, 1)
        check(engine, alone["qwen3.5"], text, new, 1)


def test_the_end_of_a_text_is_worth_what_it_adds(pairs, alone):
    """The beginning, which is older, stays; a short prompt is not saved."""
    engine, start = load(pairs, "qwen3.5", "ar", saved=2), text_of(80, 22)
    check(engine, alone["qwen3.5"], start, 79, 1)
    check(engine, alone["qwen3.5"], [*start, 1, 2, 3], 3, 1)
    check(engine, alone["qwen3.5"], text_of(32, 23), 31, 1)
    assert [len(saved.text) for saved in engine.cache.rings.saved] == [79, 82]
    check(engine, alone["qwen3.5"], text_of(33, 24), 32, 1)
    assert [len(saved.text) for saved in engine.cache.rings.saved] == [79, 32]


def test_long_prompts_are_saved_between(pairs, alone, monkeypatch):
    monkeypatch.setattr("specker.runtime.slots.SAVE_EVERY", 64)
    engine, text = load(pairs, "qwen3.5", "ar", saved=6), text_of(400, 16)
    check(engine, alone["qwen3.5"], text, 399)
    assert [len(saved.text) for saved in engine.cache.rings.saved] == [133, 266, 399]
    check(engine, alone["qwen3.5"], text[:300] + [7], 300 - 266)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_states_are_counted(pairs, kind):
    engine = load(pairs, kind, "ar", saved=3)
    rings, config = engine.cache.rings, read_config(pairs[kind][0])
    held = [*rings._saved_records, *([] if rings._saved_states is None else [rings._saved_states])]
    states, each = int(rings._saved_states is not None), saved_bytes(config, torch.float32)
    anchors = states * 4 * 2 * sum(m is not None for m in config.layer.mixers)  # of two value heads
    assert sum(x.nbytes for x in held) + 3 * anchors == 3 * each
    with_them, without = (Cost.of(config, torch.float32, saved=n).states for n in (3, 0))
    assert with_them - without == 3 * each
