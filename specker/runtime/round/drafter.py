"""The drafter's interface to a round.

A draft is a tree of guesses under the root. Row 0 of the window is the root, draft token j is row j + 1, and its parent
is row parents[j] <= j. Chains, trees and tries of paths all have this form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from specker.runtime.control.stats import BlockStats

if TYPE_CHECKING:  # strategies/lookup.py builds on this file, and the command line imports it
    from collections.abc import Sequence

    from torch import Tensor

    from specker.model.cache import KVCache
    from specker.model.decoder import Final, Model
    from specker.runtime.control.policy import Budget
    from specker.runtime.round.lm_head import Head
    from specker.runtime.round.round import Round
    from specker.runtime.round.state import Request

CATCH_UP_ROWS = 64  # a longer catch-up is a prompt: prefill it


class Constraint(NamedTuple):
    """What a grammar made of a sequence's chain (runtime/round/constrain.py)."""

    drafted: int  # tokens of the drafter
    kept: int  # of them, those before the first that the grammar refused or replaced
    forced: int  # tokens after those that the grammar leaves no choice about


@dataclass(eq=False)
class Draft:
    """What a drafter has written to a round's window, and what it knows of it. `extend` and `goes_on` grow a chain
    token by token."""

    size: int = 0  # draft tokens of each sequence in the window
    counts: list[int] = field(default_factory=list)  # of them, each sequence's own; []: `size` for all
    tree: bool = False
    depth: int = 0  # tokens of the longest path
    confidence: list[list[float]] = field(default_factory=list)  # of each draft token, of every sequence
    found: list[BlockStats] = field(default_factory=list)  # of a diffusion drafter, one a sequence
    observed: bool = False  # whether `Drafter.observe` reads the tokens on the host
    hidden: Tensor | None = None  # [n, size, E], rows 0..size-1 at the exit of a self-drafted chain
    taps: dict[int, Tensor] = field(default_factory=dict)  # depth below that exit -> [n, size, E]
    nodes: Tensor | None = None  # [n, size], which grown node of a tree each draft token is; a leaf may be none of them
    scores: list[Tensor] = field(default_factory=list)  # for a trace: log-probabilities [n, ..] of tokens in order
    forwarded: int = 0  # grown nodes whose K/V stands behind the drafter's exact columns
    constrained: dict[int, Constraint] = field(default_factory=dict)  # by slot, what grammars made of chains

    @classmethod
    def of(cls, r: Round, tokens: list[list[int]], parents: list[list[int]]) -> Draft:
        """Write drafts made on the host: tokens and parents (rows) of each sequence, of any size. Shorter drafts are
        padded with a token that the target verifies like any other."""
        import torch

        n, N, state = len(tokens), max(map(len, tokens)), r.state
        tree = any(up != list(range(len(up))) for up in parents)
        draft = cls(N, [len(each) for each in tokens], tree, max(path_length(up) for up in parents))
        if N:
            device = state.window.device
            padded = [each + [0] * (N - len(each)) for each in tokens]
            state.window[:n, 1 : N + 1] = torch.tensor(padded, device=device)
        if N and tree:
            rows = [up + list(range(len(up), N)) for up in parents]
            state.parents[:n, :N] = torch.tensor(rows, device=device)
            state.parents[n:, :N] = 0
        return draft

    def count(self, slot: int) -> int:
        """Draft tokens of the sequence in `slot`, in the window."""
        if (constrained := self.constrained.get(slot)) is not None:
            return constrained.kept + constrained.forced
        return self.counts[slot] if self.counts else self.size

    def constrain(self, slot: int, kept: int, forced: int) -> None:
        """Note that a grammar left the first `kept` tokens of a chain and put `forced` tokens behind them."""
        self.constrained[slot] = Constraint(self.count(slot), kept, forced)

    def drafted(self, slot: int) -> int:
        """The tokens of the sequence in `slot` that the drafter drafted, with those that a grammar took out."""
        return self.constrained[slot].drafted if slot in self.constrained else self.count(slot)

    def forced(self, slot: int) -> int:
        """The tokens of the sequence in `slot` that a grammar put in."""
        return self.constrained[slot].forced if slot in self.constrained else 0

    def own(self, slot: int, path: list[int]) -> list[int]:
        """An accepted path up to the last row that the drafter drafted: a grammar's tokens teach nothing about it."""
        return path[: self.constrained[slot].kept + 1] if slot in self.constrained else path

    def extend(self, r: Round, head: Head, final: Final, positions: Tensor, out: Tensor) -> None:
        """Write the best candidate of each row [n, E] at `positions` [n] to `out` [n, 1]. If policies end drafts by
        confidence, keep its log-probability for `goes_on`: the chain is a tree of width 1 that grows."""
        from specker.kernels.round.grow import grow

        scored = r.traced and not r.fixed  # a replayed graph runs no Python
        if not r.confident and not scored:
            head.best(final, r.draws, positions, out[:, 0])
            return
        ids, logits, lse = head.ranked(final, 1, r.draws, positions)
        if scored:
            self.scores.append(logits - lse.unsqueeze(1))
        if not r.confident:
            out.copy_(ids)
            return
        scores = r.memory.out("confidence", r.n)
        scores = logits.new_empty(r.n) if scores is None else scores
        grow(ids, logits, lse, out, r.state.parents[:, :1], scores.unsqueeze(1), 0)
        r.memory.put("confidence", scores)

    def goes_on(self, r: Round) -> bool:
        """Whether at least half of the policies draft another token; reads `extend`'s log-probabilities on the host."""
        from specker.runtime.round.state import to_host

        scores = r.memory.get("confidence", r.n)
        if scores.is_cuda:
            import torch

            scores = to_host(scores)
            torch.cuda.current_stream().synchronize()
        return self.vote(r.requests, [math.exp(x) for x in scores.tolist()[: len(r.requests)]])

    def vote(self, requests: Sequence[Request], confidence: list[float]) -> bool:
        """Keep the confidence of each sequence's last token; return whether at least half of the policies draft on."""
        self.confidence.append(confidence)
        votes = sum(s.policy.keep_drafting(p) for s, p in zip(requests, confidence, strict=True))
        return 2 * votes >= len(requests)


