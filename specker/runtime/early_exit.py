"""The target drafts with its own first layers (self-speculation: LayerSkip, arXiv 2404.16710; DEL, arXiv 2504.05598).

One set of weights, one K/V cache. A draft step runs layers [0, E) on one row, whose K/V stays where the verify pass
wants it; the rows that left layer E - 1 travel with the draft (`Round.hidden`), so that verification runs [0, E) on the
last row alone and [E, L) on all.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specker.runtime.draft import Drafter
from specker.runtime.head import Head
from specker.runtime.model.cache import KVCache
from specker.runtime.model.config import layer_elements
from specker.runtime.model.decoder import Model, forward
from specker.runtime.policy import Budget
from specker.runtime.round import Round
from specker.runtime.sampling import GREEDY, Draws


class EarlyExitDrafter(Drafter):
    model: Model  # the target
    cache: KVCache  # the target's
    head: Head  # of the draft steps, perhaps trimmed

    def __init__(self, model: Model, cache: KVCache, head: Head):
        self.model, self.cache, self.head = model, cache, head

    def fixed(self, length: int, budget: Budget) -> bool:
        return not budget.taps

    def draft(self, r: Round) -> None:
        """A chain by layers [0, r.budget.exit); one CUDA graph for a step of each exit."""
        if self.head.kept is not None:
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
        """Draft token n of each sequence. Where work is captured n stands in the state, so that one graph serves all."""
        s = r.state
        if r.fixed:
            tokens, rows = s.window.index_select(1, s.step)[:, 0], self.cache.place(s.length + s.step, 1, 0, 1)
        else:
            tokens, rows = s.window[:, n], self.cache.place(r.lengths, 1, n, 1)
        embedded = self.model.embed_tokens(tokens)
        out = forward(self.model, self.cache, rows, embedded, slice(r.budget.exit), tuple(tapped))
        if r.asks:
            ids, scores = self.head.candidates(out.hidden, 1, r.draws, rows.positions)
            best = ids[:, 0]
            r.heard(scores[:, 0])
        else:
            best = self.head.best(out.hidden, r.draws, rows.positions)
        if r.fixed:
            self._room(r).index_copy_(1, s.step, out.hidden.unsqueeze(1))
            s.step.add_(1)
            s.window.index_copy_(1, s.step, best.unsqueeze(1))
            return
        s.window[:, n + 1] = best
        hidden.append(out.hidden)
        for layer, kept in tapped.items():
            kept.append(out.taps[layer])

    def watch(self, taps: dict[int, Tensor], draws: Draws, target: Tensor, positions: Tensor) -> tuple[Any, Any]:
        match, confidence = shadows(self.head, taps, target, positions, draws)
        return match.cpu().numpy(), confidence.cpu().numpy()  # a GPU has done the work by now

    @torch.inference_mode()
    def price(self, how: str) -> float:
        """What a draft token costs beside the layers that draft it, in layers of the target: nothing (`how` = layers,
        the paper's count), the LM head's bytes (bytes), or the seconds of the head and of what one more row costs the
        verify pass (measured; on a GPU that row costs next to nothing)."""
        model, cache, layers = self.model, self.cache, self.model.config.num_layers
        if how == "layers":
            return 0.0
        if how == "bytes":
            return self.head.weight.numel() * layers / layer_elements(model.config)
        more = 4
        hidden = model.embed_tokens(torch.tensor([0], device=model.device))
        position, rows = model.positions[:1], cache.after([0], [1])

        def passed(count: int) -> None:
            several = cache.after([0], [count])
            model.logits(forward(model, cache, several, hidden.expand(count, -1).contiguous()).hidden)

        one_pass = _seconds(lambda: forward(model, cache, rows, hidden), model.device)
        head = _seconds(lambda: self.head.best(hidden, GREEDY, position), model.device)
        longer, shorter = (_seconds(lambda n=n: passed(n), model.device) for n in (1 + more, 1))  # type: ignore[misc]
        return (head + max(0.0, (longer - shorter) / more)) * layers / one_pass


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Median of seven."""
    times = []
    for _ in range(7):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[3]


def shadows(
    head: Head, taps: dict[int, Tensor], target: Tensor, positions: Tensor, draws: Draws
) -> tuple[Tensor, Tensor]:
    """What each tapped layer would have said. taps: depth -> [T, E], the rows of one sequence; target [T], the full
    model's tokens after the rows at `positions` [T] -> match [n, T] bool, confidence [n, T]: one norm and head over all
    rows of all layers, under the noise of the draw itself."""
    n, T = len(taps), len(target)
    ids, scores = head.candidates(torch.cat(list(taps.values())), 1, draws, positions.repeat(n))
    return ids.view(n, T) == target, scores.exp().view(n, T)
