"""The interface of a drafter, and the draft that it proposes.

A draft is a tree of guesses under the root. Row 0 of the window is the root, draft token j is row j + 1, and its parent
is row parents[j] <= j. Chains, trees and tries of paths all have this form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from specker.runtime.control.policy import WHOLE, Offer, Outcome, Reading

if TYPE_CHECKING:  # strategies/lookup.py builds on this file, and the command line imports it
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from specker.model.cache import KVCache
    from specker.model.decoder import Final, Model
    from specker.runtime.control.policy import Budget
    from specker.runtime.round.batch import Batch
    from specker.runtime.round.lm_head import LMHead
    from specker.runtime.round.state import Request


class Constraint(NamedTuple):
    """How a grammar edited a sequence's chain (constrain.py)."""

    drafted: int  # tokens of the drafter
    kept: int  # of them, those before the first that the grammar refused or replaced
    forced: int  # tokens after those that the grammar leaves no choice about


@dataclass(frozen=True)
class Resume:
    """The target has already run its first layers on a draft, so the verify pass begins behind them."""

    layer: int  # number of these layers
    hidden: Tensor  # [n, size, E], their output for rows 0..size-1
    aux: dict[int, Tensor] = field(default_factory=dict)  # depth below `layer` -> [n, size, E], if the drafter reads it

    def first(self, size: int) -> Resume | None:
        """For the first `size` tokens of the draft."""
        aux = {depth: rows[:, :size] for depth, rows in self.aux.items()}
        return Resume(self.layer, self.hidden[:, :size], aux) if size else None

    @staticmethod
    def memory(batch: Batch) -> Tensor:
        """Where batches of fixed shape keep `hidden`, [n, R, E]."""
        hidden = batch.state.hidden
        return hidden.view(-1, batch.window.shape[1], hidden.shape[-1])[: batch.n]


