"""Rounds of static shape: the tokens of plain decoding on a CPU, without graphs; what they launch; what they read."""

import collections
import dataclasses
import functools
import itertools

import pytest
import torch
from make_checkpoint import make
from pairs import flips, logits_of, perturbed
from recorded import kernels, recording

import specker
from specker.config import Sampling
from specker.runtime import loop
from specker.runtime.model.cache import KVCache
from specker.runtime.model.decoder import prefill
from specker.runtime.policy import Budget
from specker.runtime.rounds import KINDS

SHAPES = {
    "chain-1": {"draft_tokens": 1},
    "chain-5": {"draft_tokens": 5},
    "tree-3x4": {"tree": "3x4"},
    "tree-4x3-cap-7": {"tree": "4x3", "draft_tokens": 7},
    "easyspec": {"strategy": "easyspec", "layer_parallel": "2"},
    "easyspec-tree": {"strategy": "easyspec", "layer_parallel": "2", "tree": "3x3"},
    "plus-minus-one": {"policy": "plus-minus-one"},
    "draft-and-verify": {"policy": "draft-and-verify"},
}
SAMPLING = {
    "greedy": {},
    "T0.7": {"temperature": 0.7},
    "T1-top": {"temperature": 1.0, "top_p": 0.8, "top_k": 20, "seed": 5},
    "T1-top-p": {"temperature": 1.0, "top_p": 0.7, "seed": (1 << 64) - 3},
}
PROMPTS = ([5, 9, 40], [1], list(range(3, 90)))


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("vocabtrim", {}),
        ("vocabtrim", {"tree": "3x3", "vocab_text": 32}),
        ("easyspec+vocabtrim", {"tree": "2x4"}),
        ("del", {}),
        ("del", {"draft_tokens": 2}),
        ("del+vocabtrim", {"vocab_keep": "2048"}),
        ("diffuspec", {}),
        ("diffuspec+vocabtrim", {"cps": "tree"}),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_bundled_family(bundled, strategy, options, temperature):
    fast = specker.load(strategy=strategy, device="cpu", dtype="float64", graphs="on", **options)
    plain = specker.load(strategy="ar", device="cpu", dtype="float64")
    for prompt in specker.zoo.PROMPTS[:1]:
        got = fast.generate(prompt, 48, temperature=temperature)
        assert got.tokens == plain.generate(prompt, 48, temperature=temperature).tokens
        assert got.stats.acceptance_length > 1.4


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    target = make(tmp_path_factory.mktemp("target"), "llama", layers=4, max_context=192)
    return target, perturbed(target, tmp_path_factory.mktemp("draft"))


def load(pair, **options):
    return specker.load(*pair, dtype="float64", page_size=16, **options)


@pytest.fixture(scope="module")
def plain(pairs):
    return load(pairs[:1], strategy="ar")


@pytest.mark.parametrize(("shape", "how"), list(itertools.product(SHAPES, SAMPLING)))
def test_tokens_equal_plain_decoding(pairs, plain, shape, how):
    fast = load(pairs, graphs="on", **SHAPES[shape])
    accepted = 0
    for prompt in PROMPTS:
        want = plain.generate(prompt, 60, **SAMPLING[how])
        got = fast.generate(prompt, 60, **SAMPLING[how])
        assert got.tokens == want.tokens
        assert got.stats.tokens == len(got.tokens) == got.stats.accepted + got.stats.rounds
        accepted += got.stats.accepted
    assert accepted > 20, "hardly anything was accepted: this proves little"
    rounds = fast._rounds_of.launched
    assert rounds > 40, "static rounds were hardly used"


@pytest.mark.parametrize("count", range(1, 14))
def test_max_new_tokens_in_mid_draft(pairs, plain, count):
    fast = load(pairs, graphs="on", draft_tokens=5)
    for prompt in PROMPTS[::2]:
        got = fast.generate(prompt, count)
        assert got.tokens == plain.generate(prompt, count).tokens and len(got.tokens) == count
        assert got.finished == "length" and got.stats.tokens == got.stats.accepted + got.stats.rounds


