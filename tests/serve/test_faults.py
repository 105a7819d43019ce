"""Load and faults: a full queue, clients that go away, time limits, failed rounds, SIGTERM. After each of them no
request holds a page, and the next request is served."""

import asyncio
import contextlib
import json
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import cases
import httpx
import pytest
from make_checkpoint import make
from pairs import perturbed
from serving import chunks, command, free, serving, streamed, until

import specker
from specker.cli.serve import main
from specker.serve import connections
from specker.serve.settings import Serving
from specker.serve.worker import Busy, Call

LONG = {"prompt": [5, 6, 7], "max_tokens": 380}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    target = make(folder / "target", "qwen2", layers=2, max_context=400, tokenizer=True, eos=None)
    return {"target": target, "draft": perturbed(target, folder / "draft", amount=0.05)}


@pytest.fixture
def load(models):
    options = {"dtype": "float64", "device": "cpu", "page_size": 16, "strategy": "draft", "draft_tokens": 3}
    return lambda **more: specker.load(models["target"], models["draft"], **{**options, **more})


@pytest.fixture
def slow(before_steps):
    """Makes an engine's rounds take at least `seconds`."""

    def make_slow(engine, seconds=0.02):
        before_steps(engine, lambda: time.sleep(seconds))
        return engine

    return make_slow


