"""Self-speculation: every policy gives the output of plain decoding, no layer row runs twice, and DEL's statistics
follow the paper's formulas."""

import functools
import itertools
import json
import math

import cases
import numpy as np
import pytest
import torch
from make_checkpoint import make
from one_round import after_every_round, apart, outcome

import specker
from specker.cli import run
from specker.runtime import prompts, strategies
from specker.runtime.control.auto import AGREES, AcceptanceHistory
from specker.runtime.control.choose import Chooser
from specker.runtime.control.costs import Costs
from specker.runtime.control.policy import Budget, DraftAndVerify, Fixed, PlusMinusOne
from specker.runtime.round import round
from specker.runtime.strategies.dynamic_exit import eligible_layers
from specker.runtime.strategies.dynamic_exit.exit_policy import ASSUMED, EARLIER, DynamicExit

PROMPTS = ([5, 9, 40], [1], list(range(3, 90)))
SAMPLING = {
    "greedy": {},
    "T0.7": {"temperature": 0.7},
    "T1-top": {"temperature": 1.0, "top_p": 0.8, "top_k": 20, "seed": 5},
}
POLICIES = {
    "del": {},
    "del-layers": {"exit_cost": "layers"},
    "del-bytes": {"exit_cost": "bytes"},
    "del-length": {"policy": "del-length"},
    "fixed": {"policy": "fixed", "exit_layer": 4, "draft_tokens": 3},
    "plus-minus-one": {"policy": "plus-minus-one", "exit_layer": 3},
    "draft-and-verify": {"policy": "draft-and-verify", "exit_layer": 5},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """Six layers, the last ones with small weights, so that an early exit is often right and often wrong."""
    from safetensors.torch import load_file, save_file

    folder = make(tmp_path_factory.mktemp("exit"), layers=6, max_context=192)
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        for layer, faint in ((3, 0.3), (4, 0.2), (5, 0.2)):
            if f"layers.{layer}." in name and ("o_proj" in name or "down_proj" in name):
                weights[name] *= faint
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def engine(target, **options):
    return specker.load(target, strategy=options.pop("strategy", "del"), dtype="float64", page_size=16, **options)


@pytest.fixture(autouse=True)
def watch_every_round(monkeypatch, steady):
    """DEL's drafts must not depend on this machine's load, and DEL drafts as its own rule says."""
    monkeypatch.setattr(DynamicExit, "may_skip_drafting", False)
    monkeypatch.setattr(
        "specker.runtime.strategies.dynamic_exit.exit_policy.DynamicExit", functools.partial(DynamicExit, overhead=1e9)
    )


@pytest.mark.parametrize(("name", "how", "graphs"), cases.one_in(6, POLICIES, SAMPLING, ["off", "on"]))
def test_tokens_equal_plain_decoding(target, monkeypatch, name, how, graphs):
    """With rounds of fixed shape, the host places every third round, which watches other layers; the device places the
    rest."""
    if graphs == "on":
        calls = itertools.count()
        monkeypatch.setattr(DynamicExit, "_affordable", lambda policy: next(calls) % 3 == 0)
    fast = engine(target, graphs=graphs, **POLICIES[name])
    drafted = accepted = 0
    kinds = set()
    for prompt in PROMPTS:
        with after_every_round(monkeypatch, lambda _, r: kinds.add(r.batch.fixed)):
            got = fast.generate(prompt, 14, **SAMPLING[how])
        assert got.tokens == cases.plain(target, prompt, 14, **SAMPLING[how])
        drafted, accepted = drafted + got.stats.drafted, accepted + got.stats.accepted
    assert 0 < accepted < drafted
    watches = name.startswith("del")
    assert kinds == ({False} if graphs == "off" else {True, False} if watches else {True})


@pytest.mark.parametrize("name", ["plus-minus-one", "draft-and-verify"])
def test_policies_serve_a_draft_model_too(pair, name):
    fast = specker.load(*pair, dtype="float64", device="cpu", policy=name)
    for prompt in PROMPTS:
        got = fast.generate(prompt, 24)
        assert len(got.stats.lengths) > 1, "the length never changed"


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_the_cache_equals_plain_decoding(target, monkeypatch, graphs):
    def sound(batch, r):
        [sequence] = r.requests
        length = len(sequence.token_ids) - 1
        batch.cache.check(committed=length + 1)
        assert apart(batch.target, batch.cache, sequence.token_ids, length) < 1e-12

    with after_every_round(monkeypatch, sound) as sizes:
        engine(target, graphs=graphs, policy="del-length").generate(PROMPTS[0], 50, temperature=0.7)
        engine(target, graphs=graphs).generate(PROMPTS[0], 50, temperature=0.7)
    assert len(sizes) > 30 and len(set(sizes)) > 2


def test_no_layer_row_runs_twice(target, monkeypatch):
    """A round runs N + 1 rows through L layers for any exit: verification does not repeat the draft's rows."""
    from specker.runtime.strategies.dynamic_exit import early_exit as dynamic_exit

    done = []
    rounds = []
    for module in (dynamic_exit, round):

        def counted(model, cache, rows, hidden, layers=slice(None), aux_layers=(), forward=module.forward):
            done.append(len(hidden) * len(range(*layers.indices(len(model.layers)))))
            return forward(model, cache, rows, hidden, layers, aux_layers)

        monkeypatch.setattr(module, "forward", counted)
    fast = engine(target)
    fast.trace = rounds.append
    for prompt in PROMPTS:
        fast.generate(prompt, 60, temperature=0.7)
    assert sum(done) == sum((len(r["draft"]) + 1) * 6 for r in rounds)
    assert {r["exit"] for r in rounds} - {0} and max(len(r["draft"]) for r in rounds) > 1


def test_combines_with_a_trimmed_head(target, tmp_path):
    from specker.runtime.strategies.vocabtrim.scores import VocabScores

    path = tmp_path / "s.safetensors"
    path.write_bytes(VocabScores.from_counts(torch.arange(128)).to_bytes())
    fast = engine(target, strategy="del+vocabtrim", vocab_scores=str(path), vocab_keep="100", vocab_text=0)
    assert fast.drafter.head.weight.shape == (100, 64) and fast.model.head.shape == (128, 64)
    whole = engine(target)
    assert fast.policies.head_cost == pytest.approx(whole.policies.head_cost * 100 / 128)
    drafted = []
    fast.trace = lambda row: drafted.extend(row["draft"])
    got = fast.generate(PROMPTS[0], 60, temperature=0.7)
    assert got.tokens == fast.generate_ar(PROMPTS[0], 60, temperature=0.7).tokens
    assert drafted and set(drafted) <= set(fast.trimmed_head.ids.tolist())
    assert 0 < fast.trim_report(got.stats)["mbsu"] < 19


def test_what_a_text_starts_from_does_not_show_in_its_tokens(target):
    fast = engine(target)
    rounds = []
    fast.trace = rounds.append
    told = []
    for before in (None, PROMPTS[2]):
        if before is not None:
            fast.generate(before, 60, temperature=1.0)
        rounds.clear()
        fast.generate([5], 60, temperature=0.7)
        told.append([{**row, "seconds": None, "round": 0} for row in rounds])
    texts = [[token for row in rows for token in row["tokens"]] for rows in told]
    assert texts[0] == texts[1] and len({(r["exit"], len(r["draft"])) for r in told[0]}) > 2
    assert told[0] != told[1], "the second text starts from the statistics of the first one"


@pytest.mark.parametrize(("length", "seeds"), [(60, []), (170, [2])])
def test_only_long_prompts_keep_hidden_rows(target, monkeypatch, length, seeds):
    """A row for every 16 tokens and layer seeds the statistics. A prompt without such rows keeps no hidden rows."""
    passes, learnt, inner = [], [], prompts.prefill_chunk
    monkeypatch.setattr(prompts, "prefill_chunk", lambda *args: passes.append(args[3]) or inner(*args))
    monkeypatch.setattr(DynamicExit, "learn", lambda self, layers, match, *rest: learnt.append(match.shape))
    engine(target, policy="del").generate([1 + n % 100 for n in range(length)], 1)
    assert learnt[: len(seeds)] == [(5, rows) for rows in seeds]
    assert [bool(aux) for aux in passes] == [bool(seeds)] * len(passes) and passes


def test_a_text_starts_from_a_few_of_the_earlier_rows():
    known = AcceptanceHistory(Costs(lambda budget: 1.0))
    before = DynamicExit((2, 4), 6, earlier=known)
    for _ in range(200):
        before.learn((2, 4), np.array([[True] * 3 + [False], [False] * 4]), np.full((2, 4), 0.5))
    after = DynamicExit((2, 4), 6, earlier=known)
    assert after._counts.sum(1) == pytest.approx([EARLIER, EARLIER])
    assert after.choice().rates == pytest.approx([0.75, 0.0])
    known.clear()
    assert not DynamicExit((2, 4), 6, earlier=known)._counts.any()


# --- the formulas in plain Python


def slow(heard, layers, total, head_cost):
    """DEL's statistics and choice in plain Python, from observations (layer, matches, confidences) one by one."""
    C = {n: [0.0, 0.0] for n in layers}
    S = {n: [0.0, 0.0] for n in layers}
    for n, match, confidence in heard:
        C[n] = [0.95 * x for x in C[n]]
        S[n] = [0.95 * x for x in S[n]]
        for m, c in zip(match, confidence, strict=True):
            C[n][0 if m else 1] += 1
            S[n][0 if m else 1] += c
    best = None
    for i, n in enumerate(layers):
        a = C[n][0] / sum(C[n]) if sum(C[n]) else 0.0
        for g in range(18):
            tokens = sum(a**k for k in range(g + 1))
            value = tokens / (total + g * (n + head_cost)) * (1 if g else 0.9)
            if best is None or value > best[0] + 1e-15:
                best = (value, i, g)
    _, i, g = best
    (yes, no), (sure, unsure) = C[layers[i]], S[layers[i]]
    g = min(g, int(2 * (yes + no)))
    return i, g, (sure / yes + unsure / no) / 2 if yes and no else None


@pytest.mark.parametrize("kind", ["mixed", "only matches", "only mismatches", "one layer", "one row"])
@pytest.mark.parametrize("head_cost", [0.0, 2.5])
def test_statistics_follow_the_formulas(kind, head_cost):
    rng = np.random.default_rng(3)
    layers = (2,) if kind == "one layer" else (1, 3, 5, 8)
    del_ = DynamicExit(layers, 12, head_cost, overhead=0.5)
    heard = []
    with np.errstate(all="raise"):
        for n in range(25):
            T = 1 if kind == "one row" else int(rng.integers(1, 9))
            some = layers if n < 2 else tuple(x for x in layers if rng.random() < 0.7)
            match = rng.random((len(some), T)) < np.array([0.3 + 0.07 * x for x in some])[:, None]
            match = {"only matches": match | True, "only mismatches": match & False}.get(kind, match)
            confidence = rng.random((len(some), T))
            del_.learn(some, match, confidence)
            heard += zip(some, match, confidence, strict=True)
            budget = del_.budget()
            i, g, threshold = slow(heard, layers, 12, head_cost)
            assert del_.chosen == (i, g) and budget.exit == layers[i]
            if threshold is None:
                assert del_.threshold is None and budget.depth == g and del_.next_worth(0.0) >= 1
            else:
                assert del_.threshold == pytest.approx(threshold) and budget.depth == (18 if g else 0)
                assert del_.next_worth(threshold + 1e-9) >= 1 > del_.next_worth(1 - 1e-8 / threshold)
    if kind == "only mismatches":
        # drafting a token with the first layer costs 1/13 more than none; with the head, 1/5
        assert budget.depth == (1 if head_cost == 0 else 0)
    if kind == "only matches":
        assert budget.depth == 17 and budget.exit == layers[0]


@pytest.mark.parametrize("accepted", [0, 2, 4])
def test_a_draft_counts_as_an_observation_of_its_exit_layer(accepted):
    """Without watching: the accepted tokens and the first rejected one count, later ones do not."""
    del_ = DynamicExit((2, 4), 6)
    match = np.array([[True, False, False, False], [True, True, True, False]])
    del_.learn((2, 4), match, np.linspace(0.1, 0.8, 8).reshape(2, 4))
    at = 1
    assert del_.budget().exit == 4
    counts, sums = del_._counts.copy(), del_._sums.copy()
    confidence = (0.5, 0.25, 0.125, 0.75)
    del_.observe(outcome(4, accepted, confidence))
    refused = confidence[accepted : accepted + 1]
    counts[at] = 0.95 * counts[at] + [accepted, len(refused)]
    sums[at] = 0.95 * sums[at] + [sum(confidence[:accepted]), sum(refused)]
    assert np.allclose(del_._counts, counts) and np.allclose(del_._sums, sums)
    del_.observe(outcome(0, 0))
    assert np.allclose(del_._counts, counts)


def test_a_round_may_use_another_sequences_exit_layer():
    """The threshold, the expected tokens and the observed results are those of the exit layer that ran."""
    del_ = DynamicExit((2, 4), 6)
    match = np.array([[True, True, False, False], [True, True, True, False]])
    del_.learn((2, 4), match, np.array([[0.8, 0.8, 0.2, 0.2], [0.9, 0.9, 0.9, 0.5]]))
    mine = del_.budget()
    other, own = (Budget(18, 18, exit) for exit in (({2, 4} - {mine.exit}).pop(), mine.exit))
    thresholds, rates = {2: 0.5, 4: 0.7}, {2: 0.5, 4: 0.75}
    assert del_.threshold == pytest.approx(thresholds[mine.exit])
    longest = {n: int(del_.choice().table[i].argmax()) for i, n in enumerate((2, 4))}
    for budget in (own, other):
        want = sum(rates[budget.exit] ** i for i in range(longest[budget.exit] + 1))
        assert del_.means(budget).tokens == pytest.approx(want)
    del_.taken(own)
    assert del_.threshold == pytest.approx(thresholds[own.exit])
    del_.taken(other)
    assert del_.threshold == pytest.approx(thresholds[other.exit])
    before = del_._counts.copy()
    del_.observe(outcome(1, 1, (0.5,)))
    changed = (del_._counts != before).any(1).tolist()
    assert changed == [n == other.exit for n in (2, 4)]


def test_drafts_that_confidence_ends_are_expected_to_go_on_as_they_did():
    """Their tokens agree more often than others, so the match rate would promise longer drafts than there are."""
    known = AcceptanceHistory(Costs(lambda budget: 1.0))
    del_ = DynamicExit((2, 4), 6, earlier=known)
    del_.learn((2, 4), np.array([[True] * 8] * 2), np.full((2, 8), 0.9))
    shape = Budget(18, 18, 4)
    del_.taken(shape)
    assert del_.means(shape).tokens == 18 and del_.means(shape).drafted == 17, "nothing was drafted"
    for _ in range(60):
        del_.observe(outcome(3, 3, (0.9, 0.9, 0.2)))
        del_.observe(outcome(3, 2, (0.9, 0.9, 0.2)))
    assert del_.choice().rates[1] > 0.8
    assert 3.4 < del_.means(shape).tokens < 3.6 and 2.9 < del_.means(shape).drafted < 3.1
    later = DynamicExit((2, 4), 6, earlier=known)
    assert 3.4 < later.means(shape).tokens < 3.9 and 2.9 < later.means(shape).drafted < 3.4, "other texts start from it"
    assert later.means(Budget(2, 2, 4)).drafted == 2, "a shorter shape"
    assert later.means(Budget(18, 18, 2)).tokens == 18, "another layer's drafts"


def test_a_draft_ends_when_the_product_of_confidences_is_low():
    del_ = DynamicExit((2, 4), 6)
    del_.learn((2, 4), np.array([[True, False]] * 2), np.array([[0.9, 0.1]] * 2))
    for _ in range(2):  # a new round starts from 1
        assert del_.budget().depth == 18 and del_.threshold == pytest.approx(0.5)
        assert [del_.next_worth(c) >= 1 for c in (0.8, 0.7, 0.8)] == [True, True, False]


def test_not_drafting_must_win_by_a_tenth():
    """With exit 10 of 12 layers TPL(10, 1) = (1 + a) / 22, and 0.9 / 12 = 1.65 / 22."""
    for matches, depth in ((6, 0), (7, 1)):
        del_ = DynamicExit((10,), 12, by_length=True)
        del_.learn((10,), np.arange(10)[None] < matches, np.full((1, 10), 0.5))
        assert del_.budget().depth == depth


def test_a_draft_that_is_proposed_has_a_cost():
    """Also one that promises a little less than no draft: a trial of it must be paid for."""
    del_ = DynamicExit((10,), 12)
    del_.learn((10,), np.arange(10)[None] < 7, np.full((1, 10), 0.5))
    assert del_.choice().table[0].argmax() == 0 and del_.means(del_.budget()).drafted == 1


def test_prices_end_drafts_where_seconds_are_compared():
    """As policy auto's drafts do, by what this exit layer's drafts achieved; without prices the threshold ends them."""
    costs = Costs(lambda budget: budget.nodes * budget.exit / 12)
    for measured in (costs, None):
        del_ = DynamicExit((3, 6), 12, costs=measured)
        del_.learn((3, 6), np.array([[True, False]] * 2), np.array([[0.9, 0.1]] * 2))
        shape = Budget(18, 18, 6)
        for prices in ((0.4,) * 17, ()):
            del_.taken(shape, prices)
            least = 0.4 / AGREES if prices and measured else 0.5
            assert del_.rule.joint[0] == pytest.approx(least)


def test_the_first_round_drafts_one_token_with_the_first_layer():
    budget = DynamicExit((2, 4), 6).budget()
    assert (budget.exit, budget.depth, budget.extra) == (2, 1, (4,))


def test_a_round_that_drafts_nothing_may_watch_every_layer():
    del_ = DynamicExit((8, 10), 12)
    del_.learn((8, 10), np.zeros((2, 3), bool), np.full((2, 3), 0.5))
    assert (del_.budget().depth, del_.budget().extra) == (0, (8, 10))


def test_watching_is_kept_below_its_share(monkeypatch):
    now = [5.0]  # time before the first round does not count
    monkeypatch.setattr("specker.runtime.strategies.dynamic_exit.exit_policy.time.perf_counter", lambda: now[0])
    del_ = DynamicExit((1, 2), 3)
    del_.learn((1, 2), np.array([[True], [False]]), np.array([[0.5], [0.5]]), 0.0)
    shares = []
    for _ in range(1000):
        watching = bool(del_.budget().extra)
        now[0] += 0.010
        if watching:
            now[0] += 0.003
            del_.learn((1,), np.array([[True]]), np.array([[0.5]]), 0.003)
        shares.append(del_.earlier.watching / (now[0] - 5.0))
    assert shares[0] > 0 and shares[-1] > 0.0035, "it does watch"
    assert max(shares[100:]) <= 0.005, "the share includes the cost of the next watched round"


def test_observations_equal_the_layers_own_tokens(target, monkeypatch):
    """Against a fresh pass over the committed text; rows after the first mismatch are not observed."""
    from specker.kernels.sample_rows import sample_rows
    from specker.model.cache import KVCache
    from specker.model.decoder import Final, forward

    fast = engine(target)
    heard = []
    learn = DynamicExit.learn
    share = (len(PROMPTS[2]) - 1) / (2 * len(eligible_layers(6)))  # two rows
    monkeypatch.setattr("specker.runtime.strategies.dynamic_exit.early_exit.PROMPT_SHARE", share)
    monkeypatch.setattr(
        DynamicExit, "learn", lambda self, n, m, c, s=0.0: heard.append((n, m, c)) or learn(self, n, m, c, s)
    )
    layers = eligible_layers(6)
    rounds = []
    fast.trace = rounds.append
    got = fast.generate(PROMPTS[2], 30, temperature=0.7, seed=2)
    text = [*PROMPTS[2], *got.tokens]
    model = fast.model

    def said(first, count):
        """Per watched layer: matches with the target after text[first : first + count], and confidences."""
        cache = KVCache(model.config, 256, dtype=torch.float64, device="cpu", page_size=16)
        rows = cache.after([0], [len(text)])
        out = forward(model, cache, rows, model.embed_tokens(torch.tensor(text)), aux_layers=(*layers, 6))
        ids, sure = {}, {}
        for n, hidden in out.aux_hidden_states.items():
            logits = model.logits(Final(hidden))[first : first + count]
            positions = rows.positions[first : first + count]
            ids[n] = sample_rows(logits, 0.7, 0, 1.0, 2, positions)
            from specker.kernels.noise import gumbel

            z = logits / 0.7 + gumbel(2, positions, logits.shape[1])
            sure[n] = z.softmax(-1).amax(-1)
        match = torch.stack([ids[n] == ids[6] for n in layers])
        return match.numpy(), torch.stack([sure[n] for n in layers]).numpy()

    assert len(heard) == 1 + len(rounds), "the prompt, then every round"
    seeds = 2
    match, confidence = said(len(PROMPTS[2]) - 1 - seeds, seeds)
    assert heard[0][0] == layers
    assert (heard[0][1] == match).all() and np.allclose(heard[0][2], confidence)
    for (watched, match, confidence), row in zip(heard[1:], rounds, strict=True):
        count = len(row["path"])
        want, sure = said(row["position"] - 1, count)
        at = [i for i, n in enumerate(layers) if n in watched]
        assert match.shape == (len(at), count) and {*layers} - {*watched} <= {row["exit"]}
        assert (match == want[at]).all() and np.allclose(confidence, sure[at])
        if row["draft"]:  # the exit layer's own rows are the draft
            assert row["exit"] not in watched
            own, drafted = layers.index(row["exit"]), min(count, len(row["draft"]))
            assert want[own, :drafted].tolist() == [n < count - 1 for n in range(drafted)]
            assert np.allclose(row["confidence"][:drafted], sure[own, :drafted])


# --- the other rules


def test_plus_minus_one():
    p = PlusMinusOne(4, 4)
    seen = []
    for accepted in (4, 5, 2, 0, 0, 0, 0, 0):
        p.observe(outcome(p.budget().depth, accepted))
        seen.append(p.budget().depth)
    assert seen == [5, 6, 5, 4, 3, 2, 1, 1]
    p.observe(outcome(0, 0))
    assert p.budget().depth == 1


def test_draft_and_verify_moves_its_threshold_towards_the_goal():
    p = DraftAndVerify(18, 18)
    accepted, threshold = 0.9, 0.6
    for kept, drafted in ((3, 3), (1, 4), (4, 4), (0, 2)):
        p.observe(outcome(drafted, kept))
        accepted = 0.5 * accepted + 0.5 * kept / drafted
        threshold = 0.9 * threshold + 0.1 * (threshold + (0.01 if accepted <= 0.9 else -0.01))
        assert p.threshold == pytest.approx(threshold)
    assert p.next_worth(threshold + 1e-6) >= 1 > p.next_worth(threshold - 1e-6)


def test_fixed_learns_nothing():
    p = Fixed(3, 2, 5)
    p.observe(outcome(2, 0))
    p.learn((), None, None)
    assert (p.budget().nodes, p.budget().depth, p.budget().exit, p.next_worth(0.0)) == (3, 2, 5, math.inf)


@pytest.mark.parametrize("policy", [Fixed(4, 4), PlusMinusOne(4, 4), DraftAndVerify(4, 4)])
def test_expected_tokens_follow_what_was_accepted(policy):
    """1 + a + a^2 + ..; each accepted token and the first rejected one moves a by a tenth."""
    rate = 0.8
    assert policy.means(Budget(9, 2)).tokens == pytest.approx(1 + rate + rate**2)
    assert policy.means(Budget(0, 3)).tokens == 1
    for drafted, accepted in ((4, 4), (4, 1), (2, 0), (0, 0)):
        policy.observe(outcome(drafted, accepted))
        if drafted:
            seen = min(accepted + 1, drafted)
            rate += 0.1 * seen * (accepted / seen - rate)
        assert policy.means(Budget(1, 5)).tokens == pytest.approx(1 + rate)


def test_del_compares_measured_seconds(monkeypatch):
    """Rows that cost much in a verify pass end drafts; where no exit pays, rounds draft nothing and still watch."""
    monkeypatch.setattr(DynamicExit, "may_skip_drafting", True)
    costs = Costs(lambda budget: budget.nodes * budget.exit / 12)
    layers, match = (3, 6), np.array([[True] * 2 + [False] * 8, [True] * 9 + [False]])
    assumed = [(right + ASSUMED * math.sqrt(n / 12)) / (10 + ASSUMED) for n, right in zip(layers, (2, 9), strict=True)]
    for row in (0.0, 3.0):
        for n in (0, 17):
            costs.measured(1, Budget(n, n, 6), n, 0.5 * n, 1.0 + row * n)
        del_ = DynamicExit(layers, 12, costs=costs)
        del_.learn(layers, match, np.linspace(0.1, 0.9, 20).reshape(2, 10))
        want = [
            [sum(a**i for i in range(g + 1)) / costs.round(1, Budget(g, g, n)) for g in range(18)]
            for n, a in zip(layers, assumed, strict=True)
        ]
        assert del_.choice().table == pytest.approx(np.array(want))
        shape = Chooser(costs).choose([del_], [100])
        assert (shape.nodes, shape.exit) == ((18, 6) if row == 0 else (0, 3)) and shape.extra


def test_eligible_layers():
    assert eligible_layers(12) == (1, 2, 4, 5, 7, 8, 10, 11) and eligible_layers(3) == (1, 2)
    assert eligible_layers(12, 2.9) == (1, 2, 4, 5, 7, 8), "10 and 11 cost a pass or more"
    assert eligible_layers(12, 2.0) == (1, 2, 4, 5, 7, 8) and eligible_layers(12, 1.9)[-1] == 10
    assert eligible_layers(12, 50.0) == (1,)
    assert eligible_layers(1) == () and len(eligible_layers(80)) == 8 and eligible_layers(80)[-1] == 79


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policy": "lucky"}, "policy must be one of"),
        ({"exit_cost": "dollars"}, "exit_cost must be one of"),
        ({"exit_layer": 0, "policy": "fixed"}, "exit_layer must be at least 1"),
        ({"exit_layer": 2}, "del chooses the layer"),
        ({"tree": "2x2"}, "drafts a chain"),
        ({"strategy": "draft", "policy": "del"}, "policy='del' is for strategy del"),
        ({"strategy": "draft", "exit_layer": 2}, "exit_layer is for strategy del"),
        ({"strategy": "draft", "tree": "2x2", "policy": "plus-minus-one"}, "is for chains"),
        ({"strategy": "ar", "policy": "fixed"}, "'ar' drafts nothing"),
        ({"strategy": "del+draft"}, "do not compose"),
    ],
)
def test_refuses(options, words):
    with pytest.raises(ValueError, match=words):
        strategies.options(**{"strategy": "del", **options})


