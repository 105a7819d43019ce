"""The drafter that runs an assistant, which reads the target's K/V (model/assistant.py has the equations).

It has no K/V of its own: nothing catches up with a text, and refused drafts leave nothing behind. Of each text it keeps
one row, the target's of the column before the root. All nodes of a tree attend from the root's position, too, so a
level of a tree is as many rows as it has nodes.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specker.checkpoints.checkpoint import Checkpoint
from specker.cpu.packed import Packed
from specker.kernels.cluster_topk import cluster_topk
from specker.kernels.residual_merge import add_norm
from specker.model.assistant import Assistant
from specker.model.cache import KVCache, Rows
from specker.model.decoder import Final, Model
from specker.model.prefill import prefill
from specker.model.sampling import Draws
from specker.options import Sampling
from specker.runtime.control.policy import Offer
from specker.runtime.notes import Notes
from specker.runtime.round.batch import Batch
from specker.runtime.round.drafter import Accepted, Draft, Drafter
from specker.runtime.round.lm_head import LMHead
from specker.runtime.round.state import Request
from specker.runtime.strategies.eagle.agreement import IMPLAUSIBLE, LOGITS, text_of
from specker.runtime.strategies.growth import grown


@dataclass
class ClusteredHead(LMHead):
    """An LM head of which each row reads the clusters that fit it best (kernels/cluster_topk.py)."""

    centroids: Tensor = field(kw_only=True)  # [C, E]
    order: Tensor = field(kw_only=True)  # [C, K / C] int64, the ids of each cluster's rows
    chosen: int = field(kw_only=True)  # clusters that a row reads

    @property
    def most(self) -> int:
        return self.chosen * self.order.shape[1]

    def _topk(
        self, final: Final, k: int, draws: Draws, positions: Tensor, with_lse: bool = True, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert not isinstance(self.weight, Packed)  # rows that are ordered by cluster stay as they are
        norm, noise = None if final.normed else (self.norm, self.eps), draws.noise(positions)
        weight, chosen = self.weight, self.chosen
        return cluster_topk(final.rows, weight, self.centroids, self.order, chosen, k, norm, noise, with_lse, out=out)


class AssistantDrafter(Drafter):
    """Drafts chains or trees step by step. After a round, the device keeps the next draft's feature where shapes are
    fixed, and the host does otherwise."""

    model: Model  # the assistant's layers
    cache: KVCache  # the target's, which the assistant reads
    head: LMHead
    source, needs_row = "head", True

    def __init__(self, assistant: Assistant, target: Model, cache: KVCache, head: LMHead, width: int = 1):
        """`width`: nodes per tree level; 1 drafts a chain."""
        self.assistant, self.model, self.target = assistant, assistant.model, target
        self.cache, self.head, self.width = cache, head, width
        self.aux_layers = (assistant.spec.depth,)
        slots = len(cache.exact_len)
        # By slot, the target's row of the column before the root, after the final norm.
        self.features = torch.zeros(slots, assistant.spec.width, dtype=self.model.dtype, device=self.model.device)
        self._rows = self.features[:0]  # [n * count, E], the last step's for the LM head

    def prepare(self, requests: list[Request]) -> Offer:
        fixed = not self._lacks(requests)
        return Offer(fixes=lambda budget: fixed)

    def _lacks(self, requests: list[Request]) -> bool:
        """Whether a text has no column before its root, as after a prompt of one token: then nothing can be drafted."""
        return any(len(request.token_ids) < 2 for request in requests)

    def propose(self, batch: Batch) -> Draft:
        if not batch.fixed and self._lacks(batch.requests):
            return Draft()
        self.head.follow(batch.requests)
        return grown(batch, self, self.width)

    # --- growth.Steps

    def start(self, batch: Batch) -> tuple[Final, Tensor]:
        rows = self.assistant.rows(self.cache, batch.lengths)
        final = self._forward(batch, rows, batch.window[:, 0], self.features[: batch.n])
        return final, rows.positions

    def step(self, batch: Batch, first: int, tokens: Tensor, parents: Tensor | None = None) -> tuple[Final, Tensor]:
        n, count = tokens.shape
        before = batch.memory.get("hidden", n) if batch.confident else self._rows
        if parents is not None:
            m = len(before) // n  # rows of the level before, of which the first is row first - m of the window
            row = (parents[:, first - 1 : first - 1 + count] - (first - m)).clamp(0, m - 1)
            before = before[(row + m * torch.arange(n, dtype=torch.int64, device=row.device).unsqueeze(1)).view(-1)]
        rows = self.assistant.rows(self.cache, batch.lengths, count)
        final = self._forward(batch, rows, tokens.flatten(), self.assistant.feature(before))
        return final, rows.positions + (first + count - 1) // count  # greedy draws read none

    def _forward(self, batch: Batch, rows: Rows, tokens: Tensor, features: Tensor) -> Final:
        final = self.assistant.forward(self.cache, rows, self.target.embedded(tokens), features)
        # Drafts that end by confidence are several graph segments.
        if batch.confident:
            batch.memory.put("hidden", final.rows)
        else:
            self._rows = final.rows
        return final

    # --- the target's rows

    def _normed(self, rows: Tensor) -> Tensor:
        return add_norm(rows.contiguous(), None, self.target.norm, self.target.config.rms_norm_eps)[1]

    def read(self, slot: int, request: Request, first: int, rows: dict[int, Tensor]) -> None:
        self.features[slot] = self._normed(rows[self.aux_layers[0]][-1:])[0]

    def accept(self, batch: Batch, draft: Draft, accepted: Accepted) -> None:
        """Keep the row of the last accepted token, unless the device has."""
        for slot, path in enumerate(accepted.paths):
            if path and not batch.fixed:
                self.features[slot] = self._normed(batch.aux_hidden_states(draft.size, slot, path[-1:])[:, 0])[0]

    def accept_on_device(self, batch: Batch, draft: Draft) -> None:
        if batch.fixed:
            batch.run(("feature", draft.size), lambda: self._accepted(batch, draft.size), draws=False)

    def _accepted(self, batch: Batch, N: int) -> None:
        """Keep the row of the last accepted token, which only the device knows."""
        n, device = batch.n, self.features.device
        report = batch.state.report[: n * (3 + 2 * N)].view(n, -1)
        each, last = torch.arange(n, dtype=torch.int64, device=device), report[:, :1].clamp(min=1)
        row = report.gather(1, last)[:, 0].clamp(0, N)
        rows = batch.memory.aux(1, n * (N + 1)).view(n, N + 1, -1)[each, row]
        grown = report[:, :1] > 0
        self.features[:n] = torch.where(grown, self._normed(rows), self.features[:n])

    @property
    def head_bytes(self) -> int:
        if not isinstance(head := self.head, ClusteredHead):
            return super().head_bytes
        return head.centroids.nbytes + head.weight.nbytes * head.chosen // len(head.order)

    def move(self, source: int, target: int) -> None:
        self.features[target] = self.features[source]


@torch.inference_mode()
def measure(target: Checkpoint, model: Model, assistant: Assistant, head: LMHead, notes: Notes) -> None:
    """Add to `notes` the share of a short text's tokens at which the assistant's first guess is the target's own token.
    An assistant for another finetune of the target makes no error: it only drafts badly."""
    if (text := text_of(target)) is None:
        return
    tokens, first = text
    T, top, greedy = len(tokens), model.config.num_layers, Draws.one(Sampling())
    cache = KVCache(model.config, T, dtype=model.dtype, device=model.device)
    rows = prefill(model, cache, tokens, (top,), T)[top]
    ids = torch.tensor(tokens, dtype=torch.int64, device=model.device)
    features = add_norm(rows, None, model.norm, model.config.rms_norm_eps)[1]
    agreed = []
    for at in range(max(1, first - 1), T, LOGITS):  # roots, each with the text up to it
        roots = range(at, min(at + LOGITS, T))
        own = model.draw(greedy, model.logits(Final(rows[roots[0] : roots[-1] + 1])), cache.positions[: len(roots)])
        lengths = torch.tensor([root + 1 for root in roots], dtype=torch.int64, device=model.device)
        placed = assistant.rows(cache, lengths[:1])
        each = placed._replace(
            positions=lengths - 1,
            slots=placed.slots.expand(len(roots)),
            kv_len=(lengths - 1).int(),
            window=placed.window.expand(len(roots)).contiguous(),
            ancestors=placed.ancestors.expand(len(roots), -1).contiguous(),
            cu_rows=torch.arange(len(roots) + 1, dtype=torch.int32, device=model.device),
            table=placed.table.expand(len(roots), -1).contiguous(),
        )
        before = features[roots[0] - 1 : roots[-1]]
        final = assistant.forward(cache, each, model.embedded(ids[roots[0] : roots[-1] + 1]), before)
        agreed.append(head.best(final, greedy, each.positions) == own)
    share = float(torch.cat(agreed).float().mean())
    said = f"the assistant's first guess is the target's own token at {share:.0%} of {T - max(1, first - 1)} positions"
    said += " of a test text"
    if share < IMPLAUSIBLE:
        notes["head"] = f"{said}; that is implausibly rare, so it may belong to another model"
    else:
        notes.fact("head", said)
