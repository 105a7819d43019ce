"""The drafter that runs the target's own first layers, and the tokens of the layers that DEL watches."""

import time
from typing import Any

import torch
from torch import Tensor

from specker.model.cache import KVCache
from specker.model.decoder import Final, Model, forward
from specker.model.rows import begin, begin_step
from specker.model.sampling import Draws
from specker.runtime.control.policy import Budget, Offer
from specker.runtime.round.batch import Batch
from specker.runtime.round.drafter import Accepted, Draft, Drafter, Resume
from specker.runtime.round.lm_head import LMHead
from specker.runtime.round.state import Request

# The last rows of a prompt seed DEL's statistics. Each row is multiplied by the LM head once for each watched layer, so
# a prompt gets one such product for every PROMPT_SHARE of its tokens. Short prompts get none: the first round watches
# the same layers.
PROMPT_ROWS = 32  # at most, as in the paper
PROMPT_SHARE = 16


class EarlyExitDrafter(Drafter):
    model: Model  # the target
    cache: KVCache  # the target's
    head: LMHead  # the LM head of the draft steps, perhaps trimmed
    source = "layers"

    def __init__(self, model: Model, cache: KVCache, head: LMHead, watched: tuple[int, ...] = (), spares: bool = True):
        """`watched`: the depths that policies may watch. `spares`: short prompts seed with fewer rows, or none."""
        self.model, self.cache, self.head, self.spares = model, cache, head, spares
        self.aux_layers = (*watched, len(model.layers)) if watched else ()

    def prepare(self, requests: list[Request]) -> Offer:
        return Offer(fixes=lambda budget: not budget.extra)

    def reads(self, budget: Budget) -> tuple[int, ...]:
        return budget.extra  # the watched layers

    def propose(self, batch: Batch) -> Draft:
        """Draft a chain with layers [0, batch.budget.exit); one CUDA graph per exit runs a step."""
        self.head.follow(batch.requests)
        draft, budget, s = Draft(), batch.budget, batch.state
        hidden: list[Tensor] = []
        watched: dict[int, list[Tensor]] = {n: [] for n in batch.aux_layers if n < budget.exit}
        if batch.fixed:
            s.step.zero_()
        for n in range(min(budget.depth, budget.nodes)):
            batch.run(("exit", budget.exit), lambda n=n: self._step(batch, draft, n, hidden, watched))  # type: ignore[misc]
            draft.size = draft.depth = n + 1
            if batch.confident and not draft.goes_on(batch):
                break
        rows = Resume.memory(batch)[:, : draft.size] if batch.fixed else torch.stack(hidden, 1)
        draft.resume = Resume(budget.exit, rows, {layer: torch.stack(kept, 1) for layer, kept in watched.items()})
        return draft

    def _step(self, batch: Batch, draft: Draft, n: int, hidden: list[Tensor], watched: dict[int, list[Tensor]]) -> None:
        """Draft token n of each sequence. Captured work reads n from the state, so one graph serves all n."""
        s, model, cache = batch.state, self.model, self.cache
        if batch.fixed:
            rows, embedded = begin_step(model, cache, s.window, s.length, s.step)
        else:
            rows, embedded = begin(model, cache, batch.lengths, 1, n, s.window[:, n : n + 1])
        out = forward(model, cache, rows, embedded, slice(batch.budget.exit), tuple(watched))
        if batch.fixed:
            Resume.memory(batch).index_copy_(1, s.step, out.hidden.unsqueeze(1))
            s.step.add_(1)
            best = s.window.new_empty(batch.n, 1)
            draft.extend(batch, self.head, out.final, rows.positions, best)
            s.window.index_copy_(1, s.step, best)
            return
        draft.extend(batch, self.head, out.final, rows.positions, s.window[:, n + 1 : n + 2])
        hidden.append(out.hidden)
        for layer, kept in watched.items():
            kept.append(out.aux_hidden_states[layer])

    def reads_prompt(self, request: Request, first: int, count: int) -> bool:
        return self._seeds(request, first, count, request.stats.prefilled + count) > 0

    def _seeds(self, request: Request, first: int, count: int, prefilled: int) -> int:
        """How many of a chunk's rows, its last ones, seed the statistics. `prefilled`: rows of the prompt so far."""
        layers, ends = len(request.policy.layers), first + count == len(request.token_ids) - 1
        if not layers or not ends:
            return 0
        return min(PROMPT_ROWS, count, int(prefilled / (PROMPT_SHARE * layers)) if self.spares else PROMPT_ROWS)

    def read(self, slot: int, request: Request, first: int, rows: dict[int, Tensor]) -> None:
        """The last rows of a prompt seed the policy's statistics."""
        depth, layers = len(self.model.layers), request.policy.layers
        end = first + (count := len(rows[depth]))
        if last := self._seeds(request, first, count, request.stats.prefilled):
            positions, draws = self.model.positions[end - last : end], Draws.one(request.sampling)
            target = self.model.draw(draws, self.model.logits(Final(rows[depth][-last:])), positions)
            watched = {n: rows[n][-last:] for n in layers}
            request.policy.learn(layers, *self._watch(watched, target, positions, draws))

    def accept(self, batch: Batch, draft: Draft, accepted: Accepted) -> None:
        """Give each policy the watched layers' predictions after the accepted rows; later rows follow rejected tokens.
        The cost also includes how much longer this round took than a usual one: passes that keep hidden rows take
        longer, and are not captured."""
        if not batch.aux_layers:
            return
        start, seconds, rows = time.perf_counter(), accepted.seconds, batch.n * (draft.size + 1)
        positions, targets = (batch.memory.get(name, rows).view(batch.n, -1) for name in ("positions", "target"))
        seen: list[tuple[Request, Any, Any]] = []
        for slot, (request, path) in enumerate(zip(batch.requests, accepted.paths, strict=True)):
            if not path:
                continue
            k, draws = len(path), Draws.one(request.sampling)
            hidden = batch.aux_hidden_states(draft.size, slot, path)
            watched = {depth: hidden[:, i] for i, depth in enumerate(batch.aux_layers)}
            seen.append((request, *self._watch(watched, targets[slot, :k], positions[slot, :k], draws)))
        spent = time.perf_counter() - start
        longer = sum(seconds.values()) + spent - accepted.usual
        for request, match, confidence in seen:
            request.policy.learn(batch.aux_layers, match, confidence, max(spent, longer))
        seconds["watch"] = spent

    def _watch(self, watched: dict[int, Tensor], target: Tensor, positions: Tensor, draws: Draws) -> tuple[Any, Any]:
        """`shadows`, copied to the host."""
        match, confidence = shadows(self.head, watched, target, positions, draws)
        return match.cpu().numpy(), confidence.cpu().numpy()  # waits for the GPU


def shadows(
    head: LMHead, watched: dict[int, Tensor], target: Tensor, positions: Tensor, draws: Draws
) -> tuple[Tensor, Tensor]:
    """Compare each watched layer's shadow token with the target's token. watched: depth -> [T, E], the rows of one
    sequence; target [T] int64, the full model's tokens after the rows at `positions` [T] -> match [n, T] bool and
    confidence [n, T]. One norm and head pass over all rows of all layers, with the noise of the target's draw."""
    n, T = len(watched), len(target)
    ids, scores = head.candidates(Final(torch.cat(list(watched.values()))), 1, draws, positions.repeat(n))
    return ids.view(n, T) == target, scores.exp().view(n, T)