def path_length(parents: Sequence[int]) -> int:
    """The length of a tree's longest path, in tokens."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return max(depths)


class Drafter:
    """All methods that a round calls; the defaults suit a drafter without a model."""

    taps: tuple[int, ...] = ()
    """Depths of the target whose hidden rows this drafter may read, of prompts (`prefilled`) and rounds (`reads`)."""

    ahead: int = 1
    """With `taps`: a column of this drafter's cache depends on so many tokens after it."""

    model: Model | None = None
    cache: KVCache | None = None  # the target's cache if the target drafts; None without a model
    head: Head | None = None
    synchronous: bool = False
    """Whether `draft` reads device memory or the text on the host. If so, a round starts only after the previous one
    was collected."""

    @property
    def keeps_prefix(self) -> bool:
        """Whether a request that follows another may keep this drafter's K/V of their common beginning."""
        return self.model is None

    def announce(self, requests: list[Request]) -> None:
        """Called before every round, also before those that draft nothing: tell the policies what the texts offer
        (`Policy.announced`)."""

    def behind(self, requests: list[Request]) -> int:
        """Committed tokens that `catch_up` would prefill before a draft for the requests in slots 0, 1, .."""
        return 0

    def catch_up(self, r: Round, slot: int) -> int:
        """Called before every draft: prefill what the draft cannot forward itself of the sequence in `slot`. Returns
        the number of tokens."""
        return 0

    def advance(self, requests: list[Request], most: int) -> int:
        """Prefill up to `most` of the tokens that `behind` counts. Returns their number."""
        return 0

    def prefill(self, slot: int, text: list[int]) -> None:
        """Write the K/V of `text` but for its last token."""

    def left(self, length: int) -> int:
        """Draft tokens that may follow a text of `length` tokens; 0 or less if this drafter's context is full."""
        return 1 << 30

    def fixed(self, length: int, budget: Budget) -> bool:
        """Whether a draft for a text of `length` tokens can have fixed shapes and be placed by the device."""
        return False

    def draft(self, r: Round) -> Draft:
        """Write the drafts to r.window[:, 1:] and a tree's parents to r.state.parents."""
        raise NotImplementedError

    def observe(self, r: Round, slot: int, path: list[int]) -> None:
        """Called after a round: `path` lists the accepted rows of the sequence in `slot`. Its text has their tokens."""

    def reads(self, budget: Budget) -> tuple[int, ...]:
        """The depths, of `taps`, whose hidden rows a round of this shape keeps for `learn` (`Round.tapped`) and for the
        next draft (`State.taps`)."""
        return self.taps

    def accepted(self, r: Round) -> None:
        """Called after the launch of acceptance, if rows were read: launch what the next draft needs of them, where
        shapes are fixed. The host does not yet know the round's tokens."""

    def prefilled(self, slot: int, request: Request, first: int, rows: dict[int, Tensor]) -> None:
        """Called after each chunk of a drafting request's prompt, if there are `taps`: depth -> [count, E], the hidden
        rows of the target at the text's columns first, first + 1, .. `slot`: where the request is until its prompt is
        prefilled."""

    def learn(self, r: Round, paths: list[list[int]]) -> None:
        """Called after a round in which rows were read (`reads`), when all texts have grown. paths: the accepted rows
        of each request."""

    def move(self, source: int, target: int) -> None:
        """The sequence in slot `source` moves to slot `target`; its K/V has moved."""

    def reset(self, slot: int) -> None:
        """Forget the sequence in `slot`; its K/V was released."""


