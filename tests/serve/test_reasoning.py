"""Reasoning between <think> and </think>, taken out of answers."""

import pytest
from make_checkpoint import make
from serving import serving, streamed

import specker
from specker.answers.reasoning import Reasoning, opened

TALK = [{"role": "user", "content": "ab cd"}]
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{% endfor %}{% for t in tools or [] %}<tool_call>{% endfor %}"
    "{% if thinks is defined %}<think>\n{% endif %}"
)
CALL = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
STOP = [{"type": "function", "function": {"name": "stop"}}]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    target = make(tmp_path_factory.mktemp("models"), "qwen2", layers=1, max_context=400, tokenizer=True)
    (target / "chat_template.jinja").write_text(TEMPLATE)
    return specker.load(target, strategy="lookup", dtype="float64", device="cpu", batch_size=2)


@pytest.fixture
def say(engine, answer_with):
    """Makes the model say a text, by a grammar that has no other, and returns the message and the deltas."""

    with serving(engine, name="tiny") as client:

        def said(text, **more):
            answer_with(text)
            body = {"messages": TALK, **more}
            whole = client.post("/v1/chat/completions", json=body).json()
            chunks = streamed(client, "/v1/chat/completions", **body)
            return whole, [choice["delta"] for chunk in chunks for choice in chunk["choices"]]

        yield said


def joined(deltas, name):
    return "".join(delta.get(name) or "" for delta in deltas)


def test_reasoning_is_apart_from_the_answer(engine, say):
    whole, deltas = say("<think>\nbecause\n</think>\n\nyes <b>")
    message, usage = whole["choices"][0]["message"], whole["usage"]
    assert message == {"role": "assistant", "content": "yes <b>", "reasoning_content": "because"}
    assert joined(deltas, "reasoning_content") == "because" and joined(deltas, "content") == "yes <b>"
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(engine.encode("<think>\nbecause\n</think>"))


def test_the_opening_tag_may_be_in_the_prompt(say):
    whole, deltas = say("because</think>yes", chat_template_kwargs={"thinks": 1})
    assert whole["choices"][0]["message"]["reasoning_content"] == joined(deltas, "reasoning_content") == "because"
    assert whole["choices"][0]["message"]["content"] == joined(deltas, "content") == "yes"


def test_a_message_is_continued_within_its_reasoning(say):
    talk = [*TALK, {"role": "assistant", "content": "<think>\nbe"}]
    whole, _ = say("cause</think>yes", messages=talk, continue_final_message=True)
    assert whole["choices"][0]["message"]["reasoning_content"] == "cause"


def test_calls_follow_reasoning(say):
    whole, deltas = say(f"<think>because</think>\n{CALL}", tools=STOP)
    [choice] = whole["choices"]
    assert choice["message"]["reasoning_content"] == "because" and choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["tool_calls"][0]["function"]["name"] == "stop"
    assert joined(deltas, "content") == "" and [d for d in deltas if "tool_calls" in d]


def test_other_models_texts_are_left_alone(engine, say, chat_template):
    chat_template(engine, "{{ messages[0].content }}")
    whole, deltas = say("<think>a</think>b")
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "<think>a</think>b"}
    assert joined(deltas, "content") == "<think>a</think>b"
    assert "reasoning_tokens" not in whole["usage"]["completion_tokens_details"]


TEXTS = [  # whether the prompt opened the reasoning, text, reasoning, answer
    (False, "<think>\n a\n b \n</think>\n\n c </think> ", "a\n b", "c </think> "),
    (False, " \n<think></think>a", "", "a"),
    (False, " a <think>b</think>", "", " a <think>b</think>"),
    (False, " \n ", "", " \n "),
    (False, "<thin", "", "<thin"),
    (False, "<think> a </thin", "a </thin", ""),
    (False, "<think> a \n ", "a", ""),
    (True, "\na </think></think>b", "a", "</think>b"),
    (True, "<think>a", "<think>a", ""),
    (True, "</think>", "", ""),
]


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_texts_in_pieces(size):
    for inside, text, reasoning, answer in TEXTS:
        reader = Reasoning(inside)
        pieces = [text[n : n + size] for n in range(0, len(text), size)]
        parts = [reader.add(piece) for piece in pieces] + [reader.add("", last=True)]
        assert ("".join(r for r, _ in parts), "".join(t for _, t in parts)) == (reasoning, answer), text


def test_only_what_may_be_a_tag_is_held_back():
    reader = Reasoning(True)
    assert [reader.add(c)[0] for c in "a b</t>"] == ["a", "", " b", "", "", "", "</t>"]


def test_where_reasoning_begins():
    assert opened("{{ m }}", "<think>", "") is None
    assert opened("</think>", "a<think>\n", "") is True and opened("</think>", "<think>a", "") is False
    assert opened("</think>", "a", "<think>a") is True and opened("</think>", "a", "<think>a</think>b") is False


def test_a_form_follows_reasoning_that_the_prompt_has_begun(engine):
    form = {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes"]}}}
    body = {"messages": TALK, "response_format": form, "max_tokens": 20}
    with serving(engine, name="tiny") as client:
        [plain] = client.post("/v1/chat/completions", json=body).json()["choices"]
        body["chat_template_kwargs"] = {"thinks": 1}
        [choice] = client.post("/v1/chat/completions", json=body).json()["choices"]
    assert plain["message"]["content"] == '"yes"'
    assert choice["message"]["reasoning_content"] and choice["finish_reason"] == "length"
