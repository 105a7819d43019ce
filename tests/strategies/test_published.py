"""`as_published`: each strategy's settings are its paper's, every round drafts, nothing is learnt, and the tokens are
those of plain decoding. What the papers ablate changes the drafts."""

import functools
from contextlib import nullcontext

import caches
import cases
import pytest
from make_checkpoint import make
from pairs import perturbed

import specker
from specker import zoo
from specker.cli import run
from specker.options import Tree, VocabKeep
from specker.runtime import strategies
from specker.runtime.control.policy import StopRule
from specker.runtime.recipe import resolve
from specker.runtime.strategies.dynamic_exit.exit_policy import DynamicExit

PROMPT = "def fibonacci(n):"
DRAFT = {"policy": "fixed", "draft_tokens": 4, "tree": None, "draft_quantize": "stored"}
TRIM = {"vocab_keep": VocabKeep(fraction=0.25), "vocab_text": 0}
DEL = {"policy": "del", "eligible_layers": "all", "exit_cost": "layers", "exit_window": 0.95, "exit_rules": "paper"}
SETTINGS = {
    "draft": DRAFT,
    "vocabtrim": DRAFT | TRIM,
    "easyspec": {"policy": "fixed", "tree": Tree(12, 5), "draft_tokens": None, "layer_parallel": 4}
    | {"calibrate": "every", "draft_quantize": "stored"},
    "del": DEL,
    "del+vocabtrim": DEL | TRIM,
    "diffuspec": {"policy": "adl", "adl": (20, 30), "adl_step": 10, "adl_rho": 0.5, "cps": "chain", "cps_tau": 0.8}
    | {"cps_candidates": 15, "cps_beam": 3, "cps_lambda": 0.5, "cps_first": "both", "draft_quantize": "stored"},
}
PAPERS = ("draft", "vocabtrim", "easyspec", "del", "diffuspec")


def settings(options):
    own = [part for source in options.sources for part in (source.options, source.trim) if part is not None]
    return {name: value for part in (options, *own) for name, value in vars(part).items()}


def load(strategy, **options):
    return specker.load(strategy=strategy, **{"as_published": True, "device": "cpu", "dtype": "float32", **options})


def drafts(engine, count=32, **how):
    """What is drafted for a text: its stats, and the tokens of each round."""
    rows = []
    engine.trace = rows.append
    stats = engine.generate(PROMPT, count, temperature=0.7, seed=3, prefix_cache="off", **how).stats
    engine.trace = None
    return stats, [row["draft"] for row in rows]


@pytest.mark.parametrize("strategy", SETTINGS)
def test_the_settings_are_those_of_the_paper(strategy):
    made = strategies.options(strategy=strategy, as_published=True)
    assert {name: settings(made)[name] for name in SETTINGS[strategy]} == SETTINGS[strategy]
    assert not made.departures and not made.adapts


def test_what_a_user_gives_replaces_the_papers_value():
    made = strategies.options(strategy="diffuspec", as_published=True, cps_tau=0.9, ngram="n")
    assert (made.own.cps_tau, made.own.cps_beam, made.own.adl) == (0.9, 3, (20, 30))
    assert made.departures == (("cps_tau", 0.9),)
    neither = strategies.options(strategy="diffuspec", as_published=True, cps="off", draft_tokens=20)
    assert (neither.own.search, neither.own.adl, neither.policy) == ("off", None, "fixed")
    assert strategies.options(strategy="diffuspec", as_published=True, cps="tree").own.cps_lambda == 0.5
    chain = strategies.options(strategy="easyspec", as_published=True, draft_tokens=5)
    assert (chain.tree, chain.own.layer_parallel, chain.departures) == (None, 4, (("draft_tokens", 5),))
    fixed = strategies.options(strategy="del", as_published=True, policy="fixed", exit_layer=8, draft_tokens=4)
    assert fixed.own.eligible_layers is None and dict(fixed.departures) == {"policy": "fixed", "draft_tokens": 4}
    assert not strategies.options(strategy="easyspec", as_published=True, layer_parallel="4").departures


