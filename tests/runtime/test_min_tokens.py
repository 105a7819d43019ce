"""`min_tokens`: a text does not end before so many tokens, with the same tokens whatever drafts. The reference is plain
decoding with biases against the stop ids for the first tokens, and without them for the rest."""

import json

import cases
import pytest
from make_checkpoint import make
from pairs import perturbed

import specker
from specker.cli import run
from specker.options import Params
from specker.runtime.detokenize import Detokenizer

PROMPTS = [[60, 5, 9, 40, 77, 8], [3, 50, 20, 31, 8, 8], [1, 2, 3]]
LEAST, MOST = [5, 0, 11], 26
SAMPLED = {"greedy": {}, "sampled": {"temperature": 0.7, "seed": 5}, "filtered": {"temperature": 0.9, "top_k": 20}}
HOW = {
    "a chain": {"strategy": "draft", "draft_tokens": 4},
    "a tree": {"strategy": "draft", "tree": "3x4"},
    "fixed rounds": {"strategy": "draft", "draft_tokens": 4, "graphs": "on"},
    "unequal drafts": {"strategy": "lookup", "draft_tokens": 4},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    target = make(tmp_path_factory.mktemp("target"), layers=2, tokenizer=True)
    return target, perturbed(target, tmp_path_factory.mktemp("draft"), amount=0.05)


def load(pair, strategy="draft", **options):
    return specker.load(*pair[: 1 + ("draft" in strategy)], strategy=strategy, dtype="float64", device="cpu", **options)


@pytest.fixture(scope="module")
def references(pair):
    return {name: reference(pair[0], **sampling) for name, sampling in SAMPLED.items()}


def reference(target, **sampling):
    """(stop ids, the texts of PROMPTS): the stop ids end each text at once unless `min_tokens` says otherwise."""
    stops = sorted({token for prompt in PROMPTS for token in cases.plain(target, prompt, 3, **sampling)})
    bias, texts = tuple((token, -100.0) for token in stops), []
    for prompt, least in zip(PROMPTS, LEAST, strict=True):
        tokens = cases.plain(target, prompt, least, logit_bias=bias, **sampling) if least else []
        rest = cases.plain(target, prompt + tokens, MOST - least, **sampling)
        end = next((n for n, token in enumerate(rest) if token in stops), len(rest))
        texts.append(tokens + rest[: end + 1])
    return stops, texts


@pytest.mark.parametrize(("how", "sampling"), cases.one_in(2, HOW, SAMPLED))
def test_every_draft_has_the_tokens_of_the_reference(pair, references, how, sampling):
    stops, want = references[sampling]
    engine, asked = load(pair, batch_size=2, **HOW[how]), {"stop_ids": stops, "ignore_eos": True, **SAMPLED[sampling]}
    predicted = {"prediction": [None, None, want[2]]} if "lookup" in engine.strategy else {}
    out = engine.generate(PROMPTS, MOST, min_tokens=LEAST, **predicted, **asked)
    assert [o.tokens for o in out] == want
    assert [o.tokens for o in engine.generate_ar(PROMPTS, MOST, min_tokens=LEAST, **asked)] == want
    assert sum(o.stats.accepted for o in out) > 0
    assert [len(o.tokens) for o in engine.generate(PROMPTS, MOST, **asked)] == [1] * 3
    assert len(want[1]) == 1 and LEAST[0] < len(want[0]) and LEAST[2] < len(want[2])


def test_penalties_see_the_stop_ids_as_gone(pair):
    """min_p measures from the most probable token that is left. Log-probabilities are the model's own."""
    [first] = cases.plain(pair[0], PROMPTS[0], 1)
    how = {"temperature": 0.8, "seed": 3, "min_p": 0.4, "presence_penalty": 0.3}
    engine = load(pair, draft_tokens=4)
    want = engine.generate_ar(PROMPTS[0], 8, logit_bias={first: -100}, logprobs=3, ignore_eos=True, **how)
    out = engine.generate(PROMPTS[0], 8, min_tokens=8, stop_ids=[first], logprobs=3, ignore_eos=True, **how)
    assert out.tokens == want.tokens
    best = [[token for token, _ in x.best] for x in out.logprobs]
    assert best == [[token for token, _ in x.best] for x in want.logprobs] and best[0][0] == first


def test_a_text_without_stop_ids_loses_no_token(pair):
    """Also beside one that has them."""
    engine, want = load(pair, batch_size=2), [cases.plain(pair[0], prompt, 12) for prompt in PROMPTS[:2]]
    out = engine.generate(PROMPTS[:2], 12, min_tokens=[12, 12], ignore_eos=True)
    assert [o.tokens for o in out] == want
    biased = {"logit_bias": {0: 100}, "ignore_eos": True}
    for stops in ([], [5]):
        assert engine.generate(PROMPTS[0], 12, min_tokens=12, stop_ids=stops, **biased).tokens == [0] * 12


def test_a_grammar_that_leaves_nothing_else_ends_the_text():
    pytest.importorskip("llguidance")
    engine = specker.load(device="cpu", draft_tokens=3)
    word = engine.generate("a = ", 20, grammar='start: "yes"', min_tokens=20)
    assert (word.text, word.finished) == ("yes", "stop")
    ids = engine.encode("yes")
    word = engine.generate("a = ", 20, grammar='start: "yes"', min_tokens=20, stop_ids=ids)
    assert (word.tokens, word.finished) == (ids[:1], "stop")
    asked = {"grammar": "start: /[0-9]{1,12}/", "logit_bias": dict.fromkeys(engine.target.config.eos_ids, 100)}
    for least, count in ((0, 2), (4, 5), (20, None)):
        out, ar = (decode("a = ", 20, min_tokens=least, **asked) for decode in (engine.generate, engine.generate_ar))
        assert out.text.isdigit() and out.tokens == ar.tokens and out.finished == "stop"
        assert len(out.tokens) == count if count else len(out.text) == 12


@pytest.mark.parametrize(
    ("least", "pieces", "rest"),
    [
        (0, ["a", ""], ""),
        (1, ["a", ""], ""),
        (2, ["a", "b", "c", ""], ""),  # "b" ends the second token
        (4, ["a", "b", "c", "b", "d"], ""),
    ],
)
def test_stop_strings_count_after_the_first_tokens(pair, least, pieces, rest):
    engine = load(pair)
    reader, found = engine.session.reader([], ("b",), least), []
    for token in engine.encode("abcbd"):
        found.append(reader.add(token))
        if reader.stopped:
            break
    assert (found, reader.flush()) == (pieces, rest)


def test_a_stop_string_may_begin_within_them(pair):
    """It ends the text if it ends behind them."""
    tokens = load(pair).target.tokens
    ids = load(pair).encode("abcd")
    assert Detokenizer(tokens, (), ("bc",), None, 2).all(ids) == "a"
    assert Detokenizer(tokens, (), ("bc",), None, 3).all(ids) == "abcd"


def test_the_engine_passes_them_on(pair):
    engine = load(pair, draft_tokens=4)
    text = engine.generate("ab", 24).text
    stop = text[:2]
    assert text.count(stop) == 1 and engine.generate("ab", 24, stop=stop).text == ""
    assert engine.generate("ab", 24, stop=stop, min_tokens=12).text == text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"min_tokens": -1}, "min_tokens must be a whole number of at least 0, got -1"),
        ({"min_tokens": 1.5}, "min_tokens must be a whole number of at least 0, got 1.5"),
        ({"min_tokens": 9, "max_new_tokens": 8}, "min_tokens must be at most max_new_tokens, 8; got 9"),
    ],
)
def test_refusals(options, said):
    with pytest.raises(ValueError, match=said):
        Params.of(**options)


def test_too_many_stop_ids_are_refused(pair):
    with pytest.raises(ValueError, match="min_tokens is for at most 64 stop ids, got "):
        load(pair).generate([1], 4, min_tokens=2, stop_ids=[*range(2, 67)])


def test_the_command(pair, capsys):
    flags = ["--target", str(pair[0]), "--dtype", "float64", "--device", "cpu", "ab", "--json", "-"]
    assert run.main([*flags, "--max-new-tokens", "12"]) == 0
    first = json.loads(capsys.readouterr().out)["prompts"][0]["tokens"][0]
    argv = [*flags, "--check", "--stop-ids", str(first), "--max-new-tokens", "12"]
    assert run.main([*argv, "--min-tokens", "7"]) == 0
    [result] = json.loads(capsys.readouterr().out)["prompts"]
    assert len(result["tokens"]) > 7 and first not in result["tokens"][:7] and result["identical"]
    assert run.main([*argv, "--min-tokens", "13"]) == 2
    assert "--min-tokens must be at most --max-new-tokens, 12; got 13" in capsys.readouterr().err
