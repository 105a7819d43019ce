"""Biases, penalties and min_p: with every strategy, tree and batch the tokens of plain decoding, which are
transformers'."""

import pytest
import torch

import specker
from specker.options import Params, Sampling
from specker.runtime import check

PROMPTS = ["def fibonacci(n):", "class Stack:\n    def push(self", "import os\nimport sys\n"]
TOKENS = 18
EACH = {  # a value for each prompt: requests of one batch differ
    "greedy": {
        "repetition_penalty": [1.3, 1.0, 0.8],
        "presence_penalty": [0.0, 1.5, 0.0],
        "frequency_penalty": [0.0, -0.5, 0.0],
    },
    "sampled": {
        "temperature": [0.7, 0.7, 0.0],
        "seed": [3, 4, 5],
        "min_p": [0.2, 0.0, 0.0],
        "top_p": [1.0, 0.9, 1.0],
        "frequency_penalty": [0.0, 0.6, 0.0],
        "logit_bias": {198: -3, 10: 2.5},
    },
}
HOW = {
    "a tree": {"strategy": "draft", "tree": "3x4"},
    "a fixed join": {"strategy": "vocabtrim+lookup", "graphs": "on"},
}


@pytest.mark.parametrize("how", HOW)
def test_every_strategy_has_the_tokens_of_plain_decoding(how):
    engine = specker.load(device="cpu", **{"batch_size": 2, **HOW[how]})
    plain = [out.tokens for out in engine.generate(PROMPTS, TOKENS)]
    for options in EACH.values():
        got, want = engine.generate(PROMPTS, TOKENS, **options), engine.generate_ar(PROMPTS, TOKENS, **options)
        assert [out.tokens for out in got] == [out.tokens for out in want]
        assert any(a.tokens != b for a, b in zip(got, plain, strict=True))
    assert sum(out.stats.accepted for out in got) > 0


@pytest.mark.parametrize("penalty", [1.4, 0.7])
def test_transformers_has_the_same_tokens(pair, penalty):
    from transformers import AutoModelForCausalLM

    engine = specker.load(pair[0], strategy="ar", dtype="float64", device="cpu")
    ids = engine.encode("ab cd ab")
    oracle = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float64)
    out = oracle.generate(
        torch.tensor([ids]), max_new_tokens=30, do_sample=False, repetition_penalty=penalty, eos_token_id=None
    )
    got = engine.generate(ids, 30, repetition_penalty=penalty, ignore_eos=True)
    assert got.tokens == out[0, len(ids) :].tolist() != engine.generate(ids, 30, ignore_eos=True).tokens


def test_the_formula_token_by_token(pair):
    """Presence and frequency count the tokens after the prompt alone."""
    from transformers import AutoModelForCausalLM

    engine = specker.load(*pair, strategy="draft", draft_tokens=3, dtype="float64", device="cpu")
    oracle = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float64)
    text = ids = engine.encode("ab cd ab")
    for _ in range(20):
        with torch.no_grad():
            z = oracle(torch.tensor([text])).logits[0, -1]
        z[97] += 2.0
        for token in {*text}:
            z[token] = z[token] / 1.25 if z[token] > 0 else z[token] * 1.25
        for token in {*text[len(ids) :]}:
            z[token] -= 0.5 + 0.25 * text[len(ids) :].count(token)
        text = [*text, int(z.argmax())]
    how = {"repetition_penalty": 1.25, "presence_penalty": 0.5, "frequency_penalty": 0.25, "logit_bias": {97: 2}}
    assert engine.generate(ids, 20, ignore_eos=True, **how).tokens == text[len(ids) :]


def test_a_slot_forgets_the_biases_of_its_last_request():
    engine = specker.load(device="cpu", draft_tokens=3, batch_size=2)
    want = engine.generate(PROMPTS[0], 12).tokens
    engine.generate(PROMPTS[0], 2, logit_bias=dict.fromkeys(want, -100))
    mixed = [Sampling(), Sampling(logit_bias=((5, 1.0),))]
    requests = [engine.session.request(PROMPTS[0], Params(12, s)) for s in mixed]
    with engine.session.stream(requests) as events:
        assert sum(1 for _ in events)
    assert requests[0].tokens == want


