"""What a hostile client sends costs the server and its other clients little, and gets one sentence."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from make_checkpoint import make
from serving import free, serving, until

import specker
from specker import grammar
from specker.serve import checker
from specker.serve.checker import Checker

TALK = [{"role": "user", "content": "ab cd"}]
PRIMES = 9973, 9967, 9949, 9941
ENDLESS = {"allOf": [{"type": "integer", "multipleOf": prime} for prime in PRIMES]}  # hours, and all memory
PLACE = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return make(folder / "target", "qwen2", layers=2, max_context=400, tokenizer=True, eos=None)


@pytest.fixture
def load(target):
    options = {"dtype": "float64", "device": "cpu", "page_size": 16, "batch_size": 2}
    return lambda **more: specker.load(target, strategy="lookup", **{**options, **more})


def chat(client, **more):
    return client.post("/v1/chat/completions", json={"messages": TALK, "max_tokens": 40, **more})


def schema(of):
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": of}}}


def said(answer, status=400):
    assert answer.status_code == status, answer.text
    message = answer.json()["error"]["message"]
    assert "\n" not in message and len(message) < 400
    return message


# --- grammars


def test_endless_grammars_are_refused(load):
    with serving(engine := load(), grammar_seconds=0.3) as client, ThreadPoolExecutor(2) as pool:
        server = client.app.state.server
        for answer in pool.map(lambda n: chat(client, **schema({**ENDLESS, "title": str(n)})), range(2)):
            assert said(answer) == "the grammar is too complex: compiling it takes more than 0.3 s or 128 MiB"
        answer = chat(client, **schema(PLACE))
        assert json.loads(answer.json()["choices"][0]["message"]["content"])["x"] in (1, 2)
        child = server.checker._child
        until(lambda: free(engine))
    assert child.wait(10)


def test_nobody_waits_for_a_new_grammar(load):
    with serving(load()) as client, ThreadPoolExecutor(1) as pool:
        assert chat(client, **schema(PLACE)).status_code == 200
        going_on, seen = threading.Event(), []
        grammars = client.app.state.server.engine.session.grammars
        grammars.check = lambda text: (seen.append(text), going_on.wait(60))
        post = pool.submit(chat, client, **schema({"const": 1}))
        until(lambda: seen)
        assert chat(client).status_code == chat(client, **schema(PLACE)).status_code == 200
        assert len(seen) == 1 and not post.done()
        going_on.set()
        assert post.result().json()["choices"][0]["message"]["content"] == "1"


@pytest.fixture
def check(load):
    made = []

    def make_checker(seconds):
        grammars = load().session.grammars
        made.append(Checker(grammars.tokenizer, grammars.limits, seconds))
        return made[-1]

    yield make_checker
    for each in made:
        each.close()


def test_what_the_checker_refuses(check, monkeypatch):
    monkeypatch.setattr(checker, "MEMORY", 8 << 20)
    check = check(60)
    check(grammar.json_schema(PLACE))
    child = check._child
    with pytest.raises(ValueError, match=r"the grammar is invalid: .*unknown name"):
        check("start: foo")
    check(grammar.json_schema(PLACE))
    assert check._child is child
    with pytest.raises(ValueError, match="compiling it takes more than 60 s or 8 MiB"):
        check(grammar.json_schema({"type": "integer", "multipleOf": 99991}))
    check(grammar.json_schema(PLACE))  # in a new one
    assert check._child is not child


def test_a_grammar_that_is_slow_to_follow_ends_its_request_alone(load):
    with serving(engine := load(), grammar_seconds=60) as client, ThreadPoolExecutor(1) as pool:
        engine.session.grammars.pace = 1e-6
        slow = pool.submit(chat, client, **schema({"const": "ab " * 200}), max_tokens=300)
        assert chat(client).status_code == 200
        assert said(slow.result()) == "the grammar takes more than 1e-06 s a token to follow"
        until(lambda: free(engine))


# --- chat templates

TAKEN = (
    *("chat_template", "messages", "conversation", "conversations", "self", "name", "target", "tools", "documents"),
    *("tokenize", "padding", "max_length", "return_tensors", "tokenizer_kwargs", "add_generation_prompt", "eos_token"),
)


def test_clients_bring_no_template_and_no_arguments_of_the_renderer(load):
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with serving(load()) as client:
        for name in TAKEN:
            assert said(chat(client, chat_template_kwargs={name: loops})) == f"chat_template_kwargs cannot set {name}"
        assert chat(client, chat_template_kwargs={"enable_thinking": False}).status_code == 200


@pytest.mark.parametrize("template", ["{{ 1 // x }}", "{{ messages[0].content.x.y }}", "{{ 'a' + messages[0].n }}"])
def test_a_template_that_fails_on_messages_gets_one_sentence(load, monkeypatch, template):
    with serving(engine := load(), name="served") as client:
        monkeypatch.setattr(engine.tokenizer, "chat_template", template)
        answer = chat(client, messages=[TALK[0] | {"n": 1}], chat_template_kwargs={"x": 0})
        assert said(answer).startswith("the chat template of served refuses the conversation: ")
