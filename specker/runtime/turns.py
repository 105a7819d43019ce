"""Turns on an engine: its caches hold one batch of requests, so threads decode one after another."""

import threading
from collections import deque

LOOK = 1.0  # seconds between looks at whether the thread that holds the turn still lives


class Turn:
    """The right to use the caches. `running` while a round runs; between the rounds of a stream it is not."""

    def __init__(self, turns: "Turns"):
        self.turns, self.thread, self.running = turns, threading.current_thread(), True

    def pause(self) -> None:
        """A stream hands out a step."""
        with self.turns.changed:
            self.running = False
            self.turns.changed.notify_all()

    def resume(self) -> None:
        """A stream goes on. RuntimeError if its thread has begun another request meanwhile."""
        with self.turns.changed:
            if self.turns.current is not self:
                raise RuntimeError("this stream ended when another request began: an engine decodes one at a time")
            self.running = True

    def end(self) -> None:
        with self.turns.changed:
            if self.turns.current is self:
                self.turns.current = None
                self.turns.changed.notify_all()


class Turns:
    """Requests of several threads wait for one another, in the order in which they came. A thread that begins a request
    while a stream of its own is open ends that stream."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.current: Turn | None = None
        self._waiting: deque[Turn] = deque()

    def take(self) -> Turn:
        """Wait for the turn. RuntimeError if this thread is in the middle of a round, since it would wait for ever."""
        turn = Turn(self)
        with self.changed:
            if self.current is not None and self.current.thread is turn.thread and self.current.running:
                raise RuntimeError("a function that a request calls, such as a trace, began another request")
            if not self._own(turn):
                self._waiting.append(turn)
                try:
                    while self._waiting[0] is not turn or not self._free():
                        self.changed.wait(LOOK)
                finally:
                    self._waiting.remove(turn)
                    self.changed.notify_all()
            self.current = turn
        return turn

    def _own(self, turn: Turn) -> bool:
        """Whether a stream of the same thread has the turn."""
        return self.current is not None and self.current.thread is turn.thread

    def _free(self) -> bool:
        return self.current is None or not self.current.thread.is_alive()
