"""Texts that match a grammar: equal to plain decoding under the same grammar, whatever drafts and shares the batch."""

import json
import re
import sys
from types import SimpleNamespace

import cases
import numpy as np
import pytest

import specker
from specker import grammar, zoo
from specker.cli import run
from specker.options import Params
from specker.runtime.control.choose import NONE
from specker.runtime.control.policy import Fixed
from specker.runtime.round.drafter import Draft
from specker.runtime.round.grammars import Grammars, Guide

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "kinds": {"type": "array", "items": {"enum": ["alpha", "beta"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "count", "kinds"],
    "additionalProperties": False,
}
LINE = (", ", ": ")
STRATEGIES = {
    "draft": {"draft_tokens": 4},
    "draft-tree": {"tree": "3x3"},
    "lookup": {},
    "vocabtrim+lookup": {},
    "diffuspec": {"draft_tokens": 4},
    "del": {"exit_layer": 6, "draft_tokens": 3, "policy": "fixed"},
    "easyspec": {"draft_tokens": 4},
}
TEXTS = [("json", 0.7), ("line", 0.0)]
PROMPT = "def record():\n    return "


@pytest.fixture(scope="module")
def grammars():
    return {"json": grammar.json_schema(SCHEMA), "line": grammar.json_schema(SCHEMA, LINE)}


@pytest.fixture(scope="module")
def plain():
    return specker.load(strategy="ar", device="cpu", dtype="float64")


@pytest.fixture(scope="module")
def chain():
    return load("draft")


@pytest.fixture(scope="module")
def texts(plain, grammars):
    """(grammar, temperature) -> plain decoding under that grammar."""
    return {key: plain.generate(PROMPT, 72, grammar=grammars[key[0]], temperature=key[1]) for key in TEXTS}


@pytest.fixture(scope="module")
def free(plain):
    """temperature -> plain decoding without a grammar."""
    return {t: plain.generate(PROMPT, 24, temperature=t).tokens for t in (0.0, 0.7)}


def test_rounds_without_a_grammar_keep_their_shape(free, grammars):
    engine = load("draft", graphs="on")
    assert engine.generate(PROMPT, 24).tokens == free[0.0]
    launched = engine.loop.launched
    engine.generate(PROMPT, 8, grammar=grammars["json"])
    assert engine.loop.launched == launched > 5
    assert engine.generate(PROMPT, 24).tokens == free[0.0] and engine.loop.launched > launched


def load(name, **options):
    how = {"device": "cpu", "dtype": "float64", **STRATEGIES[name], **options}
    return specker.load(strategy=name.removesuffix("-tree"), **how)


def tokens_of(engine, text):
    return engine.tokenizer(text)["input_ids"]


def allowed(place):
    """The ids that may come next."""
    bits = np.full((1, place.words), -1, np.int32)
    place.walk([], [], bits)
    return [32 * n + i for n, word in enumerate(bits[0].tolist()) for i in range(32) if word >> i & 1]


def guide(engine, text, stop_ids=()):
    return engine.session.guide(text, stop_ids)


def valid(text):
    found = json.loads(text)
    assert [*found] == [*SCHEMA["required"]] and isinstance(found["name"], str) and len(found["name"]) <= 8
    assert 0 <= found["count"] <= 999 and 1 <= len(found["kinds"]) <= 2 and {*found["kinds"]} <= {"alpha", "beta"}
    return True


def test_plain_decoding_writes_valid_json(texts):
    for out in texts.values():
        assert out.finished == "stop" and valid(out.text)
        assert out.stats.rounds == len(out.tokens), "plain decoding drafts nothing"
    assert all("\n" not in out.text for (name, _), out in texts.items() if name == "line")


@pytest.mark.parametrize(("name", "key"), cases.one_in(4, STRATEGIES, TEXTS))
def test_tokens_equal_plain_decoding(name, key, texts, grammars, cheap):
    kind, temperature = key
    out = load(name).generate(PROMPT, 72, grammar=grammars[kind], temperature=temperature)
    assert (out.tokens, out.text, out.finished) == (texts[key].tokens, texts[key].text, "stop")
    assert out.stats.forced > 2 and out.stats.tokens == len(out.tokens)
    assert kind == "line" or out.stats.accepted > out.stats.forced, "the drafter had no part in it"


@pytest.mark.parametrize(
    "name",
    ["draft", *(pytest.param(name, marks=pytest.mark.slow) for name in ("del", "draft-tree", "diffuspec", "lookup"))],
)
def test_a_request_in_a_mixed_batch_is_as_alone(name, texts, free, grammars, cheap):
    """Some with and some without a grammar; more requests than slots."""
    engine = load(name, batch_size=3)
    hows = [("json", 0.7), (None, 0.7), ("line", 0.0), (None, 0.0)]
    options = {"grammar": [grammars.get(kind) for kind, _ in hows], "temperature": [t for _, t in hows]}
    outs = engine.generate([PROMPT] * len(hows), [72 if kind else 24 for kind, _ in hows], **options)
    for how, out in zip(hows, outs, strict=True):
        assert out.tokens == (texts[how].tokens if how[0] else free[how[1]])
        assert not how[0] or out.stats.forced > 2 or name == "del"  # the rows of its chains have begun already


def test_forced_tokens_join_a_batch_that_drafts_nothing(texts, free, grammars):
    """`del` keeps its exit layer in the shape of a round without a draft, and no row has run the layers below it."""
    engine = load("del", batch_size=2)
    params = Params(72, grammar=grammars["line"]), Params(24)
    requests = [engine.session.request(PROMPT, p) for p in params]
    for request in requests:
        request.policy = Fixed(0, 0, 6)
    events = [*engine.session.stream(requests)]
    first, second = ([t for e in events if e.request is request for t in e.tokens] for request in requests)
    assert first == texts["line", 0.0].tokens and second == free[0.0]
    assert requests[0].stats.forced > 2


@pytest.mark.parametrize("text", ["stop", "stop_ids", "max_new_tokens"])
def test_what_else_ends_a_text(chain, texts, grammars, text, cheap):
    whole = texts["line", 0.0]
    at = 6
    how = {
        "stop": {"stop": '"count'},
        "stop_ids": {"stop_ids": [whole.tokens[at]]},
        "max_new_tokens": {"max_new_tokens": at + 1},
    }[text]
    for generate in (chain.generate, chain.generate_ar):
        out = generate(PROMPT, **{"max_new_tokens": 72, **how}, grammar=grammars["line"])
        assert out.tokens == whole.tokens[: len(out.tokens)] and len(out.tokens) < len(whole.tokens)
        assert out.finished == ("length" if text == "max_new_tokens" else "stop")
        assert out.text == whole.text[: whole.text.index('"count')] if text == "stop" else len(out.tokens) <= at + 1


def test_a_stop_id_is_allowed_exactly_where_the_grammar_ends(plain):
    (end,) = plain.target.config.eos_ids
    place = guide(plain, grammar.regex("ab+"))
    for text, ends in (("", False), ("a", False), ("b", True), ("b", True)):
        assert place.follow(tokens_of(plain, text)) == len(text) and place.ended is None
        assert (end in allowed(place)) == ends
    assert place.follow([end, 5]) == 1 and place.ended == "stop"


def test_special_tokens_among_a_requests_stop_ids_end_the_text_too(plain):
    end, other, ordinary = 1, 2, tokens_of(plain, "x")[0]
    place = guide(plain, grammar.regex("ab*"), (end, ordinary))
    place.follow(tokens_of(plain, "a"))
    assert {0, end, other} & {*allowed(place)} == {0, end}
    assert place.follow([ordinary]) == 0 and place.ended == "grammar"
    assert place.follow([end]) == 1 and place.ended == "stop"


def test_forced_tokens_need_no_drafter(chain, monkeypatch):
    """A text that is known but for one word takes three rounds, and the drafter runs where there is a choice."""
    text = 'start: "the first part " ("one" | "two") " and the last one"'
    plain = chain.generate_ar(PROMPT, 40, grammar=text)
    drafted = []
    propose = type(chain.drafter).propose
    monkeypatch.setattr(
        type(chain.drafter), "propose", lambda self, b: drafted.append(len(b.requests[0].token_ids)) or propose(self, b)
    )
    out = chain.generate(PROMPT, 40, grammar=text)
    assert re.fullmatch("the first part (one|two) and the last one", out.text)
    assert out.tokens == plain.tokens and out.finished == plain.finished == "stop"
    assert out.stats.rounds <= 4 and len(drafted) <= 2 and plain.stats.rounds == len(plain.tokens) > 8


def test_a_round_with_forced_tokens_does_not_measure_plain_decoding(chain, monkeypatch):
    """It was to be one without a draft, but the grammar of one of its two texts forces tokens."""
    costs, seen = chain.loop.history.costs, []
    monkeypatch.setattr(chain.loop.runner.chooser, "measured", lambda *how: seen.append("plain"))
    monkeypatch.setattr(costs, "observe", lambda n, budget, drafted, *_: seen.append((n, drafted, _[2])))
    draft = Draft()
    for slot, forced in ((0, 2), (1, 0)):
        draft.constrain(slot, 0, forced)
    seconds = dict.fromkeys(("prefill", "draft", "verify", "accept", "commit"), 0.1)
    how = {
        "seconds": seconds,
        "reason": "measured",
        "batch": SimpleNamespace(budget=NONE),
        "behind": 0,
        "forced": False,
        "trial": False,
        "places": None,
        "parts": (),
        "other": 0.0,
        "warm": True,
    }
    for size, expected in ((2, (2, 0, 2)), (0, "plain")):
        draft.size = size
        requests = [SimpleNamespace(policy=Fixed(2, 2))] * 2
        chain.loop.runner.learn(SimpleNamespace(requests=requests, draft=draft, **how), [[0], [0]])
        assert seen.pop() == expected


class Seen(Fixed):
    def __init__(self, *size):
        super().__init__(*size)
        self.outcomes = []

    def observe(self, outcome):
        self.outcomes.append((outcome.drafted, len(outcome.path) - 1))


def test_a_chain_ends_before_the_first_token_that_the_grammar_refuses(chain, grammars, cheap):
    """Rows after it are not computed, and the policy learns that the drafter's tokens were refused."""
    request = chain.session.request(PROMPT, Params(72, grammar=grammars["json"]))
    request.policy = seen = Seen(4, 4)
    rows = []
    chain.trace = lambda row: rows.append((len(row["draft"]), row["tokens"]))
    try:
        assert [*chain.session.stream([request])][-1].finished == "stop"
    finally:
        chain.trace = None
    drafted = [n for n, _ in seen.outcomes]
    assert {*drafted} == {0, 4} or {*drafted} == {4}
    assert sum(n for n, _ in rows) < sum(drafted) and min(n for n, _ in rows) == 0
    assert [token for _, tokens in rows for token in tokens] == request.tokens, "what follows the end is no part of it"
    assert sum(right for _, right in seen.outcomes) == request.stats.accepted - request.stats.forced


def test_a_guides_chain(plain):
    """Forced tokens replace the drafter's and follow them; without them a chain is only cut."""
    text, tokens = guide(plain, 'start: "x=" ("1" | "2") ";end" /[.]/'), lambda s: tokens_of(plain, s)
    whole = tokens("x=") + tokens("1")
    wrong = tokens("x=") + tokens("3")
    for _ in range(2):  # it comes back to where it was
        assert text.constrain(wrong, 9, False) == (wrong[:-1], len(wrong) - 1)
        assert text.constrain([], 9, False) == ([], 0)
        assert text.constrain(whole[:1], 9, True)[1] == 1
        constrained, kept = text.constrain([5, 5, 5], 9, True)
        assert kept == 0 and plain.decode(constrained) == "x="
        constrained, kept = text.constrain(whole, 9, True)
        assert kept == len(whole) and plain.decode(constrained).startswith("x=1;")
        assert text.constrain(whole, 2, True) == (whole[:2], 2)


def test_a_forced_token_is_the_only_one(plain):
    """Plain decoding may not divide a text that is certain otherwise than the tokenizer does, though that would match
    the grammar, too."""
    place = guide(plain, 'start: "return value" | "return True"')
    (token,) = allowed(place)
    assert place.forced and plain.decode([token]) == "return"
    place.follow([token])
    assert not place.forced and len(allowed(place)) > 2


def test_a_drafter_keeps_the_kv_of_its_own_tokens_only(chain, grammars, monkeypatch, cheap):
    """Where the grammar's tokens replaced the drafter's, the path that the drafter sees ends."""
    kind, drafted, kept = type(chain.drafter), [], 0
    propose, keep = kind.propose, kind.keep

    def proposes(self, batch):
        out = propose(self, batch)
        drafted.append(batch.window[0, 1 : out.size + 1].tolist())
        return out

    def keeps(self, draft, slot, path):
        nonlocal kept
        kept += len(path) - 1
        assert all(int(chain.loop.state.window[slot, row]) == drafted[-1][row - 1] for row in path[1:])
        keep(self, draft, slot, path)

    monkeypatch.setattr(kind, "propose", proposes)
    monkeypatch.setattr(kind, "keep", keeps)
    stats = chain.generate(PROMPT, 72, grammar=grammars["json"], temperature=0.7).stats
    assert stats.forced > 2 and kept == stats.accepted - stats.forced > 0


def test_log_probabilities_are_those_before_the_grammar(chain, plain):
    how = {"max_new_tokens": 6, "logprobs": 2, "grammar": grammar.regex("[0-9]{6}")}
    out, expected = chain.generate("import ", **how), plain.generate("import ", **how)
    (free,) = plain.generate("import ", 1, logprobs=2).logprobs
    assert out.tokens == expected.tokens and out.finished == "stop"
    first = out.logprobs[0]
    assert [token for token, _ in first.best] == [token for token, _ in free.best] and first.token != free.token
    assert first.best[0][1] == pytest.approx(free.best[0][1], abs=1e-6)
    assert out.logprobs[0].logprob < min(logprob for _, logprob in free.best)
    assert [x.token for x in out.logprobs] == out.tokens


def test_filters_see_the_tokens_that_the_grammar_allows(chain, plain, grammars):
    how = {"max_new_tokens": 72, "temperature": 1.0, "grammar": grammars["line"], "top_k": 9, "top_p": 0.6, "seed": 3}
    out = chain.generate(PROMPT, **how)
    assert out.tokens == plain.generate(PROMPT, **how).tokens and valid(out.text)


def test_padded_rows_of_the_vocabulary_are_refused(pair):
    """A random model would draw the 61 ids that its tokenizer lacks, and the special ones."""
    target, draft = pair
    engine = specker.load(target, draft, strategy="draft", device="cpu", dtype="float64", draft_tokens=3)
    assert engine.target.config.vocab_size > len(engine.tokenizer)
    how = {"max_new_tokens": 40, "temperature": 1.5, "grammar": r"start: /[^\x00-\x1f\x7f-\u{10ffff}]*/"}
    assert max(engine.generate([1, 2, 3], 40, temperature=1.5).tokens) >= 256
    out = engine.generate([1, 2, 3], **how)
    assert out.tokens == engine.generate_ar([1, 2, 3], **how).tokens and out.text.isprintable() and out.text


def test_a_text_that_no_token_can_follow_ends(chain, monkeypatch, caplog):
    """Where the allowed tokens cannot be found all may come; the text ends before one that the grammar refuses."""
    monkeypatch.setattr(Guide, "_bits", lambda self: None)
    how = {"max_new_tokens": 20, "grammar": grammar.regex("(return|def|\n| )+x")}
    out, expected = chain.generate(zoo.PROMPTS[0], **how), chain.generate_ar(zoo.PROMPTS[0], **how)
    assert out.tokens == expected.tokens and out.finished == expected.finished == "grammar"
    assert re.fullmatch("(return|def|\n| )*", out.text)


def test_a_text_at_a_limit_leaves_those_of_the_same_grammar_alone(plain, monkeypatch, caplog):
    """They share a lexer, which a limit breaks for ever."""
    monkeypatch.setattr(plain.session, "grammars", Grammars(plain.target))
    plain.session.grammars.limits = {"max_lexer_states": 60}
    text = grammar.regex("(a|b)*a(a|b){18}|[cd]{9}")
    first, second = guide(plain, text), guide(plain, text)
    taken = 0
    for letter in tokens_of(plain, "abaababbabbbaabab" * 9):
        allowed(first)
        if not first.follow([letter]):
            break
        taken += 1
    assert first.ended == "grammar" and taken > 5
    assert first.error in caplog.text and first.error.startswith("the grammar cannot be followed: ")
    for place in (second, guide(plain, text)):
        for letter in tokens_of(plain, "cdcdcdcdc"):
            assert letter in allowed(place)
            place.follow([letter])
        assert place.ended == "stop" and not place.error


def test_a_text_ends_at_a_limit_as_in_plain_decoding(chain, plain, cheap):
    wide = {"anyOf": [{"type": "array", "items": {"const": n}} for n in range(400)]}
    how = {"max_new_tokens": 40, "grammar": grammar.json_schema({"type": "array", "minItems": 1, "items": wide})}
    out, expected = chain.generate(PROMPT, **how), plain.generate(PROMPT, **how)
    assert out.tokens == expected.tokens and out.tokens
    assert out.finished == expected.finished == "grammar"


def test_a_text_may_spend_so_many_seconds_a_token(plain, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr("specker.runtime.round.grammars.time.thread_time", lambda: next(clock))
    monkeypatch.setattr(plain.session.grammars, "pace", 0.5)
    place, n = guide(plain, grammar.regex("a{300}")), 0
    while place.ended is None:
        n += place.follow(tokens_of(plain, "a"))
    assert n == 21  # a second each, for which 0.5 * (20 + n) are allowed
    assert place.error == "the grammar takes more than 0.5 s a token to follow"


TAGS = [
    grammar.Tag(
        '<tool>{"name": "add", "arguments": ',
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
        "}</tool>",
    ),
    grammar.Tag(
        '<tool>{"name": "list", "arguments": ',
        json.dumps({"type": "object", "additionalProperties": False}),
        "}</tool>",
    ),
]


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("no tool at all, a < b", True),
        (
            'an <tool>{"name": "add", "arguments": {"a": 1}}</tool> <tool>{"name": "list", "arguments": {}}</tool>.',
            True,
        ),
        ('<tool>{"name": "remove"', False),
        ('<tool>{"name": "list", "arguments": {"a"', False),
        ('<tool>{"name": "add", "arguments": {"a": 1}}.', False),
    ],
)
def test_tags_in_a_free_text(plain, text, whole):
    place, ids = guide(plain, grammar.tagged(TAGS, "<tool>")), tokens_of(plain, text)
    assert (place.follow(ids) == len(ids)) == whole and place.ended == (None if whole else "grammar")
    assert not whole or set(plain.target.config.eos_ids) <= {*allowed(place)}, "the text may not end"
    required, ids = guide(plain, grammar.tagged(TAGS, required=True)), tokens_of(plain, text)
    required.follow(ids)
    assert required.ended == "grammar"
    assert required.forced or text.startswith("<tool>")


