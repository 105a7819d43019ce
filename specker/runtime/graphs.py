"""Pieces of work by key: captured and replayed as CUDA graphs on a GPU, run directly elsewhere."""

import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch

log = logging.getLogger(__name__)


class Graphs:
    """The first call with a key runs the work, which compiles its kernels; the second captures it; later calls replay
    it. Work with the key None is never captured. If a capture fails, for example because a library allocates memory in
    it, the work is launched directly from then on, with a warning: slower, but with the same results."""

    def __init__(self, capture: bool):
        self.capture, self.passes = capture, 2 if capture else 1  # `passes`: calls until a key is compiled and captured
        self.captured: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._seen: set[Hashable] = set()
        self._failed: set[Hashable] = set()
        self._pool: Any = None

    def run(self, key: Hashable | None, work: Callable[[], None]) -> None:
        if not self.capture or key is None or key in self._failed:
            work()
        elif key in self.captured:
            self.captured[key].replay()
        elif key not in self._seen:
            self._seen.add(key)
            work()
        elif (graph := self._graph(key, work)) is not None:
            graph.replay()
        else:
            work()

    def _graph(self, key: Hashable, work: Callable[[], None]) -> Any:
        """The captured graph; None, with a warning, if the capture fails."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                work()
        except RuntimeError as error:  # errors of CUDA, in other libraries too, and torch's out-of-memory error
            self._failed.add(key)
            reason = str(error).strip().splitlines()
            log.warning(
                "a CUDA graph could not be captured, so its kernels are launched one by one (%s): %s",
                key,
                reason[0] if reason else type(error).__name__,
            )
            return None
        self._pool = self._pool or graph.pool()
        self.captured[key] = graph
        return graph