class ModelDrafter(Drafter):
    """A drafter with a model and a cache of its own. Each round forwards the committed tokens that the cache lacks."""

    model: Model
    cache: KVCache
    head: Head

    def __init__(self, model: Model, cache: KVCache, head: Head, depth: int):
        """`depth`: length of the longest draft."""
        self.model, self.cache, self.head = model, cache, head
        self.repeated = depth + 1  # committed tokens that a round of fixed shape forwards
        self.limit = min(model.config.max_context, cache.capacity)

    def behind(self, requests: list[Request]) -> int:
        return sum(self._missing(slot, s.text, False) for slot, s in enumerate(requests))

    def advance(self, requests: list[Request], most: int) -> int:
        for slot, request in enumerate(requests):
            before = self.cache.exact_len[slot]
            if self._missing(slot, request.text, False) and before < len(request.text) - 1:  # a draft forwards the root
                self.prefill(slot, request.text[: before + most + 1])
                return self.cache.exact_len[slot] - before
        return 0

    def catch_up(self, r: Round, slot: int) -> int:
        text = r.requests[slot].text
        if self._missing(slot, text, r.fixed) == 0:
            return 0
        before = self.cache.exact_len[slot]
        self.prefill(slot, text)
        return self.cache.exact_len[slot] - before

    def _missing(self, slot: int, text: list[int], fixed: bool) -> int:
        """The tokens to prefill before a draft: a prompt, or more than a draft forwards. The drafter's first draft
        prefills the prompt, so a text without drafts costs nothing."""
        known = self.cache.exact_len[slot]
        missing = len(text) - known
        return missing if not known or missing > (self.repeated if fixed else CATCH_UP_ROWS) else 0

    def prefill(self, slot: int, text: list[int]) -> None:
        from specker.model.decoder import prefill

        if len(text) <= self.model.config.max_context:
            prefill(self.model, self.cache, self.known(text[self.cache.exact_len[slot] : -1]), slot=slot)

    def fixed(self, length: int, budget: Budget) -> bool:
        """A round of fixed shape forwards `repeated` tokens: the text needs as many, and the context needs room for a
        draft after a pending round."""
        return self.repeated <= length <= self.model.config.max_context - 2 * self.repeated

    def exact_after_fixed(self, length: int) -> int:
        """The exact columns after a draft of fixed shape: those before the rows of the next one."""
        return max(0, min(length, self.limit) - self.repeated)

    def known(self, tokens: list[int]) -> list[int]:
        """Replace ids outside the draft's vocabulary by its last id. That can cost acceptance, not correctness."""
        last = self.model.config.vocab_size - 1
        return [min(token, last) for token in tokens]