def test_a_required_tag(chain):
    out = chain.generate(PROMPT, 60, grammar=grammar.tagged(TAGS, required=True))
    assert out.finished == "stop" and out.text.startswith('<tool>{"name": "') and out.text.endswith("}</tool>")
    assert json.loads(out.text[6:-7])["name"] in ("add", "list")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a grammar must be a string that is not empty"),
        (3, "a grammar must be a string that is not empty"),
        ("start: foo", 'the grammar is invalid: .*unknown name: "foo"'),
        (grammar.regex("a("), "the grammar is invalid: .*regex parse error: unclosed group"),
        (grammar.json_schema({"unevaluatedProperties": 3}), "the grammar is invalid: Unimplemented keys"),
        (grammar.json_schema({"type": "text"}), "the grammar is invalid: "),
    ],
)
def test_a_wrong_grammar_is_refused_in_a_sentence(chain, text, message):
    with pytest.raises(ValueError, match=message) as error:
        chain.generate(PROMPT, 4, grammar=text)
    assert "\n" not in str(error.value) and not chain.session.busy


def test_what_the_helpers_refuse():
    for schema in ("[1]", "{", [1], {"a": {1}}, "[" * 10**5):
        with pytest.raises(ValueError, match="a JSON schema must be a JSON object: "):
            grammar.json_schema(schema)
    for tags, trigger in (([], None), (TAGS, "<call>"), ([TAGS[0], TAGS[1]._replace(begin="call")], None)):
        with pytest.raises(ValueError, match="tags must begin with one trigger"):
            grammar.tagged(tags, trigger)


