"""Prompts -> token ids, in threads beside the event loop and the steps. Short texts do not wait for long ones, and no
other work for grammars."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, TypeVar

from specker.checkpoints.checkpoint import Checkpoint
from specker.runtime.text import TooLong, encode

LONG = 50_000  # characters, which take about a tenth of a second
THREADS = {"short": 2, "long": 1, "grammar": 1}

T = TypeVar("T")


class Encoder:
    def __init__(self, target: Checkpoint, name: str):
        """`target`: its tokenizer and its context. `name`: the model's."""
        self.target, self.name = target, name
        self.longest = max(map(len, target.tokenizer.get_vocab()))  # characters of a token
        target.tokenizer("a")  # a fast tokenizer may only be used in several threads once its settings do not change
        fast = getattr(target.tokenizer, "is_fast", False)
        self._alone = nullcontext() if fast else threading.Lock()
        self._pools = {use: ThreadPoolExecutor(n, f"specker-{use}") for use, n in THREADS.items()}
        self._began: dict[object, float] = {}  # of what runs now

    async def run(self, work: Callable[..., T], *args: Any, use: str = "short") -> T:
        """The result of `work`, computed by one of the threads for `use`."""
        return await asyncio.get_running_loop().run_in_executor(self._pools[use], self._timed, work, args)

    async def encode(self, text: str, special: bool = True, what: str = "prompt") -> list[int]:
        """Token ids. `special`: with the tokenizer's own special tokens. `what`: the text's name in messages. Raises
        ValueError, and TooLong without looking at the text if it has more characters than the context's tokens can
        have."""
        context = self.target.config.max_context
        if len(text) > context * self.longest:
            raise TooLong(
                f"the {what} has {len(text)} characters, but the context of {self.name} is {context} tokens of at most "
                f"{self.longest} characters"
            )
        return await self.run(self._encode, text, special, use="long" if len(text) > LONG else "short")

    def oldest(self) -> float:
        """Seconds since the beginning of the oldest work that is not done; 0 if there is none."""
        return time.monotonic() - min([*self._began.values()], default=time.monotonic())

    def close(self) -> None:
        """Begin nothing more."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)

    def _encode(self, text: str, special: bool) -> list[int]:
        with self._alone:
            return encode(self.target, text, special)

    def _timed(self, work: Callable[..., T], args: tuple[Any, ...]) -> T:
        key = object()
        self._began[key] = time.monotonic()
        try:
            return work(*args)
        finally:
            del self._began[key]
