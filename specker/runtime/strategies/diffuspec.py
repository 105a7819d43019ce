"""A diffusion language model drafts: one denoising step over the text and a block of masks (DiffuSpec, 2510.02358).

A round forwards the committed tokens that the cache lacks (the root among them) and k masks; all of these see each
other and the cached columns. The masks' columns are dropped, the tokens' stay, so a round costs accepted + 1 + k rows
and not the whole text. What stays saw other masks than the next round's: an approximation, which the target's check
makes harmless; `exact` forwards the whole text every round instead.

Row i predicts position i + 1 in Dream's checkpoints (shifted logits) and position i in plain masked-diffusion ones.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specker.config import Sampling
from specker.kernels.ancestors import MAX_WORDS, pack_bits
from specker.kernels.noise import gumbel_at
from specker.runtime.draft import Draft
from specker.runtime.head import Head
from specker.runtime.lattice import Lattice, Search, best_paths, lattice, trie
from specker.runtime.model.cache import KVCache, Rows, Start
from specker.runtime.model.decoder import Model, chain_rows, forward, prefill
from specker.runtime.policy import Budget, Fixed
from specker.runtime.stats import Found

CATCH_UP_ROWS = 64  # more tokens that the cache lacks are a prompt: prefill them
WINDOW = 64 * MAX_WORDS  # columns that the rows of one pass may hold


@dataclass
class DiffusionDrafter:
    model: Model  # bidirectional
    cache: KVCache
    head: Head
    stops: Head | None  # the rows of the target's stop ids, which are candidates everywhere
    stop_ids: frozenset[int]  # the target's
    search: Search | None = None  # None: the argmax of each position
    exact: bool = False
    _guesses: list[int] = field(default_factory=list, init=False)  # of this round's earlier passes
    _last: int = field(default=0, init=False)  # how many of them the last pass made

    def reset(self) -> None:
        self.cache.truncate(0)
        self.head.reset()

    def prefill(self, committed: list[int]) -> None:
        """The K/V of all but the root, each chunk of which sees itself and what stands before it."""
        if not self.exact and len(committed) <= self.model.config.max_context:
            prefill(self.model, self.cache, self._known(committed[self.cache.exact_len : -1]))

    def observe(self, path: list[int]) -> None:
        pass  # no draft token's K/V is kept: it was a mask's, or a guess's beside masks

    def propose(
        self,
        committed: list[int],
        budget: Budget,
        sampling: Sampling,
        keep_drafting: Callable[[float], bool] | None = None,
    ) -> Draft:
        """A draft under the root committed[-1]: a block of budget.block tokens (all of budget.depth if that is 0), and
        another behind it while `keep_drafting` says so of the least confident one's probability."""
        room = min(self.model.config.max_context, self.cache.capacity) - len(committed)
        depth = min(budget.depth, budget.nodes, room)
        if depth <= 0:
            return Draft.empty(self.model.device)
        self.head.follow(committed)
        self._guesses = []
        blocks: list[Lattice] = []
        confidence: list[float] = []
        passes = 0
        while True:
            n = min(budget.block or depth, depth - len(self._guesses))
            hidden = self._masked(committed, n)
            first = len(committed) + len(self._guesses) - 1  # the position of the row that plain decoding would ask
            positions = self.model.positions[first : first + n]
            passes += 1
            if self.search is None and keep_drafting is None:
                self._guesses += self.head.best(hidden, sampling, positions).tolist()
            else:
                block, ranks = self._candidates(hidden, sampling, positions)
                blocks.append(block)
                self._guesses += block.ids[:, 0].tolist()
                confidence += np.exp(ranks[:, 0]).tolist()
            more = keep_drafting is not None and keep_drafting(min(confidence[-n:]))
            if len(self._guesses) == depth or not more or self._stopped() < len(self._guesses):
                break
        generated = self._stopped()
        if self.search is None:
            tokens = self._guesses[: generated + 1]
            draft = Draft.chain(self._on_device(tokens), confidence=tuple(confidence[: len(tokens)]))
            return draft.with_found(Found(generated, passes))
        draft, found = self._searched(blocks, committed, budget, sampling, self.search, passes)
        return draft.with_found(found)

    def _masked(self, committed: list[int], n: int) -> Tensor:
        """The hidden rows [n, E] that guess the n tokens behind the committed ones and this round's guesses."""
        config = self.model.config
        assert config.mask_token_id is not None
        masks = [config.mask_token_id] * n
        if self.exact:
            self.cache.truncate(0)
            text = self._known(committed + self._guesses) + masks
            depth = len(self.model.layers)
            hidden = prefill(self.model, self.cache, text, (depth,), n + 1, chunk=len(text))[depth]
            self.cache.truncate(len(committed))
        else:
            behind = len(committed) - self.cache.exact_len
            if behind > CATCH_UP_ROWS or behind + n > WINDOW:
                self.prefill(committed)
            base = self.cache.exact_len
            if self._guesses:  # columns from base on hold the guesses before the last block's, as they were then
                done = len(self._guesses) - self._last
                text = self._guesses[done:]
                base += done
            else:
                text = committed[base:]
            rows = self._all_ones(base, len(text) + n)
            tokens = torch.tensor(self._known(text) + masks, device=self.model.device)
            hidden = forward(self.model, self.cache, rows, self.model.embed_tokens(tokens)).hidden[-n - 1 :]
            if not self._guesses:
                self.cache.exact_len = len(committed)
        self._last = n
        return hidden[:-1] if config.shifted_logits else hidden[1:]

    def hidden_static(self, start: Start, text: Tensor, n: int) -> Tensor:
        """`_masked` without a number on the host: `text` [R] are the last committed tokens, root included, which stand
        at `start`; n masks stand behind them. All of R run again, beside the new masks."""
        config = self.model.config
        assert config.mask_token_id is not None
        masks = torch.full((n,), config.mask_token_id, dtype=torch.int64, device=text.device)
        tokens = torch.cat((text.clamp(max=config.vocab_size - 1), masks))
        placed = chain_rows(self.model, self.cache, len(tokens), start=start)
        rows = placed._replace(ancestors=_full_words(len(tokens), text.device))
        hidden = forward(self.model, self.cache, rows, self.model.embed_tokens(tokens)).hidden[-n - 1 :]
        return hidden[:-1] if config.shifted_logits else hidden[1:]

    def search_static(
        self, hidden: Tensor, committed: list[int], budget: Budget, sampling: Sampling
    ) -> tuple[Draft, Found]:
        """The draft that a search finds in the rows [k, E] of `hidden_static`; reads their candidates on the host."""
        assert self.search is not None
        first = len(committed) - 1
        block, _ = self._candidates(hidden, sampling, self.model.positions[first : first + len(hidden)])
        self._guesses = block.ids[:, 0].tolist()
        return self._searched([block], committed, budget, sampling, self.search)

    def _all_ones(self, first: int, count: int) -> Rows:
        """`count` rows at the columns from `first` on that see each other and all before them."""
        end = first + count
        return Rows(
            positions=self.model.positions[first:end],
            slots=self.cache.slot_of[first:end],
            kv_len=self.cache.lengths[end : end + 1],
            window=self.cache.lengths[count : count + 1],
            ancestors=_full_words(count, self.model.device),
        )

    def _candidates(self, hidden: Tensor, sampling: Sampling, positions: Tensor) -> tuple[Lattice, Any]:
        """Each row's candidates, and their log-probabilities in the ranking used."""
        how = self.search
        k = 1 if how is None else min(how.candidates, self.head.weight.shape[0])
        ids, scores, lse = self.head.ranked(hidden, k, sampling, positions)
        count = 0
        if how is not None and self.stops is not None:
            count = self.stops.weight.shape[0]
            stop_ids, stop_scores, _ = self.stops.ranked(hidden, count, sampling, positions)
            ids, scores = torch.cat((ids, stop_ids), 1), torch.cat((scores, stop_scores), 1)
        ranks = scores - lse.unsqueeze(-1)
        noise = gumbel_at(sampling.seed, positions, ids) if sampling.temperature > 0 else None
        ids_, ranks_, noise_ = _on_host(ids, ranks, noise)
        return lattice(ids_, ranks_, noise_, 0.0 if how is None else how.mass, count), ranks_

    def _searched(
        self,
        blocks: list[Lattice],
        committed: list[int],
        budget: Budget,
        sampling: Sampling,
        how: Search,
        passes: int = 1,
    ) -> tuple[Draft, Found]:
        """The draft, and what there was to find."""
        start = time.perf_counter()
        whole = blocks[0] if len(blocks) == 1 else Lattice.joined(blocks)
        before = (committed[-2] if len(committed) > 1 else -1, committed[-1])
        paths = best_paths(whole, how, before, self.stop_ids, sampling.temperature)
        score = paths[0].score / len(whole.ids)
        if not how.tree or len(paths) == 1:
            draft = Draft.chain(self._on_device(list(paths[0].tokens)))
        else:
            tokens, parents = trie(paths, budget.nodes, budget.depth)
            draft = Draft(self._on_device(tokens), self._on_device(parents))
        return draft, Found(self._stopped(), passes, whole.width, score, time.perf_counter() - start)

    def _stopped(self) -> int:
        return self.stopped(self._guesses)

    def stopped(self, guesses: list[int]) -> int:
        """Guesses before the first stop token; all of them if there is none."""
        return next((n for n, token in enumerate(guesses) if token in self.stop_ids), len(guesses))

    def _on_device(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.model.device)

    def _known(self, tokens: list[int]) -> list[int]:
        """Ids that the drafter's vocabulary lacks become its last one: a draft may be anything."""
        last = self.model.config.vocab_size - 1
        return [min(token, last) for token in tokens]


