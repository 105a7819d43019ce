"""Requests of any thread, decoded together: `submit`, `step` and `cancel`. The command line, conversations, batches and
the Python interface stand on it.

One thread at a time runs a step. A thread that waits for its requests (`Stream`) runs the steps while nobody else does,
and gets the events of its own requests, whoever ran the step. So threads share rounds as far as the batch has slots,
and an unread stream does not block others.
"""

import atexit
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from specker.answers import harmony
from specker.checkpoints.checkpoint import Checkpoint
from specker.fields import option
from specker.model.device import current
from specker.options import MAX_STOP_IDS, Params, whole
from specker.runtime import text
from specker.runtime.control.policy import OFF, Fixed, Policy
from specker.runtime.detokenize import Detokenizer
from specker.runtime.events import Event
from specker.runtime.loop import Loop
from specker.runtime.round.grammars import Grammars, Guide
from specker.runtime.round.state import Request
from specker.runtime.text import Prompt

log = logging.getLogger(__name__)

Entry = Event | BaseException

CLOSED = "the engine is closed: load another one"
LAST_STEP = 10.0  # seconds that the end of the process waits for a step of another thread


@dataclass(frozen=True)
class Snapshot:
    """How busy a session is.

    Attributes:
        slots: requests that can decode at once.
        running: requests that decode or whose prompt is being prefilled.
        waiting: requests that wait for a slot.
    """

    slots: int
    running: int
    waiting: int