@pytest.mark.parametrize("shape", ["chain-5", "tree-3x4", "easyspec"])
def test_the_context_ends_decoding(pairs, plain, shape):
    fast = load(pairs, graphs="on", **SHAPES[shape])
    prompt = [k % 100 for k in range(150)]
    got = fast.generate(prompt, 500)
    assert got.tokens == plain.generate(prompt, 500).tokens and len(got.tokens) == 42
    longer = plain.generate([k % 100 for k in range(191)], 500)  # room for one token, then a text that fills it
    assert fast.generate([k % 100 for k in range(191)], 500).tokens == longer.tokens and len(longer.tokens) == 1


def test_a_stop_id_ends_the_text(pairs):
    plain, fast = load(pairs[:1], strategy="ar"), load(pairs, graphs="on", draft_tokens=5)
    free = plain.generate([5, 9, 40, 3, 3, 3], 60).tokens
    for stop in dict.fromkeys(free[3:12]):
        for engine in (plain, fast):
            object.__setattr__(engine.target.config, "eos_ids", (stop,))
        got = fast.generate([5, 9, 40, 3, 3, 3], 60)
        assert got.tokens == free[: free.index(stop) + 1] and got.finished == "stop"
        assert not set(fast.generate(PROMPTS[2], 60).tokens[:-1]) & {stop}, "the wasted round came through"


def test_a_draft_with_a_shorter_context(pairs, plain, tmp_path):
    """Static rounds while there is room, then loop.py's own, which ends drafting."""
    short = make(tmp_path, "llama", layers=1, max_context=64)
    for shape in ({"draft_tokens": 4}, {"tree": "2x4"}):
        fast = load((pairs[0], short), graphs="on", **shape)
        for prompt in ([5, 9, 40], list(range(40)), list(range(100))):
            assert fast.generate(prompt, 80).tokens == plain.generate(prompt, 80).tokens
        assert fast._rounds_of.launched > 10


@pytest.mark.parametrize("shape", ["chain-5", "tree-3x4"])
def test_a_stream_left_in_the_middle(pairs, plain, shape):
    """The round that was on its way belongs to nobody."""
    fast = load(pairs, graphs="on", **SHAPES[shape])
    for prompt in PROMPTS:
        stream = fast.stream(PROMPTS[2], 60, temperature=0.7)
        next(stream), next(stream)
        stream.close()
        assert fast.generate(prompt, 40).tokens == plain.generate(prompt, 40).tokens
        assert fast.generate_ar(prompt, 40).tokens == plain.generate(prompt, 40).tokens


def test_after_static_rounds_others_see_the_whole_text(pairs, plain, tmp_path, monkeypatch):
    """Attention's reach is the static rounds' own: what follows them without one, a trace, looks at all columns."""
    monkeypatch.setattr("specker.runtime.rounds.REACHES", (16, 32, 64, 128))
    fast = load(pairs, graphs="on", draft_tokens=4)
    fast.generate([5, 9, 40], 10)
    assert fast.cache.table.shape[1] < 4  # pages of 16
    rows = []
    fast.trace = rows.append
    prompt = list(range(3, 90))
    assert fast.generate(prompt, 40).tokens == plain.generate(prompt, 40).tokens and rows
    assert all(c.table.shape == c.block_table.shape for c in (fast.cache, fast.drafter.cache))
    fast.trace = None
    assert fast.generate(prompt, 60).tokens == plain.generate(prompt, 60).tokens  # through several reaches


@pytest.mark.parametrize("shape", ["chain-5", "tree-3x4", "draft-and-verify"])
def test_a_given_acceptance(pairs, shape):
    """The same coins as in loop.py's own rounds: the same rounds, and the same text."""
    slow, fast = (load(pairs, graphs=how, acceptance="synthetic:0.7", **SHAPES[shape]) for how in ("off", "on"))
    for how in SAMPLING.values():
        want, got = (engine.generate(PROMPTS[2], 80, **how) for engine in (slow, fast))
        assert got.tokens[:-6] == want.tokens[:-6]  # a static draft does not end with the text
        assert abs(got.stats.rounds - want.stats.rounds) <= 1
    assert fast._rounds_of.launched > 20


def test_float64_has_no_graphs_on_a_gpu(pairs, monkeypatch):
    engine = load(pairs)
    with monkeypatch.context() as m, pytest.raises(ValueError, match="--graphs on needs kernels"):
        m.setattr(engine, "device", torch.device("cuda"))
        m.setattr(engine, "options", dataclasses.replace(engine.options, graphs="on"))
        engine.__post_init__()


