"""What a hostile client sends costs the server and its other clients little, and gets one sentence."""

import contextlib
import errno
import gc
import json
import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from fastapi import Response
from fastapi.exceptions import RequestValidationError
from make_checkpoint import make
from pydantic import ValidationError
from serving import command, free, serving, until
from since import since

import specker
from specker import grammar
from specker.runtime.text import TooLong
from specker.serve import checker, connections, limits
from specker.serve.api import Chat, Completion, Tokenize
from specker.serve.checker import Checker
from specker.serve.messages import MessagesRequest
from specker.serve.responses import ResponseRequest

TALK = [{"role": "user", "content": "ab cd"}]
PRIMES = 9973, 9967, 9949, 9941
ENDLESS = {"allOf": [{"type": "integer", "multipleOf": prime} for prime in PRIMES]}  # hours, and all memory
PLACE = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return make(folder / "target", "qwen2", layers=2, max_context=400, tokenizer=True, eos=None)


@pytest.fixture(scope="module")
def load(target):
    options = {"dtype": "float64", "device": "cpu", "page_size": 16, "batch_size": 2}
    return lambda **more: specker.load(target, strategy="lookup", **{**options, **more})


@pytest.fixture(scope="module")
def served(load):
    """A client of one server for all tests that change none of its settings."""
    with serving(load(), name="served") as client:
        yield client


@pytest.fixture(scope="module")
def impatient(load):
    with serving(load(), client_seconds=0.2) as client:
        yield client


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
        grammars.check = lambda text: (seen.append(text), going_on.wait(20))
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


def child_that(does):
    """A program in place of the child, which does this before."""
    return f"import os, runpy, signal, time\n{does}\nrunpy.run_path({str(checker.SCRIPT)!r}, run_name='__main__')"


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_a_checker_that_is_ended_while_idle_is_started_once_more(check, monkeypatch, sent):
    """One that was stopped ends when its time is over."""
    monkeypatch.setattr(checker, "WALL", 1)
    check = check(1)
    check(grammar.json_schema(PLACE))
    child = check._child
    os.kill(child.pid, sent)
    if sent != signal.SIGSTOP:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    check(grammar.json_schema({"const": 1}))
    assert check._child.pid != child.pid and child.wait(10) in (-sent, -signal.SIGKILL)


def test_the_time_of_a_start_is_not_the_grammars(check, monkeypatch, tmp_path):
    (tmp_path / "slow.py").write_text(child_that("time.sleep(1.5)"))
    monkeypatch.setattr(checker, "SCRIPT", tmp_path / "slow.py")
    monkeypatch.setattr(checker, "WALL", 1)
    check(1)(grammar.json_schema(PLACE))


def test_a_checker_that_is_ended_while_it_starts(load, monkeypatch, tmp_path):
    """A client of a server whose second one starts is answered. If that ends, too, no grammar is to blame."""
    once, always = tmp_path / "once.py", tmp_path / "always.py"
    kill = "os.kill(os.getpid(), signal.SIGKILL)"
    always.write_text(child_that(kill))
    once.write_text(child_that(f"if not os.path.exists({str(tmp_path / 'seen')!r}):\n"
                               f"    open({str(tmp_path / 'seen')!r}, 'w').close()\n    {kill}"))  # fmt: skip
    with serving(load()) as client:
        monkeypatch.setattr(checker, "SCRIPT", always)
        answer = chat(client, **schema(PLACE))
        sentence = "grammars cannot be checked now, since the process that does it ends; try again later"
        assert said(answer, 503) == sentence and answer.headers["retry-after"] == "1"
        assert chat(client).status_code == 200
        monkeypatch.setattr(checker, "SCRIPT", once)
        assert chat(client, **schema(PLACE)).status_code == 200
        assert (tmp_path / "seen").exists()


def test_a_grammar_that_is_slow_to_follow_ends_its_request_alone(load):
    with serving(engine := load(), grammar_seconds=60) as client, ThreadPoolExecutor(1) as pool:
        engine.session.grammars.pace = 1e-6
        slow = pool.submit(chat, client, **schema({"const": "ab " * 200}), max_tokens=300)
        assert chat(client).status_code == 200
        assert said(slow.result()) == "the grammar takes more than 1e-06 s a token to follow"
        until(lambda: free(engine))


# --- connections


def connected(client, data):
    connection = socket.create_connection((client.base_url.host, client.base_url.port), timeout=20)
    connection.sendall(data)
    return connection


