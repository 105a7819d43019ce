"""Answers that follow a JSON schema, and tool calls."""

import json

import openai
import pytest
from make_checkpoint import add_tokens, make
from pairs import perturbed
from serving import free, serving

import specker
from specker import grammar
from specker.answers.calls import Calls
from specker.answers.tool_formats import Hermes

NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
PLACE = {"type": "object", "properties": {"x": NUMBER}, "required": ["x"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "move", "description": "Go there.", "parameters": PLACE}},
    {"type": "function", "function": {"name": "stop"}},
]
TALK = [{"role": "user", "content": "ab cd"}]
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}<tool_call>{% endfor %}"
    "{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.x }}{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    target = make(folder / "target", "qwen2", layers=2, max_context=400, tokenizer=True)
    add_tokens(target, "<tool_call>", "</tool_call>")  # as Qwen's: tokens, and text
    (target / "chat_template.jinja").write_text(TEMPLATE)
    draft = perturbed(target, folder / "draft", amount=0.05)
    return specker.load(target, draft, strategy="draft", dtype="float64", device="cpu", batch_size=3, draft_tokens=3)


@pytest.fixture(scope="module")
def api(engine):
    with serving(engine, name="tiny") as client:
        with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as api:
            yield api
        assert free(engine)


def ask(api, **more):
    return api.chat.completions.create(model="tiny", messages=TALK, max_tokens=120, **more)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_an_answer_follows_its_schema_and_is_that_of_plain_decoding(engine, api, temperature):
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}
    answer = ask(api, response_format=form, temperature=temperature, seed=4).choices[0]
    assert answer.finish_reason == "stop" and 0 <= json.loads(answer.message.content)["x"] <= 99
    how = {"temperature": temperature, "seed": 4, "grammar": grammar.json_schema(PLACE)}
    assert answer.message.content == engine.generate_ar(engine.encode_chat(TALK), 120, **how).text
    got = list(ask(api, response_format=form, temperature=temperature, seed=4, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in got) == answer.message.content


def test_any_json_object(api):
    answer = ask(api, response_format={"type": "json_object"}, temperature=0.9, seed=1).choices[0]
    assert answer.message.content.startswith("{")
    assert answer.finish_reason == "length" or isinstance(json.loads(answer.message.content), dict)


@pytest.mark.parametrize(
    ("form", "sentence"),
    [
        ({"type": "json_schema"}, "response_format json_schema needs json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}, ""),
    ],
)
def test_bad_schemas_get_one_sentence(api, form, sentence):
    with pytest.raises(openai.BadRequestError) as error:
        ask(api, response_format=form)
    said = error.value.body["message"]
    assert sentence in said and "\n" not in said


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "move"}}], ids=str)
def test_a_call_that_must_come_is_valid(api, choice, temperature):
    how = {"tools": TOOLS, "tool_choice": choice, "temperature": temperature, "seed": 3}
    [answer] = ask(api, **how).choices
    [call] = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    arguments = json.loads(call.function.arguments)
    assert call.function.name in ("move", "stop") and (choice == "required" or call.function.name == "move")
    assert call.function.name != "move" or 0 <= arguments["x"] <= 99
    got = [c.choices[0] for c in ask(api, **how, stream=True)]
    [streamed] = [each for c in got for each in c.delta.tool_calls or []]
    assert (streamed.function.name, streamed.function.arguments) == (call.function.name, call.function.arguments)
    assert streamed.index == 0 and streamed.id != call.id  # a conversation may hold the calls of several answers
    assert got[-1].finish_reason == "tool_calls" and not any(c.delta.content for c in got)


def test_a_call_begins_with_the_token_of_its_tag(api):
    [choice] = ask(api, tools=TOOLS, tool_choice="required", logprobs=True).choices
    assert [one.token for one in choice.logprobs.content[:2]] == ["<tool_call>", "\n"]


def test_a_text_that_its_grammar_ends_too_early_is_an_error(engine, api, answer_with):
    answer_with(form=grammar.lark('start: "ab<|mask|>"'))  # no text
    said = "the text cannot go on: the grammar allows none of the model's tokens"
    with pytest.raises(openai.BadRequestError, match=said):
        ask(api)
    with pytest.raises(openai.APIError, match=said):
        list(ask(api, stream=True))


def test_tools_may_be_left_alone(engine, api):
    free_text = ask(api, tools=TOOLS, temperature=0.0).choices[0]
    assert free_text.message.tool_calls is None and free_text.finish_reason in ("length", "stop")
    none = ask(api, tools=TOOLS, tool_choice="none", temperature=0.0).choices[0]
    assert none.message.tool_calls is None
    assert none.message.content != ask(api, temperature=0.0).choices[0].message.content  # the template has the tools


def test_a_conversation_with_calls_reaches_the_template(engine, api):
    call = {"id": "1", "type": "function", "function": {"name": "move", "arguments": '{"x": 7}'}}
    talk = [*TALK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    answer = api.chat.completions.create(model="tiny", messages=talk, max_tokens=5, temperature=0)
    assert answer.usage.prompt_tokens == len(engine.encode("ab cd7"))


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "fly"}}}, "names 'fly'"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "2 tools are named 'move'"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "tools and response_format exclude each other"),
    ],
)
def test_bad_tools_get_one_sentence(api, more, sentence):
    with pytest.raises(openai.BadRequestError, match=sentence):
        ask(api, **more)


def test_the_limit_ends_an_answer_with_a_call(engine, api, answer_with):
    said = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>' + " ab" * 99
    answer_with(said)
    [choice] = ask(api, tools=TOOLS, temperature=0).choices
    assert choice.message.tool_calls and choice.finish_reason == "length"


TEXT = (
    'Well.\n<tool_call>\n{"name": "move", "arguments": {"x": 1}}\n</tool_call>\n'
    '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
)


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_calls_are_taken_out_of_a_text_in_pieces(size):
    calls, found = Calls(Hermes(), {}), []
    pieces = [TEXT[n : n + size] for n in range(0, len(TEXT), size)]
    for n, piece in enumerate(pieces):
        found += calls.add(piece, last=n == len(pieces) - 1)
    assert "".join(segment.text for segment in found if segment.kind == "text") == "Well."
    made = [segment.call for segment in found if segment.call is not None]
    assert [c["function"] for c in made] == [
        {"name": "move", "arguments": '{"x": 1}'},
        {"name": "stop", "arguments": "{}"},
    ]
    assert [c["index"] for c in made] == [0, 1] and len({c["id"] for c in made}) == 2


@pytest.mark.parametrize("text", ["a < b", "x <tool_cal", "<tool_call>\n{"])
def test_what_only_looks_like_a_call_stays_text(text):
    calls = Calls(Hermes(), {})
    got = [segment for n, piece in enumerate(text) for segment in calls.add(piece, last=n == len(text) - 1)]
    assert "".join(segment.text for segment in got) == text and not calls.found
