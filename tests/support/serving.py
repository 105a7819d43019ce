"""A server in a thread, for tests, and what they look at."""

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import warm

from specker.runtime.engine import Engine
from specker.serve.app import application
from specker.serve.connections import Server, config
from specker.serve.settings import Serving


@contextmanager
def serving(engine: Engine, sampling: dict[str, float] | None = None, **settings: Any) -> Iterator[httpx.Client]:
    """A client of a server with this engine. Sampling is greedy unless a request says otherwise."""
    settings = Serving(**settings)
    app = application(engine, settings, {"temperature": 0.0, **(sampling or {})})
    server = Server(config(app, settings), settings)
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    thread = threading.Thread(target=server.run, args=[[listening]], daemon=True)
    thread.start()
    until(lambda: server.started or not thread.is_alive())
    url = f"http://127.0.0.1:{port}"
    with httpx.Client(base_url=url, timeout=60, verify=False) as client:  # to read certificates takes 20 ms
        client.app, client.server = app, server  # type: ignore[attr-defined]
        yield client
    server.should_exit = True
    thread.join(30)
    assert not thread.is_alive(), (server.server_state.tasks, server.server_state.connections)


@contextmanager
def command(models: dict[str, Any], *words: str, before: str = "") -> Iterator[tuple[warm.Running, str]]:
    """The process of `specker serve`, and its address. `before`: Python that runs first."""
    script = f"import sys, threading\nfrom specker.cli import serve\n{before}\nsys.exit(serve.main(sys.argv[1:]))"
    flags = {"target": models["target"], "port": 0, "strategy": "ar", "batch-size": 2, "device": "cpu"}
    flags |= {"dtype": "float64", "temperature": 0}
    argv = [str(word) for name, value in flags.items() for word in (f"--{name}", value)] + list(words)
    server = warm.Running("-c", script, *argv)
    try:
        said = ""
        while not (found := re.search(r"(http://[\d.:]+)/v1", said)):
            said += (line := server.stderr.readline())
            assert line, said
        server.said = said  # type: ignore[attr-defined]
        yield server, found[1]
    finally:
        server.kill()
        server.wait()
        server.stderr.close()


def until(holds: Callable[[], object], seconds: float = 20) -> None:
    """Wait until `holds` returns something true. AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def chunks(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The JSON of server-sent events, which must end with [DONE] or an error."""
    for line in lines:
        assert line == "" or line.startswith("data: "), line
        if line == "data: [DONE]":
            return
        if line:
            yield (chunk := json.loads(line[6:]))
            if "error" in chunk:
                return
    raise AssertionError("the stream ended without [DONE]")


def streamed(client: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    with client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        return list(chunks(answer.iter_lines()))


def free(engine: Engine) -> bool:
    """Whether nothing runs, no request holds a page, and the caches' records agree."""
    if engine.loop.busy:
        return False
    for cache in engine.loop.slots.caches:
        cache.check()
    return all(cache.free_pages == cache.spare for cache in engine.loop.slots.caches)