def left(connection):
    """What the server says before it closes the connection."""
    said = b""
    with connection, contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            said += part
    return said


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"", b""),
        (HEAD, b""),
        (HEAD[:9], b""),
        (
            b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" + HEAD,
            b'{"status":"ok",',
        ),  # after an answer
        (HEAD + b"content-length: 99\r\n\r\n{", b"the body takes more than 0.2 s"),
        (HEAD + b"authorization: Bearer x\r\ncontent-length: 99999999\r\n\r\n{", b"the body is larger than 8 MiB"),
    ],
    ids=["nothing", "head", "line", "second head", "body", "refused body"],
)
def test_half_a_request_ends_with_its_time(impatient, sent, said):
    assert said in left(connected(impatient, sent))
    assert complete(impatient, max_tokens=90).status_code == 200  # which may take longer
    until(lambda: len(impatient.server.server_state.connections) == 1)


def test_a_client_that_does_not_read_is_left(load):
    with serving(load(), client_seconds=0.3) as client:
        client.app.add_api_route("/long", lambda: Response(b" " * (64 << 20)))
        with connected(client, b"GET /long HTTP/1.1\r\nhost: localhost\r\n\r\n"):
            until(lambda: client.server.server_state.connections)
            until(lambda: not client.server.server_state.connections)


def test_connections_are_bounded(load):
    with serving(load(), connections=3) as client:
        held = [connected(client, HEAD) for _ in range(3)]
        until(lambda: len(client.server.server_state.connections) == 3)
        assert left(connected(client, b"")).endswith(b"too many connections\n")
        held.pop().close()
        until(lambda: len(client.server.server_state.connections) == 2)
        assert complete(client).status_code == 200
        for each in held:
            each.close()


def test_no_write_waits_for_the_clients_confirmation(served):
    assert complete(served).status_code == 200
    [connection] = served.server.server_state.connections
    accepted = connection.transport.get_extra_info("socket")
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_more_connections_than_files_write_no_tracebacks(target):
    """A server with few files, of which clients would take more."""
    before = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (220, 256))"
    with command({"target": target}, before=before) as (server, url):
        port = int(url.rpartition(":")[2])
        held = []
        for count in (64, *8 * [32]):  # no more than may wait to be accepted
            held += [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(count)]
            assert len(held) == 64 or left(held[-1]).endswith(b"too many connections\n")
        for each in held:
            each.close()
        until(lambda: httpx.get(f"{url}/health").status_code == 200)
        server.send_signal(signal.SIGTERM)
        said = server.communicate()
    assert "Traceback" not in said and len(said.splitlines()) < 30, said[:3000]


def test_connections_fit_the_limit_of_files(monkeypatch, caplog):
    files = [100, 1000]
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: tuple(files))
    monkeypatch.setattr(connections.resource, "setrlimit", lambda _, new: files.__setitem__(slice(2), new))
    assert connections.fitting(512) == 512 and files == [1000, 1000] and not caplog.messages
    assert connections.fitting(9999) == 1000 - connections.BACKLOG - connections.FILES
    [said] = caplog.messages
    assert said == "808 connections may be open, since the limit of open files is 1000 (ulimit -n)"


def test_connections_that_cannot_be_accepted_get_one_line_a_minute(load, caplog):
    with serving(load()) as client:
        loop = client.server.servers[0].get_loop()
        for code in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS):
            error = OSError(code, os.strerror(code))
            loop.call_soon_threadsafe(loop.call_exception_handler, {"message": "accept", "exception": error})
        assert complete(client).status_code == 200
        loop.call_soon_threadsafe(loop.call_exception_handler, {"message": "other", "exception": KeyError("other")})
        until(lambda: any(record.name == "asyncio" for record in caplog.records))
    said = [record.message for record in caplog.records if record.name == connections.__name__]
    assert said == ["connections cannot be accepted: Too many open files"]


def test_bodies_are_bounded_together(load, monkeypatch):
    monkeypatch.setattr(limits, "ROOM", 1 << 20)
    part = b" " * (700 << 10)

    def size(head):
        return head + b"content-length: %d\r\n\r\n" % (1 << 20)

    with serving(load(), client_seconds=30) as client:
        layer = client.app.middleware_stack
        while not isinstance(layer, limits.Limits):
            layer = layer.app
        with connected(client, size(HEAD) + part):
            until(lambda: layer.held > 600 << 10)
            chunk = HEAD + b"transfer-encoding: chunked\r\n\r\n%x\r\n" % len(part) + part
            for sent in (size(HEAD) + part + b" " * (324 << 10), chunk):
                answer = left(connected(client, sent))
                assert answer.startswith(b"HTTP/1.1 503") and b"\r\nretry-after: 30\r\n" in answer.lower()
                assert answer.endswith(limits.FULL.encode() + b'","type":"server_error","param":null,"code":503}}')
            assert complete(client).status_code == 200  # a small one
        until(lambda: layer.held == 0)
        assert complete(client, prompt="a" * (700 << 10)).status_code == 413  # larger than the context
        until(lambda: layer.held == 0)


