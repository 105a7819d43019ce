"""Clients from PyPI against a live server: each gets the engine's text, whole and streamed, and its tools' calls."""

import json
import subprocess
from typing import Literal

import openai
import pytest
from make_checkpoint import add_tokens, make
from pydantic import BaseModel
from serving import free, serving

import specker

TALK = [{"role": "user", "content": "ab cd"}]
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}<tool_call>{% endfor %}{% for m in messages %}{{ m.role }}: "
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class Place(BaseModel):
    x: Literal[1, 2]


SCHEMA = {**Place.model_json_schema(), "additionalProperties": False}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    target = make(tmp_path_factory.mktemp("models"), "qwen2", layers=1, max_context=500, tokenizer=True)
    add_tokens(target, "<tool_call>", "</tool_call>")
    (target / "chat_template.jinja").write_text(TEMPLATE)
    return specker.load(target, strategy="lookup", dtype="float64", device="cpu", batch_size=2)


@pytest.fixture(scope="module")
def url(engine):
    with serving(engine, name="tiny", api_key="secret") as client:
        yield str(client.base_url)
        assert free(engine)


@pytest.fixture(scope="module")
def want(engine):
    return engine.generate(engine.encode_chat(TALK), 12).text


@pytest.fixture(scope="module")
def api(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as api:
        yield api


# --- openai


def test_openai_completions_and_responses(engine, api, want):
    prompt = "user: ab cd\nassistant: "
    assert api.completions.create(model="tiny", prompt=prompt, max_tokens=12).choices[0].text == want
    got = api.completions.create(model="tiny", prompt=prompt, max_tokens=12, stream=True)
    assert "".join(chunk.choices[0].text for chunk in got) == want
    ask = {"model": "tiny", "input": "ab cd", "max_output_tokens": 12}
    assert api.responses.create(**ask).output_text == want
    alone = {"cache_salt": "alone"}  # else the whole answer is one draft, copied from the one before
    events = api.responses.create(**ask, stream=True, extra_body=alone)
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(deltas) == want and len(deltas) > 2


def test_openai_parses_forms(api):
    asked = {"model": "tiny", "temperature": 0}
    made = api.chat.completions.parse(messages=TALK, response_format=Place, **asked)
    assert made.choices[0].message.parsed.x in (1, 2)
    made = api.responses.parse(input="ab", text_format=Place, **asked)
    assert made.output_parsed.x in (1, 2)


def test_openai_uses_tools(api):
    tool = openai.pydantic_function_tool(Place, name="move")
    asked = {"model": "tiny", "messages": TALK, "temperature": 0, "max_tokens": 200}
    made = api.chat.completions.parse(**asked, tools=[tool], tool_choice="required")
    [call] = made.choices[0].message.tool_calls
    assert call.function.name == "move" and call.function.parsed_arguments.x in (1, 2)
    with api.chat.completions.stream(**asked, tools=[tool], tool_choice="required") as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert [event.parsed_arguments for event in done] == [call.function.parsed_arguments]
    talk = [*TALK, made.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    again = api.chat.completions.create(model="tiny", messages=talk, tools=[tool], max_tokens=3)
    assert again.choices[0].finish_reason == "length"
    tool = {"type": "function", "name": "move", "parameters": SCHEMA, "strict": True}
    made = api.responses.create(model="tiny", input="ab", tools=[tool], tool_choice="required", temperature=0)
    [item] = made.output
    assert (item.type, item.name) == ("function_call", "move") and json.loads(item.arguments)["x"] in (1, 2)
    result = {"type": "function_call_output", "call_id": item.call_id, "output": "done"}
    given = [{"role": "user", "content": "ab"}, *made.output, result]
    again = api.responses.create(model="tiny", input=given, tools=[tool], max_output_tokens=3)
    assert again.status == "incomplete" and again.usage.output_tokens == 3


# --- anthropic


@pytest.fixture(scope="module")
def anthropic():
    import anthropic  # takes two seconds, which other workers save

    return anthropic


@pytest.fixture(scope="module")
def claude(anthropic, url):
    with anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0) as claude:
        yield claude


def test_anthropic_messages(anthropic, claude, want):
    asked = {"model": "tiny", "max_tokens": 12, "messages": TALK}
    made = claude.messages.create(**asked)
    assert made.content[0].text == want and made.stop_reason == "max_tokens" and made.usage.output_tokens == 12
    with claude.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == want
        final = stream.get_final_message()
    assert final.content[0].text == want and final.usage.output_tokens == 12
    counted = claude.messages.count_tokens(model="tiny", messages=TALK, thinking={"type": "disabled"})
    assert counted.input_tokens == made.usage.input_tokens + (made.usage.cache_read_input_tokens or 0)
    with pytest.raises(anthropic.NotFoundError, match="the model 'other' is not served here"):
        claude.messages.create(**{**asked, "model": "other"})
    with pytest.raises(anthropic.AuthenticationError, match="the API key is missing or wrong"):
        claude.with_options(api_key="wrong").messages.create(**asked)
    with anthropic.Anthropic(base_url=claude.base_url, auth_token="secret") as bearer:
        assert bearer.models.list().data[0].id == bearer.models.retrieve("tiny").id == "tiny"


def test_anthropic_uses_tools(claude):
    asked = {"model": "tiny", "max_tokens": 200}
    tools = [{"name": "move", "description": "Go there.", "input_schema": SCHEMA}]
    how = {"tools": tools, "tool_choice": {"type": "any"}}
    made = claude.messages.create(messages=TALK, **how, **asked)
    [block] = made.content
    assert (block.type, block.name, made.stop_reason) == ("tool_use", "move", "tool_use") and block.input["x"] in (1, 2)
    with claude.messages.stream(messages=TALK, **how, **asked) as stream:
        [streamed] = stream.get_final_message().content
    assert streamed.input == block.input
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "done"}
    talk = [*TALK, {"role": "assistant", "content": made.content}, {"role": "user", "content": [result]}]
    again = claude.messages.create(messages=talk, tools=tools, **asked | {"max_tokens": 3})
    assert again.stop_reason == "max_tokens"
    assert claude.messages.parse(messages=TALK, output_format=Place, **asked).parsed_output.x in (1, 2)


