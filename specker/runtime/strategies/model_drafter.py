"""Drafters with a model and a cache of their own, which holds an exact prefix of each text."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from specker.cpu import Committed, Translated
from specker.kernels.ancestors import MAX_WORDS
from specker.model.cache import KVCache, Rows
from specker.model.decoder import Final, Model, Output, forward
from specker.model.prefill import COMPILED_CHUNK, Part, most_rows, prefill, prefill_parts, prompt_chunks
from specker.model.rows import begin, begin_text
from specker.runtime.control.policy import UNLIMITED, WHOLE, Budget, Offer, Reading
from specker.runtime.control.reasons import BEHIND, ENDED
from specker.runtime.round.batch import Batch
from specker.runtime.round.drafter import Accepted, Draft, Drafter
from specker.runtime.round.lm_head import LMHead
from specker.runtime.round.state import Request
from specker.runtime.strategies.growth import compiled_chain, grown, readable

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

        def fixes(budget: Budget) -> bool:
            # A draft of fixed shape for an unread text would overwrite what rings hold of the columns that are read.
            rings = len(texts) > 1 and self.cache.rings is not None
            unread = rings and any(self._missing(slot, text, True) for slot, text in enumerate(texts))
            return not unread and all(self.fits(len(text), budget) for text in texts)

        missing = [self._missing(slot, text, False) for slot, text in enumerate(texts)]
        return Offer(missing, [self.room(len(text)) for text in texts], fixes=fixes)

    def room(self, length: int) -> int:
        """Draft tokens that fit behind a text of `length` tokens."""
        return self.limit - length

    def fits(self, length: int, budget: Budget) -> bool:
        """Whether a text of `length` tokens allows a draft of fixed shape, which forwards `repeated` tokens: the text
        needs as many, and the context needs room for a draft after a pending round."""
        return self.repeated <= length <= self.model.config.max_context - 2 * self.repeated

    def advance(self, requests: list[Request], reading: Reading = WHOLE, fixed: bool = False) -> int:
        """See `Drafter.advance`. Parts of several texts share a pass where rows have the same bits in any company."""
        model, cache, count = self.model, self.cache, 0
        shares_passes = prompt_chunks(model) is None
        most, slots = reading.most, range(len(requests)) if reading.slots is None else reading.slots
        unread = [slot for slot in slots if self._missing(slot, requests[slot].token_ids, fixed)]
        while unread and count < most:
            left, parts = min(most - count, COMPILED_CHUNK if shares_passes else UNLIMITED), []
            for slot in unread if shares_passes else unread[:1]:
                text, begun = requests[slot].token_ids, cache.exact_len[slot]
                rows = min(left, most_rows(model, cache)) if shares_passes else left
                stops = [n for n in requests[slot].draft_saves if n > begun]
                end = min(begun + rows, len(text) - 1, *stops)  # a draft forwards the root
                if begun < end:
                    parts.append(Part(slot, self.in_vocabulary(text[begun:end])))
                    left -= end - begun
            if shares_passes:
                prefill_parts(model, cache, parts)
            else:
                prefill(model, cache, parts[0].tokens, slot=parts[0].slot)
            for slot, tokens in parts:
                count += len(tokens)
                if (end := cache.exact_len[slot]) in requests[slot].draft_saves:
                    cache.save(slot, requests[slot].cache_ids[:end], True)
            unread = [slot for slot in unread if cache.exact_len[slot] < len(requests[slot].token_ids) - 1]
        return count

    def _missing(self, slot: int, text: list[int], fixed: bool) -> int:
        """The tokens to prefill before a draft: a prompt, or more than a draft forwards, but for the root. The
        drafter's first draft prefills the prompt, so a text without drafts costs nothing."""
        if self.room(len(text)) < 1:
            return 0
        exact = self.cache.exact_len[slot]
        behind = len(text) - exact
        return behind - 1 if not exact or behind > (self.repeated if fixed else CATCH_UP_ROWS) else 0

    def idle(self, requests: Sequence[Request], fixed: bool) -> dict[int, str]:
        """`Draft.idle` of a draft, which may be `fixed`."""
        found = {}
        for slot, request in enumerate(requests):
            if self.room(len(request.token_ids)) < 1:
                found[slot] = ENDED
            elif self._missing(slot, request.token_ids, fixed):
                found[slot] = BEHIND
        return found

    def prefill(self, slot: int, text: list[int]) -> None:
        """Write the K/V of `text` but for its last token."""
        prefill(self.model, self.cache, self.in_vocabulary(text[self.cache.exact_len[slot] : -1]), slot=slot)

    def lengths(self, requests: Sequence[Request], idle: Mapping[int, str]) -> list[int]:
        """The tokens of each text that stand before a draft which the host places: all but of the `idle` ones. Their
        drafts begin after the next token to read, so that they overwrite no exact column and read no unwritten one."""
        each = enumerate(requests)
        exact, last = self.cache.exact_len, self.limit - 1
        return [min(exact[slot], last) + 1 if slot in idle else len(request.token_ids) for slot, request in each]

    def missing_rows(
        self, texts: Sequence[list[int]], lengths: Sequence[int], more: Sequence[int] = (), full: bool = False
    ) -> tuple[Tensor, Rows]:
        """The tokens of the texts in slots 0, 1, .. that the cache lacks, at least one, and their places. `lengths`:
        see the method. `more`: tokens that follow each text and whose columns are not kept. `full`: see
        `KVCache.after`."""
        cache = self.cache
        missing, starts = [], []
        for slot, (text, end) in enumerate(zip(texts, lengths, strict=True)):
            if end == len(text) and end - cache.exact_len[slot] + len(more) > WINDOW:
                self.prefill(slot, text)
            starts.append(min(cache.exact_len[slot], end - 1))
            missing.append([*self.in_vocabulary(text[starts[-1] : end]), *more])
            if end == len(text):
                cache.exact_len[slot] = end
        tokens = torch.tensor([token for each in missing for token in each], dtype=torch.int64, device=cache.device)
        return tokens, cache.after(starts, [len(each) for each in missing], full=full)

    def accept(self, batch: Batch, draft: Draft, accepted: Accepted) -> None:
        """After a draft of fixed shape, the columns before those that the next one forwards are exact, but of idle
        texts. The K/V of draft tokens is dropped."""
        if draft.size and batch.fixed:
            for slot, (request, path) in enumerate(zip(batch.requests, accepted.paths, strict=True)):
                if path and slot not in draft.idle:  # a copied path may be longer than what the next draft forwards
                    behind = max(self.repeated, len(path))
                    self.cache.exact_len[slot] = max(0, min(len(request.token_ids), self.limit) - behind)

    def in_vocabulary(self, tokens: list[int]) -> list[int]:
        """Replace ids outside the draft's vocabulary by its last id. That can cost acceptance, not correctness."""
        last = self.model.config.vocab_size - 1
        return [min(token, last) for token in tokens]


