"""One thread runs the engine's steps. Calls, which live on the event loop, submit requests and get their events."""

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from specker.runtime.control.stats import Stats
from specker.runtime.events import Event
from specker.runtime.round.state import Request
from specker.runtime.session import Session
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
    """A request failed: its round, its logits or its grammar. `status`: of the answer."""

    def __init__(self, message: str, status: int = 500):
        super().__init__(message)
        self.status = status


class Call:
    """The requests of one HTTP call. Its `events` can be iterated over once; `close` cancels what has not ended."""

    def __init__(self, worker: "Worker", requests: Sequence[Request], began: float):
        self.requests, self.left = requests, set(requests)
        self.began, self.first = began, 0.0  # seconds until the first token
        self._worker, self._loop = worker, asyncio.get_running_loop()
        self._inbox = asyncio.Queue[Event | Failed]()

    def put(self, entry: Event | Failed) -> None:
        """Add an event or the failure of a request, from any thread."""
        self._loop.call_soon_threadsafe(self._inbox.put_nowait, entry)

    async def events(self) -> AsyncIterator[Event]:
        """The events of all requests. Raises Failed, and TimeoutError at the server's time limit."""
        while self.left:
            left = self.began + self._worker.limit - time.monotonic()
            async with asyncio.timeout(left):  # before Python 3.12, wait_for may lose a cancellation
                entry = await self._inbox.get()
            if isinstance(entry, Failed):
                raise entry
            if entry.finished is not None:
                self.left.discard(entry.request)
            yield entry

    def why(self, error: Exception) -> tuple[int, str]:
        """The status and the sentence for what `events` raised."""
        if isinstance(error, Failed):
            return error.status, str(error)
        return 504, self._worker.late

    def close(self) -> None:
        self._worker.between_steps(partial(self._worker.cancel, [*self.left]))
        self.left.clear()


class Worker(threading.Thread):
    def __init__(self, session: Session, queue: int, limit: float, on_ended: Callable[[Request], None]):
        """`queue`: requests that may wait. `limit`: seconds of a call. `on_ended` is called with each request that
        ended, by the thread that ran its last step."""
        super().__init__(name="specker-steps", daemon=True)
        self.session, self.queue, self.limit, self.on_ended = session, queue, limit, on_ended
        self.slots = session.snapshot().slots
        self.metrics = Metrics(session)
        self.sound = True  # whether the last step succeeded
        self._open: set[Request] = set()  # submitted, and not ended
        self._reserved = 0  # places of calls whose requests are not yet submitted
        self._lock = threading.Lock()  # of these two
        self._step_began: float | None = None
        self.late = f"the answer took more than {limit:g} s, the server's limit"
        self._asked: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._mean = 1.0  # seconds of rounds that a request takes, without its wait, smoothed
        self._stopping = False

    @property
    def open(self) -> int:
        """Requests that have not ended, and reserved places."""
        return len(self._open) + self._reserved

    def reserve(self, texts: int) -> None:
        """Take places in the queue for a call, before anything is computed for it. Raises Busy, or ValueError if they
        are more than there are."""
        if texts > self.slots + self.queue:
            raise ValueError(f"{texts} texts are asked for, but the server queues at most {self.queue}")
        with self._lock:
            if self.open + texts > self.slots + self.queue:
                raise Busy(max(1, math.ceil(self._mean * self.open)))
            self._reserved += texts

    def release(self, texts: int) -> None:
        """Give places back."""
        with self._lock:
            self._reserved -= texts

    def call(self, requests: Sequence[Request], began: float) -> Call:
        """Submit the requests of a call, on the event loop, in the places that it has reserved. `began`: when its time
        began."""
        with self._lock:
            self._reserved -= len(requests)
            self._open.update(requests)
        call = Call(self, requests, began)
        for request in requests:
            self.session.submit(request, deliver=partial(self._deliver, call, request))
        return call

    def drafting(self) -> str:
        """Whether anything is drafted for the requests that run or, if none does, was for the last one; if not, why."""
        with self._lock:
            running = [request.stats for request in self._open if request.stats.rounds]
        return sum(running, Stats()).drafting if running else self.metrics.last.drafting

    def step_seconds(self) -> float:
        """Seconds since the step that runs now began; 0 if none does."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

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
            self._answer()
            if self.session.wait(IDLE):
                self._step()
        self._answer()
        self.cancel([*self._open])

    def cancel(self, requests: Iterable[Request]) -> None:
        """End requests, in this thread, since the session may have to wait for a round."""
        for request in requests:
            try:
                self.session.cancel(request)
            except Exception:  # of a round that was launched before
                log.exception("a round failed")

    def _answer(self) -> None:
        while self._asked:
            work, future = self._asked.popleft()
            if not future.set_running_or_notify_cancel():
                continue  # nobody waits for it any more
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

    def _step(self) -> None:
        self._step_began = time.monotonic()
        try:
            self.session.step()
            self.sound = True
        except Exception:
            log.exception("a round failed, and with it its requests")
            self.sound = False
        finally:
            self._step_began = None

    def _deliver(self, call: Call, request: Request, entry: Event | BaseException) -> None:
        """Pass an event of the request to its call, or the error that ended it."""
        if request.finished is not None:
            with self._lock:
                ended = request in self._open
                self._open.discard(request)
            if ended:  # not if this is called once more with what it raised
                self.metrics.ended(request)
                self.on_ended(request)
        if request.finished == "cancelled":
            return
        if not call.first:
            call.first = time.monotonic() - call.began
            self.metrics.first_token.observe(call.first)
        if request.finished is not None:
            self._mean += NEW * (request.stats.wall - self._mean)
        if isinstance(entry, BaseException):
            call.put(Failed("the round failed; the server's log says why"))
        elif entry.finished == "not finite":
            call.put(Failed("the model's logits are not finite"))
        elif entry.finished == "grammar":
            dead = "the text cannot go on: the grammar allows none of the model's tokens"
            call.put(Failed((request.guide is not None and request.guide.error) or dead, 400))
        else:
            call.put(entry)
