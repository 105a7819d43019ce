"""The drafter that copies: from a prediction, from the text itself, from texts that ended, and from a corpus."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from specker.cpu.suffixes import NOTHING, Copy, Index, new_index
from specker.runtime.control.policy import CORPUS, OWN, PAST, PREDICTION, Match, Offer
from specker.runtime.control.stats import CopyStats
from specker.runtime.round.drafter import Draft, Drafter
from specker.runtime.strategies.lookup import SUFFIXES
from specker.runtime.strategies.lookup.pool import Pool, Pools

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable

    from specker.runtime.round.batch import Batch
    from specker.runtime.round.state import Request
    from specker.runtime.strategies.lookup.text_file import TextFile

FAILED = ("not finite", "failed")  # requests whose text is not worth copying


@dataclass(eq=False)
class CopiedDraft(Draft):
    copies: list[CopyStats | None] = field(default_factory=list)  # of each sequence

    def note(self, slot: int) -> CopyStats | None:
        return self.copies[slot]


class LookupDrafter(Drafter):
    synchronous = True  # a draft needs the tokens of the previous round

    def __init__(
        self,
        shares: bool,
        width: int,
        longest: int,
        corpus: Pool | None = None,
        file: TextFile | None = None,
    ):
        """`shares`: drafts are also copied from texts that ended. `width`: paths of a tree, 1 for chains. `longest`:
        tokens of the longest path. `corpus`: texts of the user, from which every request may copy. `file`: what keeps
        the ended texts. Raises ValueError if it cannot be read."""
        self.width, self.longest, self.corpus, self.file = width, longest, corpus, file
        self.suffixes = SUFFIXES
        self.pools = Pools() if shares else None
        self._indices: dict[Request, Index] = {}
        self._predictions: dict[Request, Index] = {}
        if file is not None and self.pools is not None:
            file.read(self.pools)
        self._written = 0 if self.pools is None else self.pools.added

    @property
    def memory(self) -> int:
        """About the bytes of the texts that drafts copy from: running ones, ended ones and the corpus."""
        kept = [pool for pool in (self.pools, self.corpus) if pool is not None]
        return sum(each.bytes for each in (*self._indices.values(), *self._predictions.values(), *kept))

    def prepare(self, requests: list[Request]) -> Offer:
        self._begin(requests)
        return Offer(matches=[self._matches(request) for request in requests], fixes=lambda budget: True)

    def _begin(self, requests: list[Request]) -> None:
        """Make an index for each new text of the batch. Texts that have left it have ended."""
        present = set(requests)
        for request in [request for request in self._indices if request not in present]:
            self._end(request)
        for request in [request for request in requests if request not in self._indices]:
            self._indices[request] = new_index(*self.suffixes)
            if request.prediction:
                self._predictions[request] = self._predicted(request)

    def _predicted(self, request: Request) -> Index:
        """An index of the prediction behind the prompt's last tokens: the answer's first draft is its beginning."""
        index = new_index(*self.suffixes)
        index.append(request.token_ids[: request.prompt_length][-self.suffixes[1] :] + request.prediction)
        return index

    def _end(self, request: Request) -> None:
        del self._indices[request]
        self._predictions.pop(request, None)
        if self.pools is not None and request.salt is not None and request.finished not in FAILED:
            self.pools.add(request.salt, request.token_ids)

    def writer(self) -> Callable[[], None] | None:
        """What writes the texts that ended by now to the file, in any thread; None if there is no file, or nothing new
        for it. To be called between two steps. The function raises OSError."""
        for request in [request for request in self._indices if request.finished]:
            self._end(request)
        if self.file is None or self.pools is None or self._written == self.pools.added:
            return None
        return partial(self._write, self.file, self.pools.added, self.pools.key, self.pools.texts())

    def _write(self, file: TextFile, added: int, key: bytes, texts: list[tuple[str, array[int]]]) -> None:
        file.write(key, texts)
        self._written = added

    def _matches(self, request: Request) -> list[Match]:
        """Index the new tokens of a text, and find its match in each source; none is named that has no match, but for
        the text itself."""
        index, matches = self._indices[request], []
        for source in SOURCES:
            if source == OWN:
                new = request.token_ids[len(index) :]
                matches.append(Match(*index.follow(new, self.suffixes[1], self.longest)))
            elif (copy := self._copy(request, source, self.longest, self.longest, 1)).tokens:
                matches.append(Match(copy.matched, len(copy.tokens), source))
        return matches

    def _copy(self, request: Request, source: str, depth: int, nodes: int, width: int) -> Copy:
        pool, most = self._pool(request, source), self.suffixes[1]
        index = self._indices[request] if source == OWN else None if pool is None else pool.index
        if source == PREDICTION:
            index = self._predictions.get(request)
        if index is None or not nodes:
            return NOTHING
        copy = index.draft(request.token_ids[-most:], most, depth, nodes, width)
        from_prompt = source == PREDICTION and copy.place < min(most, request.prompt_length)
        return NOTHING if from_prompt else copy

    def _pool(self, request: Request, source: str) -> Pool | None:
        if source == PAST and self.pools is not None and request.salt is not None:
            return self.pools.of(request.salt)
        return self.corpus if source == CORPUS else None

    def propose(self, batch: Batch) -> Draft:
        """Draft for all sequences. A text without a match drafts nothing; shorter drafts are padded."""
        self._begin(batch.requests)
        depth, found = min(batch.budget.depth, batch.budget.nodes), []
        for request in batch.requests:
            source, index = request.policy.source, self._indices[request]
            if len(index) < len(request.token_ids):  # no look came before, as in a warm-up
                index.append(request.token_ids[len(index) :])
            copy = self._copy(request, source, depth, batch.budget.nodes, self.width)
            if (pool := self._pool(request, source)) is not None and copy.tokens:
                pool.used(copy.place)
            found.append((source, copy))
        draft = CopiedDraft.of(
            batch, [list(copy.tokens) for _, copy in found], [list(copy.parents) for _, copy in found]
        )
        draft.copies = [CopyStats(source, copy.matched) if copy.tokens else None for source, copy in found]
        return draft


SOURCES = (PREDICTION, OWN, PAST, CORPUS)  # of equals, the first one is copied
