"""Strategy `lookup`: copies the draft from the text (prompt lookup decoding, Saxena 2023; LLMA, arXiv 2304.04487). It
needs no second model.

The draft continues the longest recent suffix of the text that occurred before. With n tokens of suffix,

    draft = text[p : p + k]     p = the latest position with text[p - n : p] = text[-n:], for the largest possible n

A tree takes the latest occurrences with different continuations, longest suffix first, and merges common prefixes.

The published method always drafts the same k. But a match of one token is right in a third of the cases, one of eight
tokens in four of five, and a wrong token costs its row in the verify pass. Policy `auto` takes the k with the most
expected tokens for its measured cost (choose.py), or none. With a_n the share of right tokens after matches of n
tokens, a draft of k tokens is expected to commit

    E(k) = 1 + a_n + .. + a_n^k
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from specker.fields import check_fields, opt, option
from specker.options import Options
from specker.runtime.control.auto import ENGINE, TEXT, Share, shorter
from specker.runtime.control.policy import AUTO, CONFIDENT, LENGTHS, MAX_NODES, Budget, Outcome, Policy
from specker.runtime.round.drafter import Draft, Drafter, Offer
from specker.runtime.strategies.base import DraftContext, Plan, PolicyContext, Strategy

if TYPE_CHECKING:
    from specker.runtime.round.batch import Batch
    from specker.runtime.round.state import Request

LENGTH = 8  # tokens of a draft chain, for policies that do not choose it
NOTHING = Share(TEXT)  # the counts of a match that was never tried
# The a_n that a text starts with, for n = 1, 2, ..; the last one applies to all longer matches.
RATES = (0.3, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.8)


@dataclass(frozen=True)
class LookupOptions:
    ngram_most: int = opt(8, "longest suffix of the text to look for", least=1, most=64)
    ngram_least: int = opt(1, "shortest suffix to look for", least=1, most=64)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.ngram_least > self.ngram_most:
            raise ValueError(
                f"{option('ngram_least')} must be at most {option('ngram_most')}, got {self.ngram_least} and "
                f"{self.ngram_most}"
            )


@dataclass
class Index:
    """The end positions of every n-gram of one text; grows with the text."""

    least: int
    most: int
    ends: dict[tuple[int, ...], list[int]] = field(default_factory=dict)  # n-gram -> positions after it, ascending
    seen: int = 0  # tokens whose n-grams are indexed

    def follow(self, text: list[int]) -> None:
        """Index the n-grams that end before the end of the text: a suffix must not find itself."""
        for end in range(max(self.seen, self.least), len(text)):
            for n in range(self.least, min(self.most, end) + 1):
                self.ends.setdefault(tuple(text[end - n : end]), []).append(end)
        self.seen = max(self.seen, len(text))

    def match(self, text: list[int]) -> int:
        """The length of the longest suffix that occurred before; 0 if none did."""
        lengths = range(min(self.most, len(text) - 1), self.least - 1, -1)
        return next((n for n in lengths if tuple(text[-n:]) in self.ends), 0)

    def continuations(self, text: list[int], length: int) -> Iterator[tuple[int, ...]]:
        """Up to `length` tokens after each earlier occurrence of the text's suffix: longest suffix first, then latest
        occurrence first."""
        for n in range(min(self.most, len(text) - 1), self.least - 1, -1):
            for end in reversed(self.ends.get(tuple(text[-n:]), ())):
                yield tuple(text[end : end + length])


class NgramPolicy(Policy):
    """Policy `auto` for copied text: a_n by the length of the match, in this text and in the engine's earlier ones."""

    may_skip_drafting = copies = True

    def __init__(self, earlier: dict[int, Share], size: Budget):
        """`earlier`: the engine's counts, by the length of a match. `size`: the longest draft."""
        self.earlier = earlier
        self.shares: dict[int, Share] = {}
        lengths = (*(n for n in LENGTHS if n < size.depth), size.depth)
        self.shapes = tuple(replace(size, nodes=n, depth=n) for n in lengths)
        self.matched = self.available = 0

    def announced(self, matched: int, available: int) -> None:
        self.matched, self.available = matched, available

    def budgets(self) -> Sequence[Budget]:
        """Drafts up to the number of tokens that can be copied."""
        if not self.matched:
            return ()
        enough = next((i for i, shape in enumerate(self.shapes) if shape.depth >= self.available), len(self.shapes))
        return self.shapes[: enough + 1]

    def trial(self, budget: Budget) -> Budget:
        return shorter(self.shapes, budget)

    def rate_of(self, matched: int) -> float:
        """a_n of the module's docstring, for n = `matched`."""
        prior = self.earlier.get(matched, NOTHING).mean(RATES[min(matched, len(RATES)) - 1])
        return self.shares.get(matched, NOTHING).mean(prior)

    def expected(self, budget: Budget) -> float:
        if not self.matched:
            return 1.0
        a, k = self.rate_of(self.matched), min(budget.depth, self.available)
        return k + 1.0 if a == 1 else (1 - a ** (k + 1)) / (1 - a)

    def worth(self, price: float, confidence: Sequence[float]) -> int:
        """The largest k with a_n^k of at least the price."""
        a = self.rate_of(self.matched) if self.matched else 0.0
        if a >= 1 or price <= 0:
            return MAX_NODES
        return int(math.log(price) / math.log(a)) if a > 0 and price < 1 else 0

    def observe(self, outcome: Outcome) -> None:
        if outcome.drafted and self.matched:
            right = len(outcome.path) - 1
            seen = min(right + 1, outcome.drafted)  # the tokens after a wrong one are not compared
            for shares, decay in ((self.shares, TEXT), (self.earlier, ENGINE)):
                shares.setdefault(self.matched, Share(decay)).add(right, seen)