def serves(client, engine):
    """Whether the server still answers, and nothing holds a page."""
    until(lambda: free(engine))
    want = engine.generate([1, 2, 3], 6).text
    got = client.post("/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 6}).json()
    assert got["choices"][0]["text"] == want and client.get("/health").status_code == 200
    until(lambda: free(engine))
    return True


@pytest.mark.parametrize("turns", range(4))
def test_a_client_that_leaves_as_an_event_comes_ends_its_call(turns):
    """An answer that went on would have no text. `turns`: of the event loop between the two."""

    async def events(call):
        return [event async for event in call.events()]

    async def leave():
        worker = SimpleNamespace(limit=60.0, between_steps=lambda work: None, cancel=lambda requests: None)
        call = Call(worker, ["request"], time.monotonic())
        reading = asyncio.ensure_future(events(call))
        await asyncio.sleep(0.01)
        call.put(SimpleNamespace(finished=None, request="request"))
        for _ in range(turns):
            await asyncio.sleep(0)
        reading.cancel()
        call.close()
        return (await asyncio.gather(reading, return_exceptions=True))[0]

    assert isinstance(asyncio.run(leave()), asyncio.CancelledError)


def test_a_full_queue_refuses_and_says_when_to_return(load, slow):
    with serving(engine := slow(load(batch_size=1)), queue=1) as client, ThreadPoolExecutor(3) as pool:
        posts = [pool.submit(client.post, "/v1/completions", json={**LONG, "max_tokens": 30}) for _ in range(2)]
        until(lambda: client.app.state.server.worker.open == 2)
        answer = client.post("/v1/completions", json=LONG)
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["message"].startswith("the queue is full; try again in about ")
        assert client.get("/health").status_code == 200  # the event loop never waits for the engine
        assert {post.result().status_code for post in posts} == {200}
        assert serves(client, engine)


def test_a_place_in_a_full_queue_is_expected_after_the_rounds_of_those_before(load, before_steps):
    engine, all_wait, seconds = load(batch_size=1), threading.Event(), []
    before_steps(engine, lambda: all_wait.wait(20))
    with serving(engine, queue=8) as client, ThreadPoolExecutor(9) as pool:
        worker = client.app.state.server.worker
        worker._mean, worker.on_ended = 0.0, lambda request: seconds.append(request.stats.wall)
        posts = [pool.submit(client.post, "/v1/completions", json={**LONG, "max_tokens": 9}) for _ in range(9)]
        until(lambda: worker.open == 9)
        time.sleep(0.3)
        all_wait.set()
        assert {post.result().status_code for post in posts} == {200}
        assert 0 < worker._mean <= max(seconds)
        worker._mean, worker._reserved = 0.5, 9
        with pytest.raises(Busy, match="try again in about 5 s"):
            worker.reserve(1)


@pytest.mark.parametrize(("queued", "stream"), cases.diagonal([False, True], [True, False]))
def test_a_client_that_goes_away_ends_its_request(load, slow, stream, queued):
    with serving(engine := slow(load(batch_size=1))) as client:
        worker = client.app.state.server.worker
        with contextlib.ExitStack() as others:
            if queued:
                others.enter_context(client.stream("POST", "/v1/completions", json={**LONG, "stream": True}))
                until(lambda: engine.loop.active)
            count = worker.open
            gone = leave(client, {**LONG, "stream": stream}, lambda: worker.open > count)
            rounds = engine.loop.finished
            until(lambda: worker.open == count)
            until(lambda: len(engine.loop.requests) == count)
            assert queued or engine.loop.finished <= rounds + 2
            assert gone
        assert serves(client, engine)
        assert worker.metrics.finished == {"cancelled": 1 + queued, "length": 1}  # each ended once


def leave(client, body, holds):
    """Send a request, wait until `holds`, and close the connection."""
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.create_connection((client.base_url.host, client.base_url.port)) as connection:
        connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        until(holds)
    return True


def test_a_time_limit_ends_a_request(load, slow):
    with serving(engine := slow(load(batch_size=1), 0.05), seconds=0.4) as client:
        answer = client.post("/v1/completions", json=LONG)
        assert answer.status_code == 504
        assert answer.json()["error"]["message"] == "the answer took more than 0.4 s, the server's limit"
        got = streamed(client, "/v1/completions", **LONG)
        assert got[-1]["error"]["code"] == 504 and any(chunk.get("choices") for chunk in got)
        until(lambda: free(engine))


def test_a_failed_round_fails_its_requests_and_not_the_server(load, slow, before_steps):
    with serving(engine := slow(load(batch_size=2))) as client, ThreadPoolExecutor(1) as pool:
        post = pool.submit(client.post, "/v1/completions", json=LONG)
        with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
            got = chunks(answer.iter_lines())
            next(got)
            left = [True]

            def fails():
                if left:
                    left.pop()
                    raise RuntimeError("a secret of /home/somebody")

            before_steps(engine, fails)
            last = list(got)[-1]
        assert last["error"]["code"] == 500 and post.result().status_code == 500
        for said in (json.dumps(last), post.result().text):
            assert "the round failed; the server's log says why" in said and "secret" not in said
        assert serves(client, engine)


def test_a_request_whose_end_cannot_be_recorded_fails_alone(load, slow):
    """The text that decodes beside it, and the server, go on."""
    with serving(engine := slow(load(batch_size=2))) as client, ThreadPoolExecutor(1) as pool:
        worker, short = client.app.state.server.worker, {**LONG, "max_tokens": 9}

        def recorded(request):
            if request.limit == len(LONG["prompt"]) + 9:
                raise RuntimeError("a secret of /home/somebody")

        ended, worker.on_ended = worker.on_ended, recorded
        post = pool.submit(client.post, "/v1/completions", json={**LONG, "max_tokens": 30})
        until(lambda: engine.loop.active)
        answer = client.post("/v1/completions", json=short)
        assert answer.status_code == 500 and "secret" not in answer.text
        assert post.result().json()["choices"][0]["text"] == engine.generate(LONG["prompt"], 30).text
        assert worker.metrics.finished == {"length": 2} and worker.open == 0 and worker.sound
        worker.on_ended = ended
        assert serves(client, engine)


def test_health_says_that_rounds_fail(load, before_steps):
    with serving(engine := load()) as client:
        failing = [True]
        before_steps(engine, lambda: failing and 1 / 0)
        assert client.post("/v1/completions", json=LONG).status_code == 500
        until(lambda: client.get("/health").status_code == 503)  # the step ends after its requests are answered
        failing.clear()
        assert client.post("/v1/completions", json={**LONG, "max_tokens": 2}).status_code == 200
        assert serves(client, engine)


def test_logits_that_are_not_finite_fail_the_request(load, monkeypatch):
    with serving(engine := load()) as client:
        monkeypatch.setattr("specker.runtime.round.round.math.isfinite", lambda _: False)
        answer = client.post("/v1/completions", json=LONG)
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "the model's logits are not finite"
        monkeypatch.undo()
        assert serves(client, engine)


def test_a_draining_server_ends_what_it_began(load, slow):
    with serving(engine := slow(load(batch_size=1))) as client:
        with client.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 30, "stream": True}) as answer:
            got = chunks(answer.iter_lines())
            first = next(got)
            client.server.should_exit = True  # what SIGTERM sets
            until(lambda: not accepts(client))
            text = first["choices"][0]["text"] + "".join(c["choices"][0]["text"] for c in got)
        assert text == engine.generate(LONG["prompt"], 30).text


def accepts(client):
    try:
        with socket.create_connection((client.base_url.host, client.base_url.port), timeout=1):
            return True
    except OSError:
        return False


