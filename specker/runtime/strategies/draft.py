"""Strategy `draft`: a small model drafts (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).

It drafts a chain token by token, or a tree level by level: each level keeps the `width` nodes with the largest
cumulative probability

    score(child) = score(parent) + log q(child | path)

as EAGLE-2 and EasySpec grow theirs. Above temperature 0, q is perturbed with the target's own noise (runtime/head.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specker.config import Sampling
from specker.kernels.attention import MAX_WORDS
from specker.runtime.draft import Draft, top_nodes
from specker.runtime.head import Head
from specker.runtime.model.cache import KVCache, Rows, Start
from specker.runtime.model.decoder import Model, chain_rows, forward, prefill
from specker.runtime.policy import Budget
from specker.runtime.strategies.base import DraftContext, Strategy

if TYPE_CHECKING:  # easyspec.py builds on this file
    from specker.runtime.strategies.easyspec import LayerParallel

CATCH_UP_ROWS = 64  # more uncommitted-to tokens than this are a prompt: prefill them


@dataclass
class AutoregressiveDrafter:
    model: Model
    cache: KVCache
    head: Head
    width: int = 1  # nodes of a level; 1 drafts a chain
    parallel: "LayerParallel | None" = None  # for the fuzzy passes; exact ones run the layers in sequence
    calibrate: str = "every"  # or, for ablations, "mismatch" and "never": then exact_len counts fuzzy columns too
    _calibrated: int = field(default=0, init=False)  # columns before which none is fuzzy
    _nodes: Sequence[int] = field(default=(), init=False)  # of the last draft: the grown node that each is
    _depth: int = field(default=0, init=False)  # of the last draft
    _forwarded: int = field(default=0, init=False)  # grown nodes whose K/V stands after exact_len

    def reset(self) -> None:
        self.cache.truncate(0)
        self.head.reset()
        self._forwarded = self._calibrated = 0

    def prefill(self, committed: list[int]) -> None:
        """Make the cache exact up to the root, which `propose` forwards itself."""
        if len(committed) <= self.model.config.max_context:
            if self.cache.exact_len == self._calibrated:
                self._calibrated = len(committed) - 1
            prefill(self.model, self.cache, self._known(committed[self.cache.exact_len : -1]))

    def propose(
        self,
        committed: list[int],
        budget: Budget,
        sampling: Sampling,
        keep_drafting: Callable[[float], bool] | None = None,
    ) -> Draft:
        """A draft under the root committed[-1]. N = 0 where the budget or this model's context leaves no room.
        `keep_drafting` is asked after each token of a chain, with its probability."""
        limits = self.model.config.max_context, self.cache.capacity
        budget = budget.clip(budget.nodes, min(limits) - len(committed) + 1)
        self._forwarded = 0
        self._depth = min(budget.depth, budget.nodes)
        if self._depth == 0:
            return Draft.empty(self.model.device)
        self.head.follow(committed)
        hidden, position = self._catch_up(committed)
        if self.width == 1:
            self._nodes = range(self._depth)
            return self._chain(hidden, position, self._depth, sampling, keep_drafting)
        draft, nodes = self._tree(hidden, position, budget, sampling)
        self._nodes = nodes.tolist()
        return draft

    def observe(self, path: list[int]) -> None:
        """Keep the exact K/V of accepted draft nodes, which the last level does not have. Fuzzy K/V is dropped: the
        next catch-up forwards those tokens in sequence, with the bonus token (bonus calibration)."""
        nodes = [node for row in path[1:] if (node := self._nodes[row - 1]) < self._forwarded]
        if self.parallel is not None and self.calibrate == "mismatch" and len(path) - 1 < self._depth:
            self.cache.truncate(self._calibrated)
        elif nodes and (self.parallel is None or self.calibrate != "every"):
            self.cache.commit(nodes)
        self._forwarded = 0

    def propose_static(self, start: Start, tokens: Tensor, budget: Budget, sampling: Sampling) -> Draft:
        """`propose` without a number on the host: `tokens` [R] are the last committed ones, root included, and `start`
        is where they stand; the columns before them are exact. All of R are forwarded, so that the shapes do not depend
        on how many were accepted; to the others of them it makes no difference."""
        rows = chain_rows(self.model, self.cache, len(tokens), start=start)
        hidden = forward(self.model, self.cache, rows, self._embed(self._known_rows(tokens))).hidden[-1:]
        position, end = rows.positions[-1:], Start(start.length, 0)
        if self.width == 1:
            return self._chain(hidden, position, min(budget.depth, budget.nodes), sampling, None, end)
        return self._tree(hidden, position, budget, sampling, end)[0]

    def first_static(self, start: Start, tokens: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """The first token of such a chain alone, [1], and its log-probability, [1]."""
        rows = chain_rows(self.model, self.cache, len(tokens), start=start)
        hidden = forward(self.model, self.cache, rows, self._embed(self._known_rows(tokens))).hidden[-1:]
        ids, scores = self.head.candidates(hidden, 1, sampling, rows.positions[-1:])
        return ids[:, 0], scores[:, 0]

    def step_static(self, start: Start, token: Tensor, n: int, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """What follows draft token n, `token` [1], in column start + n: likewise."""
        rows = chain_rows(self.model, self.cache, 1, n, start)
        ids, scores = self.head.candidates(self._forward(rows, token), 1, sampling, rows.positions)
        return ids[:, 0], scores[:, 0]

    def forget(self) -> None:
        """The last draft was not `propose`'s own."""
        self._forwarded, self._calibrated = 0, self.cache.exact_len

    def _catch_up(self, committed: list[int]) -> tuple[Tensor, Tensor]:
        """Forward the committed tokens that the cache lacks, root included; the root's hidden row [1, E] and its
        position [1]."""
        if len(committed) - self.cache.exact_len > CATCH_UP_ROWS:
            self.prefill(committed)
        tokens = self._known(committed[self.cache.exact_len :])
        rows = chain_rows(self.model, self.cache, len(tokens))
        hidden = forward(
            self.model, self.cache, rows, self._embed(torch.tensor(tokens, device=self.model.device))
        ).hidden[-1:]
        if self.cache.exact_len == self._calibrated:
            self._calibrated = len(committed)
        self.cache.exact_len = len(committed)
        return hidden, rows.positions[-1:]

    def _chain(
        self,
        hidden: Tensor,
        position: Tensor,
        depth: int,
        sampling: Sampling,
        keep_drafting: Callable[[float], bool] | None,
        start: Start | None = None,
    ) -> Draft:
        """`hidden` [1, E] is the root's row, `position` [1] its own."""
        tokens: list[Tensor] = []
        confidence: list[float] = []
        for n in range(depth):
            if keep_drafting is None:
                token = self.head.best(hidden, sampling, position)
            else:
                token, probability = self.head.confident(hidden, sampling, position)
                confidence.append(probability)
            tokens.append(token)
            if keep_drafting is not None and not keep_drafting(confidence[-1]):
                break
            if n + 1 == depth:  # the last token's K/V is left to the next catch-up
                break
            rows = chain_rows(self.model, self.cache, 1, n, start)
            hidden, position = self._forward(rows, token), rows.positions
        return Draft.chain(torch.cat(tokens), confidence=tuple(confidence))

    def _tree(
        self, hidden: Tensor, position: Tensor, budget: Budget, sampling: Sampling, start: Start | None = None
    ) -> tuple[Draft, Tensor]:
        """The draft, and which of the grown nodes it holds. Node j's K/V stands in column exact_len + j."""
        width, depth = self.width, budget.depth
        device = self.model.device
        ids, scores = self.head.candidates(hidden, width, sampling, position)
        level_tokens, level_scores = ids[0], scores[0]
        level_parents = torch.zeros(width, dtype=torch.int64, device=device)
        words = _own_bits(0, width, depth * width, device) if start is None else None
        tokens, parents, all_scores = [level_tokens], [level_parents], [level_scores]
        for level in range(1, depth):
            first = (level - 1) * width  # node of this level's first leaf
            if start is None:
                assert words is not None
                rows = self._level(level, words)
            else:
                rows = self._level_static(level, parents, start)
            hidden = self._forward(rows, level_tokens)
            ids, scores = self.head.candidates(hidden, width, sampling, rows.positions)
            level_scores, best = (level_scores.unsqueeze(1) + scores).flatten().topk(width)
            leaf = best // width
            level_tokens, level_parents = ids.flatten()[best], leaf + first + 1
            if words is not None:
                words = words[leaf] | _own_bits(level * width, width, depth * width, device)
            tokens.append(level_tokens)
            parents.append(level_parents)
            all_scores.append(level_scores)
        grown = Draft(torch.cat(tokens), torch.cat(parents))
        return top_nodes(grown, torch.cat(all_scores), budget.nodes)

    def _level(self, level: int, words: Tensor) -> Rows:
        """Where the leaves of a tree of `level` levels stand; node j is window column j."""
        column, first, end = self.cache.exact_len, (level - 1) * self.width, level * self.width
        return Rows(
            positions=self.model.positions[column + level - 1].expand(self.width),
            slots=self.cache.slot_of[column + first : column + end],
            kv_len=self.cache.lengths[column + end].unsqueeze(0),
            window=self.cache.lengths[end].unsqueeze(0),
            ancestors=words,
        )

    def _level_static(self, level: int, parents: list[Tensor], start: Start) -> Rows:
        """The same; the root, one column before `start`, is window column 0."""
        first, last = (level - 1) * self.width + 1, self.model.config.max_context - 1
        return self.cache.place(Start(start.length, start.back + 1), first, self.width, torch.cat(parents), last)

    def _forward(self, rows: Rows, tokens: Tensor) -> Tensor:
        """Draft tokens [T] -> their hidden rows [T, E]."""
        self._forwarded += len(tokens)
        if self.parallel is not None:
            return self.parallel.forward(rows, self._embed(tokens))
        return forward(self.model, self.cache, rows, self._embed(tokens)).hidden

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.model.embed_tokens(tokens)

    def _known(self, tokens: list[int]) -> list[int]:
        """Ids the draft's (unpadded) vocabulary lacks become its last one: a draft may be anything."""
        last = self.model.config.vocab_size - 1
        return [min(token, last) for token in tokens]

    def _known_rows(self, tokens: Tensor) -> Tensor:
        return tokens.clamp(max=self.model.config.vocab_size - 1)


def _own_bits(first: int, count: int, nodes: int, device: torch.device) -> Tensor:
    """Ancestor words [count, W] in which node first + i has its own bit alone."""
    node = torch.arange(first, first + count, device=device)
    words = torch.zeros(count, min(MAX_WORDS, -(-nodes // 64)), dtype=torch.int64, device=device)
    words[node - first, node // 64] = torch.ones_like(node) << (node % 64)
    return words


class SmallModel(Strategy):
    name = "draft"
    summary = "a small model drafts a chain or a tree"
    bundled_draft = "code-draft"

    def drafter(self, context: DraftContext) -> AutoregressiveDrafter:
        model = context.draft_model()
        return AutoregressiveDrafter(model, context.allocate(model), context.head(model), width=context.options.width)
