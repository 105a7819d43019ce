"""A drafter that runs a small model token by token, or level by level."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specker.kernels.cpu import native
from specker.kernels.round.grow import grow, prune
from specker.model.cache import KVCache, Lengths, Rows
from specker.model.decoder import Final, Model, forward
from specker.model.rows import begin, begin_text
from specker.runtime.draft import CATCH_UP_ROWS, ModelDrafter
from specker.runtime.head import Head
from specker.runtime.round import Round

if TYPE_CHECKING:  # which builds on this file
    from specker.runtime.strategies.easyspec.drafter import LayerParallel


class AutoregressiveDrafter(ModelDrafter):
    def __init__(
        self,
        model: Model,
        cache: KVCache,
        head: Head,
        width: int = 1,
        parallel: "LayerParallel | None" = None,
        depth: int = 0,
    ):
        """`width`: nodes per tree level; 1 drafts a chain. `parallel` runs draft steps with layers side by side; the
        catch-up pass runs them in sequence."""
        super().__init__(model, cache, head, depth)
        self.width, self.parallel = width, parallel

    @property
    def keeps_prefix(self) -> bool:
        return True

    def room(self, length: int) -> int:
        return self.limit - length + 1

    def draft(self, r: Round) -> None:
        """Draft for all sequences. A sequence that has no room left in the draft's context gets a meaningless draft,
        which the target rejects."""
        self.head.follow(r.sequences)
        depth = r.depth = min(r.budget.depth, r.budget.nodes)
        if self.width == 1 and not r.fixed and self._compiles(r):
            self._compiled_chain(r, depth)
        elif self.width > 1:
            r.size, r.tree = min(r.budget.nodes, self.width * depth), True
            r.run(("draft", r.size, depth), lambda: self._tree(r, depth))
        elif r.asks:
            for n in range(depth):
                r.run(("step", n), lambda n=n: self._step(r, n))  # type: ignore[misc]
                r.size = r.depth = n + 1
                if not r.goes_on():
                    break
        else:
            r.size = depth
            r.run(("draft", depth), lambda: self._chain(r, depth))

    def observe(self, r: Round, slot: int, path: list[int]) -> None:
        """Keep the exact K/V of accepted draft nodes. Drop fuzzy K/V: the next catch-up forwards those tokens in
        sequence, with the bonus token (bonus calibration)."""
        if not r.size:
            return
        if r.fixed:  # the columns before the catch-up rows are exact
            self.cache.exact_len[slot] = self.exact_after_fixed(len(r.sequences[slot].text))
        elif self.parallel is None:
            self.keep(r, slot, path)

    def keep(self, r: Round, slot: int, path: list[int]) -> None:
        """Keep the K/V of accepted draft nodes; the last level has none yet."""
        if self.cache.exact_len[slot] > self.limit:
            return
        grown = range(r.size) if r.nodes is None else r.nodes[slot].tolist()
        if nodes := [node for row in path[1:] if (node := grown[row - 1]) < r.forwarded]:
            self.cache.commit(nodes, slot)

    def _compiles(self, r: Round) -> bool:
        """Whether the compiled library drafts the whole chain."""
        stack = self.model.stack
        few = stack is not None and len(r.sequences) * CATCH_UP_ROWS <= stack.most
        alone = self.parallel is None or self.parallel.ranks is None
        return few and alone and all(native().takes(w) for w in (self.model.embed, self.head.weight))

    def _compiled_chain(self, r: Round, depth: int) -> None:
        model, cache, head = self.model, self.cache, self.head
        tokens, rows = self._missing_rows(r)
        layers = [*range(len(model.layers) + 1)]
        later = layers if self.parallel is None else [*(g[0] for g in self.parallel.schedule.groups), layers[-1]]
        drafted, probability = native().draft(
            model.stack,
            native().Candidates(model.embed, head.weight, head.token_ids, head.norm, head.activations),
            tokens,
            ((cache.k, cache.v), rows[:2], (rows.cu_rows, rows.kv_len, rows.window), rows.ancestors, rows.table),
            (layers, later),
            self._lengths(r),
            cache.last_position,
            depth,
            [(s.sampling.temperature, s.sampling.seed) for s in r.sequences],
            [s.policy.rule for s in r.sequences] if r.asks else None,
        )
        r.size = r.depth = len(drafted)
        r.forwarded = r.size - 1
        r.window[: r.n, 1 : r.size + 1] = torch.from_numpy(drafted.T)
        if r.asks:
            r.confidence = probability.tolist()
        if r.traced:
            r.scores = [torch.from_numpy(probability.T).log()]

    def _lengths(self, r: Round) -> Lengths:
        """The texts' lengths for placing drafts, clamped to this model's context."""
        return r.lengths if isinstance(r.lengths, Tensor) else [min(n, self.limit) for n in r.lengths]

    def _catch_up(self, r: Round) -> tuple[Final, Tensor]:
        """Forward the committed tokens that the cache lacks, including the root. Returns the roots' rows [n, E] and
        positions [n] int64."""
        cache, n = self.cache, r.n
        if r.fixed:
            R = self.repeated
            rows, embedded = begin_text(self.model, cache, r.state.committed, r.state.length, R)
            last: slice | Tensor = slice(R - 1, None, R)
        else:
            tokens, rows = self._missing_rows(r)
            embedded = self.model.embed_tokens(tokens)
            last = slice(-1, None) if n == 1 else rows.cu_rows[1:].long() - 1
        return forward(self.model, cache, rows, embedded).final.at(last), rows.positions[last]

    def _missing_rows(self, r: Round) -> tuple[Tensor, Rows]:
        """The committed tokens that the cache lacks, including the roots, and their places."""
        cache = self.cache
        texts, starts = [], []
        for slot, (sequence, end) in enumerate(zip(r.sequences, self._lengths(r), strict=True)):
            if len(sequence.text) > self.limit:
                cache.exact_len[slot] = end - 1
            elif end - cache.exact_len[slot] > CATCH_UP_ROWS:
                self.prefill(slot, sequence.text)
            starts.append(cache.exact_len[slot])
            texts.append(self.known(sequence.text[starts[-1] : end]))
            cache.exact_len[slot] = end
        tokens = torch.tensor([token for text in texts for token in text], device=self.model.device)
        return tokens, cache.after(starts, [len(text) for text in texts])

    def _chain(self, r: Round, depth: int) -> None:
        for n in range(depth):
            self._step(r, n)

    def _step(self, r: Round, n: int) -> None:
        """Draft token n of each sequence. The next catch-up writes the last token's K/V."""
        if n == 0:
            final, positions = self._catch_up(r)
            r.forwarded = 0
        else:
            rows, embedded = begin(self.model, self.cache, self._lengths(r), 0, n - 1, r.window[:, n : n + 1])
            final, positions = self._forward(rows, embedded), rows.positions
            r.forwarded = n
        r.extend(self.head, final, positions, r.window[:, n + 1 : n + 2])

    def _tree(self, r: Round, depth: int) -> None:
        """Draft a tree level by level. Node j of a sequence is j columns after its root; scores are cumulative
        log-probabilities."""
        n, width, count = r.n, self.width, self.width * depth
        kept, up = r.window[:, 1 : r.size + 1], r.state.parents[:, : r.size]
        tokens, parents = (kept, up) if r.size == count else kept.new_empty(2, n, count).unbind(0)
        wide = torch.float64 if self.model.dtype == torch.float64 else torch.float32
        scores = tokens.new_empty((n, count), dtype=wide)
        final, positions = self._catch_up(r)
        for at in range(0, count, width):
            if at:  # the last level's nodes, which end at row `at`
                first, last = at - width + 1, tokens[:, at - width : at]
                rows, embedded = begin(self.model, self.cache, self._lengths(r), 1, first, last, parents[:, :at])
                final, positions = self._forward(rows, embedded), rows.positions
            grow(*self.head.ranked(final, width, r.draws, positions), tokens, parents, scores, at)
        r.forwarded = count - width
        if r.size < count:
            r.nodes = prune(tokens, parents, scores, kept, up)
        if r.traced and not r.fixed:  # a replayed graph runs no Python
            best = scores if r.nodes is None else scores.gather(1, r.nodes)
            above = torch.cat((torch.zeros_like(best[:, :1]), best), 1).gather(1, up)
            r.scores.append(best - above)

    def _forward(self, rows: Rows, embedded: Tensor) -> Final:
        """The embeddings of draft tokens [T, E] -> their rows [T, E] for the head."""
        if self.parallel is not None:
            return self.parallel.forward(rows, embedded).final
        return forward(self.model, self.cache, rows, embedded).final
