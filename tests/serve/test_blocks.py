"""The endpoints /v1/responses and /v1/messages: the texts of the chat endpoint in the forms of their APIs."""

import json
import logging
import re

import openai
import pytest
from make_checkpoint import make
from make_harmony import IDS
from serving import free, serving

import specker
from specker.answers import harmony
from specker.answers.reader import Reading
from specker.answers.tool_formats import Hermes
from specker.runtime.events import Event
from specker.serve.blocks import Block, Blocks
from specker.serve.messages import MessagesRequest, _content
from specker.serve.pieces import Piece
from specker.serve.responses import ResponseRequest

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.reasoning_content }}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments.x }}{% endfor %}{{ '\n' }}{% endfor %}"
    "{% for t in tools or [] %}<tool_call>{{ t.function.name }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}{# </think> #}"
)
ALL = '<think>because</think>Well.\n<tool_call>\n{"name": "move", "arguments": {"x": 1}}\n</tool_call>'
PLACE = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    target = make(tmp_path_factory.mktemp("models"), "qwen2", layers=1, max_context=400, tokenizer=True, eos=256)
    (target / "chat_template.jinja").write_text(TEMPLATE)
    return specker.load(target, strategy="lookup", dtype="float64", device="cpu", batch_size=2, prefix_cache="all")


@pytest.fixture(scope="module")
def client(engine):
    with serving(engine, name="tiny", api_key="secret") as client:
        client.headers["x-api-key"] = "secret"
        yield client
        assert free(engine)


def events(client, path, **body):
    with client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        blocks = answer.read().decode().strip().split("\n\n")
    found = []
    for block in blocks:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def without(body, *names):
    """A body without ids and times, which every answer has for itself."""
    if isinstance(body, list):
        return [without(each, *names) for each in body]
    if not isinstance(body, dict):
        return body
    return {k: without(v, *names) for k, v in body.items() if k not in ("id", "call_id", "created_at", *names)}


# --- responses


def test_a_response_is_the_text_of_a_chat(engine, client):
    talk = [{"role": "system", "content": "be"}, {"role": "user", "content": "ab cd"}]
    want = engine.generate(engine.encode_chat(talk), 12, temperature=0.8, seed=3)
    ask = {"instructions": "be", "max_output_tokens": 12, "temperature": 0.8, "seed": 3}
    body = client.post("/v1/responses", json={"input": "ab cd", **ask, "store": True}).json()
    [message] = body["output"]
    assert message["content"][0] == {"type": "output_text", "text": want.text, "annotations": [], "logprobs": []}
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (body["object"], body["model"], body["store"], body["temperature"]) == ("response", "tiny", False, 0.8)
    assert body["usage"]["output_tokens"] == 12 and body["usage"]["input_tokens"] == len(engine.encode_chat(talk))
    parts = [{"type": "input_text", "text": "ab "}, {"type": "input_text", "text": "cd"}]
    given = [{"role": "developer", "content": "be"}, {"type": "message", "role": "user", "content": parts}]
    ask.pop("instructions")
    again = client.post("/v1/responses", json={"input": given, **ask}).json()
    assert without(again["output"]) == without(body["output"])


def test_the_events_of_a_response(client, answer_with):
    answer_with(ALL)
    asked = {"input": "ab", "tools": [{"type": "function", "name": "move", "parameters": PLACE}]}
    whole = client.post("/v1/responses", json=asked).json()
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]
    assert whole["output"][0]["content"] == [{"type": "reasoning_text", "text": "because"}]
    assert whole["output"][1]["content"][0]["text"] == "Well."
    call = whole["output"][2]
    assert (call["name"], json.loads(call["arguments"])) == ("move", {"x": 1})
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == len("<think>because</think>")
    got = events(client, "/v1/responses", **asked)
    assert [event["sequence_number"] for event in got] == list(range(len(got)))
    assert [got[0]["type"], got[1]["type"]] == ["response.created", "response.in_progress"]
    assert got[-1]["type"] == "response.completed" and got[0]["response"]["id"] == got[-1]["response"]["id"]
    assert without(got[-1]["response"], "usage") == without(whole, "usage")
    for n, (kind, text) in enumerate([("reasoning_text", "because"), ("output_text", "Well.")]):
        own = [e for e in got if e.get("output_index") == n]
        assert [e["type"] for e in own[:2]] == ["response.output_item.added", "response.content_part.added"]
        assert "".join(e["delta"] for e in own if e["type"] == f"response.{kind}.delta") == text
        ends = [f"response.{kind}.done", "response.content_part.done", "response.output_item.done"]
        assert [e["type"] for e in own[-3:]] == ends and own[-3]["text"] == own[-2]["part"]["text"] == text
    own = [e for e in got if e.get("output_index") == 2]
    kinds = ["response.function_call_arguments.delta", "response.function_call_arguments.done"]
    assert [e["type"] for e in own] == ["response.output_item.added", *kinds, "response.output_item.done"]
    assert own[0]["item"]["arguments"] == "" and own[1]["delta"] == own[2]["arguments"] == call["arguments"]


