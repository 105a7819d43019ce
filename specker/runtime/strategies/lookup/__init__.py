"""Strategy `lookup`: copies the draft from known texts (prompt lookup decoding, Saxena 2023; LLMA, arXiv 2304.04487;
from other texts, SuffixDecoding, arXiv 2411.04975). It needs no second model.

The draft continues the longest recent suffix of the text that occurred before. With n tokens of suffix,

    draft = text[p : p + k]     p = the latest position with text[p - n : p] = text[-n:], for the largest possible n

where `text` is the text itself, what the request predicts of it, one that the engine ended earlier, or a file of the
user. Where several positions have the longest suffix, the draft follows most of them at each token (cpu/suffixes.py).
A tree merges common prefixes.

The published method always drafts the same k. But a match of one token is right in a third of the cases, one of eight
tokens in four of five, and a wrong token costs its row in the verify pass. Policy `auto` takes the k with the most
expected tokens for its measured cost (choose.py), or none. With a_n the share of right tokens after matches of n
tokens in this source, a draft of k tokens is expected to commit

    E(k) = 1 + a_n + a_n a_(n+1) + .. + a_n .. a_(n+k-1)

since each right token makes the match longer by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from specker.fields import check_fields, opt, option
from specker.options import Options
from specker.runtime.control.auto import ENGINE_DECAY, TEXT_DECAY, Share, shorter
from specker.runtime.control.policy import (
    AUTO,
    CONFIDENT,
    LENGTHS,
    OWN,
    PREDICTION,
    Budget,
    Match,
    Means,
    Outcome,
    Policy,
)
from specker.runtime.strategies.base import DraftContext, Plan, PolicyContext, Strategy

if TYPE_CHECKING:
    from specker.runtime.strategies.lookup.copy_drafter import LookupDrafter

LENGTH = 8  # tokens of a draft chain, for policies that do not choose it
# Tokens of the shortest and of the longest suffix to look for. Policy `auto` learns what a match of each length is
# worth, so short ones do no harm, and copies after eight tokens are right as often as after seven (`RATES`).
SUFFIXES = 1, 8
MEMORY = 64 << 20  # bytes for ended texts, and for a corpus: nearly two million tokens
UNTRIED = Share(TEXT_DECAY)  # the counts of a match that was never tried
# The a_n that a text starts with, for n = 1, 2, ..; the last one applies to all longer matches.
RATES = (0.3, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.8)
OTHERS = 2  # a match in another text is worth as much as one that is so many tokens shorter in the text itself
LONG = 8  # matches of so many tokens or more are counted by powers of 2


@dataclass(frozen=True)
class LookupOptions:
    lookup_share: str = opt(
        "on", "also copy from the texts that this engine ended before, or not (off)", choices=("on", "off")
    )
    lookup_corpus: str | None = opt(
        None, "also copy from these files: a text, JSON lines with text, or a folder of them", "FILE|DIR"
    )
    lookup_file: str | None = opt(
        None, "keep the ended texts in this file, which is read at the start; only its owner can read it", "FILE"
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.lookup_corpus is not None and not Path(self.lookup_corpus).expanduser().exists():
            raise ValueError(f"{option('lookup_corpus', self.lookup_corpus)}: there is no such file or folder")
        if self.lookup_file is not None and self.lookup_share == "off":
            raise ValueError(f"{option('lookup_file')} keeps texts to copy, but {option('lookup_share', 'off')}")


class Lookup(Strategy):
    name = "lookup"
    summary = "copies what followed an earlier occurrence of the last tokens"
    paper = "prompt lookup (Saxena 2023), LLMA (2304.04487), SuffixDecoding (2411.04975)"
    options = LookupOptions
    no_head = "lookup runs no draft model, so it has no draft head"

    def check(self, options: Options) -> None:
        if options.policy in CONFIDENT:
            policy = option("policy", options.policy)
            raise ValueError(f"{policy} needs the confidence of a model, but lookup runs none")

    def drafter(self, context: DraftContext) -> LookupDrafter:
        """Raises ValueError for a corpus that is not text or too large, and for a file of kept texts that is none or of
        another model."""
        from specker.runtime.strategies.lookup.copy_drafter import LookupDrafter
        from specker.runtime.strategies.lookup.corpus import read
        from specker.runtime.strategies.lookup.text_file import TextFile

        o, target, longest = context.options, context.target, context.depth(self)
        file = None if o.own.lookup_file is None else TextFile(o.own.lookup_file, target)
        return LookupDrafter(o.own.lookup_share == "on", o.width, longest, read(o.own, target), file)

    def auto(self, context: PolicyContext, size: Budget) -> Policy:
        assert context.history is not None
        return NgramPolicy(context.history.matches, size)

    def plan(self, context: PolicyContext) -> Plan:
        """A continuation may be short, so the warm-up verifies drafts of every size."""
        largest = super().plan(context).largest
        sizes = tuple(range(largest.nodes + 1))
        return Plan(largest, (), sizes, sizes)

    def size(self, options: Options) -> Budget:
        if options.tree is None and options.draft_tokens is None and options.policy != AUTO:
            return Budget(LENGTH, LENGTH)
        return super().size(options)


class NgramPolicy(Policy):
    """Policy `auto` for copied text: a_n by source and by the length of the match, in this text and in the engine's
    earlier ones. Of several sources it copies from the one that promises most tokens."""

    may_skip_drafting = copies = True

    def __init__(self, earlier: dict[tuple[str, int], Share], size: Budget):
        """`earlier`: the engine's counts, by source and length of a match. `size`: the longest draft."""
        self.earlier = earlier
        self.shares: dict[tuple[str, int], Share] = {}
        lengths = (*(n for n in LENGTHS if n < size.depth), size.depth)
        self.shapes = tuple(replace(size, nodes=n, depth=n) for n in lengths)
        self.matched = self.available = 0
        self._expected = [1.0]  # E(0), E(1), .. of the match

    def announced(self, matches: Sequence[Match]) -> None:
        most = self.shapes[-1].depth
        expected = [self.expected(match, min(most, match.available)) for match in matches]
        promised = [each[-1] for each in expected]
        best = promised.index(max(promised))  # the first of equals
        self.matched, self.available, self.source = matches[best]
        self._expected = expected[best]

    def budgets(self) -> Sequence[Budget]:
        """Drafts up to the number of tokens that can be copied."""
        if not self.matched:
            return ()
        enough = next((i for i, shape in enumerate(self.shapes) if shape.depth >= self.available), len(self.shapes))
        return self.shapes[: enough + 1]

    def trial(self, budget: Budget) -> Budget:
        return shorter(self.shapes, budget)

    def rate_of(self, matched: int, source: str = OWN) -> float:
        """a_n of the docstring above, for n = `matched`."""
        key = source, counted(matched)
        worth = matched if source in (OWN, PREDICTION) else max(1, matched - OTHERS)
        prior = self.earlier.get(key, UNTRIED).mean(RATES[min(worth, len(RATES)) - 1])
        return self.shares.get(key, UNTRIED).mean(prior)

    def expected(self, match: Match, most: int) -> list[float]:
        """E(0) .. E(most) of the docstring above; [1] without a match."""
        out, joint, key, a = [1.0], 1.0, 0, 0.0
        for n in range(match.matched, match.matched + most if match.matched else 0):
            if counted(n) != key:
                key, a = counted(n), self.rate_of(n, match.source)
            joint *= a
            out.append(out[-1] + joint)
        return out

    def means(self, budget: Budget) -> Means:
        copied = min(budget.depth, len(self._expected) - 1)
        return Means(self._expected[copied], copied, copied)

    def chances(self, count: int, confidence: Sequence[float]) -> list[float]:
        known = [b - a for a, b in pairwise(self._expected[: count + 1])]
        return [*known, *[0.0] * (count - len(known))]

    def observe(self, outcome: Outcome) -> None:
        if not outcome.drafted or not self.matched:
            return
        right = len(outcome.path) - 1
        seen = min(right + 1, outcome.drafted)  # the tokens after a wrong one are not compared
        for key, tokens in groupby(range(seen), lambda j: counted(self.matched + j)):
            compared = [j < right for j in tokens]
            for shares, decay in ((self.shares, TEXT_DECAY), (self.earlier, ENGINE_DECAY)):
                shares.setdefault((self.source, key), Share(decay)).add(sum(compared), len(compared))


def counted(matched: int) -> int:
    """The length under which matches of `matched` tokens are counted."""
    return matched if matched < LONG else 1 << (matched.bit_length() - 1)
