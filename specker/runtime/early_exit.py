"""The target drafts with its own first layers (self-speculation: LayerSkip, arXiv 2404.16710; DEL, arXiv 2504.05598).

One set of weights, one K/V cache. A draft step runs layers [0, E) on one row, whose K/V stays where the verify pass
wants it; the rows that left layer E - 1 travel with the draft (`Draft.resume`), so that verification runs [0, E) on the
last row alone and [E, L) on all.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specker.config import Sampling
from specker.runtime.draft import Draft, Resume
from specker.runtime.head import Head
from specker.runtime.model.cache import KVCache, Start
from specker.runtime.model.config import layer_elements
from specker.runtime.model.decoder import Model, chain_rows, forward
from specker.runtime.policy import Budget


@dataclass
class EarlyExitDrafter:
    model: Model  # the target
    cache: KVCache  # the target's
    head: Head  # of the draft steps, perhaps trimmed

    def reset(self) -> None:
        self.head.reset()

    def prefill(self, committed: list[int]) -> None:
        pass  # the target's own

    def observe(self, path: list[int]) -> None:
        pass  # the target's commit

    def propose(
        self,
        committed: list[int],
        budget: Budget,
        sampling: Sampling,
        keep_drafting: Callable[[float], bool] | None = None,
    ) -> Draft:
        """A chain under the root committed[-1], drafted by layers [0, budget.exit)."""
        tokens: list[Tensor] = []
        hidden: list[Tensor] = []
        tapped: dict[int, list[Tensor]] = {n: [] for n in budget.taps if n < budget.exit}
        confidences: list[float] = []
        self.head.follow(committed)
        token = torch.tensor(committed[-1:], device=self.model.device)
        for n in range(min(budget.depth, budget.nodes)):
            rows = chain_rows(self.model, self.cache, 1, first=n)
            out = forward(
                self.model, self.cache, rows, self.model.embed_tokens(token), slice(budget.exit), tuple(tapped)
            )
            hidden.append(out.hidden)
            for layer, kept in tapped.items():
                kept.append(out.taps[layer])
            if keep_drafting is None:
                token = self.head.best(out.hidden, sampling, rows.positions)
            else:
                token, confidence = self.head.confident(out.hidden, sampling, rows.positions)
                confidences.append(confidence)
            tokens.append(token)
            if keep_drafting is not None and not keep_drafting(confidences[-1]):
                break
        if not tokens:
            return Draft.empty(self.model.device)
        taps = {layer: torch.cat(kept) for layer, kept in tapped.items()}
        resume = Resume(budget.exit, torch.cat(hidden), taps)
        return Draft.chain(torch.cat(tokens), resume, tuple(confidences))

    def step_static(self, token: Tensor, start: Start, exit: int, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
        """One draft step without a number on the host: `token` [1] stands at `start`. -> its candidate [1], the
        candidate's log-probability [1], the residual stream [1, E] after `exit` layers."""
        rows = chain_rows(self.model, self.cache, 1, start=start)
        hidden = forward(self.model, self.cache, rows, self.model.embed_tokens(token), slice(exit)).hidden
        ids, scores = self.head.candidates(hidden, 1, sampling, rows.positions)
        return ids[:, 0], scores[:, 0], hidden

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
        sampling, more = Sampling(), 4
        hidden = model.embed_tokens(torch.tensor([0], device=model.device))
        position, rows = model.positions[:1], chain_rows(model, cache, 1)

        def passed(count: int) -> None:
            several = chain_rows(model, cache, count)
            model.logits(forward(model, cache, several, hidden.expand(count, -1).contiguous()).hidden)

        one_pass = _seconds(lambda: forward(model, cache, rows, hidden), model.device)
        head = _seconds(lambda: self.head.best(hidden, sampling, position), model.device)
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
    head: Head, taps: dict[int, Tensor], target: Tensor, positions: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor]:
    """What each tapped layer would have said. taps: depth -> [T, E]; target [T], the full model's tokens after the rows
    at `positions` [T] -> match [n, T] bool, confidence [n, T]: one norm and head over all rows of all layers, under the
    noise of the draw itself."""
    n, T = len(taps), len(target)
    ids, scores = head.candidates(torch.cat(list(taps.values())), 1, sampling, positions.repeat(n))
    return ids.view(n, T) == target, scores.exp().view(n, T)