@pytest.mark.parametrize("shape", ["chain-5", "tree-3x4"])
def test_the_logits_are_those_of_plain_decoding(pairs, shape):
    """On a GPU they are equal in bfloat16 (test_gpu.py); here up to the sums' order."""
    fast = load(pairs, graphs="on", **SHAPES[shape])
    for prompt, how in itertools.product((PROMPTS[2], list(range(40))), ({}, {"temperature": 0.7})):
        (a, text), (b, same) = (logits_of(fast, prompt, 60, drafting, **how) for drafting in (False, True))
        assert text == same and (a - b).abs().max() < 1e-12 and len(a) == 60


@pytest.mark.parametrize("draft", ["another", "itself"])
@pytest.mark.parametrize("shape", ["chain-5", "tree-3x4", "easyspec", "easyspec-tree", "draft-and-verify"])
def test_every_round_leaves_the_caches_sound(pairs, shape, draft):
    """After a round the target's columns before the root, and the drafter's that it drafted from, hold what a pass over
    the text writes; so do those that `unload` vouches for."""
    fast = load(pairs if draft == "another" else (pairs[0], pairs[0]), graphs="on", **SHAPES[shape])
    rounds, drafter, caches = fast._rounds_of, fast.drafter, (fast.cache, fast.drafter.cache)
    ctx = fast._context(PROMPTS[2], 60, drafter, {})
    loop._prefill(ctx)

    def sound(model, cache, length):
        fresh = KVCache(model.config, cache.capacity, dtype=model.dtype, device="cpu", page_size=16)
        prefill(model, fresh, ctx.committed[:length])
        for ours, theirs in ((cache.k, fresh.k), (cache.v, fresh.v)):
            a, b = (c.flatten(1, 2)[:, :length] for c in (ours, theirs))
            assert (a - b).abs().max() < 1e-12

    longest = 0
    while len(ctx.committed) + 6 < ctx.limit:
        before = len(ctx.committed)
        assert loop._launch(ctx, rounds)
        report, _ = rounds.collect()
        ctx.committed += report.tokens
        longest = max(longest, len(report.tokens))
        sound(fast.model, caches[0], len(ctx.committed) - 1)
        sound(drafter.model, caches[1], before)
        rounds.unload(len(ctx.committed))
        for model, cache in zip((fast.model, drafter.model), caches, strict=True):
            sound(model, cache, cache.exact_len)
        assert caches[1].exact_len >= len(ctx.committed) - rounds.catch_up
    if draft == "itself" and shape in ("chain-5", "tree-3x4"):
        assert longest == rounds.catch_up, "no draft was accepted whole: this proves little"


@pytest.mark.parametrize("shape", ["chain-5", "tree-3x4"])
def test_flips_are_found(pairs, plain, shape):
    """`flips` counts the tokens that rounding turned; in float64 none is. A wrong text has one where it was changed."""
    fast = load(pairs, graphs="on", **SHAPES[shape])
    prompt = list(range(40))
    text = plain.generate(prompt, 60).tokens
    assert flips(fast, prompt, text) == (0, 60)
    text[30] ^= 1
    turned, of = flips(fast, prompt, text)
    assert turned >= 1 and of == 60


# --- what is launched on a GPU, seen without one


RECORDED = {  # the last ones with the bundled family, the others with tiny models
    "ar": {"strategy": "ar"},
    "chain-4": {"draft_tokens": 4},
    "tree-3x4": {"tree": "3x4"},
    "tree-3x4-cap-7": {"tree": "3x4", "draft_tokens": 7},
    "easyspec": {"strategy": "easyspec", "layer_parallel": "2", "tree": "2x3"},
    "draft-and-verify": {"policy": "draft-and-verify", "draft_tokens": 4},
    "synthetic": {"tree": "3x4", "acceptance": "synthetic:0.8"},
    "del": {"strategy": "del"},
    "del-length": {"strategy": "del", "policy": "del-length"},
    "diffuspec": {"strategy": "diffuspec", "adl": "2-4", "cps": "off"},
    "diffuspec-fixed": {"strategy": "diffuspec", "draft_tokens": 5, "cps": "off"},
    "vocabtrim": {"strategy": "vocabtrim"},
}


