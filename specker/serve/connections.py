"""The HTTP server (uvicorn): its settings, what one client may hold, and how signals end it."""

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from specker.serve.settings import Serving

FULL = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: 21\r\n\r\ntoo many connections\n"
MARGIN = 10  # seconds beyond the time limit of a request, in which the server can end by itself


def config(app: Any, serving: Serving) -> uvicorn.Config:
    class Limited(Protocol):
        most, seconds = serving.connections, serving.client_seconds

    return uvicorn.Config(
        app,
        http=Limited,
        ws="none",
        log_config=None,
        access_log=False,
        timeout_keep_alive=75,  # a client must not reuse a connection just as it is closed
        timeout_graceful_shutdown=int(serving.seconds) + 1,
    )


class Protocol(H11Protocol):
    """A connection. It is closed if the head of a request, or what the client has to read, takes too long, and at once
    if there are too many."""

    most: int  # connections
    seconds: float

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.write(FULL)
            transport.close()
        self._head, self._unread = (Alarm(self.loop, self.seconds, transport.abort) for _ in range(2))
        self._head.start()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch(began=True)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch(began=bool(self.conn.trailing_data[0]))  # of the next request

    def _watch(self, began: bool) -> None:
        """`began`: whether something of a head has come."""
        if self.conn.their_state is not h11.IDLE:
            self._head.stop()
        elif began:
            self._head.start()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread.start()

    def resume_writing(self) -> None:
        self._unread.stop()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head.stop()
        self._unread.stop()
        super().connection_lost(exc)


class Alarm:
    """Calls `act` unless it is stopped in time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, act: Callable[[], None]):
        self._start = partial(loop.call_later, seconds, act)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._timer = self._timer or self._start()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Server(uvicorn.Server):
    """Ends after the running requests at the first signal, and at once at the second, or when a thread hangs."""

    def __init__(self, config: uvicorn.Config, serving: Serving):
        super().__init__(config)
        self.grace = serving.seconds + MARGIN

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            _leave(sig, "specker: interrupted")
        super().handle_exit(sig, frame)
        said = f"specker: error: the server did not end within {self.grace:g} s, so it was ended"
        end = threading.Timer(self.grace, _leave, (sig, said))
        end.daemon = True
        end.start()


def _leave(sig: int, said: str) -> None:
    """End the process at once, with the code that shells give for a signal."""
    sys.stderr.write(said + "\n")
    sys.stderr.flush()
    os._exit(128 + sig)