def _on_host(ids: Tensor, ranks: Tensor, noise: Tensor | None) -> tuple[Any, Any, Any]:
    """As numpy. From a GPU in one read: ids are exact in float64."""
    if not ids.is_cuda:
        return ids.numpy(), ranks.numpy(), None if noise is None else noise.numpy()
    both = (ids, ranks) if noise is None else (ids, ranks, noise)
    first, *others = torch.stack([x.double() for x in both]).cpu().numpy()
    return first.astype(np.int64), others[0], others[1] if noise is not None else None


@lru_cache(maxsize=512)
def _full_words(count: int, device: torch.device) -> Tensor:
    return pack_bits([(1 << count) - 1] * count, count).to(device)


@dataclass
class AdaptiveLength:
    """ADL of DiffuSpec: follow how much the diffusion model generates before it would stop, and grow by `step` while
    the target accepts as much.

        k = clip(floor(ema_generated) + step [ema_accepted >= ema_generated], shortest, longest)

    with ema <- (1 - rho) ema + rho L, from 0; the first block is the longest.
    """

    shortest: int = 20
    longest: int = 30
    step: int = 10
    rho: float = 0.5
    nodes: int = 255  # of all paths
    confident: bool = field(default=False, init=False)
    layers: tuple[int, ...] = field(default=(), init=False)
    length: int = field(init=False)  # k
    generated: float = field(default=0.0, init=False)  # smoothed
    accepted: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.length = self.longest

    def budget(self) -> Budget:
        return Budget(self.nodes, self.length)

    def keep_drafting(self, confidence: float) -> bool:
        return True

    def observe(self, draft: Draft, path: list[int]) -> None:
        if draft.found is None or not len(draft):
            return
        self.generated += self.rho * (draft.found.generated - self.generated)
        self.accepted += self.rho * (len(path) - 1 - self.accepted)
        grown = self.step if self.accepted >= self.generated else 0
        self.length = min(max(math.floor(self.generated) + grown, self.shortest), self.longest)

    def learn(self, layers: tuple[int, ...], match: Any, confidence: Any, seconds: float = 0.0) -> None:
        pass


@dataclass
class Chunks(Fixed):
    """A diffusion drafter's block, and another behind it as long as it trusts every token (FailFast, 2512.20573)."""

    block: int = 4
    threshold: float = 0.5

    def __post_init__(self) -> None:
        self.confident = True

    def budget(self) -> Budget:
        return Budget(self.nodes, self.depth, block=self.block)

    def keep_drafting(self, confidence: float) -> bool:
        return confidence >= self.threshold
