"""The drafter that guesses blocks with a diffusion language model, and searches paths through its candidates."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from specker.kernels.ancestors import pack_bits
from specker.model.cache import KVCache
from specker.model.decoder import Final, Model, forward
from specker.runtime.control.policy import Budget
from specker.runtime.round.batch import Batch
from specker.runtime.round.drafter import Accepted, Draft
from specker.runtime.round.lm_head import LMHead
from specker.runtime.strategies.base import DraftContext, Strategy
from specker.runtime.strategies.blocks.search import BlockDraft, Search, read, search, searched
from specker.runtime.strategies.model_drafter import WINDOW, ModelDrafter, last_rows


class DiffusionDrafter(ModelDrafter):
    keeps_prefix = False  # a bidirectional model's K/V of a prompt depends on what follows

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        head: LMHead,
        stops: LMHead | None,
        stop_ids: frozenset[int],
        search: Search | None = None,
        depth: int = 0,
    ):
        """`model` is bidirectional. `stops`: a head with the rows of the target's stop ids, which are candidates
        everywhere. `search`: None takes the argmax of each position."""
        super().__init__(model, cache, head, depth)
        self.stops, self.stop_ids, self.search = stops, stop_ids, search
        self.ends = torch.tensor([*stop_ids], dtype=torch.int64, device=model.device)

    def fits(self, length: int, budget: Budget) -> bool:
        """Whether also the catch-up rows and the masks fit into the window of one pass."""
        rows = self.repeated + min(budget.depth, budget.nodes)
        return rows <= WINDOW and super().fits(length, budget)

    def propose(self, batch: Batch) -> Draft:
        """Draft a block of tokens for all sequences that have room left in the draft's context and are read."""
        self.head.follow(batch.requests)
        k = min(batch.budget.depth, batch.budget.nodes)
        how = None if self.search is None else self.search.shaped(batch.budget)
        if how is None:
            draft = BlockDraft(k, depth=k, observed="draft")
        else:
            stops = 0 if self.stops is None else self.stops.most
            draft = searched(batch, k, how, min(how.candidates, self.head.most) + stops)
        draft.idle = self.idle(batch.requests, batch.fixed)

        def write() -> None:
            device = self.model.device
            if batch.fixed:
                final, lengths = self._fixed_block(batch, k), batch.state.length
            else:
                texts = [request.token_ids for request in batch.requests]
                final = self.masked(texts, k, self.lengths(batch.requests, draft.idle))
                lengths = torch.tensor(batch.lengths, dtype=torch.int64, device=device)
            ahead = torch.arange(-1, k - 1, dtype=torch.int64, device=device)
            positions = (lengths[:, None] + ahead).view(-1)  # after which the target draws the tokens
            if how is None:
                batch.window[:, 1 : k + 1] = self.head.best(final, batch.draws, positions).view(-1, k)
            else:
                search(batch, draft, final, positions, self.head, how, self.ends, self.stops)

        batch.run(("block", k, draft.size, draft.tree), write)
        return draft

    def accept(self, batch: Batch, draft: Draft, accepted: Accepted) -> None:
        super().accept(batch, draft, accepted)
        if isinstance(first := draft.first, BlockDraft):
            first.observe(accepted, self.stop_ids)

    def masked(self, texts: Sequence[list[int]], n: int, lengths: Sequence[int] | None = None) -> Final:
        """The rows [sequences * n, E] that predict the n tokens after the texts. `lengths`: see the method; None: of
        the whole texts."""
        mask, model = self.model.config.mask_token_id, self.model
        assert mask is not None
        tokens, rows = self.missing_rows(texts, lengths or [*map(len, texts)], [mask] * n, full=True)
        out = last_rows(rows, n, before=int(model.config.shifted_logits))
        return forward(model, self.cache, rows, model.embed_tokens(tokens)).final.at(out)

    def _fixed_block(self, batch: Batch, k: int) -> Final:
        """One pass, placed by the device, over the last committed tokens and the new masks. Returns as `masked`."""
        config, R, n = self.model.config, self.repeated, batch.n
        assert config.mask_token_id is not None
        text = batch.last(R).clamp(max=config.vocab_size - 1)
        tokens = torch.cat((text, torch.full_like(text[:, :1], config.mask_token_id).expand(n, k)), 1)
        rows = self.cache.place(batch.lengths, R, 0, R + k)
        rows = rows._replace(ancestors=_full_words(R + k, self.model.device).repeat(n, 1))
        out = forward(self.model, self.cache, rows, self.model.embed_tokens(tokens.view(-1)))
        masks = slice(R - 1, -1) if config.shifted_logits else slice(R, None)
        return Final(out.final.rows.view(n, R + k, -1)[:, masks].reshape(n * k, -1), out.final.normed)


@lru_cache(maxsize=512)
def _full_words(count: int, device: torch.device) -> Tensor:
    return pack_bits([(1 << count) - 1] * count, count).to(device)


def made(context: DraftContext, strategy: Strategy) -> DiffusionDrafter:
    """Make the drafter that the options describe."""
    assert context.draft is not None
    model = context.draft_model()
    how = read(context, model.device)
    cache, head, rows = context.allocate(model), context.head(model), model.head
    stop_ids = context.target.config.eos_ids
    ids = torch.tensor([i for i in stop_ids if i < len(rows)], dtype=torch.int64, device=rows.device)
    stops = LMHead(rows[ids], model.norm, model.config.rms_norm_eps)
    stops.token_ids = ids
    return DiffusionDrafter(
        model, cache, head, stops if len(ids) else None, frozenset(stop_ids), how, context.depth(strategy)
    )
