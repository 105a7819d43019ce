"""Pieces of work by key: captured and replayed as CUDA graphs on a GPU, run directly elsewhere."""

import gc
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from specker.kernels.variant import Counters, count_in

log = logging.getLogger(__name__)

FAILURES = 2  # failed captures after which nothing more is captured
LATE = 512  # most captures after the warm-up: each one stops the batch and holds memory

_capturing = threading.Lock()  # one capture at a time in the process


class Graphs:
    """The first call with a key runs the work, which compiles its kernels; the second captures it; later calls replay
    it. Work with the key None is never captured.

    If a capture fails, for example because a library allocates memory in it, its work is launched directly from then
    on, with a warning: slower, but with the same results. After `FAILURES` of them nothing more is captured."""

    def __init__(self, device: torch.device | None = None):
        """`device`: the GPU whose work is captured; it must be the current device of a thread that calls `run`. None:
        all work runs directly."""
        self.device, self.capture = device, device is not None
        self.passes = 2 if self.capture else 1  # calls until a key is compiled and captured
        self.captured: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self.late = 0  # captures since `warmed`
        self.seconds = 0.0  # that all captures took
        self.bytes = 0  # of the device's memory that became less meanwhile
        self._warm = False
        self._seen: set[Hashable] = set()
        self._failed: set[Hashable] = set()
        self._pool: Any = None  # the allocator's memory for graphs; all share it, since they never run at the same time
        self._stream: torch.cuda.Stream | None = None
        self.counters = Counters()  # graphs of two engines may run at the same time, so each engine has its own

    def warmed(self) -> None:
        """Count captures as late from now on."""
        self._warm = True

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Context manager in which nothing is captured: the first call after it captures what it has run."""
        passes, self.passes = self.passes, 1
        try:
            yield
        finally:
            self.passes = passes

    def to_json(self) -> dict[str, Any]:
        return {"captured": len(self.captured), "late": self.late, "seconds": self.seconds, "bytes": self.bytes}

    def run(self, key: Hashable | None, work: Callable[[], None]) -> None:
        outer = count_in(self.counters)
        try:
            self._run(key, work)
        finally:
            count_in(outer)

    def _run(self, key: Hashable | None, work: Callable[[], None]) -> None:
        if not self.capture or key is None:
            work()
        elif key in self.captured:
            self.captured[key].replay()
        elif key not in self._seen:
            self._seen.add(key)
            work()
        elif self._may_capture(key) and (graph := self._capture(key, work)) is not None:
            graph.replay()
        else:
            work()

    def _may_capture(self, key: Hashable) -> bool:
        return self.passes > 1 and key not in self._failed and len(self._failed) < FAILURES and self.late < LATE

    def _capture(self, key: Hashable, work: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """The captured graph; None, with a warning, if the capture fails. Raises what else the work raises."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        if self._stream is None:  # torch's own capture stream belongs to the device of the process's first capture
            self._stream = torch.cuda.Stream(self.device)
        graph, outside = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        mistake: BaseException | None = None
        torch.cuda.empty_cache()  # as a capture does: it is not to hide what the graph takes
        began, free = time.perf_counter(), torch.cuda.mem_get_info(self.device)[0]
        try:
            # thread_local: what other threads do meanwhile, such as an allocation, does not end this capture.
            with (
                _uncollected(),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                try:
                    work()
                except BaseException as error:
                    mistake = error
        except RuntimeError as error:
            mistake = mistake or error
            self._recover(outside)
        if isinstance(mistake, RuntimeError):  # errors of CUDA, in other libraries too, and torch's out-of-memory error
            self._warn(key, mistake)
            return None
        if mistake is not None:
            raise mistake
        self.seconds += time.perf_counter() - began
        self.bytes += free - torch.cuda.mem_get_info(self.device)[0]
        self.captured[key] = graph
        self.late += self._warm
        return graph

    def _recover(self, stream: torch.cuda.Stream) -> None:
        """Undo what torch leaves behind if a capture cannot end: the capture stream stays the current one, and the
        allocator still serves this thread from the pool, so every later capture would be refused."""
        torch.cuda.set_stream(stream)
        assert self.device is not None
        with suppress(RuntimeError):  # the capture failed before or after the allocator's part
            torch._C._cuda_endAllocateToPool(self.device.index, self._pool)
            torch._C._cuda_releasePool(self.device.index, self._pool)
        self._pool = None  # graphs captured earlier keep their memory

    def _warn(self, key: Hashable, error: RuntimeError) -> None:
        self._failed.add(key)
        reason = str(error).strip().splitlines()
        log.warning(
            "a CUDA graph could not be captured, so its kernels are launched one by one (%s): %s",
            key,
            reason[0] if reason else type(error).__name__,
        )
        if len(self._failed) == FAILURES:
            log.warning("%d captures failed: nothing more is captured, and rounds take longer", FAILURES)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Turn the cyclic garbage collector off: a graph that it finalises during a capture invalidates the capture. Other
    threads' captures wait."""
    with _capturing:
        on = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if on:
                gc.enable()
