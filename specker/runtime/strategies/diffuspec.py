"""A diffusion language model drafts: one denoising step over the text and a block of masks (DiffuSpec, 2510.02358).

A round forwards the committed tokens that the cache lacks (the root among them) and k masks; all of these see each
other and the cached columns. The masks' columns are dropped, the tokens' stay, so a round costs accepted + 1 + k rows
and not the whole text. The tokens' K/V saw other masks than the next round's: an approximation, which the target's
check makes harmless; `exact` forwards the whole text every round instead.

Row i predicts position i + 1 in Dream's checkpoints (shifted logits) and position i in plain masked-diffusion ones.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specker.config import Sampling
from specker.kernels.ancestors import MAX_WORDS, pack_bits
from specker.kernels.noise import gumbel_at
from specker.runtime import state as states
from specker.runtime.draft import Drafter
from specker.runtime.head import Head
from specker.runtime.lattice import Lattice, Search, best_paths, lattice, trie
from specker.runtime.model.cache import KVCache
from specker.runtime.model.decoder import Model, forward, prefill
from specker.runtime.policy import Budget, Fixed, Outcome, Policy
from specker.runtime.round import Round
from specker.runtime.stats import Found

CATCH_UP_ROWS = 64  # more tokens that the cache lacks are a prompt: prefill them
WINDOW = 64 * MAX_WORDS  # columns that the rows of one pass may hold


class DiffusionDrafter(Drafter):
    model: Model  # bidirectional
    cache: KVCache
    head: Head

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        head: Head,
        stops: Head | None,
        stop_ids: frozenset[int],
        search: Search | None = None,
        exact: bool = False,
        depth: int = 0,
    ):
        """`stops`: the rows of the target's stop ids, which are candidates everywhere. `search`: None takes the argmax
        of each position. `depth`: the longest draft."""
        self.model, self.cache, self.head, self.stops = model, cache, head, stops
        self.stop_ids, self.search, self.exact = stop_ids, search, exact
        self.reads = search is not None
        self.catch_up = depth + 1  # committed tokens that a round of fixed shape forwards again
        self._limit = min(model.config.max_context, cache.capacity)
        self._last = 0  # tokens that the last pass guessed

    def prefill(self, slot: int, text: list[int]) -> None:
        """The K/V of all but the root, each chunk of which sees itself and the columns before it."""
        if not self.exact and len(text) <= self.model.config.max_context:
            prefill(self.model, self.cache, self._known(text[self.cache.exact_len[slot] : -1]), slot=slot)

    def room(self, length: int) -> int:
        return self._limit - length

    def fixed(self, length: int, budget: Budget) -> bool:
        """The rows that are forwarded again and the masks stand in one window, in one pass."""
        rows = self.catch_up + min(budget.depth, budget.nodes)
        if self.exact or budget.block or rows > WINDOW:
            return False
        return self.catch_up <= length <= self.model.config.max_context - 2 * self.catch_up

    def draft(self, r: Round) -> None:
        """A block of budget.block tokens (all of budget.depth if that is 0), and another behind it while the policies
        go on at the probability of its least confident token."""
        if self.head.kept is not None:
            self.head.follow(r.sequences)
        depth = min(r.budget.depth, r.budget.nodes)
        if r.fixed:
            r.run(("block", depth), lambda: self._fixed_block(r, depth))
            if self.search is None:
                r.size = r.depth = depth
                r.generated = True
                return
            lengths = [len(s.text) for s in r.sequences]
            new, blocks, _ = self._candidates(r, r.state.hidden[: r.n * depth], lengths)
            self._searched(r, new, [[block] for block in blocks], 1)
            return
        texts = [s.text[: self._limit] for s in r.sequences]
        guesses: list[list[int]] = [[] for _ in texts]
        lattices: list[list[Lattice]] = [[] for _ in texts]
        confidence: list[list[float]] = [[] for _ in texts]
        passes = done = 0
        while True:
            n = min(r.budget.block or depth, depth - done)
            hidden = self._masked(texts, guesses, done, n)
            passes += 1
            if self.search is None and not r.asks:
                at = torch.cat([self.model.positions[len(t) + done - 1 :][:n] for t in texts])
                new = self.head.best(hidden, r.draws, self._padded(at, len(hidden))).view(len(texts), n).tolist()
            else:
                new, blocks, sure = self._candidates(r, hidden, [len(t) + done for t in texts])
                for b, block in enumerate(blocks):
                    lattices[b].append(block)
                    confidence[b] += sure[b]
            guesses = [old + more for old, more in zip(guesses, new, strict=True)]
            done += n
            more = r.asks and r.vote([min(each[-n:]) for each in confidence])
            if done == depth or not more or all(self.stopped(g) < done for g in guesses):
                break
        if self.search is not None:
            self._searched(r, guesses, lattices, passes)
            return
        kept = [g[: self.stopped(g) + 1] for g in guesses]
        r.confidence = [list(each) for each in zip_longest(*confidence, fillvalue=0.0)] if r.asks else []
        self._write(r, kept, [list(range(len(k))) for k in kept])
        r.found = [Found(self.stopped(g), passes) for g in guesses]

    def observe(self, r: Round, slot: int, path: list[int]) -> None:
        """No draft token's K/V is kept: it was a mask's, or a guess's beside masks."""
        if r.fixed:
            length = len(r.sequences[slot].text)
            self.cache.exact_len[slot] = max(0, min(length, self._limit) - self.catch_up)
        if r.generated:
            r.found.append(Found(self.stopped(r.host["draft"][slot].tolist())))

    def _padded(self, positions: Tensor, count: int) -> Tensor:
        return positions if len(positions) == count else torch.nn.functional.pad(positions, (0, count - len(positions)))

    def _masked(self, texts: Sequence[list[int]], guesses: list[list[int]], done: int, n: int) -> Tensor:
        """The hidden rows [sequences * n, E] that guess the n tokens behind the texts and this round's guesses."""
        config, cache = self.model.config, self.cache
        assert config.mask_token_id is not None
        masks = [config.mask_token_id] * n
        out = slice(-n - 1, -1) if config.shifted_logits else slice(-n, None)
        if self.exact:
            kept = []
            for slot, (text, new) in enumerate(zip(texts, guesses, strict=True)):
                cache.truncate(0, slot)
                whole, depth = self._known(text + new) + masks, len(self.model.layers)
                hidden = prefill(self.model, cache, whole, (depth,), n + 1, chunk=len(whole), slot=slot)[depth]
                cache.truncate(len(text), slot)
                kept.append(hidden[out])
            return torch.cat(kept)
        starts, new_tokens = [], []
        for slot, (text, new) in enumerate(zip(texts, guesses, strict=True)):
            behind = len(text) - cache.exact_len[slot]
            if behind > CATCH_UP_ROWS or behind + n > WINDOW:
                self.prefill(slot, text)
            start = cache.exact_len[slot]
            if done:  # the columns behind the text hold the guesses before the last block's
                before = done - self._last
                starts.append(start + before)
                new_tokens.append(self._known(new[before:]) + masks)
            else:
                start = min(start, len(text) - 1)
                starts.append(start)
                new_tokens.append(self._known(text[start:]) + masks)
                cache.exact_len[slot] = len(text)
        self._last = n
        rows = cache.after(starts, [len(tokens) for tokens in new_tokens], full=True)
        tokens = torch.tensor([token for each in new_tokens for token in each], device=self.model.device)
        hidden = forward(self.model, cache, rows, self.model.embed_tokens(tokens)).hidden
        if len(texts) == 1:
            return hidden[out]
        return torch.cat([each[out] for each in hidden.split([len(tokens) for tokens in new_tokens])])

    def _fixed_block(self, r: Round, k: int) -> None:
        """One pass, placed by the device: the last committed tokens run again, beside the new masks."""
        config, R, n = self.model.config, self.catch_up, r.n
        assert config.mask_token_id is not None
        text = r.last(R).clamp(max=config.vocab_size - 1)
        tokens = torch.cat((text, torch.full_like(text[:, :1], config.mask_token_id).expand(n, k)), 1)
        rows = self.cache.place(r.lengths, R, 0, R + k)
        rows = rows._replace(ancestors=_full_words(R + k, self.model.device).repeat(n, 1))
        hidden = forward(self.model, self.cache, rows, self.model.embed_tokens(tokens.view(-1))).hidden
        hidden = hidden.view(n, R + k, -1)[:, R - 1 : -1] if config.shifted_logits else hidden.view(n, R + k, -1)[:, R:]
        hidden = hidden.reshape(n * k, -1)
        if self.search is not None:
            r.keep(r.state.hidden, hidden)
            return
        asked = (r.state.length[:, None] + torch.arange(-1, k - 1, device=hidden.device)).view(-1)
        r.window[:, 1 : k + 1] = self.head.best(hidden, r.draws, asked).view(n, k)

    def _candidates(
        self, r: Round, hidden: Tensor, lengths: list[int]
    ) -> tuple[list[list[int]], list[Lattice], list[list[float]]]:
        """hidden [n * k, E], the rows that guess the tokens behind texts of `lengths` -> each sequence's first guesses,
        the candidates of its positions, and the probabilities of the guesses; reads them on the host."""
        how, n = self.search, len(r.sequences)
        k = len(hidden) // r.n
        last = self.model.config.max_context - 1
        first = torch.tensor(lengths + [1] * (r.n - n), device=hidden.device)[:, None] - 1
        positions = (first + torch.arange(k, device=hidden.device)).clamp(max=last).view(-1)
        width = 1 if how is None else min(how.candidates, self.head.weight.shape[0])
        ids, scores, lse = self.head.ranked(hidden, width, r.draws, positions)
        stops = 0
        if how is not None and self.stops is not None:
            stops = self.stops.weight.shape[0]
            stop_ids, stop_scores, _ = self.stops.ranked(hidden, stops, r.draws, positions)
            ids, scores = torch.cat((ids, stop_ids), 1), torch.cat((scores, stop_scores), 1)
        noise = self._noise(r.sequences, positions, ids, k)
        ids_, ranks_, noise_ = _on_host(ids, scores - lse.unsqueeze(-1), noise)
        mass = 0.0 if how is None else how.mass
        blocks = []
        for b, sequence in enumerate(r.sequences):
            own = slice(b * k, (b + 1) * k)
            drawn = noise_ is not None and sequence.sampling.temperature > 0
            blocks.append(lattice(ids_[own], ranks_[own], noise_[own] if drawn else None, mass, stops))
        sure = [np.exp(ranks_[b * k : (b + 1) * k, 0]).tolist() for b in range(n)]
        return [block.ids[:, 0].tolist() for block in blocks], blocks, sure

    @staticmethod
    def _noise(sequences: Sequence[states.Sequence], positions: Tensor, ids: Tensor, k: int) -> Tensor | None:
        samplings: list[Sampling] = [s.sampling for s in sequences]
        if all(s.temperature == 0 for s in samplings):
            return None
        noise = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
        for b, s in enumerate(samplings):
            own = slice(b * k, (b + 1) * k)
            if s.temperature > 0:
                noise[own] = gumbel_at(s.seed, positions[own], ids[own])
        return noise

    def _searched(self, r: Round, guesses: list[list[int]], blocks: list[list[Lattice]], passes: int) -> None:
        """The drafts that a search finds, and what there was to find."""
        how = self.search
        assert how is not None
        tokens: list[list[int]] = []
        parents: list[list[int]] = []
        for sequence, own, found in zip(r.sequences, guesses, blocks, strict=True):
            start = time.perf_counter()
            whole = found[0] if len(found) == 1 else Lattice.joined(found)
            before = (sequence.text[-2] if len(sequence.text) > 1 else -1, sequence.text[-1])
            paths = best_paths(whole, how, before, self.stop_ids, sequence.sampling.temperature)
            score = paths[0].score / len(whole.ids)
            if not how.tree or len(paths) == 1:
                tokens.append(list(paths[0].tokens))
                parents.append(list(range(len(tokens[-1]))))
            else:
                found_tokens, found_parents = trie(paths, r.budget.nodes, r.budget.depth)
                tokens.append(found_tokens)
                parents.append(found_parents)
            seconds = time.perf_counter() - start
            r.found.append(Found(self.stopped(own), passes, whole.width, score, seconds))
        self._write(r, tokens, parents)

    def _write(self, r: Round, tokens: list[list[int]], parents: list[list[int]]) -> None:
        """Drafts of unequal sizes; the shorter ones are padded. Padding is a guess like any other, and a bad one."""
        N = max(map(len, tokens))
        r.drafted = [len(each) for each in tokens]
        r.tree = any(up != list(range(len(up))) for up in parents)
        r.size, n = N, len(tokens)
        r.depth = max(_depth(up) for up in parents)
        padded = [each + [0] * (N - len(each)) for each in tokens]
        r.window[:n, 1 : N + 1] = torch.tensor(padded, dtype=torch.int64, device=self.model.device).view(n, N)
        if r.tree:
            up = [each + list(range(len(each), N)) for each in parents]
            r.state.parents[:n, :N] = torch.tensor(up, device=self.model.device)
            r.state.parents[n:, :N] = 0

    def stopped(self, guesses: list[int]) -> int:
        """Guesses before the first stop token; all of them if there is none."""
        return next((n for n, token in enumerate(guesses) if token in self.stop_ids), len(guesses))

    def _known(self, tokens: list[int]) -> list[int]:
        """Ids that the drafter's vocabulary lacks become its last one: a draft may be anything."""
        last = self.model.config.vocab_size - 1
        return [min(token, last) for token in tokens]


def _depth(parents: list[int]) -> int:
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return max(depths)


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
class AdaptiveLength(Policy):
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
    length: int = field(init=False)  # k
    generated: float = field(default=0.0, init=False)  # smoothed
    accepted: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.length = self.longest

    def budget(self) -> Budget:
        return Budget(self.nodes, self.length)

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        if outcome.found is None or not outcome.drafted:
            return
        self.generated += self.rho * (outcome.found.generated - self.generated)
        self.accepted += self.rho * (len(outcome.path) - 1 - self.accepted)
        grown = self.step if self.accepted >= self.generated else 0
        self.length = min(max(math.floor(self.generated) + grown, self.shortest), self.longest)


@dataclass
class Chunks(Fixed):
    """A diffusion drafter's block, and another behind it as long as it trusts every token (FailFast, 2512.20573)."""

    block: int = 4
    threshold: float = 0.5
    confident = True

    def budget(self) -> Budget:
        return Budget(self.nodes, self.depth, block=self.block)

    def keep_drafting(self, confidence: float) -> bool:
        return confidence >= self.threshold
