"""A drafter with a model and a cache of its own, which holds an exact prefix of each text."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specker.kernels.ancestors import MAX_WORDS
from specker.model.cache import KVCache, Lengths, Rows
from specker.model.decoder import Model
from specker.model.prefill import prefill
from specker.runtime.control.policy import UNLIMITED, Budget, Offer
from specker.runtime.round.batch import Batch
from specker.runtime.round.drafter import Drafter
from specker.runtime.round.lm_head import LMHead
from specker.runtime.round.state import Request

CATCH_UP_ROWS = 64  # committed tokens that a draft forwards at most; more are a prompt: prefill them
WINDOW = 64 * MAX_WORDS  # maximum rows of one pass


class ModelDrafter(Drafter):
    """Each draft forwards the committed tokens that the cache lacks."""

    model: Model
    cache: KVCache
    head: LMHead

    def __init__(self, model: Model, cache: KVCache, head: LMHead, depth: int):
        """`depth`: length of the longest draft."""
        self.model, self.cache, self.head = model, cache, head
        self.repeated = depth + 1  # committed tokens that a round of fixed shape forwards
        self.limit = min(model.config.max_context, cache.capacity)

    def prepare(self, requests: list[Request]) -> Offer:
        texts = [request.token_ids for request in requests]
        return Offer(
            missing=sum(self._missing(slot, text, False) for slot, text in enumerate(texts)),
            room=[self.room(len(text)) for text in texts],
            fixes=lambda budget: all(self.fits(len(text), budget) for text in texts),
        )

    def room(self, length: int) -> int:
        """Draft tokens that fit behind a text of `length` tokens."""
        return self.limit - length

    def fits(self, length: int, budget: Budget) -> bool:
        """Whether a text of `length` tokens allows a draft of fixed shape, which forwards `repeated` tokens: the text
        needs as many, and the context needs room for a draft after a pending round."""
        return self.repeated <= length <= self.model.config.max_context - 2 * self.repeated

    def advance(self, requests: list[Request], most: int = UNLIMITED, fixed: bool = False) -> int:
        count = 0
        for slot, request in enumerate(requests):
            before = self.cache.exact_len[slot]
            if (
                self._missing(slot, request.token_ids, fixed) and before < len(request.token_ids) - 1
            ):  # a draft forwards the root
                last = min(before + most - count, len(request.token_ids) - 1)
                for end in [*(n for n in request.draft_saves if before < n < last), last]:
                    self.prefill(slot, request.token_ids[: end + 1])
                    if end in request.draft_saves and self.cache.exact_len[slot] == end:
                        self.cache.save(slot, request.cache_ids[:end], True)
                count += self.cache.exact_len[slot] - before
            if count >= most:
                break
        return count

    def _missing(self, slot: int, text: list[int], fixed: bool) -> int:
        """The tokens to prefill before a draft: a prompt, or more than a draft forwards. The drafter's first draft
        prefills the prompt, so a text without drafts costs nothing."""
        if self.room(len(text)) < 1:
            return 0
        exact = self.cache.exact_len[slot]
        missing = len(text) - exact
        return missing if not exact or missing > (self.repeated if fixed else CATCH_UP_ROWS) else 0

    def idle(self, requests: Sequence[Request]) -> frozenset[int]:
        """The slots whose text has no room in this model's context. What is drafted for them means nothing."""
        return frozenset(slot for slot, request in enumerate(requests) if self.room(len(request.token_ids)) < 1)

    def prefill(self, slot: int, text: list[int]) -> None:
        """Write the K/V of `text` but for its last token."""
        if len(text) <= self.model.config.max_context:
            prefill(self.model, self.cache, self.in_vocabulary(text[self.cache.exact_len[slot] : -1]), slot=slot)

    def exact_after_fixed(self, length: int) -> int:
        """The exact columns after a draft of fixed shape: those before the rows of the next one."""
        return max(0, min(length, self.limit) - self.repeated)

    def lengths(self, batch: Batch) -> Lengths:
        """The texts' lengths for placing drafts, clamped to this model's context."""
        return batch.lengths if isinstance(batch.lengths, Tensor) else [min(n, self.limit) for n in batch.lengths]

    def missing_rows(self, batch: Batch, more: Sequence[int] = ()) -> tuple[Tensor, Rows]:
        """The committed tokens that the cache lacks, including the roots, and their places. `more`: tokens that follow
        each text and whose columns are not kept."""
        cache = self.cache
        texts, starts = [], []
        for slot, (request, end) in enumerate(zip(batch.requests, self.lengths(batch), strict=True)):
            behind = end - cache.exact_len[slot]
            if len(request.token_ids) > self.limit:
                cache.exact_len[slot] = end - 1
            elif behind > CATCH_UP_ROWS or behind + len(more) > WINDOW:
                self.prefill(slot, request.token_ids)
            starts.append(cache.exact_len[slot])
            texts.append([*self.in_vocabulary(request.token_ids[starts[-1] : end]), *more])
            cache.exact_len[slot] = end
        tokens = torch.tensor([token for text in texts for token in text], dtype=torch.int64, device=self.model.device)
        return tokens, cache.after(starts, [len(text) for text in texts])

    def in_vocabulary(self, tokens: list[int]) -> list[int]:
        """Replace ids outside the draft's vocabulary by its last id. That can cost acceptance, not correctness."""
        last = self.model.config.vocab_size - 1
        return [min(token, last) for token in tokens]