def test_what_an_engine_needs_for_a_grammar(plain, pair, monkeypatch, tmp_path):
    session = plain.session
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="on one rank: leave out tp"):
        patch.setattr(session.loop, "ranks", SimpleNamespace(size=2))
        session.guide("start: /a/")
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=r"a fast tokenizer .*, and my-model has none"):
        patch.setattr(session, "target", SimpleNamespace(tokenizer_or_none=None))
        patch.setattr(session, "name", "my-model")
        session.guide("start: /a/")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    sentence = r"a grammar needs llguidance: pip install 'fastapi>=.*' 'llguidance>=.*' "
    for call in (grammar.json_object, lambda: Grammars(plain.target).guide("start: /a/")):
        with pytest.raises(ValueError, match=sentence):
            call()


def test_the_command(tmp_path, capsys):
    schema, short = tmp_path / "schema.json", ["--prompt", PROMPT, "--max-new-tokens", "72", "--device", "cpu"]
    schema.write_text(json.dumps(SCHEMA))
    assert run.main([*short, "--json-schema", str(schema), "--check", "--json", "-"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["prompts"]
    assert result["finish_reason"] == "stop" and valid(result["text"])
    schema.write_text("start: (")
    assert run.main([*short, "--grammar", str(schema)]) == 2
    assert "the grammar is invalid: " in capsys.readouterr().err
    assert run.main([*short, "--json-schema", str(schema)]) == 2
    assert f"{schema}: a JSON schema must be a JSON object: " in capsys.readouterr().err
    schema.write_text('start: "ab<|mask|>"')  # text cannot spell a special token
    assert run.main([*short, "--grammar", str(schema)]) == 1
    assert "the text ends early: no token can follow in the grammar" in capsys.readouterr().err
