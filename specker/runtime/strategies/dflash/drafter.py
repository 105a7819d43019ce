"""The drafter that guesses blocks from the target's hidden states."""

import torch
from torch import Tensor

from specker.kernels.topk import largest_of
from specker.model.cache import KVCache
from specker.model.decoder import Final, Model
from specker.model.dflash import BlockModel
from specker.runtime.drafter import Draft, Drafter
from specker.runtime.head import Head
from specker.runtime.round import Round
from specker.runtime.state import Request
from specker.runtime.strategies.diffuspec.lattice import Search, best_paths, lattice, trie


class BlockDrafter(Drafter):
    """The cache has a column for each committed token but the root, written as soon as the target's rows are known."""

    model: Model
    cache: KVCache
    head: Head
    ahead = 0

    def __init__(self, block: BlockModel, cache: KVCache, head: Head, width: int = 1):
        """`width`: paths through a block that are drafted as one tree; 1 drafts a chain."""
        self.block, self.model, self.cache, self.head, self.width = block, block.model, cache, head, width
        self.taps, self.spec = block.spec.taps, block.spec
        self.synchronous = width > 1
        if (ids := block.weights.ids) is not None:
            head.token_ids, head.known = ids, set(ids.tolist())

    @property
    def keeps_prefix(self) -> bool:
        return True

    def left(self, length: int) -> int:
        return min(self.spec.most, self.cache.capacity - length)

    def draft(self, r: Round) -> Draft:
        """Draft for all sequences; nothing if one has no columns, such as one that did not draft from its beginning."""
        depth = min(r.budget.depth, r.budget.nodes)
        lengths = [len(request.text) for request in r.requests]
        if any(self.cache.exact_len[slot] != length - 1 for slot, length in enumerate(lengths)):
            return Draft()
        self.head.follow(r.requests)
        count = depth if self.spec.following else depth + 1
        rows = self.cache.place(r.lengths, 1, 0, count)
        final = self.block.block(self.cache, rows, r.window[:, 0], count)
        final = self.block.predicting(final, r.n, depth)
        positions = self._positions(lengths, depth)
        if self.width > 1:
            return self._tree(r, final, positions, depth)
        draft = Draft(depth, depth=depth)
        guess = self._guesses if self.block.weights.markov is None else self._chained
        ids, scores, sure = guess(r, final, positions, r.confident or r.traced)
        r.window[:, 1 : depth + 1] = ids
        if r.confident:
            assert sure is not None
            for step, confidence in enumerate(sure.T.tolist(), 1):
                draft.size = draft.depth = step
                if not draft.vote(r.requests, confidence):
                    break
        if r.traced and scores is not None:
            draft.scores.append(scores[:, : draft.size])
        return draft

    def _positions(self, lengths: list[int], drafts: int) -> Tensor:
        """[n, drafts] int64: for each of the next tokens of each text, the position after which the target draws it."""
        roots = torch.tensor(lengths, device=self.model.device).unsqueeze(1) - 1
        return (roots + torch.arange(drafts, device=roots.device)).clamp(max=self.model.config.max_context - 1)

    def _guesses(
        self, r: Round, final: Final, positions: Tensor, scored: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Rows [n * k, H] at `positions` [n, k] -> the best tokens [n, k]; if `scored` also their log-probabilities
        [n, k] and how likely the target is to accept them [n, k]."""
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
        """`_guesses` with a Markov head: one token after another, each from its row and the token before it."""
        (n, k), block = positions.shape, self.block
        logits, normed = self.head.logits(final).view(n, k, -1), block.normed(final).view(n, k, -1)
        # A trimmed head has the rows of some ids, a head with ids of its own choice those of w2.
        kept = self.head.token_ids if block.weights.ids is None else None
        ids = torch.empty_like(positions)
        scores, sure = logits.new_empty(n, k), logits.new_empty(n, k)
        before = r.window[:, 0]
        for step in range(k):
            latent = block.latent(before)
            z = logits[:, step] + block.bias(latent, kept)
            noise = r.draws.noise(positions[:, step].contiguous())
            best, values, lse = largest_of(z, self.head.token_ids, 1, noise, scored)
            ids[:, step] = before = best[:, 0]
            if scored:
                scores[:, step] = values[:, 0] - lse
                if block.weights.confidence is not None:
                    sure[:, step] = block.confidence(normed[:, step], latent)
        return ids, scores, scores.exp() if block.weights.confidence is None else sure

    def _tree(self, r: Round, final: Final, positions: Tensor, depth: int) -> Draft:
        """The most probable paths through a block's candidates, as one tree. Above temperature 0 the candidates are
        ranked under the noise of the target's draws."""
        how = Search(paths=self.width, tree=True)
        width = min(self.width, self.head.weight.shape[0])
        ids, scores = self.head.candidates(final, width, r.draws, positions.view(-1))
        tokens: list[list[int]] = []
        parents: list[list[int]] = []
        for own, ranks in zip(ids.cpu().split(depth), scores.cpu().split(depth), strict=True):
            paths = best_paths(lattice(own.numpy(), ranks.numpy(), None, 1.0), how, (-1, -1), frozenset())
            found = trie(paths, r.budget.nodes, depth)
            tokens.append(found[0])
            parents.append(found[1])
        return Draft.of(r, tokens, parents)

    def prefilled(self, slot: int, request: Request, first: int, rows: dict[int, Tensor]) -> None:
        taps = torch.stack([rows[depth] for depth in self.taps])
        self._keep([(slot, first, taps)])

    def learn(self, r: Round, paths: list[list[int]]) -> None:
        """Write the columns of the accepted tokens."""
        kept = []
        for slot, (request, path) in enumerate(zip(r.requests, paths, strict=True)):
            if path and not request.finished:
                rows = r.tapped(slot, path[-1] + 1)
                taps = torch.stack([rows[depth][path] for depth in self.taps])
                kept.append((slot, len(request.text) - 1 - len(path), taps))
        if kept:
            self._keep(kept)

    def _keep(self, parts: list[tuple[int, int, Tensor]]) -> None:
        """Write columns in all layers, for slots: from which column on, and the target's rows [A, T, Ht]."""
        cache = self.cache
        ends = [start + taps.shape[1] for _, start, taps in parts]
        spans = [(slot, start, end) for (slot, start, _), end in zip(parts, ends, strict=True)]
        positions = torch.cat([cache.positions[start:end] for _, start, end in spans])
        slots = torch.cat([cache.slots(*span) for span in spans])
        self.block.keep(cache, positions, slots, torch.cat([taps for *_, taps in parts], 1))
        for slot, start, end in spans:
            if cache.exact_len[slot] == start:  # else columns before these are missing
                cache.exact_len[slot] = end