def test_items_and_blocks_are_in_the_order_of_the_text(client, answer_with):
    answer_with(f"{ALL}\nNow wait.")  # the rounds cross the ends of the blocks
    asked = {"input": "ab", "tools": [{"type": "function", "name": "move", "parameters": PLACE}]}
    output = client.post("/v1/responses", json=asked).json()["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "message"]
    assert [output[n]["content"][0]["text"] for n in (1, 3)] == ["Well.", "Now wait."]
    asked = {"max_tokens": 200, "messages": [TURN], "tools": [{"name": "move", "input_schema": PLACE}]}
    content = client.post("/v1/messages", json=asked).json()["content"]
    assert [block["type"] for block in content] == ["thinking", "text", "tool_use", "text"]
    assert [content[n]["text"] for n in (1, 3)] == ["Well.", "Now wait."]
    got = events(client, "/v1/messages", **asked)
    assert [e["content_block"]["type"] for e in got if "content_block" in e] == [block["type"] for block in content]


MOVE = ALL[ALL.index("<tool_call>") :]
CHANNELS = [
    ("commentary", "Look."),
    ("analysis", "so"),
    ("commentary to=functions.move", '{"x": 1}'),
    ("final", "Yes."),
]
TEXTS = {  # the reading, the text, and the kinds of its blocks
    "tags": (
        Reading(False, Hermes(), {"move": PLACE}),
        f"{ALL} Now{MOVE}\n{MOVE} wait.",
        ["reasoning", "text", "call", "text", "call", "call", "text"],
    ),
    "channels": (
        Reading(harmony=harmony.of(IDS), functions={"move": PLACE}),
        "".join(f"<|start|>assistant<|channel|>{to}<|message|>{text}<|end|>" for to, text in CHANNELS),
        ["text", "reasoning", "call", "text"],
    ),
}


@pytest.mark.parametrize("form", TEXTS)
def test_blocks_do_not_depend_on_the_tokens_of_a_round(form):
    reading, text, kinds = TEXTS[form]
    tokens = [(IDS.get(part, 0), "" if part in IDS else part) for part in re.findall(r"<\|\w+\|>|[^<]|<", text)]
    made = {}
    for size in (1, 5, 17, 1000):
        reader, answer = reading.reader(), Blocks()
        for n in range(0, len(tokens), size):
            ids, texts = map(list, zip(*tokens[n : n + size], strict=True))
            event = Event(None, ids, 0, texts, "", [], "stop" if n + size >= len(tokens) else None)
            steps = [*answer.add(Piece(0, reader.read(event), [], event.finished))]
        made[size] = [(block.kind, block.text) for block in answer.blocks]
    assert [kind for kind, _ in made[1]] == kinds and made[1] == made[5] == made[17] == made[1000]
    assert [step.what for step in steps] == ["begin", "more", "end"] * len(kinds)  # one event for all of a round


def test_a_schema_and_a_conversation_with_openais_client(engine, client):
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="secret", max_retries=0) as api:
        form = {"format": {"type": "json_schema", "name": "place", "schema": PLACE, "strict": True}}
        with api.responses.stream(model="tiny", input="ab", text=form, temperature=0) as stream:
            deltas = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
            answer = stream.get_final_response()
        assert json.loads(answer.output_text)["x"] in (1, 2) and deltas == answer.output_text
        given = [
            {"role": "user", "content": "ab"},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
            *[item.model_dump() for item in answer.output],
            {"type": "function_call", "call_id": "1", "name": "move", "arguments": '{"x": 2}'},
            {"type": "function_call", "call_id": "2", "name": "move", "arguments": '{"x": 1}'},
            {"type": "function_call_output", "call_id": "1", "output": "done"},
        ]
        talk = "user: ab\nassistant: so" + answer.output_text + "move2move1\ntool: done\nassistant: "
        answer = api.responses.create(model="tiny", input=given, temperature=0, max_output_tokens=9)
        assert answer.usage.input_tokens == len(engine.encode(talk))
        assert answer.output_text == engine.generate(talk, 9).text
        with pytest.raises(openai.BadRequestError, match="previous_response_id is not supported: no response is kept"):
            api.responses.create(model="tiny", input="ab", previous_response_id=answer.id)


