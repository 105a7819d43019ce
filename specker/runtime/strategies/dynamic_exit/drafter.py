"""The drafter that runs the target's own first layers, and the tokens of the layers that DEL watches."""

import time
from typing import Any

import torch
from torch import Tensor

from specker.model.cache import KVCache
from specker.model.decoder import Final, Model, forward
from specker.model.rows import begin, begin_step
from specker.model.sampling import Draws
from specker.runtime.control.policy import Budget
from specker.runtime.round.drafter import Draft, Drafter
from specker.runtime.round.lm_head import Head
from specker.runtime.round.round import Round
from specker.runtime.round.state import Request

# The last rows of a prompt seed DEL's statistics: at most 32, as in the paper. Each row is multiplied by the LM head
# once for each watched layer, so a prompt gets one such product for every PROMPT_SHARE of its tokens. Short prompts get
# none: the first round watches the same layers.
PROMPT_ROWS, PROMPT_SHARE = 32, 16


class EarlyExitDrafter(Drafter):
    model: Model  # the target
    cache: KVCache  # the target's
    head: Head  # the LM head of the draft steps, perhaps trimmed

    def __init__(self, model: Model, cache: KVCache, head: Head, watched: tuple[int, ...] = ()):
        """`watched`: the depths that policies may watch."""
        self.model, self.cache, self.head = model, cache, head
        self.taps = (*watched, len(model.layers)) if watched else ()

    def fixed(self, length: int, budget: Budget) -> bool:
        return not budget.taps

    def reads(self, budget: Budget) -> tuple[int, ...]:
        return budget.taps

    def draft(self, r: Round) -> Draft:
        """Draft a chain with layers [0, r.budget.exit); one CUDA graph per exit runs a step."""
        self.head.follow(r.requests)
        draft, budget, s = Draft(), r.budget, r.state
        hidden: list[Tensor] = []
        tapped: dict[int, list[Tensor]] = {n: [] for n in r.taps if n < budget.exit}
        if r.fixed:
            s.step.zero_()
        for n in range(min(budget.depth, budget.nodes)):
            r.run(("exit", budget.exit), lambda n=n: self._step(r, draft, n, hidden, tapped))  # type: ignore[misc]
            draft.size = draft.depth = n + 1
            if r.confident and not draft.goes_on(r):
                break
        draft.taps = {layer: torch.stack(kept, 1) for layer, kept in tapped.items()}
        draft.hidden = r.exits[:, : draft.size] if r.fixed else torch.stack(hidden, 1)
        return draft

    def _step(self, r: Round, draft: Draft, n: int, hidden: list[Tensor], tapped: dict[int, list[Tensor]]) -> None:
        """Draft token n of each sequence. Captured work reads n from the state, so one graph serves all n."""
        s, model, cache = r.state, self.model, self.cache
        if r.fixed:
            rows, embedded = begin_step(model, cache, s.window, s.length, s.step)
        else:
            rows, embedded = begin(model, cache, r.lengths, 1, n, s.window[:, n : n + 1])
        out = forward(model, cache, rows, embedded, slice(r.budget.exit), tuple(tapped))
        if r.fixed:
            r.exits.index_copy_(1, s.step, out.hidden.unsqueeze(1))
            s.step.add_(1)
            best = s.window.new_empty(r.n, 1)
            draft.extend(r, self.head, out.final, rows.positions, best)
            s.window.index_copy_(1, s.step, best)
            return
        draft.extend(r, self.head, out.final, rows.positions, s.window[:, n + 1 : n + 2])
        hidden.append(out.hidden)
        for layer, kept in tapped.items():
            kept.append(out.taps[layer])

    def prefilled(self, slot: int, request: Request, first: int, rows: dict[int, Tensor]) -> None:
        """The last rows of a prompt seed the policy's statistics."""
        depth, layers = len(self.model.layers), request.policy.layers
        end = first + (count := len(rows[depth]))
        last = min(PROMPT_ROWS, count, int(request.stats.prompt / (PROMPT_SHARE * len(layers)))) if layers else 0
        if last and end == len(request.text) - 1:
            positions, draws = self.model.positions[end - last : end], Draws.one(request.sampling)
            target = self.model.draw(draws, self.model.logits(Final(rows[depth][-last:])), positions)
            watched = {n: rows[n][-last:] for n in layers}
            request.policy.learn(layers, *self._watch(watched, target, positions, draws))

    def learn(self, r: Round, paths: list[list[int]]) -> None:
        """Give each policy the watched layers' predictions after the accepted rows; later rows follow rejected tokens.
        With captured rounds, the cost also includes how much longer this round took than a usual one."""
        start = time.perf_counter()
        positions, targets = (r.memory.get(name, r.rows).view(r.n, -1) for name in ("positions", "target"))
        seen = []
        for slot, (request, path) in enumerate(zip(r.requests, paths, strict=True)):
            k = len(path)
            draws = Draws.one(request.sampling)
            seen.append(self._watch(r.tapped(slot, k), targets[slot, :k], positions[slot, :k], draws))
        spent = time.perf_counter() - start
        longer = 0.0 if r.usual is None else sum(r.seconds.values()) + spent - r.usual
        for request, (match, confidence) in zip(r.requests, seen, strict=True):
            request.policy.learn(r.taps, match, confidence, max(spent, longer))
        r.seconds["watch"] = spent

    def _watch(self, taps: dict[int, Tensor], target: Tensor, positions: Tensor, draws: Draws) -> tuple[Any, Any]:
        """`shadows`, copied to the host."""
        match, confidence = shadows(self.head, taps, target, positions, draws)
        return match.cpu().numpy(), confidence.cpu().numpy()  # waits for the GPU


def shadows(
    head: Head, taps: dict[int, Tensor], target: Tensor, positions: Tensor, draws: Draws
) -> tuple[Tensor, Tensor]:
    """Compare each tapped layer's shadow token with the target's token. taps: depth -> [T, E], the rows of one
    sequence; target [T] int64, the full model's tokens after the rows at `positions` [T] -> match [n, T] bool and
    confidence [n, T]. One norm and head pass over all rows of all layers, with the noise of the target's draw."""
    n, T = len(taps), len(target)
    ids, scores = head.candidates(Final(torch.cat(list(taps.values()))), 1, draws, positions.repeat(n))
    return ids.view(n, T) == target, scores.exp().view(n, T)