class LookupDrafter(Drafter):
    synchronous = True  # a draft needs the tokens of the previous round

    def __init__(self, options: LookupOptions, width: int):
        self.options, self.width = options, width
        self._indices: dict[Request, Index] = {}

    def prepare(self, requests: list[Request]) -> Offer:
        self._follow(requests)
        matches = []
        for request in requests:
            index, text = self._indices[request], request.token_ids
            matched = index.match(text)
            longest = next(index.continuations(text, MAX_NODES), ()) if matched else ()
            matches.append((matched, len(longest)))
        return Offer(matches=matches, fixes=lambda budget: True)

    def _follow(self, requests: list[Request]) -> None:
        """Index the texts of the batch."""
        new = Index(self.options.ngram_least, self.options.ngram_most)
        self._indices = {r: self._indices.get(r) or replace(new, ends={}) for r in requests}
        for request, index in self._indices.items():
            index.follow(request.token_ids)

    def propose(self, batch: Batch) -> Draft:
        """Draft for all sequences. A text without a match drafts nothing; shorter drafts are padded."""
        self._follow(batch.requests)
        depth = min(batch.budget.depth, batch.budget.nodes)
        found = [self._tree(sequence, depth, batch.budget.nodes) for sequence in batch.requests]
        return Draft.of(batch, [tokens for tokens, _ in found], [parents for _, parents in found])

    def _tree(self, sequence: Request, depth: int, nodes: int) -> tuple[list[int], list[int]]:
        """The tokens and parents (rows) of a sequence's draft."""
        text, index = sequence.token_ids, self._indices[sequence]
        row_of: dict[tuple[int, ...], int] = {(): 0}
        tokens: list[int] = []
        parents: list[int] = []
        paths = 0
        for path in index.continuations(text, depth):
            known = path in row_of
            for n in range(1, len(path) + 1):
                if path[:n] not in row_of and len(tokens) < nodes:
                    tokens.append(path[n - 1])
                    parents.append(row_of[path[: n - 1]])
                    row_of[path[:n]] = len(tokens)
            paths += not known
            if paths == self.width or len(tokens) == nodes:
                break
        return tokens, parents


class Lookup(Strategy):
    name = "lookup"
    summary = "copies what followed an earlier occurrence of the last tokens"
    paper = "prompt lookup (Saxena 2023), LLMA (2304.04487)"
    options = LookupOptions
    no_head = "lookup runs no draft model, so it has no draft head"

    def check(self, options: Options) -> None:
        if options.policy in CONFIDENT:
            policy = option("policy", options.policy)
            raise ValueError(f"{policy} needs the confidence of a model, but lookup runs none")

    def drafter(self, context: DraftContext) -> LookupDrafter:
        return LookupDrafter(context.options.own, context.options.width)

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
