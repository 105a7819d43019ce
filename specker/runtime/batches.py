"""Batches over the first slots of a state and of the caches that a round touches."""

from collections.abc import Sequence

from specker.model.cache import KVCache
from specker.model.sampling import Draws
from specker.runtime.control.policy import Budget
from specker.runtime.round.batch import Batch, Shape
from specker.runtime.round.graphs import Graphs
from specker.runtime.round.state import Request, State

KV_BUCKETS = tuple(1024 * 4**n for n in range(6))  # columns that attention may see in captured rounds


class Batches:
    def __init__(self, state: State, caches: Sequence[KVCache], largest: Budget, max_context: int):
        """`caches`: the first one says how many columns a sequence has. `largest`: of the policies' drafts."""
        self.state, self.caches, self.largest = state, caches, largest
        self.lookahead = 2 * (largest.depth + 1) + largest.nodes
        """Columns past the text that a round and a pending one before it read or write."""
        # Skip a KV length bucket if it would leave fewer than this many columns before the context ends.
        self.buckets = (*(b for b in KV_BUCKETS if b + self.lookahead < max_context), *(c.capacity for c in caches[:1]))
        self.idle: set[int] = set()  # slots without a sequence that rounds may run over
        self._views: dict[int, State] = {}  # of the first slots
        self._bucket = 0

    def make(
        self, requests: list[Request], budget: Budget, fixed: bool, graphs: Graphs, slots: int, ahead: int = 0
    ) -> Batch:
        """A batch of the requests in slots 0, 1, ..; one of fixed shape is padded to a power of two of slots, at most
        `slots`. `ahead`: tokens that pending rounds may add to each text."""
        n = len(requests)
        padded = max(n, min(slots, 1 << (n - 1).bit_length())) if fixed else n
        state = self._views.get(padded) or self._views.setdefault(padded, self.state.first(padded))
        for slot in set(range(n, padded)) - self.idle:  # set up once: a copy from the host would block
            self.state.idle(slot, self.largest.depth + 1)
            self.idle.add(slot)
        longest = max(len(request.token_ids) for request in requests) + ahead
        bucket = self.see(longest + self.lookahead if fixed else 0)
        draws = Draws.of([request.sampling for request in requests], state.draw, fixed)
        lengths = state.length if fixed else [len(request.token_ids) for request in requests]
        shape = Shape(padded, budget, fixed, bucket, draws.kind)
        early = not all(request.may_end for request in requests)
        return Batch(requests, state, shape, draws, lengths, graphs, early, requests[0].policy.confident)

    def see(self, columns: int) -> int:
        """Limit attention to the smallest KV bucket with `columns`; 0 for all columns. Returns the bucket."""
        bucket = next((b for b in self.buckets if b >= columns), self.buckets[-1]) if columns and self.caches else 0
        if bucket != self._bucket:
            self._bucket = bucket
            for cache in self.caches:
                cache.bucket(bucket or cache.capacity)
        return bucket

    def forget_bucket(self) -> None:
        """Something else may have changed what attention sees, such as another engine of the same caches."""
        self._bucket = -1
