"""A draft model with another tokenizer than the target's (checkpoints/translation.py).

The model reads each text in its own ids, as a request of its own: the ids that the target's new tokens change are cut
from its K/V, and forwarded with the next draft. Its LM head has the rows of shared tokens only, under the target's ids,
so a drafted token is known to the target, and the model reads it as its own id. Noise belongs to the target's ids and
positions, as everywhere, so above temperature 0 both models tend to draw the same token.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, zip_longest
from operator import mul
from weakref import WeakKeyDictionary

from torch import Tensor

from specker.checkpoints.translation import Reader, Translation
from specker.cpu import Translated
from specker.model.cache import KVCache
from specker.model.decoder import Final, Model
from specker.runtime.control.policy import WHOLE, Offer, Reading
from specker.runtime.control.reasons import ENDED
from specker.runtime.round.batch import Batch
from specker.runtime.round.drafter import Accepted, Draft
from specker.runtime.round.lm_head import LMHead
from specker.runtime.round.state import Request
from specker.runtime.strategies.model_drafter import CATCH_UP_ROWS, AutoregressiveDrafter, DraftLayers


class Shadow:
    """A request's text in the draft's ids."""

    def __init__(self, translation: Translation, request: Request):
        self.reader = Reader(translation)
        self.request = Request(
            index=request.index,
            token_ids=self.reader.ids,
            limit=request.limit,
            sampling=request.sampling,
            policy=request.policy,
            salt=request.salt,
        )
        self.begun = False  # whether a draft has read the text, so that the cache may have any of its columns
        self.cut = False  # whether the text is longer than the draft's context or memory

    def length(self, request: Request) -> int:
        """About how many ids the text has."""
        return len(self.reader.ids) + len(request.token_ids) - self.reader.seen


class TranslatedDrafter(AutoregressiveDrafter):
    synchronous = True  # a draft reads the text of the last round's tokens

    def __init__(
        self,
        translation: Translation,
        model: Model,
        cache: KVCache,
        head: LMHead,
        width: int = 1,
        depth: int = 0,
        layers: DraftLayers | None = None,
    ):
        """The further arguments are those of `AutoregressiveDrafter`. The head's rows are `translation.rows`."""
        super().__init__(model, cache, head, width, depth, layers)
        self.translation, self.own = translation, translation.own.to(model.device)
        self._shadows: WeakKeyDictionary[Request, Shadow] = WeakKeyDictionary()
        self._ahead: Sequence[int] = ()  # `Translated.ahead`

    def cache_ids(self, request: Request) -> list[int]:
        """Before the first draft, only ids that never change: a sequence shares pages with other texts, and must not
        write to them again."""
        shadow = self._shadow(request)
        if not shadow.begun:
            shadow.reader.read(request.token_ids)
            shadow.request.token_ids = shadow.reader.ids[: max(1, shadow.reader.settled)]
        return shadow.request.cache_ids

    def prepare(self, requests: list[Request]) -> Offer:
        """The texts are read when a draft needs them, so lengths are approximate."""
        missing, room = [], []
        for slot, request in enumerate(requests):
            length, exact = self._shadow(request).length(request), self.cache.exact_len[slot]
            room.append(self.room(length) if self._holds(slot, length) else 0)
            reads = room[-1] > 0 and (not exact or length - exact > CATCH_UP_ROWS)
            missing.append(max(0, length - 1 - exact) if reads else 0)
        return Offer(missing, room, fixes=lambda budget: False)

    def advance(self, requests: list[Request], reading: Reading = WHOLE, fixed: bool = False) -> int:
        slots = range(len(requests)) if reading.slots is None else reading.slots
        whole = [slot for slot in slots if not self._shadow(requests[slot]).cut]
        return super().advance(self._own(requests), Reading(reading.most, whole))

    def propose(self, batch: Batch) -> Draft:
        requests = self._own(batch.requests)
        self.head.follow(requests)
        lengths = [len(own.token_ids) for own in requests]
        texts = zip(batch.requests, lengths, strict=True)
        self._ahead = [len(request.token_ids) - length for request, length in texts]
        idle = self.idle(requests, False)
        idle |= {slot: ENDED for slot, request in enumerate(batch.requests) if self._shadow(request).cut}
        draft = self.drafted(replace(batch, requests=requests), idle, Translated(self.own, self._ahead))
        return self._written(batch, draft) if self.translation.free else draft

    def accept(self, batch: Batch, draft: Draft, accepted: Accepted) -> None:
        if self.translation.free:
            return
        before = self.cache.exact_len[: len(batch.requests)]
        super().accept(batch, draft, accepted)
        for slot, (request, path) in enumerate(zip(batch.requests, accepted.paths, strict=True)):
            if kept := self.cache.exact_len[slot] - before[slot]:
                shadow, first = self._shadow(request), len(request.token_ids) - len(path)
                shadow.reader.guess(self.translation.own[request.token_ids[first : first + kept]].tolist())

    def _written(self, batch: Batch, draft: Draft) -> Draft:
        """The draft in the target's tokens. Its own tokens stay in the cache until the text turns out to be another."""
        t, tokens, confidence = self.translation, [], []
        most = min(batch.budget.depth, batch.budget.nodes)
        numbers = batch.window[: len(batch.requests), 1 : draft.size + 1].cpu()
        for slot, (request, ids) in enumerate(zip(batch.requests, t.own[numbers].tolist(), strict=True)):
            shadow = self._shadow(request)
            if self.layers is None and slot not in draft.idle:
                shadow.reader.guess(ids[: draft.forwarded])
                self.cache.exact_len[slot] += draft.forwarded
            written, needs = t.write(ids)
            tokens.append([] if slot in draft.idle else written[:most])
            sure = [1.0, *accumulate((each[slot] for each in draft.confidence), mul)]
            if batch.confident:
                confidence.append([sure[n] / sure[m] if sure[m] else 0.0 for m, n in pairwise((0, *needs[:most]))])
        out = Draft.of(batch, tokens, [list(range(len(each))) for each in tokens])
        out.idle = draft.idle
        if batch.confident:
            out.confidence = [list(each) for each in zip_longest(*confidence, fillvalue=0.0)]
        return out

    # --- growth.Steps

    def start(self, batch: Batch) -> tuple[Final, Tensor]:
        final, positions = super().start(batch)
        return final, self._targets(positions)

    def step(self, batch: Batch, first: int, tokens: Tensor, parents: Tensor | None = None) -> tuple[Final, Tensor]:
        final, positions = super().step(batch, first, self.own[tokens], parents)
        return final, self._targets(positions)

    def _targets(self, positions: Tensor) -> Tensor:
        """The target's positions of rows of all sequences, equally many of each."""
        ahead = positions.new_tensor(self._ahead)
        return (positions.view(len(ahead), -1) + ahead.unsqueeze(1)).flatten()

    # --- the texts

    def _shadow(self, request: Request) -> Shadow:
        shadow = self._shadows.get(request)
        if shadow is None:
            shadow = self._shadows[request] = Shadow(self.translation, request)
        return shadow

    def _own(self, requests: list[Request]) -> list[Request]:
        """The requests in slots 0, 1, .. with their texts in the draft's ids. What changed is cut from the cache."""
        own, exact = [], self.cache.exact_len
        for slot, request in enumerate(requests):
            shadow = self._shadow(request)
            # How many of the columns that the cache may have are still the text's.
            same, shadow.begun = shadow.reader.read(request.token_ids), True
            ids = shadow.reader.ids
            shadow.cut = self.room(len(ids)) < 1 or not self._holds(slot, len(ids))
            if shadow.cut:  # a meaningless draft for the beginning, which counts as none
                ids = ids[: max(1, min(self.limit, self.cache.columns_of(slot) - self._behind))]
            exact[slot] = min(exact[slot], same, len(ids) - 1)
            shadow.request.token_ids, shadow.request.policy = ids, request.policy
            shadow.request.sampling = request.sampling
            own.append(shadow.request)
        return own

    @property
    def _behind(self) -> int:
        """The most columns that a draft writes behind a text."""
        return self.width * self.repeated

    def _holds(self, slot: int, length: int) -> bool:
        """Whether the sequence has memory for a text of `length` ids and a draft, or gets it now: it was given as many
        columns as the target's text needs, and the draft may need more."""
        return self.cache.extend(slot, length + self._behind)