@pytest.mark.parametrize(("strategy", "temperature"), cases.one_in(2, PAPERS, [0.0, 0.7]))
def test_the_tokens_are_those_of_plain_decoding_and_no_round_rests(strategy, temperature, steady, monkeypatch):
    monkeypatch.setattr("specker.runtime.engine.draft_cost", lambda budget, *_: 100.0 * budget.depth)
    engine = load(strategy, dtype="float64")
    prompt = engine.encode(PROMPT)
    out = engine.generate(prompt, 32, temperature=temperature)
    assert out.tokens == cases.plain(zoo.path("code-target"), prompt, 32, temperature=temperature)
    assert not out.stats.rests and out.stats.accepted > 0
    if strategy != "del":  # whose best length may be 0
        assert sum(out.stats.lengths.values()) - out.stats.lengths.get(0, 0) >= out.stats.rounds - 1


def test_without_it_the_same_strategy_rests(steady, monkeypatch):
    monkeypatch.setattr("specker.runtime.engine.draft_cost", lambda budget, *_: 100.0 * budget.depth)
    for strategy in ("draft", "easyspec", "del", "diffuspec"):
        assert load(strategy, as_published=False).generate(PROMPT, 24).stats.rests["slower"] > 10


@pytest.mark.parametrize("strategy", PAPERS)
def test_a_text_is_drafted_for_as_if_it_were_the_first(strategy):
    engine = load(strategy)
    first, drafted = drafts(engine)
    engine.generate("class Node:", 24, temperature=1.0)
    again, same = drafts(engine)
    assert same == drafted and again.exits == first.exits and again.lengths == first.lengths