def last_rows(rows: Rows, count: int, before: int = 0) -> slice | Tensor:
    """The last `count` rows of each sequence or, with `before`, as many that end so many rows earlier."""
    if len(rows.kv_len) == 1:
        return slice(-count - before, -before or None)
    ends = rows.cu_rows[1:].long() - before
    return (ends.unsqueeze(1) + torch.arange(-count, 0, dtype=torch.int64, device=ends.device)).view(-1)


class DraftLayers(Protocol):
    """Another way to run the model's layers in draft steps; the pass over committed tokens is always exact."""

    groups: list[int]  # the first layer of each group of layers that run side by side, then the number of layers
    compiles: bool  # whether the compiled library can run them
    calibrate: str  # after which rounds K/V that `forward` wrote is dropped: every, mismatch (a refused token), never

    def forward(self, rows: Rows, hidden: Tensor) -> Output:
        """Run the layers from the embeddings of draft tokens [T, E]. Writes the rows' K/V."""
        ...


class AutoregressiveDrafter(ModelDrafter):
    """Runs a small model token by token, or level by level."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        head: LMHead,
        width: int = 1,
        depth: int = 0,
        layers: DraftLayers | None = None,
    ):
        """`width`: nodes per tree level; 1 drafts a chain. `depth`: length of the longest draft. `layers`: how a
        draft step runs the layers, if not one after another. Its K/V is fuzzy and dropped after the round: the next
        draft forwards those tokens exactly, with the bonus token (EasySpec's bonus calibration). Where it is kept,
        `exact_len` counts fuzzy columns, too: the host places the rounds, and no later text takes them over."""
        super().__init__(model, cache, head, depth)
        self.width, self.layers = width, layers
        self.calibrate = "every" if layers is None else layers.calibrate
        self.keeps_prefix = self.calibrate == "every"

    def room(self, length: int) -> int:
        return self.limit - length + 1  # nothing forwards the last draft token

    def fits(self, length: int, budget: Budget) -> bool:
        return self.calibrate == "every" and super().fits(length, budget)

    def propose(self, batch: Batch) -> Draft:
        """Draft for all sequences that have room left in the draft's context and are read."""
        self.head.follow(batch.requests)
        return self.drafted(batch, self.idle(batch.requests, batch.fixed))

    def drafted(self, batch: Batch, idle: Mapping[int, str], translated: Translated | None = None) -> Draft:
        """`propose` but for the head's rows. `idle`: `Draft.idle`."""
        if batch.fixed:
            return grown(batch, self, self.width, idle)
        lengths = self.lengths(batch.requests, idle)
        if self.width > 1 or not self._compiles(batch):
            return grown(replace(batch, lengths=lengths), self, self.width, idle)
        tokens, rows = self.missing_rows([request.token_ids for request in batch.requests], lengths)
        groups = None if self.layers is None else self.layers.groups
        committed = Committed(tokens)
        return compiled_chain(batch, self, rows, committed, lengths, groups=groups, idle=idle, translated=translated)

    def _compiles(self, batch: Batch) -> bool:
        """Whether the compiled library drafts the whole chain."""
        stack = self.model.stack
        fits = stack is not None and len(batch.requests) * CATCH_UP_ROWS <= stack.most
        return fits and readable(self.model, self.head) and (self.layers is None or self.layers.compiles)

    def accept(self, batch: Batch, draft: Draft, accepted: Accepted) -> None:
        super().accept(batch, draft, accepted)
        if not draft.size or batch.fixed:
            return
        for slot, path in enumerate(accepted.paths):
            if not path or slot in draft.idle:
                continue
            own = draft.own(slot, path)
            if self.layers is None or self._keeps_fuzzy(whole=len(own) > draft.depth):
                self.keep(draft, slot, own)

    def _keeps_fuzzy(self, whole: bool) -> bool:
        """Whether the K/V of accepted draft nodes stays as the draft wrote it. `whole`: no draft token was refused."""
        return self.calibrate == "never" or (self.calibrate == "mismatch" and whole)

    def keep(self, draft: Draft, slot: int, path: list[int]) -> None:
        """Keep the K/V of accepted draft nodes; the last level has none yet."""
        nodes = range(draft.size) if draft.nodes is None else draft.nodes[slot].tolist()  # of a chain: in order
        if kept := [node for row in path[1:] if (node := nodes[row - 1]) < draft.forwarded]:
            self.cache.commit(kept, slot)

    # --- growth.Steps

    def start(self, batch: Batch) -> tuple[Final, Tensor]:
        """Forward the committed tokens that the cache lacks, including the root."""
        cache, n = self.cache, batch.n
        if batch.fixed:
            R = self.repeated
            rows, embedded = begin_text(self.model, cache, batch.state.committed, batch.state.length, R)
            last: slice | Tensor = slice(R - 1, None, R)
        else:
            assert not isinstance(batch.lengths, Tensor)
            tokens, rows = self.missing_rows([request.token_ids for request in batch.requests], batch.lengths)
            embedded = self.model.embed_tokens(tokens)
            last = slice(-1, None) if n == 1 else rows.cu_rows[1:].long() - 1
        return forward(self.model, cache, rows, embedded).final.at(last), rows.positions[last]

    def step(self, batch: Batch, first: int, tokens: Tensor, parents: Tensor | None = None) -> tuple[Final, Tensor]:
        rows, embedded = begin(self.model, self.cache, batch.lengths, 1, first, tokens, parents)
        layers = self.layers
        out = forward(self.model, self.cache, rows, embedded) if layers is None else layers.forward(rows, embedded)
        return out.final, rows.positions
