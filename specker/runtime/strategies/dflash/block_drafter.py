"""The drafter that guesses blocks from the target's hidden states."""

import math
from functools import partial

import torch
from torch import Tensor

from specker.kernels.round.lattice import Lattice, Paths, search_lattice
from specker.kernels.vocab_topk import largest_of
from specker.model import dspine, lilicorr
from specker.model.cache import KVCache
from specker.model.decoder import Final, Model
from specker.model.dflash import BlockModel, BlockRows
from specker.model.sampling import GREEDY
from specker.runtime.control.policy import Offer
from specker.runtime.round.batch import Batch
from specker.runtime.round.drafter import Accepted, Draft, Drafter
from specker.runtime.round.lm_head import LMHead
from specker.runtime.round.state import Request
from specker.runtime.strategies.blocks.search import BlockDraft, Search, search, searched
from specker.runtime.strategies.blocks.tree import Scorer
from specker.runtime.strategies.dflash.scorers import MarkovScorer, SelectorScorer, TableScorer


class BlockDrafter(Drafter):
    """The cache has a column for each committed token but the root, written as soon as the target's rows are known: by
    the host after a round that it placed, by the device after acceptance in a round of fixed shape."""

    model: Model
    cache: KVCache
    head: LMHead
    source, tokens_ahead = "head", 0

    def __init__(
        self, block: BlockModel, cache: KVCache, head: LMHead, search: Search | None, stop_ids: frozenset[int]
    ):
        """`search`: None takes the best token of each position. `stop_ids`: the target's."""
        self.block, self.model, self.cache, self.head = block, block.model, cache, head
        self.search, self.stop_ids = search, stop_ids
        self.stops = torch.tensor([*stop_ids], dtype=torch.int64, device=self.model.device)
        self.aux_layers, self.spec = block.spec.aux_layers, block.spec
        # By slot, what LiLiCorr reads of a text's last column, which is therefore computed anew with every prompt.
        self.anchors: Tensor | None = None
        if block.weights.corrector is not None:
            shape, self.tokens_ahead = (len(cache.exact_len), self.model.config.hidden_size), 1
            self.anchors = torch.zeros(shape, dtype=self.model.dtype, device=self.model.device)

    def prepare(self, requests: list[Request]) -> Offer:
        room = [min(self.spec.most, self.cache.capacity - len(request.token_ids)) for request in requests]
        return Offer(room=room, fixes=lambda budget: True)

    def propose(self, batch: Batch) -> Draft:
        """Draft for all sequences; nothing if one has no columns, such as one that did not draft from its beginning."""
        depth = min(batch.budget.depth, batch.budget.nodes)
        if any(self.cache.exact_len[slot] != len(request.token_ids) - 1 for slot, request in enumerate(batch.requests)):
            return Draft()
        self.head.follow(batch.requests)
        if self.search is not None and (how := self.search.shaped(batch.budget)) is not None:
            return self._searched(batch, depth, how)
        draft = BlockDraft(depth, depth=depth, observed="draft")
        if not batch.confident and (batch.fixed or not batch.traced):
            batch.run(("block", depth, batch.draws.kind), lambda: self._write(batch, depth))
            return draft
        batch.window[:, 1 : depth + 1], scores, sure = self._guess(batch, depth, True)
        assert scores is not None and sure is not None
        draft.end(batch, scores, sure)
        return draft

    def _rows(self, batch: Batch, depth: int) -> tuple[BlockRows, Tensor]:
        """Run the blocks. Returns the rows that predict `depth` tokens [n * depth, H], and the positions after which
        the target draws these tokens [n, depth] int64."""
        count = depth if self.spec.following else depth + 1
        placed = self.cache.place(batch.lengths, 1, 0, count)
        rows = self.block.block(self.cache, placed, batch.window[:, 0], count)
        positions = placed.positions.view(batch.n, count)[:, :depth].contiguous()
        return self.block.predicting(rows, batch.n, depth), positions

    def _searched(self, batch: Batch, depth: int, how: Search) -> BlockDraft:
        """Draft the best path through the candidates of each position, or the most probable beginnings of paths."""
        draft = searched(batch, depth, how, min(how.candidates, self.head.most))

        def write() -> None:
            rows, positions = self._rows(batch, depth)
            by = partial(self._scorer, batch, rows, positions)
            search(batch, draft, rows.final, positions.view(-1), self.head, how, self.stops, scorer=by)

        batch.run(("search", depth, draft.size, draft.tree), write)
        return draft

    def _write(self, batch: Batch, depth: int) -> None:
        batch.window[:, 1 : depth + 1], _, _ = self._guess(batch, depth, False)

    def _guess(self, batch: Batch, depth: int, scored: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The best tokens [n, depth]; if `scored` also their log-probabilities [n, depth] and how likely the target is
        to accept them [n, depth]."""
        rows, positions = self._rows(batch, depth)
        if self.spec.candidates:
            return self._selected(batch, rows, positions, scored)
        guess = self._independent if self.block.weights.markov is None else self._chained
        return guess(batch, rows.final, positions, scored)

    def _independent(
        self, batch: Batch, final: Final, positions: Tensor, scored: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """`_guess` from the rows [n * k, H] for `positions` [n, k]: each token from its row alone."""
        shape, at = positions.shape, positions.view(-1)
        if not scored:
            return self.head.best(final, batch.draws, at).view(shape), None, None
        ids, logits, lse = self.head.ranked(final, 1, batch.draws, at)
        scores = (logits[:, 0] - lse).view(shape)
        if self.block.weights.confidence is None:
            return ids.view(shape), scores, scores.exp()
        return ids.view(shape), scores, self.block.confidence(self.block.normed(final), None).view(shape)

    def _chained(
        self, batch: Batch, final: Final, positions: Tensor, scored: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """`_guess` with a Markov head: one token after another, each from its row and the token before it."""
        (n, k), block = positions.shape, self.block
        logits, normed = self.head.logits(final).view(n, k, -1), block.normed(final).view(n, k, -1)
        # A trimmed head has the rows of some ids, a head with ids of its own choice those of w2.
        kept = self.head.token_ids if block.weights.ids is None else None
        ids = torch.empty_like(positions)
        scores, sure = logits.new_empty(n, k), logits.new_empty(n, k)
        before, state = batch.window[:, 0], None
        for step in range(k):
            latent = block.latent(before)
            bias, state = block.bias(latent, normed[:, step], state, kept, step)
            z = logits[:, step].contiguous() if bias is None else logits[:, step] + bias
            at = positions[:, step].contiguous()
            if batch.fixed and not scored:
                ids[:, step] = before = self._drawn(batch, z, at)
                continue
            best, values, lse = largest_of(z, self.head.token_ids, 1, batch.draws.noise(at), scored)
            ids[:, step] = before = best[:, 0]
            if scored:
                scores[:, step] = values[:, 0] - lse
                if block.weights.confidence is not None:
                    sure[:, step] = block.confidence(normed[:, step], latent)
        return ids, scores, scores.exp() if block.weights.confidence is None else sure

    def _selected(
        self, batch: Batch, rows: BlockRows, positions: Tensor, scored: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """`_guess` with a head that chooses among the best candidates of each row: one token after another."""
        (n, k), K = positions.shape, min(self.spec.candidates, self.head.most)
        found, logits, lse = self.head.ranked(rows.final, K, batch.draws, positions.view(-1))
        found, logits, lse = found.view(n, k, K), logits.view(n, k, K), lse.view(n, k)
        head, log_p = self._scorer(batch, rows, positions, found, logits, lse), logits - lse.unsqueeze(2)
        assert head is not None
        ids, scores, before = torch.empty_like(positions), log_p.new_empty(n, k), batch.window[:, :1]
        if batch.fixed and not scored:  # a beam of one path that nothing ends
            paths, table = Paths.empty(n, 1, k, log_p.dtype, log_p.device), head.table(before)
            search_lattice(Lattice(found, log_p, lse), table, found.new_empty(0), paths, scores[:, 0], 0, k, ids)
            return ids, None, None
        for step in range(k):
            added = head.added(step, before, None)
            assert added is not None
            total = log_p[:, step] + added[:, 0].to(log_p.dtype)
            best = total.argmax(1, keepdim=True)
            ids[:, step : step + 1] = before = found[:, step].gather(1, best)
            if scored:
                scores[:, step] = total.gather(1, best)[:, 0] - total.logsumexp(1)
        return ids, scores, scores.exp()

    def _scorer(
        self, batch: Batch, rows: BlockRows, positions: Tensor, ids: Tensor, logits: Tensor, lse: Tensor
    ) -> Scorer | None:
        """The head that scores the candidates `ids` [n, k, K] int64 after a path; None if the rows say everything. They
        are of the rows [n * k, H] for `positions` [n, k]; `logits` [n, k, K] and `lse` [n, k]: over the temperature and
        with noise."""
        block, weights, draws = self.block, self.block.weights, batch.draws
        if weights.markov is None and not self.spec.candidates:
            return None
        heat, normed = draws.heat(), block.normed(rows.final).view(*ids.shape[:2], -1)
        if weights.markov is not None:
            return MarkovScorer(block, normed, ids, heat)
        if weights.selector is not None:
            return SelectorScorer(block, normed, ids, heat)
        noisy, wide = draws.kind != "greedy", logits.dtype
        log_p = logits - lse.unsqueeze(2)
        if noisy:  # the drafter's own logits
            log_p = (block.head_rows(ids).to(wide) @ normed.to(wide).unsqueeze(3)).squeeze(3)
        if weights.injection is not None:
            assert rows.last is not None
            last, of_head = rows.last.view_as(normed), block.head_rows(ids)
            table = dspine.transitions(self.model, weights.injection, last, batch.window[:, 0], ids, of_head)
            return TableScorer(table, ids, log_p, heat)
        assert weights.corrector is not None and self.anchors is not None
        if noisy:
            log_p = log_p - self.head.ranked(rows.final, 1, GREEDY, positions.view(-1))[2].view(*positions.shape, 1)
        embedded = self.model.embed_tokens(ids.flatten()).view(*ids.shape, -1)
        anchors = lilicorr.Anchors(self.anchors[: batch.n], positions[:, 0] > 0)
        table = lilicorr.transitions(weights.corrector, embedded, log_p, normed, anchors)
        return TableScorer(table, ids, log_p, heat)

    def _drawn(self, batch: Batch, z: Tensor, positions: Tensor) -> Tensor:
        """The target's own draw from logits z [n, K], which may be captured: it reads no number on the host."""
        if (ids := self.head.token_ids) is not None:
            z = z.new_full((len(z), self.model.config.vocab_size), -math.inf).index_copy_(1, ids, z)
        return batch.draws.tokens(z, positions)

    def accept(self, batch: Batch, draft: Draft, accepted: Accepted) -> None:
        """Write the columns of the accepted tokens, unless the device has."""
        if isinstance(first := draft.first, BlockDraft):
            first.observe(accepted, self.stop_ids)
        written = []
        for slot, (request, path) in enumerate(zip(batch.requests, accepted.paths, strict=True)):
            start = len(request.token_ids) - 1 - len(path)
            if path and batch.fixed:
                self._exact(slot, start, start + len(path))
            elif path:
                written.append((slot, start, batch.aux_hidden_states(draft.size, slot, path)))
        if written:
            self._write_columns(written)

    def accept_on_device(self, batch: Batch, draft: Draft) -> None:
        if batch.fixed:
            name = "columns", draft.size, draft.depth, draft.tree
            batch.run(name, lambda: self._columns(batch, draft), draws=False)

    def _columns(self, batch: Batch, draft: Draft) -> None:
        """Write the columns of all rows that the round may accept, since only the device knows which ones it did; the
        others are overwritten later."""
        s, n, N, most = batch.state, batch.n, draft.size, min(draft.size, draft.depth) + 1
        report = s.report[: n * (3 + 2 * N)].view(n, -1)
        hidden = batch.memory.aux(len(self.aux_layers), n * (N + 1))
        if draft.tree:
            each = torch.arange(n, dtype=torch.int64, device=hidden.device).unsqueeze(1)
            hidden = hidden.unflatten(0, (n, -1))[each, report[:, 1 : most + 1].clamp(0, N)].flatten(0, 1)
        accepted = report[:, 0]
        rows = self.cache.place(s.length - accepted, 1, 0, most)
        read = self.block.keep(self.cache, rows.positions, rows.slots, hidden)
        if self.anchors is not None:
            last = torch.arange(-1, (n - 1) * most, most, dtype=torch.int64, device=read.device) + accepted.clamp(min=1)
            torch.index_select(read, 0, last, out=self.anchors[:n])

    def read(self, slot: int, request: Request, first: int, rows: dict[int, Tensor]) -> None:
        self._write_columns([(slot, first, torch.stack([rows[depth] for depth in self.aux_layers], 1))])

    def _write_columns(self, parts: list[tuple[int, int, Tensor]]) -> None:
        """Write columns in all layers, for slots: from which column on, and the target's rows [T, A, Ht]."""
        cache = self.cache
        spans = [(slot, start, start + len(rows)) for slot, start, rows in parts]
        positions = torch.cat([cache.positions[start:end] for _, start, end in spans])
        slots = torch.cat([cache.slots(slot, start, end) for slot, start, end in spans])
        read = self.block.keep(cache, positions, slots, torch.cat([rows for *_, rows in parts]))
        for (slot, start, end), part in zip(spans, read.split([len(rows) for *_, rows in parts]), strict=True):
            self._exact(slot, start, end)
            if self.anchors is not None:
                self.anchors[slot] = part[-1]

    def move(self, source: int, target: int) -> None:
        if self.anchors is not None:
            self.anchors[target] = self.anchors[source]

    def _exact(self, slot: int, start: int, end: int) -> None:
        """Columns start..end - 1 were written."""
        if self.cache.exact_len[slot] == start:  # else columns before these are missing
            self.cache.exact_len[slot] = end
