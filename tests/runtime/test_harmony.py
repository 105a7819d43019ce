"""Answers in Harmony: what is read from them token by token, in Python and on the command line."""

import io
import json
import re

import pytest
from make_checkpoint import tokens_of
from make_harmony import IDS, harmony_tokenizer, make_harmony
from pairs import perturbed
from rich.console import Console

import specker
from specker import grammar
from specker.answers.harmony import Messages, conversation, last_message, of
from specker.answers.parts import joined
from specker.answers.tool_formats import spelled
from specker.cli import run
from specker.cli.answer import Answer
from specker.cli.screen import Screen
from specker.runtime.detokenize import Detokenizer
from specker.runtime.events import Event

TOKENIZER = harmony_tokenizer()
TOKENS = tokens_of(TOKENIZER)
FORM = of(IDS)
BEGUN = "<|start|>assistant"
CALL = 'to=functions.move <|constrain|>json<|message|>{"x": 1}<|call|>'
THOUGHT = "<|channel|>analysis<|message|>why → so<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
ANSWERS = {  # the answer after <|start|>assistant: its reasoning, its text, its calls
    "reasoning and text": (f"{THOUGHT}{FINAL}Yes, é.<|return|>", "why → so", "Yes, é.", []),
    "no reasoning": (f"{FINAL}Yes.<|return|>", "", "Yes.", []),
    "no channel": ("<|message|>Yes.<|return|>", "", "Yes.", []),
    "no header": ("Yes, to=", "", "Yes, to=", []),
    "no header, cut": (" t", "", " t", []),
    "several of a kind": (
        f"{THOUGHT}<|channel|>commentary<|message|>Wait.<|end|>{BEGUN}{THOUGHT}{FINAL}Yes.<|return|>",
        "why → so\n\nwhy → so",
        "Wait.\n\nYes.",
        [],
    ),
    "a channel that is not known": (f"{THOUGHT}<|channel|>poem<|message|>Oh.<|end|>", "why → so", "Oh.", []),
    "cut in the reasoning": ("<|channel|>analysis<|message|>why", "why", "", []),
    "cut in a header": (f"{THOUGHT}<|channel|>fin", "why → so", "", []),
    "cut in a recipient": (" to=functions.mo", "", "", []),
    "a call": (f"{THOUGHT}<|channel|>commentary {CALL}", "why → so", "", [("move", '{"x": 1}')]),
    "a call by its role": (
        f'{THOUGHT} to=functions.move<|channel|>commentary json<|message|>{{"x": 1}}<|call|>',
        "why → so",
        "",
        [("move", '{"x": 1}')],
    ),
    "two calls after a text": (
        f"<|channel|>commentary<|message|>Look.<|end|>{BEGUN}<|channel|>commentary {CALL}"
        f"{BEGUN}<|channel|>analysis {CALL}",
        "",
        "Look.",
        [("move", '{"x": 1}')] * 2,
    ),
    "a call that ends with its grammar": (f"<|channel|>commentary {CALL}"[:-8], "", "", [("move", '{"x": 1}')]),
    "half a call": ('<|channel|>commentary to=functions.move<|message|>{"x": ', "", '{"x": ', []),
    "a call that is no object": ("<|channel|>commentary to=functions.move<|message|>[1]<|call|>", "", "[1]", []),
    "a function that is none": (f"<|channel|>commentary {CALL}".replace("move", "fly"), "", '{"x": 1}', []),
    "a tool of its reasoning": ("<|channel|>analysis to=python code<|message|>1+1<|call|>", "1+1", "", []),
    "no end": (f"<|channel|>analysis<|message|>why{FINAL}Yes.", "why", "Yes.", []),
    "text between": (f"{THOUGHT}{FINAL}Yes.<|end|>So.<|constrain|>", "why → so", "Yes.\n\nSo.", []),
}


def events(answer, size, stops=()):
    """The events of an answer whose rounds commit `size` tokens each."""
    reader = Detokenizer(TOKENS, (), stops, FORM.parts)
    ids = TOKENIZER(answer, add_special_tokens=False)["input_ids"]
    for n in range(0, max(1, len(ids)), size):
        texts, tokens = [], []
        for token in ids[n : n + size]:
            tokens.append(token)
            texts.append(reader.add(token))
            if reader.stopped:
                break
        last = reader.stopped or n + size >= len(ids)
        yield Event(None, tokens, 1, texts, reader.flush() if last else "", [], "stop" if last else None)
        if last:
            return