class Session:
    def __init__(
        self,
        loop: Loop,
        target: Checkpoint,
        name: str,
        policy: Callable[[str | None], Policy],
        stop_ids: Sequence[int],
        running: Callable[[], AbstractContextManager[None]],
        copies: bool,
    ):
        """`target`, `name`: the model's tokenizer and context, and what the user calls it. `policy`: makes one for each
        request, from the name that it asks for. `stop_ids`: of every request. `running`: a context manager around
        steps, which explains errors. `copies`: whether drafts can be copied from a prediction."""
        self.loop, self.target, self.name, self.device = loop, target, name, loop.target.device
        self._policy, self._stop_ids, self._running, self._copies = policy, frozenset(stop_ids), running, copies
        self.grammars = Grammars(target)
        self._changed = threading.Condition()
        self._arrived: deque[tuple[Request, bool]] = deque()  # the flag: before those that wait already
        self._cancelled: deque[Request] = deque()
        self._open: dict[Request, None] = {}  # submitted, and neither the last event nor an error is delivered
        self._unread: list[Event] = []  # of requests without `deliver`; only the runner changes it
        self._runner: threading.Thread | None = None  # the thread that runs a step
        self._last: threading.Thread | None = None  # the thread that runs no step and lets no other, at exit
        self._lost = False  # whether this process was forked while a step ran
        self._closed = False
        _sessions.add(self)

    # --- requests

    def request(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        index: int = 0,
        speculates: bool = True,
        traced: bool | None = None,
        reads: bool = True,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Request:
        """Check a prompt and its parameters and make a request, which is not yet submitted.

        `index`: a number for the caller. `speculates`: False for plain decoding. `traced`: whether the trace holds its
        rounds (default: if it drafts). `reads`: its events have text. `on_progress` is called with (prefilled tokens,
        of all) after each chunk of the prompt. Raises ValueError for a prompt that is empty, has unknown ids or can
        never fit, for stop strings without a tokenizer, for a grammar that is invalid or that this engine cannot
        follow, and for a prediction that it cannot use.
        """
        params, context = params or Params(), self.target.config.max_context
        ids, tokenizer = self.validate(prompt, params.max_new_tokens), self.target.tokenizer_or_none
        if params.stop and tokenizer is None:
            raise ValueError(f"{self.name} has no tokenizer, so its text cannot end at {option('stop')}")
        vocab = self.target.config.vocab_size
        if any(token >= vocab for token in params.stop_ids):
            raise ValueError(f"{option('stop_ids')} must be below {vocab}, the vocabulary of {self.name}")
        if params.logprobs > vocab:
            raise ValueError(f"logprobs must be at most {vocab}, the vocabulary of {self.name}")
        if any(token >= vocab for token, _ in params.sampling.logit_bias):
            raise ValueError(f"{option('logit_bias')} must be of ids below {vocab}, the vocabulary of {self.name}")
        asked, wants_drafts = len(ids) + params.max_new_tokens, speculates and params.policy != OFF
        stop_ids = (frozenset() if params.ignore_eos else self._stop_ids).union(params.stop_ids)
        if params.min_tokens and len(stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"{option('min_tokens')} is for at most {MAX_STOP_IDS} stop ids, got {len(stop_ids)}")
        policy = self._policy(None if params.policy == OFF else params.policy)  # refuses unknown ones
        drafts = wants_drafts and self.loop.drafter is not None
        return Request(
            index=index,
            token_ids=ids,
            limit=min(asked, context),
            ends="length" if asked <= context else "context",
            sampling=params.sampling,
            policy=policy if drafts else Fixed(0, 0),
            speculates=drafts,
            asked=params.policy,
            prediction=self.prediction(params.prediction) if params.prediction and wants_drafts else [],
            prefixes=params.prefix_cache,
            salt=params.cache_salt,
            reader=self.reader(ids, params.stop, params.min_tokens) if params.stop or reads else None,
            stop_ids=stop_ids,
            min_tokens=params.min_tokens,
            logprobs=params.logprobs,
            traced=speculates if traced is None else traced,
            on_progress=on_progress,
            guide=None if params.grammar is None else self.guide(params.grammar, params.stop_ids),
        )

    def prediction(self, given: str | Sequence[int]) -> list[int]:
        """The token ids of a prediction (`Params.prediction`). Raises ValueError if this engine copies no text, and for
        ids that the target lacks or more than its context holds."""
        about, config = option("prediction"), self.target.config
        if not self._copies:
            raise ValueError(f"{about} needs strategy lookup, alone or joined, such as draft+lookup")
        ids = text.encode(self.target, given, special=False) if isinstance(given, str) else [*given]
        if len(ids) > config.max_context:
            raise ValueError(f"{about} has {len(ids)} tokens, but the context of {self.name} is {config.max_context}")
        if ids and max(ids) >= config.vocab_size:
            raise ValueError(f"{about} must be of ids below {config.vocab_size}, the vocabulary of {self.name}")
        return ids

    def reader(self, prompt: Sequence[int], stops: tuple[str, ...] = (), least: int = 0) -> Detokenizer:
        """What reads the text that follows the prompt. `least`: tokens before which no stop string ends it."""
        tokens = self.target.tokens
        form = harmony.of(tokens.special)
        known = None if self.target.tokenizer_or_none is None else tokens
        return Detokenizer(known, prompt, stops, form.parts if form else None, least)

    def guide(self, grammar: str, stop_ids: Sequence[int] = ()) -> Guide:
        """A request's guide through its grammar. Raises ValueError for a grammar that is invalid or that this engine
        cannot follow, and without llguidance."""
        if self.loop.ranks is not None and self.loop.ranks.size > 1:
            raise ValueError(f"a grammar needs the target's logits on one rank: leave out {option('tp')}")
        if not getattr(self.target.tokenizer_or_none, "is_fast", False):
            raise ValueError(f"a grammar needs a fast tokenizer (tokenizer.json), and {self.name} has none")
        return self.grammars.guide(grammar, stop_ids)

    def validate(self, prompt: Prompt, max_new_tokens: int = 1) -> list[int]:
        """A prompt's token ids. Raises ValueError if it is empty, has ids that the target lacks or can never fit."""
        ids = text.encode(self.target, prompt) if isinstance(prompt, str) else text.token_ids(prompt)
        text.checked(ids, self.target, self.name)
        most = min(len(ids) + whole(max_new_tokens, option("max_new_tokens"), 1), self.target.config.max_context)
        self.loop.slots.check_fits(len(ids), most)
        return ids

    def submit(
        self,
        prompt: Prompt | Request,
        params: Params | None = None,
        *,
        first: bool = False,
        deliver: Callable[[Entry], None] | None = None,
    ) -> Request:
        """Queue a prompt, from any thread, and return its request. `prompt` may be what `request` made. `first`: before
        the requests that wait already. `deliver` is called with each event of the request up to its last, or with the
        error of a step that failed, in the thread that runs the step; None: `step` returns the events. What `deliver`
        or `on_progress` raises is logged and ends this request alone, as "failed" if it has not ended: `deliver` is
        called once more, with that error."""
        request = prompt if isinstance(prompt, Request) else self.request(prompt, params)
        request.deliver = deliver
        with self._changed:
            self._check_open()
            self._arrived.append((request, first))
            self._open[request] = None
            self._changed.notify_all()
        return request

    def stream(self, requests: Iterable[Request] = ()) -> "Stream":
        """Submit requests and read their events; see `Stream`."""
        return Stream(self, requests)

    def cancel(self, request: Request) -> None:
        """End a request, from any thread; at the latest after the step that is running."""
        with self._changed:
            if request.finished:
                return
            self._cancelled.append(request)
            if self._runner is not None:
                return
            self._runner = threading.current_thread()
        try:
            with current(self.device):
                self._take()
                while self.loop.pending:  # with a cancelled request in it, no further round is launched
                    self._step()
                self.loop.retire()
        finally:
            self._done()

    def close(self) -> None:
        """Cancel all requests, from any thread, and give up the models: later requests are refused."""
        with self._changed:
            if self._closed:
                return
        self._begin()
        try:
            with current(self.device):
                self._take()
                self._deliver([event for request in [*self._open] if (event := self.loop.cancel(request)) is not None])
                while self.loop.pending:
                    self._step()
                self.loop.retire()
        finally:
            self._closed = True
            del self.loop, self.target, self.grammars
            self._done()

    # --- steps

    @property
    def busy(self) -> bool:
        """Whether a step has something to do or to return."""
        with self._changed:
            return self._has_work()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until there is something to do, at most `timeout` seconds. For a thread that only runs steps."""
        with self._changed:
            return self._changed.wait_for(self._has_work, timeout)

    def step(self) -> list[Event]:
        """Admit or prefill requests and run one round. Returns the new events of the requests without `deliver`. Waits
        for a step of another thread. If a step fails, all requests end, and the error is raised here and delivered to
        them."""
        self._begin()
        try:
            self._step()
            events, self._unread = self._unread, []
            return events
        finally:
            self._done()

    def snapshot(self) -> Snapshot:
        """How busy the session is, from any thread; during a step, roughly."""
        slots = self.loop.slots
        running = len(slots.active) + len(slots.filling)
        return Snapshot(slots.size, running, len(self.loop.prompts.waiting) + len(self._arrived))

    def pages(self) -> dict[str, tuple[int, int]]:
        """The K/V pages that requests hold, and all, by model: target and draft. Only between two steps."""
        caches = zip(("target", "draft"), self.loop.slots.caches, strict=False)
        return {model: (cache.spare - cache.free_pages, cache.spare) for model, cache in caches}

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Context manager for what uses the caches itself: finishes all requests first, whose events wait."""
        self._begin()
        try:
            with current(self.device):
                self._take()
                while self.loop.busy:
                    self._step()
                with self._running():
                    yield
        finally:
            self._done()

    def _next(self, inbox: deque[Entry]) -> Event:
        """Take the next event from the inbox of this thread's requests; runs steps while no other thread does."""
        while True:
            with self._changed:
                while not inbox and self._runner is not None:
                    self._refuse_nested()
                    self._changed.wait()
                if inbox:
                    return _read(inbox)
                self._check_open()
                self._runner = threading.current_thread()
            try:
                self._step()
            finally:
                self._done()
            if inbox:  # without the lock: only this thread reads it
                return _read(inbox)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(CLOSED)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in ("loop", "target", "grammars"):
                raise ValueError(CLOSED)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _has_work(self) -> bool:
        self._check_open()
        return bool(self._arrived or self._cancelled or self._unread) or self.loop.busy

    def _begin(self) -> None:
        with self._changed:
            while self._runner is not None:
                self._refuse_nested()
                self._changed.wait()
            self._check_open()
            self._runner = threading.current_thread()

    def _refuse_nested(self) -> None:
        """RuntimeError if the step would never end: this thread is in the middle of it, or it ran when this process was
        forked."""
        if self._lost:
            raise RuntimeError(
                "this process was forked while a step of the engine ran, whose thread is not here: load an engine in "
                "this process, or start it with multiprocessing's method spawn"
            )
        if self._runner is threading.current_thread():
            raise RuntimeError("a function that a request calls, such as a trace, began another request")

    def _done(self) -> None:
        with self._changed:
            self._runner = self._last
            self._changed.notify_all()

    def _take(self) -> None:
        """Pass what arrived meanwhile to the loop."""
        if not self._arrived and not self._cancelled:
            return
        with self._changed:
            arrived, cancelled = [*self._arrived], [*self._cancelled]
            self._arrived.clear()
            self._cancelled.clear()
        for request, first in reversed(arrived):
            if first:
                self.loop.prompts.waiting.appendleft(request)
        self.loop.prompts.waiting.extend(request for request, first in arrived if not first)
        self._deliver([event for request in cancelled if (event := self.loop.cancel(request)) is not None])

    def _step(self) -> None:
        try:
            with current(self.device):
                self._take()
                events = self.loop.step()
                self._deliver(events)
        except BaseException:
            try:
                with self._running():  # out of memory becomes a sentence
                    raise
            except BaseException as error:
                self._fail(error)
                raise

    def _deliver(self, events: list[Event]) -> None:
        """Pass events to their requests, and end the requests of which a function raised an error."""
        slots = self.loop.slots
        faulty = {request: None for request in (*slots.active, *slots.filling) if request.fault}
        for event in events:
            request = event.request
            if request.fault is None:
                try:
                    (request.deliver or self._unread.append)(event)
                except Exception as error:
                    request.fault = error
            if request.fault is not None:
                faulty[request] = None
            elif event.finished:
                self._close(request)
        for request in faulty:
            self._end(request)
        if events or faulty:
            with self._changed:
                self._changed.notify_all()

    def _end(self, request: Request) -> None:
        """End a request of which a function raised an error."""
        error, request.fault = request.fault, None  # its traceback knows the request, and the session
        assert error is not None
        log.error("a function that a request calls raised an error, which ends the request", exc_info=error)
        if (event := self.loop.cancel(request)) is not None:
            request.finished = "failed"
            if request.deliver is None:
                self._unread.append(event._replace(finished=request.finished))
        self._tell(request, error)
        if not self.loop.pending:  # otherwise the next step frees the slot
            self.loop.retire()

    def _close(self, request: Request) -> None:
        """Nothing more is delivered to the request."""
        request.deliver = None
        with self._changed:
            self._open.pop(request, None)

    def _tell(self, request: Request, error: BaseException) -> None:
        """Deliver the error that ended a request."""
        deliver = request.deliver
        self._close(request)
        try:
            if deliver is not None:
                deliver(error)
        except Exception:
            log.exception("a function that a request calls raised an error when it was told of one")

    def _fail(self, error: BaseException) -> None:
        """End all requests, whose state the failed step may have left half changed."""
        try:
            for request in self._ended():
                self._tell(request, error)
        finally:
            self.loop.clear(forget=True)

    def _ended(self) -> list[Request]:
        """Mark all requests as ended and return them, also those whose last event the failed step did not deliver."""
        with self._changed:
            requests = [*self._open]
            self._arrived.clear()
            self._cancelled.clear()
        for request in requests:
            request.finished = request.finished or "failed"
        return requests

    def _at_exit(self) -> None:
        """Wait for the running step and let no other one begin: threads that want one sleep until the process ends.
        torch aborts the process if a daemon thread returns from it while the interpreter is torn down, or if a stream
        that is closed then frees its slot."""
        if self._lost:
            return
        with self._changed:
            self._last = threading.current_thread()
            self._runner = self._runner or self._last
            if not self._changed.wait_for(lambda: self._runner is self._last, LAST_STEP):
                return
        self._ended()

    def _after_fork(self) -> None:
        """This process was forked: of its threads it has only this one, and another one may have held the lock."""
        self._changed, self._lost = threading.Condition(), self._runner is not None


_sessions = WeakSet[Session]()


def _after_fork() -> None:
    for session in list(_sessions):
        session._after_fork()


os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _end_sessions() -> None:
    for session in list(_sessions):
        session._at_exit()


def _read(inbox: deque[Entry]) -> Event:
    entry = inbox.popleft()
    if isinstance(entry, BaseException):
        raise entry
    return entry


class Stream(Iterator[Event]):
    """The events of some requests, until all have ended. Requests are submitted when the first event is asked for.
    Closing the stream cancels those that have not ended."""

    def __init__(self, session: Session, requests: Iterable[Request]):
        self.session = session
        self._unsent, self._inbox, self._left = list(requests), deque[Entry](), set[Request]()
        call = object()
        for request in self._unsent:
            request.call = call

    def submit(self, request: Request, first: bool = False) -> None:
        """Add a request; `first`: before the requests that wait already."""
        self._left.add(request)
        self.session.submit(request, first=first, deliver=self._inbox.append)  # a method of the stream's would keep it

    def __next__(self) -> Event:
        for request in self._unsent:
            self.submit(request)
        self._unsent.clear()
        if not self._left:
            raise StopIteration
        try:
            event = self.session._next(self._inbox)
        except BaseException:
            self.close()
            raise
        if event.finished:
            self._left.discard(event.request)
        return event

    def close(self) -> None:
        self._unsent.clear()
        while self._left:
            self.session.cancel(self._left.pop())

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
