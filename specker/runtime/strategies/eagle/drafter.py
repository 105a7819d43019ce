"""The drafter that runs a head on the target's hidden states."""

import torch
from torch import Tensor

from specker.model.cache import KVCache
from specker.model.decoder import Final, Model
from specker.model.heads import ReadingHead
from specker.model.rows import begin
from specker.runtime.drafter import Draft, Drafter
from specker.runtime.head import Head
from specker.runtime.round import Round
from specker.runtime.state import Request

BLOCK = 256  # pairs of a prompt that the head forwards at once
WAITING = 64  # most features that wait while nothing is drafted


class EagleDrafter(Drafter):
    """The head's cache holds the pairs of a text's columns 0, 1, .. (model/heads.py). `waiting` holds the features of
    the next columns, whose pairs the next draft forwards."""

    model: Model
    cache: KVCache
    head: Head

    def __init__(self, reading: ReadingHead, cache: KVCache, head: Head):
        self.reading, self.model, self.cache, self.head = reading, reading.model, cache, head
        self.taps = reading.spec.taps
        self.waiting: list[Tensor | None] = [None] * len(cache.exact_len)
        if (ids := reading.weights.ids) is not None:
            head.token_ids, head.known = ids, set(ids.tolist())

    @property
    def keeps_prefix(self) -> bool:
        return True

    def left(self, length: int) -> int:
        return self.cache.capacity - length

    def draft(self, r: Round) -> Draft:
        """Draft a chain for all sequences; nothing if one has no feature yet, as after a prompt of one token."""
        n, depth = len(r.requests), min(r.budget.depth, r.budget.nodes)
        if any(x is None for x in self.waiting[:n]):
            return Draft()
        self.head.follow(r.requests)
        draft = Draft(depth, depth=depth)
        output, final, positions = self._catch_up(r)
        for step in range(depth):
            if step:
                rows, embedded = begin(self.model, self.cache, r.lengths, 1, step - 1, r.window[:, step : step + 1])
                output, final = self.reading.forward(self.cache, rows, output, embedded)
                positions = rows.positions + 1
            draft.extend(r, self.head, final, positions, r.window[:, step + 1 : step + 2])
            draft.size = draft.depth = step + 1
            if r.confident and not draft.goes_on(r):
                break
        return draft

    def _catch_up(self, r: Round) -> tuple[Tensor, Final, Tensor]:
        """Forward the pairs of the columns before the roots, with true features. Returns, for each sequence, the last
        pair's output [n, H], its row for the LM head, and the position of the root [n]."""
        cache = self.cache
        starts: list[int] = []
        tokens: list[int] = []
        features: list[Tensor] = []
        for slot, request in enumerate(r.requests):
            waiting, start = self.waiting[slot], cache.exact_len[slot]
            assert waiting is not None and start + len(waiting) == len(request.text) - 1
            starts.append(start)
            features.append(waiting)
            tokens += request.text[start + 1 :]
            cache.exact_len[slot] += len(waiting)
            self.waiting[slot] = None
        rows = cache.after(starts, [len(x) for x in features])
        embedded = self.model.embed_tokens(torch.tensor(tokens, device=self.model.device))
        output, final = self.reading.forward(cache, rows, torch.cat(features), embedded)
        last = rows.cu_rows[1:].long() - 1
        return output[last], final.at(last), rows.positions[last] + 1

    def learn(self, r: Round, paths: list[list[int]]) -> None:
        """Keep the features of the accepted rows. Their pairs wait for the next draft, which knows all of their
        tokens."""
        for slot, path in enumerate(paths):
            if path:
                taps = r.tapped(slot, path[-1] + 1)
                self._wait(slot, torch.stack([taps[depth][path] for depth in self.taps]))
                if (features := self.waiting[slot]) is not None and len(features) > WAITING:
                    self._run(slot, r.requests[slot].text)

    def prefilled(self, slot: int, request: Request, first: int, rows: dict[int, Tensor]) -> None:
        """Run the pairs of a chunk of the prompt."""
        self._wait(slot, torch.stack([rows[depth] for depth in self.taps]))
        self._run(slot, request.text)

    def _run(self, slot: int, text: list[int]) -> None:
        """Run the pairs of the features that wait, but for the last one, so that the next draft has a row to
        forward."""
        cache, features = self.cache, self.waiting[slot]
        assert features is not None
        while len(features) > 1:
            start, now = cache.exact_len[slot], features[: min(BLOCK, len(features) - 1)]
            tokens = text[start + 1 : start + 1 + len(now)]
            embedded = self.model.embed_tokens(torch.tensor(tokens, device=self.model.device))
            self.reading.forward(cache, cache.after([start], [len(now)], slot=slot), now, embedded)
            cache.exact_len[slot] += len(now)
            features = features[len(now) :]
        self.waiting[slot] = features

    def _wait(self, slot: int, taps: Tensor) -> None:
        """Add the features of the target's rows [A, T, Ht] to those that wait."""
        features, before = self.reading.features(taps), self.waiting[slot]
        self.waiting[slot] = features if before is None else torch.cat((before, features))

    def move(self, source: int, target: int) -> None:
        self.waiting[target], self.waiting[source] = self.waiting[source], None

    def reset(self, slot: int) -> None:
        self.waiting[slot] = None