def test_no_counts_of_earlier_runs_rank_the_rows(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECKER_CACHE", str(caches.empty(tmp_path / "cache")))
    monkeypatch.setenv("SPECKER_VOCAB_LEARN", "on")
    target = make(tmp_path / "target", layers=2, max_context=256, tokenizer=True)
    pair = target, perturbed(target, tmp_path / "draft")
    how = {"strategy": "vocabtrim", "device": "cpu", "dtype": "float64"}
    learns = specker.load(*pair, **how)
    learns.generate([1], 40, temperature=1.0)
    learns.trimmed_head.counts.save()
    assert "earlier runs" in specker.load(*pair, **how).trimmed_head.ranking
    head = specker.load(*pair, **how, as_published=True).trimmed_head
    assert head.ranking == "the tokenizer's order" and head.counts is None and head.text == 0


def test_drafts_are_as_stored():
    assert [load(name, dtype=None).draft.quantised for name in ("draft", "easyspec", "diffuspec")] == [None] * 3
    assert specker.load(strategy="draft", device="cpu", draft_quantize="stored").draft.quantised is None


# --- what papers ablate

ABLATED = {  # option -> the strategy, the options of both runs, and two values
    "calibrate never": ("easyspec", {"draft_tokens": 5}, {"calibrate": "never"}),
    "calibrate mismatch": ("easyspec", {"draft_tokens": 5}, {"calibrate": "mismatch"}),
    "width": ("easyspec", {"draft_tokens": 5}, {"layer_parallel": 10}),
    "tree": ("easyspec", {}, {"tree": "4x5"}),
    "eligible layers": ("del", {}, {"eligible_layers": "2,6"}),
    "window": ("del", {}, {"exit_window": 0.2}),
    "threshold": ("del", {}, {"policy": "del-length"}),
    "cost": ("del", {}, {"exit_cost": "bytes"}),
    "rules": ("del", {}, {"exit_rules": "specker"}),
    "tau": ("diffuspec", {}, {"cps_tau": 0.99}),
    "candidates": ("diffuspec", {}, {"cps_candidates": 3}),
    "beam": ("diffuspec", {}, {"cps_beam": 1}),
    "lambda": ("diffuspec", {}, {"cps_lambda": 1.0}),
    "first": ("diffuspec", {}, {"cps_first": "drafter"}),
    "no search": ("diffuspec", {}, {"cps": "off"}),
    "blocks": ("diffuspec", {}, {"adl": "4-8"}),
    "rows": ("vocabtrim", {}, {"vocab_keep": 64}),
    "text rows": ("vocabtrim", {"vocab_keep": 64}, {"vocab_text": 64}),
}


@functools.cache
def as_published(strategy, tokens):
    return drafts(load(strategy, **dict(tokens)))


@pytest.mark.parametrize("name", ABLATED)
def test_what_papers_ablate_changes_the_drafts(name):
    strategy, both, other = ABLATED[name]
    (usual, before), (changed, after) = (
        as_published(strategy, (*both.items(),)),
        drafts(load(strategy, **both, **other)),
    )
    assert before != after
    if name == "eligible layers":
        assert set(changed.exits) <= {2, 6} and not set(usual.exits) <= {2, 6}
    if name in ("tau", "candidates"):
        widths = usual.diffusion["lattice_width"], changed.diffusion["lattice_width"]
        assert (widths[0] < widths[1]) == (name == "tau")
    if name == "blocks":
        assert max(changed.lengths) <= 8 < max(usual.lengths)


def test_del_watches_all_layers_and_ends_a_draft_by_its_last_confidence(monkeypatch):
    """32 rows of a prompt seed the statistics, however short it is."""
    engine, policies, seen = load("del"), [], []
    learn = DynamicExit.learn

    def learnt(self, layers, match, *more):
        seen.append(match.shape)
        policies.append(self)
        learn(self, layers, match, *more)

    monkeypatch.setattr(DynamicExit, "learn", learnt)
    engine.generate([*range(3, 43)], 12, temperature=0.7)
    assert seen[0] == (11, 32) and len(seen) > 3 and {shape[0] for shape in seen[1:]} <= {10, 11}
    policy = policies[-1]
    budget = policy.budget()
    assert {budget.exit, *budget.extra} == {*range(1, 12)} and budget.depth in (0, 18)
    policy.threshold = 0.4
    assert policy.rule == StopRule(token=0.4)


def test_the_constants_of_adaptive_lengths():
    """tests/strategies/test_diffuspec.py has their formula."""
    policy = load("diffuspec", adl="2-30", adl_step=1, adl_rho=0.2).policy()
    assert (policy.shortest, policy.longest, policy.step, policy.rho) == (2, 30, 1, 0.2)


def test_calibration_on_mismatch_keeps_what_a_whole_draft_wrote(monkeypatch):
    """The committed tokens that the next draft forwards: one after a kept round, all of its tokens after another."""
    forwarded = []
    engine = load("easyspec", draft_tokens=3, calibrate="mismatch")
    missing = type(engine.drafter).missing_rows

    def counted(self, texts, *more, **how):
        forwarded.append(len(texts[0]) - self.cache.exact_len[0])
        return missing(self, texts, *more, **how)

    monkeypatch.setattr(type(engine.drafter), "missing_rows", counted)
    rows = []
    engine.trace = rows.append
    engine.generate(PROMPT, 40)
    accepted = [len(row["path"]) - 1 for row in rows if row["draft"]]
    assert {3, 0} <= set(accepted)
    for count, behind in zip(accepted, forwarded[1:], strict=False):
        assert behind == (2 if count == 3 else count + 1), "the last draft token was never forwarded"


# --- refusals


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"strategy": "lookup", "as_published": True}, "as_published is for strategy vocabtrim, and for draft, "),
        ({"strategy": "ar", "as_published": True}, "alone or with +vocabtrim, not 'ar'"),
        ({"strategy": "draft+lookup", "as_published": True}, "not 'draft+lookup'"),
        ({"strategy": "draft", "as_published": True, "policy": "auto"}, "rests and learns: leave out as_published"),
        ({"strategy": "easyspec", "layer_parallel": 99}, "layer_parallel=99 is wider than the 10 inner layers of"),
        ({"strategy": "easyspec", "draft": "code-draft"}, "a draft of 2 layers has none to run side by side"),
        ({"strategy": "vocabtrim", "vocab_keep": 100000}, "vocab_keep=100000 is more than the 8192 rows of"),
        ({"strategy": "del+vocabtrim", "vocab_keep": 8193}, "vocab_keep=8193 is more than the 8192 rows of"),
        ({"strategy": "del", "eligible_layers": "2,12"}, "eligible_layers must be below the target's 12 layers"),
        ({"strategy": "del", "eligible_layers": "4,2"}, "eligible_layers must be all, or ascending layers such as"),
        ({"strategy": "del", "eligible_layers": "0,2"}, "eligible_layers must be all, or ascending layers such as"),
        ({"strategy": "del", "eligible_layers": "all", "policy": "fixed"}, "is for policy='del, del-length'"),
        ({"strategy": "del", "draft_tokens": 4}, "draft_tokens is for policy='fixed, plus-minus-one"),
        ({"strategy": "del", "exit_window": 1.1}, "exit_window must be between 0 and 1, got 1.1"),
        ({"strategy": "diffuspec", "cps_beam": 16}, "cps_beam=16 is wider than the candidates of a position, "),
        ({"strategy": "diffuspec", "cps_candidates": 65}, "cps_candidates must be between 1 and 64, got 65"),
        ({"strategy": "diffuspec", "cps": "tree", "cps_beam": 2}, "the search for a tree has no beam"),
        ({"strategy": "diffuspec", "cps": "off", "cps_tau": 0.9}, "cps='off' disables the search: leave out cps_tau"),
        ({"strategy": "diffuspec", "draft_tokens": 4, "adl_rho": 0.1}, "adl_rho is for policy='adl'"),
        ({"strategy": "draft", "cps_tau": 0.9}, "cps_tau is for strategy dflash or diffuspec, not 'draft'"),
    ],
)
def test_what_cannot_be_met_is_refused(options, said):
    draft = options.pop("draft", None)
    with pytest.raises(ValueError) as caught:
        specker.load("code-target", draft, device="cpu", **options)
    assert said in str(caught.value)


