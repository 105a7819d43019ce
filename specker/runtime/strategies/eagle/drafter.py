"""The drafter that runs a head on the target's hidden states."""

from functools import cache

import torch
from torch import Tensor

from specker.model.cache import KVCache, Rows
from specker.model.decoder import Final
from specker.model.heads import ReadingHead
from specker.runtime.control.policy import Budget
from specker.runtime.round.drafter import Draft
from specker.runtime.round.lm_head import Head
from specker.runtime.round.round import Round
from specker.runtime.round.state import Request
from specker.runtime.strategies.draft.drafter import AutoregressiveDrafter

BLOCK = 256  # pairs of a prompt that the head forwards at once
WAITING = 64  # most features that wait while nothing is drafted


class EagleDrafter(AutoregressiveDrafter):
    """The head's cache holds the pairs of a text's columns 0, 1, .. (model/heads.py). A draft begins with what the head
    made of the last pair, `output` and `last`.

    In rounds that the host places, the features of accepted rows wait until the next draft, which forwards their pairs
    together. In rounds of fixed shape the device forwards the pairs of all rows that a round may accept, right after
    acceptance; those beyond the accepted ones are overwritten later."""

    def __init__(self, reading: ReadingHead, cache: KVCache, head: Head, width: int = 1, depth: int = 0):
        super().__init__(reading.model, cache, head, width, depth)
        self.reading, self.depth = reading, depth
        self.taps = reading.spec.taps
        self.waiting: list[Tensor | None] = [None] * len(cache.exact_len)  # features [count, H] by slot
        # Of each slot's last pair: the head's output, which a draft token gets as its feature, and the row for the LM
        # head.
        shape = len(cache.exact_len), self.model.config.hidden_size
        self.output, self.last = torch.zeros(2, *shape, dtype=self.model.dtype, device=self.model.device).unbind(0)
        self._last = self.output  # [n * width, H], the output of the last step
        if (ids := reading.weights.ids) is not None:
            head.token_ids, head.known = ids, set(ids.tolist())

    def left(self, length: int) -> int:
        return self.cache.capacity - length

    def fixed(self, length: int, budget: Budget) -> bool:
        return length > 1  # a text of one token has no pair

    def behind(self, requests: list[Request]) -> int:
        return 0

    def advance(self, requests: list[Request], most: int) -> int:
        return 0

    def prefill(self, slot: int, text: list[int]) -> None:
        """The target's rows are needed: see `prefilled`."""

    def compiles(self, r: Round) -> bool:
        return self.model.stack is not None and self._readable

    def _compiled_chain(self, r: Round, draft: Draft) -> None:
        self._run_all(r.requests)
        columns = [length - 1 for length in r.lengths]  # a pair's column is the one before its token's
        rows = self.cache.after(columns, [1] * r.n)
        self._compiled_steps(r, draft, self.output[: r.n], rows, columns, self.reading.normed)

    def catch_up(self, r: Round, slot: int) -> int:
        if r.fixed:
            self._run(slot, r.requests[slot].text)
        return 0

    def draft(self, r: Round) -> Draft:
        """Draft for all sequences; nothing if one has no pair yet, as after a prompt of one token."""
        if not r.fixed and any(len(request.text) <= self.ahead for request in r.requests):
            return Draft()
        return super().draft(r)

    def _catch_up(self, r: Round) -> tuple[Final, Tensor]:
        """Forward the pairs that wait. Returns the rows for the first draft tokens [n, H] and the roots' positions."""
        n = r.n
        if not r.fixed:
            self._run_all(r.requests)
        self._keep(r, self.output[:n])
        lengths = r.lengths if isinstance(r.lengths, Tensor) else torch.tensor(r.lengths, device=self.model.device)
        return Final(self.last[:n], self.reading.normed), lengths if r.shape.draws == "greedy" else lengths - 1

    def step(self, r: Round, first: int, tokens: Tensor, parents: Tensor | None = None) -> tuple[Final, Tensor]:
        """A pair's column is the one before its token's, so row 0 of the window is the root's pair, 2 columns before
        the end of the text."""
        features = r.memory.get("hidden", r.n) if r.confident else self._last
        rows, stream, joined = self.reading.begin(self.cache, self._lengths(r), 2, first, tokens, features, parents)
        output, final = self.reading.forward(self.cache, rows, stream, joined)
        self._keep(r, output)
        # A pair predicts the draw of the next position. Greedy draws read none.
        return final, rows.positions if r.shape.draws == "greedy" else rows.positions + 1

    def _keep(self, r: Round, output: Tensor) -> None:
        """Keep the head's output for the next step. Drafts that end by confidence are several graph segments."""
        if r.confident:
            r.memory.put("hidden", output)
        else:
            self._last = output

    def accepted(self, r: Round) -> None:
        if r.fixed:
            for slot, request in enumerate(r.requests):
                self._run(slot, request.text)
            r.run(("pairs", r.draft.size, r.draft.tree), lambda: self._pairs(r), draws=False)

    def _pairs(self, r: Round) -> None:
        """Forward the pairs of the rows that the round accepted, which only the device knows."""
        s, n, N, device = r.state, r.n, r.draft.size, self.model.device
        most = min(N, self.depth) + 1
        report = s.report[: n * (3 + 2 * N)].view(n, -1)
        accepted, path = report[:, 0], report[:, 1 : most + 1]
        taps = r.memory.taps(len(self.taps), r.rows).view(n, N + 1, len(self.taps), -1)
        if r.draft.tree:
            taps = taps[torch.arange(n, device=device).unsqueeze(1), path.clamp(0, N)]
        features = self.reading.features(taps[:, :most].flatten(0, 1))
        before = s.length - accepted
        pairs = self.reading.begin(self.cache, before, 1, 0, s.committed[:, 1:], features, text=True)
        output, final = self.reading.forward(self.cache, *pairs)
        self._note(slice(n), output, final, accepted.clamp(min=1) + _before(n, most, device))

    def _note(self, slots: slice, output: Tensor, final: Final, last: Tensor) -> None:
        """Note what the head made of the last pair of each slot, row `last` [n] of [T, H]."""
        torch.index_select(output, 0, last, out=self.output[slots])
        torch.index_select(final.rows, 0, last, out=self.last[slots])

    def observe(self, r: Round, slot: int, path: list[int]) -> None:
        """What the head wrote for draft tokens is dropped."""

    def learn(self, r: Round, paths: list[list[int]]) -> None:
        """Keep the features of the accepted rows. Their pairs wait for the next draft, which knows all of their
        tokens."""
        for slot, (request, path) in enumerate(zip(r.requests, paths, strict=True)):
            if r.fixed:
                self.cache.exact_len[slot] = len(request.text) - 1
            elif path:
                taps = r.tapped(slot, path[-1] + 1)
                self._wait(slot, torch.stack([taps[depth][path] for depth in self.taps], 1))
                if (features := self.waiting[slot]) is not None and len(features) > WAITING:
                    self._run(slot, request.text)

    def prefilled(self, slot: int, request: Request, first: int, rows: dict[int, Tensor]) -> None:
        """Run the pairs of a chunk of the prompt."""
        self._wait(slot, torch.stack([rows[depth] for depth in self.taps], 1))
        self._run(slot, request.text)

    def _wait(self, slot: int, taps: Tensor) -> None:
        """Add the features of the target's rows [T, A, Ht] to those that wait."""
        features, before = self.reading.features(taps), self.waiting[slot]
        self.waiting[slot] = features if before is None else torch.cat((before, features))

    def _run(self, slot: int, text: list[int]) -> None:
        """Forward the pairs that wait in one slot."""
        cache, features = self.cache, self.waiting[slot]
        if features is None:
            return
        for now in features.split(BLOCK):
            start = cache.exact_len[slot]
            self._forward(slice(slot, slot + 1), cache.after([start], [len(now)], slot=slot), now, text[start + 1 :])
            cache.exact_len[slot] += len(now)
        self.waiting[slot] = None

    def _run_all(self, requests: list[Request]) -> None:
        """Forward the pairs that wait in all slots, together if all have some."""
        waiting = [x for x in self.waiting[: len(requests)] if x is not None]
        if len(waiting) < len(requests):
            for slot, request in enumerate(requests):
                self._run(slot, request.text)
            return
        starts, counts = self.cache.exact_len[: len(requests)], [len(x) for x in waiting]
        rows = self.cache.after(starts, counts)
        tokens = [token for start, request in zip(starts, requests, strict=True) for token in request.text[start + 1 :]]
        self._forward(slice(len(requests)), rows, torch.cat(waiting), tokens)
        for slot, count in enumerate(counts):
            self.cache.exact_len[slot] += count
            self.waiting[slot] = None

    def _forward(self, slots: slice, rows: Rows, features: Tensor, tokens: list[int]) -> None:
        """Forward pairs whose tokens the host knows."""
        ids = torch.tensor(tokens[: len(features)], device=self.model.device)
        pairs = self.reading.pairs(features, self.model.embed_tokens(ids), rows.positions)
        output, final = self.reading.forward(self.cache, rows, *pairs)
        self._note(slots, output, final, rows.cu_rows[1:].long() - 1)

    def move(self, source: int, target: int) -> None:
        self.waiting[target], self.waiting[source] = self.waiting[source], None
        for x in (self.output, self.last):
            x[target] = x[source]

    def reset(self, slot: int) -> None:
        self.waiting[slot] = None


@cache
def _before(sequences: int, rows: int, device: torch.device) -> Tensor:
    """[sequences] int64, the row before each sequence's first, of sequences of `rows` rows. CUDA graphs hold its
    address, so the cache never frees it."""
    return torch.tensor([rows * i - 1 for i in range(sequences)], device=device)
