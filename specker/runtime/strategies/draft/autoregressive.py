"""A drafter that runs a small model token by token, or level by level."""

from typing import Protocol

from torch import Tensor

from specker.cpu import Committed, Translated
from specker.model.cache import KVCache, Rows
from specker.model.decoder import Final, Model, Output, forward
from specker.model.rows import begin, begin_text
from specker.runtime.round.batch import Batch
from specker.runtime.round.drafter import Accepted, Draft
from specker.runtime.round.lm_head import LMHead
from specker.runtime.strategies.compiled import ChainModel, compiled_chain, readable
from specker.runtime.strategies.growth import grown
from specker.runtime.strategies.model_drafter import CATCH_UP_ROWS, ModelDrafter


class DraftLayers(Protocol):
    """Another way to run the model's layers in draft steps; the pass over committed tokens is always exact."""

    @property
    def compiles(self) -> bool:
        """Whether the compiled library can run them."""
        ...

    @property
    def groups(self) -> list[int]:
        """The first layer of each group of layers that run side by side, then the number of layers."""
        ...

    def forward(self, rows: Rows, hidden: Tensor) -> Output:
        """Run the layers from the embeddings of draft tokens [T, E]. Writes the rows' K/V."""
        ...


class AutoregressiveDrafter(ModelDrafter):
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
        draft forwards those tokens exactly, with the bonus token (EasySpec's bonus calibration)."""
        super().__init__(model, cache, head, depth)
        self.width, self.layers = width, layers

    def room(self, length: int) -> int:
        return self.limit - length + 1  # nothing forwards the last draft token

    def propose(self, batch: Batch) -> Draft:
        """Draft for all sequences that have room left in the draft's context."""
        self.head.follow(batch.requests)
        return self.drafted(batch, self.idle(batch.requests))

    def drafted(self, batch: Batch, idle: frozenset[int], translated: Translated | None = None) -> Draft:
        """`propose` but for the head's rows. `idle`: slots that draft nothing."""
        if self.width > 1 or batch.fixed or not self._compiles(batch):
            return grown(batch, self, self.width, idle)
        tokens, rows = self.missing_rows(batch)
        groups = None if self.layers is None else self.layers.groups
        drafting = ChainModel(self.model, self.cache, self.head, groups=groups)
        columns = [min(len(request.token_ids), self.limit) for request in batch.requests]
        return compiled_chain(batch, drafting, rows, Committed(tokens), columns, idle, translated)

    def _compiles(self, batch: Batch) -> bool:
        """Whether the compiled library drafts the whole chain."""
        stack = self.model.stack
        fits = stack is not None and len(batch.requests) * CATCH_UP_ROWS <= stack.most
        return fits and readable(self.model, self.head) and (self.layers is None or self.layers.compiles)

    def accept(self, batch: Batch, draft: Draft, accepted: Accepted) -> None:
        if not draft.size:
            return
        for slot, (request, path) in enumerate(zip(batch.requests, accepted.paths, strict=True)):
            if path and batch.fixed:  # the columns before the catch-up rows are exact
                self.cache.exact_len[slot] = self.exact_after_fixed(len(request.token_ids))
            elif path and self.layers is None:
                self.keep(draft, slot, draft.own(slot, path))

    def keep(self, draft: Draft, slot: int, path: list[int]) -> None:
        """Keep the K/V of accepted draft nodes; the last level has none yet."""
        if self.cache.exact_len[slot] > self.limit:
            return
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
            tokens, rows = self.missing_rows(batch)
            embedded = self.model.embed_tokens(tokens)
            last = slice(-1, None) if n == 1 else rows.cu_rows[1:].long() - 1
        return forward(self.model, cache, rows, embedded).final.at(last), rows.positions[last]

    def step(self, batch: Batch, first: int, tokens: Tensor, parents: Tensor | None = None) -> tuple[Final, Tensor]:
        rows, embedded = begin(self.model, self.cache, self.lengths(batch), 1, first, tokens, parents)
        layers = self.layers
        out = forward(self.model, self.cache, rows, embedded) if layers is None else layers.forward(rows, embedded)
        return out.final, rows.positions
