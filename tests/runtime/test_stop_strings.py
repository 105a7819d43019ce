"""Texts end before the first stop string, with the same tokens whatever drafts; nothing of one is ever shown."""

import json
import random

import pytest
from make_checkpoint import byte_tokenizer, make, tokens_of
from pairs import perturbed

import specker
from specker.answers.scanner import Marker, Scanner
from specker.cli import run
from specker.runtime.detokenize import Detokenizer
from specker.view.read import parse


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    target = make(tmp_path_factory.mktemp("target"), layers=2, tokenizer=True)
    return target, perturbed(target, tmp_path_factory.mktemp("draft"))


def shown(text: str, stops: tuple[str, ...]) -> tuple[list[str], bool]:
    """The pieces of `text`, a token for each byte, and whether a stop string ended it."""
    tokenizer = byte_tokenizer()
    stream, pieces = Detokenizer(tokens_of(tokenizer), stops=stops), []
    for token in tokenizer(text)["input_ids"]:
        pieces.append(stream.add(token))
        if stream.stopped:
            break
    return [*pieces, stream.flush()], stream.stopped


@pytest.mark.parametrize(
    ("text", "stops", "pieces"),
    [
        ("abENDc", ("END",), ["a", "b", "", "", "", ""]),
        ("abENc", ("END",), ["a", "b", "", "", "ENc", ""]),
        ("EEND", ("END",), ["", "E", "", "", ""]),  # a new beginning within what was held
        ("aEN", ("END",), ["a", "", "", "EN"]),  # the text ends first
        ("a#b", ("##", "b"), ["a", "", "#", ""]),
        ("xaby", ("ab", "xab"), ["", "", "", ""]),  # the one that begins first, though both end at once
        ("é→", ("→",), ["", "é", "", "", "", ""]),  # within characters of several tokens
    ],
)
def test_what_may_be_a_stop_string_is_held_back(text, stops, pieces):
    assert shown(text, stops) == (pieces, any(stop in text for stop in stops))


def test_stop_strings_are_found_whatever_the_pieces():
    """As a search of the whole text does at each of its characters."""
    rng, ended = random.Random(0), 0
    for _ in range(400):
        text = "".join(rng.choices("ab", k=40))
        stops = tuple("".join(rng.choices("ab", k=rng.randint(1, 9))) for _ in range(rng.randint(1, 3)))
        ends = (n for n in range(len(text) + 1) if text[:n].endswith(stops))
        if (end := next(ends, None)) is not None:
            expected = text[: end - max(len(stop) for stop in stops if text[:end].endswith(stop))]
        scanner, out = Scanner(stops), ""
        left = text
        while left and not scanner.found:
            piece, left = left[: (n := rng.randint(1, 5))], left[n:]
            out += scanner.add(piece)
            assert (expected if end is not None else text).startswith(out)
        if end is None:
            assert out + scanner.held == text and not scanner.found
        else:
            assert out == expected and expected + scanner.found == text[:end] and scanner.held.startswith(scanner.found)
        ended += end is not None
    assert 100 < ended < 400


def test_a_long_stop_string_costs_a_constant_time_a_character():
    looked = []

    class Counted(str):
        def __getitem__(self, at):
            looked.append(at)
            return str.__getitem__(self, at)

    stop = Marker(Counted("a" * 1999 + "b"))
    assert not any(stop.ends("a") for _ in range(4000)) and stop.begun == 1999 and stop.ends("b")
    assert len(looked) < 20_000


STRATEGIES = {
    "ar": {"strategy": "ar"},
    "chain": {"strategy": "draft", "draft_tokens": 4},
    "tree": {"strategy": "draft", "tree": "2x3"},
    "lookup": {"strategy": "lookup"},
    "batch": {"strategy": "draft", "draft_tokens": 3, "batch_size": 3},
}