# --- sizes


@pytest.fixture
def before_encoding(monkeypatch):
    """Has something happen before each text is encoded."""

    def run(encoder, does):
        encode = encoder._encode
        monkeypatch.setattr(encoder, "_encode", lambda text, *rest: (does(text), encode(text, *rest))[1])

    return run


def complete(client, **more):
    return client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 2, **more})


def test_too_many_texts_are_refused_before_anything_is_computed(load, before_encoding):
    with serving(load(), queue=8) as client, ThreadPoolExecutor(1) as pool:
        encoder, going_on, worker = client.app.state.server.encoder, threading.Event(), client.app.state.server.worker
        seen = []
        before_encoding(encoder, lambda text: (seen.append(text), going_on.wait(20)))
        sentence = "11 texts are asked for, but the server queues at most 8"
        assert said(complete(client, prompt=["a"] * 11)) == sentence
        assert said(complete(client, n=11)) == sentence and not seen
        post = pool.submit(complete, client, prompt=["a"] * 4, n=2)
        until(lambda: seen)
        assert said(complete(client, n=3), 429).startswith("the queue is full") and len(seen) == 1
        assert worker.open == 8
        going_on.set()
        assert len(post.result().json()["choices"]) == 8 and worker.open == 0
        assert said(complete(client, temperature=-1)).startswith("temperature") and worker.open == 0


def test_a_text_with_more_characters_than_the_context_can_have_is_not_looked_at(served, before_encoding):
    encoder = served.app.state.server.encoder
    most = 400 * max(len(token) for token in encoder.target.tokenizer.get_vocab())
    before_encoding(encoder, lambda _: 1 / 0)
    sentence = f"the prompt has {most + 1} characters, but the context of served is 400 tokens of at most "
    assert said(complete(served, prompt="a" * (most + 1)), 413).startswith(sentence)
    long = [{"role": "user", "content": "a" * (most + 1)}]
    assert said(chat(served, messages=long), 413).startswith("the prompt has ")
    assert said(served.post("/tokenize", json={"messages": long}), 413).startswith("the prompt has ")


def test_a_short_text_does_not_wait_for_a_long_one(load, monkeypatch, before_encoding):
    monkeypatch.setattr("specker.serve.encoder.LONG", 100)
    with serving(load(), health_seconds=0.05) as client, ThreadPoolExecutor(2) as pool:
        encoder, going_on = client.app.state.server.encoder, threading.Event()
        before_encoding(encoder, lambda text: len(text) < 100 or going_on.wait(20))
        posts = [pool.submit(complete, client, prompt="a" * 200) for _ in range(2)]
        until(lambda: client.get("/health").status_code == 503)
        assert said(client.get("/health"), 503) == "preparing a request takes more than 0.05 s"
        assert complete(client).status_code == chat(client).status_code == 200
        assert not any(post.done() for post in posts)
        going_on.set()
        assert {post.result().status_code for post in posts} == {200}
        until(lambda: client.get("/health").status_code == 200)


def test_the_time_limit_covers_what_comes_before_the_queue(load, monkeypatch, before_encoding):
    with serving(load(), seconds=0.3) as client:
        server, going_on = client.app.state.server, threading.Event()
        before_encoding(server.encoder, lambda _: going_on.wait(20))
        assert said(complete(client), 504) == "the answer took more than 0.3 s, the server's limit"
        monkeypatch.undo()
        server.engine.session.grammars.check = lambda _: going_on.wait(20)
        assert said(chat(client, **schema(PLACE)), 504).startswith("the answer took more than")
        assert server.worker.open == 0
        going_on.set()


def test_a_round_that_hangs_is_no_health(load, before_steps):
    with serving(engine := load(), health_seconds=0.05) as client, ThreadPoolExecutor(1) as pool:
        going_on = threading.Event()
        before_steps(engine, lambda: going_on.wait(20))
        post = pool.submit(complete, client)
        until(lambda: client.get("/health").status_code == 503)
        for path in ("/health", "/metrics"):
            assert said(client.get(path), 503) == "a round takes more than 0.05 s"
        going_on.set()
        assert post.result().status_code == 200 and client.get("/health").status_code == 200


