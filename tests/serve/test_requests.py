"""Requests that are wrong as a whole or in an odd field: the answer is one sentence in the words of its API."""

import re

import pytest
from make_checkpoint import make
from pydantic import ValidationError
from serving import serving

import specker
from specker.serve.api import Chat, Completion
from specker.serve.messages import MessagesRequest
from specker.serve.responses import ResponseRequest

JSON = {"content-type": "application/json"}
CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
TALK = [{"role": "user", "content": "ab"}]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
UNREADABLE = "the body is not JSON in UTF-8, or has a number of too many digits or is nested too deeply"
JARGON = re.compile(r"pydantic|dictionary or object|validation|parsing|parse|discriminator|NoExtension|fractional")


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    target = make(tmp_path_factory.mktemp("models") / "target", "qwen2", layers=1, max_context=400, tokenizer=True)
    (target / "chat_template.jinja").write_text(TEMPLATE)
    return specker.load(target, strategy="ar", device="cpu", batch_size=2)


@pytest.fixture(scope="module")
def client(engine):
    with serving(engine, name="tiny") as client:
        yield client


def said(answer, status=400):
    assert answer.status_code == status, answer.text
    message = answer.json()["error"]["message"]
    assert not JARGON.search(message) and "\n" not in message
    return message


def post(client, path, **body):
    return client.post(path, json={"max_tokens": 2, **body})


# --- the body

READS = {
    "nothing": (b"", "the body is missing: a JSON object"),
    "half of it": (b'{"prompt"', "the body is not JSON"),
    "a list": (b"[]", "the body must be a JSON object"),
    "many digits": (b'{"seed": ' + b"1" * 5000 + b"}", UNREADABLE),
    "many brackets": (b"[" * 100_000, UNREADABLE),
    "latin-1": (b'{"prompt": "\xff"}', UNREADABLE),
}


@pytest.mark.parametrize("path", [COMPLETION, MESSAGES])
@pytest.mark.parametrize(("body", "sentence"), READS.values(), ids=READS)
def test_a_body_that_cannot_be_read(client, path, body, sentence):
    assert said(client.post(path, content=body, headers=JSON)) == sentence


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "x"])
def test_a_body_of_another_content_type(client, kind):
    answer = client.post(COMPLETION, content=b'{"prompt": "a"}', headers={"content-type": kind} if kind else {})
    assert said(answer) == "the header Content-Type must be application/json"


def test_the_head_of_what_can_be_got(client):
    for path in ("/health", "/", "/v1/models", "/v1/models/tiny", "/metrics"):
        got, head = client.get(path), client.head(path)
        assert got.status_code == head.status_code == 200 and head.content == b""
        assert head.headers["content-type"] == got.headers["content-type"]
    assert client.head(COMPLETION).status_code == 405
    assert said(client.get(CHAT), 405) == "Method Not Allowed: GET /v1/chat/completions"
    assert said(client.get("/" + "a" * 99), 404) == f"Not Found: GET /{'a' * 59}"


# --- fields


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("model", [Completion, Chat, ResponseRequest, MessagesRequest])
def test_truth_is_no_number(model, value):
    whole = {Completion: {"prompt": "a"}, Chat: {"messages": TALK}, ResponseRequest: {"input": "a"}}
    whole |= {MessagesRequest: {"messages": TALK, "max_tokens": 1}}
    numbers = {"max_tokens", "max_output_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p"}
    numbers |= {"presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "n", "best_of", "top_logprobs"}
    numbers = sorted(numbers & {*model.model_fields}) + (["logprobs"] if model is Completion else [])
    assert len(numbers) > 3
    for name in numbers:
        with pytest.raises(ValidationError, match="true and false are not allowed here"):
            model(**whole[model] | {name: value})
    with pytest.raises(ValidationError, match="true and false are not allowed here"):
        Completion(prompt="a", logit_bias={"5": value})
    for name in {"stream", "echo", "logprobs", "ignore_eos", "parallel_tool_calls"} & {*model.model_fields} - {
        *numbers
    }:
        model(**whole[model] | {name: value})
    assert Chat(messages=TALK, chat_template_kwargs={"enable_thinking": value}).chat_template_kwargs


FIELDS = {
    "a number": ({"max_tokens": "x"}, "max_tokens: Input should be a valid integer"),
    "a fraction": ({"max_tokens": 1.5}, "max_tokens: Input should be a valid integer"),
    "a large number": ({"seed": 1e30}, "seed: Input should be a valid integer"),
    "no number": ({"temperature": "hot"}, "temperature: Input should be a valid number"),
    "no truth": ({"stream": "perhaps"}, "stream: Input should be a valid boolean"),
    "no object": ({"stream_options": 5}, "stream_options: Input should be a valid dictionary"),
    "no messages": ({"messages": []}, "messages: List should have at least 1 item"),
}


@pytest.mark.parametrize(("fields", "sentence"), FIELDS.values(), ids=FIELDS)
def test_a_field_of_another_type(client, fields, sentence):
    assert said(post(client, CHAT, **{"messages": TALK, **fields})) == sentence


def test_roles(client, engine, chat_template):
    known = "system, developer, user, assistant or tool"
    for path, more in ((CHAT, {"max_tokens": 1}), ("/tokenize", {})):
        for role in ("robot", "", "User"):
            answer = client.post(path, json={"messages": [*TALK, {"role": role, "content": "a"}], **more})
            assert said(answer) == f"messages[1].role must be {known}, got {role!r}"

    def text(role):
        messages = [{"role": role, "content": "a"}, *TALK]
        ids = client.post("/tokenize", json={"messages": messages}).json()["tokens"]
        assert post(client, CHAT, messages=messages).status_code == 200
        return engine.tokenizer.decode(ids)

    assert text("developer") == text("system") == "system: a\nuser: ab\n"
    assert engine.encode_chat([{"role": "developer", "content": "a"}]) == engine.encode("system: a\n")
    for name in ("developer", "robot"):
        chat_template(engine, f"{{% set _ = '{name}' %}}{TEMPLATE}")
        assert text(name) == f"{name}: a\nuser: ab\n"


LOOPS = [
    {"$ref": "#"},
    {"allOf": [{"$ref": "#"}]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
]


@pytest.mark.parametrize("schema", LOOPS, ids=["itself", "allOf", "two"])
def test_a_schema_that_refers_to_itself_alone(client, schema):
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    answer = post(client, CHAT, messages=TALK, response_format=form)
    assert said(answer) == "the grammar is invalid: a $ref leads back to itself"


NOT_CONTINUED = [
    [{"role": "assistant", "content": ""}],
    [{"role": "assistant", "content": []}],
    [*TALK, {"role": "assistant", "content": [{"type": "thinking", "thinking": "b"}]}],
    [*TALK, {"role": "assistant", "content": [{"type": "text", "text": ""}]}],
]


@pytest.mark.parametrize("messages", NOT_CONTINUED, ids=["", "no blocks", "thoughts", "an empty text"])
def test_messages_are_refused_in_the_words_of_anthropics_api(client, messages):
    sentence = "messages: the last one is the assistant's, so it needs a text, which the answer continues"
    assert said(post(client, MESSAGES, messages=messages)) == sentence