# --- llm, litellm, LangChain


def test_the_package_llm(url, want, tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    from llm.default_plugins.openai_models import Chat as Model

    model = Model("local", model_name="tiny", api_base=f"{url}/v1", key="secret")
    answer = model.prompt("ab cd", temperature=0, max_tokens=12)
    assert answer.text() == want
    assert model.prompt("ab cd", temperature=0, max_tokens=12, stream=False).text() == want


LITELLM = """
import json, litellm, sys
url, talk = sys.argv[1], [{"role": "user", "content": "ab cd"}]
how = {"model": "openai/tiny", "api_base": f"{url}/v1", "api_key": "secret", "temperature": 0, "max_tokens": 12}
whole = litellm.completion(messages=talk, **how).choices[0].message.content
parts = [c.choices[0].delta.content or "" for c in litellm.completion(messages=talk, stream=True, **how)]
# aider: a system message, examples as turns, files with an assistant's reply, and then the question; always streamed
turns = ["system", "user", "assistant", "user", "assistant", "user"]
edits = [{"role": role, "content": f"text {n}"} for n, role in enumerate(turns)]
how["max_tokens"] = 5
asked = litellm.completion(messages=edits, stream=True, timeout=600, drop_params=False, **how)
edit = "".join(c.choices[0].delta.content or "" for c in asked)
tool = {"type": "function", "function": {"name": "move", "parameters": json.loads(sys.argv[2])}}
how["max_tokens"] = 200
called = litellm.completion(messages=talk, tools=[tool], tool_choice="required", **how).choices[0].message.tool_calls
claude = litellm.completion(messages=talk, **{**how, "model": "anthropic/tiny", "api_base": url, "max_tokens": 12})
print(json.dumps([whole, "".join(parts), edit, called[0].function.arguments, claude.choices[0].message.content]))
"""


@pytest.mark.slow  # installs it
def test_the_package_litellm_and_what_aider_asks_through_it(engine, url, want):
    whole, streamed, edit, arguments, claude = asked("litellm", LITELLM, url)
    assert whole == streamed == claude == want and json.loads(arguments)["x"] in (1, 2)
    turns = ["system", "user", "assistant", "user", "assistant", "user"]
    talk = [{"role": role, "content": f"text {n}"} for n, role in enumerate(turns)]
    assert edit == engine.generate(engine.encode_chat(talk), 5).text


LANGCHAIN = """
import json, sys
from langchain_openai import ChatOpenAI
how = {"model": "tiny", "base_url": f"{sys.argv[1]}/v1", "api_key": "secret", "temperature": 0}
model = ChatOpenAI(max_tokens=12, **how)
whole, parts = model.invoke("ab cd").text, [chunk.text for chunk in model.stream("ab cd")]
called = ChatOpenAI(**how).bind_tools([{"name": "move", "description": "Go.", "parameters": json.loads(sys.argv[2])}],
                                      tool_choice="required").invoke("ab cd").tool_calls
form = ChatOpenAI(**how).with_structured_output(json.loads(sys.argv[2]) | {"title": "place"}, method="json_schema")
responses = ChatOpenAI(max_tokens=12, use_responses_api=True, **how).invoke("ab cd").text
print(json.dumps([whole, "".join(parts), called[0]["args"], form.invoke("ab cd"), responses]))
"""


@pytest.mark.slow  # installs it
def test_the_package_langchain_openai(url, want):
    whole, streamed, arguments, form, responses = asked("langchain", LANGCHAIN, url)
    assert whole == streamed == responses == want
    assert arguments["x"] in (1, 2) and form["x"] in (1, 2)


def asked(package, script, url):
    from bench.peer_settings import installed

    command = [installed(package), "-c", script, url, json.dumps(SCHEMA)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