def read(answer, size, stops=(), begun=BEGUN):
    reader = Messages(FORM, begun, ["move"])
    return [part for event in events(answer, size, stops) for part in reader.read(event)], reader


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("case", ANSWERS)
def test_an_answer_is_read_by_its_channels(case, size):
    answer, reasoning, text, calls = ANSWERS[case]
    parts, _ = read(answer, size)
    assert (joined(parts, "reasoning"), joined(parts, "text")) == (reasoning, text)
    assert [(part.name, part.text) for part in parts if part.kind == "call"] == calls
    assert all(part.text for part in parts)


def test_only_headers_and_calls_are_held_back():
    parts, reader = read(f"{THOUGHT}{FINAL}Yes.<|return|>", 1)
    assert [part.text for part in parts] == [*"why → so", *"Yes."]
    assert all(part.drafted for part in parts)
    counted = f"<|start|>{THOUGHT}".removeprefix("<|start|>").removesuffix(BEGUN)
    assert reader.reasoned == len(TOKENIZER(counted)["input_ids"])
    assert read("ab", 1)[0][0].text == "a"


def test_stop_strings_occur_in_messages_only():
    answer = f"{THOUGHT}{FINAL}ab assistant<|return|>"
    for stops, text in ((("assistant",), "ab "), (("final", "analysis", "soassistant", "soab"), "ab assistant")):
        parts, _ = read(answer, 1, stops)
        assert joined(parts, "reasoning") == "why → so" and joined(parts, "text") == text
    parts, _ = read(answer, 1, ("so",))
    assert (joined(parts, "reasoning"), joined(parts, "text")) == ("why → ", "")
    parts, _ = read(answer, 1, ("soo", "tt"))  # what is held at the end of a message belongs to it
    assert (joined(parts, "reasoning"), joined(parts, "text")) == ("why → so", "ab assistant")
    half = TOKENIZER("é")["input_ids"][:1]
    reader = Detokenizer(TOKENS, parts=FORM.parts)
    assert [reader.add(token) for token in (*half, IDS["<|end|>"], *TOKENIZER("a")["input_ids"])] == ["", "", "a"]


def test_the_prompt_may_have_begun_the_message():
    assert last_message(f"<|start|>user<|message|>a<|end|>{BEGUN}") == BEGUN and last_message("a") == ""
    for begun, kind in (("<|start|>assistant<|channel|>analysis<|message|>be", "reasoning"), (BEGUN + FINAL, "text")):
        parts, _ = read("cause", 1, (), begun)
        assert joined(parts, kind) == "cause"
    parts, _ = read(f"{BEGUN}{FINAL}a", 1, (), "<|start|>user<|message|>a<|end|>")  # no turn was begun
    assert joined(parts, "text") == "a"
    assert joined(read("ab", 1, (), "")[0], "text") == "ab"


def test_models_are_known_by_their_special_tokens():
    assert of({"<|channel|>": 1}) is None and of({}) is None
    assert of({"<|channel|>": 1, "<|message|>": 2, "<|x|>": 3}).ids == {"<|channel|>": 1, "<|message|>": 2}


def test_messages_become_what_templates_read():
    calls = [{"id": f"{n}", "function": {"name": "move", "arguments": {"x": n}}} for n in range(2)]
    results = [{"role": "tool", "tool_call_id": f"{n}", "content": f"r{n}"} for n in (1, 0)]
    made = conversation(
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "reasoning_content": "c", "tool_calls": calls},
            *results,
            {"role": "tool", "content": "of none"},
            {"role": "assistant", "content": "d", "reasoning_content": "e"},
        ]
    )
    assert [m.get("thinking") for m in made] == [None, "c\n\nb", None, None, None, None, "e"]
    assert [m["content"] for m in made] == ["a", "", "r0", "", "r1", "of none", "d"]
    assert [m["tool_calls"] for m in made if "tool_calls" in m] == [[calls[0]], [calls[1]]]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    target = make_harmony(folder / "target", layers=2)
    return target, perturbed(target, folder / "draft", amount=0.05)


