"""The true pairs of several MTP heads in turn (heads_in_turn.py), and the features that wait for tokens."""

import torch
from torch import Tensor

from specker.kernels.residual_merge import add_norm
from specker.model.cache import KVCache, Rows
from specker.model.decoder import Final
from specker.model.heads import DraftHead
from specker.runtime.round.batch import Batch
from specker.runtime.round.drafter import Accepted, Draft
from specker.runtime.round.state import Request
from specker.runtime.strategies.eagle.pairs import BLOCK, WAITING


class PairsInTurn:
    def __init__(self, heads: list[DraftHead], cache: KVCache):
        """`cache`: with a layer for each head."""
        self.heads, self.cache = heads, cache
        self.layers = [cache.layer(k) for k in range(len(heads))]
        model, slots = heads[0].model, len(cache.exact_len)
        self.last = torch.zeros(slots, model.config.hidden_size, dtype=model.dtype, device=model.device)
        # By slot and head: the columns that hold true pairs, and the features [count, H] of the next ones, which wait
        # for tokens. After the last head, what it passed on at its last column.
        self.done: list[list[int]] = [[] for _ in range(slots)]
        self.features: list[list[Tensor]] = [[] for _ in range(slots)]
        for slot in range(slots):
            self.reset(slot)

    def through(self, k: int, rows: Rows, features: Tensor, embedded: Tensor) -> tuple[Tensor, Final]:
        """Forward pairs through head k, at most BLOCK at once, or those of one sequence. Returns its output, and the
        rows for the LM head, which has head 0's norm."""
        head = self.heads[k]
        if len(features) > BLOCK and len(rows.kv_len) > 1:
            parts = [self.through(k, block, features[at], embedded[at]) for at, block in rows.blocks(BLOCK)]
            finals = torch.cat([final.rows for _, final in parts])
            return torch.cat([output for output, _ in parts]), Final(finals, parts[0][1].normed)
        output, final = head.forward(self.layers[k], rows, head.pairs(features, embedded, rows.positions))
        if k and not final.normed:
            final = Final(add_norm(final.rows, None, head.model.norm, head.model.config.rms_norm_eps)[1], True)
        return output, final

    def read(self, slot: int, request: Request, rows: dict[int, Tensor]) -> None:
        """Run the pairs of a chunk of the prompt."""
        self._wait(slot, torch.stack([rows[depth] for depth in self.heads[0].spec.aux_layers], 1))
        self._run(slot, request.token_ids)

    def accept(self, batch: Batch, draft: Draft, accepted: Accepted) -> None:
        """The pairs of accepted tokens wait for the next draft."""
        for slot, (request, path) in enumerate(zip(batch.requests, accepted.paths, strict=True)):
            if path:
                self._wait(slot, batch.aux_hidden_states(draft.size, slot, path))
                if len(self.features[slot][0]) > WAITING:
                    self._run(slot, request.token_ids)

    def accept_on_device(self, batch: Batch, draft: Draft) -> None:
        """The host places all drafts: see `accept`."""

    def _wait(self, slot: int, rows: Tensor) -> None:
        self.features[slot][0] = torch.cat((self.features[slot][0], self.heads[0].features(rows)))

    def _run(self, slot: int, text: list[int]) -> None:
        for k in range(len(self.heads)):
            while count := min(BLOCK, self._ready(slot, k, text)):
                self._pairs_of(k, slot, [text], [count])

    def run_all(self, requests: list[Request]) -> None:
        """Forward the pairs that wait in all slots, together if all have some."""
        texts = [request.token_ids for request in requests]
        for k in range(len(self.heads)):
            counts = [self._ready(slot, k, text) for slot, text in enumerate(texts)]
            if all(counts) and sum(counts) <= BLOCK:
                self._pairs_of(k, 0, texts, counts)
            else:
                for slot, text in enumerate(texts):
                    while count := min(BLOCK, self._ready(slot, k, text)):
                        self._pairs_of(k, slot, [text], [count])

    def _ready(self, slot: int, k: int, text: list[int]) -> int:
        """Pairs that head k can run: those with a feature and a token."""
        return max(0, min(len(self.features[slot][k]), len(text) - 1 - k - self.done[slot][k]))

    def _pairs_of(self, k: int, first: int, texts: list[list[int]], counts: list[int]) -> None:
        """Forward the next true pairs of head k in slots first, first + 1, .., which have `texts`."""
        slots = range(first, first + len(texts))
        starts = [self.done[slot][k] for slot in slots]
        spans = list(zip(slots, starts, counts, strict=True))
        rows = self.cache.after(starts, counts, slot=first)
        features = torch.cat([self.features[slot][k][:count] for slot, _, count in spans])
        ids = [
            token
            for text, (_, start, count) in zip(texts, spans, strict=True)
            for token in text[start + k + 1 : start + k + 1 + count]
        ]
        embedded = self.heads[k].model.embed_tokens(torch.tensor(ids, dtype=torch.int64, device=self.last.device))
        output, final = self.through(k, rows, features, embedded)
        last = k == len(self.heads) - 1
        passed = (output if self.heads[k].spec.chained or last else features).split(counts)
        for (slot, _, count), more in zip(spans, passed, strict=True):
            waiting = self.features[slot]
            waiting[k] = waiting[k][count:]
            waiting[k + 1] = more[-1:] if last else torch.cat((waiting[k + 1], more))
            self.done[slot][k] += count
            self.cache.exact_len[slot] = self.done[slot][-1]
        if k == 0:
            ends = rows.cu_rows[1:].long() - 1
            torch.index_select(final.rows, 0, ends, out=self.last[first : first + len(texts)])

    def move(self, source: int, target: int) -> None:
        self.done[target], self.features[target] = self.done[source], self.features[source]
        self.last[target] = self.last[source]
        self.reset(source)

    def reset(self, slot: int) -> None:
        """Forget the sequence. Of one that takes over K/V, the same columns of all heads are true."""
        self.done[slot] = [self.cache.exact_len[slot]] * len(self.heads)
        self.features[slot] = [self.last.new_empty(0, self.last.shape[1])] * (len(self.heads) + 1)
