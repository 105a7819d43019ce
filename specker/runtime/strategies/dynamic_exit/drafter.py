"""The drafter that runs the target's own first layers, and the tokens of the layers that DEL watches."""

from typing import Any

import torch
from torch import Tensor

from specker.model.cache import KVCache
from specker.model.decoder import Final, Model, forward
from specker.model.rows import begin, begin_step
from specker.model.sampling import Draws
from specker.runtime.draft import Drafter
from specker.runtime.head import Head
from specker.runtime.policy import Budget
from specker.runtime.round import Round


class EarlyExitDrafter(Drafter):
    model: Model  # the target
    cache: KVCache  # the target's
    head: Head  # of the draft steps, perhaps trimmed

    def __init__(self, model: Model, cache: KVCache, head: Head):
        self.model, self.cache, self.head = model, cache, head

    def fixed(self, length: int, budget: Budget) -> bool:
        return not budget.taps

    def draft(self, r: Round) -> None:
        """Draft a chain with layers [0, r.budget.exit); one CUDA graph per exit runs a step."""
        self.head.follow(r.sequences)
        budget, s = r.budget, r.state
        hidden: list[Tensor] = []
        tapped: dict[int, list[Tensor]] = {n: [] for n in budget.taps if n < budget.exit}
        if r.fixed:
            s.step.zero_()
        for n in range(min(budget.depth, budget.nodes)):
            r.run(("exit", budget.exit), lambda n=n: self._step(r, n, hidden, tapped))  # type: ignore[misc]
            r.size = r.depth = n + 1
            if r.asks and not r.goes_on():
                break
        r.taps = {layer: torch.stack(kept, 1) for layer, kept in tapped.items()}
        r.hidden = self._room(r)[:, : r.size] if r.fixed else torch.stack(hidden, 1)

    def _room(self, r: Round) -> Tensor:
        return r.state.hidden.view(-1, r.window.shape[1], self.model.config.hidden_size)[: r.n]

    def _step(self, r: Round, n: int, hidden: list[Tensor], tapped: dict[int, list[Tensor]]) -> None:
        """Draft token n of each sequence. Captured work reads n from the state, so one graph serves all n."""
        s, model, cache = r.state, self.model, self.cache
        if r.fixed:
            rows, embedded = begin_step(model, cache, s.window, s.length, s.step)
        else:
            rows, embedded = begin(model, cache, r.lengths, 1, n, s.window[:, n : n + 1])
        out = forward(model, cache, rows, embedded, slice(r.budget.exit), tuple(tapped))
        if r.fixed:
            self._room(r).index_copy_(1, s.step, out.hidden.unsqueeze(1))
            s.step.add_(1)
            best = s.window.new_empty(r.n, 1)
            r.extend(self.head, out.final, rows.positions, best)
            s.window.index_copy_(1, s.step, best)
            return
        r.extend(self.head, out.final, rows.positions, s.window[:, n + 1 : n + 2])
        hidden.append(out.hidden)
        for layer, kept in tapped.items():
            kept.append(out.taps[layer])

    def watch(self, taps: dict[int, Tensor], draws: Draws, target: Tensor, positions: Tensor) -> tuple[Any, Any]:
        match, confidence = shadows(self.head, taps, target, positions, draws)
        return match.cpu().numpy(), confidence.cpu().numpy()  # waits for the GPU


def shadows(
    head: Head, taps: dict[int, Tensor], target: Tensor, positions: Tensor, draws: Draws
) -> tuple[Tensor, Tensor]:
    """Each tapped layer's shadow token against the target's. taps: depth -> [T, E], the rows of one sequence; target
    [T] int64, the full model's tokens after the rows at `positions` [T] -> match [n, T] bool and confidence [n, T]. One
    norm and head pass over all rows of all layers, with the noise of the target's draw."""
    n, T = len(taps), len(target)
    ids, scores = head.candidates(Final(torch.cat(list(taps.values()))), 1, draws, positions.repeat(n))
    return ids.view(n, T) == target, scores.exp().view(n, T)
