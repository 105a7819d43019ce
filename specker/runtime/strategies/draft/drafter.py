"""A drafter that runs a small model token by token, or level by level."""

import torch
from torch import Tensor

from specker.kernels.cpu import native
from specker.kernels.round.grow import Candidates, grow, prune
from specker.model.cache import KVCache, Lengths, Rows
from specker.model.decoder import Final, Model, forward
from specker.model.rows import begin, begin_text
from specker.runtime.round.drafter import CATCH_UP_ROWS, Draft, ModelDrafter
from specker.runtime.round.lm_head import Head
from specker.runtime.round.round import Round


class AutoregressiveDrafter(ModelDrafter):
    def __init__(self, model: Model, cache: KVCache, head: Head, width: int = 1, depth: int = 0):
        """`width`: nodes per tree level; 1 drafts a chain. `depth`: length of the longest draft."""
        super().__init__(model, cache, head, depth)
        self.width = width

    @property
    def keeps_prefix(self) -> bool:
        return True

    def left(self, length: int) -> int:
        return self.limit - length + 1

    def draft(self, r: Round) -> Draft:
        """Draft for all sequences. A sequence that has no room left in the draft's context gets a meaningless draft,
        which the target rejects."""
        self.head.follow(r.requests)
        depth = min(r.budget.depth, r.budget.nodes)
        draft = Draft(depth, depth=depth)
        if self.width == 1 and not r.fixed and self.compiles(r):
            self._compiled_chain(r, draft)
        elif self.width > 1:
            draft.size, draft.tree = min(r.budget.nodes, self.width * depth), True
            r.run(("draft", draft.size, depth), lambda: self._tree(r, draft))
        elif r.confident:
            for n in range(depth):
                r.run(("step", n), lambda n=n: self._step(r, draft, n))  # type: ignore[misc]
                draft.size = draft.depth = n + 1
                if not draft.goes_on(r):
                    break
        else:
            r.run(("draft", depth), lambda: self._chain(r, draft))
        return draft

    def observe(self, r: Round, slot: int, path: list[int]) -> None:
        """Keep the K/V of accepted draft nodes; the last level has none yet."""
        if not r.draft.size:
            return
        if r.fixed:  # the columns before the catch-up rows are exact
            self.cache.exact_len[slot] = self.exact_after_fixed(len(r.requests[slot].text))
        else:
            self.keep(r, slot, path)

    def keep(self, r: Round, slot: int, path: list[int]) -> None:
        """Keep the K/V of accepted draft nodes; the last level has none yet."""
        if self.cache.exact_len[slot] > self.limit:
            return
        grown = range(r.draft.size) if r.draft.nodes is None else r.draft.nodes[slot].tolist()  # of a chain: in order
        if nodes := [node for row in path[1:] if (node := grown[row - 1]) < r.draft.forwarded]:
            self.cache.commit(nodes, slot)

    def forward(self, rows: Rows, embedded: Tensor) -> Final:
        """The embeddings of draft tokens [T, E] -> their rows [T, E] for the head."""
        return forward(self.model, self.cache, rows, embedded).final

    def step(self, r: Round, first: int, tokens: Tensor, parents: Tensor | None = None) -> tuple[Final, Tensor]:
        """Forward draft tokens [n, count] int64, rows first, first + 1, .. of each window, whose row 0 is the root.
        parents [n, >= first + count - 1] int64: of a tree's rows. Returns the rows for the head and their positions."""
        rows, embedded = begin(self.model, self.cache, self._lengths(r), 1, first, tokens, parents)
        return self.forward(rows, embedded), rows.positions

    @property
    def groups(self) -> list[int]:
        """For the compiled library, the first layer of each group of layers that a draft step runs side by side, then
        the number of layers."""
        return [*range(len(self.model.layers) + 1)]

    def compiles(self, r: Round) -> bool:
        """Whether the compiled library drafts the whole chain."""
        stack = self.model.stack
        return stack is not None and len(r.requests) * CATCH_UP_ROWS <= stack.most and self._readable

    @property
    def _readable(self) -> bool:
        """Whether the compiled library can read the embedding and the LM head."""
        return all(native().takes(w) for w in (self.model.embed, self.head.weight))

    def _compiled_chain(self, r: Round, draft: Draft) -> None:
        tokens, rows = self._missing_rows(r)
        self._compiled_steps(r, draft, tokens, rows, self._lengths(r), False)

    def _compiled_steps(
        self, r: Round, draft: Draft, begin: Tensor, rows: Rows, columns: Lengths, normed: bool
    ) -> None:
        """Draft by the compiled library. begin, rows, columns: see cpu/chain.py. `normed`: whether the layers' outputs
        are."""
        model, cache, head = self.model, self.cache, self.head
        norm = None if normed else head.norm
        drafted, probability = native().draft(
            model.stack,
            native().Candidates(model.embed, model.embed_scale, head.weight, head.token_ids, norm, head.activations),
            begin,
            ((cache.k, cache.v), rows[:2], (rows.cu_rows, rows.kv_len, rows.window), rows.ancestors, rows.table),
            ([*range(len(model.layers) + 1)], self.groups),
            columns,
            cache.last_position,
            draft.depth,
            [(s.sampling.temperature, s.sampling.seed) for s in r.requests],
            [s.policy.rule for s in r.requests] if r.confident else None,
        )
        draft.size = draft.depth = len(drafted)
        draft.forwarded = draft.size - 1
        r.window[: r.n, 1 : draft.size + 1] = torch.from_numpy(drafted.T)
        if r.confident:
            draft.confidence = probability.tolist()
        if r.traced:
            draft.scores = [torch.from_numpy(probability.T).log()]

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
        for slot, (sequence, end) in enumerate(zip(r.requests, self._lengths(r), strict=True)):
            if len(sequence.text) > self.limit:
                cache.exact_len[slot] = end - 1
            elif end - cache.exact_len[slot] > CATCH_UP_ROWS:
                self.prefill(slot, sequence.text)
            starts.append(cache.exact_len[slot])
            texts.append(self.known(sequence.text[starts[-1] : end]))
            cache.exact_len[slot] = end
        tokens = torch.tensor([token for text in texts for token in text], device=self.model.device)
        return tokens, cache.after(starts, [len(text) for text in texts])

    def _chain(self, r: Round, draft: Draft) -> None:
        for n in range(draft.depth):
            self._step(r, draft, n)

    def _step(self, r: Round, draft: Draft, n: int) -> None:
        """Draft token n of each sequence. The next catch-up writes the last token's K/V."""
        if n == 0:
            final, positions = self._catch_up(r)
            draft.forwarded = 0
        else:
            final, positions = self.step(r, n, r.window[:, n : n + 1])
            draft.forwarded = n
        draft.extend(r, self.head, final, positions, r.window[:, n + 1 : n + 2])

    def _tree(self, r: Round, draft: Draft) -> None:
        """Draft EAGLE-2's tree level by level: each level grows its `width` best nodes, and the draft is the best
        candidates of all levels. Grown node j of a sequence is j columns after its root; scores are cumulative
        log-probabilities."""
        n, width, count, device = r.n, self.width, self.width * draft.depth, self.model.device
        tokens, parents = torch.empty((2, n, count), dtype=torch.int64, device=device).unbind(0)
        wide = torch.float64 if self.model.dtype == torch.float64 else torch.float32
        scores = tokens.new_empty((n, count), dtype=wide)
        every = Candidates.empty(n, width, draft.depth, wide, device)
        final, positions = self._catch_up(r)
        for at in range(0, count, width):
            if at:  # the last level's nodes, which end at row `at`
                final, positions = self.step(r, at - width + 1, tokens[:, at - width : at], parents[:, :at])
            grow(*self.head.ranked(final, width, r.draws, positions), tokens, parents, scores, at, every)
        draft.forwarded = count - width
        up = r.state.parents[:, : draft.size]
        best, draft.nodes = prune(every, r.window[:, 1 : draft.size + 1], up)
        if r.traced and not r.fixed:  # a replayed graph runs no Python
            kept = every.scores.gather(1, best)
            above = torch.cat((torch.zeros_like(kept[:, :1]), kept), 1).gather(1, up)
            draft.scores.append(kept - above)