def test_refuses_what_the_target_lacks(target, tmp_path):
    with pytest.raises(ValueError, match="exit_layer must be below the target's 6 layers"):
        engine(target, policy="fixed", exit_layer=6)
    with pytest.raises(ValueError, match="uses no draft checkpoint"):
        specker.load(target, target, strategy="del")
    with pytest.raises(ValueError, match="at least 2 layers"):
        specker.load(make(tmp_path / "one", layers=1), strategy="del")


def test_trace_and_histograms_from_the_command_line(target, tmp_path, capsys):
    make(tmp_path / "t", layers=4, tokenizer=True)
    trace, out = tmp_path / "trace.jsonl", tmp_path / "o.json"
    argv = ["--target", str(tmp_path / "t"), "--strategy", "del", "--prompt", "abc", "--device", "cpu"]
    argv += ["--policy", "fixed", "--exit-layer", "2"]  # a policy that chooses may draft nothing here
    assert run.main([*argv, "--max-new-tokens", "30", "--check", "--trace", str(trace), "--json", str(out)]) == 0
    rows = [row for row in map(json.loads, trace.read_text().splitlines()) if "path" in row]
    told = json.loads(out.read_text())["total"]
    assert len(rows) == told["rounds"] and sum(len(r["draft"]) for r in rows) == told["drafted"]
    assert [t for r in rows for t in r["tokens"]][: len(told["tokens"])] == told["tokens"]
    assert sum(told["lengths"].values()) == told["rounds"]
    assert sum(told["exits"].values()) == told["rounds"] - told["lengths"].get("0", 0)  # no draft, no exit
    for r in rows:
        assert len(r["target"]) == len(r["draft"]) + 1 == len(r["parents"]) + 1 and r["prompt"] == 0
        assert math.isclose(len(r["confidence"]), len(r["draft"])) or not r["confidence"]