@pytest.mark.parametrize("stop", [["a"] * 17, "a" * 257], ids=["many", "long"])
def test_stop_strings_are_few_and_short(served, stop):
    assert said(complete(served, stop=stop)) == "stop: at most 16 strings of at most 256 characters are allowed"
    assert complete(served, stop=["a" * 256] * 16).status_code == 200


MANY = {
    "ids": (Completion, {"prompt": [1] * 100_000 + [None]}),
    "no ids": (Completion, {"prompt": [None] * 100_000}),
    "texts": (Completion, {"prompt": ["a"] + [None] * 100_000}),
    "lists": (Completion, {"prompt": [[None] * 1000] * 1000}),
    "stop ids": (Completion, {"prompt": "a", "stop_token_ids": [None] * 100_000}),
    "stop strings": (Completion, {"prompt": "a", "stop": [None] * 100_000}),
    "messages": (Chat, {"messages": [1] * 100_000}),
    "calls": (Chat, {"messages": [{"role": "assistant", "tool_calls": [1] * 100_000}]}),
    "tools": (Chat, {"messages": TALK, "tools": [{}] * 10_000}),
    "items": (ResponseRequest, {"input": [1] * 100_000}),
    "tools of a response": (ResponseRequest, {"input": "a", "tools": [{}] * 10_000}),
    "turns": (MessagesRequest, {"max_tokens": 1, "messages": [1] * 100_000}),
    "parts": (MessagesRequest, {"max_tokens": 1, "messages": [{"role": "user", "content": [{}] * 10_000}]}),
    "tools of a message": (MessagesRequest, {"max_tokens": 1, "messages": TALK, "tools": [{}] * 10_000}),
    "stop sequences": (MessagesRequest, {"max_tokens": 1, "messages": TALK, "stop_sequences": [1] * 100_000}),
    "messages to count": (Tokenize, {"messages": [1] * 100_000}),
    "names": (Completion, {"prompt": "a", **{f"n{i}": 1 for i in range(10_001)}}),
    "biases": (Completion, {"prompt": "a", "logit_bias": {str(i): "a" for i in range(10_001)}}),
    "objects": (Chat, {"messages": TALK * 10_001}),
}


@pytest.mark.parametrize(("model", "body"), MANY.values(), ids=MANY)
def test_a_body_with_many_wrong_items_costs_no_more_than_one_with_one(model, body):
    with pytest.raises(ValidationError) as refused:
        model.model_validate(body)
    assert refused.value.error_count() <= 2  # both types of `stop`


@since("starlette", "1.10", "holds a refused body until garbage is collected")
@pytest.mark.parametrize(
    "field", [{"other": 1}, {"functions": [1]}, {"stop": "a" * 257}, {"prompt": [9] * 1000}, {"temperature": -1}]
)
def test_nothing_holds_a_body_that_was_refused(served, field):
    def errors():
        return {id(each) for each in gc.get_objects() if type(each) in (RequestValidationError, ValueError, TooLong)}

    assert complete(served).status_code == 200
    before = errors()
    gc.disable()  # it would free what holds itself
    try:
        assert complete(served, **field).status_code in (400, 413)
        until(lambda: errors() <= before)
    finally:
        gc.enable()


# --- chat templates

TAKEN = (
    *("chat_template", "messages", "conversation", "conversations", "self", "name", "target", "tools", "documents"),
    *("tokenize", "padding", "max_length", "return_tensors", "tokenizer_kwargs", "add_generation_prompt", "eos_token"),
)


def test_clients_bring_no_template_and_no_arguments_of_the_renderer(served):
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    for name in TAKEN:
        assert said(chat(served, chat_template_kwargs={name: loops})) == f"chat_template_kwargs cannot set {name}"
    assert chat(served, chat_template_kwargs={"enable_thinking": False}).status_code == 200


@pytest.mark.parametrize("template", ["{{ 1 // x }}", "{{ messages[0].content.x.y }}", "{{ 'a' + messages[0].n }}"])
def test_a_template_that_fails_on_messages_gets_one_sentence(served, chat_template, template):
    chat_template(served.app.state.server.engine, template)
    answer = chat(served, messages=[TALK[0] | {"n": 1}], chat_template_kwargs={"x": 0})
    assert said(answer).startswith("the chat template of served refuses the conversation: ")