def test_ranks_that_share_a_group_must_calibrate(monkeypatch):
    monkeypatch.setattr("specker.runtime.strategies.easyspec.world_size", lambda: 2)
    for how, refused in (({}, True), ({"draft_ranks": 1}, False), ({"dp": 2}, False)):
        options = strategies.options(strategy="easyspec", calibrate="mismatch", **how)
        with pytest.raises(ValueError, match="calibrate='mismatch' needs draft_ranks=1") if refused else nullcontext():
            resolve(options, device="cpu")


def test_a_search_without_an_ngram_model_has_no_lambda(tmp_path):
    target = make(tmp_path / "target", "qwen2", layers=2)
    how = {"strategy": "diffuspec", "device": "cpu", "as_published": True}
    with pytest.raises(ValueError, match=r"cps_lambda=0\.5 weighs an n-gram model, and this target has none"):
        specker.load(target, make(tmp_path / "draft", "dream", layers=2), **how)
    specker.load(target, tmp_path / "draft", cps="off", **how)


def test_a_run_names_its_settings_files_and_draft(capsys):
    def said(*argv):
        assert run.main(["--prompt", PROMPT, "--max-new-tokens", "8", "--device", "cpu", *argv]) == 0
        return "".join(capsys.readouterr().err.split("\n"))

    out = said("--strategy", "diffuspec", "--as-published", "--cps-tau", "0.9")
    assert "settings as published: DiffuSpec (2510.02358); but --cps-tau 0.9" in out
    assert "searched with the n-gram model ngram.safetensors" in out
    out = said("--strategy", "easyspec")
    assert "code-draft-deep drafts, because the small model of strategy draft has no layers to run" in out
    assert "strategy draft takes the same with --draft code-draft-deep" in out
    assert "drafts, because" not in said("--strategy", "draft", "--draft", "code-draft-deep")
    assert "vocab_scores.safetensors" in said("--strategy", "vocabtrim", "--as-published")