TURN = {"role": "user", "content": "a"}
BAD = {
    "a field that does not exist": ({"max_tokens": 3}, "there is no field 'max_tokens'"),
    "a conversation": ({"conversation": "c"}, "conversation is not supported: no response is kept"),
    "background": ({"background": True}, "background is not supported"),
    "no input": ({"input": None}, "input: Input should be a valid list"),
    "an image": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content: a part must have a text, and its type must be input_text or",
    ),
    "an item of a kind": ({"input": [TURN, {"type": "web_search_call"}]}, "input[1].type: Input should be 'message'"),
    "half a call": ({"input": [{"type": "function_call", "name": "f"}]}, "input[0]: a function_call needs call_id"),
    "a broken call": (
        {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}]},
        "input.arguments: must be a string with JSON in it",
    ),
    "a tool of another kind": ({"tools": [{"type": "web_search"}]}, "tools[0].type: Input should be 'function'"),
    "a schema that is none": ({"text": {"format": {"type": "json_schema"}}}, "text.format json_schema needs schema"),
    "half a surrogate pair": ({"input": "\ud800"}, "input: the text has half of a surrogate pair"),
    "a tool without a number": (
        {"tools": [{"type": "function", "name": "f", "parameters": {"a": [float("nan")]}}], "tool_choice": "none"},
        "tools[0].parameters.a[0]: the number is not finite",
    ),
    "an empty input": ({"input": []}, "input: List should have at least 1 item"),
    "the name of a tool": ({"tools": [{"type": "function", "name": "f f"}]}, "tools[0].name: String should match"),
    "a tool and a format": (
        {
            "tools": [{"type": "function", "name": "f"}],
            "text": {"format": {"type": "json_schema", "name": "x", "schema": {}}},
        },
        "tools and text.format exclude each other",
    ),
    "the choice of a tool alone": ({"tool_choice": "required"}, "tool_choice needs tools"),
    "temperature": ({"temperature": -1}, "temperature must be 0 or at least"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_field_of_a_response_gets_one_sentence(client, case):
    fields, sentence = BAD[case]
    answer = client.post("/v1/responses", content=json.dumps({"input": "ab", **fields}), headers=JSON)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert message.startswith(sentence) and "\n" not in message


# --- messages


def test_a_message_is_the_text_of_a_chat(engine, client):
    talk = [{"role": "system", "content": "be"}, {"role": "user", "content": "ab cd"}]
    want = engine.generate(engine.encode_chat(talk), 12)
    asked = {"max_tokens": 12, "messages": [{"role": "user", "content": "ab cd"}], "temperature": 0}
    system = [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}]
    body = client.post("/v1/messages", json={**asked, "system": system}).json()
    assert body["content"] == [{"type": "text", "text": want.text}]
    assert (body["type"], body["role"], body["model"], body["stop_reason"]) == (
        "message",
        "assistant",
        "tiny",
        "max_tokens",
    )
    usage = body["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(engine.encode_chat(talk))
    assert usage["output_tokens"] == 12
    again = client.post("/v1/messages", json={**asked, "system": system}).json()["usage"]
    assert again["cache_read_input_tokens"] > 0
    assert again["input_tokens"] + again["cache_read_input_tokens"] == len(engine.encode_chat(talk))
    stops = ["never", want.text[5:8], want.text[6:8]]
    body = client.post("/v1/messages", json={**asked, "system": "be", "stop_sequences": stops}).json()
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", want.text[5:8])
    assert body["content"][0]["text"] == want.text[: want.text.index(want.text[5:8])]
    begun = [*talk, {"role": "assistant", "content": "ef"}]
    more = client.post("/v1/messages", json={**asked, "system": "be", "messages": begun[1:]}).json()
    want = engine.generate(engine.encode_chat(begun, add_generation_prompt=False, continue_final_message=True), 12)
    assert more["content"][0]["text"] == want.text


def test_the_events_of_a_message(client, answer_with):
    answer_with(ALL)
    tool = {"name": "move", "input_schema": PLACE}
    asked = {"max_tokens": 200, "messages": [TURN], "tools": [tool]}
    whole = client.post("/v1/messages", json=asked).json()
    assert whole["content"][:2] == [
        {"type": "thinking", "thinking": "because", "signature": ""},
        {"type": "text", "text": "Well."},
    ]
    call = whole["content"][2]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "move", {"x": 1})
    assert whole["stop_reason"] == "tool_use"
    got = events(client, "/v1/messages", **asked)
    assert got[0]["message"]["content"] == [] and got[0]["message"]["usage"]["output_tokens"] == 0
    assert got[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert [got[0]["type"], got[-1]["type"]] == ["message_start", "message_stop"]
    assert got[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    for n, text in enumerate(["because", "Well.", '{"x": 1}']):
        own = [event for event in got if event.get("index") == n]
        kinds = ["content_block_start", *["content_block_delta"] * (len(own) - 2), "content_block_stop"]
        assert [event["type"] for event in own] == kinds
        name = ("thinking", "text", "partial_json")[n]
        assert "".join(event["delta"][name] for event in own[1:-1]) == text
    assert [e["content_block"]["type"] for e in got if "content_block" in e] == ["thinking", "text", "tool_use"]


def test_a_conversation_with_tools_reaches_the_template(engine, client):
    used = [
        {"type": "thinking", "thinking": "so", "signature": ""},
        {"type": "text", "text": "Well"},
        {"type": "tool_use", "id": "1", "name": "move", "input": {"x": 2}},
    ]
    result = [
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "done"}]},
        {"type": "text", "text": "go on"},
    ]
    messages = [TURN, {"role": "assistant", "content": used}, {"role": "user", "content": result}]
    asked = {"max_tokens": 9, "messages": messages, "temperature": 0}
    talk = "user: a\nassistant: soWellmove2\ntool: done\nuser: go on\nassistant: "
    body = client.post("/v1/messages", json=asked).json()
    assert body["content"][0]["text"] == engine.generate(talk, 9).text


