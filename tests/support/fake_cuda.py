"""Stand-ins for torch.cuda's graphs, streams, events and devices, which run on the CPU and fail as torch does."""

import contextlib
import threading

import torch

from specker.runtime.round.graphs import Graphs


class FakeCuda:
    """Install with `install(monkeypatch)`. Each thread has a current device and stream, at first those of device 0.

    As torch does: a capture is refused while the allocator still records to its pool; a capture that was invalidated
    raises when it ends, leaves the capture stream current and the allocator recording."""

    def __init__(self):
        self.pools = []  # of the captures that were begun
        self.recording = set()
        self.seen = []  # (what, the thread's current device)
        self.invalid = False
        self._thread = threading.local()
        self._count = 0
        self.free = 1 << 30  # bytes; each capture takes a MiB

    @property
    def device(self) -> int:
        return getattr(self._thread, "device", 0)

    @property
    def stream(self):
        return getattr(self._thread, "stream", f"default stream of {self.device}")

    def note(self, what: str) -> None:
        self.seen.append((what, self.device))

    def invalidate(self) -> None:
        """What an operation does that a capture does not permit."""
        self.invalid = True
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    def install(self, monkeypatch) -> "FakeCuda":
        fake = self

        class Graph:
            def __init__(self):
                fake.note("graph")
                self.replays = 0

            def replay(self):
                fake.note("replay")
                self.replays += 1

        class Capture(contextlib.AbstractContextManager):
            def __init__(self, graph, pool, stream, capture_error_mode):
                assert capture_error_mode == "thread_local"
                self.pool, self.stream = pool, stream

            def __enter__(self):
                fake.note("capture")
                assert self.stream.device.index == fake.device, "the capture stream belongs to another device"
                self.before, fake._thread.stream = fake.stream, self.stream
                if self.pool in fake.recording:
                    raise RuntimeError("already recording to mempool_id")
                fake.pools.append(self.pool)
                fake.recording.add(self.pool)

            def __exit__(self, *_):
                if fake.invalid:
                    fake.invalid = False
                    raise RuntimeError("operation failed due to a previous error during capture")
                fake.recording.remove(self.pool)
                fake._thread.stream = self.before
                fake.free -= 1 << 20

        class Device(contextlib.AbstractContextManager):
            def __init__(self, device):
                self.index = device.index

            def __enter__(self):
                self.before, fake._thread.device = fake.device, self.index

            def __exit__(self, *_):
                fake._thread.device = self.before

        class Stream:
            def __init__(self, device):
                self.device = device

        class Event:
            def __init__(self, enable_timing=False):
                fake.note("event")

            def record(self):
                fake.note("record")

            def synchronize(self):
                fake.note("synchronize")

            def elapsed_time(self, other):
                return 1.0

        def end_allocation(device, pool):
            if pool not in fake.recording:
                raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
            fake.recording.remove(pool)

        def new_pool():
            fake._count += 1
            return fake._count

        def set_stream(stream):
            fake._thread.stream = stream

        made = {
            "CUDAGraph": Graph,
            "graph": Capture,
            "device": Device,
            "Event": Event,
            "Stream": Stream,
            "current_stream": lambda device=None: fake.stream,
            "set_stream": set_stream,
            "graph_pool_handle": new_pool,
            "mem_get_info": lambda device: (fake.free, 1 << 30),
        }
        for name, value in made.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end_allocation, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda device, pool: None, raising=False)
        return self


class Again(Graphs):
    """A replay on the CPU: it runs the work again, except for the first one, since the capture ran the work too."""

    def _capture(self, key, work):
        graph = super()._capture(key, work)
        replay = graph.replay

        def again():
            replay()
            if graph.replays > 1:
                work()

        graph.replay = again
        return graph