class Recorded:
    """An engine in bfloat16 whose rounds are written down, not run."""

    def __init__(self, folder, strategy="draft", **options):
        target = make(folder / "target", "qwen2", layers=3, max_context=6000)
        draft = make(folder / "draft", "dream" if strategy == "diffuspec" else "qwen2", layers=4, max_context=6000)
        models = {"ar": [target], "del": [target], "vocabtrim": []}.get(strategy, [target, draft])
        how = {"device": "cpu", "dtype": "bfloat16", "graphs": "on"}
        self.engine = specker.load(*models, strategy=strategy, **how, **options)
        self.rounds, self.reads = self.engine._rounds_of, 0
        self.plan = self.engine.plan
        self.budgets = self.plan.budgets
        self.rounds._read_confidence = self.read
        policy = self.engine.options.policy
        self.asking = policy == "draft-and-verify" or policy == "del"

    def read(self):
        self.reads += 1
        return 0.9

    def round(self, length, sampling, budget):
        """The launches of one round on a text of `length` tokens."""
        with recording() as log:
            self.rounds.reset()
            text = [5] * length  # nothing new for a trimmed head to follow, which is no part of a graph
            self.rounds.load(text, 10_000, sampling, self.engine._agreement(0))
            log.clear()
            keep = (lambda _: True) if self.asking else None
            self.rounds.launch(text, budget, sampling, keep, bool(self.budgets))
        return log


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return functools.cache(lambda name: Recorded(tmp_path_factory.mktemp(name), **RECORDED[name]))


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("sampling", KINDS, ids=["greedy", "noise", "filtered"])
def test_what_is_launched_does_not_depend_on_the_text(recorded, name, sampling):
    """Two rounds on texts of different lengths launch the same kernels with the same arguments, but for addresses; no
    number is read on the host but DEL's confidences, one a draft token, or draft-and-verify's."""
    world = recorded(name)
    for budget in world.budgets or [Budget(0, 0)]:
        if budget.exit:
            budget = Budget(3, 3, budget.exit)
        world.reads = 0
        first = world.round(50, sampling, budget)
        assert world.reads == (budget.depth if world.asking else 0)
        assert first == world.round(371, sampling, budget)
        if sampling.temperature == 0 or sampling.top_k:
            other = Sampling(sampling.temperature * 1.5, min(sampling.top_p, 0.9), sampling.top_k * 3, seed=8)
            again = world.round(371, other, budget)
            assert [x[:2] for x in again] == [x[:2] for x in first], "another request's numbers need another graph"
            assert len(kernels(first)) > 3 * 6


@pytest.mark.parametrize("name", RECORDED)
def test_nothing_is_copied_from_the_host_within_a_graph(recorded, name):
    """What is captured is the second run of a stretch: constants were made in the first."""
    world = recorded(name)
    with recording():
        for sampling, budget in itertools.product(KINDS, world.budgets or [Budget(0, 0)]):
            world.rounds.reset()
            world.rounds.load([5] * 60, 10_000, sampling, world.engine._agreement(0))
            for _ in range(2):
                keep = (lambda _: True) if world.asking else None
                world.rounds.launch([5] * 60, budget, sampling, keep, bool(world.budgets))


def test_a_longer_reach_changes_attention_alone(recorded):
    world = recorded("chain-4")
    budget, greedy = world.budgets[0], KINDS[0]
    near, far = (world.round(length, greedy, budget) for length in (50, 1100))
    apart = {a[0] for a, b in zip(near, far, strict=True) if a != b}
    assert apart and all("attention" in name for name in apart)


@pytest.mark.parametrize("name", RECORDED)
def test_a_warm_up_leaves_nothing_to_compile(recorded, name):
    """Every kernel that a round launches, at any length and with any filter, was launched in the warm-up."""
    world = recorded(name)
    with recording() as log:
        plan = world.plan
        world.rounds.warmup(plan.budgets, plan.verified, plan.accepted, world.asking, world.engine._agreement(0))
    warm = set(kernels(log))
    for budget in world.budgets or [Budget(0, 0)]:
        for length, sampling in itertools.product((50, 800 if name == "vocabtrim" else 5000), KINDS):
            assert set(kernels(world.round(length, sampling, budget))) <= warm


