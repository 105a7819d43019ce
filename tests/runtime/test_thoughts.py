"""Reasoning between <think> and </think> is apart from the answer, in Python and on the command line."""

import json

import pytest
from make_checkpoint import make

import specker
from specker import grammar
from specker.cli import run

TALK = [{"role": "user", "content": "ab cd"}]
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{% endfor %}{% if thinks is defined %}<think>\n{% endif %}"
)
LARK = 'start: "<think>\\nbecause\\n</think>\\n\\n" /[A-Z ]{9}/'


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = make(tmp_path_factory.mktemp("models"), "qwen2", layers=1, max_context=400, tokenizer=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def engine(target):
    return specker.load(target, strategy="lookup", dtype="float64", device="cpu")


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_conversation_in_python(engine, temperature):
    how = {"temperature": temperature, "seed": 5, "grammar": grammar.lark(LARK)}
    out = engine.chat(TALK, 99, **how)
    plain = engine.generate_ar(engine.encode_chat(TALK), 99, **how)
    assert out.reasoning == "because" and len(out.text) == 9 and out.finished == "stop"
    assert out.tokens == plain.tokens and plain.text == f"<think>\nbecause\n</think>\n\n{out.text}"
    assert plain.reasoning == ""


def test_a_prompt_may_have_opened_the_reasoning_in_python(engine, monkeypatch):
    opened = {"thinks": 1}
    plain = engine.generate(engine.encode_chat(TALK, **opened), 12)
    out = engine.chat(TALK, 12, template=opened)
    assert (out.tokens, out.reasoning, out.text) == (plain.tokens, plain.text.strip(), "")
    talk = [*TALK, {"role": "assistant", "content": "<think>\nbe"}]
    continued = {"continue_final_message": True, "add_generation_prompt": False}
    assert engine.chat(talk, 12, template=continued).text == ""
    form = grammar.lark('start: "yes"')  # holds for the whole answer
    assert [engine.chat(TALK, 12, template=t, grammar=form).text for t in (opened, {})] == ["yes", "yes"]
    monkeypatch.setattr(engine.tokenizer, "chat_template", "{{ messages[0].content }}")
    assert engine.chat(TALK, 99, grammar=grammar.lark(LARK)).text.startswith("<think>\nbecause")


def test_the_command_line_shows_the_answer_beside_its_reasoning(target, engine, tmp_path, capsys):
    (tmp_path / "form.lark").write_text('start: "<think>because</think>yes"')
    (tmp_path / "talk.jsonl").write_text('{"turns": ["ab", "cd"]}')
    argv = [
        "--target",
        str(target),
        "--strategy",
        "lookup",
        "--dtype",
        "float64",
        "--device",
        "cpu",
        "--chat",
        "--check",
    ]
    argv += ["--grammar", str(tmp_path / "form.lark"), "--prompts", str(tmp_path / "talk.jsonl")]
    assert run.main([*argv, "--max-new-tokens", "99", "--json", str(tmp_path / "out.json")]) == 0
    shown, rows = capsys.readouterr(), json.loads((tmp_path / "out.json").read_text())["prompts"]
    assert [(row["text"], row["reasoning"], row["identical"]) for row in rows] == [("yes", "because", True)] * 2
    assert "because" not in shown.out and shown.out.count("yes\n") == 2 and "because" in shown.err
    talk = [("user", "ab"), ("assistant", "yes"), ("user", "cd")]  # without the reasoning
    ids = engine.encode_chat([{"role": role, "content": text} for role, text in talk])
    assert rows[1]["prompt_tokens"] == len(ids)
