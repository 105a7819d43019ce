"""One thread runs the engine's steps. Calls, which live on the event loop, submit requests and get their events."""

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from specker.runtime.engine import Engine
from specker.runtime.events import Event
from specker.runtime.round.state import Request
from specker.serve.metrics import Metrics

log = logging.getLogger(__name__)

T = TypeVar("T")

IDLE = 0.05  # seconds between looks at the stop flag while there is nothing to do
NEW = 0.2  # weight of a new measurement


class Busy(Exception):
    """The queue is full. `seconds`: when to try again."""

    def __init__(self, seconds: int):
        super().__init__(f"the queue is full; try again in about {seconds} s")
        self.seconds = seconds


class Failed(Exception):
    """A round failed, or a request's logits are not finite. The server's log has the error."""


class Call:
    """The requests of one HTTP call. Its `events` can be iterated over once; `close` cancels what has not ended."""

    def __init__(self, worker: "Worker", requests: Sequence[Request]):
        self.requests, self.left = requests, set(requests)
        self.began, self.first = time.monotonic(), 0.0  # seconds until the first token
        self.loop, self.inbox = asyncio.get_running_loop(), asyncio.Queue[Event | Failed]()
        self._worker = worker

    async def events(self) -> AsyncIterator[Event]:
        """The events of all requests. Raises Failed, and TimeoutError at the server's time limit."""
        while self.left:
            entry = await asyncio.wait_for(self.inbox.get(), self.began + self._worker.limit - time.monotonic())
            if isinstance(entry, Failed):
                raise entry
            if entry.finished is not None:
                self.left.discard(entry.request)
            yield entry

    def why(self, error: Exception) -> tuple[int, str]:
        """The status and the sentence for what `events` raised."""
        if isinstance(error, Failed):
            return 500, str(error)
        return 504, f"the answer took more than {self._worker.limit:g} s, the server's limit"

    def close(self) -> None:
        self._worker.close(self)


class Worker(threading.Thread):
    def __init__(self, engine: Engine, queue: int, limit: float, on_ended: Callable[[Request], None] = lambda _: None):
        """`queue`: requests that may wait. `limit`: seconds of a call. `on_ended` is called here with each request that
        ended."""
        super().__init__(name="specker-steps", daemon=True)
        self.session, self.queue, self.limit, self.on_ended = engine.session, queue, limit, on_ended
        self.metrics = Metrics(self)
        self.sound = True  # whether the last step succeeded
        self._open: set[Request] = set()  # submitted, and not ended
        self._calls: dict[Request, Call] = {}  # of those that somebody waits for
        self._lock = threading.Lock()  # of both
        self._gone: deque[Request] = deque()  # to be cancelled
        self._asked: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._mean = 1.0  # seconds of a request, smoothed
        self._stopping = False

    @property
    def slots(self) -> int:
        """Requests that decode at once."""
        return self.session.loop.size

    @property
    def open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def call(self, requests: Sequence[Request]) -> Call:
        """Submit the requests of a call, on the event loop. Raises Busy, or ValueError if they can never be queued."""
        if len(requests) > self.slots + self.queue:
            raise ValueError(f"{len(requests)} texts are asked for, but the server queues at most {self.queue}")
        call = Call(self, requests)
        with self._lock:
            if self.open + len(requests) > self.slots + self.queue:
                raise Busy(max(1, math.ceil(self._mean * self.open / self.slots)))
            self._open.update(requests)
            self._calls |= dict.fromkeys(requests, call)
        for request in requests:
            self.session.submit(request)
        return call

    def close(self, call: Call) -> None:
        with self._lock:
            for request in call.left:
                self._calls.pop(request, None)
        self._gone.extend(call.left)
        call.left.clear()

    def between_steps(self, work: Callable[[], T]) -> "Future[T]":
        """The result of `work`, which this thread computes before its next step: it may read what steps change."""
        future: Future[T] = Future()
        self._asked.append((work, future))
        return future

    def stop(self) -> None:
        """Cancel what has not ended and end the thread."""
        self._stopping = True
        self.join()

    def run(self) -> None:
        while not self._stopping:
            self._cancel()
            while self._asked:
                work, future = self._asked.popleft()
                try:
                    future.set_result(work())
                except Exception as error:
                    future.set_exception(error)
            if self.session.wait(IDLE):
                self._step()
        self._gone.extend(self._open)
        self._cancel()

    def _cancel(self) -> None:
        while self._gone:
            request = self._gone.popleft()
            try:
                self.session.cancel(request)
            except Exception:  # of a round that was launched before
                log.exception("a round failed")
            self._ended(request)

    def _step(self) -> None:
        try:
            events = self.session.step()
            self.sound = True
        except Exception:
            log.exception("a round failed, and with it its requests")
            self.sound = False
            with self._lock:
                failed = [request for request in self._open if request.finished == "failed"]
            for request in failed:
                self._put(request, Failed("the round failed; the server's log says why"))
            return
        for event in events:
            if event.finished == "not finite":
                self._put(event.request, Failed("the model's logits are not finite"))
            elif event.finished != "cancelled":
                self._put(event.request, event)

    def _put(self, request: Request, entry: Event | Failed) -> None:
        with self._lock:
            call = self._calls.get(request)
            if isinstance(entry, Failed) or entry.finished is not None:
                self._calls.pop(request, None)
        if request.finished is not None:
            self._ended(request)
        if call is None:
            return
        if not call.first:
            call.first = time.monotonic() - call.began
            self.metrics.first_token.observe(call.first)
        if request.finished is not None:
            self._mean += NEW * (time.monotonic() - call.began - self._mean)
        call.loop.call_soon_threadsafe(call.inbox.put_nowait, entry)

    def _ended(self, request: Request) -> None:
        """Count a request that ended, once."""
        with self._lock:
            if request not in self._open:
                return
            self._open.discard(request)
        self.metrics.ended(request)
        self.on_ended(request)