def test_a_tool_that_must_be_used_and_a_schema(client):
    tools = [{"name": "move", "input_schema": PLACE}, {"name": "stop", "input_schema": {"type": "object"}}]
    asked = {"max_tokens": 200, "messages": [TURN], "temperature": 0}
    for choice in ({"type": "tool", "name": "move"}, {"type": "any"}):
        [block] = client.post("/v1/messages", json={**asked, "tools": tools[:1], "tool_choice": choice}).json()[
            "content"
        ]
        assert block["type"] == "tool_use" and block["input"]["x"] in (1, 2)
    form = {"format": {"type": "json_schema", "schema": PLACE}}
    [block] = client.post("/v1/messages", json={**asked, "output_config": form}).json()["content"]
    assert json.loads(block["text"])["x"] in (1, 2)


BAD_MESSAGES = {
    "a field that does not exist": ({"n": 3}, "there is no field 'n'"),
    "no limit": ({"max_tokens": None}, "max_tokens: Input should be a valid integer"),
    "thinking": ({"thinking": {"type": "deep"}}, "thinking.type: Input should be 'enabled', 'adaptive' or 'disabled'"),
    "thoughts that are not shown": ({"thinking": {"type": "enabled", "display": "omitted"}}, "thinking.display: Input"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages[0].content[0].type: Input should be 'text'",
    ),
    "half a call": (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}]},
        "messages[0].content[0]: a tool_use needs id",
    ),
    "an image of a tool": (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{}]}]}]},
        "messages[0].content[0].content: a part must have a text, and its type must be text",
    ),
    "a tool that is none": (
        {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool", "name": "g"}},
        "tool_choice names 'g', which is none of the tools",
    ),
    "two tools of one name": (
        {"tools": [{"name": "stop", "input_schema": {}}] * 2},
        "2 tools are named 'stop'",
    ),
    "many ends": ({"stop_sequences": ["a"] * 17}, "stop_sequences: at most 16 strings"),
    "a tool and a format": (
        {
            "tools": [{"name": "f", "input_schema": {}}],
            "output_config": {"format": {"type": "json_schema", "schema": {}}},
        },
        "tools and output_config.format exclude each other",
    ),
    "a tool of the server": ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type: Input should be"),
}