def test_a_bias_forbids_and_forces():
    engine = specker.load(device="cpu", draft_tokens=3)
    first = engine.generate(PROMPTS[0], 8)
    banned = engine.generate(PROMPTS[0], 8, logit_bias=dict.fromkeys(first.tokens, -100))
    assert not {*banned.tokens} & {*first.tokens}
    forced = engine.generate(PROMPTS[0], 8, logit_bias=[(first.tokens[0], 100)])
    assert forced.tokens == first.tokens[:1] * 8


def test_a_grammar_and_penalties_together():
    pytest.importorskip("llguidance")
    engine = specker.load(device="cpu", draft_tokens=3)
    how = {"grammar": "start: /[0-9]{12}/", "presence_penalty": 2.0, "frequency_penalty": 2.0}
    out = engine.generate(PROMPTS[0], 20, **how)
    assert out.text.isdigit() and out.tokens == engine.generate_ar(PROMPTS[0], 20, **how).tokens
    assert out.text != engine.generate(PROMPTS[0], 20, grammar=how["grammar"]).text


def test_log_probabilities_are_the_models_own():
    engine = specker.load(device="cpu", draft_tokens=3)
    first = engine.generate(PROMPTS[0], 1, logprobs=5).logprobs[0]
    other = engine.generate(PROMPTS[0], 1, logprobs=5, logit_bias={first.token: -100}).logprobs[0]
    assert other.token != first.token and other.best == first.best


def test_the_check_compares_logits_after_penalties(pair):
    engine = specker.load(*pair, strategy="draft", dtype="float64", device="cpu", draft_tokens=3)
    ids = engine.encode("ab cd ab")
    text = engine.generate_ar(ids, 6, logprobs=2).tokens
    said, unsaid = text[2], next(token for token in range(200) if token not in text + ids)

    def apart(**how):
        with engine.alone():
            return check.gap(engine.loop, ids + text, len(ids), said, unsaid, Sampling(**how))[0]

    sign = 1 if apart(logit_bias=((said, 1e-3),)) > apart() else -1  # of the distance of the two logits
    assert apart(presence_penalty=0.5, frequency_penalty=0.25) == pytest.approx(
        abs(apart() - sign * (0.5 + 0.25 * text.count(said)))
    )
    assert apart(repetition_penalty=1.5) != apart() == apart(logit_bias=((unsaid, 0.0),))
    result = engine.check(ids, engine.generate(ids, 6, presence_penalty=2.0), 6, presence_penalty=2.0)
    assert result.identical


def test_a_request_chooses_its_policy():
    engine = specker.load(device="cpu", draft_tokens=4, batch_size=2)
    outs = {policy: engine.generate(PROMPTS, TOKENS, policy=policy) for policy in (None, "off", "fixed")}
    assert len({tuple(out.tokens) for out in outs["off"]} | {tuple(out.tokens) for out in outs[None]}) == 3
    assert sum(out.stats.drafted for out in outs["off"]) == 0 < sum(out.stats.drafted for out in outs["fixed"])
    mixed = engine.generate(PROMPTS, TOKENS, policy=["off", None, "off"])
    assert [out.tokens for out in mixed] == [out.tokens for out in outs["off"]]
    assert [out.stats.drafted > 0 for out in mixed] == [False, True, False]
    for name, message in (
        ("slow", "policy must be one of"),
        ("adl", "policy='adl' is for strategy"),
        ("plus-minus-one", "policy='plus-minus-one' drafts up to 17 tokens, and the engine was loaded for 16 at most"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.generate(PROMPTS[0], 2, policy=name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_p": -0.1}, r"min_p must be in \[0, 1\], got -0.1"),
        ({"repetition_penalty": 0}, r"repetition_penalty must be in \[0.01, 100\], got 0"),
        ({"presence_penalty": float("nan")}, "presence_penalty must be between -2 and 2, got nan"),
        ({"frequency_penalty": 2.5}, "frequency_penalty must be between -2 and 2, got 2.5"),
        ({"logit_bias": {5: float("inf")}}, "logit_bias must give ids, each once, values between -100 and 100"),
        ({"logit_bias": [(5, 1), (5, 2)]}, "logit_bias must give ids, each once"),
        ({"logit_bias": 7}, "logit_bias must give ids, each once"),
        ({"logit_bias": dict.fromkeys(range(301), 1)}, "logit_bias takes at most 300 ids, got 301"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
        ({"ignore_eos": True, "grammar": "start: /a/"}, "ignore_eos and a grammar exclude each other"),
        ({"policy": 3}, "policy must be a string, got 3"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        Params.of(**options)