def test_sigterm_ends_the_command_after_its_requests(models):
    """Before that, each remark on the engine is printed once, as a note."""
    with command(models) as (server, url):
        assert server.said.count("decoding is slow, because") == 1 and "WARNING" not in server.said
        with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": True}, timeout=60) as answer:
            got = chunks(answer.iter_lines())
            next(got)
            server.send_signal(signal.SIGTERM)
            assert [*got][-1]["choices"][0]["finish_reason"] == "length"
        server.communicate()
        assert server.returncode in (0, -signal.SIGTERM)


HANGS = """
from specker.runtime.session import Session
from specker.serve import connections
connections.MARGIN = 0.2
Session.step = lambda self: threading.Event().wait()
"""
IMPATIENT = """
from dataclasses import dataclass
from specker.serve.settings import Serving
@dataclass(frozen=True)
class Impatient(Serving):
    health_seconds: float = 0.05
serve.Serving = Impatient
"""


def test_sigterm_ends_a_server_whose_round_hangs(models):
    with command(models, "--seconds", "0.3", before=HANGS) as (server, url):
        assert httpx.post(f"{url}/v1/completions", json=LONG, timeout=60).status_code == 504
        server.send_signal(signal.SIGTERM)
        said = server.communicate()
        assert server.returncode == 128 + signal.SIGTERM
        assert said.splitlines()[-1] == "specker: error: the server did not end within 0.5 s, so it was ended"


def test_a_second_ctrl_c_ends_the_server_at_once(models):
    with command(models, before=HANGS + IMPATIENT) as (server, url), ThreadPoolExecutor(1) as pool:
        post = pool.submit(httpx.post, f"{url}/v1/completions", json={**LONG, "stream": True}, timeout=60)
        until(lambda: httpx.get(f"{url}/health").status_code == 503)
        said = ""
        server.send_signal(signal.SIGINT)
        while "Waiting for connections" not in said:
            said += (line := server.stderr.readline())
            assert line, said
        server.send_signal(signal.SIGINT)
        said = server.communicate()
        assert server.returncode == 130 and said == "specker: interrupted\n"
        with contextlib.suppress(httpx.HTTPError):
            post.result()


# --- the command


def test_what_the_command_prints_before_it_serves(models, monkeypatch, capsys):
    """A target without a chat template cannot answer the endpoints of chats."""
    monkeypatch.setattr(connections, "Server", lambda http, serving: SimpleNamespace(run=lambda sockets: None))
    without = "code-target has no chat template: ask it at /v1/completions"
    for target, notes in ((str(models["target"]), []), ("code-target", [without])):
        assert main(["--target", target, "--strategy", "ar", "--device", "cpu", "--port", "0"]) == 0
        *said, address = [line for line in capsys.readouterr().err.splitlines() if "slow" not in line]
        assert said == notes and re.search(r"http://127\.0\.0\.1:\d+/v1$", address)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--port", "70000"], "--port must be between 0 and 65535, got 70000"),
        (["--host", ""], "--host must not be empty"),
        (["--api-key", ""], "--api-key must not be empty"),
        (["--allow-host", "http://gpu.lan"], "--allow-host takes names without a port"),
        (["--seconds", "0"], "--seconds must be above 0"),
        (["--seconds", "inf"], "--seconds must be above 0 and at most 1000000, got inf"),
        (["--body", "9"], "unrecognized arguments: --body"),
        (["--temperature", "-1"], "--temperature must be 0 or at least 1e-6"),
        (["--prompt", "x"], "unrecognized arguments: --prompt x"),
        (["--quue", "3"], "there is no flag --quue; did you mean --queue?"),
    ],
)
def test_bad_flags_get_one_sentence(argv, sentence, capsys):
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1


def test_an_empty_key_of_the_environment_is_refused_as_the_flags_is(monkeypatch, capsys):
    monkeypatch.setenv("SPECKER_API_KEY", "")
    assert main([]) == 2
    assert capsys.readouterr().err == "specker: error: $SPECKER_API_KEY must not be empty: set a key, or unset it\n"
    assert Serving(api_key="a").api_key == "a"
    monkeypatch.setenv("SPECKER_API_KEY", "secret")
    assert Serving().api_key == "secret"


def test_a_port_in_use_and_a_target_without_a_tokenizer(models, tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        argv = ["--target", str(models["target"]), "--strategy", "ar", "--port", str(taken.getsockname()[1])]
        assert main(argv) == 2
    assert "Address already in use" in capsys.readouterr().err
    bare = make(tmp_path / "bare", "qwen2", layers=1)
    assert main(["--target", str(bare), "--strategy", "ar"]) == 2
    assert "has no tokenizer" in capsys.readouterr().err


def test_help_names_every_flag(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert all(f"--{name}" in said for name in ("target", "api-key", "batch-size", "queue", "view", "tree"))
