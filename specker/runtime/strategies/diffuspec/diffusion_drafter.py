"""The drafter that guesses blocks with a diffusion language model, and searches paths through its candidates."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from specker.kernels.ancestors import pack_bits
from specker.model.cache import KVCache
from specker.model.decoder import Final, Model, forward
from specker.runtime.control.policy import Budget
from specker.runtime.control.stats import BlockStats
from specker.runtime.round.batch import Batch
from specker.runtime.round.drafter import Accepted, Draft
from specker.runtime.round.lm_head import LMHead
from specker.runtime.strategies.base import DraftContext, Strategy
from specker.runtime.strategies.blocks.lattice import Search
from specker.runtime.strategies.blocks.search import BlockDraft, before_stop, read, searched
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
        self.synchronous = search is not None

    def fits(self, length: int, budget: Budget) -> bool:
        """Whether also the catch-up rows and the masks fit into the window of one pass."""
        rows = self.repeated + min(budget.depth, budget.nodes)
        return rows <= WINDOW and super().fits(length, budget)

    def propose(self, batch: Batch) -> Draft:
        """Draft a block of tokens for all sequences."""
        self.head.follow(batch.requests)
        depth = min(batch.budget.depth, batch.budget.nodes)
        if batch.fixed:
            batch.run(("block", depth), lambda: self._fixed_block(batch, depth))
            if self.search is None:
                return BlockDraft(depth, depth=depth, observed=True)
            lengths = [len(s.token_ids) for s in batch.requests]
            return self._searched(batch, self.search, Final(batch.memory.get("hidden", batch.n * depth)), lengths)
        texts = [s.token_ids[: self.limit] for s in batch.requests]
        final, lengths = self.masked(texts, depth), [len(text) for text in texts]
        if self.search is not None:
            return self._searched(batch, self.search, final, lengths)
        guesses = self.head.best(final, batch.draws, self._positions(lengths, depth)).view(len(texts), depth).tolist()
        generated = [before_stop(each, self.stop_ids) for each in guesses]
        kept = [each[: count + 1] for each, count in zip(guesses, generated, strict=True)]
        draft = BlockDraft.of(batch, kept, [list(range(len(each))) for each in kept])
        draft.blocks = [BlockStats(count) for count in generated]
        return draft

    def accept(self, batch: Batch, draft: Draft, accepted: Accepted) -> None:
        super().accept(batch, draft, accepted)
        if isinstance(draft, BlockDraft):
            draft.observe(accepted, self.stop_ids)

    def _positions(self, lengths: list[int], k: int) -> Tensor:
        """[len(lengths) * k] int64: for each of the next k tokens of each text, the position after which plain decoding
        draws it."""
        device, last = self.model.device, self.model.config.max_context - 1
        first = torch.tensor(lengths, dtype=torch.int64, device=device)[:, None] - 1
        return (first + torch.arange(k, dtype=torch.int64, device=device)).clamp(max=last).view(-1)

    def masked(self, texts: Sequence[list[int]], n: int) -> Final:
        """The rows [sequences * n, E] that predict the n tokens after the texts."""
        mask, model = self.model.config.mask_token_id, self.model
        assert mask is not None
        tokens, rows = self.missing_rows(texts, [mask] * n, full=True)
        out = last_rows(rows, n, before=int(model.config.shifted_logits))
        return forward(model, self.cache, rows, model.embed_tokens(tokens)).final.at(out)

    def _fixed_block(self, batch: Batch, k: int) -> None:
        """One pass, placed by the device, over the last committed tokens and the new masks."""
        config, R, n = self.model.config, self.repeated, batch.n
        assert config.mask_token_id is not None
        text = batch.last(R).clamp(max=config.vocab_size - 1)
        tokens = torch.cat((text, torch.full_like(text[:, :1], config.mask_token_id).expand(n, k)), 1)
        rows = self.cache.place(batch.lengths, R, 0, R + k)
        rows = rows._replace(ancestors=_full_words(R + k, self.model.device).repeat(n, 1))
        out = forward(self.model, self.cache, rows, self.model.embed_tokens(tokens.view(-1)))
        masks = slice(R - 1, -1) if config.shifted_logits else slice(R, None)

        def asking(x: Tensor) -> Tensor:
            return x.view(n, R + k, -1)[:, masks].reshape(n * k, -1)

        if self.search is not None:
            batch.memory.put("hidden", asking(out.hidden))
            return
        ahead = torch.arange(-1, k - 1, dtype=torch.int64, device=self.model.device)
        asked = (batch.state.length[:, None] + ahead).view(-1)
        final = Final(asking(out.final.rows), out.final.normed)
        batch.window[:, 1 : k + 1] = self.head.best(final, batch.draws, asked).view(n, k)

    def _searched(self, batch: Batch, search: Search, final: Final, lengths: list[int]) -> BlockDraft:
        """The paths through the candidates of the rows [n * k, E] that predict the tokens after texts of `lengths`."""
        k = len(final.rows) // batch.n
        positions = self._positions(lengths + [1] * (batch.n - len(lengths)), k)
        return searched(batch, final, positions, self.head, search, self.stop_ids, self.stops)


@lru_cache(maxsize=512)
def _full_words(count: int, device: torch.device) -> Tensor:
    return pack_bits([(1 << count) - 1] * count, count).to(device)


def made(context: DraftContext, strategy: Strategy) -> DiffusionDrafter:
    """Make the drafter that the options describe."""
    assert context.draft is not None
    search, model = read(context), context.draft_model()
    cache, head, rows = context.allocate(model), context.head(model), model.head
    stop_ids = context.target.config.eos_ids
    ids = torch.tensor([i for i in stop_ids if i < len(rows)], dtype=torch.int64, device=rows.device)
    stops = LMHead(rows[ids], model.norm, model.config.rms_norm_eps)
    stops.token_ids = ids
    return DiffusionDrafter(
        model, cache, head, stops if len(ids) else None, frozenset(stop_ids), search, context.depth(strategy)
    )