def test_an_untrained_exit_gives_a_warning(target, capsys, tmp_path):
    make(tmp_path / "t", layers=8, tokenizer=True)
    argv = ["--target", str(tmp_path / "t"), "--strategy", "del", "--policy", "fixed", "--exit-layer", "7"]
    assert run.main([*argv, "--prompt", "abc", "--device", "cpu", "--max-new-tokens", "20"]) == 0
    assert "plain decoding is probably faster here" in " ".join(capsys.readouterr().err.split())


def test_a_draft_ends_at_the_same_token_however_often_the_policy_was_asked():
    """Ranks that rest ask their policies at different times; rank 0's shape goes to all."""
    often, seldom = (DynamicExit((1, 3, 5), 6) for _ in range(2))
    rng = np.random.default_rng(0)
    for n in range(40):
        shape = often.budget()
        if n % 7 == 0:
            seldom.budget()
        rules = []
        for policy in (often, seldom):
            policy.taken(shape)
            rules.append(policy.rule)
        assert rules[0] == rules[1]
        drafted, right = 4, int(rng.integers(0, 5))
        for policy in (often, seldom):
            policy.observe(outcome(drafted, right, tuple(0.9 - 0.1 * i for i in range(drafted))))
    assert often.rule.joint, "the confidence of both kinds was seen"
