"""The HTTP server (uvicorn): its settings, what one client may hold, and how signals end it."""

import asyncio
import errno
import logging
import resource
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from specker.command.interrupt import leave
from specker.serve.settings import Serving

log = logging.getLogger(__name__)

FULL = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: 21\r\n\r\ntoo many connections\n"
MARGIN = 10  # seconds beyond the time limit of a request, in which the server can end by itself
BACKLOG = 64  # connections that may wait to be accepted, and that asyncio accepts in one turn
FILES = 128  # that the server has open besides, such as pipes, models and --lookup-file
QUIET = 60.0  # seconds between two lines about connections that cannot be accepted
NO_ROOM = errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM


def config(app: Any, serving: Serving) -> uvicorn.Config:
    class Limited(Protocol):
        most, seconds = fitting(serving.connections), serving.client_seconds

    return uvicorn.Config(
        app,
        http=Limited,
        ws="none",
        log_config=None,
        access_log=False,
        backlog=BACKLOG,
        timeout_keep_alive=75,  # a client must not reuse a connection just as it is closed
        timeout_graceful_shutdown=int(serving.seconds) + 1,
    )


def fitting(connections: int) -> int:
    """As many connections as may be open at once. The process's limit of open files is raised to what it may be."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS names a limit that it does not allow
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = limit - BACKLOG - FILES
    if limit == resource.RLIM_INFINITY or connections <= free:
        return connections
    log.warning("%d connections may be open, since the limit of open files is %d (ulimit -n)", max(1, free), limit)
    return max(1, free)


class Protocol(H11Protocol):
    """A connection. It is closed if the head of a request, or what the client has to read, takes too long, and at once
    if there are too many."""

    most: int  # connections
    seconds: float

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # asyncio does so only for sockets that name TCP. Without it a body waits for the client to confirm the head.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(NotAccepted())
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            leave(sig, "specker: interrupted")
        super().handle_exit(sig, frame)
        said = f"specker: error: the server did not end within {self.grace:g} s, so it was ended"
        end = threading.Timer(self.grace, leave, (sig, said))
        end.daemon = True
        end.start()


class NotAccepted:
    """Says now and then that connections cannot be accepted; asyncio would write a traceback for each of them."""

    def __init__(self) -> None:
        self._next = -QUIET  # seconds of the loop's clock before which nothing is said

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in NO_ROOM:
            loop.default_exception_handler(context)
        elif loop.time() >= self._next:
            self._next = loop.time() + QUIET
            log.warning("connections cannot be accepted: %s", error.strerror)