@dataclass(eq=False)
class Draft:
    """What a drafter has written to a round's window, and what it knows of it. `extend` and `goes_on` grow a chain
    token by token."""

    size: int = 0  # draft tokens of each sequence in the window
    draft_lengths: list[int] = field(default_factory=list)  # per sequence; []: every sequence has `size`
    tree: bool = False
    depth: int = 0  # tokens of the longest path
    idle: Mapping[int, str] = field(default_factory=dict)
    """Slots for which the draft means nothing, and why: ENDED, the text has no room in the drafter's context, or
    BEHIND, the drafter has not read it (reasons.py)."""
    confidence: list[list[float]] = field(default_factory=list)  # of each draft token, of every sequence
    observed: str = ""  # what `Drafter.accept` reads on the host: "draft", the tokens, or "search" (`State.search`)
    resume: Resume | None = None  # of a chain that the target's first layers drafted
    nodes: Tensor | None = None  # [n, size], which grown node of a tree each draft token is; a leaf may be none of them
    scores: list[Tensor] = field(default_factory=list)  # for a trace: log-probabilities [n, ..] of tokens in order
    forwarded: int = 0  # grown nodes whose K/V stands behind the drafter's exact columns
    constrained: dict[int, Constraint] = field(default_factory=dict)  # by slot, what grammars made of chains
    tokens: list[list[int]] = field(default_factory=list)  # of each sequence, if the host made them

    @property
    def first(self) -> Draft:
        """What the round's drafter wrote to the first rows, without another drafter's chain (branches.py)."""
        return self

    @classmethod
    def of(cls, batch: Batch, tokens: list[list[int]], parents: list[list[int]]) -> Self:
        """Write drafts made on the host: tokens and parents (rows) of each sequence, of any size. Shorter drafts are
        padded with a token that the target verifies like any other; in trees under the root, since a recurrent layer
        allows no long path."""
        import torch

        n, N, state = len(tokens), max(map(len, tokens)), batch.state
        tree = any(up != list(range(len(up))) for up in parents)
        draft = cls(N, [len(each) for each in tokens], tree, max(path_length(up) for up in parents), tokens=tokens)
        if N:
            device = state.window.device
            padded = [each + [0] * (N - len(each)) for each in tokens]
            state.window[:n, 1 : N + 1] = torch.tensor(padded, dtype=torch.int64, device=device)
        if N and tree:
            rows = [up + [0] * (N - len(up)) for up in parents]
            state.parents[:n, :N] = torch.tensor(rows, dtype=torch.int64, device=device)
            state.parents[n:, :N] = 0
        return draft

    def count(self, slot: int) -> int:
        """Draft tokens of the sequence in `slot`, in the window."""
        if (constrained := self.constrained.get(slot)) is not None:
            return constrained.kept + constrained.forced
        if slot in self.idle:
            return 0
        return self.draft_lengths[slot] if self.draft_lengths else self.size

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

    def outcome(self, slot: int, path: list[int], tokens: list[int]) -> Outcome:
        """What an accepted path, and the tokens that the round committed, tell of a sequence's draft."""
        confidence = [] if slot in self.idle else [of_token[slot] for of_token in self.confidence]
        return Outcome(self.drafted(slot), self.own(slot, path), confidence, self.note(slot), self.tree)

    def note(self, slot: int) -> Any:
        """What the strategy's own policy, its statistics and a trace are told of a sequence's draft; None: nothing."""
        return None

    def extend(self, batch: Batch, head: LMHead, final: Final, positions: Tensor, out: Tensor) -> None:
        """Write the best candidate of each row [n, E] at `positions` [n] to `out` [n, 1]. If policies end drafts by
        confidence, keep its log-probability for `goes_on`: the chain is a tree of width 1 that grows."""
        from specker.kernels.round.grow import grow

        scored = batch.traced and not batch.fixed  # a replayed graph runs no Python
        if not batch.confident and not scored:
            head.best(final, batch.draws, positions, out[:, 0])
            return
        ids, logits, lse = head.ranked(final, 1, batch.draws, positions)
        if scored:
            self.scores.append(logits - lse.unsqueeze(1))
        if not batch.confident:
            out.copy_(ids)
            return
        scores = batch.memory.out("confidence", batch.n)
        scores = logits.new_empty(batch.n) if scores is None else scores
        grow(ids, logits, lse, out, batch.state.parents[:, :1], scores.unsqueeze(1), 0)
        batch.memory.put("confidence", scores)

    def goes_on(self, batch: Batch) -> bool:
        """Whether the policies draft another token; reads `extend`'s log-probabilities on the host."""
        from specker.runtime.round.state import to_host

        scores = batch.memory.get("confidence", batch.n)
        if scores.is_cuda:
            import torch

            scores = to_host(scores)
            torch.cuda.current_stream().synchronize()
        return self.judge(batch.requests, [math.exp(x) for x in scores.tolist()[: len(batch.requests)]])

    def judge(self, requests: Sequence[Request], confidence: list[float]) -> bool:
        """Keep the confidence of each sequence's last token; return whether another token of each is worth its price,
        on average by policy. `idle` slots do not count: their tokens were computed from columns that nobody wrote, and
        may be NaN."""
        self.confidence.append([0.0 if slot in self.idle else p for slot, p in enumerate(confidence)])
        slots = [slot for slot in range(len(requests)) if slot not in self.idle]
        return sum(requests[slot].policy.next_worth(confidence[slot]) for slot in slots) >= len(slots)

    def end(self, batch: Batch, scores: Tensor, confidence: Tensor) -> None:
        """End chains that were drafted in one pass where the policies end them. scores [n, size]: the tokens'
        log-probabilities, for a trace. confidence [n, size]: how likely the target is to accept each."""
        if batch.confident:
            for step, each in enumerate(confidence.T.tolist(), 1):
                self.size = self.depth = step
                if not self.judge(batch.requests, each[: len(batch.requests)]):
                    break
        if batch.traced:
            self.scores.append(scores[:, : self.size])


