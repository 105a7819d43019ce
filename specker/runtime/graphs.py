"""Pieces of work by key: captured and replayed as CUDA graphs on a GPU, run directly elsewhere."""

from collections.abc import Callable, Hashable
from typing import Any

import torch


class Graphs:
    """The first call with a key runs the work, which compiles its kernels; the second captures it; later calls replay
    it. Work with the key None is never captured."""

    def __init__(self, capture: bool):
        self.capture, self.passes = capture, 2 if capture else 1  # `passes`: calls until a key is compiled and captured
        self.captured: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._seen: set[Hashable] = set()
        self._pool: Any = None

    def run(self, key: Hashable | None, work: Callable[[], None]) -> None:
        if not self.capture or key is None:
            work()
        elif key in self.captured:
            self.captured[key].replay()
        elif key not in self._seen:
            self._seen.add(key)
            work()
        else:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                work()
            self._pool = self._pool or graph.pool()
            self.captured[key] = graph
            graph.replay()