@pytest.mark.parametrize("shape", ["chain-5", "tree-3x4", "plus-minus-one", "draft-and-verify"])
def test_a_warm_up_leaves_nothing_to_capture(pairs, plain, shape):
    """Whatever stretch of work a request meets has run twice before: compiled, then captured."""
    fast = load(pairs, graphs="on", **SHAPES[shape])
    times = collections.Counter()

    def run(key, work):
        times[key] += 1
        work()

    fast._rounds_of.graphs.run, fast._rounds_of.graphs.passes = run, 2
    told = []
    fast.warmup(lambda done, of: told.append((done, of)))
    assert told and told[-1][0] == told[-1][1]
    warm = {key for key, n in times.items() if n > 1}
    times.clear()
    for prompt, how in itertools.product(PROMPTS[:2], SAMPLING.values()):
        assert fast.generate(prompt, 50, **how).tokens == plain.generate(prompt, 50, **how).tokens
        fast.generate_ar(prompt, 10, **how)
    assert set(times) <= warm and len(times) > 4


@pytest.mark.parametrize("context", [192, 160])
def test_every_reach_is_met_in_a_warm_up(pairs, plain, tmp_path, monkeypatch, context):
    """To the context's last token, where a reach ends with it and where it does not; with a draft of a shorter one."""
    monkeypatch.setattr("specker.runtime.rounds.REACHES", (48, 96, 192))
    short = make(tmp_path, "llama", layers=1, max_context=64)
    for draft in (pairs[1], short):
        fast = load((pairs[0], draft), graphs="on", draft_tokens=4, max_context=context)
        times = collections.Counter()

        def run(key, work, times=times):
            times[key] += 1
            work()

        fast._rounds_of.graphs.run, fast._rounds_of.graphs.passes = run, 2
        fast.warmup()
        warm = {key for key, n in times.items() if n > 1}
        times.clear()
        for length in (3, 40, 90, context - 50):
            fast.generate(list(range(3, 3 + length % 100)) + [7] * (length - length % 100), 50)
            fast.generate_ar([9] * length, 50)
        assert set(times) <= warm and {key[1] for key in times if key[0] != "accept"} >= {48, 96}


@pytest.mark.parametrize("strategy", ["draft", "del"])
def test_a_warm_up_draws_in_every_way(strategy, monkeypatch):
    """What is launched one by one, a first round or a prompt's rows, has kernels of its own for each filter."""
    from specker.runtime import sampling

    seen = set()

    def spy(logits, temperature, top_k, top_p, seed, positions, draw=None):
        seen.add((temperature > 0, top_k > 0, top_p < 1, draw is None))
        return sample(logits, temperature, top_k, top_p, seed, positions, draw)

    sample = sampling.sample_rows
    monkeypatch.setattr(sampling, "sample_rows", spy)
    engine = specker.load(strategy=strategy, device="cpu", graphs="on")
    engine.warmup()
    warm = set(seen)
    for how in ({}, {"temperature": 0.7}, {"top_k": 9}, {"top_p": 0.8}, {"top_k": 9, "top_p": 0.8}):
        how = {"temperature": 0.5, **how} if how else how
        engine.generate([5, 9], 8, **how)
        engine.generate(list(range(60)), 8, **how)
    assert seen == warm and len([kind for kind in warm if kind[-1]]) == 5


def test_long_blocks_are_not_static():
    """The rows that a diffusion drafter forwards again and its masks stand in one window of 256."""
    plain = specker.load(strategy="ar", device="cpu", dtype="float64")
    engine = specker.load(strategy="diffuspec", draft_tokens=130, device="cpu", dtype="float64", graphs="on")
    prompt = [n % 500 for n in range(200)]
    assert engine.generate(prompt, 12).tokens == plain.generate(prompt, 12).tokens
    assert engine._rounds_of.launched == 0


def test_watching_costs_what_its_round_takes_longer(monkeypatch):
    """A round in which DEL watches is launched one by one; where others are static, that is part of the price."""
    from specker.runtime.rounds import StaticRounds
    from specker.runtime.strategies.dynamic_exit import DynamicExit

    found = {}
    learn = DynamicExit.learn
    for usual in (0.0, 1e9):
        told = found[usual] = []

        def spy(self, layers, match, confidence, seconds=0.0, told=told):
            told.append(seconds)
            learn(self, layers, match, confidence, seconds)

        monkeypatch.setattr(DynamicExit, "learn", spy)
        monkeypatch.setattr(DynamicExit, "_affordable", lambda self: True)
        monkeypatch.setattr(StaticRounds, "usual", property(lambda self, usual=usual: usual))
        specker.load(strategy="del", device="cpu", graphs="on").generate(list(range(60)), 30)
    whole, own = (sorted(s for s in found[usual] if s)[2] for usual in (0.0, 1e9))
    assert whole > 2 * own > 0