def path_length(parents: Sequence[int]) -> int:
    """The length of a tree's longest path, in tokens."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return max(depths)


class Accepted(NamedTuple):
    """What the host knows of a round that was collected; the texts have grown by its tokens."""

    paths: list[list[int]]  # accepted rows of each sequence, row 0 (the root) first; []: its text did not grow
    observed: list[Any]  # of each sequence's draft, what `Draft.observed` says
    seconds: dict[str, float]  # by stage; a drafter that works for its policy adds what that takes as "watch"
    usual: float  # seconds that such a round usually takes, if hidden rows were read


class Drafter:
    """The seven methods that a round and the draft runner call, and what a drafter declares. The defaults suit a
    drafter without a model: it only has to `propose`."""

    model: Model | None = None
    cache: KVCache | None = None  # the target's cache if the target drafts; None without a model
    head: LMHead | None = None
    keeps_prefix: bool = True
    """Whether a request that follows another may keep this drafter's K/V of their common beginning."""
    synchronous: bool = False
    """Whether `propose` reads device memory or the texts on the host. If so, a round starts only after the previous one
    was collected."""
    aux_layers: tuple[int, ...] = ()
    """Depths of the target whose hidden rows this drafter may read, of prompts (`read`) and of rounds (`reads`)."""
    tokens_ahead: int = 1
    """With `aux_layers`: a column of this drafter's cache depends on so many tokens after it."""

    source: str = "model"
    """What drafts, in a trace: "model" (a draft model), "head" (a head that reads the target) or "layers" (the target's
    first ones). Copies name their source themselves (`CopyStats`)."""
    needs_row: bool = False
    """Without a cache of its own: whether the first draft needs the target's row of the column before the root, so that
    a prefill computes at least this column."""

    @property
    def head_bytes(self) -> int:
        """Bytes of the LM head that a draft step of one row reads."""
        return 0 if self.head is None else self.head.weight.nbytes

    def reads(self, budget: Budget) -> tuple[int, ...]:
        """The depths, of `aux_layers`, whose hidden rows a round of this shape keeps for `accept` and for the next
        draft."""
        return self.aux_layers

    def prepare(self, requests: list[Request]) -> Offer:
        """Called before every round, also before those that draft nothing. requests: in slots 0, 1, .."""
        return Offer()

    def advance(self, requests: list[Request], reading: Reading = WHOLE, fixed: bool = False) -> int:
        """Prefill committed tokens that `propose` cannot forward itself before a draft, which may be `fixed`. A text
        that still lacks such tokens is idle in the draft (`Draft.idle`). Returns the number of tokens."""
        return 0

    def propose(self, batch: Batch) -> Draft:
        """Write the drafts to batch.window[:, 1:] and a tree's parents to batch.state.parents."""
        raise NotImplementedError

    def accept(self, batch: Batch, draft: Draft, accepted: Accepted) -> None:
        """Called after every round of requests that draft, also after one without a draft."""

    def accept_on_device(self, batch: Batch, draft: Draft) -> None:
        """The device's half, called after the launch of acceptance if hidden rows were read: launch what the next draft
        needs of them, where shapes are fixed. The host does not yet know the round's tokens."""

    def cache_ids(self, request: Request) -> list[int]:
        """The request's text as the drafter's own cache compares it with earlier ones (`Request.cache_ids`)."""
        return request.cache_ids

    def reads_prompt(self, request: Request, first: int, count: int) -> bool:
        """Whether `read` needs the hidden rows of the prompt's columns first .. first + count - 1."""
        return bool(self.aux_layers)

    def read(self, slot: int, request: Request, first: int, rows: dict[int, Tensor]) -> None:
        """Called after each chunk of a prompt of which hidden rows were read: depth -> [count, E], those of the columns
        first, first + 1, .. `slot`: where the request is until its prompt is prefilled."""

    def move(self, source: int, target: int) -> None:
        """The sequence in slot `source` moves to slot `target`; its K/V has moved."""

    def reset(self, slot: int) -> None:
        """Forget the sequence in `slot`; its K/V was released."""