@pytest.mark.parametrize("name", ["ar", "tree", "lookup", "batch", pytest.param("chain", marks=pytest.mark.slow)])
def test_a_text_ends_before_its_stop_string(pair, name):
    engine = specker.load(*(pair if name not in ("ar", "lookup") else pair[:1]), dtype="float64", **STRATEGIES[name])
    prompts = ["def f(x):", "class A", "import os"]
    whole = engine.generate_ar(prompts, 36, temperature=0.9, seed=5)
    stops = [out.text[20:23] for out in whole]
    for one, stop in zip(whole, stops, strict=True):
        assert len(stop.encode()) >= 3 and stop in one.text
    got = engine.generate(prompts, 36, stop=stops, temperature=0.9, seed=5)
    plain = engine.generate_ar(prompts, 36, stop=stops, temperature=0.9, seed=5)
    assert [out.tokens for out in got] == [out.tokens for out in plain]
    for out, one in zip(got, whole, strict=True):
        end = min(at for stop in stops if (at := one.text.find(stop)) >= 0)
        assert (out.text, out.finished) == (one.text[:end], "stop")
        assert out.tokens == one.tokens[: len(out.tokens)] and out.stats.tokens == len(out.tokens)
        assert any(stop in engine.decode(out.tokens) for stop in stops)
    streamed = [""] * len(prompts)
    for chunk in engine.stream(prompts, 36, stop=stops, temperature=0.9, seed=5):
        streamed[chunk.prompt_index] += chunk.text
    assert streamed == [out.text for out in got]


def test_a_string_that_does_not_occur_changes_nothing(pair):
    engine = specker.load(*pair, strategy="draft", dtype="float64")
    plain, out = engine.generate("def f(x):", 30), engine.generate("def f(x):", 30, stop="no such text")
    assert (out.tokens, out.text, out.finished) == (plain.tokens, plain.text, "length")
    assert engine.check("def f(x):", out, 30, stop="no such text").identical


def test_accepted_tokens_behind_a_stop_do_not_count(pair):
    engine = specker.load(*pair, strategy="draft", dtype="float64", device="cpu", draft_tokens=3)
    for stop in engine.generate("ab cd", 18).tokens[3:]:
        assert all(event.accepted <= len(event.tokens) for event in engine.stream("ab cd", 18, stop_ids=[stop]))


def test_the_command_line_stops_too(pair, tmp_path, capsys):
    target, draft = map(str, pair)
    model = ["--target", target, "--draft", draft, "--strategy", "draft", "--dtype", "float64", "--prompt", "def f(x):"]
    assert run.main([*model, "--json", str(tmp_path / "whole.json")]) == 0
    whole = json.loads((tmp_path / "whole.json").read_text())["total"]["text"]
    stop, trace = whole[10:12], tmp_path / "trace.jsonl"
    capsys.readouterr()
    flags = ["--stop", "never", "--stop", stop, "--check", "--trace", str(trace), "--json", str(tmp_path / "cut.json")]
    assert run.main([*model, *flags]) == 0
    want = whole[: whole.index(stop)]
    assert capsys.readouterr().out == want + "\n"
    (cut,) = json.loads((tmp_path / "cut.json").read_text())["prompts"]
    assert (cut["text"], cut["finish_reason"], cut["identical"]) == (want, "stop", True)
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [token for row in rows for token in row.get("tokens", [])] == cut["tokens"]
    assert "".join(piece for row in rows for piece in row.get("pieces", [])) + rows[-1]["tail"] == want
    parse(trace.read_text().splitlines(), "a trace")


@pytest.mark.parametrize("stop", ["", ["a", ""], 3, [b"x"], None])
def test_what_is_no_stop_string_is_refused(pair, stop):
    engine = specker.load(pair[0], strategy="ar")
    with pytest.raises(ValueError, match="must be a string or a list of strings, none of them empty, got"):
        engine.generate("def", 4, stop=stop)


def test_a_target_without_tokenizer_has_no_text_to_stop(tmp_path):
    engine = specker.load(make(tmp_path), strategy="ar")
    with pytest.raises(ValueError, match="no tokenizer, so its text cannot end at"):
        engine.generate([1, 2], 4, stop="x")
