"""The drafter's interface to a round.

A draft is a tree of guesses under the root. Row 0 of the window is the root, draft token j is row j + 1, and its parent
is row parents[j] <= j. Chains, trees and tries of paths all have this form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # strategies/lookup.py builds on this file, and the command line imports it
    from torch import Tensor

    from specker.model.cache import KVCache
    from specker.model.decoder import Model
    from specker.model.sampling import Draws
    from specker.runtime.head import Head
    from specker.runtime.policy import Budget
    from specker.runtime.round import Round
    from specker.runtime.state import Sequence

CATCH_UP_ROWS = 64  # a longer catch-up is a prompt: prefill it


class Drafter:
    """All methods that a round calls; the defaults suit a drafter without a model."""

    model: Model | None = None
    cache: KVCache | None = None  # the target's cache if the target drafts; None without a model
    head: Head | None = None
    reads: bool = False
    """Whether `draft` reads device memory or the text on the host. If so, a round starts only after the previous one
    was collected."""

    @property
    def keeps_prefix(self) -> bool:
        """Whether a request that follows another may keep this drafter's K/V of their common beginning."""
        return self.model is None

    def announce(self, sequences: list[Sequence]) -> None:
        """Called before every round, also before those that draft nothing: tell the policies what the texts offer
        (`Policy.announced`)."""

    def behind(self, sequences: list[Sequence]) -> int:
        """Committed tokens that `catch_up` would prefill before a draft for the sequences in slots 0, 1, .."""
        return 0

    def catch_up(self, r: Round, slot: int) -> int:
        """Called before every draft: prefill what the draft cannot forward itself of the sequence in `slot`. Returns
        the number of tokens."""
        return 0

    def prefill(self, slot: int, text: list[int]) -> None:
        """Write the K/V of `text` but for its last token."""

    def room(self, length: int) -> int:
        """Draft tokens that may follow a text of `length` tokens; 0 or less if this drafter's context is full."""
        return 1 << 30

    def fixed(self, length: int, budget: Budget) -> bool:
        """Whether a draft for a text of `length` tokens can have fixed shapes and be placed by the device."""
        return False

    def draft(self, r: Round) -> None:
        """Write the drafts to r.window[:, 1:] and a tree's parents to r.state.parents; set r.size, r.drafted and
        r.tree."""
        raise NotImplementedError

    def observe(self, r: Round, slot: int, path: list[int]) -> None:
        """Called after a round: `path` lists the accepted rows of the sequence in `slot`. Its text has their tokens."""

    def watch(self, taps: dict[int, Tensor], draws: Draws, target: Tensor, positions: Tensor) -> tuple:
        """Compare each tapped layer's own token with the target's: (match bool, confidence), numpy [layers, rows]. Only
        for drafters whose policies set taps."""
        raise NotImplementedError

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

    def behind(self, sequences: list[Sequence]) -> int:
        return sum(self._missing(slot, s.text, False) for slot, s in enumerate(sequences))

    def catch_up(self, r: Round, slot: int) -> int:
        text = r.sequences[slot].text
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