@pytest.fixture(scope="module")
def engine(models):
    return specker.load(*models, strategy="draft", dtype="float64", device="cpu", draft_tokens=3)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_conversation_in_python(engine, temperature):
    talk = [{"role": "user", "content": "ab"}]
    lark = " ".join(("start:", spelled("<|channel|>analysis<|message|>", IDS), "/[a-z ]{20}/"))
    lark = grammar.lark(f"{lark} {spelled(f'<|end|>{BEGUN}{FINAL}', IDS)} /[A-Z ]{{20}}/")
    how = {"temperature": temperature, "seed": 5, "grammar": lark}
    out = engine.chat(talk, 200, **how)
    assert re.fullmatch("[a-z ]{20}", out.reasoning) and re.fullmatch("[A-Z ]{20}", out.text)
    plain = engine.generate_ar(engine.encode_chat(talk), 200, **how)
    assert out.tokens == plain.tokens and out.finished == "stop"
    assert plain.text == f"analysis{out.reasoning}assistantfinal{out.text}" and plain.reasoning == ""


def test_return_and_call_end_an_answer(engine):
    assert engine.target.config.eos_ids == (IDS["<|return|>"], IDS["<|call|>"])


def test_the_command_line_shows_the_answer_beside_its_reasoning(models, engine, tmp_path, capsys):
    lark = tmp_path / "form.lark"
    thought, final = spelled("<|channel|>analysis<|message|>", IDS), spelled(f"<|end|>{BEGUN}{FINAL}", IDS)
    lark.write_text(f'start: {thought} "because" {final} "yes"')
    (tmp_path / "talk.jsonl").write_text('{"turns": ["ab", "cd"]}')
    argv = ["--target", str(models[0]), "--strategy", "lookup", "--dtype", "float64", "--device", "cpu", "--chat"]
    argv += ["--grammar", str(lark), "--prompts", str(tmp_path / "talk.jsonl"), "--max-new-tokens", "99"]
    assert run.main([*argv, "--json", str(tmp_path / "out.json"), "--check"]) == 0
    shown, rows = capsys.readouterr(), json.loads((tmp_path / "out.json").read_text())["prompts"]
    assert [(row["text"], row["reasoning"]) for row in rows] == [("yes", "because")] * 2
    assert "because" not in shown.out and shown.err.count("because\n\n") == 2 and shown.out.count("yes\n") == 2
    talk = [("user", "ab"), ("assistant", "yes"), ("user", "cd")]  # without the reasoning
    ids = engine.encode_chat([{"role": role, "content": text} for role, text in talk])
    assert rows[1]["prompt_tokens"] == len(ids)
    (tmp_path / "schema.json").write_text('{"enum": ["yes"]}')
    argv[argv.index("--grammar") : argv.index("--prompts")] = ["--json-schema", str(tmp_path / "schema.json")]
    assert run.main([*argv, "--json", str(tmp_path / "out.json")]) == 0
    for row in json.loads((tmp_path / "out.json").read_text())["prompts"]:  # it may be cut in its reasoning
        assert row["tokens"][0] == IDS["<|channel|>"] and row["text"] in ("", '"', '"y', '"ye', '"yes', '"yes"')


def test_a_terminal_shows_reasoning_apart_from_the_answer():
    """The answer as Markdown, whose last block is shown anew as it grows, and reasoning where it comes."""
    file = io.StringIO()
    screen = Screen(json_to_stdout=False)
    screen.text = screen.notes = Console(file=file, force_terminal=True, width=40)
    screen.plain = False
    screen.answer = Answer(screen.text)
    for kind, text in (("reasoning", "so\n"), ("reasoning", "it"), ("text", "*a*"), ("reasoning", "hm"), ("text", "b")):
        screen.reasoning(text) if kind == "reasoning" else screen.pieces([(text, False)])
    screen.newline()
    shown = file.getvalue()
    assert "\x1b[2mit\x1b[0m\n\n" in shown and "\x1b[3ma\x1b[0m\n" in shown  # dim, and italic
    assert shown.index("\x1b[3ma\x1b[0m\n") < shown.index("\x1b[2mhm\x1b[0m\n\n") < shown.rindex("b\n")