@pytest.mark.parametrize("case", BAD_MESSAGES)
def test_a_bad_field_of_a_message_gets_one_sentence(client, case):
    fields, sentence = BAD_MESSAGES[case]
    answer = client.post("/v1/messages", json={"max_tokens": 9, "messages": [TURN], **fields})
    assert answer.status_code == 400, answer.text
    body = answer.json()
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith(sentence) and "\n" not in body["error"]["message"]


def test_errors_have_the_form_of_their_endpoint(client):
    asked = {"max_tokens": 9, "messages": [TURN]}
    for path, form in (("/v1/messages", {"type", "error"}), ("/v1/responses", {"error"})):
        answer = client.post(path, json=asked, headers={"x-api-key": "wrong"})
        assert answer.status_code == 401 and set(answer.json()) == form
    assert client.post("/v1/messages", json=asked, headers={"x-api-key": ""}).status_code == 401
    body = client.post("/v1/messages", json={**asked, "model": "other"}).json()
    assert body["error"] == {
        "type": "not_found_error",
        "message": "the model 'other' is not served here, but 'tiny' is",
    }


def test_calls_that_fail_say_so_in_their_streams(engine, client, before_steps, answer_with):
    def fails():
        raise RuntimeError("no")

    answer_with("ab<|mask|>")  # text cannot spell a special token
    assert events(client, "/v1/responses", input="ab")[-1]["response"]["error"]["code"] == "invalid_prompt"
    before_steps(engine, fails)
    got = events(client, "/v1/messages", max_tokens=9, messages=[TURN])
    said = "the round failed; the server's log says why"
    assert got[-1] == {"type": "error", "error": {"type": "api_error", "message": said}}
    got = events(client, "/v1/responses", input="ab")
    assert got[-1]["type"] == "response.failed"
    assert got[-1]["response"]["error"] == {"code": "server_error", "message": said}


def test_calls_are_logged_without_their_texts(client, caplog):
    with caplog.at_level(logging.INFO, "specker.serve"):
        body = client.post("/v1/responses", json={"input": "ab", "max_output_tokens": 5}).json()
        events(client, "/v1/messages", max_tokens=5, messages=[TURN])
    whole, stream = caplog.messages
    assert whole.startswith(f"{body['id']}: {body['usage']['input_tokens']} + 5 tokens, ") and whole.endswith("length")
    assert stream.startswith("msg_") and " + 5 tokens, " in stream and "tokens a round" in stream


def test_one_call_is_asked_for_in_each_api():
    tool, choice = {"name": "f", "input_schema": {}}, {"type": "auto", "disable_parallel_tool_use": True}
    message = MessagesRequest(max_tokens=1, messages=[TURN], tools=[tool], tool_choice=choice)
    assert message.chat.parallel_tool_calls is False
    response = ResponseRequest(input="ab", tools=[{"type": "function", "name": "f"}], parallel_tool_calls=False)
    assert response.chat.parallel_tool_calls is False


def test_the_input_of_a_call_is_finite():
    json.dumps(_content(Block("call", '{"x": 1e999}')), allow_nan=False)  # Harmony's arguments stand as they are


def test_items_of_one_turn_are_one_message():
    given = [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "c"}]},
        {"type": "function_call", "call_id": "2", "name": "f", "arguments": "{}"},
        {"role": "system", "content": "d"},
    ]
    made = [m.plain() for m in ResponseRequest(input=given, instructions="e").chat.messages]
    assert [(m["role"], m["content"], len(m.get("tool_calls", ()))) for m in made] == [
        ("system", "e", 0),
        ("assistant", "a", 0),
        ("assistant", "b", 1),
        ("assistant", "", 1),
        ("system", "d", 0),
    ]
    assert made[3]["reasoning_content"] == "c"
    joined = ResponseRequest(input=[{"role": "developer", "content": "f"}], instructions="e").chat.messages
    assert [m.content for m in joined] == ["e\n\nf"]


def test_an_answer_goes_on_from_a_text_only():
    used = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    for content, goes_on in (("a", True), ([used], False)):
        asked = MessagesRequest(max_tokens=1, messages=[TURN, {"role": "assistant", "content": content}])
        assert asked.chat.continue_final_message is goes_on
