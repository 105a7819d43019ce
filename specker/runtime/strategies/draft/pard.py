"""The drafter of a PARD model (arXiv 2504.18583), a small causal model that was trained to draft in one pass.

K - 1 masks follow the last committed token, and row j of the last K rows guesses token j of the draft:

    rows    x_n   mask   mask   ..
    guess   1     2      3      ..

Mask j was trained without the drafted tokens before it, so it is right less often than a chain's token, but the draft
reads the weights once. The masks' K/V is dropped after the round.
"""

import torch
from torch import Tensor

from specker.model.decoder import Final, forward
from specker.model.rows import begin
from specker.runtime.round.batch import Batch
from specker.runtime.round.drafter import Draft
from specker.runtime.strategies.growth import guess
from specker.runtime.strategies.model_drafter import ModelDrafter, last_rows


class ParallelDrafter(ModelDrafter):
    def room(self, length: int) -> int:
        return self.limit - length + 1  # the root's own row guesses the first token

    def propose(self, batch: Batch) -> Draft:
        """Draft for all sequences that have room left in the draft's context and are read."""
        self.head.follow(batch.requests)
        depth = min(batch.budget.depth, batch.budget.nodes)
        draft = Draft(depth, depth=depth, idle=self.idle(batch.requests, batch.fixed))
        if not batch.confident and (batch.fixed or not batch.traced):
            batch.run(("block", depth), lambda: self._write(batch, draft))
            return draft
        guess(batch, draft, self.head, *self._rows(batch, draft))
        return draft

    def _write(self, batch: Batch, draft: Draft) -> None:
        final, positions = self._rows(batch, draft)
        guesses = self.head.best(final, batch.draws, positions)
        batch.window[: batch.n, 1 : draft.depth + 1] = guesses.view(batch.n, draft.depth)

    def _rows(self, batch: Batch, draft: Draft) -> tuple[Final, Tensor]:
        """Run the committed tokens that the cache lacks, and the masks. Returns the rows that guess a draft's tokens
        [n * depth, E] and their positions [n * depth] int64."""
        mask, n, depth, model = self.model.config.pard_token, batch.n, draft.depth, self.model
        assert mask is not None
        if batch.fixed:
            text = batch.last(self.repeated).clamp(max=model.config.vocab_size - 1)
            tokens = torch.cat((text, text.new_full((n, depth - 1), mask)), 1)
            rows, embedded = begin(model, self.cache, batch.lengths, self.repeated, 0, tokens)
        else:
            texts, lengths = [request.token_ids for request in batch.requests], self.lengths(batch.requests, draft.idle)
            tokens, rows = self.missing_rows(texts, lengths, [mask] * (depth - 1))
            embedded = model.embed_tokens(tokens)
        last = last_rows(rows, depth)
        return forward(model, self.cache, rows, embedded).final.at(last), rows.positions[last]
