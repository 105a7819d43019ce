"""The drafter that guesses blocks from the target's hidden states."""

import math

import torch
from torch import Tensor

from specker.kernels.topk import largest_of
from specker.model.cache import KVCache
from specker.model.decoder import Final, Model
from specker.model.dflash import BlockModel
from specker.runtime.control.policy import Budget
from specker.runtime.control.stats import BlockStats
from specker.runtime.round.drafter import Draft, Drafter
from specker.runtime.round.lm_head import Head
from specker.runtime.round.round import Round
from specker.runtime.round.state import Request
from specker.runtime.strategies.blocks.lattice import Search
from specker.runtime.strategies.blocks.search import before_stop, candidates, searched


class BlockDrafter(Drafter):
    """The cache has a column for each committed token but the root, written as soon as the target's rows are known: by
    the host after a round that it placed, by the device after acceptance in a round of fixed shape."""

    model: Model
    cache: KVCache
    head: Head
    ahead = 0

    def __init__(self, block: BlockModel, cache: KVCache, head: Head, search: Search | None, stop_ids: frozenset[int]):
        """`search`: None takes the best token of each position. `stop_ids`: the target's."""
        self.block, self.model, self.cache, self.head = block, block.model, cache, head
        self.search, self.stop_ids = search, stop_ids
        self.taps, self.spec = block.spec.taps, block.spec
        self.synchronous = search is not None
        if (ids := block.weights.ids) is not None:
            head.token_ids, head.known = ids, set(ids.tolist())

    @property
    def keeps_prefix(self) -> bool:
        return True

    def left(self, length: int) -> int:
        return min(self.spec.most, self.cache.capacity - length)

    def fixed(self, length: int, budget: Budget) -> bool:
        return self.search is None

    def draft(self, r: Round) -> Draft:
        """Draft for all sequences; nothing if one has no columns, such as one that did not draft from its beginning."""
        depth = min(r.budget.depth, r.budget.nodes)
        if any(self.cache.exact_len[slot] != len(request.text) - 1 for slot, request in enumerate(r.requests)):
            return Draft()
        self.head.follow(r.requests)
        if self.search is not None:
            final, positions = self._rows(r, depth)
            guesses, blocks, _ = candidates(r, final, positions.view(-1), self.head, self.search)
            return searched(r, guesses, [[block] for block in blocks], self.search, self.stop_ids)
        found = [BlockStats(0)] * len(r.requests)
        draft = Draft(depth, depth=depth, found=found, observed=True)
        if not r.confident and (r.fixed or not r.traced):
            r.run(("block", depth), lambda: self._write(r, depth))
            return draft
        r.window[:, 1 : depth + 1], scores, sure = self._guess(r, depth, True)
        assert scores is not None and sure is not None
        if r.confident:
            for step, confidence in enumerate(sure.T.tolist(), 1):
                draft.size = draft.depth = step
                if not draft.vote(r.requests, confidence[: len(r.requests)]):
                    break
        if r.traced:
            draft.scores.append(scores[:, : draft.size])
        return draft

    def _rows(self, r: Round, depth: int) -> tuple[Final, Tensor]:
        """Run the blocks. Returns the rows that predict `depth` tokens [n * depth, H], and the positions after which
        the target draws these tokens [n, depth] int64."""
        count = depth if self.spec.following else depth + 1
        rows = self.cache.place(r.lengths, 1, 0, count)
        final = self.block.block(self.cache, rows, r.window[:, 0], count)
        positions = rows.positions.view(r.n, count)[:, :depth].contiguous()
        return self.block.predicting(final, r.n, depth), positions

    def _write(self, r: Round, depth: int) -> None:
        r.window[:, 1 : depth + 1], _, _ = self._guess(r, depth, False)

    def _guess(self, r: Round, depth: int, scored: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The best tokens [n, depth]; if `scored` also their log-probabilities [n, depth] and how likely the target is
        to accept them [n, depth]."""
        final, positions = self._rows(r, depth)
        guess = self._independent if self.block.weights.markov is None else self._chained
        return guess(r, final, positions, scored)

    def _independent(
        self, r: Round, final: Final, positions: Tensor, scored: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """`_guess` from the rows [n * k, H] for `positions` [n, k]: each token from its row alone."""
        shape, at = positions.shape, positions.view(-1)
        if not scored:
            return self.head.best(final, r.draws, at).view(shape), None, None
        ids, logits, lse = self.head.ranked(final, 1, r.draws, at)
        scores = (logits[:, 0] - lse).view(shape)
        if self.block.weights.confidence is None:
            return ids.view(shape), scores, scores.exp()
        return ids.view(shape), scores, self.block.confidence(self.block.normed(final), None).view(shape)

    def _chained(
        self, r: Round, final: Final, positions: Tensor, scored: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """`_guess` with a Markov head: one token after another, each from its row and the token before it."""
        (n, k), block = positions.shape, self.block
        logits, normed = self.head.logits(final).view(n, k, -1), block.normed(final).view(n, k, -1)
        # A trimmed head has the rows of some ids, a head with ids of its own choice those of w2.
        kept = self.head.token_ids if block.weights.ids is None else None
        ids = torch.empty_like(positions)
        scores, sure = logits.new_empty(n, k), logits.new_empty(n, k)
        before, state = r.window[:, 0], None
        for step in range(k):
            latent = block.latent(before)
            bias, state = block.bias(latent, normed[:, step], state, kept)
            z = logits[:, step] + bias
            at = positions[:, step].contiguous()
            if r.fixed and not scored:
                ids[:, step] = before = self._drawn(r, z, at)
                continue
            best, values, lse = largest_of(z, self.head.token_ids, 1, r.draws.noise(at), scored)
            ids[:, step] = before = best[:, 0]
            if scored:
                scores[:, step] = values[:, 0] - lse
                if block.weights.confidence is not None:
                    sure[:, step] = block.confidence(normed[:, step], latent)
        return ids, scores, scores.exp() if block.weights.confidence is None else sure

    def _drawn(self, r: Round, z: Tensor, positions: Tensor) -> Tensor:
        """The target's own draw from logits z [n, K], which may be captured: it reads no number on the host."""
        if (ids := self.head.token_ids) is not None:
            z = z.new_full((len(z), self.model.config.vocab_size), -math.inf).index_copy_(1, ids, z)
        return r.draws.tokens(z, positions)

    def observe(self, r: Round, slot: int, path: list[int]) -> None:
        if r.draft.observed:
            draft = r.host["draft"][slot].tolist()
            r.draft.found[slot] = BlockStats(before_stop(draft, self.stop_ids))

    def accepted(self, r: Round) -> None:
        if r.fixed:
            r.run(("columns", r.draft.size), lambda: self._columns(r), draws=False)

    def _columns(self, r: Round) -> None:
        """Write the columns of all rows that the round verified, since only the device knows which ones it accepted;
        the others are overwritten later. Rounds of fixed shape draft chains."""
        s, n, N = r.state, r.n, r.draft.size
        accepted = s.report[: n * (3 + 2 * N)].view(n, -1)[:, 0]
        rows = self.cache.place(s.length - accepted, 1, 0, N + 1)
        self.block.keep(self.cache, rows.positions, rows.slots, r.memory.taps(len(self.taps), r.rows))

    def prefilled(self, slot: int, request: Request, first: int, rows: dict[int, Tensor]) -> None:
        self._keep([(slot, first, torch.stack([rows[depth] for depth in self.taps], 1))])

    def learn(self, r: Round, paths: list[list[int]]) -> None:
        """Write the columns of the accepted tokens, unless the device has."""
        kept = []
        for slot, (request, path) in enumerate(zip(r.requests, paths, strict=True)):
            if not path or request.finished:
                continue
            start = len(request.text) - 1 - len(path)
            if r.fixed:
                self._exact(slot, start, start + len(path))
            else:
                rows = r.tapped(slot, path[-1] + 1)
                kept.append((slot, start, torch.stack([rows[depth][path] for depth in self.taps], 1)))
        if kept:
            self._keep(kept)

    def _keep(self, parts: list[tuple[int, int, Tensor]]) -> None:
        """Write columns in all layers, for slots: from which column on, and the target's rows [T, A, Ht]."""
        cache = self.cache
        spans = [(slot, start, start + len(taps)) for slot, start, taps in parts]
        positions = torch.cat([cache.positions[start:end] for _, start, end in spans])
        slots = torch.cat([cache.slots(*span) for span in spans])
        self.block.keep(cache, positions, slots, torch.cat([taps for *_, taps in parts]))
        for span in spans:
            self._exact(*span)

    def _exact(self, slot: int, start: int, end: int) -> None:
        """Columns start..end - 1 were written."""
        if self.cache.exact_len[slot] == start:  # else columns before these are missing
            self.cache.exact_len[slot] = end
